"""Sweeps along one axis, the largest model that trains, the fewest ranks that train one.

    runs, rejected = sweep("heads", config, machine, ranks=8, given={}, values=[])
    largest_model(config, machine, ranks, given, attempt)  # attempt(candidate) -> whether it ran

A sweep changes one option and keeps the others: the layout is the given one, or the planner's best.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from config.command_line import reshape
from config.messages import UserError
from config.model_stats import parameters
from config.schema import Config, Layout, Training
from config.validation import check_any_length
from planner import hardware, layouts
from planner.layouts import Rejected
from planner.step_time import predict
from tuner import search_space
from tuner.search_space import INNER_AXES, OUTER_AXES, Candidate

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
LAYOUT_SWEEPS = {"micro-batch": "micro_batch_size", "recompute": "recompute", "zero": "zero"}
HEAD_SIZES = range(16, 257)
LARGEST_STEP = 64  # of the sizes that `largest_model` tries: some 5000 times the parameters


def tried_values(texts: list[str]) -> dict[str, list]:
    """The values of each --try AXIS=V,V by axis; UserError for an unknown axis or value."""
    known = [*search_space.AXES, *(name.replace("-", "_") for name in SWEEPS)]
    found: dict[str, list] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.replace("-", "_")
        if name not in known or not values:
            axes = ", ".join(search_space.AXES)
            raise UserError(f"--try takes AXIS=V,V with AXIS one of {axes}, not {text!r}")
        found[name] = [_tried_value(name, value) for value in values.split(",")]
    return found


def _tried_value(name: str, text: str) -> bool | int | str:
    """One value of an axis, in the type of its option."""
    if text in ("true", "false"):
        return text == "true"
    value = int(text) if text.isdigit() else text
    field = {f.name: f for f in dataclasses.fields(Layout)}.get(name)
    if field and field.metadata["choices"] and value not in field.metadata["choices"]:
        choices = ", ".join(map(str, field.metadata["choices"]))
        raise UserError(f"--try {name}: {text} is not one of {choices}")
    return value


def sweep(
    name: str, config: Config, machine: hardware.Machine, ranks: int, given: dict, values: list
) -> tuple[list[Candidate], list[Rejected]]:
    """The runs of one sweep in order, and its values that cannot run, with reasons.

    `given` are layout fields that are held; `values` replace the sweep's own. UserError if no
    layout can run.
    """
    if name == "topology":
        held = {axis: [getattr(config.layout, axis)] for axis in (*INNER_AXES, *OUTER_AXES)}
        return search_space.candidates(config, machine, ranks, held | given)
    layout = _layout(config, machine, ranks, given, LAYOUT_SWEEPS.get(name))
    base = replace(config, layout=layout)
    runs, rejected = [], []
    for value in values or _default_values(name, base):
        try:
            runs.append(_candidate(_changed(name, base, value), machine))
        except UserError as error:
            rejected.append(Rejected({name: value}, str(error)))
    return runs, rejected


def _candidate(config: Config, machine: hardware.Machine) -> Candidate:
    """A run whose layout has its dp, checked and predicted; UserError if it cannot run."""
    layout = config.layout
    check_any_length(config, layout.tp * layout.pp * layout.dp)
    return Candidate(config, predict(config.model, layout, config.training, machine))


def _layout(
    config: Config, machine: hardware.Machine, ranks: int, given: dict, swept: str | None
) -> Layout:
    """The layout of a sweep: the given fields, and for the others what the planner ranks first."""
    axes = [axis for axis in (*INNER_AXES, *OUTER_AXES) if axis != swept]
    held = {axis: [getattr(config.layout, axis)] for axis in axes} | given
    found, rejected = search_space.candidates(config, machine, ranks, held)
    if not found:
        reason = rejected[0].reason if rejected else "there is none"
        raise UserError(f"no layout to sweep on {ranks} ranks: {reason}")
    return found[0].config.layout


def _default_values(name: str, config: Config) -> list:
    """What a sweep tries if no values are given."""
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
    """The run with one option changed."""
    if name in LAYOUT_SWEEPS:
        return replace(config, layout=replace(config.layout, **{LAYOUT_SWEEPS[name]: value}))
    if name == "global-batch":
        return replace(config, training=replace(config.training, global_batch_size=value))
    if name in ("heads", "hidden"):
        return replace(config, model=reshape(config.model, {name: value}))
    return replace(config, training=replace(config.training, **{name: value}))


# ------------------------------------------------------------------------------------------------
# The largest model, the fewest ranks: by bisection with real runs
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """What a bisection found: the last run that trained, and the next one, which did not."""

    best: Candidate | None
    failed: Candidate | None


def largest_model(
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
        tried[step] = least_memory(scaled(config, step), machine, ranks, given)
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


def fewest_ranks(
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
            runs.append(least_memory(config, machine, count, given))
        except UserError:  # no layout of this many ranks is possible
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


def least_memory(config: Config, machine: hardware.Machine, ranks: int, given: dict) -> Candidate:
    """The layout that is predicted to need the least memory on its fullest rank.

    Predictions are compared with each other only, not with the machine's memory: runs decide
    what fits. UserError if no layout is possible.
    """
    unlimited = replace(machine, memory=math.inf)
    held = {axis: [getattr(config.layout, axis)] for axis in OUTER_AXES}
    smallest = {"micro_batch_size": [1]} | held | given
    found, rejected = search_space.candidates(config, unlimited, ranks, smallest)
    if not found:
        size = parameters(config.model) / 1e6
        reason = rejected[0].reason if rejected else "there is none"
        raise UserError(f"no layout of {size:.1f} million parameters on {ranks} ranks: {reason}")
    return min(found, key=lambda c: max(stage.total for stage in c.prediction.memory))
