"""Starts real ranks for tests: programs under mpirun, with a limit that leaves nothing behind."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


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


def start(command: list[str], timeout: float = 300, **environment: str) -> Outcome:
    """Run a command; TimeoutExpired, after it and all it started were killed."""
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
    except subprocess.TimeoutExpired:
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
