"""Makes every schedule that --schedule offers, by name.

    build("1f1b", 4, 8)                     4 ranks, 8 micro-batches: checked, ready to execute
    schedule_for(layout, micro_batches)        the schedule that the pipeline executes

Read schedule.py first, which defines actions and schedules. Stage 0 has the model's first blocks;
`rank_of[s]` is the rank that holds stage s. Orders are made of numbers in place of actions: with S
stages and M micro-batches, the F (forward pass) of micro-batch m through stage s is number
m * S + s, its B (backward pass) M * S more, and its W (gradients of weights, if B leaves them out)
M * S more than its B (actions.py).

GPipe: arXiv 1811.06965. 1F1B: arXiv 1806.03377, 2104.04473. Interleaved: arXiv 2104.04473.
ZB-H1: arXiv 2401.10241. ZB-V: arXiv 2401.10241, 2405.15362.
"""

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from itertools import chain, product

from config.schema import Layout
from schedules.actions import Numbered
from schedules.interleaved import Interleaved
from schedules.list_scheduling import list_rows
from schedules.partition import placement, rank_of_stages
from schedules.schedule import Schedule, check

Rows = list[list[int]]  # for each rank, the numbers of its actions in order


def build(name: str, ranks: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """Return the validated schedule for a name in ORDERS and any counts >= 1.

    virtual: stages of each rank; not used for names that end in -v, which have two stages.
    Raise ScheduleError if the schedule cannot run.
    """
    schedule = schedule_from_numbers(numbered(name, ranks, micro_batches, virtual))
    check(schedule, micro_batches, backward=True)
    return schedule


@lru_cache(maxsize=512)
def numbered(name: str, ranks: int, micro_batches: int, virtual: int = 1) -> Numbered:
    """Return the schedule of `build` as numbers; it is not validated, which would take longer.

    Called by `build`, and for schedules that are only simulated.
    """
    rank_of = rank_of_stages(name, ranks, virtual)
    kinds = "FBW" if name.startswith("zb") else "FB"
    return Numbered(name, kinds, rank_of, micro_batches, ORDERS[name](rank_of, micro_batches))


def schedule_from_numbers(found: Numbered) -> Schedule:
    """Return the same schedule with an `Action` in place of each number; it is not validated.

    Called for the schedules that the pipeline executes.
    """
    rows = tuple(tuple(map(found.action, row)) for row in found.ranks)
    return Schedule(found.name, rows, found.rank_of)


def forward_only(
    rank_of: tuple[int, ...],
    micro_batches: int,
) -> Schedule:
    """Return the validated schedule of an evaluation: forward passes only.

    rank_of: the rank of each stage. A rank that holds several stages does its passes in the order
    of m + s, for micro-batch m and stage s: every pass comes after the pass that it needs. If sums
    are equal, the later stage comes first.
    """
    ranks = max(rank_of) + 1
    rows: Rows = [[] for _ in range(ranks)]
    # A moment is (m, (stage, rank)). Moments are sorted by m + stage, the later stage first.
    moments = product(range(micro_batches), enumerate(rank_of))
    for m, (stage, rank) in sorted(moments, key=lambda at: (at[0] + at[1][0], -at[1][0])):
        rows[rank].append(m * len(rank_of) + stage)
    forward = Numbered("forward", "F", rank_of, micro_batches, rows)
    schedule = schedule_from_numbers(forward)
    check(schedule, micro_batches, backward=False)
    return schedule


def _in_turn(rank_of: tuple[int, ...], micro_batches: int, place: int) -> Rows:
    """Return every rank's actions of one kind, by stage and then by micro-batch.

    place: 0 for forward passes, 1 for backward passes. Action numbers count the stages of
    micro-batch 0, then the stages of micro-batch 1, and so on, so the actions of one stage are
    `stages` apart: with 2 stages, 3 micro-batches and place 0, rank 0 has 0 2 4 and rank 1 1 3 5.
    """
    stages = len(rank_of)
    first = place * micro_batches * stages
    rows: Rows = [[] for _ in range(max(rank_of) + 1)]
    for stage, rank in enumerate(rank_of):
        rows[rank] += range(first + stage, first + stage + micro_batches * stages, stages)
    return rows


def _gpipe(rank_of: tuple[int, ...], micro_batches: int) -> Rows:
    """Return GPipe's order: every rank does all forward passes, then all backward passes.

    Both are in the order of micro-batches: with 2 micro-batches, F0 F1 B0 B1 on every rank.
    """
    forwards = _in_turn(rank_of, micro_batches, 0)
    backwards = _in_turn(rank_of, micro_batches, 1)
    return [first + then for first, then in zip(forwards, backwards, strict=True)]


def _one_f_one_b(rank_of: tuple[int, ...], micro_batches: int) -> Rows:
    """Return the 1F1B order: forward and backward passes in turn, after a few forward passes.

    A stage first does one forward pass for each later stage, to have work until the first backward
    pass arrives from the last stage. With 3 stages and 4 micro-batches, stage 0 does F0 F1 F2 B0 F3
    B1 B2 B3, and the last stage F0 B0 F1 B1 F2 B2 F3 B3. Each rank holds one stage.
    """
    ahead = [len(rank_of) - 1 - stage for stage in range(len(rank_of))]
    forwards = _in_turn(rank_of, micro_batches, 0)
    return _alternating(forwards, _in_turn(rank_of, micro_batches, 1), ahead)


def _interleaved(rank_of: tuple[int, ...], micro_batches: int) -> Rows:
    """Return the interleaved order: a rank takes a group of micro-batches through all its stages.

    The rank of a stage is the stage's number modulo the number of ranks. The groups, and how many
    forward passes a rank does first, are in schedules/interleaved.py.
    """
    ranks = max(rank_of) + 1
    stages = len(rank_of)
    schedule = Interleaved(ranks, stages // ranks, micro_batches)
    forwards = []
    backwards = []
    for rank in range(ranks):
        stages_of_rank = range(rank, stages, ranks)
        rank_forwards: list[int] = []
        rank_backwards: list[int] = []
        # Each group goes forward through the rank's stages in order, and backward in reverse order.
        # The numbers of a stage's passes are `stages` apart.
        for begin, end in schedule.groups:
            for stage in stages_of_rank:
                rank_forwards += range(begin * stages + stage, end * stages + stage, stages)
            for stage in reversed(stages_of_rank):
                first = micro_batches * stages + stage
                rank_backwards += range(first + begin * stages, first + end * stages, stages)
        forwards.append(rank_forwards)
        backwards.append(rank_backwards)
    return _alternating(forwards, backwards, list(map(schedule.ahead, range(ranks))))


def _alternating(forwards: Rows, backwards: Rows, ahead: list[int]) -> Rows:
    """Return each rank's forward and backward passes in turn, with some forward passes before.

    forwards, backwards: for each rank, its passes in order. ahead: for each rank, the number of
    forward passes that it does first. The backward passes for which no forward pass is left come
    last: with 2 ahead of 3 micro-batches the order is F F F B B B, with 1 ahead F F B F B B.
    """
    rows = []
    for rank_forwards, rank_backwards, count in zip(forwards, backwards, ahead, strict=True):
        # The further passes in turn: F B F B and so on. The inner zip ends when no forward pass is
        # left, after `paired` pairs; the other backward passes come last.
        pairs = chain.from_iterable(zip(rank_forwards[count:], rank_backwards))
        paired = max(0, len(rank_forwards) - count)
        rows.append([*rank_forwards[:count], *pairs, *rank_backwards[paired:]])
    return rows


def _zero_bubble_h1(rank_of: tuple[int, ...], micro_batches: int) -> Rows:
    """Return the order ZB-H1: 1F1B in which a B leaves the gradients of weights to a later W.

    On rank r, the W of a micro-batch comes r backward passes after its B, and fills time in which
    the rank of 1F1B is idle. Every rank then holds as many activations as the first rank of 1F1B.
    """
    of_kind = micro_batches * len(rank_of)
    rows = []
    for rank, numbers in enumerate(_one_f_one_b(rank_of, micro_batches)):
        row: list[int] = []
        waiting: deque[int] = deque()  # the W that are still to do, in the order of their B
        for number in numbers:
            row.append(number)
            # Actions are numbered: first every F, then every B, then every W, `of_kind` of each. So
            # the W of the same micro-batch and stage as a B has the number B + of_kind.
            if number >= of_kind:
                waiting.append(number + of_kind)
            # A W waits for `rank` further backward passes, so `rank` of the W wait at a time.
            if len(waiting) > rank:
                row.append(waiting.popleft())
        rows.append([*row, *waiting])
    return rows


def _zero_bubble_v(rank_of: tuple[int, ...], micro_batches: int) -> Rows:
    """Return the order ZB-V: two stages on each rank, the first and the last stage on rank 0.

    List scheduling finds the order. It assumes that every pass takes the same time, and lets a rank
    hold as many activations as the first rank of 1F1B, which holds one micro-batch for each rank.
    Stages are half as large here as in 1F1B, so the limit, which counts the activations of one
    micro-batch in one stage as 1, is two for each rank: the number of stages.
    """
    return list_rows(rank_of, micro_batches, limit=len(rank_of))


# By name of the schedule, the functions that make the order from `rank_of`, the rank of each stage,
# and the number of micro-batches.
ORDERS: dict[str, Callable[[tuple[int, ...], int], Rows]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble_h1,
    "zb-v": _zero_bubble_v,
}


# ---- The schedule of a layout --------------------------------------------------------------------


def schedule_for(layout: Layout, micro_batches: int) -> Schedule:
    """Return the validated training schedule of a layout, which the pipeline executes.

    The layout's --schedule must not be auto: costs/auto_schedule.py replaces auto before.
    """
    return build(layout.schedule, layout.pp, micro_batches, layout.stages_per_rank)


def evaluation_of_layout(layout: Layout, micro_batches: int) -> Schedule:
    """Return the validated schedule of an evaluation of the layout's model: forward passes only.

    The pipeline calls this for each evaluation, with the number of its micro-batches.
    """
    return forward_only(placement(layout), micro_batches)
