"""Bytes on one GPU of each stage: states by ZeRO, activations in flight, logits, buffers.

The total is comparable to what nvidia-smi shows: the most that the caching allocator ever held.
Symbols: P parameters on the GPU, b micro-batch, s, h, V, t = tp, a heads.

    states       weights 2 + gradients 2..6 + workspace, each times P; 12..16 P / dp of Adam's
    activations  of every micro-batch in flight: 2 s b h per block under full recomputation
    working      the larger of the block that is being recomputed and the logits
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from config.messages import UserError
from config.model_stats import head_norm_parameters, norm_parameters, normed_width
from config.schema import LOGITS_AT_ONCE, Config, Layout, bucket_elements
from planner import hardware
from planner.job import Job
from schedules import vocabulary
from schedules.automatic import settled
from schedules.compiler import long_schedule
from schedules.costs import stage_costs
from schedules.partition import StageSpec, stage_specs

# Bytes per parameter that an optimizer's state is smaller by than AdamW's two moments: two bytes
# and two scales for 256 weights, one moment, or two factors of a matrix. Muon and 8-bit AdamW leave
# some weights to AdamW: `_beside`.
SAVED_STATE = {"adamw8bit": 6.0 - 8 / 256, "sgd": 4.0, "muon": 4.0, "adafactor": 8.0}
# The logits in half precision, in FP32, less their maximum, and their exponentials, as Megatron's
# loss keeps them. Ours keeps the logits, whose memory their gradient takes, and has few in FP32.
LOGIT_BYTES = 2 + 4 + 4 + 4
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
    return [_rank(held, job) for held in _held(job, None)]


def fullest(job: Job, in_flight: int | None = None) -> StageMemory:
    """The fullest of `stages`; UserError as `Job.micro_batches`.

    in_flight: of how many micro-batches each keeps activations, default: by the schedule.
    """
    most: dict[tuple, _Held] = {}
    for held in _held(job, in_flight):
        # Of ranks that hold alike stages, the one that keeps the most.
        alike = tuple((spec.embedding, spec.head, spec.blocks) for spec in held.specs)
        if alike not in most or held.activations > most[alike].activations:
            most[alike] = held
    return max((_rank(held, job) for held in most.values()), key=lambda stage: stage.total)


def first(job: Job, in_flight: float) -> StageMemory:
    """That of the first rank, if it has so many micro-batches in flight."""
    return _rank(_held(job, in_flight)[0], job)


class _Held(NamedTuple):
    """The stages of a pipeline rank, what each keeps of one micro-batch, and what the rank keeps at
    the most of those in flight: bytes of activations, and outputs of the head.
    """

    specs: list[StageSpec]
    kept: list[float]
    activations: float
    heads: float


def _held(job: Job, in_flight: float | None) -> list[_Held]:
    """Of every pipeline rank, by the schedule unless `in_flight` is given."""
    layout, specs = job.layout, stage_specs(job.model, job.layout)
    each, ends = _kept_of_block(job), [float(spec.head) for spec in specs]
    again, of_kind = layout.recomputed_of_stage, dict[tuple, float]()  # most stages are alike
    kept = []
    for spec in specs:
        kind = spec.last - spec.first, again and again[spec.index]
        if kind not in of_kind:
            of_kind[kind] = _kept(spec, job, each)
        kept.append(of_kind[kind])
    of_rank: list[tuple[list[StageSpec], list[float]]] = [([], []) for _ in range(layout.pp)]
    for spec, size in zip(specs, kept, strict=True):
        of_rank[spec.rank][0].append(spec)
        of_rank[spec.rank][1].append(size)
    if in_flight is not None:
        several = layout.stages == layout.pp and not layout.vocab_pp
        heads = in_flight if several else 1.0  # at least
        return [_Held(*own, in_flight * sum(own[1]), heads) for own in of_rank]
    if layout.vocab_pp:
        # Beside activations, what the ranks send one another: E's until T, some more than are held.
        sent = (layout.pp + 2) * job.activation_bytes / (layout.tp if job.sequence_parallel else 1)
        most = vocabulary.most_held(layout, job.micro_batches, kept)
        return [_Held(*own, size + sent, 1.0) for own, size in zip(of_rank, most, strict=True)]
    virtual, software = layout.stages_per_rank, job.machine.software.virtual_stages
    order = layout.schedule, layout.pp, job.micro_batches, virtual
    schedule = long_schedule(*order, stage_costs(job.model, layout))
    # 1 + (pp-1)/(pp v) times as many, arXiv 2205.05198: Megatron-LM's interleaved schedule, of
    # measured rows alone.
    more = 1.0 + (layout.pp - 1) / (layout.pp * software) if software > 1 else 1.0
    rows = zip(of_rank, schedule.most_held(kept), schedule.most_held(ends), strict=True)
    return [_Held(*own, more * size, more * count) for own, size, count in rows]


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


# ---- One stage -----------------------------------------------------------------------------------


def _rank(here: _Held, job: Job) -> StageMemory:
    """Bytes of one pipeline rank."""
    software = job.machine.software
    # Per parameter, before it is divided by dp; in fp32 the weights are their own master.
    state = 8.0 if job.number_bytes == 4 else software.sharded_bytes
    state -= SAVED_STATE.get(job.training.optimizer, 0.0)
    own = [held_parameters(spec, job) for spec in here.specs]
    each = [_laid_out(count, spec, job) for count, spec in zip(own, here.specs, strict=True)]
    rank, blocks = here.specs[0].rank, sum(spec.blocks for spec in here.specs)
    held, of_stages = sum(each), list(zip(here.specs, each, here.kept, strict=True))
    optimizer = sharded_parameters(held, blocks, job) * state + _beside(held, here.specs, job)
    gathered = software.gather_buffers * job.activation_bytes if job.layout.tp > 1 else 0.0
    parts = {
        "weights": sum(_weights(count, spec, job) for spec, count, _ in of_stages),
        "gradients": _gradients(held, blocks, job) + held * software.workspace_bytes,
        "optimizer": optimizer,
        "activations": here.activations,
        "working": max(_working(*stage, here.heads, job) for stage in of_stages),
        "buffers": software.buffers + gathered,
        "context": job.machine.context,
    }
    return StageMemory(rank, blocks, sum(own), **parts, total=sum(parts.values()))


def _kept(spec: StageSpec, job: Job, each: tuple[float, float]) -> float:
    """Bytes that a stage keeps of one micro-batch until its backward; each: as `_kept_of_block`."""
    again = job.layout.recomputed_blocks(spec.blocks, spec.index)
    return again * each[0] + (spec.blocks - again) * each[1]


def _kept_of_block(job: Job) -> tuple[float, float]:
    """Bytes that a block keeps which is recomputed, and one which is not."""
    # What is kept is allocated between what is not, which leaves gaps.
    return kept_bytes(job) * job.machine.activation_overhead, block_activations(job, True)


def held_parameters(spec: StageSpec, job: Job) -> float:
    """Parameters on one GPU: matrices by 1/tp, with the vocabulary's padding; norms in full."""
    model, layout = job.model, job.layout
    norms = 2 * norm_parameters(model) + head_norm_parameters(model)
    held = spec.blocks * ((job.block_parameters - norms) / layout.tp + norms)
    matrix = job.vocab_columns * model.hidden
    if spec.embedding and not layout.vocab_pp:
        held += matrix
    if spec.embedding:
        held += model.max_positions * model.hidden if model.positions == "learned" else 0
    if layout.vocab_pp:
        held += matrix if model.tied else 2 * matrix
    elif spec.head and (spec.tied or not model.tied):
        held += matrix
    return held


