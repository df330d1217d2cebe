"""Sizes of buffers that a run allocates and a plan counts.

They are those of gradient buckets, of Muon's exchange, and of the logits of a loss.
"""

from typing import Any

import numpy as np

# The most gradients that are reduced in one operation: enough to use the links, few enough that
# the reduction overlaps with the backward pass.
BUCKET_ELEMENTS = 16 * 2**20
# A small model has BUCKETS buckets, so that reductions overlap, unless a bucket would then have
# fewer than LEAST_BUCKET gradients.
BUCKETS, LEAST_BUCKET = 8, 2**20
# The most elements of whole matrices that a rank gets in one round of Muon's exchange, unless a
# single matrix has more (optim/matrix_owners.py): 67 MB in FP32, enough to use the links.
ROUND_ELEMENTS = 2**24
# The most logits that the loss holds in fp32 at a time. On a CPU they take 0.5 MB, which stay
# in the L2 cache of a core between kernels, on a GPU 17 MB, which stay in its L2 cache. From Hopper
# on kernels of so few numbers end before the host has launched the next one, so there they take 268
# MB: a step is 0.7 to 3.5 % faster on an H200 (benchmarks/results/gpu-h200.md). An A100 has a third
# of its bandwidth and the same host; the larger slices were not measured there.
LOGITS_AT_ONCE = {"cuda": 2**22, "cuda from 9.0": 2**26, "cpu": 2**17}
# Of fewer logits such a GPU holds a part, so that small models need no such memory, or FEW_LOGITS.
LOGIT_SLICES = 8
FEW_LOGITS = 2**22


def logits_at_once(most: int, logits: Any) -> Any:
    """Return how many of a micro-batch's logits the loss holds in fp32 at a time.

    most: the device's number in LOGITS_AT_ONCE. logits: a number, or an array of the planner's.
    """
    return np.minimum(most, np.maximum(FEW_LOGITS, logits // LOGIT_SLICES))


def bucket_elements(held: float, most: int = BUCKET_ELEMENTS, least: int | None = None) -> int:
    """Return the most gradients that several parameters may have in one bucket.

    A bucket is reduced over the replicas in one operation. held: the number of gradients on this
    rank, to be divided among about BUCKETS buckets. most: an upper limit of the result. least: a
    lower one, LEAST_BUCKET if None.
    """
    return min(most, max(LEAST_BUCKET if least is None else least, int(held) // BUCKETS))
