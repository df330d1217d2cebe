"""The order in which samples are cut from one corpus: Megatron's, bit for bit, or a stable one.

    document order   3 0 2 1 | 0 2 3 1 | ...        shuffled, once per epoch needed
    sample order     |-----|-----|-----|-----|...   cut every seq_length tokens, then shuffled

Megatron's order follows megatron/core/datasets, 0.16: the same corpus, split, length and seed give
the same samples in the same order, which depends on the number of epochs. The stable order does not
depend on it: each epoch is shuffled by itself, so a longer run first reads the samples of a shorter
run, then further samples. The corpus is a pair of token_files.py.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from config.messages import UserError
from config.run_options import EvalSet, parse_eval_sets
from corpora.mapped_files import ArrayCache
from corpora.token_files import IndexedDataset, check_pair

RULE = 1  # version of the rules below: cached orders of another version are not used
BLOCK = 1 << 16  # sequences handled at a time: their temporary arrays fit into a core's cache
SPLITS = ("train", "validation", "test")


class TooFewTokens(UserError):
    """A split of a corpus does not hold one sample."""


class TextSpan(NamedTuple):
    """Tokens [offset, offset + length) of a sequence; a sample is one span or more."""

    prefix: str
    sequence: int
    offset: int
    length: int
    document: int


class GPTSamples:
    """Samples of one corpus, in Megatron's order (gpt_dataset.py, `GPTDataset`) or the stable one.

    sequences: the split's range. num_samples: the samples needed (None: one epoch). There are at
    least as many samples, cut from `epochs` passes over the range; `len` returns their number.
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
        order: str = "megatron",
        cache: ArrayCache | None = None,
    ):
        if not 0 <= seed < 2**32:
            raise UserError(f"seed({seed}) of the sample order must be in 0..{2**32 - 1}")
        self.dataset = dataset
        self.vocab_size = vocab_size
        tokens = tokens_per_epoch(dataset, sequences, seq_length)
        wanted = num_samples or 1
        self.epochs = -(-(wanted * seq_length + 1) // tokens)  # rounded up, in integers
        cuts: list[int] | range = range(self.epochs + 1)  # nothing is shuffled across a cut
        if order == "megatron":
            samples = [max(0, e * tokens - 1) // seq_length for e in (1, self.epochs - 1)]
            last = self.epochs > 1 and wanted - samples[1] < int(0.80 * samples[0])
            # If less than 80 % of the last epoch is wanted, it is shuffled by itself and comes
            # last: mixed with the others, its unread part would be missing from their text too.
            cuts = [0, self.epochs - 1, self.epochs] if last else [0, self.epochs]
        facts = {"order of samples": RULE, "files": dataset.identity, "order": order, "seed": seed}
        facts |= {"sequences": [sequences.start, sequences.stop], "seq_length": seq_length}
        facts |= {"epochs": self.epochs, "cuts": len(cuts)}

        def build() -> dict[str, np.ndarray]:
            return _build(dataset, sequences, seq_length, seed, order, cuts)

        self.found = (cache or ArrayCache()).find(facts, build)
        self.document_index = self.found.arrays["document_index"]
        self.sample_index = self.found.arrays["sample_index"]
        self.shuffle_index = self.found.arrays["shuffle_index"]

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def count_by_corpus(self, first: int, stop: int) -> dict[str, int]:
        """Return the number of samples from `first` up to `stop`, by corpus prefix: one corpus."""
        return {self.dataset.prefix: stop - first}

    def file_of(self, k: int) -> str:
        """Return the path of the file that holds sample k's tokens."""
        return self.dataset.prefix + ".bin"

    def spans(self, k: int) -> list[TextSpan]:
        """Return the spans of text that make sample k, in order; no span is empty."""
        prefix = self.dataset.prefix
        document_of = self.dataset.document_of
        sequences, offsets, lengths = self._cuts(k)
        cuts = zip(sequences.tolist(), offsets, lengths)
        return [TextSpan(prefix, *cut, document_of(cut[0])) for cut in cuts if cut[2]]

    def _cuts(self, k: int) -> tuple[np.ndarray, list[int], list[int]]:
        """Return the sequences, first tokens and numbers of tokens of sample k's cuts.

        A cut may be empty. Raise UserError if a mapped file has become shorter.
        """
        self.found.check()
        self.dataset.check_size()
        row = int(self.shuffle_index[k])
        (first, begin), (last, end) = self.sample_index[row : row + 2].tolist()
        sequences = self.document_index[first : last + 1]
        if first == last:  # the next sample's first token is this sample's last label
            return sequences, [begin], [end + 1 - begin]
        lengths = self.dataset.lengths[sequences].tolist()
        lengths[0] -= begin
        lengths[-1] = end + 1
        return sequences, [begin] + [0] * (last - first), lengths

    def sample(self, k: int) -> np.ndarray:
        """Return the tokens of sample k: (seq_length + 1,), int64.

        Raise UserError if a token id is outside the vocabulary.
        """
        tokens = self.dataset.read(*self._cuts(k))  # (seq_length + 1,)
        limit = self.vocab_size
        if limit is not None:
            # Negative ids are huge as unsigned ones, so that one pass finds both mistakes.
            unsigned = tokens.view(self.dataset.unsigned)
            if unsigned.max() >= limit:
                self._refuse(k, limit)
        return tokens.astype(np.int64)

    def answers(self, k: int) -> np.ndarray:
        """Return 1 for each token of sample k that is in an answer, else 0: (seq_length + 1,)."""
        if self.dataset.answers is None:
            raise ValueError(f"the answers of {self.dataset.prefix} are not open")
        return self.dataset.answers.read(*self._cuts(k))

    def _refuse(self, k: int, limit: int) -> None:
        """Raise UserError with the place of the token id of sample k that is not below `limit`."""
        for prefix, sequence, offset, length, document in self.spans(k):
            ids = self.dataset.get(sequence, offset, length).astype(np.int64)
            bad = np.flatnonzero((ids < 0) | (ids >= limit))
            if len(bad):
                where = f"{prefix}: token {offset + bad[0]} of sequence {sequence}"
                found = f"{where} (document {document}) has id {ids[bad[0]]}"
                raise UserError(f"{found}, but vocab-size is {limit}")


def tokens_per_epoch(dataset: IndexedDataset, sequences: range, seq_length: int) -> int:
    """Return the tokens in a range of sequences; raise TooFewTokens if no sample fits in them."""
    tokens = dataset.tokens_in(sequences)
    if tokens <= seq_length:
        begin = sequences.start
        end = sequences.stop
        where = f"sequences {begin} to {end} of the {len(dataset)} in {dataset.prefix}"
        needed = f"one sample takes seq-length({seq_length}) + 1"
        raise TooFewTokens(f"{where} hold {tokens} tokens, but {needed}")
    return tokens


def eval_samples(asked: EvalSet, tokens: int, seq_length: int) -> tuple[int, int]:
    """Return the samples that a set of --eval-data takes, and those that its corpus has.

    tokens: in that corpus. Raise UserError if the corpus has fewer samples than asked for, or none.
    """
    there = (tokens - 1) // seq_length
    if there < 1:
        needed = f"one sample takes seq-length({seq_length}) + 1"
        has = f"{asked.prefix} holds {tokens} tokens"
        raise TooFewTokens(f"--eval-data {asked.name}: {has}, but {needed}")
    count = asked.samples or there
    if count > there:
        wanted = f"--eval-data {asked.name} asks for {count} samples"
        raise UserError(f"{wanted}, {asked.prefix} has {there} of {seq_length} tokens")
    return count, there


def check_eval_sets(words: tuple, seq_length: int, answers: bool = False) -> None:
    """Raise UserError if a pair of --eval-data cannot be read, or has too few samples.

    answers: whether the pairs must have marks of answers.
    """
    for each in parse_eval_sets(words):
        eval_samples(each, check_pair(each.prefix, answers), seq_length)


def _build(
    dataset: IndexedDataset,
    sequences: range,
    seq_length: int,
    seed: int,
    order: str,
    cuts: Sequence[int],
) -> dict[str, np.ndarray]:
    """Return the three arrays of an order.

    cuts: numbers of epochs, first 0, last all; documents and samples are shuffled between two cuts.
    Megatron's generator draws for the documents, then for the samples, so all samples depend on
    the number of epochs. In the stable order documents and samples have a generator each, and each
    epoch is shuffled by itself: further epochs do not change the epochs before them.
    """
    first = np.random.RandomState(seed if order == "megatron" else [seed, 0])
    second = first if order == "megatron" else np.random.RandomState([seed, 1])
    kind = _index_type(len(dataset))
    tokens = dataset.tokens_in(sequences)
    document_index = np.tile(np.arange(sequences.start, sequences.stop, dtype=kind), cuts[-1])
    _shuffle(document_index, [e * len(sequences) for e in cuts], first)
    samples = [max(0, e * tokens - 1) // seq_length for e in cuts]
    total = samples[-1]
    shuffle_index = np.arange(total, dtype=np.uint32 if total < 2**32 - 2 else np.int64)
    sample_index = sample_starts(dataset.lengths, document_index, seq_length, total)
    _shuffle(shuffle_index, samples, second)
    return {
        "document_index": document_index,
        "sample_index": sample_index,
        "shuffle_index": shuffle_index,
    }


def sample_starts(
    lengths: np.ndarray,
    document_index: np.ndarray,
    seq_length: int,
    num_samples: int,
) -> np.ndarray:
    """Return each sample's start: rows (position in document_index, token offset in its sequence).

    Shape (num_samples + 1, 2); row i is the token at i * seq_length of the joined sequences,
    the last row is the end of the last sample. Row 0 is (0, 0) even if that sequence is empty.
    Equal to build_sample_idx of Megatron's helpers.cpp.
    """
    starts: np.ndarray = np.zeros((num_samples + 1, 2), _index_type(len(document_index)))
    row, passed = 1, 0  # the next row to fill, the tokens in the blocks before
    for begin in range(0, len(document_index), BLOCK):
        sizes = lengths[document_index[begin : begin + BLOCK]]
        ends = passed + np.cumsum(sizes, dtype=np.int64)
        passed = int(ends[-1])
        stop = max(row, min(num_samples, (passed - 1) // seq_length) + 1)
        # The last row that starts before each sequence ends; no row starts in an empty sequence.
        last = np.clip((ends - 1) // seq_length, row - 1, stop - 1)
        found = np.repeat(np.arange(len(ends)), np.diff(last, prepend=row - 1))
        tokens = np.arange(row, stop, dtype=np.int64) * seq_length
        starts[row:stop, 0] = begin + found
        starts[row:stop, 1] = tokens - (ends[found] - sizes[found])
        row = stop
    return starts


def _index_type(count: int) -> type[np.signedinteger]:
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def _shuffle(order: np.ndarray, cuts: list[int], random: np.random.RandomState) -> None:
    """Shuffle the items between every two neighbouring cuts, in place."""
    for begin, end in itertools.pairwise(cuts):
        random.shuffle(order[begin:end])


def split_ranges(split: str, sequences: int) -> list[range]:
    """Return the ranges of sequences that "95,5,0" gives to train, validation and test.

    Boundaries are rounded in Megatron's way: normalise, add up, multiply, round half to even.
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
