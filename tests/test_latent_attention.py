"""Latent attention (MLA): if this failed, a layout would train another model, or a cache lie.

test_families.py compares with transformers' DeepSeek models, test_sample.py their greedy tokens.
"""

import math

import golden_worker
import numpy as np
import pytest
import torch
from compare import assert_close
from latent_worker import FAULTS
from ranks import results_of
from test_golden import check_lines, distance, lines_of, reference

import trainer
from architecture import families, model_stats
from base.errors import UserError
from config import validation
from config.command_line import make_model
from config.schema import Layout, Training
from config.spelling import preset
from costs import hardware, memory_terms, time_terms
from costs.job import Job
from layers.attention import KeyValueCache
from model import Stage

SHAPE = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
SHAPE |= {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}


@pytest.mark.slow
def test_layouts_of_four_ranks_equal_the_single_rank_run(tmp_path):
    check_lines("latent", tmp_path)


@pytest.mark.slow
def test_a_gradient_that_tp_sums_never_or_twice_is_found(tmp_path):
    """Of the key that all heads share and of the latent, with and without sequence parallelism:
    the loss of one step is right, its gradient norm and the weights after it are not.
    """
    [*_, case] = lines_of("latent", tmp_path)[4]
    case = {name: value for name, value in case.items() if name != "tolerance"} | {"zero": 1}
    jobs = [
        case | {"sequence_parallel": split, "fault": fault}
        for split in (False, True)
        for fault in ("", *FAULTS)
    ]
    del case["sequence_parallel"]
    expected = reference(case)
    results = results_of("tests/latent_worker.py", 4, [{**job, "tp": 4} for job in jobs], tmp_path)
    for job, found in zip(jobs, results, strict=True):
        assert found["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-14)
        if job["fault"]:
            assert found["unequal"] or distance(found, expected) > 1e-4, job
            # With sequence parallelism the replicas stay equal: only the numbers show the mistake.
            assert not job["sequence_parallel"] or not found["unequal"]
        else:
            assert not found["unequal"]
            assert distance(found, expected) < 1e-12


# ---- Decoding ------------------------------------------------------------------------------------


def stage_of_one_rank(**changes) -> Stage:
    case = SHAPE | {"precision": "fp64", "init_std": 0.3} | changes
    state = trainer.build(validation.check(golden_worker.options(case), 1))
    [stage] = state.stages
    return stage


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": 10}, {"v_head_dim": 14}])
def test_tokens_one_by_one_are_the_whole_sample_at_once(changes):
    """The first five at once, then one at a time, by the latents of the tokens before."""
    stage = stage_of_one_rank(**changes)
    tokens = torch.randint(61, (1, 16))
    cache = KeyValueCache(16, None, torch.device("cpu"))
    with torch.no_grad():
        whole = stage.head.logits(stage.hidden_states(tokens))[:, 0]
        for first, last in [(0, 5), *((n, n + 1) for n in range(5, 16))]:
            cache.begin(last - first)
            logits = stage(tokens[:, first:last], None, cache)
            assert_close(logits[0], whole[last - 1], 1e-12, scale=whole.abs().max().item())


def test_the_cache_has_one_latent_and_one_rotary_key_for_all_heads():
    """kv_lora_rank + qk_rope_head_dim numbers for a token and layer."""
    stage = stage_of_one_rank()
    cache = KeyValueCache(16, None, torch.device("cpu"))
    kept = []
    extend = cache.extend

    def counted(layer, *tensors):
        kept.append(sum(t.numel() for t in tensors))
        return extend(layer, *tensors)

    cache.extend = counted
    cache.begin(7)
    with torch.no_grad():
        stage(torch.randint(61, (1, 7)), None, cache)
    assert kept == [7 * (12 + 4)] * 2


# ---- Files of transformers -----------------------------------------------------------------------


# The fields of DeepSeek-V2-Lite's config.json that change numbers, and Moonlight's.
LITE = {
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
MOONLIGHT = LITE | {
    "model_type": "deepseek_v3",
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 163840,
}


@pytest.mark.parametrize(
    ("config", "name"),
    [(LITE, "deepseek-v2-lite"), (MOONLIGHT, "moonlight-16b-a3b")],
    ids=["lite", "moonlight"],
)
def test_a_public_config_is_the_preset(config, name):
    options, lacks = families.from_config(config, "config.json")
    assert not lacks
    assert make_model(options, "config.json") == preset(name)
    assert families.unread(config, "config.json") == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; here it is sigmoid"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; here it is noaux_tc"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2; here it is 1"),
        ({"attention_bias": True}, "attention_bias is True; here it is False"),
        ({"rope_interleave": False}, "rope_interleave is False; here it is True"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8; here it is num_attention_heads"),
        ({"quantization_config": {"fmt": "e4m3"}}, "quantization_config is"),
    ],
)
def test_a_field_that_changes_numbers_is_refused_by_name(changes, sentence):
    _, lacks = families.from_config(MOONLIGHT | changes, "config.json")
    assert sentence in "; ".join(lacks)


def test_the_scores_grow_with_the_positions_as_deepseek_has_it():
    """With the numbers of DeepSeek-V2-Lite: m^2 for a factor of 40, which no layer has twice."""
    yarn = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
    yarn |= {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
    options, lacks = families.from_config(MOONLIGHT | {"rope_scaling": yarn}, "config.json")
    assert not lacks
    model = make_model(options, "config.json")
    m = 0.1 * 0.707 * math.log(40) + 1
    assert model.head_size / model.query_scalar == pytest.approx(m**4, rel=1e-12)
    assert model.rotary_scaling == "yarn:40:32:1:4096:1:1"
    written = families.to_config(model)["rope_parameters"]
    assert (written["mscale"], written["mscale_all_dim"]) == (0.707, 0.707)
    linear = {"type": "linear", "factor": 40.0, "mscale_all_dim": "much"}
    wrong = MOONLIGHT | {"rope_scaling": linear}
    with pytest.raises(UserError, match="mscale_all_dim and factor need numbers above 0"):
        families.from_config(wrong, "config.json")


def test_v2_refuses_groups_and_normalised_weights_by_name():
    changes = {"topk_method": "group_limited_greedy", "norm_topk_prob": True}
    _, lacks = families.from_config(LITE | changes, "config.json")
    assert "topk_method is 'group_limited_greedy'; here it is greedy" in lacks
    assert "norm_topk_prob is True; here it is False" in lacks


# ---- Counts and checks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": 10, "bias": True},
        {"q_lora_rank": 10, "experts": 4, "shared_ffn_hidden": 16, "first_dense_layers": 1},
    ],
)
def test_parameters_built_are_parameters_planned(changes):
    case = SHAPE | changes | {"pad_vocab_multiple": 1, "layers": 3}
    config = validation.check(golden_worker.options(case), 1)
    stages = trainer.build(config).stages
    buffers = (".router.bias", ".router.load")
    built = [p.spec for p in stages.parameters() if not p.spec.name.endswith(buffers)]
    count = sum(math.prod(spec.shape) for spec in built)
    assert count == model_stats.parameters(config.model)


