"""The losses of several runs over tokens, seconds and FLOPs: `python runs.py chart RUN ...`.

curves = read_curves([Path("runs/a"), Path("runs/b")])
page(curves)        an HTML page with an SVG picture, without scripts
bars(curves)        lines for a terminal
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from base import errors
from base.errors import printable
from tools.numerics.record import Record, differing, options, read_steps
from tools.report import web_page
from tools.report.picture import LIGHT, SETTINGS, themed

MOST_POINTS = 400  # a curve has at most this many points, which are means of several steps
AXES = ("tokens", "seconds of all steps", "FLOPs of the model")
COLORS = [LIGHT[name] for name in ("mark", "orange", "good", "red", "violet")]
DASHES = ("-", "--", ":")  # "-" for the first five runs, one per colour, "--" for the next five
LEGEND = 150  # a run's entry in the legend is cut to this many characters
COLUMNS = 60  # the number of bars in a line of text
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class ChartCurve:
    """The losses of a run, as points of a picture."""

    label: str  # the folder, and the options in which the runs differ
    loss: np.ndarray  # (points,): nats per token; NaN for a loss that is not finite
    over: np.ndarray  # (AXES, points): the place of each point along each axis of AXES
    notes: list[str]  # sentences about missing or damaged files of the run


def read_curves(folders: Sequence[Path]) -> list[ChartCurve]:
    """Return a curve per run; raise UserError if a folder is no run or has no step."""
    records = [read_steps(folder) for folder in folders]
    # A curve's label has the values of the options in which the runs differ.
    tables = [options(record.facts) for record in records]
    names = list(differing(tables))
    curves = []
    for record, table in zip(records, tables):
        words = [f"{name} {table.get(name)}" for name in names]
        label = printable(f"{record.folder}: {', '.join(words)}")
        curves.append(_curve(record, label))
    return curves


def _curve(record: Record, label: str) -> ChartCurve:
    """Return a run's curve of at most MOST_POINTS points, which are means of equally many steps."""
    steps = record.steps
    loss = np.array([row["loss"] for row in steps])
    tokens = np.array([row["consumed_tokens"] for row in steps])
    seconds = np.array([row["seconds"] for row in steps])
    tflops = np.array([row.get("tflops_model") or np.nan for row in steps])
    ranks = record.facts.get("cluster", {}).get("ranks", 1)
    # A row has the rate of a rank, in TFLOPs per second; the sum over ranks and steps is needed.
    flops = tflops * 1e12 * seconds * ranks
    over = np.array([tokens, seconds.cumsum(), flops.cumsum()])
    means = []
    last_steps = []
    for indices in points_of(len(loss)):
        mean = loss[indices].mean()
        means.append(mean if np.isfinite(mean) else np.nan)
        last_steps.append(indices[-1])  # on the axes a point is at its last step
    return ChartCurve(label, np.array(means), over[:, last_steps], record.notes)


def points_of(count: int, most: int = MOST_POINTS) -> list[np.ndarray]:
    """Return the indices of `count` steps in at most `most` points of equally many steps."""
    return np.array_split(np.arange(count), min(count, most)) if count else []


def page(curves: Sequence[ChartCurve]) -> str:
    """Return an HTML page with a picture of the curves and the text of `bars`.

    Raise UserError if matplotlib is not installed.
    """
    number = "a run" if len(curves) == 1 else f"{len(curves)} runs"
    title = f"Losses of {number}, over tokens, seconds and FLOPs"
    return framed(title, _picture(curves), bars(curves))


def framed(title: str, svg: str, text: str) -> str:
    """Return an HTML page with a title, a picture, and a text with its line breaks below it."""
    return web_page.document(title, [svg, web_page.lines(text)])


def _picture(curves: Sequence[ChartCurve]) -> str:
    """Return an SVG picture with a panel of curves per axis of AXES, and a legend below.

    A run has the same colour and dashes in all panels. Raise UserError without matplotlib.
    """
    with errors.installed(errors.PLOTS):
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, MaxNLocator

    with rc_context(SETTINGS):
        height = 4.0 + 0.2 * len(curves)
        figure = Figure(figsize=(11.0, height), layout="constrained")
        panels = figure.subplots(1, len(AXES), sharey=True)
        for panel, axis, name in zip(panels, range(len(AXES)), AXES):
            panel.set_xlabel(name)
            # Few and short numbers, as 400k, so that they neither touch nor leave the picture.
            panel.xaxis.set_major_locator(MaxNLocator(5))
            panel.xaxis.set_major_formatter(EngFormatter(sep=""))
            panel.tick_params(color=LIGHT["line"])
            for index, curve in enumerate(curves):
                dashes = DASHES[index // len(COLORS) % len(DASHES)]
                color = COLORS[index % len(COLORS)]
                panel.plot(curve.over[axis], curve.loss, dashes, color=color, marker=".", ms=2)
        panels[0].set_ylabel("loss, nats per token")
        labels = [textwrap.shorten(curve.label, LEGEND).replace("$", r"\$") for curve in curves]
        figure.legend(panels[0].lines, labels, loc="outside lower left", frameon=False)
        return themed(figure)


def bars(curves: Sequence[ChartCurve]) -> str:
    """Return lines for a terminal: per run its label, and its losses over tokens as bars.

    A higher bar is a larger loss, in the same scale for all runs. The columns of the bars have the
    same number of tokens for all runs, up to the tokens of the longest run.
    """
    most_tokens = max(curve.over[0, -1] for curve in curves)
    losses = np.concatenate([curve.loss for curve in curves])
    low = np.nanmin(losses)
    high = np.nanmax(losses)
    span = max(high - low, 1e-9)
    tokens_of_columns = np.linspace(most_tokens / COLUMNS, most_tokens, COLUMNS)
    lines = []
    for curve in curves:
        tokens = curve.over[0]
        bar_line = ""
        # Each column shows the first point with at least the column's tokens.
        for point in np.searchsorted(tokens, tokens_of_columns):
            if point == len(curve.loss):
                break  # this run has fewer tokens than the longest run
            height = (curve.loss[point] - low) / span
            if np.isnan(height):
                bar_line += " "
            else:
                bar_line += BARS[int(height * (len(BARS) - 1))]
        lines.append(curve.label)
        lines.append(f"    {bar_line} {curve.loss[-1]:.4f}")
    lines.append(f"bars: losses from {low:.4f} to {high:.4f}, over 0 to {most_tokens:,.0f} tokens")
    for curve in curves:
        lines += [f"note: {note}" for note in curve.notes]
    return "\n".join(lines)
