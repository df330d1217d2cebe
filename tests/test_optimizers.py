"""Update rules: if this failed, one of them would depend on the layout or the ZeRO stage.

As test_golden: losses, gradient norms and weights of three steps, the last of which has moments of
an earlier update and weights that were gathered after it; of fp16, one case of ten steps on two
ranks. A skipped step has the norm NaN, which equals nothing. Tolerances are relative and depend on
the rounding: fp32; 8-bit moments, where some codes flip; 16-bit activations, which every layout
rounds at other places.
"""

import importlib.util
import itertools
import sys

import fake_apex
import golden_worker
import pytest
import torch
import unused_worker
from fake_context import FakeContext
from ranks import fork_ranks, results_of
from test_golden import assert_equal_runs, check_lines

import trainer
from base.errors import UserError
from config import schema as configuration
from config import validation
from config.optimizers import OPTIMIZERS, interchangeable
from distributed.mesh import Mesh
from optim import buckets, update_rules
from parallel import ParamFactory

# A model whose matrices tp 2 cuts between bitsandbytes' blocks of 256.
WIDE = {"layers": 2, "hidden": 512, "heads": 8, "ffn_hidden": 512}


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["optimizers", "precisions"])
def test_every_optimizer_and_zero_stage_equals_one_rank(feature, tmp_path):
    check_lines(feature, tmp_path)


def every_stage(name: str) -> list[dict]:
    """Short runs of an optimizer at each stage of ZeRO that it can have, in fp64 if it has that.

    Without biases: the gradient of a key's is rounding, of which some rules take the sign.
    """
    own = {"hidden": 512, "ffn_hidden": 512} if name == "adamw8bit" else {}
    found = []
    for zero, precision in itertools.product(range(4), ("fp64", "fp32")):
        case = {"optimizer": name, "zero": zero, "precision": precision, "steps": 4, "bias": False}
        try:
            validation.check(golden_worker.options(case | own), 2)
        except UserError:
            continue
        if all(other["zero"] != zero for other in found):
            found.append(case | own)
    return found


def test_every_optimizer_equals_one_rank_at_each_stage_of_zero(tmp_path):
    """apex with a module of its interface: its state is AdamW's, divided as AdamW's is."""
    cases = [case for name in OPTIMIZERS for case in every_stage(name)]
    results = results_of("tests/fake_apex.py", 2, cases, tmp_path)
    for case, result in zip(cases, results, strict=True):
        alone = {"optimizer": "adamw"} if case["optimizer"] == "apex" else {}
        single = golden_worker.options(case | alone)
        bound = {"tolerance": 1e-4, "weight_tolerance": 1e-3} if "hidden" in case else {}
        assert_equal_runs(case | bound, result, golden_worker.run(validation.check(single, 1)))
    for name, traits in OPTIMIZERS.items():
        stages = {case["zero"] for case in cases if case["optimizer"] == name}
        assert stages >= {0, 1}
        assert (3 in stages) == traits.elementwise


def test_a_parameter_without_a_gradient_holds_up_no_other(tmp_path):
    """A bucket that waits for it is reduced at the end, and so are those that wait behind it.

    At --zero 2 they wait in every micro-batch.
    """
    cases = [{"zero": zero, "steps": 3, "micro_batch_size": 2} for zero in range(4)]
    results = results_of("tests/unused_worker.py", 2, cases, tmp_path)
    one = unused_worker.run({"steps": 3, "micro_batch_size": 2})
    assert "blocks.0.unused" in one["weights"]
    for case, result in zip(cases, results, strict=True):
        assert result.pop("buckets") > 4 or case["zero"] == 3
        assert_equal_runs(case, result, one)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
