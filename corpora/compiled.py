"""Loops that numpy has no function for, or a slow one, compiled by numba where it is installed.

Without numba, and where compiling takes longer than it saves, the caller uses numpy; the results
are the same numbers.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np

# Swaps, and comparisons of a blend, from which on compiling is worth its second.
WORTH_COMPILING = 3 * 10**7
TOGETHER = 64  # items that are loaded together
MOST_ITEMS = 2**32 - 1  # beyond, numpy draws 64 bits for a place


def compiled(function: Callable, steps: int) -> Callable | None:
    """A function compiled by numba; None if that is not worth it for so many steps, or missing.

    No comparison in it may be with a NaN.
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
    """Once for all calls of a process: each compiling takes half a second."""
    return njit(function, fastmath={"nnan", "nsz"}, error_model="numpy")


def shuffle(order: np.ndarray, random: np.random.RandomState) -> None:
    """`random.shuffle(order)`, in less than half the time if it is long."""
    swap = compiled(swap_all, len(order)) if len(order) < MOST_ITEMS else None
    if swap is None:
        random.shuffle(order)
        return
    bits = np.random.MT19937()
    bits.state = cast(Any, random.get_state(legacy=False))
    swap(order, bits.ctypes.next_uint32, bits.ctypes.state_address)
    random.set_state(cast(Any, bits.state))


def swap_all(order: np.ndarray, draw: Callable[[int], int], state: int) -> int:
    """Swap each item, the last one first, with one at a random place up to its own.

    draw: 32 random bits; a number beyond the place is drawn again. As RandomState.shuffle. The
    result is of no use, but without it the compiler would leave out what loads the items.
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
        for k in range(count):  # from memory at the same time, not one after the other
            loaded += order[places[k]]
        for k in range(count):
            place = places[k]
            item = order[place]
            order[place] = order[last - k]
            order[last - k] = item
        last -= count
    return loaded
