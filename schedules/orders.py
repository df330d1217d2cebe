"""Makes the schedules that a layout may have.

    build("1f1b", 4, 8)                             checked, as the pipeline executes it
    build("searched", 4, 8, costs=costs)            an order for the stages' own costs
    build("1f1b", 4, 8, vocabulary=2)               with the passes of --vocab-pp

GPipe: arXiv 1811.06965. 1F1B: arXiv 1806.03377, 2104.04473. Interleaved: arXiv 2104.04473.
ZB-H1: arXiv 2401.10241. ZB-V: arXiv 2401.10241, 2405.15362.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import pairwise, product

from schedules.costs import StageCosts
from schedules.schedule import Action, Schedule, check
from schedules.vocabulary import more_ahead, with_vocabulary

Rows = list[list[Action]]
# Orders made for the stages' own costs: with one stage on each rank, or a V of two.
SEARCHED = ("searched", "searched-v")


def rank_of_stages(name: str, ranks: int, virtual: int = 1) -> tuple[int, ...]:
    """The rank of each stage: round and round, or there and back where the name ends in -v."""
    if name.endswith("-v"):
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(range(ranks)) * virtual


def build(
    name: str,
    ranks: int,
    micro_batches: int,
    virtual: int = 1,
    costs: StageCosts | None = None,
    vocabulary: int = 0,
) -> Schedule:
    """The validated schedule of that name in ORDERS or SEARCHED, for any counts >= 1.

    virtual: stages of each rank, where the name leaves it open. costs: of its stages, which those
    of SEARCHED need. vocabulary: with the passes of --vocab-pp, where a backward takes so many
    forwards; 0: without. Raises ScheduleError if the result could not run, or if a rank may not
    hold one micro-batch; `name` is checked by config.
    """
    schedule = unchecked(name, ranks, micro_batches, virtual, costs, vocabulary)
    check(schedule, micro_batches, backward=True)
    return schedule


@lru_cache(maxsize=512)
def unchecked(
    name: str,
    ranks: int,
    micro_batches: int,
    virtual: int = 1,
    costs: StageCosts | None = None,
    vocabulary: int = 0,
) -> Schedule:
    """As `build`, for what is not executed as it is: checking takes as long as building."""
    if vocabulary:
        more = more_ahead(ranks) if name == "1f1b" else 1
        longer = unchecked(name, ranks + more, micro_batches)
        return with_vocabulary(longer, ranks, vocabulary)
    rank_of = rank_of_stages(name, ranks, virtual)
    if name in SEARCHED:
        if costs is None:
            raise ValueError(f"the order of {name} is made for costs, and there are none")
        rows = _listed(rank_of, micro_batches, costs)
    else:
        rows = ORDERS[name](rank_of, micro_batches)
    return Schedule(name, tuple(map(tuple, rows)), rank_of)


def forward_only(
    rank_of: tuple[int, ...], micro_batches: int, vocabulary: bool = False
) -> Schedule:
    """The validated schedule of an evaluation on stages that are placed so."""
    rows = []
    for row in _rows(rank_of, "F", range(micro_batches)):
        rows.append(tuple(sorted(row, key=lambda a: (a.micro_batch + a.stage, -a.stage))))
    schedule = Schedule("forward", tuple(rows), rank_of)
    if vocabulary:
        schedule = with_vocabulary(schedule, len(rows), backward=2)
    check(schedule, micro_batches, backward=False)
    return schedule


def _rows(rank_of: tuple[int, ...], kind: str, micro_batches: Iterable[int]) -> Rows:
    """Every rank's actions of one kind, by stage and then by micro-batch."""
    rows: Rows = [[] for _ in range(max(rank_of) + 1)]
    for stage, m in product(range(len(rank_of)), micro_batches):
        rows[rank_of[stage]].append(Action(kind, stage, m))
    return rows


