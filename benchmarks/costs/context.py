"""A context that no rank holds alone: the loss, and what activations take, with and without --cp.

    python benchmarks/costs/context.py --tokens 131072 --cp 4
    python benchmarks/costs/context.py --tokens 32768 --cp 4 --rounds 5

One step of a small model on one sample of that many tokens, on one rank and on --cp ranks of this
machine: loss and gradient norm; the bytes of the tensors that the forward pass saves for the
backward pass, each storage once and parameters not, of the rank that saves most; the largest
resident memory of a rank beyond what it had before the step; seconds, the median of --rounds.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor

import data
import trainer
from config import validation
from config.command_line import parse
from config.run_options import Run
from distributed.collectives import MAX
from distributed.context import start
from distributed.launch import discover

SHAPE = "--vocab-size 256 --steps 1 --global-batch-size 1 --positions rotary --precision fp32"


def measured_step(words: list[str]) -> dict | None:
    """One step as this rank of those that were started; the answer on the first one."""
    context = start(discover(), Run(watchdog=False))
    with context.failing_loudly():
        config = validation.check(parse(words), context.size)
        splits, state = data.build(config), trainer.build(config, context)
        saved: dict[int, int] = {}
        known = {p.untyped_storage().data_ptr() for p in state.stages.parameters()}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        resident, began = peak_of_process(), time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            result = trainer.step(state, splits.train, 0, 1e-3)
        seconds = time.perf_counter() - began
        own = [float(sum(saved.values())), float(peak_of_process() - resident), seconds]
        most = torch.tensor(own, dtype=torch.float64)
        state.factory.mesh.world.all_reduce(most, MAX).wait()
        state.reader.close()
    names = ("saved", "resident", "seconds")
    found = {"loss": result.loss, "norm": result.grad_norm} | dict(zip(names, most.tolist()))
    first = context.rank == 0
    context.stop()
    return found if first else None


def peak_of_process() -> int:
    """Bytes: the largest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(ranks: int, words: list[str]) -> dict:
    """The step on so many ranks, of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answer.json"
        program = str(ROOT / "benchmarks/costs/context.py")
        command = ["mpirun", "-n", str(ranks), sys.executable, program, "--answer", str(out)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run([*command, "--", *words], env=environment, check=True)
        return json.loads(out.read_text())


def main() -> None:
    """Both sides, as a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--cp", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--shape", default="--layers 1 --hidden 32 --heads 2", help="of train.py")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options, words = parser.parse_known_args()
    if options.answer:
        found = measured_step(words[1:])
        if found:
            Path(options.answer).write_text(json.dumps(found))
        return
    shape = f"{options.shape} --seq-length {options.tokens} {SHAPE}".split()
    sides = {"one rank": [run(1, shape)]}
    shared = [*shape, f"--cp={options.cp}"]
    sides[f"cp {options.cp}"] = [run(options.cp, shared) for _ in range(options.rounds)]
    print(f"{options.tokens:,} tokens, {' '.join(shape)}")
    print("| | loss | gradient norm | saved, MB a rank | resident, MB a rank | s |")
    print("|---|---|---|---|---|---|")
    rows = []
    for name, measured in sides.items():
        seconds = [row["seconds"] for row in measured]
        row = measured[0] | {"seconds": statistics.median(seconds)}
        rows.append(row)
        print(
            f"| {name} | {row['loss']:.8f} | {row['norm']:.8f} | {row['saved'] / 1e6:.1f} | "
            f"{row['resident'] / 1e6:.0f} | {row['seconds']:.1f} ({min(seconds):.1f} to "
            f"{max(seconds):.1f}) |"
        )
    ratios = {key: rows[1][key] / value for key, value in rows[0].items()}
    print(
        f"| ratio | off by {abs(ratios['loss'] - 1):.1e} | off by {abs(ratios['norm'] - 1):.1e} | "
        f"{ratios['saved']:.3f} | {ratios['resident']:.3f} | {ratios['seconds']:.3f} |"
    )


if __name__ == "__main__":
    main()
