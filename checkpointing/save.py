"""Saves a run while training continues; every rank has a `Checkpointer`.

    main thread        copy this rank's state to host memory ....... training pauses
    background         write this rank's file, checksum, fsync; report to rank 0
    rank 0 background  with all reports: index, manifest, fsync, rename, delete old checkpoints

A save that fails leaves everything as it was; the run prints why at the next step and continues.
writer.py has the background part, file_format.py and folders.py the format.

A shard is a flat range of a parameter's elements. A kind of state is "weights" or, for example,
"exp_avg". `self.saves` has facts on earlier saves: `saves.step` is the step that was saved or
loaded last; -1 makes every step count as not saved. "Collective" methods are called by every rank.
"""

import contextlib
import dataclasses
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from base.errors import NO_ROOM, CheckpointError, SaveError, UserError
from checkpointing import folders, model_record
from checkpointing.after_save import AfterSave
from checkpointing.file_format import Attributes
from checkpointing.folders import Chosen
from checkpointing.model_record import ModelRecord
from checkpointing.state import (
    Progress,
    bytes_of_a_save,
    checkpoints_folder,
    count_elements,
    fingerprint,
    saved_kinds,
    saved_types,
    seconds_of_first_save,
    shards_to_write,
)
from checkpointing.writer import HostBuffers, PendingSave, Saves, Writer, origin
from config.past import to_text
from config.schema import Config
from config.timeline import Timeline
from data import Samples
from distributed.collectives import MAX
from distributed.context import Context
from distributed.mesh import Mesh
from distributed.stop_conditions import RequestedAction
from distributed.store import StoreExchange
from zero import Optimizer

# How long `finish` waits, with the state in memory, if the disk has no room for the last save.
SECONDS_FOR_ROOM = 1800.0
SECONDS_BETWEEN_LOOKS = 1.0  # the pause of `finish` between two looks at the disk's free bytes
# How long a run that has ended waits for the commands of --after-save, and one that stops early.
SECONDS_FOR_COMMANDS = 1800.0
SECONDS_AT_A_STOP = 10.0
SECONDS_BETWEEN_COMMAND_LOOKS = 0.2
# The least time between two attempts to save: with a full quota they fail despite free bytes.
SECONDS_BETWEEN_ATTEMPTS = 10.0


