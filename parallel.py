"""Parameters as parts of global tensors, and the layers whose weights are split over tp.

    (s, b, h) -> f -> ColumnLinear -> (s, b, out/tp) -> RowLinear -> g -> (s, b, h)

Activations are (s, b, h): sequence, samples, hidden. With sequence parallelism they are (s/tp, b,
h) before f and after g. f and g are Megatron's (arXiv 1909.08053): f passes its input on and sums
gradients over tp (`ColumnLinearFn`), g sums outputs over tp (`reduce_from_tp`). For sequence
parallelism see arXiv 2205.05198. A parameter may have a `main_grad`: the buffer of optim/buckets.py
in which gradients are summed. Layers add to it themselves and then call `gradient_added`. If the
schedule has passes W, layers put the weight gradients off, from pass B to W: `DeferredGradients`.
"""

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import checkpoint

from architecture.mup import NO_MUP, Mup, role_of
from base.errors import LayoutError
from config.run_options import Training
from distributed.collectives import Group, gather_sequence, reduce_from_tp
from distributed.mesh import Mesh

# recompute(function, *inputs) keeps only the inputs; the backward pass runs the function again, up
# to the last tensor that it needs. No layer draws random numbers, so no generator state is kept.
recompute = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

# The lowest precision of masters, of sums of gradients, of norms and of softmaxes.
LEAST_EXACT = torch.float32


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of what must not be in 16 bits, in a run that computes in `dtype`."""
    return torch.promote_types(dtype, LEAST_EXACT)


# ---- Parameters: drawn by global name and global index, so every layout starts equal -------------

Box: TypeAlias = tuple[tuple[int, int], ...]  # a range [start, stop) along each dimension


@dataclass(frozen=True)
class Matrices:
    """Says how a parameter divides into the matrices that have a meaning of their own.

    Muon updates each of them by itself. A matrix is a box of the global tensor: its last dimension
    has the columns, and all others together have the rows. each: the dimensions of which every
    index is a matrix of its own: experts, gate and up. parts: names and lengths along the dimension
    `dim`, such as those of q, k and v. heads: the dimensions of which every index is a head.
    is_projection: whether all parts are one projection in the files of published models.
    """

    each: tuple[int, ...] = ()
    parts: tuple[tuple[str, int], ...] = ()
    dim: int = 0
    heads: tuple[int, ...] = ()
    is_projection: bool = False

    def boxes(self, shape: tuple[int, ...], mode: str) -> list[tuple[str, Box]]:
        """Return the name, "" for a single matrix, and the box of each matrix of a global tensor.

        mode: the value of muon_qkv. joint: `parts` and `heads` are not divided; projection:
        `parts` are, unless they are one projection; split: `parts` are; head: both are. Raise
        ValueError if the parts are not the whole dimension.
        """
        undivided = mode == "joint" or (mode == "projection" and self.is_projection)
        ranges_of_dims: list[list[tuple[str, tuple[int, int]]]] = []
        for dim, size in enumerate(shape):
            ranges = [("", (0, size))]
            if dim in self.each or (mode == "head" and dim in self.heads):
                ranges = [(str(i), (i, i + 1)) for i in range(size)]
            elif self.parts and dim == self.dim and not undivided:
                ends = list(itertools.accumulate(length for _, length in self.parts))
                if ends[-1] != size:
                    raise ValueError(f"the parts {self.parts} do not add up to {size}, of {shape}")
                ranges = [(n, (end - length, end)) for (n, length), end in zip(self.parts, ends)]
            ranges_of_dims.append(ranges)
        return [
            (".".join(name for name, _ in ranges if name), tuple(box for _, box in ranges))
            for ranges in itertools.product(*ranges_of_dims)
        ]


@dataclass(frozen=True)
class RowsOfRanks:
    """The rows of each tensor rank, where they are not equal parts in the order of the ranks.

    starts: the first row of each tensor rank. count: the rows of each. merged: so many first
    dimensions of the global tensor count as one, whose indices are the rows: 1 or 2. copies: the
    mesh's group of tensor ranks that hold the same rows; "": each rank's are its own.
    Two key/value heads on four ranks: starts (0, 0, 1, 1), count 1, copies of two ranks.
    """

    starts: tuple[int, ...]
    count: int
    merged: int = 1
    copies: str = ""

    def box(self, shape: tuple[int, ...], first: int) -> Box:
        """Return the box that `count` rows from `first` on are of a tensor of this shape."""
        rest = tuple((0, size) for size in shape[self.merged :])
        if self.merged == 1:
            return ((first, first + self.count), *rest)
        index, row = divmod(first, shape[1])
        return ((index, index + 1), (row, row + self.count), *rest)


@dataclass(frozen=True)
class ParamSpec:
    """Says which part of which global tensor a local parameter is: the parameter's `.spec`.

    name, shape: those of the global tensor, without padding. dim: the dimension that is split over
    tp, or None if every tensor rank holds the
    whole tensor. start, stop: the rows along dim that this rank holds; further rows of the local
    tensor are padding. decay: whether weight decay applies. reduce_over: the mesh's groups over
    which the gradient is summed: first the replicas, over which ZeRO shards it; then `tp` if each
    tensor rank's gradient is one term of a sum, or the group of those that hold the same rows; then
    `tied` if another stage holds a copy of the tensor. copy: this tensor is that copy, which norms
    and checkpoints leave out. matrices: how the tensor divides into the matrices that Muon updates;
    None: Muon leaves the tensor to AdamW. role: what the tensor is for muP (architecture/mup.py).
    rows: the rows of all tensor ranks, if they are not equal parts; then several parameters may be
    parts of one global tensor.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    start: int
    stop: int
    decay: bool
    reduce_over: tuple[str, ...] = ("replicas",)
    copy: bool = False
    matrices: Matrices | None = None
    role: str = "vector"
    rows: RowsOfRanks | None = None

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """The global shape in which dim, start and stop count: its merged dimensions are one."""
        if self.rows is None or self.rows.merged == 1:
            return self.shape
        return (math.prod(self.shape[:2]), *self.shape[2:])

    @property
    def held_by(self) -> str:
        """The mesh's group of tensor ranks that hold the same rows; "": this rank alone."""
        if self.dim is None:
            return "tp"
        return "" if self.rows is None else self.rows.copies

    @property
    def tied(self) -> bool:
        """Whether another stage holds a copy: embedding and output matrix may be one tensor."""
        return "tied" in self.reduce_over

    @property
    def is_expert(self) -> bool:
        """Whether the tensor has a matrix for each expert, along its first dimension."""
        return self.reduce_over[0] == "expert_replicas"

    def counts_on(self, mesh: Mesh) -> bool:
        """Return whether this rank counts its elements in norms: one of equal copies is counted."""
        return not self.copy and (not self.held_by or mesh.group(self.held_by).rank == 0)


