"""Bytes on one GPU of each stage: states by ZeRO, activations in flight, logits, buffers.

What nvidia-smi shows is the largest the caching allocator ever held, so the parts are those of the
worst moment. Symbols: P parameters on the GPU, b micro-batch, s, h, V, t = tp, a heads.

    states       weights 2 + gradients 2..6 + workspace, each times P; 12..16 P / dp of Adam's
    activations  what in-flight micro-batches keep: 2 s b h per block under full recomputation
    working      the one block being recomputed, or the logits: never both
"""

from dataclasses import dataclass

from config.model_stats import block_parameters
from config.schema import BUCKET_ELEMENTS, Layout, ModelShape, Training
from planner.hardware import Machine
from schedules.partition import StageSpec, stage_specs
from schedules.schedule import build

# Bytes per parameter that an optimizer's state is smaller by than AdamW's two moments: two bytes
# and two scales for 256 weights, one moment, or two factors of a matrix.
SAVED_STATE = {"adamw8bit": 6.0 - 8 / 256, "sgd": 4.0, "muon": 4.0, "adafactor": 8.0}
# A logit as it is, in FP32, less its maximum, and its exponential: Megatron's loss, read in code.
LOGIT_BYTES = 2 + 4 + 4 + 4
FUSED_LOGIT_BYTES = 2 + 4 + 4  # in place where it can be


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
    """Memory of every stage of a layout whose dp is filled in."""
    count = training.global_batch_size // (layout.micro_batch_size * layout.dp)
    rows = stage_specs(model, layout)
    return [
        _stage(row, in_flight(layout, row.index, count), model, layout, training, machine)
        for row in rows
    ]


def fullest(model: ModelShape, layout: Layout, training: Training, machine: Machine) -> StageMemory:
    """The fullest stage alone. Earlier stages hold no fewer micro-batches than later ones, so
    beside both ends only the first stage of each number of blocks can be it."""
    count = training.global_batch_size // (layout.micro_batch_size * layout.dp)
    rows = stage_specs(model, layout)
    first: dict[int, StageSpec] = {}
    for row in rows[1:-1]:
        first.setdefault(row.blocks, row)
    tried = [rows[0], *first.values(), rows[-1]]
    held = [
        _stage(row, in_flight(layout, row.index, count), model, layout, training, machine)
        for row in tried
    ]
    return max(held, key=lambda stage: stage.total)


def in_flight(layout: Layout, stage: int, micro_batches: int) -> int:
    """Micro-batches whose activations a stage holds at once: `Schedule.peak` in closed form."""
    if layout.schedule == "gpipe":
        return micro_batches
    if layout.schedule == "1f1b":
        return min(layout.pp - stage, micro_batches)
    return build(layout.schedule, layout.pp, micro_batches).peak[stage]


def _stage(stage: StageSpec, flying: int, model, layout, training, machine) -> StageMemory:
    software, half = machine.software, training.precision in ("fp16", "bf16")
    held = held_parameters(stage, model, layout)
    sharded = _sharded_bytes(training, machine)
    flying += _interleaved(layout, machine, flying)
    kept = _kept_of_stage(stage.blocks, model, layout, training, machine)
    working = block_working(model, layout, training, machine)
    if stage.head:
        size = LOGIT_BYTES if software.attention == "fused" else FUSED_LOGIT_BYTES
        columns = model.padded_vocab(layout) / layout.tp
        working = max(working, float(size) * _rows(model, layout) * columns)
    return StageMemory(
        stage=stage.index,
        blocks=stage.blocks,
        parameters=held,
        weights=_weights(held, stage, model, layout, half),
        gradients=_gradients(held, layout, training, machine) + held * software.workspace_bytes,
        optimizer=held * sharded / (layout.dp if layout.zero else 1),
        activations=flying * kept,
        working=working,
        buffers=software.buffers,
        context=machine.context,
    )


def _kept_of_stage(blocks: int, model, layout, training, machine) -> float:
    """Bytes that a stage's blocks keep of one micro-batch until its backward."""
    kept = kept_bytes(model, layout, training, machine)
    if layout.recompute == "none":
        return blocks * kept
    again = layout.recomputed_blocks(blocks)
    plain = block_activations(model, layout, training, machine, True)
    # What is kept lies scattered between what is not.
    return again * kept * machine.activation_overhead + (blocks - again) * plain


