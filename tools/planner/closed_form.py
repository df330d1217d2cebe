"""Computes the seconds and bytes of every row of a table of layouts, without building schedules.

    closed = ClosedForm(table)
    fits, recomputed = closed.within(80e9)       # the blocks each row recomputes to fit in 80 GB
    likely, least = closed.seconds(recomputed)

A row of the table is a layout. Numbers of a row are columns of the shape (rows, 1), which broadcast
with numbers of some of its pipeline ranks: (rows, ranks). A way is a part of a row's layout: tp,
pp, cp, schedule and partition (tools/planner/enumeration.py). A pipeline rank may hold several
stages. The formulas come from costs/time_terms.py and costs/memory_terms.py. "Likely" seconds are
the best estimate; "least" seconds are a lower bound. tools/planner/layouts.py simulates the rows
that may be the fastest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from costs import memory_terms, risk, step_time, time_terms
from costs.job import Column, Job
from costs.memory_terms import Parts
from costs.op_costs import Pass
from costs.partition_costs import specs_of
from costs.step_time import Most, Passes
from schedules.partition import StageSpec
from tools.planner.enumeration import COLUMNS, Table

# Ranks also wait for one another because of the order of their passes. These are the likely seconds
# of this waiting as a share of the pipeline's time. FOLDED is for zb-v, whose order assumes that
# all passes take the same time. UNEVEN is for interleaved, if the largest stage of a rank has twice
# the mean number of blocks. In simulations of presets on A100 and H100, zb-v waited 0.06 to 0.4,
# and interleaved 0.1 to 0.6. Ranks that share cores with others may not wait at all.
FOLDED = 0.2
UNEVEN = 0.3
BLOCK = 8192  # rows that are computed at once
ROUNDING = 1.0  # a row may exceed the memory by this number of bytes, since sums are rounded


class ChosenRanks(NamedTuple):
    """Some pipeline ranks of every row, among them the slowest and the fullest: (rows, ranks).

    Of the ranks whose stages hold the same, the first and the last are chosen. rank: the rank's
    number. blocks: the blocks of all its stages together. most, least: the blocks of its largest
    and its smallest stage. before: the blocks of the first stages of all earlier ranks. embedding,
    head, tied: whether one of its stages has the embedding, the head, a copy of a tied matrix.
    """

    rank: np.ndarray
    blocks: np.ndarray
    most: np.ndarray
    least: np.ndarray
    before: np.ndarray
    embedding: np.ndarray
    head: np.ndarray
    tied: np.ndarray

    @classmethod
    def of(cls, table: Table) -> "ChosenRanks":
        """Return the fields of this class for a table's rows: arrays of the shape (rows, ranks).

        A few ranks of each row are chosen, among them the slowest and the fullest. Ways with the
        same stages have the same ranks, which are chosen once. A row with fewer ranks than others
        repeats its last rank, which changes no maximum over the ranks.
        """
        # A kind is everything on which the stages depend; ways of one kind have the same ranks.
        ranks_of_kind: dict[tuple, list[tuple[int, ...]]] = {}
        kinds = []
        for way in table.ways:
            kind = way.pp, way.schedule, way.virtual_stages, way.partition
            kinds.append(kind)
            if kind not in ranks_of_kind:
                ranks_of_kind[kind] = _chosen_ranks(table.asked.job(way))
        longest = max(map(len, ranks_of_kind.values()))
        padded = [ranks + ranks[-1:] * (longest - len(ranks)) for ranks in ranks_of_kind.values()]
        number_of = {kind: number for number, kind in enumerate(ranks_of_kind)}
        kind_of_way = np.array([number_of[kind] for kind in kinds])
        # Each field's numbers lie together in memory, which makes all later arithmetic faster.
        of_kinds = np.ascontiguousarray(np.moveaxis(np.array(padded), 2, 0))
        kind_of_row = kind_of_way[table.way]
        numbers = [field[kind_of_row] for field in of_kinds]  # each (rows, ranks)
        # The first five fields are numbers; the last three are flags, and become booleans.
        return cls(*numbers[:5], *(flag > 0 for flag in numbers[5:]))

    @property
    def parts(self) -> Parts:
        """The parts of the model that all stages of a rank hold together."""
        return Parts(self.blocks, self.embedding, self.head, self.tied)


def _chosen_ranks(job: Job) -> list[tuple[int, ...]]:
    """Return the fields of `ChosenRanks` for some pipeline ranks of a way, a tuple for each rank.

    Among ranks whose stages have the same blocks, embedding and head, the first and the last are
    chosen: the first keeps the most activations, the last waits longest for its first input.
    """
    stages_of_rank: list[list[StageSpec]] = [[] for _ in range(job.layout.pp)]
    for spec in specs_of(job):
        stages_of_rank[spec.rank].append(spec)
    # By the contents of a rank's stages, the first and the last rank that has these contents.
    chosen: dict[tuple, list[tuple[int, ...]]] = {}
    before = 0  # the sum, over all earlier ranks, of the blocks in the rank's first stage
    for rank, stages in enumerate(stages_of_rank):
        blocks = [spec.blocks for spec in stages]
        flags = [stages[0].embedding, stages[-1].head, any(spec.tied for spec in stages)]
        numbers = rank, sum(blocks), max(blocks), min(blocks), before
        first_and_last = chosen.setdefault((*blocks, *flags), [])
        # Keep the first rank with these contents, and the last one so far in place of others.
        first_and_last[1:] = [(*numbers, *flags)]
        before += blocks[0]
    return [fields for first_and_last in chosen.values() for fields in first_and_last]


def _joined(blocks: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of arrays as a pair of longer ones."""
    first, second = zip(*blocks, strict=True)
    return np.concatenate(first), np.concatenate(second)


