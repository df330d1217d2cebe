"""The texts of files of many formats, of folders of them, and of standard input.

    .txt .md .rst .tex .html .htm .py   one document   .gz .bz2 .xz .zst   any of these, compressed
    .jsonl .ndjson .json   one in each line            .csv .parquet .arrow   one in each row
    .h5 .hdf5         tokens, an array of them         -   standard input, JSON lines

Conversations, texts for an evaluation and the rows of tasks are JSON lines too, and are read by
`objects_of`.

A folder that `datasets` of Hugging Face has saved gives the .arrow files that its state.json lists.
Hidden files and folders, such as macOS's ._books.jsonl, are left out of a folder and counted.

Every file is read once, from its beginning. In memory is a line, or of a table a batch of rows of
about BATCH_BYTES and the page of the file that these rows are in, whose size its writer has chosen.
The package pyarrow is needed for .parquet, .arrow and .zst only.
"""

import bz2
import codecs
import contextlib
import csv
import errno
import gzip
import importlib
import io
import itertools
import json
import lzma
import os
import shlex
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from base.errors import CorpusError, PackageError, UserError
from base.regular_files import open_regular

if TYPE_CHECKING:
    import h5py

WHOLE = (".py", ".txt", ".md", ".rst", ".tex", ".html", ".htm")  # one document each
LINES = (".jsonl", ".ndjson", ".json")
TABLES = (".csv", ".parquet", ".arrow")
TOKENS = (".h5", ".hdf5")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
KNOWN = (*WHOLE, *LINES, *TABLES, *TOKENS)
SHOWN = (
    f"{', '.join(KNOWN)} (or with {', '.join(COMPRESSED)} added, but for {' and '.join(TOKENS)})"
)
# What an error of a program says that reads JSON lines from standard input too.
BY_STDIN = ": give - to read JSON lines from standard input"
HIDDEN = "hidden"  # as what `walk` counts files whose names begin with a dot
LONGEST_LINE = 1 << 29  # bytes; a longer line is refused before it fills the memory
# Bytes of a table that are read at a time, unless one row is larger.
BATCH_BYTES = 1 << 24
BATCH_ROWS = 1024
MOST_READ = 1 << 28  # bytes of chunks that are unpacked together
TOKENS_READ = 1 << 20  # tokens of an array that are read at a time, unless one row is longer
# io.UnsupportedOperation, which is a ValueError too, would be a mistake of this program.
# What the library of zstd says of a frame that needs more memory than it takes by itself, and of
# one that was compressed with a dictionary, and what to do: such a file is not damaged.
ZSTD_REFUSALS = {
    "too much memory": (
        "has a frame with a window of more than 128 MiB, which is not unpacked here: unpack it by "
        "zstd -d --long=31 {name}, which takes up to 2 GiB of memory{stdin}"
    ),
    "dictionary": (
        "was compressed with a dictionary, which is not in the file: unpack it by "
        "zstd -d -D DICTIONARY {name}{stdin}"
    ),
}
MISTAKES_OF_FORMAT = (EOFError, lzma.LZMAError, zlib.error, csv.Error, ValueError, MemoryError)


# ---- Mistakes ------------------------------------------------------------------------------------


class BadTexts:
    """Documents that are not usable: an error, or up to `limit` of them skipped and logged."""

    def __init__(self, limit: int = 0):
        self.limit = limit
        self.found: dict[str, str] = {}  # FILE:LINE, and why

    def add(self, place: str, reason: str) -> None:
        """Note a bad document at `place`, FILE:LINE; UserError if there are more than the limit."""
        self.found[place] = reason
        if len(self.found) > self.limit:
            more = f" (--skip-bad {self.limit} skips that many)" if self.limit else ""
            raise CorpusError(f"{place} {reason}{more}")


