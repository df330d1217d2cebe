"""How long a step takes and what it needs, for one layout on one machine: no torch, no GPU.

    prediction = predict(model, layout, training, load("a100-80"))

A step is the pipeline's time (the schedule that is executed, simulated with the stages' seconds),
then the gradient reduction, the tied embedding, the optimizer, the parameter gather. Its terms are
in planner/time_terms.py; here they are put together.

The formulas take one layout, or many as columns (planner/job.py); what builds a schedule takes one.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from config.model_stats import model_flops
from config.schema import Layout, ModelShape, Training
from planner import hardware, memory, memory_terms, risk, time_terms
from planner.hardware import Machine
from planner.job import Column, Job, mean_of_kinds, term
from planner.op_costs import Pass
from schedules.long_schedule import LongSchedule, long_layout
from schedules.partition import executed_flops, stage_specs
from schedules.simulation import Seconds

# Shares of a datasheet's rate: reductions over many nodes were measured at a half to a quarter of
# it.
NETWORK_SHARES = (1.0, 0.5, 0.25)


class Passes(NamedTuple):
    """The passes of a block that is not recomputed, of one that is, of embedding and head."""

    block: Pass
    redone: Pass
    embedding: Pass
    head: Pass


@dataclass(frozen=True)
class Prediction:
    """The prediction for a layout. Seconds per step, bytes of the fullest stage's GPU."""

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
    # Seconds at NETWORK_SHARES of a network's rate that is its datasheet's, where nodes exchange
    # anything: then the interval reaches to the slowest.
    at_networks: tuple[float, ...] = ()


def predict(model: ModelShape, layout: Layout, training: Training, machine: Machine) -> Prediction:
    """Time and memory of a layout that `config` has checked; dp must be filled in.

    Raises UserError if the batch is smaller than one micro-batch on every replica.
    """
    job = Job(model, layout, training, machine)
    parts, bubble = _parts_of_step(job)
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


def _parts_of_step(job: Job) -> tuple[dict[str, float], float]:
    """Seconds of a step by part, and the idle share of the pipeline."""
    pipeline, bubble = pipeline_time(job)
    parts = {"pipeline": pipeline} | step_parts(job)
    return {name: seconds * job.machine.slowdown for name, seconds in parts.items()}, bubble


def with_networks(prediction: Prediction, job: Job) -> Prediction:
    """The prediction of a job with the seconds at slower networks, if its own was not measured."""
    if job.machine.network_measured or job.gpus <= job.machine.node:
        return prediction
    slower = []
    for share in NETWORK_SHARES:
        machine = hardware.at_share_of_network(job.machine, share)
        parts, _ = _parts_of_step(job._replace(machine=machine))
        slower.append(sum(parts.values()))
    found = tuple(prediction.seconds * seconds / slower[0] for seconds in slower)
    low, high = prediction.interval
    return replace(prediction, interval=(low, high * found[-1] / found[0]), at_networks=found)


# ---- One micro-batch through one part ------------------------------------------------------------


def passes_of(job: Job) -> Passes:
    """Seconds of one micro-batch through the parts of a model."""
    blocks = block_passes(job)
    ends = time_terms.embedding(job), time_terms.head(job)
    return Passes(blocks.forward, blocks.backward, *ends)


def block_pass(job: Job) -> Pass:
    """Seconds of one micro-batch through a block that is recomputed as the layout says."""
    return block_passes(job).backward


@mean_of_kinds
def block_passes(job: Job) -> Pass:
    """A pair: seconds of one micro-batch through a block that is not recomputed, and through one
    that is, as the layout says; no less than the host takes to launch them.
    """
    whole = time_terms.block_seconds(job)
    full = np.equal(job.layout.recompute, "full")
    selective = np.equal(job.layout.recompute, "selective")
    again = np.where(full, whole.forward, 0.0)
    again = np.where(selective, time_terms.selective_seconds(job, whole.forward), again)
    launched = job.machine.software.host_per_operation * time_terms.operations(job)
    forward = np.maximum(whole.forward, launched)
    plain = np.maximum(whole.backward, 2 * launched)
    redone = np.maximum(whole.backward + again, 2 * launched)
    return Pass(Pass(forward, plain), Pass(forward, redone))


# ---- The pipeline --------------------------------------------------------------------------------


def stage_passes(job: Job) -> tuple[Pass, ...]:
    """Seconds of one micro-batch through each stage of the layout."""
    layout, parts = job.layout, passes_of(job)
    ends = not layout.vocab_pp
    found = []
    for spec in stage_specs(job.model, layout):
        redone = layout.recomputed_blocks(spec.blocks, spec.index)
        one = parts.block * (spec.blocks - redone)
        one += parts.redone * redone
        one += parts.embedding * (spec.embedding and ends)
        one += parts.head * (spec.head and ends)
        found.append(Pass(float(one.forward), float(one.backward)))
    return tuple(found)


