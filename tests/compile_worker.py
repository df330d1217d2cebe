"""Trains a list of layouts with --compile, as golden_worker.py, and counts what is compiled.

mpirun -n 4 python tests/compile_worker.py cases.json results.json
"""

import golden_worker
import torch
from torch._dynamo.utils import counters

import trainer
from config import validation
from distributed.context import Context


def run_case(case: dict, context: Context) -> dict:
    """As golden_worker's; "graphs": after the build, the warm-up and the steps, on rank 0."""
    torch.compiler.reset()  # else the shapes of all cases would count towards one limit
    counters.clear()
    graphs = []

    def prepare(state: trainer.TrainState, samples) -> None:
        graphs.append(counters["stats"]["unique_graphs"])
        trainer.warm_up(state, samples, 0)
        graphs.append(counters["stats"]["unique_graphs"])

    config = validation.check(golden_worker.options(case | {"compile": True}), context.size)
    result = golden_worker.run(config, context, prepare)
    if result["unequal"]:
        raise RuntimeError(f"{case}: {result['unequal']}")
    return result | {"graphs": [*graphs, counters["stats"]["unique_graphs"]]}


if __name__ == "__main__":
    golden_worker.run_jobs(run_case)
