"""A short convolution as a mixer: each channel sees a few tokens, as in LFM2 (arXiv 2511.23404).

    x (s, b, h) --in--> b | c | x, h columns each;   y = c * convolution(b * x)  --out-->

It has no state but the last inputs of the convolution. Tensor parallelism divides the channels.

Shapes: s tokens, b samples, c channels on this rank.
"""

from torch import Tensor

from architecture.shape import ModelShape
from layers.mixer_parameters import conv_weight
from layers.recurrent_mixer import Inputs, MixerWeights, RecurrentMixer, Segment
from parallel import ColumnLinear, Matrices, ParamFactory, RowLinear


class ShortConv(RecurrentMixer):
    """A mixer of a gated convolution alone."""

    def __init__(
        self, factory: ParamFactory, name: str, model: ModelShape, std: float, recompute: bool
    ):
        """Make the parameters. std: for the output matrix. recompute: see RecurrentMixer."""
        super().__init__(factory, model.mixer_kernel, recompute)
        h = model.hidden
        matrices = Matrices(each=(0,))
        self.inputs = ColumnLinear(factory, f"{name}.in", h, (3, h), 1, False, matrices)
        self.conv = conv_weight(factory, f"{name}.conv", (h, self.taps))
        self.conv_bias = None
        if model.mixer_conv_bias:
            self.conv_bias = factory.parameter(f"{name}.conv_bias", (h,), dim=0)
        self.out = RowLinear(factory, f"{name}.out", h, h, std, model.bias)

    def project(self, x: Tensor) -> Inputs:
        """Return b, c and x side by side, (s, b, parts, 3 c / parts), for each rank to which
        channels are sent a part.
        """
        parts = self.ranks.size if self.exchanges else 1
        u = self.inputs(x).unflatten(-1, (3, parts, -1))  # s b 3 parts c/parts
        return (u.transpose(2, 3).flatten(3),)

    def weights(self) -> MixerWeights:
        """Return the convolution's taps and, if there is one, its bias."""
        bias = () if self.conv_bias is None else (self.conv_bias,)
        return MixerWeights((self.conv, *bias), ())

    def conv_inputs(self, inputs: Inputs) -> Tensor:
        """Return b * x, (s, b, c)."""
        b, _, x = _parts(inputs)
        return b * x

    def run(
        self, inputs: Inputs, weights: MixerWeights, segment: Segment
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gated convolution, (s, b, c), and no state."""
        taps, *bias = weights.divided
        convolved = segment.convolve(taps)
        if bias:
            convolved = convolved + bias[0]
        _, c, _ = _parts(inputs)
        return c * convolved, None


def _parts(inputs: Inputs) -> tuple[Tensor, ...]:
    """Return b, c and x of all channels: (s, b, c) each."""
    return tuple(part.flatten(2) for part in inputs[0].chunk(3, -1))
