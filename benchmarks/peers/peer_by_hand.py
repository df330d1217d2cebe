"""Tensor parallelism by hand, on plain tensors: what one writes who wants nothing else.

Megatron's f and g (arXiv 1909.08053), q, k and v in one product, a vocabulary-parallel embedding,
and a vocabulary-parallel head with its loss, which never gathers the logits. Activations (b, s, h).
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.peer_worker import Block, Loop, Shape, fill


class CopyToRanks(torch.autograd.Function):
    """f: nothing forward, the sum of the ranks' gradients backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class SumOfRanks(torch.autograd.Function):
    """g: the sum of the ranks' parts forward, nothing backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class HeadLoss(torch.autograd.Function):
    """Mean loss of x (n, h) under this rank's rows [start, ...) of the output matrix; n labels."""

    @staticmethod
    def forward(ctx, x, weight, labels, start):
        """Return the mean loss, a scalar. weight: (rows, h) of this rank; start: its first row."""
        logits = x @ weight.t()
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        logits -= largest[:, None]
        local = labels - start
        absent = (local < 0) | (local >= len(weight))
        local = local.masked_fill_(absent, 0)[:, None]
        target = logits.gather(-1, local)[:, 0].masked_fill_(absent, 0.0)
        sums = torch.stack([logits.exp_().sum(-1), target])
        dist.all_reduce(sums)
        ctx.save_for_backward(x, weight, logits, sums[0], local, absent)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx, grad):
        x, weight, exponentials, total, local, absent = ctx.saved_tensors
        scale = grad / len(x)
        dlogits = exponentials.mul_((scale / total)[:, None])
        dlogits.scatter_add_(-1, local, (scale * (~absent)).neg_()[:, None])
        dx = dlogits @ weight
        dist.all_reduce(dx)
        return dx, dlogits.t() @ x, None, None


class Linear(nn.Linear):
    """A product with a part of a matrix: its rows (cut 0), or its columns (cut 1), then summed."""

    def __init__(self, inputs: int, outputs: int, cut: int, ranks: int):
        local = (inputs, outputs // ranks) if cut == 0 else (inputs // ranks, outputs)
        super().__init__(*local)
        self.weight.cut = cut
        self.bias.cut = 0 if cut == 0 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.cut == 0:
            return F.linear(CopyToRanks.apply(x), self.weight, self.bias)
        return SumOfRanks.apply(F.linear(x, self.weight)) + self.bias


class GPT(nn.Module):
    """One tensor rank of the model; tokens and labels -> mean loss."""

    def __init__(self, shape: Shape, rank: int, ranks: int):
        super().__init__()
        rows, h = shape.vocab // ranks, shape.hidden
        self.start = rank * rows
        self.tokens, self.positions = nn.Embedding(rows, h), nn.Embedding(shape.seq, h)
        column = functools.partial(Linear, cut=0, ranks=ranks)
        row = functools.partial(Linear, cut=1, ranks=ranks)
        blocks = (Block(h, shape.heads, column, row) for _ in range(shape.layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, rows, bias=False)
        self.tokens.weight.cut = self.head.weight.cut = 0

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        local = tokens - self.start
        absent = (local < 0) | (local >= len(self.tokens.weight))
        rows = self.tokens(local.masked_fill_(absent, 0)).masked_fill(absent[..., None], 0.0)
        x = SumOfRanks.apply(rows) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        x = self.norm(x).flatten(0, 1)
        return HeadLoss.apply(x, self.head.weight, labels.flatten(), self.start)


def tensor_parallel_loop(shape: Shape, weights: str) -> Loop:
    """The model with its optimizer on one rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        model = GPT(shape, rank, ranks)
    cuts = [getattr(p, "cut", None) for p in model.parameters()]
    model = model.to_empty(device="cpu")
    for p, cut in zip(model.parameters(), cuts):
        p.cut = cut
    fill(model, weights, lambda t, p: t if p.cut is None else t.chunk(ranks, p.cut)[rank])

    def total_norm(parameters: list[nn.Parameter]) -> Tensor:
        parts = [p.grad for p in parameters if p.cut is not None]
        wholes = [p.grad for p in parameters if p.cut is None]
        square = nn.utils.get_total_norm(parts).square_()
        dist.all_reduce(square)
        return (square + nn.utils.get_total_norm(wholes).square_()).sqrt_()

    return Loop(model, model, total_norm)
