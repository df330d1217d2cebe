"""Measures one rank of every pipeline stage on the device here, and composes the step of the world.

    stages = measured(config, world, per_node=8, device="cpu")     # a process each, in turn
    emulated(config, stages, schedule, links, hides=False).seconds  # of a step of the world

A stage's own computation runs for real, on stand-ins of the other ranks; the links say what its
collectives take. The schedule that is executed is simulated with both.
"""

import multiprocessing
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch

import data
import trainer
from config.schema import Config
from distributed.placement import allowed_cores, physical_cores
from emulator.links import Links
from emulator.stand_ins import EmulatedContext, Operation, emulated_context
from pipeline import Execution
from schedules.schedule import Schedule
from schedules.simulation import simulate
from telemetry import step_stats

WARM_UP, STEPS = 2, 5
REPLICAS = ("dp", "replicas")
AFTER = "after"  # what follows the last action of a step


@dataclass
class StageMeasured:
    """One rank of a stage. seconds: of its own computation, median by kind of action or AFTER;
    operations: of one action of that kind, and of the last one with the reduction; bytes: the
    largest number held, beyond what the process had before.
    """

    stage: int
    rank: int
    device: str  # its name
    device_type: str
    threads: int
    seconds: dict[str, float] = field(default_factory=dict)
    operations: dict[str, list[Operation]] = field(default_factory=dict)
    bytes: float = 0.0


@dataclass(frozen=True)
class StageSeconds:
    """What composes a step: seconds of a stage's actions with their collectives, of these alone,
    and of what follows: reduction over the replicas, the rest's collectives, update, gathering.
    """

    actions: dict[str, float]
    crossing: dict[str, float]
    reduce: float
    buckets: int
    others: float
    optimizer: float
    gather: float


@dataclass(frozen=True)
class Step:
    """A step of the world: seconds in all, by part, and of every stage."""

    seconds: float
    parts: dict[str, float]
    stages: list[StageSeconds]


# ---- Measuring -----------------------------------------------------------------------------------


def measured(config: Config, world: int, per_node: int, device: str) -> list[StageMeasured]:
    """The first rank of every stage, each in a process of its own, one after the other.

    Raises what the trainer raises.
    """
    first = config.layout.tp * config.layout.dp
    jobs = [(config, world, stage * first, per_node, device) for stage in range(config.layout.pp)]
    # Spawned: neither CUDA nor autograd's threads survive a fork.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return pool.starmap(measure_rank, jobs, chunksize=1)


