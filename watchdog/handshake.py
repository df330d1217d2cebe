"""How a rank proves to the monitor that it belongs to the job; limits for other connections.

A connection begins with a hello of HELLO_BYTES bytes, filled up with spaces:

    KEY rank 3 node 4711 88123      the job's key, the kind of connection (rank: for messages,
                                    stacks: for faulthandler), the rank, its node, its process id,
                                    and when the process began, in ticks since boot

Any program that reaches the port can connect. So the monitor reads at most a hello from a newcomer,
a connection whose hello has not been checked, and closes it if the hello is wrong or does not come
within MAX_SECONDS. When all ranks have connected, the monitor listens no more.
"""

import errno
import hmac
import select
import socket
import time
from typing import NamedTuple

HELLO_BYTES = 512
MAX_SECONDS = 10.0  # a hello must arrive within these seconds
FULL_SECONDS = 0.25  # the monitor sleeps these seconds if no file descriptor is left
# Errors of `accept` if this process or its node can open no further connection.
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
CONNECT_SECONDS = 60.0  # a rank must reach the monitor within these seconds

Address = tuple[str, int, str]  # the monitor's address: host, port, the job's key


class Process(NamedTuple):
    """The process of a rank: its node, its process id, and its start in ticks since boot."""

    rank: int
    node: str
    pid: int
    started: int


def connect(address: Address, kind: str, process: Process) -> socket.socket:
    """Connect a rank to the monitor, send the hello, and return the connection.

    kind: "rank" for messages, or "stacks" for faulthandler's output. Raise OSError if the monitor
    cannot be reached.
    """
    host, port, key = address
    connection = socket.create_connection((host, port), CONNECT_SECONDS)
    hello = f"{key} {kind} {process.rank} {process.node} {process.pid} {process.started}"
    connection.sendall(hello.encode().ljust(HELLO_BYTES))
    connection.settimeout(None)  # the limit was for connecting: later sends may take longer
    return connection


def receive_all(connection: socket.socket) -> tuple[bytes, bool]:
    """Return the bytes that have arrived, and whether the other side closed the connection.

    The connection is non-blocking, so this does not wait for more bytes.
    """
    parts: list[bytes] = []
    while True:
        try:
            data = connection.recv(1 << 20)
        except BlockingIOError:  # nothing more has arrived
            return b"".join(parts), False
        except OSError:  # the connection was reset: the other process was killed
            data = b""
        if not data:
            return b"".join(parts), True
        parts.append(data)


class Entrance:
    """The monitor's listening socket and the connections that have not sent their hello yet.

    The socket is closed when all ranks have connected. poll: the monitor's epoll object, in which
    descriptors are registered; the connection of a recognised rank stays registered.
    """

    def __init__(self, listener: socket.socket, size: int, key: str, poll: select.epoll) -> None:
        """Listen from now on. size: the number of ranks. key: the secret that the job's ranks know.

        poll: the monitor's epoll object, which reports when a socket can be read.
        """
        self.listener = listener
        self.key = key
        self.poll = poll
        # The connections that have not come yet: two of each rank.
        self.expected = {(kind, rank) for kind in ("rank", "stacks") for rank in range(size)}
        # Each newcomer, by descriptor and the oldest first, with the time at which it is closed if
        # its hello has not arrived.
        self.newcomers: dict[int, tuple[socket.socket, float]] = {}
        listener.setblocking(False)
        poll.register(listener.fileno(), select.EPOLLIN)

    def accept(self) -> None:
        """Accept one connection as a newcomer; the monitor calls this when a program connects.

        If no file descriptor is left, close the oldest newcomer and accept none: a program that
        opens connections without a hello must not keep the ranks out.
        """
        try:
            sock, _ = self.listener.accept()
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                # No descriptor is left: close the oldest newcomer. At time infinity all are late.
                self.close_late(float("inf"), most=1)
                time.sleep(FULL_SECONDS)  # the listener stays readable: do not return at once
            return
        sock.setblocking(False)
        # With this option poll reports the connection as readable only when the whole hello has
        # arrived, so that `read` gets it in one call.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, HELLO_BYTES)
        self.newcomers[sock.fileno()] = sock, time.monotonic() + MAX_SECONDS
        self.poll.register(sock.fileno(), select.EPOLLIN)

    def read(self, number: int) -> tuple[socket.socket, str, Process] | None:
        """Read a newcomer's hello; return its socket, kind and process if the hello is right.

        Otherwise close the connection and return None. number: the newcomer's descriptor.
        """
        sock, _ = self.newcomers.pop(number)
        try:
            found = self._recognise(sock.recv(HELLO_BYTES))
        except OSError:  # the connection has been reset
            found = None
        if found is None:
            self.poll.unregister(number)
            sock.close()
            return None
        # From here on the connection is readable as soon as one byte has arrived.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if not self.expected:  # all ranks have connected: close all newcomers and listen no more
            self.close_late(float("inf"))
            self.poll.unregister(self.listener.fileno())
            self.listener.close()
        return sock, *found

    def _recognise(self, hello: bytes) -> tuple[str, Process] | None:
        """Return kind and process from a hello with the job's key; None for a wrong hello.

        Each kind of each rank is accepted only once.
        """
        # compare_digest takes the same time for all wrong keys, so the time tells nothing.
        if not hmac.compare_digest(hello[: len(self.key)], self.key.encode()):
            return None
        kind, rank, node, pid, started = hello.decode().split()[1:]
        if (kind, int(rank)) not in self.expected:
            return None
        self.expected.remove((kind, int(rank)))
        return kind, Process(int(rank), node, int(pid), int(started))

    def close_late(self, now: float, most: int | None = None) -> None:
        """Close the newcomers whose time for the hello is over at `now`, the oldest first.

        most: the most newcomers that are closed; None: all late newcomers.
        """
        late = [number for number, (_, until) in self.newcomers.items() if until < now]
        for number in late[:most]:
            self.poll.unregister(number)
            self.newcomers.pop(number)[0].close()
