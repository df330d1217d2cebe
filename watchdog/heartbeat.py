"""Each rank's side of the watchdog: it sends heartbeats, and ends the rank if the monitor says so.

Rank 0 starts the monitor, a separate process (monitor.py). Every rank has two connections to the
monitor and one thread that sends a heartbeat every second, also while the main thread is inside a
collective. If Python's lock (the GIL) is held, for example by a loop in C, the rank sends no
heartbeat; faulthandler, which does not need the lock, then writes the rank's stack into the second
connection. A stopped process sends nothing, and the monitor reads its state from the kernel. Read
flight_recorder.py first.

A message is a line of JSON. A rank sends "beat" (a heartbeat), "groups", "status" (the answer to
"inspect"), "say" (a line to print), "failed", "ending" (the rank ends the job on purpose) or
"goodbye" (the rank leaves, and its end is no death). The monitor sends "echo", "first", "inspect"
and "end" (`Watchdog._handle`).
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, cast

from base.module_program import module_program
from watchdog.flight_recorder import RING, FlightRecorder, describe_place
from watchdog.handshake import Address, Process, connect

ROOT = Path(__file__).resolve().parent.parent  # the folder of the packages `watchdog`, `config`
BEAT_SECONDS = 1.0  # seconds between two heartbeats
BEAT_RECORDS = 4  # the recorder's last records that a heartbeat contains
# After this number of heartbeats without an answer, a rank considers the monitor or its node lost:
# or after --hang-timeout, if that is longer. The network of the hosts may be gone for a minute, as
# when a switch starts again, while the GPUs' network goes on.
MAX_UNANSWERED = 120
# The rank that started the monitor counts fewer, so that it can kill the monitor before other ranks
# end the whole job.
FEWER_BY_OWN = 5
# Seconds that a failed rank waits for the monitor's answer. If another rank failed first, this rank
# waits as long again until the monitor ends it: only the first failed rank prints its error.
EXIT_WAIT_SECONDS = 10.0
ABORT_TIMEOUT = 5.0  # if MPI has not ended this process after these seconds, faulthandler does
FRAMES = 40  # the most frames that are sent of each stack
REARM_FRACTION = 0.25  # faulthandler's timer is set again after this fraction of its time

# A function that ends this process with a status, and under MPI all ranks; from any thread.
End = Callable[[int], None]


def start_monitor(
    host: str,
    node: str,
    size: int,
    out: str,
    limit: float | None,
    key: str,
) -> tuple[Address, subprocess.Popen]:
    """Start the monitor of a job on this node; return its address and its process.

    Called by rank 0. host: the address at which the ranks reach this node. size: the number of
    ranks. limit: --hang-timeout in seconds. key: the secret by which the monitor recognises the
    ranks. The process gets a new session, so that it survives this rank. It needs fewer open files
    than rank 0, whose limit store.py has checked.
    """
    listener = socket.create_server((host, 0), backlog=max(128, size))
    number = listener.fileno()
    job = {"size": size, "out": os.path.abspath(out), "limit": limit, "node": node}
    program = module_program(f"{__package__}.monitor", __file__)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(number)],
        cwd=ROOT,
        pass_fds=[number],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    with cast(IO[str], process.stdin) as stdin:
        json.dump(job | {"key": key}, stdin)
    # The monitor has inherited the listening socket; this process closes its own copy.
    with listener:
        return (host, listener.getsockname()[1], key), process


class Watchdog:
    """One rank's connections to the monitor, and the thread that uses them.

    end: ends this process, and under MPI all ranks, with a status. monitor: the monitor's process,
    on the rank that started it. That rank kills a stopped monitor before it leaves the job.
    ranks_here: the processes (id, start) of the other ranks on this node. If the monitor asks this
    rank to kill a process, it kills only one of these, and only if that process is connected to the
    same monitor.
    """

    def __init__(
        self,
        recorder: FlightRecorder,
        address: Address,
        rank: int,
        node: str,
        end: End,
        monitor: subprocess.Popen | None = None,
        ranks_here: Iterable[tuple[int, int]] = (),
        limit: float | None = None,
    ) -> None:
        """Connect to the monitor and start the thread; raise OSError if it cannot be reached.

        limit: --hang-timeout in seconds; None: the monitor chooses it.
        """
        self.recorder = recorder
        self.rank = rank
        self.node = node
        self.end = end
        self._address = address
        self._ranks_here = {tuple(process) for process in ranks_here}
        self._monitor = monitor  # the monitor's process, on the rank that started it
        self._lock = threading.Lock()  # one message at a time is sent
        self._closing = False  # whether this rank has left the job (`_leaves_first`)
        self._first: bool | None = None  # the monitor's answer: whether this rank failed first
        self._answered = threading.Event()  # set when `_first` has arrived
        # The heartbeats without an answer after which the monitor is lost.
        self._most_unanswered = max(MAX_UNANSWERED, int((limit or 0.0) / BEAT_SECONDS))
        if monitor:
            self._most_unanswered -= FEWER_BY_OWN
        self._unanswered = 0  # heartbeats since the last message of the monitor
        self._received = b""  # the beginning of a message that has not arrived completely
        self._groups = 0  # the number of groups that were reported to the monitor
        self._memory = MemoryReader()
        # faulthandler writes the stacks if its timer is not set again within `_dump_after` seconds.
        # The timer was last set at `_armed`: long ago, so that the first heartbeat sets it.
        self._dump_after = 60.0
        self._armed = -3600.0
        # time.monotonic() + clock_offset is the time of the monitor's clock, wrong by at most
        # clock_error seconds. The heartbeat with the fastest answer gives the best value. Until an
        # answer comes, this rank's own clock is taken, with an error of an hour.
        self.clock_offset = time.time() - time.monotonic()
        self.clock_error = 3600.0
        process = Process(rank, node, os.getpid(), start_time(os.getpid()) or 0)
        self._stacks = connect(address, "stacks", process)  # faulthandler writes into this socket
        self._socket = connect(address, "rank", process)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    # -- for the main thread ----------------------------------------------------------------

    def fail(self, text: str, status: int) -> bool:
        """Report to the monitor that this rank fails; return whether this rank prints its error.

        Only the first rank that fails prints; the monitor normally ends the others before this
        returns. text: the traceback. status: the exit status for a UserError; 0 for an exception of
        the code, for which the monitor writes a report.
        """
        try:
            self._send({"failed": text, "exit_status": status})
        except OSError:  # there is no monitor any more
            return True
        # The thread puts the monitor's answer into `_first`: whether this rank failed first.
        self._answered.wait(EXIT_WAIT_SECONDS)
        if self._first is False:  # the monitor ends this process during this sleep
            time.sleep(EXIT_WAIT_SECONDS)
        return self._first is not False  # if the monitor has not answered (None), print too

    def say(self, line: str, about: str) -> bool:
        """Have the monitor print a line, unless another rank's line about the same was printed.

        Return whether the monitor was told. May be called from any thread.
        """
        try:
            self._send({"say": line, "about": about})
        except OSError:  # there is no monitor any more
            return False
        return True

    def end_job(self, status: int) -> None:
        """Tell the monitor that this rank ends the job: it ends the other ranks, with no report."""
        if self._leaves_first():
            with contextlib.suppress(OSError):  # without a monitor the launcher ends the others
                self._send({"ending": status})

    def end_monitor(self, seconds: float) -> None:
        """Wait for the monitor that this rank started; kill the monitor after `seconds`."""
        if self._monitor:
            try:
                self._monitor.wait(seconds)
            except subprocess.TimeoutExpired:
                self._monitor.kill()
                self._monitor.wait()

    def close(self) -> None:
        """Deregister from the monitor: from now on the end of this rank is not a death."""
        if not self._leaves_first():  # `close` or `end_job` was called before
            return
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):  # the monitor may have ended already
            self._send({"goodbye": True})
            self._socket.shutdown(socket.SHUT_WR)  # nothing follows: the monitor reads the end

    def _leaves_first(self) -> bool:
        """Note that this rank leaves the job; return whether this is the first call.

        Called by `close` and `end_job`. From here on the end of the monitor is no error: the
        monitor may end before this process, and must not change its exit status. If this rank
        started the monitor and somebody has stopped it (SIGSTOP), the monitor is killed: it could
        not end other ranks any more, and no other process would end it.
        """
        first = not self._closing
        self._closing = True
        if self._monitor and process_state(self._monitor.pid).startswith("stopped"):
            self._monitor.kill()
        return first

    # -- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        """Send heartbeats and handle messages until the rank leaves the job; run by the thread."""
        while not self._closing:
            try:
                self._beat()
                self._listen(BEAT_SECONDS)
            except OSError as error:
                self._lost(str(error))
            if self._unanswered > self._most_unanswered:
                self._lost(f"no answer to {self._most_unanswered} heartbeats")

    def _beat(self) -> None:
        """Send a heartbeat, and set faulthandler's timer again; called every BEAT_SECONDS.

        The rank's groups are sent too, if there are new groups. Raise OSError if the monitor is
        gone.
        """
        groups = self.recorder.groups()
        if len(groups) != self._groups:
            self._groups = len(groups)
            self._send({"groups": groups, "coordinates": self.recorder.coordinates})
        snapshot = self.recorder.snapshot(BEAT_RECORDS)
        self._unanswered += 1
        now = time.monotonic()
        self._send({"beat": snapshot, "memory": self._memory.read(), "sent": now})
        # If Python's lock is held, no heartbeat sets the timer again, and faulthandler writes the
        # stacks when the timer ends. To set the timer ends one thread and starts another, which is
        # most of the cost of a heartbeat, so not every heartbeat sets the timer.
        if now - self._armed > REARM_FRACTION * self._dump_after:
            faulthandler.dump_traceback_later(self._dump_after, file=self._stacks.fileno())
            self._armed = now

    def _listen(self, seconds: float) -> None:
        """Handle the monitor's messages for `seconds` seconds; raise OSError if it is gone.

        The watchdog's thread calls this between two heartbeats.
        """
        # select would fail for descriptors above 1,023, poll does not.
        until = time.monotonic() + seconds
        poll = select.poll()
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
        """Do what a message of the monitor asks for.

        "echo": the answer to a heartbeat, with the time at which the heartbeat was sent, the
        monitor's clock, and faulthandler's time. "first": whether this rank failed first.
        "inspect": send stacks and records. "end": kill the processes in "kill", which do not react
        any more, and end this process.
        """
        self._unanswered = 0
        now = time.monotonic()
        if "echo" in message:
            self._dump_after = message["dump_after"]
            # The monitor read its clock between the heartbeat and its answer. The middle of the two
            # times is taken, which is wrong by at most half of the time between them. So the
            # fastest answer gives the best offset.
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
                self._kill(pid, started)
            self._end(message["end"])

    def _kill(self, pid: int, started: int) -> None:
        """Kill the process of another rank on this node; refuse any other process.

        Whatever the monitor says: the process must be one that the ranks have named to each other
        when they met, and must have a connection to this rank's monitor, as every rank has.
        """
        host, port, _ = self._address
        if (pid, started) in self._ranks_here:
            if is_connected(pid, host, port):
                kill_process(pid, started)
        else:
            text = (
                f"rank {self.rank} on {self.node}: the monitor asked for the end of process {pid}, "
            )
            text += "which is no rank of this job: it is left alone"
            with contextlib.suppress(OSError):  # nobody reads the output
                print(text, file=sys.stderr, flush=True)

    def _send_status(self, processes: dict[str, tuple[int, int]]) -> None:
        """Answer "inspect": send this rank's stacks and records to the monitor.

        processes: (process id, start) of other ranks on this node that send no heartbeats, by rank.
        This rank reads the state of their processes from the kernel for the monitor.
        """
        status = {
            "snapshot": self.recorder.snapshot(RING),
            "stacks": thread_stacks(self._thread),
            "memory": self._memory.read(),
            "processes": {rank: process_state(*process) for rank, process in processes.items()},
        }
        self._send({"status": status})

    def _lost(self, why: str) -> None:
        """End the job because the monitor is lost: it was killed, or its node is down.

        Without the monitor no hang would be found. why: how the loss was noticed, for the message.
        """
        if self._closing:  # this rank has left the job: the monitor may end now
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
        """End this process with `end`; if `end` hangs, faulthandler ends it after ABORT_TIMEOUT.

        `end` calls MPI_Abort, which may hang. faulthandler's timer needs neither MPI nor Python's
        lock: it writes the stacks, here to nowhere, and exits.
        """
        with open(os.devnull, "w") as nowhere:
            faulthandler.dump_traceback_later(ABORT_TIMEOUT, exit=True, file=nowhere)
            self.end(status)

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message to the monitor, from any thread; raise OSError if the monitor is gone."""
        with self._lock:
            self._socket.sendall(encode(message))


