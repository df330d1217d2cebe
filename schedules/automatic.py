"""What `--schedule auto` decides for a run: the task of compiler.py, and the layout that it gives.

    config, choice = settled(config, "cuda")     config as it is, and None, unless it says auto

Costs are FLOPs of a token, and bytes moved counted as FLOPs (partition.FLOPS_PER_BYTE). A rank may
hold what the fullest rank of 1F1B with the same layout holds. A partition that is given is kept.
"""

from dataclasses import replace
from functools import lru_cache

from config import model_stats
from config.messages import UserError
from config.schema import Config, Layout, ModelShape
from config.validation import explicit_costs
from schedules.compiler import (
    SEARCHED,
    Choice,
    PassCosts,
    StageCosts,
    Task,
    balanced_ranks,
    search,
)
from schedules.partition import FLOPS_PER_BYTE, blocks_per_stage, part_costs

# What one byte of a message between stages costs in FLOPs: about an A100's 312 TFLOP/s over a link
# of 25 GB/s, and a CPU core's 80 GFLOP/s over 2 GB/s through gloo.
FLOPS_PER_SENT_BYTE = {"cuda": 12500.0, "cpu": 40.0}


def settled(config: Config, device: str) -> tuple[Config, Choice | None]:
    """With the schedule decided, and what decided it; for the largest batch of this start."""
    largest = max(level.batch for level in config.levels)
    count = config.micro_batches(largest)
    layout, choice = settled_layout(config.model, config.layout, count, device)
    return replace(config, layout=layout), choice


def settled_layout(
    model: ModelShape, layout: Layout, micro_batches: int, device: str = "cuda"
) -> tuple[Layout, Choice | None]:
    """As `settled`, for one number of micro-batches."""
    if layout.schedule != "auto":
        return layout, None
    if layout.pp == 1:
        return replace(layout, schedule="1f1b"), None
    if layout.schedule_costs == "measured":
        raise UserError(
            "--schedule-costs measured needs the run itself, which writes the numbers to run.json: "
            "give these, or counted"
        )
    choice = search(replace(_task(model, layout, device), micro_batches=micro_batches))
    found = replace(layout, schedule=choice.name, partition=",".join(map(str, choice.blocks)))
    if choice.name == "interleaved":
        found = replace(found, virtual_stages=choice.virtual)
    return found, choice


def stage_costs(model: ModelShape, layout: Layout, device: str = "cuda") -> StageCosts | None:
    """What an order was searched with; None for a schedule whose order does not depend on it."""
    if layout.schedule not in SEARCHED:
        return None
    plain = replace(layout, schedule="auto", partition="balanced")
    return _task(model, plain, device).costs(layout.schedule, blocks_per_stage(model, layout))


@lru_cache(maxsize=256)
def _task(model: ModelShape, layout: Layout, device: str) -> Task:
    """The task of a layout that says auto, for one micro-batch."""
    plain, parts = replace(layout, schedule="1f1b"), parts_of(model, layout, device)
    given = blocks_per_stage(model, plain, part_costs(model, device))
    whole = [sum(part[:3]) for part in parts]
    sent = 4.0 * model.hidden * FLOPS_PER_SENT_BYTE[device]
    fixed = None if layout.partition == "balanced" else tuple(given)
    task = Task(parts, model.layers, layout.pp, 1, (), sent, fixed, model.tied)
    tried = [given] if fixed else [given, balanced_ranks(model.layers, range(layout.pp), *whole)]
    held = [enumerate(task.costs("1f1b", blocks).stages) for blocks in tried]
    most = max((layout.pp - stage) * one.held for rows in held for stage, one in rows)
    return replace(task, limits=(most,) * layout.pp)


def parts_of(
    model: ModelShape, layout: Layout, device: str
) -> tuple[PassCosts, PassCosts, PassCosts]:
    """Of embedding, block and head; seconds are FLOPs of one token, sums as in `part_costs`."""
    t, h, whole, byte = layout.tp, model.hidden, part_costs(model, device), FLOPS_PER_BYTE[device]
    scores = 2.0 * model.seq_length * model.attention_width
    flops, head = model_stats.block_flops(model), model_stats.head_flops(model)
    forward = flops + 4.0 * 40 * h * byte / 3
    again = {"none": 0.0, "selective": scores, "full": forward}
    recompute = layout.recompute if layout.recompute_layers is None else "none"
    inputs = whole.block - forward - (flops - scores) + again[recompute]
    widths = model.qkv_width + 2 * model.attention_width + model.up_width + model.ffn_hidden
    kept = 2.0 * (8 * h / (t if layout.sequence_parallel else 1) + 2 * widths / t)
    held = 4.0 * h if recompute == "full" else kept
    logits = (whole.head - head) / 2
    block = PassCosts(forward / t, inputs / t, (flops - scores) / t, held)
    ends = PassCosts(logits / t, logits / t, head / t, 4.0 * model.vocab_size / t)
    if given := explicit_costs(layout):  # in a unit in which a block costs what is counted
        unit = sum(block[:3]) / sum(given[:3])
        f, b, w, head_f, head_b, head_w = (unit * each for each in given)
        block, ends = PassCosts(f, b, w, held), PassCosts(head_f, head_b, head_w, ends.held)
    return PassCosts(whole.embedding / (2 * t), whole.embedding / (2 * t), 0.0, 0.0), block, ends