class Checkpointer:
    """Saves and loads one run. Every rank has a Checkpointer and calls its methods in one order.

    samples: the training samples, whose fingerprint is saved. print_line: prints a line; called on
    rank 0 only. check_replicas: collective; called with the step, it raises RuntimeError if the
    replicas' copies of the state differ; None: saves are not checked. exchange: passes small values
    between all ranks. Raise UserError if the checkpoints' folder cannot be written.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        optimizer: Optimizer,
        context: Context | None = None,
        samples: Samples | None = None,
        print_line: Callable[[str], None] = print,
        check_replicas: Callable[[int], None] | None = None,
        chosen: Chosen | None = None,
    ):
        """Prepare to save and to load; if the run saves, rank 0 makes the folder. Collective.

        chosen: the checkpoint that `resume` loads; None: `resume` chooses it.
        """
        self.config = config
        self.run = config.run
        self.mesh = mesh
        self.optimizer = optimizer
        self.samples = samples
        self.recorder = mesh.recorder
        self.is_rank_0 = mesh.rank == 0
        self.print_line = print_line if self.is_rank_0 else lambda line: None
        self._check_replicas = check_replicas
        self._checked_step = -1  # the step after which the replicas were compared last
        self.parent = checkpoints_folder(config)
        name = "checkpoints"
        if context is None:
            self.exchange = StoreExchange(None, 0, 1, name, self.recorder)
        else:
            store = context.store
            self.exchange = StoreExchange(store, context.rank, context.size, name, self.recorder)
        # Rank 0's random text, in the names of hidden folders: each start of a run has its own.
        self.token = self.exchange.agree(os.urandom(4).hex(), lambda tokens: tokens[0])
        self.writer = Writer(self.run, mesh.rank, self.parent, self.exchange, self.recorder)
        if self.run.after_save and self.is_rank_0:
            self.writer.after_save = AfterSave(self.run.after_save, self.run.out)
        self.chosen = chosen
        self.kinds = saved_kinds(config, optimizer)
        self.buffers = HostBuffers(optimizer.device)
        self.saves = Saves()
        # On rank 0, the progress at the newest complete save that led to the present state; None:
        # there is none. After a resume from an older checkpoint the newer ones do not count.
        self.newest: Progress | None = None
        # What the model is beyond its shape, on rank 0: by the data, and by the loaded checkpoint.
        self._record_of_data: ModelRecord | None = None
        self._loaded_record: ModelRecord | None = None
        self._pending: PendingSave | None = None  # the running save, until its end is printed
        self._thread: threading.Thread | None = None  # writes the pending save, if asynchronous
        self._stopping = False  # True: training has ended, and messages do not say "goes on"
        if self.run.saves and self.is_rank_0:
            self._prepare_folder()
            self._read_record()

    def _prepare_folder(self) -> None:
        """Make the folder of checkpoints and delete unfinished ones in it; UserError on failure."""
        try:
            os.makedirs(self.parent, exist_ok=True)
            unfinished = folders.remove_leftovers(self.parent)
        except OSError as error:
            problem = error.strerror or error
            raise CheckpointError(f"cannot write in {self.parent}: {problem}") from None
        if unfinished:
            self.print_line(f"removed {len(unfinished)} unfinished checkpoints from {self.parent}")

    def after_step(self, progress: Progress, last: bool = False, requested: bool = False) -> None:
        """Print how a finished write ended, and begin a save if a save is due. Collective.

        Called after each step. last: whether it is the run's last step. requested: save in any
        case, if this step is not saved yet.
        """
        self._report()
        self._report_commands()
        requested = requested and progress.iteration != self.saves.step
        if requested or (self.run.saves and self._is_due(progress.iteration, last)):
            self.save(progress)

    def _is_due(self, iteration: int, last: bool) -> bool:
        """Return whether a save is due: after the last step, or after a multiple of --save-every.

        If a multiple was not saved because its loss was not finite, a later step is due instead.
        """
        if iteration == self.saves.step:
            return False
        every = self.run.save_every
        if last or not every:
            return last
        newest_multiple = iteration - iteration % every
        return newest_multiple > self.saves.step

    @property
    def requested_action(self) -> RequestedAction:
        """SAVE on rank 0 after --save-every-minutes, else GO_ON; ranks do the largest action."""
        minutes = (time.monotonic() - self.saves.began) / 60
        is_due = 0 < self.run.save_every_minutes <= minutes
        if is_due and self.is_rank_0:
            return RequestedAction.SAVE
        return RequestedAction.GO_ON

    def _broadcast(self, answer: bool) -> bool:
        """Return rank 0's answer on every rank: the others contribute only False. Collective."""
        return bool(self._largest(int(answer and self.is_rank_0)))

    def _largest(self, answer: int) -> int:
        """Return the largest answer of all ranks. Collective."""
        answers = torch.tensor([answer], device=self.optimizer.device)
        self.mesh.world.at_once.all_reduce(answers, MAX).wait()  # nothing overlaps with it
        return int(self.mesh.world.values(answers)[0])

    @property
    def _newest_step(self) -> int:
        """The step of this run's newest complete save or loaded checkpoint, on rank 0; else -1."""
        return -1 if self.newest is None else self.newest.iteration

    @property
    def enabled(self) -> bool:
        """Whether the run saves at regular steps or times."""
        return self.run.saves

    @property
    def saving(self) -> bool:
        """Whether this rank is still writing a save, or has not yet printed how it ended."""
        return self._pending is not None

    @property
    def bytes_needed(self) -> int:
        """The bytes that one checkpoint of this run takes on the disk; on rank 0 only."""
        needed = bytes_of_a_save(self.config, self.optimizer, self.kinds)
        if record := self.record:
            needed += sum(map(len, record.files.values()))
        return needed

    @property
    def record(self) -> ModelRecord | None:
        """What a checkpoint keeps for transformers: config.json's fields and the tokenizer's files.

        None on all ranks but rank 0. It is read when it is first asked for: a run that neither
        saves nor writes samples of text does not read a tokenizer.
        """
        if not self.is_rank_0:
            return None
        own = self._record_of_data or self._read_record()
        return self._loaded_record.after_training(own) if self._loaded_record else own

    @property
    def seconds_to_save(self) -> float:
        """How long a save takes, in seconds: the duration of the last save or, before the first,
        the time to write this rank's bytes to a slow disk; twice that while a save is running.
        """
        if self.saves.seconds is None:
            self.saves.seconds = seconds_of_first_save(self.optimizer)
        if self.saving:
            return 2 * self.saves.seconds
        return self.saves.seconds

    def check_replicas(self, iteration: int) -> None:
        """Compare the replicas' copies of the state after this step, unless that was done before.

        Raise RuntimeError if they differ. Every save begins with this check: if a rank's corrupted
        state were saved, a restart would load the same wrong values on all ranks, and no later
        check could find them. Collective.
        """
        if self._check_replicas is None or self._checked_step == iteration:
            return
        self.recorder.enter("check replicas")
        self._check_replicas(iteration)
        self._checked_step = iteration

    def save(self, progress: Progress) -> None:
        """Wait until the previous save has ended, and begin to save this step. Collective."""
        began = time.perf_counter()
        self.check_replicas(progress.iteration)
        self.recorder.enter("save")
        self._wait()  # for the previous save: all saves use the same host buffers
        self.saves.step = progress.iteration
        self.saves.began = time.monotonic()
        name = folders.folder_name(progress.iteration)
        # The folder has a hidden name until the checkpoint is complete. Only rank 0 makes it.
        hidden = os.path.join(self.parent, f".{name}.{self.token}.partial")
        if not self._broadcast(self.is_rank_0 and self._can_begin(hidden, progress.iteration)):
            return  # rank 0 has printed why; training goes on
        attributes = self._attributes(progress) if self.is_rank_0 else {}  # of index.h5
        shards = shards_to_write(self.optimizer)
        save = PendingSave(progress, self.kinds, hidden, attributes, shards, began)
        if record := self.record:
            save.record_files = record.contents()
        save.checks = ("replicas",) if self._check_replicas else ()  # the manifest names them
        self._pending = save  # `_report` prints later how the save ended
        if self.run.async_save:
            arguments = (save, self._copy_to_host(save))
            self._thread = threading.Thread(target=self.writer.write, args=arguments, daemon=True)
            self._thread.start()
        else:
            self.writer.write(save, self._read(save))
        save.pause = time.perf_counter() - began

    def _can_begin(self, hidden: str, step: int) -> bool:
        """Make the hidden folder; False if that fails or the disk lacks room. On rank 0 only."""
        needed = self.bytes_needed
        try:
            os.makedirs(self.parent, exist_ok=True)
            free = shutil.disk_usage(self.parent).free
            if free < needed:
                needs = f"{os.strerror(errno.ENOSPC)}: it may take {needed / 1e6:.1f} MB"
                raise OSError(f"{needs}, and {free / 1e6:.1f} MB are free")
            shutil.rmtree(hidden, ignore_errors=True)
            os.mkdir(hidden)
        except OSError as error:
            self._print_failure(step, str(error))
            return False
        return True

    def _read(self, save: PendingSave) -> dict[str, Iterable[np.ndarray]]:
        """Return, by kind, an iterator that reads this rank's shards for a synchronous save."""

        def runs(kind: str) -> Iterator[np.ndarray]:
            for shard in save.shards:
                yield shard.read(kind, shard.start, shard.stop).cpu().numpy()

        return {kind: runs(kind) for kind in save.kinds}

    def _copy_to_host(self, save: PendingSave) -> dict[str, Iterable[np.ndarray]]:
        """Return, by kind, this rank's shards, copied to host memory that the next save reuses."""
        if not save.shards:
            return {kind: [] for kind in save.kinds}
        count = count_elements(save.shards)
        for kind, dtype in saved_types(save.shards[0], save.kinds).items():
            # A generator: a list would hold all tensors at once that `read` may make on the GPU.
            runs = (shard.read(kind, shard.start, shard.stop) for shard in save.shards)
            self.buffers.copy(kind, runs, count, dtype)
        self.buffers.finish()
        return {kind: self.buffers.arrays(kind) for kind in save.kinds}

    def begin_pinning(self) -> None:
        """Begin to allocate the host buffers, if the run saves asynchronously."""
        shards = shards_to_write(self.optimizer)
        if self.run.saves and self.run.async_save and shards:
            types = saved_types(shards[0], self.kinds)
            self.buffers.begin_pinning(count_elements(shards), types)

    def save_now(self, progress: Progress) -> bool:
        """Save this step unless it is saved; return whether its save is complete. Collective."""
        if progress.iteration != self.saves.step:
            self.save(progress)
        self._wait()
        return self._is_visible(progress)

    def save_to_stop(self, progress: Progress) -> bool:
        """Save all that a resume needs in this run's folder; return whether that succeeded.

        Wait until the save has ended. Called when the run stops early. Collective.
        """
        self._wait()
        self._stopping = True
        # Save this step again if its checkpoint is in another folder or has no optimizer state.
        all_kinds = ("weights", *self.optimizer.state_kinds)
        if not self._is_visible(progress) or self.kinds != all_kinds:
            self.kinds = all_kinds
            self.saves.step = -1
        return self.save_now(progress)

    def _is_visible(self, progress: Progress) -> bool:
        """Return whether this run's folder has a complete checkpoint of this state. Collective."""
        # A folder of this step from before a resume at an earlier step does not count.
        complete = os.path.isdir(self.writer.folder_of(progress))
        return self._broadcast(complete and self._newest_step == progress.iteration)

    def resume(self) -> Progress:
        """Load what --resume asks for, begin to allocate the host buffers, and return the progress.

        The next save moves checkpoints away that did not lead to the loaded state: those of later
        steps, or all of them if the run begins at step 0, or if the loaded checkpoint is in another
        folder or gave only weights. Until then nothing is moved. Collective.
        """
        if not self.run.resume:
            self.begin_pinning()
            why = "a later run in this folder began at step 0, without --resume"
            self.writer.other_course = (-1, why)
            return Progress()
        from checkpointing.load import Loader  # imported here: a run from step 0 does not need it

        loader = Loader(
            self.config,
            self.mesh,
            self.optimizer,
            self.exchange,
            self.samples,
            self.print_line,
            self.chosen,
        )
        progress = loader.resume()
        self._loaded_record = loader.record
        self.begin_pinning()
        self.saves.step = progress.iteration
        chosen = loader.chosen
        if chosen and chosen.folder:  # `why` is printed when the first save moves checkpoints away
            why = f"this run continues from {chosen.folder}"
            if chosen.damaged:
                why += f"; {', '.join(chosen.damaged)} cannot be loaded"
            folder = os.path.realpath(os.path.dirname(os.path.abspath(chosen.folder)))
            if folder == os.path.realpath(self.parent) and not self.run.load_weights_only:
                self.newest = progress
            self.writer.other_course = (self._newest_step, why)
        commands = self.writer.after_save
        if commands is not None:
            again = commands.resume(self.parent, self._newest_step)
            if again:
                self.print_line(
                    f"--after-save runs again, since it was cut off: {', '.join(again)}"
                )
        return progress

    def close(self) -> None:
        """Wait until the running save has ended, if a save is running."""
        self._wait()

    def finish(
        self, progress: Progress, stop_requested: Callable[[], bool] = lambda: False
    ) -> None:
        """If the last save failed, try again; raise SaveError if that fails too. Collective.

        Called after the last step. While the disk lacks room, wait and try again for at most
        SECONDS_FOR_ROOM, or until `stop_requested` returns True on a rank.
        """
        self._wait()
        if not self._broadcast(self.saves.failed):
            return
        self._stopping = True
        self.saves.step = -1  # so that this step counts as not saved yet
        limit = time.monotonic() + SECONDS_FOR_ROOM
        while not self.save_now(progress):
            lacks_room = self._broadcast(self.saves.lacks_room)
            if not lacks_room or not self._await_room(limit, stop_requested):
                name = folders.folder_name(progress.iteration)
                newest = self._describe_newest()
                raise SaveError(f"training is complete, but {name} could not be saved: {newest}")
            # Compare the replicas again: memory may have been corrupted during a long wait.
            self.saves.step = -1  # save this step again
            self._checked_step = -1

    def finish_commands(self, stopped_early: bool, stop_requested: Callable[[], bool]) -> None:
        """Wait for the commands of --after-save that run or wait. Collective.

        Called when the run ends. The wait ends after SECONDS_FOR_COMMANDS, or if `stop_requested`
        returns True on a rank; after an early stop, whose time may be short, after
        SECONDS_AT_A_STOP. A command that runs then goes on without the run.
        """
        if not self.run.after_save:
            return
        commands = self.writer.after_save
        began = time.monotonic()
        limit = SECONDS_AT_A_STOP if stopped_early else SECONDS_FOR_COMMANDS
        ended, go_on, give_up = range(3)
        action = go_on
        while action == go_on:
            self.recorder.enter("wait for --after-save")  # the watchdog counts this as progress
            waited = time.monotonic() - began
            request = go_on if commands is not None and commands.steps else ended
            is_over = request == go_on and waited >= limit
            if is_over or (not stopped_early and stop_requested()):
                request = give_up
            action = self._largest(request)
            if action == go_on:
                self._report_commands()
                time.sleep(SECONDS_BETWEEN_COMMAND_LOOKS)
        self._report_commands()
        if commands is not None and (steps := commands.steps):
            running, *waiting = map(folders.folder_name, steps)
            text = f"note: --after-save of {running} goes on without the run"
            if waiting:
                text += f"; {', '.join(waiting)} wait for the next start"
            self.print_line(text)

    def _report_commands(self) -> None:
        """Print how commands of --after-save have ended since the last call."""
        if self.writer.after_save is not None:
            for note in self.writer.after_save.notes():
                self.print_line(note)

    def _await_room(self, limit: float, stop_requested: Callable[[], bool]) -> bool:
        """Wait for room on the disk; return False if time.monotonic() passes `limit`, or if
        `stop_requested` returns True on a rank. Collective.
        """
        if not self.saves.announced:
            self.saves.announced = True
            self.print_line(
                f"training is complete; for up to {SECONDS_FOR_ROOM / 60:g} minutes the run waits "
                f"for room for its last checkpoint, {self.bytes_needed / 1e6:.1f} MB"
            )
        next_attempt = time.monotonic() + SECONDS_BETWEEN_ATTEMPTS
        # Each rank requests an action after each look; all ranks do the largest that is requested.
        go_on, try_again, give_up = range(3)
        action = go_on
        while action == go_on:
            self.recorder.enter("wait for room")  # the watchdog counts this as progress
            with self.recorder.waiting_for("room"):
                time.sleep(SECONDS_BETWEEN_LOOKS)
            is_over = self.is_rank_0 and time.monotonic() >= limit
            request = try_again if self._may_have_room(next_attempt) else go_on
            if is_over or stop_requested():
                request = give_up
            action = self._largest(request)
        return action == try_again

    def _may_have_room(self, next_attempt: float) -> bool:
        """Return whether rank 0 asks for the next attempt: it is time, and the disk has room."""
        if not self.is_rank_0 or time.monotonic() < next_attempt:
            return False
        with contextlib.suppress(OSError):  # a file system that fails now may answer the next look
            return shutil.disk_usage(self.parent).free >= self.bytes_needed
        return False

    def _wait(self) -> None:
        """Wait until this rank's part of the running save has ended, and print how it ended."""
        if self._thread is not None:
            with self.recorder.waiting_for("writer"):
                self._thread.join(self.exchange.seconds)  # then a silent rank counts as lost
            if self._thread.is_alive():
                minutes = self.exchange.seconds / 60
                raise TimeoutError(f"step {self.saves.step} is not saved after {minutes:g} minutes")
        self._report()

    def _report(self) -> None:
        """Print how the last save ended, if it has ended; raise its error unless it is OSError."""
        save = self._pending
        if save is None or (self._thread is not None and self._thread.is_alive()):
            return
        self._pending = None
        self._thread = None
        for note in save.notes:
            self.print_line(note)
        if isinstance(save.error, OSError):  # a failed disk does not end the run
            self._print_failure(save.progress.iteration, str(save.error))
            return
        if save.error is not None:
            raise save.error
        self.saves.seconds = save.seconds
        self.newest = save.progress
        self.saves.failed = False
        self.print_line(
            f"saved {self.writer.folder_of(save.progress)}: {save.bytes / 1e9:.3f} GB in "
            f"{save.seconds:.2f} s, pause {save.pause:.3f} s"
        )

    def _print_failure(self, step: int, problem: str) -> None:
        """Print that the save of a step failed, and note it in `saves`; problem: why it failed."""
        problem = " ".join(problem.split())  # HDF5's messages have line breaks
        self.saves.failed = True
        self.saves.lacks_room = any(text in problem for text in NO_ROOM)
        next_action = "" if self._stopping else "training goes on, "
        name = folders.folder_name(step)
        newest = self._describe_newest()
        self.print_line(f"{name} was not saved in {self.parent}: {problem}; {next_action}{newest}")

    def _describe_newest(self) -> str:
        """Return the end of a message that names the run's newest checkpoint; on rank 0."""
        if self.newest is None:
            return "no checkpoint has been saved so far"
        return f"the newest is {folders.folder_name(self.newest.iteration)}"

    def _read_record(self) -> ModelRecord:
        """Read the record of a model that only this run trains: the tokenizer of its data.

        Training needs no tokenizer: if it cannot be read, a line says so. Called on rank 0 only.
        """
        try:
            self._record_of_data = model_record.record_of_corpora(self.config)
        except UserError as error:
            self.print_line(f"checkpoints of this run have no tokenizer: {error}")
            self._record_of_data = model_record.without_tokenizer(self.config.model.seq_length)
        return self._record_of_data

    def ends(self) -> tuple[int, ...]:
        """Return the ids of the tokens that end a text of this model. Collective."""
        record = self.record
        own = record.ends if record else ()
        return tuple(self.exchange.agree(own, lambda values: values[0]))

    def _attributes(self, progress: Progress) -> Attributes:
        """Return the attributes of index.h5 by group, then by name. Called on rank 0 only."""
        config = self.config
        timeline = Timeline(config)
        data = {
            "seed": self.config.training.seed,
            "fingerprint": fingerprint(self.samples, progress.consumed_samples),
            "usage": progress.usage.text(),
            # A resume has to know this of the run (config/past.py).
            "past": to_text(
                config.past.with_start(timeline.batches),
                timeline.ordered,
                config.past.run,
                tuple(s.begun() for s in timeline.phases if s.samples < progress.consumed_samples),
                config.past.branch,
            ),
            "total_samples": timeline.total_samples,
        }
        return {
            "model": dataclasses.asdict(self.config.model),
            "progress": progress.counts(),
            "optimizer": {"kind": self.optimizer.state_name, **self.optimizer.scalars()},
            "data": data,
            "run": origin(self.config.as_dict()),
        }
