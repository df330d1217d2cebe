"""Records the communication of one rank with the other ranks, which do not exist.

    context = recording_context(world, rank=5, nodes=2)
    trainer.build(config, context)        # its groups write to the trace
    context.trace.events                  # every operation, wait and host read, in the host's order

A trace names groups by their role, such as "dp", and ranks by their position in the group. So ranks
that do the same have equal traces. An event has a place, which is the step, the action and the
micro-batch, and a line, which is the source line of the engine that caused it.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distributed.collectives import SUM, Group, Handle
from distributed.context import Context
from distributed.launch import Launch, Local
from distributed.placement import Place
from watchdog.flight_recorder import FlightRecorder

ROOT = Path(__file__).resolve().parents[2]
# An event names the source line that calls functions of these folders, and never a line in them.
NEVER_NAMED = (str(ROOT / "tools" / "emulator"), str(ROOT / "distributed"))
MESSAGES = ("send", "receive")
READ = "host read"  # the host waits for the device's stream
COPY = "copy"  # a copy out of memory that is not pinned: the host waits for this copy alone
LOAD = "load"  # a kernel is loaded at its first launch: the host waits for all of the GPU's streams


class Event(NamedTuple):
    """An operation of a group, a wait for an operation, or a stop of the host.

    kind: all_reduce, reduce_scatter, all_gather, broadcast, reduce, all_to_all, send, receive,
    wait, READ, COPY or LOAD. role: the role of the group.
    number: counts, from 1, the collectives of the group, or the messages with `peer` in this
    direction; for a wait, the index of its operation in the trace.
    bytes, dtype: size and type of the tensor.
    op: the operator of a reduction, the root of a broadcast or reduce, or the reason of a stop.
    peer: the position of a message's other rank in the group, else -1.
    line: the source line of the caller. place: step, action and micro-batch.
    rows: for an all_to_all with unequal blocks, the numbers of rows that come from each member, and
    those that go to each member; then `bytes` is the size of one row.
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


class RankTrace:
    """The events of one rank, in the order of its host."""

    def __init__(self, recorder: FlightRecorder):
        """Begin without events; `recorder` tells what the rank does when an event happens."""
        self.recorder = recorder
        self.events = list[Event]()
        # The number of operations so far: collectives by (role,), messages by (role, kind, peer).
        self._counts: dict[tuple, int] = {}

    def place(self) -> str:
        """Return what the rank does now: step, action and micro-batch, as in "step 2, F 3".

        Outside of training steps the phase of the run stands for the step, as in "evaluate, F 3".
        """
        phase, step, action, micro_batch = self.recorder.place
        where = ""
        if phase == "train":
            where = f"step {step}, "
        elif phase != action:  # a phase without actions is named once
            where = f"{phase}, "
        if micro_batch is None:
            return where + action
        return f"{where}{action} {micro_batch}"

    def operation(
        self,
        kind: str,
        role: str,
        tensor: Tensor,
        op: str,
        peer: int = -1,
        rows: tuple[list[int], list[int]] | None = None,
    ) -> "Handle":
        """Record that an operation on `tensor` starts, and return its handle.

        The arguments are the fields of `Event`; rows: as in Group.all_to_all.
        """
        # Messages are counted by peer and direction, the collectives of a group together.
        key = (role, kind, peer) if peer >= 0 else (role,)
        self._counts[key] = number = self._counts.get(key, 0) + 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        size = tensor.nbytes
        if rows is not None:
            size = tensor.shape[1:].numel() * tensor.itemsize  # bytes of one row
        unequal = tuple(map(tuple, rows or ()))
        line = calling_line()
        place = self.place()
        self.events.append(Event(kind, role, number, size, dtype, op, peer, line, place, unequal))
        return _RecordedHandle(self, len(self.events) - 1)

    def wait(self, index: int) -> None:
        """Record that the stream waits for the operation whose event has this index in `events`."""
        role = self.events[index].role
        self.events.append(Event("wait", role, index, line=calling_line(), place=self.place()))

    def stop(self, what: str, line: str, kind: str = READ) -> None:
        """Record that the host waits for the device; called by the meter of the fake GPU.

        what: the reason, in words. line: the source line. kind: READ, COPY or LOAD.
        """
        self.events.append(Event(kind, op=what, line=line, place=self.place()))


