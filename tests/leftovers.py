"""Ends what a process of the test run has started, when that process ends in whatever way.

    leftovers.end_with_this_process()     once, by conftest.py

Launchers put ranks into sessions of their own, and Slurm starts them from its daemons, so that
neither a group nor a tree of processes has all of them. All inherit the environment: MARK in it
names the process of the test run. A process beside it waits for its end, and kills what has its
mark.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARK = "TESTS_OF"


def end_with_this_process() -> None:
    """Have all that this process starts from now on killed when it has ended, also by SIGKILL."""
    os.environ[MARK] = f"{os.getpid()}-{uuid.uuid4().hex}"
    reads, _ = os.pipe()  # the end for writing stays open as long as this process
    # A session of its own: Ctrl-C is for the tests.
    subprocess.Popen(
        [sys.executable, "-S", __file__, os.environ[MARK]],
        stdin=reads,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(reads)


def marked(mark: str) -> list[int]:
    """The other processes whose environment began with that mark."""
    found, word = [], f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if word in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


if __name__ == "__main__":
    while os.read(0, 1):
        pass
    until = time.monotonic() + 30.0
    while (alive := marked(sys.argv[1])) and time.monotonic() < until:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
