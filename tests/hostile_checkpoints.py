"""Makes checkpoints that are hostile or damaged, each in one way, with checksums that fit.

    cases = make_cases(folder, intact, seed)     {"name of the case": its checkpoint, ...}

Many refer to an intact checkpoint outside of them, folder/secret.
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
import numpy as np

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


# ---- index.h5: what a tensor is ------------------------------------------------------------------


def virtual(
    file: h5py.File,
    path: str = f"weights/{TENSOR}",
    sources: tuple = (SHARDS[0], SHARDS[1]),
    source: str = "weights",
    shape: tuple = (16, 64),
    dtype: Any = "<f4",
    first: int = 0,
    length: int | None = None,
    columns: tuple = (32, 32),
    step: int = 1,
) -> None:
    """Replace a tensor by a virtual dataset: columns of it in each of the sources."""
    old = file[path]
    properties = old.id.get_create_plist()
    starts = [s.src_space.get_select_bounds()[0][0] for s in old.virtual_sources()]
    del file[path]
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    whole, at = h5py.h5s.create_simple(shape), 0
    for name, start, width in zip(sources, starts, columns):
        count = 16 * width
        whole.select_hyperslab((0, at), (16, width))
        space = h5py.h5s.create_simple((length or start + first + step * count,))
        space.select_hyperslab((start + first,), (count,), (step,))
        properties.set_virtual(whole, name.encode(), source.encode(), space)
        at += width
    kind = h5py.h5t.py_create(np.dtype(dtype), logical=True)
    space = h5py.h5s.create_simple(shape)
    h5py.h5d.create(file.id, path.encode(), kind, space, properties)


def virtual_case(**changes: Any) -> Case:
    return in_hdf5("index.h5", lambda file, secret: virtual(file, **changes))


def virtual_elsewhere(target: str) -> Case:
    """All from another file, which has the same content as the first shard."""

    def change(file: h5py.File, secret: Path) -> None:
        name = target.format(secret=secret)
        virtual(file, sources=(name, SHARDS[1]))

    return in_hdf5("index.h5", change)


def unlimited(file: h5py.File, secret: Path) -> None:
    """HDF5 opens the source to learn the shape of such a dataset."""
    path = f"weights/{TENSOR}"
    del file[path]
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    many = h5py.h5s.UNLIMITED
    whole = h5py.h5s.create_simple((16, 64), (many, 64))
    whole.select_hyperslab((0, 0), (many, 1), (1, 1), (1, 64))
    source = h5py.h5s.create_simple((16, 64), (many, 64))
    source.select_hyperslab((0, 0), (many, 1), (1, 1), (1, 64))
    properties.set_virtual(whole, f"{secret}/rank_00000.h5".encode(), b"weights", source)
    space = h5py.h5s.create_simple((16, 64), (many, 64))
    h5py.h5d.create(file.id, path.encode(), h5py.h5t.IEEE_F32LE, space, properties)


def numbered(file: h5py.File, secret: Path) -> None:
    """Sources with numbers in their names: HDF5 looks for them one by one."""
    path = f"weights/{TENSOR}"
    del file[path]
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    many = h5py.h5s.UNLIMITED
    whole = h5py.h5s.create_simple((16, 64), (many, 64))
    whole.select_hyperslab((0, 0), (many, 1), (1, 1), (1, 64))
    properties.set_virtual(
        whole, f"{secret}/rank_0000%b.h5".encode(), b"weights", h5py.h5s.create_simple((64,))
    )
    space = h5py.h5s.create_simple((16, 64), (many, 64))
    h5py.h5d.create(file.id, path.encode(), h5py.h5t.IEEE_F32LE, space, properties)


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
    for name in ("f8", "f2", "big-endian", "i4", "u1"):
        cases[f"tensor: virtual {name}"] = virtual_case(dtype=OTHER_TYPES[name])
    for target in (
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
    ):
        cases[f"tensor: virtual source {target!r}"] = virtual_elsewhere(target or " ")
    cases |= {
        "tensor: unlimited source": in_hdf5("index.h5", unlimited),
        "tensor: numbered sources": in_hdf5("index.h5", numbered),
        "tensor: a half in no file": virtual_case(sources=(SHARDS[0],)),
        "tensor: some columns in no file": virtual_case(columns=(32, 31)),
        "tensor: another array": virtual_case(source="exp_avg"),
        "tensor: no such array": virtual_case(source="nothing"),
        "tensor: beyond the shard": virtual_case(first=10**4),
        "tensor: far beyond the shard": virtual_case(first=2**60),
        "tensor: every second element": virtual_case(step=2),
        "tensor: other shape": virtual_case(shape=(16, 65)),
        "tensor: huge shape": virtual_case(shape=(2**40, 64)),
        "tensor: surplus": in_hdf5(
            "index.h5", lambda file, secret: file.copy(path, "weights/blocks.7.mlp.down.weight")
        ),
        "tensor: renamed in one kind": in_hdf5(
            "index.h5", lambda file, secret: file.move(path, "weights/a\nb")
        ),
    }
    for kind in ("exp_avg", "exp_avg_sq"):
        cases[f"{kind}: one is missing"] = in_hdf5(
            "index.h5", instead(f"{kind}/{TENSOR}", lambda file, path, secret: None)
        )
        cases[f"{kind}: from the weights"] = virtual_case(path=f"{kind}/{TENSOR}")
        cases[f"{kind}: other shape"] = virtual_case(
            path=f"{kind}/{TENSOR}", source=kind, shape=(17, 64)
        )
    return cases


def overlapping(folder: Path, secret: Path) -> None:
    """As many elements as the tensor has, some of them twice."""
    with h5py.File(folder / "index.h5", "r+", libver="latest") as file:
        virtual(file, columns=(32, 16))
        properties = file[f"weights/{TENSOR}"].id.get_create_plist()
        whole = h5py.h5s.create_simple((16, 64))
        whole.select_hyperslab((0, 24), (16, 16))
        source = h5py.h5s.create_simple((256,))
        source.select_hyperslab((0,), (256,))
        properties.set_virtual(whole, SHARDS[0].encode(), b"weights", source)
        del file[f"weights/{TENSOR}"]
        space = h5py.h5s.create_simple((16, 64))
        name = f"weights/{TENSOR}".encode()
        h5py.h5d.create(file.id, name, h5py.h5t.IEEE_F32LE, space, properties)
    sign(folder)


def all_of(change: Callable[[h5py.Group], Any]) -> Case:
    """The same change in every kind."""

    def in_each(file: h5py.File, secret: Path) -> None:
        for kind in ("weights", "exp_avg", "exp_avg_sq"):
            change(file[kind])

    return in_hdf5("index.h5", in_each)


def groups() -> dict[str, Case]:
    cases: dict[str, Case] = {"tensor: overlap": overlapping}
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
    for name in FILES[1:4]:
        cases |= {
            f"{name}: text, signed": in_bytes(name, lambda data: b"text\n" * 500),
            f"{name}: zeros, signed": in_bytes(name, lambda data: bytes(len(data))),
            f"{name}: a half, signed": in_bytes(name, lambda data: data[: len(data) // 2]),
            f"{name}: nothing, signed": in_bytes(name, lambda data: b""),
        }
    cases["index.h5: a shard"] = swap("index.h5", SHARDS[0])
    cases["shards exchanged"] = swap(SHARDS[0], SHARDS[2])
    cases["a kind too many in a shard"] = in_hdf5(
        SHARDS[0], lambda file, secret: file.copy("weights", "more")
    )
    return cases


def swap(one: str, other: str) -> Case:
    def case(folder: Path, secret: Path) -> None:
        data = (folder / one).read_bytes()
        shutil.copyfile(folder / other, folder / one)
        (folder / other).write_bytes(data)
        sign(folder)

    return case


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


def make_cases(folder: Path, intact: Path, seed: int) -> dict[str, Path]:
    """A checkpoint for every case, and folder/secret, to which many of them refer."""
    makers = places() | manifests() | tensors() | groups() | shards() | attributes()
    makers |= damages(40, seed)
    shutil.copytree(intact, folder / "secret")
    found = {}
    for number, (name, change) in enumerate(makers.items()):
        found[name] = folder / f"{number:03d}" / NAME
        shutil.copytree(intact, found[name])
        change(found[name], folder / "secret")
    return found
