"""Where samples come from: the splits of a run, and micro-batches of a global batch.

PREFIX.bin, PREFIX.idx   tokens on disk                            corpora/token_files.py
    |
    |  a split is a range of sequences: [train | validation | test]
    v
samples                  in Megatron's order, or blended           corpora/sample_order.py
    |                                                              corpora/mapped_files.py: cache
    v
step s, micro-batch m, replica r reads samples  s*B + (m*dp + r)*b ...  of that order
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from config.data_options import parse_eval_sets
from config.messages import UserError
from config.schema import Config, Layout
from corpora.blends import (
    Blend,
    Epochs,
    find_blend_order,
    normalise,
    parse_blend,
    shares_by_phase,
)
from corpora.checksums import check_blocks
from corpora.mapped_files import ArrayCache
from corpora.objectives import Objective
from corpora.prefetch import AHEAD, READERS, Batch, Prefetcher
from corpora.sample_order import (
    SPLITS,
    GPTSamples,
    TextSpan,
    TooFewTokens,
    eval_samples,
    split_ranges,
    tokens_per_epoch,
)
from corpora.token_files import ANSWERS, IndexedDataset
from distributed.collectives import Group

# Megatron's mid_level_dataset_surplus: what a blend requests of each part in addition.
SURPLUS = 0.005


class Synthetic:
    """Random tokens instead of text, for timing and tests; their number is not limited.

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

    def count_by_corpus(self, first: int, stop: int) -> dict[str, int]:
        """None: there is no corpus."""
        return {}

    def spans(self, k: int) -> list[TextSpan]:
        """None: there is no text."""
        return []

    def answers(self, k: int) -> np.ndarray:
        """Every token is one: (seq_length + 1,)."""
        return np.ones(self.seq_length + 1, np.int64)

    def file_of(self, k: int) -> str:
        """None: a name for messages."""
        return "synthetic"


# What a batch is made of: sample k is the same on every rank and in every layout.
Samples = Synthetic | GPTSamples | Blend | Epochs


@dataclass(frozen=True)
class Splits:
    """The samples of a run; None where the run reads none.

    source: how they are read and where their order comes from. notes: what the user should know.
    eval_sets: those of --eval-data by name, and how many samples of each count. epoch_tokens: by
    corpus, tokens of its train split.
    """

    train: Samples
    validation: Samples | None
    test: Samples | None
    source: str = "synthetic tokens"
    notes: tuple[str, ...] = ()
    eval_sets: Mapping[str, tuple[Samples, int]] = field(default_factory=dict)
    epoch_tokens: Mapping[str, int] = field(default_factory=dict)


def build(config: Config) -> Splits:
    """The samples that a run needs: all of its steps, and one evaluation.

    Every evaluation reads the same first eval_samples, so that two evaluations differ only by the
    model. The test split is built if --split gives it a share and it holds a sample. UserError on
    bad data or shares.
    """
    splits, (eval_sets, notes) = _splits(config), _eval_sets(config)
    return replace(splits, eval_sets=eval_sets, notes=splits.notes + notes)


def _splits(config: Config) -> Splits:
    """The splits of --data."""
    evaluated = config.data.eval_samples
    if config.data.data == ("synthetic",):
        model, seed = config.model, config.training.seed
        streams = [Synthetic(model.vocab_size, model.seq_length, seed, i) for i in range(3)]
        others = streams[1:] if evaluated else [None, None]
        return Splits(streams[0], others[0], others[1])
    corpora = Corpora(config)
    samples = corpora.split(0, config.total_samples)
    splits = Splits(samples, None, None, corpora.describe(), epoch_tokens=corpora.epoch_tokens())
    if not evaluated:
        return splits
    splits = replace(splits, validation=corpora.split(1, evaluated))
    if not any(ranges[SPLITS.index("test")] for ranges in corpora.ranges):
        return splits
    try:
        return replace(splits, test=corpora.split(2, evaluated))
    except TooFewTokens as error:
        return replace(splits, notes=(f"no test loss: {error}",))


