"""Asks check.py about public errors that are alive in another program's released wheel.

    python benchmarks/faults/public/in_programs.py --keep RESULTS.jsonl [--minutes 60]

megatron_errors.py, beside this file, has them for megatron-core 0.16.1. An error is found if
check.py ends with status 1; without one the same layouts must be equal. The table that is printed
is for results/public_errors.md.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT)]  # the project's own modules

from base.cli import Parser
from benchmarks.faults.check_faults import lines_of
from benchmarks.results_file import add_options, from_options

PROGRAM = "benchmarks/faults/public/megatron_errors.py"
NAMES = ("", "gathered", "smoothing", "sinks", "latent", "padding", "aux", "global", "mtp")
LIMIT = 900.0  # seconds of a call


def command_of(name: str) -> list[str]:
    """Return the words after `python` that ask about an error; "": about none."""
    return ["check.py", "--program", PROGRAM, *(["--set", f"ERROR={name}"] if name else [])]


def asked(name: str) -> list[dict[str, Any]]:
    """Call check.py, and return a row of what it said."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command_of(name)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    row = {"name": name, "status": done.returncode, "seconds": time.monotonic() - began}
    row |= {"said": lines_of(done.stdout), "text": done.stdout[-3000:] + done.stderr[-1500:]}
    print(row["status"], f"{row['seconds']:.0f} s", name, "|", row["said"]["first"], flush=True)
    return [row]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the lines of the table of results."""
    lines = ["| command | status | layout | the first line | likely | s |"]
    lines += ["| --- | --: | --- | --- | --- | --: |"]
    for row in rows:
        said = row["said"]
        cells = [f"`python {' '.join(command_of(row['name']))}`", str(row["status"])]
        cells += [said["layout"], said["first"], said["likely"], f"{row['seconds']:.0f}"]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Ask about the errors that are missing in the file of results, and print the table."""
    parser = Parser("in_programs.py", description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--at-once", type=int, default=1, help="calls at a time")
    given = parser.parse_args()
    keep = from_options(given)
    known = {row["name"] for row in keep.rows()}
    keep.run(asked, [name for name in NAMES if name not in known], given.at_once)
    print(table(keep.rows()))


if __name__ == "__main__":
    main()
