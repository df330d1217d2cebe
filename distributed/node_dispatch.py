"""The way of tokens to experts on several nodes and back, with one copy of a token to a node.

A token has k experts, of which several may be on one node. The network between nodes is slow, the
links inside a node are fast. So a token is sent once to each node that has any of its experts, to
the rank with its own place there, which copies it for the experts of its node:

    x (T, h)                                                                 tokens of this rank
        --repeat: one copy for each node--> --all-to-all over `across`-->  x' (U, h), of all nodes
        --repeat: one row for each expert--> --all-to-all over `within`-->   rows of experts here
        MLP of each expert on its rows
        --all-to-all over `within`--> --weighted sum of each copy's rows-->  (U, h)
        --all-to-all over `across`--> --sum of each token's copies-->        y (T, h)

Beside a copy go the token's k experts and weights. The backward pass goes the same way: a token's
gradient is sent once to each node, and the gradients of a copy's rows are summed on the node.
So both sums of a token, of outputs and of gradients, are first taken on each node, in the order of
the experts, and then over the nodes. They round otherwise than a sum of all k rows on the token's
rank (token_exchange.py), but not more: both sums are accumulated in FP32 and rounded once.

T tokens of this rank, h hidden, E experts, k experts for each token, N nodes, L ranks of the group
on each of them, u copies that this rank sends, U copies that it receives, C their rows. The source
is DeepSeek-V3 (arXiv 2412.19437, section 3.2.2); DeepEP is an implementation of it for GPUs.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from distributed.collectives import Group
from distributed.token_exchange import (
    Arrive,
    Depart,
    Exchange,
    Flight,
    Permute,
    occurrences,
    orders_of_arrived,
)


class RowCounts(NamedTuple):
    """The numbers of rows that a rank sends and receives in one forward pass, on the host.

    to_nodes, from_nodes: copies to and from each node, (N,). to_ranks, from_ranks: rows to and from
    each rank of this node, (L,). arrived: from each rank of this node, the rows for each expert of
    this rank, (L, E / (N L)). of_experts: the rows of each expert of this rank.
    """

    to_nodes: list[int]
    from_nodes: list[int]
    to_ranks: list[int]
    from_ranks: list[int]
    arrived: list[list[int]]
    of_experts: list[int]


class Copies(NamedTuple):
    """Which row each of n copies is of, and where the copies of each row are.

    source: the row of each copy, (n,). by_source: the numbers of the copies, row by row, (n,).
    starts: for each row, where its copies begin in `by_source`, (rows,).
    """

    source: Tensor
    by_source: Tensor
    starts: Tensor


def copies_of(source: Tensor, rows: int) -> Copies:
    """Return the Copies of `rows` rows, of which `source`, (n,), has a number for each copy."""
    counts = occurrences(source, rows)
    return Copies(source, source.argsort(stable=True), counts.cumsum(0) - counts)


def add_up(x: Tensor, copies: Copies, weights: Tensor | None = None) -> Tensor:
    """Return for each row the sum of its copies in x, (n, h), times their weights, (n,): (rows, h).

    One kernel adds up in FP32, in the order of `by_source`, without atomic operations: the result
    is the same bits each time. A row without copies gives zeros.
    """
    if weights is not None:
        weights = weights[copies.by_source]
    bags = copies.by_source, x, copies.starts
    return F.embedding_bag(*bags, mode="sum", per_sample_weights=weights)


class Spread(torch.autograd.Function):
    """The copies of the rows x; the backward pass adds up the gradients of each row's copies."""

    @staticmethod
    def forward(ctx, x, copies):
        """Return x, (rows, h), as copies, (n, h)."""
        ctx.save_for_backward(*copies)
        return x[copies.source]

    @staticmethod
    def backward(ctx, grad):
        return add_up(grad.contiguous(), Copies(*ctx.saved_tensors)), None


class AddUp(torch.autograd.Function):
    """The sum of each row's copies; the backward pass gives each copy its row's gradient."""

    @staticmethod
    def forward(ctx, x, copies):
        """Return the sums (rows, h) of the copies x, (n, h)."""
        ctx.save_for_backward(copies.source)
        return add_up(x, copies)

    @staticmethod
    def backward(ctx, grad):
        (source,) = ctx.saved_tensors
        return grad[source], None


