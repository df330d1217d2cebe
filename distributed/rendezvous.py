"""How ranks meet: device and cores, a store that all share, everyone's place, process groups.

    meeting = meet(launch, config.run)        # collective over all ranks

Over MPI, rank 0 opens the store at a port that the system chooses, and broadcasts the address;
under torchrun, torch's own rendezvous gives the store.
"""

import dataclasses
import faulthandler
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil

from config.messages import UserError, exit_with
from config.schema import Run
from distributed import placement
from distributed.launch import Launch, Local, cores_asked_for, find_local, node_name
from distributed.placement import Place
from distributed.store import StoreExchange

COLLECTIVE_TIMEOUT = timedelta(hours=4)  # torch's own: the watchdog reports a hang long before
MEETING_TIMEOUT = timedelta(minutes=30)  # until all have met: the watchdog does not run yet
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.1  # seconds between two looks for ranks without the address


@dataclass
class Meeting:
    """What a rank knows when all have met."""

    launch: Launch
    rank: int
    size: int
    node: str
    local: Local
    places: list[Place]  # of every rank
    device: Any  # torch.device
    backend: str  # nccl, gloo, or none for a single process
    threads: int
    store: Any  # torch's key-value store, shared by all ranks; None for a single process


def meet(launch: Launch, run: Run, within: timedelta = MEETING_TIMEOUT) -> Meeting:
    """Choose device, cores and backend, and meet the other ranks; collective over all ranks.

    A rank that has not met all others in time prints where it waits and exits with status 1. If
    launcher and MPI disagree, or the device or backend asked for is not there, the first rank of
    each node prints the error and every rank that sees it exits with status 2.
    """
    node, index = node_name(), launch.rank  # index 0, of the ranks that see a mistake, prints it
    # From a thread that needs no Python lock: MPI_Init holds it.
    faulthandler.dump_traceback_later(within.total_seconds(), exit=True, file=2)
    try:
        local = find_local(launch)
        index = local.rank  # the next mistakes are a node's
        device, gpu, backend = _choose_device(run, launch, local, node)
        cores, threads = _take_cores(run, local)
        store = _open_store(launch, local)
        index = launch.rank
        own = Place(node, local.rank, str(device), gpu, cores, cores_asked_for())
        seconds = MEETING_TIMEOUT.total_seconds()
        exchange = StoreExchange(store, launch.rank, launch.size, "places", seconds=seconds)
        gathered = exchange.gather("place", dataclasses.asdict(own))
        places = [Place(**place | {"cores": tuple(place["cores"])}) for place in gathered]
        faulthandler.cancel_dump_traceback_later()
        if backend == "nccl":
            placement.check_gpus(places)
    except UserError as mistake:
        exit_with(mistake, index == 0, launch.exit_delay)
    if store is not None:
        store = _start_process_groups(store, launch, device, backend)
    rank, size = launch.rank, launch.size
    return Meeting(launch, rank, size, node, local, places, device, backend, threads, store)


# ---- Device and cores ----------------------------------------------------------------------------


def _choose_device(run: Run, launch: Launch, local: Local, node: str):
    """The rank's torch.device, the identifier of its GPU, and nccl, gloo or none."""
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
        return torch.device("cpu"), None, backend
    visible = torch.cuda.device_count()
    sharing = backend != "nccl"
    gpu = placement.choose_gpu(local.rank, local.size, visible, node, sharing)
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    name, capability = torch.cuda.get_device_name(gpu), torch.cuda.get_device_capability(gpu)
    placement.check_kernels(name, capability, torch.cuda.get_arch_list(), torch.__version__)
    return device, f"GPU-{torch.cuda.get_device_properties(device).uuid}", backend


def _take_cores(run: Run, local: Local) -> tuple[tuple[int, ...], int]:
    """Bind this process to its share of the cores; those cores, and the number of threads.

    Cores that several ranks are allowed alike are divided among them if there is one for each.
    """
    import torch

    cores = placement.allowed_cores()
    physical = placement.physical_cores(cores)
    share = placement.share_of_cores(physical, local.sharing, local.place_among_sharing)
    if share is not None and run.bind_cores and local.sharing > 1:
        os.sched_setaffinity(0, share)  # of this thread, and of those that it starts later
        cores = share
    requested = os.environ.get("OMP_NUM_THREADS")
    threads = int(requested) if requested else max(1, len(physical) // local.sharing)
    torch.set_num_threads(threads)
    return cores, threads


# ---- The store -----------------------------------------------------------------------------------


def _open_store(launch: Launch, local: Local):
    """The key-value store that all ranks share, or None for a single process; collective.

    UserError if the port of torchrun's rendezvous is in use.
    """
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


def _store_over_mpi(launch: Launch, local: Local):
    """A store on rank 0, at a port that the system chooses: two jobs never use the same."""
    import torch.distributed as dist
    from mpi4py import MPI

    world, first = MPI.COMM_WORLD, launch.rank == 0
    host, port = (host_address(local), 0) if first else world.bcast(None)
    store = dist.TCPStore(host, port, is_master=first, timeout=MEETING_TIMEOUT)
    if first:
        world.bcast((host, store.port))
    # Over libfabric a message moves only while its sender is inside MPI: rank 0 would otherwise
    # wait in the store for ranks that still wait for its broadcast.
    store.add("met", 1)
    pause = FIRST_PAUSE
    while store.add("met", 0) < world.size:
        world.Iprobe()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)  # hundreds of ranks poll one store
    return store


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


def _start_process_groups(store, launch: Launch, device, backend: str):
    """Start torch.distributed in a part of the store; collective. Returns the part for values."""
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        store=dist.PrefixStore("groups", store),
        rank=launch.rank,
        world_size=launch.size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if backend == "nccl" else None,
    )
    return dist.PrefixStore("trine", store)
