"""The watchdog's monitor: one process beside rank 0 that watches all ranks and ends a stuck job.

heartbeat.start_monitor starts it on rank 0; read heartbeat.py first. It looks for these cases:

    dead      a rank's connection closes without a goodbye; the first dead rank is the cause
    failed    a rank reports an exception; only the first rank that failed prints its error
    hang      a rank makes no progress for too long, and not because it waits for moving ranks
    missing   some ranks have not connected in time

Then it prints the cause, writes OUT/hang with every rank's stacks and records (hang_report.py), and
ends all ranks. Each rank has two connections: for messages (lines of JSON; a heartbeat brings the
rank's progress), and for the stacks that faulthandler writes.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from watchdog import hang_report
from watchdog.handshake import Entrance, Process, receive_all
from watchdog.hang_report import JobFailure, Ranks, WaitGraph, find_culprits
from watchdog.heartbeat import encode, is_connected, kill_process, process_state

# --hang-timeout by default: MIN_HANG_TIMEOUT seconds or MEDIAN_STEPS median steps, the longer.
MIN_HANG_TIMEOUT = 300.0
MEDIAN_STEPS = 10.0
# During the first STARTUP_STEPS steps data and checkpoints are read and kernels are built: the
# limit is STARTUP_FACTOR times longer then, and at least STARTUP_SECONDS.
STARTUP_STEPS = 2
STARTUP_FACTOR = 4.0
STARTUP_SECONDS = 120.0
POLL_SECONDS = 0.25  # seconds between two searches for a case
FIRST_RANK_TIMEOUT = 60.0  # if no rank connects within these seconds, the monitor ends
ALL_RANKS_TIMEOUT = 900.0  # all ranks must connect within these seconds
FAILURE_DELAY = 1.0  # seconds from a failure to its case: a death may have caused the failure
GOODBYE_TIMEOUT = 1.0  # seconds in which a goodbye may follow the end of a connection for stacks
PRINT_TIMEOUT = 2.0  # the first rank that failed may print its error for these seconds
STATUS_TIMEOUT = 4.0  # the most seconds between the answers of two ranks to "inspect"
WRITE_TIMEOUT = 10.0  # seconds to print and write the report: the file system may hang
FLUSH_SECONDS = 0.5  # mpirun needs these seconds to pass on printed lines before the ranks end
EXIT_TIMEOUT = 8.0  # ranks that have not ended after these seconds are killed
SUSPENDED_SECONDS = 2.0  # a round of the loop that takes longer shows a suspended monitor
QUIET_SECONDS = 3.0  # a rank without a heartbeat for these seconds is quiet
RAW_BYTES = 1 << 16  # the number of bytes that are kept of faulthandler's output, the newest ones
MAX_LINE = 1 << 25  # the most bytes of a message; a rank's records take 1.5 MB with 1,024 ranks


@dataclass(frozen=True)
class WatchedJob:
    """The job that is watched, as start_monitor describes it.

    size: the number of ranks. node: the monitor's node. out: the run's --out, or empty. limit:
    --hang-timeout in seconds; None: MIN_HANG_TIMEOUT and MEDIAN_STEPS decide. key: the secret.
    """

    size: int
    node: str
    out: str
    limit: float | None
    key: str


@dataclass
class Rank:
    """The monitor's knowledge of one rank: its connection, last messages, state and stacks."""

    rank: int
    heard: float  # monotonic time of its last message
    moved: float  # monotonic time at which its progress last grew
    node: str = ""
    pid: int = 0
    started: int = 0  # when its process began, in ticks since the node's boot
    # Whether it is on the monitor's node and the kernel says that this process is connected to the
    # monitor: only then the monitor kills it.
    connected_here: bool = False
    connection: socket.socket | None = None  # for messages
    groups: list[tuple[str, list[int]]] = field(default_factory=list)  # role and members of each
    coordinates: dict[str, int] = field(default_factory=dict)  # its position on each mesh axis
    snapshot: dict[str, Any] | None = None  # FlightRecorder.snapshot, from the newest message
    memory: dict[str, int] | None = None  # MemoryReader.read, from the newest heartbeat
    state: str = "alive"  # or failed (it sent its error), left (a goodbye), gone (it is dead)
    error: str | None = None  # the traceback that it sent, or why its message was not understood
    exit_status: int = 0  # the status of its UserError; 0 for an exception of the code
    status: dict[str, Any] | None = None  # its answer to "inspect"; None until the answer arrives
    process: str | None = None  # the kernel's state of its process, if that was read
    raw: bytes = b""  # the newest stacks that faulthandler wrote
    received: bytes = b""  # the beginning of a message that has not arrived completely

    @property
    def descriptor(self) -> int:
        """The descriptor of its connection for messages; -1 before it is made and once closed."""
        return self.connection.fileno() if self.connection else -1

    def to_dict(self, now: float) -> dict[str, Any]:
        """Return plain values for the report and its files; times become seconds before `now`."""
        status = self.status or {}
        state = self.state
        if state == "alive":  # for a living rank the report says whether it answered "inspect"
            state = "answered" if status else "silent"
        return {
            "rank": self.rank,
            "node": self.node,
            "pid": self.pid,
            "coordinates": self.coordinates,
            "state": state,
            "process": self.process,
            "error": self.error,
            "heard": round(now - self.heard, 3),  # since the rank's last message
            "still": round(now - self.moved, 3),  # since the rank's last progress
            "memory": status.get("memory") or self.memory,
            "groups": self.groups,
            "snapshot": status.get("snapshot") or self.snapshot,
            "stacks": status.get("stacks") or {},
            "raw": self.raw.decode(errors="replace"),
        }


