"""Where samples come from: token files on disk, their order, blends of several, micro-batches.

    PREFIX.bin  tokens of all sequences, end to end
    PREFIX.idx  where each sequence and document begins
        |
        |  a split is a range of sequences: [train | validation | test]
        v
    document order   3 0 2 1 | 0 2 3 1 | ...        shuffled, once per epoch asked for
    sample order     |-----|-----|-----|-----|...   cut every seq_length tokens, then shuffled
        |
        v
    step s, micro-batch m, replica r reads samples  s*B + (m*dp + r)*b ...  of that order

Files and order are those of Megatron-LM (megatron/core/datasets, 0.16): files written by either are
read by both, and the same corpus, split, length and seed give the same samples in the same order.
The order is a function of those alone; every rank computes it in memory, so ranks share no cache.
"""

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from config.messages import UserError
from config.schema import Config, Layout
from corpora.token_files import IndexedDataset

BLOCK = 1 << 22  # entries of a large array handled at a time, to bound temporary memory
SPLITS = ("train", "validation", "test")
SURPLUS = 0.005  # Megatron's mid_level_dataset_surplus: what a blend asks of each part on top


# ------------------------------------------------------------------------------------------------
# The order of samples
# ------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A run of tokens within one sequence of a corpus; a sample is one or more of them."""

    prefix: str
    sequence: int
    offset: int
    length: int


