"""The collectives of tensor parallelism with their gradients: g, and f's gather of a sequence.

    x = reduce_from_tp(x, tp, sequence_parallel)    g: the sum over tp, or this rank's part of it
    x = gather_sequence(x, tp)                      the parts of all tensor ranks

f and g are Megatron's (arXiv 1909.08053; with sequence parallelism, arXiv 2205.05198). f's sum of
gradients is in parallel.py (`_Linear`), where the weight gradient overlaps it.
"""

import torch
from torch import Tensor

from distributed.collectives import Group


class _Reduce(torch.autograd.Function):
    """g: all-reduce of s b h elements in the forward pass; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.mark_dirty(x)
        tp.at_once.all_reduce(x).wait()
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _ReduceScatterSequence(torch.autograd.Function):
    """g with sequence parallelism: reduce-scatter to (s/tp, b, h); backward is an all-gather."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        part = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
        tp.at_once.reduce_scatter(part, x.contiguous()).wait()
        return part

    @staticmethod
    def backward(ctx, grad):
        return gather_sequence(grad, ctx.tp), None


def reduce_from_tp(x: Tensor, tp: Group, sequence_parallel: bool) -> Tensor:
    """Return x, (s, b, h), summed over tp; with sequence parallelism this rank's (s/tp, b, h)."""
    if tp.size == 1:
        return x
    reduce = _ReduceScatterSequence if sequence_parallel else _Reduce
    return reduce.apply(x, tp)


def gather_sequence(x: Tensor, tp: Group | None) -> Tensor:
    """Return x, (s/tp, b, h), all-gathered to (s, b, h); x itself if tp is None."""
    if tp is None:
        return x
    whole = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])
    tp.at_once.all_gather(whole, x.contiguous()).wait()
    return whole
