"""Makes an order of actions by a greedy simulation (list scheduling).

    rows = list_rows(rank_of, micro_batches, seconds, limit=8.0)

As soon as a rank is free, it starts an action whose input has arrived: if possible a B (gradient of
a stage's input), else an F (forward pass) for which there is memory, else a W (gradients of
weights). A rank holds a micro-batch's activations in a stage from its F to its W.

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

# The number of FLOPs that take as long as sending one byte between stages: an A100's 312 TFLOP/s
# divided by a link's 25 GB/s, and a CPU core's 80 GFLOP/s divided by gloo's 2 GB/s.
FLOPS_PER_SENT_BYTE = {"cuda": 12500.0, "cpu": 40.0}
NOTHING = PassCosts(0.0, 0.0, 0.0)  # the costs of an embedding or a head that a stage does not have


@dataclass(frozen=True)
class Task:
    """The input of the search for --schedule auto: a model's costs and its pipeline.

    parts: costs of embedding, one block, and head. layers: the number of blocks. ranks: the number
    of pipeline ranks. limit: the bytes of activations that a rank may hold. transfer: the time of a
    message between ranks. Times and bytes are for one token, and the unit of times is FLOPs.
    blocks: the number of blocks of each stage if --partition gives them, with one stage on each
    rank; else None. tied: whether the head uses the embedding's matrix.
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
        """Return the costs of the stages if stage s has `blocks[s]` blocks.

        name: the schedule. If its name ends in -v, rank 0 holds the first and the last stage.
        """
        embedding, block, head = self.parts
        # In a schedule whose name ends in -v, one rank holds embedding and head. If they share a
        # matrix, its gradients are not put off: the head's B computes them too, and W has nothing
        # to do for the head.
        if self.tied and name.endswith("-v"):
            head = head._replace(inputs=head.inputs + head.weights, weights=0.0)
        stages = []
        for stage, count in enumerate(blocks):
            first = embedding if stage == 0 else NOTHING
            last = head if stage == len(blocks) - 1 else NOTHING
            # Each cost of the stage is the sum over its parts; `fields` gives them cost by cost.
            fields = zip(first, block, last, strict=True)
            sums = [at_first + count * of_block + at_last for at_first, of_block, at_last in fields]
            stages.append(PassCosts(*sums))
        return StageCosts(tuple(stages), self.limit, self.transfer)

    def balanced(self, rank_of: Sequence[int]) -> tuple[int, ...]:
        """Return the balanced partition: the number of blocks of each stage.

        rank_of: the rank of each stage. A part's time is the sum of the costs of F, B and W.
        """
        return balanced(self.layers, tuple(rank_of), PartCosts(*(p.seconds for p in self.parts)))


@lru_cache(maxsize=256)
def task_of(model: ModelShape, layout: Layout, device: str) -> Task:
    """Return the input of the search for a layout with `--schedule auto`, for one micro-batch.

    device: "cuda" or "cpu". The limit of a rank is what the fullest rank of 1F1B holds. The caller
    replaces the number of micro-batches, which the other fields do not depend on.
    """
    parts = parts_of(model, layout, device)
    with_1f1b = replace(layout, schedule="1f1b")
    blocks_of_1f1b = tuple(blocks_per_stage(model, with_1f1b, part_costs(model, device)))
    # The blocks of each stage if --partition gives them; None: the search decides about them.
    fixed = None if layout.partition == "balanced" else blocks_of_1f1b
    transfer = sent_bytes(model) * FLOPS_PER_SENT_BYTE[device]
    # The task has one micro-batch, and the limit 0.0 until the limit is known, at the end.
    task = Task(parts, model.layers, layout.pp, 1, 0.0, transfer, fixed, model.tied)
    # 1F1B may run with two partitions: balanced by the costs of the model's parts as counted, or by
    # the costs in the task, which know recomputation and --schedule-costs. The fuller one counts.
    partitions = [blocks_of_1f1b]
    if not fixed:
        partitions.append(task.balanced(range(layout.pp)))
    limit = 0.0
    for blocks in partitions:
        for stage, costs in enumerate(task.costs("1f1b", blocks).stages):
            # In 1F1B a stage holds a micro-batch for itself and for each later stage.
            limit = max(limit, (layout.pp - stage) * costs.held)
    return replace(task, limit=limit)