def _weights(held: float, stage: StageSpec, model, layout, half: bool) -> float:
    """Bytes of the weights in computing precision; at --zero 3 of those that are gathered."""
    size = 2.0 if half else 4.0
    if layout.zero < 3 or layout.dp == 1:
        return held * size
    block = block_parameters(model) / layout.tp  # the one that runs, and the next on its way
    shared = held - stage.blocks * block
    return size * (shared + 2 * block) + (0.0 if half else held * 4.0 / layout.dp)


def _gradients(held: float, layout: Layout, training: Training, machine: Machine) -> float:
    """Bytes of the gradients; from --zero 2 on a sum of 1/dp, and two buckets on their way."""
    half = training.precision in ("fp16", "bf16")
    size = machine.software.gradient_bytes if half else 4.0
    if training.grad_dtype == "bf16":
        size -= 2.0
    if layout.zero < 2 or layout.dp == 1:
        return held * size
    bucket = min(held, BUCKET_ELEMENTS)
    return held * 4.0 / layout.dp + bucket * (2 * size + (2.0 if half else 4.0))


def held_parameters(stage: StageSpec, model: ModelShape, layout: Layout) -> float:
    """Parameters on one GPU: matrices by 1/tp, with the vocabulary's padding; norms in full."""
    norms = 2 * model.hidden * (2 if model.norm == "layernorm" else 1)
    blocks = stage.blocks * ((block_parameters(model) - norms) / layout.tp + norms)
    matrix = model.padded_vocab(layout) * model.hidden / layout.tp
    positions = model.max_positions * model.hidden if model.positions == "learned" else 0
    held = blocks + (matrix + positions if stage.embedding else 0)
    if stage.head and (layout.pp > 1 or not model.tied):
        held += matrix
    return held


def _sharded_bytes(training: Training, machine: Machine) -> float:
    """Bytes per parameter of master weights and moments, before they are divided by dp."""
    state = machine.software.sharded_bytes
    if training.precision not in ("fp16", "bf16"):
        state = 8.0  # the moments: the weights are their own master
    return state - SAVED_STATE.get(training.optimizer, 0.0)


def _interleaved(layout: Layout, machine: Machine, flying: int) -> float:
    """More in flight with v chunks per stage: a factor 1 + (pp-1)/(pp v), arXiv 2205.05198."""
    chunks = machine.software.virtual_stages
    return 0.0 if chunks == 1 else flying * (layout.pp - 1) / (layout.pp * chunks)


def kept_bytes(model: ModelShape, layout: Layout, training: Training, machine: Machine) -> float:
    """Bytes one block keeps of one micro-batch until its backward."""
    if layout.recompute == "full":
        size = 2.0 if training.precision in ("fp16", "bf16") else 4.0
        shared = layout.tp if layout.sequence_parallel else 1
        return size * _rows(model, layout) * model.hidden / shared
    return block_activations(model, layout, training, machine, layout.recompute == "none")


def block_activations(model, layout, training, machine, scores: bool) -> float:
    """All that one block keeps without recomputation, arXiv 2205.05198 section 4, in bytes.

    Outside the tensor-parallel region 10 s b h, inside it 24 s b h / t for f = 4 h, and 5 a s^2 b
    of attention scores unless they are recomputed or never written (flash).
    """
    half = training.precision in ("fp16", "bf16")
    rows, t, h = _rows(model, layout), layout.tp, model.hidden
    masks = 2.0 if machine.software.dropout else 0.0
    outside = (8.0 + masks) * h / (t if layout.sequence_parallel else 1)
    qkv = (model.heads + 2 * model.kv_heads) * model.head_size
    gates = 3 if model.activation == "swiglu" else 2
    inside = (2.0 * qkv + 2.0 * h + 2.0 * gates * model.ffn_hidden) / t
    size = rows * (outside + inside)
    if scores and machine.software.attention == "fused":
        each = 5.0 if machine.software.dropout else 2.0
        size += each * model.heads / t * model.seq_length * rows
    return size if half else 2 * size


def block_working(model, layout, training, machine) -> float:
    """Bytes of the block whose backward runs: all it keeps, if it had to be recomputed."""
    if layout.recompute == "full":
        return block_activations(model, layout, training, machine, True)
    half = training.precision in ("fp16", "bf16")
    widest = 2.0 * (2.0 if half else 4.0) * model.ffn_hidden / layout.tp
    return widest * _rows(model, layout)


def _rows(model: ModelShape, layout: Layout) -> int:
    return model.seq_length * layout.micro_batch_size
