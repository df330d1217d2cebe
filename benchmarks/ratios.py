"""How two columns of seconds compare that were measured in turns, on a machine that others use."""

import random
import statistics

RESAMPLED = 4000


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Interquartile mean of the rounds' ratios, with its middle 95 % over resampled rounds.

    Outliers of a shared machine affect it no more than the median, and it needs fewer rounds.
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
