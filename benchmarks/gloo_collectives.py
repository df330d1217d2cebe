"""gloo's own collectives compared with the all-to-all forms of distributed/collectives.py.

    mpirun -n 4 python benchmarks/gloo_collectives.py      prints the table of one world size

The two forms alternate; the table has the medians of all rounds. They are compared with one another
before they are timed.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the project's own modules

from config.run_options import Run
from config.schema import Layout
from distributed.collectives import Group
from distributed.context import start
from distributed.launch import discover
from distributed.mesh import Mesh

SIZES = (1024, 128 * 1024, 4 * 2**20)  # elements of fp32 in the whole buffer
ROUNDS = {1024: 40, 128 * 1024: 30, 4 * 2**20: 10}


def forms(group: Group, elements: int) -> dict[str, tuple]:
    """By operation: gloo's own form and ours, each a function without arguments."""
    whole, gathered = torch.randn(elements), torch.empty(elements)
    part = torch.randn(elements // group.size)
    scattered = torch.empty_like(part)
    parts = list(gathered.view(group.size, -1).unbind())
    native = {"group": group.handle}
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "all-reduce": (
            lambda: dist.all_reduce(whole, **native),
            lambda: group.all_reduce(whole).wait(),
        ),
        "reduce-scatter": (
            lambda: scatter(scattered, whole, **native),
            lambda: group.reduce_scatter(scattered, whole).wait(),
        ),
        "all-gather": (
            lambda: dist.all_gather(parts, part, **native),
            lambda: group.all_gather(gathered, part).wait(),
        ),
    }


def check(group: Group) -> None:
    """RuntimeError unless both all-reduces agree, up to the order of summation."""
    ours = torch.randn(1000)
    native = ours.clone()
    group.all_reduce(ours).wait()
    dist.all_reduce(native, group=group.handle)
    if not torch.allclose(ours, native, rtol=1e-5, atol=1e-5):
        raise RuntimeError("the two all-reduces disagree")


def milliseconds(run) -> float:
    """Duration of `run` on this rank, started at the same time on all ranks."""
    dist.barrier()
    began = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    """Print the table for this number of ranks."""
    context = start(discover(), Run(device="cpu"))
    with context.failing_loudly():
        group = Mesh(Layout(tp=context.size, dp=1).axes, context).tp
        check(group)
        if context.rank == 0:
            print("| ranks | operation | KiB | gloo, ms | all-to-all, ms | ratio |")
            print("| --: | --- | --: | --: | --: | --: |")
        for elements in SIZES:
            for name, pair in forms(group, elements).items():
                for run in pair:  # makes connections and buffers
                    run()
                times = [[milliseconds(run) for run in pair] for _ in range(ROUNDS[elements])]
                native, ours = (statistics.median(column) for column in zip(*times))
                if context.rank == 0:
                    print(
                        f"| {context.size} | {name} | {elements * 4 // 1024} | {native:.2f} | "
                        f"{ours:.2f} | {native / ours:.2f} |",
                        flush=True,
                    )
    context.stop()


if __name__ == "__main__":
    main()
