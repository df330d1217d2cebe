"""The cross-entropy of every token, if the vocabulary is split over n ranks; logits stay local.

    cross_entropy(logits, labels, tp, spec)     split over tensor ranks, differentiable; for Head
    token_scores(logits, labels, tp, spec)      the losses, and which labels are the likeliest
    x = with_loss(x, term, factory)             adds a term to the loss, in any layer

    log Z  of a token = log(sum over all ranks' columns of exp(logit - m)) + m
                        with m the token's largest logit
    loss   = log Z - its label's logit; the gradient is softmax - one-hot
    z-loss = coefficient * (log Z)^2, with --z-loss; the gradient is 2 coefficient log Z softmax

The z-loss keeps log Z near 0, so that the logits do not drift (PaLM, arXiv 2204.02311, section 5).
A label is the number of the right next token. one-hot is 1 in the label's column, else 0. Shapes: s
sequence, b samples, V/n this rank's columns. The loss is computed in fp32 at least, a few rows at a
time, without a copy of all logits. There are two cases: in `of`, exp(logit - m) overwrites fp32
logits, with m the largest logit on this rank; 16-bit logits are kept, because their exponentials
would lose precision, and exponentiated again in the backward pass. In both cases the gradient
overwrites the memory of the logits. The z-loss takes no further pass over the logits: it changes
the factor by which the softmax is multiplied.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from config.buffer_sizes import LOGITS_AT_ONCE, logits_at_once
from distributed import gpus
from distributed.collectives import Group
from parallel import ParamFactory, ParamSpec, compile_kernel, exact_dtype


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy for a vocabulary split over tp, with one all-gather of 3 numbers a token."""

    @staticmethod
    def forward(ctx, logits, labels, tp, spec, fused, z_loss):
        """Return the loss of each token, (s, b), for logits (s, b, V/tp) and labels (s, b).

        With z_loss, the coefficient of the z-loss, return both losses of each token, (2, s, b).
        Each tensor rank computes sums over its columns, and the all-gather gives every rank the
        sums of all ranks.
        """
        local_loss = LocalLoss.of(logits.detach(), labels, spec, fused)
        sums = local_loss.sums
        sums_of_ranks = sums.new_empty(tp.size, *sums.shape)
        tp.at_once.all_gather(sums_of_ranks, sums).wait()
        losses, log_z, ctx.share = local_loss.losses(sums_of_ranks)
        ctx.local_loss = local_loss
        ctx.z_slopes = None
        if not z_loss:
            return losses
        z_losses = (z_loss * log_z.square()).masked_fill_(~local_loss.targets, 0.0)
        ctx.z_slopes = log_z.mul_(2 * z_loss)  # derivative of a token's z-loss by its log Z, (s, b)
        return torch.stack([losses, z_losses])

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient for the logits; grad: the gradient of what `forward` returned."""
        local_loss = ctx.local_loss
        ctx.local_loss = None  # so that the logits, which it holds, are freed with the gradient
        z_weight = None
        if ctx.z_slopes is not None:
            grad, z_weight = grad[0], grad[1] * ctx.z_slopes
        gradient = local_loss.gradient(ctx.share, grad, z_weight)
        return gradient, None, None, None, None, None


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp: Group,
    spec: ParamSpec,
    fused: bool = False,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the loss of every token, (s, b), fp32 at least.

    logits: (s, b, V/tp), this rank's columns. labels: (s, b); a token whose label is below 0 has
    loss 0. spec: the spec of the output matrix, which says the rows of the vocabulary that this
    rank has. fused: use kernels of torch.compile (--compile). z_loss: the coefficient of the
    z-loss; above 0 the result is (2, s, b), the losses and the z-losses of the tokens. The losses
    and the gradient overwrite the logits, so the backward pass may run only once.
    """
    return _CrossEntropy.apply(logits, labels, tp, spec, fused, z_loss)


