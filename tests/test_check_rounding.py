"""check.py and rounding: if this failed, right code was accused, or a fault taken for rounding.

Also what its verdict says of several layouts, and which layouts it runs for a given option.
"""

import dataclasses
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest
from ranks import ROOT

import check
from base.errors import UserError
from benchmarks.faults.check_faults import RULES, add_rule, asked, copy_of_code, judged
from config import command_line
from config.schema import Layout
from tools.checker.causes import explanations, shared
from tools.checker.compare import (
    TIMES,
    Difference,
    Reference,
    Rounding,
    SeenPieces,
    first_difference,
    relative,
)
from tools.checker.engine import Engine, Outcome
from tools.checker.layouts import cover, name_of, ranks_of, with_given
from tools.checker.recorder import Piece
from tools.checker.report import separate, verdict
from tools.checker.runs import RunAnswer
from tools.checker.shrink import shrink

GPT = "--layers 12 --hidden 768 --heads 12 --vocab-size 50257 --steps 10"
VALUES = np.random.default_rng(0).normal(size=40)
UPDATE = (1, "weights", "blocks.0.attention.qkv.bias")
MATRIX = (1, "weights", "blocks.0.mlp.up.weight")
PLACE = {"pp": 0, "dp": 0, "cp": 0, "tp": 0}


def parameter(key, values) -> Piece:
    return Piece(key, (np.arange(values.size),), values, False, True)


def one_rank(growth, held=()) -> Reference:
    pieces = [parameter(UPDATE, VALUES), parameter(MATRIX, 1 + VALUES)]
    return Reference(pieces, {}, "fp64", Rounding(growth, set(held)))


def found(reference: Reference, *pieces: Piece) -> Difference | None:
    mesh = SimpleNamespace(size=1, rank=0, place=PLACE)
    return first_difference(reference, [SeenPieces.by(reference, list(pieces), 1, mesh)])


# ---- What rounding explains ----------------------------------------------------------------------


def test_a_tensor_may_be_off_by_as_much_as_rounding_moves_it():
    reference = one_rank({UPDATE: 1e-4})
    scale = np.abs(VALUES).max()
    assert found(reference, parameter(UPDATE, VALUES + 0.9e-4 * TIMES * scale)) is None
    off = found(reference, parameter(UPDATE, VALUES + 1.1e-4 * TIMES * scale))
    assert off is not None
    assert off.key == UPDATE
    assert found(reference, parameter(MATRIX, 1 + VALUES + 1e-8 * scale)) is not None


@pytest.mark.parametrize("growth", [1.0, float("inf")])
def test_a_number_that_is_not_finite_is_no_rounding(growth):
    assert found(one_rank({UPDATE: growth}), parameter(UPDATE, VALUES * np.nan)) is not None


def test_rounding_that_does_not_grow_is_not_mentioned():
    (line,) = verdict(one_rank({UPDATE: 1e-13}), [Outcome(Layout(tp=2, dp=1))])
    assert "rounding" not in line


def test_what_rounding_moves_is_said():
    reference = one_rank({UPDATE: 2.0, MATRIX: 1e-3}, [(1, UPDATE[2])])
    first, *more = verdict(reference, [Outcome(Layout(tp=2, dp=1))])
    assert first.startswith("equal: 1 layout computes what one rank does, losses and weights too")
    assert f"2 tensors are rounding (the update of {UPDATE[2]} moves as much" in first
    text = "\n".join(more)
    assert f"rounding decides the update of {UPDATE[2]}\n" in text
    assert f"not judged: 1 tensor from step 1, the update of {MATRIX[2]} on" in text


def test_how_far_a_number_is_off():
    assert relative(3.0, 2.0) == 0.5
    assert relative(0.0, 0.0) == 0.0
    assert relative(float("nan"), 2.0) == float("inf")
    assert relative(1.0, float("nan")) == float("inf")


# Rules of which rounding decides an update: options, and the first tensor that it moves.
BIAS = "the update of blocks.0.attention.qkv.bias"
RIGHT = {
    "lion": ("", BIAS),
    "signum": ("", BIAS),
    "cautious": ("--adam-eps 1e-15", BIAS),
    "soap": ("--optimizer muon", "the update of blocks.0.attention.qkv.weight"),
    "adamw": ("--adam-eps 1e-15", BIAS),
    "adafactor": ("--optimizer adafactor", BIAS),
}
# GPT-2 with fewer tokens and heads than check.py's variants have, which are not about rules.
PLAIN = "--layers 12 --hidden 768 --heads 2 --seq-length 20 --vocab-size 50257 --steps 9"


