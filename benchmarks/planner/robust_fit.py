"""Constants from logarithms of errors: one step of Gauss-Newton with Huber's weights."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

TIGHT = 0.03  # residuals (of a logarithm) above this weigh less, so that outliers do not decide


def slopes(
    errors: Callable[[dict[str, float]], list[float]],
    names: Sequence[str],
    values: dict[str, float],
) -> tuple[list[float], list[list[float]]]:
    """Logarithms of predicted over measured at these values, and their derivatives by the logarithm
    of each named constant.
    """
    here, found = errors(values), []
    for name in names:
        there = errors(values | {name: values[name] * 1.02})
        found.append([(b - a) / math.log(1.02) for a, b in zip(here, there, strict=True)])
    return here, found


def solve(here: list[float], by_constant: list[list[float]], rounds: int = 30) -> list[float]:
    """The step in the logarithms of the constants that minimises Huber's loss of the errors."""
    import numpy as np

    start, slope = np.array(here), np.array(by_constant).T
    step = np.zeros(slope.shape[1])
    for _ in range(rounds):
        off = start + slope @ step
        weight = np.sqrt(1 / np.maximum(1.0, np.abs(off) / TIGHT))
        step = np.linalg.lstsq(slope * weight[:, None], -start * weight, rcond=None)[0]
    return [float(part) for part in step]


def refit(
    errors: Callable[[dict[str, float]], list[float]],
    names: Sequence[str],
    values: dict[str, float],
    rounds: int,
    most: float = math.inf,
) -> dict[str, float]:
    """`values` with the named constants fitted in so many steps, none of them of more than `most`
    in a logarithm.
    """
    for _ in range(rounds):
        step = solve(*slopes(errors, names, values))
        values = moved(values, names, step, most)
    return values


def refit_without_each(
    rows: Sequence[Any],
    group_of: Callable[[Any], str],
    errors: Callable[[Sequence[Any], dict[str, float]], list[float]],
    names: Sequence[str],
    values: dict[str, float],
    rounds: int,
    most: float = math.inf,
) -> dict[str, dict[str, float]]:
    """By group of rows, the result of `refit` on the rows of all other groups.

    errors: of some rows with some constants, a number for each row; further numbers may follow. All
    fits begin at the same constants, so the errors of the first step are computed once.
    """
    here, by_constant = slopes(partial(errors, rows), names, values)
    fitted_without: dict[str, dict[str, float]] = {}
    for group in dict.fromkeys(map(group_of, rows)):
        others = [row for row in rows if group_of(row) != group]
        kept = [n for n in range(len(here)) if n >= len(rows) or group_of(rows[n]) != group]
        step = solve([here[n] for n in kept], [[one[n] for n in kept] for one in by_constant])
        first = moved(values, names, step, most)
        fitted_without[group] = refit(partial(errors, others), names, first, rounds - 1, most)
    return fitted_without


def moved(
    values: dict, names: Sequence[str], step: list[float], most: float = math.inf
) -> dict[str, float]:
    """`values`, the named ones multiplied by the exponentials of a step, each at most `most`."""
    parts = [max(-most, min(most, part)) for part in step]
    return values | {n: values[n] * math.exp(s) for n, s in zip(names, parts, strict=True)}
