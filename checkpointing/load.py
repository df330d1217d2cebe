"""Reads a checkpoint into a run: which one, is it intact, is it this model's, then the slices.

Every rank calls `Loader.resume`. Files are checked before anything is read, each by one rank.
Then a rank reads, of every tensor, the elements that it owns under its own layout, straight into
place: tensor or pipeline parallelism, replicas, ZeRO stage and precision of the run that saved do
not matter. Weights of which it owns a part only come from the other replicas afterwards.
"""

import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from checkpointing import file_format
from config.messages import UserError
from config.schema import Config
from watchdog.flight_recorder import FlightRecorder

if TYPE_CHECKING:
    from distributed.context import Context
    from distributed.mesh import Mesh
    from parallel import ParamSpec
    from zero import Optimizer

# A rank that has not told of its file by then is taken for lost.
MINUTES_TO_WRITE = 60


@dataclass(frozen=True)
class Progress:
    """How far a run is: steps done, samples consumed, and how many of these in skipped steps."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_samples: int = 0


# ------------------------------------------------------------------------------------------------
# Small values between ranks
# ------------------------------------------------------------------------------------------------


class _Local(dict):
    """The store of a world of one."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def add(self, key: str, amount: int) -> int:
        self[key] = self.get(key, 0) + amount
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def delete_key(self, key: str) -> None:
        del self[key]


class Board:
    """Where ranks leave JSON values for one another: torch's store, by no collective."""

    def __init__(self, context: "Context | None"):
        self.rank, self.size = (context.rank, context.size) if context else (0, 1)
        self.store = context.store if context and context.store is not None else _Local()
        # Boards of one store, made in the same order everywhere, must not read one another's.
        self.recorder = context.recorder if context else FlightRecorder()
        self._name = f"board/{self.store.add(f'boards/{self.rank}', 1)}"
        self._asked = 0

    def agree(self, value: Any, combine: Callable[[list], Any]) -> Any:
        """`combine` of every rank's value, in rank order, made on rank 0; every rank must call."""
        self._asked += 1
        key = f"agree/{self._asked}"
        self.tell(key, value)
        if self.rank == 0:
            answer = json.dumps(combine(self.collect(key)))
            self.store.set(f"{self._name}/{key}/all", answer)
        with self.recorder.waiting_for("store", (0,)):
            return json.loads(self.store.get(f"{self._name}/{key}/all"))

    def tell(self, key: str, value: Any) -> None:
        """Leave this rank's value for rank 0."""
        self.store.set(f"{self._name}/{key}/{self.rank}", json.dumps(value))

    def collect(self, key: str, record: Callable[[str, tuple], None] | None = None) -> list:
        """Every rank's value in rank order, for rank 0; TimeoutError names who told nothing.

        `record`: where a thread other than the main one notes for whom it waits.
        """
        limit = time.monotonic() + 60 * MINUTES_TO_WRITE
        keys = [f"{self._name}/{key}/{rank}" for rank in range(self.size)]
        for rank, own in enumerate(keys):
            if record:
                record("store", (rank,))
                self._wait_for(own, rank, limit)
            else:
                with self.recorder.waiting_for("store", (rank,)):
                    self._wait_for(own, rank, limit)
        values = [json.loads(self.store.get(own)) for own in keys]
        for own in keys:
            self.store.delete_key(own)
        return values

    def _wait_for(self, key: str, rank: int, limit: float) -> None:
        while not self.store.check([key]):
            if time.monotonic() > limit:
                raise TimeoutError(f"rank {rank} told nothing in {MINUTES_TO_WRITE} minutes")
            time.sleep(0.005)


# ------------------------------------------------------------------------------------------------
# What a piece is of its whole tensor, and which samples were read
# ------------------------------------------------------------------------------------------------


def unpadded(spec: "ParamSpec", shape: tuple[int, ...]) -> int:
    """How many leading elements of the local tensor of that shape are not padding."""
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
    """Elements [start, stop) of the local tensor of that shape, as boxes of the whole tensor."""
    result = []
    for box in file_format.boxes(shape, start, stop):
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
    digest, k = hashlib.sha256(), 1
    while k <= min(consumed, len(samples)):
        digest.update(np.asarray(samples.sample(k - 1), dtype="<i8").tobytes())
        k *= 2
    return digest.hexdigest()[:16]


