"""Groups of ranks and their collectives: reduce, gather, scatter, broadcast, all-to-all, messages.

All data that crosses ranks in a training step goes through `Group`, over NCCL on GPUs and over
gloo on CPUs. Ranks that share a GPU use gloo too; their data then goes through host memory.

    handle = group.all_reduce(tensor)              # starts; in place
    ...                                            # other work
    handle.wait()                                  # now `tensor` may be used
    group.at_once.all_reduce(tensor).wait()        # nothing between start and wait

gloo's rings pass data on in hops: every rank must be scheduled once per hop, and oversubscribed
cores make each hop slow. So over gloo all-reduces and all-gathers of few bytes
(`_prefers_one_hop`), and every reduce-scatter of more than two ranks, are one all-to-all, which is
one hop. Sums are then local and in rank order, with the same bits on every rank
(benchmarks/results/gloo-collectives.md). A longer all-gather is one broadcast by every rank. A
reduce-scatter of two ranks is one message each way.

Over NCCL `at_once` runs the collective on the current stream; over gloo it is the same group.

A group with a log records every operation before it starts and while a rank waits for it
(watchdog/flight_recorder.py), so that the rank that causes a hang can be found.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from watchdog.flight_recorder import FlightRecorder, GroupLog

SUM = dist.ReduceOp.SUM
MAX = dist.ReduceOp.MAX

# torch 2.13 renamed these two functions and warns about the old names; 2.11 has only the old ones.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Over gloo an all-to-all (one hop) is faster than a ring for messages of up to SHORT_BYTES; among
# more than two ranks also if a rank sends up to EXCHANGE_BYTES to all others together.
SHORT_BYTES = 2**16
EXCHANGE_BYTES = 4 * 2**20


class Handle(Protocol):
    """An operation that has been started."""

    def wait(self) -> None:
        """Return when the operation's output may be used and its input may be overwritten."""


@dataclass
class _Pending:
    """The handle of a communication and of the local step that completes it; both are optional."""

    work: Any = None  # torch's handle; None: nothing was sent, as in a group of one rank
    complete: Callable[[], object] | None = None  # called once the data has arrived
    sent: Tensor | None = None  # the tensor that is sent: a reference keeps its memory

    def wait(self) -> None:
        """Wait for the data, complete the operation, and free what it has kept alive."""
        if self.work is not None:
            self.work.wait()
        if self.complete is not None:
            self.complete()
        self.work = self.complete = self.sent = None


@dataclass
class _All:
    """The handle of several communications that run at the same time."""

    works: list

    def wait(self) -> None:
        """Wait until all communications have ended."""
        for work in self.works:
            work.wait()


@dataclass
class _OnCurrentStream:
    """The handle of a collective that starts only in `wait()`, on the current stream."""

    run: Callable[[], object]

    def wait(self) -> None:
        """Start the collective; kernels that follow on the stream run after it."""
        self.run()


class DelayedStart:
    """The handle of a send that is started some actions after its input is computed.

    The flight recorder records the operation under the action that computed its input.
    """

    def __init__(self, begin: Callable[[], Handle], recorder: FlightRecorder):
        """Start nothing yet. begin: starts the operation; it keeps the input alive until then."""
        self._begin = begin
        self._recorder = recorder
        self._place = recorder.place  # the action that has computed the input
        self.handle: Handle | None = None  # None until the operation is started

    def start(self) -> None:
        """Start the operation, recorded under the action that computed its input (`_place`)."""
        current_place = self._recorder.place  # the action that runs now; put back below
        self._recorder.place = self._place
        self.handle = self._begin()
        del self._begin  # frees the input, unless the operation keeps it
        self._recorder.place = current_place

    def wait(self) -> None:
        """Wait for the operation, as `Handle.wait` does; `start` must have been called."""
        assert self.handle is not None  # a schedule starts each operation before any wait for it
        self.handle.wait()


