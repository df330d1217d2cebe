"""Records the batches of spikes of loss and gradient norm; decides when training has diverged.

    spikes.jsonl    a row per spike: the step's loss, the mean and sigma of the steps before, and
                    every sample of the batch with its documents; "of" is "loss" or "grad_norm",
                    the value that has risen; with "grad_norm" the norm is in the row too

A value is a spike if it is more than --spike-sigma standard deviations (sigma) above the mean of
this process's last steps. So the first steps after a restart are not checked for spikes, except
that a loss which is not finite is always recorded; --on-spike (spikes.py) checks them too. For the
gradient norm, mean and sigma are taken of its logarithm, because the norm is positive and varies by
factors. The norm is checked because clipping makes the update of a step with a huge gradient
vanish, so that the loss may not rise. A step has one row at most: the norm is checked only if the
loss is no spike.
"""

import math
import os
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from checkpointing.checkpoints import Checkpoints
from checkpointing.state import Progress
from config.schema import Config
from data import Samples
from telemetry.log import Log
from telemetry.row_file import RowFile
from zero import StepResult

WINDOW = 128  # the mean and sigma are taken of this many last steps
MIN_STEPS = 32  # with fewer steps before it, a finite value is not checked
# The least sigma of the loss, as a share of the mean, so that a rounding error does not count as a
# spike while the loss is almost constant.
MIN_SIGMA = 1e-3
MIN_SIGMA_OF_LOG_NORM = 0.1  # least sigma of the norm's natural logarithm


class LossMonitor:
    """Finds spikes and divergence; the trainer calls `step` after every step, on every rank.

    good: the progress after the last step with a finite loss. bad: the results of the steps since
    then, none of which has a finite loss.
    """

    def __init__(self, config: Config, samples: Samples, done: Progress, log: Log):
        """Begin without earlier steps.

        samples: the run's data set. done: the progress so far. log: the rank that writes the log
        also writes spikes.jsonl.
        """
        self.config = config
        self.samples = samples
        self.good = done  # the progress after the last step with a finite loss
        self.log = log
        self.spikes = RowFile(os.path.join(config.run.out, "spikes.jsonl"), log.note)
        self.bad: list[StepResult] = []  # the results of the steps since `good`
        self._recent: deque[float] = deque(maxlen=WINDOW)  # losses of the last good steps
        # The logarithms of the gradient norms of the last good steps.
        self._recent_log_norms: deque[float] = deque(maxlen=WINDOW)

    def step(self, done: Progress, batch: int, result: StepResult) -> None:
        """Judge a step, record it if it is a spike, and count it as good or bad (loss not finite).

        done: the progress after the step. batch: the number of samples in the step.
        """
        if self.log.is_writer:
            spike = self.judge(result.loss, result.grad_norm)
            if spike is not None:
                self.record(done, batch, result.loss, spike)
        self.count(done, result)

    def judge(self, loss: float, norm: float) -> dict[str, Any] | None:
        """Return the fields of a row that say why a step is a spike; None if it is no spike.

        loss, norm: the loss of the step and the norm of its gradient before clipping.
        """
        sigmas = self.config.run.spike_sigma
        if not sigmas:  # --spike-sigma 0: no step is checked
            return None
        mean, sigma, limit = _usual(self._recent, sigmas, share=MIN_SIGMA)
        if not math.isfinite(loss) or loss > limit:
            return {"of": "loss", "mean": mean, "sigma": sigma}
        mean, sigma, limit = _usual(self._recent_log_norms, sigmas, least=MIN_SIGMA_OF_LOG_NORM)
        if 0 < norm < math.inf and math.log(norm) > limit:
            return {"of": "grad_norm", "grad_norm": norm, "mean": mean, "sigma": sigma}
        return None

    def count(self, done: Progress, result: StepResult) -> None:
        """Count a step as good or bad; a bad step has a loss that is not finite.

        Later steps are compared with a good step if it has updated the weights. done: the progress
        after the step.
        """
        if not math.isfinite(result.loss):
            self.bad.append(result)
            return
        if not result.skipped:
            self.add(result.loss, result.grad_norm)
        self.good = done
        self.bad = []

    def add(self, loss: float, norm: float) -> None:
        """Add a step with a finite loss to the last steps, with which later steps are compared."""
        self._recent.append(loss)
        if 0 < norm < math.inf:
            self._recent_log_norms.append(math.log(norm))

    @property
    def diverged(self) -> bool:
        """Whether the loss was not finite in each of the last --max-nan-steps steps."""
        return len(self.bad) >= self.config.run.max_nan_steps

    @property
    def state_intact(self) -> bool:
        """Whether weights and optimizer state are unchanged since the last finite loss.

        They are unchanged if all later updates were skipped.
        """
        return all(result.skipped for result in self.bad)

    def record(self, done: Progress, batch: int, loss: float, spike: dict[str, Any]) -> None:
        """Write a spike to spikes.jsonl and to the log; called on the rank that writes the log.

        done: the progress after the step. batch: the number of samples in the step. spike: the
        result of `judge`, and further fields of the row.
        """
        from telemetry import loss_reports  # imported here, since most runs have no spike

        samples = range(done.consumed_samples - batch, done.consumed_samples)
        row = loss_reports.row(done.iteration, loss, spike, self.samples, samples)
        self.spikes.write(row)
        self.log.note(f" {loss_reports.line(row, loss)} are in {self.spikes.path}")


def _usual(
    recent: Sequence[float], sigmas: float, share: float = 0.0, least: float = 0.0
) -> tuple[float | None, float | None, float]:
    """Return the mean and sigma of the last values, and the limit above which a value is a spike.

    With fewer than MIN_STEPS values the results are None, None and infinity. sigmas: the distance
    of the limit from the mean, in sigmas. share, least: sigma is at least this share of the mean,
    and at least this number.
    """
    if len(recent) < MIN_STEPS:
        return None, None, math.inf
    mean = statistics.fmean(recent)
    sigma = max(statistics.stdev(recent, mean), share * abs(mean), least)
    return mean, sigma, mean + sigmas * sigma


def give_up(losses: LossMonitor, now: Progress, checkpoints: Checkpoints) -> None:
    """End a run that has diverged: save the last good state, and raise UserError.

    Called by the trainer when `losses.diverged`; collective over all ranks. The state is saved only
    if the run saves checkpoints and the weights have not changed since the last step with a finite
    loss. Raise RuntimeError, before anything is saved, if replicas of the state differ: then
    hardware has failed and training has not diverged, and a restart continues from the last
    checkpoint.
    """
    checkpoints.check_replicas(now.iteration)
    can_save = checkpoints.enabled and losses.state_intact and losses.good.iteration > 0
    saved = can_save and checkpoints.save_now(losses.good)
    checkpoints.close()
    from telemetry import loss_reports

    raise loss_reports.failure(losses.config.run, losses.good, now, len(losses.bad), saved)
