"""Who waits for whom, and where the waits end: the cause of a hang, from the ranks' records.

    waits = Waits(ranks)           of every rank, what monitor.Rank.told says of it
    waits.blockers(3)              the ranks for which rank 3 waits
    culprits(case, waits)          the odd ones out

A rank waits in an operation with a number. Who of that group has not entered the operation of that
number is waited for; that rank may itself wait, on another axis, and so on. Where the waits end is
the odd one out. All is worked out once for all ranks: in a collective of a thousand, a thousand
wait, and for each a thousand would have to be asked.
"""

from collections.abc import Iterable
from typing import Any

Ranks = dict[int, dict[str, Any]]  # as monitor.Rank.told gives them


class Waits:
    """The waits of all ranks that can tell of one, by rank, and what each rank has entered."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.of: dict[int, dict[str, Any]] = {}  # the wait of each rank that is in one
        # By role and members of a group and rank: [collectives, {position: sent}, {..: received}].
        self.counts: dict[tuple, dict[int, list]] = {}
        self._behind: dict[tuple, list[int]] = {}  # by collective, so that it is found once
        for number, rank in ranks.items():
            if rank["state"] not in ("answered", "failed") or rank["snapshot"] is None:
                continue
            for (role, members), counted in zip(rank["groups"], rank["snapshot"]["counts"]):
                self.counts.setdefault((role, tuple(members)), {})[number] = counted
            if wait := _wait(rank["snapshot"]):
                self.of[number] = wait

    def blockers(self, rank: int) -> list[int]:
        """The ranks for which a rank waits: they have not entered what it waits in, or are silent.

        Empty if it waits for nobody, or if all have entered.
        """
        wait = self.of.get(rank)
        if wait is None:
            return []
        if "role" not in wait:
            return [other for other in wait["ranks"] if other != rank and other in self.ranks]
        group, peer = (wait["role"], tuple(wait["ranks"])), wait["peer"]
        if peer is None:
            return [other for other in self._late(group, wait["number"]) if other != rank]
        counted = self.counts.get(group, {}).get(peer)
        known = peer in self.ranks and peer != rank
        return [peer] * (known and _exchanged(counted, rank, wait) < wait["number"])

    def _late(self, group: tuple[str, tuple], number: int) -> list[int]:
        """The known members that have not entered a collective, so far as is known."""
        if (group, number) not in self._behind:
            counts = self.counts.get(group, {})
            self._behind[group, number] = [
                other
                for other in group[1]
                if other in self.ranks and counts.get(other, [0])[0] < number
            ]
        return self._behind[group, number]

    def ends(self, start: Iterable[int]) -> list[int]:
        """The ranks at which the waits of `start` end: those who wait for nobody themselves.

        One that waits although all have entered is no end: then the fault lies between the ranks.
        """
        seen, queue = set(), list(start)
        while queue:
            rank = queue.pop()
            if rank not in seen:
                seen.add(rank)
                queue += [other for other in self.blockers(rank) if other not in seen]
        return sorted(seen - set(self.of))

    def missed(self, culprit: int) -> tuple[int, dict[str, Any]] | None:
        """A rank that waits for that one, and its wait: of several, the one of fewest ranks."""
        waits = [
            (len(wait["ranks"]), number, wait)
            for number, wait in self.of.items()
            if "role" in wait and culprit in self.blockers(number)
        ]
        return min(waits, key=lambda found: found[:2])[1:] if waits else None


def _wait(snapshot: dict[str, Any]) -> dict[str, Any] | None:
    """What a rank waits in, or failed in; None if not in a wait for other ranks."""
    wait = snapshot["wait"]
    if wait and wait["kind"] == "writer":
        wait = snapshot["aside"]  # it waits for its own thread, which may wait for others
    return wait if wait and wait["ranks"] else None


def _exchanged(counted: list | None, rank: int, wait: dict[str, Any]) -> int:
    """How many messages like the one that `rank` waits for the counted rank has begun with it."""
    if counted is None:
        return 0
    _, sent, received = counted
    position = str(list(wait["ranks"]).index(rank))
    sides = {str(k): v for k, v in (sent if wait["kind"] == "receive" else received).items()}
    return sides.get(position, 0)


def culprits(case: dict[str, Any], waits: Waits) -> list[int]:
    """The cause, most likely first; empty if the waits end nowhere."""
    if "first" in case:
        return [case["first"]]
    if case["kind"] == "missing":
        return case["missing"]
    still = {number: rank["still"] for number, rank in waits.ranks.items()}
    late = {number for number in still if still[number] >= case["limit"] / 2}
    ends = [number for number in waits.ends(late) if number in late]
    return sorted(ends, key=lambda number: -still[number])
