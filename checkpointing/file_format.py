"""The HDF5 files of a checkpoint: a shard from each rank, and an index of whole tensors.

    checkpoints/step_00001000/
        rank_00000.h5 ...   what each rank wrote: /weights, /exp_avg, ..., one flat array per kind
        index.h5            every whole tensor by name, as a virtual dataset over those files
        model_record.json   ids of special tokens, context length, window (model_record.py)
        tokenizer.json ...  the tokenizer's files, as they came, if the model has a tokenizer
        manifest.json       bytes and CRC-32 of every file, and its own SHA-256 (folders.py)

    h5py.File("step_00001000/index.h5")["weights/blocks.3.mlp.up.weight"][...]

gives the whole matrix without Trine. An element that no shard contains is NaN in h5py, and an error
in Trine (index.py). Nothing in a checkpoint depends on the layout: tensors have their global
shapes, without padding, and every element is stored once. The groups /model, /progress, /optimizer,
/data and /run of index.h5 have attributes only.

A kind of state is "weights" or the name of an optimizer state, such as "exp_avg". A box is a part
of a tensor: for each dimension (a, b), the indices [a, b). A shard holds the elements of its boxes
one after the other, so it has one flat array for each kind of state, all of the same length.

Global shapes of the tensors (d: head size, f: MLP width, h: hidden size, V: vocabulary size):

    attention.qkv.weight    (kv_heads, heads/kv_heads + 2, d, h)   per key/value head: its queries,
                                                                   then its key, then its value
    attention.q.weight      (heads, d, h)                          latent attention, or from the
    attention.q_b.weight    (heads, d, q_lora_rank)                latent of queries: per head
                                                                   the columns that no position
                                                                   turns, then those it turns
    attention.kv_a.weight   (kv_lora_rank + r, h)                  the latent, then the shared key
    attention.kv_b.weight   (heads, n + v, kv_lora_rank)           per head its key, then its value
    mlp.up.weight           (f, h), or with SwiGLU (2, f, h)       gate, then up
    embedding.tokens.weight, head.weight    (V, h)                 no head.weight if it is tied
    embedding.positions.weight              (max_positions, h)     if positions are learned
    other matrices          (out, in)
"""

import contextlib
import functools
import io
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from isal import isal_zlib  # zlib's CRC-32, several times as fast

from base import regular_files

if TYPE_CHECKING:
    import h5py

INDEX = "index.h5"
SHARD = re.compile(r"rank_[0-9]{5,}\.h5")
RECORD = "model_record.json"
# The files that tokenizers have in folders of Hugging Face. model_record.py reads the first three.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model"),
)
# The folder in which transformers writes the further chat templates of a tokenizer, and the name
# of one of them.
TEMPLATES = "additional_chat_templates"
FURTHER_TEMPLATE = re.compile(rf"{TEMPLATES}/[A-Za-z0-9_][A-Za-z0-9_.-]*\.jinja")
CHUNK = 2**20  # bytes that are checksummed and written at once: they fit into the CPU's cache
PAGE = 4096  # arrays begin at multiples of this number of bytes in their files

Shape = tuple[int, ...]
# A box is a part of a tensor: for each dimension (a, b), the indices [a, b).
Box = tuple[tuple[int, int], ...]
# A source tells where a box is stored: (shard, index of the box's first element in each of the
# shard's flat arrays, box).
Source = tuple["ShardFile", int, Box]
# The values of the attributes of index.h5, by the name of the group and then of the attribute.
Attributes = dict[str, dict[str, Any]]


# ---- Flat ranges and boxes -----------------------------------------------------------------------


def split_into_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Split the elements [start, stop) of an array in C order into boxes, and yield them in order.

    shape: the array's shape. Every box is contiguous in memory. Example: shape (5, 4), start 3,
    stop 14: column 3 of row 0, then the rows 1 and 2, then the columns 0 and 1 of row 3. A rank's
    share of a parameter is such a range, but HDF5 can map only boxes.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield ((start, stop),)
        return
    row_shape = shape[1:]  # a row: all elements with the same index in the first dimension
    row_size = math.prod(row_shape)
    first = start // row_size  # the row of the first element
    last = stop // row_size  # the row of the first element after the range
    if start % row_size:  # the range begins inside row `first`
        end_in_row = min(row_size, stop - first * row_size)
        for box in split_into_boxes(row_shape, start % row_size, end_in_row):
            yield ((first, first + 1), *box)
        first += 1
    if first < last:  # rows that are in the range as a whole
        yield ((first, last), *((0, size) for size in row_shape))
    # The rest of the range is the beginning of row `last`. There is no rest if the range ends with
    # a row (0 elements, so no box), or was inside one row (`first` is now greater than `last`).
    if last >= first:
        for box in split_into_boxes(row_shape, 0, stop - last * row_size):
            yield ((last, last + 1), *box)


