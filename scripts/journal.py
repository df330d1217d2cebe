"""A list of what a program has done so far, beside its output: a program that is killed goes on
from there.

    journal = Journal("data/books", {"seed": 1})      data/books.partial.journal, locked
    journal.entries                                   of an earlier, killed run of the same job
    journal.add({"chunk": 1, ...})
    journal.remove()                                  with all other files data/books.partial.*

A line of JSON per entry, the first one the facts of the job. An entry is on the disk when `add`
returns; a line that was being written when the program was killed is dropped.
"""

import fcntl
import glob
import json
import os
from pathlib import Path

from config.messages import UserError


class Journal:
    """Entries of one job; see the module. If an earlier one had other facts, it is removed.

    UserError if another process has it open, or it cannot be written.
    """

    def __init__(self, prefix: str, facts: dict):
        self.prefix = prefix
        self.path = self.partial("journal")
        try:
            os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
            self._file = open(self.path, "a+b")  # noqa: SIM115 (locked as long as it is open)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process writes {prefix} now: it holds {self.path}") from None
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
        self._file.seek(0)
        facts = json.loads(json.dumps(facts))
        lines, size = [], 0
        for raw in self._file:
            try:
                lines.append(json.loads(raw))
            except ValueError:
                break
            size += len(raw)
        if not lines or lines[0] != facts:
            self._remove_others()
            lines, size = [], 0
        self._file.truncate(size)
        self.entries: list[dict] = lines[1:]
        if not lines:
            self.add(facts)
            self.entries = []

    def partial(self, name: str) -> str:
        """The path of a file of the job that `remove` removes."""
        return f"{self.prefix}.partial.{name}"

    def add(self, entry: dict) -> None:
        """Write an entry; it is on the disk when this returns."""
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.entries.append(entry)

    def last(self, name: str) -> dict:
        """The last entry that has this name; an empty one if none has."""
        return next((entry for entry in reversed(self.entries) if name in entry), {})

    def _remove_others(self) -> None:
        for path in glob.glob(glob.escape(self.prefix) + ".partial.*"):
            if path != self.path:
                Path(path).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove every file of the job."""
        self._remove_others()
        Path(self.path).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let others open it."""
        self._file.close()
