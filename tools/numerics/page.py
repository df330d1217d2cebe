"""One run on one screen: `python runs.py show RUN`.

Each line of the text has a heading, such as "loss", and its value. The run is read from the files
in its folder (tools/numerics/record.py).
"""

import math
import statistics
import textwrap
from operator import itemgetter
from pathlib import Path
from typing import Any

from base.errors import number_ranges, printable
from tools.numerics.record import DEFAULTS, Record, differing, options, read
from tools.supervisor.evidence import Files, read_evidence

# The facts of run.json that have a line of their own in the text.
FACTS = ("started", "commit", "parameters", "unknown", "blocks_per_stage", "kernels")
WARM_UP_STEPS = 2  # the medians leave out this many first steps of a run, which are slow
SPEEDS = ("seconds", "tokens_per_second", "tflops_model", "mfu", "peak_memory_bytes")
MOST_LINES = 8  # the text below a heading is cut to this many lines, and then ends with [...]


def text(folder: Path) -> str:
    """Return a screen of text about the run in `folder`; raise UserError if it is no run."""
    record = read(folder)
    facts = record.facts
    machine = dict(facts.get("cluster", {}))
    machine.pop("places", None)  # the place of every rank would fill the screen
    restarts = len(record.parts) - 1
    values_by_heading: dict[str, Any] = {
        "run": f"{folder}: {record.state}, resumed {restarts} times",
        "not default": _not_default(facts),
        "machine": machine,
    }
    for name in FACTS:
        if (
            name != "unknown" or name in facts
        ):  # there only if the options do not describe the model
            values_by_heading[name.replace("_", " ")] = facts.get(name)
    if record.steps:
        values_by_heading |= _training(record)
    values_by_heading |= _events(record)
    values_by_heading["notes"] = "; ".join(record.notes) or "none"
    lines = []
    for heading, value in values_by_heading.items():
        value_text = value
        # A dictionary is written as "name value, name value".
        if isinstance(value, dict):
            value_text = ", ".join(f"{name} {value[name]}" for name in value)
        line = printable(f"{heading:18}{value_text}")
        lines += textwrap.wrap(line, 110, subsequent_indent=" " * 18, max_lines=MOST_LINES)
    return "\n".join(lines)


def _not_default(facts: dict[str, Any]) -> dict[str, Any]:
    """Return, by name, the options of a run that differ from their defaults; facts: run.json."""
    defaults: dict[str, Any] = {}
    for group in DEFAULTS.values():
        defaults |= group
    found = {}
    for name, (_, value) in differing([defaults, options(facts)]).items():
        if value is not None:  # None: `options` leaves out what says nothing about the run
            found[name] = value
    return found


def _training(record: Record) -> dict[str, Any]:
    """Return, by heading, the progress and losses of a run, and medians over its steps.

    The run must have trained at least one step.
    """
    steps = record.steps
    last = steps[-1]
    comparable = [row for row in steps if not math.isnan(row["loss"])]  # NaN has no order
    lowest = min(comparable or steps, key=itemgetter("loss"))
    losses = []
    for row in (steps[0], lowest, last):
        losses.append(f"{row['loss']:.4f} at step {row['iteration']}")
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
    """Return, by heading, the steps of a run's events, and the fault that ended its newest start.

    Events are spikes, losses that are not finite, steps without an update, and checkpoints. Events
    and faults that the run does not have are left out.
    """
    folder = record.folder
    not_finite = [row for row in record.steps if not math.isfinite(row["loss"])]
    skipped = [row for row in record.steps if row.get("skipped")]
    checkpoints = folder.glob("checkpoints/step_????????")
    steps_of_events = {
        "spikes": {row["iteration"] for row in record.spikes},
        "not finite": {row["iteration"] for row in not_finite},
        "no update": {row["iteration"] for row in skipped},
        "checkpoints": {int(path.name.removeprefix("step_")) for path in checkpoints},
    }
    events = {}
    for name, steps in steps_of_events.items():
        if steps:
            events[name] = f"at step {number_ranges(steps)}"
    # The run has written to case.json which fault ended it. `read_evidence` returns what is new
    # against the files before a start of the run; here these are empty, so every fault is new.
    case = read_evidence(str(folder), 0, Files(b"", 0, b""))
    file = folder / "hang" / "case.json"
    if case.kind and file.exists():
        started = (folder / "run.json").stat().st_mtime
        ended = file.stat().st_mtime
        if started <= ended:  # otherwise the case is of an earlier start
            events["fault"] = f"{case.kind}, ranks {number_ranges(case.ranks)}: {case.error}"
    return events
