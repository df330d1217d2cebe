"""Defines the actions of a pipeline, which actions an action needs, and actions as numbers.

    Action("F", stage, micro_batch)     one pass of one micro-batch through one stage
    orders.numbered("1f1b", 4, 8)       a schedule for fast loops over its actions

The kinds of actions are F (forward), B (backward) and W (gradients of weights, if B leaves them
out).

A schedule that the pipeline executes has lists of `Action` (schedule.py). In a schedule that is
only simulated, a `Numbered`, an action is an integer: with S stages and M micro-batches it is
(k * M + micro_batch) * S + stage, where k is the place of its kind in `Numbered.kinds`. With kinds
"FB", 2 stages and 3 micro-batches, F0 is 0 on stage 0 and 1 on stage 1, F1 is 2 and 3, F2 is 4 and
5, and B0 is 6 and 7.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

# The seconds of an action, by its kind and stage: all micro-batches take the same time.
Seconds = Mapping[tuple[str, int], float]
# F sends its result to the next stage and B to the stage before: by kind, the step from a stage to
# the receiving stage. No other kind of action sends its result to a single stage.
STEPS = {"F": 1, "B": -1}
# A stage's B needs the F of the same stage and micro-batch, and its W needs the B.
OWN_INPUT = {"B": "F", "W": "B"}


class Action(NamedTuple):
    """One pass of one micro-batch through one stage.

    kind: F (forward pass), B (backward pass; without the gradients of weights if the schedule has
    W), W (gradients of weights). The text of an action leaves out the stage: `F3`.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


NOTHING = -1  # the entry in `Numbered.awaited` of an action that waits for no other rank


class PipelineGraph:
    """The stages of a pipeline, and what each action waits for.

    It is the part that `Schedule` and `Numbered` have in common. `rank_of[s]` is the rank that
    holds stage s.
    """

    rank_of: tuple[int, ...]

    @property
    def stages(self) -> int:
        """The number of stages of the whole pipeline, over all ranks."""
        return len(self.rank_of)

    def stages_on(self, rank: int) -> list[int]:
        """Return the stages that a rank holds, in the model's order: rank 0 of 2, in a V: 0, 3."""
        return [stage for stage, holder in enumerate(self.rank_of) if holder == rank]

    def has(self, kind: str) -> bool:
        """Return whether the schedule has actions of a kind; then every rank does such actions.

        `Schedule` and `Numbered`, which know the kinds, define this method.
        """
        raise NotImplementedError

    @property
    def split(self) -> bool:
        """Whether backward passes are split into B (gradient of the input) and W (of weights).

        Without W, a B computes all gradients.
        """
        return self.has("W")

    # ---- What an action waits for -------------------------------------------------------------

    def input_of(self, action: Action) -> Action | None:
        """Return the action of a neighbouring stage whose result an F or a B needs.

        An F needs the F of the stage before, a B needs the B of the next stage. The result is None
        for F on the first stage, B on the last stage, and all other kinds.
        """
        kind, stage, micro_batch = action
        step = STEPS.get(kind, 0)  # 1 for F, -1 for B, 0 for a kind that no neighbour sends to
        sending_stage = stage - step
        if step and 0 <= sending_stage < self.stages:
            return Action(kind, sending_stage, micro_batch)
        return None

    def sender_of(self, action: Action) -> Action | None:
        """Return the action of another rank whose result is sent to an action's rank as a message.

        Return None if the result that the action needs is made on its own rank. Called to simulate
        messages, and to find when a rank may start them.
        """
        sender = self.input_of(action)
        if sender is None or self.rank_of[sender.stage] == self.rank_of[action.stage]:
            return None
        return sender


@dataclass(frozen=True)
class Numbered(PipelineGraph):
    """A schedule whose actions are numbers, for loops over many actions, as in a simulation.

    All actions are numbered by kind (in the order of `kinds`, a part of FBW), then by
    micro-batch, then by stage: see the example at the beginning of this file. ranks: for each rank,
    the numbers of its actions in the order in which it does them.
    """

    name: str
    kinds: str
    rank_of: tuple[int, ...]
    micro_batches: int
    ranks: list[list[int]]

    def has(self, kind: str) -> bool:
        """Return whether the schedule has actions of a kind; then every rank does such actions."""
        return kind in self.kinds

    @property
    def actions_per_kind(self) -> int:
        """The number of actions of one kind, one for each stage and micro-batch.

        The numbers of a kind's actions begin at this number times the kind's place in `kinds`.
        """
        return self.micro_batches * self.stages

    def action(self, number: int) -> Action:
        """Return the action that a number stands for.

        Numbers go by kind, then by micro-batch, then by stage: the stages of micro-batch 0 come
        first, and `actions_per_kind` is the number of actions of a kind.
        """
        kind, number_in_kind = divmod(number, self.actions_per_kind)  # kind: an index in `kinds`
        micro_batch, stage = divmod(number_in_kind, self.stages)
        return Action(self.kinds[kind], stage, micro_batch)

    def by_kind(self, values: Sequence[float]) -> dict[str, np.ndarray]:
        """Return a value for each action, in the order of their numbers, as arrays by kind.

        The shape of an array is (micro-batches, stages). Called with the times of a simulation.
        """
        shape = len(self.kinds), self.micro_batches, self.stages
        return dict(zip(self.kinds, np.reshape(values, shape)))

    @cached_property
    def awaited(self) -> list[int]:
        """For each action, by its number: the number of the other rank's action that it waits for.

        The entry is NOTHING for an action that waits for no other rank. `simulation.ends` reads the
        list. In the example at the beginning of this file, with 2 ranks, it is -1 0 -1 2 -1 4 for
        F, and 7 -1 9 -1 11 -1 for B.
        """
        # For each kind, the number of its first action: micro-batch 0 on stage 0.
        first = {kind: place * self.actions_per_kind for place, kind in enumerate(self.kinds)}
        awaited: list[int] = []
        for kind in self.kinds:
            sources = []  # the entries of micro-batch 0: a number for each stage
            for stage in range(self.stages):
                sender = self.sender_of(Action(kind, stage, 0))
                if sender is None:
                    sources.append(NOTHING)
                else:
                    sources.append(first[sender.kind] + sender.stage)
            # An action waits for an action of the same micro-batch, so from each micro-batch to the
            # next all entries but NOTHING grow by the number of stages.
            offsets = self.stages * np.arange(self.micro_batches)[:, None]
            numbers = np.array(sources) + offsets  # the kind's entries: (micro-batches, stages)
            numbers[:, np.equal(sources, NOTHING)] = NOTHING
            awaited += numbers.ravel().tolist()
        return awaited

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Return the largest size of activations that each rank holds at once.

        A rank holds a micro-batch's activations in a stage from F to W, or to B if there is no W.
        sizes: for each stage, the size of one micro-batch's activations, in any unit.
        """
        size_of = np.array(sizes)
        changes = (signs * size_of[stages] for signs, stages in self._held)
        # The running sum is what the rank holds after each action.
        return tuple(np.cumsum(change).max().item() for change in changes)

    @cached_property
    def _held(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each rank, what its actions change of what it holds, and the actions' stages.

        F, which is kind 0, adds the stage's size (1), the last kind of a stage subtracts it (-1),
        and the other kinds change nothing (0).
        """
        releasing_kind = self.kinds.find("W" if self.split else "B")
        found = []
        for numbers in self.ranks:
            kinds, numbers_in_kind = np.divmod(numbers, self.actions_per_kind)
            signs = 1 * (kinds == 0) - (kinds == releasing_kind)
            found.append((signs, numbers_in_kind % self.stages))
        return found
