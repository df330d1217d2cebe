"""Decides about the next action when the ranks have ended, by the evidence and earlier decisions.

Evidence (evidence.py) tells how the ranks ended: status, fault, nodes with the fault, last step. A
spare node is a node of the Slurm job on which no rank runs. A node is left out if no rank may be
started on it any more.

    finished, stopped early, a user's mistake, diverged    return the status of the ranks
    the disk is full                                       wait until there is room, start again
    a node does not answer, or a check names it            leave the node out
    a rank is lost                                         leave its node out if a node is spare
    an exception                                           start again
    an exception on a node that has failed before          leave the node out if a node is spare
    the same step fails on other nodes, or three times     stop: the hardware is not the cause
    a loss spike, with --on-spike rollback                 start again
    too many restarts in an hour                           stop
    nodes that were left out answer again                  restart with the layout as given

If too few nodes are left, the session looks for a layout on fewer nodes (fewer.py). If there is no
such layout, the job goes back to the queue with status 75, but at most MOST_QUEUED times without a
new checkpoint.

The journal, OUT/supervisor.jsonl, has every decision with its evidence, for people and for later
supervisors: if Slurm starts the job again, a new supervisor continues it. A row:

{"time": "2026-11-21T20:41:47+0000", "at": seconds since 1970, "job": "7.0", "action": "restart",
 "reason": ..., "out": nodes left out, "back": nodes used again, "used": their number from now on,
 "flags": the layout on so many nodes, "evidence": {...}}
"""

import contextlib
import dataclasses
import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import printable
from base.regular_files import MOST_OF_ROWS, read_regular
from telemetry.row_file import RowFile, read_rows
from tools.supervisor.evidence import LOST, REFUSED, SPIKE, Evidence

SAME_STEP = 3  # after this number of failures in the same step the supervisor stops
MOST_QUEUED = 3  # the job goes back to the queue at most this often without a new checkpoint
HOUR = 3600.0  # seconds; the restarts within an hour are limited
DAY = 86400.0  # seconds; failures of the last day make a node suspect


class SupervisorAction(enum.StrEnum):
    """The supervisor's next action."""

    PASS = "pass the status on"
    STOP = "stop"
    QUEUE = "queue the job again"
    WAIT = "wait for room on the disk"
    RESTART = "restart"
    RETURN = "restart with the layout as given"


@dataclass(frozen=True)
class Decision:
    """An action and its reason.

    out: nodes that are left out from now on. back: nodes that were left out and are used again.
    used: the number of nodes that the ranks run on from now on, if the layout changes; 0: the
    layout stays. flags: the options of the new layout.
    """

    action: SupervisorAction
    reason: str
    out: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    used: int = 0
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Earlier:
    """An earlier end of the ranks: seconds since then, its evidence, and the decision."""

    ago: float
    evidence: Evidence
    decision: Decision


def decide(found: Evidence, earlier: Sequence[Earlier], spare: int | None, limit: int) -> Decision:
    """Return the decision about the next action, after the ranks of a run have ended.

    found: the evidence about this end. earlier: the run's earlier ends, oldest first. spare: the
    number of nodes that may be left out; None if the launcher chooses the nodes. limit: the most
    restarts in an hour. Called by the session after each end of the ranks.
    """
    if found.status == 0:
        return Decision(SupervisorAction.PASS, "the run is finished")
    # Status 75: the ranks have saved and stopped before the last step, because the session asked
    # them to (nodes are back), or the user, a time limit or a file did.
    if found.status == 75 and found.back and not found.requested:
        reason = f"{', '.join(found.back)} can be used again"
        return Decision(SupervisorAction.RETURN, reason, back=found.back)
    if found.status == 75:
        return Decision(SupervisorAction.PASS, "stopped early, everything is saved")
    if found.requested:
        return Decision(SupervisorAction.PASS, "a signal asked for the end")
    recent = [end for end in earlier if end.ago < DAY]
    # The nodes that must be left out: silent nodes, or else nodes that have failed a check.
    unusable = found.silent
    if not unusable and found.kind in REFUSED:
        unusable = found.nodes
    if not unusable and not found.disk_is_full and found.is_mistake:
        cause = "a user's mistake" if found.finite else "training has diverged"
        return Decision(SupervisorAction.STOP, f"{cause}: another start would end in the same way")
    # In all cases below the ranks may be started again, which must not happen too often.
    actions = [end.decision.action for end in recent if end.ago < HOUR]
    restarts = actions.count(SupervisorAction.RESTART) + actions.count(SupervisorAction.WAIT)
    if restarts >= limit:
        return Decision(SupervisorAction.STOP, f"{restarts} restarts in an hour, at most {limit}")
    if unusable:
        return _leave_out(unusable, recent, found, spare)
    if found.disk_is_full:
        return Decision(SupervisorAction.WAIT, "the disk is full")
    if found.kind == SPIKE:
        return Decision(SupervisorAction.RESTART, "the batches up to a spike are skipped")
    return _after_failure(found, recent, spare)


