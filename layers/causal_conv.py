"""A causal convolution of each channel over the tokens of its document.

    y = causal_conv(u, weight, before, offsets)     (s, b, c) -> (s, b, c)

y[t] = sum over j of weight[:, k - 1 - j] u[t - j], for j from 0 to k - 1 and the k taps of a
channel, without the tokens that are in another document. `before` has the k - 1 tokens before the
first one: zeros at the begin of a text, and else those of the rank before (--cp) or of the cache.
It is a sum of k products of shifted views: torch's depthwise convolution is not faster on a CPU,
and has no documents.

Shapes: s tokens, b samples, c channels, k taps.
"""

import torch
from torch import Tensor


class _CausalConv(torch.autograd.Function):
    """The convolution as one operation, which keeps its input and no shifted copies of it."""

    @staticmethod
    def forward(ctx, padded, weight, offsets):
        """Return y, (s, b, c), for padded (k - 1 + s, b, c), weight (c, k), offsets (s, b)."""
        ctx.save_for_backward(padded, weight, offsets)
        y = None
        for back, shifted, tap in _taps(padded, weight):
            if offsets is not None and back:
                shifted = shifted * _is_seen(offsets, back, shifted)
            y = shifted * tap if y is None else y.addcmul_(shifted, tap)
        return y

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients of padded and weight; grad: that of y, (s, b, c)."""
        padded, weight, offsets = ctx.saved_tensors
        grad_padded = torch.zeros_like(padded)
        grad_weight = torch.empty_like(weight)
        kernel = weight.shape[1]
        for back, shifted, tap in _taps(padded, weight):
            seen = grad
            if offsets is not None and back:
                seen = grad * _is_seen(offsets, back, grad)
            last = kernel - 1 - back
            grad_padded[last : last + len(grad)].addcmul_(seen, tap)
            grad_weight[:, last] = (seen * shifted).sum((0, 1))
        return grad_padded, grad_weight, None


def _taps(padded: Tensor, weight: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """Return of each tap how many tokens it looks back, those tokens, and its weights, (c,)."""
    kernel = weight.shape[1]
    length = len(padded) - kernel + 1
    return [
        (kernel - 1 - first, padded[first : first + length], weight[:, first])
        for first in range(kernel - 1, -1, -1)
    ]


def _is_seen(offsets: Tensor, back: int, like: Tensor) -> Tensor:
    """Return 1 where the token so many places back is in the same document, else 0: (s, b, 1)."""
    return (offsets >= back).to(like.dtype)[..., None]


def causal_conv(u: Tensor, weight: Tensor, before: Tensor, offsets: Tensor | None) -> Tensor:
    """Return the convolution of u, (s, b, c), with weight, (c, k).

    before: the k - 1 tokens before u, (k - 1, b, c). offsets: the number of tokens of its document
    before each token, (s, b); None: a sample is one document.
    """
    return _CausalConv.apply(torch.cat([before, u]), weight, offsets)
