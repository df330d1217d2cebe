"""The mixers that a block may have in the place of attention, and what they need of a micro-batch.

    make = CLASSES["mamba2"]                           makes a mixer of this name
    inputs = MixerInputs(factory, positions, mixers)   of the blocks of a stage
    for mask, rotary in inputs.inputs_by_block(batch, cache, count)

A mixer is a module with the parameters and the result of attention.Attention.forward. Its `mask` is
the number of tokens of its document before each token, (s, b), or None if samples are not divided
into documents; it has no rotary positions. Its state in decoding is kept in the cache
(KeyValueCache.keep).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from architecture.shape import ModelShape
from data import Batch
from distributed.context_parallel import to_segments
from layers.gated_delta_net import GatedDeltaNet
from layers.kimi_delta_attention import KimiDeltaAttention
from layers.mamba2 import Mamba2
from layers.short_conv import ShortConv
from parallel import ParamFactory

CLASSES: dict[str, Callable[..., nn.Module]] = {
    "gated_delta_net": GatedDeltaNet,
    "kda": KimiDeltaAttention,
    "mamba2": Mamba2,
    "short_conv": ShortConv,
}


def document_offsets(batch: Batch | None, factory: ParamFactory) -> Tensor | None:
    """Return the number of tokens of its document before each token; None without documents.

    With --cp, (s/2, 2b), for this rank's segments (context_parallel.to_segments), or if heads are
    exchanged for all tokens: (s, b).
    """
    if batch is None or batch.starts is None:
        return None
    starts = batch.starts
    offsets = torch.arange(starts.shape[1], device=starts.device) - starts
    if factory.cp_mixer == "heads":
        return offsets.t()
    cp = factory.mesh.cp
    return to_segments(cp.balanced_shard(offsets, 1).t(), cp)


class MixerInputs:
    """Makes masks and rotary tables of a stage's blocks, some of which have a mixer."""

    def __init__(self, factory: ParamFactory, attention: Any, mixers: Sequence[tuple[str, ...]]):
        """Keep what makes the inputs. attention: of blocks with attention; None: there are none.

        mixers: what mixes the tokens in each block of the stage (ModelShape.mixers_of).
        """
        self.factory = factory
        self.attention = attention
        self.mixers = mixers

    def inputs_by_block(self, batch: Batch | None, cache: Any, count: int) -> list[tuple[Any, Any]]:
        """Return what `attention.Positions.inputs_by_block` returns, of all `count` blocks.

        A mixer has the offsets of its tokens in their documents for a mask; a block with attention
        and a mixer has both in a tuple.
        """
        of_mixers = document_offsets(batch, self.factory) if cache is None else None
        found: Iterator[tuple[Any, Any]] = iter(())
        if self.attention is not None:
            count = sum("attention" in names for names in self.mixers)
            found = iter(self.attention.inputs_by_block(batch, cache, count))
        inputs = []
        for names in self.mixers:
            mask, rotary = next(found) if "attention" in names else (of_mixers, None)
            inputs.append(((mask, of_mixers) if len(names) > 1 else mask, rotary))
        return inputs


def kernel_of(model: ModelShape, factory: ParamFactory) -> str:
    """Return, for the log, how many blocks have a mixer, and what runs in them; or ""."""
    count = sum(map(model.has_mixer, range(model.layers)))
    if not count:
        return ""
    ranks = ""
    if factory.mesh.cp.size > 1:
        way = "heads" if factory.cp_mixer == "heads" else "states passed"
        ranks = f", {way} over {factory.mesh.cp.size} ranks"
    name = model.mixer.replace("_", " ")
    return f"{name} in {count} of {model.layers} blocks: torch matmuls by chunks{ranks}"
