"""report.html: what a search has measured, on one page with pictures.

    (out / "report.html").write_text(page(result))

It says which layout is the fastest and the command that trains on it, where the search stopped and
why, how far predictions were from measurements, and has the table of all layouts that were tried.
"""

import re
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from architecture.model_stats import parameters
from base import errors
from tools.planner.layouts import Rejected
from tools.report import web_page
from tools.report.picture import LIGHT, SETTINGS, themed
from tools.tuner import result_tables
from tools.tuner.result_tables import LayoutResult, SearchResult, format_number
from tools.tuner.trials import Trial

COLUMNS = (
    *("layout", "s/iteration", "predicted", "measured / predicted", "spread", "trials"),
    *("tokens/s", "TFLOPs", "MFU", "HFU", "GB first/max/last", "notes"),
)
NUMBERED = 10  # so many layouts, the fastest, are numbered in the pictures


def page(result: SearchResult) -> str:
    """Return the HTML page; UserError if matplotlib is not installed."""
    ranked = result.ranked
    parts = []
    if ranked:
        best = ranked[0]
        parts.append(
            web_page.paragraph(
                f"Fastest: {best.candidate.label}: {format_number(best.seconds)} s an iteration, "
                f"{best.rate('tokens_per_second'):,.0f} tokens/s."
            )
        )
    parts += [web_page.paragraph(line) for line in result_tables.summary(result)]
    parts += [web_page.paragraph(line) for line in _where_it_stopped(result)]
    parts.append(web_page.paragraph(result_tables.environment_line(result)))
    if ranked:
        command = shlex.join(result.command(ranked[0].candidate))
        parts += [web_page.heading("Train on the fastest"), web_page.lines(command)]
        parts += [web_page.heading("Measured and predicted"), web_page.inline(_picture(result))]
    if result.rows:
        title = "Layouts, fastest first; the last ones did not run"
        rows = [_cells(row, number, result) for number, row in enumerate(result.rows, 1)]
        table = web_page.table(COLUMNS, rows, ("layout", "notes"))
        parts += [web_page.heading(title), table]
    if result.rejected:
        parts += _rejections(result.rejected)
    return web_page.document(f"Tuning: {result.title}", parts)


def _where_it_stopped(result: SearchResult) -> list[str]:
    """Return sentences about what was measured of what could run, and what was left out."""
    tried = len(result.rows)
    layouts = len(result.candidates)
    lines = [f"{tried} of {layouts} layouts were tried."]
    measured = {row.candidate.key for row in result.rows}
    left = [each for each in result.candidates if each.key not in measured]
    ranked = result.ranked
    if left and ranked:
        # The planner's error in common is that of the machine: predictions are scaled by it.
        ratio = statistics.median(row.seconds / row.candidate.prediction.seconds for row in ranked)
        nearest = min(left, key=lambda each: each.prediction.seconds)
        seconds = nearest.prediction.seconds * ratio
        lines.append(
            f"Of those that were not, {nearest.label} has the fewest predicted seconds: "
            f"{format_number(seconds)} s, if the predictions are off by the same factor "
            f"({ratio:.2f}, the median of what was measured), to {format_number(ranked[0].seconds)}"
            " s of the fastest."
        )
    return lines


def _cells(row: LayoutResult, number: int, result: SearchResult) -> list[str]:
    """Return the cells of a layout's row; those of measurements are empty if it did not run."""
    predicted = row.candidate.prediction.seconds
    measured = [""] * 9
    if row.ok:
        peak = result.machine.peak / 1e12
        model = row.rate("tflops_model")
        hardware = row.rate("tflops_hardware")
        memory = row.memory
        measured = [
            f"{row.seconds / predicted:.2f}",
            f"{row.spread:.0%}",
            str(len(row.trials)),
            f"{row.rate('tokens_per_second'):,.0f}",
            format_number(hardware),
            f"{model / peak:.1%}",
            f"{hardware / peak:.1%}",
            "/".join(f"{stage / 1e9:.2f}" for stage in (memory[0], max(memory), memory[-1])),
            format_number(row.seconds),
        ]
    *others, seconds = measured
    name = f"{number}. {row.candidate.label}" if row.ok else row.candidate.label
    size = result_tables.format_size(parameters(row.candidate.config.model))
    batch = row.candidate.config.training.global_batch_size
    notes = "; ".join([f"{size}, batch {batch}", *row.notes])
    return [name, seconds, format_number(predicted), *others, notes]


