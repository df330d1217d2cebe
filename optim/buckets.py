"""Buckets: the flat buffers that hold parameters, gradients and masters; a part for each replica.

A bucket holds several parameters, whose gradients are reduced together. Its buffers are cut into
one section for each replica (at --zero 0 one section for all); a rank updates its own section.

    weights    compute precision; the parameters are views of this buffer
    gradients  summed over micro-batches in place, or at --zero 2 this rank's section of the sum
    masters    this rank's section in fp32 (fp64), one flat tensor or whole matrices

A shard is the part of one parameter that is in this rank's section. An update rule
(update_rules.py) holds the optimizer state of the masters, for example Adam's moments. Read zero.py
first: its picture shows when the buffers are reduced, updated and gathered.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from architecture.mup import NO_MUP, Mup
from config.buffer_sizes import BUCKET_ELEMENTS, bucket_elements
from config.schema import Training
from distributed.collectives import Handle
from distributed.mesh import Mesh
from optim import adam8bit, update_rules
from optim.precision import DTYPES
from optim.weight_average import Rule
from parallel import ParamSpec, exact_dtype

# The length of a section is a multiple of this, so that no kernel computes the end of a section
# differently: copies of a parameter at different places of their buffers stay bitwise equal.
ALIGNMENT = 64  # elements


class Key(NamedTuple):
    """The properties that all parameters of a group share.

    reduce_over: the mesh's groups over which gradients are summed (ParamSpec). no_decay: whether
    weight decay does not apply. family: the kind of update rule (update_rules.py). rate, eps: the
    factors of muP for the learning rate and for Adam's epsilon.
    """

    reduce_over: tuple[str, ...]
    no_decay: bool
    family: str
    rate: float = 1.0
    eps: float = 1.0


def key_of(spec: ParamSpec, training: Training, mup: Mup) -> Key:
    """Return the key of a parameter: parameters with equal keys are put into the same buckets."""
    family = update_rules.family(training.optimizer, spec)
    rate = mup.rate(spec.role, training.muon_scale if family == "muon" else "adam")
    eps = mup.eps(spec.role, spec.name.startswith("blocks."))
    return Key(spec.reduce_over, not spec.decay, family, rate, eps)


@dataclass(frozen=True)
class ParamShard:
    """Elements [start, stop) of a local parameter, whose master and state this rank holds.

    The elements are in group.masters[master], from element `offset` on. shape: that of the whole
    local parameter, with padding. copies: number of ranks that hold these elements; copy: this
    rank's number among them.
    """

    group: "ParamGroup"
    spec: ParamSpec
    shape: tuple[int, ...]
    start: int
    stop: int
    master: int
    offset: int
    copies: int
    copy: int

    def read(self, kind: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the local parameter, flat; perhaps a view.

        kind: "weights" for the master weights, or the name of a state tensor, such as "exp_avg".
        """
        first = start - self.start + self.offset  # the place of element `start` in the master
        end = stop - self.start + self.offset
        if kind == "weights":
            return self.group.masters[self.master].view(-1)[first:end]
        index = self.group.first + self.master  # the master's index in the update rule's list
        return self.group.rule.read(kind, index, first, end)

    def write(self, kind: str, start: int, values: Tensor) -> None:
        """Set the local parameter's elements from `start` on to `values`, which is flat.

        kind: "weights", or a state's name. The loader of a checkpoint calls this, then after_load.
        """
        first = start - self.start + self.offset  # the place of element `start` in the master
        if kind == "weights":
            self.group.masters[self.master].view(-1)[first : first + len(values)] = values
        else:
            self.group.rule.write(kind, self.group.first + self.master, first, values)


