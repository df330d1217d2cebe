"""Why do two runs differ? `python runs.py diff RUN_A RUN_B` for any two layouts.

    result = compare(a, b)              a dictionary, for --json
    result = compare_restart(folder)    the steps of a run that were trained again after a stop
    print(text(result))                 one screen

The result has six parts: whether both runs have read the same samples, by the hashes in their
run.json; learning rates, numbers of samples and options that differ; the first step whose
loss or gradient norm differs by more than rounding explains; the first evaluation that does; if
both runs have traces of a step (--trace-numerics), the first tensor, in the order of execution,
that differs by more than rounding explains or that one run lacks; if they have no such traces, the
commands that write them.
"""

import shlex
from dataclasses import asdict, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from base.errors import RunError, number_ranges
from config.schema import Layout
from tools.numerics.checks import is_number, is_texts
from tools.numerics.places import described, place
from tools.numerics.record import (
    Record,
    differing,
    last_two_parts,
    option_lines,
    options,
    read_steps,
)
from tools.numerics.traces import EPSILON, TINY, Pair, TensorRow, Trace, read
from tools.planner import run_files

# Columns of metrics.jsonl that are compared, and their names in the text.
SETTINGS = {"learning_rate": "the learning rate", "consumed_samples": "the samples consumed"}
LOSSES = {"loss": "the loss", "grad_norm": "the gradient norm"}
# By rounding alone, the relative difference of two gradient norms may be this many times that of
# the losses.
NORM_OVER_LOSS = 8.0
# The text names this operation if the loss differs although no traced tensor does: it is computed
# after all tensors.
METRICS = "the sum over all ranks of losses and of gradients' squares, after all tensors"
Rows = dict[int, dict[str, Any]]  # the rows of metrics.jsonl by the number of the step


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Return how the runs in the folders `a` and `b` differ, as a dictionary for --json.

    Raise UserError if a folder is no run or has no step.
    """
    records = [read_steps(a), read_steps(b)]
    result = compare_records(records, [str(a), str(b)])
    traces = compare_traces(records)
    result |= traces | {"notes": result["notes"] + traces["notes"]}
    if not result["traces"]:
        # No step is traced in both runs: name the commands that trace the step that differs.
        suffixes = ["-traced", "-traced"]
        result["commands"] = _tracing_commands(records, result["losses"], suffixes)
    kinds = ("data", "tensor", "settings", "losses", "evaluations")
    result["differs"] = any(result[kind] for kind in kinds)
    return result


def compare_restart(folder: Path) -> dict[str, Any]:
    """Return how the steps differ that a run has trained twice, as a dictionary for --json.

    These are the last steps before the run was stopped: it was resumed from an earlier checkpoint.
    Only settings, losses and norms are compared, because the second trace of a step has overwritten
    the first. Raise UserError if the run was not resumed, or has trained no step twice.
    """
    records = last_two_parts(folder)
    before, after = records
    last = before.steps[-1]["iteration"]
    resumed_at = after.steps[0]["iteration"]
    if resumed_at > last:
        resumed = f"{folder} was resumed at step {resumed_at}, after its last step {last}"
        raise RunError(f"{resumed}: it has trained no step twice")
    result = compare_records(records, [f"{folder} before the last stop", f"{folder} after it"])
    result |= {"traces": [], "tensor": None, "measured_in_steps": []}
    kinds = ("data", "settings", "losses", "evaluations")
    result["differs"] = any(result[kind] for kind in kinds)
    result["commands"] = []
    if result["differs"]:
        suffixes = ["-traced-before", "-traced-after"]
        result["commands"] = _tracing_commands(records, result["losses"], suffixes)
    return result


def compare_records(records: list[Record], titles: list[str]) -> dict[str, Any]:
    """Return the differences of two runs' options and metrics; titles: names of A and B.

    The traces are not compared here.
    """
    differing_options = differing([options(record.facts) for record in records])
    result: dict[str, Any] = {
        "runs": titles,
        "options": [[name, *values] for name, values in differing_options.items()],
        "data": _other_sample([record.facts for record in records]),
        "notes": records[0].notes + records[1].notes,
    }
    return result | _compare_metrics(records)


def _other_sample(facts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first sample that is not the same in two runs, with the hashes of both, or None.

    facts: the run.json of both runs, which have hashes of samples 1, 2, 4, 8, ... of the run. None
    too if one of them is of a version without hashes.
    """
    of_a, of_b = (fact.get("samples") or {} for fact in facts)
    for number in sorted(of_a.keys() & of_b.keys(), key=int):
        if of_a[number] != of_b[number]:
            return {"sample": int(number), "values": [of_a[number], of_b[number]]}
    return None


