"""Predicts the seconds of single operations: GEMMs, attention, memory traffic, collectives.

The model's assumptions, the most important first:

* A GEMM is computed in tiles, in waves of one tile per processor of the GPU: a last wave that is
  nearly empty takes as long as a full one. (NVIDIA, "Matrix multiplication background".)
* If rows do not begin at multiples of 16 bytes (8 half-precision numbers), a GEMM loads less at a
  time.
* An operation that is not a GEMM takes the time in which the memory moves its bytes.
* A ring collective of n ranks moves 2 (n-1)/n of its bytes over its slowest link.

Every size may be a number, or a numpy array of numbers, such as a column of `costs.job.Columns`.
A `Pass` has two values: for a forward and for a backward pass. A `Link` is a connection with a
latency and a speed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from costs.hardware import KERNELS, Link, Machine

Column = Any  # a number, or an array with a number for each layout


@dataclass(frozen=True)
class Pass:
    """The seconds, or bytes, of one micro-batch's forward and backward pass through a part."""

    forward: Column
    backward: Column

    def __iter__(self) -> Iterator[Column]:
        return iter((self.forward, self.backward))

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: Column) -> "Pass":
        return Pass(self.forward * times, self.backward * times)


# Rows and columns of a tile, and its speed relative to the largest tile: a smaller tile reuses less
# of the data that it loads. The speeds are assumed from cuBLAS on square A100 GEMMs, not fitted.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 64, 0.6))
# The start of a tile takes as long as this many steps along the product's inner dimension k, so a
# product with a small k is slow.
PROLOGUE = 64
LAUNCH = 5e-6  # seconds between the end of one kernel and the start of the next
GEMM_MEMORY = 0.85  # share of the memory's bandwidth that a GEMM reaches when it loads operands
COPY_MEMORY = 0.8  # share of the memory's bandwidth that an elementwise kernel reaches
ALIGNMENT = 8  # the number of half-precision numbers in 16 bytes, to which rows should be aligned


def gemm(machine: Machine, m: Column, n: Column, k: Column, size: int = 2) -> Column:
    """Return the seconds of a matrix product (m x k) times (k x n).

    It takes as long as the slower of its arithmetic and its memory traffic. FP32 products do not
    use tensor cores. size: bytes of a number, 4 for FP32.
    """
    traffic = float(size) * (m * k + k * n + m * n) / (machine.bandwidth * GEMM_MEMORY)
    if size > 2:
        computed = 2.0 * m * n * k / (machine.vector_peak * machine.gemm_fraction)
        return np.maximum(computed, traffic)
    computed = tensor_cores(machine, m, n, k, 1) / aligned(n, k)
    return np.maximum(computed, traffic) + LAUNCH


