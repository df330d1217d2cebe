"""report.html: one page with its charts as inline SVG, no external resource, dark and light."""

import html as escaping
import math
import shlex
from collections.abc import Sequence

from config.model_stats import parameters
from tuner import result_tables

WIDTH, HEIGHT = 480, 320
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 14, 52

STYLE = """
:root { color-scheme: light dark; --back: #fbfbf9; --card: #fff; --ink: #1c1d20; --faint: #696c74;
  --line: #dcdcd6; --mark: #2563b8; --good: #13795b; --bad: #b3372f; --cool: 37, 99, 184; }
@media (prefers-color-scheme: dark) { :root { --back: #15171b; --card: #1d2026; --ink: #e8e8e4;
  --faint: #9ea2ab; --line: #343841; --mark: #6ea8ff; --good: #4cc79a; --bad: #ff8178;
  --cool: 110, 168, 255; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 1120px; background: var(--back);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .4rem; } h2 { font-size: 1.1rem; margin: 1.8rem 0 .5rem; }
p { margin: .3rem 0; overflow-wrap: anywhere; } .faint { color: var(--faint); font-size: .88rem; }
.best { font-size: 1.15rem; } .best b { color: var(--good); }
.charts { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
figure { margin: 0; padding: .8rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; } figcaption { font-weight: 600; margin-bottom: .3rem; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--faint); font: 15px system-ui, sans-serif; }
svg text.ink { fill: var(--ink); } .grid { stroke: var(--line); stroke-width: 1; }
.dot { fill: var(--mark); fill-opacity: .75; } .dot.first { fill: var(--good); fill-opacity: 1; }
.same { stroke: var(--faint); stroke-dasharray: 4 4; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: .86rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .34rem .6rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; } th { color: var(--faint); font-weight: 600; }
td.text, th.text { text-align: left; } td.long { white-space: normal; min-width: 16rem; }
tr:last-child td { border-bottom: 0; } tr.first td { color: var(--good); font-weight: 600; }
tr.failed td { color: var(--bad); }
pre span { display: inline-block; } pre { white-space: pre-wrap; padding: .8rem;
  background: var(--card); border: 1px solid var(--line); border-radius: 8px; font-size: .84rem; }
details { margin-top: .5rem; } summary { cursor: pointer; }
"""