class _RecordedHandle:
    """Stands for torch's handle of an operation, and records the first wait for the operation."""

    def __init__(self, trace: RankTrace, index: int):
        """Take the index of the operation's event in the trace; nothing has waited for it yet."""
        self.trace = trace
        self.index = index
        self.waited = False

    def wait(self) -> None:
        if not self.waited:
            self.trace.wait(self.index)
        self.waited = True


def calling_line(depth: int = 2) -> str:
    """Return the innermost source line of this project on the stack, as in "model.py:12", or "".

    Lines in the folders of NEVER_NAMED do not count. depth: the number of innermost frames to pass
    over.
    """
    frame: Any = sys._getframe(depth)
    root = str(ROOT)
    while frame is not None:
        name = frame.f_code.co_filename
        inside = name.removeprefix(root)
        in_project = name.startswith(root) and "site-packages" not in inside
        if in_project and not name.startswith(NEVER_NAMED):
            return f"{inside[1:]}:{frame.f_lineno}"  # the path without its first slash
        frame = frame.f_back
    return ""


class RecordingGroup(Group):
    """A group of several ranks that records its operations and transfers nothing.

    handle: torch's (fake) process group, or None. role: the name of the group in events.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, handle: Any, role: str, trace: RankTrace):
        """Make a group whose collectives are written into `trace` and not done.

        ranks: the group's members in the world. rank: this rank's position among them. handle:
        torch's (fake) process group, or None. role: the group's name in the events, such as "tp".
        """
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
        """Record an operation in the trace, and return its handle.

        op: the operator or the root. peer: a message's other rank. rows: see Group.all_to_all.
        Raise ValueError if the tensor is not contiguous, because torch's groups refuse it.
        """
        if not tensor.is_contiguous():
            raise ValueError(f"{kind} of a tensor that is not contiguous, at {calling_line()}")
        return self.trace.operation(kind, self.role, tensor, op, peer, rows)

    def _check(self, part: Tensor, whole: Tensor) -> None:
        """Raise ValueError unless `whole` has the type of `part`, and `size` times its elements.

        part: one rank's part of the tensor `whole` in a reduce-scatter or an all-gather.
        """
        if (part.numel() * self.size, part.dtype) != (whole.numel(), whole.dtype):
            sides = f"{part.numel()} of {part.dtype} and {whole.numel()} of {whole.dtype}"
            raise ValueError(f"{sides} over {self.size} ranks, at {calling_line()}")


class RecordingContext(Context):
    """The context of a rank whose groups record operations; there are no other processes.

    trace: the rank's trace. rows: the ranks of every group, by role.
    """

    trace: RankTrace
    rows: dict[str, list[tuple[int, ...]]]
    has_handles: bool = False  # whether groups need torch's (fake) process groups, as for --zero 3

    def group(self, rows, role: str) -> Group:
        """Return this rank's group, and keep the ranks of all groups of this role.

        The mesh calls this method for each role. rows: the ranks of each group of the role. A group
        that has this rank only does nothing, so it is not recorded.
        """
        self.rows[role] = list(rows)
        # A rank that is in no group of the role is alone.
        members = next((row for row in rows if self.rank in row), (self.rank,))
        handle = None
        if len(members) == 1:
            return Group(members)
        if self.has_handles:
            handle = torch.distributed.new_group(list(members))
        return RecordingGroup(members, members.index(self.rank), handle, role, self.trace)


def recording_context(world: int, rank: int, nodes: int) -> RecordingContext:
    """Return the context of a rank in a world that does not exist, with a GPU for each rank.

    world: the number of ranks. nodes: the number of nodes, which divides `world`.
    """
    per_node = world // nodes
    nodes_of_ranks = [f"node{other // per_node}" for other in range(world)]
    places = [Place(node, 0, "cuda", None, ()) for node in nodes_of_ranks]
    # The last two values say that a rank shares its cores with no other rank: it is one of 1 ranks
    # on these cores, and has the number 0 among them.
    local = Local(rank % per_node, per_node, per_node == world, 1, 0)
    launch = Launch("srun", rank, world)
    device = torch.device("cuda", rank % per_node)
    backend = "nccl" if world > 1 else "none"
    node = nodes_of_ranks[rank]
    context = RecordingContext(launch, rank, world, node, local, places, device, backend, 1, None)
    context.trace = RankTrace(context.recorder)
    context.rows = {}
    return context
