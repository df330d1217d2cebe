"""How many measurements the tuner needs, and what it gives away, on choices measured in full.

    python benchmarks/tune_replay.py                  # prints Markdown; no run takes place

* The twelve decision tables of the published rows, with the planner's constants in-sample, and
  held out: for each section refitted without it, as plan_accuracy.py does.
* A space measured in full on this project's machine (data/tune_cpu.csv): the search among the
  medians, and among trials that vary around them by chance, as they do on shared machines.
"""

import math
import platform
import random
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy
import plan_accuracy as accuracy

from planner import hardware, published_rows
from tuner import replay

DATA = ROOT / "benchmarks" / "data"
CPU = DATA / "tune_cpu.csv"
GOAL = 0.03  # regret that the search here must reach, in a quarter of the trials
NOISES = (0.01, 0.03, 0.05, 0.1, 0.15)
DRAWS, SEED = 40, 20261121


def published(kind: str) -> list[replay.Replay]:
    """The twelve tables, with constants `in-sample` or `held out`."""
    cases = published_rows.cases(published_rows.read(str(DATA / "measured_rows.csv")))
    tables = published_rows.read_tables(str(DATA / "decision_tables.csv"))
    values = {c.name: c.value for c in hardware.constants()}
    find = accuracy.predictions if kind == "in-sample" else accuracy.held_out
    return replay.replay_all(tables, cases, find(cases, "seconds", values))


def here(path: Path = CPU) -> tuple[replay.Replay, dict[str, float]]:
    """The search in the space measured in full; and how its figures were got."""
    given, cases, predicted = _measured(path)
    trials = [[float(s) for s in row["sec_trials"].split()] for row in given]
    often = max(trials, key=len)  # the reference layout
    found = replay.replay("8 ranks on 2 cores", cases, predicted)
    off = [c.seconds / predicted[c.id] for c in cases if c.seconds]
    facts = {"trials": sum(map(len, trials)), "times": len(often), "low": min(off)}
    facts |= {"noise": statistics.stdev(map(math.log, often)), "high": max(off)}
    return found, facts


def here_with_noise(deviation: float, path: Path = CPU) -> list[replay.Replay]:
    """DRAWS searches there by tune.py's rules, in at most a quarter of the trials, each trial off
    by chance: `deviation` is the standard deviation of its logarithm.
    """
    _, cases, predicted = _measured(path)
    chance, most = random.Random(SEED), len(cases) // 4

    def trial(case: published_rows.Case) -> float:
        return case.seconds * math.exp(chance.gauss(0, deviation))

    return [
        replay.replay(f"draw {n}", cases, predicted, noise=deviation, trial=trial, most=most)
        for n in range(DRAWS)
    ]


def _measured(
    path: Path,
) -> tuple[list[dict[str, str]], list[published_rows.Case], dict[str, float]]:
    """The rows of a file, as they are and as runs, and the planner's seconds of each."""
    given = published_rows.read(str(path))
    cases = published_rows.cases(given)
    return given, cases, replay.predictions(cases, given)


def here_lines(found: replay.Replay, facts: dict[str, float]) -> list[str]:
    """The space measured here, in Markdown."""
    quarter = found.rows // 4
    regrets = ", ".join(f"{100 * r:.1f}" for r in found.regret_after)
    return [
        f"{found.rows} layouts, {facts['trials']} trials. One layout, measured {facts['times']} "
        f"times, has a standard deviation of {facts['noise']:.0%}. Measured over predicted: "
        f"{facts['low']:.2f} to {facts['high']:.2f}. Among the medians:",
        "",
        f"* regret % after each measurement: {regrets}",
        f"* within {GOAL:.0%} of the best after {found.within(GOAL) or 'no'} measurements; a "
        f"quarter of the space is {quarter}",
        f"* stopped after {len(found.order)}, {100 * found.regret_after[-1]:.1f} % from the best",
        f"* random order: as many measurements leave {100 * found.random_regret:.1f} % on average, "
        f"the best layout takes {found.random:.0f}",
        "",
        f"Each trial off by chance, {DRAWS} searches of at most {quarter} trials, repeats in them:",
        "",
        "| standard deviation | trials | regret %, mean | within 3 % |",
        "|---|---|---|---|",
        *map(_noise_line, NOISES),
    ]


def _noise_line(deviation: float) -> str:
    found = here_with_noise(deviation)
    ends = [one.regret_after[-1] for one in found]
    good = sum(end <= GOAL for end in ends)
    trials = statistics.mean(len(one.order) for one in found)
    return (
        f"| {deviation:.0%} | {trials:.1f} | {100 * statistics.mean(ends):.1f} "
        f"| {good} of {len(ends)} |"
    )


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
