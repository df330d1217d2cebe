"""Trains a model in which a parameter of each block has no gradient, on a rank of a layout.

    mpirun -n 2 python tests/unused_worker.py cases.json results.json

No option makes such a parameter. Every bucket has few parameters, so that buckets before and after
the one that waits for it hold others.
"""

import golden_worker

import model
import trainer
from config import validation

LEAST_BUCKET = 1500  # elements: about half of a block


class BlockWithUnused(model.Block):
    """A block with a parameter of which its output does not depend."""

    def __init__(self, factory, index, shape, recompute):
        super().__init__(factory, index, shape, recompute)
        self.unused = factory.parameter(f"blocks.{index}.unused", (shape.hidden,), fill=1.0)


def run(case, context=None):
    """The results of a case on this rank, and how many buckets its optimizer has."""
    config = validation.check(golden_worker.options(case), context.size if context else 1)
    block, build = model.Block, trainer.build
    found = []

    def build_with_few(*given):
        state = build(*given, least_bucket=LEAST_BUCKET)
        found.append(len(state.optimizer.buckets))
        return state

    model.Block, trainer.build = BlockWithUnused, build_with_few
    try:
        return golden_worker.run(config, context) | {"buckets": found[0]}
    finally:
        model.Block, trainer.build = block, build


if __name__ == "__main__":
    golden_worker.run_jobs(run)
