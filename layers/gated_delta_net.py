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
from layers.delta_mixer import DeltaMixer
from layers.recurrent_mixer import Inputs, MixerWeights, Segment, exact
from parallel import ColumnLinear, Matrices, ParamFactory


class GatedDeltaNet(DeltaMixer):
    """A mixer by the gated delta rule."""

    def __init__(
        self, factory: ParamFactory, name: str, model: ModelShape, std: float, recompute: bool
    ):
        """Make the parameters. std: for the output matrix. recompute: see RecurrentMixer."""
        self.shared = model.mixer_value_heads // model.mixer_key_heads  # value heads of a key head
        p, values = model.mixer_key_size, self.shared * model.mixer_value_size
        super().__init__(factory, model, 2 * p + values, recompute)
        self.most = 2.0 if model.mixer_negative else 1.0  # of a strength
        parts = [("q", p), ("k", p), ("v", values), ("z", values)]
        parts += [("b", self.shared), ("a", self.shared)]
        members = Matrices(parts=tuple(parts), dim=1, heads=(0,))
        self.rows = sum(length for _, length in parts)  # of a key head in the first matrix
        shape = model.mixer_key_heads, self.rows
        self.inputs = ColumnLinear(factory, f"{name}.in", model.hidden, shape, 0, False, members)
        heads = (model.mixer_value_heads,)
        self.add_head_parameters(name, model, std, model.mixer_key_heads, heads)

    def project(self, x: Tensor) -> Inputs:
        """Return the first matrix's outputs, (s, b, g, rows)."""
        return (self.inputs(x).unflatten(-1, (-1, self.rows)),)

    def run(
        self, inputs: Inputs, weights: MixerWeights, segment: Segment
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gated results, (s, b, a r), and the state, (b, a, p, r)."""
        (u,) = inputs
        _, a_log, dt_bias = weights.divided
        p, r = self.sizes
        shared = self.shared
        q, k, v = self.convolved(inputs, weights, segment).split([p, p, shared * r], -1)
        z, b, a = exact(u[..., self.channels :]).split([shared * r, shared, shared], -1)
        v, z = (x.unflatten(-1, (shared, r)).flatten(2, 3) for x in (v, z))  # s b a r
        decay = -exact(a_log).exp() * F.softplus(a.flatten(2) + exact(dt_bias))  # s b a
        strength = self.most * b.flatten(2).sigmoid()
        return self.recur(
            (q, k, v), decay[..., None], strength, F.silu(z), weights.whole[0], segment, u.dtype
        )
