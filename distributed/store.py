"""The job's key-value store: how the ranks open it, and the small values they exchange through it.

    opened = open_store(launch, local)             # collective over all ranks
    values = opened.part("values")                 # keys with a prefix that nobody can guess
    exchange = StoreExchange(values, rank, size, "checkpoints")
    everyone = exchange.gather("room", {"disk": 10**12})   # every rank's value, in rank order
    newest = exchange.agree(step, max)                     # rank 0 combines all values
    exchange.tell("trace", spans)                          # leave a value for rank 0;
    spans = exchange.collect("trace")                      # on rank 0: every rank's value

An exchange needs no collective. Every wait has a time limit. A wait beyond the limit raises
NoAnswer with the silent ranks. The recorder (watchdog/flight_recorder.py) keeps a rank's waits for
the report of a hang; only the training thread may use it.

The store is torch's TCPStore on rank 0, to which only the job's ranks are connected. It has no
authentication: any program that can connect can read, set and delete every key. So rank 0 makes a
secret and an invitation with the store's address, and gives the invitation to the other ranks over
a channel that strangers cannot write to:

    MPI                         a broadcast
    torchrun, one node          a file without a name, which only this user can open; torchrun's
                                store says which file it is
    torchrun, several nodes     torchrun's own store, which is the only channel there is; sealed
                                with TRINE_SECRET if the user has set it on all nodes

The invitation has the secret, except over torchrun's own store, which anyone may read: there it has
the secret's fingerprint, and the secret only as TRINE_SECRET hides it. Every rank connects, and
announces itself under a key that only those who know the secret can make. When all ranks have done
so, rank 0 closes the port. If another program is connected by then, the job ends with an error.
Only then rank 0 puts the secret into the store. A rank takes no secret with another fingerprint, so
it does not matter what others have set before. All later keys begin with the secret, and the ranks
show the secret to the watchdog's monitor.

Each rank has CONNECTIONS connections: a thread that waits for a key keeps a connection busy.
"""

import hashlib
import hmac
import json
import os
import resource
import socket
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import IO, Any, NamedTuple

import psutil

from base.errors import ClusterError, NetworkError, NodeError, UserError, error_of
from distributed.early_end import node_name
from distributed.launch import Launch, Local
from watchdog.flight_recorder import FlightRecorder

PAUSE = 0.005  # seconds between two looks of rank 0 for a value that is not there yet
# A rank that leaves no value for this time is considered lost. The time is long, because a rank may
# first have to write its part of a checkpoint, which takes minutes on a slow disk.
SECONDS_TO_ANSWER = 3600.0
SECONDS_TO_LEAVE = 10.0  # the longest wait of rank 0 for the other ranks in `leave`
TIMEOUT = timedelta(minutes=30)  # torch's time limit for a call of the store
CONNECTIONS = 2  # the number of connections of each rank to the store
OTHER_FILES = 256  # the most files that a rank has open besides the connections to the store
SECONDS_BETWEEN_LOOKS = 0.05  # seconds between two looks for a value or a closed connection
SECONDS_TO_CONNECT = 60.0  # limit for a connection to rank 0: the network may need several attempts
SECONDS_TO_CLOSE = 10.0  # ended connections must vanish from the kernel's list within this time
# A waiting rank announces itself again, and looks at torchrun's store, every TURNS looks.
TURNS = 20
SEALED_BY = "TRINE_SECRET"  # environment variable: the user's own secret, the same on all nodes
KEY = "trine rendezvous"  # torchrun's store has the invitation, or its file, under this key
SECRET = "secret"  # rank 0 puts the secret under this key into the job's store
MOST_BYTES = 4096  # an invitation has fewer bytes


# ---- Values between ranks ------------------------------------------------------------------------


class NoAnswer(TimeoutError):
    """`ranks` sent no value within the time limit."""

    def __init__(self, ranks: list[int], seconds: float):
        """Make the message. ranks: those that were silent. seconds: the time limit."""
        self.ranks = ranks
        noun = "ranks" if len(ranks) > 1 else "rank"
        names = f"{noun} {', '.join(map(str, ranks))}"
        limit = f"{seconds / 60:g} minutes" if seconds >= 60 else f"{seconds:g} s"
        super().__init__(f"{names} did not answer within {limit}")


def first_given(values: list) -> tuple[int, Any] | None:
    """Return (rank, value) of the first rank with a value, or None; for `StoreExchange.agree`.

    values: by rank, a value, or None or an empty text.
    """
    return next(((rank, value) for rank, value in enumerate(values) if value), None)


