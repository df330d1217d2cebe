"""Reads the micro-batches of a rank in threads, before the rank asks for them.

    reader = Prefetcher(shape=(4, 2048), pinned=True)
    reader.go_on(samples, 120, iter([120, 124, 128]))    the first samples of the next micro-batches
    rows = reader.take(samples, 120)
    reader.close()

A micro-batch is known by the number of its first sample: here, 120 stands for the samples 120 to
123. A read is the job to read one micro-batch; it waits in a queue until a thread takes it. A
sample's number alone determines its tokens, so a resumed run reads the same tokens.
"""

import queue
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from base.errors import CorpusError
from config.run_options import Data
from corpora.objectives import Objective, Readable
from corpora.streams import PhasedSamples

READERS = 4  # the number of threads: so many reads can wait for a disk at the same time
AHEAD = 8  # so many micro-batches are read, or in the queue, before the rank asks for them
SECONDS_TO_END = 2.0  # the longest wait for a thread that still reads when the run ends


class Rows(NamedTuple):
    """A micro-batch as it was read: what `Prefetcher.take` returns.

    tensors: the tokens, labels and so on, (b, s) each, by the names of `Objective.fields`. targets:
    the number of labels that count in the loss.
    """

    tensors: dict[str, Tensor]
    targets: int


class _Read(Future[None]):
    """The job to read a micro-batch, and its state; the Future says when the read has ended.

    samples: the samples to read from. sample: the number of the sample that is read next. tensors:
    where the rows go. count: how many of the labels read so far count in the loss.
    """

    def __init__(
        self,
        samples: Readable,
        first: int,
        objective: Objective,
        tensors: dict[str, Tensor],
    ):
        """Prepare the read of a micro-batch, which `run` then does.

        first: the number of the micro-batch's first sample. objective: makes a row of each sample.
        tensors: the memory for the rows, (b, s) each. `count` adds up the labels, in the rows that
        have been read, that count in the loss.
        """
        super().__init__()
        self.samples = samples
        self.sample = first
        self.objective = objective
        self.tensors = tensors
        self.count = 0

    def run(self) -> None:
        """Read the micro-batch's samples into `tensors`; called in a reader thread.

        `sample` is the number of the next sample to read, and `count` the number of labels, in the
        samples that have been read, that count in the loss.
        """
        # Rows are copied with numpy: with tensors, torch would start a pool of threads in each
        # thread that copies much.
        arrays = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        for place in range(len(arrays["tokens"])):
            row = self.objective.row(self.samples, self.sample)
            for name, values in row.items():
                arrays[name][place] = values
            if self.objective.masks_loss:  # labels that do not count are negative
                self.count += int((row["labels"] >= 0).sum())
            else:
                self.count += len(row["labels"])
            self.sample += 1

    @property
    def rows(self) -> Rows:
        """The micro-batch, which is complete once `run` has ended; `take` returns it then.

        It has the tensors with the rows, and the number of labels that count in the loss.
        """
        return Rows(self.tensors, self.count)