CPU = torch.device("cpu")


@functools.cache
def compile_kernel(function: Callable, dynamic: bool = False) -> Callable:
    """Return `function`, compiled for each shape of its inputs, or if `dynamic` for all at once."""
    return torch.compile(function, dynamic=dynamic, fullgraph=True)


# The number of elements from which a kernel is compiled. With fewer, a compiled kernel saves a GPU
# less time than its start costs the processor, compared with the start of torch's own kernels.
COMPILED_FROM = 2**24


def compile_if_large(function: Callable, elements: int) -> Callable:
    """Return `function`, compiled if `elements`, the number that it reads, is large."""
    return compile_kernel(function) if elements >= COMPILED_FROM else function


@dataclass
class LossWeight:
    """The factor of a sum over tokens that makes it a term of the loss of the global batch.

    It is the loss scale over the number of targets, which zero.Optimizer.begin_step sets: the
    factor by which the pipeline multiplies the sum of losses before the backward pass. adds_terms:
    False to leave out the terms that layers add, so that gradients are those of the logged loss.
    mtp: for each module of --mtp-depth the factor of its sum of losses beside the next token's: its
    weight, times the targets of the next token over its own, both of the global batch.
    """

    value: float = 0.0
    adds_terms: bool = True
    mtp: tuple[float, ...] = ()


