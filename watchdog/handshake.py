"""How a rank shows the monitor that it is of the job, and what a stranger's connection may cost.

The monitor sends a random challenge on each connection. A rank answers with one line of fixed form
and its HMAC with the job's key, over the challenge too, so that no answer can be used again:

    rank 3 node 4711 88123 HMAC        kind (rank: for messages; stacks), rank, node, pid, start

Of a connection that has not done so no more than MAX_BYTES are read, for MAX_SECONDS; there are few
of them, and the oldest gives way. When all ranks are there, nobody can connect any more.
"""

import contextlib
import errno
import hmac
import os
import re
import select
import socket
import time
from dataclasses import dataclass

CHALLENGE_BYTES, MAX_BYTES = 32, 4096
MAX_SECONDS = 10.0  # for the answer
MAX_STRANGERS = 64  # connections beyond those of the ranks that are still to come
FULL_SECONDS = 0.25  # to wait when the system has no descriptor left
CONNECT_SECONDS, RETRY_SECONDS = 60.0, 0.1
WELCOME = b"welcome\n"
ANSWER = re.compile(rb"(rank|stacks) (\d{1,7}) (\S{1,255}) (\d{1,10}) (\d{1,20}) ([0-9a-f]{64})\n")

Address = tuple[str, int, str]  # of the monitor: host, port, the job's key


@dataclass(frozen=True)
class Process:
    """The process of a rank: its node, its id there, and when it began, in ticks since boot."""

    rank: int
    node: str
    pid: int
    started: int


def connect(address: Address, kind: str, process: Process) -> socket.socket:
    """A rank's connection to the monitor, which has recognised it; kind: rank or stacks.

    Raises OSError if the monitor cannot be reached, or does not recognise the rank in time.
    """
    host, port, key = address
    until = time.monotonic() + CONNECT_SECONDS
    while True:
        connection = socket.create_connection((host, port), CONNECT_SECONDS)
        try:
            challenge = _receive(connection, CHALLENGE_BYTES)
            fields = f"{kind} {process.rank} {process.node} {process.pid} {process.started} "
            connection.sendall(fields.encode() + _sign(key, challenge, fields.encode()) + b"\n")
            _receive(connection, len(WELCOME))
        except OSError:  # many strangers: the monitor has closed it to take others
            connection.close()
            if time.monotonic() > until:
                raise
            time.sleep(RETRY_SECONDS)
            continue
        connection.settimeout(None)
        return connection


def _receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes and not more; ConnectionError if it ends before."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the monitor closed the connection")
        data += part
    return data


def _sign(key: str, challenge: bytes, fields: bytes) -> bytes:
    return hmac.new(key.encode(), challenge + fields, "sha256").hexdigest().encode()


@dataclass
class Newcomer:
    """A connection that has not yet shown whose it is."""

    sock: socket.socket
    challenge: bytes
    until: float
    received: bytes = b""


class Entrance:
    """The monitor's listening socket, until all ranks are there, and the connections before that.

    poll: where descriptors are registered; a recognised connection stays registered.
    """

    def __init__(self, listener: socket.socket, size: int, key: str, poll: select.epoll) -> None:
        self.listener, self.key, self.poll = listener, key, poll
        self.expected = {(kind, rank) for kind in ("rank", "stacks") for rank in range(size)}
        self.newcomers: dict[int, Newcomer] = {}  # by descriptor, the oldest first
        listener.setblocking(False)
        poll.register(listener.fileno(), select.EPOLLIN)

    def accept(self) -> None:
        """Take one connection; if there are too many, the oldest is closed for it."""
        try:
            sock, _ = self.listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._close_oldest()
                time.sleep(FULL_SECONDS)  # it stays readable: without a pause this would spin
            return
        newcomer = Newcomer(sock, os.urandom(CHALLENGE_BYTES), time.monotonic() + MAX_SECONDS)
        sock.setblocking(False)
        self.newcomers[sock.fileno()] = newcomer
        self.poll.register(sock.fileno(), select.EPOLLIN)
        with contextlib.suppress(OSError):  # it has been closed already, as `read` will see
            sock.send(newcomer.challenge)
        if len(self.newcomers) > len(self.expected) + MAX_STRANGERS:
            self._close_oldest()

    def read(self, number: int) -> tuple[socket.socket, str, Process] | None:
        """Read from a newcomer; its kind and process if it is a rank that was expected."""
        newcomer = self.newcomers[number]
        try:
            data = newcomer.sock.recv(MAX_BYTES - len(newcomer.received))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        newcomer.received += data
        if b"\n" in data and (found := self._recognise(newcomer)):
            del self.newcomers[number]
            if not self.expected:  # before the last one goes on
                self.close()
            with contextlib.suppress(OSError):  # as above
                newcomer.sock.send(WELCOME)
            return newcomer.sock, *found
        if not data or b"\n" in data or len(newcomer.received) == MAX_BYTES:
            self._close(number)
        return None

    def _recognise(self, newcomer: Newcomer) -> tuple[str, Process] | None:
        """The kind and the process of a rank that answered rightly, once for each kind."""
        answer = ANSWER.fullmatch(newcomer.received)
        if answer is None:
            return None
        right = _sign(self.key, newcomer.challenge, newcomer.received[: answer.start(6)])
        if not hmac.compare_digest(right, answer[6]):
            return None
        kind, rank, node, pid, started = (field.decode() for field in answer.groups()[:5])
        if (kind, int(rank)) not in self.expected:
            return None
        self.expected.remove((kind, int(rank)))
        return kind, Process(int(rank), node, int(pid), int(started))

    def close_late(self, now: float) -> None:
        """Close the connections that did not answer in time."""
        while self.newcomers and next(iter(self.newcomers.values())).until < now:
            self._close_oldest()

    def close(self) -> None:
        """Take nobody any more."""
        while self.newcomers:
            self._close_oldest()
        if self.listener.fileno() >= 0:
            self.poll.unregister(self.listener.fileno())
            self.listener.close()

    def _close_oldest(self) -> None:
        if self.newcomers:
            self._close(next(iter(self.newcomers)))

    def _close(self, number: int) -> None:
        self.poll.unregister(number)
        self.newcomers.pop(number).sock.close()
