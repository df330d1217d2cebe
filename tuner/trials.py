"""One trial: train.py on its own ranks for a few steps, under a time limit; and the file of trials.

    trial = run(candidate, Runner("mpirun -n {ranks}", Path("runs/tune/trials")), number=0)
    TrialStore(Path("runs/tune/trials.jsonl")).add(trial)

Every trial has a status and a reason: ok, rejected by train.py itself, out of memory, hang (over
the time limit), crash, divergence. When `run` returns, all processes of the trial on this machine
have ended.
"""

import contextlib
import ctypes
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import psutil

from config.messages import UserError, printable
from tuner import search_space
from tuner.search import LEAST_NOISE

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = str(ROOT / "train.py")
WARM_UP = 2  # steps that are not counted: allocators, kernels and connections warm up
TRIAL_VARIABLE = "TRINE_TRIAL"  # environment variable of a trial's processes, to find strays
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
MOST_CHARACTERS = 300  # of a line of output in a trial's reason
OUTPUT_BYTES = 65536  # at the end of a trial's output, in which its reason is looked for
_PRCTL = ctypes.CDLL(None).prctl  # looked up now, since loading after a fork is not safe
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that end a search
CHECK_SECONDS = 0.05  # between two looks at whether a trial has ended
RATES = ("tflops_model", "tflops_hardware", "tokens_per_second")  # columns of metrics.jsonl

# Error messages of exhausted memory: torch on GPUs and CPUs, Python, C++, the C library, launchers.
OUT_OF_MEMORY = (
    "out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate memory|"
    "MemoryError|bad_alloc|oom-kill|oom_kill"
)


@dataclass(frozen=True)
class Trial:
    """One run of a candidate and its figures, as trials.jsonl has them."""

    key: str  # Candidate.key
    label: str  # Candidate.label
    ranks: int
    status: str  # ok, rejected, oom, hang, crash, diverged
    reason: str  # empty if ok
    seconds: list[float]  # of the timed steps
    predicted: float  # the planner's seconds of a step
    config: dict[str, Any]  # groups of options, as in run.json
    peak_memory: list[float] = field(default_factory=list)  # bytes of each stage's fullest rank
    tflops_model: float = 0.0  # per rank, at the median of the timed steps
    tflops_hardware: float = 0.0  # the same, with recomputation
    tokens_per_second: float = 0.0  # of all ranks, at the median
    loss: float | None = None
    formula: str = ""
    cluster: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    command: str = ""
    started: str = ""
    wall: float = 0.0  # seconds of the whole trial, start-up included
    tag: str = ""  # why it ran, if not for the search: confirm, all

    @property
    def median(self) -> float:
        """The median seconds of the timed steps; raises StatisticsError if no step was timed."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The slowest minus the fastest timed step's seconds, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


@dataclass(frozen=True)
class Runner:
    """How trials are run: launcher, steps, time limit, and the folder of their output."""

    launch: str  # the launcher's command, in which `{ranks}` stands for the number of ranks
    folder: Path  # has a folder per trial
    timed: int = 3  # the number of measured steps, after the first WARM_UP steps
    time_limit: float = 600.0  # seconds

    def launch_command(self, ranks: int) -> list[str]:
        """Return the words of launcher, interpreter and train.py.

        Raise UserError if the launcher has no {ranks}, or is no command of a shell.
        """
        if "{ranks}" not in self.launch:
            text = f"--launch {self.launch!r} has no {{ranks}}, as in 'mpirun -n {{ranks}}'"
            raise UserError(text)
        try:
            words = shlex.split(self.launch.replace("{ranks}", str(ranks)))
        except ValueError as error:  # a quotation mark without a second one
            raise UserError(f"--launch {self.launch!r} is not a command: {error}") from None
        # torchrun and forkrun.py start Python for the program themselves.
        if not any(Path(word).name == "torchrun" or word.endswith(".py") for word in words):
            words.append(sys.executable)
        return [*words, PROGRAM]

    def out(self, candidate: search_space.Candidate, number: int) -> Path:
        """Make and return the folder of the trial with the number `number`."""
        out = self.folder / f"{number:04d}-{candidate.label.replace(' ', '-')}"
        out.mkdir(parents=True, exist_ok=True)
        return out

    def command(self, candidate: search_space.Candidate, out: Path) -> list[str]:
        """Return the command line of a trial with output in the folder `out`.

        The trial trains a few steps on the full batch, and saves and evaluates nothing.
        """
        config = candidate.config
        training = replace(config.training, **search_space.FULL_BATCH)
        training = replace(training, steps=WARM_UP + self.timed)
        data_options: dict[str, Any] = {"eval_every": 0, "eval_samples": 0, "eval_data": None}
        if config.data.data == ("synthetic",):
            data_options["cache"] = None  # synthetic data is not read from files
        data = replace(config.data, **data_options)
        off: dict[str, Any] = {"resume": None, "save_every": 0, "save_every_minutes": 0.0}
        off |= {"keep_last": 0, "keep_every": 0, "check_replicas_every": 0, "tensorboard": False}
        off |= {"preflight": False, "exit_after_minutes": 0.0}
        off |= {"begin_at_samples": 0, "stop_at_samples": 0}
        off |= {"save_weights_only": False, "load_weights_only": False}
        run = replace(config.run, out=str(out), **off)
        config = replace(config, training=training, data=data, run=run)
        return [*self.launch_command(candidate.ranks), *search_space.to_cli_args(config)]


def run(candidate: search_space.Candidate, runner: Runner, number: int, tag: str = "") -> Trial:
    """Run a candidate and return its trial; end all processes of the trial, also if interrupted.

    number: that of the trial's folder. tag: why it runs, if not for the search. Raise UserError if
    the launcher cannot be started.
    """
    out = runner.out(candidate, number)
    command = runner.command(candidate, out)
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    began = time.monotonic()
    exit_status, log = execute(command, out / "output.txt", number, runner.time_limit)
    wall = time.monotonic() - began
    steps = WARM_UP + runner.timed
    status, reason, rows = classify(exit_status, log, out, steps, runner.time_limit)
    facts: dict[str, Any] = {}  # stays empty if train.py ended before it had written run.json
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        facts = json.loads((out / "run.json").read_text())
    figures = _figures(rows) if status == "ok" else {"seconds": []}
    return Trial(
        candidate.key,
        candidate.label,
        candidate.ranks,
        status,
        reason,
        predicted=candidate.prediction.seconds,
        config=json.loads(json.dumps(candidate.config.as_dict())),  # lists for tuples, as in JSON
        formula=facts.get("flops_formula", ""),
        cluster={name: v for name, v in facts.get("cluster", {}).items() if name != "places"},
        versions=facts.get("versions", {}),
        commit=facts.get("commit"),
        command=shlex.join(command),
        started=started,
        wall=wall,
        tag=tag,
        **figures,
    )


def _figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a trial that ran to its end, by attribute of Trial.

    rows: those of metrics.jsonl, a row per step. Memory and loss are those of the last step; the
    rates are scaled from the last step to the median one.
    """
    seconds = [row["seconds"] for row in rows[WARM_UP:]]
    last_row = rows[-1]
    scale = last_row["seconds"] / statistics.median(seconds)
    rates = {name: last_row[name] * scale for name in RATES}
    memory = last_row.get("peak_memory_bytes_per_stage", [last_row["peak_memory_bytes"]])
    return {"seconds": seconds, "peak_memory": memory, "loss": last_row["loss"], **rates}


