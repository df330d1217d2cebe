"""Attention for ranks that share a sample's tokens (--cp): all-to-all over heads, gathered keys.

    q, k, v = to_heads(q, k, v, mesh.heads)      fewer heads, more tokens
    k, v = gather_tokens(k, v, mesh.kv)          keys and values of all tokens
    mixed = causal_attention(q, k, v, mesh.kv)   or attention with this rank's rows of a mask
    mixed = to_tokens(mixed, mesh.heads)         all heads, this rank's tokens

Rank i of cp has chunks i and 2 cp - 1 - i of a sample's 2 cp equal chunks (Group.balanced_shard),
so that with a causal mask all ranks have the same work. The cp ranks form two kinds of groups:

    cp = 4, 2 local key/value heads:   heads: {0, 1} {2, 3}     kv: {0, 2} {1, 3}

`mesh.heads`: n neighbours, n = gcd(cp, local key/value heads), exchange tokens for heads (arXiv
2309.14509): before, a rank has all heads of its tokens; after, 1/n of the heads of all n ranks'
tokens. The j-th group of this kind then has chunks j and 2 cp/n - 1 - j of 2 cp/n longer chunks.
`mesh.kv`: the cp/n ranks with the same heads gather keys and values (arXiv 2407.21783, section
3.3.2). This is little data, since each rank has few key/value heads where cp does not divide them.

In a group of n ranks the first chunks ascend with the rank, and the second chunks descend. So the
first chunks in rank order, then the second chunks in reverse rank order, are in the sample's order:

    n = 2: rank 0 has chunks 0 3, rank 1 has chunks 1 2; first chunks 0 1, second 3 2, reversed 2 3

Shapes at line ends: s tokens of this rank, b samples, a heads of size d, g key/value heads.
Read attention.py (Attention.forward) before this file.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from distributed.collectives import Group

# ---- All-to-all over heads -----------------------------------------------------------------------


class _Exchange(torch.autograd.Function):
    """All-to-all along dimension 0, one block for each rank; backward is another all-to-all."""

    @staticmethod
    def forward(ctx, x, group):
        """Send block j of x, (n, ...), to rank j of the group; return the n received blocks.

        Called by to_heads, before attention, and by to_tokens, after it.
        """
        ctx.group = group
        received = torch.empty_like(x)
        group.at_once.all_to_all(received, x).wait()
        return received

    @staticmethod
    def backward(ctx, grad):
        """Send each block's gradient back to the rank from which the block came."""
        received = torch.empty_like(grad, memory_format=torch.contiguous_format)
        ctx.group.at_once.all_to_all(received, grad.contiguous()).wait()
        return received, None


def to_heads(q: Tensor, k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, ...]:
    """Return q, k and v with the tokens of the group's n ranks, and 1/n of the heads.

    Each argument is (s, b, heads, d), each result (n s, b, heads/n, d), in the sample's order. q, k
    and v are sent in one all-to-all. group: `mesh.heads`.
    """
    n = group.size
    if n == 1:
        return q, k, v
    parts = [t.unflatten(2, (n, -1)) for t in (q, k, v)]  # (s, b, n, heads/n, d)
    # (n, s, b, (a + 2g)/n, d): block j has the heads that rank j of the group will compute.
    sent = torch.cat(parts, 3).movedim(2, 0).contiguous()
    whole = _in_order(_Exchange.apply(sent, group))  # (n s, b, (a + 2g)/n, d): all n ranks' tokens
    return whole.split([t.shape[3] for t in parts], 2)


def to_tokens(mixed: Tensor, group: Group) -> Tensor:
    """Undo `to_heads` for attention's output: (n s, b, a d / n) -> (s, b, a d).

    Each rank gets back its tokens, with the heads of all ranks of `group`, which is `mesh.heads`.
    """
    n = group.size
    if n == 1:
        return mixed
    # The first half of the sample has each rank's first chunk, in rank order; the second half has
    # each rank's second chunk, in reverse rank order, which `flip` turns round.
    first, second = (half.unflatten(0, (n, -1)) for half in mixed.chunk(2))
    # `first` and `second` are (n, s/2, b, a d / n). Block j of what is sent has the two chunks of
    # rank j's tokens; block i of what is received has the heads of rank i: (n, s, b, a d / n).
    received = _Exchange.apply(torch.cat([first, second.flip(0)], 1), group)
    return received.movedim(0, 2).flatten(2)


def _in_order(shares: Tensor) -> Tensor:
    """Return the tokens of n ranks in the sample's order: (n, s, ...) -> (n s, ...).

    shares: row i has the two chunks of the group's rank i. The first chunks ascend with the rank,
    the second chunks descend, so the second chunks are taken in reverse order.
    """
    first, second = shares.chunk(2, 1)  # the first chunk of each rank; the second chunk of each
    return torch.cat([first, second.flip(0)]).flatten(0, 1)


