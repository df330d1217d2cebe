"""Reads index.h5, and any part of a tensor from the shards that it names.

A checkpoint may come from a stranger. HDF5 opens no file by itself here: it is given open ones, and
links are not followed. The flat arrays of a shard are mapped into memory where HDF5 says that they
are, and numpy copies parts of them.
"""

import contextlib
import functools
import math
import mmap
import os
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import h5py
import numpy as np

from checkpointing.file_format import INDEX, SHARD, Box, Shape, elements_in, open_regular
from config.messages import UserError

GROUPS = ("model", "progress", "optimizer", "data", "run")  # of index.h5, with attributes only
MOST_OPEN = 128  # shards
_FLOATS = {"float32": h5py.h5t.IEEE_F32LE, "float64": h5py.h5t.IEEE_F64LE}
_PRIME = 2**61 - 1
# What h5py raises, depending on where a file is damaged.
_DAMAGE = (OSError, RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError)


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn what is found wrong in a file into UserError, in one sentence."""
    try:
        yield
    except _DAMAGE as error:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"cannot read {path}: {' '.join(text.split())[:200]}") from None


def _member(group: h5py.Group, name: str, kind: type) -> Any:
    """A group or dataset that is in a group itself; ValueError for a link to elsewhere."""
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"{name!r} is a link")
    found = group[name]
    if not isinstance(found, kind):
        raise ValueError(f"{name!r} is not a {kind.__name__.lower()}")
    return found


def _dtype_of(dataset: h5py.Dataset) -> np.dtype:
    for name, type_id in _FLOATS.items():
        if dataset.id.get_type() == type_id:
            return np.dtype(name)
    raise ValueError(f"{dataset.name!r} holds neither {' nor '.join(_FLOATS)}")


def _selected_box(space: h5py.h5s.SpaceID) -> Box:
    """The box that a selection is; ValueError if it is none."""
    box = tuple((low, high + 1) for low, high in zip(*space.get_select_bounds()))
    ordered = space.get_select_type() in (h5py.h5s.SEL_HYPERSLABS, h5py.h5s.SEL_ALL)
    if not ordered or space.get_select_npoints() != elements_in(box):
        raise ValueError("a selection is not a box")
    return box


def _is_tiled(shape: Shape, boxes: Iterable[Box]) -> bool:
    """Whether each element is in exactly one of the boxes; wrongly True once in 2^58 calls.

    In time linear in the boxes: each end of a box along a dimension gets a random number, and a box
    weighs the product of the differences of its ends. The weights of boxes that tile the shape add
    up to the weight of the whole; those of other boxes do so only by chance.
    """
    numbers: list[dict[int, int]]
    numbers = [defaultdict(lambda: secrets.randbelow(_PRIME)) for _ in shape]

    def weigh(box: Iterable[tuple[int, int]]) -> int:
        return math.prod(of[b] - of[a] for of, (a, b) in zip(numbers, box)) % _PRIME

    return sum(map(weigh, boxes)) % _PRIME == weigh((0, size) for size in shape)


def _array_in(mapped: mmap.mmap, dataset: h5py.Dataset) -> np.ndarray:
    """A flat array of a mapped file; ValueError if it is not stored there in one piece."""
    properties = dataset.id.get_create_plist()
    (elements,), at = dataset.shape, dataset.id.get_offset()
    plain = properties.get_layout() == h5py.h5d.CONTIGUOUS and not properties.get_external_count()
    if not plain or at is None:
        raise ValueError(f"{dataset.name!r} is not stored in one piece in this file")
    return np.frombuffer(mapped, _dtype_of(dataset), elements, at)  # ValueError beyond its end


class Index:
    """An open checkpoint: its attributes, and any part of its tensors. A context manager.

    Check its files first (verification.py). Raises UserError for what the format does not allow.
    kinds: "weights", then the optimizer's. shapes: every tensor's global shape, by name. dtypes: by
    kind, as they were saved.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self.path = os.path.join(folder, INDEX)
        self._known: dict[str, list[tuple[str, int, Box]]] = {}  # by tensor, its sources
        self._arrays: dict[str, dict[str, np.ndarray]] = {}  # of mapped shards, by kind
        with _reading(self.path):
            self._raw = open_regular(self.path)
            self.file = h5py.File(self._raw, "r")
            groups = {name: _member(self.file, name, h5py.Group) for name in self.file}
            if not len(groups.get("weights", ())) or not all(map(str.isidentifier, groups)):
                raise ValueError(f"its groups are {', '.join(map(ascii, groups))}")
        self._tensors = {kind: groups[kind] for kind in groups if kind not in GROUPS}
        self.kinds = sorted(self._tensors, key=lambda kind: (kind != "weights", kind))

    def __enter__(self) -> "Index":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._arrays.clear()
        self.file.close()
        self._raw.close()

    def attributes(self, group: str) -> dict[str, Any]:
        """The attributes of a group, as plain Python values: text, numbers, booleans."""
        with _reading(self.path):
            items = _member(self.file, group, h5py.Group).attrs.items()
            values = {k: v.item() if isinstance(v, np.generic) else v for k, v in items}
            wrong = [k for k, v in values.items() if type(v) not in (str, int, float, bool)]
            if wrong:
                raise ValueError(f"{group} has {wrong[0]!r} of type {type(values[wrong[0]])}")
            return values

    @functools.cached_property
    def shapes(self) -> dict[str, Shape]:
        """See the class."""
        with _reading(self.path):
            mappings = {
                name: self._mapping("weights", name)[1] for name in self._tensors["weights"]
            }
            return {n: m.get_virtual_vspace(0).shape for n, m in mappings.items()}

    @functools.cached_property
    def dtypes(self) -> dict[str, np.dtype]:
        """See the class."""
        with _reading(self.path):
            name = next(iter(self.shapes))
            datasets = {
                kind: _member(self._tensors[kind], name, h5py.Dataset) for kind in self.kinds
            }
            return {kind: _dtype_of(dataset) for kind, dataset in datasets.items()}

    def check(self, files: Mapping[str, int], rank: int = 0, size: int = 1) -> None:
        """UserError unless the shards hold each element of each tensor once. Each of several ranks
        checks a share of the shards and of the tensors. files: by name, their bytes.
        """
        with _reading(self.path):
            needed = sum(math.prod(shape) for shape in self.shapes.values())
            needed *= sum(dtype.itemsize for dtype in self.dtypes.values())
            if needed > sum(files.values()):
                raise ValueError(f"its tensors are {needed} bytes, the files {sum(files.values())}")
            if any(group.keys() != self.shapes.keys() for group in self._tensors.values()):
                raise ValueError(f"{', '.join(self.kinds)} have different tensors")
            for name in sorted(files.keys() - {INDEX})[rank::size]:
                arrays = self._arrays_in(name)
                types = {kind: array.dtype for kind, array in arrays.items()}
                if types != self.dtypes or len({len(array) for array in arrays.values()}) > 1:
                    raise ValueError(f"{name} has not one array of the same length for each kind")
            for name in list(self.shapes)[rank::size]:
                for kind in self.kinds:
                    self._check_tensor(kind, name, files)

    def _check_tensor(self, kind: str, name: str, files: Mapping[str, int]) -> None:
        if self._sources(kind, name) != self._sources_of(name):
            raise ValueError(f"{kind}/{name} is in other places than weights/{name}")
        for file, at, box in self._sources_of(name):
            if file not in files:
                raise ValueError(f"{kind}/{name} needs {file}, which the manifest does not list")
            needed = at + elements_in(box)
            there = len(self._arrays_in(file)[kind])
            if needed > there:
                raise ValueError(f"{kind}/{name} needs {needed} elements of {file}, not {there}")

    def read(self, kind: str, name: str, boxes: Iterable[Box], out: np.ndarray) -> None:
        """Fill the flat array `out` with boxes of a tensor in order, converted to its dtype."""
        with _reading(self.path):
            sources = self._sources_of(name)
            at = 0
            for box in boxes:
                run = out[at : at + elements_in(box)].reshape([b - a for a, b in box])
                for source in sources:
                    self._read_overlap(kind, *source, box, run)
                at += elements_in(box)

    def _read_overlap(
        self, kind: str, file: str, at: int, stored: Box, box: Box, out: np.ndarray
    ) -> None:
        """Fill the elements of `out`, a box of a tensor, that are in a box of a shard."""
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, stored)]
        if all(a < b for a, b in both):
            part = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, stored))
            target = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, box))
            there = self._arrays_in(file)[kind][at : at + elements_in(stored)]
            out[target] = there.reshape([b - a for a, b in stored])[part]

    def read_whole(self, kind: str, name: str) -> np.ndarray:
        """A whole tensor, in the type it was saved in."""
        shape = self.shapes[name]
        out = np.empty(math.prod(shape), self.dtypes[kind])
        self.read(kind, name, [tuple((0, size) for size in shape)], out)
        return out.reshape(shape)

    def _mapping(self, kind: str, name: str) -> tuple[h5py.Dataset, h5py.h5p.PropDCID]:
        """A virtual dataset, and the properties that say where its elements are."""
        dataset = _member(self._tensors[kind], name, h5py.Dataset)
        properties = dataset.id.get_create_plist()
        if properties.get_layout() != h5py.h5d.VIRTUAL or not properties.get_virtual_count():
            raise ValueError(f"{kind}/{name!r} is not in the shards")
        return dataset, properties

    def _sources(self, kind: str, name: str) -> list[tuple[str, int, Box]]:
        """What has the elements of a tensor, each once: shard, first element there, box."""
        (dataset, mapping), found = self._mapping(kind, name), []
        for i in range(mapping.get_virtual_count()):
            file = mapping.get_virtual_filename(i)
            array = mapping.get_virtual_dsetname(i)
            if not SHARD.fullmatch(file) or array != kind:
                raise ValueError(f"{kind}/{name} refers to {array!r} in {file!r}")
            box = _selected_box(mapping.get_virtual_vspace(i))
            ((at, stop),) = _selected_box(mapping.get_virtual_srcspace(i))
            if stop - at != elements_in(box):
                raise ValueError(f"{kind}/{name} has parts of another size than their sources")
            found.append((file, at, box))
        # For sources without limits, which are refused above, HDF5 would open files to get this.
        shape = dataset.shape
        dtype = _dtype_of(dataset)
        if shape != self.shapes[name] or dtype != self.dtypes[kind]:
            raise ValueError(f"{kind}/{name} is {shape} of {dtype}, which others are not")
        if not _is_tiled(shape, [box for _, _, box in found]):
            raise ValueError(f"{kind}/{name} has elements that are in no file, or in two places")
        return found

    def _sources_of(self, name: str) -> list[tuple[str, int, Box]]:
        """The sources of a tensor, the same for every kind."""
        if name not in self._known:
            self._known[name] = self._sources("weights", name)
        return self._known[name]

    def _arrays_in(self, shard: str) -> dict[str, np.ndarray]:
        """The flat arrays of a shard, by kind; of too many shards, the oldest is unmapped."""
        if shard not in self._arrays:
            if len(self._arrays) == MOST_OPEN:
                del self._arrays[next(iter(self._arrays))]
            path = os.path.join(self.folder, shard)
            with _reading(path), open_regular(path) as raw, h5py.File(raw, "r") as file:
                mapped = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
                datasets = {kind: _member(file, kind, h5py.Dataset) for kind in file}
                self._arrays[shard] = {k: _array_in(mapped, d) for k, d in datasets.items()}
        return self._arrays[shard]
