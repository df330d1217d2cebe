"""Attention of ranks that share a sample's tokens (--cp): over heads, then in a ring.

    q, k, v = to_heads(q, k, v, mesh.heads)            of fewer heads, more tokens
    mixed = ring_attention(q, k, v, seen, mesh.ring)   keys and values go round
    mixed = to_tokens(mixed, mesh.heads)               of all heads, this rank's tokens

A rank has chunks i and 2 cp - 1 - i of a sample's 2 cp equal chunks (Group.balanced_shard): with a
causal mask each has the same to do. `heads` are neighbours, as many as divide the key/value heads
(arXiv 2309.14509): together their tokens are such a pair of longer chunks, of a ring of cp / heads
ranks (arXiv 2310.01889), in which no tensor is as long as the sample.

Shapes at line ends: s tokens of this rank, b samples, a heads of size d, g key/value heads.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from distributed.collectives import Group, Handle

aten = torch.ops.aten
ROWS = 256  # queries whose scores the form without a kernel holds at once


class Seen(NamedTuple):
    """What queries of a ring see, where it is not all tokens up to their own, or not all equally.

    starts, stops: token q sees tokens starts[q] to stops[q] - 1, (b, s) of the whole sample, or
    None. slopes: by which scores fall with the distance, (a,), or None.
    """

    starts: Tensor | None
    stops: Tensor | None
    slopes: Tensor | None


# ---- All-to-all over heads -----------------------------------------------------------------------


class _Exchange(torch.autograd.Function):
    """All-to-all of one block for each rank, forward and backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, received = group, torch.empty_like(x)
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
    first, second = _Exchange.apply(sent, group).chunk(2, 1)  # n s/2 b heads/n d
    whole = torch.cat([first, second.flip(0)]).flatten(0, 1)
    return whole.split([t.shape[3] for t in parts], 2)


def to_tokens(mixed: Tensor, group: Group) -> Tensor:
    """The way back: (n s, b, a d / n) -> (s, b, a d)."""
    n = group.size
    if n == 1:
        return mixed
    first, second = (half.unflatten(0, (n, -1)) for half in mixed.chunk(2))  # n s/2 b ad/n
    received = _Exchange.apply(torch.cat([first, second.flip(0)], 1), group)
    return received.movedim(0, 2).flatten(2)


# ---- Ring ----------------------------------------------------------------------------------------


