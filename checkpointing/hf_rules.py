"""Which tensors of Hugging Face transformers make which of ours, by config/families.toml.

rules(model)                 the tensors of the model's family, in both directions

hf_export.py reads and writes the files.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from checkpointing.index import canonical_shapes
from config import families
from config.families import Family
from config.messages import UserError
from config.schema import ModelShape


@dataclass(frozen=True)
class Rule:
    """Our tensor `name`, the names of `theirs` that hold it, and the conversion in each direction.

    to_ours takes their tensors in order; to_theirs returns them in the same order.
    """

    name: str
    theirs: tuple[str, ...]
    to_ours: Callable[..., Tensor]
    to_theirs: Callable[[Tensor], tuple[Tensor, ...]]


def rules(model: ModelShape, name: str | None = None) -> list[Rule]:
    """The rules for all tensors of the model; UserError if it is of none of the families, or not of
    the one of that name.
    """
    family = families.family_of(model, name)
    return [_rule(name, model, family) for name in canonical_shapes(model)]


def _rule(name: str, model: ModelShape, family: Family) -> Rule:
    module, _, kind = name.rpartition(".")
    if name.endswith((".router.bias", ".router.load")):
        return _of_router(name, model, 1.0 if kind == "load" else 0.0)
    number = re.search(r"\d+", module)
    general = re.sub(r"\d+", "*", module, count=1)
    found = family.modules[general]
    theirs = tuple(f"{each}.{kind}".replace("*", number[0] if number else "*") for each in found)
    if "#" in found[0]:
        return _of_experts(name, theirs, model.experts)
    part = general.removeprefix("blocks.*.")
    if part == "attention.qkv":
        to_ours, to_theirs = _qkv(model, family, len(theirs))
    elif part in ("attention.q_norm", "attention.k_norm") and model.qk_norm == "full":
        to_ours, to_theirs = lambda t: t.unflatten(0, (-1, model.head_size)), _alone(torch.flatten)
    elif len(theirs) == 2:  # gate and up
        to_ours, to_theirs = lambda gate, up: torch.stack([gate, up]), torch.unbind
    elif part == "embedding.positions" and family.skipped_rows:
        rows = family.skipped_rows
        to_ours = lambda t: t[rows:]  # noqa: E731
        to_theirs = _alone(lambda t: torch.cat([t.new_zeros(rows, t.shape[1]), t]))
    else:
        to_ours, to_theirs = lambda t: t, _alone(lambda t: t)
    if family.transposed and general != module and kind == "weight" and "norm" not in part:
        return Rule(name, theirs, _of_transposed(to_ours), _to_transposed(to_theirs))
    return Rule(name, theirs, to_ours, to_theirs)


def _alone(convert: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The conversion to a single tensor of theirs."""
    return lambda t: (convert(t),)


def _of_transposed(to_ours: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *theirs: to_ours(*(t.t() for t in theirs))


def _to_transposed(to_theirs: Callable[[Tensor], Any]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return lambda ours: tuple(t.t() for t in to_theirs(ours))


def _qkv(model: ModelShape, family: Family, count: int) -> tuple[Callable, Callable]:
    """Conversions of weights and biases of queries, keys and values, `count` tensors there.

    Ours are (g, a/g + 2, d, ...): for each key/value head its queries, its key, its value.
    """
    g, d, queries = model.kv_heads, model.head_size, model.heads // model.kv_heads
    parts = [queries, 1, 1]
    if count == 3:
        return (
            lambda *three: torch.cat([t.unflatten(0, (g, -1, d)) for t in three], 1),
            lambda t: tuple(part.flatten(0, 2) for part in t.split(parts, 1)),
        )
    if family.qkv == "head":
        return lambda t: t.unflatten(0, (g, queries + 2, d)), _alone(lambda t: t.flatten(0, 2))
    return (
        lambda t: t.unflatten(0, (3, g, d)).transpose(0, 1),
        _alone(lambda t: t.transpose(0, 1).flatten(0, 2)),
    )


def _of_router(name: str, model: ModelShape, initial: float) -> Rule:
    """The rule of a router's tensor that transformers does not have: `initial` in every element.

    Its to_theirs raises UserError if a bias of --balance bias has changed: then the experts that
    a token gets would be others there.
    """

    def to_theirs(ours: Tensor) -> tuple[Tensor, ...]:
        if name.endswith(".bias") and ours.any():
            raise UserError(
                f"{name} is not 0: the model was trained with --balance bias, and its family in "
                "transformers has no bias of experts"
            )
        return ()

    return Rule(name, (), lambda: torch.full((model.experts,), initial), to_theirs)


def _of_experts(name: str, theirs: tuple[str, ...], experts: int) -> Rule:
    """The rule of a tensor of all experts; there each expert has its own, or a gate and an up."""
    names = tuple(each.replace("#", str(i)) for i in range(experts) for each in theirs)
    count = len(theirs)

    def to_ours(*tensors: Tensor) -> Tensor:
        stacked = torch.stack(tensors)
        return stacked.unflatten(0, (experts, count)) if count > 1 else stacked

    def to_theirs(ours: Tensor) -> tuple[Tensor, ...]:
        return torch.unbind(ours.flatten(0, 1) if count > 1 else ours)

    return Rule(name, names, to_ours, to_theirs)
