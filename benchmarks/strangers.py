"""What strangers' connections to the store and the monitor of a run cost its steps.

    OMP_NUM_THREADS=1 mpirun -n 2 python benchmarks/strangers.py --tp 2        prints one row

One run throughout. In every other block of steps a process beside it makes connections of the nine
kinds of tests/strangers.py to both ports, 200 at a time, again and again; in the others it is
suspended. The order alternates. The model is that of benchmarks/watchdog.py. The process has the
lowest priority: a stranger's own computation is not what is measured.
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the project's own modules

import torch

import data
import trainer
from config import validation
from config.command_line import parse
from config.schema import Run
from distributed.context import Context, start
from distributed.launch import discover

SHAPE = (
    "--layers 4 --hidden 256 --heads 8 --seq-length 128 --vocab-size 8192 --global-batch-size 4 "
    "--micro-batch-size 1 --steps 1000000 --device cpu --no-tied"
)
BLOCK, ROUNDS, RESAMPLED = 4, 40, 4000


class Visitors:
    """The process of the strangers, on rank 0; all on or all off."""

    def __init__(self, context: Context):
        self.process = None
        if context.rank == 0:
            store, monitor = context.store.underlying_store, context.watchdog._socket
            ports = [str(store.port), str(monitor.getpeername()[1])]
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "tests/strangers.py"), *ports],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                preexec_fn=lambda: os.nice(19),
                text=True,
            )
            self.process.stdout.readline()  # the first have come

    def switch(self, on: bool) -> None:
        """Let the strangers go on, or suspend them."""
        if self.process:
            self.process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)

    def close(self) -> int:
        """End them; how many connections they made."""
        if self.process is None:
            return 0
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        return len(self.process.communicate()[0].split()) + 1


def block(state: trainer.TrainState, samples, first: int) -> float:
    """Seconds a step over one block; all ranks begin at the same time."""
    state.factory.mesh.world.all_reduce(torch.zeros(1)).wait()
    began = time.perf_counter()
    for step in range(first, first + BLOCK):
        trainer.step(state, samples, 4 * step, 1e-4)
    return (time.perf_counter() - began) / BLOCK


def middle(ratios: list[float]) -> float:
    """The mean without the lowest and the highest quarter."""
    quarter = len(ratios) // 4
    return statistics.fmean(sorted(ratios)[quarter : len(ratios) - quarter])


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Interquartile mean of the rounds' ratios, with its middle 95 % over resampled rounds."""
    ratios, chance = [a / b for a, b in zip(ours, theirs)], random.Random(1)
    means = sorted(middle(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    low, high = means[RESAMPLED // 40], means[-RESAMPLED // 40]
    return f"{middle(ratios):.4f} ({low:.4f} to {high:.4f})"


def alternate(context: Context, words: list[str]) -> None:
    """Print the row of one layout."""
    config = validation.check(parse([*SHAPE.split(), *words]), context.size)
    state = trainer.build(config, context)
    samples = data.Synthetic(config.model.vocab_size, config.model.seq_length, 1)
    block(state, samples, 0)
    visitors, times, number = Visitors(context), {True: [], False: []}, 1
    for i in range(ROUNDS):
        for on in (i % 2 == 0, i % 2 == 1):
            visitors.switch(on)
            times[on].append(block(state, samples, BLOCK * number))
            number += 1
    made = 200 * visitors.close()
    if context.rank == 0:
        print(
            f"| {' '.join(words) or f'dp {context.size}'} | {ROUNDS} | {made:,} | "
            f"{statistics.median(times[True]):.4f} | {statistics.median(times[False]):.4f} | "
            f"{ratio(times[True], times[False])} |",
            flush=True,
        )


def main() -> None:
    """Measure with and without strangers."""
    context = start(discover(), Run(device="cpu"))
    with context.failing_loudly():
        alternate(context, sys.argv[1:])
    context.stop()


if __name__ == "__main__":
    main()
