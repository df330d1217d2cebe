"""Computes what every row of a table takes at least, in seconds and in bytes, before any schedule
is built.

    ranks = Ranks.of(table)
    fitting = Needs.of(table, ranks).within(80e9)   # how many blocks each row recomputes for that
    least, likely = Bounds(table, ranks).with_recomputed(fitting.recomputed)

A schedule's closed form gives the time in which no rank waits for more than it must, and the bytes
of as many micro-batches in flight as its order surely has. So no row is faster, or smaller, than
said here: planner/ranking.py prices rows in this order, and stops when the rest cannot be faster.
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

# Waiting over the pipeline's least seconds: for each share by which a stage of an interleaved rank
# has more blocks than others, and of zb-v, whose order is for passes that all take as long. Seen of
# presets on A100 and H100: 0.1 to 0.6, and 0.06 to 0.4.
UNEVEN, FOLDED = 0.3, 0.2
ROUNDING = 1.0  # bytes


class Ranks(NamedTuple):
    """Some pipeline ranks of every row, among which are the slowest and the fullest: of those that
    hold alike stages the first and the last. Arrays of the shape (rows, ranks).

    blocks: of all stages of the rank; most, least: of one of its stages. before: blocks of the
    first stages of the ranks before it.
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
        """Return the ranks of a table; ways with the same stages have them in common."""
        kinds: dict[tuple, int] = {}
        of_kind, kind_of_way = list[list[tuple[int, ...]]](), list[int]()
        for way in table.ways:
            kind = way.pp, way.schedule, way.virtual_stages, bool(way.vocab_pp), way.partition
            if kind not in kinds:
                kinds[kind] = len(of_kind)
                of_kind.append(_chosen_ranks(table.asked.model, way))
            kind_of_way.append(kinds[kind])
        longest = max(map(len, of_kind))
        padded = np.array([rows + rows[-1:] * (longest - len(rows)) for rows in of_kind])
        columns = padded[np.array(kind_of_way)[table.way]]  # (rows, ranks, fields)
        numbers = [columns[:, :, field] for field in range(len(cls._fields))]
        return cls(*numbers[:5], *(flag.astype(bool) for flag in numbers[5:]))

    @property
    def parts(self) -> Parts:
        """Return what all stages of a rank hold together."""
        return Parts(self.blocks, self.embedding, self.head, self.tied)

    def of_rows(self, rows: np.ndarray) -> "Ranks":
        """Return the ranks of some rows."""
        return Ranks(*(column[rows] for column in self))


def _chosen_ranks(model: ModelShape, way: Layout) -> list[tuple[int, ...]]:
    """A row of `Ranks` for the first and the last of the ranks that hold alike stages."""
    of_rank: list[list[StageSpec]] = [[] for _ in range(way.pp)]
    for spec in stage_specs(model, way):
        of_rank[spec.rank].append(spec)
    chosen: dict[tuple, list[tuple[int, ...]]] = {}
    before = 0
    for rank, stages in enumerate(of_rank):
        blocks = [spec.blocks for spec in stages]
        flags = [[spec.embedding, spec.head, spec.tied] for spec in stages]
        ends = [any(column) for column in zip(*flags, strict=True)]
        numbers = rank, sum(blocks), max(blocks), min(blocks), before
        alike = chosen.setdefault((*blocks, *ends), [])
        alike[1:] = [(*numbers, *map(int, ends))]
        before += blocks[0]
    return [row for rows in chosen.values() for row in rows]


# ---- Seconds -------------------------------------------------------------------------------------


