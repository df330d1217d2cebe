"""Documents to tokens: pieces in chunks, encoded by threads or processes, written in order.

Chunks follow from the documents alone, so the result does not depend on the number of processes.
"""

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from base.errors import CorpusError
from config.corpus_record import TEXT
from corpora.special_tokens import NameCounts
from corpora.token_files import checksums_of, token_type_of, write_index
from scripts import documents
from scripts.documents import TextPiece
from scripts.encoders import load_encoder
from scripts.partial_job import NAMES, PartialJob
from scripts.word_cache import WordCache, as_bytes, splits_at_spaces

# Bytes of documents that are encoded together: the tokenizer takes 100 bytes for each.
CHUNK = 1 << 19
THREADS = 2  # one reads while the other waits for the tokenizer, which has threads of its own
MOST_IN_DOCUMENT = 2**31 - 1  # tokens: lengths are 32 bits in this format


class Source(NamedTuple):
    """The arguments of `load_encoder`, by which each process loads its tokenizer."""

    name: str
    end_token: str | None
    special_tokens: str = TEXT


@dataclass
class Chunk:
    """Pieces that are encoded together: texts, or the tokens of one array."""

    pieces: list[TextPiece] = field(default_factory=list)
    size: int = 0  # bytes


class Encoded(NamedTuple):
    """The tokens of a chunk, int32, and how many each piece has, with what begins and ends it.

    named: how often each special token is named in a piece, by the piece's number in the chunk, of
    those that name one.
    """

    tokens: np.ndarray
    counts: list[int]
    named: dict[int, Counter[str]]


def chunks(pieces: Iterator[TextPiece]) -> Iterator[Chunk]:
    """All pieces, in chunks."""
    chunk = Chunk()
    for piece in pieces:
        is_tokens = isinstance(piece.content, np.ndarray)
        if chunk.pieces and (is_tokens or chunk.size >= CHUNK):
            yield chunk
            chunk = Chunk()
        chunk.pieces.append(piece)
        chunk.size += piece.size
        if is_tokens:
            yield chunk
            chunk = Chunk()
    if chunk.pieces:
        yield chunk


@functools.cache
def _encoder(source: Source):
    """What begins and ends a document, a function that gives the ids of texts, all of it as int32,
    and the names of special tokens: loaded once.
    """
    encoder = load_encoder(*source)
    begin, end = as_bytes(encoder.document_begin), as_bytes([encoder.end])
    if splits_at_spaces(encoder):
        return begin, end, WordCache(encoder).encode, encoder.names
    return begin, end, lambda texts: [as_bytes(ids) for ids in encoder.encode(texts)], encoder.names


