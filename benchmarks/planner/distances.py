"""How much longer steps take where layouts are far from measured runs, fitted on held-out errors.

    python benchmarks/planner/distances.py      # the tables of benchmarks/results/plan_quantiles.md

The errors are those of every public row, each source predicted with constants fitted without it.
The widths of costs/distances.toml are refitted on them, and again without each source, which then
says how many of that source's rows lie below their line of 80 in 100. The last table has what a
choice by that line, by the median, and by the median at a third of the network costs in tables of
runs.
"""

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from base.cli import Parser
from base.errors import sentences
from benchmarks.planner import (
    expert_cases,
    expert_rows,
    plan_accuracy,
    published_cases,
    published_rows,
    rates,
    source_accuracy,
    stated_rows,
)
from benchmarks.planner.source_accuracy import NEAR_BEST
from benchmarks.planner.stated_rows import StatedRow
from costs import distances, hardware, risk, step_time
from costs.job import Job

DATA = ROOT / "benchmarks" / "data"
EXPERTS = "experts"  # the source of all rows of models with experts
OWN = "published"  # the source of the rows of measured_rows.csv
PLAYBOOK = "ultrascale"
WIDTHS = (0, 0.03, 0.05, 0.07, 0.1, 0.14, 0.17, 0.2, 0.24, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.85)
WIDTHS += (1.0, 1.2, 1.4, 1.6, 1.8, 2.0)  # that are tried


@dataclass(frozen=True)
class Off:
    """A row with its held-out prediction.

    error: the logarithm of measured over predicted seconds. beyond: by distance, its doublings.
    inside: the standard deviation without distances. slow: seconds at the slowest network over
    those at the datasheet's. risk: the predicted probability that memory is not enough.
    """

    row: StatedRow
    source: str
    predicted: float
    error: float
    beyond: np.ndarray
    inside: float
    slow: float
    risk: float

    def quantile(self, widths: np.ndarray) -> float:
        """Return the line of 80 in 100 over the predicted seconds, at the datasheet's network."""
        return math.exp(risk.BETS * self.above(widths))

    def above(self, widths: np.ndarray) -> float:
        """Return the standard deviation above the prediction, with these widths."""
        return math.hypot(self.inside, *(self.beyond * widths))


def held_out() -> list[Off]:
    """Return every timed row with its held-out error."""
    values = dict(hardware.fitted_values())
    known = [
        row for path in sorted(DATA.glob("public/*.csv")) for row in stated_rows.read(str(path))
    ]
    rows = source_accuracy.possible(known, values)
    guesses = source_accuracy.held_out(rows, known, values, rates.without_each(values))
    found = []
    for row in rows:
        guess = guesses[row.id]
        found += _off(row, row.source, guess.seconds, guess.risk, values)
    cases = published_cases.cases(published_rows.read(str(DATA / "measured_rows.csv")))
    own = plan_accuracy.usable(cases, "seconds")
    predicted = plan_accuracy.held_out(own, "seconds", values)
    for case in own:
        found += _off(case, OWN, predicted[case.id], 0.0, values)
    of_experts, _ = expert_cases.read()
    for each in expert_rows.held_out(of_experts).values():
        for row in of_experts:
            if row.id in each.off:
                seconds = row.seconds * (1 + each.off[row.id])
                found += _off(row, EXPERTS, seconds, 0.0, each.values)
    return found


def _off(
    row: StatedRow, source: str, predicted: float, run_out: float, values: dict[str, float]
) -> list[Off]:
    """Return a row with its prediction, or nothing if it has no time or is set aside."""
    if row.status != "ok" or not row.seconds or row.aside:
        return []
    machine = row.on(hardware.load(row.machine, **values), values)
    job = Job(row.model, row.layout, row.training, machine)
    block = float(step_time.block_passes(job).forward.forward)
    beyond = [
        float(one.doublings(distances.QUANTITIES[one.name](job, block, predicted)))
        for one in distances.distances()
    ]
    low, _ = risk.interval(job, predicted, block)
    slow = 1.0
    if job.gpus > machine.node and not machine.network_measured:
        share = hardware.at_share_of_network(machine, step_time.NETWORK_SHARES[-1])
        slow = _seconds(job._replace(machine=share)) / _seconds(job)
    inside = math.log(predicted / low) / risk.NINETY
    error = math.log(row.seconds / predicted)
    return [Off(row, source, predicted, error, np.array(beyond), inside, slow, run_out)]


