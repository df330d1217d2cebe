"""Makes and applies masks of attention, given by the first and last token that each token sees.

    mask = range_mask(batch.starts, batch.stops, slopes)       once for a stage and micro-batch
    mixed = masked_attention(q, k, v, mask)                 in each block

On a CPU a mask is a tensor for torch's attention. On a GPU it is blocks of 128 x 128 tokens for
torch's flex_attention, which skips blocks that no token sees: no s x s tensor is made. On a GPU
before Ampere it is a bias of s x s numbers for torch's memory-efficient attention.

Letters of shapes: b samples, s tokens of a sample, a attention heads on this rank, q queries. With
context parallelism a rank has the keys of all s tokens, but only the queries of some of them.
ALiBi (arXiv 2108.12409) subtracts a head's slope times the distance of two tokens from their score.
"""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from distributed.context_parallel import heads_of_kernel

if TYPE_CHECKING:  # imported where it runs: flex_attention takes a second and 70 MB to load
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # the tokens of a block of queries or keys; it is flex_attention's default


class Mask(NamedTuple):
    """A mask of attention, which `masked_attention` applies.

    dense: for torch's attention, a bool mask or a bias that is added to the scores. blocks, score:
    for flex_attention, its block_mask and score_mod; score is None without ALiBi. A mask has either
    `dense` or `blocks`.
    """

    dense: Tensor | None = None
    blocks: "BlockMask | None" = None
    score: Callable | None = None


def alibi_slopes(heads: int) -> Tensor:
    """Return ALiBi's slope of every head i, counted from 1: 2^(-8i/n), float64 (heads,).

    n is the largest power of two up to `heads`. If there are more than n heads, the further heads
    take every second slope of a model with 2n heads, as the paper's authors do. The caller takes
    the slopes of this tensor rank's heads.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float64)


def range_mask(
    starts: Tensor,
    stops: Tensor,
    slopes: Tensor | None,
    dtype: torch.dtype,
    places: Tensor | None = None,
) -> Mask:
    """Return the mask with which token q sees the tokens starts[q] to stops[q] - 1.

    Called once per micro-batch, for packed documents or prefixes. starts, stops: (b, s).
    slopes: ALiBi's slopes of the local heads, (a,), or None; the scores fall with the distance in
    both directions. dtype: the type of a bias. places: the positions of the tokens whose queries
    are on this rank, (q,), in any order; None: all tokens.
    """
    length = starts.shape[1]
    if places is not None:  # only the ranges of the queries on this rank are needed
        starts = starts[:, places]
        stops = stops[:, places]
    if has_flex(starts.device):
        score = None if slopes is None else alibi_score(slopes.float(), places)
        return Mask(None, visible_blocks(starts, stops, length), score)
    dense = _dense(starts, stops, slopes, dtype, length, places)
    if dense.is_cuda and slopes is None:
        # torch would make a bias of a bool mask in each block, and keep it for the backward pass.
        dense = torch.zeros_like(dense, dtype=dtype).masked_fill_(~dense, -torch.inf)
    return Mask(dense)


def _dense(
    starts: Tensor,
    stops: Tensor,
    slopes: Tensor | None,
    dtype: torch.dtype,
    length: int,
    places: Tensor | None,
) -> Tensor:
    """Return a bool mask, (b, 1, q, s), or with ALiBi the bias of the scores, (b, a, q, s).

    The mask is true where a query sees a key; a bias is -inf where it does not. starts, stops: the
    range of keys that each query sees, (b, q). length: s. The other arguments are those of
    `range_mask`.
    """
    keys = torch.arange(length, device=starts.device)
    # Whether each query of each sample sees each key: (b, q, s).
    seen = (keys >= starts[..., None]) & (keys < stops[..., None])
    if slopes is None:
        return seen[:, None]
    # The bias of a score is -slope * distance, or -inf if the query does not see the key.
    queries = keys if places is None else places
    distance = (queries[:, None] - keys).abs()  # from each query to each key: (q, s)
    bias = -slopes[:, None, None] * distance
    return bias.to(dtype).masked_fill(~seen[:, None], -torch.inf)


def visible_blocks(starts: Tensor, stops: Tensor, length: int) -> "BlockMask":
    """Return flex_attention's mask: the blocks of keys that each block of queries sees.

    For a block of queries, a block of keys is skipped if no query sees any of its keys, and needs
    no mask if all queries see all its keys. In other blocks each query and key is compared. starts,
    stops: the range of keys that each query sees, (b, q). length: the number of keys.
    """
    from torch.nn.attention.flex_attention import BlockMask

    # For each block of queries, the least and the greatest start, and the least and the greatest
    # stop, of its queries: (b, blocks of queries, 1) each.
    first_start = _by_block(starts, "amin")[..., None]
    last_start = _by_block(starts, "amax")[..., None]
    first_stop = _by_block(stops, "amin")[..., None]
    last_stop = _by_block(stops, "amax")[..., None]
    # The first key of each block of keys.
    begin = torch.arange(-(-length // BLOCK), device=starts.device) * BLOCK
    # For each block of queries and block of keys, (b, blocks of queries, blocks of keys). `seen`:
    # some query may see some key, so the block is computed. `whole`: every query sees every key, so
    # no mask is applied in the block. `first_start` is the least start of the block's queries.
    seen = (first_start < begin + BLOCK) & (last_stop > begin)
    whole = (last_start <= begin) & (first_stop >= begin + BLOCK)

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return whether query q of sample b sees key k, in a block that is not seen whole.

        flex_attention calls this with tensors of indices. h, the head, makes no difference.
        """
        return (k >= starts[b, q]) & (k < stops[b, q])

    partial_counts, partial_blocks = _listed(seen & ~whole)
    whole_counts, whole_blocks = _listed(whole)
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_blocks,
        whole_counts,
        whole_blocks,
        BLOCK,
        sees,
        (starts.shape[1], length),
    )


