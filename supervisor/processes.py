"""Runs the launcher: passes signals on to it, and leaves no process behind.

The launcher has a session of its own, so that Ctrl-C reaches it only once, from here. If this
process is killed, the kernel sends the launcher a signal by which the ranks save and stop.
Processes that lose their parent become children of this one, which ends them.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from types import FrameType

import psutil

from config.messages import UserError
from supervisor.journal import say

STOPPED_EARLY = 75
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of <sys/prctl.h>
SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_ENDS = 1.0, 0.05  # at a report; at what ends
SECONDS_TO_END = 10.0  # for a launcher, after the report of a case
SECONDS_TO_REST = 10.0  # for what the launcher has started, after its end


class Processes:
    """Starts launchers, one after the other. srun: the launcher is srun.

    stopped: a signal has asked for the end.
    """

    def __init__(self, srun: bool):
        self.srun = srun
        self.stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._libc = ctypes.CDLL(None)
        self._libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in STOPS:
            signal.signal(number, self._forward)

    def run(self, words: Sequence[str], reported: Callable[[], bool]) -> int:
        """The exit status of these words; 128 + N if signal N ended them; 75 if a signal has asked
        for the end before.

        reported: whether the ranks have reported a fault; then they have SECONDS_TO_END to end.
        UserError if the launcher cannot be started.
        """
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
            if self.stopped:
                return STOPPED_EARLY
            self._process = process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=self._prepare,
            )
        except OSError as error:
            raise UserError(f"cannot start {words[0]}: {error.strerror}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        status = self._wait(process, reported)
        self._process = None
        self._end_descendants()
        return 128 - status if status < 0 else status

    def save(self) -> None:
        """Have the ranks save and end, with status 75."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)

    def _prepare(self) -> None:
        """In the new process, before it becomes the launcher."""
        number = signal.SIGUSR1 if self.srun else signal.SIGTERM
        self._libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    def _forward(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on. srun ends its ranks at SIGTERM without a save, and ignores SIGINT: the
        first of them goes to the ranks as SIGUSR1.
        """
        if self.srun and not self.stopped:
            number = signal.SIGUSR1
        self.stopped = True
        if self._process and self._process.poll() is None:
            self._process.send_signal(number)

    def _wait(self, process: subprocess.Popen[bytes], reported: Callable[[], bool]) -> int:
        since: float | None = None  # the report was seen
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(SECONDS_BETWEEN_LOOKS)
            if since is None:
                since = time.monotonic() if reported() else None
            elif time.monotonic() - since > SECONDS_TO_END:
                say(f"the launcher has not ended {SECONDS_TO_END:g} s after the report: killed")
                _kill(psutil.Process().children(recursive=True))
                return process.wait()

    def _end_descendants(self) -> None:
        """Wait for what the launcher has left, then kill it."""
        until = time.monotonic() + SECONDS_TO_REST
        while left := _living_descendants():
            if time.monotonic() > until:
                say(f"{len(left)} processes are left after the launcher's end: killed")
                _kill(left)
                psutil.wait_procs(left, SECONDS_TO_REST)
                return
            time.sleep(SECONDS_BETWEEN_ENDS)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _living_descendants() -> list[psutil.Process]:
    """Processes below this one that run; those that have ended are reaped."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    found = psutil.Process().children(recursive=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        found = [process for process in found if process.status() != psutil.STATUS_ZOMBIE]
    return found
