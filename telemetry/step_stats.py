"""Exchanges all ranks' memory, seconds and requested actions after a step.

    stats = measure(device, seconds=..., waiting=..., requested_action=RequestedAction.GO_ON)
    everyone = exchange(stats, mesh.world, device)   # all ranks' statistics, in rank order

All values that ranks must agree on between steps go through this one all-gather. A requested action
is a number: to go on, to save, or to save and stop (distributed/stop_conditions.py); the trainer
carries out the largest action that any rank requests.

`table` has the peak memory of each pipeline stage, which is that of its fullest rank: allocated
bytes on a GPU, resident bytes on a CPU, with the resident bytes before the model was built beside
them. On a GPU it also has the bytes outside of torch's allocator: the CUDA context, loaded kernels
and NCCL's communicators. telemetry/log.py prints the table in the run's summary. `plan.py stages
--config RUN` predicts the same bytes by part.
"""

import math
import resource
import shlex
import time
from dataclasses import astuple, dataclass, fields

import psutil
import torch

from base.console import as_typed
from checkpointing.save import Checkpointer
from config.mesh_axes import rows_along
from config.schema import Config, Layout
from distributed.collectives import Group
from distributed.mesh import Mesh
from distributed.stop_conditions import RequestedAction, StopConditions
from watchdog.flight_recorder import FlightRecorder


@dataclass(frozen=True)
class StepStats:
    """One rank's statistics at the end of a step; all floats, so that a tensor can hold them."""

    peak: float  # largest number of bytes so far: allocated on a GPU, resident on a CPU
    reserved: float  # current bytes: reserved by the allocator on a GPU, resident on a CPU
    seconds: float  # the step's wall time
    waiting: float  # the part of `seconds` in which this rank waited for others; NaN: not timed
    requested_action: float  # the value of a RequestedAction
    outside: float = math.nan  # a GPU's bytes outside of the allocator; NaN: a CPU, or not measured


def seconds_since(began: float, device: torch.device, recorder: FlightRecorder) -> float:
    """Wait until the device has finished the step; return the seconds since `began`.

    began: a value of time.perf_counter. On a GPU the host only launches the step's kernels and is
    far ahead of the device, so this waits for the current stream. Other streams are not waited
    for, because weights may still be all-gathered during the next step.
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
    outside: float = math.nan,
) -> StepStats:
    """Return this rank's statistics: its memory, read now, and the arguments.

    outside: the result of `outside_allocator`, which is not measured in each step.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        now = torch.cuda.memory_reserved(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts it in KiB
        now = psutil.Process().memory_info().rss
    return StepStats(float(peak), float(now), seconds, waiting, float(requested_action), outside)


def outside_allocator(device: torch.device) -> float:
    """Return the bytes of a GPU that are taken, but not by torch's allocator; NaN for a CPU.

    They are the CUDA context, loaded kernels and NCCL's communicators, and what other processes
    have on this GPU.
    """
    if device.type != "cuda":
        return math.nan
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free - torch.cuda.memory_reserved(device))


def exchange(own: StepStats, world: Group, device: torch.device) -> list[StepStats]:
    """Return all ranks' statistics in rank order, the same list on every rank.

    own: this rank's statistics. Collective over the world, by one all-gather.
    """
    if world.size == 1:
        return [own]
    row = torch.tensor(astuple(own), dtype=torch.float64)  # a number for each field of StepStats
    # From pinned memory, the copy to a GPU does not make the host wait for the device.
    if device.type == "cuda":
        row = row.pin_memory().to(device, non_blocking=True)
    rows = row.new_empty(world.size * len(row))
    world.at_once.all_gather(rows, row).wait()
    table = world.values(rows.view(world.size, len(fields(StepStats))))
    return [StepStats(*values) for values in table]


