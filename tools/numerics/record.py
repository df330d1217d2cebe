"""Reads the folder of a run, which may still train, may have been killed, or may have old files.

    record = read(Path("runs/a"))       facts of run.json, rows of metrics.jsonl
    differing([options(record.facts) for record in records])      {"lr": [0.001, 0.002], ...}

A run that was resumed in its folder has earlier parts, metrics.jsonl.1 and so on. The rows of a
part end where the next part begins, so no step is in the rows twice. The facts of a run are the
contents of its run.json: configuration, machine and versions.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from architecture.shape import ModelShape
from base.errors import FileError, RunError, UserError
from base.regular_files import MOST_OF_ROWS, read_regular
from config.schema import GROUPS
from distributed.run_lock import in_use
from telemetry.parts import is_of, run_of
from telemetry.row_file import earlier_parts, read_rows
from tools.numerics.checks import fits, is_row, is_texts, is_whole
from tools.planner import run_files

MOST_OPTIONS = 8  # a text names at most this many options that differ
LAST_ROWS = 50  # this many last rows of a part are read, if the whole part is not needed
# The options of the group `run` that can change a run's numbers or its speed.
OF_RUN = ("device", "backend", "compile", "deterministic")
# The result of `options` has the options of these groups, in this order.
ORDER = ("training", "data", "model", "program", "versions", "layout")
# The default of each option, by the option's group and name.
DEFAULTS = {name: {f.name: f.default for f in fields(cls)} for name, cls in GROUPS.items()}


@dataclass(frozen=True)
class Record:
    """The contents of a run's folder."""

    folder: Path
    facts: dict[str, Any]  # the contents of run.json
    rows: list[dict[str, Any]]  # all rows of metrics.jsonl, its earlier parts first
    steps: list[dict[str, Any]]  # the rows of steps, without rows of evaluations
    parts: list[str]  # endings of the files' names, newest first: an empty text, ".2", ".1"
    notes: list[str]  # sentences about missing or damaged files
    resumed_at: tuple[int, ...] = ()  # the first step of each part but the first, ascending

    @property
    def spikes(self) -> list[dict[str, Any]]:
        """The rows of spikes.jsonl, then of its earlier parts; each file is in order of time.

        Rows without a step are left out. Raise UserError if a file cannot be read.
        """
        rows: list[dict[str, Any]] = []
        for ending in self.parts:
            file = self.folder / f"spikes.jsonl{ending}"
            if os.path.lexists(file):
                rows += [row for row in _rows_in(file) if is_whole(row.get("iteration"))]
        return rows

    @property
    def left_at(self) -> int | None:
        """The step at which the loss left the band of --expect; None if it is in it, or has none.

        Raise UserError if expected.jsonl cannot be read.
        """
        file = self.folder / "expected.jsonl"
        rows = _rows_in(file) if os.path.lexists(file) else []
        rows = [row for row in rows if is_whole(row.get("iteration"))]
        return rows[-1]["iteration"] if rows and rows[-1].get("outside") else None

    def last(self, name: str) -> Any:
        """Return the newest value of a column; None if no row has it."""
        for row in reversed(self.rows):
            if name in row:
                return row[name]
        return None

    @property
    def total(self) -> int | None:
        """The number of the run's last step; None if the run ends after a number of samples."""
        steps = self.facts["config"].get("training", {}).get("steps")
        return self.facts.get("total_steps") if steps is None else steps  # of a run with phases

    @property
    def state(self) -> str:
        """The state of the run: running, finished, stopped, or empty (no step is done).

        A run that ends after a number of samples is finished when less than a batch is left.
        """
        if in_use(str(self.folder)):
            return "running"
        if not self.steps:
            return "empty"
        last_step = self.steps[-1]
        if self.total:  # the run ends after a number of steps
            is_complete = last_step["iteration"] >= self.total
        else:
            samples = self.facts["config"]["training"]["train_samples"]
            samples_left = samples - last_step["consumed_samples"]
            is_complete = samples_left < last_step["global_batch_size"]
        return "finished" if is_complete else "stopped"


