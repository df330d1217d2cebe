"""Each rank's connection to the monitor: it sends heartbeats, and ends the rank on its order.

Rank 0 starts the monitor, a process of its own (monitor.py); every rank has two connections to it
and one thread that sends a heartbeat every second, also while the main thread is inside a
collective. A rank whose Python lock (the GIL) is held, by a loop in C for example, sends none; its
stack is written into the second connection by faulthandler, which does not need the lock. A
stopped process sends nothing, and the monitor reads its state from the kernel.
"""

import contextlib
import faulthandler
import json
import os
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
from typing import IO, Any, cast

from watchdog.flight_recorder import RING, FlightRecorder, describe_place
from watchdog.handshake import Address, Process, connect

ROOT = Path(__file__).resolve().parent.parent  # the folder of the packages `watchdog`, `config`
# Not `-m watchdog.monitor`: that does not look into the current folder under PYTHONSAFEPATH.
MONITOR = "import sys; sys.path.insert(0, '.'); from watchdog import monitor; monitor.main()"
BEAT_SECONDS = 1.0  # between heartbeats
BEAT_RECORDS = 4  # of the recorder, in a heartbeat
# Heartbeats; then the monitor or its node is considered lost. The rank that started the monitor
# kills it then, before the other ranks end the job and it with them.
MAX_UNANSWERED = 30
MAX_UNANSWERED_BY_OWN = 25
EXIT_WAIT_SECONDS = 10.0  # for a rank that failed after another to be ended: the first prints
ABORT_TIMEOUT = 5.0  # for MPI to end this rank; then it exits without MPI
FRAMES = 40  # of each stack
REARM_FRACTION = 0.25  # of the timer's time: older, it is re-armed

End = Callable[[int], None]  # ends the process with a status, from any thread


