"""Every tensor of a run's steps on one rank, each with its place in the whole run.

    recorder = Recorder(state)
    recorder.begin(step)                 before the passes of a step
    recorder.end()                       after its update
    recorder.pieces                      what this rank has seen

A piece is a part of a tensor of the whole run. Of activations it says which tokens of which samples
it has; of parameters which elements. The tensors are inputs and outputs of modules, whatever the
modules are, the gradients of both, the weights with which a pass computes, gradients after their
reduction, and the optimizer's state. compare.py puts a single rank's pieces together.

A module that runs several times in a pass, such as a block that is used twice, has a tensor for
each of its calls; the second one's name ends in " (call 2)". A module that several parts of the
model share has the name of the first one.

The places are computed here and not by the code that is checked: a rank that reads wrong samples
must not be believed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from config.schema import EMA
from layers.attention import QueryKeyNorm
from layers.experts import HeldExperts, Router

Key = tuple[int, str, str]  # step, kind, name
IN_USE, GRADIENT, AFTER = "weights in use", "gradient", "weights"


@dataclass
class Piece:
    """A part of the tensor `key`, of which `place` says where it is in the whole.

    place: of an activation the positions and the samples of its first two dimensions, or with
    `paired` the position and the sample of each row; of a parameter the indices of its elements.
    A part of the features, such as the rank's own heads, follows from the sizes. is_found: its
    place is not known, and is looked for by its values; `place` is then the number of the call.
    """

    key: Key
    place: tuple[np.ndarray, ...]
    values: np.ndarray
    paired: bool = False
    is_parameter: bool = False
    is_found: bool = False


class Recorder:
    """The hooks on a state's stages and optimizer; `pieces` grow from step to step."""

    def __init__(self, state: Any):
        """Register the hooks. state: the trainer's TrainState, before its first step."""
        self.state = state
        self.mesh = state.factory.mesh
        self.layout = state.config.layout
        self.pieces: list[Piece] = []
        self.is_on = False  # not in an evaluation
        self.step = 0
        # Kinds of state that an update rule makes: the average of --ema is made after it.
        self.rule_kinds = tuple(k for k in state.optimizer.state_kinds if k != EMA)
        # Step, parameter and first element of shards whose update was recorded before the end.
        self.updates: set[tuple[int, Any, int]] = set()
        self.passes: dict[int, int] = {}  # forward passes so far in this step, by stage
        self.micro_batch: int | None = None  # None outside of a stage's forward pass
        # The tensors that this pass has recorded, and what they are called. A module's input that
        # is another one's output has the name of the latter, which `aliases` keeps.
        self.held: list[tuple[Tensor, tuple[str, str]]] = []
        self.aliases: dict[str, tuple[str, str]] = {}
        self.watched: set[nn.Module] = set()
        self.calls: dict[str, int] = {}  # of each module, so far in this pass
        self.positions = self._positions(state.config.model.seq_length)
        for index, stage in state.pipeline.stages.items():
            stage.register_forward_pre_hook(partial(self._begin_stage, index))
            stage.register_forward_hook(self._end_stage)
            for name, part in _parts(stage):
                part.register_forward_pre_hook(partial(self._weights_in_use, name))
                for inner, module in part.named_modules():
                    self._watch(f"{name}.{inner}" if inner else name, module)
        state.optimizer.after_reduction.append(partial(self._parameters, GRADIENT))

    def begin(self, step: int) -> None:
        """Record from here on; step: from 1, and 0 for the state before the first one."""
        self.is_on, self.step, self.passes = True, step, {}

    def end(self) -> None:
        """Record the state after the update, and nothing more until the next `begin`."""
        for kind in (*self.state.optimizer.state_kinds, AFTER):
            self._parameters(kind)
        self.is_on = False

    def numbers(self, **values: float) -> None:
        """Record numbers of the step that every rank has, such as the gradient norm."""
        for name, value in values.items():
            self.values(name.replace("_", " "), np.zeros(1, np.int64), np.array([value]))

    def values(self, name: str, elements: np.ndarray, values: np.ndarray) -> None:
        """Record elements of a list of numbers of the step, of which a rank may have a part."""
        self.pieces.append(Piece((self.step, "number", name), (elements,), values, False, True))

    # ---- Where this rank's tokens are ------------------------------------------------------------

    def _positions(self, length: int) -> np.ndarray:
        """Return the positions of this cp rank's tokens: chunks i and 2 cp - 1 - i of 2 cp."""
        size, rank = self.layout.cp, self.mesh.place["cp"]
        if size == 1:
            return np.arange(length)
        chunks = np.split(np.arange(length), 2 * size)
        return np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]])

    def _rows(self, count: int) -> np.ndarray | None:
        """Return the positions of a tensor's `count` rows, or None if it has no row per token."""
        whole = len(self.positions)
        tp = self.layout.tp
        if count == whole:
            return self.positions
        if tp > 1 and whole % tp == 0 and count == whole // tp:  # sequence parallelism
            return np.split(self.positions, tp)[self.mesh.place["tp"]]
        return None

    def _rows_of(self, x: Tensor) -> np.ndarray | None:
        """Return the positions of the rows of a tensor (s, b, ...), or None if it is none."""
        if x.dim() < 2 or x.shape[1] != self.layout.micro_batch_size:
            return None
        return self._rows(x.shape[0])

    def _samples(self) -> np.ndarray:
        """Return the samples of the running micro-batch, from 0 in the step."""
        size = self.layout.micro_batch_size
        first = ((self.micro_batch or 0) * self.layout.dp + self.mesh.place["dp"]) * size
        return np.arange(first, first + size)

    # ---- Hooks on modules ------------------------------------------------------------------------

    def _watch(self, name: str, module: nn.Module) -> None:
        """Register the hooks that record a module's inputs and outputs.

        Not of what holds experts, whose rows are sorted by expert.
        """
        if isinstance(module, HeldExperts) or module in self.watched:  # rows sorted by expert
            return
        heads = self.state.config.model.kv_heads
        if isinstance(module, QueryKeyNorm) and heads < self.layout.tp:
            return  # of a key that several ranks have, each has the gradient of its own queries
        self.watched.add(module)
        module.register_forward_pre_hook(partial(self._begin_call, name))
        if isinstance(module, Router):
            module.register_forward_hook(partial(self._router, name))
            return
        module.register_forward_pre_hook(partial(self._input, name, module))
        module.register_forward_hook(partial(self._output, name))

    def _begin_call(self, name: str, *_: Any) -> None:
        """Count a call in a stage's forward pass; a recomputation is none."""
        if self.micro_batch is not None:
            self.calls[name] = self.calls.get(name, 0) + 1

    def _called(self, name: str, part: str = "") -> str:
        """Return the name of a tensor of the running call of a module. part: a part's name."""
        number = self.calls[name]
        return f"{name}{part}" + (f" (call {number})" if number > 1 else "")

    def _begin_stage(self, index: int, stage: Any, inputs: tuple) -> None:
        """Note which micro-batch a stage's forward pass begins; record its tokens and labels."""
        if not self.is_on:
            return
        self.micro_batch = self.passes.get(index, 0)
        self.passes[index] = self.micro_batch + 1
        self.calls = {}
        batch = inputs[1] if len(inputs) > 1 else None
        if batch is None:
            return
        if index == 0:
            self._add("output", "tokens", batch.tokens.t())
        if stage.head is not None:
            self._add("output", "labels", batch.labels.t())

    def _end_stage(self, *_: Any) -> None:
        self.micro_batch = None
        self.held = []

    def _weights_in_use(self, name: str, part: nn.Module, _: Any) -> None:
        """Record a part's weights before the first pass of a step; ZeRO 3 has them later."""
        if self.micro_batch != 0:
            return
        for p in part.parameters():
            if hasattr(p, "spec") and not hasattr(p, "to_local"):
                elements = elements_of(p.spec, tuple(p.shape))
                key = self.step, IN_USE, p.spec.name
                self.pieces.append(_parameter_piece(key, elements, p.detach().flatten()))

    def _input(self, name: str, module: nn.Module, _: nn.Module, inputs: tuple) -> None:
        """Record the input of a module, unless it is a tensor that was recorded as an output."""
        if self.micro_batch is None or not inputs or not isinstance(inputs[0], Tensor):
            return
        x = inputs[0]
        if name.startswith("blocks.") and name.count(".") == 1:
            return  # a block's input is the sum of two tensors: the output of the block before
        for other, known in self.held:
            # A block's norm may run as a part of a sum, and has no output of its own then.
            is_norm = known[1].partition(" (call ")[0].endswith("_norm")
            if x is other and not is_norm:
                self.aliases[self._called(name)] = known
                return
        self._see("input", self._called(name), x)

    def _output(self, name: str, module: nn.Module, _: tuple, output: Any) -> None:
        """Record the output of a module: a tensor, a tuple of them, or a block's two terms."""
        if self.micro_batch is None:
            return
        called = self._called(name)
        if isinstance(output, Tensor):
            self._see("output", called, output, _local_shape(module, self.layout.tp))
        elif isinstance(output, tuple) and name.startswith("blocks.") and name.count(".") == 1:
            residual, y = output  # a block's output is their sum; both have its gradient
            self._add("output", called, residual + y)
            self._watch_gradient("output", called, y, None)
        elif isinstance(output, list | tuple):
            for number, x in enumerate(output):
                if isinstance(x, Tensor):
                    self._see("output", self._called(name, f".{number}"), x)

    def _see(self, kind: str, name: str, x: Tensor, shape: tuple[int, ...] | None = None) -> None:
        """Record a tensor of the forward pass, and later its gradient."""
        self.held.append((x, (kind, name)))
        self._add(kind, name, x, shape)
        self._watch_gradient(kind, name, x, shape)

    def _watch_gradient(
        self, kind: str, name: str, x: Tensor, shape: tuple[int, ...] | None
    ) -> None:
        """Have the gradient of a tensor recorded when the backward pass has computed it."""
        if x.requires_grad:
            add = partial(self._gradient, f"gradient of {kind}", name, self.micro_batch, shape)
            x.register_hook(add)

    def _gradient(
        self,
        kind: str,
        name: str,
        micro_batch: int | None,
        shape: tuple[int, ...] | None,
        grad: Tensor,
    ) -> None:
        """Record a gradient as one of the micro-batch in whose forward pass its tensor was."""
        before, self.micro_batch = self.micro_batch, micro_batch
        self._add(kind, name, self._unscaled(grad), shape)
        self.micro_batch = before

    def _unscaled(self, gradient: Tensor) -> Tensor:
        """Return a gradient without the loss scale of an fp16 run, a power of two."""
        scale = self.state.optimizer.scale.value
        return gradient if scale == 1.0 else gradient / scale

    def _add(self, kind: str, name: str, x: Tensor, shape: tuple[int, ...] | None = None) -> None:
        """Add a tensor (s, b, ...) of the running micro-batch. shape: of its features here.

        A stack of them, (n, s, b), such as losses and z-losses, counts as (s, b, n).
        """
        rows = self._rows_of(x)
        if rows is None and x.dim() == 3:
            x = x.permute(1, 2, 0)
            rows = self._rows_of(x)
        if rows is None or not self.is_on:
            return
        values = _array(x)
        if shape is not None and np.prod(shape) == values.shape[-1]:
            values = values.reshape(*values.shape[:-1], *shape)
        self.pieces.append(Piece((self.step, kind, name), (rows, self._samples()), values))

    def _router(self, name: str, router: nn.Module, inputs: tuple, output: tuple) -> None:
        """Record the weights that a router gives to each token's experts, and the choice."""
        if self.micro_batch is None or not self.is_on:
            return
        _, start, samples, *_ = inputs
        experts, weights, _ = output
        places = np.arange(start, start + len(experts))
        whole = self._rows(self._tokens(len(places)))
        if whole is None:
            return
        place = whole[places // samples], self._samples()[places % samples]
        key = self.step, "output", self._called(name, ".choice")
        self.pieces.append(Piece(key, place, _array(experts), paired=True))
        key = self.step, "output", self._called(name, ".weights")
        self.pieces.append(Piece(key, place, _array(weights), paired=True))
        if weights.requires_grad:
            key = self.step, "gradient of output", self._called(name, ".weights")

            def add(grad: Tensor) -> None:
                self.pieces.append(Piece(key, place, _array(self._unscaled(grad)), paired=True))

            weights.register_hook(add)

    def _tokens(self, count: int) -> int:
        """Return the rows of the tensor whose tokens a router sees, of which it has `count`."""
        whole = len(self.positions)
        return whole // self.layout.tp if self.layout.sequence_parallel else whole

    # ---- Parameters ------------------------------------------------------------------------------

    def _parameters(self, kind: str) -> None:
        """Add this rank's shards of all parameters' gradients, state or weights."""
        if not self.is_on:
            return
        for shard in self.state.optimizer.owned():
            by_rule = kind == AFTER or kind in self.rule_kinds
            if by_rule and (self.step, shard.spec, shard.start) in self.updates:
                continue
            if kind == GRADIENT:
                gradients = shard.group.own_gradients()
                if not gradients:
                    continue
                flat = self._unscaled(gradients[shard.master].double()).view(-1)
                values = flat[shard.offset : shard.offset + shard.stop - shard.start]
                self.pieces.append(self._piece_of(shard, kind, values))
            else:
                self.pieces.append(self._state_of(shard, kind))

    def pieces_of_update(self, shard: Any) -> Iterator[Piece]:
        """Yield what an update rule has made of a shard: its state and its weights."""
        for kind in (*self.rule_kinds, AFTER):
            yield self._state_of(shard, kind)

    def update_of(self, shard: Any) -> None:
        """Record the update of a shard now, and not at the end of the step."""
        self.pieces += self.pieces_of_update(shard)
        self.updates.add((self.step, shard.spec, shard.start))

    def _state_of(self, shard: Any, kind: str) -> Piece:
        """Return a shard's weights or a kind of its state."""
        values = shard.read("weights" if kind == AFTER else kind, shard.start, shard.stop)
        return self._piece_of(shard, kind, values)

    def _piece_of(self, shard: Any, kind: str, values: Tensor) -> Piece:
        """Return values of all elements of a shard, flat, as a piece."""
        elements = elements_of(shard.spec, shard.shape)[shard.start : shard.stop]
        return _parameter_piece((self.step, kind, shard.spec.name), elements, values)


def _parameter_piece(key: Key, elements: np.ndarray, values: Tensor) -> Piece:
    """Return elements of a parameter as a piece; those with the index -1 are padding."""
    numbers = _array(values.double()).reshape(-1)
    kept = elements >= 0
    return Piece(key, (elements[kept],), numbers[kept], False, True)


def without_call(key: Key) -> Key:
    """Return the key of the tensor of a module's first call in a pass."""
    step, kind, name = key
    return step, kind, name.partition(" (call ")[0]


def _array(x: Tensor) -> np.ndarray:
    """Return a copy of a tensor's numbers.

    numpy() of the tensor itself would keep its storage from being freed, as ZeRO 3 frees weights.
    """
    return x.detach().cpu().clone().numpy()


def _parts(stage: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of a stage with their names in the whole model."""
    if stage.embedding is not None:
        yield "embedding", stage.embedding
    for number, block in stage.numbered_blocks():
        yield f"blocks.{number}", block
    if stage.head is not None:
        yield "head", stage.head
    # Beside its block, a module of multi-token prediction is named as its parameters are.
    for number, predictor in enumerate(stage.predictors, stage.layers):
        for name, part in predictor.named_children():
            if part is not predictor.block:
                yield f"blocks.{number}.mtp.{name}", part
    if stage.predictors:
        yield "next_tokens", stage.next_tokens


def _local_shape(module: nn.Module, tp: int) -> tuple[int, ...] | None:
    """Return the shape that a matrix's output has in place of its last dimension, or None.

    A matrix of shape (2, f, h) gives gate and up side by side: of f each tensor rank has a part.
    """
    weight = getattr(module, "weight", None)
    spec = getattr(weight, "spec", None)
    if spec is None or len(spec.shape) < 3:
        return None
    shape = list(spec.shape[:-1])
    if spec.dim is not None and spec.dim < len(shape):
        shape[spec.dim] //= tp
    return tuple(shape)


def elements_of(spec: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the flat index in the whole tensor of each element of a local one; -1: padding."""
    local = np.full(shape, -1, np.int64)
    whole = np.arange(int(np.prod(spec.shape)), dtype=np.int64).reshape(spec.cut_shape)
    if spec.dim is None:
        return whole.reshape(-1)
    here = [slice(None)] * len(shape)
    there = [slice(None)] * len(shape)
    here[spec.dim] = slice(0, spec.stop - spec.start)
    there[spec.dim] = slice(spec.start, spec.stop)
    local[tuple(here)] = whole[tuple(there)]
    return local.reshape(-1)
