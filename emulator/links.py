"""Seconds of what crosses ranks: by a machine's links, or by operations that were measured.

    links = MachineLinks(machine, layout)               # alpha and beta, as plan.py prices them
    links = MeasuredLinks(world, "allreduce.csv")       # of benchmarks/allreduce.py, interpolated
    links.seconds(operation)                            # of a stand_ins.Operation
"""

import csv
import math
from collections import defaultdict
from typing import Protocol

from config.messages import UserError
from config.schema import Layout
from emulator.stand_ins import Operation
from planner import op_costs
from planner.hardware import Machine

MEASURED_AS = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter"}
MEASURED_AS |= {"all_gather": "all-gather", "send": "p2p", "receive": "p2p"}


class Links(Protocol):
    """Prices operations."""

    def seconds(self, operation: Operation) -> float:
        """From when all ranks are there until the operation is done."""

    def rates(self) -> dict[str, dict[str, float]]:
        """The entries of a calibration file for what was measured."""


class MachineLinks:
    """Rings and messages over the links of a machine."""

    def __init__(self, machine: Machine, layout: Layout, calibrated: bool):
        self.machine, self.layout, self.calibrated = machine, layout, calibrated

    def seconds(self, operation: Operation) -> float:
        machine, layout = self.machine, self.layout
        if operation.kind in ("send", "receive"):
            of_stage = layout.tp * layout.dp
            return op_costs.message(machine, of_stage, float(operation.bytes), layout.tp)
        link = op_costs.ring(machine, operation.ranks, operation.stride)
        whole = op_costs.all_reduce(link, operation.ranks, float(operation.bytes))
        return whole if operation.kind == "all_reduce" else whole / 2

    def rates(self) -> dict[str, dict[str, float]]:
        links = {"nvlink": self.machine.nvlink, "network": self.machine.network}
        entries = {k: {"alpha": link.latency, "beta": link.speed} for k, link in links.items()}
        return entries if self.calibrated else {}


class MeasuredLinks:
    """Operations as benchmarks/allreduce.py measured them, interpolated between sizes.

    Of groups of as many ranks, those measured with as many groups at once as the run has are taken,
    or else with the most.
    """

    def __init__(self, world: int, path: str):
        """UserError if the file cannot be read."""
        self.world, self.path = world, path
        self.rows: dict[tuple[str, int], dict[int, list[tuple[float, float]]]] = {}
        try:
            with open(path, newline="") as file:
                for row in csv.DictReader(file):
                    key, groups = (row["operation"], int(row["ranks"])), int(row["groups"])
                    of_groups = self.rows.setdefault(key, defaultdict(list))
                    of_groups[groups].append((float(row["bytes"]), float(row["median_s"])))
        except (OSError, KeyError, ValueError) as error:
            raise UserError(f"cannot read {path} as benchmarks/allreduce.py's: {error}") from None

    def seconds(self, operation: Operation) -> float:
        """UserError if there is no row of that operation and number of ranks."""
        kind, ranks = MEASURED_AS[operation.kind], operation.ranks
        return interpolated(self._points(kind, ranks), operation.bytes)

    def _points(self, kind: str, ranks: int) -> list[tuple[float, float]]:
        found = self.rows.get((kind, ranks))
        if found is None and kind == "p2p":  # a message has two ranks, whatever its group
            found = next((rows for (name, _), rows in self.rows.items() if name == kind), None)
        if found is None:
            have = sorted(count for name, count in self.rows if name == kind)
            raise UserError(f"{self.path} has {kind} of {have} ranks, and {ranks} are needed")
        fitting = [groups for groups in found if groups <= max(1, self.world // ranks)]
        return found[max(fitting, default=min(found))]

    def rates(self) -> dict[str, dict[str, float]]:
        """alpha by the shortest all-reduce of the most ranks, beta by the longest."""
        ranks = max((count for kind, count in self.rows if kind == "all-reduce"), default=0)
        if not ranks:
            return {}
        points = sorted(self._points("all-reduce", ranks))
        (_, short), (size, long) = points[0], points[-1]
        beta = 2 * (ranks - 1) / ranks * size / long
        return {"nvlink": {"alpha": short / (2 * (ranks - 1)), "beta": beta}}


def interpolated(points: list[tuple[float, float]], size: float) -> float:
    """Seconds at `size` bytes by (bytes, seconds): straight on a log-log scale; below the first
    point as long as it, beyond the last at its rate.
    """
    points = sorted(points)
    if size <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in zip(points, points[1:]):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return before * (after / before) ** share
    return points[-1][1] * size / points[-1][0]