# ---- Gathered keys and values --------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """All-gather along dimension 0; its backward is a reduce-scatter of the gradients."""

    @staticmethod
    def forward(ctx, x, group):
        """Return x, (s, ...), of all n ranks, joined in rank order: (n s, ...).

        gather_tokens calls this with keys and values side by side.
        """
        ctx.group = group
        gathered = x.new_empty(group.size * len(x), *x.shape[1:])
        group.at_once.all_gather(gathered, x).wait()
        return gathered

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient of this rank's x, summed over the ranks, all of which used x."""
        summed = grad.new_empty(len(grad) // ctx.group.size, *grad.shape[1:])
        ctx.group.at_once.reduce_scatter(summed, grad.contiguous()).wait()
        return summed, None


def gather_tokens(k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, ...]:
    """Return all n ranks' keys and values in the sample's order: (s, b, g, d) -> (n s, b, g, d).

    Keys and values travel in one all-gather, side by side in the last dimension. group: `mesh.kv`.
    """
    if group.size == 1:
        return k, v
    gathered = _Gather.apply(torch.cat([k, v], -1), group)
    # (n s, b, g, 2d) -> (n, s, b, g, 2d), one row for each rank, as `_in_order` expects.
    return _in_order(gathered.unflatten(0, (group.size, -1))).chunk(2, -1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
    """Return causal attention of this rank's two chunks of queries over all n ranks' keys.

    q is (b, a, s, d), k and v are (b, g, n s, d), the result is (b, a, s, d). Each chunk of queries
    is a call of its own, over the keys up to the chunk's end: with two ranks of two chunks each,
    rank 0's chunks 0 and 3 attend to the keys of chunk 0 and of chunks 0 to 3.
    """
    half = q.shape[2] // 2  # the tokens of a chunk
    k, v = heads_of_kernel(q, k, v)
    # The chunks are `rank` and `2 size - 1 - rank`: each attends to all tokens up to its own end.
    ends = (group.rank + 1) * half, (2 * group.size - group.rank) * half
    parts = [
        _attend_last(chunk, k[:, :, :end], v[:, :, :end])
        for chunk, end in zip(q.chunk(2, 2), ends, strict=True)
    ]
    return torch.cat(parts, 2)


def heads_of_kernel(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with as many heads as the kernel for these queries needs.

    q: (b, a, s, d). k, v: (b, g, t, d). On a GPU only flash attention lets several query heads
    share a key/value head. For another kernel each is repeated, (b, a, t, d): else torch would
    compute attention by matrix products, which store the scores of all pairs of tokens.
    """
    heads = q.shape[1]
    if k.shape[1] == heads or not q.is_cuda or chunk_kernel(q) == "flash_attention":
        return k, v
    repeats = heads // k.shape[1]
    return k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


def chunk_kernel(q: Tensor) -> str:
    """Return the name of torch's kernel that `causal_attention` runs for these queries.

    It depends on the dtype, the head size d and the device of q, (..., d). The log names the kernel
    too (attention.py).
    """
    if not q.is_cuda:
        return "flash_attention"
    is_supported = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256
    # torch's flash attention runs on GPUs from Ampere (compute capability 8.0) on.
    if is_supported and torch.cuda.get_device_capability(q.device) >= (8, 0):
        return "flash_attention"
    return "math" if q.dtype == torch.float64 else "efficient_attention"


def _attend_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of queries that belong to the last s of the keys' t tokens.

    q is (b, heads, s, d), k and v are (b, heads, t, d) with t >= s; the result has q's shape. Query
    i attends to the keys 0 to t - s + i. torch's `is_causal` would let it see only keys 0 to i.
    """
    grouped = q.shape[1] != k.shape[1]  # several query heads share a key/value head
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    # On a CPU the mask below would need memory for every pair of a query and a key.
    if not q.is_cuda:
        return _LastOnCpu.apply(q, k, v)
    from torch.nn.attention.bias import causal_lower_right  # imported here: it takes 110 MB

    mask = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


class _LastOnCpu(torch.autograd.Function):
    """`_attend_last` on a CPU, by two calls of torch's flash attention, without a mask.

    That kernel takes either a mask of q x k numbers, which needs memory, or the plain causal case.
    So one call lets the queries see all keys before them, and one call is causal, over the keys of
    the queries' own tokens. The two results are averaged with their softmax sums as weights.
    """

    @staticmethod
    def forward(ctx, q, k, v):
        """Return attention of q over k and v, (b, heads, s, d), from the results of two calls."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        # A call returns its result, (b, heads, s, d), and the logarithms of its softmax sums,
        # (b, heads, s). past: over the tokens before the queries; present: over their own tokens.
        (past, past_sums), (present, present_sums) = (
            kernel(q, keys, values, 0.0, causal) for keys, values, causal in _parts(q, k, v)
        )
        # Weight of a call: its softmax sum divided by the sum over all keys.
        log_sum = torch.logaddexp(past_sums, present_sums)
        past_weight = (past_sums - log_sum).exp()[..., None]
        present_weight = (present_sums - log_sum).exp()[..., None]
        mixed = past * past_weight + present * present_weight
        mixed = mixed.to(q.dtype)
        ctx.save_for_backward(q, k, v, mixed, log_sum)
        return mixed

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients of q, k and v, by two calls of the kernel's backward pass.

        Each call gets the whole result and the sum over all keys, so that it computes the true
        attention weights of its own keys. Both calls contribute to the gradient of q.
        """
        q, k, v, mixed, log_sum = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = [
            kernel(grad, q, keys, values, mixed, log_sum, 0.0, causal)
            for keys, values, causal in _parts(q, k, v)
        ]
        (past_dq, present_dq), dk, dv = zip(*gradients, strict=True)
        return past_dq + present_dq, torch.cat(dk, 2), torch.cat(dv, 2)


def _parts(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """Return (k, v, causal) for the tokens before the queries, then for the queries' own tokens.

    Every query attends to all tokens before the queries, so that call needs no mask; among the
    queries' own tokens attention is causal.
    """
    split = k.shape[2] - q.shape[2]  # the number of tokens before the queries
    past = k[:, :, :split], v[:, :, :split], False
    present = k[:, :, split:], v[:, :, split:], True
    return [past, present]
