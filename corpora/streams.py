"""The samples of a run with phases (--phases): each corpus is a stream that goes on where it was.

    joined text of an epoch    its documents shuffled, one after the other: T tokens
    blocks                     |---U---|---U---|---U---|...       cut every U tokens, then shuffled
    stream of a corpus         all blocks of epoch 1, then all blocks of epoch 2, ...
    sample of L tokens         the next L tokens of the stream, and the token that follows

The position in a corpus is a number of tokens of its stream. It is the sum of what the phases
before have taken, so it follows from the plan and the past of the run alone. Any number of tokens
of a sample can be read from any position: at a change of --seq-length nothing is lost and nothing
is read twice, and every token of an epoch is read before the first token of the next epoch.

A block is as long as the longest sample of the run, --seq-length. Shorter samples whose length
divides it are parts of one block, which is consecutive text. A sample that goes from one
block into another is cut there: the text on both sides is from different places, as where a
document ends. The cut where one epoch goes over into the next moves on from epoch to epoch, so that
blocks stay whole multiples of the samples' length from the stream's beginning.

The label of a sample's last token is the token that follows it in the text, and not in the stream.

What a run without --phases has read before it got some is in another order (sample_order.py): its
samples are the blocks with which the stream begins, those that were read first.
"""

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from corpora.blends import Blend, BlendOrder
from corpora.mapped_files import ArrayCache, CachedArrays
from corpora.sample_order import Continued, GPTSamples, TextSpan, refuse_ids
from corpora.token_files import IndexedDataset

RULE = 1  # the version of the order of a stream: cached orders of another version are not used


@dataclass(eq=False)
class Part:
    """A part of a stream: an epoch, or what a run has read before it had phases.

    order: the sequences of the joined text. ends: the tokens of the joined text up to the end of
    each. first: tokens before the first whole block. blocks: the number of each whole block, in the
    order of reading. size: tokens of a block. tokens: those of the part; after the whole blocks
    comes what is left. found: the cache's files, which are checked before each read.
    """

    order: np.ndarray
    ends: np.ndarray
    blocks: np.ndarray
    size: int
    first: int
    tokens: int
    found: Sequence[CachedArrays]

    def place(self, position: int) -> tuple[int, int]:
        """Return where a token of the part is in the joined text, and how many follow there.

        position: the token's number in the order of reading. The tokens that follow count itself.
        """
        whole = self.first + len(self.blocks) * self.size
        if position < self.first:
            return position, self.first - position
        if position >= whole:
            return position, self.tokens - position
        number, offset = divmod(position - self.first, self.size)
        return self.first + int(self.blocks[number]) * self.size + offset, self.size - offset

    def cuts(self, begin: int, stop: int) -> list[tuple[int, int, int]]:
        """Return the tokens [begin, stop) of the joined text as (sequence, offset, length)."""
        cuts = []
        row = int(np.searchsorted(self.ends, begin, side="right"))
        while begin < stop:
            end = int(self.ends[row])
            before = int(self.ends[row - 1]) if row else 0
            length = min(end, stop) - begin
            if length > 0:  # 0: an empty sequence
                cuts.append((int(self.order[row]), begin - before, length))
            begin += max(0, length)
            row += 1
        return cuts

    def check(self) -> None:
        """Raise UserError if a cached file of the order has become shorter."""
        for found in self.found:
            found.check()


