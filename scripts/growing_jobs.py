"""The segments of a run that grows with its batch: which one is next, its options, its job.

    python scripts/growing_jobs.py submit SEGMENTS                  by plan.py rampup --submit
    python scripts/growing_jobs.py words SEGMENTS train.py ...      by scripts/slurm_job.sh
    python scripts/growing_jobs.py next SEGMENTS train.py ...       by scripts/requeue.py

SEGMENTS is what `plan.py rampup --nodes-by-batch ... --jobs SEGMENTS` wrote. The segment is that of
the samples that the newest checkpoint of the run's --out has consumed. `words` prints the options
of the segment, which replace those of the batch file; `submit` and `next` start its job by sbatch,
with the segment's --nodes and SEGMENTS in the environment, `submit` from the first sample.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Python puts this script's folder on the path; the modules that it uses are in its parent.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from base import errors

if __name__ == "__main__":
    errors.begin_program()

from base.errors import FileError, UserError
from base.regular_files import read_regular
from checkpointing import folders
from checkpointing.index import Index
from config import validation
from config.command_line import parse
from config.timeline import Timeline

# Options that sbatch may not be given, since the segment sets them; long and short.
OURS = ("--nodes", "-N", "--ntasks", "-n", "--export")
SECONDS_TO_ASK_AGAIN = (1, 2, 4, 0)  # Slurm; after a time limit there are 30 s (KillWait)


def read(path: str) -> dict[str, Any]:
    """The file that plan.py wrote; UserError if it is not one."""
    try:
        tree = json.loads(read_regular(path))
        if "stages" in tree:  # of version 0.3 or earlier
            tree["segments"] = tree.pop("stages")
        if not {"segments", "model", "batches", "sbatch"} <= set(tree):
            raise ValueError("keys are missing")
    except (OSError, ValueError, TypeError) as error:
        text = f"is not what `plan.py rampup --jobs` writes: {error}"
        raise UserError(f"SEGMENTS {path} {text}") from None
    return tree


def segment_after(segments: list[dict[str, Any]], consumed: int) -> dict[str, Any]:
    """The segment in which a run trains after so many samples."""
    return [segment for segment in segments if segment["begin_at_samples"] <= consumed][-1]


def consumed_samples(out: str) -> int:
    """Return the samples of the newest checkpoint of a run that can be read; 0 without one."""
    for folder in folders.list_checkpoints(os.path.join(out, "checkpoints")):
        try:
            with Index(folder) as index:
                return int(index.attributes("progress")["consumed_samples"])
        except (UserError, KeyError):  # train.py skips it too, and says so
            continue
    return 0


def words_of(tree: dict[str, Any], run: list[str], nodes: int, tasks: int) -> list[str]:
    """The segment's options for a job of `nodes`, of so many `tasks` each; UserError if the batch
    file's options in `run` are not those of the plan, or the nodes not those of the segment.
    """
    consumed = consumed_samples(parse(run).run.out)
    segment = segment_after(tree["segments"], consumed)
    if (nodes, nodes * tasks) != (segment["nodes"], segment["gpus"]):
        raise UserError(
            f"after {consumed} samples the segment has {segment['nodes']} nodes and "
            f"{segment['gpus']} ranks, but this job has {nodes} nodes of {tasks}: `python "
            f"scripts/growing_jobs.py next SEGMENTS train.py ...` submits the job of the segment"
        )
    config = validation.check(parse([*run, *segment["words"]]), segment["gpus"])
    sides = {"model": (tree["model"], dataclasses.asdict(config.model))}
    sides["batches"] = (tree["batches"], [list(start) for start in Timeline(config).batches.starts])
    planned, given = segment["layout"], dataclasses.asdict(config.layout)
    sides |= {name: (planned[name], given[name]) for name in planned}
    for name, (plan, batch_file) in sides.items():
        if plan != batch_file and (plan or batch_file):  # False is as None, not given
            shown = f"{plan} of the plan and {batch_file} of the batch file"
            raise UserError(
                f"{name.replace('_', '-')} differs: {shown}; plan with the same options"
            )
    return segment["words"]


def submit(path: str, tree: dict[str, Any], consumed: int) -> str:
    """Submit the job of the segment after so many samples; what was done. UserError if it fails."""
    sbatch = tree["sbatch"]
    if not sbatch:
        raise UserError(
            f"the file of SEGMENTS, {path}, names no batch file: plan.py rampup --submit writes one"
        )
    for word in sbatch:
        if word.split("=")[0] in OURS or (word[:2] in OURS and word[:2] != "--"):
            raise UserError(f"--submit: leave out {word}, which the segments give to sbatch")
    segment, env = segment_after(tree["segments"], consumed), dict(os.environ)
    nodes = segment["nodes"] + number("SPARE_NODES", "0")
    # Slurm's variables of this job, such as its number of restarts, are not those of the next.
    env = {k: v for k, v in env.items() if k == "SLURM_CONF" or not k.startswith("SLURM")}
    env["SEGMENTS"] = os.path.abspath(path)
    command = ["sbatch", "--parsable", "--export=ALL", f"--nodes={nodes}", *sbatch]
    job = run_slurm(*command, env=env).strip().partition(";")[0]
    return f"submitted job {job}: {nodes} nodes, after {consumed} samples"


def number(name: str, default: str = "") -> int:
    """An environment variable that is a whole number; UserError if it is none."""
    text = os.environ.get(name) or default
    if not text.isdecimal():
        raise UserError(f"{name} is {text!r}, not a whole number")
    return int(text)


def run_slurm(*words: str, env: dict[str, str] | None = None) -> str:
    """Return what a command of Slurm prints; it is started again, since the controller may be busy.
    UserError.
    """
    for pause in SECONDS_TO_ASK_AGAIN:
        try:
            done = subprocess.run(words, env=env, capture_output=True, text=True)
        except OSError as error:
            raise FileError(f"{words[0]}: {error.strerror}") from None
        if done.returncode == 0:
            return done.stdout
        time.sleep(pause)
    raise UserError(f"{' '.join(words)}: {done.stderr.strip()}")


def main(arguments: list[str]) -> None:
    """See above; a mistake is one sentence and exit status 2."""
    if len(arguments) < 2 or arguments[0] not in ("submit", "words", "next"):
        raise UserError("usage: growing_jobs.py submit|words|next SEGMENTS [train.py ARGUMENTS...]")
    what, path, run = arguments[0], arguments[1], arguments[3:]
    tree = read(path)
    if what == "submit":
        print(submit(path, tree, 0))
    elif what == "next":
        print(submit(path, tree, consumed_samples(parse(run).run.out)))
    else:
        nodes = number("SLURM_JOB_NUM_NODES") - number("SPARE_NODES", "0")
        print(*words_of(tree, run, nodes, number("SLURM_NTASKS_PER_NODE")))


if __name__ == "__main__":
    with errors.sentences():
        main(sys.argv[1:])
