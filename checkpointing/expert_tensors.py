"""Rules that make tensors of ours from those of transformers, and which of them are of experts.

hf_export.py makes all other rules, and reads and writes the files.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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


def of_router(name: str, model: ModelShape, initial: float) -> Rule:
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


def of_experts(name: str, theirs: tuple[str, ...], experts: int) -> Rule:
    """The rule of a tensor of all experts; there each expert has its own, or a gate and an up."""
    names = tuple(each.replace("#", str(i)) for i in range(experts) for each in theirs)
    count = len(theirs)

    def to_ours(*tensors: Tensor) -> Tensor:
        stacked = torch.stack(tensors)
        return stacked.unflatten(0, (experts, count)) if count > 1 else stacked

    def to_theirs(ours: Tensor) -> tuple[Tensor, ...]:
        return torch.unbind(ours.flatten(0, 1) if count > 1 else ours)

    return Rule(name, names, to_ours, to_theirs)
