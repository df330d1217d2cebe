"""Which tensors of Hugging Face transformers make which of ours, by config/families.toml.

rules(model)                 the tensors of the model's family, in both directions
hf_config(model, dtype)      their config.json for our shape
model_shape(config, where)   our shape for their config.json
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from checkpointing.verification import canonical_shapes
from config import families
from config.command_line import make_model
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
    number = re.search(r"\d+", module)
    general = re.sub(r"\d+", "*", module, count=1)
    found = family.modules[general]
    theirs = tuple(f"{each}.{kind}".replace("*", number[0] if number else "*") for each in found)
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


# ---- config.json ---------------------------------------------------------------------------------


def hf_config(model: ModelShape, dtype: torch.dtype, name: str | None = None) -> dict[str, Any]:
    """config.json of the model, whose weights have that type; UserError as `rules`."""
    config = families.to_config(model, name) | {"bos_token_id": None, "eos_token_id": None}
    return config | {"torch_dtype": str(dtype).removeprefix("torch.")}


def model_shape(config: dict[str, Any], where: str) -> ModelShape:
    """The shape that a config.json describes; UserError if it is none of ours."""
    options, lacks = families.from_config(config, where)
    if lacks:
        raise UserError(f"{where}: {'; '.join(lacks)}")
    return make_model(options, where)
