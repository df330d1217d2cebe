"""One rank of a world that is not there, on a real device: its collectives are local stand-ins.

    context = emulated_context(world, rank=5, device=torch.device("cpu"))
    trainer.build(config, context)
    operations, seconds = context.ledger.take()      # what would have crossed ranks

    links = MachineLinks(machine, layout)           # alpha and beta, as plan.py prices them
    links = MeasuredLinks(world, "allreduce.csv")   # of benchmarks/allreduce.py, interpolated
    links.seconds(operations[0])                    # all ranks being there

A stand-in gives a result of the right shape out of the rank's own values and is counted; its own
seconds are kept apart, for the links say what the operation takes.
"""

import csv
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from config.messages import UserError
from config.schema import Layout
from distributed.collectives import SUM, Group, Handle
from emulator.recording import LoneContext
from planner import op_costs
from planner.hardware import Machine

# Standard deviation of what arrives from a neighbouring stage: far from zero, near which denormal
# numbers would be slow, and from overflow.
ACTIVATION = 1.0
GRADIENT = 1e-3


class Operation(NamedTuple):
    """An operation that would have crossed ranks: bytes as Group counts them, role and ranks."""

    kind: str
    role: str
    ranks: tuple[int, ...]
    bytes: int


class Ledger:
    """Operations, and the seconds that their stand-ins took of the host."""

    def __init__(self) -> None:
        self.operations = list[Operation]()
        self.seconds = 0.0

    def take(self) -> tuple[list[Operation], float]:
        """Return the operations and seconds since the last call, and forget them."""
        taken = self.operations, self.seconds
        self.operations = []
        self.seconds = 0.0
        return taken


class StandInGroup(Group):
    """A group whose other members do not exist.

    all_reduce leaves the tensor, reduce_scatter copies this rank's slice, all_gather repeats the
    source, or leaves an output that contains it, all_to_all gives the source; receive fills with
    normal numbers.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, role: str, ledger: Ledger):
        super().__init__(ranks, rank)
        self.role = role
        self.ledger = ledger
        self._arrived: dict[tuple, Tensor] = {}

    def all_reduce(self, tensor: Tensor, op=SUM) -> Handle:
        return self._stand_in("all_reduce", tensor)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> Handle:
        own = self.shard(source).view_as(output)
        return self._stand_in("reduce_scatter", source, lambda: output.copy_(own))

    def all_gather(self, output: Tensor, source: Tensor) -> Handle:
        rows = output.view(self.size, -1)
        # Weights are gathered in place: the other replicas' are there, as they were drawn.
        inside = rows[self.rank].data_ptr() == source.data_ptr()
        repeat = None if inside else lambda: rows.copy_(source.reshape(1, -1).expand_as(rows))
        return self._stand_in("all_gather", output, repeat)

    def all_to_all(self, output: Tensor, source: Tensor) -> Handle:
        return self._stand_in("all_to_all", source, lambda: output.copy_(source))

    def send(self, tensor: Tensor, to: int) -> Handle:
        return self._stand_in("send", tensor)

    def receive(self, tensor: Tensor, source: int) -> Handle:
        key = tuple(tensor.shape), tensor.dtype
        if key not in self._arrived:
            scale = GRADIENT if self.role == "backward" else ACTIVATION
            self._arrived[key] = torch.randn_like(tensor) * scale
        return self._stand_in("receive", tensor, lambda: tensor.copy_(self._arrived[key]))

    def _stand_in(self, kind: str, whole: Tensor, run: Callable | None = None) -> Handle:
        began = time.perf_counter()
        if run is not None:
            run()
        if self.size > 1:
            self.ledger.operations.append(Operation(kind, self.role, self.ranks, whole.nbytes))
        self.ledger.seconds += time.perf_counter() - began
        return Group().all_reduce(whole)  # of one rank: done


class EmulatedContext(LoneContext):
    """Its groups are stand-ins."""

    ledger: Ledger

    def group(self, rows, role: str) -> Group:
        """This rank's group: a stand-in."""
        own = self.own_row(rows)
        return StandInGroup(own, own.index(self.rank), role, self.ledger)


def emulated_context(world: int, rank: int, device: torch.device) -> EmulatedContext:
    """The context of a rank of `world`, on a device that exists."""
    context = EmulatedContext.of(world, rank, 1, device, "none")
    context.ledger = Ledger()
    return context


# ---- Seconds of what crosses ranks ---------------------------------------------------------------

MEASURED_AS = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter"}
MEASURED_AS |= {"all_gather": "all-gather", "send": "p2p", "receive": "p2p"}
MEASURED_AS |= {"all_to_all": "all-gather"}  # which brings a rank as much


@dataclass(frozen=True)
class MachineLinks:
    """Rings and messages over the links of a machine."""

    machine: Machine
    layout: Layout

    def seconds(self, operation: Operation) -> float:
        """Return the seconds of one operation on these links."""
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
        self.world = world
        self.path = path
        self.rows = list[tuple[str, int, int, int, float]]()
        try:
            with open(path, newline="") as file:
                for row in csv.DictReader(file):
                    ranks = int(row["ranks"])
                    groups = int(row["groups"])
                    point = int(row["bytes"]), float(row["median_s"])
                    self.rows.append((row["operation"], ranks, groups, *point))
        except (OSError, KeyError, ValueError) as error:
            raise UserError(f"--links {path} is not benchmarks/allreduce.py's: {error}") from None

    def seconds(self, operation: Operation) -> float:
        """Return the seconds of one operation, interpolated between measured sizes.

        Raise UserError if none of its kind and number of ranks was measured.
        """
        kind = MEASURED_AS[operation.kind]
        ranks = len(operation.ranks)
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
