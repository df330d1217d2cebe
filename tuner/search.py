"""Which layout to measure next, and when to stop: the planner's seconds, corrected by every run.

    search = Search([Point("tp8", 1.2, (3, 0)), ...])
    while (index := search.next()) is not None:
        search.tell(index, measure(index))         # None if it failed
    search.best

The logarithm of measured over predicted is a Gaussian process: one factor for all (the machine is
slower than thought), slopes along each feature (tp costs more than thought), and a rest that near
layouts share. How far the planner may be off is learned too. What is measured next is the layout
with the largest expected improvement over the best one (Mockus 1978; Jones 1998); the search ends
when none can plausibly win. Pure arithmetic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from config.schema import Config

# How far the planner may be off, as the standard deviation of a logarithm: along one feature by
# one unit, and by the rest. Candidates, with the weight each has before anything is measured.
ERRORS = ((0.02, 0.3), (0.04, 0.5), (0.08, 1.0), (0.16, 0.7), (0.32, 0.4), (0.64, 0.1))
COMMON_FACTOR = 1.5  # the same for the machine's speed as a whole, which is often not known
REST = 0.5  # the rest beside one slope
REACH = 1.5  # distance in features over which two layouts share the rest
NOISE = 0.01  # least standard deviation of the logarithm of a measurement


@dataclass(frozen=True)
class Point:
    """One layout as the search sees it: predicted seconds, and where it lies."""

    name: str
    predicted: float
    features: tuple[float, ...]


def features(config: Config) -> tuple[float, ...]:
    """Where a layout lies, along the axes on which planners go wrong; powers of two are one apart.

    Choices that are not numbers are half a unit from one another.
    """
    at = config.layout
    return (
        math.log2(at.tp),
        math.log2(at.pp),
        math.log2(at.micro_batch_size),
        0.5 * (at.recompute == "full"),
        0.5 * (at.recompute == "selective"),
        0.5 * (at.sequence_parallel and at.tp > 1),
        0.5 * (at.schedule != "1f1b" and at.pp > 1),
        0.5 * (at.partition not in ("balanced", "blocks") and at.pp > 1),
        0.5 * at.zero * (at.dp > 1),
    )


class Search:
    """What is known of every layout so far."""

    def __init__(
        self, points: Sequence[Point], gain: float = 0.01, doubt: float = 0.05, noise: float = NOISE
    ):
        """Stop when none beats the best by the share `gain` with a probability above `doubt`."""
        self.points = list(points)
        self.gain, self.doubt, self.noise = gain, doubt, max(noise, NOISE)
        self.told: dict[int, list[float]] = {}
        self.failed: set[int] = set()
        where = np.array([p.features for p in self.points])
        self._prior = np.log([p.predicted for p in self.points])
        self._slopes = where @ where.T
        apart = ((where[:, None] - where[None]) ** 2).sum(-1)
        self._near = np.exp(-apart / (2 * REACH**2))

    def tell(self, index: int, seconds: float | None) -> None:
        """A run of the layout took that long; None: it failed, and will not be asked for again."""
        if seconds is None:
            self.failed.add(index)
        else:
            self.told.setdefault(index, []).append(seconds)

    @property
    def left(self) -> list[int]:
        """Layouts without a measurement that have not failed."""
        return [i for i in range(len(self.points)) if i not in self.told and i not in self.failed]

    @property
    def best(self) -> int | None:
        """The fastest measured layout, by the geometric mean of its runs."""
        means = {i: self._mean(i) for i in self.told if i not in self.failed}
        return min(means, key=means.get) if means else None

    def contenders(self, most: int = 3) -> list[int]:
        """Layouts measured once that noise alone may keep from first place, and the first itself.

        None if the first leaves all others behind by more than noise explains; `most` at most.
        """
        means = {i: self._mean(i) for i in self.told if i not in self.failed}
        order = sorted(means, key=means.get)
        near = [i for i in order if means[i] - means[order[0]] < 2 * math.sqrt(2) * self.noise]
        return [i for i in near if len(self.told[i]) == 1][:most] if len(near) > 1 else []

    def _mean(self, index: int) -> float:
        return float(np.mean(np.log(self.told[index])))

    def next(self) -> int | None:
        """The layout to measure next, or None when no other can plausibly win."""
        left = self.left
        if not left:
            return None
        if self.best is None:
            return min(left, key=lambda i: self.points[i].predicted / self.odds(i))
        chances = self.chances()
        if max(chances[i] for i in left) <= self.doubt:
            return None
        mean, deviation = self.expected()
        best = self._mean(self.best)
        return max(
            left,
            key=lambda i: self.odds(i) * expected_improvement(best - mean[i], deviation[i]),
        )

    def odds(self, index: int) -> float:
        """The probability that a layout runs at all, from near ones that did and that failed."""
        ran = sum(self._near[index, i] for i in self.told)
        failed = sum(self._near[index, i] for i in self.failed)
        return (1 + ran) / (1 + ran + failed)

    def chances(self) -> list[float]:
        """Of every layout, the probability that it beats the best one by more than `gain`."""
        mean, deviation = self.expected()
        goal = self._mean(self.best) + math.log1p(-self.gain)
        return [normal_cdf((goal - m) / d) for m, d in zip(mean, deviation, strict=True)]

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the logarithm of every layout's seconds."""
        known = sorted(i for i in self.told if i not in self.failed)
        off = np.array([self._mean(i) for i in known]) - self._prior[known]
        noise = np.array([self.noise**2 / len(self.told[i]) for i in known])
        found = [self._given(error, known, off, noise) for error, _ in ERRORS]
        weight = np.log([weight for _, weight in ERRORS]) + [evidence for evidence, _, _ in found]
        weight = np.exp(weight - weight.max())
        weight /= weight.sum()
        mean = sum(w * m for w, (_, m, _) in zip(weight, found, strict=True))
        # The variance of a mixture: what each expects, and how far they are apart.
        spread = sum(w * (v + (m - mean) ** 2) for w, (_, m, v) in zip(weight, found, strict=True))
        return self._prior + mean, np.sqrt(spread)

    def _given(self, error: float, known: list[int], off, noise):
        """Log evidence, mean and variance of the corrections, if the planner's error is that."""
        covariance = COMMON_FACTOR**2 + error**2 * (self._slopes + REST**2 * self._near)
        if not known:
            return 0.0, np.zeros(len(self.points)), np.diag(covariance)
        across = covariance[:, known]
        factor = np.linalg.cholesky(covariance[np.ix_(known, known)] + np.diag(noise))
        solved = np.linalg.solve(factor, off)
        mean = across @ np.linalg.solve(factor.T, solved)
        reduced = np.linalg.solve(factor, across.T)
        variance = np.maximum(np.diag(covariance) - (reduced**2).sum(0), self.noise**2)
        evidence = -0.5 * solved @ solved - np.log(np.diag(factor)).sum()
        return float(evidence), mean, variance


def expected_improvement(gap: float, deviation: float) -> float:
    """Mean of max(0, x) for x normal with mean `gap`."""
    z = gap / deviation
    density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return gap * normal_cdf(z) + deviation * density


def normal_cdf(z: float) -> float:
    """Probability that a standard normal number is below z."""
    return 0.5 * math.erfc(-z / math.sqrt(2))