@contextlib.contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """In the block, turn errors that a damaged file causes into UserError with the file's name."""

    def mistakes() -> tuple[type[Exception], ...]:
        """Asked when an error has come: a package that was not loaded before may have raised it."""
        return (*MISTAKES_OF_FORMAT, *_mistakes_of_packages(path), OSError)

    try:
        yield
    except io.UnsupportedOperation:
        raise
    except mistakes() as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, not of the format
        reason = reason_of(error)
        refused = _refusal_of_zstd(path, reason)
        raise CorpusError(
            refused or f"{path} is damaged, or not what its name says: {reason}"
        ) from None


def _refusal_of_zstd(path: Path, reason: str) -> str:
    """Return the error for an undamaged .zst file that zstd refuses to unpack; "" for others.

    reason: what zstd has said, of which ZSTD_REFUSALS has parts.
    """
    if path.suffix.lower() != ".zst":
        return ""
    words = next((words for said, words in ZSTD_REFUSALS.items() if said in reason.lower()), "")
    lines = kind_of(path) in LINES
    stdin = ", or to standard output with -c, and give - for the file" if lines else ""
    return words and f"{path} {words.format(name=shlex.quote(path.name), stdin=stdin)}"


def reason_of(error: BaseException) -> str:
    """Return why a file cannot be read, never empty: some errors have no text of their own."""
    if isinstance(error, MemoryError):
        return "one of its documents does not fit into memory"
    if isinstance(error, EOFError) and not str(error):
        return "it ends too early"
    return str(error).strip() or type(error).__name__


def _mistakes_of_packages(path: Path) -> tuple[type[Exception], ...]:
    """Return what the package that reads the file raises for a damaged one: h5py or pyarrow."""
    if kind_of(path) in TOKENS:
        return RuntimeError, TypeError, LookupError, ArithmeticError  # h5py
    pyarrow = sys.modules.get("pyarrow")
    return (pyarrow.ArrowException,) if pyarrow else ()


def package_for(name: str, needing: object) -> Any:
    """Import and return a package that only some formats need; UserError if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise PackageError(
            f"{needing} needs the package {package}: pip install {package}"
        ) from None


# ---- Files ---------------------------------------------------------------------------------------


def _suffix(path: Path) -> tuple[str, bool]:
    """Return the suffix without that of a compression, and whether the file is compressed."""
    suffixes = ["", *(suffix.lower() for suffix in path.suffixes)]
    packed = suffixes[-1] in COMPRESSED
    return suffixes[:-1][-1] if packed else suffixes[-1], packed


def kind_of(path: Path, as_text: Sequence[str] = ()) -> str | None:
    """Return the suffix that says a file's format, without compression; None if it is not known.

    as_text: ends of names, as ".c", of files that are one document each.
    """
    suffix, packed = _suffix(path)
    if str(path) == "-":
        return LINES[0]
    name = path.name[: -len(path.suffix)] if packed else path.name
    if any(name.endswith(end) for end in as_text):
        return WHOLE[0]
    return suffix if suffix in KNOWN and not (packed and suffix in TOKENS) else None


def not_known(path: Path) -> UserError:
    """Return the error for a file whose kind is not known, with what to do about the usual ones."""
    suffix, _ = _suffix(path)
    if suffix in TOKENS:
        return CorpusError(
            f"{path} is an array of tokens, and not read compressed: unpack it first"
        )
    how = f"; --as-text {suffix or path.name} reads such files as one document each"
    return CorpusError(f"{path} is not one of {SHOWN}{how}")


def check_lines(path: Path, key: str | None = None) -> None:
    """Raise UserError if a .json file is one JSON value, and not JSON lines.

    key: what each line has; then the file is also refused if its first one has no such key.
    """
    if str(path) == "-" or _suffix(path)[0] != ".json":
        return
    first = _first_line(path)
    if _is_line(first, key):
        return
    lines = path.name[: path.name.lower().index(".json")] + ".jsonl"
    unpack = {".gz": "zcat", ".bz2": "bzcat", ".xz": "xzcat", ".zst": "zstdcat"}
    cat = unpack.get(path.suffix.lower(), "cat")
    each = "'.[]'" if first[:1] == b"[" else "."
    also = "" if each != "." else ", or by '.KEY[]' in place of . if KEY has them"
    raise CorpusError(
        f"{path} is one JSON value: make a line of each of its records, as by "
        f"{cat} {shlex.quote(path.name)} | jq -c {each} > {shlex.quote(lines)}{also}"
    )


def _is_line(line: bytes, key: str | None) -> bool:
    """Return whether a line is a JSON object, with a key if one is asked for."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and (key is None or key in found)


