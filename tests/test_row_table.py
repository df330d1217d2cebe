"""Files of measured rows: what is read is what is written, all else is a mistake with its place.

Nothing that a cell holds may end the reading with another exception, or be read as something else.
"""

import csv
import io
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import ROOT

from base.errors import UserError
from benchmarks.planner import published_rows, row_table, stated_rows
from benchmarks.planner.row_table import Cells, Row

PUBLIC = ROOT / "benchmarks" / "data" / "public"
PLAIN = re.compile(r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?|\.[0-9]+")
# Cells as spreadsheets write them: no half of a surrogate pair, no NUL, no space at an end.
TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)
CELL = TEXT.map(str.strip)
UNITS = st.sampled_from([" GB", "GiB", " s", "ms", "%", "k", "M", "B", "x", " tokens", "f", "j"])
KEPT = {"max_examples": 80, "deadline": None}


def text_of(rows: list[list[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows(rows)
    return out.getvalue()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("rows") / "rows.csv"


def written(path: Path, rows: list[dict[str, str]]) -> str:
    text = text_of([list(rows[0]), *(list(row.values()) for row in rows)])
    path.write_text(text, newline="")
    return str(path)


@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=6))
@settings(**KEPT)
def test_cells_and_lines_are_those_of_the_file(path, cells):
    """Also of cells with commas, quotes and line breaks, of which a row may take several lines."""
    rows = [[f"r{number}", *pair] for number, pair in enumerate(cells)]
    path.write_text(text_of([["row_id", "a", "b"], *rows]), newline="")
    table = row_table.read(str(path), ("row_id",), ("row_id", "a", "b"))
    assert [list(row.values()) for row in table.rows] == rows
    assert table.mistakes == []
    lines = re.split("\r\n|\r|\n", path.read_bytes().decode())
    for row in table.rows:
        assert lines[row.line - 1].startswith(f'"{row["row_id"]}"')


def cells_of(text: str) -> Cells:
    return Cells(Row({"row_id": "r", "mem_gb": text}, 7))


@given(st.floats(1e-300, 1e300), st.sampled_from([repr, "{:g}".format, "{:.3e}".format]))
@settings(**KEPT)
def test_a_number_is_read_as_it_is_written(number, form):
    cells = cells_of(form(number))
    assert cells.number("mem_gb") == float(form(number))
    assert cells.mistakes == []


@given(st.one_of(TEXT, st.from_regex(r"-?[0-9_., ]{1,8}[a-z]?", fullmatch=True)))
@settings(max_examples=300)
def test_any_other_text_is_no_number(text):
    for read in (Cells.number, Cells.whole):
        cells = cells_of(text)
        value = read(cells, "mem_gb")
        right = PLAIN.fullmatch(text) and 0 < float(text) < float("inf")
        if read is Cells.whole:
            right = right and float(text) == int(float(text)) <= 1e15
        assert bool(cells.mistakes) != bool(right)
        assert value == (float(text) if right else 1)


@given(st.integers(1, 10**9), UNITS)
@settings(**KEPT)
def test_a_number_with_a_unit_is_a_mistake_that_says_the_columns_unit(number, unit):
    cells = cells_of(f"{number}{unit}")
    cells.number("mem_gb")
    (mistake,) = cells.mistakes
    assert (mistake.line, mistake.row_id, mistake.column) == (7, "r", "mem_gb")
    assert mistake.text.endswith(": the column is of GB, without unit or separator")


SOUND = [dict(row) for row in published_rows.read(str(PUBLIC / "torchtitan.csv"))[:3]]
COLUMNS = [column for column in SOUND[0] if column != "row_id"]
# The field of a StatedRow that a column of numbers is, where it is read as it stands.
FIELDS = {"sec_clean": "seconds", "gbs_clean": "training.global_batch_size"}
FIELDS |= {"hidden": "model.hidden", "layers": "model.layers", "vocab": "model.vocab_size"}


@given(st.sampled_from(COLUMNS), st.one_of(TEXT, st.sampled_from(["", "0", "1e400", "64.5", "7"])))
@settings(max_examples=250)
def test_any_cell_is_read_as_it_is_or_named(path, column, text):
    rows = [dict(row) for row in SOUND]
    rows[1][column] = text
    found = stated_rows.read_sound(written(path, rows))
    assert {m.line for m in found.table.mistakes} <= {3}
    assert [row.id for row in found.rows if row.id != "TT-T1b"] == ["TT-T1a", "TT-T1c"]
    assert len(found.rows) == 3 - bool(found.table.mistakes)
    if len(found.rows) == 3 and column in FIELDS and text.strip():
        value = found.rows[1]
        for name in FIELDS[column].split("."):
            value = getattr(value, name)
        assert value == float(text)


places = st.sets(st.tuples(st.integers(0, 2), st.sampled_from(published_rows.WHOLE)), min_size=1)


@given(places)
@settings(**KEPT)
def test_every_mistake_of_a_file_is_listed(path, places):
    rows = [dict(row) for row in SOUND]
    own = {(number, column) for number, column in places if column in rows[0]}
    for number, column in own:
        rows[number][column] = "4x"
    found = stated_rows.read_sound(written(path, rows)).table
    assert {(number + 2, column) for number, column in own} == {
        (mistake.line, mistake.column) for mistake in found.mistakes
    }
    if len(own) > 1:
        with pytest.raises(UserError) as caught:
            found.refuse_mistakes()
        assert len(str(caught.value).splitlines()) == len(own) + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rows: [row.update(sec_per_iter="1") for row in rows],
            "'sec_per_iter' is not known",
        ),
        (lambda rows: [row.pop("norm") for row in rows], "lacks the columns norm"),
        (lambda rows: [row.pop("tp") for row in rows], "3 rows and lacks the columns tp"),
        (lambda rows: rows[2].update(row_id="TT-T1a"), "line 4, row TT-T1a, column row_id: line 2"),
        (lambda rows: rows[2].update(row_id=""), "line 4, column row_id: is empty"),
        (lambda rows: rows[2].update(rows[0] | {"row_id": "x"}), "repeats row TT-T1a of line 2"),
        (lambda rows: rows[2].pop("cp"), "line 4, row TT-T1c: has 50 cells, of 51 columns"),
        (lambda rows: rows[0].update(sec_clean="", sec_per_it="", mem_gb=""), "as is mem_gb, of a"),
    ],
    ids=["unknown", "stated", "needed", "name twice", "no name", "repeated", "cells", "no figure"],
)
def test_what_a_file_cannot_have(path, change, message):
    rows = [dict(row) for row in SOUND]
    change(rows)
    with pytest.raises(UserError, match=message):
        stated_rows.read(written(path, rows))


