"""Measures one rank of every pipeline stage on the device here, and composes the step of the world.

    stages = measured(config, world, per_node=8, device="cpu")      # a process each, in turn
    answer = report(config, world, machine, stages, links.seconds)  # beside the planner's step
    print(answer.text)

A stage's own computation runs for real, in the trainer's own step, on stand-ins of the other ranks;
the links say what its collectives take. The schedule that is executed is simulated with both.
"""

import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import data
import trainer
from config.model_stats import model_flops
from config.schema import Config
from distributed.placement import allowed_cores, physical_cores
from emulator.answers import Answers
from emulator.recording import EmulatedContext, Operation, emulated_context
from emulator.rehearsal import shortened, stages_of
from planner import memory, step_time
from planner.hardware import Machine
from planner.job import Job
from schedules.orders import build
from schedules.schedule import Schedule
from schedules.simulation import simulate
from telemetry import step_stats

WARM_UP = 2
STEPS = 5
AFTER = "after"  # what follows the last action of a step
TITLES = {"seconds": "seconds per step", "tokens_per_second": "tokens/s", "mfu": "MFU"}


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


class _Laps:
    """Seconds and operations from one call of `lap` to the next, by name."""

    def __init__(self, context: EmulatedContext):
        self.context = context
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.operations: dict[str, list[Operation]] = {}
        self.began = time.perf_counter()

    def lap(self, name: str) -> None:
        """End a lap; the seconds that stand-ins took are not counted."""
        context = self.context
        whole = step_stats.seconds_since(self.began, context.device, context.recorder)
        self.operations[name], apart = context.ledger.take()
        self.seconds[name].append(whole - apart)
        self.began = time.perf_counter()


