"""Linear recurrences over the tokens by matrix products over chunks of them.

    mixed, state = linear_recurrence(q, k, v, decay, strength, offsets, state, group)

A head has a state S of key size x value size numbers. At a token it fades, takes the token's value
under its key, and gives a result for its query:

    S <- exp(g_t) S;   S <- S + k_t w_t^T;   result: S^T q_t

The decay g_t is a number (Mamba-2, arXiv 2405.21060; gated delta net, arXiv 2412.06464) or has one
for each row of S (KDA, arXiv 2510.26692). In Mamba-2 what is written, w_t, is the value v_t. By the
delta rule it is the difference of the value from what S holds under the key already, with a
strength beta: w_t = beta_t (v_t - S^T k_t).

Within a chunk of C tokens let D[i, j] be the decay from token j to token i, the exponential of the
sum of g after j up to i, and e_i that from the begin of the chunk to i. With the state S before the
chunk, what the tokens write are the rows of a matrix N = U - W S, where by the delta rule

    (1 + M) [U, W] = [beta v, beta e k]    M[i, j] = beta_i (D[i, j] k_i) . k_j for i > j

and else N = v. Then

    results: (e q) S + ((D q) k^T) N       next state: e_last S + (D_last k)^T N

so only the states are computed one chunk after the other, and all else for all chunks at once.

Documents: a token that is in another document is seen by no token of this one. D[i, j] is 0 if i
and j are in two documents, and e_i if the document of i begins in the chunk. Sums of g are over
tokens of one document: no number of another document enters a sum but times an exact 0.

Several ranks with parts of a sample (--cp): the next state is an affine function of the state
before, S -> A S + B, and so is what a whole segment does with it. Each rank computes A and B of its
two segments by letting [0, 1] run through the chunks in place of a state, all ranks gather them,
and each computes the states before its segments: of a head and segment key size x (key size + value
size) numbers are sent, without the delta rule key size x (value size + 1), however long it is.

Shapes: s tokens, b samples, a value heads, g key heads (a/g value heads share one), p key size,
r value size, n chunks of C tokens, m = b a, c = 1 or p decays of a token.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from architecture.mixer_stats import CHUNK
from distributed.collectives import Group
from distributed.context_parallel import states_before
from parallel import recompute

# Tokens of a block within a chunk, if a token has several decays: then the products of a block with
# itself are made one by one, and those with earlier blocks by matrix products.
BLOCK = 16


class Chunks(NamedTuple):
    """What the tokens of each chunk do, for one pass over the states.

    writes: U, (n, m, C, r). reads: W, (n, m, C, p), or None. keys: D_last k, (n, m, C, p). decay:
    e_last, (n, m, c, 1). queries: e q, (n, m, C, p). scores: (D q) k^T, (n, m, C, C).
    """

    writes: Tensor
    reads: Tensor | None
    keys: Tensor
    decay: Tensor
    queries: Tensor
    scores: Tensor


class ChunkMasks(NamedTuple):
    """Which tokens of its chunk a token sees, by causality and documents.

    earlier: whether token i sees token j, (n, b, 1, C, C), or without documents (C, C). enters:
    whether token i sees the state before the chunk, as 1 or 0, (n, b, 1, C) or (C,).
    """

    earlier: Tensor
    enters: Tensor


def linear_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    strength: Tensor | None,
    offsets: Tensor | None,
    state: Tensor | None,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """Return the results, (s, b, a, r), and the state after the last token, (b, a, p, r).

    q, k: (s, b, g, p), normalised and scaled. v: (s, b, a, r). decay: g, the logarithm, (s, b, a,
    c). strength: beta, (s, b, a); None: no delta rule. offsets: the number of tokens of its
    document before each token, (s, b); None: one document. state: that before the first token, or
    None for zeros. group: the ranks that share the samples' tokens; then b counts each sample's two
    segments on this rank (context_parallel.to_segments), and the state is that after each of them.
    """
    samples, heads = v.shape[1:3]
    chunks = _chunks(q, k, v, decay, strength, offsets)
    if state is None:
        state = v.new_zeros(samples, heads, k.shape[-1], v.shape[-1])
    state = state.flatten(0, 1)
    if group.size == 1:
        states, written, last = _pass(chunks, state)
    else:
        states, written, last = _pass_over_ranks(chunks, samples, group)
    mixed = chunks.queries @ states + chunks.scores @ written  # n m C r
    # n (b a) C r -> s b a r, without the tokens that fill the last chunk
    mixed = mixed.unflatten(1, (samples, heads)).permute(0, 3, 1, 2, 4).flatten(0, 1)
    return mixed[: len(v)], last.unflatten(0, (samples, heads))


# ---- Within chunks -------------------------------------------------------------------------------


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    strength: Tensor | None,
    offsets: Tensor | None,
) -> Chunks:
    """Return what each chunk does; the arguments are those of `linear_recurrence`."""
    size = min(CHUNK, len(v))
    shared = v.shape[2] // k.shape[2]
    masks = _chunk_masks(offsets, size, v)
    v, decay = (_by_chunks(x, size) for x in (v, decay))  # n b a C r, n b a C c
    q, k = (_by_chunks(x, size) for x in (q, k))  # n b g C p
    since = _sums(decay, masks.earlier).exp() * masks.enters[..., None]  # e, n b a C c
    products: tuple[Tensor, ...] = (q,) if strength is None else (q, k)
    scores, *system = _decayed(products, k, decay, masks.earlier, shared)
    q, k = (_repeated(x, shared) for x in (q, k))
    keys = k * _until_last(decay, masks.earlier)
    writes, reads = v, None
    if strength is not None:
        beta = _by_chunks(strength[..., None], size)  # n b a C 1
        sides = torch.cat([v * beta, k * (beta * since)], -1)
        # Only what is below the diagonal counts: the diagonal is 1.
        solved = torch.linalg.solve_triangular(
            system[0] * beta, sides, upper=False, unitriangular=True
        )
        writes, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
        reads = reads.flatten(1, 2)
    last = since[..., -1, :, None]
    parts = (part.flatten(1, 2) for part in (keys, last, q * since, scores))
    return Chunks(writes.flatten(1, 2), reads, *parts)


def _chunk_masks(offsets: Tensor | None, size: int, like: Tensor) -> ChunkMasks:
    """Return the causal masks of all chunks of `size` tokens, within documents.

    offsets: the number of tokens of its document before each token, (s, b); None: one document.
    like: a tensor with the device and the type of the result.
    """
    position = torch.arange(size, device=like.device)
    distance = position[:, None] - position
    if offsets is None:
        return ChunkMasks(distance >= 0, torch.ones(size, dtype=like.dtype, device=like.device))
    padding = -len(offsets) % size
    if padding:  # the tokens that fill the last chunk go on with its document, and change nothing
        padded = offsets[-1] + torch.arange(1, padding + 1, device=offsets.device)[:, None]
        offsets = torch.cat([offsets, padded])
    offsets = offsets.unflatten(0, (-1, size)).transpose(1, 2)[:, :, None]  # n b 1 C
    earlier = (distance >= 0) & (distance <= offsets[..., None])
    return ChunkMasks(earlier, (offsets > position).to(like.dtype))


def _by_chunks(x: Tensor, size: int) -> Tensor:
    """Return x, (s, b, heads, d), as chunks of `size` tokens, the last one filled with zeros.

    The result is (n, b, heads, C, d).
    """
    x = F.pad(x, (0, 0, 0, 0, 0, 0, 0, -len(x) % size))
    return x.unflatten(0, (-1, size)).permute(0, 2, 3, 1, 4)


def _repeated(x: Tensor, times: int) -> Tensor:
    """Return x, (n, b, g, ...), with each head as often as value heads share it: (n, b, a, ...)."""
    return x if times == 1 else x.repeat_interleave(times, 2)


def _sums(decay: Tensor, earlier: Tensor) -> Tensor:
    """Return of each token the sum of its decays and of those before it that it sees.

    decay: (n, b, a, C, c). earlier: see ChunkMasks.
    """
    if earlier.dim() == 2:
        return decay.cumsum(-2)
    return _summed(earlier, decay)


def _summed(which: Tensor, decay: Tensor) -> Tensor:
    """Return of each token the sum of the decays of the tokens that `which` marks.

    which: (n, b, 1, C, C) or (C, C), bool. decay: (n, b, a, C, c), as the result.
    """
    if which.dim() > 2:
        which = which.squeeze(2)
    columns = decay.transpose(2, 3)  # n b C a c
    sums = which.to(decay.dtype) @ columns.flatten(3)
    return sums.unflatten(3, columns.shape[3:]).transpose(2, 3)


def _until_last(decay: Tensor, earlier: Tensor) -> Tensor:
    """Return D_last, the decay from each token to the last one of the chunk: (n, b, a, C, c).

    It is 0 if the last token does not see the token.
    """
    return _summed(_later(earlier), decay).exp() * earlier[..., -1, :, None]


def _later(earlier: Tensor) -> Tensor:
    """Return whether token j is after token i and sees it, in the shape of `earlier`."""
    return earlier.mT & ~torch.eye(earlier.shape[-1], dtype=torch.bool, device=earlier.device)


class _Between(torch.autograd.Function):
    """The decay D from token j to token i, 0 if i does not see j.

    D is the exponential of a difference of sums, and the gradient of a sum is a difference of sums
    of gradients. Both differences are small beside the sums: with sums in fp32 a strong decay had
    errors of 1e-4. So sums are in fp64.
    """

    @staticmethod
    def forward(ctx, sums, earlier, dtype):
        """Return D, (n, b, a, C, C, c) in `dtype`, for sums of decays, (n, b, a, C, c) in fp64."""
        differences = sums[..., :, None, :] - sums[..., None, :, :]
        between = differences.to(dtype).masked_fill_(~earlier[..., None], -torch.inf).exp_()
        ctx.save_for_backward(between)
        return between

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient of the sums; grad: that of D."""
        (between,) = ctx.saved_tensors
        grad = grad * between
        grad.diagonal(dim1=-3, dim2=-2).zero_()  # no sum moves D from a token to itself
        rows, columns = (grad.sum(dim, dtype=torch.float64) for dim in (-2, -3))
        return rows - columns, None, None


