"""Decides which blocks each pipeline stage holds, balanced by the costs of a model's parts.

    stage_specs(model, layout, costs)      the stages, with parameters and share of time

The parts are the embedding (tokens, positions, their norm), the blocks, and the head (final norm,
output matrix, loss). A stage is a run of blocks; the first stage also has the embedding and the
last stage the head. Each pipeline rank holds one stage or several. A partition is the number of
blocks of each stage.

The time of each part is given as `PartCosts`. A run and a plan take it from the planner
(costs/partition_costs.py).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from architecture import model_stats
from architecture.shape import ModelShape
from config.schema import Layout
from config.validation import explicit_partition


@dataclass(frozen=True)
class PartCosts:
    """The time of a forward and a backward pass through each part; only ratios matter."""

    embedding: float
    block: float
    head: float


# Costs by which nothing is balanced: for one stage, or a partition that is a list.
BLOCKS_ALONE = PartCosts(0.0, 1.0, 0.0)


@dataclass(frozen=True)
class StageSpec:
    """One pipeline stage: blocks [first, last) and perhaps the embedding and the head.

    index: the stage's number in the pipeline. embedding, head: whether the stage has them.
    parameters: the number of its parameters, not divided by tp.
    """

    index: int
    first: int
    last: int
    embedding: bool
    head: bool
    parameters: int
    share: float  # the stage's part of the whole model's time, 0 to 1
    rank: int = 0  # the pipeline rank that holds the stage
    tied: bool = False  # whether another rank holds a copy of this stage's vocabulary matrix

    @property
    def blocks(self) -> int:
        """The number of blocks of this stage, which has the model's blocks `first` to last - 1."""
        return self.last - self.first


def stage_specs(model: ModelShape, layout: Layout, costs: PartCosts) -> list[StageSpec]:
    """Return the stages of a layout with their parameters, not divided by tp, and share of time.

    Called to build the model's stages, to print them, and by the planner. A tied head on another
    rank than the embedding holds a copy of the embedding's matrix, which is counted in both stages.
    Raise UserError for an impossible --partition.
    """
    # The result is cached by a layout that has only the fields on which it depends. So the many
    # layouts of a plan that differ in other fields share the cached result.
    used = ("tp", "pp", "schedule", "virtual_stages", "partition", "pad_vocab_multiple")
    layout_of_stages = Layout(**{name: getattr(layout, name) for name in used})
    return list(_stage_specs(model, layout_of_stages, costs))


@lru_cache(maxsize=4096)
def _stage_specs(model: ModelShape, layout: Layout, costs: PartCosts) -> list[StageSpec]:
    """Return the result of `stage_specs`; the layout has only the fields that it depends on.

    Each stage in turn gets its blocks, with their parameters and time, and then the embedding if it
    is the first stage and the head if it is the last.
    """
    matrix = model.vocab_size * model.hidden
    rank_of = placement(layout)
    # The embedding's matrix is copied if the first and the last stage are on different ranks, and
    # the head is tied to it, or embeds tokens for multi-token prediction.
    copied = model.copies_embedding and rank_of[0] != rank_of[-1]
    whole = costs.embedding + model.layers * costs.block + costs.head  # the whole model's time
    first = 0  # the number of the first block of the next stage
    specs: list[StageSpec] = []
    for index, blocks in enumerate(blocks_per_stage(model, layout, costs)):
        embedding = index == 0
        head = index == layout.stages - 1
        last = first + blocks
        count = model_stats.parameters_of_blocks(model, first, last)
        seconds = blocks * costs.block
        if embedding:
            count += model_stats.embedding_parameters(model)
            seconds += costs.embedding
        if head:
            count += model_stats.head_parameters(model)
            count += matrix if copied else 0
            count += model_stats.predictor_parameters(model)
            seconds += costs.head
        tied = copied and (embedding or head)
        share = seconds / whole
        spec = StageSpec(index, first, last, embedding, head, count, share, rank_of[index], tied)
        specs.append(spec)
        first = last
    return specs


