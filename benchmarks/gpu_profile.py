"""Where the time of one training step goes on a GPU: a table by kind of work, and of kernels.

    python benchmarks/gpu_profile.py --section FILE [--device cpu]

A kernel counts for the operation that launched it: `loss` and `optimizer` are what their code
launches, whatever the kernel. Idle is the step's time in which the GPU runs no kernel and no copy.
A loss is what a kind of work takes longer than its share of the model's FLOPs at the device's peak.
With --compile; on a CPU without, and the operations' own times stand in the place of kernels.
A part of scripts/gpu_day.sh.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the project's own modules

from config.run_options import Run
from distributed.context import prepare

if __name__ == "__main__":  # before torch is imported, as train.py does
    prepare(Run(compile=True))

import torch
from gpu import MODELS, Section, synchronise, this_machine
from gpu_models import AS_IT_IS, COMPILED, FORMULAS, MICRO_BATCHES, WARM_UP, configuration
from torch.profiler import ProfilerActivity, profile, record_function

import data
import trainer
from config import model_stats
from config.schema import Config
from distributed.context import start
from distributed.launch import Launch

OPTIMIZER = "optimizer step"
MOST_KERNELS = 15
# What an operation is, by a part of its name or of a caller's name; the first that fits.
KINDS = {
    "optimizer": (OPTIMIZER,),
    "loss": ("_CrossEntropy",),
    "attention": ("attention",),
    "GEMM": ("aten::mm", "aten::addmm", "aten::bmm", "aten::_addmm"),
    "sum of gradients": ("AccumulateGrad",),
    "norms": ("layer_norm", "rms_norm"),
    "embedding": ("embedding",),
}


def kind_of(event: Any) -> str:
    """The kind of work of an operation of the profile, by its name and its callers'."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    for kind, parts in KINDS.items():
        if any(part in name for part in parts for name in names):
            return kind
    return "other elementwise, copies"


def union(spans: list[tuple[float, float]]) -> float:
    """The length that intervals cover together."""
    covered, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return covered


def profiled_step(config: Config, device: str) -> tuple[Any, float, float]:
    """The profile of one step, its seconds, and the seconds of a step without the profiler."""
    state = trainer.build(config, start(Launch("python"), config.run))
    model, size = config.model, config.training.global_batch_size
    samples, optimizer_step = data.Synthetic(model.vocab_size, model.seq_length, 1), None

    def labelled(*arguments: Any) -> Any:
        with record_function(OPTIMIZER):
            return optimizer_step(*arguments)

    optimizer_step, state.optimizer.step = state.optimizer.step, labelled
    number = 0

    def timed_step() -> float:
        nonlocal number
        number += 1
        began = time.perf_counter()
        trainer.step(state, samples, number * size, 1e-4)
        synchronise(device)
        return time.perf_counter() - began

    for _ in range(WARM_UP):
        timed_step()
    plain = min(timed_step() for _ in range(3))
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=kinds) as found:
        seconds = timed_step()
    return found, seconds, plain


def shares(events: list[Any], device: str) -> tuple[Counter, Counter, Counter]:
    """Microseconds by kind, launches by kind, and microseconds by kernel."""
    by_kind, launches, by_kernel = Counter(), Counter(), Counter()
    spans = labels(events)
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue
        kernels = [(k.name, k.duration) for k in event.kernels if k.name not in spans]
        if device == "cpu":
            kernels = [(event.name, event.self_cpu_time_total)]
        for name, duration in kernels:
            kind = kind_of(event)
            by_kind[kind] += duration
            launches[kind] += 1
            by_kernel[name] += duration
    return by_kind, launches, by_kernel


def labels(events: list[Any]) -> set[str]:
    """Names of labelled spans, which the profile shows on the GPU too, as if they were kernels."""
    return {e.name for e in events if getattr(e, "is_user_annotation", False)} | {OPTIMIZER}


def busy_microseconds(events: list[Any]) -> float:
    """How long the GPU ran kernels or copies."""
    names = labels(events)
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and event.name not in names
    ]
    return union(spans)


def losses(config: Config, by_kind: dict[str, float], idle: float, peak: float) -> Counter:
    """Seconds by kind, most first, beyond what the model's FLOPs take at that peak. by_kind, idle:
    of a step, in microseconds and seconds.
    """
    samples = config.training.global_batch_size
    causal, whole = (model_stats.model_flops(config.model, samples, each) for each in FORMULAS)
    needed = {"attention": (whole - causal) / peak}  # causal attention is half of all
    needed["GEMM"] = causal / peak - needed["attention"]
    found = Counter({kind: us / 1e6 - needed.get(kind, 0.0) for kind, us in by_kind.items()})
    found["idle"] = idle
    return found


def report(words: str, micro_batch: int, device: str, section: Section) -> None:
    """Profile one model's step, and add both tables."""
    name = COMPILED if device == "cuda" else AS_IT_IS
    config, machine = configuration(words, micro_batch, device, name), this_machine(device)
    found, seconds, plain = profiled_step(config, device)
    events = list(found.events())
    by_kind, launches, by_kernel = shares(events, device)
    total = sum(by_kind.values())
    busy = 1e-6 * (busy_microseconds(events) if device == "cuda" else total)
    idle = max(0.0, 1.0 - busy / seconds)
    lost = losses(config, by_kind, idle * seconds, machine.peak) if machine else Counter()
    largest = [f"{kind} {1e3 * s:.1f} ms" for kind, s in lost.most_common(3)]
    section.add(
        f"{words}, micro-batch {micro_batch}, {MICRO_BATCHES} micro-batches: {1e3 * plain:.1f} ms "
        f"a step, {1e3 * seconds:.1f} ms with the profiler, of which {idle:.1%} idle; "
        f"{sum(launches.values()) // MICRO_BATCHES} "
        f"{'kernels' if device == 'cuda' else 'operations'} a micro-batch, the optimizer's "
        f"included. The largest losses: {', '.join(largest) or 'the peak is not known'}.",
        "",
        "| kind | ms | share | launches |",
        "| --- | --: | --: | --: |",
        *(
            f"| {kind} | {us / 1e3:.2f} | {us / total:.1%} | {launches[kind]} |"
            for kind, us in by_kind.most_common()
        ),
        "",
        "| kernel | ms | share |",
        "| --- | --: | --: |",
        *(
            f"| `{name[:90].replace('|', '/')}` | {us / 1e3:.2f} | {us / total:.1%} |"
            for name, us in by_kernel.most_common(MOST_KERNELS)
        ),
        "",
        **{
            words: {
                "seconds": plain,
                "profiled": seconds,
                "idle": idle,
                "us": dict(by_kind),
                "losses": largest,
            }
        },
    )


def main() -> None:
    """Profile every model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--section", required=True, help="file for the findings")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    o = parser.parse_args()
    section = Section(o.section)
    for words, micro_batch in MODELS[o.device]:
        report(words, micro_batch, o.device, section)


if __name__ == "__main__":
    main()
