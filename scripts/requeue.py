"""Requeues the Slurm job of a run that has ended, if the next start can continue it.

    python scripts/requeue.py STATUS train.py ... --out OUT       (by scripts/slurm_job.sh)

STATUS: of the supervisor. One line says what was decided and why:

    the job was cancelled, by scancel           not requeued, whatever STATUS is
    Slurm requeues it itself (a node is down)   nothing to do
    75: stopped early, everything is saved      requeued, also at the time limit or if preempted
    75 at the end of a segment of SEGMENTS      the next one's job is submitted (growing_jobs.py)
    a rank was lost: dead, hung or missing      requeued at most MOST_LOST times in a row without a
                                                new checkpoint
    what the supervisor has stopped             not requeued
    any other failure                           not requeued: it would fail again

The next element of a job array resumes by itself. A lost rank is known from OUT/supervisor.jsonl,
each row of which has the job and the number of its start. No time is compared, because the clocks
of nodes and of a file server differ. A user's mistake or an exception of the code is none.
"""

import argparse
import os
import re
import sys
from pathlib import Path

# Python puts this script's folder on the path; the modules that it uses are in its parent.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from base import errors

if __name__ == "__main__":
    errors.begin_program()

from base.errors import UserError
from config.command_line import parse
from scripts import growing_jobs
from tools.supervisor.command import run_options
from tools.supervisor.decisions import SupervisorAction, read_entries
from tools.supervisor.evidence import LOST

STOPPED_EARLY = 75
MOST_LOST = 3


def decide(status: int, out: Path, job: str, job_id: str, restarts: int) -> tuple[bool, str]:
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
    entries = read_entries(out / "supervisor.jsonl")
    own = [entry for entry in entries if entry.job == f"{job_id}.{restarts}"]
    decision, found = (own[-1].decision, own[-1].evidence) if own else (None, None)
    if status == STOPPED_EARLY:
        elsewhere = decision and decision.action == SupervisorAction.QUEUE
        return True, decision.reason if elsewhere else "stopped early, everything is saved"
    if decision and decision.action == SupervisorAction.STOP:
        return False, f"the supervisor has stopped it: {decision.reason}"
    if not found or found.kind not in LOST:
        return False, f"status {status}, and no rank was lost according to {out}/supervisor.jsonl"
    same = [entry for entry in entries if entry.evidence.newest == found.newest]
    count = sum(entry.evidence.kind in LOST for entry in same)
    text = f"a rank was lost ({found.kind}), {count} times since the newest checkpoint of {out}"
    return count <= MOST_LOST, f"{text}; at most {MOST_LOST}"


def next_segment(path: str | None, words: list[str], out: Path) -> str | None:
    """Submit the job of the next segment if the run with these options is at the end of one; what
    was done. path: of SEGMENTS, if there are segments. UserError.
    """
    stop = parse(words).run.stop_at_samples if path else 0
    consumed = growing_jobs.consumed_samples(str(out))
    if not path or not stop or consumed < stop:
        return None
    return growing_jobs.submit(path, growing_jobs.read(path), consumed)


def _value(name: str, job: str) -> str:
    """The value of NAME=VALUE, in the lines after that of the job's name, which may be anything."""
    found = re.search(rf"\s{name}=(\S*)", job.partition("\n")[2])
    return found[1] if found else ""


def main() -> None:
    """Decide, print the decision, requeue."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("status", type=int)
    given, words = parser.parse_known_args()
    job_id, restarts = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    if not job_id or not restarts.isdecimal():
        sys.exit(f"error: SLURM_JOB_ID is {job_id!r}, SLURM_RESTART_COUNT {restarts!r}: not a job")
    out = Path(run_options(words)["out"])
    shown = growing_jobs.run_slurm("scontrol", "show", "job", job_id)
    requeued, reason = decide(given.status, out, shown, job_id, int(restarts))
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if requeued and (submitted := next_segment(os.environ.get("SEGMENTS"), words[1:], out)):
        print(f"job {job_id}: {submitted}", flush=True)
        if array:  # its next elements have the nodes of this segment
            growing_jobs.run_slurm("scancel", "--state=PENDING", array)
        return
    if requeued and array:
        requeued, reason = False, f"{reason}; the next element of the array resumes"
    print(f"job {job_id}: {'requeued' if requeued else 'not requeued'}: {reason}", flush=True)
    if requeued:
        growing_jobs.run_slurm("scontrol", "requeue", job_id)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: not requeued: {error}")
