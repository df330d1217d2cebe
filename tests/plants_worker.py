"""Runs with --trace-numerics and planted faults, many in one start of ranks.

    mpirun -n 4 python tests/plants_worker.py jobs.json results.json

A job is {"case": options as in golden_worker.py, "plant": see plants.py, or None}. Its files are in
the folder of the option `out`. The result has the losses, the sums of the final weights, the call
sites of all ranks, and where the plant changed a bit.
"""

import contextlib
import json
from pathlib import Path

import golden_worker
import planted_by_hand
import pytest
import torch
from observed_steps import observed_step
from plants import Sites

import data
import trainer
from config import buffer_sizes, validation
from costs import auto_schedule
from distributed.context import Context
from distributed.store import StoreExchange
from telemetry.log import VERSION
from telemetry.numerics_trace import NumericsTrace
from telemetry.observer import Observer


def train(config, context: Context, prepare) -> dict:
    """Train and trace; return the losses and the final weights in sums."""
    splits = data.build(config)
    config, _ = auto_schedule.decide_with_note(config, "cpu")
    state = trainer.build(config, context)
    prepare(state, splits)
    observer = Observer()
    if config.run.trace_numerics:
        agree = StoreExchange(context.store, context.rank, context.size, "numerics").agree
        observer = NumericsTrace(
            state, splits.train, trainer.run_passes, agree, contextlib.nullcontext
        )
    rows = []
    lr = config.training.lr
    for iteration in range(1, state.timeline.total_steps + 1):
        consumed = state.timeline.batches.consumed(iteration - 1)
        state.factory.mesh.recorder.begin_step(iteration)
        batch = state.timeline.batch_at(consumed)
        step = observed_step(iteration, batch, consumed=consumed, lr=lr)
        observer.before_step(step)
        result = trainer.step(state, splits.train, consumed, lr)
        observer.after_step(step, result)
        row = {"iteration": iteration, "loss": result.loss, "grad_norm": result.grad_norm}
        row |= {"learning_rate": lr}
        samples = consumed + batch
        tokens = samples * config.model.seq_length
        row |= {"consumed_samples": samples, "consumed_tokens": tokens}
        row |= {"seconds": 1.0, "tokens_per_second": 1.0}
        rows.append(row)
    state.reader.close()
    weights = golden_worker.weights(state)
    if context.rank == 0:
        out = Path(config.run.out)
        out.mkdir(parents=True, exist_ok=True)
        blocks = [spec.blocks for spec in state.stage_specs]
        facts = {"version": VERSION, "config": config.as_dict(), "blocks_per_stage": blocks}
        (out / "run.json").write_text(json.dumps(facts))
        (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (out / "weights.json").write_text(json.dumps(weights))
    return {"losses": [row["loss"] for row in rows], "weights": weights}


def run_job(job: dict, context: Context) -> dict:
    """Train with the plant; return "losses", "weights", "seen" and "hits"."""
    config = validation.check(golden_worker.options(job["case"]), context.size)
    plant = job["plant"]
    made: list[Sites] = []

    def prepare(state, splits) -> None:
        sites = Sites(state, patch, plant)
        made.append(sites)
        if plant and plant.get("by_hand"):
            planted_by_hand.FAULTS[plant["by_hand"]].plant(state, splits, patch, sites)

    with pytest.MonkeyPatch.context() as patch:
        result = train(config, context, prepare)
    own = {"seen": [[*key, kind] for key, kind in made[0].seen.items()], "hits": made[0].hits}
    every = [own] * context.size
    if context.size > 1:
        torch.distributed.all_gather_object(every, own)
    seen = {json.dumps(one) for each in every for one in each["seen"]}
    hits = {json.dumps(one) for each in every for one in each["hits"]}
    found = {"seen": sorted(map(json.loads, seen)), "hits": list(map(json.loads, sorted(hits)))}
    return result | found


if __name__ == "__main__":
    buffer_sizes.LEAST_BUCKET = 1
    golden_worker.run_jobs(run_job)