def _seconds(job: Job) -> float:
    seconds, _ = step_time.pipeline_time(job)
    return seconds + sum(step_time.step_parts(job).values())


# ---- Fitting -------------------------------------------------------------------------------------


def fit(found: Sequence[Off], fitted: Sequence[bool]) -> np.ndarray:
    """Return the width of each distance with which the line of 80 in 100 lies best.

    The loss is the pinball loss of that line, whose least value has 80 of 100 errors below it. A
    source counts by the square root of its rows. fitted: whether a width is fitted; the others are
    0, and their rows count as if they were not far.
    """
    errors = np.array([one.error for one in found])
    inside = np.array([one.inside for one in found])
    squares = np.array([one.beyond for one in found]) ** 2
    sources = [one.source for one in found]
    count = {source: sources.count(source) for source in set(sources)}
    weights = np.array([count[source] ** -0.5 for source in sources])

    def loss(widths: np.ndarray) -> float:
        over = errors - risk.BETS * np.sqrt(inside**2 + squares @ widths**2)
        return float(weights @ np.where(over > 0, risk.BET * over, (risk.BET - 1) * over))

    widths = np.zeros(squares.shape[1])
    least, before = loss(widths), math.inf
    while least < before:
        before = least
        for place in np.flatnonzero(fitted):
            for width in WIDTHS:
                tried = widths.copy()
                tried[place] = width
                if (now := loss(tried)) < least:
                    least, widths = now, tried
    return widths


def with_median(widths: np.ndarray, fitted: Sequence[bool]) -> np.ndarray:
    """Return the widths, with the median of the fitted ones for distances that no row has.

    A width that is stated in the file without rows stays.
    """
    stated = [one.wider for one in distances.distances()]
    tables = distances.tables()
    known = [w if is_fitted else s for w, s, is_fitted in zip(widths, stated, fitted, strict=True)]
    is_median = [table["wider"] == "median" for table in tables.values()]
    median = statistics.median(w for w, is_m in zip(known, is_median, strict=True) if not is_m)
    return np.array([median if is_m else w for w, is_m in zip(known, is_median, strict=True)])


# ---- The report ----------------------------------------------------------------------------------


