"""The documents of files, in a shuffled order: where each is, and reading it.

    documents = Documents(paths, shuffle_seed=1234, tokens_key="tokens")
    places = documents.places(0, 1000)             (1000, 3): file, first byte, bytes
    reader = Reader(paths, json_key="text", tokens_key="tokens")
    reader.read(places, found)                     texts, arrays of tokens

Only places are held in memory, about 12 bytes for a document. A reader serves several threads.
"""

import array
import codecs
import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from config.messages import UserError
from scripts.text_sources import (
    LINES,
    RECORD_HEADER,
    RECORDS,
    TOKENS,
    WHOLE,
    BadTexts,
    kind_of,
    parse_line,
    parse_lines,
)

MOST_OPEN = 64  # files
LONG = 1 << 22  # bytes of a document, or tokens of an array, that is read in parts
BLOCK = 1 << 20  # bytes read of it at a time
TOGETHER = 256  # documents that are parsed at a time if they are short lines


@dataclass
class Found:
    """A count of what was met in reading documents; `bad` by FILE:LINE. size: bytes of the texts in
    UTF-8.

    forced: cuts of long documents in places where tokens may differ.
    """

    size: int = 0
    undecodable: int = 0
    empty: int = 0
    forced: int = 0
    bad: dict[str, str] = field(default_factory=dict)

    def add(self, other: "Found") -> None:
        """Add what another one has counted."""
        for name, value in asdict(other).items():
            if name == "bad":
                self.bad |= value
            else:
                setattr(self, name, getattr(self, name) + value)


