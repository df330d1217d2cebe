"""The parts of a run that a checkpoint holds: its progress, and this rank's shards of tensors.

A shard is a flat range [start, stop) of the elements of a parameter on this rank. Its `spec` says
which part of which global tensor the parameter is. A kind of state is "weights" or the name of an
optimizer state such as "exp_avg"; a checkpoint has every kind for every element.
"""

import contextlib
import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from architecture import model_stats
from base.errors import CheckpointError, UserError
from config.schema import EMA, Config
from corpora.usage import Usage
from data import Samples
from distributed.mesh import Mesh
from distributed.store import StoreExchange
from zero import Optimizer, ParamShard

# Several ranks may hold copies of a shard. If the shard has at least this number of elements, each
# of these ranks writes an equal part of it; a smaller shard is written by the first of these ranks.
SPREAD_ELEMENTS = 2**18
# The write speed of one rank that is assumed until a save has been measured.
SLOW_DISK_BYTES_PER_SECOND = 100e6


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    iteration: the number of steps done. consumed_samples: the number of samples read in these
    steps. skipped_samples: the number of these samples that were in steps that changed no weight.
    usage: the number of tokens read, and of samples and tokens trained on from each corpus.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped_samples: int = 0
    usage: Usage = field(default_factory=Usage)

    def after_step(
        self,
        samples: Samples,
        batch: int,
        length: int,
        trained: bool,
    ) -> "Progress":
        """Return the progress after one more step.

        samples: the training samples. batch: the number of samples in the step. length: the tokens
        of a sample. trained: whether the step updated the weights. The training loop calls this
        after each step.
        """
        begin = self.consumed_samples
        counts = samples.count_by_corpus(begin, begin + batch)
        usage = self.usage.after(counts, batch, length, trained)
        skipped_samples = self.skipped_samples
        if not trained:
            skipped_samples += batch
        return Progress(self.iteration + 1, begin + batch, skipped_samples, usage)

    def counts(self) -> dict[str, int]:
        """Return all fields but `usage`, by name.

        A checkpoint stores them as the attributes of the HDF5 group /progress.
        """
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if name != "usage"}


