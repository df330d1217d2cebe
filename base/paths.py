"""Files and folders that a program will write: found to be writable before its work, and written.

check_folder("--out", "runs/a")     UserError if it cannot be made; check_file for a file
write_file(path, contents)          UserError if the disk is full; None: no file
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from base.errors import UserError


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
        raise UserError(f"cannot write {path}: {error.strerror}") from None


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
        raise UserError(f"{flag} {path}: {there}")
    try:
        with tempfile.TemporaryFile(dir=folder), contextlib.suppress(FileNotFoundError):
            os.stat(path)  # OSError if a name is too long
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot write in {folder}: {error.strerror}") from None


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
        raise UserError(f"cannot write {path}: {error.strerror}") from None


# Folders of a run that it makes in --out.
MADE_BY_RUN = ("checkpoints", "tensorboard", "hang", "numerics", "after_save")


def check_paths(config: Any) -> None:
    """Raise UserError if --out, --cache, a switch file or --resume cannot be used as given.

    Called by train.py on rank 0 before training begins. A switch file is a file whose appearance
    stops or saves the run; its folder must exist, or be the run's folder or a folder on the way to
    it, which the run makes.
    """
    run = config.run
    for folder in (run.out, *(os.path.join(run.out, name) for name in MADE_BY_RUN)):
        check_folder("--out", folder)
    # Whether the run reads token files: then it keeps orders of their samples in the cache.
    reads = config.data.data != ("synthetic",) or config.data.eval_data
    if config.data.cache_folder and reads:
        check_folder("--cache", config.data.cache_folder)
    for flag, path in (("--kill-switch", run.kill_switch), ("--save-switch", run.save_switch)):
        if path and os.path.isdir(path):
            raise UserError(f"{flag} {path} is a folder, not a file that may appear")
        folder = os.path.dirname(os.path.abspath(path)) if path else os.sep
        # Both paths get a "/" at their ends, so that `folder` matches whole names only.
        out = os.path.join(os.path.abspath(run.out), "")
        made_by_run = out.startswith(os.path.join(folder, ""))
        if not os.path.isdir(folder) and not made_by_run:
            raise UserError(f"{flag} {path} can never appear: there is no folder {folder}")
    if run.kill_switch and os.path.exists(run.kill_switch):
        raise UserError(f"--kill-switch {run.kill_switch} exists: remove it to train")
    if run.record_routing and run.pin_routing:
        raise UserError(
            "--record-routing and --pin-routing: a run writes the file or takes from it"
        )
    if run.resume not in (None, "auto") and not os.path.isdir(run.resume):
        why = dead_link(os.path.normpath(run.resume)) or "there is no such folder"
        raise UserError(f"--resume {run.resume}: {why}")
