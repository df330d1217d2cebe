"""The record of a run: start-up lines, log line, metrics.jsonl, run.json, TensorBoard, summary.

The log line is for people; programs read metrics.jsonl. The trainer calls Log on every rank; only
rank 0 writes. The files of a run, in the folder --out:

    run.json        the whole configuration, the nodes and devices, and the versions in use
    log.txt         all that this class prints
    metrics.jsonl   a row per step and a row per evaluation (`NAME_loss`: validation, test, sets;
                    `task`: its name, accuracy, normalised_accuracy, bits_per_byte)
    times.jsonl     the passes and waits of some steps, on every rank (step_times.py)
    spikes.jsonl    the batches of spikes, if there are any (loss_monitor.py)
    expected.jsonl  where the loss left the band of --expect (expected_curve.py)
    audits.jsonl    the audits of --audit-every (audit.py)
    trackers.json   identifier of the run in W&B, which a resumed run continues
"""

import contextlib
import functools
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch

from architecture import model_stats
from architecture.shape import ModelShape
from base.cli import VERSION
from base.errors import NOT_WRITTEN, FileError, printable
from checkpointing.state import Progress
from config.phases import PlacedPhase
from config.run_options import TRACKED_RUNS, unused_number
from config.schema import Config
from config.timeline import Timeline
from corpora.tasks import TaskResult
from costs import hardware
from distributed.context import Context
from schedules import partition
from telemetry import log_lines, parts, step_stats
from telemetry.log_lines import FORMULA, Steps
from telemetry.observer import Observer, Step
from telemetry.row_file import RowFile
from telemetry.step_stats import StepStats
from telemetry.trackers import Tracker, open_trackers
from zero import StepResult

# Without --log-every, log lines are at least so many seconds apart: a line for each step would fill
# disks.
SECONDS_BETWEEN_LINES = 5.0
LINES_BETWEEN_CORPORA = 20  # log lines from one line about the corpora to the next


@dataclass
class Printed:
    """The log lines that this start of the run has printed."""

    lines: int = 0  # the number of printed log lines
    steps_since: int = 0  # steps since the last log line
    at: float = -math.inf  # time.monotonic() of the last log line