def sent_bytes(model: ModelShape) -> float:
    """Return the bytes of one token in a message between stages: h numbers of 4 bytes.

    A recomputed block holds as much, since it keeps only its input.
    """
    return 4.0 * model.hidden


def parts_of(
    model: ModelShape,
    layout: Layout,
    device: str,
) -> tuple[PassCosts, PassCosts, PassCosts]:
    """Return the costs of embedding, block and head on one tensor rank, for one token.

    Times are in FLOPs; `held` is in bytes. A block's backward pass includes recomputation only if
    all blocks are recomputed.
    """
    t = layout.tp
    h = model.hidden
    parts = pass_costs(model, device)
    embedding, block, head = (PassCosts(*(cost / t for cost in part)) for part in parts)
    # Recomputation adds to B: the FLOPs of the attention scores, or the whole forward pass.
    if layout.recompute_layers is None and layout.recompute_blocks is None:
        again = {
            "none": 0.0,
            "selective": attention_scores(model) / t,
            "full": block.forward,
        }
        block = block._replace(inputs=block.inputs + again[layout.recompute])
    # A block holds activations of 2 bytes a number for its backward pass: about 8 h numbers around
    # its norms, which only sequence parallelism divides by tp, and two for each unit of `widths`,
    # the summed widths of its other activations (queries, keys, values, the MLP's units).
    # A recomputed block holds only its input; the head holds its logits, 4 bytes each.
    widths = mean_of_blocks(model, _kept_widths)
    norm_shards = t if layout.sequence_parallel else 1
    held = 2.0 * (8 * h / norm_shards + 2 * widths / t)
    if layout.recompute == "full":
        held = sent_bytes(model)
    logits = 4.0 * model.vocab_size / t
    # --schedule-costs may give numbers: the costs of F, B and W of a block, then of the head.
    if given := explicit_costs(layout):
        # The given costs have an unknown unit, and the embedding's costs are FLOPs. So the given
        # costs are scaled such that a block takes the FLOPs that were counted for it.
        unit = block.seconds / sum(given[:3])
        scaled = [unit * cost for cost in given]
        block = PassCosts(*scaled[:3])  # the costs of F, B and W
        head = PassCosts(*scaled[3:])
    return embedding, block._replace(held=held), head._replace(held=logits)