def encode(message: dict[str, Any]) -> bytes:
    """Return a message between a rank and the monitor as bytes: one line of JSON."""
    return json.dumps(message).encode() + b"\n"


def thread_stacks(skip: threading.Thread) -> dict[str, list[str]]:
    """Return the Python stacks of all threads except `skip`, by the thread's name.

    The main thread ("main") comes first. A stack is a list of lines, the innermost frame first.
    """
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
    """Reads the memory of this process and of its node, for the heartbeats.

    The files stay open, which makes a reading 5x faster. psutil could read the memory too, but
    early_end.py imports this file where there are no packages.
    """

    def __init__(self) -> None:
        """Open the kernel's files on the memory of this process and of the node."""
        self._own = os.open("/proc/self/statm", os.O_RDONLY)
        self._node = os.open("/proc/meminfo", os.O_RDONLY)

    def read(self) -> dict[str, int]:
        """Return the bytes that are resident in this process, and available on its node."""
        # The second word of /proc/self/statm is the number of this process's resident pages.
        pages = int(os.pread(self._own, 100, 0).split()[1])
        # /proc/meminfo begins: MemTotal: n kB MemFree: n kB MemAvailable: n kB. Counted from 0,
        # word 6 is "MemAvailable:" and word 7 its number.
        words = os.pread(self._node, 200, 0).split()
        available = 1024 * int(words[7]) if words[6:7] == [b"MemAvailable:"] else 0
        return {"resident": pages * os.sysconf("SC_PAGE_SIZE"), "available": available}


