"""Micro-batches of one rank, read by threads before the rank asks for them.

    reader = Prefetcher(shape=(4, 2048), pinned=True)
    reader.go_on(samples, 120, iter([120, 124, 128]))    the first samples of the next ones
    rows = reader.take(samples, 120)
    reader.close()

The samples' numbers alone determine their tokens, so a resumed run reads the same ones.
"""

import queue
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from config.messages import UserError
from config.run_options import Data
from corpora.objectives import Objective, Readable

READERS = 4  # threads: reads that wait for a disk or a file system at the same time
AHEAD = 8  # micro-batches that are read or being read before they are asked for
SECONDS_TO_END = 2.0  # the longest wait for a thread that still reads when the run ends


class Rows(NamedTuple):
    """A micro-batch as it was read.

    tensors: (b, s), by the names of `Objective.fields`. targets: labels that count in the loss.
    """

    tensors: dict[str, Tensor]
    targets: int


class _Read(Future[None]):
    """A micro-batch that is being read; `sample`: the number of the sample whose turn it is."""

    def __init__(
        self,
        samples: Readable,
        first: int,
        objective: Objective,
        tensors: dict[str, Tensor],
    ):
        super().__init__()
        self.samples = samples
        self.sample = first
        self.objective = objective
        self.tensors = tensors
        self.count = 0

    def run(self) -> None:
        """Read the micro-batch's samples, one after the other."""
        # Arrays, because torch would start a pool of threads in each thread that copies much.
        arrays = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        for place in range(len(arrays["tokens"])):
            row = self.objective.row(self.samples, self.sample)
            for name, values in row.items():
                arrays[name][place] = values
            some = self.objective.masks_loss
            self.count += int((row["labels"] >= 0).sum()) if some else len(row["labels"])
            self.sample += 1

    @property
    def rows(self) -> Rows:
        """The micro-batch, complete once `run` has ended."""
        return Rows(self.tensors, self.count)


class Prefetcher:
    """Reads micro-batches ahead, in threads that start when the first micro-batch is asked for.

    A rank in the middle of a pipeline asks for none, so it reads none and starts no threads.
    shape: (micro-batch size, seq_length). pinned: allocate pinned memory, from which a GPU copies
    asynchronously. seconds: a sample that has not arrived by then is an error. objective: default:
    predict every next token.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        pinned: bool = False,
        seconds: float = 240.0,
        objective: Objective | None = None,
    ):
        self.shape = shape
        self.pinned = pinned
        self.seconds = seconds
        self.objective = objective or Objective(Data())
        self._jobs: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        # By id of the samples: first samples of the next micro-batches, and the reads begun.
        self._upcoming: dict[int, Iterator[int]] = {}
        self._reads: dict[int, dict[int, _Read]] = {}
        # Called at the latest when this object is freed, so that no thread outlives it.
        self.close = weakref.finalize(self, _end, self._jobs, self._threads, self._reads)

    def go_on(self, samples: Readable, first: int, upcoming: Iterator[int]) -> None:
        """Read ahead the micro-batches of `upcoming`, the first of which begins at sample `first`;
        nothing changes if the micro-batch at `first` is read or being read already.
        """
        if first in self._reads.setdefault(id(samples), {}):
            return
        for read in self._reads[id(samples)].values():
            read.cancel()
        self._reads[id(samples)] = {}
        self._upcoming[id(samples)] = upcoming
        self._fill(samples)

    def take(self, samples: Readable, first: int) -> Rows:
        """Return the micro-batch whose first sample is `first`; wait until it is read.

        Raise the error of its read; UserError, with the file's name, if the read takes too long.
        """
        read = self._reads.setdefault(id(samples), {}).pop(first, None)
        read = read or self._begin(samples, first)
        self._fill(samples)
        try:
            read.result(self.seconds)
        except TimeoutError:
            if read.done():
                raise
            file = samples.file_of(read.sample)
            late = f"tokens of sample {read.sample} have not arrived within {self.seconds:g} s"
            raise UserError(f"{late} from {file}: does its file system answer?") from None
        return read.rows

    def _fill(self, samples: Readable) -> None:
        reads = self._reads[id(samples)]
        upcoming = self._upcoming.get(id(samples), iter(()))
        while len(reads) < AHEAD:
            first = next(upcoming, None)
            if first is None or first + self.shape[0] > len(samples):
                return
            reads[first] = self._begin(samples, first)

    def _begin(self, samples: Readable, first: int) -> _Read:
        tensors = {
            name: torch.empty(self.shape, dtype=torch.int64, pin_memory=self.pinned)
            for name in self.objective.fields
        }
        read = _Read(samples, first, self.objective, tensors)
        while len(self._threads) < READERS:
            # Daemons: a read that never returns does not keep the process from ending.
            thread = threading.Thread(target=_work, args=(self._jobs,), name="reader", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(read)
        return read


def _work(jobs: "queue.SimpleQueue[_Read | None]") -> None:
    """Read the micro-batches in the queue until it holds None: the work of a reader thread."""
    while (read := jobs.get()) is not None:
        if not read.set_running_or_notify_cancel():
            continue
        try:
            read.run()
        except BaseException as error:  # raised in the thread that takes the micro-batch
            read.set_exception(error)
        else:
            read.set_result(None)
        del read  # else its tensors would stay in memory until the next read


def _end(
    jobs: "queue.SimpleQueue[_Read | None]",
    threads: list[threading.Thread],
    reads: dict[int, dict[int, _Read]],
) -> None:
    """Drop the reads that have not begun, end the threads; wait SECONDS_TO_END for each of them."""
    for read in [read for own in reads.values() for read in own.values()]:
        read.cancel()
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(SECONDS_TO_END)