def packed(result: Any) -> bytes:
    """Return a result as the store sends it to every rank: JSON, compressed.

    The places of 4,096 ranks are 1.2 MB, which rank 0 sends 4,096 times: 5.0 GB as text, 0.65 GB
    compressed.
    """
    return zlib.compress(json.dumps(result).encode(), 1)


def unpacked(sent: bytes) -> Any:
    """Return the result that `packed` made bytes of."""
    return json.loads(zlib.decompress(sent))


class StoreExchange:
    """JSON values that ranks leave for one another in the store, under keys that share a name.

    store: torch's store, or None for a single process. recorder: records the waits of the calling
    thread; None: they are not recorded. seconds: after this time a silent rank is considered lost.
    Every rank makes its exchanges in the same order, so that two exchanges with the same name do
    not read one another's values. A waiting thread keeps the store's connection busy: a thread that
    must not wait for another one uses the second connection (`context.second_store`).
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        name: str,
        recorder: FlightRecorder | None = None,
        seconds: float = SECONDS_TO_ANSWER,
    ):
        """Choose the beginning of this exchange's keys; does not wait for other ranks.

        name: the purpose of the exchange, such as "places". A later exchange with the same name
        gets other keys.
        """
        import torch.distributed as dist

        # A single process has no store of the job, and uses a store in its own memory.
        self.store = dist.HashStore() if store is None else store
        self.rank = rank
        self.size = size
        self.seconds = seconds
        self.recorder = recorder or FlightRecorder()
        # The beginning of all keys: the name, and the number of exchanges that this rank has made
        # with that name, counted in the store. The number is the same on every rank.
        self._name = f"{name}/{self.store.add(f'{name}s/{rank}', 1)}"
        self._agreed = 0  # the number of calls of `agree`, so that each call has keys of its own

    def gather(self, key: str, value: Any) -> list[Any]:
        """Return every rank's value in rank order, on every rank; every rank must call this.

        Rank 0 sends N values to each of N ranks, compressed: ranks tell much that is alike. Where
        each rank needs only what follows from them, `agree` sends that. value: this rank's value,
        which can be written as JSON. key: names the values in the store. Raise NoAnswer, on every
        rank, with the ranks that were silent.
        """
        return self.agree(value, lambda values: values, key)

    def agree(self, value: Any, combine: Callable[[list], Any], key: str = "agree") -> Any:
        """Return combine(values of all ranks), computed on rank 0, on every rank.

        Every rank must call this; it needs no collective, and so works before process groups are
        started or when a GPU hangs. value: this rank's value, which can be written as JSON.
        combine: takes the list of values in rank order, and returns what can be written as JSON. A
        UserError or NodeError of it is raised on every rank. Raise NoAnswer, on every rank, with
        the ranks that were silent.
        """
        import torch.distributed as dist

        self._agreed += 1
        key = f"{key}/{self._agreed}"
        self.tell(key, value)
        result_key = f"{self._name}/{key}/result"
        # Rank 0 puts the result, the silent ranks or the error into the store, for every rank.
        if self.rank == 0:
            try:
                result = {"value": combine(self.collect(key))}
            except NoAnswer as error:
                result = {"silent": error.ranks}
            except NodeError as error:
                result = {"failed": [str(error), error.nodes, error.kind, error.ranks]}
            except UserError as error:
                result = {"refused": [str(error), error.code]}
            self.store.set(result_key, packed(result))  # type: ignore[arg-type]
        began = time.monotonic()
        with self.recorder.waiting_for("store", (0,)):
            # The store wakes waiting ranks, so that hundreds of ranks need not poll it. Twice the
            # limit leaves rank 0 time to find other ranks silent first.
            try:
                self.store.wait([result_key], timedelta(seconds=2 * self.seconds))
            except dist.DistError as error:  # rank 0, where the store is, has ended or is silent
                raise NoAnswer([0], round(time.monotonic() - began, 1)) from error
        result = unpacked(self.store.get(result_key))
        if "silent" in result:
            raise NoAnswer(result["silent"], self.seconds)
        if "failed" in result:
            raise NodeError(*result["failed"])
        if "refused" in result:
            raise error_of(*result["refused"])
        return result["value"]

    def leave(self) -> None:
        """Make rank 0 wait until every rank has read the last result of this exchange.

        Called by every rank before it exits for an error that all ranks have agreed on. The store
        ends with rank 0; if rank 0 exited first, slower ranks would fail with an error of the store
        in place of the error that they have agreed on.
        """
        self.tell("left", None)
        if self.rank == 0:
            self.seconds = SECONDS_TO_LEAVE
            with suppress(NoAnswer):  # a rank that has died already says nothing
                self.collect("left")

    def tell(self, key: str, value: Any) -> None:
        """Leave this rank's value for rank 0, which must collect it before the key's next use."""
        self.store.set(f"{self._name}/{key}/{self.rank}", json.dumps(value))

    def collect(
        self,
        key: str,
        record: Callable[[str, Sequence[int]], None] | None = None,
    ) -> list[Any]:
        """Return the values that all ranks left with `tell`, in rank order; on rank 0, any thread.

        The values are deleted from the store, so that the key can be used again. record: a function
        that is called with ("store", ranks) before each wait. A background thread passes such a
        function, because only the training thread may use the recorder. Raise NoAnswer with the
        ranks that left no value in time.
        """
        limit = time.monotonic() + self.seconds
        keys = [f"{self._name}/{key}/{rank}" for rank in range(self.size)]
        silent = []
        for rank, key_of_rank in enumerate(keys):
            if record:
                record("store", (rank,))
            with nullcontext() if record else self.recorder.waiting_for("store", (rank,)):
                if not self._arrives(key_of_rank, limit):
                    silent.append(rank)
        if silent:
            raise NoAnswer(silent, self.seconds)
        values = [json.loads(self.store.get(key_of_rank)) for key_of_rank in keys]
        for key_of_rank in keys:
            self.store.delete_key(key_of_rank)
        return values

    def _arrives(self, key: str, limit: float) -> bool:
        """Wait until the key is in the store; return False if it is not there at the time `limit`.

        limit: a time of time.monotonic().
        """
        while not self.store.check([key]):
            if time.monotonic() > limit:
                return False
            time.sleep(PAUSE)
        return True


# ---- Opening the store ---------------------------------------------------------------------------


class Address(NamedTuple):
    """The address at which the store listens."""

    host: str
    port: int


@dataclass(frozen=True)
class Invitation:
    """What rank 0 tells the other ranks, so that they find its store and know it.

    host, port: where the store listens. fingerprint: SHA-256 of the secret. secret: the secret, or
    empty if it comes through the store, after its port has been closed.
    """

    host: str
    port: int
    fingerprint: str
    secret: str = field(default="", repr=False)

    @property
    def address(self) -> Address:
        """Where the store listens."""
        return Address(self.host, self.port)

    def announcement(self, rank: int) -> str:
        """Return the key under which a rank announces itself; only who knows the secret can."""
        return hmac.new(self.secret.encode(), f"rank {rank}".encode(), "sha256").hexdigest()

    def to_json(self) -> str:
        """Return the invitation as a JSON list."""
        return json.dumps([self.host, self.port, self.fingerprint, self.secret])


def read_invitation(text: bytes | str) -> Invitation:
    """Return the invitation in a JSON list. Raise ValueError for anything else."""
    values = json.loads(text)
    if not isinstance(values, list) or [type(value) for value in values] != [str, int, str, str]:
        raise ValueError("it is not [host, port, fingerprint, secret]")
    return Invitation(*values)


def sealed(invitation: Invitation, password: str) -> Invitation:
    """Return an invitation whose secret only who has the password can read; sealed again, it opens.

    The secret (32 bytes as text) is combined by XOR with an HMAC of all else that the invitation
    says, so that an invitation with another address does not open. The fingerprint is new for every
    job, so that no HMAC is used twice.
    """
    said = f"{invitation.host} {invitation.port} {invitation.fingerprint}"
    pad = hmac.digest(password.encode(), said.encode(), "sha256")
    hidden = bytes(a ^ b for a, b in zip(bytes.fromhex(invitation.secret), pad, strict=True))
    return replace(invitation, secret=hidden.hex())


def unsealed(invitation: Invitation, password: str) -> Invitation:
    """Return rank 0's invitation as this rank can read it, from torchrun's store.

    password: this rank's TRINE_SECRET, or empty. Raise UserError if rank 0 has another one, or if
    only one of the two has one.
    """
    nodes = (node_name(), "rank 0's node")
    if bool(password) != bool(invitation.secret):
        has, lacks = nodes if password else nodes[::-1]
        raise ClusterError(
            f"{SEALED_BY} is set on {has} and not on {lacks}: export it on all nodes"
        )
    if not password:
        return invitation
    with suppress(ValueError):
        found = sealed(invitation, password)
        if hmac.compare_digest(fingerprint_of(found.secret), invitation.fingerprint):
            return found
    raise ClusterError(
        f"{SEALED_BY} of {node_name()} does not open rank 0's address in torchrun's store, "
        f"{invitation.host}:{invitation.port}: rank 0 has another {SEALED_BY}, or another program "
        "has put the address there"
    )


def fingerprint_of(secret: str) -> str:
    """Return the SHA-256 of a secret, as hexadecimal text."""
    return hashlib.sha256(secret.encode()).hexdigest()


@dataclass
class JobStore:
    """This rank's two connections to the store (None for a single process), and the job's secret.

    secret: hexadecimal text, the same on all ranks.
    """

    secret: str = field(repr=False)
    first: Any = None  # torch's store over the first connection
    second: Any = None  # the same store over the second connection
    # Keeps torchrun's store alive while other ranks may still look at it: rank 0 may be the server
    # of that store too.
    channel: Any = None

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
    are connected to the store or have changed torchrun's, or the limit of open files is below the
    number of connections that rank 0 will have.
    """
    if launch.size == 1:  # no store is needed, but the watchdog's monitor asks for the secret
        return JobStore(new_secret())
    allow_open_files(launch.size)
    server = Server(host_address(local), launch.size) if launch.rank == 0 else None
    if not launch.mpi:
        password = os.environ.get(SEALED_BY, "")
        channel = TorchrunChannel(_torchruns_store(), local.one_node, password)
        invitation = channel.share(server.invitation) if server else channel.receive()
        opened = meet(invitation, launch.rank, launch.size, server, seldom=channel.check)
        opened.channel = channel
        return opened
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    invitation = world.bcast(server.invitation if server else None)
    # Over libfabric a message moves only while its sender is inside an MPI call. A rank that has
    # the invitation may have to forward it, so `meet` goes on calling MPI (Iprobe) while it waits.
    return meet(invitation, launch.rank, launch.size, server, world.Iprobe)


