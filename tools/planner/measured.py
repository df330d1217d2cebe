"""Corrects predictions by runs that were measured: `plan.py layouts --measured RUN`.

    corrected = correct(machine, [run, ...], priors())     # runs: MeasuredRun of run_files.py
    corrected.machine                                      # the machine whose constants moved

A constant of the machine or of the program is known to within a factor: its prior, the standard
deviation of its logarithm among sources of published runs (measured.toml). The seconds of a run
tell about each constant as much as its prediction depends on it. What no constant explains is of
the run's layout alone, and moves nothing. All are taken as normal in logarithms, so the most likely
constants are the solution of linear equations (ridge regression, with the priors as its weights).

`calibrate` has no priors: it needs runs that determine a constant by themselves, and writes a
machine's file of them.
"""

import dataclasses
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from base.errors import UserError
from config.command_line import read_toml
from config.schema import GROUPS
from costs import step_time
from costs.hardware import Machine
from costs.job import Job
from tools.planner.calibration import NUDGE, changed, value_of
from tools.planner.run_files import OF_RUN, MeasuredRun

FILE = Path(__file__).with_suffix(".toml")
ROUNDS = 3  # linear equations are solved as often, each time about the constants found before
FAR = 3.0  # a run whose error is more standard deviations than this is probably another one
SHOWN = 0.005  # constants that moved by less than this share are not printed
# Options of train.py and plan.py that a stated run may have, as users type them without `--`.
OPTIONS = frozenset(
    field.name.replace("_", "-") for group in OF_RUN for field in dataclasses.fields(GROUPS[group])
) | {"model", "gpu", "nodes", "gpus", "for", "fp8", "batch-tokens"}
# Constants of a program; a run of another program tells nothing of them.
OF_PROGRAM = ("software.", "slowdown")


# A stated run: `tp 4 pp 2 mbs 1 = 5.31 s`; SHORT has names that are no options.
STATED = re.compile(r"(?P<words>.*?)=\s*(?P<number>[0-9.]+(?:e[+-]?[0-9]+)?)\s*(?P<unit>m?s)\s*")
SHORT = {"mbs": "--micro-batch-size", "gbs": "--global-batch-size"}
AXES = ("tp", "pp", "cp", "dp")


class Stated(NamedTuple):
    """A run in words: options of plan.py, its ranks along dp if they are said, and its seconds."""

    words: list[str]
    dp: int | None
    seconds: float


class Priors(NamedTuple):
    """The spread of constants before any run: standard deviations of logarithms.

    constants: by the name of a constant (calibration.CONSTANTS, and `slowdown`), its own. experts:
    of a factor on models with experts. layout: of a layout's own error, which no constant explains.
    """

    constants: Mapping[str, float]
    experts: float
    layout: float


class Move(NamedTuple):
    """A constant that runs moved: its values, and its spread in per cent before and after."""

    name: str
    before: float
    after: float
    prior: float
    left: float


class Corrected(NamedTuple):
    """A machine whose constants runs have moved.

    predicted: (before, after), seconds by run.

    surprise: by run, its error before in standard deviations of what priors allow.
    """

    machine: Machine
    moves: list[Move]
    runs: Sequence[MeasuredRun]
    predicted: list[tuple[float, float]]
    surprise: list[float]


def stated(text: str) -> Stated:
    """Return the run that a text of --measured states; raise UserError if it states none.

    The text has options with their values, with or without `--`, and the seconds of a step:
    `tp 4 pp 2 mbs 1 recompute full = 5.31 s`. `dp N` says how many GPUs there are.
    """
    found = STATED.fullmatch(text.strip())
    try:
        said = shlex.split(found["words"]) if found else []
        seconds = float(found["number"]) / (1000 if found["unit"] == "ms" else 1) if found else 0.0
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UserError(
            f"--measured {text!r} is neither a run's folder nor a layout with its seconds, such as "
            "'tp 4 pp 2 mbs 1 = 5.31 s'"
        )
    known = {*OPTIONS, *SHORT, *AXES}
    words = [SHORT.get(word, f"--{word}") if word in known else word for word in said]
    dp = None
    if "--dp" in words:
        place = words.index("--dp")
        value = words[place + 1] if place + 1 < len(words) else ""
        if not value.isdigit() or not int(value):
            raise UserError(f"--measured {text!r}: dp is a number of ranks, not {value!r}")
        dp = int(value)
        del words[place : place + 2]
    return Stated(words, dp, seconds)


@cache  # the file is read once
def priors() -> Priors:
    """Return the priors of measured.toml."""
    found = read_toml(FILE, FILE.name)
    return Priors(MappingProxyType(found["constants"]), found["experts"], found["layout"])


