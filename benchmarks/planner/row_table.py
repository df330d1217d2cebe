"""A CSV file of measured rows as text, and its mistakes, each with its line and column.

    table = read("rows.csv", needed=("row_id", "tp"), known=("row_id", "tp", "note"))
    cells = Cells(table.rows[0])
    tensor_ranks = cells.whole("tp")        # 1 and a mistake, if the cell holds no whole number
    cells.mistakes

A mistake in one cell does not end the reading, so that all of a file are found at once.
"""

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from base.errors import UserError, nearest

NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?|\.[0-9]+")
# The units of columns, for the message about a cell that has its unit in it.
UNITS = {"mem_gb": "GB", "sec_per_it": "seconds", "sec_clean": "seconds", "tflops": "TFLOP/s"}
UNITS |= {"size_b": "1e9 parameters", "seq": "tokens", "gbs": "samples", "mbs": "samples"}
FIGURES = ("sec_per_it", "mem_gb", "tflops")


class Row(dict[str, str]):
    """Cells by column, and the line of the file that the row begins on."""

    def __init__(self, cells: dict[str, str], line: int):
        super().__init__(cells)
        self.line = line


@dataclass(frozen=True)
class Mistake:
    """A mistake in a cell of a row, or in the whole row: then `column` is empty."""

    line: int
    row_id: str
    column: str
    text: str

    def __str__(self) -> str:
        of_row = f", row {self.row_id}" if self.row_id else ""
        of_column = f", column {self.column}" if self.column else ""
        return f"line {self.line}{of_row}{of_column}: {self.text}"


@dataclass(frozen=True)
class RowTable:
    """The rows of a file, and the mistakes that were found in it so far."""

    path: str
    columns: tuple[str, ...]
    rows: list[Row]
    mistakes: list[Mistake]

    def sound(self) -> list[Row]:
        """The rows without a mistake."""
        wrong = {mistake.line for mistake in self.mistakes}
        return [row for row in self.rows if row.line not in wrong]

    def refuse_mistakes(self) -> None:
        """Raise a UserError that lists all mistakes, if there are any."""
        if not self.mistakes:
            return
        if len(self.mistakes) == 1:
            raise UserError(f"{self.path}, {self.mistakes[0]}")
        lines = [f"  {mistake}" for mistake in sorted(self.mistakes, key=lambda m: m.line)]
        wrong = len(self.rows) - len(self.sound())
        count = f"{len(self.mistakes)} mistakes in {wrong} of {len(self.rows)} rows"
        raise UserError("\n".join([f"{self.path} has {count}:", *lines]))

    def skipped(self) -> str:
        """Return which rows of the file are left out, as a sentence; empty if none are."""
        left, count = len(self.rows) - len(self.sound()), len(self.mistakes)
        if not left:
            return ""
        return f"{self.path}: {left} of {len(self.rows)} rows are left out, for {count} mistakes"


def read(path: str, needed: Iterable[str], known: Iterable[str]) -> RowTable:
    """The rows of a file, their cells without spaces around them.

    Its mistakes are rows with more or fewer cells than columns, names of rows that are empty or
    given twice, and repeated rows. UserError if it cannot be read, has no rows, or has other
    columns than `known` or not all that are `needed`.
    """
    header, rows = lines(path)
    if not rows:
        raise UserError(f"{path} has no rows")
    missing = [name for name in needed if name not in header]
    if missing:
        raise UserError(f"{path} has {len(rows)} rows and lacks the columns {', '.join(missing)}")
    _check_header(path, header, list(known))
    found, mistakes = [], []
    for line, cells in rows:
        row = Row(dict.fromkeys(header, "") | dict(zip(header, cells)), line)
        found.append(row)
        if len(cells) != len(header):
            text = f"has {len(cells)} cells, of {len(header)} columns"
            mistakes.append(Mistake(line, row["row_id"], "", text))
    return RowTable(path, tuple(header), found, mistakes + _names(found) + _repeated(found))


