"""All that a borrowed GPU should be used for, in order of worth; `scripts/gpu_day.sh` starts it.

    python benchmarks/gpu_day.py --out DIR [--rehearse] [--seconds 540] [--call 1]
                                 [--parts facts,nccl] [--tests 'cp or zb-v']

The parts are divided into calls of at most nine minutes: in call 1 a model is measured, before
anything is tested, in call 2 are the tests, in call 4 the rest. Call 3 is for what was red in the
first two: the command for it is printed. Every part is a process with a time limit of its own; one
that fails or is ended stops no other. A part that is asked for alone may take all of the time.
DIR/gpu-day.md and gpu-day.json are written anew when a part begins and when it ends: a kill loses
nothing. With --parts the results of other parts that are in DIR stay. DIR/gpu-day.log has all
output, DIR/calibration.toml the rates for plan.py and tune.py, DIR/machine.toml the planner's
constants by runs. What is printed last is what was asked beside what was seen, then why parts
failed, and the command that runs these again.
--rehearse does the same on a CPU with small shapes.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the project's own modules

from config.messages import Parser, UserError, exit_with

SECONDS = 540  # all parts together take at most this time
# A rehearsal is lent no machine, and takes several times as long on a CPU.
REHEARSAL_SECONDS, REHEARSAL_LIMITS = 3600, 4.0
LEAST_SECONDS = 5.0  # with less than that left, a part is not begun
# The first of gpu.MODELS, as gpu_models.py runs it.
TRAIN = {
    "cuda": "--model 1b3 --precision bf16 --micro-batch-size 4 --global-batch-size 32",
    "cpu": "--layers 2 --hidden 64 --heads 4 --seq-length 64 --vocab-size 512 --precision bf16 "
    "--micro-batch-size 2 --global-batch-size 16",
}
MOST_PRINTED = 9000  # characters on the parts that failed, of all of them


@dataclass(frozen=True)
class Part:
    """One part: its time limit in seconds where others are asked for too, its command, its call.

    A command that ends with None is given `--section FILE` there, for what it finds. Of pytest the
    counts are shown, of another one the end of its output.
    """

    name: str
    title: str
    limit: float
    command: tuple
    call: int = 1


@dataclass
class Outcome:
    """The outcome of a part."""

    part: Part
    status: str = "not reached"
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


def all_parts(out: Path, rehearse: bool, tests_with: str | None = None) -> list[Part]:
    """The parts in the order of their worth, call by call; tests_with: pytest's -k, for those that
    are tests.
    """
    device = ("--device", "cpu" if rehearse else "cuda")
    tests = ("-m", "pytest", "-vv", "-rfEs", "-m", "cuda", "-p", "no:cacheprovider")
    # A failure is printed at once, and the stacks of a test that hangs before its part is ended.
    tests += ("-p", "benchmarks.gpu_day", "-o", "faulthandler_timeout=100")
    tests += ("--durations=5",) + ("--rehearse-cuda",) * rehearse
    chosen = f"({tests_with}) and " if tests_with else ""
    cuda_tests = (*tests, *(("-k", tests_with) if tests_with else ()), "tests/test_cuda.py")
    two_ranks = (*tests, "-k", f"{chosen}not four-ranks", "tests/test_nccl.py")
    four_ranks = (*tests, "-k", f"{chosen}four-ranks", "tests/test_nccl.py")
    gpu, models = "benchmarks/gpu.py", ("benchmarks/gpu_models.py", *device)
    asked, to_out = ("benchmarks/gpu_asked.py", *device), ("--out", str(out))
    rates = ("--calibration", str(out / "calibration.toml"))
    runs = f"{tempfile.gettempdir()}/gpu-day-{os.getpid()}"  # a checkpoint of 16 GB is no result
    train = (*f"train.py {TRAIN[device[1]]} --steps 20".split(), *device, "--out")
    parts = [
        Part("facts", "The machine", 40, (gpu, "facts", *device, None)),
        Part("train", "train.py as it is", 90, (*train, f"{runs}-train")),
        Part("train-compile", "--compile", 110, (*train, f"{runs}-compile", "--compile")),
        Part("models", "Models", 230, (*models, None)),
        Part("profile", "Profile of a step", 70, (*models, "--profile", None)),
        Part("cuda", "CUDA tests", 200, cuda_tests, 2),
        Part("nccl", "NCCL tests of two ranks on one GPU", 340, two_ranks, 2),
        Part("ceilings", "Ceilings", 60, (gpu, "ceilings", *device, None), 4),
        Part("calibration", "Calibration", 40, (gpu, "calibration", *device, *rates, None), 4),
        Part("runs", "Runs for the planner", 120, (*asked, "runs", *to_out, None), 4),
        Part("asked", "Asked and seen", 60, (*asked, "asked", *to_out, None), 4),
        Part("nccl4", "NCCL tests of four ranks on one GPU", 190, four_ranks, 4),
    ]
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


def run(outcome: Outcome, out: Path, limit: float) -> None:
    """Run one part; its status, seconds, lines and data go into the outcome."""
    part, began = outcome.part, time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open(out / "gpu-day.log", "a+") as log:
        section = Path(folder, "section.json")
        command = [sys.executable, *(word for word in part.command if word is not None)]
        finds = part.command[-1] is None
        command += ["--section", str(section)] if finds else []
        log.write(f"\n==== {part.name}: {' '.join(command[1:])}\n")
        log.flush()
        start = log.tell()
        outcome.status = ended(command, log, began + limit, limit)
        outcome.seconds = time.monotonic() - began
        log.seek(start)
        text = log.read()
        if finds and section.exists():
            found = json.loads(section.read_text())
            outcome.lines, outcome.data = found["lines"], found["data"]
        elif "pytest" in part.command:
            outcome.lines, outcome.data = told_by_log(text)
    if outcome.status != "done" or not outcome.lines:
        outcome.lines += ["", "```", *text.splitlines()[-40:], "```"]


def ended(command: list[str], log: Any, until: float, limit: float) -> str:
    """Start a command, and return how it ended; at its limit all that it started is killed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        status = process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        kill_all(process.pid)
        process.wait()
        return f"over its limit of {limit:.0f} s, killed"
    return "done" if status == 0 else f"failed with status {status}"


