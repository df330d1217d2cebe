"""Parameters as parts of global tensors, and the layers whose weights are split over tp.

Activations are (s, b, h): sequence, samples, hidden. With sequence parallelism what is between
two tensor-parallel layers is (s/tp, b, h). Megatron's f and g (arXiv 1909.08053) are the two ends
of a tensor-parallel pair; their sequence-parallel forms are in arXiv 2205.05198.
"""

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from distributed.collectives import Group
from distributed.mesh import Mesh

# ---- Parameters: drawn by global name and global index, so every layout starts equal -------------


@dataclass(frozen=True)
class ParamSpec:
    """What a local parameter is a part of.

    name, shape: of the whole tensor, without padding. dim: the dimension split over tp, with
    --vocab-pp that of the vocabulary over pp and tp, or None if every tensor rank holds all of it.
    start, stop: the rows held here along dim; the local tensor may have more rows, which are
    padding. decay: whether weight decay applies.
    reduce_over: the groups of the mesh over which its gradient is summed: first the replicas, over
    which ZeRO shards it, then `tp` where each tensor rank's gradient is one term of a sum, or
    `tied` where another stage holds a copy. copy: this is the copy that norms and checkpoints
    leave out.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    start: int
    stop: int
    decay: bool
    reduce_over: tuple[str, ...] = ("replicas",)
    copy: bool = False

    @property
    def tied(self) -> bool:
        """Whether another stage holds a copy."""
        return "tied" in self.reduce_over

    def counts_on(self, mesh: Mesh) -> bool:
        """Whether this rank's elements are those that count in norms, so that each counts once."""
        return not self.copy and (self.dim is not None or mesh.tp.rank == 0)


CPU = torch.device("cpu")


@functools.cache
def compiled(function: Callable) -> Callable:
    """`function` by torch.compile, for each shape anew: whole, or it raises."""
    return torch.compile(function, dynamic=False, fullgraph=True)


@dataclass(frozen=True)
class ParamFactory:
    """What every layer is built with: the mesh, the precision, the seed of its weights.

    `dtype` is the precision of computation. Parameters are drawn in fp32 at least; zero.py keeps
    that as the master copy and turns the parameters themselves to `dtype`. deferred: where linear
    layers leave weight gradients if the schedule splits the backward, else None. shard: at --zero 3
    is called with each block that has been drawn. compile: whether `fused` compiles.
    """

    mesh: Mesh
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    seed: int = 1234
    std: float = 0.02
    sequence_parallel: bool = False
    deferred: "DeferredGradients | None" = None
    shard: Callable[[nn.Module], None] | None = None
    compile: bool = False

    def fused(self, function: Callable) -> Callable:
        """`function`, which has no collectives, or with --compile its kernels where gradients are
        wanted: evaluations and decoding, with shapes of their own, run it as it is.
        """
        if not self.compile:
            return function
        return lambda *args: (compiled(function) if torch.is_grad_enabled() else function)(*args)

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
        over: Group | None = None,
        partial: bool = False,
    ) -> nn.Parameter:
        """This rank's part of the tensor `name`: normal with `std`, or constant `fill`.

        partial: each tensor rank's gradient is one term of a sum, as of its own heads.
        Split along `dim`, if given, over tp or another group (`over`), of size `padded` (default:
        shape[dim]), which the group's size divides. `.spec` says what it is a part of.
        """
        tp = self.mesh.tp
        start = 0
        stop = shape[0]
        local = list(shape)
        if dim is not None:
            group = over or tp
            rows = (padded or shape[dim]) // group.size
            start = min(group.rank * rows, shape[dim])
            stop = min(start + rows, shape[dim])
            local[dim] = rows
        dtype = torch.promote_types(self.dtype, torch.float32)
        tensor = torch.full(local, fill, dtype=dtype, device=self.device)
        if std:  # at 0 nothing is drawn: the weights will be loaded
            own = tensor.zero_().narrow(dim or 0, 0, stop - start)
            draw_normal(own, name, shape, dim or 0, start, std, self.seed)
        reduce_over: tuple[str, ...] = ("replicas",)
        if (self.sequence_parallel or partial) and dim is None and tp.size > 1:
            reduce_over += ("tp",)
        if tied:
            reduce_over += ("tied",)
        parameter = nn.Parameter(tensor)
        parameter.spec = ParamSpec(name, shape, dim, start, stop, decay, reduce_over, copy)
        return parameter


# Odd 64-bit constants of the splitmix64 generator (Steele, Lea, Flood, OOPSLA 2014), signed.
DRAWN_AT_ONCE = 2**20  # elements
DRAWN_ON_CPU = 2**16  # they stay in a core's cache, and little memory is left to later use
_GAMMA = -7046029254386353131
_MIX1 = -4658895280553007687
_MIX2 = -7723592293110705685


