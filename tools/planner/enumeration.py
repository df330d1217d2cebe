"""Enumerates the layouts with which train.py can run a model on some GPUs, as rows of a table.

    asked = Asked(model, training, machine, gpus=384, fixed={"tp": 8})
    table, rejected = every_layout(asked)
    table.layout(7)          # the eighth row as a schema.Layout
    table.job                # all rows as one Job, whose layout is Columns

Fields in `fixed` are kept, all other fields are varied. A layout that train.py refuses is rejected
with train.py's error line. A row of the table is a layout. A way is a layout without micro-batch
size, ZeRO stage, recomputation and sequence parallelism (VARIED); a row adds these to a way. The
number of recomputed blocks is computed later, from the memory that a row needs (closed_form.py).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from architecture.shape import ModelShape
from base.errors import UserError
from config.schema import Layout, Training
from config.validation import (
    check_batch,
    check_joint_matrices,
    check_sharding,
    check_split,
    with_dp,
)
from costs.hardware import Machine
from costs.job import Columns, Job
from costs.partition_costs import blocks_of

# The schedules that are tried; `auto` is planned only if the user asks for it.
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
ZERO_STAGES = (1, 0, 2, 3)  # of equally fast layouts, the first ZeRO stage in this order is ranked
MICRO_BATCHES = (1, 2, 4, 8, 16)
# `selective` is not varied, because it saves no memory: a flash kernel always recomputes scores.
RECOMPUTATIONS = ("none", "full")
NOT_VARIED = (
    "pad_vocab_multiple",
    "overlap_param_gather",
    "sync_each_batch",
    "reshard_after_forward",
    "ep",  # a given one; Job.ep has the one that the planner takes if there is none
)
VARIED = ("micro_batch_size", "zero", "recompute", "sequence_parallel")  # columns of a Table
# All fields that have a column of their own in the job of a Table.
OF_WAYS = ("tp", "pp", "cp", "dp", "schedule")
COLUMNS = (*OF_WAYS, "virtual_stages", *VARIED)
# The values of these fields in layouts of questions that must be quick.
PLAIN = {"schedule": "1f1b", "cp": 1}
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
    fixed: dict[str, Any] = {}  # what the user has fixed  # noqa: RUF012

    @property
    def counts_blocks(self) -> bool:
        """Whether the planner chooses the number of recomputed blocks, by the memory of a GPU.

        It does unless the user has fixed the number, for all stages or for each stage.
        """
        has_blocks = self.fixed.get("recompute_blocks") is not None
        return not has_blocks and "recompute_layers" not in self.fixed

    def job(self, layout: Layout) -> Job:
        """Return the job of a layout: with the question's model, training options and machine."""
        return Job(self.model, layout, self.training, self.machine)

    def holds(self, name: str) -> bool:
        """Return whether a field of the layout is fixed to a single value, not to a list."""
        return name in self.fixed and not isinstance(self.fixed[name], list)

    def values(self, name: str, default: Iterable[Any]) -> list[Any]:
        """Return the values to try for a field of the layout: the fixed value or values.

        default: the values to try if the field is not fixed.
        """
        values = self.fixed.get(name, list(default))
        return values if isinstance(values, list) else [values]


@dataclass(frozen=True)
class Rejected:
    """A layout that cannot run, and the reason.

    layout: some fields by name, to print; with only tp and pp, no layout with these two can run.
    whole: a layout with all its fields, if the reason is about a certain layout.
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
    zero: np.ndarray
    recompute: np.ndarray
    sequence_parallel: np.ndarray

    def __len__(self) -> int:
        return len(self.way)

    def layout(self, row: int, recomputed: int | None = None) -> Layout:
        """Return the layout of one row; row: its number.

        recomputed: the number of recomputed blocks of each stage, if the planner chooses it; None:
        all blocks, if the row has recomputation.
        """
        way = self.ways[self.way[row]]
        more: dict[str, Any] = {
            "micro_batch_size": int(self.micro_batch_size[row]),
            "recompute": str(self.recompute[row]),
            "zero": int(self.zero[row]),
        }
        # A fixed option stays in the way as the user gave it.
        if not self.asked.holds("sequence_parallel") and _can_split(self.asked.model, way):
            more["sequence_parallel"] = bool(self.sequence_parallel[row])
        if self.asked.counts_blocks and more["recompute"] != "none":
            more["recompute_layers"] = recomputed
        return replace(way, **more)

    @cached_property
    def places(self) -> np.ndarray:
        """The tp, pp and micro-batch size of every row: (rows, 3).

        These three are called a place. `plan.py layouts` shows one layout for each place.
        """
        layouts = self.job.layout
        return np.hstack([layouts.tp, layouts.pp, layouts.micro_batch_size])

    @cached_property
    def place(self) -> np.ndarray:
        """A number for the tp, pp and micro-batch size of every row, which are its place: (rows,).

        Rows with the same place have the same number; a larger tp has a larger number, then a
        larger pp, then a larger micro-batch size.
        """
        tp, pp, micro_batch = self.places.T
        return (tp * (pp.max() + 1) + pp) * (micro_batch.max() + 1) + micro_batch

    def take_rows(self, rows: np.ndarray | slice) -> "Table":
        """Return a table that has only some of this table's rows; rows: what selects them."""
        varied = {name: getattr(self, name)[rows] for name in ("way", *VARIED)}
        return replace(self, **varied)

    @cached_property
    def job(self) -> Job:
        """All rows as one job, with which formulas compute a number for every row at once.

        Each field of its layout is a column, an array of the shape (rows, 1), so that it broadcasts
        with an axis of stages or ranks.
        """
        columns = {name: self.column(name) for name in OF_WAYS}
        # Only interleaved schedules use this number. A column of integers cannot have None, so
        # ways without the number get 2, which has no effect.
        virtual_stages = np.array([way.virtual_stages or 2 for way in self.ways])
        columns["virtual_stages"] = virtual_stages[self.way][:, None]
        for name in VARIED:
            columns[name] = getattr(self, name)[:, None]
        first = self.ways[0]  # these fields are not varied, so all ways have the same values
        constants: dict[str, Any] = {name: getattr(first, name) for name in NOT_VARIED}
        layouts = Columns(**columns | constants)
        return Job(self.asked.model, layouts, self.asked.training, self.asked.machine)

    def column(self, name: str) -> np.ndarray:
        """Return for every row the value of a field that the row's way has: (rows, 1)."""
        return np.array([getattr(way, name) for way in self.ways])[self.way][:, None]