LONG = [pytest.param(rule, marks=pytest.mark.long) for rule in ("signum", "cautious", "soap")]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["lion", "adamw", "adafactor", *LONG])
def test_a_right_rule_is_equal_where_rounding_decides(rule, tmp_path):
    copy_of_code(tmp_path)
    if rule in tomllib.loads(RULES.read_text()):
        add_rule(rule, tmp_path)
    options, first = RIGHT[rule]
    tp = "" if rule == "adafactor" else "tp 2"  # it needs whole matrices
    zero = 1 if rule == "adafactor" else 2
    layouts = (
        f"{tp} dp 2 zero {zero}",
        "pp 2 cp 2 schedule zb-h1 overlap-param-gather",
        f"{tp} pp 2",
    )
    words = [sys.executable, "check.py", *PLAIN.split(), *options.split()]
    words += [word for layout in layouts for word in ("--layout", layout)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"rounding ({first} moves as much" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("ZeRO gathers no new weights", "dp 2"),
        ("gradients are not summed over the replicas", "dp 2 zero 0"),
    ],
)
def test_a_fault_is_found_beside_updates_that_rounding_decides(name, layout):
    table = tomllib.loads((ROOT / "benchmarks/faults/check_faults.toml").read_text())
    (fault,) = [fault for fault in table["fault"] if fault["name"] == name]
    options = f"{fault.get('options', '')} --layout '{layout}'"
    (row,) = asked(table["runs"], fault | {"options": options}, "lion")
    assert judged(fault, row) == (True, True, True), row["text"]


def test_a_run_that_is_not_finite_on_one_rank_is_refused(tmp_path):
    config, _ = shrink(command_line.parse(GPT.split()), tmp_path)
    answer = RunAnswer(losses=[4.0, float("nan")])
    with pytest.raises(UserError, match="on one rank the loss of step 2 is nan"):
        Engine(config)._keep("", [answer])


# ---- What the verdict says of layouts ------------------------------------------------------------


def test_layouts_that_all_differ_share_nothing_that_is_named():
    several = [Layout(tp=2, dp=1, micro_batch_size=2), Layout(pp=2, dp=1, micro_batch_size=2)]
    assert shared(several, []) == "every layout"
    assert shared([Layout(cp=4, dp=1)], []) == "the only layout with cp that ran"
    assert shared([Layout(tp=2, cp=2, dp=1)], []) == "the only layout with tp and cp that ran"
    assert shared([Layout(dp=1, recompute="full")], []) == "the only layout that ran"


def test_one_layout_that_differs_is_the_only_one_of_its_traits():
    cp = Layout(cp=2, dp=1, recompute="full")
    text = "the only layout with cp above 1 or recompute full that ran"
    assert shared([cp], [Layout(tp=2, dp=1), Layout(dp=2)]) == text
    both = Layout(tp=2, cp=2, dp=1)
    text = "the only layout with tp above 1 and cp above 1 that ran"
    assert shared([both], [Layout(tp=2, dp=1), Layout(cp=2, dp=1), Layout(dp=2)]) == text


def differs(key, layout, differing=None, more=()):
    return Outcome(layout, Difference(key, [], None, differing or [key], 9, [*more, "replicas"]))


TP, SP = Layout(tp=2, dp=1), Layout(tp=2, dp=1, sequence_parallel=True)
CP, DP = Layout(cp=2, dp=1), Layout(dp=2)
OUTPUT, GRADIENT = (1, "output", "blocks.2.mlp"), (1, "gradient", "embedding.tokens.weight")


def test_two_faults_are_two_differences():
    wrong = [differs(OUTPUT, TP), differs(GRADIENT, DP), differs(GRADIENT, CP)]
    groups = list(separate(wrong, [Layout(pp=2, dp=1)]))
    assert sorted(len(group) for group in groups) == [1, 2]
    text = "\n".join(verdict(Reference([], {}), [*wrong, Outcome(Layout(pp=2, dp=1))]))
    assert "another difference, in " in text
    assert "the only layout with tp above 1 that ran" in text
    assert "every layout with dp x cp above 1 or ZeRO 1 differs, and no other" in text


