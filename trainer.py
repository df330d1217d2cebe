"""Builds the objects of a training run and runs its training loop.

    state = build(config, context)                 this rank's stages, pipeline and optimizer
    result = step(state, samples, consumed, lr)    one optimizer step
    main(config, launch, signals)                  a whole run, as train.py starts it

A step has one direction: data.BatchReader gives micro-batches, pipeline.train runs them through
the model's stages, zero's Optimizer.step turns their gradients into new weights.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

import data
from attention import attention_kernel
from checkpointing.checkpoints import Checkpoints
from checkpointing.state import Progress, check_begin, room_for_saves
from config.messages import UserError
from config.schema import Config
from distributed import garbage, start_checks
from distributed.context import Context, start
from distributed.launch import Launch
from distributed.mesh import Mesh
from distributed.stop_conditions import STOPPED_EARLY, RequestedAction, Signals, StopConditions
from model import Stage
from optim import precision
from optim.precision import DTYPES
from optim.update_rules import learning_rate
from parallel import CPU, DeferredGradients, ParamFactory
from pipeline import Ends, Pipeline
from schedules.partition import StageSpec, part_costs, stage_specs
from telemetry import replica_check, step_stats
from telemetry.log import Log
from telemetry.loss_monitor import LossMonitor, give_up
from telemetry.step_stats import StepStats
from telemetry.step_times import StepTimes
from zero import Optimizer, StepResult

StepObserver = Callable[[int], None]  # called with the number of the step
GO_ON, SAVE, SAVE_AND_STOP = RequestedAction
COMPILED = (
    "norms with the sums before them, heads with rotary positions, SwiGLU (in evaluations and "
    "samples these run as they are), and the loss; by torch.compile"
)


# ---- What a run consists of ----------------------------------------------------------------------


@dataclass
class ModelState:
    """One rank's part of a model in one layout: all that evaluation needs."""

    config: Config
    factory: ParamFactory
    stage_specs: list[StageSpec]  # of the whole pipeline
    stages: nn.ModuleList  # this rank's stages, in the model's order
    pipeline: Pipeline
    reader: data.BatchReader


@dataclass
class TrainState(ModelState):
    """One rank's part of a model, with its optimizer: all that training needs."""

    optimizer: Optimizer
    # Called before the passes of each step, with its first sample and the length of its samples.
    before_passes: list[Callable[[int, int], None]] = field(default_factory=list)


def build(config: Config, context: Context | None = None) -> TrainState:
    """Build this rank's stages, pipeline and optimizer; collective over all ranks.

    `config` has passed validation.check, and --schedule auto is decided (telemetry/pass_times.py).
    context: None for a world of one rank on the CPU.
    """
    model = build_model(config, context)
    config = model.config
    optimizer = Optimizer(model.stages, model.factory, config.training, config.layout, config.model)
    state = TrainState(**vars(model), optimizer=optimizer)
    if config.run.routing_file and optimizer.balance:
        from telemetry.routing_file import RoutingFile  # here, since few runs need the module

        routing = RoutingFile(config, model.factory, optimizer.balance.routers)
        state.before_passes.append(routing.begin_step)
    return state


