"""Fits the constants of a machine to the seconds of runs on it, for `plan.py calibrate`.

    found = fit(runs, machine)          # runs: from run_files.read
    write(found, "mine.toml")           # a machine for --gpu mine.toml

A constant is a rate or a time of the machine on which the planner's prediction depends, such as the
share of the peak that a GEMM reaches. The planner predicts the seconds of a step of each run; the
error of a run is the logarithm of its measured over its predicted seconds.

Runs determine a constant if a change of this constant changes the predicted seconds clearly more
than the runs' own spread, and if no change of other constants has the same effect. `_spreads` finds
these constants; `_minimised` then chooses their values so that the runs' squared errors are least.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from base.errors import UserError
from base.paths import write_file
from costs.hardware import Machine
from tools.planner.questions import Answer
from tools.planner.run_files import MeasuredRun

# The names of the constants that the seconds of steps can determine: fields of the machine, and,
# with a point, fields of its parts. A constant that is 0 in the machine's file is not fitted.
CONSTANTS = (
    *("gemm_fraction", "flash_fraction", "bandwidth", "nvlink.fraction", "nvlink.latency"),
    *("network.fraction", "p2p_fraction", "software.per_step", "software.host_per_block"),
)
# A constant counts as determined if the standard deviation of its logarithm is at most this.
SURE = 0.2
# The logarithm of a constant is changed by this much in both directions to compute a derivative.
NUDGE = 0.02
# If the runs know a constant only to within a larger factor than this, the text gives no factor.
MOST_FACTOR = 20.0
# Gauss-Newton takes at most ROUNDS steps. No step changes the logarithm of a constant by more than
# LONGEST_STEP, and a step that makes the errors larger is halved up to HALVINGS times.
ROUNDS, HALVINGS, LONGEST_STEP = 40, 12, 1.0


class Fit(NamedTuple):
    """The result of `fit`: a machine before and after its constants were refitted.

    spread: by the name of a fitted constant, the standard deviation of its logarithm. origins: by
    the name of every constant, a sentence that says where its value comes from. before, after: the
    weighted root mean square of the runs' errors with the old and with the new machine.
    """

    old: Machine
    machine: Machine
    runs: Sequence[MeasuredRun]
    spread: dict[str, float]
    origins: dict[str, str]
    before: float
    after: float


def value_of(machine: Machine, name: str) -> float:
    """Return a machine's constant; name: its name in CONSTANTS, such as `nvlink.latency`."""
    return float(attrgetter(name)(machine))


def unit_of(name: str) -> str:
    """Return the unit of a constant's value, as `plan.py constants` writes units."""
    if name.endswith("fraction"):
        return "fraction"
    return "bytes/s" if name == "bandwidth" else "s"


def changed(machine: Machine, name: str, value: float) -> Machine:
    """Return the machine with another value of one constant.

    name: a name in CONSTANTS. A constant whose name ends in `fraction` is a share of a peak rate,
    so its value is limited to 1.
    """
    part, _, field = name.rpartition(".")
    if field.endswith("fraction"):
        value = min(value, 1.0)
    changes: dict[str, Any] = {field: value}
    if part:
        changes = {part: replace(getattr(machine, part), **changes)}
    return replace(machine, **changes)


def fit(runs: Sequence[MeasuredRun], machine: Machine) -> Fit:
    """Return the machine with new values of the constants that the runs determine.

    Called by `plan.py calibrate`. A constant is determined if the standard deviation of its
    logarithm, its `spread`, is at most SURE. `origins` has a text on the origin of each constant,
    for the machine's file. Raise UserError if the runs determine no constant.
    """
    names = [name for name in CONSTANTS if value_of(machine, name)]
    spread = _spreads(runs, machine, names)
    chosen = [name for name in names if spread[name] <= SURE]
    if not chosen:
        least = min(spread.values(), default=math.inf)
        raise UserError(
            f"{len(runs)} runs determine no constant: the least standard deviation of one is "
            f"{least:.0%} of it, and at most {SURE:.0%} is taken; add runs in other layouts"
        )
    found = _minimised(runs, machine, chosen)
    # The root mean square of the runs' errors, with the old and with the new machine, is the norm
    # of the weighted errors over the norm of the weights (below).
    before, after = (float(np.linalg.norm(_off(runs, at))) for at in (machine, found))
    weight = float(np.linalg.norm([run.weight for run in runs]))
    # The derivatives are others at the new values, so the standard deviations are computed again.
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
    """Return the reason why runs do not determine a constant, for the text about its origin.

    spread: the standard deviation of the constant's logarithm, which is above SURE.
    """
    if spread > math.log(MOST_FACTOR):
        return "their seconds do not depend on it, or only as on those fitted"
    return f"they tell it to within a factor of {math.exp(spread):.2g}"