def html(result, ranked: list, failed: list, lines: list[str]) -> str:
    """The whole page."""
    parts = [f"<h1>Tuning: {text(result.title)}</h1>"]
    if ranked:
        best = ranked[0]
        parts.append(
            f'<p class="best">Fastest: <b>{text(best.candidate.label)}</b>, '
            f"{result_tables.digits(best.seconds)} s an iteration, "
            f"{best.rate('tokens_per_second'):,.0f} tokens/s</p>"
        )
    parts += [f"<p>{text(line)}</p>" for line in lines]
    parts.append(f'<p class="faint">{text(result_tables.where(result))}</p>')
    if ranked:
        command = _words(result.command(ranked[0].candidate))
        parts.append(f"<h2>Train on the fastest</h2><pre>{command}</pre>")
        parts.append('<div class="charts">' + "".join(_charts(ranked)) + "</div>")
    parts.append(f"<h2>Layouts, fastest first</h2>{layouts_table(result, ranked, failed)}")
    if result.rejected:
        parts.append(rejected_table(result.rejected))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Tuning: {text(result.title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _words(command: list[str]) -> str:
    """A command line that may be broken between words only."""
    return " ".join(f"<span>{text(shlex.quote(word))}</span>" for word in command)


def text(value: object) -> str:
    """Escaped for HTML."""
    return escaping.escape(str(value))


def _charts(ranked: list) -> list[str]:
    names = [entry.candidate.label for entry in ranked]
    seconds = [entry.seconds for entry in ranked]
    memory = [max(entry.memory) / 1e9 for entry in ranked]
    predicted = [entry.predicted for entry in ranked]
    charts = [
        _figure(
            "Seconds an iteration against memory",
            scatter(memory, seconds, names, "GB on the fullest rank", "seconds", "y"),
        ),
        _figure(
            "Predicted against measured seconds",
            scatter(predicted, seconds, names, "predicted", "measured", "xy"),
        ),
    ]
    grid = heat_map(ranked)
    return charts + ([_figure("Best seconds over tp and pp", grid)] if grid else [])


def _figure(title: str, drawing: str) -> str:
    return f"<figure><figcaption>{text(title)}</figcaption>{drawing}</figure>"


# ------------------------------------------------------------------------------------------------
# Charts
# ------------------------------------------------------------------------------------------------


def scatter(
    xs: Sequence[float],
    ys: Sequence[float],
    names: Sequence[str],
    x_title: str,
    y_title: str,
    logarithmic: str,
) -> str:
    """Points with their names as tooltips, the first (fastest) one marked; `logarithmic` axes."""
    x_axis, y_axis = Axis(xs, "x" in logarithmic), Axis(ys, "y" in logarithmic)
    shapes = []
    for value in x_axis.ticks:
        x = x_axis.place(value, LEFT, WIDTH - RIGHT)
        shapes.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        shapes.append(_label(x, HEIGHT - BOTTOM + 20, tick_text(value), "middle"))
    for value in y_axis.ticks:
        y = y_axis.place(value, HEIGHT - BOTTOM, TOP)
        shapes.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        shapes.append(_label(LEFT - 6, y + 5, tick_text(value), "end"))
    if logarithmic == "xy":
        shapes.append(_diagonal(x_axis, y_axis))
    for index in reversed(range(len(xs))):
        x = x_axis.place(xs[index], LEFT, WIDTH - RIGHT)
        y = y_axis.place(ys[index], HEIGHT - BOTTOM, TOP)
        kind, radius = ("dot first", 7) if index == 0 else ("dot", 5)
        tip = f"{names[index]}: {xs[index]:.4g}, {ys[index]:.4g}"
        shapes.append(
            f'<circle class="{kind}" cx="{x}" cy="{y}" r="{radius}">'
            f"<title>{text(tip)}</title></circle>"
        )
    shapes.append(_label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_title, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 14 {middle})"'
    shapes.append(f'<text x="14" y="{middle}" text-anchor="middle" {turned}>{text(y_title)}</text>')
    return _svg(shapes, f"{y_title} over {x_title}", HEIGHT)


def _diagonal(x_axis: "Axis", y_axis: "Axis") -> str:
    """Where predicted and measured are equal, as far as both axes reach."""
    low, high = max(x_axis.low, y_axis.low), min(x_axis.high, y_axis.high)
    if low >= high:
        return ""
    ends = [
        (x_axis.place(v, LEFT, WIDTH - RIGHT), y_axis.place(v, HEIGHT - BOTTOM, TOP))
        for v in (low, high)
    ]
    (x1, y1), (x2, y2) = ends
    return f'<line class="same" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def heat_map(ranked: list) -> str:
    """The fastest layout of each tp and pp: faster is stronger. Empty if there is but one cell."""
    best: dict[tuple[int, int], float] = {}
    for entry in ranked:
        layout = entry.candidate.config.layout
        best.setdefault((layout.tp, layout.pp), entry.seconds)
    tps, pps = (sorted({cell[axis] for cell in best}) for axis in (0, 1))
    if len(best) < 2:
        return ""
    low, high = min(best.values()), max(best.values())
    wide, tall = (WIDTH - LEFT - RIGHT) / len(pps), min(64.0, 260 / len(tps))
    shapes = []
    for row, tp in enumerate(tps):
        y = TOP + row * tall
        shapes.append(_label(LEFT - 8, y + tall / 2 + 4, f"tp {tp}", "end"))
        for column, pp in enumerate(pps):
            seconds = best.get((tp, pp))
            x = LEFT + column * wide
            if seconds is None:
                continue
            share = math.log(high / seconds) / math.log(high / low) if high > low else 1.0
            fill = f"fill: rgba(var(--cool), {0.08 + 0.62 * share:.2f})"
            shapes.append(
                f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{wide - 2:.1f}" '
                f'height="{tall - 2:.1f}" rx="4" style="{fill}"/>'
            )
            shapes.append(
                f'<text class="ink" x="{x + wide / 2:.1f}" y="{y + tall / 2 + 4:.1f}" '
                f'text-anchor="middle">{tick_text(seconds)}</text>'
            )
    bottom = TOP + len(tps) * tall
    for column, pp in enumerate(pps):
        shapes.append(_label(LEFT + (column + 0.5) * wide, bottom + 22, f"pp {pp}", "middle"))
    return _svg(shapes, "best seconds over tp and pp", bottom + 34)


class Axis:
    """A range of values with a margin, and round values to mark in it."""

    def __init__(self, values: Sequence[float], logarithmic: bool):
        self.logarithmic = logarithmic
        low, high = min(values), max(values)
        if logarithmic:
            self.low, self.high = low / 1.2, high * 1.2
            self.ticks = _round_logarithmic(self.low, self.high)
        else:
            margin = 0.08 * (high - low) or 0.1 * high
            self.low, self.high = max(0.0, low - margin), high + margin
            self.ticks = _round_linear(self.low, self.high)

    def place(self, value: float, start: float, end: float) -> float:
        """Where a value lies between two coordinates."""
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return round(start + (value - low) / (high - low) * (end - start), 1)


def _round_linear(low: float, high: float) -> list[float]:
    """About five round values."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * min(m for m in (1, 2, 5, 10) if m * unit >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [index * step for index in range(first, last + 1)]


def _round_logarithmic(low: float, high: float) -> list[float]:
    """1, 2, 5 and their powers of ten."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [m * 10.0**p for p in powers for m in (1, 2, 5)]
    return [value for value in found if low <= value <= high]


def tick_text(value: float) -> str:
    """A few digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _label(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(words)}</text>'


def _svg(shapes: list[str], title: str, height: float) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{text(title)}">'
        + "".join(shapes)
        + "</svg>"
    )


# ------------------------------------------------------------------------------------------------
# Tables
# ------------------------------------------------------------------------------------------------


def layouts_table(result, ranked: list, failed: list) -> str:
    """Every measured layout with all its figures."""
    names = ("Layout", "Size", "GBS", "Sec/it", "spread", "predicted", "tokens/s")
    names += ("TFLOPs", "MFU", "HFU", "GB first/max/last", "Notes")
    left = ("Layout", "Notes")
    head = "".join(f"<th{_class('text' * (n in left))}>{n}</th>" for n in names)
    body = []
    for index, entry in enumerate(ranked + failed):
        kind = "first" if index == 0 and entry.ok else "" if entry.ok else "failed"
        body.append(f"<tr{_class(kind)}>{_row(entry, result)}</tr>")
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def _row(entry, result) -> str:
    config = entry.candidate.config
    numbers = [result_tables.size_text(parameters(config.model))]
    numbers.append(config.training.global_batch_size)
    measured = [""] * 8
    if entry.ok:
        peak, held = result.machine.peak / 1e12, entry.memory
        model, hardware = entry.rate("tflops_model"), entry.rate("tflops_hardware")
        measured = [
            result_tables.digits(entry.seconds),
            f"{entry.spread:.0%}",
            result_tables.digits(entry.predicted),
            f"{entry.rate('tokens_per_second'):,.0f}",
            result_tables.digits(hardware),
            f"{model / peak:.1%}",
            f"{hardware / peak:.1%}",
            "/".join(f"{stage / 1e9:.2f}" for stage in (held[0], max(held), held[-1])),
        ]
    cells = "".join(f"<td>{text(value)}</td>" for value in (*numbers, *measured))
    notes = "; ".join(entry.notes)
    label = f'<td class="text">{text(entry.candidate.label)}</td>'
    return f'{label}{cells}<td class="text long">{text(notes)}</td>'


def rejected_table(rejected: list) -> str:
    """Reasons by kind, and every rejected layout behind a fold."""
    kinds = "".join(
        f'<tr><td>{count}</td><td class="text long">{text(reason)}</td></tr>'
        for count, reason in result_tables.kinds(rejected)
    )
    every = "".join(f"<li>{text(result_tables.rejection(entry))}</li>" for entry in rejected)
    return (
        f"<h2>Rejected without a run: {len(rejected)}</h2>"
        '<div class="scroll"><table>'
        '<tr><th>how many</th><th class="text">why (an example)</th></tr>'
        f"{kinds}</table></div><details><summary>all of them</summary><ul>{every}</ul></details>"
    )


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
