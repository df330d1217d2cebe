"""Trains layouts one after the other in one start of ranks; a line of JSON for each that ended.

    ranks.start_ranks(2, "tests/nccl_worker.py", "CASES.json", "RESULTS.jsonl", "cuda", "nccl")

A case is a dictionary of option names, and "nodes", as in golden_worker.py. A case that takes
longer than SECONDS is a hang: every rank prints its stacks and exits with status 1. A case that
fails on every rank alike is a line with `error`, and the next one follows.
"""

import dataclasses
import faulthandler
import json
import sys
import time
import traceback
from pathlib import Path

import golden_worker
import torch

import trainer
from architecture import dispatch
from config import run_options, schema, validation
from distributed import preflight
from distributed.context import Context, start
from distributed.launch import discover
from distributed.placement import placement_warnings

# The most seconds of a case. On a GPU that ranks share a message takes 10 to 50 ms, and a case has
# hundreds of them.
SECONDS = 40.0
SECONDS_OF_THE_FIRST = 70.0  # connections are made, and libraries loaded


def outcome(case: dict, context: Context) -> dict:
    """Return golden_worker.run's result for a case, with its seconds; or {"error": a traceback}."""
    began = time.perf_counter()

    def warm_up(state: trainer.TrainState, samples) -> None:
        """Load the kernels as a run does."""
        if preflight.warms_up(state.config, context.device.type):
            trainer.warm_up(state, samples, 0)

    case = dict(case)
    nodes = case.pop("nodes", "a" * context.size)
    context.places = [dataclasses.replace(p, node=n) for p, n in zip(context.places, nodes)]
    if case.get("compile"):
        torch.compiler.reset()  # else the shapes of all cases would count towards one limit
    try:
        config = validation.check(golden_worker.options(case), context.size)
        result = golden_worker.run(config, context, warm_up)
    except Exception:
        result = {"error": traceback.format_exc()}
    return result | {"seconds": round(time.perf_counter() - began, 2)}


def main() -> None:
    """Run the cases of a file; rank 0 writes."""
    source, target, device, backend = sys.argv[1:5]
    cases = json.loads(Path(source).read_text())
    run = run_options.Run(
        device=device, backend=backend, watchdog=False
    )  # the timer below ends a hang
    context = start(discover(), run)
    for sentence in placement_warnings(context.places, schema.Layout(dp=context.size)):
        print(f"note: {sentence}", flush=True)
    with open(target, "a") as file, context.failing_loudly():
        for number, case in enumerate(cases):
            limit = SECONDS if number else SECONDS_OF_THE_FIRST
            faulthandler.dump_traceback_later(limit, exit=True)
            result = outcome(case, context)
            if context.rank == 0:
                file.write(json.dumps(result) + "\n")
                file.flush()
            faulthandler.cancel_dump_traceback_later()
    context.stop()


if __name__ == "__main__":
    dispatch.LEAST_SPARED = 0.0  # with experts on several nodes a token is always sent once to each
    main()
