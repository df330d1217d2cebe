"""The error of a scaling law on the losses of the Gemstones, each model held out of the fit.

    python benchmarks/planner/loss_rows.py  # the tables of benchmarks/results/loss_rows.md

Reads benchmarks/data/gemstones.csv: 22 models of 3 to 80 blocks and widths of 256 to 3,072, each
with its loss after every 10 billion tokens (arXiv 2502.06857). The law is E + A / N^alpha +
B / D^beta + C / layers^gamma. For given exponents the other constants are those of least squares of
relative errors; the exponents are those with the least sum of absolute relative errors.
"""

import csv
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from base.cli import Parser
from base.errors import sentences
from tools.planner.scaling_laws import LAWS, Law

ROWS = ROOT / "benchmarks" / "data" / "gemstones.csv"
START = (0.3, 0.4, 0.5)  # exponents with which the search begins
LARGEST = 3.0  # of an exponent
ROUNDS = 400
STEP = 0.1


class LossRow(NamedTuple):
    """A model after some tokens: its width, blocks, parameters, tokens and loss."""

    width: int
    layers: int
    parameters: float
    tokens: float
    loss: float


def read(path: Path = ROWS) -> list[LossRow]:
    """Return the rows of the file."""
    with open(path, newline="") as file:
        return [
            LossRow(
                int(row["width"]),
                int(row["layers"]),
                *(float(row[name]) for name in LossRow._fields[2:]),
            )
            for row in csv.DictReader(file)
        ]


def fit(rows: list[LossRow]) -> Law:
    """Return the law that fits some rows."""
    sizes = np.array([[row.parameters, row.tokens, row.layers] for row in rows])
    losses = np.array([row.loss for row in rows])

    def solved(exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return E, A, B, C for some exponents, and the relative errors."""
        terms = np.column_stack([np.ones(len(rows)), sizes**-exponents]) / losses[:, None]
        constants, *_ = np.linalg.lstsq(terms, np.ones(len(rows)), rcond=None)
        return constants, terms @ constants - 1

    def off(exponents: np.ndarray) -> float:
        if np.any(np.abs(exponents) > LARGEST):
            return math.inf
        return float(np.abs(solved(exponents)[1]).sum())

    exponents = nelder_mead(off, np.array(START))
    (e, a, b, c), _ = solved(exponents)
    alpha, beta, gamma = exponents
    return Law("fitted", "", e, a, alpha, b, beta, c, gamma)


def nelder_mead(cost: Callable[[np.ndarray], float], start: np.ndarray) -> np.ndarray:
    """Return a point near which `cost` is the lowest, by Nelder and Mead's simplex."""
    points = [start, *(start + STEP * row for row in np.eye(len(start)))]
    pairs = [(cost(point), point) for point in points]
    for _ in range(ROUNDS):
        pairs.sort(key=lambda pair: pair[0])
        centre = np.mean([point for _, point in pairs[:-1]], axis=0)
        worst, point = pairs[-1]
        steps = (centre + factor * (centre - point) for factor in (1.0, 2.0, -0.5))
        reflected, farther, nearer = ((cost(each), each) for each in steps)
        if reflected[0] < pairs[0][0]:
            pairs[-1] = min(reflected, farther, key=lambda pair: pair[0])
        elif reflected[0] < pairs[-2][0]:
            pairs[-1] = reflected
        elif nearer[0] < worst:
            pairs[-1] = nearer
        else:
            best = pairs[0][1]
            shrunk = [best + 0.5 * (each - best) for _, each in pairs[1:]]
            pairs[1:] = [(cost(each), each) for each in shrunk]
    return min(pairs, key=lambda pair: pair[0])[1]


def held_out(rows: list[LossRow]) -> dict[tuple[int, int], list[float]]:
    """Return the relative errors of each model, (width, layers), by a fit on the other models."""
    found = {}
    for model in sorted({(row.width, row.layers) for row in rows}):
        law = fit([row for row in rows if (row.width, row.layers) != model])
        mine = [row for row in rows if (row.width, row.layers) == model]
        found[model] = [off_by(law, row) for row in mine]
    return found


def off_by(law: Law, row: LossRow) -> float:
    """Return the relative error of a law's loss."""
    return law.loss(row.parameters, row.tokens, row.layers) / row.loss - 1


def report(rows: list[LossRow]) -> list[str]:
    """Return the errors of each model, and the law, as lines of Markdown."""
    lines = ["| width x blocks, held out | rows | mean error | bias | largest |", "|---" * 5 + "|"]
    every = []
    for (width, layers), off in held_out(rows).items():
        sizes = [abs(each) for each in off]
        every += sizes
        figures = statistics.mean(sizes), statistics.mean(off), max(sizes)
        cells = " | ".join(f"{100 * each:.2f} %" for each in figures)
        lines.append(f"| {width} x {layers} | {len(off)} | {cells} |")
    lines.append(f"| all | {len(every)} | {100 * statistics.mean(every):.2f} % | | |")
    law = fit(rows)
    values = (
        f"{name} {value:.5g}" for name, value in law._asdict().items() if value and name in NAMES
    )
    used = statistics.mean(abs(off_by(LAWS["gemstones"], row)) for row in rows)
    lines += [
        "",
        f"Fitted on all: {', '.join(values)}. The planner's law: {100 * used:.2f} % in-sample.",
    ]
    return lines


NAMES = ("e", "a", "alpha", "b", "beta", "c", "gamma")


def main(arguments: list[str]) -> None:
    """Print the report."""
    Parser(description=__doc__.splitlines()[0]).parse_args(arguments)
    print("\n".join(report(read())))


if __name__ == "__main__":
    with sentences():
        main(sys.argv[1:])
