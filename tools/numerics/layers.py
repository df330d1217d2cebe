"""How far two runs differ, by layer and step: `python runs.py diff RUN_A RUN_B --picture FILE`.

shares = by_layer(a, b)     for each traced step and each layer, the largest difference of a tensor
                            over the difference that rounding explains
page(shares, text)          an HTML page with a picture of them and a text
"""

from pathlib import Path
from typing import Any

import numpy as np

from base import errors
from base.errors import RunError
from tools.numerics.chart import framed
from tools.numerics.diff import common_traces
from tools.numerics.places import BLOCK
from tools.numerics.traces import Pair, TensorRow, read
from tools.report.picture import SETTINGS, themed

PANELS = ("outputs", "gradients", "weights and state")


def by_layer(a: Path, b: Path) -> dict[str, Any]:
    """Return "steps", "layers" and "shares" of two runs, for --json.

    shares: (PANELS, layers, steps), the largest difference of a layer's tensors over the difference
    that rounding explains; NaN where both traces have no such tensor. Raise UserError if no step is
    traced in both runs.
    """
    names = common_traces([a, b])
    if not names:
        raise RunError(f"no step is traced in both {a} and {b}: train with --trace-numerics")
    steps = []
    layers: list[str] = []
    shares: dict[tuple[int, str, int], float] = {}
    for name in names:
        # A row is a tensor of the step, with its difference and the difference that is explained.
        pair = Pair(read(a / "numerics" / name), read(b / "numerics" / name))
        step = pair.a.about["step"]
        steps.append(step)
        for row in pair.rows():
            layer = _layer(row)
            if layer not in layers:
                layers.append(layer)
            place = _panel(row), layer, step
            share = row.difference / max(row.explained, 1e-300)
            if row.only:
                share = 1e300  # a tensor that one run lacks may be 0 in the other
            shares[place] = max(shares.get(place, 0.0), share)
    layers.sort(key=_order)
    table = np.full((len(PANELS), len(layers), len(steps)), np.nan)
    for (panel, layer, step), share in shares.items():
        table[panel, layers.index(layer), steps.index(step)] = share
    return {"steps": steps, "layers": layers, "shares": table.tolist()}


def _layer(row: TensorRow) -> str:
    """Return the layer of a tensor: "embedding", "block 0" and so on, or "head"."""
    block = BLOCK.search(row.name)
    if block:
        return f"block {block[1]}"
    if "embedding" in row.name or row.name == "tokens":
        return "embedding"
    return "head"


def _order(layer: str) -> tuple[int, int]:
    """Return a key that sorts layers in the order of execution."""
    if layer.startswith("block"):
        return 1, int(layer.split()[1])
    return (0, 0) if layer == "embedding" else (2, 0)


def _panel(row: TensorRow) -> int:
    """Return the index in PANELS of the panel in which a tensor's difference is shown."""
    if row.kind == "gradient" or row.name.startswith("gradient of"):
        return PANELS.index("gradients")
    if row.kind == "activation":
        return PANELS.index("outputs")
    return PANELS.index("weights and state")


def page(found: dict[str, Any], text: str) -> str:
    """Return an HTML page with a picture, and `text` below it; found: the result of `by_layer`.

    Raise UserError if matplotlib is not installed.
    """
    with errors.installed(errors.PLOTS):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

    shares = np.array(found["shares"])  # (panels, layers, steps)
    with np.errstate(divide="ignore"):  # a share may be 0
        powers = np.clip(np.log10(shares), -3.0, 3.0)
    with rc_context(SETTINGS):
        height = 1.5 + 0.16 * len(found["layers"])
        figure = Figure(figsize=(11.0, max(2.5, height)), layout="constrained")
        panels = figure.subplots(1, len(PANELS), sharey=True)
        for panel, name, values in zip(panels, PANELS, powers):
            # White is a difference as large as is explained; red is larger, blue smaller.
            image = panel.imshow(values, cmap="RdBu_r", vmin=-3.0, vmax=3.0, aspect="auto")
            panel.set_title(name)
            panel.set_xlabel("step")
            panel.set_xticks(range(len(found["steps"])), found["steps"])
            panel.set_yticks(range(len(found["layers"])), found["layers"])
        bar = figure.colorbar(image, ax=panels, ticks=[-3, 0, 3])
        bar.set_ticklabels(["a thousandth", "as much as", "1000 times"])
        bar.set_label("the largest difference, to what rounding explains")
        svg = themed(figure)
    return framed("How far two runs differ, by layer and step", svg, text)