def _kept_widths(model: ModelShape) -> int:
    """Return how many numbers a block keeps for its backward pass, for one token, without norms.

    They are queries, keys and values, attention's output (counted twice), and the MLP's units
    before and after the activation. `mean_of_blocks` calls this for a model with equal blocks.
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
    """Return every rank's actions in order, as numbers of a `Numbered` with kinds FBW.

    The kinds are F (forward), B (gradients of inputs) and W (gradients of weights). Called by
    orders.py for the schedules zb-v, searched and searched-v.

    rank_of: the rank of each stage; no two stages may send the same kind of result from one rank
    to the same other rank, since their messages might then be taken in a wrong order.
    seconds: the seconds of an action, by (kind, stage).
    limit: the most that a rank may hold, in the unit of `sizes`.
    sizes: for each stage, the size of one micro-batch's activations; None: 1 for all stages.
    transfer: the seconds of a message between ranks.

    Raise ScheduleError if a rank may not hold one micro-batch in all of its stages.
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
    """The state of the simulation; the arguments are those of `list_rows`."""

    def __init__(
        self,
        rank_of: Sequence[int],
        micro_batches: int,
        seconds: Seconds,
        limit: float,
        sizes: Sequence[float],
        transfer: float,
    ):
        """Prepare a simulation in which nothing has run; the arguments are those of `list_rows`.

        All micro-batches are ready for the first stage's F at time 0.
        """
        self.rank_of = rank_of
        self.seconds = seconds
        self.sizes = sizes
        self.transfer = transfer
        ranks = range(max(rank_of) + 1)
        stages = range(len(rank_of))
        # For each rank, its stages, the last stage first.
        self.own = [[s for s in reversed(stages) if rank_of[s] == rank] for rank in ranks]
        # For each stage, the most that its rank may hold when a forward pass of the stage starts.
        # Memory must remain for this stage and for the rank's later stages, through which the same
        # micro-batch goes before its backward pass frees anything.
        self.room = []
        for stage, rank in enumerate(rank_of):
            later = sum(sizes[s] for s in self.own[rank] if s >= stage)
            self.room.append(limit - later + 1e-9)
        self.held = [0.0 for _ in ranks]  # for each rank, the size of activations that it holds
        self.clock = [0.0 for _ in ranks]  # for each rank, the time at which it is free
        # By kind, the number of passes that each stage has done.
        self.done = {kind: [0 for _ in stages] for kind in "FBW"}
        # By kind, its place in FBW times the number of micro-batches. An action's number is
        # (first[kind] + micro_batch) * stages + stage.
        self.first = {kind: place * micro_batches for place, kind in enumerate("FBW")}
        # By kind and stage, the times at which the inputs of the stage's next passes arrive.
        self.arrived = {kind: [deque[float]() for _ in stages] for kind in "FB"}
        self.arrived["F"][0].extend([0.0] * micro_batches)
        # For each rank, the numbers of the actions that it has started, in order.
        self.rows: list[list[int]] = [[] for _ in ranks]

    def run(self) -> None:
        """Run all actions in the order of time; `list_rows` then takes the orders from `rows`.

        An event is a time and a rank that may then be able to start an action.
        """
        events = [(0.0, rank) for rank in range(len(self.rows))]
        while events:
            now, rank = heapq.heappop(events)
            if now < self.clock[rank]:
                continue  # the rank is busy; another event marks the end of its action
            kind, stage, start = self._choose(rank, now)
            if kind:
                for event in self._do(kind, stage, now):
                    heapq.heappush(events, event)
            elif start < inf:  # the rank can start nothing now; its next input arrives at `start`
                heapq.heappush(events, (start, rank))

    def _choose(self, rank: int, now: float) -> tuple[str, int, float]:
        """Return (kind, stage, start) of the action that a rank starts now.

        If no action can start, the kind is "" and `start` is the time at which the rank's next
        input arrives, or infinity if no input is on its way.
        """
        soonest = inf
        # Every B comes before every F. Among passes of one kind, the last stage comes first. An F
        # starts only if the rank holds at most `room[stage]`, so that its activations fit; a B
        # takes no further memory.
        for kind in "BF":
            for stage in self.own[rank]:
                queue = self.arrived[kind][stage]  # the times at which the stage's inputs arrive
                fits = kind == "B" or self.held[rank] <= self.room[stage]
                if queue and fits:
                    if queue[0] <= now:
                        return kind, stage, now
                    soonest = min(soonest, queue[0])
        # No B and no F can start, so the rank does a W, in the stage that has done the fewest.
        with_weights_to_do = [s for s in self.own[rank] if self.done["W"][s] < self.done["B"][s]]
        if not with_weights_to_do:
            return "", 0, soonest
        stage = min(with_weights_to_do, key=self.done["W"].__getitem__)
        return "W", stage, now

    def _do(self, kind: str, stage: int, now: float) -> list[tuple[float, int]]:
        """Run an action, and return the events (time, rank) at which ranks may start another one.

        The action's rank may start another one when the action ends, and the rank that receives its
        result when the result has arrived. A W frees activations and sends nothing.
        """
        rank = self.rank_of[stage]
        end = now + self.seconds[kind, stage]
        # A stage does the passes of a kind in the order of micro-batches, so the number of passes
        # that it has done is the micro-batch of this one. Numbers go by kind, micro-batch, stage.
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
        # The last stage's F computes the loss, after which the same stage's B can start.
        is_last_forward = kind == "F" and stage == len(self.rank_of) - 1
        if is_last_forward:
            self.arrived["B"][stage].append(end)
            return events
        # Any other F sends to the next stage. A B sends to the stage before, if there is one.
        next_stage = stage + 1 if kind == "F" else stage - 1
        if next_stage < 0:
            return events
        receiver = self.rank_of[next_stage]
        arrival = end + self.transfer if receiver != rank else end
        self.arrived[kind][next_stage].append(arrival)
        # The receiver may start an action when the message has arrived and the receiver is free.
        events.append((max(arrival, self.clock[receiver]), receiver))
        return events
