"""Kills a rank at a random moment and resumes under another layout, for a number of rounds.

    python tests/resume_worker.py FOLDER ROUNDS SEED

One rank is killed; the watchdog must end the others. The next round takes another number of ranks,
layout, micro-batch and ZeRO stage. At the end every row of every round is compared with a run on
one rank that was not interrupted. Prints one JSON object; raises an error if a check fails.
"""

import ctypes
import json
import math
import os
import random
import signal
import sys
import time
from pathlib import Path

import fault_worker
import kill_worker

SHAPE = (
    "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 61 --global-batch-size 8 "
    "--set pad_vocab_multiple=4 --lr 1e-3 --lr-schedule constant --device cpu --save-every 2 "
    "--keep-last 2"
)
LAYOUTS = [
    (1, ""),
    (2, "--tp 2"),
    (2, "--tp 2 --sequence-parallel"),
    (2, "--pp 2"),
    (2, "--pp 2 --schedule gpipe"),
    (2, ""),
    (4, "--tp 2 --pp 2"),
    (4, "--tp 2"),
    (4, "--pp 2"),
    (4, "--pp 4"),
    (4, "--tp 4"),
    (4, ""),
]
SECONDS_TO_END = 30.0


def one_round(folder: Path, options: list[str], ranks: int, generator: random.Random) -> float:
    """Start, kill one rank at a random moment, wait for all: seconds from the kill to the end."""
    since = time.time_ns()
    ids = kill_worker.launch(folder, options, ranks)
    try:
        kill_worker.wait_for_first_row(folder / "metrics.jsonl", since, ids)
    except BaseException:
        for i in ids:  # a test that fails must not leave ranks running
            os.kill(i, signal.SIGKILL)
        raise
    time.sleep(generator.uniform(0.0, 1.5))
    began = time.monotonic()
    os.kill(ids[generator.randrange(ranks)], signal.SIGKILL)
    statuses = fault_worker.all_gone(ids, began + SECONDS_TO_END)
    seconds = time.monotonic() - began
    left = fault_worker.end_what_is_left()
    if left or len(statuses) < ranks or not all(statuses.values()):
        raise RuntimeError(f"{options}: ended with {statuses}, left {left}")
    return seconds


def run_interrupted(folder: Path, rounds: int, generator: random.Random) -> dict:
    """The rounds, each beginning where the newest checkpoint ends."""
    layouts, longest, last = [], 0.0, 0
    for _ in range(rounds):
        ranks, layout = generator.choice([one for one in LAYOUTS if one not in layouts[-1:]])
        varied = f" --micro-batch-size {generator.choice((1, 2))} --zero {generator.choice((0, 1))}"
        options = [*SHAPE.split(), *layout.split(), *varied.split(), "--out", str(folder)]
        options += ["--resume", "auto", "--steps", "1000000"]
        longest = max(longest, one_round(folder, options, ranks, generator))
        layouts.append((ranks, layout))
        first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
        if first["iteration"] != last + 1:
            raise RuntimeError(f"step {last} was complete; the run began at {first['iteration']}")
        last = kill_worker.newest(folder)
    return {"layouts": layouts, "longest": round(longest, 2), "last": last}


def main() -> None:
    folder, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ctypes.CDLL(None).prctl(fault_worker.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    killed, uninterrupted = folder / "killed", folder / "uninterrupted"
    killed.mkdir()
    result = run_interrupted(killed, rounds, random.Random(seed))
    rows = [row for run in kill_worker.rows(killed) for row in run]
    total = max(row["iteration"] for row in rows)
    uninterrupted.mkdir()
    options = [*SHAPE.split(), "--steps", str(total), "--out", str(uninterrupted)]
    options += ["--save-every", str(total)]  # a save takes longer than a step
    if fault_worker.all_gone(
        kill_worker.launch(uninterrupted, options, 1), time.monotonic() + 300
    ) != {0: 0}:
        raise RuntimeError(kill_worker.logs(uninterrupted))
    expected = {row["iteration"]: row["loss"] for row in kill_worker.rows(uninterrupted)[0]}
    differences = [abs(row["loss"] / expected[row["iteration"]] - 1) for row in rows]
    if not all(map(math.isfinite, differences)):
        raise RuntimeError(f"losses that are not finite: {rows}")
    result |= {"steps": total, "rows": len(rows), "largest_difference": max(differences)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
