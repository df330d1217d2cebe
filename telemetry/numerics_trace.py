"""The numbers of a step in sketches: `--trace-numerics STEP ...` writes OUT/numerics/step-N.npz.

The file has a sketch (telemetry/sketches.py) for every named tensor, in order of execution:

    activations   tokens, labels, outputs of embedding, attention and blocks, losses; then the
                  gradients of these outputs; (tensors, bins, 12): a bin holds some of the samples
    parameters    (kinds, tensors, 12): weights before the step, gradients before clipping, state of
                  the optimizer and weights after the step

All ranks' sketches are added, so the file does not depend on the layout, but for rounding. To
measure how much rounding is to be expected, the passes of a traced step run twice: the first time
with the last bit of every weight flipped. The change of each sketch by it is beside the sketch:
`activations_response` and `gradients_response`. The gradients of the first passes are discarded,
and flipping the bits again restores the weights, so a traced run has the weights of any other.

numerics/diff.py compares two files.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from config.schema import Config
from data import Batch, first_of_micro_batch
from optim.buckets import ParamShard
from parallel import ParamFactory
from telemetry.sketches import NUMBERS, Sketches, of_activation, of_shard
from zero import Optimizer, StepResult

FORMAT = 1
MOST_BINS = 32
MOST_BYTES = 950_000  # of the arrays of a file, by fewer bins; names need 40,000 more
# Bits of a number below those that a precision keeps, of the 52 that fp64 keeps.
LOST_BITS = {torch.float64: 0, torch.float32: 29, torch.float16: 42, torch.bfloat16: 45}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
BEFORE, GRADIENT, AFTER = "weights before", "gradient", "weights after"


def activation_names(layers: int) -> list[str]:
    """Return the names of a model's activations and their gradients in order of execution."""
    outputs = ["embedding"]
    for block in range(layers):
        outputs += [f"blocks.{block}.attention", f"blocks.{block}"]
    outputs.append("head.norm")
    gradients = [f"gradient of {name}" for name in reversed(outputs)]
    return ["tokens", *outputs, "labels", "loss", *gradients]


def bins(batch: int, activations: int, parameters: int, kinds: int) -> int:
    """Return the number of bins of the samples of a step, such that a file is small enough."""
    most = min(MOST_BINS, batch)
    fixed = parameters * NUMBERS * (8 * kinds + 4)
    while most > 1 and fixed + most * activations * NUMBERS * 12 > MOST_BYTES:
        most = (most + 1) // 2
    return most


