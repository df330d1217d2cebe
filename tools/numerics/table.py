"""All runs of a folder, one line each: `python runs.py list [FOLDER]`.

    rows, notes = table(Path("runs"), "loss")
    print(text(rows, notes))

The last columns are the options in which the runs differ. Options that all runs share are left out.
The columns of FORMATS come before them: a row is a dictionary with a value for each column of
FORMATS, and "options", the values of the last columns.
"""

import math
import statistics
from pathlib import Path
from typing import Any

from base.errors import RunError, UserError, printable
from tools.numerics.record import Record, differing, find, options, read
from tools.report.text_table import columns

MOST_OPTIONS = 8  # the text has this many columns of options; --json has all
MOST_NOTES = 12  # the text has at most this many lines of notes
RECENT_STEPS = 20  # the speed is the median of these last steps
SHOWN = ("tp", "pp", "cp", "dp", "steps")  # options that the columns of FORMATS show already
# The columns of every run, with the format of their values.
FORMATS = {
    "run": "",
    "state": "",
    "step": "",
    "of": "",
    "tokens": ",",
    "loss": ".4f",
    "validation": ".4f",
    "tokens/s": ",.0f",
    "parameters": ",",
    "layout": "",
    "date": ".16",
}


def table(folder: Path, sort: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a dictionary of columns per run in `folder`, and notes about damaged runs.

    sort: the column of FORMATS by which the runs are sorted; runs without a value in it come last.
    Raise UserError if the folder has no run that can be read.
    """
    rows: list[dict[str, Any]] = []
    tables: list[dict[str, Any]] = []
    notes: list[str] = []
    for place in find(folder):
        try:
            record = read(place, whole=False)
            tables.append(options(record.facts))
        except UserError as error:
            notes.append(str(error))
        else:
            rows.append(_row(record, folder))
            if (step := record.left_at) is not None:
                notes.append(f"{place}: the loss left the band of --expect at step {step}")
            notes += record.notes
    if not rows:
        raise RunError("; ".join([f"{folder} has no folder with a run.json to read", *notes]))
    differing_options = differing(tables)  # by the option's name, a value for each run
    for number, row in enumerate(rows):
        shown = [name for name in differing_options if name not in SHOWN]
        row["options"] = {name: differing_options[name][number] for name in shown}
    rows.sort(key=lambda row: (row[sort] is None, row[sort] or 0))  # rows without a value are last
    return _as_tree(rows), notes


def _as_tree(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with those of branches after the run that they are from, and indented.

    A branch whose run is not in the table stays where it is; "from" names run and step anyway.
    """
    names = {row["name"]: row for row in rows if row["name"]}
    children: dict[int, list[dict[str, Any]]] = {}
    roots = []
    for row in rows:
        parent = names.get(row["parent"])
        if parent is None or parent is row:
            roots.append(row)
        else:
            children.setdefault(id(parent), []).append(row)
    ordered: list[dict[str, Any]] = []

    def add(row: dict[str, Any], depth: int) -> None:
        """Append a row and its branches."""
        ordered.append(row | {"depth": depth})
        for child in children.pop(id(row), ()):
            add(child, depth + 1)

    for row in roots:
        add(row, 0)
    for row in rows:  # damaged files may say that two runs are branches of each other
        if id(row) in children:
            add(row, 0)
    return ordered


def _row(record: Record, folder: Path) -> dict[str, Any]:
    """Return the columns of a run by name, for a table of the runs in `folder`.

    Unknown values and losses that are not finite are None.
    """
    layout = record.facts["config"].get("layout", {})
    sizes = [f"{name}{layout.get(name, 1)}" for name in ("tp", "pp", "cp", "dp")]
    speeds = [row["tokens_per_second"] for row in record.steps[-RECENT_STEPS:]]
    speed = statistics.median(speeds) if speeds else None
    branch = record.facts.get("branch")
    branch = branch if isinstance(branch, dict) else {}
    past = record.facts["config"].get("past")
    origin = branch.get("checkpoint")
    row = {
        "name": past.get("run") if isinstance(past, dict) else None,
        "parent": branch.get("run"),
        "branch": f"{origin} at step {branch.get('step')}" if isinstance(origin, str) else None,
        "run": str(record.folder.relative_to(folder)),
        "state": record.state,
        "step": record.last("iteration"),
        "of": record.total,
        "tokens": record.last("consumed_tokens"),
        "loss": record.last("loss"),
        "validation": record.last("validation_loss"),
        "tokens/s": speed,
        "parameters": record.facts.get("parameters"),
        "layout": " ".join(sizes),
        "date": record.facts.get("started"),
    }
    for name in ("loss", "validation"):
        if row[name] is not None and not math.isfinite(row[name]):
            row[name] = None
    return row


def text(rows: list[dict[str, Any]], notes: list[str]) -> str:
    """Return the result of `table` as text: a line per run, and the notes below the lines.

    The text has at most MOST_OPTIONS columns of options, and MOST_NOTES notes.
    """
    names = list(rows[0]["options"])
    heads = [*FORMATS, *names[:MOST_OPTIONS]]
    cells = [heads]  # a list of cells for each line
    for row in rows:
        values = row | row["options"]
        if row.get("depth"):
            values["run"] = "  " * (row["depth"] - 1) + "└ " + row["run"]
        if row.get("branch"):
            values["run"] += f" (step {row['branch'].rsplit(' ', 1)[-1]})"
        cells.append([_cell(values[name], FORMATS.get(name, "")) for name in heads])
    lines = columns(cells, texts=("run", "state", "layout"))
    if len(names) > MOST_OPTIONS:
        lines.append(f"the runs differ in {len(names) - MOST_OPTIONS} more options: see --json")
    lines += [f"note: {note}" for note in notes[:MOST_NOTES]]
    if len(notes) > MOST_NOTES:
        lines.append(f"and {len(notes) - MOST_NOTES} more notes: see --json")
    return "\n".join(map(printable, lines))


def _cell(value: Any, form: str) -> str:
    """Return a value in a format of Python's format(), or "-" for None."""
    if value is None:
        return "-"
    return format(value, form)
