"""Enumerates the layouts with which train.py can run a model on some GPUs, as rows of a table.

    asked = Asked(model, training, machine, gpus=384, fixed={"tp": 8})
    table, rejected = every_layout(asked)
    table.layout(7)          # the eighth row as a schema.Layout
    table.job                # all rows as one Job, whose layout is Columns

Fields in `fixed` are kept, all other fields are varied. A layout that train.py refuses is rejected
with train.py's error line. A way is a layout without micro-batch size, ZeRO stage, recomputation
and sequence parallelism; a row adds these. The number of recomputed blocks is computed later, from
the memory that a row needs (planner/closed_form.py).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from config.messages import UserError
from config.schema import Layout, ModelShape, Training
from config.validation import check_batch, check_sharding, check_split, with_dp
from planner.hardware import Machine
from planner.job import Columns, Job
from schedules.partition import blocks_per_stage

# Schedules that are varied; `auto` is planned only if the user asks for it.
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
ZERO_STAGES = (1, 0, 2, 3)  # of equally fast layouts, the first ZeRO stage in this order is ranked
MICRO_BATCHES = (1, 2, 4, 8, 16)
# `selective` is not varied, because it saves no memory: a flash kernel always recomputes scores.
RECOMPUTATIONS = ("none", "full")
VARIED = ("micro_batch_size", "sequence_parallel", "recompute", "zero")  # columns of a Table
PLAIN = {"schedule": "1f1b", "vocab_pp": None, "cp": 1}  # fields that all measured runs have
LONG = 4096  # cp is varied if a sample has at least this number of tokens


class Asked(NamedTuple):
    """A question about layouts.

    fixed: by the names of Layout fields, a value, or a list of values to try. The fields
    recompute_layers and recompute_blocks have single values.
    """

    model: ModelShape
    training: Training
    machine: Machine
    gpus: int
    fixed: dict[str, Any] = {}  # noqa: RUF012

    @property
    def counts_blocks(self) -> bool:
        """Whether the planner chooses the number of recomputed blocks, by the memory of a GPU."""
        has_blocks = self.fixed.get("recompute_blocks") is not None
        return not has_blocks and "recompute_layers" not in self.fixed

    def job(self, layout: Layout) -> Job:
        """Return the job of one layout with the model, training options and machine of the
        question.
        """
        return Job(self.model, layout, self.training, self.machine)

    def holds(self, name: str) -> bool:
        """Return whether a field is fixed to a single value."""
        return name in self.fixed and not isinstance(self.fixed[name], list)

    def values(self, name: str, default: Iterable[Any]) -> list[Any]:
        """Return the values to try for a field; default: the values if the field is not fixed."""
        values = self.fixed.get(name, list(default))
        return values if isinstance(values, list) else [values]


@dataclass(frozen=True)
class Rejected:
    """A layout that cannot run, and the reason.

    layout: fields by name; if only tp and pp are there, no layout with these can run. whole: such a
    layout with all its fields, if there is one.
    """

    layout: dict[str, int | str]
    reason: str
    whole: Layout | None = None


@dataclass(frozen=True)
class Table:
    """Layouts as rows; every array has an entry for each row.

    ways: layouts without micro-batch size, recomputation, ZeRO stage and sequence parallelism, a
    few for all rows. way: for each row, the index of its way in `ways`. The other arrays have the
    fields that a row adds to its way.
    """

    asked: Asked
    ways: list[Layout]
    way: np.ndarray
    micro_batch_size: np.ndarray
    sequence_parallel: np.ndarray
    recompute: np.ndarray
    zero: np.ndarray

    def __len__(self) -> int:
        return len(self.way)

    def layout(self, row: int, recomputed: int | None = None) -> Layout:
        """Return the layout of one row.

        recomputed: the number of recomputed blocks of each stage, if the planner chooses it; None:
        all blocks, if the row has recomputation.
        """
        way = self.ways[self.way[row]]
        layout = replace(
            way,
            micro_batch_size=int(self.micro_batch_size[row]),
            recompute=str(self.recompute[row]),
            zero=int(self.zero[row]),
        )
        varies_sequence_parallel = not self.asked.holds("sequence_parallel")
        if varies_sequence_parallel and _can_split(self.asked.model, way):
            layout = replace(layout, sequence_parallel=bool(self.sequence_parallel[row]))
        if self.asked.counts_blocks and layout.recompute != "none":
            layout = replace(layout, recompute_layers=recomputed)
        return layout

    def place(self, row: int) -> tuple[int, int, int]:
        """Return a row's tp, pp and micro-batch size; the ranking has one row for each place."""
        way = self.ways[self.way[row]]
        return way.tp, way.pp, int(self.micro_batch_size[row])

    @cached_property
    def places(self) -> np.ndarray:
        """The `place` of every row: (rows, 3)."""
        layouts = self.job.layout
        return np.hstack([layouts.tp, layouts.pp, layouts.micro_batch_size])

    def of_rows(self, rows: np.ndarray) -> "Table":
        """Return a table with some of the rows; rows: their indices."""
        varied = {name: getattr(self, name)[rows] for name in ("way", *VARIED)}
        return replace(self, **varied)

    def plain_rows(self) -> np.ndarray:
        """Return the indices of rows whose fields are those of measured runs (PLAIN).

        A field that the user has fixed may have another value.
        """
        is_plain = np.full(len(self), True)
        for name, value in PLAIN.items():
            if name not in self.asked.fixed:
                is_plain &= self.column(name)[:, 0] == value
        return np.flatnonzero(is_plain)

    @cached_property
    def job(self) -> Job:
        """All rows as one job, whose layout has columns: (rows, 1), to broadcast with stages."""
        columns = {name: self.column(name) for name in ("tp", "pp", "cp", "dp", "schedule")}
        columns["vocab_pp"] = self.column("vocab_pp").astype(bool)
        virtual_stages = np.array([way.virtual_stages or 2 for way in self.ways])
        columns["virtual_stages"] = virtual_stages[self.way][:, None]
        for name in VARIED:
            columns[name] = getattr(self, name)[:, None]
        first = self.ways[0]
        constants: dict[str, Any] = {
            name: getattr(first, name) for name in ("pad_vocab_multiple", "overlap_param_gather")
        }
        layouts = Columns(**columns | constants)
        return Job(self.asked.model, layouts, self.asked.training, self.asked.machine)

    def column(self, name: str) -> np.ndarray:
        """Return a field of every row's way: (rows, 1)."""
        return np.array([getattr(way, name) for way in self.ways])[self.way][:, None]


