"""How far a long work is: a line now and then.

progress = ByteProgress("encoding", total)
progress.advance(4096)                  # bytes

encoding: 31 % of 512 MB, 4.9 MB/s, 72 s left
"""

import time

SECONDS_BETWEEN_LINES = 10.0


class ByteProgress:
    """Counts bytes up to `total`; done: those of an earlier run, which do not count as speed."""

    def __init__(self, name: str, total: int, done: int = 0):
        self.name = name
        self.total = total
        self.done = self._first = done
        self._began = self._printed = time.monotonic()

    def advance(self, size: int) -> None:
        """Count bytes that are done."""
        self.done += size
        now = time.monotonic()
        if now - self._printed >= SECONDS_BETWEEN_LINES:
            self._printed = now
            speed = max(1, self.done - self._first) / (now - self._began)
            left = max(0, self.total - self.done) / speed
            share = 100 * self.done // max(1, self.total)  # nobody knows how long stdin is
            size_text = f"{self.total / 1e6:,.0f} MB"
            rate = f"{speed / 1e6:.1f} MB/s, {left:,.0f} s left"
            print(f"{self.name}: {share} % of {size_text}, {rate}", flush=True)
