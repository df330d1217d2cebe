"""The folder of a checkpoint: its manifest and checksums, its name, how it appears and goes.

A checkpoint is written to a hidden folder and becomes visible by one rename after all of its files
are on the disk; a removed one is first hidden by a rename. So every visible folder is complete,
and a crash at any moment leaves the older ones as they were. Those of another course than the
run's are set aside in checkpoints.1, checkpoints.2, ... manifest.json:

    {"format": "trine checkpoint", "version": 1, "step": 1000,
     "files": {"index.h5": {"bytes": 53995, "crc32": 3852957224}, ...},
     "checked": ["replicas"],   # what this state has passed; not there before version 0.3
     "sha256": of the JSON text without this key}
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from typing import Any

from checkpointing.file_format import INDEX, SHARD, checksum, flush, open_regular
from config.messages import UserError

VERSION = 1
MANIFEST = "manifest.json"
MANIFEST_BYTES = 2**24  # at the most; 200,000 files have as many


def write_manifest(
    folder: str, step: int, files: dict[str, tuple[int, int]], checked: Sequence[str] = ()
) -> None:
    """Write manifest.json and bring it to the disk.

    files: bytes and CRC-32 by name. checked: names of the checks that this state has passed.
    """
    entries = {name: {"bytes": total, "crc32": crc} for name, (total, crc) in files.items()}
    body = {"format": "trine checkpoint", "version": VERSION, "step": step, "files": entries}
    body["checked"] = list(checked)
    path = os.path.join(folder, MANIFEST)
    with open(path, "wb") as file:
        file.write(_manifest_text(body))
    flush(path)
    flush(folder)


def _manifest_text(body: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return (json.dumps(body | {"sha256": digest}, indent=1) + "\n").encode()


def _what_is_there(folder: str) -> str:
    """Why a folder without a manifest is no checkpoint, and what to do if it is another thing."""
    if not os.path.isdir(folder):
        return "there is no such folder"
    names = os.listdir(folder)
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        command = f"python checkpoint.py import --from hf {folder} NEW_FOLDER"
        return f"it has weights of Hugging Face; `{command}` makes one of it"
    return f"it has no {MANIFEST}"


def read_manifest(folder: str) -> dict[str, Any]:
    """The contents of manifest.json; UserError if it is missing, if a bit of it has changed, or if
    it lists other files than a checkpoint has.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        with open_regular(path) as file:
            text = file.read(MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{folder} is not a complete checkpoint: {_what_is_there(folder)}"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    try:
        body = json.loads(text)
        body.pop("sha256")
        intact = _manifest_text(body) == text
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise UserError(f"{path} is damaged: its contents do not match its own checksum")
    if body.get("version") != VERSION:
        found = f"{body.get('version')!a:.80}"
        raise UserError(f"{folder} has format version {found}; this code reads {VERSION}")
    files = body.get("files")
    step = body.get("step")
    if not _is_count(step) or not isinstance(files, dict) or not all(map(_is_entry, files.items())):
        raise UserError(f"{path} does not have a step and files with bytes and crc32")
    if len(files) < 2 or INDEX not in files:
        raise UserError(f"{path} lists {len(files)} files; {INDEX} and a shard are needed")
    if step_of(folder) not in (-1, step):
        raise UserError(f"{folder} holds step {step}, not the step of its name")
    return body


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_entry(item: tuple[str, Any]) -> bool:
    """Whether an item of the manifest's files is a name and what is known about it."""
    name, entry = item
    named = name == INDEX or SHARD.fullmatch(name)
    known = isinstance(entry, dict) and entry.keys() == {"bytes", "crc32"}
    return bool(named and known and all(map(_is_count, entry.values())))


def find_problem(
    folder: str, name: str, expected: dict[str, int], contents: bool = True
) -> str | None:
    """What is wrong with a file of a checkpoint, in a sentence, or None.

    contents: whether to read the whole file and compare its checksum, or to compare its size only.
    """
    path = os.path.join(folder, name)
    try:
        with open_regular(path) as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != expected["bytes"]:
                return f"{path} has {actual} bytes, not {expected['bytes']}"
            crc = checksum(file)[1] if contents else expected["crc32"]
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    if crc != expected["crc32"]:
        return f"{path} is damaged: its CRC-32 is {crc:08x}, not {expected['crc32']:08x}"
    return None


_NAME = re.compile(r"step_(\d{8,})(\.old)?")


def folder_name(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(folder: str) -> int:
    """The step in a checkpoint's name, -1 for other names."""
    match = _NAME.fullmatch(os.path.basename(os.path.normpath(folder)))
    return int(match[1]) if match else -1


def list_checkpoints(parent: str) -> list[str]:
    """Folders named as checkpoints, newest step first; step_... comes before step_....old."""
    if not os.path.isdir(parent):
        return []
    names = [name for name in os.listdir(parent) if _NAME.fullmatch(name)]
    names.sort(key=lambda name: (step_of(name), not name.endswith(".old")), reverse=True)
    return [os.path.join(parent, name) for name in names]


def find_checkpoints(path: str) -> list[str]:
    """The checkpoints that `path` may mean, newest first: itself, or those in a run's folder.

    Any other path is returned as it is: `read_manifest` then says what is missing.
    """
    if step_of(path) >= 0 or os.path.exists(os.path.join(path, MANIFEST)):
        return [path]
    inside = list_checkpoints(path) or list_checkpoints(os.path.join(path, "checkpoints"))
    return inside or [path]


def publish(hidden: str, final: str) -> None:
    """Rename a finished folder to its visible name; on return the new name is on the disk.

    A checkpoint that has this name already stays visible as .old until then.
    """
    aside = final + ".old"
    if os.path.lexists(final):
        if os.path.lexists(aside):
            remove(aside)
        os.rename(final, aside)
    os.rename(hidden, final)
    flush(os.path.dirname(final))
    if os.path.lexists(aside):
        remove(aside)


def remove(folder: str) -> None:
    """Delete a checkpoint, after hiding it by a rename; of a symbolic link only the link."""
    parent, name = os.path.split(os.path.normpath(folder))
    hidden = os.path.join(parent, f".{name}.removed")
    _delete(hidden)  # left by an interrupted removal
    os.rename(folder, hidden)
    _delete(hidden)


def _delete(path: str) -> None:
    """Delete a folder and all in it, or a file or a symbolic link, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def remove_leftovers(parent: str) -> list[str]:
    """Delete the hidden folders of interrupted saves and removals; returns their names."""
    names = [name for name in os.listdir(parent) if name.startswith(".step_")]
    for name in names:
        _delete(os.path.join(parent, name))
    return names


def surplus(steps: list[int], keep_last: int, keep_every: int) -> list[int]:
    """Which of these steps to delete: all but the last, and the multiples of keep_every."""
    if not keep_last:
        return []
    older = sorted(steps)[:-keep_last]
    return [step for step in older if not keep_every or step % keep_every]


def delete_surplus(parent: str, keep_last: int, keep_every: int, saved: int) -> None:
    """Delete the checkpoints that `surplus` names, but not that just saved. Raises OSError."""
    found = list_checkpoints(parent)
    delete = surplus(sorted({step_of(path) for path in found}), keep_last, keep_every)
    for path in found:
        if step_of(path) in delete and step_of(path) != saved:
            remove(path)


def set_aside(parent: str, after: int) -> str:
    """Move the checkpoints of later steps than `after` into PARENT.1, PARENT.2, ...; says which.

    Raises OSError.
    """
    names = [os.path.basename(path) for path in list_checkpoints(parent) if step_of(path) > after]
    if not names:
        return ""
    actual = os.path.realpath(parent)  # a rename does not leave the file system
    aside = f"{actual}.{unused_number([actual])}"
    os.mkdir(aside)
    for name in names:
        os.rename(os.path.join(parent, name), os.path.join(aside, name))
    return f"set aside in {aside}: {', '.join(names)}"


def unused_number(paths: list[str]) -> int:
    """The smallest number N, from 1 on, such that no PATH.N exists."""
    number = 1
    while any(os.path.lexists(f"{path}.{number}") for path in paths):
        number += 1
    return number
