"""How far a rehearsal is, on standard error: answers go to standard output when all is done.

show = Progress("ranks rehearsed", total=14)
show(3)                 # rewrites one line on a terminal; elsewhere prints a line per quarter
show.close()
"""

import sys
import time

CLEAR = "\r\x1b[K"
LINES = 4  # that show the progress where standard error is no terminal


class Progress:
    """Shows how many of `total` pieces of work are done; `what` names them."""

    def __init__(self, what: str, total: int):
        self.what, self.total, self.began = what, total, time.monotonic()
        self._on_terminal = sys.stderr.isatty()
        self._quarter = -1
        self(0)

    def __call__(self, done: int) -> None:
        """Show that so many are done."""
        text = f"{self.what}: {done} of {self.total}, {time.monotonic() - self.began:.0f} s"
        quarter = done * LINES // self.total
        if self._on_terminal:
            print(f"{CLEAR}{text}", end="", file=sys.stderr, flush=True)
        elif quarter > self._quarter:
            print(text, file=sys.stderr, flush=True)
        self._quarter = quarter

    def close(self) -> None:
        """Remove the line from the terminal."""
        if self._on_terminal:
            print(CLEAR, end="", file=sys.stderr, flush=True)
