"""Builds the objects of a training run and runs its training loop.

    state = build(config, context)                 makes this rank's stages, pipeline and optimizer
    result = step(state, samples, consumed, lr)    does one optimizer step
    main(config, launch, signals)                  does a whole run; called by train.py

A step has one direction: data.BatchReader gives micro-batches, pipeline.train runs them through
the model's stages, zero's Optimizer.step turns their gradients into new weights. After it each rank
requests an action: to go on, to save, or to save and stop. The largest of them is done.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import data
from architecture.mup import mup_of
from base.errors import UserError
from checkpointing.folders import Chosen
from checkpointing.save import Checkpointer
from checkpointing.state import Progress, check_begin, fingerprints
from config.learning_rate import rate_at
from config.past import Past
from config.phases import PlacedPhase
from config.schema import Config
from config.timeline import Timeline
from corpora.tasks import TaskSet, read_tasks
from costs import auto_schedule
from costs.partition_costs import part_costs
from distributed import preflight
from distributed.context import Context, start
from distributed.garbage import collect_after, collecting_between_steps, freeze
from distributed.launch import Launch
from distributed.mesh import mesh_of_run
from distributed.stop_conditions import (
    STOPPED_EARLY,
    RequestedAction,
    Signals,
    StopConditions,
    outlook,
)
from distributed.store import StoreExchange, first_given
from inference.decoding import Decoder
from inference.run_samples import RunSamples
from inference.scoring import Scorer
from layers import mixers
from layers.attention import attention_kernel
from model import Stage
from optim import precision
from optim.precision import DTYPES
from parallel import CPU, DeferredGradients, ParamFactory
from pipeline import Pipeline
from schedules.partition import StageSpec, stage_specs
from telemetry import log_lines, replica_check, run_time, step_stats
from telemetry.audit import Audit
from telemetry.expected_curve import ExpectedCurve
from telemetry.log import Log
from telemetry.loss_monitor import make_monitor, skip_earlier_spikes
from telemetry.numerics_trace import NumericsTrace
from telemetry.observer import Observer, Step
from telemetry.replica_check import ReplicaCheck
from telemetry.routing_file import RoutingFile
from telemetry.saving import Saving
from telemetry.start_of_run import about_model, find_past, find_tensors
from telemetry.step_stats import StatsExchange, StepStats
from telemetry.step_times import StepTimes
from telemetry.stragglers import StragglerCheck
from telemetry.torch_profile import TorchProfile
from zero import Optimizer, StepResult


@dataclass
class ModelState:
    """One rank's part of a model in one layout: everything that an evaluation needs."""

    timeline: Timeline  # of the run's options
    factory: ParamFactory
    stage_specs: list[StageSpec]  # one for each stage of the whole pipeline
    stages: nn.ModuleList  # this rank's stages, in the model's order
    pipeline: Pipeline
    reader: data.BatchReader
    length: int  # the tokens of a sample, which `set_length` changes

    @property
    def config(self) -> Config:
        """The options of the run."""
        return self.timeline.config


@dataclass
class TrainState(ModelState):
    """One rank's part of a model, with its optimizer: everything that a training step needs."""

    optimizer: Optimizer
    # Functions that are called before the forward passes of each step. Their arguments are the
    # number of the step's first sample, and the number of tokens in a sample.
    before_passes: list[Callable[[int, int], None]] = field(default_factory=list)


def build(
    config: Config, context: Context | None = None, least_bucket: int | None = None
) -> TrainState:
    """Return this rank's stages, pipeline, batch reader and optimizer; collective over all ranks.

    config: options that passed validation.check; its schedule is not "auto". context: this rank's
    connections to the other ranks; None for a world of one rank on the CPU. least_bucket: see
    config.buffer_sizes.bucket_elements.
    """
    model = build_model(config, context)
    config = model.config
    optimizer = Optimizer(
        model.stages, model.factory, config.training, config.layout, config.model, least_bucket
    )
    state = TrainState(**vars(model), optimizer=optimizer)
    if config.run.routing_file and optimizer.balance:
        routing = RoutingFile(config, model.factory, optimizer.balance.routers)
        state.before_passes.append(routing.begin_step)
    return state


