"""Describes how other training programs differ from Trine.

    program = programs()["nemo-2025"]                       # a table of tools/planner/engines.toml
    machine = on(hardware.load("h100-megatron"), program["software"])

Each fact is a field of `ProgramSoftware`, set in tools/planner/engines.toml; a field's default is
what Trine does. A method has the name of a term of the planner's formulas and takes its place
(`costs.job.term`); most add to what Trine's own formula gives.
"""

from dataclasses import asdict, dataclass, replace
from inspect import unwrap
from pathlib import Path
from typing import Any

import numpy as np

from architecture.model_stats import normed_width
from config.command_line import read_toml
from costs import hardware, memory, memory_terms, op_costs, step_time, time_terms
from costs.hardware import Machine, Software
from costs.job import Column, Job
from costs.op_costs import Pass
from schedules.actions import Seconds

PROGRAMS = Path(__file__).parent / "engines.toml"
# Bytes moved for each byte of the input, beside one kernel's read and write: RMSNorm or LayerNorm
# in FP32 as five kernels of torch, forward and backward; rotary positions as eight.
UNFUSED_NORM, FUSED_NORM = Pass(16.0, 37.0), Pass(2.0, 3.0)
UNFUSED_ROTARY = 9.0
# The logits in half precision, in FP32, less their maximum, and their exponentials, as Megatron's
# loss keeps them.
LOGIT_BYTES = 2 + 4 + 4 + 4
PAGE = 65536  # bytes between rows at which the time grows by stride_penalty


def programs() -> dict[str, dict[str, Any]]:
    """Return the tables of engines.toml by name.

    The software of a table that is `like` another is the other's with changes.
    """
    tables = read_toml(PROGRAMS, PROGRAMS.name)
    for own in tables.values():
        if "like" in own:
            own["software"] = tables[own["like"]]["software"] | own["software"]
    return tables


def on(
    machine: Machine,
    facts: dict[str, Any],
    values: dict[str, float] | None = None,
    kind: "type[ProgramSoftware] | None" = None,
) -> Machine:
    """Return the machine as it is with another training program, whose software has these facts.

    facts: fields of ProgramSoftware by name; a text that is a fitted constant's name stands for the
    value of the constant, in `values` or else the one in use. Without facts the program is Trine.
    kind: ProgramSoftware, the default, or a class derived from it.
    """
    if not facts:
        return machine
    values = {**hardware.fitted_values(), **(values or {})}
    found = asdict(machine.software) | OF_PROGRAMS
    found |= {name: values[name] for name in ("misaligned_fraction", "stride_penalty")}
    for name, fact in facts.items():
        found[name] = values.get(fact, fact) if isinstance(fact, str) else fact
    for name in OF_MACHINE & found.keys():
        machine = replace(machine, **{name: found.pop(name)})
    if found.get("attention") in hardware.KERNELS:
        machine = replace(machine, kernel=found.pop("attention"))
    return replace(machine, software=(kind or ProgramSoftware)(**found))


# Facts that are fields of the machine.
OF_MACHINE = {"memory_spread"}
# What a program has if its facts do not say otherwise, where Trine differs: communication buffers
# of the same size for every layout, no measured time of the host beside its launches, seconds of a
# step that do not depend on the model or the batch, and a copy of a token for each of its experts.
OF_PROGRAMS = {
    "buffers": 2e9,
    "group_bytes": 0.0,
    "limited_group_bytes": 0.0,
    "host_of_block": 0.0,
    "per_step": 0.05,
    "one_copy_to_a_node": False,
}