def _laid_out(held: float, spec: StageSpec, job: Job) -> float:
    """Elements of the buffers of so many parameters of a stage: what Adafactor and Muon update has
    whole matrices in sections of one length, which the largest matrix may determine.
    """
    name, model = job.training.optimizer, job.model
    if name not in ("adafactor", "muon") or not job.layout.zero:
        return held
    largest = model.hidden * model.up_width * (spec.blocks > 0)
    if name == "adafactor" and (spec.embedding or spec.head):
        largest = max(largest, model.hidden * job.vocab_columns)
    matrices = held if name == "adafactor" else spec.blocks * job.block_parameters
    return held - matrices + max(matrices, job.shards * largest)


def most_parameters(job: Job) -> float:
    """Parameters on a GPU of the pipeline rank that holds the most."""
    same = ("tp", "pp", "cp", "dp", "schedule", "virtual_stages", "partition", "vocab_pp")
    about = Layout(**{name: getattr(job.layout, name) for name in (*same, "pad_vocab_multiple")})
    return _most_parameters(job._replace(layout=about))


@lru_cache(maxsize=4096)
def _most_parameters(job: Job) -> float:
    of_rank = [0.0] * job.layout.pp
    for spec in stage_specs(job.model, job.layout):
        of_rank[spec.rank] += held_parameters(spec, job)
    return max(of_rank)


