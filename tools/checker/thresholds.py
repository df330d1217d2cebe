"""Sizes from which the code takes another path, so small that a small run takes it; wider types.

    with small_thresholds(), wide_types(config):
        ...                     a run of a check

A tensor of a real run is cut into parts that fit a cache, is written by several ranks, or is sent
by another algorithm. None of a small run is that large.

A 16-bit run keeps masters and sums in fp32. In a check of such a run both are wider, so that it
takes the same branches, and rounding hides little: 16-bit types are fp32, and fp32 is fp64.
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

import parallel
from architecture import dispatch
from base.errors import UserError
from checkpointing import state, writer
from config.run_options import LOSS_SCALE
from config.schema import Config
from distributed import collectives
from layers import linear_recurrence, loss
from optim import loss_scale, muon
from optim.precision import DTYPES
from telemetry import replica_check
from tools.checker.variants import SIXTEEN_BITS

# For each constant its module and the small value. Some tensors of a small run are above it, and
# some below: matrices have some 2,000 elements, the logits of a micro-batch 3,000, its activations
# 2,000 numbers of 8 bytes.
SMALL: dict[tuple[ModuleType, str], Any] = {
    (state, "SPREAD_ELEMENTS"): 100,
    (writer, "RECORDED_ELEMENTS"): 1000,
    (dispatch, "LEAST_SPARED"): 0.0,
    (collectives, "SHORT_BYTES"): 2**12,
    (collectives, "EXCHANGE_BYTES"): 2**14,
    (linear_recurrence, "BLOCK"): 3,
    (linear_recurrence, "CHUNK"): 5,
    (loss, "LOGITS_AT_ONCE"): {"cpu": 1000, "cuda": 1000, "cuda from 9.0": 1000},
    (loss_scale, "LOSS_SCALE"): LOSS_SCALE._replace(loss_scale_window=1),
    (muon, "ROUND_ELEMENTS"): 4000,
    (parallel, "DRAWN_ON_CPU"): 1000,
    (parallel, "DRAWN_AT_ONCE"): 1000,
    (replica_check, "HASHED_ON_CPU"): 1000,
    (replica_check, "HASHED_AT_ONCE"): 1000,
}


# What compiles the code that only a run with --compile has, which a check runs as it is written.
UNCOMPILED: dict[tuple[ModuleType, str], Any] = dict.fromkeys(
    [(parallel, "compile_kernel"), (loss, "compile_kernel")],
    lambda function, dynamic=False: function,
)


@contextlib.contextmanager
def small_thresholds() -> Iterator[None]:
    """Have the small sizes in their modules, in this process, until the context ends.

    Raise UserError for a constant that the checked code has no more.
    """
    changed = SMALL | UNCOMPILED
    for module, name in changed:
        if not hasattr(module, name):
            gone = f"{module.__name__}.{name}"
            raise UserError(f"tools/checker/thresholds.py names {gone}, which is gone: take it out")
    before = {(module, name): getattr(module, name) for module, name in changed}
    try:
        for (module, name), value in changed.items():
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def has_wide_types(config: Config) -> bool:
    """Return whether a check does a run in wider types: in 16 bits on CPUs."""
    return config.run.device == "cpu" and config.training.precision in SIXTEEN_BITS


@contextlib.contextmanager
def wide_types(config: Config) -> Iterator[None]:
    """Have wider types if `has_wide_types`, in this process, until the context ends.

    What computes in 16 bits computes in fp32, and masters, sums, norms and softmaxes are in fp64.
    """
    if not has_wide_types(config):
        yield
        return
    before = dict(DTYPES)
    DTYPES.update(dict.fromkeys(SIXTEEN_BITS, torch.float32))
    parallel.LEAST_EXACT = torch.float64
    try:
        yield
    finally:
        DTYPES.update(before)
        parallel.LEAST_EXACT = torch.float32
