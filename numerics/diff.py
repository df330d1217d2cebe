"""Why do two runs differ? `python runs.py diff RUN_A RUN_B` for any two layouts.

    found = compare(a, b)      a dictionary, for --json
    print(text(found))         one screen

The answer has four parts: learning rates, samples and options that differ; the first step whose
loss or gradient norm differs by more than rounding explains; if both runs have traces of one step
(--trace-numerics), the first tensor in order of execution that does; else the commands that make
such traces.
"""

import shlex
from itertools import chain
from pathlib import Path
from typing import Any

from config.messages import UserError
from numerics.places import described, place, ranges
from numerics.record import differing, options, read
from numerics.traces import EPSILON, Pair, Trace

MOST_LINES = 8  # of options
SETTINGS = {"learning_rate": "the learning rate", "consumed_samples": "the samples consumed"}
# Columns of metrics.jsonl, and how much larger their rounding is than that of the loss.
LOSSES = {"loss": ("the loss", 1.0), "grad_norm": ("the gradient norm", 8.0)}
METRICS = "the sum over all ranks of losses and of gradients' squares, after all tensors"
Rows = dict[int, dict[str, Any]]  # of metrics.jsonl, by the number of the step


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Return how two runs differ; UserError if a folder is no run or has no step."""
    runs = (a, b)
    records = [read(run) for run in runs]
    for record in records:
        if not record.steps:
            raise UserError("; ".join([f"{record.folder} has no row of a step", *record.notes]))
    facts = [record.facts for record in records]
    rows = [{row["iteration"]: row for row in record.steps} for record in records]
    steps = sorted(rows[0].keys() & rows[1].keys())
    found: dict[str, Any] = {"runs": [str(a), str(b)]}
    options_differ = differing([options(each) for each in facts])
    found["options"] = [[name, *values] for name, values in options_differ.items()]
    found["notes"] = [note for record in records for note in record.notes]
    of_settings = [_first(rows, steps, name, 0.0) for name in SETTINGS]
    found["settings"] = [first for first in of_settings if first]
    precisions = [each["config"]["training"]["precision"] for each in facts]
    epsilon = max(EPSILON.get(name, EPSILON["fp32"]) for name in precisions)
    # A rule of thumb: the mean of many 16-bit numbers has a sixteenth of the rounding of one.
    unit = 4.0 * (epsilon / 16 if epsilon > EPSILON["fp32"] else epsilon)
    of_losses = [_first(rows, steps, name, unit * more) for name, (_, more) in LOSSES.items()]
    found["losses"] = min(filter(None, of_losses), key=lambda first: first["step"], default=None)
    files = [{path.name: path for path in (run / "numerics").glob("step-*.npz")} for run in runs]
    found["traces"] = sorted(files[0].keys() & files[1].keys())
    found["tensor"] = None
    for name in found["traces"]:
        pair = Pair(*(Trace(of_run[name]) for of_run in files))
        found["tensor"] = found["tensor"] or _tensor(pair, facts)
    if not found["traces"]:
        step = found["losses"]["step"] if found["losses"] else 1
        found["commands"] = _commands(runs, facts, step)
    found["differs"] = bool(found["tensor"] or found["settings"] or found["losses"])
    return found


def _first(rows: list[Rows], steps: list[int], name: str, unit: float) -> dict[str, Any] | None:
    """Return the first step at which a column differs by more than unit x (4 + step) explains."""
    for step in steps:
        a, b = (of_run[step].get(name) for of_run in rows)
        if a is not None and b is not None and a != b:
            explained = min(0.1, unit * (4 + step))
            relative = abs(a - b) / max(abs(a), abs(b))
            if not relative <= explained:
                about = {"step": step, "of": name, "values": [a, b]}
                return about | {"relative": relative, "explained": explained}
    return None


def _tensor(pair: Pair, facts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first row of the traces of a step that rounding does not explain."""
    rows = pair.rows()
    wrong = [row for row in rows if row.differs]
    if not wrong:
        return None
    first = wrong[0]
    good = [row for row in rows[: rows.index(first)] if row.kind != "weights before"]
    # A weight's gradient is computed from activations and their gradients alone.
    good = [row for row in good if row.kind == "activation" or first.kind != "gradient"]
    found = {"step": pair.a.about["step"], "kind": first.kind, "name": first.name}
    found |= {"relative": first.relative, "of": len(rows), "differ": len(wrong)}
    found |= {"times_explained": first.difference / first.explained}
    found["last_good"] = described(good[-1])["title"] if good else None
    both = zip((pair.a.about, pair.b.about), facts)
    where = [place(first, about, each["blocks_per_stage"]) for about, each in both]
    layouts = [each.about["layout"] for each in (pair.a, pair.b)]
    return found | described(first, layouts) | {"where": where}


def _commands(runs: tuple[Path, Path], facts: list[dict[str, Any]], step: int) -> list[str]:
    """Return the commands that trace both runs from their last common checkpoint before a step."""
    saved = [{path.name for path in (run / "checkpoints").glob("step_????????")} for run in runs]
    usable = sorted(name for name in saved[0] & saved[1] if int(name[5:]) < step)
    begin = int(usable[-1][5:]) + 1 if usable else 1
    commands = []
    for run, each in zip(runs, facts):
        words = [*each.get("command", ["train.py"]), "--out", f"{run}-traced"]
        words += ["--trace-numerics", str(begin), str(max(step, begin + 1))]
        words += ["--resume", str(run / "checkpoints" / usable[-1])] if usable else []
        ranks = each.get("cluster", {}).get("ranks", 1)
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
    first = found["losses"]
    line = "losses and gradient norms: rounding explains all differences"
    if first:
        a, b = first["values"]
        line = f"step {first['step']}: {LOSSES[first['of']][0]} is {a:.9g} in A and {b:.9g} in B, "
        line += f"by {first['relative']:.1e} of it; rounding explains {first['explained']:.1e}"
    lines.append(line)
    if found["tensor"]:
        lines += _text_of_tensor(found["tensor"])
    elif found["traces"]:
        lines.append(f"rounding explains all tensors of {', '.join(found['traces'])}")
        if first and f"step-{first['step']:06d}.npz" in found["traces"]:
            lines.append(f"so what differs is {METRICS}")
    else:
        lines += ["no step is traced in both runs; these commands do it:", *found["commands"]]
    return "\n".join(lines)


def _text_of_tensor(tensor: dict[str, Any]) -> list[str]:
    size = f"by {tensor['relative']:.1e} of it, {tensor['times_explained']:.0f} times as much as"
    lines = [f"step {tensor['step']}: the first tensor that rounding does not explain is"]
    lines += [f"    {tensor['title']}", f"    {size} is explained"]
    if tensor["last_good"]:
        lines.append(f"    equal within rounding until {tensor['last_good']}")
    lines.append(f"    between them: {tensor['between']}")
    for run, where in zip("AB", tensor["where"]):
        numbers = chain(*where["micro_batches"].values())
        line = f"    in {run}: ranks {ranges(where['ranks'])}"
        if where["samples"]:
            line += f", micro-batches {ranges(numbers)}, samples {ranges(where['samples'])}"
        lines.append(line)
    return [*lines, f"    {tensor['differ']} of {tensor['of']} tensors differ"]
