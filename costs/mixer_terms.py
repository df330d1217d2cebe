"""Seconds and bytes of a mixer in the place of attention, beside its two matrix products.

    core_seconds(job)      its products within chunks and with its state, and what cp ranks send
    moved_numbers(job)     what its elementwise kernels read and write of a token
    kept_bytes(job, inner) what it keeps of a micro-batch for the backward pass
    working_bytes(job)     what its backward pass takes beside

They are those of the torch form (layers/linear_recurrence.py), which computes in fp32 or fp64. They
have been compared with no measured row: the rates are those of fp32 products. A job here has a
model whose blocks all have the mixer.
"""

from typing import NamedTuple

import numpy as np

from architecture.mixer_stats import CHUNK, channels, core_flops, matrices
from costs import op_costs
from costs.job import Column, Job
from costs.op_costs import LAUNCH, Pass

EXACT_BYTES = 4  # of a number between the matrices, in half precision too
LAUNCHES = 3  # of a chunk, one after the other: its state passes to the next one
BACKWARD = 2.0  # backward has two products for each one of the forward pass
# Temporary tensors of a mixer's backward pass over what its recurrence keeps. KDA has products of
# single keys within a block of 16 tokens. In rehearsals on a fake H100 they are 0.70 to 0.84 of it;
# in the other mixers less than what other terms leave over.
WORKING = {"kda": 0.8}


class Kept(NamedTuple):
    """How many numbers of a token are kept between a mixer's matrices, by their sizes.

    In fp32 at least: rows of scores, values, keys and states of a value head, keys and queries of a
    key head, and single numbers of a value head. results: values of a head in computing precision.
    They are counted from the tensors that torch keeps (tests/test_mixers.py).
    """

    scores: int
    values: int
    keys: int
    states: int
    of_key_heads: int
    single: int
    results: int


KEPT = {
    "gated_delta_net": Kept(6, 7, 5, 2, 4, 10, 3),
    "kda": Kept(3, 6, 13, 2, 0, 5, 3),
    "mamba2": Kept(3, 6, 4, 2, 2, 6, 2),
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

    inner: whether what is between its matrices is kept, which recomputation makes again from the
    first matrices' outputs. Most of it are the scores of each chunk and value head, and numbers of
    its keys and values. An output that a tensor rank has whole is kept in any case.
    """
    model, tp = job.model, job.layout.tp
    *first, (_, width, _) = matrices(model)
    outputs = sum(outs for outs, _, divided in first if divided) / tp + job.repeated_columns
    whole = sum(outs for outs, _, divided in first if not divided)
    again = job.number_bytes * (outputs + width / tp)
    if model.mixer == "short_conv":  # the input of the convolution and its result
        between = again + job.number_bytes * 2 * channels(model) / tp
    else:
        between = _recurrence_bytes(job)
    return job.tokens * (np.where(inner, between, again) + job.number_bytes * whole)


def working_bytes(job: Job) -> Column:
    """Return the temporary bytes of a mixer's backward pass for a micro-batch on one rank."""
    part = WORKING.get(job.model.mixer, 0.0)
    return part * job.tokens * _recurrence_bytes(job) if part else 0.0


def _recurrence_bytes(job: Job) -> Column:
    """Return the activation bytes a token of a mixer with states, from its first to last matrix.

    These are what the backward pass needs of the convolution, of the recurrence over chunks, and of
    the norm and gate after it, on one tensor rank. p: key size, r: value size of a head.
    """
    model, tp = job.model, job.layout.tp
    kept = KEPT[model.mixer]
    heads, p, r = model.mixer_value_heads / tp, model.mixer_key_size, model.mixer_value_size
    # Columns of this rank's queries and keys, and of all that the convolution reads.
    keys = 2 * p * np.maximum(1.0, model.mixer_key_heads / tp)
    convolved = keys + heads * r
    # With --cp-mixer states a cp rank has two segments of each sample. The state then has further
    # columns, for the transition from the state before a segment, and so has what is written.
    segmented = np.greater(job.cp, 1) & ~np.equal(job.layout.cp_mixer, "heads")
    length = np.where(segmented, model.seq_length / np.maximum(1, 2 * job.cp), model.seq_length)
    size = np.minimum(CHUNK, length)
    filled = np.ceil(length / size) * size / length  # the last chunk of a segment has zeros
    of_head = kept.scores * size + kept.values * r + kept.keys * p + kept.states * p * r / size
    if model.mixer == "mamba2":
        of_transition = p * r / size
    else:
        of_transition = (2 * p + r) * (1 + p / size)
    of_head = of_head + np.where(segmented, of_transition, 0.0)
    of_chunks = heads * of_head + kept.of_key_heads * keys / 2
    fp32_bytes = max(EXACT_BYTES, job.number_bytes) * (
        convolved + filled * of_chunks + kept.single * heads
    )
    if job.number_bytes >= EXACT_BYTES:  # a gate may be a view of all outputs, which are then kept
        fp32_bytes = fp32_bytes + job.number_bytes * heads * _beside_gate(job)
    return fp32_bytes + job.number_bytes * (2 * convolved + kept.results * heads * r)


def _beside_gate(job: Job) -> Column:
    """Return of how many outputs of a head beside its gate the gate is a view in fp32.

    In a gated delta net it is a copy where value heads of one rank share a key head.
    """
    model, p, r = job.model, job.model.mixer_key_size, job.model.mixer_value_size
    if model.mixer == "mamba2":
        return r + 1
    if model.mixer == "kda":
        return 0
    of_key_head = model.mixer_value_heads / np.maximum(model.mixer_key_heads, job.layout.tp)
    return np.where(of_key_head > 1, 0, 2 * p + r + 2)
