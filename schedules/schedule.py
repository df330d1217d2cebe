"""Pipeline schedules as data: what each rank of a pipeline does, in which order.

A schedule is one list of actions per pipeline rank. `F3` is the forward pass of micro-batch 3
through a stage, `B3` its backward pass; where the backward is split, `B3` computes gradients for
the stage's input and `W3` those of its weights. A rank holds one stage or several (virtual stages,
arXiv 2104.04473 section 2.2). The pipeline executes exactly these lists.

    1F1B, 3 stages, 4 micro-batches (a backward takes twice as long as a forward):

    stage 0  F0 F1 F2 .. .. .. .. B0 == F3 B1 == .. B2 == .. B3 ==
    stage 1  .. F0 F1 .. .. B0 == F2 B1 == F3 B2 == .. B3 == .. ..
    stage 2  .. .. F0 B0 == F1 B1 == F2 B2 == F3 B3 == .. .. .. ..

GPipe: arXiv 1811.06965. 1F1B: arXiv 1806.03377, 2104.04473.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from typing import NamedTuple

# A new schedule: a function of rank, ranks and micro-batches, named here and in Layout.schedule.
NAMES = ("gpipe", "1f1b", "forward")
# From an action's stage to the one that takes its result; of W nothing is sent.
STEPS = {"F": 1, "B": -1, "W": 0}


class ScheduleError(Exception):
    """A schedule that cannot run; the message says which rank waits for what."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage.

    kind: F (forward), B (backward; for inputs only where W exists), W (gradients of weights).
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
        step = STEPS[action.kind]
        inside = step and 0 <= action.stage - step < self.stages
        return action._replace(stage=action.stage - step) if inside else None

    @cached_property
    def split(self) -> bool:
        """Whether B computes gradients of inputs only, and W those of weights."""
        return any(action.kind == "W" for actions in self.ranks for action in actions)

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """For each rank, the most activations (of one micro-batch in one stage) held at once.

        An activation is held from its forward to the last action that needs it.
        """
        last = "W" if self.split else "B"
        rows = ([(a.kind == "F") - (a.kind == last) for a in actions] for actions in self.ranks)
        return tuple(max(accumulate(row, initial=0)) for row in rows)


def build(name: str, ranks: int, micro_batches: int) -> Schedule:
    """The validated schedule `gpipe`, `1f1b` or `forward` (evaluation) for any two counts >= 1.

    Raises ScheduleError if the result could not run; `name` is checked by config.
    """
    order = {"gpipe": _gpipe, "1f1b": _one_f_one_b, "forward": _forward_only}[name]
    actions = tuple(tuple(order(rank, ranks, micro_batches)) for rank in range(ranks))
    schedule = Schedule(name, actions, tuple(range(ranks)))
    check(schedule, micro_batches, backward=name != "forward")
    return schedule


def _gpipe(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    forwards = _forward_only(rank, ranks, micro_batches)
    return forwards + [Action("B", rank, m) for m in range(micro_batches)]


def _one_f_one_b(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """The last stage alternates at once; each earlier one runs one more forward ahead of it."""
    ahead = min(ranks - rank - 1, micro_batches)
    actions = [Action("F", rank, m) for m in range(ahead)]
    for m in range(ahead, micro_batches):
        actions += [Action("F", rank, m), Action("B", rank, m - ahead)]
    return actions + [Action("B", rank, m) for m in range(micro_batches - ahead, micro_batches)]


def _forward_only(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    return [Action("F", rank, m) for m in range(micro_batches)]


# ---- Checking ------------------------------------------------------------------------------------


def check(schedule: Schedule, micro_batches: int, backward: bool) -> None:
    """Raise ScheduleError unless every rank does every action once, in an order that can run.

    Point-to-point messages carry no label: what a rank sends to another must be received in that
    order, for activations and for gradients.
    """
    kinds = ("FBW" if schedule.split else "FB") if backward else "F"
    for rank, actions in enumerate(schedule.ranks):
        wanted = set(product(kinds, schedule.stages_on(rank), range(micro_batches)))
        if len(actions) != len(wanted) or set(actions) != wanted:
            each = sorted(Action(*one) for one in wanted)
            raise ScheduleError(f"rank {rank} does {_row(actions)}, not each of {_row(each)} once")
    _check_messages(schedule)
    dependency_order(schedule)


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


def dependency_order(schedule: Schedule) -> list[tuple[int, Action]]:
    """(rank, action) of the whole pipeline such that everything an action needs comes before it.

    Raises ScheduleError that names what each stuck rank waits at, if there is no such order.
    """
    order: list[tuple[int, Action]] = []
    done: set[tuple[str, int, int]] = set()
    waiting = [deque(actions) for actions in schedule.ranks]
    while any(waiting):
        before = len(order)
        for rank, queue in enumerate(waiting):
            while queue and _can_run(*queue[0], schedule.stages, done):
                done.add(queue[0])
                order.append((rank, queue.popleft()))
        if len(order) == before:
            raise ScheduleError(_deadlock(schedule, waiting))
    return order


def _deadlock(schedule: Schedule, waiting: list[deque[Action]]) -> str:
    """Which ranks wait at what, and every rank's actions, done | to do."""
    stuck, rows = [], []
    for rank, (actions, queue) in enumerate(zip(schedule.ranks, waiting, strict=True)):
        if queue:
            stuck.append(f"rank {rank} waits at {queue[0]} of stage {queue[0].stage}")
        done = actions[: len(actions) - len(queue)]
        rows.append(f"rank {rank}  {_row(done)} | {_row(queue)}")
    return "\n".join([f"the schedule deadlocks: {', '.join(stuck)}", *rows])


def _can_run(kind: str, stage: int, m: int, stages: int, done: set) -> bool:
    if kind == "F":
        return stage == 0 or ("F", stage - 1, m) in done
    if kind == "B":
        return ("F", stage, m) in done and (stage == stages - 1 or ("B", stage + 1, m) in done)
    return ("B", stage, m) in done


def _row(actions: Iterable[Action]) -> str:
    return " ".join(map(str, actions)) or "nothing"
