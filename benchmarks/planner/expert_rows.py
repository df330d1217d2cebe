"""The planner's error on public rows of mixtures of experts, each model held out of the fit.

    python benchmarks/planner/expert_rows.py  # the tables of benchmarks/results/plan_moe.md

Predicts every row of benchmarks/data/moe_rows.csv whose source states what a plan needs. The rates
of Megatron-Core and the constants of experts are fitted on the dense rows of that program and on
the rows of all other models before a model is predicted (rates.py). Rows that are set aside are
listed by their reason.
"""

import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from base.cli import Parser
from base.errors import sentences
from benchmarks.planner import expert_cases, rates
from benchmarks.planner.expert_cases import ExpertRow
from benchmarks.planner.source_accuracy import FLAGGED, errors
from costs import hardware, memory, risk
from costs.job import Job

SHOWN = ("expert_tile", "expert_host", "expert_scans", "blackwell_per_watt", "h100_gemm_fraction")
WORDS = {
    "found": "found",
    "missed": "missed",
    "alarms": "false alarms: rows that ran, at a risk above one in five",
}


class HeldOut(NamedTuple):
    """A model's constants, fitted on all other rows, and how far its rows are off.

    off: by row, the error as a share. alarms: rows that ran and were predicted to run out of
    memory. found, missed: rows that did, and were predicted to, or not.
    """

    values: dict[str, float]
    off: dict[str, float]
    alarms: list[str]
    found: list[str]
    missed: list[str]


def held_out(rows: list[ExpertRow]) -> dict[str, HeldOut]:
    """Return how far the rows of each model are off, with constants fitted on the other rows."""
    constants = rates.without_each(dict(hardware.fitted_values()))
    found = {}
    for model in dict.fromkeys(row.source for row in rows):
        values, mine = constants[model], [row for row in rows if row.source == model]
        timed = [row for row in mine if row.seconds]
        off = [math.exp(error) - 1 for error in errors(timed, "seconds", values)]
        flagged = {row.id for row in mine if _risk(row, values) > FLAGGED}
        ran = {row.id for row in timed}
        out = [row.id for row in mine if row.id not in ran]
        found[model] = HeldOut(
            values,
            {row.id: each for row, each in zip(timed, off, strict=True)},
            sorted(flagged & ran),
            [name for name in out if name in flagged],
            [name for name in out if name not in flagged],
        )
    return found


def _risk(row: ExpertRow, values: dict[str, float]) -> float:
    machine = row.on(hardware.load(row.machine, **values), values)
    needed = memory.fullest(Job(row.model, row.layout, row.training, machine)).total
    return risk.out_of_memory(machine, needed)


# ---- The report ----------------------------------------------------------------------------------


def report(
    rows: list[ExpertRow],
    aside: dict[str, list[str]],
    found: dict[str, HeldOut],
) -> list[str]:
    """The figures of each model, of each recipe, and what is set aside, as lines of Markdown.

    found: the result of `held_out`.
    """
    names = " | ".join(SHOWN)
    lines = [f"| model, held out | rows | mean | median | largest | bias | {names} |"]
    lines.append("|---" * (6 + len(SHOWN)) + "|")
    every = {name: each for one in found.values() for name, each in one.off.items()}
    for model, one in found.items():
        cells = _figures(one.off) + [f"{one.values[name]:.3g}" for name in SHOWN]
        lines.append(f"| {model} | {len(one.off)} | {' | '.join(cells)} |")
    cells = _figures(every) + ["" for name in SHOWN]
    lines.append(f"| all | {len(every)} | {' | '.join(cells)} |")
    for name in ("found", "missed", "alarms"):
        ids = [each for one in found.values() for each in getattr(one, name)]
        lines += ["", f"Out of memory, {WORDS[name]} ({len(ids)}): {', '.join(ids) or 'none'}"]
    lines += ["", "| recipe | rows | seconds of a step | error in per cent |", "|---|---|---|---|"]
    groups: dict[str, list[ExpertRow]] = {}
    for row in (row for row in rows if row.seconds):
        groups.setdefault(_recipe(row), []).append(row)
    for recipe, group in groups.items():
        seconds = ", ".join(f"{row.seconds:.2f}" for row in group)
        off_of = ", ".join(f"{100 * every[row.id]:+.0f}" for row in group)
        lines.append(f"| {recipe} | {len(group)} | {seconds} | {off_of} |")
    lines += ["", f"Set aside, {sum(map(len, aside.values()))} rows:", ""]
    lines += [f"* {why} ({len(names)}): {', '.join(names)}" for why, names in aside.items()]
    return lines


def _figures(off: dict[str, float]) -> list[str]:
    """Mean, median and largest error and the bias, in per cent."""
    sizes = [abs(each) for each in off.values()]
    figures = statistics.mean(sizes), statistics.median(sizes), max(sizes)
    return [f"{100 * each:.1f}" for each in (*figures, statistics.mean(off.values()))]


def _recipe(row: ExpertRow) -> str:
    at, facts = row.layout, row.facts
    precision = "fp8" if facts["fp8"] else "bf16"
    machine = Path(row.machine).stem
    layout = f"tp {at.tp}, pp {at.pp}, ep {at.ep}, vp {facts['virtual_stages']}"
    batch = f"micro-batch {at.micro_batch_size}, batch {row.training.global_batch_size}"
    words = f"{row.source}, {machine}, {precision}, graphs {facts['graphs']}, {layout}, {batch}"
    return f"{words}; {row.section}"


def main(arguments: list[str]) -> None:
    """Print the report."""
    Parser(description=__doc__.splitlines()[0]).parse_args(arguments)
    rows, aside = expert_cases.read()
    print("\n".join(report(rows, aside, held_out(rows))))


if __name__ == "__main__":
    with sentences():
        main(sys.argv[1:])
