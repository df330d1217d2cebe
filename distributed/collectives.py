"""Groups of ranks and their collectives: reduce, gather, scatter, broadcast, all-to-all, messages.

All data that crosses ranks in a training step goes through `Group`, over NCCL on GPUs and over
gloo on CPUs (or on GPUs that ranks share: then through host memory).

In gloo's rings every rank must be scheduled once per hop, and oversubscribed cores make each hop
slow. So over gloo a message that is short, or goes to more than two ranks, is one all-to-all and a
local sum in rank order: one hop, and the same bits on every rank
(benchmarks/results/gloo-collectives.md). A longer gather is a broadcast by every rank, in place;
between two ranks a reduce-scatter is one message each way.

A wait that follows at once is written `group.at_once.all_reduce(tensor).wait()`: over NCCL the
collective then runs on the current stream. Elsewhere it is the same group.

A group with a log records every call before it starts and while it is waited for
(watchdog/flight_recorder.py), so that the rank that causes a hang can be found.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from watchdog.flight_recorder import GroupLog

SUM = dist.ReduceOp.SUM
MAX = dist.ReduceOp.MAX

# torch 2.13 renamed these two and warns about the old names, which are all that 2.11 has.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Over gloo one hop beats the rings for messages of SHORT_BYTES, and between more than two ranks
# for up to EXCHANGE_BYTES sent by each.
SHORT_BYTES = 2**16
EXCHANGE_BYTES = 4 * 2**20


class Handle(Protocol):
    """A communication that has been started."""

    def wait(self) -> None:
        """Return when its output may be used and its input overwritten."""


@dataclass
class _Pending:
    """A communication, if any was needed, and the local step, if any, that completes it."""

    work: Any = None
    complete: Callable[[], object] | None = None
    sent: Tensor | None = None  # kept alive until the wait

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        if self.complete is not None:
            self.complete()
        self.work = self.complete = self.sent = None


@dataclass
class _All:
    """Several communications at once."""

    works: list

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass
class _OnCurrentStream:
    """A collective that starts where it is waited for, on the current stream."""

    run: Callable[[], object]

    def wait(self) -> None:
        self.run()


class Group:
    """The ranks of one axis as this rank sees them. A group of one communicates nothing.

    ranks: the members' ranks in the world. rank: this rank's position among them. handle: torch's
    process group. group_log: records the operations. blocking: wait for every collective where it
    starts, slower and easier to debug. On a GPU a handle's `wait()` makes the current stream wait,
    not the host. at_once: this group, for collectives whose `wait()` follows at once. Over NCCL
    they start in their wait, on the current stream, and no events lead to NCCL's stream and back.
    """

    def __init__(
        self,
        ranks: tuple[int, ...] = (0,),
        rank: int = 0,
        handle: dist.ProcessGroup | None = None,
        group_log: GroupLog | None = None,
        blocking: bool = False,
    ):
        self.ranks = ranks
        self.rank = rank
        self.handle = handle
        self.group_log = group_log
        self.blocking = blocking
        self.size = len(ranks)
        self._gloo = handle is not None and dist.get_backend(handle) == "gloo"
        self._on_current_stream = False
        self.at_once = self
        if handle is not None and not self._gloo and not blocking:
            self.at_once = copy.copy(self)
            self.at_once._on_current_stream = True

    def shard(self, tensor: Tensor) -> Tensor:
        """This rank's slice of `tensor` along dimension 0, which the group's size must divide."""
        rows = tensor.shape[0] // self.size
        return tensor[self.rank * rows : (self.rank + 1) * rows]

    def balanced_shard(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's two of 2 x size equal chunks along a dimension: the one of its own number,
        and as far from the end.
        """
        if self.size == 1:
            return tensor
        chunks = tensor.chunk(2 * self.size, dim)
        return torch.cat([chunks[self.rank], chunks[-1 - self.rank]], dim)

    def all_reduce(self, tensor: Tensor, op=SUM) -> Handle:
        """Sum (or maximum) of `tensor` over the group, in place; equal bits on every rank."""
        if self.size == 1:
            return _Pending()
        return self._start("all_reduce", tensor.nbytes, self._all_reduce, tensor, op)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> Handle:
        """`output` = this rank's slice, along dimension 0, of the sum of `source` over the group.

        `output` may be that slice of `source` itself; the rest of `source` is then undefined.
        """
        return self._start("reduce_scatter", source.nbytes, self._reduce_scatter, output, source)

    def all_gather(self, output: Tensor, source: Tensor) -> Handle:
        """`output` = every rank's `source`, joined along dimension 0 in group order.

        `source` may be this rank's slice of `output`.
        """
        return self._start("all_gather", output.nbytes, self._all_gather, output, source)

    def all_to_all(self, output: Tensor, source: Tensor) -> Handle:
        """Block j of `output` = block `rank` of member j's `source`.

        Both are contiguous and of one shape, cut along dimension 0 into a block for each member;
        the group's size must divide it. They must not overlap.
        """
        return self._start("all_to_all", source.nbytes, self._all_to_all, output, source)

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        """`tensor` = that of the group's rank `source`; it must stay unchanged there until the
        handle's wait.
        """
        if self.size == 1:
            return _Pending()
        return self._start("broadcast", tensor.nbytes, self._broadcast, tensor, source)

    def reduce(self, tensor: Tensor, to: int) -> Handle:
        """Sum of `tensor` over the group, in place, on its rank `to`; undefined on the others."""
        if self.size == 1:
            return _Pending()
        return self._start("reduce", tensor.nbytes, self._reduce, tensor, to)

    def send(self, tensor: Tensor, to: int) -> Handle:
        """Send to the group's rank `to`; the tensor must stay unchanged until the handle's wait."""
        record = self.group_log.enter_send(tensor.nbytes, to) if self.group_log else None
        tensor = tensor.cpu() if self._gloo else tensor
        sending = dist.isend(tensor, self.ranks[to], group=self.handle)
        work = _Pending(sending, sent=tensor)
        return record.under_way(work) if record else work

    def receive(self, tensor: Tensor, source: int) -> Handle:
        """Receive into `tensor` from the group's rank `source`."""
        record = self.group_log.enter_receive(tensor.nbytes, source) if self.group_log else None
        host = torch.empty_like(tensor, device="cpu") if self._gloo and tensor.is_cuda else tensor
        receiving = dist.irecv(host, self.ranks[source], group=self.handle)
        work = _Pending(receiving, None if host is tensor else lambda: tensor.copy_(host))
        return record.under_way(work) if record else work

    def values(self, tensor: Tensor) -> list:
        """`tensor.tolist()`, with the host's wait for the device on record."""
        if self.group_log is None or not tensor.is_cuda:
            return tensor.tolist()
        with self.group_log.recorder.waiting_for("device"):
            return tensor.tolist()

    # -- the operations by backend ----------------------------------------------------------

    def _start(self, kind: str, size: int, run: Callable, output: Tensor, other: Any) -> Handle:
        """Record an operation of `size` bytes and start it: `run(output, other)`."""
        if self.size == 1:
            output.copy_(other)
            return _Pending()
        record = self.group_log.enter(kind, size) if self.group_log else None
        handle = run(output, other)
        if record:
            handle = record.under_way(handle)
        if self.blocking:
            handle.wait()
        return handle

    def _collective(self, function: Callable, *arguments: Any) -> Handle:
        """A collective of torch: started on the backend's own stream, or to start in its wait."""
        if self._on_current_stream:
            return _OnCurrentStream(lambda: function(*arguments, group=self.handle))
        return function(*arguments, group=self.handle, async_op=True)

    def _all_reduce(self, tensor: Tensor, op) -> Handle:
        if not self._gloo:
            return self._collective(dist.all_reduce, tensor, op)
        if not self._prefers_one_hop(tensor.nbytes):
            host = tensor.cpu()  # the tensor itself if it is on the CPU
            work = self._collective(dist.all_reduce, host, op)
            return work if host is tensor else _Pending(work, lambda: tensor.copy_(host))
        work, received = self._one_hop(tensor.reshape(1, -1))
        reduce = torch.sum if op == SUM else torch.amax
        return _Pending(work, lambda: tensor.copy_(reduce(received, 0).view_as(tensor)))

    def _reduce_scatter(self, output: Tensor, source: Tensor) -> Handle:
        if not self._gloo:
            return self._collective(_reduce_scatter, output, source)
        if self.size == 2:
            return self._add_of_other(output, source.reshape(2, -1))
        work, received = self._one_hop(source.reshape(self.size, -1))
        return _Pending(work, lambda: output.copy_(received.sum(0).view_as(output)))

    def _add_of_other(self, output: Tensor, halves: Tensor) -> Handle:
        """Of two ranks: each sends the other's half, and keeps no more than what it receives."""
        other, sent = self.ranks[1 - self.rank], halves[1 - self.rank].cpu()
        received = torch.empty_like(sent)
        sending = dist.isend(sent, other, group=self.handle)
        works = [sending, dist.irecv(received, other, group=self.handle)]

        def add() -> None:
            both = halves[self.rank].view_as(output), received.to(output.device).view_as(output)
            torch.add(*both, out=output)

        return _Pending(_All(works), add, sent)

    def _all_gather(self, output: Tensor, source: Tensor) -> Handle:
        if not self._gloo:
            return self._collective(_all_gather, output, source)
        if not self._prefers_one_hop(source.nbytes) and not source.is_cuda:
            # In place: gloo's own gathers in a copy of the whole.
            parts = output.view(self.size, -1)
            if parts[self.rank].data_ptr() != source.data_ptr():
                parts[self.rank].copy_(source.view(-1))
            return _All([self._broadcast(part, i) for i, part in enumerate(parts)])
        work, received = self._one_hop(source.reshape(1, -1))
        return _Pending(work, lambda: output.copy_(received.view_as(output)))

    def _all_to_all(self, output: Tensor, source: Tensor) -> Handle:
        sent = source.cpu() if self._gloo else source  # the source itself if it is on the CPU
        received = torch.empty_like(sent) if self._gloo and output.is_cuda else output
        work = self._collective(dist.all_to_all_single, received, sent)
        complete = None if received is output else lambda: output.copy_(received)
        return _Pending(work, complete, sent)

    def _broadcast(self, tensor: Tensor, source: int) -> Handle:
        return self._collective(dist.broadcast, tensor, self.ranks[source])

    def _reduce(self, tensor: Tensor, to: int) -> Handle:
        host = tensor.cpu() if self._gloo else tensor  # the tensor itself if it is on the CPU
        work = self._collective(dist.reduce, host, self.ranks[to])
        return work if host is tensor else _Pending(work, lambda: tensor.copy_(host))

    def _prefers_one_hop(self, message: int) -> bool:
        """Whether sending `message` bytes to every other member beats gloo's rings."""
        sent = message * (self.size - 1)
        return message <= SHORT_BYTES or (self.size > 2 and sent <= EXCHANGE_BYTES)

    def _one_hop(self, rows: Tensor) -> tuple[Handle, Tensor]:
        """Send row i, or the one row, to member i; the handle, and member j's row j, on the CPU."""
        sent = rows.expand(self.size, -1).cpu().contiguous()
        received = torch.empty_like(sent)
        return self._all_to_all(received, sent), received


class _SumBothWays(torch.autograd.Function):
    """All-reduce forward and backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        ctx.mark_dirty(x)
        group.at_once.all_reduce(x).wait()
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        ctx.group.at_once.all_reduce(grad).wait()
        return grad, None


def sum_both_ways(x: Tensor, group: Group) -> Tensor:
    """The sum of every rank's x, which changes in place, for each to use in its own part: gradients
    are summed too.
    """
    return x if group.size == 1 else _SumBothWays.apply(x, group)
