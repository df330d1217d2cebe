"""Every fault on every axis, many times: does the job end in time, is the right rank named?

    python benchmarks/faults.py [ROUNDS] [WORKERS]        prints the table

Jobs are those of tests/fault_worker.py: real runs of 2 and 4 ranks with one fault, started without
a launcher, so that only the watchdog ends them. Layout and culprit are drawn at random for each
round; the axis is one on which the culprit has peers. WORKERS such programs run side by side. Exit
status 1 if a rank was not named correctly or a job did not end in time.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the project's own modules

import fault_worker

from config.messages import Parser, UserError, exit_with

FAULTS = ("killed", "stopped", "data", "loop", "raise")
LESS_OFTEN = ("gil", "evaluate", "write")  # every third round
LAYOUTS = {
    "tp": (("--tp 2", 2), ("--tp 2 --pp 2", 4), ("--tp 2", 4), ("--tp 4", 4)),
    "pp": (("--pp 2", 2), ("--tp 2 --pp 2", 4), ("--pp 2", 4), ("--pp 4", 4)),
    "dp": (("", 2), ("--tp 2", 4), ("--pp 2", 4), ("", 4)),
    "zero 3": (("--zero 3", 2), ("--zero 3 --tp 2", 4), ("--zero 3", 4)),
    "cp": (("--cp 2", 2), ("--cp 2 --tp 2", 4), ("--cp 2", 4), ("--cp 4", 4)),
}
SEED = 20261120
SECONDS_WITHOUT_HANG = 10.0  # in which a job must end that does not hang (else fault_worker.LIMIT)


def draw(rounds: int) -> list[dict]:
    """The jobs: every fault once a round, on one axis a round; layout and culprit at random."""
    chance, jobs = random.Random(SEED), []
    for number in range(rounds):
        axis = list(LAYOUTS)[number % len(LAYOUTS)]
        for fault in FAULTS + LESS_OFTEN * (number // len(LAYOUTS) % 3 == 0):
            layout, ranks = chance.choice(LAYOUTS[axis])
            culprit = chance.randrange(ranks)
            if layout == "--pp 4" and fault == "data":
                culprit = chance.choice((0, 3))  # stages between read no data
            job = {"axis": axis, "layout": layout, "ranks": ranks}
            jobs.append(job | {"fault": fault, "culprit": culprit})
    return jobs


def run(jobs: list[dict], workers: int) -> list[dict]:
    """The results of all jobs; each worker runs its share one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        programs = []
        for number in range(workers):
            own = Path(folder) / f"worker{number}"
            own.mkdir()
            (own / "jobs.json").write_text(json.dumps(jobs[number::workers]))
            words = [sys.executable, str(ROOT / "tests/fault_worker.py"), own, own / "jobs.json"]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            with open(own / "results", "w") as results:  # a pipe would fill
                programs.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=results))
        statuses = [program.wait() for program in programs]
        if any(statuses):
            raise RuntimeError(f"the workers ended with {statuses}")
        lines = "".join(path.read_text() for path in sorted(Path(folder).glob("*/results")))
    return [json.loads(line) for line in lines.splitlines()]


def table(results: list[dict]) -> str:
    """A row per fault and axis: rounds, how often rank 0 was the culprit, named, seconds."""
    cells = defaultdict(list)
    for result in results:
        cells[result["fault"], result["axis"]].append(result)
    lines = [
        "| fault | axis | rounds | of rank 0 | named | job ended after, s: median, most |",
        "| --- | --- | --: | --: | --: | --- |",
    ]
    order = FAULTS + LESS_OFTEN
    for (fault, axis), group in sorted(cells.items(), key=lambda c: order.index(c[0][0])):
        seconds = sorted(result["seconds"] for result in group)
        named = sum(result["named"] == [result["culprit"]] for result in group)
        first = sum(result["culprit"] == 0 for result in group)
        lines.append(
            f"| {fault} | {axis} | {len(group)} | {first} | {named} of {len(group)} | "
            f"{seconds[len(seconds) // 2]}, {seconds[-1]} |"
        )
    return "\n".join(lines)


def check(result: dict) -> None:
    """RuntimeError if the job did not end as it must, or not in time."""
    fault_worker.check(result)
    limit = fault_worker.LIMIT if result["kind"] == "hang" else SECONDS_WITHOUT_HANG
    if result["seconds"] > limit:
        raise RuntimeError(f"not in {limit:g} s: {json.dumps(result, indent=1)}")


def main() -> None:
    """Run ROUNDS rounds, print the table, and exit with the failures if there are any."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=21)
    parser.add_argument("workers", type=int, nargs="?", default=3)
    try:
        given = parser.parse_args()
        if min(given.rounds, given.workers) < 1:
            raise UserError(f"ROUNDS({given.rounds}) and WORKERS({given.workers}) are at least 1")
    except UserError as mistake:
        exit_with(mistake)
    results = run(draw(given.rounds), given.workers)
    print(table(results))
    missed = []
    for result in results:
        try:
            check(result)
        except RuntimeError as error:
            missed.append(str(error))
    print(f"{len(results) - len(missed)} of {len(results)} as expected")
    if missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
