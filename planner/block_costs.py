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
    some heads of more tokens, and what remains of cp passes keys and values around: what products
    do not hide of these, which backward takes twice, with their gradients.
    """
    model, layout, machine, size = job.model, job.layout, job.machine, job.number_bytes
    shape = model.seq_length, model.head_size, model.heads // layout.tp, layout.micro_batch_size
    forward, backward = (one / job.cp for one in op_costs.attention(machine, *shape, size))
    heads, width = layout.over_heads(model), 2 * model.kv_heads * model.head_size
    ring, row = job.cp // heads, size * job.tokens / layout.tp
    link = op_costs.ring(machine, ring, layout.tp * heads)
    sent = (ring - 1) * (row * width / link.speed + link.latency)
    turned = row * (model.qkv_width + model.attention_width)
    exposed = op_costs.all_to_all(machine, heads, layout.tp, turned)
    return max(forward, sent) + exposed, max(backward, 2 * sent) + exposed


def dispatched(job: Job) -> float:
    """Seconds to send a micro-batch's tokens to their experts on other ranks, and back."""
    shared = job.layout.tp if job.sequence_parallel else 1
    count = job.model.mlps[1] * job.activation_bytes / shared
    return 2 * op_costs.all_to_all(job.machine, job.ep, job.layout.tp, count)