def find(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs in `folder` at any depth, which are those with a run.json."""
    for path, folders, files in os.walk(folder):
        # os.walk goes into the folders that are left in this list, in its order.
        folders[:] = [name for name in sorted(folders) if not name.startswith("checkpoints")]
        if "run.json" in files:
            yield Path(path)


def read_steps(folder: Path) -> Record:
    """Return the record of a run; raise UserError if it is no run or has no row of a step."""
    record = read(folder)
    if not record.steps:
        raise RunError("; ".join([f"{folder} has no row of a step", *record.notes]))
    return record


def read(folder: Path, whole: bool = True) -> Record:
    """Return the record of a run; raise UserError if it has no readable run.json.

    whole: read all rows; otherwise, per part, the first row, the newest validation and LAST_ROWS.
    """
    try:
        facts = run_files.facts_of(str(folder / "run.json"))
    except UserError as error:
        raise RunError(f"{folder} is no folder of a run: {error}") from None
    config = facts["config"]
    notes: list[str] = []
    # Another version's run.json may lack options of this version, and have options of its own.
    missing = 0
    unknown: list[str] = []
    for group, defaults in DEFAULTS.items():
        recorded = _group(folder, config, group)
        missing += len(defaults.keys() - recorded.keys())
        unknown += sorted(recorded.keys() - defaults.keys())
    if missing:
        whose = f"{folder}/run.json is of an older version: it"
        notes.append(f"{whose} lacks {missing} options, whose defaults are taken")
    if unknown:
        notes.append(f"{folder}/run.json has options of another version: {', '.join(unknown)}")
    _check_facts(folder, facts)
    # Read the newest part, and then the earlier parts from the newest to the oldest. Of each
    # earlier part, keep only the rows before the first step of the part that follows it.
    rows = _read_part(folder / "metrics.jsonl", whole, notes)
    endings = [""]
    resumed_at: list[int] = []
    earlier: list[Path] = []
    if config.get("run", {}).get("resume"):
        earlier = earlier_parts(folder / "metrics.jsonl")
    run = run_of(folder / "run.json")
    for path in reversed(earlier):
        if not is_of(str(folder), path.suffix, run):
            continue  # another run has used the folder meanwhile
        first_step = rows[0]["iteration"] if rows else math.inf
        if first_step == 1:
            break  # older parts belong to another run, since this run began at step 1
        part = _read_part(path, whole, notes)
        before = [row for row in part if row["iteration"] < first_step]
        if before and rows:
            resumed_at.insert(0, int(first_step))
        rows = before + rows
        endings.append(path.suffix)
    steps = _rows_of_steps(rows)
    return Record(folder, facts, rows, steps, endings, notes, tuple(resumed_at))


def _group(folder: Path, config: dict[str, Any], group: str) -> dict[str, Any]:
    """Return the recorded options of a group; raise UserError if a value has another type."""
    recorded = config.get(group, {})
    if not isinstance(recorded, dict):
        raise RunError(f"{folder}/run.json: {group} is {recorded!r:.80}, not a table of options")
    for field in fields(GROUPS[group]):
        if not fits(field, value := recorded.get(field.name)):
            raise RunError(
                f"{folder}/run.json: the option {field.name} is {value!r:.80}, which has another "
                f"type than the option"
            )
    return recorded


def _check_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Raise UserError if a fact besides the options has another type than a run writes."""
    right = {
        "cluster": lambda value: isinstance(value, dict) and is_whole(value.get("ranks", 1), 1),
        "versions": lambda value: isinstance(value, dict),
        "started": lambda value: isinstance(value, str),
        "parameters": is_whole,
        "total_steps": lambda value: is_whole(value, 1),
        "unknown": lambda value: isinstance(value, dict),
        "command": is_texts,
        "blocks_per_stage": lambda value: isinstance(value, list) and all(map(is_whole, value)),
    }
    for name, is_right in right.items():
        if facts.get(name) is not None and not is_right(facts[name]):
            raise RunError(f"{folder}/run.json: {name} is {facts[name]!r:.80}, which no run writes")
    training = facts["config"].get("training", {})
    ends = [training.get("steps"), training.get("train_samples"), facts.get("total_steps")]
    if all(end is None for end in ends):
        raise RunError(
            f"{folder}/run.json says no length of the run: it has neither steps nor train_samples"
        )


def last_two_parts(folder: Path) -> list[Record]:
    """Return two records of a run: before its last start in its folder, and since that start.

    Steps that were trained in both parts are in both records, which are compared. Raise UserError
    if the folder has no earlier part, or if a part has no row of a step.
    """
    run = run_of(folder / "run.json")
    found = earlier_parts(folder / "metrics.jsonl")
    earlier = [path for path in found if is_of(str(folder), path.suffix, run)]
    if not earlier:
        raise RunError(f"{folder} has no earlier part of a run: give a second run to compare")
    parts = []
    for ending in (earlier[-1].suffix, ""):
        facts = run_files.facts_of(str(folder / f"run.json{ending}"))
        for group in DEFAULTS:
            _group(folder, facts["config"], group)
        _check_facts(folder, facts)
        notes: list[str] = []
        rows = _read_part(folder / f"metrics.jsonl{ending}", True, notes)
        steps = _rows_of_steps(rows)
        if not steps:
            raise RunError(f"{folder}/metrics.jsonl{ending} has no row of a step")
        parts.append(Record(folder, facts, rows, steps, [ending], notes))
    return parts


def _rows_of_steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of steps, without the rows of evaluations, which have no loss."""
    return [row for row in rows if isinstance(row.get("loss"), float)]


def _read_part(path: Path, whole: bool, notes: list[str]) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl; add notes about missing files and damaged lines.

    whole: read all rows; otherwise the first row, the newest validation and LAST_ROWS.
    """
    try:
        lines = read_regular(path, MOST_OF_ROWS).splitlines(keepends=True)
    except OSError as error:
        notes.append(f"cannot read {path}: {error.strerror}")
        return []
    if lines and not lines[-1].endswith(b"\n"):
        notes.append(f"{path}: the last line is cut off and not read")
        del lines[-1]
    if not whole:  # the first row is needed since it tells where the part before this one ends
        validations = [line for line in lines if b'"validation_loss"' in line]
        first_line = lines[:1]
        lines = first_line + validations[-1:] + lines[1:][-LAST_ROWS:]
    rows = [row for row in read_rows(b"".join(lines)) if is_row(row)]
    if len(rows) < len(lines):
        notes.append(f"{path}: {len(lines) - len(rows)} lines are damaged and not read")
    return rows


def _rows_in(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON rows; raise UserError if it cannot be read."""
    try:
        return read_rows(read_regular(file, MOST_OF_ROWS))
    except OSError as error:
        raise FileError(f"cannot read {file}: {error.strerror}") from None


def options(facts: dict[str, Any]) -> dict[str, Any]:
    """Return a run's options and versions by name; the options of the layout come last.

    facts: run.json; an option that it lacks has its default. The result has no options whose values
    follow from other options, such as ffn_hidden, no options of `run` that change neither numbers
    nor speed, and no options that only the run's version had.
    """
    groups: dict[str, dict[str, Any]] = {}
    for group, defaults in DEFAULTS.items():
        recorded = facts["config"].get(group, {})
        groups[group] = {name: recorded.get(name, default) for name, default in defaults.items()}
    # An option of the model is left out if its value is None, or follows from the model's other
    # options, as --ffn-hidden usually does.
    shape = groups["model"]
    model = ModelShape(**{name: shape[name] for name in DEFAULTS["model"]})
    derived = model.derived() | {"max_positions": model.seq_length}
    groups["model"] = {}
    for name, value in shape.items():
        if value not in (None, derived.get(name)):
            groups["model"][name] = value
    groups["program"] = {"trine": facts.get("version")}
    groups["versions"] = facts.get("versions", {})
    options_by_name = {name: groups["run"][name] for name in OF_RUN}
    for group in ORDER:
        options_by_name |= groups[group]
    return options_by_name


def differing(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the names whose values are not equal in all tables, each with its value per table.

    For example, {"lr": [0.001, 0.002]}. tables: options by name, a table per run. The value is None
    in a table that lacks the name.
    """
    values_by_name: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name) for table in tables]
        all_equal = values == values[:1] * len(values)
        if not all_equal:
            values_by_name[name] = values
    return values_by_name


def option_lines(unequal: Sequence[Sequence[Any]], word: str) -> list[str]:
    """Return the lines about options that differ between two runs A and B.

    unequal: for each option (name, value in A, value in B), of which the first MOST_OPTIONS get a
    line. word: begins each line.
    """
    lines = [f"{word}{name}: {a} in A, {b} in B" for name, a, b in unequal[:MOST_OPTIONS]]
    if len(unequal) > MOST_OPTIONS:
        lines.append(f"and {len(unequal) - MOST_OPTIONS} more options, which --json lists")
    return lines