@dataclass
class Connection:
    """One of a rank's two connections: for messages, or for faulthandler's stacks."""

    sock: socket.socket
    rank: Rank
    stacks: bool  # whether this is the connection for stacks


class Monitor:
    """Watches the ranks of one job until all have left, or until it has ended them."""

    def __init__(self, listener: socket.socket, job: WatchedJob):
        """Accept the ranks' connections on `listener` from now on; `run` then watches the ranks."""
        self.job = job
        self.limit = job.limit or MIN_HANG_TIMEOUT  # seconds without progress that are a hang
        self.ranks: dict[int, Rank] = {}
        self.closed: list[tuple[Rank, float]] = []  # ranks whose connection ended, and when
        self.dead: list[int] = []  # ranks in the order of their deaths
        self.failures: list[tuple[int, float]] = []  # ranks that reported a failure, and when
        self.first: Rank | None = None  # the first rank that failed, once it may print its error
        self.said: set[str] = set()  # what the printed lines of ranks were about
        self.left: set[int] = set()  # ranks that said goodbye
        self.ending: int | None = None  # the status with which a rank ends the job on purpose
        self.began = self.checked = time.monotonic()  # checked: the last search for a hang
        self.poll = select.epoll()
        self.listening = listener.fileno()
        self.address: tuple[str, int] = listener.getsockname()
        self.entrance = Entrance(listener, job.size, job.key, self.poll)
        self.connections: dict[int, Connection] = {}  # by descriptor

    def run(self) -> None:
        """Watch the ranks; return when the job is over."""
        before = time.monotonic()
        while True:
            self._receive()
            now = time.monotonic()
            if now - before > SUSPENDED_SECONDS:  # this process and perhaps all ranks stood still:
                for rank in self.ranks.values():  # that time counts neither as silence nor as hang
                    rank.heard += now - before
                    rank.moved += now - before
            before = now
            absent = not self.ranks and now - self.began > FIRST_RANK_TIMEOUT
            if absent or (self.ranks and len(self.left) == len(self.ranks)):
                return
            if self.ending is not None:
                return self._end_ranks(self.ending, [])
            if case := self._find_case(now):
                if case := self._ask_ranks(case):
                    return self._close(case)
                before = time.monotonic()  # no hang; the time to ask must not look like suspension

    # -- messages ---------------------------------------------------------------------------

    def _receive(self) -> None:
        """Handle the messages, new connections and deaths that arrive within POLL_SECONDS."""
        # epoll returns descriptors in the order of their events. The sort puts the connections for
        # stacks first, in that order: their ends are the deaths, which `closed` lists by time.
        numbers = [number for number, _ in self.poll.poll(POLL_SECONDS)]
        stacks = {n for n in numbers if n in self.connections and self.connections[n].stacks}
        for number in sorted(numbers, key=lambda number: number not in stacks):
            if number in self.connections:
                self._read(number)
            elif number in self.entrance.newcomers:
                if found := self.entrance.read(number):
                    self._admit(*found)
            elif number == self.listening:
                self.entrance.accept()
        self.entrance.close_late(time.monotonic())
        self._mark_dead()

    def _admit(self, sock: socket.socket, kind: str, process: Process) -> None:
        """Register a rank's connection, whose hello was right; kind: rank (messages) or stacks."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        now = time.monotonic()
        number = process.rank
        rank = self.ranks.setdefault(number, Rank(number, heard=now, moved=now))
        self.connections[sock.fileno()] = Connection(sock, rank, kind == "stacks")
        if kind == "rank":
            rank.node = process.node
            rank.pid = process.pid
            rank.started = process.started
            rank.connection = sock
            here = process.node == self.job.node
            rank.connected_here = here and is_connected(process.pid, *self.address)

    def _read(self, number: int) -> None:
        """Handle what has arrived on the connection with this descriptor; close it at its end."""
        connection = self.connections[number]
        rank = connection.rank
        data, closed = receive_all(connection.sock)
        if connection.stacks:
            rank.raw = (rank.raw + data)[-RAW_BYTES:]
        else:
            try:
                self._handle_lines(rank, data)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                rank.error = f"it sent what is no message: {error!r}"[:200]
                closed = True
                self.closed.append((rank, time.monotonic()))
        if closed:
            if connection.stacks:
                self.closed.append((rank, time.monotonic()))
            self.poll.unregister(number)
            self.connections.pop(number).sock.close()

    def _handle_lines(self, rank: Rank, data: bytes) -> None:
        """Handle the complete messages in `data`; raise ValueError or others for a bad message."""
        *lines, rank.received = (rank.received + data).split(b"\n")
        if max(map(len, [*lines, rank.received])) > MAX_LINE:
            raise ValueError(f"a line of more than {MAX_LINE:,} bytes")
        for line in lines:
            self._handle(rank, json.loads(line))

    def _mark_dead(self) -> None:
        """Mark the ranks whose connection has ended as dead, if no error or goodbye came before."""
        now = time.monotonic()
        closed = self.closed
        self.closed = []
        for rank, when in closed:  # when: the time at which the end of the connection was seen
            # The rank's connection for messages is not registered yet: judge the rank later.
            if rank.connection is None and now - when < GOODBYE_TIMEOUT:
                self.closed.append((rank, when))
                continue
            if rank.descriptor in self.connections:  # a goodbye may have arrived, not yet read
                self._read(rank.descriptor)
            if rank.state == "alive":
                rank.state = "gone"
                self.dead.append(rank.rank)

    def _handle(self, rank: Rank, message: dict[str, Any]) -> None:
        """Do what a rank's message asks for; heartbeat.py's docstring lists the messages."""
        rank.heard = now = time.monotonic()
        if "beat" in message:
            self._note(rank, message["beat"], now)
            rank.memory = message["memory"]
            # faulthandler must write the stacks before a hang is found: at half of the limit.
            answer = {"echo": message["sent"], "clock": time.time()}
            self._send(rank, answer | {"dump_after": max(2.0, self.limit / 2)})
        elif "groups" in message:
            rank.groups = message["groups"]
            rank.coordinates = message["coordinates"]
        elif "status" in message:
            rank.status = message["status"]
            self._note(rank, rank.status["snapshot"], now)
            for other, state in rank.status.pop("processes").items():
                self.ranks[int(other)].process = state
        elif "say" in message:
            if message["about"] not in self.said:
                self.said.add(message["about"])
                _print(message["say"])
        elif "failed" in message:
            rank.state = "failed"
            rank.error = message["failed"]
            rank.exit_status = message["exit_status"]
            self.failures.append((rank.rank, now))
            if self.first is not None:  # another rank prints its error
                self._send(rank, {"first": False})
        elif "ending" in message or "goodbye" in message:
            rank.state = "left"
            self.ending = message.get("ending", self.ending)
            self.left.add(rank.rank)
        else:
            raise ValueError("an unknown kind")

    def _note(self, rank: Rank, snapshot: dict[str, Any], now: float) -> None:
        """Keep a rank's newest snapshot, and when its progress last grew."""
        progress = snapshot["progress"]
        if rank.snapshot is None or progress != rank.snapshot["progress"]:
            rank.moved = now
        rank.snapshot = snapshot

    def _send(self, rank: Rank, message: dict[str, Any]) -> None:
        """Send without waiting, since a rank that does not read must not block the monitor."""
        if rank.connection is not None:
            with contextlib.suppress(OSError):
                rank.connection.send(encode(message))

    # -- the decision -----------------------------------------------------------------------

    def _find_case(self, now: float) -> JobFailure | None:
        """Return the failure that ends the job: death, error, missing ranks or hang; or None."""
        if self.dead:  # asked first, because a death may make other ranks fail or hang
            return JobFailure("dead", self.job.size, first=self.dead[0])
        if self.failures:
            rank, when = self.failures[0]
            if now - when < FAILURE_DELAY:
                return None
            return JobFailure("failed", self.job.size, first=rank)
        if len(self.ranks) < self.job.size and now - self.began > ALL_RANKS_TIMEOUT:
            missing = sorted(set(range(self.job.size)) - set(self.ranks))
            return JobFailure("missing", self.job.size, missing=missing, limit=ALL_RANKS_TIMEOUT)
        if now - self.checked < POLL_SECONDS:  # do not search for a hang after every message
            return None
        self.checked = now
        return self._find_hang(now)

    def _find_hang(self, now: float) -> JobFailure | None:
        """Return a hang if ranks are over their limits, unless they wait only for moving ranks."""
        if not self.job.limit:  # without --hang-timeout the limit follows from the step times
            steps = [r.snapshot["median_step"] for r in self.ranks.values() if r.snapshot]
            self.limit = max(MIN_HANG_TIMEOUT, MEDIAN_STEPS * max(steps, default=0.0))
        alive = [rank for rank in self.ranks.values() if rank.state == "alive"]
        stalled = [rank for rank in alive if now - rank.moved > self._limit_of(rank)]
        if not stalled:
            return None
        ranks = self._describe_ranks(now)
        # No rank has been asked yet: a rank whose last message is old counts as silent here.
        for rank in alive:
            quiet = now - rank.heard > self._limit_of(rank) / 2
            ranks[rank.rank]["state"] = "silent" if quiet else "answered"
        ends = WaitGraph(ranks).chain_ends(rank.rank for rank in stalled)
        causes = [self.ranks[end] for end in ends]
        if causes and all(now - rank.moved < self._limit_of(rank) for rank in causes):
            return None  # the ranks that all stalled ranks wait for still move: no hang yet
        slowest = min(stalled, key=lambda rank: rank.moved)
        return JobFailure("hang", self.job.size, still=slowest.rank, limit=self._limit_of(slowest))

    def _limit_of(self, rank: Rank) -> float:
        """Return the limit for one rank in seconds; it is longer during the rank's first steps."""
        if rank.snapshot and rank.snapshot["steps_done"] >= STARTUP_STEPS:
            return self.limit
        return max(self.limit * STARTUP_FACTOR, STARTUP_SECONDS)

    def _describe_ranks(self, now: float) -> Ranks:
        return {number: self.ranks[number].to_dict(now) for number in sorted(self.ranks)}

    # -- the end of the job -----------------------------------------------------------------

    def _ask_ranks(self, case: JobFailure) -> JobFailure | None:
        """Ask all ranks for their stacks and records; return the case, or None if it was no hang.

        Ranks that got little processor time may seem to hang: their answers then show progress.
        """
        if case.kind == "failed":  # the failed rank prints its traceback: no stacks are needed
            self._let_print(self.ranks[case.first])
            return case
        self._inspect_ranks()
        return self._find_hang(time.monotonic()) if case.kind == "hang" else case

    def _close(self, case: JobFailure) -> None:
        """Report the case and end the job; other ranks of their node kill the silent ranks."""
        failed = case.kind == "failed"
        ranks = self._describe_ranks(time.monotonic())
        case.gone = list(self.dead)
        status = self.ranks[case.first].exit_status if failed else 0
        if not status:  # a UserError needs no report: its rank has printed the message
            case.culprits = find_culprits(case, WaitGraph(ranks))
            report(case, ranks, self.job.out)
        silent = [r for r in self.ranks.values() if r.state == "alive" and r.status is None]
        self._end_ranks(status or 1, [] if failed else silent)  # after a failure none was asked

    def _inspect_ranks(self) -> None:
        """Ask all ranks for stacks and records, and for the states of quiet ranks' processes."""
        now = time.monotonic()
        asked = [rank for rank in self.ranks.values() if rank.state in ("alive", "failed")]
        quiet = [rank for rank in asked if now - rank.heard > QUIET_SECONDS]
        for rank in asked:
            rank.status = rank.process = None  # forget the answers to an earlier question
            processes = {r.rank: (r.pid, r.started) for r in quiet if r.node == rank.node}
            self._send(rank, {"inspect": processes})  # asks also for the states of these processes
        until = now + STATUS_TIMEOUT
        missing = len(asked)
        while missing and time.monotonic() < until:
            self._receive()
            silent = sum(not r.status and r.state not in ("gone", "left") for r in asked)
            if silent < missing:  # wait longer while answers come: a thousand take long to read
                until = time.monotonic() + STATUS_TIMEOUT
                missing = silent
        for rank in asked:  # the monitor asks the kernel about silent ranks on its own node
            if rank.status is None and rank.state == "alive" and rank.node == self.job.node:
                rank.process = process_state(rank.pid, rank.started)

    def _let_print(self, first: Rank) -> None:
        """Let the first failed rank print its error, and wait for its end; others print nothing."""
        self.first = first
        for rank in self.ranks.values():
            if rank.state == "failed":
                self._send(rank, {"first": rank is first})
        until = time.monotonic() + PRINT_TIMEOUT
        while first.descriptor in self.connections and time.monotonic() < until:
            self._receive()

    def _end_ranks(self, status: int, unresponsive: list[Rank]) -> None:
        """Tell the ranks to end and to kill the unresponsive ranks on their node."""
        for rank in self.ranks.values():
            if rank.state != "left":
                others = [r for r in unresponsive if r.node == rank.node and r is not rank]
                self._send(rank, {"end": status, "kill": [(r.pid, r.started) for r in others]})
        until = time.monotonic() + EXIT_TIMEOUT
        while self.connections and time.monotonic() < until:  # a rank that ends closes its own
            self._receive()
        for rank in self.ranks.values():  # on its own node the monitor kills ranks that still run
            if rank.connected_here:
                kill_process(rank.pid, rank.started)


