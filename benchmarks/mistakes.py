"""Seconds until every mistake of tests/mistake_cases.py has its sentence.

    python benchmarks/mistakes.py          writes benchmarks/results/mistakes.md

Each mistake is a process of its own; they run one after the other. Import times are recorded, which
makes a start slower by about a tenth.
"""

import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the project's own modules

import mistake_cases
from mistake_cases import CASES

SLOWEST = 10  # that are listed


def main() -> None:
    """Run all mistakes and write the results file."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = mistake_cases.run_all(mistake_cases.prepare(Path(folder)), CASES, at_a_time=1)
    path = ROOT / "benchmarks" / "results" / "mistakes.md"
    path.write_text("\n".join(report(outcomes)) + "\n")
    print(f"written to {path.relative_to(ROOT)}")


def report(outcomes: list[mistake_cases.Outcome]) -> list[str]:
    """The lines of the results file."""
    bad = [
        f"{case.program} {case.words}: {outcome.status}, {outcome.err}"
        for case, outcome in zip(CASES, outcomes)
        if outcome.status != 2 or len(outcome.err) != 1 or case.sentence not in outcome.err[0]
    ]
    good = len(CASES) - len(bad)
    late = sum("torch" in outcome.imported for outcome in outcomes)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    lines = ["# Mistakes: one sentence each", "", "    python benchmarks/mistakes.py", ""]
    lines += [
        f"{len(CASES)} mistakes of tests/mistake_cases.py, each a process of its own, one after"
    ]
    lines += [
        f"the other: {good} ended with status 2 and one sentence, {late} of them after torch was"
    ]
    lines += [
        f"imported. Python {platform.python_version()}, {os.cpu_count()} cores, load averages"
    ]
    lines += [f"{load} at the end. Seconds of the clock and of the processor:", ""]
    lines += ["| program | mistakes | median | slowest | processor, median |"]
    lines += ["|---|--:|--:|--:|--:|"]
    for program in dict.fromkeys(case.program for case in CASES):
        own = [o for c, o in zip(CASES, outcomes) if c.program == program]
        wall, busy = [o.wall for o in own], [o.processor for o in own]
        figures = f"{statistics.median(wall):.2f} | {max(wall):.2f} | {statistics.median(busy):.2f}"
        lines.append(f"| {program} | {len(own)} | {figures} |")
    lines += ["", *(f"- not as expected: {line}" for line in bad), "The slowest:", ""]
    ordered = sorted(zip(outcomes, CASES), key=lambda pair: -pair[0].wall)
    for outcome, case in ordered[:SLOWEST]:
        lines.append(f"- {outcome.wall:.2f} s: {case.program}: `{case.words}`")
    return lines


if __name__ == "__main__":
    main()