class CorpusStream:
    """The tokens of a corpus, epoch after epoch; see the head of this file.

    sequences: the split's range of sequences, which hold at least one token. size: the tokens of a
    block. vocab_size: as for GPTSamples. earlier: the orders in which the run has read the corpus
    before it had phases, and taken: how many of their samples it has read.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        sequences: range,
        size: int,
        seed: int,
        vocab_size: int,
        cache: ArrayCache,
        earlier: Sequence[GPTSamples] = (),
        taken: int = 0,
    ):
        """Prepare the stream; the order of an epoch is computed when it is first needed."""
        self.dataset = dataset
        self.sequences = sequences
        self.size = size
        self.seed = seed
        self.vocab_size = vocab_size
        self.cache = cache
        self.tokens = dataset.tokens_in(sequences)  # of an epoch
        self._parts: dict[int, Part] = {}  # by number; the earlier ones have the first numbers
        self._earlier = list[Part]()
        for samples in earlier:
            self._earlier.append(self._samples_part(samples, taken >= len(samples)))
            taken -= len(samples)
        self._ends = np.cumsum([part.tokens for part in self._earlier], dtype=np.int64).tolist()
        self._before = self._ends[-1] if self._ends else 0  # tokens of all earlier orders

    def epochs(self, position: int) -> float:
        """Return how many epochs the stream has before a position."""
        return position / self.tokens

    def prepare(self, begin: int, stop: int) -> None:
        """Compute the orders that the tokens [begin, stop) of the stream need, or map them."""
        while begin < stop:
            part, place = self._part_at(begin)
            begin += part.tokens - place

    def _part_at(self, position: int) -> tuple[Part, int]:
        """Return the part that has a position of the stream, and the position there."""
        if position < self._before:
            number = bisect.bisect_right(self._ends, position)
            part = self._earlier[number]
            return part, position - (self._ends[number] - part.tokens)
        epoch, place = divmod(position - self._before, self.tokens)
        return self._epoch(epoch), place

    def _epoch(self, epoch: int) -> Part:
        """Return an epoch, from 0, after those of earlier orders; found in the cache, or built.

        Reader threads may build the same one at once: they build the same arrays.
        """
        if epoch in self._parts:
            return self._parts[epoch]
        first = min(self.tokens, (-epoch * self.tokens) % self.size)
        blocks = (self.tokens - first) // self.size
        # The number is unlike those of epochs of the orders before, which begin at 0 too.
        number = epoch + len(self._earlier)
        facts: dict[str, Any] = {"order of a stream": RULE, "files": self.dataset.identity}
        facts |= {"sequences": [self.sequences.start, self.sequences.stop], "seed": self.seed}
        facts |= {"epoch": number, "blocks": blocks}
        found = self.cache.find(facts, lambda: self._build(number, blocks))
        arrays = found.arrays
        part = Part(
            arrays["order"],
            arrays["ends"],
            arrays["blocks"],
            self.size,
            first,
            self.tokens,
            [found],
        )
        self._parts[epoch] = part
        return part

    def _build(self, number: int, blocks: int) -> dict[str, np.ndarray]:
        """Return the arrays of an epoch: its sequences, where each ends, and its whole blocks."""
        order = np.arange(self.sequences.start, self.sequences.stop, dtype=np.int64)
        np.random.RandomState([self.seed, 0, number]).shuffle(order)
        of_blocks = np.arange(blocks, dtype=np.int64)
        np.random.RandomState([self.seed, 1, number]).shuffle(of_blocks)
        ends = np.cumsum(self.dataset.lengths[order], dtype=np.int64)
        return {"order": order, "ends": ends, "blocks": of_blocks}

    def _samples_part(self, samples: GPTSamples, is_over: bool) -> Part:
        """Return an order of samples as a part of the stream: its samples are the blocks.

        After them comes what no sample of that order holds, less than a sample. is_over: whether
        all of them have been read, without that rest.
        """
        order = samples.document_index
        ends = np.cumsum(self.dataset.lengths[order], dtype=np.int64)
        tokens = len(samples) * samples.seq_length if is_over else int(ends[-1])
        length = samples.seq_length
        return Part(order, ends, samples.shuffle_index, length, 0, tokens, [samples.found])

    def _cuts(self, position: int, length: int) -> list[tuple[int, int, int]]:
        """Return the cuts of the sample at a position: its tokens, and the one that follows."""
        self.dataset.check_size()
        cuts: list[tuple[int, int, int]] = []
        while length:
            part, place = self._part_at(position)
            part.check()
            begin, room = part.place(place)
            count = min(length, room)
            position += count
            length -= count
            stop = begin + count
            if length == 0 and stop < part.tokens:  # and the token that follows in the text
                return cuts + part.cuts(begin, stop + 1)
            cuts += part.cuts(begin, stop)
        following, _ = self._part_at(position)  # the first text of the next epoch
        following.check()
        return cuts + following.cuts(0, 1)

    def sample(self, position: int, length: int) -> np.ndarray:
        """Return `length` tokens of the stream and the label of the last one: int64.

        Raise UserError if a token id is outside the vocabulary.
        """
        sequences, offsets, lengths = zip(*self._cuts(position, length))
        tokens = self.dataset.read(np.array(sequences), list(offsets), list(lengths))
        if tokens.view(self.dataset.unsigned).max() >= self.vocab_size:
            refuse_ids(self.dataset, self.spans(position, length), self.vocab_size)
        return tokens.astype(np.int64)

    def answers(self, position: int, length: int) -> np.ndarray:
        """Return 1 for each token of the sample that is in an answer, else 0: (length + 1,)."""
        if self.dataset.answers is None:
            raise ValueError(f"the answers of {self.dataset.prefix} are not open")
        sequences, offsets, lengths = zip(*self._cuts(position, length))
        return self.dataset.answers.read(np.array(sequences), list(offsets), list(lengths))

    def spans(self, position: int, length: int) -> list[TextSpan]:
        """Return the spans of text that make the sample; the last one ends with the last label."""
        prefix = self.dataset.prefix
        return [
            TextSpan(prefix, sequence, offset, count, self.dataset.document_of(sequence))
            for sequence, offset, count in self._cuts(position, length)
        ]


class PhaseSamples(Protocol):
    """The samples of a phase by their numbers in the run; the methods are those of data.Samples."""

    def sample(self, k: int) -> np.ndarray:
        """Return the tokens of sample k, int64."""

    def answers(self, k: int) -> np.ndarray:
        """Return 1 for each token of sample k that is in an answer, else 0."""

    def spans(self, k: int) -> list[TextSpan]:
        """Return the spans of text that make sample k."""

    def file_of(self, k: int) -> str:
        """Return the path of the file that holds sample k's tokens."""

    def count_by_corpus(self, first: int, stop: int) -> dict[str, int]:
        """Return the number of samples in [first, stop) by corpus prefix."""


