"""The fastest rows of a table, by their predictions, in order.

    ranking = Ranking(table, accepted=0.05)
    ranking.run(most=20)
    ranking.ranked          # one layout of each tp, pp and micro-batch, the fastest first

To find the fastest, rows are predicted, which simulates their schedules, in the order of the
seconds that they take at least, until no other one can be faster. At every other place only the row
is predicted that is likely the fastest there.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from config.schema import Layout
from planner import closed_form, memory, risk
from planner.closed_form import Bounds
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
        self.accepted = accepted
        # By whether a row is risky.
        self.room = {False: risk.safe_bytes(machine, accepted), True: machine.memory}
        ranks = closed_form.Ranks.of(table)
        needs = closed_form.Needs.of(table, ranks)
        self.smallest = needs.smallest  # bytes that each row needs with all blocks recomputed
        self.fitting = {risky: needs.within(room) for risky, room in self.room.items()}
        self.rows = np.flatnonzero(self.fitting[True].fits)
        self.seconds = Bounds(table.of_rows(self.rows), ranks.of_rows(self.rows))
        self.ranked: list[Line] = []
        self.taken = set[Place]()  # places of ranked rows without risk
        self.refused: dict[Place, str] = {}
        self.waiting = set[Place]()  # places with rows that may fit, but were not tried
        self.all_rows = False  # whether `run_all` was asked for
        self.slower = 0  # rows, or with `run` places, that may fit, but that it did not try

    def run(self, most: float = math.inf) -> None:
        """Rank the fastest row of all that is not risky, the risky ones that are faster than that,
        and one row of each other place, so many places at most.
        """
        fastest = math.inf
        for place, line in self._faster_than(fastest, risky=False):
            fastest = line.prediction.seconds
            self.ranked, self.taken = [line], {place}
        if self.room[True] > self.room[False]:
            risky = dict(self._faster_than(fastest, risky=True))
            self.ranked += risky.values()
        _, likely = self._seconds(risky=False)
        places = [self.table.place(row) for _, row in likely]
        for (_, row), place in zip(likely, places, strict=True):
            if len(self.taken) >= most:
                self.waiting = {*places} - self.taken
                self.slower = len(self.waiting)
                return
            if place not in self.taken:
                self._take(row)

    def run_all(self, most: float) -> None:
        """Rank every row that is not risky, or, of more than so many, those that are likely the
        fastest: of each place at least one that is not FAR behind.
        """
        self.all_rows = True
        _, likely = self._seconds(risky=False)
        for tried, (seconds, row) in enumerate(likely):
            place = self.table.place(row)
            is_far = seconds > FAR * likely[0][0]
            if tried >= most and (is_far or place in self.taken):
                self.slower += 1
                self.waiting.add(place)
            else:
                self._take(row)

    def _take(self, row: int) -> None:
        """Rank a row, if it fits and is not refused."""
        if line := self._line(row, risky=False):
            self.ranked.append(line)
            self.taken.add(self.table.place(row))

    def _seconds(self, risky: bool) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
        """The rows that may fit, each after the seconds that it takes at least, and likely; the
        fastest first.
        """
        fitting = self.fitting[risky]
        fits = fitting.fits[self.rows]
        rows = self.rows[fits].tolist()
        bounds = self.seconds.with_recomputed(fitting.recomputed[self.rows])
        least, likely = (sorted(zip(seconds[fits].tolist(), rows)) for seconds in bounds)
        return least, likely

    def _faster_than(self, seconds: float, risky: bool) -> Iterator[tuple[Place, Line]]:
        """Rows with their places, each faster than those before: of all, or of risky ones than
        those of the same place.
        """
        fastest: dict[Place, float] = {}
        least, _ = self._seconds(risky)
        for bound, row in least:
            place = self.table.place(row)
            if bound >= seconds:
                return
            if bound >= fastest.get(place, math.inf):
                continue
            line = self._line(row, risky)
            if line is None or line.prediction.seconds >= fastest.get(place, seconds):
                continue
            fastest[place] = line.prediction.seconds
            if not risky:
                seconds = line.prediction.seconds
            yield place, line

    def _line(self, row: int, risky: bool) -> Line | None:
        """A row with its prediction; None if it does not fit, is refused, or has no risk although
        a risky one is asked for.
        """
        layout = self._fewest_recomputed(row, risky)
        if layout is None or (risky and self._needed(layout) <= self.room[False]):
            return None
        prediction = predict(*self.table.asked.job(layout))
        if reason := self.refusal(layout):
            self.refused.setdefault(self.table.place(row), reason)
            return None
        return Line(layout, prediction)

    def _fewest_recomputed(self, row: int, risky: bool) -> Layout | None:
        """The row's layout with the fewest blocks recomputed that fits; None if none does."""
        table, room = self.table, self.room[risky]
        layout = table.layout(row)
        free = layout.recompute != "none" and table.asked.counts_blocks
        most = max(blocks_per_stage(table.asked.model, layout)) if free else 0
        fewest = int(self.fitting[risky].recomputed[row, 0])
        for blocks in range(fewest, most):
            fewer = replace(layout, recompute_layers=blocks)
            if self._needed(fewer) <= room:
                return fewer
        return layout if self._needed(layout) <= room else None

    def _needed(self, layout: Layout) -> float:
        return memory.fullest(self.table.asked.job(layout)).total

    def rejected(self) -> list[Rejected]:
        """The places where no row fits or is taken, and why; of those that differ in the
        micro-batch alone, and do not fit, the smallest.
        """
        table = self.table
        order = np.lexsort((self.smallest, table.recompute != "full", *table.places.T[::-1]))
        places = table.places[order]
        is_first = np.append(True, (places[1:] != places[:-1]).any(axis=1))
        rows = order[is_first].tolist()
        least = {table.place(row): row for row in rows}  # by place, which needs the least
        taken = self.waiting | self.taken
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


def does_not_fit(job: Job) -> str:
    """Which stage is out of memory, needs what and has what, as a sentence; empty if all fit."""
    fullest, machine, layout = memory.fullest(job), job.machine, job.layout
    if fullest.total <= machine.memory:
        return ""
    needs = f"stage {fullest.stage} needs {fullest.total / 1e9:.1f} GB"
    needs += f" with --recompute {layout.recompute}" * (layout.recompute != "none")
    needs += f" --zero {layout.zero}" * (job.shards > 1)
    return f"out of memory: {needs}, {machine.name} has {machine.memory / 1e9:.1f}"
