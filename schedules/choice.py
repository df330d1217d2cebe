"""What `--schedule auto` chooses: the schedule, the stages of a rank, and the partition.

    config, choice = decide(config, "cuda")     config as it is, and None, unless it says auto

Every named schedule is tried with the balanced partition, and orders that are made for the stages'
own costs, with one stage or a V of two on each rank. Then blocks of the fastest are moved from
stage to stage. What holds more than a rank may is not taken. The result is the fastest in
simulation, so never slower than a named schedule that fits. Equal on every rank: it is arithmetic
on the same numbers in the same order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations

from config.messages import UserError
from config.schema import Config, Layout, ModelShape
from schedules.costs import StageCosts
from schedules.layout_orders import Task, task_of
from schedules.long_schedule import long_schedule
from schedules.orders import SEARCHED, rank_of_stages
from schedules.schedule import ScheduleError

SCREENED = 4  # micro-batches for each rank while partitions are compared
MOVED_ACTIONS = 400_000  # that may be scheduled while blocks are moved
# Schedules that are tried, with the stages of a rank.
TRIED = [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("searched", 1), ("zb-v", 2), ("searched-v", 2)]
TRIED += [("interleaved", virtual) for virtual in (2, 3, 4)]


@dataclass(frozen=True)
class Choice:
    """What was found, its seconds in simulation, and those of 1F1B with the balanced partition
    (None if that holds too much). idle: the share of the ranks' time in which nothing runs.
    """

    name: str
    virtual: int
    blocks: tuple[int, ...]
    costs: StageCosts
    seconds: float
    idle: float
    plain: "Choice | None" = None

    def __str__(self) -> str:
        text = f"{self.name}, {self.virtual} stages a rank" if self.virtual > 1 else self.name
        text += f", blocks {','.join(map(str, self.blocks))}"
        if self.plain is None:
            return f"{text}: 1F1B would hold too much"
        gain = 1 - self.seconds / self.plain.seconds
        return (
            f"{text}: {abs(gain):.1%} {'less' if gain >= 0 else 'more'} time than 1F1B in "
            f"simulation, idle {self.idle:.1%} for {self.plain.idle:.1%}"
        )


def decide(config: Config, device: str) -> tuple[Config, Choice | None]:
    """With the schedule decided, and what decided it; for the largest batch of this start."""
    largest = max(level.batch for level in config.levels)
    count = config.micro_batches(largest)
    layout, choice = decide_layout(config.model, config.layout, count, device)
    return replace(config, layout=layout), choice


def decide_layout(
    model: ModelShape, layout: Layout, micro_batches: int, device: str = "cuda"
) -> tuple[Layout, Choice | None]:
    """As `decide`, for one number of micro-batches."""
    layout = replace(layout, vocab_pp=bool(layout.vocab_pp))
    if layout.schedule != "auto":
        return layout, None
    if layout.pp == 1:
        return replace(layout, schedule="1f1b"), None
    if layout.schedule_costs == "measured":
        raise UserError(
            "--schedule-costs measured needs the run itself, which writes the numbers to run.json: "
            "give these, or counted"
        )
    choice = search(replace(task_of(model, layout, device), micro_batches=micro_batches))
    virtual = choice.virtual if choice.name == "interleaved" else layout.virtual_stages
    blocks = ",".join(map(str, choice.blocks))
    return replace(layout, schedule=choice.name, virtual_stages=virtual, partition=blocks), choice


def note(layout: Layout, choice: Choice) -> str:
    """What to print of a layout for which `decide_layout` made that choice."""
    return f"--schedule auto, costs {layout.schedule_costs}: {choice}"


@lru_cache(maxsize=256)
def search(task: Task) -> Choice:
    """The fastest schedule that holds no more than its limit.

    Raises ScheduleError if there is none.
    """
    few = min(task.micro_batches, SCREENED * task.ranks)
    screened = [_priced(task, *entry, few) for entry in _candidates(task)]
    fitting = [one for one in screened if one]
    if fitting and not task.blocks:
        fitting.append(_moved(task, min(fitting, key=_seconds), few))
    found = [_priced(task, one.name, one.virtual, one.blocks, None) for one in fitting]
    whole = [one for one in found if one]
    if not whole:
        raise ScheduleError(f"every schedule of {task.ranks} ranks holds more than its limit")
    plain = next((one for one in whole if one.name == "1f1b"), None)
    return replace(min(whole, key=_seconds), plain=plain)


def _seconds(choice: Choice) -> float:
    return choice.seconds


def _candidates(task: Task) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Names, stages of a rank, and partitions to try."""
    for name, virtual in TRIED:
        if task.blocks:
            if virtual == 1 and name not in SEARCHED:
                yield name, virtual, task.blocks
        elif task.ranks * virtual <= task.layers + 2:
            yield name, virtual, task.balanced(rank_of_stages(name, task.ranks, virtual))


def _priced(
    task: Task, name: str, virtual: int, blocks: tuple[int, ...], few: int | None
) -> Choice | None:
    """A candidate with its seconds for so many micro-batches, or all; None if it holds too much."""
    count = few or task.micro_batches
    costs = task.costs(name, blocks)
    order = long_schedule(name, task.ranks, count, virtual, costs if name in SEARCHED else None)
    try:
        held = order.most_held([stage.held for stage in costs.stages])
    except ScheduleError:  # a rank may not hold one micro-batch
        return None
    if max(held) > task.limit * (1 + 1e-9):
        return None
    seconds = order.makespan(costs.seconds(order.split), task.transfer)
    busy = count * sum(stage.seconds for stage in costs.stages)
    return Choice(name, virtual, blocks, costs, seconds, 1 - busy / (seconds * task.ranks))


def _moved(task: Task, best: Choice, micro_batches: int) -> Choice:
    """The candidate with blocks moved from stage to stage as long as that is faster.

    The number of moves tried is limited by the actions that they schedule.
    """
    stages = len(best.blocks)
    left = MOVED_ACTIONS // (3 * stages * micro_batches)
    improved = True
    while improved:
        improved = False
        for source, to in permutations(range(stages), 2):
            if best.blocks[source] == 0 or left <= 0:
                continue
            left -= 1
            blocks = list(best.blocks)
            blocks[source] -= 1
            blocks[to] += 1
            other = _priced(task, best.name, best.virtual, tuple(blocks), micro_batches)
            if other and other.seconds < best.seconds * (1 - 1e-9):
                best, improved = other, True
    return best