class TorchrunChannel:
    """How rank 0 gives the other ranks its invitation under torchrun.

    torchrun's store takes connections and values of every program that can reach it. If all ranks
    are on one node, it only says which open file of rank 0 has the invitation; every rank checks
    that the file belongs to this user alone. Between nodes there is no other channel, and what is
    in the store is sealed with the password, if there is one.
    """

    def __init__(self, store: Any, one_node: bool, password: str = "") -> None:
        """Share nothing yet. store: torchrun's. one_node: whether all ranks are on one node.

        password: what TRINE_SECRET says, or empty; not used on one node.
        """
        self.store = store
        self.one_node = one_node
        self.password = password
        self._text = ""  # what the store had under KEY when it was set or read
        self._file: IO[bytes] | None = None  # on rank 0: stays open until all ranks have met

    def share(self, invitation: Invitation) -> Invitation:
        """Let the other ranks have the invitation, on rank 0; return it as it was shared.

        Raise UserError if another program has set KEY, or if no temporary file can be written.
        """
        if self.store.check([KEY]):
            raise ClusterError(
                "torchrun's store has an address of this job's store already: another program has "
                "put it there, or torchrun has started ranks again (--nnodes MIN:MAX)"
            )
        if self.one_node:
            self._file = _unnamed_file(invitation.to_json().encode())
            self._text = json.dumps([os.getpid(), self._file.fileno()])
        elif self.password:
            self._text = sealed(invitation, self.password).to_json()
        else:
            invitation = replace(invitation, secret="")
            self._text = invitation.to_json()
        self.store.set(KEY, self._text)
        return invitation

    def receive(self) -> Invitation:
        """Wait for rank 0's invitation and return it, on the other ranks.

        Raise UserError if the store has something else in its place.
        """
        text = self.store.get(KEY)
        self._text = text.decode(errors="replace")
        try:
            if not self.one_node:
                return unsealed(read_invitation(text), self.password)
            process, descriptor = json.loads(text)
            return read_invitation(_content_of_own_file(int(process), int(descriptor)))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ClusterError(
                f"torchrun's store has no address of this job's store under {KEY!r}, but "
                f"{self._text[:80]!r} ({error}): another program has put it there"
            ) from None

    def check(self) -> None:
        """Raise UserError if torchrun's store has another invitation by now.

        Then some ranks may have taken the other one, and would wait for the rest for half an hour.
        """
        now = _value_now(self.store, KEY)
        if now != self._text:
            raise ClusterError(
                f"torchrun's store had {self._text[:80]!r} under {KEY!r} and has {now[:80]!r} now: "
                f"another program connects to MASTER_PORT, or two jobs have the same"
            )


