"""Checkpoints whose files are hostile or damaged: what is in a file's place, manifests, bytes.

A case is a change of a checkpoint; those that lie within HDF5 are in hostile_checkpoints.py.
"""

import hashlib
import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

from checkpointing import file_format

STEP = 4
NAME = f"step_{STEP:08d}"
SHARDS = [f"rank_{i:05d}.h5" for i in range(4)]
FILES = ["manifest.json", "index.h5", *SHARDS]
TENSOR = "blocks.0.mlp.down.weight"  # (16, 64), a half of its columns in each of the first shards
Case = Callable[[Path, Path], Any]  # changes a checkpoint; the second is the secret one


# ---- Signing -------------------------------------------------------------------------------------


def sign(folder: Path, **changes: Any) -> None:
    """A manifest that fits the files, except for these changes of its keys."""
    names = [name for name in FILES[1:] if (folder / name).exists()]
    checked = {name: file_format.checksum_file(str(folder / name)) for name in names}
    files = {name: {"bytes": size, "crc32": crc} for name, (size, crc) in checked.items()}
    body = {"format": "trine checkpoint", "version": 1, "step": STEP, "files": files}
    sign_body(folder, body | changes)


def sign_body(folder: Path, body: dict) -> None:
    """Write any manifest with a SHA-256 that fits."""
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    text = json.dumps(body | {"sha256": digest}, indent=1) + "\n"
    (folder / "manifest.json").write_text(text)


def with_manifest(**changes: Any) -> Case:
    return lambda folder, secret: sign(folder, **changes)


def with_files(change: Callable[[dict], Any]) -> Case:
    """A signed manifest whose `files` are changed."""

    def case(folder: Path, secret: Path) -> None:
        body = json.loads((folder / "manifest.json").read_text())
        del body["sha256"]
        body["files"] = change(body["files"]) or body["files"]
        sign_body(folder, body)

    return case


def with_text(data: bytes) -> Case:
    return lambda folder, secret: (folder / "manifest.json").write_bytes(data)


def in_hdf5(name: str, change: Callable[[h5py.File, Path], Any]) -> Case:
    """A change of an HDF5 file, signed."""

    def case(folder: Path, secret: Path) -> None:
        with h5py.File(folder / name, "r+", libver="latest") as file:
            change(file, secret)
        sign(folder)

    return case