def _decayed(
    rows: tuple[Tensor, ...], k: Tensor, decay: Tensor, earlier: Tensor, shared: int
) -> list[Tensor]:
    """Return (D x) k^T of each x of `rows`, 0 where a token does not see another: (n, b, a, C, C).

    rows: each (n, b, g, C, p). k: (n, b, g, C, p). shared: a/g.
    """
    if decay.shape[-1] == 1:
        sums = _sums(decay.double(), earlier)  # n b a C 1
        between = _Between.apply(sums, earlier, decay.dtype).squeeze(-1)
        return [_repeated(x @ k.mT, shared) * between for x in rows]
    if torch.is_grad_enabled():  # all products within blocks would be kept
        return recompute(_decayed_by_row, rows, k, decay, earlier)
    return _decayed_by_row(rows, k, decay, earlier)


def _decayed_by_row(
    rows: tuple[Tensor, ...], k: Tensor, decay: Tensor, earlier: Tensor
) -> list[Tensor]:
    """Return what `_decayed` does if each row of the state has a decay of its own.

    (D x)_i . k_j = sum over rows of x_i exp(sum of g after j up to i) k_j. For tokens of one block
    all products are made. For a block and those before it the exponential is divided at the begin
    of the block, into a factor of x_i and one of k_j. No factor is above 1.
    """
    size = k.shape[-2]
    results: list[list[Tensor]] = [[] for _ in rows]
    for first in range(0, size, BLOCK):
        block, before = slice(first, min(first + BLOCK, size)), slice(0, first)
        own = earlier[..., block, block]
        sums = _sums(decay[..., block, :].double(), own)  # of the block's tokens that a token sees
        between = _Between.apply(sums, own, decay.dtype)
        since = sums.to(decay.dtype).exp()
        of_keys = between * k[..., None, block, :]  # n b a B B p
        until = _until_block(decay[..., before, :], earlier[..., before, before])
        keys_before = k[..., before, :] * until
        for x, found in zip(rows, results, strict=True):
            within = (of_keys @ x[..., block, :, None]).squeeze(-1)
            across = (x[..., block, :] * since) @ keys_before.mT
            found.append(torch.cat([across * earlier[..., block, before], within], -1))
    return [torch.cat([F.pad(x, (0, size - x.shape[-1])) for x in found], -2) for found in results]