def blocks_per_stage(model: ModelShape, layout: Layout, costs: PartCosts) -> list[int]:
    """Return the number of blocks of each stage with the layout's --partition.

    Raise UserError if a list that --partition gives does not fit the layout.
    """
    explicit = explicit_partition(layout, model.layers)
    if explicit:
        return explicit
    if layout.pp == 1:
        return [model.layers]
    if layout.partition == "layers":
        return _share_out(model.layers, layout.stages)
    # With --partition blocks, embedding and head count as a block each, as in BLOOM's runs. So two
    # blocks more are shared out. One of them is then subtracted from the first stage, which has the
    # embedding, and one from the last stage, which has the head.
    if layout.partition == "blocks":
        counts = _share_out(model.layers + 2, layout.stages)
        counts[0] -= 1
        counts[-1] -= 1
        return counts
    return list(balanced(model.layers, placement(layout), costs))


def rank_of_stages(name: str, ranks: int, virtual: int = 1) -> tuple[int, ...]:
    """Return the rank of each stage: 0 1 2 0 1 2, or in a V, 0 1 2 2 1 0, if the name ends in -v.

    name: the schedule. virtual: the number of stages on each rank; a V always has two.
    """
    if name.endswith("-v"):
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(range(ranks)) * virtual


def placement(layout: Layout) -> tuple[int, ...]:
    """Return for each stage of a layout the pipeline rank that holds it.

    The schedule decides this: one stage on each rank, or several, in turn or in a V.
    """
    return rank_of_stages(layout.schedule, layout.pp, layout.stages_per_rank)


# The result is cached, because the planner asks for many layouts that differ only in other options,
# such as the micro-batch size, and have the same partition.
@lru_cache(maxsize=4096)
def balanced(layers: int, rank_of: tuple[int, ...], costs: PartCosts) -> tuple[int, ...]:
    """Return the number of blocks of each stage such that the slowest rank is as fast as possible.

    rank_of: the rank of each stage. All blocks take the same time, so each block in turn goes to
    the rank with the least time, and there to the stage with the least time. With one stage on each
    rank, the first and the last rank take only the blocks that would make another rank the slowest,
    because embedding and head take memory too. The other ranks, in the middle, share their blocks
    equally; the remainder goes to later ranks, which hold fewer activations in 1F1B.
    """
    ranks = range(max(rank_of) + 1)
    # A load is the time of a stage or rank without blocks: the time of embedding and head.
    stage_loads = [0.0] * len(rank_of)
    stage_loads[0] += costs.embedding
    stage_loads[-1] += costs.head
    rank_loads = [0.0 for _ in ranks]
    for rank, seconds in zip(rank_of, stage_loads, strict=True):
        rank_loads[rank] += seconds
    # The ends are the first and the last rank; with several stages on each rank, all ranks are
    # treated as ends, and there are no middle ranks.
    several_stages = len(rank_of) > len(ranks)
    ends = [rank for rank in ranks if several_stages or rank in (0, ranks[-1])]
    middle_ranks = len(ranks) - len(ends)
    # If each block goes to the rank with the least time, the slowest rank is as fast as possible;
    # its time is `slowest`. Each middle rank takes as many blocks as fit into this time, and the
    # ends take the other blocks.
    fastest = _to_the_least(rank_loads, layers, costs.block)
    slowest = max(load + n * costs.block for load, n in zip(rank_loads, fastest, strict=True))
    most = int(slowest / costs.block + 1e-9)  # the blocks of a middle rank in the time `slowest`
    layers_of_ends = max(0, layers - middle_ranks * most)
    end_counts = _to_the_least([rank_loads[rank] for rank in ends], layers_of_ends, costs.block)
    middle_counts = _spread(layers - layers_of_ends, middle_ranks)
    # The blocks of a rank, counted in `end_counts` or `middle_counts`, are divided among its
    # stages: each block goes to the stage with the least time.
    blocks = [0] * len(rank_of)
    stages_of: list[list[int]] = [[] for _ in ranks]  # the stages of each rank, the last one first
    for stage in reversed(range(len(rank_of))):
        stages_of[rank_of[stage]].append(stage)
    for rank, stages in enumerate(stages_of):
        count = end_counts[ends.index(rank)] if rank in ends else middle_counts[rank - 1]
        counts = _to_the_least([stage_loads[stage] for stage in stages], count, costs.block)
        for stage, n in zip(stages, counts):
            blocks[stage] = n
    return tuple(blocks)


