"""Seconds of single operations on one machine: GEMMs, attention, memory traffic, collectives.

What is modelled, the most important first:

* A GEMM is computed in tiles, in waves of one tile per processor of the GPU: a last wave that is
  nearly empty takes as long as a full one. (NVIDIA, "Matrix multiplication background".)
* Where rows do not begin at multiples of 16 bytes (8 half-precision numbers), a GEMM loads less at
  a time.
* What is not a GEMM takes the time in which the memory moves its bytes.
* A ring collective of n ranks moves 2 (n-1)/n of its bytes over its slowest link.

Every size may be one number, or a numpy array of them, such as a column of `planner.job.Columns`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.hardware import KERNELS, Link, Machine

Column = Any  # a number, or an array with one for each layout


@dataclass(frozen=True)
class Pass:
    """Seconds, or bytes, of one micro-batch forward and backward through a part."""

    forward: Column
    backward: Column

    def __iter__(self) -> Iterator[Column]:
        return iter((self.forward, self.backward))

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: Column) -> "Pass":
        return Pass(self.forward * times, self.backward * times)


# Rows and columns of a tile, and its speed relative to the largest: a smaller tile reuses less of
# what it loads. Assumed from cuBLAS on square A100 GEMMs, not fitted.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 64, 0.6))
PROLOGUE = 64  # the start of a tile takes as long as this much of the inner dimension
LAUNCH = 5e-6  # seconds from one kernel to the next
GEMM_MEMORY = 0.85  # of the memory's bandwidth while a GEMM streams its operands
COPY_MEMORY = 0.8  # of the memory's bandwidth in an elementwise kernel
ALIGNMENT = 8  # elements of half precision in 16 bytes
FP8_SHARE = 0.85  # of the peak's ratio that products in fp8 gain; of 0.8 to 0.95 fits 44 rows best


def gemm(machine: Machine, m: Column, n: Column, k: Column, size: int = 2) -> Column:
    """Seconds of (m x k) times (k x n); `size` is the bytes of a number, 4 means FP32."""
    traffic = float(size) * (m * k + k * n + m * n) / (machine.bandwidth * GEMM_MEMORY)
    if size > 2:
        computed = 2.0 * m * n * k / (machine.vector_peak * machine.gemm_fraction)
        return np.maximum(computed, traffic)
    computed = tensor_cores(machine, m, n, k, 1) / aligned(n, k)
    return np.maximum(computed, traffic) + LAUNCH


def tensor_cores(machine: Machine, m: Column, n: Column, k: Column, batch: Column) -> Column:
    """Seconds with the best tile: whole waves of whole tiles."""
    best: Column = float("inf")
    for rows, columns, speed in TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        waves = -(-tiles // machine.processors)
        best = np.minimum(best, waves * rows * columns / speed)
    rate = machine.peak * machine.gemm_fraction
    return 2.0 * best * (k + PROLOGUE) * machine.processors / rate


def aligned(n: Column, k: Column) -> Column:
    """The power of two of which the bytes of n and of k numbers are a multiple, over 16; at most
    1.
    """
    return np.gcd(np.gcd(ALIGNMENT, n), k) / ALIGNMENT


def linear(machine: Machine, rows: Column, outs: Column, ins: Column, size: int = 2) -> Pass:
    """Seconds of a linear layer; backward has two products, gradients of input and weights."""
    of_input = gemm(machine, rows, ins, outs, size)
    of_weights = gemm(machine, outs, ins, rows, size)
    return Pass(gemm(machine, rows, outs, ins, size), of_input + of_weights)


def fp8_linear(machine: Machine, rows: Column, outs: Column, ins: Column) -> Pass:
    """Return what `linear` does, with products in fp8: inputs and gradients are read, and written
    in fp8 as they are and transposed.
    """
    faster = replace(machine, peak=machine.peak * machine.fp8 * FP8_SHARE)
    casts = Pass(4.0 * rows * ins, 4.0 * rows * outs)
    return linear(faster, rows, outs, ins) + moved(machine, casts)


def moved(machine: Machine, count: Any) -> Any:
    """Seconds to move that many bytes, or those of a Pass, to and from memory in elementwise
    kernels.
    """
    return count * (1 / (machine.bandwidth * COPY_MEMORY))


# ---- Attention: q k^T, softmax, times v ----------------------------------------------------------


HEAD = 128  # the head size of those rates; half of it reaches SMALL_HEAD of them
SMALL_HEAD = 0.85


def attention(machine: Machine, seq: int, head: int, batch: Column, size: int = 2) -> Pass:
    """Seconds of the attention core over `batch` heads: two products forward, five backward, of
    which the causal mask leaves half.
    """
    filled = -(-head // ALIGNMENT) * ALIGNMENT
    product = 1.0 * batch * seq * seq * filled
    if size > 2:
        rate = machine.vector_peak * machine.gemm_fraction
        return Pass(2 * product / rate + LAUNCH, 5 * product / rate + LAUNCH)
    kernel = KERNELS[machine.kernel]
    rate = machine.peak * machine.flash_fraction * seq / (seq + kernel.half)
    if kernel.half:
        rate *= SMALL_HEAD ** max(0.0, math.log2(HEAD / head))
    forward = 2 * product / (rate * kernel.forward)
    return Pass(forward + LAUNCH, 5 * product / (rate * kernel.backward) + LAUNCH)


# ---- Between ranks -------------------------------------------------------------------------------


def ring(machine: Machine, ranks: Column, stride: Column) -> Link:
    """The slowest link of a ring of `ranks` ranks that are `stride` apart.

    Within a node that is NVLink. Across nodes, all groups of a node share its network; a ring with
    several ranks on a node receives through one GPU's adapter and sends through another's, each in
    one direction only, and reaches `crossing` of the speed.
    """
    local = _on_one_node(machine, ranks, stride)
    inside = ranks <= local
    groups = machine.node / local
    crossing = np.where(local > 1, machine.crossing, 1.0)
    shared = machine.network.speed / groups * crossing
    slowest = np.minimum(machine.nvlink.speed, shared)
    speed: Column = np.where(inside, machine.nvlink.speed, slowest)
    latency: Column = np.where(inside, machine.nvlink.latency, machine.network.latency)
    return Link(latency, speed, 1.0)


def _on_one_node(machine: Machine, ranks: Column, stride: Column) -> Column:
    """How many of `ranks` ranks that are `stride` apart are on one node."""
    return np.minimum(ranks, np.maximum(1, machine.node // stride))


def all_reduce(link: Link, ranks: Column, count: Column) -> Column:
    """Seconds to sum `count` bytes over a ring; a reduce-scatter or all-gather takes half."""
    return 2.0 * (ranks - 1) * (count / ranks / link.speed + link.latency)


def all_to_all(machine: Machine, ranks: Column, stride: Column, count: Column) -> Column:
    """Seconds in which each rank sends `count` bytes in equal parts to ranks `stride` apart.

    What leaves a node shares its network with what all its other GPUs send.
    """
    local = _on_one_node(machine, ranks, stride)
    inside = count * (local - 1) / ranks / machine.nvlink.speed + machine.nvlink.latency
    sent = count * (ranks - local) / ranks * machine.node
    across = sent / machine.network.speed + machine.network.latency
    seconds = np.where(ranks <= local, inside, np.maximum(inside, across))
    return np.where(ranks < 2, 0.0, seconds)


def message(machine: Machine, stage_ranks: Column, count: Column) -> Column:
    """Seconds until one stage's activation of `count` bytes has reached the next stage."""
    rate = machine.network.bandwidth * machine.p2p_fraction
    apart = count * machine.node / rate + machine.network.latency
    # Else neighbours are on one node, but for one stage's ranks at its edge.
    edge = np.maximum(count * stage_ranks / rate, count / machine.nvlink.speed)
    return np.where(stage_ranks >= machine.node, apart, edge + machine.nvlink.latency)