def pipeline_time(job: Job, sent: float | None = None) -> tuple[float, float]:
    """Seconds from the first forward to the last backward, and the idle share of the stages.

    sent: seconds of a message between stages, default: `message_seconds`.
    """
    layout, machine, count = job.layout, job.machine, job.micro_batches
    sent = float(time_terms.message_seconds(job)) if sent is None else sent
    actions = action_seconds(job)
    seconds = schedule_seconds(job, actions, sent)
    busy = count * sum(actions.values()) / layout.pp
    if layout.vocab_pp:
        # For a micro-batch a rank's link carries two messages of its stage, and those of E, S, T,
        # G.
        seconds = max(seconds, count * 6 * sent)
    if machine.ranks_per_core > 1:  # the core of an idle stage serves the others
        seconds = max(seconds / machine.ranks_per_core, busy)
    return seconds, max(0.0, 1.0 - busy / seconds)  # not below 0 by rounding


@term
def schedule_seconds(job: Job, actions: Seconds, sent: float) -> float:
    """Seconds of the layout's schedule; its arguments as those of `pipeline_time`."""
    order = long_layout(job.model, job.layout, job.micro_batches)
    return _makespan(order, tuple(actions.items()), sent)


@lru_cache(maxsize=4096)
def _makespan(
    order: LongSchedule, actions: tuple[tuple[tuple[str, int], float], ...], sent: float
) -> float:
    """Cached, since layouts that differ in ZeRO alone, for example, ask for the same."""
    return order.makespan(dict(actions), sent)


def action_seconds(job: Job) -> Seconds:
    """Seconds of one micro-batch's actions as `schedules.simulation` takes them: by kind of action
    and stage; with --vocab-pp also of the passes for the vocabulary that all ranks share.
    """
    layout = job.layout
    seconds: dict[tuple[str, int], float] = {}
    for stage, one in enumerate(stage_passes(job)):
        seconds["F", stage] = one.forward
        seconds["B", stage] = one.backward
    if layout.splits_backward:
        for stage, weights in enumerate(stage_weights(job)):
            seconds["B", stage] -= weights
            seconds["W", stage] = weights
    if layout.vocab_pp:
        front, back = time_terms.embedding(job), time_terms.head(job)
        of_kind = {"E": front.forward, "S": back.forward, "T": back.backward, "G": front.backward}
        for kind, stage in product(of_kind, range(layout.pp)):
            seconds[kind, stage] = float(of_kind[kind])
    return seconds


def stage_weights(job: Job) -> list[float]:
    """Seconds of one micro-batch's weight gradients in each stage. Those of a head that shares its
    matrix with the embedding come with B.
    """
    block, head = time_terms.block_weights(job), time_terms.head_weights(job)
    found = []
    for spec in stage_specs(job.model, job.layout):
        has_own_head = spec.head and (spec.tied or not job.model.tied)
        found.append(float(spec.blocks * block + has_own_head * head))
    return found


# ---- After the pipeline --------------------------------------------------------------------------


class Most(NamedTuple):
    """The largest figures of a layout's pipeline ranks and stages: parameters of a rank, and
    seconds of a stage's forward and backward; and whether a second rank has a copy of the
    vocabulary's matrix.
    """

    parameters: Column
    forward: Column
    backward: Column
    tied: Column


def step_parts(job: Job) -> dict[str, float]:
    """Seconds of what follows the last backward: reduce, tied, optimizer, and a fixed rest."""
    specs, passes = stage_specs(job.model, job.layout), stage_passes(job)
    own = memory_terms.held_parameters(job, memory_terms.Parts.of(specs))
    of_rank = np.bincount([spec.rank for spec in specs], np.broadcast_to(own, len(specs)))
    slowest = [max(each) for each in zip(*passes, strict=True)]
    parts = after_pipeline(job, Most(max(of_rank), slowest[0], slowest[1], specs[0].tied))
    return {name: float(seconds) for name, seconds in parts.items()}


def after_pipeline(job: Job, most: Most) -> dict[str, Column]:
    """Return what `step_parts` does, for one layout or for columns."""
    layout, held = job.layout, most.parameters
    blocks = -(-job.model.layers // layout.pp)
    experts = blocks * job.expert_parameters / layout.tp
    shard = memory_terms.sharded_parameters(job, held, blocks)
    terms = time_terms.after_terms(job, held, shard, most.tied)
    return terms | {"reduce": terms["reduce"] + _exposed(job, most, experts)}


def _exposed(job: Job, most: Most, experts: Column) -> Column:
    """Seconds of a step's gradient and parameter traffic that no computation hides.

    experts: parameters of experts on a GPU, which fewer ranks share.
    """
    layout, overlap = job.layout, job.machine.software.overlap_passes
    gather = time_terms.gather_seconds(job, most.parameters - experts, experts)
    reduce = time_terms.reduce_seconds(job, most.parameters - experts, experts)
    waits = np.equal(layout.overlap_param_gather, False)
    forward = np.where(waits, 0.0, overlap * most.forward)  # behind which the gather hides
    backward = overlap * most.backward
    # The traffic of the last block of a stage, which nothing hides, as a share.
    tail = 1 / np.maximum(1, job.model.layers // (layout.pp * layout.stages_per_rank))
    gathered = np.where(layout.zero > 0, np.maximum(gather - forward, gather * tail), 0.0)
    # At --zero 3 the weights are gathered once more in backward, all for each micro-batch.
    again = np.where(layout.zero == 3, gather, 0.0)
    reduced = np.maximum(again + reduce - backward, reduce * tail)
    gathers = np.where(layout.zero == 3, job.micro_batches, 1)
    reductions = np.where(layout.zero >= 2, job.micro_batches, 1)
    return gathers * gathered + reductions * reduced
