"""Parameters as parts of global tensors, and the layers whose weights are split over tp.

    (s, b, h) -> f -> ColumnLinear -> (s, b, out/tp) -> RowLinear -> g -> (s, b, h)

Activations are (s, b, h): sequence, samples, hidden. With sequence parallelism they are (s/tp, b,
h) before f and after g. f and g are Megatron's (arXiv 1909.08053): f passes its input on and sums
gradients over tp (`_Linear`), g sums outputs over tp (`reduce_from_tp`). For sequence
parallelism see arXiv 2205.05198.
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

from distributed.collectives import Group, gather_sequence, reduce_from_tp
from distributed.mesh import Mesh

# ---- Parameters: drawn by global name and global index, so every layout starts equal -------------


@dataclass(frozen=True)
class ParamSpec:
    """Says which part of which global tensor a local parameter is; it is the parameter's `.spec`.

    name, shape: of the global tensor, without padding. dim: the dimension that is split over tp (or
    over pp and tp, for a vocabulary with --vocab-pp), or None if every tensor rank holds all.
    start, stop: the rows along dim that are held here; further rows of the local tensor are
    padding. decay: whether weight decay applies. reduce_over: the mesh's groups over which the
    gradient is summed: first the replicas, over which ZeRO shards it; then `tp` if each tensor
    rank's gradient is one term of a sum; then `tied` if another stage holds a copy of the tensor.
    copy: this tensor is such a copy, which norms and checkpoints leave out.
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
        """Whether another stage holds a copy of this tensor."""
        return "tied" in self.reduce_over

    @property
    def of_experts(self) -> bool:
        """Whether the tensor has a matrix for each expert, along its first dimension."""
        return self.reduce_over[0] == "expert_replicas"

    def counts_on(self, mesh: Mesh) -> bool:
        """Whether norms count this rank's elements; each counts on one rank of a replica."""
        return not self.copy and (self.dim is not None or mesh.tp.rank == 0)


CPU = torch.device("cpu")


@functools.cache
def compiled(function: Callable) -> Callable:
    """Return `function` by torch.compile: one graph for each shape of its inputs, or an error."""
    return torch.compile(function, dynamic=False, fullgraph=True)


# Elements. For fewer, a kernel of torch.compile saves a GPU less time than its start costs the
# processor beyond the start of torch's own kernels.
COMPILED_FROM = 2**24


def compiled_if_large(function: Callable, elements: int) -> Callable:
    """Return `function`, compiled if the tensors that it reads have many elements."""
    return compiled(function) if elements >= COMPILED_FROM else function


