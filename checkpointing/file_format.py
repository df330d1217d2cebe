"""A checkpoint on disk: whole tensors over the ranks' files, a manifest, and their checks.

    checkpoints/step_00001000/
        rank_00000.h5 ...   what each rank wrote: /weights, /exp_avg, ..., one flat array a kind
        index.h5            every tensor whole, by its name, as a virtual dataset over those files
        manifest.json       bytes and CRC-32 of every file, and a SHA-256 of its own

    h5py.File("step_00001000/index.h5")["weights/blocks.3.mlp.up.weight"][...]

gives the whole matrix without this project; a part that no file holds would read as NaN. Nothing
in it depends on a layout: tensors have their global shapes, without padding, and every element is
there once. Attributes of the groups /model, /progress, /optimizer, /data and /run say the rest.

Canonical shapes (d head size, f MLP width, h hidden, V vocabulary): attention.qkv.weight is
(kv_heads, heads/kv_heads + 2, d, h): for each key/value head its queries, then its key, then its
value; mlp.up.weight is (f, h), or with SwiGLU (2, f, h): gate, then up; other matrices are (out,
in); embedding.tokens.weight and head.weight are (V, h). A tied head has no tensor of its own.

A checkpoint appears by one rename of a hidden folder, after all of its files are on the disk.
No torch here: numpy, h5py and the file system.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from config.messages import UserError

VERSION = 1
INDEX, MANIFEST = "index.h5", "manifest.json"
CHUNK = 2**20  # bytes summed and then written, while they are in the cache
PAGE = 4096  # arrays begin at multiples of this in their files

# Per dimension, first and one past last.
Box = tuple[tuple[int, int], ...]


# ------------------------------------------------------------------------------------------------
# Flat ranges and boxes
# ------------------------------------------------------------------------------------------------


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) of an array in C order as boxes, in order, each a run of memory.

    At most two for every dimension but the last: (5, 4), 3, 14 -> row 0 from 3, rows 1-2, row 3
    to 2.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield ((start, stop),)
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, stop // inner
    if start % inner:
        for box in boxes(shape[1:], start % inner, min(inner, stop - first * inner)):
            yield ((first, first + 1), *box)
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    if last >= first:
        for box in boxes(shape[1:], 0, stop - last * inner):
            yield ((last, last + 1), *box)


def size(box: Box) -> int:
    """Elements in a box."""
    return math.prod(b - a for a, b in box)


def select(box: Box) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(a, b) for a, b in box)


# ------------------------------------------------------------------------------------------------
# Writing
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """What one rank wrote: its file, and which part of which tensor each run of it is.

    pieces: (name, boxes) in the order of the flat arrays; dtypes: of each kind, as numpy's text.
    """

    file: str
    bytes: int
    crc32: int
    dtypes: dict[str, str]
    pieces: list[tuple[str, list[Box]]]

    @functools.cached_property
    def elements(self) -> int:
        """Length of each of the file's flat arrays."""
        return sum(size(box) for _, parts in self.pieces for box in parts)


def write_shard(path: str, elements: int, arrays: dict[str, tuple[str, Iterable]]):
    """Write flat arrays to an HDF5 file and to the disk; returns the file's bytes and CRC-32.

    arrays: by kind, the dtype and the runs (numpy) that make up `elements`. HDF5 lays out the
    file; the data then go there directly, so that their checksum is taken on the way, nothing is
    copied and other threads run meanwhile. Raises OSError.
    """
    with _hdf5_errors(path), _create(path) as file:
        places = {
            kind: _reserve(file, kind, dtype, elements) for kind, (dtype, _) in arrays.items()
        }
    descriptor = os.open(path, os.O_RDWR)
    try:
        total, at, crc = os.fstat(descriptor).st_size, 0, 0
        for kind in sorted(places, key=places.get):
            crc = _sum_range(descriptor, at, places[kind], crc)
            at = places[kind]
            for run in arrays[kind][1]:
                at, crc = _put(descriptor, run, at, crc)
        crc = _sum_range(descriptor, at, total, crc)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return total, crc


