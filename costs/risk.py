"""Computes how sure a prediction is: an interval of seconds, the probability of too little memory.

    out_of_memory(machine, needed)      # 0..1
    interval(job, seconds)              # (low, high), between which 90 of 100 runs are expected

The ratio of a measured to a predicted value is assumed to be log-normal. The standard deviations of
its logarithm, the machine's `time_spread` and `memory_spread`, were found on runs that were not
used to fit the machine's constants (benchmarks/results/plan_public.md). A risk is the probability
of running out of memory.
"""

import math
from statistics import NormalDist

from costs.hardware import Machine
from costs.job import Job

DEFAULT = 0.05  # the risk of a layout that is accepted without --risk
NINETY = 1.645  # standard deviations on either side between which 90 of 100 values lie
MEASURED = ("1f1b", "gpipe")  # schedules of the runs on which `time_spread` was found
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


def interval(job: Job, seconds: float) -> tuple[float, float]:
    """Return the seconds (low, high) between which a step is expected in 90 of 100 runs.

    seconds: the predicted seconds of the step. The interval is wider if a value of the job is
    outside the range on which the machine's constants were fitted.
    """
    layout = job.layout
    values = job.fitted_values
    doublings = 0.0  # by how many doublings the job is outside of fitted ranges
    of_machine = 0.0  # the spread of a machine without measured runs
    for name, (low, high) in job.machine.fitted_range.items():
        if high:  # the range is empty (0 to 0) for a machine without measured runs
            nearest = min(max(values[name], low), high)
            doublings += abs(math.log2(values[name] / nearest))
        else:
            of_machine = UNMEASURED
    # No run was measured with other schedules or cp: their times are only simulated.
    if layout.pp > 1 and layout.schedule not in MEASURED:
        doublings += 1.0
    if layout.cp > 1:
        doublings += 1.0
    # Independent errors: within the fitted range, for the distance from it, and of the machine.
    spread = math.hypot(job.machine.time_spread, PER_DOUBLING * doublings, of_machine)
    factor = math.exp(NINETY * spread)
    return seconds / factor, seconds * factor
