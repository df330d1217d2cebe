"""Sweeps along one axis, the largest model that trains, the fewest ranks that train one.

    runs, rejected = sweep("heads", config, machine, ranks=8, given={}, values=[])
    largest_model(config, machine, ranks, given, attempt)  # attempt(candidate) -> whether it ran

A sweep changes one option and keeps the others: the layout is the given one, or the planner's best.
"""

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from config.command_line import check_option, reshape
from config.messages import UserError
from config.model_stats import parameters
from config.schema import Config
from config.validation import check_any_length
from planner import layouts
from planner.hardware import Machine
from planner.layouts import Rejected
from planner.step_time import predict
from tuner import search_space
from tuner.search_space import AXES, Candidate

# What each sweep changes: a group of options, and one of them; a topology is all of tp, pp and dp.
SWEEPS = {
    "topology": ("layout", ""),
    "micro-batch": ("layout", "micro_batch_size"),
    "global-batch": ("training", "global_batch_size"),
    "heads": ("model", "heads"),
    "hidden": ("model", "hidden"),
    "recompute": ("layout", "recompute"),
    "zero": ("layout", "zero"),
    "precision": ("training", "precision"),
    "optimizer": ("training", "optimizer"),
}
HEAD_SIZES = range(16, 257)
LARGEST_STEP = 64  # of the sizes that `largest_model` tries: some 5000 times the parameters
# What a bisection found: the last run that trained, and the next one, which did not.
Bound = tuple[Candidate | None, Candidate | None]


def tried_values(texts: list[str], swept: str | None = None) -> dict[str, list]:
    """The values of each --try AXIS=V,V by axis; UserError for an unknown axis or value.

    swept: what --sweep names; of other sweeps no values can be tried.
    """
    options = {name: name for name in search_space.AXES}
    if swept and SWEEPS[swept][1]:
        options[swept.replace("-", "_")] = SWEEPS[swept][1]
    found: dict[str, list] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.replace("-", "_")
        if name not in options or not values or name in found:
            axes = ", ".join(axis.replace("_", "-") for axis in options)
            raise UserError(f"--try takes AXIS=V,V with AXIS one of {axes}, once, not {text!r}")
        try:
            found[name] = [_tried_value(options[name], value) for value in values.split(",")]
        except UserError as error:
            raise UserError(f"--try {text}: {error}") from None
    return found


def _tried_value(option: str, text: str) -> bool | int | str:
    """One value of an option, in its type; UserError if it cannot have that value."""
    value = {"true": True, "false": False}.get(text, int(text) if text.isdecimal() else text)
    check_option(option, value)
    return value


def sweep(
    name: str, config: Config, machine: Machine, ranks: int, given: dict, values: list
) -> tuple[list[Candidate], list[Rejected]]:
    """The runs of one sweep in order, and its values that cannot run, with reasons.

    `given` are layout fields that are held; `values` replace the sweep's own. UserError if no
    layout can run.
    """
    group, swept = SWEEPS[name]
    held = _as_given(config, {*AXES} - {"tp", "pp", swept}) | given
    if name == "topology":
        return search_space.candidates(config, machine, ranks, held)[:2]
    best = _candidates("layout to sweep", config, machine, ranks, held)[0]
    base = replace(config, layout=best.config.layout)
    runs, rejected = [], []
    for value in values or _default_values(name, base):
        old, change = getattr(base, group), {swept: value}
        try:
            new: Any = reshape(old, change) if group == "model" else replace(old, **change)
            run = replace(base, **{group: new})
            check_any_length(run, ranks)
            prediction = predict(run.model, run.layout, run.training, machine)
            runs.append(Candidate(run, prediction))
        except UserError as error:
            rejected.append(Rejected({name: value}, str(error)))
    return runs, rejected


def _as_given(config: Config, axes: Iterable[str]) -> dict[str, list]:
    """The run's own values of some axes, to be held."""
    return {axis: [getattr(config.layout, axis)] for axis in axes}


def _candidates(
    what: str, config: Config, machine: Machine, ranks: int, given: dict
) -> list[Candidate]:
    """Every layout that can run, fastest predicted first; UserError with a reason if none can."""
    found, rejected, _ = search_space.candidates(config, machine, ranks, given)
    if not found:
        reason = rejected[0].reason if rejected else "there is none"
        raise UserError(f"no {what} on {ranks} ranks: {reason}")
    return found


