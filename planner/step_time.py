"""How long a step takes and what it needs, for one layout on one machine: no torch, no GPU.

    prediction = predict(model, layout, training, load("a100-80"))

A step is the pipeline's time (the schedule that is executed, simulated with the stages' seconds),
then the gradient reduction, the tied embedding, the optimizer, the parameter gather.
Symbols: h hidden, s sequence, V vocabulary, f MLP width, b micro-batch, t = tp.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from config.model_stats import block_parameters, model_flops
from config.schema import Layout, ModelShape, Training
from planner import memory, op_costs
from planner.hardware import Machine
from planner.memory import number_bytes
from schedules import simulation
from schedules.partition import executed_flops, stage_specs


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch forward and backward (with recomputation) through a part."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Prediction:
    """What a layout is predicted to do. Seconds per step, bytes of the fullest stage's GPU."""

    seconds: float
    parts: dict[str, float]  # seconds: pipeline, of which bubble; reduce, tied, optimizer, fixed
    bubble: float  # share of the pipeline's time in which a stage is idle, on average
    memory: list[memory.StageMemory]
    fits: bool
    margin: float  # bytes free on the fullest stage's GPU, negative if it does not fit
    tokens_per_second: float
    model_tflops: float  # per GPU, megatron-2025 formula
    hardware_tflops: float  # per GPU, with recomputation
    mfu: float
    warnings: list[str]

    def as_dict(self) -> dict:
        """Plain values, for --json."""
        values = asdict(self)
        for row, stage in zip(values["memory"], self.memory, strict=True):
            row["total"] = stage.total
        return values


def predict(model: ModelShape, layout: Layout, training: Training, machine: Machine) -> Prediction:
    """Time and memory of a layout that `config` has checked; dp must be filled in.

    Raises UserError if the batch is smaller than one micro-batch on every replica.
    """
    pipeline, bubble = pipeline_time(model, layout, training, machine)
    parts = {"pipeline": pipeline} | step_parts(model, layout, training, machine)
    parts = {name: seconds * machine.slowdown for name, seconds in parts.items()}
    seconds = sum(parts.values())
    parts["bubble"] = parts["pipeline"] * bubble
    table = memory.stages(model, layout, training, machine)
    margin = machine.memory - max(stage.total for stage in table)
    gpus, samples = layout.tp * layout.pp * layout.dp, training.global_batch_size
    per_gpu = seconds * gpus * 1e12
    flops = model_flops(model, samples)
    return Prediction(
        seconds=seconds,
        parts=parts,
        bubble=bubble,
        memory=table,
        fits=margin >= 0,
        margin=margin,
        tokens_per_second=samples * model.seq_length / seconds,
        model_tflops=flops / per_gpu,
        hardware_tflops=executed_flops(model, layout, samples) / per_gpu,
        mfu=flops / (seconds * gpus * machine.peak),
        warnings=out_of_range(model, layout, machine),
    )


def out_of_range(model: ModelShape, layout: Layout, machine: Machine) -> list[str]:
    """What of the layout is outside the range that the constants were fitted on, in sentences."""
    values = {
        "hidden": model.hidden,
        "gpus": layout.tp * layout.pp * layout.dp,
        "micro_batch_size": layout.micro_batch_size,
        "seq_length": model.seq_length,
    }
    found = []
    for name, (low, high) in machine.fitted_range.items():
        if not low <= values[name] <= high:
            seen = f"{low} to {high}" if high else "nothing"
            text = f"{name} {values[name]} is outside what was fitted on {machine.name}: {seen}"
            found.append(text)
    return found


# ------------------------------------------------------------------------------------------------
# One micro-batch through one part
# ------------------------------------------------------------------------------------------------


