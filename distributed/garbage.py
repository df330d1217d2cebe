"""Python's garbage collector, at the same steps on all ranks.

    with collecting_between_steps():
        for step in range(1, steps + 1):
            ...                            # the passes and the optimizer
            collect_after(step)            # once the ranks have exchanged their statistics

By itself it runs on each rank at another time, for 30 to 100 ms that all others wait for. What is
there before the first step stays: it is frozen, so that a collection looks at newer objects alone.
What torch.compile leaves is frozen too: with it a collection took a quarter of a second.
"""

import contextlib
import gc
from collections.abc import Iterator

# Recomputation leaves objects in cycles for each block and micro-batch: they must not pile up.
STEPS_BETWEEN = 10


@contextlib.contextmanager
def collecting_between_steps() -> Iterator[None]:
    """Within the block nothing is collected but by `collect_after`."""
    gc.disable()
    freeze()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def freeze() -> None:
    """Collect garbage; no collection looks at what is left from then on."""
    gc.collect()
    gc.freeze()


def collect_after(step: int) -> None:
    """Collect garbage if it is the turn of that step, which has ended on all ranks."""
    if step % STEPS_BETWEEN == 0:
        gc.collect()