def _by_block(values: Tensor, by: str) -> Tensor:
    """Return the smallest (by: "amin") or largest ("amax") value of each block: (b, blocks).

    values: a start or stop for each query, (b, q). A block has the values of BLOCK queries; the
    last value is repeated to fill the last block.
    """
    count = -(-values.shape[1] // BLOCK)
    missing = count * BLOCK - values.shape[1]
    filled = torch.cat([values, values[:, -1:].expand(-1, missing)], 1)
    return getattr(filled.unflatten(1, (count, BLOCK)), by)(2)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of marked blocks in each row, and the row's block numbers, marked first.

    flex_attention takes masks in this form: of the columns F T T F a row has the number 2 and the
    block numbers 1 2 0 3. blocks: bool, (b, blocks of queries, blocks of keys). The results are
    int32, (b, 1, blocks of queries) and (b, 1, blocks of queries, blocks of keys); the dimension of
    1 stands for the heads, because all heads have the same blocks.
    """
    numbers = blocks.sum(-1, dtype=torch.int32)
    order = (~blocks).to(torch.int32).argsort(dim=-1, stable=True)
    return numbers[:, None], order[:, None].to(torch.int32)


def has_flex(device: torch.device) -> bool:
    """Return whether masks are for flex_attention here: on GPUs of compute capability 8.0 or more.

    For older GPUs, such as the V100, Triton has no tensor-core code: its kernel is many times as
    slow as torch's memory-efficient kernel with a dense bias. A GPU that is not here is a new one.
    """
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def takes_flex(head_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether flex_attention can apply a mask to heads of this size and type here.

    It takes at least 16 columns a head, no fp64, and only GPUs that `has_flex` names. Otherwise
    ALiBi uses a dense mask. Masks of documents do so on older GPUs; on newer ones they are refused
    at the start of the run.
    """
    return head_size >= 16 and dtype != torch.float64 and has_flex(device)


def causal_alibi(
    slopes: Tensor,
    samples: int,
    length: int,
    head_size: int,
    dtype: torch.dtype,
    places: Tensor | None = None,
) -> Mask:
    """Return the mask of causal attention with ALiBi, which is the same for every micro-batch.

    slopes: ALiBi's slopes of the local heads, (a,). samples: b. length: s. places: the positions of
    the tokens whose queries are on this rank, (q,); None: all tokens. A dense mask is a bias,
    (1, a, q, s), for all samples, with -inf above the diagonal. It holds -slope * distance, so that
    the biases of near tokens are exact in bf16.
    """
    if takes_flex(head_size, dtype, slopes.device):
        # Query q sees the keys 0 to q: its range starts at key 0 and ends before key q + 1.
        stops = torch.arange(1, length + 1, device=slopes.device).repeat(samples, 1)
        return range_mask(torch.zeros_like(stops), stops, slopes, dtype, places)
    keys = torch.arange(length, dtype=torch.float64, device=slopes.device)
    queries = keys if places is None else places
    distance = queries[:, None] - keys  # from each key to each query, < 0 for later keys: (q, s)
    bias = -slopes[:, None, None] * distance
    return Mask(bias.masked_fill_(distance < 0, -torch.inf)[None].to(dtype))


def alibi_score(slopes: Tensor, places: Tensor | None = None) -> Callable:
    """Return flex_attention's score_mod for ALiBi, which subtracts slope * distance from a score.

    slopes: ALiBi's slopes of the local heads, (a,). places: the positions of the tokens whose
    queries are on this rank, (q,); None: all tokens, in order.
    """

    def score(value: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return the score of query number q and key k in head h, less slope * distance.

        flex_attention calls this. Query q of this rank belongs to the token at `places[q]`.
        """
        query = q if places is None else places[q]
        return value - slopes[h] * (query - k).abs()

    return score


@functools.cache
def compiled_flex() -> Callable:
    """Return flex_attention compiled to one kernel; the compiled function is made once.

    Without compilation flex_attention would store the scores of all queries and keys.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v under a mask of blocks, by flex_attention on a GPU.

    `masked_attention` calls this. q, k, v: (b, heads, s, d). k and v may have fewer heads than q
    (grouped-query attention). mask.score is ALiBi's change of the scores, or None.
    """
    grouped = q.shape[1] != k.shape[1]
    options = {"score_mod": mask.score, "block_mask": mask.blocks, "enable_gqa": grouped}
    return compiled_flex()(q, k, v, **options)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v under the mask; q, k, v are (b, heads, s, d).

    A mask of blocks goes to flex_attention, a dense mask to torch's attention. k and v may have
    fewer heads than q (grouped-query attention).
    """
    if mask.blocks is not None:
        return flex(q, k, v, mask)
    k, v = heads_of_kernel(q, k, v)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense, enable_gqa=grouped)
