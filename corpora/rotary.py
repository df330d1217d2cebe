"""Rotary positions: which angle each pair of a head's columns is turned by, at each position.

tables = rotary_tables(model)                       once for a model
q, k = rotate(q, tables), rotate(k, tables)         in each block
"""

import math

import torch
from torch import Tensor

from config.schema import ModelShape
from config.validation import rotary_scaling


def rotary_tables(model: ModelShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines of arXiv 2104.09864, halves side by side as in Llama: float64, (s, 1, 1, r)
    for the r columns of a head that are turned.
    """
    r = model.rotary_width
    frequencies = model.rotary_base ** (-torch.arange(0, r, 2, dtype=torch.float64) / r)
    frequencies = _scaled(frequencies, *rotary_scaling(model.rotary_scaling))
    angles = torch.arange(model.seq_length, dtype=torch.float64)[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)[:, None, None, :]
    return angles.cos(), angles.sin()


def _scaled(frequencies: Tensor, kind: str, numbers: list[float]) -> Tensor:
    """Frequencies by --rotary-scaling: all over a factor, or in Llama 3.1 those that turn less than
    `low` times in the positions trained at first, and in part those that turn up to `high` times.
    """
    if kind == "none":
        return frequencies
    if kind == "linear":
        return frequencies / numbers[0]
    factor, low, high, positions = numbers
    turns = positions * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions on the first r columns of (s, b, heads, d), by tables of (s or more, 1 or b,
    1, r).
    """
    cos, sin = (table[: len(x)] for table in tables)
    r = cos.shape[-1]
    if r < x.shape[-1]:
        turned, rest = x.split((r, x.shape[-1] - r), -1)
        return torch.cat([rotate(turned, tables), rest], -1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
