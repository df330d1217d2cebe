"""Writes one save: a shard on every rank, then index, manifest and rename on rank 0.

`Writer.write` runs in the background thread of an asynchronous save, or in the main thread. Ranks
report to rank 0 through the store and not by collectives, so a lost rank or a full disk blocks no
other rank. A save that fails leaves the earlier checkpoints as they were. Read save.py and
file_format.py first.

A kind of state is "weights" or the name of an optimizer state, such as "exp_avg". A ParamShard is a
flat range of a parameter's elements. A run is a flat array or tensor, a piece of what is written:
the runs of a kind, one after the other, are the elements of all shards that this rank writes.

`HostBuffers` is the host memory into which an asynchronous save copies this rank's state; every
save uses the same memory.

    buffers = HostBuffers(device)
    buffers.begin_pinning(count, {"weights": torch.float32})   # on a GPU: in a thread, early
    buffers.copy("weights", runs, count, torch.float32)
    buffers.finish()
    arrays = buffers.arrays("weights")

For a GPU the memory is pinned. Pinning takes seconds, and without the thread these would be part of
the pause of the first save.
"""

import errno
import functools
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpointing import file_format, folders
from checkpointing.after_save import AfterSave
from checkpointing.file_format import Box, split_into_boxes
from checkpointing.state import Progress, count_elements, saved_types
from config.run_options import Run
from distributed.store import StoreExchange
from watchdog.flight_recorder import FlightRecorder
from zero import ParamShard

# A write notes its progress in the flight recorder after this number of elements, so that a long
# write is not taken for a hang.
RECORDED_ELEMENTS = 2**26
# How long `_when_there` looks for a file of another node: network file systems may show it late.
SECONDS_TO_APPEAR = 30.0
# The seconds between the first two looks, and the most between two looks: each pause of
# `_when_there` is twice as long as the pause before.
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 2.0


def global_boxes(shard: ParamShard) -> list[Box]:
    """Return the shard's elements, in order, as boxes of the global tensor.

    A box has indices (first, last + 1) for each dimension. Example: tensor rank 1 holds rows 4 to 7
    of a matrix (8, 5); elements 0 to 9 of its part are the box ((4, 6), (0, 5)).
    """
    spec = shard.spec
    boxes = []
    for box in split_into_boxes(shard.shape, shard.start, shard.stop):
        # Tensor parallelism splits dimension `dim`: there the local tensor begins at spec.start.
        if spec.rows is not None and spec.rows.merged == 2:
            index, first = divmod(spec.start, spec.shape[1])
            (a, b), *rest = box
            box = ((index, index + 1), (a + first, b + first), *rest)
        elif spec.dim is not None:
            a, b = box[spec.dim]
            global_range = (a + spec.start, b + spec.start)
            box = (*box[: spec.dim], global_range, *box[spec.dim + 1 :])
        boxes.append(box)
    return boxes


@dataclass
class PendingSave:
    """A save that is running or has ended on this rank."""

    progress: Progress
    kinds: tuple[str, ...]
    hidden: str  # the path of the folder until the checkpoint is complete
    attributes: file_format.Attributes  # the attributes of index.h5; only rank 0 has them
    shards: list[ParamShard]  # the shards that this rank writes
    began: float  # time.perf_counter() when the save began
    checks: tuple[str, ...] = ()  # names of the checks that this state has passed
    # The contents of model_record.json and of the tokenizer's files; only rank 0 has them.
    record_files: dict[str, bytes] = field(default_factory=dict)
    pause: float = 0.0  # seconds that training waited
    seconds: float = 0.0  # the seconds from `began` to the end of this rank's part
    bytes: int = 0  # the size of all files together; only rank 0 knows it
    error: BaseException | None = None  # why the save failed; an OSError does not end the run
    notes: list[str] = field(default_factory=list)  # lines that the main thread prints


@dataclass
class Saves:
    """The saves of a run so far; `failed`, `lacks_room` and `announced` are set on rank 0 only."""

    step: int = 0  # the step whose save began last, or that was loaded; -1: save again
    began: float = field(default_factory=time.monotonic)  # when the last save began
    seconds: float | None = None  # the duration of the last complete save; None: no save yet
    failed: bool = False  # whether the last save failed
    lacks_room: bool = False  # whether the last save failed because the disk had no room
    announced: bool = False  # whether the wait for room after the last step was printed


