"""Predicts the time and memory of a training step, for one layout on one machine: no torch, no GPU.

    prediction = predict(Job(model, layout, training, load("a100-80")))

A step is the pipeline's time (the schedule that is executed, simulated with the stages' seconds),
then the gradient reduction, the tied embedding, the optimizer, the parameter gather. Its terms are
in costs/time_terms.py; here they are put together.

A `Job` has a model, a layout, the training options and a machine. Functions whose values are
`Column` take one layout, or many as columns (costs/job.py); functions that build a schedule take
one layout. A `Pass` is the seconds of a forward and of a backward pass; `Passes` has a `Pass` for a
block, a recomputed block, the embedding and the head.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from architecture.model_stats import model_flops
from costs import distances, hardware, memory, memory_terms, risk, time_terms
from costs.job import Column, Job, mean_of_kinds, term
from costs.memory_terms import Parts
from costs.op_costs import Pass
from costs.partition_costs import specs_of
from schedules.actions import Seconds
from schedules.long_schedule import LongSchedule, long_layout

# If the network's rate was not measured, a step is predicted with each of these shares of the
# datasheet's rate. Reductions over many nodes have been measured at all of it to a quarter. If the
# logarithm of the share is anywhere between with equal probability, four of five networks have more
# than the last share here, at which layouts are compared.
NETWORK_SHARES = (1.0, 1 / 3)


class Passes(NamedTuple):
    """Seconds of one micro-batch's passes through the parts of a model.

    block: a block that is not recomputed. redone: a block that is recomputed in its backward pass.
    """

    block: Pass
    redone: Pass
    embedding: Pass
    head: Pass


@dataclass(frozen=True)
class Prediction:
    """The prediction for a layout: time in seconds per step, memory in bytes."""

    seconds: float
    interval: tuple[float, float]  # the step is expected between these seconds in 90 of 100 runs
    quantile: float  # and within these in 80 of 100 (risk.BET), by which layouts are ranked
    risk: float  # the probability of running out of memory
    # Seconds by part. The parts pipeline, reduce, tied, optimizer and fixed are a step together;
    # bubble is the idle time in pipeline.
    parts: dict[str, float]
    bubble: float  # share of the pipeline's time in which a stage is idle, on average
    memory: list[memory.StageMemory]
    fits: bool
    margin: float  # bytes free on the fullest stage's GPU, negative if it does not fit
    tokens_per_second: float
    model_tflops: float  # TFLOPs per GPU by the formula megatron-2025, without recomputation
    mfu: float
    warnings: list[str]
    far: list[str]  # what of the layout is far from measured runs, and widens the interval above
    # Seconds of a step at each of NETWORK_SHARES, or empty. They are filled in by `with_networks`
    # if several nodes exchange data and the network's rate was not measured.
    at_networks: tuple[float, ...] = ()


def predict(job: Job, stages: list[memory.StageMemory] | None = None) -> Prediction:
    """Return the predicted time and memory of a job's layout; its dp must be a number.

    stages: the result of `memory.stages`, if it is known.
    Raise UserError if the batch is smaller than one micro-batch on every replica.
    """
    machine = job.machine
    model = job.model
    parts, bubble = _parts_of_step(job)
    seconds = sum(parts.values())
    parts["bubble"] = parts["pipeline"] * bubble
    table = stages or memory.stages(job)
    margin = machine.memory - max(stage.total for stage in table)
    samples = job.training.global_batch_size
    per_gpu = seconds * job.gpus  # the GPU-seconds of a step
    flops = model_flops(model, samples)
    block = float(layout_passes(job).block.forward)
    return Prediction(
        seconds=seconds,
        interval=risk.interval(job, seconds, block),
        quantile=float(risk.quantile(job, seconds, block)),
        risk=risk.out_of_memory(machine, machine.memory - margin),
        parts=parts,
        bubble=bubble,
        memory=table,
        fits=margin >= 0,
        margin=margin,
        tokens_per_second=samples * model.seq_length / seconds,
        model_tflops=flops / (per_gpu * 1e12),
        mfu=flops / (per_gpu * machine.peak),
        warnings=job.warnings,
        far=distances.reasons(job, block, seconds),
    )


def _parts_of_step(job: Job) -> tuple[dict[str, float], float]:
    """Return the seconds of a step by part, and the idle share of the pipeline (0 to 1).

    The parts are pipeline, reduce, tied, optimizer and fixed. A known defect of the machine makes
    all of them longer (`slowdown`).
    """
    pipeline, bubble = pipeline_time(job)
    parts = {"pipeline": pipeline} | step_parts(job)
    slowed = {name: seconds * job.machine.slowdown for name, seconds in parts.items()}
    return slowed, bubble


def with_networks(
    prediction: Prediction, job: Job, slowest: Prediction | None = None
) -> Prediction:
    """Return the prediction, widened for a network whose rate was not measured on the cluster.

    The seconds of a step at each of NETWORK_SHARES are added (`at_networks`); the interval's upper
    end and the quantile are those at the slowest network. The prediction is returned as it is if
    the network was measured, or if all GPUs are in one node. slowest: the prediction at the last
    of NETWORK_SHARES, if it is known.
    """
    if job.machine.network_measured or job.gpus <= job.machine.node:
        return prediction
    if slowest is None:
        machine = hardware.at_share_of_network(job.machine, NETWORK_SHARES[-1])
        slowest = predict(job._replace(machine=machine), prediction.memory)
    return replace(
        prediction,
        interval=(prediction.interval[0], slowest.interval[1]),
        quantile=slowest.quantile,
        at_networks=(prediction.seconds, slowest.seconds),
    )


def at_other_network(prediction: Prediction, job: Job, machine: hardware.Machine) -> float:
    """Return about the seconds of a step with another network, without a second simulation.

    The pipeline takes longer by the ratio of its slowest stage's passes and of the messages that
    fill and empty it; what follows the last backward is computed. prediction: that of the job.
    machine: the job's, with the other network.
    """

    def pipeline(one: Job) -> float:
        slowest = max(map(sum, stage_passes(one)))
        messages = 2 * (one.layout.pp - 1) * float(time_terms.message_seconds(one))
        return one.micro_batches * slowest + messages

    other = job._replace(machine=machine)
    pipelines = prediction.parts["pipeline"] * pipeline(other) / pipeline(job)
    return pipelines + sum(step_parts(other).values()) * machine.slowdown


# ---- One micro-batch through one part ------------------------------------------------------------


def passes_of(job: Job) -> Passes:
    """Return the seconds of one micro-batch through a block, the embedding and the head.

    Of `block_passes`, the field `forward` is for a block that is not recomputed, and `backward` for
    a block with the layout's --recompute.
    """
    blocks = block_passes(job)
    embedding = time_terms.embedding(job)
    head = time_terms.head(job)
    return Passes(blocks.forward, blocks.backward, embedding, head)


@lru_cache(maxsize=4096)  # a prediction asks for them twice
def layout_passes(job: Job) -> Passes:
    """Return the result of `passes_of` for one layout."""
    return passes_of(job)


def block_pass(job: Job) -> Pass:
    """Return the seconds of one micro-batch through a block with the layout's --recompute."""
    return block_passes(job).backward


