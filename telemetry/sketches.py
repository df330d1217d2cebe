"""Sketches of tensors that add up over their parts: 12 numbers whatever the layout.

    count, sum, sum of squares, largest magnitude, 8 projections        of a tensor, all in fp64

A projection is the sum of the elements with signs. The sign of an element is a function of its
global index alone: the product of signs that are drawn for its row and for its column. So a part of
a tensor is sketched by a product with a thin matrix, and the sketches of all parts add up to that
of the tensor (the largest magnitude is the maximum). The mean square of the differences between two
tensors' projections estimates the square of the norm of their difference.
"""

import hashlib
import math

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


def signs(key: str, index: Tensor) -> Tensor:
    """Return the signs of the indices (n,) along one dimension: fp64, (n, PROJECTIONS)."""
    digest = hashlib.sha256(key.encode()).digest()
    drawn = splitmix64(index, int.from_bytes(digest[:8], "little", signed=True))
    bits = drawn[:, None] >> torch.arange(PROJECTIONS, device=index.device)
    return 1.0 - 2.0 * (bits & 1).double()


@torch.no_grad()
def sketch(x: Tensor, of_rows: Tensor, of_columns: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return sums (b, SUMS) and largest magnitudes (b,) of the b slices of x, (s, b, h).

    of_rows, of_columns: signs (s, PROJECTIONS) and (h, PROJECTIONS). count: elements of a slice.
    """
    sums = torch.zeros(x.shape[1], SUMS, dtype=torch.float64, device=x.device)
    largest = torch.zeros_like(sums[:, 0])
    sums[:, 0] = count
    rows = max(1, AT_ONCE // x[0].numel())
    for part, sign in zip(x.split(rows), of_rows.split(rows)):
        exact = part.double()
        sums[:, 1] += exact.sum((0, 2))
        sums[:, 2] += exact.square().sum((0, 2))
        sums[:, 3:] += (sign[:, None] * (exact @ of_columns)).sum(0)
        largest = torch.maximum(largest, exact.abs().amax((0, 2)))
    return sums, largest


def of_shard(shard: ParamShard, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums (1, SUMS) and largest magnitude (1,) of `values`, the shard's elements, flat.

    Padding of the local tensor, which is 0, is not counted.
    """
    spec, shape = shard.spec, shard.shape
    width = shape[-1]
    dim = spec.dim or 0
    first = shard.start // width
    padding = shard.start % width, -shard.stop % width
    x = torch.nn.functional.pad(values, padding).view(-1, 1, width)
    rows = torch.arange(first, first + len(x), device=x.device)
    columns = torch.arange(width, device=x.device)
    if dim == len(shape) - 1:
        columns += spec.start
    else:
        inner = math.prod(shape[dim + 1 : -1])
        run = shape[dim] * inner  # adjacent rows of the local tensor that are adjacent in the whole
        rows = rows + rows // run * (spec.shape[dim] * inner - run) + spec.start * inner
    inner = math.prod(shape[dim + 1 :])
    run, real = shape[dim] * inner, (spec.stop - spec.start) * inner
    before, upto = (e // run * real + min(e % run, real) for e in (shard.start, shard.stop))
    of_rows, of_columns = signs(f"{spec.name} rows", rows), signs(f"{spec.name} columns", columns)
    return sketch(x, of_rows, of_columns, upto - before)


def of_activation(x: Tensor, positions: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums (b, SUMS) and largest magnitudes (b,) of the samples of x, (s, b, h).

    positions (s,) and samples (b,): global numbers, of which the signs are functions.
    """
    of_columns = signs("channels", torch.arange(x.shape[2], device=x.device))
    sums, largest = sketch(x, signs("positions", positions), of_columns, x[:, 0].numel())
    sums[:, 3:] *= signs("samples", samples)
    return sums, largest
