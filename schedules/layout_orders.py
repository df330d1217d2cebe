"""The schedule that a layout runs, and the costs of its stages if its order is made for them.

    of_layout(model, layout, micro_batches)     the schedule that the pipeline executes
    long_layout(model, layout, micro_batches)   the same schedule, for the planner
    task_of(model, layout, "cuda")              the input of the search for --schedule auto

A rank's limit on activations is what the fullest rank of 1F1B with the same layout holds.
Read orders.py and costs.py first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from config.schema import Layout, ModelShape
from config.validation import explicit_costs
from schedules.costs import (
    PartCosts,
    PassCosts,
    StageCosts,
    attention_scores,
    part_costs,
    pass_costs,
)
from schedules.long_schedule import LongSchedule, long_schedule
from schedules.orders import SEARCHED, build, forward_only
from schedules.partition import balanced, blocks_per_stage, placement
from schedules.schedule import Schedule

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


def of_layout(
    model: ModelShape, layout: Layout, micro_batches: int, device: str = "cuda"
) -> Schedule:
    """Return the validated training schedule of a layout, once --schedule auto is decided."""
    costs = stage_costs(model, layout, device)
    shape = layout.schedule, layout.pp, micro_batches, layout.stages_per_rank
    return build(*shape, costs, _backward(layout))


def evaluation_of_layout(layout: Layout, micro_batches: int) -> Schedule:
    """Return the validated schedule of an evaluation, which has forward passes only."""
    return forward_only(placement(layout), micro_batches, bool(layout.vocab_pp))


def long_layout(model: ModelShape, layout: Layout, micro_batches: int) -> LongSchedule:
    """Return the training schedule of a layout for the planner, which asks for time and memory."""
    costs = stage_costs(model, layout)
    shape = layout.schedule, layout.pp, micro_batches, layout.stages_per_rank
    return long_schedule(*shape, costs, _backward(layout))


def _backward(layout: Layout) -> int:
    """Return how many times as long as a forward pass a backward pass takes, for the order of
    --vocab-pp: 3 if all blocks are recomputed, else 2. Return 0 without --vocab-pp.
    """
    if not layout.vocab_pp:
        return 0
    fewer = layout.recompute_layers is not None or layout.recompute_blocks is not None
    return 3 if layout.recompute == "full" and not fewer else 2


def stage_costs(model: ModelShape, layout: Layout, device: str = "cuda") -> StageCosts | None:
    """Return the costs for which a searched order is made; None for schedules of ORDERS, which do
    not depend on costs.
    """
    if layout.schedule not in SEARCHED:
        return None
    plain = replace(layout, schedule="auto", partition="balanced")
    blocks = blocks_per_stage(model, layout)
    return task_of(model, plain, device).costs(layout.schedule, blocks)


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
    model: ModelShape, layout: Layout, device: str
) -> tuple[PassCosts, PassCosts, PassCosts]:
    """Return the costs of embedding, block and head on one tensor rank, for one token; seconds are
    FLOPs. A block's backward pass includes recomputation only if all blocks are recomputed.
    """
    t, h = layout.tp, model.hidden
    counted = [PassCosts(*(each / t for each in part)) for part in pass_costs(model, device)]
    embedding, block, head = counted
    if layout.recompute_layers is None and layout.recompute_blocks is None:
        again = {
            "none": 0.0,
            "selective": attention_scores(model) / t,
            "full": block.forward,
        }
        block = block._replace(inputs=block.inputs + again[layout.recompute])
    widths = model.qkv_width + 2 * model.attention_width + model.up_width + model.ffn_hidden
    kept = 2.0 * (8 * h / (t if layout.sequence_parallel else 1) + 2 * widths / t)
    held = sent_bytes(model) if layout.recompute == "full" else kept
    logits = 4.0 * model.vocab_size / t
    if given := explicit_costs(layout):  # scaled such that a block costs its counted FLOPs
        unit = block.seconds / sum(given[:3])
        scaled = [unit * each for each in given]
        block, head = PassCosts(*scaled[:3]), PassCosts(*scaled[3:])
    return embedding, block._replace(held=held), head._replace(held=logits)