# The models' cards: 15.7 and 16 billion parameters, 2.4 and 3 billion of them for a token.
@pytest.mark.parametrize(
    ("name", "count"), [("deepseek-v2-lite", 15_706_484_224), ("moonlight-16b-a3b", 15_960_111_936)]
)
def test_published_sizes(name, count):
    assert model_stats.parameters(preset(name)) == pytest.approx(count, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kv_lora_rank": 0}, r"qk_nope_head_dim\(6\) is of latent attention: give kv_lora_rank"),
        ({"v_head_dim": 0}, r"kv_lora_rank\(12\) needs a v_head_dim above 0"),
        ({"positions": "alibi"}, r"kv_lora_rank\(12\) needs positions rotary, not alibi"),
        ({"kv_heads": 4}, r"kv_lora_rank\(12\) needs kv_heads 8, not 4"),
        ({"head_size": 12}, r"kv_lora_rank\(12\) needs head_size 10, not 12"),
        ({"qk_norm": "head"}, r"kv_lora_rank\(12\) needs qk_norm none, not head"),
        ({"qkv_bias": True}, r"kv_lora_rank\(12\) needs qkv_bias False, not True"),
        ({"qk_rope_head_dim": 3}, "turn an even number of columns of a head, 2 or more"),
        ({"tp": 8, "heads": 4}, r"tp\(8\) does not divide heads\(4\)"),
    ],
)
def test_options_that_do_not_go_together_are_one_sentence(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        validation.check(golden_worker.options(SHAPE | changes), changes.get("tp", 1))


WIDE = {"hidden": 128, "heads": 4, "seq_length": 128, "kv_lora_rank": 48, "layers": 1}
WIDE |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16}


