"""Every layout that train.py takes of a model on some GPUs, as the columns of one table.

    asked = Asked(model, training, machine, gpus=384, fixed={"tp": 8})
    table, rejected = every_layout(asked)
    table.layout(7)          # the eighth as a schema.Layout
    table.job                # all of them: a Job whose layout is Columns

What is `fixed` is kept; all else is varied. What train.py refuses is not in the table but among the
rejected, with train.py's own sentence. Recomputed blocks are counted later, by what memory asks for
(planner/closed_form.py).
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

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")  # auto only if it is asked for
ZERO_STAGES = (1, 0, 2, 3)  # of equally fast ones the first is taken
MICRO_BATCHES = (1, 2, 4, 8, 16)
# The recomputations that are worth it, the fastest first: a flash kernel recomputes the scores
# anyway, so that `selective` saves nothing.
RECOMPUTATIONS = ("none", "full")
VARIED = ("micro_batch_size", "sequence_parallel", "recompute", "zero")  # columns of a Table
PLAIN = {"schedule": "1f1b", "vocab_pp": None, "cp": 1}  # the kind that measured runs have
LONG = 4096  # tokens of a sample from which on cp is varied


class Asked(NamedTuple):
    """A question: fixed holds Layout fields that are given, each a value or a list of those to try;
    recompute_layers and recompute_blocks are single values.
    """

    model: ModelShape
    training: Training
    machine: Machine
    gpus: int
    fixed: dict[str, Any] = {}  # noqa: RUF012

    @property
    def counts_blocks(self) -> bool:
        """Whether the number of blocks that are recomputed follows from memory."""
        given = self.fixed.get("recompute_blocks") is not None
        return not given and "recompute_layers" not in self.fixed

    def job(self, layout: Layout) -> Job:
        """The question about one layout."""
        return Job(self.model, layout, self.training, self.machine)

    def holds(self, name: str) -> bool:
        """Whether a field has one value that was given."""
        return name in self.fixed and not isinstance(self.fixed[name], list)

    def values(self, name: str, default: Iterable[Any]) -> list[Any]:
        """The values to try of a field."""
        given = self.fixed.get(name, list(default))
        return given if isinstance(given, list) else [given]


@dataclass(frozen=True)
class Rejected:
    """A layout that cannot run, or all layouts with one tp and pp; and why. whole: one of them."""

    layout: dict[str, int | str]
    reason: str
    whole: Layout | None = None


@dataclass(frozen=True)
class Table:
    """Layouts as columns. ways: without micro-batch, recomputation and ZeRO; way: the number of
    each row's; the other columns have what a row varies.
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
        """One row; recomputed: how many blocks of each stage, default: as is fixed, or all."""
        way = self.ways[self.way[row]]
        layout = replace(
            way,
            micro_batch_size=int(self.micro_batch_size[row]),
            recompute=str(self.recompute[row]),
            zero=int(self.zero[row]),
        )
        if not self.asked.holds("sequence_parallel") and _can_split(self.asked.model, way):
            layout = replace(layout, sequence_parallel=bool(self.sequence_parallel[row]))
        if self.asked.counts_blocks and layout.recompute != "none":
            layout = replace(layout, recompute_layers=recomputed)
        return layout

    def place(self, row: int) -> tuple[int, int, int]:
        """By which rows are alike: one of each place is ranked."""
        way = self.ways[self.way[row]]
        return way.tp, way.pp, int(self.micro_batch_size[row])

    @cached_property
    def places(self) -> np.ndarray:
        """The `place` of every row, as an array of three columns."""
        layouts = self.job.layout
        return np.hstack([layouts.tp, layouts.pp, layouts.micro_batch_size])

    def of_rows(self, rows: np.ndarray) -> "Table":
        """The table of some rows."""
        varied = {name: getattr(self, name)[rows] for name in ("way", *VARIED)}
        return replace(self, **varied)

    def plain_rows(self) -> np.ndarray:
        """The rows of the kind that measured runs have, as far as nothing else was given."""
        kept = np.full(len(self), True)
        for name, value in PLAIN.items():
            if name not in self.asked.fixed:
                kept &= self.column(name)[:, 0] == value
        return np.flatnonzero(kept)

    @cached_property
    def job(self) -> Job:
        """All rows. A column has the shape (rows, 1), so that it broadcasts with some stages."""
        of_rows = {name: self.column(name) for name in ("tp", "pp", "cp", "dp", "schedule")}
        of_rows["vocab_pp"] = self.column("vocab_pp").astype(bool)
        of_rows["virtual_stages"] = np.array([way.virtual_stages or 2 for way in self.ways])
        of_rows["virtual_stages"] = of_rows["virtual_stages"][self.way][:, None]
        for name in VARIED:
            of_rows[name] = getattr(self, name)[:, None]
        first = self.ways[0]
        alike: dict[str, Any] = {
            name: getattr(first, name) for name in ("pad_vocab_multiple", "overlap_param_gather")
        }
        layouts = Columns(**of_rows | alike)
        return Job(self.asked.model, layouts, self.asked.training, self.asked.machine)

    def column(self, name: str) -> np.ndarray:
        """A field of the ways, with the shape (rows, 1)."""
        return np.array([getattr(way, name) for way in self.ways])[self.way][:, None]


