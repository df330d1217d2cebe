"""Makes the train, validation and test splits of a run, and cuts global batches to micro-batches.

PREFIX.bin, PREFIX.idx   tokens on disk                            corpora/token_files.py
    |
    |  a split is a range of sequences: [train | validation | test]
    v                                                              corpora/corpus_splits.py
samples                  in Megatron's order, or blended           corpora/sample_order.py
    |                                                              corpora/mapped_files.py: cache
    v                    read ahead by threads                     corpora/prefetch.py
step s, micro-batch m, replica r reads b samples of this order, from s*B + (m*dp + r)*b on;
B: global batch size, b: micro-batch size, both in samples

A sample is seq_length + 1 tokens: seq_length tokens and their labels, which are the next tokens. A
target is a label that counts in the loss. A replica is the ranks that hold one copy of the model.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from base.errors import CorpusError
from config.schema import Config, Layout
from config.timeline import Timeline
from corpora import phase_table
from corpora.corpus_splits import Corpora, eval_sets
from corpora.objectives import NO_TARGET, Objective, Readable
from corpora.prefetch import Prefetcher
from corpora.sample_order import SPLITS, TextSpan
from corpora.streams import PhasedSamples
from distributed.collectives import Group


class Samples(Readable, Protocol):
    """The samples of a split by their numbers, which are the same on every rank and in any layout.

    A class that reads samples has these methods and those of Readable; this class only lists them.
    """

    def count_by_corpus(self, first: int, stop: int) -> dict[str, int]:
        """Return how many of the samples in [first, stop) come from each corpus, by its prefix.

        A checkpoint keeps these numbers of the samples that were trained on.
        """

    def spans(self, k: int) -> "list[TextSpan]":
        """Return the ranges of corpus text from which sample k is made, for a report on a spike."""


class Synthetic:
    """Samples of random tokens instead of text, for timing and tests; they never end.

    Sample k is a function of (seed, stream, k). Each split has its stream number.
    """

    def __init__(self, vocab_size: int, seq_length: int, seed: int, stream: int = 0):
        """Keep the numbers from which `sample` draws; seq_length: the number of labels of a sample.

        stream: a number that is different for each split, so that a run's splits have different
        tokens: 0 train, 1 validation, 2 test.
        """
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.seed = seed
        self.stream = stream

    def __len__(self) -> int:
        """Return the largest length that Python allows, because any sample can be made."""
        return sys.maxsize

    def sample(self, k: int) -> np.ndarray:
        """Return the tokens of sample k, drawn from its own generator: (seq_length + 1,), int64."""
        random = np.random.default_rng((self.seed, self.stream, k))
        return random.integers(self.vocab_size, size=self.seq_length + 1)

    def count_by_corpus(self, first: int, stop: int) -> dict[str, int]:
        """Return an empty table: there is no corpus, and so nothing to count for a checkpoint."""
        return {}

    def spans(self, k: int) -> "list[TextSpan]":
        """Return an empty list: there is no text that a report on a sample could name."""
        return []

    def answers(self, k: int) -> np.ndarray:
        """Return ones, (seq_length + 1,), so that --answers-only masks no label."""
        return np.ones(self.seq_length + 1, np.int64)

    def file_of(self, k: int) -> str:
        """Return the name that error messages show in place of the path of a token file."""
        return "synthetic"


@dataclass(frozen=True)
class Splits:
    """The samples of a run's splits; a split that the run does not read is None.

    source: text for the log about how samples are read. notes: lines to print in the log.
    eval_sets: for each set of --eval-data, by its name: the samples, and the number of samples that
    an evaluation reads. epoch_tokens: the number of tokens in the train split of each corpus.
    """

    train: Samples
    validation: Samples | None
    test: Samples | None
    source: str = "synthetic tokens"
    notes: tuple[str, ...] = ()
    eval_sets: Mapping[str, tuple[Samples, int]] = field(default_factory=dict)
    epoch_tokens: Mapping[str, int] = field(default_factory=dict)

    def evaluations(self, eval_samples: int) -> dict[str, tuple[Samples, int]]:
        """Return the samples of each evaluation during a run, and their number, by name.

        eval_samples: the number for the validation split. The test split is not evaluated here, but
        once at the end of a run.
        """
        if self.validation is None:
            return dict(self.eval_sets)
        return {"validation": (self.validation, eval_samples), **self.eval_sets}


def build(config: Config) -> Splits:
    """Return the splits of a run: the train samples of all steps, and the evaluations' samples.

    Every evaluation reads the same first --eval-samples samples, so that two evaluations differ
    only by the model. The test split is built if --split gives it a share and it holds a sample.
    Raise UserError on bad data or shares.
    """
    if config.data.data == ("synthetic",):
        splits = _synthetic_splits(config)
    else:
        splits = _corpus_splits(config)
    if not config.data.eval_data:
        return splits
    sets, notes = eval_sets(config)
    return replace(splits, eval_sets=sets, notes=splits.notes + notes)


def _phased(config: Config, corpora: Corpora | None) -> PhasedSamples:
    """Return the train samples of a run with phases; corpora: None if all tokens are random."""
    timeline = Timeline(config)
    phases = timeline.phases
    found = corpora.phase_samples() if corpora else (None,) * len(phases)
    parts = []
    for phase, part in zip(phases, found):
        random = Synthetic(config.model.vocab_size, phase.length, config.training.seed)
        parts.append(part or random)
    begins = [phase.samples for phase in phases]
    lengths = [phase.length for phase in phases]
    return PhasedSamples(begins, lengths, parts, timeline.total_samples)


def _synthetic_splits(config: Config) -> Splits:
    """Return splits of random tokens, for --data synthetic: one stream of them for each split.

    Without --eval-samples the run makes no evaluation, and so needs no other split than train.
    """
    model = config.model
    seed = config.training.seed
    train, validation, test = (
        Synthetic(model.vocab_size, model.seq_length, seed, stream) for stream in range(3)
    )
    samples: Samples = _phased(config, None) if config.plan else train
    if not config.data.eval_samples:
        return Splits(samples, None, None)
    return Splits(samples, validation, test)


def _corpus_splits(config: Config) -> Splits:
    """Return the splits of the token files that --data names.

    Without --eval-samples the run makes no evaluation, and so only the train split is built.
    """
    eval_samples = config.data.eval_samples
    corpora = Corpora(config)
    train: Samples
    repeats: tuple[str, ...] = ()
    if config.plan:
        train = _phased(config, corpora)
        repeats = tuple(phase_table.repeated(phase_table.readings(config, corpora), config.plan))
    else:
        train = corpora.split(SPLITS.index("train"), Timeline(config).ordered)
    source = corpora.describe()
    epoch_tokens = corpora.epoch_tokens()
    if not eval_samples:
        return Splits(train, None, None, source, repeats, epoch_tokens=epoch_tokens)
    validation = corpora.split(SPLITS.index("validation"), [eval_samples])
    test, notes = corpora.test_split(eval_samples)
    return Splits(train, validation, test, source, notes + repeats, epoch_tokens=epoch_tokens)


# ---- Micro-batches -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one replica; all tensors are int64 of shape (b, s).

    labels: the token after each of `tokens`, or a negative number if it does not count in the loss.
    count: the number of labels that count in the loss. starts, stops: token q sees the tokens
    starts[q] to stops[q] - 1; positions: each token's position in its document. These three are
    None unless an option needs them (corpora/objectives.py). rows: for each label the number of the
    continuation that it belongs to, if a pass scores continuations (inference/scoring.py). length:
    the most tokens of a text in the micro-batch; None: those of a sample. cp: the ranks that share
    each sample's tokens. whole_labels, whole_tokens: those of all of them, if there are several.
    """

    tokens: Tensor
    labels: Tensor
    count: int
    starts: Tensor | None = None
    stops: Tensor | None = None
    positions: Tensor | None = None
    rows: Tensor | None = None
    length: int | None = None
    cp: Group = field(default_factory=Group, compare=False)
    whole_labels: Tensor | None = None
    whole_tokens: Tensor | None = None

    def tokens_after(self, tokens: int) -> Tensor:
        """Return the token that comes so many tokens later in its sample, (b, s); 0 at the end.

        This rank gets its part of them (--cp). Where the label after them counts, none is 0 for
        this reason: `labels_after(tokens)` has no target there.
        """
        whole = self.tokens if self.whole_tokens is None else self.whole_tokens
        later = torch.cat([whole[:, tokens:], torch.zeros_like(whole[:, :tokens])], 1)
        return later if self.whole_tokens is None else self.cp.balanced_shard(later, 1)

    def targets_after(self, most: int) -> list[int]:
        """Return how many labels count, of heads that predict 0 to `most` tokens beyond the next.

        The labels are on the host, or the caller waits for the device.
        """
        return [self.count, *(int((self.labels_after(n) >= 0).sum()) for n in range(1, most + 1))]

    def labels_after(self, tokens: int) -> Tensor:
        """Return the labels of a head that predicts so many tokens beyond the next: (b, s).

        With 1 it predicts the next token but one. A label counts if it and all labels before it, up
        to that of the next token, count: so none is in another sample, or in another document if
        the loss does not go over their borders. This rank gets its part of them (--cp).
        """
        labels = self.labels if self.whole_labels is None else self.whole_labels
        later = labels
        for _ in range(tokens):
            later = torch.cat([later[:, 1:], torch.full_like(later[:, :1], NO_TARGET)], 1)
            later = later.masked_fill(labels < 0, NO_TARGET)
        return later if self.whole_labels is None else self.cp.balanced_shard(later, 1)

    def first(self, rows: int) -> "Batch":
        """Return this micro-batch, with only its first `rows` samples counted in the loss.

        Called in an evaluation, whose last micro-batches may have more samples than are evaluated.
        The labels of the other samples are overwritten in place. If rows <= 0, no sample counts.
        """
        if rows < len(self.labels):
            self.labels[max(0, rows) :] = NO_TARGET
        return replace(self, count=int((self.labels >= 0).sum()))

    def to(self, device: torch.device, cp: Group) -> "Batch":
        """Start to copy this rank's part of the micro-batch to a device; return that part.

        Each rank of the group `cp` gets a share of each sample's tokens: (b, s/cp). starts and
        stops keep all tokens on every rank, because attention needs them.
        """
        fields: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if torch.is_tensor(value)
        }
        if cp.size > 1:
            fields["whole_labels"] = fields["labels"]
            fields["whole_tokens"] = fields["tokens"]
        # None is not in `fields`.
        for name in {"tokens", "labels", "positions", "rows"} & set(fields):
            fields[name] = cp.balanced_shard(fields[name], 1)
        if fields["labels"].shape != self.labels.shape:  # cp > 1: this rank has fewer targets
            # Counted on the host, because reading a count from the device would wait for it.
            labels_on_host = cp.balanced_shard(self.labels, 1)
            fields["count"] = int((labels_on_host >= 0).sum())
        return replace(self, **fields, cp=cp)


