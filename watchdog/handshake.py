"""How a rank proves to the monitor that it belongs to the job; limits for other connections.

A connection begins with a hello of HELLO_BYTES bytes, filled up with spaces:

    KEY rank 3 node 4711 88123      the job's key, the kind of connection (rank: for messages,
                                    stacks: for faulthandler), the rank, its node, its process id,
                                    and when the process began, in ticks since boot

The monitor reads at most a hello from a connection until the hello is right, and closes the
connection after MAX_SECONDS without one. When all ranks have connected, no program can connect any
more.
"""

import errno
import hmac
import select
import socket
import time
from typing import NamedTuple

HELLO_BYTES = 512
MAX_SECONDS = 10.0  # for the hello to arrive
FULL_SECONDS = 0.25  # to wait when the system has no file descriptor left
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
CONNECT_SECONDS = 60.0  # for a rank to reach the monitor

Address = tuple[str, int, str]  # of the monitor: host, port, the job's key


class Process(NamedTuple):
    """The process of a rank: its node, its process id, and its start in ticks since boot."""

    rank: int
    node: str
    pid: int
    started: int


def connect(address: Address, kind: str, process: Process) -> socket.socket:
    """Connect a rank to the monitor, send the hello, and return the connection.

    kind: rank or stacks. Raise OSError if the monitor cannot be reached.
    """
    host, port, key = address
    connection = socket.create_connection((host, port), CONNECT_SECONDS)
    hello = f"{key} {kind} {process.rank} {process.node} {process.pid} {process.started}"
    connection.sendall(hello.encode().ljust(HELLO_BYTES))
    connection.settimeout(None)
    return connection


def receive_all(connection: socket.socket) -> tuple[bytes, bool]:
    """Return the bytes that have arrived, and whether the other side closed the connection."""
    parts: list[bytes] = []
    while True:
        try:
            data = connection.recv(1 << 20)
        except BlockingIOError:
            return b"".join(parts), False
        except OSError:
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
        self.listener = listener
        self.key = key
        self.poll = poll
        self.expected = {(kind, rank) for kind in ("rank", "stacks") for rank in range(size)}
        # By descriptor, the oldest first: the connection, and the time at which it is closed unless
        # its hello has arrived.
        self.newcomers: dict[int, tuple[socket.socket, float]] = {}
        listener.setblocking(False)
        poll.register(listener.fileno(), select.EPOLLIN)

    def accept(self) -> None:
        """Accept one connection; if no file descriptor is left, close the oldest newcomer."""
        try:
            sock, _ = self.listener.accept()
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                self.close_late(float("inf"), most=1)
                time.sleep(FULL_SECONDS)  # the listener stays readable, so the loop would spin
            return
        sock.setblocking(False)
        # poll reports the connection as readable only when the whole hello has arrived.
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
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if not self.expected:
            self.close_late(float("inf"))
            self.poll.unregister(self.listener.fileno())
            self.listener.close()
        return sock, *found

    def _recognise(self, hello: bytes) -> tuple[str, Process] | None:
        """Return kind and process from a hello with the job's key; None for a wrong hello.

        Each kind of each rank is accepted only once.
        """
        if not hmac.compare_digest(hello[: len(self.key)], self.key.encode()):
            return None
        kind, rank, node, pid, started = hello.decode().split()[1:]
        if (kind, int(rank)) not in self.expected:
            return None
        self.expected.remove((kind, int(rank)))
        return kind, Process(int(rank), node, int(pid), int(started))

    def close_late(self, now: float, most: int | None = None) -> None:
        """Close at most `most` newcomers whose time for the hello is over, the oldest first."""
        late = [number for number, (_, until) in self.newcomers.items() if until < now]
        for number in late[:most]:
            self.poll.unregister(number)
            self.newcomers.pop(number)[0].close()
