"""Buckets: the flat buffers in which parameters, gradients and masters lie, and who owns what.

A bucket is a run of parameters that are reduced together. Its buffers are cut into one piece for
every data replica (one for all at --zero 0); the owner of a piece updates it.

    weights    compute precision; the parameters are views of it
    gradients  summed over micro-batches in place, or at --zero 2 this rank's piece of the sum
    masters    this rank's piece in fp32 (fp64), flat or as whole matrices
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from config.messages import UserError
from config.schema import BUCKET_ELEMENTS, Training
from distributed.collectives import Group, Handle
from distributed.mesh import Mesh
from optim import update_rules
from parallel import ParamSpec

# Pieces are multiples of this, so that no kernel treats the end of a piece in another way than
# its middle: copies of a parameter that lie elsewhere in their buffer stay bitwise equal.
ALIGNMENT = 64


@dataclass(frozen=True)
class Segment:
    """Where a parameter lies in a bucket: elements [start, stop) of its flat buffers."""

    parameter: nn.Parameter
    start: int
    stop: int


@dataclass(frozen=True)
class Own:
    """Elements [start, stop) of a local parameter that this rank updates, and where they lie:
    from `offset` on in the shard's master tensor number `master`.

    shape: of the whole local parameter, padding included.
    """

    spec: ParamSpec
    shape: tuple[int, ...]
    start: int
    stop: int
    master: int
    offset: int


class Shard:
    """Parameters that are reduced and updated together, as this rank owns them.

    masters: the tensors that the rule updates. sharded: whether the other data replicas own
    other elements. also_over: the group over which gradients must be summed too, or None.
    """

    key: "Key"
    masters: list[Tensor]
    own: list[Own]
    rule: update_rules.Rule
    sharded: bool
    also_over: Group | None

    def gradients_of_own(self) -> list[Tensor]:
        """The gradient of every master, flat, in the type that it was summed in."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget the gradients."""
        raise NotImplementedError

    def all_gather_params(self) -> Handle | None:
        """Begin to make the weights of every data replica from the masters."""
        raise NotImplementedError

    def update(self, factor: float, lr: float) -> None:
        """One step by the gradients times `factor`."""
        gradients = []
        for master, gradient in zip(self.masters, self.gradients_of_own()):
            gradient = gradient.to(master.dtype)
            gradients.append((gradient.mul_(factor) if factor != 1.0 else gradient).view_as(master))
        self.rule.update(gradients, lr)


class Bucket(Shard):
    """A run of parameters in flat buffers, and this rank's piece of it."""

    def __init__(self, parameters: list[nn.Parameter], key: "Key", mesh: Mesh, t: Training, zero):
        self.key, self.dp, self.sharded = key, mesh.dp, zero >= 1 and mesh.dp.size > 1
        self.also_over = {"": None, "partial": mesh.tp, "tied": mesh.tied}[key.also]
        places, total = _lay_out(parameters, key.family, mesh.dp.size, self.sharded)
        self.segments = [Segment(p, a, a + p.numel()) for p, a in zip(parameters, places)]
        self.piece = total // self.dp.size if self.sharded else total
        self.start = self.dp.rank * self.piece if self.sharded else 0
        first = parameters[0]
        exact = torch.promote_types(first.dtype, torch.float32)
        self.sum_dtype = torch.bfloat16 if t.grad_dtype == "bf16" else exact
        self.weights = torch.zeros(total, dtype=first.dtype, device=first.device)
        self.each_micro_batch = zero == 2 and self.sharded
        size, dtype = (self.piece, exact) if self.each_micro_batch else (total, self.sum_dtype)
        self.gradients = torch.zeros(size, dtype=dtype, device=first.device)
        self.waiting = 0  # gradients still to come in this backward pass
        self.whole_matrices = key.family == "matrices"

    def adopt_weights(self) -> None:
        """Make the parameters, and their gradients where all are kept, views of the buffers."""
        for s in self.segments:
            p = s.parameter
            view = self.weights[s.start : s.stop].view(p.shape)
            view.copy_(p.data)
            p.data = view
            if self.each_micro_batch:
                continue
            p.main_grad = self.gradients[s.start : s.stop].view(p.shape)
            if p.dtype == self.gradients.dtype:
                p.grad = p.main_grad  # autograd adds to it in place

    def adopt_masters(self, drawn: dict[nn.Parameter, Tensor] | None) -> None:
        """Make the masters: the weights themselves where these are precise enough, else `drawn`."""
        flat = self._piece_of(self.weights)
        cuts = self._cuts()
        if drawn is not None:
            flat = flat.to(torch.float32)
            for s, a, b in cuts:
                exact = drawn[s.parameter].view(-1)[a - s.start : b - s.start]
                flat[a - self.start : b - self.start] = exact
        self.flat, self.masters, self.own = flat, [], []
        self._parts = [slice(0, self.piece)]
        if self.whole_matrices:
            self._parts = [slice(a - self.start, b - self.start) for _, a, b in cuts]
        for i, (s, a, b) in enumerate(cuts):
            p = s.parameter
            place = (i, 0) if self.whole_matrices else (0, a - self.start)
            self.own.append(Own(p.spec, tuple(p.shape), a - s.start, b - s.start, *place))
        self.masters = [flat[part] for part in self._parts]
        if self.whole_matrices:
            self.masters = [m.view(_flat_shape(o)) for m, o in zip(self.masters, self.own)]

    def _piece_of(self, buffer: Tensor) -> Tensor:
        """This rank's piece of a flat buffer of the bucket."""
        return buffer[self.start : self.start + self.piece]

    def _cuts(self) -> list[tuple[Segment, int, int]]:
        """Segments that overlap this rank's piece, with the overlap's borders in the bucket."""
        stop = self.start + self.piece
        cuts = [(s, max(s.start, self.start), min(s.stop, stop)) for s in self.segments]
        return [(s, a, b) for s, a, b in cuts if a < b]

    def gradients_of_own(self) -> list[Tensor]:
        """Summed gradients of this rank's piece, one flat tensor for each of `own`."""
        flat = self.gradients if self.each_micro_batch else self._piece_of(self.gradients)
        return [flat[part] for part in self._parts]

    def clear(self) -> None:
        """Zero the gradients, before the first micro-batch."""
        self.gradients.zero_()

    def reduce(self) -> Handle:
        """Start summing the gradients over the data replicas."""
        if self.each_micro_batch:
            return self._reduce_micro_batch()
        if self.sharded:
            return self.dp.reduce_scatter(self._piece_of(self.gradients), self.gradients)
        return self.dp.all_reduce(self.gradients)

    def _reduce_micro_batch(self) -> Handle:
        """Collect this micro-batch's gradients, let go of them, and add the sum to the piece."""
        whole = torch.zeros(self.weights.numel(), dtype=self.sum_dtype, device=self.weights.device)
        for s in self.segments:
            whole[s.start : s.stop] = s.parameter.grad.view(-1)
            s.parameter.grad = None
        piece = whole.new_empty(self.piece)
        return _Adding(self.dp.reduce_scatter(piece, whole), piece, self.gradients, whole)

    def all_gather_params(self) -> Handle | None:
        """Write the updated masters into the weights, and start gathering them if sharded."""
        if self.flat.dtype != self.weights.dtype:
            self._piece_of(self.weights).copy_(self.flat)
        if not self.sharded:
            return None
        return self.dp.all_gather(self.weights, self._piece_of(self.weights))


