"""One run on one screen: `python runs.py show RUN`."""

import math
import statistics
import textwrap
from pathlib import Path
from typing import Any

from config.messages import number_ranges, printable
from numerics.record import DEFAULTS, Record, differing, options, read
from supervisor.evidence import Files, read_evidence

FACTS = ("started", "commit", "parameters", "blocks_per_stage", "kernels")  # of run.json
WARM_UP_STEPS = 2  # at the start of a run; the medians leave them out
SPEEDS = ("seconds", "tokens_per_second", "tflops_model", "mfu", "peak_memory_bytes")
MOST_LINES = 8  # of one heading; [...] ends what is longer


def text(folder: Path) -> str:
    """Return what the files in the folder of a run say; UserError if it is no run."""
    record = read(folder)
    facts = record.facts
    defaults: dict[str, Any] = {}
    for group in DEFAULTS.values():
        defaults |= group
    given = {}
    for name, (_, value) in differing([defaults, options(facts)]).items():
        if value is not None:
            given[name] = value
    machine = dict(facts.get("cluster", {}))
    machine.pop("places", None)
    found: dict[str, Any] = {
        "run": f"{folder}: {record.state}, resumed {len(record.parts) - 1} times",
        "not default": given,
        "machine": machine,
    }
    for name in FACTS:
        found[name.replace("_", " ")] = facts.get(name)
    if record.steps:
        found |= _training(record)
    found |= _events(record)
    found["notes"] = "; ".join(record.notes) or "none"
    lines = []
    for name, value in found.items():
        shown = value
        if isinstance(value, dict):
            shown = ", ".join(f"{key} {value[key]}" for key in value)
        line = printable(f"{name:18}{shown}")
        lines += textwrap.wrap(line, 110, subsequent_indent=" " * 18, max_lines=MOST_LINES)
    return "\n".join(lines)


def _training(record: Record) -> dict[str, Any]:
    """Return progress, losses, and medians of the steps."""
    steps = record.steps
    last = steps[-1]
    finite = [row for row in steps if not math.isnan(row["loss"])]
    lowest = min(finite or steps, key=lambda row: row["loss"])
    losses = [f"{row['loss']:.4f} at step {row['iteration']}" for row in (steps[0], lowest, last)]
    medians = {}
    for name in SPEEDS:
        values = [row[name] for row in steps[WARM_UP_STEPS:] if row.get(name) is not None]
        medians[name] = "unknown"
        if values:
            medians[name] = f"{statistics.median(values):.4g}"
    return {
        "progress": f"step {last['iteration']} of {record.total}",
        "tokens": f"{last['consumed_tokens']:,}",
        "loss": "first {}, lowest {}, last {}".format(*losses),
        "validation loss": record.last("validation_loss"),
        "median of a step": medians,
    }


def _events(record: Record) -> dict[str, Any]:
    """Return the steps with spikes, without a finite loss or an update, the checkpoints, and the
    fault that ended the newest start.
    """
    folder = record.folder
    steps = {
        "spikes": {row["iteration"] for row in record.spikes},
        "not finite": {row["iteration"] for row in record.steps if not math.isfinite(row["loss"])},
        "no update": {row["iteration"] for row in record.steps if row["skipped"]},
        "checkpoints": {int(path.name[5:]) for path in folder.glob("checkpoints/step_????????")},
    }
    found = {name: f"at step {number_ranges(at)}" for name, at in steps.items() if at}
    case = read_evidence(str(folder), 0, Files(b"", 0, b""))
    file = folder / "hang" / "case.json"
    if case.kind and file.exists():
        is_of_newest_start = (folder / "run.json").stat().st_mtime <= file.stat().st_mtime
        if is_of_newest_start:
            found["fault"] = f"{case.kind}, ranks {number_ranges(case.ranks)}: {case.error}"
    return found
