"""Simulates a schedule: when each action runs, when the last one ends, the share of idle time.

    slots = simulate(build("1f1b", 4, 8), seconds)     for each rank, its actions with their times
    makespan(build("1f1b", 4, 8), seconds)             only the end of the last action

An action is a pass of one micro-batch through one stage, with its kind: F (forward), B (backward),
W (gradients of weights). A rank does one action at a time, in its order. A result for another rank
is a message, which takes the time `transfer`.

`simulate` is the definition. `ends` computes the same times many times faster, for schedules whose
actions are numbers (`actions.Numbered`); tests compare the two. schedule.py defines schedules.

Draws schedules and steps: as a grid of characters, and as events of a Chrome trace.
"""

from collections.abc import Callable
from itertools import chain
from math import inf
from typing import Any, NamedTuple

import numpy as np

from schedules.actions import Action, Numbered, Seconds
from schedules.schedule import Schedule, ScheduleError

# Durations in the unit in which papers draw schedules, a forward pass of any stage. A backward pass
# that is not split takes B + W = 2.
UNITS = {"F": 1.0, "B": 1.0, "W": 1.0}


class Slot(NamedTuple):
    """An action and when it runs, in the unit of the durations that were simulated."""

    action: Action
    start: float
    end: float


class Timing(NamedTuple):
    """The seconds of one action, as numbers or as arrays (see `simulate_each`).

    ahead: the time of the rank's work before it waits for the action's input. message: the time
    from the end of the action that sends the input until the input has arrived. runs: the time that
    the action itself takes.
    """

    ahead: Any
    message: Any
    runs: Any


def unit_seconds(schedule: Schedule) -> dict[tuple[str, int], float]:
    """Return the durations in UNITS, by (kind, stage); they are the same for every stage.

    `simulate` takes these durations if its caller gives none. If the schedule has no W, its B
    computes the gradients of weights too and takes the time of both.
    """
    seconds = {}
    for stage in range(schedule.stages):
        for kind, unit in UNITS.items():
            seconds[kind, stage] = unit
        if not schedule.split:
            seconds["B", stage] = UNITS["B"] + UNITS["W"]
    return seconds


def simulate(
    schedule: Schedule,
    seconds: Seconds | None = None,
    transfer: float = 0.0,
) -> list[list[Slot]]:
    """Return for every rank its actions with their start and end.

    An action starts as soon as its rank is free and its input has arrived. seconds: the duration of
    an action by (kind, stage); None: `unit_seconds`. transfer: the time of one message between
    ranks, in the same unit. Raise ScheduleError if some rank would wait for ever.
    """
    durations = unit_seconds(schedule) if seconds is None else seconds
    return simulate_each(
        schedule,
        lambda action: Timing(0.0, transfer, durations[action.kind, action.stage]),
    )


def simulate_each(
    schedule: Schedule,
    timing_of: Callable[[Action], Timing],
    later: Callable[[Any, Any], Any] = max,
) -> list[list[Slot]]:
    """Return for every rank its actions with their start and end, by a `Timing` for each action.

    timing_of: returns an action's timing. later: returns the later of two times. With
    `numpy.maximum` the timings may be arrays, to simulate many pipelines at once; then the times in
    the slots are arrays too. Called by `simulate`, and for the measured times of a run.
    """
    slots: list[list[Slot]] = [[] for _ in schedule.ranks]
    ends: list[Any] = []  # the end of each action, in the order of `schedule.steps`
    for rank, action, sources in schedule.steps:  # sources: the indices in `ends` that it waits for
        timing = timing_of(action)
        # The rank is free when its action before has ended. It then works for the time `ahead`, and
        # starts this action when the inputs have arrived too.
        before = slots[rank][-1].end if slots[rank] else 0.0
        start = before + timing.ahead
        for source in sources:
            start = later(start, ends[source] + timing.message)
        ends.append(start + timing.runs)
        slots[rank].append(Slot(action, start, ends[-1]))
    return slots


def makespan(schedule: Schedule, seconds: Seconds, transfer: float = 0.0) -> float:
    """Return the time at which the last action ends; the first action starts at 0.

    seconds: the duration of an action by (kind, stage). transfer: the time of one message.
    """
    return max(ends(schedule.numbered, seconds, transfer))


def ends(numbered: Numbered, seconds: Seconds, transfer: float = 0.0) -> list[float]:
    """Return the time at which each action ends, in the order of the actions' numbers.

    seconds: the duration of an action by (kind, stage). transfer: the time of one message. Each
    rank in turn runs its actions until it needs the result of an action that has not run, whose end
    is infinity so far. Raise ScheduleError if no rank can go on.
    """
    awaited = numbered.awaited  # for each action, the action of another rank that it waits for
    stages = numbered.stages
    size = len(awaited)
    durations: list[float] = []  # the duration of each action, by its number
    for kind in numbered.kinds:
        durations += [seconds[kind, stage] for stage in range(stages)] * numbered.micro_batches
    # An action that waits for no other rank awaits number -1 (NOTHING). This is the index of the
    # last entry, -inf, so its input has always arrived.
    ended = [inf] * size + [-inf]
    clocks = [0.0] * len(numbered.ranks)  # for each rank, the time at which it is free
    to_do = list(map(iter, numbered.ranks))
    # For each rank, the action that was taken from `to_do` and waits for its input, as a tuple of
    # one number; an empty tuple if no action waits.
    waiting: list[tuple[int, ...]] = [()] * len(to_do)
    while True:
        before = waiting.copy()
        for rank, row in enumerate(to_do):
            clock = clocks[rank]
            for number in chain(waiting[rank], row):
                arrival = ended[awaited[number]] + transfer
                if arrival > clock:
                    # The action's input has not been computed yet: go on with the next rank.
                    if arrival == inf:
                        waiting[rank] = (number,)
                        break
                    clock = arrival
                clock += durations[number]
                ended[number] = clock
            else:
                waiting[rank] = ()
            clocks[rank] = clock
        if not any(waiting):
            return ended[:size]
        if waiting == before:  # no rank has run an action in this round
            raise ScheduleError(f"{numbered.name} deadlocks: build it to see where")