def _to_the_least(loads: Sequence[float], count: int, block: float) -> list[int]:
    """Return how many of `count` blocks go to each load if every block is added to the least load.

    loads: the times of ranks, or of a rank's stages, before the blocks are added. If several loads
    are the least, the block goes to the last of them. block: the time of a block.
    """
    numbers = [0] * len(loads)
    # The heap's first entry is the least load. Places are negative in it, so that of equal loads
    # the one with the largest place comes first.
    queue = [(load, -place) for place, load in enumerate(loads)]
    heapq.heapify(queue)
    for _ in range(count):
        _, minus_place = queue[0]
        numbers[-minus_place] += 1
        load = loads[-minus_place] + numbers[-minus_place] * block
        heapq.heapreplace(queue, (load, minus_place))
    return numbers


def _spread(count: int, stages: int) -> list[int]:
    """Return equal shares of `count` blocks for a number of stages; they differ by 1 at most.

    The larger shares go to later stages, which hold fewer activations in 1F1B: 7 blocks for 3
    stages are 2, 2, 3.
    """
    share, extra = divmod(count, max(1, stages))
    return [share + (i >= stages - extra) for i in range(stages)]


def _share_out(count: int, pp: int) -> list[int]:
    """Return equal shares of `count` blocks for `pp` stages; they differ by 1 at most.

    The larger shares go to middle stages, and one to the first stage if the middle stages are not
    enough. Called for --partition layers and blocks. With 4 stages, 10 blocks are 2, 3, 3, 2.
    """
    share, extra = divmod(count, pp)
    if pp == 2:  # two stages have no stage in the middle, so the first takes the remainder
        return [share + extra, share]
    middle = min(extra, pp - 2)
    return [share + (extra > middle), *_spread(share * (pp - 2) + middle, pp - 2), share]


def stage_table(rows: list[StageSpec], model: ModelShape) -> str:
    """Return a printable table of the stages, one line each, with a line of sums.

    rows: the result of `stage_specs`. The table is in the log of a run and in the planner's answer.
    Raise ValueError if the sums are not the model's numbers of blocks and parameters.
    """
    lines = ["stage   holds                        blocks       parameters   share of time"]
    several_stages = any(s.rank != s.index for s in rows)  # then a line names the rank
    for s in rows:
        parts = []
        if s.embedding:
            parts.append("embedding")
        if s.blocks:
            parts.append(f"blocks {s.first}-{s.last - 1}")
        if s.head:
            parts.append("head")
        holds = " + ".join(parts) or "nothing, passes on"
        if several_stages:
            holds = f"rank {s.rank}: {holds}"
        lines.append(f"{s.index:5}   {holds:28} {s.blocks:6} {s.parameters:16,} {s.share:14.1%}")
    # The stages count a tied matrix twice if the last stage has a copy; the model counts it once.
    copies = model.vocab_size * model.hidden if rows[-1].tied else 0
    blocks = sum(s.blocks for s in rows)
    total = sum(s.parameters for s in rows)
    if blocks != model.layers or total != model_stats.parameters(model) + copies:
        raise ValueError(
            f"stages hold {blocks} blocks and {total} parameters, the model has "
            f"{model.layers} and {model_stats.parameters(model)} + {copies} in the tied copy"
        )
    lines.append(f"  sum   {'':28} {blocks:6} {total:16,} {sum(s.share for s in rows):14.1%}")
    if copies:
        lines.append(f"        of which {copies:,} are the head's copy of the tied embedding")
    return "\n".join(lines)
