"""Constants of a machine from runs on it: which the runs determine, their values, how sure.

    found = fit(runs, machine)          # of run_files.read
    write(found, "mine.toml")           # a machine for --gpu mine.toml

A constant is determined if a change of it alone changes the runs' seconds by more than their
spread explains, in a way that no other change explains: the column of derivatives that is left
after projection on those of the constants chosen before, the clearest first. Steps of Gauss-Newton
in logarithms then minimise the squares of the errors, of which none is taken that does not.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from config.messages import UserError, write_file
from planner.hardware import Machine
from planner.questions import Answer
from planner.run_files import Run
from planner.step_time import predict

# The constants that seconds of steps can determine; those of a machine that are 0 are left alone.
CONSTANTS = (
    *("gemm_fraction", "flash_fraction", "bandwidth", "nvlink.fraction", "nvlink.latency"),
    *("network.fraction", "p2p_fraction", "software.per_step", "software.host_per_block"),
)
LEAST_SPREAD = 0.02  # of a run's seconds: they repeat no better, and formulas are no better
SURE = 0.2  # standard deviation of a constant's logarithm, up to which it is determined
NUDGE = 0.02  # of a constant's logarithm, for derivatives
MOST_FACTOR = 20.0  # of a constant, beyond which its spread is not told
ROUNDS, HALVINGS, LONGEST_STEP = 40, 12, 1.0


@dataclass(frozen=True)
class Fit:
    """A machine with refitted constants. before, after: mean error of the runs' seconds."""

    old: Machine
    machine: Machine
    runs: Sequence[Run]
    spread: dict[str, float]  # of each fitted constant's logarithm
    left: dict[str, str]  # each constant that was not fitted, and why
    before: float
    after: float


def value_of(machine: Machine, name: str) -> float:
    """A constant by its name in CONSTANTS."""
    return float(attrgetter(name)(machine))


def changed(machine: Machine, name: str, value: float) -> Machine:
    """The machine with another value of that constant; a share of a peak is at most all of it."""
    part, _, field = name.rpartition(".")
    own: dict[str, Any] = {field: min(value, 1.0) if field.endswith("fraction") else value}
    if part:
        own = {part: replace(getattr(machine, part), **own)}
    return replace(machine, **own)


def fit(runs: Sequence[Run], machine: Machine) -> Fit:
    """The machine with the constants refitted that these runs determine; UserError if none is, or
    if the runs' mean error would be larger.
    """
    names = [name for name in CONSTANTS if value_of(machine, name)]
    left = {name: "it is 0 in the machine's file" for name in CONSTANTS if name not in names}
    chosen, spread = _independent(runs, machine, names)
    left |= {name: _unsure(spread[name]) for name in names if name not in chosen}
    if not chosen:
        raise UserError("these runs determine no constant")
    found = _minimised(runs, machine, chosen)
    _, spread = _independent(runs, found, chosen)
    before, after = mean_error(runs, machine), mean_error(runs, found)
    if after > before:
        raise UserError(
            f"refitted, the runs would be worse: {before:.1%} off on average now, {after:.1%} then"
        )
    return Fit(machine, found, runs, spread, left, before, after)


def errors(runs: Sequence[Run], machine: Machine) -> list[float]:
    """Logarithm of measured over predicted seconds of each run."""
    return [math.log(run.seconds / predict(*run.on(machine)).seconds) for run in runs]


def mean_error(runs: Sequence[Run], machine: Machine) -> float:
    """Return what the fit minimises: the root of the mean square of the errors, in which a run
    counts the more, the better its steps repeat.
    """
    return float(np.linalg.norm(_off(runs, machine)) / np.linalg.norm(_weights(runs)))


def _weights(runs: Sequence[Run]) -> np.ndarray:
    return np.array([1 / max(LEAST_SPREAD, run.spread) for run in runs])


def _off(runs: Sequence[Run], machine: Machine) -> np.ndarray:
    """The errors of the runs, weighted."""
    return _weights(runs) * errors(runs, machine)


# ---- Which constants, and their values -----------------------------------------------------------


def _column(runs: Sequence[Run], machine: Machine, name: str) -> np.ndarray:
    """Derivatives of the logarithm of each run's seconds by that of a constant, weighted."""
    low, high = (
        _off(runs, changed(machine, name, value_of(machine, name) * math.exp(way * NUDGE)))
        for way in (-1, 1)
    )
    return (low - high) / (2 * NUDGE)


def _sure(spread: float) -> str:
    """How sure a fitted constant is: one that became small matters little on the fitted machine."""
    if spread <= SURE:
        return f"within {math.expm1(spread):.0%}"
    return f"on the machine so fitted {_unsure(spread)}"


def _unsure(spread: float) -> str:
    """Why a constant is not determined."""
    if spread > math.log(MOST_FACTOR):
        return "their seconds do not depend on it, or only as on those fitted"
    return f"they tell it to within a factor of {math.exp(spread):.2g}"


