"""Where samples come from: the splits of a run, and micro-batches of a global batch.

PREFIX.bin, PREFIX.idx   tokens on disk                            corpora/token_files.py
    |
    |  a split is a range of sequences: [train | validation | test]
    v                                                              corpora/corpus_splits.py
samples                  in Megatron's order, or blended           corpora/sample_order.py
    |                                                              corpora/mapped_files.py: cache
    v                    read ahead by threads                     corpora/prefetch.py
step s, micro-batch m, replica r reads samples  s*B + (m*dp + r)*b ...  of that order
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
    """What a batch is made of: sample k is the same on every rank and in every layout."""

    def count_by_corpus(self, first: int, stop: int) -> dict[str, int]:
        """How many of the samples from `first` up to `stop` each corpus gives, by its prefix."""

    def spans(self, k: int) -> "list[TextSpan]":
        """Where in the corpora the text of sample k stands."""


class Synthetic:
    """Random tokens instead of text, for timing and tests; their number is not limited.

    Sample k follows from (seed, stream, k); streams keep train and validation apart.
    """

    def __init__(self, vocab_size: int, seq_length: int, seed: int, stream: int = 0):
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.seed = seed
        self.stream = stream

    def __len__(self) -> int:
        return sys.maxsize

    def sample(self, k: int) -> np.ndarray:
        """Tokens of sample k: (seq_length + 1,), int64."""
        random = np.random.default_rng((self.seed, self.stream, k))
        return random.integers(self.vocab_size, size=self.seq_length + 1)

    def count_by_corpus(self, first: int, stop: int) -> dict[str, int]:
        """None: there is no corpus."""
        return {}

    def spans(self, k: int) -> "list[TextSpan]":
        """None: there is no text."""
        return []

    def answers(self, k: int) -> np.ndarray:
        """Every token is one: (seq_length + 1,)."""
        return np.ones(self.seq_length + 1, np.int64)

    def file_of(self, k: int) -> str:
        """None: a name for messages."""
        return "synthetic"


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
    """The splits of the files of --data."""
    from corpora.corpus_splits import Corpora  # random tokens need none of it

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
    """A micro-batch: tensors of (b, s), which corpora/objectives.py explains; None are those that
    the options do not ask for. count: of labels that count in the loss; the others are negative.
    """

    tokens: Tensor
    labels: Tensor
    count: int
    starts: Tensor | None = None
    stops: Tensor | None = None
    positions: Tensor | None = None

    def first(self, rows: int) -> "Batch":
        """The same, where only the first `rows` samples, or none, count in the loss."""
        if rows < len(self.labels):
            self.labels[max(0, rows) :] = NO_TARGET
        return replace(self, count=int((self.labels >= 0).sum()))

    def to(self, device: torch.device, length: int, cp: Group) -> "Batch":
        """Of the first `length` tokens of each sample those of this rank of cp, on a device, to
        which copies are under way. starts and stops stay of all tokens: attention needs them.
        """
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if torch.is_tensor(value)
        }
        if length < self.tokens.shape[1]:
            # Cut there: of pinned memory only a whole tensor is copied without a wait.
            moved = {name: value[:, :length].contiguous() for name, value in moved.items()}
            moved |= {"stops": moved["stops"].clamp(max=length)} if "stops" in moved else {}
        for name in {"tokens", "labels", "positions"} & set(moved):
            moved[name] = cp.balanced_shard(moved[name], 1)
        if moved["labels"].shape != self.labels.shape:
            labels_here = cp.balanced_shard(self.labels[:, :length], 1)  # on the host
            moved["count"] = int((labels_here >= 0).sum())
        return replace(self, **moved)


class BatchReader:
    """Gives a replica's micro-batches, whose tokens are those of `micro_batch`, on the device; they
    are read ahead (corpora/prefetch.py).
    """

    def __init__(self, config: Config, dp_rank: int, device: torch.device, cp: Group | None = None):
        """cp: the ranks that share a sample's tokens; this one's are given. Default: itself."""
        self.layout = config.layout
        self.dp_rank = dp_rank
        self.device = device
        self.cp = cp or Group()
        # Before the watchdog, which does not know the file.
        seconds = 0.8 * (config.run.hang_timeout or 300.0)
        shape = self.layout.micro_batch_size, config.model.seq_length
        objective = Objective(config.data, config.training.seed)
        self.prefetcher = Prefetcher(shape, device.type == "cuda", seconds, objective)
        self.kept: dict[int, MicroBatches] = {}  # by the first sample

    def batches(
        self,
        samples: Samples,
        first: int,
        config: Config,
        evaluated: int | None = None,
        keep: bool = False,
    ) -> "MicroBatches":
        """Micro-batches by index, of the global batch that starts at sample `first`.

        evaluated: of how many samples an evaluation is, which may end within a micro-batch: those
        after them do not count. None: training, which goes on after this batch. keep: whether the
        same micro-batches are given again to the next step, if that begins at `first` too.
        """
        if evaluated is None and first in self.kept:
            return self.kept.pop(first)
        batches = MicroBatches(self, samples, first, config, evaluated)
        if keep:
            batches.keep()
            self.kept[first] = batches
        return batches

    def close(self) -> None:
        """End the threads."""
        self.prefetcher.close()


class MicroBatches:
    """The micro-batches of a global batch for one replica: `batches(0)`, `batches(1)`, ...

    Nothing is read before the first one is asked for: the ranks in the middle of a pipeline ask for
    none.
    """

    def __init__(
        self,
        reader: BatchReader,
        samples: Samples,
        first: int,
        config: Config,
        evaluated: int | None,
    ):
        """As BatchReader.batches."""
        self.reader = reader
        self.samples = samples
        self.first = first
        self.config = config
        self.evaluated = evaluated
        self.length = config.model.seq_length if evaluated is not None else config.length(first)
        self.reading = False
        self._kept: dict[int, Batch] | None = None
        if reader.layout.stages_per_rank > 1:
            self.keep()  # the first and the last stage ask for the same micro-batch

    def keep(self) -> None:
        """Keep every micro-batch, so that it can be asked for again."""
        self._kept = {}

    def __call__(self, index: int) -> Batch:
        """Micro-batch `index` on the device. UserError if the samples end before it does."""
        if self._kept is None:
            return self._take(index)
        if index not in self._kept:
            self._kept[index] = self._take(index)
        return self._kept[index]

    def _take(self, index: int) -> Batch:
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
        # torch gives pinned memory away again only when the copy from it has ended.
        return batch.to(reader.device, self.length, reader.cp)

    def _begin_of(self, first: int, index: int) -> int:
        """The first sample of micro-batch `index` of the global batch that starts at `first`."""
        return first_of_micro_batch(first, index, self.reader.layout, self.reader.dp_rank)

    def _upcoming(self) -> Iterator[int]:
        """The first samples of this replica's micro-batches, in the order in which they are asked
        for: those of this evaluation, or of this global batch and all that follow.
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
