"""Loads a checkpoint into a run under any layout: chooses one, checks it, reads its tensors.

Every rank calls `Loader.resume`. Files are checked before anything is read, each by one rank. Then
each rank reads, of every tensor, the elements that it owns under its own layout, directly into its
state: tensor and pipeline parallelism, replicas, ZeRO stage and precision of the run that saved
make no difference. Weights that a rank does not own come from its data replicas afterwards.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from checkpointing import file_format, folders
from config.messages import UserError
from config.schema import Config
from distributed.store import StoreExchange

if TYPE_CHECKING:
    from distributed.mesh import Mesh
    from parallel import ParamSpec
    from zero import Optimizer


@dataclass(frozen=True)
class Progress:
    """How far a run is: steps done, samples consumed, and how many of these in skipped steps."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_samples: int = 0


def checkpoints_folder(config: Config) -> str:
    """Where a run's checkpoints are."""
    return os.path.join(config.run.out, "checkpoints")


# ------------------------------------------------------------------------------------------------
# Which part of its tensor a local parameter is, and which samples were consumed
# ------------------------------------------------------------------------------------------------


def unpadded(spec: "ParamSpec", shape: tuple[int, ...]) -> int:
    """How many leading elements of the local tensor, which has that shape, are not padding.

    Raises ValueError if it is padded along another dimension than the first.
    """
    if spec.dim is None or shape[spec.dim] == spec.stop - spec.start:
        return math.prod(shape)
    if spec.dim != 0:
        raise ValueError(
            f"{spec.name} is padded along dimension {spec.dim}, which is not the first"
        )
    return (spec.stop - spec.start) * math.prod(shape[1:])


def global_boxes(
    spec: "ParamSpec", shape: tuple[int, ...], start: int, stop: int
) -> list[file_format.Box]:
    """Elements [start, stop) of the local tensor, which has that shape, as boxes of the global."""
    result = []
    for box in file_format.split_into_boxes(shape, start, stop):
        if spec.dim is not None:
            a, b = box[spec.dim]
            moved = (a + spec.start, b + spec.start)
            box = (*box[: spec.dim], moved, *box[spec.dim + 1 :])
        result.append(box)
    return result


def fingerprint(samples, consumed: int) -> str:
    """Which samples were consumed: a hash of the 1st, 2nd, 4th, 8th, ... of them; "" for none."""
    if samples is None:
        return ""
    digest, number = hashlib.sha256(), 1
    while number <= min(consumed, len(samples)):
        digest.update(np.asarray(samples.sample(number - 1), dtype="<i8").tobytes())
        number *= 2
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------
# Loading
# ------------------------------------------------------------------------------------------------


