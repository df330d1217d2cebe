"""The experts that a run chose for each token, written to a file or taken from one.

    mpirun -n 1 python train.py ... --record-routing routing.npy
    mpirun -n 8 python train.py ... --tp 2 --ep 4 --pin-routing routing.npy

Two runs in fp32 or bf16 round differently, and a router whose two best scores are close may then
choose another expert. Such a flip changes the loss more than any rounding. The second run above
takes the choices of the first, in whatever layout, so that what still differs is arithmetic. Two
runs that both record can be compared by their files: equal bytes are equal choices.

The file is an array in NumPy's format .npy: (samples of the run, blocks, seq_length, k + 1),
uint16. The first k elements of a token are 1 + the number of an expert, and ascend; the last is
their checksum with the token's place (`checksums`). All are 0 if no expert was written: the block
has no experts, or the run has not come so far. A sample's index is its number in the run, so the
file does not depend on the layout. Files of older versions have k elements, without a checksum;
they are read, and a resumed run goes on writing them. Read layers/experts.py first.
"""

import math
import mmap
import os

import numpy as np
import torch
from torch import Tensor

from base.errors import FileError, UserError
from base.regular_files import open_regular
from config.schema import Config
from config.timeline import Timeline
from corpora.mapped_files import read_header
from data import first_of_micro_batch
from layers.experts import Router
from parallel import ParamFactory

PRIME = 65_521  # the largest prime below 2**16, so that a checksum fits an element
BASE = 40_503  # of the polynomial of a checksum
# What to do about a damaged file.
RECORD_AGAIN = "make the file again by a run with --record-routing"


class RoutingFile:
    """The open file, in which the routers of this rank record their choices, or read choices."""

    def __init__(self, config: Config, factory: ParamFactory, routers: dict[int, Router]):
        """Open the file of --pin-routing, or make the file of --record-routing; collective.

        routers: this rank's routers, by the number of the block; they get a BlockRouting. Raise
        UserError if the file does not have the shape that this run needs.
        """
        model = config.model
        self.layout = config.layout
        self.mesh = factory.mesh
        self.experts = model.experts
        self.pinned = config.run.pin_routing is not None
        self.path = config.run.routing_file or ""
        self.k = model.experts_per_token
        shape_of_sample = (model.layers, model.seq_length, self.k + 1)
        shape = (Timeline(config).total_samples, *shape_of_sample)
        if not self.pinned and self.mesh.rank == 0:
            if not os.path.exists(self.path):
                _make(self.path, shape)
            elif not config.run.resume:  # only a resumed run goes on in a file
                raise UserError(
                    f"--record-routing {self.path} exists: give another file, or remove it"
                )
            else:
                _lengthen(self.path, shape)
        # This all-reduce is a barrier: the other ranks open the file when rank 0 has made it.
        self.mesh.world.at_once.all_reduce(torch.zeros((), device=factory.device)).wait()
        self.table, self.offset = _opened(self.path)
        samples, *axes_of_sample = self.table.shape
        # A file may have more samples than the run has: those of a longer run, or of more steps
        # that were planned before the run was resumed.
        without_checksums = (*shape_of_sample[:2], self.k)
        fits = tuple(axes_of_sample) in (shape_of_sample, without_checksums)
        if samples < shape[0] or not fits:
            axes = "samples, blocks, seq-length, experts-per-token"
            if axes_of_sample[-1] == self.k + 1:
                axes_of_sample[-1] = self.k  # without the checksum
            needed = (shape[0], *without_checksums)
            raise FileError(
                f"{self.path} has {(samples, *axes_of_sample)} ({axes}), but this run has {needed}"
            )
        # The table is mapped for reading only. --record-routing writes through this descriptor.
        self.descriptor = -1 if self.pinned else os.open(self.path, os.O_WRONLY)
        self.first_sample = 0  # the number, in the run, of the first sample of the step
        # The positions in a sample of this rank's part of the sequence; `begin_step` sets them.
        self.positions = np.zeros(0, np.int64)
        self.blocks = [BlockRouting(self, block) for block in routers]
        for router, block in zip(routers.values(), self.blocks):
            router.routing = block

    def begin_step(self, consumed: int, length: int) -> None:
        """Prepare for the forward passes of the step that starts at sample `consumed`.

        length: the tokens of each sample in this step.
        """
        for block in self.blocks:
            block.passes = 0
        self.first_sample = consumed
        positions = self.mesh.cp.balanced_shard(torch.arange(length), 0)
        if self.layout.sequence_parallel:
            positions = self.mesh.tp.shard(positions)
        self.positions = positions.numpy()

    def first_of(self, micro_batch: int) -> int:
        """Return the number, in the run, of the first sample of this replica's micro-batch.

        micro_batch: the number of the micro-batch in the step, on this replica.
        """
        dp_rank = self.mesh.dp.rank
        return first_of_micro_batch(self.first_sample, micro_batch, self.layout, dp_rank)

    def write(self, sample: int, block: int, positions: np.ndarray, chosen: np.ndarray) -> None:
        """Write the choices of n tokens of a sample in a block.

        positions: (n,), ascending. chosen: the numbers of the experts, (n, k). They are written
        with pwrite and not through a memory map: on some shared file systems a map writes whole
        pages, and so would overwrite what other nodes have written to the same page.
        """
        _, blocks, length, width = self.table.shape
        stored = chosen + 1
        if width > self.k:
            stored = np.column_stack([stored, checksums(stored, sample, block, positions)])
        # Each range of adjacent positions is one write: 0 1 2 6 7 is cut at index 3.
        cuts = np.flatnonzero(np.diff(positions) != 1) + 1
        for adjacent, experts in zip(np.split(positions, cuts), np.split(stored, cuts)):
            # The index of the first element in the array (samples, blocks, length, width).
            element = ((sample * blocks + block) * length + int(adjacent[0])) * width
            data = experts.astype("<u2").tobytes()
            # The elements begin at `offset` in the file, and an element has 2 bytes.
            os.pwrite(self.descriptor, data, self.offset + 2 * element)