class BatchReader:
    """Reads the micro-batches of one replica ahead, in threads, and copies them to its device.

    corpora/prefetch.py has the threads. The function `micro_batch` defines the tokens of each
    micro-batch.
    """

    def __init__(self, config: Config, dp_rank: int, device: torch.device, cp: Group | None = None):
        """Make the prefetcher, which reads nothing yet. dp_rank: the number of this replica.

        cp: the ranks that share each sample's tokens; default: this rank has all tokens.
        """
        self.layout = config.layout
        self.dp_rank = dp_rank
        self.device = device
        self.cp = cp or Group()
        # If a file system hangs, the read must fail before the watchdog ends the run: the error of
        # the read names the file, and the watchdog's report does not. Both times are in seconds.
        read_timeout = 0.8 * (config.run.hang_timeout or 300.0)
        shape = (self.layout.micro_batch_size, config.model.seq_length)
        objective = Objective(config.data, config.training.seed)
        self.prefetcher = Prefetcher(shape, device.type == "cuda", read_timeout, objective)
        # Global batches that are kept for the next call of `batches`, by their first sample.
        self.kept: dict[int, MicroBatches] = {}

    def batches(
        self,
        samples: Samples,
        first: int,
        timeline: Timeline,
        evaluated: int | None = None,
        keep: bool = False,
    ) -> "MicroBatches":
        """Return the micro-batches of the global batch that starts at sample `first`.

        evaluated: the number of samples of an evaluation; samples after them in the last
        micro-batch do not count in the loss. None: training, where the prefetcher reads on after
        this batch. keep: keep the micro-batches, so that the next call with the same `first` does
        not read them again; trainer.warm_up does this.
        """
        if evaluated is None and first in self.kept:  # the second call, for the step itself
            return self.kept.pop(first)
        batches = MicroBatches(self, samples, first, timeline, evaluated)
        if keep:
            batches.keep()
            self.kept[first] = batches
        return batches

    def close(self) -> None:
        """End the threads that read ahead; called when the run ends."""
        self.prefetcher.close()