def _weights(held: float, spec: StageSpec, job: Job) -> float:
    """Bytes of the weights in computing precision; at --zero 3 of those that are gathered."""
    size, layout = job.number_bytes, job.layout
    if job.zero < 3:
        return held * size
    block = job.block_parameters / layout.tp  # the one that runs, and the next one
    shared = held - spec.blocks * block
    return size * (shared + 2 * block) + (0.0 if size == 2 else held * 4.0 / job.shards)


def sharded_parameters(held: float, blocks: int, job: Job) -> float:
    """Parameters whose optimizer state a rank has, of `held` ones in so many blocks: from --zero 1
    on an equal part of what its shards hold together, all of the experts with it.
    """
    if not job.layout.zero:
        return held
    return (held + blocks * job.experts_elsewhere / job.layout.tp) / job.shards


def _beside(held: float, specs: list[StageSpec], job: Job) -> float:
    """Bytes that the state of what Muon and 8-bit AdamW leave to AdamW has more than theirs: of the
    embedding, and under Muon of the head too.
    """
    name, layout = job.training.optimizer, job.layout
    if name not in ("muon", "adamw8bit"):
        return 0.0
    others = held - sum(spec.blocks for spec in specs) * job.block_parameters / layout.tp
    own_head = not job.model.tied and (layout.vocab_pp or any(spec.head for spec in specs))
    if name == "adamw8bit" and own_head:
        others -= job.vocab_columns * job.model.hidden
    return SAVED_STATE[name] * max(0.0, others) / (job.shards if layout.zero else 1)


def _gradients(held: float, blocks: int, job: Job) -> float:
    """Bytes of the gradients; from --zero 2 on a sum of 1/dp."""
    if job.zero < 2:
        return held * _gradient_bytes(job)
    return sharded_parameters(held, blocks, job) * 4.0


def _working(spec: StageSpec, held: float, kept: float, heads: float, job: Job) -> float:
    """Bytes beside what is held between passes: the most of a block's backward, of the logits, and
    of gradients at the end of a backward, when what was kept of its micro-batch is free.
    """
    layout, flash = job.layout, not job.machine.software.keeps_scores
    working = 2.0 * job.number_bytes * job.model.ffn_hidden / layout.tp * job.tokens
    working *= job.model.mlps[1]
    if flash:  # the gradients of a block's output and input; others take the place of what is freed
        working = 2.0 * job.activation_bytes / (layout.tp if job.sequence_parallel else 1)
    if layout.recompute == "full" or _keeps_products(job):
        # All that the block keeps whose backward runs.
        working = block_activations(job, True)
    matrix = float(job.vocab_columns * job.model.hidden)
    # The embedding's gradient, and its output's, before and after the mask. In fp32 a CPU adds
    # rows to the sum, if that is kept.
    rows = job.machine.device == "CPU" and job.number_bytes == 4 and job.zero < 2
    if (spec.embedding or layout.vocab_pp) and flash:
        outputs = job.activation_bytes * (2 if layout.tp > 1 else 1)
        dense = job.activation_bytes if rows else matrix * job.number_bytes
        working = max(working, dense + outputs - kept)
    if spec.head or layout.vocab_pp:
        # In the head's backward, the gradients of its input, and of its matrix where that is not
        # added to the sum at once: the embedding has the same, or at --zero 2 there is no sum. At
        # --zero 3 no block's weights are there then, which are more.
        apart = job.zero == 2 or (spec.embedding and job.model.tied and job.zero < 3)
        dense = matrix * job.number_bytes + job.activation_bytes
        working = max(working, _logit_bytes(heads, dense * (apart and not layout.vocab_pp), job))
    if job.zero != 2:
        return working
    # At --zero 2 two buckets are reduced at once, and one until the next micro-batch's first: that
    # is a small one, but where a stage has a tied copy of the vocabulary's matrix.
    reduced = _gradient_bytes(job) + 4.0 / job.shards
    buckets = min(held, bucket_elements(held)) * (2 * reduced + job.number_bytes)
    working = max(working, buckets - kept)
    return working + (matrix * reduced if spec.tied else 0.0)