def _after_failure(found: Evidence, recent: list[Earlier], spare: int | None) -> Decision:
    """Return the decision after a lost rank, an exception, or an end without any evidence.

    The question is whether a node is the cause. If the same fault comes back in the same step, on
    other nodes or too often, the run itself is the cause, and the supervisor stops. A node is
    suspect if its rank was lost, or if the node has failed before within a day: it is left out if
    there is a spare node in its place. Otherwise the ranks are started again on the same nodes.

    recent: the run's ends within a day, oldest first. spare: as in `decide`.
    """
    # The same kind of case in the same step counts as the same fault.
    fault = (found.kind, found.iteration)
    at = f"in step {found.iteration}"
    same_fault = [end for end in recent if (end.evidence.kind, end.evidence.iteration) == fault]
    nodes = set(found.nodes)
    for end in same_fault:
        # If the same fault has happened on entirely other nodes, no node is the cause.
        earlier_nodes = end.evidence.nodes
        if nodes and earlier_nodes and nodes.isdisjoint(earlier_nodes):
            both = f"{', '.join(earlier_nodes)} and {', '.join(found.nodes)}"
            return Decision(
                SupervisorAction.STOP, f"it failed {at} on {both}: it is not the hardware"
            )
    failures = len(same_fault) + 1
    if failures >= SAME_STEP:
        return Decision(SupervisorAction.STOP, f"it failed {failures} times {at}")
    # A lost rank, or a node that has had any fault within a day, makes the nodes suspect.
    failed_before = any(not nodes.isdisjoint(end.evidence.nodes) for end in recent)
    suspect = found.kind in LOST or failed_before
    # spare is None: the launcher chooses the nodes, so that none can be left out.
    if not nodes or not suspect or spare is None:
        return Decision(SupervisorAction.RESTART, "no node is known to be the cause")
    if len(found.nodes) <= spare:
        return Decision(SupervisorAction.RESTART, f"{', '.join(found.nodes)} left out", found.nodes)
    # No node is spare. A node that has lost a rank and has failed before is left out all the same:
    # the job is queued, or gets a layout on fewer nodes.
    if failed_before and found.kind in LOST:
        return _leave_out(found.nodes, recent, found, spare)
    return Decision(SupervisorAction.RESTART, f"no node is spare for {', '.join(found.nodes)}")


def _leave_out(
    nodes: tuple[str, ...],
    recent: list[Earlier],
    found: Evidence,
    spare: int | None,
) -> Decision:
    """Return the decision to leave `nodes` out, or to queue the job if too few nodes remain.

    recent: the run's ends within a day. found: the evidence about this end. spare: the number of
    nodes that may be left out. If the launcher chooses the nodes (spare is None), the run stops. It
    stops also if the job was queued MOST_QUEUED times since its newest checkpoint.
    """
    if spare is None:
        advice = f"{', '.join(nodes)} cannot be used, and this launcher's nodes are the user's"
        return Decision(SupervisorAction.STOP, advice)
    if len(nodes) <= spare:
        return Decision(SupervisorAction.RESTART, f"{', '.join(nodes)} left out", nodes)
    # The ends of the ranks since the newest checkpoint; after how many of them the job was queued.
    ends = [end for end in recent if end.evidence.newest == found.newest]
    queued = [end.decision.action for end in ends].count(SupervisorAction.QUEUE)
    reason = f"{', '.join(nodes)} cannot be used, and {spare} nodes are spare"
    if queued >= MOST_QUEUED:
        return Decision(
            SupervisorAction.STOP, f"{reason}; queued {queued} times without a new checkpoint"
        )
    return Decision(SupervisorAction.QUEUE, reason, nodes)


