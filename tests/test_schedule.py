"""Schedules: if this failed, a pipeline would deadlock, hold more or wait longer than it says."""

import graphlib
import itertools

import handmade_schedules as handmade
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import orders, schedule
from schedules.schedule import Action, Schedule, ScheduleError
from schedules.simulation import bubble, draw, makespan, simulate, trace, trace_event, unit_seconds

RANKS = st.integers(1, 9)
MICRO_BATCHES = st.integers(1, 24)


@st.composite
def schedules(draw):
    """Any schedule that there is, with its number of micro-batches."""
    ranks, count = draw(RANKS), draw(MICRO_BATCHES)
    kind = draw(st.sampled_from([*orders.ORDERS, "blockwise", "there and back"]))
    virtual = draw(st.integers(1, 4)) if kind in ("interleaved", "blockwise") else 1
    if kind == "blockwise":
        found = handmade.interleaved(ranks, virtual, count)
    elif kind == "there and back":
        found = handmade.there_and_back(ranks, count)
    else:
        found = orders.build(kind, ranks, count, virtual)
    if not found.split and draw(st.booleans()):
        found = handmade.split(found, count, draw(st.integers(0, 4)))
    return found, count


@given(schedules(), st.floats(0, 1))
def test_every_pass_runs_once_and_after_what_it_needs(made, transfer):
    order, count = made
    slots = simulate(order, transfer=transfer)
    ends = {slot.action: slot.end for row in slots for slot in row}
    kinds = "FBW" if order.split else "FB"
    assert len(ends) == len(kinds) * order.stages * count
    assert makespan(order, unit_seconds(order), transfer) == max(ends.values())
    for rank, row in enumerate(slots):
        assert all(a.end <= b.start for a, b in itertools.pairwise(row))
        for slot in row:
            kind, stage, m = slot.action
            if kind == "F" and stage > 0:
                delay = transfer * (order.rank_of[stage - 1] != rank)
                assert slot.start >= ends[Action("F", stage - 1, m)] + delay
            if kind == "B":
                assert slot.start >= ends[Action("F", stage, m)]
            if kind == "B" and stage < order.stages - 1:
                delay = transfer * (order.rank_of[stage + 1] != rank)
                assert slot.start >= ends[Action("B", stage + 1, m)] + delay
            if kind == "W":
                assert slot.start >= ends[Action("B", stage, m)]


@given(schedules())
def test_both_ends_of_a_message_start_it_while_each_is_between_two_actions(made):
    """By the two questions alone there is an order of actions and messages in which all can run:
    a message is started by its sender before action `sent_before`, and by its receiver before the
    action that takes it, or the one before that; an action follows all messages started before it.
    """
    order = made[0]
    follows: dict[tuple, set] = {}  # by a message's or an action's name, what must be done before
    for rank, row in enumerate(order.ranks):
        for place, action in enumerate(row):
            follows.setdefault((rank, place), set()).add((rank, place - 1) if place else ())
            sender = order.sender_of(action)
            if sender is None:
                continue
            other = order.rank_of[sender.stage]
            taken = place - order.may_be_ahead(action)
            sent = order.sent_before(sender)
            assert sent > order.ranks[other].index(sender)
            # The message ends when both ranks have done what comes before the places.
            follows[sender] = {(rank, taken - 1) if taken else (), (other, sent - 1)}
            follows.setdefault((rank, taken), set()).add(sender)
            if sent < len(order.ranks[other]):
                follows.setdefault((other, sent), set()).add(sender)
    follows[()] = set()
    graphlib.TopologicalSorter(follows).prepare()  # CycleError: ranks that wait for one another


@given(RANKS, MICRO_BATCHES)
def test_peaks_and_bubble_are_the_published_ones(ranks, micro_batches):
    """1F1B holds min(p - s, m) activations; both have a bubble of (p - 1) / (m + p - 1)."""
    one = orders.build("1f1b", ranks, micro_batches)
    gpipe = orders.build("gpipe", ranks, micro_batches)
    assert one.peak == tuple(min(ranks - s, micro_batches) for s in range(ranks))
    assert gpipe.peak == (micro_batches,) * ranks
    expected = (ranks - 1) / (micro_batches + ranks - 1)
    for order in (one, gpipe):
        assert bubble(simulate(order)) == pytest.approx(expected)


