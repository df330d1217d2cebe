"""Documents to tokens: cut into chunks, encoded by threads or processes, written in order.

Chunks follow from the documents alone, so the result does not depend on the number of processes.
A document that is longer than a chunk is read, cut and encoded in parts.
"""

import array
import codecs
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from config.messages import UserError
from scripts.documents import Documents, Found, Reader
from scripts.encoders import Encoder, find_cut

CHUNK = 1 << 22  # bytes of documents that are encoded, written and journaled together
BATCH = 1 << 19  # characters that the tokenizer gets at a time: it takes 100 bytes for each
PART = 1 << 16  # characters of a part of a long text
PLACES = 1 << 14  # documents looked up at a time
THREADS = 2  # one reads while the other waits for the tokenizer, which has threads of its own


@dataclass
class Chunk:
    """Documents at `places`, or parts of a long one (texts, or tokens); what they give.

    next: where the following chunk begins: a document, and bytes of it that have been passed.
    size: bytes of input. ends: whether the long document ends here. found: counts known before.
    """

    next: tuple[int, int]
    size: int = 0
    places: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))
    parts: list[str] | np.ndarray | None = None
    ends: bool = True
    found: Found = field(default_factory=Found)


@dataclass
class Encoded:
    """Tokens of a chunk and how many each document has; the last may go on in the next chunk."""

    tokens: np.ndarray
    lengths: list[int]
    goes_on: bool
    found: Found


@dataclass
class Work:
    """What turns a chunk into tokens. encoder: None if all documents are tokens already.

    vocab_size: UserError for tokens of a file that are not below it.
    """

    reader: Reader
    encoder: Encoder | None
    vocab_size: int

    def run(self, chunk: Chunk) -> Encoded:
        """Encode a chunk."""
        encoded = Encoded(np.empty(0, np.int64), [], not chunk.ends, chunk.found)
        if isinstance(chunk.parts, np.ndarray):
            tokens = [chunk.parts]
            encoded.lengths = [len(chunk.parts)]
        elif chunk.parts is not None:
            tokens = self._long(chunk)
            encoded.lengths = [sum(map(len, tokens))]
        else:
            tokens = list(self._documents(chunk, encoded))
        if tokens:
            encoded.tokens = np.concatenate(tokens)
        self._check(encoded.tokens)
        return encoded

    def _check(self, tokens: np.ndarray) -> None:
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            bad = tokens.max() if tokens.min() >= 0 else tokens.min()
            raise UserError(f"token id {bad} of an array is not in 0..{self.vocab_size - 1}")

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if self.encoder is None:
            raise UserError("these are texts, and no tokenizer is named")
        return self.encoder.encode(texts)

    def _long(self, chunk: Chunk) -> list[np.ndarray]:
        tokens, batch, parts = [], [], list(chunk.parts or [])
        for part in parts:
            batch.append(part)
            if sum(map(len, batch)) >= BATCH or part is parts[-1]:
                tokens += [np.asarray(ids, np.int64) for ids in self._encode(batch)]
                batch = []
        if chunk.ends and self.encoder:
            tokens.append(np.array([self.encoder.end]))
        return tokens

    def _documents(self, chunk: Chunk, encoded: Encoded) -> Iterator[np.ndarray]:
        """Tokens of whole documents, of a batch of texts at a time."""
        batch, size = [], 0
        for document in self.reader.read(chunk.places, encoded.found):
            if isinstance(document, str):
                ascii_only = document.isascii()
                encoded.found.size += len(document) if ascii_only else len(document.encode())
            if len(document) > 2 * PART or isinstance(document, np.ndarray):
                yield self._batch(batch, encoded)
                yield self._one(document, encoded)
                batch, size = [], 0
                continue
            batch.append(document)
            size += len(document)
            if size >= BATCH:
                yield self._batch(batch, encoded)
                batch, size = [], 0
        yield self._batch(batch, encoded)

    def _one(self, document: str | np.ndarray, encoded: Encoded) -> np.ndarray:
        """Tokens of an array, or of a text that is cut."""
        if isinstance(document, str):
            parts = list(cut_text(document, self.encoder, encoded.found)) if self.encoder else []
            document = np.concatenate(self._long(Chunk((0, 0), parts=parts or [document])))
        encoded.lengths.append(len(document))
        return document

    def _batch(self, batch: list[str], encoded: Encoded) -> np.ndarray:
        ids: list[int] = []
        for own in self._encode(batch) if batch else []:
            ids += own
            ids.append(self.encoder.end)  # type: ignore[union-attr]  # _encode has seen it
            encoded.lengths.append(len(own) + 1)
        return np.frombuffer(array.array("q", ids), np.int64)  # in half the time of np.array


def cut_text(text: str, encoder: Encoder, found: Found) -> Iterator[str]:
    """Parts of a long text whose tokens, one after the other, are those of the whole."""
    begin = 0
    while len(text) - begin > 2 * PART:
        end, following = _cut(text, begin, encoder, found)
        yield text[begin:end]
        begin = following
    yield text[begin:]