def test_a_weight_without_a_gradient_does_not_move_with_an_epsilon_of_0(optimizer):
    """Rows of padding, and without tied matrices those of tokens that no sample has: Adam's 0 / 0.

    61 rows, and 3 or 67 more, which no loss may see.
    """
    case = {"optimizer": optimizer, "adam_eps": 0.0, "weight_decay": 1.0, "tied": False, "steps": 3}
    few, many = (
        golden_worker.run(
            validation.check(golden_worker.options(case | {"pad_vocab_multiple": n}), 1)
        )
        for n in (4, 128)
    )
    assert few["norms"] == pytest.approx(many["norms"], rel=1e-5)  # a NaN equals nothing
    assert few["losses"] == pytest.approx(many["losses"], rel=1e-5)


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
    *(
        (name, "plain", (700,))
        for name, traits in OPTIMIZERS.items()
        if traits.elementwise and name != "apex"
    ),
    ("adamw8bit", "blocks", (768,)),
    ("adafactor", "matrices", (30, 20)),
    ("adafactor", "matrices", (50,)),
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
    for kind in OPTIMIZERS[name].state:
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

    with pytest.raises(UserError, match=r"attention.out.weight .* runs of 128 weigh"):
        trainer.build(config, FakeContext(2))


def test_a_package_that_is_missing_is_named(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name.split(".")[0] == "bitsandbytes" else real(name),
    )
    with pytest.raises(UserError, match=r"adamw8bit needs .*bitsandbytes"):
        rule_of("adamw8bit", [torch.zeros(256)], "blocks")


def test_without_apex_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", None)
    needs = (
        r"--optimizer apex needs a GPU and NVIDIA's apex .*github.com/NVIDIA/apex.* Here: .*apex"
    )
    with pytest.raises(UserError, match=needs):
        rule_of("apex", [torch.zeros(256)], "plain")


def test_apex_without_a_gpu_is_refused(monkeypatch):
    class NeedsDriver:
        def __init__(self, masters, **options):
            raise RuntimeError("Found no NVIDIA driver on your system.")

    every = fake_apex.modules()
    monkeypatch.setattr(every["apex.optimizers"], "FusedAdam", NeedsDriver)
    for name, module in every.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(UserError, match=r"needs a GPU .* Found no NVIDIA driver"):
        rule_of("apex", [torch.zeros(256)], "plain")


@pytest.mark.parametrize(("before", "after"), [("adamw", "apex"), ("apex", "adamw")])
def test_apex_continues_from_adamw_and_back(before, after, monkeypatch):
    """After five updates the other rule takes the state over: the next five are those of AdamW."""
    for name, module in fake_apex.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    assert interchangeable(before) == interchangeable(after)
    expected, masters = [random(700, seed=1)], [random(700, seed=1)]
    reference, rule = rule_of("adamw", expected, "plain"), rule_of(before, masters, "plain")
    for step in range(10):
        if step == 5:
            state = {kind: rule.read(kind, 0, 0, 700).clone() for kind in ("exp_avg", "exp_avg_sq")}
            rule = rule_of(after, masters, "plain")
            for kind, values in state.items():
                rule.write(kind, 0, 0, values)
            rule.set_steps(5)
        gradient = random(700, seed=10 + step)
        reference.update([gradient.clone()], 1e-2)
        rule.update([gradient.clone()], 1e-2)
        torch.testing.assert_close(masters, expected, rtol=1e-5, atol=1e-6)


def test_whole_matrices_are_distributed_evenly():
    """12 blocks of a GPT over 8 replicas: no replica owns 1 % more than the mean."""
    shapes = 12 * [(96, 32), (32, 32), (128, 32), (32, 128)]
    factory, mesh = ParamFactory(Mesh()), Mesh(configuration.Layout(dp=8).axes, FakeContext(8))
    parameters = [
        factory.parameter(str(i), shape, std=1.0, decay=True) for i, shape in enumerate(shapes)
    ]
    key = buckets.Key(("replicas",), False, "matrices")
    bucket = buckets.Bucket(parameters, key, mesh, configuration.Training(), zero=1)
    loads, end = [0] * 8, 0
    for p, place in sorted(bucket.places, key=lambda pair: pair[1]):
        assert place >= end
        end = place + p.numel()
        section = place // bucket.section
        assert end <= (section + 1) * bucket.section
        loads[section] += p.numel()
    assert sum(loads) == sum(p.numel() for p in parameters)
    assert max(loads) <= 1.01 * sum(loads) / 8