def _unnamed_file(content: bytes) -> IO[bytes]:
    """Return a new file without a name, open, with mode 600 and this content."""
    try:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (open until all have met)
        os.fchmod(file.fileno(), 0o600)
        file.write(content)
    except OSError as error:
        raise ClusterError(f"cannot write a temporary file (TMPDIR): {error.strerror}") from None
    return file


def _content_of_own_file(process: int, descriptor: int) -> bytes:
    """Return the content of a file that a process of this user has open.

    Raise OSError if it cannot be opened, ValueError if it is no file of this user alone.
    """
    # The kernel lets only the process's user open this path.
    path = f"/proc/{process}/fd/{descriptor}"
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(number, "rb") as file:
        status = os.fstat(number)
        others = stat.S_IMODE(status.st_mode) & 0o077
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or others:
            raise ValueError(f"{path} is no file of user {os.geteuid()} alone")
        return file.read(MOST_BYTES)


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
        raise ClusterError(text)


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

        self.secret = new_secret()
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

    @property
    def invitation(self) -> Invitation:
        """The invitation to this store, with the secret."""
        return Invitation(*self.address, fingerprint_of(self.secret), self.secret)

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
                raise ClusterError(
                    f"the store of this job has {present} connections, and its ranks have "
                    f"{connections}: another program connects to the ports of {node_name()}"
                )
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _count(self) -> int:
        """Return the number of connections that the server has now."""
        all_ends = psutil.Process().net_connections("tcp")
        # This process is server and client, so both ends of its own connections are in the list.
        # Only the server's ends have the store's port as their local port.
        own_ends = [end for end in all_ends if end.laddr.port == self.address.port]
        return sum(end.status == psutil.CONN_ESTABLISHED for end in own_ends)


