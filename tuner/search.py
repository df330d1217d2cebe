"""Which layout to measure next, and when to stop: the planner's seconds, corrected by every run.

    search = Search([1.2, 0.9, 1.4], [(3, 0), (0, 3), (1, 2)])
    while (index := search.next()) is not None:
        search.add(index, measure(index))           # None if it failed
    search.best

The logarithm of measured over predicted seconds is a Bayesian linear regression: one factor common
to all layouts (the machine is slower than assumed), a slope along each feature (tp costs more than
assumed), and an independent error per layout. The layout that is most likely to be faster than the
best measured layout is measured next (Kushner 1964); the search ends when no layout is likely to be
faster. Layouts are named by their index in the list of predictions.
"""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from config.schema import Config

# The planner's errors, as standard deviations of the logarithm of a step's seconds.
COMMON_ERROR = 1.5  # of all layouts alike, since the machine's speed is often unknown
# Standard deviations of the logarithm of measured over predicted seconds, before any measurement:
SLOPE_ERROR = 0.05  # the part that two layouts differ by if a feature of theirs differs by one unit
OWN_ERROR = 0.025  # the part of one layout alone
MAX_CHANCE = 0.05  # the search ends when no layout is faster with a larger probability
LEAST_NOISE = 0.01  # least standard deviation of the logarithm of a measurement


def features(config: Config) -> tuple[float, ...]:
    """Return a layout's position in units along the 12 axes on which predictions err.

    A factor of two in a number is one unit; two values of another option are half a unit apart.
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
    """The measurements so far, and the choice of the layout to measure next."""

    def __init__(
        self,
        predicted: Sequence[float],
        positions: Sequence[Sequence[float]],
        min_gain: float = 0.01,
        noise: float = LEAST_NOISE,
    ):
        """Begin without measurements.

        predicted: the planner's seconds per layout. positions: the features per layout. min_gain:
        the search ends when no layout is likely to save this share of the best layout's seconds.
        noise: the standard deviation of the logarithm of one measurement.
        """
        self.predicted = list(predicted)
        self.min_gain = min_gain
        self.noise = max(noise, LEAST_NOISE)
        self.measured: dict[int, list[float]] = {}  # by layout, the seconds of its runs
        self.failed: set[int] = set()  # layouts with a run that failed
        self._log_predicted = np.log(self.predicted)
        common = COMMON_ERROR**2
        slopes = SLOPE_ERROR**2 * (np.array(positions) @ np.array(positions).T)
        independent = OWN_ERROR**2 * np.eye(len(self.predicted))
        self._covariance = common + slopes + independent  # of the planner's errors, per two layouts

    def add(self, index: int, seconds: float | None) -> None:
        """Add a run of the layout `index`; seconds: None if the run failed.

        A layout with a failed run is not proposed again.
        """
        if seconds is None:
            self.failed.add(index)
        else:
            self.measured.setdefault(index, []).append(seconds)

    @property
    def untried(self) -> list[int]:
        """The indices of the layouts that have neither a measurement nor a failed run."""
        tried = self.failed | self.measured.keys()
        return [index for index in range(len(self.predicted)) if index not in tried]

    @property
    def best(self) -> int | None:
        """The layout with the smallest geometric mean of its runs' seconds; None before a run."""
        means = self._log_means()
        return min(means, key=means.__getitem__, default=None)

    def contenders(self, most: int = 3) -> list[int]:
        """Return up to `most` layouts to measure once more, the fastest first.

        The layouts were measured once, and noise alone may explain why they are slower than the
        best layout; the best layout may be among them. If noise explains no other layout's
        distance from the best one, the result is empty.
        """
        means = self._log_means()
        order = sorted(means, key=means.__getitem__)
        # Two standard deviations of the difference of two measurements.
        margin = 2 * math.sqrt(2) * self.noise
        near = [index for index in order if means[index] - means[order[0]] < margin]
        if len(near) < 2:
            return []
        measured_once = [index for index in near if len(self.measured[index]) == 1]
        return measured_once[:most]

    def next(self) -> int | None:
        """Return the layout to measure next, or None if no other layout is likely to be faster.

        Before the first measurement it is the layout with the fewest predicted seconds.
        """
        untried = self.untried
        means = self._log_means()
        if not untried:
            return None
        if not means:
            return min(untried, key=self.predicted.__getitem__)
        mean, deviation = self.posterior()
        goal = min(means.values()) + math.log1p(-self.min_gain)  # the logarithm of seconds
        margin = (goal - mean) / deviation
        likeliest = max(untried, key=margin.__getitem__)
        chance = statistics.NormalDist().cdf(margin[likeliest])
        return likeliest if chance > MAX_CHANCE else None

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation of the logarithm of all layouts' seconds: (layouts,).

        This is the regression's posterior given the measurements, of which there is at least one.
        """
        means = self._log_means()
        known = list(means)
        errors = np.array(list(means.values())) - self._log_predicted[known]
        noise = [self.noise**2 / len(self.measured[index]) for index in known]
        covariance_with_known = self._covariance[known]  # (known, layouts)
        covariance_of_known = covariance_with_known[:, known] + np.diag(noise)
        weights = np.linalg.solve(covariance_of_known, covariance_with_known)
        variance = np.diag(self._covariance) - (weights * covariance_with_known).sum(0)
        deviation = np.sqrt(np.maximum(variance, self.noise**2))
        return self._log_predicted + errors @ weights, deviation

    def _log_means(self) -> dict[int, float]:
        """Return, by layout that ran and never failed, the mean logarithm of its runs' seconds."""
        means = {}
        for index, seconds in self.measured.items():
            if index not in self.failed:
                means[index] = statistics.mean(map(math.log, seconds))
        return means
