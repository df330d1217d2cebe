"""Every term of a GPU's memory in bytes, for the stages of one layout or all layouts of a table.

    states_of(job, parts)               weights, gradients and optimizer state, by ZeRO
    kept_of_block(job)                  what a block keeps of a micro-batch until its backward
    working_of(job, parts, kept, heads) the most of a backward, beside what is kept
    buffers_of(job)

`planner.memory` puts them together.
"""

from typing import NamedTuple

import numpy as np

from config.model_stats import head_norm_parameters, norm_parameters, normed_width
from config.schema import BUCKET_ELEMENTS, BUCKETS, LEAST_BUCKET, LOGITS_AT_ONCE
from planner.job import Column, Job, mean_of_kinds, term
from schedules.partition import StageSpec
from schedules.vocabulary import more_ahead

# Bytes per parameter that an optimizer's state is smaller by than AdamW's two moments: two bytes
# and two scales for 256 weights, one moment, or two factors of a matrix. Muon and 8-bit AdamW leave
# some weights to AdamW: `state_of_others`.
SAVED_STATE = {"adamw8bit": 6.0 - 8 / 256, "sgd": 4.0, "muon": 4.0, "adafactor": 8.0}
# Bytes that a router keeps for each expert of a token, beside the row itself: its number and its
# weight in FP32 and half precision; two permutations, with --ep four.
PLACES = 8 + 4 + 2 + 2 * 8
PLACES_ELSEWHERE = PLACES + 2 * 8


EXACT = ("1f1b", "gpipe", "zb-h1")  # schedules of which `in_flight` is exact


class Parts(NamedTuple):
    """The parts of a model that stages hold, as arrays that broadcast with the columns of a job:
    number of blocks, and whether there is the embedding, the head, and a copy of a tied
    vocabulary's matrix.
    """

    blocks: Column
    embedding: Column
    head: Column
    tied: Column

    @classmethod
    def of(cls, specs: list[StageSpec]) -> "Parts":
        """Return the parts of one layout's stages."""
        rows = [(spec.blocks, spec.embedding, spec.head, spec.tied) for spec in specs]
        blocks, *flags = zip(*rows, strict=True)
        return cls(np.array(blocks), *(np.array(flag) for flag in flags))


# ---- Weights, gradients, optimizer state ---------------------------------------------------------


def states_of(job: Job, parts: Parts) -> dict[str, Column]:
    """Bytes of weights, gradients and optimizer state of each stage."""
    held = laid_out(job, parts)
    shard = sharded_parameters(job, held, parts.blocks)
    return {
        "weights": weights_of(job, parts, held),
        "gradients": gradients_of(job, held, shard),
        "optimizer": shard * state_bytes(job) + state_of_others(job, parts, held),
    }


def held_parameters(job: Job, parts: Parts) -> Column:
    """Parameters on one GPU: matrices by 1/tp, with the vocabulary's padding; norms in full."""
    model, layout = job.model, job.layout
    norms = 2 * norm_parameters(model) + head_norm_parameters(model)
    block = (job.block_parameters - norms) / layout.tp + norms
    matrix = 1.0 * job.vocab_columns * model.hidden
    positions = model.max_positions * model.hidden if model.positions == "learned" else 0
    has_own_head = parts.head & (parts.tied | (not model.tied))
    ends = matrix * parts.embedding + matrix * has_own_head
    spread = matrix * (1 if model.tied else 2)  # by --vocab-pp, over all stages
    vocabulary = np.where(layout.vocab_pp, spread, ends)
    return parts.blocks * block + parts.embedding * positions + vocabulary


