"""Makes checkpoints that are hostile or damaged, each in one way, with checksums that fit.

    cases = make_cases(folder, intact, seed)     {"name of the case": its checkpoint, ...}

Many refer to an intact checkpoint outside of them, folder/secret.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from hostile_files import NAME, SHARDS, TENSOR, Case, contents, damages, in_hdf5, manifests, places

# ---- index.h5: what a tensor is ------------------------------------------------------------------

MANY = h5py.h5s.UNLIMITED


def selection(shape: tuple, *slab: tuple, most: tuple | None = None) -> h5py.h5s.SpaceID:
    """A hyperslab of a space: its start, count, stride and block."""
    space = h5py.h5s.create_simple(shape, most)
    space.select_hyperslab(*slab)
    return space


def make_virtual(
    file: h5py.File,
    path: str,
    sources: list[tuple],
    shape: tuple = (16, 64),
    most: tuple | None = None,
    dtype: Any = "<f4",
) -> None:
    """Replace a dataset by a virtual one; a source: where in it, of which file, array and part."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    for whole, name, array, part in sources:
        properties.set_virtual(whole, name.encode(), array.encode(), part)
    del file[path]
    kind = h5py.h5t.py_create(np.dtype(dtype), logical=True)
    space = h5py.h5s.create_simple(shape, most)
    h5py.h5d.create(file.id, path.encode(), kind, space, properties)


def columns_of(
    file: h5py.File,
    path: str = f"weights/{TENSOR}",
    names: tuple = (SHARDS[0], SHARDS[1]),
    array: str = "weights",
    shape: tuple = (16, 64),
    first: int = 0,
    length: int | None = None,
    columns: tuple = (32, 32),
    step: int = 1,
) -> list[tuple]:
    """The sources of a tensor, columns of it in each file, as `make_virtual` takes them."""
    starts = [s.src_space.get_select_bounds()[0][0] for s in file[path].virtual_sources()]
    found, at = [], 0
    for name, start, width in zip(names, starts, columns):
        count = 16 * width
        whole = selection(shape, (0, at), (16, width))
        size = length or start + first + step * count
        part = selection((size,), (start + first,), (count,), (step,))
        found.append((whole, name, array, part))
        at += width
    return found


def virtual_case(
    path: str = f"weights/{TENSOR}", shape: tuple = (16, 64), dtype: Any = "<f4", **changes: Any
) -> Case:
    """A tensor that is like an intact one, except for these changes."""

    def change(file: h5py.File, secret: Path) -> None:
        sources = columns_of(file, path, shape=shape, **changes)
        make_virtual(file, path, sources, shape, dtype=dtype)

    return in_hdf5("index.h5", change)


def virtual_elsewhere(target: str) -> Case:
    """All from another file, which has the same content as the first shard."""

    def change(file: h5py.File, secret: Path) -> None:
        names = (target.format(secret=secret), SHARDS[1])
        make_virtual(file, f"weights/{TENSOR}", columns_of(file, names=names))

    return in_hdf5("index.h5", change)


def any_rows() -> h5py.h5s.SpaceID:
    return selection((16, 64), (0, 0), (MANY, 1), (1, 1), (1, 64), most=(MANY, 64))


def unlimited(name: str, part: h5py.h5s.SpaceID) -> Case:
    """A tensor of any number of rows. HDF5 opens a source to learn the shape of such a dataset."""

    def change(file: h5py.File, secret: Path) -> None:
        sources = [(any_rows(), f"{secret}/{name}", "weights", part)]
        make_virtual(file, f"weights/{TENSOR}", sources, most=(MANY, 64))

    return in_hdf5("index.h5", change)


def overlapping(file: h5py.File, secret: Path) -> None:
    """Have the shards hold the tensor's number of elements, but some elements twice."""
    again = (selection((16, 64), (0, 24), (16, 16)), SHARDS[0], "weights")
    sources = columns_of(file, columns=(32, 16))
    sources.append((*again, selection((256,), (0,), (256,))))
    make_virtual(file, f"weights/{TENSOR}", sources)


def instead(path: str, make: Callable[[h5py.File, str, Path], Any]) -> Callable:
    """Something else in place of a member of an HDF5 file."""

    def change(file: h5py.File, secret: Path) -> None:
        del file[path]
        make(file, path, secret)

    return change


