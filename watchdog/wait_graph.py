"""Which rank waits for which, and where the chains of waits end: the cause of a hang.

    graph = WaitGraph(ranks)             ranks: monitor.Rank.to_dict of every rank, by number
    graph.blockers(3)                    the ranks for which rank 3 waits
    find_culprits(case, graph)           the ranks that caused the hang

A rank waits in an operation for the members of the group that have not entered the operation. Each
of these may itself wait, on another axis of the mesh, and so on. The rank at the end of a chain of
waits does not wait, and is the cause:

    rank 0 --tp--> rank 1 --dp--> rank 5       rank 5 does not wait: it caused the hang

The number of an operation tells who has entered it (flight_recorder.py). Results that many ranks
share are computed once, because there may be a thousand ranks.
"""

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Ranks = dict[int, dict[str, Any]]  # by rank: the result of monitor.Rank.to_dict


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


@dataclass
class Case:
    """The reason for which the monitor ends the job.

    kind: dead, failed, hang, or missing (ranks did not connect). size: the number of ranks in the
    job. first: the rank that died or failed first. still: in a hang, the rank without progress for
    the longest time. limit: the limit in seconds that is exceeded. missing: the ranks that did not
    connect. gone: the ranks that are dead by now. culprits: the ranks that are the cause, most
    likely first. time: when the case was found.
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
        self.ranks = ranks
        self.waits: dict[int, dict[str, Any]] = {}  # by waiting rank: its wait
        # By group (role, members), then by rank, the operations it has entered: [collectives,
        # {position of the peer: messages sent}, {position of the peer: messages received}].
        self.counts: dict[tuple, dict[int, list]] = {}
        # By collective (group, number): the members that have not entered it.
        self._missing: dict[tuple, list[int]] = {}
        for number, rank in ranks.items():
            if rank["state"] not in ("answered", "failed") or rank["snapshot"] is None:
                continue
            for (role, members), counts in zip(rank["groups"], rank["snapshot"]["counts"]):
                self.counts.setdefault((role, tuple(members)), {})[number] = counts
            if wait := _wait_of(rank["snapshot"]):
                self.waits[number] = wait

    def blockers(self, rank: int) -> list[int]:
        """Return the ranks for which `rank` waits; empty if it does not wait.

        In an operation of a group these are the members that have not entered it, silent ranks
        included. A wait of another kind, for example for the store, names the ranks itself.
        """
        wait = self.waits.get(rank)
        if wait is None:
            return []
        if "role" not in wait:
            return [other for other in wait["ranks"] if other != rank and other in self.ranks]
        group = (wait["role"], tuple(wait["ranks"]))
        peer = wait["peer"]
        if peer is None:
            return [other for other in self._not_entered(group, wait["number"]) if other != rank]
        # A receive waits for the peer's send of the same number, and a send for the peer's receive.
        # The keys of the counts are positions in the group, text because they come from JSON.
        _, sent, received = self.counts.get(group, {}).get(peer, [0, {}, {}])
        halves = sent if wait["kind"] == "receive" else received
        entered = halves.get(str(group[1].index(rank)), 0)
        known = peer in self.ranks and peer != rank
        return [peer] if known and entered < wait["number"] else []

    def _not_entered(self, group: tuple[str, tuple], number: int) -> list[int]:
        """Return the known members that have not entered collective `number` of the group.

        Silent members count as not entered.
        """
        if (group, number) not in self._missing:
            counts = self.counts.get(group, {})
            known = [other for other in group[1] if other in self.ranks]
            missing = [other for other in known if counts.get(other, [0])[0] < number]
            self._missing[group, number] = missing
        return self._missing[group, number]

    def chain_ends(self, start: Iterable[int]) -> list[int]:
        """Return the ranks at which the chains of waits from `start` end: they do not wait.

        A chain that runs in a cycle, or whose last operation all ranks have entered, has no end.
        """
        seen = set()
        queue = list(start)
        while queue:
            rank = queue.pop()
            if rank not in seen:
                seen.add(rank)
                queue += [other for other in self.blockers(rank) if other not in seen]
        # A rank that waits in an operation which all have entered is not the cause: the fault is in
        # the network or the devices between the ranks.
        return sorted(seen - set(self.waits))

    def waiter_for(self, culprit: int) -> tuple[int, dict[str, Any]] | None:
        """Return a rank that waits for `culprit`, and its wait; None if no rank does.

        If several ranks wait for it, the wait in the smallest group is chosen.
        """
        waits = [
            (len(wait["ranks"]), number, wait)
            for number, wait in self.waits.items()
            if "role" in wait and culprit in self.blockers(number)
        ]
        return min(waits, key=lambda found: found[:2])[1:] if waits else None


def _wait_of(snapshot: dict[str, Any]) -> dict[str, Any] | None:
    """Return the wait in which a rank is, or in which it failed; None if for no other rank."""
    wait = snapshot["wait"]
    if wait and wait["kind"] == "writer":
        # The rank waits for its checkpoint's thread, which may itself wait for other ranks.
        wait = snapshot["background"]
    return wait if wait and wait["ranks"] else None


def find_culprits(case: Case, graph: WaitGraph) -> list[int]:
    """Return the ranks that caused the case, most likely first.

    In a hang these are the ends of chains of waits that made no progress for half of the limit;
    empty if there is no such end.
    """
    if case.kind in ("dead", "failed"):
        return [case.first]
    if case.kind == "missing":
        return case.missing
    still = {number: rank["still"] for number, rank in graph.ranks.items()}
    stalled = {number for number in still if still[number] >= case.limit / 2}
    ends = [number for number in graph.chain_ends(stalled) if number in stalled]
    return sorted(ends, key=lambda number: -still[number])
