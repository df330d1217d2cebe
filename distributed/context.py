"""Who am I: rank, node, device; how ranks meet, and how a job ends when one fails.

    launch = discover()                   # launch.py, before torch
    cluster = start(launch, config.run)   # ranks meet, devices and threads are set
    with cluster.failing_loudly():        # an exception on one rank ends all ranks, non-zero
        ...
    cluster.stop()

torch and mpi4py are imported in the functions that need them, so that a user's mistake is
answered before the seconds these imports take.
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import functools
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psutil

from config.messages import UserError, exit_with
from config.schema import Run
from distributed.launch import Launch, Local, cores_asked_for, find_local, job_nodes, node_name
from distributed.placement import (
    Place,
    allowed_cores,
    check_gpus,
    choose_gpu,
    keep_to,
    physical_cores,
    share_of_cores,
)
from watchdog.flight_recorder import FlightRecorder
from watchdog.heartbeat import Watchdog, start_monitor

# The last resort, of torch's own: long before it, the watchdog has said who is missing and why.
COLLECTIVE_TIMEOUT = timedelta(hours=4)
# Before the ranks have met nothing else watches them.
MEETING_TIMEOUT = timedelta(minutes=30)
# mpirun carries what was printed to its own output, unless an abort overtakes it.
SECONDS_FOR_THE_LAST_WORD = 0.5
SECONDS_FOR_THE_MONITOR_TO_END = 5.0
# Rank 0 brings the launcher a status: under srun it stays this much longer than the others, under
# mpirun it ends them, and they wait for that so long.
SECONDS_FOR_THE_OTHERS_TO_GO = 1.0
SECONDS_TO_BE_ENDED = 30.0


def prepare(run: Run) -> None:
    """Set what CUDA, cuBLAS and NCCL read when they are loaded; to be called before torch is."""
    if run.blocking:
        os.environ |= {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@dataclass
class Context:
    """This process among all: made by `start`, passed to whoever needs it."""

    launch: Launch
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    places: list[Place]  # of every rank
    device: Any  # torch.device
    backend: str  # nccl, gloo, or none for a single process
    threads: int
    store: Any = None  # torch's key-value store, shared by all ranks
    recorder: FlightRecorder = field(default_factory=FlightRecorder)
    blocking: bool = False  # every collective is waited for where it starts
    watchdog: Watchdog | None = None
    _monitor: Any = None  # its process, on rank 0
    _groups: dict = field(default_factory=dict)

    @property
    def nodes(self) -> list[str]:
        """The node of every rank."""
        return [place.node for place in self.places]

    @property
    def job_nodes(self) -> int | None:
        """How many nodes the Slurm job holds, if this is one."""
        return job_nodes()

    def process_group(self, ranks: tuple[int, ...], role: str) -> Any:
        """torch's process group of these ranks; every rank must ask for every group, in order.

        Groups of the same ranks and role are made once: meshes of several layouts can share them.
        """
        import torch.distributed as dist

        if (ranks, role) not in self._groups:
            self._groups[ranks, role] = dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT)
        return self._groups[ranks, role]

    def clock(self) -> tuple[float, float]:
        """Seconds to add to time.monotonic() for a time common to all ranks, and their error."""
        if self.watchdog:
            return self.watchdog.clock_offset, self.watchdog.clock_error
        return time.time() - time.monotonic(), 0.0

    def describe(self) -> dict[str, Any]:
        """What run.json keeps about where the run took place."""
        return {
            "launcher": self.launch.launcher,
            "ranks": self.size,
            "nodes": sorted(set(self.nodes)),
            "device": _device_name(self.device),
            "backend": self.backend,
            "threads_per_rank": self.threads,
            "places": [dataclasses.asdict(place) for place in self.places],
        }

    @contextlib.contextmanager
    def failing_loudly(self):
        """End every rank, non-zero, if an exception leaves the block; does no collective."""
        try:
            yield
        except SystemExit:
            raise
        except BaseException as error:
            self._fail(error)

    def stop(self, status: int = 0) -> None:
        """Leave in order: nobody closes its connections while another still uses them.

        A status that is not 0 becomes the whole job's, and this does not return.
        """
        self.recorder.enter("end")
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier()
            dist.destroy_process_group()
        if self.watchdog:
            self.watchdog.close()
        if self._monitor:  # it ends when all have left it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._monitor.wait(SECONDS_FOR_THE_MONITOR_TO_END)
        if status:
            self._leave(status)

    def _leave(self, status: int) -> None:
        """Bring the status to the launcher; the ranks have nothing left to do.

        When a rank ends with another status than 0, launchers kill the rest and may answer with
        the kill's status. Under srun rank 0 alone has ours, and goes last. MPICH's mpirun keeps to
        the one that MPI_Abort names, of all ways to end.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        if self.launch.launcher.startswith("mpirun"):
            if self.rank != 0:
                time.sleep(SECONDS_TO_BE_ENDED)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nothing failed: no word of an abort
            self.end_all_ranks(status)
        if self.launch.mpi:
            from mpi4py import MPI

            MPI.Finalize()
            if self.rank != 0:
                os._exit(0)
            time.sleep(SECONDS_FOR_THE_OTHERS_TO_GO)
        os._exit(status)

    def _fail(self, error: BaseException) -> None:
        """Say why, unless another rank was first or is dead: then the monitor has ended this one
        before it comes to the last line, for what failed here is what followed from that.
        """
        mistake = isinstance(error, UserError)
        trace = "".join(traceback.format_exception(error))
        if self.watchdog is None or self.watchdog.fail(trace, mistake):
            where = f"rank {self.rank} of {self.size} on {self.node} failed:\n"
            text = f"error: {error}" if mistake else where + trace
            print(text, file=sys.stderr, flush=True)
            time.sleep(SECONDS_FOR_THE_LAST_WORD if self.size > 1 else 0.0)
        sys.stdout.flush()
        self.end_all_ranks(2 if mistake else 1)

    def end_all_ranks(self, status: int) -> None:
        """End every rank at once, from any thread; without MPI this one, and the monitor and the
        launcher end the others.
        """
        if self.watchdog:
            self.watchdog.end_job(status)
        if self.launch.mpi:
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(status)
        os._exit(status)


