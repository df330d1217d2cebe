"""Saves a run while its training goes on; every rank has a `Checkpointer`.

    main thread        copy what this rank owns to host memory ........ the pause
    background         write its file, checksum, fsync; tell rank 0
    rank 0 background  when all have told: index, manifest, fsync, rename, delete surplus ones

The ranks tell one another through torch's store, not by collectives: a rank that is lost, or a
disk that is full, holds nobody up. A save that fails leaves everything as it was; the run says so
at the next step and goes on. file_format.py has the format.
"""

import dataclasses
import errno
import json
import math
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from checkpointing import file_format
from checkpointing.load import (
    MINUTES_TO_WRITE,
    Board,
    Loader,
    Progress,
    checkpoints_folder,
    fingerprint,
    global_boxes,
    unpadded,
)
from config import model_stats
from config.messages import UserError
from config.schema import Config

if TYPE_CHECKING:
    from torch import Tensor

    from distributed.context import Context
    from distributed.mesh import Mesh
    from zero import Optimizer, ParamShard

# What several ranks hold is written in equal shares by all of them if it has so many elements.
SPREAD_ELEMENTS = 2**18
# Of one rank, until a save has been measured.
SLOW_DISK_BYTES_PER_SECOND = 100e6
# A write is on record at least this often.
RECORDED_ELEMENTS = 2**26


@dataclass
class _Save:
    """One save on its way."""

    progress: Progress
    hidden: str  # the folder until it is complete
    facts: dict[str, dict[str, Any]]
    began: float = field(default_factory=time.perf_counter)
    pause: float = 0.0  # seconds that training waited
    seconds: float = 0.0  # until it was complete
    bytes: int = 0
    failure: str | None = None  # a sentence: the disk's fault
    bug: BaseException | None = None  # ours


