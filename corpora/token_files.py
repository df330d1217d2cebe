"""Token files: the .bin/.idx pair of Megatron-LM, memory-mapped to read, written as a stream.

    PREFIX.bin   tokens of all sequences, one after the other, nothing else
    PREFIX.idx   little-endian, without padding:
        9 bytes  MMIDIDX\\0\\0          magic
        u64      1                    version
        u8       4 int32, 8 uint16    token type; TOKEN_TYPES has the others
        u64, u64                      S sequences, D document boundaries
        S x i32                       length of each sequence, in tokens
        S x i64                       offset of each sequence in the .bin, in bytes
        D x i64                       first sequence of each document, and S at the end
        S x i8                        modes of multimodal data; optional, ignored

The format is that of megatron/core/datasets/indexed_dataset.py (0.16): Trine and Megatron read each
other's files, and write the same bytes for the same documents. For --answers-only, a second pair
PREFIX.targets.bin and .idx has a mark for each token: 1 in an answer, else 0.
"""

import array
import contextlib
import hashlib
import os
import shlex
import stat
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from base.errors import CorpusError
from base.regular_files import open_regular
from corpora.mapped_files import ArrayCache, MappedFile

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, token type, sequences, document boundaries
TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
ANSWERS = ".targets"  # PREFIX.targets.bin and .idx mark the tokens of answers
BLOCK = 1 << 16  # sequences that are checked at a time: temporary arrays stay in a core's cache


