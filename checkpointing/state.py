"""The state of a run that is saved and loaded: its progress, and this rank's shards of tensors.

Used by saving (save.py, writer.py) and loading (load.py).
"""

import dataclasses
import hashlib
import math
import os
from dataclasses import dataclass, field

import numpy as np

from checkpointing.file_format import Box, split_into_boxes
from config.messages import UserError
from config.schema import Config
from corpora.usage import Usage
from data import Samples
from zero import Optimizer, ParamShard


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    iteration: the number of steps done. consumed_samples: the number of samples read in these
    steps; skipped_samples: how many of these samples were in skipped steps. usage: the tokens read,
    and the samples and tokens trained on for each corpus.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped_samples: int = 0
    usage: Usage = field(default_factory=Usage)

    def counts(self) -> dict[str, int]:
        """Return the attributes of a checkpoint's group /progress: all fields but `usage`."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if name != "usage"}


def checkpoints_folder(config: Config) -> str:
    """Return the folder that holds all checkpoints of a run."""
    return os.path.join(config.run.out, "checkpoints")


def unpadded_shards(optimizer: Optimizer) -> list[ParamShard]:
    """Return the shards of parameters whose master weights and optimizer state this rank holds.

    Elements that are padding are left out. Raise ValueError if a tensor is padded along another
    dimension than the first.
    """
    result = []
    for shard in optimizer.owned():
        spec = shard.spec
        shape = shard.shape
        stop = shard.stop
        if spec.dim is not None and shape[spec.dim] != spec.stop - spec.start:
            if spec.dim != 0:
                raise ValueError(f"{spec.name} is padded along dimension {spec.dim}, not the first")
            stop = min(stop, (spec.stop - spec.start) * math.prod(shape[1:]))
        if shard.start < stop:
            result.append(dataclasses.replace(shard, stop=stop))
    return result


def global_boxes(shard: ParamShard) -> list[Box]:
    """Return the shard's elements, in order, as boxes of the global tensor."""
    spec = shard.spec
    result = []
    for box in split_into_boxes(shard.shape, shard.start, shard.stop):
        if spec.dim is not None:
            a, b = box[spec.dim]
            moved = (a + spec.start, b + spec.start)
            box = (*box[: spec.dim], moved, *box[spec.dim + 1 :])
        result.append(box)
    return result


def fingerprint(samples: Samples | None, consumed: int) -> str:
    """Return a hash of the 1st, 2nd, 4th, 8th, ... of the consumed samples; "" if samples is None.

    A resumed run compares it with the hash in the checkpoint, to see whether its data have changed.
    consumed: the number of samples consumed.
    """
    if samples is None:
        return ""
    digest = hashlib.sha256()
    number = 1
    while number <= min(consumed, len(samples)):
        digest.update(np.asarray(samples.sample(number - 1), dtype="<i8").tobytes())
        number *= 2
    return digest.hexdigest()[:16]


def check_begin(config: Config, done: Progress) -> None:
    """Raise UserError if the checkpoint that a run resumes is from before --begin-at-samples: steps
    before it belong to an earlier layout, and this layout was not checked for them.
    """
    begin = config.run.begin_at_samples
    if done.consumed_samples < begin:
        raise UserError(
            f"--begin-at-samples {begin}, but --resume {config.run.resume} continues after "
            f"{done.consumed_samples} samples: use the layout of the stage before"
        )
