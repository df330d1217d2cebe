"""Trine beside a plain compiled PyTorch loop on one GPU, in one process, turn by turn.

    python benchmarks/gpu/gpu_models.py --section FILE [--profile] [--device cpu]

Trine without --compile, which rehearse.py and plan.py speak of, runs first and alone. Then Trine
with --compile and the plain loop hold model and optimizer at the same time and take turns, so that
a clock that sinks is shared. A side that fails costs no other one its figure: if the two fail
together, each is measured alone. A figure is the median of ROUNDS turns of a step. Trine's step is
trainer.step with its own data; the plain loop's tokens are on the GPU before. Peak memory is each
one's own: the other's resident bytes are taken off. --profile has torch's own table of a step's
kernels in place of all that. Parts of scripts/gpu_day.sh.
"""

import argparse
import functools
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the project's own modules

from config.run_options import Run
from distributed.context import prepare

if __name__ == "__main__":  # before torch is imported, as train.py does
    prepare(Run(compile=True))

import torch
from torch.profiler import ProfilerActivity, profile

import data
import trainer
from architecture import model_stats
from benchmarks.device_rates import synchronise
from benchmarks.gpu.gpu import MODELS, Section, this_machine
from benchmarks.gpu.plain_gpt import WHAT, plain_loop
from benchmarks.ratios import in_turns
from config import validation
from config.command_line import parse as parse_options
from config.schema import Config
from distributed.context import start
from distributed.garbage import collecting_between_steps
from distributed.launch import Launch
from layers.attention import attention_kernel

# A step has 8 micro-batches: with 4 x 2048 tokens each, on 8 GPUs, half a million tokens.
MICRO_BATCHES = 8
ROUNDS = {"cuda": 7, "cpu": 2}  # turns of each side, of one step
WARM_UP = 3
MOST_KERNELS = 30  # the profile lists at most this number
PLAIN, COMPILED, AS_IT_IS = "plain PyTorch, compiled", "Trine --compile", "Trine"
# The causal half of attention, Trine's own; and all of attention, as many publish.
FORMULAS = ("megatron-2025", "megatron-2021")


@dataclass
class Side:
    """One of the two that are compared: a function that does a step and returns its loss."""

    name: str
    step: Callable[[], float]
    resident: int  # bytes on the GPU between steps


def training(words: str, micro_batch: int) -> str:
    """Options of train.py: one rank in bf16, MICRO_BATCHES micro-batches a step."""
    size = f"--micro-batch-size {micro_batch} --global-batch-size {MICRO_BATCHES * micro_batch}"
    return f"{words} --precision bf16 {size}"


def configuration(words: str, micro_batch: int, device: str) -> Config:
    """Return the configuration of Trine as it is."""
    more = f"--device {device} --no-watchdog --steps 1000"
    return validation.check(
        parse_options([*training(words, micro_batch).split(), *more.split()]), 1
    )


