"""Pipeline schedules as data: what each stage does, in which order.

A schedule is one list of actions per stage. `F3` is the forward pass of micro-batch 3, `B3` its
backward pass. The lists are checked and can be drawn before anything runs, and the pipeline
executes exactly these lists; the planner prices the same object.

    1F1B, 3 stages, 4 micro-batches (a backward takes twice as long as a forward):

    stage 0  F0 F1 F2 .. .. .. .. B0 == F3 B1 == .. B2 == .. B3 ==
    stage 1  .. F0 F1 .. .. B0 == F2 B1 == F3 B2 == .. B3 == .. ..
    stage 2  .. .. F0 B0 == F1 B1 == F2 B2 == F3 B3 == .. .. .. ..

GPipe: arXiv 1811.06965. 1F1B: arXiv 1806.03377, 2104.04473.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class ScheduleError(Exception):
    """A schedule that cannot run; the message says which stage waits for what."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage: kind F (forward) or B (backward)."""

    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


class Slot(NamedTuple):
    """An action and when it runs, in the unit of the cost function that was simulated."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """The actions of every stage, in order. `peak[s]`: activations held at once on stage s."""

    name: str
    stages: tuple[tuple[Action, ...], ...]
    peak: tuple[int, ...]


def build(name: str, stages: int, micro_batches: int) -> Schedule:
    """The validated schedule `gpipe`, `1f1b` or `forward` (evaluation) for any two counts >= 1.

    Raises ScheduleError if the result could not run; `name` is checked by config.
    """
    order = {"gpipe": _gpipe, "1f1b": _one_f_one_b, "forward": _forward_only}[name]
    actions = tuple(tuple(order(s, stages, micro_batches)) for s in range(stages))
    check(actions, micro_batches, backward=name != "forward")
    return Schedule(name, actions, tuple(_peak(stage) for stage in actions))


def _gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    forwards = [Action("F", m) for m in range(micro_batches)]
    return forwards + [Action("B", m) for m in range(micro_batches)]


def _one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """The last stage alternates at once; each earlier one runs one more forward ahead of it."""
    ahead = min(stages - stage - 1, micro_batches)
    actions = [Action("F", m) for m in range(ahead)]
    for m in range(ahead, micro_batches):
        actions += [Action("F", m), Action("B", m - ahead)]
    return actions + [Action("B", m) for m in range(micro_batches - ahead, micro_batches)]


def _forward_only(stage: int, stages: int, micro_batches: int) -> list[Action]:
    return [Action("F", m) for m in range(micro_batches)]


def _peak(actions: tuple[Action, ...]) -> int:
    """Most micro-batches whose forward has run and whose backward has not."""
    held = peak = 0
    for action in actions:
        held += 1 if action.kind == "F" else -1
        peak = max(peak, held)
    return peak


# ------------------------------------------------------------------------------------------------
# Checking and timing
# ------------------------------------------------------------------------------------------------


def check(stages: tuple[tuple[Action, ...], ...], micro_batches: int, backward: bool) -> None:
    """Raise ScheduleError unless every stage does every action once, in an order that can run.

    Point-to-point messages carry no label: what a stage sends must be received in that order,
    so neighbours must also agree on the order of their forwards and of their backwards.
    """
    kinds = "FB" if backward else "F"
    wanted = sorted(Action(kind, m) for kind in kinds for m in range(micro_batches))
    for s, actions in enumerate(stages):
        if sorted(actions) != wanted:
            raise ScheduleError(f"stage {s} does {_row(actions)}, not each of {_row(wanted)} once")
    for s in range(len(stages) - 1):
        for kind in kinds:
            here = [a.micro_batch for a in stages[s] if a.kind == kind]
            there = [a.micro_batch for a in stages[s + 1] if a.kind == kind]
            if here != there:
                raise ScheduleError(
                    f"stages {s} and {s + 1} disagree on the order of {kind}: {here} and {there}"
                )
    simulate(stages)


def one_and_two(stage: int, action: Action) -> float:
    """The usual unit of schedules: a forward takes one, a backward two."""
    return 1.0 if action.kind == "F" else 2.0


def simulate(
    stages: tuple[tuple[Action, ...], ...],
    seconds: Callable[[int, Action], float] = one_and_two,
    transfer: float = 0.0,
) -> list[list[Slot]]:
    """When each action runs, if every stage starts its next action as soon as its input is there.

    `seconds(stage, action)` is an action's duration and `transfer` the time of one message
    between neighbours. Raises ScheduleError with the grid so far if some stage waits for ever.
    """
    slots: list[list[Slot]] = [[] for _ in stages]
    finished: dict[tuple[int, Action], float] = {}
    total = sum(len(actions) for actions in stages)
    while len(finished) < total:
        before = len(finished)
        for s, actions in enumerate(stages):
            while len(slots[s]) < len(actions):
                action = actions[len(slots[s])]
                ready = _ready(s, action, len(stages), finished, transfer)
                if ready is None:
                    break
                start = max(ready, slots[s][-1].end if slots[s] else 0.0)
                slots[s].append(Slot(action, start, start + seconds(s, action)))
                finished[s, action] = slots[s][-1].end
        if len(finished) == before:
            raise ScheduleError(_deadlock(stages, slots))
    return slots


def _ready(stage, action, stages, finished, transfer) -> float | None:
    """When the inputs of an action are there; None while one has not been computed."""
    kind, m = action
    needs = []
    if kind == "F" and stage > 0:
        needs.append(((stage - 1, action), transfer))
    if kind == "B":
        needs.append(((stage, Action("F", m)), 0.0))
        if stage < stages - 1:
            needs.append(((stage + 1, action), transfer))
    if any(key not in finished for key, _ in needs):
        return None
    return max((finished[key] + delay for key, delay in needs), default=0.0)


def _deadlock(stages, slots) -> str:
    waiting = [
        f"stage {s} waits at {actions[len(slots[s])]}"
        for s, actions in enumerate(stages)
        if len(slots[s]) < len(actions)
    ]
    return f"the schedule deadlocks: {', '.join(waiting)}\n{draw(slots)}"


# ------------------------------------------------------------------------------------------------
# Drawing
# ------------------------------------------------------------------------------------------------


def draw(slots: list[list[Slot]], columns: int = 48) -> str:
    """A stage x time grid of simulated slots: `F0` starts, `==` goes on, `..` idle.

    At most `columns` units of time are drawn; a longer schedule ends in `...`.
    """
    end = max((slot.end for row in slots for slot in row), default=0)
    width = max((len(str(slot.action)) for row in slots for slot in row), default=2)
    lines = []
    for s, row in enumerate(slots):
        cells = ["." * width] * min(int(end), columns)
        for slot in row:
            for t in range(int(slot.start), min(int(slot.end), columns)):
                cells[t] = str(slot.action).ljust(width) if t == int(slot.start) else "=" * width
        lines.append(f"stage {s:<3}" + " ".join(cells) + (" ..." if end > columns else ""))
    return "\n".join(lines)


def bubble(slots: list[list[Slot]]) -> float:
    """Share of all stages' time in which nothing runs, between the first start and the last end."""
    end = max(slot.end for row in slots for slot in row)
    busy = sum(slot.end - slot.start for row in slots for slot in row)
    return 1.0 - busy / (end * len(slots))


def _row(actions) -> str:
    return " ".join(map(str, actions))
