"""Mixers in the place of attention: if this failed, a hybrid model would be another one in some
layout, or in transformers.
"""

from dataclasses import replace
from types import SimpleNamespace

import compare
import document_worker
import golden_worker
import pytest
import sample_worker
import task_worker
import test_golden
import test_muon
import torch
from compare import assert_within
from ranks import results_of

import costs.mixer_terms
import plan
import trainer
from architecture.model_stats import parameters
from architecture.shape import ModelShape
from architecture.tensors import canonical_shapes
from base.errors import UserError
from benchmarks.faults.check_faults import FAULTS, PUBLIC, asked, faults_of, judged
from config import validation
from config.schema import Config, Layout, Training
from costs import hardware
from costs.job import Job
from distributed.collectives import Group
from distributed.mesh import Mesh
from layers.attention import KeyValueCache
from layers.linear_recurrence import linear_recurrence
from layers.mixers import CLASSES, document_offsets
from parallel import ParamFactory
from tools.checker import causes

SIZES = {"mixer_key_heads": 2, "mixer_value_heads": 6, "mixer_key_size": 8, "mixer_value_size": 5}
FACTORY = ParamFactory(Mesh(), torch.float64)


def shape(mixer: str = "gated_delta_net", **options) -> ModelShape:
    sizes = {"layers": 2, "hidden": 24, "heads": 4, "seq_length": 150, "bias": False} | SIZES
    if mixer == "kda":
        options["mixer_key_heads"] = options.get("mixer_value_heads", 6)
    if mixer in ("mamba2", "short_conv"):
        sizes["mixer_conv_bias"] = True
    return ModelShape(**(sizes | {"mixer": mixer} | options))


def mixer_of(model: ModelShape, seed: int = 0) -> torch.nn.Module:
    factory = replace(FACTORY, training=Training(seed=seed, init_std=0.3))
    return CLASSES[model.mixer](factory, "blocks.0.mixer", model, 0.3, False)