def build_model(config: Config, context: Context | None = None) -> ModelState:
    """Return this rank's stages, pipeline and batch reader, without an optimizer.

    Collective over all ranks; called by `build` and sample.py. context: None for one CPU rank.
    """
    config, _ = precision.decide(config, context)
    layout = config.layout
    training = config.training
    mesh = mesh_of_run(config, context)
    device = context.device if context else CPU
    deferred = DeferredGradients() if layout.splits_backward else None
    dtype = DTYPES[training.precision]
    sequence_parallel = layout.sequence_parallel
    factory = ParamFactory(mesh, dtype, device, training, sequence_parallel, deferred)
    factory = replace(
        factory,
        compile=config.run.compile,
        cp_mixer=layout.cp_mixer,
        mup=mup_of(config.model),
    )
    if layout.zero == 3 and mesh.replicas.size > 1:
        from optim.fsdp import block_sharder  # only --zero 3 needs the 43 MB that this loads

        factory = replace(factory, shard=block_sharder(factory, training, layout))
    costs = part_costs(config.model, training.precision, factory.device.type)
    specs = stage_specs(config.model, layout, costs)
    masked = config.data.masks_attention
    stage_of: dict[int, Stage] = {}  # this rank's stages by their number in the pipeline
    for spec in specs:
        if spec.rank == mesh.pp.rank:
            first_stage = stage_of.get(0)  # a tied head on the same rank uses its embedding
            stage_of[spec.index] = Stage(factory, config.model, layout, spec, first_stage, masked)
    stages = nn.ModuleList(stage_of.values())
    pipeline = Pipeline(stage_of, factory, config)
    reader = data.BatchReader(config, mesh.dp.rank, factory.device, mesh.cp)
    length = config.model.seq_length
    return ModelState(Timeline(config), factory, specs, stages, pipeline, reader, length)


def step(state: TrainState, samples: data.Samples, consumed: int, lr: float) -> StepResult:
    """Do one optimizer step on the global batch of `samples` that starts at sample `consumed`.

    Return its loss and gradient norm. lr: the learning rate of this step.
    """
    loss_sum, targets = run_passes(state, samples, consumed)
    if not state.config.data.masks_loss:
        return state.optimizer.step(lr, loss_sum)
    # With loss masks the forward passes have counted the targets, by which losses are divided.
    return state.optimizer.step(lr, loss_sum, targets)


def set_length(state: ModelState, length: int) -> None:
    """Take samples of `length` tokens from now on: those of a phase of --phases, or of evaluations.

    Weights, optimizer and reader stay; what depends on the length is made when it is first needed.
    """
    if state.length == length:
        return
    state.length = length
    model = replace(state.config.model, seq_length=length)
    stage: Any
    for stage in state.stages:
        stage.set_length(model)
    state.pipeline.finish_sending()
    state.pipeline.set_length(length)


def warm_up(state: TrainState, samples: data.Samples, consumed: int) -> None:
    """Run the passes of the next step's first micro-batch, and discard the gradients.

    Called before the first step if preflight.warms_up: --compile compiles here, and a GPU loads
    its kernels. The step, which starts at sample `consumed`, takes the same micro-batch again.
    """
    state.factory.mesh.recorder.enter("warm up")
    run_passes(state, samples, consumed, keep=True, limit=1)
    state.optimizer.discard()


def run_passes(
    state: TrainState, samples: data.Samples, consumed: int, keep: bool = False, limit: int = 0
) -> tuple[Tensor, int]:
    """Run the forward and backward passes of the step that starts at sample `consumed`.

    Return this rank's share of the sum of losses (Pipeline.train) and of the number of targets: not
    0 on one rank of each replica. keep: cache the micro-batches, so that the step after the warm-up
    reuses them. limit: the number of micro-batches to run, 0: all.
    """
    config = state.config
    size = state.timeline.batch_at(consumed)
    length = state.length
    micro_batches = limit or config.layout.micro_batches(size)
    batches = state.reader.batches(samples, consumed, state.timeline, keep=keep)
    depth = config.model.mtp_depth
    # The numbers of labels in the global batch: of the next token, and of those of --mtp-depth.
    targets = [size * max(0, length - later) for later in range(depth + 1)]
    counted = None  # how many labels of the next token count in the loss, if that is needed
    if config.data.masks_loss and (config.training.has_router_losses or depth):
        targets = count_labels(state, batches, config.layout.micro_batches(size))
        counted = targets[0]
    state.factory.loss_weight.mtp = tuple(
        config.training.mtp_weight / depth * targets[0] / max(1, count) for count in targets[1:]
    )
    loss_weight = state.optimizer.begin_step(size * length, micro_batches, counted)
    for begin_step in state.before_passes:
        begin_step(consumed, length)
    return state.pipeline.train(batches, micro_batches, loss_weight)