@contextlib.contextmanager
def _hdf5_errors(path: str):
    """HDF5's failures to write, of which h5py makes several kinds, as OSError."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"HDF5 cannot write {path}: {error}") from error


def _create(path: str) -> h5py.File:
    # No file locks: some parallel file systems refuse them, and nobody else writes here.
    return h5py.File(path, "w", locking=False, alignment_threshold=PAGE, alignment_interval=PAGE)


def _reserve(file: h5py.File, kind: str, dtype: str, elements: int) -> int:
    """Make a flat dataset without writing its elements; the place of the first in the file."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space = h5py.h5s.create_simple((elements,))
    kind_type = h5py.h5t.py_create(np.dtype(dtype), logical=True)
    return h5py.h5d.create(file.id, kind.encode(), kind_type, space, properties).get_offset()


def _put(descriptor: int, run: np.ndarray, at: int, crc: int) -> tuple[int, int]:
    """Write a run of elements at a place; the place behind it, and the checksum so far."""
    data = memoryview(run).cast("B")
    for start in range(0, len(data), CHUNK):
        chunk = data[start : start + CHUNK]
        crc = zlib.crc32(chunk, crc)
        while chunk:
            written = os.pwrite(descriptor, chunk, at)
            at, chunk = at + written, chunk[written:]
    return at, crc


def _sum_range(descriptor: int, start: int, stop: int, crc: int) -> int:
    """The CRC-32 carried on over bytes [start, stop) of a file, or to its end."""
    buffer = memoryview(bytearray(min(CHUNK, stop - start)))
    while start < stop:
        count = os.preadv(descriptor, [buffer[: stop - start]], start)
        if not count:
            break
        crc, start = zlib.crc32(buffer[:count], crc), start + count
    return crc


def index_image(shapes: dict[str, tuple[int, ...]], shards: list[Shard]) -> bytes:
    """What index.h5 is made of: every tensor whole over the shards.

    The same for every save of a run. Raises RuntimeError if the shards do not cover a tensor.
    """
    places: dict[str, list[tuple[Shard, int, Box]]] = {name: [] for name in shapes}
    for shard in shards:
        at = 0
        for name, parts in shard.pieces:
            for box in parts:
                places[name].append((shard, at, box))
                at += size(box)
    with h5py.File(INDEX, "w", driver="core", backing_store=False, libver="latest") as file:
        for name, parts in places.items():
            covered = sum(size(box) for _, _, box in parts)
            if covered != math.prod(shapes[name]):
                raise RuntimeError(
                    f"the ranks wrote {covered} elements of {name}, which has {shapes[name]}"
                )
            for kind in shards[0].dtypes:
                _join(file, kind, name, shapes[name], parts)
        file.flush()
        return file.id.get_file_image()


def write_index(folder: str, image: bytes, facts: dict[str, dict[str, Any]]) -> tuple[int, int]:
    """Write index.h5 from its image, with the facts as attributes of groups; bytes and CRC-32."""
    path = os.path.join(folder, INDEX)
    with open(path, "wb") as file:
        file.write(image)
    with _hdf5_errors(path), h5py.File(path, "r+", libver="latest", locking=False) as file:
        for group, values in facts.items():
            file.require_group(group).attrs.update(values)
    return sum_file(path, flush=True)


def _join(file, kind: str, name: str, shape: tuple[int, ...], parts) -> None:
    """One virtual dataset of the whole tensor over its parts.

    By HDF5's own calls: h5py's classes for this take ten times as long.
    """
    dtype, properties = np.dtype(parts[0][0].dtypes[kind]), h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_fill_value(np.array(np.nan, dtype))
    whole = h5py.h5s.create_simple(shape)
    for shard, at, box in parts:
        whole.select_hyperslab(tuple(a for a, _ in box), tuple(b - a for a, b in box))
        source = h5py.h5s.create_simple((shard.elements,))
        source.select_hyperslab((at,), (size(box),))
        properties.set_virtual(whole, shard.file.encode(), kind.encode(), source)
    kind_type = h5py.h5t.py_create(dtype, logical=True)
    group = file.require_group(kind).id
    h5py.h5d.create(group, name.encode(), kind_type, h5py.h5s.create_simple(shape), properties)


