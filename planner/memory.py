"""Bytes on one GPU of each stage: states by ZeRO, activations in flight, logits, buffers.

The total is comparable to what nvidia-smi shows: the most that the caching allocator ever held.
Symbols: P parameters on the GPU, b micro-batch, s, h, V, t = tp, a heads.

    states       weights 2 + gradients 2..6 + workspace, each times P; 12..16 P / dp of Adam's
    activations  of every micro-batch in flight: 2 s b h per block under full recomputation
    working      the larger of the block that is being recomputed and the logits

`stages` is exact for one layout. The formulas below it take the stages of one layout, or those of
all layouts of a table (`Parts`), and give an array with a number for each stage.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from config.messages import UserError
from config.model_stats import head_norm_parameters, norm_parameters, normed_width
from config.schema import BUCKET_ELEMENTS, BUCKETS, LEAST_BUCKET, LOGITS_AT_ONCE, Config
from planner import hardware
from planner.job import Column, Job, term
from schedules import vocabulary
from schedules.automatic import settled
from schedules.compiler import long_schedule
from schedules.costs import stage_costs
from schedules.partition import StageSpec, stage_specs

# Bytes per parameter that an optimizer's state is smaller by than AdamW's two moments: two bytes
# and two scales for 256 weights, one moment, or two factors of a matrix. Muon and 8-bit AdamW leave
# some weights to AdamW: `_beside`.
SAVED_STATE = {"adamw8bit": 6.0 - 8 / 256, "sgd": 4.0, "muon": 4.0, "adafactor": 8.0}
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


class Parts(NamedTuple):
    """What stages hold of a model, as arrays that broadcast with the columns of a job: number of
    blocks, and whether there is the embedding, the head, and a copy of a tied vocabulary's matrix.
    """

    blocks: Column
    embedding: Column
    head: Column
    tied: Column

    @classmethod
    def of(cls, specs: list[StageSpec]) -> "Parts":
        """Those of one layout's stages."""
        rows = [(spec.blocks, spec.embedding, spec.head, spec.tied) for spec in specs]
        blocks, *flags = zip(*rows, strict=True)
        return cls(np.array(blocks), *(np.array(flag) for flag in flags))


def stages(job: Job) -> list[StageMemory]:
    """Memory of every pipeline rank's stages; UserError as `Job.micro_batches`."""
    layout, specs = job.layout, stage_specs(job.model, job.layout)
    parts, rank_of = Parts.of(specs), np.array([spec.rank for spec in specs])
    kept = kept_of_stages(job, specs)
    activations, heads = most_in_flight(job, kept, [float(spec.head) for spec in specs])
    own = held_parameters(parts, job)

    def of_ranks(values: Column) -> list[float]:
        """The sums of the stages' values by rank."""
        each = np.broadcast_to(values, len(specs))
        return np.bincount(rank_of, each, minlength=layout.pp).tolist()

    states = {name: of_ranks(value) for name, value in states_of(parts, job).items()}
    working = np.zeros(layout.pp)
    np.maximum.at(working, rank_of, working_of(parts, kept, np.array(heads)[rank_of], job))
    fixed = {"buffers": float(buffers_of(job)), "context": float(job.machine.context)}
    blocks, parameters = of_ranks(parts.blocks), of_ranks(own)
    found = []
    for rank in range(layout.pp):
        row: dict[str, Any] = {name: values[rank] for name, values in states.items()}
        row |= {"activations": activations[rank], "working": float(working[rank])} | fixed
        row["total"] = sum(row.values())
        found.append(StageMemory(rank, round(blocks[rank]), parameters[rank], **row))
    return found


def fullest(job: Job) -> StageMemory:
    """The fullest of `stages`; UserError as `Job.micro_batches`."""
    return max(stages(job), key=lambda stage: stage.total)


def kept_of_stages(job: Job, specs: list[StageSpec]) -> np.ndarray:
    """Bytes that each stage keeps of one micro-batch until its backward."""
    again = np.array([job.layout.recomputed_blocks(spec.blocks, spec.index) for spec in specs])
    redone, whole = kept_of_block(job)
    return again * redone + (np.array([spec.blocks for spec in specs]) - again) * whole