def report(case: JobFailure, ranks: Ranks, out: str) -> None:
    """Print a case's report and write its files into `out`, unless `out` is empty."""
    text = hang_report.format_report(case, ranks, out)

    def write() -> None:
        """Write the report's files; a disk that cannot be written is reported, not raised."""
        try:
            hang_report.write_files(f"{out}/hang", case.to_dict(), ranks, text)
        except OSError as error:
            _print(f"the watchdog cannot write its files: {error}")

    threads = [threading.Thread(target=write, daemon=True)] if out else []
    if case.kind != "failed":  # a rank that failed has printed its error itself
        threads.append(threading.Thread(target=_print, args=(text,), daemon=True))
    for thread in threads:  # threads, because the job must end even if printing or writing hangs
        thread.start()
    for thread in threads:
        thread.join(WRITE_TIMEOUT)
    if out and threads[0].is_alive():
        _print(f"the watchdog could not write {out}/hang in {WRITE_TIMEOUT:.0f} s")
    time.sleep(FLUSH_SECONDS)


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # the launcher has ended, so nothing reads the output
        print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Watch a job. Argument: the listening socket's descriptor; stdin: the WatchedJob as JSON."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Slurm sends them to all processes: survive them
    with contextlib.suppress(OSError):  # use all cores of the job, not only those of rank 0
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    job = WatchedJob(**json.load(sys.stdin))
    Monitor(socket.socket(fileno=int(sys.argv[1])), job).run()
    os._exit(0)  # unlike sys.exit, this does not wait for a thread that hangs in writing
