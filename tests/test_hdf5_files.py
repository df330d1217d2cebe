"""Arrays of HDF5 from elsewhere: if this failed, a corpus would read any file of its reader."""

import os
import re
import subprocess
import sys
import zlib

import h5py
import numpy as np
import pytest
from ranks import ROOT, fork_one
from test_prepare_data import prepare

TOKENS = np.arange(100) % 250


def external(file, path, size: int, kind: str = "u1") -> None:
    """Give `tokens` its bytes in another file."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_external(os.fsencode(path), 0, size)
    space = h5py.h5s.create_simple((size // np.dtype(kind).itemsize,))
    h5py.h5d.create(file.id, b"tokens", h5py.h5t.py_create(np.dtype(kind)), space, properties)


def virtual(file, source) -> None:
    layout = h5py.VirtualLayout((100,), "u1")
    layout[:] = h5py.VirtualSource(str(source), "t" if source != "." else "tokens", (100,))
    file.create_virtual_dataset("tokens", layout)


def cycle(file) -> None:
    file["a"], file["b"] = h5py.SoftLink("/b"), h5py.SoftLink("/a")
    file["tokens"] = h5py.SoftLink("/a")


def large_chunk(file) -> None:
    made = file.create_dataset(
        "tokens", (1 << 28,), "u1", chunks=(1 << 28,), compression="gzip", compression_opts=1
    )
    made[: 1 << 20] = np.zeros(1 << 20, "u1")


def wide_chunks(file) -> None:
    """Rows that are cheap in the file, and many gigabytes in memory."""
    shape, chunks = (1 << 12, 1 << 20), (1 << 12, 1 << 10)
    made = file.create_dataset("tokens", shape, "u1", chunks=chunks, compression="gzip")
    for number in range(1 << 10):
        made.id.write_direct_chunk((0, number << 10), PACKED)


def of_filter(file) -> None:
    """A filter that HDF5 would look for among its plug-ins."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((100,))
    properties.set_filter(32001, h5py.h5z.FLAG_OPTIONAL, (0,))
    space = h5py.h5s.create_simple((100,))
    h5py.h5d.create(file.id, b"tokens", h5py.h5t.NATIVE_UINT8, space, properties)


def in_a_group(file) -> None:
    file["tokens/tokens"] = h5py.SoftLink("/x")


PACKED = zlib.compress(bytes(1 << 22), 9)
CASES = {
    "external storage": (lambda f, p: external(f, p / "secret", 100), "has its values in other"),
    "external storage of zeros": (
        lambda f, p: external(f, "/dev/zero", 80, "i8"),
        "has its values in other files",
    ),
    "external storage in a pipe": (lambda f, p: external(f, p / "pipe", 80, "i8"), "other files"),
    "external link": (
        lambda f, p: f.__setitem__("tokens", h5py.ExternalLink(str(p / "other.h5"), "/t")),
        "'tokens' is a link",
    ),
    "virtual": (lambda f, p: virtual(f, p / "other.h5"), "has its values in other files"),
    "virtual, of itself": (lambda f, p: virtual(f, "."), "has its values in other files"),
    "a link to itself": (
        lambda f, p: f.__setitem__("tokens", h5py.SoftLink("/tokens")),
        "'tokens' is a link",
    ),
    "links in a circle": (lambda f, p: cycle(f), "'tokens' is a link"),
    "a group": (lambda f, p: in_a_group(f), "'tokens' is not a dataset"),
    "10^15 tokens": (
        lambda f, p: f.create_dataset(
            "tokens", (10**15,), "u1", chunks=(1 << 20,), compression="gzip"
        ),
        r"claims 1,000,000,000,000,000 bytes in 953,674,317 chunks, and the file has 0 bytes in 0",
    ),
    "never written": (lambda f, p: f.create_dataset("tokens", (1000,), "u1"), "claims 1,000 bytes"),
    "a large chunk": (lambda f, p: large_chunk(f), "chunks of 268,435,456 bytes, more than"),
    "wide chunks": (lambda f, p: wide_chunks(f), "write it again with fewer rows in a chunk"),
    "a filter": (lambda f, p: of_filter(f), "has the filter 32001; those that are read are gzip"),
    "negative lengths": (
        lambda f, p: f.update({"tokens": TOKENS, "lengths": np.array([-5, 105])}),
        "'lengths' has a negative number",
    ),
    "lengths that overflow": (
        lambda f, p: f.update({"tokens": TOKENS, "lengths": np.full(4, 2**62)}),
        "'lengths' adds up to 18446744073709551616, but 'tokens' has 100",
    ),
    "lengths elsewhere": (
        lambda f, p: f.update({"tokens": TOKENS, "lengths": h5py.ExternalLink("o.h5", "/t")}),
        "'lengths' is a link",
    ),
    "2^63": (lambda f, p: f.update({"tokens": np.array([2**63], "u8")}), "is not in 0..256"),
    "a pipe": (lambda f, p: (os.remove(p / "c.h5"), os.mkfifo(p / "c.h5")), "is a pipe"),
}


def make(case: str, folder) -> None:
    (folder / "secret").write_bytes(b"x" * 100)
    os.mkfifo(folder / "pipe")
    with h5py.File(folder / "other.h5", "w") as file:
        file["t"] = np.zeros(100, "u1")
    with h5py.File(folder / "c.h5", "w") as file:
        CASES[case][0](file, folder)


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_array_is_refused_in_a_sentence(case, tmp_path):
    make(case, tmp_path)
    (tmp_path / "out").mkdir()
    words = ["--out", tmp_path / "out/c", "--tokenizer", "bytes", tmp_path / "c.h5"]
    # In a process of its own: HDF5 may wait in a pipe for ever, or die.
    done = fork_one("scripts/prepare_data.py", *map(str, words), timeout=120)
    assert done.status == 2, done.err
    assert re.search(f"^error: .*{CASES[case][1]}", done.err, re.MULTILINE), done.err
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("case", ["wide chunks", "a large chunk", "10^15 tokens"])
def test_a_hostile_array_takes_little_memory(case, tmp_path):
    """And no more than some seconds of a core."""
    make(case, tmp_path)
    words = ["--out", str(tmp_path / "c"), "--tokenizer", "bytes", str(tmp_path / "c.h5")]
    code = (
        "import re, resource, sys; resource.setrlimit(resource.RLIMIT_CPU, (20, 20));"
        "from base.errors import UserError; from scripts.prepare_data import main\n"
        "try: main(sys.argv[1:])\nexcept UserError: pass\n"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 1_000_000  # kB


def test_arrays_as_they_are_usually_written(tmp_path):
    """In chunks, packed, in groups, of one and two dimensions."""
    from corpora.token_files import IndexedDataset

    rows = (np.arange(30_000) % 250).reshape(100, 300).astype("u1")
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file.create_dataset("plain", data=rows)
        for name, how in {
            "gzip": {"compression": "gzip", "shuffle": True, "fletcher32": True},
            "lzf": {"compression": "lzf"},
            "train/chunks": {"chunks": (7, 50)},
            "zeros": {"compression": "gzip", "chunks": True},
        }.items():
            file.create_dataset(name, data=rows * (name != "zeros"), **how)
    for key in ("plain", "gzip", "lzf", "train/chunks", "zeros"):
        words = ["--tokenizer", "bytes", "--hdf5-key", key, tmp_path / "c.h5"]
        prepare(tmp_path / "c", *words)
        found = IndexedDataset(str(tmp_path / "c"))
        documents = sorted(found.get(i).tolist() for i in range(len(found)))
        assert documents == sorted((rows * (key != "zeros")).tolist())