def _compare_metrics(records: list[Record]) -> dict[str, Any]:
    """Return the first differences of two runs' rows in metrics.jsonl.

    settings: per column of SETTINGS, the first step at which it differs. losses: the first step at
    which the loss or the gradient norm differs by more than rounding explains, or None.
    evaluations: the first evaluation whose loss differs so, or None; it differs alone if other
    texts are evaluated.
    """
    rows = []
    epsilon = 0.0  # the relative rounding of a number in the coarser precision of the two runs
    for record in records:
        rows.append({row["iteration"]: row for row in record.steps})
        precision = record.facts["config"].get("training", {}).get("precision", "fp32")
        epsilon = max(epsilon, EPSILON.get(precision, EPSILON["fp32"]))
    if epsilon > EPSILON["fp32"]:
        # A rule of thumb: the mean of many 16-bit numbers has a sixteenth of a number's rounding.
        epsilon /= 16
    unit = 4.0 * epsilon  # rounding explains a relative difference of unit x (4 + step)
    settings = [_first_difference(rows, name, 0.0) for name in SETTINGS]
    losses = [
        _first_difference(rows, "loss", unit),
        _first_difference(rows, "grad_norm", unit * NORM_OVER_LOSS),
    ]
    of_evaluations = [evaluations(record.rows) for record in records]
    names = {name for rows in of_evaluations for row in rows.values() for name in row}
    of_all = [_first_difference(of_evaluations, name, unit) for name in sorted(names)]
    return {
        "settings": list(filter(None, settings)),
        "losses": _earliest(losses),
        "evaluations": _earliest(of_all),
    }


