"""Sketches of tensors, 12 numbers each; the sketches of a tensor's parts add up to the tensor's.

    count, sum, sum of squares, largest magnitude, 8 projections        of a tensor, all in fp64

Each element counts in one projection, which is the sum of its elements with random signs. The
columns of a tensor are divided into 8 blocks, and the number of the projection is that of the block
plus that of the row, modulo 8: in a matrix with 32 columns, elements (5, 0..3) count in projection
5, (5, 4..7) in 6, (6, 0..3) in 6. So the elements of a row and of a column are spread over all
projections. The sign is the product of signs that are drawn for the row and for the column. Both
follow from the element's global index alone, so the sum of the parts' sketches is the same in all
layouts. The sum of the squared differences between two tensors' projections estimates the square of
the norm of their difference.

While parts are added, the largest magnitude, of which the maximum counts, is held apart from the
`sums`, which are the other 11 numbers in this order: count, sum, sum of squares, 8 projections.
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
NUMBERS = SUMS + 1  # all numbers of a sketch
SQUARES = 2  # the index of the sum of squares, in a sketch and in its sums
PROJECTED = slice(4, None)  # the indices of the projections in a sketch
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
        # The largest magnitude goes between the three first sums and the projections.
        first, projections = self.sums.split((3, PROJECTIONS), 1)
        return torch.cat([first, self.largest[:, None], projections], 1).cpu().numpy()


def signs(key: str, index: Tensor) -> Tensor:
    """Return a sign, +1 or -1, for each of n indices along one dimension of a tensor: fp64, (n,).

    A random number is drawn for each index, and its last bit is the sign.

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

    The count in the sums counts all elements. name: the signs depend on it. rows: (s,), the
    numbers of the rows in the whole tensor. first_column: the number of x's first column in the
    whole tensor, which has `columns` columns.
    """
    length, slices, width = x.shape
    # x has `width` columns of the whole tensor, which may begin and end in the middle of a block.
    # They are copied into whole blocks, `before` columns after the beginning of the first block.
    in_block = -(-columns // PROJECTIONS)  # columns of a block, rounded up
    before = first_column % in_block
    first_block = first_column // in_block
    blocks = -(-(before + width) // in_block)  # the number of blocks that x touches
    column_numbers = torch.arange(blocks * in_block, device=x.device) + first_block * in_block
    of_columns = signs(f"{name} columns", column_numbers)
    # of_rows, (s, 8): a row with the number r has its sign in column r % 8, zeros in the others.
    of_rows = torch.zeros(length, PROJECTIONS, dtype=torch.float64, device=x.device)
    of_rows.scatter_(1, (rows % PROJECTIONS)[:, None], signs(f"{name} rows", rows)[:, None])
    at_once = max(1, AT_ONCE // (slices * len(of_columns)))  # rows that are converted at a time
    in_cache = x.new_zeros(min(at_once, length), slices, len(of_columns), dtype=torch.float64)
    # by_block[b, p, k]: of slice b, the sum of elements times signs over the columns of block k and
    # the rows whose number is p modulo 8.
    by_block = in_cache.new_zeros(slices, PROJECTIONS, blocks)
    sums = in_cache.new_zeros(slices, SUMS)
    sums[:, 0] = length * width
    largest = torch.zeros_like(sums[:, 0])
    for part, signs_of_rows in zip(x.split(at_once), of_rows.split(at_once)):
        part64 = in_cache[: len(part)]  # some rows of x in fp64; columns outside of x stay 0
        part64[..., before : before + width] = part
        largest = torch.maximum(largest, torch.maximum(part.amax((0, 2)), -part.amin((0, 2))))
        sums[:, 1] += part64.sum((0, 2))  # the sum of the elements, without signs
        part64 *= of_columns  # multiplied in place, since a copy would not stay in the cache
        sums_of_blocks = part64.unflatten(2, (blocks, in_block)).sum(3)
        by_block += torch.einsum("sp,sbk->bpk", signs_of_rows, sums_of_blocks)
        sums[:, 2] += part64.square_().sum((0, 2))  # squares do not depend on the signs
    # by_block[b, p, k] is added to projection (p + the number of block k) % 8 of slice b. In `sums`
    # the projections come after the first 3 sums.
    numbers = torch.arange(blocks, device=x.device) + first_block
    projections = torch.arange(PROJECTIONS, device=x.device)[:, None] + numbers
    sums[:, 3:].index_add_(1, projections.flatten() % PROJECTIONS, by_block.flatten(1))
    return sums, largest


def shard_sketch(shard: ParamShard, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums, (1, SUMS), and largest magnitude, (1,), of a shard of a parameter.

    values: the shard's elements, flat. Padding of the local tensor, which is 0, is not counted. The
    shard is elements [start, stop) of the rank's local tensor, which has rows spec.start to
    spec.stop of the whole parameter along dimension spec.dim (the part of tensor parallelism).
    """
    spec = shard.spec
    shape = shard.shape
    width = shape[-1]
    dim = spec.dim or 0
    first_row = shard.start // width
    # The numbers of zeros that complete the shard's first row and its last row.
    padding = shard.start % width, -shard.stop % width
    if any(padding):
        values = torch.nn.functional.pad(values, padding)
    x = values.view(-1, 1, width)
    # `rows` becomes the indices of x's rows in the whole parameter, so that signs do not depend on
    # tp. For example, gate and up are one tensor (2, 8, h), split along dim 1 over 2 ranks: rank 1
    # has rows 4..7 (of gate) and 12..15 (of up), in two runs of 4 rows.
    rows = torch.arange(first_row, first_row + len(x), device=x.device)
    first_column = 0
    if dim == len(shape) - 1:  # the parameter's columns are split, its rows are whole
        first_column = spec.start
    else:
        inner = math.prod(shape[dim + 1 : -1])
        run = shape[dim] * inner  # so many rows of the local tensor are adjacent in the whole one
        rows = rows + rows // run * (spec.shape[dim] * inner - run) + spec.start * inner
    # The local tensor is in memory a row of runs of `run` elements, each of which begins with
    # `real` elements and ends with padding. The shard's count, without padding, is the number of
    # real elements before its end less the number before its start.
    inner = math.prod(shape[dim + 1 :])
    run = shape[dim] * inner
    real = (spec.stop - spec.start) * inner
    before_start, before_stop = (
        element // run * real + min(element % run, real) for element in (shard.start, shard.stop)
    )
    sums, largest = sketch(x, spec.name, rows, first_column, spec.shape[-1])
    sums[:, 0] = before_stop - before_start
    return sums, largest


def activation_sketch(x: Tensor, positions: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums, (b, SUMS), and largest magnitudes, (b,), of the b samples of x (s, b, h).

    positions: (s,), the places of the tokens in their samples. samples: (b,), the numbers of the
    samples in the step. The signs depend on both, so that exchanged samples change the sketch of
    their sum.
    """
    sums, largest = sketch(x, "activation", positions, 0, x.shape[2])
    # In a projection (the sums from 3 on), a sample's elements have the sign of the sample too.
    sums[:, 3:] *= signs("samples", samples)[:, None]
    return sums, largest
