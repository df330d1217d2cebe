"""One trial: train.py on its own ranks for a few steps, under a time limit; and the file of trials.

    trial = run(candidate, Runner("mpirun -n {ranks}", Path("runs/tune/trials")), number=0)
    TrialStore(Path("runs/tune/trials.jsonl")).add(trial)

    outcome = Rehearser("a100-80").rehearse(candidate, runner, number=0)     # rehearse.py before it
    outcome.finding         # why the layout must not be queued, or empty

Every outcome is a result with its reason: ok, rejected by train.py itself or by the rehearsal
before it, out of memory, hang (over the limit), crash, divergence. When `run`
returns, none of its processes on this machine is left.
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
from dataclasses import asdict, dataclass, field, replace
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
_PRCTL, PR_SET_PDEATHSIG = ctypes.CDLL(None).prctl, 1  # found here: after a fork that is not safe
RATES = ("tflops_model", "tflops_hardware", "tokens_per_second")  # of a row of metrics.jsonl

# Error messages of exhausted memory: torch on GPUs and CPUs, Python, C++, the C library, launchers.
OUT_OF_MEMORY = re.compile(
    "out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate memory|"
    "MemoryError|bad_alloc|oom-kill|oom_kill"
)


@dataclass(frozen=True)
class Trial:
    """One run and its figures: seconds of the timed steps, bytes of each stage's fullest rank."""

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
    command: str = ""  # of the run; empty if the rehearsal rejected it
    started: str = ""
    wall: float = 0.0  # seconds of the whole trial, start-up included
    rehearsal: float = 0.0  # seconds of the rehearsal before it; 0: there was none
    tag: str = ""  # why it ran, if not for the search: confirm, all

    @property
    def median(self) -> float:
        """Seconds per iteration; raises StatisticsError if nothing was timed."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Slowest minus fastest timed step, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


@dataclass(frozen=True)
class Runner:
    """How trials are run: launcher, steps, time limit, and the folder of their output."""

    launch: str  # `{ranks}` is replaced by their number
    folder: Path
    timed: int = 3  # steps that are measured, after WARM_UP
    time_limit: float = 600.0  # seconds

    def launch_command(self, ranks: int) -> list[str]:
        """Launcher, interpreter and program; UserError if the launcher has no {ranks}."""
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
        """The folder of a trial, which is made."""
        out = self.folder / f"{number:04d}-{candidate.label.replace(' ', '-')}"
        out.mkdir(parents=True, exist_ok=True)
        return out

    def command(self, candidate: search_space.Candidate, out: Path) -> list[str]:
        """The command line of a trial in `out`: a few steps, nothing is saved or evaluated."""
        config = candidate.config
        training = replace(config.training, **search_space.FULL_BATCH)
        training = replace(training, steps=WARM_UP + self.timed)
        full: dict[str, Any] = {"eval_data": None}
        full |= {"cache": None} if config.data.data == ("synthetic",) else {}  # nothing is read
        data = replace(config.data, eval_every=0, eval_samples=0, **full)
        quiet: dict[str, Any] = {"resume": None, "save_every": 0, "save_every_minutes": 0.0}
        quiet |= {"keep_last": 0, "keep_every": 0, "check_replicas_every": 0, "tensorboard": False}
        quiet |= {"preflight": False, "exit_after_minutes": 0.0}
        quiet |= {"begin_at_samples": 0, "stop_at_samples": 0}
        quiet |= {"save_weights_only": False, "load_weights_only": False}
        run = replace(config.run, out=str(out), **quiet)
        config = replace(config, training=training, data=data, run=run)
        return [*self.launch_command(candidate.ranks), *search_space.to_cli_args(config)]


def run(candidate: search_space.Candidate, runner: Runner, number: int, tag: str = "") -> Trial:
    """Measure one candidate; kills all processes that it started, also when interrupted.

    Raises UserError if the launcher cannot be started.
    """
    out = runner.out(candidate, number)
    command = runner.command(candidate, out)
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    began = time.monotonic()
    exit_status, log = execute(command, out / "output.txt", number, runner.time_limit)
    wall = time.monotonic() - began
    steps = WARM_UP + runner.timed
    status, reason, rows = classify(exit_status, log, out, steps, runner.time_limit)
    facts: dict[str, Any] = {}  # stay empty if train.py ended before it had written them
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        facts = json.loads((out / "run.json").read_text())
    return _trial(
        candidate,
        status,
        reason,
        formula=facts.get("flops_formula", ""),
        cluster={k: v for k, v in facts.get("cluster", {}).items() if k != "places"},
        versions=facts.get("versions", {}),
        commit=facts.get("commit"),
        command=shlex.join(command),
        started=started,
        wall=wall,
        tag=tag,
        **(_figures(rows) if status == "ok" else {}),
    )


def rejected(candidate: search_space.Candidate, finding: str, seconds: float, tag: str) -> Trial:
    """The trial of a candidate that a rehearsal of so many seconds rejected: it is not run."""
    about = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "tag": tag, "rehearsal": seconds}
    return _trial(candidate, "rejected", f"by the rehearsal: {finding}", **about)


def _trial(candidate: search_space.Candidate, status: str, reason: str, **facts: Any) -> Trial:
    place = candidate.key, candidate.label, candidate.ranks
    config = json.loads(json.dumps(candidate.config.as_dict()))  # lists for tuples, as in JSON
    seconds = facts.pop("seconds", [])
    return Trial(*place, status, reason, seconds, candidate.prediction.seconds, config, **facts)


def _figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of the timed steps; memory, loss and rates of the last one, at the median step."""
    seconds = [row["seconds"] for row in rows[WARM_UP:]]
    last = rows[-1]
    scale = last["seconds"] / statistics.median(seconds)
    rates = {name: last[name] * scale for name in RATES}
    memory = last.get("peak_memory_bytes_per_stage", [last["peak_memory_bytes"]])
    return {"seconds": seconds, "peak_memory": memory, "loss": last["loss"], **rates}