def _eval_sets(config: Config) -> tuple[dict[str, tuple[Samples, int]], tuple[str, ...]]:
    """The sets of --eval-data by name, and a line on each; UserError if one lacks samples.

    The last micro-batches are filled with samples of a second epoch, which do not count.
    """
    model, cache = config.model, ArrayCache(config.data.cache_folder)
    about = model.seq_length, config.training.seed, model.vocab_size, "stable", cache
    found: dict[str, tuple[Samples, int]] = {}
    notes = []
    for asked in parse_eval_sets(config.data.eval_data or ()):
        name, prefix, _ = asked
        dataset = _open(prefix, config, cache)
        every = range(len(dataset))
        count, there = eval_samples(asked, dataset.tokens, model.seq_length)
        share = config.layout.micro_batch_size * config.layout.dp
        found[name] = GPTSamples(dataset, every, -(-count // share) * share, *about), count
        notes.append(f"evaluation set {name}: {count} of {there} samples of {prefix}")
    return found, tuple(notes)


def _open(prefix: str, config: Config, cache: ArrayCache) -> IndexedDataset:
    """A corpus of a run, with its answers if they are needed; some blocks are compared with their
    checksums. UserError.
    """
    dataset = IndexedDataset(prefix, cache)
    if config.data.answers_only:
        dataset.open_answers()
        check_blocks(prefix + ANSWERS)
    check_blocks(prefix)
    return dataset


class Corpora:
    """The token files of a run, and its splits of them.

    ranges: by corpus, the sequences of each split. UserError on bad data or shares.
    """

    def __init__(self, config: Config):
        self.config, self.cache = config, ArrayCache(config.data.cache_folder)
        prefixes, self.weights = parse_blend(config.data.data)
        schedule = config.data.data_schedule or ()
        self.changes = shares_by_phase(schedule, len(prefixes), self.weights is not None)
        self.datasets = [_open(prefix, config, self.cache) for prefix in prefixes]
        self.ranges = [split_ranges(config.data.split, len(dataset)) for dataset in self.datasets]

    def split(self, number: int, num_samples: int) -> Samples:
        """At least so many samples of a split: of the only corpus, or of a blend."""
        ranges = [own[number] for own in self.ranges]
        try:
            if self.weights is None and len(self.datasets) == 1:
                return self._part(0, ranges, num_samples)
            if self.weights is None:
                return self._by_size(ranges, num_samples)
            return self._by_weight(ranges, num_samples, () if number else self.changes)
        except UserError as error:
            raise type(error)(
                f"{SPLITS[number]} samples (--split {self.config.data.split}): {error}"
            ) from None
        except MemoryError:
            name = f"{num_samples:,} {SPLITS[number]} samples"
            raise UserError(f"no memory for the order of {name}") from None

    def epoch_tokens(self) -> dict[str, int]:
        """By corpus, the tokens of its train split."""
        parts = zip(self.datasets, self.ranges)
        return {dataset.prefix: dataset.tokens_in(ranges[0]) for dataset, ranges in parts}

    def describe(self) -> str:
        """How tokens are read and where orders are kept, for the start of a run."""
        order = f"{self.config.data.order} order in {self.cache.folder or 'memory'}"
        if self.changes:
            order += f"; other weights from samples {[first for first, _ in self.changes]} on"
        return f"tokens read by pread, {READERS} threads, {AHEAD} micro-batches ahead; {order}"

    def _part(
        self, i: int, ranges: list[range], count: int | None, seed: int | None = None
    ) -> GPTSamples:
        config = self.config
        seed = config.training.seed if seed is None else seed
        about = config.model.seq_length, seed, config.model.vocab_size, config.data.order
        return GPTSamples(self.datasets[i], ranges[i], count, *about, self.cache)

    def _by_weight(self, ranges: list[range], num_samples: int, changes: Sequence) -> Blend:
        """A blend whose parts are requested as Megatron does: their share and some surplus.

        The order of a part depends on how much is requested of it. Where that falls short of what
        the blend takes, where Megatron fails, what is taken is requested. changes: of the shares,
        in the stable order alone, in which a part's first samples do not depend on the request.
        """
        shares = normalise(self.weights or ())
        # Megatron normalises given weights once for the requests and once more for the order.
        order = find_blend_order(normalise(shares), num_samples, self.cache, changes)
        surplus = [math.ceil(math.ceil(num_samples * share) * (1 + SURPLUS)) for share in shares]
        requests = [max(pair) for pair in zip(surplus, order.taken)]
        return Blend([self._part(i, ranges, n) for i, n in enumerate(requests)], order)

    def _by_size(self, ranges: list[range], num_samples: int) -> Samples:
        """Parts mixed by the samples in them, an epoch of each, as Megatron does; further epochs,
        which Megatron has none of, are the same with each part in the order of another seed.
        """
        length, seed = self.config.model.seq_length, self.config.training.seed
        epoch = [
            (tokens_per_epoch(dataset, own, length) - 1) // length
            for dataset, own in zip(self.datasets, ranges)
        ]
        number = range(len(self.datasets))
        order = find_blend_order(normalise(epoch), min(num_samples, sum(epoch)), self.cache)
        epochs = [
            Blend([self._part(i, ranges, None, (seed + e) % 2**32) for i in number], order)
            for e in range(-(-num_samples // sum(epoch)))
        ]
        return epochs[0] if len(epochs) == 1 else Epochs(epochs, num_samples)


class BatchReader:
    """Gives a replica's micro-batches, whose tokens are those of `micro_batch`, on the device; they
    are read ahead (corpora/prefetch.py).
    """

    def __init__(self, config: Config, dp_rank: int, device: torch.device, cp: Group | None = None):
        """cp: the ranks that share a sample's tokens; this one's are given. Default: itself."""
        self.layout, self.dp_rank, self.device = config.layout, dp_rank, device
        self.cp = cp or Group()
        # Before the watchdog, which does not know the file.
        seconds = 0.8 * (config.run.hang_timeout or 300.0)
        shape = self.layout.micro_batch_size, config.model.seq_length
        objective = Objective(config.data, config.training.seed)
        self.prefetcher = Prefetcher(shape, device.type == "cuda", seconds, objective)
        self.kept: dict[int, Callable[[int], Batch]] = {}  # by the first sample

    def batches(
        self,
        samples: Samples,
        first: int,
        config: Config,
        evaluated: int | None = None,
        keep: bool = False,
    ) -> Callable[[int], Batch]:
        """Micro-batches by index, of the global batch that starts at sample `first`.

        evaluated: of how many samples an evaluation is, which may end within a micro-batch: those
        after them do not count. None: training, which goes on after this batch. Where a rank has
        several stages, which may all ask for it, a micro-batch is kept; keep: and given again to
        the next step, if that begins at `first` too.
        """
        if evaluated is None and (kept := self.kept.pop(first, None)):
            return kept
        size, begun = self.layout.micro_batch_size, False
        length = config.length(first) if evaluated is None else config.model.seq_length
        count = None if evaluated is None else -(-evaluated // (size * self.layout.dp))

        def take(index: int) -> Batch:
            """Micro-batch `index` on the device; the first one asked for begins the reading."""
            nonlocal begun
            begin = first_of_micro_batch(first, index, self.layout, self.dp_rank)
            check_end(samples, begin, size)
            if not begun:  # only now: ranks that ask for nothing read nothing
                self.prefetcher.go_on(samples, begin, self._upcoming(first, config, count))
                begun = True
            batch = self.prefetcher.take(samples, begin)
            if evaluated is not None:
                batch = batch.first(evaluated - begin)
            # torch gives pinned memory away again only when the copy from it has ended.
            return batch.to(self.device, length, self.cp)

        found = functools.cache(take) if keep or self.layout.stages_per_rank > 1 else take
        self.kept |= {first: found} if keep else {}
        return found

    def _upcoming(self, first: int, config: Config, count: int | None) -> Iterator[int]:
        """The first samples of this replica's micro-batches from the global batch at `first` on."""
        while True:
            batch = config.batches.batch(first)
            micro_batches = config.micro_batches(batch) if count is None else count
            if count is not None or not config.passes_over(first, batch):
                for index in range(micro_batches):
                    yield first_of_micro_batch(first, index, self.layout, self.dp_rank)
            if count is not None:
                return
            first += batch

    def close(self) -> None:
        """End the threads."""
        self.prefetcher.close()


def first_of_micro_batch(first_sample: int, index: int, layout: Layout, dp_rank: int) -> int:
    """Where micro-batch `index` of replica `dp_rank` begins, in the global batch at first_sample.

    Over all of them the global batch is first_sample, first_sample + 1, ... in that order, whatever
    dp and micro_batch_size are.
    """
    return first_sample + (index * layout.dp + dp_rank) * layout.micro_batch_size


def check_end(samples: Samples, begin: int, count: int) -> None:
    """UserError if the samples end before `count` from `begin` on."""
    if begin + count > len(samples):
        needed = f"samples {begin} to {begin + count} are needed"
        raise UserError(f"{needed}, but there are only {len(samples)}")


def micro_batch(
    samples: Samples, first_sample: int, index: int, layout: Layout, dp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, int64 of shape (micro_batch_size, seq_length), for one forward pass, read
    now; `first_of_micro_batch` says which. UserError if the samples end before it does.
    """
    size = layout.micro_batch_size
    begin = first_of_micro_batch(first_sample, index, layout, dp_rank)
    check_end(samples, begin, size)
    batch = torch.from_numpy(np.stack([samples.sample(begin + i) for i in range(size)]))
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
