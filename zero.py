"""Mixed precision, clipping, ZeRO and the update: the only place that touches optimizer state.

Weights and gradients are kept in flat buffers cut into buckets, the last layers first, as the
backward pass finishes them. Each bucket is reduced over the replicas as soon as its last gradient
of the step is there, while the backward pass continues.

    weights   [ bucket 0 | bucket 1 | ... ]   compute precision; parameters are views of it
    gradients [ bucket 0 | bucket 1 | ... ]   summed over micro-batches in place, in fp32 (fp64)
                                              unless --grad-dtype says bf16
    masters   one section of every bucket     fp32 (fp64): all of it at --zero 0, else one of as
                                              many as replicas, with the optimizer's state

With --zero 1 (arXiv 1910.02054) gradients are reduce-scattered, each rank updates its section, and
weights are all-gathered. With --zero 2 there is no buffer of gradients: a bucket's are collected
and reduce-scattered in every micro-batch, and summed in a section. Sections are equal to the
element, wherever parameters end, unless the optimizer needs whole matrices. --zero 3 is optim/fsdp.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from config.schema import Layout, Training
from distributed.collectives import Handle
from optim import update_rules
from optim.buckets import (
    Bucket,
    ParamGroup,
    ParamShard,
    gather_weights,
    make_buckets,
    make_update_sets,
)
from optim.loss_scale import LossScale
from parallel import ParamFactory


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did: equal on every rank of the world, to the bit.

    skipped: whether gradients overflowed, or no label counted. loss_scale: the one that the step
    ran with.
    """

    grad_norm: float
    loss: float
    skipped: bool
    loss_scale: float = 1.0


