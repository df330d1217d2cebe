"""Decides `--schedule auto`: the fastest named schedule, with its number of stages and partition.

    config, choice = decide(config, "cuda")     choice is None unless --schedule is auto

Every named schedule is simulated with the run's micro-batches and the costs of its stages; blocks
are divided among the stages by the balanced partition. Schedules of which a rank holds more than
MOST_HELD times the activations of the fullest rank of 1F1B are left out. The fastest of the others
is chosen.

Every rank decides the same: it does the same arithmetic on the same numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from config.errors import UserError
from config.schema import Config, Layout, ModelShape
from schedules.long_schedule import LongSchedule
from schedules.partition import (
    PartCosts,
    PassCosts,
    balanced,
    blocks_per_stage,
    part_costs,
    parts_of,
    rank_of_stages,
    sent_bytes,
)
from schedules.simulation import Seconds

# The schedules that are tried: name, and number of stages on each rank.
TRIED = [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("zb-v", 2)]
TRIED += [("interleaved", virtual) for virtual in (2, 3, 4)]
# The number of FLOPs that take as long as sending one byte between stages: an A100's 312 TFLOP/s
# divided by a link's 25 GB/s, and a CPU core's 80 GFLOP/s divided by gloo's 2 GB/s.
FLOPS_PER_SENT_BYTE = {"cuda": 12500.0, "cpu": 40.0}
# A schedule is left out if a rank holds more than this many times the activations of the fullest
# rank of 1F1B. It is above 1 because every rank of zb-h1 holds as many micro-batches as the first
# rank of 1F1B, so that the last rank, which has the head's logits too, holds a few per cent more.
MOST_HELD = 1.1
NOTHING = PassCosts(0.0, 0.0, 0.0)  # the costs of an embedding or a head that a stage does not have


@dataclass(frozen=True)
class Task:
    """What --schedule auto decides from: the costs of a model's parts, and its pipeline.

    parts: costs of embedding, one block, and head. layers: the number of blocks. ranks: the number
    of pipeline ranks. limit: the bytes of activations that the fullest rank of 1F1B holds.
    transfer: the time of a message between ranks. Times and bytes are for one token, and the unit
    of times is FLOPs. blocks: the number of blocks of each stage if --partition gives them, with
    one stage on each rank; else None. tied: whether the head uses the embedding's matrix.
    """

    parts: tuple[PassCosts, PassCosts, PassCosts]
    layers: int
    ranks: int
    micro_batches: int
    limit: float
    transfer: float = 0.0
    blocks: tuple[int, ...] | None = None
    tied: bool = False

    def stages(self, name: str, blocks: Sequence[int]) -> tuple[PassCosts, ...]:
        """Return the costs of the stages if stage s has `blocks[s]` blocks.

        name: the schedule. If its name ends in -v, rank 0 holds the first and the last stage.
        """
        embedding, block, head = self.parts
        # In a schedule whose name ends in -v, one rank holds embedding and head. If they share a
        # matrix, its gradients are not put off: the head's B computes them too, and W has nothing
        # to do for the head.
        if self.tied and name.endswith("-v"):
            head = head._replace(inputs=head.inputs + head.weights, weights=0.0)
        stages = []
        for stage, count in enumerate(blocks):
            first = embedding if stage == 0 else NOTHING
            last = head if stage == len(blocks) - 1 else NOTHING
            # Each cost of the stage is the sum over its parts; `fields` gives them cost by cost.
            fields = zip(first, block, last, strict=True)
            sums = [at_first + count * of_block + at_last for at_first, of_block, at_last in fields]
            stages.append(PassCosts(*sums))
        return tuple(stages)

    def balanced(self, rank_of: Sequence[int]) -> tuple[int, ...]:
        """Return the balanced partition: the number of blocks of each stage.

        rank_of: the rank of each stage. A part's time is the sum of the costs of F, B and W.
        """
        return balanced(self.layers, tuple(rank_of), PartCosts(*(p.seconds for p in self.parts)))


@lru_cache(maxsize=256)
def task_of(model: ModelShape, layout: Layout, device: str, micro_batches: int) -> Task:
    """Return what a layout with `--schedule auto` is decided from.

    device: "cuda" or "cpu". The layout's schedule may be any.
    """
    parts = parts_of(model, layout, device)
    with_1f1b = replace(layout, schedule="1f1b")
    blocks_of_1f1b = tuple(blocks_per_stage(model, with_1f1b, part_costs(model, device)))
    # The blocks of each stage if --partition gives them; None: balanced for each schedule.
    fixed = None if layout.partition == "balanced" else blocks_of_1f1b
    transfer = sent_bytes(model) * FLOPS_PER_SENT_BYTE[device]
    # The limit is 0.0 until it is known, at the end.
    task = Task(parts, model.layers, layout.pp, micro_batches, 0.0, transfer, fixed, model.tied)
    # 1F1B may run with two partitions: balanced by the costs of the model's parts as counted, or by
    # the costs in the task, which know recomputation and --schedule-costs. The fuller one counts.
    partitions = [blocks_of_1f1b]
    if not fixed:
        partitions.append(task.balanced(range(layout.pp)))
    limit = 0.0
    for blocks in partitions:
        for stage, costs in enumerate(task.stages("1f1b", blocks)):
            # In 1F1B a stage holds a micro-batch for itself and for each later stage.
            limit = max(limit, (layout.pp - stage) * costs.held)
    return replace(task, limit=limit)


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule that was simulated, and the simulation's result.

    virtual: the number of stages on each rank. blocks: the number of blocks of each stage. stages:
    the costs of the stages. seconds: the simulated time of a step, in the unit of the costs. idle:
    the share of the ranks' time in which nothing runs. held: what the fullest rank holds, in parts
    of the limit. plain: 1F1B, to compare with. faster: the fastest schedule that was left out
    because it holds too much, if it is faster than this one, else None.
    """

    name: str
    virtual: int
    blocks: tuple[int, ...]
    stages: tuple[PassCosts, ...]
    seconds: float
    idle: float
    held: float
    plain: "ScheduleChoice | None" = None
    faster: "ScheduleChoice | None" = None

    @property
    def title(self) -> str:
        """The schedule's name, with its number of stages per rank if there are several."""
        return f"{self.name}, {self.virtual} stages a rank" if self.virtual > 1 else self.name

    def __str__(self) -> str:
        """Return the choice for the log: schedule, blocks of each stage, and gain over 1F1B."""
        text = f"{self.title}, blocks {','.join(map(str, self.blocks))}: "
        if self.plain and self.name != self.plain.name:
            less = 1 - self.seconds / self.plain.seconds
            text += f"{less:.1%} less time than 1F1B in simulation, idle {self.idle:.1%} for "
            text += f"{self.plain.idle:.1%}"
        else:
            text += f"the fastest in simulation, idle {self.idle:.1%}"
        if self.faster:
            less = 1 - self.faster.seconds / self.seconds
            text += f"; {self.faster.title} would take {less:.1%} less, but hold "
            text += f"{self.faster.held:.2f} times the activations of 1F1B's fullest rank"
        return text


