"""How far a long work is: a bar on a terminal, a line now and then in a log.

with Progress("encoding", total=documents.size) as progress:
    progress.advance(4096)                  # bytes

encoding: 31 % of 512 MB, 4.9 MB/s, 72 s left
"""

import sys
import time

from rich import progress as bars

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts bytes up to `total`; done: those of an earlier run, which do not count as speed."""

    def __init__(self, name: str, total: int, done: int = 0):
        self.name, self.total, self.done, self._first = name, total, done, done
        self._bar = None
        if sys.stdout.isatty():
            columns = bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn()
            self._bar = bars.Progress("{task.description}", bars.BarColumn(), *columns)

    def __enter__(self) -> "Progress":
        self._began = self._printed = time.monotonic()
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task(self.name, total=self.total, completed=self.done)
        return self

    def advance(self, size: int) -> None:
        """Count bytes that are done."""
        self.done += size
        if self._bar:
            self._bar.update(self._task, completed=self.done)
        elif time.monotonic() - self._printed >= SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            print(self.line(self._printed - self._began), flush=True)

    def line(self, seconds: float) -> str:
        """Share, speed and time left after so many seconds."""
        speed = (self.done - self._first) / max(seconds, 1e-9)
        left = (self.total - self.done) / speed if speed else float("inf")
        share = 100 * self.done // max(self.total, 1)
        size = f"{self.total / 1e6:,.0f} MB"
        return f"{self.name}: {share} % of {size}, {speed / 1e6:.1f} MB/s, {left:,.0f} s left"

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()
