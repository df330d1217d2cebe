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
the next S: it holds the logits of one micro-batch. 1F1B runs one more micro-batch ahead, in which
the ranks meet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from typing import Any

from config.schema import Layout, ModelShape
from schedules import compiler
from schedules.costs import parts_of, stage_costs
from schedules.partition import blocks_per_stage
from schedules.schedule import Action, Schedule, check, forward_only
from schedules.schedule import build as build_plain
from schedules.simulation import Seconds, named

# Of the longest pass: after it a message is taken to have arrived, so that no rank waits for
# another one that is a little late.
SLACK = 0.25


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
    plain = _with_one_more_ahead(layout, micro_batches)
    if not backward:
        plain = forward_only(tuple(range(layout.pp)), micro_batches)
    found = with_vocabulary(plain, micro_batches, seconds, backward)
    check(found, micro_batches, backward)
    return found


def most_held(layout: Layout, micro_batches: int, sizes: Sequence[float]) -> tuple[float, ...]:
    """As `Schedule.most_held` of what `build` makes, without building it: the passes put in hold
    no activations, and leave the others in their order.
    """
    more = layout.schedule == "1f1b"
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


def _with_one_more_ahead(layout: Layout, micro_batches: int) -> Schedule:
    """The named schedule of the stages alone; 1F1B is that of a pipeline with one more rank."""
    if layout.schedule != "1f1b":
        return build_plain(layout.schedule, layout.pp, micro_batches)
    longer = build_plain("1f1b", layout.pp + 1, micro_batches)
    return Schedule("1f1b", longer.ranks[:-1], longer.rank_of[:-1])


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
    ends: dict[Action, float] = field(default_factory=dict)

    def run(self) -> list[list[Action]]:
        """Every rank's actions; always the rank acts that can act first."""
        ranks = range(len(self.plain.ranks))
        self.clock, self.rows = [0.0 for _ in ranks], [list[Action]() for _ in ranks]
        self.left = [self._with_embedding(rank) for rank in ranks]
        self.done = [dict.fromkeys("STG", 0) for _ in ranks]
        self.slack = SLACK * max(self.seconds.values())
        self.met = dict[tuple[str, int], tuple[int, float]]()  # ranks that did E, S or T; the last
        choices = dict[int, tuple[float, int, Action | None]]()
        stale = set(ranks)
        while True:
            choices |= {rank: self._choose(rank) for rank in stale}
            rank = min(ranks, key=lambda one: (*choices[one][:2], one))
            start, _, action = choices[rank]
            if action is None:
                return self.rows
            stale = self._do(rank, action, start)

    def _do(self, rank: int, action: Action, start: float) -> set[int]:
        """Do an action; the ranks whose next one may be another now."""
        kind, ranks = action.kind, len(self.rows)
        self.rows[rank].append(action)
        if kind in "STG":
            self.done[rank][kind] += 1
        else:
            self.left[rank].pop(0)
        self.clock[rank] = self.ends[action] = start + self.seconds[kind, rank]
        count, end = self.met.get((kind, action.micro_batch), (0, 0.0))
        self.met[kind, action.micro_batch] = count + 1, max(end, self.clock[rank])
        of_all = {("F", ranks - 1), ("B", 0)}
        if count + 1 == ranks or (kind, rank) in of_all:
            return set(range(ranks))
        return {rank, max(0, rank - 1), min(ranks - 1, rank + 1)}

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

    def _choose(self, rank: int) -> tuple[float, int, Action | None]:
        """When a rank can act next, the place of that in the order of preference, and that."""
        done = self.done[rank]
        kinds = [kind for kind in "TSG" if kind != "G" or self.backward]
        following = [Action(kind, rank, done[kind]) for kind in kinds]
        if done["S"] > done["T"]:
            following = [action for action in following if action.kind != "S"]
        following = [action for action in following if action.micro_batch < self.micro_batches]
        # Nothing comes back in an evaluation that would keep a rank from going far ahead.
        most = inf if self.backward else done["T"] + len(self.rows) + 2
        following += [
            one for one in self.left[rank][:1] if one.kind != "F" or one.micro_batch < most
        ]
        found: list[tuple[float, int, Action | None]] = [(inf, len(following), None)]
        for place, action in enumerate(following):
            found.append((max(self.clock[rank], self._ready(action)), place, action))
        return min(found, key=lambda one: one[:2])

    def _ready(self, action: Action) -> float:
        """When what an action needs is there; infinite if it is not known yet."""
        kind, _, m = action
        before = self.plain.input_of(action)
        if before is None and kind in "FBT":
            count, end = self.met.get(({"F": "E", "B": "T", "T": "S"}[kind], m), (0, 0.0))
            return end + self.slack if count == len(self.rows) else inf
        if kind in "SG":
            before = Action("F", len(self.rows) - 1, m) if kind == "S" else Action("B", 0, m)
        if before is None:
            return 0.0
        return self.ends.get(before, inf) + self.slack * (before.stage != action.stage)
