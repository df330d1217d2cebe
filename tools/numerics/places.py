"""Says which ranks compute a tensor of a trace, by which operations, and from which samples.

A row (tools/numerics/traces.py) is a tensor of a traced step with its difference between two runs:
it has a kind, such as "activation" or "gradient", a name, such as "blocks.3.attention", and the
bins that differ. A bin is a range of the step's samples. words.toml has titles and operations in
words. tools/numerics/diff.py calls these functions.
"""

import re
import tomllib
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from config.mesh_axes import coordinates
from config.schema import Layout
from schedules.partition import placement
from tools.numerics.traces import TensorRow

BLOCK = re.compile(r"blocks\.(\d+)")
WORDS = Path(__file__).with_name("words.toml")
# An entry of words.toml has further operations, by the option of the layout that causes them. The
# options of this table cause the operation from this value on (with pp 1 there is no message
# between stages), all other options if they are set.
LEAST = {"pp": 2, "ep": 2}


def described(row: TensorRow, layouts: Sequence[dict[str, Any]] = ()) -> dict[str, str]:
    """Return the title of a trace's row, and the operations that compute it from earlier rows.

    The keys are "title" and "between". layouts: the layouts of the compared runs; operations that
    any of them has are in the text.
    """
    words = tomllib.loads(WORDS.read_text())
    block = BLOCK.search(row.name)
    # The key of an entry of words.toml is the row's kind; for activations it is the name without
    # the block's number, as in "block.attention". All kinds of optimizer state share "state".
    key = row.kind
    if row.kind == "activation":
        key = BLOCK.sub("block", row.name)
    entry = words.get(key, words["state"])
    between = [entry["between"]]
    for option, operation in entry.get("more", {}).items():  # operations that only some layouts do
        values = [layout.get(option) or 0 for layout in layouts]
        if max(values, default=0) >= LEAST.get(option, 1):
            between.append(operation)
    names = {"kind": row.kind, "name": row.name, "block": block[1] if block else ""}
    return {
        "title": entry["title"].format(**names),
        "between": ", ".join(between).format(**names),
    }


def place(row: TensorRow, about: dict[str, Any], blocks: list[int]) -> dict[str, Any]:
    """Return the samples of a step in which a row differs, their micro-batches, and the ranks.

    micro_batches: by rank of dp, the numbers of the micro-batches with these samples. ranks: the
    ranks that compute the row. about: the trace's facts. blocks: the number of blocks per stage.
    """
    layout = Layout(**about["layout"])
    count = about["samples"]
    samples = []
    for sample in range(count):
        if sample * about["bins"] // count in row.bins:  # whether the sample's bin differs
            samples.append(sample)
    micro_batches: dict[int, list[int]] = {}
    for number in sorted({sample // layout.micro_batch_size for sample in samples}):
        # The replicas take the micro-batches of a step in turn: with dp 2, micro-batch 5 of the
        # step is micro-batch 2 of replica 1.
        micro_batches.setdefault(number % layout.dp, []).append(number // layout.dp)
    pp = placement(layout)[_stage_of(row, blocks)]  # the position on pp of the stage's ranks
    ranks = []
    for rank in range(prod(layout.axes.values())):
        position = coordinates(rank, layout.axes)
        has_samples = not row.bins or position["dp"] in micro_batches
        if position["pp"] == pp and has_samples:
            ranks.append(rank)
    return {"samples": samples, "micro_batches": micro_batches, "ranks": ranks}


def _stage_of(row: TensorRow, blocks: list[int]) -> int:
    """Return the index of the stage that computes a row; blocks: the number of blocks per stage."""
    block = BLOCK.search(row.name)
    if block:
        # The stages before the block's stage are those whose last block is before the block.
        number = int(block[1])
        earlier_stages = [end for end in accumulate(blocks) if end <= number]
        return len(earlier_stages)
    if re.search("embedding|tokens", row.name):
        return 0
    return len(blocks) - 1
