"""How near the suite's comparisons come to their bounds, under several kinds of kernels.

    python benchmarks/fp32_bounds.py          writes benchmarks/results/fp32_bounds.md
    python benchmarks/fp32_bounds.py tests/test_compile.py     of these files alone

Runs every test file that compares numbers (tests/compare.py) once with each value of
ATEN_CPU_CAPABILITY that this processor can run, and lists for each test the largest difference over
its bound. Bounds below 1e-8 are those of fp64, which no processor's rounding comes near.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fp32_bounds.md"
KERNELS = ("default", "avx2", "avx512")
SMALLEST_BOUND = 1e-8
LARGEST_SHARE = 1 / 3  # of a bound that a difference may take


def test_files() -> list[str]:
    """The test files that compare numbers, but for those that need a GPU."""
    paths = sorted((ROOT / "tests").glob("test_*.py"))
    comparing = [path for path in paths if "from compare import" in path.read_text()]
    without = {"test_compare.py", "test_cuda.py", "test_nccl.py"}
    return [f"tests/{path.name}" for path in comparing if path.name not in without]


def run(kernels: str, files: list[str]) -> tuple[dict[str, tuple[float, float, float]], str]:
    """For each test its largest share of a bound, with difference and bound; pytest's last line."""
    with tempfile.TemporaryDirectory() as folder:
        differences = Path(folder) / "differences"
        environment = {
            **os.environ,
            "ATEN_CPU_CAPABILITY": kernels,
            "TEST_DIFFERENCES": str(differences),
            # torch.compile's own key of its cache does not know of ATEN_CPU_CAPABILITY: functions
            # that were compiled for other kernels gave NaN.
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        }
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile"]
        done = subprocess.run(
            [*command, *files], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        lines = differences.read_text().splitlines()
    largest: dict[str, tuple[float, float, float]] = defaultdict(lambda: (0.0, 0.0, 0.0))
    for line in lines:
        test, difference, bound = json.loads(line)
        if bound >= SMALLEST_BOUND:
            name = test.removeprefix("tests/").partition("[")[0]
            largest[name] = max(largest[name], (difference / bound, difference, bound))
    return largest, done.stdout.splitlines()[-1]


def main() -> None:
    """Run the tests under each kind of kernels and write the table."""
    files = sys.argv[1:] or test_files()
    results = {kernels: run(kernels, files) for kernels in KERNELS}
    tests = sorted({test for largest, _ in results.values() for test in largest})
    rows = []
    above = []
    for test in tests:
        shares = [largest.get(test, (0.0, 0.0, 0.0)) for largest, _ in results.values()]
        worst = max(shares)
        cells = " | ".join(f"{share:.3f}" for share, _, _ in shares)
        rows.append(f"| `{test}` | {worst[1]:.1e} | {worst[2]:.1e} | {cells} |")
        if worst[0] > LARGEST_SHARE:
            above.append(test)
    header = " | ".join(KERNELS)
    head = [
        "# Differences over their bounds, under three kinds of kernels",
        "",
        "    python benchmarks/fp32_bounds.py",
        "",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}. Of each test the largest difference over its bound, with "
        "`ATEN_CPU_CAPABILITY` as above the column; bounds of 1e-8 and more.",
        f"Above a third: {', '.join(above) or 'none'}.",
        "",
        *(f"* {kernels}: {line}" for kernels, (_, line) in results.items()),
        "",
        f"| test | largest difference | its bound | {header} |",
        "| --- | --: | --: |" + " --: |" * len(KERNELS),
    ]
    text = "\n".join([*head, *rows]) + "\n"
    if files == test_files():
        RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
