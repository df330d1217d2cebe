"""Constants from logarithms of errors: one step of Gauss-Newton with Huber's weights."""

import math

TIGHT = 0.03  # residuals (of a logarithm) above this weigh less, so that outliers do not decide


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


def moved(values: dict, names: tuple[str, ...], step: list[float]) -> dict[str, float]:
    """`values` with the named ones multiplied by the exponentials of a step."""
    return values | {n: values[n] * math.exp(s) for n, s in zip(names, step, strict=True)}
