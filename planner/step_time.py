"""How long a step takes and what it needs, for one layout on one machine: no torch, no GPU.

    prediction = predict(model, layout, training, load("a100-80"))

A step is the pipeline's time (the schedule that is executed, simulated with the stages' seconds),
then the gradient reduction, the tied embedding, the optimizer, the parameter gather.
Symbols: h hidden, s sequence, V vocabulary, f MLP width, b micro-batch, t = tp.

The formulas take one layout, or many as columns (planner/job.py); what builds a schedule takes one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from config.model_stats import model_flops, normed_width
from config.schema import Layout, ModelShape, Training
from planner import block_costs, memory, op_costs, risk
from planner.hardware import Link, Machine
from planner.job import Column, Job
from schedules import vocabulary
from schedules.compiler import StageCosts, long_schedule
from schedules.costs import stage_costs
from schedules.partition import executed_flops, stage_specs

OPERATIONS = 20  # that a block's forward launches with fused norms, biases and positions
# Bytes moved for each byte of the input, beside one kernel's read and write: RMSNorm or LayerNorm
# in FP32 as five kernels of torch, forward and backward; rotary positions as eight.
UNFUSED_NORM = (16.0, 37.0)
ROTARY, UNFUSED_ROTARY = 2.0, 9.0
COLLECTED = 10.0  # bytes moved per gradient to collect a micro-batch's in FP32, at --zero 2 and 3


class Pass(NamedTuple):
    """Seconds of one micro-batch forward and backward (with recomputation) through a part."""

    forward: Column
    backward: Column


class Passes(NamedTuple):
    """Those of a block that is not recomputed, of one that is, of the embedding and the head."""

    block: Pass
    redone: Pass
    embedding: Pass
    head: Pass


@dataclass(frozen=True)
class Prediction:
    """What a layout is predicted to do. Seconds per step, bytes of the fullest stage's GPU."""

    seconds: float
    interval: tuple[float, float]  # seconds that hold 90 of 100 runs
    risk: float  # probability of running out of memory
    parts: dict[str, float]  # seconds: pipeline, of which bubble; reduce, tied, optimizer, fixed
    bubble: float  # share of the pipeline's time in which a stage is idle, on average
    memory: list[memory.StageMemory]
    fits: bool
    margin: float  # bytes free on the fullest stage's GPU, negative if it does not fit
    tokens_per_second: float
    model_tflops: float  # per GPU, megatron-2025 formula
    hardware_tflops: float  # per GPU, with recomputation
    mfu: float
    warnings: list[str]


def predict(model: ModelShape, layout: Layout, training: Training, machine: Machine) -> Prediction:
    """Time and memory of a layout that `config` has checked; dp must be filled in.

    Raises UserError if the batch is smaller than one micro-batch on every replica.
    """
    job = Job(model, layout, training, machine)
    pipeline, bubble = pipeline_time(job)
    parts = {"pipeline": pipeline} | step_parts(job)
    parts = {name: seconds * machine.slowdown for name, seconds in parts.items()}
    seconds = sum(parts.values())
    parts["bubble"] = parts["pipeline"] * bubble
    table = memory.stages(job)
    margin = machine.memory - max(stage.total for stage in table)
    samples = training.global_batch_size
    per_gpu = seconds * job.gpus
    flops = model_flops(model, samples)
    return Prediction(
        seconds=seconds,
        interval=risk.interval(job, seconds),
        risk=risk.out_of_memory(machine, machine.memory - margin),
        parts=parts,
        bubble=bubble,
        memory=table,
        fits=margin >= 0,
        margin=margin,
        tokens_per_second=samples * model.seq_length / seconds,
        model_tflops=flops / (per_gpu * 1e12),
        hardware_tflops=executed_flops(model, layout, samples) / (per_gpu * 1e12),
        mfu=flops / (per_gpu * machine.peak),
        warnings=job.warnings,
    )


# ---- One micro-batch through one part ------------------------------------------------------------


def passes_of(job: Job) -> Passes:
    """Seconds of one micro-batch through the parts of a model."""
    return Passes(*block_passes(job), embedding_pass(job), head_pass(job))


def block_pass(job: Job) -> Pass:
    """Seconds of one micro-batch through a block that is recomputed as the layout says."""
    return block_passes(job)[1]


