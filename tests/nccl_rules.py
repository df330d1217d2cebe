"""What NCCL demands of the hosts, as a simulation: lazy connections of point-to-point messages.

Two ranks connect at their first message of a group and direction, and the hosts of both are blocked
until the other one is there. Later messages block no host. StreamMesh records what the simulation
of emulator/nccl_rules.py takes: messages that hold up those behind them on their group's stream.
"""

from typing import NamedTuple

import torch

from distributed.mesh import CHANNELS, Mesh
from emulator.matching import World
from emulator.nccl_rules import deadlock
from emulator.recording import LOAD, Event
from watchdog.flight_recorder import FlightRecorder


class Message(NamedTuple):
    """One end of a message as its host started it; sends: whether it is the sender's end."""

    group: str
    sender: int
    receiver: int
    sends: bool


class RecordedGroup:
    """A group that communicates nothing and writes down what its rank's host starts."""

    def __init__(self, name: str, rank: int, size: int, trace: list[Message]):
        self.name, self.rank, self.size, self.trace = name, rank, size, trace

    def send(self, tensor, to):
        self.trace.append(Message(self.name, self.rank, to, True))
        return self

    def receive(self, tensor, source):
        tensor.zero_()
        self.trace.append(Message(self.name, source, self.rank, False))
        return self

    def wait(self):
        """What `send` and `receive` return is finished at once."""


class RecordedMesh:
    """What a pipeline asks of a mesh, for one of `ranks` pipeline ranks; `trace`: its messages."""

    def __init__(self, rank: int, ranks: int, recorder):
        self.trace: list[Message] = []
        self.groups = {kind: RecordedGroup(kind, rank, ranks, self.trace) for kind in "FB"}
        self.pp, self.recorder = self.groups["F"], recorder
        self.tp = RecordedGroup("tp", 0, 1, [])

    def channel(self, kind, source, to):
        return self.groups[kind]


class StreamGroup:
    """A group whose messages and waits for them are written into its rank's list of events."""

    def __init__(self, role: str, rank: int, size: int, events: list[Event]):
        self.role, self.rank, self.size, self.events = role, rank, size, events
        self.counts: dict[tuple[str, int], int] = {}

    def send(self, tensor, to):
        return self._message("send", to)

    def receive(self, tensor, source):
        tensor.zero_()
        return self._message("receive", source)

    def _message(self, kind: str, peer: int) -> "StreamWait":
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
    """A mesh for one of `ranks` pipeline ranks; channels: as of Mesh. events: what it did."""

    channel = Mesh.channel

    def __init__(self, rank: int, ranks: int, recorder, channels: bool):
        self.events: list[Event] = []
        self.roles = [f"{kind} {name}" if channels else kind for kind in "FB" for name in CHANNELS]
        groups = {role: StreamGroup(role, rank, ranks, self.events) for role in self.roles}
        named = [groups[role] for role in self.roles]
        self._channels = {"F": named[:4], "B": named[4:]}
        self.pp, self.recorder = named[0], recorder
        self.tp = RecordedGroup("tp", 0, 1, [])


class LoadingRecorder(FlightRecorder):
    """The recorder of a rank that loads a kernel in its first action of each kind of a step."""

    def __init__(self):
        super().__init__()
        self.events: list[Event] = []  # those of the rank's mesh
        self.loaded: set[str] = set()

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self.loaded.clear()

    def at(self, action: str, micro_batch: int | None = None) -> None:
        super().at(action, micro_batch)
        if action not in self.loaded:
            self.loaded.add(action)
            self.events.append(Event(LOAD, place=f"{action} {micro_batch}"))


def stuck_streams(meshes: list[StreamMesh]) -> str | None:
    """Which ranks wait for one another for ever, if a send ends only with its receive."""
    rows = {role: [tuple(range(len(meshes)))] for mesh in meshes for role in mesh.roles}
    return deadlock(World(rows, [mesh.events for mesh in meshes]))


class Passing(torch.nn.Module):
    """The smallest stage: x times a weight, and on the last stage the sum."""

    def __init__(self, last: bool):
        super().__init__()
        self.last, self.weight = last, torch.nn.Parameter(torch.ones(1))

    def forward(self, x, batch=None):
        return (x * self.weight).sum() if self.last else x * self.weight


def blocked_hosts(traces: list[list[Message]]) -> list[str]:
    """The hosts that wait for ever while connecting, each with its message; none is right."""
    at, connected = [0] * len(traces), set()
    while True:
        moved = False
        for rank, trace in enumerate(traces):
            while at[rank] < len(trace):
                message = trace[at[rank]]
                pair, other = message[:3], message.receiver if message.sends else message.sender
                if pair not in connected:
                    here = traces[other][at[other] : at[other] + 1]
                    if here != [message._replace(sends=not message.sends)]:
                        break
                    connected.add(pair)
                at[rank], moved = at[rank] + 1, True
        if not moved:
            break
    stuck = [(rank, trace[at[rank]]) for rank, trace in enumerate(traces) if at[rank] < len(trace)]
    return [f"rank {rank}: {message}" for rank, message in stuck]
