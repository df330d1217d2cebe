"""All that a borrowed GPU should be used for, in order of worth; `scripts/gpu_day.sh` starts it.

    python benchmarks/gpu/gpu_day.py --out DIR [--rehearse] [--seconds 540] [--first | --second]
                                 [--parts facts,nccl] [--tests 'cp or zb-v']

A model is measured before anything is tested. Every part is a process with a time limit of its own;
one that fails or is ended stops no other. A part that is asked for alone may take all of the time.
DIR/gpu-day.md and gpu-day.json are written anew when a part begins and when it ends: a kill loses
nothing. --first and --second are two calls of ten minutes each (SETS).
With --parts the results of other parts that are in DIR stay. DIR/gpu-day.log has all
output, DIR/calibration.toml the rates for plan.py and tune.py, DIR/machine.toml the planner's
constants by runs. What is printed last is what was asked beside what was seen, then why parts
failed, and the command that runs these again.
--rehearse does the same on a CPU with small shapes.
"""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # also as a plugin of pytest

import psutil

from base.cli import Parser
from base.errors import UserError, exit_with
from benchmarks.results_file import commit
from tools.checker.cluster import known_model

REHEARSAL_LIMITS = 4.0  # a CPU takes several times as long
LEAST_SECONDS = 5.0  # with less than that left, a part is not begun
# Options of train.py by model. `gpt` is the first of gpu.MODELS, as gpu_models.py runs it, and
# `experts` are four of the 16 blocks of OLMoE.
SMALL = "--layers 2 --hidden 64 --heads 4 --seq-length 64 --vocab-size 512 "
SMALL += "--micro-batch-size 2 --global-batch-size 16"
TRAIN = {
    "cuda": {
        "muon": "--model llama-3.2-1b --micro-batch-size 2 --global-batch-size 16 --optimizer muon",
        "windows": "--model gpt-oss-20b --layers 4 --micro-batch-size 1 --global-batch-size 4 "
        "--reset-attention --eod-token 0",
        "known": "--model gpt2-124m --micro-batch-size 16 --global-batch-size 64 --seed 1",
        "gpt": " ".join(known_model("cuda", 1)),  # as check.py --cluster trains it on several GPUs
        "llama": "--model llama-3.2-1b --micro-batch-size 2 --global-batch-size 16",
        "experts": "--model olmoe-1b-7b --layers 4 --micro-batch-size 2 --global-batch-size 16",
    },
    "cpu": {
        "muon": f"{SMALL} --optimizer muon",
        "windows": f"{SMALL} --positions rotary --set window=16 window_blocks=1:1 sinks=true "
        "--reset-attention --eod-token 0",
        "known": SMALL,
        "gpt": "--layers 2 --hidden 64 --heads 4 --seq-length 64 --vocab-size 512 "
        "--micro-batch-size 2 --global-batch-size 16",
        "llama": "--layers 2 --hidden 64 --heads 4 --kv-heads 2 --seq-length 64 --vocab-size 512 "
        "--positions rotary --norm rmsnorm --activation swiglu --no-bias --micro-batch-size 2 "
        "--global-batch-size 16",
        "experts": "--layers 2 --hidden 64 --heads 4 --seq-length 64 --vocab-size 512 --experts 8 "
        "--experts-per-token 2 --no-bias --micro-batch-size 2 --global-batch-size 16",
    },
}
# Two calls of ten minutes: first whether new code is right over NCCL, and its launches; then
# figures of what only a GPU has. The limits of a set add up to less than CALL.
CALL = 580.0
SETS = {
    "first": ["facts", "groups", "nccl", "experts"],
    "second": [
        *("train", "train-compile", "muon", "muon-fp32"),
        *("windows", "windows-compile", "known"),
    ],
}
MOST_PRINTED = 3000  # characters on a part that failed


@dataclass(frozen=True)
class Part:
    """One part: its time limit in seconds where others are asked for too, and its command.

    finds: the command is given `--section FILE` for its findings. Of pytest the counts are shown,
    of another one the end of its output.
    """

    name: str
    title: str
    limit: float
    command: tuple
    finds: bool = False


