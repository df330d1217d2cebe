"""Models with experts whose blocks are of two kinds: some have experts, and some have one MLP.

    kinds(model)                  # [(58, model with experts), (3, model with one MLP per block)]
    mean(model, block_flops)      # mean FLOPs of a block over all blocks of the model

Formulas about a block, such as the number of its parameters, take a model whose blocks are alike.
This module makes such a model for each kind of block and applies the formulas to each. A block is
"sparse" if it has experts and "dense" if it has one MLP; ModelShape.has_experts tells which. Read
schema.py first.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from config.schema import ModelShape

# The values that the options of experts have in a model without experts.
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
    """Return (number of blocks, model of these blocks alone) for each kind of block in the model.

    The blocks with experts come first. A kind without blocks is left out. `ffn_hidden` of a
    returned model is the width of each of its MLPs: of each expert, in the model with experts.
    """
    all_alike: dict[str, Any] = {"first_dense_layers": 0, "expert_interval": 1}
    sparse = blocks_with_experts(model, 0, model.layers)
    dense = model.layers - sparse
    models: list[tuple[int, ModelShape]] = []
    if sparse:
        width: dict[str, Any] = {"ffn_hidden": model.expert_ffn_hidden}
        models.append((sparse, replace(model, layers=sparse, **all_alike, **width)))
    if dense:
        models.append((dense, replace(model, layers=dense, **all_alike, **OF_ONE_MLP)))
    return models


def blocks_with_experts(model: ModelShape, first: int, last: int) -> int:
    """Return how many of the blocks [first, last) have experts."""
    return sum(map(model.has_experts, range(first, last)))


def total(model: ModelShape, value: Callable[[ModelShape], Any], first: int, last: int) -> Any:
    """Return the sum of a number over the blocks [first, last), such as their FLOPs.

    value: a function that takes a model whose blocks are alike and returns a block's number.
    """
    sparse = blocks_with_experts(model, first, last)
    dense = last - first - sparse
    number = 0
    for _, kind in kinds(model):  # `kind` is a model whose blocks are of one kind
        blocks = sparse if kind.experts > 1 else dense
        number += blocks * value(kind)
    return number


def mean(model: ModelShape, value: Callable[[ModelShape], Any]) -> Any:
    """Return the mean of a number over all blocks of the model, such as the FLOPs of a block.

    value: a function that takes a model whose blocks are alike and returns a block's number. If all
    blocks of the model are alike, the result is that number itself, which may be an integer.
    """
    models = kinds(model)
    if len(models) == 1:
        [(_, kind)] = models
        return value(kind)
    return total(model, value, 0, model.layers) / model.layers
