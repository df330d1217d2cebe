"""Where prepare_data.py finds texts: files of many formats, folders of them, standard input.

    .txt .md .rst .tex .html .htm .py   one document   .gz .bz2 .xz .zst   any of these, compressed
    .jsonl .ndjson    a document in each line          .csv .parquet .arrow   one in each row
    .h5 .hdf5         tokens, an array of them         -   standard input, JSON lines

A folder that `datasets` of Hugging Face has saved gives the .arrow files that its state.json lists.

Compressed files, tables and standard input cannot be read from any place in them. Their texts are
copied into one file of records beside the output (`Spool`), which is removed at the end; so memory
does not depend on their size. A record is the bytes of a text, and before them their number, u64.
Of a table a batch of rows is in memory, of about BATCH_BYTES, and the page of the file that these
rows are in, whose size its writer has chosen; of the other formats one line.
The packages zstandard and pyarrow are needed only for their formats.
"""

import bz2
import contextlib
import csv
import gzip
import importlib
import io
import json
import lzma
import os
import shutil
import struct
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from config.messages import UserError

WHOLE = (".py", ".txt", ".md", ".rst", ".tex", ".html", ".htm")  # one document each
LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".parquet", ".arrow")
TOKENS = (".h5", ".hdf5")
RECORDS = ".partial.records"  # the file in which this module keeps records
RECORD_HEADER = struct.Struct("<Q")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
KNOWN = (*WHOLE, *LINES, *TABLES, *TOKENS)
SHOWN = (
    f"{', '.join(KNOWN)} (or with {', '.join(COMPRESSED)} added, but for {' and '.join(TOKENS)})"
)
SCAN_JSON = json.JSONDecoder().scan_once
MARK = os.urandom(8).hex()  # no text holds it
LONGEST_LINE = 1 << 29  # bytes; a longer line is refused before it fills the memory
# Bytes of a table that are read at a time, unless one row is larger.
BATCH_BYTES = 1 << 24
BATCH_ROWS = 1024
# io.UnsupportedOperation, which is a ValueError too, would be a mistake of this program.
MISTAKES_OF_FORMAT = (EOFError, lzma.LZMAError, zlib.error, csv.Error, ValueError, MemoryError)


def reason_of(error: BaseException) -> str:
    """Why a file cannot be read, never empty: some errors have no text of their own."""
    if isinstance(error, MemoryError):
        return "one of its documents does not fit into memory"
    if isinstance(error, EOFError) and not str(error):
        return "it ends too early"
    return str(error).strip() or type(error).__name__


class BadTexts:
    """Documents that are not usable: an error, or up to `limit` of them skipped and logged."""

    def __init__(self, limit: int = 0):
        self.limit = limit
        self.found: dict[Any, str] = {}  # FILE:LINE, and why; texts are read more than once

    def add(self, place: Any, reason: str) -> None:
        """Note one; UserError if there are more than the limit."""
        self.found[place] = reason
        if len(self.found) > self.limit:
            more = f" (--skip-bad {self.limit} skips that many)" if self.limit else ""
            raise UserError(f"{place} {reason}{more}")

    def add_all(self, found: dict[str, str]) -> None:
        """Note several, by place."""
        for place, reason in found.items():
            self.add(place, reason)

    def write(self, path: str) -> None:
        """Write a line for each."""
        lines = [f"{place} {reason}\n" for place, reason in self.found.items()]
        Path(path).write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def kind_of(path: Path) -> str | None:
    """The suffix that says what a file holds, without compression; None if it is not known."""
    if path.name.endswith(RECORDS):
        return RECORDS
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
        if suffixes and suffixes[-1] in TOKENS:
            return None
    return suffixes[-1] if suffixes and suffixes[-1] in KNOWN else None


