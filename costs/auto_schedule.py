"""Decides `--schedule auto`: the fastest named schedule, with its number of stages and partition.

    config, choice = decide(config, "cuda")     choice is None unless --schedule is auto

Every named schedule is priced as the planner prices a layout that has it: the same seconds, the
same simulation, the same memory. Schedules that hold more than MOST_HELD times what the fullest
rank of 1F1B holds are left out. The fastest of the others is chosen.

A plan and a run decide the same, and so does every rank: they do the same arithmetic on the same
numbers, those of a reference machine (partition_costs.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from config.schema import Config, Layout
from config.timeline import Timeline
from costs import memory
from costs.job import Job
from costs.partition_costs import blocks_of, costs_of, reference, specs_of
from costs.step_time import action_seconds, pipeline_time
from schedules.partition import balanced, placement

# The schedules that are tried: name, and number of stages on each rank.
TRIED = [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("zb-v", 2)]
TRIED += [("interleaved", virtual) for virtual in (2, 3, 4)]
# A schedule is left out if a rank holds more than this many times the activations of the fullest
# rank of 1F1B. It is above 1 because every rank of zb-h1 holds as many micro-batches as the first
# rank of 1F1B, so that the last rank, which has the head's logits too, holds a few per cent more.
MOST_HELD = 1.1


@dataclass(frozen=True)
class PricedSchedule:
    """A schedule that was simulated, and the simulation's result.

    virtual: the number of stages on each rank. blocks: the number of blocks of each stage. seconds:
    the simulated time of the pipeline. idle: the share of the ranks' time in which nothing runs.
    held: what the fullest rank holds beside weights and state, relative to 1F1B. plain: 1F1B, to
    compare with. faster: the fastest schedule that was left out because it holds too much, if it is
    faster than this one, else None.
    """

    name: str
    virtual: int
    blocks: tuple[int, ...]
    seconds: float
    idle: float
    held: float
    plain: "PricedSchedule | None" = None
    faster: "PricedSchedule | None" = None

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


def decide(config: Config, kind: str) -> tuple[Config, PricedSchedule | None]:
    """Return the config with `--schedule auto` replaced, and the choice (None if it was not auto).

    The choice is made for the largest batch of this run: Timeline.levels has the sizes that it
    takes in turn. kind: "cuda" or "cpu". Called at the start of a run.
    """
    if config.layout.schedule != "auto":
        return config, None
    largest = max(level.batch for level in Timeline(config).levels)
    training = replace(config.training, global_batch_size=largest)
    layout, choice = decide_layout(Job(config.model, config.layout, training, reference(kind)))
    return replace(config, layout=layout), choice


def decide_with_note(config: Config, kind: str) -> tuple[Config, list[str]]:
    """Return the config with `--schedule auto` replaced, and lines for the log about the choice."""
    config, choice = decide(config, kind)
    return config, [note(choice)] if choice else []


def decide_layout(job: Job) -> tuple[Layout, PricedSchedule | None]:
    """Return the job's layout with `--schedule auto` replaced, and the choice that was made.

    The choice is None if there was none to make: the schedule was not auto, or pp is 1.
    """
    layout = job.layout
    if layout.schedule != "auto":
        return layout, None
    if layout.pp == 1:
        return replace(layout, schedule="1f1b"), None
    # A run without --ep has ep 1; a plan prints the --ep that it has found.
    layout = replace(layout, ep=layout.ep or 1)
    choice = fastest(job._replace(layout=layout, machine=reference(job.machine.kind)))
    # The option --virtual-stages is for interleaved alone, so other schedules leave it as it is.
    virtual = choice.virtual if choice.name == "interleaved" else job.layout.virtual_stages
    blocks = ",".join(map(str, choice.blocks))
    changes: dict[str, Any] = {
        "schedule": choice.name,
        "virtual_stages": virtual,
        "partition": blocks,
    }
    return replace(job.layout, **changes), choice


def note(choice: PricedSchedule) -> str:
    """Return the line for the log about a choice, of a run, the planner or the rehearsal."""
    return f"--schedule auto: {choice}"


def fastest(job: Job) -> PricedSchedule:
    """Return the fastest named schedule that holds at most MOST_HELD times what 1F1B holds.

    1F1B is always among them. The first one of TRIED is taken of schedules that are equally fast.
    """
    tried = []
    limit = 0.0  # the bytes that the fullest rank of 1F1B holds, known after the first candidate
    for virtual, layout in _candidates(job):
        candidate = job._replace(layout=layout)
        seconds, idle = pipeline_time(candidate, actions=action_seconds(candidate))
        held = max(stage.activations + stage.working for stage in memory.stages(candidate))
        limit = limit or held
        blocks = tuple(spec.blocks for spec in specs_of(candidate))
        one = PricedSchedule(layout.schedule, virtual, blocks, seconds, idle, held / limit)
        tried.append(one)
    plain = tried[0]
    fitting = [one for one in tried if one is plain or one.held <= MOST_HELD]
    best = min(fitting, key=_seconds)
    faster = min(tried, key=_seconds)
    return replace(best, plain=plain, faster=faster if faster.seconds < best.seconds else None)


def _seconds(choice: PricedSchedule) -> float:
    """Return the seconds of a choice, the key by which choices are compared."""
    return choice.seconds


def _candidates(job: Job) -> Iterator[tuple[int, Layout]]:
    """Yield the layouts to try, 1F1B first, each with its number of stages per rank.

    If --partition gives the blocks, only schedules with one stage per rank are tried. Schedules
    with more stages than the model can fill are not.
    """
    asked = job.layout
    is_balanced = asked.partition == "balanced"
    one_stage = job._replace(layout=replace(asked, schedule="1f1b"))
    fixed = ",".join(map(str, blocks_of(one_stage)))  # the blocks that --partition gives
    for name, virtual in TRIED:
        # With more micro-batches than ranks GPipe holds more than the fullest rank of 1F1B, and its
        # order would be long to simulate.
        if name == "gpipe" and job.micro_batches > asked.pp:
            continue
        virtual_stages: Any = virtual if name == "interleaved" else None
        layout = replace(asked, schedule=name, virtual_stages=virtual_stages, partition=fixed)
        if is_balanced:
            # The first and the last stage may be without a block, because they have the embedding
            # and the head.
            if name != "1f1b" and layout.stages > job.model.layers + 2:
                continue
            blocks = balanced(job.model.layers, placement(layout), costs_of(job))
            layout = replace(layout, partition=",".join(map(str, blocks)))
        elif virtual > 1:
            continue
        yield virtual, layout