def meet(
    invitation: Invitation,
    rank: int,
    size: int,
    server: Server | None = None,
    act: Callable[[], Any] = lambda: None,
    seldom: Callable[[], Any] = lambda: None,
) -> JobStore:
    """Connect to the store and wait until all ranks have connected; collective over all ranks.

    invitation: rank 0's, the same on all ranks. rank, size: this rank, and the number of ranks.
    server: the server of the store, on rank 0; None on the other ranks. act: called at every look
    while this rank waits; seldom: called every TURNS looks. Raise UserError if the store cannot be
    reached, or if other programs are connected to it.
    """
    import torch.distributed as dist

    stores = [server.store] if server else []  # the server's object is rank 0's first connection
    _check_reachable(invitation.address)
    while len(stores) < CONNECTIONS:
        address = invitation.address
        store = dist.TCPStore(*address, wait_for_workers=False, timeout=TIMEOUT)
        store.check(["x"])  # returns when the server has accepted the connection
        stores.append(store)
    store = stores[0]

    def secret() -> str | None:
        """Return the secret that the store has, if it is rank 0's."""
        found = _value_now(store, SECRET)
        return found if fingerprint_of(found) == invitation.fingerprint else None

    silent = list(range(size)) if server else []  # the ranks that have not announced themselves
    turn = 0
    while not (found := secret()):
        if turn % TURNS == 0:  # again and again, since another program may delete the key
            store.set(invitation.announcement(rank), "")
            seldom()
        turn += 1
        silent = [one for one in silent if not store.check([invitation.announcement(one)])]
        if server and not silent:
            server.close_port(CONNECTIONS * size)
            store.set(SECRET, server.secret)
            continue
        act()
        time.sleep(SECONDS_BETWEEN_LOOKS)
    seldom()
    return JobStore(found, *stores)


def _value_now(store: Any, key: str) -> str:
    """Return the value of a key, or an empty text if there is none, without waiting for it.

    `check` and then `get` would wait for half an hour if another program deleted the key between.
    """
    return store.compare_set(key, "", "").decode(errors="replace")


def _check_reachable(address: Address) -> None:
    """Raise NetworkError if the address, at which rank 0 listens, cannot be reached.

    The connection is closed again at once. Without this check torch would try to connect for half
    an hour, and print its stack at each attempt.
    """
    try:
        socket.create_connection(address, SECONDS_TO_CONNECT).close()
    except OSError as error:
        raise NetworkError(
            f"{node_name()} cannot reach the store of this job at {address.host}:{address.port}: "
            f"{error.strerror or error}"
        ) from None


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
        raise ClusterError(
            f"port {port} (MASTER_PORT) of {socket.gethostname()} is in use, perhaps by another "
            f"job on this node: give torchrun another --master-port, or --standalone on one node"
        ) from None
