"""Chooses partition, stages of a rank, their placement, and the order of passes: `--schedule auto`.

    choice = search(Task(parts, layers, ranks, micro_batches, limits, transfer))
    choice.name, choice.virtual, choice.blocks      what Layout takes
    build(choice.name, ranks, micro_batches, choice.virtual, choice.costs)

Every named schedule is tried with the balanced partition, and orders made by `list_rows` with the
stages' own seconds, one stage or a V of two on each rank; of these the best partition is improved
by moving blocks. What holds more than a rank's limit is not taken. The result is the fastest in
simulation, so never slower than a named schedule that fits. Equal on every rank: it is arithmetic
on the same numbers in the same order.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from schedules import schedule
from schedules.list_scheduling import Row, list_rows
from schedules.schedule import ORDERS, Action, Schedule, ScheduleError, rank_of_stages
from schedules.simulation import LongSchedule, Seconds, named

SEARCHED = ("searched", "searched-v")  # orders from stages' own costs: one stage a rank, or a V
PATIENCE = (0.0, 0.5, 1.0)  # what list_rows is tried with
SCREENED = 4  # micro-batches for each rank while partitions are compared
MOVED_ACTIONS = 400_000  # that may be scheduled while blocks are moved


class PassCosts(NamedTuple):
    """Of one micro-batch: seconds of forward, gradients of inputs and of weights; bytes held."""

    forward: float
    inputs: float
    weights: float
    held: float


class StageCosts(NamedTuple):
    """The costs of every stage; the bytes that each rank may hold; seconds of a message."""

    stages: tuple[PassCosts, ...]
    limits: tuple[float, ...]
    transfer: float

    def seconds(self, split: bool) -> Seconds:
        """By kind of action and stage."""
        rows = list(enumerate(self.stages))
        found = {("F", s): one.forward for s, one in rows}
        found |= {("B", s): one.inputs + (0.0 if split else one.weights) for s, one in rows}
        return found | ({("W", s): one.weights for s, one in rows} if split else {})


@dataclass(frozen=True)
class Task:
    """A model of `layers` blocks between embedding and head (`parts`: embedding, block, head), and
    a pipeline. blocks: a partition that is given, of one stage on each rank. tied: the head uses
    the embedding's matrix, so that on one rank its weight gradients come with those of inputs.
    recomputed: of a block that is, where the search decides how many are. spread: all stages, one
    on each rank, have an equal part of embedding and head (--vocab-pp).
    """

    parts: tuple[PassCosts, PassCosts, PassCosts]
    layers: int
    ranks: int
    micro_batches: int
    limits: tuple[float, ...]
    transfer: float = 0.0
    blocks: tuple[int, ...] | None = None
    tied: bool = False
    recomputed: PassCosts | None = None
    spread: bool = False

    def costs(self, name: str, blocks: Sequence[int], again: Sequence[int] = ()) -> StageCosts:
        """Of the stages of a partition under the schedule of that name. again: how many blocks of
        each are recomputed, if any; then a rank needs room for one that is.
        """
        embedding, block, head = self.parts
        if self.tied and name.endswith("-v"):
            head = head._replace(inputs=head.inputs + head.weights, weights=0.0)
        again, last = again or (0,) * len(blocks), len(blocks) - 1
        share = 1 / self.ranks if self.spread else 0.0
        rows = []
        for stage, count in enumerate(blocks):
            front, back = share or stage == 0, share or stage == last
            own = [(front, embedding), (count - again[stage], block), (back, head)]
            own += [(again[stage], self.recomputed)] if self.recomputed else []
            rows.append(PassCosts(*(sum(n * part[i] for n, part in own) for i in range(4))))
        rank_of = rank_of_stages(name, self.ranks, len(blocks) // self.ranks)
        limits = list(self.limits)
        for rank in {rank for rank, count in zip(rank_of, again, strict=True) if count}:
            limits[rank] -= block.held
        return StageCosts(tuple(rows), tuple(limits), self.transfer)


@dataclass(frozen=True)
class Choice:
    """What was found, its seconds in simulation, and those of 1F1B with the balanced partition
    (None if that holds too much). idle: the share of the ranks' time in which nothing runs. again:
    how many blocks of each stage are recomputed, where the search decides it. note: on vocab_pp.
    """

    name: str
    virtual: int
    blocks: tuple[int, ...]
    costs: StageCosts
    seconds: float
    idle: float
    plain: "Choice | None" = None
    again: tuple[int, ...] = ()
    vocab_pp: bool = False
    note: str = ""

    def __str__(self) -> str:
        text = f"{self.name}, {self.virtual} stages a rank" if self.virtual > 1 else self.name
        text += " with --vocab-pp" if self.vocab_pp else ""
        text += f", blocks {','.join(map(str, self.blocks))}"
        text += f", recomputed {','.join(map(str, self.again))}" if any(self.again) else ""
        if self.plain is None:
            return f"{text}: 1F1B would hold too much"
        gain, before = 1 - self.seconds / self.plain.seconds, self.plain
        slowest = f"slowest rank {self._slowest() / before._slowest() - 1:+.1%}"
        less = f"{abs(gain):.1%} {'less' if gain >= 0 else 'more'} time"
        return (
            f"{text}: {less} than 1F1B in simulation, idle {self.idle:.1%} for "
            f"{before.idle:.1%}, {slowest}"
        )

    def notes(self, costs: str) -> list[str]:
        """What to print: of --schedule auto with these --schedule-costs, and of --vocab-pp."""
        return [f"--schedule auto, costs {costs}: {self}", *([self.note] if self.note else [])]

    def _slowest(self) -> float:
        """Seconds that the busiest rank computes for one micro-batch."""
        of_rank = [0.0] * len(self.costs.limits)
        placed = rank_of_stages(self.name, len(of_rank), self.virtual)
        for rank, one in zip(placed, self.costs.stages, strict=True):
            of_rank[rank] += one.forward + one.inputs + one.weights
        return max(of_rank)


# ---- Building ------------------------------------------------------------------------------------


def build(
    name: str, ranks: int, micro_batches: int, virtual: int = 1, costs: StageCosts | None = None
) -> Schedule:
    """The validated schedule of any name; costs: of its stages, which SEARCHED ones need."""
    if name in SEARCHED:
        assert costs is not None
        return _searched(name, ranks, micro_batches, costs)
    return schedule.build(name, ranks, micro_batches, virtual)


def long_schedule(
    name: str, ranks: int, micro_batches: int, virtual: int = 1, costs: StageCosts | None = None
) -> LongSchedule:
    """As `build`, for what it holds and takes alone."""
    if name in SEARCHED:
        return LongSchedule.of(build(name, ranks, micro_batches, virtual, costs))
    return named(name, ranks, micro_batches, virtual)


@lru_cache(maxsize=64)
def _searched(name: str, ranks: int, micro_batches: int, costs: StageCosts) -> Schedule:
    """The fastest of the zero-bubble schedule of that placement and what `list_rows` makes.

    Raises ScheduleError if every one holds more than the limits.
    """
    rank_of, seconds = rank_of_stages(name, ranks), costs.seconds(split=True)
    sizes = [one.held for one in costs.stages]
    found: list[Sequence[Row]] = []
    found.append(ORDERS["zb-v" if name.endswith("-v") else "zb-h1"](rank_of, micro_batches))
    given = (rank_of, micro_batches, seconds, costs.limits, sizes, costs.transfer)
    within = [len(rank_of) - stage for stage in range(len(rank_of))]
    with suppress(ValueError):  # not even one micro-batch fits
        found += [list_rows(*given, *how) for how in product(PATIENCE, (None, within))]
    made = [scheduled(name, rows, rank_of) for rows in found]
    fitting = [one for one in made if _fits(LongSchedule.of(one), costs)]
    if not fitting:
        raise ScheduleError(f"no order of {name} on {ranks} ranks holds as little as its limits")

    def end(order: Schedule) -> float:
        return LongSchedule.of(order).makespan(seconds, costs.transfer)

    best = min(fitting, key=end)
    schedule.check(best, micro_batches, backward=True)
    return best


def scheduled(name: str, rows: Sequence[Row], rank_of: tuple[int, ...]) -> Schedule:
    """The schedule of rows of plain actions, not validated."""
    return Schedule(name, tuple(tuple(Action(*action) for action in row) for row in rows), rank_of)


def _fits(order: LongSchedule, costs: StageCosts) -> bool:
    held = order.most_held([one.held for one in costs.stages])
    return all(one <= limit * (1 + 1e-9) for one, limit in zip(held, costs.limits, strict=True))


# ---- Searching -----------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def search(task: Task) -> Choice:
    """The fastest schedule that holds no more than its limits.

    Raises ScheduleError if there is none.
    """
    few = min(task.micro_batches, SCREENED * task.ranks)
    screened = [one for entry in _candidates(task) if (one := _priced(task, *entry, few))]
    if screened and not task.blocks:
        fast = sorted(screened, key=lambda one: one.seconds)
        promising = [fast[0], *(one for one in fast[1:] if one.name in SEARCHED)]
        screened += [_moved(task, one, few, MOVED_ACTIONS // len(promising)) for one in promising]
    entries = [(one.name, one.virtual, one.blocks) for one in screened]
    found = [one for entry in entries if (one := _priced(task, *entry, task.micro_batches))]
    if not found:
        raise ScheduleError(f"every schedule of {task.ranks} ranks holds more than its limits")
    best = min(found, key=lambda one: one.seconds)
    return replace(best, plain=next((one for one in found if one.name == "1f1b"), None))


def _candidates(task: Task) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Names, stages of a rank, and partitions to try."""
    if task.ranks == 1 or task.blocks:
        names = ("1f1b",) if task.ranks == 1 else ("1f1b", "gpipe", "zb-h1")
        yield from ((name, 1, task.blocks or (task.layers,)) for name in names)
        return
    several = [("interleaved", 2), ("interleaved", 3), ("interleaved", 4)]
    for name, virtual in [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("searched", 1), *several]:
        if task.ranks * virtual <= task.layers + 2:
            yield name, virtual, balanced(task, rank_of_stages(name, task.ranks, virtual))
    if task.ranks * 2 <= task.layers + 2:
        for name in ("zb-v", "searched-v"):
            yield name, 2, balanced(task, rank_of_stages(name, task.ranks))


