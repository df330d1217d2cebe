"""What a schedule of many micro-batches takes and holds, without a list of all its actions.

    long_schedule("1f1b", 48, 2048).makespan(seconds, transfer)     the end of 200,000 actions

With more micro-batches a schedule repeats the same actions more often (1F1B: a forward and a
backward). So it is built with few micro-batches and with a few more, and what differs is taken as
often as needed. Tests hold the result to that of `simulation.simulate`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from schedules.costs import StageCosts
from schedules.orders import SEARCHED, unchecked
from schedules.schedule import Schedule
from schedules.simulation import Seconds
from schedules.simulation import makespan as end_of

SIMULATED = 3_000  # forwards up to which all of a schedule is simulated
ROUNDS = 3  # micro-batches for each rank, after which every schedule repeats itself
# By how much of the whole two rounds may differ and count as alike: those of a named schedule but
# for rounding. Those of --vocab-pp are alike only nearly: on 109 layouts the end was 0.6 % off.
ALIKE = 1e-11
NEARLY_ALIKE = 1.0


@dataclass(frozen=True)
class LongSchedule:
    """A schedule that is built as far as it is needed.

    whole: builds all of it. shorter: three orders of fewer micro-batches, each with one round more
    than the one before; two, if their rounds are not compared; or none. rounds: how many more
    rounds there are than in the last of them. alike: by how much of the whole two rounds may
    differ. in_whole: all of it is simulated, since its rounds need not be alike, or since that is
    quick.
    """

    whole: Callable[[], Schedule]
    shorter: tuple[Schedule, ...] = ()
    rounds: float = 0.0
    alike: float = ALIKE
    in_whole: bool = False

    @property
    def split(self) -> bool:
        """As `Schedule.split`."""
        return (self.shorter[0] if self.shorter else self.whole()).split

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """As `Schedule.most_held`."""
        if self.in_whole or not self.shorter:
            return self.whole().most_held(sizes)
        before, last = (order.most_held(sizes) for order in self.shorter[-2:])
        pairs = zip(before, last, strict=True)
        return tuple(then + self.rounds * (then - less) for less, then in pairs)

    def makespan(self, seconds: Seconds, transfer: float = 0.0) -> float:
        """The end of the last action of `simulate`. A schedule that is not simulated in whole may
        be some per mille off, if its later rounds differ although two were alike.
        """
        if self.in_whole or not self.shorter:
            return end_of(self.whole(), seconds, transfer)
        first, second, last = (end_of(order, seconds, transfer) for order in self.shorter)
        if abs((last - second) - (second - first)) > self.alike * last:
            return end_of(self.whole(), seconds, transfer)
        return last + self.rounds * (last - second)

    def nearly(self, seconds: Seconds, transfer: float = 0.0) -> float:
        """As `makespan`, if all further rounds take as long as the last one: for zb-v and for
        interleaved groups of unequal size a few per cent off.
        """
        if not self.shorter:
            return end_of(self.whole(), seconds, transfer)
        second, last = (end_of(order, seconds, transfer) for order in self.shorter[-2:])
        return last + self.rounds * (last - second)


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

    ROUNDS micro-batches for each rank, and one and two more, show what a further one takes. The
    rounds of searched orders, of zb-v and of interleaved groups of unequal size are not alike.
    """
    whole = partial(unchecked, name, ranks, micro_batches, virtual, costs, vocabulary)
    rounds, rest = divmod(micro_batches, ranks)
    if name in SEARCHED or rounds <= ROUNDS + 2:
        return LongSchedule(whole)
    uneven = name == "zb-v" or (name == "interleaved" and rest > 0)
    quick = micro_batches * ranks * virtual <= SIMULATED and not vocabulary
    few = ROUNDS * ranks + (0 if uneven else rest)
    counts = [few + more * ranks for more in range(uneven, 3)]
    shorter = [unchecked(name, ranks, count, virtual, None, vocabulary) for count in counts]
    left = (micro_batches - counts[-1]) / ranks
    alike = NEARLY_ALIKE if vocabulary else ALIKE
    return LongSchedule(whole, tuple(shorter), left, alike, uneven or quick)