def tokens(model: ModelShape, samples: int = 2, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = model.seq_length, samples, model.hidden
    return torch.randn(size, generator=generator, dtype=torch.float64)


def offsets_of(cuts: list[int], length: int, samples: int = 2) -> torch.Tensor:
    """Offsets of tokens in documents that begin at the cuts, (s, b); each sample has them later."""
    starts = torch.zeros(samples, length, dtype=torch.int64)
    for sample in range(samples):
        for cut in cuts:
            starts[sample, cut + sample :] = cut + sample
    return document_offsets(SimpleNamespace(starts=starts), FACTORY)


# ---- The layout ----------------------------------------------------------------------------------


def test_every_layout_with_mixers_equals_the_single_rank_run(tmp_path):
    test_golden.check_lines("mixers", tmp_path)


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ({}, {"tp": 4, "dp": 1}, "tp(4) does not divide mixer_value_heads(6)"),
        (
            {"mixer_key_heads": 2, "mixer_value_heads": 12},
            {"tp": 3},
            "tp(3) does not divide mixer_key_heads(2), nor the other way round",
        ),
        (
            {"mixer": "kda", "mixer_key_heads": 6},
            {"tp": 4},
            "tp(4) does not divide mixer_key_heads(6)",
        ),
        (
            {},
            {"cp": 3, "cp_mixer": "heads"},
            "--cp-mixer heads: tp(1) * cp(3) does not divide mixer_key_heads(2); "
            "--cp-mixer states takes any number",
        ),
        (
            {"mixer_key_heads": 4},
            {},
            "mixer_key_heads(4) does not divide mixer_value_heads(6)",
        ),
        (
            {"mixer": "kda", "mixer_key_heads": 3},
            {},
            "has as many key heads as value heads, not mixer_key_heads(3)",
        ),
        ({"mixer": "mamba2"}, {"tp": 4}, "tp(4) does not divide mixer_value_heads(6)"),
        (
            {"mixer": "mamba2", "mixer_value_heads": 12, "mixer_key_heads": 4},
            {"tp": 6},
            "tp(6) does not divide mixer_key_heads(4), nor the other way round",
        ),
        (
            {"mixer": "short_conv", "heads": 6, "kv_heads": 3},
            {"tp": 3, "cp": 3, "cp_mixer": "heads"},
            "tp(3) * cp(3) does not divide hidden(24)",
        ),
        ({"mixer_blocks": "none"}, {}, "needs blocks that have it: mixer_blocks is none"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_both_numbers(model, layout, message):
    sizes = {"layers": 2, "hidden": 24, "heads": 12, "seq_length": 36} | SIZES
    model = ModelShape(**(sizes | {"mixer": "gated_delta_net"} | model))
    assert message in refusal(model, Layout(**layout))


def refusal(model: ModelShape, layout: Layout) -> str:
    try:
        validation.check_shape(model)
        validation.check_split(model, layout)
    except UserError as error:
        return str(error)
    return ""


def test_prefixes_are_refused():
    config = Config(shape(), training=Training(steps=1))
    config = replace(config, data=replace(config.data, objective="prefix"))
    with pytest.raises(UserError, match=r"mixer\(gated_delta_net\) cannot"):
        validation.check(config, 1)


# ---- The rule ------------------------------------------------------------------------------------


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True)


# Key heads of 6 value heads, decays of a token and head, whether what is written is a difference.
RULES = {"gated delta rule": (2, 1, True), "kda": (6, 8, True), "mamba-2": (2, 1, False)}


def rule_inputs(length: int, rule: str, samples: int = 2) -> list[torch.Tensor]:
    """q, k, v, decay and strength."""
    generator = torch.Generator().manual_seed(length)
    heads, decays, has_strength = RULES[rule]
    sizes = {"dtype": torch.float64, "generator": generator}
    q, k = (unit(torch.randn(length, samples, heads, 8, **sizes)) for _ in range(2))
    v = torch.randn(length, samples, 6, 5, **sizes)
    decay = -3 * torch.rand(length, samples, 6, decays, **sizes)
    strength = 2 * torch.rand(length, samples, 6, **sizes)
    inputs = [q, k, v, decay, *([strength] if has_strength else [])]
    return [x.requires_grad_() for x in inputs]


def token_by_token(q, k, v, decay, strength, offsets):
    """The recurrence as its definition has it: one token after the other."""
    q, k = (x.repeat_interleave(6 // x.shape[2], 2) for x in (q, k))
    state = v.new_zeros(v.shape[1], 6, 8, 5)
    results = []
    for t in range(len(v)):
        if offsets is not None:
            state = state * (offsets[t] > 0)[:, None, None, None]
        state = state * decay[t].exp()[..., None]
        written = v[t]
        if strength is not None:
            held = torch.einsum("bapr,bap->bar", state, k[t])
            written = strength[t][..., None] * (v[t] - held)
        state = state + torch.einsum("bap,bar->bapr", k[t], written)
        results.append(torch.einsum("bapr,bap->bar", state, q[t]))
    return torch.stack(results), state


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [1, 5, 64, 65, 150])
@pytest.mark.parametrize("cuts", [None, [0], [0, 1, 2, 3, 40, 63], [0, 62, 63, 64, 128]])
def test_chunks_compute_what_the_recurrence_does(rule, length, cuts):
    inputs = rule_inputs(length, rule)
    every = inputs if RULES[rule][2] else [*inputs, None]
    offsets = None if cuts is None else offsets_of([c for c in cuts if c < length], length)
    found = linear_recurrence(*every, offsets, None, Group())
    expected = token_by_token(*every, offsets)
    weights = torch.randn(found[0].shape, dtype=torch.float64)
    for ours, theirs in zip(found, expected, strict=True):
        assert_within((ours - theirs).abs().max().item(), 1e-12)
    gradients = [
        torch.autograd.grad((results * weights).sum() + state.square().sum(), inputs)
        for results, state in (found, expected)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        scale = max(1.0, theirs.abs().max().item())  # of one token the decay has no gradient
        assert_within((ours - theirs).abs().max().item() / scale, 1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rate", [0.1, 1.0, 16.0])
@pytest.mark.parametrize("cuts", [None, [0, 3, 40, 63, 130]])
def test_in_fp32_strong_decays_are_as_exact_as_weak_ones(rule, rate, cuts):
    """What is small beside a sum over the chunk, such as a decay's gradient, keeps its digits."""
    with torch.no_grad():
        inputs = [x.float() for x in rule_inputs(150, rule)]
        inputs[3] *= rate
    offsets = None if cuts is None else offsets_of(cuts, 150)
    weights = torch.randn(inputs[2].shape)

    def computed(dtype: torch.dtype) -> list[torch.Tensor]:
        own = [x.to(dtype).requires_grad_() for x in inputs]
        every = own if RULES[rule][2] else [*own, None]
        results, _ = linear_recurrence(*every, offsets, None, Group())
        return [results.detach(), *torch.autograd.grad((results * weights).sum(), own)]

    for found, expected in zip(computed(torch.float32), computed(torch.float64), strict=True):
        scale = expected.abs().max().item()
        assert_within((found - expected).abs().max().item() / scale, 1e-6)


# ---- Documents and pieces ------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", CLASSES)
def test_nothing_of_another_document_moves(mixer):
    """Also to the last bit: what another document says enters no sum."""
    model = shape(mixer)
    layer, x = mixer_of(model), tokens(model)
    cuts = [0, 1, 2, 31, 64, 66, 130]
    offsets = offsets_of(cuts, len(x))
    before = layer(x, offsets, None)
    starts = torch.arange(len(x))[:, None] - offsets
    for place in (0, 1, 33, 63, 65, 66, 149):
        changed = x.clone()
        changed[place] += 1.0
        moved = (layer(changed, offsets, None) != before).any(-1)
        for sample in range(2):
            own = starts[:, sample] == starts[place, sample]
            later = own & (torch.arange(len(x)) >= place)
            assert not moved[~later, sample].any(), (place, sample)
            assert moved[place, sample]


LAYOUTS = [{"tp": 2, "cp": 2}, {"tp": 2, "cp": 2, "cp_mixer": "heads", "sequence_parallel": True}]
LAYOUTS += [{"cp": 4, "dp": 1}, {"tp": 4, "sequence_parallel": True, "recompute": "selective"}]


def test_nothing_of_another_document_moves_in_a_layout(tmp_path):
    """Every kind of mixer, and where it may be, with attention in other blocks or beside it."""
    sizes = {"layers": 4, "seq_length": 24, "precision": "fp64", "positions": "rotary"}
    sizes |= {"mixer_blocks": "1:1", "mixer_kernel": 4, "reset_attention": True, "eod_token": 5}
    sizes |= {"mixer_key_heads": 8, "mixer_value_heads": 8, "micro_batch_size": 2}
    cases = [sizes | {"mixer": mixer} for mixer in CLASSES]
    cases.append(sizes | {"mixer": "mamba2", "mixer_key_heads": 1, "mixer_beside": True})
    alone = {"mixer_blocks": "all", "hybrid_pattern": "M*-M", "mixer_key_heads": 4}
    cases.append(sizes | alone | {"mixer": "mamba2"})
    jobs = [case | layout for case in cases for layout in LAYOUTS]
    jobs = [job for job in jobs if job["mixer_key_heads"] > 1 or "cp_mixer" not in job]
    results = results_of(document_worker.__file__, 4, jobs, tmp_path)
    for job, result in zip(jobs, results, strict=True):
        assert result["wrong"] == 0, job
        assert result["reached"] > 40, job


def piece(layer, x, cache):
    """The results of a pass through a layer, as the decoder does it."""
    cache.begin(len(x))
    return layer(x, None, None, cache)


@pytest.mark.parametrize("mixer", CLASSES)
def test_a_text_in_pieces_has_the_same_results_and_state(mixer):
    model = shape(mixer)
    layer, x = mixer_of(model), tokens(model, samples=1)
    cuts = torch.Generator().manual_seed(3)
    with torch.no_grad():
        whole = KeyValueCache(len(x), None, torch.device("cpu"))
        expected = piece(layer, x, whole)
        assert_within(float((expected - layer(x, None, None)).abs().max()), 1e-12)
        for _ in range(150):
            cache = KeyValueCache(len(x), None, torch.device("cpu"))
            count = int(torch.randint(1, 12, (), generator=cuts))
            places = torch.randint(1, len(x), (count,), generator=cuts).unique().tolist()
            pieces = [
                piece(layer, x[a:b], cache)
                for a, b in zip([0, *places], [*places, len(x)], strict=True)
            ]
            assert_within(float((torch.cat(pieces) - expected).abs().max()), 1e-12)
            for each in (cache, whole):
                each.begin(0)  # then `states` is what the next pass begins with
            for ours, theirs in zip(cache.states(layer), whole.states(layer), strict=True):
                assert ours.shape == theirs.shape
                assert_within(float((ours - theirs).abs().max()), 1e-12)


def stage_of(model: ModelShape) -> torch.nn.Module:
    run = golden_worker.options({"pad_vocab_multiple": 1, "precision": "fp64"})
    (stage,) = trainer.build(validation.check(replace(run, model=model), 1)).stages
    return stage


@pytest.mark.parametrize("mixer", CLASSES)
def test_blocks_of_one_part_compute_what_blocks_of_two_do(mixer):
    """With the same weights: a mixer and then an MLP are one block of both."""
    of_two = shape(mixer, layers=2, mixer_blocks="1:1", positions="rotary", vocab_size=32)
    of_one = replace(of_two, layers=4, mixer_blocks="all", hybrid_pattern="M-*-")
    whole, parts = stage_of(of_two), stage_of(of_one)
    weights = {p.spec.name: p for p in whole.parameters()}
    names = {}
    for name in weights:
        block, _, rest = name.removeprefix("blocks.").partition(".")
        number = f"{2 * int(block) + rest.startswith('mlp')}" if block.isdigit() else ""
        names[f"blocks.{number}.{rest}" if number else name] = name
    own = {p.spec.name: p for p in parts.parameters()}
    assert own.keys() == names.keys()
    ids = torch.randint(32, (2, 150), generator=torch.Generator().manual_seed(4))
    for name, p in own.items():
        p.data.copy_(weights[names[name]])
    expected, found = (stage.hidden_states(ids) for stage in (whole, parts))
    assert_within(float((expected - found).abs().max()), 1e-12)
    assert parameters(of_one) == parameters(of_two)


@pytest.mark.parametrize("mixer", CLASSES)
def test_a_mixer_beside_attention_adds_its_result(mixer):
    """x + attention(n) + mixer(n), of the same norm, each times its factor."""
    factors = "attention:0.5,mixer:0.75"
    model = shape(mixer, layers=1, mixer_beside=True, multipliers=factors, vocab_size=32)
    (block,) = stage_of(model).blocks
    x = tokens(model)
    mask = None
    normed = block.attention_norm(x)
    attention, own = (
        layer(normed, mask, None) for layer in (block.attention, block.mixers()[1][1])
    )
    expected = x + 0.5 * attention + 0.75 * own
    expected = expected + block.mlp(block.mlp_norm(expected))
    found = sum(block(x, None, (mask, None), None))
    assert_within(float((expected - found).abs().max()), 1e-12)


OPTIONS = {"layers": 4, "precision": "fp64", "mixer_blocks": "1:1", "positions": "rotary"}
OPTIONS |= {"mixer_kernel": 3, "seq_length": 24, "global_batch_size": 4}
KINDS = [OPTIONS | {"mixer": mixer} for mixer in CLASSES]


def test_decoding_in_layouts_is_that_of_one_rank(tmp_path):
    layouts = [{"tp": 2, "pp": 2}, {"tp": 2, "cp": 2, "cp_mixer": "heads"}, {"cp": 2, "tp": 2}]
    layouts += [{"tp": 4, "sequence_parallel": True}, {"pp": 4}, {"zero": 3}]
    cases = [(case, layout) for case in KINDS for layout in layouts[:2]]
    cases += [(KINDS[0], layout) for layout in layouts[2:]]
    jobs = [{"run": case | layout} for case, layout in cases]
    results = results_of("tests/sample_worker.py", 4, jobs, tmp_path, 900)
    for (case, layout), result in zip(cases, results, strict=True):
        config = validation.check(golden_worker.options(case), 1)
        expected = sample_worker.sampled_steps(config)
        assert [row["sample"] for row in result] == [row["sample"] for row in expected], layout


def test_scores_of_tasks_in_layouts_are_those_of_one_rank(tmp_path):
    """Continuations share samples, and none reads the state of another."""
    layouts = [{"tp": 2, "cp": 2, "sequence_parallel": True}, {"pp": 2, "cp": 2}]
    cases = [(case, layout) for case in KINDS for layout in layouts]
    jobs = [case | layout for case, layout in cases]
    results = results_of("tests/task_worker.py", 4, jobs, tmp_path, 900)
    for (case, _), result in zip(cases, results, strict=True):
        expected = task_worker.run_case(case, None)
        for name in ("log_likelihoods", "misses"):
            compare.assert_close(result[name], expected[name], 1e-11)


# Rows of benchmarks/faults/public/faults.toml, which has all that are about mixers.
PLANTED = [
    "KDA's norm is trained from a partial gradient",
    pytest.param("a state goes on into the next document", marks=pytest.mark.long),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_check_finds_the_mistakes_of_public_code(name):
    faults, runs = faults_of([FAULTS, PUBLIC])
    (fault,) = [fault for fault in faults if fault["name"] == name]
    (row,) = asked(runs, fault)
    assert judged(fault, row)[:2] == (True, True), row["text"]


# ---- Counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", CLASSES)
def test_parameters_are_those_of_the_options(mixer):
    experts = {"experts": 4, "experts_per_token": 2, "shared_ffn_hidden": 24}
    for options in (
        {"bias": True},
        {"mixer_blocks": "1:1", "kv_heads": 2},
        {"mixer_beside": True},
        {"mixer_beside": True, "mixer_blocks": "1:1"} | experts,
        {"hybrid_pattern": "M-"},
        {"hybrid_pattern": "M*-EM", "layers": 5, "norm": "rmsnorm"} | experts,
    ):
        model = shape(mixer, **options)
        run = golden_worker.options({"pad_vocab_multiple": 1})
        (stage,) = trainer.build(validation.check(replace(run, model=model), 1)).stages
        built = {p.spec.name: tuple(p.spec.shape) for p in stage.parameters()}
        assert built == canonical_shapes(model)
        trained = [p for p in stage.parameters() if p.requires_grad]  # without balance's biases
        assert sum(p.numel() for p in trained) == parameters(model)


@pytest.mark.parametrize(
    "words",
    [
        "nemotron-3-nano-30b-a3b",
        "falcon-h1-0.5b",
        "granite-4.0-h-tiny",
        "qwen3-next-80b-a3b --set first_dense_layers=2",
        "kimi-linear-48b-a3b",
        "gpt-oss-20b --set mixer=mamba2 mixer_blocks=1:2 window_blocks=2:1",
    ],
)
def test_a_plan_has_a_line_for_each_kind_of_blocks(words):
    """With three kinds it ended in an error, and with two both had the name of one."""
    answer = plan.ask(["model", "--model", *words.split()])
    rows = [line.split() for line in answer.text.splitlines() if " x " in line]
    numbers = [int(row[-3]) * int(row[-1].replace(",", "")) for row in rows]
    assert sum(numbers) == answer.data["parameters"]
    assert len({" ".join(row[:-3]) for row in rows}) == len(rows)


@pytest.mark.parametrize("mixer", CLASSES)
@pytest.mark.parametrize("mode", ["joint", "split", "head"])
def test_muon_updates_the_matrices_that_are_planned(mixer, mode):
    case = {"optimizer": "muon", "muon_qkv": mode, "mixer": mixer, **SIZES, "bias": False}
    if mixer == "kda":
        case["mixer_key_heads"] = 6
    run = trainer.build(validation.check(golden_worker.options(case), 1))
    test_muon.check_planned(case, run)


@pytest.mark.parametrize("mixer", CLASSES)
@pytest.mark.parametrize("sizes", [(2, 4, 16, 32, 256), (4, 4, 64, 32, 512), (2, 8, 32, 32, 128)])
def test_planned_memory_is_what_a_mixer_keeps(mixer, sizes):
    g, a, p, r, length = sizes
    model = shape(
        mixer,
        mixer_key_heads=g,
        mixer_value_heads=a,
        mixer_key_size=p,
        mixer_value_size=r,
        seq_length=length,
    )
    layer = CLASSES[mixer](replace(FACTORY, dtype=torch.float32), "m", model, 0.1, False)
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    x = tokens(model, samples=1).float().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, None, None)
    inputs = x.untyped_storage().data_ptr()
    found = sum(s.nbytes() for place, s in kept.items() if place not in own | {inputs})
    machine = replace(hardware.load("cpu"))
    job = Job(model, Layout(dp=1), Training(precision="fp32"), machine)
    planned = float(costs.mixer_terms.kept_bytes(job, True))
    assert planned == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("input", "blocks.0.gated_delta_net", "the residual sum"),
        ("output", "blocks.0.kda.decay", "the first matrices of the mixer"),
        ("input", "blocks.0.mamba2.out", "its recurrence"),
        ("input", "blocks.0.short_conv.out", "the gated causal convolution"),
        ("output", "blocks.0.mamba2", "the output matrix of the mixer"),
    ],
)
def test_check_has_words_for_what_a_mixer_computes(kind, name, words):
    assert words in causes._forward(SimpleNamespace(tensors={}), (1, kind, name))
