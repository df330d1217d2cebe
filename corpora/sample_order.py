"""The order in which samples are cut from one corpus: Megatron's, bit for bit, or a stable one.

    document order   3 0 2 1 | 0 2 3 1 | ...        shuffled, once per epoch needed
    sample order     |-----|-----|-----|-----|...   cut every seq_length tokens, then shuffled

As in megatron/core/datasets, 0.16: the same corpus, split, length and seed give the same samples in
the same order, which depends on the number of epochs. The stable order does not: it shuffles each
epoch by itself, so that a longer run reads what a shorter one did, and then more.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from config.data_options import EvalSet, parse_eval_sets
from config.messages import UserError
from corpora.compiled import shuffle
from corpora.mapped_files import ArrayCache
from corpora.token_files import IndexedDataset, check_pair

RULE = 1  # version of the rules below: cached orders of another one are not used
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
        order: str = "megatron",
        cache: ArrayCache | None = None,
    ):
        if not 0 <= seed < 2**32:
            raise UserError(f"seed({seed}) of the sample order must be in 0..{2**32 - 1}")
        self.dataset = dataset
        self.vocab_size = vocab_size
        tokens = tokens_per_epoch(dataset, sequences, seq_length)
        wanted = num_samples or 1
        self.epochs = -(-(wanted * seq_length + 1) // tokens)  # exact, where floats round
        cuts: list[int] | range = range(self.epochs + 1)  # epochs between which nothing is mixed
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
        """How many of the samples from `first` up to `stop` are of each corpus, by its prefix."""
        return {self.dataset.prefix: stop - first}

    def file_of(self, k: int) -> str:
        """The file that holds sample k's tokens."""
        return self.dataset.prefix + ".bin"

    def spans(self, k: int) -> list[TextSpan]:
        """Where sample k's tokens are, in order; none is empty."""
        prefix = self.dataset.prefix
        document_of = self.dataset.document_of
        sequences, offsets, lengths = self._cuts(k)
        cuts = zip(sequences.tolist(), offsets, lengths)
        return [TextSpan(prefix, *cut, document_of(cut[0])) for cut in cuts if cut[2]]

    def _cuts(self, k: int) -> tuple[np.ndarray, list[int], list[int]]:
        """Sequences, first tokens and numbers of tokens of sample k's cuts, some maybe empty.

        UserError if a mapped file has become shorter.
        """
        self.found.check()
        self.dataset.check_size()
        row = int(self.shuffle_index[k])
        (first, begin), (last, end) = self.sample_index[row : row + 2].tolist()
        sequences = self.document_index[first : last + 1]
        if first == last:  # the token at the next sample's start is this one's last label
            return sequences, [begin], [end + 1 - begin]
        lengths = self.dataset.lengths[sequences].tolist()
        lengths[0] -= begin
        lengths[-1] = end + 1
        return sequences, [begin] + [0] * (last - first), lengths

    def sample(self, k: int) -> np.ndarray:
        """Tokens of sample k: (seq_length + 1,), int64; UserError for one past the vocabulary."""
        tokens = self.dataset.read(*self._cuts(k))  # (seq_length + 1,)
        limit = self.vocab_size
        if limit is not None:
            # Negative ids are huge as unsigned ones, so that one pass finds both mistakes.
            unsigned = tokens.view(self.dataset.unsigned)
            if unsigned.max() >= limit:
                self._refuse(k, limit)
        return tokens.astype(np.int64)

    def answers(self, k: int) -> np.ndarray:
        """Which of sample k's tokens are of answers: (seq_length + 1,), 0 or 1."""
        if self.dataset.answers is None:
            raise ValueError(f"the answers of {self.dataset.prefix} are not open")
        return self.dataset.answers.read(*self._cuts(k))

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
    tokens = dataset.tokens_in(sequences)
    if tokens <= seq_length:
        begin = sequences.start
        end = sequences.stop
        where = f"sequences {begin} to {end} of the {len(dataset)} in {dataset.prefix}"
        needed = f"one sample takes seq-length({seq_length}) + 1"
        raise TooFewTokens(f"{where} hold {tokens} tokens, but {needed}")
    return tokens


def eval_samples(asked: EvalSet, tokens: int, seq_length: int) -> tuple[int, int]:
    """How many samples a set of --eval-data takes, and how many its corpus of so many tokens has;
    UserError if these are fewer, or none.
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
    """UserError if a pair of --eval-data cannot be read, or has too few samples.

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
    """The three arrays of an order; cuts: the epochs between which the shuffles do not mix.

    Megatron's generator draws for the documents, then for the samples, so all samples depend on
    the number of epochs. In the stable order each has one of its own, and each epoch is shuffled
    by itself: more epochs change none before them.
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
        # The last row that starts before each sequence ends; none starts in an empty one.
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
    """Shuffle what is between every two neighbouring cuts, in place."""
    for begin, end in itertools.pairwise(cuts):
        shuffle(order[begin:end], random)


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
