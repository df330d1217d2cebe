"""Explains a run's spikes against the step before each: `python runs.py diff RUN --spikes`.

result = compare(run)       a dictionary, for --json
print(text(result))         some lines for each spike
"""

import math
from pathlib import Path
from typing import Any

from config.messages import number_ranges
from numerics.record import read

MOST_LAYERS = 3  # the text names this many layers of a spike


def compare(run: Path) -> dict[str, Any]:
    """Return the rows of the spikes of the run in a folder, as a dictionary for --json.

    A row has the growth of each layer's gradient norm too. Raise UserError if the folder is no run.
    """
    rows = [row | {"growth": _growth(row)} for row in read(run).spikes]
    return {"run": str(run), "spikes": rows, "differs": bool(rows)}


def _growth(row: dict[str, Any]) -> dict[str, float]:
    """Return, by layer, the gradient norm over that of the step before.

    The layers with a ratio that is infinite or NaN come first, then the largest ratios. row: a
    spike's row of spikes.jsonl.
    """
    before = row.get("before", {}).get("layer_norms", {})
    norms = row.get("layer_norms", {})
    growth = {layer: norms[layer] / before[layer] for layer in norms if before.get(layer)}
    order = sorted(growth, key=lambda layer: (growth[layer] < math.inf, -growth[layer]))
    return {layer: growth[layer] for layer in order}


def text(found: dict[str, Any]) -> str:
    """Return lines for people; found: the result of `compare`."""
    lines = [f"{found['run']}: {len(found['spikes'])} spikes"]
    for row in found["spikes"]:
        lines.append(f"step {row['iteration']}: loss {row['loss']}, spike of {row['of']}")
        spans = [span for sample in row["samples"] for span in sample["text"]]
        for prefix in sorted({span["prefix"] for span in spans}):
            documents = {span["document"] for span in spans if span["prefix"] == prefix}
            lines.append(f"    documents {number_ranges(documents)} of {prefix}")
        if row["growth"]:
            layers = [f"{layer} ({ratio:.3g} times)" for layer, ratio in row["growth"].items()]
            lines.append(f"    the norm grew most in {', '.join(layers[:MOST_LAYERS])}")
            now = row["sketch"]["entropy"]
            before = row["before"]["sketch"]["entropy"]
            lines.append(f"    entropy of the tokens: {now:.2f}; in the batch before: {before:.2f}")
    return "\n".join(lines)
