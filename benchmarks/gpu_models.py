"""Trine beside a plain compiled PyTorch loop on one GPU, in one process, turn by turn.

    python benchmarks/gpu_models.py --section FILE [--device cpu]

Both hold their model and optimizer at the same time and take turns, so that a clock that sinks is
shared. A figure is the median of ROUNDS turns, a turn the mean of its steps. Trine's step is
trainer.step with its own data; the plain loop's tokens are on the GPU before. Peak memory is each
one's own: the other's resident bytes are taken off. A part of scripts/gpu_day.sh.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the project's own modules

from gpu import MODELS, Section, synchronise, this_machine
from plain_gpt import WHAT, PlainRun

import data
import trainer
from attention import attention_kernel
from config import model_stats, validation
from config.command_line import parse as parse_options
from config.schema import Config
from distributed.context import start
from distributed.launch import Launch

MICRO_BATCHES = 4  # of a step
ROUNDS, STEPS = {"cuda": 5, "cpu": 2}, {"cuda": 4, "cpu": 1}  # turns of each; steps of a turn
WARM_UP = 3
# The causal half of attention, Trine's own; and all of attention, as many publish.
FORMULAS = ("megatron-2025", "megatron-2021")


@dataclass
class Side:
    """One of the two that are compared: a function that does a step and returns its loss."""

    name: str
    step: Callable[[], float]
    resident: int  # bytes on the GPU between steps


def configuration(words: str, micro_batch: int, device: str) -> Config:
    """One rank in bf16, MICRO_BATCHES micro-batches a step."""
    more = f"--precision bf16 --micro-batch-size {micro_batch} --device {device} --no-watchdog"
    more += f" --global-batch-size {MICRO_BATCHES * micro_batch} --steps 1000"
    return validation.check(parse_options([*words.split(), *more.split()]), 1)


def allocated(device: str) -> int:
    """Bytes of tensors on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def ours(config: Config, device: str) -> tuple[Side, str]:
    """Trine's run of one rank, warm; and which kernels it takes."""
    before = allocated(device)
    state = trainer.build(config, start(Launch("python"), config.run))
    model, size = config.model, config.training.global_batch_size
    micro_batch = config.layout.micro_batch_size
    samples, consumed = data.Synthetic(model.vocab_size, model.seq_length, 1), 0

    def step() -> float:
        nonlocal consumed
        consumed += size
        return trainer.step(state, samples, consumed, 1e-4).loss

    for _ in range(WARM_UP):
        step()
    kernels = f"{attention_kernel(model, state.factory, micro_batch)}; {state.optimizer.kernel}"
    return Side("Trine", step, allocated(device) - before), kernels


def plain(config: Config, device: str) -> Side:
    """The plain loop on the same shape and batch, warm: compiled."""
    before, model = allocated(device), config.model
    size = (MICRO_BATCHES, config.layout.micro_batch_size, model.seq_length + 1)
    tokens = torch.randint(model.vocab_size, size, device=device)
    x, y = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
    backend = "inductor" if device == "cuda" else "aot_eager"
    run = PlainRun(model, model.padded_vocab(config.layout), device, backend)
    for _ in range(WARM_UP):
        run.step(x, y)
    return Side("plain PyTorch, compiled", lambda: run.step(x, y), allocated(device) - before)


def peak_bytes(side: Side, device: str) -> int | None:
    """The most bytes of tensors during a step of this side alone; None on a CPU."""
    if device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - side.resident
    side.step()
    synchronise(device)
    return torch.cuda.max_memory_allocated() - others


def seconds_a_step(sides: list[Side], device: str) -> dict[str, list[float]]:
    """Seconds of a step in each turn, by side; the order turns round after every round."""
    found: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(ROUNDS[device]):
        for side in sides[:: 1 if number % 2 else -1]:
            synchronise(device)
            began = time.perf_counter()
            for _ in range(STEPS[device]):
                side.step()
            synchronise(device)
            found[side.name].append((time.perf_counter() - began) / STEPS[device])
    return found


def compare(words: str, micro_batch: int, device: str, section: Section) -> None:
    """Measure one model at one micro-batch, and add its table; torch.OutOfMemoryError passes."""
    config = configuration(words, micro_batch, device)
    began = time.perf_counter()
    own, kernels = ours(config, device)
    sides, ready = [own, plain(config, device)], time.perf_counter() - began
    peaks = [peak_bytes(side, device) for side in sides]
    losses = [side.step() for side in sides]
    turns = seconds_a_step(sides, device)
    machine, samples = this_machine(device), config.training.global_batch_size
    rows = [
        f"{words}: {samples} sequences of {config.model.seq_length}, micro-batch {micro_batch}, "
        f"{ROUNDS[device]} turns of {STEPS[device]} steps. {kernels}. Built, compiled and warm "
        f"after {ready:.0f} s; losses then {losses[0]:.3f} and {losses[1]:.3f}.",
        "",
        "| | tokens/s (slowest to fastest turn) | MFU, causal half | MFU, full attention | "
        "peak memory |",
        "| --- | --: | --: | --: | --: |",
    ]
    for side, peak in zip(sides, peaks):
        rows.append(row(side.name, turns[side.name], peak, config, machine))
    ratio = statistics.median(turns[sides[1].name]) / statistics.median(turns[own.name])
    rows += ["", f"Trine's tokens/s are {ratio:.1%} of the plain loop's.", ""]
    found = {"seconds": turns, "peaks": peaks, "micro_batch": micro_batch, "ratio": ratio}
    section.add(*rows, **{words: found})


def row(name: str, seconds: list[float], peak: int | None, config: Config, machine) -> str:
    """A side's row of the table."""
    tokens = config.training.global_batch_size * config.model.seq_length
    middle = statistics.median(seconds)
    shares = []
    for formula in FORMULAS:
        flops = model_stats.model_flops(config.model, config.training.global_batch_size, formula)
        shares.append(f"{flops / middle / machine.peak:.1%}" if machine else "peak unknown")
    memory = "not measured" if peak is None else f"{peak / 2**30:.2f} GiB"
    rates = f"{tokens / middle:,.0f} ({tokens / max(seconds):,.0f} to {tokens / min(seconds):,.0f})"
    return f"| {name} | {rates} | {' | '.join(shares)} | {memory} |"


def main() -> None:
    """Compare every model, with a smaller micro-batch where one does not fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--section", required=True, help="file for the findings")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    o = parser.parse_args()
    section, machine = Section(o.section), this_machine(o.device)
    peak = f"{machine.peak / 1e12:.4g} TFLOP/s ({machine.name})" if machine else "unknown"
    section.add(
        f"Trine against {WHAT}. MFU of a peak of {peak}; formulas {FORMULAS[0]}, which counts the "
        f"causal half of attention and is Trine's own, and {FORMULAS[1]}, which counts all of it.",
        "",
    )
    for words, micro_batch in MODELS[o.device]:
        while True:
            try:
                compare(words, micro_batch, o.device, section)
                break
            except torch.OutOfMemoryError:
                if micro_batch == 1:
                    section.add(f"{words}: both sides do not fit together at micro-batch 1", "")
                    break
            micro_batch //= 2  # after the except: its traceback holds the tensors
            gc.collect()
            torch.cuda.empty_cache()
        gc.collect()


if __name__ == "__main__":
    main()
