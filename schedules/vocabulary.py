"""Passes of a pipeline whose ranks share embedding and output matrix: `--vocab-pp`.

Every rank holds an equal part of the vocabulary's rows (arXiv 2411.05288) and does, beside the
passes of its stage, four more for each micro-batch:

    E  looks its tokens up; the sums over the ranks are what the first stage takes
    S  its part of the logits of the last stage's output, which all ranks receive: their largest,
       the sum of their exponentials and the label's logit, which the ranks exchange
    T  with these of all ranks the loss and the gradient of its logits; from it the gradient of the
       output, whose sum over the ranks the last stage's backward takes, then that of the matrix
    G  adds the gradient of the first stage's input, which all ranks receive, to its rows

A rank does one T before the next S: it holds the logits of one micro-batch. Each of these passes
has a time in the simulation of the stages' own passes, the same on all ranks, and every rank does
all of its passes in the order of their times. What a pass needs has an earlier time, so no rank
waits for ever. For S and T to be done between the last stage's forward and its backward, 1F1B is
that of a pipeline with one rank more, or with two from `MANY` ranks on: an S and a T may each have
to wait until some rank has ended a pass.
"""

from itertools import product
from typing import Any

from schedules.schedule import Action, Schedule
from schedules.simulation import ends

MANY = 5  # ranks; with fewer, one micro-batch ahead keeps them as busy as two do
# When the passes are done, in units of a forward: E before the first stage's forward begins; S
# after the last stage's ends, and after the T before; T as long after that forward as a backward
# takes; G after the first stage's backward. Of passes at one time the first in PLACES comes first.
BEFORE_FORWARD = 3.0
AFTER_FORWARD = 1.0
AFTER_BACKWARD = 2.0
PLACES = "EGTSFB"


def more_ahead(pp: Any) -> Any:
    """Micro-batches that every rank of 1F1B runs further ahead than without these passes, for one
    number of ranks or a column of them.
    """
    return 1 + (pp >= MANY)


def with_vocabulary(longer: Schedule, ranks: int, backward: int) -> Schedule:
    """The schedule of the first `ranks` ranks of a schedule of one stage on each, with E, S, T and,
    if it has backwards, G. It is not checked.

    backward: how many forwards a backward takes, 2 or with all blocks recomputed 3.
    """
    seconds = {("F", stage): 1.0 for stage in range(longer.stages)}
    seconds |= {("B", stage): float(backward) for stage in range(longer.stages)}
    timed: list[list[tuple[float, int, Action]]] = [[] for _ in range(ranks)]

    def put(rank: int, time: float, action: Action) -> None:
        timed[rank].append((time, PLACES.index(action.kind), action))

    ended = ends(longer, seconds)
    loss = 0.0  # when T of the micro-batch before is done
    for rank, row in enumerate(longer.ranks[:ranks]):
        for number, action in zip(longer.numbered.ranks[rank], row, strict=True):
            end = ended[number]
            start = end - seconds[action.kind, rank]
            put(rank, start, action)
            times = {}
            if action.kind == "F" and rank == 0:
                times["E"] = start - BEFORE_FORWARD
            if action.kind == "F" and rank == ranks - 1:
                times["S"] = max(loss, end + AFTER_FORWARD)
                times["T"] = loss = end + backward
            if action.kind == "B" and rank == 0:
                times["G"] = end + AFTER_BACKWARD
            for (kind, time), other in product(times.items(), range(ranks)):
                put(other, time, Action(kind, other, action.micro_batch))
    rows = tuple(tuple(action for *_, action in sorted(row)) for row in timed)
    return Schedule(longer.name, rows, longer.rank_of[:ranks])
