"""Which layout to measure next, and when to stop: the planner's seconds, corrected by every run.

    search = Search([1.2, 0.9, 1.4], [(3, 0), (0, 3), (1, 2)])
    while (index := search.next()) is not None:
        search.add(index, measure(index))           # None if it failed
    search.best

The logarithm of measured over predicted seconds is a Bayesian linear regression: one factor common
to all layouts (the machine is slower than assumed), a slope along each feature (tp costs more than
assumed), and an error of each layout for itself. The layout that is most likely to be faster than
the best one is measured next (Kushner 1964); the search ends when none is likely to be.
"""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from config.schema import Config

# The planner's error, as standard deviations of the logarithm of seconds: of a machine's speed,
# which is often unknown; along one feature by one unit; and of one layout.
COMMON_ERROR = 1.5
SLOPE_ERROR = 0.05
OWN_ERROR = 0.025
MAX_CHANCE = 0.05  # the search ends when no layout is faster with a larger probability
LEAST_NOISE = 0.01  # least standard deviation of the logarithm of a measurement


def features(config: Config) -> tuple[float, ...]:
    """A layout's position along the axes on which predictions err; a factor of two is one unit.

    Options that are not numbers are half a unit from one another.
    """
    layout = config.layout
    pipeline = layout.pp > 1
    recomputed = 0.0
    if layout.recompute == "full":
        recomputed = 1.0
        if layout.recompute_layers is not None:
            recomputed = min(1.0, layout.recompute_layers * layout.stages / config.model.layers)
    return (
        math.log2(layout.tp),
        math.log2(layout.pp),
        math.log2(layout.cp),
        math.log2(layout.micro_batch_size),
        0.5 * recomputed,
        0.5 * (layout.recompute == "selective"),
        0.5 * bool(layout.sequence_parallel and layout.tp > 1),
        0.5 * (layout.schedule != "1f1b" and pipeline),
        0.5 * math.log2(layout.stages_per_rank) * pipeline,
        0.5 * bool(layout.vocab_pp and pipeline),
        0.5 * (layout.partition not in ("balanced", "blocks") and pipeline),
        0.5 * layout.zero * (layout.dp * layout.cp > 1),
    )


class Search:
    """The measurements so far, and what follows from them for the other layouts."""

    def __init__(
        self,
        predicted: Sequence[float],
        positions: Sequence[Sequence[float]],
        min_gain: float = 0.01,
        noise: float = LEAST_NOISE,
    ):
        """Stop when no layout has a chance above MAX_CHANCE to be faster by `min_gain`.

        predicted: seconds of each layout. positions: its features. min_gain: a share of the best
        layout's seconds. noise: the standard deviation of the logarithm of one measurement.
        """
        self.predicted = list(predicted)
        self.min_gain = min_gain
        self.noise = max(noise, LEAST_NOISE)
        self.measured: dict[int, list[float]] = {}  # seconds of each run, by layout
        self.failed: set[int] = set()
        self._log_predicted = np.log(self.predicted)
        slopes = np.array(positions) @ np.array(positions).T
        own = np.eye(len(self.predicted))
        self._covariance = COMMON_ERROR**2 + SLOPE_ERROR**2 * slopes + OWN_ERROR**2 * own

    def add(self, index: int, seconds: float | None) -> None:
        """Add one run of a layout; None if it failed, and then the layout is not proposed again."""
        if seconds is None:
            self.failed.add(index)
        else:
            self.measured.setdefault(index, []).append(seconds)

    @property
    def untried(self) -> list[int]:
        """Layouts without a measurement that have not failed."""
        tried = self.failed | self.measured.keys()
        return [index for index in range(len(self.predicted)) if index not in tried]

    @property
    def best(self) -> int | None:
        """The fastest measured layout, by the geometric mean of its runs."""
        means = self._log_means()
        return min(means, key=means.__getitem__, default=None)

    def contenders(self, most: int = 3) -> list[int]:
        """Layouts to measure once more, because noise alone may decide which one is the fastest.

        Those measured once and within noise of the best, with the best itself, at most `most`;
        none if the best is faster than all others by more than noise explains.
        """
        means = self._log_means()
        order = sorted(means, key=means.__getitem__)
        near = [i for i in order if means[i] - means[order[0]] < 2 * math.sqrt(2) * self.noise]
        if len(near) < 2:
            return []
        return [index for index in near if len(self.measured[index]) == 1][:most]

    def next(self) -> int | None:
        """The layout to measure next, or None when no other is likely to be faster."""
        untried = self.untried
        means = self._log_means()
        if not untried:
            return None
        if not means:
            return min(untried, key=self.predicted.__getitem__)
        mean, deviation = self.posterior()
        goal = min(means.values()) + math.log1p(-self.min_gain)
        margin = (goal - mean) / deviation
        likeliest = max(untried, key=margin.__getitem__)
        chance = statistics.NormalDist().cdf(margin[likeliest])
        return likeliest if chance > MAX_CHANCE else None

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the logarithm of every layout's seconds."""
        means = self._log_means()
        known = list(means)
        errors = np.array(list(means.values())) - self._log_predicted[known]
        noise = [self.noise**2 / len(self.measured[index]) for index in known]
        across = self._covariance[known]
        weights = np.linalg.solve(across[:, known] + np.diag(noise), across)
        variance = np.diag(self._covariance) - (weights * across).sum(0)
        deviation = np.sqrt(np.maximum(variance, self.noise**2))
        return self._log_predicted + errors @ weights, deviation

    def _log_means(self) -> dict[int, float]:
        """Mean logarithm of the seconds of every layout that ran and never failed."""
        found = {}
        for index, seconds in self.measured.items():
            if index not in self.failed:
                found[index] = statistics.mean(map(math.log, seconds))
        return found
