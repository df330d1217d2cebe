"""Where a row of a trace belongs: samples, micro-batches and ranks; the operations before it."""

import re
import tomllib
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from config.schema import Layout, coordinates
from numerics.traces import Row
from schedules.partition import placement

BLOCK = re.compile(r"blocks\.(\d+)")
WORDS = Path(__file__).with_name("words.toml")
# Least values of options of a layout with which it has the operations of words.toml.
LEAST = {"pp": 2, "ep": 2}


def described(row: Row, layouts: Sequence[dict[str, Any]] = ()) -> dict[str, str]:
    """Return the title of a row, and the operations between the rows before it and it; an entry of
    words.toml has more operations for some options, which any of the layouts may have.
    """
    words = tomllib.loads(WORDS.read_text())
    block = BLOCK.search(row.name)
    key = row.kind
    if row.kind == "activation":
        key = BLOCK.sub("block", row.name)
    entry = words.get(key, words["state"])
    between = [entry["between"]]
    for option, operation in entry.get("more", {}).items():
        values = [layout.get(option) or 0 for layout in layouts]
        if max(values, default=0) >= LEAST.get(option, 1):
            between.append(operation)
    names = {"kind": row.kind, "name": row.name, "block": block[1] if block else ""}
    return {
        "title": entry["title"].format(**names),
        "between": ", ".join(between).format(**names),
    }


def place(row: Row, about: dict[str, Any], blocks: list[int]) -> dict[str, Any]:
    """Return the samples of a step in which a row differs, the micro-batches that hold them, by
    rank of dp, and the ranks that compute it. about: of the trace; blocks: of each stage.
    """
    layout = Layout(**about["layout"])
    count = about["samples"]
    samples = [i for i in range(count) if i * about["bins"] // count in row.bins]
    replicas: dict[int, list[int]] = {}
    for batch in sorted({i // layout.micro_batch_size for i in samples}):
        replicas.setdefault(batch % layout.dp, []).append(batch // layout.dp)
    pp = placement(layout)[_stage_of(row, blocks)]
    ranks = []
    for rank in range(prod(layout.axes.values())):
        at = coordinates(rank, layout.axes)
        has_samples = not row.bins or at["dp"] in replicas
        if at["pp"] == pp and has_samples:
            ranks.append(rank)
    return {"samples": samples, "micro_batches": replicas, "ranks": ranks}


def _stage_of(row: Row, blocks: list[int]) -> int:
    """Return the stage that computes a row; blocks: of each stage."""
    block = BLOCK.search(row.name)
    if block:
        return sum(last <= int(block[1]) for last in accumulate(blocks))
    if re.search("embedding|tokens", row.name):
        return 0
    return len(blocks) - 1
