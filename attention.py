"""Self-attention: its matrices, positions, norms of queries and keys, and torch's kernels.

Shapes at line ends as in model.py: s sequence, b samples, h hidden, a heads of size d, g key/value
heads; with tensor parallelism a and g are the local heads. The masks, which say which tokens each
token sees, are in corpora/attention_masks.py, and the collectives over ranks that share a sample's
tokens (--cp) in distributed/context_parallel.py. Read parallel.py first, for the matrices.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from config.messages import UserError
from config.schema import ModelShape
from config.validation import rotary_scaling
from data import Batch
from distributed.collectives import Group, sum_both_ways
from distributed.context_parallel import (
    causal_attention,
    chunk_kernel,
    gather_tokens,
    to_heads,
    to_tokens,
)
from parallel import ColumnLinear, ParamFactory, RowLinear, compiled_if_large

if TYPE_CHECKING:  # plain causal attention needs no masks, and so does not load their module
    from corpora.attention_masks import Mask

# recomputed(function, *inputs) keeps only the inputs; the backward pass runs the function again, up
# to the last tensor that it needs. No layer draws random numbers, so no generator state is kept.
recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


# ---- Positions -----------------------------------------------------------------------------------


class Positions:
    """Makes the masks (with ALiBi, if the model has it) and rotary tables for a stage's blocks.

    positions.mask(batch)                   a Mask; None: plain causal attention
    positions.rotary(batch.positions)       tables for `rotate`; None: no rotary positions

    Learned positions are a part of the embedding.
    """

    def __init__(self, factory: ParamFactory, model: ModelShape, micro_batch: int, masked: bool):
        """micro_batch: its number of samples; masked: each batch says what its tokens see."""
        self.factory = factory
        self.mesh = factory.mesh
        self.slopes: Tensor | None = None
        if model.positions == "alibi":
            slopes = self.mesh.heads.shard(local_slopes(model, factory))
            self.slopes = slopes.to(factory.device)
        self.tables: tuple[Tensor, Tensor] | None = None
        self._own_tables: tuple[Tensor, Tensor] | None = None  # rows for this rank's tokens
        if model.positions == "rotary":
            cos, sin = (t.to(factory.device, factory.dtype) for t in rotary_tables(model))
            cp = self.mesh.cp
            self.tables = cos, sin
            self._own_tables = cp.balanced_shard(cos, 0), cp.balanced_shard(sin, 0)
        self._causal: Mask | None = None
        if self.slopes is not None and not masked:
            from corpora import attention_masks

            self._causal = attention_masks.causal_alibi(
                self.slopes,
                micro_batch,
                model.seq_length,
                model.head_size,
                factory.dtype,
                self._own_places(model.seq_length),
            )

    def mask(self, batch: Batch | None) -> "Mask | None":
        """Return the mask for a batch that says what its tokens see, else that of causal ALiBi.

        None: attention is causal and has no ALiBi, so it needs no mask.
        """
        if batch is None or batch.starts is None or batch.stops is None:
            return self._causal
        from corpora import attention_masks

        places = self._own_places(batch.starts.shape[1])
        dtype = self.factory.dtype
        return attention_masks.visible(batch.starts, batch.stops, self.slopes, dtype, places)

    def rotary(self, positions: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines for `rotate`, or None if the model has no rotary positions.

        positions: of the tokens, (b, s). None: the places of this rank's tokens in a sample.
        """
        if self.tables is None or positions is None:
            return self._own_tables
        cos, sin = self.tables
        return cos[positions.t(), 0], sin[positions.t(), 0]  # s b 1 r

    def _own_places(self, length: int) -> Tensor | None:
        return own_places(self.mesh.kv, length, self.factory.device)


def own_places(group: Group, length: int, device: torch.device) -> Tensor | None:
    """Return the places of this rank's queries in a sample of `length` tokens; None: all places."""
    if group.size == 1:
        return None
    return group.balanced_shard(torch.arange(length, device=device), 0)


def local_slopes(model: ModelShape, factory: ParamFactory) -> Tensor:
    """Return ALiBi's slopes of this tensor rank's heads, a slice of the model's: (a,)."""
    from corpora.attention_masks import alibi_slopes

    return factory.mesh.tp.shard(alibi_slopes(model.heads))