class Bounds:
    """Seconds of a step, for any number of recomputed blocks."""

    def __init__(self, table: Table, ranks: Ranks):
        self.job, self.ranks, self.passes = table.job, ranks, step_time.passes_of(table.job)

    def with_recomputed(self, recomputed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds that no order of a row's passes is faster than; and what it likely takes, where
        the order's own waiting is known. recomputed: blocks of each stage, a column.
        """
        job, ranks, passes = self.job, self.ranks, self.passes
        pipeline = _pipeline(job, ranks, passes, recomputed)
        after = step_time.after_pipeline(job, _most(job, ranks, passes, recomputed))
        least = job.machine.slowdown * (pipeline + sum(after.values()))
        waiting = job.machine.slowdown * pipeline * _waiting(job, ranks)
        return least[:, 0], (least + waiting)[:, 0]


def _waiting(job: Job, ranks: Ranks) -> np.ndarray:
    """Return how long a rank likely waits, over the pipeline's least seconds: an interleaved one
    often while another one is at a stage with more blocks.
    """
    name = job.layout.schedule
    uneven = job.layout.stages_per_rank * ranks.most / np.maximum(1, ranks.blocks) - 1
    most = (UNEVEN * uneven).max(axis=1, keepdims=True)
    interleaved = np.where(np.equal(name, "interleaved"), most, 0.0)
    return np.where(np.equal(name, "zb-v"), FOLDED, interleaved)


def _pipeline(job: Job, ranks: Ranks, passes: Passes, recomputed: np.ndarray) -> np.ndarray:
    """Seconds of the pipeline: the busiest rank's passes, after the first micro-batch has come to
    it, and before the last one's gradients have gone back to the first rank.
    """
    layout, count = job.layout, job.micro_batches
    sent = time_terms.message_seconds(job)
    if job.machine.ranks_per_core > 1:
        # A rank that waits takes no time from others on its core: what all take on average.
        ends = np.where(layout.vocab_pp, 0.0, sum(passes.embedding + passes.head))
        return count * (job.model.layers * sum(passes.block) + ends) / layout.pp
    before = passes.block * ranks.before + Pass(sent, sent) * ranks.rank
    before += passes.embedding * ((ranks.rank > 0) & ~np.bool_(layout.vocab_pp))
    back = np.where(layout.splits_backward, 0.0, before.backward)  # weights' gradients come later
    busy = count * _busy(job, ranks, passes, recomputed)
    own = np.maximum(busy, _round_trips(job, ranks, passes))
    least = (before.forward + own + back).max(axis=1, keepdims=True)
    return np.maximum(least, np.where(layout.vocab_pp, count * 6 * sent, 0.0))


def _busy(job: Job, ranks: Ranks, passes: Passes, recomputed: np.ndarray) -> np.ndarray:
    """Seconds of a rank's passes of one micro-batch; fewer blocks may be recomputed than that."""
    redone = _least_redone(ranks, job.layout.stages_per_rank, recomputed)
    again = passes.redone.backward - passes.block.backward
    blocks = ranks.blocks * sum(passes.block) + redone * again
    embedding = ranks.embedding * sum(passes.embedding)
    head = ranks.head * sum(passes.head)
    return blocks + np.where(job.layout.vocab_pp, sum(passes.head), embedding + head)


def _round_trips(job: Job, ranks: Ranks, passes: Passes) -> np.ndarray:
    """Seconds of a rank under 1F1B from its first forward to its last backward: it begins a further
    micro-batch only when the one that many before it has been to the last rank and back.
    """
    layout, others = job.layout, job.layout.pp - 1 - ranks.rank
    blocks = (job.model.layers - ranks.before) * sum(passes.block)
    way = blocks + sum(passes.head) + 2 * others * time_terms.message_seconds(job)
    trips = (job.micro_batches - 1) // (others + 1) + 1
    alone = np.equal(layout.schedule, "1f1b") & ~np.bool_(layout.vocab_pp)
    return np.where(alone, trips * way, 0.0)


def _least_redone(ranks: Ranks, stages: Column, recomputed: np.ndarray) -> np.ndarray:
    """How many blocks of a rank are recomputed, or fewer if its stages are not alike."""
    left = np.maximum(0, ranks.most - recomputed)
    from_all = ranks.blocks - stages * left
    return np.maximum(from_all, stages * np.minimum(recomputed, ranks.least))


def _most(job: Job, ranks: Ranks, passes: Passes, recomputed: np.ndarray) -> Most:
    """Return upper bounds of what hides and shares the traffic after the pipeline."""
    ends = ~np.bool_(job.layout.vocab_pp)
    redone = np.minimum(recomputed, ranks.most)
    stage = passes.block * (ranks.most - redone)
    stage += passes.redone * redone
    stage += passes.embedding * (ends & ranks.embedding)
    stage += passes.head * (ends & ranks.head)
    held = memory_terms.held_parameters(job, ranks.parts)
    tied = ranks.tied & ranks.embedding
    return Most(*(each.max(axis=1, keepdims=True) for each in (held, *stage, tied)))


# ---- Bytes ---------------------------------------------------------------------------------------


class Fitting(NamedTuple):
    """Which rows may fit, with how many `recomputed` blocks of each stage at least (a column)."""

    fits: np.ndarray
    recomputed: np.ndarray


class Needs(NamedTuple):
    """Bytes that the ranks of rows need at least: `unsaved` without recomputation, of which one
    recomputed block of each stage has `saved`. smallest: of each row with all blocks recomputed.
    """

    table: Table
    ranks: Ranks
    unsaved: np.ndarray
    saved: np.ndarray
    smallest: np.ndarray

    @classmethod
    def of(cls, table: Table, ranks: Ranks) -> "Needs":
        """Return what the rows of a table need."""
        job = table.job
        stages = job.layout.stages_per_rank
        redone, whole = memory_terms.kept_of_block(job)
        flying = memory_terms.in_flight(job, ranks.rank)
        unsaved = _beside_activations(job, ranks, flying) + flying * stages * ranks.least * whole
        none = np.equal(job.layout.recompute, "none")
        saved = np.where(none, 0.0, flying * stages * (whole - redone))
        smallest = (unsaved - saved * ranks.least).max(axis=1)
        return cls(table, ranks, unsaved, saved, smallest)

    def within(self, room: float) -> Fitting:
        """The fewest blocks that each row may recompute to need at most `room` bytes."""
        layout, ranks, fixed = self.table.job.layout, self.ranks, self.table.asked.fixed
        most = ranks.most.max(axis=1, keepdims=True)
        if fixed.get("recompute_blocks") is not None:  # some number of each stage
            return Fitting(self.smallest <= room + ROUNDING, np.zeros_like(most))
        over = np.maximum(0.0, self.unsaved - room)
        by_block = np.where(self.saved > 0, self.saved, np.inf)
        fewest = np.ceil(over / by_block).max(axis=1, keepdims=True)
        fewest = np.clip(fewest, 1, most).astype(int)
        if "recompute_layers" in fixed:
            given = fixed["recompute_layers"]
            fewest = np.full_like(most, self.table.asked.model.layers if given is None else given)
        none = np.equal(layout.recompute, "none")
        fewest = np.where(none, 0, np.minimum(fewest, most))
        needed = (self.unsaved - self.saved * np.minimum(fewest, ranks.least)).max(axis=1)
        return Fitting(needed <= room + ROUNDING, fewest)


def _beside_activations(job: Job, ranks: Ranks, flying: np.ndarray) -> np.ndarray:
    """Bytes that a rank needs at least beside what its blocks keep."""
    vocab_pp = job.layout.vocab_pp
    _, whole = memory_terms.kept_of_block(job)
    one_stage = job.layout.stages_per_rank == 1
    heads = np.where(ranks.head & one_stage & ~np.bool_(vocab_pp), flying, 1)
    states = sum(memory_terms.states_of(job, ranks.parts).values())
    working = memory_terms.working_of(job, ranks.parts, ranks.blocks * whole, heads)
    sent = np.where(vocab_pp, memory_terms.sent_to_ranks(job), 0.0)
    return states + working + sent + memory_terms.buffers_of(job) + job.machine.context
