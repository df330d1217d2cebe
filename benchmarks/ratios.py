"""Sides that take turns, and how their columns of numbers compare: ratio, and order."""

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

RESAMPLED = 4000


def in_turns(sides: Sequence[Callable[[], Any]], rounds: int) -> list[list[Any]]:
    """Call the sides in turns, and return the results of each, round by round.

    The side that begins changes from round to round, and every second round is in the opposite
    order, so that no side always follows the same one.
    """
    found: list[list[Any]] = [[] for _ in sides]
    for number in range(rounds):
        shift = number // 2 % len(sides)
        order = [*range(shift, len(sides)), *range(shift)]
        for side in reversed(order) if number % 2 else order:
            found[side].append(sides[side]())
    return found


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Interquartile mean of the rounds' ratios, with its middle 95 % over resampled rounds.

    The columns are seconds that were measured in turns, on a machine that others use. Outliers
    affect the interquartile mean no more than the median, and it needs fewer rounds.
    """
    ratios = [a / b for a, b in zip(ours, theirs)]
    chance = random.Random(1)
    means = sorted(middle(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    low, high = means[RESAMPLED // 40], means[-RESAMPLED // 40]
    return f"{middle(ratios):.4f} ({low:.4f} to {high:.4f})"


def middle(ratios: list[float]) -> float:
    """The mean without the lowest and the highest quarter."""
    quarter = len(ratios) // 4
    return statistics.fmean(sorted(ratios)[quarter : len(ratios) - quarter])


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float:
    """Kendall's rank correlation: share of pairs in the same order less that in the other order."""
    a, b = np.array(left), np.array(right)
    upper = np.triu_indices(len(a), 1)
    signs = np.sign(a[:, None] - a)[upper] * np.sign(b[:, None] - b)[upper]
    return float(signs.mean())
