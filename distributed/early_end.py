"""How a rank that fails before all ranks have met ends the whole job.

    watch = StartWatch()
    watch.begin()
    with ending_all_ranks(watch):   # around the imports and the whole work of a program
        ...

An exit of the failing rank is not enough. MPICH's mpirun does not end ranks that wait in MPI_Init
for a rank that has exited. srun ends them only with --kill-on-bad-exit. A rank that has started MPI
waits at its exit, in MPI_Finalize, for ranks that wait for it in a collective. So the job is ended
by MPI_Abort if MPI has been started, and before that by the abort command of PMI, the connection to
the launcher over which MPI_Init would meet the other ranks. Open MPI's mpirun and torchrun end all
ranks when one exits non-zero.

A rank that is killed or stopped cannot end the job. A process beside each rank does it then, the
rank's watch (`Watched`):

    watch.follow(config.run.out)    # the folder of the run, for the report of a death
    watch.have_met()                # from here on the watchdog's monitor sees a death
    watch.close()                   # the first step is done

No launcher ends a job when a rank is stopped (SIGSTOP), and Slurm's launcher does not even end a
job that has lost a rank. The other ranks cannot see the fault: they do not know one another yet,
and MPI_Init holds Python's lock. So every rank starts a watch. It reads from the kernel whether the
rank is stopped, and kills a rank that stays stopped. Its standard input is a pipe from the rank: if
the pipe closes before the ranks have met, the rank has died, and the watch reports the death and
ends the job. The rank ends the watch when the rank fails with an error message, or has done its
first step. The watch belongs to the process group of its rank. Launchers end whole process groups,
so a death that a launcher causes also ends the watch and is not reported.

Source of PMI's commands: Balaji et al., "PMI: A Scalable Parallel Process-Management Interface for
Extreme-Scale Systems", EuroMPI 2010, and the answers of MPICH 5.0's mpirun and Slurm 22.05's srun.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from base.module_program import module_program

ROOT = Path(__file__).resolve().parent.parent  # the folder of the packages
SECONDS_TO_MEET = 1800.0  # a rank that has not met all others after these seconds exits
SECONDS_TO_FLUSH = 0.5  # mpirun needs this time to pass on printed lines before the job is ended
SECONDS_FOR_PMI = 2.0  # the longest wait for the launcher to answer, or to end this process
SECONDS_BETWEEN_LOOKS = 1.0  # seconds between two looks of the watch at the rank's state
SECONDS_STOPPED = 5.0  # a rank that is stopped for this time is killed
# After a rank has ended on purpose (StartWatch.outlive), the watch waits for this time before it
# ends the job. The time is longer than Launch.exit_delay, after which the other ranks exit
# themselves if they have found the same mistake.
SECONDS_TO_OUTLIVE = 12.0
# The launchers' variables with the rank and the number of ranks: torchrun, Open MPI, MPICH, srun.
# launch.discover reads them in the same order.
PLACES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


class StartWatch:
    """The rank's side of the process that watches its start (`Watched`).

    `begin` starts the process, unless this is the only rank. Without a process all methods do
    nothing.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start the watch, a process beside this rank; called first of all in a program.

        A single rank needs no watch, because no other rank would wait for it.
        """
        if not place_of_rank():
            return
        program = module_program(__name__, __file__)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-ES", "-c", program, str(os.getpid())],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                bufsize=0,  # unbuffered: if the watch was killed, nothing is left to be written
                stdout=subprocess.DEVNULL,
                close_fds=False,  # the watch inherits PMI's socket, over which it can end the job
            )
        except OSError as error:
            text = f"note: nothing watches the start of this rank: {error.strerror}"
            print(text, file=sys.stderr, flush=True)

    def follow(self, out: str) -> None:
        """Tell the watch the folder of the run, `out`, into which it writes a report of a death."""
        self._tell({"out": os.path.abspath(out)})

    def have_met(self) -> None:
        """Tell the watch that all ranks have met: from here on the watchdog's monitor sees a death.

        The watch still kills a rank that is stopped.
        """
        self._tell({"met": True})

    def outlive(self) -> None:
        """Tell the watch process that this rank ends on purpose, with a status other than 0.

        The watch process outlives the rank. If the launcher does not end the other ranks because of
        that status, the watch process ends the job some seconds later.
        """
        self._tell({"outlives": True})

    def close(self) -> None:
        """End the watch; may be called from any thread, and more than once."""
        process = self._process
        self._process = None
        if process:
            with process:  # leaving this block waits until the process has ended
                process.kill()

    def _tell(self, message: dict[str, Any]) -> None:
        """Send the watch, if there is one, new values of attributes of its `Watched`.

        message: the values by attribute, such as {"met": True}.
        """
        if self._process and self._process.stdin:
            with contextlib.suppress(OSError):  # the watch was killed: nothing is left to be told
                self._process.stdin.write(json.dumps(message).encode() + b"\n")


@contextlib.contextmanager
def ending_all_ranks(watch: StartWatch) -> Iterator[None]:
    """End the whole job with a non-zero status if an exception leaves the block.

    The traceback is printed with the rank and the node. For a SystemExit nothing is printed: the
    code that raised it has printed the reason. A single process only lets the exception pass, and
    so does an exit with status 0. watch: this rank's watch, which then reports no death.
    """
    try:
        yield
    except SystemExit as end:
        if not end.code or not place_of_rank():
            watch.close()
            raise
        # Under srun (by_pmi=False) this rank only exits: with PMI's abort the job's status
        # would be 137 and not `status`. If srun then does not end the other ranks, because it has
        # no --kill-on-bad-exit, this rank's watch ends them.
        status = end.code if isinstance(end.code, int) else 1
        end_job(watch, status, by_pmi="SLURM_STEP_ID" not in os.environ)
    except BaseException as error:
        place = place_of_rank()
        if not place:  # a single process: Python prints the traceback and exits
            raise
        trace = "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):  # standard error may be closed
            where = f"rank {place[0]} of {place[1]} on {node_name()}"
            print(f"{where} failed:\n{trace}", file=sys.stderr, flush=True)
        end_job(watch, 1)


def place_of_rank() -> tuple[str, str] | None:
    """Return this rank and the number of ranks from the launcher's variables; None for one rank."""
    # Each pair of PLACES names two variables: of the rank, and of the number of ranks. The first
    # pair, RANK and WORLD_SIZE, counts only under torchrun, or after the others if they are set
    # with the address at which the ranks meet.
    first = 0 if "TORCHELASTIC_RUN_ID" in os.environ else 1
    by_variables = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    for rank, size in PLACES[first:] + PLACES[: first * by_variables]:
        if os.environ.get(size, "1") != "1":
            return os.environ.get(rank, ""), os.environ[size]
    return None


