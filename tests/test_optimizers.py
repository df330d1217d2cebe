"""Update rules: if this failed, one of them would depend on the layout or the ZeRO stage.

As test_golden: losses, gradient norms and weights of four steps; of fp16, one case of ten steps on
each number of ranks. A skipped step has the norm NaN, which equals nothing. Tolerances are relative
and depend on the rounding: fp32; 8-bit moments, where some codes flip; Muon, which orthogonalises
in bf16; 16-bit activations, which every layout rounds at other places.
"""

import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator

import golden_worker
import pytest
import torch
from compare import assert_close, assert_within, relative_difference
from fake_context import FakeContext
from ranks import fork_ranks
from test_golden import FEW_STEPS, pairwise, run_worlds, single_rank, weight_difference

import data
import trainer
from config import run_options, validation
from config import schema as configuration
from distributed.mesh import Mesh
from optim import buckets, update_rules
from parallel import ParamFactory

TOLERANCE = {
    "adamw": 1e-5,
    "sgd": 1e-5,
    "adafactor": 1e-5,
    "adamw8bit": 1e-4,
    "muon": 1e-3,
    "bf16": 1e-2,
    "fp16": 1e-3,
}
# Tolerances of the weights: these rules round each element's update, which the loss hardly shows.
WEIGHT_TOLERANCE = TOLERANCE | {"adamw8bit": 1e-3, "muon": 1e-2, "bf16": 3e-2, "fp16": 1e-2}
RULE_WORLDS, PRECISION_WORLDS = (1, 4), (2, 8)  # numbers of ranks
# A model whose matrices tp 2 cuts between bitsandbytes' blocks of 256.
WIDE = {"layers": 2, "hidden": 512, "heads": 8, "ffn_hidden": 512}


def fits(case: dict, ranks: int) -> bool:
    try:
        validation.check(golden_worker.options(case), ranks)
    except configuration.UserError:
        return False
    return True


def rule_cases(ranks: int) -> list[dict]:
    """Every optimizer x ZeRO stage x mesh that it can have, recomputation and overlap in turn.

    Of 8-bit AdamW, whose kernels are slow on CPUs, one ZeRO stage on each mesh.
    """
    found = []
    turns = itertools.cycle(
        ({"recompute": "full"}, {"recompute": "selective"}, {"overlap_param_gather": True}, {})
    )
    for number, (tp, pp) in enumerate(itertools.product((1, 2), repeat=2)):
        for name, zero in itertools.product(run_options.OPTIMIZERS, (0, 1, 2, 3)):
            if name == "adamw8bit" and zero != number % 3:
                continue
            shape = WIDE if name == "adamw8bit" else {"layers": 2}
            case = {"tp": tp, "pp": pp, "optimizer": name, "zero": zero, "tied": zero != 1}
            case |= shape | {"sequence_parallel": tp > 1, "global_batch_size": 4}
            case |= {"steps": FEW_STEPS}
            extra = next(turns)
            if extra.get("recompute") == "full" and pp == 1:
                extra = extra | {"recompute_layers": 1}
            if name == "apex" or not fits(case, ranks):
                continue
            found.append(case | extra if fits(case | extra, ranks) else case)
    return found


def precision_cases(ranks: int) -> list[dict]:
    """16-bit runs: meshes, ZeRO stages, sums of gradients, recomputation; every pair of values."""
    meshes = [m for m in itertools.product((1, 2, 4), (1, 2, 4)) if ranks % (m[0] * m[1]) == 0]
    values = {
        "mesh": tuple(meshes),
        "zero": (0, 1, 2, 3),
        "precision": ("fp16", "bf16"),
        "grad_dtype": ("fp32", "bf16"),
        "recompute": ("none", "full"),
    }
    found = []
    for chosen in pairwise(values, seed=ranks):
        tp, pp = chosen.pop("mesh")
        case = chosen | {"tp": tp, "pp": pp, "global_batch_size": 8}
        if case["precision"] == "fp16":
            case["grad_dtype"] = "fp32"
        if case["precision"] == "bf16" or any(c["precision"] == "fp16" for c in found):
            case["steps"] = FEW_STEPS
        if case["zero"] == 3 and pp > 1:
            case["zero"] = 2
        found.append(case)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[dict[tuple[str, int], tuple[list[dict], list[dict]]]]:
    """The cases and their results, by subject and number of ranks: one start for each number."""
    every = {("rules", ranks): rule_cases(ranks) for ranks in RULE_WORLDS}
    every |= {("16 bits", ranks): precision_cases(ranks) for ranks in PRECISION_WORLDS}
    worlds: dict[int, list[dict]] = {}
    for (_, ranks), own in every.items():
        worlds.setdefault(ranks, []).extend(own)
    with run_worlds(worlds, tmp_path_factory.mktemp("optimizers")) as starts:
        for plain in map(without_layout, itertools.chain(*worlds.values())):
            single_rank(plain)  # while the ranks are at work
        results = {ranks: iter(start.result()) for ranks, start in starts.items()}
        yield {key: (own, [next(results[key[1]]) for _ in own]) for key, own in every.items()}


