"""What a schedule of many micro-batches takes and holds, without a list of all its actions.

    long_schedule("1f1b", 48, 2048).makespan(seconds, transfer)     the end of 200,000 actions

With more micro-batches a schedule repeats the same actions more often (1F1B: a forward and a
backward). So it is built with few micro-batches, and if its last rounds are alike, what a round
takes is added as often as needed. Otherwise all of it is simulated. Tests hold the result to that
of `simulation.simulate`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from schedules.costs import StageCosts
from schedules.orders import SEARCHED, unchecked
from schedules.schedule import Schedule
from schedules.simulation import Seconds, ends, makespan

ROUNDS = 5  # micro-batches for each rank of the orders that are built
COMPARED = range(2, 4)  # rounds, each with the one before it
# By how much of the whole the rounds may differ and count as alike: no more than by rounding.
ALIKE = 1e-11


@dataclass(frozen=True)
class LongSchedule:
    """A schedule that is built as far as it is needed.

    whole: builds all of it. shorter: an order of ROUNDS + 1 micro-batches for each rank, whose
    rounds may be found to be alike; two, of ROUNDS - 1 and ROUNDS, if a further round is what they
    differ by; or none. rounds: how many more rounds there are than in the last of them.
    """

    whole: Callable[[], Schedule]
    shorter: tuple[Schedule, ...] = ()
    rounds: float = 0.0

    @property
    def split(self) -> bool:
        """As `Schedule.split`."""
        return (self.shorter[0] if self.shorter else self.whole()).split

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """As `Schedule.most_held`."""
        if not self.shorter:
            return self.whole().most_held(sizes)
        before, last = self.shorter[0].most_held(sizes), self.shorter[-1].most_held(sizes)
        pairs = zip(before, last, strict=True)
        return tuple(then + self.rounds * (then - less) for less, then in pairs)

    def makespan(self, seconds: Seconds, transfer: float = 0.0) -> float:
        """The end of the last action of `simulate`."""
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
    """By how much every action of a round ends later than that of the round before it, if that is
    the same for all of them; None otherwise. ended: of each number.

    No rank runs two rounds ahead of another one. So what is done after the rounds COMPARED follows
    from them alone, and if they are alike, all further ones are.
    """
    size = len(order.ranks) * order.stages  # numbers of one kind in a round
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
    """What `orders.build` makes of the same arguments; it is not checked.

    The rounds of searched orders, of zb-v and of interleaved groups of unequal size are not alike,
    nor are those of gpipe, whose forwards all come first.
    Those of --vocab-pp are nearly: on 109 layouts the end was 0.6 % off.
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
