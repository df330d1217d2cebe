"""Acts on a spike before the weights change: `--on-spike record`, `skip` and `rollback`.

    record      write the step to OUT/spikes.jsonl with more facts, and update the weights
    skip        write the step, and do not update the weights: the batch is consumed as if
                --skip-samples named it
    rollback    write the step, and end with a case for the supervisor: the next start with --resume
                auto continues from the newest checkpoint and passes over all batches since then

A spike is a step for which LossMonitor.judge returns a reason, here before the update and on every
rank. The loss and the norm of a step are bitwise equal on all ranks, so every rank decides alike
without communication. Steps are compared with earlier steps that have updated the weights; after a
start with --resume auto, also with those in metrics.jsonl of earlier starts. Beside the fields that
loss_monitor.py explains, a row of spikes.jsonl, which a resumed run continues, has

    "action"         record, skip, rollback, or end: a spike after --spike-limit others
    "passed_over"    with skip and rollback: the samples [A, B) that later starts pass over
    "layer_norms"    the norm of the gradient before clipping by layer: embedding, blocks.0, ...
    "sketch"         of the batch's tokens: how many differ, entropy of their frequencies, hash
    "before"         the last two facts of the step before; absent in the first step of a start
"""

import hashlib
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from checkpointing.checkpoints import Checkpoints
from checkpointing.state import Progress
from config.messages import NodeError, UserError
from config.regular_files import MOST_OF_ROWS, read_regular
from config.schema import Config
from data import Samples
from telemetry.log import Log
from telemetry.loss_monitor import WINDOW, LossMonitor
from telemetry.parts import parts_of
from telemetry.row_file import read_rows
from zero import Optimizer, StepResult

# A judged step: the numbers of its samples, and by shard the sum of squares of the gradient.
Judged = tuple[range, list[float]]


def passing_over(config: Config) -> Config:
    """Return a resumed run's configuration with the samples that the run passes over.

    Earlier starts of the run have written them to spikes.jsonl, with the action skip or rollback.
    Called on every rank before the data set is built.
    """
    path = Path(config.run.out, "spikes.jsonl")
    rows: list[dict[str, Any]] = []
    try:
        # A run without a spike has no such file.
        for path in parts_of(config.run.out, "spikes.jsonl", config.past.run)[-1:]:
            rows = read_rows(read_regular(path, MOST_OF_ROWS))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    ranges = []
    for row in rows:
        if "passed_over" in row:
            ranges.append(_range_of(row["passed_over"], path))
    return replace(config, passed_over=tuple(ranges))


def _range_of(samples: Any, path: Path) -> tuple[int, int]:
    """Return the range [A, B) of samples in a row of `path`; UserError if it is no such range."""
    if isinstance(samples, list) and [type(value) for value in samples] == [int, int]:
        first, end = samples
        if 0 <= first <= end:
            return first, end
    raise UserError(f"{path} has a row whose passed_over is {samples!r:.80}, not [A, B]")