def not_known(path: Path) -> UserError:
    """The error for a file whose kind is not known, with what to do about the usual ones."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in COMPRESSED
    kind = "".join(suffixes[-2:-1]) if packed else "".join(suffixes[-1:])
    if kind in TOKENS:
        return UserError(f"{path} is read at any place, and so not compressed: unpack it first")
    if kind == ".json":
        lines = path.name[: path.name.lower().index(".json")] + ".jsonl"
        how = f"make a line of each of its records, as by jq -c '.[]' {path.name} > {lines}"
        return UserError(f"{path} is one JSON value: {how}")
    return UserError(f"{path} is not one of {SHOWN}")


def is_read_in_place(path: Path) -> bool:
    """Whether single documents of the file can be read, without a copy."""
    return path.suffix.lower() in (*WHOLE, *LINES, *TOKENS)


def walk(folder: Path, skip: set[str], unknown: Counter[str]) -> Iterator[Path]:
    """Text files below a folder, except in hidden folders (.git, .venv); counts the others by
    their suffix.
    """
    for base, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        listed = _listed(Path(base)) if "state.json" in files else None
        for path in (Path(base, name) for name in files):
            if listed is not None and path.suffix == ".json":
                continue  # it describes the others
            if kind_of(path) in (None, RECORDS) or (listed is not None and path.name not in listed):
                unknown["".join(path.suffixes[-2:]) or path.name] += 1
            elif path.is_file():
                yield path.resolve()


def _listed(folder: Path) -> list[str] | None:
    """The files of a data set that `datasets` has saved there; None if the folder is none."""
    path = folder / "state.json"
    try:
        state = json.loads(path.read_bytes())
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{path} lists {missing[0]}, which is not there")
    if state.get("_indices_files"):
        raise UserError(
            f"{folder} has an order of rows of its own: save it after flatten_indices()"
        )
    return names


def parse_line(line: bytes, place: Any, key: str, bad: BadTexts) -> str | None:
    """The text in a JSON line; None for one that is skipped as bad. UnicodeDecodeError."""
    decoded = line.decode("utf-8")
    try:
        found = _json(decoded)
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
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        return bad.add(place, f"has half of a character, U+{code:04X}, at place {error.start}")
    return text


def parse_lines(lines: list[bytes], key: str) -> list[str] | None:
    """The texts in JSON lines, parsed at once, in a third of the time; None if one is bad or empty.

    The mark between them shows that each line is a value by itself: none goes on in the next.
    """
    try:
        joined = (b"[" + f',"{MARK}",'.encode().join(lines) + b"]").decode("utf-8")
        found, end = SCAN_JSON(joined, 0)
        texts = [value[key] for value in found[::2]]
        "".join(texts).encode("utf-8")  # not possible with half of a character
    except (StopIteration, ValueError, RecursionError, KeyError, TypeError):
        return None
    marks = len(lines) - 1
    if end < len(joined) or len(found) != 1 + 2 * marks or found[1::2] != [MARK] * marks:
        return None
    return None if "" in texts or any(map(str.isspace, texts)) else texts


def _json(text: str) -> Any:
    """json.loads in half the time, which counts for millions of short lines."""
    bare = text.strip(" \t\n\r")
    try:
        found, end = SCAN_JSON(bare, 0)
    except StopIteration:
        end = -1
    return found if end == len(bare) else json.loads(text)  # which says what is wrong


class Spool:
    """A file of records that texts are copied to; `size`: of what it holds, the rest is cut off."""

    def __init__(self, path: str, size: int):
        self._file = open(path, "r+b" if size else "wb")  # noqa: SIM115 (closed by `close`)
        self._file.truncate(size)
        self._file.seek(size)

    def copy(self, path: Path, key: str, bad: BadTexts) -> int:
        """Add every text of a file; the size afterwards. UserError if the file is damaged."""
        try:
            if str(path) != "-" and kind_of(path) in WHOLE:
                self._add_whole(path)
            else:
                for place, text in _texts(path, key, bad):
                    if isinstance(text, str):
                        raw = text.encode()
                        self._file.write(RECORD_HEADER.pack(len(raw)) + raw)
                    else:
                        bad.add(place, f"has a {type(text).__name__} as {key!r}, not a text")
        except io.UnsupportedOperation:
            raise
        except (*MISTAKES_OF_FORMAT, *_mistakes_of_packages(), OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of the disk, not of the format
            reason = reason_of(error)
            raise UserError(f"{path} is damaged, or not what its name says: {reason}") from None
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def _add_whole(self, path: Path) -> None:
        """One record, whose length is known only at its end."""
        begin = self._file.tell()
        self._file.write(RECORD_HEADER.pack(0))
        with _open(path) as file:
            shutil.copyfileobj(file, self._file, 1 << 20)
        end = self._file.tell()
        self._file.seek(begin)
        self._file.write(RECORD_HEADER.pack(end - begin - RECORD_HEADER.size))
        self._file.seek(end)

    def close(self) -> None:
        """Close the file, which stays."""
        self._file.close()


def _texts(path: Path, key: str, bad: BadTexts) -> Iterator[tuple[str, Any]]:
    """(FILE:LINE, text) of every document of a file that is read from its beginning."""
    kind = LINES[0] if str(path) == "-" else kind_of(path)
    if kind in (".parquet", ".arrow"):
        yield from _rows_of_arrow(path, kind, key)
        return
    with _open(path) as file:
        if kind in LINES:
            for number, line in enumerate(_lines(file, path), 1):
                place, text = f"{path}:{number}", None
                try:
                    text = parse_line(line, place, key, bad) if line.strip() else None
                except UnicodeDecodeError:
                    bad.add(place, "is not UTF-8")
                if text is not None:
                    yield place, text
        else:
            csv.field_size_limit(LONGEST_LINE)
            decoded = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            table = csv.DictReader(_lines(decoded, path))
            if key not in (table.fieldnames or ()):
                raise UserError(f"{path} has no column {key!r} in its first line")
            for row in table:
                yield f"{path}:{table.line_num}", row[key]


def _lines(file: Any, path: Path) -> Iterator[Any]:
    """The lines of a file, of bytes or of text; UserError for one that is too long."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise UserError(f"{path}:{number} is a line of more than {LONGEST_LINE:,} bytes")
        yield line


