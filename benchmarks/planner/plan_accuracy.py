"""The planner's error against measured rows: those it was fitted on, and those it was not.

    python benchmarks/planner/plan_accuracy.py  # the published rows, every figure
    python benchmarks/planner/plan_accuracy.py --rows mine.csv --tables mine_tables.csv
    python benchmarks/planner/plan_accuracy.py --rows benchmarks/data/public/*.csv --json FILE
    python benchmarks/planner/plan_accuracy.py --rows mine.csv --skip  # without rows with mistakes
    python benchmarks/planner/plan_accuracy.py --fit  # constants refitted on all rows

In-sample: the constants of hardware/fitted.toml and tools/planner/engines.toml. Held out: for each
section of the rows, the constants are refitted on the published rows without that section, and
predict it; rows of --rows that are not among the published ones are never fitted on. Duplicates and
rows that are marked invalid in the file are left out; all others count.
"""

import json
import platform
import statistics
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from base.cli import Parser
from base.errors import UserError, sentences
from benchmarks.planner import (
    published_cases,
    published_rows,
    rates,
    source_accuracy,
    stated_rows,
)
from benchmarks.planner.robust_fit import moved, refit, slopes, solve
from benchmarks.planner.source_accuracy import errors, predictions
from benchmarks.ratios import kendall_tau
from costs import hardware, memory
from costs.job import Job

DATA = ROOT / "benchmarks" / "data"

# The fitted constants, and the sources of their rows. Time and memory share no constant.
FITS = {
    "seconds": (
        (
            "a100_gemm_fraction",
            "misaligned_fraction",
            "stride_penalty",
            "blocking_seconds",
            "unrepaired_slowdown",
            "jean_zay_nvlink",
        ),
        ("v100_gemm_fraction",),
    ),
    "gigabytes": (("activation_overhead", "deepspeed_buffers"), ("old_deepspeed_workspace",)),
}
SOURCES = {
    "a100_gemm_fraction": ("001", "003"),
    "v100_gemm_fraction": ("000", "002"),
    "activation_overhead": ("001",),
    "old_deepspeed_workspace": ("000", "002"),
}
FAR = 0.15  # rows further off than this are named
FEWEST = 4  # rows that a refit needs beside its section

# Sections that alone determine a constant. When one is held out, the constant takes the value
# expected without any row: an adapter that works in one direction only reaches half.
PRIORS = {"001 TP<8": {"crossing_share": 0.5}}


def usable(cases, kind: str) -> list:
    """Rows with a measurement of that kind that are neither repeated nor invalid."""
    return [c for c in cases if getattr(c, kind) and not c.aside]


# ------------------------------------------------------------------------------------------------
# Fitting: Gauss-Newton on the logarithms, with Huber's weights
# ------------------------------------------------------------------------------------------------


def fit_all(cases, start: dict, rounds: int = 5) -> dict[str, float]:
    """Every constant refitted on the rows that determine it."""
    values = dict(start)
    for kind, groups in FITS.items():
        for names in groups:
            own = _own(usable(cases, kind), names)
            if len(own) >= FEWEST + len(names):
                values = refit(partial(errors, own, kind), names, values, rounds)
    return values


def _own(cases, names: tuple[str, ...]) -> list:
    return [c for c in cases if c.source in SOURCES[names[0]]]


def held_out(cases, kind: str, start: dict, known=None) -> dict[str, float]:
    """Predictions by row, each from constants fitted on `known` rows outside the row's section.

    The errors are nearly linear in the constants' logarithms, so one set of slopes serves all
    sections; the predictions themselves are computed anew from the refitted constants.
    """
    found = predictions(cases, kind, start)
    for names in FITS[kind]:
        own = _own(usable(known or cases, kind), names)
        if not own:
            continue
        here, slope = slopes(partial(errors, own, kind), names, start)
        for section in _unique(_own(cases, names), "section"):
            keep = [i for i, c in enumerate(own) if c.section != section]
            if len(keep) < FEWEST + len(names):
                continue
            step = solve([here[i] for i in keep], [[line[i] for i in keep] for line in slope])
            mine = [c for c in cases if c.section == section]
            refitted = moved(start, names, step) | PRIORS.get(section, {})
            found |= predictions(mine, kind, refitted)
    return found


# ------------------------------------------------------------------------------------------------
# Figures
# ------------------------------------------------------------------------------------------------


def summary(cases, kind: str, predicted: dict[str, float]) -> str:
    """n, mean, median and largest error, and bias, in per cent."""
    found = source_accuracy.off_by([predicted[c.id] / getattr(c, kind) for c in cases])
    mean, median, most, bias = (100 * found[n] for n in ("mean", "median", "largest", "bias"))
    return f"{len(cases):3} | {mean:5.2f} | {median:5.2f} | {most:5.1f} | {bias:+5.2f}"


