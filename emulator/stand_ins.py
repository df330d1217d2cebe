"""One rank of a world that is not there, on a real device: its collectives are local stand-ins.

    context = emulated_context(world, rank=5, device=torch.device("cpu"))
    trainer.build(config, context)
    operations, seconds = context.ledger.take()      # what would have crossed ranks

A stand-in gives a result of the right shape out of the rank's own values and is counted; its own
seconds are kept apart, for the links say what the operation takes (links.py).
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from distributed.collectives import SUM, Group, Handle
from emulator.recording import LoneContext

# Standard deviation of what arrives from a neighbouring stage: far from zero, near which denormal
# numbers would be slow, and from overflow.
ACTIVATION, GRADIENT = 1.0, 1e-3


class Operation(NamedTuple):
    """What would have crossed ranks: kind and bytes as Group counts them, role and ranks of it."""

    kind: str
    role: str
    ranks: tuple[int, ...]
    bytes: int


class Ledger:
    """Operations, and the seconds that their stand-ins took of the host."""

    def __init__(self) -> None:
        self.operations, self.seconds = list[Operation](), 0.0

    def take(self) -> tuple[list[Operation], float]:
        """What came since the last call."""
        taken = self.operations, self.seconds
        self.operations, self.seconds = [], 0.0
        return taken


class StandInGroup(Group):
    """A group whose other members do not exist.

    all_reduce leaves the tensor, reduce_scatter copies this rank's slice, all_gather repeats the
    source, or leaves an output that contains it, all_to_all gives the source; receive fills with
    normal numbers.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, role: str, ledger: Ledger):
        super().__init__(ranks, rank)
        self.role, self.ledger = role, ledger
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
