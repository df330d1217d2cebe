"""Kills runs with phases and their branches at random moments; is every row on the curve?

    python benchmarks/faults/phase_kills.py --keep RESULTS.jsonl

Each part is a run of tests/phase_kill_worker.py with a seed of its own: a random plan of thirty
phases of three steps on three corpora, with a checkpoint after every step, and a branch of it. Ten
starts of two ranks are killed, seven of the run and three of the branch, each under a layout drawn
at random. Each row of each start is compared with that of a run without interruption. Results are
kept in RESULTS.jsonl, so that the list can be made in parts, with --minutes.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.results_file import head, main_in_parts

RESULTS = ROOT / "benchmarks" / "results" / "phase_kills.md"
SEEDS = range(1, 5)
KILLS = 10  # with each seed
WORKER = "tests/phase_kill_worker.py"


def run(name: str) -> list[dict]:
    """Kill with one seed; name: its number. The row has `failure` if a row was not on the curve."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, WORKER, folder, str(KILLS), name]
        paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        return [{"name": name, "failure": done.stderr[-2000:]}]
    return [{"name": name} | json.loads(done.stdout.splitlines()[-1])]


def is_change(place: dict) -> bool:
    """Whether the step at which a kill fell is the first of another phase."""
    return place["change"] and not place["first"]


def cells(row: dict) -> list[object]:
    """The line of a seed in the table."""
    if "failure" in row:
        return [row["name"], KILLS, *[""] * 5, "not on the curve", ""]
    places = row["run"] + row["branch"]
    return [
        row["name"],
        len(places),
        sum(place["step"] is None for place in places),
        sum(map(is_change, places)),
        sum(place["save"] for place in places),
        len(row["branch"]),
        sum(place["first"] for place in row["branch"]),
        row["rows"],
        f"{row['off']:.1e}",
    ]


def report(rows: list[dict]) -> str:
    """The text of the results file."""
    command = "python benchmarks/faults/phase_kills.py --keep RESULTS.jsonl"
    failures = sum("failure" in row for row in rows)
    facts = f"{len(rows)} of {len(SEEDS)} seeds were run; {failures} had a row off the curve."
    lines = head("Runs with phases, and branches, killed at random moments", command, facts)
    lines += [
        "Two ranks, fp64. One rank is killed by SIGKILL, the other up to 50 ms later; the next",
        "start resumes, under tp 2, pp 2, cp 2, dp 2 or dp 2 with ZeRO 2. A kill is in each column",
        "that fits. Start: before the start's first row. Change: between the last step of a phase",
        "and the end of the first step of the next. Save: a checkpoint had begun and was not",
        "complete. First step: the branch had no row and no checkpoint. Rows: of all starts,",
        "compared in loss, rate and tokens with those of a run without interruption. Difference:",
        "the largest relative one.",
        "",
        "| seed | kills | start | change | save | of the branch | at its first step | rows | "
        "difference |",
        "| --: | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    table = [cells(row) for row in rows]
    lines += [f"| {' | '.join(map(str, line))} |" for line in table]
    whole = [line for line, row in zip(table, rows, strict=True) if "failure" not in row]
    if whole:
        sums = [sum(column) for column in list(zip(*whole, strict=True))[1:8]]
        largest = max(row["off"] for row in rows if "failure" not in row)
        lines.append(f"| all | {' | '.join(map(str, sums))} | {largest:.1e} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main_in_parts(__doc__, RESULTS, map(str, SEEDS), run, report)
