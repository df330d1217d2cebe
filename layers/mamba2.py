"""Mamba-2: a mixer with a state of constant size (arXiv 2405.21060), as in Bamba and Nemotron-H.

    x (s, b, h) --in--> of each head x, --convolution, SiLU--> values; z: their gate; dt: the step
                --keys-> of each group b | c, --convolution, SiLU--> keys | queries of its heads
    S <- exp(-exp(a_log) dt) S + b (dt x)^T,  y = S^T c + d x, --times SiLU(z), RMSNorm--> out

dt is softplus(dt + dt_bias), at least mixer_step_min. There are a heads of r values and g groups,
whose keys and queries, of p columns, a/g heads share; the norm is over all values of a group. In
the options the groups are the key heads of the mixer, and the heads the value heads.

Tensor parallelism divides the heads, with all that is of a head. It divides the groups if it can.
With fewer groups than tensor ranks each rank has the keys' matrix and its taps whole, and computes
with those of its heads' group: their gradients are sums over tp, and so is what the norm is over.

Shapes: s tokens, b samples; a heads and g groups of this rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architecture.multipliers import OF_MIXER
from architecture.shape import ModelShape
from distributed.collectives import spread_to_tp, sum_both_ways
from layers.linear_recurrence import linear_recurrence
from layers.mixer_parameters import add_decays, conv_options, conv_weight
from layers.recurrent_mixer import Inputs, MixerWeights, RecurrentMixer, Segment, exact
from parallel import Matrices, ParamFactory, RowLinear, linear


class Mamba2(RecurrentMixer):
    """A mixer by a state-space model with one decay of a head and token."""

    def __init__(
        self, factory: ParamFactory, name: str, model: ModelShape, std: float, recompute: bool
    ):
        """Make the parameters. std: for the output matrix. recompute: see RecurrentMixer."""
        super().__init__(factory, model.mixer_kernel, recompute)
        tp = factory.mesh.tp
        p, r = self.sizes = model.mixer_key_size, model.mixer_value_size
        self.eps = model.mixer_norm_eps or model.norm_eps
        h, heads, groups = model.hidden, model.mixer_value_heads, model.mixer_key_heads
        self.groups = groups
        self.step_min = model.mixer_step_min
        self.repeats = groups % tp.size > 0  # whether tensor ranks have groups in common
        # The group of this rank's heads, if tensor ranks have it in common.
        self.group = tp.rank * groups // tp.size

        def of_groups(name: str, shape: tuple[int, ...], **options: object) -> nn.Parameter:
            """Return a parameter of the groups, (g, ...), cut by them or whole."""
            dim = None if self.repeats else 0
            return factory.parameter(name, shape, dim=dim, partial=self.repeats, **options)  # type: ignore[arg-type]

        members = Matrices(parts=(("z", r), ("x", r), ("dt", 1)), dim=1, heads=(0,))
        self.inputs = factory.parameter(
            f"{name}.in.weight",
            (heads, 2 * r + 1, h),
            std=factory.std,
            dim=0,
            decay=True,
            matrices=members,
        )
        members = Matrices(parts=(("b", p), ("c", p)), dim=1, heads=(0,))
        self.keys = of_groups(
            f"{name}.keys.weight", (groups, 2 * p, h), std=factory.std, decay=True, matrices=members
        )
        self.conv = conv_weight(factory, f"{name}.conv", (heads, r, self.taps))
        shape = groups, 2 * p, self.taps
        taps_options = conv_options(factory, self.taps)
        self.conv_keys = of_groups(f"{name}.conv_keys", shape, **taps_options)
        self.conv_bias = self.conv_keys_bias = None
        if model.mixer_conv_bias:
            self.conv_bias = factory.parameter(f"{name}.conv_bias", (heads, r), dim=0)
            self.conv_keys_bias = of_groups(f"{name}.conv_keys_bias", (groups, 2 * p))
        self.a_log, self.dt_bias = add_decays(factory, name, (heads,), (heads,))
        self.d = factory.parameter(f"{name}.d", (heads,), fill=1.0, dim=0)
        self.norm: nn.Parameter | None = None
        if model.mixer_norm:
            self.norm = factory.parameter(f"{name}.norm.weight", (heads, r), fill=1.0, dim=0)
        self.multipliers = [model.multiplier(place) for place in OF_MIXER]  # of z, x, b, c, dt
        self.out = RowLinear(factory, f"{name}.out", heads * r, h, std, model.bias)

    def project(self, x: Tensor) -> Inputs:
        """Return z, x and dt of each head, (s, b, a, 2 r + 1), and b and c, (s, b, g, 2 p)."""
        factory = self.factory
        p, r = self.sizes
        x = spread_to_tp(x, factory.mesh.tp, factory.sequence_parallel)
        of_heads = linear(x, self.inputs, None, factory.deferred, compile=factory.compile)
        of_groups = linear(x, self.keys, None, factory.deferred, compile=factory.compile)
        of_heads = of_heads.unflatten(-1, (-1, 2 * r + 1))
        keys = self._own_groups(of_groups.unflatten(-1, (-1, 2 * p)), 2)
        if set(self.multipliers) == {1.0}:
            return of_heads, keys
        z, x_, b, c, dt = self.multipliers
        factors = of_heads.new_tensor([z] * r + [x_] * r + [dt])
        return of_heads * factors, keys * keys.new_tensor([b] * p + [c] * p)

    def _own_groups(self, x: Tensor, dim: int) -> Tensor:
        """Return the part of x that is of this rank's groups, which are along `dim`."""
        return x.narrow(dim, self.group, 1) if self.repeats else x

    def weights(self) -> MixerWeights:
        """Return taps, a_log, dt_bias, d, the norm's scale and, if there are any, biases."""
        divided = [self.conv, self._own_groups(self.conv_keys, 0)]
        divided += [self.a_log, self.dt_bias, self.d]
        divided += [] if self.norm is None else [self.norm]
        if self.conv_bias is not None and self.conv_keys_bias is not None:
            divided += [self.conv_bias, self._own_groups(self.conv_keys_bias, 0)]
        return MixerWeights(tuple(divided), ())

    def conv_inputs(self, inputs: Inputs) -> Tensor:
        """Return x of each head, then b and c of each group: (s, b, channels)."""
        of_heads, keys = inputs
        r = self.sizes[1]
        return torch.cat([of_heads[..., r : 2 * r].flatten(2), keys.flatten(2)], -1)

    def run(
        self, inputs: Inputs, weights: MixerWeights, segment: Segment
    ) -> tuple[Tensor, Tensor | None]:
        """Return the normalised results, (s, b, a r), and the state, (b, a, p, r)."""
        of_heads, keys = inputs
        conv, conv_keys, a_log, dt_bias, d, *others = weights.divided
        scale = None if self.norm is None else others[0]
        biases = others[scale is not None :]
        p, r = self.sizes
        taps = torch.cat([conv.flatten(0, 1), conv_keys.flatten(0, 1)])
        convolved = segment.convolve(taps)
        if biases:
            convolved = convolved + torch.cat([bias.flatten() for bias in biases])
        heads, groups = of_heads.shape[2], keys.shape[2]
        x, b_c = exact(F.silu(convolved)).split([heads * r, groups * 2 * p], -1)
        x = x.unflatten(-1, (heads, r))
        b, c = b_c.unflatten(-1, (groups, 2 * p)).split([p, p], -1)
        dt = F.softplus(exact(of_heads[..., -1]) + exact(dt_bias))  # s b a
        if self.step_min:
            dt = dt.clamp(min=self.step_min)
        decay = -exact(a_log).exp() * dt
        values = x * dt[..., None]
        mixed, state = linear_recurrence(
            *(c, b, values, decay[..., None], None),
            *(segment.offsets, segment.state, segment.ranks),
        )
        mixed = mixed + x * exact(d)[:, None]
        gated = mixed * F.silu(exact(of_heads[..., :r]))
        if scale is None:
            return gated.to(of_heads.dtype).flatten(2), state
        normed = self._norm(gated, groups).to(of_heads.dtype)
        return (normed * scale).to(of_heads.dtype).flatten(2), state

    def _norm(self, x: Tensor, groups: int) -> Tensor:
        """Return x, (s, b, a, r), divided by the root mean square of all values of its group.

        groups: those of x. If other tensor ranks have heads of the same group, their squares count.
        """
        tp = self.factory.mesh.tp
        squares = x.square().unflatten(2, (groups, -1)).sum((-2, -1))  # s b g
        count = x.shape[2] // groups * x.shape[3]
        if self.repeats:
            every = F.pad(squares, (self.group, self.groups - 1 - self.group))  # of all groups
            squares = self._own_groups(sum_both_ways(every, tp), 2)
            count *= tp.size // self.groups
        factors = torch.rsqrt(squares / count + self.eps)
        return x * factors.repeat_interleave(x.shape[2] // groups, -1)[..., None]
