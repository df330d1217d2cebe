"""The cache of orders: if this failed, a run could train in the order of another corpus."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import ROOT, fork_ranks
from test_data import VOCAB, config_of, write_corpus

import data
from base.errors import UserError
from corpora import blends, mapped_files, sample_order
from corpora.mapped_files import ArrayCache
from corpora.sample_order import GPTSamples
from corpora.token_files import IndexedDataset

FACTS = {"order": "test", "numbers": [1, 2]}


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.arrays"))


def never() -> dict:
    raise AssertionError("it is in the cache")


def some_arrays() -> dict[str, np.ndarray]:
    return {
        "rows": np.arange(2000, dtype=np.int32).reshape(1000, 2),
        "none": np.zeros((0, 2), np.int64),
        "numbers": np.arange(7, dtype=np.uint32),
    }


def assert_equal(found, arrays) -> None:
    assert set(found.arrays) == set(arrays)
    for name, array in arrays.items():
        assert found.arrays[name].dtype == array.dtype
        assert np.array_equal(found.arrays[name], array), name


def test_arrays_are_built_once_and_mapped_read_only(tmp_path):
    cache, arrays = ArrayCache(str(tmp_path)), some_arrays()
    first = cache.find(FACTS, some_arrays)
    again = ArrayCache(str(tmp_path)).find(dict(reversed(FACTS.items())), never)
    assert (first.built, again.built) == (True, False)
    for found in (first, again):
        assert_equal(found, arrays)
        with pytest.raises(ValueError, match="read-only"):
            found.arrays["rows"][0] = 5
    assert len(entries(tmp_path)) == 1
    assert not list(tmp_path.glob("*.partial"))
    assert cache.find(FACTS | {"numbers": [1, 3]}, some_arrays).built
    nothing = ArrayCache(None).find(FACTS, some_arrays)
    assert not nothing.files
    assert_equal(nothing, arrays)


@pytest.mark.parametrize("damage", [slice(0), slice(100), slice(-64), slice(1, None)])
def test_a_damaged_entry_is_built_anew(tmp_path, damage):
    cache = ArrayCache(str(tmp_path))
    cache.find(FACTS, some_arrays)
    (path,) = tmp_path.glob("*.arrays/rows.npy")
    raw = path.read_bytes()
    path.unlink()  # else the file that is mapped would change
    path.write_bytes(raw[damage])
    found = cache.find(FACTS, some_arrays)
    assert found.built
    assert_equal(found, some_arrays())
    assert path.read_bytes() == raw


def test_entries_that_nobody_uses_are_removed(tmp_path):
    cache = ArrayCache(str(tmp_path))
    for number in range(3):
        cache.find({"number": number}, some_arrays)
    (tmp_path / "killed.partial").mkdir()
    (tmp_path / "mine.txt").write_bytes(b"x")
    old = time.time() - mapped_files.SECONDS_UNUSED - 60
    for path in tmp_path.iterdir():
        os.utime(path, (old, old))
    assert not cache.find({"number": 1}, never).built  # used: it stays
    cache.find({"number": 9}, some_arrays)
    assert len(entries(tmp_path)) == 2
    assert not cache.find({"number": 1}, never).built
    assert not (tmp_path / "killed.partial").exists()
    assert (tmp_path / "mine.txt").exists()


def test_a_folder_that_others_could_write_is_not_used(tmp_path, monkeypatch):
    """Else they could order the samples: what a run trains on, and when."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UserError, match="link is a link, so that others could order the samples"):
        ArrayCache(str(tmp_path / "link"))
    for mode in (0o770, 0o707, 0o1777):
        (tmp_path / "real").chmod(mode)
        with pytest.raises(UserError, match=f"has mode {mode:o}: group or others may write"):
            ArrayCache(str(tmp_path / "real"))
    (tmp_path / "real").chmod(0o700)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UserError, match=r"open, which has mode 777 without the sticky bit"):
        ArrayCache(str(tmp_path / "open" / "trine-0"))
    (tmp_path / "open").chmod(0o1777)
    ArrayCache(str(tmp_path / "open" / "trine-0"))
    monkeypatch.setattr(mapped_files.os, "getuid", lambda: 12345)
    owner = os.stat(tmp_path).st_uid
    with pytest.raises(UserError, match=f"belongs to user {owner}, not to user 12345"):
        ArrayCache(str(tmp_path / "real"))


@pytest.mark.parametrize("how", ["link", "mode"])
def test_an_entry_that_others_could_write_is_not_used(how, tmp_path):
    """The entry may be from a time when the folder was open to others: it is built again."""
    cache = ArrayCache(str(tmp_path / "cache"))
    cache.find(FACTS, some_arrays)
    (entry,) = (tmp_path / "cache").glob("*.arrays")
    assert entry.stat().st_mode & 0o777 == 0o700
    if how == "link":
        entry.rename(tmp_path / "elsewhere")
        entry.symlink_to(tmp_path / "elsewhere")
    else:
        entry.chmod(0o777)
    assert cache.find(FACTS, some_arrays).built
    assert not cache.find(FACTS, never).built


# ------------------------------------------------------------------------------------------------
# Orders
# ------------------------------------------------------------------------------------------------


def order_of(dataset, cache, samples=30, first=0, length=8, seed=1, order="megatron") -> GPTSamples:
    about = range(first, len(dataset)), samples, length, seed, VOCAB, order
    return GPTSamples(dataset, *about, cache)


