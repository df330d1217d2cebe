"""How many measurements the tuner's search needs, and how good its choice is, on measured rows.

    python benchmarks/tune_replay.py                  # prints results/tune.md's tables
    python benchmarks/tune_replay.py ROWS.csv [--tables TABLES.csv] [--gain PERCENT]

Nothing is run. With a file of rows (such as results.csv of tune.py): one search among all of them,
or one for each table of TABLES.csv. Without:

* The twelve decision tables of the published rows, with the planner's constants in-sample, and
  held out: for each section refitted without it, as plan_accuracy.py does.
* A space measured in full on this project's machine (data/tune_cpu.csv): the search among the
  medians, and among trials that vary around them at random, as on shared machines.
"""

import argparse
import math
import platform
import random
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import engines
import numpy
import plan_accuracy as accuracy
import published_rows
import replay

from config.messages import Parser, UserError, exit_with

DATA = ROOT / "benchmarks" / "data"
CPU = DATA / "tune_cpu.csv"
GOAL = 0.03  # regret that the search must reach in a quarter of the trials
DEVIATIONS = (0.01, 0.03, 0.05, 0.1, 0.15)
DRAWS, SEED = 40, 20261121


def published(kind: str) -> list[replay.Replay]:
    """The twelve tables, with constants `in-sample` or `held out`."""
    _, cases = replay.read_cases(str(DATA / "measured_rows.csv"))
    tables = published_rows.read_tables(str(DATA / "decision_tables.csv"))
    values = {c.name: c.value for c in engines.constants()}
    find = accuracy.predictions if kind == "in-sample" else accuracy.held_out
    return replay.replay_tables(tables, cases, find(cases, "seconds", values))


def measured_space(path: Path = CPU) -> tuple[replay.Replay, dict[str, float]]:
    """The search in the space measured in full; and figures of its trials."""
    rows, _ = replay.read_cases(str(path))
    cases, predicted = replay.load(str(path))
    trials = [[float(s) for s in row["sec_trials"].split()] for row in rows]
    reference = max(trials, key=len)
    found = replay.replay("8 ranks on 2 cores", cases, predicted)
    ratios = [c.seconds / predicted[c.id] for c in cases if c.seconds]
    facts = {"trials": sum(map(len, trials)), "times": len(reference), "low": min(ratios)}
    facts |= {"noise": statistics.stdev(map(math.log, reference)), "high": max(ratios)}
    return found, facts


def measured_space_with_noise(deviation: float, path: Path = CPU) -> list[replay.Replay]:
    """DRAWS searches there by the tuner's rules, in at most a quarter of the trials.

    Each trial is off at random: `deviation` is the standard deviation of its logarithm.
    """
    cases, predicted = replay.load(str(path))
    random_numbers, most = random.Random(SEED), len(cases) // 4

    def trial(case: replay.Case) -> float:
        return case.seconds * math.exp(random_numbers.gauss(0, deviation))

    return [
        replay.replay(f"draw {n}", cases, predicted, noise=deviation, trial=trial, most=most)
        for n in range(DRAWS)
    ]


def measured_space_lines(found: replay.Replay, facts: dict[str, float]) -> list[str]:
    """The space measured in full, in Markdown."""
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
        f"Each trial off at random, {DRAWS} searches of at most {quarter} trials, repeats in them:",
        "",
        "| standard deviation | trials | regret %, mean | within 3 % |",
        "|---|---|---|---|",
        *map(_noise_line, DEVIATIONS),
    ]


def _noise_line(deviation: float) -> str:
    found = measured_space_with_noise(deviation)
    ends = [one.regret_after[-1] for one in found]
    good = sum(end <= GOAL for end in ends)
    trials = statistics.mean(len(one.order) for one in found)
    return (
        f"| {deviation:.0%} | {trials:.1f} | {100 * statistics.mean(ends):.1f} "
        f"| {good} of {len(ends)} |"
    )


def report() -> list[str]:
    """The tables of results/tune.md."""
    lines = ["# Replay: the tuner's search on measured choices", ""]
    lines += ["    python benchmarks/tune_replay.py", ""]
    lines += [f"Python {platform.python_version()}, numpy {numpy.__version__}. Stop: no layout"]
    lines += ["with a chance above 5 % of being 1 % faster.", ""]
    for kind in ("in-sample", "held out"):
        lines += [f"## The twelve published tables, planner {kind}", ""]
        lines += [*replay.lines(published(kind)), ""]
    lines += ["## A space measured in full: 8 ranks on two cores", ""]
    return lines + measured_space_lines(*measured_space())


def replay_file(path: str, tables: str | None, min_gain: float) -> list[str]:
    """Searches among the rows of a file, all of them as one choice if no tables are given."""
    cases, predicted = replay.load(path)
    choices = {"all rows": [case.id for case in cases]}
    if tables:
        choices = published_rows.read_tables(tables)
    return replay.lines(replay.replay_tables(choices, cases, predicted, min_gain))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("rows", nargs="?", metavar="ROWS.csv", help="measured rows to search among")
    found.add_argument("--tables", metavar="TABLES.csv", help="which rows are a choice")
    found.add_argument("--gain", type=float, default=1.0, metavar="PERCENT",
        help="measure a row only if it may be faster by this much (default: 1)")  # fmt: skip
    return found


def main(arguments: list[str]) -> None:
    """Print Markdown; a user's mistake is one sentence and exit status 2."""
    try:
        options = parser().parse_args(arguments)
        if not 0 <= options.gain < 1000:
            raise UserError(f"--gain must be at least 0 and below 1000, not {options.gain}")
        if options.rows:
            lines = replay_file(options.rows, options.tables, options.gain / 100)
        elif options.tables:
            raise UserError("--tables needs ROWS.csv")
        else:
            lines = report()
    except UserError as error:
        exit_with(error)
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
