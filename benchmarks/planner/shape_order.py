"""Whether the planner puts the shapes of BigScience's notes in the order in which they ran.

    python benchmarks/planner/shape_order.py   # the tables of benchmarks/results/shapes.md

Each table has shapes that were timed on the same GPUs in one layout. They are planned for the
program that ran them, each section of the notes with constants fitted without it. Two shapes count
as measured in an order if they differ by more than TOLD_APART: the same run differs by up to 2 %
when it is repeated (120.2 to 121.5 seconds for 72 blocks of 14,336). Seconds are compared for each
parameter.
"""

import itertools
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from architecture import model_stats
from base.cli import Parser
from base.errors import sentences
from benchmarks.planner import plan_accuracy, published_cases, published_rows
from benchmarks.planner.plan_accuracy import DATA
from benchmarks.planner.stated_rows import StatedRow
from costs import hardware

TOLD_APART = 0.02
# By the table's name, its rows in benchmarks/data/measured_rows.csv.
TABLES = {
    "hidden 14,400 and 13,824, 80 blocks": ("001-L253", "001-L254"),
    "heads of 72 x 14,336": tuple(f"001-L{line}" for line in range(394, 400)),
    "heads of 78 x 13,824": tuple(f"001-L{line}" for line in range(410, 413)),
    "heads of 84 x 13,312": ("001-L422", "001-L423"),
    "heads of 96 x 12,288": tuple(f"001-L{line}" for line in range(431, 434)),
    "shapes of 177 to 196 B": ("001-L306", "001-L358", "001-L367", "001-L374", "001-L382"),
}


class Timed(NamedTuple):
    """A shape of a table, with its measured and its predicted seconds for each parameter."""

    name: str
    measured: float
    predicted: float


def timed(rows: list[StatedRow], guesses: dict[str, float]) -> dict[str, list[Timed]]:
    """Return the shapes of each table, the fastest measured one first.

    guesses: by a row's id, its predicted seconds.
    """
    by_id = {row.id: row for row in rows}
    found = {}
    for name, ids in TABLES.items():
        shapes = []
        for row in (by_id[each] for each in ids):
            model = row.model
            count = model_stats.parameters(model) / 1e9
            text = f"{model.layers} x {model.hidden}, {model.heads} heads"
            assert row.seconds is not None
            shapes.append(Timed(text, row.seconds / count, guesses[row.id] / count))
        found[name] = sorted(shapes, key=lambda shape: shape.measured)
    return found


def pairs(shapes: list[Timed]) -> tuple[int, list[tuple[str, str]]]:
    """Return how many pairs of shapes were measured in an order, and those planned in another."""
    wrong, count = [], 0
    for fast, slow in itertools.combinations(shapes, 2):
        if slow.measured / fast.measured < 1 + TOLD_APART:
            continue
        count += 1
        if fast.predicted >= slow.predicted:
            wrong.append((fast.name, slow.name))
    return count, wrong


def report(tables: dict[str, list[Timed]]) -> list[str]:
    """Return the shapes of each table, and the pairs in order, as lines of Markdown."""
    lines = ["| table | shape | measured, s per B | planned, held out | off |", "|---" * 5 + "|"]
    ordered = total = 0
    swapped: list[str] = []
    for name, shapes in tables.items():
        for shape in shapes:
            off = f"{100 * (shape.predicted / shape.measured - 1):+.1f} %"
            cells = [name, shape.name, f"{shape.measured:.4f}", f"{shape.predicted:.4f}", off]
            lines.append(f"| {' | '.join(cells)} |")
        count, wrong = pairs(shapes)
        ordered, total = ordered + count - len(wrong), total + count
        swapped += [f"* {name}: {fast} ran faster than {slow}" for fast, slow in wrong]
    told = f"{100 * TOLD_APART:.0f} %"
    lines += ["", f"{ordered} of {total} pairs that differ by more than {told} are in order.", ""]
    return lines + swapped


def main(arguments: list[str]) -> None:
    """Print the report."""
    Parser(description=__doc__.splitlines()[0]).parse_args(arguments)
    rows = published_cases.cases(published_rows.read(str(DATA / "measured_rows.csv")))
    values = dict(hardware.fitted_values())
    guesses = plan_accuracy.held_out(rows, "seconds", values)
    print("\n".join(report(timed(rows, guesses))))


if __name__ == "__main__":
    with sentences():
        main(sys.argv[1:])
