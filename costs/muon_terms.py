"""Seconds and bytes of Muon's update: the Newton-Schulz iteration, and the exchange of matrices.

    matrices_of_block(model, mode)   the matrices that are updated by themselves: (rows, columns)
    newton_schulz_seconds(job)       the iteration on the matrices of the busiest owner
    exchange_seconds(job)            the all-to-alls, which run in rounds
    exchange_bytes(job, blocks)      buffers of a few rounds, which exist only during the update

Every other optimizer has 0 of each. optim/muon.py and optim/matrix_owners.py are what is priced.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from architecture.model_stats import attends, mixer_matrices, mixes
from architecture.shape import ModelShape
from config.buffer_sizes import ROUND_ELEMENTS
from costs import op_costs
from costs.job import Column, Job

STEPS = 5  # of the iteration, as in optim/muon.py
MATRIX_BYTES = 4.0  # bytes of a number that is exchanged: the type of the masters
ITERATION_BYTES = {"master": 4.0, "bf16": 2.0}  # of a number in the iteration, by its dtype


def matrices_of_block(model: ModelShape, mode: str) -> list[tuple[int, int, int]]:
    """Return (count, rows, columns) of a block's matrices, with all experts of a block.

    mode: the value of muon_qkv, which says how q, k and v are divided (parallel.Matrices).
    """
    h = model.hidden
    d = model.head_size
    if mixes(model):
        return _mixer_matrices(model, mode) + _mlp_matrices(model)
    if not attends(model):
        return _mlp_matrices(model)
    if model.is_latent:
        found = _latent_matrices(model, mode)
        return found + _mlp_matrices(model)
    of_heads = 1 + model.attention_gate  # matrices of query heads: of queries and of gates
    rows = {
        "joint": [(1, (of_heads * model.heads + 2 * model.kv_heads) * d)],
        "head": [(of_heads * model.heads + 2 * model.kv_heads, d)],
    }.get(mode, [(of_heads, model.heads * d), (2, model.kv_heads * d)])
    found = [(count, size, h) for count, size in rows]
    found.append((1, h, model.heads * d))  # attention's output matrix
    return found + _mlp_matrices(model)


def _mixer_matrices(model: ModelShape, mode: str) -> list[tuple[int, int, int]]:
    """Return (number, rows, columns) of the matrices of a mixer that Muon updates.

    mode: --muon-qkv.
    """
    h, g, a = model.hidden, model.mixer_key_heads, model.mixer_value_heads
    p, r = model.mixer_key_size, model.mixer_value_size
    of_mixer = mixer_matrices(model)
    if model.mixer == "short_conv":
        return [(4, h, h)]
    if mode == "joint":
        return [(1, outs, ins) for outs, ins, _ in of_mixer]
    heads, groups = (a, g) if mode == "head" else (1, 1)
    keys, values, steps = g * p // groups, a * r // heads, a // heads
    out = (1, h, a * r)
    if model.mixer == "mamba2":
        return [(2 * heads, values, h), (heads, steps, h), (2 * groups, keys, h), out]
    if model.mixer == "gated_delta_net":
        values, steps = a * r // groups, a // groups
        return [(2 * groups, keys, h), (2 * groups, values, h), (2 * groups, steps, h), out]
    of_heads = [(2 * heads, keys, h), (heads, values, h), (heads, steps, h)]
    low = [(1, p, h), (1, r, h), (heads, keys, p), (heads, values, r)]
    return [*of_heads, *low, out]


def _latent_matrices(model: ModelShape, mode: str) -> list[tuple[int, int, int]]:
    """Return the matrices of multi-head latent attention (layers/latent_attention.py) as above."""
    h, heads, latent = model.hidden, model.heads, model.kv_lora_rank
    q_in = model.q_lora_rank or h
    nope, rope, value = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    found = [(1, h, heads * value)]  # attention's output matrix
    if model.q_lora_rank:
        found.append((1, model.q_lora_rank, h))
    found += [(heads, nope + rope, q_in)] if mode == "head" else [(1, heads * (nope + rope), q_in)]
    if mode in ("joint", "projection"):
        return [*found, (1, latent + rope, h), (1, heads * (nope + value), latent)]
    found += [(1, latent, h), (1, rope, h)]
    if mode == "head":
        return [*found, (heads, nope, latent), (heads, value, latent)]
    return [*found, (1, heads * nope, latent), (1, heads * value, latent)]


def _mlp_matrices(model: ModelShape) -> list[tuple[int, int, int]]:
    """Return the matrices of a block's MLP, or of its experts and its shared MLP, as above."""
    width = model.shared_ffn_hidden if model.experts > 1 else model.ffn_hidden * bool(model.mlps[0])
    return _expert_matrices(model) + _up_and_down(model, 1, width)


def _expert_matrices(model: ModelShape) -> list[tuple[int, int, int]]:
    """Return the matrices of a block's experts as above; none without experts."""
    if model.experts == 1:
        return []
    return _up_and_down(model, model.experts, model.expert_ffn_hidden)


def _matrices_beside_experts(model: ModelShape, mode: str) -> list[tuple[int, int, int]]:
    """Return `matrices_of_block` without those of experts."""
    found = matrices_of_block(model, mode)
    for matrices in _expert_matrices(model):
        found.remove(matrices)
    return found


