"""What the passes of a layout's stages cost, for `--schedule auto` and for `--vocab-pp`.

    task_of(model, layout, "cuda")        what compiler.search chooses from, for one micro-batch
    stage_costs(model, layout, "cuda")    what the order of a layout that is settled was made with

Costs are FLOPs of a token, and bytes moved counted as FLOPs (partition.FLOPS_PER_BYTE). A rank may
hold what the fullest rank of 1F1B with the same layout holds; with --activation-memory that share
of what it holds without recomputation. A partition that is given is kept.
"""

from dataclasses import replace
from functools import lru_cache

from config import model_stats
from config.schema import Layout, ModelShape
from config.validation import explicit_costs
from schedules.compiler import SEARCHED, PassCosts, StageCosts, Task, balanced_ranks
from schedules.partition import FLOPS_PER_BYTE, blocks_per_stage, part_costs

# What one byte of a message between stages costs in FLOPs: about an A100's 312 TFLOP/s over a link
# of 25 GB/s, and a CPU core's 80 GFLOP/s over 2 GB/s through gloo.
FLOPS_PER_SENT_BYTE = {"cuda": 12500.0, "cpu": 40.0}


def stage_costs(model: ModelShape, layout: Layout, device: str = "cuda") -> StageCosts | None:
    """What an order was searched with; None for a schedule whose order does not depend on it."""
    if layout.schedule not in SEARCHED:
        return None
    plain = replace(layout, schedule="auto", partition="balanced")
    again = layout.recomputed_of_stage or ()
    return task_of(model, plain, device).costs(
        layout.schedule, blocks_per_stage(model, layout), again
    )


@lru_cache(maxsize=256)
def task_of(model: ModelShape, layout: Layout, device: str) -> Task:
    """The task of a layout that says auto, for one micro-batch and without --vocab-pp."""
    plain = replace(layout, schedule="1f1b", vocab_pp=False)
    parts = parts_of(model, layout, device)
    given = blocks_per_stage(model, plain, part_costs(model, device))
    whole = [sum(part[:3]) for part in parts]
    sent = sent_bytes(model) * FLOPS_PER_SENT_BYTE[device]
    fixed = None if layout.partition == "balanced" else tuple(given)
    task = Task(parts, model.layers, layout.pp, 1, (), sent, fixed, model.tied)
    tried = [given] if fixed else [given, balanced_ranks(model.layers, range(layout.pp), *whole)]
    held = [enumerate(task.costs("1f1b", blocks).stages) for blocks in tried]
    most = max((layout.pp - stage) * one.held for rows in held for stage, one in rows)
    share = 1.0 if layout.activation_memory is None else layout.activation_memory
    task = replace(task, limits=(share * most,) * layout.pp)
    if layout.activation_memory is None or layout.recompute == "none":
        return task
    block = parts[1]
    again = block._replace(inputs=block.inputs + block.forward, held=sent_bytes(model))
    return replace(task, recomputed=again)


def sent_bytes(model: ModelShape) -> float:
    """Of one token between two blocks."""
    return 4.0 * model.hidden


def parts_of(
    model: ModelShape, layout: Layout, device: str
) -> tuple[PassCosts, PassCosts, PassCosts]:
    """Of embedding, block and head; seconds are FLOPs of one token, sums as in `part_costs`. A
    block is recomputed if all blocks are.
    """
    t, h, whole, byte = layout.tp, model.hidden, part_costs(model, device), FLOPS_PER_BYTE[device]
    scores = 2.0 * model.seq_length * model.attention_width
    flops, head = model_stats.block_flops(model), model_stats.head_flops(model)
    forward = flops + 4.0 * 40 * h * byte / 3
    again = {"none": 0.0, "selective": scores, "full": forward}
    chosen = layout.activation_memory is not None or layout.recompute_blocks is not None
    recompute = "none" if chosen or layout.recompute_layers is not None else layout.recompute
    inputs = whole.block - forward - (flops - scores) + again[recompute]
    widths = model.qkv_width + 2 * model.attention_width + model.up_width + model.ffn_hidden
    kept = 2.0 * (8 * h / (t if layout.sequence_parallel else 1) + 2 * widths / t)
    held = sent_bytes(model) if recompute == "full" else kept
    logits = (whole.head - head) / 2
    block = PassCosts(forward / t, inputs / t, (flops - scores) / t, held)
    ends = PassCosts(logits / t, logits / t, head / t, 4.0 * model.vocab_size / t)
    if given := explicit_costs(layout):  # in a unit in which a block costs what is counted
        unit = sum(block[:3]) / sum(given[:3])
        f, b, w, head_f, head_b, head_w = (unit * each for each in given)
        block, ends = PassCosts(f, b, w, held), PassCosts(head_f, head_b, head_w, ends.held)
    return PassCosts(whole.embedding / (2 * t), whole.embedding / (2 * t), 0.0, 0.0), block, ends