def decide(config: Config, device: str) -> tuple[Config, ScheduleChoice | None]:
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
) -> tuple[Layout, ScheduleChoice | None]:
    """Return the layout with `--schedule auto` replaced, and the choice that was made for it.

    The choice is None if there was none to make: the schedule was not auto, or pp is 1. Called by
    `decide` and by the planner, for one number of micro-batches. Raise UserError for
    `--schedule-costs measured`.
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
    choice = fastest(task_of(model, layout, device, micro_batches))
    # The option --virtual-stages is for interleaved alone, so other schedules leave it as it is.
    virtual = choice.virtual if choice.name == "interleaved" else layout.virtual_stages
    blocks = ",".join(map(str, choice.blocks))
    return replace(layout, schedule=choice.name, virtual_stages=virtual, partition=blocks), choice


def note(layout: Layout, choice: ScheduleChoice) -> str:
    """Return the line for the log about a layout and the choice that `decide_layout` made for it.

    Called at the start of a run, and by the planner and the rehearsal.
    """
    return f"--schedule auto, costs {layout.schedule_costs}: {choice}"


@lru_cache(maxsize=256)
def fastest(task: Task) -> ScheduleChoice:
    """Return the fastest named schedule that holds at most MOST_HELD times the task's limit.

    1F1B is always among them. The first one of TRIED is taken of schedules that are equally fast.
    """
    tried = [_simulated(task, *candidate) for candidate in _candidates(task)]
    plain = tried[0]
    fitting = [one for one in tried if one is plain or one.held <= MOST_HELD]
    best = min(fitting, key=_seconds)
    faster = min(tried, key=_seconds)
    return replace(best, plain=plain, faster=faster if faster.seconds < best.seconds else None)


def _seconds(choice: ScheduleChoice) -> float:
    """Return the seconds of a choice, the key by which choices are compared."""
    return choice.seconds


def _candidates(task: Task) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Yield the schedules to try, 1F1B first: name, stages per rank, and blocks of each stage.

    If --partition gives the blocks, only schedules with one stage per rank are tried. Schedules
    with more stages than the model can fill are not.
    """
    for name, virtual in TRIED:
        # With more micro-batches than ranks GPipe holds more than the fullest rank of 1F1B, and its
        # order would be long to simulate.
        if name == "gpipe" and task.micro_batches > task.ranks:
            continue
        if task.blocks:
            if virtual == 1:
                yield name, virtual, task.blocks
        # The first and the last stage may be without a block, because they have the embedding and
        # the head.
        elif name == "1f1b" or task.ranks * virtual <= task.layers + 2:
            yield name, virtual, task.balanced(rank_of_stages(name, task.ranks, virtual))


def _simulated(task: Task, name: str, virtual: int, blocks: tuple[int, ...]) -> ScheduleChoice:
    """Simulate a schedule and return it as a choice."""
    stages = task.stages(name, blocks)
    order = LongSchedule(name, task.ranks, task.micro_batches, virtual)
    held = max(order.most_held([stage.held for stage in stages])) / task.limit
    splits_backward = name.startswith("zb")  # an action W computes the gradients of weights
    seconds = order.makespan(action_seconds(stages, splits_backward), task.transfer)
    # The time in which ranks compute. The rest of the ranks' time until the end is idle.
    busy = task.micro_batches * sum(stage.seconds for stage in stages)
    idle = 1 - busy / (seconds * task.ranks)
    return ScheduleChoice(name, virtual, blocks, stages, seconds, idle, held)


def action_seconds(stages: Sequence[PassCosts], split: bool) -> Seconds:
    """Return the seconds of an action by (kind, stage), for simulation.py.

    split: whether W is an action of its own; otherwise B includes the seconds of W.
    """
    seconds = {}
    for stage, costs in enumerate(stages):
        seconds["F", stage] = costs.forward
        seconds["B", stage] = costs.inputs
        seconds["W", stage] = costs.weights
        if not split:
            seconds["B", stage] += costs.weights
    return seconds
