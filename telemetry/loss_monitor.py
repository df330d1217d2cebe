"""Records the batches of spikes of loss and gradient norm; decides when training has diverged.

    spikes.jsonl    a row per spike: the step's loss, the mean and sigma of the steps before, and
                    every sample of the batch with its documents; "of" is "loss" or "grad_norm",
                    the value that has risen; with "grad_norm" the norm is in the row too

A value is a spike if it is more than --spike-sigma standard deviations (sigma) above the mean of
this process's last steps. So the first steps after a restart are not checked for spikes, except
that a loss which is not finite is always recorded; --on-spike checks them too. For the gradient
norm, mean and sigma are taken of its logarithm, because the norm is positive and varies by factors.
The norm is checked because clipping makes the update of a step with a huge gradient vanish, so that
the loss may not rise. A step has one row at most: the norm is checked only if the loss is no spike.

--on-spike acts on a spike before the weights change (SpikeMonitor):

    record      write the step to OUT/spikes.jsonl with more facts, and update the weights
    skip        write the step, and do not update the weights: the batch is consumed as if
                --skip-samples named it
    rollback    write the step, and end with a case for the supervisor: the next start with --resume
                auto continues from the newest checkpoint and skips all batches since then

The loss and the norm of a step are bitwise equal on all ranks, so every rank decides alike without
communication. Steps are compared with earlier steps that have updated the weights; after a start
with --resume auto, also with those in metrics.jsonl of earlier starts. A row of spikes.jsonl, which
a resumed run continues, then has further fields:

    "action"         record, skip, rollback, or end: a spike after spike_limit others
    "passed_over"    with skip and rollback: the samples [A, B) that later starts skip
    "layer_norms"    the norm of the gradient before clipping by layer: embedding, blocks.0, ...
    "sketch"         of the batch's tokens: how many differ, entropy of their frequencies, hash
    "before"         the last two facts of the step before; absent in the first step of a start
"""

import hashlib
import math
import os
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from base.errors import FileError, LossError, NodeError, UserError
from base.regular_files import MOST_OF_ROWS, read_regular
from checkpointing.save import Checkpointer
from checkpointing.state import Progress
from config.run_options import Run
from config.schema import Config
from data import Samples
from distributed.store import StoreExchange
from telemetry.log import Log
from telemetry.observer import Observer, Step
from telemetry.parts import parts_of
from telemetry.row_file import RowFile, read_rows
from zero import Optimizer, StepResult

WINDOW = 128  # the mean and sigma are taken of this many last steps
MIN_STEPS = 32  # with fewer steps before it, a finite value is not checked
# The least sigma of the loss, as a share of the mean, so that a rounding error does not count as a
# spike while the loss is almost constant.
MIN_SIGMA = 1e-3
MIN_SIGMA_OF_LOG_NORM = 0.1  # least sigma of the norm's natural logarithm


