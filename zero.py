"""Mixed precision, clipping, ZeRO and the update: the only place that touches optimizer state.

Weights and gradients live in flat buffers cut into buckets, the last layers first, as the
backward pass finishes them. Each bucket is reduced over the data replicas as soon as its last
gradient is there, while the backward pass goes on.

    weights   [ bucket 0 | bucket 1 | ... ]   compute precision; parameters are views of it
    gradients [ bucket 0 | bucket 1 | ... ]   summed over micro-batches in place, in fp32 (fp64)
                                              unless --grad-dtype says bf16
    masters   one piece of every bucket       fp32 (fp64): all of it at --zero 0, else the
                                              dp_rank-th dp-th, with the optimizer's state

With --zero 1 (arXiv 1910.02054) gradients are reduce-scattered, each rank updates its piece, and
weights are all-gathered. With --zero 2 there is no buffer of gradients: a bucket's are collected
and reduce-scattered in every micro-batch, and summed in a piece. Pieces are equal to the element,
whatever the parameters' borders, unless the optimizer wants whole matrices. --zero 3 is
fully_sharded.py's.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from config.schema import Layout, Training
from distributed.collectives import Group, Handle
from optim import update_rules
from optim.buckets import Bucket, Own, Shard, make_buckets
from optim.fsdp import shard_fully
from optim.loss_scale import LossScale
from parallel import ParamFactory, ParamSpec


@dataclass(frozen=True)
class ParamShard:
    """Elements [start, stop) of a local parameter whose optimizer state this rank holds.

    shape: of the local tensor, padding included. copies, copy: how many ranks hold the same
    elements, and which of them this one is.
    """

    shard: Shard
    own: Own
    copies: int
    copy: int

    @property
    def spec(self) -> ParamSpec:
        return self.own.spec

    @property
    def shape(self) -> tuple[int, ...]:
        return self.own.shape

    @property
    def start(self) -> int:
        return self.own.start

    @property
    def stop(self) -> int:
        return self.own.stop

    def read(self, kind: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the local parameter: of its "weights" (the master copy) or of
        a tensor of the optimizer's state; flat, maybe a view.
        """
        a = start - self.own.start + self.own.offset
        if kind == "weights":
            return self.shard.masters[self.own.master].view(-1)[a : a + stop - start]
        return self.shard.rule.read(kind, self.own.master, a, a + stop - start)

    def write(self, kind: str, start: int, values: Tensor) -> None:
        """Set what `read` reads, from `start` on; `Optimizer.after_load` must follow."""
        a = start - self.own.start + self.own.offset
        if kind == "weights":
            self.shard.masters[self.own.master].view(-1)[a : a + len(values)] = values
        else:
            self.shard.rule.write(kind, self.own.master, a, values)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did: equal on every rank of the world, to the bit.

    skipped: whether gradients overflowed. loss_scale: the one that the step ran with.
    """

    grad_norm: float
    loss: float
    skipped: bool
    loss_scale: float = 1.0


class Optimizer:
    """Owns the stage's weights, gradients and optimizer state; see the module's picture.

    Parameters come in as the Builder drew them, in fp32 at least; they leave as views of flat
    buffers in its compute precision, and the master copy keeps what was drawn.
    """

    def __init__(self, stage: nn.Module, build: ParamFactory, training: Training, layout: Layout):
        """Raises UserError if the optimizer's package is missing or the layout cuts its blocks."""
        self.mesh, self.training, self.device = build.mesh, training, build.device
        self.scale, self.steps, self._dtype = LossScale(training), 0, build.dtype
        self.specs = [p.spec for p in stage.parameters()]
        self._reducing, self._next, self._handles = False, 0, []
        self._gathering: dict[Shard, Handle] = {}
        self._overlap = layout.overlap_param_gather
        self.buckets: list[Bucket] = []
        self.state_sharded = layout.zero > 0 and build.mesh.dp.size > 1
        self.fully_sharded = layout.zero == 3 and self.state_sharded
        if self.fully_sharded:
            self.shards = shard_fully(stage, build, training)
        else:
            self._make_flat(stage, build, layout.zero)
        for shard in self.shards:
            family, decay = shard.key.family, not shard.key.no_decay
            shard.rule = update_rules.make_rule(training, family, shard.masters, decay)

    def _make_flat(self, stage: nn.Module, build: ParamFactory, zero: int) -> None:
        """Move parameters and gradients into buckets, for all but --zero 3."""
        parameters = list(stage.parameters())
        exact = torch.promote_types(build.dtype, torch.float32)
        drawn = None
        if build.dtype != exact:
            drawn = {p: p.detach().clone() for p in parameters}
        for p in parameters:
            p.data = p.data.to(build.dtype)
        self.shards = self.buckets = make_buckets(parameters, build.mesh, self.training, zero)
        self._bucket_of = {s.parameter: b for b in self.buckets for s in b.segments}
        for bucket in self.buckets:
            bucket.adopt_weights()
            bucket.adopt_masters(drawn)
        # A hook is held where Python's collector does not look: it must not hold the optimizer.
        here = weakref.ref(self)
        for p in parameters:
            p.register_post_accumulate_grad_hook(lambda p: here()._gradient_is_there(p))
        if self._overlap:
            self._wait_in_forward(stage)

    @property
    def kernel(self) -> str:
        """The optimizer kernels in use, for the start-up lines."""
        return "; ".join(dict.fromkeys(shard.rule.kernel for shard in self.shards)) or "none"

    # -- during the passes ------------------------------------------------------------------

    def before_backward(self, last: bool) -> None:
        """To be called before each backward pass of a step; `last` is the step's last.

        From then on, a bucket whose gradients are all there is reduced at once; at --zero 2 in
        every backward pass.
        """
        self._wait_for_reductions(0)
        self._next = 0
        self._reducing = last or any(bucket.each_micro_batch for bucket in self.buckets)
        for bucket in self.buckets:
            bucket.waiting = len(bucket.segments)

    def _gradient_is_there(self, p: nn.Parameter) -> None:
        bucket = self._bucket_of[p]
        if not bucket.each_micro_batch and p.dtype != p.main_grad.dtype:
            p.main_grad.add_(p.grad)  # 16 bits are added to the exact sum
            p.grad = None
        if self._reducing:
            bucket.waiting -= 1
            self._reduce_ready_buckets()

    def _reduce_ready_buckets(self) -> None:
        """Replicas must reduce buckets in one order, so a bucket waits for those before it."""
        while self._next < len(self.buckets) and not self.buckets[self._next].waiting:
            bucket = self.buckets[self._next]
            self._handles.append(bucket.reduce())
            self._next += 1
            if bucket.each_micro_batch:
                self._wait_for_reductions(1)  # each holds a whole bucket meanwhile

    def _wait_for_reductions(self, left: int) -> None:
        while len(self._handles) > left:
            self._handles.pop(0).wait()

    def _finish_reducing(self) -> None:
        for bucket in self.buckets[self._next :]:
            self._handles.append(bucket.reduce())
        self._wait_for_reductions(0)
        self._reducing = False
        # Tied matrices, and the terms that sequence parallelism leaves: now each owner has 1/dp.
        for shard in self.shards:
            if shard.also_over is not None:
                _sum_over(shard.also_over, shard.gradients_of_own())

    def _wait_in_forward(self, stage: nn.Module) -> None:
        """Have every part of the stage wait for its own weights just before it runs."""

        def wait_for(part: nn.Module) -> Callable:
            own = dict.fromkeys(self._bucket_of[p] for p in part.parameters())

            def hook(*_) -> None:
                for bucket in own:
                    self._wait_for_weights(bucket)

            return hook

        for part in (stage.embedding, *stage.blocks, stage.head):
            if part is not None:
                part.register_forward_pre_hook(wait_for(part))

    def _wait_for_weights(self, shard: Shard) -> None:
        handle = self._gathering.pop(shard, None)
        if handle is not None:
            handle.wait()

    def finish_gathering(self) -> None:
        """Return when every weight is there; needed only where no forward pass waits for them."""
        for shard in list(self._gathering):
            self._wait_for_weights(shard)

    # -- the step ---------------------------------------------------------------------------

    def step(self, lr: float, loss: Tensor, tokens: int) -> StepResult:
        """Reduce, clip, update and gather; collective over the world.

        `loss`: this rank's share of the loss sum, 0 where another rank has counted it; the result
        holds the mean over `tokens`. A gradient norm that is not finite skips the update on all.
        UserError if fp16 overflows for good.
        """
        recorder = self.mesh.recorder
        recorder.at("reduce")
        self._finish_reducing()
        sums = torch.stack([self._own_square_sum(), loss.double()])
        self.mesh.world.all_reduce(sums).wait()
        square, loss_sum = self.mesh.world.values(sums)
        scale = self.scale.value
        norm = math.sqrt(square) / scale if square >= 0 else math.nan
        skipped = not math.isfinite(norm)
        recorder.at("optimizer")
        if not skipped:
            self._update(lr, norm)
        for shard in self.shards:
            shard.clear()
        self.scale.update(skipped)
        return StepResult(norm, loss_sum / tokens, skipped, scale)

    def _own_square_sum(self) -> Tensor:
        """Sum of squares of the gradients that this rank counts, so that each counts once."""
        pieces = []
        for shard in self.shards:
            if not shard.sharded and self.mesh.dp.rank > 0:
                continue  # at --zero 0 every replica has the same gradients
            gradients = shard.gradients_of_own()
            for own in shard.own:
                if _counted(own.spec, self.mesh.tp):
                    stop = own.offset + own.stop - own.start
                    pieces.append(gradients[own.master][own.offset : stop])
        if not pieces:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        exact = torch.promote_types(pieces[0].dtype, torch.float32)
        return torch.stack(torch._foreach_norm(pieces, 2, exact)).double().square().sum()

    def _update(self, lr: float, norm: float) -> None:
        """Update shard by shard, the first layers first: their weights are needed first."""
        clip, factor = self.training.clip_grad, 1.0
        if clip > 0:
            factor = min(1.0, clip / (norm + 1e-6))
        self.steps += 1
        for shard in reversed(self.shards):
            shard.update(factor / self.scale.value, lr)
            self._all_gather_params(shard)
        if not self._overlap:
            self.finish_gathering()

    def _all_gather_params(self, shard: Shard) -> None:
        handle = shard.all_gather_params()
        if handle is not None:
            self._gathering[shard] = handle

    def state_bytes(self) -> int:
        """Bytes of this rank's optimizer state, with the masters that are not the weights."""
        total = sum(shard.rule.state_bytes() for shard in self.shards)
        if any(m.dtype != self._dtype for shard in self.shards for m in shard.masters):
            total += sum(m.nbytes for shard in self.shards for m in shard.masters)
        return total

    # -- checkpoints ------------------------------------------------------------------------

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """The optimizer's tensors, each with one element for every element of the weights."""
        return update_rules.state_kinds(self.training.optimizer)

    @property
    def state_name(self) -> str:
        """What a checkpoint calls this kind of state."""
        return update_rules.interchangeable(self.training.optimizer)

    def owned(self) -> list[ParamShard]:
        """All that this rank holds of master weights and optimizer state, to read or to write."""
        pieces = []
        for shard in self.shards:
            replicas = 1 if shard.sharded else self.mesh.dp.size
            for own in shard.own:
                copies, copy = replicas, self.mesh.dp.rank if replicas > 1 else 0
                if own.spec.dim is None:
                    copies, copy = copies * self.mesh.tp.size, copy * self.mesh.tp.size
                    copy += self.mesh.tp.rank
                pieces.append(ParamShard(shard, own, copies, copy))
        return pieces

    def scalars(self) -> dict[str, float]:
        """The rest of the optimizer's state, equal on every rank."""
        return {"step": self.steps, **self.scale.state()}

    def after_load(self, scalars: dict[str, float] | None = None) -> None:
        """Take over what was written into `owned`, and the scalars if given; collective over dp."""
        if scalars is not None:
            self.steps = int(scalars["step"])
            self.scale.load(scalars)
            for shard in self.shards:
                shard.rule.steps = self.steps
        for shard in self.shards:
            self._all_gather_params(shard)
        self.finish_gathering()


def _sum_over(group: Group, tensors: list[Tensor]) -> None:
    """Sum over the group, in place; one collective however many tensors there are."""
    joined = torch.cat([t.flatten() for t in tensors]) if len(tensors) > 1 else tensors[0]
    group.all_reduce(joined).wait()
    if len(tensors) > 1:
        sums = joined.split([t.numel() for t in tensors])
        torch._foreach_copy_(tensors, [s.view(t.shape) for s, t in zip(sums, tensors)])


def _counted(spec: ParamSpec, tp: Group) -> bool:
    """Whether this rank's copy is the one that counts: the first tensor rank, the first stage."""
    return not spec.copy and (spec.dim is not None or tp.rank == 0)
