"""Predicts the bytes on a GPU of each pipeline rank: states, activations, logits, buffers.

The total is comparable to what nvidia-smi shows: the most that the caching allocator ever held.
Symbols: P parameters on the GPU, b micro-batch size, s sequence length, h hidden size.

    states       weights 2 P, gradients 4 P, Adam's 12 P / dp
    activations  of every micro-batch in flight: 2 s b h per block under full recomputation
    working      the larger of the block that is being recomputed and the logits

A micro-batch is in flight on a rank from its forward until its backward. The terms are in
costs/memory_terms.py; `stages` adds them for one layout. A `Job` has a model, a layout, the
training options and a machine.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from base.errors import TooLittleMemory
from config.schema import Config
from config.timeline import Timeline
from costs import hardware, memory_terms, muon_terms
from costs.job import Job, term
from costs.memory_terms import Parts
from costs.partition_costs import specs_of
from schedules.long_schedule import LongSchedule, long_layout
from schedules.partition import StageSpec

# The order in which samples are read takes at least this many bytes of host memory for a sample: 8
# (or 16) for where the sample starts, and 4 (or 8) for its place in the order.
ORDER_BYTES = 12
HALVINGS = 10  # `most_rows` is exact to ep / 1024
LARGEST_GPU = 1e12  # more bytes than any GPU has, as the limit if the GPU's memory is unknown
# The parts of a GPU's memory that follow from model, layout and batch alone; the other parts,
# buffers and context, are constants of the software and the machine.
OF_RUN = ("weights", "gradients", "optimizer", "activations", "working")


@dataclass(frozen=True)
class StageMemory:
    """The memory of a GPU of one pipeline rank, by part, in bytes.

    stage: the pipeline rank. blocks, parameters: how many blocks and parameters it holds.
    """

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
    """Return the memory of every pipeline rank, summed over its stages.

    Raise UserError if the batch is smaller than one micro-batch on every replica.
    """
    layout = job.layout
    specs = specs_of(job)
    parts = Parts.of(specs)
    rank_of = np.array([spec.rank for spec in specs])  # the pipeline rank of each stage
    kept = kept_of_stages(job, specs)
    # By rank, the bytes of activations that it keeps at once, and the number of head outputs.
    activations, heads = most_in_flight(job, kept, [float(spec.head) for spec in specs])
    stage_working = memory_terms.working_of(job, parts, kept, np.array(heads)[rank_of])
    working = np.zeros(layout.pp)
    # A rank runs one stage at a time, so the largest temporary memory of its stages counts.
    np.maximum.at(working, rank_of, stage_working)
    # Muon's exchange comes when the activations are gone.
    blocks_of_rank = np.bincount(rank_of, parts.blocks, minlength=layout.pp)
    exchanged = muon_terms.exchange_bytes(job, blocks_of_rank)
    working = np.maximum(working, exchanged - np.array(activations))
    columns = {"activations": activations, "working": working.tolist()}
    by_stage = {"blocks": parts.blocks, "parameters": memory_terms.held_parameters(job, parts)}
    by_stage |= memory_terms.states_of(job, parts)
    for name, values in by_stage.items():
        stage_values = np.broadcast_to(values, len(specs))
        columns[name] = np.bincount(rank_of, stage_values, minlength=layout.pp).tolist()
    columns["buffers"] = [float(memory_terms.buffers_of(job))] * layout.pp
    columns["context"] = [float(job.machine.context)] * layout.pp
    table = []
    for rank in range(layout.pp):
        row: dict[str, Any] = {name: values[rank] for name, values in columns.items()}
        row["total"] = sum(row[part] for part in (*OF_RUN, "buffers", "context"))
        row["blocks"] = round(row["blocks"])
        table.append(StageMemory(stage=rank, **row))
    return table


def fullest(job: Job) -> StageMemory:
    """Return the memory of the pipeline rank that needs the most.

    Raise UserError if the batch is smaller than one micro-batch on every replica.
    """
    return max(stages(job), key=lambda stage: stage.total)


def kept_of_stages(job: Job, specs: list[StageSpec]) -> np.ndarray:
    """Return the bytes of activations that a stage keeps for one micro-batch: (stages,)."""
    blocks = np.array([spec.blocks for spec in specs])
    recomputed = np.array([job.layout.recomputed_blocks(spec.blocks, spec.index) for spec in specs])
    if_recomputed, if_not = memory_terms.kept_of_block(job)
    return recomputed * if_recomputed + (blocks - recomputed) * if_not


@term
def most_in_flight(
    job: Job, kept: np.ndarray, ends: list[float]
) -> tuple[list[float], list[float]]:
    """Return the most that each pipeline rank keeps at once: (bytes of activations, head outputs).

    For simple schedules a formula gives the number of micro-batches in flight; for the others the
    order of the schedule is followed. kept: for each stage, the bytes of one micro-batch's
    activations. ends: for each stage, 1 if it has the head, else 0. Both results are lists with a
    number for each pipeline rank.
    """
    layout = job.layout
    if layout.schedule not in memory_terms.EXACT:
        order = long_layout(layout, job.micro_batches)
        return list(_most_held(order, tuple(kept.tolist()))), list(_most_held(order, tuple(ends)))
    flying = memory_terms.in_flight(job, np.arange(layout.pp))
    return (flying * kept).tolist(), (flying * ends).tolist()


@lru_cache(maxsize=4096)
def _most_held(order: LongSchedule, sizes: tuple[float, ...]) -> tuple[float, ...]:
    """Return the result of `LongSchedule.most_held`, the most that each rank holds at once.

    It is cached, because layouts that differ only in ZeRO have the same order and sizes.
    """
    return order.most_held(sizes)


# ---- What a run surely needs ---------------------------------------------------------------------


def most_rows(job: Job, room: float) -> float:
    """Return the largest `rows_over_mean` with which the fullest GPU needs at most `room` bytes.

    It is at most ep: then all tokens of an expert group go to the experts of one GPU. It is 0 if
    even a GPU without rows needs more.
    """
    low = 0.0
    high = float(job.ep)
    if fullest(job._replace(rows_over_mean=high)).total <= room:
        return high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if fullest(job._replace(rows_over_mean=middle)).total <= room:
            low = middle
        else:
            high = middle
    return low


def run_memory(
    config: Config, rows_over_mean: float = 1.0, node: int | None = None
) -> list[dict[str, float]]:
    """Return the bytes of each part in OF_RUN on every pipeline rank of a run.

    train.py refuses a run that certainly does not fit, and a rehearsal compares what it measures
    with this. rows_over_mean: see `Job`. node: the GPUs of a node, default: all. The options in
    `config` must have been checked. With a batch-size ramp-up, the largest batch that this start of
    the run reaches counts.
    """
    # The parts in OF_RUN depend on the machine only by its software and the allocator's overhead.
    # The software is set to train.py, and no overhead is counted, so any machine with the run's
    # device serves.
    name = "cpu" if config.run.device == "cpu" else "a100-80"
    machine = hardware.load(name)
    machine = replace(machine, software=hardware.Software(), activation_overhead=1.0)
    machine = replace(machine, node=node or 2**30)
    # The formulas count fp64 as fp32, so all bytes of an fp64 run are doubled.
    scale = 2.0 if config.training.precision == "fp64" else 1.0
    batch = max(level.batch for level in Timeline(config).levels)
    training = replace(config.training, global_batch_size=batch)
    # A run without --ep has ep 1. This is set here, since the planner would choose an ep for None.
    layout = replace(config.layout, ep=config.layout.ep or 1)
    # With --schedule auto no rank keeps much more than the fullest rank of 1F1B does.
    if layout.schedule == "auto":
        layout = replace(layout, schedule="1f1b")
    table = stages(Job(config.model, layout, training, machine, rows_over_mean))
    return [{part: scale * getattr(stage, part) for part in OF_RUN} for stage in table]


def least_of_run(config: Config) -> list[dict[str, float]]:
    """Return the result of `run_memory`; with --precision auto, for the smallest precision.

    train.py calls it before the GPUs decide what --precision auto is, to refuse a run only if it
    fits in no precision.
    """
    precisions = ["fp32"] if config.run.device == "cpu" else ["fp32", "bf16"]
    tables = [run_memory(config.with_precision(precision)) for precision in precisions]
    return min(tables, key=lambda table: max(map(_certain, table)))


def _certain(parts: dict[str, float]) -> float:
    """Return the bytes that a rank surely needs; parts: the bytes of each part in OF_RUN.

    They are those of weights, gradients and optimizer state, whose formulas are exact, or half of
    all parts if that is more.
    """
    states = sum(parts[part] for part in ("weights", "gradients", "optimizer"))
    return max(states, sum(parts.values()) / 2)


def check_fits(table: list[dict[str, float]], config: Config, node: float) -> None:
    """Raise UserError if a rank certainly needs more memory than its node, or than any GPU, has.

    table: the result of `run_memory`. node: the bytes of memory and swap of the node. The order of
    the training samples must fit in the node too.
    """
    available = node
    has = f"this node has {node / 1e9:,.1f} GB of memory and swap"
    timeline = Timeline(config)
    samples = max(*timeline.ordered, timeline.total_samples, config.data.eval_samples)
    order_bytes = ORDER_BYTES * samples
    if config.data.data != ("synthetic",) and order_bytes > node:
        needed = f"takes {order_bytes / 1e9:,.1f} GB or more on each rank"
        raise TooLittleMemory(f"the order of {samples:,} samples {needed}; {has}")
    if config.run.device != "cpu" and node < LARGEST_GPU:
        available = LARGEST_GPU
        has = f"no GPU has {LARGEST_GPU / 1e9:,.0f} GB"
    for stage, parts in enumerate(table):
        if _certain(parts) > available:
            shown = ", ".join(f"{part} {size / 1e9:,.1f}" for part, size in parts.items())
            raise TooLittleMemory(f"a rank of stage {stage} needs, in GB, {shown}; {has}")
