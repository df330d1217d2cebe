"""The store of a job: torch's TCPStore on rank 0, to which nobody but the ranks is connected.

    opened = open_store(launch, local, run.out)    # collective over all ranks
    values = opened.part("values")                 # a part of it, of a name that nobody can guess

torch's store has no authentication: who can connect can read, set and delete every key. So the
address goes to the other ranks over MPI, or under torchrun through a file that only this user can
read, together with a secret from which the names of all keys come. When every rank has made all the
connections that it will ever need, rank 0 closes the port. A connection of anybody else that is
there by then is an error.
"""

import contextlib
import hmac
import json
import os
import resource
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from config.messages import UserError
from distributed.early_end import node_name
from distributed.launch import Launch, Local

TIMEOUT = timedelta(minutes=30)  # of the store's own calls
CONNECTIONS = 2  # of each rank to the store
OTHER_FILES = 256  # that a rank has open beside
PAUSE = 0.05  # seconds between two looks
SECONDS_TO_CONNECT = 60.0  # to rank 0, which listens already: the network's own attempts
SECONDS_FOR_FILE = 60.0  # until a file of rank 0 is seen on the other nodes
SECONDS_TO_CLOSE = 10.0  # until connections that have ended are gone from rank 0
KEY = "trine rendezvous"  # in torchrun's store: the name of the file


class Address(NamedTuple):
    """Where the store is, and the secret of the job in hexadecimal."""

    host: str
    port: int
    secret: str


@dataclass
class JobStore:
    """Two connections to the store (None for a single process) and the secret of the job."""

    secret: str = field(repr=False)
    first: Any = None
    second: Any = None

    def key(self, purpose: str) -> str:
        """A name or a key for one purpose, which tells nothing about the secret."""
        return hmac.new(self.secret.encode(), purpose.encode(), "sha256").hexdigest()

    def part(self, purpose: str, second: bool = False) -> Any:
        """The part of the store for one purpose, over the first or the second connection."""
        import torch.distributed as dist

        if self.first is None:
            return None
        return dist.PrefixStore(self.key(purpose), self.second if second else self.first)


def open_store(launch: Launch, local: Local, out: str) -> JobStore:
    """Meet the other ranks in a store of this job alone; collective over all ranks.

    out: the run's --out, for the file under torchrun. Raises UserError if torchrun's port is in
    use, the file cannot be written or seen, others are connected to the store, or ranks may not
    open as many files as rank 0 has connections.
    """
    if launch.size == 1:
        return JobStore(os.urandom(32).hex())
    allow_open_files(launch.size)
    server = Server(host_address(local), launch.size) if launch.rank == 0 else None
    address = server.address if server else None
    if launch.mpi:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        # Over libfabric a message moves only while its sender is inside MPI: a rank that does not
        # call MPI while it waits for the others would keep some of them in this broadcast.
        return meet(world.bcast(address), launch.size, server, world.Iprobe)
    with _address_over_torchrun(address, out) as shared:
        return meet(shared, launch.size, server)


def allow_open_files(size: int) -> None:
    """Raise this process's limit of open files as far as it goes; UserError if that is too few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # often it begins as 1,024
    needed = CONNECTIONS * size + OTHER_FILES
    if most != resource.RLIM_INFINITY and most < needed:
        where = f"{needed:,} open files on {node_name()}, and the limit there is {most:,}"
        text = f"the store of {size:,} ranks needs {where} (ulimit -Hn): have it raised"
        raise UserError(text)


def host_address(local: Local) -> str:
    """The address at which the ranks of this job reach this node.

    Across nodes never a loopback address, which some /etc/hosts give for the node's own name.
    """
    if local.one_node:
        return "127.0.0.1"
    address = socket.gethostbyname(socket.gethostname())
    if not address.startswith("127."):
        return address
    for cards in psutil.net_if_addrs().values():
        for card in cards:
            if card.family == socket.AF_INET and not card.address.startswith("127."):
                return card.address
    return address


class Server:
    """Rank 0's store, and the port at which it listens."""

    def __init__(self, host: str, size: int) -> None:
        import torch.distributed as dist

        listener = socket.create_server((host, 0), backlog=max(128, CONNECTIONS * size))
        self.address = Address(host, listener.getsockname()[1], os.urandom(32).hex())
        self.descriptor = listener.detach()
        _check_reachable(self.address)  # torch's server is a client of its own
        self.store = dist.TCPStore(
            host,
            self.address.port,
            is_master=True,
            wait_for_workers=False,
            timeout=TIMEOUT,
            master_listen_fd=self.descriptor,
        )

    def close_port(self, connections: int) -> None:
        """Take no new connection; UserError unless there are as many as the ranks have."""
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, self.descriptor)  # torch has no call that ends only the listening
        os.close(nowhere)
        limit = time.monotonic() + SECONDS_TO_CLOSE
        while (found := self._count()) != connections:
            if time.monotonic() > limit:
                raise UserError(
                    f"the store of this job has {found} connections, and its ranks have "
                    f"{connections}: another program connects to the ports of {node_name()}"
                )
            time.sleep(PAUSE)

    def _count(self) -> int:
        all_ends = psutil.Process().net_connections("tcp")
        own_ends = [end for end in all_ends if end.laddr.port == self.address.port]
        return sum(end.status == psutil.CONN_ESTABLISHED for end in own_ends)


