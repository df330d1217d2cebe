"""Buckets: the flat buffers that hold parameters, gradients and masters, and who owns which part.

A bucket holds several parameters, whose gradients are reduced together. Its buffers are cut into
one section for each replica (at --zero 0 one section for all); a rank updates its own section.

    weights    compute precision; the parameters are views of this buffer
    gradients  summed over micro-batches in place, or at --zero 2 this rank's section of the sum
    masters    this rank's section in fp32 (fp64), one flat tensor or whole matrices

Read zero.py first: its picture shows when the buffers are reduced, updated and gathered.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from config.schema import BUCKET_ELEMENTS, Training, bucket_elements
from distributed.collectives import Handle
from distributed.mesh import Mesh
from optim import update_rules
from parallel import ParamSpec

# The length of a section is a multiple of this, so that no kernel computes the end of a section
# differently: copies of a parameter at different places of their buffers stay bitwise equal.
ALIGNMENT = 64  # elements
SETS_OF_KEY = 4  # most update sets of a key: with more, the first weights are gathered sooner


class Key(NamedTuple):
    """The properties that all parameters of a group share.

    reduce_over: as in ParamSpec. family: the kind of update rule, see update_rules.py.
    """

    reduce_over: tuple[str, ...]
    no_decay: bool
    family: str


def key_of(spec: ParamSpec, optimizer: str) -> Key:
    """Return the key of the parameter that `spec` describes, for a value of --optimizer."""
    return Key(spec.reduce_over, not spec.decay, update_rules.family(optimizer, spec))


@dataclass(frozen=True)
class ParamShard:
    """Elements [start, stop) of a local parameter, whose master and state this rank holds.

    They are in group.masters[master], from element `offset` on. shape: of the whole local
    parameter, padding included. copies: number of ranks that hold these elements; copy: this rank's
    number among them.
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
        """Return elements [start, stop) of the local parameter's masters (kind "weights") or of
        one of its state tensors (kind as in state_kinds); flat, perhaps a view.
        """
        a = start - self.start + self.offset
        if kind == "weights":
            return self.group.masters[self.master].view(-1)[a : a + stop - start]
        index = self.group.first + self.master
        return self.group.rule.read(kind, index, a, a + stop - start)

    def write(self, kind: str, start: int, values: Tensor) -> None:
        """Set elements of this shard from `start` on; `Optimizer.after_load` must follow."""
        a = start - self.start + self.offset
        if kind == "weights":
            self.group.masters[self.master].view(-1)[a : a + len(values)] = values
        else:
            self.group.rule.write(kind, self.group.first + self.master, a, values)


