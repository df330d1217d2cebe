"""Bytes on one GPU of each stage: states by ZeRO, activations in flight, logits, buffers.

The total is comparable to what nvidia-smi shows: the most that the caching allocator ever held.
Symbols: P parameters on the GPU, b micro-batch, s, h, V, t = tp, a heads.

    states       weights 2 + gradients 2..6 + workspace, each times P; 12..16 P / dp of Adam's
    activations  of every micro-batch in flight: 2 s b h per block under full recomputation
    working      the larger of the block that is being recomputed and the logits
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from config.messages import UserError
from config.model_stats import block_parameters, norm_parameters
from config.schema import BUCKET_ELEMENTS, Config, Layout, ModelShape, Training
from planner import hardware
from planner.hardware import Machine
from schedules import simulation
from schedules.partition import StageSpec, stage_specs

# Bytes per parameter that an optimizer's state is smaller by than AdamW's two moments: two bytes
# and two scales for 256 weights, one moment, or two factors of a matrix.
SAVED_STATE = {"adamw8bit": 6.0 - 8 / 256, "sgd": 4.0, "muon": 4.0, "adafactor": 8.0}
# The logits in half precision, in FP32, less their maximum, and their exponentials, as Megatron's
# loss keeps them; the second sum is of a loss that works in place where it can.
LOGIT_BYTES = 2 + 4 + 4 + 4
FUSED_LOGIT_BYTES = 2 + 4 + 4
# The parts that follow from model and layout alone, without the allocator and the libraries.
OF_RUN = ("weights", "gradients", "optimizer", "activations", "working")


@dataclass(frozen=True)
class StageMemory:
    """Bytes that each GPU of one stage holds, and its parameters."""

    stage: int
    blocks: int
    parameters: float
    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    buffers: float
    context: float

    @property
    def total(self) -> float:
        """All of it, in bytes."""
        held = self.weights + self.gradients + self.optimizer + self.activations
        return held + self.working + self.buffers + self.context


def stages(
    model: ModelShape, layout: Layout, training: Training, machine: Machine
) -> list[StageMemory]:
    """Memory of every stage of a layout whose dp is filled in; UserError as `micro_batches`."""
    in_flight = scheduled(layout, training).peak
    rows = zip(stage_specs(model, layout), in_flight, strict=True)
    return [_stage(spec, held, model, layout, training, machine) for spec, held in rows]


def fullest(model: ModelShape, layout: Layout, training: Training, machine: Machine) -> StageMemory:
    """The fullest stage alone; UserError as `micro_batches`."""
    return _fullest(scheduled(layout, training).peak, model, layout, training, machine)


def least(model: ModelShape, layout: Layout, training: Training, machine: Machine) -> float:
    """Bytes of the fullest stage with one micro-batch in flight: any schedule needs as many."""
    return _fullest([1] * layout.pp, model, layout, training, machine).total


def _fullest(in_flight: Sequence[int], model, layout, training, machine) -> StageMemory:
    """The fullest stage; of stages with the same parts, only the one with the most in flight."""
    most: dict[tuple[bool, bool, int], tuple[StageSpec, int]] = {}
    for spec, held in zip(stage_specs(model, layout), in_flight, strict=True):
        alike = (spec.embedding, spec.head, spec.blocks)
        if alike not in most or held > most[alike][1]:
            most[alike] = (spec, held)
    tried = [_stage(*entry, model, layout, training, machine) for entry in most.values()]
    return max(tried, key=lambda stage: stage.total)


def scheduled(layout: Layout, training: Training) -> simulation.NamedSchedule:
    """The pipeline schedule of one step; UserError as `micro_batches`."""
    count = micro_batches(layout, training)
    return simulation.named(layout.schedule, layout.pp, count)


def micro_batches(layout: Layout, training: Training) -> int:
    """Micro-batches of one replica in a step; UserError if the batch is too small for one."""
    samples, micro, dp = training.global_batch_size, layout.micro_batch_size, layout.dp
    if samples < micro * dp:
        raise UserError(
            f"micro-batch-size({micro}) * dp({dp}) = {micro * dp} is more than "
            f"global-batch-size({samples})"
        )
    return samples // (micro * dp)


def of_run(config: Config) -> list[dict[str, float]]:
    """Bytes by part of OF_RUN on a rank of every stage: what model and layout account for.

    `config` must be checked. Of a ramp-up, the largest batch counts.
    """
    # Any machine will do: with this software and no overhead, its numbers are not in these parts.
    machine = hardware.load("a100-80")
    machine = dataclasses.replace(machine, software=hardware.Software(), activation_overhead=1.0)
    scale = 2.0 if config.training.precision == "fp64" else 1.0  # the formulas end at fp32
    batch = max(level.batch for level in config.batches.levels())
    training = dataclasses.replace(config.training, global_batch_size=batch)
    table = stages(config.model, config.layout, training, machine)
    return [{part: scale * getattr(stage, part) for part in OF_RUN} for stage in table]


# ------------------------------------------------------------------------------------------------
# One stage
# ------------------------------------------------------------------------------------------------


def _stage(spec: StageSpec, in_flight: float, model, layout, training, machine) -> StageMemory:
    """Bytes of one stage that keeps the activations of `in_flight` micro-batches."""
    software = machine.software
    held = held_parameters(spec, model, layout)
    in_flight *= _interleaving(layout, machine)
    working = block_working(model, layout, training, machine)
    if spec.head:
        size = LOGIT_BYTES if software.attention == "fused" else FUSED_LOGIT_BYTES
        columns = model.padded_vocab(layout) / layout.tp
        working = max(working, float(size) * _rows(model, layout) * columns)
    return StageMemory(
        stage=spec.index,
        blocks=spec.blocks,
        parameters=held,
        weights=_weights(held, spec, model, layout, training),
        gradients=_gradients(held, layout, training, machine) + held * software.workspace_bytes,
        optimizer=held * _sharded_bytes(training, machine) / (layout.dp if layout.zero else 1),
        activations=in_flight * _kept_of_stage(spec.blocks, model, layout, training, machine),
        working=working,
        buffers=software.buffers,
        context=machine.context,
    )


def held_parameters(spec: StageSpec, model: ModelShape, layout: Layout) -> float:
    """Parameters on one GPU: matrices by 1/tp, with the vocabulary's padding; norms in full."""
    norms = 2 * norm_parameters(model)
    held = spec.blocks * ((block_parameters(model) - norms) / layout.tp + norms)
    matrix = model.padded_vocab(layout) * model.hidden / layout.tp
    if spec.embedding:
        held += matrix
        held += model.max_positions * model.hidden if model.positions == "learned" else 0
    if spec.head and (layout.pp > 1 or not model.tied):
        held += matrix
    return held


