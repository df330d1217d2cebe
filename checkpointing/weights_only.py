"""Checkpoints that hold weights and no optimizer state: imported models and merged checkpoints.

    write_checkpoint(target, contents, tensors)      a folder with run.json and one checkpoint

Training begins with one by --resume FOLDER --load-weights-only; sample.py and an export read it as
they read any checkpoint.
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from safetensors import SafetensorError

from architecture.shape import ModelShape
from base.errors import CheckpointError
from checkpointing import file_format, folders
from checkpointing.file_format import Shape
from checkpointing.model_record import ModelRecord
from checkpointing.state import Progress
from checkpointing.writer import origin


@dataclass(frozen=True)
class Contents:
    """What a checkpoint of weights holds beside their values.

    shapes: the global shape of each tensor by name, in the order in which their values come. dtype:
    numpy's name of the type of all tensors. source: where the weights come from, for the group /run
    and for run.json. progress: that of the weights; of imported weights nothing is known.
    """

    model: ModelShape
    shapes: dict[str, Shape]
    dtype: str
    record: ModelRecord
    source: dict[str, Any]
    progress: Progress = field(default_factory=Progress)

    def attributes(self) -> file_format.Attributes:
        """Return the attributes of index.h5, the same groups as those of a run."""
        return {
            "model": dataclasses.asdict(self.model),
            "progress": self.progress.counts(),
            "optimizer": {"kind": "none"},
            "data": {"seed": 0, "fingerprint": ""},
            "run": origin(self.source),
        }


def write_checkpoint(target: str, contents: Contents, tensors: Iterable[np.ndarray]) -> None:
    """Write a new folder `target` with a run.json, the tokenizer's files and one checkpoint.

    tensors: the values in the order of `contents.shapes`; they are taken one by one, so that one
    tensor is in memory at a time. Raise UserError if `target` exists or cannot be written; then
    nothing is left of it.
    """
    # The single shard of the checkpoint has each tensor as one box, the whole tensor.
    shapes = contents.shapes
    parts = [(name, [tuple((0, size) for size in shape)]) for name, shape in shapes.items()]
    with new_folder(target) as folder:
        step = contents.progress.iteration
        checkpoint = os.path.join(folder, folders.folder_name(step))
        name = "rank_00000.h5"
        os.mkdir(checkpoint)
        count = sum(map(math.prod, shapes.values()))
        arrays = {"weights": (contents.dtype, tensors)}
        total, crc = file_format.write_shard(os.path.join(checkpoint, name), count, arrays)
        shard = file_format.ShardFile(name, total, crc, {"weights": contents.dtype}, parts)
        image = file_format.index_image(shapes, [shard])
        index = file_format.write_index(checkpoint, image, contents.attributes())
        files = {name: (total, crc), file_format.INDEX: index}
        for name, content in contents.record.contents().items():
            files[name] = file_format.write_file(checkpoint, name, content)
        folders.write_manifest(checkpoint, step, files)
        config = {"model": dataclasses.asdict(contents.model)}
        facts = {
            "config": config,
            "window": contents.record.limit(contents.model),
            "source": contents.source,
        }
        write_json(folder, "run.json", facts)
        for name, content in contents.record.files.items():  # FOLDER is a tokenizer's folder, too
            file_format.write_file(folder, name, content)


def write_json(folder: str, name: str, value: dict[str, Any]) -> None:
    """Write a value as an indented JSON file of a new folder."""
    with open(os.path.join(folder, name), "w") as file:
        json.dump(value, file, indent=2)


@contextlib.contextmanager
def new_folder(target: str) -> Iterator[str]:
    """Yield a folder that is renamed to `target` if the block ends without an exception.

    After an exception the folder is deleted. Raise UserError if `target` exists, or if the folder
    cannot be written, for example on a full disk.
    """
    target = target.rstrip("/")
    partial = target + ".partial"
    if os.path.exists(target):
        raise CheckpointError(f"{target} exists: name a new folder")
    try:
        os.makedirs(partial)
    except FileExistsError:
        why = "another process writes it, or was killed, then remove it"
        raise CheckpointError(f"{partial} exists: {why}") from None
    except OSError as error:
        raise CheckpointError(f"cannot write {partial}: {error.strerror}") from None
    try:
        yield partial
        os.rename(partial, target)
    except (OSError, SafetensorError) as error:
        cause = " ".join((getattr(error, "strerror", None) or str(error)).split())
        raise CheckpointError(f"cannot write {target}: {cause}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
