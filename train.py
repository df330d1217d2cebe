"""Trains a GPT: one run, from its configuration to its last row of metrics.

    python train.py --model gpt2-124m --data synthetic --steps 20 --global-batch-size 8
    mpirun -n 4 python train.py --config run.toml --tp 2 --pp 2
    srun -n 384 python train.py --model bloom-176b --tp 4 --pp 12 ...
    torchrun --nproc-per-node 8 train.py --tp 8 ...

dp follows from the number of ranks. `python train.py --help` lists every option.
"""

import sys

from config.command_line import parse
from config.messages import UserError, exit_with
from config.schema import Config, Training
from config.validation import check
from distributed.context import Context, prepare, start
from distributed.launch import Launch, check_launch, discover
from distributed.stop_conditions import (
    STOPPED_EARLY,
    Signals,
    StopConditions,
    check_kill_switch,
    listen,
)
from schedules import partition

if __name__ == "__main__":
    # --help, a typo or a batch that does not divide is answered before torch is imported.
    SIGNALS, LAUNCH = listen(), discover()
    try:
        if oddity := check_launch(LAUNCH):
            print(f"note: {oddity}", file=sys.stderr, flush=True)
        CONFIG = check(parse(sys.argv[1:], __doc__), LAUNCH.size)
        check_kill_switch(CONFIG.run)
    except UserError as mistake:
        exit_with(mistake, LAUNCH.rank == 0, LAUNCH.patience)
    prepare(CONFIG.run)

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

import data
from checkpointing.load import Progress
from checkpointing.save import Checkpointer
from config.batch_schedule import touches
from distributed import preflight
from distributed.mesh import Mesh
from model import Stage, attention_kernel
from parallel import ParamFactory
from pipeline import Pipeline
from telemetry import memory_report, step_stats
from telemetry.log import Log
from telemetry.loss_monitor import LossMonitor
from telemetry.replica_check import unequal_replicas
from telemetry.step_stats import GO_ON, SAVE, SAVE_AND_STOP, StepStats
from telemetry.step_trace import StepTrace
from zero import Optimizer, StepResult

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


# ------------------------------------------------------------------------------------------------
# The pieces of a run
# ------------------------------------------------------------------------------------------------


@dataclass
class TrainState:
    """What one rank holds of a run, for one layout."""

    config: Config
    build: ParamFactory
    parts: list[partition.StageSpec]  # of every rank of the pipeline
    stage: Stage
    pipeline: Pipeline
    optimizer: Optimizer


def build(config: Config, context: Context | None = None) -> TrainState:
    """Build this rank's stage, pipeline and optimizer; collective over all ranks.

    `config` has passed checks.check. Without a cluster it is a world of one on the CPU.
    """
    layout, training = config.layout, config.training
    mesh = Mesh(layout.axes, context)
    builder = ParamFactory(
        mesh,
        DTYPES[training.precision],
        context.device if context else torch.device("cpu"),
        training.seed,
        training.init_std,
        layout.sequence_parallel,
    )
    costs = partition.part_costs(config.model, builder.device.type)
    parts = partition.stage_specs(config.model, layout, costs)
    stage = Stage(builder, config.model, layout, parts[mesh.pp.rank])
    optimizer = Optimizer(stage, builder, training, layout)
    return TrainState(config, builder, parts, stage, Pipeline(stage, builder, config), optimizer)


def step(pieces: TrainState, samples: data.Samples, consumed: int, lr: float) -> StepResult:
    """One optimizer step on the global batch that starts at sample `consumed`."""
    config, pipeline = pieces.config, pieces.pipeline
    size = config.batches.batch(consumed)
    count, tokens = config.micro_batches(size), size * config.model.seq_length
    batches = _batches(pieces, samples, consumed)
    optimizer = pieces.optimizer
    divisor = tokens / optimizer.scale.value
    loss = pipeline.train(batches, count, divisor, optimizer.before_backward)
    return optimizer.step(lr, loss, tokens)


def evaluate(pieces: TrainState, samples: data.Samples) -> float:
    """Mean loss per token over the first --eval-samples; collective over all ranks."""
    config, layout = pieces.config, pieces.config.layout
    count = config.data.eval_samples
    pieces.build.mesh.recorder.enter("evaluate")
    micro_batches = count // (layout.micro_batch_size * layout.dp)
    loss = pieces.pipeline.evaluate(_batches(pieces, samples, 0), micro_batches)
    world = pieces.build.mesh.world
    world.all_reduce(loss).wait()
    return world.values(loss) / (count * config.model.seq_length)


def _batches(pieces: TrainState, samples: data.Samples, first: int):
    """The function that gives this replica's micro-batches of the global batch at `first`."""
    mesh, device = pieces.build.mesh, pieces.build.device

    def batch(index: int) -> tuple[Tensor, Tensor]:
        layout = pieces.config.layout
        tokens, labels = data.micro_batch(samples, first, index, layout, mesh.dp.rank)
        return tokens.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    return batch