@dataclass
class Outcome:
    """The outcome of a part."""

    part: Part
    status: str = "not reached"
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


def all_parts(out: Path, rehearse: bool, tests_with: str | None = None) -> list[Part]:
    """The parts in the order of their worth; tests_with: pytest's -k, for those that are tests."""
    device = ("--device", "cpu" if rehearse else "cuda")
    # A failure is printed at once, and the stacks of a test that hangs before its part is ended.
    tests = ("-m", "pytest", "-vv", "-rfEs", "-m", "cuda", "-p", "no:cacheprovider")
    tests += ("-p", "benchmarks.gpu.gpu_day", "-o", "faulthandler_timeout=100")
    tests += ("--durations=5",) + ("--rehearse-cuda",) * rehearse
    chosen = f"({tests_with}) and " if tests_with else ""
    two_ranks = (*tests, "-k", f"{chosen}not four-ranks", "tests/test_nccl.py")
    four_ranks = (*tests, "-k", f"{chosen}four-ranks", "tests/test_nccl.py")
    if tests_with:
        tests += ("-k", tests_with)
    gpu, models = "benchmarks/gpu/gpu.py", ("benchmarks/gpu/gpu_models.py", *device)
    asked = ("benchmarks/gpu/gpu_asked.py", *device, "--out", str(out))
    rates = ("--calibration", str(out / "calibration.toml"))
    runs = f"{tempfile.gettempdir()}/gpu-day-{os.getpid()}"  # a checkpoint of 16 GB is no result

    def train(model: str, *more: str) -> tuple:
        words = f"train.py {TRAIN[device[1]][model]} --precision bf16 --steps 20"
        return (*words.split(), *device, *more, "--out", f"{runs}-{model}{''.join(more)}")

    figures = [
        Part("facts", "The machine", 40, (gpu, "facts", *device), True),
        Part("train", "train.py as it is", 90, train("gpt")),
        Part("train-compile", "--compile", 110, train("gpt", "--compile")),
        Part("llama", "Llama 3.2 1B", 90, train("llama")),
        Part("llama-compile", "Llama 3.2 1B, --compile", 110, train("llama", "--compile")),
        Part("experts", "Experts", 90, train("experts")),
        Part("models", "Models", 230, models, True),
        Part("profile", "Profile of a step", 70, (*models, "--profile"), True),
    ]
    right = [
        Part("cuda", "CUDA tests", 200, (*tests, "tests/test_cuda.py")),
        Part("nccl", "NCCL tests of two ranks on one GPU", 340, two_ranks),
    ]
    others = [
        Part("groups", "Memory of communicators", 60, (gpu, "groups", *device), True),
        Part("muon", "Llama 3.2 1B, Muon in bf16", 60, train("muon", "--set", "muon_dtype=bf16")),
        Part("muon-fp32", "Muon in fp32", 60, train("muon", "--set", "muon_dtype=master")),
        Part("windows", "Windows, sinks, documents", 70, train("windows")),
        Part("windows-compile", "The same, --compile", 100, train("windows", "--compile")),
        Part("known", "GPT-2 124M", 80, train("known", "--compile")),
        Part("ceilings", "Ceilings", 60, (gpu, "ceilings", *device), True),
        Part("calibration", "Calibration", 40, (gpu, "calibration", *device, *rates), True),
        Part("runs", "Runs for the planner", 120, (*asked, "runs"), True),
        Part("asked", "Asked and seen", 60, (*asked, "asked"), True),
        Part("nccl4", "NCCL tests of four ranks on one GPU", 190, four_ranks),
    ]
    parts = figures + right + others
    if rehearse:
        parts = [replace(part, limit=part.limit * REHEARSAL_LIMITS) for part in parts]
    return parts


# ---- Running -------------------------------------------------------------------------------------


