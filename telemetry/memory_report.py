"""Memory of a run's ranks, stage by stage: measured, and beside it what memory.py predicts.

Measured is the most that tensors took on a GPU, or the most that was resident on a CPU, of the
fullest rank of a stage. Predicted is the sum of memory.py's parts that follow from model and
layout, the allocator's own waste and communication buffers left out:

    GPU    weights + gradients + optimizer + activations + working
    CPU    the same, on top of what was resident before the model was built
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import torch

from config.messages import UserError
from config.schema import Config, Layout, Run
from distributed.context import Context
from planner import hardware, memory
from telemetry.step_stats import StepStats, ranks_of_stages

PARTS = ("weights", "gradients", "optimizer", "activations", "working")
MEGABYTE = 1e6
# Allocations that a snapshot holds, the last ones: about 100 MB of host memory.
SNAPSHOT_ENTRIES = 100_000


def per_stage(everyone: list[StepStats], layout: Layout) -> tuple[list[int], list[int]]:
    """The largest peak and the largest reserved bytes of any rank, for every stage."""
    stages = [[everyone[rank] for rank in ranks] for ranks in ranks_of_stages(layout)]
    peaks = [int(max(rank.peak for rank in stage)) for stage in stages]
    return peaks, [int(max(rank.reserved for rank in stage)) for stage in stages]


def predicted(config: Config) -> list[dict[str, float]]:
    """The bytes that model and layout account for, by part, on a rank of every stage."""
    # The formulas ask a machine for its allocator and its software alone: none, and Trine's.
    machine = hardware.load("a100-80")
    machine = dataclasses.replace(machine, software=hardware.Software(), activation_overhead=1.0)
    wide = 2.0 if config.training.precision == "fp64" else 1.0  # the formulas stop at fp32
    batch = max(level.batch for level in config.batches.levels())
    training = dataclasses.replace(config.training, global_batch_size=batch)
    table = memory.stages(config.model, config.layout, training, machine)
    return [{part: wide * getattr(stage, part) for part in PARTS} for stage in table]


def table(config: Config, device: str, before: list[StepStats], after: list[StepStats]) -> str:
    """Every stage's measured peak beside its prediction, in MB.

    before, after: every rank's vitals before anything was built, and now.
    """
    peaks, reserved = per_stage(after, config.layout)
    gpu = device == "cuda"
    begun = [0] * config.layout.pp if gpu else per_stage(before, config.layout)[1]
    names = ("measured", *(("reserved",) if gpu else ()), "predicted", *PARTS)
    names += () if gpu else ("before",)
    lines = [
        f"peak memory of a rank, MB ({'allocated' if gpu else 'resident'}); predicted by "
        f"memory.py: {' + '.join(names[names.index('predicted') + 1 :])}",
        "stage" + "".join(f"{name:>12}" for name in names),
    ]
    for stage, parts in enumerate(predicted(config)):
        total = sum(parts.values()) + begun[stage]
        values = [peaks[stage], *([reserved[stage]] if gpu else []), total, *parts.values()]
        values += [] if gpu else [begun[stage]]
        lines.append(f"{stage:5}" + "".join(f"{value / MEGABYTE:12.1f}" for value in values))
    return "\n".join(lines)


@contextlib.contextmanager
def snapshot(run: Run, context: Context) -> Iterator[None]:
    """With --memory-snapshot, record allocations and write them when the block is left.

    Also when an exception, such as out of memory, leaves it. UserError on a CPU.
    """
    if not run.memory_snapshot:
        yield
        return
    if context.device.type != "cuda":
        raise UserError("--memory-snapshot records the allocations of GPUs; this run is on CPUs")
    os.makedirs(run.out, exist_ok=True)
    torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
    try:
        yield
    finally:
        path = os.path.join(run.out, f"memory_{context.rank:05d}.pickle")
        torch.cuda.memory._dump_snapshot(path)
        torch.cuda.memory._record_memory_history(enabled=None)