def every_layout(asked: Asked) -> tuple[Table | None, list[Rejected]]:
    """Return the table of all layouts that train.py accepts, and the layouts that it refuses.

    Plain layouts come first. If no layout is accepted, the table is None.
    """
    ways: list[Layout] = []
    parts: list[np.ndarray] = []  # for each way, the values that its rows add: (rows, VARIED)
    rejected = []
    # By the facts about a way that decide which rows are possible: the columns of these rows, which
    # are computed once for all ways with the same facts.
    parts_of: dict[tuple, np.ndarray] = {}
    for placed in _placed(asked):
        if isinstance(placed, Rejected):
            rejected.append(placed)
            continue
        sizes, refused = _micro_batches(asked, placed[0])
        rejected += refused
        for way in placed:
            splits = _splits(asked, way)
            # The rows of a way are all combinations of values in VARIED, as integers: recomputation
            # is an index into _recomputations. Ways with the same key have the same combinations.
            key = way.tp > 1, way.pp > 1, way.dp * way.cp > 1, str(splits), str(sizes)
            try:
                if key not in parts_of:
                    stages = _zero_stages(asked, way)
                    varied = product(sizes, stages, range(len(_recomputations(asked))), splits)
                    parts_of[key] = np.reshape(list(varied), (-1, len(VARIED))).astype(int)
            except UserError as error:
                rejected.append(rejected_layout(way, str(error)))
                continue
            ways.append(way)
            parts.append(parts_of[key])
    if not sum(map(len, parts)):
        return None, rejected
    columns = dict(zip(VARIED, np.concatenate(parts).T, strict=True))
    # Put the values themselves in place of the indices of recomputation and the integers 0 and 1.
    columns["recompute"] = np.array(_recomputations(asked))[columns["recompute"]]
    columns["sequence_parallel"] = columns["sequence_parallel"].astype(bool)
    way_of_row = np.repeat(np.arange(len(ways)), list(map(len, parts)))
    return Table(asked, ways, way_of_row, **columns), rejected


def _recomputations(asked: Asked) -> list[str]:
    """Return the values of --recompute to try: not `none` if the user gave recomputed blocks."""
    recomputations = asked.values("recompute", RECOMPUTATIONS)
    blocks = [asked.fixed.get(name) for name in ("recompute_layers", "recompute_blocks")]
    if "recompute" not in asked.fixed and blocks != [None, None]:
        recomputations.remove("none")
    return recomputations


def _splits(asked: Asked, way: Layout) -> list[bool]:
    """Return the values of sequence parallelism to try for a way.

    A fixed value is taken as train.py would decide it for the machine. Otherwise both values are
    tried, or only False if the layout cannot split the tokens.
    """
    if asked.holds("sequence_parallel"):
        on_gpu = asked.machine.device != "CPU"
        return [bool(way.automatic(asked.model.seq_length, on_gpu).sequence_parallel)]
    if not _can_split(asked.model, way):
        return [False]
    return asked.values("sequence_parallel", (True, False))


def _can_split(model: ModelShape, way: Layout) -> bool:
    """Return whether sequence parallelism is possible: tp must divide the tokens of a cp rank."""
    return way.tp > 1 and model.seq_length % (way.tp * way.cp) == 0


