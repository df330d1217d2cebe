"""The store of a job: torch's TCPStore on rank 0, to which only the job's ranks are connected.

    opened = open_store(launch, local, run.out)    # collective over all ranks
    values = opened.part("values")                 # keys with a prefix that nobody can guess

torch's store has no authentication: any program that can connect can read, set and delete every
key. So rank 0 gives the address to the other ranks over MPI, or under torchrun in a file that only
this user can read. With it goes a secret, from which the prefixes of all keys are computed. When
every rank has made all the connections that it will ever need, rank 0 closes the port. If another
program is connected by then, the job ends with an error.
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

TIMEOUT = timedelta(minutes=30)  # torch's time limit for a call of the store
CONNECTIONS = 2  # connections of each rank to the store
OTHER_FILES = 256  # files that a rank may have open besides the connections to the store
PAUSE = 0.05  # seconds between two looks for a value, a file or a closed connection
SECONDS_TO_CONNECT = 60.0  # limit for a connection to rank 0: the network may need several attempts
SECONDS_FOR_FILE = 60.0  # a file of rank 0 must be seen on the other nodes within this time
SECONDS_TO_CLOSE = 10.0  # ended connections must be gone from rank 0's list within this time
KEY = "trine rendezvous"  # the key in torchrun's store under which rank 0 puts the file's name


class Address(NamedTuple):
    """Where the store is, and the secret of the job in hexadecimal."""

    host: str
    port: int
    secret: str


@dataclass
class JobStore:
    """This rank's two connections to the store (None for a single process), and the job's secret.

    secret: hexadecimal text, the same on all ranks; names and keys are computed from the secret.
    """

    secret: str = field(repr=False)
    first: Any = None  # torch's store over the first connection
    second: Any = None  # the same store over the second connection

    def key(self, purpose: str) -> str:
        """Return a name or key for one purpose, from which the secret cannot be computed."""
        return hmac.new(self.secret.encode(), purpose.encode(), "sha256").hexdigest()

    def part(self, purpose: str, second: bool = False) -> Any:
        """Return the part of the store for one purpose; None for a single process.

        second: use the second connection and not the first one.
        """
        import torch.distributed as dist

        if self.first is None:
            return None
        return dist.PrefixStore(self.key(purpose), self.second if second else self.first)


def open_store(launch: Launch, local: Local, out: str) -> JobStore:
    """Start the job's store on rank 0 and connect to it; collective over all ranks.

    out: the run's --out, the folder of the file under torchrun. Raise UserError if torchrun's port
    is in use, the file cannot be written or seen, other programs are connected to the store, or
    the limit of open files is below the number of connections that rank 0 will have.
    """
    if launch.size == 1:
        return JobStore(os.urandom(32).hex())
    allow_open_files(launch.size)
    server = Server(host_address(local), launch.size) if launch.rank == 0 else None
    address = server.address if server else None
    if launch.mpi:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        # Over libfabric a message moves only while its sender is inside an MPI call: ranks that
        # forward the broadcast must go on calling MPI (Iprobe) until all ranks have received it.
        return meet(world.bcast(address), launch.size, server, world.Iprobe)
    with _address_over_torchrun(address, out) as shared:
        return meet(shared, launch.size, server)


def allow_open_files(size: int) -> None:
    """Raise this process's limit of open files to its hard limit.

    size: the number of ranks. Raise UserError if the hard limit is too low for the store of rank 0.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The soft limit is often 1,024.
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    needed = CONNECTIONS * size + OTHER_FILES
    if hard_limit != resource.RLIM_INFINITY and hard_limit < needed:
        where = f"{needed:,} open files on {node_name()}, and the limit there is {hard_limit:,}"
        text = f"the store of {size:,} ranks needs {where} (ulimit -Hn): have it raised"
        raise UserError(text)