def balanced(task: Task, rank_of: Sequence[int]) -> tuple[int, ...]:
    """The balanced partition of stages that are placed so."""
    embedding, block, head = (sum(part[:3]) for part in task.parts)
    return tuple(balanced_ranks(task.layers, rank_of, embedding, block, head))


def balanced_ranks(
    layers: int, rank_of: Sequence[int], embedding: float, block: float, head: float
) -> list[int]:
    """Blocks per stage such that the slowest rank is as fast as possible, and then its stages.

    Blocks are alike, so each goes to the rank that has least, the last one of several, and there to
    the stage that has least. embedding, block, head: their costs.
    """
    blocks, ends = [0] * len(rank_of), {0: embedding}
    ends[len(rank_of) - 1] = ends.get(len(rank_of) - 1, 0.0) + head
    of_stage = [ends.get(stage, 0.0) for stage in range(len(rank_of))]
    of_rank = [0.0] * (max(rank_of) + 1)
    for stage, cost in ends.items():
        of_rank[rank_of[stage]] += cost

    def load(stage: int) -> tuple[float, int, float]:
        return of_rank[rank_of[stage]], -rank_of[stage], of_stage[stage]

    for _ in range(layers):
        stage = min(range(len(blocks)), key=load)
        blocks[stage] += 1
        of_stage[stage] += block
        of_rank[rank_of[stage]] += block
    return blocks


