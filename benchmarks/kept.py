"""Results of a long list of cases, kept as JSON lines, so that the list can be run in parts.

keep = Kept(Path("RESULTS.jsonl"), minutes=7)
keep.run(rows_of, cases, at_a_time=2)       rows_of(case): a list of rows
keep.rows()
"""

import json
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any


class Kept:
    """A file of results; without a path nothing is kept."""

    def __init__(self, path: Path | None, minutes: float = math.inf):
        """minutes: after which no case is begun."""
        self.path = path
        self._until = time.monotonic() + 60 * minutes
        self._writing = threading.Lock()

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all parts so far."""
        if self.path is None or not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def run(
        self, rows_of: Callable[[Any], list[dict]], cases: Iterable[Any], at_a_time: int = 1
    ) -> None:
        """Run the cases in threads; the rows of a case are in the file when it is done."""

        def run_one(case: Any) -> None:
            if time.monotonic() >= self._until:
                return
            rows = rows_of(case)
            if self.path is None:
                return
            with self._writing, open(self.path, "a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))

        with ThreadPoolExecutor(at_a_time) as pool:
            list(pool.map(run_one, cases))


def machine() -> str:
    """The machine and the versions, for a results file."""
    return (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, torch {version('torch')}, {time.strftime('%Y-%m-%d')}"
    )
