"""When each action of a schedule runs, how long it all takes, and how much of that time is idle.

    slots = simulate(build("1f1b", 4, 8), seconds)
    named("1f1b", 48, 2048).makespan(seconds, transfer)   the end alone, of 200,000 actions

`simulate` is the definition; tests hold `makespan` to it. With more micro-batches a named
schedule repeats the same actions more often (1F1B: a forward and a backward), so `named` builds it
with few micro-batches and with a few more, and takes what differs as often as needed.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, product
from typing import Any, NamedTuple

from schedules.schedule import Action, Schedule, dependency_order, unchecked

# Seconds of an action by its kind and stage.
Seconds = Mapping[tuple[str, int], float]


class Growth(NamedTuple):
    """How a schedule gets longer, from `first` micro-batches on, by `step` of them.

    lengths: how many actions of a rank are added at each place where the longer one differs: a
    forward and a backward together in 1F1B, first one forward and later one backward in GPipe.
    None: a stretch of time is added, the same for all ranks.
    """

    first: int
    step: int
    lengths: tuple[int, ...] | None = None


def growth(name: str, ranks: int, micro_batches: int) -> Growth | None:
    """That of a named schedule; None if it must be built in full."""
    if name == "interleaved":  # in groups of as many micro-batches as ranks
        return Growth(3 * ranks, ranks) if micro_batches % ranks == 0 else None
    lengths = {"gpipe": (1, 1), "1f1b": (2,)}.get(name)
    return Growth(ranks if lengths else 3 * ranks, 1, lengths)


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


@dataclass(frozen=True)
class LongSchedule:
    """What a schedule holds and takes, without a list of all its actions."""

    base: Schedule
    longer: Schedule | None = None  # `base` and the repeated actions once more
    lengths: tuple[int, ...] | None = None  # as in Growth
    more: int = 0  # how often the repeated actions come more often than in `base`

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """As `Schedule.most_held`."""
        held = self.base.most_held(sizes)
        if self.longer is None:
            return held
        grown = zip(held, self.longer.most_held(sizes), strict=True)
        return tuple(less + self.more * (then - less) for less, then in grown)

    @cached_property
    def parts(self) -> list[tuple[list[tuple[int, Action]], int]]:
        """(rank, action) in an order that can run, in parts, and how often each part runs.

        A part that runs again stands for the same actions of the next micro-batches.
        """
        if self.longer is None:
            return [(dependency_order(self.base), 1)]
        parts = enumerate(_repeating(self.base, self.longer, self.lengths))
        return [(order, self.more if number % 2 else 1) for number, order in parts]

    def makespan(self, seconds: Seconds, transfer: float = 0.0) -> float:
        """The end of the last action of `simulate`."""
        clocks: dict[int, float] = dict.fromkeys(range(len(self.base.ranks)), 0.0)
        messages = _messages(self.base)
        # By kind and stage: the queues that an action takes from, and those that it adds to.
        takes, gives = defaultdict[Any, list](list), defaultdict[Any, list](list)
        for (needed, action), queue in messages.items():
            gives[needed].append(queue)
            takes[action].append(queue)
        for order, times in self.parts:
            bound = [
                (rank, seconds[kind, stage], takes[kind, stage], gives[kind, stage])
                for rank, (kind, stage, _) in order
            ]
            period, left = _Period(clocks, list(messages.values())), times
            while left:
                for rank, duration, taken, given in bound:
                    clock = clocks[rank]
                    for queue in taken:
                        arrival = queue.popleft()
                        clock = arrival if arrival > clock else clock
                    clocks[rank] = clock = clock + duration
                    for queue in given:
                        queue.append(clock + transfer)
                left = period.left(left - 1)
        return max(clocks.values())


# By kind and stage of the action that is waited for, and of the one that waits: arrivals, in order.
_Messages = dict[tuple[tuple[str, int], tuple[str, int]], deque[float]]


def _messages(schedule: Schedule) -> _Messages:
    """Empty queues of all that ranks send to one another."""
    found: _Messages = {}
    kinds = dict.fromkeys(action.kind for action in schedule.ranks[0])
    for kind, stage in product(kinds, range(schedule.stages)):
        action = Action(kind, stage, 0)
        for needed in filter(None, [schedule.input_of(action), *schedule.of_all_ranks(action)]):
            if schedule.rank_of[needed.stage] != schedule.rank_of[stage]:
                found[needed[:2], action[:2]] = deque()
    return found


@dataclass
class _Period:
    """What repeats while the same actions run again and again: once every clock and message is
    later by one and the same time than it was some rounds before, so it will be for ever.
    """

    clocks: dict[int, float]
    messages: list[deque[float]]
    before: list[float] | None = None
    age: int = 0  # rounds since `before`
    oldest: int = 1  # at which `before` is taken anew: twice as old each time (Brent 1980)

    def left(self, rounds: int) -> int:
        """How many of the rounds that are left must run: after a period, what is left of others,
        for which clocks and messages move on at once.
        """
        self.age += 1
        if rounds < self.age or rounds < 2:
            return rounds
        now, later = [*self.clocks.values(), *chain.from_iterable(self.messages)], 0.0
        if self.before is not None:
            later = self._later(now, self.before)
        if later:
            rounds, rest = rounds // self.age, rounds % self.age
            for rank in self.clocks:
                self.clocks[rank] += rounds * later
            for queue in self.messages:
                queue.extend([queue.popleft() + rounds * later for _ in range(len(queue))])
            return rest
        if self.before is None or self.age == self.oldest:
            self.before, self.age, self.oldest = now, 0, 2 * self.oldest
        return rounds

    @staticmethod
    def _later(now: list[float], before: list[float]) -> float:
        """By what time everything is later, to rounding; 0 if it differs."""
        later, same = now[0] - before[0], 1e-11 * now[0]
        even = all(abs(one - then - later) <= same for one, then in zip(now, before, strict=True))
        return later if even else 0.0


_built = lru_cache(maxsize=128)(unchecked)


@lru_cache(maxsize=4096)
def named(name: str, ranks: int, micro_batches: int, virtual: int = 1) -> LongSchedule:
    """The schedule of that name, for any counts >= 1; `name` is checked by config."""
    grows = growth(name, ranks, micro_batches)
    if grows is None or micro_batches <= grows.first:
        return LongSchedule(unchecked(name, ranks, micro_batches, virtual))
    more, rest = divmod(micro_batches - grows.first, grows.step)
    base = _built(name, ranks, grows.first + rest, virtual)
    longer = _built(name, ranks, grows.first + rest + grows.step, virtual)
    try:
        _repeating(base, longer, grows.lengths)
    except ValueError:  # what was found by simulation need not grow evenly
        return LongSchedule(unchecked(name, ranks, micro_batches, virtual))
    return LongSchedule(base, longer, grows.lengths, more)


@lru_cache(maxsize=256)
def _repeating(
    base: Schedule, longer: Schedule, lengths: tuple[int, ...] | None
) -> list[list[tuple[int, Action]]]:
    """The actions of `longer` in parts: every second one is what is repeated.

    Raises ValueError if it does not add actions to `base` as `lengths` says.
    """
    part_of: dict[Action, int] = {}
    if lengths is None:
        part_of = _parts_in_time(base, longer)
    else:
        for before, after in zip(base.ranks, longer.ranks, strict=True):
            part_of |= zip(after, part_numbers(before, after, lengths), strict=True)
    # What a part needs is in itself or in earlier parts, so it can run once they have.
    parts: list[list[tuple[int, Action]]] = [[] for _ in range(max(part_of.values()) + 1)]
    for rank, action in dependency_order(longer):
        parts[part_of[action]].append((rank, action))
    return parts


def _parts_in_time(base: Schedule, longer: Schedule) -> dict[Action, int]:
    """The part of each action of `longer`: before, in or after a stretch of time that `base` has
    not. Raises ValueError if there is none.
    """
    slots, before = simulate(longer), simulate(base)
    period = max(row[-1].end for row in slots) - max(row[-1].end for row in before)
    wanted = [[action[:2] for action in row] for row in base.ranks]
    forwards = [slot.start for slot in slots[0] if slot.action[:2] == ("F", 0)]
    for since in forwards[len(forwards) // 2 :: max(1, len(forwards) // 8)]:
        part_of = {
            slot.action: (slot.start >= since) + (slot.start >= since + period)
            for row in slots
            for slot in row
        }
        if wanted == [[a[:2] for a in row if part_of[a] != 1] for row in longer.ranks]:
            return part_of
    raise ValueError(f"{longer.name} of {len(longer.ranks)} ranks does not repeat itself")


def part_numbers(
    before: tuple[Action, ...], after: tuple[Action, ...], lengths: tuple[int, ...]
) -> list[int]:
    """The part of each action of `after`: an even one if `before` has it, an odd one if not.

    Actions are compared by kind and stage. Raises ValueError if more than `lengths` was added.
    """
    short, long = ([action[:2] for action in row] for row in (before, after))
    numbers: list[int] = []
    common = 0
    for part, length in enumerate(lengths):
        while common < len(short) and short[common] == long[len(numbers)]:
            numbers.append(2 * part)
            common += 1
        numbers += [2 * part + 1] * length
    if short[common:] != long[len(numbers) :]:
        raise ValueError(f"{' '.join(map(str, after))} repeats other actions than {lengths}")
    return numbers + [2 * len(lengths)] * (len(long) - len(numbers))
