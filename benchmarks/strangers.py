"""What strangers' connections to the store and the monitor of a run cost its steps.

    OMP_NUM_THREADS=1 mpirun -n 2 python benchmarks/strangers.py --tp 2        prints one row

One run throughout, and two processes beside it, each of which makes connections of the nine kinds
of tests/strangers.py, 200 at a time, again and again: one to both ports of the run, the other to
two ports of no run that refuse alike. In each round a block of
steps runs with the first, one with the second, and one with neither; their order alternates. A
stranger's own computation on the same machine slows the run down as well, so what the run itself
pays for its strangers is the first block beside the second. The model is that of
benchmarks/watchdog.py; both processes have the lowest priority.
"""

import os
import random
import signal
import socket
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
from config.run_options import Run
from distributed.context import Context, start
from distributed.launch import discover

SHAPE = (
    "--layers 4 --hidden 256 --heads 8 --seq-length 128 --vocab-size 8192 --global-batch-size 4 "
    "--micro-batch-size 1 --steps 1000000 --device cpu --no-tied"
)
BLOCK, ROUNDS, RESAMPLED = 4, 40, 4000


class Visitors:
    """A process of strangers to some ports; suspended unless it is switched on."""

    def __init__(self, ports: list[int]):
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/strangers.py"), *map(str, ports)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: os.nice(19),
            text=True,
        )
        self.process.stdout.readline()  # the first have come
        self.switch(False)

    def switch(self, on: bool) -> None:
        """Let the strangers go on, or suspend them."""
        self.process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)

    def close(self) -> int:
        """End them; how many connections they made."""
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        return 200 * (len(self.process.communicate()[0].split()) + 1)


def visitors_of(context: Context) -> list[Visitors]:
    """Those of the run, and those of two ports of no run; on rank 0."""
    if context.rank:
        return []
    refusing = [socket.socket(), socket.socket()]
    for sock in refusing:
        sock.bind(("127.0.0.1", 0))
    elsewhere = [Visitors([sock.getsockname()[1] for sock in refusing])]
    store, monitor = context.store.underlying_store, context.watchdog._socket
    return [Visitors([store.port, monitor.getpeername()[1]]), *elsewhere]


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
    visitors, times, number = visitors_of(context), ([], [], []), 1
    for i in range(ROUNDS):
        for case in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0))[i % 4]:  # 2: none
            for j in range(len(visitors)):
                visitors[j].switch(j == case)
            times[case].append(block(state, samples, BLOCK * number))
            number += 1
    made = [each.close() for each in visitors]
    if context.rank == 0:
        seconds = " | ".join(f"{statistics.median(each):.4f}" for each in times)
        print(
            f"| {' '.join(words) or f'dp {context.size}'} | {ROUNDS} | {made[0]:,} | {made[1]:,} | "
            f"{seconds} | {ratio(times[0], times[1])} | {ratio(times[0], times[2])} |",
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
