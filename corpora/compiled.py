"""Compiles loops by numba, if numba is installed and numpy has no fast function for the loop.

Without numba, and where compiling takes longer than it saves, the caller uses numpy; the results
are the same numbers. Used by sample_order.py (`shuffle`) and blends.py (`compiled`).
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np

# From this number of swaps, or of comparisons in a blend, compiling takes less time than it saves.
WORTH_COMPILING = 3 * 10**7
TOGETHER = 64  # items that are loaded from memory at the same time
MOST_ITEMS = 2**32 - 1  # numpy shuffles longer arrays with 64 bits for a place


def compiled(function: Callable, steps: int) -> Callable | None:
    """Return `function` compiled by numba; None if its `steps` are too few, or numba is missing.

    `function` must compare no NaN: it is compiled on the assumption that there are none.
    """
    if steps < WORTH_COMPILING:
        return None
    try:
        import numba
    except ImportError:
        return None
    return _compile(numba.njit, function)


@functools.cache
def _compile(njit: Callable, function: Callable) -> Callable:
    """Compile `function` once for all calls of a process: compiling takes half a second."""
    return njit(function, fastmath={"nnan", "nsz"}, error_model="numpy")


def shuffle(order: np.ndarray, random: np.random.RandomState) -> None:
    """Do the same as `random.shuffle(order)`, in less than half the time if `order` is long."""
    swap = compiled(swap_all, len(order)) if len(order) < MOST_ITEMS else None
    if swap is None:
        random.shuffle(order)
        return
    bits = np.random.MT19937()
    bits.state = cast(Any, random.get_state(legacy=False))
    swap(order, bits.ctypes.next_uint32, bits.ctypes.state_address)
    random.set_state(cast(Any, bits.state))


def swap_all(order: np.ndarray, draw: Callable[[int], int], state: int) -> int:
    """Swap each item, from the last to the second, with the item at a random place up to it.

    The swaps are those of RandomState.shuffle. draw: returns 32 random bits; a place that is too
    large is drawn again. The returned sum has no use, but without it the compiler would leave out
    the statement that loads the items.
    """
    places = np.empty(TOGETHER, np.int64)
    last = len(order) - 1
    mask = 1
    loaded = 0
    while mask < last:
        mask = 2 * mask + 1
    while last > 0:
        count = min(TOGETHER, last)
        for k in range(count):
            while (mask >> 1) >= last - k:
                mask >>= 1
            place = np.int64(draw(state)) & mask
            while place > last - k:
                place = np.int64(draw(state)) & mask
            places[k] = place
        for k in range(count):  # loads from memory that overlap one another
            loaded += order[places[k]]
        for k in range(count):
            place = places[k]
            item = order[place]
            order[place] = order[last - k]
            order[last - k] = item
        last -= count
    return loaded
