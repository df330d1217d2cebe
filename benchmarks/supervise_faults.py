"""Faults in supervised runs: is each decision right, is the curve that of the run without a fault?

    python benchmarks/supervise_faults.py [ROUNDS] [--faults NAME ...]       8 faults a round

Real runs of 2 and 4 ranks under `supervise.py -- mpirun ...`, each with one fault: a rank that is
killed, stopped or hangs, an exception, a killed launcher, a loss that is not finite, a step that
always fails, a full disk (for which it mounts a file system, as root). Layout, rank and step are
drawn at random. A restarted run must have bitwise the losses of the one without a fault, which is
of the same layout. Exit status 1 if a decision, a curve or what is left is not as expected.

"decided": seconds from the fault to the decision, most of them until the watchdog has found it (its
limit here is 2 s) and all ranks have ended. "trained": from the fault to the first step after it.
"""

import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the project's own modules

from ranks import Job, mpi_command, none_left, start
from supervised_runs import ONE_THREAD, STEPS, WORDS, actions, curve, decisions, fault, supervised

from config.messages import Parser, UserError, exit_with

RESTART, PASS = "restart", "pass the status on"
# What is expected: kind of the case, action, for each end of the ranks; then the exit status.
EXPECTED = {
    "kill": ([("dead", RESTART), ("", PASS)], 0),
    "stop": ([("hang", RESTART), ("", PASS)], 0),
    "hang": ([("hang", RESTART), ("", PASS)], 0),
    "raise": ([("failed", RESTART), ("", PASS)], 0),
    "launcher": ([("", RESTART), ("", PASS)], 0),
    "nan": ([("", "stop")], 2),
    "always": ([("failed", RESTART), ("failed", RESTART), ("failed", "stop")], 1),
    "disk": ([("", "wait for room on the disk"), ("", PASS)], 0),
}
LAYOUTS = {"tp": ("--tp 2", 2), "pp": ("--pp 2", 2), "dp": ("", 2), "tp x pp": ("--tp 2 --pp 2", 4)}
SEED = 20261122
SECONDS = 240  # for one run


def draw(rounds: int) -> list[dict]:
    """The runs: every fault once a round; layout, rank and step at random."""
    chance, jobs = random.Random(SEED), []
    for number in range(rounds):
        for offset, name in enumerate(EXPECTED):
            layout = list(LAYOUTS)[(number + offset) % len(LAYOUTS)]
            rank, step = chance.randrange(LAYOUTS[layout][1]), chance.randrange(3, STEPS)
            jobs.append({"fault": name, "layout": layout, "rank": rank, "step": step})
    return jobs


def run(job: dict, folder: Path, straight: dict[int, float]) -> dict:
    """One supervised run: what was wrong with it, and its times."""
    (layout, ranks), name, out = LAYOUTS[job["layout"]], job["fault"], folder / "run"
    planned = fault("raise" if name == "always" else name, job["rank"], job["step"])
    plan = planned if name == "always" else [planned]  # a fault of every start, or of the first
    words = [*layout.split(), "--max-nan-steps", "1"]
    command = supervised(folder, [] if name == "disk" else plan, mpi_command(ranks), *words)
    with contextlib.ExitStack() as end:
        if name == "disk":
            fill(out)
            end.callback(subprocess.run, ["umount", "-l", str(out)], check=True)
        return job | supervise(command, folder, name, straight)


def supervise(command: list[str], folder: Path, name: str, straight: dict[int, float]) -> dict:
    """Run that command to its end: what was wrong, and seconds since the fault, or since there was
    room on the disk.
    """
    out = folder / "run"
    with Job(command, folder, **ONE_THREAD) as process:
        if name == "disk":
            process.wait_for(lambda: "waiting for room" in process.text)
            (out / "filler").unlink()
            (out / "fault").write_text(repr(time.time()))
        trained = watch(process.process, out)
        status = process.process.wait()
    began, first = float((out / "fault").read_text()), decisions(folder)[0]["at"]
    times = {
        "decided": round(first - began, 1) if first > began else None,
        "trained": round(trained - began, 1) if trained else None,
    }
    return judge(name, folder, status, straight) | times


def fill(out: Path) -> None:
    """A full file system of 4 MB in that folder."""
    out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(out)], check=True)
    with contextlib.suppress(OSError), open(out / "filler", "wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            continue


def watch(process: subprocess.Popen, out: Path) -> float | None:
    """Wait for the end; the time of the first trained step of a start after the first decision."""
    trained, limit = None, time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < limit:
        time.sleep(0.05)
        rows, journal = out / "metrics.jsonl", out / "supervisor.jsonl"
        if trained is None and journal.exists() and rows.exists() and rows.stat().st_size:
            later = rows.stat().st_mtime > journal.stat().st_mtime
            trained = time.time() if later and journal.stat().st_size else None
    return trained


def judge(name: str, folder: Path, status: int, straight: dict[int, float]) -> dict:
    """What is not as expected of a run that has ended."""
    expected, code = EXPECTED[name]
    found, left = actions(folder), none_left(str(folder))
    if name == "launcher" and found:  # the watchdog may have seen the ranks die
        found[0] = (expected[0][0], found[0][1])
    wrong = {
        f"decisions {found}": found != expected,
        f"status {status}": status != code,
        f"left {left}": left != [],
        "the curve": code == 0 and curve(folder / "run") != straight,
    }
    return {"wrong": [what for what, is_wrong in wrong.items() if is_wrong]}


def straight_runs(folder: Path) -> dict[str, dict[int, float]]:
    """The curve of each layout without a fault."""
    curves = {}
    for layout, (words, ranks) in LAYOUTS.items():
        out = folder / layout.replace(" ", "")
        run = [*WORDS, "--steps", str(STEPS), *words.split(), "--out", str(out)]
        done = start([*mpi_command(ranks), sys.executable, "train.py", *run], **ONE_THREAD)
        if done.status:
            raise RuntimeError(done.err)
        curves[layout] = curve(out)
    return curves


def table(results: list[dict]) -> str:
    """A row per fault: runs, right ones, median and longest seconds."""
    lines = ["| fault | runs | as expected | decided after, s | trained after, s |"]
    lines += ["| --- | --: | --: | --- | --- |"]
    for name in EXPECTED:
        own = [result for result in results if result["fault"] == name]
        right = sum(not result["wrong"] for result in own)
        cells = [f"{name} | {len(own)} | {right}"]
        for column in ("decided", "trained"):
            values = sorted(result[column] for result in own if result[column] is not None)
            cells.append(f"{statistics.median(values):.1f}, {values[-1]}" if values else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run ROUNDS rounds, print the table, and exit with what was wrong."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=8)
    try:
        parser.add_argument("--faults", nargs="+", choices=EXPECTED, default=list(EXPECTED))
        given = parser.parse_args()
        if given.rounds < 1:
            raise UserError(f"ROUNDS({given.rounds}) is at least 1")
    except UserError as mistake:
        exit_with(mistake)
    results = []
    with tempfile.TemporaryDirectory() as name:
        curves = straight_runs(Path(name))
        for number, job in enumerate(draw(given.rounds)):
            if job["fault"] not in given.faults:
                continue
            results.append(run(job, Path(name, f"run{number}"), curves[job["layout"]]))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(table(results))
    wrong = [result for result in results if result["wrong"]]
    print(f"{len(results) - len(wrong)} of {len(results)} as expected")
    if wrong:
        sys.exit(json.dumps(wrong, indent=1))


if __name__ == "__main__":
    main()
