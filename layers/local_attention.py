"""Attention of blocks that have a window, a softcap or sinks, beside blocks that have none.

    positions = LocalPositions(factory, model, micro_batch, plain, blocks)
    for seen, rotary in positions.inputs_by_block(batch, cache, count)     a pair for each block
    mixed = attend_locally(attention, q, k, v, seen, cache)          in the block's Attention

A window is a range of keys, as a document is: with a window of w tokens, token q sees the keys from
q - w + 1 on, but none before the start of its document. A softcap limits a score x to
c tanh(x / c). A sink is a learned logit of a head that takes part in the softmax and whose
probability is dropped:

    p[k] = exp(score[k]) / (exp(sink) + sum of exp(score[j]) over all keys j that are seen)

On GPUs that have it, torch's flex_attention computes them (layers/attention_masks.py): it skips
blocks of keys that no query sees, and its log of the softmax's sum gives the sink's share.
Elsewhere the queries are cut into spans, and each span attends to the keys that its queries see:
torch's attention with a mask if there is only a window, else products and a softmax in fp32 at
least.

Letters of shapes: b samples, s tokens of a sample, a attention heads on this rank, g key/value
heads, d head size, q queries on this rank. Read layers/attention.py before this file.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from architecture.block_attention import SPAN, BlockAttention
from architecture.shape import ModelShape
from data import Batch
from distributed.collectives import Group
from distributed.context_parallel import gather_tokens, to_heads, to_tokens
from layers import attention_masks
from layers.attention_masks import compiled_flex, takes_flex, visible_blocks
from layers.rotary import Rotary
from parallel import ParamFactory, exact_dtype, recompute

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Span(NamedTuple):
    """Adjacent queries of this rank and the keys that they may see.

    mask: whether each query sees each of these keys, (b or 1, 1, queries, keys). distance: from
    each query to each key, (queries, keys); None without ALiBi.
    """

    queries: slice
    keys: slice
    mask: Tensor
    distance: Tensor | None


class VisibleKeys(NamedTuple):
    """The keys that each query of this rank sees, for flex_attention or in spans.

    places: the queries' places among the keys, (q,). slopes: ALiBi's of the local heads, (a,), or
    None.
    """

    places: Tensor
    slopes: Tensor | None
    blocks: "BlockMask | None"
    spans: list[Span]


def seen_by(
    starts: Tensor, stops: Tensor, places: Tensor, keys: int, slopes: Tensor | None, flex: bool
) -> VisibleKeys:
    """Return what queries see: query q the keys starts[q] to stops[q] - 1.

    starts, stops: (b or 1, q). places: the queries' places among the keys, (q,). keys: the number
    of keys. slopes: ALiBi's, or None. flex: whether flex_attention will run. Else the bounds of the
    spans are read on the host, which waits for a GPU once.
    """
    if flex:
        return VisibleKeys(places, slopes, visible_blocks(starts, stops, keys), [])
    spans = []
    numbers = torch.arange(keys, device=starts.device)
    for first in range(0, starts.shape[1], SPAN):
        queries = slice(first, min(first + SPAN, starts.shape[1]))
        begins = starts[:, queries]
        ends = stops[:, queries]
        near = slice(int(begins.min()), int(ends.max()))
        here = numbers[near]
        mask = (here >= begins[..., None]) & (here < ends[..., None])
        distance = None
        if slopes is not None:
            distance = (places[queries][:, None] - here).abs()
        spans.append(Span(queries, near, mask[:, None], distance))
    return VisibleKeys(places, slopes, None, spans)


class LocalPositions:
    """Makes what the queries of each block see, and its rotary tables, for a stage's blocks.

    Blocks with the same window share the first, blocks with the same base and scaling the second.
    """

    def __init__(
        self,
        factory: ParamFactory,
        model: ModelShape,
        micro_batch: int,
        plain: Any,
        blocks: Sequence[BlockAttention],
    ):
        """Make the rotary tables.

        micro_batch: its number of samples. plain: the attention.Positions of the stage, whose masks
        are those of the blocks that torch's kernels compute. blocks: the attention of each block of
        the stage.
        """
        self.factory = factory
        self.mesh = factory.mesh
        self.length = model.seq_length
        self.micro_batch = micro_batch
        self.slopes = plain.slopes  # ALiBi's, of the heads that this rank computes, (a,), or None
        self.plain = plain
        self.blocks = blocks
        self.flex = takes_flex(model.head_size, factory.dtype, factory.device)
        self._tables: dict[tuple, Rotary] = {}  # by base and scaling
        for block in blocks:
            if block.rotary and _kind_of_tables(block) not in self._tables:
                self._tables[_kind_of_tables(block)] = Rotary(factory, model, block)
        # What queries see if batches do not say it, by window: the same for all micro-batches.
        self._seen: dict[int, VisibleKeys] = {}

    def inputs_by_block(self, batch: Batch | None, cache: Any, count: int) -> list[tuple[Any, Any]]:
        """Return for each of the `count` blocks its mask and its rotary tables (None: NoPE).

        The mask is VisibleKeys, or in a plain block the Mask or None of attention.Positions.
        cache: in decoding; then the masks come from there.
        """
        positions = None if batch is None else batch.positions
        length = None if batch is None else batch.length
        if cache is not None:
            positions = cache.positions
            length = cache.tokens
        tables = {kind: rotary(positions, length) for kind, rotary in self._tables.items()}
        masks: dict[tuple, Any] = {}
        found = []
        for block in self.blocks:
            kind = (block.is_plain, block.window)
            if kind not in masks and cache is None:
                plain = self.plain.mask(batch) if block.is_plain else None
                masks[kind] = plain if block.is_plain else self._seen_in(batch, block.window)
            rotary = tables[_kind_of_tables(block)] if block.rotary else None
            found.append((masks.get(kind), rotary))
        return found

    def _seen_in(self, batch: Batch | None, window: int) -> VisibleKeys:
        """Return what this rank's queries see with a window of so many tokens; 0: no window."""
        starts = None if batch is None else batch.starts
        stops = None if batch is None else batch.stops
        masked = starts is not None and stops is not None
        if not masked and window in self._seen:
            return self._seen[window]
        device = self.factory.device
        kv = self.mesh.kv
        places = torch.arange(self.length, device=device)
        places = kv.balanced_shard(places, 0)  # the queries that this rank has
        if starts is not None and stops is not None:
            starts, stops = starts[:, places], stops[:, places]
        else:
            stops = (places + 1)[None]
            if self.flex:  # its mask is asked about each sample
                stops = stops.repeat(self.micro_batch, 1)
            starts = torch.zeros_like(stops)
        if window:
            starts = starts.maximum(places - window + 1)
        seen = seen_by(starts, stops, places, self.length, self.slopes, self.flex)
        if not masked:
            self._seen[window] = seen
        return seen


