"""Every term of a step's time with its unit and its source: seconds, unless it says otherwise.

    block_terms(job)                    of one micro-batch through a block, if all are alike
    head(job), embedding(job)           of one through the ends
    message_seconds(job)                of one from a stage to the next
    gather_seconds, reduce_seconds      of a step, which passes may hide
    after_terms(job, held, shard, tied) of a step, which nothing hides

`planner.step_time` puts them together. To add a term, write its function here and add it to one of
these: all that prices, compares or shows a step takes it from there.
Symbols: b micro-batch, s sequence, h hidden, f MLP width, V vocabulary, t = tp.
"""

import numpy as np

from config.model_stats import normed_width
from planner import op_costs
from planner.job import Column, Job, mean_of_kinds, term
from planner.op_costs import Pass

OPERATIONS = 20  # that a block's forward launches with fused norms, biases and positions
ROTARY = 2.0  # bytes moved for each byte that rotary positions turn: read and write
COLLECTED = 10.0  # bytes moved per gradient to collect a micro-batch's in FP32, at --zero 2 and 3
UPDATED = 40.0  # bytes moved per parameter of a rank's shard: FP32 gradient, master, two moments
CAST = 8.0  # bytes moved per parameter of a rank: norm and zero of gradients, cast of weights
UNEVEN = 1.1  # rows of the busiest rank's experts over those of even routing; assumed
# Kernels of experts' forward beside two products for each of them: the router's, those of the order
# of the rows, copies and sums of them; as experts.py has them.
ROUTING_OPERATIONS = 45
# How often experts.py reads or writes all rows of the chosen experts, forward and backward, outside
# of products and activation: copies in the order of experts and back, the weighted sum; and with
# --ep in the order of ranks.
PERMUTED, PERMUTED_ELSEWHERE = (7.0, 9.0), (4.0, 4.0)
# Bytes moved in FP32 for each number of a router's input, and for each of its scores.
ROUTER_INPUT, ROUTER_SCORES = 6.0, 24.0
# Seconds in which a GPU has nothing to do while the host reads how many rows each expert has: a
# copy to the host, and the launches after it; assumed.
COUNTS_WAIT = 4e-5


# ---- A block -------------------------------------------------------------------------------------


def block_seconds(job: Job) -> Pass:
    """One micro-batch through a block on each GPU of its tensor group, if all blocks are alike."""
    return sum(block_terms(job).values(), Pass(0.0, 0.0))


def block_terms(job: Job) -> dict[str, Pass]:
    """One micro-batch through a block on each GPU of its tensor group, by cause."""
    tensor = tensor_collectives(job)
    # With sequence parallelism the gathered inputs are not kept: they are gathered once more.
    once_more = np.where(job.sequence_parallel, tensor / 2, 0.0)
    host = job.machine.software.host_per_block
    return {
        "products": sum(products(job), Pass(0.0, 0.0)),
        "attention": attention(job),
        "elementwise": op_costs.moved(job.machine, elementwise_bytes(job) * job.tokens),
        "tensor": Pass(tensor, tensor + once_more),
        "experts": routing(job),
        "host": Pass(host / 4, host * 3 / 4),
        "accumulated": Pass(0.0, accumulated(job, job.block_parameters / job.layout.tp)),
    }