def _gpipe(rank_of: tuple[int, ...], micro_batches: int) -> Rows:
    every = range(micro_batches)
    passes = zip(_rows(rank_of, "F", every), _rows(rank_of, "B", every), strict=True)
    return [forwards + backwards for forwards, backwards in passes]


def _one_f_one_b(rank_of: tuple[int, ...], micro_batches: int) -> Rows:
    """The last stage alternates at once; each earlier one runs one more forward ahead of it."""
    ahead = [len(rank_of) - 1 - stage for stage in range(len(rank_of))]
    every = range(micro_batches)
    return _alternating(_rows(rank_of, "F", every), _rows(rank_of, "B", every), ahead)


def _interleaved(rank_of: tuple[int, ...], micro_batches: int) -> Rows:
    """A rank takes a group of micro-batches, one or more for each rank, through each of its stages.

    It runs as many forwards ahead as bring the first group to the last stage, and two for each
    later rank: one for the way there and one for the way back.
    """
    ranks = max(rank_of) + 1
    virtual = len(rank_of) // ranks
    rounds = max(1, micro_batches // ranks)
    ends = [-(-number * micro_batches // rounds) for number in range(rounds + 1)]
    groups = [range(*pair) for pair in pairwise(ends)]
    forwards, backwards, ahead = [], [], []
    for rank in range(ranks):
        own = range(rank, len(rank_of), ranks)
        there = [(s, m) for group in groups for s, m in product(own, group)]
        back = [(s, m) for group in groups for s, m in product(reversed(own), group)]
        forwards.append([Action("F", s, m) for s, m in there])
        backwards.append([Action("B", s, m) for s, m in back])
        ahead.append(2 * (ranks - 1 - rank) + (virtual - 1) * len(groups[0]))
    return _alternating(forwards, backwards, ahead)


def _alternating(forwards: Rows, backwards: Rows, ahead: list[int]) -> Rows:
    """For each rank so many forwards ahead, then forward and backward by turns, and the rest."""
    rows = []
    for first, then, count in zip(forwards, backwards, ahead, strict=True):
        row = first[:count]
        for pair in zip(first[count:], then):  # it ends with the forwards
            row += pair
        row += then[max(0, len(first) - count) :]
        rows.append(row)
    return rows


def _zero_bubble_h1(rank_of: tuple[int, ...], micro_batches: int) -> Rows:
    """1F1B whose weight gradients come later, rank r's by r backwards, and fill the idle time.

    Then every rank holds as many activations as the first one of 1F1B.
    """
    rows = []
    for rank, actions in enumerate(_one_f_one_b(rank_of, micro_batches)):
        row: list[Action] = []
        waiting: deque[Action] = deque()
        for action in actions:
            row.append(action)
            if action.kind == "B":
                waiting.append(Action("W", action.stage, action.micro_batch))
            if len(waiting) > rank:
                row.append(waiting.popleft())
        rows.append([*row, *waiting])
    return rows


def _zero_bubble_v(rank_of: tuple[int, ...], micro_batches: int) -> Rows:
    """Found by `list_rows` for passes that all take as long, in the memory of 1F1B's first rank."""
    from schedules.list_scheduling import list_rows  # the other orders need none of it

    seconds = dict.fromkeys(product("FBW", range(len(rank_of))), 1.0)
    return list_rows(rank_of, micro_batches, seconds, limit=float(len(rank_of)))


def _listed(rank_of: tuple[int, ...], micro_batches: int, costs: StageCosts) -> Rows:
    """What list scheduling makes for the stages' own costs."""
    from schedules.list_scheduling import list_rows

    sizes = [stage.held for stage in costs.stages]
    seconds = costs.seconds(split=True)
    return list_rows(rank_of, micro_batches, seconds, costs.limit, sizes, costs.transfer)


# Every schedule that --schedule offers: a function of `rank_of` and the micro-batches.
ORDERS: dict[str, Callable[[tuple[int, ...], int], Rows]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble_h1,
    "zb-v": _zero_bubble_v,
}
