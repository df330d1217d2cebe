"""The texts of files of many formats, of folders of them, and of standard input.

    .txt .md .rst .tex .html .htm .py   one document   .gz .bz2 .xz .zst   any of these, compressed
    .jsonl .ndjson    a document in each line          .csv .parquet .arrow   one in each row
    .h5 .hdf5         tokens, an array of them         -   standard input, JSON lines

A folder that `datasets` of Hugging Face has saved gives the .arrow files that its state.json lists.

Every file is read once, from its beginning. In memory is a line, or of a table a batch of rows of
about BATCH_BYTES and the page of the file that these rows are in, whose size its writer has chosen.
The package pyarrow is needed for .parquet, .arrow and .zst only.
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
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

from config.messages import UserError

WHOLE = (".py", ".txt", ".md", ".rst", ".tex", ".html", ".htm")  # one document each
LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".parquet", ".arrow")
TOKENS = (".h5", ".hdf5")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
KNOWN = (*WHOLE, *LINES, *TABLES, *TOKENS)
SHOWN = (
    f"{', '.join(KNOWN)} (or with {', '.join(COMPRESSED)} added, but for {' and '.join(TOKENS)})"
)
LONGEST_LINE = 1 << 29  # bytes; a longer line is refused before it fills the memory
# Bytes of a table that are read at a time, unless one row is larger.
BATCH_BYTES = 1 << 24
BATCH_ROWS = 1024
TOKENS_READ = 1 << 20  # tokens of an array that are read at a time, unless one row is longer
# io.UnsupportedOperation, which is a ValueError too, would be a mistake of this program.
MISTAKES_OF_FORMAT = (EOFError, lzma.LZMAError, zlib.error, csv.Error, ValueError, MemoryError)


# ---- Mistakes ------------------------------------------------------------------------------------


class BadTexts:
    """Documents that are not usable: an error, or up to `limit` of them skipped and logged."""

    def __init__(self, limit: int = 0):
        self.limit = limit
        self.found: dict[str, str] = {}  # FILE:LINE, and why

    def add(self, place: str, reason: str) -> None:
        """Note one; UserError if there are more than the limit."""
        self.found[place] = reason
        if len(self.found) > self.limit:
            more = f" (--skip-bad {self.limit} skips that many)" if self.limit else ""
            raise UserError(f"{place} {reason}{more}")


@contextlib.contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """UserError with the file's name for what is raised if a file is damaged."""
    try:
        yield
    except io.UnsupportedOperation:
        raise
    except (*MISTAKES_OF_FORMAT, *_mistakes_of_packages(path), OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, not of the format
        reason = reason_of(error)
        raise UserError(f"{path} is damaged, or not what its name says: {reason}") from None


def reason_of(error: BaseException) -> str:
    """Why a file cannot be read, never empty: some errors have no text of their own."""
    if isinstance(error, MemoryError):
        return "one of its documents does not fit into memory"
    if isinstance(error, EOFError) and not str(error):
        return "it ends too early"
    return str(error).strip() or type(error).__name__


def _mistakes_of_packages(path: Path) -> tuple[type[Exception], ...]:
    if kind_of(path) in TOKENS:
        return RuntimeError, TypeError  # h5py
    pyarrow = sys.modules.get("pyarrow")
    return (pyarrow.ArrowException,) if pyarrow else ()


def package_for(name: str, needing: object) -> Any:
    """A package that only some formats need; UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UserError(f"{needing} needs the package {package}: pip install {package}") from None


# ---- Files ---------------------------------------------------------------------------------------


def _suffix(path: Path) -> tuple[str, bool]:
    """The suffix of a file's contents, without that of a compression; whether there is one."""
    suffixes = ["", *(suffix.lower() for suffix in path.suffixes)]
    packed = suffixes[-1] in COMPRESSED
    return suffixes[:-1][-1] if packed else suffixes[-1], packed


def kind_of(path: Path) -> str | None:
    """The suffix that says what a file holds, without compression; None if it is not known."""
    suffix, packed = _suffix(path)
    if str(path) == "-":
        return LINES[0]
    return suffix if suffix in KNOWN and not (packed and suffix in TOKENS) else None


def not_known(path: Path) -> UserError:
    """The error for a file whose kind is not known, with what to do about the usual ones."""
    suffix, _ = _suffix(path)
    if suffix in TOKENS:
        return UserError(f"{path} is an array of tokens, and not read compressed: unpack it first")
    if suffix == ".json":
        lines = path.name[: path.name.lower().index(".json")] + ".jsonl"
        how = f"make a line of each of its records, as by jq -c '.[]' {path.name} > {lines}"
        return UserError(f"{path} is one JSON value: {how}")
    return UserError(f"{path} is not one of {SHOWN}")


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
            if kind_of(path) is None or (listed is not None and path.name not in listed):
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


def _open(path: Path) -> IO[bytes]:
    """The contents of a file, without its compression."""
    if str(path) == "-":
        return sys.stdin.buffer
    suffix = path.suffix.lower()
    if suffix == ".zst":
        # zstandard's own reader takes the end of a file that was cut short for the end of its text.
        stream = package_for("pyarrow", path).input_stream(str(path), compression="zstd")
        return io.BufferedReader(stream, 1 << 20)
    opens: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return opens.get(suffix, open)(path, "rb")


def blocks_of(path: Path, size: int) -> Iterator[bytes]:
    """The bytes of a file of one document, in blocks of `size`; the last block is empty."""
    with _open(path) as file:
        while block := file.read(size):
            yield block
    yield b""


# ---- Lines and rows ------------------------------------------------------------------------------


def texts_of(path: Path, key: str, bad: BadTexts) -> Iterator[str]:
    """Every text of a file of lines or rows; what is none goes to `bad`."""
    if kind_of(path) in LINES:
        with _open(path) as file:
            for number, line in enumerate(_lines(file, path), 1):
                if line.strip():
                    text = parse_line(line, f"{path}:{number}", key, bad)
                    if text is not None:
                        yield text
        return
    rows = _rows_of_csv if kind_of(path) == ".csv" else _rows_of_arrow
    for number, text in rows(path, key):
        if isinstance(text, str):
            yield text
        else:
            bad.add(f"{path}:{number}", f"has a {type(text).__name__} as {key!r}, not a text")


def parse_line(line: bytes, place: str, key: str, bad: BadTexts) -> str | None:
    """The text in a JSON line; None for one that is skipped as bad."""
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return bad.add(place, "is not UTF-8")
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


def _lines(file: Any, path: Path) -> Iterator[Any]:
    """The lines of a file, of bytes or of text; UserError for one that is too long."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise UserError(f"{path}:{number} is a line of more than {LONGEST_LINE:,} bytes")
        yield line


def _rows_of_csv(path: Path, key: str) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(LONGEST_LINE)
    with _open(path) as file:
        decoded = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        table = csv.DictReader(_lines(decoded, path))
        if key not in (table.fieldnames or ()):
            raise UserError(f"{path} has no column {key!r} in its first line")
        for row in table:
            yield table.line_num, row[key]


def _rows_of_arrow(path: Path, key: str) -> Iterator[tuple[int, Any]]:
    """The column `key` of a Parquet or Arrow file (as in a folder of Hugging Face datasets)."""
    # Arrow would map a file that is named; where its bytes are damaged, that ends the process.
    with _seekable(path) as file:
        batches = _batches(path, file, key)
        row = 0
        for batch in batches:
            column = batch.column(key)
            column.validate(full=True)  # else a damaged offset is followed to any address
            for value in column:
                row += 1
                yield row, value.as_py()


@contextlib.contextmanager
def _seekable(path: Path) -> Iterator[IO[bytes]]:
    """A file that is read at any place; a compressed one is unpacked into a temporary file."""
    with _open(path) as file:
        if path.suffix.lower() not in COMPRESSED:
            yield file
            return
        with tempfile.TemporaryFile() as unpacked:
            shutil.copyfileobj(file, unpacked, 1 << 20)
            unpacked.seek(0)
            yield unpacked


def _batches(path: Path, file: IO[bytes], key: str) -> Iterator[Any]:
    """Batches of rows; UserError if there is no column `key`."""
    if kind_of(path) == ".parquet":
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
    return batches


def _batch_rows(table: Any, key: str) -> int:
    """Rows of a Parquet file that take about BATCH_BYTES, by what its metadata says of a column."""
    rows = BATCH_ROWS
    if key in table.schema.names:
        column = table.schema.names.index(key)
        for number in range(table.metadata.num_row_groups):
            group = table.metadata.row_group(number)
            size = group.column(column).total_uncompressed_size
            rows = min(rows, BATCH_BYTES * group.num_rows // max(1, size))
    return max(1, rows)


# ---- Tokens --------------------------------------------------------------------------------------


def tokens_of(path: Path, key: str, vocab_size: int) -> tuple[np.ndarray, Iterator[np.ndarray]]:
    """How many tokens each document of an HDF5 file has, and all tokens in blocks. UserError if it
    holds no such array; the blocks raise it for a token that is not below vocab_size.
    """
    with h5py.File(path) as file:
        found = file.get(key)
        if not isinstance(found, h5py.Dataset) or found.dtype.kind not in "iu":
            raise UserError(f"{path} has no array of integers {key!r}, but {', '.join(file)}")
        if found.ndim not in (1, 2):
            raise UserError(f"{path}: {key!r} has {found.ndim} dimensions, not 1 or 2")
        if found.ndim == 2:
            lengths = np.full(len(found), found.shape[1])
        else:
            lengths = np.asarray(file.get("lengths", [len(found)]), np.int64)
        if lengths.ndim != 1 or (lengths < 0).any() or lengths.sum() != found.size:
            text = f"'lengths' adds up to {lengths.sum()}, but {key!r} has {found.size} tokens"
            raise UserError(f"{path}: {text}")
    return lengths, _token_blocks(path, key, vocab_size)


def _token_blocks(path: Path, key: str, vocab_size: int) -> Iterator[np.ndarray]:
    with h5py.File(path) as file:
        found = file[key]
        rows = max(1, TOKENS_READ // max(1, found.size // max(1, len(found))))
        for begin in range(0, len(found), rows):
            block = found[begin : begin + rows].reshape(-1)
            for token in (block.min(initial=0), block.max(initial=0)):
                if not 0 <= token < vocab_size:
                    raise UserError(f"token id {token} of an array is not in 0..{vocab_size - 1}")
            yield block
