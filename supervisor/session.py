"""Runs the supervisor: starts the ranks, waits, decides by the evidence, and starts them again.

    Session(command, limit=5).run()        # the exit status, when the run has ended for good

`Processes` starts the launcher, passes signals on, and leaves no process behind. Read evidence.py
and decisions.py first.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType

import psutil

from config.messages import UserError
from distributed.run_lock import in_use
from supervisor import evidence
from supervisor.command import Command, answering_nodes, silent_nodes
from supervisor.decisions import Action, Choice, Decision, Journal, decide, say
from supervisor.fewer import Fewer

STOPPED_EARLY = 75
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of <sys/prctl.h>
SECONDS_BETWEEN_ENDS = 0.05  # between two checks whether processes have ended
SECONDS_BETWEEN_LOOKS = 1.0  # between two checks for a case, or for room on a full disk
SECONDS_BETWEEN_LINES = 600.0  # between two printed lines while the disk is full
SECONDS_TO_END = 10.0  # from a case to the end of the launcher, which is killed then
SECONDS_TO_REST = 10.0  # from the launcher's end to the end of its processes, killed then


class Processes:
    """Starts launchers, one after the other. srun: whether the launcher is srun.

    stopped: whether a signal has asked the supervisor to end.
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
        """Run a command and return its exit status: 128 + N if signal N ended the command.

        If a signal has asked for the end already, nothing is started and 75 is returned.
        reported: returns whether the ranks have reported a fault; after a fault, the command has
        SECONDS_TO_END to end. Raise UserError if the launcher cannot be started.
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
        """Send SIGUSR1, upon which the ranks save and end with status 75."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)

    def _prepare(self) -> None:
        """Set the signals of the new process, before it becomes the launcher.

        The kernel sends the launcher a signal if the supervisor is killed.
        """
        number = signal.SIGUSR1 if self.srun else signal.SIGTERM
        self._libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    def _forward(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on to the launcher.

        srun ends its ranks at SIGTERM before they can save, and ignores SIGINT, so the first signal
        is passed on as SIGUSR1.
        """
        if self.srun and not self.stopped:
            number = signal.SIGUSR1
        self.stopped = True
        if self._process and self._process.poll() is None:
            self._process.send_signal(number)

    def _wait(self, process: subprocess.Popen[bytes], reported: Callable[[], bool]) -> int:
        since: float | None = None  # the time at which the report was seen
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
        """Wait for processes that the launcher has left, and kill them after SECONDS_TO_REST."""
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
    """Return the running descendants of this process, and reap the ended ones."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    found = psutil.Process().children(recursive=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        found = [process for process in found if process.status() != psutil.STATUS_ZOMBIE]
    return found


SECONDS_FOR_AN_EARLIER_RUN = 60.0  # within which ranks of a killed supervisor should end
SECONDS_BETWEEN_PROBES, SECONDS_OF_A_PROBE = 30.0, 5.0  # of nodes that may come back


class Session:
    """Keeps one run going. limit: most restarts in an hour; fewer: finds layouts for fewer nodes,
    or None if the user has not asked for that.
    """

    def __init__(self, command: Command, limit: int, fewer: Fewer | None = None):
        self.command = command
        self.limit = limit
        self.fewer = fewer
        self.journal = Journal(command.out, command.job.start if command.job else "")
        self.processes = Processes(command.by_srun)
        self.back: tuple[str, ...] = ()  # nodes that answer again, for which the ranks save and end
        self.asked = 0.0  # the time.monotonic() at which silent nodes were last asked

    def run(self) -> int:
        """Start the ranks until the run ends for good; return the exit status."""
        self._await_earlier_run()
        while not self.processes.stopped:
            if len(self._nodes()) < self._used():
                say(f"too few nodes are left: {', '.join(self._nodes()) or 'none'}")
                return STOPPED_EARLY
            status, decision = self._start()
            if decision.action == Action.QUEUE:
                return STOPPED_EARLY
            if decision.action in (Action.PASS, Action.STOP):
                return status
            if decision.action == Action.WAIT:
                self._await_room()
        say("stopped while no rank ran")
        return STOPPED_EARLY

    def _used(self) -> int:
        """Return the number of nodes that the ranks run on."""
        return self._layout()[0] or self.command.used

    def _layout(self) -> tuple[int, list[str]]:
        """Return the number of nodes and the flags of the layout on fewer nodes, or 0 and []."""
        used, flags = self.journal.layout() if self.fewer else (0, ())
        return used, list(flags)

    def _usable(self) -> list[str]:
        """Return the job's nodes that are not left out."""
        return [node for node in self.command.nodes if node not in self.journal.left_out()]

    def _nodes(self) -> list[str]:
        """Return the nodes for the next start; empty if the launcher chooses nodes."""
        return self._usable()[: self._used()]

    def _start(self) -> tuple[int, Decision]:
        """Start the ranks, wait for their end, and return their status and the decision."""
        command = self.command
        journal = self.journal
        nodes = self._nodes()
        used, flags = self._layout()
        where = f" on {', '.join(nodes)}" if nodes else ""
        where += f" with {' '.join(flags) or 'the default layout'}" if used else ""
        step = evidence.newest_checkpoint(command.out)[0]
        say(f"starting{where}, {'from step 0' if step is None else f'from checkpoint {step}'}")
        self.back = ()
        self.asked = time.monotonic()
        before = evidence.files_before(command.out)
        status = self.processes.run(self._words(nodes), lambda: self._look(before))
        stopped = self.processes.stopped
        failed = status not in (0, STOPPED_EARLY) and not stopped
        silent = silent_nodes(nodes) if failed else ()
        found = evidence.read_evidence(command.out, status, before, silent, stopped)
        found = replace(found, back=self.back)
        spare = len(self._usable()) - len(nodes) if nodes else None
        decision = decide(found, journal.earlier(), Choice(spare, self.limit))
        if decision.action == Action.QUEUE and self.fewer:
            decision = self._on_fewer(decision, self.fewer)
        journal.add(found, decision)
        return status, decision

    def _words(self, nodes: list[str]) -> list[str]:
        """Return the command for these nodes: the given words until a node was ever left out."""
        used, flags = self._layout()
        as_given = len(nodes) == len(self.command.nodes) and not self.journal.has_left_out
        options = self.fewer.words(flags) if used and self.fewer else []
        return self.command.on([] if as_given else nodes, options)

    def _look(self, before: evidence.Files) -> bool:
        """Return whether the ranks have reported a fault. Called every second while the ranks run.

        If left-out nodes answer again, and are enough for the layout as given, the ranks are asked
        to save and end.
        """
        silent = self.journal.silent()
        now = time.monotonic()
        due = self.asked + SECONDS_BETWEEN_PROBES < now and not self.back
        if due and silent and self._used() < self.command.used:
            back = answering_nodes(sorted(silent), SECONDS_OF_A_PROBE)
            self.asked = time.monotonic()
            enough = len(self._usable()) + len(back) >= self.command.used
            if back and enough and evidence.has_trained(self.command.out, before):
                self.back = back
                say(f"{', '.join(back)} can be used again: the ranks save and end")
                self.processes.save()
        return evidence.case_is_written(self.command.out, before)

    def _on_fewer(self, decision: Decision, fewer: Fewer) -> Decision:
        """Return a decision to restart on the nodes left, or `decision` with the reason why not."""
        left = [node for node in self._usable() if node not in decision.out]
        say(f"{decision.reason}: asking the planner for a layout on {len(left)} nodes")
        try:
            found = fewer.best(len(left))
        except UserError as none:
            return replace(decision, reason=f"{decision.reason}; {none}")
        reason = f"{decision.reason}; {found.reason}"
        return replace(
            decision,
            action=Action.RESTART,
            reason=reason,
            used=found.nodes,
            flags=found.flags,
        )

    def _await_room(self) -> None:
        """Return when another checkpoint fits on the disk, or at a signal."""
        out = self.command.out
        said = -SECONDS_BETWEEN_LINES
        while not self.processes.stopped:
            free = evidence.free_bytes(out)
            needed = evidence.bytes_needed(out)
            if free >= needed:
                return self.journal.file.finish()  # writes rows that waited in memory
            if time.monotonic() - said >= SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                say(f"waiting for room: {free / 1e6:.1f} MB free of {needed / 1e6:.1f} at {out}")
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _await_earlier_run(self) -> None:
        """Wait until ranks of a killed supervisor have ended; they save and stop by a signal."""
        limit = time.monotonic() + SECONDS_FOR_AN_EARLIER_RUN
        while in_use(self.command.out) and time.monotonic() < limit:
            if self.processes.stopped:
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)