def test_a_fault_that_shows_in_several_tensors_is_one_difference():
    later = (1, "gradient", "blocks.3.mlp.up.weight")
    wrong = [differs(OUTPUT, TP), differs((1, "output", "blocks.0.mlp"), SP), differs(later, SP)]
    assert len(list(separate(wrong, [DP, CP]))) == 1


@pytest.mark.parametrize(
    ("keys", "more", "text"),
    [
        ([(1, "output", "tokens")], [], "no loss, gradient or weight differs"),
        ([GRADIENT], [], "gradients differ in 1 layout, losses are equal, weights are equal"),
        ([GRADIENT, MATRIX], [], "weights differ in 1 layout, losses are equal"),
        ([(1, "number", "loss")], [], "losses differ in 1 layout, gradients are equal"),
        ([OUTPUT], ["validation after step 2 loss: 4.1 for 4.2"], "losses differ in 1 layout"),
    ],
)
def test_the_verdict_says_whether_losses_and_weights_are_equal(keys, more, text):
    lines = verdict(Reference([], {}), [differs(keys[0], TP, keys, more), Outcome(DP)])
    assert text in next(line for line in lines if line.startswith("  result"))


def test_weights_are_explained_by_no_factor_of_the_layout():
    """An update changes little, so that whatever is wrong is nearly a factor of the weights."""
    before, after = (0, *MATRIX[1:]), MATRIX
    reference = Reference([parameter(before, VALUES), parameter(after, VALUES * 0.999)], {})
    off = found(reference, parameter(before, VALUES), parameter(after, VALUES * 0.9989))
    assert off is not None
    (text,) = explanations(reference, off, DP)
    assert text == "off by -0.0001 times the weights before the update: as weight decay is"


# ---- Layouts with a given option -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "had"),
    [
        ("--schedule gpipe", {"schedule": "gpipe"}),
        ("--zero 3 --set sync_each_batch=false", {"zero": 3, "sync_each_batch": False}),
        ("--tp 8", {"tp": 2}),
        ("--pp 4 --tp 4 --cp 2", {"cp": 2, "pp": 2, "tp": 2}),
        ("--experts 4 --ep 4", {"ep": 4}),
        ("--recompute-layers 3", {"recompute_layers": 3}),
        ("--schedule interleaved --virtual-stages 2", {"virtual_stages": 2}),
        ("--set pad_vocab_multiple=128", {"pad_vocab_multiple": 128}),
    ],
)
def test_a_given_option_is_in_half_of_the_layouts(tmp_path, words, had):
    request = command_line.parse_request(f"{GPT} {words}".split())
    config, _ = shrink(request.config, tmp_path)
    plain = cover(config, 4)
    layouts, lines = with_given(config, 4, plain, check.given_layout(request))
    assert len(set(map(name_of, layouts))) == len(layouts) == len(plain)
    assert max(map(ranks_of, layouts)) <= 4
    for name, value in had.items():
        number = sum(getattr(layout, name) == value for layout in layouts)
        assert 2 * number >= len(layouts), (name, lines)
        flag = name.replace("_", "-")
        assert any(f"{number} of {len(layouts)} have" in x and flag in x for x in lines)


def test_an_option_that_no_layout_can_have_is_named(tmp_path):
    request = command_line.parse_request(f"{GPT} --pp 2 --partition 10,2".split())
    config, _ = shrink(request.config, tmp_path)
    _, lines = with_given(config, 4, cover(config, 4), check.given_layout(request))
    assert "without --partition: no layout can have it" in lines


def test_layouts_stay_as_they_are_without_a_given_option(tmp_path):
    config, _ = shrink(command_line.parse(GPT.split()), tmp_path)
    chosen = cover(config, 4)
    assert with_given(config, 4, chosen, {}) == (chosen, [])


def test_what_is_equal_is_one_difference_less():
    reference = one_rank({})
    off = found(reference, parameter(UPDATE, VALUES), parameter(MATRIX, VALUES))
    assert off is not None
    assert off.differing == [MATRIX]
    assert off.results == {"weights"}
    assert dataclasses.replace(off, differing=[]).results == set()