def start_monitor(
    host: str, node: str, size: int, out: str, limit: float | None, key: str
) -> tuple[Address, subprocess.Popen]:
    """Start the monitor of a job on this node; returns its address and the process.

    limit: --hang-timeout in seconds; key: by which it recognises the ranks. The process gets a
    session of its own, so that it survives this rank. It opens fewer files than rank 0, which the
    job's store has checked.
    """
    listener = socket.create_server((host, 0), backlog=max(128, size))
    number = listener.fileno()
    job = {"size": size, "out": os.path.abspath(out), "limit": limit, "node": node}
    process = subprocess.Popen(
        [sys.executable, "-c", MONITOR, str(number)],
        cwd=ROOT,
        pass_fds=[number],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    with cast(IO[str], process.stdin) as stdin:
        json.dump(job | {"key": key}, stdin)
    with listener:
        return (host, listener.getsockname()[1], key), process


class Watchdog:
    """One rank's thread and connections to the monitor.

    monitor: its process, on the rank that started it, which never leaves it behind stopped.
    """

    def __init__(
        self,
        recorder: FlightRecorder,
        address: Address,
        rank: int,
        node: str,
        end: End,
        monitor: subprocess.Popen | None = None,
    ) -> None:
        """Raises OSError if the monitor cannot be reached."""
        self.recorder = recorder
        self.rank = rank
        self.node = node
        self.end = end
        self._monitor = monitor
        self._lock = threading.Lock()
        self._closing = False
        self._first: bool | None = None  # whether this rank is the first that failed
        self._answered = threading.Event()  # the monitor has answered that
        self._unanswered = 0
        self._received = b""
        self._groups, self._memory = 0, MemoryReader()  # groups reported
        self._dump_after, self._armed = 60.0, -3600.0  # faulthandler's timer, and when it was set
        # From the clock of the records to the monitor's; the fastest answer gives the best value.
        self.clock_offset = time.time() - time.monotonic()
        self.clock_error = 3600.0
        process = Process(rank, node, os.getpid(), start_time(os.getpid()) or 0)
        self._stacks = connect(address, "stacks", process)  # as a file, for faulthandler
        self._socket = connect(address, "rank", process)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    # -- for the main thread ----------------------------------------------------------------

    def fail(self, text: str, status: int) -> bool:
        """Report that this rank fails; True: it is to print the error.

        That is the first that fails; another is normally ended before this returns. status: the
        exit status for a UserError; 0 for an exception of the code, of which there is a report.
        """
        try:
            self._send({"failed": text, "exit_status": status})
        except OSError:
            return True
        self._answered.wait(EXIT_WAIT_SECONDS)
        if self._first is False:
            time.sleep(EXIT_WAIT_SECONDS)
        return self._first is not False

    def end_job(self, status: int) -> None:
        """Report that this rank ends the job on purpose: the others end too, without a report."""
        if self._leaves_first():
            with contextlib.suppress(OSError):  # without a monitor the launcher ends the others
                self._send({"ending": status})

    def end_monitor(self, seconds: float) -> None:
        """Wait for the monitor that this rank started, and kill it if it has not ended by then."""
        if self._monitor:
            try:
                self._monitor.wait(seconds)
            except subprocess.TimeoutExpired:
                self._monitor.kill()
                self._monitor.wait()

    def close(self) -> None:
        """Say goodbye: from now on the end of this rank is not a death."""
        if not self._leaves_first():
            return
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):  # the monitor has ended: there is nothing to leave
            self._send({"goodbye": True})
            self._socket.shutdown(socket.SHUT_WR)

    def _leaves_first(self) -> bool:
        """Whether this rank leaves only now; from here on the end of the monitor is not a loss.

        The monitor may end before this process does, whose status must stay its own. A stopped one
        could not end other ranks any more, and nobody else would end it.
        """
        first = not self._closing
        self._closing = True
        if self._monitor and process_state(self._monitor.pid).startswith("stopped"):
            self._monitor.kill()
        return first

    # -- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        most = MAX_UNANSWERED_BY_OWN if self._monitor else MAX_UNANSWERED
        while not self._closing:
            try:
                self._beat()
                self._listen(BEAT_SECONDS)
            except OSError as error:
                self._lost(str(error))
            if self._unanswered > most:
                self._lost(f"no answer to {most} heartbeats")

    def _beat(self) -> None:
        groups = self.recorder.groups()
        if len(groups) != self._groups:
            self._groups = len(groups)
            self._send({"groups": groups, "coordinates": self.recorder.coordinates})
        snapshot = self.recorder.snapshot(BEAT_RECORDS)
        self._unanswered += 1
        now = time.monotonic()
        self._send({"beat": snapshot, "memory": self._memory.read(), "sent": now})
        # If the lock is held, no heartbeat re-arms the timer, and it writes the stacks. Re-arming
        # ends and starts a thread, most of the cost of a heartbeat: not done in each.
        if now - self._armed > REARM_FRACTION * self._dump_after:
            faulthandler.dump_traceback_later(self._dump_after, file=self._stacks.fileno())
            self._armed = now

    def _listen(self, seconds: float) -> None:
        until, poll = time.monotonic() + seconds, select.poll()  # select takes numbers up to 1,023
        poll.register(self._socket, select.POLLIN)
        while not self._closing:
            left = until - time.monotonic()
            if left <= 0 or not poll.poll(1e3 * left):
                return
            data = self._socket.recv(1 << 16)
            if not data:
                raise OSError("it closed the connection")
            *lines, self._received = (self._received + data).split(b"\n")
            for line in lines:
                self._handle(json.loads(line))

    def _handle(self, message: dict[str, Any]) -> None:
        self._unanswered = 0
        now = time.monotonic()
        if "echo" in message:
            self._dump_after = message["dump_after"]
            if (now - message["echo"]) / 2 < self.clock_error:
                self.clock_error = (now - message["echo"]) / 2
                self.clock_offset = message["clock"] - (now + message["echo"]) / 2
        elif "first" in message:
            self._first = message["first"]
            self._answered.set()
        elif "inspect" in message:
            self._send_status(message["inspect"])
        elif "end" in message:
            for pid, started in message["kill"]:
                kill_process(pid, started)
            self._end(message["end"])

    def _send_status(self, processes: dict[str, tuple[int, int]]) -> None:
        """Stacks and records, and the state of the silent ranks' processes on this node."""
        status = {
            "snapshot": self.recorder.snapshot(RING),
            "stacks": thread_stacks(self._thread),
            "memory": self._memory.read(),
            "processes": {rank: process_state(*process) for rank, process in processes.items()},
        }
        self._send({"status": status})

    def _lost(self, why: str) -> None:
        """End: without the monitor no hang would be seen. It was killed, or its node is down."""
        if self._closing:
            return
        if self._monitor:
            self._monitor.kill()
        place = describe_place(self.recorder.snapshot(0))
        text = f"rank {self.rank} on {self.node}: lost the connection to the watchdog's monitor "
        text += f"({why}), so the node of rank 0 may be down; this rank was in {place}"
        with contextlib.suppress(OSError):  # a launcher that has ended reads nothing
            print(text, file=sys.stderr, flush=True)
        self._end(1)

    def _end(self, status: int) -> None:
        """End the process; if `end` takes long, faulthandler does, which does not need the lock."""
        with open(os.devnull, "w") as nowhere:
            faulthandler.dump_traceback_later(ABORT_TIMEOUT, exit=True, file=nowhere)
            self.end(status)

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._socket.sendall(encode(message))


