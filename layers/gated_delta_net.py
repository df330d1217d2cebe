"""Gated delta net: a mixer whose state has a constant size (arXiv 2412.06464), as in Qwen3-Next.

    x (s, b, h) --in--> q | k | v, --causal convolution, SiLU--> heads of q, k (normalised), v
                        z, the gate of each value; b, a: strength and decay of each value head
    gated delta rule (delta_rule.py) --RMSNorm over a head, times SiLU(z)--> out

The strength of value head i is sigmoid(b), its decay exp(-exp(A_log) softplus(a + dt_bias)). There
are g key heads and a value heads, a/g of which share a key head. Rows of the matrix `in` for each
key head: q, k, v of its value heads, z of them, then b and a. So tensor parallelism, which divides
the key heads, keeps a value head with its key head, and the convolution's channels (q, k, v of a
key head), A_log and dt_bias are cut in the same way. The norm's scale is shared by all heads: each
tensor rank's gradient is one term of a sum.

Several ranks with parts of a sample (--cp) send one another the last tokens before a segment, for
the convolution, and what a segment does with a state (delta_rule.py). With --cp-mixer heads each
rank gets all tokens for some of the heads instead.

Shapes: s tokens, b samples, g key heads of size p, a value heads of size r on this rank.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architecture.shape import ModelShape
from distributed.collectives import Group
from distributed.context_parallel import (
    exchange_heads,
    from_segments,
    to_segments,
    to_tokens,
    tokens_before,
)
from layers.attention import KeyValueCache
from layers.causal_conv import causal_conv
from layers.delta_rule import gated_delta_rule
from parallel import ColumnLinear, Matrices, ParamFactory, RowLinear, recompute

NORM_EPS = 1e-6  # of the squared length of a query or key, fixed in the published models


class HeadWeights(NamedTuple):
    """The parameters between the two matrices, of the heads that a rank computes.

    conv: (g, channels of a key head, taps). a_log, dt_bias: (a,). norm: (r,), of all heads.
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor


