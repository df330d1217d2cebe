"""What NCCL demands of the hosts, as a simulation: lazy connections of point-to-point messages.

Two ranks connect at their first message of a group and direction, and the hosts of both are blocked
until the other one is there. Later messages block no host.
"""

from typing import NamedTuple

import torch


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
        self.forward = RecordedGroup("forward", rank, ranks, self.trace)
        self.backward = RecordedGroup("backward", rank, ranks, self.trace)
        self.pp, self.recorder = self.forward, recorder
        self.tp = RecordedGroup("tp", 0, 1, [])


class Passing(torch.nn.Module):
    """The smallest stage: x times a weight, and on the last stage the sum."""

    def __init__(self, last: bool):
        super().__init__()
        self.last, self.weight = last, torch.nn.Parameter(torch.ones(1))

    def forward(self, x, labels=None):
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