@dataclass(frozen=True)
class ParamFactory:
    """Makes the parameters of every layer, and has the settings that all layers share.

    dtype: the precision of computation. Parameters are drawn in fp32 at least; zero.py keeps the
    drawn values as the master copy and casts the parameters to `dtype`. training: the options that
    layers read, such as the seed. deferred: the list of weight gradients that linear layers compute
    later, if the schedule splits the backward pass, else None. shard: at --zero 3, Stage calls it
    with each block after drawing the block's parameters. compile: the value of --compile.
    loss_weight: for terms that a layer adds to the loss (loss.with_loss). cp_mixer: the value of
    --cp-mixer. mup: the factors of deviations and rates by role.
    """

    mesh: Mesh
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    training: Training = field(default_factory=Training)
    sequence_parallel: bool = False
    deferred: "DeferredGradients | None" = None
    shard: Callable[[nn.Module], None] | None = None
    compile: bool = False
    loss_weight: LossWeight = field(default_factory=LossWeight)
    cp_mixer: str = "states"
    mup: Mup = NO_MUP

    @property
    def std(self) -> float:
        """The standard deviation of most initial weights; 0: none are drawn, they are loaded."""
        return self.training.init_std

    def compile_for_training(self, function: Callable, dynamic: bool = False) -> Callable:
        """Return `function`, or with --compile a version that is compiled while gradients are on.

        `function` must have no collectives. Evaluation and decoding run it uncompiled, because each
        of their shapes would need a compilation. dynamic: the argument of `compile_kernel`.
        """
        if not self.compile:
            return function

        def run(*args):
            kernel = compile_kernel(function, dynamic) if torch.is_grad_enabled() else function
            return kernel(*args)

        return run

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
        matrices: Matrices | None = None,
        role: str | None = None,
        rows: RowsOfRanks | None = None,
    ) -> nn.Parameter:
        """Return this rank's part of the tensor `name`: normal with `std`, or constant `fill`.

        dim: the dimension that is split over tp, or over the group `over`, after padding it to
        `padded` rows, which the group's size divides (default: shape[dim]); None: not split.
        partial: each tensor rank's gradient is one term of a sum, for example from its heads.
        replicas: the name of the mesh's group that holds the same part. decay, tied, copy,
        matrices: see ParamSpec. role: what it is for muP, which scales `std`; None: of a matrix
        hidden, else vector. rows: those of each tensor rank, along dimension 0, in the place of
        equal parts. The result has its ParamSpec as the attribute `spec`. Raise UserError if the
        ranks do not divide the dimension.
        """
        tp = self.mesh.tp
        start = 0
        stop = shape[0]
        local_shape = list(shape)
        if rows is not None:
            dim = 0
            start = rows.starts[tp.rank]
            stop = start + rows.count
            local_shape = [rows.count, *shape[rows.merged :]]
        elif (
            dim is not None
        ):  # 5 rows, padded to 6, on 2 ranks: rows 0 to 2, and 3 to 4 and padding
            group = over or tp
            of_rank, rest = divmod(padded or shape[dim], group.size)
            if rest or of_rank * group.size < shape[dim]:
                raise LayoutError(
                    f"{name}: {group.size} ranks do not divide the {padded or shape[dim]} rows "
                    f"along dimension {dim} of {shape}; `padded` names a larger number of rows"
                )
            start = min(group.rank * of_rank, shape[dim])
            stop = min(start + of_rank, shape[dim])
            local_shape[dim] = of_rank
        reduce_over: tuple[str, ...] = (replicas,)  # the groups that sum the gradient
        gradient_is_a_term = self.sequence_parallel or partial
        if gradient_is_a_term and dim is None and tp.size > 1:
            reduce_over += ("tp",)
        if rows is not None and rows.copies:
            reduce_over += (rows.copies,)
        if tied:
            reduce_over += ("tied",)
        role = role or role_of(decay)
        spec = ParamSpec(
            name, shape, dim, start, stop, decay, reduce_over, copy, matrices, role, rows
        )
        dtype = exact_dtype(self.dtype)
        tensor = torch.full(local_shape, fill, dtype=dtype, device=self.device)
        if std:  # with std 0 no weights are drawn: they will be loaded
            unpadded = tensor.zero_().narrow(dim or 0, 0, stop - start)
            std *= self.mup.std(role)
            draw_normal(unpadded, name, spec.cut_shape, dim or 0, start, std, self.training.seed)
        parameter = nn.Parameter(tensor)
        parameter.spec = spec
        return parameter

    def constant(self, name: str, shape: tuple[int, ...], fill: float = 0.0) -> nn.Parameter:
        """Return a tensor that no gradient updates but checkpoints have, such as a running mean.

        It is equal on all ranks of a stage, and in fp32 (fp64 in an fp64 run). What changes it must
        do the same on all of them.
        """
        tensor = torch.full(shape, fill, dtype=exact_dtype(self.dtype), device=self.device)
        constant = nn.Parameter(tensor, requires_grad=False)
        constant.spec = ParamSpec(name, shape, None, 0, shape[0], decay=False)
        return constant