class SpikeMonitor(LossMonitor):
    """Judges each step before its update; every rank has a monitor, and all ranks decide alike."""

    def __init__(
        self, state: Any, samples: Samples, checkpoints: Checkpoints, log: Log, done: Progress
    ):
        """Judge all further steps of the optimizer; collective over all ranks.

        state: the trainer's TrainState. samples: the run's data set. done: the progress so far.
        """
        super().__init__(state.config, samples, done, log)
        self.begin = done  # the progress with which this start of the run begins
        self.checkpoints = checkpoints
        self.exchange = checkpoints.exchange
        optimizer: Optimizer = state.optimizer
        optimizer.accepts = self._accepts  # the optimizer calls it before each update
        # The optimizer gives the sums of squares of the gradient in the order of these shards.
        shards = chain(*(group.counted_shards() for group in optimizer.groups))
        self.layers = [layer_of(shard.spec.name) for shard in shards]  # the layer of each shard
        self.spike: dict[str, Any] | None = None  # why the running step is a spike, or None
        self.squares: list[float] = []  # sums of squares of the step's gradients, by shard
        self.before: Judged | None = None  # the step before the running step
        self.left_out = len(self.config.passed_over)  # spikes so far whose batches were left out
        # The losses and norms of earlier starts, which rank 0 reads for all ranks.
        steps: list[tuple[float, float]] = []
        if log.is_writer:
            config = self.config
            steps = earlier_steps(config.run.out, done.iteration, config.past.run)
        for loss, norm in self.exchange.agree(steps, lambda values: values[0], "steps"):
            self.add(loss, norm)

    def _accepts(self, loss: float, norm: float, squares: Tensor, factor: float) -> bool:
        """Judge the running step before its update; return whether it may update the weights.

        The optimizer calls this method. loss, norm: the loss of the step and the norm of its
        gradient. squares: by shard, the sum of squares of the gradients that the optimizer has
        summed, (shards,). factor: times it, they are the gradients of the mean loss.
        """
        self.spike = self.judge(loss, norm)
        self.squares = (squares * factor**2).tolist()
        return self.spike is None or self.config.run.on_spike == "record"

    def step(self, done: Progress, batch: int, result: StepResult) -> None:
        """Take a step into the statistics, and record it if it is a spike; collective.

        The trainer calls this method after each step. Before the update `_accepts` has judged the
        step and left its verdict in `self.spike` and the squared gradient norms of its layers in
        `self.squares`. done: the progress after the step. batch: the number of samples in the step.
        Raise NodeError or UserError if the spike ends this start of the run.
        """
        self.count(done, result)
        samples = range(done.consumed_samples - batch, done.consumed_samples)
        if self.spike is not None:
            row = self.spike | self._decision(samples) | self._facts((samples, self.squares))
            if self.before is not None:
                row["before"] = self._facts(self.before)
            if self.log.is_writer:
                self.record(done, batch, result.loss, row)
            self._end_if_asked(done.iteration, row["action"])
        self.before = samples, self.squares
        self.spike = None
        self.squares = []

    def _decision(self, samples: range) -> dict[str, Any]:
        """Return the fields of a spike's row: the action, and the samples [A, B) to pass over.

        samples: the step's samples. With rollback, A is the first sample after the newest
        checkpoint, which only rank 0 knows; its result is the one that is written.
        """
        action = self.config.run.on_spike
        if action == "record":
            return {"action": action}
        self.checkpoints.close()  # waits for a running save, which becomes the newest checkpoint
        self.left_out += 1
        if self.left_out > self.config.run.spike_limit:
            return {"action": "end"}
        first = samples.start
        if action == "rollback":  # the next start continues from the newest checkpoint, or `begin`
            first = (self.checkpoints.newest or self.begin).consumed_samples
        return {"action": action, "passed_over": [first, samples.stop]}

    def _end_if_asked(self, iteration: int, action: str) -> None:
        """Raise the error that ends this start of the run, if the action is rollback or end.

        Collective over all ranks.
        """
        # Wait for rank 0, which writes the row: the launcher ends all ranks when one rank ends.
        self.exchange.agree(None, lambda answers: None, "spike")
        text = f"step {iteration} is spike {self.left_out} of this run, see {self.spikes.path}"
        if action == "rollback":
            text += ": --resume auto goes back to the newest checkpoint and passes over the "
            raise NodeError(f"{text}batches since then", [], "spike")
        if action == "end":
            raise UserError(f"{text}, and --spike-limit is {self.config.run.spike_limit}")

    def _facts(self, step: Judged) -> dict[str, Any]:
        """Return the gradient norms of a step by layer, and on rank 0 a sketch of its tokens.

        Collective over all ranks.
        """
        samples, squares = step
        totals = self.exchange.agree(list(zip(self.layers, squares)), sums_of_layers, "norms")
        norms = {layer: math.sqrt(total) for layer, total in totals.items()}
        facts: dict[str, Any] = {"layer_norms": norms}
        if self.log.is_writer:
            facts["sketch"] = sketch(self.samples, samples)
        return facts


def sums_of_layers(squares_of_ranks: list[list[tuple[str, float]]]) -> dict[str, float]:
    """Return, by layer, the sum of squares over all ranks; for StoreExchange.agree.

    squares_of_ranks: by rank, pairs of a layer and a sum of squares.
    """
    totals: dict[str, float] = {}
    for layer, square in chain(*squares_of_ranks):
        totals[layer] = totals.get(layer, 0.0) + square
    return totals


def layer_of(name: str) -> str:
    """Return the layer of a parameter: blocks.3 of blocks.3.mlp.up.weight, head of head.norm."""
    part, *words = name.split(".")
    if part == "blocks":
        return f"blocks.{words[0]}"
    return part


def sketch(samples: Samples, numbers: range) -> dict[str, Any]:
    """Return facts of a batch's tokens: the number of distinct tokens, the entropy, and a hash.

    The entropy of the tokens' frequencies is in nats. numbers: the numbers of the batch's samples.
    """
    arrays = [np.asarray(samples.sample(number), dtype="<i8") for number in numbers]
    tokens = np.concatenate(arrays)
    _, counts = np.unique(tokens, return_counts=True)
    frequencies = counts / len(tokens)
    return {
        "distinct": len(frequencies),
        "entropy": float(-(frequencies * np.log(frequencies)).sum()),
        "sha256": hashlib.sha256(tokens.tobytes()).hexdigest()[:16],
    }


def earlier_steps(out: str, done: int, run: str = "") -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of the last WINDOW steps up to step `done`, oldest first.

    Only steps that have updated the weights count. The steps are read from the metrics.jsonl of
    earlier starts in the folder `out`. If a step was trained twice, the later row counts. run: the
    name of the run, `Past.run`; "": every file counts.
    """
    rows_by_step: dict[int, dict[str, Any]] = {}
    for path in parts_of(out, "metrics.jsonl", run):  # this start has done no step yet
        for row in read_rows(read_regular(path, MOST_OF_ROWS)):
            if "loss" in row or "skipped_samples" in row:  # a step's row, not an evaluation's
                rows_by_step[row["iteration"]] = row
    rows = [rows_by_step[step] for step in sorted(rows_by_step) if step <= done]
    # A row without "skipped" is of a step whose batch was passed over.
    updates = [row for row in rows if not row.get("skipped", True)]
    return [(row["loss"], row["grad_norm"]) for row in updates[-WINDOW:]]
