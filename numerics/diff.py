"""Why do two runs differ? `python runs.py diff RUN_A RUN_B` for any two layouts.

    differences = compare(a, b)      a dictionary, for --json
    print(text(differences))         one screen

The answer has four parts: options, versions and data that differ; the first step whose loss or
gradient norm differs by more than rounding explains; if both runs have traces of one step
(--trace-numerics), the first tensor in order of execution that does; else the commands that make
such traces.
"""

import json
import shlex
from itertools import chain
from pathlib import Path
from typing import Any

from config.messages import UserError
from numerics.places import Place, operations, ranges, title
from numerics.traces import EPSILON, Pair, Row, Trace, traced_steps

# Options that change no number of a step: where a run is, what it writes, how it is watched.
IDLE_GROUPS = ("run",)
OF_LAYOUT = ("layout",)
MOST_LINES = 8  # of options, and of rows
LOSSES = {"loss": 1.0, "grad_norm": 8.0}  # columns, and how much more than the loss one rounds


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Return how two runs differ; UserError if one of the folders is no run."""
    facts = [_facts(run) for run in (a, b)]
    rows = [_metrics(run) for run in (a, b)]
    found: dict[str, Any] = {"runs": [str(a), str(b)], "options": _options(*facts)}
    found["settings"] = _settings(*rows)
    found["first_step"] = _first_step(rows[0], rows[1], _epsilon(facts))
    traced = [traced_steps(run) for run in (a, b)]
    common = sorted(traced[0].keys() & traced[1].keys())
    found["traced_steps"] = common
    found["tensor"] = None
    for step in common:
        pair = Pair(Trace(traced[0][step]), Trace(traced[1][step]))
        found["settings"] = found["settings"] or _settings_of_traces(pair, step)
        found["tensor"] = _tensor(pair, facts)
        if found["tensor"]:
            break
    if not common:
        found["commands"] = _commands((a, b), facts, found["first_step"])
    found["differs"] = bool(found["tensor"] or found["settings"] or found["first_step"])
    return found


def _facts(run: Path) -> dict[str, Any]:
    try:
        return json.loads((run / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{run} is no folder of a run: run.json: {error}") from None


def _metrics(run: Path) -> dict[int, dict[str, Any]]:
    """Return the rows of a run's steps by the number of the step."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError as error:
        raise UserError(f"{run}/metrics.jsonl: {error.strerror}") from None
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["iteration"]: row for row in rows if "loss" in row}


def _epsilon(facts: list[dict[str, Any]]) -> float:
    names = [each["config"]["training"]["precision"] for each in facts]
    return max(EPSILON.get(name, EPSILON["fp32"]) for name in names)


# ---- Options, learning rates and samples, losses -------------------------------------------------


