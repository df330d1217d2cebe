"""How many measurements the tuner's search needs, and how good its choice is, on measured rows.

    python benchmarks/planner/tune_replay.py                  # prints results/tune.md's tables
    python benchmarks/planner/tune_replay.py ROWS.csv [--tables TABLES.csv] [--gain PERCENT]

Nothing is run: measured rows are in place of runs. A decision table is a choice between rows: the
same purpose, several layouts, compared by seconds per sample. Random order and trying all rows are
the baselines. With a file of rows (such as results.csv of tune.py): one search among all of them,
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy

from base.cli import Parser
from base.errors import UserError, sentences
from benchmarks.planner import plan_accuracy as accuracy
from benchmarks.planner import published_cases, published_rows
from benchmarks.planner.stated_rows import StatedRow
from config.schema import Config
from costs import hardware
from tools.tuner.search import Search, features

DATA = ROOT / "benchmarks" / "data"
CPU = DATA / "tune_cpu.csv"
GOAL = 0.03  # regret that the search must reach in a quarter of the trials
DEVIATIONS = (0.01, 0.03, 0.05, 0.1, 0.15)
DRAWS, SEED = 40, 20261121
VALUES = dict(hardware.fitted_values())


@dataclass(frozen=True)
class Replay:
    """One table's search: what was measured, in order, and how good the best of it is.

    Regret is the seconds of the best measured row over those of the best row of all, minus 1.
    """

    table: str
    rows: int
    order: list[str]  # ids of the rows that were measured
    regret_after: list[float]  # after each measurement
    random_regret: float  # mean of random orders, after the same number of measurements

    def within(self, share: float) -> int | None:
        """The number of the measurement after which the regret is at most `share`."""
        return next((i for i, r in enumerate(self.regret_after, 1) if r <= share + 1e-12), None)

    @property
    def found_at(self) -> int | None:
        """The number of the measurement that found the best row."""
        return self.within(0.0)

    @property
    def random(self) -> float:
        """Measurements that random order needs for the best row, on average."""
        return (self.rows + 1) / 2


def load(path: str) -> tuple[list[StatedRow], dict[str, float]]:
    """The runs of a file of rows, and the predicted seconds of each by row id.

    A row's own `predicted_sec` is taken if it has one, else the planner's prediction. Raises
    UserError if the file is not a table of rows.
    """
    rows = published_rows.read(path)
    cases = published_cases.cases(rows)
    given = {r["row_id"]: float(r["predicted_sec"]) for r in rows if r.get("predicted_sec")}
    others = [case for case in cases if case.id not in given]
    return cases, given | accuracy.predictions(others, "seconds", VALUES)


def replay(
    name: str,
    cases: list[StatedRow],
    predicted: dict[str, float],
    min_gain: float = 0.01,
    noise: float = 0,
    trial: Callable[[StatedRow], float] | None = None,
    most: int | None = None,
) -> Replay:
    """Search among the rows of one table; rows without seconds are runs that failed.

    `trial` gives the seconds of one run of a row, which vary around the row's by `noise` (standard
    deviation of the logarithm): the contenders then run once more, as in tools/tuner/session.py. At
    most `most` runs take place.
    """
    real = [_per_sample(case, case.seconds) for case in cases]
    expected = [_per_sample(case, predicted[case.id]) for case in cases]
    positions = [features(Config(case.model, case.layout, case.training)) for case in cases]
    search = Search(expected, positions, min_gain, noise)
    order: list[str] = []
    regrets: list[float] = []
    ran = [seconds for seconds in real if seconds]

    def measure(index: int) -> None:
        case = cases[index]
        search.add(index, _per_sample(case, trial(case)) if trial else real[index])
        order.append(case.id)
        regrets.append(math.inf if search.best is None else real[search.best] / min(ran) - 1)

    while (index := search.next()) is not None and len(order) != most:
        measure(index)
    for index in search.contenders() if trial else []:
        if len(order) != most:
            measure(index)
    return Replay(name, len(cases), order, regrets, random_regret(ran, len(order)))


def _per_sample(case: StatedRow, seconds: float | None) -> float | None:
    return seconds / case.training.global_batch_size if seconds else None


def random_regret(real: list[float], count: int) -> float:
    """Mean regret of the best of `count` rows drawn at random."""
    count = min(count, len(real))
    mean = 0.0
    for index, seconds in enumerate(sorted(real)):
        mean += seconds * math.comb(len(real) - 1 - index, count - 1)
    return mean / math.comb(len(real), count) / min(real) - 1


def replay_tables(
    tables: dict[str, list[str]],
    cases: list[StatedRow],
    predicted: dict[str, float],
    min_gain: float = 0.01,
) -> list[Replay]:
    """One search for each table that has rows; UserError if none has."""
    by_id = {case.id: case for case in cases}
    found = []
    for name, ids in tables.items():
        own = [by_id[i] for i in ids if i in by_id]
        if any(case.seconds for case in own):
            found.append(replay(name, own, predicted, min_gain))
    if not found:
        raise UserError("the tables name none of the rows")
    return found


def published(kind: str) -> list[Replay]:
    """The twelve tables, with constants `in-sample` or `held out`."""
    cases = published_cases.cases(published_rows.read(str(DATA / "measured_rows.csv")))
    tables = published_rows.read_tables(str(DATA / "decision_tables.csv"))
    find = accuracy.predictions if kind == "in-sample" else accuracy.held_out
    return replay_tables(tables, cases, find(cases, "seconds", VALUES))


def measured_space(path: Path = CPU) -> tuple[Replay, dict[str, float]]:
    """The search in the space measured in full; and figures of its trials."""
    cases, predicted = load(str(path))
    rows = published_rows.read(str(path))
    trials = [[float(s) for s in row["sec_trials"].split()] for row in rows]
    reference = max(trials, key=len)
    ratios = [c.seconds / predicted[c.id] for c in cases if c.seconds]
    facts = {"trials": sum(map(len, trials)), "times": len(reference), "low": min(ratios)}
    facts |= {"noise": statistics.stdev(map(math.log, reference)), "high": max(ratios)}
    return replay("8 ranks on 2 cores", cases, predicted), facts


def measured_space_with_noise(deviation: float, path: Path = CPU) -> list[Replay]:
    """DRAWS searches there by the tuner's rules, in at most a quarter of the trials.

    Each trial is off at random: `deviation` is the standard deviation of its logarithm.
    """
    cases, predicted = load(str(path))
    random_numbers, most = random.Random(SEED), len(cases) // 4

    def trial(case: StatedRow) -> float:
        return case.seconds * math.exp(random_numbers.gauss(0, deviation))

    return [
        replay(f"draw {n}", cases, predicted, noise=deviation, trial=trial, most=most)
        for n in range(DRAWS)
    ]


# ---- The report, in Markdown ---------------------------------------------------------------------


def lines(found: list[Replay]) -> list[str]:
    """One row for each table, and their summary."""
    text = [
        "| table | rows | measured | best found at | regret % after 1, 2, 3, all | "
        "random: best at, regret % after as many |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        ends = [one.regret_after[min(count, len(one.order)) - 1] for count in (1, 2, 3)]
        regrets = ", ".join(f"{100 * regret:.2f}" for regret in (*ends, one.regret_after[-1]))
        text.append(
            f"| {one.table} | {one.rows} | {len(one.order)} | {one.found_at or 'not'} | "
            f"{regrets} | {one.random:.1f}, {100 * one.random_regret:.2f} |"
        )
    early = sum(one.found_at is not None and one.found_at <= 3 for one in found)
    ends = [one.regret_after[-1] for one in found]
    tried, total = sum(len(one.order) for one in found), sum(one.rows for one in found)
    return [
        *text,
        "",
        f"Best found within 3 measurements in {early} of {len(found)} tables; regret at the end: "
        f"largest {100 * max(ends):.2f} %, mean {100 * statistics.mean(ends):.2f} %. "
        f"{tried} measurements where trying all takes {total}.",
    ]


def measured_space_lines(found: Replay, facts: dict[str, float]) -> list[str]:
    """The space measured in full."""
    quarter = found.rows // 4
    regrets = ", ".join(f"{100 * r:.1f}" for r in found.regret_after)
    text = [
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
    ]
    for deviation in DEVIATIONS:
        searches = measured_space_with_noise(deviation)
        ends = [one.regret_after[-1] for one in searches]
        trials = statistics.mean(len(one.order) for one in searches)
        text.append(
            f"| {deviation:.0%} | {trials:.1f} | {100 * statistics.mean(ends):.1f} "
            f"| {sum(end <= GOAL for end in ends)} of {len(ends)} |"
        )
    return text


def report() -> list[str]:
    """The tables of results/tune.md."""
    text = ["# Replay: the tuner's search on measured choices", ""]
    text += ["    python benchmarks/planner/tune_replay.py", ""]
    text += [f"Python {platform.python_version()}, numpy {numpy.__version__}. Stop: no layout"]
    text += ["with a chance above 5 % of being 1 % faster.", ""]
    for kind in ("in-sample", "held out"):
        text += [f"## The twelve published tables, planner {kind}", ""]
        text += [*lines(published(kind)), ""]
    text += ["## A space measured in full: 8 ranks on two cores", ""]
    return text + measured_space_lines(*measured_space())


def main(arguments: list[str]) -> None:
    """Print Markdown; a user's mistake is one sentence and exit status 2."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="?", metavar="ROWS.csv", help="measured rows to search among")
    parser.add_argument("--tables", metavar="TABLES.csv", help="which rows are a choice")
    gain = "measure a row only if it may be faster by this much (default: 1)"
    parser.add_argument("--gain", type=float, default=1.0, metavar="PERCENT", help=gain)
    options = parser.parse_args(arguments)
    if not 0 <= options.gain < 1000:
        raise UserError(f"--gain must be at least 0 and below 1000, not {options.gain}")
    if not options.rows and options.tables:
        raise UserError("--tables needs ROWS.csv")
    if not options.rows:
        print("\n".join(report()))
        return
    cases, predicted = load(options.rows)
    choices = {"all rows": [case.id for case in cases]}
    if options.tables:
        choices = published_rows.read_tables(options.tables)
    print("\n".join(lines(replay_tables(choices, cases, predicted, options.gain / 100))))


if __name__ == "__main__":
    with sentences():
        main(sys.argv[1:])
