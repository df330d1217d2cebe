"""What a model costs: parameters, FLOPs and bytes of its parts, and how they balance over stages.

Pure arithmetic on a ModelShape and a Layout; no torch. The parts of a model are the embedding
(tokens, positions, their norm), the blocks, and the head (final norm, output matrix, loss).

Symbols: L layers, h hidden, s sequence length, V vocabulary, f MLP width, a heads of size d,
g key/value heads, B samples.
"""

from dataclasses import dataclass
from functools import lru_cache

from config.messages import UserError
from config.schema import Layout, ModelShape
from config.validation import explicit_partition

# ------------------------------------------------------------------------------------------------
# Parameters
# ------------------------------------------------------------------------------------------------


def norm_parameters(model: ModelShape) -> int:
    """Parameters of one normalisation: a scale, and a shift in LayerNorm."""
    return model.hidden * (2 if model.norm == "layernorm" else 1)


def block_parameters(model: ModelShape) -> int:
    """Parameters of one block; L(12 h^2 + 13 h) over L for a plain GPT."""
    h, d, f = model.hidden, model.head_size, model.ffn_hidden
    qkv = (model.heads + 2 * model.kv_heads) * d
    up = f * (2 if model.activation == "swiglu" else 1)
    matrices = h * qkv + model.heads * d * h + h * up + f * h
    biases = qkv + h + up + h if model.bias else 0
    return matrices + biases + 2 * norm_parameters(model)


def embedding_parameters(model: ModelShape) -> int:
    """Parameters of the embedding: tokens (without padding), learned positions, its norm."""
    tokens = model.vocab_size * model.hidden
    positions = model.max_positions * model.hidden if model.positions == "learned" else 0
    return tokens + positions + (norm_parameters(model) if model.embedding_norm else 0)


def head_parameters(model: ModelShape) -> int:
    """Parameters of the head that no other part has: the final norm, and an untied matrix."""
    matrix = 0 if model.tied else model.vocab_size * model.hidden
    return norm_parameters(model) + matrix


def parameters(model: ModelShape) -> int:
    """Parameters of the whole model, each counted once, without vocabulary padding."""
    blocks = model.layers * block_parameters(model)
    return embedding_parameters(model) + blocks + head_parameters(model)


# ------------------------------------------------------------------------------------------------
# FLOPs
# ------------------------------------------------------------------------------------------------

FORMULAS = ("megatron-2025", "megatron-2021", "bigscience")


def block_flops(model: ModelShape) -> float:
    """Forward FLOPs of one block for one token, by GEMM; attention counts its causal half."""
    h, d, f = model.hidden, model.head_size, model.ffn_hidden
    qkv = (model.heads + 2 * model.kv_heads) * d
    mlp = (3 if model.activation == "swiglu" else 2) * h * f
    scores = model.seq_length * model.heads * d  # q k^T and p v, each s*a*d, of which half is seen
    return 2.0 * (h * qkv + model.heads * d * h + mlp + scores)


def head_flops(model: ModelShape) -> float:
    """Forward FLOPs of the output matrix for one token."""
    return 2.0 * model.hidden * model.vocab_size


def forward_flops(model: ModelShape, formula: str = "megatron-2025") -> tuple[float, float]:
    """Forward FLOPs for one token of (one block, the head), by one of the published formulas.

    * megatron-2025: every GEMM, the causal half of attention; as in Megatron-LM since core 0.12.
    * megatron-2021: equation 3 of arXiv 2104.04473, full attention, f = 4h and g = a assumed.
    * bigscience: 2 P with P = 12 h^2 + 13 h, no attention, no head; the seeds' first rows.
    """
    h = model.hidden
    if formula == "megatron-2025":
        return block_flops(model), head_flops(model)
    if formula == "megatron-2021":
        return 24.0 * h**2 * (1 + model.seq_length / (6 * h)), head_flops(model)
    if formula == "bigscience":
        return 2.0 * (12 * h**2 + 13 * h), 0.0
    raise UserError(f"no FLOPs formula is called {formula!r}: take one of {', '.join(FORMULAS)}")