def global_tensors(
    parameters: Iterable[Any], mesh: Mesh, exchange: StoreExchange
) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Return the global shape of each tensor of the model, and whether it is trained, by name.

    Collective. Each rank knows the tensors of its own stages, its `parameters`, and rank 0 collects
    them. Only the first ranks of the groups `tp` and `replicas` report: the others have the same.
    Raise UserError, on every rank, if two stages have different tensors of one name.
    """
    reports = mesh.tp.rank == mesh.replicas.rank == 0
    own = {}
    for p in parameters if reports else ():
        own[p.spec.name] = [p.spec.shape, p.requires_grad, p.spec.copy or p.spec.tied]

    def joined(of_ranks: list[dict[str, list]]) -> dict[str, list]:
        """Return all tensors; only the two copies of a tied one may have one name."""
        found: dict[str, list] = {}
        for tensors in of_ranks:
            for name, facts in tensors.items():
                if name in found and not (facts[2] and found[name][2]):
                    raise CheckpointError(
                        f"two stages have a parameter {name}: name it by its block"
                    )
                found[name] = facts
        return found

    found = exchange.agree(own, joined, "tensors")
    return {name: (tuple(shape), trained) for name, (shape, trained, _) in found.items()}


def checkpoints_folder(config: Config) -> str:
    """Return the folder that holds all checkpoints of a run."""
    return os.path.join(config.run.out, "checkpoints")


def unpadded_shards(optimizer: Optimizer) -> list[ParamShard]:
    """Return the shards of parameters whose master weights and optimizer state this rank holds.

    Elements that are padding are left out: they are the last rows of a local tensor. Called to save
    and to load. Raise ValueError if a tensor is padded along another dimension than the first.
    """
    shards = []
    for shard in optimizer.owned():
        spec = shard.spec
        shape = shard.shape
        stop = shard.stop
        # This rank's tensor holds the rows [spec.start, spec.stop) of the global tensor; if it has
        # more rows, the last ones are padding.
        if spec.dim is not None and shape[spec.dim] != spec.stop - spec.start:
            if spec.dim != 0:
                raise ValueError(f"{spec.name} is padded along dimension {spec.dim}, not the first")
            stop = min(stop, (spec.stop - spec.start) * math.prod(shape[1:]))
        if shard.start < stop:  # a shard that is nothing but padding is left out
            shards.append(dataclasses.replace(shard, stop=stop))
    return shards


def fingerprint(samples: Samples | None, consumed: int) -> str:
    """Return a hash of the 1st, 2nd, 4th, 8th, ... consumed sample, 16 hex digits.

    A resumed run compares the hash with the checkpoint's, to see whether the data have changed.
    consumed: the number of samples consumed. Return "" if `samples` is None.
    """
    if samples is None:
        return ""
    digest = hashlib.sha256()
    number = 1
    while number <= min(consumed, len(samples)):
        # `number` counts samples from 1, but `sample` takes an index, which counts from 0.
        digest.update(np.asarray(samples.sample(number - 1), dtype="<i8").tobytes())
        number *= 2
    return digest.hexdigest()[:16]


def fingerprints(
    samples: Samples | None, total: int, answers: bool, skips: Callable[[int], bool]
) -> dict[str, str]:
    """Return hashes of the 1st, 2nd, 4th, 8th, ... sample of a run, by the sample's number.

    They are in run.json: `runs.py diff` compares the data of two runs by them. total: the samples
    of the run. answers: whether the marks of --answers-only belong to a sample. skips: whether the
    run skips a sample, from 0; such a sample is not even read. A sample that cannot be read ends
    the list: the step that reads it raises the error.
    """
    found: dict[str, str] = {}
    number = 1
    with contextlib.suppress(UserError):
        while samples is not None and number <= min(total, len(samples)):
            if skips(number - 1):
                number *= 2
                continue
            text = np.asarray(samples.sample(number - 1), dtype="<i8").tobytes()
            if answers:
                text += np.asarray(samples.answers(number - 1), dtype="<i8").tobytes()
            found[str(number)] = hashlib.sha256(text).hexdigest()[:16]
            number *= 2
    return found


def shards_to_write(optimizer: Optimizer) -> list[ParamShard]:
    """Return the shards that this rank writes to a checkpoint, without padding.

    The shards of all ranks together contain every element exactly once.
    """
    shards = []
    for shard in unpadded_shards(optimizer):
        if shard.spec.copy:  # another stage has the original of this tied tensor, and writes it
            continue
        count = shard.stop - shard.start
        if shard.copies > 1 and count >= SPREAD_ELEMENTS:
            # Each of the `copies` ranks writes an equal part; `copy` is this rank's number.
            part_start = count * shard.copy // shard.copies
            part_stop = count * (shard.copy + 1) // shard.copies
            part = dataclasses.replace(
                shard,
                start=shard.start + part_start,
                stop=shard.start + part_stop,
                offset=shard.offset + part_start,  # index of the part's start in its master tensor
            )
            shards.append(part)
        elif shard.copy == 0:
            shards.append(shard)
    return shards


def count_elements(shards: list[ParamShard]) -> int:
    """Return the number of elements of all shards together."""
    return sum(shard.stop - shard.start for shard in shards)


def saved_types(shard: ParamShard, kinds: Iterable[str]) -> dict[str, torch.dtype]:
    """Return the dtype of each kind of state, for which one element of each kind is read.

    The dtypes are the same in every shard of a run. kinds: such as ("weights", "exp_avg").
    """
    return {kind: shard.read(kind, shard.start, shard.start + 1).dtype for kind in kinds}


def element_bytes(optimizer: Optimizer, kinds: tuple[str, ...]) -> int:
    """Return the bytes that an element of a parameter takes in a checkpoint: the sum over `kinds`.

    The dtypes are read from a parameter that this rank owns. A rank that owns none returns 0; rank
    0, which asks whether the disk has room, always owns some.
    """
    shards = optimizer.owned()
    if not shards:
        return 0
    return sum(dtype.itemsize for dtype in saved_types(shards[0], kinds).values())


def bytes_of_a_save(config: Config, optimizer: Optimizer, kinds: tuple[str, ...]) -> int:
    """Return an estimate of the bytes that a checkpoint takes on the disk; called on rank 0."""
    count = optimizer.model_elements or model_stats.parameters(config.model)
    # 1 percent and 1 MiB are for the index and the padding of the files.
    return int(count * element_bytes(optimizer, kinds) * 1.01) + 2**20


def seconds_of_first_save(optimizer: Optimizer) -> float:
    """Return the seconds that a save takes if this rank writes its bytes to a slow disk.

    --exit-after-minutes leaves this time for the save at the end, as long as no save has been
    measured.
    """
    kinds = ("weights", *optimizer.state_kinds)
    size = count_elements(shards_to_write(optimizer)) * element_bytes(optimizer, kinds)
    return size / SLOW_DISK_BYTES_PER_SECOND


def saved_kinds(config: Config, optimizer: Optimizer) -> tuple[str, ...]:
    """Return the kinds of state in a checkpoint of this run: "weights", then the optimizer's.

    With --save-weights-only these are the weights, and their average with --ema.
    """
    if config.run.save_weights_only:
        return ("weights", EMA) if config.training.ema else ("weights",)
    return ("weights", *optimizer.state_kinds)


def check_begin(config: Config, done: Progress) -> None:
    """Raise UserError if the checkpoint that a run resumes is from before --begin-at-samples.

    A run may be trained in several periods with different layouts, each by a launch of its own.
    --begin-at-samples is where the period of this launch begins. The layout of this launch was
    checked for the batch sizes from there on, not for those of earlier steps. done: the progress in
    the checkpoint.
    """
    begin = config.run.begin_at_samples
    if done.consumed_samples < begin:
        raise CheckpointError(
            f"--begin-at-samples {begin}, but --resume {config.run.resume} continues after "
            f"{done.consumed_samples} samples: use the layout of the stage before"
        )
