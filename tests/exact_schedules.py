"""The fastest order of a small pipeline with one stage on each rank: branch and bound.

    rows, complete = fastest_rows(4, 6, seconds, room, transfer, below=33.0)

Active schedules are enumerated as by Giffler and Thompson (Operations Research 8, 1960): of all
passes that could come next the one that would end first decides which rank is next, and only what
starts before that end is tried there. Starting a pass earlier never costs memory that is missed
later: between a forward and where it could have started, one stage has only passes that free
memory. So one of these schedules is the fastest. A branch is cut where a bound says that it is not
faster than the best one, or where an earlier state did the same passes and was nowhere later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Row = Sequence[tuple[str, int, int]]  # kind, stage, micro-batch

Messages = dict[tuple[str, int], list[float]]  # by kind and rank of the pass that takes them
Trail = list[tuple[str, int, int]]
Counts = tuple[int, ...]  # forwards, backwards and weight gradients done, of each rank in turn


@dataclass
class _Search:
    """States are counts of passes done, when each rank is free (clocks), and messages."""

    ranks: int
    micro_batches: int
    seconds: Mapping[tuple[str, int], float]
    room: Sequence[int]  # micro-batches that each rank may hold
    transfer: float
    best: float
    nodes: int
    rows: list[Row] | None = None
    seen: dict[Counts, list[tuple[float, ...]]] = field(default_factory=dict)

    def visit(
        self,
        counts: list[int],
        clocks: list[float],
        messages: Messages,
        trail: Trail,
    ) -> None:
        """Try all that may follow on a state; `trail`: the passes so far, of all ranks."""
        self.nodes -= 1
        if self.nodes < 0 or self.bound(counts, clocks) >= self.best * (1 - 1e-12):
            return
        if len(trail) == 3 * self.ranks * self.micro_batches:
            self.best = max(clocks)
            self.rows = [[a for a in trail if a[1] == r] for r in range(self.ranks)]
            return
        times = (*clocks, *(t for key in sorted(messages) for t in messages[key]))
        before = self.seen.setdefault(tuple(counts), [])
        if any(all(a <= b for a, b in zip(one, times, strict=True)) for one in before):
            return
        before.append(times)
        ready = self.ready(counts, clocks, messages)
        end, rank = min((start + self.seconds[kind, r], r) for start, kind, r in ready)
        for start, kind, r in sorted(ready):
            if r == rank and start < end:
                self.follow(counts, clocks, messages, trail, (start, kind, r))

    def follow(
        self,
        counts: list[int],
        clocks: list[float],
        messages: Messages,
        trail: Trail,
        chosen: tuple[float, str, int],
    ) -> None:
        """Visit the state after one more pass."""
        start, kind, r = chosen
        end, place = start + self.seconds[kind, r], 3 * r + "FBW".index(kind)
        action = (kind, r, counts[place])
        counts, clocks = counts.copy(), clocks.copy()
        counts[place] += 1
        clocks[r] = end
        messages = messages.copy()
        if kind != "W":
            messages[kind, r] = messages[kind, r][1:]
        if kind == "F":
            to = ("F", r + 1) if r + 1 < self.ranks else ("B", r)
        else:
            to = ("B", r - 1)
        if kind != "W" and to in messages:
            delay = self.transfer if to[1] != r else 0.0
            messages[to] = [*messages[to], end + delay]
        self.visit(counts, clocks, messages, [*trail, action])

    def ready(
        self, counts: list[int], clocks: list[float], messages: Messages
    ) -> list[tuple[float, str, int]]:
        """Start, kind and rank of every pass whose input is known, and for which there is room."""
        found = []
        for r, clock in enumerate(clocks):
            forwards, backwards, weights = counts[3 * r : 3 * r + 3]
            if messages["F", r] and forwards - weights < self.room[r]:
                found.append((max(clock, messages["F", r][0]), "F", r))
            if messages["B", r]:
                found.append((max(clock, messages["B", r][0]), "B", r))
            if weights < backwards:
                found.append((clock, "W", r))
        return found

    def bound(self, counts: Sequence[int], clocks: Sequence[float]) -> float:
        """No schedule that goes on from here ends earlier: each rank's own passes, and then the way
        of its last forward to the end and back, or of its last backward to the first rank.
        """
        least, way = 0.0, self.seconds["W", 0]  # of the last backward from this rank on
        forth, back = 0.0, way
        for r in range(self.ranks):
            forth += self.seconds["F", r] + self.transfer
            back += self.seconds["B", r] + self.transfer
        for r, clock in enumerate(clocks):
            left = [self.micro_batches - done for done in counts[3 * r : 3 * r + 3]]
            own = [n * self.seconds[kind, r] for n, kind in zip(left, "FBW", strict=True)]
            forth -= self.seconds["F", r] + self.transfer
            least = max(least, clock + sum(own))
            if left[1]:
                after = way if r else 0.0
                least = max(least, clock + own[0] + own[1] + after)
            if left[0]:
                least = max(least, clock + own[0] + forth + back - self.transfer)
            way += self.seconds["B", r] + self.transfer
        return least


def fastest_rows(
    ranks: int,
    micro_batches: int,
    seconds: Mapping[tuple[str, int], float],
    room: Sequence[int],
    transfer: float,
    below: float,
    nodes: int = 10_000,
) -> tuple[list[Row] | None, bool]:
    """The fastest order that ends before `below`, or None; and whether all were tried.

    seconds: by kind (F, B, W) and rank. room: how many micro-batches each rank may hold, at least
    one. nodes: states to visit before the search is given up.
    """
    search = _Search(ranks, micro_batches, seconds, room, transfer, below, nodes)
    messages: Messages = {(kind, r): [] for kind in "FB" for r in range(ranks)}
    messages["F", 0] = [0.0] * micro_batches
    search.visit([0] * (3 * ranks), [0.0] * ranks, messages, [])
    return search.rows, search.nodes >= 0
