"""The balance between the experts of a block, which no layout changes.

Without a balance a few experts take most tokens. --balance has three kinds:

    bias       after a step, an expert with fewer rows than the mean in the global batch gets a
               bias larger by --balance-rate, one with more a smaller one (arXiv 2408.15664)
    sequence   an auxiliary loss from each sample's own choices (arXiv 2412.19437, equation 17)
    global     the same loss with the loads of the whole global batch of the step before

Losses from the choices of a micro-batch or of a rank would depend on the layout. The loads of the
current global batch are known only after its last forward pass, which comes after the first
backward pass. All sums over ranks here are sums of integers, which no order of the ranks changes.

A row is one token at one of its k experts; the load of an expert is its number of rows over the
mean of all experts. b samples, T tokens of this rank, E experts of a block. Read layers/experts.py
first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from architecture.shape import ModelShape
from config.schema import EMA, Training
from distributed.mesh import Mesh
from distributed.token_exchange import occurrences
from layers.experts import Router, RouterOutput
from layers.loss import add_gradient_of
from optim.buckets import Key, ParamGroup, ParamShard
from parallel import ParamFactory


@dataclass(frozen=True)
class Penalty:
    """The auxiliary losses of a step: the routers of all blocks share it.

    kind: the value of --balance. rate: the factor of the loss of --balance. z_rate: the factor of
    the z-loss, which keeps the router's logits small (--router-z-loss). weight: the factor of each
    sum over tokens, which makes it the mean over all tokens of the global batch.
    """

    kind: str
    rate: float
    z_rate: float
    weight: float

    def add_penalty(self, router: Router, weights: Tensor, choice: RouterOutput) -> Tensor:
        """Return `weights`, whose backward pass adds the gradient of the auxiliary losses.

        The router calls this in each forward pass of training. weights: the weights that the router
        gives to the experts' outputs, (T, k). Each loss is a mean over all tokens, also those whose
        labels do not count in the language loss.
        """
        adds_loads = self.kind in ("sequence", "global")
        if not (adds_loads or self.z_rate):  # --balance none or bias, and no z-loss
            return weights
        penalty = choice.logits.new_zeros(())
        if adds_loads:
            # "global": the loads of the step before, (E,). "sequence": for each token the loads of
            # the experts in the token's sample, (T, E).
            loads: Tensor = router.load
            if self.kind == "sequence":
                loads = _loads_of_tokens(router.mesh, choice)
            shares = choice.scores / choice.scores.sum(-1, keepdim=True)
            penalty = penalty + self.rate * (shares * loads.to(shares.dtype)).sum()
        if self.z_rate:  # the z-loss, which keeps the logits small
            penalty = penalty + self.z_rate * choice.logits.logsumexp(-1).square().sum()
        return add_gradient_of(weights, penalty * self.weight)


def _loads_of_tokens(mesh: Mesh, choice: RouterOutput) -> Tensor:
    """Return for each token the loads of the experts in the token's sample, float64: (T, E).

    A load of 2 says that the expert has twice as many rows of this sample as the mean expert. The
    tokens of a sample may be on several ranks of cp and of tp, whose counts are summed.
    """
    experts = choice.scores.shape[-1]
    start, tokens = choice.start, len(choice.experts)
    sample = torch.arange(start, start + tokens, device=choice.experts.device) % choice.samples
    # One number for each pair (sample, expert), so that pairs can be counted: (T, k).
    numbers = sample[:, None] * experts + choice.experts
    counts = occurrences(numbers.flatten(), choice.samples * experts)
    for group in (mesh.tp, mesh.cp):
        group.at_once.all_reduce(counts).wait()
    counts = counts.view(-1, experts)
    return (counts * experts / counts.sum(-1, keepdim=True).double())[sample]


class RouterBalance:
    """Counts the rows of every expert in a step, and updates the routers' biases and loads.

    Optimizer has such an object if the model has experts, and calls its methods in each step.
    """

    def __init__(
        self, stages: Iterable[Any], factory: ParamFactory, training: Training, model: ModelShape
    ):
        """Find the routers in `stages`, this rank's stages; begin_step then gives them a Balance.

        Optimizer makes this object if the model has experts.
        """
        self.mesh = factory.mesh
        self.device = factory.device
        self.training = training
        blocks = model.layers + model.mtp_depth
        self.shape = (blocks, model.experts)  # of the counts of rows in `finish_step`
        self.blocks_with_experts = [n for n in range(blocks) if model.has_experts(n)]
        self.routers: dict[int, Router] = {}  # by the number of the block in the whole model
        for stage in stages:
            for n, block in stage.numbered_blocks():
                if block.has_experts:
                    self.routers[n] = block.mlp.router

    def begin_step(self, weight: float) -> None:
        """Give the routers the auxiliary losses for the passes of a step.

        weight: the factor of each sum of auxiliary losses over tokens (Penalty).
        """
        training = self.training
        z_rate = training.router_z_loss
        penalty = Penalty(training.balance, training.balance_rate, z_rate, weight)
        for router in self.routers.values():
            router.balance = penalty

    def discard(self) -> None:
        """Set the counts of rows to 0; called after a step, and after passes without an update."""
        for router in self.routers.values():
            router.counts.zero_()

    @torch.no_grad()
    def finish_step(self, skipped: bool) -> list[float]:
        """Sum the counts over all ranks, and update the routers unless the step was skipped.

        Called after the optimizer's update; collective over the world. Return for each block with
        experts the rows of its busiest expert, over the mean of its experts.
        """
        # (blocks of the whole model, experts): each rank fills in the blocks of its own stages, and
        # the sum over ranks fills in the blocks of other stages.
        counts = torch.zeros(self.shape, dtype=torch.int64, device=self.device)
        for block, router in self.routers.items():
            counts[block] = router.counts
        self.discard()
        self.mesh.world.at_once.all_reduce(counts).wait()
        experts = self.shape[1]
        rows = counts.sum(1, keepdim=True)  # of all experts of each block, (blocks, 1)
        loads = counts * experts / rows.double()  # each count over the mean of its block
        if not skipped:
            for block, router in self.routers.items():
                router.load.copy_(loads[block])
                if self.training.balance == "bias":
                    # 1 if an expert has fewer rows than the mean, -1 if it has more, else 0; in
                    # integers, so that no rounding decides.
                    below_mean = (rows[block] - experts * counts[block]).sign()
                    router.bias.add_(below_mean, alpha=self.training.balance_rate)
        return self.mesh.world.values(loads[self.blocks_with_experts].amax(1))


class _NoState:
    """The update rule of tensors that are never updated: every state tensor is zero."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = tensors

    def read(self, kind: str, index: int, start: int, stop: int) -> Tensor:
        """Return zeros for the elements [start, stop) of tensor `index`, which has no such state.

        A checkpoint saves each kind of optimizer state, such as kind "exp_avg", for every tensor,
        also for these tensors, which no optimizer updates. So zeros stand in their places. In the
        average of the weights (--ema) they are what they are in the weights.
        """
        if kind == EMA:
            return self.tensors[index].view(-1)[start:stop]
        return self.tensors[index].new_zeros(stop - start)

    def write(self, kind: str, index: int, start: int, values: Tensor) -> None:
        """Do nothing; called when a checkpoint is loaded, which has zeros for these tensors."""


