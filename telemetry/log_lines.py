"""Text that people read: when a run starts, while it trains, and when it ends.

    step_line(row, total, steps, ...)     step 120/500 | loss 3.2104 | ... | 1:02:03 left
    at_start(config, facts, ...)        layout, batches, kernels, phases, the schedule
    summary(config, facts, ...)         seconds of steps and losses of a whole run

telemetry/log.py calls these functions.
"""

import math
import os
import shlex
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from architecture.families import export_note
from base.console import as_typed
from config.phases import PlacedPhase
from config.schema import Config
from config.timeline import Timeline
from corpora.tasks import TaskResult
from schedules import partition, simulation
from schedules.orders import schedule_for

FORMULA = "megatron-2025"  # how FLOPs are counted: one of FORMULAS in architecture/model_stats.py
# The summary's rates leave these first steps out: allocators, kernels and connections warm up.
WARM_UP_STEPS = 2
RECENT_STEPS = 20  # the time left is estimated from the pace of these last steps
MOST_SIZES = 6  # the start-up line names up to this many batch sizes
# With more batch sizes, the line names this many first and last sizes, and "..." between them.
FIRST_SIZES, LAST_SIZES = 3, 2


@dataclass
class Steps:
    """The steps since the run was started or resumed; the lists have an entry per step."""

    samples: list[int] = field(default_factory=list)  # the samples in the batch of each step
    lengths: list[int] = field(default_factory=list)  # the tokens of a sample of each step
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    skipped: int = 0  # the number of steps without an update
    nan: int = 0  # the number of steps whose loss was not finite
    began: float = field(default_factory=time.monotonic)  # clock reading when the run was started

    def add(self, samples: int, length: int, seconds: float, loss: float, skipped: bool) -> None:
        """Add a step with `samples` samples of `length` tokens; skipped: it made no update."""
        self.samples.append(samples)
        self.lengths.append(length)
        self.seconds.append(seconds)
        self.losses.append(loss)
        self.skipped += skipped
        self.nan += not math.isfinite(loss)


def unknown_tensors_line(about: dict[str, Any]) -> str:
    """Return the log line of a model that its options do not describe.

    about: what run.json says of the model (start_of_run.about_model).
    """
    unknown = about["unknown"]
    return (
        f"note: the model has {about['parameters']:,} parameters, {unknown['elements']:+,} beside "
        f"those that its options describe: {unknown['tensors']}. They are trained, saved and "
        "resumed; FLOPs, MFU, the partition and what the planner predicts leave them out, and an "
        "export to transformers refuses them"
    )


# ---- While a run trains --------------------------------------------------------------------------


def step_line(row: dict[str, Any], total: int, steps: Steps, count: int, samples_left: int) -> str:
    """Return a step's log line; it contains the MFU only if the device's peak FLOPS are known.

    row: the step's row of metrics.jsonl. total: the run's last step. count: the number of last
    steps over which the line's loss and rates are means. samples_left: until the end of the run.
    """
    losses = steps.losses[-count:]
    loss = sum(losses) / len(losses)
    # The row has the rates of this step alone. Times `ratio` they are means over `count` steps.
    mean_rate = sum(steps.samples[-count:]) / sum(steps.seconds[-count:])  # samples per second
    row_rate = row["global_batch_size"] / row["seconds"]
    ratio = mean_rate / row_rate
    recent_seconds = sum(steps.seconds[-RECENT_STEPS:])
    seconds_of_sample = recent_seconds / sum(steps.samples[-RECENT_STEPS:])
    seconds_left = max(0.0, samples_left * seconds_of_sample)
    if row["iteration"] >= total:
        seconds_left = 0.0
    mtp_loss = [f"MTP loss {row['mtp_loss']:.4f}"] if "mtp_loss" in row else []
    z_loss = [f"z-loss {row['z_loss']:.2E}"] if "z_loss" in row else []
    parts = [
        f" step {row['iteration']}/{total}",
        f"loss {loss:.4f}",
        *z_loss,
        *mtp_loss,
        f"grad norm {row['grad_norm']:.3f}",
        f"lr {row['learning_rate']:.2E}",
        f"{row['tokens_per_second'] * ratio:,.0f} tokens/s",
    ]
    if row["mfu"] is not None:
        parts.append(f"MFU {row['mfu'] * ratio:.1%}")
    parts.append(f"{row['peak_memory_bytes'] / 1e9:.1f} GB")
    parts.append(f"{duration(seconds_left)} left")
    if "expert_loads" in row:
        load = f"busiest expert {max(row['expert_loads']):.2f} x the mean load"
        parts.append(f"{load}, {row['largest_expert_share']:.0%} of its layer's routed tokens")
    epochs = list(row.get("corpus_epochs", {}).values())
    if len(epochs) == 1:
        parts.append(f"epoch {epochs[0]:.3f}")
    if steps.skipped:
        parts.append(f"{steps.skipped} skipped")
    if steps.nan:
        parts.append(f"{steps.nan} nan")
    return " | ".join(parts)


