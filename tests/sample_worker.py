"""In one start of ranks: samples of checkpoints, or the statistics by layer of short runs.

    mpirun -n 4 python tests/sample_worker.py jobs.json results.json

A job is {"sample": arguments of sample.py}, whose output is printed, or {"stats": options of a
run}, whose rows are the results.
"""

import golden_worker

import data
import sample
import trainer
from config import validation
from config.schema import Config
from distributed.context import Context
from generation.decoding import Choice, Decoder
from telemetry.layer_stats import LayerStats


def layer_rows(config: Config, context=None) -> list[dict]:
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


def run_job(job: dict, context: Context) -> list[dict] | None:
    if "sample" not in job:
        config = golden_worker.options(job["stats"] | {"stats_every": 2})
        return layer_rows(validation.check(config, context.size), context)
    given = sample.parse(job["sample"])
    for line in sample.run(sample.prepare_task(given, context.size), context):
        print(line) if context.rank == 0 else None
    return None


if __name__ == "__main__":
    golden_worker.run_jobs(run_job)
