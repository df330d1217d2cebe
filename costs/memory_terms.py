"""Every term of a GPU's memory in bytes, for the stages of one layout or all layouts of a table.

    states_of(job, parts)               weights, gradients and optimizer state, by ZeRO stage
    kept_of_block(job)                  activations of a micro-batch that a block keeps for backward
    working_of(job, parts, kept, heads) the largest temporary memory of a backward pass
    buffers_of(job)                     communication buffers

`costs.memory` adds these terms. A `Job` has a model, a layout, the training options and a
machine. The layout may be one, or many as columns: a `Column` is a number, or an array with a
number for each layout or stage. `Parts` says which parts of the model a stage holds: the number of
blocks, the embedding, the head. A formula with the decorator `term` can be replaced by another
training program's; `mean_of_kinds` applies a formula to each kind of block, and takes the mean.
"""

import functools
from typing import NamedTuple

import numpy as np

from architecture.block_attention import SPAN
from architecture.model_stats import (
    attends,
    block_norms,
    mean_of_blocks,
    mixer_matrices,
    mixes,
    norm_parameters,
    normed_width,
    whole_scales,
)
from architecture.shape import ModelShape
from config.buffer_sizes import (
    BUCKET_ELEMENTS,
    BUCKETS,
    LEAST_BUCKET,
    LOGITS_AT_ONCE,
    logits_at_once,
)
from config.optimizers import OPTIMIZERS
from costs import mixer_terms
from costs.job import Column, Job, mean_of_kinds, term
from schedules.partition import StageSpec

# AdamW's two moments in FP32, in bytes per parameter.
MOMENT_BYTES = OPTIMIZERS["adamw"].state_bytes
# Bytes that the router of a block with experts keeps for each chosen expert of a token: the
# expert's number (8), its weight in FP32 (4) and half precision (2), the token's index in two
# permutations.
PLACES = 8 + 4 + 2 + 2 * 8
# With --ep > 1 the token is also permuted by rank, which takes two permutations more.
PLACES_ELSEWHERE = PLACES + 2 * 8
# If nodes get one copy of a token (node_dispatch.py), its rows are ordered by copy too, which takes
# one index more; a copy has three, and a token one.
PLACES_ON_NODES = PLACES_ELSEWHERE + 8
PLACES_OF_COPY, PLACES_OF_TOKEN = 3 * 8, 8

# With these schedules `in_flight` (micro-batches in flight on a rank) is exact, else a lower bound.
EXACT = ("1f1b", "gpipe", "zb-h1")
BOUNDED = (*EXACT, "interleaved", "zb-v")  # of these it is at most what the schedule holds


class Parts(NamedTuple):
    """The parts of a model that stages hold, as arrays that broadcast with the columns of a job.

    blocks: the number of blocks. embedding, head: whether the stage has the embedding, the head.
    tied: whether the stage has a copy of a matrix that embedding and head share.
    """

    blocks: Column
    embedding: Column
    head: Column
    tied: Column

    @classmethod
    def of(cls, specs: list[StageSpec]) -> "Parts":
        """Return the parts of one layout's stages as arrays: (stages,)."""
        rows = [(spec.blocks, spec.embedding, spec.head, spec.tied) for spec in specs]
        blocks, *flags = zip(*rows, strict=True)
        return cls(np.array(blocks), *(np.array(flag) for flag in flags))


# ---- Weights, gradients, optimizer state ---------------------------------------------------------


def states_of(job: Job, parts: Parts) -> dict[str, Column]:
    """Return the bytes of weights, gradients and optimizer state of each stage, by these names."""
    held = laid_out(job, parts)
    shard = sharded_parameters(job, held, parts.blocks)
    return {
        "weights": weights_of(job, parts, held),
        "gradients": gradients_of(job, held, shard),
        "optimizer": shard * state_bytes(job) + state_of_others(job, parts, held),
    }