class Checkpointer:
    """Saves and loads one run; every rank has one and calls the same methods in the same order.

    `samples`: the training samples, whose fingerprint is kept; `say` prints a line on rank 0.
    """

    def __init__(
        self,
        config: Config,
        mesh: "Mesh",
        optimizer: "Optimizer",
        context: "Context | None" = None,
        samples=None,
        say: Callable[[str], None] = print,
    ):
        self.config, self.run, self.mesh, self.optimizer = config, config.run, mesh, optimizer
        self.samples, self.first = samples, mesh.rank == 0
        self.say = say if self.first else lambda line: None
        self.recorder = mesh.recorder
        self.nodes = len(set(context.nodes)) if context else 1
        self.parent = checkpoints_folder(config)
        self.board = Board(context)
        self.token = self.board.agree(os.urandom(4).hex(), lambda tokens: tokens[0])
        self.enabled = bool(self.run.save_every or self.run.save_every_minutes)
        self.kinds = ("weights",)
        if not self.run.save_weights_only:
            self.kinds += optimizer.state_kinds
        self._save: _Save | None = None
        self._thread: threading.Thread | None = None
        self._buffers: dict[str, Tensor] = {}
        self._index: tuple[list, bytes] | None = None
        self._saved_last, self._saved_at, self._advised = 0, time.monotonic(), False
        self._stopping = False
        self._seconds: float | None = None  # that the last save took, or one may take
        if self.enabled and self.first:
            self._prepare_folder()

    def _prepare_folder(self) -> None:
        try:
            os.makedirs(self.parent, exist_ok=True)
            left = file_format.remove_leftovers(self.parent)
        except OSError as error:
            raise UserError(f"cannot write in {self.parent}: {error.strerror}") from None
        if left:
            self.say(f"removed {len(left)} unfinished checkpoints from {self.parent}")

    def after_step(self, progress: Progress, last: bool = False, asked: bool = False) -> None:
        """Report a write that has ended, and save if it is time to; every rank calls each step.

        `asked`: save in any case, if this step is not saved yet.
        """
        self._report()
        asked = asked and progress.iteration != self._saved_last
        if asked or (self.enabled and self._due(progress.iteration, last)):
            self.save(progress)

    @property
    def bytes_needed(self) -> int:
        """What one checkpoint takes on the disk, with a little for its index; as rank 0 sees it."""
        bytes_each = self._element_bytes(self.kinds)
        return int(model_stats.parameters(self.config.model) * bytes_each * 1.01) + 2**20

    @property
    def saving(self) -> bool:
        """Whether a save is under way on this rank, or has not been reported yet."""
        return self._save is not None

    @property
    def seconds_to_save(self) -> float:
        """How long a save takes: the last one, before any this rank's bytes at a slow disk's rate.

        With the time that the save under way may still need.
        """
        if self._seconds is None:
            own = sum(stop - start for _, start, stop in self._shares())
            size = own * self._element_bytes(self._all_kinds)
            self._seconds = size / SLOW_DISK_BYTES_PER_SECOND
        return self._seconds * (2 if self.saving else 1)

    def save_to_stop(self, progress: Progress) -> bool:
        """Save all that a resume needs, in this run's folder, and wait; whether it is complete.

        Collective over the world.
        """
        self._wait()
        self._stopping = True
        folder = os.path.join(self.parent, file_format.folder_name(progress.iteration))
        there = self._first_says(os.path.isdir(folder))
        if not there or self.kinds != self._all_kinds:  # resumed from elsewhere, or weights alone
            self.kinds, self._saved_last = self._all_kinds, -1
        return self.save_now(progress)

    @property
    def _all_kinds(self) -> tuple[str, ...]:
        return ("weights", *self.optimizer.state_kinds)

    def _element_bytes(self, kinds: tuple[str, ...]) -> int:
        """Bytes a parameter takes in a checkpoint; 0 on a rank that owns none (never rank 0)."""
        own = self.optimizer.owned()
        if not own:
            return 0
        run = (own[0].start, own[0].start + 1)
        return sum(own[0].read(kind, *run).element_size() for kind in kinds)

    def _due(self, iteration: int, last: bool) -> bool:
        if iteration == self._saved_last:
            return False
        every = self.run.save_every
        if last or (every and iteration - iteration % every > self._saved_last):
            return True
        if not self.run.save_every_minutes:
            return False
        minutes = (time.monotonic() - self._saved_at) / 60
        return self._first_says(minutes >= self.run.save_every_minutes)

    def _first_says(self, answer: bool) -> bool:
        """Rank 0's answer, on every rank; collective over the world."""
        import torch

        from distributed.collectives import MAX

        flag = torch.tensor(int(answer and self.first), device=self.optimizer.device)
        self.mesh.world.all_reduce(flag, MAX).wait()
        return bool(self.mesh.world.values(flag))

    def save(self, progress: Progress) -> None:
        """Begin a save, after the one before it has ended; collective over the world."""
        began = time.perf_counter()
        self.recorder.enter("save")
        self._wait()
        self._saved_last, self._saved_at = progress.iteration, time.monotonic()
        name = file_format.folder_name(progress.iteration)
        hidden = os.path.join(self.parent, f".{name}.{self.token}.partial")
        if not self._first_says(self.first and self._can_begin(hidden)):
            return
        save = self._save = _Save(progress, hidden, self._facts(progress) if self.first else {})
        save.began = began
        parts = list(self._shares())
        if not self.run.async_save:
            self._write(save, parts, self._runs(parts))
        else:
            runs = self._copied(parts)
            thread = threading.Thread(target=self._write, args=(save, parts, runs), daemon=True)
            self._thread = thread
            thread.start()
        save.pause = time.perf_counter() - began

    def _can_begin(self, hidden: str) -> bool:
        """Make the hidden folder if there is room for the whole checkpoint; rank 0 only."""
        needed = self.bytes_needed
        try:
            os.makedirs(self.parent, exist_ok=True)
            free = shutil.disk_usage(self.parent).free
            if free < needed:
                problem = f"it may take {needed / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free"
            else:
                shutil.rmtree(hidden, ignore_errors=True)
                os.mkdir(hidden)
                return True
        except OSError as error:
            problem = str(error)
        self._say_failed(hidden, problem)
        return False

    def _say_failed(self, hidden: str, problem: str) -> None:
        name = os.path.basename(hidden)[1:].split(".")[0]
        kept = file_format.list_checkpoints(self.parent)
        rest = f"the newest is {os.path.basename(kept[0])}" if kept else "there is none yet"
        problem = " ".join(problem.split())  # HDF5 breaks its lines
        then = "" if self._stopping else "training goes on, "
        self.say(f"{name} was not saved in {self.parent}: {problem}; {then}{rest}")

    def _shares(self) -> Iterator[tuple["ParamShard", int, int]]:
        """What this rank writes: elements [start, stop) of pieces; over all ranks, each once."""
        for piece in self.optimizer.owned():
            start, stop = piece.start, min(piece.stop, unpadded(piece.spec, piece.shape))
            count = stop - start
            if piece.spec.copy or count <= 0:
                continue
            if piece.copies > 1 and count >= SPREAD_ELEMENTS:
                start, stop = (
                    start + count * i // piece.copies for i in (piece.copy, piece.copy + 1)
                )
            elif piece.copy > 0:
                continue
            yield piece, start, stop

    def _runs(self, parts) -> dict[str, Iterable[np.ndarray]]:
        """The state itself, by kind, run by run as it is asked for."""

        def runs(kind: str) -> Iterator[np.ndarray]:
            for piece, start, stop in parts:
                yield piece.read(kind, start, stop).cpu().numpy()

        return {kind: runs(kind) for kind in self.kinds}

    def _copied(self, parts) -> dict[str, Iterable[np.ndarray]]:
        """A copy of the state in host memory, which is kept from save to save."""
        import torch

        count, on_gpu = sum(stop - start for _, start, stop in parts), False
        for kind in self.kinds if parts else ():
            runs = [p.read(kind, start, stop) for p, start, stop in parts]
            on_gpu = runs[0].is_cuda
            if kind not in self._buffers:
                buffer = torch.empty(count, dtype=runs[0].dtype, pin_memory=on_gpu)
                self._buffers[kind] = buffer
            if on_gpu:
                places = self._buffers[kind].split([run.numel() for run in runs])
                for place, run in zip(places, runs):
                    place.copy_(run, non_blocking=True)
            else:  # twice as fast as copies one by one
                torch.cat(runs, out=self._buffers[kind])
        if on_gpu:
            torch.cuda.synchronize(self.optimizer.device)
        return {kind: [self._buffers[kind].numpy()] if parts else [] for kind in self.kinds}

    def save_now(self, progress: Progress) -> bool:
        """Save unless it is saved, wait for it, and tell every rank whether it is complete.

        Collective over the world.
        """
        if progress.iteration != self._saved_last:
            self.save(progress)
        self._wait()
        folder = os.path.join(self.parent, file_format.folder_name(progress.iteration))
        return self._first_says(os.path.isdir(folder))

    # -- off the main thread ----------------------------------------------------------------

    def _write(self, save: _Save, parts, runs: dict[str, Iterable[np.ndarray]]) -> None:
        """Write this rank's file and tell rank 0; rank 0 completes the checkpoint."""
        key = f"save/{save.progress.iteration}"
        self.recorder.background_at("writes its shard")
        try:
            try:
                told = self._write_own(save, parts, runs)
            except (OSError, _NotFinite) as error:
                told = {"error": f"rank {self.mesh.rank} on {platform.node()}: {error}"}
                if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                    free = shutil.disk_usage(self.parent).free
                    told["error"] += f", {free / 1e6:.1f} MB are left"
            self.board.tell(key, told)
            if self.first:
                told = self.board.collect(key, self.recorder.background_at)
                self.recorder.background_at("completes the checkpoint")
                self._complete(save, told)
        except (OSError, TimeoutError) as error:
            shutil.rmtree(save.hidden, ignore_errors=True)
            save.failure = str(error)
        except BaseException as error:  # handed to the main thread, which raises it
            save.bug = error
        save.seconds = time.perf_counter() - save.began
        self.recorder.background_at(None)

    def _write_own(self, save: _Save, parts, runs) -> dict[str, Any] | None:
        """Write this rank's file; what rank 0 must know of it, None if there is nothing."""
        if not parts:
            return None
        piece, start, _ = parts[0]
        first = {kind: piece.read(kind, start, start + 1) for kind in self.kinds}
        dtypes = {kind: str(first[kind].dtype).split(".")[1] for kind in self.kinds}
        name = f"rank_{self.mesh.rank:05d}.h5"
        pieces, shapes = [], {}
        for piece, start, stop in parts:
            pieces.append((piece.spec.name, global_boxes(piece.spec, piece.shape, start, stop)))
            shapes[piece.spec.name] = piece.spec.shape
        arrays = {
            kind: (dtypes[kind], self._on_record(_finite(kind, runs[kind]))) for kind in self.kinds
        }
        count = sum(stop - start for _, start, stop in parts)
        total, crc = file_format.write_shard(os.path.join(save.hidden, name), count, arrays)
        shard = file_format.Shard(name, total, crc, dtypes, pieces)
        return {"shard": dataclasses.asdict(shard), "shapes": shapes}

    def _on_record(self, runs: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """The same elements in runs of RECORDED_ELEMENTS: a long write is not taken for a hang."""
        for run in runs:
            for start in range(0, len(run), RECORDED_ELEMENTS):
                self.recorder.background_at("writes its shard")
                yield run[start : start + RECORDED_ELEMENTS]

    def _complete(self, save: _Save, told: list[dict[str, Any] | None]) -> None:
        """Check what the ranks wrote, add index and manifest, and make the checkpoint visible."""
        told = [one for one in told if one is not None]
        errors = [one["error"] for one in told if "error" in one]
        if errors:
            raise OSError("; ".join(errors))
        written = [file_format.Shard(**one["shard"]) for one in told]
        for shard in written:
            size = os.path.getsize(os.path.join(save.hidden, shard.file))
            if size != shard.bytes:
                raise OSError(f"{shard.file} has {size} bytes here, {shard.bytes} were written")
        shapes = {name: tuple(s) for one in told for name, s in one["shapes"].items()}
        files = {shard.file: (shard.bytes, shard.crc32) for shard in written}
        image = self._index_image(shapes, written)
        files[file_format.INDEX] = file_format.write_index(save.hidden, image, save.facts)
        step = save.progress.iteration
        file_format.write_manifest(save.hidden, step, files)
        file_format.publish(save.hidden, os.path.join(self.parent, file_format.folder_name(step)))
        save.bytes = sum(total for total, _ in files.values())
        self._delete_surplus()

    def _index_image(self, shapes: dict[str, tuple], written: list[file_format.Shard]) -> bytes:
        """What index.h5 is made of; made once, for the ranks always write the same pieces."""
        pieces = [(shard.file, shard.dtypes, shard.pieces) for shard in written]
        if self._index is None or self._index[0] != pieces:
            self._index = (pieces, file_format.index_image(shapes, written))
        return self._index[1]

    def _delete_surplus(self) -> None:
        found = {
            file_format.step_of(folder): folder
            for folder in file_format.list_checkpoints(self.parent)
        }
        for step in file_format.surplus(list(found), self.run.keep_last, self.run.keep_every):
            file_format.remove(found[step])

    # -- back on it -------------------------------------------------------------------------

    def _wait(self) -> None:
        """Until this rank's part of the save in flight has ended, and report it."""
        if self._thread is not None:
            with self.recorder.waiting_for("writer"):
                self._thread.join(60 * MINUTES_TO_WRITE)
            if self._thread.is_alive():
                step = self._save.progress.iteration
                raise TimeoutError(f"step {step} is not saved after {MINUTES_TO_WRITE} minutes")
        self._report()

    def _report(self) -> None:
        """Say how a save ended that has; raise what was not the disk's fault."""
        save = self._save
        if save is None or (self._thread is not None and self._thread.is_alive()):
            return
        self._save = self._thread = None
        if save.bug is not None:
            raise save.bug
        if save.failure is not None:
            self._say_failed(save.hidden, save.failure)
            return
        self._seconds = save.seconds
        if self.first:
            name = file_format.folder_name(save.progress.iteration)
            self.say(
                f"saved {os.path.join(self.parent, name)}: "
                f"{save.bytes / 1e9:.3f} GB in {save.seconds:.2f} s, pause {save.pause:.3f} s"
            )
            self._advise(save)

    def _advise(self, save: _Save) -> None:
        """Once: how often to save, by Young and Daly, from what this save took."""
        if self._advised:
            return
        self._advised = True
        hours = self.run.node_mtbf_hours
        interval = best_interval(save.pause, save.seconds, hours * 3600 / self.nodes)
        self.say(
            f"a failure every {hours:g} h on each of {self.nodes} nodes and a pause of "
            f"{save.pause:.3f} s: least is lost by saving every {interval / 60:.1f} minutes "
            f"(Young/Daly)"
        )

    def resume(self) -> Progress:
        """Load what --resume asks for; how far that run was, or the beginning.

        Collective over the world. UserError on every rank if it cannot be loaded.
        """
        loader = Loader(self.config, self.mesh, self.optimizer, self.board, self.samples, self.say)
        progress = loader.resume()
        self._saved_last = progress.iteration
        return progress

    def close(self) -> None:
        """Wait for the save in flight."""
        self._wait()

    def _facts(self, progress: Progress) -> dict[str, dict[str, Any]]:
        """The attributes of index.h5; rank 0 has parameters, so its scalars are the run's."""
        import torch

        training = self.config.training
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        versions |= {"h5py": h5py.__version__, "numpy": np.__version__}
        return {
            "model": dataclasses.asdict(self.config.model),
            "progress": dataclasses.asdict(progress),
            "optimizer": {"kind": self.optimizer.state_name, **self.optimizer.scalars()},
            "data": {
                "seed": training.seed,
                "fingerprint": fingerprint(self.samples, progress.consumed_samples),
            },
            "run": {
                "config": json.dumps(self.config.as_dict()),
                "versions": json.dumps(versions),
                "saved": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            },
        }


class _NotFinite(Exception):
    """State that no run should go on from."""


def _finite(kind: str, runs: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The same runs; _NotFinite at one that holds an infinity or a NaN."""
    for run in runs:
        with np.errstate(invalid="ignore"):
            total = run.sum(dtype=np.float64)  # copies nothing
        if not math.isfinite(total):
            raise _NotFinite(f"{kind} holds numbers that are not finite")
        yield run


def best_interval(pause: float, seconds: float, between_failures: float) -> float:
    """Seconds between saves that lose least: Daly (FGCS 2006), whose first term is Young's.

    pause: of training, per save; seconds: until a save is complete, below which none can begin.
    """
    cost = min(pause, between_failures)
    ratio = math.sqrt(cost / (2 * between_failures))
    young = math.sqrt(2 * cost * between_failures)
    return max(young * (1 + ratio / 3 + ratio**2 / 9) - cost, seconds)
