"""Files and folders that a program will write: found to be writable before its work, and written.

check_folder("--out", "runs/a")     UserError if it cannot be made; check_file for a file
write_file(path, contents)          UserError if the disk is full; None: no file
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from base.errors import FileError


def check_file(path: str | None) -> None:
    """Raise UserError if a file that a program writes at its end cannot be written; None: no file.

    The check changes no file: it does not make a missing file, and it does not open a pipe. So a
    program finds a wrong path before its work, and not after it.
    """
    if path is None:
        return
    target = os.path.realpath(path)  # a link may lead to a file that does not exist yet
    try:
        if os.path.isfile(target) or os.path.isdir(target):  # for a folder `open` raises OSError
            with open(target, "ab"):
                pass
        elif not os.path.exists(target):
            # A temporary file without a name shows whether its folder takes files.
            tempfile.TemporaryFile(dir=os.path.dirname(target)).close()
            with contextlib.suppress(FileNotFoundError):
                os.stat(target)  # OSError if a name is too long
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from None


def dead_link(path: str) -> str:
    """Return that a path is a link to nothing, with its target; "" if it is no such link."""
    if not os.path.islink(path) or os.path.exists(path):
        return ""
    return f"{path} is a link to {os.readlink(path)}, and nothing is there"


def check_folder(flag: str, path: str) -> None:
    """Raise UserError if the folder `path` cannot be made, or if no file can be made in it.

    The check makes a temporary file without a name in the deepest folder of `path` that exists.
    flag: the option, for the message.
    """
    folder = os.path.abspath(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if there := dead_link(folder):
        raise FileError(f"{flag} {path}: {there}")
    try:
        with tempfile.TemporaryFile(dir=folder), contextlib.suppress(FileNotFoundError):
            os.stat(path)  # OSError if a name is too long
    except OSError as error:
        raise FileError(f"{flag} {path}: cannot write in {folder}: {error.strerror}") from None


def write_file(path: str | None, contents: str | bytes) -> None:
    """Write `contents` into the file `path`; UserError if it cannot be written. None: do nothing.

    A file that is there stays as it was if the new contents have no room.
    """
    data = contents.encode() if isinstance(contents, str) else contents
    if path is None:
        return
    target = Path(os.path.realpath(path))
    try:
        # A pipe is no file, and /dev/stdout may be one that others write too.
        if path.startswith("/dev/") or (target.exists() and not target.is_file()):
            Path(path).write_bytes(data)
            return
        draft = target.with_name(f".{target.name:.200}.{os.getpid()}.partial")
        try:
            draft.write_bytes(data)
            if target.exists():
                shutil.copymode(target, draft)
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from None