def corpora_line(row: dict[str, Any]) -> str:
    """Return a line end and the line about the corpora, to be added to a step's log line.

    row: the step's row of metrics.jsonl. With fewer than two corpora the result is empty, since
    `step_line` shows the epoch of a run's only corpus.
    """
    epochs = row.get("corpus_epochs", {})
    if len(epochs) < 2:
        return ""
    tokens = row["corpus_tokens"]
    parts = [f"{name}: {tokens[name]} tokens, {epochs[name]:.4f} epochs" for name in epochs]
    return "\n " + " | ".join(parts)


def evaluation_line(name: str, iteration: int, total: int, loss: float) -> str:
    """Return the log line of an evaluation after the step `iteration` of `total` steps.

    name: `validation`, `test`, or a set of --eval-data. loss: the mean per token, in nats; the
    perplexity is its exponential.
    """
    perplexity = math.exp(min(loss, 100.0))
    return f" step {iteration}/{total} | {name} loss {loss:.4f} | perplexity {perplexity:.5g}"


def phase_line(timeline: Timeline, phase: PlacedPhase, done: int) -> str:
    """Return the log line of a phase of --phases. done: the steps of the run before it is printed.

    A start that goes on with a phase says at which step it began.
    """
    parts = [f"{phase.batch} samples of {phase.length} tokens", " ".join(map(str, phase.data))]
    own = phase.settings
    if own.has_rate:
        parts.append(f"rate {own.lr_schedule}")
    begin = f"from step {phase.step + 1}, {phase.tokens:,} tokens"
    if done > phase.step:
        begin += " (begun before)"
    number = timeline.phases.index(phase) + 1
    return f" phase {number} of {len(timeline.phases)}, {phase.name}: {begin} | {' | '.join(parts)}"


def task_line(name: str, iteration: int, total: int, result: TaskResult) -> str:
    """Return the log line of a task of --eval-tasks after the step `iteration` of `total`."""
    return (
        f" step {iteration}/{total} | task {name} | accuracy {result.accuracy:.4f} | normalised "
        f"accuracy {result.normalised_accuracy:.4f} | {result.bits_per_byte:.4f} bits per byte"
    )


def skipped_step_line(iteration: int, total: int, consumed: int, batch: int) -> str:
    """Return the log line of a step that --skip-samples leaves out.

    consumed: the run's samples after the step. batch: the number of samples left out.
    """
    samples = f"{consumed - batch} to {consumed - 1}"
    return f" step {iteration}/{total} | skipped by --skip-samples: {samples}"


