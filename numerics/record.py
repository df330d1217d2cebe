"""Reads the folder of a run, also of one that trains, was killed, or has an older version's files.

    record = read(Path("runs/a"))       facts of run.json, rows of metrics.jsonl
    differing([options(one.facts) for one in records])      {"lr": [0.001, 0.002], ...}

A run that was resumed in its folder has earlier parts, metrics.jsonl.1 and so on. The rows of a
part end where the next part begins, so no step is in the rows twice.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from config.messages import UserError
from config.schema import GROUPS, ModelShape
from distributed.run_lock import in_use
from planner import run_files
from telemetry.row_file import read_rows

LAST_ROWS = 50  # of a part, if not the whole part is asked for
# The options of `run` that can change a run's numbers or its speed.
OF_RUN = ("device", "backend", "compile", "deterministic")
ORDER = ("training", "data", "model", "program", "versions", "layout")
DEFAULTS = {name: {f.name: f.default for f in fields(cls)} for name, cls in GROUPS.items()}


@dataclass(frozen=True)
class Record:
    """Everything that was read of a run.

    facts: run.json. rows: of metrics.jsonl and its earlier parts, the oldest first; steps: those
    of steps, without evaluations. parts: endings of the names of these files, newest first: an
    empty text, then .2 and so on. notes: sentences about what is missing or damaged.
    """

    folder: Path
    facts: dict[str, Any]
    rows: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    parts: list[str]
    notes: list[str]

    @property
    def spikes(self) -> list[dict[str, Any]]:
        """The rows of spikes.jsonl and its earlier parts, those of a file in order of time."""
        found: list[dict[str, Any]] = []
        for ending in self.parts:
            file = self.folder / f"spikes.jsonl{ending}"
            if file.exists():
                found += read_rows(file.read_bytes())
        return found

    def last(self, name: str) -> Any:
        """Return the newest value of a column; None if no row has it."""
        for row in reversed(self.rows):
            if name in row:
                return row[name]
        return None

    @property
    def total(self) -> int | None:
        """The run's last step; None if the run ends after a number of samples."""
        return self.facts["config"].get("training", {}).get("steps")

    @property
    def state(self) -> str:
        """A word: running, finished, stopped or empty. In a run that ends after a number of
        samples, the last step is the one after which less than a batch is left.
        """
        if in_use(str(self.folder)):
            return "running"
        if not self.steps:
            return "empty"
        done = self.steps[-1]
        if self.total:
            is_complete = done["iteration"] >= self.total
        else:
            left = self.facts["config"]["training"]["train_samples"] - done["consumed_samples"]
            is_complete = left < done["global_batch_size"]
        return "finished" if is_complete else "stopped"


def find(folder: Path) -> Iterator[Path]:
    """Yield the folders in `folder` that have a run.json, except folders of checkpoints."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in sorted(folders) if not name.startswith("checkpoints")]
        if "run.json" in files:
            yield Path(place)


def read_steps(folder: Path) -> Record:
    """Return the record of a run; UserError if it is no run or has no row of a step."""
    record = read(folder)
    if not record.steps:
        raise UserError("; ".join([f"{folder} has no row of a step", *record.notes]))
    return record


def read(folder: Path, whole: bool = True) -> Record:
    """Return the record of a run; UserError if it has no readable run.json.

    whole: False reads the first row, the newest validation and the last rows of each part.
    """
    try:
        facts = run_files.facts_of(str(folder / "run.json"))
    except UserError as error:
        raise UserError(f"{folder} is no folder of a run: {error}") from None
    config = facts["config"]
    notes: list[str] = []
    missing = 0
    for group, defaults in DEFAULTS.items():
        missing += len(defaults.keys() - config.get(group, {}).keys())
    if missing:
        whose = f"{folder}/run.json is of an older version: it"
        notes.append(f"{whose} lacks {missing} options, whose defaults are taken")
    rows = _read_part(folder / "metrics.jsonl", whole, notes)
    endings = [""]
    earlier: list[Path] = []
    if config.get("run", {}).get("resume"):
        earlier = sorted(folder.glob("metrics.jsonl.*"), key=lambda path: int(path.suffix[1:]))
    for path in reversed(earlier):
        first = rows[0]["iteration"] if rows else math.inf
        if first == 1:
            break
        part = _read_part(path, whole, notes)
        rows = [row for row in part if row["iteration"] < first] + rows
        endings.append(path.suffix)
    steps = [row for row in rows if isinstance(row.get("loss"), float)]
    return Record(folder, facts, rows, steps, endings, notes)


def last_two_parts(folder: Path) -> list[Record]:
    """Return what a run has recorded before its last start in its folder, and since that start.

    Raise UserError if the folder has no earlier part, or if one of the two has no row of a step.
    """
    earlier = sorted(int(path.suffix[1:]) for path in folder.glob("metrics.jsonl.*"))
    if not earlier:
        raise UserError(f"{folder} has no earlier part of a run: give a second run to compare")
    parts = []
    for ending in (f".{earlier[-1]}", ""):
        facts = run_files.facts_of(str(folder / f"run.json{ending}"))
        notes: list[str] = []
        rows = _read_part(folder / f"metrics.jsonl{ending}", True, notes)
        steps = [row for row in rows if isinstance(row.get("loss"), float)]
        if not steps:
            raise UserError(f"{folder}/metrics.jsonl{ending} has no row of a step")
        parts.append(Record(folder, facts, rows, steps, [ending], notes))
    return parts


def _read_part(path: Path, whole: bool, notes: list[str]) -> list[dict[str, Any]]:
    """Return the rows of a file; add a note for whatever in it is not a row."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        notes.append(f"cannot read {path}: {error.strerror}")
        return []
    if lines and not lines[-1].endswith(b"\n"):
        notes.append(f"{path}: the last line is cut off and not read")
        del lines[-1]
    if not whole:
        evaluations = [line for line in lines if b'"validation_loss"' in line]
        lines = lines[:1] + evaluations[-1:] + lines[1:][-LAST_ROWS:]
    rows = [row for row in read_rows(b"".join(lines)) if "iteration" in row]
    if len(rows) < len(lines):
        notes.append(f"{path}: {len(lines) - len(rows)} lines are damaged and not read")
    return rows


def options(facts: dict[str, Any]) -> dict[str, Any]:
    """Return a run's options and versions; those of the layout come last.

    Left out are options at values that follow from others, such as ffn_hidden, and the options of
    `run` that change neither numbers nor speed. An option that run.json lacks has its default.
    """
    config = facts["config"]
    groups = {name: DEFAULTS[name] | config.get(name, {}) for name in DEFAULTS}
    shape = groups["model"]
    model = ModelShape(**{name: shape[name] for name in DEFAULTS["model"]})
    follows = model.derived() | {"max_positions": model.seq_length}
    groups["model"] = {}
    for name, value in shape.items():
        if value not in (None, follows.get(name)):
            groups["model"][name] = value
    groups["program"] = {"trine": facts.get("version")}
    groups["versions"] = facts.get("versions", {})
    found = {name: groups["run"][name] for name in OF_RUN}
    for group in ORDER:
        found |= groups[group]
    return found


def differing(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the names whose values are not the same in all tables, with a value per table.

    A table that lacks a name counts as None.
    """
    found: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name) for table in tables]
        if values != values[:1] * len(values):
            found[name] = values
    return found