def number_bytes(training: Training) -> int:
    """Bytes of a number in forward and backward; fp64 counts as fp32."""
    return 2 if training.precision in ("fp16", "bf16") else 4


def _weights(held: float, spec: StageSpec, model, layout, training) -> float:
    """Bytes of the weights in computing precision; at --zero 3 of those that are gathered."""
    size = number_bytes(training)
    if layout.zero < 3 or layout.dp == 1:
        return held * size
    block = block_parameters(model) / layout.tp  # the one that runs, and the next being gathered
    shared = held - spec.blocks * block
    return size * (shared + 2 * block) + (0.0 if size == 2 else held * 4.0 / layout.dp)


def _gradients(held: float, layout: Layout, training: Training, machine: Machine) -> float:
    """Bytes of the gradients; from --zero 2 on a sum of 1/dp, and two buckets being reduced."""
    number = number_bytes(training)
    size = machine.software.gradient_bytes if number == 2 else 4.0
    if training.grad_dtype == "bf16":
        size -= 2.0
    if layout.zero < 2 or layout.dp == 1:
        return held * size
    return held * 4.0 / layout.dp + min(held, BUCKET_ELEMENTS) * (2 * size + number)


def _sharded_bytes(training: Training, machine: Machine) -> float:
    """Bytes per parameter of master weights and moments, before they are divided by dp."""
    state = machine.software.sharded_bytes
    if number_bytes(training) == 4:
        state = 8.0  # the moments: the weights are their own master
    return state - SAVED_STATE.get(training.optimizer, 0.0)


# ------------------------------------------------------------------------------------------------
# Activations
# ------------------------------------------------------------------------------------------------


def _interleaving(layout: Layout, machine: Machine) -> float:
    """Times as many activations in flight with v virtual stages: 1 + (pp-1)/(pp v).

    arXiv 2205.05198. For measured rows of Megatron-LM alone, whose interleaved schedule is none of
    ours: everything else takes the number in flight from its schedule.
    """
    v = machine.software.virtual_stages
    return 1.0 if v == 1 else 1.0 + (layout.pp - 1) / (layout.pp * v)


def _kept_of_stage(blocks: int, model, layout, training, machine) -> float:
    """Bytes that a stage's blocks keep of one micro-batch until its backward."""
    kept = kept_bytes(model, layout, training, machine)
    if layout.recompute == "none":
        return blocks * kept
    again = layout.recomputed_blocks(blocks)
    plain = block_activations(model, layout, training, machine, True)
    # What is kept is allocated between what is not, which leaves gaps.
    return again * kept * machine.activation_overhead + (blocks - again) * plain


def kept_bytes(model: ModelShape, layout: Layout, training: Training, machine: Machine) -> float:
    """Bytes one block keeps of one micro-batch until its backward."""
    if layout.recompute == "full":
        shared = layout.tp if layout.sequence_parallel else 1
        return number_bytes(training) * _rows(model, layout) * model.hidden / shared
    return block_activations(model, layout, training, machine, layout.recompute == "none")


def block_activations(model, layout, training, machine, scores: bool) -> float:
    """All that one block keeps without recomputation, arXiv 2205.05198 section 4, in bytes.

    Outside the tensor-parallel region 10 s b h, inside it 24 s b h / t for f = 4 h, and 5 a s^2 b
    of attention scores unless they are recomputed or never written (flash).
    """
    rows, t, h = _rows(model, layout), layout.tp, model.hidden
    masks = 2.0 if machine.software.dropout else 0.0
    outside = (8.0 + masks) * h / (t if layout.sequence_parallel else 1)
    inside = 2.0 * (model.qkv_width + h + model.up_width + model.ffn_hidden) / t
    size = rows * (outside + inside)
    if scores and machine.software.attention == "fused":
        each = 5.0 if machine.software.dropout else 2.0
        size += each * model.heads / t * model.seq_length * rows
    return size * number_bytes(training) / 2


def block_working(model, layout, training, machine) -> float:
    """Bytes of the block whose backward runs: all it keeps, if it had to be recomputed."""
    if layout.recompute == "full":
        return block_activations(model, layout, training, machine, True)
    widest = 2.0 * number_bytes(training) * model.ffn_hidden / layout.tp
    return widest * _rows(model, layout)


def _rows(model: ModelShape, layout: Layout) -> int:
    return model.seq_length * layout.micro_batch_size
