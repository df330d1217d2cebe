"""Self-attention: its matrices, positions, norms of queries and keys, and torch's kernels.

Blocks with windows, softcaps or sinks attend by layers/local_attention.py; rotary positions are in
layers/rotary.py.

Shapes at line ends as in model.py: s sequence, b samples, h hidden, a heads of size d, g key/value
heads; with tensor parallelism a and g are the local heads. The masks, which say which tokens each
token sees, are in layers/attention_masks.py, and the collectives over ranks that share a sample's
tokens (--cp) in distributed/context_parallel.py: the ranks of `mesh.heads` exchange tokens for
heads, and the ranks of `mesh.kv` gather keys and values. Read parallel.py first, for the matrices.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from architecture.block_attention import BlockAttention
from architecture.shape import ModelShape
from base.errors import UserError
from data import Batch
from distributed.collectives import Group, sum_both_ways
from distributed.context_parallel import (
    causal_attention,
    chunk_kernel,
    gather_tokens,
    heads_of_kernel,
    to_heads,
    to_tokens,
)
from distributed.mesh import Mesh
from layers import attention_masks
from layers.attention_masks import Mask
from layers.repeated_heads import RepeatedHeads, rows_of_heads
from layers.rotary import Rotary, rotate
from parallel import (
    ColumnLinear,
    Matrices,
    ParamFactory,
    RowLinear,
    compile_if_large,
    exact_dtype,
    recompute,
)


class Positions:
    """Makes the masks (with ALiBi, if the model has it) and rotary tables for a stage's blocks.

    positions.mask(batch)                   a Mask; None: plain causal attention
    positions.rotary(batch.positions)       tables for `rotate`; None: no rotary positions
    positions.inputs_by_block(batch, None, 2)     both for each of 2 blocks

    All blocks have the same; local_attention.LocalPositions is for models whose blocks differ.
    Learned positions are a part of the embedding.
    """

    def __init__(
        self,
        factory: ParamFactory,
        model: ModelShape,
        micro_batch: int,
        masked: bool,
        block: BlockAttention,
    ):
        """Make the tables that the model's kind of positions needs.

        micro_batch: its number of samples. masked: whether batches say which tokens a token sees.
        block: the attention of every block of the stage.
        """
        self.factory = factory
        self.mesh = factory.mesh
        self.slopes: Tensor | None = None  # ALiBi's, of the heads that this rank computes
        if model.positions == "alibi":
            slopes = self.mesh.heads.shard(local_slopes(model, factory))
            self.slopes = slopes.to(factory.device)
        self._rotary = Rotary(factory, model, block) if block.rotary else None
        # The mask of ALiBi without other masks: the same for all micro-batches, so made only once.
        self._causal_alibi: Mask | None = None
        if self.slopes is not None and not masked:
            self._causal_alibi = attention_masks.causal_alibi(
                self.slopes,
                micro_batch,
                model.seq_length,
                model.head_size,
                factory.dtype,
                self._query_places(model.seq_length),
            )

    def mask(self, batch: Batch | None) -> Mask | None:
        """Return the mask of a micro-batch; None: plain causal attention needs no mask.

        If the batch does not say which tokens each token sees, only ALiBi needs a mask.
        """
        if batch is None or batch.starts is None or batch.stops is None:
            return self._causal_alibi
        places = self._query_places(batch.starts.shape[1])  # the queries (rows) that this rank has
        dtype = self.factory.dtype
        return attention_masks.range_mask(batch.starts, batch.stops, self.slopes, dtype, places)

    def rotary(
        self, positions: Tensor | None, length: int | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines for `rotate`, or None if the model has no rotary positions.

        positions, length: see Rotary.
        """
        return None if self._rotary is None else self._rotary(positions, length)

    def inputs_by_block(
        self, batch: Batch | None, cache: "KeyValueCache | None", count: int
    ) -> list[tuple[Mask | None, tuple[Tensor, Tensor] | None]]:
        """Return the mask and the rotary tables of each of `count` blocks, which have the same.

        cache: in decoding; then the masks come from there.
        """
        if cache is not None:
            return [(None, self.rotary(cache.positions, cache.tokens))] * count
        if batch is None:
            return [(self.mask(None), self.rotary(None))] * count
        return [(self.mask(batch), self.rotary(batch.positions, batch.length))] * count

    def _query_places(self, length: int) -> Tensor | None:
        """Return the places of this rank's queries in a sample of `length` tokens; None: all."""
        return query_places(self.mesh.kv, length, self.factory.device)