def rotary_tables(model: ModelShape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary positions (arXiv 2104.09864): float64, (s, 1, 1, r) each.

    Only the first r columns of a head are turned (--rotary-fraction). As in Llama, column i forms a
    pair with column i + r/2, so both halves of a table are equal.
    """
    r = model.rotary_width
    frequencies = model.rotary_base ** (-torch.arange(0, r, 2, dtype=torch.float64) / r)
    frequencies = _scaled(frequencies, *rotary_scaling(model.rotary_scaling))
    angles = torch.arange(model.seq_length, dtype=torch.float64)[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)[:, None, None, :]
    return angles.cos(), angles.sin()


def _scaled(frequencies: Tensor, kind: str, numbers: list[float]) -> Tensor:
    """Return the frequencies after --rotary-scaling, for models that were trained on fewer tokens.

    linear: all frequencies are divided by the factor. llama3 (Llama 3.1): a frequency is divided by
    the factor if it turns less than `low` times in `positions` tokens, the length of the original
    training; kept if it turns more than `high` times; and interpolated between these.
    """
    if kind == "none":
        return frequencies
    if kind == "linear":
        return frequencies / numbers[0]
    factor, low, high, positions = numbers
    turns = positions * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first r columns of each head of x, (s, b, heads, d), by its rotary position.

    tables: cosines and sines, (s or more, 1 or b, 1, r) each.
    """
    cos, sin = (table[: len(x)] for table in tables)
    r = cos.shape[-1]
    if r < x.shape[-1]:
        turned, rest = x.split((r, x.shape[-1] - r), -1)
        return torch.cat([rotate(turned, tables), rest], -1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


# ---- Keys and values of the tokens so far --------------------------------------------------------


class KeyValueCache:
    """The keys and values of all tokens so far, by layer; decoding then computes new tokens only.

    cache.begin(count)                      before the stages run on `count` new tokens
    k, v, mask = cache.extend(layer, k, v)  in each layer

    tokens: the number of tokens, the new ones included; positions: of the new tokens, (1, s).
    """

    def __init__(self, most: int, slopes: Tensor | None, device: torch.device):
        """most: the largest number of tokens; slopes: ALiBi's of the local heads, (a,)."""
        self.most = most
        self.device = device
        self.tokens = 0
        self.slopes = torch.zeros(1) if slopes is None else slopes
        self._held: dict[nn.Module, list[Tensor]] = {}

    def begin(self, count: int) -> None:
        """Count the new tokens of the next pass through the layers, and make its mask."""
        self.positions = torch.arange(self.tokens, self.tokens + count, device=self.device)[None]
        self.tokens += count
        distance = self.positions.t() - torch.arange(self.tokens, device=self.device)  # (s, all)
        bias = -self.slopes.to(self.device)[:, None, None] * distance
        self._bias = bias.masked_fill(distance < 0, -torch.inf)[None]

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> "tuple[Tensor, Tensor, Mask]":
        """Store a layer's k and v of the new tokens, (s, b, g, d) each. Return the keys and the
        values of all tokens, and the mask for the queries of the new tokens.
        """
        from corpora import attention_masks

        if layer not in self._held:
            self._held[layer] = [t.new_empty(self.most, *t.shape[1:]) for t in (k, v)]
        keys, values = self._held[layer]
        keys[self.tokens - len(k) : self.tokens] = k
        values[self.tokens - len(v) : self.tokens] = v
        mask = attention_masks.Mask(self._bias.to(k.dtype))
        return keys[: self.tokens], values[: self.tokens], mask


# ---- Attention -----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention with grouped queries, causal unless a mask says what each token sees.

    The matrices of q, k and v are one parameter of shape (g, a/g + 2, d, h): for each key/value
    head the rows of its a/g query heads, then of its key, then of its value. Tensor parallelism
    splits the first dimension, so a key/value head stays with its query heads.
    """

    def __init__(
        self, factory: ParamFactory, name: str, model: ModelShape, std: float, recompute: bool
    ):
        """std: the standard deviation with which the output matrix is drawn. recompute: whether the
        backward pass runs `_attend` again, which lies between the two matrices.
        """
        super().__init__()
        self.queries = model.heads // model.kv_heads
        self.d = model.head_size
        self.recompute = recompute
        self.mesh = factory.mesh
        shape = (model.kv_heads, self.queries + 2, self.d)
        self.qkv = ColumnLinear(factory, f"{name}.qkv", model.hidden, shape, 0, model.qkv_bias)
        self.norms = None if model.qk_norm == "none" else QueryKeyNorm(factory, name, model)
        turns = model.positions == "rotary" and self.norms is None
        self.split: Callable = _split_heads
        if factory.compile:
            self.split = factory.fused(_split_heads) if turns else _SplitHeads.apply
        inputs = model.heads * self.d
        self.out = RowLinear(factory, f"{name}.out", inputs, model.hidden, std, model.bias)

    def forward(
        self,
        x: Tensor,
        mask: "Mask | None",
        rotary: tuple[Tensor, Tensor] | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return attention's output in the shape of x: (s, b, h), or (s/tp, b, h) with sequence
        parallelism. mask: None means causal. rotary: tables that turn q and k, or None. cache: keys
        and values of the tokens before x, in decoding; then the mask comes from the cache.
        """
        turned = rotary if self.norms is None else None
        q, k, v = self.split(self.qkv(x), self.queries, self.d, turned)
        if self.norms is not None:
            q, k = self.norms(q, k)
            q, k = (q, k) if rotary is None else (rotate(q, rotary), rotate(k, rotary))
        if cache is not None:
            k, v, mask = cache.extend(self, k, v)
            return self.out(_attend(q, k, v, mask, Group()))
        q, k, v = to_heads(q, k, v, self.mesh.heads)
        if self.recompute and torch.is_grad_enabled():  # cp gathers k and v again too
            mixed = recomputed(_attend, q, k, v, mask, self.mesh.kv)
        else:
            mixed = _attend(q, k, v, mask, self.mesh.kv)
        return self.out(to_tokens(mixed, self.mesh.heads))


def _split_heads(
    qkv: Tensor, queries: int, d: int, rotary: tuple[Tensor, Tensor] | None
) -> list[Tensor]:
    """Cut the output of the qkv matrix, (s, b, g (a/g + 2) d), into q (s, b, a, d) and k and v
    (s, b, g, d); `rotary`, if given, turns q and k. queries: a/g, the query heads of a k/v head.
    """
    qkv = qkv.unflatten(-1, (-1, queries + 2, d))  # s b g a/g+2 d
    parts = qkv.split((queries, 1, 1), -2)  # one split: backward concatenates once
    q, k, v = (t.flatten(2, 3) for t in parts)
    return [q, k, v] if rotary is None else [rotate(q, rotary), rotate(k, rotary), v]


class _SplitHeads(torch.autograd.Function):
    """`_split_heads` without rotary positions, for --compile: the results are views of the input,
    and the backward pass writes three large gradients into one tensor by one compiled kernel.
    """

    @staticmethod
    def forward(ctx, qkv, queries, d, rotary):
        ctx.queries = queries
        return tuple(_split_heads(qkv, queries, d, None))

    @staticmethod
    def backward(ctx, dq, dk, dv):
        join = compiled_if_large(_join_heads, dq.numel() + dk.numel() + dv.numel())
        return join(dq, dk, dv, ctx.queries), None, None, None


def _join_heads(q: Tensor, k: Tensor, v: Tensor, queries: int) -> Tensor:
    """Return the tensor that `_split_heads` cuts into q, k and v: (s, b, g (a/g + 2) d)."""
    q = q.unflatten(2, (-1, queries))  # s b g a/g d
    return torch.cat([q, k.unsqueeze(3), v.unsqueeze(3)], 3).flatten(2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: "Mask | None", group: Group) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v over the tokens that the mask shows (None: causal).

    q is (s, b, a, d), k and v are (s, b, g, d), the result is (s, b, a d). group: the ranks that
    hold the samples' other tokens; their keys and values are gathered.
    """
    k, v = gather_tokens(k, v, group)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # b heads s d
    if mask is not None:
        from corpora import attention_masks

        mixed = attention_masks.masked_attention(q, k, v, mask)
    elif group.size > 1:
        mixed = causal_attention(q, k, v, group)
    else:
        grouped = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return mixed.permute(2, 0, 1, 3).flatten(2)


class QueryKeyNorm(nn.Module):
    """RMSNorm of q and k: over each head, or with --qk-norm full over all heads of all tp ranks."""

    def __init__(self, factory: ParamFactory, name: str, model: ModelShape):
        super().__init__()
        self.tp = factory.mesh.tp
        self.eps = model.norm_eps
        self.full = model.qk_norm == "full"

        def scale(kind: str, heads: int) -> nn.Parameter:
            shape, dim = ((heads, model.head_size), 0) if self.full else ((model.head_size,), None)
            weight = f"{name}.{kind}_norm.weight"
            partial = not self.full
            return factory.parameter(weight, shape, fill=1.0, dim=dim, partial=partial)

        self.q, self.k = scale("q", model.heads), scale("k", model.kv_heads)

    def forward(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """Return the normalised q and k, in their shapes (s, b, heads, d)."""
        both = [(q, self.q), (k, self.k)]
        if not self.full:
            return [F.rms_norm(x, weight.shape, weight, self.eps) for x, weight in both]
        exact = torch.promote_types(q.dtype, torch.float32)
        squares = torch.stack([x.to(exact).square().mean((-2, -1)) for x, _ in both])
        means = sum_both_ways(squares, self.tp) / self.tp.size  # 2 s b; ranks have equal columns
        factors = torch.rsqrt(means + self.eps)[..., None, None]
        scaled = [(x * factor).to(x.dtype) for (x, _), factor in zip(both, factors)]
        return [x * weight.view(x.shape[2:]) for x, (_, weight) in zip(scaled, both)]


def attention_kernel(
    model: ModelShape, factory: ParamFactory, micro_batch: int, masked: bool = False
) -> str:
    """Return, for the log, which of torch's attention kernels runs in training.

    micro_batch: its number of samples. masked: whether batches say what their tokens see. Raise
    UserError if masks need flex_attention on a GPU, and it does not take this dtype or head size.
    """
    mesh = factory.mesh
    alibi = model.positions == "alibi"
    s = model.seq_length
    over = f", keys of {mesh.kv.size} ranks" * (mesh.kv.size > 1)
    over += f", heads over {mesh.heads.size} ranks" * (mesh.heads.size > 1)
    of: dict[str, Any] = {"dtype": factory.dtype, "device": factory.device}
    flex = False
    if masked or alibi:
        from corpora import attention_masks

        flex = attention_masks.takes_flex(model.head_size, **of)
    on_gpu = factory.device.type == "cuda"
    if masked and on_gpu and not flex:
        takes = f"no fp64 (here: {factory.dtype}), and heads of 16 columns or more"
        need = "masks need flex_attention on GPUs, which takes"
        raise UserError(f"{need} {takes}: head-size({model.head_size})")
    if masked:
        return f"torch {'flex' if flex else 'scaled_dot_product'}_attention, of masks{over}"
    if alibi and flex:
        return f"torch flex_attention, of ALiBi{over}"
    if mesh.kv.size > 1 and not alibi:
        kernel = chunk_kernel(torch.empty(model.head_size, **of))
        return f"torch scaled_dot_product_attention, {kernel}{over}"
    parts = mesh.tp.size * mesh.heads.size
    qkv = torch.empty(s, micro_batch, model.qkv_width // parts, **of)
    queries = model.heads // model.kv_heads
    whole = _split_heads(qkv.requires_grad_(), queries, model.head_size, None)
    q, k, v = (t.permute(1, 2, 0, 3) for t in whole)
    rows = s // mesh.kv.size  # this rank's queries
    bias = torch.empty(1, model.heads // parts, rows, s, **of) if alibi else None
    choice = torch._fused_sdp_choice(
        q[:, :, :rows],
        k,
        v,
        attn_mask=bias,
        is_causal=bias is None,
        enable_gqa=queries > 1,
    )
    return f"torch scaled_dot_product_attention, {SDPBackend(choice).name.lower()}{over}"
