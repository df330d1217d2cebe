"""Finds the layouts of a model on some GPUs that fit, and ranks them by speed: no output.

They are ranked by what one would bet on: the seconds that a step is expected to keep within in four
of five runs (risk.quantile). Of two layouts that are predicted to be equally fast, that one comes
first whose kind was measured. The tuner, which measures, ranks by the predicted seconds.

    answer = rank(Asked(model, training, machine, 384))
    answer.ranked[0].layout, answer.rejected

Every layout is either ranked, or rejected with a reason. `Asked` is the question: the model, the
training options, the machine, the number of GPUs, and the options of the layout that are fixed.

A row of the table of all layouts is a layout. A place is a tp, pp and micro-batch size; several
rows have the same place, and the fastest of them is ranked. A layout is without risk if its
probability of running out of memory is at most a limit; else it is risky.

Closed forms give two times for every row: its likely time, and a lower bound. A row is tried, by
simulating its schedule, only if it may be the fastest row, or if it is likely the fastest row of
its place.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from config.batch_schedule import BatchSchedule
from config.schema import Layout
from config.validation import check_shape
from costs import memory, risk
from costs.auto_schedule import decide_layout
from costs.job import Job
from costs.partition_costs import blocks_of
from costs.step_time import Prediction, predict
from tools.planner.closed_form import ClosedForm
from tools.planner.enumeration import (
    MICRO_BATCHES,
    Asked,
    Rejected,
    Table,
    every_layout,
    rejected_layout,
)

# With --schedule auto, its schedule is decided only for this number of layouts: those that are the
# fastest with 1F1B.
PRICED_WITH_AUTO = 8
# The options with which a layout needs the least memory. Schedules that keep more activations than
# 1F1B are left out.
LEAN: dict[str, Any] = {
    "micro_batch_size": 1,
    "recompute": "full",
    "recompute_layers": None,
    "schedule": ["1f1b", "zb-h1", "zb-v"],
}
BLOCK = 1024  # rows of which the search looks at once whether any of them may be the fastest
FAR = 1.3  # a row is far behind if it likely takes more than FAR times as long as the fastest row


class Ranked(NamedTuple):
    """A layout that fits, with --ep filled in, and its prediction.

    priced: the layout that was predicted: with --schedule auto, the layout with the schedule that
    was found for it; else the layout itself.
    """

    layout: Layout
    prediction: Prediction
    priced: Layout


class Ranking(NamedTuple):
    """The planner's answer.

    ranked: layouts that fit, the fastest first. rejected: layouts that cannot run, with reasons.
    slower: the number of places (with `every`: rows) that were not ranked because enough faster
    layouts were found. median: the layout without risk whose predicted seconds are the least, or
    nothing.
    """

    ranked: list[Ranked]
    rejected: list[Rejected]
    slower: int
    median: list[Ranked]


def rank(
    asked: Asked,
    refusal: Callable[[Layout], str] = lambda layout: "",
    accepted: float = risk.DEFAULT,
    most: float = math.inf,
    median: bool = False,
    every: bool = False,
) -> Ranking:
    """Return the layouts on the GPUs of a question, the best bet first, and the rejected layouts.

    For each tp, pp and micro-batch the first layout without risk is ranked. Risky layouts, whose
    probability of running out of memory is above `accepted`, are ranked if they are faster.

    refusal: returns the reason why a layout that fits cannot run, or "".
    most: the number of layouts without risk to rank.
    median: whether the answer has the layout with the least predicted seconds too.
    every: whether to rank all layouts without risk, or if there are more than `most`, those that
    are likely the fastest, and the first of each place that is not FAR behind. Then the order is
    that of the predicted seconds.

    Raise UserError if the model or the ramp-up of the batch is impossible.
    """
    check_shape(asked.model)
    if asked.fixed.get("schedule") == "auto":
        return _rank_auto(asked, refusal, accepted, most, median)
    return _rank_named(asked, refusal, accepted, most, median, every)


def _rank_auto(
    asked: Asked,
    refusal: Callable[[Layout], str],
    accepted: float,
    most: float,
    median: bool,
) -> Ranking:
    """Return the result of `rank` with --schedule auto: ranked with 1F1B, then each with its own.

    A layout must be one that train.py accepts with `auto`.
    """
    with_1f1b = _rank_named(
        asked._replace(fixed=asked.fixed | {"schedule": "1f1b"}),
        lambda layout: refusal(replace(layout, schedule="auto")),
        accepted,
        most,
        median,
    )
    ranked = _with_auto(with_1f1b.ranked, asked)
    return with_1f1b._replace(ranked=ranked, median=_with_auto(with_1f1b.median, asked))


def _rank_named(
    asked: Asked,
    refusal: Callable[[Layout], str],
    accepted: float,
    most: float,
    median: bool,
    every: bool = False,
) -> Ranking:
    """Return the result of `rank` for schedules other than auto; the arguments are its own."""
    table, rejected = every_layout(asked)
    if table is None:
        return Ranking([], rejected, 0, [])
    search = _Search(table, accepted, refusal, bets=not every)
    if every:
        ranked = search.every_row(most)
    else:
        ranked = search.fastest(most)
        ranked = _in_order(ranked + search.risky(ranked))
    slower = len(search.left_out)
    rejected += search.rejected(every)
    least = search.by_median().fastest(1) if median else []
    return Ranking(ranked, rejected, slower, least[:1])


def leanest(
    asked: Asked,
    refusal: Callable[[Layout], str] = lambda layout: "",
    accepted: float = risk.DEFAULT,
) -> Ranked | None:
    """Return a lean layout without risk, or None if there is none: whether a model fits at all.

    Lean layouts need the least memory (LEAN). Of those that fit, it is the one that is likely the
    fastest. The arguments are those of `rank`, which finds this layout and others.
    """
    table, _ = every_layout(asked._replace(fixed=LEAN | asked.fixed))
    return _Search(table, accepted, refusal, bets=False).first() if table else None


def _with_auto(ranked: list[Ranked], asked: Asked) -> list[Ranked]:
    """Return layouts that were ranked with 1F1B as layouts with --schedule auto, in order of speed.

    The first PRICED_WITH_AUTO layouts are predicted with the schedule that `auto` is for them. The
    others keep the prediction of 1F1B: in simulation `auto` is never slower.
    """
    with_auto = []
    for number, (with_1f1b, prediction, priced) in enumerate(ranked):
        auto_layout = replace(with_1f1b, schedule="auto")
        if number < PRICED_WITH_AUTO:
            layout, _ = decide_layout(asked.job(auto_layout))
            chosen = predict(asked.job(layout))
            if chosen.fits and chosen.seconds < prediction.seconds:
                prediction, priced = chosen, layout
        with_auto.append(Ranked(auto_layout, prediction, priced))
    return _in_order(with_auto)


def _in_order(lines: list[Ranked], bets: bool = True) -> list[Ranked]:
    """Return ranked layouts in the order of their quantiles, or without bets of their seconds."""
    return sorted(lines, key=lambda line: _time(line, bets))


def _time(line: Ranked, bets: bool) -> float:
    """Return the quantile of a layout's seconds by which it is ranked, or without bets these."""
    return line.prediction.quantile if bets else line.prediction.seconds