def every_layout(asked: Asked) -> tuple[Table | None, list[Rejected]]:
    """The table of all rows, the plainest first, and what train.py does not take; no table if there
    is no row.
    """
    ways: list[Layout] = []
    sizes: list[tuple[int, int]] = []  # number of a way, micro-batch
    rejected = []
    for placed in _placed(asked):
        if isinstance(placed, Rejected):
            rejected.append(placed)
            continue
        fitting, refused = _micro_batches(asked, placed[0])
        rejected += refused
        numbers = range(len(ways), len(ways) + len(placed))
        sizes += product(numbers, fitting)
        ways += placed
    if not sizes:
        return None, rejected
    rows, refused = _rows(asked, ways, np.array(sizes))
    return rows, rejected + refused


def _placed(asked: Asked) -> Iterator[list[Layout] | Rejected]:
    """The ways to run every tp and pp that divide GPUs and model, and why the others do not; then,
    of long samples, those with every cp.
    """
    first, *others = asked.values("cp", _context_sizes(asked))
    yield from _with_cp(asked, first)
    for cp in others:
        found = _with_cp(asked, cp)
        yield from (placed for placed in found if not isinstance(placed, Rejected))


def _context_sizes(asked: Asked) -> list[int]:
    """Values of cp to try where none is given."""
    length = asked.model.seq_length
    if length < LONG:
        return [1]
    return [cp for cp in divisors(asked.gpus) if cp == 1 or length % (2 * cp) == 0]