def start_time(pid: int) -> int | None:
    """Return the time at which a process began, in ticks since boot; None if there is no process.

    The kernel gives the id of an ended process to a new process later, so an id alone could name
    another process; the id and the start together cannot.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def process_state(pid: int, started: int | None = None) -> str:
    """Return the kernel's state of a process: running, asleep, stopped, ..., or gone.

    started: when the process began, to see whether the id belongs to another process by now. It is
    not needed for a child of this process, whose id is not used again before the child is reaped.
    """
    fields = _stat(pid)
    if not fields or (started is not None and int(fields[19]) != started):
        return "gone"
    names = {"R": "running", "S": "asleep", "D": "in uninterruptible sleep (disk, device)"}
    names |= {"T": "stopped", "t": "stopped by a debugger", "Z": "dead", "X": "dead"}
    return names.get(fields[0], f"in state {fields[0]}")


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the process's name, or None if it has ended.

    Field 0 is the kernel's state of the process, field 19 its start in ticks since boot.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def is_connected(pid: int, host: str, port: int) -> bool:
    """Return whether a process of this node has a TCP connection to host:port (IPv4).

    host: an address in numbers. The kernel lists the process's connections; if it has ended or
    belongs to another user, the answer is False.
    """
    with contextlib.suppress(OSError):
        # The kernel writes an address as the number, in hexadecimal, that its bytes are here.
        number = int.from_bytes(socket.inet_aton(host), sys.byteorder)
        remote = f"{number:08X}:{port:04X}"
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        # A row: number, local address, remote address, ..., inode of the socket.
        inodes = {row[9] for row in rows if row[2] == remote}
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # it has closed this one meanwhile
                if os.readlink(entry.path).removeprefix("socket:[").rstrip("]") in inodes:
                    return True
    return False


def kill_process(pid: int, started: int) -> None:
    """Kill the process (SIGKILL) if it still runs and belongs to this user.

    started: the time of `start_time`, so that no other process with the same id is killed.
    """
    with contextlib.suppress(OSError):  # the process may have ended by now
        if start_time(pid) == started and os.stat(f"/proc/{pid}").st_uid == os.getuid():
            os.kill(pid, signal.SIGKILL)
