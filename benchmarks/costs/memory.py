"""Measures the memory and time of each ZeRO stage, optimizer and recomputation at dp 4.

    mpirun -n 4 python benchmarks/costs/memory.py        prints the table

A GPT of 51 million parameters in bf16 with fp32 masters. Of every setting: the bytes of one rank's
optimizer state, the largest resident set of a rank during three steps above what it was before the
model was built (the kernel's high-water mark, reset in between), and the median time of the steps
after the first. Settings take their turns in one start of the ranks, ROUNDS times over.
"""

import ctypes
import functools
import gc
import itertools
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the project's own modules

import psutil

import data
import trainer
from architecture import model_stats
from benchmarks.peers.peer_worker import peak_bytes, reset_peak
from benchmarks.ratios import in_turns
from config import schema as configuration
from config import validation
from config.command_line import build
from distributed.context import Context, start
from distributed.launch import discover
from distributed.store import StoreExchange

ROUNDS, STEPS = 2, 3
MODEL = {"layers": 8, "hidden": 512, "heads": 8, "seq_length": 128, "vocab_size": 50257}
BASE = MODEL | {"micro_batch_size": 2, "steps": STEPS, "precision": "bf16"}
BASE["global_batch_size"] = 16  # two micro-batches on each of 4 replicas


def settings() -> list[dict]:
    """Return the settings to compare, each as a difference from BASE."""
    plain = {"optimizer": "adamw", "recompute": "none"}
    found = [plain | {"zero": 1, "grad_dtype": "bf16"}, plain | {"zero": 2, "grad_dtype": "bf16"}]
    product = itertools.product((0, 1, 2), ("adamw", "adamw8bit"), ("none", "full"))
    stages = [{"zero": z, "optimizer": o, "recompute": r} for z, o, r in product]
    return [*stages, *found, plain | {"zero": 3}]


def measure(setting: dict, context: Context, samples: data.Synthetic) -> tuple[int, int, float]:
    """Bytes of state, largest resident bytes above the start, seconds per step, on this rank."""
    _give_back()
    before = psutil.Process().memory_info().rss
    config = validation.check(build(BASE | setting), context.size)
    pieces = trainer.build(config, context)
    _give_back()  # memory for drawing the weights is no part of training
    reset_peak()
    seconds = []
    for step in range(STEPS):
        began = time.perf_counter()
        trainer.step(pieces, samples, step * 16, 1e-4)
        seconds.append(time.perf_counter() - began)
    return pieces.optimizer.state_bytes(), peak_bytes() - before, min(seconds[1:])


def _give_back() -> None:
    """Free what is unreachable, back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def report(rows: list[tuple[dict, list[tuple[int, int, float]]]]) -> None:
    """The table: medians over the rounds of the largest over ranks, lowest and highest beside."""
    print("| ZeRO | optimizer | sums of gradients | recompute | state, MB | of ZeRO-0 |", end="")
    print(" peak, MB | lowest to highest | s/step | lowest to highest |")
    print("| --: | --- | --- | --- | --: | --: | --: | --- | --: | --- |")
    whole = {s["optimizer"]: rounds[0][0] for s, rounds in rows if s["zero"] == 0}
    for setting, rounds in rows:
        states, peaks, times = zip(*rounds)
        mb = [p / 1e6 for p in peaks]
        print(
            f"| {setting['zero']} | {setting['optimizer']} | {setting.get('grad_dtype', 'fp32')} |"
            f" {setting['recompute']} | {states[0] / 1e6:.1f} |"
            f" {states[0] / whole[setting['optimizer']]:.4f} |"
            f" {statistics.median(mb):.0f} | {min(mb):.0f} to {max(mb):.0f} |"
            f" {statistics.median(times):.2f} | {min(times):.2f} to {max(times):.2f} |"
        )


def main() -> None:
    """Measure every setting in turn, and print the table on rank 0."""
    context = start(discover(), configuration.Run())
    with context.failing_loudly():
        every = settings()
        exchange = StoreExchange(context.store, context.rank, context.size, "memory")
        samples = data.Synthetic(MODEL["vocab_size"], MODEL["seq_length"], 1234)

        def turn(setting: dict) -> tuple[int, int, float]:
            own = measure(setting, context, samples)
            largest = exchange.agree(own, lambda all: [max(values) for values in zip(*all)])
            if context.rank == 0:
                print(setting, largest, file=sys.stderr, flush=True)
            return tuple(largest)

        results = in_turns([functools.partial(turn, setting) for setting in every], ROUNDS)
        if context.rank == 0:
            shape = build(BASE).model
            print(f"{model_stats.parameters(shape):,} parameters, dp {context.size}")
            report(list(zip(every, results)))
    context.stop()


if __name__ == "__main__":
    main()
