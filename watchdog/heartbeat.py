"""Each rank's end of the watchdog: tells the monitor how it goes, and ends when told to.

    rank 0      starts the monitor, a process of its own (monitor.py), and tells all its address
    every rank  two connections to it and one thread: a beat every second, with where it stands
    monitor     sees a dead rank by its closed connection, a hang by beats without progress;
                asks all for their stacks, says who is the cause, ends the job

The thread runs while the main thread is inside a collective, for waits release Python's lock. A
rank whose lock is held, by a loop in C say, sends no beats; its stack comes all the same, written
into the second connection by faulthandler, which needs no lock. A stopped process sends nothing:
that is what gives it away. Nothing here uses torch, its store, or a collective.
"""

import contextlib
import faulthandler
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config.messages import UserError
from watchdog.flight_recorder import RING, FlightRecorder

ROOT = Path(__file__).resolve().parent.parent  # from which the monitor imports its modules
BEAT = 1.0  # seconds between beats
RECORDS_IN_A_BEAT = 4
# A monitor that has not answered so many beats is lost, and its node with it.
UNANSWERED_BEATS = 30
SECONDS_TO_CONNECT = 60.0
CONNECTIONS, OTHER_FILES = 2, 32  # of the monitor: for each rank, and for itself
# A rank that failed because another did waits so long to be ended, so that the cause comes first.
SECONDS_TO_BE_ENDED = 10.0
# A rank that MPI cannot end by then leaves without it.
SECONDS_TO_ABORT = 5.0
FRAMES = 40  # of each stack
# The timer that writes a silent rank's stack is put off when that part of it has passed.
SILENCE_PASSED = 0.25


def start_monitor(
    host: str, node: str, size: int, out: str, limit: float | None
) -> tuple[tuple[str, int, str], subprocess.Popen]:
    """Start the monitor of a job on this node: its address and password, and the process.

    It is in a session of its own, so that what kills this rank leaves it to tell the tale. Raises
    UserError if it may not have so many files open as it has connections.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = CONNECTIONS * size + OTHER_FILES
    if most != resource.RLIM_INFINITY and most < needed:
        raise UserError(
            f"the watchdog needs {needed:,} open files on {node} for {size:,} ranks, and the limit "
            f"there is {most:,} (ulimit -Hn): have it raised, or train with --no-watchdog"
        )
    listener = socket.create_server((host, 0), backlog=max(128, size))
    token = os.urandom(8).hex()
    number = listener.fileno()
    facts = {"size": size, "out": os.path.abspath(out), "limit": limit, "token": token}
    facts["node"] = node
    process = subprocess.Popen(
        [sys.executable, "-m", "watchdog.monitor", str(number)],
        cwd=ROOT,
        pass_fds=[number],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    process.stdin.write(json.dumps(facts))
    process.stdin.close()
    address = (host, listener.getsockname()[1], token)
    listener.close()
    return address, process


class Watchdog:
    """One rank's thread and connections. `end(status)` must end the process, from any thread."""

    def __init__(
        self,
        recorder: FlightRecorder,
        address: tuple[str, int, str],
        rank: int,
        node: str,
        end: Callable[[int], None],
    ):
        """Raises OSError if the monitor cannot be reached."""
        self.recorder, self.rank, self.node, self.end = recorder, rank, node, end
        host, port, token = address
        self._lock, self._closing = threading.Lock(), False
        self._first: bool | None = None
        self._answered = threading.Event()
        self._unanswered, self._silence, self._received = 0, 60.0, b""
        self._groups: list = []
        self._memory, self._armed = Memory(), -3600.0  # when it was set to write a silent stack
        # Between the clock of the records and the monitor's: known best by the shortest answer.
        self.clock_offset, self.clock_error = time.time() - time.monotonic(), 3600.0
        self._stacks = socket.create_connection((host, port), SECONDS_TO_CONNECT)
        self._stacks.sendall(_line({"stacks": rank, "token": token}))
        self._stacks.settimeout(None)  # faulthandler writes to it as to a file
        self._socket = socket.create_connection((host, port), SECONDS_TO_CONNECT)
        pid, started = os.getpid(), start_of(os.getpid())
        self._send({"hello": rank, "node": node, "pid": pid, "started": started, "token": token})
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    # -- for the main thread ----------------------------------------------------------------

    def fail(self, text: str, mistake: bool) -> bool:
        """Tell that this rank fails; whether it is the first, and so the one to say why.

        One that is not is ended meanwhile, if all goes well.
        """
        try:
            self._send({"failed": text, "mistake": mistake})
        except OSError:
            return True
        self._answered.wait(SECONDS_TO_BE_ENDED)
        if self._first is None:
            return True
        if not self._first:
            time.sleep(SECONDS_TO_BE_ENDED)
        return self._first

    def end_job(self, status: int) -> None:
        """Tell that this rank ends the job on purpose: the others are to end too, unexamined."""
        if not self._closing:
            with contextlib.suppress(OSError):  # without a monitor the launcher ends the others
                self._send({"ending": status})

    def close(self) -> None:
        """Leave in order: from now on nobody misses this rank."""
        if self._closing:
            return
        self._closing = True
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):  # the monitor is gone: there is nobody left to tell
            self._send({"bye": True})
            self._socket.shutdown(socket.SHUT_WR)

    # -- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                self._beat()
                self._listen(BEAT)
            except OSError as error:
                self._lost(str(error))
            if self._unanswered > UNANSWERED_BEATS:
                self._lost(f"it has not answered {UNANSWERED_BEATS} beats")

    def _beat(self) -> None:
        groups = self.recorder.groups()
        if len(groups) != len(self._groups):
            self._groups = groups
            self._send({"groups": groups, "coordinates": self.recorder.coordinates})
        snapshot = self.recorder.snapshot(RECORDS_IN_A_BEAT)
        self._unanswered += 1
        now = time.monotonic()
        self._send({"beat": snapshot, "memory": self._memory.read(), "sent": now})
        # If no beat comes to put it off, the lock is held: then this writes without it. Not put
        # off at each beat: a thread ends and another begins, which costs more than all else here.
        if now - self._armed > SILENCE_PASSED * self._silence:
            faulthandler.dump_traceback_later(self._silence, file=self._stacks.fileno())
            self._armed = now

    def _listen(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._closing:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._socket], [], [], left)[0]:
                return
            data = self._socket.recv(1 << 16)
            if not data:
                raise OSError("it closed the connection")
            *lines, self._received = (self._received + data).split(b"\n")
            for line in lines:
                self._answer(json.loads(line))

    def _answer(self, message: dict[str, Any]) -> None:
        self._unanswered, now = 0, time.monotonic()
        if "heard" in message:
            self._silence = message["silence"]
            if (now - message["heard"]) / 2 < self.clock_error:
                self.clock_error = (now - message["heard"]) / 2
                self.clock_offset = message["clock"] - (now + message["heard"]) / 2
        elif "first" in message:
            self._first = message["first"]
            self._answered.set()
        elif "look" in message:
            self._tell_all(message["look"])
        elif "end" in message:
            for pid, started in message["kill"]:
                kill(pid, started)
            self._leave(message["end"])

    def _tell_all(self, look: dict[str, tuple[int, int]]) -> None:
        """Stacks and records, and how silent processes of this node are doing."""
        status = {
            "snapshot": self.recorder.snapshot(RING),
            "stacks": stacks(self._thread),
            "memory": self._memory.read(),
            "processes": {rank: process_state(*process) for rank, process in look.items()},
        }
        self._send({"status": status})

    def _lost(self, why: str) -> None:
        """Without the monitor nobody would see a hang: its node is gone, or somebody killed it."""
        if self._closing:
            return
        print(
            f"rank {self.rank} on {self.node}: the watchdog's monitor is lost ({why}), so the node "
            f"of rank 0 may be gone; this rank was in {standing(self.recorder.snapshot(0))}",
            file=sys.stderr,
            flush=True,
        )
        self._leave(1)

    def _leave(self, status: int) -> None:
        """End, by faulthandler if the orderly way takes long: it needs no lock."""
        with open(os.devnull, "w") as nowhere:
            faulthandler.dump_traceback_later(SECONDS_TO_ABORT, exit=True, file=nowhere)
            self.end(status)

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._socket.sendall(_line(message))


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def standing(snapshot: dict[str, Any]) -> str:
    """Where a snapshot stands, in words: `step 7, F of micro-batch 3`."""
    action, phase = snapshot["action"], snapshot["phase"]
    words = [f"step {snapshot['step']}"] if snapshot["step"] else []
    words += [phase] if phase not in ("train", action) else []
    batch = snapshot["micro_batch"]
    return ", ".join([*words, action if batch is None else f"{action} of micro-batch {batch}"])