def laid_out(job: Job, parts: Parts) -> Column:
    """Elements of the buffers of a stage's parameters: what Adafactor and Muon update has whole
    matrices in sections of one length, which the largest matrix may determine.
    """
    name, model, held = job.training.optimizer, job.model, held_parameters(job, parts)
    if name not in ("adafactor", "muon"):
        return held
    widest = max(model.qkv_width, model.up_width)
    if all(kind.model.experts > 1 for _, kind in job.kinds):
        widest = max(model.qkv_width, model.shared_ffn_hidden * model.up_matrices)
    largest = model.hidden * widest * (parts.blocks > 0)
    matrices = parts.blocks * (job.block_parameters - job.expert_parameters)
    if name == "adafactor":
        ends = parts.embedding | parts.head
        largest = np.maximum(largest, ends * model.hidden * job.vocab_columns)
        matrices = held - parts.blocks * job.expert_parameters
    sections = held - matrices + np.maximum(matrices, job.shards * largest)
    if model.experts > 1:  # a block's experts are in one section of the ranks that hold the same
        experts = parts.blocks * job.expert_parameters
        stack = largest_stack(job) * (parts.blocks > 0)
        sections = sections - experts + np.maximum(experts, job.shards // job.ep * stack)
    return np.where(job.layout.zero > 0, sections, held)


def largest_stack(job: Job) -> Column:
    """Parameters of the first matrices of all experts that a rank holds of a block."""
    model = job.model
    return model.experts / job.ep * model.hidden * model.expert_ffn_hidden * model.up_matrices


def weights_of(job: Job, parts: Parts, held: Column) -> Column:
    """Bytes of the weights in computing precision; at --zero 3 of those that are gathered: of the
    block that runs, and of the next one.
    """
    size = job.number_bytes
    block = job.block_parameters / job.layout.tp
    gathered = size * (held - parts.blocks * block + 2 * block)
    masters = 0.0 if size == 2 else held * 4.0 / job.shards
    return np.where(job.zero < 3, held * size, gathered + masters)


@term
def gradients_of(job: Job, held: Column, shard: Column) -> Column:
    """Bytes of the gradients of so many parameters, of which a rank updates a shard."""
    return np.where(job.zero < 2, held * gradient_bytes(job), shard * 4.0)


def gradient_bytes(job: Job) -> float:
    """Bytes of one gradient of the sum, before it is sharded."""
    size = job.machine.software.gradient_bytes if job.number_bytes == 2 else 4.0
    return size - 2.0 if job.training.grad_dtype == "bf16" else size


def sharded_parameters(job: Job, held: Column, blocks: Column) -> Column:
    """Parameters whose optimizer state a rank has, of `held` ones in so many blocks: from --zero 1
    on an equal part of what its shards hold together, all of the experts with it.
    """
    together = held + blocks * job.experts_elsewhere / job.layout.tp
    return np.where(job.layout.zero > 0, together / job.shards, held)


def state_bytes(job: Job) -> float:
    """Bytes of a parameter's optimizer state; in fp32 the weights are their own master."""
    whole = 8.0 if job.number_bytes == 4 else job.machine.software.sharded_bytes
    return whole - SAVED_STATE.get(job.training.optimizer, 0.0)


def state_of_others(job: Job, parts: Parts, held: Column) -> Column:
    """Bytes that the state of what Muon and 8-bit AdamW leave to AdamW has more than theirs: of the
    embedding, and under Muon of the head too.
    """
    name = job.training.optimizer
    if name not in ("muon", "adamw8bit"):
        return 0.0
    others = held - parts.blocks * job.block_parameters / job.layout.tp
    if name == "adamw8bit" and not job.model.tied:
        has_own_head = np.bool_(job.layout.vocab_pp) | parts.head
        others = others - has_own_head * job.vocab_columns * job.model.hidden
    shards = np.where(job.layout.zero > 0, job.shards, 1)
    return SAVED_STATE[name] * np.maximum(0.0, others) / shards


@term
def buffers_of(job: Job) -> Column:
    """Bytes of communication buffers."""
    return job.machine.software.buffers


# ---- Activations ---------------------------------------------------------------------------------


def kept_of_block(job: Job) -> tuple[Column, Column]:
    """Bytes of one micro-batch that a block keeps which is recomputed, and one which is not."""
    # Tensors that are kept are allocated between others that are freed, which leaves gaps.
    return kept_bytes(job) * job.machine.activation_overhead, block_activations(job, True)


def kept_bytes(job: Job) -> Column:
    """Bytes that a block keeps of one micro-batch until its backward, as the layout says: under
    full recomputation its input.
    """
    recompute = job.layout.recompute
    whole = block_activations(job, True)
    kept = np.where(np.equal(recompute, "selective"), kept_selectively(job), whole)
    return np.where(np.equal(recompute, "full"), job.activation_bytes / job.sequence_shards, kept)


@mean_of_kinds
@term
def kept_selectively(job: Job) -> Column:
    """Bytes that a block keeps under selective recomputation: all but what attention needs."""
    return block_activations(job, False)


@mean_of_kinds
@term
def block_activations(job: Job, scores: Column) -> Column:
    """Bytes that one block keeps without recomputation, arXiv 2205.05198 section 4; of attention
    what a flash kernel does. scores: whether attention is not recomputed.

    That is 8 s b h outside the tensor-parallel region and 24 s b h / t inside, for f = 4 h.
    """
    model, t, h = job.model, job.layout.tp, job.model.hidden
    experts, active = model.mlps
    f = active * model.ffn_hidden + model.shared_ffn_hidden
    keys = model.qkv_width - model.attention_width
    numbers = (3 if model.block == "parallel" else 4) * h / job.sequence_shards  # norms, products
    numbers = numbers + model.qkv_width / t  # queries, keys and values
    numbers = numbers + model.attention_width / t  # attention's result
    numbers = numbers + attention_copies(job) * model.attention_width / t
    numbers = numbers + f * model.up_matrices / t  # the activation's input
    numbers = numbers + f / t  # its result
    numbers = numbers + normed_width(model) / t
    if model.activation == "swiglu":
        numbers = numbers + f / t  # SiLU's result: torch has it as a kernel of its own
    numbers = numbers + copied_width(job) / t
    if experts > 1:
        numbers = numbers + 2 * active * h / t  # sent to experts, and back
    # Keys and values of other ranks of cp; where attention is recomputed, gathered again.
    gathered_from = scores * (job.cp // job.over_heads - 1)
    numbers = numbers + gathered_from * keys / t
    return job.number_bytes * job.tokens * numbers + routing_bytes(job)


def routing_bytes(job: Job) -> Column:
    """Bytes that a block's router keeps of one micro-batch: in FP32 its input, in place of that of
    an MLP, and the scores; and of each row's way to its expert and back the places.
    """
    model, h = job.model, job.model.hidden
    if model.experts == 1:
        return 0.0
    places = np.where(job.ep > 1, PLACES_ELSEWHERE, PLACES)
    each = 4.0 * (h + model.experts) + places * model.experts_per_token
    unused = 0 if model.shared_ffn_hidden else h
    saved = job.number_bytes * unused / job.sequence_shards
    return job.tokens * (each / job.layout.tp - saved)


@term
def copied_width(job: Job) -> Column:
    """Columns of queries and keys that a block keeps again beside those of the product, which hold
    the values too: rotary positions turn both, and queries that share keys lie apart.
    """
    model = job.model
    if model.qk_norm == "none" and model.positions == "rotary":
        return (model.qkv_width + model.attention_width) / 2
    return model.attention_width * (model.kv_heads < model.heads)


@term
def attention_copies(job: Job) -> Column:
    """How often attention's result is kept again: with samples before the sequence, as the next
    product takes it.
    """
    return np.where(job.layout.micro_batch_size > 1, 1.0, 0.0)


def in_flight(job: Job, rank: Column) -> Column:
    """Micro-batches whose activations in all its stages a rank surely keeps at once; for a schedule
    of EXACT without --vocab-pp exactly so many.
    """
    layout, count = job.layout, job.micro_batches
    name = layout.schedule
    # An interleaved rank runs so many forwards ahead, a group of micro-batches through each stage.
    group, virtual = -(-count // np.maximum(1, count // layout.pp)), layout.stages_per_rank
    ahead = 2 * (layout.pp - 1 - rank) + (virtual - 1) * group + 1
    interleaved = np.minimum(count * virtual, ahead) / virtual
    further = np.where(layout.vocab_pp, more_ahead(layout.pp), 0)
    flying = np.minimum(layout.pp - rank + further, count)
    flying = np.where(np.equal(name, "gpipe"), count, flying)
    # Every rank of zb-v holds as many as the first one of 1F1B (schedules/list_scheduling.py).
    flying = np.where(layout.splits_backward, np.minimum(layout.pp, count), flying)
    return np.where(np.equal(name, "interleaved"), interleaved, flying)


def sent_to_ranks(job: Job) -> Column:
    """Bytes of what the ranks of --vocab-pp send one another beside activations: the results of E
    until T, some more micro-batches than are held.
    """
    return (job.layout.pp + 2) * job.activation_bytes / job.sequence_shards


# ---- Between a forward and its end: what a backward needs in addition ----------------------------


def working_of(job: Job, parts: Parts, kept: Column, heads: Column) -> Column:
    """Bytes beside what is held between passes: the most of a block's backward, of the logits, and
    of gradients at the end of a backward, when what was kept of its micro-batch is free.

    kept: of one micro-batch, bytes; heads: outputs of the head that a rank keeps.
    """
    of_blocks = np.where(parts.blocks > 0, block_working(job), 0.0)
    working = np.maximum(of_blocks, embedding_working(job, parts, kept))
    has_head = parts.head | np.bool_(job.layout.vocab_pp)
    working = np.maximum(working, np.where(has_head, loss_bytes(job, parts, heads), 0.0))
    reduced = np.maximum(working, buckets_of(job, parts) - kept) + tied_gradient(job, parts)
    return np.where(job.zero == 2, reduced, working)


def buckets_of(job: Job, parts: Parts) -> Column:
    """Bytes of the gradients' buckets at --zero 2, of which two are reduced at once."""
    held = laid_out(job, parts)
    bucket = np.minimum(BUCKET_ELEMENTS, np.maximum(LEAST_BUCKET, held // BUCKETS))
    return np.minimum(held, bucket) * (2 * reduced_bytes(job) + job.number_bytes)


def tied_gradient(job: Job, parts: Parts) -> Column:
    """Bytes of the bucket that is kept until the next micro-batch's first, at --zero 2: a small
    one, but where a stage has a tied copy of the vocabulary's matrix.
    """
    return parts.tied * job.vocab_columns * job.model.hidden * reduced_bytes(job)


def reduced_bytes(job: Job) -> Column:
    """Bytes of a gradient that is being reduced, and of its part of the sum."""
    return gradient_bytes(job) + 4.0 / job.shards


@term
def block_working(job: Job) -> Column:
    """Bytes of a block's backward: all that a block keeps that is computed again; else the
    gradients of its output and input, since others take the place of what is freed. Of experts
    there are the gradients of a token's rows and their products before anything is free.
    """
    ends = 2.0 * job.activation_bytes / job.sequence_shards
    active = job.model.experts_per_token * (job.model.experts > 1)
    rows = 2.0 * active * job.activation_bytes / job.layout.tp
    whole = block_activations(job, True)
    return np.where(np.equal(job.layout.recompute, "full"), whole, ends) + rows


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


@term
def loss_bytes(job: Job, parts: Parts, heads: Column) -> Column:
    """Bytes of the loss of one micro-batch, and what it keeps of the others in flight; in the
    head's backward the gradients of its input, and of its matrix where that is not added to the
    sum at once: the embedding has the same, or from --zero 2 on there is no sum. At --zero 3 no
    block's weights are there then.
    """
    size, layout = job.number_bytes, job.layout
    matrix = 1.0 * size * job.vocab_columns * job.model.hidden
    apart = (job.zero >= 2) | (parts.embedding & np.bool_(job.model.tied))
    apart = apart & ~np.bool_(layout.vocab_pp)
    absent = np.where(job.zero == 3, 2 * size * job.block_parameters / layout.tp, 0.0)
    gradients = np.maximum(0.0, matrix + job.activation_bytes - absent) * apart
    logits = 1.0 * job.tokens * job.vocab_columns
    in_fp32 = 4.0 * np.minimum(logits, LOGITS_AT_ONCE["cuda"])
    return heads * size * logits + np.maximum(in_fp32, gradients)