def _independent(
    runs: Sequence[Run], machine: Machine, names: Sequence[str]
) -> tuple[list[str], dict[str, float]]:
    """Return those of the constants that are determined, clearest first; and how sure each one is:
    a standard deviation of its logarithm, if those chosen before it were known.
    """
    left = {name: _column(runs, machine, name) for name in names}
    chosen: list[str] = []
    spread: dict[str, float] = {}
    while left:
        lengths = {name: float(np.linalg.norm(column)) for name, column in left.items()}
        name = max(lengths, key=lengths.__getitem__)
        spread[name] = 1 / lengths[name] if lengths[name] else math.inf
        if spread[name] > SURE:
            spread |= {other: 1 / max(lengths[other], 1e-6) for other in left if other != name}
            break
        chosen.append(name)
        way = left.pop(name) / lengths[name]
        left = {other: column - (column @ way) * way for other, column in left.items()}
    return chosen, spread


def _minimised(runs: Sequence[Run], machine: Machine, names: list[str]) -> Machine:
    """The machine at which the weighted squares of the errors are least, by Gauss-Newton."""
    off = _off(runs, machine)
    for _ in range(ROUNDS):
        columns = np.column_stack([_column(runs, machine, name) for name in names])
        step = np.linalg.lstsq(columns, off, rcond=None)[0]
        scale = LONGEST_STEP / max(LONGEST_STEP, abs(step).max())
        for _ in range(HALVINGS):
            tried = machine
            for name, way in zip(names, step, strict=True):
                tried = changed(tried, name, value_of(machine, name) * math.exp(scale * way))
            then = _off(runs, tried)
            if then @ then < off @ off:
                break
            scale /= 2
        else:
            return machine
        gained = off @ off - then @ then
        machine, off = tried, then
        if gained < 1e-9 * (off @ off) or off @ off < 1e-12:
            return machine
    return machine


# ---- The file ------------------------------------------------------------------------------------


def origins(found: Fit, names: str) -> dict[str, str]:
    """Where each constant of the new machine is from, in a sentence; names: what the runs are."""
    told = {}
    for name, spread in found.spread.items():
        most = name.endswith("fraction") and value_of(found.machine, name) == 1.0
        how = "its limit, at which the runs are as fast or faster" if most else _sure(spread)
        was = f"was {value_of(found.old, name):.4g} in {found.old.name}"
        told[name] = f"fitted on {names}: {how}; {was}"
    kept = {
        name: f"as in {found.old.name}; not determined by {names}: {reason}"
        for name, reason in found.left.items()
    }
    return told | kept


def answer(found: Fit, path: str | None) -> Answer:
    """Return what was fitted, as text and as data; written if there is a path."""
    if path and not path.endswith(".toml"):
        raise UserError(f"--write {path}: a machine's file ends in .toml")
    lines = [
        f"{len(found.runs)} runs on {found.old.name}: {found.before:.1%} off on average before, "
        f"{found.after:.1%} after"
    ]
    rows = zip(found.runs, errors(found.runs, found.old), errors(found.runs, found.machine))
    for run, old, new in rows:
        shown = [run.seconds / math.exp(error) for error in (old, new)]
        lines.append(
            f"  {run.path}: {run.seconds:.4g} s, median of {run.steps} steps; "
            f"predicted {shown[0]:.4g} before, {shown[1]:.4g} after"
        )
    told = origins(found, "these runs")
    for name in CONSTANTS:
        lines.append(f"{name} = {value_of(found.machine, name):.4g}: {told[name]}")
    if found.after > SURE:
        lines.append("note: no constants explain these runs together")
    if path:
        write(found, path)
        lines.append(f"written: {path}; use it as --gpu {path}")
    data = {"before": found.before, "after": found.after, "determined": sorted(found.spread)}
    values = {name: value_of(found.machine, name) for name in CONSTANTS}
    return Answer("\n".join(lines), data | {"constants": values, "origins": told})


def write(found: Fit, path: str) -> None:
    """Write a machine's file with the fitted constants and the origin of each; UserError if not."""
    base = found.old.name
    base = str(Path(base).resolve()) if base.endswith(".toml") else base
    tables: dict[str, list[str]] = {"": [], "nvlink": [], "network": [], "software": []}
    for name in found.spread:
        part, _, field = name.rpartition(".")
        tables[part].append(f"{field} = {value_of(found.machine, name):.6g}")
    lines = [f"# {base}, calibrated with `plan.py calibrate`.", f"like = {json.dumps(base)}"]
    for part, entries in tables.items():
        lines += ([f"\n[{part}]"] if part and entries else []) + entries
    lines.append("\n[fitted_range]")
    values = [run.job.fitted_values for run in found.runs]
    for name in values[0]:
        seen = [each[name] for each in values]
        lines.append(f"{name} = [{min(seen)}, {max(seen)}]")
    lines.append("\n[sources]")
    names = ", ".join(run.path for run in found.runs)
    lines += [
        f"{json.dumps(name)} = {json.dumps(text)}" for name, text in origins(found, names).items()
    ]
    write_file(path, "\n".join(lines) + "\n")
