"""Kimi delta attention (KDA, arXiv 2510.26692): the delta rule with a decay of each key column.

    x (s, b, h) --in--> q | k | v, --causal convolution, SiLU--> heads of q, k (normalised), v
                        b: the strength of each head, sigmoid(b)
              --low--> two small vectors --decay--> f of each key column --gate--> z of each value
    delta rule (linear_recurrence.py) --RMSNorm over a head, times sigmoid(z)--> out

The decay of a key column is exp(-exp(a_log) softplus(f + dt_bias)), with one a_log of a head. Keys
and values have equally many heads, which tensor parallelism divides, with all that is of a head.
The matrix `low` is whole on every tensor rank: what the heads contribute to the gradient of its
outputs is summed over tp by the matrices behind it, so its own gradient is whole on each rank.

Shapes: s tokens, b samples, a heads on this rank with keys of size p and values of size r.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from architecture.shape import ModelShape
from layers.delta_mixer import DeltaMixer
from layers.latent_attention import WholeLinear
from layers.mixer_parameters import conv_weight
from layers.recurrent_mixer import Inputs, MixerWeights, Segment, exact
from parallel import ColumnLinear, Matrices, ParamFactory


class KimiDeltaAttention(DeltaMixer):
    """A mixer by the delta rule whose decays are of single key columns."""

    def __init__(
        self, factory: ParamFactory, name: str, model: ModelShape, std: float, recompute: bool
    ):
        """Make the parameters. std: for the output matrix. recompute: see RecurrentMixer."""
        p, r = model.mixer_key_size, model.mixer_value_size
        super().__init__(factory, model, 2 * p + r, recompute)
        h, heads = model.hidden, model.mixer_value_heads
        members = Matrices(parts=(("q", p), ("k", p), ("v", r), ("b", 1)), dim=1, heads=(0,))
        shape = heads, self.channels + 1
        self.inputs = ColumnLinear(factory, f"{name}.in", h, shape, 0, False, members)
        members = Matrices(parts=(("decay", p), ("gate", r)))
        # A wider model has more heads of one size: `low` has as many rows, and the other two as
        # many columns (the roles of muP).
        self.low = WholeLinear(factory, f"{name}.low", h, p + r, members, "readout")
        of_heads = Matrices(heads=(0,))
        self.decay = ColumnLinear(
            factory, f"{name}.decay", p, (heads, p), 0, False, of_heads, "input"
        )
        self.gate = ColumnLinear(
            factory, f"{name}.gate", r, (heads, r), 0, False, of_heads, "input"
        )
        self.conv = conv_weight(factory, f"{name}.conv", (heads, self.channels, self.taps))
        self.add_head_parameters(name, model, std, (heads, p))

    def conv_taps(self) -> Tensor:
        """Return the convolution's taps, (a, channels, taps)."""
        return self.conv

    def project(self, x: Tensor) -> Inputs:
        """Return q, k, v, b, f and z of each head side by side, (s, b, a, 3 p + 2 r + 1)."""
        p, r = self.sizes
        low_decay, low_gate = self.low(x).split([p, r], -1)
        of_heads = self.inputs(x), self.decay(low_decay), self.gate(low_gate)
        widths = self.channels + 1, p, r
        pairs = zip(of_heads, widths, strict=True)
        return (torch.cat([u.unflatten(-1, (-1, width)) for u, width in pairs], -1),)

    def run(
        self, inputs: Inputs, weights: MixerWeights, segment: Segment
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gated results, (s, b, a r), and the state, (b, a, p, r)."""
        (u,) = inputs
        _, a_log, dt_bias = weights.divided
        p, r = self.sizes
        q, k, v = self.convolved(inputs, weights, segment).split([p, p, r], -1)  # s b a columns
        b, f, z = exact(u[..., self.channels :]).split([1, p, r], -1)
        decay = -exact(a_log).exp()[:, None] * F.softplus(f + exact(dt_bias))  # s b a p
        strength = b.squeeze(-1).sigmoid()
        return self.recur(
            (q, k, v), decay, strength, z.sigmoid(), weights.whole[0], segment, u.dtype
        )
