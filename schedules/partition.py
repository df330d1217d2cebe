"""Which blocks each pipeline stage holds, balanced by what the parts of a model cost.

The parts are the embedding (tokens, positions, their norm), the blocks, and the head (final norm,
output matrix, loss). A stage is a run of blocks, the first one with the embedding and the last one
with the head.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from config import model_stats
from config.schema import Layout, ModelShape
from config.validation import explicit_partition
from schedules.compiler import balanced_ranks
from schedules.schedule import rank_of_stages

# What one byte of memory traffic costs in FLOPs: on GPUs about an A100's 312 TFLOP/s over 2 TB/s,
# on a CPU core about 80 GFLOP/s over 8 GB/s. It weighs what moves bytes against GEMMs.
FLOPS_PER_BYTE = {"cuda": 150.0, "cpu": 10.0}


@dataclass(frozen=True)
class PartCosts:
    """Time of one token's forward and backward through each part, in units of one FLOP."""

    embedding: float
    block: float
    head: float


def part_costs(model: ModelShape, device: str = "cuda") -> PartCosts:
    """Each part's time, from FLOPs and from the bytes moved by what is not a GEMM.

    Bytes per token, 4 each: the embedding reads and writes a row of h forward and adds one
    backward (6 h); the loss reads the logits to find the maximum, to sum and to differentiate,
    and writes their gradient (4 V); a block's norms, activation and residuals pass about 40 h.
    """
    h, flops_per_byte = model.hidden, FLOPS_PER_BYTE[device]
    return PartCosts(
        embedding=4.0 * 6 * h * flops_per_byte,
        block=3.0 * model_stats.block_flops(model) + 4.0 * 40 * h * flops_per_byte,
        head=3.0 * model_stats.head_flops(model) + 4.0 * 4 * model.vocab_size * flops_per_byte,
    )


@dataclass(frozen=True)
class StageSpec:
    """One pipeline stage: blocks [first, last) and perhaps the embedding and the head."""

    index: int
    first: int
    last: int
    embedding: bool
    head: bool
    parameters: int
    share: float  # of the whole model's time
    rank: int = 0  # of the pipeline, that holds it
    tied: bool = False  # another rank holds a copy of its vocabulary matrix
    vocabulary: int = 0  # rows on its rank of each matrix that --vocab-pp spreads

    @property
    def blocks(self) -> int:
        """How many blocks it holds."""
        return self.last - self.first


def stage_specs(
    model: ModelShape, layout: Layout, costs: PartCosts | None = None
) -> list[StageSpec]:
    """The stages of a layout, with parameters and share of time; tensor parallelism not divided.

    A tied head on another rank than the embedding holds a copy of its matrix, which is counted
    there too. Raises UserError for an impossible --partition.
    """
    same = ("tp", "pp", "schedule", "virtual_stages", "partition", "vocab_pp", "pad_vocab_multiple")
    about = Layout(**{name: getattr(layout, name) for name in same})
    return list(_stage_specs(model, about, costs or part_costs(model)))


# Cached, since layouts that differ in the micro-batch alone, for example, ask for the same.
@lru_cache(maxsize=4096)
def _stage_specs(model: ModelShape, layout: Layout, costs: PartCosts) -> list[StageSpec]:
    whole = costs.embedding + model.layers * costs.block + costs.head
    per_block, first = model_stats.block_parameters(model), 0
    rank_of = placement(layout)
    copied = model.tied and rank_of[0] != rank_of[-1] and not layout.vocab_pp
    result: list[StageSpec] = []
    for index, blocks in enumerate(blocks_per_stage(model, layout, costs)):
        embedding, head = index == 0, index == layout.stages - 1
        count = blocks * per_block
        count += model_stats.embedding_parameters(model) if embedding else 0
        count += model_stats.head_parameters(model) if head else 0
        count += model.vocab_size * model.hidden if head and copied else 0
        share = (blocks * costs.block + embedding * costs.embedding + head * costs.head) / whole
        ends, tied = (embedding, head), copied and (embedding or head)
        spec = StageSpec(index, first, first + blocks, *ends, count, share, rank_of[index], tied)
        result.append(_with_vocabulary(spec, model, layout, costs) if layout.vocab_pp else spec)
        first += blocks
    return result


def _with_vocabulary(
    spec: StageSpec, model: ModelShape, layout: Layout, costs: PartCosts
) -> StageSpec:
    """The stage with its rank's part of the vocabulary in place of whole matrices."""
    each = model.padded_vocab(layout) // layout.pp
    rows = min(each, max(0, model.vocab_size - spec.rank * each))
    matrices = 1 if model.tied else 2
    moved = matrices * rows - model.vocab_size * (spec.embedding + spec.head * (not model.tied))
    whole = costs.embedding + model.layers * costs.block + costs.head
    share = (spec.blocks * costs.block + (costs.embedding + costs.head) / layout.pp) / whole
    parameters = spec.parameters + moved * model.hidden
    return replace(spec, parameters=parameters, share=share, vocabulary=rows)


