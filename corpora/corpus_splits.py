"""The samples of a run's token files: the splits of --data, and the sets of --eval-data.

    corpora = Corpora(config)
    train = corpora.split(0, config.ordered)
    sets, notes = eval_sets(config)

A split (train, validation or test) is a range of the sequences of each corpus, given by --split.
The samples of a split come from one corpus, or from a blend of several, of which each is a part.
The orders of samples and blends are Megatron's (sample_order.py, blends.py); they are cached on the
node (mapped_files.py). A run on synthetic tokens does not load this module.

Megatron's order depends on the number of samples that a run is to read. A run that is resumed with
another number keeps the order that it began with: else it would read some samples twice and others
never. If it is to read more than the epochs of that order hold, further epochs follow, in
Megatron's order of the samples that are missing. `requests` are these numbers of samples
(Config.ordered).
"""

import math
from collections.abc import Sequence

import numpy as np

from config.errors import UserError
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
    Continued,
    GPTSamples,
    TooFewTokens,
    eval_samples,
    split_ranges,
    tokens_per_epoch,
)
from corpora.token_files import IndexedDataset

# A blend requests more samples from each part than the part's share, by this ratio. The order of a
# part depends on the number requested, so the ratio is Megatron's (mid_level_dataset_surplus).
SURPLUS = 0.005

Samples = GPTSamples | Continued | Blend