def draw_normal(
    out: Tensor, name: str, shape: tuple[int, ...], dim: int, start: int, std: float, seed: int
) -> None:
    """Fill the contiguous `out` with the rows from `start` on along `dim` of the normal tensor that
    belongs to (seed, name); computed in float64.

    Element i of the whole tensor is a function of (seed, name, i) alone: splitmix64's i-th output,
    its halves turned into a normal by Box and Muller. Any slice can be drawn by itself. Takes
    DRAWN_AT_ONCE x 100 bytes beside `out`, on a CPU DRAWN_ON_CPU x 100.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    key = int.from_bytes(digest[:8], "little", signed=True)
    inner = math.prod(shape[dim + 1 :])
    run, flat = out.shape[dim] * inner, out.view(-1)  # elements that follow one another in both
    at_once = DRAWN_AT_ONCE if out.is_cuda else DRAWN_ON_CPU
    for first in range(0, len(flat), at_once):
        last = min(first + at_once, len(flat))
        places = torch.arange(first, last, device=out.device)
        index = places + places // run * (shape[dim] * inner - run) + start * inner
        flat[first:last] = _normal(_splitmix64(index, key)).mul_(std)


def _splitmix64(index: Tensor, key: int) -> Tensor:
    z = (index + 1) * _GAMMA + key
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's >> keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _normal(bits: Tensor) -> Tensor:
    low = bits & 0xFFFFFFFF
    high = _shift(bits, 32)
    radius = ((high.double() + 0.5) * 2.0**-32).log_().mul_(-2.0).sqrt_()
    return radius * (low.double() * (2.0**-32 * 2.0 * torch.pi)).cos_()


# ---- f and g, along hidden and along the sequence ------------------------------------------------


class _Reduce(torch.autograd.Function):
    """g: all-reduce forward, nothing backward. s b h elements a call."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.mark_dirty(x)
        tp.at_once.all_reduce(x).wait()
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _ReduceScatterSequence(torch.autograd.Function):
    """g with sequence parallelism: (s, b, h) summed and split to (s/tp, b, h); gather backward."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        part = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
        tp.at_once.reduce_scatter(part, x.contiguous()).wait()
        return part

    @staticmethod
    def backward(ctx, grad):
        return _gather(grad, ctx.tp), None


def reduce_from_tp(x: Tensor, factory: ParamFactory) -> Tensor:
    """Sum the tensor ranks' partial results; each keeps all of it, or its part of the sequence."""
    if factory.mesh.tp.size == 1:
        return x
    reduce = _ReduceScatterSequence if factory.sequence_parallel else _Reduce
    return reduce.apply(x, factory.mesh.tp)


def _gather(x: Tensor, tp: Group | None) -> Tensor:
    """Every rank's part of the sequence; x itself if tp is None."""
    if tp is None:
        return x
    whole = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])
    tp.at_once.all_gather(whole, x.contiguous()).wait()
    return whole


# ---- Products with a weight, whose backward may be split -----------------------------------------


class DeferredGradients:
    """Weight gradients that a backward pass leaves for later, so that a schedule can place them.

    Linear layers that have one compute the gradient of their input alone (B of a split schedule,
    arXiv 2401.10241) and leave here what computes the weights' (W).
    """

    def __init__(self) -> None:
        self._left: list[Callable[[], None]] = []

    def add(self, compute: Callable[[], None]) -> None:
        """Leave a computation, which adds the gradients of some weights."""
        self._left.append(compute)

    def backward(self, output: Tensor | GradientEdge, grad: Tensor | None) -> Callable[[], None]:
        """The backward pass for inputs alone; what is returned does the rest when it is called."""
        torch.autograd.backward(output, grad)
        left = self._left
        self._left = []

        @torch.no_grad()
        def compute_weight_gradients() -> None:
            while left:
                left.pop(0)()

        return compute_weight_gradients


class _Linear(torch.autograd.Function):
    """f and the product with a local weight; f's backward overlaps the weight gradient.

    With sequence parallelism only the local part of the input is kept; it is gathered again for
    the weight gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, tp, gathered, add, deferred):
        """tp: over which the input's gradient is summed, or None; gathered: x is (s/tp, b, in);
        add: takes x and the product's gradient and adds the weights' gradients, None: autograd
        adds what `backward` returns; deferred: where that is left for later, or None.
        """
        ctx.save_for_backward(x, weight)
        ctx.tp = tp
        ctx.gathered = gathered
        ctx.has_bias = bias is not None
        ctx.add = add
        ctx.deferred = deferred
        return F.linear(_gather(x, tp if gathered else None), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        """Gradients of x, weight and bias, in their shapes, by the product's."""
        x, weight = ctx.saved_tensors
        tp = ctx.tp
        whole = x
        gathering = None
        summing = None
        if ctx.gathered and ctx.deferred is None:
            whole = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])
            gathering = tp.all_gather(whole, x)
        dx = grad @ weight
        if gathering is not None:
            gathering.wait()
        if ctx.gathered:
            summed = torch.empty_like(x)
            summing = tp.reduce_scatter(summed, dx)
            dx = summed
        elif tp is not None:
            summing = tp.all_reduce(dx)
        gradients: tuple = (None, None)
        if ctx.deferred is not None:
            add = ctx.add
            gathered = tp if ctx.gathered else None
            ctx.deferred.add(lambda: add(_gather(x, gathered), grad))
        elif ctx.add is not None:
            ctx.add(whole, grad)
        else:
            gradients = _weight_gradients(whole, grad, ctx.has_bias)
        if summing is not None:
            summing.wait()
        return dx, *gradients, None, None, None, None


