"""Computes what a schedule of many micro-batches takes and holds, from schedules of few.

    LongSchedule("1f1b", 48, 2048).makespan(seconds, transfer)     the end of 200,000 actions

A round is as many micro-batches as there are ranks. Once a pipeline is full, every further round
takes as long as the one before. So two short schedules are simulated, and their difference is added
for each further round. On drawn stages of unequal seconds the end was within 0.5 % of
`simulation.simulate`, with slow messages within 0.3 %. Read simulation.py first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from config.schema import Layout, ModelShape
from schedules.actions import Numbered
from schedules.orders import SEARCHED, backward_length, numbered, stage_costs
from schedules.partition import StageCosts
from schedules.simulation import Seconds, ends

# Rounds of the two short schedules: with one stage on each rank and without --vocab-pp; and others,
# among them zb-v, which repeats after two rounds.
PLAIN_ROUNDS = (2, 3)
ROUNDS = (3, 5)


@dataclass(frozen=True)
class LongSchedule:
    """A schedule for which only schedules of few micro-batches are built, if that is enough.

    The fields are the arguments of `orders.build`. The schedule is not validated.
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
        rounds = self.rounds if self.name == "gpipe" else ROUNDS[0]  # gpipe holds all micro-batches
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
        if not missing:
            return end
        more = end - max(ends(short, seconds, transfer))
        return end + missing / (longer.micro_batches - short.micro_batches) * more

    @property
    def rounds(self) -> int:
        """The number of whole rounds."""
        return self.micro_batches // self.ranks

    def _of_rounds(self, rounds: int) -> Numbered:
        """Return the schedule with `rounds` of its rounds and the micro-batches that fill no round;
        with all rounds if it has fewer, or if its further rounds differ from the first ones.
        """
        rest = self.micro_batches % self.ranks
        # A searched order is made for its micro-batches, and groups of an interleaved schedule
        # differ in size if the micro-batches fill no whole rounds.
        differs = self.name in SEARCHED or (self.name == "interleaved" and rest > 0)
        if not differs and rounds < self.rounds:
            micro_batches = rounds * self.ranks + rest
        else:
            micro_batches = self.micro_batches
        shape = self.name, self.ranks, micro_batches, self.virtual
        return numbered(*shape, self.costs, self.vocabulary)


def long_layout(model: ModelShape, layout: Layout, micro_batches: int) -> LongSchedule:
    """Return the training schedule of a layout, from which the planner computes time and memory."""
    costs = stage_costs(model, layout)
    shape = layout.schedule, layout.pp, micro_batches, layout.stages_per_rank
    return LongSchedule(*shape, costs, backward_length(layout))