def ring_attention(q: Tensor, k: Tensor, v: Tensor, seen: Seen | None, ring: Group) -> Tensor:
    """Softmax(q k^T / sqrt(d)) v over the tokens of all ranks: (s, b, heads, d) -> (s, b, a d)."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # b heads s d
    return _Ring.apply(q, k, v, seen, ring).permute(2, 0, 1, 3).flatten(2)


def ring_kernel(q: Tensor, seen: bool) -> str:
    """What computes a ring's attention of such queries: `flash`, torch's kernel, or `math`."""
    width = q.shape[-1]
    fits = q.dtype in (torch.float16, torch.bfloat16) and width % 8 == 0 and width <= 256
    if q.is_cuda:  # flash attention is written for GPUs from Ampere on
        fits = fits and torch.cuda.get_device_capability(q.device) >= (8, 0)
    return "math" if seen or (q.is_cuda and not fits) else "flash"


class _Ring(torch.autograd.Function):
    """Of every rank's keys and values, which come one after the other, a part of the softmax.

    Parts are joined by the logarithms of their sums of exponentials. Kept for the backward pass:
    queries, the rank's own keys and values, the output and these logarithms.
    """

    @staticmethod
    def forward(ctx, q, k, v, seen, ring):
        flash = ring_kernel(q, seen is not None) == "flash"
        part_of = _Flash(ring) if flash else _Math(seen, ring, q)
        exact = torch.promote_types(q.dtype, torch.float32)
        total = q.new_zeros(q.shape, dtype=exact)
        log_sum = q.new_full(q.shape[:3], -torch.inf, dtype=exact)
        for source, (keys, values) in _round(torch.stack([k, v]), ring):
            rows, columns = _shown(ring, source, q.shape[2], seen)
            of_part = q[:, :, rows], keys[:, :, columns], values[:, :, columns]
            mixed, sums = part_of.forward(*of_part, source)
            before = log_sum[:, :, rows]
            after = torch.logaddexp(before, sums)
            scaled = total[:, :, rows] * (before - after).exp()[..., None]
            total[:, :, rows] = scaled + mixed * (sums - after).exp()[..., None]
            log_sum[:, :, rows] = after
        mixed = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, mixed, log_sum)
        ctx.part_of, ctx.seen, ctx.ring = part_of, seen, ring
        return mixed

    @staticmethod
    def backward(ctx, grad):
        q, k, v, mixed, log_sum = ctx.saved_tensors
        ring, exact = ctx.ring, log_sum.dtype
        dq, moving = q.new_zeros(q.shape, dtype=exact), None
        for source, (keys, values) in _round(torch.stack([k, v]), ring):
            rows, columns = _shown(ring, source, q.shape[2], ctx.seen)
            of_part = q[:, :, rows], keys[:, :, columns], values[:, :, columns]
            of_rows = (t[:, :, rows].contiguous() for t in (grad, mixed, log_sum))
            own, *others = ctx.part_of.backward(*of_part, *of_rows, source)
            dq[:, :, rows] += own
            # The gradients of a rank's keys and values follow them round, and one step further.
            added = moving.wait() if moving else q.new_zeros(2, *k.shape, dtype=exact)
            for whole, part in zip(added, others):
                whole[:, :, columns] += part
            moving = _Moving(added, ring)
        return dq.to(q.dtype), *moving.wait().to(q.dtype), None, None


class _Moving:
    """A tensor on its way to the next rank of a ring, and the previous rank's to this one."""

    def __init__(self, sent: Tensor, ring: Group):
        self.received = torch.empty_like(sent)
        to, source = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
        self.handles: list[Handle] = []
        # NCCL may run a group's messages one after the other: neighbours must not both send first.
        for sends in (ring.rank % 2 == 0, ring.rank % 2 == 1):
            handle = ring.send(sent, to) if sends else ring.receive(self.received, source)
            self.handles.append(handle)

    def wait(self) -> Tensor:
        """The previous rank's tensor."""
        for handle in self.handles:
            handle.wait()
        return self.received


def _round(own: Tensor, ring: Group) -> Iterator[tuple[int, Tensor]]:
    """Each rank of the ring and its tensor, this one first; meanwhile the next one is coming."""
    for step in range(ring.size):
        moving = _Moving(own, ring) if step + 1 < ring.size else None
        yield (ring.rank - step) % ring.size, own
        own = moving.wait() if moving else own


def _shown(ring: Group, source: int, tokens: int, seen: Seen | None) -> tuple[slice, slice]:
    """Which of this rank's queries see keys of that rank, and which of these they see."""
    first, second, every = slice(tokens // 2), slice(tokens // 2, None), slice(None)
    if source == ring.rank or (seen and seen.starts is not None):
        return every, every
    return (every, first) if source < ring.rank else (second, every)


class _Flash:
    """A part of the softmax by torch's kernels: all keys are seen, of this rank's own those up to
    the query's.
    """

    def __init__(self, ring: Group):
        # random: state that the backward kernel on a GPU takes; without dropout it is not used.
        self.own, self.random = ring.rank, ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, source: int) -> tuple[Tensor, Tensor]:
        """(b, a, s, d), and the logarithms of sums (b, a, s)."""
        k, v = (_repeated(t, q.shape[1]) for t in (k, v))
        if not q.is_cuda:
            kernel = aten._scaled_dot_product_flash_attention_for_cpu
            return kernel(q, k, v, 0.0, source == self.own)
        found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, source == self.own)
        self.random = found[6:8]
        return found[0], found[1]

    def backward(self, q, k, v, grad, mixed, log_sum, source: int) -> tuple[Tensor, ...]:
        """Gradients of q, k and v, by the whole output and its logarithms of sums."""
        groups, heads = k.shape[1], q.shape[1]
        k, v = (_repeated(t, heads) for t in (k, v))
        about = grad, q, k, v, mixed, log_sum
        if not q.is_cuda:
            kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
            found = kernel(*about, 0.0, source == self.own)
        else:
            lengths, last = (None, None, q.shape[2], k.shape[2]), (0.0, source == self.own)
            kernel = aten._scaled_dot_product_flash_attention_backward
            found = kernel(*about, *lengths, *last, *self.random)
        return found[0], _summed(found[1], groups), _summed(found[2], groups)


