"""How many measurements the tuner needs, and what it gives away, on choices measured in full.

    python benchmarks/tune_replay.py                  # prints Markdown; no run takes place

* The twelve decision tables of the published rows, with the planner's constants in-sample, and
  held out: for each section refitted without it, as plan_accuracy.py does.
* A space measured in full on this project's machine (data/tune_cpu.csv): the search is told each
  layout's first trial and judged by the median of all.
"""

import math
import platform
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy
import plan_accuracy as accuracy

import hardware
import replay
import rows
import search

DATA = ROOT / "benchmarks" / "data"
CPU = DATA / "tune_cpu.csv"
GOAL = 0.03  # regret that the search here must reach, in a quarter of the trials


def published(kind: str) -> list[replay.Replay]:
    """The twelve tables, with constants `in-sample` or `held out`."""
    cases = rows.cases(rows.read(str(DATA / "measured_rows.csv")))
    tables = rows.read_tables(str(DATA / "decision_tables.csv"))
    values = {c.name: c.value for c in hardware.constants()}
    find = accuracy.predictions if kind == "in-sample" else accuracy.held_out
    return replay.replay_all(tables, cases, find(cases, "seconds", values))


def here(path: Path = CPU) -> tuple[replay.Replay, dict[str, float]]:
    """The search in the space measured in full; and how its figures were got."""
    given = rows.read(str(path))
    cases = rows.cases(given)
    both = {row["row_id"]: [float(s) for s in row["sec_trials"].split()] for row in given}
    first = {name: seconds[0] for name, seconds in both.items()}
    often = max(both.values(), key=len)  # the reference layout
    noise = statistics.stdev(map(math.log, often)) if len(often) > 1 else search.NOISE
    predicted = replay.predictions(cases, given)
    found = replay.replay("8 ranks on 2 cores", cases, predicted, noise=noise, told=first)
    off = [c.seconds / predicted[c.id] for c in cases if c.seconds]
    return found, {"times": len(often), "noise": noise, "low": min(off), "high": max(off)}


def here_lines(found: replay.Replay, facts: dict[str, float]) -> list[str]:
    """The space measured here, in Markdown."""
    quarter = found.rows // 4
    regrets = ", ".join(f"{100 * r:.1f}" for r in found.regret_after)
    return [
        f"{found.rows} layouts. One of them, measured {facts['times']} times, has a standard "
        f"deviation of {facts['noise']:.0%}: the noise that the search is told of. Measured over "
        f"predicted: {facts['low']:.2f} to {facts['high']:.2f}.",
        "",
        f"* regret % after each measurement: {regrets}",
        f"* within {GOAL:.0%} of the best after {found.within(GOAL) or 'no'} measurements; a "
        f"quarter of the space is {quarter}",
        f"* stopped after {len(found.order)}, {100 * found.regret_after[-1]:.1f} % from the best",
        f"* random order: as many measurements leave {100 * found.random_regret:.1f} % on average, "
        f"the best layout takes {found.random:.0f}",
    ]


def main() -> None:
    """Print the report."""
    lines = ["# Replay: the tuner's search on measured choices", ""]
    lines += ["    python benchmarks/tune_replay.py", ""]
    lines += [f"Python {platform.python_version()}, numpy {numpy.__version__}. Stop: no layout"]
    lines += ["with a chance above 5 % of being 1 % faster.", ""]
    for kind in ("in-sample", "held out"):
        lines += [f"## The twelve published tables, planner {kind}", ""]
        lines += [*replay.lines(published(kind)), ""]
    lines += ["## A space measured in full: 8 ranks on two cores", "", *here_lines(*here())]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