def _off(runs: Sequence[MeasuredRun], machine: Machine) -> np.ndarray:
    """Return each run's error, the logarithm of measured over predicted seconds: (runs,).

    It is multiplied by the run's weight, which is larger if the steps of the run repeat better.
    """
    return np.array([run.weight * math.log(run.seconds / run.predicted(machine)) for run in runs])


def _slopes(runs: Sequence[MeasuredRun], machine: Machine, names: Sequence[str]) -> np.ndarray:
    """Return the weighted derivatives of the runs' predicted log seconds: (runs, names).

    Each column is for the logarithm of one constant, and is computed from two predictions, with the
    constant a little smaller and a little larger. The errors fall when the predictions rise, so the
    column is the error with the smaller constant minus the error with the larger one.
    """
    columns = []
    for name in names:
        value = value_of(machine, name)
        low = _off(runs, changed(machine, name, value * math.exp(-NUDGE)))
        high = _off(runs, changed(machine, name, value * math.exp(NUDGE)))
        columns.append((low - high) / (2 * NUDGE))
    return np.column_stack(columns)


def _spreads(
    runs: Sequence[MeasuredRun], machine: Machine, names: Sequence[str]
) -> dict[str, float]:
    """Return by name the standard deviation of each constant's logarithm that the runs leave.

    The runs determine a constant if this value is at most SURE. The constants are taken in turn,
    the clearest first, as if the constants before were known exactly. Of the derivatives of each
    constant only the part counts that no change of the constants before can produce.
    """
    left = _slopes(runs, machine, names)
    spread: dict[str, float] = {}
    while True:
        # The longer a column of derivatives, the more the runs tell: with errors of standard
        # deviation 1, the constant's standard deviation is 1 over the length of its column.
        lengths = np.maximum(1e-6, np.linalg.norm(left, axis=0))
        clearest = int(lengths.argmax())
        # If even the clearest constant is not determined, all the remaining ones are not either.
        if lengths[clearest] < 1 / SURE:
            others = dict(zip(names, map(float, 1 / lengths), strict=True))
            return others | spread
        spread[names[clearest]] = float(1 / lengths[clearest])
        # Project all columns on the space orthogonal to the chosen one, whose own column becomes 0.
        way = left[:, clearest] / lengths[clearest]
        left = left - np.outer(way, way @ left)
        left[:, clearest] = 0.0


def _minimised(runs: Sequence[MeasuredRun], machine: Machine, names: list[str]) -> Machine:
    """Return the machine whose named constants make the sum of the runs' squared errors least.

    The Gauss-Newton method is used, on the logarithms of the constants, so that they stay above 0.
    A step has, for each constant, the change of its logarithm that would make the errors `off`
    least if they were linear. It is taken in part (`scale`) if it is too long or goes too far.
    """
    off = _off(runs, machine)
    for _ in range(ROUNDS):
        step = np.linalg.lstsq(_slopes(runs, machine, names), off, rcond=None)[0]
        scale = LONGEST_STEP / max(LONGEST_STEP, abs(step).max())
        for _ in range(HALVINGS):
            tried = machine
            for name, way in zip(names, step, strict=True):
                tried = changed(tried, name, value_of(machine, name) * math.exp(scale * way))
            # Take the step if it makes the sum of the squared errors smaller, else try half of it.
            then = _off(runs, tried)
            if then @ then < off @ off:
                break
            scale /= 2
        else:  # no part of the step makes the errors smaller
            return machine
        gained = off @ off - then @ then
        machine, off = tried, then
        if gained < 1e-9 * (off @ off) or off @ off < 1e-12:
            return machine
    return machine


# ---- The answer and the file ---------------------------------------------------------------------


def answer(found: Fit, path: str | None) -> Answer:
    """Return the answer of `plan.py calibrate`: the fitted constants, as text and as data.

    path: the file of --write, to which the machine is written; None without --write.
    """
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
    constants = {
        name: {"value": values[name], "unit": unit_of(name), "origin": found.origins[name]}
        for name in CONSTANTS
    }
    data = {"before_fraction": found.before, "after_fraction": found.after}
    return Answer(
        "\n".join(lines), data | {"determined": sorted(found.spread), "constants": constants}
    )


def write(found: Fit, path: str) -> None:
    """Write a machine's file that `--gpu FILE` can read; raise UserError for another file name.

    The file says `like = ` the old machine, so it has only the fitted constants, the range of the
    jobs on which they were fitted, and a sentence on the origin of every constant.
    """
    if not path.endswith(".toml"):
        raise UserError(f"--write {path}: a machine's file ends in .toml")
    base = found.old.name
    # The full path of a user's file, so that the new file can be used from every folder.
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