def learning_rate(training: Training, samples: int, total: int, batch: int) -> float:
    """The rate of a step on `batch` samples that starts when `samples` of `total` are trained on.

    Linear warm-up, then cosine, linear, constant, or WSD (arXiv 2404.06395: constant, and a
    linear fall at the end), to min_lr at lr_decay_samples.
    """
    peak, low = training.lr, training.min_lr
    end = training.lr_decay_samples or total
    if samples < training.lr_warmup_samples:
        return peak * (samples + batch) / (training.lr_warmup_samples + batch)
    if training.lr_schedule == "constant":
        return peak
    if samples >= end:
        return low
    start = training.lr_warmup_samples
    if training.lr_schedule == "wsd":
        start = max(start, end - (training.lr_wsd_decay_samples or end // 10))
    done = max(0.0, (samples - start) / max(1, end - start))
    if training.lr_schedule == "cosine":
        return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * done))
    return low + (peak - low) * (1 - done)


# ------------------------------------------------------------------------------------------------
# The run
# ------------------------------------------------------------------------------------------------


def main(config: Config, launch: Launch, signals: Signals | None = None) -> None:
    """Run to the end, or end every rank with a non-zero status; signals: `listen()`, if done."""
    listening = signals is None
    signals = signals or listen()
    context = start(launch, config.run)
    signals.end = context.end_all_ranks
    with context.failing_loudly(), memory_report.snapshot(config.run, context):
        preflight.introduce(config, context)
        splits = data.build(config)
        check_precision(config.training.precision, context)
        before = step_stats.measure(context.device, seconds=0.0)
        pieces = build(config, context)
        kernels = {
            "optimizer": pieces.optimizer.kernel,
            "attention": attention_kernel(config.model, pieces.build),
        }
        mesh, samples = pieces.build.mesh, splits.train
        before = step_stats.exchange(before, mesh.world, context.device)
        log = Log(config, context, pieces.parts, kernels, before)
        checkpoints = Checkpointer(config, mesh, pieces.optimizer, context, samples, log.note)
        preflight.check_room(config, context, checkpoints.bytes_needed, log.note)
        switches = StopConditions(config.run, signals, first=context.rank == 0)
        finished = Trainer(pieces, splits, log, checkpoints, switches).run()
        log.close()
    context.stop(0 if finished else STOPPED_EARLY)
    if listening:  # this process may have more to do
        signals.close()


