"""Duration and memory of a schedule of many micro-batches, without a list of all its actions.

    LongSchedule("1f1b", 48, 2048).makespan(seconds, transfer)     the end of 200,000 actions

A round is as many micro-batches as there are ranks. With more micro-batches, a schedule repeats
the same actions more often (1F1B: a forward and a backward pass). So a short schedule of few rounds
is simulated first. If all actions of its last rounds end by the same time later than the actions of
an earlier micro-batch, this time is added for all further micro-batches. Otherwise a schedule of
more rounds is simulated, and at last the whole schedule. Tests compare the result with
`simulation.simulate`. Read simulation.py first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from config.schema import Layout, ModelShape
from schedules.actions import Numbered
from schedules.orders import SEARCHED, backward_length, numbered, stage_costs
from schedules.partition import StageCosts
from schedules.simulation import Seconds, ends

ROUNDS = (6, 12, 24)  # rounds of the short schedules that are simulated one after the other
ENDING = 2  # the number of last rounds, which are not compared because the pipeline drains
COMPARED = 2  # the number of rounds before, whose actions are compared with earlier actions
HELD_ROUNDS = 3  # rounds of the short schedule in which the held activations are counted
# With --vocab-pp, schedules of 4 and of 5 rounds are simulated: every further round adds their
# difference.
VOCABULARY_ROUNDS = (4, 5)
# Two differences of times count as equal if they differ only by rounding: by at most this share of
# the largest time.
ALIKE = 1e-11


class Repetition(NamedTuple):
    """Every action ends `seconds` later than `micro_batches` micro-batches before."""

    micro_batches: int
    seconds: float


@dataclass(frozen=True)
class LongSchedule:
    """A schedule for which only schedules of fewer micro-batches are built, if that is enough.

    The fields are the arguments of `orders.build`. The schedule is not validated.
    """

    name: str
    ranks: int
    micro_batches: int
    virtual: int = 1
    costs: StageCosts | None = None
    vocabulary: int = 0

    @property
    def split(self) -> bool:
        """Whether backward passes are split into B and W."""
        return self._of(1).split

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Return the largest size of activations that each rank holds at once.

        sizes: for each stage, the size of one micro-batch's activations, in any unit.
        """
        if self.vocabulary and self.has_more_rounds_than(VOCABULARY_ROUNDS[-1] + 1):
            few, more = map(self._of_rounds, VOCABULARY_ROUNDS)
            pairs = zip(few.most_held(sizes), more.most_held(sizes), strict=True)
            return tuple(most + self._further_rounds * (most - less) for less, most in pairs)
        if self._repeats and self.has_more_rounds_than(HELD_ROUNDS):
            return self._of(HELD_ROUNDS * self.ranks).most_held(sizes)
        return self._of(self.micro_batches).most_held(sizes)

    def makespan(self, seconds: Seconds, transfer: float = 0.0) -> float:
        """Return the time at which the last action ends; the first action starts at 0.

        seconds: the duration of an action by (kind, stage). transfer: the time of one message.
        """
        if self.vocabulary and self.has_more_rounds_than(VOCABULARY_ROUNDS[-1] + 1):
            orders = map(self._of_rounds, VOCABULARY_ROUNDS)
            few, more = (max(ends(order, seconds, transfer)) for order in orders)
            return more + self._further_rounds * (more - few)
        for rounds in ROUNDS:
            if not self._repeats or not self.has_more_rounds_than(rounds):
                break
            end = self._continued(rounds, seconds, transfer)
            if end is not None:
                return end
        return max(ends(self._of(self.micro_batches), seconds, transfer))

    def has_more_rounds_than(self, rounds: int) -> bool:
        """Return whether this schedule has more than `rounds` whole rounds."""
        return self.micro_batches // self.ranks > rounds

    @property
    def _repeats(self) -> bool:
        """Whether further micro-batches repeat the same actions.

        They do not in searched orders; in interleaved schedules with groups of unequal size; in
        gpipe, whose forward passes all come first; and with --vocab-pp. With --vocab-pp they nearly
        do: the predicted end was 0.6 % off on 109 layouts.
        """
        if self.vocabulary or self.name in (*SEARCHED, "gpipe"):
            return False
        return self.name != "interleaved" or self.micro_batches % self.ranks == 0

    @property
    def _lags(self) -> list[int]:
        """The numbers of micro-batches after which actions may repeat, the likely numbers first."""
        if self.name == "interleaved":  # a rank takes a whole round through each of its stages
            return [self.ranks]
        if self.name == "zb-v" and self.ranks % 3 == 0:  # found by comparing orders
            cycle = 2 * self.ranks // 3
            return [cycle, 2 * cycle, 3 * cycle]
        # The slowest round trip limits the pipeline. If it begins at a later rank, only the ranks
        # from there on take part, and actions repeat after as many micro-batches.
        return [self.ranks, *range(1, self.ranks)]

    @property
    def _further_rounds(self) -> int:
        """The number of rounds of this schedule beyond the larger one of VOCABULARY_ROUNDS."""
        return self.micro_batches // self.ranks - VOCABULARY_ROUNDS[-1]

    def _of_rounds(self, rounds: int) -> Numbered:
        """Return the schedule of `rounds` rounds and this schedule's micro-batches that do not fill
        a round.
        """
        return self._of(rounds * self.ranks + self.micro_batches % self.ranks)

    def _of(self, micro_batches: int) -> Numbered:
        """Return the schedule of another number of micro-batches."""
        shape = self.name, self.ranks, micro_batches, self.virtual
        return numbered(*shape, self.costs, self.vocabulary)

    def _continued(self, rounds: int, seconds: Seconds, transfer: float) -> float | None:
        """Return the end of the whole schedule, computed from a schedule of `rounds` rounds.

        Return None if the actions of the short schedule do not repeat.
        """
        short = self._of_rounds(rounds)
        ended = ends(short, seconds, transfer)
        repeated = repetition(short, ended, rounds, self._lags)
        if repeated is None:
            return None
        missing = self.micro_batches - short.micro_batches
        times, remainder = divmod(missing, repeated.micro_batches)
        if remainder:  # further micro-batches that are no whole repetition are simulated
            ended = ends(self._of(short.micro_batches + remainder), seconds, transfer)
        return max(ended) + times * repeated.seconds


def repetition(
    order: Numbered, ended: list[float], rounds: int, lags: Iterable[int]
) -> Repetition | None:
    """Return the repetition of a schedule's actions, or None if they do not repeat.

    ended: the end of each action by its number, from `simulation.ends`. rounds: the rounds of the
    schedule. lags: the numbers of micro-batches after which actions may repeat.

    No rank runs two rounds ahead of another rank, so the COMPARED rounds determine when all later
    actions run. If all their actions end by the same time later than those `lag` micro-batches
    before, so do all further actions.
    """
    ranks = len(order.ranks)
    stop = (rounds - ENDING) * ranks
    start = stop - COMPARED * ranks
    times = np.reshape(ended, (len(order.kinds), -1, order.stages))  # by kind, micro-batch, stage
    for lag in lags:
        later = times[:, start:stop] - times[:, start - lag : stop - lag]
        if later.max() - later.min() > ALIKE * times.max():
            continue
        return Repetition(lag, float(later[0, 0, 0]))
    return None


def long_layout(model: ModelShape, layout: Layout, micro_batches: int) -> LongSchedule:
    """Return the training schedule of a layout, from which the planner computes time and memory."""
    costs = stage_costs(model, layout)
    shape = layout.schedule, layout.pp, micro_batches, layout.stages_per_rank
    return LongSchedule(*shape, costs, backward_length(layout))
