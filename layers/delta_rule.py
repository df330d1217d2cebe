"""The gated delta rule by matrix products over chunks of tokens (arXiv 2412.06464, section 3.3).

    mixed, state = gated_delta_rule(q, k, v, decay, strength, offsets, state, group)

A head has a state S of key size x value size numbers. A token t lets it fade, reads by its key what
S holds for it, and writes the difference to its value with a strength beta:

    S <- exp(g_t) S;   S <- S + k_t beta_t (v_t - S^T k_t)^T;   result: S^T q_t

Within a chunk of C tokens let G be the sum of g from the chunk's begin, and D[i, j] the decay
exp(G_i - G_j) from token j to token i, 0 unless i >= j. With the state S before the chunk, what the
tokens write are the rows of a matrix N = U - W S, where

    (1 + M) [U, W] = [beta v, beta e k]    M[i, j] = beta_i D[i, j] k_i . k_j, i > j;  e = exp(G)
    results: (e q) S + (D * q k^T) N        next state: e_last S + (D_last k)^T N

so only the states are computed one chunk after the other, and all else for all chunks at once.

Documents: a token that is in another document is seen by no token of this one. D[i, j] is 0 if i
and j are in two documents, e_i is 0 if the document of i begins in the chunk, and G counts from the
begin of the document: no number of another document enters a sum but as a factor of an exact 0.

Several ranks with parts of a sample (--cp): the next state is an affine function of the state
before, S -> A S + B, and so is what a whole segment does with it. Each rank computes A and B of its
two segments by letting [0, 1] run through the chunks in place of a state, all ranks gather them,
and each computes the states before its segments: key size x (key size + value size) numbers of a
head and segment are sent, however long the segment is.

Shapes: s tokens, b samples, a value heads, g key heads (a/g value heads share one), p key size,
r value size, n chunks of C tokens, m = b a.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from architecture.mixer_stats import CHUNK
from distributed.collectives import Group
from distributed.context_parallel import states_before


class ChunkedRule(NamedTuple):
    """What the tokens of each chunk do, for one pass over the states.

    writes: U, (n, m, C, r). reads: W, (n, m, C, p). keys: D_last k, (n, m, C, p). decay: e_last,
    (n, m, 1, 1). queries: e q, (n, m, C, p). scores: D * q k^T, (n, m, C, C).
    """

    writes: Tensor
    reads: Tensor
    keys: Tensor
    decay: Tensor
    queries: Tensor
    scores: Tensor


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    strength: Tensor,
    offsets: Tensor | None,
    state: Tensor | None,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """Return the results, (s, b, a, r), and the state after the last token, (b, a, p, r).

    q, k: (s, b, g, p), normalised and scaled. v: (s, b, a, r). decay: g, the logarithm, and
    strength: beta, (s, b, a) each. offsets: the number of tokens of its document before each token,
    (s, b); None: one document. state: that before the first token, or None for zeros. group: the
    ranks that share the samples' tokens; then b counts each sample's two segments on this rank
    (context_parallel.to_segments), and the state is that after each of them.
    """
    samples, heads = v.shape[1:3]
    rule = _chunked(q, k, v, decay, strength, offsets)
    if state is None:
        state = v.new_zeros(samples, heads, k.shape[-1], v.shape[-1])
    state = state.flatten(0, 1)
    if group.size == 1:
        states, written, last = _pass(rule, state)
    else:
        states, written, last = _pass_over_ranks(rule, samples, group)
    mixed = rule.queries @ states + rule.scores @ written  # n m C r
    # n (b a) C r -> s b a r, without the tokens that fill the last chunk
    mixed = mixed.unflatten(1, (samples, heads)).permute(0, 3, 1, 2, 4).flatten(0, 1)
    return mixed[: len(v)], last.unflatten(0, (samples, heads))


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, offsets: Tensor | None
) -> ChunkedRule:
    """Return what each chunk does; the arguments are those of `gated_delta_rule`."""
    size = min(CHUNK, len(v))
    shared = v.shape[2] // k.shape[2]
    sees, enters = _visible(offsets, size, v)
    v = _by_chunks(v, size)  # n b a C r
    beta = _by_chunks(strength[..., None], size)  # n b a C 1
    q, k = (_by_chunks(x, size) for x in (q, k))  # n b g C p
    total = _decay_in_chunk(_by_chunks(decay[..., None], size)[..., 0], sees)  # n b a C
    between = (total[..., None] - total[..., None, :]).masked_fill(~sees, -torch.inf).exp()
    since = (total.exp() * enters)[..., None]  # e, n b a C 1
    of_keys, of_queries = (_repeated(x @ k.mT, shared) for x in (k, q))  # n b a C C
    q, k = (_repeated(x, shared) for x in (q, k))
    system = of_keys * between * beta
    sides = torch.cat([v * beta, k * (beta * since)], -1)
    # Only what is below the diagonal counts: the diagonal is 1.
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    writes, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    keys = k * between[..., -1, :, None]
    parts = writes, reads, keys, since[..., -1:, :], q * since, of_queries * between
    return ChunkedRule(*(part.flatten(1, 2) for part in parts))


def _visible(offsets: Tensor | None, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each token of a chunk sees each, and whether it sees the state before, as 1.

    offsets: (s, b) or None. Shapes: (n, b, 1, C, C), bool, and (n, b, 1, C); without documents (C,
    C) and (C,).
    """
    place = torch.arange(size, device=like.device)
    distance = place[:, None] - place
    if offsets is None:
        return distance >= 0, torch.ones(size, dtype=like.dtype, device=like.device)
    more = -len(offsets) % size
    if more:  # the tokens that fill the last chunk go on with its document, and change nothing
        further = offsets[-1] + torch.arange(1, more + 1, device=offsets.device)[:, None]
        offsets = torch.cat([offsets, further])
    offsets = offsets.unflatten(0, (-1, size)).transpose(1, 2)[:, :, None]  # n b 1 C
    sees = (distance >= 0) & (distance <= offsets[..., None])
    return sees, (offsets > place).to(like.dtype)