def block_passes(job: Job) -> tuple[Pass, Pass]:
    """Seconds of one micro-batch through one block on each GPU of its tensor group: of a block that
    is not recomputed, and of one that is, as the layout says.
    """
    model, layout, _, machine = job
    t, software = layout.tp, machine.software
    layers = [block_costs.linear(job, *matrix) for matrix in block_costs.matrices(job)]
    core, other = block_costs.attention(job), _elementwise(job)
    sent = block_costs.dispatched(job)
    sums = 1 + (model.mlps[1] if model.mlps[0] > 1 else 1)  # of each expert's outputs
    hidden = np.where(layout.splits_backward, 0.0, software.overlap_tensor)
    exposed = sums * _tensor_all_reduce(job) * (1 - hidden)
    host = software.host_per_block
    forward = sum(layer[0] for layer in layers) + core[0] + other[0] + exposed + sent + host / 4
    backward = (
        sum(layer[1] for layer in layers) + core[1] + other[1] + exposed + sent + host * 3 / 4
    )
    backward = backward + op_costs.moved(machine, _accumulated(machine) * job.block_parameters / t)
    # With sequence parallelism the gathered inputs are not kept: they are gathered once more.
    backward = backward + np.where(job.sequence_parallel, exposed / 2, 0.0)
    selective = software.recompute_share * forward
    if software.keeps_products:
        selective = selective + _redone([layer[0] for layer in layers], job) + other[0]
    if software.keeps_scores:  # a flash kernel recomputes the scores itself
        selective = selective + core[0]
    again = np.where(np.equal(layout.recompute, "full"), forward, 0.0)
    again = np.where(np.equal(layout.recompute, "selective"), selective, again)
    launched = software.host_per_operation * _operations(job)
    forward = np.maximum(forward, launched)
    plain = Pass(forward, np.maximum(backward, 2 * launched))
    return plain, Pass(forward, np.maximum(backward + again, 2 * launched))


def _redone(forward: list[Column], job: Job) -> Column:
    """Seconds of the products that `keeps_products` does not keep: k, attention's output, w3.

    forward: seconds of a block's four matrices; that of q, k and v is one of them.
    """
    model = job.model
    keys = (model.qkv_width - model.attention_width) / 2 / model.qkv_width
    return keys * forward[0] + forward[1] + forward[2] / 2


def _operations(job: Job) -> Column:
    """Kernels and collectives that a block's forward launches."""
    software, tp, found = job.machine.software, job.layout.tp > 1, OPERATIONS
    found += (0 if software.fused_norms else 12) + (0 if software.fused_elementwise else 12)
    found += 6 if software.keeps_scores else 0
    return found + np.where(tp, np.where(job.sequence_parallel, 4, 2), 0)


def _elementwise(job: Job) -> tuple[Column, Column]:
    """Seconds of norms, residuals, dropout, activation and bias gradients, by bytes moved.

    Passes over s*b*h: forward two norms (read, write) and two residual additions (read, read,
    write); backward three for a norm, three for an addition; a dropout mask is one byte.
    """
    model, t, h, (experts, active) = job.model, job.layout.tp, job.model.hidden, job.model.mlps
    f = active * model.ffn_hidden
    size, masks = job.number_bytes, 1.0 if job.machine.software.dropout else 0.0
    shared, width = job.sequence_shards, active * model.up_width + f
    forward = (10 * size + 2 * masks) * h / shared + size * width / t
    backward = (12 * size + (4 * size + 2) * masks) * h / shared + size * (width + f) / t
    if model.bias:
        backward = backward + size * (f / t + 2 * h)
    if model.qkv_bias:
        backward = backward + size * model.qkv_width / t
    normed = size * normed_width(model) / t
    software = job.machine.software
    if not software.fused_norms:
        forward = forward + 2 * UNFUSED_NORM[0] * size * h / shared
        backward = backward + 2 * UNFUSED_NORM[1] * size * h / shared
    fused = (2.0, 3.0) if software.fused_norms else UNFUSED_NORM
    forward, backward = forward + fused[0] * normed, backward + fused[1] * normed
    if not software.fused_elementwise and model.activation == "swiglu":
        forward, backward = forward + 2 * size * f / t, backward + 3 * size * f / t
    if model.positions == "rotary":
        passes = ROTARY if software.fused_elementwise else UNFUSED_ROTARY
        turned = passes * size * (model.qkv_width + model.attention_width) / 2 / t
        forward, backward = forward + turned, backward + turned
    if experts > 1:  # tokens are copied in the order of their experts, and back
        forward, backward = forward + 4 * size * active * h, backward + 4 * size * active * h
    forward, backward = job.tokens * forward, job.tokens * backward
    return op_costs.moved(job.machine, forward), op_costs.moved(job.machine, backward)