def _zero_stages(asked: Asked, way: Layout) -> list[int]:
    """Return the ZeRO stages that train.py accepts for a way.

    If a single rank holds each weight, nothing can be sharded, so only the first ZeRO stage is
    tried. Raise train.py's first UserError if it accepts no stage.
    """
    stages = asked.values("zero", ZERO_STAGES)
    accepted = []
    refusal = None
    for zero in stages if way.dp * way.cp > 1 else stages[:1]:
        # Check with --recompute full, since `none` would be refused with a fixed number of blocks.
        try:
            check_sharding(replace(way, zero=zero, recompute="full"), asked.training)
            accepted.append(zero)
        except UserError as error:
            refusal = refusal or error
    if refusal and not accepted:
        raise refusal
    return accepted


def _placed(asked: Asked) -> Iterator[list[Layout] | Rejected]:
    """Yield for every tp, pp and cp the list of ways, or the reason why train.py refuses them.

    To keep the list of reasons short, they are given for the first cp only.
    """
    gpus = asked.gpus
    node = asked.machine.node
    # The fields that the user fixed to one value; fields with a list of values are varied.
    held = {name: value for name, value in asked.fixed.items() if asked.holds(name)}
    context_sizes = asked.values("cp", _context_sizes(asked))
    for cp, tp in product(context_sizes, asked.values("tp", divisors(gpus))):
        is_first = cp == context_sizes[0]
        if tp > node and "tp" not in asked.fixed:
            if is_first:
                reason = f"tp({tp}) spans several nodes of {node} GPUs; --tp {tp} tries it"
                yield Rejected({"tp": tp}, reason)
            continue
        # If tp does not divide the GPUs, a single pp suffices to get train.py's error.
        pipeline_sizes = divisors(gpus // tp) if gpus % tp == 0 else [1]
        for pp in asked.values("pp", pipeline_sizes):
            fields = {"partition": "balanced", **held, "tp": tp, "pp": pp, "cp": cp}
            try:
                yield _ways(asked, with_dp(Layout(**fields), gpus, "GPUs"))
            except UserError as error:
                if is_first:
                    yield Rejected({"tp": tp, "pp": pp}, str(error))


def _context_sizes(asked: Asked) -> list[int]:
    """Return the values of cp to try if cp is not fixed: only 1 for short samples.

    Each cp rank has two equal chunks of a sample, so 2 cp must divide the sample's length.
    """
    length = asked.model.seq_length
    if length < LONG:
        return [1]
    return [cp for cp in divisors(asked.gpus) if cp == 1 or length % (2 * cp) == 0]


def _ways(asked: Asked, placed: Layout) -> list[Layout]:
    """Return all ways of a layout whose tp, pp, cp and dp are set, plain ways first.

    They have every partition, schedule and number of virtual stages that train.py accepts. Raise
    train.py's first UserError if it accepts none.
    """
    # By the fields that decide what runs, the way. Two partitions may give the same blocks to each
    # stage: of ways with the same fields only the first is kept.
    ways: dict[tuple, Layout] = {}
    refusal = None
    partitions = asked.values("partition", [placed.partition])
    schedules = [placed.schedule]
    if placed.pp > 1 or asked.holds("schedule"):
        schedules = asked.values("schedule", SCHEDULES)
    for partition, schedule in product(partitions, schedules):
        way = replace(placed, partition=partition, schedule=schedule)
        for count in _virtual_stages(asked, way):
            way = replace(way, virtual_stages=count)
            try:
                check_split(asked.model, way)
                check_joint_matrices(asked.model, way, asked.training)
            except UserError as error:
                refusal = refusal or error
                continue
            # The blocks of each stage distinguish ways only if several partitions are tried.
            blocks: tuple[int, ...] = ()
            if len(partitions) > 1:
                blocks = tuple(blocks_of(asked.job(way)))
            ways.setdefault((way.schedule, count, blocks), way)
    if refusal and not ways:
        raise refusal
    return list(ways.values())


def _virtual_stages(asked: Asked, way: Layout) -> list[Any]:
    """Return the values of --virtual-stages, the stages of a rank, to try with a way's schedule."""
    if way.schedule != "interleaved":
        return [way.virtual_stages]
    # Embedding and head may be stages without blocks, so there may be two stages more than blocks.
    most = max(2, (asked.model.layers + 2) // way.pp)
    return asked.values("virtual_stages", range(2, most + 1))


def _micro_batches(asked: Asked, placed: Layout) -> tuple[list[int], list[Rejected]]:
    """Return the micro-batch sizes to try with a layout, the smallest first, and rejected layouts.

    All divisors of a replica's share of the batch are tried. The sizes in MICRO_BATCHES, or those
    that the user fixed, are rejected with train.py's reason if they do not divide it.
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


def rejected_layout(layout: Layout, reason: str) -> Rejected:
    """Return a layout as a rejected one; the list of reasons shows only its most telling fields."""
    names = ("tp", "pp", "dp", "micro_batch_size", "recompute")
    return Rejected({name: getattr(layout, name) for name in names}, reason, layout)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, the smallest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
