"""What a person looks at in the morning, on one page: `python runs.py page RUN ...`.

    html = page([Path("runs/a"), Path("runs/b")])     an HTML page with an SVG picture for each run

A run's picture has a panel for the loss with its evaluations, for the tasks of --eval-tasks, the
tokens per second, the learning rate and the share of each corpus, all over tokens. Lines mark where
a phase begins (run.json has "phases"), where the run was resumed, and its spikes; a branch is named
in the text. Everything is read from run.json, metrics.jsonl and spikes.jsonl, which may come from a
stranger: rows and facts of other types are left out.
"""

import functools
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from base import errors
from base.errors import printable
from tools.numerics import page as screen
from tools.numerics.chart import COLORS, DASHES, points_of
from tools.numerics.checks import is_number, is_whole
from tools.numerics.record import Record, read_steps
from tools.report import web_page
from tools.report.picture import LIGHT, SETTINGS, themed

MOST_SERIES = 12  # a panel has at most this many lines with names; the text says how many more
MOST_MARKS = 100  # of a kind in a picture
MOST_SHARES = 200  # places along the axis at which the shares of corpora are drawn
NAME = 60  # a name is cut to this many characters
KINDS = ("accuracy", "normalised_accuracy", "bits_per_byte")  # of a task's rows

Points = tuple[np.ndarray, np.ndarray]  # tokens and values, (points,) each


@dataclass
class Series:
    """What a run's picture shows; every place is a number of tokens."""

    loss: Points
    evaluations: dict[str, Points] = field(default_factory=dict)  # losses by name
    tasks: dict[str, dict[str, Points]] = field(default_factory=dict)  # by kind, then by name
    speed: Points = (np.empty(0), np.empty(0))  # tokens per second
    rate: Points = (np.empty(0), np.empty(0))  # learning rate
    shares: dict[str, Points] = field(default_factory=dict)  # of each corpus since the place before
    phases: dict[float, str] = field(default_factory=dict)  # the name of each phase by its place
    resumes: list[float] = field(default_factory=list)
    spikes: list[float] = field(default_factory=list)


def page(folders: Sequence[Path]) -> str:
    """Return the HTML page of these runs; UserError if a folder is no run or has no step.

    Raise UserError if matplotlib is not installed.
    """
    parts = []
    for number, folder in enumerate(folders):
        record = read_steps(folder)
        series = series_of(record)
        parts.append(web_page.heading(str(folder)))
        parts.append(web_page.inline(_picture(series, number)))
        parts.append(web_page.lines("\n".join([screen.text(folder), *_more(record, series)])))
    names = ", ".join(folder.name or str(folder) for folder in folders)
    return web_page.document(f"Runs: {names}", parts)


# ---- Reading -------------------------------------------------------------------------------------


def series_of(record: Record) -> Series:
    """Return the curves and marks of a run's picture, over the tokens that were consumed.

    Losses, tokens/s and learning rates of steps are means over groups of neighbouring steps.
    Evaluations and tasks have a point for each of their rows in metrics.jsonl.
    """
    steps = record.steps
    tokens = np.array([row["consumed_tokens"] for row in steps], float)
    groups = points_of(len(steps))
    series = Series(_means(tokens, [row["loss"] for row in steps], groups))
    series.speed = _means(tokens, [row["tokens_per_second"] for row in steps], groups)
    rates = [row.get("learning_rate") for row in steps]
    if all(is_number(rate) for rate in rates):
        series.rate = _means(tokens, rates, groups)
    evaluations: dict[str, list[tuple[float, float]]] = {}
    tasks: dict[str, dict[str, list[tuple[float, float]]]] = {kind: {} for kind in KINDS}
    for row in record.rows:
        place: Any = row.get("consumed_tokens")
        if not is_whole(place) or "loss" in row:
            continue
        for name, value in row.items():
            if name.endswith("_loss") and is_number(value):
                evaluations.setdefault(name.removesuffix("_loss"), []).append((place, value))
        if isinstance(row.get("task"), str):
            for kind in KINDS:
                if is_number(row.get(kind)):
                    tasks[kind].setdefault(row["task"], []).append((place, row[kind]))
    series.evaluations = {name: _columns(found) for name, found in evaluations.items()}
    for kind, by_name in tasks.items():
        series.tasks[kind] = {name: _columns(found) for name, found in by_name.items()}
    series.shares = _shares(record.rows)
    place_of = {row["iteration"]: row["consumed_tokens"] for row in steps}
    series.phases = _phases(record.facts, place_of, float(tokens[-1]))
    # A resumed part begins where the step before it ended.
    series.resumes = [_before(step, tokens, steps) for step in record.resumed_at]
    spikes = {row["iteration"] for row in record.spikes}
    series.spikes = [float(place_of[step]) for step in sorted(spikes) if step in place_of]
    return series