def checksums(
    stored: np.ndarray,
    sample: np.ndarray | int,
    block: int,
    positions: np.ndarray,
) -> np.ndarray:
    """Return the checksum of each token's elements and place, (n,), from 1 to PRIME.

    stored: (n, k), 1 + the numbers of the experts. sample: of each token, or of all. positions:
    (n,). The sum of all values times powers of BASE, modulo a prime: no change of a single value
    leaves it as it is, and neither does an exchange of two tokens in general.
    """
    total = np.zeros(len(stored), np.int64)
    for value in (sample, block, positions, *stored.T):
        total = (total * BASE + np.asarray(value, np.int64)) % PRIME
    return total + 1


def _make(path: str, shape: tuple[int, ...]) -> None:
    """Make a sparse file of uint16 zeros of that shape; UserError if it cannot be written."""
    header = {"descr": "<u2", "fortran_order": False, "shape": shape}
    try:
        with open(path, "xb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + 2 * math.prod(shape))
    except OSError as error:
        raise FileError(f"--record-routing {path}: {error.strerror}") from None


def _lengthen(path: str, shape: tuple[int, ...]) -> None:
    """Add zeros to a file that has fewer samples than `shape`, of a run that became longer.

    NumPy's header leaves room for a larger first number. A file of another kind stays as it is.
    """
    table, offset = _opened(path)
    if table.shape[1:] != shape[1:] or table.shape[0] >= shape[0]:
        return
    header = {"descr": "<u2", "fortran_order": False, "shape": shape}
    try:
        with open(path, "r+b") as file:
            np.lib.format.write_array_header_1_0(file, header)
            if file.tell() != offset:
                raise FileError(f"--record-routing {path} has no room for {shape[0]} samples")
            file.truncate(offset + 2 * math.prod(shape))
    except OSError as error:
        raise FileError(f"--record-routing {path}: {error.strerror}") from None


def _opened(path: str) -> tuple[np.ndarray, int]:
    """Return a file of --record-routing, mapped for reading, and where its elements begin.

    Raise UserError, before anything is mapped, if it is no regular file, or if its header does not
    fit the bytes that are there.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            shape, is_fortran, dtype = read_header(file)
            offset = file.tell()
            if dtype != np.dtype("<u2") or len(shape) != 4 or is_fortran:
                raise ValueError(f"it has {len(shape)} axes of {dtype}, not 4 of uint16")
            if min(shape) < 0 or offset + 2 * math.prod(shape) != size:
                raise ValueError(f"its header says {shape}, and it has {size:,} bytes")
            if not size - offset:
                return np.zeros(shape, np.uint16), offset
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except (OSError, ValueError, EOFError) as error:
        raise FileError(f"{path} is no file of --record-routing: {error}") from None
    return np.frombuffer(mapped, "<u2", offset=offset).reshape(shape), offset


class BlockRouting:
    """Records or replaces the choices of one block's router.

    All schedules do the forward passes of a stage in the order of the micro-batches, so the number
    of a forward pass in its step is the number of its micro-batch.
    """

    def __init__(self, file: RoutingFile, block: int):
        """Begin before the first step; block: the number of the block in the whole model.

        passes: counts the forward passes in a step, so that a pass knows its micro-batch.
        """
        self.file = file
        self.block = block
        self.passes = 0  # forward passes so far in this step

    def settle(self, chosen: Tensor, start: int, samples: int) -> Tensor:
        """Return the experts to use for T tokens, (T, k): `chosen`, or the file's experts.

        The router calls this method in each forward pass; the host waits for the device. chosen:
        the router's choice, (T, k). start: the first token's index among the micro-batch's tokens
        in the order (s, b). samples: b. Raise UserError if the file has no choice for a token.
        """
        file = self.file
        first_sample = file.first_of(self.passes)
        self.passes += 1
        # In the order (s, b), token i is of sample i % b, at row i // b of this rank's positions.
        indices = np.arange(start, start + len(chosen))
        sample_of_token = indices % samples
        positions = file.positions[indices // samples]
        if file.pinned:
            # (T, k): 1 + the number of an expert, or 0 where no expert was written
            place = first_sample + sample_of_token, self.block, positions
            elements = file.table[place].astype(np.int64)
            experts = elements[:, : file.k] - 1
            if (experts < 0).any():
                last = first_sample + samples - 1
                raise FileError(
                    f"--pin-routing {file.path} has no experts for a sample from {first_sample} "
                    f"to {last}: the run that wrote it did not train on that; record a longer run"
                )
            if elements.shape[1] > file.k:
                right = checksums(elements[:, : file.k], *place)
                if (wrong := elements[:, file.k] != right).any():
                    damaged = first_sample + int(sample_of_token[wrong][0])
                    raise FileError(
                        f"--pin-routing {file.path} is damaged: the experts of sample {damaged} in "
                        f"block {self.block} do not have their checksum; {RECORD_AGAIN}"
                    )
            # The k experts of a token are different, and ascend.
            if (np.diff(experts, axis=-1) <= 0).any():
                last = first_sample + samples - 1
                raise FileError(
                    f"--pin-routing {file.path} is damaged: the experts of a token in samples "
                    f"{first_sample} to {last}, block {self.block}, do not ascend; {RECORD_AGAIN}"
                )
            if (experts >= file.experts).any():
                numbers = f"expert {experts.max()}, but this run has experts({file.experts})"
                raise FileError(f"--pin-routing {file.path} has {numbers}")
            return torch.from_numpy(experts).to(chosen.device)
        experts = chosen.cpu().numpy()
        for sample in range(samples):
            of_sample = sample_of_token == sample
            file.write(first_sample + sample, self.block, positions[of_sample], experts[of_sample])
        return chosen
