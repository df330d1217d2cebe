"""Attention of ranks that share a sample's tokens (--cp): over heads, then over gathered keys.

    q, k, v = to_heads(q, k, v, mesh.heads)      fewer heads, more tokens
    k, v = gather_tokens(k, v, mesh.kv)          keys and values of all tokens
    mixed = causal_attention(q, k, v, mesh.kv)   or attention with this rank's rows of a mask
    mixed = to_tokens(mixed, mesh.heads)         all heads, this rank's tokens

A rank has chunks i and 2 cp - 1 - i of a sample's 2 cp equal chunks (Group.balanced_shard): with a
causal mask all ranks have the same work. `heads` are neighbours, as many as divide the key/value
heads (arXiv 2309.14509): together their tokens are such a pair of longer chunks. Among the other
cp / heads ranks, `kv`, keys and values are gathered (arXiv 2407.21783, section 3.3.2), of which
there are few if they do not divide by cp.

Shapes at line ends: s tokens of this rank, b samples, a heads of size d, g key/value heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from distributed.collectives import Group

# ---- All-to-all over heads -----------------------------------------------------------------------


class _Exchange(torch.autograd.Function):
    """All-to-all of one block for each rank, forward and backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        received = torch.empty_like(x)
        group.at_once.all_to_all(received, x).wait()
        return received

    @staticmethod
    def backward(ctx, grad):
        received = torch.empty_like(grad, memory_format=torch.contiguous_format)
        ctx.group.at_once.all_to_all(received, grad.contiguous()).wait()
        return received, None


def to_heads(q: Tensor, k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, ...]:
    """(s, b, heads, d) each -> (n s, b, heads/n, d): the tokens of all n ranks in their order."""
    n = group.size
    if n == 1:
        return q, k, v
    parts = [t.unflatten(2, (n, -1)) for t in (q, k, v)]  # s b n heads/n d
    sent = torch.cat(parts, 3).movedim(2, 0).contiguous()
    whole = _in_order(_Exchange.apply(sent, group))
    return whole.split([t.shape[3] for t in parts], 2)


def to_tokens(mixed: Tensor, group: Group) -> Tensor:
    """The way back: (n s, b, a d / n) -> (s, b, a d)."""
    n = group.size
    if n == 1:
        return mixed
    first, second = (half.unflatten(0, (n, -1)) for half in mixed.chunk(2))  # n s/2 b ad/n
    received = _Exchange.apply(torch.cat([first, second.flip(0)], 1), group)
    return received.movedim(0, 2).flatten(2)


def _in_order(shares: Tensor) -> Tensor:
    """The tokens of n ranks' balanced shards in the sample's order: (n, s, ...) -> (n s, ...)."""
    first, second = shares.chunk(2, 1)
    return torch.cat([first, second.flip(0)]).flatten(0, 1)


# ---- Gathered keys and values --------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """All-gather along dimension 0; the backward pass sums what each rank adds to a gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        gathered = x.new_empty(group.size * len(x), *x.shape[1:])
        group.at_once.all_gather(gathered, x).wait()
        return gathered

    @staticmethod
    def backward(ctx, grad):
        summed = grad.new_empty(len(grad) // ctx.group.size, *grad.shape[1:])
        ctx.group.at_once.reduce_scatter(summed, grad.contiguous()).wait()
        return summed, None


def gather_tokens(k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, ...]:
    """Keys and values of all n ranks' tokens in their order: (s, b, g, d) -> (n s, b, g, d)."""
    if group.size == 1:
        return k, v
    gathered = _Gather.apply(torch.cat([k, v], -1), group)
    return _in_order(gathered.unflatten(0, (group.size, -1))).chunk(2, -1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
    """Softmax(q k^T / sqrt(d)) v of the tokens of this rank's two chunks over all tokens up to
    them: q (b, a, s, d), k and v (b, g, n s, d) -> (b, a, s, d).
    """
    half = q.shape[2] // 2
    heads = q.shape[1]
    if k.shape[1] != heads and not (q.is_cuda and chunk_kernel(q) == "flash_attention"):
        # The other kernels take a key/value head for each head.
        k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    ends = (group.rank + 1) * half, (2 * group.size - group.rank) * half
    parts = [
        _attend_last(chunk, k[:, :, :end], v[:, :, :end])
        for chunk, end in zip(q.chunk(2, 2), ends, strict=True)
    ]
    return torch.cat(parts, 2)


def chunk_kernel(q: Tensor) -> str:
    """Which of torch's kernels `causal_attention` takes for such queries."""
    if not q.is_cuda:
        return "flash_attention"
    half = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256
    # Flash attention is written for GPUs from Ampere on.
    if half and torch.cuda.get_device_capability(q.device) >= (8, 0):
        return "flash_attention"
    return "math" if q.dtype == torch.float64 else "efficient_attention"


def _attend_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of queries that are the last of the keys' tokens; (b, heads, s, d) each."""
    grouped = q.shape[1] != k.shape[1]
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if not q.is_cuda:
        return _LastOnCpu.apply(q, k, v)
    from torch.nn.attention.bias import causal_lower_right  # 110 MB, which no other run needs

    mask = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


class _LastOnCpu(torch.autograd.Function):
    """`_attend_last` by torch's flash attention on a CPU, which has no such mask, and would have to
    write one of q x k numbers: the keys before the queries are all seen, of the others those up to
    the query. Both parts of the softmax are joined by the logarithms of their sums.
    """

    @staticmethod
    def forward(ctx, q, k, v):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        (before, sums), (own, own_sums) = (
            kernel(q, keys, values, 0.0, causal) for keys, values, causal in _parts(q, k, v)
        )
        log_sum = torch.logaddexp(sums, own_sums)
        shares = ((part - log_sum).exp()[..., None] for part in (sums, own_sums))
        mixed = sum(part * share for part, share in zip((before, own), shares, strict=True))
        mixed = mixed.to(q.dtype)
        ctx.save_for_backward(q, k, v, mixed, log_sum)
        return mixed

    @staticmethod
    def backward(ctx, grad):
        q, k, v, mixed, log_sum = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = [
            kernel(grad, q, keys, values, mixed, log_sum, 0.0, causal)
            for keys, values, causal in _parts(q, k, v)
        ]
        dq, dk, dv = zip(*found, strict=True)
        return dq[0] + dq[1], torch.cat(dk, 2), torch.cat(dv, 2)


def _parts(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """Keys and values before the queries, and those of the queries' tokens, which are causal."""
    past = k.shape[2] - q.shape[2]
    before = k[:, :, :past], v[:, :, :past], False
    return [before, (k[:, :, past:], v[:, :, past:], True)]