def _first_line(path: Path) -> bytes:
    """Return the first line that is not blank, or the first BATCH_BYTES of a JSON list."""
    with damage_named(path), open_source(path) as file:
        line = _without_mark(file.readline(BATCH_BYTES))
        while line and not line.strip():
            line = file.readline(BATCH_BYTES)
        line = line.lstrip()
        while line[:1] == b"{" and not line.endswith(b"\n") and len(line) < LONGEST_LINE:
            more = file.readline(BATCH_BYTES)
            if not more:
                break
            line += more
    return line


def walk(
    folder: Path,
    skip: set[str],
    unknown: Counter[str],
    as_text: Sequence[str] = (),
    key: str | None = None,
    links: bool = False,
) -> Iterator[Path]:
    """Yield the text files below a folder, except in hidden folders (.git, .venv).

    unknown: counts the other files, by their suffix or as hidden. skip: names of folders to leave
    out. as_text: see `kind_of`. key: of JSON lines: a .json file is read as JSON lines if its first
    line has this key. links: whether links may lead out of the folder; else UserError, since who
    made them is perhaps not who reads them.
    """
    for base, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        listed = _listed(Path(base)) if "state.json" in files else None
        for path in (Path(base, name) for name in files):
            if listed is not None and path.suffix == ".json":
                continue  # it describes the others
            kind = kind_of(path, as_text)
            if path.name.startswith("."):
                unknown[HIDDEN] += 1
            elif kind is None or (listed is not None and path.name not in listed):
                unknown["".join(path.suffixes[-2:]) or path.name] += 1
            elif not path.is_file():
                unknown[f"{path.suffix} that is no file"] += 1
            elif kind == ".json" and not _is_line(_first_line(path), key):
                unknown[f"{path.suffix} that is not JSON lines"] += 1
            else:
                if not links:
                    _check_within(path, folder)
                yield without_links(path, as_text)


def without_links(path: Path, as_text: Sequence[str] = ()) -> Path:
    """Return the path with links resolved, unless the target's suffix tells another format.

    So a file in the cache of the Hugging Face hub keeps its name: its target is a blob without one.
    """
    found = path.resolve()
    kinds = [(kind_of(each, as_text), each.suffix in COMPRESSED) for each in (path, found)]
    return found if kinds[0] == kinds[1] else path.absolute()


def _check_within(path: Path, folder: Path) -> None:
    """Raise UserError if `path` is a link that leads out of the folder.

    The cache of the Hugging Face hub is an exception: its snapshots link to its blobs.
    """
    found, inside = path.resolve(), folder.resolve()
    allowed = [inside]
    for parent in (inside, *inside.parents):
        if parent.name == "snapshots":  # the cache of the Hugging Face hub: links to its blobs
            allowed.append(parent.parent / "blobs")
    if not any(found.is_relative_to(each) for each in allowed):
        raise CorpusError(
            f"{path} is a link to {found}, outside of {folder}: name that file itself"
        )


def _listed(folder: Path) -> list[str] | None:
    """Return the files of a data set that Hugging Face datasets has saved in a folder, or None."""
    path = folder / "state.json"
    try:
        state = json.loads(path.read_bytes())
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CorpusError(f"{path} lists {missing[0]}, which is not there")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise CorpusError(
            f"{folder} is a data set with an order of rows of its own, which is not read: save it "
            "after flatten_indices()"
        )
    return names


