"""The order of the samples of a corpus: the same as Megatron's, or the stable order.

    document order   3 0 2 1 | 0 2 3 1 | ...        the documents of each epoch, shuffled
    sample order     |-----|-----|-----|-----|...   cut every seq_length tokens, then shuffled

A corpus is a list of sequences; a document is one sequence, or several in a row. As in Megatron,
the sequences are shuffled, although the array is called document_index, and joined. A sample takes
seq_length + 1 tokens, of which the last is also the first of the next sample. It is made of cuts,
each a part of one sequence.

Megatron's order follows megatron/core/datasets, 0.16: the same corpus, split, length and seed give
the same samples in the same order, which depends on the number of epochs. The stable order does not
depend on the number of epochs: each epoch is shuffled by itself, so a longer run first reads the
samples of a shorter run, then further samples. The corpus is a pair of token_files.py.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from base.errors import CorpusError, UserError
from config.run_options import EvalSet, parse_eval_sets
from corpora.mapped_files import ArrayCache
from corpora.token_files import IndexedDataset, check_pair

RULE = 1  # the version of the rules below: cached orders of another version are not used
BLOCK = 1 << 16  # sequences that are handled at once: temporary arrays fit into a core's cache
SPLITS = ("train", "validation", "test")


class TooFewTokens(CorpusError):
    """Raised if a split of a corpus has too few tokens for a single sample."""


class TextSpan(NamedTuple):
    """Tokens [offset, offset + length) of a sequence. A sample consists of one or more spans.

    prefix: the corpus. sequence, document: the numbers of the sequence and of its document there.
    """

    prefix: str
    sequence: int
    offset: int
    length: int
    document: int


class GPTSamples:
    """The samples of a corpus, in Megatron's order (its class `GPTDataset`) or in the stable order.

    sequences: the split's range of sequences. num_samples: the number of samples needed; None: one
    epoch. There may be more samples, because the last epoch is always complete: `len` returns the
    number. E epochs of T tokens hold (E*T - 1) // seq_length samples, because the last label of a
    sample is the first token of the next. vocab_size: ids from this number on are an error; None:
    no id is an error. order: "megatron" or "stable". cache: where the order is kept. Raise
    UserError if an epoch has too few tokens for a sample.
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
        """Compute the order of the samples, or find it in the cache; no token is read.

        sequences: the split's range of sequences in `dataset`. num_samples: the number of samples
        needed; None: one epoch. order: "megatron" or "stable".
        """
        if not 0 <= seed < 2**32:
            raise UserError(f"seed({seed}) of the sample order must be in 0..{2**32 - 1}")
        self.dataset = dataset
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        tokens = tokens_per_epoch(dataset, sequences, seq_length)
        wanted = num_samples or 1  # None: one epoch, since a single sample fits into one
        # The least number of epochs that have the tokens of `wanted` samples: rounded up.
        self.epochs = -(-(wanted * seq_length + 1) // tokens)
        # The epochs are divided into groups, given by their borders from 0 to all epochs; the
        # samples of a group are shuffled together. In the stable order each epoch is a group. In
        # Megatron's order all epochs are one group, or the last epoch is a group by itself.
        borders: list[int] | range = range(self.epochs + 1)
        if order == "megatron":
            samples_of_epoch = max(0, tokens - 1) // seq_length
            samples_before = max(0, (self.epochs - 1) * tokens - 1) // seq_length
            wanted_of_last = wanted - samples_before
            borders = [0, self.epochs]
            # If less than 80 % of the last epoch is wanted, this epoch is shuffled by itself and
            # comes last, so that the samples that the run does not read are all of the last epoch.
            # If all epochs were shuffled together, they would be missing from the earlier epochs.
            if self.epochs > 1 and wanted_of_last < int(0.80 * samples_of_epoch):
                borders = [0, self.epochs - 1, self.epochs]
        # The facts determine the order, and the cache finds an order that has the same facts. The
        # borders follow from the other facts but for their number, which is given as "cuts".
        facts = {"order of samples": RULE, "files": dataset.identity, "order": order, "seed": seed}
        facts |= {"sequences": [sequences.start, sequences.stop], "seq_length": seq_length}
        facts |= {"epochs": self.epochs, "cuts": len(borders)}

        def build() -> dict[str, np.ndarray]:
            """Compute the arrays of the order; the cache calls this if it has none for `facts`."""
            return _build(dataset, sequences, seq_length, seed, order, borders)

        self.found = (cache or ArrayCache()).find(facts, build)
        self.document_index = self.found.arrays["document_index"]
        self.sample_index = self.found.arrays["sample_index"]
        self.shuffle_index = self.found.arrays["shuffle_index"]

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def count_by_corpus(self, first: int, stop: int) -> dict[str, int]:
        """Return the number of samples in [first, stop) by corpus prefix: a single entry.

        A blend has the same method, and has several corpora.
        """
        return {self.dataset.prefix: stop - first}

    def file_of(self, k: int) -> str:
        """Return the path of the file that holds sample k's tokens, for error messages."""
        return self.dataset.prefix + ".bin"

    def spans(self, k: int) -> list[TextSpan]:
        """Return the spans of text that make sample k, in order; no span is empty.

        Called to say from which documents a sample comes, in reports and error messages.
        """
        prefix = self.dataset.prefix
        document_of = self.dataset.document_of
        sequences, offsets, lengths = self._cuts(k)
        cuts = zip(sequences.tolist(), offsets, lengths)
        return [
            TextSpan(prefix, sequence, offset, length, document_of(sequence))
            for sequence, offset, length in cuts
            if length
        ]

    def _cuts(self, k: int) -> tuple[np.ndarray, list[int], list[int]]:
        """Return the sequences, first tokens and numbers of tokens of sample k's cuts.

        `sample`, `answers` and `spans` call this. A cut may be empty. Raise UserError if a mapped
        file of the order, or the corpus's index, has become shorter: reading it would end the
        process.
        """
        self.found.check()
        self.dataset.check_size()
        row = int(self.shuffle_index[k])
        # A row of sample_index is the start of a sample: a place in document_index, and a token of
        # the sequence there. The sample ends with the first token of the sample in the next row,
        # which is its last label.
        (first, begin), (last, end) = self.sample_index[row : row + 2].tolist()
        sequences = self.document_index[first : last + 1]
        if first == last:
            return sequences, [begin], [end + 1 - begin]
        # The first sequence is cut from token `begin` on, the last sequence after token `end`, and
        # the sequences between them are whole.
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
            # An id is wrong if it is negative, or `limit` or more. Negative ids are huge as
            # unsigned numbers, so one comparison finds both.
            unsigned = tokens.view(self.dataset.unsigned)
            if unsigned.max() >= limit:
                refuse_ids(self.dataset, self.spans(k), limit)
        return tokens.astype(np.int64)

    def answers(self, k: int) -> np.ndarray:
        """Return 1 for each token of sample k that is in an answer, else 0: (seq_length + 1,).

        objectives.py calls this with --answers-only. Then `dataset.answers` holds the marks of the
        pair PREFIX.targets, which are cut as the tokens are.
        """
        if self.dataset.answers is None:
            raise ValueError(f"the answers of {self.dataset.prefix} are not open")
        return self.dataset.answers.read(*self._cuts(k))


def refuse_ids(dataset: IndexedDataset, spans: list[TextSpan], limit: int) -> None:
    """Raise UserError with the place of the first token id of a sample outside [0, limit).

    spans: of the sample, which has such an id.
    """
    for prefix, sequence, offset, length, document in spans:
        ids = dataset.get(sequence, offset, length).astype(np.int64)
        bad = np.flatnonzero((ids < 0) | (ids >= limit))
        if len(bad):
            where = f"{prefix}: token {offset + bad[0]} of sequence {sequence}"
            problem = f"has id {ids[bad[0]]}, but vocab-size is {limit}"
            raise CorpusError(f"{where} (document {document}) {problem}")


class Continued:
    """The samples of a corpus in several orders, one after the other; all of whole epochs.

    A resumed run that is to read more samples than its order has continues in a further order. The
    class has the methods that data.py and Blend call, as GPTSamples has them.
    """

    def __init__(self, parts: list[GPTSamples]):
        """Keep the orders; parts: the first one has the samples 0, 1, ..."""
        self.parts = parts
        self.dataset = parts[0].dataset
        self._ends = list(itertools.accumulate(map(len, parts)))  # where each part ends

    def __len__(self) -> int:
        return self._ends[-1]

    def _place(self, k: int) -> tuple[GPTSamples, int]:
        """Return the part that has sample k, and the sample's number there."""
        number = bisect.bisect_right(self._ends, k)
        return self.parts[number], k - (self._ends[number] - len(self.parts[number]))

    def sample(self, k: int) -> np.ndarray:
        """Return the tokens of sample k: (seq_length + 1,), int64."""
        part, number = self._place(k)
        return part.sample(number)

    def answers(self, k: int) -> np.ndarray:
        """Return 1 for each token of sample k that is in an answer, else 0: (seq_length + 1,)."""
        part, number = self._place(k)
        return part.answers(number)

    def spans(self, k: int) -> list[TextSpan]:
        """Return the spans of text that make sample k, in order."""
        part, number = self._place(k)
        return part.spans(number)

    def file_of(self, k: int) -> str:
        """Return the path of the file that holds sample k's tokens, for error messages."""
        part, number = self._place(k)
        return part.file_of(number)

    def count_by_corpus(self, first: int, stop: int) -> dict[str, int]:
        """Return the number of samples in [first, stop) by corpus prefix: a single entry."""
        return self.parts[0].count_by_corpus(first, stop)


def tokens_per_epoch(dataset: IndexedDataset, sequences: range, seq_length: int) -> int:
    """Return the number of tokens in a range of sequences, which an epoch of a split reads.

    Raise TooFewTokens if they are too few for a sample.
    """
    tokens = dataset.tokens_in(sequences)
    if tokens <= seq_length:
        begin = sequences.start
        end = sequences.stop
        where = f"sequences {begin} to {end} of the {len(dataset)} in {dataset.prefix}"
        needed = f"one sample takes seq-length({seq_length}) + 1"
        raise TooFewTokens(f"{where} hold {tokens} tokens, but {needed}")
    return tokens


def eval_samples(asked: EvalSet, tokens: int, seq_length: int) -> tuple[int, int]:
    """Return the number of samples that a set of --eval-data uses, and the number in its corpus.

    asked: the set. tokens: the number of tokens in its corpus. Raise UserError if the corpus has
    fewer samples than the set asks for, or none.
    """
    available = (tokens - 1) // seq_length
    if available < 1:
        needed = f"one sample takes seq-length({seq_length}) + 1"
        has = f"{asked.prefix} holds {tokens} tokens"
        raise TooFewTokens(f"--eval-data {asked.name}: {has}, but {needed}")
    count = asked.samples or available
    if count > available:
        wanted = f"--eval-data {asked.name} asks for {count} samples"
        raise CorpusError(f"{wanted}, {asked.prefix} has {available} of {seq_length} tokens")
    return count, available


def check_eval_sets(words: tuple, seq_length: int, answers: bool = False) -> None:
    """Raise UserError if a token file of --eval-data cannot be read, or has too few samples.

    Called before torch is imported, so that mistakes are reported early. words: the values of
    --eval-data. answers: whether the files must have marks of answers, for --answers-only.
    """
    for eval_set in parse_eval_sets(words):
        eval_samples(eval_set, check_pair(eval_set.prefix, answers), seq_length)


def _build(
    dataset: IndexedDataset,
    sequences: range,
    seq_length: int,
    seed: int,
    order: str,
    borders: Sequence[int],
) -> dict[str, np.ndarray]:
    """Return the three arrays of an order, by name.

    document_index: the sequences in their order, (epochs * sequences,). sample_index: the starts of
    samples, see `sample_starts`. shuffle_index: for each sample its row of sample_index.
    borders: numbers of epochs, from 0 to all epochs. The sequences of the epochs between two
    neighbouring borders are shuffled together, and so are their samples.
    """
    # Megatron has one generator, which draws for the documents and then for the samples, so that
    # all samples depend on the number of epochs. In the stable order documents and samples have a
    # generator each, and each epoch is shuffled by itself: further epochs do not change the epochs
    # before them.
    if order == "megatron":
        document_random = np.random.RandomState(seed)
        sample_random = document_random
    else:
        document_random = np.random.RandomState([seed, 0])
        sample_random = np.random.RandomState([seed, 1])
    kind = _index_type(len(dataset))
    tokens = dataset.tokens_in(sequences)
    epochs = borders[-1]
    document_index = np.tile(np.arange(sequences.start, sequences.stop, dtype=kind), epochs)
    _shuffle(document_index, [border * len(sequences) for border in borders], document_random)
    # For each border, the number of samples in the epochs before it. The last token of these epochs
    # begins no sample, because it can only be a label.
    samples_before = [max(0, border * tokens - 1) // seq_length for border in borders]
    total = samples_before[-1]
    # Samples are numbered in the type that Megatron uses.
    shuffle_index = np.arange(total, dtype=np.uint32 if total < 2**32 - 2 else np.int64)
    sample_index = sample_starts(dataset.lengths, document_index, seq_length, total)
    _shuffle(shuffle_index, samples_before, sample_random)
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
    """Return where each sample starts: (position in document_index, token offset in the sequence).

    The shape is (num_samples + 1, 2). Row i is token number i * seq_length of the sequences that
    are joined in the order of document_index; the last row is the end of the last sample. With
    sequences of 5, 2 and 6 tokens and seq_length 4, the rows are (0, 0), (0, 4), (2, 1), (2, 5).
    Row 0 is (0, 0) even if that sequence is empty. lengths: the tokens of each sequence. The result
    is equal to that of build_sample_idx in Megatron's helpers.cpp.
    """
    starts: np.ndarray = np.zeros((num_samples + 1, 2), _index_type(len(document_index)))
    row = 1  # the next row to fill
    passed = 0  # tokens in the blocks before
    for begin in range(0, len(document_index), BLOCK):
        sizes = lengths[document_index[begin : begin + BLOCK]]
        ends = passed + np.cumsum(sizes, dtype=np.int64)  # where each sequence ends, in tokens
        passed = int(ends[-1])
        # Row i stands for token i * seq_length. The tokens of the rows `row` to `stop` - 1 are in
        # the sequences of this block.
        stop = max(row, min(num_samples, (passed - 1) // seq_length) + 1)
        # For each sequence, the last row that starts before the sequence ends. The difference to
        # the sequence before is the number of rows that start in it: 0 in an empty sequence.
        last = np.clip((ends - 1) // seq_length, row - 1, stop - 1)
        sequence_of_row = np.repeat(np.arange(len(ends)), np.diff(last, prepend=row - 1))
        # The offset of a row's token in its sequence: the number of all tokens before this token,
        # less the number of all tokens before the sequence.
        tokens = np.arange(row, stop, dtype=np.int64) * seq_length
        first_tokens = ends[sequence_of_row] - sizes[sequence_of_row]
        starts[row:stop, 0] = begin + sequence_of_row
        starts[row:stop, 1] = tokens - first_tokens
        row = stop
    return starts


def _index_type(count: int) -> type[np.signedinteger]:
    """Return the type of indices below `count`: int32, which halves the memory, or else int64."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def _shuffle(order: np.ndarray, borders: list[int], random: np.random.RandomState) -> None:
    """Shuffle the items between every two neighbouring borders, in place.

    borders: indices in `order`, from 0 to its length. No item crosses a border.
    """
    for begin, end in itertools.pairwise(borders):
        random.shuffle(order[begin:end])


def split_ranges(split: str, sequences: int) -> list[range]:
    """Return the ranges of sequences that "95,5,0" gives to train, validation and test.

    split: the value of --split. sequences: the number of sequences in a corpus. Boundaries are
    rounded in Megatron's way: normalise, add up, multiply, round half to even. Raise UserError if
    `split` is malformed.
    """
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        shares = []
    are_valid = all(0 <= share < math.inf for share in shares) and sum(shares) > 0
    if not are_valid or len(shares) > len(SPLITS):
        raise UserError(f"--split takes up to three shares such as 95,5,0, not {split!r}")
    filled = np.array(shares + [0.0] * (len(SPLITS) - len(shares)))
    bounds = [0.0] + np.cumsum(filled / filled.sum()).tolist()
    borders = [round(bound * float(sequences)) for bound in bounds]
    return [range(begin, end) for begin, end in itertools.pairwise(borders)]
