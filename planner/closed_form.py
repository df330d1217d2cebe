"""Computes lower bounds of a step's seconds and bytes for every row of a table of layouts, without
building any schedule.

    ranks = Ranks.of(table)
    fitting = Needs.of(table, ranks).within(80e9)   # the blocks each row recomputes to fit in 80 GB
    least, likely = Bounds(table, ranks).with_recomputed(fitting.recomputed)

The seconds are those of a schedule in which no rank waits longer than it must; the bytes are those
of the fewest micro-batches that a rank may have in flight. So no row is faster, or smaller:
planner/ranking.py predicts rows in the order of their bounds, and stops when the other rows cannot
be faster. A row is a layout; columns have the shape (rows, 1), to broadcast with (rows, ranks).
"""

from typing import NamedTuple

import numpy as np

from config.schema import Layout, ModelShape
from planner import memory_terms, step_time, time_terms
from planner.enumeration import Table
from planner.job import Column, Job
from planner.memory_terms import Parts
from planner.op_costs import Pass
from planner.step_time import Most, Passes
from schedules.partition import StageSpec, stage_specs

# The time in which a rank of an interleaved schedule waits for other ranks, as a share of the
# pipeline's bound, if its largest stage has twice the mean number of blocks. With presets on A100
# and H100 it was 0.1 to 0.6.
UNEVEN = 0.3
# The same share for zb-v, whose order assumes that all passes take the same time: 0.06 to 0.4.
FOLDED = 0.2
ROUNDING = 1.0  # bytes by which a bound may exceed the memory because of rounding


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
        kinds: dict[tuple, int] = {}
        ranks_of_kind = list[list[tuple[int, ...]]]()
        kind_of_way = list[int]()
        for way in table.ways:
            kind = way.pp, way.schedule, way.virtual_stages, bool(way.vocab_pp), way.partition
            if kind not in kinds:
                kinds[kind] = len(ranks_of_kind)
                ranks_of_kind.append(_chosen_ranks(table.asked.model, way))
            kind_of_way.append(kinds[kind])
        longest = max(map(len, ranks_of_kind))
        padded = np.array([ranks + ranks[-1:] * (longest - len(ranks)) for ranks in ranks_of_kind])
        columns = padded[np.array(kind_of_way)[table.way]]  # (rows, ranks, fields)
        numbers = [columns[:, :, field] for field in range(len(cls._fields))]
        # The first five fields are numbers, the other fields are flags.
        return cls(*numbers[:5], *(flag.astype(bool) for flag in numbers[5:]))

    @property
    def parts(self) -> Parts:
        """The parts of the model that all stages of a rank hold together."""
        return Parts(self.blocks, self.embedding, self.head, self.tied)

    def of_rows(self, rows: np.ndarray) -> "Ranks":
        """Return the ranks of some rows; rows: their indices."""
        return Ranks(*(column[rows] for column in self))


def _chosen_ranks(model: ModelShape, way: Layout) -> list[tuple[int, ...]]:
    """Return the fields of `Ranks` for the chosen ranks of a way, a tuple for each rank.

    Of the ranks whose stages hold the same, the first and the last are chosen.
    """
    stages_of_rank: list[list[StageSpec]] = [[] for _ in range(way.pp)]
    for spec in stage_specs(model, way):
        stages_of_rank[spec.rank].append(spec)
    chosen: dict[tuple, list[tuple[int, ...]]] = {}  # by the contents of a rank's stages
    before = 0
    for rank, stages in enumerate(stages_of_rank):
        blocks = [spec.blocks for spec in stages]
        stage_flags = [[spec.embedding, spec.head, spec.tied] for spec in stages]
        flags = [any(column) for column in zip(*stage_flags, strict=True)]
        numbers = rank, sum(blocks), max(blocks), min(blocks), before
        first_and_last = chosen.setdefault((*blocks, *flags), [])
        first_and_last[1:] = [(*numbers, *map(int, flags))]  # after the first, only the last stays
        before += blocks[0]
    return [fields for first_and_last in chosen.values() for fields in first_and_last]


# ---- Seconds -------------------------------------------------------------------------------------