def checkpoints_folder(config: Config) -> str:
    """Where a run's checkpoints are."""
    return os.path.join(config.run.out, "checkpoints")


# ------------------------------------------------------------------------------------------------
# Loading
# ------------------------------------------------------------------------------------------------


class Loader:
    """Loads one run's state; see `Checkpointer` for the arguments."""

    def __init__(
        self,
        config: Config,
        mesh: "Mesh",
        optimizer: "Optimizer",
        board: Board,
        samples,
        say: Callable[[str], None],
    ):
        self.config, self.run, self.mesh, self.optimizer = config, config.run, mesh, optimizer
        self.board, self.samples, self.say, self.first = board, samples, say, mesh.rank == 0
        self.parent = checkpoints_folder(config)

    def resume(self) -> Progress:
        """Load what --resume asks for; how far that run was, or the beginning.

        Collective over the world. UserError on every rank if it cannot be loaded.
        """
        if not self.run.resume:
            return Progress()
        folder = self._choose()
        if folder is None:
            self.say(f"no checkpoint in {self.parent} yet: training begins at step 0")
            return Progress()
        with file_format.Index(folder) as index:
            weights_only = self.run.load_weights_only
            self._check_model(index, folder)
            self._check_tensors(index, folder)
            self._read(index, ("weights",) if weights_only else self._kinds_of(index, folder))
            if weights_only:
                self.optimizer.after_load()
                self.say(f"weights taken from {folder}: training begins at step 0")
                return Progress()
            scalars = index.facts("optimizer")
            scalars.pop("kind")
            self.optimizer.after_load(scalars)
            progress = Progress(**index.facts("progress"))
            self._say_resumed(index, folder, progress)
            return progress

    def _choose(self) -> str | None:
        """The folder to load, its files checked; None if --resume auto finds none."""
        folders, only = self.board.agree(self._candidates() if self.first else None, lambda v: v[0])
        problems = []
        for folder in folders:
            problem = self._problem(folder)
            if problem is None:
                return folder
            problems.append(problem)
            if not only:
                self.say(f"{os.path.basename(folder)} cannot be loaded: {problem}")
        if problems:
            raise UserError(
                problems[0] if only else f"nothing to resume from: {'; '.join(problems)}"
            )
        return None

    def _candidates(self) -> tuple[list[str], bool]:
        """Folders to try, newest first, and whether exactly one was asked for."""
        asked = self.run.resume
        if asked == "auto":
            return file_format.list_checkpoints(self.parent), False
        found = file_format.locate(asked)
        newer = file_format.list_checkpoints(self.parent)[:1]
        if (
            found == [asked]
            and newer
            and file_format.step_of(newer[0]) > (file_format.step_of(asked) or 0)
        ):
            self.say(
                f"{newer[0]} is further on than {asked}: --resume auto will prefer it, "
                f"unless it is moved away or --out is another folder"
            )
        return found, found == [asked]

    def _problem(self, folder: str) -> str | None:
        """Why a checkpoint cannot be loaded, or None; every rank reads its share of the files."""
        try:
            listed = file_format.read_manifest(folder)["files"]
        except UserError as error:
            listed, problems = {}, [str(error)]
        else:
            own = list(listed.items())[self.mesh.rank :: self.mesh.size]
            problems = [file_format.find_problem(folder, name, entry) for name, entry in own]
        found = [problem for problem in problems if problem]
        return self.board.agree(found[:1], lambda every: next((p[0] for p in every if p), None))

    def _check_model(self, index: file_format.Index, folder: str) -> None:
        """UserError if the checkpoint's model is another one; only said if weights are wanted."""
        ours, theirs = dataclasses.asdict(self.config.model), index.facts("model")
        if self.config.model.positions != "learned":
            theirs["seq_length"] = ours["seq_length"]  # no tensor depends on it
        other = [name for name in ours if ours[name] != theirs.get(name)]
        if not other:
            return
        both = ", ".join(f"{n} {theirs.get(n)} against {ours[n]}" for n in other)
        sentence = f"{folder} is of another model than this run's: {both}"
        if not self.run.load_weights_only:
            raise UserError(sentence)
        self.say(sentence)

    def _check_tensors(self, index: file_format.Index, folder: str) -> None:
        """UserError that lists tensors missing, surplus or of another shape in the checkpoint."""
        holds = self.mesh.tp.rank == 0 and self.mesh.dp.rank == 0
        own = {spec.name: spec.shape for spec in self.optimizer.specs} if holds else {}
        ours = self.board.agree(own, lambda every: {k: v for one in every for k, v in one.items()})
        theirs = index.shapes()
        wrong = [
            f"{name} is {theirs[name]} there and {tuple(ours[name])} here"
            for name in ours.keys() & theirs.keys()
            if theirs[name] != tuple(ours[name])
        ]
        if wrong:
            raise UserError(f"{folder}: {_first_of(sorted(wrong))}")
        missing = sorted(ours.keys() - theirs.keys())
        surplus = sorted(theirs.keys() - ours.keys())
        notes = [f"missing there: {_first_of(missing)}"] if missing else []
        notes += [f"not in this model: {_first_of(surplus)}"] if surplus else []
        if notes and not self.run.load_weights_only:
            raise UserError(
                f"{folder}: {'; '.join(notes)}; --load-weights-only takes what there is"
            )
        if notes:
            self.say(f"{folder}: {'; '.join(notes)}; these stay as they are")

    def _kinds_of(self, index: file_format.Index, folder: str) -> tuple[str, ...]:
        """The optimizer's tensors of a checkpoint; UserError if they are not this optimizer's."""
        ours, theirs = ("weights", *self.optimizer.state_kinds), tuple(index.kinds)
        here = self.optimizer.state_name
        there = index.facts("optimizer")["kind"]
        if theirs == ("weights",):
            raise UserError(f"{folder} holds weights alone: --load-weights-only begins from them")
        if sorted(ours) != sorted(theirs) or here != there:
            raise UserError(
                f"{folder} has the state of {there} ({', '.join(theirs[1:])}), this run's "
                f"optimizer is {here} ({', '.join(ours[1:])}); --load-weights-only goes on "
                f"without it"
            )
        return ours

    def _read(self, index: file_format.Index, kinds: tuple[str, ...]) -> None:
        """Fill this rank's state, one piece at a time, with the slices it needs."""
        names = index.shapes()
        for piece in self.optimizer.owned():
            stop = min(piece.stop, unpadded(piece.spec, piece.shape))
            if piece.spec.name not in names or stop <= piece.start:
                continue
            self.mesh.recorder.at("load")
            parts = global_boxes(piece.spec, piece.shape, piece.start, stop)
            for kind in kinds:
                place = piece.read(kind, piece.start, stop)
                host = place.new_empty(place.shape, device="cpu")
                index.read(kind, piece.spec.name, parts, host.numpy())
                piece.write(kind, piece.start, host.to(place.device))

    def _say_resumed(self, index: file_format.Index, folder: str, progress: Progress) -> None:
        if not self.first:
            return
        self.say(
            f"resumed from {folder}: step {progress.iteration}, "
            f"{progress.consumed_samples} samples consumed"
        )
        consumed = progress.consumed_samples
        here = fingerprint(self.samples, consumed)
        there = index.facts("data")["fingerprint"]
        if here != there:
            self.say(
                f"the samples before {consumed} are not those that the checkpoint was trained "
                f"on (fingerprint {there} there, {here} here); the run goes on with these"
            )
        ours = json.loads(json.dumps(dataclasses.asdict(self.config.training)))  # lists, as there
        theirs = json.loads(index.facts("run")["config"])["training"]
        changed = [
            f"{name} {theirs[name]} before, {ours[name]} now"
            for name in ours.keys() & theirs.keys()
            if ours[name] != theirs[name]
        ]
        if changed:
            self.say(f"options that changed: {'; '.join(sorted(changed))}")


def _first_of(items: list[str], count: int = 10) -> str:
    rest = len(items) - count
    return ", ".join(items[:count]) + (f" and {rest} more" if rest > 0 else "")
