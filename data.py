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
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from config.messages import UserError
from config.schema import Config, Layout
from corpora.objectives import NO_TARGET, Objective, Readable
from corpora.prefetch import Prefetcher
from distributed.collectives import Group

if TYPE_CHECKING:
    from corpora.sample_order import TextSpan


class Samples(Readable, Protocol):
    """The samples of a split, by number: sample k is the same on every rank and in every layout."""

    def count_by_corpus(self, first: int, stop: int) -> dict[str, int]:
        """Return the number of samples in [first, stop) that each corpus gives, by its prefix."""

    def spans(self, k: int) -> "list[TextSpan]":
        """Return the ranges of corpus text from which sample k is made."""


class Synthetic:
    """Samples of random tokens instead of text, for timing and tests; they never end.

    Sample k is a function of (seed, stream, k). Each split has its stream number.
    """

    def __init__(self, vocab_size: int, seq_length: int, seed: int, stream: int = 0):
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.seed = seed
        self.stream = stream

    def __len__(self) -> int:
        return sys.maxsize

    def sample(self, k: int) -> np.ndarray:
        """Return the tokens of sample k: (seq_length + 1,), int64."""
        random = np.random.default_rng((self.seed, self.stream, k))
        return random.integers(self.vocab_size, size=self.seq_length + 1)

    def count_by_corpus(self, first: int, stop: int) -> dict[str, int]:
        """Return an empty table: there is no corpus."""
        return {}

    def spans(self, k: int) -> "list[TextSpan]":
        """Return an empty list: there is no text."""
        return []

    def answers(self, k: int) -> np.ndarray:
        """Return ones, (seq_length + 1,): every token is part of an answer."""
        return np.ones(self.seq_length + 1, np.int64)

    def file_of(self, k: int) -> str:
        """Return a name for error messages, since there is no file."""
        return "synthetic"


@dataclass(frozen=True)
class Splits:
    """The splits of a run; a split that the run does not read is None.

    source: how samples are read and where their order comes from, for the log. notes: lines to
    print in the log. eval_sets: the samples of each set of --eval-data by name, and the number of
    samples that an evaluation reads. epoch_tokens: tokens of the train split, by corpus.
    """

    train: Samples
    validation: Samples | None
    test: Samples | None
    source: str = "synthetic tokens"
    notes: tuple[str, ...] = ()
    eval_sets: Mapping[str, tuple[Samples, int]] = field(default_factory=dict)
    epoch_tokens: Mapping[str, int] = field(default_factory=dict)


def build(config: Config) -> Splits:
    """Build the splits of a run: the train samples of all steps, and the samples of an evaluation.

    Every evaluation reads the same first --eval-samples samples, so that two evaluations differ
    only by the model. The test split is built if --split gives it a share and it holds a sample.
    Raise UserError on bad data or shares.
    """
    random = config.data.data == ("synthetic",)
    splits = _synthetic_splits(config) if random else _corpus_splits(config)
    if not config.data.eval_data:
        return splits
    from corpora.corpus_splits import eval_sets

    sets, notes = eval_sets(config)
    return replace(splits, eval_sets=sets, notes=splits.notes + notes)


def _synthetic_splits(config: Config) -> Splits:
    model = config.model
    seed = config.training.seed
    train, validation, test = (
        Synthetic(model.vocab_size, model.seq_length, seed, stream) for stream in range(3)
    )
    if not config.data.eval_samples:
        return Splits(train, None, None)
    return Splits(train, validation, test)


def _corpus_splits(config: Config) -> Splits:
    """Build the splits of the token files that --data names."""
    from corpora.corpus_splits import Corpora  # here, since random tokens do not need the module

    evaluated = config.data.eval_samples
    corpora = Corpora(config)
    train = corpora.split(0, config.total_samples)
    source = corpora.describe()
    epoch_tokens = corpora.epoch_tokens()
    if not evaluated:
        return Splits(train, None, None, source, epoch_tokens=epoch_tokens)
    validation = corpora.split(1, evaluated)
    test, notes = corpora.test_split(evaluated)
    return Splits(train, validation, test, source, notes, epoch_tokens=epoch_tokens)


# ---- Micro-batches -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """A micro-batch: tensors of (b, s), explained in corpora/objectives.py. starts, stops and
    positions are None unless the options ask for them. count: the number of labels that count in
    the loss; all other labels are negative.
    """

    tokens: Tensor
    labels: Tensor
    count: int
    starts: Tensor | None = None
    stops: Tensor | None = None
    positions: Tensor | None = None

    def first(self, rows: int) -> "Batch":
        """Return this batch with only its first `rows` samples counted in the loss.

        The other labels are overwritten in place. rows may be 0 or less: no sample counts then.
        """
        if rows < len(self.labels):
            self.labels[max(0, rows) :] = NO_TARGET
        return replace(self, count=int((self.labels >= 0).sum()))

    def to(self, device: torch.device, cp: Group) -> "Batch":
        """Start to copy this cp rank's part of the micro-batch to a device; return that part.

        Each rank of `cp` gets a share of each sample's tokens: (b, s/cp). starts and stops keep all
        tokens, because attention needs them.
        """
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if torch.is_tensor(value)
        }
        for name in {"tokens", "labels", "positions"} & set(moved):
            moved[name] = cp.balanced_shard(moved[name], 1)
        if moved["labels"].shape != self.labels.shape:
            labels_here = cp.balanced_shard(self.labels, 1)  # on the host
            moved["count"] = int((labels_here >= 0).sum())
        return replace(self, **moved)


class BatchReader:
    """Reads the micro-batches of one replica ahead (corpora/prefetch.py) and copies them to its
    device. `micro_batch` below defines their tokens.
    """

    def __init__(self, config: Config, dp_rank: int, device: torch.device, cp: Group | None = None):
        """cp: the ranks that share each sample's tokens; default: this rank has all tokens."""
        self.layout = config.layout
        self.dp_rank = dp_rank
        self.device = device
        self.cp = cp or Group()
        # Less than the watchdog's time limit: the error of a late read names the file, the
        # watchdog's report does not.
        seconds = 0.8 * (config.run.hang_timeout or 300.0)
        shape = self.layout.micro_batch_size, config.model.seq_length
        objective = Objective(config.data, config.training.seed)
        self.prefetcher = Prefetcher(shape, device.type == "cuda", seconds, objective)
        self.kept: dict[int, MicroBatches] = {}  # by the number of the first sample

    def batches(
        self,
        samples: Samples,
        first: int,
        config: Config,
        evaluated: int | None = None,
        keep: bool = False,
    ) -> "MicroBatches":
        """Return the micro-batches of the global batch that starts at sample `first`.

        evaluated: the number of samples of an evaluation, which may end within a micro-batch: later
        samples do not count in the loss. None: training, which reads on after this batch. keep:
        whether the next call, if it starts at `first` too, gets the same micro-batches again
        (trainer.warm_up).
        """
        if evaluated is None and first in self.kept:
            return self.kept.pop(first)
        batches = MicroBatches(self, samples, first, config, evaluated)
        if keep:
            batches.keep()
            self.kept[first] = batches
        return batches

    def close(self) -> None:
        """End the reading threads."""
        self.prefetcher.close()