def query_places(group: Group, length: int, device: torch.device) -> Tensor | None:
    """Return the places of this rank's queries in a sample of `length` tokens, int64; None: all.

    group: the ranks that share the sample's tokens.
    """
    if group.size == 1:
        return None
    return group.balanced_shard(torch.arange(length, device=device), 0)


def local_slopes(model: ModelShape, factory: ParamFactory) -> Tensor:
    """Return this tensor rank's ALiBi slopes, (a,): a score's bias is -slope times the distance."""
    return factory.mesh.tp.shard(attention_masks.alibi_slopes(model.heads))


class KeyValueCache:
    """The keys and values of all tokens so far, by layer; decoding then computes new tokens only.

    Layers without keys and values keep a state of constant size instead (`keep`). A layer that runs
    several times in a pass has keys and values, or a state, of each time.

    cache.begin(count)                      before the stages run on `count` new tokens
    k, v, mask = cache.extend(layer, k, v)  in each layer

    tokens: the number of tokens so far, with the new tokens; positions: the new tokens' positions,
    (1, s). prefix: so many first tokens, which come in one pass, see all of each other.
    """

    def __init__(self, most: int, slopes: Tensor | None, device: torch.device, prefix: int = 0):
        """Begin a cache for at most `most` tokens. slopes: ALiBi's for the local heads, (a,)."""
        self.most = most
        self.prefix = prefix
        self.device = device
        self.tokens = 0
        self.new_tokens: Tensor | None = None  # those of the next pass, (b, s), if they are known
        self.slopes = torch.zeros(1) if slopes is None else slopes  # 0: no bias
        # By layer and the number of its call in a pass.
        self._keys_and_values: dict[tuple[nn.Module, int], list[Tensor]] = {}
        self._states: dict[tuple[nn.Module, int], tuple[Tensor, ...]] = {}
        self._calls: Counter[nn.Module] = Counter()  # of this pass that are done

    def states(self, layer: nn.Module) -> tuple[Tensor, ...] | None:
        """Return what the next call of a layer in this pass has kept; None before any token."""
        return self._states.get((layer, self._calls[layer]))

    def keep(self, layer: nn.Module, *states: Tensor) -> None:
        """Keep tensors of a layer in the place of those before: a mixer's state has one size."""
        self._states[self._end_call(layer)] = states

    def begin(self, count: int) -> None:
        """Count the new tokens of the next pass through the layers, and make its mask."""
        self._calls.clear()
        self.positions = torch.arange(self.tokens, self.tokens + count, device=self.device)[None]
        self.tokens += count
        queries, keys = self.positions.t(), torch.arange(self.tokens, device=self.device)
        later = (keys > queries) & ((keys >= self.prefix) | (queries >= self.prefix))  # (s, all)
        # The bias of the scores: -slope * distance, and -infinity for tokens that come later.
        bias = -self.slopes.to(self.device)[:, None, None] * (queries - keys).abs()
        self._bias = bias.masked_fill(later, -torch.inf)[None]

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Mask]:
        """Store a layer's k and v of the new tokens, (s, b, g, d) each.

        Return the keys and the values of all tokens, and the mask for the new tokens' queries.
        """
        call = self._end_call(layer)
        if call not in self._keys_and_values:
            self._keys_and_values[call] = [t.new_empty(self.most, *t.shape[1:]) for t in (k, v)]
        keys, values = self._keys_and_values[call]
        first_new = self.tokens - len(k)  # `tokens`, set by `begin`, counts the new ones too
        keys[first_new : self.tokens] = k
        values[first_new : self.tokens] = v
        mask = attention_masks.Mask(self._bias.to(k.dtype))
        return keys[: self.tokens], values[: self.tokens], mask

    def extend_window(
        self, layer: nn.Module, k: Tensor, v: Tensor, window: int
    ) -> tuple[Tensor, Tensor]:
        """Store the last window - 1 tokens' k and v of a layer: all that the next token sees.

        k, v: of the new tokens, (s, b, g, d) each. Return those of the new tokens and of the tokens
        that were stored before them, window - 1 or fewer.
        """
        call = self._end_call(layer)
        if call in self._keys_and_values:
            k, v = (torch.cat(pair) for pair in zip(self._keys_and_values[call], (k, v)))
        first = max(0, len(k) - (window - 1))
        self._keys_and_values[call] = [k[first:].clone(), v[first:].clone()]
        return k, v

    def _end_call(self, layer: nn.Module) -> tuple[nn.Module, int]:
        """Return the layer with the number of its call in this pass, which ends here."""
        self._calls[layer] += 1
        return layer, self._calls[layer] - 1