@dataclass(frozen=True)
class ProgramSoftware(Software):
    """The software of another training program: what it does otherwise than Trine."""

    fp8: bool = False  # whether linear layers of blocks compute in fp8
    # Linear layers keep their inputs in fp8 for the backward, as Transformer Engine does; torchao
    # keeps them in half precision.
    keeps_fp8: bool = False
    # flash: the machine's kernel; fused: GEMMs and one kernel for the softmax; math: a kernel for
    # each of scale, mask, softmax, dropout. A name of hardware.KERNELS goes to the machine.
    attention: str = "flash"
    fused_norms: bool = True  # a norm is one kernel, and not five
    fused_elementwise: bool = True  # rotary positions are one kernel, and a gated activation
    fused_gate: bool = False  # a gated activation's backward computes the gate's result again
    offloaded: float = 0.0  # share of the blocks whose activations wait in the host's memory
    dropout: bool = False  # masks are drawn, applied and kept
    virtual_stages: int = 1  # interleaved chunks per stage, arXiv 2104.04473 section 2.2
    overlap_messages: bool = False  # chunks' messages between stages hide behind other chunks
    scatter_p2p: bool = False  # each tensor rank sends 1/tp of an activation, then all gather
    host_per_message: float = 0.0  # seconds to agree on a message between stages
    overlap_data: float = 0.0  # share of gradient and parameter traffic hidden, whatever it takes
    shard_in_node: bool = False  # --zero shards over a node's ranks, and nodes are replicas
    all_reduce_gradients: bool = False  # although ZeRO would need only a reduce-scatter
    # Seconds of the broadcast of one rank's weights, if there are several nodes.
    seconds_per_shard: float = 0.0
    gathered_logits: bool = False  # each tensor rank holds the logits of the whole vocabulary
    loss_bytes_per_logit: float = 0.0  # held for a micro-batch's loss; 0: as Trine or Megatron
    # Bytes for each element of the flat copies of one whole parameter or gradient.
    workspace_bytes: float = 0.0
    # The share of a forward pass that selective recomputation repeats.
    recompute_share: float = 0.0
    # Selective recomputation keeps attention's result and those of q, v, w1 and w2 of a Llama's
    # block: every other product, as torchtitan's policy `op` does.
    keeps_products: bool = False
    # The number of copies of attention's result that a block keeps beside it; -1: none, also of
    # micro-batches of several samples.
    copies_of_attention: float = 0.0
    gather_buffers: float = 0.0  # whole activations held for what tensor ranks gather
    # The share of FP32's peak that attention's GEMMs reach off the tensor cores.
    misaligned_fraction: float = 0.5
    stride_penalty: float = 0.0  # more time of these, when their rows are 64 KiB apart

    @property
    def keeps_scores(self) -> bool:
        """Whether attention writes its scores to memory."""
        return self.attention in ("fused", "math")

    # ---- Passes ----------------------------------------------------------------------------------

    def products_alike(
        self, job: Job, rows: Column, outs: Column, ins: Column, alike: Column
    ) -> Pass:
        """Return the seconds of `alike` linear layers of one shape, perhaps in fp8."""
        if self.fp8 and job.number_bytes == 2:
            return fp8_linear(job.machine, rows, outs, ins) * alike
        return unwrap(time_terms.products_alike)(job, rows, outs, ins, alike)

    def core_seconds(self, job: Job) -> Pass:
        """Return the seconds of attention's core, which may write its scores to memory."""
        if not self.keeps_scores or job.number_bytes > 2:
            return unwrap(time_terms.core_seconds)(job)
        return scores_seconds(job, self)

    def elementwise_bytes(self, job: Job) -> Pass:
        """Add to Trine's bytes those of dropout, with masks of one byte, and of unfused kernels."""
        model, t = job.model, job.layout.tp
        h, size = job.model.hidden / job.sequence_shards, job.number_bytes
        moved = unwrap(time_terms.elementwise_bytes)(job)
        if self.dropout:
            moved += Pass(2.0, 4.0 * size + 2.0) * h
        if not self.fused_norms:
            moved += UNFUSED_NORM * (2 * size * h)
            moved += (UNFUSED_NORM + FUSED_NORM * -1) * (size * normed_width(model) / t)
        if not self.fused_elementwise and model.activation == "swiglu":
            moved += Pass(2.0, 3.0) * (size * model.mlps[1] * model.ffn_hidden / t)
        if not self.fused_elementwise and model.positions == "rotary":
            turned = size * (model.qkv_width + model.attention_width) / 2 / t
            more = UNFUSED_ROTARY - time_terms.ROTARY
            moved += Pass(more, more) * turned
        return moved

    def operations(self, job: Job) -> Column:
        """Add to Trine's number of kernels of a block those of what is not fused."""
        more = 12 * (not self.fused_norms) + 12 * (not self.fused_elementwise)
        return unwrap(time_terms.operations)(job) + more + 6 * self.keeps_scores

    def selective_seconds(self, job: Job, forward: Column) -> Column:
        """Return the seconds that selective recomputation takes in a block's backward pass.

        forward: the seconds of the block's forward pass.
        """
        again = self.recompute_share * forward
        if self.keeps_products:
            other = time_terms.elementwise_bytes(job) * job.tokens
            again = again + products_done_again(job)
            again = again + op_costs.moved(job.machine, other).forward
        if self.keeps_scores:
            again = again + time_terms.attention(job).forward
        return again

    # ---- Pipeline and traffic --------------------------------------------------------------------

    def schedule_seconds(self, job: Job, actions: Seconds, sent: float) -> float:
        """Return the seconds of a step's passes and messages with v = `virtual_stages` chunks.

        Megatron-LM's interleaved schedule has a bubble 1/v as long and v times as many messages
        (arXiv 2104.04473, section 2.2). With `overlap_messages` only the first ones count. sent:
        the seconds of a message.
        """
        chunks, count = self.virtual_stages, job.micro_batches
        if chunks == 1:
            return unwrap(step_time.schedule_seconds)(job, actions, sent)
        slot = max(map(sum, step_time.stage_passes(job)))
        shown = 1 if self.overlap_messages else count
        return (count + (job.layout.pp - 1) / chunks) * slot + shown * chunks * sent

    def message_seconds(self, job: Job) -> Column:
        """Return the seconds of a message between stages, with the host's; 0 if it is hidden."""
        tp, count = job.layout.tp, job.activation_bytes
        gathered = 0.0
        if self.scatter_p2p:
            gathered = count * (tp - 1) / tp / job.machine.nvlink.speed
            count = count / tp
        sent = op_costs.message(job.machine, tp * job.shards, count)
        hidden = np.equal(job.layout.schedule, "interleaved") & self.overlap_messages
        seen = np.greater(job.layout.pp, 1) & ~hidden
        return np.where(seen, self.host_per_message + sent + gathered, 0.0)

    def sharing(self, job: Job) -> Column:
        """Return how many ranks --zero shards over: all that hold the same weights, or a node's."""
        if not self.shard_in_node:
            return job.shards
        of_node = np.maximum(1, job.machine.node // job.layout.tp)
        return np.where(job.layout.zero > 0, np.minimum(job.shards, of_node), job.shards)

    def gather_seconds(self, job: Job, dense: Column, experts: Column) -> Column:
        """Return the seconds of gathering weights after an update.

        InternEvo sends each rank's part by a broadcast of its own, one after the other.
        """
        tp, ranks = job.layout.tp, self.sharing(job)
        seconds = time_terms.ring_seconds(job, ranks, tp, dense * job.number_bytes) / 2
        over_nodes = ranks * tp > job.machine.node
        broadcasts = np.where(over_nodes, self.seconds_per_shard * ranks, 0.0)
        return (1 - self.overlap_data) * (seconds + broadcasts)

    def reduce_seconds(self, job: Job, dense: Column, experts: Column) -> Column:
        """Return the seconds of reducing gradients: within `sharing` ranks, then between nodes.

        Between nodes each rank reduces the part that it has summed within its node.
        """
        tp, ranks, size = job.layout.tp, self.sharing(job), time_terms.wire_bytes(job)
        whole = np.bool_(self.all_reduce_gradients) | (job.layout.zero == 0)
        summed = time_terms.ring_seconds(job, ranks, tp, dense * size)
        inside = np.where(whole, 1.0, 0.5) * summed
        nodes = job.shards // ranks
        between = time_terms.ring_seconds(job, nodes, tp * ranks, dense * size / ranks)
        return (1 - self.overlap_data) * (inside + between)

    # ---- Memory ----------------------------------------------------------------------------------

    def kept_of_block(self, job: Job) -> tuple[Column, Column]:
        """Return Trine's kept bytes of a block without the share that waits in host memory."""
        recomputed, whole = unwrap(memory_terms.kept_of_block)(job)
        return (1 - self.offloaded) * recomputed, (1 - self.offloaded) * whole

    def most_in_flight(self, job: Job, kept: np.ndarray, ends: list[float]) -> tuple[list, list]:
        """Return Trine's activations in flight times 1 + (pp - 1) / (pp v), for v chunks.

        So many has Megatron-LM's interleaved schedule, by arXiv 2205.05198.
        """
        activations, heads = unwrap(memory.most_in_flight)(job, kept, ends)
        pp, chunks = job.layout.pp, self.virtual_stages
        more = 1.0 + (pp - 1) / (pp * chunks) if chunks > 1 else 1.0
        return [more * size for size in activations], [more * count for count in heads]

    def gradients_of(self, job: Job, held: Column, sharded: Column) -> Column:
        """Add to Trine's gradients, in bytes, the flat copies that the program makes."""
        return unwrap(memory_terms.gradients_of)(job, held, sharded) + held * self.workspace_bytes

    def buffers_of(self, job: Job) -> Column:
        """Return the bytes of communication buffers, and of what tensor ranks gather into."""
        gathered = self.gather_buffers * job.activation_bytes
        return self.buffers + np.where(job.layout.tp > 1, gathered, 0.0)

    def block_working(self, job: Job) -> Column:
        """Return the bytes that a block's backward pass needs beside what is kept for it."""
        whole = memory_terms.largest_block(job)
        working = unwrap(memory_terms.block_working)(job)
        if self.keeps_scores:
            inner = 2.0 * job.number_bytes * job.model.ffn_hidden / job.layout.tp * job.tokens
            full = np.equal(job.layout.recompute, "full")
            working = np.where(full, whole, inner * job.model.mlps[1])
        selective = np.equal(job.layout.recompute, "selective")
        return np.where(selective & self.keeps_products, whole, working)

    def embedding_working(self, job: Job, parts: memory_terms.Parts, kept: Column) -> Column:
        """Return Trine's bytes of the embedding's backward; 0 for programs that keep scores."""
        return (
            0.0 if self.keeps_scores else unwrap(memory_terms.embedding_working)(job, parts, kept)
        )

    def loss_bytes(self, job: Job, parts: memory_terms.Parts, heads: Column) -> Column:
        """Return the bytes of logits and their copies that a micro-batch's loss holds."""
        each = self.loss_bytes_per_logit or LOGIT_BYTES * self.keeps_scores
        if not each:
            return unwrap(memory_terms.loss_bytes)(job, parts, heads)
        logits = 1.0 * job.tokens * job.vocab_columns
        return each * logits * (job.layout.tp if self.gathered_logits else 1)

    def kept_selectively(self, job: Job) -> Column:
        """Return the bytes that a block keeps with selective recomputation."""
        if self.keeps_products:
            return kept_products(job)
        return (1.0 - self.recompute_share) * unwrap(memory_terms.kept_selectively)(job)

    def block_activations(self, job: Job, scores: Column) -> Column:
        """Add to Trine's bytes those of dropout's masks, of unfused kernels and of the scores.

        Attention's scores take 5 a s^2 b bytes: a mask of one byte, and two copies in half
        precision.
        """
        model, t = job.model, job.layout.tp
        outside, widths = 0.0, 0.0
        if self.dropout:
            outside += 2.0 * model.hidden
        if not self.fused_norms:  # the input in FP32, and the result before it is scaled
            outside += 2 * (4.0 + 2.0) * model.hidden
            widths += 3 * normed_width(model)
        is_gated = model.up_matrices == 2
        if self.fused_gate and is_gated:
            widths -= memory_terms.mlp_width(job)
        elif self.keeps_scores and self.fused_elementwise and is_gated:
            widths -= model.mlps[1] * model.ffn_hidden
        if self.fp8 and self.keeps_fp8:
            # The results of both norms and of the activation have half of their bytes. Attention's
            # result is kept twice: for its own backward, and in fp8 as the next product's input.
            outside -= 2 * model.hidden
            widths += (model.attention_width - memory_terms.mlp_width(job)) / 2
        more = outside / job.sequence_shards + 2.0 * widths / t
        if self.keeps_scores:
            each = 5.0 if self.dropout else 2.0
            more = more + scores * (each * model.heads / t * model.seq_length)
        size = job.number_bytes / 2 * job.tokens * more
        return unwrap(memory_terms.block_activations)(job, scores) + size

    def copied_width(self, job: Job) -> Column:
        """Return 0: copies of queries and keys are counted in `copies_of_attention`."""
        return 0.0

    def attention_copies(self, job: Job) -> Column:
        """Return how many copies of attention's result a block keeps beside it."""
        if self.keeps_scores or self.copies_of_attention < 0:
            return 0.0
        return np.maximum(self.copies_of_attention, unwrap(memory_terms.attention_copies)(job))


# ---- Selective recomputation of torchtitan -------------------------------------------------------


def products_done_again(job: Job) -> Column:
    """Return the seconds of recomputing what `keeps_products` drops: k, attention's output, w3."""
    model = job.model
    forward = [product.forward for product in time_terms.products(job)]
    keys = (model.qkv_width - model.attention_width) / 2 / model.qkv_width
    return keys * forward[0] + forward[1] + forward[2] / 2


def kept_products(job: Job) -> Column:
    """Return the bytes of what a block keeps with `keeps_products`.

    They are its input, attention's result, and the results of q, v, w1 and w2. Of w2's each tensor
    rank has its own part of the sum; it is kept too, beside the reduced sums.
    """
    model, t = job.model, job.layout.tp
    values = (model.qkv_width - model.attention_width) / 2
    widths: Column = 2 * model.attention_width + values + model.ffn_hidden
    widths = widths + model.hidden * np.where(t == 1, 1, 3)  # the reduced sums are split over t
    return job.number_bytes * job.tokens * (widths / t + model.hidden)


# ---- Products in fp8 -----------------------------------------------------------------------------


def fp8_linear(machine: Machine, rows: Column, outs: Column, ins: Column) -> Pass:
    """Return the seconds of a linear layer with products in fp8.

    Inputs and gradients are read in half precision (2 bytes), and written in fp8 twice (1 byte
    each): as they are, and transposed. rows, outs, ins: tokens, outputs and inputs.
    """
    faster = replace(machine, peak=machine.peak * machine.fp8 * machine.fp8_share)
    casts = Pass(4.0 * rows * ins, 4.0 * rows * outs)
    return op_costs.linear(faster, rows, outs, ins) + op_costs.moved(machine, casts)


# ---- Attention that writes its scores ------------------------------------------------------------


def scores_seconds(job: Job, engine: ProgramSoftware) -> Pass:
    """Return the seconds of q k^T, softmax and p v as batched GEMMs and a softmax kernel."""
    machine, seq, head = job.machine, job.model.seq_length, job.model.head_size
    batch = job.model.heads // job.layout.tp * job.layout.micro_batch_size
    row = 2.0 * 3 * head * batch
    scores = batched_gemm(machine, engine, (seq, seq, head), batch, row)
    mixed = batched_gemm(machine, engine, (seq, head, seq), batch, row)
    elements = 1.0 * batch * seq * seq
    dropout = 5.0 if engine.dropout else 0.0  # read 2, write 2, mask 1
    # Scale, mask, cast, softmax, cast: a kernel each.
    apart = (engine.attention == "math") | ~fused_softmax(seq, batch)
    moved = Pass(4.0 + dropout, 6.0 + dropout) + Pass(24.0, 16.0) * apart
    products = Pass(scores + mixed, scores + 3 * mixed)
    return products + op_costs.moved(machine, moved * elements)


def fused_softmax(seq: int, batch: Column) -> Column:
    """Return whether Megatron's fused causal softmax kernel takes this shape."""
    return np.bool_(16 < seq <= 4096 and seq % 4 == 0) & (batch % 4 == 0)


def batched_gemm(
    machine: Machine,
    engine: ProgramSoftware,
    sizes: tuple[int, int, int],
    batch: Column,
    row_bytes: Column,
) -> Column:
    """Return the seconds of `batch` products of m x k and k x n matrices in half precision.

    sizes: m, n and k; where n or k is misaligned the tensor cores are not used. row_bytes: bytes
    from the begin of a row in memory to that of the next one.
    """
    m, n, k = sizes
    traffic = 2.0 * batch * (m * k + k * n + m * n) / (machine.bandwidth * op_costs.GEMM_MEMORY)
    if op_costs.aligned(n, k) == 1.0:
        return np.maximum(op_costs.tensor_cores(machine, m, n, k, batch), traffic) + op_costs.LAUNCH
    loads = 2.0 if n % 2 or k % 2 else 1.0  # loads are of two bytes, not of four
    rate = machine.vector_peak * engine.misaligned_fraction / loads
    strided = 1.0 + engine.stride_penalty * (row_bytes / PAGE) ** 2
    return np.maximum(2.0 * batch * m * n * k / rate, traffic) * strided