def _earliest(found: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the difference of the first step; None if there is none."""
    return min(filter(None, found), key=itemgetter("step"), default=None)


def evaluations(rows: list[dict[str, Any]]) -> Rows:
    """Return the losses of evaluations by their columns, such as "validation_loss", by step."""
    found: Rows = {}
    for row in rows:
        losses = {n: value for n, value in row.items() if n.endswith("_loss") and is_number(value)}
        if "loss" not in row:
            found[row["iteration"]] = found.get(row["iteration"], {}) | losses
    return found


def _first_difference(rows: list[Rows], name: str, unit: float) -> dict[str, Any] | None:
    """Return the first step at which a column of two runs differs, with both values, or None.

    rows: the rows of run A and of run B. name: the column. A relative difference up to
    unit x (4 + step) does not count, since the differences of rounding grow from step to step; a
    difference above 0.1 always counts.
    """
    rows_of_a, rows_of_b = rows
    for step in sorted(rows_of_a.keys() & rows_of_b.keys()):
        a = rows_of_a[step].get(name)
        b = rows_of_b[step].get(name)
        if a is None or b is None or a == b:
            continue
        explained = min(0.1, unit * (4 + step))
        relative = abs(a - b) / max(abs(a), abs(b), TINY)
        if not relative <= explained:  # also true if a value is NaN
            return {
                "step": step,
                "of": name,
                "values": [a, b],
                "relative": relative,
                "explained": explained,
            }
    return None


def compare_traces(records: list[Record]) -> dict[str, Any]:
    """Compare the steps that both runs have traced, up to the first step with a difference.

    Return traces: the names of the files that both runs have; tensor: the first tensor, in the
    order of execution, that rounding does not explain, or None; measured_in_steps: the steps of A
    and B in which the response to rounding was measured; notes: what could not be compared.
    """
    names = common_traces([record.folder for record in records])
    tensor = None
    measured = []
    notes = []
    for name in names:
        a, b = (read(record.folder / "numerics" / name) for record in records)
        traces = (a, b)
        measured = [trace.about["response_step"] for trace in traces]
        for fact in ("samples", "bins"):
            in_a, in_b = (trace.about[fact] for trace in traces)
            if in_a != in_b:
                both = f"{in_a} {fact} in A and {in_b} in B"
                notes.append(f"numerics/{name} has {both}: its activations are not compared")
        tensor = _tensor(Pair(a, b), records)
        if tensor:
            break
    return {"traces": names, "tensor": tensor, "measured_in_steps": measured, "notes": notes}


def common_traces(folders: list[Path]) -> list[str]:
    """Return the names of the files of --trace-numerics that all runs have, by step."""
    # A file's name has the number of its step, as in step-000020.npz.
    names = [{path.name for path in folder.glob("numerics/step-*.npz")} for folder in folders]
    return sorted(set.intersection(*names))


def compare_with_transformers(run: Path, folder: Path) -> dict[str, Any]:
    """Return how the first traced step of a run differs from transformers, as `compare` does.

    folder: a folder of transformers, with the weights from which that step begins. transformers'
    pass over the same samples takes the place of run B. Raise UserError if the run has no traces,
    or if transformers cannot read the folder.
    """
    # The module is imported here, because no other command needs torch.
    from telemetry.transformers_trace import activations

    record = read_steps(run)
    names = common_traces([run])
    if not names:
        raise RunError(f"{run} has no traces: train it with --trace-numerics STEP")
    ours = read(run / "numerics" / names[0])
    # The samples are the run's own. Those of its evaluations are not read.
    unread: dict[str, Any] = {"eval_data": None, "eval_samples": 0}
    read_by_run = replace(run_files.data_of(str(run)), **unread)
    config = replace(run_files.config_of(str(run)), data=read_by_run)
    sketches = activations(str(folder), config, ours.about)
    # `theirs` becomes a trace like ours, of one rank. The sketches of its parameters are 0, since
    # its pass has no gradients and no state, and the responses to rounding are those of our trace.
    about = ours.about | {"layout": asdict(Layout(dp=1))}
    if about["precision"] != "fp64":
        about["precision"] = "fp32"
    weights = np.zeros_like(ours.parameters).reshape(-1, sketches.shape[1])
    responses = np.concatenate([ours.responses, ours.of_gradients])
    theirs = Trace(about, np.concatenate([sketches, weights]), responses)
    whole = [sum(record.facts["blocks_per_stage"])]  # a pipeline of one stage with all blocks
    records = [record, replace(record, facts=record.facts | {"blocks_per_stage": whole})]
    tensor = _tensor(Pair(ours, theirs, is_whole=False), records)
    return {
        "runs": [str(run), f"transformers, {folder}"],
        "options": [],
        "data": None,
        "notes": record.notes,
        "settings": [],
        "losses": None,
        "evaluations": None,
        "traces": names[:1],
        "tensor": tensor,
        "measured_in_steps": [ours.about["response_step"]],
        "differs": tensor is not None,
    }


def _tensor(pair: Pair, records: list[Record]) -> dict[str, Any] | None:
    """Return the first tensor of a traced step that rounding does not explain, or None.

    The result is a dictionary for --json, with the operations and the ranks that compute the
    tensor. records: the records of the runs A and B.
    """
    rows = pair.rows()
    wrong = [row for row in rows if row.differs]
    if not wrong:
        return None
    first = wrong[0]
    # The last tensor before `first` that may be an input of it and is equal within rounding.
    last_good: TensorRow | None = None
    for row in rows[: rows.index(first)]:
        # A weight's gradient is computed from activations and their gradients alone, so other
        # weights' gradients are not its input.
        is_input = row.kind == "activation" or first.kind != "gradient"
        if is_input and row.kind != "weights before":
            last_good = row
    places = []
    layouts = []
    for trace, record in zip((pair.a, pair.b), records):
        blocks = record.facts.get("blocks_per_stage")
        if not blocks or len(blocks) != trace.stages:
            raise RunError(
                f"{record.folder}/run.json has the blocks of {len(blocks or ())} stages, and its "
                f"trace is of {trace.stages}"
            )
        places.append(place(first, trace.about, blocks))
        layouts.append(trace.about["layout"])
    result = {
        "step": pair.a.about["step"],
        "kind": first.kind,
        "name": first.name,
        "relative": first.relative,
        "of": len(rows),
        "differ": len(wrong),
        "times_explained": None if first.only else first.difference / first.explained,
        "only": first.only or None,
        "last_good": last_good and described(last_good)["title"],
        "where": places,
    }
    return result | described(first, layouts)


def _tracing_commands(
    records: list[Record], losses: dict[str, Any] | None, suffixes: list[str]
) -> list[str]:
    """Return two commands that repeat the runs A and B with traces of two steps.

    The repeated runs begin at the last checkpoint that both runs have before the step at which the
    losses differ; without such a checkpoint they begin at step 1. They trace their first step, in
    which the response to rounding is measured, and the step that differs. losses: the first
    difference of losses, or None. suffixes: the ends of the names of the new folders.
    """
    step = 1
    if losses:
        step = losses["step"]
    names = []  # by run, the names of its checkpoints' folders
    for record in records:
        paths = record.folder.glob("checkpoints/step_????????")
        names.append({path.name for path in paths})
    checkpoint = 0  # the step of the checkpoint; 0: none
    for name in names[0] & names[1]:
        saved_step = int(name.removeprefix("step_"))
        if saved_step < step:
            checkpoint = max(checkpoint, saved_step)
    first_traced = str(checkpoint + 1)  # the first step after the checkpoint
    last_traced = str(max(step, checkpoint + 2))  # the step that differs, or the second step
    commands = []
    for record, suffix in zip(records, suffixes):
        facts = record.facts
        if not checkpoint and record.parts[-1]:
            # The command of a later start may leave out what its checkpoint gave it.
            first = run_files.facts_of(str(record.folder / f"run.json{record.parts[-1]}"))
            facts = first if is_texts(first.get("command")) else facts
        words = list(facts.get("command", ["train.py"]))
        words += ["--out", f"{record.folder}{suffix}"]
        words += ["--trace-numerics", first_traced, last_traced]
        if checkpoint:
            path = record.folder / "checkpoints" / f"step_{checkpoint:08d}"
            words += ["--resume", str(path)]
        ranks = facts.get("cluster", {}).get("ranks", 1)
        commands.append(f"mpirun -n {ranks} python {shlex.join(words)}")
    return commands


def text(found: dict[str, Any]) -> str:
    """Return one screen of text; found: the result of one of the functions `compare...`."""
    lines = [f"{name}: {run}" for name, run in zip("AB", found["runs"])]
    if found["data"]:
        a, b = found["data"]["values"]
        number = found["data"]["sample"]
        other = f"sample {number} of the run is not the same text in A and B"
        lines.append(f"the data differ: {other} (hashes {a} and {b})")
    for difference in found["settings"]:
        a, b = difference["values"]
        setting = SETTINGS[difference["of"]]
        lines.append(f"step {difference['step']}: {setting} is {a} in A and {b} in B")
    lines += [f"note: {note}" for note in found["notes"]]
    lines += option_lines(found["options"], "option ")
    lines.append(_text_of_losses(found["losses"]))
    losses, evaluation = found["losses"], found["evaluations"]
    if evaluation and (losses is None or evaluation["step"] < losses["step"]):
        name = f"the evaluation's {evaluation['of']}"
        lines.append(_text_of_values(evaluation, name))
    # Then comes what the traces show: a tensor that differs, or none, or commands to trace.
    if found["tensor"]:
        lines += _text_of_tensor(found["tensor"])
    elif found["traces"]:
        lines.append(f"rounding explains all tensors of {', '.join(found['traces'])}")
        difference = found["losses"]
        if difference and f"step-{difference['step']:06d}.npz" in found["traces"]:
            lines.append(f"so what differs is {METRICS}")
    elif found["commands"]:
        lines += ["no step is traced in both runs; these commands do it:", *found["commands"]]
    if found["measured_in_steps"]:
        steps = [f"step {step} of {run}" for run, step in zip("AB", found["measured_in_steps"])]
        lines.append(f"what rounding explains was measured in {' and '.join(steps)}")
    return "\n".join(lines)


def _text_of_losses(difference: dict[str, Any] | None) -> str:
    """Return the line about the first difference of losses or gradient norms.

    difference: "losses" of `_compare_metrics`; None if rounding explains all differences.
    """
    if difference is None:
        return "losses and gradient norms: rounding explains all differences"
    return _text_of_values(difference, LOSSES[difference["of"]])


def _text_of_values(difference: dict[str, Any], name: str) -> str:
    """Return the line about two values that differ; difference: that of `_first_difference`."""
    a, b = difference["values"]
    relative = f"{difference['relative']:.1e}"
    explained = f"{difference['explained']:.1e}"
    values = f"step {difference['step']}: {name} is {a:.9g} in A and {b:.9g} in B"
    return f"{values}, by {relative} of it; rounding explains {explained}"


def _text_of_tensor(tensor: dict[str, Any]) -> list[str]:
    """Return the lines about the first tensor that rounding does not explain.

    They name the tensor, the last tensor before it that is equal within rounding, the operations
    between the two, and for each run the ranks, micro-batches and samples with the difference.
    tensor: the result of `_tensor`.
    """
    if tensor["only"]:
        how = f"only {tensor['only']} has it"
    else:
        times = f"{tensor['times_explained']:.0f}"
        how = f"by {tensor['relative']:.1e} of it, {times} times as much as is explained"
    lines = [
        f"step {tensor['step']}: the first tensor that rounding does not explain is",
        f"    {tensor['title']}",
        f"    {how}",
    ]
    if tensor["last_good"]:
        lines.append(f"    equal within rounding until {tensor['last_good']}")
    lines.append(f"    between them: {tensor['between']}")
    for run, run_place in zip("AB", tensor["where"]):
        line = f"    in {run}: ranks {number_ranges(run_place['ranks'], ', ')}"
        if run_place["samples"]:
            micro_batches = set(chain(*run_place["micro_batches"].values()))
            samples = run_place["samples"]
            line += f", micro-batches {number_ranges(micro_batches, ', ')}"
            line += f", samples {number_ranges(samples, ', ')}"
        lines.append(line)
    lines.append(f"    {tensor['differ']} of {tensor['of']} tensors differ")
    return lines