class Attention(nn.Module):
    """Self-attention with grouped queries, causal unless a mask says what each token sees.

    The matrices of q, k and v are one parameter of shape (g, a/g + 2, d, h): for each key/value
    head the rows of its a/g query heads, then of its key, then of its value. Tensor parallelism
    splits the first dimension, so a key/value head stays with its query heads. If there are fewer
    key/value heads than tensor ranks, several ranks have the same one (layers/repeated_heads.py).
    """

    def __init__(
        self,
        factory: ParamFactory,
        name: str,
        model: ModelShape,
        std: float,
        recompute: bool,
        block: BlockAttention,
    ):
        """Make attention's qkv and output matrices. std: for the output matrix. recompute: whether
        the backward pass runs `attend`, the part between the two matrices, again. block: what
        attention does in this block.
        """
        super().__init__()
        self.block = block
        # Torch's kernels divide scores by the root of d: queries are multiplied by what is missing.
        self.query_factor = (model.head_size / model.query_scalar) ** 0.5
        self.sinks: nn.Parameter | None = None  # (a,)
        if block.sinks:
            self.sinks = factory.parameter(f"{name}.sinks", (model.heads,), dim=0)
        queries = model.heads // model.kv_heads  # query heads of each key/value head
        self.d = model.head_size
        self.recompute = recompute
        self.mesh = factory.mesh
        bias = model.qkv_bias
        # An index of dimension 0 is a key/value head: its queries, its k and its v, and its gates.
        members = [("q", queries), ("k", 1), ("v", 1)]
        if model.attention_gate:
            members.append(("gate", queries))
        matrices = Matrices(parts=tuple(members), dim=1, heads=(0, 1))
        shape = (model.kv_heads, sum(count for _, count in members), self.d)
        self.qkv: nn.Module
        made = factory, f"{name}.qkv", model.hidden, shape
        if model.kv_heads % factory.mesh.tp.size:
            self.qkv = RepeatedHeads(*made, bias=bias, matrices=matrices)
        else:
            self.qkv = ColumnLinear(*made, dim=0, bias=bias, matrices=matrices)
        # Those of a key/value head that this rank has.
        self.queries = queries_of_rank(model, factory.mesh)
        self.norms = None if model.qk_norm == "none" else QueryKeyNorm(factory, name, model)
        # With --compile one kernel splits and rotates; without a rotation, _SplitHeads is faster.
        rotates = block.rotary and self.norms is None
        self.split: Callable = _split_heads
        if model.attention_gate:
            self.split = partial(_split_heads, gates=self.queries)
        if factory.compile and (rotates or model.attention_gate):
            self.split = factory.compile_for_training(self.split)
        elif factory.compile:
            self.split = _SplitHeads.apply
        inputs = model.heads * self.d
        self.out = RowLinear(factory, f"{name}.out", inputs, model.hidden, std, model.bias)

    def forward(
        self,
        x: Tensor,
        mask: Any,
        rotary: tuple[Tensor, Tensor] | None,
        cache: KeyValueCache | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Return attention's output in the shape of x: (s, b, h), or (s/tp, b, h) with sequence
        parallelism. mask: a Mask, None means causal; in a block that is not plain a
        local_attention.VisibleKeys. rotary: tables that turn q and k, or None. cache: keys and
        values of the tokens before x, in decoding; then the mask comes from the cache. tokens: see
        Block.
        """
        if self.norms is None:
            q, k, v, *gate = self.split(self.qkv(x), self.queries, self.d, rotary)
        else:  # norms of q and k come before the rotation, so the split must not rotate (None)
            q, k, v, *gate = self.split(self.qkv(x), self.queries, self.d, None)
            q, k = self.norms(q, k)
            if rotary is not None:
                q = rotate(q, rotary)
                k = rotate(k, rotary)
        if self.query_factor != 1.0:
            q = q * self.query_factor
        mixed = self._mix(q, k, v, mask, cache)
        if gate:
            mixed = mixed * gate[0].sigmoid().flatten(2)
        return self.out(mixed)

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cache: KeyValueCache | None
    ) -> Tensor:
        """Return the values that each query sees, weighted and summed: (s, b, a d).

        q: (s, b, a, d). k, v: (s, b, g, d). mask, cache: see `forward`.
        """
        if not self.block.is_plain:
            from layers.local_attention import (
                attend_locally,  # imported here: most models do without it
            )

            return attend_locally(self, q, k, v, mask, cache)
        if cache is not None:
            k, v, mask = cache.extend(self, k, v)  # then k and v are those of all tokens so far
            return attend(q, k, v, mask, Group())
        q, k, v = to_heads(q, k, v, self.mesh.heads)  # with --cp: fewer heads, more tokens
        mixed = core_attention(q, k, v, mask, self.mesh, self.recompute)
        return to_tokens(mixed, self.mesh.heads)


def queries_of_rank(model: ModelShape, mesh: Mesh) -> int:
    """Return how many query heads of a key/value head a rank has: all, or its share of them."""
    return model.heads // max(model.kv_heads, mesh.tp.size)


def _split_heads(
    qkv: Tensor,
    queries: int,
    d: int,
    rotary: tuple[Tensor, Tensor] | None,
    gates: int = 0,
) -> list[Tensor]:
    """Return q, (s, b, a, d), and k and v, (s, b, g, d), from the qkv matrix's output.

    qkv: (s, b, g (a/g + 2) d). queries: a/g, the query heads of each key/value head. rotary: tables
    that turn q and k, or None. gates: a/g with attention_gate, whose gates are a fourth result like
    q, and a/g further rows of each key/value head in qkv; else 0.
    """
    rows = (queries, 1, 1, gates) if gates else (queries, 1, 1)
    qkv = qkv.unflatten(-1, (-1, sum(rows), d))  # s b g rows d
    parts = qkv.split(rows, -2)  # one split, so that backward concatenates once
    q, k, v, *gate = (part.flatten(2, 3) for part in parts)
    if rotary is None:
        return [q, k, v, *gate]
    return [rotate(q, rotary), rotate(k, rotary), v, *gate]


class _SplitHeads(torch.autograd.Function):
    """`_split_heads` without rotary positions, for --compile: the results are views of the input,
    and the backward pass writes three large gradients into one tensor by one compiled kernel.
    """

    @staticmethod
    def forward(ctx, qkv, queries, d, rotary):
        """Return q, k, v of qkv, (s, b, g (a/g + 2) d). queries: a/g. rotary: None, no rotation."""
        ctx.queries = queries
        return tuple(_split_heads(qkv, queries, d, None))

    @staticmethod
    def backward(ctx, dq, dk, dv):
        """Return the gradient of qkv, (s, b, g (a/g + 2) d)."""
        join_heads = compile_if_large(_join_heads, dq.numel() + dk.numel() + dv.numel())
        return join_heads(dq, dk, dv, ctx.queries), None, None, None


def _join_heads(q: Tensor, k: Tensor, v: Tensor, queries: int) -> Tensor:
    """Return the tensor that `_split_heads` cuts into q, k and v: (s, b, g (a/g + 2) d).

    queries: a/g, the query heads of each key/value head.
    """
    q = q.unflatten(2, (-1, queries))  # s b g a/g d
    return torch.cat([q, k.unsqueeze(3), v.unsqueeze(3)], 3).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, group: Group) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v, (s, b, a d), over the tokens that the mask shows.

    q: (s, b, a, d). k, v: (s, b, g, d). mask: None means causal. group: the ranks that share the
    samples' tokens; their keys and values are gathered.
    """
    k, v = gather_tokens(k, v, group)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # b heads s d
    if mask is not None:
        mixed = attention_masks.masked_attention(q, k, v, mask)
    elif group.size > 1:
        mixed = causal_attention(q, k, v, group)
    else:
        k, v = heads_of_kernel(q, k, v)
        grouped = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return mixed.permute(2, 0, 1, 3).flatten(2)


def core_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, mesh: Mesh, recomputed: bool
) -> Tensor:
    """Return `attend` in training: softmax(q k^T / sqrt(d)) v of this rank's heads, (s, b, a d).

    q: (s, b, a, d). k, v: (s, b, g, d). With --cp the n ranks of mesh.heads have exchanged tokens
    for heads before: then s is n times a rank's tokens, and a and g are its heads / n. recomputed:
    whether the backward pass computes it again (--recompute selective).
    """
    if recomputed and torch.is_grad_enabled():
        return recompute(attend, q, k, v, mask, mesh.kv)
    return attend(q, k, v, mask, mesh.kv)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x, (..., n) or (..., heads, d), by one kernel."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_norm_plus_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x, (..., n), whose scale is 1 + weight, in fp32 at least; as Gemma."""
    exact = exact_dtype(x.dtype)
    return F.rms_norm(x.to(exact), weight.shape, 1 + weight.to(exact), eps).to(x.dtype)


