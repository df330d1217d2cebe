"""Reads index.h5, and any part of a tensor from the shards that index.h5 names.

    with Index(folder) as index:
        index.read_whole("weights", "head.weight")     a whole tensor
        index.read(kind, name, boxes, out)             parts of a tensor, into a flat array

    manifest = check_files(folder)                     checks that the checkpoint is undamaged

A checkpoint may come from a stranger. So HDF5 does not open files by name here: it gets open files,
and links are not followed. A shard is mapped into memory (mmap); HDF5 only gives the offsets of its
flat arrays, and numpy copies parts of them. A box is a part of a tensor: (first index, last index
+ 1) for each dimension. A kind of state is "weights" or an optimizer state such as "exp_avg". A
shard has one flat array of each kind, in which its boxes follow one another. Read file_format.py.
"""

import contextlib
import functools
import json
import math
import mmap
import os
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import h5py
import numpy as np

from architecture import tensors
from base.errors import CheckpointError
from checkpointing import folders
from checkpointing.file_format import INDEX, SHARD, Box, Shape, elements_in, open_regular
from config.command_line import make_model
from config.past import from_text, to_text
from config.schema import EMA
from corpora.hdf5_files import member
from corpora.usage import Usage

GROUPS = ("model", "progress", "optimizer", "data", "run")  # the groups without tensors
MOST_OPEN = 128  # the most shards that are mapped at the same time
_FLOATS = {"float32": h5py.h5t.IEEE_F32LE, "float64": h5py.h5t.IEEE_F64LE}
_PRIME = 2**61 - 1  # `_is_tiled` computes modulo this number
# The exceptions that h5py raises for a damaged file, depending on where the damage is.
_DAMAGE = (OSError, RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError)


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn every exception of _DAMAGE into UserError: "cannot read PATH: ...", on one line."""
    try:
        yield
    except _DAMAGE as error:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise CheckpointError(f"cannot read {path}: {' '.join(text.split())[:200]}") from None


def _dtype_of(dataset: h5py.Dataset) -> np.dtype:
    """Return a dataset's dtype, float32 or float64; raise ValueError for any other type."""
    for name, type_id in _FLOATS.items():
        if dataset.id.get_type() == type_id:
            return np.dtype(name)
    raise ValueError(f"{dataset.name!r} holds neither {' nor '.join(_FLOATS)}")


def _selected_box(space: h5py.h5s.SpaceID) -> Box:
    """Return the box that an HDF5 selection covers; raise ValueError if it is not one box."""
    box = tuple((low, high + 1) for low, high in zip(*space.get_select_bounds()))
    # Refuse a selection of single points: it may fill its bounds, but in another order than a box.
    is_in_order = space.get_select_type() in (h5py.h5s.SEL_HYPERSLABS, h5py.h5s.SEL_ALL)
    if not is_in_order or space.get_select_npoints() != elements_in(box):
        raise ValueError("a selection is not a box")
    return box


def _is_tiled(shape: Shape, boxes: Iterable[Box]) -> bool:
    """Return whether each element of `shape` is in exactly one of the boxes.

    The time is linear in the number of boxes: along each dimension, each index at which a box
    begins or ends gets a random number, and the weight of a box is the product over the dimensions
    of the difference between its two numbers. If boxes tile the shape, their weights add up to the
    weight of the whole shape, as [0, 3) and [3, 5): (n3 - n0) + (n5 - n3) = n5 - n0. If they do
    not, this happens only by chance, once in 2^58 calls.
    """
    numbers: list[dict[int, int]]  # for each dimension, the random number of each index
    numbers = [defaultdict(lambda: secrets.randbelow(_PRIME)) for _ in shape]

    def weigh(box: Iterable[tuple[int, int]]) -> int:
        differences = [number[b] - number[a] for number, (a, b) in zip(numbers, box)]
        return math.prod(differences) % _PRIME

    return sum(map(weigh, boxes)) % _PRIME == weigh((0, size) for size in shape)


def _array_in(mapped: mmap.mmap, dataset: h5py.Dataset) -> np.ndarray:
    """Return a flat dataset as an array that shares the memory of the mapped file.

    Raise ValueError if the dataset is not stored in this file in one piece.
    """
    properties = dataset.id.get_create_plist()
    (elements,) = dataset.shape
    offset = dataset.id.get_offset()  # its first byte in the file; None: it has no place there
    is_contiguous = properties.get_layout() == h5py.h5d.CONTIGUOUS
    if not is_contiguous or properties.get_external_count() or offset is None:
        raise ValueError(f"{dataset.name!r} is not stored in one piece in this file")
    # numpy raises ValueError for an array that goes beyond the end of the file.
    return np.frombuffer(mapped, _dtype_of(dataset), elements, offset)


