"""Runs layouts in worlds of ranks, and compares each with one rank.

    with Engine(config) as engine:
        for outcome in engine.run(layouts.cover(config, ranks=4)):
            print(outcome.layout, outcome.difference)

config: small (shrink.py). The first run is that on one rank; every outcome has what differs from it
first, or why the run has no result.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from check.compare import Difference, Reference, first_difference
from check.layouts import ranks_of
from check.ranks import Failure, Worlds
from check.runs import Job, work
from config.errors import UserError
from config.run_options import Run
from config.schema import Config, Layout


@dataclass
class Outcome:
    """What came of one layout.

    difference: the first tensor that is not one rank's. failure: why there is no result. seconds:
    since the check began. resumed_from: the layout that saved what this one went on with, after
    step `resumed_step`.
    """

    layout: Layout
    difference: Difference | None = None
    failure: Failure | None = None
    seconds: float = 0.0
    resumed_from: Layout | None = None
    resumed_step: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether the run is one rank's."""
        return self.difference is None and self.failure is None


class Engine:
    """Worlds of ranks and the run of one rank with which others are compared."""

    def __init__(self, config: Config, at_once: int = 2, seconds: float = 90.0):
        """config: small. at_once: runs at a time. seconds: the limit of one run."""
        self.config = config
        self.began = time.monotonic()
        plain = Run(device=config.run.device, watchdog=False, bind_cores=False)
        self.worlds = Worlds(work, plain, at_once, seconds)
        self.number = 0  # of the jobs so far
        self._reference: Reference | None = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *of_error: Any) -> None:
        self.worlds.__exit__(*of_error)

    @property
    def reference(self) -> Reference:
        """The run on one rank. Raise UserError if it fails: then there is nothing to compare."""
        if self._reference is None:
            alone = dataclasses.replace(self.config.layout, dp=1)
            ((_, answers),) = self.worlds.answers([(1, self._job(alone))])
            if isinstance(answers, Failure):
                raise UserError(f"the run on one rank fails: {answers.text}")
            self._reference = Reference(answers[0])
        return self._reference

    def _job(self, layout: Layout, save: int = 0, **run: Any) -> Job:
        """Return the job of a layout. run: options of Run."""
        self.number += 1
        changed = dataclasses.replace(self.config.run, **run)
        config = dataclasses.replace(self.config, layout=layout, run=changed)
        return Job(config, save, self.number)

    def run(
        self, layouts: Sequence[Layout], may_begin: Callable[[], bool] = lambda: True
    ) -> Iterator[Outcome]:
        """Yield the outcome of each layout as it ends; the run of one rank comes before.

        may_begin: whether a further layout may begin; if not, those that run are waited for.
        """
        reference = self.reference
        jobs = [(ranks_of(layout), self._job(layout)) for layout in layouts]
        for number, answers in self.worlds.answers(jobs, may_begin):
            yield self._outcome(layouts[number], answers, reference)

    def _outcome(
        self, layout: Layout, answers: list[Any] | Failure, reference: Reference, begin: int = 0
    ) -> Outcome:
        seconds = time.monotonic() - self.began
        if isinstance(answers, Failure):
            return Outcome(layout, failure=answers, seconds=seconds)
        difference = first_difference(reference, answers, layout.tp, begin)
        return Outcome(layout, difference, seconds=seconds)

    def resume(
        self, saved_by: Layout, layouts: Sequence[Layout], step: int, folder: Path
    ) -> Iterator[Outcome]:
        """Save after a step in one layout and go on in others; yield the outcome of each.

        folder: for the checkpoint. If the save fails, the only outcome is of that layout.
        """
        reference = self.reference
        job = self._job(saved_by, save=step, out=str(folder))
        ((_, answers),) = self.worlds.answers([(ranks_of(saved_by), job)])
        if isinstance(answers, Failure):
            yield self._outcome(saved_by, answers, reference)
            return
        jobs = []
        for layout in layouts:
            jobs.append((ranks_of(layout), self._job(layout, out=str(folder), resume="auto")))
        for number, answers in self.worlds.answers(jobs):
            outcome = self._outcome(layouts[number], answers, reference, step)
            outcome.resumed_from, outcome.resumed_step = saved_by, step
            yield outcome
