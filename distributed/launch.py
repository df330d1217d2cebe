"""How this process was started: by which launcher, as which rank of how many, on which node.

    launch = discover()                # from the launcher's variables alone, before torch
    oddity = check_launch(launch)      # UserError for what cannot work
    local = find_local(launch)         # asks MPI where there is one

Order of trust: torchrun's variables, MPI (mpirun or srun), a Slurm step of several tasks, else a
single process. What the launcher says and what MPI says must agree: a job that silently becomes
four lonely jobs overwriting one another is the classic accident. Each way into it has a sentence.
"""

import os
import socket
from dataclasses import dataclass

from config.messages import UserError
from distributed.placement import allowed_cores


@dataclass(frozen=True)
class Launch:
    """What the launcher's environment variables say about this process."""

    launcher: str
    rank: int = 0
    size: int = 1
    mpi: bool = False

    @property
    def patience(self) -> float:
        """Seconds that ranks which have the same mistake to tell give the one that tells it.

        They start seconds apart where many read their modules from one disk, and launchers end all
        when the first leaves; but MPICH's mpirun waits for each.
        """
        return 1.0 if self.launcher == "mpirun" else 10.0


def discover(environment: dict[str, str] | None = None) -> Launch:
    """Which launcher started this process, with which rank out of how many."""
    env = os.environ if environment is None else environment

    def launch(name: str, rank: str, size: str, mpi: bool) -> Launch:
        return Launch(name, int(env[rank]), int(env[size]), mpi)

    if "TORCHELASTIC_RUN_ID" in env:
        return launch("torchrun", "RANK", "WORLD_SIZE", mpi=False)
    if "OMPI_COMM_WORLD_SIZE" in env:
        name = "mpirun of Open MPI"
        return launch(name, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", mpi=True)
    in_step = "SLURM_STEP_ID" in env and "SLURM_PROCID" in env
    # In a Slurm job MPICH's mpirun starts its own helpers by srun: their step is not ours.
    if "PMI_SIZE" in env and ("MPI_LOCALRANKID" in env or not in_step):
        return launch("mpirun", "PMI_RANK", "PMI_SIZE", mpi=True)
    if in_step and _slurm_tasks(env) > 1:
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
        return launch("srun", "SLURM_PROCID", tasks, mpi=True)
    return Launch("python")


def check_launch(launch: Launch, environment: dict[str, str] | None = None) -> str | None:
    """What is odd about how this process was started, in a sentence; UserError if it cannot work.

    From the launchers' variables alone; what only MPI or the other ranks know comes in `start`.
    """
    env = os.environ if environment is None else environment
    if launch.launcher == "torchrun":
        outer = max(int(env.get(n, 1)) for n in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
        if "SLURM_STEP_ID" in env:
            outer = max(outer, _slurm_tasks(env))
        if outer > 1 and env.get("GROUP_WORLD_SIZE") == "1":
            raise UserError(
                f"{outer} torchruns were started, and each is alone (--nnodes 1): {outer} runs "
                f"would overwrite one another; start train.py itself with srun or mpirun, or give "
                f"torchrun --nnodes {outer} --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
            )
    in_job = "SLURM_JOB_ID" in env and "SLURM_STEP_ID" not in env
    if launch.launcher == "python" and in_job and _slurm_tasks(env) > 1:
        return (
            f"this Slurm job has {_slurm_tasks(env)} tasks, but this process was started without "
            f"srun and is alone: `srun --mpi=pmi2 python train.py ...` starts them all"
        )
    return None


def _slurm_tasks(env: dict[str, str]) -> int:
    return int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1")))


# ------------------------------------------------------------------------------------------------
# On its node
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Local:
    """This rank among those of its node, and among those of them that may use the same cores."""

    rank: int
    size: int
    one_node: bool
    sharing: int
    place_among_sharing: int


def node_name() -> str:
    """The name by which Slurm knows this node, for --exclude; elsewhere the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def job_nodes() -> int | None:
    """How many nodes the Slurm job holds, if this process is in one."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES")
    return int(nodes) if nodes else None


def cores_asked_for() -> int | None:
    """--cpus-per-task of the Slurm job, if this process is in a step of one."""
    asked = os.environ.get("SLURM_CPUS_PER_TASK")
    return int(asked) if asked and "SLURM_STEP_ID" in os.environ else None


def find_local(launch: Launch) -> Local:
    """This rank on its node; UserError if launcher and MPI disagree, or MPI cannot be loaded."""
    if launch.mpi:
        return _local_by_mpi(launch)
    if launch.launcher == "torchrun":
        rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        return Local(rank, size, launch.size == size, size, rank)
    return Local(0, 1, True, 1, 0)


def _local_by_mpi(launch: Launch) -> Local:
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=True)  # first see which MPI it is
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{launch.launcher} started {launch.size} tasks, but mpi4py cannot be used ({reason}): "
            f"run scripts/setup.sh with the mpirun first on PATH that is to start the job"
        ) from None
    library = " ".join(MPI.Get_library_version().split()[:3]).strip(",")
    # MPICH ends the process by itself when it finds that Open MPI has started it.
    if launch.launcher == "mpirun of Open MPI" and "Open MPI" not in library:
        raise UserError(
            f"{launch.launcher} started {launch.size} tasks; {_way_out(launch, library)}"
        )
    if not MPI.Is_initialized():
        if launch.launcher == "srun":
            _keep_addresses_short(MPI.Get_library_version())
        MPI.Init_thread()
    world = MPI.COMM_WORLD
    if (world.size, world.rank) != (launch.size, launch.rank):
        raise UserError(
            f"{launch.launcher} started {launch.size} tasks and calls this one {launch.rank}, but "
            f"MPI ({library}) says rank {world.rank} of {world.size}; {_way_out(launch, library)}"
        )
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    cores = allowed_cores()
    sharing = [rank for rank, other in enumerate(node.allgather(cores)) if other == cores]
    one_node = node.size == world.size
    return Local(node.rank, node.size, one_node, len(sharing), sharing.index(node.rank))


def _keep_addresses_short(library: str) -> None:
    """Let an MPICH that has both UCX and libfabric meet over libfabric, unless told otherwise.

    Over UCX it hands Slurm its 4 KiB address buffer whole, the unused part with whatever the memory
    held. A line of that longer than 1,023 bytes breaks the pmi2 plugin (22.05) and MPI_Init hangs:
    seen once in some hundred starts. Over libfabric it is one line of 65 bytes.
    """
    device = next((line for line in library.splitlines() if "MPICH Device" in line), "")
    if {"ucx", "ofi"} <= set(device.replace(":", " ").replace(",", " ").split()):
        os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")


def _way_out(launch: Launch, library: str) -> str:
    """How ranks of that MPI library are to be started."""
    name, kind = ("Open MPI", "pmix") if "Open MPI" in library else ("MPICH", "pmi2")
    if launch.launcher.startswith("mpirun"):
        return f"mpi4py has loaded {name}: start the ranks with {name}'s own mpirun"
    now = os.environ.get("SLURM_MPI_TYPE", "none")
    return (
        f"mpi4py has loaded {name}, whose ranks find one another under `srun --mpi={kind}` (now: "
        f"{now}; `srun --mpi=list` shows what this Slurm has) or with {name}'s own mpirun"
    )
