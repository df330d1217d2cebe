"""Parameters as pieces of global tensors, and the layers whose weights are split over tp.

Activations are (s, b, h): sequence, samples, hidden. With sequence parallelism what lies between
two tensor-parallel layers is (s/tp, b, h). Megatron's f and g (arXiv 1909.08053) are the two ends
of a tensor-parallel pair; their sequence-parallel forms are in arXiv 2205.05198.
"""

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed.collectives import MAX, Group
from distributed.mesh import Mesh

# ------------------------------------------------------------------------------------------------
# Parameters: drawn by global name and global index, so every layout starts equal
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParamSpec:
    """What a local parameter is a piece of.

    name, shape: of the whole tensor, without padding. dim: the dimension split over tp, or None
    if every tensor rank holds all of it. start, stop: the rows held here along dim; the local
    tensor may have more rows, which are padding. decay: whether weight decay applies. partial:
    each tensor rank's gradient is one term of a sum. tied: a copy is on another stage too.
    copy: this one is the copy that norms and checkpoints leave out.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    start: int
    stop: int
    decay: bool
    partial: bool = False
    tied: bool = False
    copy: bool = False


@dataclass(frozen=True)
class ParamFactory:
    """What every layer is built with: where it is, its numbers, and the seed of its weights.

    `dtype` is the precision of computation. Parameters are drawn in fp32 at least; zero.py keeps
    that as the master copy and turns the parameters themselves to `dtype`.
    """

    mesh: Mesh
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    seed: int = 1234
    std: float = 0.02
    sequence_parallel: bool = False

    def parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        std: float | None = None,
        fill: float = 0.0,
        dim: int | None = None,
        padded: int | None = None,
        decay: bool = False,
        tied: bool = False,
        copy: bool = False,
    ) -> nn.Parameter:
        """This rank's piece of the tensor `name`: normal with `std`, or constant `fill`.

        Split along `dim` over tp, if given, of size `padded` (default: shape[dim]), which tp
        divides. The piece knows what it is: `.spec`.
        """
        tp, start, stop, local = self.mesh.tp, 0, shape[0], list(shape)
        if dim is not None:
            rows = (padded or shape[dim]) // tp.size
            start = min(tp.rank * rows, shape[dim])
            stop = min(start + rows, shape[dim])
            local[dim] = rows
        dtype = torch.promote_types(self.dtype, torch.float32)
        tensor = torch.full(local, fill, dtype=dtype, device=self.device)
        if std is not None:
            drawn = draw_normal(name, shape, dim or 0, start, stop, std, self.seed, self.device)
            tensor.zero_().narrow(dim or 0, 0, stop - start).copy_(drawn)
        parameter = nn.Parameter(tensor)
        partial = self.sequence_parallel and dim is None and tp.size > 1
        parameter.spec = ParamSpec(name, shape, dim, start, stop, decay, partial, tied, copy)
        return parameter


# Odd 64-bit constants of the splitmix64 generator (Steele, Lea, Flood, OOPSLA 2014), signed.
_GAMMA, _MIX1, _MIX2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


def draw_normal(
    name: str,
    shape: tuple[int, ...],
    dim: int,
    start: int,
    stop: int,
    std: float,
    seed: int,
    device,
) -> Tensor:
    """Rows [start, stop) along `dim` of the normal tensor that belongs to (seed, name); float64.

    Element i of the whole tensor is a function of (seed, name, i) alone: splitmix64's i-th output,
    its halves turned into a normal by Box and Muller. Any slice can be drawn by itself.
    """
    key = int.from_bytes(
        hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True
    )
    outer, inner = _product(shape[:dim]), _product(shape[dim + 1 :])
    result = torch.empty(outer, (stop - start) * inner, dtype=torch.float64, device=device)
    columns = torch.arange(start * inner, stop * inner, device=device)
    step = max(1, 2**22 // max(1, columns.numel()))  # bounds the temporaries to some 32 MB each
    for row in range(0, outer, step):
        rows = torch.arange(row, min(row + step, outer), device=device)
        index = rows[:, None] * (shape[dim] * inner) + columns
        result[row : row + step] = _normal(_splitmix64(index, key))
    return result.mul_(std).view(*shape[:dim], stop - start, *shape[dim + 1 :])


def _splitmix64(index: Tensor, key: int) -> Tensor:
    z = (index + 1) * _GAMMA + key
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's >> keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _normal(bits: Tensor) -> Tensor:
    low, high = bits & 0xFFFFFFFF, _shift(bits, 32)
    radius = ((high.double() + 0.5) * 2.0**-32).log_().mul_(-2.0).sqrt_()
    return radius * (low.double() * (2.0**-32 * 2.0 * torch.pi)).cos_()


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


# ------------------------------------------------------------------------------------------------
# f and g, along hidden and along the sequence
# ------------------------------------------------------------------------------------------------


class _Reduce(torch.autograd.Function):
    """g: all-reduce forward, nothing backward. s b h elements a call."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.mark_dirty(x)
        tp.all_reduce(x).wait()
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _ReduceScatterSequence(torch.autograd.Function):
    """g with sequence parallelism: (s, b, h) summed and split to (s/tp, b, h); gather backward."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return _scatter_sum(x, tp)

    @staticmethod
    def backward(ctx, grad):
        return _gather(grad, ctx.tp), None


def reduce_from_tp(x: Tensor, tp: Group, sequence_parallel: bool) -> Tensor:
    """Sum the tensor ranks' partial results; each keeps all of it, or its part of the sequence."""
    if tp.size == 1:
        return x
    return (_ReduceScatterSequence if sequence_parallel else _Reduce).apply(x, tp)


