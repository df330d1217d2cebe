"""Describes how the programs of public rows of mixtures of experts differ from Trine.

    machine = engines.on(hardware.load("gb200"), facts, values, ExpertEngine)

These programs are Megatron's and AutoModel's. Their grouped products are one kernel, in which the
tiles of all experts share the waves; HybridEP and DeepEP permute while they send, and send a token
once to each rank (or node) that has some of its experts; CUDA graphs launch without the host.

Their models have parts that ModelShape has not: latent attention, Mamba-2 layers, experts of a
narrower space. A block of such a model is written as a list of matrices (`layers`), each with the
number of them in a block, which need not be whole: six attention layers among 23 blocks are 6/23.
"""

from dataclasses import dataclass
from inspect import unwrap

import numpy as np

from benchmarks.planner.engines import FP8_SHARE, Engine
from planner import op_costs, time_terms
from planner.job import Column, Job
from planner.op_costs import Pass

GRAPHS = ("none", "partial", "full")
ROWS_OF_TILE, COLUMNS_OF_TILE, _ = op_costs.TILES[0]
# Kernels of a block's forward beside the experts' products that a CUDA graph of attention, router
# and preprocessing leaves to the host, a number; and those for each matrix that is no expert.
# Assumed, after the rows of one micro-batch of Qwen3 and Nemotron 3 Super were seen.
LEFT_BY_GRAPHS, OF_MATRIX = 70, 8
# How often one kernel that permutes while it sends reads and writes a row, there and back.
SENT_AND_PERMUTED = 4.0