def kill_all(pid: int) -> None:
    """Kill a process and all that it started, sessions of their own included."""
    try:
        parent = psutil.Process(pid)
        processes = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def told_by_log(text: str) -> tuple[list[str], dict[str, Any]]:
    """Return the counts, failures and reasons in pytest's lines, also if the run was killed."""
    ends = re.findall(r"^(tests/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", text, re.MULTILINE)
    counts = {kind: sum(found == kind for _, found in ends) for kind in ("PASSED", "SKIPPED")}
    bad = [name for name, found in ends if found in ("FAILED", "ERROR")]
    summary = re.findall(r"^((?:FAILED|ERROR|SKIPPED) .*)$", text, re.MULTILINE)
    slow = re.findall(r"^(\d+\.\d+s (?:call|setup) .*)$", text, re.MULTILINE)
    whole = re.search(r"^=+ .*\bin \d+\.\d+s.* =+$", text, re.MULTILINE) is not None
    lines = [
        f"{counts['PASSED']} passed, {len(bad)} failed, {counts['SKIPPED']} skipped"
        + ("." if whole else "; ended before the last test."),
        *(f"* FAILED {name}" for name in bad),
        *(f"* {line[:400]}" for line in summary if line.startswith(("SKIPPED", "ERROR"))),
        *(f"* {line}" for line in slow),
    ]
    data = {"passed": counts["PASSED"], "failed": bad, "skipped": counts["SKIPPED"]}
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
    for outcome in outcomes:
        if outcome.lines:
            lines += [f"## {outcome.part.title}", "", *outcome.lines, ""]
    parts = []
    for o in outcomes:
        found = {"status": o.status, "seconds": round(o.seconds, 1), "lines": o.lines}
        parts.append({"name": o.part.name, **found, "data": o.data})
    replace_file(
        out / "gpu-day.json", json.dumps({"title": title, "parts": parts}, indent=1) + "\n"
    )
    replace_file(out / "gpu-day.md", "\n".join(lines))


