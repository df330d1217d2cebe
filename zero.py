"""Mixed precision, clipping, ZeRO and the update: the only place that touches optimizer state.

Weights and gradients are kept in flat buffers, the buckets. Bucket 0 holds the last layers, because
the backward pass finishes them first. A bucket is reduced over the replicas as soon as the last
gradient of the step has been added to it, while the backward pass continues.

    weights   [ bucket 0 | bucket 1 | ... ]   compute precision; parameters are views of the buffer
    gradients [ bucket 0 | bucket 1 | ... ]   summed over micro-batches in place, in fp32 (fp64)
                                              or, with --grad-dtype bf16, in bf16
    masters   one section of every bucket     fp32 (fp64), with the optimizer's state. At --zero 0
                                              the section is the whole bucket, else 1/replicas of it

With --zero 1 (arXiv 1910.02054) gradients are reduce-scattered, each rank updates its section, and
weights are all-gathered. With --zero 2 a bucket has no buffer for all of its gradients: in every
micro-batch they are collected, reduce-scattered, and added to a sum of this rank's section alone.
The sections of a bucket have the same number of elements and may cut a parameter, unless the
optimizer needs whole matrices. With --zero 3 (optim/fsdp.py) a FullyShardedGroup is in the place of
buckets; both are parameter groups (`groups`). An update set is the groups whose masters one update
rule updates together. Read optim/buckets.py with this file.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from architecture.shape import ModelShape
from base.errors import ProgramError
from config.buffer_sizes import BUCKET_ELEMENTS
from config.optimizers import OPTIMIZERS, interchangeable
from config.schema import EMA, Layout, Training
from distributed.collectives import Handle
from optim import update_rules
from optim.balance import ConstantGroup, RouterBalance
from optim.buckets import Bucket, ParamGroup, ParamShard, make_buckets
from optim.loss_scale import LossScale
from optim.weight_average import AveragedRule, Rule
from parallel import ParamFactory, exact_dtype

if TYPE_CHECKING:
    from optim.fsdp import LastBackward

SETS_OF_KEY = 4  # most update sets of a key; with more sets, the first weights are gathered sooner
# Update sets of a key for Muon: each has two all-to-alls, and its slowest owner delays the next.
SETS_OF_MUON = 1


@dataclass(frozen=True)
class StepResult:
    """The outcome of one optimizer step, bitwise equal on every rank of the world.

    grad_norm: the norm before clipping; loss: the mean over the targets. skipped: no weight was
    updated, because gradients overflowed, no label counted, or `Optimizer.accepts` returned False.
    loss_scale: the scale of this step's losses. expert_loads: for each block with experts the rows
    of its busiest expert, over the mean of its experts; None for a model without experts. z_loss:
    the mean z-loss over the targets, which `loss` does not contain; None without --z-loss.
    mtp_loss: the mean over --mtp-depth's modules of their mean losses, not in `loss` either.
    """

    grad_norm: float
    loss: float
    skipped: bool
    loss_scale: float = 1.0
    expert_loads: list[float] | None = None
    z_loss: float | None = None
    mtp_loss: float | None = None


def trained_parameters(part: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module that have gradients: all but the constants of routers."""
    return [p for p in part.parameters() if p.requires_grad]