def external_storage(shape: tuple, target: str, offset: int) -> Callable:
    """A dataset whose elements HDF5 reads from any other file."""

    def make(file: h5py.File, path: str, secret: Path) -> None:
        name, count = target.format(secret=secret), int(np.prod(shape)) * 4
        file.create_dataset(path, shape, "<f4", external=[(name, offset, count)])

    return make


def stored(shape: tuple, dtype: Any = "<f4", **options: Any) -> Callable:
    """A plain dataset of zeros, or of nothing where the type has none."""
    return lambda file, path, secret: file.create_dataset(path, shape, dtype, **options)


def soft_link(to: str) -> Callable:
    return lambda file, path, secret: file.__setitem__(path, h5py.SoftLink(to))


def external_link(to: str, path: str | None = None) -> Callable:
    return lambda file, name, secret: file.__setitem__(
        name, h5py.ExternalLink(to.format(secret=secret), path or name)
    )


def a_group(file: h5py.File, path: str, secret: Path) -> None:
    file.create_group(path)


def a_type(file: h5py.File, path: str, secret: Path) -> None:
    file[path] = np.dtype("<f4")


COMPOUND = np.dtype([("a", "<f4"), ("b", "<i4")])
OTHER_TYPES = {
    "f8": "<f8",
    "f2": "<f2",
    "big-endian": ">f4",
    "i4": "<i4",
    "u1": "u1",
    "bool": "?",
    "complex": "<c8",
    "compound": COMPOUND,
    "text": "S4",
    "variable text": h5py.string_dtype(),
    "variable lengths": h5py.vlen_dtype(np.dtype("<f4")),
    "references": h5py.ref_dtype,
    "enumeration": h5py.enum_dtype({"a": 1}),
    "an array": np.dtype(("<f4", (2,))),
    "opaque": "V4",
}
LINKS = {
    "soft link": soft_link("/weights/head.norm.weight"),
    "link to nothing": soft_link("/nowhere"),
    "link to itself": lambda file, path, secret: soft_link("/" + path)(file, path, secret),
    "external link": external_link("{secret}/index.h5"),
    "relative external link": external_link("../../secret/index.h5"),
    "external link to a shard": external_link(SHARDS[0], "weights"),
    "group": a_group,
    "type": a_type,
}
OTHER_FILES = (  # in place of a shard
    "{secret}/rank_00000.h5",
    "../../secret/rank_00000.h5",
    "../secret/rank_00000.h5",
    "./rank_00000.h5",
    "/dev/zero",
    ".",
    "",
    "rank_00099.h5",
    "rank_0.h5",
    "index.h5",
    "rank_00002.h5\n",
)


def tensors() -> dict[str, Case]:
    path = f"weights/{TENSOR}"
    made = LINKS | {
        "nothing": lambda file, path, secret: None,
        "external storage": external_storage((16, 64), "{secret}/rank_00000.h5", 4096),
        "relative external storage": external_storage((16, 64), "../../secret/rank_00000.h5", 0),
        "endless external storage": external_storage((16, 64), "/dev/zero", 0),
        "plain dataset": stored((16, 64)),
        "chunked dataset": stored((16, 64), chunks=(4, 4)),
        "compressed dataset": stored((16, 64), compression="gzip"),
        "scalar": stored(()),
        "null": lambda file, path, secret: file.__setitem__(path, h5py.Empty("f4")),
        "huge dataset": stored((2**40, 2**20), chunks=(1, 1)),
    }
    cases = {
        f"tensor: {name}": in_hdf5("index.h5", instead(path, make)) for name, make in made.items()
    }
    for name, dtype in OTHER_TYPES.items():
        cases[f"tensor: plain {name}"] = in_hdf5("index.h5", instead(path, stored((16, 64), dtype)))
    for kind in ("exp_avg", "exp_avg_sq"):
        cases[f"{kind}: one is missing"] = in_hdf5(
            "index.h5", instead(f"{kind}/{TENSOR}", lambda file, path, secret: None)
        )
    return cases | {
        "tensor: surplus": in_hdf5(
            "index.h5", lambda file, secret: file.copy(path, "weights/blocks.7.mlp.down.weight")
        ),
        "tensor: renamed in one kind": in_hdf5(
            "index.h5", lambda file, secret: file.move(path, "weights/a\nb")
        ),
    }


