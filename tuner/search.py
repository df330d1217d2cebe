"""Which layout to measure next, and when to stop: the planner's seconds, corrected by every run.

    search = Search([Point("tp8", 1.2, (3, 0)), ...])
    while (index := search.next()) is not None:
        search.add(index, measure(index))          # None if it failed
    search.best

The logarithm of measured over predicted seconds is a Gaussian process: one factor common to all
(the machine is slower than assumed), a slope along each feature (tp costs more than assumed), and
a residual that near layouts share. The scale of the planner's error is estimated too. The layout
with the largest expected improvement over the best one is measured next (Mockus 1978; Jones 1998);
the search ends when no layout is likely to be faster. Pure arithmetic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from config.schema import Config
from planner.risk import NINETY
from planner.step_time import Prediction

# The planner's error, as the standard deviation of a logarithm: along one feature by one unit,
# and of the residual. Candidates, with the weight of each before anything is measured.
ERROR_SCALES = ((0.02, 0.3), (0.04, 0.5), (0.08, 1.0), (0.16, 0.7), (0.32, 0.4), (0.64, 0.1))
COMMON_FACTOR = 1.5  # standard deviation of the common factor: a machine's speed is often unknown
RESIDUAL = 0.5  # the residual's scale, relative to one slope
LENGTH_SCALE = 1.5  # distance in features over which two layouts share the residual
MAX_CHANCE = 0.05  # the search ends when no layout is faster with a larger probability
LEAST_NOISE = 0.01  # least standard deviation of the logarithm of a measurement


@dataclass(frozen=True)
class Point:
    """One layout of a search: its predicted seconds, its position in the feature space, and how
    sure the planner is: the standard deviation of the logarithm of its seconds, and the probability
    of running out of memory.
    """

    name: str
    predicted: float
    features: tuple[float, ...]
    spread: float = 0.0
    risk: float = 0.0


def point(label: str, config: Config, prediction: Prediction) -> Point:
    """The point of a layout, with the planner's own interval and risk."""
    low, high = prediction.interval
    spread = math.log(high / low) / (2 * NINETY)
    return Point(label, prediction.seconds, features(config), spread, prediction.risk)


def features(config: Config) -> tuple[float, ...]:
    """A layout's position along the axes on which predictions err; a factor of two is one unit.

    Options that are not numbers are half a unit from one another.
    """
    at = config.layout
    return (
        *map(math.log2, (at.tp, at.pp, at.cp, at.micro_batch_size)),
        0.5 * (at.recompute == "full") * _recomputed(config),
        0.5 * (at.recompute == "selective"),
        0.5 * bool(at.sequence_parallel and at.tp > 1),
        0.5 * (at.schedule != "1f1b" and at.pp > 1),
        0.5 * math.log2(at.stages_per_rank) * (at.pp > 1),
        0.5 * bool(at.vocab_pp and at.pp > 1),
        0.5 * (at.partition not in ("balanced", "blocks") and at.pp > 1),
        0.5 * at.zero * (at.dp * at.cp > 1),
    )


def _recomputed(config: Config) -> float:
    """The share of the blocks that is recomputed, of a layout that recomputes some."""
    layers = config.layout.recompute_layers
    return 1.0 if layers is None else min(1.0, layers * config.layout.stages / config.model.layers)