def _open(path: Path) -> IO[bytes]:
    """The contents of a file, without its compression."""
    if str(path) == "-":
        return sys.stdin.buffer
    suffix = path.suffix.lower()
    if suffix == ".zst":
        return io.BufferedReader(_ZstandardFile(package_for("zstandard", path), path), 1 << 20)
    opens: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return opens.get(suffix, open)(path, "rb")


class _ZstandardFile(io.RawIOBase):
    """The text of a .zst file of one or more frames; EOFError if the last frame is cut short.

    The package's own reader has no `readline`, and takes the end of a file that was cut short for
    the end of its text.
    """

    # Compressed bytes that are read at a time: two KiB become at most some 64 MiB of text.
    CHUNK = 1 << 11

    def __init__(self, zstandard: Any, path: Path):
        self._file = open(path, "rb")  # noqa: SIM115 (closed by `close`)
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._begun = False  # whether some of the frame has been read
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a part of the buffer; the number of bytes, 0 at the end of the last frame."""
        while not self._text:
            compressed = self._file.read(self.CHUNK)
            if not compressed and self._begun:
                raise EOFError("its last frame is cut short")
            if not compressed:
                return 0
            self._text = memoryview(self._decompress(compressed))
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count

    def _decompress(self, compressed: bytes) -> bytes:
        """The text of these bytes, in which frames may end and begin."""
        texts = []
        while compressed:
            texts.append(self._frame.decompress(compressed))
            self._begun = not self._frame.eof
            compressed = self._frame.unused_data
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
        return b"".join(texts)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


@contextlib.contextmanager
def _seekable(path: Path) -> Iterator[IO[bytes]]:
    """A file that is read at any place; a compressed one is unpacked into a temporary file."""
    if path.suffix.lower() not in COMPRESSED:
        with open(path, "rb") as file:
            yield file
        return
    with _open(path) as packed, tempfile.TemporaryFile() as file:
        shutil.copyfileobj(packed, file, 1 << 20)
        file.seek(0)
        yield file


def _batch_rows(table: Any, key: str) -> int:
    """Rows of a Parquet file that take about BATCH_BYTES, by what its metadata says of a column."""
    rows = BATCH_ROWS
    for group in range(table.metadata.num_row_groups):
        about = table.metadata.row_group(group)
        for number in range(about.num_columns):
            column = about.column(number)
            if column.path_in_schema == key and about.num_rows:
                row_bytes = max(1, column.total_uncompressed_size // about.num_rows)
                rows = min(rows, BATCH_BYTES // row_bytes)
    return max(1, rows)


def _rows_of_arrow(path: Path, kind: str, key: str) -> Iterator[tuple[str, Any]]:
    """The column `key` of a Parquet or Arrow file (as in a folder of Hugging Face datasets)."""
    # Arrow would map a file that is named; where its bytes are damaged, that ends the process.
    with _seekable(path) as file:
        if kind == ".parquet":
            parquet = package_for("pyarrow.parquet", path)
            table = parquet.ParquetFile(file)
            names = table.schema_arrow.names
            rows = _batch_rows(table, key)
            if key in names and rows == BATCH_ROWS:
                # The file has few bytes for each row: short texts, or long ones that many rows
                # share, which are in memory once then, as they are in the file.
                table = parquet.ParquetFile(file, read_dictionary=[key])
            batches = table.iter_batches(rows, columns=[key])
        else:
            ipc = package_for("pyarrow.ipc", path)
            try:
                batches = ipc.open_stream(file)
                names = batches.schema.names
            except ValueError:
                file.seek(0)
                whole = ipc.open_file(file)
                names = whole.schema.names
                batches = (whole.get_batch(i) for i in range(whole.num_record_batches))
        if key not in names:
            raise UserError(f"{path} has no column {key!r}, but {', '.join(names)}")
        row = 0
        for batch in batches:
            column = batch.column(key)
            column.validate(full=True)  # else a damaged offset is followed to any address
            for value in column:
                row += 1
                yield f"{path}:{row}", value.as_py()


def _mistakes_of_packages() -> tuple[type[Exception], ...]:
    """Their own exceptions, if they have been imported."""
    names = ("zstandard", "ZstdError"), ("pyarrow", "ArrowException")
    return tuple(getattr(sys.modules[name], kind) for name, kind in names if sys.modules.get(name))


def package_for(name: str, needing: object) -> Any:
    """A package that only some formats need; UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UserError(f"{needing} needs the package {package}: pip install {package}") from None
