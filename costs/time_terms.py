"""Every term of a step's time, in seconds if a docstring gives no other unit.

    block_terms(job)                    one micro-batch through a block, if all blocks are alike
    head(job), embedding(job)           one micro-batch through head or embedding
    message_seconds(job)                one micro-batch's message from a stage to the next
    gather_seconds, reduce_seconds      traffic of a step that passes may hide
    after_terms(job, held, shard, tied) parts of a step that nothing hides

`costs.step_time` adds the terms. To add a term, write its function here and call it in one of
these functions: everything that prices, compares or shows a step calls them.
A `Job` has a model, a layout, the training options and a machine. A `Column` is a number, or an
array with a number for each layout. A `Pass` has the values of a forward and of a backward pass. A
formula with the decorator `term` can be replaced by another training program's.
Symbols: b micro-batch, s sequence, h hidden, f MLP width, V vocabulary, t = tp.
"""

from statistics import NormalDist

import numpy as np

from architecture.model_stats import (
    attends,
    block_norms,
    mixer_matrices,
    mixes,
    normed_width,
    seen_tokens,
)
from costs import mixer_terms, muon_terms, op_costs
from costs.job import Column, Job, mean_of_kinds, term
from costs.op_costs import Pass

OPERATIONS = 20  # kernels that a dense block's forward launches; norms and biases are fused
ROTARY = 2.0  # bytes moved for each byte of queries and keys that is rotated: a read and a write
COLLECTED = 10.0  # bytes moved to add one gradient to the FP32 sum, at --zero 2 and 3
UPDATED = 40.0  # bytes that the optimizer moves for each parameter that a rank updates
LOOKED_UP = 5.0  # accesses of the embedding to a row: lookup 2, sum with the position's row 3
CAST = 8.0  # bytes moved for each parameter on a rank to norm and zero gradients and cast weights
# The standard deviation of an expert's number of rows over its mean, with an auxiliary loss: of 64
# experts the busiest had 1.72 times the mean (arXiv 2408.15664, table 2), which is 2.4 deviations
# above it if the numbers are normal.
LOAD_SPREAD = 0.3
# The number of kernels that layers/experts.py launches in a forward pass in addition to the two
# products of each expert: for the router, for sorting rows by expert, and for copies and sums of
# rows.
ROUTING_OPERATIONS = 45
# How often layers/experts.py reads or writes all rows of the chosen experts outside of products and
# activation, (forward, backward): to copy them into the order of experts and back, and to sum them.
PERMUTED = (7.0, 9.0)
PERMUTED_ELSEWHERE = (4.0, 4.0)  # added to PERMUTED with --ep: rows are also ordered by rank
# The same where nodes get one copy of a token (node_dispatch.py), in place of PERMUTED: for the
# rows of experts, and for the copies, each way.
PERMUTED_ON_NODES = (3.0, 9.0)
COPIED = 4.0
# The kernels that node_dispatch.py launches in addition to ROUTING_OPERATIONS.
NODE_OPERATIONS = 35
# Bytes that go beside a copy for each of the token's experts: its number and its weight, in FP32.
BESIDE = 8.0
ROUTER_INPUT = 6.0  # bytes moved for each number of a router's input, which is cast to FP32
ROUTER_SCORES = 24.0  # bytes moved for each of a router's scores, in FP32
# Seconds in which a GPU is idle while the host reads the number of rows of each expert: a copy to
# the host, and the launches after it; assumed.
COUNTS_WAIT = 4e-5


# ---- A block -------------------------------------------------------------------------------------


def block_seconds(job: Job) -> Pass:
    """Return the seconds of one micro-batch through a block, the sum of `block_terms`."""
    return sum(block_terms(job).values(), Pass(0.0, 0.0))


