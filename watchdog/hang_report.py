"""Writes the report of a hang or a death: its text and its files.

The monitor writes, with `format_report` and `write_files`:

    OUT/hang/report.txt         the report as it was printed
    OUT/hang/rank_00003.json    one rank: its last action, its records, its groups, its stacks
    OUT/hang/case.json          the kind of case (a hang, a death, a failure), its time and the
                                culprits; a failed pre-flight lists the nodes that cannot be used

It also finds which rank waits for which, and where the chains of waits end: the cause of a hang.

    graph = WaitGraph(ranks)             ranks: monitor.Rank.to_dict of every rank, by number
    graph.blockers(3)                    the ranks for which rank 3 waits
    find_culprits(case, graph)           the ranks that caused the hang

A rank waits in an operation for the members of the group that have not entered the operation. Each
of these may itself wait, on another axis of the mesh, and so on. The rank at the end of a chain of
waits does not wait, and is the cause:

    rank 0 --tp--> rank 1 --dp--> rank 5       rank 5 does not wait: it caused the hang

Each rank numbers its operations of a group, so a rank whose count is less than an operation's
number has not entered it (flight_recorder.py). Over NCCL the host may have started operations that
its GPU has not come to; these are not counted. Results that many ranks share are computed once,
because there may be a thousand ranks.

A rank is a dictionary with the keys of monitor.Rank.to_dict. Its "snapshot" is the rank's newest
FlightRecorder.snapshot. The snapshot's "wait" is None, an operation of a group ("kind", "role",
"ranks", "number", "peer", "bytes"), or another wait for ranks, which has no "role".
"""

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from base.errors import NodeError, number_ranges
from watchdog.flight_recorder import describe_place

Ranks = dict[int, dict[str, Any]]  # the result of monitor.Rank.to_dict of each rank, by its number