class Loader:
    """Loads one run's state; `Checkpointer` explains the arguments."""

    def __init__(
        self,
        config: Config,
        mesh: "Mesh",
        optimizer: "Optimizer",
        exchange: StoreExchange,
        samples,
        print_line: Callable[[str], None],
    ):
        self.config, self.run, self.mesh, self.optimizer = config, config.run, mesh, optimizer
        self.exchange, self.samples, self.print_line = exchange, samples, print_line
        self.is_rank_0 = mesh.rank == 0
        self.parent = checkpoints_folder(config)

    def resume(self) -> Progress:
        """Load what --resume asks for; the progress of that run, or of a new one.

        Collective over the world. UserError on every rank if it cannot be loaded.
        """
        if not self.run.resume:
            return Progress()
        folder = self._choose()
        if folder is None:
            self.print_line(f"no checkpoint in {self.parent} yet: training begins at step 0")
            return Progress()
        with file_format.Index(folder) as index:
            weights_only = self.run.load_weights_only
            self._check_model(index, folder)
            self._check_tensors(index, folder)
            self._read(index, ("weights",) if weights_only else self._kinds_of(index, folder))
            if weights_only:
                self.optimizer.after_load()
                self.print_line(f"weights taken from {folder}: training begins at step 0")
                return Progress()
            scalars = index.attributes("optimizer")
            scalars.pop("kind")
            self.optimizer.after_load(scalars)
            progress = Progress(**index.attributes("progress"))
            self._print_resumed(index, folder, progress)
            return progress

    def _choose(self) -> str | None:
        """The folder to load, its files checked; None if --resume auto finds none."""
        candidates, is_only_one = self.exchange.agree(
            self._candidates() if self.is_rank_0 else None, lambda values: values[0]
        )
        problems = []
        for folder in candidates:
            problem = self._find_problem(folder)
            if problem is None:
                return folder
            if is_only_one:
                raise UserError(problem)
            problems.append(problem)
            self.print_line(f"{os.path.basename(folder)} cannot be loaded: {problem}")
        if problems:
            raise UserError(f"nothing to resume from: {'; '.join(problems)}")
        return None

    def _candidates(self) -> tuple[list[str], bool]:
        """Folders to try, newest first, and whether --resume names exactly one checkpoint."""
        path = self.run.resume
        if path == "auto":
            return folders.list_checkpoints(self.parent), False
        found = folders.find_checkpoints(path)
        newest = folders.list_checkpoints(self.parent)[:1]
        if found != [path]:
            return found, False
        if newest and folders.step_of(newest[0]) > (folders.step_of(path) or 0):
            self.print_line(
                f"{newest[0]} has a later step than {path}: --resume auto will take it, "
                f"unless it is moved away or --out is another folder"
            )
        return found, True

    def _find_problem(self, folder: str) -> str | None:
        """Why a checkpoint cannot be loaded, or None; every rank reads its share of the files."""
        try:
            files = folders.read_manifest(folder)["files"]
        except UserError as error:
            problems = [str(error)]
        else:
            own = list(files.items())[self.mesh.rank :: self.mesh.size]
            problems = [folders.find_problem(folder, name, entry) for name, entry in own]
        found = [problem for problem in problems if problem]
        return self.exchange.agree(
            found[:1], lambda of_ranks: next((own[0] for own in of_ranks if own), None)
        )

    def _check_model(self, index: file_format.Index, folder: str) -> None:
        """UserError if the checkpoint's model is another one; a line with --load-weights-only."""
        ours, theirs = dataclasses.asdict(self.config.model), index.attributes("model")
        if self.config.model.positions != "learned":
            theirs["seq_length"] = ours["seq_length"]  # no tensor depends on it
        different = [name for name in ours if ours[name] != theirs.get(name)]
        if not different:
            return
        both = ", ".join(f"{name} {theirs.get(name)} against {ours[name]}" for name in different)
        sentence = f"{folder} is of another model than this run's: {both}"
        if not self.run.load_weights_only:
            raise UserError(sentence)
        self.print_line(sentence)

    def _check_tensors(self, index: file_format.Index, folder: str) -> None:
        """UserError that lists tensors missing, surplus or of another shape in the checkpoint."""
        reports = self.mesh.tp.rank == 0 and self.mesh.dp.rank == 0  # the others have the same
        own = {spec.name: spec.shape for spec in self.optimizer.specs} if reports else {}
        ours = self.exchange.agree(own, lambda of_ranks: dict(ChainMap(*of_ranks)))
        theirs = index.shapes()
        wrong = [
            f"{name} is {theirs[name]} there and {tuple(ours[name])} here"
            for name in ours.keys() & theirs.keys()
            if theirs[name] != tuple(ours[name])
        ]
        if wrong:
            raise UserError(f"{folder}: {_list_some(sorted(wrong))}")
        missing = sorted(ours.keys() - theirs.keys())
        surplus = sorted(theirs.keys() - ours.keys())
        notes = [f"missing there: {_list_some(missing)}"] if missing else []
        notes += [f"not in this model: {_list_some(surplus)}"] if surplus else []
        if notes and not self.run.load_weights_only:
            raise UserError(
                f"{folder}: {'; '.join(notes)}; --load-weights-only loads what there is"
            )
        if notes:
            self.print_line(f"{folder}: {'; '.join(notes)}; these keep their values")

    def _kinds_of(self, index: file_format.Index, folder: str) -> tuple[str, ...]:
        """The optimizer's tensors of a checkpoint; UserError if they are not this optimizer's."""
        ours, theirs = ("weights", *self.optimizer.state_kinds), tuple(index.kinds)
        here = self.optimizer.state_name
        there = index.attributes("optimizer")["kind"]
        if theirs == ("weights",):
            raise UserError(f"{folder} holds only weights: --load-weights-only begins with them")
        if sorted(ours) != sorted(theirs) or here != there:
            raise UserError(
                f"{folder} has the state of {there} ({', '.join(theirs[1:])}), this run's "
                f"optimizer is {here} ({', '.join(ours[1:])}); --load-weights-only "
                f"loads only the weights"
            )
        return ours

    def _read(self, index: file_format.Index, kinds: tuple[str, ...]) -> None:
        """Fill this rank's state, one local parameter at a time."""
        names = index.shapes()
        for shard in self.optimizer.owned():
            stop = min(shard.stop, unpadded(shard.spec, shard.shape))
            if shard.spec.name not in names or stop <= shard.start:
                continue
            self.mesh.recorder.at("load")
            boxes = global_boxes(shard.spec, shard.shape, shard.start, stop)
            for kind in kinds:
                current = shard.read(kind, shard.start, stop)
                loaded = current.new_empty(current.shape, device="cpu")
                index.read(kind, shard.spec.name, boxes, loaded.numpy())
                shard.write(kind, shard.start, loaded.to(current.device))

    def _print_resumed(self, index: file_format.Index, folder: str, progress: Progress) -> None:
        if not self.is_rank_0:
            return
        self.print_line(
            f"resumed from {folder}: step {progress.iteration}, "
            f"{progress.consumed_samples} samples consumed"
        )
        consumed = progress.consumed_samples
        here = fingerprint(self.samples, consumed)
        there = index.attributes("data")["fingerprint"]
        if here != there:
            self.print_line(
                f"the samples before {consumed} are not those that the checkpoint was trained "
                f"on (fingerprint {there} there, {here} here); training continues with these"
            )
        ours = json.loads(json.dumps(dataclasses.asdict(self.config.training)))  # lists, as there
        theirs = json.loads(index.attributes("run")["config"])["training"]
        changed = [
            f"{name} {theirs[name]} before, {ours[name]} now"
            for name in ours.keys() & theirs.keys()
            if ours[name] != theirs[name]
        ]
        if changed:
            self.print_line(f"options that changed: {'; '.join(sorted(changed))}")


def _list_some(items: list[str], count: int = 10) -> str:
    rest = len(items) - count
    return ", ".join(items[:count]) + (f" and {rest} more" if rest > 0 else "")