def count_labels(state: ModelState, batches: data.MicroBatches, micro_batches: int) -> list[int]:
    """Return how many labels of the global batch count in the loss; collective over all ranks.

    The first number is that of the next token, then come those of the modules of --mtp-depth. The
    ranks that compute losses read all of the batch for it, and keep it for the passes.
    """
    mesh = state.factory.mesh
    depth = state.config.model.mtp_depth
    counted = torch.zeros(1 + depth, dtype=torch.int64, device=state.factory.device)
    if mesh.pp.rank == state.pipeline.last_rank and mesh.tp.rank == 0:
        batches.keep()
        for index in range(micro_batches):
            mesh.recorder.at("data", index)
            of_batch = batches(index).targets_after(depth)
            counted += torch.tensor(of_batch, device=counted.device)
    mesh.world.at_once.all_reduce(counted).wait()
    return mesh.world.values(counted)


def _prepare_decoding(state: TrainState) -> None:
    """Make the model ready to continue texts: its weights gathered, its own length of samples."""
    set_length(state, state.config.model.seq_length)  # of the tables for positions
    state.optimizer.finish_gathering()


def evaluate(state: ModelState, samples: data.Samples, count: int) -> float:
    """Return the mean loss per target of the first `count` samples, 0 if they have no target.

    Collective over all ranks; the result is the same on every rank.
    """
    config = state.config
    mesh = state.factory.mesh
    mesh.recorder.enter("evaluate")
    samples_at_once = config.layout.micro_batch_size * config.layout.dp
    micro_batches = -(-count // samples_at_once)  # rounded up
    batches = state.reader.batches(samples, 0, state.timeline, count)
    loss_sum, targets = state.pipeline.evaluate(batches, micro_batches)
    sums = torch.stack([loss_sum, torch.full_like(loss_sum, targets)])
    mesh.world.at_once.all_reduce(sums).wait()
    total_loss, total_targets = mesh.world.values(sums)
    return total_loss / max(1.0, total_targets)


def main(config: Config, launch: Launch, signals: Signals | None = None) -> None:
    """Do a whole run on this rank and exit with its status; an error on any rank ends every rank.

    signals: the caller's handlers; None: install handlers here, and remove them after the run.
    """
    restores_handlers = signals is None
    signals = signals or Signals()
    context = start(launch, config.run)
    signals.have_met(context.end_all_ranks, context.say_once)
    with context.failing_loudly():
        finished = _train(config, context, signals)
    context.stop(0 if finished else STOPPED_EARLY)
    if restores_handlers:
        signals.close()


def _train(config: Config, context: Context, signals: Signals) -> bool:
    """Build a run, do its steps, and write its last checkpoint; return whether no step is left."""
    with ExitStack() as cleanup:
        context.lock_folder(config.run.out)
        config, precision_line, notes = decide(config, context)
        preflight.introduce(config, context, precision_line)  # prints it, and checks the nodes
        config, chosen, lines = find_past(config, context)
        config = skip_earlier_spikes(config)
        splits = data.build(config)
        tasks = read_tasks(config)
        precision.check(config, context)
        stats_at_start = step_stats.measure(context.device, seconds=0.0)  # memory without a model
        state = build(config, context)
        cleanup.callback(state.reader.close)
        tensors = find_tensors(state.optimizer, state.factory.mesh, context)
        log = _open_log(state, context, splits.source, stats_at_start, tensors)
        cleanup.callback(log.close)  # after an error too: close() prints the unwritten rows' number
        for note in [*notes, *lines, *splits.notes, *tasks.notes]:
            log.note(note)
        checkpoints = _checkpointer(state, context, splits.train, log, chosen)
        preflight.check_room(config, context, checkpoints.bytes_needed, log.note)
        conditions = StopConditions(config.run, signals, first=context.rank == 0)
        trainer = Trainer(state, splits, tasks, log, checkpoints, conditions)
        signals.explain(partial(outlook, context.recorder), trainer.describe_saved)
        cleanup.callback(trainer.close)
        cleanup.enter_context(collecting_between_steps())
        finished = trainer.run()
        log.summarize()
        if finished:
            checkpoints.finish(trainer.done, conditions.wants_stop)
        checkpoints.finish_commands(not finished, conditions.wants_stop)
    return finished


def decide(config: Config, context: Context | None) -> tuple[Config, str, list[str]]:
    """Decide what the options leave open: layout, precision, schedule. Collective over all ranks.

    Return the configuration, a line about the precision, and lines for the log. context: None for
    a world of one rank on the CPU.
    """
    device = "cpu" if context is None else context.device.type
    layout = config.layout.automatic(config.model.seq_length, device == "cuda")
    # `find_past` reads on rank 0 what was done before: other nodes may not see it yet.
    config = replace(config, layout=layout, past=Past())
    config, precision_line = precision.decide(config, context)
    config, notes = auto_schedule.decide_with_note(config, device)
    return config, precision_line, notes


def _open_log(
    state: TrainState,
    context: Context,
    source: str,
    at_start: StepStats,
    tensors: dict[str, tuple[tuple[int, ...], bool]],
) -> Log:
    """Return the run's log, with the kernels that this run uses; collective over all ranks.

    source: how samples are read. at_start: this rank's statistics before the model was built.
    tensors: those of the whole model (start_of_run.find_tensors). Raise UserError if a kernel needs
    a compiler, and this node has none.
    """
    config = state.config
    masked = config.data.masks_attention
    attention = attention_kernel(
        config.model, state.factory, config.layout.micro_batch_size, masked
    )
    attention = "; ".join(filter(None, (attention, mixers.kernel_of(config.model, state.factory))))
    kernels = preflight.kernel_names(config, state.optimizer.kernel, attention, source)
    if config.data.eval_tasks:  # their texts share samples, under masks
        name = attention_kernel(config.model, state.factory, config.layout.micro_batch_size, True)
        kernels["attention of tasks"] = name
    preflight.check_compiler(kernels, context.device.type, context.nodes[context.rank])
    before = step_stats.exchange(at_start, state.factory.mesh.world, context.device)
    about = about_model(tensors, config.model)
    return Log(config, context, state.stage_specs, kernels, before, about)


def _checkpointer(
    state: TrainState, context: Context, samples: data.Samples, log: Log, chosen: Chosen | None
) -> Checkpointer:
    """Return what saves and loads the run; collective over all ranks.

    samples: the training samples. chosen: the checkpoint of --resume.
    """
    config = state.config
    mesh = state.factory.mesh
    optimizer = state.optimizer
    check_replicas = None
    if config.run.check_replicas_every:
        check_replicas = partial(replica_check.check, state.stages, optimizer, mesh)
    return Checkpointer(config, mesh, optimizer, context, samples, log.note, check_replicas, chosen)


class Trainer:
    """The training loop of one run; `done` is the run's progress, equal on every rank."""

    def __init__(
        self,
        state: TrainState,
        splits: data.Splits,
        tasks: TaskSet,
        log: Log,
        checkpoints: Checkpointer,
        conditions: StopConditions,
    ):
        """Make the loop's observers, and load the checkpoint of --resume, if any; collective."""
        config = state.config
        mesh = state.factory.mesh
        self.config = config
        self.state = state
        self.splits = splits
        self.log = log
        self.checkpoints = checkpoints
        # Values of all ranks, through the store; a save in the background has its own exchange.
        context = log.context
        self.exchange = StoreExchange(
            context.store, context.rank, context.size, "run", mesh.recorder
        )
        self.conditions = conditions
        self.recorder = mesh.recorder
        self.device = state.factory.device
        self.stats_exchange = StatsExchange(mesh, self.device, conditions, checkpoints)
        self.timeline = state.timeline
        self.last_step = self.timeline.total_steps
        # A start that is refused, or has no step to do, replaces no file of the run's record. The
        # lines about the checkpoint are in the new record.
        with log.held():
            self.done = checkpoints.resume()  # the run's progress: steps, samples, tokens
            check_begin(config, self.done)  # UserError if it is from before --begin-at-samples
            if self.done.iteration < self.last_step:
                self._begin_record()
        log.epoch_tokens = splits.epoch_tokens
        self.needs_warm_up = preflight.warms_up(config, self.device.type)
        self.phase: PlacedPhase | None = None  # of --phases, the one of the newest step
        self.warm_lengths = set[int]()  # lengths of samples for which kernels were warmed up
        self.observers = self._make_observers(tasks)

    def _make_observers(self, tasks: TaskSet) -> list[Observer]:
        """Return what observes the steps, in the order in which it is called; collective.

        The log has a step before the monitor of losses may end the run for it. A save comes last,
        after all that may refuse the state.
        """
        run, state, log = self.config.run, self.state, self.log
        checkpoints, exchange, train = self.checkpoints, self.exchange, self.splits.train
        observers: list[Observer] = []
        if run.torch_profile:
            observers.append(TorchProfile(log, state.pipeline.finish_sending))
        if run.trace_numerics:
            trace = NumericsTrace(state, train, run_passes, exchange.agree, log.without)
            observers.append(trace)
        if run.audit_every:
            audit = Audit(state, checkpoints, exchange, log, self.done, self.last_step)
            observers.append(audit)
        observers.append(StepTimes(exchange, log))
        observers.append(StragglerCheck(self.config, log.context.nodes, log.note))
        observers.append(log)
        if run.expect:
            tokens = self.timeline.tokens_at(self.timeline.total_samples)
            parameters = log.about_model["parameters"]
            observers.append(ExpectedCurve(run.expect, run.out, log, parameters, tokens))
        observers.append(make_monitor(state, train, checkpoints, exchange, log, self.done))
        observers.append(Evaluations(state, self.splits, tasks, log, self.stats_exchange))
        if run.sample_every:
            decoder = Decoder(state.pipeline, state.factory, self.config)
            prepare = partial(_prepare_decoding, state)
            samples = RunSamples(self.config, decoder, prepare, log.note, checkpoints.ends())
            observers.append(samples)
        if run.check_replicas_every:
            observers.append(ReplicaCheck(run.check_replicas_every, checkpoints))
        observers.append(Saving(checkpoints, self.conditions))
        return observers

    def run(self) -> bool:
        """Train to the last step, with the observers between steps; return True.

        Return False if a stop condition or a signal ended the run earlier, with its state saved.
        Raise UserError if training has diverged.
        """
        requested = self._requested_at_start()
        if requested == RequestedAction.SAVE_AND_STOP:
            return self._stop_early()
        self._announce()
        for iteration in range(self.done.iteration + 1, self.last_step + 1):
            this_step = self._next_step(iteration)
            this_step.request(requested)  # before the first step: a save, which is done after it
            self._train_or_skip(this_step)
            for observer in self.observers:
                observer.between_steps(this_step)
            if this_step.stops:
                return self._stop_early()
            requested = RequestedAction.GO_ON
        for observer in self.observers:
            observer.at_end(self.done)
        return True

    def _requested_at_start(self) -> float:
        """Return the largest action that a rank requests before the first step of this start."""
        if self.done.iteration >= self.last_step:
            return RequestedAction.GO_ON
        by_samples = self.conditions.action_after(self.done.consumed_samples)
        return max(self.stats_exchange.largest_request(), by_samples)

    def close(self) -> None:
        """Let the observers write what waits; called when the run ends, also by an error."""
        for observer in self.observers:
            observer.at_exit()

    def _begin_record(self) -> None:
        """Open the files of the run's record on rank 0, because steps are about to run."""
        config = self.config
        samples: dict[str, str] = {}
        checkpoint_bytes: int | None = None
        if self.log.is_writer:
            if config.run.saves:
                checkpoint_bytes = self.checkpoints.bytes_needed
            answers = config.data.answers_only
            most = max(level.batch for level in self.timeline.levels)

            def skips(sample: int) -> bool:
                """Return whether the run may skip a sample, with another one of its batch."""
                first = max(0, sample - most + 1)
                return self.timeline.passes_over(first, sample + most - first)

            samples = fingerprints(self.splits.train, self.timeline.total_samples, answers, skips)
        self.log.begin(samples, checkpoint_bytes)

    def _announce(self) -> None:
        """Print how long the run will take, if that can be estimated and is long."""
        if not self.log.is_writer:
            return
        consumed = self.done.consumed_samples
        batch = self.timeline.batch_at(consumed)
        left = self.timeline.total_samples - consumed
        if self.done.iteration >= self.last_step:
            self.log.note(log_lines.finished(self.done.iteration, consumed, left, batch))
            return
        line = run_time.estimate(self.config, self.log.context, left, batch)
        if line:
            self.log.note(line)

    def describe_saved(self) -> str:
        """Return what of the run is saved now, in words, for a run that ends without a save.

        Called by the thread of the signals.
        """
        done = self.done.iteration
        newest = self.checkpoints.newest
        if newest is None:
            return f"no checkpoint was saved since the start, at step {done} now"
        at = f"the newest checkpoint is step {newest.iteration}"
        lost = done - newest.iteration
        return f"{at}; {lost} steps after it are lost" if lost else f"{at}, the last one done"

    def _next_step(self, iteration: int) -> Step:
        """Return step `iteration`, on the next global batch; set the length of its samples."""
        begin = self.done.consumed_samples
        batch = self.timeline.batch_at(begin)
        lr = rate_at(self.timeline, begin, self.done.skipped_samples, batch)
        is_last = iteration == self.last_step
        return Step(iteration, is_last, begin, batch, self._begin_phase(begin), lr, self.done)

    def _train_or_skip(self, this_step: Step) -> None:
        """Do a step, or skip its batch if --skip-samples names it. Collective over all ranks."""
        samples = self.splits.train
        if self.timeline.passes_over(this_step.consumed, this_step.batch):
            # This takes no time, so the requests of ranks wait for the next step.
            self._advance(this_step, trained=False)
            for observer in self.observers:
                observer.after_skip(this_step)
            return
        if self.needs_warm_up:
            self._warm_up(this_step.consumed)
        began = time.perf_counter()
        self.recorder.begin_step(this_step.iteration)
        for observer in self.observers:
            observer.before_step(this_step)
        result = step(self.state, samples, this_step.consumed, this_step.lr)
        # A step whose update was skipped, e.g. by an overflow, has not trained on its samples.
        self._advance(this_step, trained=not result.skipped)
        seconds = step_stats.seconds_since(began, self.device, self.recorder)
        ahead = sum(observer.seconds_between(this_step) for observer in self.observers)
        this_step.stats = self.stats_exchange.after_step(seconds, ahead)
        this_step.request(max(stats.requested_action for stats in this_step.stats))
        # The first step ends the start: the process that ends the job if a start fails may go.
        self.log.context.launch.watch.close()
        collect_after(this_step.iteration)
        for observer in self.observers:
            observer.after_step(this_step, result)

    def _advance(self, this_step: Step, trained: bool) -> None:
        """Count a step in the run's progress; trained: whether it has updated the weights."""
        self.done = self.done.after_step(
            self.splits.train, this_step.batch, this_step.length, trained
        )
        this_step.done = self.done

    def _begin_phase(self, begin: int) -> int:
        """Return the tokens of a sample of the step from sample `begin` on, after setting them.

        Log the phase of --phases if the step is its first, or the first of this start.
        """
        phase = self.timeline.phase_at(begin)
        if phase is None:
            return self.config.model.seq_length
        if phase != self.phase:
            self.phase = phase
            self.log.phase(phase, self.done.iteration)
            if phase.length not in self.warm_lengths:  # its kernels are new
                self.warm_lengths.add(phase.length)
                self.needs_warm_up = preflight.warms_up(self.config, self.device.type)
        set_length(self.state, phase.length)
        return phase.length

    def _warm_up(self, begin: int) -> None:
        """Call `warm_up` once, before the first step that trains, and log the seconds it takes."""
        self.needs_warm_up = False
        began = time.perf_counter()
        warm_up(self.state, self.splits.train, begin)
        freeze()
        seconds = step_stats.seconds_since(began, self.device, self.recorder)
        self.log.note(f"warmed up by the passes of a micro-batch in {seconds:.1f} s")

    def _stop_early(self) -> bool:
        """Save, print which rank requested the stop, and return False: the run is not finished.

        Raise UserError if the state could not be saved.
        """
        rank, reason = self.exchange.agree(self.conditions.reason, first_given, "stop")
        where = f"{reason} on rank {rank} ({self.log.context.nodes[rank]})"
        where += f", after step {self.done.iteration} of {self.last_step}"
        if self.done.iteration and not self.checkpoints.save_to_stop(self.done):
            raise UserError(f"stopped by {where}; its state could not be saved")
        self.conditions.saved()  # removes the file of --save-switch
        again = f"--resume auto continues (status {STOPPED_EARLY})"
        self.log.note(f"stopped by {where}; all is saved, {again}")
        return False


class Evaluations(Observer):
    """Evaluates the weights every --eval-every steps and after the last one, and logs the losses.

    With --eval-ema their average is evaluated too. Collective over all ranks.
    """

    def __init__(
        self, state: TrainState, splits: data.Splits, tasks: TaskSet, log: Log, stats: StatsExchange
    ):
        """Evaluate nothing yet. tasks: of --eval-tasks. stats: asks all ranks whether to stop."""
        self.config = state.config
        self.state = state
        self.splits = splits
        self.log = log
        self.stats = stats
        self.seconds = 0.0  # the seconds that the last evaluations took
        self.scorer: Scorer | None = None
        if tasks.tasks:
            self.scorer = Scorer(state.pipeline, state.factory, state.config, tasks)

    def seconds_between(self, step: Step) -> float:
        """Return the seconds of the last evaluations, if some are due after the step."""
        return self.seconds if self._is_due(step) else 0.0

    def between_steps(self, step: Step) -> None:
        """Do the evaluations that are due; a requested stop skips them, because they take long."""
        if step.stops or not self._is_due(step):
            return
        began = time.perf_counter()
        for name, (samples, count) in self._sets().items():
            self._evaluate(name, samples, count, step.done)
        if self.scorer:
            self._score(self.scorer, step.done)
        self.seconds = time.perf_counter() - began
        step.request(self.stats.largest_request())

    def at_end(self, done: Progress) -> None:
        """Evaluate the test set, once."""
        if self.splits.test:
            self._evaluate("test", self.splits.test, self.config.data.eval_samples, done)

    def _sets(self) -> dict[str, tuple[data.Samples, int]]:
        """Return by name the samples of each set, and how many of them are evaluated."""
        return self.splits.evaluations(self.config.data.eval_samples)

    def _is_due(self, step: Step) -> bool:
        """Return whether evaluations follow the step."""
        every = self.config.data.eval_every
        is_multiple = every > 0 and step.iteration % every == 0
        return (step.is_last or is_multiple) and bool(self._sets() or self.scorer)

    def _evaluate(self, name: str, samples: data.Samples, count: int, done: Progress) -> None:
        """Evaluate a set; name: in the log. done: the progress of the run."""
        set_length(self.state, self.config.model.seq_length)
        self.log.evaluation(name, done, evaluate(self.state, samples, count))
        if self.config.data.eval_ema:
            with self.state.optimizer.averaged_weights():
                loss = evaluate(self.state, samples, count)
            self.log.evaluation(f"{name}_ema", done, loss)

    def _score(self, scorer: Scorer, done: Progress) -> None:
        """Evaluate the tasks of --eval-tasks; done: the progress of the run."""
        set_length(self.state, self.config.model.seq_length)
        for task, result in scorer.results():
            self.log.task(task.name, done, result)
        if self.config.data.eval_ema:
            with self.state.optimizer.averaged_weights():
                found = scorer.results()
            for task, result in found:
                self.log.task(f"{task.name}_ema", done, result)