class LossMonitor(Observer):
    """Finds spikes, and ends a run that has diverged.

    good: the progress after the last step with a finite loss. bad: the results of the steps since
    then, none of which has a finite loss.
    """

    def __init__(
        self, config: Config, samples: Samples, checkpoints: Checkpointer, log: Log, done: Progress
    ):
        """Begin without earlier steps.

        samples: the run's data set. checkpoints: saves the state of a run that has diverged. log:
        the rank that writes the log also writes spikes.jsonl. done: the progress so far.
        """
        self.config = config
        self.samples = samples
        self.checkpoints = checkpoints
        self.good = done  # the progress after the last step with a finite loss
        self.log = log
        self.spikes = RowFile(os.path.join(config.run.out, "spikes.jsonl"), log.note)
        self.bad: list[StepResult] = []  # the results of the steps since `good`
        self._recent: deque[float] = deque(maxlen=WINDOW)  # losses of the last good steps
        # The logarithms of the gradient norms of the last good steps.
        self._recent_log_norms: deque[float] = deque(maxlen=WINDOW)

    def after_step(self, step: Step, result: StepResult) -> None:
        """Judge a step, record it if it is a spike, and count it as good or bad (loss not finite).

        Raise UserError if training has diverged. Collective over all ranks.
        """
        self.take(step, result)
        if self.diverged:
            give_up(self, step.done, self.checkpoints)

    def take(self, step: Step, result: StepResult) -> None:
        """Judge a step, record it if it is a spike, and count it as good or bad."""
        if self.log.is_writer:
            spike = self.judge(result.loss, result.grad_norm)
            if spike is not None:
                self.record(step, result.loss, spike)
        self.count(step.done, result)

    def at_exit(self) -> None:
        """Write the last rows of spikes.jsonl."""
        self.spikes.finish()

    def judge(self, loss: float, norm: float) -> dict[str, Any] | None:
        """Return the fields of a row that say why a step is a spike; None if it is no spike.

        loss, norm: the loss of the step and the norm of its gradient before clipping.
        """
        sigmas = self.config.run.spike_sigma
        if not sigmas:  # --spike-sigma 0: no step is checked
            return None
        mean, sigma, limit = _usual(self._recent, sigmas, share=MIN_SIGMA)
        if not math.isfinite(loss) or loss > limit:
            return {"of": "loss", "mean": mean, "sigma": sigma}
        mean, sigma, limit = _usual(self._recent_log_norms, sigmas, least=MIN_SIGMA_OF_LOG_NORM)
        if 0 < norm < math.inf and math.log(norm) > limit:
            return {"of": "grad_norm", "grad_norm": norm, "mean": mean, "sigma": sigma}
        return None

    def count(self, done: Progress, result: StepResult) -> None:
        """Count a step as good or bad; a bad step has a loss that is not finite.

        Later steps are compared with a good step if it has updated the weights. done: the progress
        after the step.
        """
        if not math.isfinite(result.loss):
            self.bad.append(result)
            return
        if not result.skipped:
            self.add(result.loss, result.grad_norm)
        self.good = done
        self.bad = []

    def add(self, loss: float, norm: float) -> None:
        """Add a step with a finite loss to the last steps, with which later steps are compared."""
        self._recent.append(loss)
        if 0 < norm < math.inf:
            self._recent_log_norms.append(math.log(norm))

    @property
    def diverged(self) -> bool:
        """Whether the loss was not finite in each of the last max_nan_steps steps."""
        return len(self.bad) >= self.config.run.max_nan_steps

    @property
    def state_intact(self) -> bool:
        """Whether weights and optimizer state are unchanged since the last finite loss.

        They are unchanged if all later updates were skipped.
        """
        return all(result.skipped for result in self.bad)

    def record(self, step: Step, loss: float, spike: dict[str, Any]) -> None:
        """Write a spike to spikes.jsonl and to the log; called on the rank that writes the log.

        spike: the result of `judge`, and further fields of the row.
        """
        row = spike_row(step.iteration, loss, spike, self.samples, step.samples)
        self.spikes.write(row)
        self.log.note(f" {spike_line(row, loss)} are in {self.spikes.path}")


def make_monitor(
    state: Any,
    samples: Samples,
    checkpoints: Checkpointer,
    exchange: StoreExchange,
    log: Log,
    done: Progress,
) -> LossMonitor:
    """Return the run's monitor: with --on-spike one that judges a step before its update, too.

    Collective over all ranks. state: the trainer's TrainState. samples: the run's data set.
    exchange: passes values between all ranks. done: the progress so far.
    """
    if state.config.run.on_spike:
        return SpikeMonitor(state, samples, checkpoints, exchange, log, done)
    return LossMonitor(state.config, samples, checkpoints, log, done)


def _usual(
    recent: Sequence[float], sigmas: float, share: float = 0.0, least: float = 0.0
) -> tuple[float | None, float | None, float]:
    """Return the mean and sigma of the last values, and the limit above which a value is a spike.

    With fewer than MIN_STEPS values the results are None, None and infinity. sigmas: the distance
    of the limit from the mean, in sigmas. share, least: sigma is at least this share of the mean,
    and at least this number.
    """
    if len(recent) < MIN_STEPS:
        return None, None, math.inf
    mean = statistics.fmean(recent)
    sigma = max(statistics.stdev(recent, mean), share * abs(mean), least)
    return mean, sigma, mean + sigmas * sigma


def give_up(losses: LossMonitor, now: Progress, checkpoints: Checkpointer) -> None:
    """End a run that has diverged: save the last good state, and raise UserError.

    Called when `losses.diverged`; collective over all ranks. The state is saved only
    if the run saves checkpoints and the weights have not changed since the last step with a finite
    loss. Raise RuntimeError, before anything is saved, if replicas of the state differ: then
    hardware has failed and training has not diverged, and a restart continues from the last
    checkpoint.
    """
    checkpoints.check_replicas(now.iteration)
    can_save = checkpoints.enabled and losses.state_intact and losses.good.iteration > 0
    saved = can_save and checkpoints.save_now(losses.good)
    checkpoints.close()
    raise divergence(losses.config.run, losses.good, now, len(losses.bad), saved)


# ---- Spikes before the update: --on-spike --------------------------------------------------------

# A judged step: the numbers of its samples, and by shard the sum of squares of the gradient.
Judged = tuple[range, list[float]]


def skip_earlier_spikes(config: Config) -> Config:
    """Return a resumed run's configuration with the samples of earlier spikes, which it skips.

    Earlier starts of the run have written them to spikes.jsonl, with the action skip or rollback.
    Called on every rank before the data set is built. A run without --on-spike or --resume skips
    none.
    """
    if not (config.run.on_spike and config.run.resume):
        return config
    path = Path(config.run.out, "spikes.jsonl")
    rows: list[dict[str, Any]] = []
    try:
        # A run without a spike has no such file.
        for path in parts_of(config.run.out, "spikes.jsonl", config.past.run)[-1:]:
            rows = read_rows(read_regular(path, MOST_OF_ROWS))
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from None
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
    raise FileError(f"{path} has a row whose passed_over is {samples!r:.80}, not [A, B]")


