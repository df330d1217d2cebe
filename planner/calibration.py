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
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config.messages import UserError, write_file
from planner.hardware import Machine
from planner.questions import Answer
from planner.run_files import Run

# The constants that seconds of steps can determine; those of a machine that are 0 are left alone.
CONSTANTS = (
    *("gemm_fraction", "flash_fraction", "bandwidth", "nvlink.fraction", "nvlink.latency"),
    *("network.fraction", "p2p_fraction", "software.per_step", "software.host_per_block"),
)
SURE = 0.2  # standard deviation of a constant's logarithm, up to which it is determined
NUDGE = 0.02  # of a constant's logarithm, for derivatives
MOST_FACTOR = 20.0  # of a constant, beyond which its spread is not told
ROUNDS, HALVINGS, LONGEST_STEP = 40, 12, 1.0


class Fit(NamedTuple):
    """A machine with refitted constants.

    spread: of each fitted constant's logarithm. origins: of each constant, a sentence about the
    runs that determine it, or do not. before, after: mean error of the runs' seconds.
    """

    old: Machine
    machine: Machine
    runs: Sequence[Run]
    spread: dict[str, float]
    origins: dict[str, str]
    before: float
    after: float


def value_of(machine: Machine, name: str) -> float:
    """A constant by its name in CONSTANTS."""
    return float(attrgetter(name)(machine))


def changed(machine: Machine, name: str, value: float) -> Machine:
    """The machine with another value of that constant; a share of a peak is at most all of it."""
    part, _, field = name.rpartition(".")
    if field.endswith("fraction"):
        value = min(value, 1.0)
    changes: dict[str, Any] = {field: value}
    if part:
        changes = {part: replace(getattr(machine, part), **changes)}
    return replace(machine, **changes)


def fit(runs: Sequence[Run], machine: Machine) -> Fit:
    """The machine with the constants refitted that these runs determine; UserError if none is."""
    names = [name for name in CONSTANTS if value_of(machine, name)]
    spread = _spreads(runs, machine, names)
    chosen = [name for name in names if spread[name] <= SURE]
    if not chosen:
        raise UserError("these runs determine no constant")
    found = _minimised(runs, machine, chosen)
    before, after = (float(np.linalg.norm(_off(runs, at))) for at in (machine, found))
    weight = float(np.linalg.norm([run.weight for run in runs]))
    fitted = _spreads(runs, found, chosen)
    origins = {}
    for name in CONSTANTS:
        if name in chosen:
            how = f"on the machine so fitted {_unsure(fitted[name])}"
            if fitted[name] <= SURE:
                how = f"within {math.expm1(fitted[name]):.0%}"
            if name.endswith("fraction") and value_of(found, name) == 1.0:
                how = "its limit, at which the runs are as fast or faster"
            was = f"was {value_of(machine, name):.4g} in {machine.name}"
            origins[name] = f"fitted on these runs: {how}; {was}"
        else:
            why = _unsure(spread[name]) if name in names else "it is 0 in the machine's file"
            origins[name] = f"as in {machine.name}; not determined by these runs: {why}"
    return Fit(machine, found, runs, fitted, origins, before / weight, after / weight)


def _unsure(spread: float) -> str:
    """Why a constant is not determined."""
    if spread > math.log(MOST_FACTOR):
        return "their seconds do not depend on it, or only as on those fitted"
    return f"they tell it to within a factor of {math.exp(spread):.2g}"


def _off(runs: Sequence[Run], machine: Machine) -> np.ndarray:
    """Logarithm of measured over predicted seconds of each run, weighted."""
    return np.array([run.weight * math.log(run.seconds / run.predicted(machine)) for run in runs])


def _slopes(runs: Sequence[Run], machine: Machine, names: Sequence[str]) -> np.ndarray:
    """Derivatives of `-_off` by the logarithm of each constant: (runs, names)."""
    columns = []
    for name in names:
        value = value_of(machine, name)
        low = _off(runs, changed(machine, name, value * math.exp(-NUDGE)))
        high = _off(runs, changed(machine, name, value * math.exp(NUDGE)))
        columns.append((low - high) / (2 * NUDGE))
    return np.column_stack(columns)


def _spreads(runs: Sequence[Run], machine: Machine, names: Sequence[str]) -> dict[str, float]:
    """How sure each constant is: a standard deviation of its logarithm, if those that are clearer
    were known; above SURE it is not determined.
    """
    left = _slopes(runs, machine, names)
    spread: dict[str, float] = {}
    while True:
        lengths = np.maximum(1e-6, np.linalg.norm(left, axis=0))
        clearest = int(lengths.argmax())
        if lengths[clearest] < 1 / SURE:
            others = dict(zip(names, map(float, 1 / lengths), strict=True))
            return others | spread
        spread[names[clearest]] = float(1 / lengths[clearest])
        way = left[:, clearest] / lengths[clearest]
        left = left - np.outer(way, way @ left)
        left[:, clearest] = 0.0


def _minimised(runs: Sequence[Run], machine: Machine, names: list[str]) -> Machine:
    """The machine at which the weighted squares of the errors are least, by Gauss-Newton."""
    off = _off(runs, machine)
    for _ in range(ROUNDS):
        step = np.linalg.lstsq(_slopes(runs, machine, names), off, rcond=None)[0]
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


# ---- The answer and the file ---------------------------------------------------------------------


def answer(found: Fit, path: str | None) -> Answer:
    """Return what was fitted, as text and as data; written if there is a path."""
    old, new = found.old, found.machine
    lines = [
        f"{len(found.runs)} runs on {old.name}: {found.before:.1%} off on average before, "
        f"{found.after:.1%} after"
    ]
    for run in found.runs:
        lines.append(
            f"  {run.path}: {run.seconds:.4g} s, median of {run.steps} steps; predicted "
            f"{run.predicted(old):.4g} before, {run.predicted(new):.4g} after"
        )
    values = {name: value_of(new, name) for name in CONSTANTS}
    lines += [f"{name} = {values[name]:.4g}: {found.origins[name]}" for name in CONSTANTS]
    if found.after > SURE:
        lines.append("note: no constants explain these runs together")
    if path:
        write(found, path)
        lines.append(f"written: {path}; use it as --gpu {path}")
    data = {"before": found.before, "after": found.after, "determined": sorted(found.spread)}
    return Answer("\n".join(lines), data | {"constants": values, "origins": found.origins})


def write(found: Fit, path: str) -> None:
    """Write a machine's file with the fitted constants and the origin of each; UserError if not."""
    if not path.endswith(".toml"):
        raise UserError(f"--write {path}: a machine's file ends in .toml")
    base = found.old.name
    if base.endswith(".toml"):
        base = str(Path(base).resolve())
    lines = [f"# {base}, calibrated with `plan.py calibrate`.", f"like = {json.dumps(base)}"]
    for name in found.spread:
        lines.append(f"{name} = {value_of(found.machine, name):.6g}")
    lines += ["", "[fitted_range]"]
    for name in found.runs[0].job.fitted_values:
        values = [run.job.fitted_values[name] for run in found.runs]
        lines.append(f"{name} = [{min(values)}, {max(values)}]")
    lines += ["", "[sources]"]
    paths = ", ".join(run.path for run in found.runs)
    for name, text in found.origins.items():
        text = text.replace("these runs", paths, 1)
        lines.append(f"{json.dumps(name)} = {json.dumps(text)}")
    write_file(path, "\n".join(lines) + "\n")
