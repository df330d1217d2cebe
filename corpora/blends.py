"""Samples of several corpora mixed by weight, in Megatron's order."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from config.data_options import parse_data_schedule
from config.messages import UserError
from corpora.compiled import compiled
from corpora.mapped_files import ArrayCache, Found
from corpora.sample_order import GPTSamples, TextSpan

RULE = 1  # version of `blend_order`: cached orders of another one are not used


def blend_order(shares: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which part each of `size` samples is from, int16, and its number within that part.

    Megatron's rule (build_blending_indices of helpers.cpp): sample i comes from the part that is
    most below its share, argmax_d of shares[d] * max(i, 1) - taken[d], the first on a tie.

    One sample after the other, that is slow in Python: numba compiles it where it is installed and
    the order is long, else `by_chunks` gives the same.
    """
    fill = compiled(_fill, size * len(shares))
    return one_by_one(shares, size, fill) if fill else by_chunks(shares, size)


def one_by_one(
    shares: list[float], size: int, fill: Callable[..., None]
) -> tuple[np.ndarray, np.ndarray]:
    """`blend_order` by `_fill`, as it is or compiled."""
    which = np.empty(size, np.int16)
    number = np.empty(size, _number_type(size))
    fill(np.asarray(shares, np.float64), np.zeros(len(shares)), which, number)
    return which, number


def _fill(shares: np.ndarray, taken: np.ndarray, which: np.ndarray, number: np.ndarray) -> None:
    below = np.empty(len(shares))
    for i in range(len(which)):
        position = float(max(i, 1))
        most = -np.inf
        chosen = 0
        for part in range(len(shares)):  # without a branch: several parts at a time
            below[part] = shares[part] * position - taken[part]
            most = max(most, below[part])
        while below[chosen] < most:
            chosen += 1
        which[i] = chosen
        number[i] = taken[chosen]
        taken[chosen] += 1


