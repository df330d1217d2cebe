"""Writes a Slurm batch file for a layout: `plan.py layouts ... --sbatch FILE`.

    write("mine.slurm", question.machine, 16, 1.5, ["--model", "llama-2-7b", "--tp", "2"])

The file is scripts/train.slurm with other numbers and another command, so that what a job needs is
said in one place: binding, the signal before the time limit, the launcher by MPI, saving and
resuming. scripts/slurm_job.sh, which it reads, starts the ranks.
"""

import math
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from base import console
from base.cli import check_decoded
from base.errors import UserError
from base.paths import write_file
from costs.hardware import Machine

TEMPLATE = Path(__file__).resolve().parents[2] / "scripts" / "train.slurm"
SAVED_EVERY = 1800.0  # seconds between two checkpoints, about
# The signal comes at least so many seconds before the time limit: a save, and Slurm's own minute.
SIGNALLED = 600
STEPS_LEFT = 3  # and so many steps: the one that runs, an evaluation's, and a slow one
# By option of train.py, what the file has if the user does not give it: text for the shell.
DEFAULTS = {"--data": '"$DATA"', "--out": '"$OUT"', "--resume": "auto", "--keep-last": "3"}


def write(path: str, machine: Machine, gpus: int, seconds: float, words: Sequence[str]) -> None:
    """Write the batch file of a run. Raise UserError if the GPUs do not fill whole nodes.

    seconds: the longest that a step may take. words: train.py's, with what the user gave.
    """
    check_decoded("--sbatch", path)  # the file names itself
    nodes = math.ceil(gpus / machine.node)
    if gpus % nodes:
        raise UserError(
            f"--sbatch: {gpus} GPUs do not divide equally among {nodes} nodes, which have "
            f"{machine.node} each: give a multiple of {machine.node}"
        )
    tasks = gpus // nodes
    on_cpu = machine.device == "CPU"
    requests = {
        "job-name": shlex.quote(Path(path).stem),
        "nodes": nodes,
        "ntasks-per-node": tasks,
        "gpus-per-node": tasks,
        "signal": f"B:USR1@{max(SIGNALLED, math.ceil(STEPS_LEFT * seconds) + SIGNALLED // 2)}",
    }
    if on_cpu:
        requests["cpus-per-task"] = 1
    text = TEMPLATE.read_text()
    for name, value in requests.items():
        line = f"#SBATCH --{name}={value}".replace("\\", r"\\")  # no group of re.sub
        text = re.sub(rf"(?m)^#SBATCH --{name}=.*$", line, text)
    if on_cpu:
        text = re.sub(r"(?m)^#SBATCH --gpu.*\n", "", text)
    else:  # a run is rehearsed before its ranks are started
        text = text.replace("GPU=${GPU:-none}", f"GPU=${{GPU:-{shlex.quote(machine.name)}}}")
    words = list(words)
    out = f"runs/{Path(path).stem}"
    if "--out" in words:  # the logs are in this folder too
        at = words.index("--out")
        out = words[at + 1]
        del words[at : at + 2]
    text = text.replace("OUT=${OUT:-runs/train}", f"OUT=${{OUT:-{shlex.quote(out)}}}")
    text = text.replace("sbatch scripts/train.slurm", f"sbatch {shlex.quote(path)}")
    head, _, _ = text.partition("ranks train.py ")
    if console.IS_INSTALLED:
        head = outside_a_clone(head, str(console.ROOT), sys.executable)
    write_file(path, head + _command(words, seconds, "cpu" if on_cpu else "cuda"))


def outside_a_clone(head: str, root: str, python: str) -> str:
    """Return the file up to its command, so that it may be submitted in any folder.

    root: the folder of the installed package, with its programs. python: which has it.
    """
    in_clone = re.compile(r"(?m)^\[ -f scripts/slurm_job\.sh \].*\n")
    sources = f"TRINE_FOLDER={shlex.quote(root)}\nTRINE_PYTHON={shlex.quote(python)}\n"
    sources += 'source "$TRINE_FOLDER/scripts/slurm_job.sh"'
    head = in_clone.sub("", head).replace("source scripts/slurm_job.sh", sources)
    return console.as_typed(head.replace("submit it in the repository", "submit it"), True)


def _command(words: Sequence[str], seconds: float, device: str) -> str:
    """Return the last command of the file, in lines: `ranks train.py` with its options."""
    quoted = list(map(shlex.quote, words))
    every = max(1, round(SAVED_EVERY / seconds))
    added = DEFAULTS | {"--device": device, "--save-every": str(every)}
    if "--save-every-minutes" in words:
        del added["--save-every"]
    if "--train-samples" not in words:
        added["--steps"] = '"${STEPS:-1000}"'
    for option, text in added.items():
        if option not in words:
            quoted += [option, text]
    # One line for each option with its values.
    lines: list[str] = []
    for word in quoted:
        if word.startswith("--") or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return "ranks train.py " + " \\\n    ".join(lines) + "\n"
