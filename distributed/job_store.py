"""The store of a job: torch's TCPStore on rank 0, to which only the job's ranks are connected.

    opened = open_store(launch, local)             # collective over all ranks
    values = opened.part("values")                 # keys with a prefix that nobody can guess

torch's store has no authentication: any program that can connect can read, set and delete every
key. So rank 0 closes the port when every rank has made all the connections that it will ever need.
If another program is connected by then, the job ends with an error. Only then rank 0 puts a secret
into the store. All later keys begin with the secret, so that keys which another program has set
before are never read, and the ranks show the secret to the watchdog's monitor.

Rank 0 gives the address to the other ranks over MPI, or under torchrun in torchrun's own store.
Each rank has CONNECTIONS connections: a thread that waits for a key keeps a connection busy.
"""

import json
import os
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import psutil

from config.messages import UserError
from distributed.early_end import node_name
from distributed.launch import Launch, Local

TIMEOUT = timedelta(minutes=30)  # torch's time limit for a call of the store
CONNECTIONS = 2  # the number of connections of each rank to the store
OTHER_FILES = 256  # the most files that a rank has open besides the connections to the store
PAUSE = 0.05  # seconds between two looks for a value or a closed connection
SECONDS_TO_CONNECT = 60.0  # limit for a connection to rank 0: the network may need several attempts
SECONDS_TO_CLOSE = 10.0  # ended connections must vanish from the kernel's list within this time
KEY = "trine rendezvous"  # rank 0 puts the address under this key into torchrun's store
SECRET = "secret"  # rank 0 puts the secret under this key into the job's store


class Address(NamedTuple):
    """The address at which the store listens."""

    host: str
    port: int


@dataclass
class JobStore:
    """This rank's two connections to the store (None for a single process), and the job's secret.

    secret: hexadecimal text, the same on all ranks.
    """

    secret: str = field(repr=False)
    first: Any = None  # torch's store over the first connection
    second: Any = None  # the same store over the second connection

    def part(self, purpose: str, second: bool = False) -> Any:
        """Return the part of the store for one purpose; None for a single process.

        All keys of the part begin with the secret and the purpose. second: use the second
        connection, for a thread that must not wait while another thread uses the first.
        """
        import torch.distributed as dist

        if self.first is None:
            return None
        connection = self.second if second else self.first
        return dist.PrefixStore(f"{self.secret}/{purpose}", connection)


def open_store(launch: Launch, local: Local) -> JobStore:
    """Start the job's store on rank 0 and connect to it; collective over all ranks.

    Called once, by rendezvous.meet. Raise UserError if torchrun's port is in use, other programs
    are connected to the store, or the limit of open files is below the number of connections that
    rank 0 will have.
    """
    if launch.size == 1:  # no store is needed, but the watchdog's monitor asks for the secret
        return JobStore(new_secret())
    allow_open_files(launch.size)
    server = Server(host_address(local), launch.size) if launch.rank == 0 else None
    if not launch.mpi:
        # This variable keeps torchrun's store alive until all ranks have met: rank 0 may be the
        # server of that store too.
        torchruns_store = _torchruns_store()
        if server:
            torchruns_store.set(KEY, json.dumps(server.address))
        address = Address(*json.loads(torchruns_store.get(KEY)))
        return meet(address, launch.size, server)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    address = world.bcast(server.address if server else None)
    # Over libfabric a message moves only while its sender is inside an MPI call. A rank that has
    # the address may have to forward it, so `meet` goes on calling MPI (Iprobe) while it waits.
    return meet(address, launch.size, server, world.Iprobe)


def new_secret() -> str:
    """Return a new secret for a job, which no other program can guess: 32 random bytes as text."""
    return os.urandom(32).hex()


def allow_open_files(size: int) -> None:
    """Raise this process's soft limit of open files, often 1,024, to its hard limit.

    size: the number of ranks. Each connection to the store is an open file of rank 0. Raise
    UserError if the hard limit is too low for all connections.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    needed = CONNECTIONS * size + OTHER_FILES
    if hard_limit != resource.RLIM_INFINITY and hard_limit < needed:
        where = f"{needed:,} open files on {node_name()}, and the limit there is {hard_limit:,}"
        text = f"the store of {size:,} ranks needs {where} (ulimit -Hn): have it raised"
        raise UserError(text)


def host_address(local: Local) -> str:
    """Return the address at which the ranks of this job reach this node.

    If there are several nodes, a loopback address is avoided, which some /etc/hosts give for the
    name of the node itself: then the first other address of a network card is returned.
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
        self.address = Address(host, listener.getsockname()[1])
        self.descriptor = listener.detach()
        # TCPStore also connects to this address as a client. If the address cannot be reached, it
        # would try for half an hour; this check finds the error at once.
        _check_reachable(self.address)
        self.store = dist.TCPStore(
            host,
            self.address.port,
            is_master=True,
            wait_for_workers=False,
            timeout=TIMEOUT,
            master_listen_fd=self.descriptor,
        )

    def close_port(self, connections: int) -> None:
        """Accept no new connection from here on; called when every rank has connected.

        connections: the number that the ranks have made. Raise UserError if the server still has
        another number of connections after SECONDS_TO_CLOSE: then another program is connected.
        """
        null = os.open(os.devnull, os.O_RDONLY)
        # torch has no call that ends only the listening. dup2 puts /dev/null in the place of the
        # listening socket, which is closed thereby; the connections stay.
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
        # This process is server and client, so both ends of its own connections are in the list.
        # Only the server's ends have the store's port as their local port.
        own_ends = [end for end in all_ends if end.laddr.port == self.address.port]
        return sum(end.status == psutil.CONN_ESTABLISHED for end in own_ends)


def meet(
    address: Address,
    size: int,
    server: Server | None,
    act: Callable[[], Any] = lambda: None,
) -> JobStore:
    """Connect to the store and wait until all ranks have connected; collective over all ranks.

    address: where the store listens. size: the number of ranks. server: the server of the store, on
    rank 0; None on the other ranks. act: called repeatedly while this rank waits.
    """
    import torch.distributed as dist

    stores = [server.store] if server else []  # the server's object is rank 0's first connection
    _check_reachable(address)
    while len(stores) < CONNECTIONS:
        timeout = TIMEOUT
        store = dist.TCPStore(address.host, address.port, wait_for_workers=False, timeout=timeout)
        store.check(["x"])  # returns when the server has accepted the connection
        stores.append(store)
    store = stores[0]
    store.add("met", 1)
    if server:
        while store.add("met", 0) < size:  # the sum: the number of ranks that have connected
            act()
            time.sleep(PAUSE)
        server.close_port(CONNECTIONS * size)
        store.set(SECRET, new_secret())
    while not store.check([SECRET]):
        act()
        time.sleep(PAUSE)
    return JobStore(store.get(SECRET).decode(), *stores)


def _check_reachable(address: Address) -> None:
    """Raise OSError if the address, at which rank 0 listens, cannot be reached.

    The connection is closed again at once. Without this check torch would try to connect for half
    an hour, and print its stack at each attempt.
    """
    socket.create_connection((address.host, address.port), SECONDS_TO_CONNECT).close()


def _torchruns_store() -> Any:
    """Return torchrun's own store. Raise UserError if its port is in use."""
    import torch.distributed as dist

    try:
        store, *_ = next(dist.rendezvous("env://"))
        return store
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ.get("MASTER_PORT")
        raise UserError(
            f"port {port} (MASTER_PORT) of {socket.gethostname()} is in use, perhaps by another "
            f"job on this node: give torchrun another --master-port, or --standalone on one node"
        ) from None
