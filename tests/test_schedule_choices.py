"""What `--schedule auto` chooses beside the order: --vocab-pp, and the blocks that are recomputed.

For costs, memory and models made up by Hypothesis: nothing deadlocks or holds more than it may, and
1F1B is never faster where it fits. Then the chosen runs against the single-rank run.
"""

import dataclasses
import re

import pytest
from compare import assert_within
from golden_worker import options
from hypothesis import given, settings
from hypothesis import strategies as st
from test_golden import (
    FEW_STEPS,
    TOLERANCE,
    distance,
    effect_of_rounding,
    reference,
    run_cases,
)

from config import validation
from config.command_line import preset
from config.messages import UserError
from config.schema import Layout, ModelShape
from schedules import automatic, compiler, schedule, vocabulary
from schedules.costs import parts_of, task_of
from schedules.partition import blocks_per_stage
from schedules.simulation import LongSchedule

TIGHT = 1 + 1e-6

# ---- Whatever the costs --------------------------------------------------------------------------


@st.composite
def requests(draw):
    """A small model, a layout that says auto, and a number of micro-batches."""
    pp, layers = draw(st.integers(2, 5)), draw(st.integers(1, 12))
    layers = max(layers, pp - 2)
    words = draw(st.integers(64, 30_000))
    model = ModelShape(layers, 64, 4, seq_length=64, vocab_size=words, tied=draw(st.booleans()))
    costs = ",".join(f"{draw(st.floats(0.1, 9)):.3f}" for _ in range(6))
    layout = Layout(pp=pp, dp=1, schedule="auto")
    layout = dataclasses.replace(
        layout,
        schedule_costs=draw(st.sampled_from(["counted", costs])),
        recompute=draw(st.sampled_from(["none", "full"])),
        vocab_pp=draw(st.sampled_from([None, True, False])),
        activation_memory=draw(st.none() | st.floats(0.05, 1.5)),
    )
    return model, layout, draw(st.integers(1, 12))


def held(model: ModelShape, layout: Layout, order: schedule.Schedule) -> list[float]:
    """What each rank holds at the most, counted from the order that is executed."""
    _, block, head = parts_of(model, layout, "cpu")
    again = [layout.recomputed_blocks(n, s) for s, n in enumerate(blocks_per_stage(model, layout))]
    if layout.activation_memory is None:  # `block` is one as all are
        again = [0 for _ in again]
    rows = zip(blocks_per_stage(model, layout), again, strict=True)
    sizes = [(n - k) * block.held + k * 4 * model.hidden for n, k in rows]
    beside = [head.held / layout.pp + (layout.pp + 2) * 4 * model.hidden for _ in range(layout.pp)]
    if not layout.vocab_pp:
        sizes[-1], beside = sizes[-1] + head.held, [0.0 for _ in beside]
    working = [0.0] * layout.pp
    for stage, count in enumerate(again):
        working[order.rank_of[stage]] = max(working[order.rank_of[stage]], bool(count) * block.held)
    parts = zip(order.most_held(sizes), working, beside, strict=True)
    return [sum(each) for each in parts]


def plain_seconds(task: compiler.Task) -> float | None:
    """Of 1F1B that recomputes just what it must, rank by rank; None if that is not enough."""
    whole = [sum(part[:3]) for part in task.parts]
    blocks = task.blocks or compiler.balanced_ranks(task.layers, range(task.ranks), *whole)
    order = schedule.build("1f1b", task.ranks, task.micro_batches)
    again = []
    for rank, count in enumerate(blocks):
        for n in range(count + 1 if task.recomputed else 1):
            own = task.costs("1f1b", blocks, [n * (r == rank) for r in range(task.ranks)])
            if order.peak[rank] * own.stages[rank].held <= own.limits[rank]:
                again.append(n)
                break
    if len(again) < task.ranks:
        return None
    seconds = task.costs("1f1b", blocks, again).seconds(split=False)
    return LongSchedule.of(order).makespan(seconds, task.transfer)


