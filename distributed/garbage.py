"""Runs of Python's garbage collector, after the same steps on all ranks.

    with collecting_between_steps():
        for step in range(1, steps + 1):
            ...                            # the passes and the optimizer
            collect_after(step)            # once the ranks have exchanged their statistics

By default Python collects on each rank at a different time, for 30 to 100 ms, and all other ranks
wait for that rank. Objects that exist before the first step are kept for the whole run. So they are
frozen, and a collection looks only at newer objects. Objects that torch.compile has made are frozen
too: a collection that looked at them took a quarter of a second.
"""

import contextlib
import gc
from collections.abc import Iterator

# The number of steps between two collections. Recomputation leaves reference cycles for each block
# and micro-batch. Only the collector frees these cycles, so the number must stay small.
STEPS_BETWEEN = 10


@contextlib.contextmanager
def collecting_between_steps() -> Iterator[None]:
    """Disable automatic garbage collection in the block; only `collect_after` collects there."""
    gc.disable()
    freeze()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def freeze() -> None:
    """Collect garbage, and exclude all remaining objects from later collections.

    Called before the first step, and again after the warm-up, which makes torch.compile's objects.
    """
    gc.collect()
    gc.freeze()


def collect_after(step: int) -> None:
    """Collect garbage at every STEPS_BETWEEN-th step; called when all ranks have ended `step`."""
    if step % STEPS_BETWEEN == 0:
        gc.collect()