def encode_chunk(source: Source | None, chunk: Chunk) -> Encoded:
    """The tokens of a chunk. What begins a document is not doubled where its text spells it."""
    content = chunk.pieces[0].content
    if isinstance(content, np.ndarray):
        return Encoded(content, [len(content)], {})
    if source is None:
        raise CorpusError("these are texts, and no tokenizer is named")
    begin, end, encode, names = _encoder(source)
    texts = [piece.content for piece in chunk.pieces]
    ended = []
    for own, piece in zip(encode(texts), chunk.pieces):
        own = begin + own if piece.begins and not (begin and own.startswith(begin)) else own
        ended.append(own + end * piece.ends)
    named = {number: found for number, text in enumerate(texts) if (found := names.find(text))}
    counts = [len(own) // 4 for own in ended]
    return Encoded(np.frombuffer(b"".join(ended), np.int32), counts, named)


def encode_all(
    every: Iterator[Chunk], source: Source | None, processes: int
) -> Iterator[tuple[Chunk, Encoded]]:
    """Every chunk with its tokens, in order; one process uses threads of the tokenizer."""
    pool: Executor = ThreadPoolExecutor(THREADS)
    if processes > 1:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(processes, context, _begin_process)
    waiting: deque[tuple[Chunk, Future]] = deque()
    try:
        for chunk in every:
            waiting.append((chunk, pool.submit(encode_chunk, source, chunk)))
            if len(waiting) > 2 * max(processes, THREADS):
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    except BrokenProcessPool:
        raise CorpusError("a process that encodes has ended: was it killed?") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_process() -> None:
    """One core for each process; it ends when the first process does, whatever ends that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process says what happens
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
    os._exit(1)


class PartialPair:
    """The pair of a job, written chunk by chunk; it gets its name at the end, all at once.

    tokens, documents, forced: so far, also by a killed run. named: the names of special tokens in
    them. largest: the largest id. next: where the next chunk begins.
    """

    def __init__(self, job: PartialJob, vocab_size: int, end_token: str | None):
        """end_token: the one that ends a document; None: its name is not known."""
        self.job = job
        self._end_token = end_token
        self._saved = time.monotonic()
        self.token_type = token_type_of(vocab_size)
        new = {"next": (0, 0), "tokens": 0, "documents": 0, "open": 0, "forced": 0}
        new |= {"largest": 0, "named": vars(NameCounts()), "open_named": {}}
        state = job.state.get("encoded", new)
        self.next: tuple[int, int] = tuple(state["next"])
        self.tokens = state["tokens"]
        self.documents = state["documents"]
        self.forced = state["forced"]
        self.largest: int = state["largest"]
        self.named = NameCounts(**state["named"] | {"times": Counter(state["named"]["times"])})
        self._open = state["open"]  # tokens so far of a document that goes on
        self._open_named = Counter[str](state["open_named"])  # names in that document
        self._bin = job.open_at("bin", self.tokens * self.token_type.itemsize)
        self._lengths = job.open_at("lengths", 4 * self.documents)

    def add(self, chunk: Chunk, encoded: Encoded) -> None:
        """Write a chunk; the state is saved every second or so."""
        tokens, counts, named = encoded
        self.largest = max(self.largest, int(tokens.max(initial=0)))
        lengths = []
        for number, (piece, count) in enumerate(zip(chunk.pieces, counts)):
            self._open += count
            self.forced += piece.forced
            self._open_named.update(named.get(number, {}))
            if self._open > MOST_IN_DOCUMENT:
                raise CorpusError(f"a document has more than {MOST_IN_DOCUMENT} tokens: divide it")
            if piece.ends:
                lengths.append(self._open)
                self._open = 0
                if self._open_named:
                    self.named.add(self._open_named, self._end_token)
                    self._open_named = Counter()
        self._bin.write(tokens.astype(self.token_type).tobytes())
        self._lengths.write(np.array(lengths, "<i4").tobytes())
        self.tokens += len(tokens)
        self.documents += len(lengths)
        self.next = chunk.pieces[-1].following
        if time.monotonic() - self._saved >= documents.SECONDS_BETWEEN_SAVES:
            self.save()

    def save(self) -> None:
        """Note in the job's state what is written; all of it is on the disk when this returns."""
        state = {"next": self.next, "tokens": self.tokens, "documents": self.documents}
        state |= {"open": self._open, "forced": self.forced, "largest": self.largest}
        state |= {"named": vars(self.named), "open_named": self._open_named}
        self.job.save(self._bin, self._lengths, encoded=state)
        self._saved = time.monotonic()

    def close(self) -> None:
        """Close the files, which stay."""
        self._bin.close()
        self._lengths.close()

    def finish(self, summary: str) -> None:
        """Write the index and the checksums, and publish; summary: for whoever goes on with it."""
        partial = self.job.partial
        lengths = np.fromfile(partial("lengths"), "<i4")
        write_index(partial("idx"), self.token_type, lengths, np.arange(len(lengths) + 1))
        sums = checksums_of(self.job.prefix, partial("bin").removesuffix(".bin"))
        Path(partial("sha256")).write_bytes(sums)
        names = [name for name in NAMES if os.path.exists(partial(name))]
        self.job.save(published=names, summary=summary)
