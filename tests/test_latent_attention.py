"""Latent attention (MLA): if this failed, a layout would train another model, or a cache lie.

test_families.py compares with transformers' DeepSeek models, test_sample.py their greedy tokens.
"""

import math

import golden_worker
import pytest
import torch
from compare import assert_close
from latent_worker import FAULTS
from ranks import results_of
from test_golden import check_lines, distance, lines_of, reference

import trainer
from attention import KeyValueCache
from config import model_stats, validation
from config.messages import UserError
from config.spelling import preset
from model import Stage

SHAPE = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
SHAPE |= {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}


def test_layouts_of_four_ranks_equal_the_single_rank_run(tmp_path):
    check_lines("latent", tmp_path)


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
        ({"kv_lora_rank": 0}, r"qk-nope-head-dim\(6\) is of latent attention: give kv-lora-rank"),
        ({"v_head_dim": 0}, r"kv-lora-rank\(12\) needs a v-head-dim above 0"),
        ({"positions": "alibi"}, r"kv-lora-rank\(12\) needs positions rotary, not alibi"),
        ({"kv_heads": 4}, r"kv-lora-rank\(12\) needs kv-heads 8, not 4"),
        ({"head_size": 12}, r"kv-lora-rank\(12\) needs head-size 10, not 12"),
        ({"qk_norm": "head"}, r"kv-lora-rank\(12\) needs qk-norm none, not head"),
        ({"qkv_bias": True}, r"kv-lora-rank\(12\) needs qkv-bias False, not True"),
        ({"qk_rope_head_dim": 3}, "turn an even number of columns of a head, 2 or more"),
        ({"tp": 8, "heads": 4}, r"tp\(8\) does not divide heads\(4\)"),
    ],
)
def test_options_that_do_not_go_together_are_one_sentence(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        validation.check(golden_worker.options(SHAPE | changes), changes.get("tp", 1))


def test_flops_are_those_of_the_matrices_that_were_built():
    """Two for each weight of the products and token, and the causal half of the scores."""
    shape = golden_worker.options(SHAPE | {"q_lora_rank": 10}).model
    stage = stage_of_one_rank(q_lora_rank=10)
    weights = sum(p.numel() for p in stage.blocks[0].parameters() if p.dim() > 1)
    columns = shape.heads * (6 + 4 + 8)  # of the queries, and of the values
    expected = 2 * weights + shape.seq_length * columns
    assert model_stats.block_flops(shape) == expected
