"""Trains with schedules written by hand: several stages a rank, a backward that is split.

    mpirun -n 4 python tests/schedule_worker.py results.json

Every case is a layout, a schedule, and options; the result is that of golden_worker.run.
"""

import json
import sys
from dataclasses import replace

import handmade_schedules as handmade
import torch
from golden_worker import STEPS, options, weights
from torch import nn

import data
import trainer
from config import schema, validation
from distributed.context import start
from distributed.launch import discover
from distributed.mesh import Mesh
from model import Stage
from parallel import DeferredGradients, ParamFactory
from pipeline import Pipeline
from schedules.partition import part_costs, stage_specs
from schedules.schedule import Schedule, build
from telemetry.replica_check import unequal_replicas
from zero import Optimizer

PLAIN = {"precision": "fp64", "layers": 4, "global_batch_size": 8, "pp": 2}
CASES = [
    {"schedule": "split 1f1b", "tp": 2, "zero": 1},
    {"schedule": "split 1f1b", "tp": 2, "sequence_parallel": True, "tied": False},
    {"schedule": "split gpipe", "zero": 2, "bias": False},
    {"schedule": "interleaved", "tp": 2, "zero": 1},
    {"schedule": "interleaved", "zero": 0, "recompute": "full"},
    {"schedule": "split interleaved", "zero": 1, "recompute": "selective"},
    {"schedule": "split there and back", "tp": 2, "tied": False, "sequence_parallel": True},
]


def configuration(case: dict, ranks: int) -> schema.Config:
    """The run of a case; its schedule is made by `schedule_of`."""
    own = {name: value for name, value in case.items() if name != "schedule"}
    return validation.check(options(PLAIN | own), ranks)


def schedule_of(name: str, ranks: int, micro_batches: int) -> Schedule:
    """The schedule that a case names."""
    kind = name.removeprefix("split ")
    if kind == "interleaved":
        made = handmade.interleaved(ranks, 2, micro_batches)
    elif kind == "there and back":
        made = handmade.there_and_back(ranks, micro_batches)
    else:
        made = build(kind, ranks, micro_batches)
    return handmade.split(made, micro_batches) if name.startswith("split") else made


def run(case: dict, context) -> dict:
    """Losses, norms and weights, as golden_worker.run gives them."""
    config = configuration(case, context.size)
    layout, mesh = config.layout, Mesh(config.layout.axes, context)
    micro_batches = config.micro_batches(config.training.global_batch_size)
    order = schedule_of(case["schedule"], layout.pp, micro_batches)
    factory = ParamFactory(
        mesh,
        torch.float64,
        context.device,
        config.training.seed,
        config.training.init_std,
        layout.sequence_parallel,
        DeferredGradients() if order.split else None,
    )
    costs = part_costs(config.model, "cpu")
    specs = stage_specs(config.model, replace(layout, pp=order.stages, partition="layers"), costs)
    own = order.stages_on(mesh.pp.rank)
    stages = nn.ModuleList(Stage(factory, config.model, layout, specs[s]) for s in own)
    optimizer = Optimizer(stages, factory, config.training, layout)
    pipeline = Pipeline(dict(zip(own, stages)), factory, config)
    reader = data.BatchReader(config, mesh.dp.rank, context.device)
    state = trainer.TrainState(config, factory, specs, stages, pipeline, optimizer, reader)
    samples = data.Synthetic(config.model.vocab_size, config.model.seq_length, config.training.seed)
    losses, norms = [], []
    for iteration in range(STEPS):
        consumed = iteration * config.training.global_batch_size
        batches = reader.batches(samples, consumed, config)
        targets = config.training.global_batch_size * config.model.seq_length
        weight = optimizer.begin_step(targets, micro_batches)
        total = config.total_samples
        lr = trainer.learning_rate(config.training, consumed, total, 8)
        result = optimizer.step(lr, pipeline.run(order, batches, weight))
        losses.append(result.loss)
        norms.append(result.grad_norm)
    unequal = unequal_replicas(stages, optimizer, mesh)
    if unequal:
        raise RuntimeError(f"{case}: {unequal}")
    return {"losses": losses, "norms": norms, "weights": weights(state), "unequal": unequal}


def main() -> None:
    context = start(discover(), schema.Run())
    with context.failing_loudly():
        results = [run(case, context) for case in CASES]
        if context.rank == 0:
            with open(sys.argv[1], "w") as file:
                json.dump(results, file)
    context.stop()


if __name__ == "__main__":
    main()
