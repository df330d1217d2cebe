"""Runs a trial, which is train.py for a few steps under a time limit; and stores trials in a file.

    trial = run(candidate, Runner("mpirun -n {ranks}", Path("runs/tune/trials")), number=0)
    TrialStore(Path("runs/tune/trials.jsonl")).add(trial)

A candidate is a layout with the other options of a run. A launcher, such as mpirun, starts the
trial's ranks. Every trial has a status and a reason: ok, rejected by train.py itself, out of
memory, hang (over the time limit), crash, divergence. When `run` returns, all processes of the
trial on this machine have ended. A search is a use of tune.py, which runs many trials.
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
from typing import Any, cast, get_origin

import psutil

from base.errors import FileError, UserError, printable
from base.regular_files import MOST_OF_ROWS, read_regular
from tools.tuner import search_space
from tools.tuner.search import LEAST_NOISE

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "train.py")
WARM_UP = 2  # the first steps do not count: allocators, kernels and connections warm up
# All processes of a trial inherit this environment variable, so that none of them is missed when
# the trial is ended. Its value is different for each trial.
TRIAL_VARIABLE = "TRINE_TRIAL"
GRACE_SECONDS = 5.0  # after SIGTERM, processes have this time to end before SIGKILL is sent
MOST_CHARACTERS = 300  # a line of output in a trial's reason is cut to this length
OUTPUT_BYTES = 65536  # only the last bytes of a trial's output are searched for the reason
# The function prctl of the C library. It is looked up now, because it is called in a child process
# between fork and exec, where loading a library is not safe.
_PRCTL = ctypes.CDLL(None).prctl
PR_SET_PDEATHSIG = 1  # the number of this operation of prctl, from linux/prctl.h
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that end a search
CHECK_SECONDS = 0.05  # the interval in which a running trial is checked for its end
RATES = ("tflops_model", "tflops_hardware", "tokens_per_second")  # rates that metrics.jsonl has

# A regular expression that finds a message of exhausted memory in the output of a trial: of torch
# on GPUs and CPUs, Python, C++, the C library, and launchers.
OUT_OF_MEMORY = (
    "out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate memory|"
    "MemoryError|bad_alloc|oom-kill|oom_kill"
)


@dataclass(frozen=True)
class Trial:
    """One run of a candidate and its figures, as trials.jsonl has them."""

    key: str  # Candidate.key: a hash of the options on which the speed depends
    label: str  # Candidate.label: the layout as text
    ranks: int
    status: str  # ok, rejected, oom, hang, crash or diverged
    reason: str  # a text that explains the status; empty if it is ok
    seconds: list[float]  # the seconds of each timed step
    predicted: float  # the planner's seconds of a step
    config: dict[str, Any]  # the run's options by group, as in run.json
    peak_memory: list[float] = field(default_factory=list)  # bytes of each stage's fullest rank
    tflops_model: float = 0.0  # TFLOPs per rank at the median of the timed steps
    tflops_hardware: float = 0.0  # TFLOPs like tflops_model, but recomputation counts as work too
    tokens_per_second: float = 0.0  # the tokens of all ranks together, at the median step
    loss: float | None = None
    formula: str = ""
    cluster: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    command: str = ""
    started: str = ""
    wall: float = 0.0  # seconds of the whole trial, start-up included
    tag: str = ""  # why the trial ran, if the search did not choose it: confirm or all

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
    folder: Path  # the folder in which each trial gets a folder for its output
    timed: int = 3  # the number of measured steps, after the first WARM_UP steps
    time_limit: float = 600.0  # a trial that takes more seconds is stopped: its status is hang

    def launch_command(self, ranks: int) -> list[str]:
        """Return the words that start train.py on `ranks` ranks, without train.py's options.

        They are the launcher's words, the Python interpreter and the path of train.py. Raise
        UserError if the launcher has no {ranks}, or is no command of a shell.
        """
        if "{ranks}" not in self.launch:
            text = f"--launch {self.launch!r} has no {{ranks}}, as in 'mpirun -n {{ranks}}'"
            raise UserError(text)
        try:
            words = shlex.split(self.launch.replace("{ranks}", str(ranks)))
        except ValueError as error:  # a quotation mark without a second one
            raise UserError(f"--launch {self.launch!r} is not a command: {error}") from None
        # Other launchers need the interpreter; torchrun and forkrun.py start Python themselves.
        if not any(Path(word).name == "torchrun" or word.endswith(".py") for word in words):
            words.append(sys.executable)
        return [*words, PROGRAM]

    def out(self, candidate: search_space.Candidate, number: int) -> Path:
        """Make and return the folder of a trial, named by the trial's number and its layout."""
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
        data_options["eval_tasks"] = None
        if config.data.data == ("synthetic",):
            data_options["cache"] = None  # synthetic data is not read from files
        data = replace(config.data, **data_options)
        # Options of the run that would take time or change what is measured are off.
        off: dict[str, Any] = {"resume": None, "save_every": 0, "save_every_minutes": 0.0}
        off |= {"keep_last": 0, "keep_every": 0, "check_replicas_every": 0, "tensorboard": False}
        off |= {"after_save": None, "preflight": False, "exit_after_minutes": 0.0}
        off |= {"begin_at_samples": 0, "stop_at_samples": 0}
        off |= {"save_weights_only": False, "load_weights_only": False}
        run = replace(config.run, out=str(out), **off)
        config = replace(config, training=training, data=data, run=run)
        return [*self.launch_command(candidate.ranks), *search_space.to_cli_args(config)]


