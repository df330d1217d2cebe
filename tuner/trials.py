"""One trial: train.py on its own ranks for a few steps, under a time limit.

    trial = run(candidate, Runner("mpirun -n {ranks}", Path("runs/tune/trials")), number=0)

    outcome = Rehearser("a100-80").rehearse(candidate, runner, number=0)    # before the first trial
    outcome.finding         # why the layout must not be run, or empty

Every trial has a status and a reason: ok, rejected by train.py itself or by rehearse.py, out of
memory, hang (over the time limit), crash, divergence. When `run` returns, all processes of the
trial on this machine have ended.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from config.messages import UserError, printable
from tuner import search_space
from tuner.search import LEAST_NOISE

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = str(ROOT / "train.py")
REHEARSAL = str(ROOT / "rehearse.py")
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
OUT_OF_MEMORY = re.compile(
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
    command: str = ""  # of the run; empty if the rehearsal rejected it
    started: str = ""
    wall: float = 0.0  # seconds of the whole trial, start-up included
    rehearsal: float = 0.0  # seconds of the rehearsal before it; 0: there was none
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
    figures = _figures(rows) if status == "ok" else {}
    return _trial(
        candidate,
        status,
        reason,
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


def rejected(candidate: search_space.Candidate, finding: str, seconds: float, tag: str) -> Trial:
    """Return the trial of a candidate that is not run, because its rehearsal rejected it.

    finding: the reason. seconds: the duration of the rehearsal. tag: why it would have run.
    """
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    reason = f"by the rehearsal: {finding}"
    return _trial(candidate, "rejected", reason, started=started, tag=tag, rehearsal=seconds)


def _trial(candidate: search_space.Candidate, status: str, reason: str, **facts: Any) -> Trial:
    """Return a candidate's trial; facts: further attributes of the Trial by name."""
    identity = candidate.key, candidate.label, candidate.ranks
    config = json.loads(json.dumps(candidate.config.as_dict()))  # lists for tuples, as in JSON
    seconds = facts.pop("seconds", [])
    return Trial(*identity, status, reason, seconds, candidate.prediction.seconds, config, **facts)


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


# ---- The rehearsal before the first trial --------------------------------------------------------

# A rehearsal never runs beside a trial: the trial's ranks may share this machine's cores, and would
# be measured too slow. On CPUs nothing is rehearsed, because rehearse.py finds what goes wrong on
# GPUs only (their memory, NCCL's rules), and because a failed trial costs less there.


@dataclass(frozen=True)
class Outcome:
    """The result of a rehearsal; with neither finding nor failure the layout can be run."""

    seconds: float = 0.0  # the duration of the rehearsal
    finding: str = ""  # why the layout must not be run, or empty
    failure: str = ""  # why the rehearsal has no answer, or empty; a trial is run then

    @property
    def text(self) -> str:
        """The rehearsal's seconds and its verdict, for a printed line."""
        verdict = "every operation of the ranks that were run meets, and it fits"
        if self.failure:
            verdict = f"no answer, the trial decides: {self.failure}"
        elif self.finding:
            verdict = "rejected"
        return f"{self.seconds:.0f} s: {verdict}"


@dataclass(frozen=True)
class Rehearser:
    """Rehearses layouts on fake GPUs; gpu: their name; calibration: a file of measured costs."""

    gpu: str
    calibration: str | None = None

    def rehearse(self, candidate: search_space.Candidate, runner: Runner, number: int) -> Outcome:
        """Rehearse a candidate under the runner's time limit, and return the outcome.

        Output and answers are written into the folder of the trial with the number `number`. When
        this method returns or raises, all processes of the rehearsal have ended.
        """
        out = runner.out(candidate, number)
        began = time.monotonic()
        answers = out / "rehearsal.json"
        log = out / "rehearsal.txt"
        answers.unlink(missing_ok=True)  # a search that was stopped may have left this file
        command = [sys.executable, REHEARSAL, "--gpus", str(candidate.ranks), "--gpu", self.gpu]
        if self.calibration:
            command += ["--calibration", self.calibration]
        command += ["--json", str(answers), *search_space.to_cli_args(candidate.config)]
        status, output = execute(command, log, number, runner.time_limit)
        seconds = time.monotonic() - began
        if answers.exists() and status in (0, 1):
            return Outcome(seconds, json.loads(answers.read_text())["finding"])
        if status is None:
            return Outcome(seconds, failure=f"not done within {runner.time_limit:g} s")
        lines = output.strip().splitlines() or ["no output"]
        return Outcome(seconds, failure=lines[-1][:MOST_CHARACTERS])


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
    handled = [stopping for stopping in STOPPING if callable(signal.getsignal(stopping))]
    signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    try:
        status = _run_to_the_end(command, log, f"{os.getpid()}-{number}", time_limit, handled)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    return status, printable(log.read_bytes()[-OUTPUT_BYTES:].decode(errors="replace"))


def _run_to_the_end(
    command: list[str],
    log: Path,
    trial_id: str,
    time_limit: float,
    handled: list[signal.Signals],
) -> int | None:
    """Do what `execute` says while the signals of `handled` are blocked; return the exit status."""
    environment = {**os.environ, TRIAL_VARIABLE: trial_id, "PYTHONUNBUFFERED": "1"}
    options: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    # In a session of its own: Ctrl-C reaches the search, which then ends the trial.
    options |= {"start_new_session": True, "preexec_fn": _end_with_search}
    process = None
    until = time.monotonic() + time_limit
    with open(log, "wb") as output:
        try:
            process = subprocess.Popen(command, env=environment, stdout=output, **options)
            while process.poll() is None and time.monotonic() < until:
                if sent := signal.sigtimedwait(handled, CHECK_SECONDS):
                    handler: Any = signal.getsignal(sent.si_signo)
                    handler(sent.si_signo, None)
            return process.poll()
        except OSError as error:
            raise UserError(f"cannot start {command[0]!r} of --launch: {error.strerror}") from None
        finally:
            _terminate(process, trial_id)


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
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    of_memory = [line for line in lines if OUT_OF_MEMORY.search(line)]
    if of_memory:
        return "oom", of_memory[-1][:MOST_CHARACTERS], rows
    # Popen and shells report SIGKILL as -9 or 137, MPICH's mpirun as 9, with a line about it.
    kill = signal.SIGKILL
    killed_by_mpich = exit_status == kill and "(signal 9)" in log
    if exit_status in (-kill, 128 + kill) or killed_by_mpich:
        return "oom", "killed from outside, as the kernel does when memory runs out", rows
    errors = [line for line in lines if "error: " in line]
    if exit_status == 2 and errors:
        return "rejected", errors[-1][:MOST_CHARACTERS].removeprefix("error: "), rows
    cause = "no output"
    for text in ("", ": DEAD: ", "Error"):  # the last line of output, or a more telling line
        matching = [line for line in lines if text in line]
        cause = matching[-1] if matching else cause
    return "crash", f"status {exit_status}: {cause[:MOST_CHARACTERS]}", rows


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