@given(RANKS, st.integers(1, 4), st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(ranks, virtual, groups):
    """(p - 1)(f + b) / v, arXiv 2104.04473 section 2.2, in groups of as many as ranks."""
    order = orders.build("interleaved", ranks, groups * ranks, virtual)
    expected = (ranks - 1) / (virtual * groups * ranks + ranks - 1)
    assert bubble(simulate(order)) == pytest.approx(expected)


@given(RANKS, MICRO_BATCHES)
def test_zero_bubble_h1_leaves_a_third_in_the_memory_of_1f1b(ranks, more):
    """(p - 1)(f + b - w), arXiv 2401.10241 section 2.3; nobody holds more than 1F1B's first."""
    count = 2 * ranks + more
    order = orders.build("zb-h1", ranks, count)
    assert bubble(simulate(order)) == pytest.approx((ranks - 1) / (3 * count + ranks - 1))
    assert max(order.peak) <= max(orders.build("1f1b", ranks, count).peak)


@given(st.integers(2, 9), MICRO_BATCHES)
def test_the_v_leaves_less_than_a_third_in_the_memory_of_1f1b(ranks, more):
    """Stages of half the size: a rank holds twice as many activations."""
    count = 2 * ranks + more
    order, plain = orders.build("zb-v", ranks, count), orders.build("1f1b", ranks, count)
    halves = {key: 0.5 * unit for key, unit in unit_seconds(order).items()}
    idle = max(row[-1].end for row in simulate(order, halves)) - 3 * count
    assert idle <= (3 * (ranks - 1)) / 3 + 1e-9
    assert max(order.peak) <= 2 * max(plain.peak)
    assert order.rank_of[0] == order.rank_of[-1] == 0


def test_the_module_shows_what_is_drawn():
    """The picture at the top of the module is what draw() makes."""
    picture = draw(simulate(orders.build("1f1b", 3, 4)))
    drawn = [" ".join(line.split()) for line in picture.splitlines()]
    shown = [" ".join(line.split()) for line in schedule.__doc__.splitlines()]
    assert all(line in shown for line in drawn)


def test_a_trace_has_microseconds():
    (event,) = trace([trace_event("F0", 1, 2, 0.5, 0.75)])["traceEvents"]
    assert (event["ts"], event["dur"], event["pid"], event["tid"]) == (5e5, 2.5e5, 1, 2)


def by_hand(rows: tuple[str, ...]) -> Schedule:
    """A schedule of one stage a rank, of rows like `F0 B0`."""
    ranks = tuple(
        tuple(Action(word[0], rank, int(word[1:])) for word in row.split())
        for rank, row in enumerate(rows)
    )
    return Schedule("by hand", ranks, tuple(range(len(rows))))


# Two ranks that cannot run: the actions of each, and the error.
REFUSED = """
F0 B0 F1 B1 | F0 F1 B1 B0 | ranks 1 and 0 disagree on the order of B: B1 B0 are
F0 F1 B0 B1 | F1 F0 B0 B1 | disagree on the order of F: F0 F1 are sent and F1 F0
F0 F1 B0 | F0 F1 B0 B1 | rank 0 does F0 F1 B0, not each of
F0 F1 B0 B1 | F0 F0 B0 B1 | rank 1 does F0 F0 B0 B1
F0 B0 F1 B1 W0 | F0 B0 F1 B1 W0 W1 | rank 0 does F0 B0 F1 B1 W0, not each of
B0 F0 F1 B1 | F0 B0 F1 B1 | deadlocks: rank 0 waits at B0 of stage 0, rank 1
F0 W0 B0 | F0 W0 B0 | rank 0 waits at W0 of stage 0
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_a_schedule_that_cannot_run_is_refused(line):
    first, second, message = line.split(" | ")
    with pytest.raises(ScheduleError) as caught:
        schedule.check(by_hand((first, second)), 2 if "F1" in first else 1, backward=True)
    assert message in str(caught.value)


def test_an_error_shows_where_each_rank_stands():
    with pytest.raises(ScheduleError, match=r"rank 0  F0 \| B0 F1 B1\nrank 1  F0 \| F1 B0 B1"):
        schedule.check(by_hand(("F0 B0 F1 B1", "F0 F1 B0 B1")), 2, backward=True)
