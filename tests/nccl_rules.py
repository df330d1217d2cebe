"""A mesh whose groups write down what emulator/matching.py takes, the simulation of NCCL's rules.

pipeline.mesh = StreamMesh(rank, ranks, recorder)
stuck_streams(meshes)       which ranks wait for one another for ever, or None
"""

import torch

from distributed.mesh import Mesh
from tools.emulator.matching import RunTraces, deadlock
from tools.emulator.recording import LOAD, Event
from watchdog.flight_recorder import FlightRecorder


class StreamGroup:
    """A group whose messages and waits for them are written into its rank's list of events."""

    def __init__(self, role: str, rank: int, size: int, events: list[Event], recorder=None):
        self.role, self.rank, self.size, self.events = role, rank, size, events
        self.counts: dict[tuple[str, int], int] = {}
        self.loads = bool(getattr(recorder, "every", False))

    def send(self, tensor, to):
        return self._message("send", to)

    def receive(self, tensor, source):
        tensor.zero_()
        return self._message("receive", source)

    def _message(self, kind: str, peer: int) -> "StreamWait":
        if self.loads:  # the buffer's allocation waits for the device
            self.events.append(Event(LOAD, place="a message's buffer"))
        number = self.counts[kind, peer] = self.counts.get((kind, peer), 0) + 1
        self.events.append(Event(kind, self.role, number, peer=peer))
        return StreamWait(self.events, len(self.events) - 1)


class StreamWait:
    """The handle of a message: the compute stream waits for it."""

    def __init__(self, events: list[Event], index: int):
        self.events, self.index = events, index

    def wait(self) -> None:
        self.events.append(Event("wait", number=self.index))


class StreamMesh:
    """A mesh for one of `ranks` pipeline ranks. events: what it did."""

    channel = Mesh.channel

    roles = ("forward", "backward")

    def __init__(self, rank: int, ranks: int, recorder):
        self.events: list[Event] = []
        self.forward, self.backward = (
            StreamGroup(role, rank, ranks, self.events, recorder) for role in self.roles
        )
        self.pp, self.recorder = self.forward, recorder
        self.tp = StreamGroup("tp", 0, 1, self.events)


class LoadingRecorder(FlightRecorder):
    """The recorder of a rank that waits for its whole device in its actions.

    every: in every action, as when an expert's products load a kernel for each number of rows, or
    the allocator tries again; else in the first action of each kind of a step, as a kernel's first
    launch does.
    """

    def __init__(self, every: bool = False):
        super().__init__()
        self.every = every
        self.events: list[Event] = []  # on the groups of the rank's mesh
        self.loaded: set[str] = set()

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self.loaded.clear()

    def at(self, action: str, micro_batch: int | None = None) -> None:
        super().at(action, micro_batch)
        if self.every or action not in self.loaded:
            self.loaded.add(action)
            self.events.append(Event(LOAD, place=f"{action} {micro_batch}"))


def stuck_streams(meshes: list[StreamMesh]) -> str | None:
    """Which ranks wait for one another for ever, if a send ends only with its receive."""
    rows = {role: [tuple(range(len(meshes)))] for mesh in meshes for role in mesh.roles}
    return deadlock(RunTraces(rows, [mesh.events for mesh in meshes]))


class Passing(torch.nn.Module):
    """The smallest stage: x times a weight, and on the last stage the sum."""

    def __init__(self, last: bool):
        super().__init__()
        self.last, self.weight = last, torch.nn.Parameter(torch.ones(1))

    def forward(self, x, batch=None):
        return (x * self.weight).sum() if self.last else x * self.weight
