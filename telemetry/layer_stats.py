"""--stats-every: by layer the norms of gradient and weights, and the largest activation.

    stats = LayerStats(config, stages, optimizer, mesh)
    stats.begin(iteration)        before a step: listens to the stages if the row is due
    row = stats.finish()          after it: the fields of metrics.jsonl, empty if none is due

Layers are `embedding`, `blocks.0`, ..., `head` (a tied matrix is the embedding's). The squares of
the gradient norms add up to that of `grad_norm`, before clipping; weights are the masters after the
step; an activation is what leaves the embedding, a block, or the final norm. Every element counts
on one rank, so no layout changes a number but by rounding.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from config.schema import Config
from distributed.collectives import MAX
from distributed.mesh import Mesh
from optim.buckets import ParamGroup, ParamShard
from zero import Optimizer

FIELDS = ("layer_grad_norm", "layer_weight_norm", "layer_activation_max")


class LayerStats:
    """Collects one rank's part during a step, and joins the parts of all ranks."""

    def __init__(self, config: Config, stages: nn.ModuleList, optimizer: Optimizer, mesh: Mesh):
        self.every, self.stages, self.mesh = config.run.stats_every, stages, mesh
        self.optimizer = optimizer
        self.names = ["embedding", *(f"blocks.{i}" for i in range(config.model.layers)), "head"]
        self.place = {name: i for i, name in enumerate(self.names)}
        self.due, self.hooks = False, list[RemovableHandle]()
        self.squares = self.largest = torch.empty(0)

    def begin(self, iteration: int) -> None:
        """Listen during the step that follows, if its row is due."""
        self.due = self.every > 0 and iteration % self.every == 0
        if not self.due:
            return
        device, count = self.optimizer.device, len(self.names)
        self.squares = torch.zeros(2, count, dtype=torch.float64, device=device)
        self.largest = torch.zeros(count, dtype=torch.float64, device=device)
        stage: Any  # a model.Stage
        for stage in self.stages:
            blocks = range(stage.spec.first, stage.spec.last)
            parts = {f"blocks.{i}": block for i, block in zip(blocks, stage.blocks)}
            norm = stage.head.norm if stage.head else stage.output_norm
            parts |= {"embedding": stage.embedding, "head": norm}
            for name, part in parts.items():
                if part is not None:
                    self.hooks.append(part.register_forward_hook(self._listener(self.place[name])))
        self.optimizer.before_update = self._add_gradients

    def finish(self) -> dict[str, Any]:
        """The fields of the row that is due, else none; collective over the world then."""
        if not self.due:
            return {}
        while self.hooks:
            self.hooks.pop().remove()
        self.optimizer.before_update = None
        for shard in self.optimizer.owned():
            self._add(1, shard, shard.read("weights", shard.start, shard.stop))
        self.mesh.world.at_once.all_reduce(self.squares).wait()
        self.mesh.world.at_once.all_reduce(self.largest, MAX).wait()
        tables = [*self.squares.sqrt().tolist(), self.largest.tolist()]
        return {field: dict(zip(self.names, table)) for field, table in zip(FIELDS, tables)}

    def _listener(self, place: int) -> Callable:
        def hook(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            if output.numel():
                found = output.detach().abs().amax().double()
                self.largest[place] = torch.maximum(self.largest[place], found)

        return hook

    def _add_gradients(self, groups: Sequence[ParamGroup], factor: float) -> None:
        """As Optimizer.before_update: the owned gradients are to be multiplied by `factor`."""
        for group in groups:
            gradients = group.own_gradients()
            for shard in group.shards:
                stop = shard.offset + shard.stop - shard.start
                self._add(0, shard, gradients[shard.master][shard.offset : stop], factor)

    def _add(self, row: int, shard: ParamShard, values: Tensor, factor: float = 1.0) -> None:
        """Add the squares of a parameter's elements to its layer, on one of the ranks with them."""
        if shard.copy or shard.spec.copy:
            return
        layer = ".".join(shard.spec.name.split(".")[:2])
        place = self.place[layer if layer in self.place else layer.partition(".")[0]]
        norm = torch.linalg.vector_norm(values, dtype=torch.float64)
        self.squares[row, place] += (norm * factor) ** 2