@dataclass(frozen=True)
class ParamFactory:
    """Makes the parameters of every layer, and has the settings that all layers share.

    dtype: the precision of computation. Parameters are drawn in fp32 at least; zero.py keeps the
    drawn values as the master copy and casts the parameters to `dtype`. std: the standard deviation
    of most weights. deferred: takes the linear layers' weight gradients to compute later, if the
    schedule splits the backward pass, else None. shard: at --zero 3, Stage calls it with each
    block after drawing the block's parameters. compile: whether kernels are
    compiled (--compile): by `fused`, and those of large gradients.
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
        """Return `function`, or with --compile a version that is compiled while gradients are on.

        `function` must have no collectives. Evaluation and decoding run it uncompiled: each of
        their shapes would need a compilation.
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
        replicas: str = "replicas",
    ) -> nn.Parameter:
        """Return this rank's part of the tensor `name`: normal with `std`, or constant `fill`.

        dim: the dimension that is split over tp, or over the group `over`, after padding it to
        `padded` rows, which the group's size divides (default: shape[dim]); None: not split.
        partial: each tensor rank's gradient is one term of a sum, for example from its heads.
        replicas: the ranks with the same part. decay, tied and copy: as in ParamSpec, the `.spec`.
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
        if std:  # with std 0 no weights are drawn: they will be loaded
            own = tensor.zero_().narrow(dim or 0, 0, stop - start)
            draw_normal(own, name, shape, dim or 0, start, std, self.seed)
        reduce_over: tuple[str, ...] = (replicas,)
        if (self.sequence_parallel or partial) and dim is None and tp.size > 1:
            reduce_over += ("tp",)
        if tied:
            reduce_over += ("tied",)
        parameter = nn.Parameter(tensor)
        parameter.spec = ParamSpec(name, shape, dim, start, stop, decay, reduce_over, copy)
        return parameter


DRAWN_AT_ONCE = 2**20  # elements on a GPU
DRAWN_ON_CPU = 2**16  # elements on a CPU: temporary tensors fit a core's cache
# Odd 64-bit constants of the splitmix64 generator (Steele, Lea, Flood, OOPSLA 2014), signed.
_GAMMA = -7046029254386353131
_MIX1 = -4658895280553007687
_MIX2 = -7723592293110705685


def draw_normal(
    out: Tensor, name: str, shape: tuple[int, ...], dim: int, start: int, std: float, seed: int
) -> None:
    """Fill `out` with rows `start`, start + 1, ... along `dim` of a normal tensor of shape `shape`.

    Element i of the whole tensor is a function of (seed, name, i) alone: the Box-Muller transform,
    in float64, of the two halves of splitmix64's i-th output. So any slice can be drawn by itself.
    `out` must be contiguous. Temporary tensors take DRAWN_AT_ONCE (on a CPU DRAWN_ON_CPU) x 100
    bytes.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    key = int.from_bytes(digest[:8], "little", signed=True)
    inner = math.prod(shape[dim + 1 :])
    run, flat = out.shape[dim] * inner, out.view(-1)  # run: elements adjacent in the whole too
    at_once = DRAWN_AT_ONCE if out.is_cuda else DRAWN_ON_CPU
    for first in range(0, len(flat), at_once):
        last = min(first + at_once, len(flat))
        places = torch.arange(first, last, device=out.device)
        index = places + places // run * (shape[dim] * inner - run) + start * inner
        flat[first:last] = _normal(splitmix64(index, key)).mul_(std)


def splitmix64(index: Tensor, key: int) -> Tensor:
    """Return outputs number `index`, int64 of any shape, of the generator with the seed `key`."""
    z = (index + 1) * _GAMMA + key
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Return z shifted right with zeros filled in; torch's >> would repeat the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _normal(bits: Tensor) -> Tensor:
    low = bits & 0xFFFFFFFF
    high = _shift(bits, 32)
    radius = ((high.double() + 0.5) * 2.0**-32).log_().mul_(-2.0).sqrt_()
    return radius * (low.double() * (2.0**-32 * 2.0 * torch.pi)).cos_()


# ---- Products with a weight, whose backward may be split -----------------------------------------


class DeferredGradients:
    """Computations of weight gradients that a backward pass puts off until the schedule's pass W.

    In a split schedule (arXiv 2401.10241) a linear layer's backward computes the gradient of its
    input alone (pass B), and adds to this list a function that computes the weights' gradients (W).
    """

    def __init__(self) -> None:
        self._left: list[Callable[[], None]] = []

    def add(self, compute: Callable[[], None]) -> None:
        """Put off `compute`, which will add the gradients of a layer's weights."""
        self._left.append(compute)

    def backward(self, output: Tensor | GradientEdge, grad: Tensor | None) -> Callable[[], None]:
        """Do the backward pass for inputs; return a function that adds the weight gradients."""
        torch.autograd.backward(output, grad)
        left = self._left
        self._left = []

        @torch.no_grad()
        def compute_weight_gradients() -> None:
            while left:
                left.pop(0)()

        return compute_weight_gradients


class _Linear(torch.autograd.Function):
    """f and the product with a local weight; f's backward collective overlaps the weight gradient.

    With sequence parallelism only the local part of the input is kept for the backward pass, which
    gathers it again for the weight gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, tp, gathered, add, deferred):
        """tp: the group that sums the input's gradient, or None. gathered: x is (s/tp, b, in).
        add: called with x and the product's gradient, adds the weights' gradients; None: autograd
        adds those that `backward` returns. deferred: the list that puts `add` off, or None.
        """
        ctx.save_for_backward(x, weight)
        ctx.tp = tp
        ctx.gathered = gathered
        ctx.has_bias = bias is not None
        ctx.add = add
        ctx.deferred = deferred
        return F.linear(gather_sequence(x, tp if gathered else None), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients of x, weight and bias, given that of the product (s, b, out)."""
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
            ctx.deferred.add(lambda: add(gather_sequence(x, gathered), grad))
        elif ctx.add is not None:
            ctx.add(whole, grad)
        else:
            gradients = _weight_gradients(whole, grad, ctx.has_bias)
        if summing is not None:
            summing.wait()
        return dx, *gradients, None, None, None, None


