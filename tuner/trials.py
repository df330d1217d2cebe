"""One trial: train.py on its own ranks for a few steps, under a time limit; and where it is kept.

    trial = run(candidate, Runner(launch="mpirun -n {ranks}", folder="runs/tune"))
    Store("runs/tune/trials.jsonl").add(trial)

Whatever happens is a result with its reason: ok, rejected by train.py itself, out of memory, hang
(over the limit), crash, divergence. When `run` returns, none of its processes is left here.
"""

import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from config.messages import UserError
from tuner import search_space

PROGRAM = str(Path(__file__).resolve().parent.parent / "train.py")
WARM_UP = 2  # steps that are not counted: allocators, kernels and connections warm up
MARK = "TRINE_TRIAL"  # set for every process of a trial, so that none can hide
SECONDS_TO_OBEY = 5.0  # between asking a trial to end and killing it

# What a program out of memory says: torch on GPUs and CPUs, Python, C++, the C library, launchers.
OUT_OF_MEMORY = (
    "out of memory",
    "OutOfMemoryError",
    "can't allocate memory",
    "Cannot allocate memory",
    "MemoryError",
    "bad_alloc",
    "oom-kill",
    "oom_kill",
)


@dataclass(frozen=True)
class Trial:
    """What one run gave. Seconds are of the timed steps; bytes are of each stage's fullest rank."""

    key: str
    label: str
    ranks: int
    status: str  # ok, rejected, oom, hang, crash, diverged
    reason: str  # empty if ok
    seconds: list[float]
    predicted: float
    config: dict[str, Any]  # groups of options, as in run.json
    peak_memory: list[float] = field(default_factory=list)
    tflops_model: float = 0.0  # per rank, at the median
    tflops_hardware: float = 0.0
    tokens_per_second: float = 0.0
    loss: float | None = None
    formula: str = ""
    cluster: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    command: str = ""
    started: str = ""
    wall: float = 0.0  # seconds of the whole trial, start-up included
    tag: str = ""  # which part of a search asked for it: reference, sweep, ...

    @property
    def median(self) -> float:
        """Seconds per iteration; raises StatisticsError if nothing was timed."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Slowest less fastest timed step, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


@dataclass(frozen=True)
class Runner:
    """How trials are run: launcher, steps, limits, and the folder that holds them."""

    launch: str  # `{ranks}` stands for their number
    folder: Path
    timed: int = 3
    limit: float = 600.0  # seconds
    program: str = PROGRAM

    def command(self, candidate: search_space.Candidate, out: Path) -> list[str]:
        """The whole command line of a trial that writes into `out`."""
        return [
            *self.start(candidate.ranks),
            *search_space.words(self.shortened(candidate.config, out)),
        ]

    def start(self, ranks: int) -> list[str]:
        """Launcher, interpreter and program; UserError if the launcher has no place for ranks."""
        if "{ranks}" not in self.launch:
            raise UserError(
                f"--launch {self.launch!r} has no {{ranks}}, as in 'mpirun -n {{ranks}}'"
            )
        words = shlex.split(self.launch.replace("{ranks}", str(ranks)))
        return [*words, *([] if _starts_python(words) else [sys.executable]), self.program]

    def shortened(self, config, out: Path):
        """The run that measures `config`: a few steps, nothing saved or evaluated."""
        steps = WARM_UP + self.timed
        training = replace(config.training, **(search_space.FULL_BATCH | {"steps": steps}))
        data = replace(config.data, eval_every=0, eval_samples=0)
        quiet = {"save_every": 0, "save_every_minutes": 0.0, "keep_last": 0, "keep_every": 0}
        quiet |= {"resume": None, "check_replicas_every": 0, "tensorboard": False}
        quiet |= {"preflight": False, "exit_after_minutes": 0.0}
        quiet |= {"save_weights_only": False, "load_weights_only": False}
        run = replace(config.run, out=str(out), **quiet)
        return replace(config, training=training, data=data, run=run)


def _starts_python(words: list[str]) -> bool:
    """Whether a launcher is itself a Python that takes the program: torchrun, forkrun.py."""
    return any(Path(word).name == "torchrun" or word.endswith(".py") for word in words)


def run(candidate: search_space.Candidate, runner: Runner, number: int, tag: str = "") -> Trial:
    """Measure one candidate; kills all that it started, also when interrupted."""
    out = runner.folder / f"{number:04d}-{candidate.label.replace(' ', '-')}"
    out.mkdir(parents=True, exist_ok=True)
    command = runner.command(candidate, out)
    started, began = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.monotonic()
    status, log = _execute(command, out / "output.txt", f"{os.getpid()}-{number}", runner.limit)
    wall = time.monotonic() - began
    verdict, reason, rows = judge(status, log, out, WARM_UP + runner.timed, runner.limit)
    facts = _read_facts(out / "run.json")
    timed = [row["seconds"] for row in rows[WARM_UP:]] if verdict == "ok" else []
    trial = Trial(
        key=candidate.key,
        label=candidate.label,
        ranks=candidate.ranks,
        status=verdict,
        reason=reason,
        seconds=timed,
        predicted=candidate.prediction.seconds,
        config=json.loads(json.dumps(candidate.config.as_dict())),  # as it will be read
        formula=facts.get("flops_formula", ""),
        cluster={k: v for k, v in facts.get("cluster", {}).items() if k != "places"},
        versions=facts.get("versions", {}),
        commit=facts.get("commit"),
        command=shlex.join(command),
        started=started,
        wall=wall,
        tag=tag,
    )
    return replace(trial, **_figures(rows[-1], trial.median)) if timed else trial


def _figures(row: dict[str, Any], median: float) -> dict[str, Any]:
    """What the last row says, its rates taken to the median step."""
    share = row["seconds"] / median
    return {
        "peak_memory": row.get("peak_memory_bytes_per_stage", [row["peak_memory_bytes"]]),
        "tflops_model": row["tflops_model"] * share,
        "tflops_hardware": row["tflops_hardware"] * share,
        "tokens_per_second": row["tokens_per_second"] * share,
        "loss": row["loss"],
    }


# ------------------------------------------------------------------------------------------------
# Processes
# ------------------------------------------------------------------------------------------------


def _execute(command: list[str], log: Path, mark: str, limit: float) -> tuple[int | None, str]:
    """Run to the end or the limit (then the status is None); the log's end is returned with it."""
    environment = {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"}
    status = None
    with open(log, "wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the search, which then ends the trial
            )
        except OSError as error:
            raise UserError(f"cannot start {command[0]!r} of --launch: {error.strerror}") from None
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process, mark)
    return status, log.read_bytes()[-65536:].decode(errors="replace")


