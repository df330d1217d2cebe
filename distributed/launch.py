"""How this process was started: by which launcher, as which rank of how many, on which node.

    launch = discover()                # from the launcher's variables alone, before torch
    warning = check_launch(launch)     # raises UserError for a start that cannot work
    local = find_local(launch)         # the rank's place on its node, from MPI or from variables

`discover` looks for torchrun's variables first, then for the variables of MPI's mpirun, then for a
Slurm step of several tasks, then for RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, with which
others start torch; without any of these this is a single process, unless other variables say that
there are several. A launcher of one rank is a single process too: its variables may as well be left
from a parent process, and one rank needs no MPI. Launcher and MPI must
agree on rank and size: otherwise a job of four ranks silently becomes four jobs of one rank that
overwrite one another. Each mistake that leads to such a disagreement has its own error message.

Under Slurm a job holds nodes; each srun in the job starts a step of one or more tasks, the ranks.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from base.errors import ClusterError
from distributed.early_end import StartWatch, node_name
from distributed.other_launchers import stated_by
from distributed.placement import allowed_cores, threads_asked_for

# With these variables each rank finds the others, whoever has set them: torch's env:// rendezvous.
BY_VARIABLES = (
    "RANK and WORLD_SIZE"  # the launcher of a Launch, if these variables are all there is
)
RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SHARED_MEMORY = "/dev/shm"
# MPICH 5.0 makes a file of this size for each rank of a node; with UCX, files of these sizes more.
MPICH_BYTES = 1_065_000
BYTES_OF_RANK = 5_500_000
UCX_BYTES = 20_000_000
# The thread of stop_conditions.Signals needs this time to handle a signal that has arrived already.
SECONDS_FOR_SIGNALS = 0.02


@dataclass(frozen=True)
class Launch:
    """The launcher, rank and number of ranks of this process, from environment variables.

    mpi: whether MPI connects the ranks. watch: starts and ends the process that watches this rank
    until its first step (early_end.py).
    """

    launcher: str
    rank: int = 0
    size: int = 1
    mpi: bool = False
    watch: StartWatch = field(default_factory=StartWatch, compare=False, repr=False)

    @property
    def exit_delay(self) -> float:
        """Seconds that a rank waits before it exits for an error that another rank reports."""
        # The first rank that exits ends all ranks (early_end.py), so the rank that prints the error
        # must exit first. That rank may find the error seconds later than this rank, because ranks
        # start seconds apart where many read their modules from one disk.
        return 10.0 if self.size > 1 else 0.0


def discover(env: Mapping[str, str] = os.environ) -> Launch:
    """Return the launcher that started this process, its rank and the number of ranks.

    Called first of all by each program. env: the environment variables. Raise UserError if the
    launcher's variables are incomplete or no whole numbers.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        return Launch("torchrun", *_rank_and_size(env, "RANK", "WORLD_SIZE"))
    if _is_several(env, "OMPI_COMM_WORLD_SIZE"):
        place = _rank_and_size(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        return Launch("mpirun of Open MPI", *place, mpi=True)
    in_step = "SLURM_STEP_ID" in env and "SLURM_PROCID" in env
    # In a Slurm job MPICH's mpirun starts its helper processes with srun: the variables of that
    # Slurm step do not describe the ranks. MPI_LOCALRANKID is set by mpirun and not by srun, so it
    # shows that mpirun started this rank.
    if _is_several(env, "PMI_SIZE") and ("MPI_LOCALRANKID" in env or not in_step):
        return Launch("mpirun", *_rank_and_size(env, "PMI_RANK", "PMI_SIZE"), mpi=True)
    if in_step and _slurm_tasks(env) > 1:
        return Launch("srun", _number(env, "SLURM_PROCID"), _slurm_tasks(env), mpi=True)
    # A PyTorchJob, and launchers like torchrun's, set these variables and no others.
    if set(RENDEZVOUS) <= env.keys() and env["WORLD_SIZE"] != "1":
        return Launch(BY_VARIABLES, *_rank_and_size(env, "RANK", "WORLD_SIZE"))
    _refuse_unknown_launcher(env)
    return Launch("python")


def _refuse_unknown_launcher(env: Mapping[str, str]) -> None:
    """Raise UserError if variables say that this process is one of several, of no known launcher.

    Each of them would train alone, on the same samples.
    """
    for stated in stated_by(env):
        if stated.is_several:
            raise ClusterError(
                f"{stated}, and would train alone: start the ranks with srun, mpirun or torchrun, "
                f"or set {', '.join(RENDEZVOUS)} and, for several ranks on a node, LOCAL_RANK and "
                f"LOCAL_WORLD_SIZE; to train alone, unset {stated.variable or stated.counter}"
            )


def _is_several(env: Mapping[str, str], size: str) -> bool:
    """Return whether the variable `size` of a launcher is set, and says that ranks are several."""
    return size in env and _number(env, size) != 1


def _number(env: Mapping[str, str], name: str, below: str = "") -> int:
    """Return the whole number in an environment variable, or raise UserError.

    name: the variable. below: the name of a second variable, whose number must be larger; or empty.
    """
    text = env.get(name)
    if text is None:
        raise ClusterError(f"the launcher has set some of its variables, but not {name}")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ClusterError(f"the environment variable {name} is {text!r}, not a whole number")
    if below and int(text) >= _number(env, below):
        raise ClusterError(f"{name} is {text}, which is not below {below}, {env[below]}")
    return int(text)


def _rank_and_size(env: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    """Return the numbers in the variables `rank` and `size`; raise UserError unless rank < size."""
    return _number(env, rank, below=size), _number(env, size)


def check_launch(launch: Launch, env: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning about how this process was started, or None.

    Raise UserError if the job cannot work when started this way. Called before torch is imported.
    """
    tasks = _slurm_tasks(env)
    for read in (threads_asked_for, job_nodes, cores_asked_for):
        read()  # a wrong variable raises its UserError now, before the slow imports
    if launch.launcher in ("torchrun", BY_VARIABLES):
        if launch.launcher == "torchrun" or "LOCAL_WORLD_SIZE" in env:
            _number(env, "LOCAL_RANK", below="LOCAL_WORLD_SIZE")
        elif _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else 0:
            raise ClusterError(
                f"LOCAL_RANK is {env['LOCAL_RANK']}, so there are several ranks on this node: set "
                f"LOCAL_WORLD_SIZE, their number, too"
            )
        if launch.size > 1:
            _number(env, "MASTER_PORT")
            if not env.get("MASTER_ADDR"):
                raise ClusterError("MASTER_ADDR is not set, where the ranks meet")
        # mpirun or srun may have started several torchruns. If each of them believes that it is the
        # only one, they are separate runs in the same folder.
        names = [name for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if name in env]
        torchruns = max((_number(env, name) for name in names), default=1)
        if "SLURM_STEP_ID" in env:
            torchruns = max(torchruns, tasks)
        if torchruns > 1 and env.get("GROUP_WORLD_SIZE") == "1":
            raise ClusterError(
                f"{torchruns} torchruns were started, and each is alone (--nnodes 1): {torchruns} "
                f"runs would overwrite one another; start train.py itself with srun or mpirun, or "
                f"give torchrun --nnodes {torchruns} --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
            )
        # So are torchruns that something else has started on several nodes.
        not_its_own = {name: text for name, text in env.items() if name not in RENDEZVOUS}
        others = [stated for stated in stated_by(not_its_own) if stated.is_several]
        if launch.launcher == "torchrun" and others and env.get("GROUP_WORLD_SIZE") == "1":
            other = others[0]
            raise ClusterError(
                f"{other}, and its torchrun is alone (--nnodes 1): the nodes would train apart, on "
                f"the same samples; give torchrun --nnodes {other.count or 'N'} --rdzv-backend "
                f"c10d --rdzv-endpoint HOST:PORT, or to train on this node alone, unset "
                f"{other.variable or other.counter}"
            )
    in_job = "SLURM_JOB_ID" in env and "SLURM_STEP_ID" not in env  # in a job, not started by srun
    if launch.launcher == "python" and in_job and tasks > 1:
        return (
            f"this Slurm job has {tasks} tasks, but this process was started without srun and is "
            f"alone: `srun --mpi=pmi2 python train.py ...` starts them all"
        )
    if launch.launcher == "python":
        stated = stated_by(env)
        first = next((one for one in stated if one.is_first), None)
        if first and all(one.count != 1 for one in stated):
            return f"{first}, and trains alone; if the job has more of them, so would each of these"
    return None


def _slurm_tasks(env: Mapping[str, str]) -> int:
    """Return the number of tasks of the Slurm step, or else of the Slurm job; 1 without Slurm."""
    # The variable of the step is set in processes that srun has started, and counts more.
    names = [name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in env]
    return _number(env, names[0]) if names else 1


# ---- On its node ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Local:
    """This rank's number among the ranks of its node, and among the ranks with the same cores."""

    rank: int  # this rank's number among the ranks of the node
    size: int  # the number of ranks on the node
    one_node: bool  # whether all ranks of the job are on this node
    sharing: int  # the number of ranks on the node, with this rank, that may use the same cores
    place_among_sharing: int  # this rank's number among the ranks that may use the same cores


def job_nodes() -> int | None:
    """Return the number of nodes of the Slurm job; None if this process is in no Slurm job."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES")
    return _number(os.environ, "SLURM_JOB_NUM_NODES") if nodes else None


@dataclass(frozen=True)
class SlurmJob:
    """The Slurm job in which this process runs; the supervisor asks for it."""

    start: str  # the job's number and its restarts, such as 7.0; differs at each start of the job
    nodes: tuple[str, ...]  # the names of the job's nodes
    tasks_per_node: int  # --ntasks-per-node; 0 if it was not given


def slurm_job() -> SlurmJob | None:
    """Return the Slurm job of this process, or None without Slurm.

    Raise UserError if scontrol cannot name the job's nodes.
    """
    if not (job := os.environ.get("SLURM_JOB_ID")):
        return None
    words = ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"the nodes of job {job} are not known: {done.stderr.strip()}")
    per_node = "SLURM_NTASKS_PER_NODE"
    tasks = _number(os.environ, per_node) if per_node in os.environ else 0
    start = f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    return SlurmJob(start, tuple(done.stdout.split()), tasks)


def cores_asked_for() -> int | None:
    """Return --cpus-per-task of the Slurm job; None outside a Slurm step or if it was not given."""
    asked = os.environ.get("SLURM_CPUS_PER_TASK")
    in_step = "SLURM_STEP_ID" in os.environ
    return _number(os.environ, "SLURM_CPUS_PER_TASK") if asked and in_step else None


def find_local(launch: Launch) -> Local:
    """Return this rank's place on its node; called by rendezvous.meet.

    If the launcher is mpirun or srun, this starts MPI and is collective over all ranks. Raise
    UserError if launcher and MPI disagree about rank or size, or if MPI cannot be loaded.
    """
    if launch.mpi:
        return _local_by_mpi(launch)
    if launch.launcher == "torchrun":  # it binds no cores, so all ranks of a node share them
        rank, size = _rank_and_size(os.environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return Local(rank, size, launch.size == size, size, rank)
    if launch.launcher == BY_VARIABLES and "LOCAL_WORLD_SIZE" in os.environ:
        rank, size = _rank_and_size(os.environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return Local(rank, size, launch.size == size, size, rank)
    # A rank that is alone on its node, as in a pod: no rank shares its cores.
    return Local(0, 1, launch.size == 1, 1, 0)


def _local_by_mpi(launch: Launch) -> Local:
    """Start MPI, check its rank and size, and return this rank's place on its node; collective."""
    try:
        import mpi4py

        # mpi4py normally calls MPI_Init at its import. It must not do so here, because the library
        # is checked first.
        mpi4py.rc(initialize=False, finalize=True)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ClusterError(
            f"{launch.launcher} started {launch.size} tasks, but mpi4py cannot be used ({reason}): "
            f"run scripts/setup.sh with the mpirun first on PATH that is to start the job"
        ) from None
    library = " ".join(MPI.Get_library_version().split()[:3]).strip(",")
    advice = _right_launcher(launch, library)
    # MPICH's MPI_Init would end the process if Open MPI's mpirun started it: check this before.
    if launch.launcher == "mpirun of Open MPI" and "Open MPI" not in library:
        raise ClusterError(f"{launch.launcher} started {launch.size} tasks; {advice}")
    if not MPI.Is_initialized():
        if "MPICH" in library:
            check_shared_memory()
        if launch.launcher == "srun":
            _prefer_libfabric(MPI.Get_library_version())
        with _ended_by_signals():
            MPI.Init_thread()
    world = MPI.COMM_WORLD
    if (world.size, world.rank) != (launch.size, launch.rank):
        raise ClusterError(
            f"{launch.launcher} started {launch.size} tasks and numbered this one {launch.rank}, "
            f"but MPI ({library}) reports rank {world.rank} of {world.size}; {advice}"
        )
    node = world.Split_type(MPI.COMM_TYPE_SHARED)  # a communicator of the ranks on this node
    cores = allowed_cores()
    # The ranks of this node that may use exactly the same cores as this rank.
    sharing = [rank for rank, other in enumerate(node.allgather(cores)) if other == cores]
    _unlink_shared_memory()
    one_node = node.size == world.size
    return Local(node.rank, node.size, one_node, len(sharing), sharing.index(node.rank))


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGINT end this process at once while the block of `with` runs.

    The block is MPI_Init, which holds Python's lock, perhaps for minutes, so that no handler
    written in Python could run. A launcher ends the other ranks when a rank dies of a signal.
    """
    numbers = signal.SIGTERM, signal.SIGINT
    handlers = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    # A signal may have arrived before the handlers were replaced. In this pause the thread that
    # handles signals (stop_conditions.Signals) acts on it.
    time.sleep(SECONDS_FOR_SIGNALS)
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers):
            signal.signal(number, handler)


def check_shared_memory() -> None:
    """Raise UserError if /dev/shm of this node is too small for MPICH; print a note if it is small.

    MPICH would write beyond the end of this memory, and die of a bus error in MPI_Init.
    Only the first rank of a node looks, since it makes the file, and only before MPI_Init.
    """
    env = os.environ
    first = env.get("MPI_LOCALRANKID", env.get("SLURM_LOCALID", "0")) == "0"
    if not first or not os.path.isdir(SHARED_MEMORY):
        return
    ranks = _number(env, "MPI_LOCALNRANKS") if "MPI_LOCALNRANKS" in env else 1
    status = os.statvfs(SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize
    advice = "give the container more (docker run --shm-size=1g), or mount a larger tmpfs"
    if free < (needed := ranks * MPICH_BYTES):
        raise ClusterError(
            f"{SHARED_MEMORY} of {node_name()} has {free / 1e6:.1f} MB free, and MPI needs "
            f"{needed / 1e6:.1f} MB there for {ranks} ranks: {advice}"
        )
    total = status.f_blocks * status.f_frsize
    if total < (usual := UCX_BYTES + ranks * BYTES_OF_RANK):
        text = f"note: {SHARED_MEMORY} of {node_name()} has {total / 1e6:.1f} MB, and MPI may need "
        text += f"{usual / 1e6:.1f} MB there for {ranks} ranks; if it dies of a bus error, {advice}"
        print(text, file=sys.stderr, flush=True)


def _unlink_shared_memory() -> None:
    """Remove the file name of MPICH's shared memory, which every rank of the node has opened.

    The memory stays usable. MPICH removes the name only in MPI_Finalize, so a job that ends by
    MPI_Abort or a signal would leave the file, some megabytes, in the memory of its nodes.
    """
    # /proc/self/maps has a line for each file that this process has mapped into its memory.
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if path.startswith("/dev/shm/mpich_shm_"):
            with contextlib.suppress(FileNotFoundError):  # another rank has removed it
                os.unlink(path)


def _prefer_libfabric(library: str) -> None:
    """Make an MPICH built with UCX and libfabric use libfabric, unless the user chose one.

    Called before MPI_Init under srun. library: the text of MPI.Get_library_version(). Over UCX,
    MPICH passes Slurm an address buffer of 4 KiB whose unused part is not initialised. If that part
    holds a line of more than 1,023 bytes, Slurm's pmi2 plugin (22.05) fails and MPI_Init hangs:
    once in some hundred starts. Over libfabric an address is one line of 65 bytes.
    """
    # This line of the text names the networks that MPICH can use; ofi is libfabric.
    device = next((line for line in library.splitlines() if "MPICH Device" in line), "")
    if {"ucx", "ofi"} <= set(device.replace(":", " ").replace(",", " ").split()):
        os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")


def _right_launcher(launch: Launch, library: str) -> str:
    """Return advice for an error message: the launcher that fits the MPI library that was loaded.

    library: the name and version of that library.
    """
    name, kind = ("Open MPI", "pmix") if "Open MPI" in library else ("MPICH", "pmi2")
    if launch.launcher.startswith("mpirun"):
        return f"mpi4py has loaded {name}: start the ranks with {name}'s own mpirun"
    now = os.environ.get("SLURM_MPI_TYPE", "none")
    return (
        f"mpi4py has loaded {name}: start the ranks with `srun --mpi={kind}` (now: {now}; `srun "
        f"--mpi=list` shows what this Slurm has) or with {name}'s own mpirun"
    )
