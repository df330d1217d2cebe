"""How sure a prediction is: an interval of seconds, and the probability of running out of memory.

    out_of_memory(machine, needed)      # 0..1
    interval(job, seconds)              # (low, high), which hold 90 of 100

Measured over predicted is taken as log-normal with the machine's `time_spread`, `memory_spread`:
what was seen of runs that were not fitted (benchmarks/results/plan_public.md).
"""

import math

from planner.hardware import Machine
from planner.job import Job

DEFAULT = 0.05  # of running out of memory, that `layouts` accepts
NINETY = 1.645  # standard deviations on either side that hold 90 of 100
MEASURED = ("1f1b", "gpipe")  # schedules of the rows that the spread was found with
PER_DOUBLING = 0.05  # more spread for each doubling outside of what was fitted; assumed


def out_of_memory(machine: Machine, needed: float) -> float:
    """Probability that a GPU which needs `needed` bytes, as predicted, runs out of memory."""
    room = math.log(machine.memory / needed) / machine.memory_spread
    return 0.5 * math.erfc(room / math.sqrt(2))


def safe_bytes(machine: Machine, risk: float) -> float:
    """The most predicted bytes at which the probability is at most `risk`, by bisection."""
    low, high = 0.0, 10 * machine.memory
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if out_of_memory(machine, middle) <= risk else (low, middle)
    return low


def interval(job: Job, seconds: float) -> tuple[float, float]:
    """Seconds between which a step lies in 90 of 100 cases, wider outside of what was fitted."""
    model, layout, ranges = job.model, job.layout, job.machine.fitted_range
    values = {"hidden": model.hidden, "seq_length": model.seq_length, "gpus": job.gpus}
    values["micro_batch_size"] = layout.micro_batch_size
    doublings = 0.0
    for name, (low, high) in ranges.items():
        nearest = min(max(values[name], low), high)
        doublings += abs(math.log2(values[name] / nearest)) if high else 1.0
    # Of these no row was measured: they are simulated alone.
    unmeasured = layout.schedule not in MEASURED or bool(layout.vocab_pp)
    doublings += (layout.pp > 1 and unmeasured) + (layout.cp > 1)
    spread = math.hypot(job.machine.time_spread, PER_DOUBLING * doublings)
    return seconds * math.exp(-NINETY * spread), seconds * math.exp(NINETY * spread)