def _rejections(rejected: Sequence[Rejected]) -> list[str]:
    """Return how many layouts have the same reason but for its numbers, and then all of them."""
    alike: dict[str, list[str]] = {}
    for entry in rejected:
        alike.setdefault(re.sub(r"\d[\d.,]*", "#", entry.reason), []).append(entry.reason)
    counted = sorted(((len(reasons), reasons[0]) for reasons in alike.values()), reverse=True)
    table = web_page.table(("layouts", "why, of one of them"), counted, ("why, of one of them",))
    every = "\n".join(map(result_tables.rejection_line, rejected))
    title = f"Rejected without a run: {len(rejected)}"
    summary = web_page.escaped("all of them")
    return [
        web_page.heading(title),
        table,
        f"<details><summary>{summary}</summary>{web_page.lines(every)}</details>",
    ]


# ---- Pictures ------------------------------------------------------------------------------------


def _picture(result: SearchResult) -> str:
    """Return the SVG picture of the layouts that ran, in three panels.

    Measured over predicted seconds; the seconds of the trials in their order, with the fastest so
    far; seconds over memory. The fastest layouts have their number in the table beside them.
    """
    with errors.installed(errors.PLOTS):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

    ranked = result.ranked
    predicted = [row.candidate.prediction.seconds for row in ranked]
    measured = [row.seconds for row in ranked]
    memory = [max(row.memory) / 1e9 for row in ranked]
    settings = SETTINGS | {"text.parse_math": False, "svg.hashsalt": "tuner"}
    with rc_context(settings):
        figure = Figure(figsize=(11.0, 3.6), layout="constrained")
        accuracy, order, by_memory = figure.subplots(1, 3)
        _draw_numbered(accuracy, predicted, measured)
        low = min(*predicted, *measured)
        high = max(*predicted, *measured)
        diagonal = [0.8 * low, 1.25 * high]
        accuracy.plot(diagonal, diagonal, "--", color=LIGHT["faint"], lw=0.8)
        accuracy.set(xscale="log", yscale="log", xlim=diagonal, ylim=diagonal)
        accuracy.set(xlabel="predicted seconds of an iteration", ylabel="measured")
        _draw_trials(order, result.trials)
        _draw_numbered(by_memory, memory, measured)
        by_memory.set(xlabel="GB on the fullest rank", ylabel="measured seconds", yscale="log")
        by_memory.margins(x=0.12)
        for axes in (accuracy, order, by_memory):
            axes.tick_params(which="both", color=LIGHT["line"])
            axes.grid(color=LIGHT["line"], lw=0.5)
            axes.set_axisbelow(True)
        return themed(figure)


def _draw_numbered(axes: Any, xs: Sequence[float], ys: Sequence[float]) -> None:
    """Draw points, the first one in another colour, and the numbers of the first ones."""
    axes.plot(xs[1:], ys[1:], "o", color=LIGHT["mark"], ms=4)
    axes.plot(xs[:1], ys[:1], "o", color=LIGHT["good"], ms=6)
    for number, point in enumerate(list(zip(xs, ys))[:NUMBERED], 1):
        axes.annotate(
            str(number), point, xytext=(3, 3), textcoords="offset points", color=LIGHT["faint"]
        )


def _draw_trials(axes: Any, trials: Sequence[Trial]) -> None:
    """Draw the seconds of the trials in their order; those that failed are marks at the bottom."""
    numbers = range(1, len(trials) + 1)
    ran = [(n, trial.median) for n, trial in zip(numbers, trials) if trial.status == "ok"]
    failed = [n for n, trial in zip(numbers, trials) if trial.status != "ok"]
    fastest = [min(seconds for _, seconds in ran[: i + 1]) for i in range(len(ran))]
    axes.plot(*zip(*ran), "o", color=LIGHT["mark"], ms=4, label="trial")
    places = [*(n for n, _ in ran), len(trials)]
    axes.step(places, [*fastest, fastest[-1]], where="post", color=LIGHT["good"], label="fastest")
    if failed:
        bottom = [0.02] * len(failed)
        transform = axes.get_xaxis_transform()
        axes.plot(failed, bottom, "x", color=LIGHT["red"], transform=transform, label="failed")
    axes.set(xlabel="trial, in the order of the search", yscale="log")
    axes.legend(frameon=False)
