"""Scores the same random requests under a list of layouts, for test_tasks.py and a benchmark.

A job is a case of golden_worker.py. The result has the log-likelihood of each request and the
number of its tokens that are not the likeliest.
"""

import random

import golden_worker

import trainer
from config import validation
from config.schema import Config
from corpora.tasks import ScoringRequest, TaskSet
from costs import auto_schedule
from distributed.context import Context
from inference.scoring import Scorer


def requests_of(config: Config, count: int = 23) -> TaskSet:
    """Requests of 2 to seq_length + 1 tokens, some of one scored token, drawn by their number."""
    draw = random.Random(7)
    model = config.model
    requests = []
    for _ in range(count):
        size = draw.randint(2, model.seq_length + 1)
        ids = [draw.randrange(model.vocab_size) for _ in range(size)]
        requests.append(ScoringRequest(ids, draw.choice([1, size - 1, draw.randint(1, size - 1)])))
    return TaskSet([], requests)


def run_case(case: dict, context: Context | None) -> dict:
    """The scores of a case's model as it is drawn."""
    config = validation.check(golden_worker.options(case), context.size if context else 1)
    config, _ = auto_schedule.decide_with_note(config, "cpu")
    state = trainer.build(config, context)
    scorer = Scorer(state.pipeline, state.factory, config, requests_of(config))
    log_likelihoods, misses = scorer.score()
    again, _ = scorer.score()
    state.reader.close()
    return {
        "log_likelihoods": log_likelihoods.tolist(),
        "misses": misses.tolist(),
        "repeats": again.tolist() == log_likelihoods.tolist(),
    }


if __name__ == "__main__":
    golden_worker.run_jobs(run_case)
