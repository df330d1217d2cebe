"""The fastest rows of a table, by their predictions, in order.

    ranking = Ranking(table, accepted=0.05)
    ranking.run(most=20)
    ranking.ranked          # one layout of each tp, pp and micro-batch, the fastest first

To find the fastest, each row enters a queue with the seconds that it takes at least. The row at its
head is predicted, which simulates its schedule, and enters again with what it takes. A row that
comes to the head with its prediction is faster than all that are left, predicted or not. At every
other place only the row is predicted that is likely the fastest there.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from config.schema import Layout
from planner import closed_form, memory, risk
from planner.closed_form import Fitting
from planner.enumeration import Rejected, Table, rejected_layout
from planner.job import Job
from planner.step_time import Prediction, predict
from schedules.partition import blocks_per_stage

Place = tuple[int, int, int]
FAR = 1.3  # times the seconds that the fastest row likely takes


class Line(NamedTuple):
    """A layout that fits, and its prediction."""

    layout: Layout
    prediction: Prediction


class Entry(NamedTuple):
    """A row in the queue, by its seconds: at least those, or those of `line`, if it has one.

    risky: it may need more than is safe, and recomputes less for that.
    """

    seconds: float
    row: int
    risky: bool
    recomputed: int
    line: Line | None = None


class Ranking:
    """The fastest rows of a table. ranked: one layout of each tp, pp and micro-batch, and those
    that are risky and faster than every other one; refused: why a row of a place was not taken.
    """

    def __init__(
        self,
        table: Table,
        accepted: float = risk.DEFAULT,
        refusal: Callable[[Layout], str] = lambda layout: "",
    ):
        """accepted: the probability of running out of memory above which a row is risky. refusal:
        why else a layout is not taken, or "".
        """
        self.table, self.refusal = table, refusal
        machine = table.asked.machine
        self.accepted, safe = accepted, machine.memory
        if accepted < 1:
            safe = min(risk.safe_bytes(machine, accepted), safe)
        self.room = {False: safe, True: machine.memory}  # by whether a row is risky
        self.ranked: list[Line] = []
        self.done: set[tuple[Place, bool]] = set()
        self.refused: dict[Place, str] = {}
        self.waiting: set[Place] = set()  # places with rows that may fit, but were not tried
        self.all_rows = False  # whether `run_all` was asked for
        self.slower = 0  # rows that may fit, but that it did not try

    def run(self, most: float = math.inf) -> None:
        """Rank the fastest row of all that is not risky, the risky ones that are faster than that,
        and one row of each other place, so many places at most.
        """
        ranks = closed_form.Ranks.of(self.table)
        self.fitting = closed_form.fitting(self.table, ranks, self.room[False])
        least, likely = closed_form.least_seconds(self.table, ranks, self.fitting.recomputed)
        queue = _entries(self.fitting, least, risky=False)
        if self.room[True] > self.room[False]:
            fitting = closed_form.fitting(self.table, ranks, self.room[True])
            risky, _ = closed_form.least_seconds(self.table, ranks, fitting.recomputed)
            queue += _entries(fitting, risky, risky=True)
        self._find_fastest(queue)
        self._find_others(sorted(_entries(self.fitting, likely, risky=False)), most)

    def run_all(self, most: float) -> None:
        """Rank every row that is not risky, or, of more than so many, those that are likely the
        fastest: of each place at least one that is not FAR behind.
        """
        self.all_rows = True
        ranks = closed_form.Ranks.of(self.table)
        self.fitting = closed_form.fitting(self.table, ranks, self.room[False])
        _, likely = closed_form.least_seconds(self.table, ranks, self.fitting.recomputed)
        taken = set[Place]()
        entries = sorted(_entries(self.fitting, likely, risky=False))
        for tried, entry in enumerate(entries):
            place = self.table.place(entry.row)
            is_far = entry.seconds > FAR * entries[0].seconds
            if tried >= most and (is_far or place in taken):
                self.slower += 1
                self.waiting.add(place)
            elif (predicted := self._predicted(entry)) and self._takes(predicted):
                taken.add(place)

    def _find_fastest(self, queue: list[Entry]) -> None:
        """Rank the first row that is not risky, in the order of predictions."""
        heapq.heapify(queue)
        while queue:
            entry = heapq.heappop(queue)
            if (self.table.place(entry.row), entry.risky) in self.done:
                continue
            if entry.line is None:
                if predicted := self._predicted(entry):
                    heapq.heappush(queue, predicted)
            elif self._takes(entry) and not entry.risky:
                return

    def _find_others(self, entries: list[Entry], most: float) -> None:
        """Rank the first of these rows at each place, until there are so many places."""
        places = [self.table.place(entry.row) for entry in entries]
        taken = {place for place, risky in self.done if not risky}
        for entry, place in zip(entries, places, strict=True):
            if len(taken) >= most:
                break
            if place not in taken and (predicted := self._predicted(entry)):
                taken |= {place} if self._takes(predicted) else set()
        else:
            return
        self.waiting = {*places} - taken

    def _predicted(self, entry: Entry) -> Entry | None:
        """A row with its prediction; None if it does not fit, or is safe where it is risky."""
        layout = self._fewest_recomputed(entry)
        if layout is None:
            return None
        job = self.table.asked.job(layout)
        prediction = predict(*job)
        if entry.risky and job.machine.memory - prediction.margin <= self.room[False]:
            return None
        return entry._replace(seconds=prediction.seconds, line=Line(layout, prediction))

    def _fewest_recomputed(self, entry: Entry) -> Layout | None:
        """The row's layout with the fewest blocks recomputed that fits; None if none does."""
        table, room = self.table, self.room[entry.risky]
        layout = table.layout(entry.row)
        free = layout.recompute != "none" and table.asked.counts_blocks
        most = max(blocks_per_stage(table.asked.model, layout)) if free else 0
        for blocks in range(entry.recomputed, most):
            fewer = replace(layout, recompute_layers=blocks)
            if self._needed(fewer) <= room:
                return fewer
        return layout if self._needed(layout) <= room else None

    def _needed(self, layout: Layout) -> float:
        return memory.fullest(self.table.asked.job(layout)).total

    def _takes(self, entry: Entry) -> bool:
        """Rank a row that was predicted, unless it is refused."""
        assert entry.line is not None
        place = self.table.place(entry.row)
        if reason := self.refusal(entry.line.layout):
            self.refused.setdefault(place, reason)
            return False
        self.done.add((place, entry.risky))
        self.ranked.append(entry.line)
        return True

    def rejected(self) -> list[Rejected]:
        """The places where no row fits or is taken, and why; of those that differ in the
        micro-batch alone, and do not fit, the smallest.
        """
        table = self.table
        least: dict[Place, int] = {}  # the row of a place that needs the least
        for row in np.lexsort((self.fitting.least, table.recompute != "full")).tolist():
            least.setdefault(table.place(row), row)
        taken = self.waiting | {place for place, _ in self.done}
        found, too_large = [], set[tuple[int, int]]()
        for place in sorted(least.keys() - taken):
            layout = table.layout(least[place])
            job = table.asked.job(layout)
            reason = self.refused.get(place) or does_not_fit(job) or self._risk_of(job)
            if not reason or place[:2] in too_large:
                continue
            larger = [other for other in least if other[:2] == place[:2] and other > place]
            if place not in self.refused and larger:
                too_large.add(place[:2])
                reason += "; larger micro-batches need more"
            found.append(rejected_layout(layout, reason))
        return found

    def _risk_of(self, job: Job) -> str:
        """That a layout which fits is too risky, if every row was asked for; else it may be that a
        risky one is only slower than the fastest.
        """
        if not self.all_rows:
            return ""
        found = risk.out_of_memory(job.machine, memory.fullest(job).total)
        said = "of running out of memory is above --risk"
        return f"the risk({found:.0%}) {said}({self.accepted:.0%})"


def _entries(fitting: Fitting, seconds: np.ndarray, risky: bool) -> list[Entry]:
    """The rows that may fit, with these seconds."""
    rows = np.flatnonzero(fitting.fits)
    blocks = fitting.recomputed[rows, 0].tolist()
    return list(map(Entry, seconds[rows].tolist(), rows.tolist(), [risky] * len(rows), blocks))


def does_not_fit(job: Job) -> str:
    """Which stage is out of memory, needs what and has what, as a sentence; empty if all fit."""
    fullest, machine, layout = memory.fullest(job), job.machine, job.layout
    if fullest.total <= machine.memory:
        return ""
    needs = f"stage {fullest.stage} needs {fullest.total / 1e9:.1f} GB"
    needs += f" with --recompute {layout.recompute}" * (layout.recompute != "none")
    needs += f" --zero {layout.zero}" * (job.shards > 1)
    return f"out of memory: {needs}, {machine.name} has {machine.memory / 1e9:.1f}"