def tensor_cores(machine: Machine, m: Column, n: Column, k: Column, batch: Column) -> Column:
    """Return the seconds of `batch` products (m x k) times (k x n) on tensor cores.

    A product takes whole waves of whole tiles; the fastest of TILES is used.
    """
    best: Column = float("inf")
    for rows, columns, speed in TILES:
        # A product has whole tiles, and all processors compute one tile each in a wave.
        tiles = batch * -(-m // rows) * -(-n // columns)
        waves = -(-tiles // machine.processors)
        # One processor computes waves * rows * columns elements of the result, at the relative
        # speed of this size of tile; at full speed it would compute more elements in that time.
        best = np.minimum(best, waves * rows * columns / speed)
    # A number takes 2 FLOPs for each step along k. The rate is that of all processors together.
    rate = machine.peak * machine.gemm_fraction
    return 2.0 * best * (k + PROLOGUE) * machine.processors / rate


def aligned(n: Column, k: Column) -> Column:
    """Return the share of a GEMM's speed that is left if its rows are not aligned to 16 bytes.

    n, k: the lengths of the operands' rows in half-precision numbers. The result is the largest
    power of two up to 16 that divides both rows' bytes, divided by 16. For n = k = 4 it is 0.5.
    """
    return np.gcd(np.gcd(ALIGNMENT, n), k) / ALIGNMENT


def linear(machine: Machine, rows: Column, outs: Column, ins: Column, size: int = 2) -> Pass:
    """Return the seconds of a linear layer; backward has products for inputs and for weights.

    rows, outs, ins: tokens, outputs and inputs. size: bytes of a number, 4 for FP32.
    """
    forward = gemm(machine, rows, outs, ins, size)
    input_gradient = gemm(machine, rows, ins, outs, size)
    weight_gradient = gemm(machine, outs, ins, rows, size)
    return Pass(forward, input_gradient + weight_gradient)


def moved(machine: Machine, count: Any) -> Any:
    """Return the seconds in which elementwise kernels read and write `count` bytes.

    If `count` is a Pass, the result is a Pass.
    """
    return count * (1 / (machine.bandwidth * COPY_MEMORY))


# ---- Attention: q k^T, softmax, times v ----------------------------------------------------------


HEAD = 128  # the head size for which a machine's attention rates hold
SMALL_HEAD = 0.85  # attention reaches this share of its rate when the head size is halved


def attention(
    machine: Machine, seq: int, head: int, batch: Column, size: int = 2, seen: float | None = None
) -> Pass:
    """Return the seconds of attention's products for `batch` heads of samples.

    There are two products forward and five backward; the causal mask halves them. seq: tokens of a
    sample. head: the head size. size: bytes of a number, 4 for FP32. seen: the tokens that a token
    sees, as the mean over a sample, default: seq / 2; with a window they are fewer.
    """
    padded_head = -(-head // ALIGNMENT) * ALIGNMENT
    seen = seq / 2 if seen is None else seen
    # The FLOPs of one product: 2 for each pair of tokens that see each other and each head column.
    product = 2.0 * batch * seq * seen * padded_head
    if size > 2:  # FP32 does not use tensor cores, and has no flash kernel
        rate = machine.vector_peak * machine.gemm_fraction
        return Pass(2 * product / rate + LAUNCH, 5 * product / rate + LAUNCH)
    kernel = KERNELS[machine.kernel]
    # The rate rises with the sequence length, and is half of its limit at `kernel.half` tokens.
    rate = machine.peak * machine.flash_fraction * seq / (seq + kernel.half)
    if kernel.half:  # "flash" has no `half`: its rate holds for all lengths and head sizes
        rate *= SMALL_HEAD ** max(0.0, math.log2(HEAD / head))
    forward = 2 * product / (rate * kernel.forward)
    return Pass(forward + LAUNCH, 5 * product / (rate * kernel.backward) + LAUNCH)


# ---- Between ranks -------------------------------------------------------------------------------


def ring(machine: Machine, ranks: Column, stride: Column) -> Link:
    """Return the slowest link of a ring of `ranks` ranks that are `stride` apart.

    Within a node this link is NVLink. Across nodes it is the network, which all groups of a node
    share. A ring with several ranks on a node receives through one GPU's network adapter and sends
    through another GPU's, both in one direction only; so it reaches the share `crossing` alone.
    """
    local = _on_one_node(machine, ranks, stride)
    inside = ranks <= local
    groups = machine.node / local  # groups of a node that use the network at the same time
    crossing = np.where(local > 1, machine.crossing, 1.0)
    shared = machine.network.speed / groups * crossing
    slowest = np.minimum(machine.nvlink.speed, shared)
    speed: Column = np.where(inside, machine.nvlink.speed, slowest)
    latency: Column = np.where(inside, machine.nvlink.latency, machine.network.latency)
    return Link(latency, speed, 1.0)


def _on_one_node(machine: Machine, ranks: Column, stride: Column) -> Column:
    """Return how many of `ranks` ranks that are `stride` apart are on one node."""
    return np.minimum(ranks, np.maximum(1, machine.node // stride))


def all_reduce(link: Link, ranks: Column, count: Column) -> Column:
    """Return the seconds to sum `count` bytes over all ranks of a ring (an all-reduce).

    A reduce-scatter or an all-gather takes half as long. link: the slowest link of the ring.
    """
    return 2.0 * (ranks - 1) * (count / ranks / link.speed + link.latency)


def all_to_all(machine: Machine, ranks: Column, stride: Column, count: Column) -> Column:
    """Return the seconds in which each rank sends equal parts of `count` bytes to all ranks.

    The ranks of the group are `stride` apart. Parts for ranks of the same node go over NVLink, the
    others over the network, which all GPUs of the node share; the slower of the two counts.
    """
    local = _on_one_node(machine, ranks, stride)
    inside = count * (local - 1) / ranks / machine.nvlink.speed + machine.nvlink.latency
    sent = count * (ranks - local) / ranks * machine.node  # by all GPUs of a node together
    across = sent / machine.network.speed + machine.network.latency
    seconds = np.where(ranks <= local, inside, np.maximum(inside, across))
    return np.where(ranks < 2, 0.0, seconds)


def message(machine: Machine, stage_ranks: Column, count: Column) -> Column:
    """Return the seconds until an activation of `count` bytes has reached the next stage.

    stage_ranks: the number of GPUs of a stage. All GPUs of a node share its network.
    """
    rate = machine.network.bandwidth * machine.p2p_fraction
    # With stages of whole nodes, all GPUs of a node send to another node at once.
    apart = count * machine.node / rate + machine.network.latency
    # If a stage has fewer GPUs than a node (stage_ranks < machine.node), a node has several stages.
    # Only the ranks of its last stage then send through the network, which these `stage_ranks` GPUs
    # share; the others send over NVLink. The slower of the two counts.
    edge = np.maximum(count * stage_ranks / rate, count / machine.nvlink.speed)
    return np.where(stage_ranks >= machine.node, apart, edge + machine.nvlink.latency)