def _kind_of_tables(block: BlockAttention) -> tuple[float, str]:
    """Return what the rotary tables of a block depend on."""
    return block.rotary_base, block.rotary_scaling


def attend_locally(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, seen: VisibleKeys | None, cache: Any
) -> Tensor:
    """Return a layer's attention of q over k and v, for all heads of this rank: (s, b, a d).

    layer: the block's attention.Attention. q: (s, b, a, d). k, v: (s, b, g, d). seen: what queries
    see; None in decoding, where `cache` has the keys and values of earlier tokens.
    """
    block = layer.block
    if cache is not None:
        if block.window:
            k, v = cache.extend_window(layer, k, v, block.window)
        else:
            k, v, _ = cache.extend(layer, k, v)
        return _attend(q, k, v, layer.sinks, block.softcap, _seen_in_cache(cache, len(k), block))
    heads = layer.mesh.heads
    q, k, v = to_heads(q, k, v, heads)  # with --cp: fewer heads, more tokens
    sinks = None if layer.sinks is None else heads.shard(layer.sinks)
    run: Callable = _attend
    if layer.recompute and torch.is_grad_enabled():
        run = partial(recompute, _attend)
    return to_tokens(run(q, k, v, sinks, block.softcap, seen, layer.mesh.kv), heads)


