"""The loss of every token where the vocabulary is spread over ranks; logits are never gathered.

    cross_entropy(logits, labels, tp, spec)     over tensor ranks, differentiable
    LocalLoss.of(logits, labels, spec)          over pipeline ranks too (--vocab-pp): first this,
        .finish(every rank's sums, weight)      and when all have done it, losses and gradients

Shapes: s sequence, b samples, V/n the columns of this rank. Computed in fp32 at least.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from distributed.collectives import MAX, Group
from parallel import ParamSpec


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy over a vocabulary split over tp, without ever gathering the logits.

    Two collectives of one and of two numbers per token. Computed in fp32 at least.
    """

    @staticmethod
    def forward(ctx, logits, labels, tp, start, stop):
        """The loss of each token, of labels' shape; logits are those of words [start, stop).

        They are overwritten if they are in fp32 or fp64: a copy is the largest tensor of a step.
        """
        dtype = logits.dtype
        logits = logits.detach().to(torch.promote_types(dtype, torch.float32))
        logits[..., stop - start :] = torch.finfo(logits.dtype).min  # padding
        largest = logits.amax(-1)
        tp.all_reduce(largest, MAX).wait()
        logits.sub_(largest[..., None])
        local = labels - start
        absent = (local < 0) | (labels >= stop)
        local = local.masked_fill(absent, 0)[..., None]
        target = logits.gather(-1, local)[..., 0].masked_fill(absent, 0.0)
        exponentials = logits.exp_()
        sums = torch.stack([exponentials.sum(-1), target])
        tp.all_reduce(sums).wait()
        ctx.save_for_backward(exponentials, sums[0], local, absent)
        ctx.dtype = dtype
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, grad):
        exponentials, total, local, absent = ctx.saved_tensors
        dlogits = exponentials.mul_((grad / total)[..., None])
        dlogits.scatter_add_(-1, local, -grad.masked_fill(absent, 0.0)[..., None])
        return dlogits.to(ctx.dtype), None, None, None, None


def cross_entropy(logits: Tensor, labels: Tensor, tp: Group, spec: ParamSpec) -> Tensor:
    """Loss of every token: logits (..., V/tp), labels (...) -> (...), in fp32 at least.

    `spec` is that of the head's weight: which rows of the vocabulary are here. Both passes reuse
    the memory of the logits: they are lost, and the backward may run once only.
    """
    return _CrossEntropy.apply(logits, labels, tp, spec.start, spec.stop)


class LocalLoss(NamedTuple):
    """What a rank keeps of a loss whose vocabulary is spread, until it has the others' `sums`:
    (3, s, b), a token's largest logit, the sum of exponentials relative to it, its label's logit.
    """

    exponentials: Tensor
    columns: Tensor
    absent: Tensor
    targets: Tensor  # where there is one: a label below 0 is none
    dtype: torch.dtype
    sums: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, logits: Tensor, labels: Tensor, spec: ParamSpec) -> "LocalLoss":
        """Of the logits (s, b, V/n) of the words that `spec` has, and labels (s, b)."""
        dtype, rows = logits.dtype, spec.stop - spec.start
        logits = logits.to(torch.promote_types(dtype, torch.float32), copy=True)
        logits[..., rows:] = torch.finfo(logits.dtype).min  # padding
        columns = labels - spec.start
        absent = (columns < 0) | (columns >= rows)
        columns = columns.masked_fill(absent, 0)[..., None]
        target = logits.gather(-1, columns)[..., 0].masked_fill(absent, 0.0)
        largest = logits.amax(-1)
        exponentials = logits.sub_(largest[..., None]).exp_()
        sums = torch.stack([largest, exponentials.sum(-1), target])
        return cls(exponentials, columns, absent, labels >= 0, dtype, sums)

    @torch.no_grad()
    def finish(self, every: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """The tokens' losses (s, b), and `weight` times the gradient of these logits; once only.

        every: the `sums` of all ranks, (n, 3, s, b).
        """
        largest, sums, target = every.unbind(1)
        most = largest.amax(0)
        total = (sums * (largest - most).exp_()).sum(0)
        scale = (weight * (self.sums[0] - most).exp_() / total).masked_fill_(~self.targets, 0.0)
        gradient = self.exponentials.mul_(scale[..., None])
        own = torch.zeros_like(scale).sub_(weight).masked_fill_(self.absent, 0.0)
        gradient.scatter_add_(-1, self.columns, own[..., None])
        losses = (total.log() + most - target.sum(0)).masked_fill_(~self.targets, 0.0)
        return losses, gradient.to(self.dtype)
