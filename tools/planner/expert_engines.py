"""Describes how other training programs of mixtures of experts differ from Trine.

    program = engines.programs()["megatron-experts"]
    machine = engines.on(hardware.load("gb200"), program["software"], kind=ExpertEngine)

These programs are Megatron's and AutoModel's. Their grouped products are one kernel, in which the
tiles of all experts share the waves; HybridEP and DeepEP permute while they send, and send a token
once to each rank (or node) that has some of its experts; CUDA graphs launch without the host.

Their models have parts that ModelShape has not: Mamba-2 layers, experts of a narrower space. A
block of such a model is written as a list of matrices (`layers`), each with the number of them in a
block, which need not be whole: six attention layers among 23 blocks are 6/23.
"""

from dataclasses import dataclass
from inspect import unwrap

import numpy as np

from architecture.model_stats import mixer_weights, normed_width, shared_parameters
from costs import op_costs, time_terms
from costs.job import Column, Job
from costs.op_costs import Pass
from tools.planner.engines import ProgramSoftware

GRAPHS = ("none", "partial", "full")
ROWS_OF_TILE, COLUMNS_OF_TILE, _ = op_costs.TILES[0]
# Kernels of a block's forward beside the experts' products that a CUDA graph of attention, router
# and preprocessing leaves to the host, a number; and those for each matrix that is no expert.
# Assumed, after the rows of one micro-batch of Qwen3 and Nemotron 3 Super were seen.
LEFT_BY_GRAPHS, OF_MATRIX = 70, 8
# How often one kernel that permutes while it sends reads and writes a row, there and back.
SENT_AND_PERMUTED = 4.0
# The modules that --recompute-modules of Megatron recomputes, and the share of a block's forward
# that each of them is, from its FLOPs; `Kept` says what each of them frees.
AGAIN = {"mla_up_proj": 0.09, "mlp": 0.01, "moe": 0.6, "moe_act": 0.03, "layernorm": 0.03}
AGAIN |= {"core_attn": 0.1}
# Bytes that a router keeps for each token and expert, a probability in FP32 and a mark, and for
# each token and chosen expert, its place in the permutation.
SCORE_KEPT, PLACE_KEPT = 4.0 + 1.0, 8.0


