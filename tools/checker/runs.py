"""One run on one rank: its losses, its replicas, and what the recorder has seen.

answer = work(context, CheckedRun(config))     on every rank of a world; a function of ranks.Worlds
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

import data
import trainer
from checkpointing.save import Checkpointer
from checkpointing.state import Progress
from config import validation
from config.learning_rate import rate_at
from config.schema import Config
from costs import auto_schedule
from distributed.context import Context
from telemetry.replica_check import differing_replicas
from telemetry.start_of_run import find_past
from tools.checker import inference
from tools.checker.alone import findings
from tools.checker.compare import Reference, Rounding, SeenPieces
from tools.checker.recorder import Piece, Recorder
from tools.checker.rounding import (
    DRAWS,
    growth_of,
    growth_of_answers,
    hold_as_measured,
    hold_what_rounding_moves,
    last_bits_flipped,
)
from tools.checker.shrink import LEAST_BUCKET
from tools.checker.thresholds import small_thresholds, wide_types

EVALUATED_AFTER = 2  # the step with an evaluation after it, beside the last: what it leaves behind


@dataclass(frozen=True)
class CheckedRun:
    """A run to do. config: with its layout. save: after this step the state is saved to --out, and
    the run ends. With --resume the run continues from there.
    """

    config: Config
    save: int = 0
    number: int = 0  # of the job: values in the store have it in their names
    sizes: str = ""  # the name of the run of one rank with which it is compared
    infers: bool = False  # whether texts are decoded and scored after the steps


@dataclass
class RunAnswer:
    """What a rank has to say about a run.

    losses, norms, loads: of every step. evaluated: the losses of evaluations by name. unequal:
    replicas that differ. seen: how its tensors compare with one rank's. pieces, aliases: of the
    recorder, if there is nothing to compare with; then also `alone`: what is wrong on one rank, and
    `rounding`: what was measured of it.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    loads: list[list[float]] = field(default_factory=list)
    evaluated: dict[str, float] = field(default_factory=dict)
    unequal: list[str] = field(default_factory=list)
    seen: SeenPieces | None = None
    pieces: list[Piece] = field(default_factory=list)
    aliases: dict[str, tuple[str, str]] = field(default_factory=dict)
    alone: list[str] = field(default_factory=list)
    rounding: Rounding = field(default_factory=Rounding)


class Worker:
    """Does runs on a rank and compares their tensors with those of one rank."""

    def __init__(self, references: dict[str, Reference] | None = None, looks_alone: bool = True):
        """Keep the runs of one rank, by their sizes; None: do that run, and return its pieces.

        looks_alone: whether the one rank also checks itself (alone.py), on CPUs, and measures its
        rounding (rounding.py).
        """
        self.references, self.looks_alone = references, looks_alone

    def __call__(self, context: Context, job: CheckedRun) -> RunAnswer:
        """Do a run on this rank; collective over the world."""
        with small_thresholds(), wide_types(job.config):
            return self._run(context, job)

    def _run(self, context: Context, job: CheckedRun) -> RunAnswer:
        """Build a run, train its steps, and compare its tensors with those of one rank."""
        if context.size > 1:
            # Values of an earlier run must not be taken for this one's.
            store = dist.PrefixStore(f"job {job.number}", context.store)
            context = replace(context, store=store)
        config = validation.check(job.config, context.size)
        config, chosen, _ = find_past(config, context)
        config = replace(config, layout=config.layout.automatic(config.model.seq_length, False))
        config, _ = auto_schedule.decide_with_note(
            config, context.device.type if context else "cpu"
        )
        splits = data.build(config)
        state = trainer.build(config, context, LEAST_BUCKET)
        recorder = Recorder(state)
        reference = None
        if self.references is not None:
            reference = self.references[job.sizes].in_precision(config)
            hold_as_measured(state, recorder, reference)
        try:
            answer = _train(state, recorder, splits, context, job, chosen)
            if reference is None and job.infers and self.looks_alone:
                answer.alone += inference.findings(state)
        finally:
            state.reader.close()
        if reference is not None:
            tp, mesh = config.layout.tp, state.factory.mesh
            answer.seen = SeenPieces.by(reference, recorder.pieces, tp, mesh)
            return answer
        answer.pieces, answer.aliases = recorder.pieces, recorder.aliases
        if self.looks_alone and config.training.precision == "fp64":
            answer.rounding = _rounding(config, context, job, splits, answer)
            if not job.sizes:
                answer.alone += findings(config, context)
        return answer


