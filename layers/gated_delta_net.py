"""Gated delta net: a mixer whose state has a constant size (arXiv 2412.06464), as in Qwen3-Next.

    x (s, b, h) --in--> q | k | v, --causal convolution, SiLU--> heads of q, k (normalised), v
                        z, the gate of each value; b, a: strength and decay of each value head
    gated delta rule (linear_recurrence.py) --RMSNorm over a head, times SiLU(z)--> out

The strength of a value head is sigmoid(b), its decay exp(-exp(a_log) softplus(a + dt_bias)). There
are g key heads and a value heads, a/g of which share a key head. Rows of the matrix `in` for each
key head: q, k, v of its value heads, z of them, then b and a. So tensor parallelism, which divides
the key heads, keeps a value head with its key head, and the convolution's channels (q, k, v of a
key head), a_log and dt_bias are cut in the same way. With fewer key heads than tensor ranks several
have the same q and k, and a share of its value heads each (layers/repeated_heads.py). The norm's
scale is shared by all heads: each tensor rank's gradient is one term of a sum.

Shapes: s tokens, b samples, g key heads of size p, a value heads of size r on this rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architecture.shape import ModelShape
from layers.delta_mixer import DeltaMixer
from layers.mixer_parameters import conv_options, conv_weight
from layers.recurrent_mixer import Inputs, MixerWeights, Segment, exact
from layers.repeated_heads import Repeated, RepeatedHeads, add_parts
from parallel import ColumnLinear, Matrices, ParamFactory

# The mesh's group of tensor ranks with the same key head, and what they all have of it.
OF_KEY_HEADS = Repeated("key_copies", ("q", "k"))


class GatedDeltaNet(DeltaMixer):
    """A mixer by the gated delta rule."""

    def __init__(
        self, factory: ParamFactory, name: str, model: ModelShape, std: float, recompute: bool
    ):
        """Make the parameters. std: for the output matrix. recompute: see RecurrentMixer."""
        heads, tp = model.mixer_key_heads, factory.mesh.tp.size
        p, r = model.mixer_key_size, model.mixer_value_size
        # Value heads of a key head: of the model, and of them those on this rank.
        shared = model.mixer_value_heads // heads
        self.shared = model.mixer_value_heads // max(heads, tp)
        super().__init__(factory, model, 2 * p + self.shared * r, recompute)
        self.most = 2.0 if model.mixer_negative else 1.0  # of a strength
        convolved = ("q", p), ("k", p), ("v", shared * r)
        parts = *convolved, ("z", shared * r), ("b", shared), ("a", shared)
        members = Matrices(parts=parts, dim=1, heads=(0,))
        made = factory, f"{name}.in", model.hidden, (heads, sum(length for _, length in parts))
        channels = heads, sum(length for _, length in convolved), self.taps
        self.inputs: nn.Module
        if heads % tp:
            self.inputs = RepeatedHeads(*made, False, members, OF_KEY_HEADS)
            taps = conv_options(factory, self.taps)
            of_rank = f"{name}.conv", channels, convolved, OF_KEY_HEADS
            self.conv_names = add_parts(self, "conv", factory, *of_rank, **taps)
        else:
            self.inputs = ColumnLinear(*made, 0, False, members)
            self.conv = conv_weight(factory, f"{name}.conv", channels)
            self.conv_names = ["conv"]
        self.rows = self.channels + self.shared * (r + 2)  # of a key head on this rank
        self.add_head_parameters(name, model, std, (model.mixer_value_heads,))

    def conv_taps(self) -> Tensor:
        """Return the convolution's taps, (g, channels, taps), or (channels, taps) of one head."""
        parts = [getattr(self, name) for name in self.conv_names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

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
