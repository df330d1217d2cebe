"""A process beside each rank that ends the job if the rank is killed or stopped during the start.

No launcher ends a job of which a rank is stopped (SIGSTOP), and that of Slurm not even one that has
lost a rank. The other ranks cannot see it: they do not know one another yet, and MPI_Init holds
Python's lock. So the rank starts this process (early_end.StartWatch), which reads from the kernel
whether the rank is stopped, and kills it if it stays so. The rank holds the other end of the
standard input; where that ends and the ranks have not met, the process reports the death and ends
the job. The rank ends it when it fails with a reason, or has done its first step.

It belongs to the process group of its rank: launchers end whole groups, so that a death of which a
launcher is the cause is not reported.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time

from distributed.early_end import SECONDS_TO_MEET, abort_by_pmi, node_name, place_of_rank

SECONDS_BETWEEN_LOOKS, SECONDS_STOPPED = 1.0, 5.0  # at the rank; that it may be stopped
# Longer than ranks wait that have found the same mistake as another one (Launch.exit_delay).
SECONDS_TO_OUTLIVE = 12.0


class Watched:
    """The process's side: what it knows of its rank. pid: of the rank."""

    def __init__(self, pid: int) -> None:
        self.pid, self.began, self.stopped = pid, time.monotonic(), 0  # in how many looks
        self.out = ""  # the folder of the run, when the rank has read its options
        self.met = False
        self.outlives = False  # the rank ends on purpose, and the launcher may not end the others
        self.error: str | None = None  # why it was killed here

    def follow(self) -> None:
        """Return when the rank has ended, and the job too if that was before the ranks had met."""
        received = b""
        while True:
            if not select.select([0], [], [], SECONDS_BETWEEN_LOOKS)[0]:
                self._look()
                continue
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                vars(self).update(json.loads(line))
        with contextlib.suppress(OSError):
            os.setsid()  # a launcher may end the rest of its group now
        if self.outlives:
            time.sleep(SECONDS_TO_OUTLIVE)
            abort_by_pmi(1)
        # A rank that has waited for the others for so long has said where and ended.
        elif not self.met and time.monotonic() - self.began < SECONDS_TO_MEET:
            self._report()
            abort_by_pmi(1)

    def _look(self) -> None:
        """Kill the rank if it stays stopped: then the launcher, or `follow`, ends the job.

        Looks are counted, and not seconds: a job that is suspended suspends this process too.
        """
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except OSError:  # it has just ended
            return
        self.stopped = self.stopped + 1 if state == "T" else 0
        if self.stopped * SECONDS_BETWEEN_LOOKS >= SECONDS_STOPPED:
            when = "before its first step" if self.met else "before all ranks had met"
            self.error = f"it was stopped (SIGSTOP) {when}, and killed after {SECONDS_STOPPED:g} s"
            if self.met:  # the report is the monitor's, which does not know why
                print(f"rank {self._rank()[0]} on {node_name()}: {self.error}", file=sys.stderr)
            os.kill(self.pid, signal.SIGKILL)

    def _report(self) -> None:
        """Print that the rank has died, and write the case into the folder of the run."""
        # Rarely needed, and a start is not to wait for them.
        from watchdog.monitor import Rank, report
        from watchdog.wait_graph import Case

        (number, size), now = self._rank(), time.monotonic()
        rank = Rank(number, now, now, node_name(), self.pid, state="gone", error=self.error)
        case = Case("dead", size, first=number, gone=[number], culprits=[number])
        report(case, {number: rank.to_dict(now)}, self.out)

    def _rank(self) -> tuple[int, int]:
        rank, size = place_of_rank() or ("0", "1")
        return int(rank), int(size)


def main() -> None:
    """Watch the process of a rank, whose id is the argument, until it tells that it trains."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks the rank to save
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    Watched(int(sys.argv[1])).follow()
