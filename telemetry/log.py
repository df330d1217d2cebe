"""The record of a run: start-up lines, log line, metrics.jsonl, run.json, TensorBoard, summary.

The log line is for people; programs read metrics.jsonl. The trainer calls Log on every rank; only
rank 0 writes. The files of a run, in the folder --out:

    run.json        the whole configuration, the nodes and devices, and the versions in use
    log.txt         all that this class prints
    metrics.jsonl   a row per step and a row per evaluation (`NAME_loss`: validation, test, sets)
    times.jsonl     the passes and waits of some steps, on every rank (step_times.py)
    spikes.jsonl    the batches of spikes, if there are any (loss_monitor.py, spikes.py)
    audits.jsonl    the audits of --audit-every (audit.py)
    trackers.json   identifier of the run in W&B, which a resumed run continues
"""

import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch

from checkpointing.state import Progress
from config import model_stats
from config.messages import NOT_WRITTEN, VERSION, UserError
from config.run_options import TRACKED_RUNS, unused_number
from config.schema import Config, batch_schedule
from distributed.context import Context
from schedules import partition, simulation
from schedules.orders import of_layout
from telemetry import log_lines, step_stats
from telemetry.row_file import RowFile
from telemetry.step_stats import StepStats
from zero import StepResult

if TYPE_CHECKING:
    from telemetry.trackers import Tracker

FORMULA = "megatron-2025"  # how FLOPs are counted: one of FORMULAS in config/model_stats.py
# The summary's rates leave these first steps out: allocators, kernels and connections warm up.
WARM_UP_STEPS = 2
RECENT_STEPS = 20  # the time left is estimated from the pace of these last steps
SECONDS_BETWEEN_LINES = 5.0  # without --log-every: a line for each step would fill disks
LINES_BETWEEN_CORPORA = 20  # log lines from one line about the corpora to the next


