"""Runs programs as forks of one process that has imported torch, for tests that start many ranks,
or of one that has imported what all programs need before torch, or what a rehearsal needs.

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
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import psutil

ROOT = Path(__file__).resolve().parent.parent
THREADS = {"OMP_NUM_THREADS": "1"}
# The modules that a server imports before it forks. All optimizers of torch except AdamW import
# torch._dynamo.
TORCH = ("torch._dynamo", "trainer")
REHEARSAL = ("tests.rehearsal_imports",)
NO_TORCH = ("plan", "tune", "config.validation", "distributed.context", "h5py")
SECONDS_TO_FORK = 300.0  # of a server, its imports included; a busy machine takes some twenty
SECONDS_BETWEEN_LOOKS = 0.5
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
        self._status = os.fdopen(own, "rb", buffering=0)
        # The server opens them by these paths, so that a request is a line of text.
        files = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in (out, err, theirs)]
        request = json.dumps([words, environment, str(cwd), *files]) + "\n"
        try:
            with _lock:
                self._server = _started(imports)
                with contextlib.suppress(OSError):  # it has ended, which `_forked` says
                    self._server.connection.sendall(request.encode())
                # Read before `theirs` is closed: the server has opened it by then.
                self.pid = self._forked()
        except BaseException:
            self._status.close()
            raise
        finally:
            os.close(theirs)

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

    def _forked(self) -> int:
        """Return the process id when the server has forked; RuntimeError if it ends before.

        This process has the pipe's other end too, until then: no end of file says that it ended.
        """
        until = time.monotonic() + SECONDS_TO_FORK
        ended = False
        while not select.select([self._status], [], [], SECONDS_BETWEEN_LOOKS)[0]:
            if ended:
                raise RuntimeError(self._server.death())
            ended = self._server.process.poll() is not None  # one look more: it may have written
            if time.monotonic() > until:
                self._server.process.kill()
                self._server.process.wait()
                late = f"the fork server has not forked in {SECONDS_TO_FORK:.0f} s"
                raise RuntimeError(f"{late}; {self._server.death()}")
        return int(self._line())

    def _line(self) -> str:
        """A line of the server's; RuntimeError if it has ended. The next call starts another."""
        line = self._status.readline().decode()
        if not line:
            raise RuntimeError(self._server.death())
        return line


class Server(NamedTuple):
    """A server of this process: requests go to `connection`, what it prints into `errors`."""

    connection: socket.socket
    process: subprocess.Popen
    errors: IO[bytes]

    def death(self) -> str:
        """Return the sentence of an error: how the server ended, and the end of its output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)  # the pipe's end comes before the status
        self.errors.seek(0)
        output = self.errors.read().decode(errors="replace")[-4000:]
        return f"the fork server has ended, status {self.process.returncode}: {output or 'silent'}"


_lock = threading.Lock()
_servers: dict[tuple[str, ...], Server] = {}


def _started(imports: tuple[str, ...]) -> Server:
    """This process's server of forks with these imports.

    The server is started by the first call, and again if it has died: a death fails the programs
    that ran, not those that come after it.
    """
    if imports in _servers and _servers[imports].process.poll() is None:
        return _servers[imports]
    own, theirs = socket.socketpair()
    errors = tempfile.TemporaryFile()  # noqa: SIM115 (as long as this process)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *imports],
            cwd=ROOT,
            env={**os.environ, **THREADS, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=[theirs.fileno()],
        )
    _servers[imports] = Server(own, process, errors)
    return _servers[imports]


# ---- The server's process ------------------------------------------------------------------------


def serve(connection: socket.socket) -> list[str]:
    """Fork a program for each line of the connection until it ends.

    Returns in a fork, with the program's words; it is ready to run them.
    """
    alive: dict[int, int] = {}  # pid -> where its status goes
    waker, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    received = b""
    while True:
        ready = select.select([connection, waker], [], [])[0]
        if waker in ready:
            waker.recv(4096)
            report(alive)
        if connection not in ready:
            continue
        more = connection.recv(1 << 16)
        if not more:
            end_all(list(alive))
        *requests, received = (received + more).split(b"\n")
        for request in requests:
            words, environment, cwd, *files = json.loads(request)
            out, err, status = (os.open(path, os.O_WRONLY | os.O_APPEND) for path in files)
            child = os.fork()
            if not child:
                signal.set_wakeup_fd(-1)
                for other in (connection, waker, wakes):
                    other.close()
                for other in (status, *alive.values()):
                    os.close(other)
                return become(words, environment, cwd, out, err)
            os.close(out)
            os.close(err)
            os.write(status, f"{child}\n".encode())
            alive[child] = status


def end_all(children: list[int]) -> NoReturn:
    """Kill these processes with all that they have started, and end the server."""
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(child)
            for each in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
    sys.exit()


def report(alive: dict[int, int]) -> None:
    """Write status and processor time of every child that has ended, and forget it."""
    for child in list(alive):
        ended, state, usage = os.wait4(child, os.WNOHANG)
        if ended:
            status, seconds = alive.pop(child), usage.ru_utime + usage.ru_stime
            with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
                os.write(status, f"{os.waitstatus_to_exitcode(state)} {seconds}\n".encode())
            os.close(status)


def become(
    words: list[str], environment: dict[str, str], cwd: str, out: int, err: int
) -> list[str]:
    """Make this process what the interpreter would be before the program's first line."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(cwd)  # an error from here on is printed among the program's own
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


def run(program: str) -> NoReturn:
    """Run the program in this fork, and end as the interpreter would, but for its last step.

    That takes all modules apart, and so copies what the fork shares with the server: a second of
    processor time, where a short run takes a quarter of one.
    """
    status = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and end.code is not status:
            print(end.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        sys.excepthook(*sys.exc_info())
        if isinstance(error, KeyboardInterrupt):
            status = -signal.SIGINT
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


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
    run(serve(server)[0])
