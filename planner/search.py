"""The fastest layouts of a model on a machine, by bounds: what cannot be first is not priced.

    search = Search(model, training, machine, given, accepted=0.05)
    reason = search.add(ways(model, placed, given))     # for every tp, pp, dp and micro-batch
    search.finish()
    search.found()

A layout whose tp, pp, dp and micro-batch are known can still run in many ways: schedule, virtual
stages, vocabulary sharding, sequence parallelism, how many blocks are recomputed, ZeRO. Of the last
two the order is known without a price: the fewer blocks the faster, and the ZeRO stage with the
least traffic. 1F1B is priced everywhere; another schedule only where some order of its passes could
end before the fastest layout found (`step_time.least_seconds`).
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from config.messages import UserError
from config.schema import Layout, ModelShape, Training
from config.validation import check_sharding, check_split
from planner import memory, risk
from planner.bounds import least_busy, least_seconds
from planner.hardware import Machine
from planner.job import Job
from planner.step_time import Prediction, predict, step_parts
from schedules.partition import blocks_per_stage

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")  # auto only if it is asked for
Found = tuple[Layout, Prediction]
Needed = Callable[[Layout], float]  # bytes of the fullest GPU
Watch = Callable[[Sequence], Iterable]  # goes through a sequence, and may show how far it is


def ways(model: ModelShape, placed: Layout, given: Collection[str]) -> list[Layout]:
    """A layout with every schedule, number of virtual stages and vocabulary sharding that train.py
    takes, the plainest first; what is `given` is kept. UserError, why not, if it takes none.
    """
    names = [placed.schedule] if "schedule" in given or placed.pp == 1 else SCHEDULES
    spread = [placed.vocab_pp] if "vocab_pp" in given else [placed.vocab_pp, True]
    found, refused = [], None
    for name, vocab_pp in product(names, spread):
        virtual: Iterable[int] = [placed.virtual_stages]
        if name == "interleaved" and "virtual_stages" not in given:
            virtual = range(2, max(2, (model.layers + 2) // placed.pp) + 1)
        for count in virtual:
            way = replace(placed, schedule=name, virtual_stages=count, vocab_pp=vocab_pp)
            try:
                check_split(model, way)
                found.append(way)
            except UserError as error:
                refused = refused or error
    if refused and not found:
        raise refused
    return found


def sequences(model: ModelShape, layout: Layout, given: Collection[str]) -> list[Layout]:
    """A layout with and without sequence parallelism, unless that is `given` or impossible."""
    if "sequence_parallel" in given or layout.tp == 1 or model.seq_length % (layout.tp * layout.cp):
        return [layout]
    return [replace(layout, sequence_parallel=on) for on in (True, False)]


def recomputations(machine: Machine) -> tuple[str, ...]:
    """What is worth recomputing, the fastest first."""
    # A flash kernel recomputes the scores anyway, so that `selective` changes nothing.
    software = machine.software
    changes = software.keeps_scores or software.recompute_share or software.keeps_products
    return ("none", "selective", "full") if changes else ("none", "full")


def does_not_fit(job: Job) -> str:
    """Which stage is out of memory, needs what and has what, as a sentence; empty if all fit."""
    fullest, machine, layout = memory.fullest(job), job.machine, job.layout
    if fullest.total <= machine.memory:
        return ""
    needs = f"stage {fullest.stage} needs {fullest.total / 1e9:.1f} GB"
    needs += f" with --recompute {layout.recompute}" * (layout.recompute != "none")
    needs += f" --zero {layout.zero}" * (job.shards > 1)
    return f"out of memory: {needs}, {machine.name} has {machine.memory / 1e9:.1f}"


def place(layout: Layout) -> tuple[int, int, int]:
    """By which layouts are alike: of each place the fastest is ranked."""
    return layout.tp, layout.pp, layout.micro_batch_size


def _slow(way: Layout) -> int:
    """How long its schedule takes to build, as an order."""
    return 2 * bool(way.vocab_pp) + (way.schedule in ("interleaved", "zb-v"))


@dataclass
class Search:
    """The fastest layouts so far, by tp, pp and micro-batch, and whether the probability of running
    out of memory is more than `accepted`.

    given: layout options that are not searched. refusal: why else a layout is not taken.
    """

    model: ModelShape
    training: Training
    machine: Machine
    given: Collection[str]
    accepted: float = risk.DEFAULT
    refusal: Callable[[Layout], str] = lambda layout: ""
    rows: dict[tuple[int, int, int, bool], Found] = field(default_factory=dict)
    best: float = math.inf  # seconds of the fastest that is not risky

    def __post_init__(self) -> None:
        self.safe = min(risk.safe_bytes(self.machine, self.accepted), self.machine.memory)
        self.refused = functools.cache(
            lambda layout: self._unsharded(layout) or self.refusal(layout)
        )
        self.zero_stages = functools.cache(self._zero_stages)
        self.needed = functools.cache(lambda layout: memory.fullest(self._job(layout)).total)
        self.needed_least = functools.cache(self._needed_least)
        # Ways to run a layout but for its plainest: seconds that none is faster than, the way, and
        # the plainest with as much recomputed, at such a ZeRO stage, as its memory asks for.
        self.waiting: list[tuple[float, Layout, Layout]] = []
        self.risky: list[Layout] = []

    def add(self, found: Sequence[Layout], leading: bool = False) -> str:
        """Price the plainest of some `ways`, and note the others for `finish`; empty, or why
        nothing of the plainest can run.

        leading: only what may be faster than the fastest so far, in place of the fastest with its
        tp, pp and micro-batch.
        """
        plainest, *others = found
        row = *place(plainest), False
        cells, reasons = sequences(self.model, plainest, self.given), []
        bounds = {cell: self._least(self._fastest_case(cell)) for cell in cells}
        for cell in sorted(cells, key=bounds.__getitem__):
            slowest = self.rows[row][1].seconds if row in self.rows else math.inf
            if bounds[cell] < (self.best if leading else slowest):
                reasons.append(self.price(cell))
            self._note(cell, others)
        return "" if not reasons or "" in reasons else reasons[0]

    def add_leading(self, sized: Sequence[Sequence[Layout]], watch: Watch = iter) -> None:
        """`add` those `ways` that may lead, in any schedule, the most promising first."""
        bounds = [(min(map(self._busy, self._cells(found))), i) for i, found in enumerate(sized)]
        too_large: dict[tuple[int, int, int], int] = {}  # micro-batches that never fit
        for busy, i in watch(sorted(bounds)):
            found, first = sized[i], sized[i][0]
            axes, micro = (first.tp, first.pp, first.cp), first.micro_batch_size
            if busy >= self.best or micro >= too_large.get(axes, micro + 1):
                continue
            fastest = map(self._fastest_case, self._cells(found))
            if min(self._least(case, idle=False) for case in fastest) >= self.best:
                continue
            if self.never_fits(found):
                too_large[axes] = micro
            else:
                self.add(found, leading=True)

    def _cells(self, found: Sequence[Layout]) -> list[Layout]:
        """Of some `ways` those of which none other is faster if no rank waits."""
        # zb-v has both ends of the model on one rank, which do not exchange a tied matrix.
        plainest = [way for way in found if way.schedule in (found[0].schedule, "zb-v")]
        return [cell for way in plainest for cell in sequences(self.model, way, self.given)]

    def _note(self, cell: Layout, others: list[Layout]) -> None:
        """Keep the other ways of a layout with its plainest schedule for `finish`."""
        alike = [replace(way, sequence_parallel=cell.sequence_parallel) for way in others]
        spread = [way for way in alike if way.vocab_pp]
        rest = [way for way in alike if not way.vocab_pp]
        # No other schedule holds less than 1F1B; zb-v may, with one copy of a tied matrix.
        folded = [way for way in rest if way.schedule == "zb-v" and self.model.tied]
        plain = [way for way in rest if way not in folded]
        no_chunks: dict[str, Any] = {"schedule": "1f1b", "virtual_stages": None}
        groups = [(plain, replace(cell, **no_chunks), self.needed)]
        groups += [(ways, ways[0], self.needed_least) for ways in (folded, spread) if ways]
        for ways, first, needed in groups:
            least = self._first_that_fits(first, self._kinds(cell), needed) if ways else None
            if least:
                busy = least_busy(self._job(least))
                self.waiting += [(busy, way, least) for way in ways]

    def never_fits(self, found: Sequence[Layout]) -> bool:
        """Whether the way that holds the least does not fit with one micro-batch in flight."""
        plain = [way for way in found if way.schedule in (found[0].schedule, "zb-v")]
        least = [sequences(self.model, way, self.given)[0] for way in plain]
        less: dict[str, Any] = {"recompute": "full", "recompute_layers": None}
        jobs = [self._job(replace(way, zero=n, **less)) for way in least for n in (1, 2, 3)]
        return min(memory.fullest(job, 1).total for job in jobs) > self.machine.memory

    def finish(self, watch: Watch = iter) -> None:
        """Price what may be faster than the fastest layout so far, the most promising first."""
        # By what a schedule takes to build: what is quick comes first, and excludes others.
        waiting = sorted(self.waiting, key=lambda one: (_slow(one[1]), one[0]))
        for busy, way, least in watch(waiting):
            if busy >= self.best:
                continue
            own = self._fastest_case(way, least.recompute)  # a block of each stage, if any
            if way.stages_per_rank == 1:
                own = replace(own, recompute_layers=least.recompute_layers, zero=least.zero)
            if self._least(own, idle=False) >= self.best:
                continue
            for kind in self._kinds(way):
                if self._least(self._fastest_case(way, kind)) >= self.best:
                    break  # what recomputes more is slower
                fitting = self._first_that_fits(way, [kind], self.needed_least)
                if fitting and self._least(fitting) < self.best:
                    self.price(way, [kind])
        for layout in self.risky:
            if self._least(layout) < self.best and not self.refused(layout):
                self._keep(layout, predict(*self._job(layout)))

    def _needed_least(self, layout: Layout) -> float:
        """Bytes that a layout needs on its first rank, by how many micro-batches that has in
        flight: known without building the schedule.
        """
        job = self._job(layout)
        pp, count, virtual = layout.pp, job.micro_batches, layout.stages_per_rank
        in_flight = float(count if layout.schedule == "gpipe" else min(pp, count))
        if layout.schedule == "interleaved":
            ahead = 2 * (pp - 1) + (virtual - 1) * in_flight + 1
            in_flight = min(count, ahead / virtual)
        return memory.first(job, in_flight).total

    def found(self) -> list[Found]:
        """The fastest that is not risky of every tp, pp and micro-batch, and the risky ones that
        are faster than all of these. The fastest first.
        """
        kept = [
            one for (*_, risky), one in self.rows.items() if not risky or one[1].seconds < self.best
        ]
        return sorted(kept, key=lambda one: one[1].seconds)

    def price(self, cell: Layout, kinds: Sequence[str] = ()) -> str:
        """Keep the fastest of the cell's recomputations (default: all) and ZeRO stages that is not
        risky, and note for `finish` what is risky; empty, or why nothing fits.
        """
        first, kinds = bool(kinds), kinds or self._kinds(cell)
        risky = self._first_that_fits(cell, kinds, self.needed, self.machine.memory)
        if risky and not self.refused(risky) and self.needed(risky) > self.safe:
            self.risky.append(risky)
        reason, kept = "", False
        for kind in kinds:
            found = self._fastest(replace(cell, recompute=kind), first)
            if isinstance(found, str):
                reason = found or reason  # of what recomputes most
                continue
            self._keep(*found)
            kept = True
            if found[0].zero == self.zero_stages(found[0])[0]:
                break  # what recomputes more is slower
        return "" if kept or (risky and not reason) else reason

    def _keep(self, layout: Layout, prediction: Prediction) -> None:
        """Note a layout that fits, if it is the fastest of its place."""
        risky = prediction.risk > self.accepted
        row = *place(layout), risky
        if row not in self.rows or prediction.seconds < self.rows[row][1].seconds:
            self.rows[row] = layout, prediction
        if not risky:
            self.best = min(self.best, prediction.seconds)

    def _fastest(self, cell: Layout, first: bool) -> Found | str:
        """The fastest with its recomputation that is not risky, or why there is none.

        first: leave out what cannot be the first of all.
        """
        found: list[Found] = []
        reason, full = "", []
        for zero in self.zero_stages(cell):
            layout = self._least_recomputed(replace(cell, zero=zero), self.needed, self.safe)
            if layout is None:
                full.append(replace(cell, zero=zero))
            elif why := self.refused(layout):
                reason = reason or why
            else:
                if not first or self._least(layout) < self.best:
                    found.append((layout, predict(*self._job(layout))))
                if layout.recompute == "none" or layout.recompute_layers == 1:
                    break  # no later stage is faster
        if found:
            return min(found, key=lambda one: one[1].seconds)
        return reason or (does_not_fit(self._job(min(full, key=self.needed))) if full else "")

    def _first_that_fits(
        self, cell: Layout, kinds: Sequence[str], needed: Needed, room: float = 0.0
    ) -> Layout | None:
        """Of recomputations and ZeRO stages what may be fastest and needs at most `room` bytes,
        default: those that are no risk.
        """
        found: list[Layout] = []
        for kind in kinds:
            stages = self.zero_stages(replace(cell, recompute=kind))
            for zero in stages:
                layout = replace(cell, recompute=kind, zero=zero)
                if fitting := self._least_recomputed(layout, needed, room or self.safe):
                    found.append(fitting)
                    if fitting.recompute == "none" or fitting.recompute_layers == 1:
                        break  # no later stage is faster
            if any(one.recompute == kind and one.zero == stages[0] for one in found):
                break  # what recomputes more is slower
        return min(found, key=self._least) if len(found) > 1 else found[0] if found else None

    def _least_recomputed(self, layout: Layout, needed: Needed, room: float) -> Layout | None:
        """The layout with the fewest blocks recomputed that needs at most `room` bytes, if any."""
        free = layout.recompute != "none" and "recompute_layers" not in self.given
        every: Any = None
        layout = replace(layout, recompute_layers=every) if free else layout
        if needed(layout) > room:
            return None
        if not free:
            return layout
        low, high = 0, max(blocks_per_stage(self.model, layout))  # too few, enough
        most = high
        while high - low > 1:
            middle = (low + high) // 2
            enough = needed(replace(layout, recompute_layers=middle)) <= room
            low, high = (low, middle) if enough else (middle, high)
        return layout if high == most else replace(layout, recompute_layers=high)

    # ---- What is fastest before anything is priced -----------------------------------------------

    def _kinds(self, cell: Layout) -> Sequence[str]:
        """What may be recomputed, the fastest first."""
        if "recompute" in self.given:
            return [cell.recompute]
        return recomputations(self.machine)

    def _zero_stages(self, cell: Layout) -> list[int]:
        """The ZeRO stages that train.py takes, the fastest first, and 1 before its equals."""
        if "zero" in self.given or cell.dp * cell.cp == 1:
            return [cell.zero]
        tried = [replace(cell, zero=zero) for zero in (1, 0, 2, 3)]
        seconds = {
            layout.zero: sum(step_parts(self._job(layout)).values())
            for layout in tried
            if not self._unsharded(layout)
        }
        return sorted(seconds, key=seconds.__getitem__) or [cell.zero]

    def _unsharded(self, layout: Layout) -> str:
        """Why train.py does not take its ZeRO stage; empty if it does."""
        try:
            check_sharding(layout, self.training)
        except UserError as error:
            return str(error)
        return ""

    def _fastest_case(self, cell: Layout, kind: str = "") -> Layout:
        """With what is fastest if memory allows it: of a kind of recomputation, or of any."""
        return replace(self._least_redone(cell, kind), zero=self.zero_stages(cell)[0])

    def _least_redone(self, cell: Layout, kind: str = "") -> Layout:
        """With no more blocks recomputed than one, or none, if it is free."""
        kind = kind or self._kinds(cell)[0]
        free = kind != "none" and "recompute_layers" not in self.given
        return replace(cell, recompute=kind, recompute_layers=1 if free else cell.recompute_layers)

    def _busy(self, cell: Layout) -> float:
        """Seconds that it takes no less than with any ZeRO stage."""
        return least_busy(self._job(self._least_redone(cell)))

    def _least(self, layout: Layout, idle: bool = True) -> float:
        return least_seconds(self._job(layout), idle)

    def _job(self, layout: Layout) -> Job:
        return Job(self.model, layout, self.training, self.machine)
