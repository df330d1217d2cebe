"""Signals, time limits and files that end or save a run early.

    signals = Signals()                              # first of all, before slow imports
    conditions = StopConditions(config.run, signals, first=rank == 0)
    signals.explain(outlook, saved)                  # for the lines that answer a signal
    action = conditions.requested_action(ahead)      # the largest action of all ranks is done

    SIGTERM, SIGINT, SIGUSR1  save and stop             --kill-switch FILE    save and stop
    --exit-after-minutes      save and stop             --save-switch FILE    save and go on
    --stop-at-samples         save and stop

A signal or file seen by any rank takes effect on all ranks at the same step boundary. A line says
at once what a signal will do, since a step may take minutes. The run ends with status 75
(EX_TEMPFAIL of sysexits.h: try again later). A second SIGTERM or SIGINT, or a second SIGUSR1, ends
all ranks at once, without a save, with a line that says what is saved. SIGTERM after SIGUSR1 does
not: Slurm sends it at the time limit that SIGUSR1 announced, and the save may still end in time.
Before all ranks have met (rendezvous.py), they cannot save together: then the first SIGTERM or
SIGINT ends the job at once. docs/clusters.md lists the signals that each launcher passes on.
A step boundary is the time between two steps, at which the ranks exchange their requests.
"""

import contextlib
import enum
import faulthandler
import functools
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import psutil

from config.run_options import Run
from distributed.early_end import end_job
from distributed.launch import Launch
from distributed.parent_death import signal_at_parents_death
from watchdog.flight_recorder import FlightRecorder

STOPPED_EARLY = 75  # the exit status of a run that has saved and stopped before its last step
ENDING = (signal.SIGTERM, signal.SIGINT)  # signals that end the job while its ranks meet
HANDLED = (*ENDING, signal.SIGUSR1)
# A signal that comes within this time after the first is taken for the same signal, which a
# launcher may deliver twice, in two ways. A user's second signal comes later.
SECONDS_OF_ONE_SIGNAL = 1.0
SECONDS_TO_END = 8.0  # if the function that ends all ranks hangs, this process ends itself then
# Before the end: the monitor, another process, prints the reason, and MPI_Abort would end it first.
SECONDS_TO_PRINT = 0.3
# The number of step durations that are kept for --exit-after-minutes: the next step is expected to
# take as long as the slowest of these steps.
STEPS_REMEMBERED = 20


class RequestedAction(enum.IntEnum):
    """A rank's request at a step boundary; the largest request of all ranks is carried out."""

    GO_ON = 0
    SAVE = 1
    SAVE_AND_STOP = 2