@settings(deadline=None, max_examples=25)
@given(requests())
def test_what_is_chosen_runs_fits_and_is_no_slower_than_1f1b(request_):
    model, asked, count = request_
    task = dataclasses.replace(task_of(model, asked, "cpu"), micro_batches=count)
    plain = plain_seconds(task)
    refusal, found = "", None
    try:
        found = automatic.settled_layout(model, asked, count, "cpu")
    except UserError as error:
        refusal = str(error)
    if found is None:
        assert plain is None or asked.vocab_pp
        assert f"--activation-memory {asked.activation_memory}: no schedule" in refusal
        return
    layout, choice = found
    assert asked.vocab_pp in (None, layout.vocab_pp)
    order = vocabulary.of_layout(model, layout, count, "cpu")
    schedule.check(order, count, backward=True)
    most = max(held(model, layout, order))
    if asked.activation_memory is not None or not layout.vocab_pp:
        assert most <= task.limits[0] * TIGHT
    elif not asked.vocab_pp:  # with what the vocabulary's weights and gradients take
        matrix = 8 * model.vocab_size * model.hidden / model.seq_length
        most += matrix * (1 if model.tied else 2) / layout.pp
        assert most <= (task.limits[0] + matrix) * TIGHT
    if plain is not None and not asked.vocab_pp:
        assert choice.seconds <= plain * TIGHT
    # What was priced is what is executed.
    seconds = choice.costs.seconds(order.split)
    if layout.vocab_pp:
        seconds = vocabulary.pass_seconds(model, layout, "cpu")
    assert LongSchedule.of(order).makespan(seconds, task.transfer) == pytest.approx(choice.seconds)
    assert automatic.settled_layout(model, layout, count, "cpu") == (layout, None)


def test_the_limit_is_a_share_of_what_1f1b_holds_without_recomputation():
    model = ModelShape(16, 64, 4, seq_length=64, vocab_size=64)
    whole = task_of(model, Layout(pp=4, dp=1, schedule="auto"), "cpu").limits[0]
    half = Layout(pp=4, dp=1, schedule="auto", activation_memory=0.5, recompute="full")
    assert task_of(model, half, "cpu").limits == (0.5 * whole,) * 4


def test_stages_recompute_only_where_they_would_not_fit():
    """In half of 1F1B's memory the first ranks of 1F1B do, the last ones hold too little for it."""
    model = ModelShape(32, 64, 4, seq_length=64, vocab_size=64)
    asked = Layout(pp=4, dp=1, schedule="auto", activation_memory=0.6, recompute="full")
    asked = dataclasses.replace(asked, partition="8,8,8,8")
    task = dataclasses.replace(task_of(model, asked, "cpu"), micro_batches=8)
    order = compiler.long_schedule("1f1b", 4, 8)
    again = compiler.enough_recomputed(task, order, "1f1b", (8, 8, 8, 8))
    assert again[0] > again[1] > 0
    assert again[2:] == (0, 0)
    fewer = (again[0] - 1, *again[1:])
    costs = task.costs("1f1b", (8, 8, 8, 8), fewer)
    assert order.most_held([one.held for one in costs.stages])[0] > costs.limits[0]
    layout, choice = automatic.settled_layout(model, asked, 8, "cpu")
    whole = task_of(model, dataclasses.replace(asked, activation_memory=1.0), "cpu").limits[0]
    found = vocabulary.of_layout(model, layout, 8, "cpu")
    assert max(held(model, layout, found)) <= 0.6 * whole * TIGHT
    everywhere = dataclasses.replace(asked, activation_memory=None)
    _, full = automatic.settled_layout(model, everywhere, 8, "cpu")
    assert choice.seconds < full.seconds


# ---- --vocab-pp ----------------------------------------------------------------------------------

LARGE = ModelShape(layers=24, hidden=2048, heads=16, seq_length=2048, vocab_size=250_000)
EIGHT = Layout(pp=8, dp=1, schedule="auto", recompute="full")


def test_a_head_of_nine_blocks_is_spread_and_blooms_is_not():
    layout, choice = automatic.settled_layout(LARGE, EIGHT, 24)
    assert (layout.schedule, layout.vocab_pp, choice.vocab_pp) == ("1f1b", True, True)
    assert "--vocab-pp chosen: in simulation 1F1B with it takes 0." in choice.note
    bloom = Layout(tp=4, pp=12, dp=1, schedule="auto", recompute="full")
    layout, choice = automatic.settled_layout(preset("bloom-176b"), bloom, 24)
    assert (layout.vocab_pp, choice.vocab_pp) == (False, False)
    with_it, without = map(float, re.findall(r"(?:takes|without it) (\d\.\d+)", choice.note))
    assert choice.note.startswith("--vocab-pp not chosen: in simulation 1F1B with it takes ")
    assert with_it > without


@pytest.mark.parametrize(("words", "given_"), [(250_000, False), (64, True)])
def test_what_is_given_is_kept(words, given_):
    model = dataclasses.replace(LARGE, vocab_size=words)
    asked = dataclasses.replace(EIGHT, pp=4, vocab_pp=given_)
    layout, choice = automatic.settled_layout(model, asked, 4)
    assert layout.vocab_pp is choice.vocab_pp is given_
    assert "chosen" not in choice.note


