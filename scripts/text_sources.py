"""Where prepare_data.py finds texts: files of many formats, folders of them, standard input.

    .txt .md .py      one document                     .gz .bz2 .xz .zst   any of these, compressed
    .jsonl .ndjson    a document in each line          .csv .parquet .arrow   one in each row
    -                 standard input, JSON lines

Compressed files, tables and standard input cannot be read from any place in them. They are copied,
as JSON lines, into one file beside the output (`spool`), which is removed at the end; so memory
does not depend on their size. The packages zstandard and pyarrow are needed only for their formats.
"""

import bz2
import csv
import gzip
import importlib
import io
import json
import lzma
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from config.messages import UserError

WHOLE = (".py", ".txt", ".md")  # one document each
LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".parquet", ".arrow")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
KNOWN = (*WHOLE, *LINES, *TABLES)
SHOWN = f"{', '.join(KNOWN)} (or with {', '.join(COMPRESSED)} added)"
MISTAKES_OF_FORMAT = (EOFError, lzma.LZMAError, zlib.error, csv.Error, ValueError)


class BadTexts:
    """Documents that are not usable: an error, or up to `limit` of them skipped and logged."""

    def __init__(self, limit: int = 0):
        self.limit = limit
        self.found: dict[str, str] = {}  # FILE:LINE, and why; texts are read more than once

    def add(self, place: str, reason: str) -> None:
        """Note one; UserError if there are more than the limit."""
        self.found[place] = reason
        if len(self.found) > self.limit:
            more = f" (--skip-bad {self.limit} skips that many)" if self.limit else ""
            raise UserError(f"{place} {reason}{more}")

    def write(self, path: str) -> None:
        """Write a line for each, if there are any; else remove the list of an earlier run."""
        Path(path).unlink(missing_ok=True)
        if self.found:
            lines = [f"{place} {reason}\n" for place, reason in self.found.items()]
            Path(path).write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def kind_of(path: Path) -> str | None:
    """The suffix that says what a file holds, without compression; None if it is not known."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in KNOWN else None


def is_read_in_place(path: Path) -> bool:
    """Whether single documents of the file can be read, without a copy."""
    return path.suffix.lower() in (*WHOLE, *LINES)


def walk(folder: Path, skip: set[str], unknown: Counter[str]) -> Iterator[Path]:
    """Text files below a folder, except in hidden folders (.git, .venv); counts the others by
    their suffix.
    """
    for base, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        for path in (Path(base, name) for name in files):
            if kind_of(path) is None:
                unknown["".join(path.suffixes[-2:]) or path.name] += 1
            elif path.is_file():
                yield path.resolve()


def parse_line(line: bytes, place: str, key: str, bad: BadTexts) -> str | None:
    """The text in a JSON line; None for one that is skipped as bad. UnicodeDecodeError."""
    decoded = line.decode("utf-8")
    try:
        found = json.loads(decoded)
    except ValueError as error:  # also a number of 5,000 digits
        return bad.add(place, f"is not JSON: {error}")
    except RecursionError:
        return bad.add(place, "is not JSON that can be read: it is nested too deeply")
    if not isinstance(found, dict) or key not in found:
        return bad.add(place, f"has no key {key!r}")
    text = found[key]
    if not isinstance(text, str):
        return bad.add(place, f"has a {type(text).__name__} as {key!r}, not a text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        return bad.add(place, f"has half of a character, U+{code:04X}, at place {error.start}")
    return text


def spool(paths: list[Path], key: str, target: str, bad: BadTexts) -> None:
    """Copy every document of these files to `target`, as JSON lines with the same key."""
    with open(target, "w", encoding="utf-8") as file:
        for path in paths:
            try:
                for place, text in _texts(path, key, bad):
                    if not isinstance(text, str):
                        bad.add(place, f"has a {type(text).__name__} as {key!r}, not a text")
                        continue
                    file.write(json.dumps({key: text}) + "\n")
            except (*MISTAKES_OF_FORMAT, *_mistakes_of_zstandard(), OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # of the disk, not of the format
                raise UserError(f"{path} is damaged, or not what its name says: {error}") from None


def _texts(path: Path, key: str, bad: BadTexts) -> Iterator[tuple[str, Any]]:
    """(FILE:LINE, text) of every document of a file that is read from its beginning."""
    kind = LINES[0] if str(path) == "-" else kind_of(path)
    if kind in (".parquet", ".arrow"):
        yield from _rows_of_arrow(path, kind, key)
        return
    with _open(path) as file:
        if kind in WHOLE:
            yield str(path), file.read().decode("utf-8")
        elif kind in LINES:
            for number, line in enumerate(file, 1):
                place, text = f"{path}:{number}", None
                try:
                    text = parse_line(line, place, key, bad) if line.strip() else None
                except UnicodeDecodeError:
                    bad.add(place, "is not UTF-8")
                if text is not None:
                    yield place, text
        else:
            csv.field_size_limit(2**31 - 1)
            table = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
            if key not in (table.fieldnames or ()):
                raise UserError(f"{path} has no column {key!r} in its first line")
            for row in table:
                yield f"{path}:{table.line_num}", row[key]


def _open(path: Path) -> IO[bytes]:
    """The contents of a file, without its compression."""
    if str(path) == "-":
        return sys.stdin.buffer
    suffix = path.suffix.lower()
    if suffix == ".zst":
        file = open(path, "rb")  # noqa: SIM115 (closed with the stream)
        return _package("zstandard", path).ZstdDecompressor().stream_reader(file)
    opens: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return opens.get(suffix, open)(path, "rb")


def _rows_of_arrow(path: Path, kind: str, key: str) -> Iterator[tuple[str, Any]]:
    """The column `key` of a Parquet or Arrow file (as in a folder of Hugging Face datasets)."""
    if kind == ".parquet":
        parquet = _package("pyarrow.parquet", path)
        table = parquet.ParquetFile(path)
        names, batches = table.schema_arrow.names, table.iter_batches(1024, columns=[key])
    else:
        ipc = _package("pyarrow.ipc", path)
        try:
            batches = ipc.open_stream(path)
        except ValueError:
            whole = ipc.open_file(path)
            batches = (whole.get_batch(i) for i in range(whole.num_record_batches))
            names = whole.schema.names
        else:
            names = batches.schema.names
    if key not in names:
        raise UserError(f"{path} has no column {key!r}, but {', '.join(names)}")
    row = 0
    for batch in batches:
        for value in batch.column(key).to_pylist():
            row += 1
            yield f"{path}:{row}", value


def _mistakes_of_zstandard() -> tuple[type[Exception], ...]:
    """Its own exception, if it has been imported."""
    found = sys.modules.get("zstandard")
    return (found.ZstdError,) if found else ()


def _package(name: str, path: Path) -> Any:
    """A package that only some formats need; UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UserError(f"{path} needs the package {package}: pip install {package}") from None
