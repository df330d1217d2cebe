"""Which rank waits for which, and where the chains of waits end: the cause of a hang.

    graph = WaitGraph(ranks)             of every rank, the values of monitor.Rank.to_dict
    graph.blockers(3)                    the ranks for which rank 3 waits
    find_culprits(case, graph)           the ranks that caused the hang

A rank waits in an operation for the members of the group that have not entered it. Each of these
may itself wait, on another axis of the mesh, and so on; a rank at the end of such a chain does not
wait and is the cause. What ranks share is computed once for all: they may be a thousand.
"""

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Ranks = dict[int, dict[str, Any]]  # monitor.Rank.to_dict of each


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


@dataclass
class Case:
    """What the monitor saw, for which it ends the job.

    kind: dead, failed, hang, or missing (ranks that did not connect). size: ranks of the job.
    first: the rank that died or failed first. still: in a hang, that without progress for longest.
    limit: seconds of the limit that is exceeded. gone: ranks that are dead by now. culprits: ranks
    that are the cause, most likely first.
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
        """As plain values, for case.json."""
        return dataclasses.asdict(self)


class WaitGraph:
    """The waits of all ranks that have answered or failed, and what each has entered."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.waits: dict[int, dict[str, Any]] = {}  # of each rank that waits
        # By role and members of a group and rank: [collectives, {position: sent}, {..: received}].
        self.counts: dict[tuple, dict[int, list]] = {}
        self._missing: dict[tuple, list[int]] = {}  # by collective
        for number, rank in ranks.items():
            if rank["state"] not in ("answered", "failed") or rank["snapshot"] is None:
                continue
            for (role, members), counts in zip(rank["groups"], rank["snapshot"]["counts"]):
                self.counts.setdefault((role, tuple(members)), {})[number] = counts
            if wait := _wait_of(rank["snapshot"]):
                self.waits[number] = wait

    def blockers(self, rank: int) -> list[int]:
        """The ranks for which a rank waits: they have not entered its operation, or are silent."""
        wait = self.waits.get(rank)
        if wait is None:
            return []
        if "role" not in wait:
            return [other for other in wait["ranks"] if other != rank and other in self.ranks]
        group = (wait["role"], tuple(wait["ranks"]))
        peer = wait["peer"]
        if peer is None:
            return [other for other in self._not_entered(group, wait["number"]) if other != rank]
        # Of the peer's messages the other halves of this rank's, by position as JSON has it.
        _, sent, received = self.counts.get(group, {}).get(peer, [0, {}, {}])
        halves = sent if wait["kind"] == "receive" else received
        entered = halves.get(str(group[1].index(rank)), 0)
        known = peer in self.ranks and peer != rank
        return [peer] if known and entered < wait["number"] else []

    def _not_entered(self, group: tuple[str, tuple], number: int) -> list[int]:
        """The known members that have not entered that collective, silent ones included."""
        if (group, number) not in self._missing:
            counts = self.counts.get(group, {})
            known = [other for other in group[1] if other in self.ranks]
            missing = [other for other in known if counts.get(other, [0])[0] < number]
            self._missing[group, number] = missing
        return self._missing[group, number]

    def chain_ends(self, start: Iterable[int]) -> list[int]:
        """The ranks at the ends of the chains of waits from `start`: those that do not wait."""
        seen = set()
        queue = list(start)
        while queue:
            rank = queue.pop()
            if rank not in seen:
                seen.add(rank)
                queue += [other for other in self.blockers(rank) if other not in seen]
        # Not a rank that waits although all have entered: the fault is between the ranks.
        return sorted(seen - set(self.waits))

    def waiter_for(self, culprit: int) -> tuple[int, dict[str, Any]] | None:
        """A rank that waits for that one, and its wait: the one in the smallest group."""
        waits = [
            (len(wait["ranks"]), number, wait)
            for number, wait in self.waits.items()
            if "role" in wait and culprit in self.blockers(number)
        ]
        return min(waits, key=lambda found: found[:2])[1:] if waits else None


def _wait_of(snapshot: dict[str, Any]) -> dict[str, Any] | None:
    """What a rank waits in, or failed in; None if it does not wait for other ranks."""
    wait = snapshot["wait"]
    if wait and wait["kind"] == "writer":
        wait = snapshot["background"]  # its checkpoint's thread, which may wait for others
    return wait if wait and wait["ranks"] else None


def find_culprits(case: Case, graph: WaitGraph) -> list[int]:
    """The ranks that caused a case, most likely first; empty if no chain of waits ends."""
    if case.kind in ("dead", "failed"):
        return [case.first]
    if case.kind == "missing":
        return case.missing
    still = {number: rank["still"] for number, rank in graph.ranks.items()}
    stalled = {number for number in still if still[number] >= case.limit / 2}
    ends = [number for number in graph.chain_ends(stalled) if number in stalled]
    return sorted(ends, key=lambda number: -still[number])
