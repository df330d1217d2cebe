"""Runs with --trace-numerics and planted faults, many in one start of ranks.

    mpirun -n 4 python tests/plants_worker.py jobs.json results.json

A job is {"case": options as in golden_worker.py, "plant": see plants.py, or None}. The result has
the call sites of all ranks, and where the plant changed a bit.
"""

import json
import os

import golden_worker
import planted_by_hand
import pytest
import torch
from numerics_worker import train
from plants import Sites

from config import validation
from distributed.context import Context


def run_job(job: dict, context: Context) -> dict:
    """Train with the plant; return "seen", "hits" and the sums of the final weights."""
    config = validation.check(golden_worker.options(job["case"]), context.size)
    plant = job["plant"]
    made: list[Sites] = []

    def prepare(state, splits) -> None:
        sites = Sites(state, patch, plant)
        made.append(sites)
        if plant and plant.get("by_hand"):
            planted_by_hand.FAULTS[plant["by_hand"]].plant(state, splits, patch, sites)

    with pytest.MonkeyPatch.context() as patch:
        weights = train(config, context, prepare)["weights"]
    own = {"seen": [[*key, kind] for key, kind in made[0].seen.items()], "hits": made[0].hits}
    every = [own] * context.size
    if context.size > 1:
        torch.distributed.all_gather_object(every, own)
    seen = {json.dumps(one) for each in every for one in each["seen"]}
    hits = {json.dumps(one) for each in every for one in each["hits"]}
    if context.rank == 0:
        with open(os.path.join(config.run.out, "weights.json"), "w") as file:
            json.dump(weights, file)
    return {"seen": sorted(map(json.loads, seen)), "hits": list(map(json.loads, sorted(hits)))}


if __name__ == "__main__":
    golden_worker.configuration.LEAST_BUCKET = 1
    golden_worker.run_jobs(run_job)