@dataclass(frozen=True)
class ExpertEngine(ProgramSoftware):
    """A training program of published rows of models with experts."""

    graphs: str = "none"  # of GRAPHS: CUDA graphs of nothing, of some modules, of the whole step
    sent_once: bool = True  # a token is sent once to a rank, however many of its experts are there
    exchange_hidden: float = 0.0  # share of the exchange that other micro-batches hide
    fused_mlp: bool = False  # one kernel for an expert's product, activation and cast
    balanced: bool = True  # each expert has as many rows, whatever the router says
    recomputed: tuple[str, ...] = ()  # modules that are recomputed, of AGAIN
    # Outputs, inputs and number of a block's matrices that are no experts; empty: those of a GPT.
    layers: tuple[tuple[int, int, float], ...] = ()
    # The same of matrices beside those: of a block that predicts further tokens, and its head.
    further: tuple[tuple[int, int, float], ...] = ()
    # Width of the rows that experts take, and of an expert's MLP; 0: as the model's. The model then
    # has experts of as many parameters.
    latent: int = 0
    latent_ffn: int = 0
    attention_layers: float = 1.0  # of a block
    scanned: float = 0.0  # columns that Mamba's kernels read and write, of a block
    # Fitted: seconds of a wave of a grouped product's tiles beside its arithmetic, and bytes moved
    # for each byte of `scanned`, in forward; backward moves twice as many.
    tile_seconds: float = 0.0
    scans: float = 8.0

    def matrices(self, job: Job) -> list:
        """Return (rows, outputs, inputs, number) of a block's matrices, and those of `further`.

        Matrices of `layers`, if there are any, take the place of attention's and the shared MLP's.
        """
        found = unwrap(time_terms.matrices)(job)
        t = job.layout.tp
        further = [(job.tokens, outs // t, ins, number) for outs, ins, number in self.further]
        if not self.layers:
            return further + found
        experts = found[-2:] if job.model.experts > 1 else []
        width = self.latent or job.model.hidden
        if experts:
            rows, _, _, alike = experts[0]
            ffn = self.latent_ffn or job.model.ffn_hidden
            up = ffn * job.model.up_matrices
            experts = [(rows, up, width, alike), (rows, width, ffn, alike)]
        own = [(job.tokens, outs // t, ins, number) for outs, ins, number in self.layers]
        return further + own + experts

    def products_alike(
        self, job: Job, rows: Column, outs: Column, ins: Column, alike: Column
    ) -> Pass:
        """Return the seconds of `alike` products of one shape; several are a grouped GEMM."""
        single = super().products_alike(job, rows, outs, ins, alike)
        if np.all(np.less(alike, 2)):
            return single
        together = grouped(job, self, (rows, outs, ins), alike)
        pairs = zip(single, together, strict=True)
        return Pass(*(np.where(np.less(alike, 2), one, many) for one, many in pairs))

    def core_seconds(self, job: Job) -> Pass:
        """Return the seconds of attention's core; with latent attention values are narrower."""
        model = job.model
        if not model.is_latent:
            return super().core_seconds(job) * self.attention_layers
        heads = model.heads // job.layout.tp * job.layout.micro_batch_size
        mean_width = (model.kernel_head_size + model.value_size) // 2
        return op_costs.attention(job.machine, model.seq_length, mean_width, heads)

    def elementwise_bytes(self, job: Job) -> Pass:
        """Add to the bytes that kernels move those of Mamba's convolution and scan."""
        scan = self.scans * self.scanned * job.number_bytes / job.layout.tp
        return super().elementwise_bytes(job) + Pass(scan, 2 * scan)

    def uneven(self, job: Job) -> Column:
        """Return the rows of the fullest rank's experts over the mean; 1 if routing is balanced."""
        return 1.0 if self.balanced else unwrap(time_terms.uneven)(job)

    def permuted(self, job: Job) -> Pass:
        """Return how often a row is read and written to permute it: one kernel each way.

        Rows have the width that experts take.
        """
        if job.model.experts == 1:
            return Pass(0.0, 0.0)
        share = (self.latent or job.model.hidden) / job.model.hidden
        return Pass(SENT_AND_PERMUTED, SENT_AND_PERMUTED) * share

    def router(self, job: Job) -> Pass:
        """Return the seconds of Transformer Engine's router: half precision, scores in FP32."""
        model, tokens = job.model, job.tokens // job.layout.tp
        scores = op_costs.moved(job.machine, time_terms.ROUTER_SCORES * model.experts * tokens)
        product = op_costs.linear(job.machine, tokens, model.experts, model.hidden)
        return product + Pass(scores, scores)

    def dispatched(self, job: Job) -> Pass:
        """Return the seconds of sending tokens to experts and back that nothing hides."""
        model = job.model
        width = (self.latent or model.hidden) / model.hidden
        count = width * job.activation_bytes / job.layout.tp * time_terms.uneven(job)
        both = 2 * exchange(job, count, self.sent_once)
        shown = both * (1 - self.exchange_hidden)
        return Pass(shown, shown)

    def counts_wait(self, job: Job) -> Column:
        """Return the seconds in which the host waits for the experts' counts; 0 in a CUDA graph."""
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
        """Return the seconds of recomputing the modules in `recomputed`; forward: of a block."""
        return sum(AGAIN[name] for name in self.recomputed) * forward

    def further_parameters(self, job: Job) -> Column:
        """Return the parameters that `further` and `layers` add to the model's, on a tensor rank.

        `layers` take the place of attention and of the shared MLP, which are subtracted.

        A head that predicts further tokens is the model's own, so it is not counted.
        """
        vocabulary, matrices = job.model.vocab_size, (*self.layers, *self.further)
        found = sum(n * outs * ins for outs, ins, n in matrices if outs != vocabulary)
        if self.layers:
            found -= mixer_weights(job.model) + shared_parameters(job.model)
        return found / job.layout.tp

    def block_activations(self, job: Job, scores: Column) -> Column:
        """Return the bytes of the tensors that Megatron's modules keep, without recomputed ones.

        Rows for experts are of other numbers in every pass, so the allocator's gaps count for all
        tensors, not for those of recomputed blocks alone.
        """
        model, t = job.model, job.layout.tp
        inside, outside = Kept(self, job).numbers()
        sizes = outside / job.sequence_shards + inside / t
        if model.experts > 1:
            k, places = model.experts_per_token, SCORE_KEPT * model.experts
            sizes = sizes + (places + PLACE_KEPT * k) / t
        gathered_from = job.cp // job.over_heads - 1
        keys_and_values = 2 * model.kv_heads * model.kernel_head_size
        gaps = job.machine.activation_overhead if model.experts > 1 else 1.0
        return gaps * job.tokens * (sizes + 2.0 * gathered_from * keys_and_values / t)


class Kept:
    """Activation memory of a block of Megatron: bytes for each token of a micro-batch, by module.

    A linear layer keeps its input, in fp8 in one byte. Modules in `recomputed` keep nothing.
    """

    def __init__(self, engine: ExpertEngine, job: Job):
        self.engine = engine
        self.job = job
        self.of_input = 1.0 if engine.fp8 and engine.keeps_fp8 else 2.0  # bytes of a layer's input

    def numbers(self) -> tuple[Column, Column]:
        """Return the bytes a token that tp divides, and those that sequence parallelism does."""
        model, engine = self.job.model, self.engine
        norms = 2.0 * 2 * model.hidden  # the inputs of both norms
        if "layernorm" not in engine.recomputed:
            norms += self.of_input * 2 * model.hidden
        if engine.layers:
            return self.layer_bytes() + self.expert_bytes(), norms
        inside, latents = self.attention_bytes()
        return inside + self.mlp_bytes() + self.expert_bytes(), norms + latents

    def attention_bytes(self) -> tuple[float, float]:
        """Return the bytes a token of queries, keys, values and results, and those of latents."""
        model = self.job.model
        result = (2.0 + self.of_input * (self.of_input < 2)) * model.attention_width
        if "core_attn" in self.engine.recomputed:
            result = self.of_input * model.attention_width
        if not model.is_latent:
            return 2.0 * (model.qkv_width + normed_width(model)) + result, 0.0
        up = 2.0 * model.heads * (2 * model.kernel_head_size + model.value_size)
        if "mla_up_proj" in self.engine.recomputed:
            up = 0.0
        latents = model.q_lora_rank + model.kv_lora_rank
        return up + result, (2.0 + self.of_input) * latents + 2.0 * model.qk_rope_head_dim

    def mlp_bytes(self) -> float:
        """Return the bytes a token of the MLP that every token takes: the only or shared one.

        Kept are the first matrices' outputs in bf16, and the input of the last matrix.
        """
        model = self.job.model
        recomputed = "mlp" if model.experts == 1 else "moe"
        if recomputed in self.engine.recomputed:
            return 0.0
        width = model.ffn_hidden if model.experts == 1 else model.shared_ffn_hidden
        return (2.0 * model.up_matrices + self.of_input) * width

    def expert_bytes(self) -> Column:
        """Return the bytes a token of rows that came to this GPU's experts, and of their MLPs."""
        model, engine = self.job.model, self.engine
        if model.experts == 1 or "moe" in engine.recomputed:
            return 0.0
        ffn = engine.latent_ffn or model.ffn_hidden
        each = self.of_input * (engine.latent or model.hidden)  # the input of the first product
        each += 2.0 * model.up_matrices * ffn
        if "moe_act" not in engine.recomputed:
            each += self.of_input * ffn
        return model.experts_per_token * self.job.rows_over_mean * each

    def layer_bytes(self) -> float:
        """Return the bytes a token of `layers`: inputs and outputs not as wide as the block."""
        model = self.job.model
        found = 0.0
        for outs, ins, number in self.engine.layers:
            found += number * 2.0 * outs * (outs not in (model.hidden, model.vocab_size))
            found += number * self.of_input * ins * (ins != model.hidden)
        return found


def grouped(
    job: Job, engine: ExpertEngine, sizes: tuple[Column, Column, Column], alike: Column
) -> Pass:
    """Return the seconds of `alike` linear layers of one shape in a grouped GEMM kernel each way.

    sizes: rows, outputs and inputs of each. In fp8 the casts of their rows are kernels of their
    own, unless the program has `fused_mlp`.
    """
    (m, n, k), machine = sizes, job.machine
    each = 0.0 if engine.fused_mlp else engine.tile_seconds
    rate = machine.fp8 * machine.fp8_share if engine.fp8 else 1.0

    def product(m: Column, n: Column, k: Column) -> Column:
        """Return the seconds of the grouped products of m x k and k x n."""
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
    """Return the seconds in which each rank sends its tokens to the ranks of their experts.

    count: bytes of a rank's tokens, each once. once: whether a token is sent once to each rank of
    its node and once to each other node that has some of its experts; else once for each expert.
    """
    chosen, ep, machine = job.model.experts_per_token, job.ep, job.machine
    if not once:
        return op_costs.all_to_all(machine, ep, 1, count * chosen)
    local = np.minimum(ep, machine.node)
    nodes = ep // local
    to_ranks = ep * (1 - (1 - 1 / ep) ** chosen)  # ranks that have any of a token's experts
    inside = count * to_ranks * (local - 1) / local / machine.nvlink.speed
    to_nodes = (nodes - 1) * (1 - (1 - 1 / nodes) ** chosen)
    across = count * to_nodes * machine.node / machine.network.speed + machine.network.latency
    seconds = np.where(nodes > 1, np.maximum(inside, across), inside + machine.nvlink.latency)
    return np.where(np.less(ep, 2), 0.0, seconds)
