"""Memory-mapped files: files to read, and a cache of arrays that one process of a node builds.

    cache = ArrayCache("/tmp/trine-1000")                   None: nothing is stored
    found = cache.find({"rule": 1, ...}, build)             built by one process, mapped by all
    found.arrays["shuffle_index"]                           read-only

    FOLDER/DIGEST.arrays/   a file NAME.npy for each array
    FOLDER/DIGEST.partial/  the same while it is written
    FOLDER/0.lock ...       locked while an entry whose digest begins with 0 ... is built

An entry of the cache is a folder of arrays. DIGEST is the hash of the facts that determine the
arrays (corpus files, seed, lengths), so an entry is never changed, only replaced by an equal one.
Reading takes no lock. A process that is killed leaves no wrong entry, and the system releases its
lock. The facts include the start of the operating system, because after a power failure a file may
have its name and size without its contents.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import math
import mmap
import os
import shutil
import stat
import time
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from base.errors import CorpusError, UserError
from base.regular_files import open_regular

FORMAT = 2  # the version of an entry's format: entries of another version are not used
HEADER_BYTES = 256  # more than the header of a .npy file with few dimensions
SECONDS_UNUSED = 30 * 24 * 3600.0  # an entry that no run has opened for this long is removed
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # its text changes at each start of the system


class MappedFile:
    """A file that is mapped into memory to be read.

    bytes: the contents, uint8 (size,). If another process cuts the file short, access beyond the
    new end ends this process (SIGBUS), so callers that read later call `check` before each read.
    Raise OSError if the file cannot be opened.
    """

    def __init__(self, path: str):
        """Map the file, which does not read its contents yet.

        size: the size of the file now; `check` compares with it later. bytes: the contents.
        """
        self.path = path
        self._map = None
        with open_regular(path) as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size:  # an empty file cannot be mapped
                self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
        # A plain array on the mapping, because slicing an np.memmap takes three times as long.
        self.bytes = np.frombuffer(self._map or b"", np.uint8)

    def array(self) -> np.ndarray:
        """Return the array of a .npy file, without a copy; raise ValueError if it is damaged.

        A .npy file has a header with shape and type, then the numbers. The array is a view of the
        mapping from the end of the header on.
        """
        header = io.BytesIO(self.bytes[:HEADER_BYTES].tobytes())
        shape, _, kind = read_header(header)
        flat = np.frombuffer(self.bytes, kind, math.prod(shape), header.tell())
        return flat.reshape(shape)

    def check(self) -> None:
        """Raise UserError if the file has become shorter since it was mapped.

        Callers call this before they read, because reading beyond the new end ends the process.
        """
        if self._map is not None and self._map.size() < self.size:
            now = f"it has {self._map.size()} bytes and had {self.size}"
            raise CorpusError(f"{self.path} was cut short while the run reads it: {now}")


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, Fortran order and type of an array in NumPy's format, up to its elements.

    Raise ValueError, and nothing else, for anything that is no header of version 1.0.
    """
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("it has another version of NumPy's format")
    try:
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except (SyntaxError, tokenize.TokenError, RecursionError, TypeError) as error:
        raise ValueError(f"its header is damaged: {error}") from None
    if min(shape, default=0) < 0:
        raise ValueError(f"its header says {shape}")
    return shape, is_fortran, dtype


def why_others_could_write(path: str) -> str:
    """Return why other users could change the folder or file at `path`; "" if they cannot.

    They cannot if `path` is no link, belongs to this user, and only this user may write to it.
    Raise OSError if `path` does not exist.
    """
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if status.st_uid != os.getuid():
        return f"belongs to user {status.st_uid}, not to user {os.getuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"has mode {stat.S_IMODE(status.st_mode):o}: group or others may write"
    return ""


def why_others_could_replace(folder: str) -> str:
    """Return why other users could put another folder in the place of `folder`; "": they cannot.

    They could if they may rename in the folder's parent: if others may write to it, and it has no
    sticky bit, which lets only the owner of an entry rename it.
    """
    parent = os.path.dirname(os.path.abspath(folder))
    mode = os.stat(parent).st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        return f"is in {parent}, which has mode {stat.S_IMODE(mode):o} without the sticky bit"
    return ""


@dataclass(frozen=True)
class CachedArrays:
    """The result of `ArrayCache.find`.

    arrays: the arrays by name; read-only if they are mapped from `files`. files: the mapped files;
    none if nothing is stored. built: whether this process built the arrays.
    """

    arrays: Mapping[str, np.ndarray]
    files: Sequence[MappedFile] = ()
    built: bool = True

    def check(self) -> None:
        """Raise UserError if a file that the arrays are mapped from has become shorter.

        Called before each use of the arrays, because reading a missing page ends the process.
        """
        for file in self.files:
            file.check()