class SpikeMonitor(LossMonitor):
    """Judges each step before its update; every rank has a monitor, and all ranks decide alike."""

    def __init__(
        self,
        state: Any,
        samples: Samples,
        checkpoints: Checkpointer,
        exchange: StoreExchange,
        log: Log,
        done: Progress,
    ):
        """Judge all further steps of the optimizer; collective over all ranks.

        state: the trainer's TrainState. samples: the run's data set. exchange: passes values
        between all ranks. done: the progress so far.
        """
        super().__init__(state.config, samples, checkpoints, log, done)
        self.begin = done  # the progress with which this start of the run begins
        self.exchange = exchange
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

    def take(self, step: Step, result: StepResult) -> None:
        """Take a step into the statistics, and record it if it is a spike; collective.

        Before the update `_accepts` has judged the step and left its verdict in `self.spike` and
        the squared gradient norms of its layers in `self.squares`. Raise NodeError or UserError if
        the spike ends this start of the run.
        """
        self.count(step.done, result)
        samples = step.samples
        if self.spike is not None:
            row = self.spike | self._decision(samples) | self._facts((samples, self.squares))
            if self.before is not None:
                row["before"] = self._facts(self.before)
            if self.log.is_writer:
                self.record(step, result.loss, row)
            self._end_if_asked(step.iteration, row["action"])
        self.before = samples, self.squares
        self.spike = None
        self.squares = []

    def _decision(self, samples: range) -> dict[str, Any]:
        """Return the fields of a spike's row: the action, and the samples [A, B) to skip.

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
            text += ": --resume auto goes back to the newest checkpoint and skips the "
            raise NodeError(f"{text}batches since then", [], "spike")
        if action == "end":
            raise LossError(f"{text}, and spike_limit is {self.config.run.spike_limit}")

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
    # A row without "skipped" is of a step whose batch was skipped.
    updates = [row for row in rows if not row.get("skipped", True)]
    return [(row["loss"], row["grad_norm"]) for row in updates[-WINDOW:]]


# ---- Reports -------------------------------------------------------------------------------------


def spike_row(
    iteration: int, loss: float, spike: dict[str, Any], samples: Samples, numbers: range
) -> dict[str, Any]:
    """Return the row of spikes.jsonl of a step that is a spike, with the documents of its samples.

    iteration, loss: the step's; a loss that is not finite is None in the row. spike: the
    result of LossMonitor.judge, and further fields. numbers: the numbers of the step's samples.
    """
    texts = []
    for number in numbers:
        # A span is a part of a sample that comes from one document.
        spans = [span._asdict() for span in samples.spans(number)]
        texts.append({"sample": number, "text": spans})
    finite_loss = loss if math.isfinite(loss) else None
    head = {"iteration": iteration, "loss": finite_loss}
    return head | spike | {"first_sample": numbers.start, "samples": texts}


def spike_line(row: dict[str, Any], loss: float) -> str:
    """Return the beginning of the log's line about a spike: its value, the mean, and the samples.

    The caller adds where the samples are described. row: the spike's row of spikes.jsonl. loss: the
    step's loss, also if it is not finite.
    """
    mean = row["mean"]
    sigma = row["sigma"]
    last_sample = row["first_sample"] + len(row["samples"]) - 1
    samples = f"samples {row['first_sample']} to {last_sample}"
    if row["of"] == "loss":
        usual = "" if mean is None else f" against {mean:.4f} +- {sigma:.4f} before"
        return f"loss spike at step {row['iteration']}: {loss:.4f}{usual}; {samples}"
    # Mean and sigma are those of the norm's logarithm: exp() gives a norm and a factor.
    text = f"spike of the gradient norm at step {row['iteration']}: {row['grad_norm']:.4g}"
    usual = f" against {math.exp(mean):.4g} (x or / {math.exp(sigma):.3g}) before"
    return f"{text}{usual}; {samples}"


def divergence(run: Run, good: Progress, now: Progress, bad: int, saved: bool) -> UserError:
    """Return the error of a run that has diverged.

    good: the progress after the last step with a finite loss. now: the progress when it ends. bad:
    the number of steps since `good`. saved: whether the state after `good` is in a checkpoint.
    """
    samples = f"--skip-samples {good.consumed_samples}:{now.consumed_samples}"
    advice = f"no state after step {good.iteration} is saved; the samples since: {samples}"
    if saved:
        advice = f"the state after step {good.iteration} is in {run.out}/checkpoints; --resume "
        advice += f"auto {samples} continues from it without the samples since"
    return LossError(
        f"the loss was not finite for {bad} steps in a row, up to step {now.iteration} "
        f"(max-nan-steps is {run.max_nan_steps}): {advice}"
    )