def _with_cp(asked: Asked, cp: int) -> Iterator[list[Layout] | Rejected]:
    """Do what `_placed` does, with one cp."""
    gpus, node = asked.gpus, asked.machine.node
    held = {name: value for name, value in asked.fixed.items() if asked.holds(name)}
    for tp in asked.values("tp", divisors(gpus)):
        if tp > node and "tp" not in asked.fixed:
            reason = f"tp({tp}) would leave the node of {node} GPUs; --tp {tp} tries it"
            yield Rejected({"tp": tp}, reason)
            continue
        for pp in asked.values("pp", divisors(gpus // tp) if gpus % tp == 0 else [1]):
            given = {"partition": "balanced", **held, "tp": tp, "pp": pp, "cp": cp}
            try:
                yield _ways(asked, with_dp(Layout(**given), gpus, "GPUs"))
            except UserError as error:
                yield Rejected({"tp": tp, "pp": pp}, str(error))


def _ways(asked: Asked, placed: Layout) -> list[Layout]:
    """A layout with every partition, schedule, number of virtual stages and vocabulary sharding
    that train.py takes, the plainest first. Raises UserError, why not, if it takes none.
    """
    found: dict[tuple, Layout] = {}  # by what runs: partitions may be the same
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
            blocks = tuple(blocks_per_stage(asked.model, way)) if len(partitions) > 1 else ()
            found.setdefault((way.schedule, count, vocab_pp, blocks), way)
    if refusal and not found:
        raise refusal
    return list(found.values())


def _virtual_stages(asked: Asked, way: Layout) -> list[Any]:
    """How many stages of a rank to try."""
    if way.schedule != "interleaved":
        return [way.virtual_stages]
    most = max(2, (asked.model.layers + 2) // way.pp)
    return asked.values("virtual_stages", range(2, most + 1))


def _micro_batches(asked: Asked, placed: Layout) -> tuple[list[int], list[Rejected]]:
    """The micro-batches that divide the batch, the smallest first, and why others do not."""
    batch, dp = asked.training.global_batch_size, placed.dp
    sizes = {*MICRO_BATCHES, *(divisors(batch // dp) if batch % dp == 0 else ())}
    found, rejected = [], []
    for micro in asked.values("micro_batch_size", sorted(sizes)):
        layout = replace(placed, micro_batch_size=micro)
        try:
            check_batch(layout, "global-batch-size", batch)
            found.append(micro)
        except UserError as error:
            rejected.append(rejected_layout(layout, str(error)))
    return found, rejected


def _rows(
    asked: Asked, ways: list[Layout], sizes: np.ndarray
) -> tuple[Table | None, list[Rejected]]:
    """The table: each way and micro-batch with every ZeRO stage, recomputation, and with and
    without sequence parallelism, that train.py takes; and the ways of which it takes no ZeRO stage.
    """
    zeros, rejected = _zero_stages(asked, ways)
    kinds = asked.values("recompute", RECOMPUTATIONS)
    blocks = [asked.fixed.get(name) for name in ("recompute_layers", "recompute_blocks")]
    if "recompute" not in asked.fixed and blocks != [None, None]:
        kinds.remove("none")
    split_of_way = {each: _splits(asked, ways, each) for each in (True, False)}
    way, micro_batch = sizes.T
    parts: list[list[np.ndarray]] = []
    for stage, kind, split in product(range(zeros.shape[1]), kinds, (True, False)):
        taken = split_of_way[split] & (zeros[:, stage] >= 0)
        rows = np.flatnonzero(taken[way])
        alike = np.full(len(rows), split), np.full(len(rows), kind)
        parts.append([way[rows], micro_batch[rows], *alike, zeros[way[rows], stage]])
    table = Table(asked, ways, *(np.concatenate(column) for column in zip(*parts, strict=True)))
    return (table if len(table) else None), rejected


def _splits(asked: Asked, ways: list[Layout], split: bool) -> np.ndarray:
    """Return which ways have rows with, or without, sequence parallelism."""
    if not asked.holds("sequence_parallel"):
        tried = split in asked.values("sequence_parallel", (True, False))
        return np.array([_has_rows(asked.model, way, split, tried) for way in ways])
    on_gpu = asked.machine.device != "CPU"
    settled = [way.automatic(asked.model.seq_length, on_gpu) for way in ways]
    return np.array([bool(way.sequence_parallel) == split for way in settled])


def _has_rows(model: ModelShape, way: Layout, split: bool, tried: bool) -> bool:
    """Return what `_splits` does; tried: whether this is asked for. What cannot be split is listed
    without.
    """
    possible = _can_split(model, way)
    return possible and tried if split else tried or not possible


def _can_split(model: ModelShape, way: Layout) -> bool:
    """Whether sequence parallelism is possible."""
    return way.tp > 1 and model.seq_length % (way.tp * way.cp) == 0


def _zero_stages(asked: Asked, ways: list[Layout]) -> tuple[np.ndarray, list[Rejected]]:
    """For each way the ZeRO stages that train.py takes, -1 in place of others; and why not, where
    it takes none.
    """
    stages = asked.values("zero", ZERO_STAGES)
    found = np.full((len(ways), len(stages)), -1)
    rejected = []
    for number, way in enumerate(ways):
        refusal = ""
        for column, zero in enumerate(stages if way.dp * way.cp > 1 else stages[:1]):
            try:
                check_sharding(replace(way, zero=zero, recompute="full"), asked.training)
                found[number, column] = zero
            except UserError as error:
                refusal = refusal or str(error)
        if found[number].max() < 0:
            rejected.append(rejected_layout(way, refusal))
    return found, rejected


def rejected_layout(layout: Layout, reason: str) -> Rejected:
    """A layout that cannot run, by what a reader looks for it."""
    names = ("tp", "pp", "dp", "micro_batch_size", "recompute")
    return Rejected({name: getattr(layout, name) for name in names}, reason, layout)


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
