"""Pictures of layouts as SVG files: each one a point, what is fast over what it needs.

    front = picture.front([(62.6, 65284.0), (52.8, 60013.0)])
    picture.write(path, "GB", "tokens/s", {"fits": points, "front": front})

They are drawn by matplotlib, which is loaded when a picture is asked for, and not before.
"""

from collections.abc import Mapping, Sequence

from config import messages
from config.messages import UserError

Point = tuple[float, float]  # x and y
BLUE, GREEN, GREY = "#2563b8", "#13795b", "#b8b8b2"
COLORS = {"does not fit": GREY, "fits": BLUE, "measured": BLUE, "front": GREEN}


def front(points: Sequence[Point]) -> list[Point]:
    """The points than which no other one has a smaller x, or as small a one, and a larger y."""
    found: list[Point] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not found or y > found[-1][1]:
            found.append((x, y))
    return found


def write(
    path: str, x_title: str, y_title: str, groups: Mapping[str, Sequence[Point]], title: str = ""
) -> None:
    """Write the points of each group, in its color, as an SVG file; the last group is joined by a
    line. UserError if the file cannot be written, or without matplotlib.
    """
    with messages.installed("a picture needs matplotlib, `pip install matplotlib`"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

    # Text stays text, and the same points give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "layouts"}):
        figure = Figure(figsize=(7.0, 4.5), layout="constrained")
        axes = figure.add_subplot()
        *others, last = groups
        for name in others:
            axes.plot(*_columns(groups[name]), "o", color=COLORS[name], label=name)
        axes.plot(*_columns(groups[last]), "o-", color=COLORS[last], label=last)
        axes.set(xlabel=x_title, ylabel=y_title, title=title)
        axes.legend()
        try:
            figure.savefig(path, format="svg", metadata={"Date": None})
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