class Prefetcher:
    """Reads micro-batches ahead, in threads that start when the first micro-batch is asked for.

    A rank in the middle of a pipeline asks for no micro-batch, so it starts no threads.
    shape: (micro-batch size, seq_length). pinned: whether to allocate pinned memory, from which a
    GPU copies asynchronously. seconds: the longest wait for a micro-batch. objective: makes the
    rows; None: the labels are the next tokens, and all count.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        pinned: bool = False,
        seconds: float = 240.0,
        objective: Objective | None = None,
    ):
        """Prepare to read; the threads start with the first read.

        shape: micro-batch size and seq_length. pinned: whether memory is pinned, for asynchronous
        copies to a GPU. seconds: how long `take` waits at most. objective: makes the rows; None:
        labels are the next tokens. `_jobs` is the queue, in which None ends a thread.
        """
        self.shape = shape
        self.pinned = pinned
        self.seconds = seconds
        self.objective = objective or Objective(Data())
        self._jobs: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        # By id() of the samples (a run has several: train, validation and so on): an iterator over
        # the first samples of the micro-batches whose reads are not in the queue yet.
        self._upcoming: dict[int, Iterator[int]] = {}
        # By id() of the samples, then by first sample: the reads that have been put into the queue
        # and whose micro-batches have not been taken. They may be waiting, begun or ended.
        self._reads: dict[int, dict[int, _Read]] = {}
        # `close` ends the threads. If nobody calls it, it is called when this object is freed, so
        # no thread outlives the object.
        self.close = weakref.finalize(self, _end, self._jobs, self._threads, self._reads)

    def go_on(self, samples: Readable, first: int, upcoming: Iterator[int]) -> None:
        """Begin to read ahead the micro-batches that the rank will take next.

        Called before the first micro-batch of a global batch is taken. upcoming: the first sample
        of each micro-batch from now on; it begins with `first`. Do nothing if the micro-batch at
        `first` is in the queue already, because an earlier call has foreseen it. Otherwise the
        earlier call has foreseen other micro-batches; their reads are dropped.
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

        Raise the error of the read, or UserError, with the file's name, if the read takes too long.
        """
        # Usually the read of this micro-batch was put into the queue earlier; otherwise `_begin`
        # puts it there now. Then `_fill` puts reads of later micro-batches into the queue.
        read = self._reads.setdefault(id(samples), {}).pop(first, None)
        read = read or self._begin(samples, first)
        self._fill(samples)
        try:
            read.result(self.seconds)
        except TimeoutError:
            if read.done():  # the read has ended: it raised this TimeoutError itself
                raise
            file = samples.file_of(read.sample)
            late = f"tokens of sample {read.sample} have not arrived within {self.seconds:g} s"
            raise CorpusError(f"{late} from {file}: does its file system answer?") from None
        return read.rows

    def _fill(self, samples: Readable) -> None:
        """Begin to read the next micro-batches of `samples`, until AHEAD are read ahead.

        Stop earlier if no further micro-batch is foreseen, or if the next one would need samples
        after the last of `samples`. Called by `go_on`, and whenever a micro-batch is taken.
        """
        reads = self._reads[id(samples)]
        upcoming = self._upcoming.get(id(samples), iter(()))
        while len(reads) < AHEAD:
            first = next(upcoming, None)
            if first is None or first + self.shape[0] > len(samples):
                return
            reads[first] = self._begin(samples, first)

    def _begin(self, samples: Readable, first: int) -> _Read:
        """Put the read of a micro-batch in the queue, and return it.

        The threads are started if they are not running. Memory for the micro-batch is allocated
        here, not in the threads: a tensor for each array of its rows (`objective.fields`).
        """
        shape = self.shape
        if isinstance(samples, PhasedSamples):  # samples of phases may have different lengths
            shape = (shape[0], samples.length_of(first))
        tensors = {
            name: torch.empty(shape, dtype=torch.int64, pin_memory=self.pinned)
            for name in self.objective.fields
        }
        read = _Read(samples, first, self.objective, tensors)
        while len(self._threads) < READERS:
            # Daemon threads, because a read that never returns must not keep the process alive.
            thread = threading.Thread(target=_work, args=(self._jobs,), name="reader", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(read)
        return read


def _work(jobs: "queue.SimpleQueue[_Read | None]") -> None:
    """Read the micro-batches in the queue until a None comes; runs in each reader thread.

    The thread that waits in `Prefetcher.take` gets the read's result or its error.
    """
    while (read := jobs.get()) is not None:
        if not read.set_running_or_notify_cancel():  # the read has been dropped
            continue
        try:
            read.run()
        except BaseException as error:  # `take` raises it in the thread that takes the micro-batch
            read.set_exception(error)
        else:
            read.set_result(None)
        # While this thread waits for the next job, `read` would keep the tensors of this one.
        del read


def _end(
    jobs: "queue.SimpleQueue[_Read | None]",
    threads: list[threading.Thread],
    reads: dict[int, dict[int, _Read]],
) -> None:
    """Drop the reads that have not begun, and end the threads; wait SECONDS_TO_END for a thread.

    The finalizer `Prefetcher.close` calls this, with the Prefetcher's fields, because the object
    itself may be freed by then. Each None in the queue ends one thread.
    """
    for reads_of_samples in list(reads.values()):
        for read in list(reads_of_samples.values()):
            read.cancel()
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        # Python may free the Prefetcher, and so call this, in a reader thread, which cannot wait
        # for its own end.
        if thread is not threading.current_thread():
            thread.join(SECONDS_TO_END)