@mean_of_kinds
def block_passes(job: Job) -> Pass:
    """Return the seconds of one micro-batch through a block: without and with recomputation.

    The result is a `Pass` of two `Pass`, because `mean_of_kinds` can add and multiply a `Pass`, but
    no tuple: its field `forward` is for a block that is not recomputed, `backward` for a block with
    the layout's --recompute. No pass is shorter than the host takes to launch its operations.
    """
    computed = time_terms.block_seconds(job)
    is_full = np.equal(job.layout.recompute, "full")
    is_selective = np.equal(job.layout.recompute, "selective")
    attention_again = time_terms.selective_seconds(job, computed.forward)
    again = np.where(is_full, computed.forward, 0.0)
    again = np.where(is_selective, attention_again, again)
    software = job.machine.software
    launched = software.host_per_operation * time_terms.operations(job)
    launched = launched + software.host_of_block / 3  # a backward has about two thirds of it
    forward = np.maximum(computed.forward, launched)
    backward = np.maximum(computed.backward, 2 * launched)  # it has about twice the operations
    recomputed_backward = np.maximum(computed.backward + again, 2 * launched)
    return Pass(Pass(forward, backward), Pass(forward, recomputed_backward))


# ---- The pipeline --------------------------------------------------------------------------------


@lru_cache(maxsize=4096)  # several parts of a step are computed from them
def stage_passes(job: Job) -> tuple[Pass, ...]:
    """Return the seconds of one micro-batch through each stage of the layout."""
    layout = job.layout
    specs = specs_of(job)
    redone = np.array([layout.recomputed_blocks(spec.blocks, spec.index) for spec in specs])
    stages = through(layout_passes(job), Parts.of(specs), redone)
    return tuple(map(Pass, stages.forward.tolist(), stages.backward.tolist()))