def duration(seconds: float) -> str:
    """Return seconds as text: `1:02:03` (hours, minutes, seconds), or `2d 1:02:03` with days."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{whole_seconds:02}"
    if days:
        return f"{days}d {clock}"
    return clock


# ---- At the start and at the end -----------------------------------------------------------------


def at_start(
    config: Config,
    facts: dict[str, Any],
    stages: list[partition.StageSpec],
    kernels: dict[str, str],
) -> list[str]:
    """Return the lines that a run prints before its first step.

    facts: the result of Context.describe. stages: all stages of the pipeline. kernels: the
    implementation in use, by purpose.
    """
    lines = [_layout_line(config, facts), *_batch_lines(config)]
    if facts.get("network"):  # GPUs on several nodes
        lines.append(f"network: {facts['network']}")
    lines += [f"{purpose}: {kernel}" for purpose, kernel in kernels.items()]
    lines.append(f"TFLOPs per rank by formula {FORMULA}; hardware TFLOPs add recomputation")
    if config.run.saves:
        # The note is a warning if the checkpoints cannot be exported to Hugging Face's format.
        note = export_note(config.model)
        if note:
            lines.append(note)
    lines.append(partition.stage_table(stages, config.model))
    if config.layout.pp > 1:
        # Draw the schedule of the largest batch, with its idle share (the bubble).
        largest = max(level.batch for level in Timeline(config).levels)
        count = config.layout.micro_batches(largest)
        order = schedule_for(config.layout, count)
        slots = simulation.simulate(order)
        bubble = simulation.bubble(slots)
        lines.append(f"schedule {config.layout.schedule}, bubble {bubble:.1%}:")
        lines.append(simulation.draw(slots, columns=24))
    return lines


def _layout_line(config: Config, facts: dict[str, Any]) -> str:
    """Return the line about ranks, layout and devices; facts: the result of Context.describe."""
    layout = config.layout
    threads = f"{facts['threads_per_rank']} threads a rank"
    if facts["threads_per_rank"] == 1:
        threads = "1 thread a rank"
    ranks = f"{facts['ranks']} ranks"
    if facts["ranks"] == 1:
        ranks = "1 rank"
    axes = f"tp {layout.tp} x pp {layout.pp}"
    if layout.cp > 1:
        axes += f" x cp {layout.cp}"
    # A level is a batch size of the run; each may have another number of micro-batches.
    counts = {layout.micro_batches(level.batch) for level in Timeline(config).levels}
    micro_batches = str(min(counts))
    if len(counts) > 1:
        micro_batches += f" to {max(counts)}"
    options = f"recompute {layout.recompute}"
    if layout.recompute_layers is not None:
        options += f" of the first {layout.recompute_layers} blocks of a stage"
    if layout.recompute_blocks is not None:
        options += f" of {layout.recompute_blocks} blocks"
    if layout.sequence_parallel:
        options += ", sequence parallel"
    if layout.overlap_param_gather:
        options += ", weights gathered in the forward pass"
    if layout.zero == 3:
        often = "in every micro-batch" if layout.sync_each_batch else "once a step"
        options += f", gradients reduced {often}"
        if not layout.reshard_after_forward:
            options += ", weights kept from forward to backward pass"
    return (
        f"{ranks} by {facts['launcher']} on {', '.join(facts['nodes'])}: "
        f"{axes} x dp {layout.dp}, zero {layout.zero}, "
        f"micro-batch {layout.micro_batch_size} x {micro_batches}, {options}; "
        f"{facts['device']}, {threads}, "
        f"collectives: {facts['backend']}, {config.training.precision}"
    )


def _batch_lines(config: Config) -> list[str]:
    """Return the start-up lines about the batch sizes, and about samples that are skipped.

    With several sizes, the line has the step at which each begins, and the number of samples before
    the last size begins.
    """
    timeline = Timeline(config)
    if timeline.phases:
        return [_phases_line(timeline), *_skipped_lines(timeline)]
    levels = timeline.batches.levels()
    last_level = levels[-1]
    text = f"{levels[0].batch} samples"
    if len(levels) > 1:
        sizes = [f"{level.batch} from step {level.first_step + 1}" for level in levels]
        if len(sizes) > MOST_SIZES:
            sizes[FIRST_SIZES:-LAST_SIZES] = ["..."]
        text = f"{', '.join(sizes)} ({last_level.consumed} samples); {len(levels)} sizes"
    return [f"global batch: {text}, {timeline.total_steps} steps", *_skipped_lines(timeline)]


def _skipped_lines(timeline: Timeline) -> list[str]:
    """Return the start-up line about samples that are skipped, if there are any."""
    if not timeline.skipped:
        return []
    ranges = ", ".join(f"{first}:{end}" for first, end in timeline.skipped)
    return [f"batches that hold samples of {ranges} are skipped"]


def _phases_line(timeline: Timeline) -> str:
    """Return the start-up line about the phases of --phases: where each begins, where all end."""
    begins = [f"{s.name} from step {s.step + 1} ({s.tokens:,} tokens)" for s in timeline.phases]
    total = timeline.tokens_at(timeline.total_samples)
    return f"phases: {', '.join(begins)}; {timeline.total_steps} steps, {total:,} tokens"


def finished(steps: int, samples: int, left: int, batch: int) -> str:
    """Return the line of a start that has no step to do.

    steps, samples: what the run has done. left: samples up to the run's end, fewer than the next
    step's `batch`.
    """
    line = f"the run is finished: {steps:,} steps, {samples:,} samples are done"
    if left > 0:
        line += f", and the {left} that are left are fewer than a batch of {batch}"
    return f"{line}; a larger --steps or --train-samples trains on"


def summary(
    config: Config,
    facts: dict[str, Any],
    stages: list[partition.StageSpec],
    steps: Steps,
    memory: str,
    evaluations: dict[str, float],
) -> str:
    """Return the text at the end of a run that has trained at least one step.

    facts: the result of Context.describe. memory: the table of peak memory. evaluations: the last
    losses, by the name of the evaluation.
    """
    out = config.run.out
    rates = []  # tokens per second of every step
    for samples, length, seconds in zip(steps.samples, steps.lengths, steps.seconds):
        rates.append(samples * length / seconds)
    rates = rates[WARM_UP_STEPS:] or rates
    losses = f"loss: first {steps.losses[0]:.4f}, last {steps.losses[-1]:.4f}"
    for name, loss in evaluations.items():
        losses += f", {name} {loss:.4f}"
    files = f"files: {out}/run.json, {out}/metrics.jsonl"
    if config.run.tensorboard:
        files += f", {out}/tensorboard"
    lines = [
        "",
        _layout_line(config, facts),
        partition.stage_table(stages, config.model),
        memory,
        f"tokens per second: {statistics.median(rates):.0f} (median of {len(rates)} steps, "
        f"fastest {max(rates):.0f}, slowest {min(rates):.0f})",
        losses,
    ]
    if os.path.exists(os.path.join(out, "times.jsonl")):  # a run of few steps measures none
        command = as_typed(f"python plan.py gap {shlex.quote(out)}")
        lines.append(f"where the time of a step goes: {command}")
    lines.append(files)
    return "\n".join(lines)