class NumericsTrace:
    """Traces the steps of --trace-numerics; every rank calls the same methods."""

    def __init__(
        self,
        state: Any,
        passes: Callable[..., Any],
        step: Callable[..., StepResult],
        gather: Callable[[str, Any], list[Any]],
        writing: Callable[[str], AbstractContextManager],
    ):
        """Collective over the world. state, passes, step: of trainer.py. gather: returns every
        rank's value. writing: the context in which a file is written.
        """
        self.state = state
        self.config: Config = state.config
        self.factory: ParamFactory = state.factory
        self.optimizer: Optimizer = state.optimizer
        self.passes = passes
        self.take_step = step
        self.writing = writing
        self.iteration = 0
        self.activations = activation_names(self.config.model.layers)
        self.kinds = [BEFORE, GRADIENT, *self.optimizer.state_kinds, AFTER]
        own = [spec.name for spec in self.optimizer.specs]
        found = dict.fromkeys(name for names in gather("numerics", own) for name in names)
        self.parameters = sorted(found, key=_place)
        self.row_of = {name: row for row, name in enumerate(self.parameters)}

    def step(self, samples: Any, consumed: int, lr: float) -> StepResult:
        """Do one optimizer step, as trainer.step, and write its trace if the options ask for it."""
        self.iteration = self.factory.mesh.recorder.place[1]
        if self.iteration not in self.config.run.trace_numerics:
            return self.take_step(self.state, samples, consumed, lr)
        batch = self.config.batches.batch(consumed)
        self.bins = bins(batch, len(self.activations), len(self.parameters), len(self.kinds))
        real, perturbed = self._table(), self._table()
        self.optimizer.finish_gathering()
        self._add_parameters(real, BEFORE, "weights")
        self._flip_last_bits()
        with self._observing(perturbed, consumed):
            self.passes(self.state, samples, consumed, keep=True)
            self.optimizer.discard()
        self._flip_last_bits()
        with self._observing(real, consumed):
            result = self.take_step(self.state, samples, consumed, lr)
        self.optimizer.finish_gathering()
        for kind in self.optimizer.state_kinds:
            self._add_parameters(real, kind, kind)
        self._add_parameters(real, AFTER, "weights")
        world = self.factory.mesh.world
        arrays = real.total(world), perturbed.total(world)
        if self.factory.mesh.rank == 0:
            self._write(*arrays, self._about(consumed, batch, lr, result))
        return result

    def _table(self) -> Sketches:
        rows = len(self.activations) * self.bins + len(self.kinds) * len(self.parameters)
        return Sketches(rows, self.factory.device)

    # -- parameters -------------------------------------------------------------------------

    def _counted(self) -> list[ParamShard]:
        """Return the shards that no other rank counts."""
        owned = self.optimizer.owned()
        return [shard for shard in owned if not shard.spec.copy and shard.copy == 0]

    def _add(
        self, table: Sketches, kind: str, shard: ParamShard, values: Tensor, scale: float
    ) -> None:
        row = len(self.activations) * self.bins
        row += self.kinds.index(kind) * len(self.parameters) + self.row_of[shard.spec.name]
        rows = torch.tensor([row], device=values.device)
        table.add(rows, *of_shard(shard, values, scale))

    def _add_parameters(self, table: Sketches, kind: str, read: str) -> None:
        for shard in self._counted():
            self._add(table, kind, shard, shard.read(read, shard.start, shard.stop), 1.0)

    def _add_gradients(self, table: Sketches) -> None:
        scale = 1.0 / self.optimizer.scale.value
        for shard in self._counted():
            gradients = shard.group.own_gradients()
            if gradients:  # tensors without gradients have none
                flat = gradients[shard.master].view(-1)
                values = flat[shard.offset : shard.offset + shard.stop - shard.start]
                self._add(table, GRADIENT, shard, values, scale)

    def _flip_last_bits(self) -> None:
        """Flip the last bit, in the precision of computation, of every weight on this rank.

        Whether that adds or subtracts depends on the weight alone, so not on the layout.
        """
        for p in self.state.stages.parameters():
            if p.requires_grad:
                held: Any = p.data
                local = held.to_local() if hasattr(held, "to_local") else held
                bits = max(0, LOST_BITS[self.factory.dtype] - LOST_BITS[local.dtype])
                local.view(INTEGERS[local.element_size()]).bitwise_xor_(1 << bits)

    # -- activations ------------------------------------------------------------------------

    @contextmanager
    def _observing(self, table: Sketches, consumed: int) -> Iterator[None]:
        """Add the activations and gradients of the passes inside to the table."""
        observe = partial(self._add_gradients, table)
        observer = _Observer(self, table, consumed)
        handles = list(observer.hooks(self.state.pipeline.stages))
        self.optimizer.after_reduction.append(observe)
        try:
            yield
        finally:
            self.optimizer.after_reduction.remove(observe)
            for handle in handles:
                handle.remove()

    # -- the file ---------------------------------------------------------------------------

    def _about(self, consumed: int, batch: int, lr: float, result: StepResult) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": self.iteration,
            "first_sample": consumed,
            "samples": batch,
            "length": self.config.length(consumed),
            "bins": self.bins,
            "learning_rate": lr,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "loss_scale": result.loss_scale,
            "skipped": result.skipped,
            "precision": self.config.training.precision,
            "layout": asdict(self.config.layout),
            "torch": torch.__version__,
            "activations": self.activations,
            "parameters": self.parameters,
            "kinds": self.kinds,
        }

    def _write(self, real: np.ndarray, perturbed: np.ndarray, about: dict[str, Any]) -> None:
        cut = len(self.activations) * self.bins
        shape = len(self.activations), self.bins, NUMBERS
        of_kinds = len(self.kinds), len(self.parameters), NUMBERS
        change = (perturbed - real).astype(np.float32)
        arrays = {
            "activations": real[:cut].reshape(shape),
            "activations_response": change[:cut].reshape(shape),
            "parameters": real[cut:].reshape(of_kinds),
            "gradients_response": change[cut:].reshape(of_kinds)[self.kinds.index(GRADIENT)],
            "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
        }
        folder = os.path.join(self.config.run.out, "numerics")
        path = os.path.join(folder, f"step-{self.iteration:06d}.npz")
        with self.writing(path):
            os.makedirs(folder, exist_ok=True)
            with open(path + ".new", "wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
            os.replace(path + ".new", path)


def _place(name: str) -> tuple[int, int, str]:
    """Return the place of a parameter in the order of execution: part, block, name outside."""
    part, block = [*name.split("."), ""][:2]
    if part == "blocks":
        return 1, int(block), ""
    if part == "embedding":
        return 0, 0, name.replace("tokens", "")
    return 2, 0, name


class _Observer:
    """The hooks that add one step's activations and their gradients to a table.

    A stage does its forward passes in the order of the micro-batches. The layers of a stage run
    again in the backward pass if they are recomputed; they are observed only inside the stage's own
    forward pass.
    """

    def __init__(self, trace: NumericsTrace, table: Sketches, consumed: int):
        self.trace = trace
        self.table = table
        self.mesh = trace.factory.mesh
        self.batch = trace.config.batches.batch(consumed)
        length = trace.config.length(consumed)
        self.split = trace.factory.sequence_parallel
        self.positions = self.mesh.cp.balanced_shard(torch.arange(length), 0)
        self.passes: dict[int, int] = {}  # forward passes so far, by stage
        self.micro_batch: int | None = None  # of the forward pass that runs

    def hooks(self, stages: dict[int, Any]) -> Iterator[RemovableHandle]:
        """Register all hooks; yield their handles."""
        last = max(spec.index for spec in self.trace.state.stage_specs)
        for index, stage in stages.items():
            yield stage.register_forward_pre_hook(partial(self._begin, index, last))
            yield stage.register_forward_hook(self._end)
            for name, part in _parts(stage):
                yield part.register_forward_hook(partial(self._after, name))

    def _begin(self, stage: int, last: int, module: nn.Module, inputs: tuple) -> None:
        self.micro_batch = self.passes.get(stage, 0)
        self.passes[stage] = self.micro_batch + 1
        batch: Batch | None = inputs[1]
        if batch is not None and stage == 0:
            self._add("tokens", self.micro_batch, batch.tokens.t()[..., None], False)
        if batch is not None and stage == last:
            self._add("labels", self.micro_batch, batch.labels.t()[..., None], False)

    def _end(self, *_: Any) -> None:
        self.micro_batch = None

    def _after(self, name: str, module: nn.Module, inputs: tuple, output: Any) -> None:
        if self.micro_batch is None:
            return
        if name == "loss":
            self._add(name, self.micro_batch, output.detach()[..., None], False)
            return
        last = output
        total = output
        if isinstance(output, tuple):  # a block's output is the sum of two tensors
            total = output[0] + output[1]
            last = output[1]
        self._add(name, self.micro_batch, total.detach(), self.split)
        if last.requires_grad:
            last.register_hook(partial(self._gradient, f"gradient of {name}", self.micro_batch))

    def _gradient(self, name: str, micro_batch: int, gradient: Tensor) -> None:
        scale = 1.0 / self.trace.optimizer.scale.value
        self._add(name, micro_batch, gradient, self.split, scale)

    def _add(self, name: str, micro_batch: int, x: Tensor, split: bool, scale: float = 1.0) -> None:
        """Add an activation (s, b, h) of a micro-batch; split: over tp, else all ranks have it."""
        tp = self.mesh.tp
        if tp.rank > 0 and not split:
            return
        trace = self.trace
        positions = tp.shard(self.positions) if split else self.positions
        first = first_of_micro_batch(0, micro_batch, trace.config.layout, self.mesh.dp.rank)
        samples = torch.arange(first, first + x.shape[1], device=x.device)
        rows = samples * trace.bins // self.batch + trace.activations.index(name) * trace.bins
        self.table.add(rows, *of_activation(x, positions.to(x.device), samples, scale))


def _parts(stage: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of a stage that are observed, with their names."""
    if stage.embedding is not None:
        yield "embedding", stage.embedding
    for number, block in enumerate(stage.blocks, stage.spec.first):
        yield f"blocks.{number}.attention", block.attention
        yield f"blocks.{number}", block
    if stage.output_norm is not None:
        yield "head.norm", stage.output_norm
    if stage.head is not None:
        yield "head.norm", stage.head.norm
        yield "loss", stage.head
