"""report.html: one page with its charts as inline SVG, no external resource, dark and light."""

import re
import shlex
from collections.abc import Iterable, Sequence
from html import escape

from config.model_stats import parameters
from planner.hardware import Machine
from planner.layouts import Rejected
from tuner import charts, result_tables
from tuner.result_tables import LayoutResult, SearchResult, format_number

STYLE = """
:root { color-scheme: light dark; --back: #fbfbf9; --card: #fff; --ink: #1c1d20; --faint: #696c74;
  --line: #dcdcd6; --mark: #2563b8; --good: #13795b; --bad: #b3372f; }
@media (prefers-color-scheme: dark) { :root { --back: #15171b; --card: #1d2026; --ink: #e8e8e4;
  --faint: #9ea2ab; --line: #343841; --mark: #6ea8ff; --good: #4cc79a; --bad: #ff8178; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 1240px; background: var(--back);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .4rem; } h2 { font-size: 1.1rem; margin: 1.8rem 0 .5rem; }
p { margin: .3rem 0; overflow-wrap: anywhere; } .faint { color: var(--faint); font-size: .88rem; }
.best { font-size: 1.15rem; } .best b { color: var(--good); }
.charts { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
figure, .scroll, pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figure { margin: 0; padding: .8rem; } figcaption { font-weight: 600; margin-bottom: .3rem; }
svg { width: 100%; height: auto; display: block; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .83rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .45rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; } th { color: var(--faint); font-weight: 600; }
td.text, th.text { text-align: left; } td.long { white-space: normal; min-width: 9rem; }
tr:last-child td { border-bottom: 0; } tr.first td { color: var(--good); font-weight: 600; }
tr.failed td { color: var(--bad); } pre span { display: inline-block; }
pre { white-space: pre-wrap; padding: .8rem; font-size: .84rem; }
details { margin-top: .5rem; } summary { cursor: pointer; }
"""


def html(result: SearchResult) -> str:
    """The whole page."""
    parts, ranked, rows = [f"<h1>Tuning: {escape(result.title)}</h1>"], result.ranked, result.rows
    if ranked:
        best = ranked[0]
        parts.append(
            f'<p class="best">Fastest: <b>{escape(best.candidate.label)}</b>, '
            f"{format_number(best.seconds)} s an iteration, "
            f"{best.rate('tokens_per_second'):,.0f} tokens/s</p>"
        )
    parts += [f"<p>{escape(line)}</p>" for line in result_tables.summary(result)]
    parts.append(f'<p class="faint">{escape(result_tables.environment_line(result))}</p>')
    if ranked:
        words = result.command(ranked[0].candidate)  # the line may be broken between words only
        command = " ".join(f"<span>{escape(shlex.quote(word))}</span>" for word in words)
        parts.append(f"<h2>Train on the fastest</h2><pre>{command}</pre>")
        parts.append('<div class="charts">' + "".join(_figures(ranked)) + "</div>")
    # The CSS class of each row; the first one is the fastest, if any ran.
    kinds = ["first" if ranked else "failed"] + ["" if row.ok else "failed" for row in rows[1:]]
    cells = [_cells(row, result.machine) for row in rows]
    parts.append(f"<h2>Layouts, fastest first</h2>{_table(LAYOUTS, zip(kinds, cells))}")
    if result.rejected:
        parts.append(_rejected_table(result.rejected))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Tuning: {escape(result.title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _figures(ranked: list[LayoutResult]) -> list[str]:
    """The charts: seconds against memory, predictions, and the best of each tp and pp."""
    memory = [(row.candidate.label, max(row.memory) / 1e9, row.seconds) for row in ranked]
    predicted = [
        (row.candidate.label, row.candidate.prediction.seconds, row.seconds) for row in ranked
    ]
    by_memory = charts.scatter(memory, "GB on the fullest rank", "seconds")
    accuracy = charts.scatter(predicted, "predicted seconds", "measured seconds", same_scale=True)
    drawings = {"Seconds an iteration against memory": by_memory}
    drawings["Predicted against measured seconds"] = accuracy
    cells: dict[tuple[int, int], float] = {}
    for row in ranked:
        layout = row.candidate.config.layout
        cells.setdefault((layout.tp, layout.pp), row.seconds)
    if len(cells) > 1:
        drawings["Best seconds over tp and pp"] = charts.heat_map(cells)
    return [
        f"<figure><figcaption>{escape(title)}</figcaption>{drawing}</figure>"
        for title, drawing in drawings.items()
    ]


# ---- Tables --------------------------------------------------------------------------------------

# The columns of both tables, with the CSS class of their cells.
NUMBERS = ("Size", "GBS", "Sec/it", "spread", "predicted", "tokens/s", "TFLOPs", "MFU", "HFU")
LAYOUTS = {"Layout": "text"} | dict.fromkeys((*NUMBERS, "GB first/max/last"), "")
LAYOUTS |= {"Notes": "text long"}
REASONS = {"how many": "", "why (an example)": "text long"}


def _table(columns: dict[str, str], rows: Iterable[tuple[str, Sequence[object]]]) -> str:
    """A table; each row is its own CSS class, and its cells."""
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in columns.items())
    lines = [f"<tr>{head}</tr>"]
    for row_kind, row in rows:
        cells = zip(columns.values(), row, strict=True)
        line = "".join(f'<td class="{kind}">{escape(str(value))}</td>' for kind, value in cells)
        lines.append(f'<tr class="{row_kind}">{line}</tr>')
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _cells(row: LayoutResult, machine: Machine) -> list[object]:
    config, measured = row.candidate.config, [""] * 8
    if row.ok:
        peak, memory = machine.peak / 1e12, row.memory
        model, hardware = row.rate("tflops_model"), row.rate("tflops_hardware")
        measured = [
            format_number(row.seconds),
            f"{row.spread:.0%}",
            format_number(row.candidate.prediction.seconds),
            f"{row.rate('tokens_per_second'):,.0f}",
            format_number(hardware),
            f"{model / peak:.1%}",
            f"{hardware / peak:.1%}",
            "/".join(f"{stage / 1e9:.2f}" for stage in (memory[0], max(memory), memory[-1])),
        ]
    size = result_tables.format_size(parameters(config.model))
    batch = config.training.global_batch_size
    return [row.candidate.label, size, batch, *measured, "; ".join(row.notes)]


def _rejected_table(rejected: list[Rejected]) -> str:
    """How many have the same reason but for its numbers, and all in a list that a click opens."""
    alike: dict[str, list[str]] = {}
    for entry in rejected:
        alike.setdefault(re.sub(r"\d[\d.]*", "#", entry.reason), []).append(entry.reason)
    counted = sorted(((len(reasons), reasons[0]) for reasons in alike.values()), reverse=True)
    reasons = _table(REASONS, (("", cells) for cells in counted))
    every = "".join(f"<li>{escape(result_tables.rejection_line(entry))}</li>" for entry in rejected)
    return (
        f"<h2>Rejected without a run: {len(rejected)}</h2>{reasons}"
        f"<details><summary>all of them</summary><ul>{every}</ul></details>"
    )
