"""Peak memory of a run's ranks, for each pipeline stage.

It is the peak of the rank of the stage that needs most: allocated bytes on a GPU, resident bytes on
a CPU, where the bytes before the model was built stand beside it. The Log prints the table in the
run's summary (telemetry/log.py). `plan.py stages --config RUN` predicts the same bytes by part.
"""

import contextlib
import os
from collections.abc import Iterator

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


def table(config: Config, device: str, before: list[StepStats], after: list[StepStats]) -> str:
    """Return the table of every stage's peak, in MB, as text.

    device: "cuda" or "cpu". before, after: every rank's statistics before the model was built, and
    now.
    """
    peaks, reserved = per_stage(after, config.layout)
    kind, second, beside = "allocated", "reserved", reserved
    if device == "cpu":
        kind, second, beside = "resident", "before", per_stage(before, config.layout)[1]
    lines = [
        f"peak memory of a rank, MB ({kind}); by part: plan.py stages --config {config.run.out}"
    ]
    lines.append(f"stage{'measured':>12}{second:>12}")
    for stage, (peak, other) in enumerate(zip(peaks, beside, strict=True)):
        lines.append(f"{stage:5}{peak / MEGABYTE:12.1f}{other / MEGABYTE:12.1f}")
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
