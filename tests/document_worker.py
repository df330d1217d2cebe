"""Changes tokens of one document under a list of layouts, and tells which others moved.

A job is a case of golden_worker.py without a pipeline. The result has how many tokens of other
documents, or before the changed one, moved by a bit, and how many of its own did.
"""

import golden_worker
import torch

import trainer
from config import validation
from data import Batch
from distributed.context import Context

PLACES = (0, 1, 3, 4, 11, 12, 17, 22)


def documents(length: int, samples: int) -> torch.Tensor:
    """The first token of each token's document, (b, s): some have one token, some are longer than a
    rank's part of a sample.
    """
    starts = torch.zeros(samples, length, dtype=torch.int64)
    for sample in range(samples):
        for first in (1, 4, 12 - sample, 18):
            starts[sample, first:] = first
    return starts


def run_case(case: dict, context: Context | None) -> dict:
    """Counts of tokens that moved, on all ranks together."""
    config = validation.check(golden_worker.options(case), context.size if context else 1)
    state = trainer.build(config, context)
    state.reader.close()
    (stage,) = state.stages
    mesh, samples, length = state.factory.mesh, 2, config.model.seq_length
    generator = torch.Generator().manual_seed(5)
    size = config.model.vocab_size
    tokens = torch.randint(size, (samples, length), generator=generator)
    starts = documents(length, samples)
    stops = torch.arange(1, length + 1).expand(samples, length)  # a token sees none after it
    here = mesh.cp.balanced_shard(torch.arange(length), 0)
    if state.factory.sequence_parallel:
        here = mesh.tp.shard(here)

    def hidden(tokens: torch.Tensor) -> torch.Tensor:
        batch = Batch(tokens, tokens.clone(), tokens.numel(), starts, stops)
        batch = batch.to(torch.device("cpu"), mesh.cp)
        with torch.no_grad():
            return stage.hidden_states(batch.tokens, batch)

    before, wrong, reached = hidden(tokens), 0, 0
    for place in PLACES:
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % size
        moved = (hidden(changed) != before).any(-1).t()  # b s
        own = (starts[:, here] == starts[:, [place]]) & (here >= place)
        wrong += int((moved & ~own).sum())
        reached += int((moved & own).sum())
    counts = torch.tensor([wrong, reached])
    if context and context.size > 1:
        torch.distributed.all_reduce(counts)
    return {"wrong": int(counts[0]), "reached": int(counts[1])}


if __name__ == "__main__":
    golden_worker.run_jobs(run_case)