def _now() -> str:
    """Return the local date and time with its zone, for reports."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


@dataclass
class JobFailure:
    """The reason for which the monitor ends the job.

    kind: dead, failed, hang, or missing (ranks did not connect). size: the number of ranks in the
    job. first: the rank that died or failed first, or -1. still: in a hang, the rank without
    progress for the longest time, or -1. limit: the limit in seconds that is exceeded. missing: the
    ranks that did not connect. gone: the ranks that are dead by now. culprits: the ranks that are
    the cause, the most likely rank first. time: the date and time when the case was found.
    The monitor sets `gone` and `culprits` after it has asked all ranks.
    """

    kind: str
    size: int
    first: int = -1
    still: int = -1
    limit: float = 0.0
    missing: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    culprits: list[int] = field(default_factory=list)
    time: str = field(default_factory=_now)

    def to_dict(self) -> dict[str, Any]:
        """Return the case as plain values, for case.json."""
        return dataclasses.asdict(self)


class WaitGraph:
    """The waits of all ranks that have answered or failed, and the operations they have entered."""

    def __init__(self, ranks: Ranks):
        """Collect the waits and the numbers of entered operations from the ranks' snapshots."""
        self.ranks = ranks
        self.waits: dict[int, dict[str, Any]] = {}  # the wait of each rank that waits
        # How many operations each rank has entered, by group (role, members), then by rank:
        # [collectives, {position of the peer: messages sent}, {position: messages received}].
        self.counts: dict[tuple, dict[int, list]] = {}
        # Results of `_not_entered`, by (group, number of the collective).
        self._missing: dict[tuple, list[int]] = {}
        for number, rank in ranks.items():
            # The last snapshot of a silent or dead rank may be out of date, so it does not count.
            if rank["state"] not in ("answered", "failed") or rank["snapshot"] is None:
                continue
            # The snapshot has the counts of the rank's groups in the order of `groups`.
            for (role, members), counts in zip(rank["groups"], rank["snapshot"]["counts"]):
                self.counts.setdefault((role, tuple(members)), {})[number] = counts
            if wait := _wait_of(rank["snapshot"]):
                self.waits[number] = wait

    def blockers(self, rank: int) -> list[int]:
        """Return the ranks for which `rank` waits; the list is empty if it does not wait.

        In an operation of a group, a rank waits for the members that have not entered the
        operation, silent ranks included. wait["number"]: the operation's number among the
        group's collectives, or among the messages to or from the peer.
        """
        wait = self.waits.get(rank)
        if wait is None:
            return []
        if "role" not in wait:  # no operation of a group: the wait itself lists the ranks
            return [other for other in wait["ranks"] if other != rank and other in self.ranks]
        group = (wait["role"], tuple(wait["ranks"]))
        peer = wait["peer"]
        if peer is None:  # a collective
            return [other for other in self._not_entered(group, wait["number"]) if other != rank]
        # A message: a receive waits for the peer's send of the same number, and a send for the
        # peer's receive. So the numbers of messages that the peer has sent and received decide; a
        # peer of which nothing is known counts as having begun no message.
        _, sent, received = self.counts.get(group, {}).get(peer, [0, {}, {}])
        peer_counts = sent if wait["kind"] == "receive" else received
        # `peer_counts` has a number for each position in the group, as text because JSON has made
        # it. The peer has begun its side of the message if the number is large enough.
        position = str(wait["ranks"].index(rank))
        has_entered = peer_counts.get(position, 0) >= wait["number"]
        is_known = peer in self.ranks and peer != rank
        return [peer] if is_known and not has_entered else []

    def _not_entered(self, group: tuple[str, tuple], number: int) -> list[int]:
        """Return the known members that have not entered collective `number` of the group.

        A silent member counts as a member that has not entered it. group: (role, members). The
        result is kept, because all members that wait in the collective ask for it.
        """
        if (group, number) not in self._missing:
            counts = self.counts.get(group, {})
            _, members = group
            missing = []
            for member in members:
                collectives, *_ = counts.get(member, [0])
                if member in self.ranks and collectives < number:
                    missing.append(member)
            self._missing[group, number] = missing
        return self._missing[group, number]

    def chain_ends(self, start: Iterable[int]) -> list[int]:
        """Return the ranks at which the chains of waits from the ranks `start` end.

        Such a rank does not wait, and others wait for it, directly or through more ranks. A chain
        that runs in a cycle, or whose last operation all ranks have entered, has no end.
        """
        seen = set()  # the ranks that the chains from `start` reach, `start` included
        queue = list(start)
        while queue:
            rank = queue.pop()
            if rank not in seen:
                seen.add(rank)
                queue += [other for other in self.blockers(rank) if other not in seen]
        # A rank that waits is no end, even if it waits for no rank: then all members have entered
        # its operation, and the cause is the network or the devices between the ranks.
        return sorted(seen - set(self.waits))

    def waiter_for(self, culprit: int) -> tuple[int, dict[str, Any]] | None:
        """Return a rank that waits for `culprit` in an operation of a group, and its wait.

        If several ranks wait for it, the wait in the smallest group is chosen, which says most
        about the place of the hang. If no rank waits for it, the result is None.
        """
        waits = []
        for number, wait in self.waits.items():
            if "role" in wait and culprit in self.blockers(number):
                waits.append((number, wait))
        if not waits:
            return None
        return min(waits, key=lambda entry: (len(entry[1]["ranks"]), entry[0]))


def _wait_of(snapshot: dict[str, Any]) -> dict[str, Any] | None:
    """Return the wait of a rank's snapshot; None if the rank does not wait for other ranks.

    The wait of a rank that failed is the wait in which it failed.
    """
    wait = snapshot["wait"]
    if wait and wait["kind"] == "writer":
        # The rank waits for its own thread that writes a checkpoint. What matters is whether that
        # thread waits for other ranks.
        wait = snapshot["background"]
    return wait if wait and wait["ranks"] else None


