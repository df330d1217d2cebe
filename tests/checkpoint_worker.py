"""Saves and loads runs under a list of layouts in one start of ranks, and writes the results.

    mpirun -n 2 python tests/checkpoint_worker.py jobs.json results.json

A job is a dictionary: `options` as on the command line, with `out` and, to load, `resume`;
`before`: steps up to the save, if one is made; `after`: steps whose losses are returned.
"""

import dataclasses
from pathlib import Path

import torch
from golden_worker import run_jobs

import data
import trainer
from checkpointing import state
from checkpointing.save import Checkpointer
from checkpointing.state import Progress
from config import schema as configuration
from config import validation
from config.command_line import build
from config.learning_rate import learning_rate
from config.timeline import Timeline
from costs import auto_schedule
from distributed.context import Context
from telemetry.replica_check import differing_replicas

BATCH = 4


def options(case: dict) -> configuration.Config:
    """The configuration of a job, before it is checked against the ranks."""
    shape = {"layers": 2, "hidden": 32, "heads": 8, "seq_length": 16, "vocab_size": 61}
    length = {"global_batch_size": BATCH, "steps": 40, "lr": 1e-3, "pad_vocab_multiple": 4}
    length["micro_batch_size"] = 2
    # The golden test has this value: with 1e-8 the rounding of weights exceeds the tolerances.
    return build(shape | length | {"adam_eps": 1e-6} | case)


def make(out: Path, **extra) -> configuration.Config:
    """A run of one rank that saves at every step."""
    return validation.check(options({"out": str(out), "save_every": 1} | extra), 1)


def build_run(config, lines=None):
    """A run's TrainState and its Checkpointer, whose lines are appended to `lines`."""
    state = trainer.build(config)
    print_line = print if lines is None else lines.append
    return state, Checkpointer(config, state.factory.mesh, state.optimizer, print_line=print_line)


def save_some(out: Path, steps: int = 1, **extra) -> Path:
    """A checkpoint of every one of the first steps of a run that trains nothing."""
    checkpoints = build_run(make(out, **extra))[1]
    for step in range(1, steps + 1):
        checkpoints.after_step(Progress(step, 8 * step))
    checkpoints.close()
    return out / "checkpoints"


def save_random(out: Path, std: float, **extra) -> trainer.TrainState:
    """A run of random weights, biases and norms in `out`, with a checkpoint of its weights."""
    state, checkpoints = build_run(make(out, save_weights_only=True, **extra))
    torch.manual_seed(1)
    with torch.no_grad():
        for p in state.stages.parameters():
            rows = p.spec.stop - p.spec.start if p.spec.dim == 0 else p.shape[0]
            p[:rows].normal_(0.0, std)
            if p.spec.name.endswith("norm.weight"):
                p.add_(1.0)
    checkpoints.after_step(Progress(1, BATCH))
    checkpoints.close()
    return state


def steps(state, samples, progress: Progress, count: int) -> tuple[list, Progress]:
    """Losses and gradient norms of so many steps, and the progress after them.

    The norm is None where the step was skipped: with fp16 it is then an infinity or NaN.
    """
    numbers, config = [], state.config
    for _ in range(count):
        done = progress.consumed_samples
        batch = Timeline(config).batch_at(done)
        lr = learning_rate(config.training, done, Timeline(config).total_samples, batch)
        result = trainer.step(state, samples, done, lr)
        numbers.append([result.loss, None if result.skipped else result.grad_norm])
        progress = Progress(progress.iteration + 1, done + batch)
    return numbers, progress


def run(config: configuration.Config, before: int, after: int, context=None) -> dict:
    """One job: load if it resumes, train and save if `before`, then the steps that are compared."""
    samples = data.Synthetic(config.model.vocab_size, config.model.seq_length, 7)
    config, _ = auto_schedule.decide_with_note(config, "cpu")
    state = trainer.build(config, context)
    lines = []
    mesh = state.factory.mesh
    checkpoints = Checkpointer(config, mesh, state.optimizer, context, samples, lines.append)
    progress = checkpoints.resume()
    if before:
        _, progress = steps(state, samples, progress, before)
        checkpoints.save(progress)
    numbers, _ = steps(state, samples, progress, after)
    checkpoints.close()
    unequal = differing_replicas(state.stages, state.optimizer, mesh)
    if unequal:
        raise RuntimeError(f"{config.layout}: {unequal}")
    return {"numbers": numbers, "lines": lines, "progress": dataclasses.asdict(progress)}


def run_job(job: dict, context: Context) -> dict:
    config = validation.check(options(job["options"]), context.size)
    return run(config, job["before"], job["after"], context)


if __name__ == "__main__":
    state.SPREAD_ELEMENTS = 64  # so that replicas write shares of these small tensors too
    run_jobs(run_job)
