"""Runs with --trace-numerics for tests/test_numerics.py, many in one start of ranks.

    mpirun -n 4 python tests/numerics_worker.py jobs.json results.json

A job is {"case": options as in golden_worker.py, "fault": the name of a function of FAULTS or
None}. Its files are in the folder of the option `out`; the result is the sums of the final weights.
"""

import contextlib
import json
import os
from collections.abc import Callable
from functools import partial

import golden_worker
import torch

import data
import model
import parallel
import trainer
from attention import Attention
from config import validation
from distributed.context import Context
from distributed.store import StoreExchange
from optim.buckets import Bucket
from telemetry.log import VERSION
from telemetry.numerics_trace import NumericsTrace
from zero import Optimizer

STEPS = 2


def train(config, context: Context) -> dict:
    """Train and trace; return the losses and the final weights in sums."""
    splits = data.build(config)
    state = trainer.build(config, context)
    step = partial(trainer.step, state)
    if config.run.trace_numerics:
        gather = StoreExchange(context.store, context.rank, context.size, "numerics").gather
        writing = contextlib.nullcontext
        step = NumericsTrace(state, trainer.passes, trainer.step, gather, writing).step
    rows = []
    for iteration in range(1, config.total_steps + 1):
        consumed = config.batches.consumed(iteration - 1)
        state.factory.mesh.recorder.begin_step(iteration)
        lr = config.training.lr
        result = step(splits.train, consumed, lr)
        rows.append({"iteration": iteration, "loss": result.loss, "grad_norm": result.grad_norm})
        rows[-1] |= {"lr": lr, "consumed_samples": consumed + config.batches.batch(consumed)}
    state.reader.close()
    weights = golden_worker.weights(state)
    if context.rank == 0:
        os.makedirs(config.run.out, exist_ok=True)
        blocks = [spec.blocks for spec in state.stage_specs]
        facts = {"version": VERSION, "config": config.as_dict(), "blocks_per_stage": blocks}
        with open(os.path.join(config.run.out, "run.json"), "w") as file:
            json.dump(facts, file)
        with open(os.path.join(config.run.out, "metrics.jsonl"), "w") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    return {"losses": [row["loss"] for row in rows], "weights": weights}


def run_job(job: dict, context: Context) -> dict:
    case = {"steps": STEPS, "lr": 1e-3, "lr_schedule": "constant"} | job["case"]
    config = validation.check(golden_worker.options(case), context.size)
    with contextlib.ExitStack() as undo:
        if job.get("fault"):
            FAULTS[job["fault"]](undo, context)
        return train(config, context)


FAULTS: dict[str, Callable] = {}

if __name__ == "__main__":
    golden_worker.configuration.LEAST_BUCKET = 1
    golden_worker.run_jobs(run_job)
