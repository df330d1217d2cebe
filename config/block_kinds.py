"""Models with experts whose blocks are of two kinds: some have experts, and some have one MLP.

    kinds(model)                  # [(58, blocks with experts), (3, blocks with one MLP)]
    mean(model, block_flops)      # of one block, over all blocks of the model

Formulas about a block take a model whose blocks are alike. This module asks them for each kind.
ModelShape.has_experts decides of which kind a block is. Read schema.py first.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from config.schema import ModelShape

# The options of experts as a model without experts has them.
OF_ONE_MLP: dict[str, Any] = {
    "experts": 1,
    "experts_per_token": 1,
    "expert_ffn_hidden": None,
    "router_groups": 1,
    "router_groups_per_token": 1,
    "shared_ffn_hidden": 0,
    "shared_gate": False,
}


@lru_cache(maxsize=256)
def kinds(model: ModelShape) -> list[tuple[int, ModelShape]]:
    """Return how many blocks have experts, and how many have one MLP; only numbers above 0.

    Beside each number stands a model of as many blocks, all of this kind, whose ffn_hidden is the
    width of their MLPs.
    """
    alike: dict[str, Any] = {"first_dense_layers": 0, "expert_interval": 1}
    sparse = blocks_with_experts(model, 0, model.layers)
    dense = model.layers - sparse
    found: list[tuple[int, ModelShape]] = []
    if sparse:
        width: dict[str, Any] = {"ffn_hidden": model.expert_ffn_hidden}
        found.append((sparse, replace(model, layers=sparse, **alike, **width)))
    if dense:
        found.append((dense, replace(model, layers=dense, **alike, **OF_ONE_MLP)))
    return found


def blocks_with_experts(model: ModelShape, first: int, last: int) -> int:
    """Return how many of the blocks [first, last) have experts."""
    return sum(map(model.has_experts, range(first, last)))


def total(model: ModelShape, value: Callable[[ModelShape], Any], first: int, last: int) -> Any:
    """Return the sum over the blocks [first, last) of `value`, which takes a model of one kind."""
    sparse = blocks_with_experts(model, first, last)
    found = 0
    for _, kind in kinds(model):
        blocks = sparse if kind.experts > 1 else last - first - sparse
        found += blocks * value(kind)
    return found


def mean(model: ModelShape, value: Callable[[ModelShape], Any]) -> Any:
    """Return the mean over all blocks of `value`, which takes a model of one kind.

    Where all blocks are alike it is the value itself, an integer if that is one.
    """
    found = kinds(model)
    if len(found) == 1:
        return value(found[0][1])
    return total(model, value, 0, model.layers) / model.layers
