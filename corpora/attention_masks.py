"""Masks of attention from the first and last token that each token sees.

    mask = visible(batch.starts, batch.stops, slopes)       once for a stage and micro-batch
    mixed = masked_attention(q, k, v, mask)                 in each block

On a CPU a mask is a tensor for torch's attention. On a GPU it is blocks of 128 x 128 tokens for
torch's flex_attention, which skips blocks that no token sees: no s x s tensor is made.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # tokens; flex_attention's default


class Mask(NamedTuple):
    """A mask of attention, which `masked_attention` applies.

    dense: a bool mask or a bias, for torch's attention. Else blocks and score: the block_mask and
    score_mod of flex_attention.
    """

    dense: Tensor | None = None
    blocks: BlockMask | None = None
    score: Callable | None = None


def alibi_slopes(heads: int) -> Tensor:
    """Return ALiBi's slope of every head i (arXiv 2108.12409): 2^(-8i/n), float64 (heads,).

    n: the largest power of two up to `heads`. Heads beyond n take every second slope for 2n heads.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float64)


def visible(
    starts: Tensor,
    stops: Tensor,
    slopes: Tensor | None,
    dtype: torch.dtype,
    places: Tensor | None = None,
) -> Mask:
    """Return the mask with which token q sees tokens starts[q] to stops[q] - 1; both are (b, s).

    slopes: ALiBi's, for the local heads (a,); the score falls with the distance, on both sides.
    places: positions of the tokens whose queries are local, (q,), in any order; None: all tokens.
    """
    length = starts.shape[1]
    if places is not None:
        starts = starts[:, places]
        stops = stops[:, places]
    if starts.device.type == "cuda":
        score = None if slopes is None else alibi_score(slopes.float(), places)
        return Mask(None, visible_blocks(starts, stops, length), score)
    return Mask(_dense(starts, stops, slopes, dtype, length, places))


def _dense(
    starts: Tensor,
    stops: Tensor,
    slopes: Tensor | None,
    dtype: torch.dtype,
    length: int,
    places: Tensor | None,
) -> Tensor:
    """Return a bool mask (b, 1, q, s), or with ALiBi the bias of the scores, (b, a, q, s)."""
    keys = torch.arange(length, device=starts.device)
    seen = (keys >= starts[..., None]) & (keys < stops[..., None])
    if slopes is None:
        return seen[:, None]
    queries = keys if places is None else places
    distance = (queries[:, None] - keys).abs()
    bias = -slopes[:, None, None] * distance
    return bias.to(dtype).masked_fill(~seen[:, None], -torch.inf)


def visible_blocks(starts: Tensor, stops: Tensor, length: int) -> BlockMask:
    """Return the blocks of keys that each block of queries sees, wholly or perhaps in part.

    starts, stops: the range that each query sees, (b, q). length: the number of keys.
    """
    least, most = (_by_block(starts, by) for by in ("amin", "amax"))
    shortest, longest = (_by_block(stops, by) for by in ("amin", "amax"))
    begin = torch.arange(-(-length // BLOCK), device=starts.device) * BLOCK
    seen = (least[..., None] < begin + BLOCK) & (longest[..., None] > begin)  # b, queries, keys
    whole = (most[..., None] <= begin) & (shortest[..., None] >= begin + BLOCK)

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k >= starts[b, q]) & (k < stops[b, q])

    kinds = (*_listed(seen & ~whole), *_listed(whole))
    return BlockMask.from_kv_blocks(*kinds, BLOCK, sees, (starts.shape[1], length))


def _by_block(values: Tensor, by: str) -> Tensor:
    """Return the smallest (by: "amin") or largest ("amax") value of each block: (b, blocks).

    values: (b, q); the last value is repeated to fill the last block.
    """
    count = -(-values.shape[1] // BLOCK)
    more = count * BLOCK - values.shape[1]
    filled = torch.cat([values, values[:, -1:].expand(-1, more)], 1)
    return getattr(filled.unflatten(1, (count, BLOCK)), by)(2)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of marked blocks in each row, and the row's blocks, marked ones first.

    Both have a dimension of 1 in place of heads: all heads have the same blocks.
    """
    numbers = blocks.sum(-1, dtype=torch.int32)
    order = (~blocks).to(torch.int32).argsort(dim=-1, stable=True)
    return numbers[:, None], order[:, None].to(torch.int32)


def takes_flex(head_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether flex_attention takes such heads: on GPUs, from 16 columns on, not in fp64."""
    return device.type == "cuda" and head_size >= 16 and dtype != torch.float64


def causal_alibi(
    slopes: Tensor,
    samples: int,
    length: int,
    head_size: int,
    dtype: torch.dtype,
    places: Tensor | None = None,
) -> Mask:
    """Return the mask of causal attention with ALiBi; slopes: of the local heads, (a,).

    A dense mask is (1, a, q, s) with -inf above the diagonal, the same for all samples. It holds
    -slope * distance, so that near tokens are exact in bf16. A mask of flex_attention is for
    `samples` samples. places: see `visible`.
    """
    if takes_flex(head_size, dtype, slopes.device):
        stops = torch.arange(1, length + 1, device=slopes.device).repeat(samples, 1)
        return visible(torch.zeros_like(stops), stops, slopes, dtype, places)
    keys = torch.arange(length, dtype=torch.float64, device=slopes.device)
    queries = keys if places is None else places
    distance = queries[:, None] - keys  # (q, s)
    bias = -slopes[:, None, None] * distance
    return Mask(bias.masked_fill_(distance < 0, -torch.inf)[None].to(dtype))


def alibi_score(slopes: Tensor, places: Tensor | None = None) -> Callable:
    """Return flex_attention's score_mod of ALiBi: a score minus slope * distance.

    slopes: of the local heads, (a,). places: see `visible`.
    """

    def score(value: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        query = q if places is None else places[q]
        return value - slopes[h] * (query - k).abs()

    return score


@functools.cache
def _compiled() -> Callable:
    """Return flex_attention compiled to one kernel; uncompiled it would write all scores."""
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Compute `masked_attention` on a GPU."""
    grouped = q.shape[1] != k.shape[1]
    options = {"score_mod": mask.score, "block_mask": mask.blocks, "enable_gqa": grouped}
    return _compiled()(q, k, v, **options)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v under the mask; q, k, v are (b, heads, s, d)."""
    if mask.blocks is not None:
        return flex(q, k, v, mask)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense, enable_gqa=grouped)