@torch.no_grad()
def token_scores(
    logits: Tensor,
    labels: Tensor,
    tp: Group,
    spec: ParamSpec,
    fused: bool = False,
) -> Tensor:
    """Return each token's loss, and 1 if its label has the largest logit, else 0: (2, s, b).

    The arguments are those of `cross_entropy`, and logits are overwritten too. A label that shares
    the largest logit has it.
    """
    local_loss = LocalLoss.of(logits, labels, spec, fused)
    sums = local_loss.sums
    sums_of_ranks = sums.new_empty(tp.size, *sums.shape)
    tp.at_once.all_gather(sums_of_ranks, sums).wait()
    losses, _, _ = local_loss.losses(sums_of_ranks)
    largest, _, label_logits = sums_of_ranks.unbind(1)
    return torch.stack([losses, (label_logits.sum(0) >= largest.amax(0)).to(losses.dtype)])


class LocalLoss(NamedTuple):
    """One rank's part of the loss, from its columns of the logits.

    logits: (s, b, V/n), 16-bit logits, or in place of fp32 logits their exponentials. columns: (s,
    b, 1), the label's column on this rank; 0 where `absent`, (s, b), says that another rank has it.
    targets: (s, b), False for labels below 0, which do not count. fused: use kernels of
    torch.compile. sums: (3, s, b), over this rank's columns: the largest logit, the sum of
    exp(logit - largest), and the label's logit (0 if absent). The sums of all ranks together give
    the losses.
    """

    logits: Tensor
    columns: Tensor
    absent: Tensor
    targets: Tensor
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
        """Return the part of the loss that comes from logits (s, b, V/n), overwritten if fp32.

        labels: (s, b), numbers in the whole vocabulary, or below 0. spec: says which rows of the
        vocabulary this rank has. fused: use kernels of torch.compile.
        """
        columns_here = spec.stop - spec.start  # this rank's columns without those of padding
        exact = exact_dtype(logits.dtype)
        # The columns of padding get the probability 0.
        logits[..., columns_here:] = torch.finfo(logits.dtype).min
        columns = labels - spec.start
        absent = (columns < 0) | (columns >= columns_here)
        columns = columns.masked_fill(absent, 0)[..., None]
        label_logit = logits.gather(-1, columns)[..., 0].to(exact).masked_fill(absent, 0.0)
        largest = logits.amax(-1).to(exact)
        total = torch.empty_like(largest)  # `function` writes it
        # Both functions write the sums of exponentials into `total`; only the first changes logits.
        function = _exponentiate if logits.dtype == exact else _sum_exponentials
        _call_by_rows(function, fused, logits, largest, total)
        sums = torch.stack([largest, total, label_logit])
        return cls(logits, columns, absent, labels >= 0, fused, sums)

    def losses(self, sums_of_ranks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens' losses, log Z, and the factor that `gradient` needs: (s, b) each.

        The factor turns this rank's exponentials into softmax probabilities. sums_of_ranks: the
        `sums` of all n ranks, (n, 3, s, b).
        """
        largest_of_ranks, totals, label_logits = sums_of_ranks.unbind(1)  # (n, s, b) each
        largest = largest_of_ranks.amax(0)
        # Each rank's sum is relative to its own largest logit: make all relative to the largest.
        total = (totals * (largest_of_ranks - largest).exp_()).sum(0)
        label_logit = label_logits.sum(0)  # 0 on all ranks but that of the label's column
        log_z = total.log() + largest
        losses = (log_z - label_logit).masked_fill_(~self.targets, 0.0)
        # softmax = exp(logit - largest_here) * factor, with the factor that is returned here:
        # exp(largest_here - largest) / total.
        largest_here = self.sums[0]  # on this rank
        return losses, log_z, (largest_here - largest).exp_().div_(total)

    def gradient(
        self, share: Tensor, weight: Tensor | float, z_weight: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of the loss for the logits, times each token's weight: (s, b, V/n).

        share: the factor (s, b) that `losses` returns. weight: (s, b) or a number; a token that is
        no target gets 0. z_weight, (s, b): what the z-loss adds to the softmax's weight. The
        gradient overwrites the logits' memory, so this may be called only once: first the label's
        element is read, then all elements are multiplied, and at last the label's element is
        written again, less its one-hot.
        """
        logits = self.logits
        largest = self.sums[0]  # each token's largest logit on this rank, (s, b)
        weight = torch.zeros_like(largest).add_(weight).masked_fill_(~self.targets, 0.0)
        # The gradient of the logits is (weight + z_weight) * softmax, minus the weight at the label
        # (`one_hot`). As softmax is exponential * share, the first term is exponential * scale.
        one_hot = weight.masked_fill(self.absent, 0.0)
        scale = share * weight
        if z_weight is not None:
            scale += share * z_weight.masked_fill(~self.targets, 0.0)
        at_label = logits.gather(-1, self.columns)[..., 0]  # in the column of the token's label
        function = _scale
        if logits.dtype != largest.dtype:  # 16-bit logits are not exponentiated yet
            at_label = (at_label - largest).exp_()
            function = _scale_exponentials
        _call_by_rows(function, self.fused, logits, largest, scale)
        at_label = at_label.mul_(scale).sub_(one_hot)[..., None]
        return logits.scatter_(-1, self.columns, at_label.to(logits.dtype))


def _call_by_rows(function: Callable, fused: bool, logits: Tensor, *others: Tensor) -> None:
    """Call the function on slices of all tensors along the sequence, one slice after the other.

    So temporary tensors are small. The function writes its results into the tensors. A slice of
    `logits`, (s, b, V/n), has at most `logits_at_once` numbers, or one row. fused: call a compiled
    version once instead, on the whole tensors, because its kernel makes no temporary tensors.
    """
    if fused:
        compile_kernel(function)(logits, *others)
        return
    at_once = int(logits_at_once(_most_logits(logits.device), logits.numel()))
    rows = max(1, at_once // logits[0].numel())
    slices = [tensor.split(rows) for tensor in (logits, *others)]
    for slices_of_rows in zip(*slices):
        function(*slices_of_rows)


def _most_logits(device: torch.device) -> int:
    """Return the most logits of a slice on this device: see LOGITS_AT_ONCE."""
    is_fast = device.type == "cuda" and gpus.nvidia_capability(device) >= (9, 0)
    return LOGITS_AT_ONCE["cuda from 9.0" if is_fast else device.type]


def _exponentiate(logits: Tensor, largest: Tensor, total: Tensor) -> None:
    """Replace fp32 logits by exp(logits - largest), and set `total` to their sums, (s, b)."""
    torch.sum(logits.sub_(largest[..., None]).exp_(), -1, out=total)


def _sum_exponentials(logits: Tensor, largest: Tensor, total: Tensor) -> None:
    """Set `total` to the sums of exp(logits - largest), (s, b), and keep the 16-bit logits."""
    torch.sum((logits - largest[..., None]).exp_(), -1, out=total)


def _scale(logits: Tensor, largest: Tensor, scale: Tensor) -> None:
    """Multiply fp32 exponentials, which `_exponentiate` wrote to `logits`, by `scale` (s, b)."""
    logits.mul_(scale[..., None])


def _scale_exponentials(logits: Tensor, largest: Tensor, scale: Tensor) -> None:
    """Replace 16-bit logits by exp(logits - largest) times `scale` (s, b)."""
    torch.mul((logits - largest[..., None]).exp_(), scale[..., None], out=logits)


def with_loss(x: Tensor, term: Tensor, factory: ParamFactory) -> Tensor:
    """Return x, whose backward pass trains `term` too, as if it were added to the sum of losses.

    x: any activation that the loss depends on. term: a scalar, which is a sum over the tokens of x:
    over all tokens that this rank has, of all samples of the micro-batch. It is divided by the
    targets of the global batch, as the losses of the tokens are, so no layout changes it. The loss
    in the log does not contain it. Evaluations and decoding leave it out.
    """
    weight = factory.loss_weight
    if not (torch.is_grad_enabled() and term.requires_grad and weight.adds_terms):
        return x
    return add_gradient_of(x, term * weight.value)


def add_gradient_of(x: Tensor, weighted: Tensor) -> Tensor:
    """Return x, whose backward pass gives `weighted`, a scalar loss, the gradient 1."""
    return _WithLoss.apply(x, weighted)


class _WithLoss(torch.autograd.Function):
    """Returns x; the backward pass also gives a scalar loss the gradient 1.

    Weights get the same gradients as if the scalar were added to the loss, which another pipeline
    stage computes.
    """

    @staticmethod
    def forward(ctx, x, weighted):
        """Return a view of x. weighted: a scalar loss, times the weight of the step."""
        ctx.save_for_backward(weighted)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient of x, which is `grad` unchanged, and that of the scalar: 1."""
        (weighted,) = ctx.saved_tensors
        return grad, torch.ones_like(weighted)