@pytest.mark.parametrize(
    "changes",
    [
        {"v_head_dim": 32},  # padded to the key's 48 columns
        {"v_head_dim": 48, "q_lora_rank": 40},
        {"v_head_dim": 64},  # queries and keys are padded
        {"v_head_dim": 32, "micro_batch_size": 2},
        {"v_head_dim": 32, "recompute": "selective"},
        {"v_head_dim": 48, "recompute": "selective"},
    ],
)
def test_a_block_keeps_what_the_plan_counts(changes):
    """Beside what a CPU's kernels keep and a GPU's do not: norms of several kernels, their root
    mean squares, and the kernel's sums of the softmax.
    """
    config = validation.check(golden_worker.options(SHAPE | WIDE | changes), 1)
    model = config.model
    [stage] = trainer.build(config).stages
    own = [*stage.parameters(), *stage.positions._rotary.tables]
    kept = {t.untyped_storage().data_ptr(): 0 for t in own}
    tensors = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        tensors.append(t)  # so that no other tensor gets its place
        kept.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())
        return t

    samples = config.layout.micro_batch_size
    x = torch.randn(128, samples, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        stage.blocks[0](x, None, None, stage.positions.rotary(None))
    normed = 2 * model.hidden + model.q_lora_rank + model.kv_lora_rank
    norms = 3 + bool(model.q_lora_rank)
    sums = 0 if config.layout.recompute == "selective" else model.heads
    beside = 4 * 128 * samples * (normed + norms + sums)
    job = Job(model, config.layout, config.training, hardware.load("a100-80"))
    assert sum(kept.values()) == memory_terms.kept_bytes(job) + beside


def test_what_tp_does_not_divide_is_whole_on_every_rank_of_the_plan():
    """The parameters of a tensor rank, from the shapes of a real stage."""
    case = SHAPE | {"q_lora_rank": 10, "tp": 4, "layers": 2, "pad_vocab_multiple": 1}
    model = golden_worker.options(case).model
    [stage] = trainer.build(validation.check(golden_worker.options(case | {"tp": 1}), 1)).stages
    blocks = [p for block in stage.blocks for p in block.parameters()]
    here = sum(p.numel() / (4 if p.spec.dim is not None else 1) for p in blocks)
    parts = memory_terms.Parts(*(np.array([n]) for n in (2, False, False, False)))
    job = Job(model, Layout(tp=4, dp=1), Training(), hardware.load("a100-80"))
    assert memory_terms.held_parameters(job, parts) == here


def test_the_products_that_are_priced_are_those_of_the_block():
    """Weights of a tensor rank with sequence parallelism, by the tokens that it multiplies."""
    model = golden_worker.options(SHAPE | {"q_lora_rank": 10, "ffn_hidden": 64}).model
    for split in (False, True):
        layout = Layout(tp=2, dp=1, sequence_parallel=split)
        job = Job(model, layout, Training(), hardware.load("a100-80"))
        flops = sum(2 * int(n) * outs * ins for n, outs, ins, _ in time_terms.matrices(job))
        whole = 2 * model.seq_length * model_stats.whole_weights(model)
        products = model_stats.block_flops(model) - model_stats.score_flops(model)
        expected = (model.seq_length * products - whole) / 2 + whole / (2 if split else 1)
        assert flops == expected


def test_flops_are_those_of_the_matrices_that_were_built():
    """Two for each weight of the products and token, and the causal half of the scores."""
    shape = golden_worker.options(SHAPE | {"q_lora_rank": 10}).model
    stage = stage_of_one_rank(q_lora_rank=10)
    weights = sum(p.numel() for p in stage.blocks[0].parameters() if p.dim() > 1)
    columns = shape.heads * (6 + 4 + 8)  # of the queries, and of the values
    expected = 2 * weights + shape.seq_length * columns
    assert model_stats.block_flops(shape) == expected
