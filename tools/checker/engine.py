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

from base.errors import UserError
from config.schema import Config, Layout
from tools.checker.compare import Difference, Reference, first_difference
from tools.checker.layouts import ranks_of
from tools.checker.ranks import Failure, Worlds
from tools.checker.runs import CheckedRun, RunAnswer, Worker

SECONDS_OF_ONE = 1800.0  # one rank waits for nobody; a busy machine may take long
LONGER = 10  # ranks share cores that one rank had alone


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


def difference_of(
    reference: Reference, one: RunAnswer, answers: list[RunAnswer], begin: int = 0
) -> Difference | None:
    """Return what of a layout's run is not one rank's, or None.

    one: the answer of one rank, whose tensors `reference` has. answers: of the layout's ranks.
    begin: the steps that were done before a resume.
    """
    difference = first_difference(reference, [answer.seen for answer in answers if answer.seen])
    more = list(_others(reference, one, answers, begin))
    if difference is None and more:
        difference = Difference((-1, "number", more[0].partition(":")[0]), [], None)
    if difference is not None:
        difference.more = more
    return difference


def _others(
    reference: Reference, one: RunAnswer, answers: list[RunAnswer], begin: int
) -> Iterator[str]:
    """Yield what is wrong beside tensors: evaluations, loads of experts, replicas."""
    first, most = answers[0], reference.tolerance
    for name, loss in one.evaluated.items():
        other = first.evaluated.get(name, float("nan"))
        if not abs(other - loss) <= most * abs(loss):
            yield f"{name} loss: {other:.12g} for {loss:.12g}"
    for step, (loads, others) in enumerate(zip(one.loads[begin:], first.loads), begin + 1):
        if not all(abs(a - b) <= most * abs(a) for a, b in zip(loads, others)):
            yield f"loads of experts of step {step}: {others} for {loads}"
            break
    for sentence in [x for answer in answers for x in answer.unequal][:1]:
        yield f"replicas: {sentence}"


class Engine:
    """Worlds of ranks and the run of one rank with which others are compared."""

    def __init__(self, config: Config, at_once: int = 2, seconds: float = 90.0):
        """config: small. at_once: runs at a time.

        seconds: a layout is taken to hang after this time, or LONGER times the time of one rank.
        """
        self.config = config
        self.began = time.monotonic()
        self.at_once, self.seconds = at_once, seconds
        self.plain = dataclasses.replace(config.run, watchdog=False, bind_cores=False)
        self.number = 0  # of the jobs so far
        self.one: RunAnswer | None = None  # of one rank
        self.worlds: Worlds | None = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *of_error: Any) -> None:
        if self.worlds is not None:
            self.worlds.__exit__(*of_error)

    def begin(self) -> RunAnswer:
        """Run one rank and return its answer. Raise UserError if it fails: nothing can be compared.

        The worlds that are forked after this have its tensors.
        """
        # Ranks share what this process has imported: each of them would import these by itself.
        import h5py  # noqa: F401

        from optim import fsdp  # noqa: F401

        alone = dataclasses.replace(self.config.layout, dp=1)
        began = time.monotonic()
        with Worlds(Worker(), self.plain, 1, SECONDS_OF_ONE) as worlds:
            ((_, answers),) = worlds.answers([(1, self._job(alone))])
        limit = max(self.seconds, LONGER * (time.monotonic() - began))
        if isinstance(answers, Failure):
            raise UserError(f"the run on one rank fails: {answers.text}")
        (self.one,) = answers
        precision = self.config.training.precision
        self.reference = Reference(self.one.pieces, self.one.aliases, precision)
        self.one.pieces = []
        worker = Worker(self.reference)
        self.worlds = Worlds(worker, self.plain, self.at_once, limit)
        return self.one

    def _begun(self) -> Worlds:
        """Return the worlds, after the run of one rank."""
        if self.worlds is None:
            self.begin()
        assert self.worlds is not None  # `begin` has made it
        return self.worlds

    def _job(self, layout: Layout, save: int = 0, **run: Any) -> CheckedRun:
        """Return the job of a layout. run: options of Run."""
        self.number += 1
        changed = dataclasses.replace(self.config.run, **run)
        config = dataclasses.replace(self.config, layout=layout, run=changed)
        return CheckedRun(config, save, self.number)

    def run(
        self, layouts: Sequence[Layout], may_begin: Callable[[], bool] = lambda: True
    ) -> Iterator[Outcome]:
        """Yield the outcome of each layout as it ends; the run of one rank comes before.

        may_begin: whether a further layout may begin; if not, those that run are waited for.
        """
        worlds = self._begun()
        jobs = [(ranks_of(layout), self._job(layout)) for layout in layouts]
        for number, answers in worlds.answers(jobs, may_begin):
            yield self._outcome(layouts[number], answers)

    def _outcome(self, layout: Layout, answers: list[Any] | Failure, begin: int = 0) -> Outcome:
        """Return what came of a layout; begin: the steps that were done before a resume."""
        seconds = time.monotonic() - self.began
        if isinstance(answers, Failure):
            return Outcome(layout, failure=answers, seconds=seconds)
        assert self.one is not None  # it ran before
        difference = difference_of(self.reference, self.one, answers, begin)
        return Outcome(layout, difference, seconds=seconds)

    def resume(
        self, saved_by: Layout, layouts: Sequence[Layout], step: int, folder: Path
    ) -> Iterator[Outcome]:
        """Save after a step in one layout and go on in others; yield the outcome of each.

        folder: for the checkpoint. If the save fails, the only outcome is of that layout.
        """
        worlds = self._begun()
        job = self._job(saved_by, save=step, out=str(folder))
        ((_, answers),) = worlds.answers([(ranks_of(saved_by), job)])
        if isinstance(answers, Failure):
            yield self._outcome(saved_by, answers)
            return
        jobs = []
        for layout in layouts:
            jobs.append((ranks_of(layout), self._job(layout, out=str(folder), resume="auto")))
        for number, answers in worlds.answers(jobs):
            outcome = self._outcome(layouts[number], answers, step)
            outcome.resumed_from, outcome.resumed_step = saved_by, step
            yield outcome
