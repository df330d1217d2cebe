"""Peak memory of a run's ranks, for each pipeline stage: measured and predicted.

The measured value is the peak of the rank of the stage that needs most: allocated bytes on a GPU,
resident bytes on a CPU. The prediction is the sum of the parts that `planner.memory.of_run`
returns, without the allocator's overhead and the communication buffers:

    GPU    weights + gradients + optimizer + activations + working
    CPU    the same, and the bytes that were resident before the model was built

The Log prints the table in the run's summary (telemetry/log.py).
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
# A snapshot holds this many last allocations: about 100 MB of host memory.
SNAPSHOT_ENTRIES = 100_000


def per_stage(everyone: list[StepStats], layout: Layout) -> tuple[list[int], list[int]]:
    """Return, for every stage, the largest peak and the largest reserved bytes of its ranks.

    everyone: the statistics of all ranks, in rank order.
    """
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
    """Return the table of every stage's measured and predicted peak, in MB, as text.

    device: "cuda" or "cpu". before, after: every rank's statistics before the model was built, and
    now. predicted: for each stage, the bytes of a rank by part (`planner.memory.of_run`).
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
    """With --memory-snapshot, record the block's GPU allocations in OUT/memory_RANK.pickle.

    The file is written when the block ends, also by an exception such as out of memory. Raise
    UserError on a CPU. Without the option, do nothing.
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
