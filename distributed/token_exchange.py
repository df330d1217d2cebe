"""The exchange of tokens between the ranks that divide a block's experts (`--ep`).

A row is the hidden state of one token for one expert, (h,): a token with k experts has k rows.

    counts: this rank's rows for each expert           exchange_counts tells the other ranks
        --Exchange, an all-to-all of unequal blocks--> rows by rank, then expert
        --orders_of_arrived--> rows by expert, then rank

If other work can run meanwhile, Depart and Arrive stand in the place of Exchange. Repeat and
Permute put the rows into these orders, also on a single rank.
layers/experts.py calls these functions; read it first.

An order is a permutation, (n,): row i of x[order] is row order[i] of x. For 2 tokens with k = 2
experts each, the numbers of the rows are 0 1 (token 0) and 2 3 (token 1), so a row's token is its
number // k. If token 0 goes to experts 1 and 0, and token 1 to experts 0 and 2, the order by expert
is 1 2 0 3.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from distributed.collectives import Group, Handle


def share(count: int, group: Group) -> tuple[int, int]:
    """Return the range [start, stop) of this rank's part of `count` tokens.

    The ranks of the group have adjacent parts, in the group's order, whose sizes differ by at most
    one: 5 tokens on 2 ranks give [0, 2) and [2, 5).
    """
    return count * group.rank // group.size, count * (group.rank + 1) // group.size


class OwnTokens(torch.autograd.Function):
    """x[start:stop] of tokens x that all tensor ranks have; the backward pass is an all-reduce."""

    @staticmethod
    def forward(ctx, x, start, stop, tp):
        """Return this tensor rank's part, x[start:stop], of the tokens x, (tokens, h)."""
        ctx.tp = tp
        # F.pad's numbers: none of the last dimension (h), then the tokens before and after.
        ctx.padding = (0, 0, start, len(x) - stop)
        return x[start:stop]

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient of the whole x: the sum of the ranks' parts, padded with zeros."""
        whole = F.pad(grad, ctx.padding)  # zeros for the tokens of the other ranks
        ctx.tp.at_once.all_reduce(whole).wait()
        return whole, None, None, None


def counts_on_host(group: Group, counts: Tensor, rows: int) -> list:
    """Return `counts`, a tensor of whole numbers on the device, as a list on the host.

    rows: the sum of this rank's counts. Only a rehearsal uses `rows`: its tensors have no elements,
    so it puts another function in the place of this one, which invents counts with that sum.
    """
    return group.values(counts)


def exchange_counts(
    group: Group, counts: Tensor, rows: int
) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """Return the numbers of rows: sent to each rank, received from each rank, of each expert here,
    and for each rank those received from it for each expert here.

    counts: this rank's rows for each of the E experts, (E,). rows: the sum of `counts`. The host
    waits for the device here, once in a forward pass.
    """
    # The n ranks have E / n experts each, in order: row j of `by_rank` counts the rows for rank j.
    by_rank = counts.view(group.size, -1)  # (n, E / n)
    # Row j: how many rows come from rank j, for each of this rank's experts.
    arriving = torch.empty_like(by_rank)
    group.at_once.all_to_all(arriving, by_rank).wait()
    leaving, arrived = counts_on_host(group, torch.stack([by_rank, arriving]), rows)
    of_experts = [sum(of_ranks) for of_ranks in zip(*arrived)]
    return list(map(sum, leaving)), list(map(sum, arrived)), of_experts, arrived


def orders_of_arrived(arrived: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two permutations of the n rows that have arrived, (n,) each: from their order, by rank
    and then by expert, to the order by expert and then by rank, and the one that undoes it.

    arrived: for each rank, the number of its rows for each of this rank's experts. Example: [[2,
    1], [1, 0]] says that rows 0 and 1 came from rank 0 for expert 0, row 2 from rank 0 for expert
    1, and row 3 from rank 1 for expert 0. The first result is [0, 1, 3, 2].

    The rows of a rank for an expert stay together. How far each such block moves follows from the
    counts, which are on the host: so no sort and no launch for each step of it.
    """
    sizes = np.array(arrived)  # (ranks, experts here)
    by_rank, by_expert = sizes.ravel(), sizes.T.ravel()
    start = (by_rank.cumsum() - by_rank).reshape(sizes.shape)  # of each block among arrived rows
    sorted_start = (by_expert.cumsum() - by_expert).reshape(sizes.T.shape)
    moves = sorted_start - start.T  # (experts here, ranks): places by which a block moves
    # Rows 0 to n of `order` are the first result. Its other n rows are the second one.
    n = sum(map(sum, arrived))
    both = [by_expert, by_rank, -moves.ravel(), moves.T.ravel() - n]
    blocks, shifts = to_device(torch.tensor(np.concatenate(both)), device).chunk(2)
    order = torch.arange(2 * n, device=device)
    order += shifts.repeat_interleave(blocks, output_size=2 * n)
    return order[:n], order[n:]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device, for which the host does not wait."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Exchange(torch.autograd.Function):
    """An all-to-all of rows with unequal parts; its backward pass sends the gradients back."""

    @staticmethod
    def forward(ctx, rows, group, received, sent):
        """Send the rows to the ranks of their experts; return the rows that arrive.

        sent, received: the numbers of rows to and from each rank of `group` (exchange_counts).
        """
        ctx.group = group
        ctx.received = received
        ctx.sent = sent
        return exchange_rows(rows, group, received, sent)

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients of the rows that this rank sent, from the ranks that got them."""
        return exchange_rows(grad, ctx.group, ctx.sent, ctx.received), None, None, None