def in_bytes(name: str, change: Callable[[bytes], bytes]) -> Case:
    """A change of a file's bytes, signed."""

    def case(folder: Path, secret: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        sign(folder)

    return case


# ---- What is in place of a file ------------------------------------------------------------------


def replaced_by_link(name: str, target: str) -> Case:
    def case(folder: Path, secret: Path) -> None:
        (folder / name).unlink()
        to = target.format(secret=secret, relative=os.path.relpath(secret, folder), name=name)
        (folder / name).symlink_to(to)

    return case


def replaced(name: str, make: Callable[[Path], Any]) -> Case:
    def case(folder: Path, secret: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return case


def make_socket(path: Path) -> None:
    """Through a short relative name: the length of a socket's is limited."""
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(before)


def make_sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(2**40)


def places() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name in (*FILES[:3], FILES[-1]):
        cases |= {
            f"{name} is a link to a secret": replaced_by_link(name, "{secret}/{name}"),
            f"{name} is a relative link": replaced_by_link(name, "{relative}/{name}"),
            f"{name} is a link to zeros": replaced_by_link(name, "/dev/zero"),
            f"{name} is a link to itself": replaced_by_link(name, "{name}"),
            f"{name} is a pipe": replaced(name, os.mkfifo),
            f"{name} is a folder": replaced(name, os.mkdir),
            f"{name} is a socket": replaced(name, make_socket),
            f"{name} is missing": replaced(name, lambda path: None),
            f"{name} is empty": replaced(name, Path.touch),
            f"{name} is sparse": replaced(name, make_sparse),
        }
    return cases


# ---- The manifest --------------------------------------------------------------------------------

WRONG_COUNTS = (-1, 1.5, "12", None, 2**70, [1], {}, float("nan"))
OTHER_NAMES = (
    "../../secret/rank_00000.h5",
    "/dev/zero",
    "/etc/hostname",
    "a/rank_00000.h5",
    "./rank_00000.h5",
    "rank_0.h5",
    "rank_00000.h5\n",
    "rank_00000.h5/",
    "rank_\u0660\u0660\u0660\u0660\u0660.h5",
    "rank_00000.h5\0",
    "manifest.json",
    "model.h5",
    "..",
    "",
)


def manifests() -> dict[str, Case]:
    deep = b"[" * 10**6
    texts = {
        "empty": b"",
        "cut": b'{"format": "trine checkpoint", "version": 1,',
        "a list": b"[]\n",
        "a number": b"1\n",
        "text": b'"x"\n',
        "null": b"null\n",
        "deep lists": deep,
        "closed deep lists": deep + b"]" * 10**6,
        "deep objects": b'{"a":' * 10**5,
        "a long number": b'{"step": ' + b"9" * 10**5 + b"}",
        "latin-1": '{"é": 1}'.encode("latin-1"),
        "UTF-16": '{"format": "trine checkpoint"}'.encode("utf-16"),
        "zeros": bytes(1000),
        "twice a key": b'{"step": 4, "step": 5, "sha256": ""}',
        "without a checksum": b'{"format": "trine checkpoint", "version": 1, "step": 4}',
    }
    cases = {f"manifest: {name}": with_text(data) for name, data in texts.items()}
    for value in WRONG_COUNTS:
        cases[f"manifest: step {value}"] = with_manifest(step=value)
        for key in ("bytes", "crc32"):
            cases[f"manifest: {key} {value}"] = with_files(
                lambda files, key=key, value=value: files["index.h5"].update({key: value})
            )
    for value in ({}, [], None, "index.h5", 3, ["index.h5"]):
        cases[f"manifest: files {value!r}"] = with_manifest(files=value)
    for value in (None, 2, 0, "1", [1]):
        cases[f"manifest: version {value!r}"] = with_manifest(version=value)
    cases["manifest: another step"] = with_manifest(step=STEP + 1)
    for name in OTHER_NAMES:
        cases[f"manifest: lists {name!r}"] = with_files(
            lambda files, name=name: files.update({name: files[SHARDS[0]]})
        )
        cases[f"manifest: {name!r} in place of a shard"] = with_files(
            lambda files, name=name: {n if n != SHARDS[1] else name: e for n, e in files.items()}
        )
    for name in FILES[1:]:
        cases[f"manifest: lacks {name}"] = with_files(
            lambda files, name=name: files.pop(name) and {}
        )
        cases[f"manifest: null for {name}"] = with_files(
            lambda files, name=name: files.update({name: None})
        )
        cases[f"manifest: {name} and no more"] = with_files(
            lambda files, name=name: {name: files[name]}
        )
        cases[f"{name} is deleted, signed"] = lambda folder, secret, name=name: (
            (folder / name).unlink(),
            sign(folder),
        )
    return cases


# ---- Bytes ---------------------------------------------------------------------------------------


def contents() -> dict[str, Case]:
    """Other content in an HDF5 file, signed."""
    cases: dict[str, Case] = {}
    for name in FILES[1:4]:
        cases |= {
            f"{name}: text, signed": in_bytes(name, lambda data: b"text\n" * 500),
            f"{name}: zeros, signed": in_bytes(name, lambda data: bytes(len(data))),
            f"{name}: a half, signed": in_bytes(name, lambda data: data[: len(data) // 2]),
            f"{name}: nothing, signed": in_bytes(name, lambda data: b""),
        }
    cases["index.h5: a shard"] = swap("index.h5", SHARDS[0])
    cases["shards exchanged"] = swap(SHARDS[0], SHARDS[2])
    return cases


def swap(one: str, other: str) -> Case:
    def case(folder: Path, secret: Path) -> None:
        data = (folder / one).read_bytes()
        shutil.copyfile(folder / other, folder / one)
        (folder / other).write_bytes(data)
        sign(folder)

    return case


def damages(count: int, seed: int) -> dict[str, Case]:
    """Random bytes of random files changed, not signed: `show` compares sizes only."""

    def damage(number: int) -> Case:
        def case(folder: Path, secret: Path) -> None:
            chance = random.Random(seed + number)
            path = folder / chance.choice(FILES)
            data = bytearray(path.read_bytes())
            at, length = chance.randrange(len(data)), chance.randrange(1, 64)
            for i in range(at, min(at + length, len(data))):
                data[i] ^= chance.randrange(1, 256)
            path.write_bytes(data)

        return case

    return {f"damage {number}": damage(number) for number in range(count)}
