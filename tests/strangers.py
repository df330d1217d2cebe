"""Connections of nine kinds that a stranger makes to a job's store or monitor.

strangers = Strangers([port, ...], 100)      100 connections, of all kinds in turn
strangers.connected, strangers.close()
"""

import contextlib
import socket
import struct
import threading
import time
from datetime import timedelta

import torch.distributed as dist

HOST, SECONDS = "127.0.0.1", 1.0  # to connect: the store drops what comes
FORGED = b"rank 0 here 1 1 " + b"0" * 64 + b"\n"
OLD_HELLO = b'{"rank": 0, "password": "guess", "pid": 1, "started": 1, "node": "here"}\n'


def silent(sock: socket.socket, challenges: list[bytes]) -> None:
    """Say nothing."""


def byte_by_byte(sock: socket.socket, challenges: list[bytes]) -> None:
    """Send one byte every 10 ms, for a second."""
    for _ in range(100):
        sock.sendall(b"x")
        time.sleep(0.01)


def megabyte(sock: socket.socket, challenges: list[bytes]) -> None:
    """A megabyte without the end of a line."""
    sock.sendall(b"x" * (1 << 20))


def deep(sock: socket.socket, challenges: list[bytes]) -> None:
    """JSON that nests too deeply."""
    sock.sendall(b"[" * 100_000 + b"\n")


def forged(sock: socket.socket, challenges: list[bytes]) -> None:
    """A well-formed answer, signed by guess, and the first line of an older version."""
    sock.sendall(FORGED)
    sock.sendall(OLD_HELLO)


def replay(sock: socket.socket, challenges: list[bytes]) -> None:
    """Send to one connection the bytes that another connection was sent."""
    challenges.append(sock.recv(64))
    sock.sendall(challenges[0] + b"\n")


def reset(sock: socket.socket, challenges: list[bytes]) -> None:
    """End at once with a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def http(sock: socket.socket, challenges: list[bytes]) -> None:
    """A request of another protocol."""
    sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


KINDS = (silent, byte_by_byte, megabyte, deep, forged, replay, reset, http)


class Strangers:
    """Connections of all kinds in turn to the ports, each made by a thread and then kept open.

    Every ninth is a client of torch's store that lists, reads, sets and deletes all keys (`seen`).
    """

    def __init__(self, ports: list[int], number: int, seconds: float = SECONDS):
        self.made, self.seconds, self.closing = 0, seconds, False
        self.socks: list[socket.socket] = []
        self.clients: list[dist.TCPStore] = []
        self.seen: dict[str, bytes] = {}
        self.challenges: list[bytes] = []
        self.threads = [
            threading.Thread(target=self._connect, args=(ports[i % len(ports)], i), daemon=True)
            for i in range(number)
        ]
        for thread in self.threads:
            thread.start()

    def _connect(self, port: int, number: int) -> None:
        kind = number // 2 % (len(KINDS) + 1)  # two ports get all kinds each
        with contextlib.suppress(OSError, dist.DistError):
            if kind == len(KINDS):
                self._disturb(port)
            else:
                sock = socket.create_connection((HOST, port), self.seconds)
                self.socks.append(sock)
                KINDS[kind](sock, self.challenges)
        self.made += 1

    def _disturb(self, port: int) -> None:
        """Read, replace and delete the keys of others, as a client of torch's store."""
        client = dist.TCPStore(
            HOST, port, is_master=False, wait_for_workers=False,
            timeout=timedelta(seconds=self.seconds),
        )  # fmt: skip
        self.clients.append(client)
        for times in range(20):
            for key in client.list_keys():
                self.seen[key] = client.get(key)
                client.set(key, "garbage") if times % 2 else client.delete_key(key)
            client.add("met", 1000)
            time.sleep(0.02)

    def wait(self) -> None:
        """Until all have connected, or have been refused, and done what they do."""
        for thread in self.threads:
            thread.join(60.0)
            assert not thread.is_alive()

    def close(self) -> None:
        """Close what is still open."""
        for sock in self.socks:
            sock.close()
        self.clients.clear()
