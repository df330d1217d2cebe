"""Records what one rank of a world does with other ranks, and stands for these ranks.

    context = recording_context(world, rank=5, nodes=2)
    trainer.build(config, context)        # its groups write to the trace
    context.trace.events                  # every operation, wait and host read, in the host's order

A trace has roles and positions in place of ranks, so ranks that do the same have equal traces.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distributed.collectives import SUM, Group, Handle
from distributed.context import Context
from distributed.launch import Launch, Local
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


class RecordingContext(Context):
    """A rank of a world that is not there, whose groups record.

    rows: the ranks of every group by its role.
    """

    trace: Trace
    rows: dict[str, list[tuple[int, ...]]]
    has_handles: bool = False  # whether torch has (fake) process groups, which --zero 3 asks for

    def group(self, rows, role: str) -> Group:
        """This rank's group, which records unless it has no other rank."""
        self.rows[role] = list(rows)
        own = next((row for row in rows if self.rank in row), (self.rank,))
        handle = None
        if len(own) == 1:
            return Group(own)
        if self.has_handles:
            handle = torch.distributed.new_group(list(own))
        return RecordingGroup(own, own.index(self.rank), handle, role, self.trace)


def recording_context(world: int, rank: int, nodes: int) -> RecordingContext:
    """The context of a rank of `world` on so many nodes, which divide it, with a GPU for each."""
    per_node = world // nodes
    local = Local(rank % per_node, per_node, per_node == world, 1, 0)
    launch = Launch("srun", rank, world)
    device = torch.device("cuda", rank % per_node)
    backend = "nccl" if world > 1 else "none"
    context = RecordingContext(launch, rank, world, "", local, [], device, backend, 1, None)
    context.trace = Trace(context.recorder)
    context.rows = {}
    return context