def every_layout(asked: Asked) -> tuple[Table | None, list[Rejected]]:
    """Return the table of all layouts that train.py accepts, and the layouts that it refuses.

    Plain layouts come first. If no layout is accepted, the table is None.
    """
    ways: list[Layout] = []
    sizes: list[tuple[int, int]] = []  # index of a way, micro-batch size
    rejected = []
    for placed in _placed(asked):
        if isinstance(placed, Rejected):
            rejected.append(placed)
            continue
        micro_batches, refused = _micro_batches(asked, placed[0])
        rejected += refused
        indices = range(len(ways), len(ways) + len(placed))
        sizes += product(indices, micro_batches)
        ways += placed
    if not sizes:
        return None, rejected
    table, refused = _rows(asked, ways, np.array(sizes))
    return table, rejected + refused


def _placed(asked: Asked) -> Iterator[list[Layout] | Rejected]:
    """Yield for every tp, pp and cp the list of ways, or the reason why train.py refuses it.

    Reasons are given for the first cp only.
    """
    first, *others = asked.values("cp", _context_sizes(asked))
    yield from _with_cp(asked, first)
    for cp in others:
        for placed in _with_cp(asked, cp):
            if not isinstance(placed, Rejected):
                yield placed


def _context_sizes(asked: Asked) -> list[int]:
    """Return the values of cp to try if cp is not fixed: only 1 for short samples."""
    length = asked.model.seq_length
    if length < LONG:
        return [1]
    return [cp for cp in divisors(asked.gpus) if cp == 1 or length % (2 * cp) == 0]