def sum_file(path: str, flush: bool = False) -> tuple[int, int]:
    """Bytes and CRC-32 of a file; with `flush`, it is on the disk afterwards. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR if flush else os.O_RDONLY)
    try:
        total = os.fstat(descriptor).st_size
        crc = _sum_range(descriptor, 0, total, 0)
        if flush:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return total, crc


# ------------------------------------------------------------------------------------------------
# The manifest
# ------------------------------------------------------------------------------------------------


def write_manifest(folder: str, step: int, files: dict[str, tuple[int, int]]) -> None:
    """Write manifest.json, `files` giving bytes and CRC-32 by name; it is then on the disk."""
    listed = {name: {"bytes": total, "crc32": crc} for name, (total, crc) in files.items()}
    body = {"format": "trine checkpoint", "version": VERSION, "step": step, "files": listed}
    with open(os.path.join(folder, MANIFEST), "wb") as file:
        file.write(_manifest_text(body))
        file.flush()
        os.fsync(file.fileno())
    flush_folder(folder)


def _manifest_text(body: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return (json.dumps(body | {"sha256": digest}, indent=1) + "\n").encode()


def read_manifest(folder: str) -> dict[str, Any]:
    """What manifest.json says; UserError if there is none, or if a bit of it has changed."""
    path = os.path.join(folder, MANIFEST)
    try:
        with open(path, "rb") as file:
            text = file.read()
    except FileNotFoundError:
        raise UserError(f"{folder} is no complete checkpoint: it has no {MANIFEST}") from None
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
    if body["version"] != VERSION:
        raise UserError(f"{folder} has format version {body['version']}; this code reads {VERSION}")
    named = step_of(folder)
    if named not in (None, body["step"]):
        raise UserError(f"{folder} holds step {body['step']}, not the step of its name")
    return body


def find_problem(folder: str, name: str, expected: dict[str, int]) -> str | None:
    """What is wrong with a file of a checkpoint, in a sentence, or None; reads all of it."""
    path = os.path.join(folder, name)
    try:
        actual = os.path.getsize(path)
        if actual != expected["bytes"]:
            return f"{path} has {actual} bytes, not {expected['bytes']}"
        crc = sum_file(path)[1]
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    if crc != expected["crc32"]:
        return f"{path} is damaged: its CRC-32 is {crc:08x}, not {expected['crc32']:08x}"
    return None


# ------------------------------------------------------------------------------------------------
# Folders
# ------------------------------------------------------------------------------------------------

_NAME = re.compile(r"step_(\d{8,})(\.old)?")


def folder_name(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(folder: str) -> int | None:
    """The step in a checkpoint's name, None for other names."""
    match = _NAME.fullmatch(os.path.basename(os.path.normpath(folder)))
    return int(match[1]) if match else None


def list_checkpoints(parent: str) -> list[str]:
    """Folders named as checkpoints, newest step first; what moved aside follows its successor."""
    if not os.path.isdir(parent):
        return []
    names = [name for name in os.listdir(parent) if _NAME.fullmatch(name)]
    names.sort(key=lambda name: (step_of(name), not name.endswith(".old")), reverse=True)
    return [os.path.join(parent, name) for name in names]


def locate(path: str) -> list[str]:
    """The checkpoints that `path` may mean, newest first: itself, or those in a run's folder.

    What is neither is returned as it is, for `read_manifest` to say what it lacks.
    """
    if step_of(path) is not None or os.path.exists(os.path.join(path, MANIFEST)):
        return [path]
    inside = list_checkpoints(path) or list_checkpoints(os.path.join(path, "checkpoints"))
    return inside or [path]


