"""One rank of a world that is not there, on a real device: its collectives are local stand-ins.

    context = emulated_context(world, rank=5, device=torch.device("cpu"))
    trainer.build(config, context)
    context.ledger.operations         # what would have crossed ranks since `context.ledger.take()`

A stand-in gives a result of the right shape out of the rank's own values, is counted, and the time
that it takes is kept apart: the link model says what the operation takes (links.py).
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from distributed.collectives import SUM, Group, Handle
from distributed.context import Context
from distributed.launch import Launch, Local
from distributed.placement import Place

# Standard deviation of what arrives from a neighbouring stage: far from zero, which denormal
# numbers would make slow, and from overflow.
ACTIVATION, GRADIENT = 1.0, 1e-3


class Operation(NamedTuple):
    """What would have crossed ranks: the kind as Group names it, the group's role, its number of
    ranks and their distance in the world, and bytes as Group counts them.
    """

    kind: str
    role: str
    ranks: int
    stride: int
    bytes: int


class Ledger:
    """Counts operations, and the seconds that their stand-ins took of the host."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.seconds = 0.0

    def take(self) -> tuple[list[Operation], float]:
        """The operations and the stand-ins' seconds since the last call."""
        taken = self.operations, self.seconds
        self.operations, self.seconds = [], 0.0
        return taken


class _Done:
    def wait(self) -> None:
        """Return: a stand-in is done when it returns."""


class StandInGroup(Group):
    """A group whose other members do not exist.

    all_reduce leaves the tensor, reduce_scatter copies this rank's slice, all_gather repeats the
    own source, or leaves an output that contains it; receive fills with normal numbers.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, role: str, ledger: Ledger):
        super().__init__(ranks, rank)
        self.role, self.ledger = role, ledger
        self._received: dict[tuple, Tensor] = {}

    def all_reduce(self, tensor: Tensor, op=SUM) -> Handle:
        return self._stand_in("all_reduce", tensor.nbytes, lambda: None)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> Handle:
        def copy() -> None:
            output.copy_(self.shard(source).view_as(output))

        return self._stand_in("reduce_scatter", source.nbytes, copy)

    def all_gather(self, output: Tensor, source: Tensor) -> Handle:
        def repeat() -> None:
            rows = output.view(self.size, -1)
            # Weights are gathered in place: the other replicas' are here, as they were drawn.
            if rows[self.rank].data_ptr() != source.data_ptr():
                rows.copy_(source.reshape(1, -1).expand_as(rows))

        return self._stand_in("all_gather", output.nbytes, repeat)

    def send(self, tensor: Tensor, to: int) -> Handle:
        return self._stand_in("send", tensor.nbytes, lambda: None)

    def receive(self, tensor: Tensor, source: int) -> Handle:
        return self._stand_in("receive", tensor.nbytes, lambda: tensor.copy_(self._arrived(tensor)))

    def _arrived(self, tensor: Tensor) -> Tensor:
        key = tuple(tensor.shape), tensor.dtype
        if key not in self._received:
            scale = GRADIENT if self.role == "backward" else ACTIVATION
            self._received[key] = torch.randn_like(tensor).mul_(scale)
        return self._received[key]

    def _stand_in(self, kind: str, size: int, run: Callable[[], object]) -> Handle:
        began = time.perf_counter()
        run()
        if self.size > 1:
            stride = self.ranks[1] - self.ranks[0]
            self.ledger.operations.append(Operation(kind, self.role, self.size, stride, size))
        self.ledger.seconds += time.perf_counter() - began
        return _Done()


class EmulatedContext(Context):
    """A rank of a world that is not there, whose groups are stand-ins."""

    ledger: Ledger

    def group(self, rows, role: str) -> Group:
        """This rank's group: a stand-in."""
        own = next((row for row in rows if self.rank in row), (self.rank,))
        return StandInGroup(own, own.index(self.rank), role, self.ledger)


def emulated_context(world: int, rank: int, device: torch.device) -> EmulatedContext:
    """The context of a rank of `world`, on a device that exists."""
    places = [Place("emulated", r, str(device), None, (0,)) for r in range(world)]
    local = Local(rank, world, True, 1, 0)
    where = (Launch("srun", rank, world), rank, world, "emulated", local, places)
    context = EmulatedContext(*where, device, "none", torch.get_num_threads(), None)
    context.ledger = Ledger()
    return context
