"""In one start of ranks: samples of checkpoints, or samples while short runs train.

    mpirun -n 4 python tests/sample_worker.py jobs.json results.json

A job is {"sample": arguments of sample.py}, whose lines are the results, or {"run": options of a
run}, whose rows are.
"""

import golden_worker

import data
import sample
import trainer
from config import validation
from config.schema import Config
from config.timeline import Timeline
from distributed.context import Context
from inference.decoding import Decoder, SamplingParams


def sampled_steps(config: Config, context=None) -> list[dict]:
    """The gradient norms of three steps, and a greedy sample after each."""
    splits, state = data.build(config), trainer.build(config, context)
    decoder, rows = Decoder(state.pipeline, state.factory, config), []
    for iteration in range(1, 4):
        consumed = Timeline(config).batches.consumed(iteration - 1)
        result = trainer.step(state, splits.train, consumed, 1e-3)
        state.optimizer.finish_gathering()
        sample = decoder.generate([5, 60, 17], 12, SamplingParams())
        rows.append({"grad_norm": result.grad_norm, "sample": sample})
    state.reader.close()
    return rows


def run_job(job: dict, context: Context) -> list:
    if "sample" not in job:
        config = golden_worker.options(job["run"])
        return sampled_steps(validation.check(config, context.size), context)
    given = sample.parse(job["sample"])
    return list(sample.run(sample.prepare_task(given, context.size), context))


if __name__ == "__main__":
    golden_worker.run_jobs(run_job)
