"""What the passes of a model's parts cost, counted: the one list of prices of a pass.

    embedding, block, head = pass_costs(model, "cuda")      of one token, nothing split
    part_costs(model, "cuda").block                         forward and backward together

Costs are FLOPs of a token, and bytes moved counted as FLOPs.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from config import model_stats
from config.schema import ModelShape

# What one byte of memory traffic costs in FLOPs: on GPUs about an A100's 312 TFLOP/s over 2 TB/s,
# on a CPU core about 80 GFLOP/s over 8 GB/s. It weighs what moves bytes against GEMMs.
FLOPS_PER_BYTE = {"cuda": 150.0, "cpu": 10.0}


class PassCosts(NamedTuple):
    """Of one micro-batch: seconds of forward, gradients of inputs and of weights; bytes held."""

    forward: float
    inputs: float
    weights: float
    held: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all its passes."""
        return self.forward + self.inputs + self.weights


class StageCosts(NamedTuple):
    """The costs of every stage; the bytes that a rank may hold; seconds of a message."""

    stages: tuple[PassCosts, ...]
    limit: float
    transfer: float

    def seconds(self, split: bool) -> dict[tuple[str, int], float]:
        """By kind of action and stage, as simulation.py takes them."""
        seconds = {}
        for stage, costs in enumerate(self.stages):
            seconds["F", stage] = costs.forward
            seconds["B", stage] = costs.inputs
            seconds["W", stage] = costs.weights
            if not split:
                seconds["B", stage] += costs.weights
        return seconds


@dataclass(frozen=True)
class PartCosts:
    """Time of one token's forward and backward through each part, in units of one FLOP."""

    embedding: float
    block: float
    head: float


@lru_cache(maxsize=256)
def pass_costs(model: ModelShape, device: str) -> tuple[PassCosts, PassCosts, PassCosts]:
    """Of embedding, block and head, from FLOPs and from the bytes moved by what is not a GEMM.

    Bytes per token, 4 each: the embedding reads and writes a row of h forward and adds one
    backward (6 h); the loss reads the logits to find the maximum, to sum and to differentiate,
    and writes their gradient (4 V); a block's norms, activation and residuals pass about 40 h, a
    third of them forward. Attention's scores have no weights.
    """
    byte = FLOPS_PER_BYTE[device]
    looked_up = 4.0 * 3 * model.hidden * byte
    embedding = PassCosts(looked_up, looked_up, 0.0)
    flops = model_stats.block_flops(model)
    scores = attention_scores(model)
    moved = 4.0 * 40 * model.hidden * byte
    block = PassCosts(flops + moved / 3, flops + scores + 2 * moved / 3, flops - scores)
    logits = model_stats.head_flops(model)
    halves = logits + 4.0 * 2 * model.vocab_size * byte
    return embedding, block, PassCosts(halves, halves, logits)


def attention_scores(model: ModelShape) -> float:
    """FLOPs of a token's attention scores in one block."""
    return 2.0 * model.seq_length * model.attention_width


def part_costs(model: ModelShape, device: str = "cuda") -> PartCosts:
    """Each part's time, forward and backward together."""
    return PartCosts(*(part.seconds for part in pass_costs(model, device)))
