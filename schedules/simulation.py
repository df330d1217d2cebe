"""When each action of a schedule runs, how long it all takes, and how much of that time is idle.

    slots = simulate(build("1f1b", 4, 8), seconds)
    named("1f1b", 48, 2048).makespan(seconds, transfer)   the end alone, of 200,000 actions

`simulate` is the definition; tests hold `end_of` and `makespan` to it. With more micro-batches a
named schedule repeats the same actions more often (1F1B: a forward and a backward), so `named`
builds it with few micro-batches and with a few more, and takes what differs as often as needed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

from schedules.schedule import Action, Schedule, unchecked

# Seconds of an action by its kind and stage.
Seconds = Mapping[tuple[str, int], float]
SIMULATED = 3_000  # forwards up to which all of a schedule is simulated
ROUNDS = 3  # micro-batches for each rank, after which every schedule repeats itself


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
    ends: dict[Action, Any] = {}
    for rank, action in schedule.order:
        timing = timing_of(action)
        before = slots[rank][-1].end if slots[rank] else 0.0
        start = before + timing.ahead
        needed = schedule.input_of(action)
        if needed is not None and schedule.rank_of[needed.stage] != rank:
            start = later(start, ends[needed] + timing.message)
        for one in schedule.of_all_ranks(action):
            start = later(start, ends[one] + timing.message * (one.stage != action.stage))
        ends[action] = start + timing.runs
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
    if schedule.vocabulary:
        return max(row[-1].end for row in simulate(schedule, seconds, transfer))
    clocks = [0.0] * len(schedule.ranks)
    ends: list[float] = []
    for rank, (kind, stage, _), needed in schedule.steps:
        clock = clocks[rank]
        if needed >= 0:
            arrival = ends[needed] + transfer
            clock = arrival if arrival > clock else clock
        clock += seconds[kind, stage]
        clocks[rank] = clock
        ends.append(clock)
    return max(clocks)


@dataclass(frozen=True)
class LongSchedule:
    """What a schedule holds and takes, without a list of all its actions where it repeats itself.

    shorter: orders of fewer micro-batches, each with one round more than the one before; rounds:
    how many more there are than in the last of them. in_whole: all of it is simulated, since its
    rounds need not be alike, or since that is quick.
    """

    whole: Callable[[], Schedule]  # builds all of it
    shorter: tuple[Schedule, ...] = ()
    rounds: float = 0.0
    in_whole: bool = False

    @classmethod
    def of(cls, order: Schedule) -> "LongSchedule":
        """One that is built already."""
        return cls(lambda: order)

    @property
    def base(self) -> Schedule:
        """An order that has all kinds of its actions."""
        return self.shorter[0] if self.shorter else self.whole()

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """As `Schedule.most_held`."""
        if self.in_whole or not self.shorter:
            return self.whole().most_held(sizes)
        before, last = (order.most_held(sizes) for order in self.shorter[-2:])
        pairs = zip(before, last, strict=True)
        return tuple(then + self.rounds * (then - less) for less, then in pairs)

    def makespan(self, seconds: Seconds, transfer: float = 0.0) -> float:
        """The end of the last action of `simulate`. A schedule that is not simulated in whole may
        be some per mille off, if its later rounds differ although two were alike.
        """
        ends = [] if self.in_whole else [end_of(each, seconds, transfer) for each in self.shorter]
        if not ends or not _alike(ends):
            return end_of(self.whole(), seconds, transfer)
        return ends[-1] + self.rounds * (ends[-1] - ends[-2])

    def nearly(self, seconds: Seconds, transfer: float = 0.0) -> float:
        """As `makespan`, if all further rounds take as long as the last one: for zb-v and for
        interleaved groups of unequal size a few per cent off.
        """
        if not self.shorter:
            return end_of(self.whole(), seconds, transfer)
        before, last = (end_of(order, seconds, transfer) for order in self.shorter[-2:])
        return last + self.rounds * (last - before)


def _alike(ends: list[float]) -> bool:
    """Whether each round takes as long as the one before it, to rounding."""
    rounds = [later - end for end, later in pairwise(ends)]
    return max(rounds) - min(rounds) <= 1e-11 * ends[-1]


@lru_cache(maxsize=1024)
def named(name: str, ranks: int, micro_batches: int, virtual: int = 1) -> LongSchedule:
    """The schedule of that name, for any counts >= 1; `name` is checked by config.

    With many micro-batches a named schedule does the same again and again: ROUNDS micro-batches for
    each rank, and one and two more, show what a further one takes. The rounds of zb-v, and of
    interleaved groups of unequal size, are not alike.
    """
    whole = partial(_built, name, ranks, micro_batches, virtual)
    rounds, rest = divmod(micro_batches, ranks)
    if rounds <= ROUNDS + 2:
        return LongSchedule(whole)
    uneven = name == "zb-v" or (name == "interleaved" and rest > 0)
    in_whole = uneven or micro_batches * ranks * virtual <= SIMULATED
    few = ROUNDS * ranks + (0 if uneven else rest)
    counts = [few + more * ranks for more in range(3)]
    shorter = tuple(_built(name, ranks, count, virtual) for count in counts)
    return LongSchedule(whole, shorter, (micro_batches - counts[-1]) / ranks, in_whole)


_built = lru_cache(maxsize=512)(unchecked)
