"""The watchdog's monitor: one process beside rank 0, which hears all ranks and ends a stuck job.

watchdog.start_monitor starts it, with the listening socket's descriptor as its only argument and
its facts on stdin. It has no torch and does nothing but listen:

    a connection closes without a bye     that rank is dead; the first to close is the cause
    a rank says that it fails             the first one is told to say why, the others to be quiet
    no progress for too long              a hang, unless all who stand still wait for one who moves

Then it asks all ranks for stacks and records, prints who is the cause (explain.py), writes all of
it into OUT/hang, tells the ranks to end, and kills those of its node that do not.
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
from watchdog.heartbeat import kill, process_state
from watchdog.wait_graph import Waits, culprits

# The default of --hang-timeout: at least this, and so many median steps.
LEAST_SECONDS, MEDIAN_STEPS = 300.0, 10.0
# Reading data and checkpoints and the first steps of a run may take that many times as long, and
# so many seconds at least.
PATIENCE_AT_START, SECONDS_AT_START, SETTLED_STEPS = 4.0, 120.0, 2
TURN = 0.25  # seconds between looks at the clock
SECONDS_FOR_THE_FIRST = 60.0  # until rank 0 comes
SECONDS_FOR_ALL = 900.0  # until the last rank comes
# Who fails because another is dead may be heard before the death is seen: on a busy machine a
# killed process takes its time to close one connection after the other.
SECONDS_TO_SETTLE = 1.0
SECONDS_TO_TELL = 4.0  # for stacks and records, since the last one that came
SECONDS_TO_WRITE = 10.0  # to print and write; a file system may be what hangs
SECONDS_TO_END = 8.0
SECONDS_FOR_LAST_WORDS = 1.0
HELD_UP_SECONDS = 2.0
RAW_BYTES = 1 << 16  # of what faulthandler writes, the newest


@dataclass
class Rank:
    """What the monitor knows of one rank."""

    rank: int
    node: str = ""
    pid: int = 0
    started: int = 0
    connection: socket.socket | None = None
    groups: list = field(default_factory=list)
    coordinates: dict[str, int] = field(default_factory=dict)
    snapshot: dict[str, Any] | None = None
    memory: dict[str, int] | None = None
    heard: float = 0.0
    moved: float = 0.0  # when its progress last grew
    state: str = "alive"  # or failed, left, gone
    error: str | None = None
    mistake: bool = False
    status: dict[str, Any] | None = None  # what it told when asked
    process: str | None = None
    raw: bytes = b""  # what faulthandler wrote
    received: bytes = b""

    def told(self, now: float) -> dict[str, Any]:
        """As plain values, for explain.py and the files."""
        answered = self.status or {}
        state = self.state
        if state == "alive":
            state = "answered" if self.status else "silent"
        return {
            "rank": self.rank,
            "node": self.node,
            "pid": self.pid,
            "coordinates": self.coordinates,
            "state": state,
            "process": self.process,
            "error": self.error,
            "heard": round(now - self.heard, 3),
            "still": round(now - self.moved, 3),
            "memory": answered.get("memory") or self.memory,
            "groups": self.groups,
            "snapshot": answered.get("snapshot") or self.snapshot,
            "stacks": answered.get("stacks") or {},
            "raw": self.raw.decode(errors="replace"),
        }


class Monitor:
    """Hears the ranks of one job until all have left, or until it has ended them."""

    def __init__(self, listener: socket.socket, facts: dict[str, Any]):
        self.listener, self.size, self.out = listener, facts["size"], facts["out"]
        self.asked_limit, self.token = facts["limit"], facts["token"]
        self.ranks: dict[int, Rank] = {}
        self.gone: list[tuple[int, float]] = []  # in the order in which they went, and when
        self.closed: list[tuple[int, float]] = []  # to be looked at: dead, or left in order?
        self.ending: int | None = None  # the status with which a rank ends the job on purpose
        self.failures: list[tuple[int, float]] = []
        self.left: set[int] = set()  # ranks that left in order
        self.limit = self.asked_limit or LEAST_SECONDS  # seconds without progress that are a hang
        self.began = self.looked = time.monotonic()
        self.node = facts["node"]
        self.poll = select.epoll()
        self.sockets: dict[int, socket.socket] = {}
        self.owner: dict[int, tuple[str, int]] = {}  # by descriptor: talk or stacks, and the rank
        listener.setblocking(False)
        self.poll.register(listener.fileno(), select.EPOLLIN)

    def run(self) -> None:
        """Until the job is over, one way or the other."""
        before = time.monotonic()
        while True:
            self._turn(TURN)
            now = time.monotonic()
            self._forgive(now - before)
            before = now
            if not self.ranks and now - self.began > SECONDS_FOR_THE_FIRST:
                return
            if self.ranks and len(self.left) == len(self.ranks):
                return
            if self.ending is not None:
                self._end(self.ending, [])
                return
            case = self._judge(now)
            if case:
                self._close(case)
                return

    def _forgive(self, seconds: float) -> None:
        """If this process was held up, so were the others, perhaps: a suspended job, or a machine.
        What it has not heard meanwhile counts against nobody.
        """
        if seconds > HELD_UP_SECONDS:
            for rank in self.ranks.values():
                rank.heard += seconds
                rank.moved += seconds

    # -- hearing ----------------------------------------------------------------------------

    def _turn(self, seconds: float) -> None:
        """Take in what has come. epoll tells of descriptors in the order in which they stirred,
        and the connections for stacks stir when their rank ends: who ended first comes first.
        """
        events = self.poll.poll(seconds)
        numbers = [number for number, _ in events]
        for number in sorted(numbers, key=lambda n: self.owner.get(n, ("", 0))[0] != "stacks"):
            if number == self.listener.fileno():
                self._accept()
            elif number in self.sockets:
                self._read(number)
        self._bury()

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:  # it has gone again
            return
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.sockets[connection.fileno()] = connection
        self.owner[connection.fileno()] = ("unknown", -1)
        self.poll.register(connection.fileno(), select.EPOLLIN)

    def _receive(self, number: int) -> tuple[bytes, bool]:
        """What has come on a connection, and whether it has closed."""
        parts = []
        while True:
            try:
                data = self.sockets[number].recv(1 << 20)
            except BlockingIOError:
                return b"".join(parts), False
            except OSError:
                data = b""
            if not data:
                return b"".join(parts), True
            parts.append(data)

    def _read(self, number: int) -> None:
        data, closed = self._receive(number)
        if self.owner[number][0] == "unknown" and data:
            data = self._introduce(number, data)
        kind, who = self.owner[number]
        if kind == "stacks":
            self.ranks[who].raw = (self.ranks[who].raw + data)[-RAW_BYTES:]
        elif kind == "talk":
            rank = self.ranks[who]
            *lines, rank.received = (rank.received + data).split(b"\n")
            for line in lines:
                self._hear(rank, json.loads(line))
        if closed or kind == "stranger":
            self.poll.unregister(number)
            self.sockets.pop(number).close()
            self.owner.pop(number)
            if kind == "stacks":
                self.closed.append((who, time.monotonic()))

    def _bury(self) -> None:
        """Ranks whose connection has closed are dead, unless their last words say otherwise."""
        now, waiting = time.monotonic(), []
        for who, when in self.closed:
            rank = self.ranks[who]
            if rank.connection is None and now - when < SECONDS_FOR_LAST_WORDS:
                waiting.append((who, when))  # its other connection has not been read yet
                continue
            if rank.connection is not None and rank.connection.fileno() in self.sockets:
                self._read(rank.connection.fileno())
            if rank.state == "alive":
                rank.state = "gone"
                self.gone.append((who, when))
        self.closed = waiting

    def _introduce(self, number: int, data: bytes) -> bytes:
        """Whose connection it is, by its first line. Returns the rest."""
        first, _, rest = data.partition(b"\n")
        try:
            message = json.loads(first)
            right = message["token"] == self.token
        except (ValueError, KeyError, TypeError):
            right = False
        if not right:
            self.owner[number] = ("stranger", -1)
        elif "stacks" in message:
            self.owner[number] = ("stacks", self._rank(message["stacks"]).rank)
        else:
            rank = self._rank(message["hello"])
            rank.node, rank.pid, rank.started = message["node"], message["pid"], message["started"]
            rank.connection = self.sockets[number]
            self.owner[number] = ("talk", rank.rank)
        return rest

    def _rank(self, number: int) -> Rank:
        now = time.monotonic()
        return self.ranks.setdefault(number, Rank(number, heard=now, moved=now))

    def _hear(self, rank: Rank, message: dict[str, Any]) -> None:
        rank.heard = now = time.monotonic()
        if "beat" in message:
            snapshot = message["beat"]
            if rank.snapshot is None or snapshot["progress"] != rank.snapshot["progress"]:
                rank.moved = now
            rank.snapshot, rank.memory = snapshot, message["memory"]
            silence = max(2.0, self.limit / 2)
            answer = {"heard": message["sent"], "clock": time.time(), "silence": silence}
            self._send(rank, answer)
        elif "groups" in message:
            rank.groups, rank.coordinates = message["groups"], message["coordinates"]
        elif "status" in message:
            rank.status = message["status"]
            for other, state in rank.status.pop("processes").items():
                self.ranks[int(other)].process = state
        elif "failed" in message:
            rank.state, rank.error = "failed", message["failed"]
            rank.mistake = message["mistake"]
            self.failures.append((rank.rank, now))
        elif "ending" in message or "bye" in message:
            rank.state, self.ending = "left", message.get("ending", self.ending)
            self.left.add(rank.rank)

    def _send(self, rank: Rank, message: dict[str, Any]) -> None:
        """Without waiting: a rank that does not read, or is gone, must hold nobody up."""
        if rank.connection is None:
            return
        with contextlib.suppress(OSError):
            rank.connection.send(json.dumps(message).encode() + b"\n")

    # -- judging ----------------------------------------------------------------------------

    def _judge(self, now: float) -> dict[str, Any] | None:
        """The case to close, if there is one."""
        if self.gone:
            return {"kind": "dead", "first": self.gone[0][0]}
        if self.failures:
            rank, when = self.failures[0]
            if now - when < SECONDS_TO_SETTLE:
                return None
            return {"kind": "failed", "first": rank}
        if len(self.ranks) < self.size and now - self.began > SECONDS_FOR_ALL:
            missing = sorted(set(range(self.size)) - set(self.ranks))
            return {"kind": "missing", "missing": missing, "limit": SECONDS_FOR_ALL}
        if now - self.looked < TURN:  # turns are as many as the beats of a thousand ranks
            return None
        self.looked = now
        return self._judge_hang(now)

    def _judge_hang(self, now: float) -> dict[str, Any] | None:
        """A hang, if somebody stands still for too long and whoever he waits for does too."""
        if not self.asked_limit:
            steps = [r.snapshot["median_step"] for r in self.ranks.values() if r.snapshot]
            self.limit = max(LEAST_SECONDS, MEDIAN_STEPS * max(steps, default=0.0))
        alive = [rank for rank in self.ranks.values() if rank.state == "alive"]
        late = [rank for rank in alive if now - rank.moved > self._limit_of(rank)]
        if not late:
            return None
        told = self._told(now)
        for rank in alive:  # nobody has been asked yet
            quiet = now - rank.heard > self._limit_of(rank) / 2
            told[rank.rank]["state"] = "silent" if quiet else "answered"
        ends = [self.ranks[end] for end in Waits(told).ends(rank.rank for rank in late)]
        if ends and all(now - end.moved < self._limit_of(end) for end in ends):
            return None
        slowest = min(late, key=lambda rank: rank.moved)
        return {"kind": "hang", "still": slowest.rank, "limit": self._limit_of(slowest)}

    def _limit_of(self, rank: Rank) -> float:
        """The limit for one rank: its first steps may take longer."""
        if rank.snapshot and rank.snapshot["steps_done"] >= SETTLED_STEPS:
            return self.limit
        return max(self.limit * PATIENCE_AT_START, SECONDS_AT_START)

    def _told(self, now: float) -> dict[int, dict[str, Any]]:
        return {number: self.ranks[number].told(now) for number in sorted(self.ranks)}

    # -- closing ----------------------------------------------------------------------------

    def _close(self, case: dict[str, Any]) -> None:
        """Gather, tell, write, end."""
        if case["kind"] == "failed":
            self._let_it_speak(case["first"])
        else:
            self._gather()
        now = time.monotonic()
        told = self._told(now)
        case |= {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "size": self.size}
        case["gone"] = [rank for rank, _ in self.gone]
        first = self.ranks.get(case.get("first", -1))
        mistake = case["kind"] == "failed" and first is not None and first.mistake
        if not mistake:
            case["culprits"] = culprits(case, Waits(told))
            self._report(case, told)
        deaf = [r for r in self.ranks.values() if r.state == "alive" and r.status is None]
        self._end(2 if mistake else 1, deaf if case["kind"] != "failed" else [])

    def _gather(self) -> None:
        """Ask all ranks for stacks and records, and for how the silent ones' processes do."""
        now = time.monotonic()
        alive = [rank for rank in self.ranks.values() if rank.state in ("alive", "failed")]
        quiet = [rank for rank in alive if now - rank.heard > 3.0]
        for rank in alive:
            look = {r.rank: (r.pid, r.started) for r in quiet if r.node == rank.node}
            self._send(rank, {"look": look})
        until, silent = now + SECONDS_TO_TELL, len(alive)
        while silent and time.monotonic() < until:
            self._turn(TURN)
            left = sum(not r.status and r.state not in ("gone", "left") for r in alive)
            if left < silent:  # a thousand ranks may tell more than can be read in that time
                until, silent = time.monotonic() + SECONDS_TO_TELL, left
        for rank in alive:
            if rank.status is None and rank.state == "alive" and rank.node == self.node:
                rank.process = process_state(rank.pid, rank.started)

    def _let_it_speak(self, first: int) -> None:
        """The first rank to fail says why and ends the job; the others are quiet."""
        for rank in self.ranks.values():
            if rank.state == "failed":
                self._send(rank, {"first": rank.rank == first})
        until = time.monotonic() + 2.0
        while self.ranks[first].state != "gone" and time.monotonic() < until:
            known = len(self.failures)
            self._turn(TURN)
            for number, _ in self.failures[known:]:
                self._send(self.ranks[number], {"first": False})
            if self.ranks[first].connection.fileno() not in self.sockets:
                return

    def _report(self, case: dict[str, Any], told: dict[int, dict[str, Any]]) -> None:
        """Print and write, by a thread: whatever hangs there, the job must end all the same."""

        def write() -> None:
            report = hang_report.tell(case, told, self.out)
            if case["kind"] != "failed":  # else the rank itself has said why
                print(report, file=sys.stderr, flush=True)
            try:
                hang_report.write(os.path.join(self.out, "hang"), case, told, report)
            except OSError as error:
                print(f"the watchdog cannot write its files: {error}", file=sys.stderr, flush=True)

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        thread.join(SECONDS_TO_WRITE)
        if thread.is_alive():
            text = f"the watchdog could not write {self.out}/hang in {SECONDS_TO_WRITE:.0f} s"
            print(text, file=sys.stderr, flush=True)

    def _end(self, status: int, deaf: list[Rank]) -> None:
        """Tell the ranks to end, and to kill those of their node that cannot hear."""
        for rank in self.ranks.values():
            if rank.connection is not None and rank.state != "left":
                dead = [(r.pid, r.started) for r in deaf if r.node == rank.node and r is not rank]
                self._send(rank, {"end": status, "kill": dead})
        until = time.monotonic() + SECONDS_TO_END
        while self.sockets and time.monotonic() < until:
            self._turn(TURN)
        for rank in self.ranks.values():
            if rank.node == self.node:
                kill(rank.pid, rank.started)


def main() -> None:
    """Watch the ranks that come to the socket given by number; about the run, standard input."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Slurm sends them to all processes of a step
    with contextlib.suppress(OSError):  # not to rank 0's cores alone: to all that the job has
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two connections a rank
    facts = json.load(sys.stdin)
    listener = socket.socket(fileno=int(sys.argv[1]))
    Monitor(listener, facts).run()
    os._exit(0)  # a thread that hangs in writing must not keep the process


if __name__ == "__main__":
    main()
