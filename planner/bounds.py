"""Seconds that a layout takes no less than, known before any schedule is built.

    least_seconds(job) >= best        the layout cannot be faster than one of `best` seconds

The search leaves out what cannot be first by these bounds (planner/search.py), and prices the rest
with planner/step_time.py.
"""

from planner import step_time
from planner.job import Job
from schedules.partition import placement


def least_seconds(job: Job, idle: bool = True) -> float:
    """Seconds that no order of the layout's passes is faster than: a rank waits until the first
    micro-batch comes, does its own passes, and the last backward goes on to the first rank.

    idle: whether the ranks wait; without it of every schedule with the same passes.
    """
    least = _least_waiting(job) if idle else least_busy(job)
    return least + job.machine.slowdown * sum(step_time.step_parts(job).values())


def least_busy(job: Job) -> float:
    """Seconds of all passes of a step if every rank had as many and never waited."""
    if job.machine.software.virtual_stages > 1:
        return job.machine.slowdown * step_time.pipeline_time(job)[0]
    each = sum(map(sum, step_time.stage_passes(job))) / job.layout.pp
    return job.machine.slowdown * job.micro_batches * (each + _beside(job))


def _least_waiting(job: Job) -> float:
    """As `least_busy`, and no less than any rank's own passes and its waiting for the others."""
    layout, machine, least = job.layout, job.machine, least_busy(job)
    if machine.software.virtual_stages > 1 or machine.ranks_per_core > 1:
        return least  # on shared cores other ranks use the time
    passes, busy = step_time.stage_passes(job), [0.0] * layout.pp
    for rank, one in zip(placement(layout), passes, strict=True):
        busy[rank] += sum(one)
    way, sent, own = 0.0, step_time.message_seconds(job), _beside(job)
    for rank in range(layout.pp):
        least = max(least, machine.slowdown * (way + job.micro_batches * (busy[rank] + own)))
        way += passes[rank].forward + sent
        way += 0.0 if layout.splits_backward else passes[rank].backward + sent
    return least


def _beside(job: Job) -> float:
    """Seconds of a rank for S and T of one micro-batch, where the ranks share the vocabulary."""
    if not job.layout.vocab_pp:
        return 0.0
    return sum(step_time.vocabulary_seconds(job)[kind, 0] for kind in "ST")
