"""Models whose blocks are of several kinds: with experts or one MLP, with attention (with a window
or without) or another mixer.

    kinds(model)                  # [(58, model with experts), (3, model with one MLP per block)]
    mean(model, block_flops)      # mean FLOPs of a block over all blocks of the model

Formulas about a block, such as the number of its parameters, take a model whose blocks are alike.
This module makes such a model for each kind of block and applies the formulas to each. A block is
"sparse" if it has experts and "dense" if it has one MLP; ModelShape.has_experts tells which, and
ModelShape.has_window tells which have a window, and ModelShape.mixers_of which have no attention.
A block with a mixer beside attention is of two kinds: one with attention and the MLP, and one of
the mixer alone, without a norm. Read shape.py first.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from architecture.shape import ModelShape

# The values that the options of experts have in a model without experts.
OF_ONE_MLP: dict[str, Any] = {
    "experts": 1,
    "experts_per_token": 1,
    "expert_ffn_hidden": None,
    "router_groups": 1,
    "router_groups_per_token": 1,
    "shared_ffn_hidden": 0,
    "shared_gate": False,
    "router_bias": False,
}


@lru_cache(maxsize=256)
def kinds(model: ModelShape) -> list[tuple[int, ModelShape]]:
    """Return (number of blocks, model of these blocks alone) for each kind of block in the model.

    The blocks with experts come first, and among them those with another mixer than attention, then
    those with a window. A kind without blocks is
    left out. `ffn_hidden` of a returned model is the width of each of its MLPs: of each expert, in
    the model with experts.
    """
    models: list[tuple[int, ModelShape]] = []
    for kind in _KINDS:
        blocks = _count(model, kind, 0, model.layers)
        if blocks:
            models.append((blocks, _alike(model, kind, blocks)))
    return models


def predictor(model: ModelShape) -> ModelShape:
    """Return a model that has one block, alike that of a module of mtp_depth."""
    (kind,) = _kinds_of(model, model.layers)
    return _alike(replace(model, hybrid_pattern="none"), kind, 1)


# The kinds of blocks: (whether it has experts, "mixer", the attention that it has, or "none", or
# "beside" for a mixer that is beside attention).
Kind = tuple[bool, str]
_KINDS: tuple[Kind, ...] = tuple(
    (has_experts, mixes)
    for has_experts in (True, False)
    for mixes in ("mixer", "window", "attention", "none", "beside")
)


def _kinds_of(model: ModelShape, block: int) -> list[Kind]:
    """Return the kind of a block, or the kinds of its two parts if a mixer is beside attention."""
    has_experts, mixers = model.has_experts(block), model.mixers_of(block)
    if not mixers:
        return [(has_experts, "none")]
    if "attention" not in mixers:  # in a model that `_alike` made, a mixer may be one beside it
        return [(has_experts, "beside" if model.mixer_beside else "mixer")]
    attends = has_experts, "window" if model.has_window(block) else "attention"
    return [attends, (False, "beside")] if len(mixers) > 1 else [attends]


def _count(model: ModelShape, kind: Kind, first: int, last: int) -> int:
    """Return how many of the blocks [first, last) are of a kind."""
    return sum(kind in _kinds_of(model, block) for block in range(first, last))


def _alike(model: ModelShape, kind: Kind, blocks: int) -> ModelShape:
    """Return a model like this one with so many `blocks`, all of one kind.

    kind: whether blocks have experts, and what mixes their tokens.
    """
    has_experts, mixes = kind
    options: dict[str, Any] = {"layers": blocks, "window_blocks": "all", "rotary_blocks": "all"}
    options |= {"first_dense_layers": 0, "expert_interval": 1, "mtp_depth": 0}
    if model.hybrid_pattern != "none" or mixes == "beside":
        letters = {"mixer": "M", "beside": "M", "none": "E" if has_experts else "-"}
        options["hybrid_pattern"] = letters.get(mixes, "*") * blocks
    if has_experts:
        options["ffn_hidden"] = model.expert_ffn_hidden
    elif model.experts > 1:
        options |= OF_ONE_MLP
    if mixes != "window":
        options["window"] = 0
    options["mixer_beside"] = mixes == "beside"
    if mixes in ("mixer", "beside"):
        options["mixer_blocks"] = "all"
    else:
        options["mixer"] = "attention"
    return replace(model, **options)


def blocks_with_experts(model: ModelShape, first: int, last: int) -> int:
    """Return how many of the blocks [first, last) have experts."""
    return sum(map(model.has_experts, range(first, last)))


def total(model: ModelShape, value: Callable[[ModelShape], Any], first: int, last: int) -> Any:
    """Return the sum of a number over the blocks [first, last), such as their FLOPs.

    value: a function that takes a model whose blocks are alike and returns a block's number.
    """
    number = 0
    for kind in _KINDS:
        blocks = _count(model, kind, first, last)
        if blocks:
            number += blocks * value(_alike(model, kind, blocks))
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
