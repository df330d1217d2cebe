"""Counts the costs of a forward and a backward pass through embedding, block and head.

    embedding, block, head = pass_costs(model, "cuda")      for one token, without tp
    part_costs(model, "cuda").block                         forward and backward pass together

Costs are FLOPs per token; bytes moved in memory are converted to FLOPs and added.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from config import model_stats
from config.schema import ModelShape

# The FLOPs that take as long as moving one byte in memory: on GPUs about an A100's 312 TFLOP/s over
# 2 TB/s, on a CPU core about 80 GFLOP/s over 8 GB/s.
FLOPS_PER_BYTE = {"cuda": 150.0, "cpu": 10.0}


class PassCosts(NamedTuple):
    """Costs of a part or a stage: seconds of F, B (gradients of inputs) and W (of weights), and the
    bytes of activations held for the backward pass. From `pass_costs`, seconds are FLOPs per token.
    """

    forward: float
    inputs: float
    weights: float
    held: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of F, B and W together."""
        return self.forward + self.inputs + self.weights


class StageCosts(NamedTuple):
    """The costs of every stage, the bytes of activations that a rank may hold (limit), and the
    seconds of a message between ranks (transfer).
    """

    stages: tuple[PassCosts, ...]
    limit: float
    transfer: float

    def seconds(self, split: bool) -> dict[tuple[str, int], float]:
        """Return the seconds of an action by (kind, stage), for simulation.py.

        split: whether W is an action of its own; else B includes its seconds.
        """
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
    """Time of one token's forward and backward pass through each part, in FLOPs."""

    embedding: float
    block: float
    head: float


@lru_cache(maxsize=256)
def pass_costs(model: ModelShape, device: str) -> tuple[PassCosts, PassCosts, PassCosts]:
    """Return the costs of embedding, block and head for one token, without tp or recomputation.

    GEMMs count by their FLOPs, other operations by the numbers of 4 bytes that they move per token:
    the embedding 6 h (it reads and writes a row forward and adds a row backward), half of them
    forward; the loss 4 V (it reads the logits to find the maximum, to sum and to differentiate, and
    writes their gradient), half of them forward; a block's norms, activation and residuals about
    40 h, a third of them forward. Attention scores have no weights, so W has no FLOPs of theirs.
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
    """Return the FLOPs of one token's attention scores in one block, forward."""
    return 2.0 * model.seq_length * model.attention_width


def part_costs(model: ModelShape, device: str = "cuda") -> PartCosts:
    """Return the time of each part, forward and backward pass together, in FLOPs per token."""
    return PartCosts(*(part.seconds for part in pass_costs(model, device)))
