"""The transfer check: which learning rate is the best at each width or depth, and how flat it is.

    grid = Grid(ladder, rates, steps, seeds)
    line = grid.losses(width=64, layers=2)        the loss at each rate

A run trains on new samples in each step, with a warm-up of a tenth and a linear fall to zero; its
loss is the mean of the last tenth of its steps. Rates are a grid of a factor, such as 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import trainer
from config.learning_rate import rate_at
from tools.checker.coordinates import Chain
from tools.checker.sizes import BATCH, Ladder

FLAT = 0.01  # losses within this part of the best are as good


@dataclass(frozen=True)
class Grid:
    """What runs at every size: these rates, so many steps, the mean over seeds."""

    ladder: Ladder
    rates: tuple[float, ...]
    steps: int
    seeds: int

    def losses(self, width: int, layers: int) -> list[float]:
        """Return the loss at each rate; infinity for a run that diverges."""
        return [
            sum(self._loss(width, layers, rate, seed) for seed in range(1, self.seeds + 1))
            / self.seeds
            for rate in self.rates
        ]

    def _loss(self, width: int, layers: int, rate: float, seed: int) -> float:
        """Return the mean loss of a run's last tenth of steps; infinite if a loss is not finite."""
        warmup = self.steps // 10 * BATCH
        schedule = {"lr_schedule": "linear", "min_lr": 0.0, "lr_warmup_samples": warmup}
        config = self.ladder.at(width, layers, seed, lr=rate, steps=self.steps, **schedule)
        state = trainer.build(config)
        model = config.model
        samples = Chain(model.vocab_size, model.seq_length, seed)
        losses = []
        for step in range(self.steps):
            consumed = step * BATCH
            rate_now = rate_at(state.timeline, consumed, 0, BATCH)
            losses.append(trainer.step(state, samples, consumed, rate_now).loss)
            if not math.isfinite(losses[-1]):
                return math.inf
        last = losses[-max(1, self.steps // 10) :]
        return sum(last) / len(last)


@dataclass(frozen=True)
class Best:
    """The best rate at a size. place: its place in the grid. low, high: the places of the rates
    around it whose losses are within FLAT of its loss.
    """

    place: int
    low: int
    high: int


def best(losses: Sequence[float]) -> Best:
    """Return the best of a row of losses, and how flat they are around it."""
    place = min(range(len(losses)), key=losses.__getitem__)
    limit = losses[place] * (1 + FLAT)
    low = high = place
    while low > 0 and losses[low - 1] <= limit:
        low -= 1
    while high + 1 < len(losses) and losses[high + 1] <= limit:
        high += 1
    return Best(place, low, high)


def drift(rows: Sequence[Sequence[float]]) -> int:
    """Return by how many places of the grid the best rate moves from the first to the last size."""
    return best(rows[-1]).place - best(rows[0]).place


def at_edge(rows: Sequence[Sequence[float]]) -> bool:
    """Return whether a best rate is the first or the last of the grid, so that it may be beyond."""
    return any(best(row).place in (0, len(row) - 1) for row in rows)
