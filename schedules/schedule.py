"""Pipeline schedules as data: what each rank of a pipeline does, in which order.

A schedule is one list of actions per pipeline rank. `F3` is the forward pass of micro-batch 3
through a stage, `B3` its backward pass; if the backward pass is split, `B3` computes the gradient
of the stage's input and `W3` the gradients of its weights. A rank holds one stage or several
(virtual stages, arXiv 2104.04473 section 2.2). The pipeline executes exactly these lists.

    1F1B, 3 stages, 4 micro-batches (a backward takes twice as long as a forward):

    stage 0  F0 F1 F2 .. .. .. .. B0 == F3 B1 == .. B2 == .. B3 ==
    stage 1  .. F0 F1 .. .. B0 == F2 B1 == F3 B2 == .. B3 == .. ..
    stage 2  .. .. F0 B0 == F1 B1 == F2 B2 == F3 B3 == .. .. .. ..

actions.py defines actions, orders.py makes schedules, simulation.py computes when each action runs.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, pairwise, product
from typing import NamedTuple

from schedules.actions import OWN_INPUT, STEPS, SUMMED, VOCABULARY, Action, Numbered, Pipeline


class ScheduleError(Exception):
    """A schedule that cannot run; the message says which rank waits for what."""


# One entry of `Schedule.steps`: a rank, its action, and the indices in `Schedule.steps` of the
# actions of other ranks whose messages this action needs.
Step = tuple[int, Action, list[int]]
# The index of each action in `Schedule.steps`: by (kind, stage), then by micro-batch.
Places = dict[tuple[str, int], dict[int, int]]


@dataclass(frozen=True)
class Schedule(Pipeline):
    """The actions of every pipeline rank, in order. `rank_of[s]` is the rank that holds stage s."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]

    @cached_property
    def kinds(self) -> str:
        """The kinds of actions in this schedule, the same on every rank, in the order FBWESTG."""
        found = {action.kind for action in self.ranks[0]}
        return "".join(kind for kind in "FBW" + VOCABULARY if kind in found)

    def has(self, kind: str) -> bool:
        """Whether every rank does actions of a kind."""
        return kind in self.kinds

    # ---- When messages are started ------------------------------------------------------------

    def may_be_ahead(self, action: Action) -> bool:
        """Return whether an action's receive starts before its rank's preceding action runs.

        It does not if the message can only be sent after that preceding action: the message cannot
        arrive earlier. On a GPU a receive runs until its message has arrived, and a kernel that
        the preceding action loads for the first time waits until the GPU is idle: a deadlock.
        """
        return action not in self._starts(self.rank_of[action.stage]).needed

    def sent_before(self, action: Action) -> int:
        """Return the index in its rank's actions before which an action's result is sent.

        It is the next index, or a later one if the receiver takes the message only after further
        actions of this rank: at most the number of actions. On a GPU a send runs until the receive
        has begun, and a kernel loaded in one of these actions waits until the GPU is idle.
        """
        return self._starts(self.rank_of[action.stage]).sent_before[action]

    def _starts(self, rank: int) -> "_Starts":
        if rank not in self._starts_of:
            self._starts_of[rank] = _message_starts(self, rank)
        return self._starts_of[rank]

    @cached_property
    def _starts_of(self) -> "dict[int, _Starts]":
        """By rank, the result of `_message_starts`; filled when a rank is first asked for."""
        return {}

    @cached_property
    def gradients_taken(self) -> list[range]:
        """For the T of each micro-batch, the micro-batches whose G every rank has done before the S
        of the same micro-batch, but not before the S of the micro-batch before.
        """
        done = []  # per rank: the number of G before each S
        for row in self.ranks:
            counts = accumulate(action.kind == "G" for action in row)
            done.append([count for count, action in zip(counts, row) if action.kind == "S"])
        return [range(*pair) for pair in pairwise([0, *map(min, zip(*done))])]

    # ---- What is held -------------------------------------------------------------------------

    @cached_property
    def numbered(self) -> Numbered:
        """The actions as integers, for fast loops over all actions."""
        count = 1 + max(action.micro_batch for action in self.ranks[0])
        first = {kind: place * count for place, kind in enumerate(self.kinds)}
        ranks = []
        for row in self.ranks:
            ranks.append([(first[kind] + m) * self.stages + stage for kind, stage, m in row])
        return Numbered(self.name, self.kinds, self.rank_of, count, ranks)

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """For each rank, the largest number of activations that it holds at once.

        One activation is what one micro-batch leaves in one stage. It is held from the forward
        pass to the last action that needs it: W if the backward pass is split, else B.
        """
        return tuple(map(int, self.most_held([1] * self.stages)))

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Return the most each rank holds at once, if a micro-batch takes `sizes[s]` in stage s."""
        return self.numbered.most_held(sizes)

    # ---- An order in which all of it can run --------------------------------------------------

    @cached_property
    def order(self) -> list[tuple[int, Action]]:
        """All actions as (rank, action), each one after all the actions that it needs. Raise
        ScheduleError, which names the action where each rank is stuck, if there is no such order.
        """
        return [(rank, action) for rank, action, _ in self.steps]

    @cached_property
    def steps(self) -> list[Step]:
        """The entries of `order`, each with the indices of the actions whose messages it needs."""
        return _steps(self)


class _Starts(NamedTuple):
    """When a rank starts its messages. needed: actions whose receive is not started before the
    preceding action; sent_before: see `Schedule.sent_before`.
    """

    needed: set[Action]
    sent_before: dict[Action, int]


def _message_starts(schedule: Schedule, rank: int) -> _Starts:
    """Return when a rank starts its messages; found in one pass over `Schedule.order`."""
    needed = set[Action]()
    sent_before = defaultdict[Action, int](int)
    # For each action of any rank: how many of `rank`'s actions must be done when the action ends.
    count_of = dict[Action, int]()
    last_of = [0] * len(schedule.ranks)
    for doer, action in schedule.order:
        sender = schedule.sender_of(action)
        count = last_of[doer]
        if doer == rank:
            # The message can be sent only after all earlier actions of this rank.
            if sender and count_of[sender] == count:
                needed.add(action)
            count += 1
            sent_before[action] = max(sent_before[action], count)
        else:
            if sender and schedule.rank_of[sender.stage] == rank:
                sent_before[sender] = max(sent_before[sender], count)
            for before in (schedule.input_of(action), *schedule.of_all_ranks(action)):
                if before is not None:
                    count = max(count, count_of[before])
            if action.kind in SUMMED:
                part = action._replace(stage=rank)
                sent_before[part] = max(sent_before[part], count)
        count_of[action] = last_of[doer] = count
    return _Starts(needed, dict(sent_before))


# ---- Checking ------------------------------------------------------------------------------------


def check(schedule: Schedule, micro_batches: int, backward: bool) -> None:
    """Raise ScheduleError unless every rank does every action once, in an order that can run.

    Point-to-point messages carry no label: a rank must receive another rank's messages in the order
    in which they are sent, activations and gradients each on a channel of their own.
    """
    kinds = "F"
    if backward:
        kinds = "FBW" if schedule.split else "FB"
    if schedule.vocabulary:
        kinds += VOCABULARY if backward else SUMMED
    for rank, row in enumerate(schedule.ranks):
        wanted = set(product(kinds, schedule.stages_on(rank), range(micro_batches)))
        if len(row) != len(wanted) or set(row) != wanted:
            each = sorted(Action(*one) for one in wanted)
            raise ScheduleError(f"rank {rank} does {_row(row)}, not each of {_row(each)} once")
        if schedule.vocabulary:
            _check_collectives(rank, row)
    _check_messages(schedule)
    _steps(schedule)


def _check_collectives(rank: int, row: Sequence[Action]) -> None:
    """Raise ScheduleError unless a rank does the passes of each kind in the order of micro-batches.

    Then all ranks enter the collectives of the vocabulary passes in the same order.
    """
    for kind in dict.fromkeys(action.kind for action in row):
        of_kind = [action for action in row if action.kind == kind]
        if of_kind != sorted(of_kind):
            raise ScheduleError(
                f"rank {rank} does {_row(of_kind)}, not in the order of micro-batches"
            )


def _check_messages(schedule: Schedule) -> None:
    """Raise ScheduleError if a rank receives messages in another order than they are sent in."""
    sent = defaultdict(list)
    received = defaultdict(list)
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            kind = action.kind
            taken = schedule.input_of(action)
            if taken is not None:
                received[kind, schedule.rank_of[taken.stage], rank].append(taken)
            after = action.stage + STEPS.get(kind, 0)
            if after != action.stage and 0 <= after < schedule.stages:
                sent[kind, rank, schedule.rank_of[after]].append(action)
    for channel, sending in sent.items():
        kind, source, to = channel
        if source != to and received[channel] != sending:
            raise ScheduleError(
                f"ranks {source} and {to} disagree on the order of {kind}: {_row(sending)} are "
                f"sent and {_row(received[channel])} received"
            )


def _steps(schedule: Schedule) -> list[Step]:
    """Return `Schedule.steps`: each rank in turn runs until its next action needs one not run."""
    ranks = schedule.ranks
    kinds = "FBW" + VOCABULARY
    place: Places = {each: {} for each in product(kinds, range(schedule.stages))}
    inputs = {each: _inputs(schedule, *each, place) for each in place}
    steps: list[Step] = []
    next_of = [0] * len(ranks)
    count = sum(map(len, ranks))
    while len(steps) < count:
        before = len(steps)
        for rank, row in enumerate(ranks):
            for action in islice(row, next_of[rank], None):
                kind, stage, micro_batch = action
                own, sent = inputs[kind, stage]
                before_it = [done.get(micro_batch, -1) for done in own]
                sources = [done.get(micro_batch, -1) for done in sent]
                if -1 in sources or -1 in before_it:
                    break
                place[kind, stage][micro_batch] = len(steps)
                steps.append((rank, action, sources))
                next_of[rank] += 1
        if len(steps) == before:
            raise ScheduleError(_deadlock(schedule, next_of))
    return steps


def _inputs(
    schedule: Schedule, kind: str, stage: int, place: Places
) -> tuple[list[dict[int, int]], list[dict[int, int]]]:
    """Return the dictionaries of `place` (index by micro-batch) for the passes that a pass needs:
    the passes of the same rank, then the passes of other ranks.
    """
    own: list[dict[int, int]] = []
    sent: list[dict[int, int]] = []
    if kind in OWN_INPUT:
        own.append(place[OWN_INPUT[kind], stage])
    neighbour = schedule.input_of(Action(kind, stage, 0))
    if neighbour is not None:
        is_near = schedule.rank_of[neighbour.stage] == schedule.rank_of[stage]
        (own if is_near else sent).append(place[kind, neighbour.stage])
    for part in schedule.joined.get((kind, stage), ()):
        (own if part[1] == stage else sent).append(place[part])
    return own, sent


def _deadlock(schedule: Schedule, next_of: Sequence[int]) -> str:
    """Return the error message: where ranks are stuck, then every rank's actions, done | to do."""
    stuck = []
    rows = []
    for rank, (row, at) in enumerate(zip(schedule.ranks, next_of, strict=True)):
        if at < len(row):
            stuck.append(f"rank {rank} waits at {row[at]} of stage {row[at].stage}")
        rows.append(f"rank {rank}  {_row(row[:at])} | {_row(row[at:])}")
    return "\n".join([f"the schedule deadlocks: {', '.join(stuck)}", *rows])


def _row(actions: Iterable[Action]) -> str:
    return " ".join(map(str, actions)) or "nothing"
