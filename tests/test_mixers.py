"""Mixers in the place of attention: if this failed, a hybrid model would be another one in some
layout, or in transformers.
"""

from dataclasses import replace
from types import SimpleNamespace

import golden_worker
import pytest
import test_golden
import test_muon
import torch
from compare import assert_within

import costs.mixer_terms
import trainer
from architecture.model_stats import parameters
from architecture.shape import ModelShape
from architecture.tensors import canonical_shapes
from base.errors import UserError
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
    factory = replace(FACTORY, seed=seed, std=0.3)
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
        ({}, {"tp": 4, "dp": 1}, "tp(4) does not divide mixer_key_heads(2)"),
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
        ({"mixer_blocks": "none"}, {}, "is of no block: mixer_blocks is none"),
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


@pytest.mark.parametrize("mixer", CLASSES)
def test_a_text_in_pieces_has_the_same_results_and_state(mixer):
    model = shape(mixer)
    layer, x = mixer_of(model), tokens(model, samples=1)
    cuts = torch.Generator().manual_seed(3)
    with torch.no_grad():
        whole = KeyValueCache(len(x), None, torch.device("cpu"))
        expected = layer(x, None, None, whole)
        assert_within(float((expected - layer(x, None, None)).abs().max()), 1e-12)
        for _ in range(150):
            cache = KeyValueCache(len(x), None, torch.device("cpu"))
            count = int(torch.randint(1, 12, (), generator=cuts))
            places = torch.randint(1, len(x), (count,), generator=cuts).unique().tolist()
            pieces = [
                layer(x[a:b], None, None, cache)
                for a, b in zip([0, *places], [*places, len(x)], strict=True)
            ]
            assert_within(float((torch.cat(pieces) - expected).abs().max()), 1e-12)
            for ours, theirs in zip(cache.states(layer), whole.states(layer), strict=True):
                assert ours.shape == theirs.shape
                assert_within(float((ours - theirs).abs().max()), 1e-12)


# ---- Counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", CLASSES)
def test_parameters_are_those_of_the_options(mixer):
    for options in ({"bias": True}, {"mixer_blocks": "1:1", "kv_heads": 2}):
        model = shape(mixer, **options)
        run = golden_worker.options({"pad_vocab_multiple": 1})
        (stage,) = trainer.build(validation.check(replace(run, model=model), 1)).stages
        built = {p.spec.name: tuple(p.spec.shape) for p in stage.parameters()}
        assert built == canonical_shapes(model)
        assert sum(p.numel() for p in stage.parameters()) == parameters(model)


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
    assert planned == pytest.approx(found, rel=0.12)