class AddUpWeighted(torch.autograd.Function):
    """The weighted sum of each row's copies."""

    @staticmethod
    def forward(ctx, x, weights, copies):
        """Return the sums (rows, h) of the copies x, (n, h), times their weights, (n,)."""
        ctx.save_for_backward(x, weights, copies.source)
        return add_up(x, copies, weights)

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients of the copies, (n, h), and of their weights, (n,)."""
        x, weights, source = ctx.saved_tensors
        of_copies = grad[source]  # (n, h), a new tensor
        of_weights = (x * of_copies).sum(-1)
        return of_copies.mul_(weights[:, None]), of_weights, None


def read_counts(
    across: Group, within: Group, found: Tensor, tokens: tuple[int, int], experts: int
) -> RowCounts:
    """Return the numbers of `found` on the host, which `exchange_node_counts` has put there.

    tokens: (T, k) of this rank. experts: E. Only a rehearsal uses them: its tensors have no
    elements, so it puts another function in the place of this one, which invents numbers.
    """
    values = across.values(found)
    nodes, both = across.size, 2 * across.size
    ranks = both + within.size
    return sent_of(values[:nodes], values[nodes:both], values[both:ranks], values[ranks:])


def sent_of(
    to_nodes: list[int], from_nodes: list[int], to_ranks: list[int], arriving: list[int]
) -> RowCounts:
    """Return the RowCounts with these numbers.

    arriving: for each rank of this node, the rows that it sends to each expert of this rank.
    """
    experts_here = len(arriving) // len(to_ranks)
    starts = range(0, len(arriving), experts_here)
    by_rank = [arriving[start : start + experts_here] for start in starts]
    of_experts = [sum(of_ranks) for of_ranks in zip(*by_rank)]
    from_ranks = list(map(sum, by_rank))
    return RowCounts(to_nodes, from_nodes, to_ranks, from_ranks, by_rank, of_experts)


def exchange_node_counts(
    across: Group, within: Group, copies: Tensor, counts: Tensor, tokens: tuple[int, int]
) -> RowCounts:
    """Return the numbers of rows.

    copies: this rank's copies for each node, (N,). counts: its rows for each expert, (E,). tokens:
    (T, k). The host waits for the device here, once in a forward pass.
    """
    # Row n is for node n: the copies, and the rows of each of its experts.
    sent = torch.cat([copies[:, None], counts.view(across.size, -1)], 1)
    arrived = torch.empty_like(sent)
    across.at_once.all_to_all(arrived, sent).wait()
    # The rows of each expert of this node, by rank: they are sent on within the node.
    to_ranks = arrived[:, 1:].sum(0).view(within.size, -1)
    arriving = torch.empty_like(to_ranks)
    within.at_once.all_to_all(arriving, to_ranks).wait()
    found = torch.cat([copies, arrived[:, 0], to_ranks.sum(1), arriving.flatten()])
    return read_counts(across, within, found, tokens, len(counts))


def first_true(mask: Tensor, count: int) -> Tensor:
    """Return the places of the `count` true elements of a mask, (n,), ascending: (count,).

    With their number the host does not wait for the device.
    """
    return (~mask).to(torch.uint8).argsort(stable=True)[:count]


def send(
    x: Tensor,
    choice: tuple[Tensor, Tensor, Tensor],
    groups: tuple[Group, Group],
    run: Callable[[Tensor, list[int]], Tensor],
    overlaps: bool,
) -> Callable[[], Tensor]:
    """Start to send this rank's tokens x, (T, h), to the nodes of their experts; return a function
    that returns the weighted sum of the experts' outputs, (T, h).

    choice: each token's experts, ascending, and their weights, (T, k) each, and the number of rows
    of each expert, (E,). groups: `across` and `within` (distributed/mesh.py). run: a function of
    the rows of this rank's experts, sorted by expert, and of their numbers, that returns outputs.
    overlaps: whether other work comes before the returned function is called.
    """
    experts, weights, counts = choice
    across, within = groups
    tokens, k = experts.shape
    of_node = len(counts) // across.size  # the experts of a node
    visits = torch.zeros(tokens, across.size, dtype=torch.bool, device=x.device)
    visits.scatter_(1, experts // of_node, True)  # (T, N): does the token have experts there?
    sent = exchange_node_counts(across, within, visits.sum(0), counts, (tokens, k))

    # To the nodes: the copies are in the order of the nodes, those for one node in that of tokens.
    token_of_copy = first_true(visits.t().flatten(), sum(sent.to_nodes)) % max(1, tokens)
    of_tokens = copies_of(token_of_copy, tokens)
    # The numbers of experts are far below 2^24, so FP32 has them exactly.
    beside = torch.cat([weights, experts.to(weights.dtype)], 1)
    started = across if overlaps else across.at_once
    flights = [Flight(started, sent.from_nodes, sent.to_nodes) for _ in range(2)]
    coming = Depart.apply(flights, Spread.apply(x, of_tokens), Spread.apply(beside, of_tokens))
    return partial(_finish, coming, flights, sent, of_tokens, (k, of_node), groups, run)


def _finish(
    coming: tuple[Tensor, Tensor],
    flights: list[Flight],
    sent: RowCounts,
    of_tokens: Copies,
    sizes: tuple[int, int],
    groups: tuple[Group, Group],
    run: Callable[[Tensor, list[int]], Tensor],
) -> Tensor:
    """Return what the function that `send` returns does. sizes: k, and the experts of a node.

    coming: copies, and what goes beside them, which are on their way by `flights`. of_tokens: the
    copies of this rank's tokens.
    """
    across, within = groups
    k, of_node = sizes
    rows, beside = Arrive.apply(flights, *coming)
    # Within the node: rows are sorted by expert, those of one expert by the copy's place.
    weights, experts = beside.split(k, 1)
    own = experts.detach().long() - across.rank * of_node  # (U, k): counted from the node's first
    is_here = (own >= 0) & (own < of_node)
    order = own.masked_fill(~is_here, of_node).flatten().argsort(stable=True)[: sum(sent.to_ranks)]
    of_copies = copies_of(order // k, len(rows))
    weights = weights.flatten()[order]
    rows = Spread.apply(rows, of_copies)
    rows = Exchange.apply(rows, within, sent.from_ranks, sent.to_ranks)
    by_expert, by_rank = orders_of_arrived(sent.arrived, rows.device)
    rows = run(Permute.apply(rows, by_expert, by_rank), sent.of_experts)
    rows = Permute.apply(rows, by_rank, by_expert)
    rows = Exchange.apply(rows, within, sent.to_ranks, sent.from_ranks)

    # Back: the sums of the node, and then of the token.
    rows = AddUpWeighted.apply(rows, weights.to(rows.dtype), of_copies)
    rows = Exchange.apply(rows, across, sent.to_nodes, sent.from_nodes)
    return AddUp.apply(rows, of_tokens)
