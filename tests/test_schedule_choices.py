"""`--schedule auto` and blocks recomputed by stage: the runs equal the single-rank run.

For costs, memory and models made up by Hypothesis, what is chosen runs, fits, and is what is
executed. Then the chosen runs against the single-rank run.
"""

import dataclasses

import pytest
from compare import assert_within
from golden_worker import options
from hypothesis import given, settings
from hypothesis import strategies as st
from test_golden import TOLERANCE, check_lines, effect_of_rounding, lines_of

from config import validation
from config.schema import Layout, ModelShape
from schedules import orders, schedule
from schedules.choice import decide, decide_layout
from schedules.list_scheduling import parts_of, task_of
from schedules.orders import of_layout, stage_costs
from schedules.partition import blocks_per_stage
from schedules.simulation import makespan

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
    )
    return model, layout, draw(st.integers(1, 12))


@settings(deadline=None, max_examples=25)
@given(requests())
def test_what_is_chosen_runs_fits_and_is_no_slower_than_1f1b(request_):
    model, asked, count = request_
    task = dataclasses.replace(task_of(model, asked, "cpu"), micro_batches=count)
    layout, choice = decide_layout(model, asked, count, "cpu")
    order = of_layout(model, layout, count, "cpu")
    schedule.check(order, count, backward=True)
    _, block, head = parts_of(model, asked, "cpu")
    sizes = [blocks * block.held for blocks in blocks_per_stage(model, layout)]
    sizes[-1] += head.held
    assert max(order.most_held(sizes)) <= task.limit * TIGHT
    plain = orders.build("1f1b", task.ranks, count)
    costs = task.costs("1f1b", task.balanced(range(task.ranks)))
    assert choice.seconds <= makespan(plain, costs.seconds(False), task.transfer) * TIGHT
    # The priced order is executed.
    seconds = choice.costs.seconds(order.split)
    assert makespan(order, seconds, task.transfer) == pytest.approx(choice.seconds)
    assert stage_costs(model, layout, "cpu") in (None, choice.costs)
    assert decide_layout(model, layout, count, "cpu") == (layout, None)


# ---- On four ranks -------------------------------------------------------------------------------


def test_the_cases_are_what_they_are_meant_to_be():
    """Orders of both kinds are among them: made for the stages' own costs, and named ones."""
    names = set()
    for case in lines_of("choices")[4][:3]:
        config, _ = decide(validation.check(options(case), 4), "cpu")
        names.add(config.layout.schedule)
    assert any(name in orders.SEARCHED for name in names)
    assert any(name in orders.ORDERS for name in names)


def test_rounding_is_well_within_the_tolerance_with_many_words():
    """Most gradients of a large vocabulary are small, so that Adam could make rounding large."""
    case = lines_of("choices")[4][0]
    assert_within(effect_of_rounding(case), TOLERANCE["fp32"] / 3, case)


@pytest.mark.slow
def test_what_is_chosen_equals_the_single_rank_run(tmp_path):
    check_lines("choices", tmp_path)