class NonFiniteError(Exception):
    """Raised if the state to be saved contains infinities or NaN."""


@dataclass
class Writer:
    """Writes the saves of one run, one after the other.

    parent: the folder of all checkpoints. exchange: passes the ranks' reports to rank 0.
    other_course: on rank 0, (step, reason): checkpoints of later steps did not lead to this run's
    state, and are moved to another folder before the run's first checkpoint appears. covered: the
    last step whose audit found nothing wrong; the newest checkpoint of this step or an earlier one
    is not deleted. after_save: on rank 0, what runs a command for each checkpoint; None: none.
    _image: what the image in index.h5 depends on, and the image.
    """

    run: Run
    rank: int
    parent: str
    exchange: StoreExchange
    recorder: FlightRecorder
    other_course: tuple[int, str] | None = None
    covered: int = -1
    after_save: AfterSave | None = None
    _image: tuple[list, bytes] | None = field(default=None, init=False)

    def write(self, save: PendingSave, runs: dict[str, Iterable[np.ndarray]]) -> None:
        """Write this rank's file and report it to rank 0, which completes the checkpoint.

        runs: by kind of state, flat arrays that together are the elements of the save's shards. An
        exception is not raised but stored in `save.error`, for the main thread.
        """
        key = f"save/{save.progress.iteration}"
        # The report on a hang shows what the background thread of each rank was doing.
        self.recorder.background_at("writes its shard")
        try:
            self.exchange.tell(key, self._try_to_write_shard(save, runs))
            if self.rank == 0:
                reports = self.exchange.collect(key, self.recorder.background_at)
                self.recorder.background_at("completes the checkpoint")
                self._complete(save, [report for report in reports if report is not None])
        except BaseException as error:
            save.error = error
            if isinstance(error, OSError):  # the run goes on without this checkpoint
                shutil.rmtree(save.hidden, ignore_errors=True)
        save.seconds = time.perf_counter() - save.began
        self.recorder.background_at(None)

    def _try_to_write_shard(self, save: PendingSave, runs) -> dict[str, Any] | None:
        """Write this rank's file, and return the report to rank 0.

        The report is the result of `_write_shard`; {"error": a sentence} if the disk failed or the
        state is not finite; None if this rank has no shards. runs: by kind of state, the elements
        of the shards.
        """
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
        """Write this rank's file, and return {"file": ..., "shapes": ...} for rank 0's index.

        "file" is the file's `ShardFile` as a dictionary; "shapes" has the global shapes of its
        tensors, by name. runs: by kind of state, the elements of the shards.
        """
        types = saved_types(save.shards[0], save.kinds)
        dtypes = {kind: str(dtype).removeprefix("torch.") for kind, dtype in types.items()}
        tensors = []
        shapes = {}
        for shard in save.shards:
            tensors.append((shard.spec.name, global_boxes(shard)))
            shapes[shard.spec.name] = shard.spec.shape
        arrays = {kind: (dtypes[kind], self._checked(kind, runs[kind])) for kind in save.kinds}
        count = count_elements(save.shards)
        name = f"rank_{self.rank:05d}.h5"
        path = os.path.join(save.hidden, name)
        # Wait until this node sees the folder that rank 0 has made, perhaps on another node.
        _when_there(lambda: open(path, "wb").close(), time.monotonic() + SECONDS_TO_APPEAR)
        size, crc = file_format.write_shard(path, count, arrays)
        shard_file = file_format.ShardFile(name, size, crc, dtypes, tensors)
        return {"file": asdict(shard_file), "shapes": shapes}

    def _checked(self, kind: str, runs: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the elements of `runs` in shorter runs, and check that they are finite.

        A shorter run has at most RECORDED_ELEMENTS elements. Each is noted in the flight recorder,
        as progress of this rank. Raise NonFiniteError if a run has an infinity or a NaN, because
        training could not continue from such a state.
        """
        for whole in runs:
            for start in range(0, len(whole), RECORDED_ELEMENTS):
                self.recorder.background_at("writes its shard")
                run = whole[start : start + RECORDED_ELEMENTS]
                # The sum is finite only if all elements are. np.isfinite would allocate an array.
                with np.errstate(invalid="ignore"):
                    total = run.sum(dtype=np.float64)
                if not math.isfinite(total):
                    raise NonFiniteError(f"{kind} holds numbers that are not finite")
                yield run

    def folder_of(self, progress: Progress) -> str:
        """Return the visible folder of the checkpoint of a step."""
        return os.path.join(self.parent, folders.folder_name(progress.iteration))

    # -- rank 0 -----------------------------------------------------------------------------

    def _complete(self, save: PendingSave, reports: list[dict[str, Any]]) -> None:
        """Check the ranks' files, add index and manifest, and make the checkpoint visible.

        reports: the results of `_try_to_write_shard` on the ranks that have shards. Raise OSError
        if a rank reported an error, or if a rank's file is not complete on this node.
        """
        errors = [report["error"] for report in reports if "error" in report]
        if errors:
            raise OSError("; ".join(errors))
        shards = [file_format.ShardFile(**report["file"]) for report in reports]
        limit = time.monotonic() + SECONDS_TO_APPEAR
        for shard in shards:  # this node may not see another node's file, or its size, at once
            _when_there(functools.partial(_check_size, save.hidden, shard), limit)
        shapes: dict[str, tuple] = {}
        for report in reports:
            shapes |= {name: tuple(shape) for name, shape in report["shapes"].items()}
        files = {shard.file: (shard.bytes, shard.crc32) for shard in shards}
        image = self._index_image(shapes, shards)
        files[file_format.INDEX] = file_format.write_index(save.hidden, image, save.attributes)
        for name, contents in save.record_files.items():
            files[name] = file_format.write_file(save.hidden, name, contents)
        folders.write_manifest(save.hidden, save.progress.iteration, files, save.checks)
        # After a resume from a checkpoint that is not the newest, the first save moves the newer
        # ones to another folder: training did not go on from them. In a run that began at step 0 it
        # moves all.
        if self.other_course:
            step, why = self.other_course
            note = folders.set_aside(self.parent, step, why)
            if note:
                save.notes.append(note)
            self.other_course = None
        if self.after_save is not None:
            self.after_save.announce(save.progress.iteration)
        folders.publish(save.hidden, self.folder_of(save.progress))
        in_use: list[int] = []
        if self.after_save is not None:
            self.after_save.add(self.folder_of(save.progress))
            in_use = self.after_save.steps
        save.bytes = sum(total for total, _ in files.values())
        try:
            folders.delete_surplus(
                self.parent,
                self.run.keep_last,
                self.run.keep_every,
                save.progress.iteration,
                self.covered,
                in_use,
            )
        except OSError as error:  # the save has not failed: its own checkpoint is complete
            save.notes.append(f"cannot delete the surplus checkpoints of {self.parent}: {error}")

    def _index_image(self, shapes: dict[str, tuple], shards: list[file_format.ShardFile]) -> bytes:
        """Return the bytes of index.h5 without attributes.

        They say where in the files each tensor is, not its values. So they are computed again only
        if the files have other parts of tensors than in the last save.
        """
        key = [(shard.file, shard.dtypes, shard.tensors) for shard in shards]
        if self._image is None or self._image[0] != key:
            self._image = (key, file_format.index_image(shapes, shards))
        return self._image[1]


def _when_there(act: Callable[[], None], limit: float) -> None:
    """Call `act` again and again until it does not raise OSError for a missing or stale file.

    On a network file system a file of another node may appear late. Any other exception is raised
    at once. limit: the time.monotonic() after which the OSError is raised too.
    """
    pause = FIRST_PAUSE
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE) or time.monotonic() > limit:
                raise
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _check_size(folder: str, shard: file_format.ShardFile) -> None:
    """Raise OSError (ESTALE) if a rank's file does not have the size that the rank reported."""
    # os.stat could return an old size: only `open` makes an NFS client ask its server again.
    with open(os.path.join(folder, shard.file), "rb") as file:
        size = os.fstat(file.fileno()).st_size
    if size != shard.bytes:
        sizes = f"{size} bytes here, {shard.bytes} were written"
        raise OSError(errno.ESTALE, f"{shard.file} has {sizes}")


def origin(config: dict[str, Any]) -> dict[str, str]:
    """Return the attributes of a checkpoint's group /run: configuration, versions, time.

    config: the options of the run, or the origin of imported weights.
    """
    import h5py

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"h5py": h5py.__version__, "numpy": np.__version__}
    saved = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"config": json.dumps(config), "versions": json.dumps(versions), "saved": saved}


