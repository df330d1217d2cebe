"""A process that ends with its parent: the kernel sends it a signal when the parent dies."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_LIBC = ctypes.CDLL(None)  # loaded here: a child of a fork may call it before its exec


def signal_at_parents_death(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to send this process a signal when the thread that made it ends.

    Linux only, prctl(2). Not inherited by this process's own children. A parent that has died
    before the call is not noticed: see `end_with_parent`.
    """
    _LIBC.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """Kill this process when its parent, the process `parent`, ends; also if it has ended already.

    For the initializer of a pool of processes: a pool whose owner is killed leaves none behind.
    """
    signal_at_parents_death(signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
