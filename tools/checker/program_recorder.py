"""Every tensor of another program's steps on one rank, as pieces of those of one rank.

    recorder = ProgramRecorder(built, shards)
    recorder.begin(step)                 before the program's step
    recorder.end(loss, norm)             after it
    recorder.pieces

The tensors are what modules return and the gradient of that, the weights before and after a step,
gradients just before the optimizer's step, after their reduction, and the optimizer's state. A
parameter's place in the whole follows from how it is cut (cuts.py). Where in a module's output this
rank's tokens are, no program says; so such a piece is looked for among the cuts of one rank's.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tools.checker.cuts import Shard, every_optimizer, local_of, owned_by, state_of
from tools.checker.programs import Built
from tools.checker.recorder import AFTER, GRADIENT, IN_USE, Piece
from tools.checker.rounding import LastBits

MOST_ELEMENTS = 2**20  # of a module's output that is kept
ORDER = ("weights", "forward", "loss", "backward", "gradients", "norm", "state", "after")
WIDTHS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}
WIDTHS |= {torch.float16: "bf16"}


class ProgramRecorder:
    """The hooks on a program's modules and optimizers; `pieces` grow from step to step."""

    def __init__(self, built: Built, shards: list[Shard]):
        """Register the hooks. built: has its first weights. shards: of its parameters."""
        self.built, self.shards = built, shards
        self.pieces: list[Piece] = []
        self.step = 0
        self.is_on = False
        self.now: dict[str, list[Piece]] = {}  # of the running step, by what ORDER names
        self.calls: dict[tuple[str, str], int] = {}
        for name, module in _modules(built):
            module.register_forward_hook(partial(self._output, name))
        for optimizer in built.optimizers:
            self._watch(optimizer)

    def begin(self, step: int) -> None:
        """Record from here on; step: from 1."""
        self.is_on, self.step = True, step
        self.now = {part: [] for part in ORDER}
        self.calls = {}
        self._weights("weights", IN_USE)

    def state(self, step: int) -> None:
        """Record weights and state only, such as those that were drawn or loaded."""
        self.step, self.now = step, {part: [] for part in ORDER}
        self._close()

    def end(self, loss: float | None, norm: float | None) -> None:
        """Record the state after a step; loss, norm: what step() returned, None: nothing."""
        if not self.now["gradients"]:  # no optimizer whose step could be watched
            self._gradients()
        for part, name, value in (("loss", "loss", loss), ("norm", "gradient norm", norm)):
            if value is not None:
                key = self.step, "number", name
                numbers = np.array([value], np.float64)
                self.now[part].append(Piece(key, (np.zeros(1, np.int64),), numbers, False, True))
        self._close()

    def _close(self) -> None:
        """Record the state after a step, and put the step's pieces in their order."""
        self.is_on = False
        for shard in self.shards:
            owned = owned_by(self.built.optimizers, shard.parameter)
            for kind, values in state_of(self.built.optimizers, shard.parameter).items():
                self._add("state", shard, kind, values, owned)
        self._weights("after", AFTER)
        for part in ORDER:
            self.pieces += self.now[part]

    # ---- Parameters ------------------------------------------------------------------------------

    def _watch(self, optimizer: Any) -> None:
        """Have gradients recorded just before each step of an optimizer, of torch or a wrapper."""
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_pre_hook(lambda *_: self._gradients())
            return
        inner = [x for x in every_optimizer([optimizer]) if isinstance(x, torch.optim.Optimizer)]
        if not hasattr(optimizer, "step"):
            for each in inner:
                each.register_step_pre_hook(lambda *_: self._gradients())
            return
        step = optimizer.step

        def watched(*arguments: Any, **options: Any) -> Any:
            """Record the gradients, then do the step."""
            self._gradients()
            return step(*arguments, **options)

        optimizer.step = watched

    def _gradients(self) -> None:
        """Add this rank's gradients; only those of the step's first update count."""
        if not self.is_on or self.now["gradients"]:
            return
        for shard in self.shards:
            values = _gradient_of(shard.parameter)
            owned = owned_by(self.built.optimizers, shard.parameter)
            if values is None:
                values = torch.zeros_like(shard.local)
            self._add("gradients", shard, GRADIENT, values.reshape(-1)[owned], owned)

    def _weights(self, part: str, kind: str) -> None:
        for shard in self.shards:
            self._add(part, shard, kind, shard.local, slice(None))

    def _add(self, part: str, shard: Shard, kind: str, values: Tensor, owned: slice) -> None:
        """Add a shard's values; those of another size are no part of the parameter."""
        elements = shard.elements[owned]
        if values.numel() != elements.size:
            return
        key = self.step, kind, shard.name
        self.now[part].append(Piece(key, (elements,), _numbers(values).reshape(-1), False, True))

    # ---- Modules ---------------------------------------------------------------------------------

    def _output(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        """Record the tensors that a module returns, and their gradients in the backward pass."""
        if not self.is_on:
            return
        for path, x in _tensors(output):
            called = f"{name}{path}"
            if _is_partial(x) or not 1 < x.numel() <= MOST_ELEMENTS:
                continue
            number = self.calls.get(("output", called), 0)
            self.calls["output", called] = number + 1
            self._found("forward", "output", called, number, x)
            if x.requires_grad:
                add = partial(self._found, "backward", "gradient of output", called, number)
                x.register_hook(lambda grad, add=add: add(grad))

    def _found(self, part: str, kind: str, name: str, call: int, x: Tensor) -> None:
        """Add a tensor whose place is not known. call: of the module, in this step."""
        if self.is_on and not _is_partial(x):
            key, values = (self.step, kind, name), _numbers(local_of(x))
            self.now[part].append(Piece(key, (np.array([call]),), values, is_found=True))


def _modules(built: Built) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of this rank with their names in the whole program.

    `names` says those of parameters: a module's name is what is before its parameters' names.
    """
    for number, model in enumerate(built.models):
        prefix = f"{number}." if len(built.models) > 1 else ""
        names: dict[str, str] = {}
        for local, _ in model.named_parameters():
            before, after = (
                f"{prefix}{local}".split("."),
                built.names(f"{prefix}{local}").split("."),
            )
            while before and after and before[-1] == after[-1]:
                before, after = before[:-1], after[:-1]
                names.setdefault(".".join(before), ".".join(after))
        seen = set()
        for local, module in model.named_modules():
            name = _renamed(f"{prefix}{local}".rstrip("."), names)
            if name and module not in seen:
                seen.add(module)
                yield name, module


def _renamed(local: str, names: dict[str, str]) -> str:
    """Return a module's name in the whole program, by the longest part of it that is known."""
    words = local.split(".")
    for count in range(len(words), 0, -1):
        start = ".".join(words[:count])
        if start in names:
            return ".".join([names[start], *words[count:]]).lstrip(".")
    return local


def _tensors(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of numbers in what a module returns, and what to add to its name."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield "", output
    elif isinstance(output, list | tuple):
        tensors = [(n, x) for n, x in enumerate(output) if isinstance(x, Tensor)]
        for number, x in tensors:
            if x.is_floating_point():
                yield ("" if number == 0 else f".{number}"), x
    elif isinstance(output, dict):
        for key, x in output.items():
            if isinstance(x, Tensor) and x.is_floating_point():
                yield f".{key}", x


def _is_partial(x: Tensor) -> bool:
    """Return whether a tensor is declared to be a term of a sum over ranks."""
    return isinstance(x, DTensor) and any(p.is_partial() for p in x.placements)


def _gradient_of(parameter: Any) -> Tensor | None:
    """Return the gradient that an optimizer reads: Megatron's main_grad, else grad."""
    gradient = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if gradient is None else gradient
    return None if gradient is None else local_of(gradient)


def _numbers(x: Tensor) -> np.ndarray:
    """Return a copy of a tensor's numbers in fp64."""
    return x.detach().to("cpu", torch.float64, copy=True).numpy()


# ---- The types in which a program computes -------------------------------------------------------


class Types(TorchDispatchMode):
    """Keeps the lowest precision in which operations compute while it is entered, and the first."""

    def __init__(self) -> None:
        """Nothing has been seen: fp64."""
        super().__init__()
        self.lowest, self.first = "fp64", ""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Do an operation of torch, and note if its result is the first in a lower precision."""
        result = function(*args, **(kwargs or {}))
        for _, x in _tensors(result):
            width = WIDTHS.get(x.dtype, "fp64")
            is_lower = list(WIDTHS.values()).index(width) > self._rank()
            # Whole numbers, such as a mask's, are the same in any type.
            if is_lower and not torch.equal(x, x.round()):
                self.lowest, self.first = width, str(function)
        return result

    def _rank(self) -> int:
        return list(WIDTHS.values()).index(self.lowest)


def flipping(built: Built, shards: list[Shard], draw: int, width: str) -> Callable[[], None]:
    """Change the last bits of what modules return and of its gradient, from now on.

    width: the type whose last bits they are. Return a function that changes those of the weights,
    to be called before a step.
    """
    of_width = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[width]
    bits = LastBits(draw, of_width)

    def flip_output(module: nn.Module, inputs: Any, output: Any) -> Any:
        """Return the output of a module with other last bits."""
        if type(output) is tuple:
            return tuple(flip_output(module, inputs, x) for x in output)
        return output if isinstance(output, DTensor) else bits.of_output(output)

    for _, module in _modules(built):
        if not list(module.children()):
            module.register_forward_hook(flip_output)

    return lambda: bits.flip(shard.local for shard in shards)