@term
def matrices(job: Job) -> list[tuple[Column, Column, Column, Column]]:
    """Rows, outputs and inputs of a block's matrices on each GPU, and how many are alike: of
    experts those that are here, whole ones, with the rows that all ranks of `ep` send.
    """
    model, t, h = job.model, job.layout.tp, job.model.hidden
    found = [
        (job.tokens, model.qkv_width // t, h, 1),
        (job.tokens, h, model.attention_width // t, 1),
    ]
    shared = model.shared_ffn_hidden if model.experts > 1 else model.ffn_hidden
    if shared:
        columns = shared * model.up_matrices
        found += [(job.tokens, columns // t, h, 1), (job.tokens, h, shared // t, 1)]
    if model.experts > 1:
        alike = model.experts // job.ep
        sent = job.tokens * model.experts_per_token / t  # rows of one rank's tokens
        tiles = np.ceil(sent * uneven(job) / alike / op_costs.ALIGNMENT)
        rows = np.int64(tiles) * op_costs.ALIGNMENT
        found += [(rows, model.up_width, h, alike), (rows, h, model.ffn_hidden, alike)]
    return found


def products(job: Job) -> list[Pass]:
    """A block's four matrices: two operations a weight and token forward, four backward."""
    return [products_alike(job, *sizes) for sizes in matrices(job)]


@term
def products_alike(job: Job, rows: Column, outs: Column, ins: Column, alike: Column) -> Pass:
    """So many linear layers of the same sizes, one after the other."""
    if job.machine.software.fp8 and job.number_bytes == 2:
        return op_costs.fp8_linear(job.machine, rows, outs, ins) * alike
    return op_costs.linear(job.machine, rows, outs, ins, job.number_bytes) * alike


def attention(job: Job) -> Pass:
    """Attention's core. With cp, all-to-alls before and after it give a rank some heads of more
    tokens, and keys and values are gathered over the other ranks of cp.
    """
    model, layout = job.model, job.layout
    widths = model.qkv_width + model.attention_width
    turned = job.number_bytes * job.tokens / layout.tp * widths
    sent = op_costs.all_to_all(job.machine, job.over_heads, layout.tp, turned)
    sent = sent + gathered(job)
    return core_seconds(job) * (1 / job.cp) + Pass(sent, sent)


@term
def core_seconds(job: Job) -> Pass:
    """Attention's scores and their products, of all tokens of the samples."""
    model, layout = job.model, job.layout
    batch = model.heads // layout.tp * layout.micro_batch_size
    shape = model.seq_length, model.head_size, batch
    return op_costs.attention(job.machine, *shape, job.number_bytes)


def gathered(job: Job) -> Column:
    """To gather a block's keys and values over the ranks of cp that have the same heads, or in
    backward to sum their gradients, in the same precision.
    """
    model, tp, heads = job.model, job.layout.tp, job.over_heads
    ranks = job.cp // heads
    own = 2 * model.kv_heads * model.head_size * job.tokens / tp
    return ring_seconds(job, ranks, tp * heads, job.number_bytes * own * ranks) / 2


@term
def elementwise_bytes(job: Job) -> Pass:
    """Bytes moved for a token outside of products and attention: reads and writes."""
    model, t, h = job.model, job.layout.tp, job.model.hidden
    active = model.experts_per_token
    shared = h / job.sequence_shards
    f = active * model.ffn_hidden + model.shared_ffn_hidden
    up = f * model.up_matrices
    turned = (model.qkv_width + model.attention_width) / 2
    moved = Pass(4 * shared, 6 * shared)  # two norms: read, write; backward one pass more
    moved += Pass(6 * shared, 6 * shared)  # two residual additions: read, read, write
    moved += Pass((up + f) / t, (up + 2 * f) / t)  # the activation: its input, its result
    moved += Pass(2.0, 3.0) * (normed_width(model) / t)  # norms of queries and keys
    if model.bias:
        moved += Pass(0.0, f / t + 2 * h)  # gradients of biases: a read of the product's
    if model.qkv_bias:
        moved += Pass(0.0, model.qkv_width / t)
    if model.positions == "rotary":
        moved += Pass(ROTARY, ROTARY) * (turned / t)
    moved += permuted(job) * (active * h / t)
    return moved * job.number_bytes


def tensor_collectives(job: Job) -> Column:
    """Sums of a block's results over its tensor ranks, as far as no product hides them: one after
    attention, one after the MLP; arXiv 1909.08053, section 3. With sequence parallelism each tensor
    rank sends its own tokens to the experts, whose results need no sum.
    """
    model = job.model
    unsummed = model.experts > 1 and not model.shared_ffn_hidden
    sums = 2 - unsummed * job.sequence_parallel
    overlap = job.machine.software.overlap_tensor
    hidden = np.where(job.layout.splits_backward, 0.0, overlap)
    return sums * tensor_all_reduce(job) * (1 - hidden)


def tensor_all_reduce(job: Job) -> Column:
    """To sum one micro-batch's activation over the tensor group."""
    return ring_seconds(job, job.layout.tp, 1, job.activation_bytes)


def routing(job: Job) -> Pass:
    """Seconds of experts beside products and memory traffic: the router, the exchange of rows with
    other ranks, and in forward the host's wait for their counts.
    """
    if job.model.experts == 1:
        return Pass(0.0, 0.0)
    return router(job) + dispatched(job) + Pass(counts_wait(job), 0.0)


@term
def uneven(job: Job) -> Column:
    """Rows of the busiest rank's experts over the mean, a number; 1 where each rank has all."""
    return np.where(job.ep > 1, UNEVEN, 1.0)


@term
def permuted(job: Job) -> Pass:
    """How often all rows of the chosen experts are read or written on the way there and back."""
    if job.model.experts == 1:
        return Pass(0.0, 0.0)
    return Pass(*PERMUTED) + Pass(*PERMUTED_ELSEWHERE) * (job.ep > 1)


@term
def router(job: Job) -> Pass:
    """A micro-batch's scores of the experts, in FP32: a cast, a product and what chooses."""
    model, tokens = job.model, job.tokens // job.layout.tp
    each = ROUTER_INPUT * model.hidden + ROUTER_SCORES * model.experts
    cast = op_costs.moved(job.machine, each * tokens)
    product = op_costs.linear(job.machine, tokens, model.experts, model.hidden, 4)
    return product + Pass(cast, cast)


@term
def dispatched(job: Job) -> Pass:
    """To send a micro-batch's tokens to their experts on other ranks, and back; the rank that
    receives most is waited for.
    """
    count = job.model.experts_per_token * job.activation_bytes / job.layout.tp
    both = 2 * op_costs.all_to_all(job.machine, job.ep, 1, count * uneven(job))
    return Pass(both, both)


@term
def counts_wait(job: Job) -> Column:
    """To wait for the rows of each expert on the host, once a block's forward: a grouped product
    takes them as numbers of the host.
    """
    return COUNTS_WAIT


def accumulated(job: Job, parameters: Column) -> Column:
    """To add half-precision gradients to the sum: read both, write; none where the product does."""
    software = job.machine.software
    each = 0.0 if software.fused_accumulation else 2.0 + 2 * min(software.gradient_bytes, 4.0)
    return op_costs.moved(job.machine, each * parameters)


@term
def selective_seconds(job: Job, forward: Column) -> Column:
    """Return the seconds of what selective recomputation does again in a block whose forward takes
    so long: nothing, since a flash kernel recomputes attention's scores itself.
    """
    return 0.0


@term
def operations(job: Job) -> Column:
    """Kernels and collectives that a block's forward launches, a number."""
    collectives = np.where(job.sequence_parallel, 4, 2)
    of_experts: Column = 0
    if job.model.experts > 1:
        of_experts = ROUTING_OPERATIONS + 2 * job.model.experts // job.ep
    return OPERATIONS + of_experts + np.where(job.layout.tp > 1, collectives, 0)


@mean_of_kinds
def block_weights(job: Job) -> Column:
    """Return the part of a block's backward that is the gradients of its weights: half of the
    products, and their sums.
    """
    added = accumulated(job, job.block_parameters / job.layout.tp)
    return sum(product.backward / 2 for product in products(job)) + added


# ---- Embedding, head, messages -------------------------------------------------------------------


def embedding(job: Job) -> Pass:
    """One micro-batch through the embedding: rows looked up, a dense gradient added."""
    machine, matrix = job.machine, job.vocab_columns * job.model.hidden
    looked = op_costs.moved(machine, 5.0 * job.activation_bytes)
    dense = op_costs.moved(machine, 2.0 * job.number_bytes * matrix)
    return Pass(looked + tensor_all_reduce(job), looked + dense + accumulated(job, matrix))


def head(job: Job) -> Pass:
    """One micro-batch through the output matrix and the loss."""
    machine, columns = job.machine, job.vocab_columns
    logits = op_costs.moved(machine, machine.software.logit_bytes * job.tokens * columns)
    added = accumulated(job, columns * job.model.hidden)
    return head_product(job) + Pass(logits + tensor_all_reduce(job), logits + added)


def head_product(job: Job) -> Pass:
    """The output matrix alone."""
    sizes = job.tokens, job.vocab_columns, job.model.hidden
    return op_costs.linear(job.machine, *sizes, job.number_bytes)


def head_weights(job: Job) -> Column:
    """Return the part of the head's backward that is its matrix's gradient, and its sum."""
    added = accumulated(job, job.vocab_columns * job.model.hidden)
    return head_product(job).backward / 2 + added


@term
def message_seconds(job: Job) -> Column:
    """Until a micro-batch's activation has reached the next stage."""
    ranks = job.layout.tp * job.shards
    seconds = op_costs.message(job.machine, ranks, job.activation_bytes)
    return np.where(job.layout.pp > 1, seconds, 0.0)


# ---- Between replicas, and the update ------------------------------------------------------------


def ring_seconds(job: Job, ranks: Column, stride: Column, count: Column) -> Column:
    """To sum `count` bytes over ranks so far apart."""
    return op_costs.all_reduce(op_costs.ring(job.machine, ranks, stride), ranks, count)


def wire_bytes(job: Job) -> int:
    """Bytes of one gradient as it is sent."""
    return job.machine.software.wire_bytes if job.number_bytes == 2 else 4


@term
def gather_seconds(job: Job, dense: Column, experts: Column) -> Column:
    """To gather the weights of a GPU's parameters once: half of an all-reduce. experts: of these
    parameters, which fewer ranks share.
    """
    size = job.number_bytes
    seconds = ring_seconds(job, job.shards, job.layout.tp, dense * size) / 2
    return seconds + expert_ring_seconds(job, experts * size) / 2


@term
def reduce_seconds(job: Job, dense: Column, experts: Column) -> Column:
    """To reduce the gradients of a GPU's parameters once: a rank gets the part that it updates,
    half of an all-reduce, or without ZeRO all.
    """
    size, share = wire_bytes(job), np.where(job.layout.zero == 0, 1.0, 0.5)
    summed = ring_seconds(job, job.shards, job.layout.tp, dense * size)
    return share * (summed + expert_ring_seconds(job, experts * size))


def expert_ring_seconds(job: Job, count: Column) -> Column:
    """To sum `count` bytes of experts over the ranks that have the same ones."""
    if job.model.mlps[0] == 1:
        return 0.0
    return ring_seconds(job, job.shards * job.layout.tp // job.ep, job.ep, count)


def after_terms(job: Job, held: Column, shard: Column, tied: Column) -> dict[str, Column]:
    """Return what follows the last backward and nothing hides, by the parts of a step.

    held, shard: parameters of a rank, and those that it updates. tied: whether a second stage has
    a copy of the vocabulary's matrix.
    """
    return {
        "reduce": collected_seconds(job, held),
        "tied": np.where(tied, tied_seconds(job), 0.0),
        "optimizer": optimizer_seconds(job, held, shard),
        "fixed": job.machine.software.per_step,
    }


def collected_seconds(job: Job, held: Column) -> Column:
    """To collect the gradients of all micro-batches in FP32, at --zero 2 and 3."""
    if not job.machine.software.fused_accumulation:
        return 0.0  # they were collected as they came
    each = op_costs.moved(job.machine, COLLECTED * held)
    return np.where(job.zero >= 2, job.micro_batches * each, 0.0)


def tied_seconds(job: Job) -> Column:
    """To sum the gradient of a tied vocabulary's matrix over the first and the last stage: groups
    of a node share its network.
    """
    machine = job.machine
    sharing = np.minimum(machine.node, job.layout.tp * job.layout.dp)
    link = op_costs.Link(machine.network.latency, machine.network.speed / sharing, 1.0)
    count = 1.0 * wire_bytes(job) * job.vocab_columns * job.model.hidden
    return op_costs.all_reduce(link, 2, count)


def optimizer_seconds(job: Job, held: Column, shard: Column) -> Column:
    """The update of a shard; and of all that a rank holds, norm, zero and cast."""
    return op_costs.moved(job.machine, UPDATED * shard + CAST * held)
