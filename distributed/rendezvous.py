"""How ranks meet at the start: each takes a device and cores, and learns where all others run.

    meeting = meet(launch, config.run)        # collective over all ranks

Process groups are started after this, in context.py. Read launch.py before, which finds this rank's
number; store.py has the key-value store over which ranks meet. A Place says where a rank runs:
its node, cores and GPU (placement.py).
"""

import dataclasses
import faulthandler
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from base.errors import UserError, exit_with
from config.run_options import Run
from distributed import gpus, placement
from distributed.early_end import SECONDS_TO_MEET, node_name
from distributed.launch import Launch, Local, cores_asked_for, find_local
from distributed.placement import Place
from distributed.store import StoreExchange, open_store
from watchdog.heartbeat import start_time

MEETING_TIMEOUT = timedelta(seconds=SECONDS_TO_MEET)


@dataclass
class Meeting:
    """The result of `meet`: the places of all ranks, and this rank's device, cores and stores."""

    launch: Launch
    rank: int
    size: int
    node: str  # the name of this rank's node
    local: Local  # this rank's number on its node
    places: list[Place]  # the place of every rank, in rank order
    device: Any  # torch.device
    backend: str  # nccl, gloo, or none for a single process
    threads: int  # the number of torch's threads on the CPU for this rank
    store: Any  # torch's key-value store, shared by all ranks; None for a single process
    # The same store over this rank's second connection, for a thread that must not wait while
    # another thread uses `store`.
    second_store: Any = None
    group_store: Any = None  # the part of the store in which process groups meet
    # Shared secret that authenticates ranks to the monitor.
    monitor_key: str = field(default="", repr=False)
    # The process of every rank, in rank order: its id, and its start in ticks since boot.
    processes: list[tuple[int, int]] = field(default_factory=list)


def meet(launch: Launch, run: Run, within: timedelta = MEETING_TIMEOUT) -> Meeting:
    """Choose device, cores and backend, and meet the other ranks; collective over all ranks.

    within: the time limit. A rank that has not met all others by then prints the stack of its wait
    and exits with status 1. If launcher and MPI disagree, or two ranks have the same GPU, rank 0
    prints the error; if the device or backend asked for is not there, the first rank of each node
    prints the error. The job then ends with status 2.
    """
    node = node_name()
    # `index` decides who prints a mistake that several ranks find: a rank with index 0, at once. A
    # mistake in the launch is found by all ranks of the job, so at first the index is the rank.
    index = launch.rank
    # faulthandler's thread keeps the time limit. It needs no Python lock, which MPI_Init holds.
    faulthandler.dump_traceback_later(within.total_seconds(), exit=True, file=2)
    try:
        local = find_local(launch)
        index = local.rank  # all ranks of a node find the next mistakes: one of them prints
        device, gpu, backend = _choose_device(run, launch, local, node)
        cores, threads = _take_cores(run, local)
        opened = open_store(launch, local)
        store = opened.part("values")
        index = launch.rank
        this_place = Place(node, local.rank, str(device), gpu, cores, cores_asked_for())
        if gpu is not None:
            near, visible = gpus.near_cores(device), gpus.visible()
            this_place = dataclasses.replace(this_place, near_gpu=near, visible_gpus=visible)
        seconds = MEETING_TIMEOUT.total_seconds()
        exchange = StoreExchange(store, launch.rank, launch.size, "places", seconds=seconds)
        process = os.getpid(), start_time(os.getpid())
        here = {"place": dataclasses.asdict(this_place), "process": process}
        gathered = exchange.gather("place", here)
        # The cores of a Place are a tuple, of which JSON has made a list.
        described = [rank["place"] for rank in gathered]
        places = [Place(**place | {"cores": tuple(place["cores"])}) for place in described]
        processes = [tuple(rank["process"]) for rank in gathered]
        faulthandler.cancel_dump_traceback_later()  # all ranks have met
        try:
            placement.check_devices(places)
            if backend == "nccl" and not gpus.share_gpu_for_tests(places, launch.rank):
                gpus.check_gpus(places)
        except UserError:  # all ranks have this error: rank 0, where the store is, exits last
            exchange.leave()
            raise
    except UserError as mistake:
        # The rank with index 0 normally prints the mistake and ends all ranks during this sleep.
        # If the mistake is this rank's alone, this rank prints it after the sleep.
        if index:
            time.sleep(launch.exit_delay)
        exit_with(mistake)
    return Meeting(
        launch,
        launch.rank,
        launch.size,
        node,
        local,
        places,
        device,
        backend,
        threads,
        store,
        second_store=opened.part("values", second=True),
        group_store=opened.part("groups"),
        monitor_key=opened.secret,
        processes=processes,
    )


# ---- Device and cores ----------------------------------------------------------------------------


def _choose_device(run: Run, launch: Launch, local: Local, node: str):
    """Return the rank's torch.device, its GPU's identifier (None on a CPU), and the backend.

    The backend is nccl, gloo, or none for a single process. With --device auto a node with a GPU
    uses the GPU. Raise UserError if --device or --backend cannot be had on this node.
    """
    import torch

    on_gpu = False
    if run.device != "cpu":
        on_gpu = gpus.are_usable(required=run.device == "cuda")
    backend = run.backend
    if backend == "auto":
        backend = "nccl" if on_gpu else "gloo"
    if backend == "nccl" and not on_gpu:
        raise UserError("--backend nccl needs --device cuda; CPUs use gloo")
    if launch.size == 1:
        backend = "none"
    if not on_gpu:
        return torch.device("cpu"), None, backend
    device, identifier = gpus.take(local, node, sharing=backend != "nccl")
    return device, identifier, backend


def _take_cores(run: Run, local: Local) -> tuple[tuple[int, ...], int]:
    """Bind this process to its share of the cores; return the share and the number of threads.

    If several ranks may use the same cores, these are divided among the ranks, provided that there
    is at least one core for each and bind_cores is not false. The threads are torch's threads
    on the CPU: OMP_NUM_THREADS, or a thread for each physical core of the share.
    """
    import torch

    cores = placement.allowed_cores()
    physical = placement.physical_cores(cores)
    share = placement.share_of_cores(physical, local.sharing, local.place_among_sharing)
    if share is not None and run.bind_cores and local.sharing > 1:
        os.sched_setaffinity(0, share)  # for this thread, and for the threads it starts later
        cores = share
    threads = placement.threads_asked_for() or max(1, len(physical) // local.sharing)
    torch.set_num_threads(threads)
    return cores, threads
