"""Why do two runs differ? `python runs.py diff RUN_A RUN_B` for any two layouts.

    found = compare(a, b)              a dictionary, for --json
    found = compare_restart(folder)    the steps of a run that were trained again after a stop
    print(text(found))                 one screen

The answer has four parts: learning rates, samples and options that differ; the first step whose
loss or gradient norm differs by more than rounding explains; if both runs have traces of one step
(--trace-numerics), the first tensor in order of execution that does; else the commands that make
such traces.
"""

import shlex
from itertools import chain
from pathlib import Path
from typing import Any

from config.messages import UserError, number_ranges
from numerics.places import described, place
from numerics.record import Record, differing, last_two_parts, options, read_steps
from numerics.traces import EPSILON, Pair, Trace

MOST_LINES = 8  # of options
SETTINGS = {"learning_rate": "the learning rate", "consumed_samples": "the samples consumed"}
LOSSES = {"loss": "the loss", "grad_norm": "the gradient norm"}
# How much larger the rounding of the gradient norm is than that of the loss.
NORM_OVER_LOSS = 8.0
METRICS = "the sum over all ranks of losses and of gradients' squares, after all tensors"
Rows = dict[int, dict[str, Any]]  # of metrics.jsonl, by the number of the step


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Return how two runs differ; UserError if a folder is no run or has no step."""
    records = [read_steps(a), read_steps(b)]
    found = _compare_records(records, [str(a), str(b)])
    found |= _compare_traces(records)
    if not found["traces"]:
        found["commands"] = _tracing_commands(records, found["losses"], ["-traced", "-traced"])
    found["differs"] = bool(found["tensor"] or found["settings"] or found["losses"])
    return found


def compare_restart(folder: Path) -> dict[str, Any]:
    """Return how the steps differ that a run has trained twice: before its last stop, and again
    from the checkpoint at which it was resumed. A later trace has replaced an earlier one, so only
    settings, losses and norms are compared.

    Raise UserError if the run was not resumed in its folder, or has trained no step twice.
    """
    records = last_two_parts(folder)
    before, after = (record.steps for record in records)
    if after[0]["iteration"] > before[-1]["iteration"]:
        raise UserError(
            f"{folder} was resumed at step {after[0]['iteration']}, after its last step "
            f"{before[-1]['iteration']}: it has trained no step twice"
        )
    found = _compare_records(records, [f"{folder} before the last stop", f"{folder} after it"])
    found |= {"traces": [], "tensor": None}
    found["differs"] = bool(found["settings"] or found["losses"])
    found["commands"] = []
    if found["differs"]:
        suffixes = ["-traced-before", "-traced-after"]
        found["commands"] = _tracing_commands(records, found["losses"], suffixes)
    return found


def _compare_records(records: list[Record], titles: list[str]) -> dict[str, Any]:
    """Return the differences of options and metrics; titles: of A and B, for the text."""
    differ = differing([options(record.facts) for record in records])
    found: dict[str, Any] = {
        "runs": titles,
        "options": [[name, *values] for name, values in differ.items()],
        "notes": records[0].notes + records[1].notes,
    }
    return found | _compare_metrics(records)


def _compare_metrics(records: list[Record]) -> dict[str, Any]:
    """Return the first differences of settings, and of the loss or the norm, in metrics.jsonl."""
    rows = [{row["iteration"]: row for row in record.steps} for record in records]
    precisions = [record.facts["config"]["training"]["precision"] for record in records]
    epsilon = max(EPSILON.get(name, EPSILON["fp32"]) for name in precisions)
    if epsilon > EPSILON["fp32"]:
        # A rule of thumb: the mean of many 16-bit numbers has a sixteenth of the rounding of one.
        epsilon /= 16
    unit = 4.0 * epsilon
    settings = [_first(rows, name, 0.0) for name in SETTINGS]
    losses = [_first(rows, "loss", unit), _first(rows, "grad_norm", unit * NORM_OVER_LOSS)]
    return {
        "settings": [first for first in settings if first],
        "losses": min(filter(None, losses), key=lambda first: first["step"], default=None),
    }


def _first(rows: list[Rows], name: str, unit: float) -> dict[str, Any] | None:
    """Return the first step at which a column differs by more than unit x (4 + step) explains."""
    for step in sorted(rows[0].keys() & rows[1].keys()):
        a = rows[0][step].get(name)
        b = rows[1][step].get(name)
        if a is None or b is None or a == b:
            continue
        explained = min(0.1, unit * (4 + step))
        relative = abs(a - b) / max(abs(a), abs(b))
        if not relative <= explained:  # also if it is not a number
            return {
                "step": step,
                "of": name,
                "values": [a, b],
                "relative": relative,
                "explained": explained,
            }
    return None


def _compare_traces(records: list[Record]) -> dict[str, Any]:
    """Return the names of the traces that both runs have, and the first tensor that differs."""
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
    """Return the first row of the traces of a step that rounding does not explain."""
    rows = pair.rows()
    wrong = [row for row in rows if row.differs]
    if not wrong:
        return None
    first = wrong[0]
    good = [row for row in rows[: rows.index(first)] if row.kind != "weights before"]
    if first.kind == "gradient":
        # A weight's gradient is computed from activations and their gradients alone.
        good = [row for row in good if row.kind == "activation"]
    last_good = None
    if good:
        last_good = described(good[-1])["title"]
    where = []
    for trace, record in zip((pair.a, pair.b), records):
        where.append(place(first, trace.about, record.facts["blocks_per_stage"]))
    found = {
        "step": pair.a.about["step"],
        "kind": first.kind,
        "name": first.name,
        "relative": first.relative,
        "of": len(rows),
        "differ": len(wrong),
        "times_explained": first.difference / first.explained,
        "last_good": last_good,
        "where": where,
    }
    return found | described(first, [pair.a.about["layout"], pair.b.about["layout"]])


def _tracing_commands(
    records: list[Record], losses: dict[str, Any] | None, suffixes: list[str]
) -> list[str]:
    """Return the commands that trace both runs from their last common checkpoint before the step
    at which the losses differ, or before step 1. suffixes: end the names of the new runs' folders.
    """
    step = 1
    if losses:
        step = losses["step"]
    saved = []
    for record in records:
        paths = (record.folder / "checkpoints").glob("step_????????")
        saved.append({int(path.name[5:]): path.name for path in paths})
    usable = [number for number in saved[0].keys() & saved[1].keys() if number < step]
    checkpoint = max(usable, default=0)
    begin = str(checkpoint + 1)
    end = str(max(step, checkpoint + 2))
    commands = []
    for record, suffix in zip(records, suffixes):
        words = [*record.facts.get("command", ["train.py"]), "--out", f"{record.folder}{suffix}"]
        words += ["--trace-numerics", begin, end]
        if checkpoint:
            words += ["--resume", str(record.folder / "checkpoints" / saved[0][checkpoint])]
        ranks = record.facts.get("cluster", {}).get("ranks", 1)
        commands.append(f"mpirun -n {ranks} python {shlex.join(words)}")
    return commands


def text(found: dict[str, Any]) -> str:
    """Return one screen of text about the result of `compare`."""
    lines = [f"{name}: {run}" for name, run in zip("AB", found["runs"])]
    for first in found["settings"]:
        a, b = first["values"]
        lines.append(f"step {first['step']}: {SETTINGS[first['of']]} is {a} in A and {b} in B")
    lines += [f"note: {note}" for note in found["notes"]]
    differ = found["options"]
    lines += [f"option {name}: {a} in A, {b} in B" for name, a, b in differ[:MOST_LINES]]
    if len(differ) > MOST_LINES:
        lines.append(f"and {len(differ) - MOST_LINES} more options, which --json lists")
    lines.append(_text_of_losses(found["losses"]))
    if found["tensor"]:
        lines += _text_of_tensor(found["tensor"])
    elif found["traces"]:
        lines.append(f"rounding explains all tensors of {', '.join(found['traces'])}")
        first = found["losses"]
        if first and f"step-{first['step']:06d}.npz" in found["traces"]:
            lines.append(f"so what differs is {METRICS}")
    elif found["commands"]:
        lines += ["no step is traced in both runs; these commands do it:", *found["commands"]]
    return "\n".join(lines)


def _text_of_losses(first: dict[str, Any] | None) -> str:
    if first is None:
        return "losses and gradient norms: rounding explains all differences"
    a, b = first["values"]
    return (
        f"step {first['step']}: {LOSSES[first['of']]} is {a:.9g} in A and {b:.9g} in B, "
        f"by {first['relative']:.1e} of it; rounding explains {first['explained']:.1e}"
    )


def _text_of_tensor(tensor: dict[str, Any]) -> list[str]:
    size = f"by {tensor['relative']:.1e} of it, {tensor['times_explained']:.0f} times as much as"
    lines = [
        f"step {tensor['step']}: the first tensor that rounding does not explain is",
        f"    {tensor['title']}",
        f"    {size} is explained",
    ]
    if tensor["last_good"]:
        lines.append(f"    equal within rounding until {tensor['last_good']}")
    lines.append(f"    between them: {tensor['between']}")
    for run, where in zip("AB", tensor["where"]):
        line = f"    in {run}: ranks {number_ranges(where['ranks'], ', ')}"
        if where["samples"]:
            numbers = set(chain(*where["micro_batches"].values()))
            line += f", micro-batches {number_ranges(numbers, ', ')}"
            line += f", samples {number_ranges(where['samples'], ', ')}"
        lines.append(line)
    lines.append(f"    {tensor['differ']} of {tensor['of']} tensors differ")
    return lines
