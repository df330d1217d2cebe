"""The README's two pictures, as SVG files: `python benchmarks/planner/pictures.py docs/pictures`.

planner.svg      predicted over measured seconds of the published A100 rows, each row predicted with
                 constants that were refitted without its section (about half a minute)
schedules.svg    1F1B and zb-v in simulation, 4 ranks and 8 micro-batches, as they are executed

They have colours for dark and for light pages.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from base.cli import Parser
from base.errors import UserError, sentences
from benchmarks.planner import plan_accuracy, published_cases, published_rows
from costs import hardware
from schedules import orders
from schedules.simulation import bubble, simulate, unit_seconds
from tools.report.picture import LIGHT, SETTINGS, themed

COLORS = {"F": LIGHT["mark"], "B": LIGHT["good"], "W": LIGHT["line"]}
RANKS, MICRO_BATCHES = 4, 8


def planner_accuracy() -> str:
    """Predicted over measured seconds, two logarithmic axes."""
    rows = published_rows.read(str(ROOT / "benchmarks/data/measured_rows.csv"))
    cases = published_cases.cases(rows)
    values = dict(hardware.fitted_values())
    predicted = plan_accuracy.held_out(cases, "seconds", values, cases)
    chosen = [c for c in plan_accuracy.usable(cases, "seconds") if c.source == "001"]
    measured = [c.seconds for c in chosen]
    ends = [min(measured) / 1.2, max(measured) * 1.2]
    with rc_context(SETTINGS):
        figure = Figure(figsize=(4.8, 3.3), layout="constrained")
        axes = figure.add_subplot()
        axes.loglog(ends, ends, "--", color=LIGHT["faint"], linewidth=1)
        guesses = [predicted[c.id] for c in chosen]
        axes.loglog(measured, guesses, "o", color=LIGHT["mark"], alpha=0.75, markeredgewidth=0)
        axes.set(xlabel="measured seconds a step", ylabel="predicted seconds")
        return themed(figure)


def schedules_drawn() -> str:
    """Two timelines, one below the other, and what the colours mean."""
    with rc_context(SETTINGS):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        for axes, name in zip(figure.subplots(2, sharex=True), ("1f1b", "zb-v")):
            timeline(axes, name)
        words = "blue: forward, green: backward (zb-v: of inputs), grey: gradients of weights"
        axes.set_xlabel(words)
        return themed(figure)


def timeline(axes: Axes, name: str) -> None:
    """Draw a simulated schedule; the second stage of a rank is paler."""
    order = orders.build(name, RANKS, MICRO_BATCHES)
    share = RANKS / order.stages  # a stage of two has half of the rank's blocks
    units = {key: unit * share for key, unit in unit_seconds(order).items()}
    slots = simulate(order, units)
    axes.set_title(f"{name}: {bubble(slots):.0%} of the time idle", loc="left")
    axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
    axes.set_xticks([])
    axes.invert_yaxis()
    for rank, row in enumerate(slots):
        for slot in row:
            alpha = 0.5 if slot.action.stage >= RANKS else 0.9
            width = slot.end - slot.start
            place = {"left": slot.start, "height": 0.9, "edgecolor": LIGHT["back"]}
            axes.barh(rank, width, color=COLORS[slot.action.kind], alpha=alpha, **place)
            at = slot.start + width / 2, rank
            axes.text(*at, str(slot.action.micro_batch), ha="center", va="center")


def main(arguments: list[str]) -> None:
    """Write both files."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", metavar="FOLDER", help="of the files")
    folder = Path(parser.parse_args(arguments).folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedules.svg").write_text(schedules_drawn())
        (folder / "planner.svg").write_text(planner_accuracy())
    except OSError as error:
        raise UserError(f"FOLDER {folder}: cannot write in it: {error.strerror}") from None


if __name__ == "__main__":
    with sentences():
        main(sys.argv[1:])
