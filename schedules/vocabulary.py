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

from typing import Any

import numpy as np

from schedules.actions import Numbered
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
    count = longer.micro_batches
    lengths = {"F": 1.0, "B": float(backward)}
    seconds = {(kind, stage): lengths[kind] for kind in lengths for stage in range(longer.stages)}
    ended = longer.by_kind(ends(longer, seconds))  # the end of each F and B in the simulation
    # The times of all passes, by kind, as arrays of (micro-batches, ranks). An F or a B stays on
    # its rank, and its time is its start in the simulation.
    times = {kind: ended[kind][:, :ranks] - lengths[kind] for kind in ended}
    # The first and the last stage's F and B determine the times of the new passes, which every rank
    # does at the same time. S and T come before the last stage's B, because in `longer` a
    # micro-batch goes through the dropped ranks between the last stage's F and B.
    logits = ended["F"][:, ranks - 1 : ranks]  # the end of the last stage's F
    losses = logits + backward
    losses_before = np.concatenate([[[0.0]], losses[:-1]])  # the T of the micro-batch before
    times["E"] = times["F"][:, :1] - BEFORE_FORWARD
    times["S"] = np.maximum(losses_before, logits + AFTER_FORWARD)
    times["T"] = losses
    if "B" in ended:
        times["G"] = ended["B"][:, :1] + AFTER_BACKWARD
    kinds = "".join(times)  # F and B as in `longer`, then the new kinds as in VOCABULARY
    # By kind, micro-batch and rank: the time of each pass, and its kind's place in PLACES.
    all_times = np.stack([np.broadcast_to(times[kind], (count, ranks)) for kind in kinds])
    places = np.array([PLACES.index(kind) for kind in kinds]).repeat(count)
    # Actions are numbered by kind, then by micro-batch, then by stage, of which a rank has one.
    numbers = np.arange(len(kinds) * count) * ranks
    rows = []
    for rank in range(ranks):
        order = np.lexsort((numbers, places, all_times[..., rank].ravel()))
        rows.append((numbers[order] + rank).tolist())
    return Numbered(longer.name, kinds, longer.rank_of[:ranks], count, rows)
