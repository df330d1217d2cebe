"""Sweeps along one axis: every value of one option.

    runs, rejected = sweep("heads", config, machine, ranks=8, given={}, values=[])

A sweep changes one option and keeps the others: the layout is the given one, or the planner's best.
"""

import math
from dataclasses import replace
from typing import Any

from config.command_line import check_option, reshape
from config.messages import UserError
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
    kept = {*AXES} - {"tp", "pp", swept}
    held = {axis: [getattr(config.layout, axis)] for axis in kept} | given
    space = search_space.candidates(config, machine, ranks, held)
    if name == "topology":
        return space.found, space.rejected
    if not space.found:
        reason = space.rejected[0].reason if space.rejected else "there is none"
        raise UserError(f"no layout to sweep on {ranks} ranks: {reason}")
    base = replace(config, layout=space.found[0].config.layout)
    runs = []
    rejected = []
    for value in values or _default_values(name, base):
        old = getattr(base, group)
        change = {swept: value}
        try:
            new: Any = reshape(old, change) if group == "model" else replace(old, **change)
            run = replace(base, **{group: new})
            check_any_length(run, ranks)
            prediction = predict(run.model, run.layout, run.training, machine)
            runs.append(Candidate(run, prediction))
        except UserError as error:
            rejected.append(Rejected({name: value}, str(error)))
    return runs, rejected


def _default_values(name: str, config: Config) -> list:
    """What a sweep tries if no values are given."""
    model = config.model
    batch = config.training.global_batch_size
    tp = config.layout.tp
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
