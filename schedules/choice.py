"""Decides `--schedule auto`: the schedule, the number of stages per rank, and the partition.

    config, choice = decide(config, "cuda")     choice is None unless --schedule is auto

1. Every named schedule is simulated with the balanced partition, and so are searched orders, with
   one stage or a V of two on each rank. Schedules that hold more than a rank may are dropped.
2. In the fastest one, blocks are moved from stage to stage as long as that is faster.
3. The fastest in simulation wins, so it is never slower than a named schedule that fits.

A searched order is made for the costs of the stages (list_scheduling.py). A partition is the number
of blocks of each stage; the balanced partition gives the ranks equal time as far as it can.

Every rank decides the same: it does the same arithmetic on the same numbers. Read
list_scheduling.py first, which defines a `Task`, the input of the search.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations

from config.messages import UserError
from config.schema import Config, Layout, ModelShape
from schedules.list_scheduling import Task, task_of
from schedules.long_schedule import LongSchedule
from schedules.orders import SEARCHED
from schedules.partition import StageCosts, rank_of_stages
from schedules.schedule import ScheduleError

# Steps 1 and 2 simulate at most this many micro-batches for each rank, and step 3 simulates all.
SCREENED = 4
MOVED_ACTIONS = 400_000  # step 2 ends when its simulations together have had this many actions
# The schedules that are tried: name, and number of stages on each rank.
TRIED = [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("searched", 1), ("zb-v", 2), ("searched-v", 2)]
TRIED += [("interleaved", virtual) for virtual in (2, 3, 4)]


@dataclass(frozen=True)
class Choice:
    """A schedule that was simulated, and the simulation's result.

    virtual: the number of stages on each rank. blocks: the number of blocks of each stage. costs:
    the costs of the stages. seconds: the simulated time of a step, in the unit of the costs. idle:
    the share of the ranks' time in which nothing runs. plain: the choice of 1F1B, to compare with;
    None if 1F1B holds too much.

    The text of a choice, which the log shows, compares it with 1F1B.
    """

    name: str
    virtual: int
    blocks: tuple[int, ...]
    costs: StageCosts
    seconds: float
    idle: float
    plain: "Choice | None" = None

    def __str__(self) -> str:
        """Return the choice for the log: schedule, blocks of each stage, and gain over 1F1B.

        `plain` is the choice of 1F1B with the same task, or None if 1F1B holds too much.
        """
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
    """Return the config with `--schedule auto` replaced, and the choice (None if it was not auto).

    The choice is made for the largest batch of this run: config.levels has the sizes that the batch
    takes in turn. Called at the start of a run, after --schedule-costs measured has been replaced
    by numbers.
    """
    largest = max(level.batch for level in config.levels)
    count = config.micro_batches(largest)
    layout, choice = decide_layout(config.model, config.layout, count, device)
    return replace(config, layout=layout), choice


def decide_layout(
    model: ModelShape,
    layout: Layout,
    micro_batches: int,
    device: str = "cuda",
) -> tuple[Layout, Choice | None]:
    """Return the layout with `--schedule auto` replaced, and the choice that was made for it.

    The choice is None if there was none to make: the schedule was not auto, or pp is 1. Called by
    `decide` and by the planner, for one number of micro-batches. Raise UserError for
    `--schedule-costs measured`, ScheduleError if no schedule fits.
    """
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
    # The option --virtual-stages is for interleaved alone, so other schedules leave it as it is.
    virtual = choice.virtual if choice.name == "interleaved" else layout.virtual_stages
    blocks = ",".join(map(str, choice.blocks))
    return replace(layout, schedule=choice.name, virtual_stages=virtual, partition=blocks), choice


def note(layout: Layout, choice: Choice) -> str:
    """Return the line for the log about a layout and the choice that `decide_layout` made for it.

    Called at the start of a run, and by the planner and the rehearsal.
    """
    return f"--schedule auto, costs {layout.schedule_costs}: {choice}"


@lru_cache(maxsize=256)
def search(task: Task) -> Choice:
    """Return the fastest schedule that holds no more than the task's limit.

    All candidates are simulated with few micro-batches first, to drop those that hold too much and
    to move blocks in the fastest one. Then the rest is simulated as the run has it, with all its
    micro-batches. Raise ScheduleError if every schedule holds more than the limit.
    """
    # Every candidate is simulated with `few` micro-batches. `_priced` returns None for a schedule
    # that holds too much.
    few = min(task.micro_batches, SCREENED * task.ranks)
    screened = [_priced(task, *candidate, few) for candidate in _candidates(task)]
    fitting = [choice for choice in screened if choice]
    # Blocks are moved in the fastest schedule, unless --partition gives the blocks of each stage.
    if fitting and not task.blocks:
        fitting.append(_moved(task, min(fitting, key=_seconds), few))
    # The schedules that fit are simulated again, with all micro-batches. A schedule that holds too
    # much then, as gpipe may, is dropped now.
    simulated = [_priced(task, c.name, c.virtual, c.blocks, None) for c in fitting]
    choices = [choice for choice in simulated if choice]
    if not choices:
        raise ScheduleError(f"every schedule of {task.ranks} ranks holds more than its limit")
    plain = next((choice for choice in choices if choice.name == "1f1b"), None)
    return replace(min(choices, key=_seconds), plain=plain)


def _seconds(choice: Choice) -> float:
    """Return the seconds of a choice, the key by which choices are compared."""
    return choice.seconds


def _candidates(task: Task) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Yield the schedules to try: name, number of stages per rank, and blocks of each stage.

    If --partition gives the blocks, only named schedules with one stage per rank are tried. Else
    all schedules of TRIED are tried, with the balanced partition, but for those with more stages
    than the model can fill.
    """
    for name, virtual in TRIED:
        if task.blocks:
            if virtual == 1 and name not in SEARCHED:
                yield name, virtual, task.blocks
        # A schedule that has too few blocks for its stages is not tried. The first and the last
        # stage may be without a block, because they have the embedding and the head.
        elif task.ranks * virtual <= task.layers + 2:
            yield name, virtual, task.balanced(rank_of_stages(name, task.ranks, virtual))


