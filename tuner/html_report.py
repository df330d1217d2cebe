"""report.html: one page with its charts as inline SVG, no external resource, dark and light."""

import html as escaping
import shlex

from config.model_stats import parameters
from planner.layouts import Rejected
from tuner import charts, result_tables
from tuner.result_tables import LayoutResult, SearchResult

STYLE = """
:root { color-scheme: light dark; --back: #fbfbf9; --card: #fff; --ink: #1c1d20; --faint: #696c74;
  --line: #dcdcd6; --mark: #2563b8; --good: #13795b; --bad: #b3372f; }
@media (prefers-color-scheme: dark) { :root { --back: #15171b; --card: #1d2026; --ink: #e8e8e4;
  --faint: #9ea2ab; --line: #343841; --mark: #6ea8ff; --good: #4cc79a; --bad: #ff8178; } }
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


def html(
    result: SearchResult, ranked: list[LayoutResult], failed: list[LayoutResult], lines: list[str]
) -> str:
    """The whole page; `lines` is the summary."""
    parts = [f"<h1>Tuning: {text(result.title)}</h1>"]
    if ranked:
        best = ranked[0]
        parts.append(
            f'<p class="best">Fastest: <b>{text(best.candidate.label)}</b>, '
            f"{result_tables.format_number(best.seconds)} s an iteration, "
            f"{best.rate('tokens_per_second'):,.0f} tokens/s</p>"
        )
    parts += [f"<p>{text(line)}</p>" for line in lines]
    parts.append(f'<p class="faint">{text(result_tables.environment_line(result))}</p>')
    if ranked:
        command = _command_line(result.command(ranked[0].candidate))
        parts.append(f"<h2>Train on the fastest</h2><pre>{command}</pre>")
        parts.append('<div class="charts">' + "".join(_figures(ranked)) + "</div>")
    parts.append(f"<h2>Layouts, fastest first</h2>{_layouts_table(result, ranked, failed)}")
    if result.rejected:
        parts.append(_rejected_table(result.rejected))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Tuning: {text(result.title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _command_line(command: list[str]) -> str:
    """A command line that may be broken between words only."""
    return " ".join(f"<span>{text(shlex.quote(word))}</span>" for word in command)


def text(value: object) -> str:
    """Escaped for HTML."""
    return escaping.escape(str(value))


def _figures(ranked: list[LayoutResult]) -> list[str]:
    """The charts: seconds against memory, predictions, and the best of each tp and pp."""
    names = [one.candidate.label for one in ranked]
    seconds = [one.seconds for one in ranked]
    memory = [max(one.memory) / 1e9 for one in ranked]
    predicted = [one.predicted for one in ranked]
    drawings = {
        "Seconds an iteration against memory": charts.scatter(
            memory, seconds, names, ("GB on the fullest rank", "seconds")
        ),
        "Predicted against measured seconds": charts.scatter(
            predicted, seconds, names, ("predicted seconds", "measured seconds"), same_scale=True
        ),
    }
    cells: dict[tuple[int, int], float] = {}
    for one in ranked:
        layout = one.candidate.config.layout
        cells.setdefault((layout.tp, layout.pp), one.seconds)
    if len(cells) > 1:
        drawings["Best seconds over tp and pp"] = charts.heat_map(cells)
    return [
        f"<figure><figcaption>{text(title)}</figcaption>{drawing}</figure>"
        for title, drawing in drawings.items()
    ]


# ------------------------------------------------------------------------------------------------
# Tables
# ------------------------------------------------------------------------------------------------


def _layouts_table(
    result: SearchResult, ranked: list[LayoutResult], failed: list[LayoutResult]
) -> str:
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


def _row(entry: LayoutResult, result: SearchResult) -> str:
    config = entry.candidate.config
    numbers = [result_tables.format_size(parameters(config.model))]
    numbers.append(config.training.global_batch_size)
    measured = [""] * 8
    if entry.ok:
        peak, held = result.machine.peak / 1e12, entry.memory
        model, hardware = entry.rate("tflops_model"), entry.rate("tflops_hardware")
        measured = [
            result_tables.format_number(entry.seconds),
            f"{entry.spread:.0%}",
            result_tables.format_number(entry.predicted),
            f"{entry.rate('tokens_per_second'):,.0f}",
            result_tables.format_number(hardware),
            f"{model / peak:.1%}",
            f"{hardware / peak:.1%}",
            "/".join(f"{stage / 1e9:.2f}" for stage in (held[0], max(held), held[-1])),
        ]
    cells = "".join(f"<td>{text(value)}</td>" for value in (*numbers, *measured))
    notes = "; ".join(entry.notes)
    label = f'<td class="text">{text(entry.candidate.label)}</td>'
    return f'{label}{cells}<td class="text long">{text(notes)}</td>'


def _rejected_table(rejected: list[Rejected]) -> str:
    """The reasons, and every rejected layout in a list that opens on a click."""
    reasons = "".join(
        f'<tr><td>{count}</td><td class="text long">{text(reason)}</td></tr>'
        for count, reason in result_tables.rejections_by_reason(rejected)
    )
    every = "".join(f"<li>{text(result_tables.rejection_line(entry))}</li>" for entry in rejected)
    return (
        f"<h2>Rejected without a run: {len(rejected)}</h2>"
        '<div class="scroll"><table>'
        '<tr><th>how many</th><th class="text">why (an example)</th></tr>'
        f"{reasons}</table></div><details><summary>all of them</summary><ul>{every}</ul></details>"
    )


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