# ---- Processes -----------------------------------------------------------------------------------


def execute(
    command: list[str],
    log: Path,
    number: int,
    time_limit: float,
) -> tuple[int | None, str]:
    """Run a command to its end or for `time_limit` seconds, then end all processes it started.

    Return its exit status (None: over the limit) and the end of its output, OUTPUT_BYTES. log: the
    file of the output. number: that of the trial. Raise UserError if it cannot be started, and what
    the handler of a signal of STOPPING raises. The handler is called here, because Python would
    call it between any two operations: its exception could leave a lock of Popen taken, for which
    Popen.wait then waits for ever, or be dropped in Popen.__del__.
    """
    trial_id = f"{os.getpid()}-{number}"
    environment = {**os.environ, TRIAL_VARIABLE: trial_id, "PYTHONUNBUFFERED": "1"}
    options: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    # In a session of its own: Ctrl-C reaches the search, which then ends the trial.
    options |= {"start_new_session": True, "preexec_fn": _end_with_search}
    handlers: Any = {number: signal.getsignal(number) for number in STOPPING}
    handled = [number for number in STOPPING if callable(handlers[number])]
    until = time.monotonic() + time_limit
    process = None
    with open(log, "wb") as output:
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        try:
            process = subprocess.Popen(command, env=environment, stdout=output, **options)
            while process.poll() is None and time.monotonic() < until:
                if sent := signal.sigtimedwait(handled, CHECK_SECONDS):
                    handlers[sent.si_signo](sent.si_signo, None)
            status = process.poll()
        except OSError as error:
            raise UserError(f"cannot start {command[0]!r} of --launch: {error.strerror}") from None
        finally:
            _terminate(process, trial_id)
            process = None  # its __del__ runs now
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    return status, printable(log.read_bytes()[-OUTPUT_BYTES:].decode(errors="replace"))


def _end_with_search() -> None:
    """Have the kernel send SIGTERM to the launcher when the search ends, also if it is killed.

    The launcher would inherit that the search has blocked the signals of STOPPING.
    """
    _PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _terminate(process: subprocess.Popen | None, trial_id: str) -> None:
    """End the processes of a trial: SIGTERM first, so that srun ends its ranks on other nodes.

    process: the launcher; None if it did not start. trial_id: its TRIAL_VARIABLE, which finds also
    ranks in sessions of their own and orphans with other parents.
    """
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        running = processes_of(trial_id)
        has_ended = process is None or process.poll() is not None
        if not running and has_ended:
            return
        for running_process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                running_process.send_signal(signal_number)
        psutil.wait_procs(running, timeout=GRACE_SECONDS)
    if process:
        process.wait()


