"""Traces the golden set, and asks `runs.py diff` whether it accuses a right run.

    python benchmarks/layouts/golden_traces.py --keep RESULTS.jsonl [--minutes 7]

The layouts are the lines of the files FILES in tests/data/golden, each in fp64, fp32 and bf16.
Every run is compared with the run of the same model on one rank. Both have 4 steps, of which
steps 1, 2 and 4 are traced. A pair is accused if diff says that they differ.

Results are kept in RESULTS.jsonl, and the runs on one rank in a folder next to it, so that the
list can be run in parts. Each part writes results/golden_traces.md.
"""

import hashlib
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the project's own modules

import golden_worker
import test_golden
from ranks import results_of

from benchmarks.results_file import add_options, from_options, machine
from config import validation
from config.cli import Parser
from config.errors import UserError, exit_with
from numerics import diff
from numerics.traces import Pair, read

RESULTS = ROOT / "benchmarks" / "results" / "golden_traces.md"
FILES = (
    "layouts",
    "schedules",
    "context",
    "families",
    "masks",
    "optimizers",
    "experts",
)
PRECISIONS = ("fp32", "bf16", "fp64")
TRACED = {"steps": 4, "trace_numerics": [1, 2, 4]}
AT_ONCE = 12  # runs of one start of ranks
Case = dict[str, Any]  # options, as tests/golden_worker.py takes them


def cases(ranks: int) -> list[Case]:
    """Return the layouts of a world in each precision; every pair of values occurs early."""
    layouts: dict[str, Case] = {}
    for file in FILES:
        for case in test_golden.lines_of(file).get(ranks, []):
            if "rampup_batch_size" in case or "data" in case:  # the latter needs files
                continue
            left_out = ("precision", *test_golden.TOLERANCES)
            options = {name: value for name, value in case.items() if name not in left_out}
            options |= TRACED
            layouts[json.dumps(options, sort_keys=True)] = options
    found = []
    for number, options in enumerate(layouts.values()):
        for shift in range(len(PRECISIONS)):
            case = options | {"precision": PRECISIONS[(number + shift) % len(PRECISIONS)]}
            if is_accepted(case, ranks):
                found.append((shift, case))
    found.sort(key=lambda pair: pair[0])  # each layout in one precision before it is in the next
    return [case for _, case in found]


def is_accepted(case: Case, ranks: int) -> bool:
    """Whether train.py takes the options; 8-bit AdamW has no fp64, for example."""
    try:
        validation.check(golden_worker.options(case), ranks)
    except UserError:
        return False
    return True


def run_all(jobs: list[Case], ranks: int) -> None:
    """Run cases, whose option `out` is their folder, in one start of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        plain = [{"case": case, "plant": None} for case in jobs]
        results_of("tests/plants_worker.py", ranks, plain, Path(folder), timeout=1500)


def reference(folder: Path, case: Case) -> Path:
    """Return the folder of the run on one rank with which a case is compared."""
    options = test_golden.without_layout(case)
    words = [f"{name}-{options[name]}" for name in sorted(options) if name not in TRACED]
    return folder / hashlib.sha256("_".join(words).encode()).hexdigest()[:24]


def compared(folder: Path, ranks: int, chunk: tuple[Case, ...]) -> list[dict[str, Any]]:
    """Run cases and the references that are missing; return a row per case."""
    missing = {}
    for case in chunk:
        path = reference(folder, case)
        if not (path / "weights.json").exists():
            missing[path] = test_golden.without_layout(case) | {"out": str(path)}
    if missing:
        run_all(list(missing.values()), 1)
    rows = []
    with tempfile.TemporaryDirectory() as made:
        outs = [Path(made) / str(number) for number in range(len(chunk))]
        run_all([case | {"out": str(out)} for case, out in zip(chunk, outs)], ranks)
        for case, out in zip(chunk, outs):
            of_reference = reference(folder, case)
            found = diff.compare(of_reference, out)
            row = {"ranks": ranks, "case": case, "accused": found["differs"]}
            row["largest"] = largest_share(of_reference, out)
            if found["differs"]:
                # Without the names of the two folders, which are temporary.
                row["text"] = diff.text(found | {"runs": ["one rank", f"{ranks} ranks"]})
            rows.append(row)
            print(ranks, row["accused"], f"{row['largest']:.3f}", case, flush=True)
    return rows


def largest_share(a: Path, b: Path) -> float:
    """Return the largest difference of all traced tensors over the difference that is explained."""
    shares = [0.0]
    for path in sorted((a / "numerics").iterdir()):
        for row in Pair(read(path), read(b / "numerics" / path.name)).rows():
            shares.append(row.difference / max(row.explained, 1e-300))
    return max(shares)


def report(rows: list[dict[str, Any]], totals: dict[int, int]) -> str:
    """Return the text of the results file; totals: the number of cases, by ranks."""
    lines = ["# The golden set, traced, and what `runs.py diff` says", ""]
    lines += [
        "    python benchmarks/layouts/golden_traces.py --keep RESULTS.jsonl [--minutes 7]",
        "",
    ]
    lines += [(__doc__ or "").split("\n\n")[2], "", f"{machine()}.", ""]
    lines += ["| ranks | precision | pairs | accused | largest share of what is explained |"]
    lines += ["| --: | --- | --: | --: | --: |"]
    for ranks in totals:
        for precision in PRECISIONS:
            some = [row for row in rows if row["case"]["precision"] == precision]
            some = [row for row in some if row["ranks"] == ranks]
            accused = sum(row["accused"] for row in some)
            largest = max((row["largest"] for row in some), default=0.0)
            lines += [f"| {ranks} | {precision} | {len(some)} | {accused} | {largest:.2f} |"]
    accused_rows = [row for row in rows if row["accused"]]
    lines += ["", f"{len(rows)} of {sum(totals.values())} pairs were run; diff accuses "]
    lines[-1] += f"{len(accused_rows)} of them."
    for row in accused_rows:
        lines += ["", f"{row['ranks']} ranks, {row['case']}:", "", "```", row["text"], "```"]
    return "\n".join([*lines, ""])


def main() -> None:
    """Run cases that are missing in the file of results, the fewest ranks first."""
    parser = Parser("golden_traces.py", description=(__doc__ or "").splitlines()[0])
    add_options(parser, minutes=60.0)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=list(test_golden.lines_of("layouts"))
    )
    given = parser.parse_args()
    keep = from_options(given)
    folder = given.keep.with_suffix(".runs").absolute()
    totals = {}
    for ranks in test_golden.lines_of("layouts"):
        every = cases(ranks)
        totals[ranks] = len(every)
        if ranks not in given.ranks:
            continue
        done = [row["case"] for row in keep.rows() if row["ranks"] == ranks]
        left = [case for case in every if case not in done]
        chunks = [tuple(left[i : i + AT_ONCE]) for i in range(0, len(left), AT_ONCE)]
        keep.run(partial(compared, folder, ranks), chunks)
    RESULTS.write_text(report(keep.rows(), totals))
    print(f"written: {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        exit_with(error)
