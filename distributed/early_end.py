"""How a rank that fails before all ranks have met ends the whole job.

    watch = StartWatch()
    watch.begin()
    with ending_all_ranks(watch):   # around the imports of a program, and around all that it does
        ...

An exit is not enough. MPICH's mpirun does not end ranks that wait in MPI_Init for one that has
exited, srun ends them only with --kill-on-bad-exit, and a rank that MPI has started waits at its
exit, in MPI_Finalize, for ranks that wait for it in a collective. So MPI's Abort ends the job where
MPI has been started, and before that PMI's: the connection to the launcher through which MPI_Init
would have met the others. Open MPI's mpirun and torchrun end the others when one exits non-zero.

A rank that is killed or stopped cannot do any of that: its watch does, a process beside it.

    watch.follow(config.run.out)    # the folder of the run, for the report of a death
    watch.have_met()                # from here on the watchdog's monitor sees a death
    watch.close()                   # the first step is done

Source of PMI's commands: Balaji et al., "PMI: A Scalable Parallel Process-Management Interface for
Extreme-Scale Systems", EuroMPI 2010, and what mpirun of MPICH 5.0 and srun of Slurm 22.05 answer.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent  # the folder of the packages
# Not `-m`: that does not look into the current folder under PYTHONSAFEPATH.
WATCH = "import sys; sys.path.insert(0, '.'); from distributed import start_watch as s; s.main()"
SECONDS_TO_MEET = 1800.0  # until all ranks have met: the watchdog does not run yet
SECONDS_TO_FLUSH = 0.5  # for mpirun to pass on what was printed, before it is ended
SECONDS_FOR_PMI = 2.0  # for an answer of the launcher, and for it to end this process
# The variables with the rank and the number of ranks, in the order in which `discover` reads them.
PLACES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


class StartWatch:
    """Starts, tells and ends the process that watches a rank's start (start_watch.py).

    Until `begin` there is none, and none for a rank that is alone.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start the process if this is one of several ranks."""
        if not place_of_rank():
            return
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-ES", "-c", WATCH, str(os.getpid())],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                bufsize=0,  # nothing is left to write where the process was killed
                stdout=subprocess.DEVNULL,
                close_fds=False,  # the launcher's socket is inherited
            )
        except OSError as error:
            text = f"note: nothing watches the start of this rank: {error.strerror}"
            print(text, file=sys.stderr, flush=True)

    def follow(self, out: str) -> None:
        """Have the report of a death written into the folder of the run."""
        self._tell({"out": os.path.abspath(out)})

    def have_met(self) -> None:
        """Leave a death to the watchdog from here on. A stopped rank is still killed."""
        self._tell({"met": True})

    def outlive(self) -> None:
        """Have the process end the job if the launcher does not, some seconds after this rank."""
        self._tell({"outlives": True})

    def close(self) -> None:
        """End the process; from any thread, and more than once."""
        process = self._process
        self._process = None
        if process:
            with process:  # waits for it
                process.kill()

    def _tell(self, message: dict[str, Any]) -> None:
        if self._process and self._process.stdin:
            with contextlib.suppress(OSError):  # it was killed
                self._process.stdin.write(json.dumps(message).encode() + b"\n")


@contextlib.contextmanager
def ending_all_ranks(watch: StartWatch) -> Iterator[None]:
    """End the job, non-zero, if an exception leaves the block on a rank of several.

    Its traceback is printed with the rank and the node; SystemExit has printed its reason. watch:
    of this rank, which then reports nothing.
    """
    try:
        yield
    except SystemExit as end:
        if not end.code or not place_of_rank():
            watch.close()
            raise
        # Under srun only an exit gives the job this status: PMI's abort makes 137 of it. Without
        # --kill-on-bad-exit the other ranks go on, until the watch ends them.
        status = end.code if isinstance(end.code, int) else 1
        end_job(watch, status, by_pmi="SLURM_STEP_ID" not in os.environ)
    except BaseException as error:
        place = place_of_rank()
        if not place:
            raise
        trace = "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):  # nobody reads it any more
            where = f"rank {place[0]} of {place[1]} on {node_name()}"
            print(f"{where} failed:\n{trace}", file=sys.stderr, flush=True)
        end_job(watch, 1)


def place_of_rank() -> tuple[str, str] | None:
    """This rank and the number of ranks, as the launcher has them; None if it is alone."""
    for rank, size in PLACES[0 if "TORCHELASTIC_RUN_ID" in os.environ else 1 :]:
        if os.environ.get(size, "1") != "1":
            return os.environ.get(rank, ""), os.environ[size]
    return None


def node_name() -> str:
    """Slurm's name of this node, which --exclude takes; the host's name without Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def end_job(watch: StartWatch, status: int, by_pmi: bool = True) -> NoReturn:
    """End every rank with a status that is not 0, from any thread.

    watch: of this rank, which then reports nothing. by_pmi: whether PMI may end the job at once
    where MPI has not been started.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    # An MPI that is not the launcher's has a world of this rank alone: it cannot end the others.
    begun = mpi and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1
    if begun or by_pmi:
        watch.close()
    else:
        watch.outlive()
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            output.flush()
    time.sleep(SECONDS_TO_FLUSH)
    if mpi and begun:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the reason is printed: hide MPI_Abort's
        mpi.COMM_WORLD.Abort(status)
    if by_pmi:
        abort_by_pmi(status)
    os._exit(status)


def abort_by_pmi(status: int) -> None:
    """Have the launcher end the job through its socket; return if there is none.

    Called by a rank, or by its watch when MPI may have begun.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # not the launcher's ranks: torchrun's
        return
    with contextlib.suppress(OSError, ValueError):  # no launcher listens: an exit must do
        number = int(os.environ.get("PMI_FD", ""))
        with socket.socket(fileno=os.dup(number)) as launcher:
            launcher.settimeout(SECONDS_FOR_PMI)
            launcher.sendall(b"cmd=init pmi_version=1 pmi_subversion=1\n")
            with contextlib.suppress(TimeoutError):  # Slurm's does not answer if MPI has begun
                launcher.recv(1024)
            launcher.sendall(b"cmd=abort exitcode=%d\n" % status)
            launcher.recv(1024)  # it does not answer, but ends this process
