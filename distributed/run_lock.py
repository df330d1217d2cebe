"""The folder --out of a run: its lock, which lets only one run at a time write there, and its room.

Rank 0 of a run locks the file OUT/.lock and writes its process, node and Slurm job into that file.
The kernel, or the server of a network file system, releases the lock when the process ends or its
node is lost.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import sys
import time
from pathlib import Path

from base.errors import FileError, RunError
from distributed.early_end import node_name

HELD = (errno.EACCES, errno.EAGAIN)  # errors of lockf when another process has the lock
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # errors if the file system has no locks
BYTES = 1024  # the most bytes that are read of the text in OUT/.lock, which names the lock's owner


def in_use(out: str) -> bool:
    """Return whether another process has the lock of the folder `out`.

    The supervisor asks this before it starts ranks, and tools/numerics/record.py to tell whether a
    run is running. If this user cannot write the lock's file, the answer is not known and is False.
    """
    try:
        file = open(Path(out, ".lock"), "r+b")  # noqa: SIM115
    except OSError:
        return False
    try:
        # The attempt shows whether another process has the lock. Closing the file releases the
        # lock that this process gets if there was none.
        with file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in HELD
    return False


def free_bytes(out: str) -> int:
    """Return the free bytes on the disk where the folder `out` is or will be."""
    path = Path(out).resolve()  # if it does not exist yet, the nearest folder above it is asked
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free


class RunLock:
    """This process's lock on a run's folder, from the constructor until `release`.

    out: the folder, made if it does not exist. Raise UserError if another process has the lock, or
    if the folder cannot be written.
    """

    def __init__(self, out: str):
        """Make the folder and its file .lock, lock the file, and write this run's name into it."""
        job = os.environ.get("SLURM_JOB_ID")
        this_run = f"process {os.getpid()} on {node_name()}" + (f" (job {job})" if job else "")
        try:
            os.makedirs(out, exist_ok=True)
            # O_NOFOLLOW: a symbolic link named .lock is refused, since it could point to any file.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._file = os.open(Path(out, ".lock"), flags, 0o666)
            self._lock(out, this_run)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{this_run} since {time.strftime('%F %T%z')}\n".encode(), 0)
        except OSError as error:
            raise FileError(f"cannot write in {out}: {error.strerror}") from None

    def _lock(self, out: str, this_run: str) -> None:
        """Lock the open file; raise UserError with the owner's name if another process has it.

        this_run: the name of this run, for the message. If the file system has no locks, print a
        note and go on without a lock.
        """
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                owner = os.pread(self._file, BYTES, 0).decode(errors="replace").strip()
                raise RunError(
                    f"--out {out} is in use by {owner or 'another process'}, and this is "
                    f"{this_run}: wait for that run, end it, or give another --out"
                ) from None
            if error.errno not in NO_LOCKS:
                raise
            text = f"note: {out} has no file locks: nothing keeps a second run from writing there"
            print(text, file=sys.stderr, flush=True)

    def release(self) -> None:
        """Release the lock; may be called from any thread, and more than once.

        The file is emptied and not removed. If it were removed, a run that has opened it before
        would lock the removed file, and another run a new file of the same name.
        """
        file = self._file
        self._file = -1  # no open file: a second call fails with an OSError, which is suppressed
        with contextlib.suppress(OSError):  # the lock has been released before
            os.ftruncate(file, 0)
            os.close(file)
