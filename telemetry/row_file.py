"""A file of JSON rows, one per line, that stays valid and does not stop the run on a full disk.

A row that cannot be written waits in memory, and every later row tries to write the waiting rows
first. The file has whole lines only: if the disk is full in the middle of a line, the part that was
written is cut off again.
"""

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_ROWS = 100_000  # rows that may wait in memory, about 60 MB; then the oldest are lost


def read_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; return {} if the text is damaged, nested too deep, or not an object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_rows(text: bytes) -> list[dict[str, Any]]:
    """Parse a file of JSON rows; lines that are not a JSON object are left out."""
    return [row for line in text.splitlines() if (row := read_object(line))]


def earlier_parts(path: Path) -> list[Path]:
    """Return the files PATH.1, PATH.2, ... of a run's earlier starts, the oldest first."""
    parts = [part for part in path.parent.glob(f"{path.name}.*") if part.suffix[1:].isdecimal()]
    return sorted(parts, key=lambda part: int(part.suffix[1:]))


class RowFile:
    """Appends rows to a file; the first row creates the file if there is none."""

    def __init__(self, path: str, print_line: Callable[[str], None]):
        """Prepare to write to the file at `path`, which is opened by the first row.

        print_line: called with a message when rows begin to wait, and when they are written.
        """
        self.path = path
        self.print_line = print_line
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MOST_ROWS)  # rows not yet in the file
        self._size = 0  # bytes of the whole lines in the file
        self._missing = 0  # rows that are not in the file: those that wait, and those that are lost
        self._problem = ""  # the reason why rows wait; "" if no rows wait
        self._descriptor = -1  # the descriptor of the open file; -1 before the first row

    def write(self, row: dict[str, Any]) -> None:
        """Write the rows that wait, then this row; if the disk is full, the row waits too."""
        self._waiting.append(row)
        self._missing += 1
        self._write_waiting()

    def _write_waiting(self) -> None:
        """Write the rows that wait, oldest first, until all are written or an attempt fails."""
        count = len(self._waiting)  # for the message that the file is written again
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
                # Rows of an earlier start stay: new rows come after the end of the file.
                self._size = os.lseek(self._descriptor, 0, os.SEEK_END)
            while self._waiting:
                self._append(json.dumps(self._waiting[0]).encode() + b"\n")
                self._waiting.popleft()
                self._missing -= 1
        except OSError as error:
            if not self._problem:  # the first failure: print why, once
                why = f"{error.strerror or error}; rows wait in memory until it can be written"
                self.print_line(f"cannot write {self.path}: {why}")
            self._problem = error.strerror or str(error)
            return
        if self._problem:
            self._problem = ""
            self.print_line(f"{self.path} is written again: {count} rows had to wait")

    def _append(self, line: bytes) -> None:
        """Append a whole line to the file, or nothing; raise OSError if it cannot be written.

        The line is written at the end of the whole lines; a write may take only a part of it.
        """
        offset = self._size
        try:
            while line:
                written = os.pwrite(self._descriptor, line, offset)
                offset += written
                line = line[written:]
            self._size = offset
        except OSError:
            # Cut off the part of the line that was written. If that fails too, the part stays until
            # the next attempt overwrites it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise

    def finish(self) -> None:
        """Try once more to write the rows that wait; print how many rows the file lacks, if any.

        Called at the end of the run.
        """
        if self._waiting:
            self._write_waiting()
        if self._missing:
            why = self._problem or f"only {MOST_ROWS} can wait"
            self.print_line(f"{self.path} lacks {self._missing} rows of this run: {why}")
