"""What a person sees of a search while it runs: a table on a terminal, else a line a trial."""

import sys
import time

from tuner.search_space import Candidate
from tuner.trials import Trial

ROWS = 15  # trials that the table shows, the newest


class View:
    """Shows trials as they come; a context, so that the terminal is left in order."""

    def __init__(self, ranks: int, left):
        """`left(trials)` says what is left of the budget."""
        self.ranks, self.left = ranks, left
        self.done: list[Trial] = []
        self.running: tuple[Candidate, float] | None = None
        self.live = None

    def __enter__(self) -> "View":
        if sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(get_renderable=self._table, refresh_per_second=2, transient=True)
            self.live.start()
        return self

    def __exit__(self, *failure) -> None:
        if self.live:
            self.live.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        if self.live:
            self.live.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def starts(self, candidate: Candidate, number: int) -> None:
        """A trial begins."""
        self.running = candidate, time.monotonic()

    def shows(self, trial: Trial) -> None:
        """A trial has ended."""
        self.done.append(trial)
        self.running = None
        self.say(self._line(trial))

    @property
    def best(self) -> Trial | None:
        """The fastest of this session."""
        return min((t for t in self.done if t.status == "ok"), key=lambda t: t.median, default=None)

    def _line(self, trial: Trial) -> str:
        head = f"trial {len(self.done):3} {trial.label:36} "
        if trial.status != "ok":
            return head + f"{trial.status}: {trial.reason}"
        best = " best so far" * (trial is self.best)
        return head + (
            f"{trial.median:9.3f} s ({trial.spread:4.0%} spread), "
            f"predicted {trial.predicted:8.3f}, {max(trial.peak_memory) / 1e9:.2f} GB{best}; "
            f"{self.left(len(self.done))}"
        )

    def _table(self):
        from rich.table import Table

        best = self.best
        title = f"{len(self.done)} trials on {self.ranks} ranks, {self.left(len(self.done))}"
        table = Table(title=title, caption=self._caption())
        for name in ("layout", "s/iteration", "spread", "predicted", "off", "GB", "TFLOPs"):
            table.add_column(name, justify="left" if name == "layout" else "right")
        for trial in self.done[-ROWS:]:
            if trial.status != "ok":
                table.add_row(trial.label, trial.status, style="red")
                continue
            off = trial.median / trial.predicted
            table.add_row(
                trial.label,
                f"{trial.median:.3f}",
                f"{trial.spread:.0%}",
                f"{trial.predicted:.3f}",
                f"x {off:.2f}",
                f"{max(trial.peak_memory) / 1e9:.2f}",
                f"{trial.tflops_model:.3g}",
                style="bold green" if trial is best else None,
            )
        return table

    def _caption(self) -> str:
        words = [f"best {self.best.label}: {self.best.median:.3f} s"] if self.best else []
        if self.running:
            candidate, began = self.running
            words.append(f"running {candidate.label} for {time.monotonic() - began:.0f} s")
        return "; ".join(words)