@pytest.mark.parametrize("more", [{"optimizer": "adafactor"}, {"objective": "prefix"}])
def test_a_run_that_cannot_have_it_does_not_get_it(more):
    shape = {"layers": 4, "vocab_size": 4093, "pp": 4, "schedule": "auto"}
    config = validation.check(options(shape), 4)
    assert automatic.settled(config, "cpu")[0].layout.vocab_pp is True
    config = validation.check(options(shape | more), 4)
    assert automatic.settled(config, "cpu")[0].layout.vocab_pp is False


# ---- On four ranks -------------------------------------------------------------------------------

FULL, DOUBLE = {"recompute": "full", "pp": 4}, {"precision": "fp64"}
CASES = [
    {"pp": 4, "schedule": "auto", "vocab_size": 4093, "micro_batch_size": 2},
    FULL | {"schedule": "auto", "vocab_size": 4093, "activation_memory": 0.5} | DOUBLE,
    {"pp": 2, "tp": 2, "schedule": "auto", "vocab_pp": True, "tied": False, "zero": 2},
    {"pp": 2, "recompute": "full", "schedule": "auto", "activation_memory": 0.6} | DOUBLE,
    FULL | {"schedule": "auto", "activation_memory": 0.6, "partition": "2,2,2,2"},
    {"pp": 2, "schedule": "zb-v", "recompute": "selective", "recompute_blocks": "0,2,1,0"},
    FULL | {"schedule": "1f1b", "vocab_pp": True, "recompute_blocks": "2,1,0,0"},
]


def asked(case: dict) -> dict:
    common = {"layers": 8, "global_batch_size": 8, "precision": "fp32", "steps": FEW_STEPS}
    return common | case


def test_the_cases_are_what_they_are_meant_to_be():
    found = [automatic.settled(validation.check(options(asked(c)), 4), "cpu")[0] for c in CASES]
    layouts = [config.layout for config in found]
    assert [layout.vocab_pp for layout in layouts[:5]] == [True, True, True, False, False]
    mixed = [set(layout.recompute_blocks.split(",")) for layout in layouts[3:5]]
    assert all(len(each) > 1 for each in mixed), "some stages recompute and others do not"


def test_rounding_is_well_within_the_tolerance_with_many_words():
    """Most gradients of a large vocabulary are small, so that Adam could make rounding large."""
    assert_within(effect_of_rounding(asked(CASES[0])), TOLERANCE["fp32"] / 3, CASES[0])


@pytest.mark.slow
def test_what_is_chosen_equals_the_single_rank_run(tmp_path):
    cases = [asked(case) for case in CASES]
    for case, result in zip(cases, run_cases(4, cases, tmp_path), strict=True):
        assert_within(distance(result, reference(case)), TOLERANCE[case["precision"]], case)


# ---- Mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"schedule_costs": "measured"}, "--schedule-costs measured needs --schedule auto"),
        ({"schedule_costs": "1,2,3,4,5,6", "schedule": "zb-h1"}, "searches, not zb-h1"),
        ({"activation_memory": 0.5}, "--activation-memory 0.5 needs --schedule auto"),
        ({"activation_memory": 0.5, "schedule": "auto", "pp": 1}, "of a pipeline: pp is 1"),
        ({"activation_memory": 0.5, "schedule": "auto", "recompute": "selective"}, "not selective"),
        (
            {"activation_memory": 0.5, "schedule": "auto", **FULL, "recompute_layers": 1},
            "not full of the first 1",
        ),
        (
            {"recompute_blocks": "1,1,1,1", "schedule": "auto", **FULL},
            "itself, by --activation-memory",
        ),
        ({"recompute_blocks": "1,1"}, "--recompute-blocks 1,1 needs --recompute selective or full"),
        ({"recompute_blocks": "1,1", **FULL}, "1,1 has 2 stages, but the layout has 4"),
        ({"recompute_blocks": "1,x", **FULL}, "a list like 3,2,1,0, not '1,x'"),
        ({"recompute_blocks": "1", **FULL, "recompute_layers": 2}, "give --recompute-layers(2) or"),
    ],
)
def test_options_that_do_not_go_together_are_a_sentence(case, message):
    with pytest.raises(UserError) as caught:
        validation.check(options({"pp": 2, "layers": 4} | case), 4)
    assert message in str(caught.value)
