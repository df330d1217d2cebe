"""Converts between the tensors of Trine and those of Hugging Face transformers.

    rules(model)                 a rule for each tensor of the model, for both directions

"Ours" is a tensor of Trine, "theirs" are the tensors of transformers that hold the same weights.
A conversion "to ours" takes their tensors and returns ours; "to theirs" takes ours and returns a
tuple. config/families.toml has their names for each family of models. hf_export.py reads and
writes the files.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpointing.index import canonical_shapes
from config import families
from config.families import Family
from config.messages import UserError
from config.schema import ModelShape


@dataclass(frozen=True)
class Rule:
    """The conversion of one tensor.

    name: the name of our tensor. theirs: the names of their tensors. to_ours: takes their tensors,
    in this order, and returns ours; to_theirs: takes our tensor and returns theirs in this order.
    """

    name: str
    theirs: tuple[str, ...]
    to_ours: Callable[..., Tensor]
    to_theirs: Callable[[Tensor], tuple[Tensor, ...]]


def rules(model: ModelShape, name: str | None = None) -> list[Rule]:
    """Return the rules for all tensors of the model.

    name: the name of the model's family; None: the first family that has the model. Raise UserError
    if that family, or every family, does not have the model.
    """
    family = families.family_of(model, name)
    return [_rule(name, model, family) for name in canonical_shapes(model)]


def _rule(name: str, model: ModelShape, family: Family) -> Rule:
    """Return the rule for our tensor `name`, such as "blocks.3.mlp.up.weight".

    In this example `module` is "blocks.3.mlp.up", `kind` is "weight", and `general` is
    "blocks.*.mlp.up", under which families.toml has the names of their modules.
    """
    module, _, kind = name.rpartition(".")
    # A router's bias and load have no tensor in transformers.
    if name.endswith((".router.bias", ".router.load")):
        initial = 1.0 if kind == "load" else 0.0
        return _rule_of_router(name, model, initial)
    number = re.search(r"\d+", module)
    general = re.sub(r"\d+", "*", module, count=1)
    their_modules = family.modules[general]
    layer = number[0] if number else "*"
    theirs = tuple(f"{m}.{kind}".replace("*", layer) for m in their_modules)
    if family.stacked_experts and general.startswith(("blocks.*.mlp.", "blocks.*.attention")):
        stacked = _rule_of_stack(name, general, kind, theirs[0].removesuffix(f".{kind}"))
        if stacked is not None:
            return stacked
    if "#" in their_modules[0]:  # in their names, "#" stands for the number of the expert
        return _rule_of_experts(name, theirs, model.experts)
    part = general.removeprefix("blocks.*.")
    to_ours, to_theirs = _conversions(part, model, family, len(theirs))
    # Some families, such as GPT-2, keep the matrices of their blocks as (in, out), where ours are
    # (out, in).
    is_matrix_of_block = general != module and kind == "weight" and "norm" not in part
    if family.transposed and is_matrix_of_block:
        return Rule(
            name,
            theirs,
            lambda *tensors: to_ours(*(t.t() for t in tensors)),
            lambda ours: tuple(t.t() for t in to_theirs(ours)),
        )
    return Rule(name, theirs, to_ours, to_theirs)


def _conversions(
    part: str, model: ModelShape, family: Family, count: int
) -> tuple[Callable, Callable]:
    """Return the conversions (to ours, to theirs) of a part of the model, without experts.

    part: the part's name in a block, such as "attention.qkv", or outside of the blocks, such as
    "embedding.positions". count: the number of their tensors.
    """
    if part == "attention.qkv":
        return _qkv(model, family, count)
    if part in ("attention.q_norm", "attention.k_norm") and model.qk_norm == "full":
        # The scales of the norm: ours are (heads, head size), theirs are flat.
        return lambda t: t.unflatten(0, (-1, model.head_size)), _as_tuple(torch.flatten)
    if part == "mlp.up" and model.up_matrices == 2 and count == 1:
        # Their single matrix has the rows of the gate first: ours has both, (2, width, hidden).
        return lambda t: t.unflatten(0, (2, -1)), _as_tuple(lambda t: t.flatten(0, 1))
    if count == 2:  # the two matrices of SwiGLU: ours has both, (2, width, hidden)
        return lambda gate, up: torch.stack([gate, up]), torch.unbind
    if part == "embedding.positions" and family.skipped_rows:
        # Their matrix has this number of rows before the row of position 0, which ours leaves out.
        rows = family.skipped_rows
        pad = (0, 0, rows, 0)
        return lambda t: t[rows:], _as_tuple(lambda t: F.pad(t, pad))
    return lambda t: t, _as_tuple(lambda t: t)


def _as_tuple(convert: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return a conversion to theirs for a single tensor: the result of `convert`, in a tuple."""
    return lambda t: (convert(t),)


