"""Buckets: the flat buffers in which parameters, gradients and masters are kept, and their owners.

A bucket is a run of parameters that are reduced together. Its buffers are cut into one section for
every replica (one for all at --zero 0); the rank that owns a section updates it.

    weights    compute precision; the parameters are views of it
    gradients  summed over micro-batches in place, or at --zero 2 this rank's section of the sum
    masters    this rank's section in fp32 (fp64), flat or as whole matrices
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from config.messages import UserError
from config.schema import BUCKET_ELEMENTS, Training, bucket_elements
from distributed.collectives import Handle
from distributed.mesh import Mesh
from optim import update_rules
from parallel import ParamSpec

# Sections are multiples of this, so that no kernel treats the end of a section in another way than
# its middle: copies of a parameter at other places of their buffers stay bitwise equal.
ALIGNMENT = 64
SETS_OF_KEY = 4  # update sets: the more, the sooner the first weights are gathered


class Key(NamedTuple):
    """What the parameters of a group have in common.

    reduce_over: as in ParamSpec. family: the set of parameters that one update rule takes.
    """

    reduce_over: tuple[str, ...]
    no_decay: bool
    family: str


def key_of(spec: ParamSpec, optimizer: str) -> Key:
    """The key of a parameter under an --optimizer."""
    return Key(spec.reduce_over, not spec.decay, update_rules.family(optimizer, spec))


@dataclass(frozen=True)
class ParamShard:
    """Elements [start, stop) of a local parameter whose master and state this rank holds.

    group, master, offset: where: from `offset` on in the group's master tensor of that number.
    shape: of the whole local parameter, padding included. copies, copy: how many ranks hold the
    same elements, and which of them this one is.
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
        """Elements [start, stop) of the local parameter: of its "weights" (the master copy) or of
        a tensor of the optimizer's state; flat, maybe a view.
        """
        a = start - self.start + self.offset
        if kind == "weights":
            return self.group.masters[self.master].view(-1)[a : a + stop - start]
        index = self.group.first + self.master
        return self.group.rule.read(kind, index, a, a + stop - start)

    def write(self, kind: str, start: int, values: Tensor) -> None:
        """Set what `read` reads, from `start` on; `Optimizer.after_load` must follow."""
        a = start - self.start + self.offset
        if kind == "weights":
            self.group.masters[self.master].view(-1)[a : a + len(values)] = values
        else:
            self.group.rule.write(kind, self.group.first + self.master, a, values)