def model_flops(model: ModelShape, samples: int, formula: str = "megatron-2025") -> float:
    """FLOPs that a step on `samples` samples needs: a forward, and a backward twice as dear."""
    block, head = forward_flops(model, formula)
    return 3.0 * samples * model.seq_length * (model.layers * block + head)


def hardware_flops(
    model: ModelShape,
    samples: int,
    recompute: str = "none",
    formula: str = "megatron-2025",
    blocks: int | None = None,
) -> float:
    """FLOPs that a step executes: model_flops and what recomputation runs again.

    `full` runs a block's forward again, `selective` only its q k^T and p v; never the head.
    `blocks`: how many of the model's blocks are recomputed, default: all.
    """
    again = {"none": 0.0, "full": forward_flops(model, formula)[0]}
    again["selective"] = 2.0 * model.seq_length * model.heads * model.head_size
    blocks = model.layers if blocks is None else blocks
    repeated = samples * model.seq_length * blocks * again[recompute]
    return model_flops(model, samples, formula) + repeated


# ------------------------------------------------------------------------------------------------
# Stages
# ------------------------------------------------------------------------------------------------

# What one byte of memory traffic costs in FLOPs: on GPUs near an A100's 312 TFLOP/s over 2 TB/s,
# on a CPU core some 80 GFLOP/s over 8 GB/s. It only weighs what moves bytes against GEMMs.
FLOPS_PER_BYTE = {"cuda": 150.0, "cpu": 10.0}


@dataclass(frozen=True)
class PartCosts:
    """Time of one token's forward and backward through each part, in units of one FLOP."""

    embedding: float
    block: float
    head: float


