"""Computes what a schedule of many micro-batches takes and holds, from a schedule of few.

    LongSchedule("1f1b", 48, 2048).makespan(seconds, transfer)     the end of 200,000 actions

A round is as many micro-batches as there are ranks. Once a pipeline is full, every further round
takes as long as the one before. So a schedule of a few rounds is simulated, and the time of a full
round is added for each further round. On stages whose seconds differ by up to 10 %, drawn at
random, the end is within 0.1 % of `simulation.simulate` in the mean of 60 cases of each schedule;
the worst case is 1.3 % away. A test holds both. Read simulation.py first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from config.schema import Layout
from schedules.actions import Numbered, Seconds
from schedules.interleaved import Interleaved
from schedules.orders import numbered
from schedules.simulation import ends, ends_by_rounds, gpipe_end

# At least ROUNDS rounds are simulated, of schedules that repeat themselves after one round
# SHORT_ROUNDS. With few ranks they are more rounds, of about LEAST micro-batches: interleaved
# stages on two ranks repeat themselves only after 14 micro-batches.
ROUNDS = 5
SHORT_ROUNDS = {"1f1b": 4, "zb-h1": 4}
ONE_STAGE = ("1f1b", "zb-h1")  # schedules of `ends_by_rounds`
# Schedules whose further rounds take as long as those before. Others are simulated in full, which
# is slower: gpipe, which does all F before all B, and any schedule that is not named here.
REPEATING = ("1f1b", "zb-h1", "interleaved", "zb-v")
LEAST = 24
# The last simulated round empties the pipeline, and the first rounds fill it. The FULL_ROUNDS
# before the last one give the time of a full round. They are two because zb-v repeats itself only
# after two rounds.
FULL_ROUNDS = 2


@dataclass(frozen=True)
class LongSchedule:
    """A schedule of many micro-batches, computed from a schedule of few micro-batches.

    The fields are the arguments of `orders.build`: ranks is the number of ranks, virtual the stages
    of each rank. The schedule is not validated.
    """

    name: str
    ranks: int
    micro_batches: int
    virtual: int = 1

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Return the largest size of activations that each rank holds at once.

        sizes: for each stage, the size of one micro-batch's activations, in any unit.
        """
        # Once a pipeline is full, further rounds hold no more, so few rounds are enough.
        if self.name == "interleaved":
            return Interleaved(self.ranks, self.virtual, self._simulated()).most_held(sizes)
        return self.shortened().most_held(sizes)

    def makespan(self, seconds: Seconds, transfer: float = 0.0) -> float:
        """Return the time at which the last action ends; the first action starts at 0.

        seconds: the duration of an action by (kind, stage). transfer: the time of one message.
        """
        count = self._simulated()
        if self.name == "gpipe":
            return gpipe_end(self.ranks, count, seconds, transfer)
        if self.name in ONE_STAGE:
            split = self.name == "zb-h1"
            end, backwards = ends_by_rounds(self.ranks, count, seconds, transfer, split)
        elif self.name == "interleaved" and 1 < self.ranks <= count:
            schedule = Interleaved(self.ranks, self.virtual, count)
            end, backwards = schedule.ends(seconds, transfer)
        else:
            short = self.shortened()
            ended = ends(short, seconds, transfer)
            end, backwards = max(ended), short.by_kind(ended)["B"][:, -1].tolist()
        missing = self.micro_batches - count
        if not missing:  # the short schedule is the whole schedule
            return end
        # The full rounds are timed by the last stage's B: from the last B before them to their own
        # last B, which are as many micro-batches later.
        in_full_rounds = FULL_ROUNDS * self.ranks
        last = count - 1 - self.ranks
        seconds_of_full_rounds = backwards[last] - backwards[last - in_full_rounds]
        return end + missing / in_full_rounds * seconds_of_full_rounds

    def shortened(self) -> Numbered:
        """Return the schedule with some of its whole rounds, or all of it, to be simulated."""
        return numbered(self.name, self.ranks, self._simulated(), self.virtual)

    def _simulated(self) -> int:
        """Return the number of micro-batches of `shortened`.

        The micro-batches that fill no whole round stay, but not in zb-v, where they change the end
        no more than the rest does: so all numbers of micro-batches share one order, whose making
        takes long. All rounds stay if some may be unlike others: in a schedule that is not in
        REPEATING, and in an interleaved schedule with micro-batches that fill no whole round, since
        its groups of micro-batches are unequal.
        """
        whole_rounds, left_over = divmod(self.micro_batches, self.ranks)
        fewest = SHORT_ROUNDS.get(self.name, ROUNDS)
        kept_rounds = max(fewest, LEAST // self.ranks)
        unequal_groups = self.name == "interleaved" and left_over > 0
        rounds_differ = self.name not in REPEATING or unequal_groups
        if rounds_differ or whole_rounds <= kept_rounds:
            return self.micro_batches
        return kept_rounds * self.ranks + (0 if self.name == "zb-v" else left_over)


def long_layout(layout: Layout, micro_batches: int) -> LongSchedule:
    """Return the training schedule of a layout, from which the planner computes time and memory.

    It has the arguments with which `orders.schedule_for` builds the schedule for the pipeline.
    """
    return LongSchedule(layout.schedule, layout.pp, micro_batches, layout.stages_per_rank)