class Index:
    """An open checkpoint, for reading its attributes and any part of its tensors.

    A context manager. Its files should be checked first (`check_files`). Every method raises
    UserError if the files are not as the format says. kinds: the kinds of state, "weights" first.
    """

    def __init__(self, folder: str):
        """Open index.h5; the groups in it that have tensors are named after the kinds of state."""
        self.folder = folder
        self.path = os.path.join(folder, INDEX)
        # Results of `_sources_of` by tensor, and the arrays of mapped shards by shard, then kind.
        self._known_sources: dict[str, list[tuple[str, int, Box]]] = {}
        self._arrays: dict[str, dict[str, np.ndarray]] = {}
        with _reading(self.path):
            self._raw = open_regular(self.path)  # HDF5 itself would follow a link
            self.file = h5py.File(self._raw, "r")
            groups = {name: member(self.file, name, h5py.Group) for name in self.file}
            if not len(groups.get("weights", ())) or not all(map(str.isidentifier, groups)):
                raise ValueError(f"its groups are {', '.join(map(ascii, groups))}")
        self._tensors = {kind: groups[kind] for kind in groups if kind not in GROUPS}
        self.kinds = sorted(self._tensors, key=lambda kind: (kind != "weights", kind))

    def __enter__(self) -> "Index":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """Forget the mapped shards, and close index.h5."""
        self._arrays.clear()
        self.file.close()
        self._raw.close()

    def attributes(self, group: str) -> dict[str, Any]:
        """Return the attributes of a group as plain Python values: text, numbers, booleans."""
        with _reading(self.path):
            items = member(self.file, group, h5py.Group).attrs.items()
            values = {}
            for name, value in items:
                plain = value.item() if isinstance(value, np.generic) else value
                if type(plain) not in (str, int, float, bool):
                    raise ValueError(f"{group} has {name!r} of type {type(plain)}")
                values[name] = plain
            return values

    @functools.cached_property
    def shapes(self) -> dict[str, Shape]:
        """The global shape of each tensor, by name."""
        with _reading(self.path):
            shapes = {}
            for name in self._tensors["weights"]:
                _, mapping = self._mapping("weights", name)
                shapes[name] = mapping.get_virtual_vspace(0).shape  # read without opening shards
            return shapes

    @functools.cached_property
    def dtypes(self) -> dict[str, np.dtype]:
        """The dtype of each kind of state in the files."""
        with _reading(self.path):
            name = next(iter(self.shapes))
            dtypes = {}
            for kind in self.kinds:
                dtypes[kind] = _dtype_of(member(self._tensors[kind], name, h5py.Dataset))
            return dtypes

    def check(self, files: Mapping[str, int], rank: int = 0, size: int = 1) -> None:
        """Raise UserError unless the shards hold each element of each tensor exactly once.

        files: the bytes of each file that the manifest lists, by name. rank, size: `size` ranks
        call this together; rank number `rank` checks a part of the shards and of the tensors.
        """
        with _reading(self.path):
            needed = sum(math.prod(shape) for shape in self.shapes.values())
            needed *= sum(dtype.itemsize for dtype in self.dtypes.values())
            if needed > sum(files.values()):  # refuse a forged shape before memory is taken for it
                raise ValueError(f"its tensors are {needed} bytes, the files {sum(files.values())}")
            if any(group.keys() != self.shapes.keys() for group in self._tensors.values()):
                raise ValueError(f"{', '.join(self.kinds)} have different tensors")
            shards = sorted(filter(SHARD.fullmatch, files))
            for name in shards[rank::size]:  # each rank checks every `size`-th shard
                arrays = self._arrays_in(name)
                types = {kind: array.dtype for kind, array in arrays.items()}
                lengths = {len(array) for array in arrays.values()}
                if types != self.dtypes or len(lengths) > 1:
                    raise ValueError(f"{name} has not one array of the same length for each kind")
            for name in list(self.shapes)[rank::size]:
                for kind in self.kinds:
                    self._check_tensor(kind, name, files)

    def _check_tensor(self, kind: str, name: str, files: Mapping[str, int]) -> None:
        """Raise ValueError unless a tensor's `kind` is in the places of its weights, in `files`."""
        if self._sources(kind, name) != self._sources_of(name):
            raise ValueError(f"{kind}/{name} is in other places than weights/{name}")
        for file, start, box in self._sources_of(name):
            if file not in files:
                raise ValueError(f"{kind}/{name} needs {file}, which the manifest does not list")
            needed = start + elements_in(box)
            length = len(self._arrays_in(file)[kind])
            if needed > length:
                raise ValueError(f"{kind}/{name} needs {needed} elements of {file}, not {length}")

    def read(self, kind: str, name: str, boxes: Iterable[Box], out: np.ndarray) -> None:
        """Fill the flat array `out`, in its dtype, with boxes of the tensor `name`, in order."""
        with _reading(self.path):
            sources = self._sources_of(name)
            first = 0
            for box in boxes:
                stop = first + elements_in(box)
                part = out[first:stop].reshape([b - a for a, b in box])  # a view of `out`
                for file, start, stored in sources:
                    self._read_overlap(kind, file, start, stored, box, part)  # if boxes overlap
                first = stop

    def _read_overlap(
        self, kind: str, file: str, start: int, stored: Box, box: Box, out: np.ndarray
    ) -> None:
        """Copy the elements that two boxes of a tensor share, from a shard to `out`.

        start, stored: element `start` of the flat array in the shard `file` is the first element of
        the box `stored`. box: the box that `out` is for; `out` has its shape.
        """
        shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, stored)]
        if all(a < b for a, b in shared):  # the boxes overlap in every dimension
            # Slices of the elements that both boxes have, as indices inside `stored` and `box`.
            source = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shared, stored))
            target = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shared, box))
            flat = self._arrays_in(file)[kind][start : start + elements_in(stored)]
            out[target] = flat.reshape([b - a for a, b in stored])[source]

    def weights_kind(self, averaged: bool) -> str:
        """Return the kind of the weights, or of their average; UserError if there is none."""
        if not averaged:
            return "weights"
        if EMA not in self.kinds:
            raise CheckpointError(f"{self.folder} has no average of weights: its run had no --ema")
        return EMA

    def read_whole(self, kind: str, name: str) -> np.ndarray:
        """Return a whole tensor in the dtype in which it was saved."""
        shape = self.shapes[name]
        out = np.empty(math.prod(shape), self.dtypes[kind])
        self.read(kind, name, [tuple((0, size) for size in shape)], out)
        return out.reshape(shape)

    def _mapping(self, kind: str, name: str) -> tuple[h5py.Dataset, h5py.h5p.PropDCID]:
        """Return a tensor's virtual dataset, and the properties that map its boxes to shards."""
        dataset = member(self._tensors[kind], name, h5py.Dataset)
        properties = dataset.id.get_create_plist()
        if properties.get_layout() != h5py.h5d.VIRTUAL or not properties.get_virtual_count():
            raise ValueError(f"{kind}/{name!r} is not in the shards")
        return dataset, properties

    def _sources(self, kind: str, name: str) -> list[tuple[str, int, Box]]:
        """Return where a tensor is stored: (shard, first index in its flat array, box) per box.

        Raise ValueError unless the boxes contain each element exactly once.
        """
        dataset, mapping = self._mapping(kind, name)
        sources = []
        for i in range(mapping.get_virtual_count()):
            file = mapping.get_virtual_filename(i)
            array = mapping.get_virtual_dsetname(i)
            if not SHARD.fullmatch(file) or array != kind:
                raise ValueError(f"{kind}/{name} refers to {array!r} in {file!r}")
            box = _selected_box(mapping.get_virtual_vspace(i))
            ((start, stop),) = _selected_box(mapping.get_virtual_srcspace(i))
            if stop - start != elements_in(box):
                raise ValueError(f"{kind}/{name} has parts of another size than their sources")
            sources.append((file, start, box))
        # Only after the loop has refused unlimited boxes: HDF5 opens shards to find their shape.
        shape = dataset.shape
        dtype = _dtype_of(dataset)
        if shape != self.shapes[name] or dtype != self.dtypes[kind]:
            raise ValueError(f"{kind}/{name} is {shape} of {dtype}, which others are not")
        if not _is_tiled(shape, [box for _, _, box in sources]):
            raise ValueError(f"{kind}/{name} has elements that are in no file, or in two places")
        return sources

    def _sources_of(self, name: str) -> list[tuple[str, int, Box]]:
        """Return the result of `_sources`, where each box is stored: the same for every kind."""
        if name not in self._known_sources:
            self._known_sources[name] = self._sources("weights", name)
        return self._known_sources[name]

    def _arrays_in(self, shard: str) -> dict[str, np.ndarray]:
        """Return the flat arrays of a shard by kind, and map the shard if it is not mapped yet.

        If MOST_OPEN shards are mapped, the shard that was mapped first is dropped.
        """
        if shard not in self._arrays:
            if len(self._arrays) == MOST_OPEN:
                del self._arrays[next(iter(self._arrays))]
            path = os.path.join(self.folder, shard)
            with _reading(path), open_regular(path) as raw, h5py.File(raw, "r") as file:
                mapped = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
                datasets = {kind: member(file, kind, h5py.Dataset) for kind in file}
                self._arrays[shard] = {k: _array_in(mapped, d) for k, d in datasets.items()}
        return self._arrays[shard]


