"""How sure a prediction is: an interval of seconds, and the probability of running out of memory.

    out_of_memory(machine, needed)      # 0..1
    interval(job, seconds)              # (low, high), which hold 90 of 100

The ratio of measured to predicted is taken as log-normal. Its standard deviations, the machine's
`time_spread` and `memory_spread`, are those of runs that were not fitted
(benchmarks/results/plan_public.md).
"""

import math
from statistics import NormalDist

from planner.hardware import Machine
from planner.job import Job

DEFAULT = 0.05  # the probability of running out of memory that `layouts` accepts
NINETY = 1.645  # standard deviations on either side that hold 90 of 100
MEASURED = ("1f1b", "gpipe")  # schedules of the rows that the spread was found with
PER_DOUBLING = 0.05  # more spread for each doubling outside of what was fitted; assumed


def out_of_memory(machine: Machine, needed: float) -> float:
    """Probability that a GPU which needs `needed` bytes, as predicted, runs out of memory."""
    room = math.log(machine.memory / needed) / machine.memory_spread
    return 0.5 * math.erfc(room / math.sqrt(2))


def safe_bytes(machine: Machine, risk: float) -> float:
    """The most predicted bytes that fit, with a probability of running out of memory of at most
    `risk`, which is above 0.
    """
    deviations = NormalDist().inv_cdf(min(risk, 0.5))
    return machine.memory * math.exp(deviations * machine.memory_spread)


def interval(job: Job, seconds: float) -> tuple[float, float]:
    """Seconds between which a step lies in 90 of 100 cases, wider outside of what was fitted."""
    layout, values = job.layout, job.fitted_values
    doublings = 0.0
    for name, (low, high) in job.machine.fitted_range.items():
        if high:
            nearest = min(max(values[name], low), high)
            doublings += abs(math.log2(values[name] / nearest))
        else:
            doublings += 1.0
    # No row was measured with these: their step time is simulated alone.
    if layout.pp > 1 and (layout.schedule not in MEASURED or layout.vocab_pp):
        doublings += 1.0
    if layout.cp > 1:
        doublings += 1.0
    spread = math.hypot(job.machine.time_spread, PER_DOUBLING * doublings)
    factor = math.exp(NINETY * spread)
    return seconds / factor, seconds * factor