def block_pass(model: ModelShape, layout: Layout, training: Training, machine: Machine) -> Pass:
    """Seconds of one micro-batch through one block, on each GPU of its tensor group."""
    t, b, s, h, f = _sizes(model, layout)
    size, rows = number_bytes(training), s * b
    shapes = ((model.qkv_width // t, h), (h, model.attention_width // t))
    shapes += ((model.up_width // t, h), (h, f // t))
    layers = [op_costs.linear(machine, rows, outs, ins, size) for outs, ins in shapes]
    core = op_costs.attention(machine, s, model.head_size, model.heads // t, b, size)
    other = _elementwise(model, layout, machine, size)
    reduced = _tensor_all_reduce(model, layout, training, machine)
    exposed = 2 * reduced * (1 - machine.software.overlap_tensor)
    added = op_costs.moved(machine, _accumulated(machine) * block_parameters(model) / t)
    host = machine.software.host_per_block
    forward = sum(layer[0] for layer in layers) + core[0] + other[0] + exposed + host / 4
    backward = sum(layer[1] for layer in layers) + core[1] + other[1] + exposed + added
    backward += host * 3 / 4
    if layout.sequence_parallel:  # the gathered inputs are not kept: gathered once more
        backward += exposed / 2
    again = {"none": 0.0, "selective": core[0], "full": forward}[layout.recompute]
    if layout.recompute == "selective" and machine.software.attention == "flash":
        again = 0.0  # the kernel recomputes them itself
    return Pass(forward, backward + again)


def _elementwise(model, layout, machine, size) -> tuple[float, float]:
    """Seconds of norms, residuals, dropout, activation and bias gradients, by bytes moved.

    Passes over s*b*h: forward two norms (read, write) and two residual additions (read, read,
    write); backward three for a norm, three for an addition; a dropout mask is one byte.
    """
    t, b, s, h, f = _sizes(model, layout)
    rows, masks = s * b, 1.0 if machine.software.dropout else 0.0
    shared = t if layout.sequence_parallel else 1
    width = model.up_width + f
    forward = (10 * size + 2 * masks) * h / shared + size * width / t
    backward = (12 * size + (4 * size + 2) * masks) * h / shared + size * (width + f) / t
    if model.bias:
        backward += size * (model.qkv_width / t + f / t + 2 * h)
    return op_costs.moved(machine, rows * forward), op_costs.moved(machine, rows * backward)


def head_pass(model: ModelShape, layout: Layout, training: Training, machine: Machine) -> Pass:
    """Seconds of one micro-batch through final norm, output matrix and loss."""
    t, b, s, h, _ = _sizes(model, layout)
    size, rows, columns = number_bytes(training), s * b, model.padded_vocab(layout) // t
    forward, backward = op_costs.linear(machine, rows, columns, h, size)
    # Cast, maximum, exponential, sums, in FP32.
    logits = op_costs.moved(machine, 26.0 * rows * columns)
    reduced = _tensor_all_reduce(model, layout, training, machine)
    added = op_costs.moved(machine, _accumulated(machine) * columns * h)
    return Pass(forward + logits + reduced, backward + logits + added)


def embedding_pass(model: ModelShape, layout: Layout, training: Training, machine: Machine) -> Pass:
    """Seconds of one micro-batch through the embedding: rows looked up, a dense gradient added."""
    t, b, s, h, _ = _sizes(model, layout)
    size, rows, columns = number_bytes(training), s * b, model.padded_vocab(layout) // t
    looked = op_costs.moved(machine, 5.0 * size * rows * h)
    reduced = _tensor_all_reduce(model, layout, training, machine)
    added = op_costs.moved(machine, (_accumulated(machine) + 2 * size) * columns * h)
    return Pass(looked + reduced, looked + added)


def _tensor_all_reduce(model, layout, training, machine) -> float:
    """Seconds to sum one micro-batch's activation over the tensor group."""
    link = op_costs.ring(machine, layout.tp, 1)
    return op_costs.all_reduce(link, layout.tp, _activation_bytes(model, layout, training))


def _activation_bytes(model, layout, training) -> float:
    """Bytes of one micro-batch between two blocks."""
    size = number_bytes(training)
    return float(size) * model.seq_length * layout.micro_batch_size * model.hidden


def _sizes(model, layout) -> tuple[int, int, int, int, int]:
    return layout.tp, layout.micro_batch_size, model.seq_length, model.hidden, model.ffn_hidden


def _accumulated(machine: Machine) -> float:
    """Bytes moved per parameter to add a half-precision gradient to the accumulated one."""
    if machine.software.fused_accumulation:
        return 0.0
    return 2.0 + 2 * min(machine.software.gradient_bytes, 4.0)


# ------------------------------------------------------------------------------------------------
# The pipeline
# ------------------------------------------------------------------------------------------------


def stage_passes(
    model: ModelShape, layout: Layout, training: Training, machine: Machine
) -> list[Pass]:
    """Seconds of one micro-batch through each stage of the layout."""
    block = again = block_pass(model, layout, training, machine)
    if layout.recompute_layers is not None:
        plain = replace(layout, recompute="none", recompute_layers=None)
        block = block_pass(model, plain, training, machine)
    front = embedding_pass(model, layout, training, machine)
    back = head_pass(model, layout, training, machine)
    passes = []
    for s in stage_specs(model, layout):
        forward = s.blocks * block.forward + s.embedding * front.forward + s.head * back.forward
        backward = s.blocks * block.backward + s.embedding * front.backward
        backward += s.head * back.backward
        if again is not block:
            backward += layout.recomputed_blocks(s.blocks) * (again.backward - block.backward)
        passes.append(Pass(forward, backward))
    return passes


def pipeline_time(
    model: ModelShape, layout: Layout, training: Training, machine: Machine
) -> tuple[float, float]:
    """Seconds from the first forward to the last backward, and the idle share of the stages."""
    passes = stage_passes(model, layout, training, machine)
    count = memory.micro_batches(layout, training)
    sent = 0.0
    if layout.pp > 1:
        activation = _activation_bytes(model, layout, training)
        sent = op_costs.message(machine, layout.tp * layout.dp, activation, layout.tp)
    chunks = machine.software.virtual_stages
    if chunks > 1:
        # Megatron-LM's interleaved schedule, of measured rows alone: a bubble 1/v as long and v
        # times the messages, arXiv 2104.04473 section 2.2.
        slot = max(p.total for p in passes)
        seconds = (count + (layout.pp - 1) / chunks) * slot + count * chunks * sent
    else:
        seconds = makespan(layout.schedule, tuple(passes), sent, count)
    busy = count * sum(p.total for p in passes) / len(passes)
    if machine.ranks_per_core > 1:  # the core of an idle stage serves the others
        seconds = max(seconds / machine.ranks_per_core, busy)
    return seconds, max(0.0, 1.0 - busy / seconds)  # not below 0 by rounding


@lru_cache(maxsize=4096)
def makespan(name: str, passes: tuple[Pass, ...], transfer: float, count: int) -> float:
    """Seconds of the schedule `name` with a stage on each rank and `count` micro-batches.

    Cached, since layouts that differ in ZeRO alone, for example, ask for the same.
    """
    schedule = simulation.named(name, len(passes), count)
    return schedule.makespan(action_seconds(passes), transfer)


def action_seconds(passes: Sequence[Pass]) -> dict[tuple[str, int], float]:
    """The stages' seconds as `schedules.simulation` takes them: by kind of action and stage."""
    forward = {("F", stage): one.forward for stage, one in enumerate(passes)}
    return forward | {("B", stage): one.backward for stage, one in enumerate(passes)}


# ------------------------------------------------------------------------------------------------
# After the pipeline
# ------------------------------------------------------------------------------------------------


def step_parts(
    model: ModelShape, layout: Layout, training: Training, machine: Machine
) -> dict[str, float]:
    """Seconds of what follows the last backward: reduce, tied, optimizer, and a fixed rest."""
    software, t, dp = machine.software, layout.tp, layout.dp
    specs = stage_specs(model, layout)
    held = max(memory.held_parameters(spec, model, layout) for spec in specs)
    link = op_costs.ring(machine, dp, t)
    weight = number_bytes(training)
    wire = min(software.wire_bytes, 4) if weight == 2 else 4
    volume = wire * (2 if software.all_reduce_gradients or not layout.zero else 1)
    count = memory.micro_batches(layout, training)
    if layout.zero >= 2:  # the gradients of every micro-batch
        volume *= count
    if layout.zero == 3:  # and weights, once forward and once backward
        volume += 2 * weight * count
    elif layout.zero:
        volume += weight
    reduced = op_costs.all_reduce(link, dp, held * volume / 2) * (1 - software.overlap_data)
    tied = 0.0
    if layout.pp > 1 and model.tied:
        matrix = float(wire) * model.padded_vocab(layout) * model.hidden / t
        sharing = min(machine.node, t * dp)
        speed = replace(machine.network, bandwidth=machine.network.bandwidth / sharing)
        tied = op_costs.all_reduce(speed, 2, matrix)
    shard = held / (dp if layout.zero else 1)
    optimizer = op_costs.moved(machine, 40.0 * shard + 8.0 * held)  # state; norm, zeroing, cast
    return {"reduce": reduced, "tied": tied, "optimizer": optimizer, "fixed": software.per_step}