def _until_block(decay: Tensor, earlier: Tensor) -> Tensor:
    """Return the decay from each token to the end of its document, or of these tokens: all of (n,
    b, a, C, c). A token beyond them that sees the token sees all in between.
    """
    return _summed(_later(earlier), decay).exp()


# ---- From chunk to chunk, and from rank to rank --------------------------------------------------


def _pass(chunks: Chunks, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state before each chunk, (n, m, p, r), N, (n, m, C, r), and the last state.

    state: that before the first chunk, (m, p, r).
    """
    states, written = [], []
    for i, (writes, keys, decay) in enumerate(zip(chunks.writes, chunks.keys, chunks.decay)):
        states.append(state)
        if chunks.reads is not None:
            writes = torch.baddbmm(writes, chunks.reads[i], state, alpha=-1)
        written.append(writes)
        state = torch.baddbmm(state * decay, keys.mT, writes)
    return torch.stack(states), torch.stack(written), state


def _pass_over_ranks(chunks: Chunks, samples: int, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_pass` does if the state before the first chunk is that of other ranks.

    samples: the segments of this rank, two of each sample. The columns of the state that runs
    through the chunks are [B, A], and become B + A S for the state S before the segment. Without
    the delta rule A is diagonal, and one column.
    """
    segments, keys = chunks.keys.shape[1], chunks.keys.shape[-1]
    values = chunks.writes.shape[-1]
    is_diagonal = chunks.reads is None
    one = torch.ones(keys, 1) if is_diagonal else torch.eye(keys)
    one = one.to(chunks.keys)
    columns = one.shape[-1]
    start = F.pad(one, (values, 0)).expand(segments, -1, -1)
    widened = chunks._replace(writes=F.pad(chunks.writes, (0, columns)))
    states, written, last = _pass(widened, start)
    state = states_before(last.unflatten(0, (samples, -1)), values, group).flatten(0, 1)

    def entered(columns: Tensor) -> Tensor:
        """Return B + A S of the columns [B, A]."""
        own, transition = columns.split([values, columns.shape[-1] - values], -1)
        return own + (transition * state if is_diagonal else transition @ state)

    written = written[..., :values] if is_diagonal else entered(written)
    return entered(states), written, entered(last)
