"""The experts that a run chose for each token, written to a file or taken from one.

    mpirun -n 1 python train.py ... --record-routing routing.npy
    mpirun -n 8 python train.py ... --tp 2 --ep 4 --pin-routing routing.npy

Two runs in fp32 or bf16 round differently, and a router whose two best scores are close may then
choose another expert. Such a flip changes the loss more than any rounding. The second run above
takes the choices of the first, in whatever layout, so that what still differs is arithmetic. Two
runs that both record can be compared by their files: equal bytes are equal choices.

The file is an array of NumPy's own format: (samples of the run, blocks, seq_length, k), uint16.
An element is 1 + the number of an expert; the k experts of a token ascend. 0 says that
no expert was written: the block has none, or the run has not come so far. Samples have the numbers
that they have in the run, so the file does not depend on the layout. Read experts.py first.
"""

import os

import numpy as np
import torch
from torch import Tensor

from config.messages import UserError
from config.schema import Config
from data import first_of_micro_batch
from experts import Router
from parallel import ParamFactory


class RoutingFile:
    """The file's elements as this rank reads or writes them, with the place of its tokens.

    With it, the routers of this rank record their choices, or take those of the file.
    """

    def __init__(self, config: Config, factory: ParamFactory, routers: dict[int, Router]):
        """Open --pin-routing, or make --record-routing; collective over the world.

        routers: those of this rank, by the number of the block.

        Raise UserError if the file does not have the shape that this run needs.
        """
        model = config.model
        self.layout = config.layout
        self.mesh = factory.mesh
        self.experts = model.experts
        self.pinned = config.run.pin_routing is not None
        self.path = config.run.routing_file or ""
        of_sample = (model.layers, model.seq_length, model.experts_per_token)
        shape = (config.total_samples, *of_sample)
        makes = not self.pinned and not os.path.exists(self.path)
        if makes and self.mesh.rank == 0:
            _make(self.path, shape)
        self.mesh.world.at_once.all_reduce(torch.zeros((), device=factory.device)).wait()
        self.table = _opened(self.path)
        held = self.table.shape
        enough = held[:1] >= shape[:1] if self.pinned else held == shape
        if not enough or held[1:] != shape[1:]:
            axes = "samples, blocks, seq-length, experts-per-token"
            raise UserError(f"{self.path} has {held} ({axes}), but this run has {shape}")
        self.descriptor = -1 if self.pinned else os.open(self.path, os.O_WRONLY)
        self.first_sample = 0  # of the step's global batch
        self.positions = np.zeros(0, np.int64)  # of this rank's rows of a sample
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
        """Return the number of the first sample of this replica's micro-batch in the step."""
        dp_rank = self.mesh.dp.rank
        return first_of_micro_batch(self.first_sample, micro_batch, self.layout, dp_rank)

    def write(self, sample: int, block: int, positions: np.ndarray, chosen: np.ndarray) -> None:
        """Write the choices (n, k) of n tokens of a sample, at their positions, (n,), ascending.

        Written by offsets and not through a memory map: on some shared file systems a map writes
        whole pages, with the parts of them that other nodes have written since.
        """
        _, blocks, length, k = self.table.shape
        cuts = np.flatnonzero(np.diff(positions) != 1) + 1
        for run, rows in zip(np.split(positions, cuts), np.split(chosen, cuts)):
            element = ((sample * blocks + block) * length + int(run[0])) * k
            data = (rows + 1).astype("<u2").tobytes()
            os.pwrite(self.descriptor, data, self.table.offset + 2 * element)


def _make(path: str, shape: tuple[int, ...]) -> None:
    """Make a file of that shape, full of zeros, for which the disk needs no room yet."""
    header = {"descr": "<u2", "fortran_order": False, "shape": shape}
    try:
        with open(path, "xb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + 2 * int(np.prod(shape)))
    except OSError as error:
        raise UserError(f"--record-routing {path}: {error.strerror}") from None


def _opened(path: str) -> np.memmap:
    try:
        table = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no file of --record-routing: {error}") from None
    if table.dtype != np.uint16 or table.ndim != 4:
        raise UserError(f"{path} has {table.ndim} axes of {table.dtype}, not 4 of uint16")
    return table


class BlockRouting:
    """The choices of one block's router.

    All schedules do the forward passes of a stage in the order of the micro-batches, so that the
    number of a pass in its step is that of its micro-batch.
    """

    def __init__(self, file: RoutingFile, block: int):
        self.file = file
        self.block = block
        self.passes = 0  # of this step

    def settle(self, chosen: Tensor, places: Tensor, samples: int) -> Tensor:
        """Return the experts to take for the tokens, (T, k): `chosen`, or those of the file.

        places: of the tokens among those of the tensor group, in the order (s, b); samples: b. The
        host waits for the device. Raise UserError if the file has no choice for a token.
        """
        file = self.file
        first = file.first_of(self.passes)
        self.passes += 1
        numbers = places.cpu().numpy()
        sample_of = numbers % samples
        positions = file.positions[numbers // samples]
        if file.pinned:
            taken = file.table[first + sample_of, self.block, positions].astype(np.int64) - 1
            if (taken < 0).any():
                last = first + samples
                raise UserError(f"--pin-routing {file.path} has no experts for sample {last}")
            if (taken >= file.experts).any():
                both = f"expert {taken.max()}, but this run has experts({file.experts})"
                raise UserError(f"--pin-routing {file.path} has {both}")
            return torch.from_numpy(taken).to(chosen.device)
        rows = chosen.cpu().numpy()
        for sample in range(samples):
            here = sample_of == sample
            file.write(first + sample, self.block, positions[here], rows[here])
        return chosen
