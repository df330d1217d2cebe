"""Counts the collectives of a step of --zero 3 on two ranks; prints them as JSON on rank 0."""

import json
from collections import Counter

import golden_worker
import torch

import data
import trainer
from config import schema as configuration
from config import validation
from distributed.collectives import Group
from distributed.context import Context, start
from distributed.launch import discover

CALLS: Counter[str] = Counter()


def counting(name: str):
    plain = getattr(Group, name)

    def call(self, *arguments, **options):
        CALLS[name] += self.size > 1
        return plain(self, *arguments, **options)

    return call


def counts(context: Context, **options) -> dict[str, int]:
    """The all-gathers and reduce-scatters of a step of 4 micro-batches."""
    case = {"zero": 3, "layers": 2, "global_batch_size": 8, "positions": "rotary"} | options
    config = validation.check(golden_worker.options(case), context.size)
    state = trainer.build(config, context)
    samples = data.build(config).train
    trainer.warm_up(state, samples, 0)
    CALLS.clear()
    result = trainer.step(state, samples, 0, 1e-3)
    found = dict(CALLS)
    gathered_by_an_evaluation_is_not_kept(state, samples)
    state.reader.close()
    return found | {"loss": result.loss}


def gathered_by_an_evaluation_is_not_kept(state: trainer.TrainState, samples: data.Samples) -> None:
    """Masters that a checkpoint changes after an evaluation change the next evaluation."""
    before = trainer.evaluate(state, samples, 4)
    saved = [master.clone() for group in state.optimizer.groups for master in group.masters]
    for scale in (0.5, None):
        masters = [master for group in state.optimizer.groups for master in group.masters]
        for master, old in zip(masters, saved, strict=True):
            master.copy_(old if scale is None else old * scale)
        state.optimizer.after_load()
        after = trainer.evaluate(state, samples, 4)
        if (after == before) != (scale is None):
            raise RuntimeError(f"masters times {scale}: loss {after}, before {before}")


def main() -> None:
    context = start(discover(), configuration.Run())
    for name in ("all_gather", "reduce_scatter"):
        setattr(Group, name, counting(name))
    with context.failing_loudly(), torch.no_grad():
        found = []
        for options in (
            {},
            {"sync_each_batch": False},
            {"reshard_after_forward": False},
            {"sync_each_batch": False, "reshard_after_forward": False},
        ):
            with torch.enable_grad():
                found.append(counts(context, **options))
        if context.rank == 0:
            print(json.dumps(found))
    context.stop()


main()