def build_model(config: Config, context: Context | None = None) -> ModelState:
    """Build this rank's stages, pipeline and batch reader, as `build`, but no optimizer."""
    device = context.device if context else CPU
    config, _ = precision.settled(config, context)
    layout = config.layout
    training = config.training
    heads = layout.over_heads(config.model)
    ep = (layout.ep or 1) if config.model.experts > 1 else 0
    mesh = Mesh(layout.axes, context, layout.stages_per_rank > 1, bool(layout.vocab_pp), heads, ep)
    dtype = DTYPES[training.precision]
    seed = training.seed
    std = training.init_std
    deferred = DeferredGradients() if layout.splits_backward else None
    factory = ParamFactory(mesh, dtype, device, seed, std, layout.sequence_parallel, deferred)
    factory = replace(factory, compile=config.run.compile)
    if layout.zero == 3 and mesh.replicas.size > 1:
        from optim.fsdp import block_sharder  # here, since it loads 43 MB of torch's modules

        factory = replace(factory, shard=block_sharder(factory, training))
    specs = stage_specs(config.model, layout, part_costs(config.model, factory.device.type))
    stage_of: dict[int, Stage] = {}
    for spec in specs:
        if spec.rank == mesh.pp.rank:
            first = stage_of.get(0)
            masked = config.data.masks_attention
            stage_of[spec.index] = Stage(factory, config.model, layout, spec, first, masked)
    stages = nn.ModuleList(stage_of.values())
    ends = Ends
    if layout.vocab_pp:
        from vocabulary import VocabularyEnds  # here, since only --vocab-pp needs the module

        ends = VocabularyEnds
    pipeline = Pipeline(stage_of, factory, config, ends)
    reader = data.BatchReader(config, mesh.dp.rank, factory.device, mesh.cp)
    return ModelState(config, factory, specs, stages, pipeline, reader)


def step(state: TrainState, samples: data.Samples, consumed: int, lr: float) -> StepResult:
    """One optimizer step on the global batch that starts at sample `consumed`."""
    loss_sum, counted = passes(state, samples, consumed)
    masks = state.config.data.masks_loss
    return state.optimizer.step(lr, loss_sum, counted if masks else None)


def warm_up(state: TrainState, samples: data.Samples, consumed: int) -> None:
    """Run the passes of one micro-batch of the next step and discard the gradients, so that
    --compile compiles and a GPU loads its kernels (start_checks.warms_up). The step reuses the
    micro-batch.
    """
    state.factory.mesh.recorder.enter("warm up")
    passes(state, samples, consumed, keep=True, some=1)
    state.optimizer.discard()


def passes(
    state: TrainState, samples: data.Samples, consumed: int, keep: bool = False, some: int = 0
) -> tuple[Tensor, int]:
    """Run a step's forward and backward passes; return loss sum and targets as Pipeline.train.
    keep: the next passes reuse the micro-batches. some: run only the first so many, 0: all.
    """
    config = state.config
    size = config.batches.batch(consumed)
    length = config.model.seq_length
    micro_batches = some or config.micro_batches(size)
    batches = state.reader.batches(samples, consumed, config, keep=keep)
    loss_weight = state.optimizer.begin_step(size * length, micro_batches)
    for begin in state.before_passes:
        begin(consumed, length)
    return state.pipeline.train(batches, micro_batches, loss_weight)