def host_address(local: Local) -> str:
    """Return the address at which the ranks of this job reach this node.

    If there are several nodes, a loopback address is avoided, which some /etc/hosts give for the
    name of the node itself.
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
    """The server of the store, on rank 0, and the port at which it listens."""

    def __init__(self, host: str, size: int) -> None:
        """Start the server. host: this node's address. size: the number of ranks."""
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
        """Accept no new connection from here on.

        connections: the number that the ranks have made. Raise UserError if the server still has
        another number of connections after SECONDS_TO_CLOSE.
        """
        null = os.open(os.devnull, os.O_RDONLY)
        # This closes the listening socket; torch has no call that ends only the listening.
        os.dup2(null, self.descriptor)
        os.close(null)
        deadline = time.monotonic() + SECONDS_TO_CLOSE
        while (present := self._count()) != connections:
            if time.monotonic() > deadline:
                raise UserError(
                    f"the store of this job has {present} connections, and its ranks have "
                    f"{connections}: another program connects to the ports of {node_name()}"
                )
            time.sleep(PAUSE)

    def _count(self) -> int:
        """Return the number of connections that the server has now."""
        all_ends = psutil.Process().net_connections("tcp")
        own_ends = [end for end in all_ends if end.laddr.port == self.address.port]
        return sum(end.status == psutil.CONN_ESTABLISHED for end in own_ends)


def meet(
    address: Address,
    size: int,
    server: Server | None,
    act: Callable[[], Any] = lambda: None,
) -> JobStore:
    """Connect to the store and wait until all ranks have connected; collective over all ranks.

    server: on rank 0. act: called repeatedly while this rank waits.
    """
    import torch.distributed as dist

    stores = [server.store] if server else []
    _check_reachable(address)
    while len(stores) < CONNECTIONS:
        timeout = TIMEOUT
        store = dist.TCPStore(address.host, address.port, wait_for_workers=False, timeout=timeout)
        store.check(["x"])  # returns when the server has accepted the connection
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
    """Raise OSError if the address, at which rank 0 listens, cannot be reached.

    Without this check torch would try to connect for half an hour, and print its stack at each
    attempt.
    """
    socket.create_connection((address.host, address.port), SECONDS_TO_CONNECT).close()


@contextlib.contextmanager
def _address_over_torchrun(address: Address | None, out: str) -> Iterator[Address]:
    """Yield the address of rank 0's store on every rank; the ranks were started by torchrun.

    address: on rank 0 the address, on the other ranks None. Rank 0 writes the address into a file,
    which is removed when the block ends. torchrun's store, which any program can read, holds only
    the file's name. out: the folder of the file.
    """
    import torch.distributed as dist

    try:
        torchruns_store, *_ = next(dist.rendezvous("env://"))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ.get("MASTER_PORT")
        raise UserError(
            f"port {port} (MASTER_PORT) of {socket.gethostname()} is in use, perhaps by another "
            f"job on this node: give torchrun another --master-port, or --standalone on one node"
        ) from None
    if address is None:
        name = torchruns_store.get(KEY).decode(errors="replace")
        yield read_address(Path(out, name))
        return
    with address_file(address, out) as name:
        torchruns_store.set(KEY, name)
        yield address


@contextlib.contextmanager
def address_file(address: Address, out: str) -> Iterator[str]:
    """Write the address into a new file in `out` and yield the file's name, without the folder.

    Only this user can read the file. It is removed when the block ends. Raise UserError if it
    cannot be written.
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
    """Return the address that rank 0 wrote into the file `path`.

    Raise UserError if the file is not seen within SECONDS_FOR_FILE, or if it is not a regular file
    of this user that no other user can read or write.
    """
    deadline = time.monotonic() + SECONDS_FOR_FILE
    while not os.path.lexists(path):
        if time.monotonic() > deadline:
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
    status = os.fstat(descriptor)  # of the open file, so that it cannot be replaced after the check
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.getuid():
        os.close(descriptor)
        raise refusal
    with open(descriptor) as file:
        return Address(*json.load(file))