@term
def most_in_flight(
    job: Job, kept: np.ndarray, ends: list[float]
) -> tuple[list[float], list[float]]:
    """What each pipeline rank keeps at the most of all micro-batches in flight: bytes of
    activations, and outputs of the head. kept, ends: of one micro-batch, by stage.
    """
    layout = job.layout
    if layout.vocab_pp:
        most = vocabulary.most_held(layout, job.micro_batches, kept.tolist())
        return [float(size + sent_to_ranks(job)) for size in most], [1.0] * layout.pp
    order = layout.schedule, layout.pp, job.micro_batches, layout.stages_per_rank
    schedule = long_schedule(*order, stage_costs(job.model, layout))
    return list(schedule.most_held(kept.tolist())), list(schedule.most_held(ends))


def sent_to_ranks(job: Job) -> Column:
    """Bytes of what the ranks of --vocab-pp send one another beside activations: the results of E
    until T, some more micro-batches than are held.
    """
    return (job.layout.pp + 2) * job.activation_bytes / job.sequence_shards


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
    if config.layout.schedule_costs == "measured":  # before the run has: the limit is the same
        config = replace(config, layout=replace(config.layout, schedule_costs="counted"))
    config, _ = settled(config, "cpu" if config.run.device == "cpu" else "cuda")
    table = stages(Job(config.model, config.layout, training, machine))
    return [{part: scale * getattr(stage, part) for part in OF_RUN} for stage in table]


def least_of_run(config: Config) -> list[dict[str, float]]:
    """As `of_run`; for --precision auto, which GPUs decide later, that of what takes least."""
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


# ---- Weights, gradients, optimizer state ---------------------------------------------------------


def states_of(parts: Parts, job: Job) -> dict[str, Column]:
    """Bytes of weights, gradients and optimizer state of each stage."""
    software = job.machine.software
    # Per parameter, before it is divided by dp; in fp32 the weights are their own master.
    state = 8.0 if job.number_bytes == 4 else software.sharded_bytes
    state -= SAVED_STATE.get(job.training.optimizer, 0.0)
    held = _laid_out(held_parameters(parts, job), parts, job)
    sharded = sharded_parameters(held, parts.blocks, job)
    return {
        "weights": _weights(held, parts, job),
        "gradients": gradients_of(job, held, sharded),
        "optimizer": sharded * state + _beside(held, parts, job),
    }


@term
def gradients_of(job: Job, held: Column, sharded: Column) -> Column:
    """Bytes of the gradients of so many parameters, of which a rank updates `sharded` ones."""
    return np.where(job.zero < 2, held * _gradient_bytes(job), sharded * 4.0)


@term
def buffers_of(job: Job) -> Column:
    """Bytes of communication buffers."""
    return job.machine.software.buffers


def held_parameters(parts: Parts, job: Job) -> Column:
    """Parameters on one GPU: matrices by 1/tp, with the vocabulary's padding; norms in full."""
    model, layout = job.model, job.layout
    norms = 2 * norm_parameters(model) + head_norm_parameters(model)
    blocks = parts.blocks * ((job.block_parameters - norms) / layout.tp + norms)
    matrix = 1.0 * job.vocab_columns * model.hidden
    positions = model.max_positions * model.hidden if model.positions == "learned" else 0
    own_head = parts.head & (parts.tied | (not model.tied))
    ends = matrix * (parts.embedding * 1 + own_head)
    spread = matrix * (1 if model.tied else 2)
    return blocks + parts.embedding * positions + np.where(layout.vocab_pp, spread, ends)


def _laid_out(held: Column, parts: Parts, job: Job) -> Column:
    """Elements of the buffers of so many parameters of a stage: what Adafactor and Muon update has
    whole matrices in sections of one length, which the largest matrix may determine.
    """
    name, model = job.training.optimizer, job.model
    if name not in ("adafactor", "muon"):
        return held
    largest = model.hidden * model.up_width * (parts.blocks > 0)
    if name == "adafactor":
        ends = parts.embedding | parts.head
        largest = np.maximum(largest, ends * model.hidden * job.vocab_columns)
    matrices = held if name == "adafactor" else parts.blocks * job.block_parameters
    sections = held - matrices + np.maximum(matrices, job.shards * largest)
    return np.where(job.layout.zero > 0, sections, held)