def correct(
    machine: Machine, runs: Sequence[MeasuredRun], prior: Priors, has_experts: bool = False
) -> Corrected:
    """Return the machine with its constants moved by what the runs tell of them.

    machine: that of the question, with its program. The job of a run has its own machine: if its
    program is another, only constants of the hardware move. has_experts: whether the question's
    model has experts, to which the factor of runs with experts applies.
    """
    names = [name for name in prior.constants if value_of(machine, name)]
    spread = np.array([*(prior.constants[name] for name in names), prior.experts])
    apart = np.array([math.hypot(prior.layout, run.spread) for run in runs])
    first = [predicted(run, {}) for run in runs]
    measured = np.array([run.seconds for run in runs])
    moved = np.zeros(len(spread))
    for _ in range(ROUNDS):
        at = dict(zip(names, moved[:-1], strict=True))
        now = np.array([predicted(run, at) for run in runs])
        now = now * np.exp([moved[-1] * _has_experts(run.job) for run in runs])
        slopes = np.array([slopes_of(run, machine, names, at) for run in runs])
        # Of what is not explained yet and what was moved so far, the most likely cause.
        rest = np.log(measured / now) + slopes @ moved
        gain = (spread**2)[:, None] * slopes.T
        gain = gain @ np.linalg.inv(slopes @ gain + np.diag(apart**2))
        moved = gain @ rest
    left = np.sqrt(np.maximum(0.0, spread**2 - np.einsum("cr,rc->c", gain, slopes * spread**2)))
    found, moves = machine, []
    for name, way, before, after in zip(names, moved, spread, left, strict=False):
        value = value_of(found, name)
        found = changed(found, name, value * math.exp(way))
        moves.append(Move(name, value, value_of(found, name), float(before), float(after)))
    if has_experts:
        slower = found.slowdown * math.exp(moved[-1])
        moves.append(Move("experts", 1.0, math.exp(moved[-1]), float(spread[-1]), float(left[-1])))
        found = changed(found, "slowdown", slower)
    at = dict(zip(names, moved[:-1], strict=True))
    then = [predicted(run, at) * math.exp(moved[-1] * _has_experts(run.job)) for run in runs]
    pairs = list(zip(first, then, strict=True))
    allowed = np.sqrt(slopes**2 @ spread**2 + apart**2)
    surprise = np.abs(np.log(measured / np.array(first))) / allowed
    return Corrected(found, moves, runs, pairs, surprise.tolist())


def predicted(run: MeasuredRun, moved: Mapping[str, float]) -> float:
    """Return the predicted seconds of a run; moved: changes of its constants' logarithms."""
    machine = run.job.machine
    for name, way in moved.items():
        if way and value_of(machine, name):
            machine = changed(machine, name, value_of(machine, name) * math.exp(way))
    return seconds_of(run.job._replace(machine=machine))


def seconds_of(job: Job) -> float:
    """Return the predicted seconds of a step, without memory and risks."""
    pipeline, _ = step_time.pipeline_time(job)
    return (pipeline + sum(step_time.step_parts(job).values())) * job.machine.slowdown


def _has_experts(job: Job) -> bool:
    return job.model.experts > 1


def slopes_of(
    run: MeasuredRun, machine: Machine, names: Sequence[str], at: Mapping[str, float]
) -> list[float]:
    """Return the derivatives of a run's predicted log seconds by each constant, and by `experts`.

    They are 0 for constants of a program that is not the run's. at: as in `predicted`.
    """
    is_same = run.job.machine.software == machine.software
    found = []
    for name in names:
        slope = 0.0
        if is_same or not name.startswith(OF_PROGRAM):
            low = predicted(run, {**at, name: at[name] - NUDGE})
            high = predicted(run, {**at, name: at[name] + NUDGE})
            slope = math.log(high / low) / (2 * NUDGE)
        found.append(slope)
    return [*found, float(is_same and _has_experts(run.job))]


def lines(found: Corrected) -> list[str]:
    """Return the lines of an answer: what each run was predicted to take, and what moved."""
    text = []
    each = zip(found.runs, found.predicted, found.surprise, strict=True)
    for run, (before, after), surprise in each:
        text.append(
            f"corrected by {run.path}: measured {run.seconds:.4g} s, predicted {before:.4g} s "
            f"before and {after:.4g} s after"
        )
        if surprise > FAR:
            text.append(
                f"note: {run.path} is {surprise:.1f} standard deviations off, more than constants "
                "explain: are its batch, its GPUs and its options those that were stated?"
            )
    moved = [move for move in found.moves if abs(move.after / move.before - 1) >= SHOWN]
    moved.sort(key=lambda move: -abs(math.log(move.after / move.before)))
    for move in moved:
        text.append(
            f"  {move.name}: {move.before:.4g} to {move.after:.4g} "
            f"({move.after / move.before - 1:+.1%}), known to within {move.prior:.0%} before and "
            f"{move.left:.0%} after"
        )
    if not moved:
        text.append("  no constant moved by more than 0.5 %: predictions stay as they are")
    return text


def as_data(found: Corrected) -> dict[str, Any]:
    """Return the correction as data: runs with their seconds, and the constants."""
    runs = []
    for run, (before, after) in zip(found.runs, found.predicted, strict=True):
        own = {"measured_seconds": run.seconds, "predicted_seconds": before}
        runs.append({"run": run.path, **own, "corrected_seconds": after})
    constants = {
        move.name: {"before_factor": 1.0, "after_factor": move.after / move.before}
        | {"prior_spread_fraction": move.prior, "spread_fraction": move.left}
        for move in found.moves
    }
    return {"runs": runs, "constants": constants}
