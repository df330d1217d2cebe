"""Schedules: every dependency met, nothing deadlocks, and the known counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import schedule
from schedules.schedule import Action, ScheduleError

STAGES = st.integers(1, 9)
MICRO_BATCHES = st.integers(1, 24)


@given(st.sampled_from(["gpipe", "1f1b"]), STAGES, MICRO_BATCHES)
def test_every_pass_runs_once_and_after_what_it_needs(name, stages, micro_batches):
    order = schedule.build(name, stages, micro_batches)
    ends = {}
    slots = schedule.simulate(order.stages)
    for s, row in enumerate(slots):
        assert len(row) == 2 * micro_batches
        for slot in row:
            ends[s, slot.action] = slot.end
    for s, row in enumerate(slots):
        for slot in row:
            forward, backward = slot.action.kind == "F", slot.action.kind == "B"
            if forward and s > 0:
                assert slot.start >= ends[s - 1, slot.action]
            if backward:
                assert slot.start >= ends[s, Action("F", slot.action.micro_batch)]
            if backward and s < stages - 1:
                assert slot.start >= ends[s + 1, slot.action]


@given(STAGES, MICRO_BATCHES)
def test_peaks_and_bubble_are_the_published_ones(stages, micro_batches):
    """1F1B holds min(p - s, m) activations; both have a bubble of (p - 1) / (m + p - 1)."""
    one = schedule.build("1f1b", stages, micro_batches)
    gpipe = schedule.build("gpipe", stages, micro_batches)
    assert one.peak == tuple(min(stages - s, micro_batches) for s in range(stages))
    assert gpipe.peak == (micro_batches,) * stages
    expected = (stages - 1) / (micro_batches + stages - 1)
    for order in (one, gpipe):
        assert schedule.bubble(schedule.simulate(order.stages)) == pytest.approx(expected)


@given(STAGES, MICRO_BATCHES)
def test_evaluation_only_goes_forward(stages, micro_batches):
    order = schedule.build("forward", stages, micro_batches)
    assert all(action.kind == "F" for row in order.stages for action in row)


def test_the_module_shows_what_is_drawn():
    """The picture at the top of the module is what draw() makes."""
    picture = schedule.draw(schedule.simulate(schedule.build("1f1b", 3, 4).stages))
    drawn = [" ".join(line.split()) for line in picture.splitlines()]
    shown = [" ".join(line.split()) for line in schedule.__doc__.splitlines()]
    assert all(line in shown for line in drawn)


def test_a_long_schedule_is_cut():
    picture = schedule.draw(schedule.simulate(schedule.build("1f1b", 4, 50).stages), columns=10)
    assert all(line.endswith(" ...") for line in picture.splitlines())


def actions(text: str) -> tuple[Action, ...]:
    return tuple(Action(word[0], int(word[1:])) for word in text.split())


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["F0 B0 F1 B1", "F0 F1 B1 B0"], "disagree on the order of B: [0, 1] and [1, 0]"),
        (["F0 F1 B0 B1", "F1 F0 B0 B1"], "disagree on the order of F: [0, 1] and [1, 0]"),
        (["F0 F1 B0", "F0 F1 B0 B1"], "stage 0 does F0 F1 B0, not each of"),
        (["F0 F1 B0 B1", "F0 F0 B0 B1"], "stage 1 does F0 F0 B0 B1"),
        (["B0 F0 F1 B1", "F0 B0 F1 B1"], "the schedule deadlocks: stage 0 waits at B0, stage 1"),
        (["F0 B0 F1 B1", "F0 F1 B0 B1"], "deadlocks: stage 0 waits at B0, stage 1 waits at F1"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(stages, message):
    with pytest.raises(ScheduleError) as caught:
        schedule.check(tuple(map(actions, stages)), 2, backward=True)
    assert message in str(caught.value)


@given(STAGES, MICRO_BATCHES, st.floats(0.1, 3), st.floats(0, 1))
def test_simulated_time_has_the_closed_form(stages, micro_batches, ratio, transfer):
    """Even stages: (m + p - 1)(f + b) and the way of the first forward and last backward."""
    order = schedule.build("gpipe", stages, micro_batches)
    slots = schedule.simulate(
        order.stages, lambda s, action: 1.0 if action.kind == "F" else ratio, transfer
    )
    end = max(row[-1].end for row in slots)
    expected = (micro_batches + stages - 1) * (1 + ratio) + 2 * (stages - 1) * transfer
    assert end == pytest.approx(expected)