DRAWN_AT_ONCE = 2**20  # elements that draw_normal draws at once on a GPU
DRAWN_ON_CPU = 2**16  # elements drawn at once on a CPU: the temporary tensors fit into its cache
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
    `out` must be contiguous. Temporary tensors take 100 x DRAWN_AT_ONCE (or DRAWN_ON_CPU) bytes.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    key = int.from_bytes(digest[:8], "little", signed=True)
    row = math.prod(shape[dim + 1 :])  # elements of one row, that is, of one index along dim
    # Columns 2 to 3 of a (3, 4) tensor are 3 runs of 2 elements, with 2 elements between runs.
    run = out.shape[dim] * row  # elements that are adjacent in `out` and in the whole tensor
    other_rows = shape[dim] * row - run  # elements between two runs in the whole tensor
    flat = out.view(-1)
    at_once = DRAWN_AT_ONCE if out.is_cuda else DRAWN_ON_CPU
    for first in range(0, len(flat), at_once):
        stop = min(first + at_once, len(flat))
        local_index = torch.arange(first, stop, device=out.device)
        # The elements' indices in the whole tensor: `other_rows` elements lie between two runs.
        index = local_index + local_index // run * other_rows + start * row
        flat[first:stop] = _to_normal(splitmix64(index, key)).mul_(std)


def splitmix64(index: Tensor, key: int) -> Tensor:
    """Return a generator's outputs number `index`, 64 random bits each; `key` is its seed."""
    z = (index + 1) * _GAMMA + key
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Return z shifted right with zeros filled in; torch's >> would repeat the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _to_normal(bits: Tensor) -> Tensor:
    """Return a standard normal number, float64, from each element's 64 random bits."""
    low = bits & 0xFFFFFFFF
    high = _shift(bits, 32)
    radius = ((high.double() + 0.5) * 2.0**-32).log_().mul_(-2.0).sqrt_()
    return radius * (low.double() * (2.0**-32 * 2.0 * torch.pi)).cos_()


class DeferredGradients:
    """Weight gradients deferred by a backward pass until the schedule's pass W.

    In a split schedule (arXiv 2401.10241) a linear layer's backward computes the gradient of its
    input alone (pass B), and adds to this list a function that computes the weights' gradients (W).
    """

    def __init__(self) -> None:
        self._computations: list[Callable[[], None]] = []

    def add(self, compute: Callable[[], None]) -> None:
        """Defer `compute`, which adds the gradients of a layer's weights; called in pass B."""
        self._computations.append(compute)

    def backward(self, output: Tensor | GradientEdge, grad: Tensor | None) -> Callable[[], None]:
        """Do pass B of a stage: run autograd from `output`, whose gradient is `grad`. Return the
        function that does pass W: it runs what the layers have deferred in this pass B.
        """
        torch.autograd.backward(output, grad)
        computations = self._computations
        self._computations = []

        @torch.no_grad()
        def compute_weight_gradients() -> None:
            while computations:
                compute = computations.pop(0)  # so that its tensors are freed after the call
                compute()

        return compute_weight_gradients


