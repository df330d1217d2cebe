"""Runs the layouts of another program in fresh ranks, and compares each with one rank.

    with ProgramEngine(program, layouts) as engine:
        one = engine.begin()
        for outcome in engine.run(may_begin): ...

The run on one rank is done twice, which must give the same, and then with other last bits, which
says how far rounding alone moves each tensor.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from base.errors import ProgramError
from tools.checker.causes import title
from tools.checker.compare import Difference, Reference, Rounding, first_difference
from tools.checker.engine import LONGER, SECONDS_OF_ONE, Outcome, difference_of
from tools.checker.program_runs import Meeting, ProgramAnswer, ProgramRun, ProgramWorker
from tools.checker.programs import Program, ProgramLayout
from tools.checker.ranks import Failure, Start, Worlds, fork_all
from tools.checker.report import WIDTH
from tools.checker.rounding import DRAWS

MOST_LOADED = 3  # layouts in which a checkpoint of another one is loaded


class ProgramEngine:
    """The run of one rank, and the worlds of ranks whose runs are compared with it."""

    def __init__(
        self,
        program: Program,
        layouts: Sequence[ProgramLayout],
        at_once: int = 2,
        seconds: float = 90.0,
        meeting: Meeting | None = None,
        start: Start = fork_all,
    ):
        """Start no ranks yet. layouts: to run. at_once: runs at a time.

        seconds: a layout is taken to hang after this time, or after LONGER times the time of one
        rank. start, meeting: how ranks of a run are started and meet.
        """
        self.program, self.layouts, self.at_once, self.seconds = program, layouts, at_once, seconds
        self.began = time.monotonic()
        self.meeting, self.start = meeting or Meeting(), start
        self.one: ProgramAnswer = ProgramAnswer()
        self.limit = seconds
        self.equal: list[ProgramLayout] = []  # layouts that have run and are one rank's

    def __enter__(self) -> "ProgramEngine":
        return self

    def __exit__(self, *of_error: Any) -> None:
        """Nothing is left: each run's ranks end with it."""

    def begin(self) -> ProgramAnswer:
        """Run one rank and return its answer. Raise UserError if it fails, or is not repeatable."""
        one_rank = self.program.layouts[0]
        began = time.monotonic()
        worker = ProgramWorker(self.program)
        with self._worlds(worker, 1, SECONDS_OF_ONE) as worlds:
            ((_, answers),) = worlds.answers([(1, ProgramRun(one_rank))])
        self.limit = max(self.seconds, LONGER * (time.monotonic() - began))
        (one,) = self._of_one(answers)
        self.one = one
        for step, loss in enumerate(one.losses, 1):
            if not math.isfinite(loss):
                which = "no number" if math.isnan(loss) else f"{loss}"
                raise ProgramError(
                    f"{self.program.path.name}: on one rank the loss of step {step} is {which}, so "
                    f"that nothing can be compared"
                )
        self.reference = Reference(one.pieces, {}, one.width, Rounding(), of_program=True)
        one.pieces = []
        worker = ProgramWorker(self.program, self.reference, one.shapes)
        jobs = [ProgramRun(one_rank)]
        jobs += [ProgramRun(one_rank, draw, one.width) for draw in range(DRAWS)]
        with self._worlds(worker, self.at_once, self.limit) as worlds:
            for number, answers in worlds.answers([(1, job) for job in jobs]):
                (again,) = self._of_one(answers)
                if number:
                    self.reference.rounding.add(again.growth, set())
                elif again.seen and (differs := first_difference(self.reference, [again.seen])):
                    raise ProgramError(self._unrepeatable(differs))
        return one

    def _unrepeatable(self, difference: Difference) -> str:
        """Return a sentence on a run that gives other numbers when it is done again."""
        return (
            f"{self.program.path.name}: one rank that runs twice gives other numbers: step "
            f"{difference.key[0]}, {title(difference.key)}, off by {difference.off:.1e}. Nothing "
            f"can be compared: build() and step() must draw the same each time (dropout 0, a "
            f"generator with a seed)"
        )

    def _of_one(self, answers: Any) -> Any:
        """Return the answers of the run on one rank; UserError if it failed."""
        if not isinstance(answers, Failure):
            return answers
        lines = [text for stack in answers.stacks.values() for text in stack.splitlines()]
        text = f"the run on one rank fails: {answers.text}"
        if self.program.dtype is None and "dtype" in answers.text:
            text += (
                f" (torch's default type is float64 here; dtype = torch.float32 in "
                f"{self.program.path.name} changes it)"
            )
        raise ProgramError("\n  ".join([text, *lines]))

    def reference_of(self, outcome: Outcome) -> Reference:
        """Return the tensors of one rank with which an outcome was compared."""
        return self.reference

    def notes(self) -> Iterator[str]:
        """Yield a line on the precision, if the program computes in less than fp64."""
        if self.one.width != "fp64":
            yield (
                f"{'note':{WIDTH}s} in {self.one.width}, first {self.one.first}: a tensor may be "
                f"off by {self.reference.tolerance:.0e} of its largest element"
            )

    def _worlds(self, worker: ProgramWorker, at_once: int, seconds: float) -> Worlds:
        """Return worlds whose ranks do one run each."""
        return Worlds(worker, self.meeting, at_once, seconds, False, self.start)

    def run(self, may_begin: Callable[[], bool] = lambda: True) -> Iterator[Outcome]:
        """Yield the outcome of each layout as it ends. may_begin: see engine.Engine.run."""
        worker = ProgramWorker(self.program, self.reference, self.one.shapes)
        jobs = [(layout.ranks, ProgramRun(layout)) for layout in self.layouts]
        with self._worlds(worker, self.at_once, self.limit) as worlds:
            for number, answers in worlds.answers(jobs, may_begin):
                outcome = self._outcome(self.layouts[number], answers)
                self.equal += [self.layouts[number]] if outcome.is_equal else []
                yield outcome

    def resume(self, folder: Path) -> Iterator[Outcome]:
        """Save after the first step in a layout that is equal, and go on in other equal ones.

        Where some of them cannot load that, one of those saves too. Yield their outcomes; nothing,
        if the program has no functions for it, or a single step.
        """
        if not self.one.can_save or self.program.steps < 2:
            return
        rest = list(self.equal)
        while rest:
            saved_by = max(rest, key=lambda layout: len(layout.axes))
            others = [layout for layout in self.equal if layout is not saved_by]
            every = [self.program.layouts[0], *others, saved_by]
            can = [x for x in every if self.program.loads(saved_by.values, x.values)]
            rest = [layout for layout in rest if layout not in (saved_by, *can)]
            if can:  # the layout that saved comes last
                yield from self._resumed(saved_by, can[:MOST_LOADED], folder)

    def _resumed(
        self, saved_by: ProgramLayout, going_on: Sequence[ProgramLayout], folder: Path
    ) -> Iterator[Outcome]:
        """Save after the first step in a layout and go on in others; yield their outcomes."""
        step = 1
        saved = folder / saved_by.name.replace(" ", "-")
        saved.mkdir(parents=True)
        worker = ProgramWorker(self.program, self.reference, self.one.shapes)
        with self._worlds(worker, self.at_once, self.limit) as worlds:
            job = ProgramRun(saved_by, folder=str(saved), save=step)
            ((_, answers),) = worlds.answers([(saved_by.ranks, job)])
            if isinstance(answers, Failure):
                yield self._outcome(saved_by, answers)
                return
            jobs = [
                (layout.ranks, ProgramRun(layout, folder=str(saved), load=step))
                for layout in going_on
            ]
            for number, answers in worlds.answers(jobs):
                outcome = self._outcome(going_on[number], answers)
                outcome.resumed_from, outcome.resumed_step = saved_by, step
                yield outcome

    def _outcome(self, layout: ProgramLayout, answers: list[Any] | Failure) -> Outcome:
        """Return the outcome of a layout: a failure, or its difference from one rank."""
        outcome = Outcome(layout, seconds=time.monotonic() - self.began)
        if isinstance(answers, Failure):
            outcome.failure = answers
        elif missing := self._missing(answers):
            outcome.failure = Failure("refused", [0], missing)
        else:
            outcome.difference = difference_of(self.reference, self.one, answers)
        return outcome

    def _missing(self, answers: list[Any]) -> str:
        """Return what no rank of a layout has, of what one rank has; or nothing."""
        has = set().union(*(answer.shapes for answer in answers))
        name = self.program.path.name
        if lost := [each for each in self.one.shapes if each not in has]:
            return (
                f"no rank has the parameter {lost[0]!r}, which one rank has, nor {len(lost) - 1} "
                f"others: say in `names` of build() what the ranks call it"
            )
        if all(math.isnan(loss) for answer in answers for loss in answer.losses):
            key = (1, "number", "loss")
            if not any(answer.seen and key in answer.seen.offs for answer in answers):
                return f"{name}: step() of no rank returns a loss"
        return ""
