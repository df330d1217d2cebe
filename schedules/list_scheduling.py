"""Orders of actions found by a greedy simulation: list scheduling.

    rows = list_rows(rank_of, micro_batches, seconds, limits=[8.0] * ranks)

A rank that is free starts at once what it has the input of: a backward, else a forward for which
there is memory, else, where the backward is split, weight gradients. Placement, seconds, message
time, memory and preferences are arguments, so one loop makes the V-shaped zero-bubble schedule and
all that the search of compiler.py tries.

No order that it makes can deadlock: a forward starts only if the memory is left for the later
stages of its rank, so the earliest micro-batch can always go on.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from math import inf

Row = Sequence[tuple[str, int, int]]  # kind, stage, micro-batch


def list_rows(
    rank_of: Sequence[int],
    micro_batches: int,
    seconds: Mapping[tuple[str, int], float],
    limits: Sequence[float],
    sizes: Sequence[float] | None = None,
    transfer: float = 0.0,
    patience: float = 0.0,
    ahead: Sequence[int] | None = None,
) -> Sequence[Row]:
    """Every rank's actions; backwards are split if `seconds` has weight gradients ("W").

    rank_of: the rank of each stage, such that no two stages send the same way between two ranks.
    seconds: by kind and stage. limits: the most that each rank may hold, in units of `sizes`, what
    a micro-batch takes in each stage (default 1). transfer: of a message between ranks. patience:
    for which part of a pass of weight gradients a rank rather waits, if a backward or forward is on
    its way. ahead: of each stage, the most micro-batches between forward and backward. Raises
    ValueError if a rank may not hold one micro-batch in all of its stages.
    """
    sizes = [1.0] * len(rank_of) if sizes is None else sizes
    for rank, limit in enumerate(limits):
        needed = sum(size for size, holder in zip(sizes, rank_of, strict=True) if holder == rank)
        if needed > limit:
            raise ValueError(f"rank {rank} may hold {limit:g}, one micro-batch takes {needed:g}")
    greedy = _Greedy(rank_of, micro_batches, seconds, limits, sizes, transfer, patience, ahead)
    greedy.run()
    return greedy.rows


class _Greedy:
    """The state of the simulation. own: each rank's stages, the last one first; arrived: when the
    inputs of each stage's next passes come; room: what a rank may hold for a forward to start.
    """

    def __init__(
        self,
        rank_of: Sequence[int],
        micro_batches: int,
        seconds: Mapping[tuple[str, int], float],
        limits: Sequence[float],
        sizes: Sequence[float],
        transfer: float,
        patience: float,
        ahead: Sequence[int] | None,
    ):
        stages, ranks = range(len(rank_of)), range(len(limits))
        self.rank_of, self.seconds, self.sizes, self.transfer = rank_of, seconds, sizes, transfer
        self.patience, self.ahead = patience, ahead
        self.last = "W" if ("W", 0) in seconds else "B"
        self.own = [[s for s in reversed(stages) if rank_of[s] == r] for r in ranks]
        self.room = [
            limits[rank] - sum(sizes[s] for s in self.own[rank] if s >= stage) + 1e-9
            for stage, rank in enumerate(rank_of)
        ]
        self.held, self.clock = [0.0 for _ in ranks], [0.0 for _ in ranks]
        self.done = {kind: [0 for _ in stages] for kind in "FBW"}
        self.arrived: dict[str, list[deque[float]]] = {k: [deque() for _ in stages] for k in "FB"}
        self.arrived["F"][0].extend([0.0] * micro_batches)
        self.rows: list[list[tuple[str, int, int]]] = [[] for _ in ranks]

    def run(self) -> None:
        """Do all actions, always on the rank that may act first."""
        events = [(0.0, rank) for rank in range(len(self.rows))]
        while events:
            now, rank = heapq.heappop(events)
            if now < self.clock[rank]:
                continue  # it is busy: there is an event at its end
            kind, stage, start = self._choose(rank, now)
            if kind:
                for event in self._do(kind, stage, now):
                    heapq.heappush(events, event)
            elif start < inf:
                heapq.heappush(events, (start, rank))

    def _choose(self, rank: int, now: float) -> tuple[str, int, float]:
        """The kind and stage of what a rank does now; or "", and when the next input is there."""
        soonest = inf
        for kind in "BF":
            for stage in self.own[rank]:
                queue = self.arrived[kind][stage]
                if queue and (kind == "B" or self._admits(stage)):
                    if queue[0] <= now:
                        return kind, stage, now
                    soonest = min(soonest, queue[0])
        left = [s for s in self.own[rank] if self.done["W"][s] < self.done["B"][s]]
        if self.last == "B" or not left:
            return "", 0, soonest
        stage = min(left, key=self.done["W"].__getitem__)
        if soonest - now < self.patience * self.seconds["W", stage]:
            return "", 0, soonest
        return "W", stage, now

    def _admits(self, stage: int) -> bool:
        """Whether memory and `ahead` let a forward of a stage start."""
        between = self.done["F"][stage] - self.done["B"][stage]
        if self.ahead is not None and between >= self.ahead[stage]:
            return False
        return self.held[self.rank_of[stage]] <= self.room[stage]

    def _do(self, kind: str, stage: int, now: float) -> list[tuple[float, int]]:
        """Do an action: the events at which ranks may act because of it."""
        rank, end = self.rank_of[stage], now + self.seconds[kind, stage]
        self.rows[rank].append((kind, stage, self.done[kind][stage]))
        self.done[kind][stage] += 1
        self.clock[rank] = end
        if kind == "F":
            self.held[rank] += self.sizes[stage]
        if kind == self.last:
            self.held[rank] -= self.sizes[stage]
        if kind == "W":
            return [(end, rank)]
        self.arrived[kind][stage].popleft()
        last = stage == len(self.rank_of) - 1
        after = ("B" if last else "F", stage + (not last)) if kind == "F" else ("B", stage - 1)
        if after[1] < 0:
            return [(end, rank)]
        to = self.rank_of[after[1]]
        arrival = end + (self.transfer if to != rank else 0.0)
        self.arrived[after[0]][after[1]].append(arrival)
        return [(end, rank), (max(arrival, self.clock[to]), to)]
