"""An exponential moving average of the weights (--ema), kept beside the optimizer's state.

After each update, average = decay x average + (1 - decay) x master. The average begins at the
weights with which the run begins, or at which a resume switches it on. A skipped step changes
nothing. It has the masters' type and is sharded as they are, so a checkpoint has it as one more
kind of state, which does not depend on the layout.
"""

from typing import TypeAlias

import torch
from torch import Tensor

from config.schema import EMA
from optim.update_rules import UpdateRule


class AveragedRule:
    """An update rule that updates its masters by another rule and then moves their average."""

    def __init__(self, rule: UpdateRule, masters: list[Tensor], decay: float):
        """Begin the average at the masters. decay: from 0 to below 1, the share that stays."""
        self.rule = rule
        self.kernel = rule.kernel
        self.masters = masters
        self.decay = decay
        self.averages = [master.clone() for master in masters]

    def update(self, gradients: list[Tensor], lr: float) -> None:
        """Update all masters once by gradients of the same shapes and type, and the averages."""
        self.rule.update(gradients, lr)
        if self.masters:
            torch._foreach_lerp_(self.averages, self.masters, 1.0 - self.decay)

    def begin(self) -> None:
        """Begin the averages anew, at the present masters."""
        if self.masters:
            torch._foreach_copy_(self.averages, self.masters)

    def swap(self) -> None:
        """Exchange the masters and the averages; the caller makes weights of the masters."""
        for master, average in zip(self.masters, self.averages):
            held = master.clone()
            master.copy_(average)
            average.copy_(held)

    def set_steps(self, steps: int) -> None:
        """Set the number of updates so far; called when a checkpoint has been loaded."""
        self.rule.set_steps(steps)

    def state_bytes(self) -> int:
        """Return the bytes of the state tensors that exist now, with the averages."""
        return self.rule.state_bytes() + sum(average.nbytes for average in self.averages)

    def read(self, kind: str, index: int, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a state tensor of master `index`, flat."""
        if kind == EMA:
            return self.averages[index].view(-1)[start:stop]
        return self.rule.read(kind, index, start, stop)

    def write(self, kind: str, index: int, start: int, values: Tensor) -> None:
        """Set elements of a state tensor of master `index` from `start` on; `values` is flat."""
        if kind == EMA:
            self.averages[index].view(-1)[start : start + len(values)] = values
        else:
            self.rule.write(kind, index, start, values)


Rule: TypeAlias = "UpdateRule | AveragedRule"