class ParamGroup(ABC):
    """Parameters that are reduced together, and the master tensors that this rank owns of them.

    replicas: ranks over which gradients are reduced first. sharded: whether each replica owns other
    elements. masters: this rank's master tensors, in fp32 or fp64. rule: their update rule, which
    may have masters of other groups too; first: index of masters[0] in the rule's list.
    """

    rule: update_rules.UpdateRule
    first: int

    def __init__(self, key: Key, mesh: Mesh, sharded: bool):
        self.key, self.mesh, self.sharded = key, mesh, sharded
        self.replicas = mesh.group(key.reduce_over[0])
        self.masters: list[Tensor] = []
        self.gathering: Handle | None = None  # the all-gather of the weights, if it is running
        self._owned: list[tuple] = []

    def add_shard(
        self, spec: ParamSpec, shape: tuple[int, ...], start: int, stop: int, place: tuple[int, int]
    ) -> None:
        """Record that this rank owns elements [start, stop); place: master index and offset."""
        copies, copy = (1, 0) if self.sharded else (self.replicas.size, self.replicas.rank)
        if spec.dim is None:
            tp = self.mesh.tp
            copies, copy = copies * tp.size, copy * tp.size + tp.rank
        self._owned.append((spec, shape, start, stop, *place, copies, copy))

    @property
    def shards(self) -> list[ParamShard]:
        """Return the shards that this rank owns, as new objects: if the group kept them, group and
        shards would refer to each other, and only Python's garbage collector could free them.
        """
        return [ParamShard(self, *fields) for fields in self._owned]

    @abstractmethod
    def own_gradients(self) -> list[Tensor]:
        """Return the gradient of every master, flat, in the type of the sum over micro-batches."""

    @abstractmethod
    def clear_gradients(self) -> list[Tensor]:
        """Free the gradients; return the buffers that remain, which the caller fills with zeros."""

    @abstractmethod
    def masters_to_round(self) -> list[tuple[Tensor, Tensor]]:
        """Return pairs (weights, masters) of this rank whose weights are rounded masters."""

    @abstractmethod
    def all_gather_params(self) -> None:
        """Start the all-gather of the weights over the replicas; called after an update."""

    def wait_for_weights(self) -> None:
        """Wait until all weights of the group are gathered."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def reduce_further(self) -> None:
        """Sum the owned gradients over reduce_over[1:], the groups with tied copies or with terms.

        Called after the reduction over the replicas: each owner then sends only its own elements.
        """
        # A rank without masters skips the call: the other ranks of the group have none here either.
        for name in self.key.reduce_over[1:] if self.masters else ():
            tensors = self.own_gradients()  # summed by one collective
            joined = torch.cat([t.flatten() for t in tensors]) if len(tensors) > 1 else tensors[0]
            self.mesh.group(name).at_once.all_reduce(joined).wait()
            if len(tensors) > 1:
                sums = joined.split([t.numel() for t in tensors])
                torch._foreach_copy_(tensors, [s.view(t.shape) for s, t in zip(sums, tensors)])

    def counted_shards(self) -> list[ParamShard]:
        """Return the shards whose gradients this rank adds to the norm; no other rank adds them."""
        if not self.sharded and self.replicas.rank > 0:
            return []  # every replica has the same gradients
        return [shard for shard in self.shards if shard.spec.counts_on(self.mesh)]

    def counted_gradients(self) -> list[Tensor]:
        """Return the gradients of `counted_shards`, flat."""
        gradients = self.own_gradients()
        counted = []
        for shard in self.counted_shards():
            stop = shard.offset + shard.stop - shard.start
            counted.append(gradients[shard.master][shard.offset : stop])
        return counted


class Bucket(ParamGroup):
    """Parameters in flat buffers (places: parameters and offsets), and this rank's section."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        key: Key,
        mesh: Mesh,
        t: Training,
        zero: int,
        dtype: torch.dtype | None = None,
    ):
        """parameters: in fp32 or fp64. dtype: compute precision, default: the parameters' dtype."""
        size = mesh.group(key.reduce_over[0]).size
        super().__init__(key, mesh, sharded=zero >= 1 and size > 1)
        starts, total = _lay_out(parameters, key.family, size, self.sharded)
        self.places = list(zip(parameters, starts))
        self.section = total // size if self.sharded else total
        self.start = self.replicas.rank * self.section if self.sharded else 0
        first = parameters[0]
        exact = torch.promote_types(first.dtype, torch.float32)
        self.sum_dtype = torch.bfloat16 if t.grad_dtype == "bf16" else exact
        self.weights = first.new_zeros(total, dtype=dtype)
        several = max(mesh.replicas.size, mesh.expert_replicas.size) > 1
        self.each_micro_batch = zero == 2 and several  # all buckets equally often, in one order
        count, kind = (self.section, exact) if self.each_micro_batch else (total, self.sum_dtype)
        self.gradients = first.new_zeros(count, dtype=kind)
        # Gradients that each micro-batch adds, and gradients still to be added before `reduce`.
        self.passes, self.missing = sum(getattr(p, "passes", 1) for p in parameters), 0
        self.whole_matrices = key.family == "matrices"

    def adopt(self) -> None:
        """Copy the parameters into the buffers and make them views; make this rank's masters.

        Gradients become views too, except at --zero 2. If the compute precision is that of the
        drawn parameters, the masters are views of the weights themselves.
        """
        own = self._section_of(self.weights)
        cuts = self._cuts()
        exact = self.places[0][0].dtype == own.dtype
        self.flat = own if exact else torch.zeros_like(own, dtype=self.places[0][0].dtype)
        for p, start, a, b in () if exact else cuts:
            self.flat[a - self.start : b - self.start] = p.data.view(-1)[a - start : b - start]
        for p, start in self.places:
            view = self.weights[start : start + p.numel()].view(p.shape)
            view.copy_(p.data)
            p.data = view  # frees the drawn tensor
            if self.each_micro_batch:
                continue
            p.main_grad = self.gradients[start : start + p.numel()].view(p.shape)
            if p.dtype == self.gradients.dtype:
                p.grad = p.main_grad  # autograd adds to it in place
        self._parts = [slice(0, self.section)]
        if self.whole_matrices:
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
        overlaps this rank's section; all offsets in the bucket. Whole matrices come one by one,
        each expert's too, and without padding, which Adafactor's means over one would include.
        """
        stop = self.start + self.section
        cuts = []
        for p, at in self.places:
            size = p.numel()
            matrices = 1
            if self.whole_matrices:
                size = min(size, math.prod(p.spec.shape))
                matrices = p.shape[0] if p.spec.of_experts else 1
            each = size // matrices
            for a in range(at, at + size, each):
                cuts.append((p, at, max(a, self.start), min(a + each, stop)))
        return [cut for cut in cuts if cut[2] < cut[3]]

    def own_gradients(self) -> list[Tensor]:
        """Return the summed gradients of this rank's section, one flat tensor for each master."""
        flat = self.gradients if self.each_micro_batch else self._section_of(self.gradients)
        return [flat[part] for part in self._parts]

    def clear_gradients(self) -> list[Tensor]:
        """Return the gradient buffer: the whole bucket's, or at --zero 2 this rank's section."""
        return [self.gradients]

    def reduce(self) -> Handle:
        """Start to sum the gradients over the replicas; called when all of them are complete."""
        if self.each_micro_batch:
            return self._reduce_micro_batch()
        if self.sharded:
            return self.replicas.reduce_scatter(self._section_of(self.gradients), self.gradients)
        return self.replicas.all_reduce(self.gradients)

    def _reduce_micro_batch(self) -> Handle:
        """Copy the gradients to one tensor, free them, start to reduce-scatter it (--zero 2)."""
        whole = torch.zeros(self.weights.numel(), dtype=self.sum_dtype, device=self.weights.device)
        found = [(at, p.grad) for p, at in self.places if p.grad is not None]
        if found:
            parts = [whole[at : at + grad.numel()].view(grad.shape) for at, grad in found]
            torch._foreach_copy_(parts, [grad for _, grad in found])
        for p, _ in self.places:
            p.grad = None
        del found  # frees the gradients before the section is allocated
        section = whole.new_empty(self.section)
        handle = self.replicas.reduce_scatter(section, whole)
        return _AddingHandle(handle, section, self.gradients, whole)

    def masters_to_round(self) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's section of the weights and its masters; none if they are the same."""
        exact = self.flat.dtype == self.weights.dtype
        return [] if exact else [(self._section_of(self.weights), self.flat)]

    def all_gather_params(self) -> None:
        """Start the all-gather of the sections of the weights, if they are sharded."""
        own = self._section_of(self.weights)
        self.gathering = self.replicas.all_gather(self.weights, own) if self.sharded else None


