"""Attention and recurrences for ranks that share a sample's tokens (--cp).

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

A recurrence (layers/linear_recurrence.py) needs a sample's chunks in their order. The order above
stays, since attention and recurrences are blocks of the same model and tokens would have to be sent
between them: a rank's two chunks are two segments of the 2 cp in a row, as two samples of half the
length (`to_segments`). What a segment does with a state is gathered (`states_before`), and all
segments run at once: no rank waits for the one before it, so the order costs nothing.

Shapes at line ends: s tokens of this rank, b samples, a heads of size d, g key/value heads.
Read layers/attention.py (Attention.forward) before this file.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from distributed import gpus
from distributed.collectives import Group

CUDNN_WIDE_HEADS = 91000  # cuDNN 9.10: from it on its attention takes heads of up to 256 numbers

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
    # (n s, b, (a + 2g)/n, d): all n ranks' tokens
    whole = exchange_heads(torch.cat(parts, 3).flatten(2, 3), group)
    return whole.split([t.shape[3] for t in parts], 2)


def exchange_heads(x: Tensor, group: Group) -> Tensor:
    """Return the tokens of the group's n ranks for 1/n of the heads: (s, b, heads, d) to (n s, b,
    heads/n, d), in the sample's order; rank j gets the j-th part of the heads.
    """
    if group.size == 1:
        return x
    sent = x.unflatten(2, (group.size, -1)).movedim(2, 0).contiguous()  # block j: for rank j
    return _in_order(_Exchange.apply(sent, group))


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
    """Return all n ranks' tokens in the sample's order: (s, b, ..., d) -> (n s, b, ..., d) each.

    k, v: keys and values of `mesh.kv`, or latents and the shared keys of `mesh.heads`. They travel
    in one all-gather, side by side in the last dimension. group: one of these two.
    """
    if group.size == 1:
        return k, v
    gathered = _Gather.apply(torch.cat([k, v], -1), group)
    # (n s, b, ...) -> (n, s, b, ...), one row for each rank, as `_in_order` expects.
    whole = _in_order(gathered.unflatten(0, (group.size, -1)))
    return whole.split((k.shape[-1], v.shape[-1]), -1)


# ---- States and tokens of earlier segments -------------------------------------------------------


def to_segments(x: Tensor, group: Group) -> Tensor:
    """Return a rank's two chunks of each sample as samples of their own: (s, b, ...) to (s/2, 2b,
    ...), the first chunks before the second ones. group: the ranks that share the tokens.

    A recurrence goes through a sample's chunks in order, and this rank's two are apart. They stay
    where causal attention wants them: each is a segment, and 2 n segments are in a row on n ranks.
    """
    if group.size == 1:
        return x
    return torch.cat(x.chunk(2), 1)


def from_segments(x: Tensor, group: Group) -> Tensor:
    """Undo `to_segments`: (s/2, 2b, ...) to (s, b, ...)."""
    if group.size == 1:
        return x
    return torch.cat(x.chunk(2, 1))


def _all_segments(own: Tensor, group: Group) -> Tensor:
    """Return a tensor of each segment of all n ranks in the sample's order: (2b, ...) to (2n, b,
    ...). own: of this rank's segments, as `to_segments` orders them.
    """
    pair = own.unflatten(0, (2, -1)).contiguous()  # 2 b ...
    return _in_order(_Gather.apply(pair, group).unflatten(0, (group.size, 2)))


def _own_segments(every: Tensor, group: Group) -> Tensor:
    """Return this rank's of all ranks' segments: (2n, b, ...) to (2b, ...)."""
    return torch.cat([every[group.rank], every[-1 - group.rank]])


def tokens_before(x: Tensor, count: int, group: Group) -> Tensor:
    """Return the tokens before each of this rank's segments: (count, 2b, c); zeros before a sample.

    x: the tokens of the segments, (s, 2b, c), which may be fewer than `count`.
    """
    if group.size == 1 or not count:
        return x.new_zeros(count, *x.shape[1:])
    last = x[-count:].transpose(0, 1)  # 2b t c, with t the smaller of count and s
    every = _all_segments(last, group)  # 2n b t c
    tokens = every.transpose(1, 2).flatten(0, 1)  # 2n t, b c
    tokens = torch.cat([tokens.new_zeros(count, *tokens.shape[1:]), tokens])
    step = last.shape[1]
    before = [tokens[i * step : i * step + count] for i in range(len(every))]
    return torch.cat([before[group.rank], before[-1 - group.rank]], 1)


def states_before(last: Tensor, values: int, group: Group) -> Tensor:
    """Return the state before each of this rank's segments: (2b, a, p, values).

    A segment changes a state S, which is zero at the begin of a sample, to B + A S. last: [B, A] of
    this rank's segments, (2b, a, p, values + p), or with a diagonal A, (2b, a, p, values + 1).
    """
    every = _all_segments(last, group)  # 2n b a p values+p
    state = torch.zeros_like(every[0, ..., :values])
    states = []
    for columns in every:
        states.append(state)
        own, transition = columns.split([values, columns.shape[-1] - values], -1)
        is_diagonal = transition.shape[-1] == 1
        state = own + (transition * state if is_diagonal else transition @ state)
    return _own_segments(torch.stack(states), group)


# ---- Causal attention ----------------------------------------------------------------------------


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

    q: (b, a, s, d). k, v: (b, g, t, d). On a GPU only flash attention, and cuDNN's, lets several
    query heads share a key/value head. For another kernel each is repeated, (b, a, t, d): else
    torch would compute attention by matrix products, which store the scores of all pairs of tokens.
    """
    shares_heads = not q.is_cuda or chunk_kernel(q) in ("flash_attention", "cudnn_attention")
    return (k, v) if shares_heads else _repeated(q, k, v)


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values, (b, g, t, d), with each head as often as queries share it."""
    repeats = q.shape[1] // k.shape[1]
    if repeats == 1:
        return k, v
    return k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


def chunk_kernel(q: Tensor) -> str:
    """Return the name of torch's kernel that `causal_attention` runs for these queries.

    It depends on the dtype, the head size d and the device of q, (..., d). The log names the kernel
    too (layers/attention.py). On Hopper (compute capability 9.0: H100, H200) cuDNN's kernel is
    faster than torch's flash attention, 353 for 198 TFLOP/s on an H100; it takes heads of up to 128
    numbers, from cuDNN 9.10 on of up to 256, a multiple of 8, and may be turned off by
    torch.backends.cuda.enable_cudnn_sdp. torch for ROCm has no such kernel.
    """
    if not q.is_cuda:
        return "flash_attention"
    width = q.shape[-1]
    is_supported = q.dtype in (torch.float16, torch.bfloat16) and width <= 256
    capability = torch.cuda.get_device_capability(q.device)
    is_hopper = gpus.nvidia_capability(q.device) == (9, 0)
    by_cudnn = torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()
    widest = 256 if (torch.backends.cudnn.version() or 0) >= CUDNN_WIDE_HEADS else 128
    if is_supported and is_hopper and by_cudnn and width <= widest and width % 8 == 0:
        return "cudnn_attention"
    # torch's flash attention runs on GPUs from Ampere (compute capability 8.0) on.
    if is_supported and capability >= (8, 0):
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
        return attend_in_two_calls(q, k, v, CPU_FLASH)
    if chunk_kernel(q) == "cudnn_attention":
        # Called directly, the kernel is given a key head for each query head.
        return attend_in_two_calls(q, *_repeated(q, k, v), CUDNN)
    from torch.nn.attention.bias import causal_lower_right  # imported here: it takes 110 MB

    mask = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


class AttentionKernel(NamedTuple):
    """The two passes of a kernel of attention that returns the logarithms of its softmax sums.

    forward: from q, k, v and whether attention is causal to the result, (b, heads, s, d), and the
    logarithms, (b, heads, s, ...). backward: from the result's gradient, q, k, v, the result, the
    logarithms and causal to the gradients of q, k and v.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the result of torch's flash attention on a CPU, and its logarithms, (b, heads, s)."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _cpu_backward(grad, q, k, v, mixed, log_sums, causal) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v by torch's flash attention on a CPU."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad, q, k, v, mixed, log_sums, 0.0, causal)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the result of cuDNN's attention, and its logarithms, (b, heads, s, 1) in fp32."""
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    mixed, log_sums, *_ = kernel(q, k, v, None, True, 0.0, causal)
    return mixed, log_sums