class GatedDeltaNet(nn.Module):
    """A mixer by the gated delta rule; takes and returns what attention.Attention does."""

    def __init__(
        self, factory: ParamFactory, name: str, model: ModelShape, std: float, recompute: bool
    ):
        """Make the parameters. std: for the output matrix. recompute: whether the backward pass
        runs what is between the two matrices again.
        """
        super().__init__()
        self.factory = factory
        self.recompute = recompute
        self.key_heads = model.mixer_key_heads
        self.shared = model.mixer_value_heads // model.mixer_key_heads  # value heads of a key head
        self.sizes = model.mixer_key_size, model.mixer_value_size
        self.eps = model.mixer_norm_eps
        self.most = 2.0 if model.mixer_negative else 1.0  # of a strength
        self.ranks, self.exchanges = factory.mesh.cp, factory.cp_mixer == "heads"
        p, r = self.sizes
        values = self.shared * r
        parts = [("q", p), ("k", p), ("v", values), ("z", values)]
        parts += [("b", self.shared), ("a", self.shared)]
        members = Matrices(parts=tuple(parts), dim=1, heads=(0,))
        self.rows = sum(length for _, length in parts)  # of a key head in the first matrix
        self.channels = 2 * p + values  # of a key head in the convolution
        self.taps = model.mixer_kernel
        self.inputs = ColumnLinear(
            factory, f"{name}.in", model.hidden, (self.key_heads, self.rows), 0, False, members
        )
        heads = model.mixer_value_heads
        conv = (self.key_heads, self.channels, self.taps)
        conv_std = (
            factory.std and (3 * self.taps) ** -0.5
        )  # as of uniform numbers up to 1 / sqrt(k)
        self.conv = factory.parameter(f"{name}.conv", conv, std=conv_std, dim=0, decay=True)
        self.a_log = factory.parameter(f"{name}.a_log", (heads,), std=factory.std and 1.0, dim=0)
        self.dt_bias = factory.parameter(
            f"{name}.dt_bias", (heads,), std=factory.std and 1.0, dim=0
        )
        if factory.std:
            draw_decays(self.a_log, self.dt_bias)
        self.norm = factory.parameter(f"{name}.norm.weight", (r,), fill=1.0, partial=True)
        self.out = RowLinear(factory, f"{name}.out", heads * r, model.hidden, std, model.bias)

    def forward(
        self,
        x: Tensor,
        offsets: Tensor | None,
        rotary: None,
        cache: KeyValueCache | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the mixer's output in the shape of x: (s, b, h), or (s/tp, b, h) with sequence
        parallelism. offsets: the number of tokens of its document before each token, (s, b), of the
        tokens for which this rank computes heads; None: a sample is one document. rotary: None.
        cache: has the state and the convolution's last inputs in decoding. tokens: see Block.
        """
        u = self.inputs(x).unflatten(-1, (-1, self.rows))  # s b g rows
        weights = HeadWeights(self.conv, self.a_log, self.dt_bias, self.norm)
        if cache is not None:
            return self.out(self._decode(u, weights, cache))
        if self.exchanges:
            u = exchange_heads(u, self.ranks)
            conv, a_log, dt_bias = map(self.ranks.shard, weights[:3])
            weights = HeadWeights(conv, a_log, dt_bias, self.norm)
        if self.recompute and torch.is_grad_enabled():
            mixed = recompute(self._mix, u, weights, offsets)
        else:
            mixed = self._mix(u, weights, offsets)
        return self.out(to_tokens(mixed, self.ranks) if self.exchanges else mixed)

    def _mix(self, u: Tensor, weights: HeadWeights, offsets: Tensor | None) -> Tensor:
        """Return the gated results of all heads, (s, b, a r), for the matrix's outputs u."""
        ranks = Group() if self.exchanges else self.ranks
        u = to_segments(u, ranks)
        channels = self._channels(u)
        before = tokens_before(channels, self.taps - 1, ranks)
        mixed, _ = self._run(u, channels, before, weights, offsets, None, ranks)
        return from_segments(mixed, ranks)

    def _decode(self, u: Tensor, weights: HeadWeights, cache: KeyValueCache) -> Tensor:
        """Return the gated results of new tokens, (s, b, a r), and keep what later ones need."""
        channels = self._channels(u)
        count = self.taps - 1
        before, state = cache.states(self) or (channels.new_zeros(count, *channels.shape[1:]), None)
        mixed, state = self._run(u, channels, before, weights, None, state, Group())
        seen = torch.cat([before, channels])
        cache.keep(self, seen[len(seen) - count :].clone(), state)
        return mixed

    def _channels(self, u: Tensor) -> Tensor:
        """Return the inputs of the convolution, q, k and v of each key head: (s, b, channels)."""
        return u[..., : self.channels].flatten(2)

    def _run(
        self,
        u: Tensor,
        channels: Tensor,
        before: Tensor,
        weights: HeadWeights,
        offsets: Tensor | None,
        state: Tensor | None,
        ranks: Group,
    ) -> tuple[Tensor, Tensor]:
        """Return the gated results, (s, b, a r), and the last state, (b, a, p, r).

        u: the matrix's outputs, (s, b, g, rows). channels: of them, the convolution's inputs.
        before: the tokens before them. state: that before them. ranks: which have other segments.
        """
        p, r = self.sizes
        conv = weights.conv.flatten(0, 1)
        qkv = F.silu(causal_conv(channels, conv, before, offsets)).unflatten(2, (u.shape[2], -1))
        exact = torch.promote_types(u.dtype, torch.float32)
        q, k, v = (x.to(exact) for x in qkv.split([p, p, self.shared * r], -1))
        z, b, a = u[..., qkv.shape[-1] :].split([self.shared * r, self.shared, self.shared], -1)
        b, a = b.flatten(2).to(exact), a.flatten(2).to(exact)  # s b heads
        decay = -weights.a_log.to(exact).exp() * F.softplus(a + weights.dt_bias.to(exact))
        v = v.unflatten(-1, (self.shared, r)).flatten(2, 3)  # s b a r
        mixed, state = gated_delta_rule(
            _unit(q) * p**-0.5, _unit(k), v, decay, self.most * b.sigmoid(), offsets, state, ranks
        )
        normed = F.rms_norm(mixed, (r,), None, self.eps).to(u.dtype) * weights.norm
        gate = F.silu(z.to(exact)).unflatten(-1, (self.shared, r)).flatten(2, 3)
        return (normed * gate).to(u.dtype).flatten(2), state


def _unit(x: Tensor) -> Tensor:
    """Return x, (..., p), divided by its length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


@torch.no_grad()
def draw_decays(a_log: Tensor, dt_bias: Tensor) -> None:
    """Make the decays that a mixer begins with of normal numbers, in place: (a,) each.

    exp(a_log) is uniform from 0 (here 0.01) to 16, and softplus(dt_bias) is between 0.001 and 0.1,
    with a uniform logarithm, as in Mamba-2's and the gated delta net's published code.
    """
    a_log.copy_((0.01 + _uniform(a_log) * (16 - 0.01)).log())
    steps = (_uniform(dt_bias) * math.log(0.1 / 0.001) + math.log(0.001)).exp()
    dt_bias.copy_(steps + (-torch.expm1(-steps)).log())  # the inverse of softplus


def _uniform(normal: Tensor) -> Tensor:
    """Return uniform numbers between 0 and 1, float64, made of standard normal ones."""
    return torch.special.ndtr(normal.double())
