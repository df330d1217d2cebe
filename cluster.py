"""Who am I: launcher, rank, node, device; how ranks meet, and how a job ends when one fails.

    launch = discover()                   # from the launcher's variables alone, before torch
    cluster = start(launch, config.run)   # ranks meet, devices and threads are set
    with cluster.failing_loudly():        # an exception on one rank ends all ranks, non-zero
        ...
    cluster.stop()

Order of trust: torchrun's variables, MPI (mpirun or srun), a Slurm step of several tasks, else a
single process. What the launcher says and what MPI says must agree: a job that silently becomes
four lonely jobs overwriting one another is the classic accident.

torch and mpi4py are imported in the functions that need them, so that a user's mistake is
answered before the seconds these imports take.
"""

import contextlib
import os
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psutil

from config import Run, UserError, exit_with

# A collective that takes longer than this has lost a rank.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
# A rank that failed because another one did stays this long, so that the cause is printed first.
SECONDS_FOR_THE_FIRST_FAILURE = 5.0


@dataclass(frozen=True)
class Launch:
    """What the launcher's environment variables say about this process."""

    launcher: str
    rank: int = 0
    size: int = 1
    mpi: bool = False


def discover(environment: dict[str, str] | None = None) -> Launch:
    """Which launcher started this process, with which rank out of how many."""
    env = os.environ if environment is None else environment

    def launch(name: str, rank: str, size: str, mpi: bool) -> Launch:
        return Launch(name, int(env[rank]), int(env[size]), mpi)

    if "TORCHELASTIC_RUN_ID" in env:
        return launch("torchrun", "RANK", "WORLD_SIZE", mpi=False)
    in_step = "SLURM_STEP_ID" in env and "SLURM_PROCID" in env
    if "OMPI_COMM_WORLD_SIZE" in env:
        name = "srun with Open MPI" if in_step else "mpirun of Open MPI"
        return launch(name, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", mpi=True)
    if in_step and int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1"))) > 1:
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
        return launch("srun", "SLURM_PROCID", tasks, mpi=True)
    if "PMI_SIZE" in env:
        return launch("mpirun", "PMI_RANK", "PMI_SIZE", mpi=True)
    return Launch("python")


@dataclass
class Cluster:
    """This process among all: made by `start`, passed to whoever needs it."""

    launch: Launch
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    nodes: list[str]  # of every rank
    device: Any  # torch.device
    backend: str  # nccl, gloo, or none for a single process
    threads: int
    store: Any = None  # torch's key-value store, shared by all ranks
    _groups: dict = field(default_factory=dict)

    def process_group(self, ranks: tuple[int, ...], role: str) -> Any:
        """torch's process group of these ranks; every rank must ask for every group, in order.

        Groups of the same ranks and role are made once: meshes of several layouts can share them.
        """
        import torch.distributed as dist

        if (ranks, role) not in self._groups:
            self._groups[ranks, role] = dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT)
        return self._groups[ranks, role]

    def describe(self) -> dict[str, Any]:
        """What run.json keeps about where the run took place."""
        return {
            "launcher": self.launch.launcher,
            "ranks": self.size,
            "nodes": sorted(set(self.nodes)),
            "device": _device_name(self.device),
            "backend": self.backend,
            "threads_per_rank": self.threads,
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

    def stop(self) -> None:
        """Leave in order: nobody closes its connections while another still uses them."""
        if self.size == 1:
            return
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()

    def _fail(self, error: BaseException) -> None:
        mistake = isinstance(error, UserError)
        if not self._first_to_fail():
            time.sleep(SECONDS_FOR_THE_FIRST_FAILURE)
        elif mistake:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            where = f"rank {self.rank} of {self.size} on {self.node} failed:\n"
            trace = "".join(traceback.format_exception(error))
            print(where + trace, file=sys.stderr, flush=True)
        sys.stdout.flush()
        self._end_all_ranks(2 if mistake else 1)

    def _first_to_fail(self) -> bool:
        """Whether no other rank has claimed the failure; a store that is gone means one has."""
        if self.store is None:
            return True
        try:
            return self.store.add("failures", 1) == 1
        except Exception as error:  # torch raises several kinds when the store's rank is gone
            print(
                f"rank {self.rank} on {self.node}: rank 0 on {self.nodes[0]} is gone ({error})",
                file=sys.stderr,
                flush=True,
            )
            return False

    def _end_all_ranks(self, status: int) -> None:
        if self.launch.mpi:
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(status)
        os._exit(status)


# ------------------------------------------------------------------------------------------------
# Start-up
# ------------------------------------------------------------------------------------------------


def start(launch: Launch, run: Run) -> Cluster:
    """Meet the other ranks, choose device, backend and threads; collective over all ranks.

    If launcher and MPI disagree, or the device or backend asked for is not there, the first rank
    of each node says so and every rank that sees it leaves with status 2.
    """
    place = None
    try:
        place = _find_place(launch)
        device, backend = _choose_device(run, launch, place)
    except UserError as mistake:
        exit_with(mistake, speak=(place.local_rank if place else launch.rank) == 0)
    threads = _set_threads(place)
    store = _meet(launch, place, device, backend)
    node = socket.gethostname()
    nodes = _exchange(store, launch, node)
    return Cluster(
        launch,
        launch.rank,
        launch.size,
        place.local_rank,
        place.local_size,
        node,
        nodes,
        device,
        backend,
        threads,
        store,
    )


@dataclass(frozen=True)
class _Place:
    local_rank: int
    local_size: int
    one_node: bool
    sharing_cores: int  # ranks that may run on the same cores as this one


def _find_place(launch: Launch) -> _Place:
    if launch.mpi:
        return _place_by_mpi(launch)
    if launch.launcher == "torchrun":
        rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        return _Place(rank, size, launch.size == size, size)
    return _Place(0, 1, True, 1)


def _place_by_mpi(launch: Launch) -> _Place:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if (world.size, world.rank) != (launch.size, launch.rank):
        raise UserError(
            f"{launch.launcher} started {launch.size} tasks and calls this one {launch.rank}, but "
            f"MPI ({MPI.Get_library_version().split(chr(10))[0].strip()}) says rank {world.rank} "
            f"of {world.size}: mpi4py's MPI library is not the one that the launcher speaks to; "
            f"use its own mpirun, or `srun --mpi=pmi2` with MPICH"
        )
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    cores = tuple(_own_cores())
    sharing = node.allgather(cores).count(cores)
    return _Place(node.rank, node.size, node.size == world.size, sharing)


def _choose_device(run: Run, launch: Launch, place: _Place):
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
    gpus = torch.cuda.device_count()
    if place.local_size > gpus and backend == "nccl":
        raise UserError(
            f"{place.local_size} ranks on node {socket.gethostname()} have {gpus} GPUs; start at "
            f"most {gpus} a node, or share GPUs with --backend gloo"
        )
    device = torch.device("cuda", place.local_rank % gpus)
    torch.cuda.set_device(device)
    return device, backend


def _own_cores() -> list[int]:
    process = psutil.Process()
    return process.cpu_affinity() if hasattr(process, "cpu_affinity") else list(range(_cores()))


def _cores() -> int:
    return psutil.cpu_count() or 1


def _set_threads(place: _Place) -> int:
    """Share the cores among the ranks that run on them, unless OMP_NUM_THREADS decides."""
    import torch

    asked = os.environ.get("OMP_NUM_THREADS")
    threads = int(asked) if asked else max(1, len(_own_cores()) // place.sharing_cores)
    torch.set_num_threads(threads)
    return threads


def _meet(launch: Launch, place: _Place, device, backend: str):
    """Start torch.distributed; the store that all ranks share, or None for a single process."""
    if launch.size == 1:
        return None
    import torch.distributed as dist

    if launch.mpi:
        store = _store_over_mpi(launch, place)
    else:
        store, _, _ = next(dist.rendezvous("env://"))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("groups", store),
        rank=launch.rank,
        world_size=launch.size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if backend == "nccl" else None,
    )
    return dist.PrefixStore("trine", store)


def _store_over_mpi(launch: Launch, place: _Place):
    """A store on rank 0 at a port the system chose, told to the others by MPI: no two jobs meet."""
    import torch.distributed as dist
    from mpi4py import MPI

    world, address, store = MPI.COMM_WORLD, None, None
    if launch.rank == 0:
        host = "127.0.0.1" if place.one_node else _reachable_address()
        store = dist.TCPStore(host, 0, is_master=True, timeout=COLLECTIVE_TIMEOUT)
        address = (host, store.port)
    host, port = world.bcast(address)
    if launch.rank == 0:
        return store
    return dist.TCPStore(host, port, is_master=False, timeout=COLLECTIVE_TIMEOUT)


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


def _exchange(store, launch: Launch, node: str) -> list[str]:
    """The node name of every rank."""
    if store is None:
        return [node]
    store.set(f"node/{launch.rank}", node)
    return [store.get(f"node/{rank}").decode() for rank in range(launch.size)]


def _device_name(device) -> str:
    if device.type != "cuda":
        return f"{_cores()} CPU cores"
    import torch

    return torch.cuda.get_device_name(device)
