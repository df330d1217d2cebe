"""The cross-entropy of every token, if the vocabulary is split over n ranks; logits stay local.

    cross_entropy(logits, labels, tp, spec)     for tensor ranks, differentiable; called by Head
    local = LocalLoss.of(logits, labels, spec)  for pipeline ranks too (--vocab-pp), in two parts:
    local.finish(every rank's sums, weight)     called after an all-gather of all `local.sums`

    loss of a token = log(sum over all ranks' columns of exp(logit - m)) + m - its label's logit
                      with m the token's largest logit; the gradient is softmax - one-hot

Shapes: s sequence, b samples, V/n this rank's columns. All is computed in fp32 at least, a few rows
at a time, without a copy of all logits: the exponentials overwrite fp32 logits in `of`. 16-bit
logits are kept, and exponentiated again in the backward pass. The gradient overwrites either.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from config.schema import LOGITS_AT_ONCE
from distributed.collectives import Group
from parallel import ParamSpec, compiled


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy for a vocabulary split over tp, with one all-gather of 3 numbers a token."""

    @staticmethod
    def forward(ctx, logits, labels, tp, spec, fused):
        """Return the loss of each token, in the shape of the labels."""
        local = LocalLoss.of(logits.detach(), labels, spec, fused)
        every = local.sums.new_empty(tp.size, *local.sums.shape)
        tp.at_once.all_gather(every, local.sums).wait()
        losses, ctx.share = local.losses(every)
        ctx.local = local
        return losses

    @staticmethod
    def backward(ctx, grad):
        local, ctx.local = ctx.local, None  # so that the logits are freed with the gradient
        return local.gradient(ctx.share, grad), None, None, None, None


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp: Group,
    spec: ParamSpec,
    fused: bool = False,
) -> Tensor:
    """Return the loss of every token: logits (s, b, V/tp), labels (s, b) -> (s, b), fp32 at least.

    A token whose label is below 0 has loss 0. spec: the spec of the output matrix, with the rows of
    the vocabulary that are here. The losses and the gradient overwrite the logits, so the backward
    pass may run only once. fused: use kernels of torch.compile (--compile).
    """
    return _CrossEntropy.apply(logits, labels, tp, spec, fused)


class LocalLoss(NamedTuple):
    """One rank's part of the loss, kept until the rank has the `sums` of all ranks.

    logits: (s, b, V/n), or their exponentials (see the module). columns: (s, b, 1), the label's
    column here, or 0 where `absent`, (s, b), says that it is not here. targets: (s, b), whether
    the label counts. sums: (3, s, b), over this rank's columns: the largest logit, the sum of
    exponentials relative to the largest, and the label's logit (0 if absent).
    """

    logits: Tensor
    columns: Tensor
    absent: Tensor
    targets: Tensor  # False for labels below 0
    fused: bool
    sums: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        logits: Tensor,
        labels: Tensor,
        spec: ParamSpec,
        fused: bool = False,
    ) -> "LocalLoss":
        """Make it from logits (s, b, V/n), for the vocabulary rows of `spec`, and labels (s, b)."""
        rows = spec.stop - spec.start
        exact = torch.promote_types(logits.dtype, torch.float32)
        logits[..., rows:] = torch.finfo(logits.dtype).min  # columns of padding
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
        """Return the tokens' losses (s, b) and the `share` (s, b) that `gradient` takes.

        every: the `sums` of all ranks, (n, 3, s, b). share: the factor that turns this rank's
        exponentials into softmax probabilities.
        """
        largest, sums, target = every.unbind(1)
        most = largest.amax(0)
        total = (sums * (largest - most).exp_()).sum(0)
        losses = (total.log() + most - target.sum(0)).masked_fill_(~self.targets, 0.0)
        return losses, (self.sums[0] - most).exp_().div_(total)

    def gradient(self, share: Tensor, weight: Tensor | float) -> Tensor:
        """Return the gradient of the loss for the logits, times each token's weight.

        share: from `losses`. weight: (s, b) or a number. The gradient overwrites the logits'
        memory, so this may be called only once.
        """
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
        """Return the tokens' losses (s, b) and the gradient for the logits, times `weight`.

        every: the `sums` of all ranks, (n, 3, s, b). As `gradient`, it may be called only once.
        """
        losses, share = self.losses(every)
        return losses, self.gradient(share, weight)


def _by_rows(function: Callable, fused: bool, logits: Tensor, *others: Tensor) -> None:
    """Call the function with the logits and the others in slices along the sequence.

    A slice has at most LOGITS_AT_ONCE logits, or one row. fused: one call with all rows, compiled.
    """
    if fused:
        compiled(function)(logits, *others)
        return
    rows = max(1, LOGITS_AT_ONCE[logits.device.type] // logits[0].numel())
    for run in zip(*(tensor.split(rows) for tensor in (logits, *others))):
        function(*run)


def _exponentiate(logits: Tensor, largest: Tensor, total: Tensor) -> None:
    """Replace fp32 logits by exp(logits - largest), and set `total` to their sums, (s, b)."""
    total.copy_(logits.sub_(largest[..., None]).exp_().sum(-1))


def _sum_exponentials(logits: Tensor, largest: Tensor, total: Tensor) -> None:
    """Set `total` to the sums of exp(logits - largest), (s, b); 16-bit logits stay."""
    total.copy_((logits - largest[..., None]).exp_().sum(-1))


def _scale(logits: Tensor, largest: Tensor, scale: Tensor) -> None:
    """Multiply by `scale` (s, b) the exponentials that `_exponentiate` left in `logits`."""
    logits.mul_(scale[..., None])


def _scale_exponentials(logits: Tensor, largest: Tensor, scale: Tensor) -> None:
    """Replace 16-bit logits by exp(logits - largest) times `scale` (s, b)."""
    logits.copy_((logits - largest[..., None]).exp_().mul_(scale[..., None]))
