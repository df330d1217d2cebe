"""Answers the questions of plan.py about models: `model`, `largest` and `smallest`.

print(largest(question).text)      # a Question as in planner/questions.py

A question has the planner's flags, the configuration of a run and a machine. planner/model_sizes.py
finds the models; here the results are put into words and data.
"""

from dataclasses import asdict

from config import block_kinds, model_stats, schema, validation
from planner import model_sizes
from planner.questions import BILLION, Answer, Question


def model(question: Question) -> Answer:
    """Return the answer of `plan.py model`: the parameters, FLOPs and bytes of the model."""
    shape, samples = question.config.model, question.config.training.global_batch_size
    validation.check_shape(shape)
    total = model_stats.parameters(shape)
    # A model with experts may have blocks of two kinds: with experts, and dense.
    kinds = block_kinds.kinds(shape)
    parts = dict(zip(("block", "dense block"), [model_stats.block_parameters(k) for _, k in kinds]))
    counts = [number for number, _ in kinds] + [1, 1]  # of the kinds of blocks, embedding and head
    parts["embedding"] = model_stats.embedding_parameters(shape)
    parts["head"] = model_stats.head_parameters(shape)
    lines = [f"{total:,} parameters ({total / BILLION:.1f} B)"]
    for count, (name, part) in zip(counts, parts.items(), strict=True):
        lines.append(f"  {name:11} {count:3} x {part:15,}")
    experts, active = shape.mlps
    if experts > 1:
        blocks, sparse = kinds[0]  # the number of blocks with experts, and a model of them alone
        unused = blocks * (experts - active) * model_stats.mlp_parameters(sparse)
        parts["active"] = total - unused
        of_them = f"of them active: {active} of {experts} experts for each token"
        lines.append(f"{parts['active']:,} {of_them}")
    lines.append(f"{18 * total / BILLION:,.0f} GB at 18 bytes per parameter, before activations")
    lines.append(f"FLOPs per step of {samples} samples:    model     hardware, full recomputation")
    flops = {}
    for name in model_stats.FORMULAS:
        needed = model_stats.model_flops(shape, samples, name)
        executed = model_stats.hardware_flops(shape, samples, "full", name)
        flops[name] = {"model": needed, "hardware_full_recompute": executed}
        lines.append(f"  {name:14} {needed:22.4g} {executed:13.4g}")
    data = {"parameters": total, **parts, "bytes_18": 18 * total, "flops_per_step": flops}
    return Answer("\n".join(lines), data)


def largest(question: Question) -> Answer:
    """Return the answer of `plan.py largest`: the largest model that trains on the GPUs."""
    run, gpus, name = question.config, question.gpus, question.machine.name
    size, found, layout = model_sizes.largest(question.machine, gpus, run.training, run.model)
    data = {"parameters": size, "gpus": gpus, "machine": name}
    data |= {"model": asdict(found), "layout": asdict(layout)}
    shape = f"{found.layers} layers, hidden {found.hidden}, {found.heads} heads"
    text = f"{size / BILLION:.1f} B parameters on {gpus} x {name}: {shape}; {_leanest(layout)}"
    return Answer(text, data)


def smallest(question: Question) -> Answer:
    """Return the answer of `plan.py smallest`: the fewest nodes on which the model trains."""
    run, machine = question.config, question.machine
    nodes, layout = model_sizes.smallest(run.model, run.training, machine)
    data = {"nodes": nodes, "gpus": nodes * machine.node, "layout": asdict(layout)}
    return Answer(f"{nodes} nodes of {machine.node} {machine.name}: {_leanest(layout)}", data)


def _leanest(layout: schema.Layout) -> str:
    """Return a text on a layout that `largest` or `smallest` has found.

    These only try layouts with micro-batch 1 and full recomputation, which need the least memory.
    """
    cp = f"cp {layout.cp}, " * (layout.cp > 1)
    axes = f"tp {layout.tp}, pp {layout.pp}, {cp}dp {layout.dp}"
    return f"{axes}, micro-batch 1, full recomputation"
