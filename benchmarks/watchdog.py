"""What the records and the watchdog cost: steps with and without them, taking turns.

    mpirun -n 2 python benchmarks/watchdog.py --tp 2        prints one row, and the cost by counting

Both runs live in the same ranks, with weights of their own: the groups of one have books and, while
it steps, the rank has its watchdog's thread and the job its monitor; the other has neither. A block
of one is followed by a block of the other, and who begins alternates. The model is that of
benchmarks/layouts.py, 4 blocks, h 256, 8,192 words, with a quarter of its tokens, 512 a step: as
many records in a shorter step.

The second figure needs no luck with a shared machine: the time of one record, alone in a loop, by
the records in a step, and of one beat, by the beats in a second.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the project's own modules

import torch

import checks
import data
import train
from cluster import Cluster, start
from config import Run
from launch import discover
from options import parse
from records import Recorder
from watchdog import RECORDS_IN_A_BEAT, Watchdog, memory, start_monitor

SHAPE = (
    "--layers 4 --hidden 256 --heads 8 --seq-length 128 --vocab-size 8192 --global-batch-size 4 "
    "--micro-batch-size 1 --steps 1000000 --device cpu --no-tied"
)
BLOCK, ROUNDS = 4, 60
CALLS = 200_000


class Silent(Recorder):
    """A recorder that does nothing where a step calls it."""

    def begin_step(self, step: int) -> None:
        """Nothing."""

    def end_step(self) -> None:
        """Nothing."""

    def at(self, action: str, micro_batch: int | None = None) -> None:
        """Nothing."""


def silence(pieces: train.Pieces) -> None:
    """Take the books out of a run's groups: nothing is recorded any more."""
    mesh = pieces.build.mesh
    for group in (mesh.tp, mesh.dp, mesh.forward, mesh.backward, mesh.tied, mesh.world):
        group.book = None
    mesh.recorder = Silent()


def watch(cluster: Cluster, out: str, number: int) -> Watchdog:
    """A monitor of this block and this rank's connection to it."""
    if cluster.rank == 0:
        address, _ = start_monitor("127.0.0.1", "n", cluster.size, out, None)
        cluster.store.set(f"monitor/{number}", json.dumps(address))
    address = json.loads(cluster.store.get(f"monitor/{number}"))
    dog = Watchdog(cluster.recorder, tuple(address), cluster.rank, cluster.node, cluster.stop)
    while dog.clock_error > 60.0:  # until the monitor, which has just been started, has answered
        time.sleep(0.01)
    return dog


def block(pieces: train.Pieces, samples, first: int) -> tuple[float, float]:
    """Wall and processor seconds a step over one block; all ranks begin together."""
    mesh = pieces.build.mesh
    mesh.world.all_reduce(torch.zeros(1)).wait()
    wall, processor = time.perf_counter(), time.process_time()
    for step in range(first, first + BLOCK):
        mesh.recorder.begin_step(step)
        train.step(pieces, samples, 4 * step, 1e-4)
        mesh.recorder.end_step()
    return (time.perf_counter() - wall) / BLOCK, (time.process_time() - processor) / BLOCK


def side_by_side(cluster: Cluster, words: list[str], out: str) -> tuple[float, int]:
    """Print the row of one layout; seconds and records of one step."""
    config = checks.check(parse([*SHAPE.split(), *words]), cluster.size)
    runs = {"with": train.build(config, cluster), "without": train.build(config, cluster)}
    silence(runs["without"])
    samples = data.Synthetic(config.model.vocab_size, config.model.seq_length, 1)
    for pieces in runs.values():
        block(pieces, samples, 0)
    before = cluster.recorder.progress
    block(runs["with"], samples, 1)
    records = (cluster.recorder.progress - before) // BLOCK
    times = {name: [] for name in runs}
    for number in range(ROUNDS):
        for name in list(runs) if number % 2 else list(runs)[::-1]:
            dog = watch(cluster, out, number) if name == "with" else None
            times[name].append(block(runs[name], samples, BLOCK * (number + 1)))
            if dog:
                dog.close()
    wall, processor = ([pair[i] for pair in times["with"]] for i in (0, 1))
    walls, processors = ([pair[i] for pair in times["without"]] for i in (0, 1))
    if cluster.rank == 0:
        print(
            f"| {' '.join(words) or f'dp {cluster.size}'} | {statistics.median(wall):.4f} | "
            f"{statistics.median(walls):.4f} | {ratio(wall, walls)} | "
            f"{ratio(processor, processors)} |",
            flush=True,
        )
    return statistics.median(walls), records


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Median of the rounds' ratios, with the middle 95 % of it over resampled rounds."""
    ratios = [a / b for a, b in zip(ours, theirs)]
    chance = random.Random(1)
    medians = sorted(
        statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(10_000)
    )
    return f"{statistics.median(ratios):.4f} ({medians[250]:.4f} to {medians[9750]:.4f})"


class Nothing:
    """The handle of nothing."""

    def wait(self) -> None:
        """Nothing."""


def microseconds(run, calls: int = CALLS) -> float:
    """Processor time of one call: others that use the machine do not count."""
    began = time.process_time()
    for _ in range(calls):
        run()
    return 1e6 * (time.process_time() - began) / calls


def by_counting(step: float, records: int) -> None:
    """Print what one record and one beat take, and their share of a step."""
    recorder, nothing = Recorder(), Nothing()
    book = recorder.book("tp", (0, 1))
    bare = microseconds(nothing.wait)
    operation = microseconds(lambda: book.enter("x", 4).under_way(nothing).wait()) - bare
    action = microseconds(lambda: recorder.at("F", 1))

    def beat() -> None:
        json.dumps({"beat": recorder.snapshot(RECORDS_IN_A_BEAT), "memory": memory()})

    one_beat = microseconds(beat, 2000)
    share = (records * max(operation / 2, action) * 1e-6) / step  # an operation is two records
    print(
        f"one operation {operation:.2f} us, one action {action:.2f} us, {records} records in a "
        f"step of {step:.3f} s: {share:.4%} of it; one beat a second {one_beat:.0f} us: "
        f"{one_beat * 1e-6:.4%}"
    )


def main() -> None:
    """Measure side by side, and by counting."""
    cluster = start(discover(), Run(device="cpu", watchdog=False))
    with cluster.failing_loudly():
        with tempfile.TemporaryDirectory() as out:
            step, records = side_by_side(cluster, sys.argv[1:], out)
        if cluster.rank == 0:
            by_counting(step, records)
    cluster.stop()


if __name__ == "__main__":
    main()
