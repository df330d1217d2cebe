"""A process beside each rank that ends the job if the rank is killed or stopped during the start.

No launcher ends a job when a rank is stopped (SIGSTOP), and Slurm's launcher does not even end a
job that has lost a rank. The other ranks cannot see the fault: they do not know one another yet,
and MPI_Init holds Python's lock. So every rank starts this process (early_end.StartWatch). The
process reads from the kernel whether the rank is stopped, and kills a rank that stays stopped. Its
standard input is a pipe from the rank: if the pipe closes before the ranks have met, the rank has
died, and the process reports the death and ends the job. The rank ends the process when the rank
fails with an error message, or has done its first step.

The process belongs to the process group of its rank. Launchers end whole process groups, so a
death that a launcher causes also ends this process and is not reported.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time

from distributed.early_end import SECONDS_TO_MEET, abort_by_pmi, node_name, place_of_rank

SECONDS_BETWEEN_LOOKS = 1.0  # seconds between two looks at the rank's state
SECONDS_STOPPED = 5.0  # a rank that is stopped for this time is killed
# After a rank has ended on purpose (StartWatch.outlive), this process waits for this time before it
# ends the job. The time is longer than Launch.exit_delay, after which the other ranks exit
# themselves if they have found the same mistake.
SECONDS_TO_OUTLIVE = 12.0


class Watched:
    """The rank that this process watches. The rank itself sends `out`, `met` and `outlives`."""

    def __init__(self, pid: int) -> None:
        """pid: process id of the rank."""
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
        from watchdog.hang_report import Case
        from watchdog.monitor import Rank, report

        number, size = self._rank()
        now = time.monotonic()
        rank = Rank(number, now, now, node_name(), self.pid, state="gone", error=self.error)
        case = Case("dead", size, first=number, gone=[number], culprits=[number])
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
