"""Gated delta net: a mixer whose state has a constant size (arXiv 2412.06464), as in Qwen3-Next.

    x (s, b, h) --in--> q | k | v, --causal convolution, SiLU--> heads of q, k (normalised), v
                        z, the gate of each value; b, a: strength and decay of each value head
    gated delta rule (linear_recurrence.py) --RMSNorm over a head, times SiLU(z)--> out

The strength of a value head is sigmoid(b), its decay exp(-exp(a_log) softplus(a + dt_bias)). There
are g key heads and a value heads, a/g of which share a key head. Rows of the matrix `in` for each
key head: q, k, v of its value heads, z of them, then b and a. So tensor parallelism, which divides
the key heads, keeps a value head with its key head, and the convolution's channels (q, k, v of a
key head), a_log and dt_bias are cut in the same way. The norm's scale is shared by all heads: each
tensor rank's gradient is one term of a sum.

Shapes: s tokens, b samples, g key heads of size p, a value heads of size r on this rank.
"""

import torch.nn.functional as F
from torch import Tensor

from architecture.shape import ModelShape
from distributed.collectives import Group
from layers.causal_conv import causal_conv
from layers.linear_recurrence import linear_recurrence
from layers.mixer_parameters import add_decays, conv_weight
from layers.recurrent_mixer import (
    Inputs,
    MixerWeights,
    RecurrentMixer,
    exact,
    gated_norm,
    unit,
)
from parallel import ColumnLinear, Matrices, ParamFactory, RowLinear


class GatedDeltaNet(RecurrentMixer):
    """A mixer by the gated delta rule."""

    def __init__(
        self, factory: ParamFactory, name: str, model: ModelShape, std: float, recompute: bool
    ):
        """Make the parameters. std: for the output matrix. recompute: see RecurrentMixer."""
        super().__init__(factory, model.mixer_kernel, recompute)
        self.shared = model.mixer_value_heads // model.mixer_key_heads  # value heads of a key head
        p, r = self.sizes = model.mixer_key_size, model.mixer_value_size
        self.eps = model.mixer_norm_eps or model.norm_eps
        self.most = 2.0 if model.mixer_negative else 1.0  # of a strength
        values = self.shared * r
        parts = [("q", p), ("k", p), ("v", values), ("z", values)]
        parts += [("b", self.shared), ("a", self.shared)]
        members = Matrices(parts=tuple(parts), dim=1, heads=(0,))
        self.rows = sum(length for _, length in parts)  # of a key head in the first matrix
        self.channels = 2 * p + values  # of a key head in the convolution
        shape = model.mixer_key_heads, self.rows
        self.inputs = ColumnLinear(factory, f"{name}.in", model.hidden, shape, 0, False, members)
        conv = model.mixer_key_heads, self.channels, self.taps
        self.conv = conv_weight(factory, f"{name}.conv", conv)
        heads = model.mixer_value_heads
        self.a_log, self.dt_bias = add_decays(factory, name, (heads,), (heads,))
        self.norm = factory.parameter(f"{name}.norm.weight", (r,), fill=1.0, partial=True)
        self.out = RowLinear(factory, f"{name}.out", heads * r, model.hidden, std, model.bias)

    def project(self, x: Tensor) -> Inputs:
        """Return the first matrix's outputs, (s, b, g, rows)."""
        return (self.inputs(x).unflatten(-1, (-1, self.rows)),)

    def weights(self) -> MixerWeights:
        """Return the convolution's taps, a_log and dt_bias, and the norm's scale."""
        return MixerWeights((self.conv, self.a_log, self.dt_bias), (self.norm,))

    def conv_inputs(self, inputs: Inputs) -> Tensor:
        """Return q, k and v of each key head: (s, b, channels)."""
        return inputs[0][..., : self.channels].flatten(2)

    def run(
        self,
        inputs: Inputs,
        channels: Tensor,
        before: Tensor,
        weights: MixerWeights,
        offsets: Tensor | None,
        state: Tensor | None,
        ranks: Group,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gated results, (s, b, a r), and the state, (b, a, p, r)."""
        (u,) = inputs
        conv, a_log, dt_bias = weights.divided
        p, r = self.sizes
        shared = self.shared
        qkv = F.silu(causal_conv(channels, conv.flatten(0, 1), before, offsets))
        qkv = exact(qkv).unflatten(2, (u.shape[2], -1))
        q, k, v = qkv.split([p, p, shared * r], -1)
        z, b, a = exact(u[..., self.channels :]).split([shared * r, shared, shared], -1)
        v, z = (x.unflatten(-1, (shared, r)).flatten(2, 3) for x in (v, z))  # s b a r
        decay = -exact(a_log).exp() * F.softplus(a.flatten(2) + exact(dt_bias))  # s b a
        strength = self.most * b.flatten(2).sigmoid()
        mixed, state = linear_recurrence(
            unit(q) * p**-0.5, unit(k), v, decay[..., None], strength, offsets, state, ranks
        )
        return gated_norm(mixed, weights.whole[0], F.silu(z), self.eps, u.dtype), state
