"""Writes one save: a shard on every rank, then index, manifest and rename on rank 0.

`Writer.write` runs on the thread of an asynchronous save, or on the main one. Ranks report to
rank 0 through the store and not by collectives, so a rank that is lost or a disk that is full
blocks no other rank. A save that fails leaves the earlier checkpoints as they were.
"""

import errno
import math
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from checkpointing import file_format, folders
from checkpointing.load import Progress, global_boxes, unpadded_shards
from config.schema import Run
from distributed.store import StoreExchange
from watchdog.flight_recorder import FlightRecorder
from zero import Optimizer, ParamShard

# A tensor that several replicas have is written in equal shares by all of them if it has at least
# so many elements, else by the first.
SPREAD_ELEMENTS = 2**18
# The flight recorder is updated after so many elements, so that a long write is not a hang.
RECORDED_ELEMENTS = 2**26


def shards_to_write(optimizer: Optimizer) -> list[ParamShard]:
    """What this rank writes; over all ranks, every element without padding exactly once."""
    result = []
    for shard in unpadded_shards(optimizer):
        if shard.spec.copy:
            continue
        count = shard.stop - shard.start
        if shard.copies > 1 and count >= SPREAD_ELEMENTS:
            a, b = (count * i // shard.copies for i in (shard.copy, shard.copy + 1))
            first, offset = shard.start + a, shard.offset + a
            result.append(replace(shard, start=first, stop=shard.start + b, offset=offset))
        elif shard.copy == 0:
            result.append(shard)
    return result


def count_elements(shards: list[ParamShard]) -> int:
    """How many elements the shards have."""
    return sum(shard.stop - shard.start for shard in shards)


def saved_types(shard: ParamShard, kinds: Iterable[str]) -> dict[str, torch.dtype]:
    """The type of each kind's elements, the same in every shard of a run."""
    return {kind: shard.read(kind, shard.start, shard.start + 1).dtype for kind in kinds}


@dataclass
class PendingSave:
    """One save under way on this rank."""

    progress: Progress
    kinds: tuple[str, ...]
    hidden: str  # the folder until the checkpoint is complete
    attributes: file_format.Attributes  # on rank 0
    shards: list[ParamShard]  # what this rank writes
    began: float
    pause: float = 0.0  # seconds that training waited
    seconds: float = 0.0  # until it was complete
    bytes: int = 0
    error: BaseException | None = None  # OSError: the disk failed, or a rank did not answer


class NonFiniteError(Exception):
    """State with infinities or NaN, which is not saved."""


@dataclass
class Writer:
    """Writes the saves of one run, one after the other.

    parent: the folder of all checkpoints. exchange: of all ranks of the run.
    """

    run: Run
    rank: int
    parent: str
    exchange: StoreExchange
    recorder: FlightRecorder
    _image: tuple[list, bytes] | None = field(default=None, init=False)

    def write(self, save: PendingSave, runs: dict[str, Iterable[np.ndarray]]) -> None:
        """Write this rank's file and report it; rank 0 completes the checkpoint.

        runs: by kind, arrays that make up the elements of the save's shards. Raises nothing: the
        main thread finds the exception in the save.
        """
        key = f"save/{save.progress.iteration}"
        self.recorder.background_at("writes its shard")
        try:
            self.exchange.tell(key, self._try_to_write_shard(save, runs))
            if self.rank == 0:
                reports = self.exchange.collect(key, self.recorder.background_at)
                self.recorder.background_at("completes the checkpoint")
                self._complete(save, [report for report in reports if report is not None])
        except BaseException as error:
            save.error = error
            if isinstance(error, OSError):
                shutil.rmtree(save.hidden, ignore_errors=True)
        save.seconds = time.perf_counter() - save.began
        self.recorder.background_at(None)

    def _try_to_write_shard(self, save: PendingSave, runs) -> dict[str, Any] | None:
        """This rank's report to rank 0: what it wrote, or its error; None if it has no shards."""
        if not save.shards:
            return None
        try:
            return self._write_shard(save, runs)
        except (OSError, NonFiniteError) as error:
            sentence = f"rank {self.rank} on {platform.node()}: {error}"
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                free = shutil.disk_usage(self.parent).free
                sentence += f", {free / 1e6:.1f} MB are left"
            return {"error": sentence}

    def _write_shard(self, save: PendingSave, runs) -> dict[str, Any]:
        """Write this rank's file; returns its `ShardFile` and the global shapes of its tensors."""
        types = saved_types(save.shards[0], save.kinds)
        dtypes = {kind: str(dtype).removeprefix("torch.") for kind, dtype in types.items()}
        tensors, shapes = [], {}
        for shard in save.shards:
            tensors.append((shard.spec.name, global_boxes(shard)))
            shapes[shard.spec.name] = shard.spec.shape
        arrays = {kind: (dtypes[kind], self._checked(kind, runs[kind])) for kind in save.kinds}
        count, name = count_elements(save.shards), f"rank_{self.rank:05d}.h5"
        written = file_format.write_shard(os.path.join(save.hidden, name), count, arrays)
        shard_file = file_format.ShardFile(name, *written, dtypes, tensors)
        return {"file": asdict(shard_file), "shapes": shapes}

    def _checked(self, kind: str, runs: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """The same elements in runs of RECORDED_ELEMENTS at most, each noted by the recorder;
        NonFiniteError at one that has an infinity or a NaN.
        """
        for whole in runs:
            for start in range(0, len(whole), RECORDED_ELEMENTS):
                self.recorder.background_at("writes its shard")
                run = whole[start : start + RECORDED_ELEMENTS]
                with np.errstate(invalid="ignore"):
                    total = run.sum(dtype=np.float64)  # needs no copy of the run
                if not math.isfinite(total):
                    raise NonFiniteError(f"{kind} holds numbers that are not finite")
                yield run

    def folder_of(self, progress: Progress) -> str:
        """The folder of a complete checkpoint."""
        return os.path.join(self.parent, folders.folder_name(progress.iteration))

    # -- rank 0 -----------------------------------------------------------------------------

    def _complete(self, save: PendingSave, reports: list[dict[str, Any]]) -> None:
        """Check what the ranks wrote, add index and manifest, and make the checkpoint visible."""
        errors = [report["error"] for report in reports if "error" in report]
        if errors:
            raise OSError("; ".join(errors))
        shards = [file_format.ShardFile(**report["file"]) for report in reports]
        for shard in shards:
            size = os.path.getsize(os.path.join(save.hidden, shard.file))
            if size != shard.bytes:
                raise OSError(f"{shard.file} has {size} bytes here, {shard.bytes} were written")
        shapes = {name: tuple(s) for report in reports for name, s in report["shapes"].items()}
        files = {shard.file: (shard.bytes, shard.crc32) for shard in shards}
        image = self._index_image(shapes, shards)
        files[file_format.INDEX] = file_format.write_index(save.hidden, image, save.attributes)
        folders.write_manifest(save.hidden, save.progress.iteration, files)
        folders.publish(save.hidden, self.folder_of(save.progress))
        save.bytes = sum(total for total, _ in files.values())
        folders.delete_surplus(self.parent, self.run.keep_last, self.run.keep_every)

    def _index_image(self, shapes: dict[str, tuple], shards: list[file_format.ShardFile]) -> bytes:
        """The image of index.h5, made once per run: ranks write the same parts at every save."""
        key = [(shard.file, shard.dtypes, shard.tensors) for shard in shards]
        if self._image is None or self._image[0] != key:
            self._image = (key, file_format.index_image(shapes, shards))
        return self._image[1]
