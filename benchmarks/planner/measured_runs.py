"""What one measured run, or three, correct of the planner's other predictions, held out by source.

    python benchmarks/planner/measured_runs.py      # benchmarks/results/measured_runs.md

The errors are those of every public row near the best of its table (distances.py), each source
predicted with constants fitted without it. The priors of tools/planner/measured.toml are those with
which the errors of the rows of each source and machine are likely together; they are refitted here,
and again without each source. Then rows of a source are taken as measured, and the others of the
same machine are predicted again: by `plan.py --measured`, and by one factor on all seconds.
"""

import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from base.cli import Parser
from base.errors import sentences
from benchmarks.planner import distances
from benchmarks.planner.distances import EXPERTS, OWN, PLAYBOOK, Off
from benchmarks.planner.source_accuracy import NEAR_BEST
from costs import hardware
from costs.job import Job
from tools.planner import measured
from tools.planner.measured import Priors
from tools.planner.run_files import MeasuredRun

CANDIDATES = ("gemm_fraction", "flash_fraction", "bandwidth", "nvlink.fraction", "nvlink.latency")
CANDIDATES += ("network.fraction", "p2p_fraction", "software.per_step")
CANDIDATES += ("software.host_per_operation", "slowdown")
SPREADS = (0.0, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.45)  # that are tried
LAYOUTS = (0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.1)
MOST_ROWS = 50  # of a group, in a fit
MOST_ERROR = 0.4  # a larger one counts as this in a fit
DRAWS = 200  # of several rows
MEASURED = (1, 3)  # numbers of rows that are taken as measured
WORSE = 0.005


