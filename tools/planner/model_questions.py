"""Answers the questions of plan.py about models: `model`, `largest` and `smallest`.

print(largest(question).text)      # a Question as in tools/planner/questions.py

A question has the planner's flags, the configuration of a run and a machine.
tools/planner/model_sizes.py finds the models; here the results are put into words and data.
"""

from dataclasses import asdict, replace
from typing import Any

from architecture import block_kinds, model_stats
from architecture.shape import ModelShape
from config import validation
from tools.planner import model_sizes
from tools.planner.layouts import Ranked
from tools.planner.questions import BILLION, Answer, Question


def model(question: Question) -> Answer:
    """Return the answer of `plan.py model`: the parameters, FLOPs and bytes of the model."""
    shape, samples = question.config.model, question.config.training.global_batch_size
    validation.check_shape(shape)
    total = model_stats.parameters(shape)
    # A model may have blocks of several kinds, such as with experts and dense.
    kinds = block_kinds.kinds(shape)
    parts: dict[str, Any] = {}
    for _, kind in kinds:
        parts[_name_of(kind, kinds, parts)] = model_stats.block_parameters(kind)
    counts = [number for number, _ in kinds] + [1, 1]  # of the kinds of blocks, embedding and head
    parts["embedding"] = model_stats.embedding_parameters(shape)
    parts["head"] = model_stats.head_parameters(shape)
    lines = [f"{total:,} parameters ({total / BILLION:.1f} B)"]
    wide = max(11, *map(len, parts))
    for count, (name, part) in zip(counts, parts.items(), strict=True):
        lines.append(f"  {name:{wide}} {count:3} x {part:15,}")
    experts, active = shape.mlps
    computed = total
    if experts > 1:
        # The kinds of blocks with experts: their numbers of blocks, and models of them alone.
        sparse = [(blocks, kind) for blocks, kind in kinds if kind.experts > 1]
        unused = sum(blocks * model_stats.mlp_parameters(kind) for blocks, kind in sparse)
        unused *= experts - active
        computed = total - unused
        of_them = f"of them active: {active} of {experts} experts for each token"
        lines.append(f"{computed:,} {of_them}")
    lines.append(f"{18 * total / BILLION:,.0f} GB at 18 bytes per parameter, before activations")
    lines.append(f"FLOPs per step of {samples} samples:    model     hardware, full recomputation")
    flops = {}
    for name in model_stats.FORMULAS:
        needed = model_stats.model_flops(shape, samples, name)
        executed = model_stats.hardware_flops(shape, samples, "full", name)
        flops[name] = {"model_flops": needed, "hardware_full_recompute_flops": executed}
        lines.append(f"  {name:14} {needed:22.4g} {executed:13.4g}")
    data = {"parameters": total, "part_parameters": parts, "active_parameters": computed}
    data |= {"state_bytes": 18 * total, "flops_per_step": flops}
    return Answer("\n".join(lines), data)


def _name_of(kind: ModelShape, kinds: list[tuple[int, ModelShape]], earlier: dict[str, Any]) -> str:
    """Return the name of a kind of blocks: the first is a block, a later one says what it has.

    earlier: the names that were given.
    """
    if not earlier:
        return "block"
    has_dense = kind.experts == 1 < max(each.experts for _, each in kinds)
    name = "dense block" if has_dense and kind.has_mlp(0) else "block"
    if name not in earlier and kind.mixers_of(0) == kinds[0][1].mixers_of(0):
        return name
    parts = [*(("window",) if kind.window else kind.mixers_of(0)), *["MLP"] * kind.has_mlp(0)]
    return f"{name} ({' + '.join(parts)})"


def largest(question: Question) -> Answer:
    """Return the answer of `plan.py largest`: the largest model that trains on the GPUs."""
    gpus, name = question.gpus, question.machine.name
    like = question.config.model
    if "model" not in question.given:  # the example's table of positions sets no limit
        like = replace(like, max_positions=max(like.max_positions, like.seq_length))
    validation.check_shape(like)
    size, found, line = model_sizes.largest(question.leanest, like, gpus)
    data = {
        "parameters": size,
        "gpus": gpus,
        "machine": name,
        "risk_fraction": line.prediction.risk,
    }
    data |= {"model": asdict(found), "layout": asdict(line.layout)}
    shape = f"{found.layers} layers, hidden {found.hidden}, {found.heads} heads"
    text = f"{size / BILLION:.1f} B parameters on {gpus} x {name}: {shape}; {_on(line)}"
    return Answer(f"{text}\n{_accepted(question)}", data)


def smallest(question: Question) -> Answer:
    """Return the answer of `plan.py smallest`: the fewest nodes on which the model trains."""
    machine = question.machine
    nodes, line = question.fewest_nodes()
    data: dict[str, Any] = {"nodes": nodes, "gpus": nodes * machine.node}
    data |= {"risk_fraction": line.prediction.risk, "layout": asdict(line.layout)}
    text = f"{nodes} node{'s' * (nodes > 1)} of {machine.node} {machine.name}: {_on(line)}"
    return Answer(f"{text}\n{_accepted(question)}", data)


def _on(line: Ranked) -> str:
    """Return a text on the layout that `largest` or `smallest` has found, and its risk."""
    layout, p = line.layout, line.prediction
    cp = f"cp {layout.cp}, " * (layout.cp > 1)
    axes = f"tp {layout.tp}, pp {layout.pp}, {cp}dp {layout.dp}, ZeRO {layout.zero}"
    return f"{axes}, micro-batch 1, full recomputation, risk {p.risk:.1%}"


def _accepted(question: Question) -> str:
    """Return a line on the rule by which a model fits, and the batch for which it does."""
    rule = f"a risk of at most {question.options.risk:.0%} of running out of memory"
    return f"fits: {rule} (--risk), as in `layouts`; {question.batch}"