class Documents:
    """Where the documents of some files are. UserError for an array of tokens that is none.

    kinds: of the files. size: bytes of all documents as they are in the files; a token counts as 4.
    """

    def __init__(self, paths: list[Path], shuffle_seed: int, tokens_key: str = "tokens"):
        self.kinds = [kind_of(path) or "" for path in paths]
        sizes, starts = [], []
        for path, kind in zip(paths, self.kinds):
            own, size = _token_starts(path, tokens_key) if kind in TOKENS else _starts(path, kind)
            sizes.append(size)
            starts.append(own)
        self.size = sum(4 * s if k in TOKENS else s for s, k in zip(sizes, self.kinds))
        self._first = np.cumsum([0, *map(len, starts)])
        self._ends = np.array(sizes, np.int64)
        self._starts = np.concatenate([np.frombuffer(own, np.int64) for own in starts])
        self._headers = np.array([RECORD_HEADER.size * (k == RECORDS) for k in self.kinds])
        del starts
        # This is RandomState.permutation, in half the memory.
        count = len(self._starts)
        self._order = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)
        np.random.RandomState(shuffle_seed).shuffle(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def places(self, begin: int, end: int) -> np.ndarray:
        """(file, start, length) of the documents at these places of the order: (n, 3), int64."""
        chosen = self._order[begin:end].astype(np.int64)
        files = np.searchsorted(self._first, chosen, side="right") - 1
        starts, last = self._starts[chosen], chosen + 1 == self._first[files + 1]
        following = np.minimum(chosen + 1, len(self._starts) - 1)
        stops = np.where(last, self._ends[files], self._starts[following] - self._headers[files])
        return np.stack([files, starts, stops - starts], axis=1)

    def bytes_before(self, end: int) -> int:
        """Bytes of the documents before this place of the order."""
        blocks = range(0, end, BLOCK)
        return sum(int(self.places(b, min(end, b + BLOCK))[:, 2].sum()) for b in blocks)


def _starts(path: Path, kind: str) -> tuple[array.array, int]:
    """Byte offsets of the documents of a file of texts, and its size."""
    size = path.stat().st_size
    if kind in WHOLE:
        return array.array("q", [0]), size
    return (_record_starts if kind == RECORDS else _line_starts)(path), size


def _line_starts(path: Path) -> array.array:
    """Byte offsets of the lines of a file, without the blank ones."""
    starts, offset = array.array("q"), 0
    with open(path, "rb") as file:
        for line in file:
            if line.strip():
                starts.append(offset)
            offset += len(line)
    return starts


def _record_starts(path: Path) -> array.array:
    """Byte offsets of the texts in a file of records."""
    starts, offset = array.array("q"), 0
    with open(path, "rb") as file:
        while header := file.read(RECORD_HEADER.size):
            starts.append(offset + len(header))
            offset += len(header) + RECORD_HEADER.unpack(header)[0]
            file.seek(offset)
    return starts


def _token_starts(path: Path, key: str) -> tuple[np.ndarray, int]:
    """Where the documents of an HDF5 file begin, in tokens, and the number of tokens."""
    try:
        with h5py.File(path) as file:
            found = file.get(key)
            if not isinstance(found, h5py.Dataset) or found.dtype.kind not in "iu":
                raise UserError(f"{path} has no array of integers {key!r}, but {', '.join(file)}")
            if found.ndim == 2:
                return np.arange(len(found)) * found.shape[1], found.size
            if found.ndim != 1:
                raise UserError(f"{path}: {key!r} has {found.ndim} dimensions, not 1 or 2")
            lengths = np.asarray(file.get("lengths", [len(found)]), np.int64)
            if lengths.ndim != 1 or (lengths < 0).any() or lengths.sum() != len(found):
                text = f"'lengths' adds up to {lengths.sum()}, but {key!r} has {len(found)} tokens"
                raise UserError(f"{path}: {text}")
            return np.cumsum(lengths) - lengths, len(found)
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged, or not what its name says: {error}") from None


class Reader:
    """Reads documents at their places; it holds some files open."""

    def __init__(self, paths: list[Path], json_key: str, tokens_key: str = "tokens"):
        self.paths, self.json_key, self.tokens_key = paths, json_key, tokens_key
        self._kinds = [kind_of(path) or "" for path in paths]
        self._open: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> tuple:
        return self.paths, self.json_key, self.tokens_key

    def __setstate__(self, state: tuple) -> None:
        Reader.__init__(self, *state)

    def long_ones(self, places: np.ndarray) -> list[int]:
        """Which of these documents are read in parts; a line of JSON is not."""
        rows = np.flatnonzero(places[:, 2] > LONG).tolist()
        return [row for row in rows if self._kinds[places[row, 0]] not in LINES]

    def is_tokens(self, place: np.ndarray) -> bool:
        """Whether a document is tokens, not a text."""
        return self._kinds[place[0]] in TOKENS

    def read(self, places: np.ndarray, found: Found) -> Iterator[str | np.ndarray]:
        """Documents; those that are empty, bad or not UTF-8 are left out and counted."""
        for begin in range(0, len(places), TOGETHER):
            some = places[begin : begin + TOGETHER]
            yield from self._short_lines(some) or self._one_by_one(some.tolist(), found)

    def _short_lines(self, places: np.ndarray) -> list[str] | None:
        """The texts of lines of JSON; None if they are others, or one has to be left out."""
        files, total = set(places[:, 0].tolist()), int(places[:, 2].sum())
        others = any(self._kinds[number] not in LINES for number in files)
        if others or total > BLOCK or len(files) > MOST_OPEN:
            return None
        file_of = {number: self._file(number, open) for number in files}
        lines = [
            os.pread(file_of[number].fileno(), length, start)
            for number, start, length in places.tolist()
        ]
        return parse_lines(lines, self.json_key) if sum(map(len, lines)) == total else None

    def _one_by_one(self, places: list[list[int]], found: Found) -> Iterator[str | np.ndarray]:
        bad = BadTexts(limit=len(places))
        for number, start, length in places:
            if self._kinds[number] in TOKENS:
                if length:
                    yield self.tokens(number, start, length)
                else:
                    found.empty += 1
                continue
            raw = self._bytes(number, start, length)
            try:
                if self._kinds[number] in LINES:
                    # Blank lines between this one and the next document belong to its place.
                    text = parse_line(raw.rstrip(), (number, start), self.json_key, bad)
                else:
                    text = raw.decode("utf-8")
            except UnicodeDecodeError:
                found.undecodable += 1
                continue
            if text is not None and not text.isspace() and text:
                yield text
            elif text is not None:
                found.empty += 1
        # Where a line is takes long to find, so only if it is bad.
        for (number, start), reason in bad.found.items():
            found.bad[line_of(self.paths[number], start)] = reason

    def parts(self, place: np.ndarray, offset: int = 0) -> Iterator[bytes]:
        """The bytes of a long text from byte `offset` of it on, about a BLOCK at a time."""
        number, start, length = place.tolist()
        for begin in range(offset, length, BLOCK):
            yield self._bytes(number, start + begin, min(BLOCK, length - begin))

    def check_long(self, place: np.ndarray, found: Found) -> bool:
        """Whether a long text is UTF-8 and not empty; counts it if not."""
        decoder, empty = codecs.getincrementaldecoder("utf-8")(), True
        try:
            for part in itertools.chain(self.parts(place), [b""]):
                text = decoder.decode(part, final=not part)
                empty = empty and not text.strip()
        except UnicodeDecodeError:
            found.undecodable += 1
            return False
        found.empty += empty
        return not empty

    def tokens(self, number: int, start: int, length: int) -> np.ndarray:
        """Tokens of an HDF5 file, counted over all rows. UserError if they cannot be read."""
        path = self.paths[number]
        try:
            file = self._file(number, h5py.File)
            array = file[self.tokens_key]
            if array.ndim == 1:
                return array[start : start + length].astype(np.int64)
            width = array.shape[1]
            rows = array[start // width : -(-(start + length) // width)].reshape(-1)
            return rows[start % width :][:length].astype(np.int64)
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"{path} is damaged: {error}") from None

    def _bytes(self, number: int, start: int, length: int) -> bytes:
        file = self._file(number, open)
        raw = os.pread(file.fileno(), length, start)
        if len(raw) != length:
            raise UserError(f"{self.paths[number]} became shorter while it was read")
        return raw

    def _file(self, number: int, kind: Any) -> Any:
        with self._lock:
            if number not in self._open:
                self._open[number] = kind(self.paths[number], *(["rb"] if kind is open else []))
                if len(self._open) > MOST_OPEN:  # closed when no thread reads it any more
                    self._open.pop(next(iter(self._open)))
            return self._open[number]


def line_of(path: Path, offset: int) -> str:
    """FILE:LINE of a byte offset, for a message."""
    line, left = 1, offset
    with open(path, "rb") as file:
        while left:
            block = file.read(min(left, 1 << 20))
            line, left = line + block.count(b"\n"), left - len(block)
    return f"{path}:{line}"