class _AddingHandle:
    """A reduce-scatter whose wait adds the result to a sum; it keeps `source` alive until then."""

    def __init__(self, handle: Handle, section: Tensor, total: Tensor, source: Tensor):
        self.handle = handle
        self.section = section
        self.total = total
        self.source = source

    def wait(self) -> None:
        self.handle.wait()
        self.total.add_(self.section)


# ---- The update ----------------------------------------------------------------------------------


class UpdateSet:
    """Groups whose masters one rule updates together, with as many kernels as for one group.

    masters: the masters of all groups, in order; rule: the update rule that was made with them.
    """

    def __init__(self, groups: list[ParamGroup], training: Training):
        """All groups have one key. Raise UserError if the optimizer's package is missing."""
        self.groups = groups
        key = groups[0].key
        self.masters: list[Tensor] = []
        for group in groups:
            group.first = len(self.masters)
            self.masters += group.masters
        self.rule = update_rules.make_rule(training, key.family, self.masters, not key.no_decay)
        for group in groups:
            group.rule = self.rule

    def update(self, factor: float, lr: float) -> None:
        """Update the masters by the gradients times `factor`, and start to gather the weights."""
        gradients = [g for group in self.groups for g in group.own_gradients()]
        if gradients and gradients[0].dtype != self.masters[0].dtype:
            exact = [torch.empty_like(g, dtype=self.masters[0].dtype) for g in gradients]
            torch._foreach_copy_(exact, gradients)
            gradients = exact
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        self.rule.update([g.view_as(m) for g, m in zip(gradients, self.masters)], lr)
        gather_weights(self.groups)