class Flight:
    """An exchange of rows that is under way, of gradients in the backward pass.

    Other work may stand between `Depart`, which starts it, and `Arrive`, which waits for it. In the
    backward pass that work's gradients are computed while the rows' gradients travel: autograd runs
    what was called later first, so from `Arrive` over that work to `Depart`.
    """

    def __init__(self, group: Group, received: list[int], sent: list[int]):
        """Start nothing yet. received, sent: numbers of rows from and to each rank of `group`."""
        self.group = group
        self.received = received
        self.sent = sent
        self._handle: Handle | None = None
        self._output: Tensor | None = None

    def start(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Start to send rows; return the tensor into which others arrive."""
        self._output = rows.new_empty(sum(received), rows.shape[-1])
        self._handle = self.group.all_to_all(self._output, rows.contiguous(), (received, sent))
        return self._output

    def end(self) -> Tensor:
        """Wait for the rows, and return them."""
        assert self._handle is not None  # `start` comes first
        assert self._output is not None
        self._handle.wait()
        output = self._output
        self._handle = self._output = None
        return output


class Depart(torch.autograd.Function):
    """Starts flights; the backward pass waits for the gradients that come back.

    Several are one function, so that all ranks start them in the same order in the backward pass.
    """

    @staticmethod
    def forward(ctx, flights, *rows):
        """Start to send `rows`, a tensor for each flight; return the tensors into which those of
        other ranks arrive, for `Arrive` alone.
        """
        ctx.flights = flights
        return tuple(f.start(x, f.received, f.sent) for x, f in zip(rows, flights, strict=True))

    @staticmethod
    def backward(ctx, *grads):
        """Return the rows' gradients, which `Arrive` has sent for. grads: what that returned."""
        return None, *(flight.end() for flight in ctx.flights)


class Arrive(torch.autograd.Function):
    """Waits for the rows of flights; the backward pass starts to send their gradients back."""

    @staticmethod
    def forward(ctx, flights, *rows):
        """Return `rows`, which `Depart` returned, when they are there."""
        ctx.flights = flights
        for flight in flights:
            flight.end()
        return tuple(x.view_as(x) for x in rows)

    @staticmethod
    def backward(ctx, *grads):
        """Start to send the gradients; `Depart` returns what arrives. What this returns only has
        the right shapes.
        """
        for grad, flight in zip(grads, ctx.flights, strict=True):
            flight.start(grad, flight.sent, flight.received)
        return None, *grads


def exchange_rows(rows: Tensor, group: Group, received: list[int], sent: list[int]) -> Tensor:
    """Return the rows, (sum of `received`, h), that the ranks of `group` have sent to this rank.

    rows: (sum of `sent`, h), sorted by the rank that receives them. received, sent: the number of
    rows from each rank, and to each rank.
    """
    output = rows.new_empty(sum(received), rows.shape[-1])
    group.at_once.all_to_all(output, rows.contiguous(), (received, sent)).wait()
    return output


def occurrences(numbers: Tensor, count: int) -> Tensor:
    """Return a tensor, (count,): how often each of 0, 1, ..., count - 1 is in `numbers`, (n,).

    This counts the rows of each expert. The shape of torch.bincount's result would depend on the
    data, so the host would wait for the device.
    """
    return numbers.new_zeros(count).index_add_(0, numbers, torch.ones_like(numbers))


def inverse(order: Tensor) -> Tensor:
    """Return the permutation, (n,), that undoes the permutation `order`, (n,).

    Row i of x[order] is row order[i] of x, so the inverse has i at place order[i]: for the order
    1 2 0 it is 2 0 1.
    """
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


class Repeat(torch.autograd.Function):
    """Rows (T k, h) in which each token of x (T, h) stands k times, in the order `order`."""

    @staticmethod
    def forward(ctx, x, order, back, k):
        """Return the rows of x, each repeated for its k experts, in the order of the experts.

        The (token, expert) pairs are numbered: pairs t k to t k + k - 1 belong to token t. order:
        the numbers of the pairs, sorted by expert. back: the permutation that undoes `order`.
        """
        ctx.save_for_backward(back)
        ctx.k = k
        return x[order // k]  # the pair's number // k is its token

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient of x: for each token, the sum over its k rows of `grad`."""
        # grad[back] has the rows in the order of the pairs' numbers: (T k, h), then (T, k, h).
        (back,) = ctx.saved_tensors
        return grad[back].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class Permute(torch.autograd.Function):
    """x[order]; its backward pass needs no atomic additions, because `back` undoes the order."""

    @staticmethod
    def forward(ctx, x, order, back):
        """Return the rows of x in the order `order`, such as the received rows by expert.

        back: the permutation that undoes `order` (`inverse`).
        """
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient of x: the rows of `grad`, put back into the order of x."""
        (back,) = ctx.saved_tensors
        return grad[back], None, None
