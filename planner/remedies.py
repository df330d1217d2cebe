"""For causes of lost time the flag that would win most of it back, and how much: calculated.

A schedule, half the micro-batch or a partition runs the measured passes through its order
(schedules.simulation); another layout takes the planner's step time of both, scaled to the run's.
What a flag wins is of the whole step, and can be more than its cause alone takes.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, NamedTuple

from config import validation
from config.command_line import to_words
from config.messages import UserError
from config.schema import Config, Layout
from planner.job import Job
from planner.step_time import predict
from schedules.partition import balanced_partition, part_costs, stage_specs
from schedules.schedule import ORDERS, Schedule, ScheduleError, build
from schedules.simulation import simulate

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
    if config.layout.pp == 1 or order.vocabulary:
        return {}
    now = _makespan(order, passes, sent)
    others = [Remedy(now - s, text) for text, s in _orders(config, order, passes, sent)]
    found = {"bubble": max(others, default=Remedy(0.0, ""))}
    if config.layout.stages_per_rank == 1:
        model, layout, costs = config.model, config.layout, part_costs(config.model, device)
        blocks = ",".join(map(str, balanced_partition(model.layers, layout.pp, costs)))
        after = stage_specs(model, replace(layout, partition=blocks), costs)
        rate = {kind: sum(s for (k, _), s in passes.items() if k == kind) for kind, _ in passes}
        even = {(kind, each.index): rate[kind] * each.share for kind in rate for each in after}
        found["imbalance"] = Remedy(now - _makespan(order, even, sent), f"--partition {blocks}")
    return found


def _makespan(order: Schedule, passes: Seconds, sent: float) -> float:
    return max(slot.end for row in simulate(order, passes, sent) for slot in row)


def _orders(
    config: Config, order: Schedule, passes: Seconds, sent: float
) -> Iterator[tuple[str, float]]:
    """Flags of other schedules and of half the micro-batch, each with the seconds of the passes."""
    layout, count = config.layout, len({action.micro_batch for action in order.ranks[0]})
    halves = (1, 2) if layout.micro_batch_size % 2 == 0 else (1,)
    # A searched order is found anew for other micro-batches: none is built here.
    for name in dict.fromkeys((*SCHEDULES, *{layout.schedule} & ORDERS.keys())):
        other = layout if name == layout.schedule else replace(layout, schedule=name)
        for parts in halves:
            new = replace(other, micro_batch_size=layout.micro_batch_size // parts)
            if new == layout or config.model.layers < new.stages:
                continue
            rows = build(name, layout.pp, count * parts, new.stages_per_rank)
            yield changes(layout, new), _makespan(rows, _fitted(passes, order, rows, parts), sent)


def _fitted(passes: Seconds, order: Schedule, new: Schedule, parts: int) -> Seconds:
    """Seconds of a new schedule's passes: a rank's work in equal parts over its stages, and half of
    a whole backward for weights.
    """
    found: dict[tuple[str, int], float] = {}
    for rank in range(len(order.ranks)):
        own, stages = order.stages_on(rank), new.stages_on(rank)
        forward, backward, weights = (
            sum(passes.get((kind, s), 0.0) for s in own) / len(stages) / parts for kind in "FBW"
        )
        whole = backward + weights
        backward = backward if order.split and new.split else whole / (2 if new.split else 1)
        for s in stages:
            found |= {("F", s): forward, ("B", s): backward, ("W", s): whole - backward}
    return found


def of_layout(job: Job, config: Config, measured: float) -> dict[str, Remedy]:
    """Against collectives, messages, recomputation and the update: another layout."""
    at, found = job.layout, {}
    half_tp, half_pp = {"tp": at.tp // 2, "dp": 2 * at.dp}, {"pp": at.pp // 2, "dp": 2 * at.dp}
    plain = {"recompute_layers": None, "recompute_blocks": None}
    tried: dict[str, list[dict[str, Any]]] = {
        "tp": [{"sequence_parallel": not at.sequence_parallel}, half_tp],
        "dp": [{"overlap_param_gather": True}, {"zero": 1}],
        "optimizer": [{"zero": 1}],
        "recompute": [plain | {"recompute": kind} for kind in ("none", "selective")],
        "p2p": [half_pp | {"partition": "balanced"}],
    }
    before = predict(*job).seconds
    for cause, ways in tried.items():
        found[cause] = Remedy(0.0, "")
        for way in ways:
            layout = replace(at, **way)
            with suppress(UserError, ScheduleError):
                if layout.tp * layout.pp * layout.dp != at.tp * at.pp * at.dp:
                    continue
                validation.check_any_length(replace(config, layout=layout), job.gpus)
                after = predict(*job._replace(layout=layout))
                won = measured * (1 - after.seconds / before) if after.fits else 0.0
                found[cause] = max(found[cause], Remedy(won, changes(at, layout)))
    return found


def changes(before: Layout, after: Layout) -> str:
    """What to type to change a layout, but for dp, which follows."""
    names = [f.name for f in fields(Layout)]
    kept = [name for name in names if getattr(before, name) == getattr(after, name)]
    nothing: dict[str, Any] = dict.fromkeys(kept)
    return " ".join(to_words(replace(after, **nothing), "dp", always=names))
