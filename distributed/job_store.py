"""The store of a job: torch's TCPStore on rank 0, to which nobody but the ranks is connected.

    opened = open_store(launch, local, run.out)    # collective over all ranks
    values = opened.part("values")                 # a part of it, of a name that nobody can guess

torch's store has no authentication: who can connect can read, set and delete every key. So

1. rank 0 listens at a port that the system chooses, for one node on loopback only;
2. the address and a secret of the job go to the other ranks over MPI, or under torchrun through a
   file that only this user can read; torch's own store, open to all, has no more than its name;
3. each rank makes all the connections that it will ever need, and tells rank 0 their addresses;
4. rank 0 then takes no new connection and ends those that are no rank's;
5. only after that are values exchanged, under names that come from the secret.
"""

import contextlib
import ctypes
import hmac
import json
import os
import re
import resource
import socket
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from config.messages import UserError
from distributed.early_end import node_name
from distributed.launch import Launch, Local

TIMEOUT = timedelta(minutes=30)  # of the store's own calls
CONNECTIONS, OTHER_FILES = 2, 256  # of each rank to the store; that a rank has open beside
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.1  # seconds between two looks
SECONDS_TO_CONNECT = 60.0  # to rank 0, which listens already: the network's own attempts
SECONDS_FOR_FILE = 60.0  # until a file of rank 0 is seen on the other nodes
KEY = "trine rendezvous"  # in torchrun's store: the name of the file
# Linux: setsockopt's number, and a filter of one instruction: keep 0 bytes of each packet.
SO_ATTACH_FILTER, DROP_ALL = 26, struct.pack("HBBI", 0x06, 0, 0, 0)
UNACCEPTED_AT = 24  # in TCP_INFO of a listening socket: connections that wait to be accepted

End = tuple[str, int]  # address and port of one end of a connection
Address = tuple[str, int, str]  # of the store: host, port, the job's secret in hexadecimal


@dataclass
class JobStore:
    """Two connections to the store (None for a single process) and the secret of the job."""

    secret: bytes = field(repr=False)
    first: Any = None
    second: Any = None

    def key(self, purpose: str) -> str:
        """A name or a key for one purpose, which tells nothing about the secret."""
        return hmac.new(self.secret, purpose.encode(), "sha256").hexdigest()

    def part(self, purpose: str, second: bool = False) -> Any:
        """The part of the store for one purpose, over the first or the second connection."""
        import torch.distributed as dist

        if self.first is None:
            return None
        return dist.PrefixStore(self.key(purpose), self.second if second else self.first)


def open_store(launch: Launch, local: Local, out: str) -> JobStore:
    """Meet the other ranks in a store of this job alone; collective over all ranks.

    out: the run's --out, for the file under torchrun. Raises UserError if torchrun's port is in
    use, the file cannot be written or seen, the store cannot be kept to the ranks, or ranks may not
    open as many files as rank 0 has connections.
    """
    if launch.size == 1:
        return JobStore(os.urandom(32))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # often it begins as 1,024
    needed = CONNECTIONS * launch.size + OTHER_FILES
    if most != resource.RLIM_INFINITY and most < needed:
        where = f"{needed:,} open files on {node_name()}, and the limit there is {most:,}"
        text = f"the store of {launch.size:,} ranks needs {where} (ulimit -Hn): have it raised"
        raise UserError(text)
    server = _Server(host_address(local), launch.size) if launch.rank == 0 else None
    return _meet_over_mpi(server) if launch.mpi else _meet_over_torchrun(server, launch, Path(out))


def host_address(local: Local) -> str:
    """The address at which the ranks of this job reach this node.

    Across nodes never a loopback address, which some /etc/hosts give for the node's own name.
    """
    if local.one_node:
        return "127.0.0.1"
    address = socket.gethostbyname(socket.gethostname())
    if not address.startswith("127."):
        return address
    cards = [card for several in psutil.net_if_addrs().values() for card in several]
    found = [card.address for card in cards if card.family == socket.AF_INET]
    return next((other for other in found if not other.startswith("127.")), address)


