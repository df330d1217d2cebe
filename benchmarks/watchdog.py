"""What the records and the watchdog cost: steps with and without them, alternating.

    mpirun -n 2 python benchmarks/watchdog.py --tp 2        prints one row, and the cost by count

One run and one monitor throughout, as in a job. In every other block of steps they are off: the
groups have no logs, the rank's watchdog sends no heartbeats, and the monitor's process is
suspended. Weights, buffers and connections are the same in both, so only the watchdog differs; the
order alternates. The model is that of benchmarks/peers.py, 4 blocks, h 256, vocabulary 8,192,
with a quarter of its tokens, 512 a step: as many records in a shorter step.

The second figure depends less on other load: the time of one record, measured in a loop, times the
records in a step; the time of one heartbeat, times the heartbeats in a second; and the processor
time of the monitor, divided by the seconds that it was on.
"""

import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the project's own modules

import torch
from ratios import ratio

import data
import trainer
from config import validation
from config.command_line import parse
from config.run_options import Run
from distributed.context import Context, start
from distributed.launch import discover
from distributed.mesh import ROLES
from watchdog.flight_recorder import FlightRecorder
from watchdog.heartbeat import BEAT_RECORDS, MemoryReader, Watchdog, encode, start_monitor

SHAPE = (
    "--layers 4 --hidden 256 --heads 8 --seq-length 128 --vocab-size 8192 --global-batch-size 4 "
    "--micro-batch-size 1 --steps 1000000 --device cpu --no-tied"
)
BLOCK, ROUNDS = 4, 360
CALLS, COLD_CALLS = 200_000, 300


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

    def monitor_seconds(self) -> float:
        """Processor time of the monitor so far; on ranks other than 0, 0."""
        if not self.monitor:
            return 0.0
        fields = Path(f"/proc/{self.monitor.pid}/schedstat").read_text().split()
        return int(fields[0]) / 1e9


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


def alternate(context: Context, words: list[str], out: str) -> tuple[float, int, float]:
    """Print the row of one layout; returns seconds and records a step, and the monitor's cores."""
    config = validation.check(parse([*SHAPE.split(), *words]), context.size)
    state = trainer.build(config, context)
    samples = data.Synthetic(config.model.vocab_size, config.model.seq_length, 1)
    watch = Watch(context, state, out)
    block(state, samples, 0)
    before = context.recorder.progress
    block(state, samples, BLOCK)
    records = (context.recorder.progress - before) // BLOCK
    time.sleep(1.0)  # until the monitor has started
    times, spent, number = {True: [], False: []}, watch.monitor_seconds(), 2
    for i in range(ROUNDS):
        for on in (i % 2 == 0, i % 2 == 1):
            watch.switch(on)
            times[on].append(block(state, samples, BLOCK * number))
            number += 1
    spent = watch.monitor_seconds() - spent
    watch.switch(True)
    watch.watchdog.close()
    wall, processor = ([pair[i] for pair in times[True]] for i in (0, 1))
    walls, processors = ([pair[i] for pair in times[False]] for i in (0, 1))
    if context.rank == 0:
        print(
            f"| {' '.join(words) or f'dp {context.size}'} | {statistics.median(wall):.4f} | "
            f"{statistics.median(walls):.4f} | {ratio(wall, walls)} | "
            f"{ratio(processor, processors)} |",
            flush=True,
        )
    return statistics.median(walls), records, spent / (sum(wall) * BLOCK)


class NullHandle:
    """A handle of an operation that has ended."""

    def wait(self) -> None:
        """Return at once."""


def microseconds(run) -> float:
    """Processor time of one call, which other processes do not change."""
    began = time.process_time()
    for _ in range(CALLS):
        run()
    return 1e6 * (time.process_time() - began) / CALLS


def cold_microseconds(run) -> float:
    """The same for a call once a second, with cold caches."""
    other_data, spent = torch.ones(1 << 23), 0.0
    for _ in range(COLD_CALLS):
        other_data.add_(1.0)
        began = time.thread_time()
        run()
        spent += time.thread_time() - began
    return 1e6 * spent / COLD_CALLS


def by_count(step: float, records: int, monitor: float) -> None:
    """Print the time of one record and one heartbeat, and their share of a step."""
    recorder, handle = FlightRecorder(), NullHandle()
    group_log = recorder.group_log("tp", (0, 1))
    bare = microseconds(handle.wait)
    operation = microseconds(lambda: group_log.enter("x", 4).under_way(handle).wait()) - bare
    action = microseconds(lambda: recorder.at("F", 1))

    memory = MemoryReader()

    def beat() -> None:
        encode({"beat": recorder.snapshot(BEAT_RECORDS), "memory": memory.read()})

    one_beat = cold_microseconds(beat)
    share = (records * max(operation / 2, action) * 1e-6) / step  # an operation is two records
    print(
        f"one operation {operation:.2f} us, one action {action:.2f} us, {records} records in a "
        f"step of {step:.3f} s: {share:.4%} of it; one heartbeat a second {one_beat:.0f} us: "
        f"{one_beat * 1e-6:.4%}; the monitor: {monitor:.4%} of a core"
    )


def main() -> None:
    """Measure with and without the watchdog, and by count."""
    context = start(discover(), Run(device="cpu", watchdog=False))
    with context.failing_loudly():
        with tempfile.TemporaryDirectory() as out:
            figures = alternate(context, sys.argv[1:], out)
        if context.rank == 0:
            by_count(*figures)
    context.stop()


if __name__ == "__main__":
    main()
