"""The loss of every token where the vocabulary is spread over ranks; logits are never gathered.

    cross_entropy(logits, labels, tp, spec)     over tensor ranks, differentiable
    LocalLoss.of(logits, labels, spec)          over pipeline ranks too (--vocab-pp): first this,
        .finish(every rank's sums, weight)      and when all have done it, losses and gradients

Shapes: s sequence, b samples, V/n the columns of this rank. Computed in fp32 at least, a few rows
at a time: there is no copy of all logits. Their exponentials take their memory, but for logits of
16 bits, which are exponentiated in the backward again; then the gradient takes it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from config.schema import LOGITS_AT_ONCE
from distributed.collectives import Group
from parallel import ParamSpec, compiled


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy over a vocabulary split over tp: one collective of three numbers per token."""

    @staticmethod
    def forward(ctx, logits, labels, tp, spec, fused):
        """The loss of each token, of labels' shape."""
        local = LocalLoss.of(logits.detach(), labels, spec, fused)
        every = local.sums.new_empty(tp.size, *local.sums.shape)
        tp.at_once.all_gather(every, local.sums).wait()
        losses, ctx.share = local.losses(every)
        ctx.local = local
        return losses

    @staticmethod
    def backward(ctx, grad):
        local, ctx.local = ctx.local, None  # else the graph holds the logits until its end
        return local.gradient(ctx.share, grad), None, None, None, None


def cross_entropy(
    logits: Tensor, labels: Tensor, tp: Group, spec: ParamSpec, fused: bool = False
) -> Tensor:
    """Loss of every token: logits (..., V/tp), labels (...) -> (...), in fp32 at least; 0 where the
    label is below 0.

    `spec` is that of the head's weight: which rows of the vocabulary are here. The gradient takes
    the memory of the logits: they are lost, and the backward may run once only. fused: by kernels
    of --compile.
    """
    return _CrossEntropy.apply(logits, labels, tp, spec, fused)


class LocalLoss(NamedTuple):
    """What a rank keeps of a loss whose vocabulary is spread, until it has the others' `sums`:
    (3, s, b), a token's largest logit, the sum of exponentials relative to it, its label's logit.
    """

    logits: Tensor
    columns: Tensor
    absent: Tensor
    targets: Tensor  # where there is one: a label below 0 is none
    fused: bool
    sums: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls, logits: Tensor, labels: Tensor, spec: ParamSpec, fused: bool = False
    ) -> "LocalLoss":
        """Of the logits (s, b, V/n) of the words that `spec` has, and labels (s, b)."""
        rows = spec.stop - spec.start
        exact = torch.promote_types(logits.dtype, torch.float32)
        logits[..., rows:] = torch.finfo(logits.dtype).min  # padding
        columns = labels - spec.start
        absent = (columns < 0) | (columns >= rows)
        columns = columns.masked_fill(absent, 0)[..., None]
        target = logits.gather(-1, columns)[..., 0].to(exact).masked_fill(absent, 0.0)
        largest = logits.amax(-1).to(exact)
        total = torch.empty_like(largest)
        function = _exponentiate if logits.dtype == exact else _sum_exponentials
        _by_rows(function, fused, logits, largest, total)
        sums = torch.stack([largest, total, target])
        return cls(logits, columns, absent, labels >= 0, fused, sums)

    def losses(self, every: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens' losses (s, b), and what `gradient` takes; every: the `sums` of all ranks,
        (n, 3, s, b).
        """
        largest, sums, target = every.unbind(1)
        most = largest.amax(0)
        total = (sums * (largest - most).exp_()).sum(0)
        losses = (total.log() + most - target.sum(0)).masked_fill_(~self.targets, 0.0)
        return losses, (self.sums[0] - most).exp_().div_(total)

    def gradient(self, share: Tensor, weight: Tensor | float) -> Tensor:
        """That of the logits, in their memory, times `weight` of each token; once only."""
        logits = self.logits
        largest = self.sums[0]
        weight = torch.zeros_like(largest).add_(weight).masked_fill_(~self.targets, 0.0)
        scale = share * weight
        own = weight.masked_fill(self.absent, 0.0)
        label = logits.gather(-1, self.columns)[..., 0]
        function = _scale
        if logits.dtype != largest.dtype:
            label = (label - largest).exp_()
            function = _scale_exponentials
        _by_rows(function, self.fused, logits, largest, scale)
        label = label.mul_(scale).sub_(own)[..., None]
        return logits.scatter_(-1, self.columns, label.to(logits.dtype))

    @torch.no_grad()
    def finish(self, every: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """The tokens' losses (s, b), and `weight` times the gradient of these logits; once only.

        every: as in `losses`.
        """
        losses, share = self.losses(every)
        return losses, self.gradient(share, weight)


def _by_rows(function: Callable, fused: bool, logits: Tensor, *others: Tensor) -> None:
    """Call the function with these, cut along the sequence; fused: once, as one kernel."""
    if fused:
        compiled(function)(logits, *others)
        return
    rows = max(1, LOGITS_AT_ONCE[logits.device.type] // logits[0].numel())
    for run in zip(*(tensor.split(rows) for tensor in (logits, *others))):
        function(*run)


def _exponentiate(logits: Tensor, largest: Tensor, total: Tensor) -> None:
    total.copy_(logits.sub_(largest[..., None]).exp_().sum(-1))


def _sum_exponentials(logits: Tensor, largest: Tensor, total: Tensor) -> None:
    total.copy_((logits - largest[..., None]).exp_().sum(-1))


def _scale(logits: Tensor, largest: Tensor, scale: Tensor) -> None:
    logits.mul_(scale[..., None])


def _scale_exponentials(logits: Tensor, largest: Tensor, scale: Tensor) -> None:
    logits.copy_((logits - largest[..., None]).exp_().mul_(scale[..., None]))
