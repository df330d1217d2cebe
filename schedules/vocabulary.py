"""Schedules of a pipeline whose ranks share embedding and output matrix: `--vocab-pp`.

Every rank holds an equal part of the vocabulary's rows (arXiv 2411.05288) and does, beside the
passes of its stage, four more for each micro-batch:

    E  looks its tokens up; the sums over the ranks are what the first stage takes
    S  its part of the logits of the last stage's output, which all ranks receive: their largest,
       the sum of their exponentials and the label's logit, which the ranks exchange
    T  with these of all ranks the loss and the gradient of its logits; from it the gradient of the
       output, whose sum over the ranks the last stage's backward takes, then that of the matrix
    G  adds the gradient of the first stage's input, which all ranks receive, to its rows

A rank does S and T as soon as they can be done, before the passes of its stage, and one T before
the next S: it holds the logits of one micro-batch. 1F1B runs one micro-batch further ahead, from
`MANY` ranks on two: an S and a T may each have to wait until some rank has ended a pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any

from config.schema import Layout, ModelShape
from schedules import compiler
from schedules.costs import parts_of, stage_costs
from schedules.partition import blocks_per_stage
from schedules.schedule import Action, Schedule, check, forward_only, unchecked
from schedules.simulation import Seconds, end_of, named

# Of the longest pass: after it a message is taken to have arrived, so that no rank waits for
# another one that is a little late.
SLACK = 0.1
MANY = 5  # ranks; with fewer, one micro-batch ahead keeps them as busy as two do
MORE = 24  # micro-batches from which `makespan` sees what a further one takes


def build(
    model: ModelShape, layout: Layout, micro_batches: int, device: str, backward: bool = True
) -> Schedule:
    """The validated schedule of a layout that says vocab_pp; without backward, of an evaluation."""
    # Layouts that differ in these alone have one order: all passes take 1/tp as long, and costs.py
    # does not count blocks of which --recompute-layers says how many are recomputed.
    rest: dict[str, Any] = dict.fromkeys(("dp", "sequence_parallel", "overlap_param_gather"))
    rest |= dict.fromkeys(("tp", "cp", "micro_batch_size", "zero"), 1)
    if layout.recompute_layers is not None:
        rest |= {"recompute": "none", "recompute_layers": None}
    return _built(model, replace(layout, **rest), micro_batches, device, backward)


@lru_cache(maxsize=64)
def _built(
    model: ModelShape, layout: Layout, micro_batches: int, device: str, backward: bool
) -> Schedule:
    seconds = pass_seconds(model, layout, device)
    plain = _further_ahead(layout, micro_batches)
    if not backward:
        plain = forward_only(tuple(range(layout.pp)), micro_batches)
    found = with_vocabulary(plain, micro_batches, seconds, backward)
    check(found, micro_batches, backward)
    return found


def makespan(
    model: ModelShape, layout: Layout, micro_batches: int, seconds: Seconds, transfer: float
) -> float:
    """The end of the last action of what `build` makes; seconds, transfer: as in `simulate`.

    Of many micro-batches that of few, and as much for each further one as the last of them take:
    the order repeats itself only nearly, and on 109 layouts this was 0.6 % off at the most.
    """
    few = 3 * layout.pp
    counts = [few, few + MORE] if micro_batches > few + MORE else [micro_batches]
    orders = [build(model, layout, count, "cuda") for count in counts]
    ends = [end_of(order, seconds, transfer) for order in orders]
    return ends[-1] + (micro_batches - counts[-1]) * (ends[-1] - ends[0]) / MORE


def most_held(layout: Layout, micro_batches: int, sizes: Sequence[float]) -> tuple[float, ...]:
    """As `Schedule.most_held` of what `build` makes, without building it: the passes put in hold
    no activations, and leave the others in their order.
    """
    more = _more_ahead(layout)
    plain = named(layout.schedule, layout.pp + more, micro_batches)
    return plain.most_held([*sizes, *[0.0] * more])[: layout.pp]


def of_layout(
    model: ModelShape, layout: Layout, micro_batches: int, device: str = "cuda"
) -> Schedule:
    """The validated schedule that a layout runs, with --vocab-pp or without."""
    if layout.vocab_pp:
        return build(model, layout, micro_batches, device)
    about = layout.schedule, layout.pp, micro_batches, layout.stages_per_rank
    return compiler.build(*about, stage_costs(model, layout, device))


def pass_seconds(model: ModelShape, layout: Layout, device: str) -> Seconds:
    """By kind of action and stage, in FLOPs of a token as costs.py counts them."""
    embedding, block, head = parts_of(model, layout, device)
    pp, found = layout.pp, dict[tuple[str, int], float]()
    again = layout.recomputed_of_stage or (0,) * pp  # else `block` has it
    for stage, blocks in enumerate(blocks_per_stage(model, layout)):
        recomputed = min(blocks, again[stage]) * block.forward
        found["F", stage] = blocks * block.forward
        found["B", stage] = blocks * (block.inputs + block.weights) + recomputed
        found["S", stage] = head.forward / pp
        found["T", stage] = (head.inputs + head.weights) / pp
        found["E", stage], found["G", stage] = embedding.forward, embedding.inputs
    return found


def more_ahead(pp: Any) -> Any:
    """Micro-batches that every rank of 1F1B runs further ahead than without these passes, for one
    number of ranks or a column of them.
    """
    return 1 + (pp >= MANY)


def _more_ahead(layout: Layout) -> int:
    """As `more_ahead`, of a layout: under GPipe every rank is as far ahead as it can be."""
    return more_ahead(layout.pp) if layout.schedule == "1f1b" else 0


def _further_ahead(layout: Layout, micro_batches: int) -> Schedule:
    """The named schedule of the stages alone; 1F1B is that of a pipeline with more ranks."""
    longer = unchecked(layout.schedule, layout.pp + _more_ahead(layout), micro_batches)
    return Schedule(longer.name, longer.ranks[: layout.pp], longer.rank_of[: layout.pp])


def with_vocabulary(
    plain: Schedule, micro_batches: int, seconds: Seconds, backward: bool = True
) -> Schedule:
    """A schedule of one stage a rank with the passes E, S, T and G put in by simulation."""
    simulation = _Insertion(plain, micro_batches, seconds, backward)
    return Schedule(plain.name, tuple(map(tuple, simulation.run())), plain.rank_of)


@dataclass
class _Insertion:
    """The state of the simulation: which passes each rank has done, and when they ended."""

    plain: Schedule
    micro_batches: int
    seconds: Seconds
    backward: bool

    def run(self) -> list[list[Action]]:
        """Every rank's actions; always the rank acts that can act first."""
        pp, unknown = len(self.plain.ranks), [inf] * self.micro_batches
        self.clock, self.rows = [0.0] * pp, [list[Action]() for _ in range(pp)]
        self.left = [self._with_embedding(rank)[::-1] for rank in range(pp)]
        self.done = {kind: [0] * pp for kind in "STG"}
        self.slack = SLACK * max(self.seconds.values())
        # When F and B of a stage have ended, by micro-batch, and E, S and T of all ranks.
        self.ends = {(kind, stage): [*unknown] for kind in "FB" for stage in range(pp)}
        self.met = {kind: [*unknown] for kind in "EST"}
        self.latest = {kind: [(0, 0.0)] * self.micro_batches for kind in "EST"}
        choices = [self._choose(rank) for rank in range(pp)]
        while True:
            start, _, rank, kind = min(choices)
            if not kind:
                return self.rows
            for stale in self._do(kind, rank, start):
                choices[stale] = self._choose(stale)

    def _do(self, kind: str, rank: int, start: float) -> range:
        """Do a rank's next action of a kind; the ranks whose next one may be another now."""
        m = self.done[kind][rank] if kind in "STG" else self.left[rank].pop().micro_batch
        self.rows[rank].append(Action(kind, rank, m))
        self.clock[rank] = end = start + self.seconds[kind, rank]
        ranks = range(len(self.rows))
        if kind in "STG":
            self.done[kind][rank] += 1
        if kind in "FB":
            self.ends[kind, rank][m] = end
            everyone = rank == (ranks[-1] if kind == "F" else 0)
            return ranks if everyone else ranks[max(0, rank - 1) : rank + 2]
        if kind == "G":
            return ranks[rank : rank + 1]
        count, last = self.latest[kind][m]
        self.latest[kind][m] = count + 1, max(last, end)
        if count + 1 < len(ranks):
            return ranks[rank : rank + 1]
        self.met[kind][m] = max(last, end)
        return ranks

    def _with_embedding(self, rank: int) -> list[Action]:
        """A stage's passes, each E so much before its forward as the first stage is ahead of it."""
        ahead, row, count = rank + 2, list[Action](), 0
        for action in self.plain.ranks[rank]:
            while action.kind == "F" and count < min(
                action.micro_batch + ahead, self.micro_batches
            ):
                row.append(Action("E", rank, count))
                count += 1
            row.append(action)
        return row

    def _choose(self, rank: int) -> tuple[float, int, int, str]:
        """When a rank can act next, the place of that in the order of preference, the rank and the
        kind; no kind if nothing is left. What nobody can say yet begins at infinity.
        """
        clock, last, slack = self.clock[rank], len(self.rows) - 1, self.slack
        s, t, g = (self.done[kind][rank] for kind in "STG")
        found = inf, 4, rank, ""
        if t < self.micro_batches:
            found = min(found, (max(clock, self.met["S"][t] + slack), 0, rank, "T"))
        if s < self.micro_batches and s == t:
            sent = self.ends["F", last][s] + slack * (rank != last)
            found = min(found, (max(clock, sent), 1, rank, "S"))
        if g < self.micro_batches and self.backward:
            found = min(
                found, (max(clock, self.ends["B", 0][g] + slack * (rank != 0)), 2, rank, "G")
            )
        if self.left[rank]:
            kind, _, m = self.left[rank][-1]
            # Nothing comes back in an evaluation that would keep a rank from going far ahead.
            if kind != "F" or self.backward or m < t + len(self.rows) + 2:
                found = min(found, (max(clock, self._ready(kind, rank, m)), 3, rank, kind))
        return found

    def _ready(self, kind: str, rank: int, m: int) -> float:
        """When what a pass of the stage needs is there, or an E, which needs nothing."""
        if kind == "E":
            return 0.0
        before = rank - 1 if kind == "F" else rank + 1
        if 0 <= before < len(self.rows):
            return self.ends[kind, before][m] + self.slack
        return self.met["E" if kind == "F" else "T"][m] + self.slack
