"""How long a step takes and what it needs, for one layout on one machine: no torch, no GPU.

    prediction = predict(model, layout, training, load("a100-80"))

A step is the pipeline's time (the schedule that is executed, simulated with the stages' seconds),
then the gradient reduction, the tied embedding, the optimizer, the parameter gather. Its terms are
in planner/time_terms.py; here they are put together.

The formulas take one layout, or many as columns (planner/job.py); what builds a schedule takes one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from config.model_stats import model_flops
from config.schema import Layout, ModelShape, Training
from planner import hardware, memory, memory_terms, risk, time_terms
from planner.hardware import Machine
from planner.job import Column, Job, mean_of_kinds, term
from planner.op_costs import Pass
from schedules.long_schedule import long_layout, long_schedule
from schedules.orders import stage_costs
from schedules.partition import StageCosts, executed_flops, stage_specs

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


def with_networks(prediction: Prediction, job: Job) -> Prediction:
    """The prediction of a job with the seconds at slower networks, if its own was not measured."""
    if job.machine.network_measured or job.gpus <= job.machine.node:
        return prediction
    slower = []
    for share in NETWORK_SHARES:
        machine = hardware.at_share_of_network(job.machine, share)
        at_share = job._replace(machine=machine)
        after = sum(step_parts(at_share).values())
        slower.append(job.machine.slowdown * (pipeline_time(at_share)[0] + after))
    found = tuple(prediction.seconds * seconds / slower[0] for seconds in slower)
    low, high = prediction.interval
    return replace(prediction, interval=(low, high * found[-1] / found[0]), at_networks=found)


# ---- One micro-batch through one part ------------------------------------------------------------


def passes_of(job: Job) -> Passes:
    """Seconds of one micro-batch through the parts of a model."""
    return Passes(*block_passes(job), time_terms.embedding(job), time_terms.head(job))


def block_pass(job: Job) -> Pass:
    """Seconds of one micro-batch through a block that is recomputed as the layout says."""
    return block_passes(job)[1]


def block_passes(job: Job) -> tuple[Pass, Pass]:
    """Seconds of one micro-batch through a block that is not recomputed, and through one that is,
    as the layout says.
    """
    plain, redone = _both_passes(job)
    return plain, redone


@mean_of_kinds
def _both_passes(job: Job) -> Pass:
    """Return the passes of `block_passes` as a pair: no less than the host takes to launch them."""
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
    passes = stage_passes(job)
    if not layout.vocab_pp:
        seconds = schedule_seconds(job, passes, sent)
    busy = count * sum(map(sum, passes)) / layout.pp
    if layout.vocab_pp:
        own = vocabulary_seconds(job)
        actions = action_seconds(passes) | own
        seconds = long_layout(job.model, layout, count).makespan(actions, sent)
        # For a micro-batch a rank's link carries two messages of its stage, and those of E, S, T,
        # G.
        seconds = max(seconds, count * 6 * sent)
        busy += count * sum(own.values()) / layout.pp
    if machine.ranks_per_core > 1:  # the core of an idle stage serves the others
        seconds = max(seconds / machine.ranks_per_core, busy)
    return seconds, max(0.0, 1.0 - busy / seconds)  # not below 0 by rounding


@term
def schedule_seconds(job: Job, passes: tuple[Pass, ...], sent: float) -> float:
    """Seconds of the layout's schedule; its arguments as those of `pipeline_time`."""
    layout = job.layout
    weights = tuple(stage_weights(job)) if layout.splits_backward else None
    costs = stage_costs(job.model, layout)
    count, virtual = job.micro_batches, layout.stages_per_rank
    return makespan(layout.schedule, passes, sent, count, virtual, weights, costs)


@lru_cache(maxsize=4096)
def makespan(
    name: str,
    passes: tuple[Pass, ...],
    transfer: float,
    count: int,
    virtual: int = 1,
    weights: tuple[float, ...] | None = None,
    costs: StageCosts | None = None,
) -> float:
    """Seconds of the schedule `name` with `virtual` stages on each rank and `count` micro-batches.

    weights: as in `action_seconds`. costs: what its order was searched with. Cached, since layouts
    that differ in ZeRO alone, for example, ask for the same.
    """
    schedule = long_schedule(name, len(passes) // virtual, count, virtual, costs)
    seconds = action_seconds(passes, weights)
    return schedule.makespan(seconds, transfer)


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
    """Return what `action_seconds` does, for the passes for a vocabulary that all ranks share."""
    front, back = time_terms.embedding(job), time_terms.head(job)
    each = {"E": front.forward, "S": back.forward, "T": back.backward, "G": front.backward}
    return {(kind, s): float(one) for kind, one in each.items() for s in range(job.layout.pp)}


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
