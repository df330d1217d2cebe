"""Runs docs/guide_months.md in full length, and measures each of its blocks.

    python benchmarks/training/guide.py

In a copy of the repository, one block after the other, as a reader would type them. Seconds are by
the clock, so the machine should do nothing else: the load at the start and the end is written with
them. Writes benchmarks/results/guide_months.md. RuntimeError if a command ends with another status
than 0.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_guide_months import commands
from test_readme import copy_of_repository

from benchmarks.results_file import head

RESULTS = ROOT / "benchmarks" / "results" / "guide_months.md"
LIMIT = 900  # seconds by the clock, that the guide promises


def measure(block: str, folder: Path) -> float:
    """Run a block; return its seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", f"set -e\n{block}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{block}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return time.monotonic() - began


def main() -> None:
    """Run all blocks, and write the results."""
    rows = []
    with tempfile.TemporaryDirectory() as path:
        folder = copy_of_repository(Path(path) / "trine")
        load = os.getloadavg()[0]
        for block in commands():
            name = block.splitlines()[0].split(" \\")[0][:60].strip("\\ ")
            rows.append((name, measure(block, folder)))
            print(*rows[-1], flush=True)
    total = sum(seconds for _, seconds in rows)
    command = "python benchmarks/training/guide.py"
    facts = f"Load average at the start {load:.1f}, at the end {os.getloadavg()[0]:.1f}."
    lines = head("The guide of a run over months, in full length", command, facts)
    lines += [
        f"Seconds by the clock. The limit is {LIMIT} s on a machine that does nothing else.",
        "",
        "| block | seconds |",
        "| --- | --: |",
        *(f"| `{name}` | {seconds:.0f} |" for name, seconds in rows),
        f"| all | {total:.0f} |",
    ]
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
