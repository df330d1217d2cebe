"""The losses of several runs over tokens, seconds and FLOPs: `python runs.py chart RUN ...`.

curves = read_curves([Path("runs/a"), Path("runs/b")])
page(curves)        an HTML page with an SVG picture, without scripts
bars(curves)        lines for a terminal
"""

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from config import messages
from config.messages import printable
from numerics.record import Record, differing, options, read_steps
from planner.picture import LIGHT, SETTINGS, themed

MOST_POINTS = 400  # of a curve: the points of a longer run are means of several steps
AXES = ("tokens", "seconds of all steps", "FLOPs of the model")
COLORS = [LIGHT[name] for name in ("mark", "orange", "good", "red", "violet")]
DASHES = ("-", "--", ":")  # one for the first runs, the next when all colours are taken
LEGEND = 150  # characters of a run's entry
COLUMNS = 60  # of a line of bars
BARS = "▁▂▃▄▅▆▇█"
# The browser takes a dark background and light text on a dark screen.
HEAD = """<!doctype html>
<meta charset="utf-8"><meta name="color-scheme" content="light dark">
<title>Losses of runs</title><style>svg { max-width: 100%; height: auto }</style>
"""


@dataclass(frozen=True)
class Curve:
    """The losses of a run, NaN where a loss is not finite, and for each of AXES their places."""

    label: str
    loss: np.ndarray
    over: np.ndarray
    notes: list[str]


def read_curves(folders: Sequence[Path]) -> list[Curve]:
    """Return a curve per run; UserError if a folder is no run or has no step.

    A label is the folder and the options in which the runs differ.
    """
    records = [read_steps(folder) for folder in folders]
    differ = differing([options(record.facts) for record in records])
    curves = []
    for number, record in enumerate(records):
        words = [f"{name} {values[number]}" for name, values in differ.items()]
        curves.append(_curve(record, printable(f"{record.folder}: {', '.join(words)}")))
    return curves


def _curve(record: Record, label: str) -> Curve:
    steps = record.steps
    loss = np.array([row["loss"] for row in steps])
    tokens = np.array([row["consumed_tokens"] for row in steps])
    seconds = np.array([row["seconds"] for row in steps])
    tflops = np.array([row["tflops_model"] for row in steps])
    ranks = record.facts.get("cluster", {}).get("ranks", 1)
    flops = tflops * 1e12 * seconds * ranks
    over = np.array([tokens, seconds.cumsum(), flops.cumsum()])
    parts = np.array_split(np.arange(len(loss)), min(len(loss), MOST_POINTS))
    means = np.array([loss[part].mean() for part in parts])
    means[~np.isfinite(means)] = np.nan
    return Curve(label, means, over[:, [part[-1] for part in parts]], record.notes)


def page(curves: Sequence[Curve]) -> str:
    """Return an HTML page with the picture and the text of `bars`; UserError without matplotlib."""
    return f"{HEAD}{_picture(curves)}\n<pre>{html.escape(bars(curves))}</pre>\n"


def _picture(curves: Sequence[Curve]) -> str:
    with messages.installed("a picture needs matplotlib, `pip install matplotlib`"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

    with rc_context(SETTINGS):
        height = 4.0 + 0.2 * len(curves)
        figure = Figure(figsize=(11.0, height), layout="constrained")
        panels = figure.subplots(1, len(AXES), sharey=True)
        for panel, axis, name in zip(panels, range(len(AXES)), AXES):
            panel.set_xlabel(name)
            panel.tick_params(color=LIGHT["line"])
            for index, curve in enumerate(curves):
                dashes = DASHES[index // len(COLORS) % len(DASHES)]
                color = COLORS[index % len(COLORS)]
                panel.plot(curve.over[axis], curve.loss, dashes, color=color, marker=".", ms=2)
        panels[0].set_ylabel("loss, nats per token")
        labels = [textwrap.shorten(curve.label, LEGEND).replace("$", r"\$") for curve in curves]
        figure.legend(panels[0].lines, labels, loc="outside lower left", frameon=False)
        return themed(figure)


def bars(curves: Sequence[Curve]) -> str:
    """Return a line of bars per run, all of one scale, over tokens up to the most of all runs."""
    most = max(curve.over[0, -1] for curve in curves)
    losses = np.concatenate([curve.loss for curve in curves])
    low = np.nanmin(losses)
    high = np.nanmax(losses)
    span = max(high - low, 1e-9)
    tokens_of_columns = np.linspace(most / COLUMNS, most, COLUMNS)
    lines = []
    for curve in curves:
        shown = ""
        for point in np.searchsorted(curve.over[0], tokens_of_columns):
            if point == len(curve.loss):
                break
            height = (curve.loss[point] - low) / span
            if np.isnan(height):
                shown += " "
            else:
                shown += BARS[int(height * (len(BARS) - 1))]
        lines.append(curve.label)
        lines.append(f"    {shown} {curve.loss[-1]:.4f}")
    lines.append(f"bars: losses from {low:.4f} to {high:.4f}, over 0 to {most:,.0f} tokens")
    for curve in curves:
        lines += [f"note: {note}" for note in curve.notes]
    return "\n".join(lines)
