"""The schedule that a layout runs, and the costs of its stages if its order is made for them.

    of_layout(model, layout, micro_batches)     the schedule that the pipeline executes
Read orders.py and partition.py first.
"""

from dataclasses import replace

from config.schema import Layout, ModelShape
from schedules.orders import SEARCHED, build, forward_only
from schedules.partition import (
    StageCosts,
    blocks_per_stage,
    placement,
)
from schedules.schedule import Schedule


def of_layout(
    model: ModelShape, layout: Layout, micro_batches: int, device: str = "cuda"
) -> Schedule:
    """Return the validated training schedule of a layout, once --schedule auto is decided."""
    costs = stage_costs(model, layout, device)
    shape = layout.schedule, layout.pp, micro_batches, layout.stages_per_rank
    return build(*shape, costs, backward_length(layout))


def evaluation_of_layout(layout: Layout, micro_batches: int) -> Schedule:
    """Return the validated schedule of an evaluation, which has forward passes only."""
    return forward_only(placement(layout), micro_batches, bool(layout.vocab_pp))


def backward_length(layout: Layout) -> int:
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
    from schedules.list_scheduling import task_of  # here: other schedules do not need it

    plain = replace(layout, schedule="auto", partition="balanced")
    blocks = blocks_per_stage(model, layout)
    return task_of(model, plain, device).costs(layout.schedule, blocks)
