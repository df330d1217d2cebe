"""Records what one rank of a world does with other ranks, and stands for these ranks.

    context = recording_context(world, rank=5, nodes=2)
    trainer.build(config, context)        # its groups write to the trace
    context.trace.events                  # every operation, wait and host read, in the host's order

A trace has roles and positions in place of ranks, so ranks that do the same have equal traces.

One rank of a world that is not there, on a real device: its collectives are local stand-ins.

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
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from config.messages import UserError
from config.schema import Layout
from distributed.collectives import SUM, Group, Handle
from distributed.context import Context
from distributed.launch import Launch, Local
from planner import op_costs
from planner.hardware import Machine
from watchdog.flight_recorder import FlightRecorder

ROOT = Path(__file__).resolve().parent.parent
# The lines that are named are those that call these, not lines of theirs.
NEVER_NAMED = (str(ROOT / "emulator"), str(ROOT / "distributed"))
MESSAGES = ("send", "receive")
READ = "host read"  # the host waits for the device's stream
COPY = "copy"  # out of host memory that is not pinned: the host waits for the copy alone
LOAD = "load"  # of a kernel, at its first launch: the host waits for all streams of the device


class Event(NamedTuple):
    """An operation of a group, the wait for one, or a stop of the host.

    kind: all_reduce, reduce_scatter, all_gather, broadcast, reduce, all_to_all, send, receive,
    wait, READ, COPY or LOAD.
    number: of the group's collectives, or of the messages to or from that peer, from 1; of a wait,
    the index of its operation in the trace. op: of a reduction, and the rank that gives or takes;
    of a stop, what was done. peer: position in the group. line: of the code that called; place:
    step, action and micro-batch. rows: of an all_to_all with unequal blocks, the rows that come
    from each member and those that go to each; its bytes are then those of one row.
    """

    kind: str
    role: str = ""
    number: int = 0
    bytes: int = 0
    dtype: str = ""
    op: str = ""
    peer: int = -1
    line: str = ""
    place: str = ""
    rows: tuple[tuple[int, ...], ...] = ()


class Trace:
    """The events of one rank, in the order of its host."""

    def __init__(self, recorder: FlightRecorder):
        self.recorder = recorder
        self.events = list[Event]()
        self._counts: dict[tuple, int] = {}

    def place(self) -> str:
        """Where the rank is now: `step 2, F 3`."""
        phase, step, action, micro_batch = self.recorder.place
        where = f"step {step}, " if phase == "train" else f"{phase}, " if phase != action else ""
        return where + (action if micro_batch is None else f"{action} {micro_batch}")

    def operation(
        self,
        kind: str,
        role: str,
        tensor: Tensor,
        op: str,
        peer: int = -1,
        rows: tuple[list[int], list[int]] | None = None,
    ) -> "Handle":
        """Record that an operation starts on so many bytes of that type. rows: as in all_to_all."""
        key = (role, kind, peer) if peer >= 0 else (role,)
        self._counts[key] = number = self._counts.get(key, 0) + 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        size = tensor.nbytes
        if rows is not None:
            size = tensor.shape[1:].numel() * tensor.itemsize  # of a row; the rows are unequal
        unequal = tuple(map(tuple, rows or ()))
        line = calling_line()
        place = self.place()
        self.events.append(Event(kind, role, number, size, dtype, op, peer, line, place, unequal))
        return _RecordedHandle(self, len(self.events) - 1)

    def wait(self, index: int) -> None:
        """Record that the stream waits for the operation at that index."""
        role = self.events[index].role
        self.events.append(Event("wait", role, index, line=calling_line(), place=self.place()))

    def stop(self, what: str, line: str, kind: str = READ) -> None:
        """Record that the host waits: for the device, for a copy, or to load a kernel."""
        self.events.append(Event(kind, op=what, line=line, place=self.place()))


class _RecordedHandle:
    def __init__(self, trace: Trace, index: int):
        self.trace = trace
        self.index = index
        self.waited = False

    def wait(self) -> None:
        if not self.waited:
            self.trace.wait(self.index)
        self.waited = True


def calling_line(depth: int = 2) -> str:
    """The innermost line of this project on the stack, `model.py:12`; empty if there is none."""
    frame: Any = sys._getframe(depth)
    while frame is not None:
        name = frame.f_code.co_filename
        own = name.startswith(str(ROOT)) and "site-packages" not in name[len(str(ROOT)) :]
        if own and not name.startswith(NEVER_NAMED):
            return f"{name[len(str(ROOT)) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class RecordingGroup(Group):
    """A group of several that records its operations and transfers nothing."""

    def __init__(self, ranks: tuple[int, ...], rank: int, handle: Any, role: str, trace: Trace):
        super().__init__(ranks, rank)
        self.handle = handle
        self.role = role
        self.trace = trace

    def all_reduce(self, tensor: Tensor, op=SUM) -> Handle:
        return self._record("all_reduce", tensor, str(op).removeprefix("RedOpType."))

    def reduce_scatter(self, output: Tensor, source: Tensor) -> Handle:
        self._check(output, source)
        return self._record("reduce_scatter", source, "SUM")

    def all_gather(self, output: Tensor, source: Tensor) -> Handle:
        self._check(source, output)
        return self._record("all_gather", output)

    def all_to_all(
        self, output: Tensor, source: Tensor, rows: tuple[list[int], list[int]] | None = None
    ) -> Handle:
        return self._record("all_to_all", source, rows=rows)

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        return self._record("broadcast", tensor, f"from {source}")

    def reduce(self, tensor: Tensor, to: int) -> Handle:
        return self._record("reduce", tensor, f"SUM to {to}")

    def send(self, tensor: Tensor, to: int) -> Handle:
        return self._record("send", tensor, peer=to)

    def receive(self, tensor: Tensor, source: int) -> Handle:
        return self._record("receive", tensor, peer=source)

    def _record(
        self,
        kind: str,
        tensor: Tensor,
        op: str = "",
        peer: int = -1,
        rows: tuple[list[int], list[int]] | None = None,
    ) -> Handle:
        if not tensor.is_contiguous():
            raise ValueError(f"{kind} of a tensor that is not contiguous, at {calling_line()}")
        return self.trace.operation(kind, self.role, tensor, op, peer, rows)

    def _check(self, part: Tensor, whole: Tensor) -> None:
        if (part.numel() * self.size, part.dtype) != (whole.numel(), whole.dtype):
            sides = f"{part.numel()} of {part.dtype} and {whole.numel()} of {whole.dtype}"
            raise ValueError(f"{sides} over {self.size} ranks, at {calling_line()}")


class LoneContext(Context):
    """A rank of a world that is not there."""

    @classmethod
    def of(cls, world: int, rank: int, per_node: int, device: torch.device, backend: str) -> Self:
        """The context of that rank of `world`, so many of which share a node."""
        local = Local(rank % per_node, per_node, per_node == world, 1, 0)
        launch = Launch("srun", rank, world)
        return cls(launch, rank, world, "", local, [], device, backend, 1, None)

    def own_row(self, rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        """The ranks of this rank's group, which are itself if it is in none of them."""
        return next((row for row in rows if self.rank in row), (self.rank,))


