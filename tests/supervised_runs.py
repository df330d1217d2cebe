"""Supervised runs with planned faults, for tests."""

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import leftovers
import psutil

SHAPE = "--layers 1 --hidden 16 --heads 2 --seq-length 16 --vocab-size 32 --global-batch-size 4"
HANG_LIMIT = 10  # seconds; beside other work a step may stall for three
WORDS = (
    f"{SHAPE} --device cpu --lr-schedule constant --save-every 1 --hang-timeout {HANG_LIMIT}"
).split()
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
STEPS = 12
NOWHERE = subprocess.DEVNULL


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


def curve(run: Path, difference: float = 0.0) -> dict[int, float]:
    """Losses by step, over all starts; steps that were repeated have the same one again, but for
    that relative difference.
    """
    losses: dict[int, float] = {}
    for path in run.glob("metrics.jsonl*"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            other = losses.setdefault(row["iteration"], row["loss"])
            assert math.isclose(other, row["loss"], rel_tol=difference), (row, other)
    return losses


def fault(name: str, rank: int, step: int) -> dict:
    return {"fault": name, "rank": rank, "step": step}


# ---- Slurm ---------------------------------------------------------------------------------------


BATCH = """#!/usr/bin/env bash
#SBATCH --ntasks-per-node=1 --requeue {options}
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source scripts/slurm_job.sh
LOGS={out}/logs
export PYTHONPATH=$PWD OMP_NUM_THREADS=1
{lines}
"""


def write_batch(path: Path, options: str, *lines: str) -> None:
    """Write a batch file as the repository's own, whose logs are beside it, with these last lines.

    `options`: of sbatch, with no `--ntasks-per-node` and no `--requeue`.
    """
    path.write_text(BATCH.format(out=path.parent, options=options, lines="\n".join(lines)))


def in_slurm(out: Path, options: list[str], *words: str) -> list[str]:
    """A supervised run on three nodes, a rank on each, with a pause of 0.1 s in every step."""
    job = ["salloc", "--quiet", "--no-kill", "--nodes=3", "--ntasks-per-node=1"]
    job += [sys.executable, "supervise.py", *options, "--"]
    job += ["srun", "--mpi=pmi2", "--kill-on-bad-exit=1"]
    job += [sys.executable, "tests/paced_worker.py", "0.1", *words, "--resume", "auto"]
    return [*job, "--out", str(out / "run")]


class LostNodes:
    """Nodes of this machine's own Slurm that are ended, and started again at the end."""

    def __init__(self):
        self.daemons: list[list[str]] = []

    def __enter__(self) -> "LostNodes":
        return self

    def __exit__(self, *exception) -> None:
        own = {name: value for name, value in os.environ.items() if name != leftovers.MARK}
        for command in self.daemons:  # which stay when the tests have ended
            subprocess.Popen(
                command, start_new_session=True, stdout=NOWHERE, stderr=NOWHERE, env=own
            )

    def end(self, name: str) -> None:
        """Kill a node: its daemon, its steps, and all that these have started."""
        doomed: set[psutil.Process] = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment, words = process.environ(), process.cmdline()
                if environment.get("SLURM_CONF") != os.environ["SLURM_CONF"]:
                    continue  # a daemon of another Slurm
                if words[-2:] == ["-N", name] and Path(words[0]).name == "slurmd":
                    self.daemons.append(words)
                    doomed.add(process)
                elif environment.get("SLURMD_NODENAME") == name:
                    steps = [p for p in process.parents() if p.name() == "slurmstepd"]
                    doomed |= {process, *steps}
        assert self.daemons, f"there is no {name}"
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def wait_for_idle(nodes: int) -> None:
    """Until so many nodes are idle."""
    words, limit = ["sinfo", "--noheader", "--states=idle", "--format=%D"], time.monotonic() + 60
    while subprocess.run(words, capture_output=True, text=True).stdout.strip() != str(nodes):
        assert time.monotonic() < limit, "the node does not come back"
        time.sleep(0.2)
