"""Measures one rank of every pipeline stage on the device here, and composes the step of the world.

    stages = measured(config, world, per_node=8, device="cpu")      # a process each, in turn
    composed(schedule, [priced(s, links.seconds, 1) for s in stages], transfer=1e-4).seconds

A stage's own computation runs for real, on stand-ins of the other ranks; the links say what its
collectives take. The schedule that is executed is simulated with both.
"""

import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import data
import trainer
from config.schema import Config
from distributed.placement import allowed_cores, physical_cores
from emulator.rehearsal import shortened, stages_of
from emulator.stand_ins import EmulatedContext, Operation, emulated_context
from pipeline import Execution
from schedules.schedule import Schedule
from schedules.simulation import simulate
from telemetry import step_stats

WARM_UP, STEPS = 2, 5
AFTER = "after"  # what follows the last action of a step


@dataclass
class StageMeasured:
    """One rank of a stage. seconds: of its own computation, median by kind of action, or AFTER;
    operations: of the last one of that kind; bytes: the most held, beyond those of the start.
    """

    stage: int
    rank: int
    device: str
    threads: int
    seconds: dict[str, float] = field(default_factory=dict)
    operations: dict[str, list[Operation]] = field(default_factory=dict)
    bytes: float = 0.0


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a stage. actions: by kind, with their collectives, and `crossing` these alone;
    after: the update. reduce, buckets: over the replicas, in so many operations.
    """

    actions: dict[str, float]
    crossing: dict[str, float]
    after: float
    reduce: float = 0.0
    buckets: int = 1
    others: float = 0.0  # collectives of the update: norm, tied weights
    gather: float = 0.0


@dataclass(frozen=True)
class Step:
    """A step of the world: seconds in all and by part."""

    seconds: float
    parts: dict[str, float]


# ---- Measuring -----------------------------------------------------------------------------------


def measured(
    config: Config,
    world: int,
    per_node: int,
    device: str,
    show: Callable[[int], None] = lambda done: None,
) -> list[StageMeasured]:
    """The first rank of every stage, each in a process of its own, one after the other.

    show: is told how many stages are measured, whenever one is. Raises what the trainer raises.
    """
    jobs = [(config, world, ranks[0], per_node, device) for ranks in stages_of(config)]
    # Spawned: neither CUDA nor autograd's threads survive a fork.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        stages: list[StageMeasured] = []
        for job in jobs:
            stages.append(pool.apply(measure_rank, job))
            show(len(stages))
        return stages


def measure_rank(
    config: Config, world: int, rank: int, per_node: int, device: str
) -> StageMeasured:
    """Train a few steps as that rank, with as many micro-batches as reach the steady state."""
    config = shortened(config)
    cores = len(physical_cores(allowed_cores()))
    torch.set_num_threads(min(torch.get_num_threads(), max(1, cores // per_node)))
    context = emulated_context(world, rank, torch.device(device))
    before = step_stats.measure(context.device, 0.0).peak
    state = trainer.build(config, context)
    name = torch.cuda.get_device_name() if device == "cuda" else f"{cores} CPU cores"
    found = StageMeasured(state.factory.mesh.pp.rank, rank, name, torch.get_num_threads())
    samples = data.Synthetic(config.model.vocab_size, config.model.seq_length, 0)
    seconds: dict[str, list[float]] = defaultdict(list)
    for step in range(WARM_UP + STEPS):
        for kind, own, operations in _step(state, samples, context):
            seconds[kind] += [own] if step >= WARM_UP else []
            found.operations[kind] = operations
    found.seconds = {kind: statistics.median(own) for kind, own in seconds.items()}
    found.bytes = step_stats.measure(context.device, 0.0).peak - before
    return found


def _step(
    state: trainer.TrainState, samples: data.Samples, context: EmulatedContext
) -> list[tuple[str, float, list[Operation]]]:
    """trainer.step action by action: kind, seconds without the stand-ins', operations.

    The learning rate is 0: the weights stay as drawn, whatever the stand-ins give.
    """
    laps, began = [], time.perf_counter()

    def lap(kind: str) -> None:
        nonlocal began
        own = step_stats.seconds_since(began, context.device, context.recorder)
        operations, apart = context.ledger.take()
        laps.append((kind, own - apart, operations))
        began = time.perf_counter()

    config, size = state.config, state.config.batches.batch(0)
    micro_batches, targets = config.micro_batches(size), size * config.model.seq_length
    batches = state.reader.batches(samples, 0, config)
    loss_weight = state.optimizer.begin_step(targets, micro_batches)
    schedule = state.pipeline.schedule(micro_batches)
    execution = Execution(state.pipeline, schedule, batches, loss_weight)
    for action in execution:
        lap(action.kind)
    state.optimizer.step(0.0, execution.loss)
    lap(AFTER)
    return laps


# ---- Composing -----------------------------------------------------------------------------------


def priced(stage: StageMeasured, price: Callable[[Operation], float], rounds: int) -> StageSeconds:
    """A measured stage with its collectives; rounds: how often a step reduces over the replicas."""
    sums: dict[str, list[float]] = defaultdict(list)
    for kind, operations in stage.operations.items():
        for each in operations:
            sums[_part(each, kind)].append(price(each))
    crossing = {kind: sum(sums[kind]) for kind in stage.seconds if kind != AFTER}
    actions = {kind: stage.seconds[kind] + own for kind, own in crossing.items()}
    reduce, after = sums["reduce"] * rounds, stage.seconds[AFTER]
    rest = (sum(reduce), len(reduce), sum(sums[AFTER]), sum(sums["gather"]))
    return StageSeconds(actions, crossing, after, *rest)


def _part(operation: Operation, kind: str) -> str:
    """Which part of a step an operation belongs to: the action's own kind if it is part of that."""
    if operation.role in ("dp", "replicas"):
        return "gather" if operation.kind == "all_gather" else "reduce"
    # The schedule prices messages between stages.
    return "message" if operation.kind in ("send", "receive") else kind


def composed(
    schedule: Schedule,
    stages: list[StageSeconds],
    transfer: float,
    hides: bool = False,
    overlap: bool = False,
) -> Step:
    """The step of the world.

    transfer: seconds of a message between stages. hides: whether the device computes while it
    communicates: then reductions but that of the last bucket hide behind the last backward, and
    with `overlap` weights are gathered behind the next step's first forward.
    """
    seconds = {(kind, s): own for s, one in enumerate(stages) for kind, own in one.actions.items()}
    ends = [row[-1].end for row in simulate(schedule, seconds, transfer)]
    reduced, gathered = [one.reduce for one in stages], [one.gather for one in stages]
    if hides:
        behind = [one.actions["B"] - one.crossing["B"] for one in stages]
        last = [one.reduce / max(1, one.buckets) for one in stages]
        reduced = [max(one, own - b) for one, own, b in zip(last, reduced, behind)]
    if hides and overlap:
        gathered = [max(0.0, one.gather - one.actions["F"]) for one in stages]
    met = max(end + more for end, more in zip(ends, reduced))
    update = max(one.after + more for one, more in zip(stages, gathered))
    parts = {"pipeline": max(ends), "reduce": met - max(ends)}
    parts["norm, tied"] = max(one.others for one in stages)
    parts["optimizer"] = max(one.after for one in stages)
    parts["gather"] = update - parts["optimizer"]
    return Step(sum(parts.values()), parts)
