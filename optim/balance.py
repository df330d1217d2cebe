"""The balance between the experts of a block, which no layout changes.

Without a balance a few experts take most tokens. --balance has three kinds:

    bias       after a step, an expert with fewer rows than the mean in the global batch gets a
               bias larger by --balance-rate, one with more a smaller one (arXiv 2408.15664)
    sequence   an auxiliary loss from each sample's own choices (arXiv 2412.19437, equation 17)
    global     the same loss with the loads of the whole global batch of the step before

Losses from the choices of a micro-batch or of a rank would depend on the layout. The loads of the
current global batch are known only after its last forward pass, which comes after the first
backward pass. All sums over ranks here are sums of integers. Read experts.py first.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from config.schema import Config
from distributed.mesh import Mesh
from experts import Balance, Router
from optim.buckets import Key, ParamGroup


class RouterBalance:
    """Counts the rows of every expert in a step, and updates the routers' biases and loads.

    loads: after each step, the rows of each expert of each block relative to the mean, (blocks,
    experts), equal on every rank; None before the first step.
    """

    def __init__(self, stages: Iterable[Any], mesh: Mesh, config: Config, device: torch.device):
        """stages: those of this rank. device: that of the counts."""
        self.mesh = mesh
        self.device = device
        self.training = config.training
        self.shape = (config.model.layers, config.model.experts)
        self.routers: dict[int, Router] = {}  # by the number of the block
        for stage in stages:
            for n, block in enumerate(stage.blocks):
                self.routers[stage.spec.first + n] = block.mlp.router
        self.loads: Tensor | None = None

    def begin_step(self, loss_weight: float) -> None:
        """Prepare the routers for the passes of a step; loss_weight: by Optimizer.begin_step."""
        training = self.training
        kind, rate = training.balance, training.balance_rate
        for router in self.routers.values():
            router.balance = Balance(kind, rate, training.router_z_loss, loss_weight)

    def discard(self) -> None:
        """Forget the rows that were counted; called after the warm-up passes."""
        for router in self.routers.values():
            router.counts.zero_()

    @torch.no_grad()
    def finish_step(self, skipped: bool) -> None:
        """Sum the counts over all ranks and update the routers, unless the step was skipped.

        Called after the optimizer's step; collective over the world.
        """
        counts = torch.zeros(self.shape, dtype=torch.int64, device=self.device)
        for block, router in self.routers.items():
            counts[block] = router.counts
        self.discard()
        self.mesh.world.at_once.all_reduce(counts).wait()
        experts = self.shape[1]
        rows = counts.sum(1, keepdim=True)
        self.loads = counts * experts / rows.double()
        if skipped:
            return
        for block, router in self.routers.items():
            router.load.copy_(self.loads[block])
            if self.training.balance == "bias":
                missing = (rows[block] - experts * counts[block]).sign()
                router.bias.add_(missing, alpha=self.training.balance_rate)


class _NoState:
    """The update rule of tensors that are never updated: every state tensor is zero."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = tensors

    def read(self, kind: str, index: int, start: int, stop: int) -> Tensor:
        """Return zeros, as many as the elements [start, stop)."""
        return self.tensors[index].new_zeros(stop - start)

    def write(self, kind: str, index: int, start: int, values: Tensor) -> None:
        """Do nothing: a checkpoint has zeros here."""


class ConstantGroup(ParamGroup):
    """Tensors that no gradient updates, equal on all ranks of a stage; a checkpoint has them."""

    def __init__(self, constants: list[nn.Parameter], mesh: Mesh):
        super().__init__(Key(("replicas",), True, "plain"), mesh, sharded=False)
        self.masters = [p.data for p in constants]
        self.first = 0
        rule: Any = _NoState(self.masters)
        self.rule = rule
        for i, p in enumerate(constants):
            self.add_shard(p.spec, tuple(p.shape), 0, p.numel(), (i, 0))

    def own_gradients(self) -> list[Tensor]:
        """Return no gradients."""
        return []

    def counted_gradients(self) -> list[Tensor]:
        """Return no gradients."""
        return []

    def reduce_further(self) -> None:
        """Do nothing: there are no gradients."""

    def clear_gradients(self) -> list[Tensor]:
        """Return no buffers."""
        return []

    def masters_to_round(self) -> list[tuple[Tensor, Tensor]]:
        """Return no pairs: the tensors are their own masters."""
        return []

    def all_gather_params(self) -> None:
        """Do nothing: every rank has all of the tensors."""