def without_layout(case: dict) -> str:
    layout = {"tp", "pp", "zero", "sequence_parallel", "overlap_param_gather", "recompute"}
    layout |= {"recompute_layers"}
    return json.dumps({k: v for k, v in case.items() if k not in layout})


def compare(every: list[dict], results: list[dict]) -> dict[str, float]:
    """Compare each case with one rank; the largest difference by tolerance."""
    worst: dict[str, float] = {}
    for case, result in zip(every, results, strict=True):
        expected = single_rank(without_layout(case))
        kind = case.get("precision", case.get("optimizer"))
        assert len(result["losses"]) == case.get("steps", golden_worker.STEPS)
        for numbers in ("losses", "norms"):
            off = assert_close(result[numbers], expected[numbers], TOLERANCE[kind], case)
            worst[kind] = max(worst.get(kind, 0.0), off)
        off = weight_difference(result["weights"], expected["weights"])
        assert_within(off, WEIGHT_TOLERANCE[kind], (off, case, result, expected))
        worst[f"{kind} weights"] = max(worst.get(f"{kind} weights", 0.0), off)
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RULE_WORLDS)
def test_every_optimizer_and_zero_stage_equals_one_rank(ranks, runs):
    every, results = runs["rules", ranks]
    names = {case["optimizer"] for case in every}
    assert names == set(run_options.OPTIMIZERS) - {"apex"}
    print(len(every), compare(every, results))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", PRECISION_WORLDS)
def test_16_bit_runs_agree_with_one_rank(ranks, runs):
    every, results = runs["16 bits", ranks]
    print(len(every), compare(every, results))


@pytest.mark.slow
def test_overflow_and_drift_on_one_rank_are_seen_by_all():
    """On eight ranks, so that every axis has copies: tensor, data and pipeline parallelism."""
    outcome = fork_ranks(8, "tests/optimizer_worker.py")
    assert outcome.status == 0, outcome.err[-3000:]
    assert outcome.out.startswith("ok ")


@pytest.mark.parametrize("positions", ["learned", "alibi", "rotary"])
def test_recomputation_changes_no_bit(positions):
    options = {"positions": positions, "layers": 3, "steps": 3}
    plain = golden_worker.run(validation.check(golden_worker.options(options), 1))
    for extra in ({}, {"recompute_layers": 1}, {"recompute_layers": 0}):
        for recompute in ("selective", "full"):
            case = options | {"recompute": recompute} | extra
            again = golden_worker.run(validation.check(golden_worker.options(case), 1))
            assert again == plain, case


def test_recomputation_keeps_no_state_of_a_generator(monkeypatch):
    """A block draws nothing; on a GPU the state of each tensor's device would be kept and set."""

    def refuse(*_):
        raise AssertionError("a block needs no generator")

    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch, name, refuse)
    for recompute in ("selective", "full"):
        options = {"layers": 1, "steps": 1, "recompute": recompute}
        golden_worker.run(validation.check(golden_worker.options(options), 1))


# ------------------------------------------------------------------------------------------------
# One rule, by itself
# ------------------------------------------------------------------------------------------------


def rule_of(
    name: str, masters: list[torch.Tensor], group: str, **options
) -> update_rules.UpdateRule:
    training = configuration.Training(steps=1, optimizer=name, **options)
    return update_rules.make_rule(training, group, masters, decay=True)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


RULES = [
    ("adamw", "plain", (700,)),
    ("sgd", "plain", (700,)),
    ("adamw8bit", "blocks", (768,)),
    ("adafactor", "matrices", (30, 20)),
    ("adafactor", "matrices", (50,)),
    ("muon", "matrices", (30, 20)),
]