# ------------------------------------------------------------------------------------------------
# What a process can tell of itself and of its neighbours
# ------------------------------------------------------------------------------------------------


def stacks(but: threading.Thread) -> dict[str, list[str]]:
    """Every thread's Python stack but that one's, innermost frame first; the main thread first."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    told = {}
    for ident in sorted(frames, key=lambda ident: ident != main):
        if ident == but.ident:
            continue
        stack = traceback.extract_stack(frames[ident])[-FRAMES:]
        name = "main" if ident == main else names.get(ident, f"thread {ident}")
        told[name] = [f"{f.filename}:{f.lineno} in {f.name}: {f.line}" for f in reversed(stack)]
    return told


class Memory:
    """Reads the memory of this process and its node, from files kept open: a fifth of the time."""

    def __init__(self):
        self._own, self._all = (
            os.open(path, os.O_RDONLY) for path in ("/proc/self/statm", "/proc/meminfo")
        )

    def read(self) -> dict[str, int]:
        """Bytes: resident of this process, and available on its node."""
        pages = int(os.pread(self._own, 100, 0).split()[1])
        told = os.pread(self._all, 200, 0).split()  # MemTotal: n kB MemFree: n kB MemAvailable: ...
        available = 1024 * int(told[7]) if told[6:7] == [b"MemAvailable:"] else 0
        return {"resident": pages * os.sysconf("SC_PAGE_SIZE"), "available": available}


def start_of(pid: int) -> int | None:
    """When a process began, in ticks since boot: with its id it names it for good. None if gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def process_state(pid: int, started: int) -> str:
    """What the node's kernel says of a process: running, asleep, stopped, ..., or gone."""
    fields = _stat(pid)
    if not fields or int(fields[19]) != started:
        return "gone"
    names = {"R": "running", "S": "asleep", "D": "in uninterruptible sleep (disk, device)"}
    names |= {"T": "stopped", "t": "stopped by a debugger", "Z": "dead", "X": "dead"}
    return names.get(fields[0], f"in state {fields[0]}")


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind the name, the state first; None if there is no such."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def kill(pid: int, started: int) -> None:
    """SIGKILL that very process if it is still there."""
    if start_of(pid) == started:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # it went by itself in between
