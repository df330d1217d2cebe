"""Rates of compute and memory while all ranks compute; `allreduce.py --rates` reports them."""

import psutil

from benchmarks.device_rates import copy_rate, gemm_rate
from costs import hardware
from tools.checker.timed_collectives import RankGroups


def rates(world: RankGroups, machine: hardware.Machine | None) -> dict[str, float]:
    """Rates of compute and memory while all ranks compute, for hardware.calibrate."""
    world.gather([0.0])
    found = {"bandwidth": copy_rate(world.device)}
    if machine:
        peak = machine.peak if world.device.type == "cuda" else machine.vector_peak
        found["gemm_fraction"] = gemm_rate(world.device) / peak
    slowest = [min(column) for column in zip(*world.gather(list(found.values())))]
    found = dict(zip(found, slowest))
    if world.device.type == "cpu":
        local = world.context.local.size
        process = psutil.Process()
        available = psutil.virtual_memory().available
        found |= {"memory": available / local + process.memory_info().rss, "node": local}
        mine = process.cpu_affinity()
        seen = world.gather([float(core in mine) for core in range(psutil.cpu_count())])
        found["ranks_per_core"] = max(1.0, local / sum(map(max, zip(*seen))))
    return found