def head_pass(job: Job) -> Pass:
    """Seconds of one micro-batch through final norm, output matrix and loss."""
    machine, rows, columns, h = job.machine, job.tokens, job.vocab_columns, job.model.hidden
    forward, backward = op_costs.linear(machine, rows, columns, h, job.number_bytes)
    logits = op_costs.moved(machine, machine.software.logit_bytes * rows * columns)
    added = op_costs.moved(machine, _accumulated(machine) * columns * h)
    return Pass(forward + logits + _tensor_all_reduce(job), backward + logits + added)


def embedding_pass(job: Job) -> Pass:
    """Seconds of one micro-batch through the embedding: rows looked up, a dense gradient added."""
    machine, matrix = job.machine, job.vocab_columns * job.model.hidden
    looked = op_costs.moved(machine, 5.0 * job.activation_bytes)
    added = op_costs.moved(machine, (_accumulated(machine) + 2 * job.number_bytes) * matrix)
    return Pass(looked + _tensor_all_reduce(job), looked + added)


def _tensor_all_reduce(job: Job) -> Column:
    """Seconds to sum one micro-batch's activation over the tensor group."""
    link = op_costs.ring(job.machine, job.layout.tp, 1)
    return op_costs.all_reduce(link, job.layout.tp, job.activation_bytes)


def _accumulated(machine: Machine) -> float:
    """Bytes moved per parameter to add a half-precision gradient to the accumulated one."""
    if machine.software.fused_accumulation:
        return 0.0
    return 2.0 + 2 * min(machine.software.gradient_bytes, 4.0)


# ---- The pipeline --------------------------------------------------------------------------------


def stage_passes(job: Job) -> tuple[Pass, ...]:
    """Seconds of one micro-batch through each stage of the layout."""
    layout, parts = job.layout, passes_of(job)
    ends = not layout.vocab_pp
    found = []
    for spec in stage_specs(job.model, layout):
        redone = layout.recomputed_blocks(spec.blocks, spec.index)
        counts = spec.blocks - redone, redone, spec.embedding and ends, spec.head and ends
        seconds = zip(counts, parts, strict=True)
        rows = [(count * part.forward, count * part.backward) for count, part in seconds]
        found.append(Pass(*(float(sum(column)) for column in zip(*rows, strict=True))))
    return tuple(found)


def pipeline_time(job: Job, sent: float | None = None, nearly: bool = False) -> tuple[float, float]:
    """Seconds from the first forward to the last backward, and the idle share of the stages.

    sent: seconds of a message between stages, default: `message_seconds`. nearly: a schedule whose
    rounds are not alike may be a few per cent off (`schedules.simulation.LongSchedule`).
    """
    layout, machine, count = job.layout, job.machine, job.micro_batches
    sent = float(message_seconds(job)) if sent is None else sent
    passes = stage_passes(job)
    chunks = machine.software.virtual_stages
    if chunks > 1:
        # Megatron-LM's interleaved schedule, of measured rows alone: a bubble 1/v as long and v
        # times the messages, arXiv 2104.04473 section 2.2.
        slot = max(map(sum, passes))
        shown = 1 if machine.software.overlap_messages else count  # until the first has come
        seconds = (count + (layout.pp - 1) / chunks) * slot + shown * chunks * sent
    elif not layout.vocab_pp:
        weights = tuple(stage_weights(job)) if layout.splits_backward else None
        virtual = layout.stages_per_rank
        costs = stage_costs(job.model, layout)
        about = layout.schedule, passes, sent, count, virtual, weights, costs
        seconds = makespan(*about, nearly)
    busy = count * sum(map(sum, passes)) / layout.pp
    if layout.vocab_pp:
        own = vocabulary_seconds(job)
        actions = action_seconds(passes) | own
        seconds = vocabulary.makespan(job.model, layout, count, actions, sent)
        # Of a micro-batch a rank's link carries two messages of its stage, and those of E, S, T, G.
        seconds = max(seconds, count * 6 * sent)
        busy += count * sum(own.values()) / layout.pp
    if machine.ranks_per_core > 1:  # the core of an idle stage serves the others
        seconds = max(seconds / machine.ranks_per_core, busy)
    return seconds, max(0.0, 1.0 - busy / seconds)  # not below 0 by rounding


