"""Tensor parallelism by hand, on plain tensors: what one writes who wants nothing else.

Megatron's f and g (arXiv 1909.08053), q, k and v in one product, a vocabulary-parallel embedding,
and a vocabulary-parallel head with its loss, which never gathers the logits. Activations (b, s, h).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peer_worker import CLIP, Batch, BlockForward, Shape, adamw, fill
from torch import Tensor, nn


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


class Block(BlockForward):
    """x + attention(norm(x)), then x + MLP(norm(x)), on the heads and the columns of one rank."""

    def __init__(self, h: int, heads: int, ranks: int):
        super().__init__()
        self.d = h // heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = Linear(h, 3 * h, 0, ranks), Linear(h, h, 1, ranks)
        self.up, self.down = Linear(h, 4 * h, 0, ranks), Linear(4 * h, h, 1, ranks)


class GPT(nn.Module):
    """One tensor rank of the model; tokens and labels -> mean loss."""

    def __init__(self, shape: Shape, rank: int, ranks: int):
        super().__init__()
        rows, h = shape.vocab // ranks, shape.hidden
        self.start = rank * rows
        self.tokens, self.positions = nn.Embedding(rows, h), nn.Embedding(shape.seq, h)
        self.blocks = nn.ModuleList(Block(h, shape.heads, ranks) for _ in range(shape.layers))
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


class TensorParallelByHand:
    """The model with its optimizer on one rank."""

    def __init__(self, shape: Shape, weights: str):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        with torch.device("meta"):
            model = GPT(shape, rank, ranks)
        cuts = {name: getattr(p, "cut", None) for name, p in model.named_parameters()}
        self.model = model.to_empty(device="cpu")
        self.cut, self.whole = [], []
        for name, p in self.model.named_parameters():
            p.cut = cuts[name]
            (self.whole if p.cut is None else self.cut).append(p)
        fill(self.model, weights, lambda t, p: t if p.cut is None else t.chunk(ranks, p.cut)[rank])
        self.optimizer = torch.optim.AdamW(**adamw(self.model.parameters()))

    def step(self, batches: list[Batch]) -> tuple[Tensor, Tensor]:
        """One optimizer step; the mean loss and the gradient norm."""
        total = torch.zeros(())
        for tokens, labels in batches:
            loss = self.model(tokens, labels) / len(batches)
            loss.backward()
            total += loss.detach()
        square = torch.nn.utils.get_total_norm([p.grad for p in self.cut]).square_()
        dist.all_reduce(square)
        square += torch.nn.utils.get_total_norm([p.grad for p in self.whole]).square_()
        norm = square.sqrt_()
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), CLIP, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm
