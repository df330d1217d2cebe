"""An estimate of a run's time before its first step, for runs on CPUs.

On a GPU the first step takes seconds, and the log line then has the time that is left. On CPUs the
first step of a model that is too large takes minutes or hours, in which nothing is printed.
"""

import time

import torch

from architecture import model_stats
from config.schema import Config
from distributed.context import Context
from optim.precision import DTYPES
from telemetry.log_lines import FORMULA, duration

WORTH_A_LINE = 600.0  # seconds of the whole run from which on the estimate is printed
# The share of a step's time on CPUs that its products take at the measured rate. Models of four
# layers took 0.95 times (hidden 512) and 1.9 times (hidden 256) the estimate on two busy cores.
SHARE_OF_PRODUCTS = 0.6
MOST_ROWS, MOST_WIDTH = 512, 1024  # of the product that is timed: 1 GFLOP, tens of milliseconds


def rate_of_products(config: Config) -> float:
    """Return the FLOPs per second of a matrix product of this model on this rank's CPU cores."""
    width = min(config.model.hidden, MOST_WIDTH)
    rows = min(config.layout.micro_batch_size * config.model.seq_length, MOST_ROWS)
    dtype = DTYPES[config.training.precision]
    x = torch.ones(rows, width, dtype=dtype)
    weight = torch.ones(width, width, dtype=dtype)
    seconds = []
    for _ in range(3):  # the first one starts the threads
        began = time.perf_counter()
        torch.mm(x, weight)
        seconds.append(time.perf_counter() - began)
    return 2.0 * rows * width * width / max(min(seconds), 1e-9)


def estimate(config: Config, context: Context, samples_left: int, batch: int) -> str | None:
    """Return the line on the time of a run on CPUs; None on a GPU, and if the run is short.

    samples_left: to the end of the run. batch: the samples of the next step. Every rank computes
    its share at the rate that this one measures.
    """
    if context.device.type != "cpu":
        return None
    layout = config.layout
    flops = model_stats.hardware_flops(config.model, 1, layout.recompute, FORMULA)
    rate = rate_of_products(config)
    per_sample = flops / (SHARE_OF_PRODUCTS * rate * context.size)
    seconds = per_sample * samples_left
    if seconds < WORTH_A_LINE:
        return None
    ranks = "1 rank" if context.size == 1 else f"{context.size} ranks"
    return (
        f"estimated before the first step: {per_sample * batch:,.1f} s for a step of {batch} "
        f"samples, {duration(seconds)} for the run, on the CPUs of {ranks} "
        f"({rate * context.size / 1e9:,.0f} GFLOP/s in GEMMs). A GPU, or a smaller --layers, "
        "--hidden, --global-batch-size or --steps, makes it shorter"
    )