def processes_of(trial_id: str) -> list[psutil.Process]:
    """Return the user's running processes on this machine whose TRIAL_VARIABLE is `trial_id`."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            is_of_trial = process.environ().get(TRIAL_VARIABLE) == trial_id
            if is_of_trial and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


# ---- Outcome of a trial, from its exit status, output and files ----------------------------------


def classify(
    exit_status: int | None,
    log: str,
    out: Path,
    steps: int,
    time_limit: float,
) -> tuple[str, str, list[dict[str, Any]]]:
    """Return a trial's status, its reason (empty if ok), and its rows of metrics.jsonl per step.

    exit_status: None if the trial was over the time limit in seconds. log: the end of its output.
    out: its folder. steps: the number of steps that it should have trained.
    """
    metrics = out / "metrics.jsonl"
    written: list[str] = []
    if metrics.exists():
        *written, _ = metrics.read_text().split("\n")  # a text without a line's end is incomplete
    rows = [row for row in map(json.loads, written) if "loss" in row]
    for row in rows:
        if not math.isfinite(row["loss"]):
            return "diverged", f"the loss is {row['loss']} at step {row['iteration']}", rows
    if exit_status is None:
        done = f"after step {len(rows)} of {steps}" if rows else "before the first step"
        return "hang", f"not done within {time_limit:g} s: stopped {done}", rows
    if exit_status == 0 and len(rows) == steps:
        return "ok", "", rows
    if exit_status == 0:
        return "crash", f"ended with status 0 after {len(rows)} of {steps} steps", rows
    if line := _last_line(log, OUT_OF_MEMORY):
        return "oom", line, rows
    # Popen and shells report SIGKILL as -9 or 137, MPICH's mpirun as 9, with a line about it.
    kill = signal.SIGKILL
    killed_by_mpich = exit_status == kill and "(signal 9)" in log
    if exit_status in (-kill, 128 + kill) or killed_by_mpich:
        return "oom", "killed from outside, as the kernel does when memory runs out", rows
    error = _last_line(log, "error: ")
    if exit_status == 2 and error:
        return "rejected", error.removeprefix("error: "), rows
    cause = _last_line(log, "Error") or _last_line(log, ": DEAD: ") or _last_line(log, "")
    return "crash", f"status {exit_status}: {cause or 'no output'}", rows


def _last_line(log: str, pattern: str) -> str:
    """Return the last line in which a regular expression is found, shortened; empty: none."""
    for line in reversed(log.splitlines()):
        if line.strip() and re.search(pattern, line):
            return line.strip()[:MOST_CHARACTERS]
    return ""


# ---- The file of trials --------------------------------------------------------------------------


class TrialStore:
    """A file with a JSON line per trial; each trial is on the disk before the next trial starts."""

    def __init__(self, path: Path):
        """Read the trials of the file, if it exists; raise UserError if it is no file of trials."""
        self.path = path
        self.trials: list[Trial] = []
        text = ""
        try:
            if path.exists():
                text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the trials in {path}: {error}") from None
        *lines, incomplete_line = text.split("\n")
        for number, line in enumerate(lines, start=1):
            try:
                values = json.loads(line)
                known = {f.name: values[f.name] for f in fields(Trial) if f.name in values}
                self.trials.append(Trial(**known))
            except (ValueError, TypeError, RecursionError) as error:
                raise UserError(f"{path}, line {number}, is no trial: {error}") from None
        if incomplete_line:  # a search was killed while it wrote; lines are appended to this file
            path.write_text("".join(line + "\n" for line in lines))

    def add(self, trial: Trial) -> None:
        """Append a trial to the file and wait until it is on the disk."""
        self.trials.append(trial)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a") as file:
            file.write(json.dumps(asdict(trial)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def of(self, key: str) -> list[Trial]:
        """Return the trials of the candidate with that key, oldest first."""
        return [trial for trial in self.trials if trial.key == key]


# ---- How much repeated trials of one layout vary -------------------------------------------------


def noise(trials: list[Trial]) -> float:
    """Return the standard deviation of the logarithm of a trial's median seconds, from 0.01 to 0.3.

    The variance is pooled over the layouts that were measured more than once, and over a prior
    estimate from the steps within each trial, which has the weight of three repeated trials.
    """
    medians: dict[str, list[float]] = {}
    for trial in trials:
        if trial.status == "ok":
            medians.setdefault(trial.key, []).append(math.log(trial.median))
    repeated = [group for group in medians.values() if len(group) > 1]
    degrees = sum(len(group) - 1 for group in repeated)
    squares = sum((len(group) - 1) * statistics.variance(group) for group in repeated)
    # Three normal values with standard deviation s have on average a range of 1.7 s, and a median
    # with standard deviation 0.67 s: the median's deviation is 0.67 / 1.7 = 0.4 of the range.
    deviations = [0.4 * trial.spread for trial in trials if trial.status == "ok"]
    prior = statistics.median(deviations or [LEAST_NOISE])
    weight = 3
    variance = (weight * prior**2 + squares) / (weight + degrees)
    return min(0.3, max(LEAST_NOISE, math.sqrt(variance)))