def _up_and_down(model: ModelShape, count: int, width: int) -> list[tuple[int, int, int]]:
    """Return the matrices of so many MLPs of this width as above."""
    if not width:
        return []
    h = model.hidden
    return [(count * model.up_matrices, width, h), (count, h, width)]


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Return the FLOPs of the iteration on a matrix: three products in each step."""
    small, large = min(rows, columns), max(rows, columns)
    return STEPS * (4.0 * small * small * large + 2.0 * small**3)


def _iteration_bytes(job: Job) -> float:
    """Return the bytes of a number in the iteration."""
    return ITERATION_BYTES[job.training.newton_schulz_dtype(job.machine.kind == "cuda")]


def newton_schulz_seconds(job: Job) -> Column:
    """Return the seconds of the iteration on the owner with the most work.

    The matrices of a stage are divided over all of its ranks. An owner has the mean of their work,
    and at least the largest matrix.
    """
    training = job.training
    if training.optimizer != "muon":
        return 0.0
    size = int(_iteration_bytes(job))
    total = 0.0
    largest = 0.0
    for share, kind in job.kinds:
        for count, rows, columns in matrices_of_block(kind.model, training.muon_qkv):
            small, large = min(rows, columns), max(rows, columns)
            step = (
                op_costs.gemm(job.machine, small, small, large, size)
                + op_costs.gemm(job.machine, small, small, small, size)
                + op_costs.gemm(job.machine, small, large, small, size)
            )
            total += share * count * STEPS * step
            largest = max(largest, STEPS * step)
    blocks = job.model.layers / job.layout.pp
    return np.maximum(total * blocks / (job.shards * job.layout.tp), largest)


def exchange_seconds(job: Job) -> Column:
    """Return the seconds of the all-to-alls that bring matrices to their owners, and back.

    With ZeRO both carry the section that a rank updates. Without it a rank sends its replica's
    share of the matrices, and gets the updates of all.
    """
    if job.training.optimizer != "muon":
        return 0.0
    layout = job.layout
    local = job.model.layers / layout.pp * job.block_parameters / layout.tp * MATRIX_BYTES
    share = local / job.shards
    back = np.where(layout.zero > 0, share, local)
    ranks = job.shards * layout.tp
    there = op_costs.all_to_all(job.machine, ranks, 1, share)
    return there + op_costs.all_to_all(job.machine, ranks, 1, back)


def exchange_bytes(job: Job, blocks: Column) -> Column:
    """Return the bytes of the exchange's buffers, and of the iteration, on ranks with `blocks`.

    The matrices of experts are updated by themselves, over the ranks that hold them; the larger of
    the two updates counts. Activations are gone by then.
    """
    if job.training.optimizer != "muon":
        return 0.0
    layout = job.layout
    experts = blocks * job.expert_parameters / layout.tp
    dense = blocks * job.block_parameters / layout.tp - experts
    of_experts = _sides(job, _expert_matrices)
    others = _sides(job, partial(_matrices_beside_experts, mode=job.training.muon_qkv))
    found = _bytes_of_set(job, dense, job.shards, layout.tp, others)
    if of_experts:
        replicas = np.maximum(1, job.shards * layout.tp // job.ep)
        found = np.maximum(found, _bytes_of_set(job, experts, replicas, 1, of_experts))
    return found


def _sides(
    job: Job, matrices: Callable[[ModelShape], list[tuple[int, int, int]]]
) -> list[tuple[int, int]]:
    """Return the smaller and the larger side of each kind of matrix of a job's blocks."""
    return [
        (min(rows, columns), max(rows, columns))
        for _, kind in job.kinds
        for _, rows, columns in matrices(kind.model)
    ]


def _bytes_of_set(
    job: Job,
    local: Column,
    replicas: Column,
    tensor_ranks: Column,
    sides: list[tuple[int, int]],
) -> Column:
    """Return the bytes of the exchange and the iteration of matrices that are updated together.

    local: a rank's elements of them. replicas: the ranks that hold the same ones. tensor_ranks:
    those that cut a matrix. sides: of each kind the smaller and the larger one.

    A rank gets its matrices in rounds of at most ROUND_ELEMENTS, or one matrix, the largest first.
    While it updates those of a round, the iteration holds them twice more, in its own type, and two
    products of their smaller sides; a message of the next round goes out and one comes in; and the
    round before returns in two messages, with a copy of columns if tensor ranks cut them. Without
    ZeRO all that returns goes to each rank. Gradients hold the updates, so these take no memory.
    """
    share = local / replicas
    small, large = max(sides, key=lambda side: newton_schulz_flops(*side))
    own = np.minimum(share, max(ROUND_ELEMENTS, small * large))  # elements of a rank in a round
    rounds = np.ceil(share / np.maximum(own, 1.0))
    square = max(small / large for small, large in sides)
    products = np.where(rounds > 2, square, small / large)
    iteration = own * 2 * (1 + products) * _iteration_bytes(job)
    held = own * MATRIX_BYTES
    # A rank sends its matrices to as many ranks as it gets matrices from.
    copies = np.where(job.layout.zero > 0, 1, replicas)
    returned = 2 * np.minimum(local, own * copies) * MATRIX_BYTES
    following = 2 * np.minimum(held, (share - own) * MATRIX_BYTES)
    before = np.where(rounds > 2, returned, 0.0)
    columns = np.where(np.greater(tensor_ranks, 1), held, 0.0)
    return held + following + np.maximum(before + iteration, returned + columns)