class MicroBatches:
    """The micro-batches of a global batch for one replica: `batches(0)`, `batches(1)`, ...

    Reading starts at the first call: a rank that never calls it reads nothing. Such ranks hold
    middle stages of a pipeline.
    """

    def __init__(
        self,
        reader: BatchReader,
        samples: Samples,
        first: int,
        config: Config,
        evaluated: int | None,
    ):
        """Called by BatchReader.batches, which explains the arguments."""
        self.reader = reader
        self.samples = samples
        self.first = first
        self.config = config
        self.evaluated = evaluated
        self.reading = False
        self._kept: dict[int, Batch] | None = None
        if reader.layout.stages_per_rank > 1:
            self.keep()  # the first and the last stage ask for the same micro-batch

    def keep(self) -> None:
        """Keep every micro-batch after its first use, so that a second call returns it again."""
        self._kept = {}

    def __call__(self, index: int) -> Batch:
        """Return micro-batch `index` on the device.

        Raise UserError if the split ends before the micro-batch does.
        """
        if self._kept is None:
            return self._take(index)
        if index not in self._kept:
            self._kept[index] = self._take(index)
        return self._kept[index]

    def _take(self, index: int) -> Batch:
        """Take micro-batch `index` from the prefetcher and start its copy to the device."""
        reader = self.reader
        samples = self.samples
        begin = self._begin_of(self.first, index)
        check_end(samples, begin, reader.layout.micro_batch_size)
        if not self.reading:
            reader.prefetcher.go_on(samples, begin, self._upcoming())
            self.reading = True
        rows = reader.prefetcher.take(samples, begin)
        batch = Batch(count=rows.targets, **rows.tensors)
        if self.evaluated is not None:
            batch = batch.first(self.evaluated - begin)
        # The pinned rows may be dropped here: torch reuses pinned memory only after the copy.
        return batch.to(reader.device, reader.cp)

    def _begin_of(self, first: int, index: int) -> int:
        """Return the first sample of micro-batch `index` in the global batch that begins at
        `first`, for this replica.
        """
        return first_of_micro_batch(first, index, self.reader.layout, self.reader.dp_rank)

    def _upcoming(self) -> Iterator[int]:
        """Yield the first sample of each micro-batch of this replica, in the order of use.

        An evaluation has only its own micro-batches. In training, the micro-batches of this global
        batch are followed by those of all later global batches, without the skipped batches. The
        prefetcher reads the micro-batches in this order.
        """
        if self.evaluated is not None:
            layout = self.reader.layout
            count = -(-self.evaluated // (layout.micro_batch_size * layout.dp))
            yield from (self._begin_of(self.first, index) for index in range(count))
            return
        first = self.first
        config = self.config
        while True:
            batch = config.batches.batch(first)
            if not config.passes_over(first, batch):
                for index in range(config.micro_batches(batch)):
                    yield self._begin_of(first, index)
            first += batch


def first_of_micro_batch(first_sample: int, index: int, layout: Layout, dp_rank: int) -> int:
    """Return the number of the first sample of micro-batch `index` of replica `dp_rank`, in the
    global batch that begins at `first_sample`.

    For any dp and micro_batch_size, the micro-batches of all replicas, ordered by (index, dp_rank),
    hold the samples first_sample, first_sample + 1, ... of the global batch.
    """
    return first_sample + (index * layout.dp + dp_rank) * layout.micro_batch_size


def check_end(samples: Samples, begin: int, count: int) -> None:
    """Raise UserError if there are fewer than begin + count samples."""
    if begin + count > len(samples):
        needed = f"samples {begin} to {begin + count} are needed"
        raise UserError(f"{needed}, but there are only {len(samples)}")


def micro_batch(
    samples: Samples, first_sample: int, index: int, layout: Layout, dp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a micro-batch at once, without threads; return tokens and labels, each int64 of shape
    (micro_batch_size, seq_length). Labels are the tokens moved by one position.

    It starts at sample `first_of_micro_batch`. Raise UserError if the samples end before it does.
    """
    size = layout.micro_batch_size
    begin = first_of_micro_batch(first_sample, index, layout, dp_rank)
    check_end(samples, begin, size)
    batch = torch.from_numpy(np.stack([samples.sample(begin + i) for i in range(size)]))
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