class ClosedForm:
    """The seconds and bytes of every row of a table, for any number of recomputed blocks."""

    def __init__(self, table: Table, ranks: ChosenRanks | None = None, job: Job | None = None):
        """Keep a table, the chosen ranks of its rows, and its job; None to make them now."""
        self.table = table
        self.job = job or table.job
        self.ranks = ranks or ChosenRanks.of(table)

    def take_rows(self, rows: np.ndarray | slice) -> "ClosedForm":
        """Return an object like this for some of the table's rows; rows: what selects them."""
        ranks = ChosenRanks(*(column[rows] for column in self.ranks))
        layouts = self.job.layout
        columns = {name: getattr(layouts, name)[rows] for name in COLUMNS}
        job = self.job._replace(layout=replace(layouts, **columns))
        return ClosedForm(self.table.take_rows(rows), ranks, job)

    def _each_block(self) -> Iterator[tuple[slice, "ClosedForm"]]:
        """Yield blocks of the rows, with the slice of each.

        The arrays of a block stay in the processor's cache, which makes formulas twice as fast.
        """
        for begin in range(0, max(1, len(self.table)), BLOCK):  # no rows are a block too
            rows = slice(begin, begin + BLOCK)
            yield rows, self.take_rows(rows)

    @cached_property
    def _blocks(self) -> list[tuple[slice, "ClosedForm"]]:
        """All blocks, which keep what they have computed for `seconds`."""
        return list(self._each_block())

    # ---- Bytes --------------------------------------------------------------------------------

    def memory(
        self, rooms: Mapping[bool, float]
    ) -> tuple[np.ndarray, dict[bool, tuple[np.ndarray, np.ndarray]]]:
        """Return the results of `smallest`, and of `within` for each room by its key."""
        smallest = []
        within: dict[bool, list[tuple[np.ndarray, np.ndarray]]] = {key: [] for key in rooms}
        for _, block in self._each_block():
            smallest.append(block.smallest())
            for key, room in rooms.items():
                within[key].append(block.within(room))
        return np.concatenate(smallest), {key: _joined(pairs) for key, pairs in within.items()}

    @cached_property
    def unsaved(self) -> np.ndarray:
        """The bytes that each rank needs if no block is recomputed: (rows, ranks).

        It may be a little too low, never too high, so that no row is rejected wrongly.
        """
        job = self.job
        ranks = self.ranks
        _, block_activations = self._kept_of_block
        flying = self._in_flight
        # If the head's rank has a single stage, the logits of all its micro-batches in flight are
        # kept. With several stages its other stages have most of the micro-batches in flight, and
        # the stage with the head runs each backward at once: it keeps the logits of one.
        keeps_heads = ranks.head & (job.layout.stages_per_rank == 1)
        heads = np.where(keeps_heads, flying, 1)
        kept = ranks.blocks * block_activations
        working = memory_terms.working_of(job, ranks.parts, kept, heads)  # temporary memory
        # All stages of a rank count as the smallest one, which makes this a lower bound.
        activations = flying * job.layout.stages_per_rank * ranks.least * block_activations
        states = sum(memory_terms.states_of(job, ranks.parts).values())
        fixed = memory_terms.buffers_of(job) + job.machine.context
        return states + activations + working + fixed

    @cached_property
    def saved(self) -> np.ndarray:
        """The bytes that a rank saves by recomputing one more block of each stage: (rows, ranks).

        It is 0 in rows without recomputation.
        """
        if_recomputed, if_not = self._kept_of_block
        saved = self._in_flight * self.job.layout.stages_per_rank * (if_not - if_recomputed)
        return np.where(self.recomputes, saved, 0.0)

    @cached_property
    def _kept_of_block(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes that a block keeps for one micro-batch: (if it is recomputed, if not)."""
        return memory_terms.kept_of_block(self.job)

    @cached_property
    def _in_flight(self) -> np.ndarray:
        """The micro-batches whose activations each rank keeps at once, at least: (rows, ranks)."""
        return memory_terms.in_flight(self.job, self.ranks.rank)

    @cached_property
    def recomputes(self) -> np.ndarray:
        """Whether each row has recomputation: (rows, 1)."""
        return np.not_equal(self.job.layout.recompute, "none")

    def smallest(self) -> np.ndarray:
        """Return the bytes of each row's fullest rank if all blocks are recomputed: (rows,).

        `layouts` names the row with the least bytes when no row of a place fits.
        """
        return (self.unsaved - self.saved * self.ranks.least).max(axis=1)

    def within(self, room: float) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows may fit into `room` bytes, and the blocks that they recompute for that.

        The results are booleans (rows,), and for each row the fewest recomputed blocks of a stage
        with which all its ranks fit (rows, 1), or the number that the user has fixed. A rank needs
        `unsaved` bytes if it recomputes no block, and `saved` bytes less for each block that every
        one of its stages recomputes. `layouts` simulates only rows that may fit.
        """
        fixed = self.table.asked.fixed
        most = self.ranks.most.max(axis=1, keepdims=True)
        if fixed.get("recompute_blocks") is not None:  # a list with a number for each stage
            # A row may fit if it does with all blocks recomputed. Its seconds count none (0), which
            # makes them a lower bound.
            return self.smallest() <= room + ROUNDING, np.zeros_like(most)
        if "recompute_layers" in fixed:
            layers = fixed["recompute_layers"]
            fewest = np.full_like(most, self.job.model.layers if layers is None else layers)
        else:
            # A row recomputes as few blocks as save the bytes `over`, by which a rank exceeds the
            # room: ceil(over / bytes saved by a block), at least 1 and at most all blocks. For a
            # row without recomputation, where a block saves nothing, the division gives 0.
            over = np.maximum(0.0, self.unsaved - room)
            saved_by_block = np.where(self.saved > 0, self.saved, np.inf)
            fewest = np.ceil(over / saved_by_block).max(axis=1, keepdims=True)
            fewest = np.clip(fewest, 1, most).astype(int)
        fewest = np.where(self.recomputes, np.minimum(fewest, most), 0)
        # A rank's smallest stage may have fewer blocks than `fewest`: count no more than it has.
        needed = self.unsaved - self.saved * np.minimum(fewest, self.ranks.least)
        return needed.max(axis=1) <= room + ROUNDING, fewest

    # ---- Seconds ------------------------------------------------------------------------------

    @cached_property
    def passes(self) -> Passes:
        """The seconds of one micro-batch through a block, the embedding and the head, per row."""
        return step_time.passes_of(self.job)

    def seconds(self, recomputed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of a step of each row: likely, and at least; both (rows,).

        They are the pipeline's seconds, with the likely waiting of its schedule or without it, then
        what follows the last backward pass. recomputed: the number of recomputed blocks of each
        stage: (rows, 1).
        """
        return _joined([block._seconds(recomputed[rows]) for rows, block in self._blocks])

    def _seconds(self, recomputed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the result of `seconds`, for all rows at once."""
        pipeline = self._pipeline(recomputed)
        after = sum(step_time.after_pipeline(self.job, self._most(recomputed)).values())
        likely = pipeline * (1 + self._waiting()) + after
        least = pipeline + after
        slowdown = self.job.machine.slowdown
        return slowdown * likely[:, 0], slowdown * least[:, 0]

    def quantile(self, seconds: np.ndarray) -> np.ndarray:
        """Return the quantile by which layouts are ranked, of each row's seconds: (rows,).

        It grows with the seconds, so that of a lower bound it is a lower bound.
        """
        found = []
        for rows, block in self._blocks:
            column = seconds[rows, None]
            quantiles = risk.quantile(block.job, column, block.passes.block.forward)
            found.append(np.broadcast_to(quantiles, column.shape)[:, 0])
        return np.concatenate(found)

    def _pipeline(self, recomputed: np.ndarray) -> np.ndarray:
        """Return the pipeline's seconds, without waits that the order of passes causes: (rows, 1).

        For each rank three times are added: until the first micro-batch has come from the first
        rank, the rank's own passes, and until the last micro-batch's gradients have gone back to
        the first rank. The second time is longer if the rank has to wait for round trips of its
        micro-batches to the last rank and back. The slowest rank determines the result. recomputed:
        as in `seconds`.
        """
        job = self.job
        layout = job.layout
        ranks = self.ranks
        passes = self.passes
        count = job.micro_batches
        sent = time_terms.message_seconds(job)
        if job.machine.ranks_per_core > 1:
            # Ranks share cores. A rank that waits leaves its core to others, so the pipeline takes
            # the work of all ranks together, divided by the number of ranks.
            ends = sum(passes.embedding + passes.head)
            return count * (job.model.layers * sum(passes.block) + ends) / layout.pp
        # A pass through all earlier ranks: their first stages, and a message from each to the next.
        earlier_ranks = passes.block * ranks.before + Pass(sent, sent) * ranks.rank
        earlier_ranks += passes.embedding * (ranks.rank > 0)
        # With split backward passes, a rank may compute its weights' gradients while the last
        # gradients go back, so that this time is not added.
        back = np.where(layout.splits_backward, 0.0, earlier_ranks.backward)
        on_rank = np.maximum(count * self._busy(recomputed), self._round_trips(sent))
        return (earlier_ranks.forward + on_rank + back).max(axis=1, keepdims=True)

    def _busy(self, recomputed: np.ndarray) -> np.ndarray:
        """Return the seconds of each rank's passes of one micro-batch: (rows, ranks).

        They are exact if a rank's stages have equal numbers of blocks, else a little too low,
        because the number of a rank's recomputed blocks is then a lower bound.
        """
        layout = self.job.layout
        ranks = self.ranks
        # redone: how many blocks a rank recomputes in all its stages, as the larger of two lower
        # bounds. The first is all its blocks minus the most that it can keep: every stage keeps as
        # many as the largest one does. In the second, every stage recomputes as many as the
        # smallest one does.
        not_redone = layout.stages_per_rank * np.maximum(0, ranks.most - recomputed)
        in_smallest = layout.stages_per_rank * np.minimum(recomputed, ranks.least)
        redone = np.maximum(ranks.blocks - not_redone, in_smallest)
        on_rank = step_time.through(self.passes, ranks.parts, redone)
        return on_rank.forward + on_rank.backward

    def _round_trips(self, sent: Column) -> np.ndarray:
        """Return the least seconds from a rank's first forward to its last backward: (rows, ranks).

        With n later ranks, a rank of 1F1B or ZB-H1 starts a micro-batch only when the micro-batch
        n + 1 before it has been to the last rank and back, which is a round trip. So its m
        micro-batches take at least ceil(m / (n + 1)) round trips. The weights' gradients that a
        split backward leaves out are not on the way. sent: seconds of a message. Other schedules
        have 0.
        """
        layout = self.job.layout
        later_ranks = layout.pp - 1 - self.ranks.rank
        splits = layout.splits_backward
        left_out = np.where(splits, time_terms.block_weights(self.job), 0.0)
        block = sum(self.passes.block) - left_out
        left_out = np.where(splits, time_terms.head_weights(self.job), 0.0)
        head = sum(self.passes.head) - left_out
        # A forward and a backward through all blocks from this rank to the last one.
        blocks = (self.job.model.layers - self.ranks.before) * block
        round_trip = blocks + head + 2 * later_ranks * sent
        trips = (self.job.micro_batches - 1) // (later_ranks + 1) + 1
        makes_round_trips = np.equal(layout.schedule, "1f1b") | np.equal(layout.schedule, "zb-h1")
        return np.where(makes_round_trips, trips * round_trip, 0.0)

    def _waiting(self) -> np.ndarray:
        """Return the likely waiting due to the order of passes, as a share of the pipeline's time.

        The shape is (rows, 1). The schedule zb-v has the share FOLDED. In the interleaved schedule
        a rank waits while another rank runs a stage with more parts: its share is UNEVEN times the
        excess of the rank's largest stage over the mean of its stages: with stages of 3 and 1 parts
        the excess is 3 / 2 - 1 = 0.5. Other schedules have the share 0.
        """
        name = self.job.layout.schedule
        ranks = self.ranks
        parts = np.maximum(1, ranks.blocks + ranks.embedding + ranks.head)
        excess = np.maximum(0.0, self.job.layout.stages_per_rank * ranks.most / parts - 1)
        largest = UNEVEN * excess.max(axis=1, keepdims=True)
        interleaved = np.where(np.equal(name, "interleaved"), largest, 0.0)
        return np.where(np.equal(name, "zb-v"), FOLDED, interleaved)

    def _most(self, recomputed: np.ndarray) -> Most:
        """Return the largest parameters and stage seconds of each row's ranks, as columns.

        The seconds after the pipeline depend on them (step_time.after_pipeline). recomputed: the
        number of recomputed blocks of each stage.
        """
        ranks = self.ranks
        # For the seconds, each rank's largest stage; for the parameters below, all its stages.
        largest = ranks.parts._replace(blocks=ranks.most)
        redone = np.minimum(recomputed, ranks.most)
        stage = step_time.through(self.passes, largest, redone)
        parameters = memory_terms.held_parameters(self.job, ranks.parts)
        tied = ranks.tied & ranks.embedding
        figures = (parameters, stage.forward, stage.backward, tied)
        return Most(*(figure.max(axis=1, keepdims=True) for figure in figures))