def _connect(address: Address, server: "_Server | None") -> tuple[JobStore, list[End]]:
    """All connections of this rank to the store, and their own ends."""
    import torch.distributed as dist

    host, port, secret = address
    _check_reachable(host, port)
    needed = CONNECTIONS - 1 if server else CONNECTIONS  # the server's own is the first
    stores = [server.store] if server else []
    for _ in range(needed):
        stores.append(dist.TCPStore(host, port, wait_for_workers=False, timeout=TIMEOUT))
        stores[-1].check(["x"])  # it has been accepted
    ends = [own for _, own, other in connections() if other == (host, port)]
    return JobStore(bytes.fromhex(secret), *stores), ends


def _check_reachable(host: str, port: int) -> None:
    """OSError if rank 0, which listens there, cannot be reached.

    torch would try for half an hour what the network refuses, and print its stack at each attempt.
    """
    socket.create_connection((host, port), SECONDS_TO_CONNECT).close()


def _meet_over_mpi(server: "_Server | None") -> JobStore:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    opened, ends = _connect(world.bcast(server.address if server else None), server)
    of_ranks = world.gather(ends) or []
    if server:
        server.keep_to({end for ends in of_ranks for end in ends})
    world.barrier()
    # Over libfabric a message moves only while its sender is inside MPI: a rank that went on at
    # once would keep others in the barrier.
    values, pause = opened.part("values"), FIRST_PAUSE
    values.add("met", 1)
    while values.add("met", 0) < world.size:
        world.Iprobe()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)  # hundreds of ranks ask one store
    return opened


# ---- Under torchrun ------------------------------------------------------------------------------


def _meet_over_torchrun(server: "_Server | None", launch: Launch, out: Path) -> JobStore:
    """The secret goes through a file; the connections, signed, through torchrun's own store."""
    open_to_all = _torchrun_store()
    with _shared_file(out, server.address) if server else contextlib.nullcontext() as name:
        if name:
            open_to_all.set(KEY, name)
        shared = open_to_all.get(KEY).decode(errors="replace")
        address = server.address if server else read_file(out, shared)
        opened, ends = _connect(address, server)
        open_to_all.set(f"{KEY} {launch.rank}", sign(opened, launch.rank, json.dumps(ends)))
        if server:
            signed = [open_to_all.get(f"{KEY} {rank}") for rank in range(launch.size)]
            server.keep_to({end for i, text in enumerate(signed) for end in read(opened, i, text)})
            opened.part("values").set("closed", "")
        opened.part("values").wait(["closed"])
    return opened


def sign(opened: JobStore, rank: int, ends: str) -> str:
    """The ends of a rank's connections as text, signed with the secret of the job."""
    return opened.key(f"connections of {rank}: {ends}") + ends


def read(opened: JobStore, rank: int, signed: bytes) -> set[End]:
    """What `sign` signed; UserError for anything else."""
    ends = signed[64:].decode(errors="replace")
    if not hmac.compare_digest(signed, sign(opened, rank, ends).encode()):
        raise UserError(f"torchrun's store was changed by another program: {KEY} {rank}")
    return {(host, port) for host, port in json.loads(ends)}


@contextlib.contextmanager
def _shared_file(out: Path, address: Address) -> Iterator[str]:
    """A file with the address, of which this gives the name, as long as this is not left."""
    name = os.urandom(16).hex()
    path = out / f".rendezvous-{name}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UserError(f"cannot write {path}, for the other ranks: {error.strerror}") from None
    try:
        with open(number, "w") as file:
            json.dump(address, file)
        yield name
    finally:
        path.unlink(missing_ok=True)


def _torchrun_store() -> Any:
    """torchrun's own store, which everybody can read and change."""
    import torch.distributed as dist

    try:
        return next(dist.rendezvous("env://"))[0]
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ.get("MASTER_PORT")
        raise UserError(
            f"port {port} (MASTER_PORT) of {socket.gethostname()} is in use, perhaps by another "
            f"job on this node: give torchrun another --master-port, or --standalone on one node"
        ) from None


