"""Rotary frequencies of models that were extended to longer texts by YaRN or LongRoPE.

    frequencies, factor = scaled(frequencies, "yarn", [8, 32, 1, 4096, 1.2, 1], 10000.0, length)

`factor` multiplies cosines and sines. config/validation.py has the numbers of each kind.
"""

import math

import torch
from torch import Tensor


def scaled(
    frequencies: Tensor, kind: str, numbers: list[float], base: float, length: int
) -> tuple[Tensor, float]:
    """Return the frequencies of a kind of scaling, (r/2,), and the factor of cosines and sines.

    frequencies: unscaled, float64. base: the rotary base. length: the tokens of the text.
    """
    if kind == "longrope":
        return _longrope(frequencies, numbers, length)
    return _yarn(frequencies, numbers, base)


def _yarn(frequencies: Tensor, numbers: list[float], base: float) -> tuple[Tensor, float]:
    """Return the frequencies of YaRN (arXiv 2309.00071, section 3.2) and its attention factor.

    A frequency is divided by the factor if it turns less than `slow` times in `positions` tokens,
    the length of the original training; it stays if it turns more than `fast` times. In between, it
    is interpolated linearly by the number of its column. truncate: the two ends are rounded to
    whole columns, outwards.
    """
    factor, fast, slow, positions, attention, truncate = numbers
    count = len(frequencies)

    def column(turns: float) -> float:
        """Return the column, from 0, whose frequency turns so often in `positions` tokens."""
        return count * math.log(positions / (turns * 2 * math.pi)) / math.log(base)

    first, last = column(fast), column(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    width = last - first or 0.001  # no division by 0 if both ends are one column
    divided_share = ((torch.arange(count, dtype=torch.float64) - first) / width).clamp(0, 1)
    return frequencies * (divided_share / factor + 1 - divided_share), attention


def _longrope(frequencies: Tensor, numbers: list[float], length: int) -> tuple[Tensor, float]:
    """Return the frequencies of LongRoPE (arXiv 2402.13753) and the factor of its tables.

    Each frequency has a divisor of its own: one for texts of up to `positions` tokens, the length
    of the original training, and one for longer texts.
    """
    positions, attention, *divisors = numbers
    count = len(frequencies)
    chosen = divisors[:count] if length <= positions else divisors[count:]
    return frequencies / torch.tensor(chosen, dtype=torch.float64), attention
