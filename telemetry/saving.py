"""Saves the run between its steps: when options, --save-switch or a signal ask for it."""

import math

from checkpointing.save import Checkpointer
from checkpointing.state import Progress
from distributed.stop_conditions import StopConditions
from telemetry.observer import Observer, Step
from zero import StepResult


class Saving(Observer):
    """Begins the saves of a run that are due; the last observer, so that all others have judged
    the state before it is saved.
    """

    def __init__(self, checkpoints: Checkpointer, conditions: StopConditions):
        """Save nothing yet. conditions: are told when a save that they requested is complete."""
        self.checkpoints = checkpoints
        self.conditions = conditions
        self.requested = False  # whether a save was requested and has not begun
        self.finite = True  # whether the newest step that was done had a finite loss

    def after_step(self, step: Step, result: StepResult) -> None:
        """Note whether the loss is finite."""
        self.finite = math.isfinite(result.loss)

    def between_steps(self, step: Step) -> None:
        """Save if that is due, unless the run stops, which saves in its own way. Collective."""
        step.request(self.conditions.action_after(step.done.consumed_samples))
        if step.stops:
            return
        self.requested |= step.saves
        # Nothing is saved after a loss that is not finite, because --keep-last might then delete
        # the newest good checkpoint. The request stays for a later step.
        if not step.is_last and not self.finite:
            return
        self.checkpoints.after_step(step.done, step.is_last, self.requested)
        self.requested = False
        if not self.checkpoints.saving:  # no save runs on in the background
            self.conditions.saved()  # removes the file of --save-switch

    def at_end(self, done: Progress) -> None:
        """Wait until the last save has ended."""
        self.checkpoints.close()
        self.conditions.saved()
