"""What mixers with a convolution and a state have in common: ranks, documents and decoding.

    class GatedDeltaNet(RecurrentMixer)        and its `project`, `weights`, `conv_inputs`, `run`

    x --project--> inputs of each head --convolution, recurrence (`run`)--> results --out--> y

Several ranks with parts of a sample (--cp) send one another the last tokens before a segment, for
the convolution, and what a segment does with a state (linear_recurrence.py). With --cp-mixer heads
each rank gets all tokens for some of the heads instead. In decoding the cache has the last tokens
and the state, whose size does not depend on the length of the text.

Shapes: s tokens, b samples, taps of the convolution.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

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
from parallel import ParamFactory, exact_dtype, recompute

Inputs = tuple[Tensor, ...]  # of each head, (s, b, heads, columns)


class MixerWeights(NamedTuple):
    """The parameters between a mixer's matrices, as tensors.

    divided: those that have parts of their own for each head, along dimension 0. whole: those that
    all heads share.
    """

    divided: tuple[Tensor, ...]
    whole: tuple[Tensor, ...]


class Segment(NamedTuple):
    """Tokens in a row, and what a mixer needs of those before them.

    channels: the convolution's inputs, (s, b, channels). before: those of the tokens before, (taps
    - 1, b, channels). offsets: the number of tokens of its document before each token, (s, b);
    None: one document. state: that before the first token; None: zeros. ranks: those that have
    other segments of the samples.
    """

    channels: Tensor
    before: Tensor
    offsets: Tensor | None
    state: Tensor | None
    ranks: Group

    def convolve(self, taps: Tensor) -> Tensor:
        """Return the causal convolution of each channel, (s, b, channels); taps: (channels, t)."""
        return causal_conv(self.channels, taps, self.before, self.offsets)


class RecurrentMixer(nn.Module):
    """A mixer that goes through the tokens in order; takes and returns what attention does.

    A subclass has the module `out`, the matrix of the results, and these four methods.
    """

    out: nn.Module

    def __init__(self, factory: ParamFactory, taps: int, recompute: bool):
        """Take the settings. taps: the tokens that the convolution sees. recompute: whether the
        backward pass runs what is between the matrices again.
        """
        super().__init__()
        self.factory = factory
        self.taps = taps
        self.recompute = recompute
        self.ranks, self.exchanges = factory.mesh.cp, factory.cp_mixer == "heads"

    def project(self, x: Tensor) -> Inputs:
        """Return what each head of this tensor rank computes with, for x (s, b, h), or (s/tp, b, h)
        with sequence parallelism.
        """
        raise NotImplementedError

    def weights(self) -> MixerWeights:
        """Return the parameters that `run` computes with."""
        raise NotImplementedError

    def conv_inputs(self, inputs: Inputs) -> Tensor:
        """Return what the convolution reads, (s, b, channels)."""
        raise NotImplementedError

    def run(
        self, inputs: Inputs, weights: MixerWeights, segment: Segment
    ) -> tuple[Tensor, Tensor | None]:
        """Return the results of all heads, (s, b, columns), and the state after the last token."""
        raise NotImplementedError

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
        inputs, weights = self.project(x), self.weights()
        if cache is not None:
            return self.out(self._decode(inputs, weights, cache))
        if self.exchanges:
            inputs = tuple(exchange_heads(u, self.ranks) for u in inputs)
            weights = MixerWeights(tuple(map(self.ranks.shard, weights.divided)), weights.whole)
        if self.recompute and torch.is_grad_enabled():
            mixed = recompute(self._mix, inputs, weights, offsets)
        else:
            mixed = self._mix(inputs, weights, offsets)
        return self.out(to_tokens(mixed, self.ranks) if self.exchanges else mixed)

    def _mix(self, inputs: Inputs, weights: MixerWeights, offsets: Tensor | None) -> Tensor:
        """Return the results of this rank's heads, (s, b, columns), with cp over its segments."""
        ranks = Group() if self.exchanges else self.ranks
        inputs = tuple(to_segments(u, ranks) for u in inputs)
        channels = self.conv_inputs(inputs)
        before = tokens_before(channels, self.taps - 1, ranks)
        segment = Segment(channels, before, offsets, None, ranks)
        mixed, _ = self.run(inputs, weights, segment)
        return from_segments(mixed, ranks)

    def _decode(self, inputs: Inputs, weights: MixerWeights, cache: KeyValueCache) -> Tensor:
        """Return the results of new tokens, (s, b, columns), and keep what later ones need."""
        channels = self.conv_inputs(inputs)
        count = self.taps - 1
        before, state = channels.new_zeros(count, *channels.shape[1:]), None
        if kept := cache.states(self):
            before, *states = kept
            state = states[0] if states else None
        segment = Segment(channels, before, None, state, Group())
        mixed, state = self.run(inputs, weights, segment)
        read = torch.cat([before, channels])
        last = read[len(read) - count :].clone()
        cache.keep(self, last, *([] if state is None else [state]))
        return mixed


def exact(x: Tensor) -> Tensor:
    """Return x in fp32 at least, in which states and norms are computed."""
    return x.to(exact_dtype(x.dtype))