def lines(path: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The names of the columns, and of every row its first line and its cells; UserError if it
    cannot be read.
    """
    rows = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader, line = csv.reader(file), 1
            for cells in reader:
                if cells:
                    rows.append((line, [cell.strip() for cell in cells]))
                line = reader.line_num + 1
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV file: {error}") from None
    return (rows[0][1], rows[1:]) if rows else ([], [])


def _check_header(path: str, header: list[str], known: list[str]) -> None:
    """UserError about all columns that are not known, or there twice."""
    wrong = []
    for index, name in enumerate(header):
        if name in header[:index]:
            wrong.append(f"{name!r} is there twice")
        elif name not in known:
            wrong.append(f"{name!r} is not known{nearest(name, known)}")
    if wrong:
        raise UserError(f"{path}, line 1, columns: {', '.join(wrong)}")


def _names(rows: Sequence[Row]) -> list[Mistake]:
    """Rows without a name, and with the name of an earlier one."""
    first: dict[str, int] = {}
    found = []
    for row in rows:
        name = row["row_id"]
        if not name:
            found.append(Mistake(row.line, "", "row_id", "is empty"))
        elif name in first:
            text = f"line {first[name]} has this name too"
            found.append(Mistake(row.line, name, "row_id", text))
        first.setdefault(name, row.line)
    return found


def _repeated(rows: Sequence[Row]) -> list[Mistake]:
    """Measurements that repeat an earlier one in every cell but the name, and do not say so in
    `dup_of`. Runs that failed have no figures that could be counted twice.
    """
    first: dict[tuple, Row] = {}
    found = []
    for row in rows:
        own = tuple(cell for column, cell in row.items() if column != "row_id")
        if row.get("dup_of") or not any(row.get(column) for column in FIGURES):
            continue
        if own in first:
            before = first[own]
            text = f"repeats row {before['row_id']} of line {before.line}; dup_of does not say so"
            found.append(Mistake(row.line, row["row_id"], "", text))
        first.setdefault(own, row)
    return found


class Cells:
    """The cells of a row as values. What a cell does not hold becomes a mistake, and another value
    in its place, so that the reading of the row can go on.
    """

    def __init__(self, row: Row):
        self.row = row
        self.mistakes: list[Mistake] = []

    def wrong(self, column: str, text: str) -> None:
        """Note a mistake."""
        self.mistakes.append(Mistake(self.row.line, self.row["row_id"], column, text))

    def text(self, column: str) -> str:
        """The cell; empty if there is no such column."""
        return self.row.get(column, "")

    def number(self, column: str, empty: float | None = None) -> float:
        """A number above 0; `empty`, if it is given, for an empty cell."""
        text = self.text(column)
        if not text and empty is not None:
            return empty
        if not NUMBER.fullmatch(text) or not 0 < float(text) < float("inf"):
            self.wrong(column, f"is {text!r}, not a number above 0{_hint(column, text)}")
            return 1.0
        return float(text)

    def whole(self, column: str, empty: int | None = None) -> int:
        """A whole number above 0; `empty`, if it is given, for an empty cell."""
        text = self.text(column)
        if not text and empty is not None:
            return empty
        number = float(text) if NUMBER.fullmatch(text) else 0.0
        if number < 1 or number != number // 1 or number > 1e15:
            self.wrong(column, f"is {text!r}, not a whole number above 0{_hint(column, text)}")
            return 1
        return int(number)

    def one_of(self, column: str, known: dict[str, Any], otherwise: Any = None) -> Any:
        """Return the meaning of the cell's word, or `otherwise` if the word is not known."""
        text = self.text(column)
        if text in known:
            return known[text]
        words = ", ".join(word for word in known if word)
        self.wrong(column, f"is {text!r}, not one of {words}" if text else f"is empty; has {words}")
        return otherwise if otherwise is not None else next(iter(known.values()))


def _hint(column: str, text: str) -> str:
    """That a cell has the unit in it which its column has anyway."""
    of, has_digits = UNITS.get(column), any(letter.isdigit() for letter in text)
    if not of or not has_digits or NUMBER.fullmatch(text.removeprefix("-")):
        return ""
    return f": the column is of {of}, without unit or separator"
