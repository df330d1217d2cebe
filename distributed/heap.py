"""One heap for all threads of a process; without torch, because it comes before all threads."""

import ctypes
import os

M_ARENA_MAX = -8  # the option of glibc's mallopt for the most heaps of a process (malloc.h)


def share_heap() -> None:
    """Make all threads allocate from one heap, unless the user has set a number of heaps.

    By default glibc gives each thread a heap of its own, and each thread of gloo would keep the
    memory of the largest message that it has gathered. Called before any thread is started:
    existing threads would keep their heaps, and later threads would share those.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    set_by_user = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in tunables
    libc = ctypes.CDLL(None)
    if not set_by_user and hasattr(libc, "mallopt"):  # only glibc has mallopt
        libc.mallopt(M_ARENA_MAX, 1)
