"""Measures the cost of the records and the watchdog: steps with and without them, alternating.

    mpirun -n 2 python benchmarks/costs/watchdog.py --tp 2        prints one row

One run and one monitor throughout, as in a job. In every other block of steps they are off: the
groups have no logs, the rank's watchdog sends no heartbeats, and the monitor's process is
suspended. Weights, buffers and connections are the same in both, so only the watchdog differs; the
order alternates. The model is that of benchmarks/peers/peers.py, 4 blocks, h 256, vocabulary 8,192,
with a quarter of its tokens, 512 a step: as many records in a shorter step.
"""

import functools
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the project's own modules

import torch

import data
import trainer
from benchmarks.ratios import in_turns, ratio
from config import validation
from config.command_line import parse
from config.run_options import Run
from distributed.context import Context, start
from distributed.launch import discover
from distributed.mesh import ROLES
from watchdog.flight_recorder import FlightRecorder
from watchdog.heartbeat import Watchdog, start_monitor

SHAPE = (
    "--layers 4 --hidden 256 --heads 8 --seq-length 128 --vocab-size 8192 --global-batch-size 4 "
    "--micro-batch-size 1 --steps 1000000 --device cpu --no-tied"
)
BLOCK, ROUNDS = 4, 360


class NullRecorder(FlightRecorder):
    """A recorder that records no steps and actions."""

    def begin_step(self, step: int) -> None:
        """Does nothing."""

    def end_step(self) -> None:
        """Does nothing."""

    def at(self, action: str, micro_batch: int | None = None) -> None:
        """Does nothing."""


class Pausable(Watchdog):
    """A watchdog whose heartbeats can be switched off."""

    paused = False

    def _beat(self) -> None:
        if not self.paused:
            super()._beat()


class Watch:
    """The records, this rank's watchdog and, on rank 0, the monitor; all on or all off."""

    def __init__(self, context: Context, state: trainer.TrainState, out: str):
        self.mesh, self.recorder, self.null = state.factory.mesh, context.recorder, NullRecorder()
        self.monitor = None
        groups = [self.mesh.group(role) for role in ROLES]
        self.group_logs = [(group, group.group_log) for group in groups]
        if context.rank == 0:
            address, self.monitor = start_monitor(
                "127.0.0.1", "n", context.size, out, None, context.monitor_key
            )
            context.store.set("monitor", json.dumps(address))
        address = tuple(json.loads(context.store.get("monitor")))
        self.watchdog = Pausable(self.recorder, address, context.rank, context.node, context.stop)

    def switch(self, on: bool) -> None:
        """On: as in a job. Off: as with --no-watchdog, and without the records too."""
        self.mesh.recorder = self.recorder if on else self.null
        for group, group_log in self.group_logs:
            group.group_log = group_log if on else None
        self.watchdog.paused = not on
        if self.monitor:
            self.monitor.send_signal(signal.SIGCONT if on else signal.SIGSTOP)


def block(state: trainer.TrainState, samples, first: int) -> tuple[float, float]:
    """Wall and processor seconds a step over one block; all ranks begin at the same time."""
    mesh = state.factory.mesh
    mesh.world.all_reduce(torch.zeros(1)).wait()
    wall, processor = time.perf_counter(), time.process_time()
    for step in range(first, first + BLOCK):
        mesh.recorder.begin_step(step)
        trainer.step(state, samples, 4 * step, 1e-4)
        mesh.recorder.end_step()
    return (time.perf_counter() - wall) / BLOCK, (time.process_time() - processor) / BLOCK


def alternate(context: Context, words: list[str], out: str) -> None:
    """Print the row of one layout."""
    config = validation.check(parse([*SHAPE.split(), *words]), context.size)
    state = trainer.build(config, context)
    samples = data.Synthetic(config.model.vocab_size, config.model.seq_length, 1)
    watch = Watch(context, state, out)
    block(state, samples, 0)
    time.sleep(1.0)  # until the monitor has started
    numbers = itertools.count(1)

    def turn(on: bool) -> tuple[float, float]:
        watch.switch(on)
        return block(state, samples, BLOCK * next(numbers))

    sides = in_turns([functools.partial(turn, True), functools.partial(turn, False)], ROUNDS)
    watch.switch(True)
    watch.watchdog.close()
    if context.rank == 0:
        (wall, processor), (walls, processors) = (list(zip(*side)) for side in sides)
        print(
            f"| {' '.join(words) or f'dp {context.size}'} | {statistics.median(wall):.4f} | "
            f"{statistics.median(walls):.4f} | {ratio(wall, walls)} | "
            f"{ratio(processor, processors)} |",
            flush=True,
        )


def main() -> None:
    """Measure with and without the watchdog."""
    context = start(discover(), Run(device="cpu", watchdog=False))
    with context.failing_loudly(), tempfile.TemporaryDirectory() as out:
        alternate(context, sys.argv[1:], out)
    context.stop()


if __name__ == "__main__":
    main()