def decide(tables: dict[str, list[str]], cases, predicted: dict[str, float]) -> list[tuple]:
    """Return for each table: name, rows, Kendall's tau, regret, the row picked, the best one."""
    by_id = {c.id: c for c in cases}
    found = []
    for name, ids in tables.items():
        own = [by_id[i] for i in ids if i in by_id and by_id[i].seconds]
        if not own:
            continue
        real = [c.seconds / c.training.global_batch_size for c in own]
        guess = [predicted[c.id] / c.training.global_batch_size for c in own]
        picked, best = guess.index(min(guess)), real.index(min(real))
        regret = real[picked] / real[best] - 1
        found.append(
            (name, len(own), kendall_tau(real, guess), regret, own[picked].id, own[best].id)
        )
    return found


def out_of_memory(cases, values: dict[str, float]) -> tuple[list, list, list]:
    """Rows that ran out of memory and were predicted to; that were not; and false alarms."""
    hits, missed, alarms = [], [], []
    for case in cases:
        if case.aside or case.status not in ("ok", "OOM"):
            continue
        machine = case.on(hardware.load(case.machine, **values), values)
        table = memory.stages(Job(case.model, case.layout, case.training, machine))
        over = max(stage.total for stage in table) / machine.memory - 1
        entry = f"{case.id} ({100 * over:+.0f} %)"
        if case.status == "OOM":
            (hits if over > 0 else missed).append(entry)
        elif over > 0:
            alarms.append(entry)
    return hits, missed, alarms


# ------------------------------------------------------------------------------------------------
# The report, in Markdown
# ------------------------------------------------------------------------------------------------


def report(cases, tables: dict[str, list[str]], values: dict[str, float], known) -> list[str]:
    """All figures as lines of Markdown."""
    lines = []
    both = {}
    for kind, unit in (("seconds", "Time"), ("gigabytes", "Memory")):
        own = usable(cases, kind)
        if not own:
            continue
        inside = predictions(cases, kind, values)
        outside = held_out(cases, kind, values, known)
        both[kind] = (inside, outside)
        lines += ["", f"## {unit}: error in per cent", ""]
        figures = "n | mean | median | max | bias"
        lines += [f"| rows | in-sample: {figures} | held out: {figures} |", "|---" * 11 + "|"]
        groups = [(f"**{s}**", [c for c in own if c.source == s]) for s in _unique(own, "source")]
        groups += [(s, [c for c in own if c.section == s]) for s in _unique(own, "section")]
        for name, group in groups:
            row = f"{summary(group, kind, inside)} | {summary(group, kind, outside)}"
            lines.append(f"| {name} | {row} |")
        lines += [
            "",
            "H100 is held out by rates.py, with all rows of Megatron-Core.",
        ]
        lines += ["", f"Rows off by more than {FAR:.0%}, held out:", ""]
        lines += _far(own, kind, outside) or ["* none"]
    if "seconds" in both and decide(tables, cases, both["seconds"][0]):
        for name, predicted in zip(("in-sample", "held out"), both["seconds"], strict=True):
            lines += _choices(name, decide(tables, cases, predicted))
    hits, missed, alarms = out_of_memory(cases, values)
    lines += ["", "## Out of memory", ""]
    lines.append(f"* predicted ({len(hits)}): {', '.join(hits) or 'none'}")
    lines.append(f"* missed ({len(missed)}): {', '.join(missed) or 'none'}")
    lines.append(f"* false alarms ({len(alarms)}): {', '.join(alarms) or 'none'}")
    return lines


def _unique(cases, name: str) -> list[str]:
    return list(dict.fromkeys(getattr(c, name) for c in cases))


def _far(cases, kind: str, predicted: dict[str, float]) -> list[str]:
    lines = []
    for case in cases:
        off = predicted[case.id] / getattr(case, kind) - 1
        if abs(off) > FAR:
            why = published_cases.EXPLAINED.get(case.id, "not explained")
            lines.append(
                f"* {case.id}: {predicted[case.id]:.1f} against {getattr(case, kind):.1f} "
                f"({100 * off:+.0f} %): {why}"
            )
    return lines


def _choices(name: str, found: list[tuple]) -> list[str]:
    lines = ["", f"## Choosing a layout, {name}", ""]
    lines += [
        "| table | rows | tau | regret % | picked | best |",
        "|---|---|---|---|---|---|",
    ]
    for table, count, tau, regret, picked, best in found:
        lines.append(f"| {table} | {count} | {tau:.2f} | {100 * regret:.2f} | {picked} | {best} |")
    hits = sum(f[3] == 0 for f in found)
    regret = statistics.mean(f[3] for f in found)
    lines += [
        "",
        f"Best layout picked in {hits} of {len(found)}; mean regret {100 * regret:.2f} %.",
    ]
    return lines