class Log:
    """Writes the record of one run; made before the first step, closed after the last.

    The trainer sets two attributes. total: the run's last step, which differs from the
    configuration's in some resumed runs. epoch_tokens: for each corpus of --data, the number of
    tokens in one epoch.
    """

    def __init__(
        self,
        config: Config,
        context: Context,
        stage_specs: list[partition.StageSpec],
        kernels: dict[str, str],
        before: list[StepStats],
        checkpoint_bytes: int | None = None,
    ):
        """On rank 0, open the files (UserError if that fails) and print the start-up lines.

        stage_specs: the stages of the whole pipeline. kernels: the implementation in use, by
        purpose. before: every rank's statistics before the model was built. checkpoint_bytes: disk
        space that one save needs, for run.json; None if the run does not save.
        """
        self.began = time.monotonic()
        self.before = before
        self.latest = before
        self.peak_flops: float | None = None  # of the device, for MFU
        if context.device.type == "cuda":
            from planner import hardware

            name = context.describe()["device"]
            self.peak_flops = hardware.peak_of(name, config.training.precision)
        self.config = config
        self.context = context
        self.stage_specs = stage_specs
        self.is_writer = context.rank == 0
        self.total = config.total_steps
        self.steps: list[tuple[int, float, float]] = []  # per step: samples, seconds and loss
        self.rates: list[float] = []  # per step: tokens per second
        self.epoch_tokens: Mapping[str, int] = {}
        self.evaluations: dict[str, float] = {}
        self.skipped = self.nan = 0
        self.lines = self.steps_since_line = 0
        self.last_line = -math.inf  # time.monotonic()
        again = [config.layout.recomputed_blocks(s.blocks, s.index) for s in stage_specs]
        self.recomputed = sum(again)
        self.metrics = RowFile(os.path.join(config.run.out, "metrics.jsonl"), self.note)
        self.trackers: dict[str, Tracker] = {}
        self.text: IO[str] | None = None  # log.txt
        if self.is_writer:
            self._open_files(kernels, checkpoint_bytes)
            self._print_start(kernels)

    # -- during the run ---------------------------------------------------------------------

    def step(
        self,
        done: Progress,
        batch: int,
        lr: float,
        result: StepResult,
        everyone: list[StepStats],
    ) -> None:
        """Record one step; called by every rank after each step.

        batch: samples of the step. done: the progress after the step. everyone: every rank's
        statistics; the step's time in the row is rank 0's.
        """
        if not self.is_writer:
            return
        self.latest = everyone
        seconds = everyone[0].seconds
        length = self.config.model.seq_length
        self.steps.append((batch, seconds, result.loss))
        self.rates.append(batch * length / seconds)
        self.skipped += result.skipped
        self.nan += not math.isfinite(result.loss)
        iteration = done.iteration
        peaks, reserved = step_stats.per_stage(everyone, self.config.layout)
        row: dict[str, Any] = {
            "iteration": iteration,
            "consumed_samples": done.consumed_samples,
            "consumed_tokens": done.usage.tokens,
            "seconds": seconds,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": lr,
            "global_batch_size": batch,
            "loss_scale": result.loss_scale,
            "skipped": result.skipped,
            "tokens_per_second": self.rates[-1],
            **self._rates_of_flops(batch, seconds),
            "peak_memory_bytes": max(peaks),
            "peak_memory_bytes_per_stage": peaks,
            "reserved_memory_bytes_per_stage": reserved,
            "time": time.time(),
            "elapsed": time.monotonic() - self.began,
        }
        if result.expert_loads is not None:
            row["expert_loads"] = result.expert_loads
        every = self.config.run.log_every
        if every is None or iteration % every == 0 or iteration in (1, self.total):
            row |= self._of_corpora(done)
        self._write(row)
        self.steps_since_line += 1
        if self._line_is_due(iteration):
            self._print_step(self._facts(row))

    def _rates_of_flops(self, batch: int, seconds: float) -> dict[str, float | None]:
        """Return 1e12 FLOPs a second of each rank in a step, and MFU if the peak is known."""
        model = self.config.model
        recompute = self.config.layout.recompute
        share = batch / self.context.size / seconds
        needed = model_stats.model_flops(model, 1, FORMULA) * share
        executed = model_stats.hardware_flops(model, 1, recompute, FORMULA, self.recomputed) * share
        mfu = None
        if self.peak_flops:
            mfu = needed / self.peak_flops
        return {"tflops_model": needed / 1e12, "tflops_hardware": executed / 1e12, "mfu": mfu}

    def _line_is_due(self, iteration: int) -> bool:
        """Return whether the step gets a log line: first, last, and by --log-every or by time."""
        if iteration in (1, self.total):
            return True
        if self.config.run.log_every is not None:
            return iteration % self.config.run.log_every == 0
        return time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES

    def _print_step(self, facts: log_lines.Facts) -> None:
        """Print and store a step's log line, some of them with a line about the corpora below."""
        line = log_lines.of_step(facts)
        is_last = facts.row["iteration"] == self.total
        if self.lines % LINES_BETWEEN_CORPORA == 0 or is_last:
            line += log_lines.of_corpora(facts.row)
        self.note(line)
        self.lines += 1
        self.steps_since_line = 0
        self.last_line = time.monotonic()

    def pass_over(self, iteration: int, consumed: int, batch: int) -> None:
        """Record a step that --skip-samples leaves out: `batch` samples that end at `consumed`."""
        row = {"iteration": iteration, "consumed_samples": consumed, "skipped_samples": batch}
        self._write(row)
        self.note(log_lines.of_skipped_step(iteration, self.total, consumed, batch))

    def evaluation(self, name: str, done: Progress, loss: float) -> None:
        """Record a mean loss per token; name: `validation`, `test`, or a set of --eval-data."""
        self.evaluations[name] = loss
        row = {"iteration": done.iteration, "consumed_samples": done.consumed_samples}
        self._write(row | {"consumed_tokens": done.usage.tokens, f"{name}_loss": loss})
        self.note(log_lines.of_evaluation(name, done.iteration, self.total, loss))

    def note(self, line: str) -> None:
        """Print a line on rank 0, and append it to log.txt."""
        if not self.is_writer:
            return
        # If writing fails, self.text stays None, and nothing more is written to log.txt.
        text = self.text
        self.text = None
        with self.without("log.txt, from here on"):
            if text:
                text.write(line + "\n")
                text.flush()
            self.text = text
        try:
            print(line, flush=True)
        except OSError as error:  # Python keeps the unwritten text for the next print
            if error.errno not in NOT_WRITTEN:
                raise

    def summarize(self) -> None:
        """Print the summary on rank 0."""
        if self.is_writer and self.steps:  # a resumed run that was complete has no steps
            self.note(self._summary())

    def close(self) -> None:
        """Close the files and trackers; print how many rows could not be written, if any."""
        self.metrics.finish()
        for name, tracker in self.trackers.items():
            with self.without(f"{name}'s last rows"):
                tracker.close()
        if self.text:
            with contextlib.suppress(OSError):  # `note` has already printed why a write failed
                self.text.close()
            self.text = None

    def _of_corpora(self, done: Progress) -> dict[str, Mapping[str, float]]:
        """Return the tokens trained on and the epochs, by corpus, for the row of metrics.jsonl."""
        corpora = done.usage.corpora
        length = self.config.model.seq_length
        if not corpora:
            return {}
        epochs = {
            prefix: corpora[prefix][0] * length / tokens
            for prefix, tokens in self.epoch_tokens.items()
            if prefix in corpora
        }
        tokens = {prefix: count for prefix, (_, count) in corpora.items()}
        return {"corpus_tokens": tokens, "corpus_epochs": epochs}

    def _facts(self, row: dict[str, Any]) -> log_lines.Facts:
        count = self.config.run.log_every or self.steps_since_line
        samples, seconds, losses = zip(*self.steps[-count:])
        recent = self.steps[-RECENT_STEPS:]
        pace = sum(second for _, second, _ in recent) / sum(count for count, _, _ in recent)
        left = self.config.total_samples - row["consumed_samples"]
        return log_lines.Facts(
            row=row,
            total=self.total,
            loss=sum(losses) / len(losses),
            seconds=sum(seconds) / len(seconds),
            samples_per_second=sum(samples) / sum(seconds),
            skipped=self.skipped,
            nan=self.nan,
            seconds_left=max(0.0, left * pace) if row["iteration"] < self.total else 0.0,
        )

    def _write(self, row: dict[str, Any]) -> None:
        if not self.is_writer:
            return
        self.metrics.write(row)
        trackers = self.trackers
        self.trackers = {}
        for name, tracker in trackers.items():  # a tracker that fails is not called again
            with self.without(f"{name}, from here on"):
                tracker.write(row["iteration"], row)
                self.trackers[name] = tracker

    @contextlib.contextmanager
    def without(self, what: str) -> Iterator[None]:
        """Catch an OSError of the block and print that `what` cannot be written."""
        try:
            yield
        except OSError as error:
            self.note(f"cannot write {what}: {error.strerror or error}; the run goes on")

    # -- start and end ----------------------------------------------------------------------

    def _open_files(self, kernels: dict[str, str], checkpoint_bytes: int | None) -> None:
        facts = {
            "version": VERSION,
            "config": self.config.as_dict(),
            "cluster": self.context.describe(),
            "kernels": kernels,
            "parameters": model_stats.parameters(self.config.model),
            "checkpoint_bytes": checkpoint_bytes,
            "blocks_per_stage": [spec.blocks for spec in self.stage_specs],
            "flops_formula": FORMULA,
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "commit": _commit(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
            },
        }
        out = self.config.run.out
        new = os.path.join(out, "run.json.new")
        earlier = ["run.json", "metrics.jsonl", "times.jsonl", "log.txt"]
        # A run from step 0 must not add to the checkpoints and files of an earlier run.
        continued = ["checkpoints", "audits.jsonl", "spikes.jsonl", TRACKED_RUNS]
        earlier += [] if self.config.run.resume else continued
        try:
            os.makedirs(out, exist_ok=True)
            with open(new, "w") as file:
                json.dump(facts, file, indent=1)
            _keep_earlier(out, earlier)
            os.rename(new, os.path.join(out, "run.json"))
            open(self.metrics.path, "w").close()
            self.text = open(os.path.join(out, "log.txt"), "w")  # noqa: SIM115
            if self.config.run.tensorboard or self.config.run.wandb:
                from telemetry.trackers import open_trackers

                self.trackers = open_trackers(self.config)
        except OSError as error:
            raise UserError(f"cannot write in {out}: {error.strerror or error}") from None

    def _print_start(self, kernels: dict[str, str]) -> None:
        lines = [self._layout_line(), *self._batch_lines()]
        lines += [f"{purpose}: {kernel}" for purpose, kernel in kernels.items()]
        lines.append(f"TFLOPs per rank by formula {FORMULA}; hardware TFLOPs add recomputation")
        if self.config.run.saves:
            from config.families import export_note  # runs without checkpoints do not need it

            lines += filter(None, [export_note(self.config.model)])
        lines.append(partition.stage_table(self.stage_specs, self.config.model))
        layout = self.config.layout
        if layout.pp > 1:
            largest = max(level.batch for level in self.config.levels)
            count = self.config.micro_batches(largest)
            device = self.context.device.type
            order = of_layout(self.config.model, layout, count, device)
            slots = simulation.simulate(order)
            lines.append(f"schedule {layout.schedule}, bubble {simulation.bubble(slots):.1%}:")
            lines.append(simulation.draw(slots, columns=24))
        for line in lines:
            self.note(line)

    def _layout_line(self) -> str:
        layout = self.config.layout
        facts = self.context.describe()
        ranks = "1 rank" if facts["ranks"] == 1 else f"{facts['ranks']} ranks"
        counts = [self.config.micro_batches(level.batch) for level in self.config.levels]
        micro_batches = " to ".join(map(str, sorted({min(counts), max(counts)})))
        axes = f"tp {layout.tp} x pp {layout.pp}" + f" x cp {layout.cp}" * (layout.cp > 1)
        options = f"recompute {layout.recompute}"
        if layout.recompute_layers is not None:
            options += f" of the first {layout.recompute_layers} blocks of a stage"
        if layout.recompute_blocks is not None:
            options += f" of {layout.recompute_blocks} blocks"
        if layout.sequence_parallel:
            options += ", sequence parallel"
        if layout.overlap_param_gather:
            options += ", weights gathered in the forward pass"
        return (
            f"{ranks} by {facts['launcher']} on {', '.join(facts['nodes'])}: "
            f"{axes} x dp {layout.dp}, zero {layout.zero}, "
            f"micro-batch {layout.micro_batch_size} x {micro_batches}, {options}; "
            f"{facts['device']}, {facts['threads_per_rank']} threads a rank, "
            f"collectives: {facts['backend']}, {self.config.training.precision}"
        )

    def _batch_lines(self) -> list[str]:
        """Return the start-up lines about the batch sizes, and the options that change them."""
        config = self.config
        layout = config.layout
        levels = config.batches.levels()
        sizes = [f"{level.batch} from step {level.first_step + 1}" for level in levels]
        if len(sizes) > 6:
            sizes[3:-2] = ["..."]
        text = f"{', '.join(sizes)} ({levels[-1].consumed} samples); {len(levels)} sizes"
        if len(levels) == 1:
            text = f"{levels[0].batch} samples"
        lines = [f"global batch: {text}, {config.total_steps} steps"]
        if config.skipped:
            ranges = ", ".join(f"{first}:{end}" for first, end in config.skipped)
            lines.append(f"batches that hold samples of {ranges} are passed over")
        planned = batch_schedule(config.training, config.model.seq_length)
        if planned != config.batches:
            micro = layout.micro_batch_size
            dp = layout.dp
            lines.append(
                f"--decrease-batch-size-if-needed: rounded down to multiples of "
                f"micro-batch-size({micro}) * dp({dp}) = {micro * dp}, in the end "
                f"{levels[-1].batch} in place of {planned.levels()[-1].batch}"
            )
        return lines

    def _summary(self) -> str:
        config = self.config
        out = config.run.out
        rates = self.rates[WARM_UP_STEPS:] or self.rates
        device = self.context.device.type
        lines = [
            "",
            self._layout_line(),
            partition.stage_table(self.stage_specs, config.model),
            step_stats.table(config, device, self.before, self.latest),
            f"tokens per second: {statistics.median(rates):.0f} (median of {len(rates)} steps, "
            f"fastest {max(rates):.0f}, slowest {min(rates):.0f})",
            f"loss: first {self.steps[0][-1]:.4f}, last {self.steps[-1][-1]:.4f}"
            + "".join(f", {split} {loss:.4f}" for split, loss in self.evaluations.items()),
            f"where the time of a step goes: python plan.py gap {out}",
            f"files: {out}/run.json, {out}/metrics.jsonl"
            + (f", {out}/tensorboard" if "tensorboard" in self.trackers else ""),
        ]
        return "\n".join(lines)


def _keep_earlier(out: str, names: list[str]) -> None:
    """Rename an earlier run's files to NAME.1 (or .2, ...), so that nothing is overwritten."""
    paths = [os.path.join(out, name) for name in names]
    number = unused_number(paths)
    for path in filter(os.path.lexists, paths):
        os.rename(path, f"{path}.{number}")


def _commit() -> str | None:
    """Return this code's git commit, with + if tracked files differ; None outside of git."""
    folder = os.path.dirname(os.path.abspath(__file__))
    command = ["git", "-C", folder, "describe", "--always", "--exclude=*", "--abbrev=40"]
    try:
        done = subprocess.run([*command, "--dirty=+"], capture_output=True, text=True)
    except FileNotFoundError:  # no git on this node
        return None
    return done.stdout.strip() or None