def _weight_gradients(x: Tensor, grad: Tensor, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """The gradients of the weight, (out, in), and of the bias if there is one."""
    rows = grad.flatten(0, -2)
    return rows.t() @ x.flatten(0, -2), rows.sum(0) if has_bias else None


def _add_gradients(weight: Tensor, bias: Tensor | None, x: Tensor, grad: Tensor) -> None:
    """Add a product's weight gradients to the parameters' own, and report them as autograd does."""
    if not hasattr(weight, "main_grad"):
        for p, g in zip((weight, bias), _weight_gradients(x, grad, bias is not None)):
            if p is not None and g is not None:
                torch.autograd.backward(p, g.view(p.shape))  # adds to .grad, and runs hooks
        return
    rows = grad.flatten(0, -2)
    _add_product(weight.main_grad.flatten(0, -2), rows.t(), x.flatten(0, -2))
    weight.gradient_added(weight)
    if bias is not None:
        bias.main_grad.add_(rows.sum(0, dtype=bias.main_grad.dtype).view(bias.shape))
        bias.gradient_added(bias)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, by the matrix product itself where the device has one that sums in fp32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cpu":
        total.add_(a @ b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    deferred: DeferredGradients | None = None,
    tp: Group | None = None,
    gathered: bool = False,
    shared: bool = False,
) -> Tensor:
    """x W^T + b for a local W (out ..., in) and b (out ...), whose gradients may be deferred.

    tp: over which the input's gradient is summed. gathered: x is this rank's part of the sequence.
    shared: another layer uses W too, so autograd must add the two gradients; they are not deferred.
    A W that has `main_grad` gets its gradient there, and then its `gradient_added` is called.
    """
    if shared or (deferred is None and not hasattr(weight, "main_grad")):
        weight = weight.flatten(0, -2)
        bias = None if bias is None else bias.flatten()
        if tp is None:
            return F.linear(x, weight, bias)
        return _Linear.apply(x, weight, bias, tp, gathered, None, None)
    # Detached, so that the pass for inputs does not reach the weights, nor run their hooks.
    local = weight.detach().flatten(0, -2), None if bias is None else bias.detach().flatten()
    add = functools.partial(_add_gradients, weight, bias)
    return _Linear.apply(x, *local, tp, gathered, add, deferred)


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, factory: ParamFactory, shared: bool = False
) -> Tensor:
    """x W^T + b for a local part (out/tp ..., in) of W; x is (s, b, in), or (s/tp, b, in).

    shared: as in `linear`.
    """
    tp = factory.mesh.tp if factory.mesh.tp.size > 1 else None
    gathered = tp is not None and factory.sequence_parallel
    return linear(x, weight, bias, factory.deferred, tp, gathered, shared)


# ---- Layers --------------------------------------------------------------------------------------


class ColumnLinear(nn.Module):
    """y = x W^T + b with the rows of W split over tp: (s, b, in) -> (s, b, out/tp).

    `shape` is the output's own shape, of which dimension `dim` is split: (kv_heads, ..., head
    size) for q, k and v, (2, f) for gate and up; the output is flat.
    """

    def __init__(
        self,
        factory: ParamFactory,
        name: str,
        inputs: int,
        shape: tuple[int, ...],
        dim: int,
        bias: bool,
    ):
        super().__init__()
        self.factory = factory
        whole = (*shape, inputs)
        self.weight = factory.parameter(
            f"{name}.weight", whole, std=factory.std, dim=dim, decay=True
        )
        self.bias = factory.parameter(f"{name}.bias", shape, dim=dim) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, self.bias, self.factory)


class RowLinear(nn.Module):
    """y = sum over tp of x_i W_i^T, + b: (s, b, in/tp) -> (s, b, out), W's columns split."""

    def __init__(
        self, factory: ParamFactory, name: str, inputs: int, outputs: int, std: float, bias: bool
    ):
        super().__init__()
        self.factory = factory
        shape = (outputs, inputs)
        self.weight = factory.parameter(f"{name}.weight", shape, std=std, dim=1, decay=True)
        self.bias = factory.parameter(f"{name}.bias", (outputs,)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        factory = self.factory
        if factory.mesh.tp.size == 1:
            return linear(x, self.weight, self.bias, factory.deferred)
        y = reduce_from_tp(linear(x, self.weight, None, factory.deferred), factory)
        return y if self.bias is None else y + self.bias