class Group(NamedTuple):
    """Rows of one source on one machine: errors (rows,), slopes (rows, constants)."""

    source: str
    machine: str
    errors: np.ndarray
    slopes: np.ndarray

    def part(self, most: int) -> "Group":
        """Return the group with at most about so many rows, evenly spaced."""
        step = -(-len(self.errors) // most)
        return self._replace(errors=self.errors[::step], slopes=self.slopes[::step])


def groups(found: Sequence[Off]) -> list[Group]:
    """Return the rows near the best of their table by source and machine, where there are two."""
    values = dict(hardware.fitted_values())
    tables: dict[tuple, list[Off]] = {}
    for one in found:
        table = one.row.table if hasattr(one.row, "table") else (one.row.id,)
        tables.setdefault((one.source, *table), []).append(one)
    by_group: dict[tuple[str, str], list[tuple]] = {}
    for table in tables.values():
        best = min(one.row.seconds for one in table)
        for one in table:
            if one.row.seconds > NEAR_BEST * best:
                continue
            source = one.source
            if source in (EXPERTS, OWN):
                source = f"{source} {one.row.source}"
            machine = one.row.on(hardware.load(one.row.machine, **values), values)
            job = Job(one.row.model, one.row.layout, one.row.training, machine)
            run = MeasuredRun(one.row.id, job, one.row.seconds, 1, 0.0)
            names = [name for name in CANDIDATES if measured.value_of(machine, name)]
            at = dict.fromkeys(names, 0.0)
            *own, experts = measured.slopes_of(run, machine, names, at)
            slopes = dict.fromkeys(CANDIDATES, 0.0) | dict(zip(names, own, strict=True))
            entry = (one.error, [*slopes.values(), experts])
            by_group.setdefault((source, Path(one.row.machine).stem), []).append(entry)
    return [
        Group(*key, *map(np.array, zip(*rows, strict=True)))
        for key, rows in by_group.items()
        if len(rows) > 1
    ]


def fit(some: Sequence[Group]) -> tuple[np.ndarray, float]:
    """Return the spreads with which the errors of each group are the likeliest, and `layout`.

    A group counts by the square root of its rows.
    """
    parts = [group.part(MOST_ROWS) for group in some]
    weights = [len(group.errors) ** 0.5 for group in some]

    def unlikely(spreads: np.ndarray, layout: float) -> float:
        sum_ = 0.0
        for part, weight in zip(parts, weights, strict=True):
            errors = np.clip(part.errors, -MOST_ERROR, MOST_ERROR)
            lower = np.linalg.cholesky(covariance(part, spreads, layout))
            each = np.linalg.solve(lower, errors)
            logarithms = np.log(np.diag(lower)).sum()
            sum_ += weight * float(0.5 * each @ each + logarithms) / len(errors)
        return sum_

    spreads, layout = np.full(len(CANDIDATES) + 1, 0.05), 0.06
    least, before = unlikely(spreads, layout), math.inf
    while before - least > 1e-4:
        before = least
        for place, spread in itertools.product(range(len(spreads)), SPREADS):
            tried = spreads.copy()
            tried[place] = spread
            if (now := unlikely(tried, layout)) < least:
                least, spreads = now, tried
        for other in LAYOUTS:
            if (now := unlikely(spreads, other)) < least:
                least, layout = now, other
    return spreads, layout


def covariance(group: Group, spreads: np.ndarray, layout: float) -> np.ndarray:
    """Return the covariance of a group's errors: of the constants, and of each layout alone."""
    scaled = group.slopes * spreads
    return scaled @ scaled.T + layout**2 * np.eye(len(group.errors))


class Result(NamedTuple):
    """Mean errors of the other rows of a group: before, corrected, and with a plain factor."""

    before: float
    corrected: float
    factor: float


def corrected(group: Group, spreads: np.ndarray, layout: float, count: int) -> Result | None:
    """Return the errors of a group after `count` of its rows were measured: the mean of draws."""
    rows = len(group.errors)
    if rows <= count:
        return None
    own = covariance(group, spreads, layout)
    shared = own - layout**2 * np.eye(len(group.errors))
    draw = np.random.default_rng(0)
    chosen = [[row] for row in range(rows)]
    if count > 1:
        chosen = [list(draw.choice(rows, count, replace=False)) for _ in range(DRAWS)]
    found = []
    for some in chosen:
        others = np.setdiff1d(np.arange(rows), some)
        left, told = group.errors[others], group.errors[some]
        moved = shared[np.ix_(others, some)] @ np.linalg.solve(own[np.ix_(some, some)], told)
        found.append([_off(left), _off(left - moved), _off(left - told.mean())])
    return Result(*np.mean(found, axis=0).tolist())


def _off(errors: np.ndarray) -> float:
    """Return the mean error of predictions over measured seconds; errors: of logarithms."""
    return float(np.abs(np.expm1(-errors)).mean())


def report(every: Sequence[Group]) -> list[str]:
    """Return all tables as lines of Markdown."""
    used = measured.priors()
    names = [*CANDIDATES, "experts", "layout"]
    lines = [f"| priors | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    lines.append(_spreads("in use", *_in_use(used)))
    lines.append(_spreads("refitted", *fit(every)))
    without = {}
    for source in dict.fromkeys(group.source for group in every):
        without[source] = fit([group for group in every if group.source != source])
        lines.append(_spreads(f"without {source}", *without[source]))
    head = "| source | machine | rows | best factor in hindsight | before |"
    head += " one row | plain factor | three rows | plain factor |"
    lines += ["", head, "|---" * 9 + "|"]
    entries = []
    for group in every:
        one, three = (corrected(group, *without[group.source], count) for count in MEASURED)
        errors = group.errors
        hindsight = min(_off(errors - error) for error in errors)
        entries.append((group, hindsight, one, three))
        cells = [group.source, group.machine, str(len(errors)), _cent(hindsight)]
        for result in (one, three):
            if result is one:
                cells.append(_cent(one.before))
            cells += [_cent(result.corrected), _cent(result.factor)] if result else ["-", "-"]
        lines.append(f"| {' | '.join(cells)} |")
    kinds = {
        "dense": lambda group: not group.source.startswith(EXPERTS),
        "dense, all but the playbook": lambda group: (
            not group.source.startswith(EXPERTS) and group.source != PLAYBOOK
        ),
        "experts": lambda group: group.source.startswith(EXPERTS),
    }
    for kind, wanted in kinds.items():
        own = [entry for entry in entries if wanted(entry[0])]
        cells = [f"**{kind}**, mean of rows", "", str(sum(len(e[0].errors) for e in own))]
        cells.append(_cent(_mean((len(e[0].errors), e[1]) for e in own)))
        for place in (2, 3):
            with_result = [e for e in own if e[place]]
            for part in ("before", "corrected", "factor")[place - 2 :]:
                pairs = ((len(e[0].errors), getattr(e[place], part)) for e in with_result)
                cells.append(_cent(_mean(pairs)))
        lines.append(f"| {' | '.join(cells)} |")
    for place, count in ((2, "one row"), (3, "three rows")):
        worse = [
            (e[place].corrected - e[place].before, f"{e[0].source} on {e[0].machine}")
            for e in entries
            if e[place] and e[place].corrected - e[place].before > WORSE
        ]
        known = sum(e[place] is not None for e in entries)
        text = ", ".join(f"{name} {_cent(by)}" for by, name in sorted(worse, reverse=True))
        lines += ["", f"Worse after {count} by more than {WORSE:.1%}: {len(worse)} of {known}"]
        lines[-1] += f" groups: {text}" if worse else " groups."
    return lines


def _in_use(prior: Priors) -> tuple[np.ndarray, float]:
    spreads = [prior.constants.get(name, 0.0) for name in CANDIDATES]
    return np.array([*spreads, prior.experts]), prior.layout


def _spreads(name: str, spreads: np.ndarray, layout: float) -> str:
    return f"| {name} | {' | '.join(f'{each:g}' for each in (*spreads, layout))} |"


def _mean(pairs) -> float:
    """Return the mean of values by their weights, of pairs of a weight and a value."""
    weights, values = zip(*pairs, strict=True)
    return statistics.fmean(values, weights)


def _cent(share: float) -> str:
    return f"{100 * share:.1f}"


def main(arguments: list[str]) -> None:
    """Print the report."""
    Parser(description=__doc__.splitlines()[0]).parse_args(arguments)
    print("\n".join(report(groups(distances.held_out()))))


if __name__ == "__main__":
    with sentences():
        main(sys.argv[1:])