def _end(process: subprocess.Popen, mark: str) -> None:
    """End what is left of a trial: first politely, so that srun tells its nodes, then by force.

    Launchers put ranks into sessions of their own, and orphans have other parents: so all
    processes that carry the trial's mark count, whoever started them.
    """
    for kill in (signal.SIGTERM, signal.SIGKILL):
        left = marked(mark)
        if not left and process.poll() is not None:
            return
        for one in left:
            try:
                one.send_signal(kill)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=SECONDS_TO_OBEY)
    process.wait()


def marked(mark: str) -> list[psutil.Process]:
    """The living processes of this machine and user that were started with that mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


# ------------------------------------------------------------------------------------------------
# What a trial's files say
# ------------------------------------------------------------------------------------------------


def judge(
    status: int | None, log: str, out: Path, steps: int, limit: float
) -> tuple[str, str, list[dict[str, Any]]]:
    """Verdict, reason and rows of a trial that ended with `status` (None: over the limit)."""
    rows = read_rows(out / "metrics.jsonl")
    odd = [row for row in rows if not math.isfinite(row["loss"])]
    if odd:
        reason = f"the loss is {odd[0]['loss']} at step {odd[0]['iteration']}"
        return "diverged", reason, rows
    if status is None:
        done = f"after step {len(rows)} of {steps}" if rows else "before the first step"
        return "hang", f"not done within {limit:g} s: stopped {done}", rows
    if status == 0 and len(rows) == steps:
        return "ok", "", rows
    if status == 0:
        return "crash", f"ended with status 0 after {len(rows)} of {steps} steps", rows
    memory = [line for line in log.splitlines() if any(word in line for word in OUT_OF_MEMORY)]
    if memory:
        return "oom", memory[-1].strip()[:300], rows
    if _was_killed(status, log):
        return "oom", "killed from outside, as the kernel does when memory runs out", rows
    if status == 2 and _last(log, "error: "):
        return "rejected", _last(log, "error: ").removeprefix("error: "), rows
    told = _last(log, "Error") or _last(log, ": DEAD: ") or _last(log) or "no output"
    return "crash", f"status {status}: {told}", rows


def _was_killed(status: int, log: str) -> bool:
    """Whether SIGKILL ended it: as Popen, a shell or MPICH's mpirun (the bare 9) tell it."""
    told = status in (-signal.SIGKILL, 128 + signal.SIGKILL)
    return told or (status == signal.SIGKILL and "(signal 9)" in log)


def _last(log: str, containing: str = "") -> str:
    """The log's last line that is not empty and contains a word."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and containing in line]
    return lines[-1][:300] if lines else ""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of steps in a metrics.jsonl; the last line may be torn, and is then left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().split("\n")[:-1]:
        row = json.loads(line)
        if "loss" in row:
            found.append(row)
    return found


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # it ended before the file was written
        return {}


# ------------------------------------------------------------------------------------------------
# The store
# ------------------------------------------------------------------------------------------------


class Store:
    """Trials in a file of JSON lines: each is on the disk before the next one starts."""

    def __init__(self, path: Path):
        """Reads what is there; raises UserError if that is not a file of trials."""
        self.path = path
        self.trials = list(_read_trials(path)) if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, trial: Trial) -> None:
        """Append one trial, durably."""
        self.trials.append(trial)
        with open(self.path, "a") as file:
            file.write(json.dumps(asdict(trial)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def of(self, key: str) -> list[Trial]:
        """All trials of one candidate, oldest first."""
        return [trial for trial in self.trials if trial.key == key]


def _read_trials(path: Path):
    lines = path.read_text().split("\n")
    if lines[-1]:  # the machine stopped in the middle of a line: cut it off before appending
        path.write_text("".join(line + "\n" for line in lines[:-1]))
    for number, line in enumerate(lines[:-1], start=1):
        try:
            yield Trial(**json.loads(line))
        except (json.JSONDecodeError, TypeError) as error:
            raise UserError(f"{path}, line {number}, is no trial: {error}") from None
