"""A context of one rank of any world, without process groups: for what is built and not run."""

import torch

from distributed.collectives import Group
from watchdog.flight_recorder import FlightRecorder


class FakeContext:
    """That rank of so many. made: role and rows of the groups that were asked for, in order."""

    device, blocking = torch.device("cpu"), False

    def __init__(self, size: int, rank: int = 0):
        self.size, self.rank, self.recorder = size, rank, FlightRecorder()
        self.nodes = ["a"] * size
        self.made: list[tuple[str, list]] = []

    def group(self, rows, role):
        """The rank's group, which cannot communicate."""
        self.made.append((role, list(rows)))
        own = next((row for row in rows if self.rank in row), (self.rank,))
        return Group(own, own.index(self.rank))