def report(found: list[Off]) -> list[str]:
    """All tables as lines of Markdown."""
    names = [one.name for one in distances.distances()]
    fitted = [table["rows"][:4] != "none" for table in distances.tables().values()]
    used = np.array([one.wider for one in distances.distances()])
    every = with_median(fit(found, fitted), fitted)
    sources = list(dict.fromkeys(one.source for one in found))
    without = {}
    for source in sources:
        others = [one for one in found if one.source != source]
        without[source] = with_median(fit(others, fitted), fitted)
    lines = ["| widths | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    rows = {"in use": used, "refitted": every}
    rows |= {f"without {source}": widths for source, widths in without.items()}
    shown = [name for name in rows if not np.allclose(rows[name], every) or name == "in use"]
    for name in dict.fromkeys(["in use", "refitted", *shown]):
        lines.append(f"| {name} | " + " | ".join(f"{each:.2g}" for each in rows[name]) + " |")
    beyond = [sum(one.beyond[place] > 0 for one in found) for place in range(len(names))]
    lines.append("| rows beyond | " + " | ".join(map(str, beyond)) + " |")
    lines += ["", "Sources that are not listed change no width when they are left out.", ""]
    lines += _coverage(found, used, without)
    lines += _by_distance(found, names, used)
    lines += _regrets(found, used)
    return lines


def _coverage(found: list[Off], used: np.ndarray, without: dict[str, np.ndarray]) -> list[str]:
    """Return the table of rows below their line of 80 in 100, and in their interval, by source."""
    head = "| source | rows | below 80 %: in use | held out | in the interval of 90: in use |"
    lines = [
        head + " held out | below 80 % as ranked, at a third of the network |",
        "|---" * 7 + "|",
    ]
    groups = {s: [one for one in found if one.source == s] for s in without}
    groups["all"] = found
    groups["all but the playbook"] = [one for one in found if one.source != PLAYBOOK]
    for name, own in groups.items():
        held = [without[one.source] for one in own]
        cells = [_share(one.error <= math.log(one.quantile(used)) for one in own)]
        cells.append(_share(o.error <= math.log(o.quantile(w)) for o, w in zip(own, held)))
        cells.append(_share(_inside(one, used) for one in own))
        cells.append(_share(_inside(one, w) for one, w in zip(own, held)))
        cells.append(_share(one.error <= math.log(one.quantile(used) * one.slow) for one in own))
        lines.append(f"| {name} | {len(own)} | {' | '.join(cells)} |")
    return [*lines, ""]


def _inside(one: Off, widths: np.ndarray) -> bool:
    """Return whether a row took a time within its interval of 90 in 100."""
    return -risk.NINETY * one.inside <= one.error <= risk.NINETY * one.above(widths)


def _by_distance(found: list[Off], names: list[str], used: np.ndarray) -> list[str]:
    """Return the table of rows below their line by the distance that widens it the most."""
    lines = ["| widened the most by | rows | of the playbook | error, mean | below 80 % |"]
    lines[0] += " below 95 % |"
    lines.append("|---" * 6 + "|")
    groups: dict[str, list[Off]] = {}
    for one in found:
        widens = one.beyond * used
        place = int(widens.argmax())
        name = "nothing"
        if widens[place] > 0:
            steps = (
                "up to 1"
                if one.beyond[place] <= 1
                else "1 to 2"
                if one.beyond[place] <= 2
                else "more"
            )
            name = f"{names[place]}, {steps} doublings"
        groups.setdefault(name, []).append(one)
    for name, own in sorted(groups.items()):
        cells = [str(len(own)), str(sum(one.source == PLAYBOOK for one in own))]
        cells.append(f"{100 * math.expm1(statistics.mean(one.error for one in own)):+.0f} %")
        cells.append(_share(one.error <= math.log(one.quantile(used)) for one in own))
        cells.append(_share(one.error <= risk.NINETY * one.above(used) for one in own))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def _regrets(found: list[Off], used: np.ndarray) -> list[str]:
    """Return the table of what the first choice costs in tables of runs, by how it is chosen."""
    keys: dict[str, Callable[[Off], float]] = {
        "80 %, as plan.py": lambda one: one.predicted * one.slow * one.quantile(used),
        "80 % at the datasheet's network": lambda one: one.predicted * one.quantile(used),
        "median": lambda one: one.predicted,
        "median at a third of the network": lambda one: one.predicted * one.slow,
    }
    lines = [f"| first choice by | {' | '.join(GROUPS)} |", "|---" * (1 + len(GROUPS)) + "|"]
    for is_safe in (False, True):
        for name, key in keys.items():
            cells = []
            for wanted in GROUPS.values():
                costs = _costs([one for one in found if wanted(one)], key, is_safe)
                cells.append(f"{100 * statistics.mean(costs):.1f} ({len(costs)})")
            for near in (True,):
                playbook = [one for one in found if one.source == PLAYBOOK]
                costs = _costs(playbook, key, is_safe, near)
                cells.append(f"{100 * statistics.mean(costs):.1f} ({len(costs)})")
            safe = ", of rows with a risk of memory up to 5 %" if is_safe else ""
            lines.append(f"| {name}{safe} | {' | '.join(cells)} |")
    lines[0] = lines[0].removesuffix("|") + "| playbook, within twice the best |"
    lines[1] += "---|"
    return lines


GROUPS: dict[str, Callable[[Off], bool]] = {
    "Aleph": lambda one: one.source == "aleph",
    "others": lambda one: one.source not in ("aleph", PLAYBOOK, OWN, EXPERTS),
    "playbook": lambda one: one.source == PLAYBOOK,
}


def _costs(
    own: list[Off], key: Callable[[Off], float], is_safe: bool, near: bool = False
) -> list[float]:
    """Return for each table of runs how much longer the first choice took than the best.

    is_safe: whether rows with a risk of running out of memory above the accepted are no choice, as
    in plan.py. near: whether only rows within NEAR_BEST of the best are.
    """
    tables: dict[tuple, list[Off]] = {}
    for one in own:
        tables.setdefault(one.row.table, []).append(one)
    costs = []
    for table in tables.values():
        best = min(one.row.seconds for one in table)
        if near:
            table = [one for one in table if one.row.seconds <= NEAR_BEST * best]
        if len(table) < 2:
            continue
        safe = [one for one in table if one.risk <= risk.DEFAULT]
        chosen = min(safe if is_safe and safe else table, key=key)
        costs.append(chosen.row.seconds / best - 1)
    return costs


def _share(values) -> str:
    """Return the share of true values in per cent."""
    return f"{100 * statistics.mean(map(float, values)):.0f}"


def main(arguments: list[str]) -> None:
    """Print the report."""
    Parser(description=__doc__.splitlines()[0]).parse_args(arguments)
    print("\n".join(report(held_out())))


if __name__ == "__main__":
    with sentences():
        main(sys.argv[1:])
