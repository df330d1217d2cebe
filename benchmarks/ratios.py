"""How two columns of numbers compare: their ratio, and whether they are in the same order."""

import random
import statistics
from collections.abc import Sequence

import numpy as np

RESAMPLED = 4000


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
