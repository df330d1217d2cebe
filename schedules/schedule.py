"""Pipeline schedules as data: what each rank of a pipeline does, in which order.

A schedule is one list of actions per pipeline rank. `F3` is the forward pass of micro-batch 3
through a stage, `B3` its backward pass; where the backward is split, `B3` computes gradients for
the stage's input and `W3` those of its weights. A rank holds one stage or several (virtual stages,
arXiv 2104.04473 section 2.2). The pipeline executes exactly these lists.

    1F1B, 3 stages, 4 micro-batches (a backward takes twice as long as a forward):

    stage 0  F0 F1 F2 .. .. .. .. B0 == F3 B1 == .. B2 == .. B3 ==
    stage 1  .. F0 F1 .. .. B0 == F2 B1 == F3 B2 == .. B3 == .. ..
    stage 2  .. .. F0 B0 == F1 B1 == F2 B2 == F3 B3 == .. .. .. ..

GPipe: arXiv 1811.06965. 1F1B: arXiv 1806.03377, 2104.04473. Interleaved: arXiv 2104.04473.
ZB-H1: arXiv 2401.10241. ZB-V: arXiv 2401.10241, 2405.15362.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, pairwise, product
from operator import mul
from typing import NamedTuple

from schedules.list_scheduling import list_rows

# From an action's stage to the one that takes its result; of W nothing is sent to one stage.
STEPS = {"F": 1, "B": -1, "W": 0, "E": 0, "S": 0, "T": 0, "G": 0}
# Passes of every rank for its part of the vocabulary (schedules/vocabulary.py).
VOCABULARY = "ESTG"
OWN_INPUT = {"B": "F", "W": "B"}  # the pass of the same stage whose result a pass takes
SUMMED = "EST"  # of these the results of all ranks are joined


class ScheduleError(Exception):
    """A schedule that cannot run; the message says which rank waits for what."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage.

    kind: F (forward), B (backward; for inputs only where W exists), W (gradients of weights); E, S,
    T and G as in schedules/vocabulary.py, for the part of the vocabulary on the stage's rank.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank, in order. `rank_of[s]`: the rank that holds stage s."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline, over all ranks."""
        return len(self.rank_of)

    def stages_on(self, rank: int) -> list[int]:
        """The stages that a rank holds, in the model's order."""
        return [stage for stage, holder in enumerate(self.rank_of) if holder == rank]

    def input_of(self, action: Action) -> Action | None:
        """The neighbouring stage's action that an action waits for, None at the pipeline's ends."""
        kind, stage, m = action
        step = STEPS[kind]
        inside = step and 0 <= stage - step < self.stages
        return Action(kind, stage - step, m) if inside else None

    @cached_property
    def vocabulary(self) -> bool:
        """Whether embedding and output matrix are spread over the ranks, one stage on each."""
        return any(action.kind == "E" for action in self.ranks[0])

    def of_all_ranks(self, action: Action) -> list[Action]:
        """The vocabulary passes, or the stage's pass for one, that an action waits for."""
        kind, stage, m = action
        last = self.stages - 1
        if not self.vocabulary:
            return []
        if kind in "SG":
            return [Action("F", last, m) if kind == "S" else Action("B", 0, m)]
        before = {("F", 0): "E", ("B", last): "T", ("T", stage): "S"}.get((kind, stage))
        return [Action(before, other, m) for other in range(self.stages)] if before else []

    def sender_of(self, action: Action) -> Action | None:
        """The action of another rank whose result this one receives; None if there is none."""
        by_all = self.of_all_ranks(action) if action.kind in "SG" else []
        sender = by_all[0] if by_all else self.input_of(action)
        if sender is None or self.rank_of[sender.stage] == self.rank_of[action.stage]:
            return None
        return sender

    def may_be_ahead(self, action: Action) -> bool:
        """Whether to start an action's receive before its rank does the action in front of it.

        Not if the message can only be sent after that one: then it cannot arrive earlier. On a GPU
        a receive runs until its message is there, and a kernel that is loaded in the action in
        front waits until nothing runs: each would wait for the other.
        """
        return action not in self._starts(self.rank_of[action.stage]).needed

    def sent_before(self, action: Action) -> int:
        """The place in its rank's list, or its length, before which an action's result is sent.

        It is the place after the action, or a later one if the receiver takes the message only
        after further actions of this rank. On a GPU a send runs until the receive has begun, and a
        kernel that is loaded in one of these actions waits until nothing runs.
        """
        return self._starts(self.rank_of[action.stage]).sent_before[action]

    def _starts(self, rank: int) -> "_Starts":
        if rank not in self._starts_of:
            self._starts_of[rank] = _message_starts(self, rank)
        return self._starts_of[rank]

    @cached_property
    def _starts_of(self) -> "dict[int, _Starts]":
        """When each rank starts its messages, for those ranks that were asked for."""
        return {}

    @cached_property
    def gradients_taken(self) -> list[range]:
        """For each T, the micro-batches whose G all ranks have done before the S that it needs."""
        done = []  # of each rank, how many G before each S
        for row in self.ranks:
            counts = accumulate(action.kind == "G" for action in row)
            done.append([count for count, action in zip(counts, row) if action.kind == "S"])
        return [range(*pair) for pair in pairwise([0, *map(min, zip(*done))])]

    @cached_property
    def order(self) -> list[tuple[int, Action]]:
        """(rank, action) such that everything an action needs comes before it. Raises ScheduleError
        that names what each stuck rank waits at, if there is no such order.
        """
        return [(rank, action) for rank, action, _ in self.steps]

    @cached_property
    def split(self) -> bool:
        """Whether B computes gradients of inputs only, and W those of weights."""
        return any(action.kind == "W" for actions in self.ranks for action in actions)

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """For each rank, the most activations (of one micro-batch in one stage) held at once.

        An activation is held from its forward to the last action that needs it.
        """
        return tuple(map(int, self.most_held([1] * self.stages)))

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """For each rank, the most held at once, if one micro-batch takes `sizes` in the stages."""
        found = []
        for rank, moments in enumerate(self._held):
            own = [sizes[stage] for stage in self.stages_on(rank)]
            found.append(max(sum(map(mul, counts, own)) for counts in moments))
        return tuple(found)

    @cached_property
    def _held(self) -> list[set[tuple[int, ...]]]:
        """How many activations of each stage a rank holds whenever it begins to release some."""
        last, found = "W" if self.split else "B", []
        for rank, actions in enumerate(self.ranks):
            place = {stage: number for number, stage in enumerate(self.stages_on(rank))}
            counts, moments, grew = [0] * len(place), set[tuple[int, ...]](), False
            for kind, stage, _ in actions:
                if kind == "F":
                    counts[place[stage]] += 1
                    grew = True
                elif kind == last:
                    if grew:
                        moments.add(tuple(counts))
                    counts[place[stage]] -= 1
                    grew = False
            found.append(moments | {tuple(counts)})
        return found

    @cached_property
    def steps(self) -> "list[tuple[int, Action, int]]":
        """As `order`, and the place in this list of the other rank's action whose message an action
        waits for, or -1; what it waits for of all ranks is in `of_all_ranks`.
        """
        return _steps(self)