class IndexedDataset:
    """Reads a .bin/.idx pair: the index is mapped, tokens are read by their offset.

    lengths: the tokens of each sequence, (S,). offsets: the first byte of each sequence in the
    .bin, (S,). documents: the first sequence of each document, and S at the end. identity: a value
    that changes when another pair replaces this pair. unsigned: the unsigned type of the same size
    as a token. bytes: the size of the .bin. answers: the pair with a mark for each token; None
    until `open_answers` is called.

    Raise UserError for a damaged pair. A pair whose identity is in `cache` is not checked again.

    Tokens are not mapped: a mapping would read 128 KiB and more around every cold page, and hold
    Python's lock during the read. `os.pread` reads only the tokens, while other threads run.
    """

    def __init__(self, prefix: str, cache: ArrayCache | None = None):
        """Open the pair PREFIX.bin, PREFIX.idx, and check it unless `cache` remembers a check.

        identity: path, size, times and inode of both files, by which caches know the pair. answers:
        None until `open_answers` opens the pair of marks.
        """
        self.prefix = prefix
        self._index_path = prefix + ".idx"
        self._tokens_path = prefix + ".bin"
        self.identity = [_identity(path) for path in (self._index_path, self._tokens_path)]
        self._index = _map(self._index_path)
        self._tokens = _open(self._tokens_path)  # the descriptor of the .bin
        weakref.finalize(self, os.close, self._tokens)
        self.token_type, sequences, boundaries = _read_header(self._index_path, self._index.bytes)
        # The unsigned type of a token's size, with which negative ids are found (sample_order.py).
        self.unsigned = np.dtype(f"<u{self.token_type.itemsize}")
        # The header is followed by three arrays, of 4, 8 and 8 bytes an entry. An array of modes,
        # one byte for each sequence, may come after them; text does not use it.
        lengths_at = HEADER.size
        offsets_at = lengths_at + 4 * sequences
        documents_at = offsets_at + 8 * sequences
        raw = self._index.bytes
        self.lengths = np.frombuffer(raw, "<i4", sequences, lengths_at)
        self.offsets = np.frombuffer(raw, "<i8", sequences, offsets_at)
        self.documents = np.frombuffer(raw, "<i8", boundaries, documents_at)
        self.bytes = os.fstat(self._tokens).st_size
        self.cache = cache or ArrayCache()
        self.answers: IndexedDataset | None = None
        # The cache calls `_check` unless it remembers that a pair of this identity was checked.
        self.cache.find({"checked pair": 1, "files": self.identity}, self._check)

    def open_answers(self) -> None:
        """Open PREFIX.targets.bin and .idx: for each token a mark, 1 in an answer, else 0.

        Called for --answers-only. Raise UserError if there is no such pair, or if its sequences
        have other lengths.
        """
        answers = IndexedDataset(self.prefix + ANSWERS, self.cache)
        if not np.array_equal(answers.lengths, self.lengths):
            ours = f"{self.prefix}: {len(self)} sequences of {self.tokens} tokens"
            theirs = f"{len(answers)} of {answers.tokens}, or of other lengths"
            raise CorpusError(f"{ours}, but {answers.prefix} has {theirs}")
        self.answers = answers

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences."""
        return self.bytes // self.token_type.itemsize

    def tokens_in(self, sequences: range) -> int:
        """Return the number of tokens in a range of sequences, by their first and last byte.

        `offsets` has the first byte of each sequence, `bytes` is the size of the .bin. Called with
        the sequences of a split, to count its tokens.
        """
        first_byte, stop_byte = (
            int(self.offsets[sequence]) if sequence < len(self) else self.bytes
            for sequence in (sequences.start, sequences.stop)
        )
        return (stop_byte - first_byte) // self.token_type.itemsize

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` tokens of a sequence from token `offset` on; None: up to its end.

        Raise IndexError if the sequence does not have so many tokens.
        """
        size = int(self.lengths[sequence])
        length = size - offset if length is None else length
        if not 0 <= offset <= offset + length <= size:
            raise IndexError(f"tokens {offset}..{offset + length} of a sequence of {size}")
        return self.read(np.array([sequence]), [offset], [length])

    def read(self, sequences: np.ndarray, offsets: list[int], lengths: list[int]) -> np.ndarray:
        """Return the tokens of several cuts in one array, cut after cut.

        A cut is a part of a sequence: it has a sequence, a first token there (`offsets`) and a
        number of tokens (`lengths`). The cuts of a sample are read in one call. Raise UserError,
        with the .bin's name, if the file has become shorter or cannot be read.
        """
        width = self.unsigned.itemsize  # the bytes of a token
        starts = self.offsets[sequences].tolist()  # for each cut, the first byte of its sequence
        file = self._tokens
        pread = os.pread
        try:
            parts = [
                pread(file, width * length, start + width * offset)
                for start, offset, length in zip(starts, offsets, lengths)
            ]
        except OSError as error:
            raise CorpusError(f"cannot read {self._tokens_path}: {error.strerror}") from None
        raw = parts[0] if len(parts) == 1 else b"".join(parts)
        if len(raw) != width * sum(lengths):
            raise CorpusError(self._short())
        return np.frombuffer(raw, self.token_type)

    def check_size(self) -> None:
        """Raise UserError if the index has become shorter since it was opened.

        Called before the index is used for a sample, because reading the missing part of its
        mapping would end the process. `read` notices missing tokens without this check.
        """
        self._index.check()

    def _short(self) -> str:
        """Return the error message for a .bin that has become shorter since it was opened.

        `read` raises it if it gets fewer bytes than it asked for.
        """
        now = f"it has {os.fstat(self._tokens).st_size} bytes and had {self.bytes}"
        return f"{self._tokens_path} was cut short while the run reads it: {now}"

    def document_of(self, sequence: int) -> int:
        """Return the number of the document that a sequence belongs to.

        It is the last document whose first sequence is not after this sequence.
        """
        return int(np.searchsorted(self.documents, sequence, side="right")) - 1

    def _check(self) -> dict[str, np.ndarray]:
        """Raise UserError if lengths, offsets or boundaries are wrong.

        The cache calls this for a pair of files that it has no entry for, and stores the result: an
        entry without arrays, whose presence alone says that the pair has been checked.
        """
        self._check_documents()
        self._check_sequences(self.bytes, self.token_type.itemsize)
        return {}

    def _check_documents(self) -> None:
        """Raise UserError unless the document boundaries rise from 0 to the number of sequences."""
        bounds = self.documents
        sequences = len(self)
        # The places in `bounds` of wrong boundaries: smaller than the boundary before, the first if
        # it is not 0, the last if it is not the number of sequences. The first place is reported.
        wrong = (1 + np.flatnonzero(bounds[1:] < bounds[:-1])).tolist()
        if not len(bounds) or bounds[0] != 0:
            wrong = [0]
        elif bounds[-1] != sequences and not wrong:
            wrong = [len(bounds) - 1]
        if wrong:
            first = wrong[0]
            value = bounds[first] if len(bounds) else "missing"
            raise CorpusError(
                f"{self._index_path}: document boundaries must rise from 0 to its {sequences} "
                f"sequences, but boundary {first} of {len(bounds)} is {value}"
            )

    def _check_sequences(self, actual: int, itemsize: int) -> None:
        """Raise UserError unless the sequences, in order, fill the .bin of `actual` bytes.

        itemsize: the bytes of a token.
        """
        path = self._index_path
        expected = 0  # the byte at which the next sequence must start
        for begin in range(0, len(self), BLOCK):
            # For each sequence of this block: its bytes, and where it must end and begin in the
            # .bin if it follows the sequence before it; `expected` is where the block must begin.
            sizes = self.lengths[begin : begin + BLOCK].astype(np.int64) * itemsize
            ends = expected + np.cumsum(sizes)
            starts = ends - sizes
            wrong = (sizes < 0) | (self.offsets[begin : begin + BLOCK] != starts)
            if wrong.any():
                first = int(wrong.argmax())
                i = begin + first
                if sizes[first] < 0:
                    raise CorpusError(f"{path}: sequence {i} has {self.lengths[i]} tokens")
                raise CorpusError(
                    f"{path}: sequence {i} starts at byte {self.offsets[i]} of the .bin, but the "
                    f"sequences before it end at byte {starts[first]}"
                )
            expected = int(ends[-1])
        if actual != expected:
            raise CorpusError(
                f"{self._tokens_path} has {actual} bytes, but {path} describes {expected}"
            )


