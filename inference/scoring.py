"""Scores the continuations of --eval-tasks, under any layout: all ranks get the same results.

    scorer = Scorer(pipeline, factory, config, read_tasks(config))      collective
    for task, result in scorer.results(): ...

One pass scores the requests of all tasks. Several requests share a sample, and a mask lets each
token see only its own request (corpora/tasks.py); with --objective prefix the tokens of a context
see all of it. A sample's number says which replica and which
micro-batch it is in, as in training. The ranks of the last stage add up the log-likelihoods of
their tokens by request, and one all-reduce adds up those of all ranks. trainer.py calls this file
during a run, sample.py for a checkpoint.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from base.errors import CorpusError
from config.schema import Config, Layout
from corpora.tasks import Packed, Task, TaskResult, TaskSet, pack, results
from data import Batch, first_of_micro_batch
from distributed.collectives import MAX
from layers.rotary import text_switch
from parallel import ParamFactory
from pipeline import Pipeline


class Scorer:
    """Evaluates the tasks of a run; `results` is collective over the world."""

    def __init__(self, pipeline: Pipeline, factory: ParamFactory, config: Config, tasks: TaskSet):
        """Pack the requests of all tasks into samples. Collective.

        pipeline: of the stages that score them. Raise UserError if the ranks have read other files.
        """
        self.pipeline = pipeline
        self.factory = factory
        self.mesh = factory.mesh
        self.layout = config.layout
        self.tasks = tasks
        model = config.model
        # With longrope, the tokens of the longest text that has the short factors.
        self.limit = text_switch(model)
        self.at_once = self.layout.micro_batch_size * self.layout.dp
        prefix = config.data.objective == "prefix"
        self.packed = pack(tasks.requests, model.seq_length, self.at_once, self.limit, prefix)
        digest = tasks.digest
        both = torch.tensor([digest, -digest], device=factory.device)
        self.mesh.world.at_once.all_reduce(both, MAX).wait()
        most, least = self.mesh.world.values(both)
        if most != -least:
            raise CorpusError(
                "--eval-tasks: the files have other rows on some ranks than on others: copy the "
                "same files to all nodes, or put them on a shared file system"
            )

    def results(self) -> list[tuple[Task, TaskResult]]:
        """Score all requests; return each task with its result. Collective."""
        log_likelihoods, misses = self.score()
        return [(task, results(task, log_likelihoods, misses)) for task in self.tasks.tasks]

    def score(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-likelihood of each request, and its tokens that are not the likeliest.

        Both are float64, (requests,), and equal on all ranks. Collective.
        """
        self.mesh.recorder.enter("tasks")
        count = len(self.tasks.requests)
        sums = torch.zeros(2, count, dtype=torch.float64, device=self.factory.device)

        def take(batch: Batch, scores: Tensor) -> None:
            """Add the scores of a micro-batch's tokens, (2, s, b), to those of their requests."""
            if self.mesh.tp.rank or batch.rows is None:  # all ranks of a tensor group have the same
                return
            losses, likeliest = scores.double()
            rows = batch.rows.t().flatten()
            is_miss = (batch.labels.t() >= 0) & (likeliest == 0)
            sums[0].index_add_(0, rows, -losses.flatten())
            sums[1].index_add_(0, rows, is_miss.double().flatten())

        micro_batches = -(-len(self.packed.samples) // self.at_once)
        batches = TaskBatches(self.packed, self.layout, self.mesh.dp.rank, self.limit, self.factory)
        self.pipeline.score(batches, micro_batches, take)
        self.mesh.world.at_once.all_reduce(sums).wait()
        log_likelihoods, misses = np.array(self.mesh.world.values(sums))
        return log_likelihoods, misses


class TaskBatches:
    """The micro-batches of one replica in a pass over the tasks: `batches(0)`, `batches(1)`, ..."""

    def __init__(
        self,
        packed: Packed,
        layout: Layout,
        dp_rank: int,
        limit: int | None,
        factory: ParamFactory,
    ):
        """Make no micro-batch yet. dp_rank: the replica. limit: see corpora.tasks.pack."""
        self.packed = packed
        self.layout = layout
        self.dp_rank = dp_rank
        self.limit = limit
        self.device = factory.device
        self.cp = factory.mesh.cp
        # A rank with several stages asks for a micro-batch once for each.
        self._recent = functools.lru_cache(2 * layout.stages)(self._make)

    def __call__(self, index: int) -> Batch:
        """Return micro-batch number `index` of this replica, on the device."""
        return self._recent(index)

    def _make(self, index: int) -> Batch:
        """Return micro-batch number `index` of this replica, from the packed samples."""
        first = first_of_micro_batch(0, index, self.layout, self.dp_rank)
        samples = [self.packed.arrays(first + i) for i in range(self.layout.micro_batch_size)]
        arrays: dict[str, Any] = {
            name: torch.from_numpy(np.stack([sample[name] for sample in samples]))
            for name in samples[0]
        }
        is_short = self.limit is not None and first < self.packed.short
        length = self.limit if is_short else None
        count = int((arrays["labels"] >= 0).sum())
        return Batch(count=count, length=length, **arrays).to(self.device, self.cp)