class _Starts(NamedTuple):
    """When a rank starts its messages. needed: actions whose receive is not started ahead;
    sent_before: see `Schedule.sent_before`.
    """

    needed: set[Action]
    sent_before: dict[Action, int]


def _message_starts(schedule: Schedule, rank: int) -> _Starts:
    """Found in one pass over all actions, in an order in which they can run."""
    needed, sent_before = set[Action](), defaultdict[Action, int](int)
    # How many of the rank's actions, from its first one on, must be done before an action is.
    count_of, last_of = dict[Action, int](), [0] * len(schedule.ranks)
    for doer, action in schedule.order:
        sender, place = schedule.sender_of(action), last_of[doer]
        if doer == rank:
            # The sender's action follows from all that this rank does before it receives.
            if sender and count_of[sender] == place:
                needed.add(action)
            count = place + 1
            sent_before[action] = max(sent_before[action], count)
        else:
            if sender and schedule.rank_of[sender.stage] == rank:
                sent_before[sender] = max(sent_before[sender], place)
            before = [schedule.input_of(action), *schedule.of_all_ranks(action)]
            count = max(place, *(count_of[one] for one in before if one), 0)
            if action.kind in SUMMED:
                own = action._replace(stage=rank)
                sent_before[own] = max(sent_before[own], count)
        count_of[action] = last_of[doer] = count
    return _Starts(needed, dict(sent_before))


def rank_of_stages(name: str, ranks: int, virtual: int = 1) -> tuple[int, ...]:
    """The rank of each stage: round and round, or there and back where the name ends in -v."""
    if name.endswith("-v"):
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(range(ranks)) * virtual