class Log(Observer):
    """Writes the record of one run; made before the first step, closed after the last.

    The trainer sets the attribute epoch_tokens: for each corpus of --data, the number of tokens in
    one epoch. Nothing in the run's folder is changed before `begin`, which the trainer calls when
    steps are about to run: a start that is refused, or has no step to do, replaces no file.
    """

    def __init__(
        self,
        config: Config,
        context: Context,
        stage_specs: list[partition.StageSpec],
        kernels: dict[str, str],
        before: list[StepStats],
        about_model: dict[str, Any] | None = None,
    ):
        """Print the start-up lines on rank 0; `begin` opens the files.

        stage_specs: the stages of the whole pipeline. kernels: the implementation in use, by
        purpose. before: every rank's statistics before the model was built. about_model: what
        run.json says of the model (start_of_run.py); None: what its options say.
        """
        self.config = config
        self.context = context
        self.stage_specs = stage_specs
        self.before = before
        self.latest = before  # every rank's statistics after the newest step
        self.is_writer = context.rank == 0
        self.timeline = Timeline(config)
        self.total = self.timeline.total_steps
        self.steps = Steps()  # seconds, samples and losses of the steps so far
        self.printed = Printed()  # how many log lines were printed, and when the last one was
        self.epoch_tokens: Mapping[str, int] = {}  # by corpus, the tokens of an epoch
        # The newest loss of each evaluation, and the newest accuracy of each task.
        self.evaluations: dict[str, float] = {}
        self.corpus_tokens: Mapping[str, float] = {}  # of the last row that has them
        self.metrics = RowFile(os.path.join(config.run.out, "metrics.jsonl"), self.note)
        self.trackers: dict[str, Tracker] = {}  # TensorBoard and W&B, if they are asked for
        self.text: IO[str] | None = None  # the open log.txt
        self.early: list[str] | None = []  # the lines before `begin`; None: it has been called
        self.waiting: list[str] | None = None  # the lines that `held` keeps
        self.kernels = kernels
        self.about_model = about_model or {"parameters": model_stats.parameters(config.model)}
        self.facts: dict[str, Any] = {}  # the contents of run.json, after `begin`
        if self.is_writer:
            facts = context.describe()
            for line in log_lines.at_start(config, facts, stage_specs, kernels):
                self.note(line)
            if "unknown" in self.about_model:
                self.note(log_lines.unknown_tensors_line(self.about_model))

    # -- during the run ---------------------------------------------------------------------

    def after_step(self, step: Step, result: StepResult) -> None:
        """Write a step's row, and its log line if due.

        The step's seconds in the row are the seconds of rank 0.
        """
        if not self.is_writer:
            return
        everyone, done, batch, length = step.stats, step.done, step.batch, step.length
        self.latest = everyone
        self._write_outside(everyone)
        seconds = everyone[0].seconds
        model = self.timeline.model_at(step.consumed)
        self.steps.add(batch, length, seconds, result.loss, result.skipped)
        iteration = step.iteration
        peaks, reserved = step_stats.per_stage(everyone, self.config.layout)
        row: dict[str, Any] = {
            "iteration": iteration,
            "consumed_samples": done.consumed_samples,
            "consumed_tokens": done.usage.tokens,
            "seconds": seconds,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": step.lr,
            "global_batch_size": batch,
            "loss_scale": result.loss_scale,
            "skipped": result.skipped,
            "tokens_per_second": batch * length / seconds,
            **self._rates_of_flops(model, batch, seconds),
            "peak_memory_bytes": max(peaks),
            "peak_memory_bytes_per_stage": peaks,
            "reserved_memory_bytes_per_stage": reserved,
            "time": time.time(),
            "elapsed": time.monotonic() - self.steps.began,
        }
        if result.z_loss is not None:
            row["z_loss"] = result.z_loss
        if result.mtp_loss is not None:
            row["mtp_loss"] = result.mtp_loss
        if result.expert_loads is not None:
            row["expert_loads"] = result.expert_loads
            row["largest_expert_share"] = max(result.expert_loads) / self.config.model.experts
        # A log line is due after the first and last step and every --log-every steps; without this
        # option, if the last line is old enough. Rows that may have a line have the corpora.
        every = self.config.run.log_every
        is_first_or_last = iteration in (1, self.total)
        is_multiple = every is not None and iteration % every == 0
        if is_first_or_last or every is None or is_multiple:
            row |= self._corpus_losses(done)
        self._write(row, row | self._shares(row.get("corpus_tokens", {})))
        self.printed.steps_since += 1
        is_late = time.monotonic() - self.printed.at >= SECONDS_BETWEEN_LINES
        is_due = is_late if every is None else is_multiple
        if is_first_or_last or is_due:
            self._print_step(row)

    def _write_outside(self, everyone: list[StepStats]) -> None:
        """After the first step on GPUs, add the bytes outside of the allocator to run.json.

        everyone: the statistics of all ranks, in rank order.
        """
        name = "outside_allocator_bytes_per_stage"
        outside = step_stats.outside_per_stage(everyone, self.config.layout)
        if not outside or name in self.facts:
            return
        self.facts[name] = outside
        with self.without(f"{name} to run.json"):
            os.rename(self._write_facts(), os.path.join(self.config.run.out, "run.json"))

    def _write_facts(self) -> str:
        """Write the facts into run.json.new, which the caller renames; return its path."""
        path = os.path.join(self.config.run.out, "run.json.new")
        with open(path, "w") as file:
            json.dump(self.facts, file, indent=1)
        return path

    def _rates_of_flops(
        self, model: ModelShape, batch: int, seconds: float
    ) -> dict[str, float | None]:
        """Return a step's TFLOPs per second and rank, and its MFU, by the name of their columns.

        model: with the step's length of samples. batch: the number of samples in the step.
        tflops_hardware includes recomputation. mfu: the model's FLOPs over the device's peak, or
        None if the peak is not known.
        """
        recompute = self.config.layout.recompute
        samples_per_second = batch / self.context.size / seconds  # samples per second and rank
        needed = model_stats.model_flops(model, 1, FORMULA) * samples_per_second
        recomputed = 0  # the number of recomputed blocks in all stages
        for spec in self.stage_specs:
            recomputed += self.config.layout.recomputed_blocks(spec.blocks, spec.index)
        flops_of_sample = model_stats.hardware_flops(model, 1, recompute, FORMULA, recomputed)
        executed = flops_of_sample * samples_per_second
        mfu = None
        if self.peak_flops:
            mfu = needed / self.peak_flops
        return {"tflops_model": needed / 1e12, "tflops_hardware": executed / 1e12, "mfu": mfu}

    @functools.cached_property
    def peak_flops(self) -> float | None:
        """The device's peak FLOPs per second, for MFU; None on CPUs and on unknown GPUs."""
        if self.context.device.type != "cuda":
            return None
        name = self.context.describe()["device"]
        return hardware.peak_of(name, self.config.training.precision)

    def _print_step(self, row: dict[str, Any]) -> None:
        """Print a step's log line, and after some log lines a line about the corpora.

        row: the step's row of metrics.jsonl.
        """
        # The line's loss and rates are means over the steps since the last line.
        steps_in_means = self.config.run.log_every or self.printed.steps_since
        # Samples as long as those of the last step that are as many tokens as are left.
        consumed = row["consumed_samples"]
        total = self.timeline.tokens_at(self.timeline.total_samples)
        length = self.timeline.length_at(max(0, consumed - 1))
        samples_left = (total - self.timeline.tokens_at(consumed)) // length
        line = log_lines.step_line(row, self.total, self.steps, steps_in_means, samples_left)
        is_last = row["iteration"] == self.total
        if self.printed.lines % LINES_BETWEEN_CORPORA == 0 or is_last:
            line += log_lines.corpora_line(row)
        self.note(line)
        self.printed = Printed(self.printed.lines + 1, 0, time.monotonic())

    def after_skip(self, step: Step) -> None:
        """Write the row and the log line of a step that --skip-samples leaves out."""
        iteration, consumed, batch = step.iteration, step.done.consumed_samples, step.batch
        row = {"iteration": iteration, "consumed_samples": consumed, "skipped_samples": batch}
        self._write(row)
        self.note(log_lines.skipped_step_line(iteration, self.total, consumed, batch))

    def phase(self, phase: PlacedPhase, done: int) -> None:
        """Print the line of a phase of --phases that begins, or that a start goes on with.

        done: the number of steps done.
        """
        self.note(log_lines.phase_line(self.timeline, phase, done))

    def evaluation(self, name: str, done: Progress, loss: float) -> None:
        """Write the row and the log line of an evaluation.

        name: `validation`, `test`, or a set of --eval-data. done: the progress of the run. loss:
        the mean loss per token, in nats.
        """
        self.evaluations[name] = loss
        row = {"iteration": done.iteration, "consumed_samples": done.consumed_samples}
        self._write(row | {"consumed_tokens": done.usage.tokens, f"{name}_loss": loss})
        self.note(log_lines.evaluation_line(name, done.iteration, self.total, loss))

    def task(self, name: str, done: Progress, result: TaskResult) -> None:
        """Write the row and the log line of a task of --eval-tasks; name: that of the task."""
        self.evaluations[f"{name} accuracy"] = result.accuracy
        row = {"iteration": done.iteration, "consumed_samples": done.consumed_samples}
        row |= {"consumed_tokens": done.usage.tokens}
        numbers = result._asdict()
        # A tracker has a series for each number of each task.
        series = {f"{name}/{kind}": number for kind, number in numbers.items()}
        self._write(row | {"task": name, **numbers}, row | {"tasks": series})
        self.note(log_lines.task_line(name, done.iteration, self.total, result))

    def note(self, line: str) -> None:
        """On rank 0, print a line and append it to log.txt; a full disk does not end the run.

        What checkpoints, corpora and models say is in such lines: their control characters are
        shown as escapes.
        """
        if not self.is_writer:
            return
        line = printable(line)
        if self.waiting is not None:
            self.waiting.append(line)
            return
        if self.early is not None:
            self.early.append(line)
        # `without` prints, by `note`, that log.txt cannot be written. Then self.text stays None, so
        # that this is reported once.
        text = self.text
        self.text = None
        with self.without("log.txt, from here on"):
            if text:
                text.write(line + "\n")
                text.flush()
            self.text = text
        try:
            print(line, flush=True)
        except OSError as error:  # if the disk is full, Python keeps the text for the next print
            if error.errno not in NOT_WRITTEN:
                raise

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside this context, keep the lines of `note`; print them when it ends, also by an error.

        The lines are then in the log.txt that `begin` has opened inside the context.
        """
        self.waiting = []
        try:
            yield
        finally:
            lines, self.waiting = self.waiting, None
            for line in lines:
                self.note(line)

    def summarize(self) -> None:
        """Print the summary on rank 0; called after the last step."""
        if not self.is_writer or not self.steps.losses:
            return  # a resumed run that was complete has no steps
        device = self.context.device.type
        memory = step_stats.table(self.config, device, self.before, self.latest)
        facts = self.context.describe()
        stages = self.stage_specs
        losses = self.evaluations
        self.note(log_lines.summary(self.config, facts, stages, self.steps, memory, losses))

    def close(self) -> None:
        """Close the files and trackers; print how many rows could not be written, if any.

        The lines of a start that did no step are added to the log.txt that is there.
        """
        if self.early and self.is_writer:
            path = os.path.join(self.config.run.out, "log.txt")
            with contextlib.suppress(OSError), open(path, "a") as file:  # they are printed, too
                file.writelines(line + "\n" for line in self.early)
        self.metrics.finish()
        for name, tracker in self.trackers.items():
            with self.without(f"{name}'s last rows"):
                tracker.close()
        if self.text:
            with contextlib.suppress(OSError):  # `note` has already printed why a write failed
                self.text.close()
            self.text = None

    def _shares(self, tokens: Mapping[str, float]) -> dict[str, Mapping[str, float]]:
        """Return the share of each corpus in the tokens since the last row with corpora.

        tokens: by corpus, those since the run began; empty in a row without them. Trackers get the
        shares, which `runs.py page` computes from metrics.jsonl. The result is empty before the
        second such row, and without corpora.
        """
        before, self.corpus_tokens = self.corpus_tokens, tokens or self.corpus_tokens
        if not before or not tokens:
            return {}
        since = {name: count - before.get(name, 0) for name, count in tokens.items()}
        total = sum(since.values())
        return {"corpus_share": {n: part / total for n, part in since.items()}} if total else {}

    def _corpus_losses(self, done: Progress) -> dict[str, Mapping[str, float]]:
        """Return two columns for metrics.jsonl: by corpus, the tokens trained on and the epochs.

        Without corpora, as with synthetic data, the result is empty.
        """
        corpora = done.usage.corpora
        if not corpora:
            return {}
        # `corpora` has, by the prefix of each corpus, the (samples, tokens) consumed so far.
        tokens = {prefix: count for prefix, (_, count) in corpora.items()}
        epochs = {}
        for prefix, epoch_tokens in self.epoch_tokens.items():
            if prefix in corpora:
                _, trained = corpora[prefix]
                epochs[prefix] = trained / epoch_tokens
        return {"corpus_tokens": tokens, "corpus_epochs": epochs}

    def _write(self, row: dict[str, Any], tracked: dict[str, Any] | None = None) -> None:
        """On rank 0, write a row to metrics.jsonl and to the trackers.

        tracked: what trackers get in place of the row.
        """
        if not self.is_writer:
            return
        self.metrics.write(row)
        # A tracker stays in the dictionary only if it has written the row without an error.
        trackers = self.trackers
        self.trackers = {}
        for name, tracker in trackers.items():
            with self.without(f"{name}, from here on"):
                tracker.write(row["iteration"], row if tracked is None else tracked)
                self.trackers[name] = tracker

    @contextlib.contextmanager
    def without(self, what: str) -> Iterator[None]:
        """Inside this context, catch an OSError and print that `what` cannot be written."""
        try:
            yield
        except OSError as error:
            self.note(f"cannot write {what}: {error.strerror or error}; the run goes on")

    # -- start and end ----------------------------------------------------------------------

    def begin(self, samples: dict[str, str], checkpoint_bytes: int | None) -> None:
        """Rename an earlier run's files, write run.json, and open the other files and trackers.

        Called once, before the first step of this start. samples: the fingerprints of some samples
        (checkpointing/state.py), so that two runs can be compared. checkpoint_bytes: disk space
        that one save needs; None if the run does not save. The supervisor reads it to tell whether
        a lack of room ended the run. Raise UserError if a file cannot be written.
        """
        early = self.early or []
        self.early = None
        if not self.is_writer:
            return
        self.facts = {
            "version": VERSION,
            "config": self.config.as_dict(),
            "cluster": self.context.describe(),
            "kernels": self.kernels,
            **self.about_model,
            "checkpoint_bytes": checkpoint_bytes,
            "blocks_per_stage": [spec.blocks for spec in self.stage_specs],
            "flops_formula": FORMULA,
            "samples": samples,
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "commit": _commit(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
            },
        }
        if self.timeline.phases:
            self.facts["total_steps"] = self.total  # the end may be a number of tokens
            self.facts["phases"] = [
                {"name": s.name, "from_tokens": s.tokens, "from_step": s.step}
                for s in self.timeline.phases
            ]
        if branch := self.config.past.branch:
            self.facts["branch"] = branch._asdict()
        out = self.config.run.out
        earlier = ["run.json", "metrics.jsonl", "times.jsonl", "log.txt"]
        # A run must not add to the files of another run; a resumed run goes on with its own.
        # Checkpoints of another run stay where they are until this one saves.
        kept = [
            "audits.jsonl",
            "spikes.jsonl",
            "expected.jsonl",
            TRACKED_RUNS,
            "tensorboard",
            "numerics",
        ]
        run = self.config.past.run
        of_another_run = not self.config.run.resume or not parts.is_of(out, "", run)
        try:
            os.makedirs(out, exist_ok=True)
            # If the disk is full, writing the new run.json fails before any old file is renamed.
            new_file = self._write_facts()
            moved, number = _keep_earlier(out, earlier + kept * of_another_run)
            if self.config.run.resume and of_another_run:
                parts.bring_back(out, kept, run)
            os.rename(new_file, os.path.join(out, "run.json"))
            open(self.metrics.path, "w").close()  # metrics.jsonl exists before its first row
            # The method `close` closes log.txt.
            self.text = open(os.path.join(out, "log.txt"), "w")  # noqa: SIM115
            self.text.writelines(line + "\n" for line in early)
            self.text.flush()
            if self.config.run.tensorboard or self.config.run.wandb:
                self.trackers = open_trackers(self.config)
        except OSError as error:
            raise FileError(f"cannot write in {out}: {error.strerror or error}") from None
        if moved and of_another_run:
            self.note(
                f"{out} has files of another run, which now have names that end in .{number}: "
                f"{', '.join(moved)}"
            )


def _keep_earlier(out: str, names: list[str]) -> tuple[list[str], int]:
    """Rename an earlier run's files in the folder `out` to NAME.1 (or .2, ...).

    All files get the same number, the first that no file has, so nothing is overwritten. Return the
    names of the files that were there, and the number.
    """
    paths = [os.path.join(out, name) for name in names]
    number = unused_number(paths)
    moved = [path for path in paths if os.path.lexists(path)]
    for path in moved:
        os.rename(path, f"{path}.{number}")
    return list(map(os.path.basename, moved)), number


def _commit() -> str | None:
    """Return the git commit of this code, for run.json; None if the code is in no git repository.

    A "+" follows the commit if files of the repository have changed since.
    """
    folder = os.path.dirname(os.path.abspath(__file__))
    command = ["git", "-C", folder, "describe", "--always", "--exclude=*", "--abbrev=40"]
    try:
        done = subprocess.run([*command, "--dirty=+"], capture_output=True, text=True)
    except FileNotFoundError:  # no git on this node
        return None
    return done.stdout.strip() or None
