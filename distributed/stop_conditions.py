"""What may end or save a run early: signals, a time limit, files; each rank's wish at a step's end.

    signals = listen()                               # first thing, before the seconds of imports
    switches = Switches(config.run, signals, first=rank == 0)
    wish = switches.wish(ahead)                      # goes with the vitals; the largest is done

    SIGTERM, SIGUSR1          save and stop             --kill-switch FILE    save and stop
    --exit-after-minutes      save and stop             --save-switch FILE    save and go on

Whichever rank sees one, all obey at the same step boundary. A run that stops so ends with status 75
(EX_TEMPFAIL of sysexits.h: try again later), for the script that started it to queue it again. The
same signal a second time ends all ranks at once, without a save. SIGTERM after SIGUSR1 does not:
it is how Slurm says that the limit it warned of is reached, and the save may still be done in time.

Which signals reach the ranks (tried with MPICH 5, Open MPI 5, Slurm 22.05, torch 2.13):

    sent to             SIGUSR1         SIGTERM
    mpirun, MPICH       every rank      every rank
    mpirun, Open MPI    every rank      kills the job, nothing is saved
    srun                every rank      kills the job, nothing is saved
    scancel JOB                         every rank; KillWait (30 s) later they are killed
    torchrun            kills it        every rank; 30 s later they are killed
"""

import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import psutil

from config.messages import UserError
from config.schema import Run

STOPPED_EARLY = 75
HEEDED = (signal.SIGTERM, signal.SIGUSR1)
# Launchers may deliver one signal twice, by two ways; a person's second one comes later.
SECONDS_OF_ONE_SIGNAL = 1.0
# The next step is expected to take as long as the slowest of so many.
STEPS_REMEMBERED = 20


class Signals:
    """The signals that this process has received; `end` ends all ranks with a status, at once.

    A thread reads them from a pipe that the interpreter writes to at the moment they arrive: the
    main thread may be deep in a collective that no longer ends.
    """

    def __init__(self, end: Callable[[int], None] = os._exit):
        self.end = end
        self.first: signal.Signals | None = None
        self._since: dict[signal.Signals, float] = {}
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._woke = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._heeded = {
            number: signal.signal(number, lambda number, frame: None) for number in HEEDED
        }
        threading.Thread(target=self._read, name="signals", daemon=True).start()

    def close(self) -> None:
        """Leave signals to whoever had them before; only in the main thread."""
        for number, handler in self._heeded.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._woke)
        self._writer.close()

    def _read(self) -> None:
        while received := self._reader.recv(1):
            number = signal.Signals(received[0])
            if number in HEEDED:
                self._heed(number)
        self._reader.close()

    def _heed(self, number: signal.Signals) -> None:
        now = time.monotonic()
        self.first = self.first or number
        if now - self._since.setdefault(number, now) >= SECONDS_OF_ONE_SIGNAL:
            text = f"{number.name} for the second time: ending at once, without a save"
            print(text, file=sys.stderr, flush=True)
            self.end(128 + number)


def listen() -> Signals:
    """Heed SIGTERM and SIGUSR1 from here on; only in the main thread."""
    return Signals()


def check_kill_switch(run: Run) -> None:
    """UserError if the file of --kill-switch is there before the run has begun."""
    if run.kill_switch and os.path.exists(run.kill_switch):
        raise UserError(f"--kill-switch {run.kill_switch} exists: remove it to train")


class StopConditions:
    """One rank's view of what may end or save the run; only the first rank looks for files."""

    def __init__(self, run: Run, signals: Signals, first: bool):
        self.run, self.signals, self.first = run, signals, first
        self.reason: str | None = None  # of this rank's wish to stop
        self._began = psutil.Process().create_time()
        self._boundary: float | None = None
        self._steps: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._saving = False

    def wish(self, ahead: float = 0.0) -> float:
        """What this rank wishes at this step boundary: one of vitals' GO_ON, SAVE, SAVE_AND_STOP.

        `ahead`: the seconds that what follows this boundary, the next step aside, and a save take.
        """
        from telemetry.step_stats import GO_ON, SAVE, SAVE_AND_STOP

        self._time_step()
        self.reason = self.reason or self._reason_to_stop(ahead)
        if self.reason:
            return SAVE_AND_STOP
        return SAVE if self._save_wanted() else GO_ON

    def saved(self) -> None:
        """The save that a switch asked for has ended: its file may go."""
        if not self._saving:
            return
        self._saving = False
        if os.path.exists(self.run.save_switch):
            os.remove(self.run.save_switch)

    def _time_step(self) -> None:
        now = time.monotonic()
        if self._boundary is not None:
            self._steps.append(now - self._boundary)
        self._boundary = now

    def _reason_to_stop(self, ahead: float) -> str | None:
        if self.signals.first is not None:
            return self.signals.first.name
        if self.first and self.run.kill_switch and os.path.exists(self.run.kill_switch):
            return f"--kill-switch {self.run.kill_switch}"
        limit = 60 * self.run.exit_after_minutes
        if limit and time.time() - self._began + max(self._steps, default=0.0) + ahead > limit:
            return f"--exit-after-minutes {self.run.exit_after_minutes:g}"
        return None

    def _save_wanted(self) -> bool:
        """Whether the file of --save-switch is there, once for each time it appears."""
        if not self.first or self._saving or not self.run.save_switch:
            return False
        self._saving = os.path.exists(self.run.save_switch)
        return self._saving
