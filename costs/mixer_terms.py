"""Seconds and bytes of a mixer in the place of attention, beside its two matrix products.

    core_seconds(job)      its products within chunks and with its state, and what cp ranks send
    moved_numbers(job)     what its elementwise kernels read and write of a token
    kept_bytes(job, inner) what it keeps of a micro-batch for the backward pass

They are those of the torch form (layers/linear_recurrence.py), which computes in fp32 or fp64. They
have been compared with no measured row: the rates are those of fp32 products. A job here has a
model whose blocks all have the mixer.
"""

import numpy as np

from architecture.mixer_stats import CHUNK, channels, core_flops, matrices
from costs import op_costs
from costs.job import Column, Job
from costs.op_costs import LAUNCH, Pass

EXACT_BYTES = 4  # of a number between the matrices, in half precision too
LAUNCHES = 3  # of a chunk, one after the other: its state passes to the next one
BACKWARD = 2.0  # backward has two products for each one of the forward pass


# How many numbers of a token are kept between a mixer's matrices in fp32 at least: of a value head
# its scores in a chunk, its values and its keys, and of a key head its keys. They are counted from
# the tensors that torch keeps.
KEPT = {
    "gated_delta_net": (6, 9, 7, 4),
    "kda": (3, 8, 14, 0),
    "mamba2": (3, 7, 5, 0),
    "short_conv": (0, 0, 0, 0),
}


def core_seconds(job: Job) -> Pass:
    """Return the seconds of a block's mixer without its matrix products with weights."""
    model, machine, tp = job.model, job.machine, job.layout.tp
    if model.mixer == "short_conv":
        sent = sent_seconds(job)
        return Pass(sent, sent)
    flops = core_flops(model) * job.tokens / tp
    seconds = flops / (machine.vector_peak * machine.gemm_fraction)
    exchanges = np.equal(job.layout.cp_mixer, "heads")
    in_a_row = np.where(exchanges, model.seq_length, model.seq_length / np.maximum(1, 2 * job.cp))
    in_a_row = np.where(np.greater(job.cp, 1), in_a_row, model.seq_length)
    chunks = np.ceil(in_a_row / CHUNK)
    waits = LAUNCHES * LAUNCH * chunks
    # By the delta rule a state that is passed on has further columns, those of its transition.
    more = 1.0 if model.mixer == "mamba2" else 1.5
    wider = np.where(np.greater(job.cp, 1) & ~exchanges, more, 1.0)
    sent = sent_seconds(job)
    forward = seconds * wider + waits + sent
    return Pass(forward, BACKWARD * (seconds * wider + waits) + sent)


def sent_seconds(job: Job) -> Column:
    """Return the seconds in which cp ranks send what a mixer needs of others; 0 at cp 1.

    By states it is gathered: for each of two segments a state, its transition, and the last tokens
    of the convolution. By heads the first matrix's outputs and the results are exchanged.
    """
    model, tp = job.model, job.layout.tp
    p, r, heads = model.mixer_key_size, model.mixer_value_size, model.mixer_value_heads
    transition = 1 if model.mixer == "mamba2" else p
    states = EXACT_BYTES * heads * p * (r + transition) * (model.mixer != "short_conv")
    last = job.number_bytes * (model.mixer_kernel - 1) * channels(model)
    all_bytes = 2 * job.cp * job.layout.micro_batch_size * (states + last) / tp
    link = op_costs.ring(job.machine, job.cp, tp)
    gathered = op_costs.all_reduce(link, job.cp, all_bytes) / 2
    *inner, (_, width, _) = matrices(model)
    columns = sum(outs for outs, _, _ in inner) + width
    exchanged = job.number_bytes * job.tokens / tp * columns
    by_heads = op_costs.all_to_all(job.machine, job.cp, tp, exchanged)
    return np.where(np.equal(job.layout.cp_mixer, "heads"), by_heads, gathered)


def moved_numbers(job: Job) -> Pass:
    """Return how many numbers of a token the mixer's elementwise kernels read and write.

    The convolution reads its input for each tap and adds to its result. Then there are SiLU,
    lengths of q and k, copies into chunks, decays between the tokens of a chunk, norm and gate.
    """
    model = job.model
    size = min(CHUNK, model.seq_length)
    heads, values = model.mixer_value_heads, model.mixer_value_heads * model.mixer_value_size
    ratio = EXACT_BYTES / job.number_bytes if job.number_bytes < EXACT_BYTES else 1.0
    forward = (2.0 + 3 * model.mixer_kernel) * channels(model)
    if model.mixer != "short_conv":
        forward += ratio * (10 * channels(model) + 6 * heads * size + 8 * values)
    if model.mixer == "kda":  # products of single keys within a block of 16 tokens
        forward += ratio * 8 * heads * min(16, size) * model.mixer_key_size
    return Pass(forward, 2.0 * forward) * (1 / job.layout.tp)


def kept_bytes(job: Job, inner: Column) -> Column:
    """Return the bytes that a mixer keeps of a micro-batch on one rank, without its input.

    inner: whether what is between its matrices is kept, which recomputation makes again. Most of it
    are the scores of each chunk and value head, and numbers of its keys and values.
    """
    model = job.model
    size = min(CHUNK, model.seq_length)
    g, a = model.mixer_key_heads, model.mixer_value_heads
    p, r = model.mixer_key_size, model.mixer_value_size
    *inner_matrices, (_, width, _) = matrices(model)
    outputs: Column = sum(outs for outs, _, _ in inner_matrices)
    scores, values, keys, of_key_heads = KEPT[model.mixer]
    of_chunks = scores * a * size + values * a * r + keys * a * p + of_key_heads * g * p
    exact = max(EXACT_BYTES, job.number_bytes)
    has_chunks = model.mixer != "short_conv"
    between = job.number_bytes * 2 * channels(model)
    between += exact * (has_chunks * channels(model) + of_chunks)
    if model.mixer == "kda":  # the outputs are joined, and are kept only to be computed with again
        outputs = np.where(inner, p + r, outputs + p + r)
    kept = job.number_bytes * (outputs + width)
    return job.tokens / job.layout.tp * (kept + np.where(inner, between, 0.0))
