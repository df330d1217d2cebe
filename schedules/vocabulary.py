"""Adds the passes of `--vocab-pp` to a schedule: all ranks share embedding and output matrix.

Every rank holds an equal shard of the vocabulary's rows (arXiv 2411.05288). Beside the F and B of
its stage, it does four passes for each micro-batch:

    E  looks the tokens up in its rows; the first stage's input is the sum over all ranks
    S  receives the last stage's output and computes its shard of the logits: their maximum, the
       sum of their exponentials and the label's logit, which the ranks then exchange
    T  computes the loss and the gradient of its logits from what S exchanged; then the gradient of
       the last stage's output, which is summed over all ranks, and of its rows of the output matrix
    G  receives the gradient of the first stage's input and adds it to the gradient of its rows

A rank does T before the next S, so that it holds the logits of one micro-batch only. The stages' F
and B are simulated; each new pass gets a time in this simulation, the same on all ranks, and every
rank does all of its passes in the order of their times. A pass has a later time than the passes
that it needs, so no rank waits for ever. To leave time for S and T between the last stage's F and
B, the 1F1B order is taken from a pipeline with one rank more, or two more from `MANY` ranks on: an
S and a T may each have to wait until some rank has ended a pass. Read simulation.py first.
"""

from itertools import product
from typing import Any

from schedules.actions import SUMMED, VOCABULARY, Numbered
from schedules.simulation import ends

# With at least this many ranks, a rank of 1F1B runs two micro-batches further ahead than without
# --vocab-pp. With fewer ranks, one micro-batch further ahead keeps the ranks as busy as two do.
MANY = 5
# The times of a micro-batch's new passes, in units of a forward pass. T follows the end of the last
# stage's F after the length of a backward pass.
BEFORE_FORWARD = 3.0  # E is this long before the start of the first stage's F
# S is this long after the end of the last stage's F, or at the T of the micro-batch before if that
# is later.
AFTER_FORWARD = 1.0
AFTER_BACKWARD = 2.0  # G is this long after the end of the first stage's B
# A rank sorts its passes by their times. If several have the same time, the kind that is first in
# this string comes first.
PLACES = "EGTSFB"


def more_ahead(pp: Any) -> Any:
    """Return how many micro-batches further ahead a rank of 1F1B runs than without --vocab-pp.

    It is 1, or 2 from MANY ranks on: orders.py takes 1F1B from a pipeline with so many ranks more,
    and the planner counts the activations of these micro-batches. pp: the number of ranks, or an
    array of such numbers (planner/memory_terms.py).
    """
    return 1 + (pp >= MANY)


def with_vocabulary(longer: Numbered, ranks: int, backward: int) -> Numbered:
    """Return the first `ranks` ranks of a schedule with E, S, T and, if it has B, G added.

    longer: a schedule with one stage on each rank and at least `ranks` ranks; its further ranks are
    dropped, so that the last rank that stays has time between F and B. backward: how many times as
    long as a forward pass a backward pass takes: 2, or 3 if all blocks are recomputed.
    """
    seconds = {("F", stage): 1.0 for stage in range(longer.stages)}
    seconds |= {("B", stage): float(backward) for stage in range(longer.stages)}
    count = longer.micro_batches
    kinds = longer.kinds + (VOCABULARY if "B" in longer.kinds else SUMMED)
    # Actions of the result are numbered by kind, then by micro-batch, then by stage (actions.py).
    first = {kind: place * count for place, kind in enumerate(kinds)}
    # For each rank, its passes as (time, place of the kind in PLACES, number), to be sorted.
    timed: list[list[tuple[float, int, int]]] = [[] for _ in range(ranks)]

    def put(rank: int, time: float, kind: str, m: int) -> None:
        """Add the pass of a kind for micro-batch m to a rank, at a time, with its number.

        Passes of the same time are sorted by the place of their kinds in PLACES. A rank has one
        stage, so the rank's number is also the stage's.
        """
        timed[rank].append((time, PLACES.index(kind), (first[kind] + m) * ranks + rank))

    ended = ends(longer, seconds)
    loss = 0.0  # the time of the latest pass T, which computes the loss of a micro-batch
    for rank, row in enumerate(longer.ranks[:ranks]):
        for number in row:
            # Each F and B stays on its rank, at the time at which it starts in the simulation.
            # `ended` has the time at which each action of `longer` ends there.
            kind, _, m = longer.action(number)
            end = ended[number]
            start = end - seconds[kind, rank]
            put(rank, start, kind, m)
            # The first and the last stage's F and B determine the times of the new passes. S and T
            # come before the last stage's B, because in `longer` a micro-batch goes through the
            # dropped ranks between the last stage's F and B.
            times = {}
            if kind == "F" and rank == 0:
                times["E"] = start - BEFORE_FORWARD
            if kind == "F" and rank == ranks - 1:
                times["S"] = max(loss, end + AFTER_FORWARD)
                times["T"] = loss = end + backward
            if kind == "B" and rank == 0:
                times["G"] = end + AFTER_BACKWARD
            # `times` has a time for each new pass (E, S, T, G) that this action determines. Every
            # rank does the new pass, and on every rank it has this time.
            for (new, time), other in product(times.items(), range(ranks)):
                put(other, time, new, m)
    rows = [[number for *_, number in sorted(row)] for row in timed]
    return Numbered(longer.name, kinds, longer.rank_of[:ranks], count, rows)