def evaluate(state: ModelState, samples: data.Samples, count: int) -> float:
    """Return the mean loss per target of the first `count` samples, 0 without any; collective."""
    config = state.config
    mesh = state.factory.mesh
    mesh.recorder.enter("evaluate")
    micro_batches = -(-count // (config.layout.micro_batch_size * config.layout.dp))
    batches = state.reader.batches(samples, 0, config, count)
    loss_sum, counted = state.pipeline.evaluate(batches, micro_batches)
    sums = torch.stack([loss_sum, torch.full_like(loss_sum, counted)])
    mesh.world.at_once.all_reduce(sums).wait()
    total, targets = mesh.world.values(sums)
    return total / max(1.0, targets)


# ---- The run -------------------------------------------------------------------------------------


def main(config: Config, launch: Launch, signals: Signals | None = None) -> None:
    """Run all steps; an error ends every rank. signals: the caller's handlers, None: new ones."""
    listening = signals is None
    signals = signals or Signals()
    context = start(launch, config.run)
    signals.have_met(context.end_all_ranks)
    with context.failing_loudly(), step_stats.snapshot(config.run, context), ExitStack() as end:
        context.take(config.run.out)
        on_gpu = context.device.type == "cuda"
        layout = config.layout.automatic(config.model.seq_length, on_gpu)
        config, decided = precision.settled(replace(config, layout=layout), context)
        notes: list[str] = []
        if config.layout.schedule == "auto":
            from telemetry.pass_times import decide_schedule  # here: a given one needs no search

            config, notes = decide_schedule(config, context)
        start_checks.introduce(config, context, decided)
        splits = data.build(config)
        precision.check(config, context)
        at_start = step_stats.measure(context.device, seconds=0.0)
        state = build(config, context)
        end.callback(state.reader.close)
        mesh = state.factory.mesh
        samples = splits.train
        before = step_stats.exchange(at_start, mesh.world, context.device)
        kernels = _kernels(state, splits)
        start_checks.check_compiler(kernels, context.device.type, context.nodes[context.rank])
        room = room_for_saves(config, state.optimizer)
        log = Log(config, context, state.stage_specs, kernels, before, room)
        end.callback(log.close)  # after an error too: close() prints the number of unwritten rows
        for note in [*notes, *splits.notes]:
            log.note(note)
        pp = config.layout.pp
        if config.run.blocking and pp > 1 and on_gpu:
            log.note(f"--blocking: with pp({pp}) it does not wait for every CUDA kernel")
        checks = None
        if config.run.check_replicas_every:
            checks = partial(replica_check.check, state.stages, state.optimizer, mesh)
        checkpoints = Checkpoints(config, mesh, state.optimizer, context, samples, log.note, checks)
        start_checks.check_room(config, context, checkpoints.bytes_needed, log.note)
        conditions = StopConditions(config.run, signals, first=context.rank == 0)
        trainer = Trainer(state, splits, log, checkpoints, conditions)
        end.callback(trainer.losses.spikes.finish)
        end.enter_context(garbage.collecting_between_steps())
        finished = trainer.run()
        log.summarize()
        if finished:
            checkpoints.finish(trainer.done, conditions.wants_stop)
    context.stop(0 if finished else STOPPED_EARLY)
    if listening:  # the caller may go on: restore its signal handlers
        signals.close()


def _kernels(state: TrainState, splits: data.Splits) -> dict[str, str]:
    """Return the names of the kernels and data readers that run, for the log and run.json."""
    config = state.config
    micro_batch = state.config.layout.micro_batch_size
    masked = config.data.masks_attention
    kernels = {
        "optimizer": state.optimizer.kernel,
        "attention": attention_kernel(config.model, state.factory, micro_batch, masked),
        "data": splits.source,
    }
    return kernels | ({"compiled": COMPILED} if config.run.compile else {})


class Trainer:
    """The training loop of one run. done: the run's progress, equal on every rank."""

    def __init__(
        self,
        state: TrainState,
        splits: data.Splits,
        log: Log,
        checkpoints: Checkpoints,
        conditions: StopConditions,
    ):
        """Resume if --resume asks for it; collective over all ranks."""
        config = state.config
        mesh = state.factory.mesh
        self.config = config
        self.state = state
        self.splits = splits
        self.log = log
        self.checkpoints = checkpoints
        self.conditions = conditions
        self.world, self.recorder, self.device = mesh.world, mesh.recorder, state.factory.device
        self.stragglers = step_stats.StragglerCheck(config, log.context.nodes)
        self.done = checkpoints.resume()
        check_begin(config, self.done)
        self.total = config.steps_after(self.done.iteration, self.done.consumed_samples)
        log.total, log.epoch_tokens = self.total, splits.epoch_tokens
        self.losses = LossMonitor(config, splits.train, self.done, log)
        self.seconds_to_evaluate = 0.0
        self.before_step: list[StepObserver] = [self.recorder.begin_step]
        self.after_step: list[StepObserver] = [garbage.collect_after]
        self.write_samples: Callable[[int, bool], None] = lambda iteration, last: None
        self.step: Callable[..., StepResult] = partial(step, state)
        self._add_observers()
        self.cold = start_checks.warms_up(config, self.device.type)

    def _add_observers(self) -> None:
        """Add the observers that the options ask for: a profile, step times, samples of text."""
        state, log = self.state, self.log
        exchange = self.checkpoints.exchange
        if self.config.run.torch_profile:
            from telemetry.torch_profile import TorchProfile

            profile = TorchProfile(log, state.pipeline.finish_sending)
            self.before_step.append(profile.before)
            self.after_step.append(profile.after)
        if self.config.run.trace_numerics:
            from telemetry.numerics_trace import NumericsTrace

            self.step = NumericsTrace(state, passes, step, exchange.gather, log.without).step
        if self.config.run.audit_every:
            from telemetry.audit import Audit

            self.after_step.append(Audit(state, self.checkpoints, log, self.done, self.total).after)
        self.after_step.append(StepTimes(exchange, log).after)
        if self.config.run.sample_every:
            from decoding import Decoder, RunSamples

            decoder = Decoder(state.pipeline, state.factory, self.config.model)
            samples = RunSamples(self.config, decoder, state.optimizer.finish_gathering, log.note)
            self.write_samples = samples.after_step

    def run(self) -> bool:
        """Train to the last step, and evaluate, log and save between steps; return True.

        Return False if a stop condition or a signal ended the run earlier: its state is saved.
        Raise UserError if training has diverged.
        """
        action: float = GO_ON
        if self.done.iteration < self.total:
            at_boundary = self.conditions.action_after(self.done.consumed_samples)
            action = max(self._largest_request(), at_boundary)
        if action == SAVE_AND_STOP:
            return self._stop_early()
        save_requested = action == SAVE
        for iteration in range(self.done.iteration + 1, self.total + 1):
            last, due = iteration == self.total, self._evaluations_due(iteration)
            action = self._advance(iteration, evaluates=bool(due))
            if self.losses.diverged:
                give_up(self.losses, self.done, self.checkpoints)
            # A requested stop skips the evaluation, which would delay the stop.
            if due and (last or action < SAVE_AND_STOP):
                action = max(action, self._evaluate(due))
            if last or action < SAVE_AND_STOP:
                self.write_samples(iteration, last)
            every = self.config.run.check_replicas_every
            if every and (last or iteration % every == 0):
                self.checkpoints.check_replicas(iteration)
            action = max(action, self.conditions.action_after(self.done.consumed_samples))
            if action == SAVE_AND_STOP and not last:
                return self._stop_early()
            save_requested |= action == SAVE
            if last or not self.losses.bad:  # if bad, --keep-last might delete the last good state
                self.checkpoints.after_step(self.done, last, save_requested)
                save_requested = False
                if not self.checkpoints.saving:
                    self.conditions.saved()
        if self.splits.test:
            loss = evaluate(self.state, self.splits.test, self.config.data.eval_samples)
            self.log.evaluation("test", self.done, loss)
        self.checkpoints.close()
        self.conditions.saved()
        return True

    def _evaluations_due(self, iteration: int) -> dict[str, tuple[data.Samples, int]]:
        """Return by name the samples, and their number, of each evaluation due after this step."""
        every, splits = self.config.data.eval_every, self.splits
        if iteration != self.total and not (every and iteration % every == 0):
            return {}
        if splits.validation is None:
            return dict(splits.eval_sets)
        validation = splits.validation, self.config.data.eval_samples
        return {"validation": validation, **splits.eval_sets}

    def _advance(self, iteration: int, evaluates: bool) -> float:
        """Train on the next global batch, or skip it; return the ranks' largest request."""
        begin = self.done.consumed_samples
        batch = self.config.batches.batch(begin)
        if self.config.passes_over(begin, batch):
            self._count(iteration, batch, trained=False)
            self.log.pass_over(iteration, begin + batch, batch)
            return GO_ON  # a skipped batch takes no time: requests wait for the next step
        if self.cold:
            self._warm_up(begin)
        began = time.perf_counter()
        for observe in self.before_step:
            observe(iteration)
        trained, samples = begin - self.done.skipped_samples, self.config.total_samples
        lr = learning_rate(self.config.training, trained, samples, batch)
        result = self.step(self.splits.train, begin, lr)
        self._count(iteration, batch, trained=not result.skipped)
        seconds = step_stats.seconds_since(began, self.device, self.recorder)
        everyone = self._exchange(seconds, evaluates)
        self.log.context.launch.watch.close()  # the start is over
        for observe in self.after_step:
            observe(iteration)
        for line in self.stragglers.add(everyone):
            self.log.note(line)
        self.log.step(self.done, batch, lr, result, everyone)
        self.losses.step(self.done, batch, result)
        return max(rank.requested_action for rank in everyone)

    def _warm_up(self, begin: int) -> None:
        """Call `warm_up` once, before the first step that is not skipped, and log its seconds."""
        self.cold, began = False, time.perf_counter()
        warm_up(self.state, self.splits.train, begin)
        garbage.freeze()
        seconds = step_stats.seconds_since(began, self.device, self.recorder)
        self.log.note(f"warmed up by the passes of a micro-batch in {seconds:.1f} s")

    def _count(self, iteration: int, batch: int, trained: bool) -> None:
        """Add a step on `batch` samples to `done`; trained: whether it changed the weights."""
        begin, untrained = self.done.consumed_samples, self.done.skipped_samples
        counts = self.splits.train.count_by_corpus(begin, begin + batch)
        length = self.config.model.seq_length
        usage = self.done.usage.after(counts, batch, length, trained)
        untrained += 0 if trained else batch
        self.done = Progress(iteration, begin + batch, untrained, usage)

    def _exchange(self, seconds: float, evaluates: bool) -> list[StepStats]:
        """Return every rank's statistics of a step that took `seconds`; collective over the world.

        The statistics hold each rank's requested action, so there is one exchange between steps.
        """
        ahead = self.checkpoints.seconds_to_save
        ahead += self.seconds_to_evaluate if evaluates else 0.0
        action = max(self.conditions.requested_action(ahead), self.checkpoints.requested_action)
        own = step_stats.measure(self.device, seconds, self.recorder.take_waited(), action)
        self.recorder.at("statistics")
        everyone = step_stats.exchange(own, self.world, self.device)
        self.recorder.end_step()
        return everyone

    def _evaluate(self, due: dict[str, tuple[data.Samples, int]]) -> float:
        """Evaluate on each of `due`; return the ranks' largest request afterwards."""
        began = time.perf_counter()
        for name, (samples, count) in due.items():
            self.log.evaluation(name, self.done, evaluate(self.state, samples, count))
        self.seconds_to_evaluate = time.perf_counter() - began
        return self._largest_request()

    def _largest_request(self) -> float:
        """Return the ranks' largest request, before step 1 or after an evaluation; collective."""
        action = self.conditions.requested_action()
        own = step_stats.measure(self.device, 0.0, requested_action=action)
        everyone = step_stats.exchange(own, self.world, self.device)
        return max(rank.requested_action for rank in everyone)

    def _stop_early(self) -> bool:
        """Save, print which rank requested the stop, and return False: the run is not finished.
        Raise UserError if the state could not be saved.
        """
        reasons = self.checkpoints.exchange.gather("stop", self.conditions.reason)
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        where = f"{reason} on rank {rank} ({self.log.context.nodes[rank]})"
        where += f", after iteration {self.done.iteration} of {self.total}"
        if self.done.iteration and not self.checkpoints.save_to_stop(self.done):
            raise UserError(f"stopped by {where}; its state could not be saved")
        self.conditions.saved()
        again = f"--resume auto continues (status {STOPPED_EARLY})"
        self.log.note(f"stopped by {where}; all is saved, {again}")
        return False
