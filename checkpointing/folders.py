"""The folder of a checkpoint: its name, its manifest with checksums, publishing and deleting it.

A checkpoint is written to a hidden folder and becomes visible by one rename after all of its files
are on the disk. A checkpoint is deleted after a rename has hidden it. So every visible folder is
complete, and a crash at any moment leaves the older checkpoints as they were. If a run continues
from an earlier step, or begins again at step 0, its first save moves the checkpoints that did not
lead to its state to checkpoints.1, checkpoints.2, ... The file manifest.json:

    {"format": "trine checkpoint", "version": 1, "step": 1000,
     "files": {"index.h5": {"bytes": 53995, "crc32": 3852957224}, ...},
     "checked": ["replicas"],   # checks that this state has passed; absent before version 0.3
     "sha256": "..."}           # of the JSON text without this key
"""

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from base.errors import CheckpointError
from base.paths import dead_link
from checkpointing.file_format import (
    INDEX,
    RECORD,
    SHARD,
    TEMPLATES,
    checksum,
    flush,
    is_tokenizer_file,
    open_regular,
)
from config.run_options import unused_number

VERSION = 1
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"  # the folder in a run's folder
# A file in a folder of checkpoints that were set aside because an audit found wrong results: no run
# is to continue from them. The text is the reason.
NOT_TO_BE_USED = "not-to-be-used.txt"
# The most bytes of a manifest that are read: the size of a manifest with 200,000 files.
MANIFEST_BYTES = 2**24


@dataclass(frozen=True)
class Chosen:
    """The checkpoint that a run resumes.

    folder: its path; None if --resume auto finds no checkpoint. damaged: the names of newer
    checkpoints that cannot be loaded.
    """

    folder: str | None
    damaged: tuple[str, ...] = ()