class Group:
    """Ranks that communicate, for example those along one axis, as this rank sees them.

    A group of one rank communicates nothing. ranks: the members' ranks in the world. rank: this
    rank's position among the members. handle: torch's process group. group_log: records the
    operations. blocking: wait for every collective where it starts, which is slower and easier to
    debug. Over NCCL a handle's `wait()` makes the current stream wait, not the host.
    at_once: this group for collectives whose `wait()` follows at once. Over NCCL they start in
    their wait, on the current stream, which saves the events to NCCL's stream and back.
    """

    def __init__(
        self,
        ranks: tuple[int, ...] = (0,),
        rank: int = 0,
        handle: dist.ProcessGroup | None = None,
        group_log: GroupLog | None = None,
        blocking: bool = False,
    ):
        """Make this rank's view of a process group; Context.group calls it with all arguments."""
        self.ranks = ranks  # the members, as ranks of the world
        self.rank = rank  # the position of this rank among the members
        self.handle = handle  # torch's process group; None in a group of one rank
        self.group_log = group_log  # records the group's operations for the watchdog
        self.blocking = blocking  # blocking: wait for each operation where it starts
        self.size = len(ranks)
        self._gloo = handle is not None and dist.get_backend(handle) == "gloo"
        self._on_current_stream = False  # True in `at_once` over NCCL: a collective runs in `wait`
        self.at_once = self
        if handle is not None and not self._gloo and not blocking:
            self.at_once = copy.copy(self)
            self.at_once._on_current_stream = True

    def shard(self, tensor: Tensor) -> Tensor:
        """Return part `rank` of `size` equal parts of `tensor` along dimension 0, as a view."""
        rows = tensor.shape[0] // self.size
        return tensor[self.rank * rows : (self.rank + 1) * rows]

    def balanced_shard(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's share of a sample: chunks `rank` and `2 size - 1 - rank`, joined.

        The tensor is cut into 2 x size equal chunks along dimension `dim`, the tokens: with two
        ranks, rank 0 has chunks 0 and 3, rank 1 has chunks 1 and 2. A later token attends to more
        tokens, so with a causal mask all ranks of cp then have the same work.
        """
        if self.size == 1:
            return tensor
        chunks = tensor.chunk(2 * self.size, dim)
        return torch.cat([chunks[self.rank], chunks[-1 - self.rank]], dim)

    def all_reduce(self, tensor: Tensor, op=SUM) -> Handle:
        """Start to replace `tensor` by its sum, or with op MAX its maximum, equal on all ranks."""
        if self.size == 1:
            return _Pending()
        return self._start("all_reduce", tensor.nbytes, self._all_reduce, tensor, op)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> Handle:
        """Start to write this rank's slice of the sum of `source` over the group into `output`.

        The slices are equal parts of dimension 0, as in `shard`. `output` may be this rank's slice
        of `source` itself; the other parts of `source` are then undefined.
        """
        return self._start("reduce_scatter", source.nbytes, self._reduce_scatter, output, source)

    def all_gather(self, output: Tensor, source: Tensor) -> Handle:
        """Start to write every rank's `source` into `output`, joined along dimension 0.

        The order is that of the group's ranks. `source` may be this rank's slice of `output`.
        """
        return self._start("all_gather", output.nbytes, self._all_gather, output, source)

    def all_to_all(
        self, output: Tensor, source: Tensor, rows: tuple[list[int], list[int]] | None = None
    ) -> Handle:
        """Start to send block j of `source` to member j, and receive block j of `output` from it.

        Both tensors are contiguous, cut along dimension 0 into a block for each member, and must
        not overlap. rows: the numbers of rows of `output`'s blocks and of `source`'s blocks; None:
        both tensors have one shape and all blocks have equally many rows.
        """
        run = partial(self._all_to_all, rows=rows or ([], []))
        return self._start("all_to_all", source.nbytes, run, output, source)

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        """Start to copy `tensor` from the group's rank `source` into `tensor` on all other members.

        On `source` the tensor must stay unchanged until the handle's wait.
        """
        if self.size == 1:
            return _Pending()
        return self._start("broadcast", tensor.nbytes, self._broadcast, tensor, source)

    def reduce(self, tensor: Tensor, to: int) -> Handle:
        """Start to sum `tensor` over the group, in place, on the group's rank `to`.

        On the other ranks `tensor` is undefined afterwards.
        """
        if self.size == 1:
            return _Pending()
        return self._start("reduce", tensor.nbytes, self._reduce, tensor, to)

    def send(self, tensor: Tensor, to: int) -> Handle:
        """Start to send `tensor` to the group's rank `to`; do not change it before the wait."""
        record = self.group_log.enter_send(tensor.nbytes, to) if self.group_log else None
        tensor = tensor.cpu() if self._gloo else tensor
        sending = dist.isend(tensor, self.ranks[to], group=self.handle)
        handle = _Pending(sending, sent=tensor)
        return record.under_way(handle) if record else handle

    def receive(self, tensor: Tensor, source: int) -> Handle:
        """Start to receive into `tensor` the next message from the group's rank `source`."""
        record = self.group_log.enter_receive(tensor.nbytes, source) if self.group_log else None
        received = tensor
        if self._gloo and tensor.is_cuda:  # gloo receives into host memory; `wait` copies to a GPU
            received = torch.empty_like(tensor, device="cpu")
        receiving = dist.irecv(received, self.ranks[source], group=self.handle)
        handle = _Pending(receiving)
        if received is not tensor:
            handle.complete = lambda: tensor.copy_(received)
        return record.under_way(handle) if record else handle

    def values(self, tensor: Tensor) -> list:
        """Return `tensor.tolist()`; a hang report shows this wait as one for the device."""
        if self.group_log is None or not tensor.is_cuda:
            return tensor.tolist()
        with self.group_log.recorder.waiting_for("device"):
            return tensor.tolist()

    # -- the operations by backend ----------------------------------------------------------

    def _start(self, kind: str, size: int, run: Callable, output: Tensor, other: Any) -> Handle:
        """Record an operation of `size` bytes, then start the operation by `run(output, other)`.

        kind: the operation's name in the record. other: the tensor `source`, or for some operations
        the reduction `op` or a rank; in a group of one rank these have returned before this call.
        """
        if self.size == 1:
            output.copy_(other)  # here `other` is `source`
            return _Pending()
        record = self.group_log.enter(kind, size) if self.group_log else None
        handle = run(output, other)
        if record:
            handle = record.under_way(handle)
        if self.blocking:
            handle.wait()
        return handle

    def _collective(self, function: Callable, *arguments: Any) -> Handle:
        """Start torch's collective `function` over this group.

        In `at_once` over NCCL nothing starts yet: the handle's wait runs the collective.
        """
        if self._on_current_stream:
            return _OnCurrentStream(lambda: function(*arguments, group=self.handle))
        return function(*arguments, group=self.handle, async_op=True)

    def _all_reduce(self, tensor: Tensor, op) -> Handle:
        """Start an all-reduce: torch's own, or over gloo for few bytes one hop and a local sum."""
        if not self._gloo:
            return self._collective(dist.all_reduce, tensor, op)
        if not self._prefers_one_hop(tensor.nbytes):
            host = tensor.cpu()  # no copy if the tensor is on the CPU already
            work = self._collective(dist.all_reduce, host, op)
            if host is tensor:
                return work
            return _Pending(work, lambda: tensor.copy_(host))
        work, received = self._one_hop(tensor.reshape(1, -1))  # row j: the whole tensor of rank j
        reduce = torch.sum if op == SUM else torch.amax
        return _Pending(work, lambda: tensor.copy_(reduce(received, 0).view_as(tensor)))

    def _reduce_scatter(self, output: Tensor, source: Tensor) -> Handle:
        """Start a reduce-scatter: torch's own, or over gloo one hop and a local sum."""
        if not self._gloo:
            return self._collective(_reduce_scatter, output, source)
        if self.size == 2:
            return self._exchange_halves(output, source.reshape(2, -1))
        work, received = self._one_hop(source.reshape(self.size, -1))  # row j: the summand of j
        return _Pending(work, lambda: output.copy_(received.sum(0).view_as(output)))

    def _exchange_halves(self, output: Tensor, halves: Tensor) -> Handle:
        """Start a reduce-scatter between two ranks over gloo, by one message in each direction.

        halves: (2, n), this rank's summands; rank i computes the sum of row i, which is n elements,
        in `output`. On a CPU the only new memory is the n received elements.
        """
        other = self.ranks[1 - self.rank]
        sent = halves[1 - self.rank].cpu()
        received = torch.empty_like(sent)
        sending = dist.isend(sent, other, group=self.handle)
        works = [sending, dist.irecv(received, other, group=self.handle)]

        def add() -> None:
            """Write the sum of the received half and this rank's half into `output`."""
            summand = received.to(output.device).view_as(output)
            torch.add(halves[self.rank].view_as(output), summand, out=output)

        return _Pending(_All(works), add, sent)

    def _all_gather(self, output: Tensor, source: Tensor) -> Handle:
        """Start an all-gather: torch's own, or over gloo one hop or a broadcast by every rank."""
        if not self._gloo:
            return self._collective(_all_gather, output, source)
        if not self._prefers_one_hop(source.nbytes) and not source.is_cuda:
            # Rank i broadcasts part i, in place: gloo's own all-gather makes a copy of `output`.
            parts = output.view(self.size, -1)
            if parts[self.rank].data_ptr() != source.data_ptr():  # `source` is no part of `output`
                parts[self.rank].copy_(source.view(-1))
            return _All([self._broadcast(part, i) for i, part in enumerate(parts)])
        work, received = self._one_hop(source.reshape(1, -1))  # row j: the `source` of member j
        return _Pending(work, lambda: output.copy_(received.view_as(output)))

    def _all_to_all(
        self, output: Tensor, source: Tensor, rows: tuple[list[int], list[int]] = ([], [])
    ) -> Handle:
        """Start an all-to-all; `rows` as in `all_to_all`. gloo gets copies of a GPU's tensors."""
        sent = source.cpu() if self._gloo else source  # no copy if `source` is on the CPU already
        received = torch.empty_like(sent) if self._gloo and output.is_cuda else output
        work = self._collective(dist.all_to_all_single, received, sent, *rows)
        handle = _Pending(work, sent=sent)  # keeps `sent` in memory until the wait
        if received is not output:
            handle.complete = lambda: output.copy_(received)
        return handle

    def _broadcast(self, tensor: Tensor, source: int) -> Handle:
        return self._collective(dist.broadcast, tensor, self.ranks[source])

    def _reduce(self, tensor: Tensor, to: int) -> Handle:
        """Start a reduce to one rank; gloo gets a copy in host memory of a tensor on a GPU."""
        host = tensor.cpu() if self._gloo else tensor  # no copy if it is on the CPU already
        work = self._collective(dist.reduce, host, self.ranks[to])
        if host is tensor:
            return work
        return _Pending(work, lambda: tensor.copy_(host))

    def _prefers_one_hop(self, message: int) -> bool:
        """Return whether `message` bytes sent to each member are faster than gloo's rings."""
        sent = message * (self.size - 1)  # the bytes that this rank sends to all other members
        return message <= SHORT_BYTES or (self.size > 2 and sent <= EXCHANGE_BYTES)

    def _one_hop(self, rows: Tensor) -> tuple[Handle, Tensor]:
        """Start to send row i of `rows` to member i of the group, in one all-to-all over gloo.

        rows: (size, n), or (1, n) to send the same row to every member. Return the handle, and a
        tensor (size, n) on the CPU whose row j has come from member j after the wait.
        """
        sent = rows.expand(self.size, -1).cpu().contiguous()
        received = torch.empty_like(sent)
        return self._all_to_all(received, sent), received


class _SumBothWays(torch.autograd.Function):
    """All-reduce of x in the forward pass, and of its gradient in the backward pass."""

    @staticmethod
    def forward(ctx, x, group):
        """Replace x by its sum over the group, in place; called by `sum_both_ways`."""
        ctx.group = group
        ctx.mark_dirty(x)
        group.at_once.all_reduce(x).wait()
        return x

    @staticmethod
    def backward(ctx, grad):
        """Return the sum of the ranks' gradients, in a copy: autograd's `grad` must not change."""
        grad = grad.clone(memory_format=torch.contiguous_format)
        ctx.group.at_once.all_reduce(grad).wait()
        return grad, None


def sum_both_ways(x: Tensor, group: Group) -> Tensor:
    """Replace x by its sum over the group; the backward pass sums the ranks' gradients too.

    Used where every rank computes its part of a layer from the sum: the gradient of the sum is then
    the sum of all ranks' gradients.
    """
    return x if group.size == 1 else _SumBothWays.apply(x, group)


class _Reduce(torch.autograd.Function):
    """Megatron's operator g: all-reduce of x, (s, b, h); backward passes the gradient unchanged."""

    @staticmethod
    def forward(ctx, x, tp):
        """Replace x, (s, b, h), by its sum over tp, in place; called by `reduce_from_tp`."""
        ctx.mark_dirty(x)
        tp.at_once.all_reduce(x).wait()
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _ReduceScatterSequence(torch.autograd.Function):
    """Operator g with sequence parallelism: a reduce-scatter, whose backward is an all-gather."""

    @staticmethod
    def forward(ctx, x, tp):
        """Return this rank's tokens of the sum of x over tp, as `reduce_from_tp`: (s/tp, b, h)."""
        ctx.tp = tp
        part = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
        tp.at_once.reduce_scatter(part, x.contiguous()).wait()
        return part

    @staticmethod
    def backward(ctx, grad):
        return gather_sequence(grad, ctx.tp), None


def reduce_from_tp(x: Tensor, tp: Group, sequence_parallel: bool) -> Tensor:
    """Return x, (s, b, h), summed over tp; called after a row-parallel matrix product.

    With sequence parallelism the result is this rank's part of the sum, (s/tp, b, h). s: tokens, b:
    samples, h: hidden size.
    """
    if tp.size == 1:
        return x
    reduce = _ReduceScatterSequence if sequence_parallel else _Reduce
    return reduce.apply(x, tp)


class _Spread(torch.autograd.Function):
    """Megatron's operator f: passes x, (s, b, n), on; backward sums its gradients over tp."""

    @staticmethod
    def forward(ctx, x, tp, gather):
        """Return x, or if `gather` the tokens of all tensor ranks; called by `spread_to_tp`."""
        ctx.tp = tp
        ctx.gather = gather
        return gather_sequence(x, tp) if gather else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient of this rank's x, summed over the tensor ranks, all of which used it.

        It is a new tensor: autograd's `grad` must not change.
        """
        if ctx.gather:
            summed = grad.new_empty(grad.shape[0] // ctx.tp.size, *grad.shape[1:])
            ctx.tp.at_once.reduce_scatter(summed, grad.contiguous()).wait()
        else:
            summed = grad.clone(memory_format=torch.contiguous_format)
            ctx.tp.at_once.all_reduce(summed).wait()
        return summed, None, None


def spread_to_tp(x: Tensor, tp: Group, sequence_parallel: bool) -> Tensor:
    """Return x, (s, b, n), for a computation in which each tensor rank has its own heads.

    x is equal on all tensor ranks; with sequence parallelism it is this rank's tokens, (s/tp, b,
    n), and all tokens are returned. A rank's gradient is one term of a sum, which the backward pass
    takes once. A column-parallel layer does this for its own input (parallel.column_linear).
    """
    return x if tp.size == 1 else _Spread.apply(x, tp, sequence_parallel)


def gather_sequence(x: Tensor, tp: Group | None) -> Tensor:
    """Return the tokens of all tensor ranks: x, (s/tp, b, h), to (s, b, h); x if tp is None."""
    if tp is None:
        return x
    whole = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])
    tp.at_once.all_gather(whole, x.contiguous()).wait()
    return whole
