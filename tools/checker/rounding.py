"""How far rounding alone moves each tensor of a run, measured on one rank.

    with last_bits_flipped(state, draw):      a run again, its last bits other ones
        ...
    growth = growth_of(reference, pieces)     how far its tensors are from those of the first run
    hold_updates(state, recorder, ...)        before the run: see below

A layout adds numbers up in another order than one rank, which changes the last bit of every
intermediate result. So does a draw: each weight, and each number that a module returns and its
gradient, is multiplied by 1 + e or 1 - e at random, where e is one unit in the last place. In most
tensors the difference stays that small. It grows where a rule divides a number by its own size, or
takes its sign: the gradient of the bias of keys is zero up to rounding, because a softmax takes no
notice of it, and Lion moves it up or down by the whole rate.

The next step of such a run would begin with other weights, after which no tensor could be compared.
So an update that rounding decides is held: as soon as the rule has run, it is recorded as the rule
left it, and then the parameter and its state are set to one rank's. What rounding decides is
measured in the draws, and is the same in every layout.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optim.weight_average import AveragedRule
from tools.checker.compare import LOADS, Reference, relative
from tools.checker.recorder import AFTER, Key, Piece, Recorder, elements_of

DRAWS = 3  # runs with other last bits; a sign that rounding decides is the same in 1 of 8


class LastBits:
    """Changes last bits at random: each number is multiplied by 1 + e or 1 - e.

    e: one unit in the last place of the tensor's type, or of the type `width` if that is coarser.
    """

    def __init__(self, draw: int, width: torch.dtype = torch.float64):
        """Make the generator of signs. draw: its seed. width: see the class."""
        self.generator = torch.Generator().manual_seed(draw)
        self.least = torch.finfo(width).eps

    def flipped(self, x: Tensor) -> Tensor:
        """Return a tensor with other last bits."""
        eps = max(torch.finfo(x.dtype).eps, self.least)
        signs = torch.randint(0, 2, x.shape, generator=self.generator).to(x) * 2 - 1
        return x * (1 + eps * signs)

    def of_output(self, output: Any) -> Any:
        """Return what a module returned with other last bits, as will be those of its gradient."""
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        result = self.flipped(output)
        if result.requires_grad:
            result.register_hook(self.flipped)
        return result

    @torch.no_grad()
    def flip(self, tensors: Iterable[Tensor]) -> None:
        """Change the last bits of tensors in place."""
        for x in tensors:
            if x.is_floating_point():
                x.copy_(self.flipped(x))


@contextmanager
def last_bits_flipped(state: Any, draw: int) -> Iterator[Callable[[], None]]:
    """Change the last bit of what modules return and of its gradient, until the context ends.

    Yield a function that changes the last bits of all weights; called before a step.
    """
    bits = LastBits(draw)

    def flip_output(module: nn.Module, inputs: Any, output: Any) -> Any:
        """Return the output of a module with other last bits."""
        return bits.of_output(output)

    modules = [m for stage in state.stages for m in stage.modules() if not list(m.children())]
    hooks = [module.register_forward_hook(flip_output) for module in modules]
    try:
        yield lambda: bits.flip(state.optimizer.parameters)
    finally:
        for hook in hooks:
            hook.remove()


def growth_of(reference: Reference, pieces: list[Piece]) -> dict[Key, float]:
    """Return by tensor how far a draw is from the first run, relative to its largest element.

    pieces: of one rank.
    """
    growth: dict[Key, float] = {}
    for piece in pieces:
        expected = reference.expected(piece, 1, 0)
        if expected is not None:
            off = reference.off(piece.key, piece.values, expected)
            growth[piece.key] = max(off, growth.get(piece.key, 0.0))
    return growth


def growth_of_answers(one: Any, again: Any) -> dict[Key, float]:
    """Return how far evaluations and loads of experts are from those of the first run.

    one, again: the answers (runs.RunAnswer) of both.
    """
    growth = {
        (-1, "number", name): relative(again.evaluated[name], loss)
        for name, loss in one.evaluated.items()
    }
    for step, (loads, others) in enumerate(zip(one.loads, again.loads, strict=True), 1):
        growth[step, "number", LOADS] = max(map(relative, others, loads), default=0.0)
    return growth


# ---- Updates that rounding decides ---------------------------------------------------------------


@dataclass
class HeldRule:
    """An update rule after which the parameters that rounding decides are set to one rank's.

    groups: those whose masters the rule updates. is_held: whether rounding decides the update of a
    shard, which has been done.
    """

    rule: Any
    groups: list[Any]
    reference: Reference
    recorder: Recorder
    is_held: Callable[[Any], bool]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def update(self, gradients: list[Tensor], lr: float) -> None:
        """Update all masters; set those whose update rounding decides to one rank's values."""
        self.rule.update(gradients, lr)
        if not self.recorder.is_on:
            return
        for group in self.groups:
            for shard in group.shards:
                if self.is_held(shard):
                    self.recorder.update_of(shard)
                    self._set(shard)

    def _set(self, shard: Any) -> None:
        """Set a shard's weights and state to those of one rank after this step."""
        elements = elements_of(shard.spec, shard.shape)[shard.start : shard.stop]
        for kind in (*self.recorder.rule_kinds, AFTER):
            key = self.recorder.step, kind, shard.spec.name
            kept = "weights" if kind == AFTER else kind
            values = shard.read(kept, shard.start, shard.stop).clone()
            inside = torch.from_numpy(elements >= 0)
            whole = torch.from_numpy(self.reference.tensors[key])
            values[inside] = whole[elements[elements >= 0]].to(values)
            shard.write(kept, shard.start, values)


def hold_updates(
    state: Any, recorder: Recorder, reference: Reference, is_held: Callable[[Any], bool]
) -> None:
    """Have the updates of a run held that `is_held` says. reference: the run of one rank."""
    for update_set in state.optimizer.update_sets:
        of_all: Any = update_set
        if isinstance(update_set.rule, AveragedRule):  # the average is of the weights that are set
            of_all = update_set.rule
        of_all.rule = HeldRule(of_all.rule, update_set.groups, reference, recorder, is_held)


def hold_what_rounding_moves(state: Any, recorder: Recorder, reference: Reference) -> None:
    """Have the updates of a draw held that are farther off than rounding that does not grow."""

    def is_held(shard: Any) -> bool:
        """Return whether the update of a shard, or its state, is not that of the first run."""
        growth = growth_of(reference, list(recorder.pieces_of_update(shard)))
        return any(map(reference.is_rounding, growth.values()))

    hold_updates(state, recorder, reference, is_held)


def hold_as_measured(state: Any, recorder: Recorder, reference: Reference) -> None:
    """Have the updates of a layout held that were in one of the draws."""

    def is_held(shard: Any) -> bool:
        """Return whether rounding decides the update of a shard's parameter in this step."""
        return (recorder.step, shard.spec.name) in reference.rounding.held

    hold_updates(state, recorder, reference, is_held)
