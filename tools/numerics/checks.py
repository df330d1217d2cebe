"""Checks of types and sizes of values that a file says, before anything is computed from them.

The folder of a run may come from a stranger. Its rows and facts are JSON, in which any value may
have any type: a loss may be a text, and a number of ranks may be 10**18, over which a program would
loop for ever.
"""

from dataclasses import Field
from typing import Any

MOST = 2**53  # the largest whole number that every program that reads JSON keeps exactly


def is_whole(value: Any, least: int = 0, most: int = MOST) -> bool:
    """Return whether a value is a whole number (no bool) from `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: Any) -> bool:
    """Return whether a value is a number (no bool) that a float can hold; it may be NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= MOST


def is_texts(value: Any) -> bool:
    """Return whether a value is a list of texts."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def fits(field: Field[Any], value: Any) -> bool:
    """Return whether a value of JSON has the type of an option; None always has."""
    if value is None:
        return True
    if field.metadata.get("nargs"):
        items = [isinstance(item, str | int | float) for item in value] if _is_list(value) else []
        return _is_list(value) and all(items)
    if field.type is bool:
        return isinstance(value, bool)
    if field.type is int:
        return is_whole(value, -MOST)
    if field.type is float:
        return is_number(value)
    return isinstance(value, str) or (field.type is not str and _is_list(value))


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


# The columns of metrics.jsonl that are whole numbers. All others that are not texts are numbers.
COUNTS = ("iteration", "consumed_samples", "consumed_tokens", "global_batch_size", "skipped")
# A row of a step has these columns too.
OF_STEP = ("consumed_samples", "consumed_tokens", "seconds", "tokens_per_second")
NUMBERS = (
    *("loss", "grad_norm", "learning_rate", "seconds", "tokens_per_second", "tflops_model"),
    *("mfu", "peak_memory_bytes", "validation_loss"),
)


def is_row(row: dict[str, Any]) -> bool:
    """Return whether a row of metrics.jsonl has its step, and columns of the right types.

    A row of a step, which has a loss, must have the columns of OF_STEP.
    """
    if not is_whole(row.get("iteration")):
        return False
    for name in COUNTS:
        value = row.get(name)
        if value is not None and not isinstance(value, bool) and not is_whole(value):
            return False
    if not all(row.get(name) is None or is_number(row[name]) for name in NUMBERS):
        return False
    return row.get("loss") is None or all(is_number(row.get(name)) for name in OF_STEP)


def is_spike(row: dict[str, Any]) -> bool:
    """Return whether a row of spikes.jsonl has the columns of a spike, with the right types.

    telemetry/loss_monitor.py says which these are; "before" and the norms of layers may be absent.
    """
    if not is_whole(row.get("iteration")) or not isinstance(row.get("of"), str):
        return False
    # A loss that is not finite is null in the row.
    has_loss = row.get("loss") is None or is_number(row["loss"])
    if not has_loss or not isinstance(row.get("samples"), list):
        return False
    for sample in row["samples"]:
        spans = sample.get("text") if isinstance(sample, dict) else None
        if not isinstance(spans, list) or not all(map(_is_span, spans)):
            return False
    before = row.get("before", {})
    if not isinstance(before, dict):
        return False
    norms = [facts.get("layer_norms", {}) for facts in (row, before)]
    if not all(isinstance(of, dict) and all(map(is_number, of.values())) for of in norms):
        return False
    return not (norms[0] and norms[1]) or (_has_entropy(row) and _has_entropy(before))


def _is_span(span: Any) -> bool:
    """Return whether a value is a part of a sample: a document of a corpus."""
    if not isinstance(span, dict) or not isinstance(span.get("prefix"), str):
        return False
    return is_whole(span.get("document"))


def _has_entropy(facts: dict[str, Any]) -> bool:
    sketch = facts.get("sketch")
    return isinstance(sketch, dict) and is_number(sketch.get("entropy"))