def _priced(
    task: Task, name: str, virtual: int, blocks: tuple[int, ...], count: int
) -> Choice | None:
    """A candidate with its seconds for that many micro-batches; None if it holds too much.

    A searched order may also hold fewer micro-batches in place of recomputing.
    """
    tried: list[tuple[int, ...]] = [()]
    if task.recomputed:
        base = {"searched": "zb-h1", "searched-v": "zb-v"}.get(name, name)
        enough = enough_recomputed(task, named(base, task.ranks, count, virtual), name, blocks)
        tried = [enough] if enough else []
        tried = [enough or blocks, (0,) * len(blocks)] if name in SEARCHED else tried
    found = []
    for again in dict.fromkeys(tried):
        costs = task.costs(name, blocks, again)
        try:
            if name in SEARCHED:
                order = LongSchedule.of(_searched(name, task.ranks, count, costs))
            else:
                order = named(name, task.ranks, count, virtual)
        except ScheduleError:
            continue
        if _fits(order, costs):
            seconds = order.makespan(costs.seconds(order.base.split), task.transfer)
            idle = 1 - count * sum(sum(one[:3]) for one in costs.stages) / (seconds * task.ranks)
            found.append(Choice(name, virtual, blocks, costs, seconds, idle, again=again))
    return min(found, key=lambda one: one.seconds, default=None)