def find_culprits(case: JobFailure, graph: WaitGraph) -> list[int]:
    """Return the ranks that caused the case, the most likely rank first.

    In a hang these are the ranks at the ends of chains of waits, if they made no progress for half
    of the limit; the rank without progress for the longest time comes first. If the chains have no
    end, the list is empty.
    """
    if case.kind in ("dead", "failed"):
        return [case.first]
    if case.kind == "missing":
        return case.missing
    seconds_still = {number: rank["still"] for number, rank in graph.ranks.items()}
    stalled = {rank for rank, seconds in seconds_still.items() if seconds >= case.limit / 2}
    ends = [number for number in graph.chain_ends(stalled) if number in stalled]
    return sorted(ends, key=lambda number: -seconds_still[number])  # the longest time first


_ranges = functools.partial(number_ranges, between=", ")
_RULE = "=" * 80  # the first and the last line of a report
SHOWN_CULPRITS = 8  # the most culprits that a report describes
SHOWN_FRAMES = 6  # the most frames of a stack that a report shows
SHOWN_LINES = 24  # the most lines of a list that a report shows


def format_report(case: JobFailure, ranks: Ranks, out: str) -> str:
    """Return the report of a case as text, for people: the cause, who waits for whom, and where.

    out: the run's --out, or empty if no files are written.
    """
    culprits = case.culprits
    graph = WaitGraph(ranks)
    lines = ["", _RULE, f"{case.time}: {_headline(case, ranks)}"]
    for rank in culprits[:SHOWN_CULPRITS]:
        if rank in ranks:
            lines += _describe_rank(ranks[rank], graph)
    if len(culprits) > SHOWN_CULPRITS:
        lines.append(f"and {len(culprits) - SHOWN_CULPRITS} more: ranks {_ranges(culprits)}")
    if not culprits:
        lines.append(_describe_no_culprit(graph))
    lines += ["who waits for whom:", *_describe_waits(graph)]
    lines += ["where the ranks are:", *_describe_places(ranks)]
    if out:
        lines.append(f"stacks and records of every rank: {out}/hang/rank_*.json")
    return "\n".join([*lines, _RULE])


def _headline(case: JobFailure, ranks: Ranks) -> str:
    """Return the first sentence of a report: what happened, and on which ranks."""
    if case.kind == "missing":
        return (
            f"ranks {_ranges(case.missing)} of {case.size} did not connect to the watchdog in "
            f"{case.limit:.0f} s: see their output"
        )
    if case.kind == "failed":
        return f"rank {case.first} failed first, with the exception below"
    if case.kind == "dead":
        later_deaths = [rank for rank in case.gone if rank != case.first]
        later = f"; ranks {_ranges(later_deaths)} ended after it" if later_deaths else ""
        return (
            f"DEAD: {_name(ranks[case.first])} ended without a goodbye: killed (by the "
            f"out-of-memory killer, the scheduler, a user), crashed, or os._exit{later}"
        )
    seconds = ranks[case.still]["still"]  # how long the rank has made no progress
    return (
        f"HANG: rank {case.still} has made no progress for {seconds:.1f} s, the limit is "
        f"{case.limit:.1f} s (--hang-timeout)"
    )


def _describe_rank(rank: dict[str, Any], graph: WaitGraph) -> list[str]:
    """Return the report's lines on one culprit.

    They tell its name, the operation that it never entered, its error, the state of its process,
    its activity, its memory and its stacks, as far as the monitor knows them.
    """
    lines = [f"CULPRIT: {_name(rank)}"]
    if waiter := graph.waiter_for(rank["rank"]):
        number, wait = waiter
        lines.append(f"  never entered {_operation(wait)}, in which rank {number} waits")
    if rank["error"]:
        lines += ["  " + line for line in rank["error"].rstrip().splitlines()]
    if rank["process"]:
        lines.append(f"  its process is {rank['process']}")
    if rank["state"] == "silent":
        lines.append(f"  it does not answer; its last message came {rank['heard']:.1f} s ago")
    if rank["snapshot"] is None:
        return lines + ["  it had not sent a heartbeat yet"]
    lines += _describe_activity(rank)
    if rank["memory"]:
        used = rank["memory"]["resident"] / 1e9
        free = rank["memory"]["available"] / 1e9
        lines.append(f"  memory: {used:.2f} GB resident, {free:.2f} GB available on its node")
    for name, frames in rank["stacks"].items():
        # Other threads than the main thread matter only while a checkpoint is written.
        if name == "main" or rank["snapshot"]["background"]:
            thread = "it" if name == "main" else f"its {name} thread"
            lines.append(f"  {thread} is at")
            lines += [f"    {_short(frame)}" for frame in frames[:SHOWN_FRAMES]]
    if not rank["stacks"] and rank["raw"]:  # no answer came, but faulthandler has sent a stack
        raw = [f"    {line}" for line in rank["raw"].strip().splitlines()[: 2 * SHOWN_FRAMES]]
        lines += ["  its stack, written by faulthandler:", *raw]
    return lines


