"""Why do two runs differ? `python runs.py diff RUN_A RUN_B` for any two layouts.

    result = compare(a, b)              a dictionary, for --json
    result = compare_restart(folder)    the steps of a run that were trained again after a stop
    print(text(result))                 one screen

The result has four parts: learning rates, samples and options that differ; the first step whose
loss or gradient norm differs by more than rounding explains; if both runs have traces of a step
(--trace-numerics), the first tensor, in the order of execution, that differs by more than rounding
explains; if they have no such traces, the commands that write them.
"""

import shlex
from itertools import chain
from pathlib import Path
from typing import Any

from config.messages import UserError, number_ranges
from numerics.places import described, place
from numerics.record import Record, differing, last_two_parts, option_lines, options, read_steps
from numerics.traces import EPSILON, Pair, Trace

# Columns of metrics.jsonl that are compared, and their names in the text.
SETTINGS = {"learning_rate": "the learning rate", "consumed_samples": "the samples consumed"}
LOSSES = {"loss": "the loss", "grad_norm": "the gradient norm"}
NORM_OVER_LOSS = 8.0  # relative rounding of the gradient norm over that of the loss
METRICS = "the sum over all ranks of losses and of gradients' squares, after all tensors"
Rows = dict[int, dict[str, Any]]  # the rows of metrics.jsonl by the number of the step


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Return how the runs in the folders `a` and `b` differ, as a dictionary for --json.

    Raise UserError if a folder is no run or has no step.
    """
    records = [read_steps(a), read_steps(b)]
    result = _compare_records(records, [str(a), str(b)])
    result |= _compare_traces(records)
    if not result["traces"]:
        result["commands"] = _tracing_commands(records, result["losses"], ["-traced", "-traced"])
    result["differs"] = bool(result["tensor"] or result["settings"] or result["losses"])
    return result


def compare_restart(folder: Path) -> dict[str, Any]:
    """Return how the steps differ that a run has trained twice, as a dictionary for --json.

    These are the last steps before the run was stopped: it was resumed from an earlier checkpoint.
    Only settings, losses and norms are compared, because the second trace of a step has overwritten
    the first. Raise UserError if the run was not resumed, or has trained no step twice.
    """
    records = last_two_parts(folder)
    before, after = (record.steps for record in records)
    if after[0]["iteration"] > before[-1]["iteration"]:
        raise UserError(
            f"{folder} was resumed at step {after[0]['iteration']}, after its last step "
            f"{before[-1]['iteration']}: it has trained no step twice"
        )
    result = _compare_records(records, [f"{folder} before the last stop", f"{folder} after it"])
    result |= {"traces": [], "tensor": None}
    result["differs"] = bool(result["settings"] or result["losses"])
    result["commands"] = []
    if result["differs"]:
        suffixes = ["-traced-before", "-traced-after"]
        result["commands"] = _tracing_commands(records, result["losses"], suffixes)
    return result


def _compare_records(records: list[Record], titles: list[str]) -> dict[str, Any]:
    """Return the differences of two runs' options and metrics; titles: names of A and B."""
    differing_options = differing([options(record.facts) for record in records])
    result: dict[str, Any] = {
        "runs": titles,
        "options": [[name, *values] for name, values in differing_options.items()],
        "notes": records[0].notes + records[1].notes,
    }
    return result | _compare_metrics(records)


def _compare_metrics(records: list[Record]) -> dict[str, Any]:
    """Return the first differences of two runs' rows in metrics.jsonl.

    settings: per column of SETTINGS, the first step at which it differs. losses: the first step at
    which the loss or the gradient norm differs by more than rounding explains, or None.
    """
    rows = [{row["iteration"]: row for row in record.steps} for record in records]
    precisions = [record.facts["config"]["training"]["precision"] for record in records]
    epsilon = max(EPSILON.get(name, EPSILON["fp32"]) for name in precisions)
    if epsilon > EPSILON["fp32"]:
        # A rule of thumb: the mean of many 16-bit numbers has a sixteenth of a number's rounding.
        epsilon /= 16
    unit = 4.0 * epsilon
    settings = [_first_difference(rows, name, 0.0) for name in SETTINGS]
    loss = _first_difference(rows, "loss", unit)
    norm = _first_difference(rows, "grad_norm", unit * NORM_OVER_LOSS)
    losses = [difference for difference in (loss, norm) if difference]
    return {
        "settings": [difference for difference in settings if difference],
        "losses": min(losses, key=lambda difference: difference["step"], default=None),
    }


def _first_difference(rows: list[Rows], name: str, unit: float) -> dict[str, Any] | None:
    """Return the first step at which a column of two runs differs, with both values, or None.

    rows: those of run A and of run B. name: the column. Relative differences up to unit x (4 +
    step), and at most 0.1, do not count: the differences of rounding grow from step to step.
    """
    for step in sorted(rows[0].keys() & rows[1].keys()):
        a = rows[0][step].get(name)
        b = rows[1][step].get(name)
        if a is None or b is None or a == b:
            continue
        explained = min(0.1, unit * (4 + step))
        relative = abs(a - b) / max(abs(a), abs(b))
        if not relative <= explained:  # also true if a value is NaN
            return {
                "step": step,
                "of": name,
                "values": [a, b],
                "relative": relative,
                "explained": explained,
            }
    return None


