"""How near the suite's comparisons come to their bounds, under several kinds of kernels.

    python benchmarks/fp32_bounds.py --keep RESULTS.jsonl [--minutes 5] [--files FILE ...]

Runs every test file that compares numbers (tests/compare.py) once with each value of
ATEN_CPU_CAPABILITY that this processor can run, and lists for each test the largest difference over
its bound in benchmarks/results/fp32_bounds.md. Bounds below 1e-8 are those of fp64, which no
processor's rounding comes near. Two files are run at a time, each in a process of its own.

Results are kept in RESULTS.jsonl, a row for each file and kind of kernels, so that the list can be
run in parts: rows that are there are not made again, and with --minutes none is begun after that.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from kept import Kept, machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fp32_bounds.md"
KINDS = ("default", "avx2", "avx512")  # in the order of what processors have
SMALLEST_BOUND = 1e-8
LARGEST_SHARE = 1 / 3  # a difference may take this share of its bound
OWN_SHARE = "test_rounding_is_well_within_the_tolerance"  # their bounds are a third of another one


def test_files() -> list[str]:
    """The test files that compare numbers, but for those that need a GPU."""
    paths = sorted((ROOT / "tests").glob("test_*.py"))
    comparing = [path for path in paths if "from compare import" in path.read_text()]
    without = {"test_compare.py", "test_cuda.py", "test_nccl.py"}
    return [f"tests/{path.name}" for path in comparing if path.name not in without]


def kernels_here() -> tuple[str, ...]:
    """The values of ATEN_CPU_CAPABILITY that this processor can run."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    return KINDS[: KINDS.index(best) + 1] if best in KINDS else KINDS[:1]


def run(pair: tuple[str, str]) -> list[dict]:
    """The row of a kind of kernels and a test file: of each test the largest share of a bound, with
    difference and bound.
    """
    kernels, file = pair
    with tempfile.TemporaryDirectory() as folder:
        differences = Path(folder) / "differences"
        differences.touch()
        environment = {
            **os.environ,
            "ATEN_CPU_CAPABILITY": kernels,
            "TEST_DIFFERENCES": str(differences),
            # torch.compile's own key of its cache does not know of ATEN_CPU_CAPABILITY: functions
            # that were compiled for other kernels gave NaN.
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        }
        command = [sys.executable, "-m", "pytest", "-n", "0", file]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        lines = differences.read_text().splitlines()
    largest: dict[str, tuple[float, float, float]] = defaultdict(lambda: (0.0, 0.0, 0.0))
    for line in lines:
        test, difference, bound = json.loads(line)
        if bound >= SMALLEST_BOUND:
            name = test.removeprefix("tests/").partition("[")[0]
            largest[name] = max(largest[name], (difference / bound, difference, bound))
    ended = done.stdout.strip().splitlines()[-1]
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    row = {"kernels": kernels, "file": file, "status": done.returncode, "ended": ended}
    print(kernels, file, ended, flush=True)
    return [row | {"failed": failed, "largest": largest}]


def page(rows: list[dict]) -> str:
    """The results file."""
    kinds = kernels_here()
    shares: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for row in rows:
        for test, triple in row["largest"].items():
            shares[test][row["kernels"]] = triple
    lines = []
    above = []
    for test, of_kind in sorted(shares.items()):
        worst = max(of_kind.values())
        cells = " | ".join(f"{of_kind[k][0]:.3f}" if k in of_kind else "-" for k in kinds)
        lines.append(f"| `{test}` | {worst[1]:.1e} | {worst[2]:.1e} | {cells} |")
        if worst[0] > LARGEST_SHARE and OWN_SHARE not in test:
            above.append(test)
    failed = [f"{line} ({row['kernels']})" for row in rows for line in row["failed"]]
    run_files = [f"{sum(row['kernels'] == kind for row in rows)} with {kind}" for kind in kinds]
    head = [
        "# Differences over their bounds, under several kinds of kernels",
        "",
        "    python benchmarks/fp32_bounds.py --keep RESULTS.jsonl",
        "",
        f"{machine()}. Of each test the largest difference",
        "over its bound, with `ATEN_CPU_CAPABILITY` as above the column; bounds of 1e-8 and more.",
        f"Files run: {', '.join(run_files)},",
        f"of {len(test_files())}. Above a third: {', '.join(above) or 'none'}. The bounds of",
        f"`{OWN_SHARE}` and its twin are a third of the layouts' bound already.",
        f"Tests that failed: {'; '.join(failed) or 'none'}.",
        "",
        f"| test | largest difference | its bound | {' | '.join(kinds)} |",
        "| --- | --: | --: |" + " --: |" * len(kinds),
    ]
    return "\n".join([*head, *lines]) + "\n"


def main() -> None:
    """Run what is missing and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, required=True, help="the file of the results")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of beginning files")
    parser.add_argument("--files", nargs="*", help="test files, default: all that compare")
    options = parser.parse_args()
    keep = Kept(options.keep, options.minutes)
    there = {(row["kernels"], row["file"]) for row in keep.rows()}
    pairs = itertools.product(kernels_here(), options.files or test_files())
    keep.run(run, [pair for pair in pairs if pair not in there], at_a_time=2)
    RESULTS.write_text(page(keep.rows()))


if __name__ == "__main__":
    main()
