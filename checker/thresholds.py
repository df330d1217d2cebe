"""Sizes from which the code takes another path, so small that a small run takes it.

    use_small_ones()        in a process that does nothing but check

A tensor of a real run is cut into parts that fit a cache, is written by several ranks, or is sent
by another algorithm. None of a small run is that large.
"""

from importlib import import_module
from typing import Any

# For each constant its module and the small value. Some tensors of a small run are above it, and
# some below: matrices have some 2,000 elements, the logits of a micro-batch 3,000, its activations
# 2,000 numbers of 8 bytes.
SMALL: dict[tuple[str, str], Any] = {
    ("checkpointing.state", "SPREAD_ELEMENTS"): 100,
    ("checkpointing.writer", "RECORDED_ELEMENTS"): 1000,
    ("distributed.collectives", "SHORT_BYTES"): 2**12,
    ("distributed.collectives", "EXCHANGE_BYTES"): 2**14,
    ("loss", "LOGITS_AT_ONCE"): {"cpu": 1000, "cuda": 1000},
    ("optim.muon", "BATCH_ELEMENTS"): 4000,
    ("parallel", "DRAWN_ON_CPU"): 1000,
    ("parallel", "DRAWN_AT_ONCE"): 1000,
    ("telemetry.replica_check", "HASHED_ON_CPU"): 1000,
    ("telemetry.replica_check", "HASHED_AT_ONCE"): 1000,
}


def use_small_ones() -> None:
    """Set the sizes in their modules, for the rest of this process."""
    for (module, name), value in SMALL.items():
        imported = import_module(module)
        getattr(imported, name)  # AttributeError if it is called otherwise now
        setattr(imported, name, value)