class ParamGroup(ABC):
    """Parameters that are reduced together, as this rank owns them.

    replicas: the group over which gradients are reduced first, and state may be sharded. sharded:
    whether the other replicas own other elements. masters: the tensors that the rule updates, which
    has some of other groups too; first: the number there of the first one.
    """

    rule: update_rules.UpdateRule
    first: int

    def __init__(self, key: Key, mesh: Mesh, sharded: bool):
        self.key, self.mesh, self.sharded = key, mesh, sharded
        self.replicas = mesh.group(key.reduce_over[0])
        self.masters: list[Tensor] = []
        self.gathering: Handle | None = None  # of the weights of every replica
        self._owned: list[tuple] = []

    def add_shard(
        self, spec: ParamSpec, shape: tuple[int, ...], start: int, stop: int, place: tuple[int, int]
    ) -> None:
        """Own these elements of a parameter; place: number of the master, and offset in it."""
        copies, copy = (1, 0) if self.sharded else (self.replicas.size, self.replicas.rank)
        if spec.dim is None:
            tp = self.mesh.tp
            copies, copy = copies * tp.size, copy * tp.size + tp.rank
        self._owned.append((spec, shape, start, stop, *place, copies, copy))

    @property
    def shards(self) -> list[ParamShard]:
        """What this rank owns. Made anew: a shard that the group held would hold the group, and
        its memory would wait for Python's garbage collector.
        """
        return [ParamShard(self, *fields) for fields in self._owned]

    @abstractmethod
    def own_gradients(self) -> list[Tensor]:
        """The gradient of every master, flat, in the type that it was summed in."""

    @abstractmethod
    def clear_gradients(self) -> list[Tensor]:
        """Forget the gradients; the buffers that stay, for the caller to fill with zeros."""

    @abstractmethod
    def masters_to_round(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's part of the weights and the masters that it is a rounded copy of, if any."""

    @abstractmethod
    def all_gather_params(self) -> None:
        """Begin to gather the weights of every replica."""

    def wait_for_weights(self) -> None:
        """Return when every weight of the group is there."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def reduce_further(self) -> None:
        """Sum the owned gradients over the groups beyond the replicas: tied copies, partial terms.

        By now each owner has only its share of the elements to send.
        """
        # A rank that owns no matrix of a bucket has peers here that own none either.
        for name in self.key.reduce_over[1:] if self.masters else ():
            tensors = self.own_gradients()  # in one collective, however many there are
            joined = torch.cat([t.flatten() for t in tensors]) if len(tensors) > 1 else tensors[0]
            self.mesh.group(name).at_once.all_reduce(joined).wait()
            if len(tensors) > 1:
                sums = joined.split([t.numel() for t in tensors])
                torch._foreach_copy_(tensors, [s.view(t.shape) for s, t in zip(sums, tensors)])

    def counted_gradients(self) -> list[Tensor]:
        """The owned gradients that count in the norm, so that each element counts on one rank."""
        if not self.sharded and self.replicas.rank > 0:
            return []  # every replica has the same gradients
        gradients, counted = self.own_gradients(), []
        for shard in self.shards:
            if shard.spec.counts_on(self.mesh):
                stop = shard.offset + shard.stop - shard.start
                counted.append(gradients[shard.master][shard.offset : stop])
        return counted


class Bucket(ParamGroup):
    """Parameters in flat buffers (`places`: where each starts), and this rank's section."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        key: Key,
        mesh: Mesh,
        t: Training,
        zero: int,
        dtype: torch.dtype | None = None,
    ):
        """dtype: of the weights in computation, default: that of the parameters, fp32 at least."""
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
        self.each_micro_batch = zero == 2 and self.sharded
        count, kind = (self.section, exact) if self.each_micro_batch else (total, self.sum_dtype)
        self.gradients = first.new_zeros(count, dtype=kind)
        # Gradients that a micro-batch adds, and those still to come before it is reduced.
        self.passes, self.missing = sum(getattr(p, "passes", 1) for p in parameters), 0
        self.whole_matrices = key.family == "matrices"

    def adopt(self) -> None:
        """Make the parameters, and their gradients where all are kept, views of the buffers; the
        masters are the weights themselves where these are as precise as what was drawn.
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
            p.data = view  # frees what was drawn
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
        """This rank's section of a flat buffer of the bucket."""
        return buffer[self.start : self.start + self.section]

    def _cuts(self) -> list[tuple[nn.Parameter, int, int, int]]:
        """Parameters that overlap this rank's section: where each starts in the bucket, and the
        overlap's borders there. Whole matrices are without padding, which Adafactor's means of a
        matrix would count.
        """
        start, stop, cuts = self.start, self.start + self.section, []
        for p, at in self.places:
            size = math.prod(p.spec.shape) if self.whole_matrices else p.numel()
            cuts.append((p, at, max(at, start), min(at + size, stop)))
        return [cut for cut in cuts if cut[2] < cut[3]]

    def own_gradients(self) -> list[Tensor]:
        """Summed gradients of this rank's section, one flat tensor for each master."""
        flat = self.gradients if self.each_micro_batch else self._section_of(self.gradients)
        return [flat[part] for part in self._parts]

    def clear_gradients(self) -> list[Tensor]:
        """The buffer of all gradients, or of this rank's."""
        return [self.gradients]

    def reduce(self) -> Handle:
        """Start summing the gradients over the replicas."""
        if self.each_micro_batch:
            return self._reduce_micro_batch()
        if self.sharded:
            return self.replicas.reduce_scatter(self._section_of(self.gradients), self.gradients)
        return self.replicas.all_reduce(self.gradients)

    def _reduce_micro_batch(self) -> Handle:
        """Collect this micro-batch's gradients, free them, and add the sum to the section."""
        whole = torch.zeros(self.weights.numel(), dtype=self.sum_dtype, device=self.weights.device)
        found = [(at, p.grad) for p, at in self.places if p.grad is not None]
        if found:
            parts = [whole[at : at + grad.numel()].view(grad.shape) for at, grad in found]
            torch._foreach_copy_(parts, [grad for _, grad in found])
        for p, _ in self.places:
            p.grad = None
        del found  # frees them before the section is made
        section = whole.new_empty(self.section)
        handle = self.replicas.reduce_scatter(section, whole)
        return _AddingHandle(handle, section, self.gradients, whole)

    def masters_to_round(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's section, unless the masters are that section itself."""
        exact = self.flat.dtype == self.weights.dtype
        return [] if exact else [(self._section_of(self.weights), self.flat)]

    def all_gather_params(self) -> None:
        """Begin to gather the sections of the weights, if they are sharded."""
        own = self._section_of(self.weights)
        self.gathering = self.replicas.all_gather(self.weights, own) if self.sharded else None


class _AddingHandle:
    """The handle of a reduce-scatter whose result is added to a sum."""

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
    """Groups whose masters one rule updates together: the number of kernels is that of one group.

    rule: takes the masters of all, in order.
    """

    def __init__(self, groups: list[ParamGroup], training: Training):
        """groups: of one key. UserError if the optimizer's package is missing."""
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
        """One step by the gradients times `factor`, and begin to gather the weights."""
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
    """Round the masters of groups to their weights, and begin to gather these."""
    pairs = [pair for group in groups for pair in group.masters_to_round()]
    if pairs:
        weights, masters = zip(*pairs)
        torch._foreach_copy_(weights, masters)
    for group in groups:
        group.all_gather_params()


def make_update_sets(groups: Sequence[ParamGroup], training: Training) -> list[UpdateSet]:
    """The sets that hold all groups, the first layers first: their weights are needed first.

    Each key has SETS_OF_KEY at most, so that the weights of one are gathered while the next is
    updated; where sums in 16 bits are copied to fp32, a set has about as many elements as a bucket.
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
    """Buckets of one key each, in the order in which the backward pass fills them.

    They adopt the parameters one after the other: what was drawn and all buffers are never in
    memory at once. dtype: of the weights in computation. Whole matrices of one key are one bucket:
    the more there are, the better they are balanced. UserError if tensor parallelism cuts the
    blocks of 8-bit state.
    """
    runs: dict[Key, list[list[nn.Parameter]]] = {}
    most = bucket_elements(sum(p.numel() for p in parameters), BUCKET_ELEMENTS)
    for p in reversed(parameters):
        key = key_of(p.spec, training.optimizer)
        if key.family == "blocks":
            _check_blocks(p)
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
    """Where each parameter begins in a bucket's buffers, and their length, a multiple of `owners`.

    Flat sections are equal wherever parameters end. Whole matrices are distributed to the sections,
    the largest first, each to the section that has least.
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


def _check_blocks(p: nn.Parameter) -> None:
    """UserError if tensor parallelism cuts a matrix inside the blocks of 8-bit state."""
    spec = p.spec
    block = update_rules.BLOCK
    run = math.prod(p.shape[spec.dim or 0 :])
    if spec.dim is not None and run % block and p.shape[spec.dim] < spec.shape[spec.dim]:
        raise UserError(
            f"--optimizer adamw8bit: tp cuts {spec.name} {spec.shape} into runs of {run} weights, "
            f"which is no multiple of its blocks of {block}; use a smaller --tp"
        )


def _flat_shape(shard: ParamShard) -> tuple[int, ...]:
    """The shape in which a rule sees a whole parameter, without padding: a matrix, or a vector."""
    size = shard.stop - shard.start
    width = shard.shape[-1]
    return (size // width, width) if shard.spec.decay else (size,)
