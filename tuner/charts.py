"""Charts of a search as SVG text for a web page: drawn by matplotlib, coloured by the page.

    svg = scatter([("tp1 pp2", 12.5, 0.9), ("tp2 pp1", 9.1, 1.2)], "GB", "seconds")

Colours are placeholders that become CSS variables of the page (--ink, --faint, --line, --mark,
--good), so that one drawing serves its dark and light form. The same data give the same text.
"""

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

Point = tuple[str, float, float]  # a layout's name, shown as a tooltip; x and y
SIZE = (4.8, 3.3)  # inches
# By CSS variable: any distinct colours that matplotlib does not use by itself.
COLORS = {"ink": "#1c1d20", "faint": "#696c74", "line": "#dcdcd6"}
COLORS |= {"mark": "#2563b8", "good": "#13795b"}
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],  # part of matplotlib, so text has the same size everywhere
    "font.size": 10,
    "text.color": COLORS["ink"],
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), COLORS["faint"]),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), COLORS["line"]),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
}


def scatter(
    points: Sequence[Point], x_title: str, y_title: str, same_scale: bool = False, best: int = 1
) -> str:
    """Points over a linear x and a logarithmic y axis; the first `best` ones are marked.

    same_scale: two logarithmic axes of the same range, with the line on which x equals y.
    """
    xs, ys = [x for _, x, _ in points], [y for _, _, y in points]

    def draw(axes: Axes) -> None:
        """Draw the points, and the line of equal x and y if wanted."""
        style: dict[str, Any] = {"markeredgewidth": 0, "clip_on": False}
        for index in reversed(range(len(xs))):  # the first one above the others
            size, color, alpha = (6, "mark", 0.75) if index >= best else (9, "good", 1.0)
            style |= {"markersize": size, "color": COLORS[color], "alpha": alpha}
            axes.plot(xs[index], ys[index], "o", gid=f"point-{index}", **style)
        axes.set(xlabel=x_title, ylabel=y_title)
        _logarithmic(axes, "y", [*xs, *ys] if same_scale else ys)
        if same_scale:
            _logarithmic(axes, "x", [*xs, *ys])
            axes.plot(axes.get_xlim(), axes.get_xlim(), "--", color=COLORS["faint"], lw=1, zorder=1)
        else:
            axes.margins(x=0.08)
            axes.ticklabel_format(axis="x", style="plain", useOffset=False)

    tooltips = [f"{name}: {x:.4g}, {y:.4g}" for name, x, y in points]
    return _svg(draw, f"{y_title} over {x_title}", tooltips)


def heat_map(cells: dict[tuple[int, int], float]) -> str:
    """Seconds by (tp, pp): the faster, the stronger the colour."""
    tps, pps = (sorted({cell[axis] for cell in cells}) for axis in (0, 1))
    low, high = min(cells.values()), max(cells.values())

    def draw(axes: Axes) -> None:
        """Draw a field for each cell, with its seconds."""
        for (tp, pp), seconds in cells.items():
            share = math.log(high / seconds) / math.log(high / low) if high > low else 1.0
            x, y = pps.index(pp), tps.index(tp)
            axes.bar(x, 0.94, 0.94, y - 0.47, color=COLORS["mark"], alpha=0.08 + 0.62 * share)
            axes.text(x, y, short_number(seconds), ha="center", va="center")
        axes.set_xticks(range(len(pps)), [f"pp {pp}" for pp in pps])
        axes.set_yticks(range(len(tps)), [f"tp {tp}" for tp in tps])
        axes.set(xlim=(-0.5, len(pps) - 0.5), ylim=(len(tps) - 0.5, -0.5))
        axes.grid(False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)

    return _svg(draw, "best seconds over tp and pp", [])


def short_number(value: float) -> str:
    """Three significant digits; whole numbers from 1000 on."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _logarithmic(axes: Axes, name: str, values: Sequence[float]) -> None:
    """Make the axis `name` logarithmic, with several labelled ticks whatever the range."""
    margin = max(1.2, (max(values) / min(values)) ** 0.05)
    low, high = min(values) / margin, max(values) * margin
    ticks = round_values(low, high)
    axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
    axes.set(**{f"{name}ticks": ticks, f"{name}ticklabels": [short_number(t) for t in ticks]})
    (axes.xaxis if name == "x" else axes.yaxis).set_ticks([], minor=True)


def round_values(low: float, high: float) -> list[float]:
    """Round values in a range, at least two: powers of ten, or 1, 2, 5, or evenly spaced."""
    found: list[float] = []
    for locator in (LogLocator(subs=(1,)), LogLocator(subs=(1, 2, 5)), MaxNLocator(5)):
        found = [float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high]
        if len(found) >= 3:
            break
    return found


def _svg(draw: Callable[[Axes], None], title: str, tooltips: Sequence[str]) -> str:
    """The element <svg> of one chart, for a page; tooltip N belongs to the mark `point-N`."""
    # The salt makes ids the same in every drawing of a chart, and different in another chart.
    with rc_context(SETTINGS | {"svg.hashsalt": title}):
        figure = Figure(figsize=SIZE, layout="constrained")
        draw(figure.add_subplot())
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    view_box = re.findall(r'viewBox="[^"]*"', text)[0]
    body = text[text.index("<defs>") :]
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)  # it is for the whole page
    for name, color in COLORS.items():
        body = body.replace(color, f"var(--{name})")
    for index, tip in enumerate(tooltips):
        body = body.replace(f'<g id="point-{index}">', f"<g><title>{html.escape(tip)}</title>")
    body = re.sub(r'<g id="[^"]*">', "<g>", body)  # all charts of a page have the same ones
    return f'<svg {view_box} role="img" aria-label="{html.escape(title)}">{body}'