def write_manifest(
    folder: str,
    step: int,
    files: dict[str, tuple[int, int]],
    checked: Sequence[str] = (),
) -> None:
    """Write manifest.json, and flush it and the folder to the disk.

    files: bytes and CRC-32 of each file, by its name. checked: names of the checks that the saved
    state has passed.
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
    """Return the text of manifest.json: `body`, and the SHA-256 of body's JSON text.

    `read_manifest` makes this text again from the body that it has read, and compares the two.
    """
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return (json.dumps(body | {"sha256": digest}, indent=1) + "\n").encode()


def _what_is_there(folder: str) -> str:
    """Return why a folder without a manifest is no checkpoint, for an error message.

    If the folder has weights of Hugging Face, the text names the command that imports them.
    """
    if not os.path.isdir(folder):
        if there := dead_link(folder):
            return there
        return "it is a file" if os.path.lexists(folder) else "there is no such folder"
    names = os.listdir(folder)
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        command = f"python checkpoint.py import --from hf {shlex.quote(folder)} NEW_FOLDER"
        return f"it has weights of Hugging Face; `{command}` makes one of it"
    return f"it has no {MANIFEST}"


def read_manifest(folder: str) -> dict[str, Any]:
    """Return the contents of manifest.json, without "sha256".

    Raise UserError if the manifest is missing or damaged, if it has another format version or
    another step than the folder's name, or if it lists other files than a checkpoint has.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        with open_regular(path) as file:
            text = file.read(MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: {_what_is_there(folder)}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    try:
        body = json.loads(text)
        body.pop("sha256")
        intact = _manifest_text(body) == text  # true if the SHA-256 in the text is right
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(f"{path} is damaged: its contents do not match its own checksum")
    if body.get("version") != VERSION:
        version = f"{body.get('version')!a:.80}"
        raise CheckpointError(f"{folder} has format version {version}; this code reads {VERSION}")
    files = body.get("files")
    step = body.get("step")
    has_files = isinstance(files, dict) and all(map(_is_entry, files.items()))
    if not _is_count(step) or not has_files:
        raise CheckpointError(f"{path} does not have a step and files with bytes and crc32")
    if INDEX not in files or not any(map(SHARD.fullmatch, files)):
        raise CheckpointError(f"{path} lists {len(files)} files; {INDEX} and a shard are needed")
    if step_of(folder) not in (-1, step):
        raise CheckpointError(f"{folder} holds step {step}, not the step of its name")
    return body


def _is_count(value: Any) -> bool:
    """Return whether a value of the manifest is a whole number from 0 to 2^63 - 1."""
    return type(value) is int and 0 <= value < 2**63


def _is_entry(item: tuple[str, Any]) -> bool:
    """Return whether an item of the manifest's "files" is valid.

    item: (name of a checkpoint's file, {"bytes": ..., "crc32": ...}).
    """
    name, entry = item
    has_name = name in (INDEX, RECORD) or is_tokenizer_file(name) or SHARD.fullmatch(name)
    has_keys = isinstance(entry, dict) and entry.keys() == {"bytes", "crc32"}
    return bool(has_name and has_keys and all(map(_is_count, entry.values())))


def find_problem(
    folder: str,
    name: str,
    expected: dict[str, int],
    contents: bool = True,
) -> str | None:
    """Return the error message for a missing or damaged file of a checkpoint; None if it is sound.

    expected: "bytes" and "crc32" of the file in the manifest. contents: True: read the whole file
    and compare its checksum too; False: compare its size only.
    """
    path = os.path.join(folder, name)
    if os.path.dirname(name) and os.path.islink(os.path.join(folder, TEMPLATES)):
        return f"cannot read {path}: its folder is a link"
    try:
        with open_regular(path) as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != expected["bytes"]:
                return f"{path} has {actual} bytes, not {expected['bytes']}"
            crc = expected["crc32"]  # counts as right if the file's contents are not to be read
            if contents:
                _, crc = checksum(file)
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    if crc != expected["crc32"]:
        return f"{path} is damaged: its CRC-32 is {crc:08x}, not {expected['crc32']:08x}"
    return None


# The folders of visible checkpoints have such names. A name that ends in .old is that of an older
# checkpoint of the step, which an interrupted `publish` has left.
_NAME = re.compile(r"step_(\d{8,})(\.old)?")


def folder_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(folder: str) -> int:
    """Return the step in the name of a checkpoint's folder; -1 for other names."""
    match = _NAME.fullmatch(os.path.basename(os.path.normpath(folder)))
    return int(match[1]) if match else -1


def list_checkpoints(parent: str) -> list[str]:
    """Return the folders in `parent` that are named as checkpoints, the newest step first.

    A step may have two folders, step_... and step_....old, which an interrupted `publish` left;
    step_... is newer and comes first.
    """
    if not os.path.isdir(parent):
        return []
    names = [name for name in os.listdir(parent) if _NAME.fullmatch(name)]
    names.sort(key=lambda name: (step_of(name), not name.endswith(".old")), reverse=True)
    return [os.path.join(parent, name) for name in names]


def is_checkpoint(path: str) -> bool:
    """Return whether a path has a checkpoint's name (step_00001000), or contains a manifest.json.

    Called for a path that a user gives, which may also be a run or a folder of checkpoints.
    """
    return step_of(path) >= 0 or os.path.exists(os.path.join(path, MANIFEST))


def find_checkpoints(path: str) -> list[str]:
    """Return the folders of the checkpoints that a user's `path` may mean, the newest first.

    `path` is a checkpoint, a folder of checkpoints, or a run's folder. Raise UserError if it has
    none in place, but some that were set aside, or if it is both of the latter: the folder of an
    import in which a run has saved. Any other path is returned as it is, so that `read_manifest`
    raises an error that names the missing file.
    """
    if is_checkpoint(path):
        return [path]
    parent = os.path.join(path, CHECKPOINTS)
    own, of_run = list_checkpoints(path), list_checkpoints(parent)
    if own and of_run:
        raise CheckpointError(
            f"{path} has checkpoints in two places: {own[0]}, and those of a run, the newest "
            f"{of_run[0]}. Give one of them"
        )
    inside = own or of_run
    if not inside:
        refuse_set_aside(parent)
        refuse_set_aside(path)
    return inside or [path]


def refuse_set_aside(parent: str) -> None:
    """Raise UserError if there are checkpoints beside `parent`, such as in checkpoints.2.

    Called if `parent` itself, a folder of checkpoints, has none. Checkpoints that an audit has set
    aside do not count, because nothing is to continue from them.
    """
    actual = os.path.realpath(parent)
    folder, name = os.path.split(actual)
    if not os.path.isdir(folder):
        return
    found = []
    for other in sorted(os.listdir(folder)):
        number = other.removeprefix(f"{name}.")
        if number == other or not number.isdecimal():
            continue
        path = os.path.join(folder, other)
        inside = list_checkpoints(path)
        if inside and not os.path.lexists(os.path.join(path, NOT_TO_BE_USED)):
            steps = ", ".join(str(step_of(one)) for one in inside[:4])
            more = f" and {len(inside) - 4} more" if len(inside) > 4 else ""
            found.append(f"{inside[0]} (steps {steps}{more})")
    if found:
        raise CheckpointError(
            f"{parent} has no checkpoint, but there are some beside it: {'; '.join(found)}. "
            "Give one of these folders, or move them away to begin at step 0"
        )


def publish(hidden: str, final: str) -> None:
    """Rename a finished folder to its visible name, and flush the new name to the disk.

    hidden: the path of the folder that was written. final: the path with its visible name. If a
    checkpoint has this name already, it is renamed to .old, so that the step has a complete
    checkpoint at every moment, and is deleted after the rename.
    """
    aside = final + ".old"
    if os.path.lexists(final):
        if os.path.lexists(aside):  # an interrupted `publish` left this older checkpoint: delete it
            remove(aside)
        os.rename(final, aside)
    os.rename(hidden, final)
    flush(os.path.dirname(final))
    if os.path.lexists(aside):
        remove(aside)


def remove(folder: str) -> None:
    """Delete a checkpoint, after a rename that hides it; delete a symbolic link, not its target.

    A crash during the deletion leaves a hidden folder, which no run takes for a checkpoint.
    """
    parent, name = os.path.split(os.path.normpath(folder))
    hidden = os.path.join(parent, f".{name}.removed")
    _delete(hidden)  # an interrupted removal may have left this folder
    os.rename(folder, hidden)
    _delete(hidden)


def _delete(path: str) -> None:
    """Delete a folder with its contents, a file or a symbolic link, if the path exists."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def remove_leftovers(parent: str) -> list[str]:
    """Delete the hidden folders of interrupted saves and removals; return their names."""
    names = [name for name in os.listdir(parent) if name.startswith(".step_")]
    for name in names:
        _delete(os.path.join(parent, name))
    return names


def surplus(steps: list[int], keep_last: int, keep_every: int) -> list[int]:
    """Return the steps in `steps` whose checkpoints --keep-last and --keep-every do not keep.

    The last `keep_last` steps are kept (0: all steps), and the multiples of `keep_every` (0: none).
    """
    if not keep_last:
        return []
    older = sorted(steps)[:-keep_last]
    return [step for step in older if not keep_every or step % keep_every]


def delete_surplus(
    parent: str,
    keep_last: int,
    keep_every: int,
    saved: int,
    covered: int = -1,
    in_use: Iterable[int] = (),
) -> None:
    """Delete the checkpoints of a folder whose steps `surplus` returns, with three exceptions.

    Called after each save. saved: the step of this save, whose checkpoint is not deleted. covered:
    the last step whose audit found nothing wrong, -1: none; the newest checkpoint of this step or
    an earlier one is not deleted either. in_use: steps whose checkpoints a command of --after-save
    needs. Raise OSError if a deletion fails.
    """
    checkpoints = list_checkpoints(parent)
    steps = sorted({step_of(path) for path in checkpoints})
    needed = {saved, *in_use}
    # An audit found that the steps up to `covered` were right: keep the newest checkpoint of these.
    needed.update([step for step in steps if step <= covered][-1:])
    steps_to_delete = {*surplus(steps, keep_last, keep_every)} - needed
    for path in checkpoints:
        if step_of(path) in steps_to_delete:
            remove(path)


def set_aside(parent: str, after: int, why: str, wrong: bool = False) -> str:
    """Move the checkpoints of later steps than `after` to a new folder PARENT.1, PARENT.2, ...

    Called if the run begins again or continues from an earlier step, so that these checkpoints did
    not lead to its state, or if an audit found wrong results. why: the reason. wrong: whether no
    run is to continue from them. Return a line that names the folder and the checkpoints, or "" if
    no checkpoint is moved. Raise OSError if a move fails.
    """
    names = [os.path.basename(path) for path in list_checkpoints(parent) if step_of(path) > after]
    if not names:
        return ""
    actual = os.path.realpath(parent)  # renames must stay on the real folder's file system
    aside = f"{actual}.{unused_number([actual])}"
    os.mkdir(aside)
    if wrong:
        with open(os.path.join(aside, NOT_TO_BE_USED), "w") as file:
            file.write(why + "\n")
    for name in names:
        os.rename(os.path.join(parent, name), os.path.join(aside, name))
    return f"set aside in {aside}: {', '.join(names)}; {why}"
