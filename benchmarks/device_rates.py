"""Measured rates of one device: products of matrices and copies, for the planner's constants.

    seconds_of(once, device)      median seconds of a call
    gemm_rate(device)             FLOP/s; copy_rate(device): bytes per second, read and written

On a GPU the shapes are large and the product is in bf16; on a CPU they are small, in fp32.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

REPEATS = {"cuda": 20, "cpu": 7}
EDGE = {"cuda": 8192, "cpu": 512}
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
COPIED = {"cuda": 2**30, "cpu": 2**25}  # bytes


def synchronise(device: torch.device) -> None:
    """Wait for the GPU, if the device is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(once: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of a call, after three that warm up."""
    seconds = []
    for number in range(3 + REPEATS[device.type]):
        synchronise(device)
        began = time.perf_counter()
        once()
        synchronise(device)
        if number >= 3:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def gemm_rate(device: torch.device) -> float:
    """FLOP/s of a product of two squares, the second one transposed, as F.linear has it.

    Their values are random, because zeros would let a GPU clock higher.
    """
    edge = EDGE[device.type]
    a = torch.randn(edge, edge, device=device, dtype=DTYPE[device.type])
    b = torch.randn(edge, edge, device=device, dtype=DTYPE[device.type])
    return 2.0 * edge**3 / seconds_of(lambda: a @ b.t(), device)


def copy_rate(device: torch.device) -> float:
    """Bytes per second of a copy on the device, read and written."""
    source = torch.zeros(COPIED[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / seconds_of(lambda: target.copy_(source), device)