def through(passes: Passes, parts: Parts, redone: Column) -> Pass:
    """Return the seconds of one micro-batch through the parts of a model that a stage holds.

    redone: the number of recomputed blocks.
    """
    blocks = passes.block * (parts.blocks - redone) + passes.redone * redone
    return blocks + passes.embedding * parts.embedding + passes.head * parts.head


def pipeline_time(
    job: Job, sent: float | None = None, actions: Seconds | None = None
) -> tuple[float, float]:
    """Return the seconds from the first forward to the last backward, and the stages' idle share.

    sent: seconds of a message between stages; None: `time_terms.message_seconds`. actions: seconds
    by kind of action and stage; None: `action_seconds`.
    """
    layout = job.layout
    machine = job.machine
    count = job.micro_batches
    if sent is None:
        sent = float(time_terms.message_seconds(job))
    if actions is None:
        actions = action_seconds(job)
    seconds = schedule_seconds(job, actions, sent)
    busy = count * sum(actions.values()) / layout.pp
    if machine.ranks_per_core > 1:
        # Several ranks share a core, and an action's seconds hold while all of them compute. If
        # only one computes, it is faster by ranks_per_core; so the step takes at least the
        # simulated seconds divided by this number, and at least the mean work of a rank.
        seconds = max(seconds / machine.ranks_per_core, busy)
    idle_share = max(0.0, 1.0 - busy / seconds)  # without the maximum, rounding may give -1e-16
    return seconds, idle_share


@term
def schedule_seconds(job: Job, actions: Seconds, sent: float) -> float:
    """Return the simulated seconds of the layout's schedule for one step.

    actions: seconds by kind of action and stage. sent: seconds of a message between stages.
    """
    order = long_layout(job.layout, job.micro_batches)
    return _makespan(order, tuple(actions.items()), sent)


@lru_cache(maxsize=4096)
def _makespan(
    order: LongSchedule, actions: tuple[tuple[tuple[str, int], float], ...], sent: float
) -> float:
    """Return the seconds of a schedule; `actions` are pairs of (kind, stage) and seconds.

    The result is cached, because layouts that differ only in ZeRO have the same schedule.
    """
    return order.makespan(dict(actions), sent)


def action_seconds(job: Job) -> Seconds:
    """Return the seconds of one micro-batch's actions, by (kind of action, stage).

    The kinds are F (forward), B (backward) and, if the schedule splits the backward, W (gradients
    of weights).
    """
    layout = job.layout
    seconds: dict[tuple[str, int], float] = {}
    for stage, passes in enumerate(stage_passes(job)):
        seconds["F", stage] = passes.forward
        seconds["B", stage] = passes.backward
    if layout.splits_backward:  # the weights' gradients are no longer a part of B
        for stage, weights in enumerate(stage_weights(job)):
            seconds["B", stage] -= weights
            seconds["W", stage] = weights
    return seconds


def stage_weights(job: Job) -> list[float]:
    """Return the seconds of one micro-batch's weight gradients in each stage, which W computes.

    W is the second part of a backward pass that the schedule splits. If a stage has both embedding
    and head with one shared matrix, the first part (B) computes this matrix's gradient, not W.
    """
    block = time_terms.block_weights(job)
    head = time_terms.head_weights(job)
    weights = []
    for spec in specs_of(job):
        has_head_matrix = spec.head and (spec.tied or not job.model.tied)
        weights.append(float(spec.blocks * block + has_head_matrix * head))
    return weights


# ---- After the pipeline --------------------------------------------------------------------------