class ParamGroup(ABC):
    """Parameters whose gradients are reduced together, and this rank's master tensors of them.

    replicas: the ranks over which gradients are reduced first. sharded: whether each replica owns
    other elements. masters: this rank's master tensors, in fp32 or fp64. rule: their update rule,
    which may have masters of other groups too; first: index of masters[0] in the rule's list.
    """

    rule: Rule
    first: int

    def __init__(self, key: Key, mesh: Mesh, sharded: bool):
        """Begin a group of parameters with key `key`; the subclasses add masters and shards."""
        self.key = key
        self.mesh = mesh
        self.sharded = sharded  # whether each replica owns other elements
        self.replicas = mesh.group(key.reduce_over[0])  # the ranks that sum gradients first
        self.masters: list[Tensor] = []
        self.gathering: Handle | None = None  # the all-gather of the weights, if it is running
        self._shard_fields: list[tuple] = []  # for each shard, ParamShard's fields after `group`

    def add_shard(
        self, spec: ParamSpec, shape: tuple[int, ...], start: int, stop: int, place: tuple[int, int]
    ) -> None:
        """Record that this rank owns elements [start, stop) of the parameter that `spec` describes.

        shape: that of the local parameter. place: the index of the master, and the offset in it.
        """
        copies = 1  # the ranks that own these same elements; they share the work of saving them
        copy = 0  # this rank's number among these ranks
        if not self.sharded:  # every replica holds these elements
            copies = self.replicas.size
            copy = self.replicas.rank
        if spec.held_by:  # other tensor ranks hold the same rows
            tensor_ranks = self.mesh.group(spec.held_by)
            copies *= tensor_ranks.size
            copy = copy * tensor_ranks.size + tensor_ranks.rank
        self._shard_fields.append((spec, shape, start, stop, *place, copies, copy))

    @property
    def shards(self) -> list[ParamShard]:
        """The shards that this rank owns, as new objects: if the group kept them, group and shards
        would refer to each other, and only Python's garbage collector could free them.
        """
        return [ParamShard(self, *fields) for fields in self._shard_fields]

    @abstractmethod
    def own_gradients(self) -> list[Tensor]:
        """Return the gradient of every master, flat, in the type of the sum over micro-batches."""

    @abstractmethod
    def clear_gradients(self) -> list[Tensor]:
        """Free the gradients; return the buffers that remain, which the caller fills with zeros."""

    @abstractmethod
    def masters_to_round(self) -> list[tuple[Tensor, Tensor]]:
        """Return pairs (weights, masters): the caller rounds the masters into the weights."""

    @abstractmethod
    def all_gather_params(self) -> None:
        """Start the all-gather of the weights over the replicas; called after an update."""

    def wait_for_weights(self) -> None:
        """Wait until all weights of the group are gathered."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def reduce_further(self) -> None:
        """Sum the owned gradients over the groups after the first in reduce_over: `tp`, `tied`.

        ParamSpec says which parameters need this. Called after the reduction over the replicas, so
        that each rank sends only the elements that it owns.
        """
        if not self.masters:
            return  # no collective: the other ranks of `tp` and `tied` own no elements here either
        further_groups = self.key.reduce_over[1:]
        for name in further_groups:
            group = self.mesh.group(name).at_once
            gradients = self.own_gradients()
            if len(gradients) == 1:
                group.all_reduce(gradients[0]).wait()
                continue
            joined = torch.cat([gradient.flatten() for gradient in gradients])  # for one collective
            group.all_reduce(joined).wait()
            sums = joined.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [s.view(g.shape) for s, g in zip(sums, gradients)])

    def counted_shards(self) -> list[ParamShard]:
        """Return the shards whose gradients this rank adds to the norm; no other rank adds them."""
        if not self.sharded and self.replicas.rank > 0:
            return []  # replica 0 adds these gradients, which all replicas have
        return [shard for shard in self.shards if shard.spec.counts_on(self.mesh)]

    def counted_gradients(self) -> list[Tensor]:
        """Return the gradients of `counted_shards`, flat; the gradient norm is their norm."""
        gradients = self.own_gradients()
        counted = []  # the part of a master's gradient that belongs to the shard
        for shard in self.counted_shards():
            stop = shard.offset + shard.stop - shard.start
            counted.append(gradients[shard.master][shard.offset : stop])
        return counted


class Bucket(ParamGroup):
    """Parameters in flat buffers, and this rank's section of the buffers.

    places: the parameters and their offsets in the buffers. section: the number of elements in this
    rank's section, which begins at element `start`. passes: the number of gradients that each
    micro-batch adds. missing: the number of gradients to be added before the reduction.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        key: Key,
        mesh: Mesh,
        t: Training,
        zero: int,
        dtype: torch.dtype | None = None,
    ):
        """Make a bucket's buffers. parameters: fp32 or fp64. dtype: to compute in, None: theirs."""
        size = mesh.group(key.reduce_over[0]).size
        super().__init__(key, mesh, sharded=zero >= 1 and size > 1)
        starts, total = _lay_out(parameters, key.family, size, self.sharded)
        self.places = list(zip(parameters, starts))  # parameters with their offsets
        self.section = total // size if self.sharded else total  # elements of this rank's section
        self.start = self.replicas.rank * self.section if self.sharded else 0  # its first element
        first = parameters[0]
        exact = exact_dtype(first.dtype)
        self.sum_dtype = DTYPES["bf16"] if t.grad_dtype == "bf16" else exact
        self.weights = first.new_zeros(total, dtype=dtype)
        has_replicas = max(mesh.replicas.size, mesh.expert_replicas.size) > 1  # of any bucket
        # Whether the bucket is reduced after each micro-batch. All buckets do the same, those of
        # experts too: else the ranks of a group could reduce their buckets in different orders.
        self.each_micro_batch = zero == 2 and has_replicas
        if self.each_micro_batch:
            self.gradients = first.new_zeros(self.section, dtype=exact)
        else:
            self.gradients = first.new_zeros(total, dtype=self.sum_dtype)
        # A matrix that is used twice in a micro-batch gets two gradients: its `passes` is 2.
        self.passes = sum(getattr(p, "passes", 1) for p in parameters)
        self.missing = 0  # gradients until the reduction; Optimizer.begin_step sets the number
        self.whole_matrices = key.family == "matrices"

    def adopt(self) -> None:
        """Copy the parameters into the buffers and make them views; make this rank's masters.

        Gradients become views too, except at --zero 2. If the compute precision is that of the
        drawn parameters, the masters are views of the weights themselves.
        """
        section = self._section_of(self.weights)
        cuts = self._cuts()  # (parameter, its offset, start and stop of its part in this section)
        first_parameter, _ = self.places[0]
        self.flat = section  # the masters' memory: the weights themselves in equal precision
        if first_parameter.dtype != section.dtype:  # the masters need a buffer of their own
            self.flat = torch.zeros_like(section, dtype=first_parameter.dtype)
            for p, start, a, b in cuts:
                self.flat[a - self.start : b - self.start] = p.data.view(-1)[a - start : b - start]
        for p, start in self.places:
            view = self.weights[start : start + p.numel()].view(p.shape)
            view.copy_(p.data)
            p.data = view  # frees the drawn tensor
            if self.each_micro_batch:
                continue
            p.main_grad = self.gradients[start : start + p.numel()].view(p.shape)
            if p.dtype == self.gradients.dtype:
                p.grad = p.main_grad  # autograd then adds a gradient to p.grad in place
        self._parts = [slice(0, self.section)]  # each master's part of the section: one master
        if self.whole_matrices:  # one master for each matrix
            self._parts = [slice(a - self.start, b - self.start) for _, _, a, b in cuts]
        for i, (p, start, a, b) in enumerate(cuts):
            place = (i, 0) if self.whole_matrices else (0, a - self.start)
            self.add_shard(p.spec, tuple(p.shape), a - start, b - start, place)
        self.masters = [self.flat[part] for part in self._parts]
        if self.whole_matrices:
            self.masters = [m.view(_flat_shape(s)) for m, s in zip(self.masters, self.shards)]

    def _section_of(self, buffer: Tensor) -> Tensor:
        """Return this rank's section of one of the bucket's flat buffers, as a view."""
        return buffer[self.start : self.start + self.section]

    def _cuts(self) -> list[tuple[nn.Parameter, int, int, int]]:
        """Return (parameter, its offset, start and stop of the overlap) for each parameter that
        overlaps this rank's section. All three numbers count from the bucket's begin: 8 elements
        at offset 12, and this rank's section [0, 16), give (p, 12, 12, 16).

        If the rule needs whole matrices, a parameter with a matrix for each expert has an entry for
        each of them, and padding is left out, because Adafactor's means would include it.
        """
        stop = self.start + self.section
        cuts = []
        for p, offset in self.places:
            size = p.numel()
            matrices = 1
            if self.whole_matrices:
                size = min(size, math.prod(p.spec.shape))
                matrices = p.shape[0] if p.spec.is_expert else 1
            matrix_size = size // matrices
            for matrix_start in range(offset, offset + size, matrix_size):
                cut_start = max(matrix_start, self.start)
                cut_stop = min(matrix_start + matrix_size, stop)
                if cut_start < cut_stop:
                    cuts.append((p, offset, cut_start, cut_stop))
        return cuts

    def own_gradients(self) -> list[Tensor]:
        """Return the summed gradients of this rank's section, one flat tensor for each master."""
        flat = self.gradients if self.each_micro_batch else self._section_of(self.gradients)
        return [flat[part] for part in self._parts]

    def clear_gradients(self) -> list[Tensor]:
        """Return the gradient buffer, which zero.py fills with zeros after a step."""
        return [self.gradients]

    def reduce(self) -> Handle:
        """Start to sum the gradients over the replicas, and return the handle of the collective.

        Called when the gradients of all parameters of the bucket are complete.
        """
        if self.each_micro_batch:
            return self._reduce_micro_batch()
        if self.sharded:
            return self.replicas.reduce_scatter(self._section_of(self.gradients), self.gradients)
        return self.replicas.all_reduce(self.gradients)

    def _reduce_micro_batch(self) -> Handle:
        """Copy the gradients of a micro-batch to one tensor, free them, and start to reduce-scatter
        the tensor; used at --zero 2.
        """
        joined = torch.zeros(self.weights.numel(), dtype=self.sum_dtype, device=self.weights.device)
        gradients = []
        parts = []  # for each gradient, its place in `joined`
        for p, offset in self.places:
            if p.grad is not None:
                gradients.append(p.grad)
                parts.append(joined[offset : offset + p.numel()].view(p.shape))
                p.grad = None
        if gradients:
            torch._foreach_copy_(parts, gradients)
        del gradients  # frees the gradients before the section is allocated
        section = joined.new_empty(self.section)
        handle = self.replicas.reduce_scatter(section, joined)
        return _AddingHandle(handle, section, self.gradients, joined)

    def masters_to_round(self) -> list[tuple[Tensor, Tensor]]:
        """Return one pair: weights and masters of this section; no pair if they are one tensor."""
        if self.flat.dtype == self.weights.dtype:
            return []
        return [(self._section_of(self.weights), self.flat)]

    def all_gather_params(self) -> None:
        """Start the all-gather of the weights' sections, unless every rank has updated all."""
        if self.sharded:
            section = self._section_of(self.weights)
            self.gathering = self.replicas.all_gather(self.weights, section)


