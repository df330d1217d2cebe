"""Seconds of what crosses ranks, by a machine's links or by operations that were measured.

links = MachineLinks(machine, layout)           # alpha and beta, as plan.py prices them
links = MeasuredLinks(world, "allreduce.csv")   # of benchmarks/allreduce.py, interpolated
links.seconds(operation)                        # of a stand_ins.Operation, all ranks being there
"""

import csv
import itertools
import math
import statistics
from dataclasses import dataclass

from config.messages import UserError
from config.schema import Layout
from emulator.stand_ins import Operation
from planner import op_costs
from planner.hardware import Machine

MEASURED_AS = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter"}
MEASURED_AS |= {"all_gather": "all-gather", "send": "p2p", "receive": "p2p"}
MEASURED_AS |= {"all_to_all": "all-gather"}  # which brings a rank as much


@dataclass(frozen=True)
class MachineLinks:
    """Rings and messages over the links of a machine."""

    machine: Machine
    layout: Layout

    def seconds(self, operation: Operation) -> float:
        """Of one operation."""
        kind, _, ranks, size = operation
        if kind in ("send", "receive"):
            of_stage = self.layout.tp * self.layout.cp * self.layout.dp
            return float(op_costs.message(self.machine, of_stage, float(size)))
        link = op_costs.ring(self.machine, len(ranks), ranks[1] - ranks[0])
        share = 1.0 if kind == "all_reduce" else 0.5
        return share * op_costs.all_reduce(link, len(ranks), float(size))


class MeasuredLinks:
    """Operations as they were measured, with as many groups at once as the run has, or fewer."""

    def __init__(self, world: int, path: str):
        """UserError if the file cannot be read."""
        self.world, self.path, self.rows = world, path, list[tuple[str, int, int, int, float]]()
        try:
            with open(path, newline="") as file:
                for row in csv.DictReader(file):
                    ranks, groups = int(row["ranks"]), int(row["groups"])
                    point = int(row["bytes"]), float(row["median_s"])
                    self.rows.append((row["operation"], ranks, groups, *point))
        except (OSError, KeyError, ValueError) as error:
            raise UserError(f"--links {path} is not benchmarks/allreduce.py's: {error}") from None

    def seconds(self, operation: Operation) -> float:
        """Of one operation; UserError if none of that kind and number of ranks was measured."""
        kind, ranks = MEASURED_AS[operation.kind], len(operation.ranks)
        found = [row for row in self.rows if row[0] == kind and (row[1] == ranks or kind == "p2p")]
        if not found:
            raise UserError(f"{self.path} has no {kind} of {ranks} ranks, which this layout needs")
        most = max(1, self.world // ranks)
        groups = max((row[2] for row in found if row[2] <= most), default=found[0][2])
        of_size: dict[int, list[float]] = {}
        for _, _, count, size, seconds in found:
            if count == groups:
                of_size.setdefault(size, []).append(seconds)
        points = [(size, statistics.median(of_size[size])) for size in sorted(of_size)]
        return interpolated(points, operation.bytes)


def interpolated(points: list[tuple[int, float]], size: float) -> float:
    """Seconds at `size` bytes by (bytes, seconds) in order: straight on a log-log scale; below the
    first point as long as it, beyond the last at its rate.
    """
    if size <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in itertools.pairwise(points):
        if size <= high:
            return before * (after / before) ** (math.log(size / low) / math.log(high / low))
    return points[-1][1] * size / points[-1][0]