def _with_cp(asked: Asked, cp: int) -> Iterator[list[Layout] | Rejected]:
    """Yield for every tp and pp the list of ways with one cp, or the reason why it is refused."""
    gpus = asked.gpus
    node = asked.machine.node
    held = {name: value for name, value in asked.fixed.items() if asked.holds(name)}
    for tp in asked.values("tp", divisors(gpus)):
        if tp > node and "tp" not in asked.fixed:
            reason = f"tp({tp}) would leave the node of {node} GPUs; --tp {tp} tries it"
            yield Rejected({"tp": tp}, reason)
            continue
        pipeline_sizes = divisors(gpus // tp) if gpus % tp == 0 else [1]
        for pp in asked.values("pp", pipeline_sizes):
            fields = {"partition": "balanced", **held, "tp": tp, "pp": pp, "cp": cp}
            try:
                yield _ways(asked, with_dp(Layout(**fields), gpus, "GPUs"))
            except UserError as error:
                yield Rejected({"tp": tp, "pp": pp}, str(error))


def _ways(asked: Asked, placed: Layout) -> list[Layout]:
    """Return a layout with every partition, schedule, number of virtual stages and --vocab-pp that
    train.py accepts, plain layouts first. Raise its first UserError if it accepts none.
    """
    # By the fields that decide what runs: two partitions may give the same blocks to each stage.
    ways: dict[tuple, Layout] = {}
    refusal = None
    partitions = asked.values("partition", [placed.partition])
    schedules = [placed.schedule]
    if placed.pp > 1 or asked.holds("schedule"):
        schedules = asked.values("schedule", SCHEDULES)
    vocabulary = asked.values("vocab_pp", [placed.vocab_pp, True])
    for partition, schedule, vocab_pp in product(partitions, schedules, vocabulary):
        way = replace(placed, partition=partition, schedule=schedule, vocab_pp=vocab_pp)
        for count in _virtual_stages(asked, way):
            way = replace(way, virtual_stages=count)
            try:
                check_split(asked.model, way)
            except UserError as error:
                refusal = refusal or error
                continue
            blocks: tuple[int, ...] = ()
            if len(partitions) > 1:
                blocks = tuple(blocks_per_stage(asked.model, way))
            ways.setdefault((way.schedule, count, vocab_pp, blocks), way)
    if refusal and not ways:
        raise refusal
    return list(ways.values())


def _virtual_stages(asked: Asked, way: Layout) -> list[Any]:
    """Return the numbers of stages of a rank to try with a way's schedule."""
    if way.schedule != "interleaved":
        return [way.virtual_stages]
    most = max(2, (asked.model.layers + 2) // way.pp)
    return asked.values("virtual_stages", range(2, most + 1))


def _micro_batches(asked: Asked, placed: Layout) -> tuple[list[int], list[Rejected]]:
    """Return the micro-batch sizes that divide the batch, the smallest first, and the layouts with
    other sizes as rejected.
    """
    batch = asked.training.global_batch_size
    dp = placed.dp
    sizes = {*MICRO_BATCHES}
    if batch % dp == 0:
        sizes.update(divisors(batch // dp))
    accepted = []
    rejected = []
    for micro_batch in asked.values("micro_batch_size", sorted(sizes)):
        layout = replace(placed, micro_batch_size=micro_batch)
        try:
            check_batch(layout, "global-batch-size", batch)
            accepted.append(micro_batch)
        except UserError as error:
            rejected.append(rejected_layout(layout, str(error)))
    return accepted, rejected


def _rows(
    asked: Asked, ways: list[Layout], sizes: np.ndarray
) -> tuple[Table | None, list[Rejected]]:
    """Return the table with every ZeRO stage, recomputation and sequence parallelism that train.py
    accepts, and the rejected ways, for which it accepts no ZeRO stage.

    sizes: pairs of the index of a way and a micro-batch size, (pairs, 2). The table is None if it
    would have no rows.
    """
    zeros, rejected = _zero_stages(asked, ways)
    recomputations = asked.values("recompute", RECOMPUTATIONS)
    blocks = [asked.fixed.get(name) for name in ("recompute_layers", "recompute_blocks")]
    if "recompute" not in asked.fixed and blocks != [None, None]:
        recomputations.remove("none")
    is_possible = {split: _splits(asked, ways, split) for split in (True, False)}
    way, micro_batch = sizes.T
    parts: list[list[np.ndarray]] = []
    for stage, recompute, split in product(range(zeros.shape[1]), recomputations, (True, False)):
        is_accepted = is_possible[split] & (zeros[:, stage] >= 0)  # for each way
        pairs = np.flatnonzero(is_accepted[way])
        splits = np.full(len(pairs), split)
        recompute_column = np.full(len(pairs), recompute)
        zero = zeros[way[pairs], stage]
        parts.append([way[pairs], micro_batch[pairs], splits, recompute_column, zero])
    table = Table(asked, ways, *(np.concatenate(column) for column in zip(*parts, strict=True)))
    return (table if len(table) else None), rejected


def _splits(asked: Asked, ways: list[Layout], split: bool) -> np.ndarray:
    """Return for each way whether it has rows with sequence parallelism (split), or without it."""
    if not asked.holds("sequence_parallel"):
        tried = split in asked.values("sequence_parallel", (True, False))
        return np.array([_has_rows(asked.model, way, split, tried) for way in ways])
    on_gpu = asked.machine.device != "CPU"
    layouts = [way.automatic(asked.model.seq_length, on_gpu) for way in ways]
    return np.array([bool(layout.sequence_parallel) == split for layout in layouts])


def _has_rows(model: ModelShape, way: Layout, split: bool, tried: bool) -> bool:
    """Return whether a way has rows with sequence parallelism (split), or without it.

    tried: whether the question asks for this. If sequence parallelism is not possible, a way has
    rows without it in any case.
    """
    possible = _can_split(model, way)
    if split:
        return possible and tried
    return tried or not possible


def _can_split(model: ModelShape, way: Layout) -> bool:
    """Return whether sequence parallelism is possible."""
    return way.tp > 1 and model.seq_length % (way.tp * way.cp) == 0


def _zero_stages(asked: Asked, ways: list[Layout]) -> tuple[np.ndarray, list[Rejected]]:
    """Return the ZeRO stages that train.py accepts for each way, and the ways without any.

    The result is an integer array, (ways, stages to try), with -1 for a stage that is refused. On a
    single rank nothing can be sharded, so only the first stage is tried.
    """
    stages = asked.values("zero", ZERO_STAGES)
    accepted = np.full((len(ways), len(stages)), -1)
    rejected = []
    for number, way in enumerate(ways):
        refusal = ""
        to_try = stages if way.dp * way.cp > 1 else stages[:1]
        for column, zero in enumerate(to_try):
            try:
                check_sharding(replace(way, zero=zero, recompute="full"), asked.training)
                accepted[number, column] = zero
            except UserError as error:
                refusal = refusal or str(error)
        if accepted[number].max() < 0:
            rejected.append(rejected_layout(way, refusal))
    return accepted, rejected


def rejected_layout(layout: Layout, reason: str) -> Rejected:
    """Return a layout as rejected, with the fields by which a reader finds it."""
    names = ("tp", "pp", "dp", "micro_batch_size", "recompute")
    return Rejected({name: getattr(layout, name) for name in names}, reason, layout)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, the smallest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
