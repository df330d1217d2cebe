"""Writes what a search found: table.md, results.csv, report.html; and says it in a few lines.

    lines = write(result, Path("runs/tune"))

Every row passes through `rows.check`, as `plan.py check` does, before it is written: what that
finds stands in the row's notes.
"""

import shlex
from pathlib import Path

from planner import published_rows
from tuner import html_report, result_tables
from tuner.result_tables import Entry, Result

TOP = 5  # layouts that are told on the terminal


def write(result: Result, out: Path) -> list[str]:
    """Write the three files into `out`; the lines to tell a person."""
    out.mkdir(parents=True, exist_ok=True)
    ranked, failed = result_tables.entries(result)
    found = ranked + failed
    values = [result_tables.row(entry, index, result) for index, entry in enumerate(found, start=1)]
    _check(values, found)
    lines = result_tables.summary(result, ranked)
    (out / "table.md").write_text(
        "\n".join(result_tables.markdown(result, ranked, failed, lines)) + "\n"
    )
    (out / "results.csv").write_text(result_tables.csv_text(values, found))
    (out / "report.html").write_text(html_report.html(result, ranked, failed, lines))
    told = [result_tables.top_line(entry) for entry in ranked[:TOP]] + ["", *lines]
    if ranked:
        command = shlex.join(result.command(ranked[0].candidate))
        told += ["", "to train on the fastest:", f"    {command}"]
    return [*told, "", f"written: {out}/table.md, {out}/results.csv, {out}/report.html"]


def _check(values: list[dict[str, str]], found: list[Entry]) -> None:
    """Note with each entry what contradicts itself, or another row."""
    for finding in published_rows.check(values) if values else []:
        found[int(finding.row_id.split("-")[1]) - 1].notes.append(f"check: {finding.text}")
