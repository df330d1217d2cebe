"""Sizes from which the code takes another path, so small that a small run takes it.

    with small_thresholds():
        ...                     a run of a check

A tensor of a real run is cut into parts that fit a cache, is written by several ranks, or is sent
by another algorithm. None of a small run is that large.
"""

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from base.errors import UserError

# For each constant its module and the small value. Some tensors of a small run are above it, and
# some below: matrices have some 2,000 elements, the logits of a micro-batch 3,000, its activations
# 2,000 numbers of 8 bytes.
SMALL: dict[tuple[str, str], Any] = {
    ("checkpointing.state", "SPREAD_ELEMENTS"): 100,
    ("checkpointing.writer", "RECORDED_ELEMENTS"): 1000,
    ("architecture.dispatch", "LEAST_SPARED"): 0.0,
    ("distributed.collectives", "SHORT_BYTES"): 2**12,
    ("distributed.collectives", "EXCHANGE_BYTES"): 2**14,
    ("layers.linear_recurrence", "BLOCK"): 3,
    ("layers.linear_recurrence", "CHUNK"): 5,
    ("layers.loss", "LOGITS_AT_ONCE"): {"cpu": 1000, "cuda": 1000},
    ("optim.muon", "BATCH_ELEMENTS"): 4000,
    ("parallel", "DRAWN_ON_CPU"): 1000,
    ("parallel", "DRAWN_AT_ONCE"): 1000,
    ("telemetry.replica_check", "HASHED_ON_CPU"): 1000,
    ("telemetry.replica_check", "HASHED_AT_ONCE"): 1000,
}


@contextlib.contextmanager
def small_thresholds() -> Iterator[None]:
    """Have the small sizes in their modules, in this process, until the context ends.

    Raise UserError for a constant that the checked code has no more.
    """
    modules = {module: import_module(module) for module, _ in SMALL}
    for module, name in SMALL:
        if not hasattr(modules[module], name):
            text = f"tools/checker/thresholds.py names {module}.{name}, which is gone: take it out"
            raise UserError(text)
    before = {(module, name): getattr(modules[module], name) for module, name in SMALL}
    try:
        for (module, name), value in SMALL.items():
            setattr(modules[module], name, value)
        yield
    finally:
        for (module, name), value in before.items():
            setattr(modules[module], name, value)
