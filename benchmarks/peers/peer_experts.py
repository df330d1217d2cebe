"""A peer of Trine with experts: expert parallelism by hand, on plain tensors.

Each of several ranks has its own samples, all weights but those of the experts, and a part of every
block's experts. Tokens travel to their experts and back by `all_to_all_single`. The gradients of
what all ranks have are summed in one tensor; experts need no sum.
"""

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.peer_worker import Loop, Shape, mean_loss


class Exchange(torch.autograd.Function):
    """Rows (n, h) to other ranks, `sent` to each, `received` from each; backward returns them."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.sizes = sent, received
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.sizes
        rows = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(rows, grad.contiguous(), sent, received)
        return rows, None, None


class Experts(nn.Module):
    """Router, exchange and experts of a block: (T, h) -> (T, h)."""

    def __init__(self, shape: Shape, read, ranks: range, rank: int):
        super().__init__()
        self.chosen = shape.chosen
        self.ranks = len(ranks)
        self.held = shape.experts // len(ranks)
        self.router = nn.Parameter(read("mlp.router.weight"))
        own = slice(rank * self.held, (rank + 1) * self.held)
        up = read("mlp.experts.up.weight").view(shape.experts, 2 * shape.ffn, shape.hidden)[own]
        down = read("mlp.experts.down.weight").view(shape.experts, shape.hidden, shape.ffn)[own]
        self.up = nn.ParameterList(each.clone() for each in up)
        self.down = nn.ParameterList(each.clone() for each in down)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted outputs of the experts that each token x (n, h) chooses: (n, h)."""
        weights, experts = F.linear(x, self.router).softmax(-1).topk(self.chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=self.ranks * self.held)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent = counts.view(self.ranks, -1).sum(1).tolist()
        received = arriving.view(self.ranks, -1).sum(1).tolist()
        rows = Exchange.apply(x[order // self.chosen], sent, received)
        of_expert = torch.arange(self.held).repeat(self.ranks).repeat_interleave(arriving)
        by_expert = of_expert.argsort(stable=True)
        parts = rows[by_expert].split(arriving.view(self.ranks, -1).sum(0).tolist())
        done = torch.cat([self.mlp(i, part) for i, part in enumerate(parts)])
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(len(by_expert))
        rows = Exchange.apply(done[back], received, sent)
        weighted = rows * weights.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, order // self.chosen, weighted)

    def mlp(self, expert: int, rows: Tensor) -> Tensor:
        """One expert's output for its rows."""
        gate, up = F.linear(rows, self.up[expert]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[expert])


class Block(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x)): (b, s, h)."""

    def __init__(self, shape: Shape, read, ranks: range, rank: int):
        super().__init__()
        self.d = shape.hidden // shape.heads
        names = ("norm1", "qkv", "attention.q_norm", "attention.k_norm", "out", "norm2")
        for name in names:
            setattr(self, name.rpartition(".")[2], nn.Parameter(read(f"{name}.weight")))
        self.experts = Experts(shape, read, ranks, rank)

    def forward(self, x: Tensor, turned: tuple[Tensor, Tensor]) -> Tensor:
        """Return the block's output for x, (b, s, h). turned: cosine and sine, (s, d/2) each."""
        normed = F.rms_norm(x, x.shape[-1:], self.norm1, 1e-5)
        qkv = F.linear(normed, self.qkv).unflatten(-1, (-1, 3, self.d))
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(-2))
        q = rotated(F.rms_norm(q, (self.d,), self.q_norm, 1e-5), turned)
        k = rotated(F.rms_norm(k, (self.d,), self.k_norm, 1e-5), turned)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(y.transpose(1, 2).flatten(2), self.out)
        normed = F.rms_norm(x, x.shape[-1:], self.norm2, 1e-5)
        return x + self.experts(normed.flatten(0, 1)).view_as(x)


def rotated(x: Tensor, turned: tuple[Tensor, Tensor]) -> Tensor:
    """x (b, a, s, d) with rotary positions; turned: cosine and sine, (s, d/2) each."""
    cosine, sine = turned
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class Model(nn.Module):
    """One rank of the model; tokens and labels -> mean loss of the rank's samples."""

    def __init__(self, shape: Shape, folder: Path, ranks: range, rank: int):
        super().__init__()

        def reader(prefix: str):
            return lambda name: torch.from_numpy(np.load(folder / f"{prefix}{name}.npy"))

        read = reader("")
        self.tokens = nn.Parameter(read("tokens.weight"))
        blocks = (Block(shape, reader(f"blocks.{i}."), ranks, rank) for i in range(shape.layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.Parameter(read("norm.weight"))
        self.head = nn.Parameter(read("head.weight"))
        half = shape.hidden // shape.heads // 2
        angles = torch.outer(torch.arange(shape.seq), 10000.0 ** (-torch.arange(half) / half))
        self.turned = angles.cos(), angles.sin()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = F.embedding(tokens, self.tokens)
        for block in self.blocks:
            x = block(x, self.turned)
        logits = F.linear(F.rms_norm(x, x.shape[-1:], self.norm, 1e-5), self.head)
        return mean_loss(logits, labels)


def expert_parallel_loop(shape: Shape, weights: str) -> Loop:
    """The model with its optimizer on one rank."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    model = Model(shape, Path(weights), ranks, rank)
    own = [p for name, p in model.named_parameters() if is_of_expert(name)]
    common = [p for name, p in model.named_parameters() if not is_of_expert(name)]

    def total_norm(parameters: list[nn.Parameter]) -> Tensor:
        summed = torch.cat([p.grad.flatten() for p in common])
        dist.all_reduce(summed)
        parts = summed.split([p.numel() for p in common])
        for p, part in zip(common, parts):
            p.grad = part.view_as(p)
        square = nn.utils.get_total_norm([p.grad for p in own]).square_()
        dist.all_reduce(square)
        return (square + summed.norm().square()).sqrt()

    return Loop(model, model, total_norm, weight=1 / len(ranks))


def is_of_expert(name: str) -> bool:
    """Whether a parameter belongs to one expert, which one rank has."""
    return ".experts.up" in name or ".experts.down" in name