class _Row(NamedTuple):
    """A row of the table that may fit: its number, its place, and its time by closed form."""

    number: int
    place: int
    likely: float
    least: float


class _Rows(NamedTuple):
    """The fields of rows as columns, each of the shape (rows,)."""

    number: np.ndarray
    place: np.ndarray
    likely: np.ndarray
    least: np.ndarray

    def take(self, which: Any) -> "_Rows":
        """Return some of the rows; which: what selects elements of a column."""
        return _Rows(*(column[which] for column in self))

    def each(self) -> Iterator[_Row]:
        """Yield the rows one by one."""
        return map(_Row._make, zip(*(column.tolist() for column in self), strict=True))


class _Search:
    """A search for the fastest rows of a table.

    lines: the results of `_line`. refused: by place, the reason why a row was not ranked. taken:
    places of ranked rows without risk. left_out: the places of rows that may fit and were not tried
    because enough others were found. bets: whether a row's time is a quantile of its seconds.
    """

    def __init__(self, table: Table, accepted: float, refusal: Callable[[Layout], str], bets: bool):
        """Find the rows that may fit, and the number of blocks that each must recompute for that.

        accepted: the highest probability of running out of memory of a row without risk. refusal:
        returns the reason why a layout cannot run, or "".
        """
        self.table = table
        self.accepted = accepted
        self.refusal = refusal
        self.bets = bets
        machine = table.asked.machine
        # The bytes that a rank may need, by whether risky rows are accepted: without them (False)
        # it must keep a margin, with them (True) it may fill the GPU. Further fields have the same
        # two keys: `recomputed`, the fewest recomputed blocks of each row, and `fits`.
        self.room = {False: risk.safe_bytes(machine, accepted), True: machine.memory}
        closed = ClosedForm(table)
        self.smallest, within = closed.memory(self.room)
        self.recomputed = {risky: recomputed for risky, (_, recomputed) in within.items()}
        # The numbers of the rows that may fit at all; `fits` and `closed` have only these rows.
        self.rows = np.flatnonzero(within[True][0])
        self.fits = {risky: fits[self.rows] for risky, (fits, _) in within.items()}
        self.closed = closed.take_rows(self.rows)
        # By whether risky rows are accepted, the likely and the least seconds of these rows.
        self.seconds: dict[bool, tuple[np.ndarray, np.ndarray]] = {}
        # By row's number and `risky`, the result of `_line`; None: the row cannot be ranked.
        self.lines: dict[tuple[int, bool], Ranked | None] = {}
        self.stages: dict[Layout, list[memory.StageMemory]] = {}  # the memory of tried layouts
        self.refused: dict[int, str] = {}  # by place, the reason why a row was not ranked
        self.taken = set[int]()  # places of which a row without risk was ranked
        self.left_out: list[int] = []  # of those not tried, as enough others were found

    def by_median(self) -> "_Search":
        """Return a search of the same rows by predicted seconds, which knows what was tried."""
        other = copy.copy(self)
        other.bets = False
        other.taken, other.left_out = set(), []
        return other

    def fastest(self, most: float) -> list[Ranked]:
        """Return the fastest row without risk, and for other places their likely fastest rows.

        They are at most about `most` places, in the order of their time. Rows are tried in the
        order of their likely time. The other places are kept in `left_out`, for the count of
        slower ones.
        """
        lines: dict[int, Ranked] = {}  # by place, the fastest row that was tried
        waiting = set[int]()  # places of rows that were not tried
        fastest = math.inf  # the time of the fastest row so far
        # A row is not tried if it cannot be the fastest, and its place has a better row or enough
        # places are ranked. Then nearly all rows are left, so whole blocks of them are looked at.
        rows = self._likely_first(False)
        for begin in range(0, len(rows.number), BLOCK):
            block = rows.take(slice(begin, begin + BLOCK))
            if len(lines) >= most:
                may_be_first = block.least < fastest
                waiting.update(block.place[~may_be_first].tolist())
                block = block.take(may_be_first)
            for row in block.each():
                if row.least >= fastest and (row.place in lines or len(lines) >= most):
                    waiting.add(row.place)
                    continue
                line = self._line(row, risky=False)
                if line is None:
                    continue
                time = _time(line, self.bets)
                fastest = min(fastest, time)
                if row.place not in lines or time < _time(lines[row.place], self.bets):
                    lines[row.place] = line
        self.taken |= lines.keys()
        self.left_out = [place for place in waiting if place not in lines]
        return _in_order(list(lines.values()), self.bets)

    def first(self) -> Ranked | None:
        """Return the first row without risk, in the order of likely time, or None."""
        lines = (self._line(row, risky=False) for row in self._likely_first(False).each())
        return next((line for line in lines if line), None)

    def risky(self, safe: list[Ranked]) -> list[Ranked]:
        """Return the fastest risky row of each place, if it is faster than all rows without risk.

        safe: the rows without risk, the fastest first. A row is tried only if its lower bound is
        below the time that it must beat.
        """
        lines: dict[int, Ranked] = {}
        # `room` has the bytes that a risky row may need (True), and a row without risk (False). If
        # they are equal, a row that fits is without risk.
        if self.room[True] <= self.room[False]:
            return []
        fastest = _time(safe[0], self.bets) if safe else math.inf
        rows = self._likely_first(True)
        for row in rows.take(rows.least < fastest).each():
            limit = fastest  # the time to beat: of the safe rows, or of this place's risky row
            if row.place in lines:
                limit = _time(lines[row.place], self.bets)
            if row.least < limit:
                line = self._line(row, risky=True)
                if line and _time(line, self.bets) < limit:
                    lines[row.place] = line
        return list(lines.values())

    def every_row(self, most: float) -> list[Ranked]:
        """Return the `most` rows without risk that are likely the fastest, the fastest first.

        A further row is ranked if it is the first of its place and is not FAR behind the fastest
        row. All others are kept in `left_out`. The tuner takes its candidates from here.
        """
        lines = []
        rows = list(self._likely_first(False).each())
        for tried, row in enumerate(rows):
            is_far = row.likely > FAR * rows[0].likely
            if tried >= most and (is_far or row.place in self.taken):
                self.left_out.append(row.place)
            elif line := self._line(row, risky=False):
                lines.append(line)
                self.taken.add(row.place)
        return _in_order(lines, self.bets)

    def _likely_first(self, risky: bool) -> _Rows:
        """Return the rows that may fit, the likely fastest first.

        risky: whether rows that fit only with a risk are included. `self.rows` has the numbers of
        the rows that may fit; `fits` and the closed forms have an entry for each of them.
        """
        if risky not in self.seconds:
            self.seconds[risky] = self.closed.seconds(self.recomputed[risky][self.rows])
        likely, least = self.seconds[risky]
        if self.bets:
            likely, least = self.closed.quantile(likely), self.closed.quantile(least)
        order = np.flatnonzero(self.fits[risky])
        order = order[np.argsort(likely[order], kind="stable")]
        return _Rows(self.rows, self.table.place[self.rows], likely, least).take(order)

    def _line(self, row: _Row, risky: bool) -> Ranked | None:
        """Return a row's layout with its prediction, or None if it cannot be ranked.

        It is None if the row does not fit, if it is refused, or if a risky row is asked for and
        this row has no risk. The result is kept, since a row may be asked for several times.
        """
        if (row.number, risky) not in self.lines:
            self.lines[row.number, risky] = self._priced(row, risky)
        return self.lines[row.number, risky]

    def _priced(self, row: _Row, risky: bool) -> Ranked | None:
        """Return a row's layout with its exact memory and its prediction, or None: see `_line`.

        If the planner chooses the number of recomputed blocks, numbers are tried from the fewest
        with which the row may fit to all blocks, until the row fits.
        """
        asked = self.table.asked
        layout = self.table.layout(row.number)
        tried = [layout]
        if layout.recompute != "none" and asked.counts_blocks:
            fewest = int(self.recomputed[risky][row.number, 0])
            numbers = range(fewest, max(blocks_of(asked.job(layout))))
            tried = [replace(layout, recompute_layers=number) for number in numbers] + tried
        for layout in tried:
            job = asked.job(layout)
            if layout not in self.stages:
                self.stages[layout] = memory.stages(job)
            stages = self.stages[layout]
            needed = max(stage.total for stage in stages)
            if needed > self.room[risky]:
                continue
            if risky and needed <= self.room[False]:  # the row has no risk: `fastest` ranks it
                return None
            if reason := self.refusal(layout):
                self.refused.setdefault(row.place, reason)
                return None
            return Ranked(job.layout_with_ep, predict(job, stages), layout)
        return None

    def rejected(self, every: bool) -> list[Rejected]:
        """Return a layout and a reason for each place where no row was ranked.

        The layout is the one of the place that needs the least memory. If a place does not fit, the
        places with the same tp and pp and a larger micro-batch are left out, because they need more
        memory. every: whether all rows were tried that are not in `left_out`; then a layout that
        fits was not ranked because of its risk. Else it may just be slower than others.
        """
        table = self.table
        # Sort the rows by place, and within a place by what is shown first: full recomputation,
        # then the fewest bytes. `first` has the position of the first row of each place.
        order = np.lexsort((self.smallest, table.recompute != "full", table.place))
        places, first = np.unique(table.place[order], return_index=True)
        # Places that are not rejected: one of their rows was ranked, or was left out as slower.
        waiting = self.taken | set(self.left_out)
        smallest_rows = order[first].tolist()
        rejected = []
        too_large = set[tuple[int, int]]()  # tp and pp with which larger micro-batches do not fit
        for number, (place, row) in enumerate(zip(places.tolist(), smallest_rows, strict=True)):
            if place in waiting:
                continue
            layout = table.layout(row)
            tp_and_pp = layout.tp, layout.pp
            if tp_and_pp in too_large:
                continue
            job = table.asked.job(layout)
            reason = self.refused.get(place) or does_not_fit(job)
            if not reason and every:
                reason = self._risk_of(job)
            if not reason:
                continue
            # A next place with the same tp and pp differs only in its larger micro-batch. It needs
            # more memory than this place, so it is left out of the list.
            next_places = table.places[smallest_rows[number + 1 : number + 2], :2].tolist()
            if place not in self.refused and next_places == [[*tp_and_pp]]:
                too_large.add(tp_and_pp)
                reason += "; larger micro-batches need more"
            rejected.append(rejected_layout(layout, reason))
        return rejected

    def _risk_of(self, job: Job) -> str:
        """Return the text that a layout's risk of running out of memory is too high."""
        probability = risk.out_of_memory(job.machine, memory.fullest(job).total)
        exceeds = "of running out of memory is above --risk"
        return f"the risk({probability:.0%}) {exceeds}({self.accepted:.0%})"


