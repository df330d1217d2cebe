"""Sketches of a step's tensors: `--trace-numerics STEP ...` writes OUT/numerics/step-N.npz.

The file has a sketch (telemetry/sketches.py) of every named tensor. Its rows are:

    activations x bins of samples      tokens, outputs of embedding, attention and blocks, labels,
                                       losses; then the gradients of these outputs
    kinds x parameters                 gradients before clipping, weights before the step, state of
                                       the optimizer and weights after the step

A bin is a range of the step's samples, whose sketches are added: with 8 samples and 4 bins, samples
0 and 1 are bin 0. A kind is one of these tensors of a parameter, such as "gradient" or "exp_avg".

All ranks' sketches are added, so the file does not depend on the layout, except for rounding. To
measure how much rounding is to be expected, the passes of the first traced step run twice, the
first time with the last bit of every weight flipped. `response` is the norm of the resulting change
of each activation and gradient over its norm; the files of later steps repeat it. The gradients of
the first passes are discarded, and flipping the bits again restores the weights, so a traced run
has the same weights as a run without traces.

tools/numerics/diff.py compares two files.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from architecture.shape import ModelShape
from config.schema import Config
from data import Batch, Samples, first_of_micro_batch
from parallel import ParamFactory
from telemetry.observer import Observer, Step
from telemetry.sketches import (
    NUMBERS,
    PROJECTED,
    SQUARES,
    Sketches,
    activation_sketch,
    shard_sketch,
)
from zero import Optimizer, StepResult

FORMAT = 2
MOST_BINS = 32
# The arrays of a file have at most this many bytes, for which larger models get fewer bins. The
# names of tensors need some 40,000 bytes more, so that a file stays below 1 MB.
MOST_BYTES = 950_000
# By precision, how many bits fewer than fp64 the mantissa of a number has.
LOST_BITS = {torch.float64: 0, torch.float32: 29, torch.float16: 42, torch.bfloat16: 45}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # the type by an element's bytes
GRADIENT, BEFORE, AFTER = "gradient", "weights before", "weights after"


def activation_names(model: ModelShape) -> list[str]:
    """Return the names of a model's activations and their gradients, in the order of execution.

    A block's are those of its mixers, attention alone in most models, and its own.
    """
    outputs = ["embedding"]
    for block in range(model.layers):
        outputs += [f"blocks.{block}.{name}" for name in model.mixers_of(block)]
        outputs.append(f"blocks.{block}")
    outputs.append("head.norm")
    for block in range(model.layers, model.layers + model.mtp_depth):
        outputs += [f"blocks.{block}.attention", f"blocks.{block}"]
    gradients = [f"gradient of {name}" for name in reversed(outputs)]
    return ["tokens", *outputs, "labels", "loss", *gradients]


def bins(batch: int, activations: int, parameters: int, kinds: int) -> int:
    """Return the number of bins of a step's samples with which a file has at most MOST_BYTES.

    batch: the samples of the step. activations, parameters: their number in the whole model. kinds:
    the kinds of tensors per parameter.
    """
    most = min(MOST_BINS, batch)
    bytes_of_number = 8
    bytes_of_parameters = parameters * NUMBERS * kinds * bytes_of_number
    bytes_of_bin = activations * NUMBERS * bytes_of_number
    while most > 1 and bytes_of_parameters + most * bytes_of_bin > MOST_BYTES:
        most = (most + 1) // 2  # half as many bins, rounded up
    return most


class NumericsTrace(Observer):
    """Traces the steps of --trace-numerics."""

    def __init__(
        self,
        state: Any,
        samples: Samples,
        passes: Callable[..., Any],
        agree: Callable[[Any, Callable[[list], Any]], Any],
        writing: Callable[[str], AbstractContextManager],
    ):
        """Gather the names of all ranks' parameters; collective over the world.

        state: the trainer's TrainState. samples: the run's data set. passes: runs the forward and
        backward passes of a step. agree: returns f(all ranks' values). writing: returns the
        context in which a file of that path is written.
        """
        self.state = state
        self.config: Config = state.config
        self.factory: ParamFactory = state.factory
        self.optimizer: Optimizer = state.optimizer
        self.samples = samples
        self.passes = passes
        self.writing = writing
        self.iteration = 0  # the number of the running step
        self.observing: ExitStack | None = None  # what observes the running step; None: not traced
        self.response: Any = None  # the array `response` of the files, on rank 0
        self.response_step = 0  # the step in which the response was measured; 0: none yet
        self.activations = activation_names(self.config.model)
        self.kinds = [GRADIENT, BEFORE, *self.optimizer.state_kinds, AFTER]
        # The names of the whole model's parameters: several ranks have a parameter of one name.
        names = [spec.name for spec in self.optimizer.specs]
        self.parameters = agree(names, _in_order)

    def before_step(self, step: Step) -> None:
        """Sketch the weights before a step that is to be traced, and observe its passes.

        Before the first traced step, run its passes once with flipped bits, to measure how tensors
        respond to rounding; their gradients are discarded.
        """
        if step.iteration not in self.config.run.trace_numerics:
            return
        self.iteration = step.iteration
        self.bins = bins(step.batch, len(self.activations), len(self.parameters), len(self.kinds))
        self.real = self._table()
        self.perturbed = self._table()
        self.optimizer.finish_gathering()
        self._add(self.real, BEFORE)
        if not self.response_step:
            self._flip_last_bits()
            # keep: the passes of the real step get the same micro-batches.
            with self._observing(self.perturbed, step):
                self.passes(self.state, self.samples, step.consumed, keep=True)
                self.optimizer.discard()
            self._flip_last_bits()
        # Hooks add the activations and gradients of the real step.
        self.observing = ExitStack()
        self.observing.enter_context(self._observing(self.real, step))

    def after_step(self, step: Step, result: StepResult) -> None:
        """Sketch gradients, state and new weights of a traced step, and write them; collective."""
        if self.observing is None:
            return
        self.factory.mesh.recorder.enter("trace numerics")
        self.observing.close()
        self.observing = None
        self.optimizer.finish_gathering()
        kinds_after_step = self.kinds[self.kinds.index(BEFORE) + 1 :]
        for kind in kinds_after_step:
            self._add(self.real, kind)
        world = self.factory.mesh.world
        sketches = self.real.total(world)
        if not self.response_step:
            self.response = self._response(sketches, self.perturbed.total(world))
            self.response_step = self.iteration
        if self.factory.mesh.rank == 0:
            about = {"first_sample": step.consumed, "samples": step.batch, "learning_rate": step.lr}
            self._write(sketches, about | asdict(result))

    def _response(self, real: np.ndarray, perturbed: np.ndarray) -> np.ndarray:
        """Return the relative change of each activation and each parameter's gradient: (tensors,).

        It is the norm of the change over the norm of the tensor, with the bins of an activation
        together. real, perturbed: sketches without and with flipped bits, (rows, 12). A tensor that
        is 0 has the response 1, since its rounding cannot be measured.
        """
        # The table begins with the activations, a row per bin, then the gradients, a row each.
        count = len(self.activations) * self.bins
        gradients = slice(count, count + len(self.parameters))
        ratios = []
        for part, bins_of_part in ((slice(count), self.bins), (gradients, 1)):
            squares = real[part, SQUARES].reshape(-1, bins_of_part).sum(1)
            # Squared differences of projections estimate the squared norm of the change.
            changes = np.square((perturbed - real)[part, PROJECTED]).sum(1)
            squared_changes = changes.reshape(-1, bins_of_part).sum(1)
            is_zero = squares == 0.0  # the ratio is 1 then, and nothing is divided by 0
            ratios.append(np.sqrt(np.where(is_zero, 1.0, squared_changes / (squares + is_zero))))
        return np.concatenate(ratios).astype(np.float32)

    def _table(self) -> Sketches:
        """Return a table of zeros: rows of activations by bin, then rows of parameters by kind."""
        rows = len(self.activations) * self.bins + len(self.kinds) * len(self.parameters)
        return Sketches(rows, self.factory.device)

    def _add(self, table: Sketches, kind: str) -> None:
        """Add this rank's shards of all parameters' gradients, weights or state to the table.

        kind: one of `self.kinds`. An element that several ranks have is added on one rank.
        """
        # The row of the kind's first parameter, after the activations and the kinds before.
        first = len(self.activations) * self.bins + self.kinds.index(kind) * len(self.parameters)
        for shard in self.optimizer.owned():
            if shard.spec.copy or shard.copy > 0:
                continue  # another rank adds these elements
            if kind == GRADIENT:
                gradients = shard.group.own_gradients()
                if not gradients:  # no gradient updates these tensors
                    continue
                # The shard is a range of the gradients of its master tensor.
                flat = gradients[shard.master].view(-1)
                values = flat[shard.offset : shard.offset + shard.stop - shard.start]
                sketch = self.unscaled(*shard_sketch(shard, values))
            else:
                state_kind = "weights" if kind in (BEFORE, AFTER) else kind
                values = shard.read(state_kind, shard.start, shard.stop)
                sketch = shard_sketch(shard, values)
            row = torch.tensor([first + self.parameters.index(shard.spec.name)])
            table.add(row.to(values.device), *sketch)

    def unscaled(self, sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sketches of gradients, given sketches of the gradients times the loss scale.

        sums: (n, SUMS), changed in place. largest: (n,).
        """
        scale = self.optimizer.scale.value
        sums[:, 1:] /= scale  # all but the count, which has no scale
        sums[:, SQUARES] /= scale  # once more: squares have the scale's square
        return sums, largest / scale

    def _flip_last_bits(self) -> None:
        """Flip the last bit, in the precision of computation, of every weight on this rank.

        The flip depends on the weight alone, so it is the same in all layouts. A second call
        restores the weights.
        """
        for p in self.state.stages.parameters():
            if p.requires_grad:
                local: Any = p.data
                if hasattr(local, "to_local"):  # at --zero 3 the rank has a shard
                    local = local.to_local()
                # A weight that is kept in fp32 and computed in bf16 loses its last 16 bits, so the
                # lowest bit above them is flipped.
                bits = max(0, LOST_BITS[self.factory.dtype] - LOST_BITS[local.dtype])
                local.view(INTEGERS[local.element_size()]).bitwise_xor_(1 << bits)

    @contextmanager
    def _observing(self, table: Sketches, step: Step) -> Iterator[None]:
        """Inside this context, add the activations and gradients of all passes to the table.

        The optimizer calls `observe` when the gradients are reduced.
        """
        observe = partial(self._add, table, GRADIENT)
        handles = list(_PassHooks(self, table, step.batch).hooks(self.state.pipeline.stages))
        self.optimizer.after_reduction.append(observe)
        yield
        self.optimizer.after_reduction.remove(observe)
        for handle in handles:
            handle.remove()

    def _write(self, sketches: np.ndarray, about: dict[str, Any]) -> None:
        """Write the file of a step; called on rank 0.

        sketches: (rows, 12). about: facts of the step; the facts that a reader of the file needs to
        find its rows are added, and the whole is stored as JSON.
        """
        config = self.config
        about |= {"format": FORMAT, "step": self.iteration, "bins": self.bins}
        about |= {"precision": config.training.precision, "layout": asdict(config.layout)}
        about |= {"activations": self.activations, "parameters": self.parameters}
        about |= {"kinds": self.kinds, "response_step": self.response_step}
        about["optimizer"] = config.training.optimizer
        if config.training.optimizer == "muon":
            about["muon_dtype"] = config.training.newton_schulz_dtype(
                self.factory.device.type == "cuda"
            )
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        folder = os.path.join(config.run.out, "numerics")
        path = os.path.join(folder, f"step-{self.iteration:06d}.npz")
        with self.writing(path):
            os.makedirs(folder, exist_ok=True)
            with open(path + ".new", "wb") as file:
                np.savez(file, values=sketches, response=self.response, about=text)
            os.replace(path + ".new", path)


def _in_order(names_of_ranks: list[list[str]]) -> list[str]:
    """Return the names of all ranks' parameters in the order of execution, each once."""
    return sorted(dict.fromkeys(chain(*names_of_ranks)), key=_place)


def _place(name: str) -> tuple[int, int, str]:
    """Return a key that sorts parameters in the order of execution.

    The key has the part of the model (0 embedding, 1 blocks, 2 head), the number of the block, and
    a name. Parameters of the same block have equal keys, so that Python's stable sort keeps them in
    the order in which the block was built.
    """
    if name.startswith("blocks."):
        _, block, *_ = name.split(".")
        return 1, int(block), ""
    if name.split(".")[0] == "embedding":
        return 0, 0, name.replace("tokens", "")  # so that the embedding of tokens is sorted first
    return 2, 0, name


class _PassHooks:
    """The hooks that add one step's activations and their gradients to a table.

    A stage does its forward passes in the order of the micro-batches. The layers of a stage run
    again in the backward pass if they are recomputed; they are observed only inside the stage's own
    forward pass.
    """

    def __init__(self, trace: NumericsTrace, table: Sketches, batch: int):
        """Prepare for the passes of one step, of which none has begun.

        table: the sketches are added to it. batch: the samples of the step.
        """
        self.trace = trace
        self.table = table
        self.mesh = trace.factory.mesh
        self.batch = batch
        length = trace.state.length
        positions = torch.arange(length, device=trace.factory.device)
        # The positions, in a sample, of the tokens that this rank has.
        self.positions = self.mesh.cp.balanced_shard(positions, 0)
        self.passes: dict[int, int] = {}  # forward passes so far, by stage
        self.micro_batch: int | None = None  # the running pass's micro-batch; None between passes

    def hooks(self, stages: dict[int, Any]) -> Iterator[RemovableHandle]:
        """Register hooks on this rank's stages, by index of the stage; yield the hooks' handles.

        Two hooks of a stage note its running micro-batch, the others add tensors to the table.
        """
        for index, stage in stages.items():
            yield stage.register_forward_pre_hook(partial(self._begin, index))
            yield stage.register_forward_hook(self._end)
            for name, part in _parts(stage):
                yield part.register_forward_hook(partial(self._after, name))

    def _begin(self, index: int, stage: Any, inputs: tuple) -> None:
        """Count a forward pass and add its tokens; torch calls this hook before a stage's pass."""
        self.micro_batch = self.passes.get(index, 0)  # passes have the order of the micro-batches
        self.passes[index] = self.micro_batch + 1
        batch: Batch | None  # None for a stage that reads neither tokens nor labels
        _, batch = inputs
        if batch is not None:
            self._add_batch(index, stage, self.micro_batch, batch)

    def _add_batch(self, index: int, stage: Any, micro_batch: int, batch: Batch) -> None:
        """Add a micro-batch's tokens on the first stage's rank, its labels on the last one's."""
        if index == 0:
            self._add("tokens", micro_batch, batch.tokens.t())
        if stage.head is not None:
            self._add("labels", micro_batch, batch.labels.t())

    def _end(self, *_: Any) -> None:
        """Note that a stage's forward pass has ended; torch calls this hook after the pass."""
        self.micro_batch = None

    def _after(self, name: str, module: nn.Module, inputs: tuple, output: Any) -> None:
        """Add the output of a part of a stage, and later its gradient.

        torch calls this hook after the part's forward pass. name: the activation's name.
        """
        if self.micro_batch is None:
            return  # the backward pass runs a recomputed layer again
        with_gradient = output
        if isinstance(output, tuple):
            # A block's output is the sum of two tensors, which have the same gradient.
            residual, with_gradient = output
            output = residual + with_gradient
        if name == "loss" and output.dim() == 3:
            output = output[0]  # beside it is the z-loss of --z-loss
        self._add(name, self.micro_batch, output)
        if with_gradient.requires_grad and name != "loss":
            observe_gradient = partial(self._add, f"gradient of {name}", self.micro_batch)
            with_gradient.register_hook(observe_gradient)

    def _add(self, name: str, micro_batch: int, x: Tensor) -> None:
        """Add an activation of a micro-batch to the table.

        x: (s, b, h), or (s, b) with a number per token, such as labels and losses; s is this rank's
        part of the sequence.
        """
        trace = self.trace
        tp = self.mesh.tp
        # With sequence parallelism each tensor rank has a part of the positions of (s, b, h).
        split = trace.factory.sequence_parallel and x.dim() == 3
        positions = tp.shard(self.positions) if split else self.positions
        # The numbers of the samples in the step, and for each sample the row of its bin.
        first = first_of_micro_batch(0, micro_batch, trace.config.layout, self.mesh.dp.rank)
        samples = torch.arange(first, first + x.shape[1], device=x.device)
        rows = samples * trace.bins // self.batch + trace.activations.index(name) * trace.bins
        if x.dim() == 2:
            x = x[..., None]
        sums, largest = activation_sketch(x.detach(), positions, samples)
        if name.startswith("gradient"):
            sums, largest = trace.unscaled(sums, largest)
        if not split:
            # Every tensor rank adds its sums, which are equal unless a rank computes wrongly: then
            # the total shows it, which it would not if one rank added its sums for all.
            sums /= tp.size
        self.table.add(rows, sums, largest)


def _parts(stage: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield each observed part of a stage: the name of its output in the trace, and its module.

    Blocks are numbered in the whole model.
    """
    if stage.embedding is not None:
        yield "embedding", stage.embedding
    for number, block in stage.numbered_blocks():
        for name, mixer in block.mixers():
            yield f"blocks.{number}.{name}", mixer
        yield f"blocks.{number}", block
    if stage.head is not None:
        yield "head.norm", stage.head.norm
        yield "loss", stage.head
