"""One run per --out: the file OUT/.lock names the process that writes there, and is renewed.

Another run takes a lock over if its process is gone from the same node, if Slurm has started its
job again since, or else if it does not change for 30 s. An owner that was suspended for so long
ends when it finds that out.
"""

import contextlib
import errno
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from config.messages import UserError
from distributed.early_end import node_name
from watchdog.heartbeat import process_state, start_time

SECONDS_TO_RENEW, SECONDS_TO_WATCH, SECONDS_BETWEEN_LOOKS = 5.0, 30.0, 0.5
BYTES = 1024  # of the file: every renewal overwrites all of it


class Owner(NamedTuple):
    """The process that a lock names."""

    node: str
    processes: str  # among which its number counts: boot and namespace
    pid: int
    started: int | None  # in ticks since boot
    job: str  # of Slurm, or empty
    starts: str  # how often Slurm has started the job again
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.node}" + (f" (job {self.job})" if self.job else "")


def this_process() -> Owner:
    """The owner of the locks that this process takes."""
    boot, pid = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.getpid()
    job = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")
    processes, since = f"{boot} {os.readlink('/proc/self/ns/pid')}", time.strftime("%F %T%z")
    return Owner(node_name(), processes, pid, start_time(pid), *job, since)


def in_use(out: str) -> bool:
    """Whether a process of this node, which runs, has the lock of that folder."""
    try:
        owner = _owner_in(Path(out, ".lock").read_bytes())
    except OSError:  # there is none
        return False
    own = this_process()
    if owner is None or (owner.node, owner.processes) != (own.node, own.processes):
        return False
    return process_state(owner.pid, owner.started or -1) not in ("gone", "dead")


class RunLock:
    """This process's lock on a folder, which is made if need be, until `release`.

    end: ends the job with a status, from any thread. UserError if another process has the lock, or
    if it cannot be written.
    """

    def __init__(self, out: str, end: Callable[[int], None]):
        self.out, self.path, self.end = out, Path(out, ".lock"), end
        self.owner, self._renewals, self._released = this_process(), 0, threading.Event()
        try:
            os.makedirs(out, exist_ok=True)
            while not self._take():
                continue  # the file was removed by the run that released it
        except OSError as error:
            raise UserError(f"cannot write in {out}: {error.strerror or error}") from None
        threading.Thread(target=self._keep, name="run lock", daemon=True).start()

    def release(self) -> None:
        """Remove the lock if it is still this process's."""
        self._released.set()
        with contextlib.suppress(OSError):  # the next run finds that this process is gone
            if _owner_in(self.path.read_bytes()) == self.owner:
                self.path.unlink()

    def _take(self) -> bool:
        """Write this process's name into the file if that is free or stale; False if it is gone."""
        # A link would lead the writing elsewhere, and a pipe would not end the reading.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            with open(os.open(self.path, flags, 0o666), "r+b", buffering=0) as file:
                # Two runs that start at once take turns. Without flock, which some file systems do
                # not have, the one that writes first finds the other's name when it renews.
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX)
                self._check_free(file.read())
                os.pwrite(file.fileno(), self._text(), 0)
                return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except OSError as error:  # on NFS a removed file may seem to be there until it is used
            if error.errno not in (errno.ENOENT, errno.ESTALE) or not os.path.isdir(self.out):
                raise
            return False

    def _check_free(self, found: bytes) -> None:
        """UserError if the owner of a lock runs."""
        if not found:
            return
        own, other = self.owner, _owner_in(found)
        if other and (other.node, other.processes) == (own.node, own.processes):
            stale = process_state(other.pid, other.started or -1) in ("gone", "dead")
        else:
            requeued = other and own.job and own.job == other.job and own.starts != other.starts
            stale = requeued or self._is_silent(found)
        if stale:
            return
        who = f"{other} since {other.since}" if other else "another process"
        raise UserError(
            f"--out {self.out} is in use by {who}, and this is {own}: wait for that run, end it, "
            f"or give another --out"
        )

    def _is_silent(self, found: bytes) -> bool:
        """Whether a lock does not change while it is watched."""
        text = f"{self.path} is of {_owner_in(found)}: watching for {SECONDS_TO_WATCH:g} s whether"
        print(f"{text} it is renewed", flush=True)
        limit = time.monotonic() + SECONDS_TO_WATCH
        while time.monotonic() < limit and self.path.exists():
            if self.path.read_bytes() != found:
                return False
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return True

    def _text(self) -> bytes:
        body = self.owner._asdict() | {"renewals": self._renewals}
        return json.dumps(body).encode().ljust(BYTES)

    def _keep(self) -> None:
        """Renew the lock until it is released; end the job if another process has taken it."""
        while not self._released.wait(SECONDS_TO_RENEW):
            # An error may be of a file system that comes back. Opened anew, NFS asks its server.
            with contextlib.suppress(OSError), open(self.path, "r+b", buffering=0) as file:
                other = _owner_in(file.read())
                if other == self.owner:
                    self._renewals += 1
                    os.pwrite(file.fileno(), self._text(), 0)
                elif other and not self._released.is_set():
                    text = f"error: --out {self.out} was taken over by {other}, while this run"
                    print(f"{text} ({self.owner}) was suspended: it ends", file=sys.stderr)
                    self.end(1)


def _owner_in(text: bytes) -> Owner | None:
    """The owner that a lock names; None if it names none."""
    try:
        body = json.loads(text)
        del body["renewals"]
        return Owner(**body)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
