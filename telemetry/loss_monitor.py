"""Watches the loss: records what was read at a spike, and ends a run whose loss is not finite.

    spikes.jsonl    a row per spike: the loss, mean and sigma of the steps before it, and every
                    sample of the batch with the documents that it was cut from

Mean and sigma are those of the last steps of this process: after a restart, the first steps are
not judged, and nothing else is lost.
"""

import json
import math
import os
import statistics
from collections import deque
from collections.abc import Callable

from checkpointing.load import Progress
from config.messages import UserError
from config.schema import Config
from data import Samples
from zero import StepResult

WINDOW = 128  # steps that the mean and sigma are of
ENOUGH = 32  # steps before which no loss is judged
# Of the mean: a loss that hardly moves has a sigma in which rounding would be a spike.
LEAST_SIGMA = 1e-3


class LossMonitor:
    """Sees the result of every step, on every rank; `good` is the progress of the last good one.

    `first`: whether this rank is the one that writes; `say` prints a line there.
    """

    def __init__(
        self,
        config: Config,
        samples: Samples,
        done: Progress,
        first: bool,
        say: Callable[[str], None],
    ):
        self.config, self.samples, self.first, self.say = config, samples, first, say
        self.path = os.path.join(config.run.out, "spikes.jsonl")
        self.good = done
        self.bad: list[StepResult] = []  # since then
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def step(self, done: Progress, batch: int, result: StepResult) -> None:
        """Take in the result of a step on the last `batch` samples before `done`."""
        loss, sigmas = result.loss, self.config.run.spike_sigma
        finite = math.isfinite(loss)
        if self.first and sigmas and (not finite or len(self._recent) >= ENOUGH):
            self._judge(done, batch, loss, sigmas)
        if not finite:
            self.bad.append(result)
            return
        self._recent.append(loss)
        self.good, self.bad = done, []

    @property
    def diverged(self) -> bool:
        """Whether the loss has not been finite for --max-nan-steps steps."""
        return len(self.bad) >= self.config.run.max_nan_steps

    @property
    def state_intact(self) -> bool:
        """Whether weights and optimizer state are still those of the last good step.

        A gradient that is not finite changes nothing on any rank.
        """
        return all(result.skipped for result in self.bad)

    def failure(self, now: Progress, saved: bool) -> UserError:
        """The sentence with which a run ends whose loss stays not finite."""
        good, folder = self.good, f"{self.config.run.out}/checkpoints"
        samples = f"--skip-samples {good.consumed_samples}:{now.consumed_samples}"
        way = f"no state after step {good.iteration} is saved; the samples since: {samples}"
        if saved:
            way = (
                f"the state after step {good.iteration} is in {folder}; --resume auto {samples} "
                f"goes on from it without the samples since"
            )
        return UserError(
            f"the loss was not finite for {len(self.bad)} steps in a row, up to step "
            f"{now.iteration} (max-nan-steps is {self.config.run.max_nan_steps}): {way}"
        )

    def _judge(self, done: Progress, batch: int, loss: float, sigmas: float) -> None:
        """Record the batch if its loss is a spike."""
        mean = sigma = None
        if len(self._recent) >= 2:
            mean = statistics.fmean(self._recent)
            sigma = max(statistics.stdev(self._recent, mean), LEAST_SIGMA * abs(mean))
            if loss <= mean + sigmas * sigma:  # never so if it is not finite
                return
        begin = done.consumed_samples - batch
        row = {
            "iteration": done.iteration,
            "loss": loss if math.isfinite(loss) else None,
            "mean": mean,
            "sigma": sigma,
            "first_sample": begin,
            "samples": [self._sample(k) for k in range(begin, begin + batch)],
        }
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        usual = "" if mean is None else f" against {mean:.4f} +- {sigma:.4f} before"
        self.say(
            f" loss spike at iteration {done.iteration}: {loss:.4f}{usual}; "
            f"samples {begin} to {done.consumed_samples - 1} are in {self.path}"
        )

    def _sample(self, k: int) -> dict:
        """A sample's number, and the text that it was cut from."""
        pairs = zip(self.samples.pieces(k), self.samples.documents(k))
        text = [piece._asdict() | {"document": document} for piece, document in pairs]
        return {"sample": k, "text": text}