def run_all(
    parts: list[Part], out: Path, seconds: float, title: str, chosen: list[str] | None = None
) -> list[Outcome]:
    """Run the parts of the chosen names, default all, one after the other within `seconds`. The
    files in `out` are always whole, and keep what an earlier start found of the other parts.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu-day.log").write_text("")
    to_run = [Outcome(part) for part in parts if chosen is None or part.name in chosen]
    kept = [] if chosen is None else earlier(out / "gpu-day.json", parts)
    kept = [outcome for outcome in kept if outcome.part.name not in (chosen or ())]
    outcomes = sorted(to_run + kept, key=lambda outcome: parts.index(outcome.part))
    until = time.monotonic() + seconds
    for outcome in to_run:
        left = until - time.monotonic()
        if left < LEAST_SECONDS:
            outcome.status = f"not reached: {max(left, 0):.0f} of {seconds:.0f} s left"
            continue
        outcome.status = "running"
        write(outcomes, out, title)
        avoid_what_failed(outcomes)
        limit = min(outcome.part.limit, left) if len(to_run) > 1 else left
        run(outcome, out, limit)
        print(f"{outcome.part.name}: {outcome.status}, {outcome.seconds:.0f} s", flush=True)
    write(outcomes, out, title)
    return outcomes


def avoid_what_failed(outcomes: list[Outcome]) -> None:
    """Have the parts to come run without what the part `facts` has tried in vain."""
    if any(outcome.data.get("expandable_segments") is False for outcome in outcomes):
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:False")


def earlier(path: Path, parts: list[Part]) -> list[Outcome]:
    """Return the outcomes of these parts in an earlier start."""
    rows = json.loads(path.read_text())["parts"] if path.exists() else []
    found = {row.pop("name"): row for row in rows}
    return [Outcome(part, **found[part.name]) for part in parts if part.name in found]


def run_limited(command: list[str], seconds: float, **options: Any) -> int | None:
    """The program's status; None if it was killed, with all its children, sessions of their own
    included. options: of subprocess.Popen.
    """
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True} | options
    program = subprocess.Popen(command, **options)
    try:
        return program.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        started = psutil.Process(program.pid)
        for process in [*started.children(recursive=True), started]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        program.wait()
        return None


def run(outcome: Outcome, out: Path, limit: float) -> None:
    """Run one part; its status, seconds, lines and data go into the outcome."""
    part = outcome.part
    command = [sys.executable, *part.command]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as folder, open(out / "gpu-day.log", "a+") as log:
        section = Path(folder, "section.json")
        if part.finds:
            command += ["--section", str(section)]
        log.write(f"\n==== {part.name}: {' '.join(command[1:])}\n")
        log.flush()
        start = log.tell()
        began = time.monotonic()
        streams = {"stdout": log, "stderr": subprocess.STDOUT}
        status = run_limited(command, limit, cwd=ROOT, env=environment, **streams)
        outcome.seconds = round(time.monotonic() - began, 1)
        log.seek(start)
        text = log.read()
        if section.exists():
            found = json.loads(section.read_text())
            outcome.lines = found["lines"]
            outcome.data = found["data"]
        elif "pytest" in part.command:
            outcome.lines, outcome.data = told_by_log(text)
    outcome.status = "done" if status == 0 else f"failed with status {status}"
    if status is None:
        outcome.status = f"over its limit of {limit:.0f} s, killed"
    if status != 0 or not outcome.lines:
        outcome.lines += ["", "```", *text.splitlines()[-40:], "```"]


def told_by_log(text: str) -> tuple[list[str], dict[str, Any]]:
    """Return the counts, failures and reasons in pytest's lines, also if the run was killed."""
    ends = re.findall(r"^(tests/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", text, re.MULTILINE)
    kinds = Counter(kind for _, kind in ends)
    bad = [name for name, kind in ends if kind in ("FAILED", "ERROR")]
    whole = re.search(r"^=+ .*\bin \d+\.\d+s.* =+$", text, re.MULTILINE) is not None
    end = "." if whole else "; ended before the last test."
    lines = [f"{kinds['PASSED']} passed, {len(bad)} failed, {kinds['SKIPPED']} skipped{end}"]
    lines += [f"* FAILED {name}" for name in bad]
    # Each reason once, skipped tests and the slowest ones.
    shown = re.findall(r"^(?:E  |ERROR |SKIPPED |\d+\.\d+s call ).*$", text, re.MULTILINE)
    lines += [f"* {line[:300]}" for line in dict.fromkeys(shown)]
    data = {"passed": kinds["PASSED"], "failed": bad, "skipped": kinds["SKIPPED"]}
    return lines, data | {"finished": whole}