def red(outcome: Outcome, log: str, most: int) -> list[str]:
    """Why a part failed, in at most `most` characters: of pytest its lines of errors, each once,
    of another one the end of its output. log: of all parts.
    """
    output = log.partition(f"==== {outcome.part.name}: ")[2].partition("\n==== ")[0].splitlines()
    errors = [line for line in output if re.match("E  |error: |FAILED ", line)]
    shown = list(dict.fromkeys(errors)) if "pytest" in outcome.part.command else []
    text = "\n".join(line[:300] for line in shown or output[-30:] or outcome.lines)
    return [f"---- {outcome.part.name}: {outcome.status}", text[:most]]


def replace_file(path: Path, text: str) -> None:
    """Write a file under another name first."""
    draft = path.with_suffix(path.suffix + ".draft")
    draft.write_text(text)
    draft.replace(path)


def commit() -> str:
    """The commit that is measured, or that it is not known: a copy without .git."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown commit"
    return f"commit {done.stdout.strip()}" if done.returncode == 0 else "unknown commit"


def main() -> None:
    """Run the parts asked for; the status is 0 if every part was begun, whatever it found."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small shapes")
    parser.add_argument("--seconds", type=float, help=f"for all parts together; {SECONDS}")
    parser.add_argument("--call", type=int, help="the parts of that call: 1, 2 or 4")
    parser.add_argument("--parts", help="names of parts, with commas; default: all")
    parser.add_argument("--tests", help="of the parts that are tests: pytest's -k")
    o = parser.parse_args()
    out = Path(o.out).resolve()
    parts = all_parts(out, o.rehearse, o.tests)
    names = [part.name for part in parts]
    chosen = o.parts.split(",") if o.parts else None
    if o.call is not None:
        if chosen:
            raise UserError(f"--call {o.call} and --parts {o.parts}: give one of them")
        chosen = [part.name for part in parts if part.call == o.call]
        if not chosen:
            raise UserError(f"--call {o.call}: there are 1, 2 and 4; for 3 give --parts")
    unknown = [name for name in chosen or () if name not in names]
    if unknown:
        raise UserError(f"there is no part {unknown[0]!r}: {', '.join(names)}")
    if o.rehearse:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks and other programs share the cores
    kind = "Rehearsal of the GPU day on a CPU: no figure of it is a result" if o.rehearse else ""
    title = f"{kind or 'GPU day'}, {time.strftime('%Y-%m-%d %H:%M')}, {commit()}"
    seconds = o.seconds or (REHEARSAL_SECONDS if o.rehearse else SECONDS)
    outcomes = run_all(parts, out, seconds, title, chosen)
    tell(outcomes, out)
    sys.exit(any(outcome.status.startswith("not reached") for outcome in outcomes))


def tell(outcomes: list[Outcome], out: Path) -> None:
    """Print what was asked and seen, why parts failed, and how these are run again."""
    print(f"written: {out}/gpu-day.md, gpu-day.json, gpu-day.log")
    print(*(line for o in outcomes if o.part.name == "asked" for line in o.lines), sep="\n")
    failed = [o for o in outcomes if o.status != "done"]
    log = (out / "gpu-day.log").read_text()
    for outcome in failed:
        print(*red(outcome, log, MOST_PRINTED // len(failed)), sep="\n")
    if failed:
        names = ",".join(o.part.name for o in failed)
        print(f"again: bash scripts/gpu_day.sh --out {out} --parts {names}")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except UserError as mistake:
        exit_with(mistake)
