"""HDF5 files that may come from elsewhere: nothing outside of the open file is read.

    with open_regular(path) as raw, h5py.File(raw, "r") as file:
        tokens = member(file, "tokens", h5py.Dataset)
        check_stored(tokens, size_of_the_file)

HDF5 opens other files by the names that a file gives: links, external storage, virtual datasets and
plug-ins for filters. It also believes what a file says of its size. These functions look at a name
or an array before HDF5 follows it, for checkpoints and for corpora alike.
"""

import math
from typing import Any

import h5py

# The filters that are part of HDF5 or of h5py; others are libraries that would be loaded.
FILTERS = {
    h5py.h5z.FILTER_DEFLATE: "gzip",
    h5py.h5z.FILTER_SHUFFLE: "shuffle",
    h5py.h5z.FILTER_FLETCHER32: "fletcher32",
    h5py.h5z.FILTER_LZF: "lzf",
}
PACKING = (h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_LZF)
MOST_UNPACKED = 1040  # the most bytes that a byte of gzip becomes (1,032); of lzf fewer
MOST_CHUNK = 1 << 27  # bytes that are unpacked at a time


def member(group: h5py.Group, name: str, kind: type) -> Any:
    """Return the member `name` of a group, h5py.Group or h5py.Dataset.

    name: may lead through groups, as "train/tokens". Raise ValueError if a part of it is missing, a
    link to elsewhere, or of another kind.
    """
    *folders, last = name.split("/")
    for folder in filter(None, folders):
        group = member(group, folder, h5py.Group)
    link = group.get(last, getlink=True) if last in group.keys() else None  # noqa: SIM118
    if link is None:
        raise ValueError(f"there is no {name!r}")
    if not isinstance(link, h5py.HardLink):
        raise ValueError(f"{name!r} is a link")
    found = group[last]
    if not isinstance(found, kind):
        raise ValueError(f"{name!r} is not a {kind.__name__.lower()}")
    return found


def check_stored(dataset: h5py.Dataset, size: int) -> None:
    """Raise ValueError unless the file itself holds all elements of an array.

    size: bytes of the file. So an array cannot be larger than the file explains, and a chunk not
    larger than MOST_CHUNK.
    """
    name = dataset.name
    properties = dataset.id.get_create_plist()
    layout = properties.get_layout()
    if layout == h5py.h5d.VIRTUAL or properties.get_external_count():
        raise ValueError(f"{name!r} has its values in other files")
    needed = math.prod(dataset.shape) * dataset.id.get_type().get_size()
    stored = dataset.id.get_storage_size()
    if stored > size:
        raise ValueError(f"{name!r} claims {stored:,} bytes of a file of {size:,}")
    if layout != h5py.h5d.CHUNKED:
        offset = dataset.id.get_offset() or 0
        if stored < needed or offset + stored > size:
            raise ValueError(f"{name!r} claims {needed:,} bytes, and the file has {stored:,} of it")
        return
    packed = check_filters(name, properties)
    chunk = math.prod(dataset.chunks) * dataset.id.get_type().get_size()
    if chunk > MOST_CHUNK:
        raise ValueError(
            f"{name!r} is in chunks of {chunk:,} bytes, more than {MOST_CHUNK:,}: write it again "
            "with smaller ones"
        )
    expected = math.prod(-(-a // b) for a, b in zip(dataset.shape, dataset.chunks))
    found = dataset.id.get_num_chunks()
    if found != expected or needed > stored * (MOST_UNPACKED if packed else 1):
        raise ValueError(
            f"{name!r} claims {needed:,} bytes in {expected:,} chunks, and the file has "
            f"{stored:,} bytes in {found:,} of it"
        )


def check_filters(name: str, properties: h5py.h5p.PropDCID) -> bool:
    """Return whether an array is packed; ValueError for a filter that HDF5 would have to load."""
    filters = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
    unknown = [number for number in filters if number not in FILTERS]
    if unknown:
        known = ", ".join(FILTERS.values())
        raise ValueError(f"{name!r} has the filter {unknown[0]}; those that are read are {known}")
    packing = [number for number in filters if number in PACKING]
    if len(packing) > 1:
        raise ValueError(f"{name!r} is packed {len(packing)} times")
    return bool(packing)
