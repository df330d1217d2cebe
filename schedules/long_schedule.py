"""Duration and memory of a schedule of many micro-batches, without a list of all its actions.

    long_schedule("1f1b", 48, 2048).makespan(seconds, transfer)     the end of 200,000 actions

A round is as many micro-batches as there are ranks. With more micro-batches, a schedule repeats
the same actions more often (1F1B: a forward and a backward pass). So it is built with few rounds;
if the last of these take equally long, the seconds of one round are added for each further round.
Otherwise the whole schedule is simulated. Tests compare the result with `simulation.simulate`.
Read simulation.py first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from config.schema import Layout, ModelShape
from schedules.orders import SEARCHED, backward_length, stage_costs, unchecked
from schedules.partition import StageCosts
from schedules.schedule import Schedule
from schedules.simulation import Seconds, ends, makespan

ROUNDS = 5  # of the short schedules that are built; see `LongSchedule.shorter`
COMPARED = range(2, 4)  # each of these rounds is compared with the round before it
# Rounds are alike if their seconds differ by at most this share of the whole: by rounding only.
ALIKE = 1e-11


@dataclass(frozen=True)
class LongSchedule:
    """A schedule of which only a short version is built, if that is enough.

    whole: builds the whole schedule. shorter: one schedule of ROUNDS + 1 rounds, whose rounds are
    tested for being alike; or two schedules, of ROUNDS - 1 and ROUNDS rounds, whose difference is
    taken for a further round; or none, if only the whole schedule will do. rounds: how many rounds
    the whole schedule has more than the last of `shorter`.
    """

    whole: Callable[[], Schedule]
    shorter: tuple[Schedule, ...] = ()
    rounds: float = 0.0

    @property
    def split(self) -> bool:
        """Whether backward passes are split (`Schedule.split`)."""
        return (self.shorter[0] if self.shorter else self.whole()).split

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Return for each rank the most that it holds at once (`Schedule.most_held`)."""
        if not self.shorter:
            return self.whole().most_held(sizes)
        before = self.shorter[0].most_held(sizes)
        last = self.shorter[-1].most_held(sizes)
        pairs = zip(before, last, strict=True)
        return tuple(then + self.rounds * (then - less) for less, then in pairs)

    def makespan(self, seconds: Seconds, transfer: float = 0.0) -> float:
        """Return when the last action ends; arguments as of `simulation.simulate`."""
        if not self.shorter:
            return makespan(self.whole(), seconds, transfer)
        last = ends(self.shorter[-1], seconds, transfer)
        if len(self.shorter) == 2:
            further = max(last) - makespan(self.shorter[0], seconds, transfer)
            return max(last) + self.rounds * further
        each = seconds_of_round(self.shorter[0], last)
        if each is None:
            return makespan(self.whole(), seconds, transfer)
        return max(last) + self.rounds * each


def seconds_of_round(order: Schedule, ended: list[float]) -> float | None:
    """Return the seconds of one round: by how much every action ends later than the same action of
    the round before. Return None if this differs between actions.

    ended: the end of each action by its number, from `simulation.ends`. No rank runs two rounds
    ahead of another rank. So the rounds COMPARED determine when all later actions run, and if these
    rounds are alike, all further rounds are like them.
    """
    size = len(order.ranks) * order.stages  # how many actions of one kind a round has
    of_kind = len(ended) // len(order.kinds)
    later: list[float] = []
    for place in range(len(order.kinds)):
        begin = place * of_kind + COMPARED.start * size
        stop = place * of_kind + COMPARED.stop * size
        pairs = zip(ended[begin:stop], ended[begin - size : stop - size], strict=True)
        later += [end - before for end, before in pairs]
    if max(later) - min(later) > ALIKE * max(ended):
        return None
    return later[0]


@lru_cache(maxsize=1024)
def long_schedule(
    name: str,
    ranks: int,
    micro_batches: int,
    virtual: int = 1,
    costs: StageCosts | None = None,
    vocabulary: int = 0,
) -> LongSchedule:
    """Return the schedule that `orders.build` makes for the same arguments; it is not checked.

    Rounds are not alike in searched orders, in zb-v, in interleaved schedules with groups of
    unequal size, and in gpipe, whose forward passes all come first. With --vocab-pp rounds are
    nearly alike: on 109 layouts the end was 0.6 % off.
    """
    whole = partial(unchecked, name, ranks, micro_batches, virtual, costs, vocabulary)
    rounds, rest = divmod(micro_batches, ranks)
    uneven = name in ("gpipe", "zb-v") or (name == "interleaved" and rest > 0)
    if name in SEARCHED or rounds <= ROUNDS + 1 or (uneven and not vocabulary):
        return LongSchedule(whole)
    counts = [ROUNDS - 1, ROUNDS] if vocabulary else [ROUNDS + 1]
    shorter = []
    for number in counts:
        few = number * ranks + rest
        shorter.append(unchecked(name, ranks, few, virtual, None, vocabulary))
    return LongSchedule(whole, tuple(shorter), rounds - counts[-1])


def long_layout(model: ModelShape, layout: Layout, micro_batches: int) -> LongSchedule:
    """Return the training schedule of a layout for the planner, which asks for time and memory."""
    costs = stage_costs(model, layout)
    shape = layout.schedule, layout.pp, micro_batches, layout.stages_per_rank
    return long_schedule(*shape, costs, backward_length(layout))