def _means(tokens: np.ndarray, values: Sequence[Any], groups: Sequence[np.ndarray]) -> Points:
    """Return the mean of each group of steps, at the tokens of its last step; NaN if not finite."""
    numbers = np.array(values, float)
    means = np.array([numbers[group].mean() for group in groups])
    return tokens[[group[-1] for group in groups]], np.where(np.isfinite(means), means, np.nan)


def _columns(pairs: Sequence[tuple[float, float]]) -> Points:
    places, values = np.array(pairs, float).T
    return places, np.where(np.isfinite(values), values, np.nan)


def _before(step: int, tokens: np.ndarray, steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the tokens consumed before a step."""
    earlier = [place for place, row in zip(tokens, steps) if row["iteration"] < step]
    return float(earlier[-1]) if earlier else 0.0


def _phases(facts: Mapping[str, Any], places: Mapping[int, float], end: float) -> dict[float, str]:
    """Return the names of the phases in run.json by the tokens at which they began, up to `end`.

    places: the tokens after each step. A phase has from_tokens, or else from_step.
    """
    listed = facts.get("phases", facts.get("stages"))  # "stages" until version 0.3
    found: dict[float, str] = {}
    for number, phase in enumerate(listed if isinstance(listed, list) else []):
        if not isinstance(phase, dict):
            continue
        name = phase.get("name")
        place: Any = phase.get("from_tokens")
        if not is_number(place) and is_whole(phase.get("from_step")):
            place = places.get(phase["from_step"])
        if is_number(place) and 0 <= place <= end:
            found[float(place)] = name if isinstance(name, str) else f"phase {number + 1}"
    return found


def _shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Return each corpus's share of the tokens between two of at most MOST_SHARES places.

    Rows with `corpus_tokens` have the tokens of each corpus since the run began.
    """
    found: list[tuple[float, dict[str, float]]] = []
    for row in rows:
        counts: Any = row.get("corpus_tokens")
        place: Any = row.get("consumed_tokens")
        is_right = isinstance(counts, dict) and all(is_number(count) for count in counts.values())
        if is_right and counts and is_whole(place) and (not found or place > found[-1][0]):
            found.append((place, counts))
    if not found:
        return {}
    chosen = [group[-1] for group in points_of(len(found), MOST_SHARES)]
    found = [found[index] for index in chosen]
    names = list(dict.fromkeys(name for _, counts in found for name in counts))
    places = np.array([place for place, _ in found], float)
    table = np.array([[counts.get(name, 0) for _, counts in found] for name in names], float)
    steps = np.maximum(np.diff(table, prepend=0.0), 0.0)
    with np.errstate(invalid="ignore"):
        shares = np.nan_to_num(steps / steps.sum(0))
    return {name: (places, share) for name, share in zip(names, shares)}


def _more(record: Record, series: Series) -> list[str]:
    """Return lines of the page's text about what the picture leaves out, and a branch's origin."""
    lines = []
    branch = record.facts.get("branch")
    if isinstance(branch, dict):
        words = ", ".join(f"{name} {value}" for name, value in branch.items())
        lines += textwrap.wrap(f"{'branch of':18}{words}", 110, subsequent_indent=" " * 18)
    groups: dict[str, int] = {"evaluations": len(series.evaluations)}
    groups |= {"tasks": len(series.tasks["accuracy"]), "corpora": len(series.shares)}
    for name, count in groups.items():
        if count > MOST_SERIES:
            lines.append(f"{'not drawn':18}{count - MOST_SERIES} more {name}")
    for name, places in (("spikes", series.spikes), ("resumes", series.resumes)):
        if len(places) > MOST_MARKS:
            lines.append(f"{'not drawn':18}{len(places) - MOST_MARKS} earlier {name}")
    return [printable(line) for line in lines]


# ---- Drawing -------------------------------------------------------------------------------------


def _picture(series: Series, number: int) -> str:
    """Return a run's picture as SVG, with a panel below the other for what the run has.

    number: that of the run on the page, since ids in pictures must differ.
    """
    with errors.installed(errors.PLOTS):
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, MaxNLocator

    panels: list[tuple[str, float, Callable[[Any], None]]] = [
        ("loss, nats per token", 2.4, lambda axes: _draw_losses(axes, series))
    ]
    for kind, title in zip(KINDS, ("accuracy", "normalised accuracy", "bits per byte")):
        if series.tasks[kind]:
            found = series.tasks[kind]
            panels.append((title, 1.3, functools.partial(_draw_named, found=found)))
    panels.append(("tokens/s", 1.0, lambda axes: axes.plot(*series.speed, color=LIGHT["mark"])))
    if len(series.rate[0]):
        line = series.rate
        panels.append(("learning rate", 1.0, lambda axes: axes.plot(*line, color=LIGHT["mark"])))
    if series.shares:
        panels.append(("share of tokens", 1.2, lambda axes: _draw_shares(axes, series.shares)))
    heights = [height for _, height, _ in panels]
    # parse_math: a $ in a name is a letter. The names' letters may be in no font of matplotlib.
    settings = SETTINGS | {"text.parse_math": False, "svg.hashsalt": f"run {number}"}
    with rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph ")
        figure = Figure(figsize=(11.0, sum(heights) + 0.6), layout="constrained")
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
        for axes, (title, _, draw) in zip(grid[:, 0], panels):
            draw(axes)
            axes.set_ylabel(title)
            axes.tick_params(color=LIGHT["line"])
            axes.margins(x=0.01)
            _draw_marks(axes, series)
            if axes.get_legend_handles_labels()[1]:
                axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        for place, name in series.phases.items():
            where = {"xy": (place, 1.0), "xycoords": ("data", "axes fraction")}
            offset = {"xytext": (2, 2), "textcoords": "offset points", "color": LIGHT["violet"]}
            grid[0, 0].annotate(_short(name), **where, **offset)
        last = grid[-1, 0]
        last.set_xlabel("tokens")
        last.xaxis.set_major_locator(MaxNLocator(8))
        last.xaxis.set_major_formatter(EngFormatter(sep=""))
        for axes in grid[:, 0]:
            axes.yaxis.set_major_locator(MaxNLocator(5))
        return themed(figure)


def _draw_losses(axes: Any, series: Series) -> None:
    """Draw the loss of the steps, and each evaluation's."""
    axes.plot(*series.loss, color=LIGHT["mark"], lw=0.9, label="training")
    _draw_named(axes, series.evaluations, first=1)
    for name, color, style in (("spike", "red", ":"), ("resumed", "faint", "--")):
        if series.spikes if name == "spike" else series.resumes:
            axes.plot([], [], style, color=LIGHT[color], lw=0.8, label=name)


def _draw_named(axes: Any, found: Mapping[str, Points], first: int = 0) -> None:
    """Draw a line with markers for each name. first: the number of the first colour."""
    for index, (name, points) in enumerate(list(found.items())[:MOST_SERIES], first):
        dashes = DASHES[index // len(COLORS) % len(DASHES)]
        color = COLORS[index % len(COLORS)]
        axes.plot(*points, dashes, color=color, marker=".", ms=4, lw=0.9, label=_short(name))


def _draw_shares(axes: Any, shares: Mapping[str, Points]) -> None:
    """Draw the shares of corpora above each other; those that have no name are the last area."""
    drawn = list(shares.items())[:MOST_SERIES]
    places = drawn[0][1][0]
    colors = [COLORS[index % len(COLORS)] for index in range(len(drawn))]
    # Corpora that share a colour differ in strength.
    values = [share for _, (_, share) in drawn]
    areas = axes.stackplot(places, values, step="pre", colors=colors)
    for index, (area, (name, _)) in enumerate(zip(areas, drawn)):
        area.set_alpha(0.75 / (1 + index // len(COLORS)))
        area.set_label(_short(name))
    axes.set_ylim(0.0, 1.0)


def _draw_marks(axes: Any, series: Series) -> None:
    """Draw a line where a phase begins, where the run was resumed, and at each spike."""
    for place in series.phases:
        axes.axvline(place, color=LIGHT["violet"], lw=0.8)
    for place in series.resumes[-MOST_MARKS:]:
        axes.axvline(place, color=LIGHT["faint"], lw=0.8, ls="--")
    for place in series.spikes[-MOST_MARKS:]:
        axes.axvline(place, color=LIGHT["red"], lw=0.8, ls=":")


def _short(name: str) -> str:
    """Return a name from a file as a legend shows it, on one line."""
    # A label that begins with "_" would be left out of a legend.
    shown = printable(" ".join(name.split()), keep="") or "(no name)"
    shown = shown if len(shown) <= NAME else f"...{shown[3 - NAME :]}"
    return f" {shown}" if shown.startswith("_") else shown
