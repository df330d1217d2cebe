"""When each action of a schedule runs, how long it all takes, and how much of that time is idle.

    slots = simulate(build("1f1b", 4, 8), seconds)
    named("1f1b", 48, 2048).makespan(seconds, transfer)   the end alone, of 200,000 actions

`simulate` is the definition; tests hold `end_of` and `makespan` to it. With more micro-batches a
named schedule repeats the same actions more often (1F1B: a forward and a backward), so `named`
builds it with few micro-batches and with a few more, and takes what differs as often as needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from schedules.schedule import Action, Schedule, dependency_order, unchecked

# Seconds of an action by its kind and stage.
Seconds = Mapping[tuple[str, int], float]
ROUNDS = 4  # micro-batches for each rank, after which every schedule repeats itself


class Slot(NamedTuple):
    """An action and when it runs, in the unit of the durations that were simulated."""

    action: Action
    start: float
    end: float


def unit_seconds(schedule: Schedule) -> dict[tuple[str, int], float]:
    """The usual unit of schedules: a pass takes one, a whole backward two, an embedding none."""
    backward = 1.0 if schedule.split else 2.0
    units = {"F": 1.0, "B": backward, "W": 1.0} | {"E": 0.0, "S": 1.0, "T": 1.0, "G": 0.0}
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
        for one in schedule.of_all_ranks(action):
            start = max(start, ends[one] + transfer * (one.stage != action.stage))
        ends[action] = start + seconds[action.kind, action.stage]
        slots[rank].append(Slot(action, start, ends[action]))
    return slots


def bubble(slots: list[list[Slot]]) -> float:
    """Share of all ranks' time in which nothing runs, between the first start and the last end."""
    end = max(slot.end for row in slots for slot in row)
    busy = sum(slot.end - slot.start for row in slots for slot in row)
    return 1.0 - busy / (end * len(slots))


# ---- Schedules of many micro-batches ------------------------------------------------------------


def end_of(schedule: Schedule, seconds: Seconds, transfer: float = 0.0) -> float:
    """The end of the last action of `simulate`, found without a list of them."""
    rank_of, last = schedule.rank_of, schedule.stages - 1
    clocks = [0.0] * len(schedule.ranks)
    ends: dict[Action, float] = {}
    for rank, action in schedule.order:
        kind, stage, micro_batch = action
        start = clocks[rank]
        if kind == "F" and stage > 0 and rank_of[stage - 1] != rank:
            start = max(start, ends["F", stage - 1, micro_batch] + transfer)  # type: ignore[index]
        elif kind == "B" and stage < last and rank_of[stage + 1] != rank:
            start = max(start, ends["B", stage + 1, micro_batch] + transfer)  # type: ignore[index]
        if schedule.vocabulary:
            for one in schedule.of_all_ranks(action):
                start = max(start, ends[one] + transfer * (one.stage != stage))
        ends[action] = clocks[rank] = start + seconds[kind, stage]
    return max(clocks)


@dataclass(frozen=True)
class LongSchedule:
    """What a schedule holds and takes, without a list of all its actions.

    rounds: how often it has, beyond `longer`, what `longer` has more than `base`.
    """

    base: Schedule
    longer: Schedule | None = None
    rounds: int = 0

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """As `Schedule.most_held`."""
        held = self.base.most_held(sizes)
        if self.longer is None:
            return held
        grown = self.longer.most_held(sizes)
        pairs = zip(held, grown, strict=True)
        return tuple(then + self.rounds * (then - less) for less, then in pairs)

    def makespan(self, seconds: Seconds, transfer: float = 0.0) -> float:
        """The end of the last action of `simulate`, or what it is if every round takes as long."""
        end = end_of(self.base, seconds, transfer)
        if self.longer is None:
            return end
        later = end_of(self.longer, seconds, transfer)
        return later + self.rounds * (later - end)


@lru_cache(maxsize=1024)
def named(name: str, ranks: int, micro_batches: int, virtual: int = 1) -> LongSchedule:
    """The schedule of that name, for any counts >= 1; `name` is checked by config.

    With many micro-batches a named schedule does the same again and again, so that it is built with
    ROUNDS micro-batches for each rank, and with one more for each rank; but for zb-v, whose rounds
    differ, and interleaved groups of unequal size.
    """
    rounds, rest = divmod(micro_batches, ranks)
    uneven = name == "zb-v" or (name == "interleaved" and rest > 0)
    if uneven or rounds <= ROUNDS + 1:
        return LongSchedule(_built(name, ranks, micro_batches, virtual))
    few = ROUNDS * ranks + rest
    base, longer = _built(name, ranks, few, virtual), _built(name, ranks, few + ranks, virtual)
    return LongSchedule(base, longer, rounds - ROUNDS - 1)


_built = lru_cache(maxsize=512)(unchecked)