def _weight_gradients(x: Tensor, grad: Tensor, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the weight, (out, in), and of the bias, (out,), or None."""
    rows = grad.flatten(0, -2)
    return rows.t() @ x.flatten(0, -2), rows.sum(0) if has_bias else None


def _add_gradients(
    weight: Tensor, bias: Tensor | None, compile: bool, x: Tensor, grad: Tensor
) -> None:
    """Add the gradients of weight and bias to the parameters, and call the optimizer's hooks.

    compile: sum a large gradient of the bias by a kernel of torch.compile.
    """
    if not hasattr(weight, "main_grad"):
        for p, g in zip((weight, bias), _weight_gradients(x, grad, bias is not None)):
            if p is not None and g is not None:
                torch.autograd.backward(p, g.view(p.shape))  # adds to .grad and runs hooks
        return
    rows = grad.flatten(0, -2)
    add_product(weight.main_grad.flatten(0, -2), rows.t(), x.flatten(0, -2))
    weight.gradient_added(weight)
    if bias is not None:
        add_rows = compiled_if_large(_add_rows, rows.numel()) if compile else _add_rows
        add_rows(bias.main_grad, rows)
        bias.gradient_added(bias)


def _add_rows(total: Tensor, rows: Tensor) -> None:
    """total += the sum of `rows`, (tokens, out), in the precision of `total`, (out ...)."""
    total.add_(rows.sum(0, dtype=total.dtype).view(total.shape))


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b; one kernel does both, except on a CPU if `total` has another dtype than a."""
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
    compile: bool = False,
) -> Tensor:
    """Return x W^T + b, flat as (s, b, out), for a local W (out ..., in) and b (out ...).

    deferred: the list that puts weight gradients off, or None. tp: the group that sums the input's
    gradient, or None. gathered: x is this rank's part of the sequence. shared: another layer uses W
    too, so autograd must add both gradients, and they are not put off. If W has a `main_grad`, its
    gradient is added there, and then its `gradient_added` is called. compile: sum a large
    gradient of b by a kernel of torch.compile.
    """
    if shared or (deferred is None and not hasattr(weight, "main_grad")):
        weight = weight.flatten(0, -2)
        bias = None if bias is None else bias.flatten()
        if tp is None:
            return F.linear(x, weight, bias)
        return _Linear.apply(x, weight, bias, tp, gathered, None, None)
    # Detached: autograd does not see the weights, since `_add_gradients` adds their gradients.
    local = weight.detach().flatten(0, -2), None if bias is None else bias.detach().flatten()
    add = functools.partial(_add_gradients, weight, bias, compile)
    return _Linear.apply(x, *local, tp, gathered, add, deferred)


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, factory: ParamFactory, shared: bool = False
) -> Tensor:
    """Return x W^T + b for this rank's rows (out/tp ..., in) of W; this is f and the product.

    x is (s, b, in), or (s/tp, b, in) with sequence parallelism. shared: as in `linear`.
    """
    tp = factory.mesh.tp if factory.mesh.tp.size > 1 else None
    gathered = tp is not None and factory.sequence_parallel
    return linear(x, weight, bias, factory.deferred, tp, gathered, shared, factory.compile)


# ---- Layers --------------------------------------------------------------------------------------


class ColumnLinear(nn.Module):
    """y = x W^T + b with the rows of W split over tp: (s, b, in) -> (s, b, out/tp).

    shape: of the rows of W, for example (kv_heads, queries + 2, head size) for q, k and v, or
    (2, f) for gate and up; its dimension `dim` is split. The output has them as one dimension.
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
    """y = (sum over tp of x_i W_i^T) + b with W's columns split: (s, b, in/tp) -> (s, b, out)."""

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
            return linear(x, self.weight, self.bias, factory.deferred, compile=factory.compile)
        y = linear(x, self.weight, None, factory.deferred)
        y = reduce_from_tp(y, factory.mesh.tp, factory.sequence_parallel)
        return y if self.bias is None else y + self.bias