def read_file(out: Path, name: str) -> Address:
    """What rank 0 wrote; UserError if the file is not seen in time, or not this user's alone."""
    if not re.fullmatch("[0-9a-f]{32}", name):
        raise UserError(f"torchrun's store was changed by another program: {KEY} is {name!r}")
    path, until = out / f".rendezvous-{name}", time.monotonic() + SECONDS_FOR_FILE
    while not path.exists():
        if time.monotonic() > until:
            raise UserError(
                f"rank 0 wrote {path}, and {socket.gethostname()} did not see it within "
                f"{SECONDS_FOR_FILE:g} s: torchrun on several nodes needs --out on a file system "
                f"that all nodes share, or start with mpirun or srun"
            )
        time.sleep(LONGEST_PAUSE)
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise UserError(f"{path}, written by rank 0, cannot be read: {error.strerror}") from None
    found = os.fstat(number)
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.getuid():
        os.close(number)
        raise UserError(f"{path} is not a regular file of user {os.getuid()} alone")
    with open(number) as file:
        host, port, secret = json.load(file)
    return host, port, secret


# ---- Who is connected ----------------------------------------------------------------------------


class _Server:
    """Rank 0's store, and the socket at which it listens."""

    def __init__(self, host: str, size: int) -> None:
        import torch.distributed as dist

        listener = socket.create_server((host, 0), backlog=max(128, 2 * size))
        port = listener.getsockname()[1]
        self.address: Address = (host, port, os.urandom(32).hex())
        self.listener = listener.dup()
        _check_reachable(host, port)  # torch's server is a client of its own
        self.store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=TIMEOUT,
            master_listen_fd=listener.detach(),
        )

    def keep_to(self, ranks: set[End]) -> None:
        """Take no new connections, and end those whose other ends are not the ranks'.

        Raises UserError if a rank's own connection is not there.
        """
        drop_all(self.listener)
        while self._unaccepted():
            time.sleep(FIRST_PAUSE)
        self.store.check(["closed"])  # answered by the thread that accepts: it has done so
        self.listener.close()
        if absent := ranks - self._end_others(ranks):
            host, port = min(absent)
            raise UserError(
                f"a rank connects to the store from {host}:{port}, and rank 0 sees it come from "
                f"elsewhere: the addresses between the nodes must not be translated"
            )

    def _end_others(self, ranks: set[End]) -> set[End]:
        """Shut down the connections of others; the other ends of all that there were."""
        seen = set()
        for sock, own, other in connections():
            if own[1] == self.address[1]:
                seen.add(other)
                if other not in ranks:
                    sock.shutdown(socket.SHUT_RDWR)
        return seen

    def _unaccepted(self) -> int:
        known = self.listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, UNACCEPTED_AT + 4)
        return struct.unpack_from("I", known, UNACCEPTED_AT)[0]


def drop_all(listener: socket.socket) -> None:
    """Let the kernel drop all packets of new connections to a listening socket."""
    filter_at = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
    program = struct.pack("HP", 1, ctypes.addressof(filter_at))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def connections() -> Iterator[tuple[socket.socket, End, End]]:
    """Each connection of this process, as a duplicate, with its own and its other end."""
    for number in os.listdir("/proc/self/fd"):
        try:
            with _duplicate(int(number)) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    yield sock, _end(sock.getsockname()), _end(sock.getpeername())
        except OSError:  # no socket, one that listens, or closed in the meantime
            continue


def _end(address: tuple) -> End:
    """Without what IPv6 adds: torch connects to an IPv4 address through such a socket."""
    return address[0].removeprefix("::ffff:"), address[1]


def _duplicate(number: int) -> socket.socket:
    """A socket of a descriptor, which stays as it is; OSError if it is none, or closed."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
