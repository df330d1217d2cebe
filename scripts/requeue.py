"""Requeues the Slurm job of a run that has ended, if the next start can continue it.

    python scripts/requeue.py STATUS BEGAN train.py ... --out OUT       (by scripts/slurm_job.sh)

STATUS: of srun; BEGAN: when srun was started, in seconds since 1970. One line says what was decided
and why:

    the job was cancelled, by scancel           not requeued, whatever STATUS is
    Slurm requeues it itself (a node is down)   nothing to do
    75: stopped early, everything is saved      requeued, also at the time limit or if preempted
    75 at the end of a stage of STAGES          the next stage's job is submitted (stages.py)
    a rank was lost: dead, hung or missing      requeued at most MOST_LOST times in a row without a
                                                new checkpoint
    what the supervisor has stopped             not requeued
    any other failure                           not requeued: it would fail again

The next element of a job array resumes by itself. A lost rank is known from OUT/hang, which the
watchdog's monitor writes; a user's mistake or an exception of the code is none.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path

# Python puts this script's folder on the path; the modules that it uses are in its parent.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config.command_line import parse
from config.messages import UserError
from scripts import stages
from supervisor.command import run_options
from supervisor.decisions import Action
from supervisor.journal import read_entries

STOPPED_EARLY = 75
LOST = {"dead", "hang", "missing"}  # kinds of a case of the monitor
MOST_LOST = 3


def decide(status: int, began: float, out: Path, job: str, restarts: int) -> tuple[bool, str]:
    """Whether to requeue, and the reason.

    job: what `scontrol show job` prints; restarts: of the job when this start began.
    """
    state, reason = _value("JobState", job), _value("Reason", job)
    # Then srun's status may also be 0, when the node of the batch file is down.
    if _value("Restarts", job) not in ("", str(restarts)):
        return False, "Slurm requeues the job itself"
    # Slurm shows the states CANCELLED, TIMEOUT and PREEMPTED as COMPLETING while processes run.
    preempted = _value("PreemptTime", job) not in ("", "None")
    if state != "RUNNING" and reason != "TimeLimit" and not preempted:
        return False, f"the job was cancelled (state {state}, reason {reason})"
    if status == 0:
        return False, "the run is finished"
    entries = [entry for entry in read_entries(out / "supervisor.jsonl") if entry.at >= began]
    decision = entries[-1].decision if entries else None
    if status == STOPPED_EARLY:
        elsewhere = decision and decision.action == Action.QUEUE
        return True, decision.reason if elsewhere else "stopped early, everything is saved"
    if decision and decision.action == Action.STOP:
        return False, f"the supervisor has stopped it: {decision.reason}"
    newest = _lost_rank(out / "hang", began)
    if newest is None:
        return False, f"status {status}, and no rank was lost according to {out}/hang"
    saved = max((path.stat().st_mtime for path in out.glob("checkpoints/step_*/*.json")), default=0)
    count = sum(_lost_rank(folder, saved) is not None for folder in out.glob("hang*"))
    text = f"a rank was lost ({newest}), {count} times since the newest checkpoint of {out}"
    return count <= MOST_LOST, f"{text}; at most {MOST_LOST}"


def next_stage(path: str | None, words: list[str], out: Path) -> str | None:
    """Submit the job of the next stage if the run with these options is at the end of one; what was
    done. path: of STAGES, if there are stages. UserError.
    """
    stop = parse(words).run.stop_at_samples if path else 0
    consumed = stages.consumed_samples(str(out))
    if not path or not stop or consumed < stop:
        return None
    return stages.submit(path, stages.read(path), consumed)


def _lost_rank(folder: Path, after: float) -> str | None:
    """The kind of the case in that folder if it is a lost rank's, and written after that time."""
    file = folder / "case.json"
    try:
        kind = json.loads(file.read_text())["kind"] if file.stat().st_mtime >= after else None
    except (OSError, ValueError, RecursionError):  # no case, or one that is cut short or hostile
        return None
    return kind if kind in LOST else None


def _value(name: str, job: str) -> str:
    """The value of NAME=VALUE, in the lines after that of the job's name, which may be anything."""
    found = re.search(rf"\s{name}=(\S*)", job.partition("\n")[2])
    return found[1] if found else ""


def main() -> None:
    """Decide, print the decision, requeue."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("status", type=int)
    parser.add_argument("began", type=float)
    given, words = parser.parse_known_args()
    job_id, restarts = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    if not job_id or not restarts.isdecimal():
        sys.exit(f"error: SLURM_JOB_ID is {job_id!r}, SLURM_RESTART_COUNT {restarts!r}: not a job")
    out = Path(run_options(words)["out"])
    shown = stages.run_slurm("scontrol", "show", "job", job_id)
    requeued, reason = decide(given.status, given.began, out, shown, int(restarts))
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if requeued and (submitted := next_stage(os.environ.get("STAGES"), words[1:], out)):
        print(f"job {job_id}: {submitted}", flush=True)
        if array:  # its next elements have the nodes of this stage
            stages.run_slurm("scancel", "--state=PENDING", array)
        return
    if requeued and array:
        requeued, reason = False, f"{reason}; the next element of the array resumes"
    print(f"job {job_id}: {'requeued' if requeued else 'not requeued'}: {reason}", flush=True)
    if requeued:
        stages.run_slurm("scontrol", "requeue", job_id)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: not requeued: {error}")
