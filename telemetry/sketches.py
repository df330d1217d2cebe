"""Sketches of tensors, 12 numbers each; the sketches of a tensor's parts add up to the tensor's.

    count, sum, sum of squares, largest magnitude, 8 projections        of a tensor, all in fp64

Each element counts in one projection, which is the sum of its elements with random signs. The
columns of a tensor are divided into 8 blocks, and the number of the projection is that of the block
plus that of the row, modulo 8, so the elements of a row and of a column are spread over all of
them. The sign is the product of signs that are drawn for the row and for the column. Both follow
from the element's global index alone, so the sum of the parts' sketches is the same in all layouts
(of the largest magnitudes it is the maximum). The sum of the squared differences between two
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
SQUARES = 2  # column of a sketch
PROJECTED = slice(4, None)  # columns of a sketch
AT_ONCE = 2**18  # elements that are converted to fp64 at a time, so that they stay in the cache


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
    """Return a sign, +1 or -1, for each of n indices along one dimension of a tensor: fp64, (n,).

    key: names the tensor and the dimension; the signs depend on key and index alone. index: (n,).
    """
    digest = hashlib.sha256(key.encode()).digest()
    drawn = splitmix64(index, int.from_bytes(digest[:8], "little", signed=True))
    return 1.0 - 2.0 * (drawn & 1).double()


@torch.no_grad()
def sketch(
    x: Tensor, name: str, rows: Tensor, first_column: int, columns: int
) -> tuple[Tensor, Tensor]:
    """Return sums, (b, SUMS), and largest magnitudes, (b,), of the b slices x[:, i] of x (s, b, h).

    The count in the sums is that of all elements. name: the signs depend on it. rows: (s,), the
    numbers of the rows in the whole tensor. first_column: the number of x's first column in the
    whole tensor, which has `columns` columns.
    """
    length, slices, width = x.shape
    in_block = -(-columns // PROJECTIONS)  # columns of a block
    before = first_column % in_block  # columns of x's first block that are not in x
    first_block = first_column // in_block
    blocks = -(-(before + width) // in_block)
    column_numbers = torch.arange(blocks * in_block, device=x.device) + first_block * in_block
    of_columns = signs(f"{name} columns", column_numbers)
    # A row of this matrix has the sign of a row of x, at the projection of the row's first block.
    of_rows = torch.zeros(length, PROJECTIONS, dtype=torch.float64, device=x.device)
    of_rows.scatter_(1, (rows % PROJECTIONS)[:, None], signs(f"{name} rows", rows)[:, None])
    at_once = max(1, AT_ONCE // (slices * len(of_columns)))
    in_cache = x.new_zeros(min(at_once, length), slices, len(of_columns), dtype=torch.float64)
    by_block = in_cache.new_zeros(slices, PROJECTIONS, blocks)
    sums = in_cache.new_zeros(slices, SUMS)
    sums[:, 0] = length * width
    largest = torch.zeros_like(sums[:, 0])
    for part, signs_of_rows in zip(x.split(at_once), of_rows.split(at_once)):
        part64 = in_cache[: len(part)]
        part64[..., before : before + width] = part
        largest = torch.maximum(largest, torch.maximum(part.amax((0, 2)), -part.amin((0, 2))))
        sums[:, 1] += part64.sum((0, 2))
        part64 *= of_columns  # in place: a copy of the data would not stay in the cache
        sums_of_blocks = part64.unflatten(2, (blocks, in_block)).sum(3)
        by_block += torch.einsum("sp,sbk->bpk", signs_of_rows, sums_of_blocks)
        sums[:, 2] += part64.square_().sum((0, 2))
    numbers = torch.arange(blocks, device=x.device) + first_block
    projections = torch.arange(PROJECTIONS, device=x.device)[:, None] + numbers
    sums[:, 3:].index_add_(1, projections.flatten() % PROJECTIONS, by_block.flatten(1))
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
    if any(padding):
        values = torch.nn.functional.pad(values, padding)
    x = values.view(-1, 1, width)
    # Indices of rows and columns in the whole parameter, so that the signs do not depend on tp.
    rows = torch.arange(first_row, first_row + len(x), device=x.device)
    first_column = 0
    if dim == len(shape) - 1:
        first_column = spec.start
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
    sums, largest = sketch(x, spec.name, rows, first_column, spec.shape[-1])
    sums[:, 0] = before_stop - before_start
    return sums, largest


def of_activation(x: Tensor, positions: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums, (b, SUMS), and largest magnitudes, (b,), of the b samples of x (s, b, h).

    positions: (s,), those of the tokens in their samples. samples: (b,), numbers in the step.
    """
    sums, largest = sketch(x, "activation", positions, 0, x.shape[2])
    sums[:, 3:] *= signs("samples", samples)[:, None]
    return sums, largest