def _cudnn_backward(grad, q, k, v, mixed, log_sums, causal) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v by cuDNN's attention, without dropout and so seeds."""
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    nothing = torch.empty(0, dtype=torch.int64)  # the generator's state, which dropout alone needs
    lengths = q.shape[2], k.shape[2]
    sums = log_sums, nothing, nothing, None, None, None
    return kernel(grad, q, k, v, mixed, *sums, *lengths, 0.0, causal)


CPU_FLASH = AttentionKernel(_cpu_forward, _cpu_backward)
CUDNN = AttentionKernel(_cudnn_forward, _cudnn_backward)


class _Last(torch.autograd.Function):
    """`_attend_last` by two calls of a kernel, without a mask.

    torch's flash attention on a CPU, and cuDNN's attention, take either a mask of q x k numbers,
    which needs memory, or the plain causal case. So one call lets the queries see all keys before
    them, and one call is causal, over the keys of the queries' own tokens. The two results are
    averaged with their softmax sums as weights. With cuDNN's kernel this has not been run on a GPU
    yet; on CPUs the same code is compared with a mask.
    """

    @staticmethod
    def forward(ctx, q, k, v, kernel):
        """Return attention of q over k and v, (b, heads, s, d), from the results of two calls."""
        # past: over the tokens before the queries; present: over their own tokens.
        (past, past_sums), (present, present_sums) = (
            kernel.forward(q, keys, values, causal) for keys, values, causal in _parts(q, k, v)
        )
        # Weight of a call: its softmax sum divided by the sum over all keys.
        log_sum = torch.logaddexp(past_sums, present_sums)
        past_weight = (past_sums - log_sum).exp().view(*q.shape[:3], 1)
        present_weight = (present_sums - log_sum).exp().view(*q.shape[:3], 1)
        mixed = past * past_weight + present * present_weight
        mixed = mixed.to(q.dtype)
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, mixed, log_sum)
        return mixed

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients of q, k and v, by two calls of the kernel's backward pass.

        Each call gets the whole result and the sum over all keys, so that it computes the true
        attention weights of its own keys. Both calls contribute to the gradient of q.
        """
        q, k, v, mixed, log_sum = ctx.saved_tensors
        gradients = [
            ctx.kernel.backward(grad, q, keys, values, mixed, log_sum, causal)
            for keys, values, causal in _parts(q, k, v)
        ]
        (past_dq, present_dq), dk, dv = zip(*gradients, strict=True)
        return past_dq + present_dq, torch.cat(dk, 2), torch.cat(dv, 2), None


def attend_in_two_calls(q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel) -> Tensor:
    """Return what `_attend_last` returns if there are tokens before the queries (t > s)."""
    return _Last.apply(q, k, v, kernel)


def _parts(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """Return (k, v, causal) for the tokens before the queries, then for the queries' own tokens.

    Every query attends to all tokens before the queries, so that call needs no mask; among the
    queries' own tokens attention is causal.
    """
    split = k.shape[2] - q.shape[2]  # the number of tokens before the queries
    past = k[:, :, :split], v[:, :, :split], False
    present = k[:, :, split:], v[:, :, split:], True
    return [past, present]