def build(name: str, ranks: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """The validated schedule of that name in ORDERS, for any counts >= 1.

    virtual: stages of each rank, where the name leaves it open. Raises ScheduleError if the result
    could not run; `name` is checked by config.
    """
    schedule = unchecked(name, ranks, micro_batches, virtual)
    check(schedule, micro_batches, backward=True)
    return schedule


def unchecked(name: str, ranks: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """As `build`, for what is not executed as it is: checking takes as long as building."""
    rank_of = rank_of_stages(name, ranks, virtual)
    return Schedule(name, tuple(map(tuple, ORDERS[name](rank_of, micro_batches))), rank_of)


def forward_only(rank_of: tuple[int, ...], micro_batches: int) -> Schedule:
    """The validated schedule of an evaluation on stages that are placed so."""
    rows = _rows(
        rank_of, "F", range(micro_batches), key=lambda a: (a.micro_batch + a.stage, -a.stage)
    )
    schedule = Schedule("forward", tuple(map(tuple, rows)), rank_of)
    check(schedule, micro_batches, backward=False)
    return schedule


def _rows(
    rank_of: tuple[int, ...], kind: str, micro_batches: Iterable[int], key: Callable | None = None
) -> list[list[Action]]:
    """Every rank's actions of one kind, sorted; default: by stage, then by micro-batch."""
    rows: list[list[Action]] = [[] for _ in range(max(rank_of) + 1)]
    for stage, m in product(range(len(rank_of)), micro_batches):
        rows[rank_of[stage]].append(Action(kind, stage, m))
    return [sorted(row, key=key) for row in rows] if key else rows


def _gpipe(rank_of: tuple[int, ...], micro_batches: int) -> list[list[Action]]:
    every = range(micro_batches)
    passes = zip(_rows(rank_of, "F", every), _rows(rank_of, "B", every), strict=True)
    return [forwards + backwards for forwards, backwards in passes]


def _one_f_one_b(rank_of: tuple[int, ...], micro_batches: int) -> list[list[Action]]:
    """The last stage alternates at once; each earlier one runs one more forward ahead of it."""
    ahead = [len(rank_of) - 1 - stage for stage in range(len(rank_of))]
    every = range(micro_batches)
    return _alternating(_rows(rank_of, "F", every), _rows(rank_of, "B", every), ahead)


def _interleaved(rank_of: tuple[int, ...], micro_batches: int) -> list[list[Action]]:
    """A rank takes a group of micro-batches, one or more for each rank, through each of its stages.

    It runs as many forwards ahead as bring the first group to the last stage, and two for each
    later rank: one for the way there and one for the way back.
    """
    ranks = max(rank_of) + 1
    virtual, rounds = len(rank_of) // ranks, max(1, micro_batches // ranks)
    ends = [-(-number * micro_batches // rounds) for number in range(rounds + 1)]
    groups = [range(*pair) for pair in pairwise(ends)]
    forwards, backwards = [], []
    for rank in range(ranks):
        own = range(rank, len(rank_of), ranks)
        forwards.append([Action("F", s, m) for each in groups for s, m in product(own, each)])
        back = own[::-1]
        backwards.append([Action("B", s, m) for each in groups for s, m in product(back, each)])
    ahead = [2 * (ranks - 1 - rank) + (virtual - 1) * len(groups[0]) for rank in range(ranks)]
    return _alternating(forwards, backwards, ahead)


def _alternating(
    forwards: list[list[Action]], backwards: list[list[Action]], ahead: list[int]
) -> list[list[Action]]:
    """For each rank so many forwards ahead, then forward and backward by turns, and the rest."""
    rows = []
    for first, then, count in zip(forwards, backwards, ahead, strict=True):
        pairs = zip(first[count:], then)  # ends with the forwards
        left = then[max(0, len(first) - count) :]
        rows.append([*first[:count], *(action for pair in pairs for action in pair), *left])
    return rows


def _zero_bubble_h1(rank_of: tuple[int, ...], micro_batches: int) -> list[list[Action]]:
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
                waiting.append(action._replace(kind="W"))
            if len(waiting) > rank:
                row.append(waiting.popleft())
        rows.append([*row, *waiting])
    return rows


def _zero_bubble_v(rank_of: tuple[int, ...], micro_batches: int) -> list[list[Action]]:
    """Found by `list_rows` for passes that all take as long, in the memory of 1F1B's first rank."""
    stages, ranks = len(rank_of), max(rank_of) + 1
    seconds = {(kind, stage): 1.0 for kind in "FBW" for stage in range(stages)}
    rows = list_rows(rank_of, micro_batches, seconds, limits=[float(stages)] * ranks)
    return [[Action(*action) for action in row] for row in rows]


# Every schedule that --schedule offers: a function of `rank_of` and the micro-batches.
ORDERS: dict[str, Callable[[tuple[int, ...], int], list[list[Action]]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble_h1,
    "zb-v": _zero_bubble_v,
}


# ---- Checking ------------------------------------------------------------------------------------


def check(schedule: Schedule, micro_batches: int, backward: bool) -> None:
    """Raise ScheduleError unless every rank does every action once, in an order that can run.

    Point-to-point messages carry no label: what a rank sends to another must be received in that
    order, for activations and for gradients.
    """
    kinds = ("FBW" if schedule.split else "FB") if backward else "F"
    if schedule.vocabulary:
        kinds += VOCABULARY if backward else "EST"
    for rank, actions in enumerate(schedule.ranks):
        wanted = set(product(kinds, schedule.stages_on(rank), range(micro_batches)))
        if len(actions) != len(wanted) or set(actions) != wanted:
            each = sorted(Action(*one) for one in wanted)
            raise ScheduleError(f"rank {rank} does {_row(actions)}, not each of {_row(each)} once")
        if schedule.vocabulary:
            _check_order(rank, actions)
    _check_messages(schedule)
    _steps(schedule)


def _check_order(rank: int, actions: Sequence[Action]) -> None:
    """Raise ScheduleError unless micro-batches come in order: all ranks enter the collectives of
    the vocabulary passes in one order, whichever of them sends.
    """
    for kind in dict.fromkeys(action.kind for action in actions):
        row = [action for action in actions if action.kind == kind]
        if row != sorted(row):
            raise ScheduleError(f"rank {rank} does {_row(row)}, not in the order of micro-batches")


def _check_messages(schedule: Schedule) -> None:
    """Raise ScheduleError if a rank receives in another order than its neighbour sends in."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if taken := schedule.input_of(action):
                received[action.kind, schedule.rank_of[taken.stage], rank].append(taken)
            after = action.stage + STEPS[action.kind]
            if after != action.stage and 0 <= after < schedule.stages:
                sent[action.kind, rank, schedule.rank_of[after]].append(action)
    for channel, sending in sent.items():
        kind, source, to = channel
        if source != to and received[channel] != sending:
            raise ScheduleError(
                f"ranks {source} and {to} disagree on the order of {kind}: {_row(sending)} are "
                f"sent and {_row(received[channel])} received"
            )


def _steps(schedule: Schedule) -> list[tuple[int, Action, int]]:
    """As `Schedule.steps`: each rank in turn goes on until it waits for what has not run yet."""
    place = dict[tuple[str, int, int], int]()
    steps: list[tuple[int, Action, int]] = []
    rank_of, ranks, stages = schedule.rank_of, schedule.ranks, schedule.stages
    spread, next_of = schedule.vocabulary, [0] * len(schedule.ranks)
    while sum(next_of) < sum(map(len, ranks)):
        before = len(steps)
        for rank, row in enumerate(ranks):
            for action in islice(row, next_of[rank], None):
                kind, stage, micro_batch = action
                source = stage - STEPS[kind]
                needed = -1
                if source != stage and 0 <= source < stages:
                    needed = place.get((kind, source, micro_batch), -1)
                    if needed < 0:
                        break
                    needed = needed if rank_of[source] != rank else -1
                if kind in OWN_INPUT and (OWN_INPUT[kind], stage, micro_batch) not in place:
                    break
                if spread and not all(map(place.__contains__, schedule.of_all_ranks(action))):
                    break
                place[action] = len(steps)
                steps.append((rank, action, needed))
                next_of[rank] += 1
        if len(steps) == before:
            waiting = [deque(row[at:]) for row, at in zip(ranks, next_of, strict=True)]
            raise ScheduleError(_deadlock(schedule, waiting))
    return steps


def _deadlock(schedule: Schedule, waiting: list[deque[Action]]) -> str:
    """Which ranks wait at what, and every rank's actions, done | to do."""
    stuck, rows = [], []
    for rank, (actions, queue) in enumerate(zip(schedule.ranks, waiting, strict=True)):
        if queue:
            stuck.append(f"rank {rank} waits at {queue[0]} of stage {queue[0].stage}")
        done = actions[: len(actions) - len(queue)]
        rows.append(f"rank {rank}  {_row(done)} | {_row(queue)}")
    return "\n".join([f"the schedule deadlocks: {', '.join(stuck)}", *rows])


def _row(actions: Iterable[Action]) -> str:
    return " ".join(map(str, actions)) or "nothing"