@dataclass(frozen=True)
class ExpertEngine(Engine):
    """A training program of published rows of models with experts."""

    graphs: str = "none"  # of GRAPHS: CUDA graphs of nothing, of some modules, of the whole step
    sent_once: bool = True  # a token is sent once to a rank, however many of its experts are there
    exchange_hidden: float = 0.0  # share of the exchange that other micro-batches hide
    fused_mlp: bool = False  # one kernel for an expert's product, activation and cast
    balanced: bool = True  # each expert has as many rows, whatever the router says
    again: float = 0.0  # share of a forward pass that recomputation of modules repeats
    # Outputs, inputs and number of a block's matrices that are no experts; empty: those of a GPT.
    layers: tuple[tuple[int, int, float], ...] = ()
    latent: int = 0  # width of the rows that experts take; 0: hidden
    attention_layers: float = 1.0  # of a block
    scanned: float = 0.0  # columns that Mamba's kernels read and write, of a block
    # Fitted: seconds of a wave of a grouped product's tiles beside its arithmetic, and bytes moved
    # for each byte of `scanned`, in forward; backward moves twice as many.
    tile_seconds: float = 0.0
    scans: float = 8.0

    def matrices(self, job: Job) -> list:
        """Also those of `layers`, in place of attention's and the shared MLP's."""
        found = unwrap(time_terms.matrices)(job)
        if not self.layers:
            return found
        experts = found[-2:] if job.model.experts > 1 else []
        width = self.latent or job.model.hidden
        if experts:
            (rows, up, _, alike), (_, _, down, _) = experts
            experts = [(rows, up, width, alike), (rows, width, down, alike)]
        t = job.layout.tp
        own = [(job.tokens, outs // t, ins, number) for outs, ins, number in self.layers]
        return own + experts

    def products_alike(
        self, job: Job, rows: Column, outs: Column, ins: Column, alike: Column
    ) -> Pass:
        """Products of experts, with `alike` of 2 and more, are one kernel."""
        if alike < 2:
            return super().products_alike(job, rows, outs, ins, alike)
        return grouped(job, self, (rows, outs, ins), alike)

    def core_seconds(self, job: Job) -> Pass:
        return super().core_seconds(job) * self.attention_layers

    def elementwise_bytes(self, job: Job) -> Pass:
        """Also what Mamba's convolution and scan move."""
        scan = self.scans * self.scanned * job.number_bytes / job.layout.tp
        return super().elementwise_bytes(job) + Pass(scan, 2 * scan)

    def uneven(self, job: Job) -> Column:
        return 1.0 if self.balanced else unwrap(time_terms.uneven)(job)

    def permuted(self, job: Job) -> Pass:
        """One kernel each way, of rows of the width that experts take."""
        if job.model.experts == 1:
            return Pass(0.0, 0.0)
        share = (self.latent or job.model.hidden) / job.model.hidden
        return Pass(SENT_AND_PERMUTED, SENT_AND_PERMUTED) * share

    def router(self, job: Job) -> Pass:
        """Transformer Engine's: a product in half precision with a result in FP32."""
        model, tokens = job.model, job.tokens // job.layout.tp
        scores = op_costs.moved(job.machine, time_terms.ROUTER_SCORES * model.experts * tokens)
        product = op_costs.linear(job.machine, tokens, model.experts, model.hidden)
        return product + Pass(scores, scores)

    def dispatched(self, job: Job) -> Pass:
        model = job.model
        width = (self.latent or model.hidden) / model.hidden
        count = width * job.activation_bytes / job.layout.tp * time_terms.uneven(job)
        both = 2 * exchange(job, count, self.sent_once)
        shown = both * (1 - self.exchange_hidden)
        return Pass(shown, shown)

    def counts_wait(self, job: Job) -> Column:
        return 0.0 if self.graphs == "full" else time_terms.COUNTS_WAIT

    def operations(self, job: Job) -> Column:
        """Count what no graph launches: experts' products together, and in fp8 their casts."""
        if self.graphs == "full":
            return 0.0
        alike = job.model.experts // job.ep
        of_experts = alike * (1.0 if self.fp8 else 0.5) + OF_MATRIX * len(self.layers)
        if self.graphs == "partial":
            return LEFT_BY_GRAPHS + of_experts
        return super().operations(job) - 2 * alike + of_experts

    def selective_seconds(self, job: Job, forward: Column) -> Column:
        return self.again * forward


def grouped(
    job: Job, engine: ExpertEngine, sizes: tuple[Column, Column, Column], alike: Column
) -> Pass:
    """So many linear layers of rows, outputs and inputs `sizes` in one kernel each way, and in fp8
    the casts of their rows, unless one kernel does both.
    """
    (m, n, k), machine = sizes, job.machine
    each = 0.0 if engine.fused_mlp else engine.tile_seconds
    rate = machine.fp8 * FP8_SHARE if engine.fp8 else 1.0

    def product(m: Column, n: Column, k: Column) -> Column:
        tiles = alike * np.ceil(m / ROWS_OF_TILE) * np.ceil(n / COLUMNS_OF_TILE)
        computed = op_costs.tensor_cores(machine, m, n, k, alike) / rate
        computed = computed + each * np.ceil(tiles / machine.processors)
        moved = job.number_bytes * alike * (m * k + k * n + m * n)
        return np.maximum(computed, moved / (machine.bandwidth * op_costs.GEMM_MEMORY))

    whole = Pass(product(m, n, k), product(m, k, n) + product(n, k, m))
    if not engine.fp8 or engine.fused_mlp:
        return whole
    return whole + op_costs.moved(machine, Pass(4.0 * m * k, 4.0 * m * n) * alike)


def exchange(job: Job, count: Column, once: bool) -> Column:
    """Seconds in which each rank sends its tokens, of `count` bytes, to the ranks of their experts;
    `once`: one copy to a rank inside a node, and one to another node.
    """
    chosen, ep, machine = job.model.experts_per_token, job.ep, job.machine
    if not once:
        return op_costs.all_to_all(machine, ep, 1, count * chosen)
    if ep < 2:
        return 0.0
    local = min(ep, machine.node)
    nodes = ep // local
    to_ranks = ep * (1 - (1 - 1 / ep) ** chosen)  # ranks that have any of a token's experts
    inside = count * to_ranks * (local - 1) / local / machine.nvlink.speed
    if nodes == 1:
        return inside + machine.nvlink.latency
    to_nodes = (nodes - 1) * (1 - (1 - 1 / nodes) ** chosen)
    across = count * to_nodes * machine.node / machine.network.speed + machine.network.latency
    return max(inside, across)
