"""How a rank that fails before all ranks have met ends the whole job.

    with ending_all_ranks():        # around the imports of a program, and around all that it does
        ...

An exit is not enough. MPICH's mpirun does not end ranks that wait in MPI_Init for one that has
exited, srun ends them only with --kill-on-bad-exit, and a rank that MPI has started waits at its
exit, in MPI_Finalize, for ranks that wait for it in a collective. So MPI's Abort ends the job where
MPI has been started, and before that PMI's: the connection to the launcher through which MPI_Init
would have met the others. Open MPI's mpirun and torchrun end the others when one exits non-zero.

Source of PMI's commands: Balaji et al., "PMI: A Scalable Parallel Process-Management Interface for
Extreme-Scale Systems", EuroMPI 2010, and what mpirun of MPICH 5.0 and srun of Slurm 22.05 answer.
"""

import contextlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

SECONDS_TO_FLUSH = 0.5  # for mpirun to pass on what was printed, before it is ended
SECONDS_FOR_PMI = 5.0  # for an answer of the launcher, and for it to end this process
# The variables with the rank and the number of ranks, in the order in which `discover` reads them.
PLACES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


@contextlib.contextmanager
def ending_all_ranks() -> Iterator[None]:
    """End the job, non-zero, if an exception leaves the block on a rank of several.

    Its traceback is printed with the rank and the node; SystemExit has printed its reason.
    """
    try:
        yield
    except SystemExit as end:
        if not end.code or not _place():
            raise
        # Under srun only an exit gives the job this status: PMI's abort makes 137 of it.
        end_job(end.code if isinstance(end.code, int) else 1, "SLURM_STEP_ID" not in os.environ)
    except BaseException as error:
        place = _place()
        if not place:
            raise
        trace = "".join(traceback.format_exception(error))
        where = f"rank {place} on {os.environ.get('SLURMD_NODENAME') or socket.gethostname()}"
        with contextlib.suppress(OSError):  # nobody reads it any more
            print(f"{where} failed:\n{trace}", file=sys.stderr, flush=True)
        end_job(1)


def _place() -> str:
    """This rank of how many, or nothing if it is alone."""
    for rank, size in PLACES[0 if "TORCHELASTIC_RUN_ID" in os.environ else 1 :]:
        if os.environ.get(size, "1") != "1":
            return f"{os.environ.get(rank)} of {os.environ[size]}"
    return ""


def end_job(status: int, by_pmi: bool = True) -> NoReturn:
    """End every rank with a status that is not 0, from any thread.

    by_pmi: whether PMI may end the job where MPI has not been started.
    """
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            output.flush()
    time.sleep(SECONDS_TO_FLUSH)
    mpi = sys.modules.get("mpi4py.MPI")
    # An MPI that is not the launcher's has a world of this rank alone: it cannot end the others.
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the reason is printed: hide MPI_Abort's
        mpi.COMM_WORLD.Abort(status)
    if by_pmi and "TORCHELASTIC_RUN_ID" not in os.environ:
        with contextlib.suppress(OSError, ValueError):  # no launcher listens: the exit must do
            _abort_by_pmi(int(os.environ.get("PMI_FD", "")), status)
    os._exit(status)


def _abort_by_pmi(number: int, status: int) -> None:
    """Have the launcher end the job through its socket; OSError if it is none, or not PMI's."""
    with socket.socket(fileno=os.dup(number)) as launcher:
        launcher.settimeout(SECONDS_FOR_PMI)
        launcher.sendall(b"cmd=init pmi_version=1 pmi_subversion=1\n")
        if launcher.recv(1024).startswith(b"cmd=response_to_init"):
            launcher.sendall(b"cmd=abort exitcode=%d\n" % status)
            launcher.recv(1024)  # it does not answer, but ends this process
