"""Records the batches of spikes of loss and gradient norm; decides when training has diverged.

    spikes.jsonl    a row per spike: the step's loss, the mean and sigma of the steps before, and
                    every sample of the batch with its documents; "of" is "loss" or "grad_norm",
                    the value that has risen; with "grad_norm" the norm is in the row too

A value is a spike if it is more than --spike-sigma standard deviations (sigma) above the mean of
this process's last steps. So the first steps after a restart are not checked for spikes, except
that a loss which is not finite is always recorded. For the gradient norm, mean and sigma are taken
of its logarithm, because the norm is positive and varies by factors. The norm is checked because
clipping makes the update of a step with a huge gradient vanish, so that the loss may not rise.
"""

import math
import os
import statistics
from collections import deque
from typing import Any

from checkpointing.checkpoints import Checkpoints
from checkpointing.state import Progress
from config.messages import UserError
from config.schema import Config
from data import Samples
from telemetry.log import Log
from telemetry.row_file import RowFile
from zero import StepResult

WINDOW = 128  # the mean and sigma are taken of this many last steps
MIN_STEPS = 32  # with fewer steps before it, a finite value is not checked
# Least sigma of the loss, as a share of the mean: while the loss is almost constant, a rounding
# error must not count as a spike.
MIN_SIGMA = 1e-3
MIN_SIGMA_OF_LOG_NORM = 0.1  # least sigma of the norm's natural logarithm


class LossMonitor:
    """Finds spikes and divergence; the trainer calls `step` after every step, on every rank.

    good: the progress after the last step with a finite loss. bad: the results of the steps since
    then, none of which has a finite loss.
    """

    def __init__(self, config: Config, samples: Samples, done: Progress, log: Log):
        """done: the progress so far. log: the run's log; the rank that writes it writes spikes."""
        self.config = config
        self.samples = samples
        self.good = done
        self.log = log
        self.spikes = RowFile(os.path.join(config.run.out, "spikes.jsonl"), log.note)
        self.bad: list[StepResult] = []
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._recent_log_norms: deque[float] = deque(maxlen=WINDOW)

    def step(self, done: Progress, batch: int, result: StepResult) -> None:
        """Take the result of a step on `batch` samples; done: the progress after the step."""
        loss = result.loss
        sigmas = self.config.run.spike_sigma
        finite = math.isfinite(loss)
        if self.log.is_writer and sigmas and (not finite or len(self._recent) >= MIN_STEPS):
            self._record_spike(done, batch, loss, sigmas)
        norm = result.grad_norm
        if finite and math.isfinite(norm) and norm > 0:
            self._step_of_norm(done, batch, loss, norm)
        if finite:
            self._recent.append(loss)
            self.good = done
            self.bad = []
        else:
            self.bad.append(result)

    @property
    def diverged(self) -> bool:
        """Whether the loss was not finite in each of the last --max-nan-steps steps."""
        return len(self.bad) >= self.config.run.max_nan_steps

    @property
    def state_intact(self) -> bool:
        """Whether weights and optimizer state are unchanged since `good`: all updates skipped."""
        return all(result.skipped for result in self.bad)

    def failure(self, now: Progress, saved: bool) -> UserError:
        """Return the error of a run that has diverged.

        now: the progress. saved: whether the state after `good` is in a checkpoint.
        """
        good = self.good
        run = self.config.run
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
        """Write the batch to spikes.jsonl if its loss is a spike; sigmas: --spike-sigma."""
        mean = sigma = None
        if len(self._recent) >= 2:
            mean = statistics.fmean(self._recent)
            sigma = max(statistics.stdev(self._recent, mean), MIN_SIGMA * abs(mean))
            if loss <= mean + sigmas * sigma:  # false for NaN, which is recorded
                return
        usual = "" if mean is None else f" against {mean:.4f} +- {sigma:.4f} before"
        row = {"of": "loss", "mean": mean, "sigma": sigma}
        self._write(
            done,
            batch,
            loss,
            row,
            f"loss spike at iteration {done.iteration}: {loss:.4f}{usual}",
        )

    def _step_of_norm(self, done: Progress, batch: int, loss: float, norm: float) -> None:
        """Take a step's gradient norm; write the batch to spikes.jsonl if the norm is a spike."""
        log_norm = math.log(norm)
        sigmas = self.config.run.spike_sigma
        recent = self._recent_log_norms
        if self.log.is_writer and sigmas and len(recent) >= MIN_STEPS:
            mean = statistics.fmean(recent)
            sigma = max(statistics.stdev(recent, mean), MIN_SIGMA_OF_LOG_NORM)
            if log_norm > mean + sigmas * sigma:
                row = {"of": "grad_norm", "grad_norm": norm, "mean": mean, "sigma": sigma}
                text = f"spike of the gradient norm at iteration {done.iteration}: {norm:.4g}"
                usual = f" against {math.exp(mean):.4g} before, times or over {math.exp(sigma):.3g}"
                self._write(done, batch, loss, row, text + usual)
        recent.append(log_norm)

    def _write(
        self,
        done: Progress,
        batch: int,
        loss: float,
        row: dict[str, Any],
        text: str,
    ) -> None:
        """Write `row` and the batch's samples to spikes.jsonl, and `text` as a line of the log."""
        begin = done.consumed_samples - batch
        samples = [
            {"sample": k, "text": [span._asdict() for span in self.samples.spans(k)]}
            for k in range(begin, begin + batch)
        ]
        shown = loss if math.isfinite(loss) else None
        head = {"iteration": done.iteration, "loss": shown}
        self.spikes.write(head | row | {"first_sample": begin, "samples": samples})
        self.log.note(
            f" {text}; samples {begin} to {done.consumed_samples - 1} are in {self.spikes.path}"
        )


def give_up(losses: LossMonitor, now: Progress, checkpoints: Checkpoints) -> None:
    """End a run that has diverged: save the last good state, and raise UserError.

    The state is saved only if the run saves checkpoints and the weights have not changed since the
    last step with a finite loss. Raise RuntimeError, before anything is saved, if replicas of the
    state differ: then hardware has failed and training has not diverged, and a restart continues
    from the last checkpoint. Collective over all ranks.
    """
    checkpoints.check_replicas(now.iteration)
    saved = checkpoints.enabled and losses.state_intact and losses.good.iteration > 0
    saved = saved and checkpoints.save_now(losses.good)
    checkpoints.close()
    raise losses.failure(now, saved)
