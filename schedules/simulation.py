"""When each action of a schedule runs, and how much of the pipeline's time is idle.

slots = simulate(build("1f1b", 4, 8), seconds)
makespan(schedule, seconds, transfer)            the end of the last action alone
"""

from collections.abc import Mapping
from typing import NamedTuple

from schedules.schedule import Action, Schedule, dependency_order

# Seconds of an action by its kind and stage.
Seconds = Mapping[tuple[str, int], float]


class Slot(NamedTuple):
    """An action and when it runs, in the unit of the durations that were simulated."""

    action: Action
    start: float
    end: float


def unit_seconds(schedule: Schedule) -> dict[tuple[str, int], float]:
    """The usual unit of schedules: a forward takes one, a backward two, half of it if split."""
    backward = 1.0 if schedule.split else 2.0
    units = {"F": 1.0, "B": backward, "W": 1.0}
    return {(kind, s): unit for kind, unit in units.items() for s in range(schedule.stages)}


def simulate(
    schedule: Schedule, seconds: Seconds | None = None, transfer: float = 0.0
) -> list[list[Slot]]:
    """When each action runs, for every rank, if it starts as soon as its input is there.

    `seconds`: each action's duration by kind and stage (default: `unit_seconds`); `transfer`: the
    time of one message between ranks. Raises ScheduleError if some rank would wait for ever.
    """
    seconds = unit_seconds(schedule) if seconds is None else seconds
    slots: list[list[Slot]] = [[] for _ in schedule.ranks]
    ends: dict[Action, float] = {}
    for rank, action in dependency_order(schedule):
        start = slots[rank][-1].end if slots[rank] else 0.0
        needed = schedule.input_of(action)
        if needed is not None and schedule.rank_of[needed.stage] != rank:
            start = max(start, ends[needed] + transfer)
        ends[action] = start + seconds[action.kind, action.stage]
        slots[rank].append(Slot(action, start, ends[action]))
    return slots


def makespan(schedule: Schedule, seconds: Seconds, transfer: float = 0.0) -> float:
    """The end of the last action of `simulate`."""
    return max(row[-1].end for row in simulate(schedule, seconds, transfer))


def bubble(slots: list[list[Slot]]) -> float:
    """Share of all ranks' time in which nothing runs, between the first start and the last end."""
    end = max(slot.end for row in slots for slot in row)
    busy = sum(slot.end - slot.start for row in slots for slot in row)
    return 1.0 - busy / (end * len(slots))