def _weights(held: Column, parts: Parts, job: Job) -> Column:
    """Bytes of the weights in computing precision; at --zero 3 of those that are gathered."""
    size = job.number_bytes
    block = job.block_parameters / job.layout.tp  # the one that runs, and the next one
    shared = held - parts.blocks * block
    masters = 0.0 if size == 2 else held * 4.0 / job.shards
    return np.where(job.zero < 3, held * size, size * (shared + 2 * block) + masters)


def sharded_parameters(held: Column, blocks: Column, job: Job) -> Column:
    """Parameters whose optimizer state a rank has, of `held` ones in so many blocks: from --zero 1
    on an equal part of what its shards hold together, all of the experts with it.
    """
    together = held + blocks * job.experts_elsewhere / job.layout.tp
    return np.where(job.layout.zero > 0, together / job.shards, held)


def _beside(held: Column, parts: Parts, job: Job) -> Column:
    """Bytes that the state of what Muon and 8-bit AdamW leave to AdamW has more than theirs: of the
    embedding, and under Muon of the head too.
    """
    name, layout = job.training.optimizer, job.layout
    if name not in ("muon", "adamw8bit"):
        return 0.0
    others = held - parts.blocks * job.block_parameters / layout.tp
    if name == "adamw8bit" and not job.model.tied:
        own_head = np.bool_(layout.vocab_pp) | parts.head
        others = others - own_head * job.vocab_columns * job.model.hidden
    shards = np.where(layout.zero > 0, job.shards, 1)
    return SAVED_STATE[name] * np.maximum(0.0, others) / shards


def _gradient_bytes(job: Job) -> float:
    """Bytes of one gradient of the sum, before it is sharded."""
    size = job.machine.software.gradient_bytes if job.number_bytes == 2 else 4.0
    return size - 2.0 if job.training.grad_dtype == "bf16" else size


# ---- Between a forward and its end: what a backward needs in addition ----------------------------


