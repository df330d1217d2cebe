"""Every rank's memory, seconds and requested action at the end of a step; names slow ranks.

    own = measure(device, seconds=..., waiting=..., requested_action=RequestedAction.GO_ON)
    everyone = exchange(own, mesh.world, device)   # of every rank, in rank order

All values that ranks must agree on between steps go through this one all-gather.

Peak memory of a run's ranks, for each pipeline stage.

It is the peak of the rank of the stage that needs most: allocated bytes on a GPU, resident bytes on
a CPU, where the bytes before the model was built stand beside it. The Log prints the table in the
run's summary (telemetry/log.py). `plan.py stages --config RUN` predicts the same bytes by part.
"""

import contextlib
import math
import os
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields

import psutil
import torch

from config.messages import UserError
from config.run_options import Run
from config.schema import Config, Layout, coordinates, rows_along
from distributed.collectives import Group
from distributed.context import Context
from distributed.stop_conditions import RequestedAction
from watchdog.flight_recorder import FlightRecorder


@dataclass(frozen=True)
class StepStats:
    """One rank at the end of a step."""

    peak: float  # largest number of bytes so far: allocated on a GPU, resident on a CPU
    reserved: float  # bytes now: reserved by the allocator on a GPU, resident on a CPU
    seconds: float  # the step's wall time
    waiting: float  # the part of `seconds` in which this rank waited for others; NaN: not timed
    requested_action: float  # a RequestedAction


def seconds_since(began: float, device: torch.device, recorder: FlightRecorder) -> float:
    """Seconds since `began` (time.perf_counter) until the device has done what it was given.

    On a GPU the host launches a step's update and is far ahead of it. Only the current stream is
    waited for: weights may still be gathered during the next step.
    """
    if device.type == "cuda":
        with recorder.waiting_for("device"):
            torch.cuda.current_stream(device).synchronize()
    return time.perf_counter() - began


def measure(
    device: torch.device,
    seconds: float,
    waiting: float = 0.0,
    requested_action: RequestedAction = RequestedAction.GO_ON,
) -> StepStats:
    """This rank's memory now, with the seconds and the action given."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        now = torch.cuda.memory_reserved(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        now = psutil.Process().memory_info().rss
    return StepStats(float(peak), float(now), seconds, waiting, float(requested_action))


def exchange(own: StepStats, world: Group, device: torch.device) -> list[StepStats]:
    """Every rank's stats, in rank order and equal on every rank; collective over the world."""
    if world.size == 1:
        return [own]
    # From pinned memory the copy to a GPU does not make the host wait for the step's end.
    row = torch.tensor(astuple(own), dtype=torch.float64)
    if device.type == "cuda":
        row = row.pin_memory().to(device, non_blocking=True)
    rows = row.new_empty(world.size * len(row))
    world.at_once.all_gather(rows, row).wait()
    table = world.values(rows.view(world.size, len(fields(StepStats))))
    return [StepStats(*values) for values in table]


class StragglerCheck:
    """Names ranks that compute much longer than the other ranks of their pipeline stage.

    Computing is a step's wall time without waiting. On gloo the host times the waits of each step.
    On nccl events on the stream time them in the steps that step_times.py measures, and a
    collective's own duration counts as waiting: only these steps are compared. The rank of a stage
    of one has nothing to be compared with.
    """

    def __init__(self, config: Config, nodes: list[str]):
        self.every = config.run.check_speed_every
        self.percent = config.run.slow_rank_percent
        self.layout = config.layout
        self.nodes = nodes
        self.computing = [0.0] * len(nodes)  # seconds of the steps whose waits were timed
        self.steps = self.timed = 0  # since the last check; those of them whose waits were timed

    def add(self, everyone: list[StepStats]) -> list[str]:
        """Count a step; every --check-speed-every steps, a sentence for each slow rank.

        If the waits of none of these steps were timed, the check is made after the next timed one.
        """
        if not self.every:
            return []
        self.steps += 1
        if not any(math.isnan(stats.waiting) for stats in everyone):
            self.timed += 1
            for rank, stats in enumerate(everyone):
                self.computing[rank] += stats.seconds - stats.waiting
        if self.steps < self.every or not self.timed:
            return []
        lines = self._slow([total / self.timed for total in self.computing])
        self.computing = [0.0] * len(everyone)
        self.steps = self.timed = 0
        return lines

    def _slow(self, seconds: list[float]) -> list[str]:
        lines = []
        steps = f"the last {self.steps}"
        if self.timed < self.steps:
            steps = f"{self.timed} measured steps of {steps}"
        for ranks in ranks_of_stages(self.layout):
            for rank in ranks:
                peers = [seconds[other] for other in ranks if other != rank]
                own = seconds[rank]
                usual = statistics.median(peers or [own])
                if own <= usual * (1 + self.percent / 100):
                    continue
                at = coordinates(rank, self.layout.axes)
                lines.append(
                    f"SLOW: rank {rank} (tp {at['tp']}, pp {at['pp']}, dp {at['dp']}) on "
                    f"{self.nodes[rank]} computed {own:.4f} s a step over {steps}, "
                    f"{own / usual - 1:.0%} longer than the median of the {len(peers)} others of "
                    f"its stage, {usual:.4f} s"
                )
        return lines


def ranks_of_stages(layout: Layout) -> list[tuple[int, ...]]:
    """The ranks that hold each pipeline stage, in the order of the stages."""
    return rows_along(layout.axes, [axis for axis in layout.axes if axis != "pp"])


# ---- Peak memory of a stage's ranks --------------------------------------------------------------


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
    kind = "allocated"
    second = "reserved"
    beside = reserved
    if device == "cpu":
        kind = "resident"
        second = "before"
        beside = per_stage(before, config.layout)[1]
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
