"""The checkpoints of a run, as the training loop uses them: `Checkpoints`.

The work is done by a `Checkpointer` (save.py), which reads and writes the files; `Checkpoints`
passes each call on to it. The Checkpointer is made at once if the run saves or resumes, otherwise
by the first save, such as the save of a run that is stopped early. So a run without checkpoints
does not import the modules that write and read files, nor h5py.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from checkpointing.state import Progress, bytes_of_a_save, saved_kinds, seconds_of_first_save
from config.schema import Config
from data import Samples
from distributed.context import Context
from distributed.mesh import Mesh
from distributed.stop_conditions import RequestedAction
from distributed.store import StoreExchange
from zero import Optimizer

if TYPE_CHECKING:
    from checkpointing.resumed import Chosen
    from checkpointing.save import Checkpointer


class Checkpoints:
    """The checkpoints of one run, as the training loop uses them, on every rank.

    The methods and parameters are those of `save.Checkpointer`, which explains them. exchange:
    passes small values between all ranks. enabled: whether the run saves at regular steps or times.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        optimizer: Optimizer,
        context: Context,
        samples: Samples | None,
        print_line: Callable[[str], None],
        check_replicas: Callable[[int], None] | None,
        chosen: "Chosen | None" = None,
    ):
        """Keep what a Checkpointer needs, and make it if the run saves or resumes. Collective.

        chosen: the checkpoint of --resume; None: `resume` chooses it.
        """
        self.config = config
        self.enabled = config.run.saves  # whether the run saves regularly
        self.optimizer = optimizer
        self.recorder = mesh.recorder
        store = context.store
        rank = context.rank
        size = context.size
        # The trainer uses this exchange for values of all ranks; the saves have their own exchange.
        self.exchange = StoreExchange(store, rank, size, "run", mesh.recorder)
        self._check_replicas = check_replicas
        # The arguments with which `_checkpointer` makes the Checkpointer, perhaps much later.
        self._arguments = (
            config,
            mesh,
            optimizer,
            context,
            samples,
            print_line,
            check_replicas,
            chosen,
        )
        self._made: Checkpointer | None = None  # None until it is needed
        self._begun = False  # whether `resume` was called
        # On rank 0, the last step whose audit (--audit-every) found no wrong results; -1: there is
        # none. The newest checkpoint of this step or an earlier one is never deleted, because it
        # is the last that is known to be right.
        self.covered = -1
        if self.enabled or config.run.resume:
            self._checkpointer()

    def _checkpointer(self) -> "Checkpointer":
        """Return the run's `Checkpointer`, which the first call makes.

        Every rank must make the first call at the same point, because making it is collective.
        """
        if self._made is None:
            from checkpointing.save import Checkpointer

            self._made = Checkpointer(*self._arguments)
            if self._begun:  # made by the first save of a run that does not resume
                self._made.resume()
        return self._made

    def resume(self) -> Progress:
        self._begun = True
        return self._made.resume() if self._made else Progress()

    def after_step(self, progress: Progress, last: bool, requested: bool) -> None:
        if self._made or requested:
            made = self._checkpointer()
            made.writer.covered = self.covered
            made.after_step(progress, last, requested)

    @property
    def requested_action(self) -> RequestedAction:
        return self._made.requested_action if self._made else RequestedAction.GO_ON

    @property
    def newest(self) -> Progress | None:
        return self._made.newest if self._made else None

    @property
    def saving(self) -> bool:
        return self._made is not None and self._made.saving

    @property
    def bytes_needed(self) -> int:
        kinds = saved_kinds(self.config, self.optimizer)
        return bytes_of_a_save(self.config, self.optimizer, kinds)

    @property
    def seconds_to_save(self) -> float:
        return self._made.seconds_to_save if self._made else self._seconds_of_first_save

    @functools.cached_property
    def _seconds_of_first_save(self) -> float:
        return seconds_of_first_save(self.optimizer)

    def check_replicas(self, iteration: int) -> None:
        if self._made:
            self._made.check_replicas(iteration)
        elif self._check_replicas:
            self.recorder.enter("check replicas")
            self._check_replicas(iteration)

    def save_now(self, progress: Progress) -> bool:
        return self._checkpointer().save_now(progress)

    def save_to_stop(self, progress: Progress) -> bool:
        return self._checkpointer().save_to_stop(progress)

    def ends(self) -> tuple[int, ...]:
        return self._made.ends() if self._made else ()

    def close(self) -> None:
        if self._made:
            self._made.close()

    def finish(self, progress: Progress, stop_requested: Callable[[], bool]) -> None:
        if self._made:
            self._made.finish(progress, stop_requested)