class ArrayCache:
    """A cache of arrays: one process of a node builds them, all other processes map them.

    folder: a folder of this node and user, made if it does not exist. None: nothing is stored, and
    every process builds the arrays. Raise UserError if the folder cannot be used.
    """

    def __init__(self, folder: str | None = None):
        """Make the folder, and check that no other user can change what is in it.

        folder: None stores nothing, so that `find` always builds.
        """
        self.folder = folder
        # Facts that each entry's digest includes: the format, and the start of the system.
        self._system: dict[str, Any] = {"format": FORMAT}
        if BOOT_ID.exists():
            self._system["boot"] = BOOT_ID.read_text().strip()
        if folder is None:
            return
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            reason = why_others_could_write(folder) or why_others_could_replace(folder)
        except OSError as error:
            raise self._unusable(error) from None
        if reason:
            raise CorpusError(
                f"--cache: {folder} {reason}, so that others could order the samples: remove it, "
                f"or name another folder, or give --cache none"
            )

    def find(
        self, facts: dict[str, Any], build: Callable[[], dict[str, np.ndarray]]
    ) -> CachedArrays:
        """Return the arrays that `facts` determine, from the cache or from `build`.

        facts: JSON values by name. build: returns the arrays by name, which are then stored. If
        several processes of a node call this at once, one process builds and the others wait.
        """
        if self.folder is None:
            return CachedArrays(build())
        text = json.dumps(facts | self._system, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        path = os.path.join(self.folder, f"{digest}.arrays")
        try:
            found = _read(path)
            if found is not None:
                return found
            with self._locked(digest[0]):
                # Another process may have built the entry while this process waited for the lock.
                found = _read(path)
                if found is not None:
                    return found
                self._remove_unused()
                _write(path, build())
                found = _read(path)
        except OSError as error:
            raise self._unusable(error) from None
        if found is None:
            raise CorpusError(f"{path} was removed or changed while this run wrote it")
        return replace(found, built=True)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold the lock of the file `name` during the `with` block, after waiting for it.

        The system releases the lock when the file is closed, or when the process ends.
        """
        with open(os.path.join(self.folder or "", f"{name}.lock"), "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _remove_unused(self) -> None:
        """Remove entries that no run has opened for SECONDS_UNUSED, before an entry is added.

        `_read` sets the time of each entry that it opens.
        """
        oldest = time.time() - SECONDS_UNUSED
        for suffix in ("arrays", "partial"):
            for path in Path(self.folder or "").glob(f"*.{suffix}"):
                # Another process may remove the same old entry at the same time.
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime < oldest:
                        _remove(path)

    def _unusable(self, error: OSError) -> UserError:
        """Return the error that a user sees if the cache's folder cannot be used.

        error: the system's error, as on a full disk or a file system without locks.
        """
        cause = error.strerror or error
        return CorpusError(
            f"--cache {self.folder}: cannot store the order of samples ({cause}): name a "
            f"folder of this node with room and file locks, or --cache none"
        )


def _read(path: str) -> CachedArrays | None:
    """Return the mapped arrays of the entry in the folder `path`.

    Return None if the entry is missing or damaged, or if another user could have written it.
    """
    arrays = {}
    files = []
    try:
        if why_others_could_write(path):
            return None
        for name in os.listdir(path):
            file = MappedFile(os.path.join(path, name))
            files.append(file)
            arrays[name.removesuffix(".npy")] = file.array()
    except (FileNotFoundError, ValueError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # an entry with an old time would be removed as unused
    return CachedArrays(arrays, files, built=False)


def _write(path: str, arrays: dict[str, np.ndarray]) -> None:
    """Write the entry of the folder `path`; an array is removed from `arrays` once it is written.

    The entry is written to another folder, which is then renamed: a process that reads without a
    lock sees the whole entry or none. Removing arrays from `arrays` frees their memory early.
    """
    partial = path.removesuffix("arrays") + "partial"
    shutil.rmtree(partial, ignore_errors=True)  # a killed process may have left this folder
    os.mkdir(partial, 0o700)
    for name in list(arrays):
        np.save(os.path.join(partial, name), arrays.pop(name))
    _remove(path)  # a damaged entry, or one that others could write to, may have this name
    os.rename(partial, path)


def _remove(path: str | Path) -> None:
    """Remove a link, or a folder and its files; do nothing if there is nothing at `path`.

    Only a link itself is removed, never the folder that it points to.
    """
    if os.path.islink(path):
        os.unlink(path)
    shutil.rmtree(path, ignore_errors=True)
