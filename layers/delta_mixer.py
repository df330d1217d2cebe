"""What mixers by the delta rule have in common: convolved q, k and v, decays, a gated norm.

    q | k | v --causal convolution, SiLU--> heads of q, k (normalised), v
    delta rule (linear_recurrence.py) --RMSNorm over a head, times a gate--> out

tp divides the heads, and with them the convolution's channels, a_log and dt_bias. The norm's scale
is shared by all heads: each tensor rank's gradient is one term of a sum.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from architecture.shape import ModelShape
from layers.linear_recurrence import linear_recurrence
from layers.mixer_parameters import add_decays
from layers.recurrent_mixer import Inputs, MixerWeights, RecurrentMixer, Segment, exact
from parallel import ParamFactory, RowLinear


class DeltaMixer(RecurrentMixer):
    """A mixer by the delta rule; a subclass has `project`, `run`, `conv_taps`, the matrices before.

    In what it projects, the convolution's inputs are the first columns of each head: `channels`.
    """

    def __init__(self, factory: ParamFactory, model: ModelShape, channels: int, recompute: bool):
        """Take the settings. channels: of a head in the convolution, on this rank."""
        super().__init__(factory, model.mixer_kernel, recompute)
        self.channels = channels
        self.sizes = model.mixer_key_size, model.mixer_value_size
        self.eps = model.mixer_norm_eps or model.norm_eps

    def add_head_parameters(
        self, name: str, model: ModelShape, std: float, steps: tuple[int, ...]
    ) -> None:
        """Make decays, the norm and the output matrix. std: of that matrix. steps: the shape of
        dt_bias.
        """
        factory, heads, r = self.factory, model.mixer_value_heads, model.mixer_value_size
        self.a_log, self.dt_bias = add_decays(factory, name, (heads,), steps)
        self.norm = factory.parameter(f"{name}.norm.weight", (r,), fill=1.0, partial=True)
        self.out = RowLinear(factory, f"{name}.out", heads * r, model.hidden, std, model.bias)

    def conv_taps(self) -> Tensor:
        """Return the convolution's taps: (heads, channels, taps), or (all channels, taps)."""
        raise NotImplementedError

    def weights(self) -> MixerWeights:
        """Return the convolution's taps, a_log and dt_bias, and the norm's scale."""
        return MixerWeights((self.conv_taps(), self.a_log, self.dt_bias), (self.norm,))

    def conv_inputs(self, inputs: Inputs) -> Tensor:
        """Return q, k and v of each head: (s, b, channels)."""
        return inputs[0][..., : self.channels].flatten(2)

    def convolved(self, inputs: Inputs, weights: MixerWeights, segment: Segment) -> Tensor:
        """Return q, k and v of each head after the convolution: (s, b, heads, columns)."""
        qkv = F.silu(segment.convolve(weights.divided[0].flatten(0, -2)))
        return exact(qkv).unflatten(2, (inputs[0].shape[2], -1))

    def recur(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        decay: Tensor,
        strength: Tensor,
        gate: Tensor,
        scale: Tensor,
        segment: Segment,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Return the gated results, (s, b, a r) in `dtype`, and the state, (b, a, p, r).

        decay, strength: as of linear_recurrence. gate: of each value, (s, b, a, r). scale: (r,).
        """
        q, k, v = qkv
        q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
        mixed, state = linear_recurrence(
            q, k, v, decay, strength, segment.offsets, segment.state, segment.ranks
        )
        normed = F.rms_norm(mixed, scale.shape, None, self.eps).to(dtype) * scale
        return (normed * gate).to(dtype).flatten(2), state


def _unit(x: Tensor) -> Tensor:
    """Return x, (..., p), divided by its length, whose square is at least 1e-6 as published."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