def check_order_of_rows(path: Path) -> None:
    """Raise UserError for an .arrow file of a data set that has an order of rows of its own."""
    if kind_of(path) == ".arrow" and (path.parent / "state.json").is_file():
        _listed(path.parent)


def open_file(path: Path, instead: str = "") -> IO[bytes]:
    """Open a file; UserError at once for a pipe or a device, which could wait for ever.

    instead: what the error proposes, such as BY_STDIN where a program reads that.
    """
    try:
        return io.BufferedReader(open_regular(path), 1 << 16)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise CorpusError(f"{path} is a pipe or a device, not a file{instead}") from None


@contextlib.contextmanager
def open_source(path: Path) -> Iterator[IO[bytes]]:
    """Open a file and decompress it; "-" is standard input. UserError for a pipe or a device."""
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    suffix = path.suffix.lower()
    with contextlib.ExitStack() as stack:
        if suffix == ".zst":
            arrow = package_for("pyarrow", path)
        raw: Any = stack.enter_context(open_file(path))
        if suffix == ".zst":
            # zstandard's own reader takes the end of a file that was cut short for its text's end.
            stream = arrow.input_stream(raw, compression="zstd")
            raw = stack.enter_context(io.BufferedReader(stream, 1 << 20))
        opens: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        if suffix in opens:
            raw = stack.enter_context(opens[suffix](raw, "rb"))
        yield raw


def blocks_of(path: Path, size: int) -> Iterator[bytes]:
    """Yield the bytes of a file of one document, in blocks of `size`; the last block is empty.

    The mark with which some programs begin UTF-8 is left out.
    """
    with open_source(path) as file:
        yield _without_mark(file.read(size))
        while block := file.read(size):
            yield block
    yield b""


# ---- Lines and rows ------------------------------------------------------------------------------


def texts_of(path: Path, key: str, bad: BadTexts) -> Iterator[str]:
    """Yield the text under `key` of each line or row; values that are no texts go to `bad`."""
    if kind_of(path) in LINES:
        for place, found in objects_of(path, key, bad):
            text = found[key]
            if isinstance(text, str):
                yield text
            else:
                bad.add(place, f"has {_named(text)} as {key!r}, not a text")
        return
    rows = _rows_of_csv if kind_of(path) == ".csv" else _rows_of_arrow
    for number, text in rows(path, key):
        if isinstance(text, str):
            yield text
        else:
            bad.add(f"{path}:{number}", f"has {_named(text)} as {key!r}, not a text")


