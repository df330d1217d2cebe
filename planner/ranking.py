"""Ranks the rows of a table of layouts by their predicted seconds per step.

    ranking = Ranking(table, accepted=0.05)
    ranking.run(most=20)
    ranking.ranked          # one layout of each tp, pp and micro-batch, the fastest first

A row is a layout. A place is a tp, pp and micro-batch; several rows have the same place. A
prediction simulates a schedule, so only few rows are predicted. To find the fastest row, rows are
predicted in the order of their lower bounds in seconds, until a bound exceeds the fastest
prediction. At every other place only the row that is likely the fastest there is predicted.
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

Place = tuple[int, int, int]  # tp, pp and micro-batch
FAR = 1.3  # a row is far behind if it likely takes more than FAR times as long as the fastest row


class Line(NamedTuple):
    """A layout that fits, and its prediction."""

    layout: Layout
    prediction: Prediction


class Ranking:
    """The fastest rows of a table.

    ranked: one layout for each tp, pp and micro-batch, and risky layouts that are faster than every
    layout without risk. refused: by place, the reason why a row was not ranked.
    """

    def __init__(
        self,
        table: Table,
        accepted: float = risk.DEFAULT,
        refusal: Callable[[Layout], str] = lambda layout: "",
    ):
        """Compute for all rows whether they fit, and their bounds in seconds; predict no row.

        accepted: a row is risky if its probability of running out of memory is above this number.
        refusal: returns the reason why a layout that fits must not be ranked, or "".
        """
        self.table = table
        self.refusal = refusal
        machine = table.asked.machine
        self.accepted = accepted
        # The bytes that a rank may need: without risk (False), and if risky rows count too (True).
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
        self.slower = 0  # number of rows (after `run`: places) that may fit, but were not tried

    def run(self, most: float = math.inf) -> None:
        """Rank the fastest row without risk, the risky rows that are faster, and the row that is
        likely the fastest of each other place. most: the number of places with rows without risk.
        """
        fastest = math.inf
        for place, line in self._faster_than(fastest, risky=False):
            fastest = line.prediction.seconds
            self.ranked = [line]
            self.taken = {place}
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
        """Rank the `most` rows without risk that are likely the fastest.

        A further row is ranked if it is the first of its place and is not FAR behind the fastest.
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
        """Rank a row if it fits without risk and is not refused."""
        if line := self._line(row, risky=False):
            self.ranked.append(line)
            self.taken.add(self.table.place(row))

    def _seconds(self, risky: bool) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
        """Return two lists of (seconds, row) of the rows that may fit, the fastest first.

        The seconds of the first list are lower bounds, those of the second list are estimates.
        """
        fitting = self.fitting[risky]
        fits = fitting.fits[self.rows]
        rows = self.rows[fits].tolist()
        bounds = self.seconds.with_recomputed(fitting.recomputed[self.rows])
        least, likely = (sorted(zip(seconds[fits].tolist(), rows)) for seconds in bounds)
        return least, likely

    def _faster_than(self, seconds: float, risky: bool) -> Iterator[tuple[Place, Line]]:
        """Yield rows that are faster than `seconds`, with their places and predictions.

        Without risk each row is faster than all rows before. A risky row is faster than the rows
        before that have the same place.
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
        """Return a row's layout with its prediction, or None.

        It is None if the row does not fit, if it is refused, or if a risky row is asked for and
        this row has no risk.
        """
        layout = self._fewest_recomputed(row, risky)
        if layout is None:
            return None
        if risky and self._needed(layout) <= self.room[False]:
            return None
        prediction = predict(*self.table.asked.job(layout))
        if reason := self.refusal(layout):
            self.refused.setdefault(self.table.place(row), reason)
            return None
        return Line(layout, prediction)

    def _fewest_recomputed(self, row: int, risky: bool) -> Layout | None:
        """Return the row's layout that fits with the fewest recomputed blocks, or None.

        The number of recomputed blocks is searched only if the question leaves it open.
        """
        table = self.table
        room = self.room[risky]
        layout = table.layout(row)
        most = 0
        if layout.recompute != "none" and table.asked.counts_blocks:
            most = max(blocks_per_stage(table.asked.model, layout))
        fewest = int(self.fitting[risky].recomputed[row, 0])
        for blocks in range(fewest, most):
            fewer = replace(layout, recompute_layers=blocks)
            if self._needed(fewer) <= room:
                return fewer
        return layout if self._needed(layout) <= room else None

    def _needed(self, layout: Layout) -> float:
        """Return the bytes that a layout needs on the GPUs of its fullest rank."""
        return memory.fullest(self.table.asked.job(layout)).total

    def rejected(self) -> list[Rejected]:
        """Return a layout and a reason for each place where no row was ranked.

        If a place does not fit, the places with the same tp and pp and a larger micro-batch are
        left out, because they need more memory.
        """
        table = self.table
        # By place; within a place, full recomputation first, then the row that needs least.
        order = np.lexsort((self.smallest, table.recompute != "full", *table.places.T[::-1]))
        places = table.places[order]
        is_first = np.append(True, (places[1:] != places[:-1]).any(axis=1))
        rows = order[is_first].tolist()
        smallest_row = {table.place(row): row for row in rows}
        rejected = []
        too_large = set[tuple[int, int]]()  # tp and pp of places that do not fit
        for place in sorted(smallest_row.keys() - self.waiting - self.taken):
            layout = table.layout(smallest_row[place])
            job = table.asked.job(layout)
            tp_and_pp = place[:2]
            reason = self.refused.get(place) or does_not_fit(job) or self._risk_of(job)
            if not reason or tp_and_pp in too_large:
                continue
            has_larger = any(p[:2] == tp_and_pp and p > place for p in smallest_row)
            if place not in self.refused and has_larger:
                too_large.add(tp_and_pp)
                reason += "; larger micro-batches need more"
            rejected.append(rejected_layout(layout, reason))
        return rejected

    def _risk_of(self, job: Job) -> str:
        """Return the reason that a layout which fits is too risky; "" after `run`.

        After `run` a risky layout may be unranked only because it is slower than the fastest.
        """
        if not self.all_rows:
            return ""
        probability = risk.out_of_memory(job.machine, memory.fullest(job).total)
        exceeds = "of running out of memory is above --risk"
        return f"the risk({probability:.0%}) {exceeds}({self.accepted:.0%})"


def does_not_fit(job: Job) -> str:
    """Return an error line with the memory that the fullest stage needs and a GPU has; "" if the
    layout fits.
    """
    fullest = memory.fullest(job)
    machine = job.machine
    layout = job.layout
    if fullest.total <= machine.memory:
        return ""
    needs = f"stage {fullest.stage} needs {fullest.total / 1e9:.1f} GB"
    if layout.recompute != "none":
        needs += f" with --recompute {layout.recompute}"
    if job.shards > 1:
        needs += f" --zero {layout.zero}"
    return f"out of memory: {needs}, {machine.name} has {machine.memory / 1e9:.1f}"