def _gather(x: Tensor, tp: Group) -> Tensor:
    whole = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])
    tp.all_gather(whole, x.contiguous()).wait()
    return whole


def _scatter_sum(x: Tensor, tp: Group) -> Tensor:
    part = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
    tp.reduce_scatter(part, x.contiguous()).wait()
    return part


class _ColumnLinear(torch.autograd.Function):
    """f and the product with a column-split weight, with f's backward hidden behind dW.

    Only the local part of a sequence-parallel input is kept; it is gathered again backward.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, tp, sequence_parallel):
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.sequence_parallel, ctx.has_bias = tp, sequence_parallel, bias is not None
        return F.linear(_gather(x, tp) if sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        """Gradients of x, weight and bias, in their shapes, by the product's."""
        x, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            whole = x.new_empty(x.shape[0] * ctx.tp.size, *x.shape[1:])
            gathering = ctx.tp.all_gather(whole, x)
            full = grad @ weight
            dx = torch.empty_like(x)
            gathering.wait()
            reducing = ctx.tp.reduce_scatter(dx, full)
        else:
            whole, dx = x, grad @ weight
            reducing = ctx.tp.all_reduce(dx)
        rows = grad.flatten(0, -2)
        dweight = rows.t() @ whole.flatten(0, -2)
        dbias = rows.sum(0) if ctx.has_bias else None
        reducing.wait()
        return dx, dweight, dbias, None, None


# ------------------------------------------------------------------------------------------------
# Layers
# ------------------------------------------------------------------------------------------------


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group, sequence_parallel: bool
) -> Tensor:
    """x W^T + b for a local piece (out/tp, in) of W; x is (s, b, in), or (s/tp, b, in)."""
    if tp.size == 1:
        return F.linear(x, weight, bias)
    return _ColumnLinear.apply(x, weight, bias, tp, sequence_parallel)


