"""Computes what a schedule of many micro-batches takes and holds, from schedules of few.

    LongSchedule("1f1b", 48, 2048).makespan(seconds, transfer)     the end of 200,000 actions

A round is as many micro-batches as there are ranks. Once a pipeline is full, every further round
takes as long as the one before. So two short schedules are simulated, and their difference is added
for each further round. On stages whose seconds differ by up to 10 %, drawn at random, the end is
within 0.2 % of `simulation.simulate` in the mean of 60 cases of each schedule; the worst case is
1.4 % away. A test holds both. Read simulation.py first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from config.schema import Layout, ModelShape
from schedules.actions import Numbered
from schedules.orders import SEARCHED, backward_length, numbered, stage_costs
from schedules.partition import StageCosts
from schedules.simulation import Seconds, ends

# The numbers of rounds of the two short schedules that are compared. PLAIN_ROUNDS is for schedules
# with one stage on each rank and without --vocab-pp. ROUNDS is for the others; its two numbers
# differ by 2, because zb-v repeats itself only after two rounds.
PLAIN_ROUNDS = (2, 3)
ROUNDS = (3, 5)


@dataclass(frozen=True)
class LongSchedule:
    """A schedule of many micro-batches, computed from schedules of few micro-batches.

    The fields are the arguments of `orders.build`: ranks is the number of ranks, virtual the stages
    of each rank, costs those for which a searched order is made, vocabulary the length of a
    backward pass with --vocab-pp, or 0. The schedule is not validated.
    """

    name: str
    ranks: int
    micro_batches: int
    virtual: int = 1
    costs: StageCosts | None = None
    vocabulary: int = 0

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Return the largest size of activations that each rank holds at once.

        sizes: for each stage, the size of one micro-batch's activations, in any unit.
        """
        # Once a pipeline is full, further rounds hold no more, so few rounds are enough. GPipe
        # needs them all, because it holds all micro-batches at once.
        rounds = self.rounds if self.name == "gpipe" else ROUNDS[0]
        return self._of_rounds(rounds).most_held(sizes)

    def makespan(self, seconds: Seconds, transfer: float = 0.0) -> float:
        """Return the time at which the last action ends; the first action starts at 0.

        seconds: the duration of an action by (kind, stage). transfer: the time of one message.
        """
        is_plain = self.name in ("1f1b", "gpipe", "zb-h1") and not self.vocabulary
        compared = PLAIN_ROUNDS if is_plain else ROUNDS
        short, longer = (self._of_rounds(rounds) for rounds in compared)
        end = max(ends(longer, seconds, transfer))
        missing = self.micro_batches - longer.micro_batches
        if not missing:  # the longer schedule is the whole schedule
            return end
        # The longer schedule ends later by `more`. Divided by the number of micro-batches that it
        # has more, this is the time that each missing micro-batch adds.
        more = end - max(ends(short, seconds, transfer))
        return end + missing / (longer.micro_batches - short.micro_batches) * more

    @property
    def rounds(self) -> int:
        """The number of whole rounds in the schedule, each of as many micro-batches as ranks."""
        return self.micro_batches // self.ranks

    def _of_rounds(self, rounds: int) -> Numbered:
        """Return the schedule with only `rounds` of its whole rounds, to stand for all its rounds.

        The micro-batches that fill no whole round stay. If the schedule has no more rounds, or if
        its further rounds are unlike its first rounds, the whole schedule is returned.
        """
        rest = self.micro_batches % self.ranks
        # Few rounds cannot stand for all of them if the rounds differ. They do in a searched order,
        # which is made for its number of micro-batches, and in an interleaved schedule with
        # micro-batches that fill no whole round, since its groups of micro-batches are unequal.
        differs = self.name in SEARCHED or (self.name == "interleaved" and rest > 0)
        if not differs and rounds < self.rounds:
            micro_batches = rounds * self.ranks + rest
        else:
            micro_batches = self.micro_batches
        shape = self.name, self.ranks, micro_batches, self.virtual
        return numbered(*shape, self.costs, self.vocabulary)


def long_layout(model: ModelShape, layout: Layout, micro_batches: int) -> LongSchedule:
    """Return the training schedule of a layout, from which the planner computes time and memory.

    It has the arguments with which `orders.of_layout` builds the schedule for the pipeline.
    """
    costs = stage_costs(model, layout)
    shape = layout.schedule, layout.pp, micro_batches, layout.stages_per_rank
    return LongSchedule(*shape, costs, backward_length(layout))
