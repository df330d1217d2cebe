"""The order in which samples are cut from one corpus: Megatron's, bit for bit.

    document order   3 0 2 1 | 0 2 3 1 | ...        shuffled, once per epoch needed
    sample order     |-----|-----|-----|-----|...   cut every seq_length tokens, then shuffled

As in megatron/core/datasets, 0.16: the same corpus, split, length and seed give the same samples in
the same order. It follows from those alone; every rank computes it in memory.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from config.messages import UserError
from corpora.token_files import IndexedDataset

BLOCK = 1 << 22  # entries of a large array handled at a time, to bound temporary memory
SPLITS = ("train", "validation", "test")


class TextSpan(NamedTuple):
    """Tokens [offset, offset + length) of a sequence; a sample is one span or more."""

    prefix: str
    sequence: int
    offset: int
    length: int
    document: int


class GPTSamples:
    """Samples of one corpus in Megatron's order (gpt_dataset.py, `GPTDataset`).

    `sequences` is the split's range, `num_samples` how many are needed (None: one epoch). There
    are at least so many, `len` says how many, drawn from `epochs` passes over the range.
    With T tokens in the range, E epochs hold (E*T - 1) // seq_length samples, since neighbours
    share one token. Raises UserError if not even one sample fits into an epoch.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        sequences: range,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        vocab_size: int | None = None,
    ):
        if not 0 <= seed < 2**32:
            raise UserError(f"seed({seed}) of the sample order must be in 0..{2**32 - 1}")
        self.dataset, self.vocab_size = dataset, vocab_size
        tokens = tokens_per_epoch(dataset, sequences, seq_length)
        wanted = num_samples or 1
        self.epochs = -(-(wanted * seq_length + 1) // tokens)  # exact, where floats round
        total = (self.epochs * tokens - 1) // seq_length
        # If less than 80 % of the last epoch is wanted, it is shuffled by itself and comes last:
        # mixed with the others, its unread part would be missing from their text as well.
        first_samples, first_epochs = total, self.epochs
        before = ((self.epochs - 1) * tokens - 1) // seq_length
        if self.epochs > 1 and wanted - before < int(0.80 * ((tokens - 1) // seq_length)):
            first_samples, first_epochs = before, self.epochs - 1
        random = np.random.RandomState(seed)  # one for both shuffles, documents first
        kind = _index_type(len(dataset))
        epoch: np.ndarray = np.arange(sequences.start, sequences.stop, dtype=kind)
        self.document_index = np.tile(epoch, self.epochs)
        _shuffle(self.document_index, first_epochs * len(sequences), random)
        self.sample_index = sample_starts(dataset.lengths, self.document_index, seq_length, total)
        small = total < np.iinfo(np.uint32).max - 1
        self.shuffle_index = np.arange(total, dtype=np.uint32 if small else np.int64)
        _shuffle(self.shuffle_index, first_samples, random)

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def spans(self, k: int) -> list[TextSpan]:
        """Where sample k's tokens are, in order."""
        prefix, document_of = self.dataset.prefix, self.dataset.document_of
        return [TextSpan(prefix, *cut, document_of(cut[0])) for cut in self._cuts(k)]

    def _cuts(self, k: int) -> list[tuple[int, int, int]]:
        """(sequence, offset, length) of every span of sample k."""
        row = int(self.shuffle_index[k])
        (first, begin), (last, end) = self.sample_index[row : row + 2].tolist()
        sequences = self.document_index[first : last + 1]
        ends = self.dataset.lengths[sequences].tolist()
        ends[-1] = end + 1  # the token at the next sample's start is this one's last label
        starts = [begin] + [0] * (len(ends) - 1)
        cuts = zip(sequences.tolist(), starts, ends)
        return [(sequence, a, b - a) for sequence, a, b in cuts if b > a]

    def sample(self, k: int) -> np.ndarray:
        """Tokens of sample k: (seq_length + 1,), int64; UserError for one past the vocabulary."""
        parts = [self.dataset.get(*cut) for cut in self._cuts(k)]
        tokens = np.concatenate(parts, dtype=np.int64)  # (seq_length + 1,)
        # Negative ids are huge as unsigned ones, so that one pass finds both mistakes.
        limit = self.vocab_size
        if limit is not None and tokens.view(np.uint64).max() >= limit:
            self._refuse(k, limit)
        return tokens

    def _refuse(self, k: int, limit: int) -> None:
        """Raise the UserError that says where in the corpus a foreign token id is."""
        for prefix, sequence, offset, length, document in self.spans(k):
            ids = self.dataset.get(sequence, offset, length).astype(np.int64)
            bad = np.flatnonzero((ids < 0) | (ids >= limit))
            if len(bad):
                where = f"{prefix}: token {offset + bad[0]} of sequence {sequence}"
                found = f"{where} (document {document}) has id {ids[bad[0]]}"
                raise UserError(f"{found}, but vocab-size is {limit}")


def tokens_per_epoch(dataset: IndexedDataset, sequences: range, seq_length: int) -> int:
    """Tokens in a range of sequences; UserError if they are too few for one sample."""
    begin, end = sequences.start, sequences.stop
    tokens = int(dataset.lengths[begin:end].sum(dtype=np.int64))
    if tokens <= seq_length:
        where = f"sequences {begin} to {end} of the {len(dataset)} in {dataset.prefix}"
        needed = f"one sample takes seq-length({seq_length}) + 1"
        raise UserError(f"{where} hold {tokens} tokens, but {needed}")
    return tokens


def sample_starts(
    lengths: np.ndarray, document_index: np.ndarray, seq_length: int, num_samples: int
) -> np.ndarray:
    """Where each sample starts: rows (position in document_index, token offset in that sequence).

    Shape (num_samples + 1, 2); row i is the token at i * seq_length of the joined sequences,
    the last one the end of the last sample. Row 0 is (0, 0) even if that sequence is empty.
    Equal to build_sample_idx of Megatron's helpers.cpp.
    """
    starts: np.ndarray = np.zeros((num_samples + 1, 2), _index_type(len(document_index)))
    row, passed = 1, 0  # the next row to fill, the tokens of all blocks before this one
    for begin in range(0, len(document_index), BLOCK):
        sizes = lengths[document_index[begin : begin + BLOCK]]
        ends = passed + np.cumsum(sizes, dtype=np.int64)
        passed = int(ends[-1])
        stop = max(row, min(num_samples, (passed - 1) // seq_length) + 1)
        tokens = np.arange(row, stop, dtype=np.int64) * seq_length
        found = np.searchsorted(ends, tokens, side="right")  # skips the empty sequences
        starts[row:stop, 0] = begin + found
        starts[row:stop, 1] = tokens - (ends[found] - sizes[found])
        row = stop
    return starts


def _index_type(count: int) -> type[np.signedinteger]:
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def _shuffle(order: np.ndarray, cut: int, random: np.random.RandomState) -> None:
    """Shuffle what comes before the cut, then what comes after it, each in its place."""
    random.shuffle(order[:cut])
    random.shuffle(order[cut:])


def split_ranges(split: str, sequences: int) -> list[range]:
    """Ranges of sequences that "95,5,0" gives to train, validation and test.

    Boundaries are rounded as Megatron does: normalise, add up, multiply, round half to even.
    """
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        shares = []
    fair = all(0 <= share < math.inf for share in shares) and sum(shares) > 0
    if not fair or len(shares) > len(SPLITS):
        raise UserError(f"--split takes up to three shares such as 95,5,0, not {split!r}")
    filled = np.array(shares + [0.0] * (len(SPLITS) - len(shares)))
    bounds = [0.0] + np.cumsum(filled / filled.sum()).tolist()
    places = [round(bound * float(sequences)) for bound in bounds]
    return [range(begin, end) for begin, end in itertools.pairwise(places)]
