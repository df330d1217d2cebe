"""Tokens per second of layouts on this machine's CPU, beside torch's own parallel parts.

    python benchmarks/layouts.py [--rounds 3]      writes benchmarks/results/layouts-cpu.md
    python benchmarks/layouts.py --against DIR     another checkout of Trine in place of torch's
                                                   parts; writes layouts-before-after.md

Every row is a run of its own at one thread per rank; rows alternate, round after round, so that
a machine that slows down slows all of them. The first steps of a run are left out; a row's figure
is the median of its runs' medians. The shape is that of other code bases' published CPU figures.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the project's own modules

from config.messages import Parser, UserError, exit_with

SHAPE = "--layers 4 --hidden 256 --heads 8 --seq-length 256 --vocab-size 8192"
BATCH = "--micro-batch-size 2 --global-batch-size 8"
TOKENS, STEPS, WARM_UP = 8 * 256, 12, 4
TORCH = "torch's parts"
PARTS = [
    "torch: DTensor for tp, pipelining's Schedule1F1B for pp, DistributedDataParallel with",
    "ZeroRedundancyOptimizer for dp (benchmarks/torch_native.py).",
]

# (row, ranks, options of train.py, options of torch_native.py or None)
ROWS = [
    ("1 rank", 1, "", "--kind one"),
    ("tp 2", 2, "--tp 2", "--kind tp"),
    ("tp 2, sequence parallel", 2, "--tp 2 --sequence-parallel", None),
    ("pp 2, blocks 2 + 2", 2, "--pp 2 --partition 2,2", "--kind pp --cuts 2"),
    ("pp 2, balanced: 3 + 1", 2, "--pp 2", "--kind pp --cuts 3"),
    ("dp 2, ZeRO-0", 2, "--zero 0", None),
    ("dp 2, ZeRO-1", 2, "--zero 1", "--kind dp"),
    ("tp 2 x pp 2", 4, "--tp 2 --pp 2", None),
    ("tp 2 x dp 2, ZeRO-1", 4, "--tp 2", None),
    ("pp 2 x dp 2, ZeRO-1", 4, "--pp 2", None),
    ("dp 4, ZeRO-1", 4, "", None),
]


def run(command: list[str], root: Path = ROOT) -> str:
    """Standard output of a command that must succeed, on one thread per rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def ours(ranks: int, options: str, root: Path = ROOT) -> float:
    """Median tokens per second of one run of a checkout's train.py."""
    launcher = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks)]
    with tempfile.TemporaryDirectory() as out:
        words = f"{SHAPE} {BATCH} --no-tied --steps {STEPS} {options} --out {out}".split()
        run([*(launcher if ranks > 1 else []), sys.executable, "train.py", *words], root)
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return TOKENS / statistics.median(row["seconds"] for row in rows[WARM_UP:])


def torchs(ranks: int, options: str) -> float:
    """Median tokens per second of one run of torch_native.py."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(ranks)]
    program = ["benchmarks/torch_native.py", *f"{SHAPE} {BATCH} --steps {STEPS}".split()]
    program += options.split()
    out = run([*launcher, *program] if ranks > 1 else [sys.executable, *program])
    seconds = json.loads(out.strip().splitlines()[-1])
    return TOKENS / statistics.median(seconds[WARM_UP:])


def show(figures: list[float]) -> str:
    """Median (lowest to highest), or nothing."""
    if not figures:
        return ""
    return f"{statistics.median(figures):,.0f} ({min(figures):,.0f} to {max(figures):,.0f})"


def commit(root: Path) -> str:
    """The commit that a checkout is at."""
    return run(["git", "rev-parse", "--short=7", "HEAD"], root).strip()


def report(rounds: int, measured: dict[str, tuple[list[float], list[float]]], other: str) -> str:
    """The results file: tokens per second of both on each layout; other: what was measured
    beside this checkout, a commit or torch's parts.
    """
    torch_parts = other == TORCH
    title = "beside torch's own parallel parts" if torch_parts else f"beside commit {other}"
    lines = [
        f"# Layouts on a CPU, {title}",
        "",
        f"`python benchmarks/layouts.py --rounds {rounds}{'' if torch_parts else ' --against DIR'}`"
        f" at commit {commit(ROOT)}, {time.strftime('%Y-%m-%d')}, "
        f"{os.cpu_count()} cores ({platform.processor() or platform.machine()}), "
        f"Python {platform.python_version()}, torch {torch.__version__}, gloo, fp32, one thread "
        "per rank.",
        "",
        f"`{SHAPE} {BATCH}`, untied head: {TOKENS} tokens a step on any layout. Median of "
        f"{rounds} runs, each its median of steps {WARM_UP + 1} to {STEPS} (lowest to highest).",
        *(PARTS if torch_parts else []),
        "Ratios are of medians.",
        "",
        f"| layout | ranks | Trine, tokens/s | {other}, tokens/s | ratio |",
        "| --- | --: | --: | --: | --: |",
    ]
    for name, ranks, _, _ in ROWS:
        own, theirs = measured[name]
        ratio = f"{statistics.median(own) / statistics.median(theirs):.2f}" if theirs else ""
        lines.append(f"| {name} | {ranks} | {show(own)} | {show(theirs)} | {ratio} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure in rounds, both systems in turn, and write the results file."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout of Trine")
    try:
        given = parser.parse_args()
        if given.rounds < 1:
            raise UserError(f"--rounds must be at least 1, not {given.rounds}")
        if given.against and not (given.against / "train.py").is_file():
            raise UserError(f"--against {given.against} is no checkout: it has no train.py")
    except UserError as mistake:
        exit_with(mistake)
    rounds, root = given.rounds, given.against
    measured: dict[str, tuple[list[float], list[float]]] = {row[0]: ([], []) for row in ROWS}
    for number in range(rounds):
        for name, ranks, options, other in ROWS:
            measured[name][0].append(ours(ranks, options))
            if root:
                measured[name][1].append(ours(ranks, options, root))
            elif other:
                measured[name][1].append(torchs(ranks, other))
            print(f"round {number + 1}  {name:26}", *map(show, measured[name]), flush=True)
    name = "layouts-before-after.md" if root else "layouts-cpu.md"
    path = ROOT / "benchmarks" / "results" / name
    path.write_text(report(rounds, measured, commit(root) if root else TORCH))
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
