"""Faults in supervised runs: is each decision right, is the curve that of the run without a fault?

    python benchmarks/supervise_faults.py [ROUNDS] [--faults NAME ...]       9 faults a round
    bash scripts/slurm_here.sh python benchmarks/supervise_faults.py 10 --faults node fewer

Real runs of 2 and 4 ranks under `supervise.py -- mpirun ...`, each with one fault: a rank that is
killed, stopped or hangs, an exception, a killed launcher, a loss that is not finite, a step that
always fails, a newest checkpoint that is damaged before its rank is killed, a full disk (for which
it mounts a file system, as root). Layout, rank and step are drawn at random. A restarted run must
have bitwise the losses of the one without a fault, which is of the same layout.

In a Slurm of three nodes a node is killed with its daemon, for good: `node` has a spare one, and
`fewer` has none and goes on with two nodes and the planner's layout: the losses of one rank without
a fault, to 1e-6.

Exit status 1 if a decision, a curve or what is left is not as expected.

"decided": seconds from the fault to the decision, most of them until the watchdog has found it (its
limit here is 2 s) and all ranks have ended. "trained": from the fault to the first step after it.
"""

import contextlib
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the project's own modules

from ranks import Job, mpi_command, none_left, start, why_no_slurm
from supervised_runs import (
    ONE_THREAD,
    STEPS,
    WORDS,
    LostNodes,
    actions,
    curve,
    decisions,
    fault,
    in_slurm,
    supervised,
    wait_for_idle,
)

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
    "damage": ([("dead", RESTART), ("", PASS)], 0),
    "disk": ([("", "wait for room on the disk"), ("", PASS)], 0),
    "node": ([("dead", RESTART), ("", PASS)], 0),
    "fewer": ([("dead", RESTART), ("", PASS)], 0),
}
OF_NODES = ("node", "fewer")  # in Slurm
DIFFERENCE = {"fewer": 1e-6}  # of a loss, relative; 0 where the layout stays
LAYOUTS = {"tp": ("--tp 2", 2), "pp": ("--pp 2", 2), "dp": ("", 2), "tp x pp": ("--tp 2 --pp 2", 4)}
SEED = 20261122
SECONDS = 240  # for one run
# Of the runs in Slurm: three blocks and six heads, for three nodes with a rank each.
SHAPE = "--layers 3 --hidden 24 --heads 6 --seq-length 16 --vocab-size 32 --global-batch-size 12"
PACED = f"{SHAPE} --device cpu --lr-schedule constant --save-every 5 --hang-timeout 10 --steps 60"
ON_NODES = {"tp": "--tp {}", "pp": "--pp {}", "dp": "--dp {}"}


def draw(rounds: int) -> list[dict]:
    """The runs: every fault once a round; layout, rank and step at random."""
    chance, jobs = random.Random(SEED), []
    for number in range(rounds):
        for offset, name in enumerate(EXPECTED):
            layout = list(LAYOUTS)[(number + offset) % len(LAYOUTS)]
            rank, step = chance.randrange(LAYOUTS[layout][1]), chance.randrange(3, STEPS)
            if name in OF_NODES:
                layout = list(ON_NODES)[number % len(ON_NODES)]
                rank, step = chance.randrange(2 if name == "node" else 3), chance.randrange(5, 40)
            jobs.append({"fault": name, "layout": layout, "rank": rank, "step": step})
    return jobs


def run_in_slurm(job: dict, folder: Path, straight: dict[int, float]) -> dict:
    """One supervised run that loses the node of a rank: what was wrong with it, and its times."""
    name, node, out = job["fault"], f"n{job['rank'] + 1}", folder / "run"
    used, options = 2, ["--spare-nodes", "1"]
    if name == "fewer":
        used, options = 3, ["--gpu", "cpu", "--max-slowdown", "3"]
    command = in_slurm(
        folder, options, *PACED.split(), *ON_NODES[job["layout"]].format(used).split()
    )
    with Job(command, out, **ONE_THREAD) as process, LostNodes() as lost:
        process.wait_for(lambda: len(process.rows) >= job["step"])
        (out / "fault").write_text(repr(time.time()))
        lost.end(node)
        trained = watch(process.process, out)
        status = process.process.wait()
    wait_for_idle(3)
    found, rows = judge(name, folder, status, straight), decisions(folder)
    if rows[0]["out"] != [node] or rows[0]["evidence"]["silent"] != [node]:
        found["wrong"].append(f"left out {rows[0]['out']}, not {node}")
    if rows[0]["used"] != (2 if name == "fewer" else 0):
        found["wrong"].append(f"goes on with {rows[0]['used']} nodes")
    return job | found | times(folder, trained) | {"goes on with": rows[0]["flags"]}