@dataclass(eq=False)
class OfStreams:
    """The samples of a phase that reads streams, by weight.

    streams, positions: of each corpus, and where it is before sample `first` of the run, with which
    this phase begins, or phases before it that read the same. length: the tokens of a sample.
    order: which corpus each sample from `first` on is from; None: there is one corpus.
    """

    streams: Sequence[CorpusStream]
    positions: Sequence[int]
    first: int
    length: int
    order: BlendOrder | None

    def _place(self, k: int) -> tuple[CorpusStream, int]:
        """Return the stream that has sample k, and the sample's position there."""
        row = k - self.first
        if self.order is None:
            return self.streams[0], self.positions[0] + row * self.length
        self.order.found.check()
        number = int(self.order.which[row])
        position = self.positions[number] + int(self.order.number[row]) * self.length
        return self.streams[number], position

    def sample(self, k: int) -> np.ndarray:
        """Return the tokens of sample k: (length + 1,), int64."""
        stream, position = self._place(k)
        return stream.sample(position, self.length)

    def answers(self, k: int) -> np.ndarray:
        """Return 1 for each token of sample k that is in an answer, else 0: (length + 1,)."""
        stream, position = self._place(k)
        return stream.answers(position, self.length)

    def spans(self, k: int) -> list[TextSpan]:
        """Return the spans of text that make sample k, in order."""
        stream, position = self._place(k)
        return stream.spans(position, self.length)

    def file_of(self, k: int) -> str:
        """Return the path of the file that holds sample k's tokens, for error messages."""
        return self._place(k)[0].dataset.prefix + ".bin"

    def count_by_corpus(self, first: int, stop: int) -> dict[str, int]:
        """Return the number of samples in [first, stop) by corpus prefix."""
        if self.order is None:
            return {self.streams[0].dataset.prefix: stop - first}
        which = self.order.which[first - self.first : stop - self.first]
        counts = np.bincount(which, minlength=len(self.streams)).tolist()
        return {s.dataset.prefix: count for s, count in zip(self.streams, counts)}


@dataclass(eq=False)
class PhasedSamples:
    """The samples of all phases of a run, by their numbers in the run.

    begins: the number of the first sample of each phase. lengths: the tokens of a sample of each.
    parts: the samples of each. total: the samples of the run.
    """

    begins: Sequence[int]
    lengths: Sequence[int]
    parts: Sequence[PhaseSamples]
    total: int

    def __len__(self) -> int:
        return self.total

    def length_of(self, k: int) -> int:
        """Return the tokens of sample k, without the last label."""
        return self.lengths[bisect.bisect_right(self.begins, k) - 1]

    def _part(self, k: int) -> PhaseSamples:
        """Return the samples of the phase that has sample k."""
        return self.parts[bisect.bisect_right(self.begins, k) - 1]

    def sample(self, k: int) -> np.ndarray:
        """Return the tokens of sample k: one more than the tokens of a sample of its phase."""
        return self._part(k).sample(k)

    def answers(self, k: int) -> np.ndarray:
        """Return 1 for each token of sample k that is in an answer, else 0."""
        return self._part(k).answers(k)

    def spans(self, k: int) -> list[TextSpan]:
        """Return the spans of text that make sample k, in order."""
        return self._part(k).spans(k)

    def file_of(self, k: int) -> str:
        """Return the path of the file that holds sample k's tokens, for error messages."""
        return self._part(k).file_of(k)

    def count_by_corpus(self, first: int, stop: int) -> dict[str, int]:
        """Return the number of samples in [first, stop) by corpus prefix."""
        total = Counter[str]()
        ends = [*self.begins[1:], self.total]
        for begin, end, part in zip(self.begins, ends, self.parts):
            if max(first, begin) < min(stop, end):
                total.update(part.count_by_corpus(max(first, begin), min(stop, end)))
        return dict(total)


def orders_of(samples: GPTSamples | Continued | Blend) -> dict[str, list[GPTSamples]]:
    """Return by prefix the orders in which samples without phases read each corpus, in turn."""
    if isinstance(samples, GPTSamples):
        return {samples.dataset.prefix: [samples]}
    found: dict[str, list[GPTSamples]] = {}
    for part in samples.parts:
        orders = [part] if isinstance(part, GPTSamples) else part.parts
        found.setdefault(part.dataset.prefix, []).extend(orders)
    return found