def meet(
    address: Address, size: int, server: Server | None, act: Callable[[], Any] = lambda: None
) -> JobStore:
    """Connect to the store and wait until all ranks have; rank 0 has its server.

    act: called again and again meanwhile.
    """
    import torch.distributed as dist

    stores = [server.store] if server else []
    _check_reachable(address)
    while len(stores) < CONNECTIONS:
        timeout = TIMEOUT
        store = dist.TCPStore(address.host, address.port, wait_for_workers=False, timeout=timeout)
        store.check(["x"])  # it has been accepted
        stores.append(store)
    opened = JobStore(address.secret, *stores)
    values = opened.part("values")
    values.add("met", 1)
    if server:
        while values.add("met", 0) < size:
            act()
            time.sleep(PAUSE)
        server.close_port(CONNECTIONS * size)
        values.set("closed", "")
    while not values.check(["closed"]):
        act()
        time.sleep(PAUSE)
    return opened


def _check_reachable(address: Address) -> None:
    """OSError if rank 0, which listens there, cannot be reached.

    torch would try for half an hour what the network refuses, and print its stack at each attempt.
    """
    socket.create_connection((address.host, address.port), SECONDS_TO_CONNECT).close()


@contextlib.contextmanager
def _address_over_torchrun(address: Address | None, out: str) -> Iterator[Address]:
    """The address of rank 0's store, which is in a file as long as this is not left.

    address: that on rank 0. torchrun's own store, open to all, has no more than the file's name.
    """
    import torch.distributed as dist

    try:
        open_to_all = next(dist.rendezvous("env://"))[0]
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ.get("MASTER_PORT")
        raise UserError(
            f"port {port} (MASTER_PORT) of {socket.gethostname()} is in use, perhaps by another "
            f"job on this node: give torchrun another --master-port, or --standalone on one node"
        ) from None
    if address is None:
        yield read_address(Path(out, open_to_all.get(KEY).decode(errors="replace")))
        return
    with address_file(address, out) as name:
        open_to_all.set(KEY, name)
        yield address


@contextlib.contextmanager
def address_file(address: Address, out: str) -> Iterator[str]:
    """The name of a file with the address that is there, for this user alone, until this is left.

    UserError if it cannot be written.
    """
    try:
        os.makedirs(out, exist_ok=True)
        file = tempfile.NamedTemporaryFile("w", dir=out, prefix=".rendezvous-")  # noqa: SIM115
    except OSError as error:
        text = f"cannot write a file in {out}, for the other ranks: {error.strerror}"
        raise UserError(text) from None
    with file:
        json.dump(address, file)
        file.flush()
        yield os.path.basename(file.name)


def read_address(path: Path) -> Address:
    """What rank 0 wrote; UserError if the file is not seen in time, or not this user's alone."""
    limit = time.monotonic() + SECONDS_FOR_FILE
    while not os.path.lexists(path):
        if time.monotonic() > limit:
            raise UserError(
                f"rank 0 wrote {path}, and {socket.gethostname()} did not see it within "
                f"{SECONDS_FOR_FILE:g} s: torchrun on several nodes needs --out on a file system "
                f"that all nodes share, or start with mpirun or srun"
            )
        time.sleep(PAUSE)
    refusal = UserError(f"{path} is not a regular file of user {os.getuid()} alone")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # a link, or a file of another user
        raise refusal from None
    status = os.fstat(descriptor)  # what is checked is what is read
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.getuid():
        os.close(descriptor)
        raise refusal
    with open(descriptor) as file:
        return Address(*json.load(file))
