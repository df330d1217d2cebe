"""Memory of a run's ranks, stage by stage: measured and predicted.

Measured is the most that tensors took on a GPU, or the most that was resident on a CPU, of the
fullest rank of a stage. Predicted is the sum of what `planner.memory.of_run` gives, without the
allocator's overhead and the communication buffers:

    GPU    weights + gradients + optimizer + activations + working
    CPU    the same, on top of what was resident before the model was built
"""

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch

from config.messages import UserError
from config.run_options import Run
from config.schema import Config, Layout
from distributed.context import Context
from telemetry.step_stats import StepStats, ranks_of_stages

MEGABYTE = 1e6
# Allocations that a snapshot holds, the last ones: about 100 MB of host memory.
SNAPSHOT_ENTRIES = 100_000


def per_stage(everyone: list[StepStats], layout: Layout) -> tuple[list[int], list[int]]:
    """The largest peak and the largest reserved bytes of any rank, for every stage."""
    stages = [[everyone[rank] for rank in ranks] for ranks in ranks_of_stages(layout)]
    peaks = [int(max(rank.peak for rank in stage)) for stage in stages]
    return peaks, [int(max(rank.reserved for rank in stage)) for stage in stages]


def table(
    config: Config,
    device: str,
    before: list[StepStats],
    after: list[StepStats],
    predicted: list[dict[str, float]],
) -> str:
    """Every stage's measured peak and its prediction, in MB.

    before, after: every rank's step statistics before anything was built, and now; predicted:
    bytes by part on a rank of every stage.
    """
    peaks, reserved = per_stage(after, config.layout)
    gpu = device == "cuda"
    columns: dict[str, Sequence[float]] = {"measured": peaks}
    parts: dict[str, Sequence[float]] = {}
    for part in predicted[0]:
        parts[part] = [stage[part] for stage in predicted]
    if gpu:
        columns["reserved"] = reserved
    else:
        parts["before"] = per_stage(before, config.layout)[1]
    columns["predicted"] = [sum(values) for values in zip(*parts.values(), strict=True)]
    columns |= parts
    head = f"peak memory of a rank, MB ({'allocated' if gpu else 'resident'})"
    head += f"; predicted by memory.py: {' + '.join(parts)}"
    lines = [head, "stage" + "".join(f"{name:>12}" for name in columns)]
    for stage, values in enumerate(zip(*columns.values(), strict=True)):
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
