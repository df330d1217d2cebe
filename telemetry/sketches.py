"""Sketches of tensors, 12 numbers each; the sketches of a tensor's parts add up to the tensor's.

    count, sum, sum of squares, largest magnitude, 8 projections        of a tensor, all in fp64

A projection is the sum of the elements with signs. The sign of an element is a function of its
global index alone: the product of signs that are drawn for its row and for its column. So a part of
a tensor is sketched by a product with a thin matrix, and the sum of the parts' sketches is the same
in all layouts (of the largest magnitudes it is the maximum). The mean square of the differences
between two tensors' projections estimates the square of the norm of their difference.
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
    """A table with the sketch of a tensor per row, to which parts of the tensors are added."""

    def __init__(self, rows: int, device: torch.device):
        """Make a table of zeros with `rows` rows."""
        self.sums = torch.zeros(rows, SUMS, dtype=torch.float64, device=device)
        self.largest = torch.zeros(rows, dtype=torch.float64, device=device)

    def add(self, rows: Tensor, sums: Tensor, largest: Tensor) -> None:
        """Add the sketches of k parts to the rows with the indices `rows`, (k,).

        sums: (k, SUMS). largest: the largest magnitudes, (k,).
        """
        self.sums.index_add_(0, rows, sums)
        self.largest.scatter_reduce_(0, rows, largest, "amax")

    def total(self, world: Group) -> np.ndarray:
        """Return the sketches of all ranks' parts: (rows, NUMBERS). Collective over `world`."""
        world.at_once.all_reduce(self.sums).wait()
        world.at_once.all_reduce(self.largest, MAX).wait()
        first, projections = self.sums.split((3, PROJECTIONS), 1)
        return torch.cat([first, self.largest[:, None], projections], 1).cpu().numpy()


def signs(key: str, index: Tensor) -> Tensor:
    """Return signs +1 or -1 for n indices along one dimension of a tensor: fp64, (n, PROJECTIONS).

    key: names the tensor and the dimension; the signs depend on key and index alone. index: (n,).
    """
    digest = hashlib.sha256(key.encode()).digest()
    drawn = splitmix64(index, int.from_bytes(digest[:8], "little", signed=True))
    bits = drawn[:, None] >> torch.arange(PROJECTIONS, device=index.device)
    return 1.0 - 2.0 * (bits & 1).double()


@torch.no_grad()
def sketch(x: Tensor, of_rows: Tensor, of_columns: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return sums, (b, SUMS), and largest magnitudes, (b,), of the b slices x[:, i] of x (s, b, h).

    of_rows: signs, (s, PROJECTIONS). of_columns: signs, (h, PROJECTIONS). count: the number of
    elements of a slice without padding.
    """
    sums = torch.zeros(x.shape[1], SUMS, dtype=torch.float64, device=x.device)
    largest = torch.zeros_like(sums[:, 0])
    sums[:, 0] = count
    rows = max(1, AT_ONCE // x[0].numel())
    for part, signs_of_rows in zip(x.split(rows), of_rows.split(rows)):
        part64 = part.double()
        sums[:, 1] += part64.sum((0, 2))
        sums[:, 2] += part64.square().sum((0, 2))
        sums[:, 3:] += (signs_of_rows[:, None] * (part64 @ of_columns)).sum(0)
        largest = torch.maximum(largest, part64.abs().amax((0, 2)))
    return sums, largest


def of_shard(shard: ParamShard, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums, (1, SUMS), and largest magnitude, (1,), of a shard of a parameter.

    values: the shard's elements, flat. Padding of the local tensor, which is 0, is not counted.
    """
    spec = shard.spec
    shape = shard.shape
    width = shape[-1]
    dim = spec.dim or 0
    first_row = shard.start // width
    padding = shard.start % width, -shard.stop % width  # fills the first and the last row
    x = torch.nn.functional.pad(values, padding).view(-1, 1, width)
    # Indices of rows and columns in the whole parameter, so that the signs do not depend on tp.
    rows = torch.arange(first_row, first_row + len(x), device=x.device)
    columns = torch.arange(width, device=x.device)
    if dim == len(shape) - 1:
        columns += spec.start
    else:
        inner = math.prod(shape[dim + 1 : -1])
        run = shape[dim] * inner  # adjacent rows of the local tensor that are adjacent in the whole
        rows = rows + rows // run * (spec.shape[dim] * inner - run) + spec.start * inner
    inner = math.prod(shape[dim + 1 :])
    run = shape[dim] * inner
    real = (spec.stop - spec.start) * inner  # elements of a run that are not padding
    before_start, before_stop = (
        element // run * real + min(element % run, real) for element in (shard.start, shard.stop)
    )
    of_rows = signs(f"{spec.name} rows", rows)
    of_columns = signs(f"{spec.name} columns", columns)
    return sketch(x, of_rows, of_columns, before_stop - before_start)


def of_activation(x: Tensor, positions: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums, (b, SUMS), and largest magnitudes, (b,), of the b samples of x (s, b, h).

    positions: (s,), those of the tokens in their samples. samples: (b,), numbers in the step.
    """
    of_columns = signs("channels", torch.arange(x.shape[2], device=x.device))
    sums, largest = sketch(x, signs("positions", positions), of_columns, x[:, 0].numel())
    sums[:, 3:] *= signs("samples", samples)
    return sums, largest
