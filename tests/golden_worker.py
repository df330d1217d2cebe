"""Trains a list of layouts one after the other in one start of ranks, and writes what came out.

    mpirun -n 4 python tests/golden_worker.py cases.json results.json

A case is a dictionary of option names, as on the command line. One start serves many layouts:
the mesh is an object that is passed.
"""

import dataclasses
import json
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

import data
import trainer
from architecture import dispatch
from config import buffer_sizes, validation
from config import schema as configuration
from config.command_line import build
from config.learning_rate import learning_rate
from config.timeline import Timeline
from costs import auto_schedule
from distributed.context import Context, start
from distributed.launch import discover
from telemetry.replica_check import differing_replicas

STEPS = 10
# Adam divides by the size of the gradient, and so makes the rounding of a small gradient as large
# as a step. With this epsilon it does so only for gradients above 1e-4, of which rounding is a
# small part: test_golden.py tests that rounding stays small.
ADAM_EPS = 1e-4


def options(case: dict) -> configuration.Config:
    """The configuration of a case, before it is checked against the ranks."""
    shape = {"layers": 2, "hidden": 32, "heads": 8, "seq_length": 16, "vocab_size": 61}
    length = {"global_batch_size": 8, "steps": STEPS, "lr": 1e-3, "pad_vocab_multiple": 4}
    length["adam_eps"] = ADAM_EPS
    return build(shape | length | {"precision": "fp32"} | case)


def run(config: configuration.Config, context=None, prepare=lambda state, samples: None) -> dict:
    """Loss and gradient norm of every step, the final weights in sums, unequal replicas, and the
    losses of evaluation sets; with --z-loss or --mtp-depth also those of every step,
    with --ema the averages in sums. prepare: is called before the first step.
    """
    training, splits = config.training, data.build(config)
    config, _ = auto_schedule.decide_with_note(config, "cpu")
    state = trainer.build(config, context)
    prepare(state, splits.train)
    losses, norms, z_losses, mtp_losses = [], [], [], []
    for iteration in range(Timeline(config).total_steps):
        consumed = Timeline(config).batches.consumed(iteration)
        batch = Timeline(config).batch_at(consumed)
        lr = learning_rate(training, consumed, Timeline(config).total_samples, batch)
        result = trainer.step(state, splits.train, consumed, lr)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        mtp_losses += [] if result.mtp_loss is None else [result.mtp_loss]
        z_losses += [] if result.z_loss is None else [result.z_loss]
    unequal = differing_replicas(state.stages, state.optimizer, state.factory.mesh)
    sets = splits.eval_sets.items()
    evaluated = {name: trainer.evaluate(state, *samples) for name, samples in sets}
    state.reader.close()
    result = {
        "evaluated": evaluated,
        "losses": losses,
        "norms": norms,
        "weights": weights(state),
        "unequal": unequal,
    }
    if mtp_losses:
        result["mtp_losses"] = mtp_losses
    if z_losses:
        result["z_losses"] = z_losses
    if training.ema:
        result["averages"] = weights(state, configuration.EMA)
    return result


def weights(state: trainer.TrainState, kind: str = "weights") -> dict[str, float]:
    """Every tensor of the whole model after training, as one number: a sum of its elements times
    weights in [-1, 1] that depend on their places; or of their state of another kind. Collective
    over all ranks.
    """
    mesh, sums = state.factory.mesh, {}
    for shard in state.optimizer.owned():
        spec = shard.spec
        if spec.copy or shard.copy > 0:
            continue
        places = torch.full(shard.shape, -1.0, dtype=torch.float64)
        whole = torch.arange(math.prod(spec.shape), dtype=torch.float64).view(spec.cut_shape)
        if spec.dim is None:
            places.copy_(whole)
        else:
            rows = spec.stop - spec.start
            places.narrow(spec.dim, 0, rows).copy_(whole.narrow(spec.dim, spec.start, rows))
        own = places.flatten()[shard.start : shard.stop]
        values = shard.read(kind, shard.start, shard.stop).double().cpu()
        total = (values * torch.cos(own))[own >= 0].sum().item()
        sums[spec.name] = sums.get(spec.name, 0.0) + total
    if mesh.size == 1:
        return sums
    every = [None] * mesh.size
    torch.distributed.all_gather_object(every, sums)
    total: dict[str, float] = {}
    for one in every:
        for name, value in one.items():
            total[name] = total.get(name, 0.0) + value
    return total


def run_jobs(run_job: Callable[[dict, Context], Any]) -> None:
    """Run every job of the first file that the command line names; rank 0 writes what they give to
    the second one.
    """
    source, target = sys.argv[1:3]
    context = start(discover(), configuration.Run())
    with context.failing_loudly():
        with open(source) as file:
            jobs = json.load(file)
        results = []
        for job in jobs:
            try:
                results.append(run_job(job, context))
            except Exception as error:
                error.add_note(f"in the case {json.dumps(job)}")  # which of many it was
                raise
        if context.rank == 0:
            with open(target, "w") as file:
                json.dump(results, file)
    context.stop()


def run_case(case: dict, context: Context) -> dict:
    """Return the result of `run`, or with --compile of `run_compiled`.

    A UserWarning, such as torch's, is an error, since a user would see it in every such run; not
    with --compile, whose compiler warns of what it leaves out. "nodes" of a case is a letter for
    each rank: ranks with the same letter are taken to be on one node; without it all are on one.
    """
    case = dict(case)
    nodes = case.pop("nodes", "a" * context.size)
    config = validation.check(options(case), context.size)
    context.places = [dataclasses.replace(p, node=n) for p, n in zip(context.places, nodes)]
    if case.get("compile"):
        result = run_compiled(config, context)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            result = run(config, context)
    # Only rank 0 writes, so the finding of another rank would be lost.
    if result["unequal"]:
        raise RuntimeError(f"{case}: {result['unequal']}")
    return result


def run_compiled(config: configuration.Config, context: Context) -> dict:
    """Return the result of `run`, and "graphs": the numbers of graphs on rank 0 after the build,
    after the warm-up and after the steps.
    """
    from torch._dynamo.utils import counters  # this import takes seconds

    torch.compiler.reset()  # else the shapes of all cases would count towards one limit
    counters.clear()
    graphs = []

    def warm_up(state: trainer.TrainState, samples) -> None:
        graphs.append(counters["stats"]["unique_graphs"])
        trainer.warm_up(state, samples, 0)
        graphs.append(counters["stats"]["unique_graphs"])

    result = run(config, context, warm_up)
    return result | {"graphs": [*graphs, counters["stats"]["unique_graphs"]]}


if __name__ == "__main__":
    buffer_sizes.LEAST_BUCKET = 1  # several buckets, which are reduced in the last backward
    dispatch.LEAST_SPARED = 0.0  # with experts on several nodes a token is always sent once to each
    run_jobs(run_case)