class _AddingHandle:
    """A reduce-scatter of one micro-batch's gradients; its wait adds the result to a sum."""

    def __init__(self, handle: Handle, section: Tensor, total: Tensor, source: Tensor):
        """Keep a running reduce-scatter, `handle`, whose result `section` is added to `total`.
        source: its input, which is kept here so that its memory is not freed before the end.
        """
        self.handle = handle
        self.section = section
        self.total = total
        self.source = source

    def wait(self) -> None:
        """Wait for the reduce-scatter; add its result to `total`, the sum of the micro-batches."""
        self.handle.wait()
        self.total.add_(self.section)


def make_buckets(
    parameters: list[nn.Parameter],
    mesh: Mesh,
    training: Training,
    zero: int,
    dtype: torch.dtype,
    least: int | None = None,
    mup: Mup = NO_MUP,
) -> list[Bucket]:
    """Move parameters into buckets, whose parameters have the same key; return the buckets.

    The buckets are in the order in which the backward pass fills them. Each bucket adopts its
    parameters before the next is made, so that memory never holds all drawn parameters and all
    buffers. dtype: compute precision. least: as for bucket_elements. All whole matrices of a key
    are in one bucket, because more matrices balance the sections better. mup: the factors of rates.
    UserError if tp cuts a matrix in a block of 8-bit state.
    """
    parameters_of: dict[Key, list[list[nn.Parameter]]] = {}  # by key, a list for each bucket
    held = sum(p.numel() for p in parameters)
    largest = bucket_elements(held, BUCKET_ELEMENTS, least)  # of a bucket
    for p in reversed(parameters):
        key = key_of(p.spec, training, mup)
        if key.family == "blocks":
            adam8bit.check_blocks(p)
        buckets_of_key = parameters_of.setdefault(key, [[]])
        last_bucket = buckets_of_key[-1]
        would_be_too_large = sum(q.numel() for q in last_bucket) + p.numel() > largest
        if last_bucket and would_be_too_large and key.family != "matrices":
            buckets_of_key.append([p])
        else:
            last_bucket.append(p)
    buckets = []
    for key in sorted(parameters_of):
        for parameters_of_bucket in parameters_of[key]:
            bucket = Bucket(parameters_of_bucket, key, mesh, training, zero, dtype)
            bucket.adopt()
            buckets.append(bucket)
    return buckets


