"""Writes one save: a shard on every rank, then index, manifest and rename on rank 0.

`Writer.write` runs on the thread of an asynchronous save, or on the main one. Ranks report to
rank 0 through the store and not by collectives, so a rank that is lost or a disk that is full
blocks no other rank. A save that fails leaves the earlier checkpoints as they were.
"""

import dataclasses
import errno
import math
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from checkpointing import file_format, folders
from checkpointing.load import Progress, global_boxes, unpadded
from config.schema import Run
from distributed.store import StoreExchange
from watchdog.flight_recorder import FlightRecorder

if TYPE_CHECKING:
    from zero import Optimizer, ParamShard

# A tensor that several replicas have is written in equal shares by all of them if it has at least
# so many elements, else by the first.
SPREAD_ELEMENTS = 2**18
# The flight recorder is updated after so many elements, so that a long write is not a hang.
RECORDED_ELEMENTS = 2**26


@dataclass(frozen=True)
class Share:
    """Elements [start, stop) of a local parameter, which this rank writes."""

    shard: "ParamShard"
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start

    def read(self, kind: str):
        """The elements as a flat tensor on their device."""
        return self.shard.read(kind, self.start, self.stop)


def own_shares(optimizer: "Optimizer") -> list[Share]:
    """What this rank writes; over all ranks, every element without padding exactly once."""
    shares = []
    for shard in optimizer.owned():
        start, stop = shard.start, min(shard.stop, unpadded(shard.spec, shard.shape))
        count = stop - start
        if shard.spec.copy or count <= 0:
            continue
        if shard.copies > 1 and count >= SPREAD_ELEMENTS:
            start, stop = (start + count * i // shard.copies for i in (shard.copy, shard.copy + 1))
        elif shard.copy > 0:
            continue
        shares.append(Share(shard, start, stop))
    return shares


@dataclass
class PendingSave:
    """One save under way on this rank."""

    progress: Progress
    kinds: tuple[str, ...]
    hidden: str  # the folder until the checkpoint is complete
    attributes: dict[str, dict[str, Any]]  # of index.h5; on rank 0
    shares: list[Share]
    began: float
    pause: float = 0.0  # seconds that training waited
    seconds: float = 0.0  # until it was complete
    bytes: int = 0
    failure: str | None = None  # a sentence: the disk failed, or a rank did not answer
    error: BaseException | None = None  # any other exception


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

        runs: by kind, arrays that make up the elements of the save's shares. Raises nothing: the
        save has the failure, or the exception that the main thread raises.
        """
        key = f"save/{save.progress.iteration}"
        self.recorder.background_at("writes its shard")
        try:
            self.exchange.tell(key, self._try_to_write_shard(save, runs))
            if self.rank == 0:
                reports = self.exchange.collect(key, self.recorder.background_at)
                self.recorder.background_at("completes the checkpoint")
                self._complete(save, [report for report in reports if report is not None])
        except (OSError, TimeoutError) as error:
            shutil.rmtree(save.hidden, ignore_errors=True)
            save.failure = str(error)
        except BaseException as error:  # raised by the main thread
            save.error = error
        save.seconds = time.perf_counter() - save.began
        self.recorder.background_at(None)

    def _try_to_write_shard(self, save: PendingSave, runs) -> dict[str, Any] | None:
        """This rank's report to rank 0: what it wrote, or its error; None if it has no shares."""
        if not save.shares:
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
        first = dataclasses.replace(save.shares[0], stop=save.shares[0].start + 1)
        dtypes = {kind: str(first.read(kind).dtype).split(".")[1] for kind in save.kinds}
        name = f"rank_{self.rank:05d}.h5"
        tensors, shapes = [], {}
        for share in save.shares:
            spec = share.shard.spec
            boxes = global_boxes(spec, share.shard.shape, share.start, share.stop)
            tensors.append((spec.name, boxes))
            shapes[spec.name] = spec.shape
        arrays = {
            kind: (dtypes[kind], self._record_progress(check_finite(kind, runs[kind])))
            for kind in save.kinds
        }
        count = sum(share.elements for share in save.shares)
        total, crc = file_format.write_shard(os.path.join(save.hidden, name), count, arrays)
        shard_file = file_format.ShardFile(name, total, crc, dtypes, tensors)
        return {"file": dataclasses.asdict(shard_file), "shapes": shapes}

    def _record_progress(self, runs: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """The same elements in runs of RECORDED_ELEMENTS at most, each noted by the recorder."""
        for run in runs:
            for start in range(0, len(run), RECORDED_ELEMENTS):
                self.recorder.background_at("writes its shard")
                yield run[start : start + RECORDED_ELEMENTS]

    # -- rank 0 -----------------------------------------------------------------------------

    def _complete(self, save: PendingSave, reports: list[dict[str, Any]]) -> None:
        """Check what the ranks wrote, add index and manifest, and make the checkpoint visible."""
        errors = [report["error"] for report in reports if "error" in report]
        if errors:
            raise OSError("; ".join(errors))
        written = [file_format.ShardFile(**report["file"]) for report in reports]
        for shard_file in written:
            size = os.path.getsize(os.path.join(save.hidden, shard_file.file))
            if size != shard_file.bytes:
                raise OSError(
                    f"{shard_file.file} has {size} bytes here, {shard_file.bytes} were written"
                )
        shapes = {name: tuple(s) for report in reports for name, s in report["shapes"].items()}
        files = {one.file: (one.bytes, one.crc32) for one in written}
        image = self._index_image(shapes, written)
        files[file_format.INDEX] = file_format.write_index(save.hidden, image, save.attributes)
        step = save.progress.iteration
        folders.write_manifest(save.hidden, step, files)
        folders.publish(save.hidden, os.path.join(self.parent, folders.folder_name(step)))
        save.bytes = sum(total for total, _ in files.values())
        self._delete_surplus()

    def _index_image(self, shapes: dict[str, tuple], written: list[file_format.ShardFile]) -> bytes:
        """The image of index.h5, made once per run: ranks write the same parts at every save."""
        key = [(one.file, one.dtypes, one.tensors) for one in written]
        if self._image is None or self._image[0] != key:
            self._image = (key, file_format.index_image(shapes, written))
        return self._image[1]

    def _delete_surplus(self) -> None:
        by_step = {folders.step_of(path): path for path in folders.list_checkpoints(self.parent)}
        for step in folders.surplus(list(by_step), self.run.keep_last, self.run.keep_every):
            folders.remove(by_step[step])


class NonFiniteError(Exception):
    """State with infinities or NaN, which is not saved."""


def check_finite(kind: str, runs: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The same runs; NonFiniteError at one that has an infinity or a NaN."""
    for run in runs:
        with np.errstate(invalid="ignore"):
            total = run.sum(dtype=np.float64)  # needs no copy of the run
        if not math.isfinite(total):
            raise NonFiniteError(f"{kind} holds numbers that are not finite")
        yield run
