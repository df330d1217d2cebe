"""The samples of a run's token files: the splits of --data, and the sets of --eval-data.

    corpora = Corpora(config)
    train = corpora.split(0, config.total_samples)
    sets, notes = eval_sets(config)

The orders of samples and blends are Megatron's (sample_order.py, blends.py); they are cached on
the node (mapped_files.py). A run on synthetic tokens does not load this module.
"""

import math

from config.messages import UserError
from config.run_options import parse_eval_sets
from config.schema import Config
from corpora.blends import (
    Blend,
    find_blend_order,
    normalise,
    parse_blend,
)
from corpora.mapped_files import ArrayCache
from corpora.prefetch import AHEAD, READERS
from corpora.sample_order import (
    SPLITS,
    GPTSamples,
    TooFewTokens,
    eval_samples,
    split_ranges,
    tokens_per_epoch,
)
from corpora.token_files import IndexedDataset

# Megatron's mid_level_dataset_surplus: the share that a blend requests of each part in addition.
SURPLUS = 0.005

Samples = GPTSamples | Blend


class Corpora:
    """Opens the token files of a run, and makes the samples of its splits.

    ranges: by corpus, the sequences of each split. Raise UserError on bad data or shares.
    """

    def __init__(self, config: Config):
        self.config = config
        self.cache = ArrayCache(config.data.cache_folder)
        prefixes, self.weights = parse_blend(config.data.data)
        self.datasets = [_open(prefix, config, self.cache) for prefix in prefixes]
        self.ranges = [split_ranges(config.data.split, len(dataset)) for dataset in self.datasets]

    def split(self, number: int, num_samples: int) -> Samples:
        """Return at least `num_samples` samples of a split: from the only corpus, or a blend.

        number: the split's position in SPLITS.
        """
        ranges = [own[number] for own in self.ranges]
        try:
            if self.weights is None and len(self.datasets) == 1:
                return self._part(0, ranges, num_samples)
            if self.weights is None:
                return self._by_size(ranges, num_samples)
            return self._by_weight(ranges, num_samples)
        except UserError as error:
            raise type(error)(
                f"{SPLITS[number]} samples (--split {self.config.data.split}): {error}"
            ) from None
        except MemoryError:
            name = f"{num_samples:,} {SPLITS[number]} samples"
            raise UserError(f"no memory for the order of {name}") from None

    def test_split(self, num_samples: int) -> tuple[Samples | None, tuple[str, ...]]:
        """Return at least `num_samples` samples of the test split, and notes for the log.

        Without samples if --split gives it no share, or, with a note, if its share holds none.
        """
        if not any(ranges[SPLITS.index("test")] for ranges in self.ranges):
            return None, ()
        try:
            return self.split(2, num_samples), ()
        except TooFewTokens as error:
            return None, (f"no test loss: {error}",)

    def epoch_tokens(self) -> dict[str, int]:
        """Return the tokens in the train split of each corpus, by its prefix."""
        parts = zip(self.datasets, self.ranges)
        return {dataset.prefix: dataset.tokens_in(ranges[0]) for dataset, ranges in parts}

    def describe(self) -> str:
        """Return a line for the start of a run: how tokens are read, where orders are kept."""
        order = f"{self.config.data.order} order in {self.cache.folder or 'memory'}"
        return f"tokens read by pread, {READERS} threads, {AHEAD} micro-batches ahead; {order}"

    def _part(
        self,
        i: int,
        ranges: list[range],
        count: int | None,
        seed: int | None = None,
    ) -> GPTSamples:
        """Return samples of corpus i, at least `count` (None: one epoch). seed: default --seed."""
        model = self.config.model
        return GPTSamples(
            self.datasets[i],
            ranges[i],
            count,
            model.seq_length,
            self.config.training.seed if seed is None else seed,
            model.vocab_size,
            self.config.data.order,
            self.cache,
        )

    def _by_weight(self, ranges: list[range], num_samples: int) -> Blend:
        """Return a blend whose parts are requested in Megatron's way: their share and a surplus.

        The order of a part depends on the number of samples requested. If the blend takes more
        samples than that, Megatron fails; here the taken number is requested.
        """
        shares = normalise(self.weights or ())
        # Megatron normalises given weights once for the requests and once more for the order.
        order = find_blend_order(normalise(shares), num_samples, self.cache)
        surplus = [math.ceil(math.ceil(num_samples * share) * (1 + SURPLUS)) for share in shares]
        requests = [max(pair) for pair in zip(surplus, order.taken)]
        parts = [self._part(i, ranges, n) for i, n in enumerate(requests)]
        return Blend(parts, order, num_samples)

    def _by_size(self, ranges: list[range], num_samples: int) -> Samples:
        """Return parts mixed by their numbers of samples, in Megatron's way: one epoch of each.

        Megatron has no further epochs; here each repeats the mixture, the parts ordered by another
        seed.
        """
        length = self.config.model.seq_length
        seed = self.config.training.seed
        epoch = [
            (tokens_per_epoch(dataset, own, length) - 1) // length
            for dataset, own in zip(self.datasets, ranges)
        ]
        order = find_blend_order(normalise(epoch), min(num_samples, sum(epoch)), self.cache)
        parts = []
        for e in range(-(-num_samples // sum(epoch))):
            for i in range(len(self.datasets)):
                parts.append(self._part(i, ranges, None, (seed + e) % 2**32))
        return Blend(parts, order, num_samples)


def eval_sets(config: Config) -> tuple[dict[str, tuple[Samples, int]], tuple[str, ...]]:
    """Return (samples, number that counts) of each set of --eval-data, by name, and a note on each.

    Raise UserError if a corpus has fewer samples than its set asks for. The last micro-batches
    are filled with samples of a second epoch, which do not count.
    """
    model = config.model
    cache = ArrayCache(config.data.cache_folder)
    found: dict[str, tuple[Samples, int]] = {}
    notes = []
    for asked in parse_eval_sets(config.data.eval_data or ()):
        name, prefix, _ = asked
        dataset = _open(prefix, config, cache)
        every = range(len(dataset))
        count, there = eval_samples(asked, dataset.tokens, model.seq_length)
        share = config.layout.micro_batch_size * config.layout.dp
        whole_passes = -(-count // share) * share
        samples = GPTSamples(
            dataset,
            every,
            whole_passes,
            model.seq_length,
            config.training.seed,
            model.vocab_size,
            "stable",
            cache,
        )
        found[name] = samples, count
        notes.append(f"evaluation set {name}: {count} of {there} samples of {prefix}")
    return found, tuple(notes)


def _open(prefix: str, config: Config, cache: ArrayCache) -> IndexedDataset:
    """Open a corpus of a run, with its answers if they are needed.

    Raise UserError if a file is missing or damaged.
    """
    dataset = IndexedDataset(prefix, cache)
    if config.data.answers_only:
        dataset.open_answers()
    return dataset