def block_terms(job: Job) -> dict[str, Pass]:
    """Return the seconds of one micro-batch through a block by cause, if all blocks are alike.

    `block_seconds` adds them. `tensor` is collectives over tp, `experts` is routing, `host` is the
    host's launches (a quarter in the forward), and `accumulated` is adding up the gradients.
    """
    tensor = tensor_collectives(job)
    # With sequence parallelism the forward gathers the inputs of products over tp and does not keep
    # them. So the backward gathers them again, which takes half as long as an all-reduce.
    once_more = np.where(job.sequence_parallel, tensor / 2, 0.0)
    host = job.machine.software.host_per_block
    latent = latent_collectives(job)
    return {
        "products": sum(products(job), Pass(0.0, 0.0)),
        "attention": attention(job),
        "elementwise": op_costs.moved(job.machine, elementwise_bytes(job) * job.tokens),
        "tensor": Pass(tensor, tensor + once_more) + latent,
        "experts": routing(job),
        "host": Pass(host / 4, host * 3 / 4),
        "accumulated": Pass(0.0, accumulated(job, job.parameters_here)),
    }


@term
def matrices(job: Job) -> list[tuple[Column, Column, Column, Column]]:
    """Return the matrix products of a block's forward on one GPU: (rows, outputs, inputs, count).

    Rows are tokens. `count` products have these sizes: 1, or for experts the number of whole
    experts on the GPU, which get the tokens that all ranks of `ep` send.
    """
    model = job.model
    t = job.layout.tp
    h = model.hidden
    # All but the last matrix of attention are divided by outputs, or whole: with sequence
    # parallelism a rank then multiplies a whole matrix with its own tokens only. Of key/value heads
    # that are fewer than tensor ranks, several ranks compute the same.
    *inner, (_, width, _) = mixer_matrices(model) or [(0, 0, True)]
    repeated = [0] * (len(inner) - 1) + [job.repeated_columns]  # the last one is that of keys
    sizes = [
        (job.tokens, outs // t + more, ins, 1)
        if divided
        else (job.tokens // job.sequence_shards, outs, ins, 1)
        for (outs, ins, divided), more in zip(inner, repeated)
    ]
    if width:
        sizes.append((job.tokens, h, width // t, 1))
    dense_width = model.shared_ffn_hidden if model.experts > 1 else model.ffn_hidden
    if dense_width and model.mlps[0]:
        columns = dense_width * model.up_matrices
        sizes.append((job.tokens, columns // t, h, 1))
        sizes.append((job.tokens, h, dense_width // t, 1))
    if model.experts > 1:
        experts = model.experts // job.ep
        # How many rows an expert of the busiest rank gets, rounded up to a multiple of ALIGNMENT.
        rows_of_rank = job.tokens * model.experts_per_token / t
        tiles = np.ceil(rows_of_rank * uneven(job) / experts / op_costs.ALIGNMENT)
        rows = np.int64(tiles) * op_costs.ALIGNMENT
        sizes.append((rows, model.up_width, h, experts))
        sizes.append((rows, h, model.ffn_hidden, experts))
    return sizes


def products(job: Job) -> list[Pass]:
    """Return the seconds of each matrix product of a block.

    A product has two FLOPs for each weight and token in the forward pass, and four in the backward.
    """
    return [products_alike(job, *sizes) for sizes in matrices(job)]


@term
def products_alike(job: Job, rows: Column, outs: Column, ins: Column, alike: Column) -> Pass:
    """Return the seconds of `alike` linear layers of the same sizes, which run one after the other.

    rows, outs, ins: tokens, outputs and inputs of each layer.
    """
    return op_costs.linear(job.machine, rows, outs, ins, job.number_bytes) * alike


def attention(job: Job) -> Pass:
    """Return the seconds of a block's attention, without its matrix products with weights.

    With cp, all-to-alls before and after attention give a rank fewer heads of more tokens, and keys
    and values are gathered over the cp ranks that have the same heads. Latent attention sends no
    keys and values by heads, but gathers what they come from. A block may have another mixer in the
    place of attention (mixer_terms.py).
    """
    model = job.model
    if mixes(model):
        return mixer_terms.core_seconds(job)
    if not attends(model):
        return Pass(0.0, 0.0)
    layout = job.layout
    widths = (model.qkv_width + model.attention_width) / layout.tp + job.repeated_columns
    if model.is_latent:
        of_query = model.qk_nope_head_dim + model.qk_rope_head_dim
        widths = model.heads * (of_query + model.value_size) / layout.tp
    exchanged = job.number_bytes * job.tokens * widths  # bytes of q, k, v and results
    sent = op_costs.all_to_all(job.machine, job.over_heads, layout.tp, exchanged)
    if model.is_latent:  # an all-gather takes half as long as an all-reduce
        shared = model.kv_lora_rank + model.qk_rope_head_dim
        of_all = job.number_bytes * job.tokens * shared * job.over_heads
        sent = sent + ring_seconds(job, job.over_heads, layout.tp, of_all) / 2
    sent = sent + gathered(job)
    return core_seconds(job) * (1 / job.cp) + Pass(sent, sent)


@term
def core_seconds(job: Job) -> Pass:
    """Return the seconds of attention's two products: scores, and scores times values.

    They are for all tokens of a micro-batch and the heads of a tensor rank, without cp.
    """
    model = job.model
    heads_of_batch = model.heads // job.layout.tp * job.layout.micro_batch_size
    shape = model.seq_length, model.kernel_head_size, heads_of_batch
    return op_costs.attention(job.machine, *shape, job.number_bytes, seen_tokens(model))


def gathered(job: Job) -> Column:
    """Return the seconds to gather a block's keys and values over the cp ranks with the same heads.

    Backward takes as long to sum their gradients, which have the same precision.
    """
    model = job.model
    tp = job.layout.tp
    ranks = job.cp // job.over_heads
    keys_and_values = 2 * model.kv_heads * model.kernel_head_size / tp + job.repeated_columns
    numbers_of_rank = keys_and_values * job.tokens
    all_bytes = job.number_bytes * numbers_of_rank * ranks
    # An all-gather takes half as long as an all-reduce.
    return ring_seconds(job, ranks, tp * job.over_heads, all_bytes) / 2


@term
def elementwise_bytes(job: Job) -> Pass:
    """Return the bytes that a block's elementwise kernels read and write for each token.

    These are all kernels but matrix products and attention.
    """
    model = job.model
    t = job.layout.tp
    h = model.hidden
    _, active = model.mlps
    normed = h / job.sequence_shards  # numbers of a token that a norm on this rank reads
    f = active * model.ffn_hidden + model.shared_ffn_hidden
    activation_inputs = f * model.up_matrices
    # Widths on this rank: of keys that it has beyond 1 / t of all, and of queries and keys.
    repeated = job.repeated_columns / 2
    rotated = (model.heads + model.kv_heads) * model.head_size / t + repeated
    latents = model.q_lora_rank + model.kv_lora_rank
    has_attention = attends(model)
    norms = block_norms(model)  # each: a read and a write; backward reads two
    moved = Pass(2 * norms * normed, 3 * norms * normed)
    sums = 2 if model.hybrid_pattern == "none" else 1
    moved += Pass(3 * normed, 3 * normed) * sums  # residual additions: two reads and a write
    # The MLP's activation reads its inputs and writes f numbers; backward moves f numbers more.
    moved += Pass((activation_inputs + f) / t, (activation_inputs + 2 * f) / t)
    repeated_norms = repeated * (model.qk_norm != "none")
    moved += Pass(2.0, 3.0) * (normed_width(model) / t + repeated_norms)  # of queries and keys
    if has_attention:
        moved += Pass(2.0, 3.0) * (latents / job.sequence_shards)  # norms of the latents
    if (
        model.value_size < model.kernel_head_size and has_attention
    ):  # values are copied to be as wide as keys
        moved += Pass(2.0, 2.0) * (model.heads * model.kernel_head_size / t)
    if model.bias:  # a bias's gradient reads the gradient of the product's output
        moved += Pass(0.0, f / t + 2 * h)
    if mixes(model):
        moved += mixer_terms.moved_numbers(job)
    if model.qkv_bias and has_attention:
        moved += Pass(0.0, (model.qkv_width + model.gate_width) / t + 2 * repeated)
    if has_attention:
        moved += Pass(4.0, 6.0) * (model.gate_width / t)  # the sigmoid of gates, and the products
    if model.positions == "rotary" and has_attention:
        moved += Pass(ROTARY, ROTARY) * rotated  # rotating queries and keys
    moved += permuted(job) * (active * h / t)  # ordering rows by expert
    return moved * job.number_bytes


def tensor_collectives(job: Job) -> Column:
    """Return the seconds of a block's all-reduces over tp in one pass that no product hides.

    There is one after attention and one after the MLP (arXiv 1909.08053, section 3). With sequence
    parallelism each tensor rank sends its own tokens to the experts, whose results need no sum. A
    backward that is split into B and W hides nothing, another hides the share `overlap_tensor`.
    """
    model = job.model
    has_experts_only = model.experts > 1 and not model.shared_ffn_hidden  # no MLP that tp divides
    parts = 2 if model.hybrid_pattern == "none" else 1
    sums = parts - has_experts_only * job.sequence_parallel
    overlap = job.machine.software.overlap_tensor
    hidden_share = np.where(job.layout.splits_backward, 0.0, overlap)  # what products hide
    return sums * tensor_all_reduce(job) * (1 - hidden_share)


def latent_collectives(job: Job) -> Pass:
    """Return the seconds to add to a block's collectives over tp for latent attention, else 0.

    Ordinary attention spreads the hidden state over tp: backward sums its gradient, and with
    sequence parallelism forward and backward gather it. Latent attention does so with the latents
    and the shared key, which have fewer numbers: the result is negative.
    """
    model = job.model
    if not model.is_latent or not attends(model):
        return Pass(0.0, 0.0)
    spread = (model.q_lora_rank or model.hidden) + model.kv_lora_rank + model.qk_rope_head_dim
    hidden_share = np.where(job.layout.splits_backward, 0.0, job.machine.software.overlap_tensor)
    summed = (spread / model.hidden - 1) * tensor_all_reduce(job) * (1 - hidden_share)
    gathered_forward = np.where(job.sequence_parallel, summed / 2, 0.0)
    return Pass(gathered_forward, summed)


def tensor_all_reduce(job: Job) -> Column:
    """Return the seconds to sum one micro-batch's activation over the tensor group."""
    return ring_seconds(job, job.layout.tp, 1, job.activation_bytes)


def routing(job: Job) -> Pass:
    """Return the seconds that a block with experts takes beside products and copies, else 0.

    They are of the router, of the exchange of rows with other ranks and, in the forward pass, of
    the wait until the host knows the number of rows of each expert.
    """
    if job.model.experts == 1:
        return Pass(0.0, 0.0)
    return router(job) + dispatched(job) + Pass(counts_wait(job), 0.0)


@term
def uneven(job: Job) -> Column:
    """Return the factor by which the busiest rank's experts get more rows than the mean rank's.

    The experts' numbers of rows are taken to be normal and independent, with the standard deviation
    LOAD_SPREAD: the more experts a rank has, the less their sum varies. It is 1 without --ep,
    because then each rank has all experts.
    """
    return busiest_load(job.model.experts, job.ep)


def busiest_load(experts: int, parts: Column) -> Column:
    """Return the rows that the experts of the busiest part get, over the mean part's.

    parts: ranks or nodes, among which the experts are divided evenly.
    """
    experts_per_part = experts / np.maximum(1, parts)
    return 1.0 + LOAD_SPREAD / np.sqrt(experts_per_part) * largest_of(parts)


def largest_of(count: Column) -> Column:
    """Return the expected largest of `count` standard normal numbers, by Blom's approximation.

    It is 0 for one number, 1.43 for eight, 2.34 for 64.
    """
    inverse = np.vectorize(NormalDist().inv_cdf, otypes=[float])
    return inverse((np.asarray(count) - 0.375) / (np.asarray(count) + 0.25))


@term
def permuted(job: Job) -> Pass:
    """Return how often all rows for experts are read or written to change their order, and back."""
    if job.model.experts == 1:
        return Pass(0.0, 0.0)
    often = Pass(*PERMUTED) + Pass(*PERMUTED_ELSEWHERE) * (job.ep > 1)
    copies = COPIED * job.copies_of_token / job.model.experts_per_token
    once = Pass(*PERMUTED_ON_NODES) + Pass(*PERMUTED_ELSEWHERE) + Pass(copies, copies)
    on_nodes = np.greater(job.nodes_with_one_copy, 1)
    return once * on_nodes + often * ~on_nodes


@term
def router(job: Job) -> Pass:
    """Return the seconds of a block's router, which chooses the experts of each token.

    It casts its input to FP32, and computes the experts' scores by a matrix product.
    """
    model = job.model
    tokens = job.tokens // job.layout.tp  # each tensor rank routes its share of the tokens
    token_bytes = ROUTER_INPUT * model.hidden + ROUTER_SCORES * model.experts
    copied = op_costs.moved(job.machine, token_bytes * tokens)
    product = op_costs.linear(job.machine, tokens, model.experts, model.hidden, 4)
    return product + Pass(copied, copied)


@term
def dispatched(job: Job) -> Pass:
    """Return the seconds to send a micro-batch's tokens to experts on other ranks and back.

    All ranks wait for the rank that receives the most tokens.
    """
    sent_bytes = job.model.experts_per_token * job.activation_bytes / job.layout.tp
    often = 2 * op_costs.all_to_all(job.machine, job.ep, 1, sent_bytes * uneven(job))
    once = dispatched_once(job, sent_bytes * uneven(job))
    there_and_back = np.where(np.greater(job.nodes_with_one_copy, 1), once, often)
    return Pass(there_and_back, there_and_back)


def dispatched_once(job: Job, rows: Column) -> Column:
    """Return the seconds there and back if nodes get one copy of a token: first across nodes, then
    within them.

    rows: the bytes that a rank sends to the ranks of its node, and gets back, one row for each of a
    token's experts. Across nodes there is a row of each copy, and one way the numbers and weights
    of its experts too.
    """
    machine, nodes = job.machine, job.nodes_with_one_copy
    copies = job.copies_of_token * busiest_load(job.model.experts, nodes)
    beside = BESIDE * job.model.experts_per_token * job.tokens
    of_token = 2 * job.activation_bytes + beside
    # An all-to-all sends (nodes - 1) / nodes of what its ranks have to other nodes: of all copies.
    across = op_costs.all_to_all(machine, nodes, machine.node, copies * of_token / job.layout.tp)
    within = op_costs.all_to_all(machine, np.where(np.greater(nodes, 1), machine.node, 1), 1, rows)
    return across + machine.network.latency + 2 * within


@term
def counts_wait(job: Job) -> Column:
    """Return the seconds that a block's forward waits until the host knows each expert's rows.

    A grouped matrix product takes the numbers of rows as arguments in the host's memory.
    """
    return COUNTS_WAIT


def accumulated(job: Job, parameters: Column) -> Column:
    """Return the seconds to add the gradients of some parameters to the sum over micro-batches.

    A gradient in half precision is read, and its sum is read and written. With fused accumulation
    the matrix product adds to the sum.
    """
    software = job.machine.software
    gradient_bytes = 2.0 + 2 * min(software.gradient_bytes, 4.0)
    if software.fused_accumulation:
        gradient_bytes = 0.0
    return op_costs.moved(job.machine, gradient_bytes * parameters)


@term
def selective_seconds(job: Job, forward: Column) -> Column:
    """Return the seconds that selective recomputation adds to a block's backward pass.

    It is 0, because a flash kernel always recomputes attention's scores; other training programs
    replace this formula. A mixer without attention is computed again. forward: seconds of the
    block's forward.
    """
    return mixer_terms.core_seconds(job).forward if mixes(job.model) else 0.0


@term
def operations(job: Job) -> Column:
    """Return the number of kernels and collectives that a block's forward launches."""
    collectives = np.where(job.sequence_parallel, 4, 2)  # all-reduces, or gathers and scatters
    expert_operations: Column = 0
    if job.model.experts > 1:
        on_nodes = NODE_OPERATIONS * np.greater(job.nodes_with_one_copy, 1)
        expert_operations = ROUTING_OPERATIONS + on_nodes + 2 * job.model.experts // job.ep
    return OPERATIONS + expert_operations + np.where(job.layout.tp > 1, collectives, 0)


@mean_of_kinds
def block_weights(job: Job) -> Column:
    """Return the seconds that W takes for a block: half the backward's products, and the adding."""
    added = accumulated(job, job.parameters_here)
    return sum(product.backward / 2 for product in products(job)) + added


# ---- Embedding, head, messages -------------------------------------------------------------------


def embedding(job: Job) -> Pass:
    """Return the seconds of one micro-batch through the embedding.

    Forward looks up rows and sums them over tp. Backward adds the gradient of the whole matrix.
    """
    machine = job.machine
    matrix = job.vocab_columns * job.model.hidden
    lookup = op_costs.moved(machine, LOOKED_UP * job.activation_bytes)
    matrix_gradient = op_costs.moved(machine, 2.0 * job.number_bytes * matrix)
    forward = lookup + tensor_all_reduce(job)
    backward = lookup + matrix_gradient + accumulated(job, matrix)
    return Pass(forward, backward)


def head(job: Job) -> Pass:
    """Return the seconds of one micro-batch through the output matrix and the loss."""
    machine = job.machine
    columns = job.vocab_columns
    logits = op_costs.moved(machine, machine.software.logit_bytes * job.tokens * columns)
    added = accumulated(job, columns * job.model.hidden)
    once = head_product(job) + Pass(logits + tensor_all_reduce(job), logits + added)
    depth = job.model.mtp_depth
    return once + (predictor(job) + once) * depth if depth else once


def predictor(job: Job) -> Pass:
    """Return the seconds of one micro-batch through a module of --mtp-depth, without the logits.

    It is a block and a matrix of 2 h inputs, whole on each rank; with --recompute full, backward
    runs the block once more. The embedding of its tokens is an all-reduce.
    """
    h = job.model.hidden
    block = block_seconds(job.predictor)
    again = np.where(np.equal(job.layout.recompute, "full"), block.forward, 0.0)
    rows = job.tokens // job.sequence_shards
    joined = op_costs.linear(job.machine, rows, h, 2 * h, job.number_bytes)
    return block + joined + Pass(tensor_all_reduce(job), again)


def head_product(job: Job) -> Pass:
    """Return the seconds of one micro-batch's product with the output matrix, without the loss."""
    sizes = job.tokens, job.vocab_columns, job.model.hidden
    return op_costs.linear(job.machine, *sizes, job.number_bytes)


def head_weights(job: Job) -> Column:
    """Return the seconds that W takes for the head: its matrix's gradient, and adding it up."""
    added = accumulated(job, job.vocab_columns * job.model.hidden)
    return head_product(job).backward / 2 + added


@term
def message_seconds(job: Job) -> Column:
    """Return the seconds until a micro-batch's activation has reached the next stage; 0 at pp 1."""
    ranks = job.layout.tp * job.shards
    seconds = op_costs.message(job.machine, ranks, job.activation_bytes)
    return np.where(job.layout.pp > 1, seconds, 0.0)


# ---- Between replicas, and the update ------------------------------------------------------------


def ring_seconds(job: Job, ranks: Column, stride: Column, count: Column) -> Column:
    """Return the seconds to all-reduce `count` bytes over `ranks` ranks that are `stride` apart."""
    return op_costs.all_reduce(op_costs.ring(job.machine, ranks, stride), ranks, count)


def wire_bytes(job: Job) -> int:
    """Return the bytes of one gradient in a reduction between ranks."""
    return job.machine.software.wire_bytes if job.number_bytes == 2 else 4


@term
def gather_seconds(job: Job, dense: Column, experts: Column) -> Column:
    """Return the seconds to all-gather a GPU's weights once, which is half of an all-reduce.

    dense, experts: the parameters on a GPU outside experts, and in experts, which fewer ranks hold.
    """
    size = job.number_bytes
    seconds = ring_seconds(job, job.shards, job.layout.tp, dense * size) / 2
    return seconds + expert_ring_seconds(job, experts * size) / 2


@term
def reduce_seconds(job: Job, dense: Column, experts: Column) -> Column:
    """Return the seconds to reduce a GPU's gradients once.

    Without ZeRO it is an all-reduce. With ZeRO a rank gets only the shard that it updates, which
    takes half as long. dense, experts: the parameters on a GPU outside experts, and in experts.
    """
    size = wire_bytes(job)
    share = np.where(job.layout.zero == 0, 1.0, 0.5)
    summed = ring_seconds(job, job.shards, job.layout.tp, dense * size)
    return share * (summed + expert_ring_seconds(job, experts * size))


def expert_ring_seconds(job: Job, count: Column) -> Column:
    """Return the seconds to all-reduce `count` bytes over ranks with the same experts, or 0."""
    if job.model.mlps[0] == 1:
        return 0.0
    return ring_seconds(job, job.shards * job.layout.tp // job.ep, job.ep, count)


def after_terms(job: Job, held: Column, shard: Column, tied: Column) -> dict[str, Column]:
    """Return the seconds after the last backward that nothing hides, by part of a step.

    held, shard: the numbers of parameters on a rank, and of those that it updates. tied: whether a
    second stage has a copy of the matrix that embedding and head share.
    """
    return {
        "reduce": collected_seconds(job, held),
        "tied": np.where(tied, tied_seconds(job), 0.0),
        "optimizer": optimizer_seconds(job, held, shard)
        + muon_terms.newton_schulz_seconds(job)
        + muon_terms.exchange_seconds(job),
        "fixed": job.machine.software.per_step,
    }


def collected_seconds(job: Job, held: Column) -> Column:
    """Return a step's seconds to add each micro-batch's gradients to FP32 sums, at --zero 2 and 3.

    held: the number of parameters on a rank.
    """
    if not job.machine.software.fused_accumulation:
        return 0.0  # without fused accumulation, `accumulated` counts these additions in the passes
    micro_batch = op_costs.moved(job.machine, COLLECTED * held)
    return np.where(job.zero >= 2, job.micro_batches * micro_batch, 0.0)


def tied_seconds(job: Job) -> Column:
    """Return the seconds to sum the gradient of the matrix that embedding and head share.

    It is summed over the first and the last stage, each of which has a copy of the matrix. All such
    pairs of ranks on a node share its network.
    """
    machine = job.machine
    pairs = np.minimum(machine.node, job.layout.tp * job.layout.dp)
    link = op_costs.Link(machine.network.latency, machine.network.speed / pairs, 1.0)
    gradient_bytes = 1.0 * wire_bytes(job) * job.vocab_columns * job.model.hidden
    return op_costs.all_reduce(link, 2, gradient_bytes)


def optimizer_seconds(job: Job, held: Column, shard: Column) -> Column:
    """Return the seconds of the optimizer's update, which is limited by memory traffic.

    held: the number of parameters on a rank; their gradients are normed and zeroed, and their
    weights cast. shard: the number of these parameters that the rank updates.
    """
    return op_costs.moved(job.machine, UPDATED * shard + CAST * held)
