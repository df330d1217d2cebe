"""The ranks of allreduce.py: collectives of a named group that return when they are done, numbers
of every rank, buffers, and the bytes that a rank may allocate.
"""

import psutil

from config.messages import UserError
from config.run_options import Run
from config.schema import Layout, rows_along
from distributed.context import start
from distributed.launch import Launch


class TorchWorld:
    """The ranks over NCCL or gloo, through the Group class that training uses."""

    def __init__(self, launch: Launch, run: Run, layout: dict[str, int]):
        import torch

        from distributed.mesh import Mesh

        self.torch = torch
        self.context = start(launch, run)
        self.rank, self.size = self.context.rank, self.context.size
        mesh = Mesh(placed(layout, self.size).axes, self.context)
        self.groups = {"world": mesh.world, "tp": mesh.tp, "dp": mesh.dp, "pp": mesh.forward}
        self.nodes, self.device = self.context.nodes, self.context.device
        self.what = self.context.describe()
        self.what.pop("places")  # a line for every rank is too long

    def gather(self, numbers: list[float]) -> list[list[float]]:
        """Every rank's numbers, in rank order."""
        own = self.torch.tensor(numbers, dtype=self.torch.float64, device=self.device)
        rows = own.new_empty(self.size * len(own))
        self.groups["world"].all_gather(rows, own).wait()
        return rows.view(self.size, -1).tolist()

    def buffer(self, elements: int):
        """Zeros in the device's memory."""
        return self.torch.zeros(elements, device=self.device)

    def ranks(self, group: str) -> tuple[int, ...]:
        """The ranks of this rank's group."""
        return self.groups[group].ranks

    def all_reduce(self, group: str, buffer) -> None:
        """Sum a buffer over the group, in place; done when it returns."""
        self._finish(self.groups[group].all_reduce(buffer))

    def reduce_scatter(self, group: str, output, source) -> None:
        """Sum `source` over the group; this rank's slice into `output`."""
        self._finish(self.groups[group].reduce_scatter(output, source))

    def all_gather(self, group: str, output, source) -> None:
        """Every rank's `source`, joined, into `output`."""
        self._finish(self.groups[group].all_gather(output, source))

    def send(self, group: str, buffer, to: int) -> None:
        """Send a buffer to a position in the group."""
        self._finish(self.groups[group].send(buffer, to))

    def receive(self, group: str, buffer, source: int) -> None:
        """Receive a buffer from a position in the group."""
        self._finish(self.groups[group].receive(buffer, source))

    def plain_all_reduce(self, buffer) -> None:
        """torch's own all-reduce over the world, without the Group class."""
        self.torch.distributed.all_reduce(buffer, group=self.groups["world"].handle)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the GPU, if the device is one."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)

    def free_bytes(self) -> float:
        """Bytes that this rank may allocate for buffers."""
        if self.device.type == "cuda":
            return self.torch.cuda.mem_get_info(self.device)[0] / 3
        return psutil.virtual_memory().available / self.context.local.size / 4

    def stop(self) -> None:
        """End this rank; collective."""
        self.context.stop()

    def _finish(self, handle) -> None:
        handle.wait()
        self.synchronize()


def placed(layout: dict[str, int], size: int) -> Layout:
    """The layout with dp filled in; UserError if it does not divide the ranks."""
    tp, pp = layout["tp"], layout["pp"]
    if size % (tp * pp):
        raise UserError(f"tp({tp}) * pp({pp}) * dp(?) does not divide {size} ranks")
    return Layout(tp=tp, pp=pp, dp=size // (tp * pp))


def group_rows(layout: Layout) -> dict[str, list[tuple[int, ...]]]:
    """The ranks of every group of each kind, as the mesh has them."""
    axes = {"world": tuple(layout.axes), "tp": ("tp",), "dp": ("dp",), "pp": ("pp",)}
    return {name: rows_along(layout.axes, along) for name, along in axes.items()}