# ---- Host memory that a save copies the state into -----------------------------------------------


# A pinned buffer has a power of two of elements. Only the last buffer of a kind of state may have
# another number, up to this one (`_pinned_sizes`).
SMALL_PINNED_BUFFER = 2**18


class HostBuffers:
    """The buffers of one rank, by kind of state ("weights", and the kinds of the optimizer)."""

    def __init__(self, device: torch.device):
        """Make no buffers yet: `begin_pinning` or the first `copy` of a kind allocates them."""
        self.device = device
        self.pinned = device.type == "cuda"
        self._buffers: dict[str, list[Tensor]] = {}  # by kind of state
        # The buffers by kind that the thread of `begin_pinning` allocates; None once the first
        # `copy` has moved them to `_buffers`, or if there is no such thread.
        self._pinning: Future[dict[str, list[Tensor]]] | None = None

    def begin_pinning(self, count: int, types: dict[str, torch.dtype]) -> None:
        """Begin to allocate the buffers in a thread, if the state is on a GPU.

        count: the number of elements of each kind. types: the dtype of each kind.
        """
        if not self.pinned or not count:
            return

        def allocate() -> dict[str, list[Tensor]]:
            torch.cuda.set_device(self.device)  # the current device is set per thread
            return {kind: self._allocate(count, dtype) for kind, dtype in types.items()}

        threads = ThreadPoolExecutor(1, thread_name_prefix="pinning")
        self._pinning = threads.submit(allocate)
        threads.shutdown(wait=False)

    def copy(self, kind: str, runs: Iterable[Tensor], count: int, dtype: torch.dtype) -> None:
        """Copy flat tensors, one after the other, into the buffers of a kind.

        count: the number of elements of all runs. dtype: the dtype of the runs. Copies from a GPU
        have only begun on return: call `finish` before the buffers are read. An exception of the
        thread of `begin_pinning` is raised here.
        """
        if self._pinning is not None:
            self._buffers |= self._pinning.result()
            self._pinning = None
        if kind not in self._buffers:
            self._buffers[kind] = self._allocate(count, dtype)
        if self.pinned:
            _copy_to_pinned(runs, self._buffers[kind])
        else:  # the state is on the CPU: one torch.cat takes half the time of a copy for each run
            torch.cat(list(runs), out=self._buffers[kind][0])

    def finish(self) -> None:
        """Wait until the copies from the GPU have ended, after which `arrays` may be read."""
        if self.pinned:
            torch.cuda.synchronize(self.device)

    def arrays(self, kind: str) -> list[np.ndarray]:
        """Return the copied elements of a kind as arrays that share the buffers' memory."""
        return [buffer.numpy() for buffer in self._buffers[kind]]

    def _allocate(self, count: int, dtype: torch.dtype) -> list[Tensor]:
        """Return flat buffers with `count` elements together; on a CPU a single buffer."""
        sizes = _pinned_sizes(count) if self.pinned else [count]
        return [torch.empty(size, dtype=dtype, pin_memory=self.pinned) for size in sizes]


def _pinned_sizes(count: int) -> list[int]:
    """Return the numbers of elements of the buffers that together hold `count` elements.

    torch rounds pinned memory up to a power of two, so a single buffer could take twice its size.
    So all buffers are powers of two, except for a small last one. Example: 2^20 + 2^18 + 5 elements
    are in buffers of 2^20, 2^18 and 5.
    """
    sizes = []
    while count > SMALL_PINNED_BUFFER:
        sizes.append(2 ** (count.bit_length() - 1))
        count -= sizes[-1]
    return [*sizes, count] if count else sizes


def _copy_to_pinned(runs: Iterable[Tensor], buffers: list[Tensor]) -> None:
    """Begin to copy flat tensors on a GPU, one after the other, into the buffers.

    The buffers together have as many elements as the runs together; a run may be split between two
    buffers.
    """
    next_buffers = iter(buffers)
    free = next(next_buffers)  # the part of a buffer that is not filled yet
    for run in runs:
        while len(run):
            if not len(free):
                free = next(next_buffers)
            n = min(len(run), len(free))
            free[:n].copy_(run[:n], non_blocking=True)
            run = run[n:]
            free = free[n:]
