"""Opens a file that may come from a stranger: a checkpoint, a corpus, a run's folder, a result.

    with open_regular(path) as file: ...           # bytes, unbuffered
    text = read_regular(path, MOST_BYTES)          # the whole content, of limited size

Only regular files are opened. A pipe would be waited for without an end, and a device may have no
end either. The size is known before anything is read, so that a file which claims to be large, or
is a hole without blocks, does not fill the memory. Every reader of such files goes through here.
"""

import errno
import io
import os
import stat
from pathlib import Path

MOST_OF_ROWS = 2**31  # the most bytes that are read of a file of JSON rows
MOST_OF_TOKENIZER = 2**28  # the most bytes of a tokenizer.json
MOST_OF_OBJECT = 2**26  # the most bytes that are read of a file with one JSON value
# What Git checks out in place of a large file that was not fetched: how it begins, by which
# program, and the command that fetches the file.
POINTERS = (
    (b"version https://git-lfs.github.com/spec/", "Git LFS", "git lfs pull"),
    (b"/annex/objects/", "git-annex", "git annex get ."),
)
MOST_OF_POINTER = 1024  # the most bytes of a pointer, by the specification of Git LFS


def open_regular(path: str | Path, follow: bool = True) -> io.FileIO:
    """Open a regular file to read its bytes.

    follow: whether `path` may be a link to a regular file. Raise OSError, without waiting, if the
    path is a pipe, a socket, a device, a folder, or a link that is not followed; or if the file is
    a pointer in place of one that was not fetched.
    """

    def opener(path: str, flags: int) -> int:
        """Return the descriptor of a regular file; `open` calls this in place of os.open."""
        # A device is not opened at all, since even that may act on it. The path may become another
        # file after `stat`: O_NONBLOCK keeps `open` from waiting then, and `fstat` looks again.
        status = os.stat(path, follow_symlinks=follow)
        if follow and stat.S_ISDIR(status.st_mode):  # a frequent mistake, with words of its own
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        _check_regular(status, path)
        no_links = 0 if follow else os.O_NOFOLLOW
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | no_links)
        try:
            status = os.fstat(descriptor)
            _check_regular(status, path)
            _check_fetched(descriptor, status, path)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, "rb", buffering=0, opener=opener)


def _check_regular(status: os.stat_result, path: str | Path) -> None:
    """Raise OSError if the status is not that of a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", path)


def _check_fetched(descriptor: int, status: os.stat_result, path: str | Path) -> None:
    """Raise OSError if the file is a pointer, which Git has in place of a file elsewhere."""
    if status.st_size > MOST_OF_POINTER:
        return
    begin = os.pread(descriptor, MOST_OF_POINTER, 0)
    for first, program, command in POINTERS:
        if begin.startswith(first):
            raise OSError(
                errno.EINVAL,
                f"it is a pointer of {program} of {status.st_size} bytes, and the file itself was "
                f"not fetched: run `{command}` in its folder",
                path,
            )


def read_regular(path: str | Path, most: int = MOST_OF_OBJECT) -> bytes:
    """Return the content of a regular file.

    most: the most bytes. Raise OSError if the file is larger, or cannot be opened as above.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(
                errno.EFBIG, f"it has {size:,} bytes, and at most {most:,} are read", path
            )
        return file.readall()[:most]