def gather_weights(groups: Sequence[ParamGroup]) -> None:
    """Round the masters of the groups to weights, and start the all-gather of the weights."""
    pairs = [pair for group in groups for pair in group.masters_to_round()]
    if pairs:
        weights, masters = zip(*pairs)
        torch._foreach_copy_(weights, masters)
    for group in groups:
        group.all_gather_params()


def make_update_sets(groups: Sequence[ParamGroup], training: Training) -> list[UpdateSet]:
    """Return the update sets, the first layers first: the forward pass needs their weights first.

    A key has up to SETS_OF_KEY sets: the weights of a set are gathered while the next is updated.
    With --grad-dtype bf16 a set is about as large as a bucket: its gradients are copied to fp32.
    """
    sets: list[UpdateSet] = []
    for _, of_key in groupby(reversed(groups), key=lambda group: group.key):
        members = list(of_key)
        most = -(-sum(map(_master_elements, members)) // SETS_OF_KEY)
        if training.grad_dtype == "bf16":
            most = min(most, BUCKET_ELEMENTS)
        runs: dict[int, list[ParamGroup]] = {}
        before = 0
        for group in members:
            runs.setdefault(before // max(1, most), []).append(group)
            before += _master_elements(group)
        sets += [UpdateSet(run, training) for run in runs.values()]
    return sets


def _master_elements(group: ParamGroup) -> int:
    return sum(master.numel() for master in group.masters)


# ---- Which parameters go together, and where they are placed -------------------------------------


def make_buckets(
    parameters: list[nn.Parameter], mesh: Mesh, training: Training, zero: int, dtype: torch.dtype
) -> list[Bucket]:
    """Return buckets of one key each, in the order in which the backward pass fills them.

    Each bucket adopts its parameters before the next is made, so that memory never holds all drawn
    parameters and all buffers at once. dtype: compute precision. All whole matrices of a key are in
    one bucket: with more matrices the sections are balanced better. Raise UserError if tensor
    parallelism cuts a matrix inside a block of 8-bit state.
    """
    runs: dict[Key, list[list[nn.Parameter]]] = {}
    most = bucket_elements(sum(p.numel() for p in parameters), BUCKET_ELEMENTS)
    for p in reversed(parameters):
        key = key_of(p.spec, training.optimizer)
        if key.family == "blocks":
            from optim import adam8bit  # here: no other optimizer needs it

            adam8bit.check_blocks(p)
        of_key = runs.setdefault(key, [[]])
        full = sum(q.numel() for q in of_key[-1]) + p.numel() > most
        if of_key[-1] and full and key.family != "matrices":
            of_key.append([])
        of_key[-1].append(p)
    buckets = []
    for key in sorted(runs):
        for run in runs[key]:
            buckets.append(Bucket(run, key, mesh, training, zero, dtype))
            buckets[-1].adopt()
    return buckets


def _lay_out(
    parameters: list[nn.Parameter], family: str, owners: int, sharded: bool
) -> tuple[list[int], int]:
    """Return each parameter's offset in a bucket's buffers, and the buffers' length in elements.

    owners: the number of sections, which divides the length. Flat sections may cut parameters. Each
    whole matrix is in one section: the largest are placed first, in the section with the least.
    """
    if family == "matrices" and sharded:
        loads = [0] * owners
        found = {}
        for p in sorted(parameters, key=lambda p: -p.numel()):
            section = loads.index(min(loads))
            found[p] = (section, loads[section])
            loads[section] += p.numel()
        length = -(-max(loads) // ALIGNMENT) * ALIGNMENT
        return [found[p][0] * length + found[p][1] for p in parameters], length * owners
    step = update_rules.BLOCK if family == "blocks" else 1
    places = []
    total = 0
    for p in parameters:
        places.append(total)
        total += -(-p.numel() // step) * step
    share = max(ALIGNMENT, step) * owners
    return places, -(-total // share) * share


def _flat_shape(shard: ParamShard) -> tuple[int, ...]:
    """Return the shape of a whole parameter for a rule, without padding: (rows, width) or flat."""
    size = shard.stop - shard.start
    width = shard.shape[-1]
    return (size // width, width) if shard.spec.decay else (size,)
