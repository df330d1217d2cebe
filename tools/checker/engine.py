"""Runs layouts in worlds of ranks, and compares each with one rank.

    with Engine(config, others=variants(...)) as engine:
        for outcome in engine.run(layouts.cover(config, ranks=4)):
            print(outcome.layout, outcome.difference)

config: small (shrink.py). The first run is that on one rank; every outcome has what differs from it
first, or why the run has no result.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import ProgramError, UserError
from config import validation
from config.schema import Config, Layout
from schedules.partition import placement
from tools.checker.compare import LOADS, Difference, Reference, first_difference, relative
from tools.checker.corpora import write_corpora
from tools.checker.layouts import AnyLayout, axes_of, ranks_of
from tools.checker.ranks import Failure, Worlds
from tools.checker.runs import CheckedRun, RunAnswer, Worker
from tools.checker.thresholds import has_wide_types
from tools.checker.variants import Variant

SECONDS_OF_ONE = 1800.0  # one rank waits for nobody; a busy machine may take long
INFERRED = 8  # layouts, the simplest, in which texts are also decoded and scored; see `inferring`
MICRO_BATCHES = (4, 3, 2)  # samples of one rank's, the first that goes: it needs fewer passes
LONGER = 10  # ranks share cores that one rank had alone


@dataclass
class Outcome:
    """What came of one layout.

    difference: the first tensor that is not one rank's. failure: why there is no result. seconds:
    since the check began. resumed_from: the layout that saved what this one went on with, after
    step `resumed_step`. variant: its types or sizes; None: those of the small run.
    """

    layout: AnyLayout
    difference: Difference | None = None
    failure: Failure | None = None
    seconds: float = 0.0
    resumed_from: AnyLayout | None = None
    resumed_step: int = 0
    variant: Variant | None = None

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
    first = answers[0]
    for name, loss in one.evaluated.items():
        other = first.evaluated.get(name, float("nan"))
        if reference.differs((-1, "number", name), relative(other, loss)):
            yield f"{name} loss: {other:.12g} for {loss:.12g}"
    for step, (loads, others) in enumerate(zip(one.loads[begin:], first.loads), begin + 1):
        if reference.differs((step, "number", LOADS), max(map(relative, others, loads), default=0)):
            yield f"{LOADS} of step {step}: {others} for {loads}"
            break
    for sentence in [x for answer in answers for x in answer.unequal][:1]:
        yield f"replicas: {sentence}"


def inferring(layouts: Sequence[Layout]) -> list[Layout]:
    """Return the layouts in which texts are decoded and scored: the simplest ones, and then each
    that is the first with a size of an axis, or with several stages on a rank in an order.

    A decoded token comes from the rank with the last stage, and is chosen among the columns of all
    tensor ranks; scored texts are divided among the replicas.
    """

    def settings(layout: Layout) -> set[tuple[str, Any]]:
        is_last = placement(layout)[-1] == layout.pp - 1  # whether its rank has the last stage
        return {*axes_of(layout).items(), ("stages", (layout.stages_per_rank, is_last))}

    found = list(layouts[:INFERRED])
    met = set().union(*map(settings, found))
    for layout in layouts[INFERRED:]:
        if not settings(layout) <= met:
            found.append(layout)
            met |= settings(layout)
    return found


def of_one_rank(config: Config) -> Layout:
    """Return the layout of the run with which others are compared: one rank, in few passes.

    The size of a micro-batch changes no result, which layouts with other sizes show.
    """
    alone = dataclasses.replace(config.layout, dp=1)
    for size in MICRO_BATCHES:
        layout = dataclasses.replace(alone, micro_batch_size=size)
        with contextlib.suppress(UserError):  # it does not divide a batch
            validation.check(dataclasses.replace(config, layout=layout), 1)
            return layout
    return alone


class Engine:
    """Worlds of ranks and the run of one rank with which others are compared."""

    def __init__(
        self,
        config: Config,
        at_once: int = 2,
        seconds: float = 90.0,
        others: Sequence[Variant] = (),
    ):
        """Start no ranks yet. config: the small run. at_once: runs at a time. others: its variants.

        seconds: a layout is taken to hang after this time, or LONGER times the time of one rank.
        """
        self.config = config
        self.others = others
        self.began = time.monotonic()
        self.at_once, self.seconds = at_once, seconds
        self.plain = dataclasses.replace(config.run, watchdog=False, bind_cores=False)
        self.number = 0  # of the jobs so far
        self.one: RunAnswer | None = None  # of one rank
        self.ones: dict[str, RunAnswer] = {}  # by the sizes of the run
        self.references: dict[str, Reference] = {}
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

        write_corpora(self.config)
        alone = of_one_rank(self.config)
        began = time.monotonic()
        runs = {"": None} | {x.sizes: x for x in self.others if x.sizes}
        with Worlds(Worker(), self.plain, 1, SECONDS_OF_ONE) as worlds:
            jobs = [(1, self._job(alone, 0, each, each is None)) for each in runs.values()]
            for number, answers in worlds.answers(jobs):
                self._keep(list(runs)[number], answers)
        limit = max(self.seconds, LONGER * (time.monotonic() - began))
        self.reference, self.one = self.references[""], self.ones[""]
        if self.reference.rounding.held:
            # Of the gradients in 16 bits more are rounding, in each layout others.
            self.others = [each for each in self.others if not has_wide_types(each.config)]
        worker = Worker(self.references)
        self.worlds = Worlds(worker, self.plain, self.at_once, limit)
        return self.one

    def _keep(self, sizes: str, answers: list[Any] | Failure) -> None:
        """Keep the run of one rank as the reference of runs with these sizes.

        answers: of the one rank. Raise UserError if it failed, or a loss is not finite.
        """
        if isinstance(answers, Failure):
            of = f", with {sizes}," if sizes else ""
            raise ProgramError(f"the run on one rank{of} fails: {answers.text}")
        (one,) = answers
        for step, loss in enumerate(one.losses, 1):
            if not math.isfinite(loss):
                raise ProgramError(
                    f"on one rank the loss of step {step} is {loss}, so that nothing can be "
                    f"compared: look at options that the small run keeps, such as --adam-eps"
                )
        precision = self.config.training.precision
        self.references[sizes] = Reference(one.pieces, one.aliases, precision, one.rounding)
        self.ones[sizes] = one
        one.pieces = []

    def reference_of(self, outcome: Outcome) -> Reference:
        """Return the tensors of one rank with which an outcome was compared."""
        variant = outcome.variant
        if variant is None:
            return self.reference
        return self.references[variant.sizes].in_precision(variant.config)

    def _begun(self) -> Worlds:
        """Return the worlds, after the run of one rank."""
        if self.worlds is None:
            self.begin()
        assert self.worlds is not None  # `begin` has made it
        return self.worlds

    def _job(
        self,
        layout: Layout,
        save: int = 0,
        variant: Variant | None = None,
        infers: bool = False,
        **run: Any,
    ) -> CheckedRun:
        """Return the run of a layout for a world of ranks. save, infers: see CheckedRun.

        variant: the types or sizes, None: the small run's. run: options of Run to change.
        """
        self.number += 1
        config = self.config if variant is None else variant.config
        changed = dataclasses.replace(config.run, **run)
        config = dataclasses.replace(config, layout=layout, run=changed)
        sizes = variant.sizes if variant else ""
        return CheckedRun(config, save, self.number, sizes, infers)

    def run(
        self, layouts: Sequence[Layout], may_begin: Callable[[], bool] = lambda: True
    ) -> Iterator[Outcome]:
        """Yield the outcome of each layout as it ends, and of those of the variants.

        The run of one rank comes before. may_begin: whether a further layout may begin; if not,
        those that run are waited for.
        """
        worlds = self._begun()
        pairs: list[tuple[Layout, Variant | None]] = [(layout, None) for layout in layouts]
        others = [(layout, variant) for variant in self.others for layout in variant.layouts]
        pairs[INFERRED:INFERRED] = others  # before the layouts that have several options
        if any(layout.zero == 3 for layout, _ in pairs):
            import torch._dynamo  # noqa: F401 - as in `begin`: the first FSDP of a rank needs it
        infer = inferring(layouts)
        jobs = []
        for layout, variant in pairs:
            infers = variant is None and layout in infer
            jobs.append((ranks_of(layout), self._job(layout, 0, variant, infers)))
        for number, answers in worlds.answers(jobs, may_begin):
            layout, variant = pairs[number]
            yield self._outcome(layout, answers, 0, variant)

    def _outcome(
        self,
        layout: Layout,
        answers: list[Any] | Failure,
        begin: int = 0,
        variant: Variant | None = None,
    ) -> Outcome:
        """Return what came of a layout; begin: the steps that were done before a resume."""
        outcome = Outcome(layout, seconds=time.monotonic() - self.began, variant=variant)
        if isinstance(answers, Failure):
            outcome.failure = answers
            return outcome
        one = self.ones[variant.sizes if variant else ""]
        outcome.difference = difference_of(self.reference_of(outcome), one, answers, begin)
        return outcome

    def resume(
        self,
        saved_by: Layout,
        layouts: Sequence[Layout],
        step: int,
        folder: Path,
        variant: Variant | None = None,
    ) -> Iterator[Outcome]:
        """Save after a step in one layout and go on in others; yield the outcome of each.

        folder: for the checkpoint. variant: types or sizes of the run. If the save fails, the only
        outcome is of that layout.
        """
        worlds = self._begun()
        job = self._job(saved_by, step, variant, out=str(folder))
        ((_, answers),) = worlds.answers([(ranks_of(saved_by), job)])
        if isinstance(answers, Failure):
            yield self._outcome(saved_by, answers, 0, variant)
            return
        jobs = []
        for layout in layouts:
            job = self._job(layout, 0, variant, out=str(folder), resume="auto")
            jobs.append((ranks_of(layout), job))
        for number, answers in worlds.answers(jobs):
            outcome = self._outcome(layouts[number], answers, step, variant)
            outcome.resumed_from, outcome.resumed_step = saved_by, step
            yield outcome
