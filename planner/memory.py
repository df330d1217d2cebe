"""Bytes on one GPU of each stage: states by ZeRO, activations in flight, logits, buffers.

The total is comparable to what nvidia-smi shows: the most that the caching allocator ever held.
Symbols: P parameters on the GPU, b micro-batch, s, h, V, t = tp, a heads.

    states       weights 2 P, gradients 4 P, Adam's 12 P / dp
    activations  of every micro-batch in flight: 2 s b h per block under full recomputation
    working      the larger of the block that is being recomputed and the logits

The terms are in planner/memory_terms.py; `stages` puts them together for one layout.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from config.messages import UserError
from config.schema import Config
from planner import hardware, memory_terms
from planner.job import Job, term
from planner.memory_terms import Parts
from schedules.long_schedule import long_layout
from schedules.partition import StageSpec, stage_specs

ORDER_BYTES = 12  # of a sample in a split's order: where it starts (8 or 16), its place (4 or 8)
# The parts that follow from model and layout alone, without the allocator and the libraries.
LARGEST_GPU = 1e12  # bytes, above those of any
OF_RUN = ("weights", "gradients", "optimizer", "activations", "working")


@dataclass(frozen=True)
class StageMemory:
    """Bytes that each GPU of one pipeline rank holds, and its parameters. stage: that rank."""

    stage: int
    blocks: int
    parameters: float
    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    buffers: float
    context: float
    total: float


def stages(job: Job) -> list[StageMemory]:
    """Memory of every pipeline rank's stages; UserError as `Job.micro_batches`."""
    layout, specs = job.layout, stage_specs(job.model, job.layout)
    parts, rank_of = Parts.of(specs), np.array([spec.rank for spec in specs])
    kept = kept_of_stages(job, specs)
    activations, heads = most_in_flight(job, kept, [float(spec.head) for spec in specs])
    summed = {"blocks": parts.blocks, "parameters": memory_terms.held_parameters(job, parts)}
    summed |= memory_terms.states_of(job, parts)
    working = np.zeros(layout.pp)
    of_stages = memory_terms.working_of(job, parts, kept, np.array(heads)[rank_of])
    np.maximum.at(working, rank_of, of_stages)
    columns = {"activations": activations, "working": working.tolist()}
    for name, values in summed.items():
        each = np.broadcast_to(values, len(specs))
        columns[name] = np.bincount(rank_of, each, minlength=layout.pp).tolist()
    columns["buffers"] = [float(memory_terms.buffers_of(job))] * layout.pp
    columns["context"] = [float(job.machine.context)] * layout.pp
    found = []
    for rank in range(layout.pp):
        row: dict[str, Any] = {name: values[rank] for name, values in columns.items()}
        row["total"] = sum(row[part] for part in (*OF_RUN, "buffers", "context"))
        row["blocks"] = round(row["blocks"])
        found.append(StageMemory(stage=rank, **row))
    return found


def fullest(job: Job) -> StageMemory:
    """The fullest of `stages`; UserError as `Job.micro_batches`."""
    return max(stages(job), key=lambda stage: stage.total)


def kept_of_stages(job: Job, specs: list[StageSpec]) -> np.ndarray:
    """Bytes that each stage keeps of one micro-batch until its backward."""
    again = np.array([job.layout.recomputed_blocks(spec.blocks, spec.index) for spec in specs])
    redone, whole = memory_terms.kept_of_block(job)
    return again * redone + (np.array([spec.blocks for spec in specs]) - again) * whole


@term
def most_in_flight(
    job: Job, kept: np.ndarray, ends: list[float]
) -> tuple[list[float], list[float]]:
    """Return the most that each pipeline rank keeps of all micro-batches in flight: bytes of
    activations, and outputs of the head. kept, ends: of one micro-batch, by stage.
    """
    layout = job.layout
    if layout.schedule in memory_terms.EXACT and not layout.vocab_pp:
        flying = memory_terms.in_flight(job, np.arange(layout.pp))
        return (flying * kept).tolist(), (flying * ends).tolist()
    schedule = long_layout(job.model, layout, job.micro_batches)
    if layout.vocab_pp:
        most = schedule.most_held(kept.tolist())
        sent = memory_terms.sent_to_ranks(job)
        return [float(size + sent) for size in most], [1.0] * layout.pp
    return list(schedule.most_held(kept.tolist())), list(schedule.most_held(ends))


# ---- What a run surely needs ---------------------------------------------------------------------


def of_run(config: Config) -> list[dict[str, float]]:
    """Bytes by part of OF_RUN on every pipeline rank: what model and layout account for.

    `config` must be checked. Of a ramp-up, the largest batch of this start counts.
    """
    # Any will do: with this software and no overhead, its numbers are not in these parts.
    machine = hardware.load("cpu" if config.run.device == "cpu" else "a100-80")
    machine = replace(machine, software=hardware.Software(), activation_overhead=1.0)
    scale = 2.0 if config.training.precision == "fp64" else 1.0  # the formulas end at fp32
    batch = max(level.batch for level in config.levels)
    training = replace(config.training, global_batch_size=batch)
    layout = replace(config.layout, ep=config.layout.ep or 1)  # a run has 1 if none is given
    if layout.schedule == "auto":  # which holds no more than the fullest rank of 1F1B
        layout = replace(layout, schedule="1f1b")
    table = stages(Job(config.model, layout, training, machine))
    return [{part: scale * getattr(stage, part) for part in OF_RUN} for stage in table]


def least_of_run(config: Config) -> list[dict[str, float]]:
    """Return what `of_run` does; for --precision auto, which GPUs decide later, that of what takes
    least.
    """
    names = ["fp32"] if config.run.device == "cpu" else ["fp32", "bf16"]
    tables = [of_run(config.with_precision(name)) for name in names]
    return min(tables, key=lambda table: max(map(_certain, table)))


def _certain(parts: dict[str, float]) -> float:
    """Bytes that a rank surely needs: its states, or half of all parts, whose formulas are less
    exact.
    """
    states = sum(parts[part] for part in ("weights", "gradients", "optimizer"))
    return max(states, sum(parts.values()) / 2)


def check_fits(table: list[dict[str, float]], config: Config, node: float) -> None:
    """UserError if a rank certainly needs more memory than its node of `node` bytes, or any GPU.

    table: that of `of_run`. Weights, gradients and optimizer state alone must fit, and half of all
    parts, whose formulas are less exact; and the order of a split's samples.
    """
    room, what = node, f"this node has {node / 1e9:,.1f} GB of memory and swap"
    samples = max(config.total_samples, config.data.eval_samples)
    if config.data.data != ("synthetic",) and ORDER_BYTES * samples > node:
        needed = f"takes {ORDER_BYTES * samples / 1e9:,.1f} GB or more on each rank"
        raise UserError(f"the order of {samples:,} samples {needed}; {what}")
    if config.run.device != "cpu" and node < LARGEST_GPU:
        room, what = LARGEST_GPU, f"no GPU has {LARGEST_GPU / 1e9:,.0f} GB"
    for stage, parts in enumerate(table):
        if _certain(parts) > room:
            shown = ", ".join(f"{part} {size / 1e9:,.1f}" for part, size in parts.items())
            raise UserError(f"a rank of stage {stage} needs, in GB, {shown}; {what}")