class Trainer:
    """A run on its way: what its steps need, and how far it is (`done`)."""

    def __init__(
        self,
        pieces: TrainState,
        splits: data.Splits,
        log: Log,
        checkpoints: Checkpointer,
        switches: StopConditions,
    ):
        """Resume if --resume asks for it; collective over all ranks."""
        config, mesh = pieces.config, pieces.build.mesh
        self.config, self.pieces, self.splits, self.log = config, pieces, splits, log
        self.checkpoints, self.switches = checkpoints, switches
        self.world, self.recorder, self.device = mesh.world, mesh.recorder, pieces.build.device
        self.speed = step_stats.StragglerCheck(config, log.context.nodes)
        self.drawing = StepTrace(config.run, pieces.build, checkpoints.board, log.context, log.note)
        self.done = checkpoints.resume()
        self.total = config.steps_after(self.done.iteration, self.done.consumed_samples)
        log.total = self.total
        self.watch = LossMonitor(config, splits.train, self.done, log.writes, log.note)
        self.seconds_to_evaluate = 0.0

    def run(self) -> bool:
        """Train to the end, evaluating, logging and saving on the way.

        False if a switch or a signal ended it before; all is saved then. UserError if the loss is
        lost for good.
        """
        if self.done.iteration < self.total and self._largest_wish() == SAVE_AND_STOP:
            return self._stop_early()
        for iteration in range(self.done.iteration + 1, self.total + 1):
            last, evaluates = iteration == self.total, self._evaluates(iteration)
            wish = self._advance(iteration, evaluates)
            if self.watch.diverged:
                give_up(self.watch, self.done, self.checkpoints)
            if evaluates and (last or wish < SAVE_AND_STOP):  # a stop does not wait for it
                wish = max(wish, self._validate(iteration))
            every = self.config.run.check_replicas_every
            if every and (last or iteration % every == 0):
                self.recorder.enter("check replicas")
                check_replicas(self.pieces, iteration)
            if wish == SAVE_AND_STOP and not last:
                return self._stop_early()
            if last or not self.watch.bad:  # else --keep-last might delete the last good state
                self.checkpoints.after_step(self.done, last, asked=wish == SAVE)
            if not self.checkpoints.saving:
                self.switches.saved()
        if self.splits.test:
            loss = evaluate(self.pieces, self.splits.test)
            self.log.evaluation("test", self.total, self.done.consumed_samples, loss)
        self.checkpoints.close()
        self.switches.saved()
        return True

    def _evaluates(self, iteration: int) -> bool:
        every = self.config.data.eval_every
        due = iteration == self.total or (every and iteration % every == 0)
        return bool(self.splits.validation and due)

    def _advance(self, iteration: int, evaluates: bool) -> float:
        """Train on the next global batch, or pass it over; what all ranks wish then."""
        start, untrained = self.done.consumed_samples, self.done.skipped_samples
        batch = self.config.batches.batch(start)
        if touches(self.config.skipped, start, batch):
            self.done = Progress(iteration, start + batch, untrained + batch)
            self.log.pass_over(iteration, start + batch, batch)
            return GO_ON  # passed over in no time: nothing is asked before the next step
        began = time.perf_counter()
        self.recorder.begin_step(iteration)
        self.drawing.before(iteration)
        trained, samples = start - untrained, self.config.total_samples
        lr = learning_rate(self.config.training, trained, samples, batch)
        result = step(self.pieces, self.splits.train, start, lr)
        untrained += batch if result.skipped else 0
        self.done = Progress(iteration, start + batch, untrained)
        everyone = self._exchange(time.perf_counter() - began, evaluates)
        self.drawing.after(iteration)
        for line in self.speed.add(everyone):
            self.log.note(line)
        self.log.step(iteration, start + batch, batch, lr, result, everyone)
        self.watch.step(self.done, batch, result)
        return max(rank.wish for rank in everyone)

    def _exchange(self, seconds: float, evaluates: bool) -> list[StepStats]:
        """Every rank's end of the step: the one exchange between steps."""
        waiting = self.recorder.take_waited()
        ahead = self.checkpoints.seconds_to_save
        ahead += self.seconds_to_evaluate if evaluates else 0.0
        own = step_stats.measure(self.device, seconds, waiting, self.switches.wish(ahead))
        self.recorder.at("vitals")
        everyone = step_stats.exchange(own, self.world, self.device)
        self.recorder.end_step()
        return everyone

    def _validate(self, iteration: int) -> float:
        """Evaluate on the validation split; what all ranks wish afterwards."""
        began = time.perf_counter()
        loss = evaluate(self.pieces, self.splits.validation)
        self.log.evaluation("validation", iteration, self.done.consumed_samples, loss)
        self.seconds_to_evaluate = time.perf_counter() - began
        return self._largest_wish()

    def _largest_wish(self) -> float:
        """What is to be done at a boundary that is no step's end; collective over all ranks."""
        own = step_stats.measure(self.device, 0.0, wish=self.switches.wish())
        return max(rank.wish for rank in step_stats.exchange(own, self.world, self.device))

    def _stop_early(self) -> bool:
        """Save, and say who asked for the stop; False, for the run is not finished.

        UserError if it could not be saved.
        """
        reasons = self.checkpoints.board.agree(self.switches.reason, lambda of_ranks: of_ranks)
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        where = f"{reason} on rank {rank} ({self.log.context.nodes[rank]})"
        where += f", after iteration {self.done.iteration} of {self.total}"
        if self.done.iteration and not self.checkpoints.save_to_stop(self.done):
            raise UserError(f"stopped by {where}; its state could not be saved")
        self.switches.saved()
        again = f"--resume auto goes on (status {STOPPED_EARLY})"
        self.log.note(f"stopped by {where}; all is saved, {again}")
        return False


def check_precision(precision: str, context: Context) -> None:
    """Raise UserError if the GPU has no arithmetic of that precision. torch makes up for it on a
    CPU, slowly: run.json and the start-up lines say which precision runs."""
    if precision != "bf16" or context.device.type != "cuda":
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(context.device)
        raise UserError(f"--precision bf16: {name} has no bf16 arithmetic; use fp32")


def give_up(watch: LossMonitor, now: Progress, checkpoints: Checkpointer) -> None:
    """Save the last good state, if the run saves at all, and raise UserError: the loss is lost."""
    saved = checkpoints.enabled and watch.state_intact and watch.good.iteration > 0
    saved = saved and checkpoints.save_now(watch.good)
    checkpoints.close()
    raise watch.failure(now, saved)


def check_replicas(pieces: TrainState, iteration: int) -> None:
    """Raise RuntimeError, naming parameters and ranks, if copies of a weight have drifted apart."""
    unequal = unequal_replicas(pieces.stage, pieces.optimizer, pieces.build.mesh)
    if unequal:
        raise RuntimeError(
            f"after iteration {iteration} replicas are no longer equal: {'; '.join(unequal[:5])}"
            + (f" and {len(unequal) - 5} more" if len(unequal) > 5 else "")
        )


if __name__ == "__main__":
    main(CONFIG, LAUNCH, SIGNALS)