class ConstantGroup(ParamGroup):
    """The constants: the routers' biases and loads, and others; a checkpoint has them.

    No gradient updates them. They are equal on all ranks of a stage. Being a ParamGroup lets the
    checkpointer save and load them as other tensors; the methods that handle gradients have
    nothing to do here.
    """

    def __init__(self, stages: nn.ModuleList, mesh: Mesh):
        """Take all tensors of `stages`, the stages of this rank, that have no gradient.

        They are the masters of a group without gradients, so that checkpoints are written and read
        through the same shards as for parameters. Their rule has no optimizer state.
        """
        constants = [p for p in stages.parameters() if not p.requires_grad]
        super().__init__(Key(("replicas",), True, "plain"), mesh, sharded=False)
        self.masters = [p.data for p in constants]
        self.first = 0
        rule: Any = _NoState(self.masters)
        self.rule = rule
        for i, p in enumerate(constants):
            self.add_shard(p.spec, tuple(p.shape), 0, p.numel(), (i, 0))

    def own_gradients(self) -> list[Tensor]:
        """Return no gradients: no gradient updates the routers' biases and loads."""
        return []

    def counted_shards(self) -> list[ParamShard]:
        """Return no shards for the gradient norm: routers' biases and loads have no gradients."""
        return []

    def clear_gradients(self) -> list[Tensor]:
        """Return no buffers: routers' biases and loads have no gradients to set to zero."""
        return []

    def masters_to_round(self) -> list[tuple[Tensor, Tensor]]:
        """Return no pairs: the routers' biases and loads are their own masters."""
        return []

    def all_gather_params(self) -> None:
        """Do nothing: every rank of a stage has all of its routers' biases and loads."""
