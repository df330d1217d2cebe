"""Every fault on every axis, many times: does the job end in time, is the right rank named?

    python benchmarks/faults/faults.py ROUNDS WORKERS --keep RESULTS.jsonl [--minutes 7]
    python benchmarks/faults/faults.py ROUNDS --keep RESULTS.jsonl --table  prints the table alone

Jobs are those of tests/fault_worker.py: real runs of 2 and 4 ranks with one fault, started without
a launcher, so that only the watchdog ends them. Layout and culprit are drawn at random for each
round; the axis is one on which the culprit has peers. WORKERS such programs run side by side. Exit
status 1 if a rank was not named correctly or a job did not end in time.

The results are kept in RESULTS.jsonl, so that the list can be run in parts: jobs that are in it are
not run again, and with --minutes no program is started after that time. A job whose culprit never
came to its fault, such as a rank that has nothing to write, shows nothing about faults: such jobs
are counted apart. So are jobs that did not begin.
"""

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the project's own modules

import fault_worker

from base.cli import Parser
from base.errors import UserError, exit_with
from benchmarks import results_file

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
AT_A_TIME = 6  # jobs of one program, whose start takes seconds
SECONDS_OF_A_HANG = 30.0  # in which a job must end that hangs
SECONDS_WITHOUT_HANG = 10.0  # in which a job must end that does not


def draw(rounds: int) -> list[dict]:
    """The jobs: every fault once a round, on one axis a round; layout and culprit at random."""
    chance, jobs, count = random.Random(SEED), [], itertools.count()
    for number in range(rounds):
        axis = list(LAYOUTS)[number % len(LAYOUTS)]
        for fault in FAULTS + LESS_OFTEN * (number // len(LAYOUTS) % 3 == 0):
            layout, ranks = chance.choice(LAYOUTS[axis])
            culprit = chance.randrange(ranks)
            if layout == "--pp 4" and fault == "data":
                culprit = chance.choice((0, 3))  # stages between read no data
            job = {"axis": axis, "layout": layout, "ranks": ranks}
            jobs.append(job | {"fault": fault, "culprit": culprit, "number": next(count)})
    return jobs


def results_of(jobs: list[dict], keep: results_file.ResultsFile) -> list[dict]:
    """The kept results of those jobs; a job that is drawn in another way has none."""
    drawn = {job["number"]: job for job in jobs}
    return [each for each in keep.rows() if drawn.get(each["number"], {}).items() <= each.items()]


def run_some(jobs: list[dict]) -> list[dict]:
    """The results of one program that runs these jobs one after the other.

    If it ends early, the job it was at is a result with "error", and those behind it have none.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "jobs.json").write_text(json.dumps(jobs))
        words = [sys.executable, str(ROOT / "tests/fault_worker.py"), name, f"{name}/jobs.json"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode:
        results.append(jobs[len(results)] | {"error": done.stderr[-2000:], "hit": False})
    return results


def names_an_innocent(result: dict) -> bool:
    """Whether the case names a rank that is not the culprit."""
    return bool(set(result["named"] or ()) - {result["culprit"]})


def table(results: list[dict]) -> list[str]:
    """A row per fault and axis: rounds, how often rank 0 was the culprit, named, seconds.

    Named: cases with the culprit alone. Innocent: cases that name another rank, with it or without.
    """
    lines = [
        "| fault | axis | rounds | of rank 0 | named | innocent | ended after, s: median, most |",
        "| --- | --- | --: | --: | --: | --: | --- |",
    ]
    for fault, axis in itertools.product(FAULTS + LESS_OFTEN, LAYOUTS):
        group = [r for r in results if (r["fault"], r["axis"]) == (fault, axis)]
        if not group:
            continue
        seconds = sorted(result["seconds"] for result in group)
        named = sum(result["named"] == [result["culprit"]] for result in group)
        first = sum(result["culprit"] == 0 for result in group)
        lines.append(
            f"| {fault} | {axis} | {len(group)} | {first} | {named} of {len(group)} | "
            f"{sum(map(names_an_innocent, group))} | {seconds[len(seconds) // 2]}, {seconds[-1]} |"
        )
    return lines


def problem(result: dict) -> str:
    """Return the mistake of a job that came to its fault; empty if it ended as it must, in time."""
    try:
        fault_worker.check(result)
    except RuntimeError as error:
        return str(error)
    limit = SECONDS_OF_A_HANG if result["kind"] == "hang" else SECONDS_WITHOUT_HANG
    if result["seconds"] > limit:
        return f"not in {limit:g} s: {json.dumps(result, indent=1)}"
    return ""


def summary(results: list[dict], drawn: int) -> tuple[str, list[str]]:
    """The table with its totals, and what is wrong with each job that is not as expected."""
    counted = [result for result in results if result["hit"]]
    failed = [result for result in results if "error" in result]
    missed = list(filter(None, map(problem, counted)))
    totals = (
        f"{len(counted) - len(missed)} of {len(counted)} as expected; "
        f"{sum(map(names_an_innocent, counted))} named a rank that was not the culprit. Not "
        f"counted: {len(results) - len(counted) - len(failed)} whose culprit never came to its "
        f"fault, {len(failed)} that did not begin, {drawn - len(results)} not run yet"
    )
    missed += [f"did not begin: {json.dumps(result)}" for result in failed]
    return "\n".join([*table(counted), totals]), missed


def main() -> None:
    """Run what is not kept yet, print the table, and exit with the failures if there are any."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=21)
    parser.add_argument("workers", type=int, nargs="?", default=3)
    results_file.add_options(parser)
    parser.add_argument("--table", action="store_true", help="run nothing")
    try:
        given = parser.parse_args()
        if min(given.rounds, given.workers) < 1:
            raise UserError(f"ROUNDS({given.rounds}) and WORKERS({given.workers}) are at least 1")
    except UserError as mistake:
        exit_with(mistake)
    jobs = draw(given.rounds)
    keep = results_file.from_options(given)
    if not given.table:
        there = {result["number"] for result in results_of(jobs, keep)}
        missing = [job for job in jobs if job["number"] not in there]
        parts = [missing[at : at + AT_A_TIME] for at in range(0, len(missing), AT_A_TIME)]
        keep.run(run_some, parts, given.workers)
    text, missed = summary(results_of(jobs, keep), len(jobs))
    print(text)
    if missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
