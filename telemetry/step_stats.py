"""What every rank tells all others at the end of a step: memory, seconds, wishes; one all-gather.

    vitals = measure(device, seconds=..., waiting=..., wish=GO_ON)
    everyone = exchange(vitals, mesh.world)       # of every rank, in rank order, equal everywhere

All that ranks must agree on between steps goes this way, so that a step has one such exchange.
"""

import resource
import statistics
from dataclasses import astuple, dataclass, fields

import psutil
import torch

from config.schema import Config, Layout, coordinates, rows_along
from distributed.collectives import Group

# What a rank wishes to happen at this step boundary; the largest wish of all is done.
GO_ON, SAVE, SAVE_AND_STOP = 0.0, 1.0, 2.0


@dataclass(frozen=True)
class StepStats:
    """One rank's end of a step: bytes, seconds, wish."""

    peak: float  # most bytes so far: allocated on a GPU, resident on a CPU
    reserved: float  # bytes now: reserved by the allocator on a GPU, resident on a CPU
    seconds: float  # the step's wall time
    waiting: float  # those of them in which this rank waited for others
    wish: float


def measure(
    device: torch.device, seconds: float, waiting: float = 0.0, wish: float = GO_ON
) -> StepStats:
    """This rank's vitals now."""
    if device.type == "cuda":
        peak, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        now = psutil.Process().memory_info().rss
    return StepStats(float(peak), float(now), seconds, waiting, wish)


def exchange(own: StepStats, world: Group, device: torch.device) -> list[StepStats]:
    """Every rank's vitals, in rank order; collective over the world."""
    if world.size == 1:
        return [own]
    row = torch.tensor(astuple(own), dtype=torch.float64, device=device)
    rows = row.new_empty(world.size * len(row))
    world.all_gather(rows, row).wait()
    table = world.values(rows.view(world.size, len(fields(StepStats))))
    return [StepStats(*values) for values in table]


class StragglerCheck:
    """Names ranks that compute much longer than their peers: the other ranks of their stage.

    Computing is a step's time without the waits for others. On gloo those are timed by the host;
    on nccl by events on the stream, so a collective's own duration counts as waiting. A stage of
    one rank has no peers, and nothing is said of it.
    """

    def __init__(self, config: Config, nodes: list[str]):
        self.every, self.percent = config.run.check_speed_every, config.run.slow_rank_percent
        self.layout, self.nodes = config.layout, nodes
        self.computing = [0.0] * len(nodes)
        self.steps = 0

    def add(self, everyone: list[StepStats]) -> list[str]:
        """Count a step; every so many, a sentence for each rank that was slow in them."""
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
                usual = statistics.median(peers) if peers else seconds[rank]
                if seconds[rank] > usual * (1 + self.percent / 100):
                    lines.append(self._sentence(rank, seconds[rank], usual, len(peers)))
        return lines

    def _sentence(self, rank: int, own: float, usual: float, peers: int) -> str:
        at = coordinates(rank, self.layout.axes)
        return (
            f"SLOW: rank {rank} (tp {at['tp']}, pp {at['pp']}, dp {at['dp']}) on "
            f"{self.nodes[rank]} computed {own:.4f} s a step over the last {self.every}, "
            f"{own / usual - 1:.0%} longer than the median of the {peers} others of its stage, "
            f"{usual:.4f} s"
        )


def ranks_of_stages(layout: Layout) -> list[tuple[int, ...]]:
    """The ranks that hold each pipeline stage, in the order of the stages."""
    return rows_along(layout.axes, [axis for axis in layout.axes if axis != "pp"])
