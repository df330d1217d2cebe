"""Documents to tokens: cut into chunks, encoded by threads or processes, written in order.

Chunks follow from the documents alone, so the result does not depend on the number of processes.
A document that is longer than a chunk is read, cut and encoded in parts.
"""

import codecs
import functools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import numpy as np

from config.messages import UserError
from corpora.token_files import token_type_of
from scripts.documents import Documents, Found, Reader
from scripts.encoders import Encoder, find_cut
from scripts.word_cache import WordCache, as_bytes, splits_at_spaces

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
    """The means to turn a chunk into tokens. encoder: None if all documents are tokens already.

    vocab_size: UserError for tokens of a file that are not below it.
    """

    reader: Reader
    encoder: Encoder | None
    vocab_size: int

    @functools.cached_property
    def _words(self) -> WordCache | None:
        return WordCache(self.encoder) if self.encoder and splits_at_spaces(self.encoder) else None

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
        encoded.tokens = encoded.tokens.astype(token_type_of(self.vocab_size))
        return encoded

    def _check(self, tokens: np.ndarray) -> None:
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            bad = tokens.max() if tokens.min() >= 0 else tokens.min()
            raise UserError(f"token id {bad} of an array is not in 0..{self.vocab_size - 1}")

    def _encode(self, texts: list[str]) -> list[bytes]:
        """The ids of each text, int32."""
        if self.encoder is None:
            raise UserError("these are texts, and no tokenizer is named")
        if self._words:
            return self._words.encode(texts)
        return [as_bytes(ids) for ids in self.encoder.encode(texts)]

    def _long(self, chunk: Chunk) -> list[np.ndarray]:
        tokens, batch, parts = [], [], list(chunk.parts or [])
        for part in parts:
            batch.append(part)
            if sum(map(len, batch)) >= BATCH or part is parts[-1]:
                tokens += [np.frombuffer(ids, np.int32) for ids in self._encode(batch)]
                batch = []
        if chunk.ends and self.encoder:
            tokens.append(np.array([self.encoder.end], np.int32))
        return tokens

    def _documents(self, chunk: Chunk, encoded: Encoded) -> Iterator[np.ndarray]:
        """Tokens of whole documents, of a batch of texts at a time."""
        batch, size = [], 0
        for document in self.reader.read(chunk.places, encoded.found):
            if isinstance(document, np.ndarray) or len(document) > 2 * PART:
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
            encoded.found.size += len(document.encode())
            parts = list(cut_text(document, self.encoder, encoded.found)) if self.encoder else []
            document = np.concatenate(self._long(Chunk((0, 0), parts=parts or [document])))
        encoded.lengths.append(len(document))
        return document

    def _batch(self, batch: list[str], encoded: Encoded) -> np.ndarray:
        if not batch:
            return np.empty(0, np.int32)
        encoded.found.size += len("".join(batch).encode())
        ids = self._encode(batch)
        encoded.lengths += [len(own) // 4 + 1 for own in ids]
        end = as_bytes([self.encoder.end])  # type: ignore[union-attr]  # _encode has seen it
        return np.frombuffer(end.join([*ids, b""]), np.int32)


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
    """Every chunk with its tokens, in order; one process uses threads of the tokenizer."""
    workers = Workers(work, processes) if processes > 1 else None
    run, threads = (workers.run, processes) if workers else (work.run, THREADS)
    waiting: deque = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for chunk in all_chunks:
            waiting.append((chunk, pool.submit(run, chunk)))
            if len(waiting) > 2 * threads:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        if workers:
            workers.stop()  # else threads wait for them
        pool.shutdown(cancel_futures=True)


class Workers:
    """Processes that encode; they end when this process does. Each has one chunk at a time.

    A thread waits for each, so that one which has done its chunk gets the next at once.
    """

    def __init__(self, work: Work, count: int):
        context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._idle: SimpleQueue[tuple[int, Connection]] = SimpleQueue()
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, work), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._idle.put((process.pid or 0, ours))

    def run(self, chunk: Chunk) -> Encoded:
        """Encode a chunk in one of them; not by more threads than there are processes."""
        pid, connection = worker = self._idle.get()
        try:
            connection.send(chunk)
            result = connection.recv()
        except (EOFError, ConnectionError):
            raise UserError(f"process {pid} ended: was it killed?") from None
        finally:
            self._idle.put(worker)
        if isinstance(result, Exception):
            raise result
        return result

    def stop(self) -> None:
        """End them, whatever they do."""
        for process in self._processes:
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