class RecordingContext(LoneContext):
    """Its groups record; `rows` has the ranks of every group by its role."""

    trace: Trace
    rows: dict[str, list[tuple[int, ...]]]
    has_handles: bool = False  # whether torch has (fake) process groups, which --zero 3 asks for

    def group(self, rows, role: str) -> Group:
        """This rank's group, which records unless it has no other rank."""
        self.rows[role] = list(rows)
        own = self.own_row(rows)
        handle = None
        if len(own) == 1:
            return Group(own)
        if self.has_handles:
            handle = torch.distributed.new_group(list(own))
        return RecordingGroup(own, own.index(self.rank), handle, role, self.trace)


def recording_context(world: int, rank: int, nodes: int) -> RecordingContext:
    """The context of a rank of `world` on so many nodes, which divide it, with a GPU for each."""
    per_node = world // nodes
    backend = "nccl" if world > 1 else "none"
    device = torch.device("cuda", rank % per_node)
    context = RecordingContext.of(world, rank, per_node, device, backend)
    context.trace = Trace(context.recorder)
    context.rows = {}
    return context


# ---- Stand-ins on a real device ------------------------------------------------------------------


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

    def all_to_all(
        self, output: Tensor, source: Tensor, rows: tuple[list[int], list[int]] | None = None
    ) -> Handle:
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
