"""Scales of muP folded into weights, for families of transformers that have no fields for them.

    fold = folding(model, exported)        takes a tensor's name and the tensor, returns the tensor

A model with muP divides its logits, multiplies what blocks add to the residual stream, and perhaps
divides scores by more than the root of the head size (architecture/mup.py). Weights that have these
factors make a model without them whose every logit is the same, but for the rounding of a product:

    logits / m               the scale (and shift) of the last norm, which only the head reads
    branch * r               the matrix (and bias) that writes into the residual stream; if a norm
                             stands behind it, that norm's scale
    scores by query_scalar   the rows of the queries, or the scale of their norm
"""

import re
from collections.abc import Callable

from torch import Tensor

from architecture.shape import ModelShape

# The modules of a block whose results are added to the residual stream, if no norm is behind them.
LAST = re.compile(r"blocks\.(\d+)\.(\w+\.out|mlp\.(experts\.|shared\.)?down)\.")
# The norms whose results are added to it, by the kind of a block.
NORMS = {
    "post-norm": re.compile(r"blocks\.(\d+)\.(attention|mlp)_norm\."),
    "sandwich": re.compile(r"blocks\.(\d+)\.(attention|mlp)_post_norm\."),
}
QUERIES = re.compile(r"blocks\.\d+\.attention\.(q|q_b|qkv)\.(weight|bias)")


def folding(model: ModelShape, exported: ModelShape) -> Callable[[str, Tensor], Tensor]:
    """Return what makes a tensor of `model` one of `exported`, by its name.

    exported: the model without some of the scales (families.exported); equal to `model`: tensors
    stay as they are.
    """
    of_logits = exported.logit_divisor / model.logit_divisor
    of_branches = model.residual_multiplier / exported.residual_multiplier
    of_queries = (exported.query_scalar / model.query_scalar) ** 0.5

    def fold(name: str, tensor: Tensor) -> Tensor:
        """Return our tensor `name` with the factors of scales that `exported` lacks."""
        if name.startswith("head.norm."):
            return _scaled(model, name, tensor, of_logits)
        if is_added(model, name):
            return _scaled(model, name, tensor, of_branches)
        if model.qk_norm != "none":
            of_norm = name.endswith(".attention.q_norm.weight")
            return _scaled(model, name, tensor, of_queries) if of_norm else tensor
        if QUERIES.fullmatch(name) and of_queries != 1.0:
            return _with_queries(model, name, tensor, of_queries)
        return tensor

    return fold


def is_added(model: ModelShape, name: str) -> bool:
    """Return whether a tensor is the last factor, or summand, of what a branch of a block adds."""
    number = re.match(r"blocks\.(\d+)\.", name)
    if number is None:
        return False
    kind = model.block_of(int(number[1]))
    return NORMS.get(kind, LAST).match(name) is not None


def _scaled(model: ModelShape, name: str, tensor: Tensor, factor: float) -> Tensor:
    """Return a tensor times a factor; of a norm that multiplies by 1 + weight, that sum."""
    if factor == 1.0:
        return tensor
    if model.norm_plus_one and name.endswith("norm.weight"):
        return (1 + tensor) * factor - 1
    return tensor * factor


def _with_queries(model: ModelShape, name: str, tensor: Tensor, factor: float) -> Tensor:
    """Return the tensor of queries, perhaps with keys and values, with the queries' rows scaled."""
    if ".qkv." not in name:
        return tensor * factor
    tensor = tensor.clone()  # (g, a/g + 2, d, ...): the queries of a key/value head come first
    tensor[:, : model.heads // model.kv_heads] *= factor
    return tensor