# ---- The journal ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A row of the journal.

    at: the time of the decision, in seconds since 1970. job: Slurm's job and the number of its
    restarts, such as "7.0"; empty without Slurm.
    """

    at: float
    job: str
    evidence: Evidence
    decision: Decision


class Journal:
    """The decisions of a run in OUT/supervisor.jsonl, with the decisions of earlier supervisors.

    A start of the Slurm job is one stay of the job on its nodes: if Slurm queues the job and starts
    it again, it may have other nodes, and nodes that were left out before count no more.
    """

    def __init__(self, out: str, job: str):
        """Read the file. out: the run's folder. job: this start of the Slurm job, such as "7.0"."""
        self.job = job
        path = Path(out, "supervisor.jsonl")
        self.entries = read_entries(path)
        self.file = RowFile(str(path), say)  # keeps rows in memory while the disk is full

    def add(self, found: Evidence, decision: Decision) -> None:
        """Print a decision and append it to the file. found: the evidence that led to it."""
        say(f"{found.describe()}: {decision.action}: {decision.reason}")
        entry = Entry(time.time(), self.job, found, decision)
        self.entries.append(entry)
        row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "at": entry.at, "job": self.job}
        with contextlib.suppress(OSError):  # without the folder, RowFile.write prints the error
            Path(self.file.path).parent.mkdir(parents=True, exist_ok=True)
        self.file.write(row | vars(decision) | {"evidence": dataclasses.asdict(found)})

    def earlier(self) -> list[Earlier]:
        """Return the run's ends so far with their decisions, the oldest first.

        The age of a decision is its absolute difference to the present time: if the clock was set
        back, a decision seems to lie in the future, and a negative age would always count as less
        than an hour.
        """
        now = time.time()
        return [
            Earlier(abs(now - entry.at), entry.evidence, entry.decision) for entry in self.entries
        ]

    def left_out(self) -> set[str]:
        """Return the nodes that are left out in this start of the Slurm job."""
        return set(self._left_out())

    @property
    def has_left_out(self) -> bool:
        """Whether a node was ever left out in this start of the Slurm job."""
        return any(entry.decision.out for entry in self._entries_of_start())

    def silent(self) -> set[str]:
        """Return the nodes that were left out because they did not answer; they may come back."""
        return {node for node, silent in self._left_out().items() if silent}

    def _left_out(self) -> dict[str, bool]:
        """Return the nodes that are left out now; the value is True if the node did not answer.

        A node with the value False was left out for a fault, and does not come back.
        """
        silent_by_node: dict[str, bool] = {}
        # Repeat all decisions of this start, oldest first. Nodes that were left out are added, with
        # whether they did not answer; nodes that can be used again are removed.
        for entry in self._entries_of_start():
            for node in entry.decision.out:
                silent_by_node[node] = node in entry.evidence.silent
            for node in entry.decision.back:
                silent_by_node.pop(node, None)
        return silent_by_node

    def layout(self) -> tuple[int, tuple[str, ...]]:
        """Return the number of nodes in use and the flags of the layout on these nodes.

        The result is 0 and () for the layout that the user has given.
        """
        # The newest decision about the layout counts: to use fewer nodes (`used`), or to return to
        # the user's layout (`back`, with `used` 0 and no flags).
        for entry in reversed(self._entries_of_start()):
            if entry.decision.used or entry.decision.back:
                return entry.decision.used, entry.decision.flags
        return 0, ()

    def _entries_of_start(self) -> list[Entry]:
        """Return the entries of this start of the Slurm job, the oldest first."""
        return [entry for entry in self.entries if entry.job == self.job]


def read_entries(path: Path) -> list[Entry]:
    """Return the entries of a journal's file; rows that are cut short or malformed are left out."""
    entries = []
    with contextlib.suppress(OSError):  # there is no file before the first decision
        for row in read_rows(read_regular(path, MOST_OF_ROWS)):
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                entries.append(_entry(row))
    return entries


def _entry(row: dict[str, Any]) -> Entry:
    """Return the entry in a row; raise TypeError, ValueError or KeyError if it is malformed.

    The file may have been written by another version or edited, so every value is checked.
    """
    values: dict[str, Any] = row["evidence"]
    for name, value in values.items():
        if isinstance(value, list):  # JSON has no tuples
            values[name] = tuple(value)
    evidence = Evidence(**values)
    # A value must have the type of its default; `newest` has the default None, and is a number.
    for name, default in vars(Evidence(0)).items():
        if name != "newest":
            _check_type(getattr(evidence, name), type(default))
    if evidence.newest is not None:
        _check_type(evidence.newest, int)
    out, back, flags = (tuple(map(str, row.get(name, ()))) for name in ("out", "back", "flags"))
    action = SupervisorAction(row["action"])
    reason = str(row["reason"])
    used = row.get("used", 0)
    _check_type(used, int)
    decision = Decision(action, reason, out, back, used, flags)
    return Entry(float(row["at"]), str(row["job"]), evidence, decision)


def _check_type(value: Any, kind: type) -> None:
    """Raise TypeError unless a value of the journal has the type `kind`.

    The items of a tuple must be str or int.
    """
    items = value if isinstance(value, tuple) else ()
    if not isinstance(value, kind) or not all(isinstance(item, str | int) for item in items):
        raise TypeError(value)


def say(text: str) -> None:
    """Print a line of the supervisor with the time, without the text's control characters."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    print(f"supervisor: {now}: {printable(text)}", flush=True)
