"""Samples of several corpora mixed by weight, in Megatron's order. Read sample_order.py first.

    order = find_blend_order(normalise([3, 1]), 1000, cache)     of 1000 samples
    samples = Blend([books, code], order, 1000)                  samples 0, 1, ... of the blend

A part is the samples that one corpus gives in an epoch of the blend. The order of a blend gives for
each sample k of the blend its part, and its number within the part: with shares 3/4 and 1/4 the
parts are 0 1 0 0 0 1 0 0 ... and the numbers 0 0 1 2 3 1 4 5 ...
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from base.errors import CorpusError, UserError
from corpora.mapped_files import ArrayCache, CachedArrays
from corpora.sample_order import Continued, GPTSamples, TextSpan

Part = GPTSamples | Continued  # the samples of a corpus

RULE = 1  # version of `blend_order`: cached orders of another version are not used


def blend_order(shares: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for each of `size` samples its part, and its number within that part: (size,) each.

    A part is the samples of a corpus. shares: the share of each part; they add up to 1.
    Megatron's rule (build_blending_indices of helpers.cpp): sample i comes from the part that is
    most below its share, argmax_d of shares[d] * max(i, 1) - taken[d], the first on a tie; taken[d]
    is the number of samples that part d has given before.

    To compute this with few numpy calls, chunks of about sqrt(size) samples advance side by side. A
    chunk starts from a guess of the samples taken before it. If the guess differs from the end of
    the chunk before, the chunk runs again, until all guesses are right. The rule corrects itself,
    so this takes a few passes, or more if shares are much smaller than 1 / sqrt(size).
    """
    weights = np.asarray(shares, np.float64)
    steps = math.isqrt(max(size - 1, 0)) + 1  # the samples of a chunk
    chunks = -(-size // steps)  # the number of chunks that hold `size` samples: rounded up
    # For each chunk and part, the samples that the part has given before the chunk: a guess so far.
    starts = _guess_taken(weights, np.arange(chunks) * steps)  # (chunks, parts)
    part_of = np.empty((chunks, steps), np.int16)
    fits_32_bits = size <= np.iinfo(np.int32).max  # then the numbers take half of the memory
    number_of = np.empty((chunks, steps), np.int32 if fits_32_bits else np.int64)
    stale = np.arange(chunks)  # the chunks whose start has changed since they ran: at first all
    while len(stale):
        taken = starts[stale]  # a copy: the samples taken so far, in each chunk that runs
        rows = np.arange(len(stale))
        # Each step gives one sample in every chunk that runs. By Megatron's rule, its number i, the
        # weights and `taken` determine the part that it comes from.
        for step in range(steps):
            i = np.maximum(stale * steps + step, 1)
            chosen = np.argmax(i[:, None] * weights - taken, axis=1)
            part_of[stale, step] = chosen
            number_of[stale, step] = taken[rows, chosen]
            taken[rows, chosen] += 1
        # The end of a chunk is the right start of the chunk after it. If that chunk has started
        # from other numbers, it runs in the next pass.
        has_next = stale + 1 < chunks
        following = stale[has_next] + 1
        end = taken[has_next]
        changed = (starts[following] != end).any(axis=1)
        starts[following] = end
        stale = following[changed]
    return part_of.reshape(-1)[:size], number_of.reshape(-1)[:size]


def _guess_taken(weights: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Return a guess of the samples that each part has given before each chunk.

    The result is int64, (chunks, parts). weights: the share of each part, (parts,). begins: the
    number of each chunk's first sample, (chunks,), which is also how many samples all parts
    together have given before the chunk. Each part is given its share of them, rounded down; the
    parts with the largest fractions get one sample more, until all are distributed.
    """
    ideal = begins[:, None] * weights
    taken = np.floor(ideal).astype(np.int64)
    missing = begins - taken.sum(axis=1)
    # The parts with the largest fractions get the `missing` samples, one each. `rank` is the place
    # of each part if the parts are sorted by their fractions, the largest first.
    rank = np.argsort(np.argsort(taken - ideal, axis=1, kind="stable"), axis=1)
    return taken + (rank < missing[:, None])


@dataclass(frozen=True)
class BlendOrder:
    """The order of a blend of several parts, each the samples of a corpus.

    which: the part of each sample, (samples,). number: the number of each sample in its part,
    (samples,). taken: how many samples each part gives. found: the cache's result, which holds the
    arrays and can check their files.
    """

    which: np.ndarray
    number: np.ndarray
    taken: list[int]
    found: CachedArrays


def find_blend_order(shares: list[float], size: int, cache: ArrayCache) -> BlendOrder:
    """Return the order of a blend from the cache, or compute and store it.

    shares: the share of each part; they add up to 1. size: the number of samples of the blend.
    """
    facts: dict[str, Any] = {"blend": RULE, "shares": shares, "size": size}

    def build() -> dict[str, np.ndarray]:
        """Compute the arrays of the order; the cache calls this if it has none for `facts`."""
        which, number = blend_order(shares, size)
        taken = np.bincount(which, minlength=len(shares))  # the samples that each part gives
        return {"which": which, "number": number, "taken": taken}

    found = cache.find(facts, build)
    arrays = found.arrays
    return BlendOrder(arrays["which"], arrays["number"], arrays["taken"].tolist(), found)


class Blend:
    """Samples of several corpora, mixed by weight.

    parts: the samples of every corpus for the first epoch, then for the second, and so on, with the
    same order of corpora. order: the order of an epoch, which all epochs use. num_samples: the
    number of samples; the last epoch may be incomplete. Raise UserError if a part has too few
    samples. A blend has the methods that data.py calls, as GPTSamples has them.
    """

    def __init__(self, parts: Sequence[Part], order: BlendOrder, num_samples: int):
        """Keep the parts and their order, after checking that each part has enough samples.

        parts: for each epoch of the blend, a part of each corpus: [a, b, a, b] for two corpora and
        two epochs.
        """
        self.parts = parts
        self.order = order
        self.num_samples = num_samples
        # `order.taken` has for each corpus the samples that an epoch takes from it. The list is
        # repeated, because every epoch takes as many.
        for part, taken in zip(parts, order.taken * self._epochs(num_samples)):
            if taken > len(part):
                asked = f"the blend takes {taken} samples from {part.dataset.prefix}"
                raise CorpusError(f"{asked}, which has {len(part)}")

    def __len__(self) -> int:
        return self.num_samples

    def _epochs(self, samples: int) -> int:
        """Return the number of epochs that have `samples` samples; the last may be incomplete.

        An epoch has as many samples as the order has entries.
        """
        return -(-samples // len(self.order.which))

    def _place(self, k: int) -> tuple[Part, int]:
        """Return the part that has sample k, and the sample's number there.

        Raise UserError if a cached file of the order has become shorter: reading it would end the
        process.
        """
        self.order.found.check()
        epoch, row = divmod(k, len(self.order.which))
        # In `self.parts`, the parts of an epoch follow the parts of all epochs before.
        part = epoch * len(self.order.taken) + int(self.order.which[row])
        return self.parts[part], int(self.order.number[row])

    def sample(self, k: int) -> np.ndarray:
        """Return the tokens of sample k: (seq_length + 1,), int64.

        As in the next three methods, the part of a corpus that has the sample does the work.
        """
        samples, number = self._place(k)
        return samples.sample(number)

    def answers(self, k: int) -> np.ndarray:
        """Return 1 for each token of sample k that is in an answer, else 0: (seq_length + 1,)."""
        samples, number = self._place(k)
        return samples.answers(number)

    def spans(self, k: int) -> list[TextSpan]:
        """Return the spans of text that make sample k, in order: where its tokens come from.

        Reports of a high loss name them.
        """
        samples, number = self._place(k)
        return samples.spans(number)

    def file_of(self, k: int) -> str:
        """Return the path of the file that holds sample k's tokens, for error messages."""
        samples, number = self._place(k)
        return samples.file_of(number)

    def count_by_corpus(self, first: int, stop: int) -> dict[str, int]:
        """Return the number of samples in [first, stop) by corpus prefix.

        Called after each step, to count what the run has read of each corpus (usage.py).
        """
        size = len(self.order.which)
        total = Counter[str]()
        for epoch in range(first // size, self._epochs(stop)):
            # The entries of the order that belong to the samples of [first, stop) in this epoch.
            # The first parts are those of the first epoch, one for each corpus.
            begin = max(first - epoch * size, 0)
            which = self.order.which[begin : stop - epoch * size]
            for part, count in zip(self.parts, np.bincount(which).tolist()):
                total[part.dataset.prefix] += count
        return dict(total)


def normalise(weights: Sequence[float]) -> list[float]:
    """Return weights divided by their sum, in the same floating-point steps as Megatron.

    A difference in the last bit could change which part a sample comes from.
    """
    exact = np.array(weights, np.float64)
    return (exact / exact.sum()).tolist()


def parse_blend(data: tuple) -> tuple[list[str], list[float] | None]:
    """Return the prefixes and the weights of `--data [WEIGHT] PREFIX ...`.

    data: the words of the option; each corpus is the prefix of its two files. The weights are None
    if --data gives none. Raise UserError if they are wrong.
    """
    words = [str(word) for word in data]  # a TOML list may hold numbers
    numbers = [_number(word) for word in words]
    if "synthetic" in words:
        raise UserError("--data synthetic must be alone: random tokens do not mix with files")
    if all(number is None for number in numbers):
        return words, None
    # `numbers` has each word as a number, or None. Weights and prefixes must alternate: the words
    # 0, 2, 4 ... must be numbers, the words 1, 3, 5 ... must be none.
    at_prefixes = numbers[1::2]
    weights = [number for number in numbers[0::2] if number is not None]
    prefixes = words[1::2]
    flag = f"--data {' '.join(words)}"
    has_number_as_prefix = any(number is not None for number in at_prefixes)
    if 2 * len(weights) != len(words) or has_number_as_prefix:
        raise CorpusError(f"{flag}: give a weight before every prefix, or before none")
    if not all(0 < weight < math.inf for weight in weights):
        raise CorpusError(f"{flag}: weights must be positive numbers")
    return prefixes, weights


def _number(word: str) -> float | None:
    """Return the number that a word of --data is, or None if it is no number but a prefix."""
    try:
        return float(word)
    except ValueError:
        return None
