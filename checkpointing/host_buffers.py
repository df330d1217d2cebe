"""Host memory into which a save copies this rank's state; every save uses the same memory.

    buffers = HostBuffers(device)
    buffers.begin_pinning(count, {"weights": torch.float32})   # on a GPU: in a thread, early
    buffers.copy("weights", runs, count, torch.float32)
    buffers.finish()
    arrays = buffers.arrays("weights")

For a GPU the memory is pinned. Pinning takes seconds, and without the thread these would be part of
the pause of the first save.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

SMALL_PINNED_BUFFER = 2**18  # elements; see `_pinned_sizes`: the most that the last buffer has


class HostBuffers:
    """The buffers of one rank, by kind of state ("weights", and the kinds of the optimizer)."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pinned = device.type == "cuda"
        self._buffers: dict[str, list[Tensor]] = {}
        # The result of `begin_pinning`, until the first `copy` takes it.
        self._pinning: Future[dict[str, list[Tensor]]] | None = None

    def begin_pinning(self, count: int, types: dict[str, torch.dtype]) -> None:
        """Begin to allocate `count` elements of each kind in a thread; for a GPU only."""
        if not self.pinned or not count:
            return

        def allocate() -> dict[str, list[Tensor]]:
            torch.cuda.set_device(self.device)  # the current device is set per thread
            return {kind: self._allocate(count, dtype) for kind, dtype in types.items()}

        threads = ThreadPoolExecutor(1, thread_name_prefix="pinning")
        self._pinning = threads.submit(allocate)
        threads.shutdown(wait=False)

    def copy(self, kind: str, runs: Iterable[Tensor], count: int, dtype: torch.dtype) -> None:
        """Copy runs, with `count` elements in all, one after the other into the buffers of a kind.

        From a GPU the copies have only begun on return: call `finish` before the buffers are read.
        An exception of the thread of `begin_pinning` is raised here.
        """
        if self._pinning is not None:
            self._buffers |= self._pinning.result()
            self._pinning = None
        if kind not in self._buffers:
            self._buffers[kind] = self._allocate(count, dtype)
        if self.pinned:
            _copy_to_pinned(runs, self._buffers[kind])
        else:  # torch.cat takes half the time of one copy per run
            torch.cat(list(runs), out=self._buffers[kind][0])

    def finish(self) -> None:
        """Wait until every copy has ended."""
        if self.pinned:
            torch.cuda.synchronize(self.device)

    def arrays(self, kind: str) -> list[np.ndarray]:
        """Return the copied elements of a kind as arrays that share the buffers' memory."""
        return [buffer.numpy() for buffer in self._buffers[kind]]

    def _allocate(self, count: int, dtype: torch.dtype) -> list[Tensor]:
        sizes = _pinned_sizes(count) if self.pinned else [count]
        return [torch.empty(size, dtype=dtype, pin_memory=self.pinned) for size in sizes]


def _pinned_sizes(count: int) -> list[int]:
    """Return the numbers of elements of the buffers that together hold `count` elements.

    torch rounds pinned memory up to a power of two, so a single buffer could take twice its size.
    So all buffers are powers of two, except for a small last one.
    """
    sizes = []
    while count > SMALL_PINNED_BUFFER:
        sizes.append(2 ** (count.bit_length() - 1))
        count -= sizes[-1]
    return [*sizes, count] if count else sizes


def _copy_to_pinned(runs: Iterable[Tensor], buffers: list[Tensor]) -> None:
    """Begin to copy runs of elements, one after the other, into buffers with as many elements."""
    rest = iter(buffers)
    room = next(rest)
    for run in runs:
        while len(run):
            room = room if len(room) else next(rest)
            n = min(len(run), len(room))
            room[:n].copy_(run[:n], non_blocking=True)
            run = run[n:]
            room = room[n:]