def virtual_tensors() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name in ("f8", "f2", "big-endian", "i4", "u1"):
        cases[f"tensor: virtual {name}"] = virtual_case(dtype=OTHER_TYPES[name])
    for target in OTHER_FILES:
        cases[f"tensor: virtual source {target!r}"] = virtual_elsewhere(target or " ")
    cases |= {
        "tensor: unlimited source": unlimited("rank_00000.h5", any_rows()),
        # with a number in its name, by which HDF5 looks for the sources one by one
        "tensor: numbered sources": unlimited("rank_0000%b.h5", h5py.h5s.create_simple((64,))),
        "tensor: a half in no file": virtual_case(names=(SHARDS[0],)),
        "tensor: some columns in no file": virtual_case(columns=(32, 31)),
        "tensor: another array": virtual_case(array="exp_avg"),
        "tensor: no such array": virtual_case(array="nothing"),
        "tensor: beyond the shard": virtual_case(first=10**4),
        "tensor: far beyond the shard": virtual_case(first=2**60),
        "tensor: every second element": virtual_case(step=2),
        "tensor: other shape": virtual_case(shape=(16, 65)),
        "tensor: huge shape": virtual_case(shape=(2**40, 64)),
    }
    for kind in ("exp_avg", "exp_avg_sq"):
        cases[f"{kind}: from the weights"] = virtual_case(path=f"{kind}/{TENSOR}")
        cases[f"{kind}: other shape"] = virtual_case(
            path=f"{kind}/{TENSOR}", array=kind, shape=(17, 64)
        )
    return cases


def all_of(change: Callable[[h5py.Group], Any]) -> Case:
    """The same change in every kind."""

    def in_each(file: h5py.File, secret: Path) -> None:
        for kind in ("weights", "exp_avg", "exp_avg_sq"):
            change(file[kind])

    return in_hdf5("index.h5", in_each)


def groups() -> dict[str, Case]:
    cases: dict[str, Case] = {"tensor: overlap": in_hdf5("index.h5", overlapping)}
    for group in ("weights", "exp_avg", "model", "optimizer"):
        made = LINKS | {"nothing": lambda file, path, secret: None, "dataset": stored((3,))}
        for name, make in made.items():
            if group == "exp_avg" and name == "nothing":
                continue  # below: the shards have it
            cases[f"{group}: {name}"] = in_hdf5("index.h5", instead(group, make))
    cases |= {
        "exp_avg is missing": in_hdf5("index.h5", lambda file, secret: file.pop("exp_avg")),
        "weights is exp_avg": in_hdf5("index.h5", instead("weights", hard_link("exp_avg"))),
        "weights is the root": in_hdf5("index.h5", instead("weights", hard_link("/"))),
        "a kind too many": in_hdf5("index.h5", lambda file, secret: file.copy("exp_avg", "more")),
        "an odd kind": in_hdf5("index.h5", lambda file, secret: file.copy("exp_avg", "a\nb")),
        "a tensor too few": all_of(lambda group: group.pop(TENSOR)),
        "a tensor too many": all_of(lambda group: group.copy(TENSOR, "blocks.9.mlp.up.weight")),
        "two tensors exchanged": all_of(exchange),
    }
    return cases


def hard_link(to: str) -> Callable:
    return lambda file, path, secret: file.__setitem__(path, file[to])


def exchange(group: h5py.Group) -> None:
    group.move("blocks.0.mlp.up.weight", "x")
    group.move(TENSOR, "blocks.0.mlp.up.weight")
    group.move("x", TENSOR)


# ---- Shards --------------------------------------------------------------------------------------