def allocated(device: str) -> int:
    """Bytes of tensors on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def ours(config: Config, device: str, name: str) -> tuple[Side, str]:
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
    return Side(name, step, allocated(device) - before), kernels


def plain(config: Config, device: str) -> Side:
    """The plain loop on the same shape and batch, warm: compiled."""
    before, model = allocated(device), config.model
    size = (MICRO_BATCHES, config.layout.micro_batch_size, model.seq_length + 1)
    tokens = torch.randint(model.vocab_size, size, device=device)
    batches = list(zip(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()))
    backend = "inductor" if device == "cuda" else "aot_eager"
    loop = plain_loop(model, model.padded_vocab(config.layout), device, backend)

    def step() -> float:
        return loop.step(batches)[0].item()

    for _ in range(WARM_UP):
        step()
    return Side(PLAIN, step, allocated(device) - before)


def peak_bytes(side: Side, device: str) -> int | None:
    """The most bytes of tensors during a step of this side alone; None on a CPU."""
    if device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - side.resident
    side.step()
    synchronise(torch.device(device))
    return torch.cuda.max_memory_allocated() - others


def seconds_of_step(side: Side, device: str) -> float:
    """Seconds of the next step of a side."""
    synchronise(torch.device(device))
    began = time.perf_counter()
    side.step()
    synchronise(torch.device(device))
    return time.perf_counter() - began


def compare(words: str, micro_batch: int, device: str, section: Section) -> dict[str, Any]:
    """Measure one model at one micro-batch, and add its table; its data. A side that fails is in
    `failed`, with the name of its exception.
    """
    found: dict[str, Any] = {"micro_batch": micro_batch, "seconds": {}, "peaks": {}, "failed": {}}
    section.add(
        f"{words}: micro-batch {micro_batch}, {ROUNDS[device]} turns.",
        "",
        "| | tokens/s (slowest to fastest turn) | MFU, causal half | MFU, full attention | "
        "peak memory |",
        "| --- | --: | --: | --: | --: |",
    )
    notes = []
    waiting = [(AS_IT_IS,), (PLAIN, COMPILED)]  # plain_loop forgets what is compiled
    while waiting:
        names = waiting.pop(0)
        try:
            notes += turns(names, configuration(words, micro_batch, device), found, section)
        except Exception as error:  # whatever it is, it must not cost the other sides their figures
            traceback.print_exc()
            kind = type(error).__name__
            text = str(error).partition("\n")[0][:300]
            notes.append(f"* {' and '.join(names)} failed: {kind}: {text}")
            if len(names) > 1:
                waiting += [(name,) for name in names]
            else:
                found["failed"][names[0]] = kind
        gc.collect()  # the sides are gone, and torch.compile's cycles with them
        if device == "cuda":
            torch.cuda.empty_cache()
        section.add(**{words: found})  # an end before the last side loses no more than that
        if does_not_fit(found) and micro_batch > 1:
            break  # the others will not fit either
    if {PLAIN, COMPILED} <= set(found["seconds"]):
        plain, ours = (statistics.median(found["seconds"][name]) for name in (PLAIN, COMPILED))
        found["ratio"] = plain / ours
        notes.append(f"Trine's tokens/s with --compile: {found['ratio']:.1%} of the plain loop's.")
    section.add("", *notes, "", **{words: found})
    return found


def does_not_fit(found: dict) -> bool:
    """Whether Trine as it is had not enough memory."""
    return found["failed"].get(AS_IT_IS) == "OutOfMemoryError"


def turns(names: tuple, config: Config, found: dict, section: Section) -> list[str]:
    """Measure the sides of these names turn by turn; add their rows, and return a note on each."""
    device = config.run.device
    sides = []
    notes = []
    for name in names:
        kernels = WHAT
        if name == PLAIN:
            sides.append(plain(config, device))
        else:
            run = replace(config.run, compile=name == COMPILED)
            side, kernels = ours(replace(config, run=run), device, name)
            sides.append(side)
        notes.append(f"* {name}: {kernels}; loss {sides[-1].step():.3f}")
    machine = this_machine(device)
    steps = [functools.partial(seconds_of_step, side, device) for side in sides]
    peaks = [peak_bytes(side, device) for side in sides]
    # train.py does the same. Else the turn in which Python collects garbage pays for both sides.
    with collecting_between_steps():
        seconds = in_turns(steps, ROUNDS[device])
    for name, peak, own in zip(names, peaks, seconds):
        found["peaks"][name] = peak
        found["seconds"][name] = own
        section.add(row(name, own, peak, config, machine))
    return notes


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


def profile_step(words: str, micro_batch: int, device: str, section: Section) -> None:
    """Add torch's table of the kernels, or on a CPU the operations, that took most of one step."""
    config = configuration(words, micro_batch, device)
    kinds = [ProfilerActivity.CPU]
    if device == "cuda":
        config = replace(config, run=replace(config.run, compile=True))
        kinds.append(ProfilerActivity.CUDA)
    side, _ = ours(config, device, AS_IT_IS)
    with profile(activities=kinds) as found:
        seconds = seconds_of_step(side, device)
    table = found.key_averages().table(
        sort_by=f"self_{device}_time_total", row_limit=MOST_KERNELS, max_name_column_width=60
    )
    said = f"{words}, micro-batch {micro_batch}: {1e3 * seconds:.1f} ms with the profiler"
    section.add(said, "", "```", table, "```", seconds=seconds)


def main() -> None:
    """Compare every model, with a smaller micro-batch where one does not fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--section", required=True, help="file for the findings")
    parser.add_argument("--profile", action="store_true", help="one step's kernels")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    o = parser.parse_args()
    section = Section(o.section)
    if o.profile:
        return profile_step(*MODELS[o.device][0], o.device, section)
    section.add(f"Trine against {WHAT}. MFU by the formulas {' and '.join(FORMULAS)}.", "")
    failed = False
    for words, micro_batch in MODELS[o.device]:
        found = compare(words, micro_batch, o.device, section)
        while does_not_fit(found) and micro_batch > 1:
            micro_batch //= 2
            found = compare(words, micro_batch, o.device, section)
        failed = failed or bool(found["failed"])
    sys.exit(failed)


if __name__ == "__main__":
    main()