# ------------------------------------------------------------------------------------------------
# Start-up
# ------------------------------------------------------------------------------------------------


def start(launch: Launch, run: Run, meet_within: timedelta = MEETING_TIMEOUT) -> Context:
    """Meet the other ranks, choose device, cores and backend; collective over all ranks.

    A rank that has not met all others by then prints where it waits and leaves with status 1. If
    launcher and MPI disagree, or the device or backend asked for is not there, the first rank
    of each node says so and every rank that sees it leaves with status 2.
    """
    node, local = node_name(), None
    limit = meet_within.total_seconds()
    faulthandler.dump_traceback_later(limit, exit=True, file=2)  # also inside of MPI
    try:
        local = find_local(launch)
        device, backend = _choose_device(run, launch, local, node)
        cores, threads = _take_cores(run, local)
        store = _store(launch, local)
    except UserError as mistake:
        speaks = (local.rank if local else launch.rank) == 0
        exit_with(mistake, speaks, launch.patience)
    own = Place(node, local.rank, str(device), _gpu_id(device), cores, cores_asked_for())
    places = _tell_all(store, launch, own)
    faulthandler.cancel_dump_traceback_later()
    if backend == "nccl":
        try:
            check_gpus(places)  # each rank finds the same
        except UserError as mistake:
            exit_with(mistake, launch.rank == 0, launch.patience)
    _start_groups(store, launch, device, backend)
    context = Context(
        launch,
        launch.rank,
        launch.size,
        local.rank,
        local.size,
        node,
        places,
        device,
        backend,
        threads,
        store and _prefixed(store, "trine"),
        recorder=_recorder(backend),
        blocking=run.blocking,
    )
    if run.deterministic:
        _make_deterministic()
    if run.watchdog:
        _watch(context, run, local)
    return context


def _choose_device(run: Run, launch: Launch, local: Local, node: str):
    """The rank's torch.device, and nccl, gloo or none."""
    import torch

    available = torch.cuda.is_available()
    if run.device == "cuda" and not available:
        raise UserError("--device cuda: torch sees no CUDA device on this node")
    on_gpu = available and run.device != "cpu"
    backend = run.backend if run.backend != "auto" else "nccl" if on_gpu else "gloo"
    if backend == "nccl" and not on_gpu:
        raise UserError("--backend nccl needs --device cuda; CPUs use gloo")
    if launch.size == 1:
        backend = "none"
    if not on_gpu:
        return torch.device("cpu"), backend
    visible = torch.cuda.device_count()
    gpu = choose_gpu(local.rank, local.size, visible, node, sharing=backend != "nccl")
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    return device, backend


