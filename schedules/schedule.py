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
from itertools import islice, product
from typing import NamedTuple

from schedules.actions import OWN_INPUT, STEPS, Action, Numbered, PipelineGraph


class ScheduleError(Exception):
    """Raised for a schedule that cannot run; the message says which rank waits for what."""


# One entry of `Schedule.steps`, which lists the actions of all ranks in an order that can run: a
# rank, its action, and the indices in the list of the actions whose results this action receives
# from other ranks.
Step = tuple[int, Action, list[int]]
# The index of each action in `Schedule.steps`: by (kind, stage), then by micro-batch.
Places = dict[tuple[str, int], dict[int, int]]


@dataclass(frozen=True)
class Schedule(PipelineGraph):
    """The actions of every pipeline rank, in order, which the pipeline executes.

    ranks: for each rank, its actions. `rank_of[s]` is the rank that holds stage s.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]

    @cached_property
    def kinds(self) -> str:
        """The kinds of actions in this schedule, the same on every rank, in the order FBW."""
        kinds = {action.kind for action in self.ranks[0]}
        return "".join(kind for kind in "FBW" if kind in kinds)

    def has(self, kind: str) -> bool:
        """Return whether the schedule has actions of a kind; then every rank does such actions."""
        return kind in self.kinds

    # ---- When messages are started ------------------------------------------------------------

    def may_be_ahead(self, action: Action) -> bool:
        """Return whether an action's receive may start before its rank's preceding action runs.

        The pipeline asks this before each action, to receive the next action's input meanwhile. On
        a GPU a receive runs until its message has arrived, and some calls of the host wait until
        nothing runs on the device: the first launch of a kernel, and the allocator's second try
        when memory is short. If two neighbours receive ahead in both directions, and each comes to
        such a call, then each waits for the action of the other. `_message_starts` says why these
        receives are safe.
        """
        return action in self._starts.ahead

    def sent_before(self, action: Action) -> int:
        """Return the index in its rank's list of actions before which an action's result is sent.

        It is the index of the next action, or a later index if the receiver starts its receive only
        after further actions of this rank. On a GPU a send runs until its receive has begun, so
        with an earlier send a call that waits for the device, in one of these further actions,
        would wait for ever. If no action follows the send, the index is the length of the list.
        """
        return self._starts.sent_before[action]

    def turn(self, action: Action) -> int | None:
        """Return the place of an action's message in the order of all messages of the schedule.

        A rank that starts several messages between two actions starts them in this order. None: no
        other rank takes the action's result.
        """
        return self._starts.turn.get(action)

    @cached_property
    def _starts(self) -> "_Starts":
        """When each rank starts its messages, for `may_be_ahead` and `sent_before`."""
        return _message_starts(self)

    # ---- What is held -------------------------------------------------------------------------

    @cached_property
    def numbered(self) -> Numbered:
        """The same schedule with actions as integers, for fast loops over all actions.

        Actions are numbered by kind, then by micro-batch, then by stage: with S stages and M
        micro-batches, micro-batch m of the k-th kind in `kinds` has (k * M + m) * S + stage.
        """
        micro_batches = 1 + max(action.micro_batch for action in self.ranks[0])
        # For each kind, k * M: the number of (kind, micro-batch) pairs of the kinds before it.
        first = {kind: place * micro_batches for place, kind in enumerate(self.kinds)}
        ranks = []
        for row in self.ranks:
            ranks.append([(first[kind] + m) * self.stages + stage for kind, stage, m in row])
        return Numbered(self.name, self.kinds, self.rank_of, micro_batches, ranks)

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """For each rank, the largest number of activations that it holds at once.

        The activations of one micro-batch in one stage count as 1. They are held from the forward
        pass to the last action that needs them: W if the backward pass is split, else B.
        """
        return tuple(map(int, self.most_held([1] * self.stages)))

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Return the largest size of activations that each rank holds at once.

        sizes: for each stage, the size of one micro-batch's activations, in any unit.
        """
        return self.numbered.most_held(sizes)

    # ---- An order in which all actions can run ------------------------------------------------

    @cached_property
    def order(self) -> list[tuple[int, Action]]:
        """All actions as (rank, action), each one after all the actions that it needs.

        Raise ScheduleError, which names the action where each rank is stuck, if the schedule has no
        order in which all actions can run.
        """
        return [(rank, action) for rank, action, _ in self.steps]

    @cached_property
    def steps(self) -> list[Step]:
        """The entries of `order`, each with the indices of the other ranks' actions that it needs.

        The simulation goes through this list: an action starts when these actions have ended, and
        their messages have arrived, and its rank is free.
        """
        return _steps(self)