def _lay_out(
    parameters: list[nn.Parameter], family: str, owners: int, sharded: bool
) -> tuple[list[int], int]:
    """Return each parameter's offset in a bucket's buffers, and the buffers' length in elements.

    owners: the number of sections, which divides the length; a section is a multiple of ALIGNMENT.
    Sections may cut parameters, but not the whole matrices of the family "matrices".
    """
    if family == "matrices" and sharded:
        return _lay_out_matrices(parameters, owners)
    # 8-bit state has a scale for each BLOCK elements, and no block may be in two parameters.
    alignment = update_rules.BLOCK if family == "blocks" else 1
    offsets = []
    total = 0
    for p in parameters:
        offsets.append(total)
        total += _round_up(p.numel(), alignment)
    return offsets, _round_up(total, max(ALIGNMENT, alignment) * owners)


def _lay_out_matrices(parameters: list[nn.Parameter], owners: int) -> tuple[list[int], int]:
    """Return each matrix's offset and the buffers' length, such that no section cuts a matrix.

    The largest matrices are placed first, each in the section with the fewest elements so far.
    """
    loads = [0] * owners  # elements in each section so far
    section_of = {}
    offset_of = {}  # by matrix, its offset in its section
    for p in sorted(parameters, key=lambda p: -p.numel()):
        section = loads.index(min(loads))
        section_of[p] = section
        offset_of[p] = loads[section]
        loads[section] += p.numel()
    length = _round_up(max(loads), ALIGNMENT)
    return [section_of[p] * length + offset_of[p] for p in parameters], length * owners


def _round_up(number: int, divisor: int) -> int:
    """Return the smallest multiple of `divisor` that is not below `number`."""
    return -(-number // divisor) * divisor


def _flat_shape(shard: ParamShard) -> tuple[int, ...]:
    """Return a master's shape for a rule of whole matrices: (rows, width), or flat for a vector."""
    size = shard.stop - shard.start
    width = shard.shape[-1]  # of a matrix; weight decay applies to matrices, not to vectors
    return (size // width, width) if shard.spec.decay else (size,)  # decay: a matrix, no vector
