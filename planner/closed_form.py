"""Computes the seconds and bytes of every row of a table of layouts, without building schedules.

    closed = ClosedForm(table)
    fits, recomputed = closed.within(80e9)       # the blocks each row recomputes to fit in 80 GB
    likely, least = closed.seconds(recomputed)

A row is a layout; columns have the shape (rows, 1), to broadcast with (rows, ranks). The terms are
those of planner/time_terms.py and planner/memory_terms.py. planner/layouts.py simulates the rows
that may be the fastest.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from config.schema import Layout, ModelShape
from planner import memory_terms, step_time, time_terms
from planner.enumeration import Table
from planner.job import Column
from planner.memory_terms import Parts
from planner.op_costs import Pass
from planner.step_time import Most, Passes
from schedules.partition import StageSpec, stage_specs

# The time in which ranks wait for one another because of the order of their passes, as a share of
# the pipeline's time: (likely, least). For zb-v, whose order assumes that all passes take the same
# time; and for interleaved, if the largest stage of a rank has twice the mean number of blocks.
# With presets on A100 and H100, zb-v waited 0.06 to 0.4, interleaved 0.1 to 0.6.
FOLDED = (0.2, 0.05)
UNEVEN = (0.3, 0.0)
ROUNDING = 1.0  # bytes by which a row may exceed the memory because of rounding


class Ranks(NamedTuple):
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
    def of(cls, table: Table) -> "Ranks":
        """Return the ranks of a table's rows; for ways with the same stages they are chosen once.

        A row with fewer ranks than others repeats its last rank.
        """
        ranks_of_kind: dict[tuple, list[tuple[int, ...]]] = {}
        kinds = []
        for way in table.ways:
            kind = way.pp, way.schedule, way.virtual_stages, bool(way.vocab_pp), way.partition
            kinds.append(kind)
            if kind not in ranks_of_kind:
                ranks_of_kind[kind] = _chosen_ranks(table.asked.model, way)
        longest = max(map(len, ranks_of_kind.values()))
        padded = [ranks + ranks[-1:] * (longest - len(ranks)) for ranks in ranks_of_kind.values()]
        number_of = {kind: number for number, kind in enumerate(ranks_of_kind)}
        kind_of_way = np.array([number_of[kind] for kind in kinds])
        columns = np.array(padded)[kind_of_way[table.way]]  # (rows, ranks, fields)
        *numbers, embedding, head, tied = np.moveaxis(columns, 2, 0)
        return cls(*numbers, embedding > 0, head > 0, tied > 0)

    @property
    def parts(self) -> Parts:
        """The parts of the model that all stages of a rank hold together."""
        return Parts(self.blocks, self.embedding, self.head, self.tied)


def _chosen_ranks(model: ModelShape, way: Layout) -> list[tuple[int, ...]]:
    """Return the fields of `Ranks` for the chosen ranks of a way, a tuple for each rank."""
    stages_of_rank: list[list[StageSpec]] = [[] for _ in range(way.pp)]
    for spec in stage_specs(model, way):
        stages_of_rank[spec.rank].append(spec)
    chosen: dict[tuple, list[tuple[int, ...]]] = {}  # by the contents of a rank's stages
    before = 0
    for rank, stages in enumerate(stages_of_rank):
        blocks = [spec.blocks for spec in stages]
        flags = [stages[0].embedding, stages[-1].head, any(spec.tied for spec in stages)]
        numbers = rank, sum(blocks), max(blocks), min(blocks), before
        first_and_last = chosen.setdefault((*blocks, *flags), [])
        first_and_last[1:] = [(*numbers, *flags)]  # after the first, only the last stays
        before += blocks[0]
    return [fields for first_and_last in chosen.values() for fields in first_and_last]


class ClosedForm:
    """The seconds and bytes of every row of a table, for any number of recomputed blocks."""

    def __init__(self, table: Table, ranks: Ranks | None = None):
        """ranks: the ranks of the table's rows, if they are known."""
        self.table = table
        self.job = table.job
        self.ranks = ranks or Ranks.of(table)

    def of_rows(self, rows: np.ndarray) -> "ClosedForm":
        """Return the closed form of some rows; rows: their indices."""
        return ClosedForm(self.table.of_rows(rows), Ranks(*(column[rows] for column in self.ranks)))

    # ---- Bytes --------------------------------------------------------------------------------

    @cached_property
    def unsaved(self) -> np.ndarray:
        """The bytes of each rank without recomputation, or little less: (rows, ranks)."""
        job = self.job
        ranks = self.ranks
        vocab_pp = np.bool_(job.layout.vocab_pp)
        _, block_activations = memory_terms.kept_of_block(job)
        flying = memory_terms.in_flight(job, ranks.rank)
        keeps_heads = ranks.head & (job.layout.stages_per_rank == 1) & ~vocab_pp
        heads = np.where(keeps_heads, flying, 1)
        kept = ranks.blocks * block_activations
        working = memory_terms.working_of(job, ranks.parts, kept, heads)
        sent = np.where(vocab_pp, memory_terms.sent_to_ranks(job), 0.0)
        activations = flying * job.layout.stages_per_rank * ranks.least * block_activations
        states = sum(memory_terms.states_of(job, ranks.parts).values())
        fixed = memory_terms.buffers_of(job) + job.machine.context
        return states + activations + working + sent + fixed

    @cached_property
    def saved(self) -> np.ndarray:
        """The bytes that each rank saves if one further block of each of its stages is recomputed:
        (rows, ranks).
        """
        if_recomputed, if_not = memory_terms.kept_of_block(self.job)
        flying = memory_terms.in_flight(self.job, self.ranks.rank)
        saved = flying * self.job.layout.stages_per_rank * (if_not - if_recomputed)
        return np.where(self.recomputes, saved, 0.0)

    @cached_property
    def recomputes(self) -> np.ndarray:
        """Whether each row has recomputation: (rows, 1)."""
        return np.not_equal(self.job.layout.recompute, "none")

    def smallest(self) -> np.ndarray:
        """Return the bytes of each row's fullest rank if all blocks are recomputed: (rows,)."""
        return (self.unsaved - self.saved * self.ranks.least).max(axis=1)

    def within(self, room: float) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows may need at most `room` bytes on a GPU: (rows,); and the fewest blocks
        of each stage that they recompute for that: (rows, 1).
        """
        fixed = self.table.asked.fixed
        most = self.ranks.most.max(axis=1, keepdims=True)
        if fixed.get("recompute_blocks") is not None:  # a list with a number for each stage
            return self.smallest() <= room + ROUNDING, np.zeros_like(most)
        if "recompute_layers" in fixed:
            layers = fixed["recompute_layers"]
            fewest = np.full_like(most, self.job.model.layers if layers is None else layers)
        else:
            over = np.maximum(0.0, self.unsaved - room)
            saved_by_block = np.where(self.saved > 0, self.saved, np.inf)
            fewest = np.ceil(over / saved_by_block).max(axis=1, keepdims=True)
            fewest = np.clip(fewest, 1, most).astype(int)
        fewest = np.where(self.recomputes, np.minimum(fewest, most), 0)
        needed = self.unsaved - self.saved * np.minimum(fewest, self.ranks.least)
        return needed.max(axis=1) <= room + ROUNDING, fewest

    # ---- Seconds ------------------------------------------------------------------------------

    @cached_property
    def passes(self) -> Passes:
        """The seconds of one micro-batch through the parts of the model."""
        return step_time.passes_of(self.job)

    def seconds(self, recomputed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of a step that each row likely takes, and that it takes at least, both
        (rows,). recomputed: the number of recomputed blocks of each stage: (rows, 1).
        """
        pipeline = self._pipeline(recomputed)
        after = sum(step_time.after_pipeline(self.job, self._most(recomputed)).values())
        columns = []
        for folded, uneven in zip(FOLDED, UNEVEN, strict=True):
            total = pipeline * (1 + self._waiting(folded, uneven)) + after
            columns.append(self.job.machine.slowdown * total[:, 0])
        likely, least = columns
        return likely, least

    def _pipeline(self, recomputed: np.ndarray) -> np.ndarray:
        """Return the seconds of the pipeline in which no rank waits longer than it must: (rows, 1).

        They are the time until the first micro-batch has come to a rank, the rank's passes, and the
        time until the last micro-batch's gradients have gone back; for the slowest rank.
        """
        job = self.job
        layout = job.layout
        ranks = self.ranks
        passes = self.passes
        count = job.micro_batches
        sent = time_terms.message_seconds(job)
        if job.machine.ranks_per_core > 1:
            # A rank that waits leaves its core to other ranks, so it is the mean of all ranks.
            ends = np.where(layout.vocab_pp, 0.0, sum(passes.embedding + passes.head))
            return count * (job.model.layers * sum(passes.block) + ends) / layout.pp
        earlier_ranks = passes.block * ranks.before + Pass(sent, sent) * ranks.rank
        earlier_ranks += passes.embedding * ((ranks.rank > 0) & ~np.bool_(layout.vocab_pp))
        # With split backward passes, a rank may compute its weights' gradients during this time.
        back = np.where(layout.splits_backward, 0.0, earlier_ranks.backward)
        on_rank = np.maximum(count * self._busy(recomputed), self._round_trips(sent))
        pipeline = (earlier_ranks.forward + on_rank + back).max(axis=1, keepdims=True)
        # With --vocab-pp a rank's link carries six messages for each micro-batch.
        return np.maximum(pipeline, np.where(layout.vocab_pp, count * 6 * sent, 0.0))

    def _busy(self, recomputed: np.ndarray) -> np.ndarray:
        """Return the seconds of each rank's passes of one micro-batch, or little less: (rows,
        ranks). The number of a rank's recomputed blocks is exact if its stages are equal.
        """
        layout = self.job.layout
        ranks = self.ranks
        not_redone = layout.stages_per_rank * np.maximum(0, ranks.most - recomputed)
        in_smallest = layout.stages_per_rank * np.minimum(recomputed, ranks.least)
        redone = np.maximum(ranks.blocks - not_redone, in_smallest)
        on_rank = step_time.through(self.passes, ranks.parts, redone, ~np.bool_(layout.vocab_pp))
        return sum(on_rank) + np.where(layout.vocab_pp, sum(self.passes.head), 0.0)

    def _round_trips(self, sent: Column) -> np.ndarray:
        """Return the seconds from a 1F1B rank's first forward to its last backward that its round
        trips take, 0 for other schedules: (rows, ranks).

        With n later ranks, the rank starts a micro-batch only when the micro-batch n + 1 before has
        been to the last rank and back. sent: seconds of a message.
        """
        layout = self.job.layout
        later_ranks = layout.pp - 1 - self.ranks.rank
        blocks = (self.job.model.layers - self.ranks.before) * sum(self.passes.block)
        round_trip = blocks + sum(self.passes.head) + 2 * later_ranks * sent
        trips = (self.job.micro_batches - 1) // (later_ranks + 1) + 1
        is_1f1b = np.equal(layout.schedule, "1f1b") & ~np.bool_(layout.vocab_pp)
        return np.where(is_1f1b, trips * round_trip, 0.0)

    def _waiting(self, folded: float, uneven: float) -> np.ndarray:
        """Return the time in which ranks wait because of the order of their passes, as a share of
        the pipeline's: (rows, 1). folded, uneven: see FOLDED and UNEVEN.

        A rank of an interleaved schedule waits while another rank runs a stage with more blocks.
        """
        name = self.job.layout.schedule
        ranks = self.ranks
        parts = np.maximum(1, ranks.blocks + ranks.embedding + ranks.head)
        excess = np.maximum(0.0, self.job.layout.stages_per_rank * ranks.most / parts - 1)
        largest = uneven * excess.max(axis=1, keepdims=True)
        interleaved = np.where(np.equal(name, "interleaved"), largest, 0.0)
        return np.where(np.equal(name, "zb-v"), folded, interleaved)

    def _most(self, recomputed: np.ndarray) -> Most:
        """Return the figures of each row on which the time after the pipeline depends."""
        ranks = self.ranks
        largest = ranks.parts._replace(blocks=ranks.most)
        redone = np.minimum(recomputed, ranks.most)
        stage = step_time.through(self.passes, largest, redone, ~np.bool_(self.job.layout.vocab_pp))
        parameters = memory_terms.held_parameters(self.job, ranks.parts)
        tied = ranks.tied & ranks.embedding
        figures = (parameters, stage.forward, stage.backward, tied)
        return Most(*(figure.max(axis=1, keepdims=True) for figure in figures))
