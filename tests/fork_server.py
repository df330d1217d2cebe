"""Runs programs as forks of one process that has imported torch, for tests that start many ranks,
or of one that has imported what all programs need before torch.

    process = Forked(["train.py", "--tp", "2"], environment, out, err)
    process.wait(timeout)     # as of subprocess.Popen; also poll() and pid

Importing torch, its compiler and the trainer takes most of the processor time of a short run. Each
program has a process, an environment, output files and an end of its own as under the interpreter,
but its command line in /proc is the server's, and all have one hash seed. Where a test is about a
launcher, a signal or the start of a process, it uses ranks.start or ranks.mpirun instead.

The server is single-threaded until it forks, never computes, and has OMP_NUM_THREADS=1, which torch
reads when it is imported. It ends with the process that started it, and its forks with it.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MESSAGE = 1 << 20  # bytes of a request, at most
THREADS = {"OMP_NUM_THREADS": "1"}
# The modules that a server imports before it forks. All optimizers of torch except AdamW import
# torch._dynamo.
TORCH = ("torch._dynamo", "trainer")
NO_TORCH = ("plan", "tune", "config.validation", "distributed.context", "h5py")
IMPORTS_ASKED = "PYTHONPROFILEIMPORTTIME"  # in a fork: print all modules, in the form of its lines


class Forked:
    """A program that the server has forked; its interface is a part of subprocess.Popen's."""

    def __init__(
        self,
        words: list[str],
        environment: dict[str, str],
        out: int,
        err: int,
        imports: tuple[str, ...] = TORCH,
        cwd: Path = ROOT,
    ):
        """`words`: the program's file and its arguments; `out`, `err`: open files."""
        self.returncode: int | None = None
        self.processor = 0.0  # seconds, when it has ended
        own, theirs = os.pipe()
        self._status = os.fdopen(own)
        request = json.dumps([words, environment, str(cwd)]).encode()
        try:
            with _lock:
                socket.send_fds(_server(imports)[0], [request], [out, err, theirs])
        finally:
            os.close(theirs)
        self.pid = int(self._line())

    def poll(self) -> int | None:
        """The exit status, minus the number of the signal that ended it; None if it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status; subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            status, processor = self._line().split()
            self.returncode, self.processor = int(status), float(processor)
            self._status.close()
        return self.returncode

    def _line(self) -> str:
        line = self._status.readline()
        if not line:
            raise RuntimeError("the fork server has ended")
        return line


_lock = threading.Lock()


@cache
def _server(imports: tuple[str, ...]) -> tuple[socket.socket, subprocess.Popen]:
    """This process's server of forks with these imports, which the first call starts, and the
    connection to it.
    """
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *imports],
            cwd=ROOT,
            env={**os.environ, **THREADS, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return own, process


# ---- The server's process ------------------------------------------------------------------------


def serve(connection: socket.socket) -> list[str]:
    """Fork a program for each request until the connection ends.

    Returns in a fork, with the program's words; it is ready to run them.
    """
    alive: dict[int, int] = {}  # pid -> where its status goes
    waker, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    while True:
        ready = select.select([connection, waker], [], [])[0]
        if waker in ready:
            waker.recv(4096)
            report(alive)
        if connection not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(connection, MESSAGE, 3)
        if not request:
            for child in alive:
                os.kill(child, signal.SIGKILL)
            sys.exit()
        child = os.fork()
        if not child:
            signal.set_wakeup_fd(-1)
            for other in (connection, waker, wakes):
                other.close()
            for other in alive.values():
                os.close(other)
            return become(request, descriptors)
        out, err, status = descriptors
        os.close(out)
        os.close(err)
        os.write(status, f"{child}\n".encode())
        alive[child] = status


def report(alive: dict[int, int]) -> None:
    """Write status and processor time of every child that has ended, and forget it."""
    for child in list(alive):
        ended, state, usage = os.wait4(child, os.WNOHANG)
        if ended:
            status, seconds = alive.pop(child), usage.ru_utime + usage.ru_stime
            with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
                os.write(status, f"{os.waitstatus_to_exitcode(state)} {seconds}\n".encode())
            os.close(status)


def become(request: bytes, descriptors: list[int]) -> list[str]:
    """Make this process what the interpreter would be before the program's first line."""
    words, environment, cwd = json.loads(request)
    os.chdir(cwd)
    os.dup2(descriptors[0], 1)
    os.dup2(descriptors[1], 2)
    for descriptor in descriptors:
        os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.argv = words
    sys.path[0] = str(Path(ROOT, words[0]).resolve().parent)
    if IMPORTS_ASKED in environment:
        atexit.register(print_modules)
    return words


def print_modules() -> None:
    """Print what is imported as Python does it for PYTHONPROFILEIMPORTTIME."""
    for name in sys.modules:
        print(f"import time: 0 | 0 | {name}", file=sys.stderr)


if __name__ == "__main__":
    server = socket.socket(fileno=int(sys.argv[1]))
    sys.path[0] = str(ROOT)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a module has started threads, which a fork would lose")
    gc.freeze()  # a fork's collections would copy what it shares with the server
    runpy.run_path(serve(server)[0], run_name="__main__")
