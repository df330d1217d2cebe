"""Sizes from which the code takes another path, so small that a small run takes it.

    with small_thresholds():
        ...                     a run of a check

A tensor of a real run is cut into parts that fit a cache, is written by several ranks, or is sent
by another algorithm. None of a small run is that large.
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import parallel
from architecture import dispatch
from base.errors import UserError
from checkpointing import state, writer
from distributed import collectives
from layers import linear_recurrence, loss
from optim import muon
from telemetry import replica_check

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
    (loss, "LOGITS_AT_ONCE"): {"cpu": 1000, "cuda": 1000},
    (muon, "BATCH_ELEMENTS"): 4000,
    (parallel, "DRAWN_ON_CPU"): 1000,
    (parallel, "DRAWN_AT_ONCE"): 1000,
    (replica_check, "HASHED_ON_CPU"): 1000,
    (replica_check, "HASHED_AT_ONCE"): 1000,
}


@contextlib.contextmanager
def small_thresholds() -> Iterator[None]:
    """Have the small sizes in their modules, in this process, until the context ends.

    Raise UserError for a constant that the checked code has no more.
    """
    for module, name in SMALL:
        if not hasattr(module, name):
            gone = f"{module.__name__}.{name}"
            raise UserError(f"tools/checker/thresholds.py names {gone}, which is gone: take it out")
    before = {(module, name): getattr(module, name) for module, name in SMALL}
    try:
        for (module, name), value in SMALL.items():
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)