class Search:
    """The measurements so far, and what follows from them for every layout."""

    def __init__(self, points: Sequence[Point], min_gain: float = 0.01, noise: float = LEAST_NOISE):
        """Stop when no layout has a chance above MAX_CHANCE to be faster by `min_gain`.

        `min_gain` is a share of the best layout's seconds, `noise` the standard deviation of the
        logarithm of one measurement.
        """
        self.points = list(points)
        self.min_gain = min_gain
        self.noise = max(noise, LEAST_NOISE)
        self.measured: dict[int, list[float]] = {}  # seconds of each run, by layout
        self.failed: set[int] = set()
        positions = np.array([p.features for p in self.points])
        self._log_predicted = np.log([p.predicted for p in self.points])
        self._linear_kernel = positions @ positions.T
        lengths = np.diag(self._linear_kernel)
        squares = lengths[:, None] + lengths[None] - 2 * self._linear_kernel
        self._near_kernel = np.exp(-np.maximum(squares, 0.0) / (2 * LENGTH_SCALE**2))
        # The planner's uncertainty about a layout beyond that about the layout which it knows best.
        spreads = np.array([p.spread for p in self.points])
        self._own_variance = np.diag(spreads**2 - (spreads**2).min(initial=math.inf))

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
        return [i for i in range(len(self.points)) if i not in tried]

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
        return [i for i in near if len(self.measured[i]) == 1][:most] if len(near) > 1 else []

    def _log_means(self) -> dict[int, float]:
        """Mean logarithm of the seconds of every layout that ran and never failed."""
        ran = (i for i in self.measured if i not in self.failed)
        return {i: float(np.mean(np.log(self.measured[i]))) for i in ran}

    def next(self) -> int | None:
        """The layout to measure next, or None when no other is likely to be faster."""
        untried = self.untried
        likely = self.success_probability
        if not untried:
            return None
        if self.best is None:
            return min(untried, key=lambda i: self.points[i].predicted / likely(i))
        mean, deviation = (values.tolist() for values in self.posterior())
        best = self._log_means()[self.best]
        goal = best + math.log1p(-self.min_gain)
        if all(normal_cdf((goal - mean[i]) / deviation[i]) <= MAX_CHANCE for i in untried):
            return None
        return max(
            untried,
            key=lambda i: likely(i) * expected_improvement(best - mean[i], deviation[i]),
        )

    def success_probability(self, index: int) -> float:
        """The probability that a layout runs at all, from near ones that did and that failed."""
        ran = sum(self._near_kernel[index, i] for i in self.measured)
        failed = sum(self._near_kernel[index, i] for i in self.failed)
        return max(0.01, 1 - self.points[index].risk) * (1 + ran) / (1 + ran + failed)

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the logarithm of every layout's seconds."""
        means = self._log_means()
        known = sorted(means)
        errors = np.array([means[i] for i in known]) - self._log_predicted[known]
        noise = np.array([self.noise**2 / len(self.measured[i]) for i in known])
        fits = [self._regression(scale, known, errors, noise) for scale, _ in ERROR_SCALES]
        evidence, means_by_scale, variances = map(np.array, zip(*fits, strict=True))
        weight = np.log([prior for _, prior in ERROR_SCALES]) + evidence
        weight = np.exp(weight - weight.max())
        weight /= weight.sum()
        mean = weight @ means_by_scale
        # The variance of a mixture: within its components and between them.
        variance = weight @ (variances + (means_by_scale - mean) ** 2)
        return self._log_predicted + mean, np.sqrt(variance)

    def _regression(
        self,
        scale: float,
        known: list[int],
        errors: np.ndarray,
        noise: np.ndarray,
    ) -> tuple[float, np.ndarray, np.ndarray]:
        """Log evidence, and mean and variance of the planner's log error, at one error scale."""
        kernel = self._linear_kernel + RESIDUAL**2 * self._near_kernel
        covariance = COMMON_FACTOR**2 + scale**2 * kernel + self._own_variance
        across = covariance[:, known]
        factor = np.linalg.cholesky(across[known] + np.diag(noise))
        solved = np.linalg.solve(factor, errors)
        mean = across @ np.linalg.solve(factor.T, solved)
        reduced = np.linalg.solve(factor, across.T)
        variance = np.maximum(np.diag(covariance) - (reduced**2).sum(0), self.noise**2)
        evidence = -0.5 * solved @ solved - np.log(np.diag(factor)).sum()
        return evidence, mean, variance


def expected_improvement(gap: float, deviation: float) -> float:
    """Mean of max(0, x) for x normal with mean `gap`."""
    z = gap / deviation
    density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return gap * normal_cdf(z) + deviation * density


def normal_cdf(z: float) -> float:
    """Probability that a standard normal variable is below z."""
    return 0.5 * math.erfc(-z / math.sqrt(2))