def message_seconds(job: Job) -> Column:
    """Seconds until a micro-batch's activation has reached the next stage."""
    layout = job.layout
    seconds = op_costs.message(job.machine, layout.tp * job.shards, job.activation_bytes, layout.tp)
    return np.where(layout.pp > 1, seconds, 0.0)


@lru_cache(maxsize=4096)
def makespan(
    name: str,
    passes: tuple[Pass, ...],
    transfer: float,
    count: int,
    virtual: int = 1,
    weights: tuple[float, ...] | None = None,
    costs: StageCosts | None = None,
    nearly: bool = False,
) -> float:
    """Seconds of the schedule `name` with `virtual` stages on each rank and `count` micro-batches.

    weights: as in `action_seconds`. costs: what its order was searched with. Cached, since layouts
    that differ in ZeRO alone, for example, ask for the same.
    """
    schedule = long_schedule(name, len(passes) // virtual, count, virtual, costs)
    seconds = action_seconds(passes, weights)
    return (schedule.nearly if nearly else schedule.makespan)(seconds, transfer)


def action_seconds(
    passes: Sequence[Pass], weights: Sequence[float] | None = None
) -> dict[tuple[str, int], float]:
    """The stages' seconds as `schedules.simulation` takes them: by kind of action and stage.

    weights: of each stage's backward, what a schedule that splits it does in W.
    """
    rows = list(enumerate(zip(passes, weights or [0.0] * len(passes), strict=True)))
    seconds = {("F", stage): one.forward for stage, (one, _) in rows}
    seconds |= {("B", stage): one.backward - apart for stage, (one, apart) in rows}
    return seconds | {("W", stage): apart for stage, (_, apart) in rows if weights}


def vocabulary_seconds(job: Job) -> dict[tuple[str, int], float]:
    """As `action_seconds`, of the passes for a vocabulary that all ranks share."""
    front, back = embedding_pass(job), head_pass(job)
    each = {"E": front.forward, "S": back.forward, "T": back.backward, "G": front.backward}
    return {(kind, s): float(one) for kind, one in each.items() for s in range(job.layout.pp)}


def stage_weights(job: Job) -> list[float]:
    """Seconds of one micro-batch's weight gradients in each stage: half of every GEMM's backward,
    and adding them up. Those of a head that shares its matrix with the embedding come with B.
    """
    model, machine, t, h = job.model, job.machine, job.layout.tp, job.model.hidden
    block = op_costs.moved(machine, _accumulated(machine) * job.block_parameters / t)
    block += sum(block_costs.linear(job, *matrix)[1] / 2 for matrix in block_costs.matrices(job))
    head = op_costs.linear(machine, job.tokens, job.vocab_columns, h, job.number_bytes)[1] / 2
    head += op_costs.moved(machine, _accumulated(machine) * job.vocab_columns * h)
    specs = stage_specs(model, job.layout)
    heads = [s.head and (s.tied or not model.tied) for s in specs]
    return [float(s.blocks * block + own * head) for s, own in zip(specs, heads, strict=True)]


# ---- After the pipeline --------------------------------------------------------------------------


class Most(NamedTuple):
    """Of a layout's pipeline ranks and stages the largest: parameters of a rank, and seconds of a
    stage's forward and backward; and whether a second rank has a copy of the vocabulary's matrix.
    """

    parameters: Column
    forward: Column
    backward: Column
    tied: Column


def step_parts(job: Job) -> dict[str, float]:
    """Seconds of what follows the last backward: reduce, tied, optimizer, and a fixed rest."""
    specs, passes = stage_specs(job.model, job.layout), stage_passes(job)
    own = memory.held_parameters(memory.Parts.of(specs), job)
    of_rank = np.bincount([spec.rank for spec in specs], np.broadcast_to(own, len(specs)))
    slowest = [max(each) for each in zip(*passes, strict=True)]
    parts = after_pipeline(job, Most(max(of_rank), slowest[0], slowest[1], specs[0].tied))
    return {name: float(seconds) for name, seconds in parts.items()}


def after_pipeline(job: Job, most: Most) -> dict[str, Column]:
    """As `step_parts`, of one layout or of columns."""
    model, layout, _, machine = job
    software, t, dp, held = machine.software, layout.tp, layout.dp, most.parameters
    wire = min(software.wire_bytes, 4) if job.number_bytes == 2 else 4
    whole = np.bool_(software.all_reduce_gradients) | (layout.zero == 0)
    volume = wire * np.where(whole, 2.0, 1.0)
    blocks = -(-model.layers // layout.pp)
    reduced = _exposed(job, most, blocks * job.expert_parameters / t, volume)
    if software.fused_accumulation:
        collected = job.micro_batches * op_costs.moved(machine, COLLECTED * held)
        reduced = reduced + np.where(job.zero >= 2, collected, 0.0)
    sharing = np.minimum(machine.node, t * dp)
    link = Link(machine.network.latency, machine.network.speed / sharing, 1.0)
    tied = op_costs.all_reduce(link, 2, float(wire) * job.vocab_columns * model.hidden)
    shard = memory.sharded_parameters(held, blocks, job)
    return {
        "reduce": reduced,
        "tied": np.where(most.tied, tied, 0.0),
        "optimizer": op_costs.moved(machine, 40.0 * shard + 8.0 * held),  # state; norm, zero, cast
        "fixed": software.per_step,
    }


def _exposed(job: Job, most: Most, experts: Column, wire: Column) -> Column:
    """Seconds of a step's gradient and parameter traffic that no computation hides.

    experts: parameters of experts on a GPU, which fewer ranks share. wire: bytes to reduce one
    gradient, in halves of an all-reduce's.
    """
    layout, software = job.layout, job.machine.software
    dense, shown = most.parameters - experts, 1 - software.overlap_data
    gather = shown * _gather(job, dense, experts)
    reduce = shown * _reduce(job, dense, experts, wire)
    # Passes behind which the traffic can hide.
    forward = np.where(
        np.equal(layout.overlap_param_gather, False), 0.0, software.overlap_passes * most.forward
    )
    backward = software.overlap_passes * most.backward
    rounds = np.where(layout.zero >= 2, job.micro_batches, 1)
    # The traffic of the last block of a stage, which nothing hides, as a share.
    tail = 1 / np.maximum(1, job.model.layers // (layout.pp * layout.stages_per_rank))
    gathered = np.maximum(gather - forward, gather * tail)
    after = np.where(layout.zero > 0, gathered, 0.0)
    once = rounds * np.maximum(reduce - backward, reduce * tail) + after
    # At --zero 3 the weights are gathered once forward and once backward.
    both = gathered + np.maximum(gather + reduce - backward, reduce * tail)
    return np.where(layout.zero == 3, rounds * both, once)


def _sharing(job: Job) -> Column:
    """Ranks over which --zero shards: all that hold the same weights, or those of a node."""
    if not job.machine.software.shard_in_node:
        return job.shards
    of_node = np.maximum(1, job.machine.node // job.layout.tp)
    return np.where(job.layout.zero > 0, np.minimum(job.shards, of_node), job.shards)


def _ring(job: Job, ranks: Column, stride: Column, count: Column) -> Column:
    """Seconds to sum `count` bytes over ranks so far apart."""
    return op_costs.all_reduce(op_costs.ring(job.machine, ranks, stride), ranks, count)


def _gather(job: Job, dense: Column, experts: Column) -> Column:
    """Seconds to gather the weights of a GPU's parameters once."""
    size, tp, ep = job.number_bytes, job.layout.tp, job.ep
    seconds = _ring(job, _sharing(job), tp, dense * size) / 2
    return seconds + _ring(job, job.shards // ep, tp * ep, experts * size) / 2


def _reduce(job: Job, dense: Column, experts: Column, wire: Column) -> Column:
    """Seconds to reduce the gradients of a GPU's parameters once, also between nodes."""
    ranks, tp, ep = _sharing(job), job.layout.tp, job.ep
    seconds = _ring(job, ranks, tp, dense * wire) / 2
    seconds = seconds + _ring(job, job.shards // ep, tp * ep, experts * wire) / 2
    replicas = job.shards // ranks  # which sum what a node has summed
    return seconds + _ring(job, replicas, tp * ranks, dense * wire / ranks)
