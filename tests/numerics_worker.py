"""Runs with --trace-numerics for tests/test_numerics.py, many in one start of ranks.

    mpirun -n 4 python tests/numerics_worker.py jobs.json results.json

A job is {"case": options as in golden_worker.py, "fault": the name of a function of FAULTS or
None}. Its files are in the folder of the option `out`; the result is the sums of the final weights.
"""

import contextlib
import json
import os
from functools import partial

import golden_worker
import pytest

import data
import parallel
import trainer
from config import validation
from distributed.collectives import Group
from distributed.context import Context
from distributed.store import StoreExchange
from optim.buckets import Bucket, ParamGroup
from telemetry.log import VERSION
from telemetry.numerics_trace import NumericsTrace

STEPS = 2


def train(config, context: Context, prepare) -> dict:
    """Train and trace; return the losses and the final weights in sums."""
    splits = data.build(config)
    state = trainer.build(config, context)
    prepare(state, splits)
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
        rows[-1] |= {"learning_rate": lr}
        rows[-1]["consumed_samples"] = consumed + config.batches.batch(consumed)
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
    fault = FAULTS[job["fault"]] if job.get("fault") else None
    with pytest.MonkeyPatch.context() as patch:
        return train(config, context, lambda state, splits: fault and fault(state, splits, patch))


# ---- Faults: each takes the built state, the data, and undoes its patches ------------------------


def tp_reduction_left_out(state, splits, patch) -> None:
    """Block 1's MLP does not sum its output over tp."""
    down = state.stages[-1].blocks[-1].mlp.down
    patch.setattr(down, "forward", lambda x: parallel.linear(x, down.weight, None) + down.bias)


def norms_reduced_twice(state, splits, patch) -> None:
    """Gradients of norms and biases that are terms of a sum are summed over tp twice."""
    reduce_twice(patch, lambda key: "tp" in key.reduce_over and key.no_decay)


def tied_counted_twice(state, splits, patch) -> None:
    reduce_twice(patch, lambda key: "tied" in key.reduce_over)


def reduce_twice(patch, wanted) -> None:
    once = ParamGroup.reduce_further

    def twice(group) -> None:
        for _ in range(1 + wanted(group.key)):
            once(group)

    patch.setattr(ParamGroup, "reduce_further", twice)


def other_seed(state, splits, patch) -> None:
    """Rank 1 draws its weights with another seed."""
    if state.factory.mesh.rank == 1:
        for p in state.stages.parameters():
            if p.spec.decay:
                p.data.normal_(std=0.02)


def wrong_divisor(state, splits, patch) -> None:
    begin = state.optimizer.begin_step
    patch.setattr(state.optimizer, "begin_step", lambda *of: 2 * begin(*of))


def rotary_off_by_one(state, splits, patch) -> None:
    """Rank 1 of cp takes the rotary tables of the tokens before its own."""
    positions = state.stages[0].positions
    if state.factory.mesh.cp.rank == 1:
        positions._own_tables = tuple(table.roll(1, 0) for table in positions._own_tables)


def other_order(state, splits, patch) -> None:
    """Samples 2 and 5 are exchanged."""
    sample = splits.train.sample
    patch.setattr(splits.train, "sample", lambda k: sample({2: 5, 5: 2}.get(k, k)))


def dp_reduction_left_out(state, splits, patch) -> None:
    patch.setattr(Bucket, "reduce", lambda bucket: _Pending())


def weights_not_gathered(state, splits, patch) -> None:
    patch.setattr(Bucket, "all_gather_params", lambda bucket: None)


def heads_not_exchanged(state, splits, patch) -> None:
    """The ranks of cp keep their heads and tokens in place of the all-to-all."""
    patch.setattr(
        Group, "all_to_all", lambda group, output, source, rows=None: keep(output, source)
    )


def keep(output, source) -> "_Pending":
    output.copy_(source)
    return _Pending()


class _Pending:
    def wait(self) -> None:
        """Nothing was sent."""


FAULTS = {
    fault.__name__: fault
    for fault in (
        tp_reduction_left_out,
        norms_reduced_twice,
        tied_counted_twice,
        other_seed,
        wrong_divisor,
        rotary_off_by_one,
        other_order,
        dp_reduction_left_out,
        weights_not_gathered,
        heads_not_exchanged,
    )
}

if __name__ == "__main__":
    golden_worker.configuration.LEAST_BUCKET = 1
    golden_worker.run_jobs(run_job)
