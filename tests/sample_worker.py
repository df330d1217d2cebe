"""In one start of ranks: samples of checkpoints, or the statistics by layer of short runs.

    mpirun -n 4 python tests/sample_worker.py jobs.json results.json

A job is {"sample": arguments of sample.py}, whose output is printed, or {"stats": options of a
run}, whose rows are the results.
"""

import json
import sys

import golden_worker

import data
import sample
import trainer
from config import schema as configuration
from config import validation
from distributed.context import start
from distributed.launch import discover
from generation.decoding import Choice, Decoder
from telemetry.layer_stats import LayerStats


def layer_rows(config: configuration.Config, context=None) -> list[dict]:
    """What --stats-every 2 finds in three steps, the steps' gradient norms, and a greedy sample
    after each, if the layout can sample.
    """
    splits, state = data.build(config), trainer.build(config, context)
    stats = LayerStats(config, state.stages, state.optimizer, state.factory.mesh)
    decoder, rows = Decoder(state.pipeline, state.factory, config.model), []
    for iteration in range(1, 4):
        consumed = config.batches.consumed(iteration - 1)
        stats.begin(iteration)
        result = trainer.step(state, splits.train, consumed, 1e-3)
        rows.append(stats.finish() | {"grad_norm": result.grad_norm})
        if not config.layout.vocab_pp:
            state.optimizer.finish_gathering()
            rows[-1]["sample"] = decoder.generate([5, 60, 17], 12, Choice())
    state.reader.close()
    return rows


def main() -> None:
    source, target = sys.argv[1:3]
    context = start(discover(), configuration.Run())
    with context.failing_loudly():
        with open(source) as file:
            jobs = json.load(file)
        results = []
        for job in jobs:
            if "sample" in job:
                given = sample.parse(job["sample"])
                for line in sample.run(sample.prepare_task(given, context.size), context):
                    print(line) if context.rank == 0 else None
            else:
                config = golden_worker.options(job["stats"] | {"stats_every": 2})
                results.append(layer_rows(validation.check(config, context.size), context))
        if context.rank == 0:
            with open(target, "w") as file:
                json.dump(results, file)
    context.stop()


if __name__ == "__main__":
    main()