def measure_rank(
    config: Config, world: int, rank: int, per_node: int, device: str
) -> StageMeasured:
    """Train a few steps as that rank, and take the medians."""
    cores = len(physical_cores(allowed_cores()))
    torch.set_num_threads(min(torch.get_num_threads(), max(1, cores // per_node)))
    context = emulated_context(world, rank, torch.device(device))
    name = torch.cuda.get_device_name() if device == "cuda" else f"{cores} CPU cores"
    before = step_stats.measure(context.device, 0.0).peak
    state = trainer.build(config, context)
    stage = state.factory.mesh.pp.rank
    found = StageMeasured(stage, rank, name, device, torch.get_num_threads())
    samples = data.Synthetic(config.model.vocab_size, config.model.seq_length, 0)
    seconds: dict[str, list[float]] = defaultdict(list)
    for step in range(WARM_UP + STEPS):
        context.recorder.begin_step(step + 1)
        laps = _step(state, samples, context)
        context.recorder.end_step()
        for name, own, operations in laps:
            if step >= WARM_UP:
                seconds[name].append(own)
            found.operations[name] = operations  # of the last action of its kind
    found.seconds = {name: statistics.median(own) for name, own in seconds.items()}
    found.bytes = step_stats.measure(context.device, 0.0).peak - before
    return found


def _step(
    state: trainer.TrainState, samples: data.Samples, context: EmulatedContext
) -> list[tuple[str, float, list[Operation]]]:
    """trainer.step action by action: name, seconds without the stand-ins', operations.

    The learning rate is 0: the weights stay as drawn, whatever the stand-ins give.
    """
    config, factory, laps = state.config, state.factory, []
    began = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        end = began + step_stats.seconds_since(began, context.device, context.recorder)
        operations, apart = context.ledger.take()
        laps.append((name, end - began - apart, operations))
        began = time.perf_counter()

    size = config.batches.batch(0)
    micro_batches, targets = config.micro_batches(size), size * config.model.seq_length
    batches = data.batches(samples, 0, config.layout, factory.mesh.dp.rank, factory.device)
    loss_weight = state.optimizer.begin_step(targets, micro_batches)
    schedule = state.pipeline.schedule(micro_batches)
    execution = Execution(state.pipeline, schedule, batches, loss_weight)
    for action in execution:
        lap(action.kind)
    state.optimizer.step(0.0, execution.loss)
    lap(AFTER)
    return laps


# ---- Composing -----------------------------------------------------------------------------------


def priced(stage: StageMeasured, links: Links, rounds: int) -> StageSeconds:
    """A measured stage with its collectives priced; rounds: how often replicas reduce in a step."""
    actions, crossing = {}, {}
    sums: Counter[str] = Counter()
    buckets = 0
    for name, operations in stage.operations.items():
        for each in operations:
            part = _part(each, name)
            buckets += part == "reduce"
            sums[part] += links.seconds(each)
        if name != AFTER:
            crossing[name] = sums.pop("crossing", 0.0)
            actions[name] = stage.seconds[name] + crossing[name]
    after = (sums["others"], stage.seconds[AFTER], sums["gather"])
    return StageSeconds(actions, crossing, sums["reduce"] * rounds, buckets * rounds, *after)


def _part(operation: Operation, name: str) -> str:
    """Which of a step's parts an operation in an action, or AFTER, belongs to."""
    if operation.role in REPLICAS:
        return "gather" if operation.kind == "all_gather" else "reduce"
    if operation.role in ("forward", "backward"):
        return "messages"
    return "others" if name == AFTER else "crossing"


def composed(
    schedule: Schedule, stages: list[StageSeconds], transfer: float, hides: bool, overlap: bool
) -> Step:
    """The step of the world.

    transfer: seconds of a message between stages. hides: whether the device computes while it
    communicates; then reductions but that of the last bucket hide behind the last backward.
    overlap: whether weights are gathered behind the next step's first forward.
    """
    seconds = {(kind, s): own for s, one in enumerate(stages) for kind, own in one.actions.items()}
    ends = [row[-1].end for row in simulate(schedule, seconds, transfer)]
    reduced = [_exposed_reduction(one) if hides else one.reduce for one in stages]
    meet = max(end + more for end, more in zip(ends, reduced))
    others = max(one.others for one in stages)
    hidden = [one.actions["F"] if hides and overlap else 0.0 for one in stages]
    gather = [max(0.0, one.gather - under) for one, under in zip(stages, hidden)]
    update = max(one.optimizer + more for one, more in zip(stages, gather))
    parts = {"pipeline": max(ends), "reduce": meet - max(ends), "norm, tied": others}
    parts |= {"optimizer": max(one.optimizer for one in stages)}
    parts |= {"gather": update - parts["optimizer"]}
    return Step(meet + others + update, parts, stages)


def _exposed_reduction(stage: StageSeconds) -> float:
    """What of a reduction is left after the last backward: at least that of the last bucket."""
    last = stage.reduce / max(1, stage.buckets)
    return max(last, stage.reduce - (stage.actions["B"] - stage.crossing["B"]))


def emulated(
    config: Config, stages: list[StageMeasured], schedule: Schedule, links: Links, hides: bool
) -> Step:
    """The step of what was measured."""
    backwards = sum(action.kind == "B" for action in schedule.ranks[0])
    rounds = backwards if config.layout.zero == 2 else 1
    messages = [
        links.seconds(each)
        for stage in stages
        for operations in stage.operations.values()
        for each in operations
        if each.kind == "send"
    ]
    own = [priced(stage, links, rounds) for stage in stages]
    overlap = config.layout.overlap_param_gather
    return composed(schedule, own, max(messages, default=0.0), hides, overlap)
