"""Every rank's memory, seconds and requested action at the end of a step; names slow ranks.

    own = measure(device, seconds=..., waiting=..., requested_action=RequestedAction.GO_ON)
    everyone = exchange(own, mesh.world, device)   # of every rank, in rank order

All values that ranks must agree on between steps go through this one all-gather.
"""

import resource
import statistics
import time
from dataclasses import astuple, dataclass, fields

import psutil
import torch

from config.schema import Config, Layout, coordinates, rows_along
from distributed.collectives import Group
from distributed.stop_conditions import RequestedAction
from watchdog.flight_recorder import FlightRecorder


@dataclass(frozen=True)
class StepStats:
    """One rank at the end of a step."""

    peak: float  # largest number of bytes so far: allocated on a GPU, resident on a CPU
    reserved: float  # bytes now: reserved by the allocator on a GPU, resident on a CPU
    seconds: float  # the step's wall time
    waiting: float  # the part of `seconds` in which this rank waited for others
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
        peak, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        now = psutil.Process().memory_info().rss
    return StepStats(float(peak), float(now), seconds, waiting, float(requested_action))


def exchange(own: StepStats, world: Group, device: torch.device) -> list[StepStats]:
    """Every rank's stats, in rank order and equal on every rank; collective over the world."""
    if world.size == 1:
        return [own]
    row = torch.tensor(astuple(own), dtype=torch.float64, device=device)
    rows = row.new_empty(world.size * len(row))
    world.all_gather(rows, row).wait()
    table = world.values(rows.view(world.size, len(fields(StepStats))))
    return [StepStats(*values) for values in table]


class StragglerCheck:
    """Names ranks that compute much longer than the other ranks of their pipeline stage.

    Computing is a step's wall time without waiting. On gloo the host times the waits; on nccl
    events on the stream do, so that a collective's own duration counts as waiting. The rank of a
    stage of one has nothing to be compared with.
    """

    def __init__(self, config: Config, nodes: list[str]):
        self.every, self.percent = config.run.check_speed_every, config.run.slow_rank_percent
        self.layout, self.nodes = config.layout, nodes
        self.computing = [0.0] * len(nodes)
        self.steps = 0

    def add(self, everyone: list[StepStats]) -> list[str]:
        """Count a step; every --check-speed-every steps, a sentence for each slow rank."""
        if not self.every:
            return []
        for rank, stats in enumerate(everyone):
            self.computing[rank] += stats.seconds - stats.waiting
        self.steps += 1
        if self.steps < self.every:
            return []
        seconds = [total / self.steps for total in self.computing]
        self.computing, self.steps = [0.0] * len(seconds), 0
        return self._slow(seconds)

    def _slow(self, seconds: list[float]) -> list[str]:
        lines = []
        for ranks in ranks_of_stages(self.layout):
            for rank in ranks:
                peers = [seconds[other] for other in ranks if other != rank]
                own, usual = seconds[rank], statistics.median(peers or [seconds[rank]])
                if own <= usual * (1 + self.percent / 100):
                    continue
                at = coordinates(rank, self.layout.axes)
                lines.append(
                    f"SLOW: rank {rank} (tp {at['tp']}, pp {at['pp']}, dp {at['dp']}) on "
                    f"{self.nodes[rank]} computed {own:.4f} s a step over the last {self.every}, "
                    f"{own / usual - 1:.0%} longer than the median of the {len(peers)} others of "
                    f"its stage, {usual:.4f} s"
                )
        return lines


def ranks_of_stages(layout: Layout) -> list[tuple[int, ...]]:
    """The ranks that hold each pipeline stage, in the order of the stages."""
    return rows_along(layout.axes, [axis for axis in layout.axes if axis != "pp"])
