"""Supervised runs with planned faults, for tests and benchmarks/supervise_faults.py."""

import json
import sys
from pathlib import Path

SHAPE = "--layers 1 --hidden 16 --heads 2 --seq-length 16 --vocab-size 32 --global-batch-size 4"
WORDS = f"{SHAPE} --device cpu --lr-schedule constant --save-every 1 --hang-timeout 2".split()
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
STEPS = 12


def supervised(out: Path, plan, launcher: list[str], *words: str, options=()) -> list[str]:
    """The command of a supervised run with these faults; its files are in `out`/run."""
    out.mkdir(exist_ok=True)
    (out / "plan.json").write_text(json.dumps(plan))
    program = [sys.executable, "tests/supervised_worker.py", str(out / "plan.json")]
    run = [*WORDS, "--steps", str(STEPS), "--out", str(out / "run"), "--resume", "auto", *words]
    return [sys.executable, "supervise.py", *options, "--", *launcher, *program, *run]


def decisions(out: Path) -> list[dict]:
    """The lines of supervisor.jsonl."""
    return [json.loads(x) for x in (out / "run" / "supervisor.jsonl").read_text().splitlines()]


def actions(out: Path) -> list[tuple[str, str]]:
    """Kind of the evidence and action of every decision."""
    return [(row["evidence"]["kind"], row["action"]) for row in decisions(out)]


def curve(run: Path) -> dict[int, float]:
    """Losses by step, over all starts; steps that were repeated have the same one again."""
    losses: dict[int, float] = {}
    for path in run.glob("metrics.jsonl*"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            assert losses.setdefault(row["iteration"], row["loss"]) == row["loss"], row
    return losses


def fault(name: str, rank: int, step: int) -> dict:
    return {"fault": name, "rank": rank, "step": step}
