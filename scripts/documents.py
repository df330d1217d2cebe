"""The documents of a preparation: copied from all files into one, and read in a shuffled order.

    copy_documents(job, paths, options, vocab_size)       job: partial_job.PartialJob
    documents = Documents(job, shuffle_seed=1234)
    for piece in documents.pieces(encoder): ...           whole documents, and parts of long ones

So memory does not depend on the inputs, but for 20 bytes a document: a text is in memory while it
is copied, a long one and an array of tokens in blocks.
"""

import array
import codecs
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from corpora.encoder import Encoder
from corpora.text_sources import (
    TOKENS,
    WHOLE,
    BadTexts,
    blocks_of,
    damage_named,
    kind_of,
    texts_of,
    tokens_of,
)
from scripts.encoders import find_cut
from scripts.partial_job import PartialJob
from scripts.progress import ByteProgress

BLOCK = 1 << 20  # bytes of a long document that are read at a time
PART = 1 << 16  # characters of a part of a long text
PLACES = 1 << 14  # documents looked up at a time
SECONDS_BETWEEN_SAVES = 1.0  # waiting for the disk after every file or chunk would take longer


# ---- Copying -------------------------------------------------------------------------------------


class _Copy:
    """The copy of all documents, from the state of a killed run on.

    state: files and bytes that are copied, documents that were left out, and the bad ones.
    """

    def __init__(self, job: PartialJob, limit: int):
        new = {"files": 0, "bytes": 0, "documents": 0, "empty": 0, "undecodable": 0, "bad": {}}
        self.state: dict[str, Any] = job.state.get("copied", new)
        self.bad = BadTexts(limit)
        self.bad.found = self.state["bad"]
        self.documents = job.open_at("documents", self.state["bytes"])
        self.sizes = job.open_at("sizes", 8 * self.state["documents"])

    def add(self, path: Path, options: Any, vocab_size: int) -> None:
        """Copy the documents of a file. UserError if it is damaged, or one of them is bad.

        options: those of prepare_data.py.
        """
        kind = kind_of(path, options.as_text)
        if kind in TOKENS:
            lengths, blocks = tokens_of(path, options.hdf5_key, vocab_size)
            for block in blocks:
                self.documents.write(block.astype("<i4").tobytes())
            self._note(-4 * lengths[lengths > 0])
            self.state["empty"] += int((lengths == 0).sum())
        elif kind in WHOLE:
            self._add_whole(path)
        else:
            sizes = array.array("q")
            for text in texts_of(path, options.json_key, self.bad):
                if not text or text.isspace():
                    self.state["empty"] += 1
                    continue
                raw = text.encode()
                self.documents.write(raw)
                sizes.append(len(raw))
            self._note(np.array(sizes))
        self.state["bytes"] = self.documents.tell()
        self.state["files"] += 1

    def _add_whole(self, path: Path) -> None:
        begin = self.documents.tell()
        left_out = self._copy_whole(path)
        if left_out:
            self.state[left_out] += 1
            self.documents.seek(begin)
            self.documents.truncate()
        else:
            self._note(np.array([self.documents.tell() - begin]))

    def _copy_whole(self, path: Path) -> str:
        """Copy a file of one document; return why it is left out, or nothing."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        empty, zeros, size = True, 0, 0
        try:
            for block in blocks_of(path, BLOCK):
                self.documents.write(block)
                empty = not decoder.decode(block, final=not block).strip() and empty
                zeros, size = zeros + block.count(0), size + len(block)
        except UnicodeDecodeError:
            return "undecodable"
        # English in UTF-16 without a mark is UTF-8 too, whose every second character is a NUL.
        if 4 * zeros > size:
            return "undecodable"
        return "empty" if empty else ""

    def _note(self, sizes: np.ndarray) -> None:
        """sizes: bytes of each document, as a negative number if they are tokens."""
        self.sizes.write(sizes.astype("<i8").tobytes())
        self.state["documents"] += len(sizes)


def copy_documents(job: PartialJob, paths: list[Path], options: Any, vocab: int) -> None:
    """Copy the documents of all files; those that are empty, and files that are not UTF-8, are left
    out and counted in job.state["copied"]. UserError for a bad document that is not to be skipped.
    """
    copy = _Copy(job, options.skip_bad)
    saved = time.monotonic()
    progress = ByteProgress("copying", sum(_size(path) for path in paths))
    with copy.documents, copy.sizes:
        for path in paths[copy.state["files"] :]:
            with damage_named(path):
                copy.add(path, options, vocab)
            progress.advance(_size(path))
            if time.monotonic() - saved >= SECONDS_BETWEEN_SAVES:
                job.save(copy.documents, copy.sizes, copied=copy.state)
                saved = time.monotonic()
        job.save(copy.documents, copy.sizes, copied=copy.state)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


# ---- Reading -------------------------------------------------------------------------------------


class TextPiece(NamedTuple):
    """A document or a part of one. following: where the next piece begins, a place of the order and
    bytes of that document that have been passed. begins, ends: whether the document does. forced:
    whether a token may differ at its end.
    """

    content: str | np.ndarray
    size: int
    begins: bool
    ends: bool
    following: tuple[int, int]
    forced: bool = False


class Documents:
    """The documents that a job has copied, in an order that follows from the seed.

    bytes: of all of them. text_bytes: of those that are no tokens. are_tokens: whether all are.
    """

    def __init__(self, job: PartialJob, shuffle_seed: int):
        self.sizes = np.fromfile(job.partial("sizes"), "<i8")
        self._starts = np.cumsum(np.abs(self.sizes)) - np.abs(self.sizes)
        self.bytes = int(np.abs(self.sizes).sum())
        self.text_bytes = int(self.sizes[self.sizes > 0].sum())
        self.are_tokens = self.bytes > 0 and self.text_bytes == 0
        count = len(self.sizes)
        # This is RandomState.permutation, in half the memory.
        self._order = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)
        np.random.RandomState(shuffle_seed).shuffle(self._order)
        self._file = open(job.partial("documents"), "rb")  # noqa: SIM115 (closed by `close`)

    def __len__(self) -> int:
        return len(self.sizes)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def bytes_before(self, place: tuple[int, int]) -> int:
        """Bytes of the pieces before the one that begins at a place."""
        return int(np.abs(self.sizes[self._order[: place[0]]]).sum()) + place[1]

    def pieces(
        self, encoder: Encoder | None, begin: tuple[int, int] = (0, 0)
    ) -> Iterator[TextPiece]:
        """All pieces from a place on that a piece has named as `following`.

        encoder: the tokens of the parts of a long text are those of the whole. Without one a long
        text is cut between words.
        """
        first, offset = begin
        for block in range(first, len(self), PLACES):
            chosen = self._order[block : block + PLACES]
            places = zip(self._starts[chosen].tolist(), self.sizes[chosen].tolist())
            for number, (start, size) in enumerate(places, block):
                if size < 0:
                    yield from self._tokens(number, start, -size, offset)
                elif size > 2 * PART:
                    yield from self._parts(number, start, size, offset, encoder)
                else:
                    text = os.pread(self._file.fileno(), size, start).decode()
                    yield TextPiece(text, size, True, True, (number + 1, 0))
                offset = 0

    def _tokens(self, number: int, start: int, size: int, offset: int) -> Iterator[TextPiece]:
        for begin in range(offset, size, BLOCK):
            raw = os.pread(self._file.fileno(), min(BLOCK, size - begin), start + begin)
            ends = begin + len(raw) == size
            following = (number + 1, 0) if ends else (number, begin + len(raw))
            yield TextPiece(np.frombuffer(raw, "<i4"), len(raw), not begin, ends, following)

    def _parts(
        self, number: int, start: int, size: int, offset: int, encoder: Encoder | None
    ) -> Iterator[TextPiece]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        text = ""
        passed = offset
        for begin in range(offset, size, BLOCK):
            raw = os.pread(self._file.fileno(), min(BLOCK, size - begin), start + begin)
            text += decoder.decode(raw)
            while len(text) > 2 * PART:
                place = find_cut(text[: 2 * PART], PART, encoder)
                end, following = place or (PART, PART)
                count = len(text[:following].encode())
                begins = passed == 0
                passed += count
                yield TextPiece(text[:end], count, begins, False, (number, passed), place is None)
                text = text[following:]
        yield TextPiece(text, size - passed, passed == 0, True, (number + 1, 0))