class QueryKeyNorm(nn.Module):
    """RMSNorm of q and k: over each head, or with qk_norm full over all heads of all tp ranks.

    The attributes q and k are the weights: (d,), or with qk_norm full (a, d) and (g, d).
    """

    def __init__(self, factory: ParamFactory, name: str, model: ModelShape):
        """Make the weights of the norms of q and k; name: the beginning of their names."""
        super().__init__()
        self.tp = factory.mesh.tp
        self.eps = model.norm_eps
        self.full = model.qk_norm == "full"  # one norm over all heads, else a norm of each head
        self.plus_one = model.norm_plus_one  # the scale is 1 + weight
        fill = 0.0 if self.plus_one else 1.0

        def weight(kind: str, heads: int) -> nn.Parameter:
            """Return the weight for q or k (`kind`), which has this number of heads."""
            weight_name = f"{name}.{kind}_norm.weight"
            d = model.head_size
            if self.full:
                rows = rows_of_heads(heads, factory)
                return factory.parameter(weight_name, (heads, d), fill=fill, dim=0, rows=rows)
            # Each tensor rank's gradient comes from its own heads, so the gradients are summed.
            return factory.parameter(weight_name, (d,), fill=fill, partial=True)

        self.q = weight("q", model.heads)
        self.k = weight("k", model.kv_heads)

    def forward(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """Return the normalised q and k, in their shapes (s, b, heads, d).

        With qk_norm full the mean square is over the heads of all tp ranks.
        """
        pairs: list[tuple[Tensor, Tensor]] = [(q, self.q), (k, self.k)]
        if not self.full or self.tp.size == 1:  # each head by itself, or all on this rank
            norm = rms_norm_plus_one if self.plus_one else _rms_norm
            if self.full:  # --zero 3 gathers weights with their first dimensions joined
                pairs = [(x, weight.view(x.shape[2:])) for x, weight in pairs]
            return [norm(x, weight, self.eps) for x, weight in pairs]
        exact = exact_dtype(q.dtype)
        # (2, s, b): q's and k's mean squares, of this rank's heads; then the mean of all ranks.
        means_here = torch.stack([x.to(exact).square().mean((-2, -1)) for x in (q, k)])
        means = sum_both_ways(means_here, self.tp) / self.tp.size  # sums gradients over tp too
        factors = torch.rsqrt(means + self.eps)[..., None, None]
        results = []
        for (x, weight), factor in zip(pairs, factors):
            scaled = (x * factor).to(x.dtype)
            scale = weight.view(x.shape[2:])
            results.append(scaled * (1 + scale if self.plus_one else scale))
        return results


def attention_kernel(
    model: ModelShape, factory: ParamFactory, micro_batch: int, masked: bool = False
) -> str:
    """Return, for the log, the names of the attention kernels that run in training.

    micro_batch: its number of samples. masked: whether batches say which tokens each token sees.
    Raise UserError if masks need flex_attention on a GPU, which lacks this dtype or head size.
    """
    mesh = factory.mesh
    ranks = ""
    if mesh.kv.size > 1:
        ranks += f", keys of {mesh.kv.size} ranks"
    if mesh.heads.size > 1:
        ranks += f", heads over {mesh.heads.size} ranks"
    blocks = [model.attention_of(block) for block in model.attention_blocks]
    kernels = []
    if any(block.is_plain for block in blocks):
        kernels.append(_plain_kernel(model, factory, micro_batch, masked))
    if not all(block.is_plain for block in blocks):
        from layers.local_attention import kernel_of  # imported here: most models do without it

        kernels.append(kernel_of(model, blocks, factory))
    return "; ".join(kernels) + ranks


def _plain_kernel(model: ModelShape, factory: ParamFactory, micro_batch: int, masked: bool) -> str:
    """Return the name of torch's kernel in the blocks without window, softcap and sinks."""
    alibi = model.positions == "alibi"
    flex = False  # whether flex_attention, torch's kernel for masks, runs
    if masked or alibi:
        flex = attention_masks.takes_flex(model.kernel_head_size, factory.dtype, factory.device)
    if masked and not flex and attention_masks.has_flex(factory.device):
        takes = f"no fp64 (here: {factory.dtype}), and heads of 16 columns or more"
        need = "masks need flex_attention on GPUs, which takes"
        raise UserError(f"{need} {takes}: head-size({model.kernel_head_size})")
    if flex:
        mask = "masks" if masked else "ALiBi"
        return f"torch flex_attention, of {mask}"
    kernel = "of masks" if masked else _fused_kernel(model, factory, micro_batch)
    return f"torch scaled_dot_product_attention, {kernel}"


def _fused_kernel(model: ModelShape, factory: ParamFactory, micro_batch: int) -> str:
    """Return the name of the kernel that torch chooses for causal attention of this shape.

    micro_batch: its number of samples. The choice is made on empty tensors.
    """
    mesh = factory.mesh
    options: dict[str, Any] = {"dtype": factory.dtype, "device": factory.device}
    alibi = model.positions == "alibi"
    if mesh.kv.size > 1 and not alibi:
        return chunk_kernel(torch.empty(model.kernel_head_size, **options))
    s = model.seq_length
    parts = mesh.tp.size * mesh.heads.size  # ranks among which the heads are divided
    queries = queries_of_rank(model, mesh)
    d = model.kernel_head_size
    key_heads = model.heads // parts // queries
    qkv = torch.empty(s, micro_batch, key_heads * (queries + 2) * d, **options)
    heads = _split_heads(qkv.requires_grad_(), queries, d, None)  # as in training
    q, k, v = (t.permute(1, 2, 0, 3) for t in heads)  # b heads s d
    k, v = heads_of_kernel(q, k, v)
    queries_here = s // mesh.kv.size
    bias = None
    if alibi:
        bias = torch.empty(1, model.heads // parts, queries_here, s, **options)
    choice = torch._fused_sdp_choice(
        q[:, :, :queries_here],
        k,
        v,
        attn_mask=bias,
        is_causal=bias is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return SDPBackend(choice).name.lower()