def run(candidate: search_space.Candidate, runner: Runner, number: int, tag: str = "") -> Trial:
    """Run a candidate and return its trial; end all processes of the trial, also if interrupted.

    number: the number of the trial, which its folder gets. tag: a word that says why it runs, if
    the search did not choose it. Raise UserError if the launcher cannot be started.
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
        facts = json.loads(read_regular(out / "run.json"))
    figures = _figures(rows) if status == "ok" else {"seconds": []}
    return Trial(
        candidate.key,
        candidate.label,
        candidate.ranks,
        status,
        reason,
        predicted=candidate.prediction.seconds,
        # Through JSON, so that it equals a stored trial's: tuples become lists.
        config=json.loads(json.dumps(candidate.config.as_dict())),
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

    rows: the rows of metrics.jsonl, one for each step. Memory and loss are taken from the last
    step. The rates of the last step are scaled by the last step's seconds over the median's, so
    that they hold for a step of median length.
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

    Return its exit status (None: over the limit) and the end of its output (OUTPUT_BYTES). log: the
    file of the output. number: the number of the trial. Raise UserError if the command cannot be
    started.

    A signal of STOPPING ends the trial too: its handler is called, and raises an exception. Python
    by itself would call the handler between any two operations. Inside Popen's code this could
    leave a lock taken, for which Popen.wait then waits for ever, or lose the exception in
    Popen.__del__. So the signals are blocked, and this function asks for them and calls the
    handler.
    """
    trial_id = f"{os.getpid()}-{number}"
    environment = {**os.environ, TRIAL_VARIABLE: trial_id, "PYTHONUNBUFFERED": "1"}
    options: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    # The trial has a session of its own, so that Ctrl-C reaches only the search, which then ends
    # the trial in order.
    options |= {"start_new_session": True, "preexec_fn": _end_with_search}
    handlers: Any = {number: signal.getsignal(number) for number in STOPPING}
    # The signals that have a handler in Python; others are ignored or end the process at once.
    handled = [number for number in STOPPING if callable(handlers[number])]
    until = time.monotonic() + time_limit
    process = None
    with open(log, "wb") as output:
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        try:
            process = subprocess.Popen(command, env=environment, stdout=output, **options)
            # Wait for a signal for CHECK_SECONDS each time; the handler of a signal raises.
            while process.poll() is None and time.monotonic() < until:
                if sent := signal.sigtimedwait(handled, CHECK_SECONDS):
                    handlers[sent.si_signo](sent.si_signo, None)
            status = process.poll()
        except OSError as error:
            raise FileError(f"cannot start {command[0]!r} of --launch: {error.strerror}") from None
        finally:
            _terminate(process, trial_id)
            process = None  # so that Popen.__del__ runs while signals are still blocked
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    return status, printable(log.read_bytes()[-OUTPUT_BYTES:].decode(errors="replace"))


