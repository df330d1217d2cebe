"""Mixed precision, clipping, ZeRO-1 and AdamW: the only place that touches optimizer state.

Weights and gradients live in flat buffers cut into buckets, the last layers first, as the
backward pass finishes them. Each bucket is reduced over the data replicas as soon as its last
gradient is there, while the backward pass goes on.

    weights   [ bucket 0 | bucket 1 | ... ]   compute precision; parameters are views of it
    gradients [ bucket 0 | bucket 1 | ... ]   fp32 (fp64): summed over micro-batches in place
    master    one piece of every bucket       fp32 (fp64): all of it at --zero 0, the dp_rank-th
                                              dp-th at --zero 1, with the optimizer's state

With --zero 1 (arXiv 1910.02054) gradients are reduce-scattered, each rank updates its piece, and
weights are all-gathered. Pieces are equal to the element, whatever the parameters' borders.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from collectives import Group, Handle
from config import Training
from parallel import Builder, Mesh, Spec

BUCKET_ELEMENTS = 16 * 2**20
# Pieces are multiples of this, so that no kernel treats the end of a piece in another way than
# its middle: copies of a parameter that lie elsewhere in their buffer stay bitwise equal.
ALIGNMENT = 64


@dataclass(frozen=True)
class Segment:
    """Where a parameter lies in a bucket: elements [start, stop) of its flat buffers."""

    parameter: nn.Parameter
    start: int
    stop: int


class Bucket:
    """A run of parameters whose gradients are reduced together, with this rank's piece of it."""

    def __init__(self, parameters: list[nn.Parameter], mesh: Mesh, zero: int, decay: bool):
        self.decay, self.segments, self.dp = decay, [], mesh.dp
        total = 0
        for p in parameters:
            self.segments.append(Segment(p, total, total + p.numel()))
            total += p.numel()
        share = ALIGNMENT * mesh.dp.size
        total = -(-total // share) * share
        first = parameters[0]
        compute, accumulate = first.dtype, torch.promote_types(first.dtype, torch.float32)
        self.weights = torch.zeros(total, dtype=compute, device=first.device)
        self.gradients = torch.zeros(total, dtype=accumulate, device=first.device)
        self.sharded = zero >= 1 and mesh.dp.size > 1
        self.start = self.dp.rank * (total // self.dp.size) if self.sharded else 0
        self.piece = total // self.dp.size if self.sharded else total
        self.waiting = 0  # gradients still to come in the last backward pass
        # Sums over other axes come first, once all gradients are there.
        self.late = any(p.spec.tied or p.spec.partial for p in parameters)

    def own(self, buffer: Tensor) -> Tensor:
        """This rank's piece of a flat buffer of the bucket."""
        return buffer[self.start : self.start + self.piece]

    def reduce(self) -> Handle:
        """Start summing the gradients over the data replicas; returns the handle."""
        if self.sharded:
            return self.dp.reduce_scatter(self.own(self.gradients), self.gradients)
        return self.dp.all_reduce(self.gradients)

    def gather(self) -> Handle:
        """Start collecting every rank's updated weights; returns the handle."""
        return self.dp.all_gather(self.weights, self.own(self.weights))

    def own_pieces(self) -> list[tuple[Segment, int, int]]:
        """Segments that overlap this rank's piece, with the overlap's borders in the bucket."""
        stop = self.start + self.piece
        cuts = [(s, max(s.start, self.start), min(s.stop, stop)) for s in self.segments]
        return [(s, a, b) for s, a, b in cuts if a < b]


@dataclass(frozen=True)
class OwnedPiece:
    """Elements [start, stop) of a local parameter whose optimizer state this rank holds.

    shape: of the local tensor, padding included. state: by kind ("weights": the master copy,
    then the optimizer's tensors), flat views of stop - start elements; writing to them is loading.
    copies, copy: how many ranks hold the same elements, and which of them this one is.
    """

    spec: Spec
    shape: tuple[int, ...]
    start: int
    stop: int
    state: dict[str, Tensor]
    copies: int
    copy: int


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did: equal on every rank of the world, to the bit."""

    grad_norm: float
    loss: float
    skipped: bool


class Optimizer:
    """Owns the stage's weights, gradients and optimizer state; see the module's picture.

    Parameters come in as the Builder drew them, in fp32 at least; they leave as views of flat
    buffers in its compute precision, and the master copy keeps what was drawn.
    """

    def __init__(self, stage: nn.Module, build: Builder, training: Training, zero: int):
        mesh, dtype = build.mesh, build.dtype
        self.mesh, self.training, self.device = mesh, training, build.device
        self.parameters = list(stage.parameters())
        drawn = [p.detach().clone() for p in self.parameters] if dtype == torch.bfloat16 else None
        for p in self.parameters:
            p.data = p.data.to(dtype)
        self.buckets = _make_buckets(self.parameters, mesh, zero)
        self._bucket_of = {s.parameter: b for b in self.buckets for s in b.segments}
        self._reducing, self._next, self._handles = False, 0, []
        for bucket in self.buckets:
            self._adopt(bucket)
        self.masters = [self._master(bucket, drawn) for bucket in self.buckets]
        self.adam = self._make_adam()

    # -- building ---------------------------------------------------------------------------

    def _adopt(self, bucket: Bucket) -> None:
        """Make the bucket's parameters and gradients views of its flat buffers."""
        accumulate = bucket.gradients.dtype
        for s in bucket.segments:
            p = s.parameter
            view = bucket.weights[s.start : s.stop].view(p.shape)
            view.copy_(p.data)
            p.data = view
            p.main_grad = bucket.gradients[s.start : s.stop].view(p.shape)
            if p.dtype == accumulate:
                p.grad = p.main_grad  # autograd adds to it in place
            p.register_post_accumulate_grad_hook(self._gradient_is_there)

    def _master(self, bucket: Bucket, drawn: list[Tensor] | None) -> Tensor:
        """The bucket's master piece: the weights themselves where they are precise enough."""
        if drawn is None:
            return bucket.own(bucket.weights)
        master = bucket.own(bucket.weights).to(bucket.gradients.dtype)
        place = {p: i for i, p in enumerate(self.parameters)}
        for s, a, b in bucket.own_pieces():
            exact = drawn[place[s.parameter]].view(-1)[a - s.start : b - s.start]
            master[a - bucket.start : b - bucket.start] = exact
        return master

    def _make_adam(self) -> torch.optim.AdamW | None:
        t = self.training
        groups = []
        for decay in (True, False):
            own = [m for m, b in zip(self.masters, self.buckets) if b.decay == decay]
            if own:
                groups.append({"params": own, "weight_decay": t.weight_decay if decay else 0.0})
        for master, bucket in zip(self.masters, self.buckets):
            master.grad = bucket.own(bucket.gradients)
        if not groups:
            return None  # a stage that only passes activations on
        betas = (t.adam_beta1, t.adam_beta2)
        return torch.optim.AdamW(groups, lr=t.lr, betas=betas, eps=t.adam_eps, fused=True)

    @property
    def kernel(self) -> str:
        """The optimizer kernel in use, for the start-up lines."""
        return "torch.optim.AdamW, fused"

    # -- during the backward passes ---------------------------------------------------------

    def _gradient_is_there(self, p: nn.Parameter) -> None:
        if p.dtype != p.main_grad.dtype:  # bf16: add to the fp32 sum
            p.main_grad.add_(p.grad)
            p.grad = None
        if self._reducing:
            self._bucket_of[p].waiting -= 1
            self._reduce_ready_buckets()

    def start_reducing(self) -> None:
        """From here on, a bucket whose gradients are all there is reduced at once.

        To be called before the last backward pass of a step.
        """
        self._reducing, self._next, self._handles = True, 0, []
        for bucket in self.buckets:
            bucket.waiting = len(bucket.segments)

    def _reduce_ready_buckets(self) -> None:
        """Replicas must reduce buckets in one order, so a bucket waits for those before it."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.late or bucket.waiting:
                return
            self._handles.append(bucket.reduce())
            self._next += 1

    def _finish_reducing(self) -> None:
        self._sum_over_other_axes()
        for bucket in self.buckets[self._next :]:
            self._handles.append(bucket.reduce())
        for handle in self._handles:
            handle.wait()
        self._reducing = False

    def _sum_over_other_axes(self) -> None:
        """Gradients of a tied pair of matrices, and the terms that sequence parallelism leaves."""
        tied = [p.main_grad for p in self.parameters if p.spec.tied]
        partial = [p.main_grad for p in self.parameters if p.spec.partial]
        for gradient in tied:
            self.mesh.tied.all_reduce(gradient).wait()
        if partial:
            joined = torch.cat([g.flatten() for g in partial])
            self.mesh.tp.all_reduce(joined).wait()
            sums = joined.split([g.numel() for g in partial])
            torch._foreach_copy_(partial, [s.view(g.shape) for s, g in zip(sums, partial)])

    # -- the step ---------------------------------------------------------------------------

    def step(self, lr: float, loss: Tensor, tokens: int) -> StepResult:
        """Reduce, clip, update and gather; collective over the world.

        `loss`: this rank's share of the loss sum, 0 where another rank has counted it; the result
        holds the mean over `tokens`. A gradient norm that is not finite skips the update on all.
        """
        self._finish_reducing()
        sums = torch.stack([self._own_square_sum(), loss.double()])
        self.mesh.world.all_reduce(sums).wait()
        square, loss_sum = sums.tolist()
        norm = math.sqrt(square) if square >= 0 else math.nan
        skipped = not math.isfinite(norm)
        if not skipped:
            self._update(lr, norm)
        for bucket in self.buckets:
            bucket.gradients.zero_()
        return StepResult(norm, loss_sum / tokens, skipped)

    def _own_square_sum(self) -> Tensor:
        """Sum of squares of the gradients that this rank counts, so that each counts once."""
        pieces = []
        for bucket in self.buckets:
            if not bucket.sharded and self.mesh.dp.rank > 0:
                continue  # at --zero 0 every replica has the same gradients
            for s, a, b in bucket.own_pieces():
                if _counted(s.parameter, self.mesh.tp):
                    pieces.append(bucket.gradients[a:b])
        if not pieces:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack(torch._foreach_norm(pieces)).double().square().sum()

    def _update(self, lr: float, norm: float) -> None:
        clip = self.training.clip_grad
        factor = clip / (norm + 1e-6) if clip > 0 else 1.0
        if factor < 1.0:
            torch._foreach_mul_([bucket.own(bucket.gradients) for bucket in self.buckets], factor)
        if self.adam is None:
            return
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self._spread_masters()

    def _spread_masters(self) -> None:
        """Weights from masters, on every data replica; collective over dp."""
        for bucket, master in zip(self.buckets, self.masters):
            if master.dtype != bucket.weights.dtype:
                bucket.own(bucket.weights).copy_(master)
        handles = [bucket.gather() for bucket in self.buckets if bucket.sharded]
        for handle in handles:
            handle.wait()

    # -- checkpoints ------------------------------------------------------------------------

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """The optimizer's tensors, each with one element for every element of the weights."""
        return ("exp_avg", "exp_avg_sq")

    def owned(self) -> list[OwnedPiece]:
        """All that this rank holds of master weights and optimizer state, as views to read or
        to write; after writing, `loaded` must be called.
        """
        pieces = []
        for bucket, master in zip(self.buckets, self.masters):
            flat = {"weights": master} | self._state(master)
            replicas = 1 if bucket.sharded else self.mesh.dp.size
            for s, a, b in bucket.own_pieces():
                state = {k: t[a - bucket.start : b - bucket.start] for k, t in flat.items()}
                p, copies, copy = s.parameter, replicas, self.mesh.dp.rank if replicas > 1 else 0
                if p.spec.dim is None:
                    copies, copy = copies * self.mesh.tp.size, copy * self.mesh.tp.size
                    copy += self.mesh.tp.rank
                shape = tuple(p.shape)
                pieces.append(
                    OwnedPiece(p.spec, shape, a - s.start, b - s.start, state, copies, copy)
                )
        return pieces

    def _state(self, master: Tensor) -> dict[str, Tensor]:
        """The optimizer's tensors of a master piece; as before the first step if there are none."""
        state = self.adam.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            for kind in self.state_kinds:
                state[kind] = torch.zeros_like(master)
        return {kind: state[kind] for kind in self.state_kinds}

    def scalars(self) -> dict[str, float]:
        """The rest of the optimizer's state, equal on every rank that has parameters."""
        steps = [s["step"] for s in self.adam.state.values()] if self.adam else []
        return {"step": int(steps[0])} if steps else {"step": 0}

    def loaded(self, scalars: dict[str, float] | None = None) -> None:
        """Take over what was written into `owned`, and the scalars if given; collective over dp."""
        if scalars is not None and self.adam is not None:
            for state in self.adam.state.values():
                state["step"].fill_(scalars["step"])
        self._spread_masters()


def _make_buckets(parameters: list[nn.Parameter], mesh: Mesh, zero: int) -> list[Bucket]:
    """Buckets of one weight-decay rule each, in the order in which the backward fills them.

    Those that need a sum over another axis first come last, so as not to hold the others up.
    """
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for p in reversed(parameters):
        late = p.spec.tied or p.spec.partial
        kinds.setdefault((late, not p.spec.decay), []).append(p)
    buckets = []
    for (_, no_decay), members in sorted(kinds.items()):
        run: list[nn.Parameter] = []
        for p in members:
            run.append(p)
            if sum(q.numel() for q in run) >= BUCKET_ELEMENTS:
                buckets.append(Bucket(run, mesh, zero, not no_decay))
                run = []
        if run:
            buckets.append(Bucket(run, mesh, zero, not no_decay))
    return buckets


def _counted(p: nn.Parameter, tp: Group) -> bool:
    """Whether this rank's copy is the one that counts: the first tensor rank, the first stage."""
    return not p.spec.copy and (p.spec.dim is not None or tp.rank == 0)


# ------------------------------------------------------------------------------------------------
# Replicas must be equal, bit for bit
# ------------------------------------------------------------------------------------------------


def unequal_replicas(stage: nn.Module, mesh: Mesh) -> list[str]:
    """Parameters whose copies differ in any bit, each with the axis on which they do.

    Copies are compared over dp (all parameters), tp (those held whole) and between a tied pair,
    by a 64-bit hash of the bits and their places. Collective over the mesh.
    """
    parameters = list(stage.parameters())
    whole = [p for p in parameters if p.spec.dim is None]
    tied = [p for p in parameters if p.spec.tied]
    found = []
    for axis, group, members in (
        ("dp", mesh.dp, parameters),
        ("tp", mesh.tp, whole),
        ("tied", mesh.tied, tied),
    ):
        if group.size == 1 or not members:
            continue
        hashes = torch.stack([_bit_hash(p.detach()) for p in members])
        every = hashes.new_empty(group.size * len(members))
        group.all_gather(every, hashes).wait()
        differs = (every.view(group.size, -1) != hashes).any(0).tolist()
        found += [
            f"{p.spec.name} differs over {axis}, ranks {list(group.ranks)}"
            for p, unequal in zip(members, differs)
            if unequal
        ]
    return found


def _bit_hash(tensor: Tensor) -> Tensor:
    """A 64-bit sum of the elements' bits times odd numbers that depend on their places."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.contiguous().view(-1).view(integers).long()
    places = torch.arange(bits.numel(), device=bits.device) * 2 + 1
    return ((bits ^ (bits >> 17)) * (places * -7046029254386353131)).sum()