def _by_chunks(x: Tensor, size: int) -> Tensor:
    """Return x, (s, b, heads, d), as chunks of `size` tokens, the last one filled with zeros.

    The result is (n, b, heads, C, d).
    """
    x = F.pad(x, (0, 0, 0, 0, 0, 0, 0, -len(x) % size))
    return x.unflatten(0, (-1, size)).permute(0, 2, 3, 1, 4)


def _decay_in_chunk(decay: Tensor, sees: Tensor) -> Tensor:
    """Return G, the sum of the decays of a token and of those before it that it sees.

    decay: (n, b, a, C). sees: (n, b, 1, C, C), or (C, C) without documents.
    """
    if sees.dim() == 2:
        return decay.cumsum(-1)
    return (decay[..., None, :] * sees).sum(-1)


def _repeated(x: Tensor, times: int) -> Tensor:
    """Return x, (n, b, g, ...), with each head as often as value heads share it: (n, b, a, ...)."""
    return x if times == 1 else x.repeat_interleave(times, 2)


def _pass(rule: ChunkedRule, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state before each chunk, (n, m, p, r), N, (n, m, C, r), and the last state.

    state: that before the first chunk, (m, p, r).
    """
    states, written = [], []
    for writes, reads, keys, decay in zip(rule.writes, rule.reads, rule.keys, rule.decay):
        states.append(state)
        written.append(torch.baddbmm(writes, reads, state, alpha=-1))
        state = torch.baddbmm(state * decay, keys.mT, written[-1])
    return torch.stack(states), torch.stack(written), state


def _pass_over_ranks(
    rule: ChunkedRule, samples: int, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_pass` does if the state before the first chunk is that of other ranks.

    samples: the segments of this rank, two of each sample. The columns of the state that runs
    through the chunks are [B, A], and become B + A S for the state S before the segment.
    """
    keys, values = rule.keys.shape[-1], rule.writes.shape[-1]
    segments = rule.writes.shape[1]
    one = torch.eye(keys, dtype=rule.keys.dtype, device=rule.keys.device)
    start = F.pad(one, (values, 0)).expand(segments, -1, -1)
    widened = rule._replace(writes=F.pad(rule.writes, (0, keys)))
    states, written, last = _pass(widened, start)
    sizes = [values, keys]
    state = states_before(last.unflatten(0, (samples, -1)), values, group).flatten(0, 1)

    def entered(columns: Tensor) -> Tensor:
        """Return B + A S of the columns [B, A]."""
        own, transition = columns.split(sizes, -1)
        return own + transition @ state

    return entered(states), entered(written), entered(last)
