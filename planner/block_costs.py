"""Seconds of one micro-batch's products and attention in one block, and of what experts send.

Symbols: h hidden, t = tp. With experts a block's MLP is several, of which each rank has some.
"""

import math

from planner import op_costs
from planner.job import Job

UNEVEN = 1.1  # rows of the busiest rank's experts over those of even routing; assumed


def matrices(job: Job) -> list[tuple[int, int, int, int]]:
    """Rows, outputs and inputs of a block's four matrices on each GPU, and how many are alike: of
    experts those that are here, with the rows that all ranks of `ep` send.
    """
    model, t, h, (experts, active) = job.model, job.layout.tp, job.model.hidden, job.model.mlps
    rows, alike = job.tokens, 1
    shapes = [(rows, model.qkv_width // t, h, 1), (rows, h, model.attention_width // t, 1)]
    if experts > 1:
        alike = experts // job.ep
        rows = math.ceil(rows * active * UNEVEN / alike / op_costs.ALIGNMENT) * op_costs.ALIGNMENT
    shapes.append((rows, model.up_width // t, h, alike))
    return [*shapes, (rows, h, model.ffn_hidden // t, alike)]


def linear(job: Job, rows: int, outs: int, ins: int, alike: int) -> tuple[float, float]:
    """Seconds of so many alike linear layers of a block, forward and backward."""
    if job.machine.software.fp8 and job.number_bytes == 2:
        forward, backward = op_costs.fp8_linear(job.machine, rows, outs, ins)
    else:
        forward, backward = op_costs.linear(job.machine, rows, outs, ins, job.number_bytes)
    return alike * forward, alike * backward


def attention(job: Job) -> tuple[float, float]:
    """Seconds of a block's attention core. With cp, all-to-alls before and after it give a rank
    some heads of more tokens, and keys and values are gathered over the other ranks of cp.
    """
    model, layout, machine, size = job.model, job.layout, job.machine, job.number_bytes
    shape = model.seq_length, model.head_size, model.heads // layout.tp, layout.micro_batch_size
    forward, backward = (one / job.cp for one in op_costs.attention(machine, *shape, size))
    turned = size * job.tokens / layout.tp * (model.qkv_width + model.attention_width)
    exposed = op_costs.all_to_all(machine, layout.over_heads(model), layout.tp, turned)
    exposed += gathered(job)
    return forward + exposed, backward + exposed


def gathered(job: Job) -> float:
    """Seconds to gather a block's keys and values over the ranks of cp that have the same heads, or
    in backward to sum their gradients, in the same precision.
    """
    model, layout, heads = job.model, job.layout, job.layout.over_heads(job.model)
    ranks, own = job.cp // heads, 2 * model.kv_heads * model.head_size * job.tokens / layout.tp
    link = op_costs.ring(job.machine, ranks, layout.tp * heads)
    return op_costs.all_reduce(link, ranks, job.number_bytes * own * ranks) / 2


def dispatched(job: Job) -> float:
    """Seconds to send a micro-batch's tokens to their experts on other ranks, and back."""
    shared = job.layout.tp if job.sequence_parallel else 1
    count = job.model.mlps[1] * job.activation_bytes / shared
    return 2 * op_costs.all_to_all(job.machine, job.ep, job.layout.tp, count)
