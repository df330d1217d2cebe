"""The fastest rows of a table, by their predictions, in order.

    ranking = Ranking(table, accepted=0.05)
    ranking.run(most=20)
    ranking.ranked          # the fastest of every tp, pp and micro-batch, the fastest first

Each row enters a queue with the seconds that it takes at least. The row at its head is predicted,
which simulates its schedule, and enters again with what it takes. A row that comes to the head with
its prediction is faster than all that are left, predicted or not.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from config.schema import Layout
from planner import closed_form, memory, risk
from planner.enumeration import Rejected, Table, rejected_layout
from planner.job import Job
from planner.step_time import Prediction, pipeline_time, predict
from schedules.partition import blocks_per_stage

Place = tuple[int, int, int]
NEARLY = 0.95  # a schedule takes no less of what it takes by its first rounds; 0.98 was seen


class Line(NamedTuple):
    """A layout that fits, and its prediction."""

    layout: Layout
    prediction: Prediction


class Entry(NamedTuple):
    """A row in the queue, by its seconds: at least those, or those of `line`, if it has one.

    risky: it may need more than is safe, and recomputes less for that. nearly: its schedule was
    simulated with few micro-batches already.
    """

    seconds: float
    row: int
    risky: bool
    recomputed: int
    nearly: bool = False
    line: Line | None = None


class Ranking:
    """Rows of a table in the order of their seconds. refusal: why else a layout is not taken."""

    def __init__(
        self,
        table: Table,
        accepted: float = risk.DEFAULT,
        refusal: Callable[[Layout], str] = lambda layout: "",
    ):
        """accepted: the probability of running out of memory above which a row is risky."""
        self.table, self.accepted, self.refusal = table, accepted, refusal
        machine = table.asked.machine
        self.room = {True: machine.memory}
        self.room[False] = min(risk.safe_bytes(machine, accepted), machine.memory)
        self.ranked: list[Line] = []
        self.done: set[tuple[Place, bool]] = set()
        self.refused: dict[Place, str] = {}  # why a row at a place was not taken
        self.best = math.inf  # seconds of the fastest that is not risky
        self.queue = self._queue()

    def _queue(self) -> list[Entry]:
        """All rows that may fit, by the seconds that they take at least."""
        entries: list[Entry] = []
        self.ranks = closed_form.Ranks.of(self.table)
        for risky in (False, True):
            if risky and self.room[True] == self.room[False]:
                break
            fitting = closed_form.fitting(self.table, self.ranks, self.room[risky])
            seconds = closed_form.least_seconds(self.table, self.ranks, fitting.recomputed)
            rows = np.flatnonzero(fitting.fits)
            blocks = fitting.recomputed[rows, 0].tolist()
            columns = seconds[rows].tolist(), rows.tolist(), [risky] * len(rows), blocks
            entries += map(Entry, *columns)
            self.fitting = fitting
        heapq.heapify(entries)
        return entries

    def run(self, most: float = math.inf) -> None:
        """Rank the fastest row of each place that is not risky, so many places at most, and risky
        ones that are faster than all of these.
        """
        while self.queue:
            entry = heapq.heappop(self.queue)
            place = self.table.place(entry.row)
            if (place, entry.risky) in self.done or (entry.risky and entry.seconds >= self.best):
                continue
            if entry.line is None and not entry.nearly:
                self._simulate_few(entry)
            elif entry.line is None:
                self._predict(entry)
            elif reason := self.refusal(entry.line.layout):
                self.refused.setdefault(place, reason)
            else:
                self.done.add((place, entry.risky))
                self.ranked.append(entry.line)
                if not entry.risky:
                    self.best = min(self.best, entry.seconds)
                    most -= 1
                    if most <= 0:
                        return

    def _simulate_few(self, entry: Entry) -> None:
        """Put a row back with the seconds of its pipeline, or nearly so many."""
        layout = self.table.layout(entry.row, entry.recomputed or None)
        job = self.table.asked.job(layout)
        seconds = NEARLY * job.machine.slowdown * pipeline_time(job, nearly=True)[0]
        seconds = max(entry.seconds, seconds)
        heapq.heappush(self.queue, entry._replace(seconds=seconds, nearly=True))

    def _predict(self, entry: Entry) -> None:
        """Put a row back with its prediction, if it fits, and is not safe where it is risky."""
        layout = self._fewest_recomputed(entry)
        if layout is None:
            return
        job = self.table.asked.job(layout)
        prediction = predict(*job)
        needed = job.machine.memory - prediction.margin
        if entry.risky and needed <= self.room[False]:
            return
        line = Line(layout, prediction)
        entry = entry._replace(seconds=prediction.seconds, line=line)
        heapq.heappush(self.queue, entry)

    def _fewest_recomputed(self, entry: Entry) -> Layout | None:
        """The row's layout with the fewest blocks recomputed that fits; None if none does."""
        table, room = self.table, self.room[entry.risky]
        layout = table.layout(entry.row)
        free = layout.recompute != "none" and "recompute_layers" not in table.asked.fixed
        most = max(blocks_per_stage(table.asked.model, layout)) if free else 0
        for blocks in range(entry.recomputed, most):
            fewer = replace(layout, recompute_layers=blocks)
            if self._needed(fewer) <= room:
                return fewer
        return layout if self._needed(layout) <= room else None

    def _needed(self, layout: Layout) -> float:
        return memory.fullest(self.table.asked.job(layout)).total

    # ---- What is not ranked ----------------------------------------------------------------------

    def slower(self) -> int:
        """At how many places there are rows that may fit, but that `run` has left."""
        left = {self.table.place(entry.row) for entry in self.queue if not entry.risky}
        return len(left - {place for place, _ in self.done})

    def rejected(self) -> list[Rejected]:
        """The places where no row fits or is taken, and why; of those that differ in the
        micro-batch alone, and do not fit, the smallest.
        """
        table = self.table
        least: dict[Place, int] = {}  # the row of a place that needs the least
        order = np.argsort(self.fitting.least, kind="stable")
        first = np.unique(table.places[order], return_index=True)[1]
        for row in order[first].tolist():
            least[table.place(row)] = row
        left = {table.place(entry.row) for entry in self.queue}
        taken = left | {place for place, _ in self.done}
        found, too_large = [], set[tuple[int, int]]()
        for place in sorted(least.keys() - taken):
            layout = table.layout(least[place])
            reason = self.refused.get(place) or does_not_fit(table.asked.job(layout))
            if not reason or place[:2] in too_large:
                continue
            larger = [other for other in least if other[:2] == place[:2] and other > place]
            if place not in self.refused and larger:
                too_large.add(place[:2])
                reason += "; larger micro-batches need more"
            found.append(rejected_layout(layout, reason))
        return found


def does_not_fit(job: Job) -> str:
    """Which stage is out of memory, needs what and has what, as a sentence; empty if all fit."""
    fullest, machine, layout = memory.fullest(job), job.machine, job.layout
    if fullest.total <= machine.memory:
        return ""
    needs = f"stage {fullest.stage} needs {fullest.total / 1e9:.1f} GB"
    needs += f" with --recompute {layout.recompute}" * (layout.recompute != "none")
    needs += f" --zero {layout.zero}" * (job.shards > 1)
    return f"out of memory: {needs}, {machine.name} has {machine.memory / 1e9:.1f}"
