"""Records the batches of loss spikes, and decides when training has diverged.

    spikes.jsonl    a row per spike: the loss, mean and sigma of the steps before it, and every
                    sample of the batch with its documents

Mean and sigma are of the last steps of this process, so the first steps after a restart are not
checked for spikes.
"""

import math
import os
import statistics
from collections import deque

from checkpointing.load import Progress
from config.messages import UserError
from config.schema import Config
from data import Samples
from telemetry.log import Log
from telemetry.row_file import RowFile
from zero import StepResult

WINDOW = 128  # steps of the mean and sigma
MIN_STEPS = 32  # steps before the first that may be a spike
# Relative to the mean: where the loss is almost constant, a rounding error must not be a spike.
MIN_SIGMA = 1e-3


class LossMonitor:
    """Takes the result of every step, on every rank.

    good: the progress after the last step with a finite loss. bad: the results since then.
    """

    def __init__(self, config: Config, samples: Samples, done: Progress, log: Log):
        """done: the progress so far. log: its writer writes spikes.jsonl too."""
        self.config, self.samples, self.good, self.log = config, samples, done, log
        self.spikes = RowFile(os.path.join(config.run.out, "spikes.jsonl"), log.note)
        self.bad: list[StepResult] = []
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def step(self, done: Progress, batch: int, result: StepResult) -> None:
        """Take the result of a step on `batch` samples; done: the progress after it."""
        loss, sigmas = result.loss, self.config.run.spike_sigma
        finite = math.isfinite(loss)
        if self.log.is_writer and sigmas and (not finite or len(self._recent) >= MIN_STEPS):
            self._record_spike(done, batch, loss, sigmas)
        if finite:
            self._recent.append(loss)
            self.good, self.bad = done, []
        else:
            self.bad.append(result)

    @property
    def diverged(self) -> bool:
        """Whether the loss has not been finite for --max-nan-steps steps."""
        return len(self.bad) >= self.config.run.max_nan_steps

    @property
    def state_intact(self) -> bool:
        """Whether weights and optimizer state are those of `good`: every later step was skipped."""
        return all(result.skipped for result in self.bad)

    def failure(self, now: Progress, saved: bool) -> UserError:
        """The error of a run that has diverged; saved: whether the state of `good` is."""
        good, run = self.good, self.config.run
        samples = f"--skip-samples {good.consumed_samples}:{now.consumed_samples}"
        advice = f"no state after step {good.iteration} is saved; the samples since: {samples}"
        if saved:
            advice = f"the state after step {good.iteration} is in {run.out}/checkpoints; --resume "
            advice += f"auto {samples} continues from it without the samples since"
        return UserError(
            f"the loss was not finite for {len(self.bad)} steps in a row, up to step "
            f"{now.iteration} (max-nan-steps is {run.max_nan_steps}): {advice}"
        )

    def _record_spike(self, done: Progress, batch: int, loss: float, sigmas: float) -> None:
        """Write the batch to spikes.jsonl if its loss is a spike."""
        mean = sigma = None
        if len(self._recent) >= 2:
            mean = statistics.fmean(self._recent)
            sigma = max(statistics.stdev(self._recent, mean), MIN_SIGMA * abs(mean))
            if loss <= mean + sigmas * sigma:  # false for NaN
                return
        begin = done.consumed_samples - batch
        row = {
            "iteration": done.iteration,
            "loss": loss if math.isfinite(loss) else None,
            "mean": mean,
            "sigma": sigma,
            "first_sample": begin,
            "samples": [
                {"sample": k, "text": [span._asdict() for span in self.samples.spans(k)]}
                for k in range(begin, begin + batch)
            ],
        }
        self.spikes.write(row)
        usual = "" if mean is None else f" against {mean:.4f} +- {sigma:.4f} before"
        self.log.note(
            f" loss spike at iteration {done.iteration}: {loss:.4f}{usual}; "
            f"samples {begin} to {done.consumed_samples - 1} are in {self.spikes.path}"
        )