class Most(NamedTuple):
    """The largest figures of a layout's pipeline ranks and stages.

    parameters: the parameters on a GPU of the fullest rank. forward, backward: seconds of one
    micro-batch through the slowest stage. tied: whether a second rank has a copy of the matrix that
    embedding and head share.
    """

    parameters: Column
    forward: Column
    backward: Column
    tied: Column


def step_parts(job: Job) -> dict[str, float]:
    """Return the seconds of a step after the last backward, for one layout, by part.

    The parts are reduce (gradients between replicas), tied (the matrix that embedding and head
    share), optimizer, and fixed.
    """
    specs = specs_of(job)
    passes = stage_passes(job)
    # The parameters of a rank are the sum over its stages; the fullest rank counts.
    stage_parameters = memory_terms.held_parameters(job, Parts.of(specs))
    ranks = [spec.rank for spec in specs]
    rank_parameters = np.bincount(ranks, np.broadcast_to(stage_parameters, len(specs)))
    slowest_forward = max(stage.forward for stage in passes)
    slowest_backward = max(stage.backward for stage in passes)
    most = Most(max(rank_parameters), slowest_forward, slowest_backward, specs[0].tied)
    return {name: float(seconds) for name, seconds in after_pipeline(job, most).items()}


def after_pipeline(job: Job, most: Most) -> dict[str, Column]:
    """Return the seconds after the last backward by part, as numbers or as columns.

    The parts are reduce, tied, optimizer and fixed. most: the parameters of the fullest rank and
    the seconds of the slowest stage. Called with columns by the closed form of many layouts.
    """
    layout = job.layout
    held = most.parameters
    blocks = -(-job.model.layers // layout.pp)  # the blocks of the fullest rank
    experts = blocks * job.expert_parameters / layout.tp
    shard = memory_terms.sharded_parameters(job, held, blocks)
    terms = time_terms.after_terms(job, held, shard, most.tied)
    return terms | {"reduce": terms["reduce"] + _exposed(job, most, experts)}


def _exposed(job: Job, most: Most, experts: Column) -> Column:
    """Return the seconds of a step's gradient and parameter traffic that no computation hides.

    The gather of parameters runs beside the next forward, the reduction of gradients beside the
    last backward; each pass hides at most the share `overlap_passes` of its seconds.
    experts: the expert parameters on a GPU, which fewer ranks hold than other parameters.
    """
    layout = job.layout
    overlap = job.machine.software.overlap_passes
    gather = time_terms.gather_seconds(job, most.parameters - experts, experts)
    reduce = time_terms.reduce_seconds(job, most.parameters - experts, experts)
    no_overlap = np.equal(layout.overlap_param_gather, False)
    forward_hides = np.where(no_overlap, 0.0, overlap * most.forward)
    backward_hides = overlap * most.backward
    # The gradients of a stage's last block are reduced when nothing is left to compute, so at least
    # this share of the traffic is not hidden.
    exposed_share = 1 / np.maximum(1, job.model.layers // (layout.pp * layout.stages_per_rank))
    exposed_gather = np.maximum(gather - forward_hides, gather * exposed_share)
    exposed_gather = np.where(layout.zero > 0, exposed_gather, 0.0)
    # At --zero 3 each micro-batch gathers the weights twice: in its forward and, unless they are
    # kept, in its backward, where the reduction of gradients needs the same links.
    gathers_again = np.equal(layout.zero, 3) & layout.reshard_after_forward
    gather_in_backward = np.where(gathers_again, gather, 0.0)
    in_backward = gather_in_backward + reduce
    exposed_reduce = np.maximum(in_backward - backward_hides, reduce * exposed_share)
    only_gathers = np.maximum(gather_in_backward - backward_hides, 0.0)  # in a backward pass
    # At --zero 3 every micro-batch gathers. From --zero 2 on every micro-batch reduces, unless
    # gradients are summed first.
    gathers = np.where(layout.zero == 3, job.micro_batches, 1)
    reductions = np.where(job.reduces_once, 1, job.micro_batches)
    others = np.where(layout.zero == 3, job.micro_batches - reductions, 0)
    return gathers * exposed_gather + reductions * exposed_reduce + others * only_gathers
