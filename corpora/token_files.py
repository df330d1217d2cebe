"""Token files: the .bin/.idx pair of Megatron-LM, memory-mapped to read, written as a stream.

    PREFIX.bin   tokens of all sequences, one after the other, nothing else
    PREFIX.idx   little-endian, without padding:
        9 bytes  MMIDIDX\\0\\0          magic
        u64      1                    version
        u8       4 int32, 8 uint16    token type; TOKEN_TYPES has the others
        u64, u64                      S sequences, D document boundaries
        S x i32                       length of each sequence, in tokens
        S x i64                       its offset in the .bin, in bytes
        D x i64                       first sequence of each document, and S at the end
        S x i8                        modes of multimodal data; optional, ignored

The format is that of megatron/core/datasets/indexed_dataset.py (0.16): each reads the other's
files, and for the same documents both write the same bytes.
"""

import array
import os
import struct
from pathlib import Path

import numpy as np

from config.messages import UserError

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, token type, sequences, document boundaries
TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
BLOCK = 1 << 22  # sequences checked at a time, to bound temporary memory


class IndexedDataset:
    """Read-only view of a .bin/.idx pair; both are memory-mapped, so ranks share the page cache.

    `lengths` (tokens) and `offsets` (bytes) have an entry per sequence, `documents` holds the
    first sequence of each document and a final S. A damaged pair raises UserError.
    """

    def __init__(self, prefix: str):
        self.prefix = prefix
        self._index_path, self._tokens_path = prefix + ".idx", prefix + ".bin"
        index = _map(self._index_path)
        kind, sequences, boundaries = self._read_header(index)
        places = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences]).tolist()
        # An array of modes (one byte per sequence) may follow; text does not use it.
        self.lengths = np.frombuffer(index, "<i4", sequences, places[0])
        self.offsets = np.frombuffer(index, "<i8", sequences, places[1])
        self.documents = np.frombuffer(index, "<i8", boundaries, places[2])
        raw = _map(self._tokens_path)
        self._check_documents()
        self._check_sequences(len(raw), kind.itemsize)
        self.tokens = raw.view(kind)

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens of a sequence from token `offset` on; None: up to its end. IndexError."""
        size = int(self.lengths[sequence])
        length = size - offset if length is None else length
        if not 0 <= offset <= offset + length <= size:
            raise IndexError(f"tokens {offset}..{offset + length} of a sequence of {size}")
        begin = int(self.offsets[sequence]) // self.tokens.itemsize + offset
        return self.tokens[begin : begin + length]

    def document_of(self, sequence: int) -> int:
        """The document that a sequence belongs to."""
        return int(np.searchsorted(self.documents, sequence, side="right")) - 1

    def _read_header(self, index: np.ndarray) -> tuple[np.dtype, int, int]:
        path = self._index_path
        if len(index) < HEADER.size:
            found = f"{path} is cut short: {len(index)} bytes"
            raise UserError(f"{found}, the header has {HEADER.size}")
        magic, version, code, sequences, boundaries = HEADER.unpack(index[: HEADER.size].tobytes())
        if magic != MAGIC:
            raise UserError(f"{path} is not a token index: it starts with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise UserError(f"{path} has format version {version}, only {VERSION} is known")
        if code not in TOKEN_TYPES:
            known = ", ".join(f"{c} ({np.dtype(t)})" for c, t in TOKEN_TYPES.items())
            raise UserError(f"{path} has dtype code {code}; token ids are one of {known}")
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if len(index) not in (expected, expected + sequences):
            raise UserError(
                f"{path} has {len(index)} bytes, but its header ({sequences} sequences, "
                f"{boundaries} document boundaries) needs {expected}"
            )
        return np.dtype(TOKEN_TYPES[code]), sequences, boundaries

    def _check_documents(self) -> None:
        bounds, sequences = self.documents, len(self)
        wrong = (1 + np.flatnonzero(bounds[1:] < bounds[:-1])).tolist()
        if not len(bounds) or bounds[0] != 0:
            wrong = [0]
        elif bounds[-1] != sequences and not wrong:
            wrong = [len(bounds) - 1]
        if wrong:
            value = bounds[wrong[0]] if len(bounds) else "missing"
            raise UserError(
                f"{self._index_path}: document boundaries must rise from 0 to its {sequences} "
                f"sequences, but boundary {wrong[0]} of {len(bounds)} is {value}"
            )

    def _check_sequences(self, actual: int, itemsize: int) -> None:
        """Raise UserError unless the sequences, one after the other, fill the .bin."""
        path, expected = self._index_path, 0
        for begin in range(0, len(self), BLOCK):
            sizes = self.lengths[begin : begin + BLOCK].astype(np.int64) * itemsize
            ends = expected + np.cumsum(sizes)
            starts = ends - sizes
            wrong = (sizes < 0) | (self.offsets[begin : begin + BLOCK] != starts)
            if wrong.any():
                first = int(wrong.argmax())
                i = begin + first
                if sizes[first] < 0:
                    raise UserError(f"{path}: sequence {i} has {self.lengths[i]} tokens")
                raise UserError(
                    f"{path}: sequence {i} starts at byte {self.offsets[i]} of the .bin, but the "
                    f"sequences before it end at byte {starts[first]}"
                )
            expected = int(ends[-1])
        if actual != expected:
            found = f"{self._tokens_path} has {actual} bytes"
            raise UserError(f"{found}, but {path} describes {expected}")


def _map(path: str) -> np.ndarray:
    """The bytes of a file, mapped; of an empty file, which cannot be mapped, an empty array."""
    try:
        if os.path.getsize(path) == 0:
            return np.empty(0, np.uint8)
        # A plain view: slicing a memmap takes three times as long as slicing an array.
        return np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; --data takes the PREFIX of a pair PREFIX.bin, PREFIX.idx"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def check_pair(prefix: str) -> None:
    """UserError if the pair does not exist or cannot be read; its contents are not looked at."""
    for suffix in (".idx", ".bin"):
        _map(prefix + suffix)


class IndexedDatasetWriter:
    """Writes a .bin/.idx pair, byte for byte as Megatron's builder does, as a stream.

        with IndexedDatasetWriter("data/books", vocab_size=50257) as writer:
            writer.add_document(tokens)                   # or several sequences of one document

    The pair gets its name when the `with` block ends; an exception in it leaves no file.
    """

    def __init__(self, prefix: str, vocab_size: int):
        self.prefix, self.vocab_size, self.tokens = prefix, vocab_size, 0
        # The threshold is Megatron's, a little below 2^16.
        self.token_type = np.dtype("<u2" if vocab_size < 65500 else "<i4")
        self._lengths, self._documents = array.array("i"), array.array("q", [0])
        self._partial = f"{prefix}.{os.getpid()}.partial"  # of this process only
        try:
            os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
            self._file = open(self._partial + ".bin", "wb")  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise UserError(f"cannot write {prefix}.bin: {error.strerror}") from None

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, kind: type | None, error: object, traceback: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            for suffix in (".bin", ".idx"):
                Path(self._partial + suffix).unlink(missing_ok=True)

    @property
    def documents(self) -> int:
        """Documents added so far."""
        return len(self._documents) - 1

    def add_document(self, *sequences) -> None:
        """Append one document; UserError on a token id outside the vocabulary."""
        for sequence in sequences:
            ids = np.asarray(sequence, np.int64)
            bad = ids[(ids < 0) | (ids >= self.vocab_size)]
            if len(bad):
                raise UserError(
                    f"{self.prefix}: document {self.documents} has token id {bad[0]}, "
                    f"but the vocabulary has {self.vocab_size}"
                )
            self._file.write(ids.astype(self.token_type).tobytes())
            self._lengths.append(len(ids))
            self.tokens += len(ids)
        self._documents.append(len(self._lengths))

    def _finish(self) -> None:
        """Write the index, then rename both files."""
        lengths = np.array(self._lengths, "<i4")
        sizes = lengths.astype("<i8") * self.token_type.itemsize
        code = {t: c for c, t in TOKEN_TYPES.items()}[self.token_type.str]
        with open(self._partial + ".idx", "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(self._documents)))
            for column in (lengths, np.cumsum(sizes) - sizes, np.array(self._documents, "<i8")):
                file.write(column.tobytes())
            for written in (file, self._file):
                written.flush()
                os.fsync(written.fileno())
        # An old index must never describe the new tokens: it is removed first, and the new one,
        # without which there is no dataset, is renamed last.
        Path(self.prefix + ".idx").unlink(missing_ok=True)
        for suffix in (".bin", ".idx"):
            os.replace(self._partial + suffix, self.prefix + suffix)