def enough_recomputed(
    task: Task, order: LongSchedule, name: str, blocks: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The fewest blocks of each stage that must be recomputed for an order to fit, those of a
    rank's first stage first; none if `task` has no say in it. None if it does not fit so either.
    """
    rank_of, ranks = rank_of_stages(name, task.ranks, len(blocks) // task.ranks), range(task.ranks)
    own = [[s for s, holder in enumerate(rank_of) if holder == rank] for rank in ranks]

    def of_stages(counts: Sequence[int]) -> tuple[int, ...]:
        again = [0] * len(blocks)
        for stages, left in zip(own, counts, strict=True):
            for stage in stages:
                again[stage] = min(left, blocks[stage])
                left -= again[stage]
        return tuple(again)

    def fitting(counts: Sequence[int]) -> list[bool]:
        costs = task.costs(name, blocks, of_stages(counts))
        held = order.most_held([one.held for one in costs.stages])
        return [one <= most * (1 + 1e-9) for one, most in zip(held, costs.limits, strict=True)]

    none = [0 for _ in ranks]
    most = [sum(blocks[s] for s in stages) for stages in own] if task.recomputed else none
    high = [0 if fits else n for n, fits in zip(most, fitting(none), strict=True)]
    low = [min(1, n) for n in high]
    while low != high:  # bisection, of all ranks at once
        middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
        fits = fitting(middle)
        high = [m if ok else b for m, b, ok in zip(middle, high, fits, strict=True)]
        low = [a if ok else min(m + 1, b) for a, m, b, ok in zip(low, middle, high, fits)]
    return of_stages(low) if all(fitting(low)) else None


def _moved(task: Task, best: Choice, micro_batches: int, actions: int) -> Choice:
    """The candidate with blocks moved from stage to stage as long as that is faster.

    The number of moves tried is limited by the actions that they schedule.
    """
    stages, tries = len(best.blocks), 7 if best.name in SEARCHED else 1
    tries *= 2 if task.recomputed else 1
    left = actions // (3 * stages * micro_batches * tries)
    improved = True
    while improved:
        improved = False
        for source in range(stages):
            for to in range(stages):
                if source == to or best.blocks[source] == 0 or left <= 0:
                    continue
                blocks, left = list(best.blocks), left - 1
                blocks[source] -= 1
                blocks[to] += 1
                other = _priced(task, best.name, best.virtual, tuple(blocks), micro_batches)
                if other and other.seconds < best.seconds * (1 - 1e-9):
                    best, improved = other, True
    return best
