"""Emulated seconds per step beside those of real runs, on this machine's CPU.

    python benchmarks/emulator.py [--rounds 3]      writes benchmarks/results/emulator.md

For each of twelve layouts `rehearse.py --on cpu` measures the stages one after the other, a single
process on one thread; then the same layout runs under mpirun. Both alternate, round after round;
a layout's figure is the median of its rounds, and the file is written after each round. The links
are measured first, by 2 and by 4 ranks.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from kept import machine
from ratios import kendall_tau

ROOT = Path(__file__).resolve().parent.parent
SHAPE = "--layers 4 --hidden 256 --heads 8 --seq-length 256 --vocab-size 8192 --no-tied"
SHAPE += " --micro-batch-size 2 --global-batch-size 8"
STEPS, WARM_UP = 12, 4
LINKS = "--min-bytes 16384 --max-bytes 33554432 --factor 2 --seconds 0.15 --device cpu"

# (ranks, options of train.py)
ROWS = [
    (1, ""),
    (2, "--pp 2"),
    (2, "--pp 2 --schedule gpipe"),
    (2, "--tp 2"),
    (2, "--tp 2 --sequence-parallel"),
    (2, "--zero 0"),
    (2, "--zero 1"),
    (4, "--pp 4"),
    (4, "--tp 2 --pp 2"),
    (4, "--tp 4"),
    (4, "--pp 2 --zero 1"),
    (4, "--zero 1"),
]


def run(command: list[str]) -> str:
    """Standard output of a command that must succeed, on one thread per rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def mpirun(ranks: int) -> list[str]:
    """The command that starts so many ranks of this interpreter."""
    launcher = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks)]
    return [*(launcher if ranks > 1 else []), sys.executable]


def measure_links(folder: Path) -> Path:
    """One allreduce.csv of groups of 2 and of 4 ranks."""
    rows = []
    for ranks, layout in ((2, ""), (4, "--tp 2")):
        out = folder / f"links{ranks}"
        words = f"benchmarks/allreduce.py {LINKS} {layout} --out {out}".split()
        run([*mpirun(ranks), *words])
        with open(out / "allreduce.csv", newline="") as file:
            rows += list(csv.DictReader(file))
    path = folder / "links.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def emulate(ranks: int, options: str, links: Path, folder: Path) -> float:
    """Seconds per step by rehearse.py."""
    out = folder / "emulated.json"
    words = f"rehearse.py --on cpu --gpus {ranks} {SHAPE} {options} --links {links} --json {out}"
    run([sys.executable, *words.split()])
    return json.loads(out.read_text())["seconds"]


def real(ranks: int, options: str) -> float:
    """Seconds per step of a run: the median without the first steps."""
    with tempfile.TemporaryDirectory() as out:
        words = f"train.py {SHAPE} {options} --steps {STEPS} --out {out}".split()
        run([*mpirun(ranks), *words])
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["seconds"] for row in rows[WARM_UP:])


def report(
    rounds: int, loads: list[float], found: dict[tuple[int, str], tuple[list[float], list[float]]]
) -> str:
    """The results file. loads: of the machine over a minute, after each run."""
    emulated = [statistics.median(own) for own, _ in found.values()]
    measured = [statistics.median(own) for _, own in found.values()]
    errors = [a / b - 1 for a, b in zip(emulated, measured)]
    tau = kendall_tau(emulated, measured)
    lines = [
        "# The emulator beside real runs, on a CPU",
        "",
        f"`python benchmarks/emulator.py --rounds {rounds}`, {machine()}, gloo, fp32, one thread "
        f"per rank. Load over a minute: {min(loads):.1f} to {max(loads):.1f}.",
        "",
        f"`{SHAPE}`. Milliseconds per step, median of {rounds} rounds (lowest to highest); real: "
        f"each round the median of steps {WARM_UP + 1} to {STEPS}.",
        "",
        f"Relative error: median {statistics.median(map(abs, errors)):.1%}, largest "
        f"{max(map(abs, errors)):.1%}; the goal is a median of 8 %. Kendall's tau of the order: "
        f"{tau:.2f}; the goal is 0.8.",
        "",
        "| layout | ranks | emulated, ms | real, ms | error |",
        "| --- | --: | --: | --: | --: |",
    ]
    for ((ranks, options), (own, theirs)), error in zip(found.items(), errors):
        cells = f"{options or 'one rank'} | {ranks} | {show(own)} | {show(theirs)}"
        lines.append(f"| {cells} | {error:+.1%} |")
    return "\n".join(lines) + "\n"


def show(seconds: list[float]) -> str:
    """Median (lowest to highest), in milliseconds."""
    low, middle, high = (1e3 * f(seconds) for f in (min, statistics.median, max))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    """Measure the links, then both sides in turn, and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--links", type=Path, help="a file of links that was measured before")
    given = parser.parse_args()
    rounds, loads = given.rounds, list[float]()
    found: dict[tuple[int, str], tuple[list[float], list[float]]] = {row: ([], []) for row in ROWS}
    path = ROOT / "benchmarks" / "results" / "emulator.md"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        links = given.links or measure_links(folder)
        for number in range(rounds):
            for ranks, options in ROWS:
                own, theirs = found[ranks, options]
                own.append(emulate(ranks, options, links, folder))
                theirs.append(real(ranks, options))
                loads.append(os.getloadavg()[0])
                about = f"load {loads[-1]:4.1f}, round {number + 1}, {ranks} {options:28}"
                print(about, show(own), "|", show(theirs), flush=True)
            path.write_text(report(number + 1, loads, found))
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
