"""The README's two pictures, as SVG files: `python benchmarks/pictures.py docs/pictures`.

planner.svg      predicted over measured seconds of the published A100 rows, each row predicted with
                 constants that were refitted without its section (about half a minute)
schedules.svg    1F1B and zb-v in simulation, 4 ranks and 8 micro-batches, as they are executed

They have colours for dark and for light pages.
"""

import io
import math
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import engines
import plan_accuracy
import published_cases
import published_rows
from matplotlib import rc_context
from matplotlib.figure import Figure

from config.messages import Parser, UserError, exit_with
from schedules import orders
from schedules.simulation import Slot, bubble, simulate, unit_seconds

# Colours by name, light and dark. What reads no CSS variables (rsvg-convert, Inkscape) takes light.
PALETTE = {
    "ink": ("#1c1d20", "#e8e8e4"),
    "faint": ("#696c74", "#9ea2ab"),
    "line": ("#dcdcd6", "#343841"),
    "mark": ("#2563b8", "#6ea8ff"),
    "good": ("#13795b", "#4cc79a"),
    "back": ("#fbfbf9", "#15171b"),
}
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "planner",  # the same rows give the same file
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": PALETTE["ink"][0],
    "axes.edgecolor": PALETTE["line"][0],
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), "#696c74"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
}
VARIABLE = re.compile(r"([a-z-]+): var\(--([a-z]+)\)")
UNIT, ROW, LEFT = 26, 20, 60  # pixels: of a unit of time, of a rank, before the first unit
COLORS = {"F": "--mark", "B": "--good", "W": "--line"}


def planner_accuracy() -> str:
    """Predicted over measured seconds, two logarithmic axes."""
    rows = published_rows.read(str(ROOT / "benchmarks/data/measured_rows.csv"))
    cases = published_cases.cases(rows)
    values = {c.name: c.value for c in engines.constants()}
    predicted = plan_accuracy.held_out(cases, "seconds", values, cases)
    chosen = [c for c in plan_accuracy.usable(cases, "seconds") if c.source == "001"]
    measured = [c.seconds for c in chosen]
    ends = [min(measured) / 1.2, max(measured) * 1.2]
    with rc_context(SETTINGS):
        figure = Figure(figsize=(4.8, 3.3), layout="constrained")
        axes = figure.add_subplot()
        axes.loglog(ends, ends, "--", color=PALETTE["faint"][0], linewidth=1)
        marks: dict[str, Any] = {"color": PALETTE["mark"][0], "alpha": 0.75, "markeredgewidth": 0}
        axes.loglog(measured, [predicted[c.id] for c in chosen], "o", **marks)
        axes.set(xlabel="measured seconds a step", ylabel="predicted seconds")
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    return _with_variables(file.getvalue())


def _with_variables(text: str) -> str:
    """The element <svg> of a drawing of matplotlib, with the names of PALETTE as its colours."""
    view_box = re.findall(r'viewBox="[^"]*"', text)[0]
    body = text[text.index("<defs>") :]
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    for name, (light, _) in PALETTE.items():
        body = body.replace(light, f"var(--{name})")
    return f'<svg {view_box} role="img" aria-label="predicted over measured seconds">{body}'


def timeline(name: str, top: int, ranks: int = 4, micro_batches: int = 8) -> tuple[str, int, int]:
    """The elements of a simulated schedule, their width and their height."""
    order = orders.build(name, ranks, micro_batches)
    share = ranks / order.stages  # a stage of two has half of the rank's blocks
    units = {key: unit * share for key, unit in unit_seconds(order).items()}
    slots = simulate(order, units)
    end = math.ceil(max(slot.end for row in slots for slot in row))
    idle = f"{name}: {bubble(slots):.0%} of the time idle"
    parts = [_text(LEFT, top + 14, idle, "start", "--ink")]
    for rank, row in enumerate(slots):
        y = top + 22 + rank * ROW
        parts.append(_text(LEFT - 8, y + 14, f"rank {rank}", "end", "--faint"))
        parts += [_rectangle(slot, y, ranks) for slot in row]
    return "".join(parts), LEFT + end * UNIT + 10, 22 + ranks * ROW


def _rectangle(slot: Slot, y: int, ranks: int) -> str:
    """An action with its micro-batch; the second stage of a rank is paler."""
    kind, x = slot.action.kind, LEFT + slot.start * UNIT
    width, opacity = (slot.end - slot.start) * UNIT, 0.5 if slot.action.stage >= ranks else 0.9
    place = f'x="{x:g}" y="{y}" width="{width - 1:g}" height="{ROW - 1}"'
    label = _text(x + width / 2, y + 14, str(slot.action.micro_batch), "middle", "--ink")
    return f'<rect {place} style="fill: var({COLORS[kind]})" opacity="{opacity}"/>{label}'


def _text(x: float, y: float, words: str, anchor: str, color: str) -> str:
    style = f'style="fill: var({color}); text-anchor: {anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def schedules_drawn() -> str:
    """Two timelines, one below the other, and what the colours mean."""
    first, wide, high = timeline("1f1b", 0)
    second, other, also = timeline("zb-v", high + 14)
    words = "blue: forward, green: backward (zb-v: of inputs), grey: gradients of weights"
    key = _text(LEFT, high + also + 34, words, "start", "--faint")
    box = f'viewBox="0 0 {max(wide, other)} {high + also + 44}"'
    return f'<svg {box} role="img" aria-label="1F1B and zb-v">{first}{second}{key}</svg>'


def stand_alone(svg: str) -> str:
    """A file of its own: with the names of XML, plain colours, dark ones too, and a background."""
    start, _, rest = svg.partition(">")
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    head = start.replace("<svg", f"<svg {names}", 1)
    back = '<rect width="100%" height="100%" style="fill: var(--back)"/>'
    body = back + rest
    used = sorted(set(VARIABLE.findall(body)))
    body = VARIABLE.sub(lambda found: f"{found[1]}: {PALETTE[found[2]][0]}", body)
    return f"{head}>{_style(used)}{body}\n"


def _style(used: list[tuple[str, str]]) -> str:
    """The font, and for dark screens another colour for each property and name of PALETTE."""
    rules = []
    for name, color in used:
        light, dark = PALETTE[color]
        rules.append(f'[style*="{name}: {light}"] {{ {name}: {dark} !important; }}')
    dark_rules = "\n  ".join(rules)
    return (
        "<style>\nsvg { font: 11px DejaVu Sans, Verdana, sans-serif; }\n"
        f"@media (prefers-color-scheme: dark) {{\n  {dark_rules}\n}}\n</style>"
    )


def main(arguments: list[str]) -> None:
    """Write both files."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", metavar="FOLDER", help="of the files")
    folder = Path(parser.parse_args(arguments).folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedules.svg").write_text(stand_alone(schedules_drawn()))
        (folder / "planner.svg").write_text(stand_alone(planner_accuracy()))
    except OSError as error:
        raise UserError(f"FOLDER {folder}: cannot write in it: {error.strerror}") from None


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as mistake:
        exit_with(mistake)
