"""Duration and memory of a schedule of many micro-batches, without a list of all its actions.

    LongSchedule("1f1b", 48, 2048).makespan(seconds, transfer)     the end of 200,000 actions

A round is as many micro-batches as there are ranks. With more micro-batches, a schedule repeats
the same actions more often (1F1B: a forward and a backward pass). So it is simulated with few
rounds. If every action of the last ones ends equally much later than the same action of so many
micro-batches before, that time is added for all further micro-batches. Otherwise it is simulated
with more rounds, and at last as a whole. Tests compare the result with `simulation.simulate`.
Read simulation.py first.
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

ROUNDS = (6, 12, 24)  # of the short schedules that are simulated one after the other
ENDING = 2  # the last rounds, which are not compared
COMPARED = 2  # rounds before those, whose actions are compared with earlier ones
HELD_ROUNDS = 3  # of the short schedule from whose actions the memory is counted
# With --vocab-pp two schedules of these rounds are simulated; their difference is a further round.
VOCABULARY_ROUNDS = (4, 5)
# Actions end equally much later if that differs by at most this share of the whole: by rounding.
ALIKE = 1e-11


class Repetition(NamedTuple):
    """Every action ends so many seconds later than the one of so many micro-batches before."""

    micro_batches: int
    seconds: float


@dataclass(frozen=True)
class LongSchedule:
    """A schedule of which only short versions are built, if that is enough.

    The fields are the arguments of `orders.build`; it is not checked.
    """

    name: str
    ranks: int
    micro_batches: int
    virtual: int = 1
    costs: StageCosts | None = None
    vocabulary: int = 0

    @property
    def split(self) -> bool:
        """Whether backward passes are split (`Schedule.split`)."""
        return self._of(1).split

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Return for each rank the most that it holds at once (`Schedule.most_held`)."""
        if self.vocabulary and self.has_more_rounds_than(VOCABULARY_ROUNDS[-1] + 1):
            few, more = map(self._of_rounds, VOCABULARY_ROUNDS)
            pairs = zip(few.most_held(sizes), more.most_held(sizes), strict=True)
            return tuple(most + self._further_rounds * (most - less) for less, most in pairs)
        if self._repeats and self.has_more_rounds_than(HELD_ROUNDS):
            return self._of(HELD_ROUNDS * self.ranks).most_held(sizes)
        return self._of(self.micro_batches).most_held(sizes)

    def makespan(self, seconds: Seconds, transfer: float = 0.0) -> float:
        """Return when the last action ends; arguments as of `simulation.simulate`."""
        if self.vocabulary and self.has_more_rounds_than(VOCABULARY_ROUNDS[-1] + 1):
            orders = map(self._of_rounds, VOCABULARY_ROUNDS)
            few, more = (max(ends(order, seconds, transfer)) for order in orders)
            return more + self._further_rounds * (more - few)
        for rounds in ROUNDS:
            if not self._repeats or not self.has_more_rounds_than(rounds):
                break
            found = self._continued(rounds, seconds, transfer)
            if found is not None:
                return found
        return max(ends(self._of(self.micro_batches), seconds, transfer))

    def has_more_rounds_than(self, rounds: int) -> bool:
        """Return whether a schedule of so many rounds is shorter than this one."""
        return self.micro_batches // self.ranks > rounds

    @property
    def _repeats(self) -> bool:
        """Whether further micro-batches repeat actions.

        They do not in searched orders, in interleaved schedules with groups of unequal size, in
        gpipe, whose forward passes all come first, and with --vocab-pp: there they nearly do, and
        on 109 layouts the end was 0.6 % off.
        """
        if self.vocabulary or self.name in (*SEARCHED, "gpipe"):
            return False
        return self.name != "interleaved" or self.micro_batches % self.ranks == 0

    @property
    def _lags(self) -> list[int]:
        """After how many micro-batches actions may repeat."""
        if self.name == "interleaved":  # takes a round through each of its stages
            return [self.ranks]
        if self.name == "zb-v" and self.ranks % 3 == 0:  # found by comparing orders
            cycle = 2 * self.ranks // 3
            return [cycle, 2 * cycle, 3 * cycle]
        # A round trip that limits the pipeline may begin at any rank: it has as many micro-batches
        # as there are ranks from there on.
        return [self.ranks, *range(1, self.ranks)]

    @property
    def _further_rounds(self) -> int:
        """How many rounds this schedule has more than the longer one of VOCABULARY_ROUNDS."""
        return self.micro_batches // self.ranks - VOCABULARY_ROUNDS[-1]

    def _of_rounds(self, rounds: int) -> Numbered:
        """Return the schedule of so many rounds, and of what is less than a round."""
        return self._of(rounds * self.ranks + self.micro_batches % self.ranks)

    def _of(self, micro_batches: int) -> Numbered:
        shape = self.name, self.ranks, micro_batches, self.virtual
        return numbered(*shape, self.costs, self.vocabulary)

    def _continued(self, rounds: int, seconds: Seconds, transfer: float) -> float | None:
        """Return the end of the whole schedule if one of so many rounds tells it, else None."""
        order = self._of_rounds(rounds)
        ended = ends(order, seconds, transfer)
        repeated = repetition(order, ended, rounds, self._lags)
        if repeated is None:
            return None
        few = order.micro_batches
        times, odd = divmod(self.micro_batches - few, repeated.micro_batches)
        last = max(ends(self._of(few + odd), seconds, transfer)) if odd else max(ended)
        return last + times * repeated.seconds


def repetition(
    order: Numbered, ended: list[float], rounds: int, lags: Iterable[int]
) -> Repetition | None:
    """Return after how many micro-batches, one of `lags`, actions repeat, or None.

    ended: the end of each action by its number, from `simulation.ends`. No rank runs two rounds
    ahead of another rank. So the COMPARED rounds determine when all later actions run, and if their
    actions end equally much later than those before, so do all further ones.
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
    """Return the training schedule of a layout for the planner, which asks for time and memory."""
    costs = stage_costs(model, layout)
    shape = layout.schedule, layout.pp, micro_batches, layout.stages_per_rank
    return LongSchedule(*shape, costs, backward_length(layout))
