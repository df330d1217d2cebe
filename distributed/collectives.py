"""Groups of ranks and what they do together: reduce, gather, scatter, send.

Everything that crosses ranks while a model trains goes through `Group`, over NCCL on GPUs and
over gloo on CPUs (or on GPUs that ranks share: then through host memory). Each call returns a
handle; the result may be used after its `wait()`.

gloo's rings take one turn of every rank per hop, and cores that ranks share make turns dear. So
over gloo what is short, or goes to more than two ranks, is one all-to-all and a local sum in rank
order: one hop, and the same bits on every rank (benchmarks/results/gloo-collectives.md).

Every call is on record before it starts and while it is waited for (records.py), if the group was
given a book; that is how a rank that hangs can be told from those that wait for it.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from watchdog.flight_recorder import GroupLog

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX

# torch 2.13 renamed these two and warns about the old names, which are all that 2.11 has.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Over gloo one hop beats the rings for messages of SHORT_BYTES, and between more than two ranks
# for up to EXCHANGE_BYTES sent by each.
SHORT_BYTES = 2**16
EXCHANGE_BYTES = 4 * 2**20


class Handle(Protocol):
    """Something under way."""

    def wait(self) -> None:
        """Return when its result may be used, or what it reads may be overwritten."""


class _Done:
    """The handle of what needed no communication."""

    def wait(self) -> None:
        """Nothing to wait for."""


class _Then:
    """The handle of a communication that a local step completes."""

    def __init__(self, work, step):
        self.work, self.step = work, step

    def wait(self) -> None:
        self.work.wait()
        self.step()


class _Holding:
    """The handle of a send; keeps the tensor alive until it has left."""

    def __init__(self, work, tensor: Tensor):
        self.work, self.tensor = work, tensor

    def wait(self) -> None:
        self.work.wait()
        self.tensor = None


class Group:
    """The ranks of one axis as this rank sees them. A group of one communicates nothing.

    `rank` is the position in the group; `ranks` are the members' ranks in the world. On a GPU a
    handle's `wait()` makes the current stream wait, not the host. `group_log` keeps the records.
    `blocking` waits for every collective where it starts: slower, and easier to debug.
    """

    def __init__(
        self,
        ranks: tuple[int, ...] = (0,),
        rank: int = 0,
        handle=None,
        group_log: GroupLog | None = None,
        blocking: bool = False,
    ):
        self.ranks, self.rank, self.handle = ranks, rank, handle
        self.group_log, self.blocking = group_log, blocking
        self.size = len(ranks)
        self._gloo = handle is not None and dist.get_backend(handle) == "gloo"

    def shard(self, tensor: Tensor) -> Tensor:
        """This rank's slice of `tensor` along dimension 0, which the size must divide."""
        rows = tensor.shape[0] // self.size
        return tensor[self.rank * rows : (self.rank + 1) * rows]

    def all_reduce(self, tensor: Tensor, op=SUM) -> Handle:
        """Sum (or maximum) of `tensor` over the group, in place; equal bits on every rank."""
        if self.size == 1:
            return _Done()
        return self._recorded("all_reduce", tensor, self._all_reduce, tensor, op)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> Handle:
        """`output` = this rank's slice, along dimension 0, of the sum of `source` over the group.

        `output` may be that slice of `source` itself; the rest of `source` is then undefined.
        """
        if self.size == 1:
            output.copy_(source)
            return _Done()
        return self._recorded("reduce_scatter", source, self._reduce_scatter, output, source)

    def all_gather(self, output: Tensor, source: Tensor) -> Handle:
        """`output` = every rank's `source`, joined along dimension 0 in group order.

        `source` may be this rank's slice of `output`.
        """
        if self.size == 1:
            output.copy_(source)
            return _Done()
        return self._recorded("all_gather", output, self._all_gather, output, source)

    def send(self, tensor: Tensor, to: int) -> Handle:
        """Send to the group's rank `to`; the tensor must stay unchanged until the handle's wait."""
        record = self.group_log.enter_send(tensor.nbytes, to) if self.group_log else None
        tensor = tensor.cpu() if self._gloo else tensor
        work = _Holding(dist.isend(tensor, self.ranks[to], group=self.handle), tensor)
        return record.under_way(work) if record else work

    def receive(self, tensor: Tensor, source: int) -> Handle:
        """Receive into `tensor` from the group's rank `source`."""
        record = self.group_log.enter_receive(tensor.nbytes, source) if self.group_log else None
        work = self._receive(tensor, source)
        return record.under_way(work) if record else work

    def values(self, tensor: Tensor) -> list:
        """The numbers in `tensor` as lists: where the host waits for the device, on record."""
        if self.group_log is None or not tensor.is_cuda:
            return tensor.tolist()
        with self.group_log.recorder.waiting_for("device"):
            return tensor.tolist()

    # -- how each is done -------------------------------------------------------------------

    def _recorded(self, kind: str, message: Tensor, run, *arguments) -> Handle:
        if self.group_log is None:
            handle = run(*arguments)
        else:
            record = self.group_log.enter(kind, message.nbytes)
            handle = record.under_way(run(*arguments))
        if not self.blocking:
            return handle
        handle.wait()
        return _Done()

    def _all_reduce(self, tensor: Tensor, op) -> Handle:
        if not self._gloo:
            return dist.all_reduce(tensor, op, group=self.handle, async_op=True)
        if not self._one_hop(tensor.nbytes):
            host = tensor.cpu()  # the tensor itself if it is there already
            work = dist.all_reduce(host, op, group=self.handle, async_op=True)
            return work if host is tensor else _Then(work, lambda: tensor.copy_(host))
        work, received = self._exchange(self._for_each(tensor))
        reduce = torch.sum if op == SUM else torch.amax
        return _Then(work, lambda: tensor.copy_(reduce(received, 0).view_as(tensor)))

    def _reduce_scatter(self, output: Tensor, source: Tensor) -> Handle:
        if not self._gloo:
            return _reduce_scatter(output, source, group=self.handle, async_op=True)
        work, received = self._exchange(source.reshape(self.size, -1))
        return _Then(work, lambda: output.copy_(received.sum(0).view_as(output)))

    def _all_gather(self, output: Tensor, source: Tensor) -> Handle:
        if not self._gloo:
            return _all_gather(output, source, group=self.handle, async_op=True)
        if not self._one_hop(source.nbytes) and not source.is_cuda:
            parts = list(output.view(self.size, -1).unbind())
            return dist.all_gather(parts, source.view(-1), group=self.handle, async_op=True)
        work, received = self._exchange(self._for_each(source))
        return _Then(work, lambda: output.copy_(received.view_as(output)))

    def _receive(self, tensor: Tensor, source: int) -> Handle:
        if self._gloo and tensor.is_cuda:
            host = torch.empty_like(tensor, device="cpu")
            work = dist.irecv(host, self.ranks[source], group=self.handle)
            return _Then(work, lambda: tensor.copy_(host))
        return dist.irecv(tensor, self.ranks[source], group=self.handle)

    def _one_hop(self, message: int) -> bool:
        """Whether sending `message` bytes to every other member beats gloo's rings."""
        sent = message * (self.size - 1)
        return message <= SHORT_BYTES or (self.size > 2 and sent <= EXCHANGE_BYTES)

    def _for_each(self, tensor: Tensor) -> Tensor:
        """One copy of `tensor` for every member: (size, elements)."""
        return tensor.reshape(1, -1).expand(self.size, -1)

    def _exchange(self, rows: Tensor):
        """Row i goes to member i; the handle and what arrives, whose row j is member j's."""
        leaving = rows.cpu().contiguous()
        received = torch.empty_like(leaving)
        work = dist.all_to_all_single(received, leaving, group=self.handle, async_op=True)
        return _Holding(work, leaving), received