def _cut(text: str, begin: int, encoder: Encoder, found: Found) -> tuple[int, int]:
    place = find_cut(text[begin : begin + 2 * PART], PART, encoder)
    if place is None:
        found.forced += 1
        place = (PART, PART)
    return begin + place[0], begin + place[1]


def chunks(
    documents: Documents, reader: Reader, encoder: Encoder | None, begin: tuple[int, int] = (0, 0)
) -> Iterator[Chunk]:
    """All chunks from a place on that a chunk has named as its `next`."""
    first, offset = begin
    while first < len(documents):
        places = documents.places(first, first + PLACES)
        long = reader.long_ones(places)
        stop = long[0] if long else len(places)
        sizes = np.cumsum(places[:stop, 2])
        row = 0
        while row < stop:
            passed = sizes[row - 1] if row else 0
            after = max(row + 1, int(np.searchsorted(sizes, passed + CHUNK)))
            size = int(sizes[after - 1] - passed)
            yield Chunk((first + after, 0), size, places[row:after])
            row = after
        if long:
            parts = _tokens_in_parts if reader.is_tokens(places[stop]) else _text_in_parts
            yield from parts(reader, places[stop], first + stop, offset, encoder)
            offset, stop = 0, stop + 1
        first += stop


def _tokens_in_parts(
    reader: Reader, place: np.ndarray, document: int, offset: int, encoder: Encoder | None
) -> Iterator[Chunk]:
    number, start, length = place.tolist()
    for begin in range(offset, length, CHUNK // 4):
        count = min(CHUNK // 4, length - begin)
        ends = begin + count == length
        following = (document + 1, 0) if ends else (document, begin + count)
        parts = reader.tokens(number, start + begin, count)
        yield Chunk(following, 4 * count, parts=parts, ends=ends)


def _text_in_parts(
    reader: Reader, place: np.ndarray, document: int, offset: int, encoder: Encoder | None
) -> Iterator[Chunk]:
    length, found = int(place[2]), Found()
    if encoder is None:
        raise UserError(f"{reader.paths[place[0]]} is a text, and no tokenizer is named")
    if not offset and not reader.check_long(place, found):
        yield Chunk((document + 1, 0), length, found=found)
        return
    decoder, text, parts, passed = codecs.getincrementaldecoder("utf-8")(), "", [], offset
    for block in reader.parts(place, offset):
        text += decoder.decode(block)
        begin = 0
        while len(text) - begin > 2 * PART:
            end, following = _cut(text, begin, encoder, found)
            parts.append(text[begin:end])
            found.size += len(text[begin:following].encode())
            begin = following
        text = text[begin:]
        if found.size >= CHUNK // 4:
            passed += found.size
            yield Chunk((document, passed), found.size, parts=parts, ends=False, found=found)
            parts, found = [], Found()
    parts.append(text)
    found.size += len(text.encode())
    yield Chunk((document + 1, 0), length - passed, parts=parts, found=found)


def encode_all(
    all_chunks: Iterator[Chunk], work: Work, processes: int
) -> Iterator[tuple[Chunk, Encoded]]:
    """Every chunk with its tokens, in order; one process uses threads."""
    if processes > 1:
        yield from _by_processes(all_chunks, work, processes)
        return
    waiting: deque = deque()
    pool = ThreadPoolExecutor(THREADS)
    try:
        for chunk in all_chunks:
            waiting.append((chunk, pool.submit(work.run, chunk)))
            if len(waiting) > THREADS:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _by_processes(
    all_chunks: Iterator[Chunk], work: Work, processes: int
) -> Iterator[tuple[Chunk, Encoded]]:
    """Processes take turns, each has one chunk at a time; they end when this process does."""
    context = multiprocessing.get_context("spawn")
    workers: deque[tuple[Any, Connection]] = deque()
    waiting: deque[Chunk] = deque()

    def exchange(chunk: Chunk | None) -> tuple[Chunk, Encoded] | None:
        """Take what the next process has done, and give it another chunk."""
        process, connection = workers[0]
        try:
            result = connection.recv() if len(waiting) == processes or chunk is None else None
            if chunk is not None:
                connection.send(chunk)
                waiting.append(chunk)
        except (EOFError, ConnectionError):
            raise UserError(f"process {process.pid} ended: was it killed?") from None
        workers.rotate(-1)
        if isinstance(result, Exception):
            raise result
        return (waiting.popleft(), result) if result is not None else None

    try:
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, work), daemon=True)
            process.start()
            theirs.close()
            workers.append((process, ours))
        for chunk in all_chunks:
            done = exchange(chunk)
            if done is not None:
                yield done
        workers.rotate(len(waiting))
        while waiting:
            done = exchange(None)
            assert done is not None
            yield done
    finally:
        for process, connection in workers:
            connection.close()
            process.terminate()
            process.join()


def _serve(connection: Connection, work: Work) -> None:
    """Encode the chunks that come, until the other side closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process says what happens
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each process
    while True:
        try:
            chunk = connection.recv()
        except (EOFError, OSError):  # the other side has ended, maybe while it wrote
            return
        try:
            connection.send(work.run(chunk))
        except Exception as error:  # for the first process
            connection.send(error)