class ColumnLinear(nn.Module):
    """y = x W^T + b with the rows of W split over tp: (s, b, in) -> (s, b, out/tp).

    `shape` is the output's own shape, of which dimension `dim` is split: (kv_heads, ..., head
    size) for q, k and v, (2, f) for gate and up; the output is flat.
    """

    def __init__(
        self,
        build: ParamFactory,
        name: str,
        inputs: int,
        shape: tuple[int, ...],
        dim: int,
        bias: bool,
    ):
        super().__init__()
        self.tp, self.sequence_parallel = build.mesh.tp, build.sequence_parallel
        self.weight = build.parameter(
            f"{name}.weight", (*shape, inputs), std=build.std, dim=dim, decay=True
        )
        self.bias = build.parameter(f"{name}.bias", shape, dim=dim) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.flatten(0, -2)
        bias = None if self.bias is None else self.bias.flatten()
        return column_linear(x, weight, bias, self.tp, self.sequence_parallel)


class RowLinear(nn.Module):
    """y = sum over tp of x_i W_i^T, + b: (s, b, in/tp) -> (s, b, out), W's columns split."""

    def __init__(
        self, build: ParamFactory, name: str, inputs: int, outputs: int, std: float, bias: bool
    ):
        super().__init__()
        self.tp, self.sequence_parallel = build.mesh.tp, build.sequence_parallel
        self.weight = build.parameter(
            f"{name}.weight", (outputs, inputs), std=std, dim=1, decay=True
        )
        self.bias = build.parameter(f"{name}.bias", (outputs,)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = reduce_from_tp(F.linear(x, self.weight), self.tp, self.sequence_parallel)
        return y if self.bias is None else y + self.bias


class VocabEmbedding(nn.Module):
    """Rows of the vocabulary split over tp: tokens (b, s) -> (s, b, h), or (s/tp, b, h).

    The last rank's rows may end in padding, which no token selects.
    """

    def __init__(
        self, build: ParamFactory, name: str, vocab: int, padded: int, hidden: int, tied: bool
    ):
        super().__init__()
        self.tp, self.sequence_parallel = build.mesh.tp, build.sequence_parallel
        self.weight = build.parameter(
            name, (vocab, hidden), std=build.std, dim=0, padded=padded, decay=True, tied=tied
        )

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.t()
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.tp.rank * self.weight.shape[0]
        absent = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(absent, 0), self.weight)
        rows = rows.masked_fill(absent[..., None], 0.0)
        return reduce_from_tp(rows, self.tp, self.sequence_parallel)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy over a vocabulary split over tp, without ever gathering the logits.

    Two collectives of one and of two numbers per token. Computed in fp32 at least.
    """

    @staticmethod
    def forward(ctx, logits, labels, tp, start, stop):
        """The loss of each token, of labels' shape; logits are those of words [start, stop)."""
        dtype = logits.dtype
        logits = logits.to(torch.promote_types(dtype, torch.float32), copy=True)
        logits[..., stop - start :] = torch.finfo(logits.dtype).min  # padding
        largest = logits.amax(-1)
        tp.all_reduce(largest, MAX).wait()
        logits.sub_(largest[..., None])
        local = labels - start
        absent = (local < 0) | (labels >= stop)
        local = local.masked_fill(absent, 0)[..., None]
        target = logits.gather(-1, local)[..., 0].masked_fill(absent, 0.0)
        exponentials = logits.exp_()
        sums = torch.stack([exponentials.sum(-1), target])
        tp.all_reduce(sums).wait()
        ctx.save_for_backward(exponentials, sums[0], local, absent)
        ctx.dtype = dtype
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, grad):
        exponentials, total, local, absent = ctx.saved_tensors
        dlogits = exponentials.mul_((grad / total)[..., None])
        dlogits.scatter_add_(-1, local, -grad.masked_fill(absent, 0.0)[..., None])
        return dlogits.to(ctx.dtype), None, None, None, None


def cross_entropy(logits: Tensor, labels: Tensor, tp: Group, spec: ParamSpec) -> Tensor:
    """Loss of every token: logits (..., V/tp), labels (...) -> (...), in fp32 at least.

    `spec` is that of the head's weight: which rows of the vocabulary are here. Its backward may
    run once only: it reuses the forward's memory.
    """
    return _CrossEntropy.apply(logits, labels, tp, spec.start, spec.stop)