class _Starts(NamedTuple):
    """When the ranks start their messages: the answers of `may_be_ahead`, `sent_before`, `turn`.

    ahead: the actions whose receive starts before their rank's preceding action. sent_before: for
    each action, the index in its rank's list before which its result is sent. turn: for each action
    that sends a message, the number of the message in the order of all messages.
    """

    ahead: set[Action]
    sent_before: dict[Action, int]
    turn: dict[Action, int]


def _message_starts(schedule: Schedule) -> _Starts:
    """Return when the ranks start their messages; no rank waits for ever by them.

    The actions of all ranks are put into one order in which they can run. Each message gets a place
    in this order, the first where its result is there and its receiver has only one action more to
    do before the one that takes it. Both ranks start the message at that place: the sender before
    its next action in the order, and the receiver too. If there is an action between, the receive
    is ahead of it.

    Then it does no harm if every rank waits until nothing runs on its device, in every action and
    before every message. By induction along the order: when all actions and messages before a place
    are done, the two ranks of the message at this place have nothing else to do before it, so that
    both start it, and it ends; and an action finds all messages ended that its rank has started.
    If two messages cross between neighbours, the second is never ahead: the receiver of the first
    is at its action by then.

    The order is that of time, if an action takes a unit (a backward pass two, unless it is split):
    messages that start as early as they can in this order do so in a run.
    """
    place = {action: i for row in schedule.ranks for i, action in enumerate(row)}
    receiver_of: dict[Action, Action] = {}  # by the action that sends, the action that receives
    for action in place:
        sender = schedule.sender_of(action)
        if sender is not None:
            receiver_of[sender] = action
    ahead = set[Action]()
    sent_before = {action: index + 1 for action, index in place.items()}
    turn: dict[Action, int] = {}
    done = [0] * len(schedule.ranks)  # for each rank, the number of its actions so far
    # The results that are there before their receiver is, by (the receiver's rank, the number of
    # actions that this rank has done when it is there).
    early = defaultdict[tuple[int, int], list[Action]](list)
    for doer, action in _in_time(schedule):
        done[doer] += 1
        starting = early.pop((doer, done[doer]), [])
        receiver = receiver_of.get(action)
        if receiver is not None:
            rank, index = schedule.rank_of[receiver.stage], place[receiver]
            if done[rank] < index - 1:
                early[rank, index - 1].append(action)
            else:
                starting.append(action)
        for sender in starting:
            receiver = receiver_of[sender]
            turn[sender] = len(turn)
            sent_before[sender] = done[schedule.rank_of[sender.stage]]
            if done[schedule.rank_of[receiver.stage]] < place[receiver]:
                ahead.add(receiver)
    return _Starts(ahead, sent_before, turn)


def _in_time(schedule: Schedule) -> list[tuple[int, Action]]:
    """Return the actions of all ranks as (rank, action) by the time at which they end.

    A backward pass that is not split takes two units of time, every other action one, and a message
    none. If actions end together, the one whose result the other's rank takes comes first, so that
    the message is ahead of the other: forward passes by ascending stages, then backward passes by
    descending stages.
    """
    backward = 1 if schedule.split else 2
    ends: list[int] = []  # in the order of `Schedule.steps`
    free = [0] * len(schedule.ranks)  # for each rank, the end of its last action so far
    for rank, action, sources in schedule.steps:
        start = max([free[rank], *(ends[source] for source in sources)])
        free[rank] = start + (backward if action.kind == "B" else 1)
        ends.append(free[rank])

    def by_time(index: int) -> tuple[int, bool, int]:
        """Return what the actions are sorted by."""
        _, (kind, stage, _), _ = schedule.steps[index]
        return ends[index], kind != "F", stage if kind == "F" else -stage

    return [schedule.steps[index][:2] for index in sorted(range(len(ends)), key=by_time)]


# ---- Checking ------------------------------------------------------------------------------------


def check(schedule: Schedule, micro_batches: int, backward: bool) -> None:
    """Raise ScheduleError unless every rank does every action once, in an order that can run.

    backward: whether the schedule has backward passes; an evaluation has none. Messages between two
    ranks carry no label: they must be received in the order in which they are sent. Activations and
    gradients are sent on separate channels. orders.py calls this for every schedule that it makes
    for the pipeline.
    """
    kinds = "F"
    if backward:
        kinds = "FBW" if schedule.split else "FB"
    for rank, row in enumerate(schedule.ranks):
        required = set(product(kinds, schedule.stages_on(rank), range(micro_batches)))
        if len(row) != len(required) or set(row) != required:
            expected = sorted(Action(*fields) for fields in required)
            raise ScheduleError(f"rank {rank} does {_row(row)}, not each of {_row(expected)} once")
    _check_messages(schedule)
    _steps(schedule)  # raises ScheduleError if the schedule deadlocks


