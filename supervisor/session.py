"""One supervisor: starts the ranks, waits, decides by the evidence, and starts them again."""

import time

from distributed.run_lock import in_use
from supervisor.command import Command, silent_nodes
from supervisor.decisions import Action, Choice, Decision, decide
from supervisor.evidence import case_is_written, free_bytes, newest_checkpoint, read_evidence
from supervisor.journal import Journal, say
from supervisor.processes import STOPPED_EARLY, Processes

SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_LINES = 1.0, 600.0  # while the disk is full
SECONDS_FOR_AN_EARLIER_RUN = 60.0  # to end, which a killed supervisor has left


class Session:
    """Keeps one run going. limit: restarts in an hour."""

    def __init__(self, command: Command, limit: int):
        self.command, self.limit = command, limit
        self.journal = Journal(command.out, command.job.start if command.job else "")
        self.processes = Processes(command.by_srun)

    def run(self) -> int:
        """Until the run ends for good; the exit status."""
        self._await_earlier_run()
        while not self.processes.stopped:
            if len(self._nodes()) < self.command.used:
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

    def _nodes(self) -> list[str]:
        """The nodes for the next start; empty if the launcher chooses them."""
        usable = [node for node in self.command.nodes if node not in self.journal.left_out()]
        return usable[: self.command.used]

    def _start(self) -> tuple[int, Decision]:
        """Start the ranks, wait for their end, and decide."""
        command, journal, began = self.command, self.journal, time.time()
        nodes = self._nodes()
        where = f" on {', '.join(nodes)}" if nodes else ""
        step = newest_checkpoint(command.out)[0]
        say(f"starting{where}, {'from step 0' if step is None else f'from checkpoint {step}'}")
        status = self.processes.run(command.on(nodes), lambda: case_is_written(command.out, began))
        stopped = self.processes.stopped
        failed = status not in (0, STOPPED_EARLY) and not stopped
        silent = silent_nodes(nodes) if failed else ()
        found = read_evidence(command.out, status, began, silent, stopped)
        spare = len(command.nodes) - len(journal.left_out()) - len(nodes) if nodes else None
        decision = decide(found, journal.earlier(), Choice(spare, self.limit))
        journal.add(found, decision)
        return status, decision

    def _await_room(self) -> None:
        """Return when another checkpoint fits on the disk, or at a signal."""
        out, said = self.command.out, -SECONDS_BETWEEN_LINES
        while not self.processes.stopped:
            free, needed = free_bytes(out), newest_checkpoint(out)[1]
            if free >= needed:
                return self.journal.file.finish()  # what had to wait
            if time.monotonic() - said >= SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                say(f"waiting for room: {free / 1e6:.1f} MB free of {needed / 1e6:.1f} at {out}")
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _await_earlier_run(self) -> None:
        """Wait for ranks of a supervisor that was killed: they save and stop."""
        limit = time.monotonic() + SECONDS_FOR_AN_EARLIER_RUN
        while in_use(self.command.out) and time.monotonic() < limit:
            if self.processes.stopped:
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)
