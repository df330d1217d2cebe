"""Acts on a spike before the weights change: `--on-spike record`, `skip` and `rollback`.

    record      write the step to OUT/spikes.jsonl with more facts, and update the weights
    skip        write it, and update no weight: the batch is consumed as if --skip-samples named it
    rollback    write it, and end with a case for the supervisor: the next start with --resume auto
                continues from the newest checkpoint and passes over all batches since then

A spike is a step for which LossMonitor.judge returns a reason, here before the update and on every
rank. The loss and the norm of a step are bitwise equal on all ranks, so every rank decides alike
without communication. Steps are judged by earlier steps that have updated the weights; after a
start with --resume auto, also by those that metrics.jsonl of earlier starts has. Beside the fields
that loss_monitor.py explains, a row of spikes.jsonl, which a resumed run continues, has

    "action"         record, skip, rollback, or end: a spike after --spike-limit others
    "passed_over"    with skip and rollback: the samples [A, B) that later starts pass over
    "layer_norms"    the norm of the gradient before clipping by layer: embedding, blocks.0, ...
    "sketch"         of the batch's tokens: how many differ, entropy of their frequencies, hash
    "before"         the last two facts of the step before; absent in the first step of a start
"""

import hashlib
import math
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from checkpointing.checkpoints import Checkpoints
from checkpointing.state import Progress
from config.messages import NodeError, UserError
from config.schema import Config
from data import Samples
from telemetry.log import Log
from telemetry.loss_monitor import WINDOW, LossMonitor
from telemetry.row_file import read_rows
from zero import Optimizer, StepResult

Judged = tuple[range, list[float]]  # a step: its samples, and this rank's sums of squares by shard


def passing_over(config: Config) -> Config:
    """Return the configuration of a resumed run, with the samples that its earlier starts have left
    out because of spikes. Called by every rank.
    """
    rows: list[dict[str, Any]] = []
    with suppress(FileNotFoundError):  # a run without a spike has no such file
        rows = read_rows(Path(config.run.out, "spikes.jsonl").read_bytes())
    ranges = [tuple(row["passed_over"]) for row in rows if "passed_over" in row]
    return replace(config, passed_over=tuple(ranges))


class SpikeMonitor(LossMonitor):
    """Judges each step before its update; every rank has one, and all of them decide alike."""

    def __init__(
        self, state: Any, samples: Samples, checkpoints: Checkpoints, log: Log, done: Progress
    ):
        """state: the trainer's. done: the progress so far. Collective over all ranks."""
        super().__init__(state.config, samples, done, log)
        self.begin = done
        self.checkpoints = checkpoints
        self.exchange = checkpoints.exchange
        optimizer: Optimizer = state.optimizer
        optimizer.accepts = self._accepts
        shards = chain(*(group.counted_shards() for group in optimizer.groups))
        self.layers = [layer_of(shard.spec.name) for shard in shards]
        self.spike: dict[str, Any] | None = None  # of the step that runs, if it is a spike
        self.squares: list[float] = []  # of the step that runs
        self.before: Judged | None = None
        self.left_out = len(self.config.passed_over)  # spikes that have left out batches
        steps = earlier_steps(self.config.run.out, done.iteration) if log.is_writer else []
        for loss, norm in self.exchange.agree(steps, lambda values: values[0], "steps"):
            self.add(loss, norm)

    def _accepts(self, loss: float, norm: float, squares: Tensor, factor: float) -> bool:
        """Judge the step that runs; return whether it may update the weights."""
        self.spike = self.judge(loss, norm)
        self.squares = (squares * factor**2).tolist()
        return self.spike is None or self.config.run.on_spike == "record"

    def step(self, done: Progress, batch: int, result: StepResult) -> None:
        """Take the result of a step on `batch` samples; done: the progress after the step.

        Raise UserError at a spike that ends this start of the run. Collective over all ranks.
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
        """Return the action for a spike, and the samples that it leaves out; right on rank 0."""
        action = self.config.run.on_spike
        if action == "record":
            return {"action": action}
        self.checkpoints.close()  # a save that is running may become the newest checkpoint
        self.left_out += 1
        if self.left_out > self.config.run.spike_limit:
            return {"action": "end"}
        first = samples.start
        if action == "rollback":
            first = (self.checkpoints.newest or self.begin).consumed_samples
        return {"action": action, "passed_over": [first, samples.stop]}

    def _end_if_asked(self, iteration: int, action: str) -> None:
        """Raise the error that ends this start of the run, if the action is rollback or end."""
        self.exchange.gather("spike", None)  # the files are there before a rank ends
        text = f"step {iteration} is spike {self.left_out} of this run, see {self.spikes.path}"
        if action == "rollback":
            text += ": --resume auto goes back to the newest checkpoint and passes over the "
            raise NodeError(f"{text}batches since then", [], "spike")
        if action == "end":
            raise UserError(f"{text}, and --spike-limit is {self.config.run.spike_limit}")

    def _facts(self, step: Judged) -> dict[str, Any]:
        """Return the facts of a step that a row has; those of the whole batch on rank 0 only.
        Collective over all ranks.
        """
        samples, squares = step
        totals: dict[str, float] = {}
        everyone = self.exchange.gather("norms", list(zip(self.layers, squares)))
        for layer, square in chain(*everyone):
            totals[layer] = totals.get(layer, 0.0) + square
        norms = {layer: math.sqrt(total) for layer, total in totals.items()}
        facts: dict[str, Any] = {"layer_norms": norms}
        if self.log.is_writer:
            facts["sketch"] = sketch(self.samples, samples)
        return facts


def layer_of(name: str) -> str:
    """Return the layer of a parameter: blocks.3 of blocks.3.mlp.up.weight, head of head.norm."""
    words = name.split(".")
    return ".".join(words[:2]) if words[0] == "blocks" else words[0]


def sketch(samples: Samples, numbers: range) -> dict[str, Any]:
    """Return facts of a batch's tokens: how many of them differ, the entropy of their frequencies
    in nats, and a hash. numbers: of the batch's samples.
    """
    tokens = np.concatenate([np.asarray(samples.sample(k), dtype="<i8") for k in numbers])
    shares = np.unique(tokens, return_counts=True)[1] / len(tokens)
    return {
        "distinct": len(shares),
        "entropy": float(-(shares * np.log(shares)).sum()),
        "sha256": hashlib.sha256(tokens.tobytes()).hexdigest()[:16],
    }


def earlier_steps(out: str, done: int) -> list[tuple[float, float]]:
    """Return loss and gradient norm of the last steps up to step `done` that have updated the
    weights, by the metrics.jsonl of earlier starts. A later start replaces the rows of a step.
    """
    steps: dict[int, dict[str, Any]] = {}
    parts = Path(out).glob("metrics.jsonl.[0-9]*")
    for path in sorted(parts, key=lambda path: int(path.suffix[1:])):
        rows = read_rows(path.read_bytes())
        steps |= {row["iteration"]: row for row in rows if row.keys() & {"loss", "skipped_samples"}}
    taken = [steps[step] for step in sorted(steps) if step <= done]
    taken = [row for row in taken if not row.get("skipped", True)]
    return [(row["loss"], row["grad_norm"]) for row in taken[-WINDOW:]]
