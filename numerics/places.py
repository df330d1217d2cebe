"""Where a row of a trace belongs: samples, micro-batches and ranks; the operations before it."""

import re
import tomllib
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from config.schema import Layout, coordinates
from numerics.traces import Row
from schedules.partition import placement

BLOCK = re.compile(r"blocks\.(\d+)")


# Least values of options of a layout with which it has the operations of words.toml.
LEAST = {"pp": 2, "ep": 2}


def described(row: Row, layouts: Sequence[dict[str, Any]] = ()) -> dict[str, str]:
    """Return the title of a row, and the operations between the rows before it and it; an entry of
    words.toml has more operations for some options, which any of the layouts may have.
    """
    words = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
    found = BLOCK.search(row.name)
    key = BLOCK.sub("block", row.name) if row.kind == "activation" else row.kind
    block = found[1] if found else ""
    entry = words.get(key, words["state"])
    between = [entry["between"]]
    for option, operation in entry.get("more", {}).items():
        least = LEAST.get(option, 1)
        if any((layout.get(option) or 0) >= least for layout in layouts):
            between.append(operation)
    texts = {"title": entry["title"], "between": ", ".join(between)}
    return {name: text.format(**vars(row), block=block) for name, text in texts.items()}


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
    found = BLOCK.search(row.name)
    stage = 0 if re.search("embedding|tokens", row.name) else len(blocks) - 1
    if found:
        stage = sum(last <= int(found[1]) for last in accumulate(blocks))
    pp = placement(layout)[stage]
    places = [(rank, coordinates(rank, layout.axes)) for rank in range(_size(layout))]
    ranks = [r for r, at in places if at["pp"] == pp and (not row.bins or at["dp"] in replicas)]
    return {"samples": samples, "micro_batches": replicas, "ranks": ranks}


def _size(layout: Layout) -> int:
    return layout.tp * layout.cp * layout.pp * layout.dp


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as text: 0-3, 7."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join("-".join(map(str, dict.fromkeys(run))) for run in runs)