def _compare_traces(records: list[Record]) -> dict[str, Any]:
    """Compare the steps that both runs have traced, up to the first step with a difference.

    Return traces: the names of the files that both runs have; tensor: the first tensor, in the
    order of execution, that rounding does not explain, or None.
    """
    files = []
    for record in records:
        paths = (record.folder / "numerics").glob("step-*.npz")
        files.append({path.name: path for path in paths})
    names = sorted(files[0].keys() & files[1].keys())
    tensor = None
    for name in names:
        tensor = _tensor(Pair(Trace(files[0][name]), Trace(files[1][name])), records)
        if tensor:
            break
    return {"traces": names, "tensor": tensor}


def _tensor(pair: Pair, records: list[Record]) -> dict[str, Any] | None:
    """Return the first tensor of a traced step that rounding does not explain, or None.

    The result is a dictionary for --json, with the operations and the ranks that compute the
    tensor. records: those of the runs A and B.
    """
    rows = pair.rows()
    wrong = [row for row in rows if row.differs]
    if not wrong:
        return None
    first = wrong[0]
    rows_before = rows[: rows.index(first)]
    good = [row for row in rows_before if row.kind != "weights before"]
    if first.kind == "gradient":
        # A weight's gradient is computed from activations and their gradients alone.
        good = [row for row in good if row.kind == "activation"]
    last_good = None
    if good:
        last_good = described(good[-1])["title"]
    places = []
    for trace, record in zip((pair.a, pair.b), records):
        places.append(place(first, trace.about, record.facts["blocks_per_stage"]))
    result = {
        "step": pair.a.about["step"],
        "kind": first.kind,
        "name": first.name,
        "relative": first.relative,
        "of": len(rows),
        "differ": len(wrong),
        "times_explained": first.difference / first.explained,
        "last_good": last_good,
        "where": places,
    }
    return result | described(first, [pair.a.about["layout"], pair.b.about["layout"]])


def _tracing_commands(
    records: list[Record], losses: dict[str, Any] | None, suffixes: list[str]
) -> list[str]:
    """Return two commands that repeat the runs A and B with traces of two steps.

    The runs begin at their last common checkpoint before the step at which the losses differ,
    without such a checkpoint at step 1. losses: the first difference of losses, or None. suffixes:
    the ends of the names of the new folders.
    """
    step = 1
    if losses:
        step = losses["step"]
    saved = []  # per run, the checkpoints' folders by their step
    for record in records:
        paths = (record.folder / "checkpoints").glob("step_????????")
        saved.append({int(path.name.removeprefix("step_")): path.name for path in paths})
    common_steps = saved[0].keys() & saved[1].keys()
    usable = [number for number in common_steps if number < step]
    checkpoint = max(usable, default=0)
    first_traced = str(checkpoint + 1)
    last_traced = str(max(step, checkpoint + 2))
    commands = []
    for record, suffix in zip(records, suffixes):
        words = [*record.facts.get("command", ["train.py"]), "--out", f"{record.folder}{suffix}"]
        words += ["--trace-numerics", first_traced, last_traced]
        if checkpoint:
            words += ["--resume", str(record.folder / "checkpoints" / saved[0][checkpoint])]
        ranks = record.facts.get("cluster", {}).get("ranks", 1)
        commands.append(f"mpirun -n {ranks} python {shlex.join(words)}")
    return commands


def text(found: dict[str, Any]) -> str:
    """Return one screen of text; found: the result of `compare` or `compare_restart`."""
    lines = [f"{name}: {run}" for name, run in zip("AB", found["runs"])]
    for difference in found["settings"]:
        a, b = difference["values"]
        setting = SETTINGS[difference["of"]]
        lines.append(f"step {difference['step']}: {setting} is {a} in A and {b} in B")
    lines += [f"note: {note}" for note in found["notes"]]
    lines += option_lines(found["options"], "option ")
    lines.append(_text_of_losses(found["losses"]))
    if found["tensor"]:
        lines += _text_of_tensor(found["tensor"])
    elif found["traces"]:
        lines.append(f"rounding explains all tensors of {', '.join(found['traces'])}")
        difference = found["losses"]
        if difference and f"step-{difference['step']:06d}.npz" in found["traces"]:
            lines.append(f"so what differs is {METRICS}")
    elif found["commands"]:
        lines += ["no step is traced in both runs; these commands do it:", *found["commands"]]
    return "\n".join(lines)


def _text_of_losses(difference: dict[str, Any] | None) -> str:
    """Return the line about the first difference of losses or gradient norms."""
    if difference is None:
        return "losses and gradient norms: rounding explains all differences"
    a, b = difference["values"]
    return (
        f"step {difference['step']}: {LOSSES[difference['of']]} is {a:.9g} in A and {b:.9g} in B, "
        f"by {difference['relative']:.1e} of it; rounding explains {difference['explained']:.1e}"
    )


def _text_of_tensor(tensor: dict[str, Any]) -> list[str]:
    """Return the lines about the first tensor that rounding does not explain."""
    size = f"by {tensor['relative']:.1e} of it, {tensor['times_explained']:.0f} times as much as"
    lines = [
        f"step {tensor['step']}: the first tensor that rounding does not explain is",
        f"    {tensor['title']}",
        f"    {size} is explained",
    ]
    if tensor["last_good"]:
        lines.append(f"    equal within rounding until {tensor['last_good']}")
    lines.append(f"    between them: {tensor['between']}")
    for run, run_place in zip("AB", tensor["where"]):
        line = f"    in {run}: ranks {number_ranges(run_place['ranks'], ', ')}"
        if run_place["samples"]:
            micro_batches = set(chain(*run_place["micro_batches"].values()))
            line += f", micro-batches {number_ranges(micro_batches, ', ')}"
            line += f", samples {number_ranges(run_place['samples'], ', ')}"
        lines.append(line)
    lines.append(f"    {tensor['differ']} of {tensor['of']} tensors differ")
    return lines