@dataclass(slots=True)
class GradSink:
    """Takes the gradients of a linear layer's weight and bias to the parameters, past autograd.

    weight, bias: the parameters. compile: a compiled kernel sums a large gradient of the bias.
    deferred: the list that puts the gradients off until pass W; None: they are added in pass B.
    rows: those of the weight, (out, in), that the layer multiplies by; None: all.
    """

    weight: Tensor
    bias: Tensor | None
    compile: bool
    deferred: DeferredGradients | None
    rows: slice | None = None

    @property
    def height(self) -> int:
        """The number of rows."""
        if self.rows is None:
            return math.prod(self.weight.shape[:-1])
        return self.rows.stop - self.rows.start

    def add(self, x: Tensor, grad: Tensor) -> None:
        """Add the gradients for the product's input x and gradient `grad`, and call the hooks."""
        _add_gradients(self.weight, self.bias, self.compile, x, grad, self.rows)


class ColumnLinearFn(torch.autograd.Function):
    """f and the product with a local weight; f's backward collective overlaps the weight gradient.

    With sequence parallelism only the local part of the input is kept for the backward pass, which
    gathers it again for the weight gradient.
    """

    @staticmethod
    def forward(ctx, x, tp, gather, sinks, count, *parameters):
        """Return x W^T + b, (s, b, out).

        tp: the group that sums the input's gradient, or None. gather: whether x is (s/tp, b, in)
        and must be gathered. sinks: take the gradients of the parameters; None: autograd does.
        parameters: `count` matrices (out, in), which stand one below the other in W, then the
        biases, one for each of them, or none.
        """
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.tp = tp
        ctx.gather_from = tp if gather else None
        ctx.has_bias = bool(biases)
        ctx.sinks = sinks
        bias = _below(biases) if biases else None
        return F.linear(gather_sequence(x, ctx.gather_from), _below(weights), bias)

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients of x and the parameters; grad: that of the product, (s, b, out)."""
        x, *weights = ctx.saved_tensors
        tp = ctx.tp
        sinks = ctx.sinks
        deferred = None if sinks is None else sinks[0].deferred
        gather_from = ctx.gather_from  # tp if x is this rank's part of the sequence, else None
        whole_x = x
        gather_handle = sum_handle = None
        if gather_from is not None and deferred is None:  # x is split; else pass W gathers it
            whole_x = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])
            gather_handle = tp.all_gather(whole_x, x)  # runs during the product below
        dx = grad @ _below(weights)
        if gather_handle is not None:
            gather_handle.wait()
        if gather_from is not None:
            dx_here = torch.empty_like(x)
            sum_handle = tp.reduce_scatter(dx_here, dx)  # runs during the weight gradient below
            dx = dx_here
        elif tp is not None:  # x was whole on every rank: f's backward pass
            sum_handle = tp.all_reduce(dx)
        rows = [len(weight) for weight in weights]
        found = (None,) * len(rows) * (1 + ctx.has_bias)
        if sinks is None:
            dw, db = _weight_gradients(whole_x, grad, ctx.has_bias)
            found = (*dw.split(rows), *(() if db is None else db.split(rows)))
        elif deferred is None:
            _add_to(sinks, whole_x, grad)
        else:  # pass W computes the weight gradients
            deferred.add(lambda: _add_to(sinks, gather_sequence(x, gather_from), grad))
        if sum_handle is not None:
            sum_handle.wait()
        return dx, None, None, None, None, *found


def _below(parts: Sequence[Tensor]) -> Tensor:
    """Return matrices or biases one below the other, as one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _add_to(sinks: Sequence[GradSink], x: Tensor, grad: Tensor) -> None:
    """Add the gradients for the product's input x and gradient `grad` to the parameters."""
    heights = [sink.height for sink in sinks]
    for sink, of_sink in zip(sinks, grad.split(heights, -1), strict=True):
        sink.add(x, of_sink)