def held_parameters(job: Job, parts: Parts) -> Column:
    """Return the number of parameters of a stage on one GPU.

    Matrices are divided by tp, the vocabulary is padded, and norms are whole on each GPU.
    """
    model = job.model
    layout = job.layout
    norms = block_norms(model) * norm_parameters(model) + mean_of_blocks(model, whole_scales)
    block = job.parameters_here + norms - norms / layout.tp + further_parameters(job)
    vocabulary_matrix = 1.0 * job.vocab_columns * model.hidden
    positions = 0
    if model.positions == "learned":
        positions = model.max_positions * model.hidden
    has_head_matrix = parts.head & (parts.tied | (not model.tied))  # its own, or a tied copy
    vocabulary = vocabulary_matrix * parts.embedding + vocabulary_matrix * has_head_matrix
    if model.mtp_depth:
        if not model.tied:  # its modules' copy of the embedding's matrix, beside the head's own
            vocabulary = vocabulary + vocabulary_matrix * (parts.head & parts.tied)
        vocabulary = vocabulary + parts.head * predictor_parameters(job)
    return parts.blocks * block + parts.embedding * positions + vocabulary


def predictor_parameters(job: Job) -> Column:
    """Return the number of parameters of --mtp-depth's modules on one GPU of the last stage.

    Each has a block, whose matrices tp divides, and whole on each GPU three norms and a matrix.
    """
    model = job.model
    each = job.predictor
    norms = block_norms(each.model) * norm_parameters(model) + whole_scales(each.model)
    block = each.parameters_here + norms - norms / job.layout.tp
    return model.mtp_depth * (block + 3 * norm_parameters(model) + 2 * model.hidden**2)


def kept_of_predictors(job: Job) -> Column:
    """Return the bytes that --mtp-depth's modules keep for one micro-batch, without logits.

    Beside its block each keeps the inputs and the results of three norms, two of which are joined.
    """
    if not job.model.mtp_depth:
        return 0.0
    beside = 8.0 * job.activation_bytes / job.sequence_shards
    return job.model.mtp_depth * (kept_of_block(job.predictor)[0] + beside)


@term
def further_parameters(job: Job) -> Column:
    """Return the number of a block's parameters on one GPU that the model's shape does not count.

    There are none in Trine; programs of published rows have blocks that no shape describes.
    """
    return 0.0


