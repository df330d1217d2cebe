"""The samples of a run's token files: the splits of --data, and the sets of --eval-data.

    corpora = Corpora(config)
    train = corpora.split(0, timeline.ordered)
    sets, notes = eval_sets(config)

A split (train, validation or test) is a range of the sequences of each corpus, given by --split.
The samples of a split come from one corpus, or from a blend of several, of which each is a part.
The orders of samples and blends are Megatron's (sample_order.py, blends.py); they are cached on the
node (mapped_files.py). A run on synthetic tokens does not load this module.

Megatron's order depends on the number of samples that a run is to read. A run that is resumed with
another number keeps the order that it began with: else it would read some samples twice and others
never. If it is to read more than the epochs of that order hold, further epochs follow, in
Megatron's order of the samples that are missing. `requests` are these numbers of samples
(Timeline.ordered).
"""

import math
import os
from collections import Counter
from collections.abc import Sequence

import numpy as np

from base.errors import CorpusError, UserError
from config.run_options import parse_eval_sets
from config.schema import Config
from config.timeline import Timeline
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
from corpora.streams import CorpusStream, OfStreams, PhaseSamples, orders_of
from corpora.token_files import IndexedDataset

# A blend requests more samples from each part than the part's share, by this ratio. The order of a
# part depends on the number requested, so the ratio is Megatron's (mid_level_dataset_surplus).
SURPLUS = 0.005
# What the error about a split without a sample looks through: those of a small corpus.
MANY = 10**6  # sequences, of which any share in use is at least one
OTHER_SPLITS = ("95,5,0", "90,10,0", "80,20,0", "50,50,0", "80,10,10", "34,33,33", "100,0,0")

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
        self._open_datasets = dict[str, IndexedDataset]()
        self.cache = ArrayCache(config.data.cache_folder)
        prefixes, self.weights = parse_blend(config.data.data)
        self.datasets = [self._dataset(prefix) for prefix in prefixes]
        self.ranges = [split_ranges(config.data.split, len(dataset)) for dataset in self.datasets]

    def _dataset(self, prefix: str) -> IndexedDataset:
        """Return the corpus `prefix`, which is opened once."""
        if prefix not in self._open_datasets:
            self._open_datasets[prefix] = _open(prefix, self.config, self.cache)
        return self._open_datasets[prefix]

    def phase_samples(self) -> tuple[PhaseSamples | None, ...]:
        """Return the train samples of each phase of the run; None: random tokens.

        Raise UserError if a corpus of a phase is missing, or too small for one of its samples.
        """
        config = self.config
        timeline = Timeline(config)
        phases = timeline.phases
        sizes = {prefix: size for phase in reversed(phases) for prefix, size in phase.blocks}
        ends = [phase.samples for phase in phases[1:]] + [timeline.total_samples]
        streams: dict[str, CorpusStream] = {}
        positions = Counter[str]()
        earlier: dict[str, list[GPTSamples]] = {}
        taken: dict[str, int] = {}  # samples of each corpus in these orders
        places: dict[str, str] = {}  # the prefix of each corpus, by where its tokens are
        found: list[PhaseSamples | None] = []
        # What the phase before reads, and where that began: a phase that reads the same goes on in
        # its blend, so that a branch reads what the stable run would have read.
        reads_before: tuple[list[str], list[float], int] | None = None
        begins: list[int] = []
        first = 0
        for phase, stop in zip(phases, ends):
            count = max(0, stop - phase.samples)
            if phase.data == ("synthetic",):
                reads_before = None
                found.append(None)
                continue
            if config.past.ordered and phase is phases[0]:  # a past without phases
                samples = self.split(SPLITS.index("train"), timeline.ordered)
                earlier = orders_of(samples)
                positions.update(samples.count_by_corpus(0, stop))
                taken = dict(positions)
                for prefix in taken:
                    positions[prefix] *= phase.length
                    places[os.path.realpath(f"{prefix}.bin")] = prefix
                found.append(samples)
                continue
            prefixes, weights = parse_blend(phase.data)
            for prefix in prefixes:
                place = os.path.realpath(f"{prefix}.bin")
                if places.setdefault(place, prefix) != prefix:
                    both = f"{places[place]} and {prefix} of --phases are the same corpus"
                    raise CorpusError(f"{both}, {place}: write it in one way, to read it as one")
                if prefix not in streams:
                    before = earlier.get(prefix, [])
                    read = taken[prefix] if before else 0
                    streams[prefix] = self._stream(prefix, sizes[prefix], before, read)
                if streams[prefix].tokens <= phase.length:
                    has = f"the train split of {prefix} has {streams[prefix].tokens} tokens"
                    raise TooFewTokens(
                        f"phase {phase.name}: {has}, one sample takes "
                        f"seq-length({phase.length}) + 1"
                    )
            here = [streams[prefix] for prefix in prefixes]
            shares = normalise(weights or [stream.tokens for stream in here])
            reads = prefixes, shares, phase.length
            if reads != reads_before:
                reads_before = reads
                begins, first = [positions[prefix] for prefix in prefixes], phase.samples
            order = None
            if len(prefixes) > 1:
                size = phase.samples + count - first
                order = find_blend_order(normalise(shares), max(1, size), self.cache)
            part = OfStreams(here, begins, first, phase.length, order)
            read_here = part.count_by_corpus(phase.samples, phase.samples + count)
            for prefix, samples_read in read_here.items():
                positions[prefix] += samples_read * phase.length
            found.append(part)
        return tuple(found)

    def _stream(
        self, prefix: str, size: int, earlier: list[GPTSamples], taken: int
    ) -> CorpusStream:
        """Return the stream of a corpus. size: the tokens of a block; the rest: CorpusStream."""
        dataset = self._dataset(prefix)
        sequences = split_ranges(self.config.data.split, len(dataset))[SPLITS.index("train")]
        seed = self.config.training.seed
        if not 0 <= seed < 2**32:
            raise UserError(f"seed({seed}) of the sample order must be in 0..{2**32 - 1}")
        vocab = self.config.model.vocab_size
        return CorpusStream(dataset, sequences, size, seed, vocab, self.cache, earlier, taken)

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
            advice = f"; {self._advice(number)}" if isinstance(error, TooFewTokens) else ""
            raise type(error)(
                f"{SPLITS[number]} samples (--split {self.config.data.split}): {error}{advice}"
            ) from None
        except MemoryError:
            name = f"{max(requests):,} {SPLITS[number]} samples"
            raise CorpusError(f"no memory for the order of {name}") from None

    def _advice(self, number: int) -> str:
        """Return the first of OTHER_SPLITS that gives the run's splits a sample of each corpus.

        These are split `number`, and train and validation as --split gives them a share.
        """
        shares = split_ranges(self.config.data.split, MANY)
        needed = {number, *(which for which in (0, 1) if shares[which])}
        length = self.config.model.seq_length
        for split in OTHER_SPLITS:
            ranges = [split_ranges(split, len(dataset)) for dataset in self.datasets]
            if all(
                dataset.tokens_in(of_corpus[which]) > length
                for dataset, of_corpus in zip(self.datasets, ranges)
                for which in needed
            ):
                return f"--split {split} would do"
        sizes = [f"the {len(each)} documents of {each.prefix}" for each in self.datasets]
        return f"no split of {', '.join(sizes)} would do: add texts, or make --seq-length smaller"

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
        found = {}
        for prefix, dataset in self._open_datasets.items():
            train, _, _ = split_ranges(self.config.data.split, len(dataset))
            found[prefix] = dataset.tokens_in(train)
        return found

    def describe(self) -> str:
        """Return a line for the start of a run: how tokens are read, where orders are kept.

        The reading itself is done by the threads of prefetch.py.
        """
        kind = "order of epochs" if self.config.plan else f"{self.config.data.order} order"
        order = f"{kind} in {self.cache.folder or 'memory'}"
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