def test_a_column_that_is_there_twice_is_refused(path):
    written(path, SOUND)
    path.write_text(path.read_text().replace('"dp"', '"tp"', 1))
    with pytest.raises(UserError, match="lacks the columns dp"):
        published_rows.read(str(path))
    path.write_text(path.read_text().replace('"note"', '"tp"', 1).replace('"tp"', '"dp"', 1))
    with pytest.raises(UserError, match="lacks the columns note"):
        published_rows.read(str(path))
    text = text_of([["row_id", "a", "a"], ["x", "1", "2"]])
    path.write_text(text)
    with pytest.raises(UserError, match="line 1, columns: 'a' is there twice"):
        row_table.read(str(path), ("row_id",), ("row_id", "a"))


def test_a_failed_run_may_be_repeated_and_a_repeat_that_says_so(path):
    rows = [dict(row) for row in SOUND[:2]]
    rows[1] = rows[0] | {"row_id": "x", "dup_of": "TT-T1a"}
    assert published_rows.read(written(path, rows))
    for row in rows:
        row.update(status="OOM", mem_gb="", sec_per_it="", sec_clean="", dup_of="", tflops="")
    assert published_rows.read(written(path, rows))


OLD = [dict(row) for row in published_rows.read(str(PUBLIC.parent / "measured_rows.csv"))[30:33]]


@pytest.mark.parametrize(
    ("column", "value"),
    [("precision", "bf16 (fp32 grad)"), ("optimizer", "lion"), ("zero_stage", "1?"),
     ("status", "other"), ("recompute", "half"), ("gbs", "2k")],
)  # fmt: skip
def test_words_of_tables_without_a_machine_are_known_ones(path, column, value):
    rows = [dict(row) for row in OLD]
    rows[1][column] = value
    with pytest.raises(UserError, match=f"line 3, row {rows[1]['row_id']}, column {column}: is '"):
        published_rows.read(written(path, rows))


def test_columns_that_only_rows_with_a_machine_have_are_not_read_past(path):
    rows = [row | {"cp": "2"} for row in OLD]
    with pytest.raises(UserError, match="columns: cp are read in files that have a column machine"):
        published_rows.read(written(path, rows))
