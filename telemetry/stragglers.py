"""Names ranks that compute much longer than the others of their pipeline stage, in the log."""

import math
from collections.abc import Callable, Sequence

from config.mesh_axes import coordinates
from config.schema import Config
from telemetry.observer import Observer, Step
from telemetry.step_stats import StepStats, ranks_of_stages
from zero import StepResult


class StragglerCheck(Observer):
    """Finds ranks that compute much longer than the other ranks of their pipeline stage.

    The compared time is a step's wall time minus the time that the rank waited for other ranks.
    With gloo the host times the waits of every step. With nccl, CUDA events time the waits in the
    steps that step_times.py measures, where a collective's whole duration counts as waiting; only
    these steps are compared. A rank that is alone in its stage is never reported.
    """

    def __init__(self, config: Config, nodes: list[str], note: Callable[[str], None]):
        """Begin without steps, of which none is timed.

        nodes: the node of each rank, in order. note: writes a line to the log.
        """
        self.every = config.run.check_speed_every  # steps from one check to the next
        self.percent = config.run.slow_rank_percent  # a rank is slow if it takes this % longer
        self.layout = config.layout
        self.nodes = nodes
        self.note = note
        # By rank, the seconds of computing in the steps whose waits were timed.
        self.computing = [0.0] * len(nodes)
        self.steps = 0  # the number of steps since the last check
        self.timed = 0  # the number of steps since the last check whose waits were timed

    def after_step(self, step: Step, result: StepResult) -> None:
        """Count a step, and write a line for each slow rank if a check is due."""
        for line in self.add(step.stats):
            self.note(line)

    def add(self, everyone: list[StepStats]) -> list[str]:
        """Count a step; after check_speed_every steps, return a line for each slow rank.

        In other steps the list is empty. If the waits of none of the
        steps were timed, the check is made after the next step whose waits are timed.
        """
        if not self.every:  # check_speed_every 0: no check
            return []
        self.steps += 1
        # A rank's `waiting` is NaN if its waits in this step were not timed.
        if not any(math.isnan(stats.waiting) for stats in everyone):
            self.timed += 1
            for rank, stats in enumerate(everyone):
                self.computing[rank] += stats.seconds - stats.waiting
        if self.steps < self.every or not self.timed:
            return []
        lines = self._slow([total / self.timed for total in self.computing])
        self.computing = [0.0] * len(everyone)
        self.steps = 0
        self.timed = 0
        return lines

    def _slow(self, seconds: list[float]) -> list[str]:
        """Return a line per slow rank; seconds: by rank, the mean seconds of computing a step."""
        lines = []
        steps = f"the last {self.steps}"
        if self.timed < self.steps:
            steps = f"{self.timed} measured steps of {steps}"
        for ranks in ranks_of_stages(self.layout):
            medians = medians_of_others([seconds[rank] for rank in ranks])
            for rank, median in zip(ranks, medians, strict=True):
                seconds_of_rank = seconds[rank]
                if seconds_of_rank <= median * (1 + self.percent / 100):
                    continue
                position = coordinates(rank, self.layout.axes)
                axes = f"tp {position['tp']}, pp {position['pp']}, dp {position['dp']}"
                lines.append(
                    f"SLOW: rank {rank} ({axes}) on "
                    f"{self.nodes[rank]} computed {seconds_of_rank:.4f} s a step over {steps}, "
                    f"{seconds_of_rank / median - 1:.0%} longer than the median of the "
                    f"{len(ranks) - 1} others of its stage, {median:.4f} s"
                )
        return lines


def medians_of_others(values: Sequence[float]) -> list[float]:
    """Return, for each value, the median of the other values; of a single value itself.

    The values are sorted once, so that thousands of ranks take milliseconds.
    """
    count = len(values)
    if count == 1:
        return list(values)
    order = sorted(range(count), key=values.__getitem__)
    ascending = [values[index] for index in order]
    medians = [0.0] * count
    for place, index in enumerate(order):
        # The two places in the middle of the others, which are one place if their number is odd.
        # In `ascending` the places from that of the value on are one further.
        low, high = (count - 2) // 2, (count - 1) // 2
        low += low >= place
        high += high >= place
        medians[index] = (ascending[low] + ascending[high]) / 2
    return medians