def run(job: dict, folder: Path, straight: dict[int, float]) -> dict:
    """One supervised run: what was wrong with it, and its times."""
    (layout, ranks), name, out = LAYOUTS[job["layout"]], job["fault"], folder / "run"
    planned = fault("raise" if name == "always" else name, job["rank"], job["step"])
    plan = planned if name == "always" else [planned]  # a fault of every start, or of the first
    words = [*layout.split(), "--max-nan-steps", "1"]
    words += ["--hang-timeout", "30"] * (name == "damage")  # which waits for the checkpoint
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
    return judge(name, folder, status, straight) | times(folder, trained)


def times(folder: Path, trained: float | None) -> dict[str, float | None]:
    """Seconds from the fault to the decision, and to the first step after it."""
    began, first = float((folder / "run" / "fault").read_text()), decisions(folder)[0]["at"]
    return {
        "decided": round(first - began, 1) if first > began else None,
        "trained": round(trained - began, 1) if trained else None,
    }


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
    if name in ("launcher", *OF_NODES) and found:  # whether the watchdog has seen it or not
        found[0] = (expected[0][0], found[0][1])
    difference = DIFFERENCE.get(name, 0.0)
    wrong = {
        f"decisions {found}": found != expected,
        f"status {status}": status != code,
        f"left {left}": left != [],
        "the curve": code == 0
        and not equal(curve(folder / "run", difference), straight, difference),
    }
    return {"wrong": [what for what, is_wrong in wrong.items() if is_wrong]}


def equal(one: dict[int, float], other: dict[int, float], difference: float) -> bool:
    """Whether two curves have the same steps, with losses that differ by at most that."""
    return one.keys() == other.keys() and all(
        math.isclose(one[step], other[step], rel_tol=difference) for step in one
    )


def straight_run(out: Path, ranks: int, words: list[str]) -> dict[int, float]:
    """The curve of a run without a fault."""
    command = [*mpi_command(ranks), sys.executable, "train.py", *words, "--out", str(out)]
    done = start(command, **ONE_THREAD)
    if done.status:
        raise RuntimeError(done.err)
    return curve(out)


def straight_runs(folder: Path, faults: list[str]) -> dict[tuple[str, str], dict[int, float]]:
    """The curves that these faults must not change: by fault and layout."""
    words, found = [*WORDS, "--steps", str(STEPS)], {}
    if not {*faults} <= {*OF_NODES}:
        for layout, (own, ranks) in LAYOUTS.items():
            same = straight_run(folder / layout, ranks, [*words, *own.split()])
            found |= {(name, layout): same for name in EXPECTED if name not in OF_NODES}
    if "fewer" in faults:
        one = straight_run(folder / "one", 1, PACED.split())
        found |= {("fewer", layout): one for layout in ON_NODES}
    for layout, own in ON_NODES.items() if "node" in faults else ():
        words = [*PACED.split(), *own.format(2).split()]
        found["node", layout] = straight_run(folder / f"two{layout}", 2, words)
    return found


def table(results: list[dict]) -> str:
    """A row per fault: runs, right ones, median and longest seconds."""
    lines = ["| fault | runs | as expected | decided after, s | trained after, s |"]
    lines += ["| --- | --: | --: | --- | --- |"]
    for name in EXPECTED:
        if not (own := [result for result in results if result["fault"] == name]):
            continue
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
        usual = [name for name in EXPECTED if name not in OF_NODES]
        parser.add_argument("--faults", nargs="+", choices=EXPECTED, default=usual)
        given = parser.parse_args()
        if given.rounds < 1:
            raise UserError(f"ROUNDS({given.rounds}) is at least 1")
        if {*given.faults} & {*OF_NODES} and (reason := why_no_slurm()):
            raise UserError(reason)
    except UserError as mistake:
        exit_with(mistake)
    results = []
    with tempfile.TemporaryDirectory() as name:
        curves = straight_runs(Path(name), given.faults)
        for number, job in enumerate(draw(given.rounds)):
            if job["fault"] not in given.faults:
                continue
            start_one = run_in_slurm if job["fault"] in OF_NODES else run
            same = curves[job["fault"], job["layout"]]
            results.append(start_one(job, Path(name, f"run{number}"), same))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(table(results))
    wrong = [result for result in results if result["wrong"]]
    print(f"{len(results) - len(wrong)} of {len(results)} as expected")
    if wrong:
        sys.exit(json.dumps(wrong, indent=1))


if __name__ == "__main__":
    main()