# ---- The rehearsal before the first trial --------------------------------------------------------

# It comes before the trial and not beside the one before: a trial's ranks may share this machine's
# cores, and would be measured too slow. On CPUs nothing is rehearsed: memory and NCCL's rules,
# which a layout can break, are of GPUs, and a trial costs less there.


@dataclass(frozen=True)
class Outcome:
    """The verdict of a rehearsal. failure: why there is no answer, or empty; then the trial
    decides.
    """

    seconds: float = 0.0
    finding: str = ""
    failure: str = ""

    @property
    def text(self) -> str:
        """The seconds that it took, and what it says."""
        said = (
            "rejected"
            if self.finding
            else "every operation of the ranks that were run meets, and it fits"
        )
        if self.failure:
            said = f"no answer, the trial decides: {self.failure}"
        return f"{self.seconds:.0f} s: {said}"


@dataclass(frozen=True)
class Rehearser:
    """For which machine layouts are rehearsed."""

    gpu: str
    calibration: str | None = None

    def rehearse(self, candidate: search_space.Candidate, runner: Runner, number: int) -> Outcome:
        """Rehearse a candidate, with the runner's time limit; words and answers into the folder of
        the trial of that number. When it returns or raises, no process of it is left.
        """
        out = runner.out(candidate, number)
        began = time.monotonic()
        answers = out / "rehearsal.json"
        log = out / "rehearsal.txt"
        answers.unlink(missing_ok=True)  # of a search that was stopped
        command = [sys.executable, REHEARSAL, "--gpus", str(candidate.ranks), "--gpu", self.gpu]
        command += ["--calibration", self.calibration] if self.calibration else []
        command += ["--json", str(answers), *search_space.to_cli_args(candidate.config)]
        status, output = execute(command, log, number, runner.time_limit)
        seconds = time.monotonic() - began
        if answers.exists() and status in (0, 1):
            return Outcome(seconds, json.loads(answers.read_text())["finding"])
        lines = output.strip().splitlines() or ["no output"]
        late = f"not done within {runner.time_limit:g} s" if status is None else lines[-1][:300]
        return Outcome(seconds, failure=late)


# ---- Processes -----------------------------------------------------------------------------------


def execute(
    command: list[str],
    log: Path,
    number: int,
    time_limit: float,
) -> tuple[int | None, str]:
    """Run a process of the trial of that number to its end, or to the time limit, and end all that
    it started: its exit status (None: over the limit) and the last 64 KiB of its output.

    Raises UserError if it cannot be started.
    """
    trial_id = f"{os.getpid()}-{number}"
    environment = {**os.environ, TRIAL_VARIABLE: trial_id, "PYTHONUNBUFFERED": "1"}
    options: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    # In a session of its own: Ctrl-C reaches the search, which then ends the trial.
    options |= {"start_new_session": True, "preexec_fn": _end_with_search}
    process = None
    with open(log, "wb") as output:
        try:
            process = subprocess.Popen(command, env=environment, stdout=output, **options)
            status = process.wait(time_limit)
        except OSError as error:
            raise UserError(f"cannot start {command[0]!r} of --launch: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _terminate(process, trial_id)
    return status, printable(log.read_bytes()[-65536:].decode(errors="replace"))


def _end_with_search() -> None:
    """Have the kernel send SIGTERM to the launcher when the search ends, also if it is killed."""
    _PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)


