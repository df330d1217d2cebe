"""The budget of a search, and its progress: a live table on a terminal, else one line per trial."""

import math
import statistics
import sys
import time
from typing import Any

from config.messages import UserError
from tuner.trials import Trial

TABLE_ROWS = 15  # the newest trials, in the live table


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


class ProgressView:
    """Shows trials while they run; a context manager, which restores the terminal at its end."""

    def __init__(self, ranks: int, budget: Budget):
        """For a search on that many ranks."""
        self.ranks, self.budget = ranks, budget
        self.finished: list[Trial] = []
        self.best: Trial | None = None  # the fastest of this session
        self.running, self.since = "", 0.0  # `running LABEL` or `rehearsing LABEL`, its start
        self.live: Any = None  # a rich.live.Live on a terminal

    def __enter__(self) -> "ProgressView":
        if sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(get_renderable=self._table, refresh_per_second=2, transient=True)
            self.live.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self.live:
            self.live.stop()

    def print(self, line: str) -> None:
        """Print a line above the live table, or to standard output if there is none."""
        if self.live:
            self.live.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def rehearsing(self, label: str) -> None:
        """Say that a rehearsal begins: it may take a minute."""
        self.running, self.since = f"rehearsing {label}", time.monotonic()
        if not self.live:
            self.print(f"rehearsing {label} on fake GPUs")

    def trial_finished(self, trial: Trial) -> None:
        """Print a trial's outcome."""
        self.finished.append(trial)
        self.running = ""
        count, ran = len(self.finished), sum(bool(t.command) for t in self.finished)
        text, best = f"{trial.status}: {trial.reason}", ""
        if trial.status == "ok":
            if self.best is None or trial.median < self.best.median:
                self.best, best = trial, " best so far"
            text = (
                f"{trial.median:9.3f} s ({trial.spread:4.0%} spread), "
                f"predicted {trial.predicted:8.3f}, {max(trial.peak_memory) / 1e9:.2f} GB{best}; "
                f"{self.budget.left(ran)}"
            )
        self.print(f"trial {count:3} {trial.label:36} {text}")

    def _table(self) -> Any:
        from rich.table import Table

        best, count = self.best, len(self.finished)
        captions = [f"best {best.label}: {best.median:.3f} s"] if best else []
        if self.running:
            captions.append(f"{self.running} for {time.monotonic() - self.since:.0f} s")
        title = f"{count} trials on {self.ranks} ranks, {self.budget.left(count)}"
        table = Table(title=title, caption="; ".join(captions))
        for name in ("layout", "s/iteration", "spread", "predicted", "ratio", "GB", "TFLOPs"):
            table.add_column(name, justify="left" if name == "layout" else "right")
        for trial in self.finished[-TABLE_ROWS:]:
            cells, style = [trial.status], "red"
            if trial.status == "ok":
                style = "bold green" if trial is best else ""
                cells = [f"{trial.median:.3f}", f"{trial.spread:.0%}", f"{trial.predicted:.3f}"]
                cells += [f"x {trial.median / trial.predicted:.2f}"]
                cells += [f"{max(trial.peak_memory) / 1e9:.2f}", f"{trial.tflops_model:.3g}"]
            table.add_row(trial.label, *cells, style=style)
        return table