def constants_table(values: dict[str, float]) -> list[str]:
    """The fitted constants as lines of Markdown, with the values in use."""
    lines = ["", "## Fitted constants", "", "| name | value | unit | meaning | fitted on |"]
    lines += ["|---|---|---|---|---|"]
    for c in hardware.constants():
        text = f"| {c.name} | {values[c.name]:.4g} | {c.unit} | {c.meaning} | {c.fitted_on} |"
        lines.append(text)
    return lines


def read_stated(paths: list[str], skip: bool) -> list[stated_rows.StatedRow]:
    """The stated rows of all files; with `skip` those without a mistake, and a note on the others.

    Raises a UserError that lists the mistakes of all files, if rows are not to be skipped.
    """
    rows, refused = [], []
    for path in paths:
        found = stated_rows.read_sound(path)
        rows += found.rows
        if skip and found.table.mistakes:
            print(f"note: {found.table.skipped()}", file=sys.stderr)
            continue
        try:
            found.table.refuse_mistakes()
        except UserError as mistakes:
            refused.append(str(mistakes))
    if refused:
        raise UserError("\n".join(refused))
    return rows


def groups_of(
    rows: list[stated_rows.StatedRow],
) -> dict[str, list[stated_rows.StatedRow]]:
    """The rows of each source; if there are several also all, and those in fp8 and with cp."""
    groups = {s: [r for r in rows if r.source == s] for s in _unique(rows, "source")}
    if len(groups) > 1:
        groups["all"] = rows
        groups["all in fp8"] = [row for row in rows if row.facts.get("fp8")]
        groups["all with cp"] = [row for row in rows if row.layout.cp > 1]
    return {name: own for name, own in groups.items() if own}


def by_source(rows: list[stated_rows.StatedRow], out: str | None, arguments: list[str]) -> None:
    """Print the figures of the stated rows of each source, and write them to `out` as JSON.

    Each source is predicted with constants fitted on the public rows of the other sources.
    """
    values = dict(hardware.fitted_values())
    rows = source_accuracy.possible(rows, values)
    known = [
        row for path in sorted(DATA.glob("public/*.csv")) for row in stated_rows.read(str(path))
    ]
    has_megatron = any(row.source in rates.SOURCES for row in rows)
    of_megatron = rates.without_each(values) if has_megatron else {}
    guesses = source_accuracy.held_out(rows, known, values, of_megatron)
    figures = {n: source_accuracy.compare(own, guesses) for n, own in groups_of(rows).items()}
    lines = ["# The planner on rows as stated", ""]
    lines += [f"    {' '.join(['python benchmarks/planner/plan_accuracy.py', *arguments])}", ""]
    lines += [
        "Each source is predicted with constants fitted without it. Regret in brackets: among"
    ]
    lines += [
        "the rows within 2x of their table's fastest. Regret of all rows: also of those aside."
    ]
    print("\n".join(lines + source_accuracy.report(figures)))
    if out:
        Path(out).write_text(json.dumps(figures, indent=1))


def main(arguments: list[str]) -> None:
    """Parse, compute, print."""
    parser = Parser(description=__doc__.splitlines()[0])
    default = [str(DATA / "measured_rows.csv")]
    parser.add_argument(
        "--rows", nargs="+", default=default, help="measured rows: benchmarks/data/README.md"
    )
    parser.add_argument("--json", metavar="OUT", help="of rows that state their machine: figures")
    parser.add_argument("--tables", help="decision tables; default: the published ones")
    parser.add_argument("--fit", action="store_true", help="print refitted constants and stop")
    parser.add_argument("--skip", action="store_true", help="leave out rows with a mistake")
    given = parser.parse_args(arguments)
    if all(stated_rows.is_stated(path) for path in given.rows):
        by_source(read_stated(given.rows, given.skip), given.json, arguments)
        return
    if len(given.rows) > 1 or given.json:
        raise UserError("several files, and --json, need rows with a column machine")
    table = published_rows.read_table(given.rows[0])
    if given.skip and table.mistakes:
        print(f"note: {table.skipped()}", file=sys.stderr)
    else:
        table.refuse_mistakes()
    cases = published_cases.cases(table.sound())
    values = dict(hardware.fitted_values())
    if given.fit:
        for name, number in fit_all(cases, values).items():
            print(f"{name:28} {number:.5g}   (in use: {values[name]:.5g})")
        return
    tables = published_rows.read_tables(given.tables or str(DATA / "decision_tables.csv"))
    known = published_cases.cases(published_rows.read(str(DATA / "measured_rows.csv")))
    lines = ["# The planner against measured rows", ""]
    lines += [f"    {' '.join(['python benchmarks/planner/plan_accuracy.py', *arguments])}", ""]
    lines += [f"Python {platform.python_version()}, numpy for the refits; no GPU takes part."]
    lines += report(cases, tables, values, known)
    print("\n".join(lines + constants_table(values)))


if __name__ == "__main__":
    with sentences():
        main(sys.argv[1:])
