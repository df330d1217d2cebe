"""Which layout to measure next, and when to stop: the planner's seconds, corrected by every run.

    search = Search([1.2, 0.9, 1.4], [(3, 0), (0, 3), (1, 2)])
    while (index := search.next()) is not None:
        search.add(index, measure(index))           # None if it failed
    search.best

The planner's error is the logarithm of a layout's measured over its predicted seconds. A Bayesian
linear regression describes it as a sum: a part common to all layouts (the machine is slower than
assumed), a slope along each feature of the layout (tp costs more than assumed), and an independent
part of each layout. So a measurement of one layout corrects the predictions of similar layouts. The
layout that is most likely to be faster than the best measured layout is measured next (Kushner
1964); the search ends when no layout is likely to be faster. A layout is named by its index in the
list of predictions. A failed run, for example for lack of memory, has no seconds.
"""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from config.schema import Config

# The standard deviation, before any measurement, of the part of the planner's error that all
# layouts have in common. It is large, since the machine's speed is often unknown.
COMMON_ERROR = 1.5
# The standard deviation of the difference between the errors of two layouts, before any
# measurement, if a feature of theirs differs by one unit.
SLOPE_ERROR = 0.05
OWN_ERROR = 0.025  # the standard deviation of the part of the error that one layout has alone
MAX_CHANCE = 0.05  # the search ends when no layout is faster with a larger probability than this
LEAST_NOISE = 0.01  # a measurement's logarithm has at least this standard deviation


def features(config: Config) -> tuple[float, ...]:
    """Return a layout's 12 features, by which the planner's errors of two layouts are compared.

    Layouts with similar features are assumed to have similar errors. A factor of two in a number,
    such as tp, is one unit; an option that is on or off is half a unit. Options that have no effect
    in the layout, such as the schedule without a pipeline, count as off.
    """
    layout = config.layout
    pipeline = layout.pp > 1
    recomputed = 0.0  # the share of the blocks that are recomputed
    if layout.recompute == "full":
        recomputed = 1.0
        if layout.recompute_layers is not None:  # the number of recomputed blocks of each stage
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
        0.5 * (layout.partition not in ("balanced", "blocks") and pipeline),
        0.5 * layout.zero * (layout.dp * layout.cp > 1),
        0.5 * (not layout.sync_each_batch),
        0.5 * (not layout.reshard_after_forward),
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
        """Begin without measurements, with the covariance of the planner's errors as assumed.

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
        # The covariance of two layouts' errors is the sum of the three parts' covariances.
        common = COMMON_ERROR**2
        slopes = SLOPE_ERROR**2 * (np.array(positions) @ np.array(positions).T)
        independent = OWN_ERROR**2 * np.eye(len(self.predicted))
        self._covariance = common + slopes + independent  # of any two errors: (layouts, layouts)

    def add(self, index: int, seconds: float | None) -> None:
        """Add the result of a run of the layout `index`: its seconds, or None if the run failed.

        A layout with a failed run is not proposed again, and no longer counts as measured.
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
        """The layout with the smallest geometric mean of its runs' seconds; None before any run."""
        means = self._log_means()
        return min(means, key=means.__getitem__, default=None)

    def contenders(self, most: int = 3) -> list[int]:
        """Return up to `most` layouts to measure once more, the fastest first.

        When the search has ended, some layouts may be so close to the best layout that noise alone
        explains the difference. If there are such layouts, those of them that were measured only
        once are returned, and so is the best layout if it was measured only once. Else the result
        is empty.
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
        # goal: a layout with fewer seconds than exp(goal) is faster than the best by `min_gain`.
        # margin: by how many standard deviations goal is above a layout's mean; the larger, the
        # likelier the layout reaches it.
        goal = min(means.values()) + math.log1p(-self.min_gain)
        margin = (goal - mean) / deviation
        likeliest = max(untried, key=margin.__getitem__)
        chance = statistics.NormalDist().cdf(margin[likeliest])
        return likeliest if chance > MAX_CHANCE else None

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation of the logarithm of each layout's seconds: (layouts,).

        They are the prediction, corrected by the measurements, of which there must be at least one:
        the posterior of a Gaussian process with the covariance of the planner's errors.
        """
        means = self._log_means()
        known = list(means)
        # The planner's error for each layout that was measured: the mean over the layout's n runs,
        # which has the variance noise**2 / n.
        errors = np.array(list(means.values())) - self._log_predicted[known]
        noise = [self.noise**2 / len(self.measured[index]) for index in known]
        covariance_with_known = self._covariance[known]  # (known, layouts)
        covariance_of_known = covariance_with_known[:, known] + np.diag(noise)
        weights = np.linalg.solve(covariance_of_known, covariance_with_known)
        variance = np.diag(self._covariance) - (weights * covariance_with_known).sum(0)
        deviation = np.sqrt(np.maximum(variance, self.noise**2))
        return self._log_predicted + errors @ weights, deviation

    def _log_means(self) -> dict[int, float]:
        """Return by layout the mean logarithm of its runs' seconds.

        Only layouts that ran, and of which no run failed, are included.
        """
        means = {}
        for index, seconds in self.measured.items():
            if index not in self.failed:
                means[index] = statistics.mean(map(math.log, seconds))
        return means