def test_every_input_of_an_order_has_its_entry(tmp_path, monkeypatch):
    cache = ArrayCache(str(tmp_path / "cache"))
    dataset = write_corpus(f"{tmp_path}/c", [30] * 20)
    options = [{}, {"samples": 200}, {"first": 1}, {"length": 9}, {"seed": 2}, {"order": "stable"}]
    for each in options:
        assert order_of(dataset, cache, **each).found.built
        assert not order_of(dataset, cache, **each).found.built
    monkeypatch.setattr(sample_order, "RULE", 99)
    assert order_of(dataset, cache).found.built
    assert blends.find_blend_order([0.5, 0.5], 9, cache).found.built
    assert not blends.find_blend_order([0.5, 0.5], 9, cache).found.built
    assert blends.find_blend_order([0.4, 0.6], 9, cache).found.built
    assert blends.find_blend_order([0.5, 0.5], 8, cache).found.built


@pytest.mark.parametrize("how", ["same size", "same time", "moved here"])
def test_a_changed_corpus_never_meets_an_old_order(tmp_path, how):
    cache, prefix = ArrayCache(str(tmp_path / "cache")), f"{tmp_path}/c"
    order_of(write_corpus(prefix, [30] * 10 + [10] * 10), cache)
    before = os.stat(prefix + ".idx")
    other = write_corpus(f"{tmp_path}/d", [10] * 10 + [30] * 10).prefix
    if how == "moved here":
        os.rename(other + ".bin", prefix + ".bin")
        os.rename(other + ".idx", prefix + ".idx")
    else:
        with open(prefix + ".idx", "r+b") as file:  # in its place: the same file number
            file.write(Path(other + ".idx").read_bytes())
    if how != "same size":
        os.utime(prefix + ".idx", ns=(before.st_atime_ns, before.st_mtime_ns))
    now = IndexedDataset(prefix, cache)
    found, own = order_of(now, cache), order_of(now, None)
    assert found.found.built
    assert np.array_equal(found.sample_index, own.sample_index)


# ------------------------------------------------------------------------------------------------
# Several processes
# ------------------------------------------------------------------------------------------------

BUILDER = """
import sys, time
from pathlib import Path
import numpy as np
from corpora.mapped_files import ArrayCache

folder, log = sys.argv[1:]

def build():
    pause = float(Path(log + ".pause").read_text())  # before the line: then the test changes it
    with open(log, "a") as file:
        file.write("built\\n")
    time.sleep(pause)
    return {"numbers": np.arange(100_000)}

found = ArrayCache(folder).find({"a": 1}, build)
assert found.arrays["numbers"].sum() == 4999950000
"""


def builder(folder: Path, log: Path) -> subprocess.Popen:
    words = [sys.executable, "-c", BUILDER, str(folder), str(log)]
    return subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_one_process_builds_and_a_killed_one_blocks_nobody(tmp_path):
    log, folder = tmp_path / "log", tmp_path / "cache"
    log.touch()
    pause = tmp_path / "log.pause"
    pause.write_text("600")
    killed = builder(folder, log)
    while not log.read_text():
        time.sleep(0.01)
    pause.write_text("0.2")
    others = [builder(folder, log) for _ in range(4)]
    time.sleep(0.3)
    assert log.read_text() == "built\n", "the others wait"
    assert entries(folder) == []
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL
    assert [process.wait(60) for process in others] == [0] * 4
    assert log.read_text() == "built\n" * 2, "by one of those that waited"
    assert len(entries(folder)) == 1


def test_ranks_of_a_run_share_one_order_and_say_so(tmp_path):
    """Two stages: the losses are those of a run without a cache."""
    write_corpus(f"{tmp_path}/a", [30] * 60)
    write_corpus(f"{tmp_path}/b", [20] * 60, seed=1)
    words = f"train.py --layers 2 --hidden 16 --heads 2 --vocab-size {VOCAB} --seq-length 8 "
    words += f"--data 0.3 {tmp_path}/a 0.7 {tmp_path}/b --split 8,1,1 --eval-samples 8 --pp 2 "
    words += f"--steps 4 --out {tmp_path}/out --no-preflight --micro-batch-size 2 --cache "
    losses = []
    folder = tmp_path / "cache" / f"trine-{os.getuid()}"
    for cache, where in (("none", "memory"), (f"{tmp_path}/cache", str(folder))):
        outcome = fork_ranks(2, *words.split(), cache, timeout=120)
        assert outcome.status == 0, outcome.err
        assert f"; megatron order in {where}\n" in outcome.out
        rows = map(json.loads, Path(tmp_path, "out", "metrics.jsonl").read_text().splitlines())
        losses.append([v for row in rows for k, v in row.items() if k.endswith("loss")])
    assert losses[0] == losses[1]
    # Two pairs, an order of each in three splits, and two blends: two splits need equal ones.
    assert len(entries(folder)) == 2 + 6 + 2


def test_the_default_folder_is_the_users_own(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = config_of([f"{tmp_path}/c"])
    assert config.data.cache_folder == f"{tmp_path}/trine-{os.getuid()}"
    assert config_of([f"{tmp_path}/c"], cache="none").data.cache_folder is None
    shared = config_of([f"{tmp_path}/c"], cache="x").data.cache_folder
    assert shared == f"x/trine-{os.getuid()}", "users that share --cache share no orders"
    write_corpus(f"{tmp_path}/c", [30] * 20)
    data.build(config)
    assert os.stat(config.data.cache_folder).st_mode & 0o777 == 0o700