def _read_header(path: str, index: np.ndarray) -> tuple[np.dtype, int, int]:
    """Return the token type and the numbers of sequences and boundaries of an .idx file.

    path: the file's name for messages. index: its bytes. Raise UserError if its header is wrong, or
    its size does not fit these numbers.
    """
    if len(index) < HEADER.size:
        sides = f"{len(index)} bytes, the header has {HEADER.size}"
        raise CorpusError(f"{path} is cut short: {sides}")
    magic, version, code, sequences, boundaries = HEADER.unpack(index[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise CorpusError(f"{path} is not a token index: it starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise CorpusError(f"{path} has format version {version}, only {VERSION} is known")
    if code not in TOKEN_TYPES:
        known = ", ".join(f"{c} ({np.dtype(t)})" for c, t in TOKEN_TYPES.items())
        raise CorpusError(f"{path} has dtype code {code}; token ids are one of {known}")
    # A sequence has a length of 4 bytes and an offset of 8, and perhaps a mode of 1 byte.
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if len(index) not in (expected, expected + sequences):
        raise CorpusError(
            f"{path} has {len(index)} bytes, but its header ({sequences} sequences, "
            f"{boundaries} document boundaries) needs {expected}"
        )
    return np.dtype(TOKEN_TYPES[code]), sequences, boundaries


def _map(path: str) -> MappedFile:
    """Return the file `path`, mapped into memory; raise UserError if it cannot be read."""
    with _opening(path):
        return MappedFile(path)


def _open(path: str) -> int:
    """Open a file to read, without read-ahead by the kernel, and return its descriptor.

    Samples are read in random order, so the bytes after a cut are not needed soon.
    """
    with _opening(path):
        with open_regular(path) as file:
            descriptor = os.dup(file.fileno())
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _missing(path: str) -> str:
    """Return the error text for a file of a pair that is not there; path: PREFIX.idx or .bin."""
    prefix = path.removesuffix(".idx")
    of_pair = prefix.removesuffix(".bin").removesuffix(".idx")
    text = (
        f"{path} does not exist; a corpus is named by the PREFIX of its pair PREFIX.bin, PREFIX.idx"
    )
    if of_pair != prefix and os.path.exists(f"{of_pair}.idx"):
        return f"{text}: give {of_pair}"
    source = shlex.quote(prefix) if os.path.exists(prefix) else "TEXTS"
    return f"{text}, which `python scripts/prepare_data.py --out PREFIX {source}` writes"


@contextlib.contextmanager
def _opening(path: str) -> Iterator[None]:
    """Raise UserError if the file that the `with` block opens is missing or cannot be read."""
    try:
        yield
    except FileNotFoundError:
        raise CorpusError(_missing(path)) from None
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from None


def _identity(path: str) -> list:
    """Return the file's path, size, times and inode, which change if it is replaced or written to.

    Caches know a corpus by these values. Raise UserError if the file is missing, or is a folder or
    a pipe.
    """
    with _opening(path):
        facts = os.stat(path)
    if not stat.S_ISREG(facts.st_mode):
        raise CorpusError(f"cannot read {path}: it is no file ({stat.filemode(facts.st_mode)})")
    times = facts.st_mtime_ns, facts.st_ctime_ns
    return [os.path.realpath(path), facts.st_size, *times, facts.st_ino]


def check_pair(prefix: str, answers: bool = False) -> int:
    """Return the number of tokens of a pair, from its index's header and the size of its .bin.

    Called before torch is imported, to report mistakes early; nothing else is read. answers:
    whether a pair of marks must exist too, with the same number of tokens. Raise UserError if a
    pair is missing, unreadable or has a wrong header.
    """
    index = _map(prefix + ".idx")
    tokens = _map(prefix + ".bin")
    token_type, _, _ = _read_header(prefix + ".idx", index.bytes)
    count = len(tokens.bytes) // token_type.itemsize
    if not answers:
        return count
    if not os.path.exists(prefix + ANSWERS + ".idx"):
        raise CorpusError(
            f"--answers-only: {prefix} has no {prefix}{ANSWERS}.bin and .idx, which mark answers; "
            "scripts/prepare_chats.py writes them"
        )
    marks = check_pair(prefix + ANSWERS)
    if marks != count:
        raise CorpusError(
            f"{prefix} has {count} tokens, but {prefix}{ANSWERS} has marks of {marks}"
        )
    return count


def note_on_answers(prefix: str, answers_only: bool) -> list[str]:
    """Return a note if a corpus marks answers, and a run does not train on these alone."""
    if answers_only or not os.path.exists(prefix + ANSWERS + ".idx"):
        return []
    marks = f"{prefix} marks answers ({prefix}{ANSWERS}.idx)"
    return [f"{marks}: without --answers-only all of its tokens count in the loss"]


def largest_id(prefix: str, limit: int, most_bytes: int) -> int | None:
    """Return the largest token id of a pair, if it may be `limit` or more; None: not known.

    It is looked for in a .bin of at most `most_bytes`. A negative id counts as one of its bits.
    """
    token_type, _, _ = _read_header(prefix + ".idx", _map(prefix + ".idx").bytes)
    unsigned = np.dtype(f"<u{token_type.itemsize}")
    if np.iinfo(unsigned).max < limit:
        return int(np.iinfo(unsigned).max)
    tokens = _map(prefix + ".bin").bytes
    if len(tokens) > most_bytes:
        return None
    whole = tokens[: len(tokens) // unsigned.itemsize * unsigned.itemsize].view(unsigned)
    return int(whole.max(initial=0))


def token_type_of(vocab_size: int) -> np.dtype:
    """Return the type of the token ids in a file: uint16 if the vocabulary is small, else int32.

    The threshold, a little below 2^16, is Megatron's.
    """
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def write_index(path: str, kind: np.dtype, lengths: np.ndarray, documents: np.ndarray) -> None:
    """Write an .idx file and flush it to the disk.

    The sequences fill the .bin in order, so their offsets follow from their lengths. kind: the type
    of the tokens. lengths: the number of tokens of each sequence, int32 (S,). documents: the first
    sequence of each document, then S.
    """
    sizes = lengths.astype("<i8") * kind.itemsize
    codes = {name: code for code, name in TOKEN_TYPES.items()}
    offsets = np.cumsum(sizes) - sizes
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, codes[kind.str], len(lengths), len(documents)))
        for column in (lengths, offsets, documents.astype("<i8")):
            file.write(column.tobytes())
        file.flush()
        os.fsync(file.fileno())


def checksums_of(prefix: str, source: str | None = None) -> bytes:
    """Return the contents of PREFIX.sha256: the lines that `sha256sum` prints for a pair.

    prefix: the pair's name in the lines. source: the prefix under which the files are now, if they
    get their names later; None: `prefix`.
    """
    lines = []
    for suffix in (".bin", ".idx"):
        with open((source or prefix) + suffix, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{digest}  {os.path.basename(prefix + suffix)}\n")
    return "".join(lines).encode()


class IndexedDatasetWriter:
    """Writes a .bin/.idx pair document by document, with the same bytes as Megatron's builder.

    tokens: the number of tokens written so far. largest_id: the largest of them.

        with IndexedDatasetWriter("data/books", vocab_size=50257) as writer:
            writer.add_document(tokens)                   # or several sequences of one document

    The pair gets its name when the `with` block ends; an exception in it leaves no file.
    """

    def __init__(self, prefix: str, vocab_size: int):
        """Open PREFIX.bin under a temporary name, and make its folder; `__exit__` renames it."""
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.tokens = 0  # the number of tokens written so far
        self.largest_id = 0  # of these tokens
        self.token_type = token_type_of(vocab_size)
        self._lengths = array.array("i")  # the tokens of each sequence
        # The first sequence of each document, and at the end the first of the next document.
        self._documents = array.array("q", [0])
        self._partial = f"{prefix}.{os.getpid()}.partial"  # a name that no other process uses
        try:
            os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
            self._file = open(self._partial + ".bin", "wb")  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise CorpusError(f"cannot write {prefix}.bin: {error.strerror}") from None

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, kind: type | None, error: object, traceback: object) -> None:
        """End the `with` block: if it raised no exception, finish the pair and give it its name.

        kind: the type of the exception, or None. Temporary files are removed in both cases.
        """
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            for suffix in (".bin", ".idx"):
                Path(self._partial + suffix).unlink(missing_ok=True)

    @property
    def documents(self) -> int:
        """The number of documents added so far."""
        return len(self._documents) - 1

    def add_document(self, *sequences) -> None:
        """Append a document, given by the token ids of its sequences.

        Raise UserError if a token id is outside the vocabulary.
        """
        for sequence in sequences:
            ids = np.asarray(sequence, np.int64)
            bad = ids[(ids < 0) | (ids >= self.vocab_size)]
            if len(bad):
                raise CorpusError(
                    f"{self.prefix}: document {self.documents} has token id {bad[0]}, "
                    f"but the vocabulary has {self.vocab_size}"
                )
            self._file.write(ids.astype(self.token_type).tobytes())
            self._lengths.append(len(ids))
            self.tokens += len(ids)
            self.largest_id = max(self.largest_id, int(ids.max(initial=0)))
        self._documents.append(len(self._lengths))

    def _finish(self) -> None:
        """Write the index, then rename both files; called when all documents are written."""
        lengths = np.array(self._lengths, "<i4")
        documents = np.array(self._documents, "<i8")
        write_index(self._partial + ".idx", self.token_type, lengths, documents)
        self._file.flush()
        os.fsync(self._file.fileno())
        # An old index must never describe new tokens, even if this process is killed here. So the
        # old index is removed first, and the new index, without which no pair is found, is renamed
        # last.
        Path(self.prefix + ".idx").unlink(missing_ok=True)
        for suffix in (".bin", ".idx"):
            os.replace(self._partial + suffix, self.prefix + suffix)