class Bounds:
    """The seconds of a step of every row, for any number of recomputed blocks."""

    def __init__(self, table: Table, ranks: Ranks):
        self.job = table.job
        self.ranks = ranks
        self.passes = step_time.passes_of(table.job)

    def with_recomputed(self, recomputed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays of seconds of a step, (rows,): lower bounds, and likely times.

        The likely time has in addition the time in which ranks wait for one another because of the
        order of their passes. recomputed: the number of recomputed blocks of each stage: (rows, 1).
        """
        job = self.job
        pipeline = _pipeline(job, self.ranks, self.passes, recomputed)
        most = _most(job, self.ranks, self.passes, recomputed)
        after = step_time.after_pipeline(job, most)
        least = job.machine.slowdown * (pipeline + sum(after.values()))
        waiting = job.machine.slowdown * pipeline * _waiting(job, self.ranks)
        return least[:, 0], (least + waiting)[:, 0]


def _waiting(job: Job, ranks: Ranks) -> np.ndarray:
    """Return the time in which ranks likely wait, as a share of the pipeline's bound: (rows, 1).

    A rank of an interleaved schedule waits while another rank runs a stage with more blocks.
    """
    name = job.layout.schedule
    blocks = np.maximum(1, ranks.blocks)
    excess = job.layout.stages_per_rank * ranks.most / blocks - 1  # of the largest stage
    largest = (UNEVEN * excess).max(axis=1, keepdims=True)
    interleaved = np.where(np.equal(name, "interleaved"), largest, 0.0)
    return np.where(np.equal(name, "zb-v"), FOLDED, interleaved)


def _pipeline(job: Job, ranks: Ranks, passes: Passes, recomputed: np.ndarray) -> np.ndarray:
    """Return a lower bound of the pipeline's seconds: (rows, 1).

    It is the time until the first micro-batch has come to a rank, the rank's passes, and the time
    until the last micro-batch's gradients have gone back to the first rank; for the slowest rank.
    """
    layout = job.layout
    count = job.micro_batches
    sent = time_terms.message_seconds(job)
    if job.machine.ranks_per_core > 1:
        # A rank that waits leaves its core to other ranks, so the bound is the mean of all ranks.
        ends = np.where(layout.vocab_pp, 0.0, sum(passes.embedding + passes.head))
        return count * (job.model.layers * sum(passes.block) + ends) / layout.pp
    earlier_ranks = passes.block * ranks.before + Pass(sent, sent) * ranks.rank
    earlier_ranks += passes.embedding * ((ranks.rank > 0) & ~np.bool_(layout.vocab_pp))
    # With split backward passes, a rank may compute its weights' gradients during this time.
    back = np.where(layout.splits_backward, 0.0, earlier_ranks.backward)
    busy = count * _busy(job, ranks, passes, recomputed)
    on_rank = np.maximum(busy, _round_trips(job, ranks, passes))
    least = (earlier_ranks.forward + on_rank + back).max(axis=1, keepdims=True)
    # With --vocab-pp a rank's link carries six messages for each micro-batch.
    return np.maximum(least, np.where(layout.vocab_pp, count * 6 * sent, 0.0))


def _busy(job: Job, ranks: Ranks, passes: Passes, recomputed: np.ndarray) -> np.ndarray:
    """Return a lower bound of the seconds of a rank's passes of one micro-batch: (rows, ranks).

    recomputed: the number of recomputed blocks of each stage.
    """
    redone = _least_redone(ranks, job.layout.stages_per_rank, recomputed)
    recomputation = passes.redone.backward - passes.block.backward
    blocks = ranks.blocks * sum(passes.block) + redone * recomputation
    embedding = ranks.embedding * sum(passes.embedding)
    head = ranks.head * sum(passes.head)
    return blocks + np.where(job.layout.vocab_pp, sum(passes.head), embedding + head)


def _round_trips(job: Job, ranks: Ranks, passes: Passes) -> np.ndarray:
    """Return a lower bound of a 1F1B rank's seconds from its first forward to its last backward.

    With n later ranks, the rank starts a micro-batch only when the micro-batch n + 1 before has
    been to the last rank and back. The bound is 0 for other schedules: (rows, ranks).
    """
    layout = job.layout
    later_ranks = job.layout.pp - 1 - ranks.rank
    blocks = (job.model.layers - ranks.before) * sum(passes.block)
    messages = 2 * later_ranks * time_terms.message_seconds(job)
    round_trip = blocks + sum(passes.head) + messages
    trips = (job.micro_batches - 1) // (later_ranks + 1) + 1
    is_1f1b = np.equal(layout.schedule, "1f1b") & ~np.bool_(layout.vocab_pp)
    return np.where(is_1f1b, trips * round_trip, 0.0)


def _least_redone(ranks: Ranks, stages: Column, recomputed: np.ndarray) -> np.ndarray:
    """Return a lower bound of the number of a rank's recomputed blocks: (rows, ranks).

    It is exact if all stages of the rank have the same number of blocks. stages: the number of
    stages of the rank. recomputed: the number of recomputed blocks of each stage.
    """
    most_not_recomputed = np.maximum(0, ranks.most - recomputed)  # of a stage
    by_largest = ranks.blocks - stages * most_not_recomputed
    by_smallest = stages * np.minimum(recomputed, ranks.least)
    return np.maximum(by_largest, by_smallest)


def _most(job: Job, ranks: Ranks, passes: Passes, recomputed: np.ndarray) -> Most:
    """Return upper bounds of a row's figures on which the time after the pipeline depends.

    The passes hide traffic, so upper bounds of their seconds give lower bounds of that time.
    """
    stages_have_ends = ~np.bool_(job.layout.vocab_pp)
    redone = np.minimum(recomputed, ranks.most)
    stage = passes.block * (ranks.most - redone)
    stage += passes.redone * redone
    stage += passes.embedding * (stages_have_ends & ranks.embedding)
    stage += passes.head * (stages_have_ends & ranks.head)
    parameters = memory_terms.held_parameters(job, ranks.parts)
    tied = ranks.tied & ranks.embedding
    figures = (parameters, stage.forward, stage.backward, tied)
    return Most(*(figure.max(axis=1, keepdims=True) for figure in figures))


# ---- Bytes ---------------------------------------------------------------------------------------


class Fitting(NamedTuple):
    """The rows that may fit.

    fits: a boolean for each row, (rows,). recomputed: the fewest recomputed blocks of each stage
    with which a row may fit, (rows, 1).
    """

    fits: np.ndarray
    recomputed: np.ndarray


class Needs(NamedTuple):
    """Lower bounds of the bytes that ranks need.

    unsaved: the bytes of a rank without recomputation, (rows, ranks). saved: the bytes that a rank
    saves if one further block of each of its stages is recomputed, (rows, ranks). smallest: the
    bytes of each row's fullest rank if all blocks are recomputed, (rows,).
    """

    table: Table
    ranks: Ranks
    unsaved: np.ndarray
    saved: np.ndarray
    smallest: np.ndarray

    @classmethod
    def of(cls, table: Table, ranks: Ranks) -> "Needs":
        """Return the needs of the rows of a table."""
        job = table.job
        stages = job.layout.stages_per_rank
        if_recomputed, if_not = memory_terms.kept_of_block(job)
        flying = memory_terms.in_flight(job, ranks.rank)
        unsaved = _beside_activations(job, ranks, flying) + flying * stages * ranks.least * if_not
        recomputes_none = np.equal(job.layout.recompute, "none")
        saved = np.where(recomputes_none, 0.0, flying * stages * (if_not - if_recomputed))
        smallest = (unsaved - saved * ranks.least).max(axis=1)
        return cls(table, ranks, unsaved, saved, smallest)

    def within(self, room: float) -> Fitting:
        """Return the rows that may need at most `room` bytes on a GPU, and how many blocks they
        recompute for that.
        """
        layout = self.table.job.layout
        ranks = self.ranks
        fixed = self.table.asked.fixed
        most = ranks.most.max(axis=1, keepdims=True)
        if fixed.get("recompute_blocks") is not None:  # a list with a number for each stage
            return Fitting(self.smallest <= room + ROUNDING, np.zeros_like(most))
        over = np.maximum(0.0, self.unsaved - room)
        saved_by_block = np.where(self.saved > 0, self.saved, np.inf)
        fewest = np.ceil(over / saved_by_block).max(axis=1, keepdims=True)
        fewest = np.clip(fewest, 1, most).astype(int)
        if "recompute_layers" in fixed:
            layers = fixed["recompute_layers"]
            if layers is None:  # all blocks
                layers = self.table.asked.model.layers
            fewest = np.full_like(most, layers)
        recomputes_none = np.equal(layout.recompute, "none")
        fewest = np.where(recomputes_none, 0, np.minimum(fewest, most))
        needed = (self.unsaved - self.saved * np.minimum(fewest, ranks.least)).max(axis=1)
        return Fitting(needed <= room + ROUNDING, fewest)


def _beside_activations(job: Job, ranks: Ranks, flying: np.ndarray) -> np.ndarray:
    """Return a lower bound of a rank's bytes without its blocks' activations: (rows, ranks).

    flying: the micro-batches in flight on a rank.
    """
    vocab_pp = job.layout.vocab_pp
    _, block_activations = memory_terms.kept_of_block(job)
    has_one_stage = job.layout.stages_per_rank == 1
    keeps_heads = ranks.head & has_one_stage & ~np.bool_(vocab_pp)
    heads = np.where(keeps_heads, flying, 1)
    states = sum(memory_terms.states_of(job, ranks.parts).values())
    kept = ranks.blocks * block_activations
    working = memory_terms.working_of(job, ranks.parts, kept, heads)
    sent = np.where(vocab_pp, memory_terms.sent_to_ranks(job), 0.0)
    return states + working + sent + memory_terms.buffers_of(job) + job.machine.context