def _options(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the options that differ; those that change results come before those of layouts."""
    found = []
    groups = [name for name in a["config"] if name not in (*IDLE_GROUPS, *OF_LAYOUT)]
    for group in (*groups, *OF_LAYOUT):
        of_b = b["config"].get(group, {})
        for name, value in a["config"][group].items():
            if value != of_b.get(name):
                flag = name.replace("_", "-")
                found.append({"option": flag, "group": group, "values": [value, of_b.get(name)]})
    for name in ("version", "commit"):
        if a.get(name) != b.get(name):
            found.append({"option": name, "group": "program", "values": [a.get(name), b.get(name)]})
    for name, value in a.get("versions", {}).items():
        other = b.get("versions", {}).get(name)
        if value != other:
            found.append({"option": name, "group": "program", "values": [value, other]})
    return found


def _settings(a: dict[int, dict], b: dict[int, dict]) -> list[str]:
    """Return a sentence about the first step with other learning rates or samples, if any."""
    words = {"lr": "the learning rate", "consumed_samples": "the samples consumed"}
    found = []
    for name, noun in words.items():
        for step in sorted(a.keys() & b.keys()):
            values = [rows[step].get(name) for rows in (a, b)]
            if values[0] != values[1]:
                found.append(f"step {step}: {noun} is {values[0]} in A and {values[1]} in B")
                break
    return found


def _settings_of_traces(pair: Pair, step: int) -> list[str]:
    words = {"learning_rate": "learning rate", "first_sample": "first sample"}
    words |= {"samples": "number of samples", "length": "length of samples"}
    found = []
    for name, noun in words.items():
        a, b = pair.a.about[name], pair.b.about[name]
        if a != b:
            found.append(f"step {step}: the {noun} is {a} in A and {b} in B (traces)")
    return found


def _first_step(a: dict[int, dict], b: dict[int, dict], epsilon: float) -> dict[str, Any] | None:
    """Return the first step whose loss or gradient norm differs by more than rounding explains.

    Without a measurement, this is a rule of thumb: a mean over many tokens has a 16-bit number's
    rounding divided by 16, and the difference grows with the steps.
    """
    unit = epsilon / 16 if epsilon > EPSILON["fp32"] else epsilon
    for step in sorted(a.keys() & b.keys()):
        for name, more in LOSSES.items():
            values = [float(rows[step].get(name) or 0.0) for rows in (a, b)]
            most = min(0.1, 4.0 * unit * more * (4 + step))
            size = max(abs(values[0]), abs(values[1]))
            if not abs(values[0] - values[1]) <= most * size and values[0] != values[1]:
                relative = abs(values[0] - values[1]) / (size + 1e-300)
                about = {"step": step, "of": name, "values": values}
                return about | {"relative": relative, "explained": most}
    return None


# ---- Tensors -------------------------------------------------------------------------------------


def _tensor(pair: Pair, facts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first row of the traces of a step that rounding does not explain."""
    rows = list(pair.rows())
    wrong = [row for row in rows if row.differs]
    if not wrong:
        return None
    first = wrong[0]
    before = [row for row in rows[: rows.index(first)] if row.kind != "weights before"]
    good = _last_good(first, before)
    places = [Place(trace.about, each) for trace, each in zip((pair.a, pair.b), facts)]
    return {
        "step": pair.a.about["step"],
        "kind": first.kind,
        "name": first.name,
        "title": title(first.kind, first.name),
        "relative": first.relative,
        "times_explained": first.difference / (first.explained + 1e-300),
        "last_good": title(good.kind, good.name) if good else None,
        "between": operations(first.kind, first.name, [place.layout for place in places]),
        "where": [_where(place, first, pair.bins) for place in places],
        "rows": len(rows),
        "rows_that_differ": len(wrong),
        "next": [title(row.kind, row.name) for row in wrong[1:MOST_LINES]],
    }


def _last_good(first: Row, before: list[Row]) -> Row | None:
    """Return the row from which the first wrong one is computed, as far as the traces show."""
    if first.kind == "gradient":
        own = [row for row in before if row.kind == "activation"]
        return own[-1] if own else None
    return before[-1] if before else None


def _where(place: Place, row: Row, bins: int) -> dict[str, Any]:
    """Return the samples, micro-batches and ranks of a row in one run."""
    every = range(place.layout.dp)
    if row.kind != "activation" or bins != place.bins:
        return {"samples": None, "micro_batches": None, "ranks": place.ranks(row.name, every)}
    samples = place.samples_of(row.bins)
    found = place.micro_batches(samples)
    return {"samples": samples, "micro_batches": found, "ranks": place.ranks(row.name, found)}


# ---- Commands and text ---------------------------------------------------------------------------


def _commands(runs: tuple[Path, Path], facts: list, first: dict[str, Any] | None) -> list[str]:
    """Return the commands that trace both runs, from their last common checkpoint if any."""
    step = first["step"] if first else 1
    saved = [{path.name for path in (run / "checkpoints").glob("step_????????")} for run in runs]
    usable = [name for name in saved[0] & saved[1] if int(name[5:]) < step]
    begin = int(max(usable)[5:]) if usable else 0
    commands = []
    for run, each in zip(runs, facts):
        words = list(each.get("command", ["train.py"]))
        words += ["--out", f"{run}-traced", "--trace-numerics", str(begin + 1)]
        words += [str(step)] if step > begin + 1 else [str(begin + 2)]
        if usable:
            words += ["--resume", str(run / "checkpoints" / max(usable))]
        ranks = each.get("cluster", {}).get("ranks", 1)
        launcher = f"mpirun -n {ranks} " if ranks > 1 else ""
        commands.append(f"{launcher}python {shlex.join(words)}")
    return commands


def text(found: dict[str, Any]) -> str:
    """Return one screen of text about the result of `compare`."""
    lines = [f"A: {found['runs'][0]}", f"B: {found['runs'][1]}"]
    lines += found["settings"]
    options = found["options"]
    lines.append("options: none differ" if not options else "options that differ:")
    for each in options[:MOST_LINES]:
        a, b = each["values"]
        lines.append(f"    {each['option']} ({each['group']}): {a} in A, {b} in B")
    if len(options) > MOST_LINES:
        lines.append(f"    and {len(options) - MOST_LINES} more, which --json lists")
    lines.append(_text_of_losses(found))
    if found["tensor"]:
        lines += _text_of_tensor(found["tensor"])
    elif found["traced_steps"]:
        steps = ranges(found["traced_steps"])
        lines.append(f"traces of steps {steps}: rounding explains every tensor's difference")
    else:
        lines.append("no step is traced in both runs; these commands trace two steps of each:")
        lines += [f"    {command}" for command in found["commands"]]
    return "\n".join(lines)


def _text_of_losses(found: dict[str, Any]) -> str:
    first = found["first_step"]
    if first is None:
        return "losses and gradient norms: rounding explains all differences"
    a, b = first["values"]
    noun = {"loss": "the loss", "grad_norm": "the gradient norm"}[first["of"]]
    line = f"step {first['step']}: {noun} is {a:.9g} in A and {b:.9g} in B, relative difference "
    return line + f"{first['relative']:.1e}; rounding explains {first['explained']:.1e}"


def _text_of_tensor(tensor: dict[str, Any]) -> list[str]:
    head = f"step {tensor['step']}: the first tensor that rounding does not explain is"
    size = f"relative difference {tensor['relative']:.1e}, {tensor['times_explained']:.0f} times "
    lines = [head, f"    {tensor['title']}", f"    {size}the explained one"]
    if tensor["last_good"]:
        lines.append(f"    {tensor['last_good']} is still equal within rounding")
    lines.append(f"    between them: {tensor['between']}")
    for run, where in zip("AB", tensor["where"]):
        line = f"    in {run}: ranks {ranges(where['ranks'])}"
        if where["samples"] is not None:
            line += f", samples {ranges(where['samples'])} of the batch"
            numbers = sorted(set(chain(*where["micro_batches"].values())))
            line += f", micro-batches {ranges(numbers)}"
        lines.append(line)
    lines.append(f"    {tensor['rows_that_differ']} of {tensor['rows']} tensors differ")
    if tensor["next"]:
        lines.append(f"    next: {'; '.join(tensor['next'][:3])}")
    return lines