def objects_of(
    path: Path, key: str | Sequence[str], bad: BadTexts
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of JSON lines that have a key, each with its FILE:LINE; others go to `bad`.

    key: its name, or several names of which an object has one. Texts of the objects can be written
    as UTF-8. Blank lines are skipped.
    """
    keys = (key,) if isinstance(key, str) else tuple(key)
    check_lines(path)
    with open_source(path) as file:
        for number, line in enumerate(_lines(file, path), 1):
            if number == 1:
                line = _without_mark(line)
            if line.strip():
                place = f"{path}:{number}"
                found = _parse_line(line, keys)
                if isinstance(found, str):
                    bad.add(place, found)
                else:
                    yield place, found


def _named(value: Any) -> str:
    """Return what a value is that is no text, in JSON's words where it has them."""
    if value is None:
        return "null"
    words = {bool: "true or false", list: "a list", dict: "an object", bytes: "bytes"}
    words |= {int: "a number", float: "a number"}
    return words.get(type(value), f"a {type(value).__name__}")


def _without_mark(begin: bytes) -> bytes:
    """Return the beginning of a file without the mark with which some programs begin UTF-8."""
    return begin.removeprefix(codecs.BOM_UTF8)


def _parse_line(line: bytes, keys: Sequence[str]) -> dict[str, Any] | str:
    """Return the object in a JSON line, which has one of the keys; why it is bad, if it is."""
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "is not UTF-8"
    except ValueError as error:  # also a number of 5,000 digits
        return f"is not JSON: {error}"
    except RecursionError:
        return "is not JSON that can be read: it is nested too deeply"
    key = next((key for key in keys if isinstance(found, dict) and key in found), None)
    if key is None:
        there = f", but {', '.join(map(repr, found))}" if isinstance(found, dict) and found else ""
        return f"has no key {' and no '.join(map(repr, keys))}{there:.200}"
    # What is no text is written as JSON again, to look at all of its texts.
    value = found[key]
    text = value if isinstance(value, str) else json.dumps(found, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        where = f", at place {error.start}" if text is value else ""
        return f"has half of a character, U+{code:04X}{where}"
    return found


def _lines(file: Any, path: Path) -> Iterator[Any]:
    """Yield the lines of a file, of bytes or of text; UserError for one that is too long."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise CorpusError(f"{path}:{number} is a line of more than {LONGEST_LINE:,} bytes")
        yield line


def _rows_of_csv(path: Path, key: str) -> Iterator[tuple[int, Any]]:
    """Yield the values of the column `key` of a CSV file, with the line on which each row ends."""
    csv.field_size_limit(LONGEST_LINE)
    with open_source(path) as file:
        decoded = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        table = csv.DictReader(_lines(decoded, path), strict=True)
        end = 0  # the line with which the row before ends
        try:
            if key not in (table.fieldnames or ()):
                there = ", ".join(table.fieldnames or ("nothing",))
                raise CorpusError(
                    f"{path} has no column {key!r} in its first line, but {there:.200}"
                )
            end = table.line_num
            for row in table:
                yield (end := table.line_num), row[key]
        except csv.Error as error:
            raise CorpusError(_mistake_of_csv(f"{path}:{end + 1}", str(error))) from None


def _mistake_of_csv(place: str, reason: str) -> str:
    """Return the error for a row that begins at a line, FILE:LINE, and is no row of CSV."""
    if "unexpected end of data" in reason:
        return f"{place} has a quote that is not closed until the end of the file"
    how = "; within a quoted text a quote is written twice" if "expected after" in reason else ""
    return f"{place} begins a row that is not CSV: {reason}{how}"


def _rows_of_arrow(path: Path, key: str) -> Iterator[tuple[int, Any]]:
    """Yield the row numbers, from 1, and values of the column `key` of a Parquet or Arrow file."""
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
    """Open a file that can be sought in; a compressed one is unpacked into a temporary file."""
    with open_source(path) as file:
        if path.suffix.lower() not in COMPRESSED:
            yield file
            return
        with tempfile.TemporaryFile() as unpacked:
            shutil.copyfileobj(file, unpacked, 1 << 20)
            unpacked.seek(0)
            yield unpacked


def _batches(path: Path, file: IO[bytes], key: str) -> Iterator[Any]:
    """Return the record batches of a Parquet or Arrow file; UserError if it has no column `key`.

    file: the open file at `path`, uncompressed.
    """
    if kind_of(path) == ".parquet":
        parquet = package_for("pyarrow.parquet", path)
        table = parquet.ParquetFile(file)
        _check_column(path, table.schema_arrow, key)
        rows = _batch_rows(table, key)
        if rows == BATCH_ROWS:
            # The file has few bytes for each row: short texts, or long ones that many rows
            # share, which are in memory once then, as they are in the file.
            table = parquet.ParquetFile(file, read_dictionary=[key])
        batches = table.iter_batches(rows, columns=[key])
    else:
        ipc = package_for("pyarrow.ipc", path)
        try:
            batches = ipc.open_stream(file)
            schema = batches.schema
        except ValueError:
            file.seek(0)
            whole = ipc.open_file(file)
            schema = whole.schema
            batches = (whole.get_batch(i) for i in range(whole.num_record_batches))
        _check_column(path, schema, key)
    return batches


def _check_column(path: Path, schema: Any, key: str) -> None:
    """Raise UserError unless a table has a column `key` without others in it; schema: Arrow's."""
    if key not in schema.names:
        raise CorpusError(f"{path} has no column {key!r}, but {', '.join(schema.names)}")
    column = schema.field(schema.get_field_index(key)).type
    if column.num_fields:
        raise CorpusError(f"{path}: the column {key!r} is a {column!s:.80}, and not of texts")


def _batch_rows(table: Any, key: str) -> int:
    """Return how many rows of a Parquet file take about BATCH_BYTES in the column `key`.

    By the file's metadata, from the row group with the largest rows; at most BATCH_ROWS.
    """
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
    """Return the number of tokens of each document of an HDF5 file, and all tokens in blocks.

    key: the name of the array of tokens. Raise UserError if the file holds no such array; the
    blocks raise it for a token that is not below vocab_size.
    """
    with _open_hdf5(path) as file:
        found = _array(file, path, key)
        if found.ndim not in (1, 2):
            raise CorpusError(f"{path}: {key!r} has {found.ndim} dimensions, not 1 or 2")
        if found.ndim == 2:
            lengths = np.full(len(found), found.shape[1])
        elif "lengths" in file.keys():  # noqa: SIM118
            lengths = np.asarray(_array(file, path, "lengths"), np.int64)
        else:
            lengths = np.array([len(found)])
        if lengths.ndim != 1 or (lengths < 0).any():
            raise CorpusError(f"{path}: 'lengths' has a negative number, or is no list of numbers")
        total = sum(lengths.tolist())
        if total != found.size:
            text = f"'lengths' adds up to {total}, but {key!r} has {found.size} tokens"
            raise CorpusError(f"{path}: {text}")
    return lengths, _token_blocks(path, key, vocab_size)


@contextlib.contextmanager
def _open_hdf5(path: Path) -> "Iterator[h5py.File]":
    """Open an HDF5 file that is not trusted, for reading.

    HDF5 gets the open file and not its path. Whether the file names other files is for `_array`.
    """
    import h5py

    with open_file(path) as raw, h5py.File(raw, "r") as file:
        yield file


def _array(file: "h5py.File", path: Path, key: str) -> "h5py.Dataset":
    """Return an array of integers that the file itself holds; UserError or ValueError."""
    import h5py

    from corpora.hdf5_files import check_stored, member

    names = list(itertools.islice(file, 10))
    if key.split("/")[0] not in file.keys():  # noqa: SIM118
        raise CorpusError(f"{path} has no array of integers {key!r}, but {', '.join(names)}")
    found = member(file, key, h5py.Dataset)
    if found.shape is None or found.dtype.kind not in "iu":
        raise CorpusError(f"{path} has no array of integers {key!r}, but {', '.join(names)}")
    check_stored(found, path.stat().st_size)
    return found


def _token_blocks(path: Path, key: str, vocab_size: int) -> Iterator[np.ndarray]:
    """Yield the token ids of the array `key` of an HDF5 file in blocks of about TOKENS_READ.

    Raise UserError for an id outside of the vocabulary, and for chunks too large to unpack.
    """
    with _open_hdf5(path) as file:
        found = _array(file, path, key)
        width = found.size // max(1, len(found))
        rows = max(1, TOKENS_READ // max(1, width))
        if found.chunks:  # whole chunks, else each would be unpacked again for every block
            rows = -(-rows // found.chunks[0]) * found.chunks[0]
        size = rows * width * found.dtype.itemsize
        if found.chunks and size > max(MOST_READ, width * found.dtype.itemsize):
            raise CorpusError(
                f"{path}: chunks of {key!r} have {found.chunks[0]:,} rows, together {size:,} "
                "bytes: write it again with fewer rows in a chunk"
            )
        for begin in range(0, len(found), rows):
            block = found[begin : begin + rows].reshape(-1)
            for token in (block.min(initial=0), block.max(initial=0)):
                if not 0 <= token < vocab_size:
                    raise CorpusError(f"token id {token} of an array is not in 0..{vocab_size - 1}")
            yield block
