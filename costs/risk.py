"""Computes how sure a prediction is: an interval of seconds, the probability of too little memory.

    out_of_memory(machine, needed)     # 0..1
    interval(job, seconds, block)      # (low, high), between which 90 of 100 runs are expected
    quantile(job, seconds, block)      # seconds within which 80 of 100 runs are expected

The ratio of a measured to a predicted value is assumed to be log-normal, with one standard
deviation below the prediction and a larger one above it. The machine's `time_spread` and
`memory_spread` were found on runs that were not used to fit its constants
(benchmarks/results/plan_public.md), what a layout far from such runs adds above (distances.py) on
held-out errors too (benchmarks/results/plan_quantiles.md). A risk is the probability of running out
of memory.
"""

import math
from statistics import NormalDist

import numpy as np

from costs import distances
from costs.hardware import Machine
from costs.job import Column, Job

DEFAULT = 0.05  # the risk of a layout that is accepted without --risk
NINETY = 1.645  # standard deviations on either side between which 90 of 100 values lie
BET = 0.8  # layouts are ranked by the seconds within which this share of runs is expected
BETS = NormalDist().inv_cdf(BET)  # the same in standard deviations
# The standard deviation of the logarithms of the shares of their peaks that the measured GPUs reach
# in large products (hardware/fitted.toml): how little a datasheet says of another GPU.
UNMEASURED = 0.13
PER_DOUBLING = 0.05  # assumed: the spread grows by this for each doubling beyond a fitted range


def out_of_memory(machine: Machine, needed: float) -> float:
    """Return the probability that a GPU runs out of memory; needed: the predicted bytes."""
    # The distance of the GPU's memory from the prediction, in standard deviations.
    room = math.log(machine.memory / needed) / machine.memory_spread
    return 0.5 * math.erfc(room / math.sqrt(2))


def safe_bytes(machine: Machine, risk: float) -> float:
    """Return the predicted bytes at which the probability of running out of memory is `risk`.

    risk: a probability above 0; a risk above 0.5 counts as 0.5.
    """
    deviations = NormalDist().inv_cdf(min(risk, 0.5))
    return machine.memory * math.exp(deviations * machine.memory_spread)


def interval(job: Job, seconds: float, block: float) -> tuple[float, float]:
    """Return the seconds (low, high) between which a step is expected in 90 of 100 runs.

    seconds: the predicted seconds of the step. block: those of a block's forward for one
    micro-batch. The interval is wider if a value of the job is outside the range on which the
    machine's constants were fitted, and above if the layout is far from measured runs.
    """
    below, above = _spreads(job, seconds, block)
    return seconds / math.exp(NINETY * below), seconds * math.exp(NINETY * float(above))


def quantile(job: Job, seconds: Column, block: Column) -> Column:
    """Return the seconds that a step is expected to keep within in a share BET of runs.

    Layouts are ranked by them: of two that are predicted to be equally fast, the one comes first
    whose kind was measured. The arguments are those of `interval`; all may be columns.
    """
    _, above = _spreads(job, seconds, block)
    return seconds * np.exp(BETS * above)


def _spreads(job: Job, seconds: Column, block: Column) -> tuple[Column, Column]:
    """Return the standard deviations of the logarithm of the seconds, below and above.

    The arguments are those of `quantile`.
    """
    values = job.fitted_values
    doublings: Column = 0.0  # by how many doublings the job is outside of fitted ranges
    of_machine = 0.0  # the spread of a machine without measured runs
    for name, (low, high) in job.machine.fitted_range.items():
        if high:  # the range is empty (0 to 0) for a machine without measured runs
            nearest = np.minimum(np.maximum(values[name], low), high)
            doublings = doublings + abs(np.log2(values[name] / nearest))
        else:
            of_machine = UNMEASURED
    # Independent errors: within the fitted range, for the distance from it, and of the machine.
    inside = job.machine.time_spread**2 + (PER_DOUBLING * doublings) ** 2 + of_machine**2
    far = distances.spread(job, block, seconds)
    return np.sqrt(inside), np.sqrt(inside + far**2)