class Optimizer:
    """Owns a rank's weights, gradients and optimizer state; see the module's picture.

    ParamFactory draws the parameters in fp32 at least. The optimizer keeps these values as master
    weights and makes the parameters views of flat buffers in the factory's compute precision.
    kernel: name of the code that runs the update, for the log. state_kinds: names of the state
    tensors in a checkpoint; state_name: name of the whole state there.
    """

    def __init__(
        self,
        stages: nn.ModuleList,
        factory: ParamFactory,
        training: Training,
        layout: Layout,
        model: ModelShape | None = None,
        least_bucket: int | None = None,
    ):
        """Move the parameters of `stages`, which are all stages of this rank, into buffers.

        model: needed if it has experts. least_bucket: see config.buffer_sizes.bucket_elements.
        Raise UserError if the optimizer's package is missing, or if tensor parallelism cuts a
        matrix inside a block of 8-bit state.
        """
        self.mesh = factory.mesh
        self.training = training
        self.device = factory.device
        self.scale = LossScale(training)
        self.updates = 0  # the number of updates since the run began
        self._dtype = factory.dtype
        self._loss_weight = factory.loss_weight
        self._least_bucket = least_bucket
        self.specs = [p.spec for p in stages.parameters()]
        self._targets = 1  # the number of targets that `begin_step` was given
        self._next_bucket = 0  # index of the bucket that is reduced next
        self._reductions: list[Handle] = []  # running reductions of buckets, oldest first
        self._micro_batches = 0  # the number of micro-batches that `begin_step` was given
        # Of each parameter in a bucket, the gradients that have come in this step so far.
        self._gradients: dict[nn.Parameter, int] = {}
        # The elements of the whole model, which the trainer sets; 0: those that its options say.
        self.model_elements = 0
        self._overlap = layout.overlap_param_gather
        # Functions to call when all gradients are reduced: those of a step, or of other passes.
        self.after_reduction: list[Callable[[], None]] = []
        # An audit, which repeats passes, sets this function. It is called with each parameter whose
        # gradient is complete, and the gradient is not counted or reduced. None: during steps.
        self.gradient_taker: Callable[[nn.Parameter], None] | None = None
        # Called before each update, to decide whether to update (--on-spike sets it); every rank
        # must return the same. Arguments: the loss, the gradient norm, the sums of squares of this
        # rank's gradients (`_square_sums`), and the factor from these to those of the mean loss.
        self.accepts: Callable[..., bool] = lambda *_: True
        self.buckets: list[Bucket] = []
        self.fully_sharded = factory.shard is not None
        self.last_backward: LastBackward | None = None  # of --zero 3 with sync_each_batch false
        self.groups: Sequence[ParamGroup]
        self._forget_gathered: Callable[[], None] = lambda: None  # at --zero 3: gathered weights
        if self.fully_sharded:
            from optim import fsdp  # only --zero 3 needs the 43 MB that this loads

            sharded_groups = fsdp.shard_fully(stages[0], factory, training)
            self._forget_gathered = partial(fsdp.forget_gathered, stages[0])
            if not layout.sync_each_batch:
                self.last_backward = fsdp.LastBackward(stages[0])
            # Experts that no other rank holds are not sharded.
            unsharded = [p for p in trained_parameters(stages) if not hasattr(p, "drawn_shape")]
            self.groups = [*sharded_groups, *self._make_buckets(unsharded, factory, zero=0)]
        else:
            self.groups = self._make_buckets(trained_parameters(stages), factory, layout.zero)
            if self._overlap:
                self._wait_in_forward(stages)
        self.parameters = list(stages.parameters())  # of this rank's stages, constants too
        self.update_sets = make_update_sets(self.groups, training)
        self.balance: RouterBalance | None = None
        if model is not None and model.experts > 1:
            self.balance = RouterBalance(stages, factory, training, model)
        if any(not p.requires_grad for p in stages.parameters()):
            self.groups = [*self.groups, ConstantGroup(stages, self.mesh)]
        kernels = dict.fromkeys(update_set.rule.kernel for update_set in self.update_sets)
        self.kernel = "; ".join(kernels) or "none"  # the optimizers' names, for the log
        self.state_kinds = OPTIMIZERS[training.optimizer].state
        if training.ema:
            self.state_kinds = (*self.state_kinds, EMA)
        self.state_name = interchangeable(training.optimizer)

    def _make_buckets(
        self, parameters: list[nn.Parameter], factory: ParamFactory, zero: int
    ) -> list[Bucket]:
        """Move parameters into buckets, with hooks that are told of each gradient; return them."""
        self.buckets = make_buckets(
            parameters,
            self.mesh,
            self.training,
            zero,
            factory.dtype,
            self._least_bucket,
            factory.mup,
        )
        self._bucket_of = {p: bucket for bucket in self.buckets for p, _ in bucket.places}
        # Python's collector does not look into hooks: a hook with a strong reference to the
        # optimizer would keep it alive for ever.
        optimizer = weakref.proxy(self)
        for p in parameters:
            p.register_post_accumulate_grad_hook(lambda p: optimizer._add_gradient(p))
            p.gradient_added = lambda p: optimizer._count_gradient(p)  # layers call this
        return self.buckets

    def begin_step(self, targets: int, micro_batches: int, counted: int | None = None) -> float:
        """Prepare for the backward passes of a step; return the loss weight, loss scale / targets.

        The caller multiplies every micro-batch's sum of losses by the loss weight, so that
        gradients are those of the mean loss times the loss scale. targets: the number of tokens in
        the global batch; `step` corrects the mean if some of them do not count. micro_batches:
        their number on each replica. Each bucket counts down the gradients it expects (two per tied
        matrix) and is reduced at zero: after the last micro-batch, with --zero 2 after each.
        counted: the number of targets that count; needed if loss masks leave some out and routers
        have auxiliary losses. These are means over all tokens, so they must not change with the
        correction in `step`.
        """
        self._targets = targets
        self._micro_batches = micro_batches
        self._gradients.clear()
        self._next_bucket = 0
        for bucket in self.buckets:
            passes_before_reduction = 1 if bucket.each_micro_batch else micro_batches
            bucket.missing = passes_before_reduction * bucket.passes
        if self.last_backward is not None:
            self.last_backward.begin_step(micro_batches)
        loss_weight = self.scale.value / targets
        self._loss_weight.value = loss_weight  # for the terms that layers add
        if self.balance is not None:
            # `step` multiplies all gradients by targets / counted.
            counted_share = 1.0 if counted is None else counted / targets
            self.balance.begin_step(loss_weight * counted_share)
        return loss_weight

    def _add_gradient(self, p: nn.Parameter) -> None:
        """Hook that autograd calls when it has added a micro-batch's gradient to `p.grad`.

        If the sum has another type, `p.grad` is added here; else autograd has added it in place.
        """
        bucket = self._bucket_of[p]
        if not bucket.each_micro_batch and p.dtype != p.main_grad.dtype:  # not --zero 2
            p.main_grad.add_(p.grad)  # for example bf16 to fp32, which autograd cannot add in place
            p.grad = None
        self._count_gradient(p)

    def _count_gradient(self, p: nn.Parameter) -> None:
        """Count a gradient, and start to reduce the buckets that are complete.

        Called when a micro-batch's gradient of `p` is in the bucket's buffer (--zero 2: `p.grad`).
        """
        if self.gradient_taker is not None:  # set by an audit, which repeats passes
            self.gradient_taker(p)
            return
        self._gradients[p] = self._gradients.get(p, 0) + 1
        self._bucket_of[p].missing -= 1
        self._reduce_ready_buckets()

    def _reduce_ready_buckets(self) -> None:
        """Start to reduce the buckets whose gradients are complete, in the order of the buckets.

        A complete bucket waits for the buckets before it, because all replicas must call these
        collectives in one order. `missing` is the number of gradients that a bucket still waits
        for; each micro-batch adds `passes` gradients. At --zero 2 the buckets begin again with each
        micro-batch.
        """
        while self._next_bucket < len(self.buckets):
            bucket = self.buckets[self._next_bucket]
            if bucket.missing > 0:
                return
            self._reductions.append(bucket.reduce())
            self._next_bucket += 1
            if bucket.each_micro_batch:  # --zero 2: count the next micro-batch's gradients again
                bucket.missing += bucket.passes
                self._next_bucket %= len(self.buckets)
                # A running reduction holds a copy of a whole bucket, so few of them may run.
                self._wait_for_reductions(allowed=1)

    def _wait_for_reductions(self, allowed: int) -> None:
        """Wait for the oldest reductions until at most `allowed` reductions are running."""
        while len(self._reductions) > allowed:
            self._reductions.pop(0).wait()

    def _finish_reducing(self) -> None:
        """End all reductions: over the replicas, then over tp and tied stages.

        Raise UserError if a parameter got more gradients than it should.
        """
        self._check_gradients()
        left = self.buckets[self._next_bucket :]  # not reduced yet: a parameter has no gradient
        if left and left[0].each_micro_batch:
            # At --zero 2 the first of them has held up all others, in each micro-batch: what they
            # have collected since is reduced at once.
            begun = self._next_bucket > 0 or any(b.missing < b.passes for b in self.buckets)
            left = [*left, *self.buckets[: self._next_bucket]] if begun else []
        for bucket in left:
            self._reductions.append(bucket.reduce())
        self._wait_for_reductions(allowed=0)
        for group in self.groups:
            group.reduce_further()
        for observe in self.after_reduction:
            observe()

    def _check_gradients(self) -> None:
        """Raise UserError if a parameter got more gradients than it has passes in a micro-batch.

        A linear layer that runs twice adds two. Its bucket would have been reduced before the last
        one. A parameter that got fewer, or none, is right: the loss does not depend on it.
        """
        for p, count in self._gradients.items():
            expected = self._micro_batches * getattr(p, "passes", 1)
            if count > expected:
                times = -(-count // max(1, self._micro_batches))
                raise ProgramError(
                    f"{p.spec.name} got {count} gradients in {self._micro_batches} micro-batches, "
                    f"not {expected}: a linear layer that runs {times} times in a micro-batch says "
                    f"so by `weight.passes = {times}`, and the same of its bias"
                )

    def _wait_in_forward(self, stages: nn.ModuleList) -> None:
        """Have each module of a stage wait for the gathering of its weights just before it runs.

        Called with overlap_param_gather: there a step ends while its weights are being gathered.
        """

        def waiting_hook(part: nn.Module) -> Callable:
            """Return a function that waits for the buckets with parameters of `part`."""
            buckets = dict.fromkeys(self._bucket_of[p] for p in trained_parameters(part))

            def wait(*_) -> None:
                for bucket in buckets:
                    bucket.wait_for_weights()

            return wait

        for stage in stages:
            for child in stage.children():  # embedding, blocks, head
                parts = child if isinstance(child, nn.ModuleList) else [child]
                for part in parts:
                    part.register_forward_pre_hook(waiting_hook(part))

    def finish_gathering(self) -> None:
        """Wait until all weights are gathered; called before weights are read outside of a pass.

        A training step needs no call: `_update` waits, or with overlap_param_gather the forward
        hooks do.
        """
        for group in reversed(self.groups):
            group.wait_for_weights()

    def step(self, lr: float, loss_sum: Tensor, targets: int | None = None) -> StepResult:
        """Reduce and clip the gradients, update the weights and gather them; collective over the
        world. Called after the backward passes of a step.

        lr: the learning rate. loss_sum: this rank's share of the sum of losses, 0 if another rank
        counts it, or (n,), with what Stage.forward adds to it; the result holds the means over the
        targets. targets: this rank's share of the number of targets, if loss masks make it
        known only after the forward passes; None: the number given to `begin_step`.
        If the gradient norm is not finite, if the batch has no target, or if `accepts` returns
        False, no rank updates its weights; without targets, norm and loss are 0. Raise UserError if
        fp16 overflows in 5 steps in a row at a scale that cannot fall any more.
        """
        recorder = self.mesh.recorder
        recorder.at("reduce")
        self._finish_reducing()
        squares = self._square_sums()  # of this rank's gradients, which are sums over the replicas
        # One all-reduce gives every rank the norm, the loss and, if asked for, the targets.
        parts = [squares.sum(), *loss_sum.double().view(-1)]
        if targets is not None:
            parts.append(torch.full_like(parts[1], targets))
        sums = torch.stack(parts)
        self.mesh.world.at_once.all_reduce(sums).wait()
        square, loss, *others = self.mesh.world.values(sums)
        counted = self._targets if targets is None else int(others.pop())  # of all ranks
        # Gradients were divided by the targets given to begin_step, not by those counted: correct.
        target_factor = self._targets / counted if counted else 0.0
        scale = self.scale.value  # gradients are those of the loss times this scale
        norm = math.nan
        if square >= 0:  # false for NaN: then the norm stays NaN
            norm = math.sqrt(square) / scale * target_factor
        overflowed = not math.isfinite(norm)
        recorder.at("optimizer")  # what this rank does from here on, for the report of a hang
        mean_loss = loss / max(1, counted)
        accepted = not counted or self.accepts(mean_loss, norm, squares, target_factor / scale)
        skipped = overflowed or not counted or not accepted
        if not skipped:
            self._update(lr, norm, target_factor)
        self._clear_gradients()
        if accepted:
            self.scale.update(overflowed)
        loads = None if self.balance is None else self.balance.finish_step(skipped)
        means = [other / max(1, counted) for other in others]
        z_loss = means.pop(0) if self.training.z_loss else None
        # The sum was multiplied by the weight, and by the targets of the next token over the own.
        weight = self.training.mtp_weight
        mtp_loss = means[0] / weight if means and weight else None
        return StepResult(norm, mean_loss, skipped, scale, loads, z_loss, mtp_loss)

    def discard(self) -> None:
        """Clear the gradients of passes without an update; called after the warm-up passes.

        Collective like `step`: it finishes the reductions that the passes have started.
        """
        self._finish_reducing()
        self._clear_gradients()
        if self.balance is not None:
            self.balance.discard()

    def _clear_gradients(self) -> None:
        """Set all gradients to zero, or at --zero 3 free them; called after a step."""
        buffers = [buffer for group in self.groups for buffer in group.clear_gradients()]
        if buffers:
            torch._foreach_zero_(buffers)

    def _square_sums(self) -> Tensor:
        """Return the sum of squares of each gradient in `counted_gradients`, float64: (shards,).

        Each element of the whole gradient counts on one rank, so the norm is a sum over all ranks.
        """
        gradients: list[Tensor] = []
        for group in self.groups:
            gradients += group.counted_gradients()
        if not gradients:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        exact = exact_dtype(gradients[0].dtype)
        return torch.stack(torch._foreach_norm(gradients, 2, exact)).double().square()

    def _update(self, lr: float, norm: float, target_factor: float) -> None:
        """Update all masters by their clipped gradients, and gather the weights or start to.

        lr: the learning rate. norm: that of the whole gradient before clipping. target_factor:
        corrects the number of targets by which the gradients are divided.
        """
        clip = self.training.clip_grad
        clip_factor = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        self.updates += 1
        for update_set in self.update_sets:
            update_set.update(clip_factor * target_factor / self.scale.value, lr)
        if not self._overlap:
            self.finish_gathering()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Have the weights be their average (--ema) inside of the block; collective over replicas.

        Called to evaluate between steps. The masters are the average meanwhile, and come back bit
        for bit.
        """
        self._swap_averages()
        try:
            yield
        finally:
            self._swap_averages()

    def _swap_averages(self) -> None:
        """Exchange masters and averages, and gather weights of the new masters."""
        self.finish_gathering()
        for rule in self._averages():
            rule.swap()
        self._forget_gathered()
        gather_weights(self.groups)
        self.finish_gathering()

    def _averages(self) -> list[AveragedRule]:
        """Return the rules that keep an average of their masters; none without --ema."""
        rules = [update_set.rule for update_set in self.update_sets]
        return [rule for rule in rules if isinstance(rule, AveragedRule)]

    def state_bytes(self) -> int:
        """Return the bytes of this rank's optimizer state.

        Masters count if they have another precision than the weights: otherwise they are views of
        the weights.
        """
        total = sum(update_set.rule.state_bytes() for update_set in self.update_sets)
        masters = [master for group in self.groups for master in group.masters]
        if any(master.dtype != self._dtype for master in masters):
            total += sum(master.nbytes for master in masters)
        return total

    # -- checkpoints ------------------------------------------------------------------------

    def owned(self) -> list[ParamShard]:
        """Return this rank's shards of master weights and optimizer state, to read or to write.

        Called to save or load a checkpoint, and to compare replicas.
        """
        return [shard for group in self.groups for shard in group.shards]

    def scalars(self) -> dict[str, float]:
        """Return the plain numbers of the state for a checkpoint, equal on every rank, by name."""
        return {"step": self.updates, **self.scale.state()}

    def after_load(
        self, scalars: dict[str, float] | None = None, has_average: bool = False
    ) -> None:
        """Round the masters to weights and gather the weights; collective over the replicas.

        Called when a checkpoint's loader has written masters and state into the shards of `owned`.
        scalars: what `scalars` returned for the checkpoint; None: only weights have been loaded.
        has_average: whether the checkpoint has the average of --ema; otherwise it begins here.
        """
        if not has_average:
            for rule in self._averages():
                rule.begin()
        if scalars is not None:
            self.updates = int(scalars["step"])
            self.scale.load(scalars)
            for update_set in self.update_sets:
                update_set.rule.set_steps(self.updates)
        self._forget_gathered()  # those of an evaluation before the load
        gather_weights(self.groups)
        self.finish_gathering()


class UpdateSet:
    """Groups whose masters one rule updates together, with as many kernels as for one group.

    masters: the masters of all groups, in order; rule: the update rule that was made with them.
    """

    def __init__(self, groups: list[ParamGroup], training: Training):
        """Make the rule of the groups, which have one key; UserError if its package is missing."""
        self.groups = groups
        key = groups[0].key
        self.masters: list[Tensor] = []
        for group in groups:
            group.first = len(self.masters)  # index of the group's first master in the rule's list
            self.masters += group.masters
        self.rate = update_rules.rate_factor(training, key.family) * key.rate
        buckets = [group for group in groups if isinstance(group, Bucket)]
        self.rule: Rule
        if key.family == "muon":
            from optim import muon  # no other optimizer needs this module

            decay = training.weight_decay / key.rate  # muP keeps the rate of decay
            self.rule = muon.make_rule(training, self.masters, buckets, groups[0].mesh, decay)
        else:
            self.rule = update_rules.make_rule(
                training, key.family, self.masters, not key.no_decay, key.rate, key.eps
            )
        if training.ema:
            self.rule = AveragedRule(self.rule, self.masters, training.ema)
        for group in groups:
            group.rule = self.rule

    def update(self, factor: float, lr: float) -> None:
        """Update the masters by the gradients times `factor`, and start to gather the weights.

        factor: turns the sums into clipped gradients of the mean loss. lr: the learning rate.
        """
        gradients = [g for group in self.groups for g in group.own_gradients()]
        if gradients and gradients[0].dtype != self.masters[0].dtype:  # --grad-dtype bf16
            exact_gradients = [torch.empty_like(g, dtype=self.masters[0].dtype) for g in gradients]
            torch._foreach_copy_(exact_gradients, gradients)
            gradients = exact_gradients
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        self.rule.update([g.view_as(m) for g, m in zip(gradients, self.masters)], lr * self.rate)
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

    A key (optim/buckets.py) has up to SETS_OF_KEY sets, or SETS_OF_MUON, because the weights of a
    set are gathered while the next set is updated. With --grad-dtype bf16 a set has about the size
    of a bucket, because its gradients are copied to fp32.
    """
    # `groups` begins with the last layers, so it is reversed. The groups of one key are adjacent.
    sets: list[UpdateSet] = []
    for _, groups_of_key in groupby(reversed(groups), key=lambda group: group.key):
        members = list(groups_of_key)
        sizes = [sum(master.numel() for master in group.masters) for group in members]
        most_sets = SETS_OF_MUON if members[0].key.family == "muon" else SETS_OF_KEY
        set_size = -(-sum(sizes) // most_sets)  # elements of a set, rounded up
        if training.grad_dtype == "bf16":
            set_size = min(set_size, BUCKET_ELEMENTS)  # update() copies a set's gradients to fp32
        groups_of_set: dict[int, list[ParamGroup]] = {}
        elements_before = 0
        for group, size in zip(members, sizes):
            set_number = elements_before // max(1, set_size)  # the set in which the group begins
            groups_of_set.setdefault(set_number, []).append(group)
            elements_before += size
        sets += [UpdateSet(groups_here, training) for groups_here in groups_of_set.values()]
    return sets