def shards() -> dict[str, Case]:
    cases: dict[str, Case] = {}

    def like(file: h5py.File, path: str, secret: Path) -> int:
        return file["exp_avg_sq"].size

    def external(target: str) -> Callable:
        return lambda file, path, secret: external_storage(
            (like(file, path, secret),), target, 4096
        )(file, path, secret)

    def array(**options: Any) -> Callable:
        shape = options.pop("shape", None)
        dtype = options.pop("dtype", "<f4")
        return lambda file, path, secret: file.create_dataset(
            path, shape or (like(file, path, secret),), dtype, **options
        )

    def from_secret(file: h5py.File, path: str, secret: Path) -> None:
        size = like(file, path, secret)
        layout = h5py.VirtualLayout((size,), "<f4")
        layout[:] = h5py.VirtualSource(f"{secret}/rank_00000.h5", "weights", (size,))
        file.create_virtual_dataset(path, layout)

    made = LINKS | {
        "external storage": external("{secret}/rank_00000.h5"),
        "relative external storage": external("../../secret/rank_00000.h5"),
        "endless external storage": external("/dev/zero"),
        "virtual": from_secret,
        "chunked": array(chunks=(16,)),
        "compressed": array(compression="gzip"),
        "not allocated": array(),
        "f8": array(dtype="<f8", data=None),
        "big-endian": array(dtype=">f4"),
        "shorter": array(shape=(100,)),
        "two dimensions": array(shape=(4, 10)),
        "scalar": lambda file, path, secret: file.create_dataset(path, data=np.float32(1)),
        "nothing": lambda file, path, secret: None,
    }
    for number, (name, make) in enumerate(made.items()):
        for shard in (SHARDS[0], SHARDS[2 + number % 2]):
            cases[f"{shard}: {name}"] = in_hdf5(shard, instead("weights", make))
    cases["a kind too many in a shard"] = in_hdf5(
        SHARDS[0], lambda file, secret: file.copy("weights", "more")
    )
    return cases


# ---- Attributes ----------------------------------------------------------------------------------

NAN, INFINITY = float("nan"), float("inf")
WRONG_ATTRIBUTES: dict[str, tuple] = {
    "model/layers": (0, -1, "2", 2.5, NAN, 3, 2**62, 10**12),
    "model/hidden": (0, -16, "16", 15, 2**62, None),
    "model/heads": (0, -4, 3, "4", np.arange(3), None),
    "model/kv_heads": (0, 3, -1, b"\xff"),
    "model/ffn_hidden": (0, 65, 2**61),
    "model/vocab_size": (0, 62, 2**62),
    "model/max_positions": (0, 8, 17),
    "model/positions": ("nowhere", 1, "learned\n"),
    "model/norm": ("rmsnorm", "x", True),
    "model/activation": ("swiglu", 7),
    "model/bias": (False, "yes"),
    "model/tied": (False, "no"),
    "model/norm_eps": ("small",),
    "model/surprise": (1,),
    "progress/iteration": (-4, 5, 4.0, "4", NAN, None, np.array([4]), 2**62),
    "progress/consumed_samples": (-1, 16.5, "16", NAN, INFINITY, np.zeros((2, 2))),
    "progress/skipped_samples": (-1, "0", h5py.Empty("f4")),
    "progress/more": (1,),
    "optimizer/kind": (None, 1, "ada\nmw", np.array([b"adamw"])),
    "optimizer/step": (None, -1, NAN, "4", 1.5, np.arange(2)),
    "optimizer/loss_scale": (NAN, -1.0, INFINITY, "1"),
    "optimizer/hysteresis": (NAN, np.zeros(2, COMPOUND)[0]),
    "data/usage": (5, "", "{}", '{"tokens": -1, "corpora": {}}', "[" * 9999),
    "data/fingerprint": (None, 5, "a\nb", np.bytes_(b"\xff\xfe")),
    "run/config": (
        None,
        5,
        "",
        "{",
        "[]",
        "null",
        '{"training": 3}',
        '{"training": "ab"}',
        "[" * 10**5,
    ),
}


def attributes() -> dict[str, Case]:
    cases = {}

    def setting(path: str, value: Any) -> Callable:
        group, _, name = path.partition("/")

        def change(file: h5py.File, secret: Path) -> None:
            held = file[group].attrs
            held.pop(name, None)
            if value is not None:
                held[name] = value

        return change

    for path, values in WRONG_ATTRIBUTES.items():
        for number, value in enumerate(values):
            name = f"{path} = {str(value)[:20]!r} ({type(value).__name__} {number})"
            cases[name] = in_hdf5("index.h5", setting(path, value))
    return cases


# ---- All -----------------------------------------------------------------------------------------


def make_cases(folder: Path, intact: Path, seed: int) -> dict[str, Path]:
    """A checkpoint for every case, and folder/secret, to which many of them refer."""
    makers = places() | manifests() | contents() | damages(40, seed)
    makers |= tensors() | virtual_tensors() | groups() | shards() | attributes()
    shutil.copytree(intact, folder / "secret")
    found = {}
    for number, (name, change) in enumerate(makers.items()):
        found[name] = folder / f"{number:03d}" / NAME
        shutil.copytree(intact, found[name])
        change(found[name], folder / "secret")
    return found