def _logit_bytes(in_flight: float, dense: float, job: Job) -> float:
    """Bytes of the loss of one micro-batch, and what it keeps of the others in flight. dense: of
    gradients beside the logits' in the head's backward.
    """
    logits = float(job.tokens) * job.vocab_columns
    logits *= job.layout.tp if job.machine.software.gathered_logits else 1
    if job.machine.software.loss_bytes:
        return job.machine.software.loss_bytes * logits
    if job.machine.software.keeps_scores:
        return LOGIT_BYTES * logits
    exact = 4.0 * min(logits, LOGITS_AT_ONCE["cuda"])
    return in_flight * job.number_bytes * logits + max(exact, dense)


def _gradient_bytes(job: Job) -> float:
    """Bytes of one gradient of the sum, before it is sharded."""
    size = job.machine.software.gradient_bytes if job.number_bytes == 2 else 4.0
    return size - 2.0 if job.training.grad_dtype == "bf16" else size


# ---- Activations ---------------------------------------------------------------------------------


def kept_bytes(job: Job) -> float:
    """Bytes one block keeps of one micro-batch until its backward."""
    if job.layout.recompute == "full":
        return job.activation_bytes / (job.layout.tp if job.sequence_parallel else 1)
    if _keeps_products(job):
        return _kept_products(job)
    kept = block_activations(job, job.layout.recompute == "none")
    again = job.machine.software.recompute_share if job.layout.recompute == "selective" else 0.0
    return kept * (1.0 - again)


def _keeps_products(job: Job) -> bool:
    return job.layout.recompute == "selective" and job.machine.software.keeps_products


def _kept_products(job: Job) -> float:
    """Bytes of a block's input, attention's result, and the products that `keeps_products` names.
    Of w2's product each tensor rank has a sum of its own; both sums are kept reduced as well.
    """
    model, t = job.model, job.layout.tp
    values = (model.qkv_width - model.attention_width) / 2
    widths = 2 * model.attention_width + values + model.ffn_hidden
    widths += model.hidden * (1 if t == 1 else 3)  # input and reduced sums are split over t
    return job.number_bytes * job.tokens * (widths / t + model.hidden)


def block_activations(job: Job, scores: bool) -> float:
    """All that one block keeps without recomputation, arXiv 2205.05198 section 4, in bytes.

    Outside the tensor-parallel region 10 s b h, inside it 24 s b h / t for f = 4 h, and 5 a s^2 b
    of attention scores unless they are recomputed or never written (flash).
    """
    model, t, software = job.model, job.layout.tp, job.machine.software
    outside = (10.0 if software.dropout else 8.0) * model.hidden
    if model.block == "parallel":  # both norms have the same input
        outside -= 2.0 * model.hidden
    if not software.fused_norms:  # the input in FP32, and the result before it is scaled
        outside += 2 * (4.0 + 2.0) * model.hidden
    if job.sequence_parallel:
        outside /= t
    experts, active = model.mlps
    widths = model.qkv_width + model.attention_width + active * (model.up_width + model.ffn_hidden)
    widths += normed_width(model) * (1 if software.fused_norms else 4)
    if scores:  # else recomputed, for which keys and values are gathered again
        gathered_from = job.cp // job.layout.over_heads(model) - 1
        widths += gathered_from * (model.qkv_width - model.attention_width)
    outside += 4.0 * active * model.hidden if experts > 1 else 0.0  # sent to experts, and back
    if model.activation == "swiglu" and not (software.keeps_scores and software.fused_elementwise):
        widths += active * model.ffn_hidden  # SiLU's result: torch has it as a kernel of its own
    if not software.keeps_scores:  # what differs where the kernels are torch's own
        # Attention's result with samples before the sequence, and as the next product takes it.
        several = 1.0 if job.layout.micro_batch_size > 1 else 0.0
        widths += int(max(software.attention_copies, several) * model.attention_width)
    size = job.tokens * (outside + 2.0 * widths / t)
    if scores and software.keeps_scores:
        each = 5.0 if software.dropout else 2.0
        size += each * model.heads / t * model.seq_length * job.tokens
    return size * job.number_bytes / 2
