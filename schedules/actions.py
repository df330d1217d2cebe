"""Defines the actions of a pipeline, which actions an action needs, and actions as numbers.

    Action("F", stage, micro_batch)     one pass of one micro-batch through one stage
    orders.numbered("1f1b", 4, 8)       a schedule for fast loops over its actions

The kinds of actions are F (forward), B (backward), W (gradients of weights, if they are not a part
of B) and, with --vocab-pp, E, S, T and G (schedules/vocabulary.py). A schedule that is only
simulated is never a list of `Action`: its actions are integers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

# By kind, the offset from a stage to the stage that receives its result. The other kinds of actions
# do not send their results to a single stage.
STEPS = {"F": 1, "B": -1}
OWN_INPUT = {"B": "F", "W": "B"}  # by kind, the kind of the same stage's pass that must come before
# The passes that every rank does for its shard of the vocabulary (schedules/vocabulary.py).
VOCABULARY = "ESTG"
SUMMED = "EST"  # vocabulary passes whose results are combined over all ranks


class Action(NamedTuple):
    """One pass of one micro-batch through one stage.

    kind: F (forward pass), B (backward pass; without the gradients of weights if the schedule has
    W), W (gradients of weights); E, S, T and G are the passes of the stage's rank for its shard of
    the vocabulary (schedules/vocabulary.py).
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


NOTHING = -1  # the entry in `Numbered.awaited` of an action that needs no message


class Pipeline:
    """The stages of a pipeline, and what each action waits for.

    `rank_of[s]` is the rank that holds stage s.
    """

    rank_of: tuple[int, ...]

    @property
    def stages(self) -> int:
        """The number of stages of the whole pipeline, over all ranks."""
        return len(self.rank_of)

    def stages_on(self, rank: int) -> list[int]:
        """Return the stages that a rank holds, in the model's order."""
        return [stage for stage, holder in enumerate(self.rank_of) if holder == rank]

    def has(self, kind: str) -> bool:
        """Whether every rank does actions of a kind."""
        raise NotImplementedError

    @property
    def split(self) -> bool:
        """Whether backward passes are split into B (gradient of the input) and W (of weights)."""
        return self.has("W")

    @property
    def vocabulary(self) -> bool:
        """Whether all ranks share embedding and output matrix, as with --vocab-pp (passes E)."""
        return self.has("E")

    # ---- What an action waits for -------------------------------------------------------------

    def input_of(self, action: Action) -> Action | None:
        """Return the action of a neighbouring stage whose result an F or a B needs.

        It is None for F on the first stage, B on the last stage, and all other kinds.
        """
        kind, stage, micro_batch = action
        step = STEPS.get(kind, 0)
        sending_stage = stage - step
        if step and 0 <= sending_stage < self.stages:
            return Action(kind, sending_stage, micro_batch)
        return None

    def of_all_ranks(self, action: Action) -> list[Action]:
        """Return the actions that an action needs and that `input_of` does not give: vocabulary
        passes of all ranks or, for S and G, the F or B whose result all ranks receive.
        """
        kind, stage, m = action
        return [Action(*part, m) for part in self.joined.get((kind, stage), ())]

    @cached_property
    def joined(self) -> dict[tuple[str, int], list[tuple[str, int]]]:
        """The table behind `of_all_ranks`: by (kind, stage) of an action, the (kind, stage) pairs
        of the actions that it needs, all of the same micro-batch.
        """
        if not self.vocabulary:
            return {}
        all_stages = range(self.stages)
        last = self.stages - 1
        passes = {kind: [(kind, stage) for stage in all_stages] for kind in SUMMED}
        needed = {("F", 0): passes["E"], ("B", last): passes["T"]}
        for stage in all_stages:
            needed["S", stage] = [("F", last)]
            needed["T", stage] = passes["S"]
            needed["G", stage] = [("B", 0)]
        return needed

    def sender_of(self, action: Action) -> Action | None:
        """Return the single action of another rank whose result an action receives, or None."""
        sender = self.input_of(action)
        if action.kind in "SG":
            sender = self.of_all_ranks(action)[0]
        if sender is None or self.rank_of[sender.stage] == self.rank_of[action.stage]:
            return None
        return sender


@dataclass(frozen=True)
class Numbered(Pipeline):
    """A schedule whose actions are numbers.

    All actions are numbered by kind (in the order of `kinds`, a part of FBWESTG), then by
    micro-batch, then by stage. ranks: for each rank, the numbers of its actions in order.
    """

    name: str
    kinds: str
    rank_of: tuple[int, ...]
    micro_batches: int
    ranks: list[list[int]]

    def has(self, kind: str) -> bool:
        """Whether every rank does actions of a kind."""
        return kind in self.kinds

    @property
    def of_kind(self) -> int:
        """The number of actions of one kind: micro-batches x stages."""
        return self.micro_batches * self.stages

    def action(self, number: int) -> Action:
        """Return the action that a number stands for."""
        kind, number_in_kind = divmod(number, self.of_kind)
        micro_batch, stage = divmod(number_in_kind, self.stages)
        return Action(self.kinds[kind], stage, micro_batch)

    @cached_property
    def awaited(self) -> list[int]:
        """For each action's number, the number of the action whose message it needs.

        It is NOTHING if the action needs no message. If it needs a pass of all other ranks, it is
        the number of this pass on stage 0, plus the count of all actions to mark this case.
        """
        first = {kind: place * self.of_kind for place, kind in enumerate(self.kinds)}
        all_actions = len(self.kinds) * self.of_kind
        awaited: list[int] = []
        for kind in self.kinds:
            sources = []  # for each stage, the awaited number of micro-batch 0
            for stage in range(self.stages):
                action = Action(kind, stage, 0)
                joined_passes = self.of_all_ranks(action)
                sender = self.sender_of(action)
                if len(joined_passes) > 1:
                    sources.append(all_actions + first[joined_passes[0].kind])
                elif sender is None:
                    sources.append(NOTHING)
                else:
                    sources.append(first[sender.kind] + sender.stage)
            offsets = self.stages * np.arange(self.micro_batches)[:, None]
            numbers = np.array(sources) + offsets  # (micro-batches, stages)
            numbers[:, np.equal(sources, NOTHING)] = NOTHING
            awaited += numbers.ravel().tolist()
        return awaited

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Return the largest size of activations that each rank holds at once.

        sizes: for each stage, the size of one micro-batch's activations, in any unit.
        """
        size_of = np.array(sizes)
        releasing_kind = self.kinds.find("W" if self.split else "B")
        most = []
        for numbers in self.ranks:
            kinds, numbers_in_kind = np.divmod(numbers, self.of_kind)
            signs = 1 * (kinds == 0) - (kinds == releasing_kind)
            held = np.cumsum(signs * size_of[numbers_in_kind % self.stages])
            most.append(held.max().item())
        return tuple(most)