def laid_out(job: Job, parts: Parts) -> Column:
    """Return the number of elements of the buffers that hold a stage's parameters, with padding.

    With ZeRO a buffer has an equally long section for each rank. Adafactor updates whole matrices,
    those of embedding and head too, so a section holds whole matrices, and is at least as long as
    the largest matrix.
    """
    model = job.model
    optimizer = job.training.optimizer
    held = held_parameters(job, parts)
    if optimizer != "adafactor":
        return held
    of_mlp = model.up_width  # columns of the widest matrix of a block's MLP
    # Blocks with experts have outside of them only matrices of attention and of the shared MLP.
    if all(kind.model.experts > 1 for _, kind in job.kinds):
        of_mlp = model.shared_ffn_hidden * model.up_matrices
    has_blocks = parts.blocks > 0
    of_mixers = [outs * ins for _, kind in job.kinds for outs, ins, _ in mixer_matrices(kind.model)]
    largest = max(*of_mixers, model.hidden * of_mlp) * has_blocks  # numbers of a matrix
    has_vocabulary = parts.embedding | parts.head
    largest = np.maximum(largest, has_vocabulary * model.hidden * job.vocab_columns)
    matrices = held - parts.blocks * job.expert_parameters
    sections = held - matrices + np.maximum(matrices, job.shards * largest)
    # The experts have sections of their own, for the fewer ranks that hold the same experts.
    if model.experts > 1:
        experts = parts.blocks * job.expert_parameters
        stack = largest_stack(job) * has_blocks
        sections = sections - experts + np.maximum(experts, job.shards // job.ep * stack)
    return np.where(job.layout.zero > 0, sections, held)


def largest_stack(job: Job) -> Column:
    """Return the number of parameters of the largest tensor of a block with experts, on a rank.

    It stacks the first MLP matrices (up, and gate if there is one) of all the rank's experts.
    """
    model = job.model
    return model.experts / job.ep * model.hidden * model.expert_ffn_hidden * model.up_matrices


def weights_of(job: Job, parts: Parts, held: Column) -> Column:
    """Return the bytes of a stage's weights in computing precision. held: its parameters.

    At --zero 3 only two blocks are gathered at once, the block that runs and the next one, or with
    reshard_after_forward false all blocks.
    """
    size = job.number_bytes
    block = job.parameters_here
    freed = np.where(job.layout.reshard_after_forward, (parts.blocks - 2) * block, 0.0)
    gathered = size * (held - freed)
    masters = 0.0
    # In fp32 the weights are their own masters, so `state_bytes` counts no masters. At --zero 3 the
    # weights counted here are gathered copies, and the shard of masters has to be added.
    if size == 4:
        masters = held * 4.0 / job.shards
    return np.where(job.zero < 3, held * size, gathered + masters)


@term
def gradients_of(job: Job, held: Column, shard: Column) -> Column:
    """Return the bytes of a GPU's gradients.

    From --zero 2 on, a GPU keeps only the gradients of the parameters that it updates, in FP32; at
    --zero 3 with sync_each_batch false it first sums all of its gradients over the micro-batches.
    held, shard: the numbers of parameters on the GPU, and of those that it updates.
    """
    return np.where(job.reduces_once, held * gradient_bytes(job), shard * 4.0)


def gradient_bytes(job: Job) -> float:
    """Return the bytes of one gradient in a GPU's sum below --zero 2; a bf16 sum has 2 less."""
    size = job.machine.software.gradient_bytes if job.number_bytes == 2 else 4.0
    return size - 2.0 if job.training.grad_dtype == "bf16" else size


def sharded_parameters(job: Job, held: Column, blocks: Column) -> Column:
    """Return the number of parameters whose optimizer state a rank has.

    held: the parameters on the rank; blocks: its number of blocks. From --zero 1 on, the state is
    divided equally over `job.shards` ranks, which together hold all experts of the blocks.
    """
    held_with_all_experts = held + blocks * job.experts_elsewhere / job.layout.tp
    return np.where(job.layout.zero > 0, held_with_all_experts / job.shards, held)


def state_bytes(job: Job) -> float:
    """Return the bytes of one parameter's optimizer state, with its FP32 master.

    `sharded_bytes` is its size with AdamW in this training program. In fp32 there are no masters:
    AdamW's two moments alone. --ema keeps an average in the masters' type.
    """
    with_adamw = MOMENT_BYTES if job.number_bytes == 4 else job.machine.software.sharded_bytes
    average = max(4.0, float(job.number_bytes)) if job.training.ema else 0.0
    return with_adamw - less_than_adamw(job) + average


def less_than_adamw(job: Job) -> float:
    """Return the bytes per parameter by which the optimizer's state is smaller than AdamW's."""
    return MOMENT_BYTES - OPTIMIZERS[job.training.optimizer].state_bytes


def state_of_others(job: Job, parts: Parts, held: Column) -> Column:
    """Return the bytes to add to `state_bytes` for the parameters that AdamW updates instead.

    With Muon these are the parameters of embedding and head, with 8-bit AdamW those of the
    embedding; their state has AdamW's full size. held: the parameters of a stage.
    """
    optimizer = job.training.optimizer
    if optimizer not in ("muon", "adamw8bit"):
        return 0.0
    by_adamw = held - parts.blocks * job.parameters_here  # outside of blocks
    if optimizer == "adamw8bit" and not job.model.tied:
        by_adamw = by_adamw - parts.head * job.vocab_columns * job.model.hidden
    shards = np.where(job.layout.zero > 0, job.shards, 1)
    return less_than_adamw(job) * np.maximum(0.0, by_adamw) / shards


@term
def buffers_of(job: Job) -> Column:
    """Return the bytes of communication buffers on a GPU, which the allocator does not count.

    Most of them belong to the communicators of the rank's groups.
    """
    software = job.machine.software
    free, limited = communicators(job)
    return software.buffers + software.group_bytes * free + software.limited_group_bytes * limited


def communicators(job: Job) -> tuple[Column, Column]:
    """Return the number of a rank's groups, of which each has a communicator: (free, limited).

    They are the groups of several ranks that distributed/mesh.py makes for a rank at an end of its
    pipeline. Free: NCCL chooses how many channels an operation takes, each with buffers; limited:
    their number has a limit (distributed/context.py).
    """
    layout = job.layout
    tp, pp, cp = np.greater(layout.tp, 1), np.greater(layout.pp, 1), np.greater(job.cp, 1)
    over_heads = np.greater(job.over_heads, 1)
    gathers_keys = over_heads & np.greater(job.cp, job.over_heads)
    # Tensor ranks with the same key/value head have a group, unless they are all of them.
    has_copies = np.greater(layout.tp, job.model.kv_heads) & job.model.attends
    kv_copies = has_copies & (job.model.kv_heads > 1)
    experts = np.greater(job.ep, 1)
    # Experts that send one copy to a node have a group across nodes, and one within the node.
    on_nodes = np.greater(job.nodes_with_one_copy, 1)
    experts_within = on_nodes & np.greater(job.machine.node, 1)
    free = 1 * tp + cp + over_heads + gathers_keys + experts + experts_within
    replicas = cp & np.greater(job.shards, 1)
    expert_replicas = (experts | tp) & np.greater(job.shards * layout.tp, job.ep)
    expert_replicas = expert_replicas & (job.model.experts > 1)
    # Activations and their gradients have a group each. The ends of a pipeline have one if they
    # share a tied matrix; in a V they are on the same rank.
    pipeline = 2 * pp
    in_a_v = np.equal(layout.schedule, "zb-v")
    pipeline = pipeline + (pp & ~in_a_v & bool(job.model.copies_embedding))
    all_ranks = np.greater(job.gpus, 1)
    # Muon's exchange of matrices needs all ranks of a stage.
    stage = tp & np.greater(job.shards, 1) & (job.training.optimizer == "muon")
    free = free + stage
    limited = 1 * np.greater(layout.dp, 1) + replicas + expert_replicas + pipeline + all_ranks
    # So have those with the same key head of a mixer, unless they have one for attention.
    mixer_heads = job.model.mixer_key_heads
    key_copies = np.greater(layout.tp, mixer_heads) & (job.model.mixer == "gated_delta_net")
    same = has_copies & (mixer_heads == job.model.kv_heads)
    limited = limited + kv_copies + (key_copies & (mixer_heads > 1) & ~same)
    return free, limited


# ---- Activations ---------------------------------------------------------------------------------


@term
def kept_of_block(job: Job) -> tuple[Column, Column]:
    """Return the bytes that a block keeps for one micro-batch: (if it is recomputed, if not)."""
    # Kept tensors are allocated between tensors that are freed soon, and the freed memory leaves
    # gaps in the allocator: `activation_overhead` is a factor above 1.
    recomputed = kept_bytes(job) * job.machine.activation_overhead
    whole = block_activations(job, True)
    # Without recomputation the same tensors are kept, and more: `selective` keeps nearly all.
    return np.minimum(recomputed, whole), whole


def kept_bytes(job: Job) -> Column:
    """Return the bytes that a block keeps for one micro-batch with the layout's --recompute.

    With full recomputation a block keeps only its input.
    """
    recompute = job.layout.recompute
    whole = block_activations(job, True)
    block_input = job.activation_bytes / job.sequence_shards
    kept = np.where(np.equal(recompute, "selective"), kept_selectively(job), whole)
    return np.where(np.equal(recompute, "full"), block_input, kept)


@mean_of_kinds
@term
def kept_selectively(job: Job) -> Column:
    """Return the bytes that a block keeps for one micro-batch with selective recomputation.

    They are all activations except those inside attention.
    """
    return block_activations(job, False)


@mean_of_kinds
@term
def block_activations(job: Job, scores: Column) -> Column:
    """Return the bytes that a block keeps for one micro-batch (arXiv 2205.05198, section 4).

    scores: whether attention's activations are kept, which are those of a flash kernel. `numbers`
    counts them for each token. With sequence s, micro-batch b and an MLP width of 4 h, the sum is
    8 s b h bytes outside the tensor-parallel region and 24 s b h / t inside.
    """
    model, t, h = job.model, job.layout.tp, job.model.hidden
    experts, active = model.mlps
    computed = active * job.rows_over_mean  # MLPs that this GPU computes for each of its tokens
    f = mlp_width(job)
    repeated = job.repeated_columns  # of keys and values, beyond 1 / t of all
    keys_and_values = 2 * model.kv_heads * model.kernel_head_size / t + repeated
    # Inputs and outputs of two norms. In a parallel block both have the same input: 3, not 4.
    outside = 3 if model.block == "parallel" else 2 * block_norms(model)
    numbers = outside * h / job.sequence_shards
    of_mixer: Column = 0.0
    if mixes(model):
        of_mixer = mixer_terms.kept_bytes(job, scores)
    elif not attends(model):
        pass
    elif model.is_latent:
        numbers = numbers + latent_numbers(job, scores)
    else:
        numbers = numbers + model.qkv_width / t + repeated  # queries, keys and values
        numbers = numbers + model.attention_width / t  # attention's result
        numbers = numbers + attention_copies(job) * model.attention_width / t
        numbers = numbers + copied_width(job) / t
        if model.qk_norm != "none" or model.positions == "rotary":
            numbers = numbers + repeated / 2  # its keys before the norm, or after the rotation
        # A gate is kept with queries, keys and values; its sigmoid and the result before it too.
        numbers = numbers + 3 * model.gate_width / t
    numbers = numbers + f * model.up_matrices / t  # the activation's input
    numbers = numbers + f / t  # the activation's result
    numbers = numbers + normed_width(model) / t  # inputs of the norms of queries and keys
    if model.qk_norm == "full":  # over heads of several ranks: kept in FP32 too, and scaled
        copies = 1 + (4 / job.number_bytes if job.number_bytes < 4 else 0)
        numbers = numbers + np.where(np.greater(t, 1), copies * normed_width(model) / t, 0.0)
    if model.up_matrices == 2:
        numbers = numbers + f / t  # the gate's result (SiLU), which is a kernel of its own in torch
    if experts > 1:
        numbers = numbers + computed * h / t  # rows that came to this GPU's experts
        # Results that came back for this GPU's tokens, or that this GPU adds up for its node.
        numbers = numbers + active * results_over_mean(job) * h / t
    # Keys and values of other cp ranks are kept, unless attention is recomputed (`scores` False).
    gathered_from = job.cp // job.over_heads - 1
    gathered_from = gathered_from * attends(model)
    numbers = numbers + np.where(scores, gathered_from * keys_and_values, 0.0)
    kept = job.number_bytes * job.tokens * numbers + routing_bytes(job) + of_mixer
    return kept + np.where(scores, span_bytes(job), 0.0)


@term
def span_bytes(job: Job) -> Column:
    """Return the bytes that local_attention.py keeps for a micro-batch where no flex kernel runs.

    flex_attention runs on GPUs that compute in bf16 and keeps no scores. Elsewhere SPAN queries at
    a time attend to the keys that they see: with a softcap or sinks by products, which keep the
    softmax in FP32, and the tanh of a softcap; else, with a window, by torch's kernel, which keeps
    the mask as a bias. The results of the spans are kept beside the whole result.
    """
    model = job.model
    by_products = bool(model.attention_softcap or model.sinks)
    has_flex = job.machine.precision == "bf16" and model.head_size >= 16
    if not attends(model) or model.is_latent or has_flex or not (by_products or model.window):
        return 0.0
    keys = keys_of_spans(model)  # of each query
    result = job.number_bytes * model.attention_width / job.layout.tp
    if not by_products:
        return job.tokens * (result + job.number_bytes * keys / job.layout.micro_batch_size)
    rounded = job.number_bytes if job.number_bytes < 4 else 0  # the softmax in half precision
    score = 4.0 * (1 + bool(model.attention_softcap)) + rounded
    return job.tokens * (result + score * keys * model.heads / job.layout.tp)


def keys_of_spans(model: ModelShape) -> float:
    """Return how many keys a query's span sees, as the mean over a sample.

    A span sees what its first query sees, up to its last query. model: its blocks are alike.
    """
    length = model.seq_length
    window = min(model.window or length, length)
    total = 0
    for first in range(0, length, SPAN):
        stop = min(first + SPAN, length)
        total += (stop - first) * (stop - max(0, first - window + 1))
    return total / length


def results_over_mean(job: Job) -> Column:
    """Return the experts' results that a GPU adds up, over the mean of all GPUs.

    They are those of its own tokens, or where nodes get one copy of a token those of its node's
    experts. If this GPU's experts get more rows than the mean, all others of its group get equally
    many, also those of its node.
    """
    nodes, rows = job.nodes_with_one_copy, job.rows_over_mean
    on_node = job.ep / nodes
    others = (job.ep - rows) / np.maximum(1, job.ep - 1)
    of_node = (rows + (on_node - 1) * others) / on_node
    return np.where(np.greater(nodes, 1), of_node, 1.0)


def mlp_width(job: Job) -> Column:
    """Return the columns of all MLPs that this GPU computes for each of its tokens, without tp."""
    model = job.model
    return model.mlps[1] * job.rows_over_mean * model.ffn_hidden + model.shared_ffn_hidden


def latent_numbers(job: Job, scores: Column) -> Column:
    """Return the numbers that latent attention keeps for each token, beside its block's norms.

    scores: whether the kernel's own result is kept; recomputation makes it again. The latents are
    kept before and after their norms; with cp over heads, those of keys and values are gathered
    behind theirs, and kept for all tokens of the ranks with other heads. Queries, keys and values
    are kept as the kernel takes them (layers/latent_attention.py); if values are padded, so is the
    result, and its columns without the padding are a copy.
    """
    model = job.model
    t = job.layout.tp
    before = model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim
    latents = before + model.q_lora_rank + np.where(job.over_heads > 1, 0, model.kv_lora_rank)
    shared = model.kv_lora_rank + model.qk_rope_head_dim
    gathered = np.where(job.over_heads > 1, job.over_heads * shared, 0)
    columns = model.heads * model.kernel_head_size
    result = model.attention_width
    if model.value_size < model.kernel_head_size:
        of_heads = 3 * columns + result + scores * columns
    else:  # values are columns of the last matrix's output, which is kept whole
        values = model.heads * (model.qk_nope_head_dim + model.v_head_dim)
        of_heads = 2 * columns + values + (1 + attention_copies(job)) * result
    return latents / job.sequence_shards + gathered + of_heads / t


def routing_bytes(job: Job) -> Column:
    """Return the bytes that a block's router keeps for one micro-batch, 0 without experts.

    They are its input and the experts' scores in FP32, and the indices that permute tokens to their
    experts and back. The norm's output, which `block_activations` counts as the MLP's input, is
    subtracted if no shared MLP reads it.
    """
    model = job.model
    h = model.hidden
    if model.experts == 1:
        return 0.0
    index_bytes = np.where(job.ep > 1, PLACES_ELSEWHERE, PLACES)
    index_bytes = index_bytes * model.experts_per_token
    copies = PLACES_OF_COPY * job.copies_of_token + PLACES_OF_TOKEN
    on_nodes = PLACES_ON_NODES * model.experts_per_token + copies
    index_bytes = np.where(np.greater(job.nodes_with_one_copy, 1), on_nodes, index_bytes)
    token_bytes = 4.0 * (h + model.experts) + index_bytes
    unread = 0 if model.shared_ffn_hidden else h
    saved = job.number_bytes * unread / job.sequence_shards
    return job.tokens * (token_bytes / job.layout.tp - saved)


@term
def copied_width(job: Job) -> Column:
    """Return the width of the copies of queries and keys that a block keeps beside its QKV output.

    Rotary positions without norms copy queries and keys; with norms `normed_width` counts these.
    In all other cases the queries are copied if there are fewer key heads than query heads.
    """
    model = job.model
    if model.qk_norm == "none" and model.positions == "rotary":
        # The widths of queries and keys, q + k: qkv_width is q + 2 k, and attention_width is q.
        return (model.qkv_width + model.attention_width) / 2
    return model.attention_width * (model.kv_heads < model.heads)


@term
def attention_copies(job: Job) -> Column:
    """Return how many further copies of attention's result a block keeps.

    It is 1 if a micro-batch has several samples: then the result is transposed for the next
    product.
    """
    return np.where(job.layout.micro_batch_size > 1, 1.0, 0.0)


def in_flight(job: Job, rank: Column) -> Column:
    """Return the number of micro-batches whose activations a pipeline rank keeps at once, at least.

    The activations of a micro-batch in all stages of the rank count as 1. The number is exact for
    the schedules in EXACT. 1F1B on 4 ranks: 4, 3, 2, 1 micro-batches.
    """
    layout = job.layout
    count = job.micro_batches
    name = layout.schedule
    # `ahead`: the forwards of an interleaved rank before its first backward ends, since a group of
    # micro-batches passes all its stages first; each is of one of the rank's `virtual` stages.
    virtual = layout.stages_per_rank
    group = -(-count // np.maximum(1, count // layout.pp))
    ahead = 2 * (layout.pp - 1 - rank) + (virtual - 1) * group + 1
    interleaved = np.minimum(count * virtual, ahead) / virtual
    flying = np.minimum(layout.pp - rank, count)
    flying = np.where(np.equal(name, "gpipe"), count, flying)
    # Every zero-bubble rank holds as many micro-batches as the first rank of 1F1B.
    flying = np.where(layout.splits_backward, np.minimum(layout.pp, count), flying)
    flying = np.where(np.equal(name, "interleaved"), interleaved, flying)
    # Any schedule holds a micro-batch between its forward and its backward pass.
    return np.where(np.isin(name, BOUNDED), flying, 1)


# ---- Temporary memory of a backward pass ---------------------------------------------------------


def working_of(job: Job, parts: Parts, kept: Column, heads: Column) -> Column:
    """Return the largest temporary memory of a stage in bytes, beside what it holds between passes.

    It is the largest of a block's backward, the embedding's backward and the loss; at --zero 2 also
    of the gradient buckets at the end of a backward pass, when the micro-batch's activations are
    free. kept: bytes of one micro-batch's activations in the stage. heads: the number of
    micro-batches whose head outputs the rank keeps.
    """
    in_blocks = np.where(parts.blocks > 0, block_working(job), 0.0)
    in_head = np.where(parts.head, loss_bytes(job, parts, heads), 0.0)
    working = np.maximum(in_blocks, embedding_working(job, parts, kept))
    working = np.maximum(working, in_head)
    with_buckets = np.maximum(working, buckets_of(job, parts) - kept) + tied_gradient(job, parts)
    return np.where(job.zero == 2, with_buckets, working)


def buckets_of(job: Job, parts: Parts) -> Column:
    """Return the bytes of gradient buckets at --zero 2: two buckets are reduced at once."""
    held = laid_out(job, parts)
    bucket = np.minimum(BUCKET_ELEMENTS, np.maximum(LEAST_BUCKET, held // BUCKETS))
    return np.minimum(held, bucket) * (2 * reduced_bytes(job) + job.number_bytes)


def tied_gradient(job: Job, parts: Parts) -> Column:
    """Return the bytes of the last gradient bucket of a backward pass at --zero 2.

    The bucket is kept until the next micro-batch fills its first bucket. Only the gradient of a
    tied copy of the vocabulary's matrix is large enough to count.
    """
    return parts.tied * job.vocab_columns * job.model.hidden * reduced_bytes(job)


def reduced_bytes(job: Job) -> Column:
    """Return the bytes of a gradient in a bucket being reduced, and in the rank's FP32 result."""
    return gradient_bytes(job) + 4.0 / job.shards


@term
def block_working(job: Job) -> Column:
    """Return the temporary memory of a block's backward pass for one micro-batch, in bytes.

    With full recomputation it is all activations of the largest block. Otherwise it is the
    gradients of a block's output and input: other temporary tensors reuse memory that was freed
    before. With experts, the gradients of the rows sent to the experts and of their results are
    added; with a mixer, what its own backward takes.
    """
    gradients = 2.0 * job.activation_bytes / job.sequence_shards
    computed = job.model.experts_per_token * (job.model.experts > 1) * job.rows_over_mean
    expert_rows = 2.0 * computed * job.activation_bytes / job.layout.tp
    is_full = np.equal(job.layout.recompute, "full")
    in_mixers = [mixer_terms.working_bytes(kind) for _, kind in job.kinds if mixes(kind.model)]
    in_mixer = functools.reduce(np.maximum, in_mixers, 0.0)
    return np.where(is_full, largest_block(job), gradients) + expert_rows + in_mixer


def largest_block(job: Job) -> Column:
    """Return the bytes of all activations of a micro-batch in a block, of the largest kind."""
    return functools.reduce(np.maximum, [block_activations(kind, True) for _, kind in job.kinds])


@term
def embedding_working(job: Job, parts: Parts, kept: Column) -> Column:
    """Return the temporary memory of the embedding's backward pass for one micro-batch, in bytes.

    It is the gradients of the matrix and of the output (with tp before and after the mask of other
    ranks' tokens), without the `kept` bytes of activations, which are free by then. If the stage's
    head has the same matrix, there are three: of the head, of the embedding, and their sum. In fp32
    a CPU adds only the tokens' rows to the summed gradient, if ZeRO keeps that sum whole.
    """
    whole_gradient = 1.0 * job.vocab_columns * job.model.hidden * job.number_bytes
    shares_matrix = parts.embedding & parts.head & np.bool_(job.model.tied)
    whole_gradient = np.where(shares_matrix, 3, 1) * whole_gradient
    adds_rows = job.machine.device == "CPU" and job.number_bytes == 4
    gradient = np.where((job.zero < 2) & adds_rows, job.activation_bytes, whole_gradient)
    outputs = job.activation_bytes * np.where(job.layout.tp > 1, 2, 1)
    return np.where(parts.embedding, gradient + outputs - kept, 0.0)


@term
def loss_bytes(job: Job, parts: Parts, heads: Column) -> Column:
    """Return the bytes of the logits of `heads` micro-batches, and of what the loss needs beside.

    First the loss needs a chunk of logits in FP32; later the head's backward may need the gradients
    of its input and its matrix. The larger of the two counts. The matrix's gradient is a temporary
    tensor from --zero 2 on, or if the embedding of the stage has the same matrix; otherwise it is
    added to the sum at once. At --zero 3 no blocks are gathered during the loss, so the bytes of
    the two blocks that `weights_of` counts are subtracted.
    """
    size = job.number_bytes
    matrix = 1.0 * size * job.vocab_columns * job.model.hidden  # bytes of the matrix's gradient
    depth = job.model.mtp_depth
    # With --mtp-depth autograd adds up the gradients of the matrix, which is used several times.
    shares_matrix = (parts.embedding & np.bool_(job.model.tied)) | (depth > 0)
    has_gradient = (job.zero >= 2) | shares_matrix
    matrix = matrix * (1 + (depth > 0))
    not_gathered = np.where(job.zero == 3, 2 * size * job.parameters_here, 0.0)
    gradients = np.maximum(0.0, matrix + job.activation_bytes - not_gathered) * has_gradient
    logits = 1.0 * job.tokens * job.vocab_columns
    of_slice = logits_at_once(LOGITS_AT_ONCE["cuda from 9.0"], logits)
    chunk_in_fp32 = 4.0 * np.minimum(logits, of_slice)
    kept = size * logits
    if job.training.z_loss:
        kept = kept + 4.0 * job.tokens  # each token's log Z, in fp32
    kept = kept + depth * size * logits + kept_of_predictors(job)
    return heads * kept + np.maximum(chunk_in_fp32, gradients)