def working_of(parts: Parts, kept: Column, heads: Column, job: Job) -> Column:
    """Bytes beside what is held between passes: the most of a block's backward, of the logits, and
    of gradients at the end of a backward, when what was kept of its micro-batch is free.

    kept: of one micro-batch, bytes; heads: outputs of the head that a rank keeps.
    """
    working = np.maximum(block_working(job), embedding_working(job, parts, kept))
    working = np.maximum(working, head_working(job, parts, heads))
    # At --zero 2 two buckets are reduced at once, and one until the next micro-batch's first: that
    # is a small one, but where a stage has a tied copy of the vocabulary's matrix.
    held = held_parameters(parts, job)
    held = _laid_out(held, parts, job)
    reduced = _gradient_bytes(job) + 4.0 / job.shards
    bucket = np.minimum(BUCKET_ELEMENTS, np.maximum(LEAST_BUCKET, held // BUCKETS))
    buckets = np.minimum(held, bucket) * (2 * reduced + job.number_bytes)
    copied = parts.tied * job.vocab_columns * job.model.hidden * reduced
    return np.where(job.zero == 2, np.maximum(working, buckets - kept) + copied, working)


@term
def block_working(job: Job) -> Column:
    """Bytes of a block's backward."""
    # The gradients of its output and input; others take the place of what is freed.
    working = 2.0 * job.activation_bytes / job.sequence_shards
    # All that the block keeps whose backward runs.
    again = np.equal(job.layout.recompute, "full")
    return np.where(again, block_activations(job, True), working)


@term
def embedding_working(job: Job, parts: Parts, kept: Column) -> Column:
    """Bytes of the embedding's gradient, and of its output's, before and after the mask, less what
    was `kept`. In fp32 a CPU adds rows to the sum, if that is kept.
    """
    matrix = 1.0 * job.vocab_columns * job.model.hidden * job.number_bytes
    adds_rows = job.machine.device == "CPU" and job.number_bytes == 4
    dense = np.where((job.zero < 2) & adds_rows, job.activation_bytes, matrix)
    outputs = job.activation_bytes * np.where(job.layout.tp > 1, 2, 1)
    has_rows = parts.embedding | np.bool_(job.layout.vocab_pp)
    return np.where(has_rows, dense + outputs - kept, 0.0)


def head_working(job: Job, parts: Parts, heads: Column) -> Column:
    """Bytes of the loss, on stages that have a head; see `loss_bytes`."""
    has_head = parts.head | np.bool_(job.layout.vocab_pp)
    return np.where(has_head, loss_bytes(job, parts, heads), 0.0)


@term
def loss_bytes(job: Job, parts: Parts, heads: Column) -> Column:
    """Bytes of the loss of one micro-batch, and what it keeps of the others in flight; in the
    head's backward the gradients of its input, and of its matrix where that is not added to the
    sum at once: the embedding has the same, or from --zero 2 on there is no sum. At --zero 3 no
    block's weights are there then.
    """
    layout = job.layout
    matrix = 1.0 * job.vocab_columns * job.model.hidden * job.number_bytes
    apart = (job.zero >= 2) | (parts.embedding & np.bool_(job.model.tied))
    apart = apart & ~np.bool_(layout.vocab_pp)
    absent = np.where(job.zero == 3, 2 * job.number_bytes * job.block_parameters / layout.tp, 0.0)
    logits = 1.0 * job.tokens * job.vocab_columns
    exact = 4.0 * np.minimum(logits, LOGITS_AT_ONCE["cuda"])
    dense = np.maximum(0.0, matrix + job.activation_bytes - absent) * apart
    return heads * job.number_bytes * logits + np.maximum(exact, dense)


# ---- Activations ---------------------------------------------------------------------------------


def kept_of_block(job: Job) -> tuple[Column, Column]:
    """Bytes that a block keeps which is recomputed, and one which is not."""
    # What is kept is allocated between what is not, which leaves gaps.
    return kept_bytes(job) * job.machine.activation_overhead, block_activations(job, True)


def kept_bytes(job: Job) -> Column:
    """Bytes one block keeps of one micro-batch until its backward."""
    recompute = job.layout.recompute
    whole = block_activations(job, True)
    kept = np.where(np.equal(recompute, "selective"), kept_selectively(job), whole)
    return np.where(np.equal(recompute, "full"), job.activation_bytes / job.sequence_shards, kept)


@term
def kept_selectively(job: Job) -> Column:
    """Bytes that a block keeps under selective recomputation: all but what attention needs."""
    return block_activations(job, False)


@term
def block_activations(job: Job, scores: Column) -> Column:
    """All that one block keeps without recomputation, arXiv 2205.05198 section 4, in bytes; of
    attention what a flash kernel does. scores: whether attention is not recomputed.

    Outside the tensor-parallel region 8 s b h, inside it 24 s b h / t for f = 4 h.
    """
    model, t = job.model, job.layout.tp
    experts, active = model.mlps
    outside: Column = 8.0 * model.hidden
    if model.block == "parallel":  # both norms have the same input
        outside -= 2.0 * model.hidden
    outside = outside / job.sequence_shards
    if experts > 1:  # sent to experts, and back
        outside = outside + 4.0 * active * model.hidden
    widths = model.qkv_width + model.attention_width + active * (model.up_width + model.ffn_hidden)
    widths += normed_width(model)
    if model.activation == "swiglu":
        widths += active * model.ffn_hidden  # SiLU's result: torch has it as a kernel of its own
    # Where attention is recomputed, keys and values are gathered again.
    gathered_from = scores * (job.cp // job.over_heads - 1)
    widths = widths + gathered_from * (model.qkv_width - model.attention_width)
    widths = widths + attention_copies(job) * model.attention_width
    return job.number_bytes / 2 * job.tokens * (outside + 2.0 * widths / t)


@term
def attention_copies(job: Job) -> Column:
    """How often attention's result is kept again: with samples before the sequence, as the next
    product takes it.
    """
    return np.where(job.layout.micro_batch_size > 1, 1.0, 0.0)