def _describe_activity(rank: dict[str, Any]) -> list[str]:
    """Return the lines on what a culprit does, or did at its last message, from its snapshot."""
    snapshot = rank["snapshot"]
    it_is = "it is" if rank["state"] == "answered" else "at its last message it was"
    lines = [f"  {it_is} in {describe_place(snapshot)}, without progress for {rank['still']:.1f} s"]
    if thread := snapshot["background"]:
        lines.append(f"  its checkpoint's thread: {thread['kind']}, for {thread['seconds']:.1f} s")
    if (wait := snapshot["wait"]) and wait["kind"] != "device":
        lines.append(f"  {it_is} waiting in {_operation(wait)}")
    if before := snapshot.get("before"):
        lines.append(f"  its GPU stands before {_operation(before)}, which its host has started")
    elif snapshot["device"]:
        lines.append(f"  its GPU has not passed {_operation(snapshot['device'])}")
    # The last records of the rank are actions and operations; only operations have a kind. If the
    # rank waits in an operation, the line above has told that.
    operations = [record for record in snapshot["last"] if "kind" in record]
    if operations and not (wait and "role" in wait):
        last = operations[-1]
        ended = last["ended"]
        begun = f"not done, begun {last['seconds']:.1f} s before"
        done = begun if ended is None else f"done {ended:.1f} s before"
        lines.append(f"  its last operation: {_operation(last)}, {done}")
    return lines


def _describe_no_culprit(graph: WaitGraph) -> str:
    """Return the line of a hang's report if no rank is the cause.

    Either ranks wait in an operation that all members have entered, so the network or a device is
    the cause; or the ranks wait for one another in a cycle.
    """
    unblocked = [number for number in graph.waits if not graph.blockers(number)]
    if unblocked:
        first = unblocked[0]
        return (
            "NO CULPRIT AMONG THE RANKS: every rank has entered "
            f"{_operation(graph.waits[first])}, in which {_ranges(unblocked)} wait: look at "
            "the network or the devices between them"
        )
    return f"NO CULPRIT: ranks {_ranges(graph.waits)} wait for one another in a cycle"


def _describe_waits(graph: WaitGraph) -> list[str]:
    """Return the report's lines on who waits for whom.

    Ranks that wait in the same operation for the same ranks share a line. The line with the most
    ranks comes first.
    """
    # The waiting ranks, by the operation and the ranks that they wait for.
    waiters: dict[tuple[str, tuple], list[int]] = {}
    for number, wait in graph.waits.items():
        key = (_operation(wait), tuple(graph.blockers(number)))
        waiters.setdefault(key, []).append(number)
    lines = []
    for (operation, blockers), ranks in sorted(waiters.items(), key=lambda item: -len(item[1])):
        whom = f"for {_ranges(blockers)}" if blockers else "though all have entered it"
        lines.append(f"  {_ranges(ranks)} in {operation}: {whom}")
    return _shortened(lines) or ["  no rank is known to wait"]


def _describe_places(ranks: Ranks) -> list[str]:
    """Return the report's lines on where the ranks are; ranks with the same action share a line.

    The line with the fewest ranks comes first, since the exceptional rank is often the cause.
    """
    places: dict[str, list[int]] = {}
    for number, rank in ranks.items():
        places.setdefault(_place(rank), []).append(number)
    ordered = sorted(places.items(), key=lambda item: (len(item[1]), item[1]))
    lines = [f"  {len(numbers):4} x {_ranges(numbers)}: {place}" for place, numbers in ordered]
    return _shortened(lines)