def _terminate(process: subprocess.Popen | None, trial_id: str) -> None:
    """End what is left of a trial: SIGTERM first, so that srun ends its ranks on other nodes.

    Launchers put ranks into sessions of their own, and orphans get other parents: processes are
    found by the environment variable of the trial.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = processes_of(trial_id)
        if not left and (process is None or process.poll() is not None):
            return
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)
        psutil.wait_procs(left, timeout=GRACE_SECONDS)
    if process:
        process.wait()


def processes_of(trial_id: str) -> list[psutil.Process]:
    """The running processes of this machine and user that belong to that trial."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            own = process.environ().get(TRIAL_VARIABLE) == trial_id
            if own and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


# ---- Outcome of a trial, from its exit status, output and files ----------------------------------


def classify(
    exit_status: int | None,
    log: str,
    out: Path,
    steps: int,
    time_limit: float,
) -> tuple[str, str, list[dict[str, Any]]]:
    """Status, reason and rows of a trial that ended with `exit_status` (None: over the limit)."""
    metrics = out / "metrics.jsonl"
    # The text after the last line's end is empty, or a line that is incomplete.
    written = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    rows = [row for row in map(json.loads, written) if "loss" in row]
    for row in rows:
        if not math.isfinite(row["loss"]):
            return "diverged", f"the loss is {row['loss']} at step {row['iteration']}", rows
    if exit_status is None:
        done = f"after step {len(rows)} of {steps}" if rows else "before the first step"
        return "hang", f"not done within {time_limit:g} s: stopped {done}", rows
    if exit_status == 0:
        short = f"ended with status 0 after {len(rows)} of {steps} steps"
        return ("ok", "", rows) if len(rows) == steps else ("crash", short, rows)
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    memory = [line for line in lines if OUT_OF_MEMORY.search(line)]
    if memory:
        return "oom", memory[-1][:300], rows
    # SIGKILL, as Popen, a shell or MPICH's mpirun (the bare 9) report it.
    kill = signal.SIGKILL
    if exit_status in (-kill, 128 + kill) or (exit_status == kill and "(signal 9)" in log):
        return "oom", "killed from outside, as the kernel does when memory runs out", rows
    mistakes = [line for line in lines if "error: " in line]
    if exit_status == 2 and mistakes:
        return "rejected", mistakes[-1][:300].removeprefix("error: "), rows
    causes = ([line for line in lines if text in line] for text in ("Error", ": DEAD: ", ""))
    cause = next((found[-1][:300] for found in causes if found), "no output")
    return "crash", f"status {exit_status}: {cause}", rows


# ---- The file of trials --------------------------------------------------------------------------


class TrialStore:
    """Trials in a file of JSON lines: each is on the disk before the next one starts."""

    def __init__(self, path: Path):
        """Read the trials of an existing file; raises UserError if it is not a file of trials."""
        self.path = path
        self.trials = []
        try:
            *lines, rest = path.read_text().split("\n") if path.exists() else [""]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the trials in {path}: {error}") from None
        for number, line in enumerate(lines, start=1):
            try:
                self.trials.append(Trial(**json.loads(line)))
            except (ValueError, TypeError, RecursionError) as error:
                raise UserError(f"{path}, line {number}, is no trial: {error}") from None
        if rest:  # interrupted in the middle of a line: remove it before appending
            path.write_text("".join(line + "\n" for line in lines))

    def add(self, trial: Trial) -> None:
        """Append one trial and wait until it is on the disk."""
        self.trials.append(trial)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a") as file:
            file.write(json.dumps(asdict(trial)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def of(self, key: str) -> list[Trial]:
        """All trials of one candidate, oldest first."""
        return [trial for trial in self.trials if trial.key == key]


# ---- How much repeated trials of one layout vary -------------------------------------------------


def noise(trials: list[Trial]) -> float:
    """Standard deviation of the logarithm of one trial's median, from 0.01 to 0.3.

    Pooled over the layouts that were measured more than once, and over a prior estimate from the
    steps within each trial, which counts as much as three repeats.
    """
    medians: dict[str, list[float]] = {}
    for trial in trials:
        if trial.status == "ok":
            medians.setdefault(trial.key, []).append(math.log(trial.median))
    repeated = [group for group in medians.values() if len(group) > 1]
    degrees = sum(len(group) - 1 for group in repeated)
    squares = sum((len(group) - 1) * statistics.variance(group) for group in repeated)
    # Three normal values have a range of 1.7 deviations on average, and their median has a
    # deviation of 0.67 of one: 0.67 / 1.7 = 0.4.
    spreads = [0.4 * trial.spread for trial in trials if trial.status == "ok"]
    prior = statistics.median(spreads or [LEAST_NOISE])
    weight = 3
    variance = (weight * prior**2 + squares) / (weight + degrees)
    return min(0.3, max(LEAST_NOISE, math.sqrt(variance)))