def _default_values(name: str, config: Config) -> list:
    """What a sweep tries if no values are given."""
    model, batch, tp = config.model, config.training.global_batch_size, config.layout.tp
    if name == "micro-batch":
        return list(layouts.MICRO_BATCHES)
    if name == "global-batch":
        return [size for size in (batch // 4, batch // 2, batch, 2 * batch, 4 * batch) if size]
    if name == "heads":
        counts = [model.hidden // d for d in reversed(HEAD_SIZES) if model.hidden % d == 0]
        return [heads for heads in counts if heads % tp == 0]
    if name == "hidden":
        step = math.lcm(model.heads, 8 * tp, 2)
        middle = max(1, round(model.hidden / step))
        around = {round(middle * share) for share in (0.5, 0.75, 0.875, 1, 1.125, 1.25, 1.5)}
        return sorted(step * count for count in around if count)
    return search_space.choices(SWEEPS[name][1])


# ---- The largest model, the fewest ranks: by bisection with real runs ----------------------------


def largest_model(
    config: Config, machine: Machine, ranks: int, given: dict, attempt: Callable[[Candidate], bool]
) -> Bound:
    """The largest model of `config`'s proportions that trains, by bisection over a ladder of sizes.

    Step k is (1 + k/4) times as wide and as deep as the given model, so about that cubed as large.
    """
    tried: dict[int, Candidate] = {}

    def trains(step: int) -> bool:
        tried[step] = least_memory(scaled(config, step), machine, ranks, given)
        return attempt(tried[step])

    low, high = -1, 0  # the largest that trained, the smallest that did not
    while low < LARGEST_STEP and trains(high):
        low, high = high, 2 * high + 1
    if low < LARGEST_STEP:
        low, high = _bisect(low, high, trains)
    return tried.get(low), tried.get(high)


def scaled(config: Config, step: int) -> Config:
    """The model (1 + step/4) times as wide and deep, of the same head size; a --tp divides it."""
    if not step:
        return config
    model, factor, tp = config.model, 1 + step / 4, config.layout.tp
    group = tp if model.kv_heads == model.heads else math.lcm(model.kv_heads, tp)
    heads = max(1, -(-round(model.heads * factor) // group)) * group
    changes = {"heads": heads, "hidden": heads * model.head_size}
    changes["layers"] = max(1, round(model.layers * factor))
    if model.ffn_hidden != model.default_ffn():
        changes["ffn_hidden"] = round(model.ffn_hidden * factor / tp) * tp
    return replace(config, model=reshape(model, changes))


def fewest_ranks(
    config: Config, machine: Machine, ranks: int, given: dict, attempt: Callable[[Candidate], bool]
) -> Bound:
    """The fewest ranks, of the powers of two up to `ranks`, on which the model trains."""
    runs = []
    for power in range(ranks.bit_length()):
        with contextlib.suppress(UserError):  # no layout of this many ranks is possible
            runs.append(least_memory(config, machine, 2**power, given))
    low, high = _bisect(-1, len(runs), lambda index: not attempt(runs[index]))
    return runs[high] if high < len(runs) else None, runs[low] if low >= 0 else None


def _bisect(low: int, high: int, holds: Callable[[int], bool]) -> tuple[int, int]:
    """The two neighbours between `low`, where it holds, and `high`, where it does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def least_memory(config: Config, machine: Machine, ranks: int, given: dict) -> Candidate:
    """The layout that is predicted to need the least memory on its fullest rank.

    Predictions are compared with each other only, not with the machine's memory: runs decide
    what fits. UserError if no layout is possible.
    """
    unlimited = replace(machine, memory=math.inf)
    others = {*AXES} - {"tp", "pp", "micro_batch_size", "recompute"}
    held = {"micro_batch_size": [1]} | _as_given(config, others) | given
    what = f"layout of {parameters(config.model) / 1e6:.1f} million parameters"
    found = _candidates(what, config, unlimited, ranks, held)
    return min(found, key=lambda c: max(stage.total for stage in c.prediction.memory))