class _Math:
    """A part of the softmax with masks, with ALiBi or in a precision that has no kernel: of ROWS
    queries at a time the scores are written, and computed again in the backward pass.
    """

    def __init__(self, seen: Seen | None, ring: Group, q: Tensor):
        self.ring, self.tokens, self.device = ring, q.shape[2], q.device
        self.exact, self.scale = torch.promote_types(q.dtype, torch.float32), q.shape[-1] ** -0.5
        starts, stops, slopes = seen or (None, None, None)
        self.slopes = None if slopes is None else slopes.to(self.exact)[:, None, None]
        own = self._places(ring.rank)[None]
        self.starts = torch.zeros_like(own) if starts is None else ring.balanced_shard(starts, 1)
        self.stops = own + 1 if stops is None else ring.balanced_shard(stops, 1)

    def _places(self, rank: int) -> Tensor:
        """Of the tokens of a rank of the ring in the sample; (s,)."""
        half, size = self.tokens // 2, self.ring.size
        begins = rank * half, (2 * size - 1 - rank) * half
        return torch.cat([torch.arange(a, a + half, device=self.device) for a in begins])

    def _blocks(self, q: Tensor, k: Tensor, source: int) -> Iterator[tuple[slice, Tensor]]:
        """Rows of q, and their scores; -inf where a key is not seen."""
        # A part is of all of this rank's queries or of the last, and of all keys or the first.
        skipped = self.tokens - q.shape[2]
        places, keys = self._places(self.ring.rank), self._places(source)[: k.shape[2]]
        for begin in range(0, q.shape[2], ROWS):
            rows = slice(begin, min(begin + ROWS, q.shape[2]))
            here = slice(skipped + rows.start, skipped + rows.stop)
            scores = (q[:, :, rows] @ k.mT).mul_(self.scale)  # b a rows keys
            if self.slopes is not None:
                scores -= self.slopes * (places[here, None] - keys).abs()
            seen = (keys >= self.starts[:, here, None]) & (keys < self.stops[:, here, None])
            yield rows, scores.masked_fill_(~seen[:, None], -torch.inf)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, source: int) -> tuple[Tensor, Tensor]:
        """As of _Flash; where a query sees no key it is 0, and its logarithm -inf."""
        q, k, v = (_repeated(t.to(self.exact), q.shape[1]) for t in (q, k, v))
        mixed, log_sum = torch.empty_like(q), q.new_empty(q.shape[:3])
        for rows, scores in self._blocks(q, k, source):
            log_sum[:, :, rows] = scores.logsumexp(-1)
            mixed[:, :, rows] = self._shares(scores, log_sum[:, :, rows]) @ v
        return mixed, log_sum

    def _shares(self, scores: Tensor, log_sum: Tensor) -> Tensor:
        """Exponentials of scores, which are overwritten, over their sums; 0 where these are 0."""
        return scores.sub_(log_sum.clamp(min=torch.finfo(self.exact).min)[..., None]).exp_()

    def backward(self, q, k, v, grad, mixed, log_sum, source: int) -> tuple[Tensor, ...]:
        """As of _Flash."""
        groups, heads = k.shape[1], q.shape[1]
        q, k, v, grad, mixed = (_repeated(t.to(self.exact), heads) for t in (q, k, v, grad, mixed))
        dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
        offset = (grad * mixed).sum(-1, keepdim=True)
        for rows, scores in self._blocks(q, k, source):
            shares = self._shares(scores, log_sum[:, :, rows])
            dv += shares.mT @ grad[:, :, rows]
            dscores = (grad[:, :, rows] @ v.mT - offset[:, :, rows]).mul_(shares).mul_(self.scale)
            dq[:, :, rows] = dscores @ k
            dk += dscores.mT @ q[:, :, rows]
        return dq, _summed(dk, groups), _summed(dv, groups)


def _repeated(t: Tensor, heads: int) -> Tensor:
    """Key/value heads (b, g, s, d) as often as there are query heads: (b, heads, s, d)."""
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)


def _summed(gradient: Tensor, groups: int) -> Tensor:
    """The gradient of `_repeated`'s input."""
    return gradient.unflatten(1, (groups, -1)).sum(2)
