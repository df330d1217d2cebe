"""What observes the steps of a run: the trainer calls every observer at the same points.

    before_step     before the passes of a step
    after_step      after its update, when the statistics of all ranks are known
    after_skip      in place of both, if --skip-samples leaves the step's batch out
    between_steps   after each step or batch left out: what takes time, such as an evaluation
    at_end          after the last step
    at_exit         when the run ends, also early or by an error

A new observer is a class in a file of its own and a line in `Trainer._make_observers`, which has
the order in which observers are called. Every rank has the same observers and calls them in the
same order, so that an observer may enter collectives in each method but `at_exit`.
"""

from dataclasses import dataclass, field

from checkpointing.state import Progress
from distributed.stop_conditions import RequestedAction
from telemetry.step_stats import StepStats
from zero import StepResult


@dataclass
class Step:
    """A step of the run; equal on every rank, but for what `stats` says of times."""

    iteration: int
    is_last: bool  # of the whole run
    consumed: int  # samples before the step
    batch: int  # its samples
    length: int  # tokens of a sample
    lr: float
    done: Progress  # the progress before the step, and from `after_step` on after it
    stats: list[StepStats] = field(default_factory=list)  # of all ranks, from `after_step` on
    action: float = RequestedAction.GO_ON  # the largest request so far of all ranks
    saves: bool = False  # whether one of these requests was to save, and go on

    @property
    def samples(self) -> range:
        """The numbers of the step's samples in the run."""
        return range(self.consumed, self.consumed + self.batch)

    @property
    def stops(self) -> bool:
        """Whether the run saves and stops after this step, which is not its last one."""
        return self.action == RequestedAction.SAVE_AND_STOP and not self.is_last

    def request(self, action: float) -> None:
        """Take a request into account, which is the same on all ranks; the largest one is done.

        `StopConditions.reason` says why a run is to stop.
        """
        self.saves |= action == RequestedAction.SAVE
        self.action = max(self.action, action)


class Observer:
    """Does nothing at any point; an observer overrides the methods that it needs."""

    def before_step(self, step: Step) -> None:
        """Prepare for the passes of a step, which begin next."""

    def after_step(self, step: Step, result: StepResult) -> None:
        """Take note of a step that was done; result: its loss and gradient norm."""

    def after_skip(self, step: Step) -> None:
        """Take note of a step whose batch was left out."""

    def between_steps(self, step: Step) -> None:
        """Do what is due after a step; with `step.stops` only what cannot wait."""

    def seconds_between(self, step: Step) -> float:
        """Return how long `between_steps` will probably take; --exit-after-minutes counts it."""
        return 0.0

    def at_end(self, done: Progress) -> None:
        """Do what is due after the last step of the run; done: the progress then."""

    def at_exit(self) -> None:
        """Write what waits to be written. Without collectives: other ranks may have failed."""