def _gpu_id(device) -> str | None:
    if device.type != "cuda":
        return None
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _take_cores(run: Run, local: Local) -> tuple[tuple[int, ...], int]:
    """Keep to this rank's cores, and use as many threads, unless OMP_NUM_THREADS decides.

    What Slurm or a cgroup gave is divided among the ranks that were given the same, if there is a
    core for each.
    """
    import torch

    cores = allowed_cores()
    physical = physical_cores(cores)
    own = share_of_cores(physical, local.sharing, local.place_among_sharing)
    if own is not None and run.bind_cores and local.sharing > 1:
        keep_to(own)
        cores = own
    asked = os.environ.get("OMP_NUM_THREADS")
    threads = int(asked) if asked else max(1, len(physical) // local.sharing)
    torch.set_num_threads(threads)
    return cores, threads


def _store(launch: Launch, local: Local):
    """The key-value store that all ranks share, or None for a single process."""
    if launch.size == 1:
        return None
    if launch.mpi:
        return _store_over_mpi(launch, local)
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


def _prefixed(store, name: str):
    import torch.distributed as dist

    return dist.PrefixStore(name, store)


def _tell_all(store, launch: Launch, own: Place) -> list[Place]:
    """The place of every rank: rank 0 collects them, so that nobody asks the store for each."""
    if store is None:
        return [own]
    store = _prefixed(store, "places")
    store.set(str(launch.rank), json.dumps(dataclasses.asdict(own)))
    if launch.rank == 0:
        everyone = [json.loads(store.get(str(rank))) for rank in range(launch.size)]
        store.set("all", json.dumps(everyone))
    places = json.loads(store.get("all"))
    return [Place(**place | {"cores": tuple(place["cores"])}) for place in places]


def _start_groups(store, launch: Launch, device, backend: str) -> None:
    """Start torch.distributed."""
    if store is None:
        return
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        store=_prefixed(store, "groups"),
        rank=launch.rank,
        world_size=launch.size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if backend == "nccl" else None,
    )


def _store_over_mpi(launch: Launch, local: Local):
    """A store on rank 0 at a port the system chose, told to the others by MPI: no two jobs meet."""
    import torch.distributed as dist
    from mpi4py import MPI

    world, address, store = MPI.COMM_WORLD, None, None
    if launch.rank == 0:
        host = "127.0.0.1" if local.one_node else _reachable_address()
        store = dist.TCPStore(host, 0, is_master=True, timeout=MEETING_TIMEOUT)
        address = (host, store.port)
    host, port = world.bcast(address)
    if launch.rank != 0:
        store = dist.TCPStore(host, port, is_master=False, timeout=MEETING_TIMEOUT)
    _keep_mpi_going(world, store)
    return store


def _keep_mpi_going(world, store) -> None:
    """Until every rank has the address: over libfabric, what was sent moves while its sender is in
    MPI, and rank 0 would wait in the store for ranks that wait for its broadcast.
    """
    store.add("met", 1)
    pause = 0.001
    while store.add("met", 0) < world.size:
        world.Iprobe()
        time.sleep(pause)
        pause = min(2 * pause, 0.1)  # hundreds of ranks ask the one store


def _reachable_address() -> str:
    """This node's address as other nodes see it: never the loopback some /etc/hosts give."""
    address = socket.gethostbyname(socket.gethostname())
    if not address.startswith("127."):
        return address
    for cards in psutil.net_if_addrs().values():
        for card in cards:
            if card.family == socket.AF_INET and not card.address.startswith("127."):
                return card.address
    return address


def _watch(context: Context, run: Run, local: Local) -> None:
    """Connect to the monitor, which rank 0 starts first; from here on nothing waits for ever."""
    address, mistake = None, None
    if context.rank == 0:
        host = "127.0.0.1" if local.one_node else _reachable_address()
        try:
            address, context._monitor = start_monitor(
                host, context.node, context.size, run.out, run.hang_timeout
            )
        except UserError as error:
            mistake = str(error)
    if context.store is not None:
        if context.rank == 0:
            context.store.set("monitor", json.dumps([address, mistake]))
        address, mistake = json.loads(context.store.get("monitor"))
    if mistake:
        exit_with(UserError(mistake), context.rank == 0, context.launch.patience)
    context.watchdog = Watchdog(
        context.recorder, tuple(address), context.rank, context.node, context.end_all_ranks
    )
    atexit.register(context.watchdog.close)  # sys.exit leaves in order too


def _recorder(backend: str) -> FlightRecorder:
    if backend != "nccl":
        return FlightRecorder()
    import torch

    return FlightRecorder(functools.partial(torch.cuda.Event, enable_timing=True))


def _make_deterministic() -> None:
    import torch

    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _device_name(device) -> str:
    if device.type != "cuda":
        return f"{psutil.cpu_count() or 1} CPU cores"
    import torch

    return torch.cuda.get_device_name(device)