def _weight_gradients(x: Tensor, grad: Tensor, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of weight and bias, or None, for x (s, b, in) and grad (s, b, out)."""
    rows = grad.flatten(0, -2)
    dw = rows.t() @ x.flatten(0, -2)
    return dw, rows.sum(0) if has_bias else None


def _add_gradients(
    weight: Tensor,
    bias: Tensor | None,
    compile: bool,
    x: Tensor,
    grad: Tensor,
    part: slice | None,
) -> None:
    """Add the gradients of weight and bias to the parameters, and call the optimizer's hooks.

    x, grad: the product's input and gradient. compile: a compiled kernel sums grad if it is large.
    part: the rows of the weight, (out, in), of which the product is; None: all.
    """
    if not hasattr(weight, "main_grad"):  # --zero 2, 3: no buffer for a step's gradients
        dw, db = _weight_gradients(x, grad, bias is not None)
        if part is not None:
            dw, of_part = torch.zeros_like(weight).flatten(0, -2), dw
            dw[part] = of_part
        # These backward passes add the gradients to .grad, and run the optimizer's hooks on them.
        torch.autograd.backward(weight, dw.view(weight.shape))
        if bias is not None and db is not None:
            torch.autograd.backward(bias, db.view(bias.shape))
        return
    rows = grad.flatten(0, -2)
    total = weight.main_grad.flatten(0, -2)
    add_product(total if part is None else total[part], rows.t(), x.flatten(0, -2))
    weight.gradient_added(weight)
    if bias is not None:
        add_sum = compile_if_large(_add_sum, rows.numel()) if compile else _add_sum
        add_sum(bias.main_grad, rows)
        bias.gradient_added(bias)


def _add_sum(total: Tensor, rows: Tensor) -> None:
    """Add the sum of `rows`, (tokens, out), to `total`, (out ...), in the precision of `total`."""
    total.add_(rows.sum(0, dtype=total.dtype).view(total.shape))


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product of the matrices a and b to `total`, which may have a higher precision."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cpu":
        total.add_(a @ b)  # a CPU needs a temporary product
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    deferred: DeferredGradients | None = None,
    tp: Group | None = None,
    gather: bool = False,
    shared: bool = False,
    compile: bool = False,
) -> Tensor:
    """Return x W^T + b, (s, b, out), for x (s, b, in) and a local W (out ..., in) and b (out ...).

    The other arguments are those of `joined_linear`.
    """
    biases = [] if bias is None else [bias]
    return joined_linear(x, [weight], biases, deferred, tp, gather, shared, compile)


def joined_linear(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    deferred: DeferredGradients | None,
    tp: Group | None = None,
    gather: bool = False,
    shared: bool = False,
    compile: bool = False,
) -> Tensor:
    """Return x W^T + b, (s, b, out), where W are local matrices one below the other.

    weights: the matrices, (out ..., in) each. biases: one for each of them, (out ...), or none.
    deferred: the list that puts weight gradients off, or None. tp: the group that sums the input's
    gradient, or None. gather: x is this rank's part of the sequence, (s/tp, b, in), and is gathered
    first. shared: another layer uses W too, so autograd must add both gradients, and they are not
    put off. compile: a compiled kernel sums a large gradient of b. If a matrix has a `main_grad`,
    its gradient is added there, and then its `gradient_added` is called.
    """
    if shared or (deferred is None and not hasattr(weights[0], "main_grad")):
        rows = [weight.flatten(0, -2) for weight in weights]
        flat = [bias.flatten() for bias in biases]
        if tp is None:
            return F.linear(x, _below(rows), _below(flat) if flat else None)
        return ColumnLinearFn.apply(x, tp, gather, None, len(rows), *rows, *flat)
    none: list[Tensor | None] = [None] * len(weights)
    pairs = zip(weights, biases or none, strict=True)
    sinks = [GradSink(weight, bias, compile, deferred) for weight, bias in pairs]
    # Autograd must not see the parameters: the sinks add their gradients instead.
    rows = [weight.detach().flatten(0, -2) for weight in weights]
    flat = [bias.detach().flatten() for bias in biases]
    return ColumnLinearFn.apply(x, tp, gather, sinks, len(rows), *rows, *flat)


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, factory: ParamFactory, shared: bool = False
) -> Tensor:
    """Return x W^T + b, (s, b, out/tp), for this rank's rows (out/tp ..., in) of W; f included.

    x is (s, b, in), or (s/tp, b, in) with sequence parallelism. shared: another layer uses W too.
    """
    tp, gather = _f(factory)
    return linear(x, weight, bias, factory.deferred, tp, gather, shared, factory.compile)


def joined_column_linear(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], factory: ParamFactory
) -> Tensor:
    """Return `column_linear` of matrices that stand one below the other, in one product.

    weights: this rank's, (out ..., in) each. biases: one for each of them, or none.
    """
    tp, gather = _f(factory)
    deferred, compile = factory.deferred, factory.compile
    return joined_linear(x, weights, biases, deferred, tp, gather, compile=compile)


def linear_by_part(x: Tensor, weight: Tensor, group: Group, factory: ParamFactory) -> Tensor:
    """Return the product of x, (s, b, in), with the group rank's part of W's rows: (s, b, out/n).

    weight: this tensor rank's W, (out ..., in), whose rows the n ranks of `group` divide. Only this
    part gets a gradient here, so the ranks' gradients must be summed. x is whole on every rank, and
    its gradient is not summed.
    """
    rows = math.prod(weight.shape[:-1]) // group.size
    part = slice(group.rank * rows, (group.rank + 1) * rows)
    if factory.deferred is None and not hasattr(weight, "main_grad"):
        return F.linear(x, weight.flatten(0, -2)[part])
    sinks = [GradSink(weight, None, factory.compile, factory.deferred, part)]
    matrix = weight.detach().flatten(0, -2)[part]
    return ColumnLinearFn.apply(x, None, False, sinks, 1, matrix)


def _f(factory: ParamFactory) -> tuple[Group | None, bool]:
    """Return what f needs: the group that sums gradients, and whether the input is gathered."""
    tp = factory.mesh.tp if factory.mesh.tp.size > 1 else None
    return tp, tp is not None and factory.sequence_parallel


class ColumnLinear(nn.Module):
    """y = x W^T + b with the rows of W split over tp: (s, b, in) -> (s, b, out/tp).

    W is (*shape, inputs), split along its dimension `dim`. `shape` is, for example, (2, f) for gate
    and up, or (kv_heads, queries + 2, head size) for q, k and v; y has it as one dimension.
    """

    def __init__(
        self,
        factory: ParamFactory,
        name: str,
        inputs: int,
        shape: tuple[int, ...],
        dim: int,
        bias: bool,
        matrices: Matrices = Matrices(),
        role: str = "hidden",
    ):
        """Make W, (*shape, inputs), split along `dim`, and b if `bias`; name: begins the names.

        matrices: how W divides into matrices (Matrices); by default it is a single one. role: of W.
        """
        super().__init__()
        self.factory = factory
        self.weight = factory.parameter(
            f"{name}.weight",
            (*shape, inputs),
            std=factory.std,
            dim=dim,
            decay=True,
            matrices=matrices,
            role=role,
        )
        self.bias = factory.parameter(f"{name}.bias", shape, dim=dim) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's columns of y = x W^T + b: (s, b, out/tp)."""
        return column_linear(x, self.weight, self.bias, self.factory)


class RowLinear(nn.Module):
    """y = (sum over tp of x_i W_i^T) + b with W's columns split: (s, b, in/tp) -> (s, b, out)."""

    def __init__(
        self, factory: ParamFactory, name: str, inputs: int, outputs: int, std: float, bias: bool
    ):
        """Make W, whose columns are split, and the whole b. std: W's standard deviation."""
        super().__init__()
        self.factory = factory
        input_dim = 1  # the dimension of the weight that is split over tp
        shape = (outputs, inputs)
        self.weight = factory.parameter(
            f"{name}.weight", shape, std=std, dim=input_dim, decay=True, matrices=Matrices()
        )
        self.bias = factory.parameter(f"{name}.bias", (outputs,)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return (sum over tp of x_i W_i^T) + b: (s, b, out), or (s/tp, b, out) if s is split."""
        factory = self.factory
        if factory.mesh.tp.size == 1:
            return linear(x, self.weight, self.bias, factory.deferred, compile=factory.compile)
        y = linear(x, self.weight, None, factory.deferred)
        y = reduce_from_tp(y, factory.mesh.tp, factory.sequence_parallel)
        return y if self.bias is None else y + self.bias