class Samples(Protocol):
    """What a batch is made of: sample k is the same on every rank and in every layout."""

    def __len__(self) -> int: ...

    def sample(self, k: int) -> np.ndarray:
        """int64, (seq_length + 1,): the labels are the tokens, one further on."""

    def pieces(self, k: int) -> list[Piece]:
        """Which text sample k was cut from, to say what the model was reading at a loss spike."""

    def documents(self, k: int) -> list[int]:
        """The document that each of the pieces is of."""


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
            raise UserError(f"seed({seed}) of the sample order must lie in 0..{2**32 - 1}")
        self.dataset, self.seq_length, self.vocab_size = dataset, seq_length, vocab_size
        tokens = tokens_per_epoch(dataset, sequences, seq_length)
        wanted = num_samples or 1
        self.epochs = -(-(wanted * seq_length + 1) // tokens)  # exact, where floats round
        total = (self.epochs * tokens - 1) // seq_length
        # If less than 80 % of the last epoch is wanted, it is shuffled by itself and comes last:
        # mixed with the others, its unread part would be missing from their text as well.
        first_samples, first_epochs = total, self.epochs
        if self.epochs > 1:
            before = ((self.epochs - 1) * tokens - 1) // seq_length
            if wanted - before < int(0.80 * ((tokens - 1) // seq_length)):
                first_samples, first_epochs = before, self.epochs - 1
        random = np.random.RandomState(seed)  # one for both shuffles, documents first
        epoch = np.arange(sequences.start, sequences.stop, dtype=_index_type(len(dataset)))
        self.document_index = np.tile(epoch, self.epochs)
        _shuffle(self.document_index, first_epochs * len(sequences), random)
        self.sample_index = sample_starts(dataset.lengths, self.document_index, seq_length, total)
        small = total < np.iinfo(np.uint32).max - 1
        self.shuffle_index = np.arange(total, dtype=np.uint32 if small else np.int64)
        _shuffle(self.shuffle_index, first_samples, random)

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def pieces(self, k: int) -> list[Piece]:
        """Where sample k's tokens are: pieces of the sequences it is cut from, in order."""
        row = int(self.shuffle_index[k])
        (first, begin), (last, end) = self.sample_index[row : row + 2].tolist()
        sequences = self.document_index[first : last + 1]
        ends = self.dataset.lengths[sequences].tolist()
        ends[-1] = end + 1  # the token at the next sample's start is this one's last label
        starts = [begin] + [0] * (len(ends) - 1)
        cuts = zip(sequences.tolist(), starts, ends)
        return [Piece(self.dataset.prefix, s, a, b - a) for s, a, b in cuts if b > a]

    def documents(self, k: int) -> list[int]:
        """The documents that sample k is cut from."""
        return [self.dataset.document_of(piece.sequence) for piece in self.pieces(k)]

    def sample(self, k: int) -> np.ndarray:
        """Tokens of sample k: (seq_length + 1,), int64; UserError for one past the vocabulary."""
        get = self.dataset.get
        parts = [get(p.sequence, p.offset, p.length) for p in self.pieces(k)]
        tokens = np.concatenate(parts, dtype=np.int64)  # (seq_length + 1,)
        # Negative ids are huge as unsigned ones, so that one pass finds both mistakes.
        if self.vocab_size is not None and tokens.view(np.uint64).max() >= self.vocab_size:
            self._refuse(k)
        return tokens

    def _refuse(self, k: int) -> None:
        """Raise the UserError that says where in the corpus a foreign token id is."""
        for prefix, sequence, offset, length in self.pieces(k):
            ids = self.dataset.get(sequence, offset, length).astype(np.int64)
            bad = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
            if len(bad):
                raise UserError(
                    f"{prefix}: token {offset + bad[0]} of sequence {sequence} (document "
                    f"{self.dataset.document_of(sequence)}) has id {ids[bad[0]]}, but "
                    f"vocab-size is {self.vocab_size}"
                )


def tokens_per_epoch(dataset: IndexedDataset, sequences: range, seq_length: int) -> int:
    """Tokens in a range of sequences; UserError if they are too few for one sample."""
    begin, end = sequences.start, sequences.stop
    tokens = int(dataset.lengths[begin:end].sum(dtype=np.int64))
    if tokens <= seq_length:
        raise UserError(
            f"sequences {begin} to {end} of the {len(dataset)} in {dataset.prefix} hold {tokens} "
            f"tokens, but one sample takes seq-length({seq_length}) + 1"
        )
    return tokens


def sample_starts(
    lengths: np.ndarray, document_index: np.ndarray, seq_length: int, num_samples: int
) -> np.ndarray:
    """Where each sample starts: rows (position in document_index, token offset in that sequence).

    Shape (num_samples + 1, 2); row i is the token at i * seq_length of the sequences laid end to
    end, the last one the end of the last sample. Row 0 is (0, 0) even if that sequence is empty.
    Equal to build_sample_idx of Megatron's helpers.cpp.
    """
    starts = np.zeros((num_samples + 1, 2), _index_type(len(document_index)))
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


def _index_type(count: int) -> type:
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
    shares = np.array(shares + [0.0] * (len(SPLITS) - len(shares)))
    bounds = [0.0] + np.cumsum(shares / shares.sum()).tolist()
    places = [round(bound * float(sequences)) for bound in bounds]
    return [range(begin, end) for begin, end in itertools.pairwise(places)]


# ------------------------------------------------------------------------------------------------
# Blends
# ------------------------------------------------------------------------------------------------


def blend_order(weights, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which part each of `size` samples is from, int16, and its number within that part.

    Megatron's rule (build_blending_indices of helpers.cpp): sample i comes from the part that is
    furthest behind its share, argmax_d of weights[d] * max(i, 1) - taken[d], the first on a tie.

    One sample after the other, that is slow in Python. Instead, chunks of about sqrt(size) samples
    advance side by side, each from a guess of what was taken before it. A chunk that turns out to
    have started from something else than the chunk before it ended with runs again. When none is
    left, every chunk continues its predecessor, so the result is the sequential one, exactly.
    Parts that were guessed one off soon agree (the rule is self-correcting): two passes or three.
    """
    weights = np.asarray(weights, np.float64)
    steps = math.isqrt(max(size - 1, 0)) + 1
    chunks = -(-size // steps)
    starts = _guess_taken(weights, np.arange(chunks) * steps)  # (chunks, parts)
    which = np.empty((chunks, steps), np.int16)
    stale = np.arange(chunks)
    while len(stale):
        taken, every = starts[stale], np.arange(len(stale))
        for step in range(steps):
            i = np.maximum(stale * steps + step, 1)
            behind = np.argmax(i[:, None] * weights - taken, axis=1)
            which[stale, step] = behind
            taken[every, behind] += 1
        inner = stale + 1 < chunks
        following, taken = stale[inner] + 1, taken[inner]
        changed = (starts[following] != taken).any(axis=1)
        starts[following] = taken
        stale = following[changed]
    which = which.reshape(-1)[:size]
    # The number within its part: the position among the equal entries.
    order = np.argsort(which, kind="stable")
    first = np.searchsorted(which[order], np.arange(len(weights)))
    number = np.empty(size, np.int64)
    number[order] = np.arange(size) - first[which[order]]
    return which, number


def _guess_taken(weights: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """A fair share of `begins` samples for each part, whole numbers that add up to it."""
    ideal = begins[:, None] * weights
    taken = np.floor(ideal).astype(np.int64)
    left = begins - taken.sum(axis=1)
    rank = np.argsort(np.argsort(taken - ideal, axis=1, kind="stable"), axis=1)
    return taken + (rank < left[:, None])


class Blend:
    """Samples of several corpora, mixed by weight. UserError if a part lacks a sample."""

    def __init__(self, parts: list[GPTSamples], which: np.ndarray, number: np.ndarray):
        self.parts, self.which, self.number = parts, which, number
        for part, taken in zip(parts, np.bincount(which, minlength=len(parts)).tolist()):
            if taken > len(part):
                raise UserError(
                    f"the blend takes {taken} samples from {part.dataset.prefix}, which has "
                    f"{len(part)}"
                )

    def __len__(self) -> int:
        return len(self.which)

    def sample(self, k: int) -> np.ndarray:
        """Tokens of the blend's sample k: (seq_length + 1,), int64."""
        return self.parts[self.which[k]].sample(int(self.number[k]))

    def pieces(self, k: int) -> list[Piece]:
        """Where its tokens are."""
        return self.parts[self.which[k]].pieces(int(self.number[k]))

    def documents(self, k: int) -> list[int]:
        """The documents it is cut from."""
        return self.parts[self.which[k]].documents(int(self.number[k]))


class Synthetic:
    """Random tokens instead of text, to time and to test with; there is no end to them.

    Sample k follows from (seed, stream, k); streams keep train and validation apart.
    """

    def __init__(self, vocab_size: int, seq_length: int, seed: int, stream: int = 0):
        self.vocab_size, self.seq_length = vocab_size, seq_length
        self.seed, self.stream = seed, stream

    def __len__(self) -> int:
        return sys.maxsize

    def sample(self, k: int) -> np.ndarray:
        """Tokens of sample k: (seq_length + 1,), int64."""
        random = np.random.default_rng((self.seed, self.stream, k))
        return random.integers(self.vocab_size, size=self.seq_length + 1)

    def pieces(self, k: int) -> list[Piece]:
        """None: there is no text."""
        return []

    def documents(self, k: int) -> list[int]:
        """None: there is no text."""
        return []


# ------------------------------------------------------------------------------------------------
# What a run reads
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Splits:
    """The samples of a run; None where the run reads none."""

    train: Samples | None
    validation: Samples | None
    test: Samples | None


def build(config: Config) -> Splits:
    """The samples that a run needs: all of its steps, and one evaluation.

    Every evaluation reads the same first eval_samples, so that two evaluations differ only by the
    model. The test split is built if --split gives it a share. UserError on bad data or shares.
    """
    evaluated = config.data.eval_samples
    wanted = (config.total_samples, evaluated, evaluated)
    model, seed = config.model, config.training.seed
    if config.data.data == ("synthetic",):
        streams = [Synthetic(model.vocab_size, model.seq_length, seed, i) for i in range(3)]
        return Splits(*(stream if count else None for stream, count in zip(streams, wanted)))
    prefixes, weights = parse_blend(config.data.data)
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    ranges = [split_ranges(config.data.split, len(dataset)) for dataset in datasets]
    splits = []
    for i, (name, count) in enumerate(zip(SPLITS, wanted)):
        shares = [parts[i] for parts in ranges]
        if count == 0 or (name == "test" and not any(shares)):
            splits.append(None)
            continue
        try:
            splits.append(_build_split(datasets, shares, weights, count, config))
        except UserError as error:
            raise UserError(f"{name} samples (--split {config.data.split}): {error}") from None
    return Splits(*splits)


def parse_blend(data: tuple) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights of `--data [WEIGHT] PREFIX ...`; weights None if none is given."""
    words = [str(word) for word in data]  # a TOML list may hold numbers
    numbers = [_number(word) for word in words]
    if "synthetic" in words:
        raise UserError("--data synthetic stands alone: random tokens do not mix with files")
    if all(number is None for number in numbers):
        return words, None
    weights, prefixes = numbers[0::2], words[1::2]
    if len(words) % 2 or None in weights or any(n is not None for n in numbers[1::2]):
        raise UserError(
            f"--data {' '.join(words)}: give a weight before every prefix, or before none"
        )
    if not all(0 < weight < math.inf for weight in weights):
        raise UserError(f"--data {' '.join(words)}: weights must be positive numbers")
    return prefixes, weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _build_split(datasets, sequences, weights, num_samples, config) -> Samples:
    """Samples of one split: of the only corpus, or of a blend.

    The order of a part depends on how much is asked of it, so that follows Megatron's rule
    (blended_megatron_dataset_builder.py): with weights, its share and some surplus; without, one
    epoch, and parts are mixed by the samples in it. Where that falls short of what the blend
    takes, and Megatron gives up, the part is asked for what is taken.
    """
    length, seed, vocab = config.model.seq_length, config.training.seed, config.model.vocab_size
    if weights is None and len(datasets) == 1:
        return GPTSamples(datasets[0], sequences[0], num_samples, length, seed, vocab)
    epoch = [(tokens_per_epoch(d, s, length) - 1) // length for d, s in zip(datasets, sequences)]
    shares = normalise(epoch if weights is None else weights)
    # Megatron normalises given weights once for the requests and once more for the order.
    which, number = blend_order(shares if weights is None else normalise(shares), num_samples)
    surplus = [math.ceil(math.ceil(num_samples * share) * (1 + SURPLUS)) for share in shares]
    requests = epoch if weights is None else surplus
    taken = np.bincount(which, minlength=len(datasets)).tolist()
    parts = [
        GPTSamples(dataset, own, max(request, count), length, seed, vocab)
        for dataset, own, request, count in zip(datasets, sequences, requests, taken)
    ]
    return Blend(parts, which, number)


def normalise(weights) -> list[float]:
    """Weights that add up to 1, in the floating-point steps that Megatron takes."""
    weights = np.array(weights, np.float64)
    return (weights / weights.sum()).tolist()


def batches(
    samples: Samples, first_sample: int, layout: Layout, dp_rank: int, device: torch.device
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """The function that gives a replica's micro-batches, by index, of the global batch that starts
    at `first_sample`: tokens and labels as `micro_batch` makes them, on the device.
    """

    def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, labels = micro_batch(samples, first_sample, index, layout, dp_rank)
        return tokens.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    return batch


def micro_batch(
    samples: Samples, first_sample: int, index: int, layout: Layout, dp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, int64 of shape (micro_batch_size, seq_length), for one forward pass.

    Micro-batch `index` on replica `dp_rank` of the global batch that starts at `first_sample`.
    Over all of them the global batch is first_sample, first_sample + 1, ... in that order, whatever
    dp and micro_batch_size are. UserError if the samples end before the micro-batch does.
    """
    size = layout.micro_batch_size
    begin = first_sample + (index * layout.dp + dp_rank) * size
    if begin + size > len(samples):
        raise UserError(
            f"samples {begin} to {begin + size} were asked for, but there are only {len(samples)}"
        )
    batch = torch.from_numpy(np.stack([samples.sample(begin + i) for i in range(size)]))
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
