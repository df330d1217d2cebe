"""How far the numbers of two runs are apart; every comparison of the suite is made here.

    assert_close(result["losses"], expected["losses"], 1e-5, case)     loss by loss
    assert_close(p, other, 1e-5, name, scale=largest)                  tensors
    assert_within(distance(result, expected), 1e-5, case)              a difference that is known

`max()` keeps its first argument beside a NaN, zip() stops at the shorter list, and a loop over
nothing is content: here a number that is not finite, another length and no numbers at all are an
infinite difference.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np


def relative_difference(values: Any, others: Any, scale: float | None = None) -> float:
    """The largest |value - other| / |other|; with `scale`, the largest |value - other| / scale.

    Numbers, tensors, arrays, and lists and dictionaries of these, nested as they like. Infinite if
    a number on either side is not finite, if shapes or keys differ, or if there are no numbers.
    """
    ours, theirs = dict(_rows(values)), dict(_rows(others))
    shapes = [{place: row.shape for place, row in rows.items()} for rows in (ours, theirs)]
    if not ours or shapes[0] != shapes[1]:
        return math.inf
    a = np.concatenate([row.ravel() for row in ours.values()])
    b = np.concatenate([theirs[place].ravel() for place in ours])
    if not a.size or not np.isfinite([a, b]).all():
        return math.inf
    size = np.abs(b) if scale is None else scale
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(a == b, 0.0, np.abs(a - b) / size).max())


def assert_close(
    values: Any, others: Any, tolerance: float, about: Any = "", scale: float | None = None
) -> float:
    """Fail unless `relative_difference` is at most the tolerance; the difference.

    about: what the failure's message begins with.
    """
    difference = relative_difference(values, others, scale)
    return assert_within(difference, tolerance, about, f"{values} for {others}")


def assert_within(difference: float, tolerance: float, about: Any = "", numbers: str = "") -> float:
    """Fail unless the difference is at most the tolerance; the difference."""
    assert difference <= tolerance, f"{about}: {difference} > {tolerance} {numbers}"
    return difference


def _rows(values: Any, place: tuple = ()) -> Iterator[tuple[tuple, np.ndarray]]:
    """Each list of numbers with its place, indices and keys: of a tensor, its last dimension."""
    if hasattr(values, "tolist"):  # a tensor or an array
        numbers = np.array(values.tolist(), dtype=np.float64)
        for index in np.ndindex(numbers.shape[:-1]):
            yield (*place, *index), numbers[index]
    elif isinstance(values, dict):
        for key in sorted(values):
            yield from _rows(values[key], (*place, key))
    elif isinstance(values, list | tuple) and any(map(_has_parts, values)):
        for index, value in enumerate(values):
            yield from _rows(value, (*place, index))
    elif isinstance(values, list | tuple):
        yield place, np.array([float(value) for value in values])
    else:
        yield place, np.array(float(values))


def _has_parts(value: Any) -> bool:
    """Whether this is no single number."""
    return isinstance(value, dict | list | tuple) or getattr(value, "ndim", 0) > 0