def node_name() -> str:
    """Return Slurm's name of this node, as in --exclude; without Slurm the host's name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def end_job(watch: StartWatch, status: int, by_pmi: bool = True) -> NoReturn:
    """End every rank with a status that is not 0; may be called from any thread.

    If MPI runs, MPI_Abort ends the job; otherwise PMI's abort command does. watch: this rank's
    watch, which then reports no death. by_pmi: whether PMI may end the job at once; if not, and MPI
    has not been started, this rank only exits, and its watch ends the job if the launcher does not.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    # An MPI library that does not fit the launcher has a world of one rank and cannot end others.
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
        abort_by_mpi(mpi, status)
    if by_pmi:
        abort_by_pmi(status)
    os._exit(status)


def abort_by_mpi(mpi: Any, status: int) -> None:
    """End every rank by MPI_Abort, without its own line: the reason has been printed before.

    mpi: the module mpi4py.MPI.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    mpi.COMM_WORLD.Abort(status)


def abort_by_pmi(status: int) -> None:
    """Make the launcher end the job, by a command over its PMI socket; return if there is none.

    Called by a rank before MPI has started, or by its watch, when MPI may have started.
    """
    # Under torchrun a PMI socket, if there is one, is torchrun's own: a launcher started torchrun.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    # The variable PMI_FD has the descriptor of the socket. If there is no such socket or nothing
    # listens, the errors are suppressed, and the caller can only exit.
    with contextlib.suppress(OSError, ValueError):
        number = int(os.environ.get("PMI_FD", ""))
        with socket.socket(fileno=os.dup(number)) as launcher:
            launcher.settimeout(SECONDS_FOR_PMI)
            launcher.sendall(b"cmd=init pmi_version=1 pmi_subversion=1\n")
            with contextlib.suppress(TimeoutError):  # Slurm does not answer if MPI has begun
                launcher.recv(1024)
            launcher.sendall(b"cmd=abort exitcode=%d\n" % status)
            launcher.recv(1024)  # the launcher does not answer, but ends this process meanwhile


# ---- The process beside each rank ----------------------------------------------------------------


class Watched:
    """The rank that this process watches. The rank itself sends `out`, `met` and `outlives`."""

    def __init__(self, pid: int) -> None:
        """Watch the rank whose process has the id `pid` from now on."""
        self.pid = pid
        self.began = time.monotonic()
        self.stopped = 0  # the number of looks in a row in which the rank was stopped
        self.out = ""  # the folder of the run, once the rank has read its options
        self.met = False  # whether all ranks have met
        # Whether the rank has told that it ends on purpose, with a status other than 0; this
        # process then goes on after the rank's end, to end the job if the launcher does not.
        self.outlives = False
        self.error: str | None = None  # why this process killed the rank

    def follow(self) -> None:
        """Watch the rank until it ends; end the job if the rank died before all ranks had met.

        Each line from the rank, on standard input, is a JSON object with new values of this
        object's attributes, such as {"met": true}.
        """
        received = b""  # the beginning of a line that has not arrived completely
        while True:
            if not select.select([0], [], [], SECONDS_BETWEEN_LOOKS)[0]:  # nothing has arrived
                self._look()
                continue
            data = os.read(0, 1 << 16)
            if not data:  # the rank has closed the pipe: it has ended
                break
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                vars(self).update(json.loads(line))
        with contextlib.suppress(OSError):
            os.setsid()  # leave the rank's process group, which the launcher may end now
        if self.outlives:
            time.sleep(SECONDS_TO_OUTLIVE)
            abort_by_pmi(1)
        # The rank ended before all ranks had met, so it was killed: report that and end the job.
        # After SECONDS_TO_MEET this is not done, because a rank that has not met the others by then
        # ends itself and prints where it waited (rendezvous.meet).
        elif not self.met and time.monotonic() - self.began < SECONDS_TO_MEET:
            self._report()
            abort_by_pmi(1)

    def _look(self) -> None:
        """Look at the rank's state, and kill the rank if it stays stopped.

        The launcher, or `follow`, then ends the job. Looks are counted and not seconds: if somebody
        suspends the whole job, this process is suspended too, and must not count that time.
        """
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except OSError:  # the rank has just ended
            return
        self.stopped = self.stopped + 1 if state == "T" else 0  # T: stopped by a signal
        if self.stopped * SECONDS_BETWEEN_LOOKS >= SECONDS_STOPPED:
            when = "before its first step" if self.met else "before all ranks had met"
            self.error = f"it was stopped (SIGSTOP) {when}, and killed after {SECONDS_STOPPED:g} s"
            if self.met:  # the monitor reports the death then, but does not know the reason
                print(f"rank {self._rank()[0]} on {node_name()}: {self.error}", file=sys.stderr)
            os.kill(self.pid, signal.SIGKILL)

    def _report(self) -> None:
        """Print that the rank has died, and write the report into the folder of the run."""
        # These modules are imported here because a death is rare and they would slow down a start.
        from watchdog.hang_report import JobFailure
        from watchdog.monitor import Rank, report

        number, size = self._rank()
        now = time.monotonic()
        rank = Rank(number, now, now, node_name(), self.pid, state="gone", error=self.error)
        case = JobFailure("dead", size, first=number, gone=[number], culprits=[number])
        report(case, {number: rank.to_dict(now)}, self.out)

    def _rank(self) -> tuple[int, int]:
        """Return the watched rank's number and the number of ranks."""
        rank, size = place_of_rank() or ("0", "1")
        return int(rank), int(size)


def main() -> None:
    """Watch the rank whose process id is the argument, until it ends or ends this process."""
    # A new process inherits from its parent which signals are ignored or blocked: undo that here.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SIGUSR1 asks only the rank to save
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    Watched(int(sys.argv[1])).follow()
