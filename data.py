"""Where samples come from: the splits of a run, and micro-batches of a global batch.

PREFIX.bin, PREFIX.idx   tokens on disk                            corpora/token_files.py
    |
    |  a split is a range of sequences: [train | validation | test]
    v
samples                  in Megatron's order, or blended           corpora/sample_order.py
    |
    v
step s, micro-batch m, replica r reads samples  s*B + (m*dp + r)*b ...  of that order
"""

import math
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from config.messages import UserError
from config.schema import Config, Layout
from corpora.blends import Blend, blend_order, normalise, parse_blend
from corpora.sample_order import SPLITS, GPTSamples, TextSpan, split_ranges, tokens_per_epoch
from corpora.token_files import IndexedDataset

Result = TypeVar("Result")
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

    def spans(self, k: int) -> list[TextSpan]:
        """None: there is no text."""
        return []


# What a batch is made of: sample k is the same on every rank and in every layout.
Samples = Synthetic | GPTSamples | Blend


@dataclass(frozen=True)
class Splits:
    """The samples of a run; None where the run reads none."""

    train: Samples
    validation: Samples | None
    test: Samples | None


def build(config: Config) -> Splits:
    """The samples that a run needs: all of its steps, and one evaluation.

    Every evaluation reads the same first eval_samples, so that two evaluations differ only by the
    model. The test split is built if --split gives it a share. UserError on bad data or shares.
    """
    model, text = config.model, config.data
    tested, evaluated = True, text.eval_samples
    if text.data == ("synthetic",):

        def split(i: int, count: int) -> Samples:
            return Synthetic(model.vocab_size, model.seq_length, config.training.seed, i)

    else:
        prefixes, weights = parse_blend(text.data)
        datasets = [IndexedDataset(prefix) for prefix in prefixes]
        ranges = [split_ranges(text.split, len(dataset)) for dataset in datasets]
        tested = any(parts[SPLITS.index("test")] for parts in ranges)

        def split(i: int, count: int) -> Samples:
            try:
                return _build_split(datasets, [r[i] for r in ranges], weights, count, config)
            except UserError as error:
                raise UserError(f"{SPLITS[i]} samples (--split {text.split}): {error}") from None
            except MemoryError:
                raise UserError(
                    f"no memory for the order of {count:,} {SPLITS[i]} samples"
                ) from None

    return Splits(
        train=split(0, config.total_samples),
        validation=split(1, evaluated) if evaluated else None,
        test=split(2, evaluated) if evaluated and tested else None,
    )


def _build_split(
    datasets: list[IndexedDataset],
    sequences: list[range],
    weights: list[float] | None,
    num_samples: int,
    config: Config,
) -> Samples:
    """Samples of one split: of the only corpus, or of a blend.

    The order of a part depends on how much is requested of it, so that follows Megatron's rule
    (blended_megatron_dataset_builder.py): with weights, its share and some surplus; without, one
    epoch, and parts are mixed by the samples in it. Where that falls short of what the blend
    takes, where Megatron fails, what is taken is requested.
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


def batches(
    samples: Samples, first: int, layout: Layout, dp_rank: int, device: torch.device, count: int = 0
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """The function that gives a replica's micro-batches, by index, of the global batch that starts
    at sample `first`: tokens and labels as `micro_batch` makes them, on the device.

    For a GPU a thread reads the next of `count` while this one is computed.
    """

    def read(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return micro_batch(samples, first, index, layout, dp_rank)

    if device.type != "cuda":
        return read
    take = read_ahead(read, count)

    def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        # torch gives pinned memory away again only when the copy from it has ended.
        tokens, labels = (t.pin_memory().to(device, non_blocking=True) for t in take(index))
        return tokens, labels

    return batch


def read_ahead(read: Callable[[int], Result], count: int) -> Callable[[int], Result]:
    """`read`, which begins to read index + 1 in a thread when index is asked for, below `count`.

    An error of what was read ahead is raised when that is asked for.
    """
    thread = ThreadPoolExecutor(1)
    ahead: dict[int, Future[Result]] = {}

    def take(index: int) -> Result:
        found = ahead.pop(index, None) or thread.submit(read, index)
        if index + 1 < count and index + 1 not in ahead:
            ahead[index + 1] = thread.submit(read, index + 1)
        return found.result()

    return take


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
            f"samples {begin} to {begin + size} are needed, but there are only {len(samples)}"
        )
    batch = torch.from_numpy(np.stack([samples.sample(begin + i) for i in range(size)]))
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