class Corpora:
    """Opens the token files of a run, and makes the samples of its splits.

    datasets: the corpora of --data. weights: their weights, or None if --data gives none. ranges:
    for each corpus, the sequences of each split. Raise UserError if --data or --split is wrong.
    """

    def __init__(self, config: Config):
        """Open the corpora of --data and divide the sequences of each among the splits.

        weights: the weights of --data, or None if there are none. ranges: for each corpus, the
        ranges of its sequences in the splits train, validation and test.
        """
        self.config = config
        self.cache = ArrayCache(config.data.cache_folder)
        prefixes, self.weights = parse_blend(config.data.data)
        self.datasets = [_open(prefix, config, self.cache) for prefix in prefixes]
        self.ranges = [split_ranges(config.data.split, len(dataset)) for dataset in self.datasets]

    def split(self, number: int, requests: Sequence[int]) -> Samples:
        """Return the samples of a split: from the only corpus, or a blend.

        number: the split's position in SPLITS (0 train, 1 validation, 2 test). requests: for how
        many samples the order is made, and then continued; the result has at least the largest
        number of samples. A UserError names the split.
        """
        ranges = [ranges_of_corpus[number] for ranges_of_corpus in self.ranges]
        try:
            if self.weights is None and len(self.datasets) == 1:
                return self._part(0, ranges, requests)
            if self.weights is None:
                return self._by_size(ranges, max(requests))
            return self._by_weight(ranges, requests)
        except UserError as error:
            raise type(error)(
                f"{SPLITS[number]} samples (--split {self.config.data.split}): {error}"
            ) from None
        except MemoryError:
            name = f"{max(requests):,} {SPLITS[number]} samples"
            raise UserError(f"no memory for the order of {name}") from None

    def test_split(self, num_samples: int) -> tuple[Samples | None, tuple[str, ...]]:
        """Return at least `num_samples` samples of the test split, and notes for the log.

        The samples are None if --split gives the test split no share, or if its share is too small
        for a sample; then there is a note.
        """
        test = SPLITS.index("test")
        if not any(ranges[test] for ranges in self.ranges):
            return None, ()
        try:
            return self.split(test, [num_samples]), ()
        except TooFewTokens as error:
            return None, (f"no test loss: {error}",)

    def epoch_tokens(self) -> dict[str, int]:
        """Return the number of tokens in the train split of each corpus, by prefix.

        The log divides the tokens that the run has read by them, to show epochs.
        """
        parts = zip(self.datasets, self.ranges)
        return {dataset.prefix: dataset.tokens_in(train) for dataset, (train, _, _) in parts}

    def describe(self) -> str:
        """Return a line for the start of a run: how tokens are read, where orders are kept.

        The reading itself is done by the threads of prefetch.py.
        """
        order = f"{self.config.data.order} order in {self.cache.folder or 'memory'}"
        return f"tokens read by pread, {READERS} threads, {AHEAD} micro-batches ahead; {order}"

    def _part(self, i: int, ranges: list[range], requests: Sequence[int]) -> GPTSamples | Continued:
        """Return at least max(requests) samples of corpus number i.

        ranges: for each corpus, its sequences in the split. requests: see `split`.
        """
        if self.config.data.order == "stable":  # a longer order begins with the shorter one
            requests = [max(requests)]
        parts = list[GPTSamples]()
        for request in requests:
            missing = request - sum(map(len, parts))
            if missing > 0:  # each continuation has a seed of its own, so another order
                seed = (self.config.training.seed + len(parts)) % 2**32 if parts else None
                parts.append(self._ordered(i, ranges, missing, seed))
        return Continued(parts) if len(parts) > 1 else parts[0]

    def _ordered(
        self,
        i: int,
        ranges: list[range],
        count: int | None,
        seed: int | None = None,
    ) -> GPTSamples:
        """Return at least `count` samples of corpus number i, in one order of whole epochs.

        ranges: for each corpus, its sequences in the split. count: None for one epoch. seed: the
        seed of the samples' order; None: --seed.
        """
        model = self.config.model
        if seed is None:
            seed = self.config.training.seed
        return GPTSamples(
            self.datasets[i],
            ranges[i],
            count,
            model.seq_length,
            seed,
            model.vocab_size,
            self.config.data.order,
            self.cache,
        )

    def _by_weight(self, ranges: list[range], requests: Sequence[int]) -> Blend:
        """Return a blend by the weights of --data.

        As in Megatron, each part is requested with its share of the samples and a surplus, because
        the order of a part depends on the number of samples requested. If the blend takes more
        samples of a part than this, Megatron fails; here the number taken is requested. requests:
        see `split`; a blend of more samples begins with the blend of fewer.
        """
        shares = normalise(self.weights or ())
        longest = max(requests)
        # Megatron normalises given weights once to find how many samples to request of each part,
        # and a second time for the order of the blend.
        order = find_blend_order(normalise(shares), longest, self.cache)
        requests_of_parts = list[list[int]]([] for _ in shares)
        for request in requests:
            taken = order.taken
            if request < longest:
                taken = np.bincount(order.which[:request], minlength=len(shares)).tolist()
            for share, of_part, needed in zip(shares, requests_of_parts, taken):
                surplus = math.ceil(math.ceil(request * share) * (1 + SURPLUS))
                of_part.append(max(surplus, needed))
        parts = [self._part(i, ranges, of_part) for i, of_part in enumerate(requests_of_parts)]
        return Blend(parts, order, longest)

    def _by_size(self, ranges: list[range], num_samples: int) -> Samples:
        """Return a blend whose weights are the corpora's numbers of samples, as in Megatron.

        `split` calls this if --data names several corpora without weights: an epoch of the blend is
        one epoch of each corpus. Megatron has no further epochs. Here every further epoch has the
        same mixture, and another seed for the order of each part.
        """
        length = self.config.model.seq_length
        seed = self.config.training.seed
        sizes = []  # for each corpus, the number of samples in an epoch
        for dataset, sequences in zip(self.datasets, ranges):
            sizes.append((tokens_per_epoch(dataset, sequences, length) - 1) // length)
        order = find_blend_order(normalise(sizes), min(num_samples, sum(sizes)), self.cache)
        epochs = -(-num_samples // sum(sizes))  # the epochs in which the samples are: rounded up
        parts = []
        for epoch in range(epochs):
            for i in range(len(self.datasets)):
                parts.append(self._ordered(i, ranges, None, (seed + epoch) % 2**32))
        return Blend(parts, order, num_samples)


def eval_sets(config: Config) -> tuple[dict[str, tuple[Samples, int]], tuple[str, ...]]:
    """Return the sets of --eval-data by name, and a note on each set for the log.

    A set is its samples and the number of samples that count in its loss. If this number does not
    fill the last micro-batches of all replicas, further samples fill them, which do not count.
    Raise UserError if a corpus has fewer samples than its set asks for.
    """
    model = config.model
    cache = ArrayCache(config.data.cache_folder)
    sets: dict[str, tuple[Samples, int]] = {}
    notes = []
    for eval_set in parse_eval_sets(config.data.eval_data or ()):
        name, prefix, _ = eval_set
        dataset = _open(prefix, config, cache)
        all_sequences = range(len(dataset))
        count, available = eval_samples(eval_set, dataset.tokens, model.seq_length)
        # `filled` is `count` rounded up, so that each replica gets whole micro-batches.
        samples_of_pass = config.layout.micro_batch_size * config.layout.dp
        filled = -(-count // samples_of_pass) * samples_of_pass
        samples = GPTSamples(
            dataset,
            all_sequences,
            filled,
            model.seq_length,
            config.training.seed,
            model.vocab_size,
            "stable",
            cache,
        )
        sets[name] = samples, count
        notes.append(f"evaluation set {name}: {count} of {available} samples of {prefix}")
    return sets, tuple(notes)


def _open(prefix: str, config: Config, cache: ArrayCache) -> IndexedDataset:
    """Open the corpus `prefix`, with its marks of answers if --answers-only needs them.

    Raise UserError if a file is missing or damaged.
    """
    dataset = IndexedDataset(prefix, cache)
    if config.data.answers_only:
        dataset.open_answers()
    return dataset
