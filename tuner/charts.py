"""Charts of a search as SVG text for a web page: drawn by matplotlib, coloured by the page.

    svg = scatter(memory, seconds, names, ("GB", "seconds"))

Colours are placeholders that become CSS variables of the page (--ink, --faint, --line, --mark,
--good), so that one drawing serves its dark and light form. The same data give the same text.
"""

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported where charts are drawn: not for --help, nor for a user's mistake
    from matplotlib.axes import Axes

SIZE = (4.8, 3.3)  # inches
COLORS = {  # by CSS variable: any distinct colours that matplotlib does not use by itself
    "ink": "#1c1d20",
    "faint": "#696c74",
    "line": "#dcdcd6",
    "mark": "#2563b8",
    "good": "#13795b",
}
SETTINGS = {
    "svg.fonttype": "none",  # text stays text
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],  # part of matplotlib, so text has the same size everywhere
    "font.size": 10,
    "text.color": COLORS["ink"],
    "axes.labelcolor": COLORS["faint"],
    "xtick.labelcolor": COLORS["faint"],
    "ytick.labelcolor": COLORS["faint"],
    "axes.edgecolor": COLORS["line"],
    "xtick.color": COLORS["line"],
    "ytick.color": COLORS["line"],
    "grid.color": COLORS["line"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
}


def scatter(
    xs: Sequence[float],
    ys: Sequence[float],
    names: Sequence[str],
    titles: tuple[str, str],
    same_scale: bool = False,
) -> str:
    """Points over a linear x and a logarithmic y axis, with their names as tooltips.

    `titles` are those of the x and y axes. The first point is the fastest layout and is marked.
    same_scale: two logarithmic axes of the same range, with the line on which x equals y.
    """

    def draw(axes: "Axes") -> None:
        _points(axes, xs, ys)
        axes.set(xlabel=titles[0], ylabel=titles[1])
        _logarithmic(axes, "y", [*xs, *ys] if same_scale else ys)
        if same_scale:
            _logarithmic(axes, "x", [*xs, *ys])
            axes.plot(axes.get_xlim(), axes.get_xlim(), "--", color=COLORS["faint"], lw=1, zorder=1)
        else:
            axes.margins(x=0.08)
            axes.ticklabel_format(axis="x", style="plain", useOffset=False)

    texts = (f"{name}: {x:.4g}, {y:.4g}" for name, x, y in zip(names, xs, ys, strict=True))
    tooltips = {f"point-{index}": text for index, text in enumerate(texts)}
    return _svg(draw, f"{titles[1]} over {titles[0]}", tooltips)


def heat_map(cells: dict[tuple[int, int], float]) -> str:
    """Seconds by (tp, pp): the faster, the stronger the colour."""
    tps, pps = (sorted({cell[axis] for cell in cells}) for axis in (0, 1))
    low, high = min(cells.values()), max(cells.values())

    def draw(axes: "Axes") -> None:
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

    return _svg(draw, "best seconds over tp and pp", {})


def short_number(value: float) -> str:
    """Three significant digits; whole numbers from 1000 on."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


# ------------------------------------------------------------------------------------------------
# Parts
# ------------------------------------------------------------------------------------------------


def _points(axes: "Axes", xs: Sequence[float], ys: Sequence[float]) -> None:
    """One mark for each point, the first one above the others, with an id for its tooltip."""
    for index in reversed(range(len(xs))):
        best = index == 0
        axes.plot(
            xs[index],
            ys[index],
            "o",
            markersize=9 if best else 6,
            color=COLORS["good" if best else "mark"],
            alpha=1.0 if best else 0.75,
            markeredgewidth=0,
            gid=f"point-{index}",
            clip_on=False,
        )


def _logarithmic(axes: "Axes", name: str, values: Sequence[float]) -> None:
    """Make an axis logarithmic, with at least two labelled ticks whatever the range."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    margin = max(1.2, (max(values) / min(values)) ** 0.05)
    low, high = min(values) / margin, max(values) * margin
    axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(round_values(low, high)))
    axis.set_major_formatter(FuncFormatter(lambda value, position: short_number(value)))
    axis.set_minor_locator(NullLocator())


def round_values(low: float, high: float) -> list[float]:
    """Round values in a range, at least two: powers of ten, or 1, 2, 5, or evenly spaced."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    found: list[float] = []
    for locator in (LogLocator(subs=(1,)), LogLocator(subs=(1, 2, 5)), MaxNLocator(5)):
        ticks = locator.tick_values(low, high)
        found = [float(tick) for tick in ticks if low <= tick <= high]
        if len(found) >= 3:
            break
    return found


def _svg(draw: Callable[["Axes"], None], title: str, tooltips: dict[str, str]) -> str:
    """The element <svg> of one chart, for a page; `tooltips` by the id of the marks in it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # The salt makes ids the same in every drawing of a chart, and different in another chart.
    with rc_context(SETTINGS | {"svg.hashsalt": title}):
        figure = Figure(figsize=SIZE, layout="constrained")
        draw(figure.add_subplot())
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    view_box = re.search(r'viewBox="[^"]*"', text).group()
    body = text[text.index("<defs>") :]
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)  # it is for the whole page
    for name, color in COLORS.items():
        body = body.replace(color, f"var(--{name})")
    for gid, tip in tooltips.items():
        body = body.replace(f'<g id="{gid}">', f"<g><title>{html.escape(tip)}</title>")
    body = re.sub(r'<g id="[^"]*">', "<g>", body)  # all charts of a page have the same ones
    return f'<svg {view_box} role="img" aria-label="{html.escape(title)}">{body}'