class StatsExchange:
    """Exchanges the statistics of all ranks, with the action that each rank requests.

    The trainer carries out the largest requested action. Each method is collective over all ranks.
    """

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        conditions: StopConditions,
        checkpoints: Checkpointer,
    ):
        """Prepare for the exchanges after the steps.

        Two objects request actions: `conditions`, for signals and limits, and `checkpoints`.
        """
        self.mesh = mesh
        self.device = device
        self.conditions = conditions
        self.checkpoints = checkpoints
        self.outside: float | None = None  # the bytes outside of the allocator; None: no step yet

    def after_step(self, seconds: float, seconds_to_evaluate: float) -> list[StepStats]:
        """Return every rank's statistics of a step that took `seconds` on this rank.

        seconds_to_evaluate: the expected seconds of the evaluation after this step; 0 if there is
        none. --exit-after-minutes stops the run early enough for the evaluation and a save.
        """
        recorder = self.mesh.recorder
        seconds_ahead = self.checkpoints.seconds_to_save + seconds_to_evaluate
        by_conditions = self.conditions.requested_action(seconds_ahead)
        action = max(by_conditions, self.checkpoints.requested_action)
        # Read once, because the driver takes its time to answer. The first step comes after the
        # warm-up; the optimizer's kernels are loaded and the groups connected only in the step.
        if self.outside is None:
            self.outside = outside_allocator(self.device)
        # `take_waited` returns the seconds in which this rank has waited for others in the step.
        own_stats = measure(self.device, seconds, recorder.take_waited(), action, self.outside)
        recorder.at("statistics")
        stats_of_ranks = exchange(own_stats, self.mesh.world, self.device)
        recorder.end_step()
        return stats_of_ranks

    def largest_request(self) -> float:
        """Return the largest action that any rank requests, from statistics without a step.

        Called before the first step and after an evaluation: after a step, `after_step` exchanges
        the requested actions together with the step's statistics.
        """
        own_stats = measure(self.device, 0.0, requested_action=self.conditions.requested_action())
        stats_of_ranks = exchange(own_stats, self.mesh.world, self.device)
        return max(stats.requested_action for stats in stats_of_ranks)


def ranks_of_stages(layout: Layout) -> list[tuple[int, ...]]:
    """Return, for each position in the pipeline from 0 to pp - 1, the tuple of its ranks."""
    return rows_along(layout.axes, [axis for axis in layout.axes if axis != "pp"])


# ---- Peak memory of a stage's ranks --------------------------------------------------------------


MEGABYTE = 1e6


def per_stage(everyone: list[StepStats], layout: Layout) -> tuple[list[int], list[int]]:
    """Return two lists by stage: the largest peak bytes and largest reserved bytes of its ranks.

    everyone: the statistics of all ranks, in rank order.
    """
    stages = [[everyone[rank] for rank in ranks] for ranks in ranks_of_stages(layout)]
    peaks = [int(max(stats.peak for stats in stage)) for stage in stages]
    reserved = [int(max(stats.reserved for stats in stage)) for stage in stages]
    return peaks, reserved


def outside_per_stage(everyone: list[StepStats], layout: Layout) -> list[int]:
    """Return, by stage, the most bytes outside of the allocator of its ranks; [] on CPUs.

    everyone: the statistics of all ranks, in rank order.
    """
    if any(math.isnan(stats.outside) for stats in everyone):
        return []
    stages = ranks_of_stages(layout)
    return [int(max(everyone[rank].outside for rank in ranks)) for ranks in stages]


def table(config: Config, device: str, before: list[StepStats], after: list[StepStats]) -> str:
    """Return a table of the stages' memory in MB, as text.

    The first column is the peak. The second is the reserved bytes on a GPU, and on a CPU the
    resident bytes before the model was built. On a GPU the third has the bytes outside of torch's
    allocator. device: "cuda" or "cpu". before, after: all ranks'
    statistics before the model was built, and after the last step.
    """
    peaks, second_column = per_stage(after, config.layout)
    kind = "allocated; reserved: by torch's allocator"
    second_name = "reserved"
    if device == "cpu":
        kind = "resident; before: the model was built"
        second_name = "before"
        _, second_column = per_stage(before, config.layout)
    columns = {"measured": peaks, second_name: second_column}
    outside = outside_per_stage(after, config.layout)
    if outside:
        columns["outside"] = outside
    command = f"{as_typed('python plan.py')} stages --config {shlex.quote(config.run.out)}"
    lines = [f"peak memory of a rank, MB ({kind}); by part: {command}"]
    lines.append("stage" + "".join(f"{name:>12}" for name in columns))
    for stage, values in enumerate(zip(*columns.values(), strict=True)):
        lines.append(f"{stage:5}" + "".join(f"{value / MEGABYTE:12.1f}" for value in values))
    return "\n".join(lines)
