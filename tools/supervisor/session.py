"""Runs the supervisor: starts the ranks, waits, decides by the evidence, and starts them again.

    Supervisor(command, limit=5).run()        # the exit status, when the run has ended for good

The launcher (srun, mpirun) is a child process of the supervisor and starts the ranks. A case is the
report in OUT/hang/case.json that the watchdog or a rank writes after a fault. A node that is left
out gets no rank; it is used again when it answers. `Processes` starts the launcher, passes signals
on, and leaves no process behind. Read evidence.py and decisions.py first.

The layout as given is the layout of the user's command. If nodes are left out and no spare node is
there, the ranks may go on with another layout on fewer nodes (fewer.py). The journal has all
decisions; what is left out and which layout is in use follow from it.
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

from base.errors import FileError, UserError, environment_with_end
from distributed.parent_death import signal_at_parents_death
from distributed.run_lock import in_use
from tools.supervisor import evidence
from tools.supervisor.command import Command, answering_nodes, silent_nodes
from tools.supervisor.decisions import Decision, Journal, SupervisorAction, decide, say
from tools.supervisor.fewer import Fewer

STOPPED_EARLY = 75  # exit status of ranks that have saved and ended before the last step
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # signals that ask the run to save and end
# <sys/prctl.h>: a process becomes the parent of its descendants whose parents have ended.
PR_SET_CHILD_SUBREAPER = 36
SECONDS_BETWEEN_ENDS = 0.05  # seconds between two checks whether processes have ended
SECONDS_BETWEEN_LOOKS = 1.0  # seconds between two checks for a case, or for room on a full disk
SECONDS_BETWEEN_LINES = 600.0  # seconds between two printed lines while the disk is full
SECONDS_TO_END = 10.0  # after a case the launcher has this time to end, and is killed then
SECONDS_TO_REST = 10.0  # the launcher's other processes have this time to end after the launcher


class Processes:
    """Starts the launcher again and again, and ends all its processes.

    srun: whether the launcher is srun. stopped: whether a signal has asked the supervisor to end.
    """

    def __init__(self, srun: bool):
        """Take over the signals in STOPS, and become the parent of orphaned descendants.

        srun: whether the launcher is srun, which does not pass all signals on.
        """
        self.srun = srun
        self.stopped = False  # whether a signal has asked the supervisor for the end
        self._process: subprocess.Popen[bytes] | None = None  # the launcher while it runs
        self._libc = ctypes.CDLL(None)
        self._libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in STOPS:
            signal.signal(number, self._forward)

    def run(self, argv: Sequence[str], reported: Callable[[], bool], end_file: str) -> int:
        """Run the launcher and return its exit status: 128 + N if signal N ended the launcher.

        argv: the launcher's command line. reported: a function that returns whether the ranks have
        written a case; the launcher then has SECONDS_TO_END to end. end_file: the file into which
        the ranks write how they end. If a signal has asked the supervisor to end already, nothing
        is started and 75 is returned. Raise UserError if the launcher cannot be started.
        """
        try:
            # Signals wait until the launcher is there: a signal that came between the check of
            # `stopped` and the start would not reach the launcher.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
            if self.stopped:
                return STOPPED_EARLY
            self._process = process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment_with_end(end_file),
                preexec_fn=self._prepare,
            )
        except OSError as error:
            raise FileError(f"cannot start {argv[0]}: {error.strerror}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        status = self._wait(process, reported)
        self._process = None
        self._end_descendants()
        return 128 - status if status < 0 else status  # Popen gives -N for signal N

    def save(self) -> None:
        """Ask the ranks by SIGUSR1 to save and to end with status 75."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)

    def _prepare(self) -> None:
        """Set the signals of the new process; it calls this just before it becomes the launcher.

        If the supervisor is killed, the kernel sends the launcher a signal upon which the ranks
        save and end. At SIGTERM srun would end the ranks before they can save, so it gets SIGUSR1.
        """
        number = signal.SIGUSR1 if self.srun else signal.SIGTERM
        signal_at_parents_death(number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    def _forward(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on to the launcher; called by Python for each signal in STOPS.

        srun ends its ranks at SIGTERM before they can save, and ignores SIGINT, so the first signal
        is passed on to srun as SIGUSR1. A second signal is passed on as it is, and ends the run.
        """
        if self.srun and not self.stopped:
            number = signal.SIGUSR1
        self.stopped = True
        if self._process and self._process.poll() is None:
            self._process.send_signal(number)

    def _wait(self, process: subprocess.Popen[bytes], reported: Callable[[], bool]) -> int:
        """Wait for the launcher's end and return its status, which is negative after a signal.

        reported: a function that returns whether the ranks have written a case, called once a
        second. After a case the ranks end; if the launcher then hangs, it and all its descendants
        are killed after SECONDS_TO_END.
        """
        seen_at: float | None = None  # the time.monotonic() at which the case was seen
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(SECONDS_BETWEEN_LOOKS)
            if seen_at is None:
                seen_at = time.monotonic() if reported() else None
            elif time.monotonic() - seen_at > SECONDS_TO_END:
                say(f"the launcher has not ended {SECONDS_TO_END:g} s after the report: killed")
                _kill(psutil.Process().children(recursive=True))
                return process.wait()

    def _end_descendants(self) -> None:
        """Wait for processes that the launcher has left, and kill them after SECONDS_TO_REST."""
        deadline = time.monotonic() + SECONDS_TO_REST
        while processes := _living_descendants():
            if time.monotonic() > deadline:
                say(f"{len(processes)} processes are left after the launcher's end: killed")
                _kill(processes)
                psutil.wait_procs(processes, SECONDS_TO_REST)
                return
            time.sleep(SECONDS_BETWEEN_ENDS)


def _kill(processes: list[psutil.Process]) -> None:
    """Kill these processes; a process that has ended meanwhile is no error."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _living_descendants() -> list[psutil.Process]:
    """Return the running descendants of this process, and reap the ended ones."""
    with contextlib.suppress(ChildProcessError):  # there are no children any more
        while os.waitpid(-1, os.WNOHANG)[0]:  # reaps a child that has ended; 0: there is none
            continue
    descendants = psutil.Process().children(recursive=True)
    # If a process ends just now, all are returned; the caller looks again.
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process for process in descendants if process.status() != psutil.STATUS_ZOMBIE]
    return descendants


SECONDS_FOR_AN_EARLIER_RUN = 60.0  # ranks of a killed supervisor should end within this time
SECONDS_BETWEEN_PROBES = 30.0  # how often nodes that were left out are asked for an answer
SECONDS_OF_A_PROBE = 5.0  # a node that was left out must answer within this time


class Supervisor:
    """Keeps one run going, until it is finished or cannot be started again.

    limit: the most restarts in an hour. fewer: finds layouts for fewer nodes; None if the user has
    not asked for that.
    """

    def __init__(self, command: Command, limit: int, fewer: Fewer | None = None):
        """Read the run's journal, and take over the signals; no ranks are started yet.

        limit: the most restarts in an hour. fewer: finds layouts for fewer nodes, or None.
        """
        self.command = command
        self.limit = limit
        self.fewer = fewer
        self.journal = Journal(command.out, command.job.start if command.job else "")
        self.processes = Processes(command.by_srun)
        # Nodes that answer again. The running ranks were asked to save and end because of them.
        self.back: tuple[str, ...] = ()
        self.asked = 0.0  # the time.monotonic() at which silent nodes were last asked

    def run(self) -> int:
        """Start the ranks until the run ends for good; return the exit status."""
        self._await_earlier_run()
        while not self.processes.stopped:
            # Too few nodes are left even for the newest layout: the job goes back to the queue.
            if len(self._nodes()) < self._used():
                say(f"too few nodes are left: {', '.join(self._nodes()) or 'none'}")
                return STOPPED_EARLY
            status, decision = self._start()
            # At the status STOPPED_EARLY the batch script puts the job into the queue again.
            if decision.action == SupervisorAction.QUEUE:
                return STOPPED_EARLY
            # The run is finished, or another start would not help: the user gets this status.
            if decision.action in (SupervisorAction.PASS, SupervisorAction.STOP):
                return status
            # In the other cases the ranks are started again, after a wait if the disk is full.
            if decision.action == SupervisorAction.WAIT:
                self._await_room()
        say("stopped while no rank ran")
        return STOPPED_EARLY

    def _used(self) -> int:
        """Return the number of nodes that the ranks run on; 0 if the launcher chooses the nodes."""
        return self._layout()[0] or self.command.used

    def _layout(self) -> tuple[int, tuple[str, ...]]:
        """Return the number of nodes and the flags of the layout on fewer nodes.

        The result is 0 and () while the run has the layout that the user has given.
        """
        return self.journal.layout() if self.fewer else (0, ())

    def _usable(self) -> list[str]:
        """Return the job's nodes that are not left out."""
        return [node for node in self.command.nodes if node not in self.journal.left_out()]

    def _nodes(self) -> list[str]:
        """Return the nodes for the next start; [] if the launcher chooses the nodes.

        They are the first nodes that are not left out, as many as the layout needs.
        """
        return self._usable()[: self._used()]

    def _start(self) -> tuple[int, Decision]:
        """Start the ranks, wait for their end, and decide about the next action.

        Return the ranks' exit status and the decision, which is in the journal then.
        """
        command = self.command
        journal = self.journal
        nodes = self._nodes()
        used, flags = self._layout()  # `used` is 0 if the layout is as the user has given it
        where = f" on {', '.join(nodes)}" if nodes else ""
        where += f" with {' '.join(flags) or 'the default layout'}" if used else ""
        checkpoint, _ = evidence.newest_checkpoint(command.out)
        first = "step 0" if checkpoint is None else f"checkpoint {checkpoint}"
        say(f"starting{where}, from {first}")
        self.back = ()
        self.asked = time.monotonic()
        before = evidence.files_before(command.out)  # to tell later which files are new
        end_file = evidence.end_file(command.out)
        end_file.unlink(missing_ok=True)
        argv = self._command_line(nodes)
        status = self.processes.run(argv, lambda: self._look(before), str(end_file))
        stopped = self.processes.stopped  # whether a signal asked the supervisor for the end
        end = evidence.read_evidence(command.out, status, before, requested=stopped)
        # After a failure every node of this start is asked whether a task can be started on it.
        failed = end.status not in (0, STOPPED_EARLY) and not stopped
        if failed and not end.is_mistake:
            end = replace(end, silent=silent_nodes(nodes))
        end = replace(end, back=self.back)
        if end.is_mistake and end.error:  # the ranks may have printed it into files of their own
            say(f"error: {end.error}")
        # The number of nodes that the ranks may still lose; None if the launcher chooses the nodes.
        spare = len(self._usable()) - len(nodes) if nodes else None
        decision = decide(end, journal.earlier(), spare, self.limit)
        # Before the job is queued, a layout on the nodes that are left is looked for.
        if decision.action == SupervisorAction.QUEUE and self.fewer:
            decision = self._on_fewer(decision, self.fewer)
        journal.add(end, decision)
        return end.status, decision

    def _command_line(self, nodes: list[str]) -> list[str]:
        """Return the command line that starts the ranks on these nodes.

        This is the user's command line if all nodes of the job are used and no node was ever left
        out, or if the launcher chooses the nodes. Otherwise srun gets options that name the nodes,
        and with a layout on fewer nodes the options of the run have that layout's flags.
        """
        nodes_of_layout, flags = self._layout()  # 0 and () with the layout of the user
        # Whether the user's command line itself starts the ranks on exactly these nodes.
        as_given = len(nodes) == len(self.command.nodes) and not self.journal.has_left_out
        options = self.fewer.options_with(flags) if nodes_of_layout and self.fewer else []
        return self.command.on([] if as_given else nodes, options)

    def _look(self, before: evidence.Files) -> bool:
        """Return whether the ranks have written a case; called every second while the ranks run.

        If nodes that were left out answer again, and the nodes now suffice for the layout that the
        user has given, the ranks are asked to save and to end. before: the run's files as they were
        before this start of the ranks.
        """
        silent = self.journal.silent()  # nodes left out because they did not answer
        now = time.monotonic()
        # Whether to ask them: the last question is long ago, and none has answered so far.
        due = self.asked + SECONDS_BETWEEN_PROBES < now and not self.back
        # The silent nodes are asked only while the ranks run on fewer nodes than the user wanted.
        if due and silent and self._used() < self.command.used:
            back = answering_nodes(sorted(silent), SECONDS_OF_A_PROBE)
            self.asked = time.monotonic()
            enough = len(self._usable()) + len(back) >= self.command.used
            # The ranks must have done a step, so that each start of the ranks makes progress.
            if back and enough and evidence.has_trained(self.command.out, before):
                self.back = back
                say(f"{', '.join(back)} can be used again: the ranks save and end")
                self.processes.save()
        return evidence.case_is_written(self.command.out, before)

    def _on_fewer(self, decision: Decision, fewer: Fewer) -> Decision:
        """Return a decision to restart on the remaining nodes, if there is a layout for them.

        decision: the decision to queue the job, because nodes are left out and too few remain. If
        there is no layout, this decision is returned, and its reason says why there is none.
        """
        remaining = [node for node in self._usable() if node not in decision.out]
        say(f"{decision.reason}: asking the planner for a layout on {len(remaining)} nodes")
        try:
            layout = fewer.best(len(remaining))
        except UserError as refusal:
            return replace(decision, reason=f"{decision.reason}; {refusal}")
        reason = f"{decision.reason}; {layout.reason}"
        return replace(
            decision,
            action=SupervisorAction.RESTART,
            reason=reason,
            used=layout.nodes,
            flags=layout.flags,
        )

    def _await_room(self) -> None:
        """Wait until another checkpoint fits on the disk, or a signal asks for the end."""
        out = self.command.out
        printed_at = -SECONDS_BETWEEN_LINES  # so that the first line is printed at once
        while not self.processes.stopped:
            free = evidence.free_bytes(out)
            needed = evidence.bytes_needed(out)
            if free >= needed:
                return self.journal.file.finish()  # writes rows that waited in memory for room
            if time.monotonic() - printed_at >= SECONDS_BETWEEN_LINES:
                printed_at = time.monotonic()
                say(f"waiting for room: {free / 1e6:.1f} MB free of {needed / 1e6:.1f} at {out}")
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _await_earlier_run(self) -> None:
        """Wait until the ranks of a killed supervisor have ended, at most a minute.

        The kernel has sent their launcher a signal, upon which the ranks save and end.
        """
        deadline = time.monotonic() + SECONDS_FOR_AN_EARLIER_RUN
        while in_use(self.command.out) and time.monotonic() < deadline:
            if self.processes.stopped:
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)
