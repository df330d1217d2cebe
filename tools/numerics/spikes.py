"""Explains a run's spikes against the step before each: `python runs.py diff RUN --spikes`.

result = compare(run)       a dictionary, for --json
print(text(result))         some lines for each spike
"""

import math
from pathlib import Path
from typing import Any

from base.errors import number_ranges
from tools.numerics.checks import is_spike
from tools.numerics.record import read

MOST_LAYERS = 3  # the text names this many layers of a spike, those whose norm grew most


def compare(run: Path) -> dict[str, Any]:
    """Return the rows of the spikes of the run in a folder, as a dictionary for --json.

    A row has the growth of each layer's gradient norm too. Raise UserError if the folder is no run.
    """
    found = read(run).spikes
    rows = [row | {"growth": _growth(row)} for row in found if is_spike(row)]
    left_out = len(found) - len(rows)
    return {"run": str(run), "spikes": rows, "left_out": left_out, "differs": bool(found)}


def _growth(row: dict[str, Any]) -> dict[str, float]:
    """Return, by layer, the gradient norm over the norm in the step before.

    The layers with a ratio that is infinite or NaN come first, then the largest ratios. row: a
    spike's row of spikes.jsonl.
    """
    # The result is empty without --on-spike, since then the row has no norms by layer.
    before = row.get("before", {}).get("layer_norms", {})
    growth: dict[str, float] = {}
    for layer, norm in row.get("layer_norms", {}).items():
        if before.get(layer):
            growth[layer] = norm / before[layer]

    def place(layer: str) -> tuple[bool, float]:
        """Return a key that sorts ratios: infinity and NaN, then from the largest on."""
        return growth[layer] < math.inf, -growth[layer]

    return {layer: growth[layer] for layer in sorted(growth, key=place)}


def text(found: dict[str, Any]) -> str:
    """Return lines for people; found: the result of `compare`.

    A spike has lines with its loss, with the documents of its batch, and, if the run had
    --on-spike, with the layers whose gradient norm grew most and the entropy of the tokens.
    """
    lines = [f"{found['run']}: {len(found['spikes'])} spikes"]
    if found["left_out"]:
        lines.append(f"note: {found['left_out']} rows of spikes.jsonl are no spikes, and left out")
    for row in found["spikes"]:
        lines.append(f"step {row['iteration']}: loss {row['loss']}, spike of {row['of']}")
        lines += _lines_of_documents(row)
        if row["growth"]:
            layers = [f"{layer} ({ratio:.3g} times)" for layer, ratio in row["growth"].items()]
            lines.append(f"    the norm grew most in {', '.join(layers[:MOST_LAYERS])}")
            now = row["sketch"]["entropy"]
            before = row["before"]["sketch"]["entropy"]
            lines.append(f"    entropy of the tokens: {now:.2f}; in the batch before: {before:.2f}")
    return "\n".join(lines)


def _lines_of_documents(row: dict[str, Any]) -> list[str]:
    """Return a line per corpus with the documents of a spike's batch.

    row: a row of spikes.jsonl, in which a span is the part of a sample that one document fills.
    """
    documents: dict[str, set[int]] = {}  # by corpus, the numbers of its documents
    for sample in row["samples"]:
        for span in sample["text"]:
            of_corpus = documents.setdefault(span["prefix"], set())
            of_corpus.add(span["document"])
    lines = []
    for prefix in sorted(documents):
        numbers = number_ranges(documents[prefix])
        lines.append(f"    documents {numbers} of {prefix}")
    return lines