@pytest.mark.parametrize(("name", "group", "shape"), RULES)
def test_state_that_was_read_and_written_gives_the_same_bits(name, group, shape):
    """State is read and written as by a checkpoint: by kind, and in two parts if it may be cut."""
    masters = [random(*shape, seed=1)]
    rule = rule_of(name, masters, group)
    for step in range(5):
        rule.update([random(*shape, seed=10 + step)], 1e-2)
    copies = [masters[0].clone()]
    fresh = rule_of(name, copies, group)
    count = masters[0].numel()
    cuts = [0, 256, count] if group != "matrices" else [0, count]
    for kind in update_rules.state_kinds(name):
        for a, b in itertools.pairwise(cuts):
            fresh.write(kind, 0, a, rule.read(kind, 0, a, b).clone())
    fresh.set_steps(rule.steps)
    for step in range(5):
        gradient = random(*shape, seed=20 + step)
        rule.update([gradient.clone()], 1e-2)
        fresh.update([gradient.clone()], 1e-2)
        assert torch.equal(masters[0], copies[0])


def test_8_bit_follows_32_bit():
    """The change of the weights in 50 steps differs from AdamW's by a few per cent."""
    start = random(64 * 256, seed=0)
    way = {}
    for name, group in (("adamw", "plain"), ("adamw8bit", "blocks")):
        master = start.clone()
        rule = rule_of(name, [master], group)
        for step in range(50):
            rule.update([random(64 * 256, seed=step) + 0.5], 1e-3)
        way[name] = master - start
    off = (way["adamw8bit"] - way["adamw"]).norm() / way["adamw"].norm()
    assert 0 < off < 0.05  # NaN is neither


def test_8_bit_keeps_embeddings_and_vectors_in_32():
    case = WIDE | {"optimizer": "adamw8bit"}
    run = trainer.build(validation.check(golden_worker.options(case), 1))
    families = {s.spec.name: g.key.family for g in run.optimizer.groups for s in g.shards}
    for name, family in families.items():
        matrix = name.startswith("blocks.") and name.endswith("weight") and "norm" not in name
        assert family == ("blocks" if matrix else "plain"), name
    assert "8-bit" in run.optimizer.kernel
    assert "fused" in run.optimizer.kernel


def test_a_layout_that_cuts_blocks_is_refused():
    case = {"hidden": 256, "heads": 8, "optimizer": "adamw8bit", "tp": 2}
    config = validation.check(golden_worker.options(case), 2)

    with pytest.raises(configuration.UserError, match=r"attention.out.weight .* runs of 128 weigh"):
        trainer.build(config, FakeContext(2))


@pytest.mark.parametrize("module", ["bitsandbytes", "apex"])
def test_a_package_that_is_missing_is_named(module, monkeypatch):
    name = {"bitsandbytes": "adamw8bit"}.get(module, module)
    found = importlib_find_spec_without(module)
    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setitem(sys.modules, "apex", None)
    apex = r"apex.*\. Here: No module named .apex"
    sentence = {"apex": apex, "bitsandbytes": "bitsandbytes"}[module]
    with pytest.raises(configuration.UserError, match=f"--optimizer {name} needs .*{sentence}"):
        rule_of(name, [torch.zeros(256)], "blocks")


def importlib_find_spec_without(module: str):
    real = importlib.util.find_spec
    return lambda name: None if name.split(".")[0] == module else real(name)


def test_whole_matrices_are_distributed_evenly():
    """12 blocks of a GPT over 8 replicas: no replica owns 1 % more than the mean."""
    shapes = []
    for i in range(12):
        shapes += [(f"{i}.qkv", (96, 32)), (f"{i}.out", (32, 32)), (f"{i}.up", (128, 32))]
        shapes += [(f"{i}.down", (32, 128))]
    parameters = [ParamFactory(Mesh()).parameter(n, s, std=1.0, decay=True) for n, s in shapes]
    mesh = Mesh(configuration.Layout(dp=8).axes, FakeContext(8))
    key = buckets.Key(("replicas",), False, "matrices")
    bucket = buckets.Bucket(parameters, key, mesh, configuration.Training(), zero=1)
    loads = [0] * 8
    for p, place in bucket.places:
        section = place // bucket.section
        assert place + p.numel() <= (section + 1) * bucket.section
        loads[section] += p.numel()
    assert sum(loads) == sum(p.numel() for p in parameters)
    assert max(loads) <= 1.01 * sum(loads) / 8
    spans = sorted((place, place + p.numel()) for p, place in bucket.places)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))


def test_the_gradient_of_one_step_is_the_same_in_every_stage_of_zero():
    """On one rank nothing is sharded; the step must not depend on the flag."""
    norms = []
    for zero in (0, 1, 2, 3):
        config = validation.check(golden_worker.options({"zero": zero}), 1)
        result = trainer.step(trainer.build(config), data.Synthetic(61, 16, 1), 0, 1e-3)
        norms.append(result.grad_norm)
    assert relative_difference(norms[1:], norms[:1] * 3) == 0.0
    assert norms[0] > 0
