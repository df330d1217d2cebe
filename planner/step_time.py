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
from planner.job import Column, Job, term
from schedules import vocabulary
from schedules.compiler import StageCosts, long_schedule
from schedules.costs import stage_costs
from schedules.partition import executed_flops, stage_specs

OPERATIONS = 20  # that a block's forward launches with fused norms, biases and positions
ROTARY = 2.0  # bytes moved for each byte that rotary positions turn
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
    products = [block_costs.linear(job, *matrix) for matrix in block_costs.matrices(job)]
    core, other = block_costs.attention(job), elementwise_seconds(job)
    sums = 1 + (model.mlps[1] if model.mlps[0] > 1 else 1)  # of each expert's outputs
    hidden = np.where(layout.splits_backward, 0.0, machine.software.overlap_tensor)
    exposed = sums * _tensor_all_reduce(job) * (1 - hidden)
    collectives = exposed + block_costs.dispatched(job)
    host = machine.software.host_per_block
    forward = sum(each[0] for each in products) + core[0] + other[0] + collectives + host / 4
    backward = sum(each[1] for each in products) + core[1] + other[1] + collectives + host * 3 / 4
    added = _accumulated(machine) * job.block_parameters / layout.tp
    backward = backward + op_costs.moved(machine, added)
    # With sequence parallelism the gathered inputs are not kept: they are gathered once more.
    backward = backward + np.where(job.sequence_parallel, exposed / 2, 0.0)
    again = np.where(np.equal(layout.recompute, "full"), forward, 0.0)
    selective = np.equal(layout.recompute, "selective")
    again = np.where(selective, selective_seconds(job, forward), again)
    launched = machine.software.host_per_operation * operations(job)
    forward = np.maximum(forward, launched)
    plain = Pass(forward, np.maximum(backward, 2 * launched))
    return plain, Pass(forward, np.maximum(backward + again, 2 * launched))


@term
def selective_seconds(job: Job, forward: Column) -> Column:
    """Seconds of what selective recomputation does again in a block whose forward takes so long:
    nothing, since a flash kernel recomputes attention's scores itself.
    """
    return 0.0


@term
def operations(job: Job) -> Column:
    """Kernels and collectives that a block's forward launches."""
    collectives = np.where(job.sequence_parallel, 4, 2)
    return OPERATIONS + np.where(job.layout.tp > 1, collectives, 0)


def elementwise_seconds(job: Job) -> tuple[Column, Column]:
    """Seconds of norms, residuals, activation and bias gradients, forward and backward."""
    forward, backward = elementwise_bytes(job)
    return (
        op_costs.moved(job.machine, job.tokens * forward),
        op_costs.moved(job.machine, job.tokens * backward),
    )


@term
def elementwise_bytes(job: Job) -> tuple[Column, Column]:
    """Bytes moved for a token outside of products and attention, forward and backward.

    Passes over s*b*h: forward two norms (read, write) and two residual additions (read, read,
    write); backward three for a norm, three for an addition.
    """
    model, t, h, (experts, active) = job.model, job.layout.tp, job.model.hidden, job.model.mlps
    f, size = active * model.ffn_hidden, job.number_bytes
    width = active * model.up_width + f
    normed, turned = normed_width(model), (model.qkv_width + model.attention_width) / 2
    forward = 10 * h / job.sequence_shards + (width + 2 * normed) / t
    backward = 12 * h / job.sequence_shards + (width + f + 3 * normed) / t
    if model.bias:
        backward = backward + f / t + 2 * h
    if model.qkv_bias:
        backward = backward + model.qkv_width / t
    if model.positions == "rotary":
        forward, backward = forward + ROTARY * turned / t, backward + ROTARY * turned / t
    if experts > 1:  # tokens are copied in the order of their experts, and back
        forward, backward = forward + 4 * active * h, backward + 4 * active * h
    return size * forward, size * backward


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
    if not layout.vocab_pp:
        seconds = schedule_seconds(job, passes, sent, nearly)
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


@term
def schedule_seconds(job: Job, passes: tuple[Pass, ...], sent: float, nearly: bool) -> float:
    """Seconds of the layout's schedule; its arguments as those of `pipeline_time`."""
    layout = job.layout
    weights = tuple(stage_weights(job)) if layout.splits_backward else None
    costs = stage_costs(job.model, layout)
    count, virtual = job.micro_batches, layout.stages_per_rank
    return makespan(layout.schedule, passes, sent, count, virtual, weights, costs, nearly)


@term
def message_seconds(job: Job) -> Column:
    """Seconds until a micro-batch's activation has reached the next stage."""
    ranks = job.layout.tp * job.shards
    seconds = op_costs.message(job.machine, ranks, job.activation_bytes)
    return np.where(job.layout.pp > 1, seconds, 0.0)


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
    blocks = -(-model.layers // layout.pp)
    reduced = _exposed(job, most, blocks * job.expert_parameters / t)
    if software.fused_accumulation:
        collected = job.micro_batches * op_costs.moved(machine, COLLECTED * held)
        reduced = reduced + np.where(job.zero >= 2, collected, 0.0)
    sharing = np.minimum(machine.node, t * dp)
    link = Link(machine.network.latency, machine.network.speed / sharing, 1.0)
    tied = op_costs.all_reduce(link, 2, 1.0 * wire_bytes(job) * job.vocab_columns * model.hidden)
    shard = memory.sharded_parameters(held, blocks, job)
    return {
        "reduce": reduced,
        "tied": np.where(most.tied, tied, 0.0),
        "optimizer": op_costs.moved(machine, 40.0 * shard + 8.0 * held),  # state; norm, zero, cast
        "fixed": software.per_step,
    }


def _exposed(job: Job, most: Most, experts: Column) -> Column:
    """Seconds of a step's gradient and parameter traffic that no computation hides.

    experts: parameters of experts on a GPU, which fewer ranks share.
    """
    layout, software = job.layout, job.machine.software
    dense = most.parameters - experts
    gather, reduce = gather_seconds(job, dense, experts), reduce_seconds(job, dense, experts)
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


def ring_seconds(job: Job, ranks: Column, stride: Column, count: Column) -> Column:
    """Seconds to sum `count` bytes over ranks so far apart."""
    return op_costs.all_reduce(op_costs.ring(job.machine, ranks, stride), ranks, count)


@term
def gather_seconds(job: Job, dense: Column, experts: Column) -> Column:
    """Seconds to gather the weights of a GPU's parameters once."""
    size, tp, ep = job.number_bytes, job.layout.tp, job.ep
    seconds = ring_seconds(job, job.shards, tp, dense * size) / 2
    return seconds + ring_seconds(job, job.shards // ep, tp * ep, experts * size) / 2


@term
def reduce_seconds(job: Job, dense: Column, experts: Column) -> Column:
    """Seconds to reduce the gradients of a GPU's parameters once: a rank gets the part that it
    updates, which without ZeRO is all.
    """
    tp, ep = job.layout.tp, job.ep
    size = wire_bytes(job) * np.where(job.layout.zero == 0, 2.0, 1.0)
    seconds = ring_seconds(job, job.shards, tp, dense * size) / 2
    return seconds + ring_seconds(job, job.shards // ep, tp * ep, experts * size) / 2


def wire_bytes(job: Job) -> int:
    """Bytes of one gradient as it is sent."""
    return job.machine.software.wire_bytes if job.number_bytes == 2 else 4
