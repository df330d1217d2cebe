"""When each action of a schedule runs, how long it all takes, and how much of that time is idle.

    slots = simulate(build("1f1b", 4, 8), seconds)

`simulate` is the definition; tests hold `ends` to it, which is many times faster.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from math import inf
from typing import Any, NamedTuple

from schedules.schedule import Action, Schedule, ScheduleError

# Seconds of an action by its kind and stage.
Seconds = Mapping[tuple[str, int], float]
# The usual unit of schedules: a pass takes one, a whole backward two, an embedding none.
UNITS = {"F": 1.0, "B": 1.0, "W": 1.0, "E": 0.0, "S": 1.0, "T": 1.0, "G": 0.0}


class Slot(NamedTuple):
    """An action and when it runs, in the unit of the durations that were simulated."""

    action: Action
    start: float
    end: float


class Timing(NamedTuple):
    """Seconds of one action. ahead: what its rank does before it waits for the input; message: from
    the end of the action that sends the input until the input is there; runs: the action itself.
    """

    ahead: Any
    message: Any
    runs: Any


def unit_seconds(schedule: Schedule) -> dict[tuple[str, int], float]:
    """The seconds of UNITS, by kind of action and stage."""
    seconds = {}
    for stage in range(schedule.stages):
        for kind, unit in UNITS.items():
            seconds[kind, stage] = unit
        if not schedule.split:
            seconds["B", stage] = UNITS["B"] + UNITS["W"]
    return seconds


def simulate(
    schedule: Schedule, seconds: Seconds | None = None, transfer: float = 0.0
) -> list[list[Slot]]:
    """When each action runs, for every rank, if it starts as soon as its input is there.

    `seconds`: each action's duration by kind and stage (default: `unit_seconds`); `transfer`: the
    time of one message between ranks. Raises ScheduleError if some rank would wait for ever.
    """
    seconds = unit_seconds(schedule) if seconds is None else seconds
    return simulate_each(
        schedule, lambda action: Timing(0.0, transfer, seconds[action.kind, action.stage])
    )


def simulate_each(
    schedule: Schedule,
    timing_of: Callable[[Action], Timing],
    later: Callable[[Any, Any], Any] = max,
) -> list[list[Slot]]:
    """As `simulate`, with a timing for every action.

    The timings may be arrays, for many pipelines at once, if `later` is `numpy.maximum`: then the
    times in the slots are arrays too.
    """
    slots: list[list[Slot]] = [[] for _ in schedule.ranks]
    ends: list[Any] = []
    for rank, action, sources in schedule.steps:
        timing = timing_of(action)
        before = slots[rank][-1].end if slots[rank] else 0.0
        start = before + timing.ahead
        for source in sources:
            start = later(start, ends[source] + timing.message)
        ends.append(start + timing.runs)
        slots[rank].append(Slot(action, start, ends[-1]))
    return slots


def makespan(schedule: Schedule, seconds: Seconds, transfer: float = 0.0) -> float:
    """The end of the last action of `simulate`."""
    return max(ends(schedule, seconds, transfer))


def ends(schedule: Schedule, seconds: Seconds, transfer: float = 0.0) -> list[float]:
    """When each action of a schedule ends, by its number (`Numbered`), found without slots.

    Each rank in turn goes on until it waits for what has not ended yet.
    """
    numbered = schedule.numbered
    awaited, stages, size = numbered.awaited, schedule.stages, len(numbered.awaited)
    lasts: list[float] = []
    for kind in schedule.kinds:
        lasts += [seconds[kind, stage] for stage in range(stages)] * numbered.micro_batches
    found = [inf] * size + [-inf]  # the last one is that of NOTHING
    clocks = [0.0] * len(schedule.ranks)
    left = list(map(iter, numbered.ranks))
    waiting: list[tuple[int, ...]] = [()] * len(left)  # the action before those that are left
    while True:
        before = waiting.copy()
        for rank, rest in enumerate(left):
            clock = clocks[rank]
            for number in chain(waiting[rank], rest):
                source = awaited[number]
                if source < size:
                    arrival = found[source] + transfer
                else:  # a pass of all ranks, of which its own is done
                    others = found[source - size : source - size + stages]
                    others[number % stages] = -inf
                    arrival = max(others) + transfer
                if arrival > clock:
                    if arrival == inf:
                        waiting[rank] = (number,)
                        break
                    clock = arrival
                clock += lasts[number]
                found[number] = clock
            else:
                waiting[rank] = ()
            clocks[rank] = clock
        if not any(waiting):
            return found[:size]
        if waiting == before:
            raise ScheduleError(f"{schedule.name} deadlocks: build it to see where")


def bubble(slots: list[list[Slot]]) -> float:
    """Share of all ranks' time in which nothing runs, between the first start and the last end."""
    end = max(slot.end for row in slots for slot in row)
    busy = sum(slot.end - slot.start for row in slots for slot in row)
    return 1.0 - busy / (end * len(slots))
