"""Sketches of tensors that add up over their parts: 12 numbers whatever the layout.

    count, sum, sum of squares, largest magnitude, 8 projections        of a tensor, all in fp64

A projection is the sum of the elements with signs. The sign of an element is a function of its
global index alone: the product over the tensor's dimensions of one drawn sign for the index along
each. So a part of a tensor is sketched by a product with a thin matrix, and the sketches of all
parts add up to that of the tensor (the largest magnitude is the maximum). The mean square of the
differences between two tensors' projections estimates the square of the norm of their difference.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from distributed.collectives import MAX, Group
from optim.buckets import ParamShard
from parallel import splitmix64

PROJECTIONS = 8
SUMS = 3 + PROJECTIONS  # numbers of a sketch that add up: all but the largest magnitude
NUMBERS = SUMS + 1
AT_ONCE = 2**22  # elements that are converted to fp64 at a time


def signs(key: str, index: Tensor) -> Tensor:
    """Return the signs of the indices (n,) along one dimension: fp64, (n, PROJECTIONS)."""
    digest = hashlib.sha256(key.encode()).digest()
    drawn = splitmix64(index.long(), int.from_bytes(digest[:8], "little", signed=True))
    bits = drawn[:, None] >> torch.arange(PROJECTIONS, device=index.device)
    return 1.0 - 2.0 * (bits & 1).double()


class Sketches:
    """A table of sketches, one for each row, to which parts of the rows' tensors are added."""

    def __init__(self, rows: int, device: torch.device):
        self.sums = torch.zeros(rows, SUMS, dtype=torch.float64, device=device)
        self.largest = torch.zeros(rows, dtype=torch.float64, device=device)

    def add(self, rows: Tensor, sums: Tensor, largest: Tensor) -> None:
        """Add parts with these sums (k, SUMS) and largest magnitudes (k,) to the rows (k,)."""
        self.sums.index_add_(0, rows, sums)
        self.largest.scatter_reduce_(0, rows, largest, "amax")

    def total(self, world: Group) -> np.ndarray:
        """Return the sketches of all ranks' parts: (rows, NUMBERS). Collective over `world`."""
        world.at_once.all_reduce(self.sums).wait()
        world.at_once.all_reduce(self.largest, MAX).wait()
        first, projections = self.sums.split((3, PROJECTIONS), 1)
        return torch.cat([first, self.largest[:, None], projections], 1).cpu().numpy()


@torch.no_grad()
def of_shard(shard: ParamShard, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return sums (1, SUMS) and largest magnitude (1,) of `values` times `scale`.

    values: one for each element of the shard, flat. Padding of the local tensor is not counted.
    """
    *outer, width = shard.shape
    first = shard.start // width
    stop = -(-shard.stop // width)
    before = shard.start - first * width
    after = stop * width - shard.stop
    x = values
    if before or after:
        x = torch.nn.functional.pad(values, (before, after))
    x = x.view(stop - first, width)
    columns = torch.arange(width, device=x.device)
    of_columns, real_columns = _along(shard, len(outer), columns)
    rest = torch.arange(first, stop, device=x.device)
    of_rows = torch.ones(len(rest), PROJECTIONS, dtype=torch.float64, device=x.device)
    real_rows = torch.ones(len(rest), dtype=torch.float64, device=x.device)
    for dim in reversed(range(len(outer))):
        found, real = _along(shard, dim, rest % outer[dim])
        of_rows *= found
        real_rows *= real
        rest = rest // outer[dim]
    count = real_rows.sum() * real_columns.sum()
    count -= real_rows[0] * real_columns[:before].sum()
    count -= real_rows[-1] * real_columns[width - after :].sum()
    sums = torch.zeros(SUMS, dtype=torch.float64, device=x.device)
    largest = torch.zeros(1, dtype=torch.float64, device=x.device)
    rows = max(1, AT_ONCE // width)
    for part, sign in zip(x.split(rows), of_rows.split(rows)):
        exact = part.double() * scale
        sums[1] += exact.sum()
        sums[2] += exact.square().sum()
        sums[3:] += (sign * (exact @ of_columns)).sum(0)
        largest = torch.maximum(largest, exact.abs().max())
    sums[0] = count
    return sums[None], largest


def _along(shard: ParamShard, dim: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the signs of local indices along a dimension, and 1.0 for those of no padding."""
    spec = shard.spec
    real = torch.ones(len(index), dtype=torch.float64, device=index.device)
    start = 0
    if dim == spec.dim:
        real = (index < spec.stop - spec.start).double()
        start = spec.start
    return signs(f"{spec.name}/{dim}", index + start), real


@torch.no_grad()
def of_activation(
    x: Tensor, positions: Tensor, samples: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return sums (b, SUMS) and largest magnitudes (b,) of x (s, b, h) times `scale`, by sample.

    positions (s,) and samples (b,): global numbers, of which the signs are functions.
    """
    length, count, width = x.shape
    of_width = signs("channel", torch.arange(width, device=x.device))
    of_position = signs("position", positions)
    sums = torch.zeros(count, SUMS, dtype=torch.float64, device=x.device)
    largest = torch.zeros(count, dtype=torch.float64, device=x.device)
    rows = max(1, AT_ONCE // (count * width))
    for part, sign in zip(x.split(rows), of_position.split(rows)):
        exact = part.double() * scale
        sums[:, 1] += exact.sum((0, 2))
        sums[:, 2] += exact.square().sum((0, 2))
        sums[:, 3:] += (sign[:, None] * (exact @ of_width)).sum(0)
        largest = torch.maximum(largest, exact.abs().amax((0, 2)))
    sums[:, 0] = length * width
    sums[:, 3:] *= signs("sample", samples)
    return sums, largest
