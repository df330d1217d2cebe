"""Makes an order of actions by a greedy simulation (list scheduling).

    rows = list_rows(rank_of, micro_batches, seconds, limit=8.0)

As soon as a rank is free, it starts an action whose input has arrived: if possible a B (gradient of
a stage's input), else an F for which there is memory, else a W (gradients of weights).

The order cannot deadlock: a forward pass starts only if memory remains for the same micro-batch in
the later stages of the rank, so the earliest micro-batch can always go on.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from math import inf

from schedules.schedule import Action, ScheduleError
from schedules.simulation import Seconds


def list_rows(
    rank_of: Sequence[int],
    micro_batches: int,
    seconds: Seconds,
    limit: float,
    sizes: Sequence[float] | None = None,
    transfer: float = 0.0,
) -> list[list[Action]]:
    """Return every rank's actions in order: F, B (gradients of inputs) and W (of weights).

    rank_of: the rank of each stage, such that no two stages send the same way between two ranks.
    seconds: of an action, by (kind, stage). sizes: what a micro-batch's activations take in each
    stage (default 1). limit: the most that a rank may hold, in the unit of `sizes`. transfer:
    seconds of a message between ranks. Raise ScheduleError if a rank may not hold one micro-batch
    in all of its stages.
    """
    sizes = [1.0] * len(rank_of) if sizes is None else sizes
    for rank in range(max(rank_of) + 1):
        needed = sum(size for size, holder in zip(sizes, rank_of, strict=True) if holder == rank)
        if needed > limit:
            raise ScheduleError(f"a rank may hold {limit:g}, one micro-batch takes {needed:g}")
    greedy = _Greedy(rank_of, micro_batches, seconds, limit, sizes, transfer)
    greedy.run()
    return greedy.rows


class _Greedy:
    """The state of the simulation.

    own: each rank's stages, the last one first. arrived: by kind and stage, the times at which the
    inputs of its next passes arrive. room: for each stage, the most that its rank may hold when a
    forward pass of the stage starts. held, clock: what each rank holds, and when it is free. done:
    by kind, how many passes each stage has done.
    """

    def __init__(
        self,
        rank_of: Sequence[int],
        micro_batches: int,
        seconds: Seconds,
        limit: float,
        sizes: Sequence[float],
        transfer: float,
    ):
        self.rank_of = rank_of
        self.seconds = seconds
        self.sizes = sizes
        self.transfer = transfer
        ranks = range(max(rank_of) + 1)
        stages = range(len(rank_of))
        self.own = [[s for s in reversed(stages) if rank_of[s] == rank] for rank in ranks]
        self.room = []
        for stage, rank in enumerate(rank_of):
            later = sum(sizes[s] for s in self.own[rank] if s >= stage)
            self.room.append(limit - later + 1e-9)
        self.held = [0.0 for _ in ranks]
        self.clock = [0.0 for _ in ranks]
        self.done = {kind: [0 for _ in stages] for kind in "FBW"}
        self.arrived = {kind: [deque[float]() for _ in stages] for kind in "FB"}
        self.arrived["F"][0].extend([0.0] * micro_batches)
        self.rows: list[list[Action]] = [[] for _ in ranks]

    def run(self) -> None:
        """Run all actions in the order of time; an event is (time, rank that may start one)."""
        events = [(0.0, rank) for rank in range(len(self.rows))]
        while events:
            now, rank = heapq.heappop(events)
            if now < self.clock[rank]:
                continue  # the rank is busy; another event marks the end of its action
            kind, stage, start = self._choose(rank, now)
            if kind:
                for event in self._do(kind, stage, now):
                    heapq.heappush(events, event)
            elif start < inf:
                heapq.heappush(events, (start, rank))

    def _choose(self, rank: int, now: float) -> tuple[str, int, float]:
        """Return the kind and stage of the action that a rank starts now, and the time now; if
        there is none, "", 0 and the time at which its next input arrives.
        """
        soonest = inf
        for kind in "BF":
            for stage in self.own[rank]:
                queue = self.arrived[kind][stage]
                fits = kind == "B" or self.held[rank] <= self.room[stage]
                if queue and fits:
                    if queue[0] <= now:
                        return kind, stage, now
                    soonest = min(soonest, queue[0])
        left = [s for s in self.own[rank] if self.done["W"][s] < self.done["B"][s]]
        if not left:
            return "", 0, soonest
        stage = min(left, key=self.done["W"].__getitem__)
        return "W", stage, now

    def _do(self, kind: str, stage: int, now: float) -> list[tuple[float, int]]:
        """Run an action; return the events (time, rank) at which ranks may start another one."""
        rank = self.rank_of[stage]
        end = now + self.seconds[kind, stage]
        self.rows[rank].append(Action(kind, stage, self.done[kind][stage]))
        self.done[kind][stage] += 1
        self.clock[rank] = end
        events = [(end, rank)]
        if kind == "W":
            self.held[rank] -= self.sizes[stage]
            return events
        if kind == "F":
            self.held[rank] += self.sizes[stage]
        self.arrived[kind][stage].popleft()
        turns = kind == "F" and stage == len(self.rank_of) - 1
        if turns:
            self.arrived["B"][stage].append(end)
            return events
        after = stage + 1 if kind == "F" else stage - 1
        if after < 0:
            return events
        to = self.rank_of[after]
        arrival = end + self.transfer if to != rank else end
        self.arrived[kind][after].append(arrival)
        events.append((max(arrival, self.clock[to]), to))
        return events