def ends_by_rounds(
    ranks: int, micro_batches: int, seconds: Seconds, transfer: float, split: bool
) -> tuple[float, list[float]]:
    """Return when 1F1B ends, or with `split` ZB-H1, and when each B of its last rank ends.

    The times are those of `ends`, many times faster for many ranks, as all ranks are computed at
    once: with p ranks, rank r does the F of micro-batch t - r and then the B of micro-batch
    t - p + 1 in step t = 0, 1, ..., if there are such. In ZB-H1 a W follows each B of rank r from
    its micro-batch r on, and the last r of them come at the end.
    """
    kinds = "FBW" if split else "FB"
    durations = [np.array([seconds[kind, rank] for rank in range(ranks)]) for kind in kinds]
    forward, backward = durations[:2]
    weights = durations[2] if split else np.zeros(ranks)
    clocks = np.zeros(ranks)  # for each rank, the time at which it is free
    arrived = np.full(ranks, -inf)  # for each rank, when the input of its next F has arrived
    # A B waits for the one of the next rank, and so on: its end is the latest, over itself and all
    # later ranks, of the time at which the rank is free and then of all B and messages in between.
    # back[r]: the seconds of the B of ranks 0 to r, with a message after each.
    back = np.cumsum(backward + transfer)
    before = back - backward
    backwards = []
    for step in range(micro_batches + ranks - 1):
        # The ranks that have a forward pass in this step; the first has micro-batch `step`.
        having = slice(max(0, step - micro_batches + 1), step + 1)
        ended = np.maximum(clocks[having], arrived[having]) + forward[having]
        clocks[having] = ended
        arrived[1:] = clocks[:-1] + transfer
        done = step - ranks + 1  # the micro-batch whose B all ranks do
        if done >= 0:
            latest = np.maximum.accumulate((clocks + back)[::-1])[::-1]
            clocks = latest - before
            backwards.append(float(clocks[-1]))
            clocks[: done + 1] += weights[: done + 1]
    left = np.minimum(np.arange(ranks), micro_batches)
    return float((clocks + left * weights).max()), backwards


def gpipe_end(ranks: int, micro_batches: int, seconds: Seconds, transfer: float) -> float:
    """Return when the last action of GPipe ends, with one stage on each rank.

    All micro-batches take the same time, so once the first one has passed all ranks, the others
    follow one by one in the time of the slowest rank; first forward, then backward.
    """
    end = 0.0
    for kind in "FB":
        durations = [seconds[kind, rank] for rank in range(ranks)]
        end += sum(durations) + (ranks - 1) * transfer + (micro_batches - 1) * max(durations)
    return end


def bubble(slots: list[list[Slot]]) -> float:
    """Return the bubble: the idle share (0 to 1) of all ranks' time, from 0 to the last end."""
    end = max(slot.end for row in slots for slot in row)
    busy = sum(slot.end - slot.start for row in slots for slot in row)
    return 1.0 - busy / (end * len(slots))


# ---- Pictures: grids of characters, and Chrome traces --------------------------------------------


def draw(slots: list[list[Slot]], columns: int = 48) -> str:
    """Return a grid of simulated slots, a line per rank and a column per unit of time.

    `F0` marks the first unit of an action, `==` a further unit, `..` an idle one. At most `columns`
    units are drawn; the lines of a longer schedule end in `...`. If some rank holds several stages,
    lines are named by rank instead of stage, and actions by micro-batch and stage: `F0.2`. A line:

        stage 0  F0 F1 .. .. B0 == .. B1 ==
    """
    several_stages = any(len({slot.action.stage for slot in row}) > 1 for row in slots)

    def name(slot: Slot) -> str:
        """Return the text that marks the first unit of a slot's action."""
        return f"{slot.action}.{slot.action.stage}" if several_stages else str(slot.action)

    end = max((slot.end for row in slots for slot in row), default=0)
    width = max((len(name(slot)) for row in slots for slot in row), default=2)
    lines = []
    for number, row in enumerate(slots):
        cells = ["." * width] * min(int(end), columns)
        for slot in row:
            for t in range(int(slot.start), min(int(slot.end), columns)):
                cells[t] = name(slot).ljust(width) if t == int(slot.start) else "=" * width
        head = "rank" if several_stages else "stage"
        line = f"{head} {number:<3}" + " ".join(cells)
        if end > columns:
            line += " ..."
        lines.append(line)
    return "\n".join(lines)


# ---- Chrome traces, for chrome://tracing and ui.perfetto.dev -------------------------------------


def trace_event(
    name: str,
    process: int,
    thread: int,
    start: float,
    end: float,
    **more: Any,
) -> dict[str, Any]:
    """Return a trace event that is drawn as a bar from `start` to `end`, in seconds.

    process, thread: numbers that choose the row in which the viewer draws the bar. more: further
    fields of the event. A Chrome trace has its times in microseconds.
    """
    times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}
    return {"name": name, "ph": "X", "pid": process, "tid": thread} | times | more


def trace(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the document of a Chrome trace, which the caller writes as JSON for a viewer.

    events: the results of `trace_event`.
    """
    return {"traceEvents": events, "displayTimeUnit": "ms"}
