"""Makes an order of actions by a greedy simulation (list scheduling).

    rows = list_rows(rank_of, micro_batches, seconds, limit=8.0)

As soon as a rank is free, it starts an action whose input has arrived: if possible a B (gradient of
a stage's input), else an F for which there is memory, else a W (gradients of weights).

The order cannot deadlock: a forward pass starts only if memory remains for the same micro-batch in
the later stages of the rank, so the earliest micro-batch can always go on.

    task_of(model, layout, "cuda")              the input of the search for --schedule auto

A rank's limit on activations is then what the fullest rank of 1F1B with the same layout holds.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from config.model_stats import mean_of_blocks
from config.schema import Layout, ModelShape
from config.validation import explicit_costs
from schedules.partition import (
    PartCosts,
    PassCosts,
    StageCosts,
    attention_scores,
    balanced,
    blocks_per_stage,
    part_costs,
    pass_costs,
)
from schedules.schedule import ScheduleError
from schedules.simulation import Seconds

# The FLOPs that take as long as sending one byte between stages: about an A100's 312 TFLOP/s over a
# link of 25 GB/s, and a CPU core's 80 GFLOP/s over 2 GB/s through gloo.
FLOPS_PER_SENT_BYTE = {"cuda": 12500.0, "cpu": 40.0}
NOTHING = PassCosts(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Task:
    """The input of the search for --schedule auto: a model's costs and its pipeline.

    parts: costs of embedding, one block, and head. layers: the number of blocks. limit: the bytes
    of activations that a rank may hold. transfer: seconds of a message between ranks. Seconds and
    bytes are per token, seconds in FLOPs. blocks: the blocks of each stage if --partition gives
    them, with one stage on each rank. tied: the head uses the embedding's matrix; if one rank holds
    both, the head's weight gradients are computed in B, not in W.
    """

    parts: tuple[PassCosts, PassCosts, PassCosts]
    layers: int
    ranks: int
    micro_batches: int
    limit: float
    transfer: float = 0.0
    blocks: tuple[int, ...] | None = None
    tied: bool = False

    def costs(self, name: str, blocks: Sequence[int]) -> StageCosts:
        """Return the costs of the stages if stage s has `blocks[s]` blocks; name: the schedule."""
        embedding, block, head = self.parts
        if self.tied and name.endswith("-v"):
            head = head._replace(inputs=head.inputs + head.weights, weights=0.0)
        stages = []
        for stage, count in enumerate(blocks):
            first = embedding if stage == 0 else NOTHING
            last = head if stage == len(blocks) - 1 else NOTHING
            columns = zip(first, block, last, strict=True)
            stages.append(PassCosts(*(a + count * b + c for a, b, c in columns)))
        return StageCosts(tuple(stages), self.limit, self.transfer)

    def balanced(self, rank_of: Sequence[int]) -> tuple[int, ...]:
        """Return the balanced partition, blocks per stage; rank_of: the rank of each stage."""
        return balanced(self.layers, tuple(rank_of), PartCosts(*(p.seconds for p in self.parts)))


@lru_cache(maxsize=256)
def task_of(model: ModelShape, layout: Layout, device: str) -> Task:
    """Return the task of a layout with `--schedule auto`, for one micro-batch."""
    parts = parts_of(model, layout, device)
    plain = replace(layout, schedule="1f1b", vocab_pp=False)
    given = tuple(blocks_per_stage(model, plain, part_costs(model, device)))
    fixed = None if layout.partition == "balanced" else given
    sent = sent_bytes(model) * FLOPS_PER_SENT_BYTE[device]
    task = Task(parts, model.layers, layout.pp, 1, 0.0, sent, fixed, model.tied)
    most = 0.0
    for blocks in (given, given if fixed else task.balanced(range(layout.pp))):
        for stage, costs in enumerate(task.costs("1f1b", blocks).stages):
            most = max(most, (layout.pp - stage) * costs.held)
    return replace(task, limit=most)


def sent_bytes(model: ModelShape) -> float:
    """Return the bytes of one token in a message between stages: h values of 4 bytes."""
    return 4.0 * model.hidden


def parts_of(
    model: ModelShape,
    layout: Layout,
    device: str,
) -> tuple[PassCosts, PassCosts, PassCosts]:
    """Return the costs of embedding, block and head on one tensor rank, for one token; seconds are
    FLOPs. A block's backward pass includes recomputation only if all blocks are recomputed.
    """
    t = layout.tp
    h = model.hidden
    counted = [PassCosts(*(each / t for each in part)) for part in pass_costs(model, device)]
    embedding, block, head = counted
    if layout.recompute_layers is None and layout.recompute_blocks is None:
        again = {
            "none": 0.0,
            "selective": attention_scores(model) / t,
            "full": block.forward,
        }
        block = block._replace(inputs=block.inputs + again[layout.recompute])
    widths = mean_of_blocks(model, _kept_widths)
    kept = 2.0 * (8 * h / (t if layout.sequence_parallel else 1) + 2 * widths / t)
    held = sent_bytes(model) if layout.recompute == "full" else kept
    logits = 4.0 * model.vocab_size / t
    if given := explicit_costs(layout):  # scaled such that a block costs its counted FLOPs
        unit = block.seconds / sum(given[:3])
        scaled = [unit * each for each in given]
        block = PassCosts(*scaled[:3])
        head = PassCosts(*scaled[3:])
    return embedding, block._replace(held=held), head._replace(held=logits)


def _kept_widths(model: ModelShape) -> int:
    """Columns of what a block keeps for its backward pass beside its norms, of a model whose blocks
    are alike.
    """
    return model.qkv_width + 2 * model.attention_width + model.up_width + model.ffn_hidden


def list_rows(
    rank_of: Sequence[int],
    micro_batches: int,
    seconds: Seconds,
    limit: float,
    sizes: Sequence[float] | None = None,
    transfer: float = 0.0,
) -> list[list[int]]:
    """Return every rank's actions in order: F, B (gradients of inputs) and W (of weights), as
    numbers of a `Numbered` of kinds FBW.

    rank_of: the rank of each stage, such that no two stages send the same way between two ranks.
    seconds: of an action, by (kind, stage). sizes: what a micro-batch's activations take in each
    stage (default 1). limit: the most that a rank may hold, in the unit of `sizes`. transfer:
    seconds of a message between ranks. Raise ScheduleError if a rank may not hold one micro-batch
    in all of its stages.
    """
    sizes = [1.0] * len(rank_of) if sizes is None else sizes
    for rank in range(max(rank_of) + 1):
        needed = sum(size for size, holder in zip(sizes, rank_of, strict=True) if holder == rank)
        if needed > limit:
            raise ScheduleError(f"a rank may hold {limit:g}, one micro-batch takes {needed:g}")
    greedy = _Greedy(rank_of, micro_batches, seconds, limit, sizes, transfer)
    greedy.run()
    return greedy.rows


class _Greedy:
    """The state of the simulation.

    own: each rank's stages, the last one first. arrived: by kind and stage, the times at which the
    inputs of its next passes arrive. room: for each stage, the most that its rank may hold when a
    forward pass of the stage starts. held, clock: what each rank holds, and when it is free. done:
    by kind, how many passes each stage has done.
    """

    def __init__(
        self,
        rank_of: Sequence[int],
        micro_batches: int,
        seconds: Seconds,
        limit: float,
        sizes: Sequence[float],
        transfer: float,
    ):
        self.rank_of = rank_of
        self.seconds = seconds
        self.sizes = sizes
        self.transfer = transfer
        ranks = range(max(rank_of) + 1)
        stages = range(len(rank_of))
        self.own = [[s for s in reversed(stages) if rank_of[s] == rank] for rank in ranks]
        self.room = []
        for stage, rank in enumerate(rank_of):
            later = sum(sizes[s] for s in self.own[rank] if s >= stage)
            self.room.append(limit - later + 1e-9)
        self.held = [0.0 for _ in ranks]
        self.clock = [0.0 for _ in ranks]
        self.done = {kind: [0 for _ in stages] for kind in "FBW"}
        self.first = {kind: place * micro_batches for place, kind in enumerate("FBW")}
        self.arrived = {kind: [deque[float]() for _ in stages] for kind in "FB"}
        self.arrived["F"][0].extend([0.0] * micro_batches)
        self.rows: list[list[int]] = [[] for _ in ranks]

    def run(self) -> None:
        """Run all actions in the order of time; an event is (time, rank that may start one)."""
        events = [(0.0, rank) for rank in range(len(self.rows))]
        while events:
            now, rank = heapq.heappop(events)
            if now < self.clock[rank]:
                continue  # the rank is busy; another event marks the end of its action
            kind, stage, start = self._choose(rank, now)
            if kind:
                for event in self._do(kind, stage, now):
                    heapq.heappush(events, event)
            elif start < inf:
                heapq.heappush(events, (start, rank))

    def _choose(self, rank: int, now: float) -> tuple[str, int, float]:
        """Return the kind and stage of the action that a rank starts now, and the time now; if
        there is none, "", 0 and the time at which its next input arrives.
        """
        soonest = inf
        for kind in "BF":
            for stage in self.own[rank]:
                queue = self.arrived[kind][stage]
                fits = kind == "B" or self.held[rank] <= self.room[stage]
                if queue and fits:
                    if queue[0] <= now:
                        return kind, stage, now
                    soonest = min(soonest, queue[0])
        left = [s for s in self.own[rank] if self.done["W"][s] < self.done["B"][s]]
        if not left:
            return "", 0, soonest
        stage = min(left, key=self.done["W"].__getitem__)
        return "W", stage, now

    def _do(self, kind: str, stage: int, now: float) -> list[tuple[float, int]]:
        """Run an action; return the events (time, rank) at which ranks may start another one."""
        rank = self.rank_of[stage]
        end = now + self.seconds[kind, stage]
        number = (self.first[kind] + self.done[kind][stage]) * len(self.rank_of) + stage
        self.rows[rank].append(number)
        self.done[kind][stage] += 1
        self.clock[rank] = end
        events = [(end, rank)]
        if kind == "W":
            self.held[rank] -= self.sizes[stage]
            return events
        if kind == "F":
            self.held[rank] += self.sizes[stage]
        self.arrived[kind][stage].popleft()
        turns = kind == "F" and stage == len(self.rank_of) - 1
        if turns:
            self.arrived["B"][stage].append(end)
            return events
        after = stage + 1 if kind == "F" else stage - 1
        if after < 0:
            return events
        to = self.rank_of[after]
        arrival = end + self.transfer if to != rank else end
        self.arrived[kind][after].append(arrival)
        events.append((max(arrival, self.clock[to]), to))
        return events
