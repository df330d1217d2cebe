"""Results of a long list of cases, kept as JSON lines, so that the list can be run in parts.

keep = ResultsFile(Path("RESULTS.jsonl"), minutes=7)
keep.run(rows_of, cases, at_a_time=2)       rows_of(case): a list of rows
keep.rows()
"""

import argparse
import json
import math
import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class ResultsFile:
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


def add_options(
    parser: argparse.ArgumentParser, required: bool = True, minutes: float = math.inf
) -> None:
    """Add --keep and --minutes, which `from_options` reads; minutes: the default of --minutes."""
    add = parser.add_argument
    add("--keep", type=Path, metavar="FILE.jsonl", required=required, help="file of the results")
    add("--minutes", type=float, default=minutes, help="begin no case after that")


def from_options(options: argparse.Namespace) -> ResultsFile:
    """The file of results that the command line names."""
    return ResultsFile(options.keep, options.minutes)


def main_in_parts(
    about: str | None,
    results: Path,
    names: Iterable[str],
    run: Callable[[str], list[dict]],
    report: Callable[[list[dict[str, Any]]], str],
) -> None:
    """Be the program of a list that is made in parts: run what is not kept, and write its report.

    about: the program's text, whose first line is its help. results: the file to write. names: of
    all parts. run: returns the rows of a part, each with the part's `name`. report: of all rows.
    """
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    add_options(parser)
    kept = from_options(parser.parse_args())
    done = {row["name"] for row in kept.rows()}
    kept.run(run, [name for name in names if name not in done])
    write(results, report(kept.rows()))


def write(results: Path, text: str) -> None:
    """Write a results file, and keep the sections that were written by hand below the old report.

    They are those from the first heading of the second level on that the new text does not have.
    """
    old = results.read_text() if results.exists() else ""
    sections = re.split(r"(?m)^(?=## )", old)[1:]
    mine = [section for section in sections if section.splitlines()[0] not in text.splitlines()]
    results.write_text("\n".join([text.rstrip("\n") + "\n", *mine]))


# ---- What a results file begins with -------------------------------------------------------------


def machine() -> str:
    """The machine, the versions and the date."""
    return (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, torch {version('torch')}, {time.strftime('%Y-%m-%d %H:%M')}"
    )


def commit() -> str:
    """The commit that is measured; `unknown` of a copy without .git."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def head(title: str, command: str, facts: str = "") -> list[str]:
    """The first lines of a results file: its title, the command, machine, versions, commit."""
    return [f"# {title}", "", f"    {command}", "", f"{machine()}, commit {commit()}. {facts}", ""]