def pytest_runtest_logreport(report: Any) -> None:
    """Print why a test failed as soon as it has failed. This file is a plugin of pytest for that.

    pytest itself prints the reasons after the last test, and a run that is killed prints none.
    """
    if report.failed:
        print(f"\n{report.longreprtext}\n{report.capstdout}{report.capstderr}", flush=True)


# ---- The results ---------------------------------------------------------------------------------


def write(outcomes: list[Outcome], out: Path, title: str) -> None:
    """Write both results files; each is replaced at once, so that none is ever half written."""
    lines = [f"# {title}", "", "| part | outcome | seconds | limit |", "| --- | --- | --: | --: |"]
    lines += [
        f"| {o.part.title} | {o.status} | {o.seconds:.0f} | {o.part.limit:.0f} |" for o in outcomes
    ]
    missed = [o.part.name for o in outcomes if o.status != "done"]
    lines += ["", f"Not done: {', '.join(missed) or 'nothing'}.", ""]
    parts = []
    for outcome in outcomes:
        if outcome.lines:
            lines += [f"## {outcome.part.title}", "", *outcome.lines, ""]
        parts.append({"name": outcome.part.name} | vars(outcome))
        parts[-1].pop("part")
    replace_file(
        out / "gpu-day.json", json.dumps({"title": title, "parts": parts}, indent=1) + "\n"
    )
    replace_file(out / "gpu-day.md", "\n".join(lines))


def replace_file(path: Path, text: str) -> None:
    """Write a file under another name first."""
    draft = path.with_suffix(path.suffix + ".draft")
    draft.write_text(text)
    draft.replace(path)


def main() -> None:
    """Run the parts asked for; the status is 0 if every part was begun, whatever it found."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small shapes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for all parts together")
    chosen_parts = parser.add_mutually_exclusive_group()
    chosen_parts.add_argument("--parts", help="names of parts, with commas; default: all")
    for name, names in SETS.items():
        chosen_parts.add_argument(
            f"--{name}", action="store_const", dest="parts", const=",".join(names), help="a call"
        )
    parser.add_argument("--tests", help="of the parts that are tests: pytest's -k")
    o = parser.parse_args()
    out = Path(o.out).resolve()
    parts = all_parts(out, o.rehearse, o.tests)
    names = [part.name for part in parts]
    chosen = o.parts.split(",") if o.parts else None
    unknown = [name for name in chosen or () if name not in names]
    if unknown:
        raise UserError(f"there is no part {unknown[0]!r}: {', '.join(names)}")
    if o.rehearse:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks and other programs share the cores
    kind = "Rehearsal of the GPU day on a CPU: no figure of it is a result" if o.rehearse else ""
    title = f"{kind or 'GPU day'}, {time.strftime('%Y-%m-%d %H:%M')}, commit {commit()}"
    outcomes = run_all(parts, out, o.seconds, title, chosen)
    tell(outcomes, out)
    sys.exit(any(outcome.status.startswith("not reached") for outcome in outcomes))


def tell(outcomes: list[Outcome], out: Path) -> None:
    """Print what was asked and seen, why parts failed, and how these are run again."""
    print(f"written: {out}/gpu-day.md, gpu-day.json, gpu-day.log")
    print(*(line for o in outcomes if o.part.name == "asked" for line in o.lines), sep="\n")
    failed = [o for o in outcomes if o.status != "done"]
    for outcome in failed:
        print(f"---- {outcome.part.name}: {outcome.status}")
        text = "\n".join(outcome.lines)  # pytest's begin with the reasons
        print(text[:MOST_PRINTED] if "pytest" in outcome.part.command else text[-MOST_PRINTED:])
    if failed:
        names = ",".join(o.part.name for o in failed)
        print(f"again: bash scripts/gpu_day.sh --out {out} --parts {names}")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except UserError as mistake:
        exit_with(mistake)