def _qkv(model: ModelShape, family: Family, count: int) -> tuple[Callable, Callable]:
    """Return the conversions (to ours, to theirs) of weights or biases of queries, keys and values.

    count: the number of their tensors: 3 for queries (a d, ...), keys and values (g d, ...), or 1
    with all of their rows. Our tensor is (g, a/g + 2, d, ...): for each of g key/value heads its
    queries, its key, its value; a: heads, d: head size.
    """
    g = model.kv_heads
    d = model.head_size
    queries = model.heads // model.kv_heads
    parts = [queries, 1, 1]
    # Three tensors: queries become (g, a/g, d, ...), keys and values (g, 1, d, ...), joined along
    # the second dimension, and back.
    if count == 3:
        return (
            lambda *three: torch.cat([t.unflatten(0, (g, -1, d)) for t in three], 1),
            lambda t: tuple(part.flatten(0, 2) for part in t.split(parts, 1)),
        )
    if family.qkv == "head":  # the rows of their single tensor are in our order already
        return lambda t: t.unflatten(0, (g, queries + 2, d)), _as_tuple(lambda t: t.flatten(0, 2))
    # Their single tensor has the queries of all heads first, then all keys, then all values.
    rows = [part * g * d for part in parts]
    return (
        lambda t: torch.cat([part.unflatten(0, (g, -1, d)) for part in t.split(rows)], 1),
        _as_tuple(lambda t: torch.cat([part.flatten(0, 2) for part in t.split(parts, 1)])),
    )


def _rule_of_router(name: str, model: ModelShape, initial: float) -> Rule:
    """Return the rule of a router's bias or load, (experts,), which transformers does not have.

    name: the tensor's name, ending in .bias (the biases that --balance bias adds to the scores) or
    .load (how many tokens each expert had in the last step). An import sets every element to
    `initial`. An export writes nothing, and raises UserError if a bias is not 0: without the bias,
    transformers would send tokens to other experts.
    """

    def to_theirs(ours: Tensor) -> tuple[Tensor, ...]:
        if name.endswith(".bias") and ours.any():
            raise UserError(
                f"{name} is not 0: the model was trained with --balance bias, and its family in "
                "transformers has no bias of experts"
            )
        return ()

    return Rule(name, (), lambda: torch.full((model.experts,), initial), to_theirs)


def _rule_of_stack(name: str, general: str, kind: str, theirs: str) -> Rule | None:
    """Return the rule of a tensor of gpt-oss whose form is another than in other families, or None.

    They have one tensor for all experts, (experts, in, out), in which the rows of gate and up
    alternate. Ours is (experts, out, in), or (experts, 2, width, in).
    """
    if general == "blocks.*.mlp.router" and kind == "logit_bias":
        return Rule(name, (f"{theirs}.bias",), lambda t: t, _as_tuple(lambda t: t))
    if general == "blocks.*.mlp.experts.up" and kind == "weight":
        return Rule(
            name,
            (theirs,),
            lambda t: t.transpose(1, 2).unflatten(1, (-1, 2)).transpose(1, 2),
            _as_tuple(lambda t: t.transpose(1, 2).flatten(1, 2).transpose(1, 2)),
        )
    if general == "blocks.*.mlp.experts.up":
        return Rule(
            name,
            (f"{theirs}_bias",),
            lambda t: t.unflatten(1, (-1, 2)).transpose(1, 2),
            _as_tuple(lambda t: t.transpose(1, 2).flatten(1, 2)),
        )
    if general == "blocks.*.mlp.experts.down" and kind == "weight":
        turn = lambda t: t.transpose(1, 2)  # noqa: E731
        return Rule(name, (theirs,), turn, _as_tuple(turn))
    if general == "blocks.*.mlp.experts.down":
        return Rule(name, (f"{theirs}_bias",), lambda t: t, _as_tuple(lambda t: t))
    return None


def _rule_of_experts(name: str, theirs: tuple[str, ...], experts: int) -> Rule:
    """Return the rule of one tensor of ours with all experts; they have one tensor per expert.

    theirs: the name of an expert's tensor, or the two names of its gate and up, with "#" for the
    expert's number. Our tensor is (experts, ...), or with gate and up (experts, 2, ...). The rule
    lists their tensors in this order: gate and up of expert 0, gate and up of expert 1, ...
    """
    names: list[str] = []
    for expert in range(experts):
        names += [their_name.replace("#", str(expert)) for their_name in theirs]
    count = len(theirs)

    def to_ours(*tensors: Tensor) -> Tensor:
        stacked = torch.stack(tensors)
        return stacked.unflatten(0, (experts, count)) if count > 1 else stacked

    def to_theirs(ours: Tensor) -> tuple[Tensor, ...]:
        return torch.unbind(ours.flatten(0, 1) if count > 1 else ours)

    return Rule(name, tuple(names), to_ours, to_theirs)
