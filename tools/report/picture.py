"""Draws pictures as SVG files: layouts as points, with the speed of each over the memory it needs.

    front = picture.front([(62.6, 65284.0), (52.8, 60013.0)])
    picture.write(path, "GB", "tokens/s", {"fits": points, "front": front})

matplotlib draws them. It is loaded only when a picture is asked for, since it may be missing.
A themed picture follows the reader's screen: it has other colours in dark mode.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from base import errors
from base.paths import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = tuple[float, float]  # x and y of a layout in the picture
BLUE, GREEN, GREY = "#2563b8", "#13795b", "#b8b8b2"
COLORS = {"does not fit": GREY, "fits": BLUE, "measured": BLUE, "front": GREEN}
# The colours that `themed` replaces, by name: in light mode, and in dark mode. A program without
# dark mode, such as rsvg-convert, draws the light ones.
PALETTE = {
    "ink": ("#1c1d20", "#e8e8e4"),
    "faint": ("#696c74", "#9ea2ab"),
    "line": ("#dcdcd6", "#343841"),
    "mark": ("#2563b8", "#6ea8ff"),
    "good": ("#13795b", "#4cc79a"),
    "back": ("#fbfbf9", "#15171b"),
    "orange": ("#a85500", "#ffb25c"),
    "red": ("#b3261e", "#ff8a80"),
    "violet": ("#6a3fb5", "#b79cff"),
}
LIGHT = {name: colors[0] for name, colors in PALETTE.items()}
# The settings of matplotlib (for rc_context) with which a figure for `themed` is drawn.
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters are written as text, not as outlines
    "svg.hashsalt": "planner",  # matplotlib's identifiers are not random: equal data, equal file
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "text.color": LIGHT["ink"],
    "axes.edgecolor": LIGHT["line"],
    "axes.labelcolor": LIGHT["faint"],
    "xtick.labelcolor": LIGHT["faint"],
    "ytick.labelcolor": LIGHT["faint"],
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def front(points: Sequence[Point]) -> list[Point]:
    """Return the best points: no other point has a larger y with the same x or a smaller one.

    In a picture of tokens per second (y) over memory (x) they are the fastest layouts for each
    memory. They are sorted by x.
    """
    found: list[Point] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not found or y > found[-1][1]:
            found.append((x, y))
    return found


def write(
    path: str, x_title: str, y_title: str, groups: Mapping[str, Sequence[Point]], title: str = ""
) -> None:
    """Write an SVG file with groups of points, each group in a colour of its own (COLORS).

    A line joins the points of the last group. Raise UserError if the file cannot be written, or
    without matplotlib.
    """
    with errors.installed(errors.PLOTS):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

    # Letters are written as text, and equal points give an equal file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "layouts"}):
        figure = Figure(figsize=(7.0, 4.5), layout="constrained")
        axes = figure.add_subplot()
        *others, last = groups
        for name in others:
            axes.plot(*_columns(groups[name]), "o", color=COLORS[name], label=name)
        axes.plot(*_columns(groups[last]), "o-", color=COLORS[last], label=last)
        axes.set(xlabel=x_title, ylabel=y_title, title=title)
        axes.legend()
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    write_file(path, file.getvalue())


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def themed(figure: "Figure") -> str:
    """Return a figure of matplotlib as text of an SVG element that has other colours in dark mode.

    Every light colour of PALETTE gets a CSS rule that replaces it by its dark colour on a screen in
    dark mode; other colours stay. A background is added. Pages and pictures of docs/ use it.
    """
    file = io.StringIO()
    # Leave out matplotlib's metadata and its style element, so that equal data give equal text.
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = re.sub(r"<style.*?</style>", "", file.getvalue(), flags=re.DOTALL)
    head, _, shapes = text[text.index("<svg") :].partition(">")
    back = f'<rect width="100%" height="100%" style="fill: {LIGHT["back"]}"/>'
    dark = dict(PALETTE.values())
    rules = []
    # Find all lines and areas with a light colour by the text of their style attribute.
    for kind, light in sorted(set(re.findall(r"(fill|stroke): (#\w+)", back + shapes))):
        if light in dark:
            found = f'[style*="{kind}: {light}"]'
            rules.append(f"{found} {{ {kind}: {dark[light]} !important; }}")
    dark_rules = "\n  ".join(rules)
    style = f"<style>\n@media (prefers-color-scheme: dark) {{\n  {dark_rules}\n}}\n</style>"
    return f"{head}>{style}{back}{shapes}"
