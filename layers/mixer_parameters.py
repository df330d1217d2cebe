"""The parameters of mixers that no normal distribution with mean 0 gives: decays and taps."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from parallel import ParamFactory


def conv_weight(factory: ParamFactory, name: str, shape: tuple[int, ...]) -> nn.Parameter:
    """Return the taps of a causal convolution, (..., taps), which tp divides along dimension 0."""
    return factory.parameter(name, shape, dim=0, **conv_options(factory, shape[-1]))


def conv_options(factory: ParamFactory, taps: int) -> dict[str, Any]:
    """Return the options of ParamFactory.parameter for the taps of a convolution.

    Their deviation is that of uniform numbers up to 1 / sqrt(taps), as torch draws them.
    """
    return {"std": factory.std and (3 * taps) ** -0.5, "decay": True, "role": "vector"}


def add_decays(
    factory: ParamFactory, name: str, rates: tuple[int, ...], steps: tuple[int, ...]
) -> tuple[nn.Parameter, nn.Parameter]:
    """Return a_log and dt_bias of decays exp(-exp(a_log) softplus(x + dt_bias)), which tp divides.

    rates, steps: their shapes. exp(a_log) is uniform from 0 (here 0.01) to 16, softplus(dt_bias)
    between 0.001 and 0.1 with a uniform logarithm, as in Mamba-2's published code.
    """
    std = factory.std and 1.0
    a_log = factory.parameter(f"{name}.a_log", rates, std=std, dim=0)
    dt_bias = factory.parameter(f"{name}.dt_bias", steps, std=std, dim=0)
    if std:
        _draw_decays(a_log, dt_bias)
    return a_log, dt_bias


@torch.no_grad()
def _draw_decays(a_log: Tensor, dt_bias: Tensor) -> None:
    """Make the parameters of decays of standard normal numbers, in place."""
    a_log.copy_((0.01 + _uniform(a_log) * (16 - 0.01)).log())
    steps = (_uniform(dt_bias) * math.log(0.1 / 0.001) + math.log(0.001)).exp()
    dt_bias.copy_(steps + (-torch.expm1(-steps)).log())  # the inverse of softplus


def _uniform(normal: Tensor) -> Tensor:
    """Return uniform numbers between 0 and 1, float64, made of standard normal ones."""
    return torch.special.ndtr(normal.double())