def does_not_fit(job: Job) -> str:
    """Return the reason that a layout does not fit: the memory that it needs, and that a GPU has.

    The needed memory is that of the fullest stage. It is "" if the layout fits.
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


# ---- Batch-size ramp-up --------------------------------------------------------------------------


def rampup_verdict(layout: Layout, schedule: BatchSchedule) -> str:
    """Return whether a layout can run every batch size of a ramp-up, as text for a table.

    The text is "fits" if every batch size is a multiple of micro-batch x dp; otherwise it names the
    first batch size that is not. Without a ramp-up it is "-".
    """
    levels = schedule.levels()
    if len(levels) == 1:
        return "-"
    multiple = layout.micro_batch_size * layout.dp
    for level in levels:
        if level.batch % multiple:
            return f"batch {level.batch} does not divide by {multiple}"
    return "fits"


def allowed(layout: Layout, batch: int, node: int, most_nodes: int) -> list[dict[str, Any]]:
    """Return the numbers of nodes, up to `most_nodes`, with which a layout can run a batch.

    node: the GPUs of a node. Each entry has `nodes`, the number of nodes; `dp`, the number of
    replicas on them, which divides the batch; and `micro_batches`, the sizes in MICRO_BATCHES that
    divide a replica's share of the batch.
    """
    rows = []
    gpus_of_replica = layout.tp * layout.pp * layout.cp
    for nodes in range(1, most_nodes + 1):
        dp, unused_gpus = divmod(nodes * node, gpus_of_replica)
        if unused_gpus == 0 and batch % dp == 0:
            sizes = [size for size in MICRO_BATCHES if batch // dp % size == 0]
            rows.append({"nodes": nodes, "dp": dp, "micro_batches": sizes})
    return rows