def part_costs(model: ModelShape, device: str = "cuda") -> PartCosts:
    """What each part costs a stage, from FLOPs and from bytes moved by what is not a GEMM.

    Bytes per token, 4 each: the embedding reads and writes a row of h forward and adds one
    backward (6 h); the loss reads the logits to find the maximum, to sum and to differentiate,
    and writes their gradient (4 V); a block's norms, activation and residuals pass about 40 h.
    """
    h, flops_per_byte = model.hidden, FLOPS_PER_BYTE[device]
    return PartCosts(
        embedding=4.0 * 6 * h * flops_per_byte,
        block=3.0 * block_flops(model) + 4.0 * 40 * h * flops_per_byte,
        head=3.0 * head_flops(model) + 4.0 * 4 * model.vocab_size * flops_per_byte,
    )


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: blocks [first, last) and perhaps the embedding and the head."""

    index: int
    first: int
    last: int
    embedding: bool
    head: bool
    parameters: int
    share: float  # of the whole model's time

    @property
    def blocks(self) -> int:
        """How many blocks it holds."""
        return self.last - self.first


def stages(model: ModelShape, layout: Layout, costs: PartCosts | None = None) -> list[Stage]:
    """The stages of a layout, with parameters and share of time; tensor parallelism not divided.

    A tied head on a stage of its own holds a copy of the embedding matrix, which is counted there
    too. Raises UserError for an impossible --partition.
    """
    costs = costs or part_costs(model)
    whole = costs.embedding + model.layers * costs.block + costs.head
    first, result = 0, []
    for index, blocks in enumerate(partition(model, layout, costs)):
        embedding, head = index == 0, index == layout.pp - 1
        count = blocks * block_parameters(model)
        count += embedding_parameters(model) if embedding else 0
        count += head_parameters(model) if head else 0
        count += model.vocab_size * model.hidden if _holds_tied_copy(model, layout, head) else 0
        cost = blocks * costs.block + embedding * costs.embedding + head * costs.head
        result.append(Stage(index, first, first + blocks, embedding, head, count, cost / whole))
        first += blocks
    return result


def _holds_tied_copy(model: ModelShape, layout: Layout, head: bool) -> bool:
    return head and model.tied and layout.pp > 1


def partition(model: ModelShape, layout: Layout, costs: PartCosts | None = None) -> list[int]:
    """Blocks on each stage, by --partition. Raises UserError if a given list does not fit."""
    explicit = explicit_partition(layout, model.layers)
    if explicit:
        return explicit
    if layout.pp == 1:
        return [model.layers]
    if layout.partition == "layers":
        return _share_out(model.layers, layout.pp)
    if layout.partition == "blocks":  # tr11's rule: embedding and head weigh one block each
        units = _share_out(model.layers + 2, layout.pp)
        return [units[0] - 1, *units[1:-1], units[-1] - 1]
    return balanced_partition(model.layers, layout.pp, costs or part_costs(model))


def balanced_partition(layers: int, pp: int, costs: PartCosts) -> list[int]:
    """Blocks per stage such that the slowest stage is as fast as can be; pp >= 2.

    Blocks are alike, so only the counts of the first and the last stage are free: every pair is
    tried. Among equals the lighter heavier end wins, then the lighter ends together, since these
    stages also hold the embedding's and the logits' memory.
    """
    return list(_balanced(layers, pp, costs))


@lru_cache(maxsize=4096)
def _balanced(layers: int, pp: int, costs: PartCosts) -> tuple[int, ...]:
    """The search itself, remembered: a planner asks the same thing for every micro-batch."""

    def judge(first: int, last: int) -> tuple[float, float, float]:
        front = costs.embedding + first * costs.block
        back = costs.head + last * costs.block
        middle = -(-(layers - first - last) // (pp - 2)) * costs.block if pp > 2 else 0.0
        return max(front, back, middle), max(front, back), front + back

    if pp == 2:
        pairs = [(first, layers - first) for first in range(layers + 1)]
    else:
        most = -(-layers // (pp - 2))  # an end with more than a middle stage is never faster
        pairs = [(f, b) for f in range(most + 1) for b in range(min(most, layers - f) + 1)]
    first, last = min(pairs, key=lambda pair: judge(*pair))
    rest = layers - first - last
    return (first, *(_spread(rest, pp - 2) if pp > 2 else []), last)


def _spread(count: int, stages: int) -> list[int]:
    """Equal shares, the remainder on the later stages, which hold fewer activations in 1F1B."""
    share, extra = divmod(count, stages)
    return [share + (i >= stages - extra) for i in range(stages)]


def _share_out(count: int, pp: int) -> list[int]:
    """Equal shares, the remainder first on middle stages, then on the first one."""
    share, extra = divmod(count, pp)
    if pp == 2:
        return [share + extra, share]
    middle = min(extra, pp - 2)
    return [share + (extra > middle), *_spread(share * (pp - 2) + middle, pp - 2), share]


def stage_table(rows: list[Stage], model: ModelShape) -> str:
    """The stages as text, with their sums checked against the model's own counts.

    Raises ValueError if blocks or parameters do not add up: that would be a mistake in here.
    """
    lines = ["stage   holds                        blocks       parameters   share of time"]
    for s in rows:
        parts = ["embedding"] * s.embedding
        parts += [f"blocks {s.first}-{s.last - 1}"] * (s.blocks > 0) + ["head"] * s.head
        holds = " + ".join(parts) or "nothing, passes on"
        lines.append(f"{s.index:5}   {holds:28} {s.blocks:6} {s.parameters:16,} {s.share:14.1%}")
    copies = model.vocab_size * model.hidden if len(rows) > 1 and model.tied else 0
    blocks, total = sum(s.blocks for s in rows), sum(s.parameters for s in rows)
    if blocks != model.layers or total != parameters(model) + copies:
        raise ValueError(
            f"stages hold {blocks} blocks and {total} parameters, the model has "
            f"{model.layers} and {parameters(model)} + {copies} in the tied copy"
        )
    lines.append(f"  sum   {'':28} {blocks:6} {total:16,} {sum(s.share for s in rows):14.1%}")
    if copies:
        lines.append(f"        of which {copies:,} are the head's copy of the tied embedding")
    return "\n".join(lines)
