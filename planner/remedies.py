"""The flags that would win back a bubble or uneven stages, and how much: simulated.

Another schedule, half the micro-batch and another partition run the measured passes in their order
(schedules.simulation). What a flag wins is of the whole step, and can be more than its cause alone
takes.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from config.command_line import to_words
from config.schema import Config, Layout
from schedules.orders import build
from schedules.partition import balanced, part_costs, placement, stage_specs
from schedules.schedule import Schedule
from schedules.simulation import makespan

Seconds = Mapping[tuple[str, int], float]  # of a pass, by kind and stage
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")


class Remedy(NamedTuple):
    """The seconds of a step that a change would win, and its flags."""

    seconds: float
    flags: str


def of_passes(
    config: Config, order: Schedule, passes: Seconds, sent: float, device: str
) -> dict[str, Remedy]:
    """Against bubble and imbalance: the passes in another order, or over other stages.

    passes: measured, with their collectives; sent: seconds of a message between stages.
    """
    layout, model = config.layout, config.model
    if layout.pp == 1 or order.vocabulary:
        return {}
    now = makespan(order, passes, sent)
    found = {"bubble": Remedy(0.0, "")}
    for other, new, new_passes in _orders(config, order, passes):
        won = now - makespan(new, new_passes, sent)
        found["bubble"] = max(found["bubble"], Remedy(won, changes(layout, other)))
    if layout.stages_per_rank == 1:
        costs = part_costs(model, device)
        blocks = ",".join(map(str, balanced(model.layers, placement(layout), costs)))
        whole = defaultdict[str, float](float)  # of a micro-batch through all stages, by kind
        for (kind, _), seconds in passes.items():
            whole[kind] += seconds
        even: dict[tuple[str, int], float] = {}
        for spec in stage_specs(model, replace(layout, partition=blocks), costs):
            for kind, seconds in whole.items():
                even[kind, spec.index] = spec.share * seconds
        found["imbalance"] = Remedy(now - makespan(order, even, sent), f"--partition {blocks}")
    return found


def _orders(
    config: Config, order: Schedule, passes: Seconds
) -> Iterator[tuple[Layout, Schedule, Seconds]]:
    """Layouts with another schedule or half the micro-batch, each with its order and passes."""
    layout = config.layout
    count = 1 + max(action.micro_batch for action in order.ranks[0])
    for name in SCHEDULES:
        other = layout if name == layout.schedule else replace(layout, schedule=name)
        for parts in (1, 2):
            size, rest = divmod(layout.micro_batch_size, parts)
            new = replace(other, micro_batch_size=size)
            if rest or new == layout or config.model.layers < new.stages:
                continue
            new_order = build(name, layout.pp, count * parts, new.stages_per_rank)
            yield new, new_order, _fitted(passes, order, new_order, parts)


def _fitted(passes: Seconds, order: Schedule, new: Schedule, parts: int) -> Seconds:
    """Seconds of a new schedule's passes: a rank's work in equal parts over its stages, and half of
    a whole backward for weights.
    """
    found: dict[tuple[str, int], float] = {}
    for rank in range(len(order.ranks)):
        stages = new.stages_on(rank)
        seconds = dict.fromkeys("FBW", 0.0)  # of one stage
        for (kind, stage), whole in passes.items():
            if order.rank_of[stage] == rank:
                seconds[kind] += whole / len(stages) / parts
        if new.split and not order.split:
            seconds["B"] /= 2
            seconds["W"] = seconds["B"]
        elif order.split and not new.split:
            seconds["B"] += seconds["W"]
        for stage in stages:
            for kind, value in seconds.items():
                found[kind, stage] = value
    return found


def changes(before: Layout, after: Layout) -> str:
    """Return the words that change a layout, but for dp, which follows."""
    names = [field.name for field in fields(Layout)]
    kept = [name for name in names if getattr(before, name) == getattr(after, name)]
    nothing: dict[str, Any] = dict.fromkeys(kept)
    return " ".join(to_words(replace(after, **nothing), "dp", always=names))