def by_chunks(shares: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """`blend_order` in numpy.

    Chunks of about sqrt(size) samples advance side by side, each from a guess of what was taken
    before it. A chunk whose guess is not what the chunk before it ended with runs again, until
    there is none: then the result is the sequential one, exactly. The rule corrects itself, so
    this takes a few passes; more where shares are much smaller than 1 / sqrt(size).
    """
    weights = np.asarray(shares, np.float64)
    steps = math.isqrt(max(size - 1, 0)) + 1
    chunks = -(-size // steps)
    starts = _guess_taken(weights, np.arange(chunks) * steps)  # (chunks, parts)
    which = np.empty((chunks, steps), np.int16)
    number = np.empty((chunks, steps), _number_type(size))
    stale = np.arange(chunks)
    while len(stale):
        taken = starts[stale]
        every = np.arange(len(stale))
        for step in range(steps):
            i = np.maximum(stale * steps + step, 1)
            chosen = np.argmax(i[:, None] * weights - taken, axis=1)
            which[stale, step] = chosen
            number[stale, step] = taken[every, chosen]
            taken[every, chosen] += 1
        inner = stale + 1 < chunks
        following = stale[inner] + 1
        taken = taken[inner]
        changed = (starts[following] != taken).any(axis=1)
        starts[following] = taken
        stale = following[changed]
    return which.reshape(-1)[:size], number.reshape(-1)[:size]


def _number_type(size: int) -> type[np.signedinteger]:
    return np.int32 if size <= np.iinfo(np.int32).max else np.int64


def _guess_taken(weights: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """A fair share of `begins` samples for each part, whole numbers that add up to it."""
    ideal = begins[:, None] * weights
    taken = np.floor(ideal).astype(np.int64)
    left = begins - taken.sum(axis=1)
    rank = np.argsort(np.argsort(taken - ideal, axis=1, kind="stable"), axis=1)
    return taken + (rank < left[:, None])


@dataclass(frozen=True)
class BlendOrder:
    """which: part of each sample; number: its number within that part; taken: samples by part."""

    which: np.ndarray
    number: np.ndarray
    taken: list[int]
    found: Found


def find_blend_order(
    shares: list[float],
    size: int,
    cache: ArrayCache,
    changes: Sequence[tuple[int, list[float]]] = (),
) -> BlendOrder:
    """`blend_order`, from the cache if it is there.

    changes: samples after which other shares hold; each part goes on with its next sample.
    """
    facts: dict[str, Any] = {"blend": RULE, "shares": shares, "size": size}
    facts |= {"changes": changes} if changes else {}

    def build() -> dict[str, np.ndarray]:
        which, number = _blend_phases([(0, shares), *changes], size)
        taken = np.bincount(which, minlength=len(shares))
        return {"which": which, "number": number, "taken": taken}

    found = cache.find(facts, build)
    arrays = found.arrays
    return BlendOrder(arrays["which"], arrays["number"], arrays["taken"].tolist(), found)


def _blend_phases(
    phases: list[tuple[int, list[float]]], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """`blend_order` by phases: (first sample, shares); parts without a share are left out."""
    if len(phases) == 1:
        return blend_order(phases[0][1], size)
    which = np.empty(size, np.int16)
    number = np.empty(size, _number_type(size))
    taken = np.zeros(len(phases[0][1]), np.int64)
    for (first, shares), (end, _) in pairwise([*phases, (size, [])]):
        here = slice(first, end)
        end = min(end, size)
        if first >= end:
            break
        parts = np.flatnonzero(shares)
        chosen, count = blend_order([shares[part] for part in parts], end - first)
        which[here] = parts[chosen]
        number[here] = count + taken[which[here]]
        taken += np.bincount(which[here], minlength=len(taken))
    return which, number


class Placed:
    """Samples each of which is one of other samples: `_place` says which."""

    def _place(self, k: int) -> tuple[Any, int]:
        raise NotImplementedError

    def sample(self, k: int) -> np.ndarray:
        """Tokens of sample k: (seq_length + 1,), int64."""
        samples, number = self._place(k)
        return samples.sample(number)

    def answers(self, k: int) -> np.ndarray:
        """Which of its tokens are of answers: (seq_length + 1,), 0 or 1."""
        samples, number = self._place(k)
        return samples.answers(number)

    def spans(self, k: int) -> list[TextSpan]:
        """Where its tokens are."""
        samples, number = self._place(k)
        return samples.spans(number)

    def file_of(self, k: int) -> str:
        """The file that holds them."""
        samples, number = self._place(k)
        return samples.file_of(number)


class Blend(Placed):
    """Samples of several corpora, mixed by weight. UserError if a part lacks a sample."""

    def __init__(self, parts: list[GPTSamples], order: BlendOrder):
        self.parts = parts
        self.order = order
        for part, taken in zip(parts, order.taken):
            if taken > len(part):
                asked = f"the blend takes {taken} samples from {part.dataset.prefix}"
                raise UserError(f"{asked}, which has {len(part)}")

    def __len__(self) -> int:
        return len(self.order.which)

    def _place(self, k: int) -> tuple[GPTSamples, int]:
        self.order.found.check()
        return self.parts[self.order.which[k]], int(self.order.number[k])

    def count_by_corpus(self, first: int, stop: int) -> dict[str, int]:
        """How many of the samples from `first` up to `stop` are of each corpus, by its prefix."""
        counts = np.bincount(self.order.which[first:stop], minlength=len(self.parts))
        total = Counter[str]()
        for part, count in zip(self.parts, counts.tolist()):
            total[part.dataset.prefix] += count
        return dict(total)


class Epochs(Placed):
    """`num_samples` samples of blends of equal length, one after the other."""

    def __init__(self, epochs: list[Blend], num_samples: int):
        self.epochs = epochs
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def _place(self, k: int) -> tuple[Blend, int]:
        epoch, number = divmod(k, len(self.epochs[0]))
        return self.epochs[epoch], number

    def count_by_corpus(self, first: int, stop: int) -> dict[str, int]:
        """How many of the samples from `first` up to `stop` are of each corpus, by its prefix."""
        total = Counter[str]()
        size = len(self.epochs[0])
        for number, epoch in enumerate(self.epochs):
            begin = max(first - number * size, 0)
            end = min(stop - number * size, size)
            if begin < end:
                total.update(epoch.count_by_corpus(begin, end))
        return dict(total)


def normalise(weights: Sequence[float]) -> list[float]:
    """Weights that add up to 1, in the floating-point steps that Megatron takes."""
    exact = np.array(weights, np.float64)
    return (exact / exact.sum()).tolist()


def parse_blend(data: tuple) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights of `--data [WEIGHT] PREFIX ...`; weights None if none is given."""
    words = [str(word) for word in data]  # a TOML list may hold numbers
    numbers = [_number(word) for word in words]
    if "synthetic" in words:
        raise UserError("--data synthetic must be alone: random tokens do not mix with files")
    if all(number is None for number in numbers):
        return words, None
    weights = [number for number in numbers[0::2] if number is not None]
    prefixes = words[1::2]
    flag = f"--data {' '.join(words)}"
    if 2 * len(weights) != len(words) or any(number is not None for number in numbers[1::2]):
        raise UserError(f"{flag}: give a weight before every prefix, or before none")
    if not all(0 < weight < math.inf for weight in weights):
        raise UserError(f"{flag}: weights must be positive numbers")
    return prefixes, weights


def shares_by_phase(
    data_schedule: tuple, corpora: int, weighted: bool
) -> list[tuple[int, list[float]]]:
    """From which sample on which shares hold, by --data-schedule; UserError if it does not fit.

    corpora: how many --data names, `weighted` says whether by weights.
    """
    changes = parse_data_schedule(data_schedule)
    if changes and not weighted:
        raise UserError("--data-schedule changes the weights of --data, which gives none")
    for first, weights in changes:
        if len(weights) != corpora:
            given = f"{len(weights)} weights from sample {first} on"
            raise UserError(f"--data-schedule gives {given}, but --data has {corpora} corpora")
    return [(first, normalise(weights)) for first, weights in changes]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
