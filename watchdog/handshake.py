"""How a rank shows the monitor that it is of the job, and what another's connection may cost.

A connection begins with HELLO_BYTES bytes, filled up with spaces:

    KEY rank 3 node 4711 88123      the job's key, kind (rank: for messages; stacks), rank, node,
                                    process, and when that began, in ticks since boot

Of a connection that has not sent them no more is read, and it is closed after MAX_SECONDS. When all
ranks are there, nobody can connect any more.
"""

import errno
import hmac
import select
import socket
import time
from typing import NamedTuple

HELLO_BYTES = 512
MAX_SECONDS = 10.0  # for them to arrive
FULL_SECONDS = 0.25  # to wait when the system has no descriptor left
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
CONNECT_SECONDS = 60.0

Address = tuple[str, int, str]  # of the monitor: host, port, the job's key


class Process(NamedTuple):
    """The process of a rank: its node, its id there, and when it began, in ticks since boot."""

    rank: int
    node: str
    pid: int
    started: int


def connect(address: Address, kind: str, process: Process) -> socket.socket:
    """A rank's connection to the monitor; kind: rank or stacks. OSError if it is not reached."""
    host, port, key = address
    connection = socket.create_connection((host, port), CONNECT_SECONDS)
    hello = f"{key} {kind} {process.rank} {process.node} {process.pid} {process.started}"
    connection.sendall(hello.encode().ljust(HELLO_BYTES))
    connection.settimeout(None)
    return connection


class Entrance:
    """The monitor's listening socket, until all ranks are there, and the connections before that.

    poll: where descriptors are registered; a recognised connection stays registered.
    """

    def __init__(self, listener: socket.socket, size: int, key: str, poll: select.epoll) -> None:
        self.listener = listener
        self.key = key
        self.poll = poll
        self.expected = {(kind, rank) for kind in ("rank", "stacks") for rank in range(size)}
        # By descriptor, the oldest first: the connection, and when it is closed.
        self.newcomers: dict[int, tuple[socket.socket, float]] = {}
        listener.setblocking(False)
        poll.register(listener.fileno(), select.EPOLLIN)

    def accept(self) -> None:
        """Take one connection; without a descriptor for it the oldest newcomer is closed."""
        try:
            sock, _ = self.listener.accept()
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                self.close_late(float("inf"), most=1)
                time.sleep(FULL_SECONDS)  # it stays readable: without a pause this would spin
            return
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, HELLO_BYTES)  # poll waits for them
        self.newcomers[sock.fileno()] = sock, time.monotonic() + MAX_SECONDS
        self.poll.register(sock.fileno(), select.EPOLLIN)

    def read(self, number: int) -> tuple[socket.socket, str, Process] | None:
        """Read from a newcomer; its kind and process if it is a rank that was expected."""
        sock, _ = self.newcomers.pop(number)
        try:
            found = self._recognise(sock.recv(HELLO_BYTES))
        except OSError:  # it has been reset
            found = None
        if found is None:
            self.poll.unregister(number)
            sock.close()
            return None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if not self.expected:
            self.close_late(float("inf"))
            self.poll.unregister(self.listener.fileno())
            self.listener.close()
        return sock, *found

    def _recognise(self, hello: bytes) -> tuple[str, Process] | None:
        """The kind and the process of a rank that has the key, once for each kind."""
        if not hmac.compare_digest(hello[: len(self.key)], self.key.encode()):
            return None
        kind, rank, node, pid, started = hello.decode().split()[1:]
        if (kind, int(rank)) not in self.expected:
            return None
        self.expected.remove((kind, int(rank)))
        return kind, Process(int(rank), node, int(pid), int(started))

    def close_late(self, now: float, most: int | None = None) -> None:
        """Close the connections that did not begin in time, the oldest first."""
        late = [number for number, (_, until) in self.newcomers.items() if until < now]
        for number in late[:most]:
            self.poll.unregister(number)
            self.newcomers.pop(number)[0].close()
