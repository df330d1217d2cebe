"""Makes the order of the schedule zb-v by a greedy simulation (list scheduling).

    rows = list_rows(rank_of, micro_batches, limit=8)

As soon as a rank is free, it starts an action whose input has arrived: if possible a B (gradient of
a stage's input), else an F (forward pass) for which there is memory, else a W (gradients of
weights). A rank holds a micro-batch's activations in a stage from its F to its W. Every action
takes one unit of time, and a message between ranks takes none.

The order cannot deadlock: a forward pass starts only if memory remains for the same micro-batch in
the later stages of the rank, so the earliest micro-batch can always go on.
"""

from collections.abc import Sequence


def list_rows(rank_of: Sequence[int], micro_batches: int, limit: int) -> list[list[int]]:
    """Return every rank's actions in order, as numbers of a `Numbered` with kinds FBW.

    The kinds are F (forward), B (gradients of inputs) and W (gradients of weights).

    rank_of: the rank of each stage; no two stages may send the same kind of result from one rank
    to the same other rank, since their messages might then be taken in a wrong order.
    limit: the most that a rank may hold, where one micro-batch's activations in one stage count 1:
    at least the number of stages of a rank.
    """
    stages = len(rank_of)
    ranks = range(max(rank_of) + 1)
    # For each rank, its stages, the last stage first.
    own = [[s for s in reversed(range(stages)) if rank_of[s] == rank] for rank in ranks]
    # For each stage, the most that its rank may hold when a forward pass of the stage starts.
    # Memory must remain for this stage and for the rank's later stages, through which the same
    # micro-batch goes before its backward pass frees anything.
    room = [limit - sum(s >= stage for s in own[rank]) for stage, rank in enumerate(rank_of)]
    # How many passes of each kind a stage has done. A further entry has what the first F and the
    # last B wait for: all micro-batches (forward[-1]), and the last F.
    forward = [0] * stages + [micro_batches]
    backward = [0] * (stages + 1)
    weights = [0] * stages
    held = [0 for _ in ranks]  # for each rank, the activations that it holds
    rows: list[list[int]] = [[] for _ in ranks]
    first_backward = micro_batches * stages  # the numbers of actions: F, then B, then W
    first_weights = 2 * first_backward
    left = 3 * first_backward

    def choice(stages: list[int], held: int) -> tuple[str, int]:
        """Return the kind and the stage of the action that a rank starts, or ("", 0) if none.

        Every B comes before every F. Among passes of one kind, the last stage comes first. An F
        starts only if its activations fit; a B takes no further memory. stages: the rank's. held:
        the activations that it holds.
        """
        for stage in stages:
            if backward[stage] < backward[stage + 1]:
                return "B", stage
        for stage in stages:
            if forward[stage] < forward[stage - 1] and held <= room[stage]:
                return "F", stage
        # No B and no F can start, so the rank does a W, in the stage that has done the fewest.
        fewest, found = micro_batches, ("", 0)
        for stage in stages:
            done = weights[stage]
            if done < fewest and done < backward[stage]:
                fewest, found = done, ("W", stage)
        return found

    while left:
        # Every rank that can starts an action, by what was done before this unit of time.
        chosen = list(map(choice, own, held))
        for rank, (kind, stage) in enumerate(chosen):
            # A stage does the passes of a kind in the order of micro-batches, so the number of
            # passes that it has done is the micro-batch of this one.
            if kind == "F":
                number = forward[stage] * stages + stage
                forward[stage] += 1
                held[rank] += 1
            elif kind == "B":
                number = first_backward + backward[stage] * stages + stage
                backward[stage] += 1
            elif kind == "W":
                number = first_weights + weights[stage] * stages + stage
                weights[stage] += 1
                held[rank] -= 1
            else:
                continue
            rows[rank].append(number)
            left -= 1
        backward[stages] = forward[stages - 1]
    return rows
