"""Sweeps along one axis, the largest model that trains, the fewest ranks that hold one.

    runs, rejected = sweep("heads", config, machine, ranks=8, values=[])
    largest(config, machine, ranks, attempt)       # attempt(candidate) -> whether it trained

A sweep changes one thing and keeps the rest: the layout is the given one, or the planner's best.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from config.messages import UserError
from config.model_stats import parameters
from config.schema import Config, ModelShape, Training
from config.validation import check
from planner import hardware, layouts
from planner.layouts import Rejected
from planner.step_time import predict
from tuner import search_space
from tuner.search_space import Candidate

SWEEPS = (
    "topology",
    "micro-batch",
    "global-batch",
    "heads",
    "hidden",
    "recompute",
    "zero",
    "precision",
    "optimizer",
)
AXES = {"micro-batch": "micro_batch_size", "recompute": "recompute", "zero": "zero"}
HEAD_SIZES = range(16, 257)
LARGEST_STEP = 64  # of the ladder of model sizes: a model some 10^12 parameters larger


def sweep(
    name: str, config: Config, machine: hardware.Machine, ranks: int, given: dict, values: list
) -> tuple[list[Candidate], list[Rejected]]:
    """The runs of one sweep in order, and those of its values that cannot be, with reasons.

    `given` are layout fields that are held; `values` replace the sweep's own. UserError if a
    value cannot be understood.
    """
    if name == "topology":
        held = {
            axis: [getattr(config.layout, axis)]
            for axis in (*search_space.INNER, *search_space.OUTER)
        }
        return search_space.candidates(config, machine, ranks, held | given)
    layout = _layout(config, machine, ranks, given, AXES.get(name))
    base = replace(config, layout=layout)
    runs, rejected = [], []
    for value in values or _values(name, base):
        try:
            runs.append(candidate(_changed(name, base, value), machine))
        except UserError as error:
            rejected.append(Rejected({name: value}, str(error)))
    return runs, rejected


def candidate(config: Config, machine: hardware.Machine) -> Candidate:
    """A run whose layout has its dp, checked and predicted; UserError if it cannot be."""
    layout, training = config.layout, config.training
    length = replace(training, steps=training.steps or 1, train_samples=None)
    check(replace(config, training=length), layout.tp * layout.pp * layout.dp)
    return Candidate(config, predict(config.model, layout, training, machine))


def _layout(config: Config, machine, ranks: int, given: dict, free: str | None):
    """The layout to hold: the given fields, and for the rest what the planner ranks first."""
    axes = [axis for axis in (*search_space.INNER, *search_space.OUTER) if axis != free]
    held = {axis: [getattr(config.layout, axis)] for axis in axes} | given
    found, rejected = search_space.candidates(config, machine, ranks, held)
    if not found:
        reason = rejected[0].reason if rejected else "there is none"
        raise UserError(f"no layout to sweep on {ranks} ranks: {reason}")
    return found[0].config.layout


def _values(name: str, config: Config) -> list:
    """What a sweep tries if nothing is said."""
    model, batch, tp = config.model, config.training.global_batch_size, config.layout.tp
    if name == "micro-batch":
        return list(layouts.MICRO_BATCHES)
    if name in ("recompute", "zero"):
        return search_space.choices(name)
    if name == "global-batch":
        return [size for size in (batch // 4, batch // 2, batch, 2 * batch, 4 * batch) if size]
    if name == "heads":
        sizes = [d for d in HEAD_SIZES if model.hidden % d == 0]
        return [h for h in sorted({model.hidden // d for d in sizes}) if h % tp == 0]
    if name == "hidden":
        step = math.lcm(model.heads, 8 * tp, 2)
        middle = max(1, round(model.hidden / step))
        around = {round(middle * share) for share in (0.5, 0.75, 0.875, 1, 1.125, 1.25, 1.5)}
        return sorted(step * count for count in around if count)
    field = next(f for f in dataclasses.fields(Training) if f.name == name)
    return list(field.metadata["choices"])


def _changed(name: str, config: Config, value) -> Config:
    """The run with the one thing changed."""
    if name in AXES:
        return replace(config, layout=replace(config.layout, **{AXES[name]: value}))
    if name == "global-batch":
        return replace(config, training=replace(config.training, global_batch_size=value))
    if name in ("heads", "hidden"):
        return replace(config, model=resized(config.model, **{name: value}))
    return replace(config, training=replace(config.training, **{name: value}))


def resized(model: ModelShape, **changes: int) -> ModelShape:
    """The shape with other sizes; what followed from the old ones follows from the new."""
    derived = {}
    if model.kv_heads == model.heads:
        derived["kv_heads"] = None
    if model.ffn_hidden == model.default_ffn():
        derived["ffn_hidden"] = None
    return replace(model, **(derived | changes))


# ------------------------------------------------------------------------------------------------
# How large, how few: by real runs
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """What a bisection found: the last run that trained, and the first that did not."""

    best: Candidate | None
    beyond: Candidate | None


def largest(
    config: Config,
    machine: hardware.Machine,
    ranks: int,
    given: dict,
    attempt: Callable[[Candidate], bool],
) -> Bound:
    """The largest model of `config`'s proportions that trains, by bisection over a ladder of sizes.

    Step k is (1 + k/4) times as wide and as deep as the given model, so about that cubed as large.
    """
    low, high, step = -1, None, 0  # the largest that trained, the smallest that did not
    tried: dict[int, Candidate] = {}
    while high is None or high - low > 1:
        tried[step] = lean(scaled(config, step), machine, ranks, given)
        if attempt(tried[step]):
            low = step
        else:
            high = step
        if high is None and low >= LARGEST_STEP:
            break
        step = 2 * low + 1 if high is None else (low + high) // 2
        if step in (low, high):
            break
    return Bound(tried.get(low), tried.get(high))


def scaled(config: Config, step: int) -> Config:
    """The model (1 + step/4) times as wide and deep, of the same head size."""
    model, factor = config.model, 1 + step / 4
    heads = max(1, round(model.heads * factor))
    kv_heads = heads if model.kv_heads == model.heads else model.kv_heads
    heads = -(-heads // kv_heads) * kv_heads
    ffn = None if model.ffn_hidden == model.default_ffn() else round(model.ffn_hidden * factor)
    changes = {"layers": max(1, round(model.layers * factor)), "hidden": heads * model.head_size}
    changes |= {"heads": heads, "kv_heads": kv_heads, "ffn_hidden": ffn}
    return replace(config, model=replace(model, **changes))


def fewest(
    config: Config,
    machine: hardware.Machine,
    ranks: int,
    given: dict,
    attempt: Callable[[Candidate], bool],
) -> Bound:
    """The fewest ranks, of the powers of two up to `ranks`, on which the model trains."""
    counts = [2**n for n in range(ranks.bit_length()) if 2**n <= ranks]
    runs = []
    for count in counts:
        try:
            runs.append(lean(config, machine, count, given))
        except UserError:  # this many cannot be laid out at all, so they cannot hold it
            continue
    low, high = -1, len(runs)  # runs[low] did not train, runs[high] did
    while high - low > 1:
        middle = (low + high) // 2
        if attempt(runs[middle]):
            high = middle
        else:
            low = middle
    best = runs[high] if high < len(runs) else None
    return Bound(best, runs[low] if low >= 0 else None)


def lean(config: Config, machine: hardware.Machine, ranks: int, given: dict) -> Candidate:
    """The layout that is predicted to need the least memory on its fullest rank.

    The planner's memory is not believed here, only compared: runs decide what fits.
    """
    roomy = replace(machine, memory=math.inf)
    held = {axis: [getattr(config.layout, axis)] for axis in search_space.OUTER}
    smallest = {"micro_batch_size": [1]} | held | given
    found, rejected = search_space.candidates(config, roomy, ranks, smallest)
    if not found:
        size = parameters(config.model) / 1e6
        reason = rejected[0].reason if rejected else "there is none"
        raise UserError(f"no layout of {size:.1f} million parameters on {ranks} ranks: {reason}")
    return min(found, key=lambda c: max(stage.total for stage in c.prediction.memory))