def publish(hidden: str, final: str) -> None:
    """Give a finished folder its name; on return the name is on the disk.

    One of the same name, from an earlier course of the run, stays visible as .old until then.
    """
    aside = final + ".old"
    if os.path.exists(final):
        if os.path.exists(aside):
            remove(aside)
        os.rename(final, aside)
    os.rename(hidden, final)
    flush_folder(os.path.dirname(final))
    if os.path.exists(aside):
        remove(aside)


def remove(folder: str) -> None:
    """Delete a checkpoint; it is invisible before its first file goes."""
    parent, name = os.path.split(os.path.normpath(folder))
    hidden = os.path.join(parent, f".{name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)  # of a removal that was cut short
    os.rename(folder, hidden)
    shutil.rmtree(hidden)


def remove_leftovers(parent: str) -> list[str]:
    """Delete what saves and removals left that were cut short; returns the names."""
    names = [name for name in os.listdir(parent) if name.startswith(".step_")]
    for name in names:
        shutil.rmtree(os.path.join(parent, name))
    return names


def surplus(steps: list[int], keep_last: int, keep_every: int) -> list[int]:
    """Which of these steps to delete: all but the last, and the multiples of keep_every."""
    if not keep_last:
        return []
    old = sorted(steps)[:-keep_last]
    return [step for step in old if not keep_every or step % keep_every]


def flush_folder(folder: str) -> None:
    """Bring a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------
# Reading
# ------------------------------------------------------------------------------------------------


class Index:
    """An open checkpoint: facts, tensors by kind and name, any part of them. A context manager.

    Its files must have been checked (`read_manifest`, `find_problem`): a part whose file is gone
    reads as NaN. Raises UserError if index.h5 cannot be opened.
    """

    def __init__(self, folder: str):
        self.folder = folder
        try:
            self.file = h5py.File(os.path.join(folder, INDEX), "r", locking=False)
        except OSError as error:
            raise UserError(f"cannot open {folder}/{INDEX}: {error}") from None
        self._held: dict[str, h5py.File] = {}
        self._seen: set[tuple[str, Box]] = set()
        self.kinds = [name for name, group in self.file.items() if len(group)]
        self.kinds.sort(key=lambda kind: (kind != "weights", kind))
        self._groups = {kind: self.file[kind] for kind in self.kinds}

    def __enter__(self) -> "Index":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        for file in (*self._held.values(), self.file):
            file.close()

    def facts(self, group: str) -> dict[str, Any]:
        """The attributes of a group, as plain Python values."""
        return {
            key: value.item() if hasattr(value, "item") else value
            for key, value in self.file[group].attrs.items()
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's global shape, by name."""
        return {name: dataset.shape for name, dataset in self._groups["weights"].items()}

    def dtype(self, kind: str) -> np.dtype:
        """The type in which a kind was saved."""
        return next(iter(self.file[kind].values())).dtype

    def read(self, kind: str, name: str, parts: Iterable[Box], out: np.ndarray) -> None:
        """Fill the flat array `out` with boxes of a tensor, one after the other, in its dtype."""
        dataset, at = self._groups[kind][name], 0
        for box in parts:
            self._hold(dataset, name, box)
            run = out[at : at + size(box)].reshape([b - a for a, b in box])
            dataset.read_direct(run, select(box))
            at += size(box)

    def _hold(self, dataset: h5py.Dataset, name: str, box: Box) -> None:
        """Keep the files open that a box comes from: HDF5 would open them anew for every read.

        They are the same for every kind.
        """
        if (name, box) in self._seen:
            return
        self._seen.add((name, box))
        for source in dataset.virtual_sources():
            lows, highs = source.vspace.get_select_bounds()
            touches = all(a <= high and low < b for (a, b), low, high in zip(box, lows, highs))
            if touches and source.file_name not in self._held:
                path = os.path.join(self.folder, source.file_name)
                self._held[source.file_name] = h5py.File(path, "r", locking=False)

    def whole(self, kind: str, name: str) -> np.ndarray:
        """A whole tensor, in the type it was saved in."""
        return self.file[kind][name][...]
