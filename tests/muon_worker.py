"""Muon on real ranks: one step's updates and gradients, and the processor time of updates.

python tests/muon_worker.py jobs.json results.json        as golden_worker.py
"""

import time
from typing import Any

import golden_worker
import torch

import data
import trainer
from config import validation
from distributed.context import Context


def whole_tensors(state: trainer.TrainState, kind: str) -> dict[str, torch.Tensor]:
    """Every tensor of the model, or its state, in fp64; collective. For --zero 0 without ep."""
    parts = []
    for shard in state.optimizer.owned():
        local = shard.read(kind, shard.start, shard.stop).double().view(shard.shape)
        parts.append((shard.spec, local.clone()))
    every: list[Any] = [parts]
    if state.factory.mesh.size > 1:
        every = [None] * state.factory.mesh.size
        torch.distributed.all_gather_object(every, parts)
    found: dict[str, torch.Tensor] = {}
    for of_rank in every:
        for spec, local in of_rank:
            whole = found.setdefault(spec.name, torch.zeros(spec.shape, dtype=torch.float64))
            if spec.dim is None:
                whole.copy_(local)
            else:
                rows = spec.stop - spec.start
                whole.narrow(spec.dim, spec.start, rows).copy_(local.narrow(spec.dim, 0, rows))
    return found


def one_step(case: dict, context: Context | None) -> dict[str, dict[str, torch.Tensor]]:
    """Return each matrix' update and gradient in the first step; the momentum gives the latter."""
    config = validation.check(golden_worker.options(case), context.size if context else 1)
    state = trainer.build(config, context)
    before = whole_tensors(state, "weights")
    trainer.step(state, data.build(config).train, 0, 1e-3)
    after = whole_tensors(state, "weights")
    gradients = whole_tensors(state, "exp_avg")
    state.reader.close()
    names = [s.spec.name for g in state.optimizer.groups for s in g.shards if s.spec.matrices]
    return {
        "updates": {name: after[name] - before[name] for name in names},
        "gradients": {name: gradients[name] for name in names},
    }


def compared(case: dict, context: Context) -> dict[str, float]:
    """Return the largest relative difference of a matrix' update, and gradient, from one rank's."""
    ours = one_step(case, context)
    plain = {k: v for k, v in case.items() if k not in ("tp", "cp", "pp", "dp")}
    theirs = one_step(plain, None)
    return {
        kind: max(
            ((ours[kind][name] - theirs[kind][name]).norm() / theirs[kind][name].norm()).item()
            for name in theirs[kind]
        )
        for kind in ("updates", "gradients")
    }


def timed(case: dict, context: Context) -> dict[str, float]:
    """Return the processor seconds of all ranks for an update, and for the passes before it."""
    steps = case.pop("timed_steps")
    config = validation.check(golden_worker.options(case), context.size)
    state = trainer.build(config, context)
    samples = data.build(config).train
    update, spent = state.optimizer._update, []

    def measured(*arguments):
        start = time.process_time()
        update(*arguments)
        spent.append(time.process_time() - start)

    state.optimizer._update = measured
    begin = 0.0
    for number in range(steps + 1):  # the first step makes state
        if number == 1:
            begin = time.process_time()
        trainer.step(state, samples, number * config.training.global_batch_size, 1e-3)
    whole = time.process_time() - begin
    state.reader.close()
    sums = torch.tensor([sum(spent[1:]), whole], dtype=torch.float64)
    torch.distributed.all_reduce(sums)
    update_seconds, all_seconds = (sums / steps).tolist()
    return {"update": update_seconds, "passes": all_seconds - update_seconds}


def run_job(job: dict, context: Context) -> dict[str, float]:
    """Do the job: the key `work` says which, the others are options."""
    work = {"compared": compared, "timed": timed}[job.pop("work")]
    return work(job, context)


if __name__ == "__main__":
    golden_worker.run_jobs(run_job)