class Optimizer:
    """Owns a rank's weights, gradients and optimizer state; see the module's picture.

    Parameters come in as the ParamFactory drew them, in fp32 at least; they leave as views of flat
    buffers in its compute precision, and the master copy keeps what was drawn. kernel: what runs.
    state_kinds, state_name: what a checkpoint calls its tensors, and all of the state.
    """

    def __init__(
        self, stages: nn.ModuleList, factory: ParamFactory, training: Training, layout: Layout
    ):
        """`stages`: all that the rank holds. UserError if the optimizer's package is missing or the
        layout cuts its blocks.
        """
        self.mesh = factory.mesh
        self.training = training
        self.device = factory.device
        self.scale = LossScale(training)
        self.updates = 0
        self._dtype = factory.dtype
        self.specs = [p.spec for p in stages.parameters()]
        self._targets = 1
        self._next = 0
        self._reducing: list[Handle] = []
        self._overlap = layout.overlap_param_gather
        self.buckets: list[Bucket] = []
        self.state_sharded = layout.zero > 0 and factory.mesh.replicas.size > 1
        self.fully_sharded = factory.shard is not None
        self.groups: Sequence[ParamGroup]
        if self.fully_sharded:
            from optim.fsdp import shard_fully  # 43 MB of torch's modules, which others do not need

            self.groups = shard_fully(stages[0], factory, training)
        else:
            self.groups = self._make_buckets(stages, factory, layout.zero)
        self.update_sets = make_update_sets(self.groups, training)
        kernels = dict.fromkeys(each.rule.kernel for each in self.update_sets)
        self.kernel = "; ".join(kernels) or "none"
        self.state_kinds = update_rules.state_kinds(training.optimizer)
        self.state_name = update_rules.interchangeable(training.optimizer)

    def _make_buckets(
        self, stages: nn.ModuleList, factory: ParamFactory, zero: int
    ) -> list[Bucket]:
        """Move parameters and gradients into buckets, for all but --zero 3."""
        parameters = list(stages.parameters())
        self.buckets = make_buckets(parameters, self.mesh, self.training, zero, factory.dtype)
        self._bucket_of = {p: bucket for bucket in self.buckets for p, _ in bucket.places}
        # Python's collector does not look into hooks: one that held the optimizer would keep it.
        here = weakref.proxy(self)
        for p in parameters:
            p.register_post_accumulate_grad_hook(lambda p: here._add_gradient(p))
            p.gradient_added = lambda p: here._gradient_added(p)
        if self._overlap:
            self._wait_in_forward(stages)
        return self.buckets

    # -- during the passes ------------------------------------------------------------------

    def begin_step(self, targets: int, micro_batches: int) -> float:
        """What to multiply the sum of losses by before each backward pass of the step.

        targets: tokens of the whole global batch, whose loss counts unless `step` is told another
        number. Gradients are then those of their mean loss, times the loss scale. Each parameter
        gets a gradient in every micro-batch; a bucket is reduced when its last one is there, at
        --zero 2 in every micro-batch.
        """
        self._targets = targets
        self._next = 0
        for bucket in self.buckets:
            rounds = 1 if bucket.each_micro_batch else micro_batches
            bucket.missing = rounds * bucket.passes
        return self.scale.value / targets

    def _add_gradient(self, p: nn.Parameter) -> None:
        """Autograd has added to p.grad."""
        bucket = self._bucket_of[p]
        if not bucket.each_micro_batch and p.dtype != p.main_grad.dtype:
            p.main_grad.add_(p.grad)  # 16 bits are added to the exact sum
            p.grad = None
        self._gradient_added(p)

    def _gradient_added(self, p: nn.Parameter) -> None:
        """A parameter's gradient of a micro-batch is in its bucket, or in p.grad at --zero 2."""
        self._bucket_of[p].missing -= 1
        self._reduce_ready_buckets()

    def _reduce_ready_buckets(self) -> None:
        """Replicas must reduce buckets in one order, so a bucket waits for those before it."""
        while self._next < len(self.buckets) and self.buckets[self._next].missing <= 0:
            bucket = self.buckets[self._next]
            self._reducing.append(bucket.reduce())
            self._next += 1
            if bucket.each_micro_batch:
                bucket.missing += bucket.passes
                self._next %= len(self.buckets)
                self._wait_for_reductions(1)  # each holds a whole bucket until then

    def _wait_for_reductions(self, left: int) -> None:
        while len(self._reducing) > left:
            self._reducing.pop(0).wait()

    def _finish_reducing(self) -> None:
        for bucket in self.buckets[self._next :]:
            if not bucket.each_micro_batch:
                self._reducing.append(bucket.reduce())
        self._wait_for_reductions(0)
        for group in self.groups:
            group.reduce_further()

    def _wait_in_forward(self, stages: nn.ModuleList) -> None:
        """Have every part of a stage wait for its own weights just before it runs."""

        def wait_for(part: nn.Module) -> Callable:
            own = dict.fromkeys(self._bucket_of[p] for p in part.parameters())

            def hook(*_) -> None:
                for bucket in own:
                    bucket.wait_for_weights()

            return hook

        for stage in stages:
            for child in stage.children():  # embedding, blocks, head
                for part in child if isinstance(child, nn.ModuleList) else (child,):
                    part.register_forward_pre_hook(wait_for(part))

    def finish_gathering(self) -> None:
        """Return when every weight is there; needed only where no forward pass waits for them."""
        for group in reversed(self.groups):
            group.wait_for_weights()

    # -- the step ---------------------------------------------------------------------------

    def step(self, lr: float, loss_sum: Tensor, targets: int | None = None) -> StepResult:
        """Reduce, clip, update and gather; collective over the world.

        `loss_sum`: this rank's share of the sum of losses, 0 where another rank has counted it; the
        result holds the mean over the targets. `targets`: its share of their number, where that was
        known to no rank before; None: they are `begin_step`'s. A gradient norm that is not finite
        skips the update on all ranks, and so does a batch without targets, whose norm and loss
        are 0. UserError if fp16 overflows for good.
        """
        recorder = self.mesh.recorder
        recorder.at("reduce")
        self._finish_reducing()
        parts = [self._own_square_sum(), loss_sum.double()]
        if targets is not None:
            parts.append(torch.full_like(parts[1], targets))
        sums = torch.stack(parts)
        self.mesh.world.at_once.all_reduce(sums).wait()
        square, loss, *found = self.mesh.world.values(sums)
        counted = int(found[0]) if found else self._targets
        # The backward passes divided by begin_step's number.
        share = self._targets / counted if counted else 0.0
        scale = self.scale.value
        norm = math.sqrt(square) / scale * share if square >= 0 else math.nan
        overflowed = not math.isfinite(norm)
        recorder.at("optimizer")
        if counted and not overflowed:
            self._update(lr, norm, share)
        self._clear_gradients()
        self.scale.update(overflowed)
        return StepResult(norm, loss / max(1, counted), overflowed or not counted, scale)

    def discard(self) -> None:
        """Forget the gradients of passes that no `step` follows; collective as the passes are."""
        self._finish_reducing()
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        buffers = [buffer for group in self.groups for buffer in group.clear_gradients()]
        if buffers:
            torch._foreach_zero_(buffers)

    def _own_square_sum(self) -> Tensor:
        """Sum of squares of the gradients that count on this rank; a float64 scalar."""
        gradients = [each for group in self.groups for each in group.counted_gradients()]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        exact = torch.promote_types(gradients[0].dtype, torch.float32)
        return torch.stack(torch._foreach_norm(gradients, 2, exact)).double().square().sum()

    def _update(self, lr: float, norm: float, share: float) -> None:
        """Update all masters by their gradients times `share`, and gather the weights."""
        clip = self.training.clip_grad
        factor = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        self.updates += 1
        for each in self.update_sets:
            each.update(factor * share / self.scale.value, lr)
        if not self._overlap:
            self.finish_gathering()

    def state_bytes(self) -> int:
        """Bytes of this rank's optimizer state, with the masters that are not the weights."""
        total = sum(each.rule.state_bytes() for each in self.update_sets)
        if any(m.dtype != self._dtype for group in self.groups for m in group.masters):
            total += sum(m.nbytes for group in self.groups for m in group.masters)
        return total

    # -- checkpoints ------------------------------------------------------------------------

    def owned(self) -> list[ParamShard]:
        """All that this rank holds of master weights and optimizer state, to read or to write."""
        return [shard for group in self.groups for shard in group.shards]

    def scalars(self) -> dict[str, float]:
        """The rest of the optimizer's state, equal on every rank."""
        return {"step": self.updates, **self.scale.state()}

    def after_load(self, scalars: dict[str, float] | None = None) -> None:
        """Take over what was written into `owned`, and the scalars if given; collective over the
        replicas.
        """
        if scalars is not None:
            self.updates = int(scalars["step"])
            self.scale.load(scalars)
            for each in self.update_sets:
                each.rule.set_steps(self.updates)
        gather_weights(self.groups)
        self.finish_gathering()
