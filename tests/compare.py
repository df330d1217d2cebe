"""How far the numbers of two runs are apart; every comparison of the suite is made here.

    assert_close(result["losses"], expected["losses"], 1e-5, case)     loss by loss
    assert_close(p, other, 1e-5, name, scale=largest)                  tensors
    assert_within(distance(result, expected), 1e-5, case)              a difference that is known

`max()` keeps its first argument beside a NaN, zip() stops at the shorter list, and a loop over
nothing is content: here a number that is not finite, another length and no numbers at all are an
infinite difference.
"""

import math
from collections.abc import Iterable
from typing import Any


def relative_difference(values: Any, others: Any, scale: float | None = None) -> float:
    """The largest |value - other| / |other|; with `scale`, the largest |value - other| / scale.

    Numbers, tensors, arrays, and lists and dictionaries of these, nested as they like. Infinite if
    a number on either side is not finite, if shapes or keys differ, or if there are no numbers.
    """
    ours, theirs = list(_flat(values)), list(_flat(others))
    if not ours or [place for place, _ in ours] != [place for place, _ in theirs]:
        return math.inf
    if not all(math.isfinite(number) for _, number in ours + theirs):
        return math.inf
    return max(_difference(a, b, scale) for (_, a), (_, b) in zip(ours, theirs))


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


def _difference(value: float, other: float, scale: float | None) -> float:
    if value == other:
        return 0.0
    size = abs(other) if scale is None else scale
    return abs(value - other) / size if size else math.inf


def _flat(values: Any, place: tuple = ()) -> Iterable[tuple[tuple, float]]:
    """Every number with its place: indices and keys."""
    if hasattr(values, "tolist"):  # a tensor or an array
        values = values.tolist()
    if isinstance(values, dict):
        items = [(key, values[key]) for key in sorted(values)]
    elif isinstance(values, list | tuple):
        items = list(enumerate(values))
    else:
        yield place, float(values)
        return
    for key, value in items:
        yield from _flat(value, (*place, key))
