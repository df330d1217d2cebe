"""The files PREFIX.partial.* of a preparation: a program that is killed goes on from them.

job = PartialJob("data/books", {"seed": 1})     locked; the facts determine the result
job.state["copied"]                             of a killed run of the same job
job.save(copied={...})                          replaces data/books.partial.json
job.publish()                                   gives the files their names
job.remove()                                    what is left of them

documents   the texts, and tokens as int32, one after the other     sizes   bytes of each, int64
bin         tokens of the documents so far                          lengths their number, int32
"""

import fcntl
import glob
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from base.errors import FileError, UserError

# In the order of publishing: without an index there is no pair.
NAMES = ("tokenizer.json", "tokenizer_config.json", "bad.txt", "bin", "idx", "sha256")


class PartialJob:
    """One job's files and its state, see the module. Those of a job with other facts are removed.

    UserError if another process has the job, or the folder cannot be written.
    """

    def __init__(self, prefix: str, facts: dict):
        self.prefix = prefix
        self.path = self.partial("json")
        try:
            os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
            self._lock = open(self.partial("lock"), "w")  # noqa: SIM115 (locked while it is open)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process writes {prefix} now: it holds its lock") from None
        except OSError as error:
            raise FileError(f"cannot write {self.partial('lock')}: {error.strerror}") from None
        facts = json.loads(json.dumps(facts))
        self.state: dict[str, Any] = {}
        if os.path.exists(self.path):
            self.state = json.loads(Path(self.path).read_bytes())
        self.goes_on = self.state.get("facts") == facts
        if not self.goes_on:
            self._remove_all_but("lock")
            self.state = {"facts": facts}

    def partial(self, name: str) -> str:
        """The path of a file of the job."""
        return f"{self.prefix}.partial.{name}"

    def open_at(self, name: str, size: int) -> BinaryIO:
        """Open a file to write behind its first `size` bytes; what is behind them is cut off."""
        file = open(self.partial(name), "r+b" if size else "wb")  # noqa: SIM115 (closed by who asks)
        file.truncate(size)
        file.seek(size)
        return file

    def save(self, *files: BinaryIO, **values: Any) -> None:
        """Add values to the state; they and these files are on the disk when this returns."""
        self.state |= values
        draft = self.partial("draft")
        with open(draft, "w") as file:
            json.dump(self.state, file)
            for each in (*files, file):
                each.flush()
                os.fsync(each.fileno())
        os.replace(draft, self.path)

    def publish(self) -> None:
        """Give the files of a finished job their names, those that do not have them yet."""
        names = self.state["published"]
        # An old index must never describe the new tokens.
        for name in NAMES:
            if name not in names or (name == "idx" and os.path.exists(self.partial("idx"))):
                Path(f"{self.prefix}.{name}").unlink(missing_ok=True)
        for name in names:
            if os.path.exists(self.partial(name)):
                os.replace(self.partial(name), f"{self.prefix}.{name}")

    def _remove_all_but(self, name: str) -> None:
        for path in glob.glob(glob.escape(self.prefix) + ".partial.*"):
            if path != self.partial(name):
                Path(path).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove every file of the job, the lock last."""
        self._remove_all_but("lock")
        Path(self.partial("lock")).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let others have the job; its files stay."""
        self._lock.close()
