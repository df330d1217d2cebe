"""Actions of a pipeline: what each needs, and all of a schedule as numbers.

    Action("F", stage, micro_batch)     one pass of one micro-batch through one stage
    orders.numbered("1f1b", 4, 8)       a schedule for fast loops over its actions

A schedule that is only simulated is never a list of `Action`: its actions are integers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import NamedTuple

import numpy as np

# By kind: the offset to the stage that takes the result; other kinds send to no single stage.
STEPS = {"F": 1, "B": -1}
OWN_INPUT = {"B": "F", "W": "B"}  # by kind, the earlier pass of the same stage that it needs
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


NOTHING = -1  # stands in `Numbered.awaited` for "this action needs no message"


class Pipeline:
    """The stages of a pipeline. `rank_of[s]` is the rank that holds stage s."""

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
        """Whether all ranks share embedding and output matrix (--vocab-pp), each with one stage."""
        return self.has("E")

    # ---- What an action waits for -------------------------------------------------------------

    def input_of(self, action: Action) -> Action | None:
        """Return the neighbouring stage's action that an action needs; None at a pipeline end."""
        kind, stage, micro_batch = action
        step = STEPS.get(kind, 0)
        if step and 0 <= stage - step < self.stages:
            return Action(kind, stage - step, micro_batch)
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
        every = range(self.stages)
        last = self.stages - 1
        of_kind = {kind: [(kind, stage) for stage in every] for kind in SUMMED}
        found = {("F", 0): of_kind["E"], ("B", last): of_kind["T"]}
        for stage in every:
            found["S", stage] = [("F", last)]
            found["T", stage] = of_kind["S"]
            found["G", stage] = [("B", 0)]
        return found

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
    """The actions of a schedule as numbers: sorted by kind as in `kinds`, in the order FBWESTG,
    then by micro-batch, then by stage. ranks: for each rank, the numbers of its actions in order.
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
        """How many numbers the actions of one kind have."""
        return self.micro_batches * self.stages

    def action(self, number: int) -> Action:
        """Return the action of a number."""
        kind, rest = divmod(number, self.of_kind)
        micro_batch, stage = divmod(rest, self.stages)
        return Action(self.kinds[kind], stage, micro_batch)

    @cached_property
    def awaited(self) -> list[int]:
        """For each action, the number of the action whose message it needs; NOTHING if it needs
        none; if it needs a pass of all other ranks, the number of that pass on stage 0 plus the
        count of all numbers.
        """
        first = {kind: place * self.of_kind for place, kind in enumerate(self.kinds)}
        awaited: list[int] = []
        for kind in self.kinds:
            sources = []  # for each stage, the awaited number of micro-batch 0
            for stage in range(self.stages):
                action = Action(kind, stage, 0)
                every, sender = self.of_all_ranks(action), self.sender_of(action)
                if len(every) > 1:
                    sources.append(len(first) * self.of_kind + first[every[0].kind])
                elif sender is None:
                    sources.append(NOTHING)
                else:
                    sources.append(first[sender.kind] + sender.stage)
            each = np.array(sources) + self.stages * np.arange(self.micro_batches)[:, None]
            each[:, np.equal(sources, NOTHING)] = NOTHING
            awaited += each.ravel().tolist()
        return awaited

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Return the most each rank holds at once, if a micro-batch takes `sizes[s]` in stage s."""
        most = []
        for rank, moments in enumerate(self._held):
            of_rank = [sizes[stage] for stage in self.stages_on(rank)]
            most.append(max(sum(map(mul, counts, of_rank)) for counts in moments))
        return tuple(most)

    @cached_property
    def _held(self) -> list[list[list[int]]]:
        """For each rank, the numbers of activations that it holds of each of its stages, at every
        moment that can be the maximum: just before an activation is released. A moment is left out
        if the rank holds at least as many activations of every stage at another moment.
        """
        kept_until = self.kinds.find("W" if self.split else "B")
        held = []
        for rank, numbers in enumerate(self.ranks):
            kinds, rest = np.divmod(numbers, self.of_kind)
            releases = kinds == kept_until
            counted = (kinds == 0) | releases  # a forward pass, or the end of what it left
            grows = ~releases[counted]
            changes = np.where(grows, 1, -1)[:, None]
            own_stage = (rest % self.stages)[counted, None] == self.stages_on(rank)
            counts = np.cumsum(changes * own_stage, axis=0)
            shrinks_next = np.append(~grows[1:], True)
            held.append(_largest(counts[grows & shrinks_next]))
        return held


def _largest(moments: np.ndarray) -> list[list[int]]:
    """Return the rows without those that another row equals or exceeds in every number."""
    rows = np.array(sorted(set(map(tuple, moments.tolist()))))
    exceeds = (rows[None, :] >= rows[:, None]).all(axis=2)  # of each row, which others do
    return rows[exceeds.sum(axis=1) == 1].tolist()  # each one equals itself
