"""When each action of a schedule runs, how long it all takes, and how much of that time is idle.

    slots = simulate(build("1f1b", 4, 8), seconds)
    makespan(build("1f1b", 4, 8), seconds, transfer)      the end of the last action alone
    named("1f1b", 48, 2048).makespan(seconds, transfer)   the same, without building 200,000 actions

`simulate` is the definition; tests hold the other two to it. With more micro-batches a named
schedule repeats the same actions more often (1F1B: a forward and a backward), so `named` builds it
with as many micro-batches as ranks and with one more, and takes what differs as often as needed.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from schedules.schedule import Action, Schedule, build, dependency_order

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


# ------------------------------------------------------------------------------------------------
# The end alone
# ------------------------------------------------------------------------------------------------


class Node(NamedTuple):
    """An action of some micro-batch. Messages of one kind to one stage arrive in their order."""

    rank: int
    kind: str
    stage: int
    receives: tuple[str, int] | None  # kind and stage of a message from another rank
    sends: tuple[str, int] | None  # the same, to another rank


def makespan(schedule: Schedule, seconds: Seconds, transfer: float = 0.0) -> float:
    """The end of the last action of `simulate`."""
    return _end([(_nodes(schedule, dependency_order(schedule)), 1)], seconds, transfer)


def _nodes(schedule: Schedule, order: Iterable[tuple[int, Action]]) -> list[Node]:
    rank_of, found = schedule.rank_of, []
    for rank, action in order:
        kind, stage = action.kind, action.stage
        needed = schedule.input_of(action)
        receives = (kind, stage) if needed and rank_of[needed.stage] != rank else None
        to = stage + {"F": 1, "B": -1, "W": 0}[kind]
        sends = (kind, to) if 0 <= to < schedule.stages and rank_of[to] != rank else None
        found.append(Node(rank, kind, stage, receives, sends))
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


# ------------------------------------------------------------------------------------------------
# Named schedules of many micro-batches
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamedSchedule:
    """What `build(name, ranks, micro_batches)` holds and takes."""

    peak: tuple[int, ...]  # as Schedule.peak
    parts: list[tuple[list[Node], int]]  # nodes in an order that can run, how often

    def makespan(self, seconds: Seconds, transfer: float = 0.0) -> float:
        """The end of the last action of `simulate`."""
        return _end(self.parts, seconds, transfer)

    def rows(self) -> list[list[tuple[str, int]]]:
        """Kind and stage of every rank's actions, in order."""
        rows: list[list[tuple[str, int]]] = [[] for _ in self.peak]
        for node in chain.from_iterable(nodes * times for nodes, times in self.parts):
            rows[node.rank].append((node.kind, node.stage))
        return rows


@lru_cache(maxsize=4096)
def named(name: str, ranks: int, micro_batches: int) -> NamedSchedule:
    """The schedule of that name, for any two counts >= 1; `name` is checked by config."""
    if name not in REPEATED or micro_batches <= ranks:
        schedule = build(name, ranks, micro_batches)
        nodes = _nodes(schedule, dependency_order(schedule))
        return NamedSchedule(schedule.peak, [(nodes, 1)])
    more = micro_batches - ranks
    peak, growth, parts = _repeating(name, ranks)
    return NamedSchedule(
        tuple(held + more * grown for held, grown in zip(peak, growth, strict=True)),
        [(nodes, more if repeated else 1) for nodes, repeated in parts],
    )


@lru_cache(maxsize=256)
def _repeating(name: str, ranks: int) -> tuple[tuple, tuple, list[tuple[list[Node], bool]]]:
    """Peaks at `ranks` micro-batches, their growth by each one more, and nodes: once or repeated.

    Raises ValueError if the schedule does not grow as REPEATED says: a mistake in that table.
    """
    short, long = build(name, ranks, ranks), build(name, ranks, ranks + 1)
    part_of: dict[Action, int] = {}
    for before, after in zip(short.ranks, long.ranks, strict=True):
        sections = _sections(before, after, REPEATED[name])
        part_of |= {action: part for part, own in enumerate(sections) for action in own}
    # Each part on all ranks needs only itself and earlier parts, so sorting keeps the order valid.
    order = sorted(dependency_order(long), key=lambda entry: part_of[entry[1]])
    parts = []
    for part in range(2 * len(REPEATED[name]) + 1):
        own = [entry for entry in order if part_of[entry[1]] == part]
        parts.append((_nodes(long, own), part % 2 == 1))
    growth = tuple(b - a for a, b in zip(short.peak, long.peak, strict=True))
    return short.peak, growth, parts


def _sections(
    before: tuple[Action, ...], after: tuple[Action, ...], lengths: tuple[int, ...]
) -> list[tuple[Action, ...]]:
    """`after` cut where it has actions that `before` has not: common, added, common, ..., common.

    Compared by kind and stage. Raises ValueError if more than `lengths` was added.
    """
    short, long = ([action[:2] for action in row] for row in (before, after))
    sections, i, j = [], 0, 0
    for length in lengths:
        start = j
        while i < len(short) and short[i] == long[j]:
            i, j = i + 1, j + 1
        sections += [after[start:j], after[j : j + length]]
        j += length
    if short[i:] != long[j:]:
        raise ValueError(f"{' '.join(map(str, after))} repeats other actions than {lengths}")
    return [*sections, after[j:]]