def _rounding(
    config: Config, context: Context, job: CheckedRun, splits: data.Splits, one: RunAnswer
) -> Rounding:
    """Run again with other last bits, and return how far this moves the tensors of `one`."""
    reference = Reference(one.pieces, one.aliases, config.training.precision)
    found = Rounding()
    for draw in range(1 if job.sizes else DRAWS):
        state = trainer.build(config, context, LEAST_BUCKET)
        try:
            with last_bits_flipped(state, draw) as flip_weights:
                recorder = Recorder(state)
                hold_what_rounding_moves(state, recorder, reference)
                again = _train(state, recorder, splits, context, job, None, flip_weights)
        finally:
            state.reader.close()
        held = {(step, spec.name) for step, spec, _ in recorder.updates}
        found.add(growth_of(reference, recorder.pieces), held)
        found.add(growth_of_answers(one, again), set())
    return found


def _train(
    state: trainer.TrainState,
    recorder: Recorder,
    splits: data.Splits,
    context: Context,
    job: CheckedRun,
    chosen: Any,
    before_step: Callable[[], None] = lambda: None,
) -> RunAnswer:
    """Train the steps of a run, and record each one; return losses and what was compared.

    chosen: the checkpoint to resume, if any. before_step: is called before each step.
    """
    config, mesh = state.config, state.factory.mesh
    done = Progress()
    checkpoints: Checkpointer | None = None
    if job.save or config.run.resume:
        checkpoints = Checkpointer(
            config, mesh, state.optimizer, context, splits.train, _say_nothing, None, chosen
        )
        done = checkpoints.resume()
    answer = RunAnswer()
    recorder.begin(done.iteration)  # the weights that were drawn, or the state that was loaded
    recorder.end()
    for iteration in range(done.iteration + 1, state.timeline.total_steps + 1):
        begin = done.consumed_samples
        batch = state.timeline.batch_at(begin)
        mesh.recorder.begin_step(iteration)
        recorder.begin(iteration)
        before_step()
        lr = rate_at(state.timeline, begin, done.skipped_samples, batch)
        result = trainer.step(state, splits.train, begin, lr)
        recorder.numbers(loss=result.loss, gradient_norm=result.grad_norm)
        recorder.end()
        trained = not result.skipped
        done = done.after_step(splits.train, batch, config.model.seq_length, trained)
        answer.losses.append(result.loss)
        answer.norms.append(result.grad_norm)
        answer.loads.append(result.expert_loads or [])
        if iteration == EVALUATED_AFTER:
            found = _evaluations(state, splits)
            answer.evaluated = {f"{name} after step {iteration}": loss for name, loss in found}
        if iteration == job.save and checkpoints is not None:
            checkpoints.save_to_stop(done)
            return answer
    answer.unequal = [x.sentence for x in differing_replicas(state.stages, state.optimizer, mesh)]
    answer.evaluated |= dict(_evaluations(state, splits))
    if job.infers:
        inference.record(state, recorder)
    return answer


def _evaluations(state: trainer.TrainState, splits: data.Splits) -> Any:
    """Yield the name and the loss of each evaluation."""
    for name, (samples, count) in splits.evaluations(state.config.data.eval_samples).items():
        yield name, trainer.evaluate(state, samples, count)
        if state.config.data.eval_ema:
            with state.optimizer.averaged_weights():
                yield f"{name}_ema", trainer.evaluate(state, samples, count)


_say_nothing: Callable[[str], None] = lambda line: None  # noqa: E731
