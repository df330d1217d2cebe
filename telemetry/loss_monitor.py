"""Records the batches of spikes of loss and gradient norm; decides when training has diverged.

    spikes.jsonl    a row per spike: the loss, mean and sigma of the steps before it, and every
                    sample of the batch with its documents; "of" says whether the loss has risen
                    or the gradient norm, which is in the row then

Mean and sigma are of the last steps of this process, so the first steps after a restart are not
checked for spikes. Those of the gradient norm are taken of its logarithm: it is above 0, and varies
by factors. Clipping makes the update of a step with a huge gradient vanish, so that its norm may
be all that shows a fault.
"""

import math
import os
import statistics
from collections import deque
from typing import Any

from checkpointing.save import Checkpointer
from checkpointing.state import Progress
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
MIN_SIGMA_OF_LOG_NORM = 0.1


class LossMonitor:
    """Takes the result of every step, on every rank.

    good: the progress after the last step with a finite loss. bad: the results since then.
    """

    def __init__(self, config: Config, samples: Samples, done: Progress, log: Log):
        """done: the progress so far. log: its writer writes spikes.jsonl too."""
        self.config = config
        self.samples = samples
        self.good = done
        self.log = log
        self.spikes = RowFile(os.path.join(config.run.out, "spikes.jsonl"), log.note)
        self.bad: list[StepResult] = []
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._recent_log_norms: deque[float] = deque(maxlen=WINDOW)

    def step(self, done: Progress, batch: int, result: StepResult) -> None:
        """Take the result of a step on `batch` samples; done: the progress after it."""
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
        """Whether the loss has not been finite for --max-nan-steps steps."""
        return len(self.bad) >= self.config.run.max_nan_steps

    @property
    def state_intact(self) -> bool:
        """Whether weights and optimizer state are those of `good`: every later step was skipped."""
        return all(result.skipped for result in self.bad)

    def failure(self, now: Progress, saved: bool) -> UserError:
        """The error of a run that has diverged; saved: whether the state of `good` is."""
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
        """Write the batch to spikes.jsonl if its loss is a spike."""
        mean = sigma = None
        if len(self._recent) >= 2:
            mean = statistics.fmean(self._recent)
            sigma = max(statistics.stdev(self._recent, mean), MIN_SIGMA * abs(mean))
            if loss <= mean + sigmas * sigma:  # false for NaN
                return
        usual = "" if mean is None else f" against {mean:.4f} +- {sigma:.4f} before"
        row = {"of": "loss", "mean": mean, "sigma": sigma}
        self._write(
            done, batch, loss, row, f"loss spike at iteration {done.iteration}: {loss:.4f}{usual}"
        )

    def _step_of_norm(self, done: Progress, batch: int, loss: float, norm: float) -> None:
        """Take the gradient norm of a step; write the batch to spikes.jsonl if it is a spike."""
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
        self, done: Progress, batch: int, loss: float, row: dict[str, Any], text: str
    ) -> None:
        """Write a row with the samples of the batch, and a line of the log with this text."""
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


def give_up(losses: LossMonitor, now: Progress, checkpoints: Checkpointer) -> None:
    """Save the last good state, if the run saves at all, and raise UserError: it has diverged.

    RuntimeError, before anything is saved, if copies of the state differ: then hardware has failed
    and training has not diverged. A restart continues from the last checkpoint.
    """
    checkpoints.check_replicas(now.iteration)
    saved = checkpoints.enabled and losses.state_intact and losses.good.iteration > 0
    saved = saved and checkpoints.save_now(losses.good)
    checkpoints.close()
    raise losses.failure(now, saved)
