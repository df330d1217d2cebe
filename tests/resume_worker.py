"""Kills a rank at a random moment and resumes under another layout, again and again.

    python tests/resume_worker.py FOLDER ROUNDS SEED

One rank is killed; the watchdog must end the others. The next round takes another number of ranks,
layout, micro-batch and ZeRO stage. At the end every row of every round is compared with a run that
was never interrupted, on one rank. Prints one JSON object; a broken promise ends it with an error.
"""

import ctypes
import json
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
    "--pad-vocab-multiple 4 --lr 1e-3 --lr-schedule constant --device cpu --save-every 2 "
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


def one_round(folder: Path, words: list[str], ranks: int, chance: random.Random) -> float:
    """Start, kill one rank at a random moment, wait for the end of all: seconds it took."""
    since = time.time_ns()
    ids = kill_worker.launch(folder, words, ranks)
    try:
        kill_worker.wait_for_first_row(folder / "metrics.jsonl", since, ids)
    except BaseException:
        for i in ids:  # a test that fails must not leave its ranks at work
            os.kill(i, signal.SIGKILL)
        raise
    time.sleep(chance.uniform(0.0, 1.5))
    began = time.monotonic()
    os.kill(ids[chance.randrange(ranks)], signal.SIGKILL)
    statuses = fault_worker.all_gone(ids, began + SECONDS_TO_END)
    seconds = time.monotonic() - began
    left = fault_worker.end_what_is_left()
    if left or len(statuses) < ranks or not all(statuses.values()):
        raise RuntimeError(f"{words}: ended with {statuses}, left {left}")
    return seconds


def interrupted(folder: Path, rounds: int, chance: random.Random) -> dict:
    """The rounds, each beginning where the newest checkpoint ends."""
    layouts, longest, last = [], 0.0, 0
    for _ in range(rounds):
        ranks, layout = chance.choice([one for one in LAYOUTS if one not in layouts[-1:]])
        options = f" --micro-batch-size {chance.choice((1, 2))} --zero {chance.choice((0, 1))}"
        words = [*SHAPE.split(), *layout.split(), *options.split(), "--out", str(folder)]
        words += ["--resume", "auto", "--steps", "1000000"]
        longest = max(longest, one_round(folder, words, ranks, chance))
        layouts.append((ranks, layout))
        first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
        if first["iteration"] != last + 1:
            raise RuntimeError(f"step {last} was complete; the run began at {first['iteration']}")
        last = kill_worker.newest(folder)
    return {"layouts": layouts, "longest": round(longest, 2), "last": last}


def main() -> None:
    folder, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ctypes.CDLL(None).prctl(fault_worker.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    killed, straight = folder / "killed", folder / "straight"
    killed.mkdir()
    result = interrupted(killed, rounds, random.Random(seed))
    rows = [row for run in kill_worker.rows(killed) for row in run]
    total = max(row["iteration"] for row in rows)
    straight.mkdir()
    words = [*SHAPE.split(), "--steps", str(total), "--out", str(straight)]
    if fault_worker.all_gone(kill_worker.launch(straight, words, 1), time.monotonic() + 300) != {
        0: 0
    }:
        raise RuntimeError(kill_worker.logs(straight))
    expected = {row["iteration"]: row["loss"] for row in kill_worker.rows(straight)[0]}
    furthest = max(abs(row["loss"] / expected[row["iteration"]] - 1) for row in rows)
    result |= {"rounds": rounds, "steps": total, "rows": len(rows), "furthest": furthest}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