def _end_with_search() -> None:
    """Prepare the launcher's process, after the fork and before its program starts.

    The kernel is told to send it SIGTERM when the search ends, also if the search is killed. The
    signals of STOPPING are unblocked: the process has inherited that the search blocks them.
    """
    _PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _terminate(process: subprocess.Popen | None, trial_id: str) -> None:
    """End the processes of a trial: SIGTERM first, so that srun ends its ranks on other nodes.

    process: the launcher; None if it did not start. trial_id: the value of TRIAL_VARIABLE in the
    trial's processes. By this value also ranks are found that are no children of the launcher.
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
    """Return the running processes of a trial on this machine, by their environment variable.

    trial_id: the value of TRIAL_VARIABLE. Processes of other users cannot be read and are left out.
    """
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
    """Return a trial's status, the reason (empty if ok), and its rows of metrics.jsonl.

    There is a row for each step. The status is the first that applies, in the order of the code.

    exit_status: None if the trial was over the time limit in seconds. log: the end of its output.
    out: its folder. steps: the number of steps that it should have trained.
    """
    metrics = out / "metrics.jsonl"
    written: list[str] = []
    if metrics.exists():
        # The text after the last line's end is empty, or a line that was not written completely.
        *written, _ = read_regular(metrics, MOST_OF_ROWS).decode().split("\n")
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
    # SIGKILL most likely comes from the kernel, when memory runs out. Popen reports it as -9,
    # shells as 137, and MPICH's mpirun as 9 with a line about the signal.
    kill = signal.SIGKILL
    killed_by_mpich = exit_status == kill and "(signal 9)" in log
    if exit_status in (-kill, 128 + kill) or killed_by_mpich:
        return "oom", "killed from outside, as the kernel does when memory runs out", rows
    error = _last_line(log, "error: ")
    if exit_status == 2 and error:
        return "rejected", error.removeprefix("error: "), rows
    # The cause is the line of an exception, the watchdog's line on a dead rank, or the last line.
    cause = _last_line(log, "Error") or _last_line(log, ": DEAD: ") or _last_line(log, "")
    return "crash", f"status {exit_status}: {cause or 'no output'}", rows


def _last_line(log: str, pattern: str) -> str:
    """Return the last line of the output in which a regular expression is found, shortened.

    An empty text is returned if there is no such line. Lines of spaces do not count.
    """
    for line in reversed(log.splitlines()):
        if line.strip() and re.search(pattern, line):
            return line.strip()[:MOST_CHARACTERS]
    return ""


# ---- The file of trials --------------------------------------------------------------------------


def _checked(trial: Trial) -> Trial:
    """Return the trial; raise TypeError if a value has another type than a trial's."""
    for f in fields(Trial):
        value = getattr(trial, f.name)
        kind = get_origin(f.type) or f.type
        if kind is list and isinstance(value, list):
            right = all(isinstance(item, int | float) for item in value)
        elif kind is float:
            right = isinstance(value, int | float)
        elif kind in (str, int, list, dict):
            right = isinstance(value, kind)
        else:  # a type or None
            right = isinstance(value, cast(Any, f.type))
        if not right or isinstance(value, bool):
            raise TypeError(f"{f.name} is {value!r:.80}")
    return trial


class TrialStore:
    """A file with a JSON line per trial; each trial is on the disk before the next trial starts."""

    def __init__(self, path: Path):
        """Read the trials of earlier searches from the file, if it exists.

        Fields of a trial that this version does not know are dropped. note: a sentence about a line
        that was left out, or empty. Raise UserError if the file has other contents than trials.
        """
        self.path = path
        self.trials: list[Trial] = []
        text = ""
        try:
            if os.path.lexists(path):
                text = read_regular(path, MOST_OF_ROWS).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"cannot read the trials in {path}: {error}") from None
        *lines, incomplete_line = text.split("\n")
        for number, line in enumerate(lines, start=1):
            try:
                values = json.loads(line)
                known = {f.name: values[f.name] for f in fields(Trial) if f.name in values}
                self.trials.append(_checked(Trial(**known)))
            except (ValueError, TypeError, RecursionError) as error:
                raise FileError(f"{path}, line {number}, is no trial: {error}") from None
        # If a search was killed while it wrote a line, remove this line, since others are appended.
        self.note = ""
        if incomplete_line:
            self.note = f"{path}, line {len(lines) + 1}, was cut off and is left out"
            path.write_text("".join(line + "\n" for line in lines))

    def add(self, trial: Trial) -> None:
        """Append a trial to the file and wait until it is on the disk."""
        self.trials.append(trial)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                file.write(json.dumps(asdict(trial)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise FileError(
                f"cannot write trial {len(self.trials)} into {self.path}: {error.strerror}; the "
                f"{len(self.trials) - 1} before it are there: make room, and run the same command "
                "again"
            ) from None

    def of(self, key: str) -> list[Trial]:
        """Return the trials of the candidate with that key, oldest first."""
        return [trial for trial in self.trials if trial.key == key]


# ---- How much repeated trials of one layout vary -------------------------------------------------


def noise(trials: list[Trial]) -> float:
    """Return how much repeated trials of a layout vary, for the search: from 0.01 to 0.3.

    It is the standard deviation of the logarithm of a trial's median seconds. The variance is
    pooled over the layouts that were measured more than once, and over a prior estimate from the
    steps within each trial, which has the weight of three repeated trials.
    """
    medians: dict[str, list[float]] = {}
    for trial in trials:
        if trial.status == "ok":
            medians.setdefault(trial.key, []).append(math.log(trial.median))
    repeated = [group for group in medians.values() if len(group) > 1]
    degrees = sum(len(group) - 1 for group in repeated)
    squares = sum((len(group) - 1) * statistics.variance(group) for group in repeated)
    # `trial.spread` is the range of a trial's timed steps, three by default. If three values have a
    # normal distribution, their range is on average 1.7 times its standard deviation, and the
    # standard deviation of their median is 0.67 times it: 0.67 / 1.7 = 0.4 of the range.
    deviations = [0.4 * trial.spread for trial in trials if trial.status == "ok"]
    prior = statistics.median(deviations or [LEAST_NOISE])
    weight = 3
    variance = (weight * prior**2 + squares) / (weight + degrees)
    return min(0.3, max(LEAST_NOISE, math.sqrt(variance)))