def blocks_per_stage(
    model: ModelShape, layout: Layout, costs: PartCosts | None = None
) -> list[int]:
    """Blocks on each stage, by --partition. Raises UserError if a given list does not fit."""
    explicit = explicit_partition(layout, model.layers)
    if explicit:
        return explicit
    if layout.pp == 1:
        return [model.layers]
    if layout.partition == "layers":
        return _share_out(model.layers, layout.stages)
    if layout.partition == "blocks":  # tr11's rule: embedding and head weigh one block each
        units = _share_out(model.layers + 2, layout.stages)
        return [units[0] - 1, *units[1:-1], units[-1] - 1]
    costs = costs or part_costs(model)
    if layout.vocab_pp:  # every rank has an equal part of them
        costs = replace(costs, embedding=0.0, head=0.0)
    if layout.stages_per_rank > 1:
        parts = costs.embedding, costs.block, costs.head
        return list(_balanced_ranks(model.layers, placement(layout), *parts))
    return list(balanced_partition(model.layers, layout.pp, costs))


# Cached, since layouts that differ in the micro-batch alone ask for the same.
_balanced_ranks = lru_cache(maxsize=4096)(balanced_ranks)


def placement(layout: Layout) -> tuple[int, ...]:
    """The rank that holds each stage of a layout."""
    return rank_of_stages(layout.schedule, layout.pp, layout.stages_per_rank)


@lru_cache(maxsize=4096)
def balanced_partition(layers: int, pp: int, costs: PartCosts) -> tuple[int, ...]:
    """Blocks per stage such that the slowest stage is as fast as possible; pp >= 2.

    Blocks are alike, so only the counts of the first and the last stage are free: every pair is
    tried. Of equally fast ones, the one whose slower end stage is fastest is taken, then the one
    with the least time in both: these stages also hold the embedding's and the logits' memory.
    Cached, since layouts that differ in the micro-batch alone ask for the same.
    """
    if pp == 2:
        pairs = [(first, layers - first) for first in range(layers + 1)]
    else:  # an end with more blocks than a middle stage is never faster
        most = -(-layers // (pp - 1))
        pairs = [(f, b) for f in range(most + 1) for b in range(min(most, layers - f) + 1)]

    def slowest(pair: tuple[int, int]) -> tuple[float, float, float]:
        front = costs.embedding + pair[0] * costs.block
        back = costs.head + pair[1] * costs.block
        middle = -(-(layers - sum(pair)) // max(1, pp - 2)) * costs.block
        return max(front, back, middle), max(front, back), front + back

    first, last = min(pairs, key=slowest)
    return (first, *_spread(layers - first - last, pp - 2), last)


def _spread(count: int, stages: int) -> list[int]:
    """Equal shares, the remainder on the later stages, which hold fewer activations in 1F1B."""
    share, extra = divmod(count, max(1, stages))
    return [share + (i >= stages - extra) for i in range(stages)]


def _share_out(count: int, pp: int) -> list[int]:
    """Equal shares, the remainder first on middle stages, then on the first one."""
    share, extra = divmod(count, pp)
    if pp == 2:
        return [share + extra, share]
    middle = min(extra, pp - 2)
    return [share + (extra > middle), *_spread(share * (pp - 2) + middle, pp - 2), share]


def executed_flops(model: ModelShape, layout: Layout, samples: int) -> float:
    """FLOPs that a step on `samples` samples executes, with what this layout recomputes."""
    specs = stage_specs(model, layout)
    again = sum(layout.recomputed_blocks(spec.blocks, spec.index) for spec in specs)
    return model_stats.hardware_flops(model, samples, layout.recompute, blocks=again)


def stage_table(rows: list[StageSpec], model: ModelShape) -> str:
    """The stages as text. Raises ValueError if their sums are not the model's own counts."""
    lines = ["stage   holds                        blocks       parameters   share of time"]
    several, spread = any(s.rank != s.index for s in rows), any(s.vocabulary for s in rows)
    for s in rows:
        parts = ["embedding"] * (s.embedding and not spread)
        parts += [f"blocks {s.first}-{s.last - 1}"] * (s.blocks > 0)
        parts += ["head"] * (s.head and not spread) + [f"{s.vocabulary:,} words"] * spread
        holds = " + ".join(parts) or "nothing, passes on"
        holds = f"rank {s.rank}: {holds}" if several else holds
        lines.append(f"{s.index:5}   {holds:28} {s.blocks:6} {s.parameters:16,} {s.share:14.1%}")
    copies = model.vocab_size * model.hidden if rows[-1].tied else 0
    blocks, total = sum(s.blocks for s in rows), sum(s.parameters for s in rows)
    if blocks != model.layers or total != model_stats.parameters(model) + copies:
        raise ValueError(
            f"stages hold {blocks} blocks and {total} parameters, the model has "
            f"{model.layers} and {model_stats.parameters(model)} + {copies} in the tied copy"
        )
    lines.append(f"  sum   {'':28} {blocks:6} {total:16,} {sum(s.share for s in rows):14.1%}")
    if copies:
        lines.append(f"        of which {copies:,} are the head's copy of the tied embedding")
    return "\n".join(lines)
