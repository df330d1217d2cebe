"""What the planner says of rows that came after its constants, before anything is changed.

    python benchmarks/planner/blind_rows.py  # the last section of benchmarks/results/plan_unseen.md

No constant is fitted on these rows, and none is refitted for them: each is predicted with the
constants in use. Mixtures of experts count by model, all other rows by source.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from base.cli import Parser
from base.errors import sentences
from benchmarks.planner import expert_cases, source_accuracy, stated_rows
from benchmarks.planner.source_accuracy import FLAGGED, Guess
from benchmarks.planner.stated_rows import StatedRow
from costs import hardware

DATA = ROOT / "benchmarks" / "data"
# Where and when the rows of each source were published.
PUBLISHED = {
    "mlperf": "MLPerf Training v4.1, v5.0, v5.1: November 2024, June and November 2025",
    "simumax": "SimuMax 1.2: May 2026",
    "vocabulary": "Vocabulary Parallelism, its artifact: March 2025",
    "megatron_bridge_2025": "Megatron-Bridge 25.09 to 26.06: October 2025 to June 2026",
    "GPT-OSS-120B": "Megatron-Bridge 25.11 to 26.08: December 2025 to August 2026",
}
FAR = 0.15  # rows further off than this are named

Key = Callable[[StatedRow], str]


def read() -> tuple[list[StatedRow], list[StatedRow]]:
    """The dense rows, and those of mixtures of experts that are not set aside."""
    dense: list[StatedRow] = []
    for path in sorted(DATA.glob("public/*.csv")):
        if path.stem in PUBLISHED:
            dense += stated_rows.read(str(path))
    of_experts, _ = expert_cases.read(DATA / "moe_unseen.csv")
    return dense, list(of_experts)


def by_source(row: StatedRow) -> str:
    """The file of a dense row, the model of a row with experts."""
    return row.source


def by_machine(row: StatedRow) -> str:
    """GPU and precision, and whether there are experts."""
    precision = "fp8" if row.facts.get("fp8") else row.training.precision
    experts = ", experts" if row.model.experts > 1 else ""
    return f"{Path(row.machine).stem}, {precision}{experts}"


def cells(rows: Sequence[StatedRow], guesses: dict[str, Guess]) -> list[str]:
    """Rows, mean and median and largest error of time and the signed mean, in per cent, and the
    shares of rows below the line of 80 in 100 and within the interval of 90.
    """
    off = source_accuracy.off_by(
        [guesses[row.id].seconds / row.seconds for row in rows if row.seconds]
    )
    if off is None:
        return ["0", *["-"] * 6]
    sizes = [f"{100 * off[name]:.1f}" for name in ("mean", "median", "largest")]
    below = [row.seconds <= guesses[row.id].line for row in rows if row.seconds]
    inside = [
        guesses[row.id].interval[0] <= row.seconds <= guesses[row.id].interval[1]
        for row in rows
        if row.seconds
    ]
    shares = [f"{100 * statistics.mean(each):.0f}" for each in (below, inside)]
    return [str(off["n"]), *sizes, f"{100 * off['bias']:+.1f}", *shares]


def memory_cells(rows: Sequence[StatedRow], guesses: dict[str, Guess]) -> list[str]:
    """The error of memory by kind, and out of memory: rows that are missed, and false alarms."""
    kinds = []
    for kind in sorted({row.memory_kind for row in rows if row.gigabytes}):
        own = [row for row in rows if row.gigabytes and row.memory_kind == kind]
        off = source_accuracy.off_by(
            [guesses[r.id].gigabytes / r.gigabytes for r in own if r.gigabytes]
        )
        if off:
            kinds.append(f"{kind}: {len(own)}, {100 * off['mean']:.1f}, {100 * off['bias']:+.1f}")
    flagged = {row.id for row in rows if guesses[row.id].risk > FLAGGED}
    out = [row for row in rows if row.status == "OOM"]
    missed = sum(row.id not in flagged for row in out)
    ran = [row for row in rows if row.status == "ok"]
    alarms = sum(row.id in flagged for row in ran)
    return ["; ".join(kinds) or "-", f"{missed} of {len(out)}", f"{alarms} of {len(ran)}"]


def grouped(rows: Sequence[StatedRow], key: Key) -> dict[str, list[StatedRow]]:
    """The rows by a word of each."""
    found: dict[str, list[StatedRow]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def report(
    dense: Sequence[StatedRow], of_experts: Sequence[StatedRow], guesses: dict[str, Guess]
) -> list[str]:
    """The tables by source, and by GPU and precision, and the rows that are far off."""
    time = "rows | mean | median | largest | bias | below 80 % | in the interval of 90 |"
    every = [*dense, *of_experts]
    found = [f"| source | {time} memory, by kind: rows, mean, bias | missed | false alarms |"]
    found.append("|---" * 11 + "|")
    groups = grouped(dense, by_source) | {"all dense": list(dense)}
    groups |= grouped(of_experts, by_source)
    for name, own in groups.items():
        row = [name, *cells(own, guesses), *memory_cells(own, guesses)]
        found.append(f"| {' | '.join(row)} |")
    found += ["", f"| GPU, precision | {time}", "|---" * 8 + "|"]
    for name, own in sorted(grouped(every, by_machine).items()):
        found.append(f"| {name} | {' | '.join(cells(own, guesses))} |")
    found += ["", f"Dense rows off by more than {100 * FAR:.0f} %:", ""]
    for row in dense:
        if row.seconds:
            guess = guesses[row.id].seconds
            off = guess / row.seconds - 1
            if abs(off) > FAR:
                both = f"{guess:.3g} s against {row.seconds:.3g}"
                found.append(f"* {row.id}: {both} ({100 * off:+.0f} %)")
    return found


def lines() -> list[str]:
    """All tables as lines of Markdown."""
    dense, of_experts = read()
    guesses = source_accuracy.predict([*dense, *of_experts], dict(hardware.fitted_values()))
    head = ["| source | published |", "|---|---|"]
    head += [f"| {name} | {where} |" for name, where in PUBLISHED.items()]
    return [*head, "", *report(dense, of_experts, guesses)]


def main(arguments: list[str]) -> None:
    """Print the report."""
    Parser(description=__doc__.splitlines()[0]).parse_args(arguments)
    print("\n".join(lines()))


if __name__ == "__main__":
    with sentences():
        main(sys.argv[1:])
