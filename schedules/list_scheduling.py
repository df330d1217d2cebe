"""Makes the order of the schedule zb-v by a greedy simulation (list scheduling).

    rows = list_rows(rank_of, micro_batches, limit=8)

As soon as a rank is free, it starts an action whose input has arrived: if possible a B (gradient of
a stage's input), else an F (forward pass) for which there is memory, else a W (gradients of
weights). A rank holds a micro-batch's activations in a stage from its F to its W. Every action
takes one unit of time, and a message between ranks takes none.

The order cannot deadlock: a forward pass starts only if memory remains for the same micro-batch in
the later stages of the rank, so the earliest micro-batch can always go on.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from math import inf


def list_rows(rank_of: Sequence[int], micro_batches: int, limit: int) -> list[list[int]]:
    """Return every rank's actions in order, as numbers of a `Numbered` with kinds FBW.

    The kinds are F (forward), B (gradients of inputs) and W (gradients of weights).

    rank_of: the rank of each stage; no two stages may send the same kind of result from one rank
    to the same other rank, since their messages might then be taken in a wrong order.
    limit: the most that a rank may hold, where one micro-batch's activations in one stage count 1:
    at least the number of stages of a rank.
    """
    greedy = _Greedy(rank_of, micro_batches, limit)
    greedy.run()
    return greedy.rows


class _Greedy:
    """The state of the simulation; the arguments are those of `list_rows`."""

    def __init__(self, rank_of: Sequence[int], micro_batches: int, limit: int):
        """Prepare a simulation in which nothing has run.

        All micro-batches are ready for the first stage's F at time 0.
        """
        self.rank_of = rank_of
        self.micro_batches = micro_batches
        ranks = range(max(rank_of) + 1)
        stages = range(len(rank_of))
        # For each rank, its stages, the last stage first.
        self.own = [[s for s in reversed(stages) if rank_of[s] == rank] for rank in ranks]
        # For each stage, the most that its rank may hold when a forward pass of the stage starts.
        # Memory must remain for this stage and for the rank's later stages, through which the same
        # micro-batch goes before its backward pass frees anything.
        self.room = []
        for stage, rank in enumerate(rank_of):
            later = sum(s >= stage for s in self.own[rank])
            self.room.append(limit - later)
        self.held = [0 for _ in ranks]  # for each rank, the activations that it holds
        self.clock = [0.0 for _ in ranks]  # for each rank, the time at which it is free
        # By kind, the number of passes that each stage has done.
        self.done = {kind: [0 for _ in stages] for kind in "FBW"}
        # By kind and stage, the times at which the inputs of the stage's next passes arrive.
        self.arrived = {kind: [deque[float]() for _ in stages] for kind in "FB"}
        self.arrived["F"][0].extend([0.0] * micro_batches)
        # For each rank, the numbers of the actions that it has started, in order.
        self.rows: list[list[int]] = [[] for _ in ranks]

    def run(self) -> None:
        """Run all actions in the order of time; `list_rows` then takes the orders from `rows`.

        An event is a time and a rank that may then be able to start an action.
        """
        events = [(0.0, rank) for rank in range(len(self.rows))]
        while events:
            now, rank = heapq.heappop(events)
            if now < self.clock[rank]:
                continue  # the rank is busy; another event marks the end of its action
            kind, stage, start = self._choose(rank, now)
            if kind:
                for event in self._do(kind, stage, now):
                    heapq.heappush(events, event)
            elif start < inf:  # the rank can start nothing now; its next input arrives at `start`
                heapq.heappush(events, (start, rank))

    def number_of(self, kind: str, micro_batch: int, stage: int) -> int:
        """Return the number of an action in `Numbered`: by kind, then micro-batch, then stage."""
        return ("FBW".index(kind) * self.micro_batches + micro_batch) * len(self.rank_of) + stage

    def _choose(self, rank: int, now: float) -> tuple[str, int, float]:
        """Return (kind, stage, start) of the action that a rank starts now.

        If no action can start, the kind is "" and `start` is the time at which the rank's next
        input arrives, or infinity if no input is on its way.
        """
        soonest = inf
        # Every B comes before every F. Among passes of one kind, the last stage comes first. An F
        # starts only if the rank holds at most `room[stage]`, so that its activations fit; a B
        # takes no further memory.
        for kind in "BF":
            for stage in self.own[rank]:
                queue = self.arrived[kind][stage]  # the times at which the stage's inputs arrive
                fits = kind == "B" or self.held[rank] <= self.room[stage]
                if queue and fits:
                    if queue[0] <= now:
                        return kind, stage, now
                    soonest = min(soonest, queue[0])
        # No B and no F can start, so the rank does a W, in the stage that has done the fewest.
        with_weights_to_do = [s for s in self.own[rank] if self.done["W"][s] < self.done["B"][s]]
        if not with_weights_to_do:
            return "", 0, soonest
        stage = min(with_weights_to_do, key=self.done["W"].__getitem__)
        return "W", stage, now

    def _do(self, kind: str, stage: int, now: float) -> list[tuple[float, int]]:
        """Run an action, and return the events (time, rank) at which ranks may start another one.

        The action's rank may start another one when the action ends, and the rank that receives its
        result when the result has arrived. A W frees activations and sends nothing.
        """
        rank = self.rank_of[stage]
        end = now + 1
        # A stage does the passes of a kind in the order of micro-batches, so the number of passes
        # that it has done is the micro-batch of this one.
        self.rows[rank].append(self.number_of(kind, self.done[kind][stage], stage))
        self.done[kind][stage] += 1
        self.clock[rank] = end
        events = [(end, rank)]
        if kind == "W":
            self.held[rank] -= 1
            return events
        if kind == "F":
            self.held[rank] += 1
        self.arrived[kind][stage].popleft()
        # The last stage's F computes the loss, after which the same stage's B can start.
        is_last_forward = kind == "F" and stage == len(self.rank_of) - 1
        if is_last_forward:
            self.arrived["B"][stage].append(end)
            return events
        # Any other F sends to the next stage. A B sends to the stage before, if there is one.
        next_stage = stage + 1 if kind == "F" else stage - 1
        if next_stage < 0:
            return events
        receiver = self.rank_of[next_stage]
        self.arrived[kind][next_stage].append(end)
        # The receiver may start an action when the message has arrived and the receiver is free.
        events.append((max(end, self.clock[receiver]), receiver))
        return events
