"""Shares a model's blocks out to pipeline stages by the planner's seconds.

    specs_of(job)           the stages of a job's layout
    part_costs(...)         seconds of embedding, block and head, by which blocks are balanced

A plan and a run must have the same partition, and all ranks of a run must agree on it. So the
seconds do not depend on the GPU: they are those of a reference machine, with one sample, tp 1 and
no recomputation. The ratio of head to block is nearly the same on other GPUs.
"""

from functools import lru_cache

from architecture.shape import ModelShape
from config.schema import Layout, Training
from costs import hardware, time_terms
from costs.hardware import Machine
from costs.job import Job, mean_of_kinds
from schedules.partition import PartCosts, StageSpec, blocks_per_stage, stage_specs

# By kind of device, the machine whose seconds decide partitions and `--schedule auto`.
REFERENCE = {"cuda": "a100-80", "cpu": "cpu"}


@lru_cache
def reference(kind: str) -> Machine:
    """Return the machine whose seconds decide the partition; kind: "cuda" or "cpu"."""
    return hardware.load(REFERENCE[kind])


@lru_cache(maxsize=256)
def part_costs(model: ModelShape, precision: str, kind: str) -> PartCosts:
    """Return the seconds of one sample's forward and backward pass through each part of a model.

    precision: as in `Training`. kind: "cuda" or "cpu".
    """
    training = Training(global_batch_size=1, precision=precision)
    job = Job(model, Layout(dp=1), training, reference(kind))
    parts = time_terms.embedding(job), block_seconds(job), time_terms.head(job)
    return PartCosts(*(float(sum(part)) for part in parts))


block_seconds = mean_of_kinds(time_terms.block_seconds)


def costs_of(job: Job) -> PartCosts:
    """Return the `part_costs` of a job's model, for the kind of device of its machine."""
    return part_costs(job.model, job.training.precision, job.machine.kind)


def specs_of(job: Job) -> list[StageSpec]:
    """Return the stages of a job's layout; raise UserError for an impossible --partition."""
    return stage_specs(job.model, job.layout, costs_of(job))


def blocks_of(job: Job) -> list[int]:
    """Return the number of blocks of each stage; raise UserError for an impossible --partition."""
    return blocks_per_stage(job.model, job.layout, costs_of(job))