class Signals:
    """Handles SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 from here on; made in the main thread.

    It works even if the parent process ignored or blocked these signals. first: the first signal
    received, or None. end: a function that ends all ranks at once with a status. A thread reads the
    signals from a socket into which the interpreter writes them as they arrive, because the main
    thread may be inside a collective that never returns.
    """

    def __init__(self, end: Callable[[int], None] = os._exit):
        """Take over the signals, and start the thread that reads their numbers from a socket.

        end: a function that ends all ranks at once with a status; until `follow` or `have_met`
        gives another one, only this process is ended.
        """
        self.end = end
        self.first: signal.Signals | None = None  # the first signal that has been received
        self._say: Callable[[str, str], None] = _say  # prints a line; the second text: about what
        # They say what a first signal does, and what is saved if a second one ends the run.
        self._outlook: Callable[[], str] = lambda: "the run ends before its first step"
        self._saved: Callable[[], str] = lambda: "no step has been done"
        self._ending: signal.Signals | None = None  # the first SIGTERM or SIGINT
        self._meeting = False  # whether there are other ranks, and not all ranks have met yet
        self._launcher: int | None = None  # process id of torchrun, whose end also ends this rank
        # The time of the first SIGUSR1 (key True), and of the first SIGTERM or SIGINT (key False).
        self._since: dict[bool, float] = {}
        # The interpreter writes each signal's number into `_writer`, even while the main thread is
        # inside a call in C; the thread reads the numbers from `_reader`.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._in_main) for number in HANDLED}
        threading.Thread(target=self._read, name="signals", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def follow(self, launch: Launch) -> None:
        """Until `have_met`, let the first SIGTERM or SIGINT end all ranks.

        Called once the launcher is known. A killed torchrun would leave its ranks running, so the
        kernel is asked to send SIGTERM to this rank if torchrun, its parent, ends; that ends the
        job even after `have_met`. mpirun and srun have a process on each node that ends the ranks.
        """
        if launch.size > 1:
            self._meeting, self.end = True, functools.partial(end_job, launch.watch)
        self._end_meeting()  # a SIGTERM or SIGINT that came before this line ends all ranks now
        if launch.launcher == "torchrun":
            self._launcher = os.getppid()
            signal_at_parents_death()

    def have_met(
        self, end: Callable[[int], None], say: Callable[[str, str], None] | None = None
    ) -> None:
        """Let a signal save and stop the run from here on; called when all ranks have met.

        end: a function that ends all ranks at once with a status, for a second signal. say: prints
        a line once in the job; its second argument tells what the line is about.
        """
        self._meeting = False
        self.end = end
        self._say = say or self._say

    def explain(self, outlook: Callable[[], str], saved: Callable[[], str]) -> None:
        """Take the functions that answer a signal, in words; the thread of this object calls them.

        outlook: what a first signal does, and when. saved: what is saved if the run ends now.
        """
        self._outlook = outlook
        self._saved = saved

    def close(self) -> None:
        """Restore the previous handlers; only in the main thread."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()

    def _in_main(self, number: int, frame: object) -> None:
        """Handle a signal in the main thread; Python calls this for each signal in HANDLED.

        The work is done by `_handle`, in the other thread. While ranks meet, this thread only waits
        there for the end: the other thread ends the job over the launcher's socket, which MPI_Init
        in this thread would use too.
        """
        while self._meeting and number in ENDING:
            time.sleep(0.1)

    def _read(self) -> None:
        """Handle signals as they arrive, until `close`; runs in a thread of its own."""
        while received := self._reader.recv(1):  # one byte, the number of a signal
            number = signal.Signals(received[0])
            if number in HANDLED:
                self._handle(number)
        self._reader.close()

    def _handle(self, number: signal.Signals) -> None:
        """Record a signal; a second signal, or one before all ranks have met, ends all ranks.

        Otherwise the training loop finds the signal in `first` at the next step boundary.
        """
        now = time.monotonic()
        self.first = self.first or number
        if number in ENDING:
            self._ending = self._ending or number
        # A process whose parent has ended gets another parent. So if the parent is not torchrun any
        # more, torchrun has ended, and the kernel has sent SIGTERM for that (`follow`).
        if self._launcher not in (None, os.getppid()):
            self._end_now("the launcher has ended", 1)
        self._end_meeting()  # if the ranks still meet, SIGTERM or SIGINT ends them all now
        # SIGTERM and SIGINT count as one kind, so that either may be the second signal: under
        # torchrun the ranks receive SIGINT at the first Ctrl-C and SIGTERM at the second. SIGUSR1
        # is the other kind: a SIGTERM after it is no second signal.
        to_save = number == signal.SIGUSR1
        first_time = self._since.setdefault(to_save, now)
        if first_time == now:
            second = "SIGUSR1" if to_save else "SIGTERM or Ctrl-C"
            advice = f"a second {second} ends it at once, without a save"
            self._say(f"{number.name}: {self._outlook()}; {advice}", f"first, {to_save}")
        elif now - first_time >= SECONDS_OF_ONE_SIGNAL:  # not the first signal, delivered twice
            why = f"{number.name} as the second signal"
            self._end_now(why, 128 + number, f"; {self._saved()}")

    def _end_meeting(self) -> None:
        """End all ranks if a SIGTERM or SIGINT came before all ranks had met."""
        if self._meeting and self._ending:
            self._end_now(f"{self._ending.name} before all ranks have met", 128 + self._ending)

    def _end_now(self, why: str, status: int, saved: str = "") -> None:
        """Print the reason, and end all ranks at once with this status."""
        self._say(f"{why}: ending at once, without a save{saved}", "end")
        time.sleep(SECONDS_TO_PRINT)
        # If the end itself hangs, as MPI_Abort may, this ends the process: it needs no lock of
        # Python. Stacks would be written to nowhere.
        with open(os.devnull, "w") as nowhere:
            faulthandler.dump_traceback_later(SECONDS_TO_END, exit=True, file=nowhere)
            self.end(status)
            faulthandler.cancel_dump_traceback_later()  # this process goes on, as in a test


def _say(line: str, about: str) -> None:
    """Print a line of this process; about: not needed here."""
    with contextlib.suppress(OSError):  # standard error may be closed
        print(line, file=sys.stderr, flush=True)


def outlook(recorder: FlightRecorder) -> str:
    """Return what a signal to stop will do, by the phase in which the run is.

    recorder: the records of this rank.
    """
    phase, step, *_ = recorder.place
    if phase == "end":
        return "the run is over, and ends"
    if phase != "train":  # an evaluation, a save, the log, ...: after which the ranks ask again
        return f"the run ends when it can save, at the latest after its next step; now: {phase}"
    took = time.monotonic() - recorder.step_began
    about = f"which has taken {took:.0f} s so far"
    if recorder.steps:
        about = f"in about {max(0.0, statistics.median(recorder.steps) - took):.0f} s"
    return f"the run saves and ends after step {step}, {about}"


class StopConditions:
    """One rank's requests to end or save the run; only the first rank looks for files."""

    def __init__(self, run: Run, signals: Signals, first: bool):
        """Request nothing yet. first: whether this is rank 0, which looks for switch files."""
        self.run = run
        self.signals = signals
        self.first = first
        self._save_switch = run.save_switch if first else None  # a file's name, only on rank 0
        self.reason: str | None = None  # why this rank requests a stop
        self._began = psutil.Process().create_time()  # in seconds since 1970; for the time limit
        self._boundary: float | None = None  # time.monotonic() at the last step boundary
        self._steps: deque[float] = deque(maxlen=STEPS_REMEMBERED)  # seconds of the last steps
        # Whether the file of --save-switch has requested a save that is not complete yet. Until it
        # is complete, the file is there and must not request another save.
        self._saving = False

    def requested_action(self, ahead: float | None = None) -> RequestedAction:
        """Return the action that this rank requests at this step boundary.

        ahead: the seconds that an evaluation and a save will probably take before the next
        boundary. None: no step has just ended; called after an evaluation or before the first step.
        """
        now = time.monotonic()
        # If `ahead` is given, a step has just ended: the time since the last boundary is its time.
        if self._boundary is not None and ahead is not None:
            self._steps.append(now - self._boundary)
        self._boundary = now
        # A reason to stop holds until the end of the run, even if its file is removed meanwhile.
        self.reason = self.reason or self._reason_to_stop(ahead or 0.0)
        if self.reason:
            return RequestedAction.SAVE_AND_STOP
        if self._saving or not self._save_switch:
            return RequestedAction.GO_ON
        # The file requests one save: from then on `_saving` is True until that save is complete.
        self._saving = os.path.isfile(self._save_switch)
        return RequestedAction.SAVE if self._saving else RequestedAction.GO_ON

    def wants_stop(self) -> bool:
        """Return whether this rank requests a stop while the last save waits for disk room."""
        return self.requested_action() == RequestedAction.SAVE_AND_STOP

    def action_after(self, consumed: int) -> RequestedAction:
        """Return what --stop-at-samples requests after `consumed` samples of training.

        All ranks have consumed the same number, so they need not exchange this request.
        """
        limit = self.run.stop_at_samples
        if not limit or consumed < limit:
            return RequestedAction.GO_ON
        self.reason = self.reason or f"--stop-at-samples {limit}"
        return RequestedAction.SAVE_AND_STOP

    def saved(self) -> None:
        """Remove the file of --save-switch, if it has requested a save.

        Called when no save is running, so that the requested save is complete. If the file cannot
        be removed, it is ignored from here on, because it would request a save at every step.
        """
        if self._save_switch and self._saving:
            self._saving = False
            try:
                os.remove(self._save_switch)
            except FileNotFoundError:  # another process has removed the file
                return
            except OSError as error:
                text = f"note: cannot remove --save-switch {self._save_switch}: {error.strerror}"
                print(f"{text}; it is ignored from here on", flush=True)
                self._save_switch = None

    def _reason_to_stop(self, ahead: float) -> str | None:
        """Return the name of the signal or option that stops the run now, or None.

        ahead: the seconds that an evaluation and a save will probably take before the next step
        boundary. --exit-after-minutes stops the run if that and the slowest of the last steps would
        not end in time.
        """
        if self.signals.first is not None:
            return self.signals.first.name
        # Only rank 0 (`first`) looks for the file; its request then reaches all ranks.
        if self.first and self.run.kill_switch and os.path.exists(self.run.kill_switch):
            return f"--kill-switch {self.run.kill_switch}"
        limit = 60 * self.run.exit_after_minutes
        if limit and time.time() - self._began + max(self._steps, default=0.0) + ahead > limit:
            return f"--exit-after-minutes {self.run.exit_after_minutes:g}"
        return None
