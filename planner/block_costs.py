"""Seconds of one micro-batch's products and attention in one block, and of what experts send.

Symbols: h hidden, t = tp. With experts a block's MLP is several, of which each rank has some.
"""

import numpy as np

from planner import op_costs
from planner.job import Column, Job, term

UNEVEN = 1.1  # rows of the busiest rank's experts over those of even routing; assumed


def matrices(job: Job) -> list[tuple[Column, Column, Column, Column]]:
    """Rows, outputs and inputs of a block's four matrices on each GPU, and how many are alike: of
    experts those that are here, with the rows that all ranks of `ep` send.
    """
    model, t, h, (experts, active) = job.model, job.layout.tp, job.model.hidden, job.model.mlps
    rows, alike = job.tokens, 1
    shapes = [(rows, model.qkv_width // t, h, 1), (rows, h, model.attention_width // t, 1)]
    if experts > 1:
        alike = experts // job.ep
        tiles = np.ceil(rows * active * UNEVEN / alike / op_costs.ALIGNMENT)
        rows = np.int64(tiles) * op_costs.ALIGNMENT
    shapes.append((rows, model.up_width // t, h, alike))
    return [*shapes, (rows, h, model.ffn_hidden // t, alike)]


def linear(
    job: Job, rows: Column, outs: Column, ins: Column, alike: Column
) -> tuple[Column, Column]:
    """Seconds of so many alike linear layers of a block, forward and backward."""
    if job.machine.software.fp8 and job.number_bytes == 2:
        forward, backward = op_costs.fp8_linear(job.machine, rows, outs, ins)
    else:
        forward, backward = op_costs.linear(job.machine, rows, outs, ins, job.number_bytes)
    return alike * forward, alike * backward


def attention(job: Job) -> tuple[Column, Column]:
    """Seconds of a block's attention core. With cp, all-to-alls before and after it give a rank
    some heads of more tokens, and keys and values are gathered over the other ranks of cp.
    """
    model, layout, machine, size = job.model, job.layout, job.machine, job.number_bytes
    forward, backward = core_seconds(job)
    turned = size * job.tokens / layout.tp * (model.qkv_width + model.attention_width)
    exposed = op_costs.all_to_all(machine, job.over_heads, layout.tp, turned)
    exposed = exposed + gathered(job)
    return forward / job.cp + exposed, backward / job.cp + exposed


@term
def core_seconds(job: Job) -> tuple[Column, Column]:
    """Seconds of attention's scores and their products, of all tokens of the samples."""
    model, layout = job.model, job.layout
    heads = model.heads // layout.tp * layout.micro_batch_size
    return op_costs.attention(
        job.machine, model.seq_length, model.head_size, heads, job.number_bytes
    )


def gathered(job: Job) -> Column:
    """Seconds to gather a block's keys and values over the ranks of cp that have the same heads, or
    in backward to sum their gradients, in the same precision.
    """
    model, tp, heads = job.model, job.layout.tp, job.over_heads
    ranks, own = job.cp // heads, 2 * model.kv_heads * model.head_size * job.tokens / tp
    link = op_costs.ring(job.machine, ranks, tp * heads)
    return op_costs.all_reduce(link, ranks, job.number_bytes * own * ranks) / 2


def dispatched(job: Job) -> Column:
    """Seconds to send a micro-batch's tokens to their experts on other ranks, and back."""
    count = job.model.mlps[1] * job.activation_bytes / job.sequence_shards
    return 2 * op_costs.all_to_all(job.machine, job.ep, job.layout.tp, count)