class MicroBatches:
    """The micro-batches of a global batch for one replica: `batches(0)`, `batches(1)`, ...

    Reading starts at the first call. So a rank that holds only middle stages of a pipeline, and
    never needs a micro-batch, reads nothing.
    """

    def __init__(
        self,
        reader: BatchReader,
        samples: Samples,
        first: int,
        timeline: Timeline,
        evaluated: int | None,
    ):
        """Begin the micro-batches of a global batch, and read nothing yet.

        Called by BatchReader.batches. reader: has the prefetcher. first: the number of the global
        batch's first sample. evaluated: the number of samples of an evaluation; None: training.
        """
        self.reader = reader
        self.samples = samples
        self.first = first
        self.timeline = timeline
        self.evaluated = evaluated
        self.reading = False  # whether the prefetcher reads the micro-batches of this global batch
        self._kept: dict[int, Batch] | None = None  # micro-batches by index; None: none is kept
        # A rank with several stages may hold the first and the last. Both read each micro-batch, so
        # it is kept for the second.
        if reader.layout.stages_per_rank > 1:
            self.keep()

    def keep(self) -> None:
        """Keep every micro-batch from its first use on, so that later calls do not read it again.

        Called before the first micro-batch is read; a second call does nothing.
        """
        if self._kept is None:
            self._kept = {}

    def __call__(self, index: int) -> Batch:
        """Return micro-batch number `index` of this replica, on the device.

        Raise UserError if the split ends before the micro-batch does.
        """
        if self._kept is None:
            return self._take(index)
        if index not in self._kept:
            self._kept[index] = self._take(index)
        return self._kept[index]

    def _take(self, index: int) -> Batch:
        """Return micro-batch `index` from the prefetcher; its copy to the device has begun.

        Raise UserError if the split ends before the micro-batch does.
        """
        reader = self.reader
        samples = self.samples
        first_sample = self._first_sample(self.first, index)
        check_end(samples, first_sample, reader.layout.micro_batch_size)
        if not self.reading:  # the first call: the threads begin here, and go on by themselves
            reader.prefetcher.go_on(samples, first_sample, self._upcoming())
            self.reading = True
        rows = reader.prefetcher.take(samples, first_sample)
        tensors: dict[str, Any] = rows.tensors
        batch = Batch(count=rows.targets, **tensors)
        if self.evaluated is not None:  # the last micro-batch may go beyond the evaluated samples
            batch = batch.first(self.evaluated - first_sample)  # the labels after them do not count
        # The tensors of `rows`, in pinned host memory, are freed when this method returns, while
        # the copy may still run. That is safe: torch reuses the memory only after the copy.
        return batch.to(reader.device, reader.cp)

    def _first_sample(self, batch_start: int, index: int) -> int:
        """Return the number of the first sample of micro-batch `index` of this replica, in the
        global batch that begins at sample `batch_start`.
        """
        return first_of_micro_batch(batch_start, index, self.reader.layout, self.reader.dp_rank)

    def _upcoming(self) -> Iterator[int]:
        """Yield the first sample of each micro-batch of this replica, in the order of use.

        The prefetcher reads the micro-batches in this order. In an evaluation the order ends with
        the last evaluated sample. In training it goes on with all later global batches, without the
        batches that --skip-samples skips. It never ends: the prefetcher takes what it needs.
        """
        layout = self.reader.layout
        timeline = self.timeline
        if self.evaluated is not None:  # micro-batches of all replicas that hold evaluated samples
            # Rounded up: the last micro-batch may have fewer evaluated samples.
            micro_batches = -(-self.evaluated // (layout.micro_batch_size * layout.dp))
            for index in range(micro_batches):
                yield self._first_sample(self.first, index)
            return
        batch_start = self.first
        while True:
            batch_size = timeline.batch_at(batch_start)
            if not timeline.passes_over(batch_start, batch_size):
                for index in range(layout.micro_batches(batch_size)):
                    yield self._first_sample(batch_start, index)
            batch_start += batch_size


def first_of_micro_batch(first_sample: int, index: int, layout: Layout, dp_rank: int) -> int:
    """Return the number of the first sample of micro-batch `index` of replica `dp_rank`, in the
    global batch that begins at `first_sample`.

    For any dp and micro_batch_size, the micro-batches of all replicas, ordered by (index, dp_rank),
    hold the samples first_sample, first_sample + 1, ... of the global batch. With dp 2 and 2
    samples in a micro-batch, replica 0 reads samples 0 1 and 4 5, and replica 1 reads 2 3 and 6 7.
    """
    return first_sample + (index * layout.dp + dp_rank) * layout.micro_batch_size


def check_end(samples: Samples, begin: int, count: int) -> None:
    """Raise UserError if `samples` end before the `count` samples from number `begin` on."""
    if begin + count > len(samples):
        needed = f"samples {begin} to {begin + count} are needed"
        raise CorpusError(f"{needed}, but there are only {len(samples)}")


def micro_batch(
    samples: Samples, first_sample: int, index: int, layout: Layout, dp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a micro-batch without threads; return its tokens and its labels, the next tokens.

    Both are int64 of shape (micro_batch_size, seq_length). first_sample: the global batch's. index:
    the number of the micro-batch on the replica dp_rank. Called by tests and benchmarks:
    BatchReader must return the same. Raise UserError if the samples end before the micro-batch.
    """
    size = layout.micro_batch_size
    begin = first_of_micro_batch(first_sample, index, layout, dp_rank)
    check_end(samples, begin, size)
    rows = torch.from_numpy(np.stack([samples.sample(begin + i) for i in range(size)]))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
