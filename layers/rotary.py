"""Rotary positions (arXiv 2104.09864): tables of cosines and sines, and the rotation by them.

    rotary = Rotary(factory, model, model.attention_of(3))
    q = rotate(q, rotary(batch.positions))

Shapes at line ends as in layers/attention.py: s sequence, b samples, d head size, r columns that
are turned. Block 3 stands for all blocks with its base and scaling.
"""

import math

import torch
from torch import Tensor

from architecture.block_attention import BlockAttention
from architecture.rotary_scaling import rotary_scaling
from architecture.shape import ModelShape
from parallel import ParamFactory


class Rotary:
    """The tables of the blocks with one rotary base and scaling, for `rotate`.

    limit: with longrope, the most tokens of a text that has the short factors, if texts of the
    model's length have the long ones; else None.
    """

    def __init__(self, factory: ParamFactory, model: ModelShape, block: BlockAttention):
        """Make the tables of all positions of a sample, and this rank's rows of them."""
        cos, sin = (t.to(factory.device, factory.dtype) for t in rotary_tables(model, block))
        cp = factory.mesh.cp
        self.tables = (cos, sin)
        self._tables_here = (cp.balanced_shard(cos, 0), cp.balanced_shard(sin, 0))
        self.limit = switch_length(model, block)
        self._short: tuple[Tensor, Tensor] | None = None  # of texts up to `limit`
        if self.limit is not None:
            short = rotary_tables(model, block, self.limit)
            cos, sin = (t.to(factory.device, factory.dtype) for t in short)
            self._short = (cos, sin)

    def __call__(
        self, positions: Tensor | None, length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines, (s, 1 or b, 1, r) each.

        positions: the tokens' positions, (b, s). None: they count from 0 in each sample. length:
        the tokens of the text, in decoding or of a task; None: a sample's.
        """
        if positions is None:
            return self._tables_here
        cos, sin = self.tables
        if self._short is not None and length is not None and length <= (self.limit or 0):
            cos, sin = self._short
        return cos[positions.t(), 0], sin[positions.t(), 0]  # s b 1 r


def switch_length(model: ModelShape, block: BlockAttention) -> int | None:
    """Return the tokens from which on a longer text has other rotary tables (longrope), or None.

    None also if no text of the model's length is longer.
    """
    kind, numbers = rotary_scaling(block.rotary_scaling)
    if not block.rotary or kind != "longrope" or model.seq_length <= numbers[0]:
        return None
    return int(numbers[0])


def text_switch(model: ModelShape) -> int | None:
    """Return the tokens from which on a longer text has other rotary tables in some block, or None.

    It is one number: config/validation.py refuses blocks that differ in it.
    """
    blocks = (model.attention_of(block) for block in model.attention_blocks)
    limits = [switch_length(model, block) for block in blocks]
    return next((limit for limit in limits if limit is not None), None)


def rotary_tables(
    model: ModelShape, block: BlockAttention, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines of rotary positions: float64, (s, 1, 1, r) each.

    Only the first r columns of a head are turned (rotary_fraction). As in Llama, column i forms a
    pair with column i + r/2, so both halves of a table are equal, but for the sign of the first
    half of the sines, which `rotate` needs. length: s, the tokens of a text,
    default: of a sample; longrope has other frequencies for long texts.
    """
    length = length or model.seq_length
    frequencies, factor = rotary_frequencies(model, block, length)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return cos[:, None, None, :], sin[:, None, None, :]


def rotary_frequencies(
    model: ModelShape, block: BlockAttention, length: int
) -> tuple[Tensor, float]:
    """Return the frequencies of the pairs of columns, float64, (r/2,), and a factor of the tables.

    length: the tokens of a text, on which the frequencies of longrope depend.
    """
    r = model.rotary_width
    frequencies = block.rotary_base ** (-torch.arange(0, r, 2, dtype=torch.float64) / r)
    kind, numbers = rotary_scaling(block.rotary_scaling)
    # The factor multiplies cosines and sines, so its square is a factor of the scores.
    if kind in ("yarn", "longrope"):
        from layers.rotary_scaling import scaled  # imported here: few models have these

        return scaled(frequencies, kind, numbers, block.rotary_base, length)
    return _scale_frequencies(frequencies, kind, numbers), 1.0


def _scale_frequencies(frequencies: Tensor, kind: str, numbers: list[float]) -> Tensor:
    """Return the frequencies after rotary_scaling, which models trained on fewer tokens need.

    kind, numbers: the parts of the option. linear: all frequencies are divided by the factor.
    llama3 (Llama 3.1): a frequency is divided by the factor if it turns less than `low` times in
    `positions` tokens, the length of the original training; it stays if it turns more than `high`
    times, and is interpolated in between.
    """
    if kind == "none":
        return frequencies
    if kind == "linear":
        (factor,) = numbers
        return frequencies / factor
    factor, low, high, positions = numbers
    turns = positions * frequencies / (2 * math.pi)
    unscaled_share = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (unscaled_share + (1 - unscaled_share) / factor)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Return x, (s, b, heads, d), with the first r columns of each head turned by its position.

    tables: those of `rotary_tables`, (s or more, 1 or b, 1, r) each.
    """
    cos, sin = (table[: len(x)] for table in tables)
    r = cos.shape[-1]
    if r < x.shape[-1]:
        first_columns, other_columns = x.split((r, x.shape[-1] - r), -1)
        return torch.cat([rotate(first_columns, tables), other_columns], -1)
    # Columns i and i + r/2 are a point (x, y), turned to (x cos - y sin, y cos + x sin). The sine's
    # sign is in the table, so three kernels do it.
    return torch.addcmul(x * cos, x.roll(r // 2, -1), sin)