def _seen_in_cache(cache: Any, keys: int, block: BlockAttention) -> VisibleKeys:
    """Return what the new tokens of a cache see of the last `keys` tokens, which are all kept."""
    first = cache.tokens - keys  # the place of the first kept token in the text
    places = cache.positions[0] - first
    starts = torch.zeros_like(places)
    if block.window:
        starts = starts.maximum(places - block.window + 1)
    prefix = cache.prefix - first  # its end among the kept tokens
    stops = torch.where(places < prefix, prefix, places + 1)
    slopes = cache.slopes.to(cache.device) if bool((cache.slopes != 0).any()) else None
    return seen_by(starts[None], stops[None], places, keys, slopes, False)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    softcap: float,
    seen: VisibleKeys,
    group: Group | None = None,
) -> Tensor:
    """Return attention of q, (s, b, a, d), over k and v, (t, b, g, d): (s, b, a d).

    sinks: (a,) or None. group: the ranks that share the samples' tokens; their keys and values are
    gathered.
    """
    if group is not None:
        k, v = gather_tokens(k, v, group)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # b heads s d
    if seen.blocks is not None:
        mixed = attend_by_flex(q, k, v, sinks, softcap, seen, compiled_flex())
    else:
        mixed = attend_by_spans(q, k, v, sinks, softcap, seen)
    return mixed.permute(2, 0, 1, 3).flatten(2)


def attend_by_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    softcap: float,
    seen: VisibleKeys,
    flex: Callable,
) -> Tensor:
    """Return attention of q, (b, a, s, d), over k and v, (b, g, t, d), by flex_attention.

    flex: torch's function, or that function compiled.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    slopes = seen.slopes
    bias = None if slopes is None else attention_masks.alibi_score(slopes.float(), seen.places)

    def score(value: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return the score of query q and key k in head h after softcap and ALiBi."""
        if softcap:
            value = softcap * torch.tanh(value / softcap)
        return value if bias is None else bias(value, b, h, q, k)

    options = {
        "score_mod": score if softcap or bias is not None else None,
        "block_mask": seen.blocks,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if sinks is None:
        return flex(q, k, v, **options)
    mixed, further = flex(q, k, v, **options, return_aux=AuxRequest(lse=True))
    # The share of all keys together in the softmax with the sink: 1 / (1 + exp(sink - log sum)).
    share = (further.lse - sinks[None, :, None]).sigmoid()
    return mixed * share.to(mixed.dtype)[..., None]


def attend_by_spans(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, softcap: float, seen: VisibleKeys
) -> Tensor:
    """Return attention of q, (b, a, s, d), over k and v, (b, g, t, d), one span after the other."""
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    by_torch = sinks is None and not softcap
    mixed = []
    for span in seen.spans:
        inputs = q[:, :, span.queries], k[:, :, span.keys], v[:, :, span.keys]
        bias = None  # ALiBi's, (a, queries, keys)
        if span.distance is not None and seen.slopes is not None:
            bias = -seen.slopes[:, None, None] * span.distance
        if by_torch:
            mask = span.mask
            if bias is not None:
                mask = bias.to(q.dtype).masked_fill(~mask, -torch.inf)
            mixed.append(F.scaled_dot_product_attention(*inputs, attn_mask=mask))
        else:
            mixed.append(_by_products(*inputs, span.mask, bias, sinks, softcap))
    return torch.cat(mixed, 2)


def _by_products(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
) -> Tensor:
    """Return attention of q, (b, a, s, d), over k and v, (b, a, t, d), by two matrix products.

    mask: (b or 1, 1, s, t). bias: added to the scores after the softcap, (a, s, t), or None.
    """
    exact = exact_dtype(q.dtype)
    scores = (q @ k.transpose(-1, -2)).to(exact) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores = scores + bias.to(exact)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        return scores.softmax(-1).to(v.dtype) @ v
    column = sinks.to(exact)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1].to(v.dtype) @ v


def kernel_of(model: ModelShape, blocks: Sequence[BlockAttention], factory: ParamFactory) -> str:
    """Return, for the log, how many blocks are not plain, and which kernel runs in them."""
    kinds = {
        "windows": any(block.window for block in blocks),
        "softcaps": any(block.softcap for block in blocks),
        "sinks": any(block.sinks for block in blocks),
    }
    count = sum(not block.is_plain for block in blocks)
    what = " and ".join(name for name, is_there in kinds.items() if is_there)
    if takes_flex(model.head_size, factory.dtype, factory.device):
        kernel = "torch flex_attention"
    elif kinds["softcaps"] or kinds["sinks"]:
        kernel = "matmuls and softmax"
    else:
        kernel = "torch scaled_dot_product_attention"
    spans = "" if kernel == "torch flex_attention" else f", {SPAN} queries at a time"
    return f"{what} in {count} of {len(blocks)} blocks: {kernel}{spans}"