def elements_in(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(b - a for a, b in box)


# ---- Writing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardFile:
    """The file that a rank wrote, and the parts of tensors that the file contains.

    file: the file's name. bytes, crc32: its size and checksum. dtypes: for each kind of state,
    numpy's name of the dtype of the flat array. tensors: (name of a tensor, its boxes in this file)
    in the order of the elements in the flat arrays, which is the same for every kind.
    """

    file: str
    bytes: int
    crc32: int
    dtypes: dict[str, str]
    tensors: list[tuple[str, list[Box]]]

    @functools.cached_property
    def elements(self) -> int:
        """The number of elements of each flat array of the file."""
        return sum(elements_in(box) for _, boxes in self.tensors for box in boxes)


def write_shard(
    path: str,
    elements: int,
    arrays: Mapping[str, tuple[str, Iterable[np.ndarray]]],
) -> tuple[int, int]:
    """Write flat arrays to an HDF5 file, flush it to the disk, and return its bytes and CRC-32.

    elements: the length of each flat array. arrays: by kind of state, the dtype and an iterable of
    numpy arrays ("runs") that one after the other make up the flat array. HDF5 only lays out the
    file. The elements are written without HDF5: so each chunk is checksummed while it is in the
    cache, no array is copied, and other threads run meanwhile. Raise OSError if a write fails.
    """
    import h5py  # here, because it takes 0.2 s and most starts neither save nor load

    # No file locks: some parallel file systems refuse them, and no other process writes here.
    create = {"locking": False, "alignment_threshold": PAGE, "alignment_interval": PAGE}
    with _hdf5_errors(path), h5py.File(path, "w", **create) as file:
        offsets = {kind: _reserve(file, kind, arrays[kind][0], elements) for kind in arrays}
    with open(path, "r+b", buffering=0) as file:
        descriptor = file.fileno()
        total = os.fstat(descriptor).st_size
        position = 0  # bytes of the file that are in the checksum already
        crc = 0
        for kind in sorted(offsets, key=offsets.__getitem__):  # in the order of the file
            # The checksum includes HDF5's own bytes between the arrays.
            crc = _crc32_of_range(descriptor, position, offsets[kind], crc)
            position = offsets[kind]
            _, runs = arrays[kind]
            for run in runs:
                position, crc = _write_run(descriptor, run, position, crc)
        crc = _crc32_of_range(descriptor, position, total, crc)
        os.fsync(descriptor)
    return total, crc


@contextlib.contextmanager
def _hdf5_errors(path: str) -> Iterator[None]:
    """Turn RuntimeError, which h5py raises if some writes fail, into OSError."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"HDF5 cannot write {path}: {error}") from error


def _reserve(file: "h5py.File", kind: str, dtype: str, elements: int) -> int:
    """Make a flat dataset without writing its elements; return its offset in the file, in bytes.

    The properties tell HDF5 to reserve one piece of the file at once, and to write no fill values.
    """
    import h5py

    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space = h5py.h5s.create_simple((elements,))
    kind_type = h5py.h5t.py_create(np.dtype(dtype), logical=True)
    return h5py.h5d.create(file.id, kind.encode(), kind_type, space, properties).get_offset()


def _write_run(descriptor: int, run: np.ndarray, position: int, crc: int) -> tuple[int, int]:
    """Write a flat array at byte `position` of a file.

    Return the position after the array, and the CRC-32 `crc` continued over its bytes.
    """
    data = run.data.cast("B")
    for start in range(0, len(data), CHUNK):
        chunk = data[start : start + CHUNK]
        crc = isal_zlib.crc32(chunk, crc)
        while chunk:  # pwrite may write only the beginning of a chunk
            written = os.pwrite(descriptor, chunk, position)
            position += written
            chunk = chunk[written:]
    return position, crc


def _crc32_of_range(descriptor: int, start: int, stop: int, crc: int) -> int:
    """Return the CRC-32 `crc` continued over the bytes [start, stop) of a file, or to its end."""
    buffer = memoryview(bytearray(min(CHUNK, stop - start)))
    while start < stop:
        count = os.preadv(descriptor, [buffer[: stop - start]], start)
        if not count:
            break
        crc = isal_zlib.crc32(buffer[:count], crc)
        start += count
    return crc


def index_image(shapes: dict[str, Shape], shards: list[ShardFile]) -> bytes:
    """Return the bytes of an index.h5 without attributes: each whole tensor as a virtual dataset.

    shapes: the global shape of each tensor, by name. shards: the files of all ranks. The result
    does not depend on the values of elements, so a run can use it for every save. Raise
    RuntimeError if the shards together do not have as many elements of a tensor as its shape.
    """
    import h5py

    sources: dict[str, list[Source]] = {name: [] for name in shapes}
    for shard in shards:
        start = 0  # index of the box's first element in each of the shard's flat arrays
        for name, boxes in shard.tensors:
            for box in boxes:
                sources[name].append((shard, start, box))
                start += elements_in(box)
    with h5py.File(INDEX, "w", driver="core", backing_store=False, libver="latest") as file:
        for name, sources_of_tensor in sources.items():
            covered = sum(elements_in(box) for _, _, box in sources_of_tensor)
            shape = shapes[name]
            if covered != math.prod(shape):
                raise RuntimeError(
                    f"the ranks wrote {covered} elements of {name}, which has {shape}"
                )
            for kind in shards[0].dtypes:
                _create_virtual_dataset(file, kind, name, shape, sources_of_tensor)
        file.flush()
        return file.id.get_file_image()


def write_index(folder: str, image: bytes, attributes: Attributes) -> tuple[int, int]:
    """Write index.h5 and flush it to the disk; return the file's bytes and CRC-32.

    image: the result of `index_image`. attributes: the attributes to add to it, which differ from
    save to save.
    """
    import h5py

    path = os.path.join(folder, INDEX)
    with open(path, "wb") as file:
        file.write(image)
    with _hdf5_errors(path), h5py.File(path, "r+", libver="latest", locking=False) as file:
        for group, values in attributes.items():
            file.require_group(group).attrs.update(values)
    flush(path)
    return checksum_file(path)


def _create_virtual_dataset(
    file: "h5py.File",
    kind: str,
    name: str,
    shape: Shape,
    sources: list[Source],
) -> None:
    """Create the dataset KIND/NAME, a whole tensor, as a virtual dataset over the shards.

    shape: the tensor's shape. sources: where its boxes are stored. The low-level calls are used
    because h5py's classes for virtual datasets take ten times as long.
    """
    import h5py

    first_shard, _, _ = sources[0]
    dtype = np.dtype(first_shard.dtypes[kind])
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_fill_value(np.array(np.nan, dtype))
    whole = h5py.h5s.create_simple(shape)
    for shard, start, box in sources:
        # Map this box of the tensor to a range of the flat array KIND in the shard.
        whole.select_hyperslab(tuple(a for a, _ in box), tuple(b - a for a, b in box))
        source = h5py.h5s.create_simple((shard.elements,))
        source.select_hyperslab((start,), (elements_in(box),))
        properties.set_virtual(whole, shard.file.encode(), kind.encode(), source)
    kind_type = h5py.h5t.py_create(dtype, logical=True)
    group = file.require_group(kind).id
    h5py.h5d.create(group, name.encode(), kind_type, h5py.h5s.create_simple(shape), properties)


def is_tokenizer_file(name: str) -> bool:
    """Return whether a tokenizer may have a file of this name, which is relative to its folder."""
    return name in TOKENIZER_FILES or bool(FURTHER_TEMPLATE.fullmatch(name))


def write_file(folder: str, name: str, contents: bytes) -> tuple[int, int]:
    """Write a file and flush it to the disk; return its bytes and CRC-32.

    name: relative to `folder`; a folder in it is made.
    """
    path = os.path.join(folder, name)
    if os.path.dirname(name):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(contents)
    flush(path)
    flush(os.path.dirname(path))
    return checksum_file(path)


def checksum_file(path: str) -> tuple[int, int]:
    """Return the bytes and CRC-32 of a file. Raise OSError if it cannot be read."""
    with open_regular(path) as file:
        return checksum(file)


def checksum(file: io.FileIO) -> tuple[int, int]:
    """Return the bytes and CRC-32 of an open file."""
    total = os.fstat(file.fileno()).st_size
    return total, _crc32_of_range(file.fileno(), 0, total, 0)


def open_regular(path: str) -> io.FileIO:
    """Open a regular file of a checkpoint to read; no link is followed.

    Raise OSError, without waiting, if the path is a link, a pipe, a device or a folder.
    """
    return regular_files.open_regular(path, follow=False)


def flush(path: str) -> None:
    """Flush a file's data, or a folder's entries, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