class _Adding:
    """The handle of a reduce-scatter whose result is added to a sum."""

    def __init__(self, handle: Handle, piece: Tensor, total: Tensor, source: Tensor):
        self.handle, self.piece, self.total, self.source = handle, piece, total, source

    def wait(self) -> None:
        self.handle.wait()
        self.total.add_(self.piece)
        self.piece = self.source = None


# ------------------------------------------------------------------------------------------------
# Which parameters go together, and where they lie
# ------------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """What the parameters of a bucket have in common.

    also: "tied" or "partial" if their gradients must be summed over more than the replicas.
    """

    also: str
    no_decay: bool
    family: str


def key_of(spec: ParamSpec, optimizer: str) -> Key:
    """The key of a parameter under an --optimizer."""
    also = "tied" if spec.tied else "partial" if spec.partial else ""
    return Key(also, not spec.decay, update_rules.family(optimizer, spec))


def make_buckets(
    parameters: list[nn.Parameter], mesh: Mesh, training: Training, zero: int
) -> list[Bucket]:
    """Buckets of one key each, in the order in which the backward pass fills them.

    Whole matrices of one key are one bucket: the more there are, the better they are balanced.
    """
    runs: dict[Key, list[list[nn.Parameter]]] = {}
    for p in reversed(parameters):
        key = key_of(p.spec, training.optimizer)
        if key.family == "blocks":
            _check_blocks(p)
        of_key = runs.setdefault(key, [[]])
        full = sum(q.numel() for q in of_key[-1]) >= BUCKET_ELEMENTS
        if full and key.family != "matrices":
            of_key.append([])
        of_key[-1].append(p)
    buckets = []
    for key in sorted(runs):
        for run in runs[key]:
            bucket = Bucket(run, key, mesh, training, zero)
            buckets.append(bucket)
    return buckets


def _lay_out(
    parameters: list[nn.Parameter], family: str, dp: int, sharded: bool
) -> tuple[list[int], int]:
    """Where each parameter begins in a bucket's buffers, and their length, a multiple of dp.

    Flat pieces are equal whatever the borders. Whole matrices are spread over dp sections, the
    largest first, each to the section that has least.
    """
    if family == "matrices" and sharded:
        return _sections(parameters, dp)
    step = update_rules.BLOCK if family == "blocks" else 1
    places, total = [], 0
    for p in parameters:
        places.append(total)
        total += -(-p.numel() // step) * step
    share = max(ALIGNMENT, step) * dp
    return places, -(-total // share) * share


def _sections(parameters: list[nn.Parameter], dp: int) -> tuple[list[int], int]:
    loads, found = [0] * dp, {}
    for p in sorted(parameters, key=lambda p: -p.numel()):
        section = loads.index(min(loads))
        found[p] = (section, loads[section])
        loads[section] += p.numel()
    length = -(-max(loads) // ALIGNMENT) * ALIGNMENT
    return [found[p][0] * length + found[p][1] for p in parameters], length * dp


def _check_blocks(p: nn.Parameter) -> None:
    """UserError if tensor parallelism cuts a matrix inside the blocks of 8-bit state."""
    spec, block = p.spec, update_rules.BLOCK
    if spec.dim is None:
        return
    run = math.prod(p.shape[spec.dim :])
    if run % block and p.shape[spec.dim] < spec.shape[spec.dim]:
        raise UserError(
            f"--optimizer adamw8bit: tp cuts {spec.name} {spec.shape} into runs of {run} weights, "
            f"which is no multiple of its blocks of {block}; use a smaller --tp"
        )


def _flat_shape(own: Own) -> tuple[int, ...]:
    """The shape in which a rule sees a whole parameter: a matrix, or a vector."""
    rows = math.prod(own.shape[:-1])
    return (rows, own.shape[-1]) if own.spec.decay else (rows * own.shape[-1],)