def _check_messages(schedule: Schedule) -> None:
    """Raise ScheduleError if a rank receives messages in another order than they are sent in.

    Messages carry no label, so the receiver would take one micro-batch's numbers for another's.
    """
    # The actions whose results are sent, by channel: (kind, sending rank, receiving rank). `sent`
    # has them in the order of the sending rank, `received` in that of the receiving rank.
    sent = defaultdict(list)
    received = defaultdict(list)
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            kind = action.kind
            source_action = schedule.input_of(action)
            if source_action is not None:
                source = schedule.rank_of[source_action.stage]
                received[kind, source, rank].append(source_action)
            # F sends to the next stage, B to the stage before; STEPS has the kind's 1 or -1.
            # W sends nothing.
            next_stage = action.stage + STEPS.get(kind, 0)
            if next_stage != action.stage and 0 <= next_stage < schedule.stages:
                sent[kind, rank, schedule.rank_of[next_stage]].append(action)
    for channel, sending in sent.items():
        kind, source, to = channel
        if source != to and received[channel] != sending:
            raise ScheduleError(
                f"ranks {source} and {to} disagree on the order of {kind}: {_row(sending)} are "
                f"sent and {_row(received[channel])} received"
            )


def _steps(schedule: Schedule) -> list[Step]:
    """Return `Schedule.steps`; raise ScheduleError if the schedule deadlocks.

    Each rank in turn runs its actions until an action needs another action that has not run. If no
    rank can run an action in a round of all ranks, the schedule deadlocks.
    """
    ranks = schedule.ranks
    kinds = "FBW"
    # The index in `steps` of each action that has run: by (kind, stage), then by micro-batch. At
    # first nothing has run, so the dictionary of every kind and stage is empty.
    place: Places = {
        kind_and_stage: {} for kind_and_stage in product(kinds, range(schedule.stages))
    }
    # For each kind and stage, the dictionaries of the passes that such an action needs. They are
    # the dictionaries in `place` themselves, so they always show what has run.
    inputs = {kind_and_stage: _inputs(schedule, *kind_and_stage, place) for kind_and_stage in place}
    steps: list[Step] = []
    next_of = [0] * len(ranks)  # for each rank, the index of its next action
    count = sum(map(len, ranks))
    while len(steps) < count:
        before = len(steps)
        for rank, row in enumerate(ranks):
            for action in islice(row, next_of[rank], None):
                kind, stage, micro_batch = action
                local_places, remote_places = inputs[kind, stage]
                # The indices of the actions that this action needs, -1 for each that has not run.
                local = [places.get(micro_batch, -1) for places in local_places]
                sources = [places.get(micro_batch, -1) for places in remote_places]
                if -1 in sources or -1 in local:
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
    """Return the dictionaries in `place` of the passes that a stage's pass of a kind needs.

    The first list is for needed passes of the same rank, the second for passes of other ranks. A
    dictionary has an index in `Schedule.steps` by micro-batch, for micro-batches that have run.
    """
    local: list[dict[int, int]] = []
    remote: list[dict[int, int]] = []
    if kind in OWN_INPUT:
        local.append(place[OWN_INPUT[kind], stage])
    neighbour = schedule.input_of(Action(kind, stage, 0))
    if neighbour is not None:
        is_local = schedule.rank_of[neighbour.stage] == schedule.rank_of[stage]
        group = local if is_local else remote
        group.append(place[kind, neighbour.stage])
    return local, remote


def _deadlock(schedule: Schedule, next_of: Sequence[int]) -> str:
    """Return the error message of a deadlock: where ranks are stuck, and what each rank has done.

    Each rank has a line, `rank 0  F0 F1 | B0 B1`, with its actions that are done | to do. next_of:
    for each rank, the index of its next action.
    """
    stuck = []
    lines = []
    for rank, (row, done) in enumerate(zip(schedule.ranks, next_of, strict=True)):
        if done < len(row):
            stuck.append(f"rank {rank} waits at {row[done]} of stage {row[done].stage}")
        lines.append(f"rank {rank}  {_row(row[:done])} | {_row(row[done:])}")
    return "\n".join([f"the schedule deadlocks: {', '.join(stuck)}", *lines])


def _row(actions: Iterable[Action]) -> str:
    """Return actions as text for error messages: `F0 F1 B0`."""
    return " ".join(map(str, actions)) or "nothing"
