"""The budget of a search, and its progress: a line for each trial."""

import math
import statistics
import time

from config.messages import UserError
from tuner.trials import Trial


class BudgetSpent(Exception):
    """A trial is needed for which the budget has no room."""


class Budget:
    """How much may be spent in this session: trials, or minutes."""

    def __init__(self, text: str | None, earlier_trials: int = 0):
        """`12` trials, `90m` minutes, or None; UserError for anything else.

        `earlier_trials` were stored before this session and do not count.
        """
        self.start, self.earlier_trials = time.monotonic(), earlier_trials
        self.minutes = self.trials = math.inf
        try:
            if text and text.endswith("m"):
                self.minutes = float(text[:-1])
            elif text:
                self.trials = int(text)
            if text and not 0 < min(self.minutes, self.trials) < math.inf:
                raise ValueError
        except ValueError:
            wanted = "a number of trials or minutes above 0, as 12 or 90m"
            raise UserError(f"--budget is {wanted}, not {text!r}") from None
        self.ending = f"the budget of {text} is spent; run again with a larger one to continue"

    def spent(self, stored: list[Trial]) -> bool:
        """Whether another trial, of the median duration so far, would exceed the budget."""
        own = [trial for trial in stored[self.earlier_trials :] if trial.command]  # that ran
        typical = statistics.median([t.wall for t in own]) if own else 0.0
        return len(own) >= self.trials or self.elapsed() + typical > 60 * self.minutes

    def elapsed(self) -> float:
        """Seconds since the session began."""
        return time.monotonic() - self.start

    def seconds_left(self) -> float:
        """Until its minutes have passed; infinite without."""
        return 60 * self.minutes - self.elapsed()

    def left(self, done: int) -> str:
        """What is left after `done` trials, for the progress line."""
        if self.minutes < math.inf:
            return f"{max(0.0, self.seconds_left() / 60):.0f} minutes left"
        if self.trials < math.inf:
            rest = max(0, self.trials - done)
            minutes = f", {rest * self.elapsed() / done / 60:.0f} minutes" if done else ""
            return f"at most {rest} trials left{minutes}"
        return f"{self.elapsed() / 60:.0f} minutes so far"


class Progress:
    """Prints the outcome of each trial, beside the fastest one of this session."""

    def __init__(self, budget: Budget):
        self.budget = budget
        self.finished: list[Trial] = []
        self.best: Trial | None = None

    def trial_finished(self, trial: Trial) -> None:
        """Print a trial's outcome in one line."""
        self.finished.append(trial)
        text = f"{trial.status}: {trial.reason}"
        if trial.status == "ok":
            is_best = self.best is None or trial.median < self.best.median
            if is_best:
                self.best = trial
            ran = sum(bool(each.command) for each in self.finished)
            text = (
                f"{trial.median:9.3f} s ({trial.spread:4.0%} spread), "
                f"predicted {trial.predicted:8.3f}, {max(trial.peak_memory) / 1e9:.2f} GB"
            )
            text += " best so far" * is_best + f"; {self.budget.left(ran)}"
        say(f"trial {len(self.finished):3} {trial.label:36} {text}")


def say(line: str) -> None:
    """Print a line at once, also into a pipe."""
    print(line, flush=True)
