"""One run on one screen: `python runs.py show RUN`."""

import math
import statistics
import textwrap
from pathlib import Path
from typing import Any

from config.messages import number_ranges, printable
from numerics.record import DEFAULTS, Record, differing, options, read
from supervisor.evidence import Files, read_evidence
from telemetry.row_file import read_rows

FACTS = ("started", "commit", "parameters", "blocks_per_stage", "kernels")  # of run.json
WARM_UP_STEPS = 2  # at the start of a run; the medians leave them out
SPEEDS = ("seconds", "tokens_per_second", "tflops_model", "mfu", "peak_memory_bytes")
MOST_LINES = 8  # of one heading; [...] ends what is longer


def text(folder: Path) -> str:
    """Return what the files in the folder of a run say; UserError if it is no run."""
    record = read(folder)
    facts = record.facts
    defaults = {name: value for group in DEFAULTS.values() for name, value in group.items()}
    changed = differing([defaults, options(facts)])
    cluster = facts.get("cluster", {})
    found = {
        "run": f"{folder}: {record.state}, resumed {len(record.parts) - 1} times",
        "not default": {name: own for name, (_, own) in changed.items() if own is not None},
        "machine": {name: cluster[name] for name in cluster if name != "places"},
        **{name.replace("_", " "): facts.get(name) for name in FACTS},
    }
    if record.steps:
        found |= _training(record)
    found |= _numbers(record) | {"notes": "; ".join(record.notes) or "none"}
    lines = []
    for name, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {value[key]}" for key in value)
        line = printable(f"{name:18}{value}")
        lines += textwrap.wrap(line, 110, subsequent_indent=" " * 18, max_lines=MOST_LINES)
    return "\n".join(lines)


def _training(record: Record) -> dict[str, Any]:
    """Return progress, losses, and medians of the steps."""
    steps = record.steps
    last = steps[-1]
    best = min(steps, key=lambda row: math.inf if math.isnan(row["loss"]) else row["loss"])
    losses = [f"{row['loss']:.4f} at step {row['iteration']}" for row in (steps[0], best, last)]
    medians = {}
    for name in SPEEDS:
        values = [row[name] for row in steps[WARM_UP_STEPS:] if row.get(name) is not None]
        medians[name] = f"{statistics.median(values):.4g}" if values else "unknown"
    return {
        "progress": f"step {last['iteration']} of {record.total}",
        "tokens": f"{last['consumed_tokens']:,}",
        "loss": "first {}, lowest {}, last {}".format(*losses),
        "validation loss": record.last("validation_loss"),
        "median of a step": medians,
    }


def _numbers(record: Record) -> dict[str, Any]:
    """Return the steps with spikes, without a finite loss or an update, the checkpoints, and the
    fault that ended the newest start.
    """
    folder = record.folder
    files = [folder / f"spikes.jsonl{ending}" for ending in record.parts]
    spikes = [row for file in files if file.exists() for row in read_rows(file.read_bytes())]
    rows = {
        "spikes": spikes,
        "not finite": [row for row in record.steps if not math.isfinite(row["loss"])],
        "no update": [row for row in record.steps if row["skipped"]],
    }
    steps = {name: {row["iteration"] for row in rows[name]} for name in rows}
    steps["checkpoints"] = {int(path.name[5:]) for path in folder.glob("checkpoints/step_????????")}
    found = {name: f"at step {number_ranges(at)}" for name, at in steps.items() if at}
    case = read_evidence(str(folder), 0, Files(b"", 0, b""))
    times = [path.stat().st_mtime for path in (folder / "run.json", *folder.glob("hang/case.json"))]
    if case.kind and times[0] <= times[1]:
        found["fault"] = f"{case.kind}, ranks {number_ranges(case.ranks)}: {case.error}"
    return found