def measure_rank(
    config: Config,
    world: int,
    rank: int,
    per_node: int,
    device: str,
) -> StageMeasured:
    """Train a few steps as that rank, with as many micro-batches as reach the steady state.

    The learning rate is 0: the weights stay as drawn, whatever the stand-ins give.
    """
    config = shortened(config)
    cores = len(physical_cores(allowed_cores()))
    torch.set_num_threads(min(torch.get_num_threads(), max(1, cores // per_node)))
    context = emulated_context(world, rank, torch.device(device))
    before = step_stats.measure(context.device, 0.0).peak
    state = trainer.build(config, context)
    samples = data.Synthetic(config.model.vocab_size, config.model.seq_length, 0)
    laps = _Laps(context)
    state.pipeline.after = lambda action: laps.lap(action.kind)  # type: ignore[method-assign]
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            laps.seconds.clear()
        laps.began = time.perf_counter()
        trainer.step(state, samples, 0, lr=0.0)
        laps.lap(AFTER)
    name = torch.cuda.get_device_name() if device == "cuda" else f"{cores} CPU cores"
    stage = StageMeasured(state.factory.mesh.pp.rank, rank, name, torch.get_num_threads())
    stage.seconds = {kind: statistics.median(own) for kind, own in laps.seconds.items()}
    stage.operations = laps.operations
    stage.bytes = step_stats.measure(context.device, 0.0).peak - before
    return stage


# ---- Composing -----------------------------------------------------------------------------------


def priced(stage: StageMeasured, price: Callable[[Operation], float], rounds: int) -> StageSeconds:
    """A measured stage with its collectives; rounds: how often a step reduces over the replicas."""
    sums: dict[str, list[float]] = defaultdict(list)
    for kind, operations in stage.operations.items():
        for operation in operations:
            sums[_part(operation, kind)].append(price(operation))
    crossing = {kind: sum(sums[kind]) for kind in stage.seconds if kind != AFTER}
    reduced = sums["reduce"] * rounds
    return StageSeconds(
        actions={kind: stage.seconds[kind] + crossed for kind, crossed in crossing.items()},
        crossing=crossing,
        after=stage.seconds[AFTER],
        reduce=sum(reduced),
        buckets=len(reduced),
        others=sum(sums[AFTER]),
        gather=sum(sums["gather"]),
    )


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
    seconds = {}
    for number, stage in enumerate(stages):
        for kind, action in stage.actions.items():
            seconds[kind, number] = action
    ends = [row[-1].end for row in simulate(schedule, seconds, transfer)]
    met = update = 0.0
    for stage, end in zip(stages, ends, strict=True):
        reduce = stage.reduce
        gather = stage.gather
        if hides:
            behind = stage.actions["B"] - stage.crossing["B"]
            reduce = max(reduce / max(1, stage.buckets), reduce - behind)
        if hides and overlap:
            gather = max(0.0, gather - stage.actions["F"])
        met = max(met, end + reduce)
        update = max(update, stage.after + gather)
    optimizer = max(stage.after for stage in stages)
    parts = {
        "pipeline": max(ends),
        "reduce": met - max(ends),
        "norm, tied": max(stage.others for stage in stages),
        "optimizer": optimizer,
        "gather": update - optimizer,
    }
    return Step(sum(parts.values()), parts)


# ---- Beside the planner's step -------------------------------------------------------------------


def report(
    config: Config,
    world: int,
    machine: Machine,
    stages: list[StageMeasured],
    price: Callable[[Operation], float],
) -> Answers:
    """Compose the step of `config` from its stages, and compare it with the planner's."""
    layout = config.layout
    model = config.model
    size = config.training.global_batch_size
    job = Job(model, layout, config.training, machine)
    rows = [priced(stage, price, job.micro_batches if layout.zero == 2 else 1) for stage in stages]
    transfer = 0.0
    for stage in stages:
        for operations in stage.operations.values():
            sent = [price(each) for each in operations if each.kind == "send"]
            transfer = max(transfer, *sent, 0.0)
    schedule = build(layout.schedule, layout.pp, job.micro_batches)
    hides = not stages[0].device.endswith("CPU cores")
    step = composed(schedule, rows, transfer, hides, bool(layout.overlap_param_gather))
    plan = step_time.predict(model, layout, config.training, machine)
    found: dict[str, Any] = {
        "device": stages[0].device,
        "threads": stages[0].threads,
        "ranks": world,
        "ranks_run": [stage.rank for stage in stages],
        "transfer": transfer,
        "tokens_per_second": size * model.seq_length / step.seconds,
        "mfu": model_flops(model, size) / (step.seconds * world * machine.peak),
        "plan": {name: getattr(plan, name) for name in (*TITLES, "parts")},
        "stages": [],
    }
    found |= asdict(step)
    held = [sum(parts.values()) for parts in memory.of_run(config)]
    passes = step_time.stage_passes(job)
    for number, (row, stage) in enumerate(zip(rows, stages, strict=True)):
        planned = {"bytes": held[number], **asdict(passes[number])}
        here = {"stage": number, "bytes": stage.bytes, "plan": planned}
        found["stages"].append(here | asdict(row))
    return Answers(_text(found), found)


def _text(found: dict[str, Any]) -> str:
    plan = found["plan"]
    ranks = ", ".join(map(str, found["ranks_run"]))
    lines = [
        f"{found['ranks']} ranks, of which {ranks} were run in turn on {found['device']}, "
        f"{found['threads']} threads; milliseconds, GB, and plan.py's",
        "  stage   F (collectives)     plan   B (collectives)     plan   reduce   update     plan"
        "  gather      GB    plan",
    ]
    for row in found["stages"]:
        line = f"  {row['stage']:5}"
        for kind, name in (("F", "forward"), ("B", "backward")):
            line += f"{1e3 * row['actions'][kind]:9.2f} ({1e3 * row['crossing'][kind]:7.2f})"
            line += f"{1e3 * row['plan'][name]:9.2f}"
        for seconds in (row["reduce"], row["after"], plan["parts"]["optimizer"], row["gather"]):
            line += f"{1e3 * seconds:9.2f}"
        lines.append(f"{line}{row['bytes'] / 1e9:8.3f}{row['plan']['bytes'] / 1e9:8.3f}")
    for key, title in TITLES.items():
        lines.append(f"{title}: {found[key]:,.4g}, plan.py: {plan[key]:,.4g}")
    parts = ", ".join(f"{name} {1e3 * part:.1f}" for name, part in found["parts"].items())
    return "\n".join([*lines, f"of a step, milliseconds: {parts}"])