# The attributes of the progress and the optimizer that must be whole numbers from 0 on.
COUNTS = ("iteration", "consumed_samples", "skipped_samples", "step")


def check_files(folder: str, contents: bool = True, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """Check a checkpoint and return its manifest.

    Raise UserError for anything that `--resume` or an export could not use. Tensors that the
    options do not describe are allowed: code that was changed has made them, and whoever loads or
    exports them compares. contents: whether to compare the files' checksums, or only their sizes.
    rank, size: `size` ranks call this together; rank number `rank` checks index.h5 and a part of
    the other files.
    """
    manifest = folders.read_manifest(folder)
    files = manifest["files"]
    checked_here = list(files)[rank::size]
    for name in dict.fromkeys([INDEX, *checked_here]):
        problem = folders.find_problem(folder, name, files[name], contents)
        if problem:
            raise CheckpointError(problem)
    with Index(folder) as index:
        index.check({name: entry["bytes"] for name, entry in files.items()}, rank, size)
        model = make_model(index.attributes("model"), index.path)
        tensors.check_count(index.shapes, model, index.path)
        _check_attributes(index, manifest["step"])
    return manifest


def _check_attributes(index: Index, step: int) -> None:
    """Raise UserError unless the attributes of index.h5 have the types and values that a resume
    uses: counts >= 0, finite scalars of the optimizer, text that can be read, and this step.
    """
    progress, optimizer, data, run = map(index.attributes, ("progress", "optimizer", "data", "run"))
    text = {"kind": optimizer.pop("kind", None), "fingerprint": data.get("fingerprint")}
    text["config"] = run.get("config")
    counts = {"iteration": None} | progress  # must be whole numbers: None, if missing, is refused
    if len(index.kinds) > 1:  # the checkpoint has an optimizer's state
        counts["step"] = optimizer.get("step")
    wrong = [(k, v) for k, v in text.items() if not isinstance(v, str) or not v.isprintable()]
    wrong += [(k, v) for k, v in counts.items() if type(v) is not int or k not in COUNTS]
    # Only fp16's hysteresis, the overflows until the loss scale falls, may count below 0.
    smallest = {"hysteresis": -(2**63)}
    for name, value in (progress | optimizer).items():
        if isinstance(value, str) or not smallest.get(name, 0) <= value < math.inf:
            wrong.append((name, value))
    try:
        dict(json.loads(str(text["config"])).get("training", {}))  # as Loader reads the options
    except (ValueError, TypeError, AttributeError, RecursionError):
        wrong.append(("config", text["config"]))
    try:
        Usage.from_text(str(data.get("usage", Usage().text())))  # the tokens that were trained on
    except ValueError:
        wrong.append(("usage", data["usage"]))
    total = data.get("total_samples", 0)
    if type(total) is not int or total < 0:
        wrong.append(("total_samples", total))
    try:
        from_text(str(data.get("past", to_text((), ()))), 0, 0)
    except ValueError:
        wrong.append(("past", data["past"]))
    if wrong:
        name, value = wrong[0]
        raise CheckpointError(
            f"{index.path} is damaged: {name!a} is {value!a:.80}, which no run saves"
        )
    if progress["iteration"] != step:
        raise CheckpointError(
            f"{index.path} is of step {progress['iteration']}, its manifest of {step}"
        )