def _priced(
    task: Task,
    name: str,
    virtual: int,
    blocks: tuple[int, ...],
    few: int | None,
) -> Choice | None:
    """Simulate a schedule and return it as a choice; return None if a rank would hold too much.

    few: the number of micro-batches to simulate; None: all micro-batches of the task.
    """
    count = few or task.micro_batches
    costs = task.costs(name, blocks)
    order = LongSchedule(name, task.ranks, count, virtual, costs if name in SEARCHED else None)
    try:
        held = order.most_held([stage.held for stage in costs.stages])
    except ScheduleError:
        # No order can be searched, because the limit is less than one micro-batch takes.
        return None
    if max(held) > task.limit * (1 + 1e-9):  # 1e-9 allows for rounding
        return None
    # In zb-h1, zb-v and the searched orders, an action W computes the gradients of weights.
    splits_backward = name.startswith(("zb", "searched"))
    seconds = order.makespan(costs.seconds(splits_backward), task.transfer)
    # The time in which ranks compute. The rest of the ranks' time until the end is idle.
    busy = count * sum(stage.seconds for stage in costs.stages)
    return Choice(name, virtual, blocks, costs, seconds, 1 - busy / (seconds * task.ranks))


def _moved(task: Task, best: Choice, micro_batches: int) -> Choice:
    """Return the choice after moving single blocks from stage to stage as long as that is faster.

    Every move is simulated with `micro_batches` micro-batches, and kept if the step gets faster.
    The search ends if no move between any two stages does so, or at the limit MOVED_ACTIONS.
    """
    stages = len(best.blocks)
    # MOVED_ACTIONS limits the actions of all simulations together. The simulation of one move has
    # an F, B and W for each stage and micro-batch.
    moves_to_try = MOVED_ACTIONS // (3 * stages * micro_batches)
    improved = True
    while improved:
        improved = False
        for source, target in permutations(range(stages), 2):
            if best.blocks[source] == 0 or moves_to_try <= 0:
                continue
            moves_to_try -= 1
            blocks = list(best.blocks)
            blocks[source] -= 1
            blocks[target] += 1
            choice = _priced(task, best.name, best.virtual, tuple(blocks), micro_batches)
            if choice and choice.seconds < best.seconds * (1 - 1e-9):
                best = choice
                improved = True
    return best
