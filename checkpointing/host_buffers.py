"""Host memory into which a save copies this rank's state; every save uses it again.

    buffers = HostBuffers(device)
    buffers.begin_pinning(count, {"weights": torch.float32})   # on a GPU: in a thread, ahead
    buffers.copy("weights", runs, count, torch.float32)
    arrays = buffers.arrays("weights")

For a GPU the memory is pinned. That takes seconds, which would be part of the first save's pause.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

SMALL_PINNED_BUFFER = 2**18  # elements


class HostBuffers:
    """The buffers of one rank, by kind of tensor."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pinned = device.type == "cuda"
        self._buffers: dict[str, list[Tensor]] = {}
        self._pinning: Future[dict[str, list[Tensor]]] | None = None  # buffers to come

    def begin_pinning(self, count: int, types: dict[str, torch.dtype]) -> None:
        """Allocate `count` elements of each kind in a thread, if the memory is to be pinned."""
        if not self.pinned or not count:
            return

        def allocate() -> dict[str, list[Tensor]]:
            torch.cuda.set_device(self.device)  # each thread has a current device of its own
            return {kind: self._allocate(count, dtype) for kind, dtype in types.items()}

        threads = ThreadPoolExecutor(1, thread_name_prefix="pinning")
        self._pinning = threads.submit(allocate)
        threads.shutdown(wait=False)

    def copy(self, kind: str, runs: Iterable[Tensor], count: int, dtype: torch.dtype) -> None:
        """Copy runs of `count` elements in all, one behind the other; from a GPU the copy has only
        begun. Raises what `begin_pinning` has met.
        """
        if self._pinning is not None:
            self._buffers |= self._pinning.result()
            self._pinning = None
        if kind not in self._buffers:
            self._buffers[kind] = self._allocate(count, dtype)
        if self.pinned:
            _copy_to_pinned(runs, self._buffers[kind])
        else:  # half the time of copies one by one
            torch.cat(list(runs), out=self._buffers[kind][0])

    def finish(self) -> None:
        """Wait until every copy has ended."""
        if self.pinned:
            torch.cuda.synchronize(self.device)

    def arrays(self, kind: str) -> list[np.ndarray]:
        """What was copied, as arrays that share the buffers' memory."""
        return [buffer.numpy() for buffer in self._buffers[kind]]

    def _allocate(self, count: int, dtype: torch.dtype) -> list[Tensor]:
        sizes = _pinned_sizes(count) if self.pinned else [count]
        return [torch.empty(size, dtype=dtype, pin_memory=self.pinned) for size in sizes]


def _pinned_sizes(count: int) -> list[int]:
    """Elements of the buffers that hold `count`: powers of two, and the last one the rest.

    torch rounds pinned memory up to a power of two, so one buffer could take twice its size.
    """
    sizes = []
    while count > SMALL_PINNED_BUFFER:
        sizes.append(2 ** (count.bit_length() - 1))
        count -= sizes[-1]
    return [*sizes, count] if count else sizes


def _copy_to_pinned(runs: Iterable[Tensor], buffers: list[Tensor]) -> None:
    """Begin to copy runs of elements, one behind the other, into buffers of as many."""
    rest = iter(buffers)
    room = next(rest)
    for run in runs:
        while len(run):
            room = room if len(room) else next(rest)
            n = min(len(run), len(room))
            room[:n].copy_(run[:n], non_blocking=True)
            run = run[n:]
            room = room[n:]