def encode(message: dict[str, Any]) -> bytes:
    """A message between ranks and monitor: a line of JSON."""
    return json.dumps(message).encode() + b"\n"


def thread_stacks(skip: threading.Thread) -> dict[str, list[str]]:
    """Every thread's Python stack but that one's, innermost frame first; the main thread first."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()} | {main: "main"}
    stacks = {}
    for ident in sorted(frames, key=lambda ident: ident != main):
        if ident != skip.ident:
            stack = traceback.extract_stack(frames[ident])[-FRAMES:]
            lines = [f"{f.filename}:{f.lineno} in {f.name}: {f.line}" for f in reversed(stack)]
            stacks[names.get(ident, f"thread {ident}")] = lines
    return stacks


class MemoryReader:
    """Reads the memory of this process and its node; open files make that five times as fast."""

    def __init__(self) -> None:
        self._own = os.open("/proc/self/statm", os.O_RDONLY)
        self._node = os.open("/proc/meminfo", os.O_RDONLY)

    def read(self) -> dict[str, int]:
        """Bytes: resident of this process, and available on its node."""
        pages = int(os.pread(self._own, 100, 0).split()[1])
        words = os.pread(self._node, 200, 0).split()  # MemTotal: n kB MemFree: n kB MemAvailable:
        available = 1024 * int(words[7]) if words[6:7] == [b"MemAvailable:"] else 0
        return {"resident": pages * os.sysconf("SC_PAGE_SIZE"), "available": available}


def start_time(pid: int) -> int | None:
    """When a process began, in ticks since boot (process ids are used again); None: no process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def process_state(pid: int, started: int | None = None) -> str:
    """The kernel's state of a process: running, asleep, stopped, ..., or gone.

    started: when it began, unless it cannot be another's by now: a child of this process.
    """
    fields = _stat(pid)
    if not fields or (started is not None and int(fields[19]) != started):
        return "gone"
    names = {"R": "running", "S": "asleep", "D": "in uninterruptible sleep (disk, device)"}
    names |= {"T": "stopped", "t": "stopped by a debugger", "Z": "dead", "X": "dead"}
    return names.get(fields[0], f"in state {fields[0]}")


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name, the state first; None: no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def kill_process(pid: int, started: int) -> None:
    """SIGKILL that process if it still runs, and is this user's."""
    with contextlib.suppress(OSError):  # it has ended in the meantime
        if start_time(pid) == started and os.stat(f"/proc/{pid}").st_uid == os.getuid():
            os.kill(pid, signal.SIGKILL)
