"""When each action of a schedule runs, how long it all takes, and how much of that time is idle.

    slots = simulate(build("1f1b", 4, 8), seconds)
    makespan(build("1f1b", 4, 8), seconds, transfer)      the end of the last action alone
    named("1f1b", 48, 2048).makespan(seconds, transfer)   the same, without building 200,000 actions

`simulate` is the definition; tests hold the other two to it. With more micro-batches a named
schedule repeats the same actions more often (1F1B: a forward and a backward), so `named` builds it
with as many micro-batches as ranks and with one more, and takes what differs as often as needed.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from schedules.schedule import STEPS, Action, Schedule, build, dependency_order

# Seconds of an action by its kind and stage.
Seconds = Mapping[tuple[str, int], float]

# Of each schedule in schedule.NAMES, how many actions of a rank repeat at each place where a
# longer schedule differs: a forward and a backward together in 1F1B, first one forward and later
# one backward in GPipe. A schedule that is not listed is built in full.
REPEATED = {"gpipe": (1, 1), "1f1b": (2,), "forward": (1,)}


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


def bubble(slots: list[list[Slot]]) -> float:
    """Share of all ranks' time in which nothing runs, between the first start and the last end."""
    end = max(slot.end for row in slots for slot in row)
    busy = sum(slot.end - slot.start for row in slots for slot in row)
    return 1.0 - busy / (end * len(slots))


# ---- The end alone -------------------------------------------------------------------------------


class Node(NamedTuple):
    """An action of some micro-batch. Messages of one kind to one stage arrive in their order."""

    rank: int
    kind: str
    stage: int
    receives: tuple[str, int] | None  # kind and stage of a message from another rank
    sends: tuple[str, int] | None  # the same, to another rank


def makespan(schedule: Schedule, seconds: Seconds, transfer: float = 0.0) -> float:
    """The end of the last action of `simulate`."""
    nodes = _nodes(schedule, dependency_order(schedule))
    return _end([(nodes, 1)], seconds, transfer)


def _nodes(schedule: Schedule, order: list[tuple[int, Action]]) -> list[Node]:
    rank_of, stages, found = schedule.rank_of, schedule.stages, []
    for rank, (kind, stage, _) in order:
        step = STEPS[kind]
        received = step and 0 <= stage - step < stages and rank_of[stage - step] != rank
        sent = step and 0 <= stage + step < stages and rank_of[stage + step] != rank
        receives = (kind, stage) if received else None
        found.append(Node(rank, kind, stage, receives, (kind, stage + step) if sent else None))
    return found


def _end(parts: list[tuple[list[Node], int]], seconds: Seconds, transfer: float) -> float:
    """The end of the last action; parts: nodes in an order that can run, and how often each."""
    clocks: dict[int, float] = defaultdict(float)
    messages: dict[tuple[str, int], deque[float]] = defaultdict(deque)
    for nodes, times in parts:
        bound = []
        for rank, kind, stage, *ends in nodes:
            received, sent = (messages[end] if end else None for end in ends)
            bound.append((rank, seconds[kind, stage], received, sent))
        for rank, duration, received, sent in bound * times:
            clock = clocks[rank]
            if received is not None:
                arrival = received.popleft()
                clock = arrival if arrival > clock else clock
            clocks[rank] = clock = clock + duration
            if sent is not None:
                sent.append(clock + transfer)
    return max(clocks.values())


# ---- Named schedules of many micro-batches -------------------------------------------------------


@dataclass(frozen=True)
class NamedSchedule:
    """What `build(name, ranks, micro_batches)` holds and takes."""

    name: str
    ranks: int
    micro_batches: int

    @property
    def _more(self) -> int:
        """How often the repeated actions come more often than with a micro-batch per rank."""
        return max(0, self.micro_batches - self.ranks) if self.name in REPEATED else 0

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """As `Schedule.peak`."""
        if not self._more:
            return _built(self.name, self.ranks, self.micro_batches).peak
        short, long = (_built(self.name, self.ranks, self.ranks + more) for more in (0, 1))
        return tuple(a + self._more * (b - a) for a, b in zip(short.peak, long.peak, strict=True))

    @cached_property
    def parts(self) -> list[tuple[list[Node], int]]:
        """Nodes in an order that can run, in parts, and how often each part runs."""
        if not self._more:
            schedule = _built(self.name, self.ranks, self.micro_batches)
            return [(_nodes(schedule, dependency_order(schedule)), 1)]
        parts = enumerate(_repeating(self.name, self.ranks))
        return [(nodes, self._more if number % 2 else 1) for number, nodes in parts]

    def makespan(self, seconds: Seconds, transfer: float = 0.0) -> float:
        """The end of the last action of `simulate`."""
        return _end(self.parts, seconds, transfer)


@lru_cache(maxsize=4096)
def named(name: str, ranks: int, micro_batches: int) -> NamedSchedule:
    """The schedule of that name, for any two counts >= 1; `name` is checked by config."""
    return NamedSchedule(name, ranks, micro_batches)


_built = lru_cache(maxsize=128)(build)


@lru_cache(maxsize=256)
def _repeating(name: str, ranks: int) -> list[list[Node]]:
    """Nodes with one micro-batch more than ranks, in parts: every second one is what is repeated.

    Raises ValueError if the schedule does not grow as REPEATED says: a mistake in that table.
    """
    short, long = _built(name, ranks, ranks), _built(name, ranks, ranks + 1)
    part_of: dict[Action, int] = {}
    for before, after in zip(short.ranks, long.ranks, strict=True):
        cut = sections(before, after, REPEATED[name])
        part_of |= {action: part for part, own in enumerate(cut) for action in own}
    # What a part needs is in itself or in earlier parts, so it can run once they have.
    parts: list[list[Node]] = [[] for _ in range(2 * len(REPEATED[name]) + 1)]
    order = dependency_order(long)
    for (_, action), node in zip(order, _nodes(long, order), strict=True):
        parts[part_of[action]].append(node)
    return parts


def sections(
    before: tuple[Action, ...], after: tuple[Action, ...], lengths: tuple[int, ...]
) -> list[tuple[Action, ...]]:
    """`after` cut where it has actions that `before` has not: common, added, common, ..., common.

    Compared by kind and stage. Raises ValueError if more than `lengths` was added.
    """
    short, long = ([action[:2] for action in row] for row in (before, after))
    found, i, j = [], 0, 0
    for length in lengths:
        start = j
        while i < len(short) and short[i] == long[j]:
            i, j = i + 1, j + 1
        found += [after[start:j], after[j : j + length]]
        j += length
    if short[i:] != long[j:]:
        raise ValueError(f"{' '.join(map(str, after))} repeats other actions than {lengths}")
    return [*found, after[j:]]