def _shortened(lines: list[str]) -> list[str]:
    """Return at most SHOWN_LINES lines, followed by the number of lines that were left out."""
    more = len(lines) - SHOWN_LINES
    return lines if more <= 0 else [*lines[:SHOWN_LINES], f"  and {more} more such lines"]


def _place(rank: dict[str, Any]) -> str:
    """Return a rank's current action and the line of code at which it is, as text.

    The line of code is the innermost frame of the main thread outside of the watchdog's recorder
    and the collectives. If the rank failed, the last line of its error stands in its place.
    """
    if rank["snapshot"] is None:
        return f"{rank['state']}, before its first heartbeat"
    state = "" if rank["state"] == "answered" else f"{rank['state']}, was in "
    line = state + describe_place(rank["snapshot"])
    if rank["error"]:
        last_line = rank["error"].rstrip().rpartition("\n")[2]
        return f"{line} | {last_line[:100]}"
    frames = [_short(frame) for frame in rank["stacks"].get("main", [])]  # the innermost first
    callers = [f for f in frames if not f.startswith(("flight_recorder.py", "collectives.py"))]
    return line + "".join(f" | {frame}" for frame in callers[:1])


def _name(rank: dict[str, Any]) -> str:
    """Return a rank's number, its coordinates in the mesh, its node and its process."""
    axes = ", ".join(f"{axis} {place}" for axis, place in rank["coordinates"].items())
    place = f" ({axes})" if axes else ""
    return f"rank {rank['rank']}{place} on {rank['node']}, pid {rank['pid']}"


def _operation(wait: dict[str, Any]) -> str:
    """Return the operation of a wait as text: `all_reduce 7 of tp (ranks 0-3), 4,096 bytes`.

    If the rank does not wait in an operation of a group, the text is the kind of wait.
    """
    kind = wait["kind"]
    if "role" not in wait:
        return f"{kind} (for {_ranges(wait['ranks'])})" if wait["ranks"] else kind
    # A message names its peer (`send 3 of forward to 5`), a collective names all members.
    side = {"send": "to", "receive": "from"}.get(kind)
    ranks = f" {side} {wait['peer']}" if side else f" (ranks {_ranges(wait['ranks'])})"
    return f"{kind} {wait['number']} of {wait['role']}{ranks}, {wait['bytes']:,} bytes"


def _short(frame: str) -> str:
    """Return a stack's frame with the file's name in place of its path."""
    path, _, line_and_function = frame.partition(":")
    return f"{Path(path).name}:{line_and_function}"


def write_files(folder: str, case: dict[str, Any], ranks: Ranks, report: str) -> None:
    """Write the files of a case into `folder`, which is OUT/hang.

    report.txt is written first, so that it is there if the disk then fills up; case.json is written
    last, so that the other files are there when the supervisor finds it. The folder of an earlier
    case is renamed to hang.1, hang.2, ... Raise OSError if writing fails.
    """
    path = Path(folder)
    if path.exists():
        names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))
    path.mkdir(parents=True)
    (path / "report.txt").write_text(report + "\n")
    for number, rank in ranks.items():
        (path / f"rank_{number:05d}.json").write_text(json.dumps(rank))
    (path / "case.json").write_text(json.dumps(case))


def write_refusal(folder: str, error: NodeError) -> None:
    """Write a rank's NodeError as a case into `folder`, OUT/hang; called by the rank that fails.

    The supervisor reads from case.json which nodes it must leave out. Raise OSError if writing
    fails.
    """
    when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    case = {"kind": error.kind, "time": when, "culprits": error.ranks, "nodes": error.nodes}
    report = f"\n{_RULE}\n{when}: {error}\n{_RULE}"
    write_files(folder, case | {"error": str(error)}, {}, report)
