"""Merged checkpoints: if this failed, a merged model would not be the mean of those it names."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from checkpoint_worker import save_random
from ranks import fork_ranks

import checkpoint
from base.errors import UserError
from checkpointing.index import Index
from checkpointing.merge import shares_of

WORDS = ["--layers", "2", "--hidden", "32", "--heads", "4", "--seq-length", "16"]
WORDS += ["--vocab-size", "61", "--global-batch-size", "4", "--lr", "1e-2", "--steps", "6"]
# Three runs of one model: layouts and a precision of the masters that differ.
RUNS = {
    "tp2": (2, ["--tp", "2", "--save-every", "2"]),
    "pp2": (2, ["--pp", "2", "--seed", "5", "--save-every", "6"]),
    "fp64": (1, ["--precision", "fp64", "--seed", "6", "--save-every", "6"]),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with the runs of RUNS."""
    folder = tmp_path_factory.mktemp("runs")

    def train(name: str) -> None:
        ranks, options = RUNS[name]
        done = fork_ranks(ranks, "train.py", *WORDS, *options, "--out", str(folder / name))
        assert done.status == 0, done.err[-2000:]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, RUNS))
    return folder


def at(saved: Path, run: str, step: int) -> str:
    return str(saved / run / "checkpoints" / f"step_{step:08d}")


def merged(sources: list[str], out: Path, *options: str) -> Path:
    """Merge by the program's own command line; the new checkpoint."""
    checkpoint.run_command(["merge", *options, *sources, str(out)])
    return next(out.glob("step_*"))


def tensors(folder: str | Path) -> dict[str, np.ndarray]:
    with Index(str(folder)) as index:
        return {name: index.read_whole("weights", name) for name in index.shapes}


def averaged(sources: list[str], weights: list[float], dtype: str) -> dict[str, np.ndarray]:
    """The mean in extended precision, rounded to fp64 and then to the type of the files."""
    parts = [tensors(source) for source in sources]
    means = {}
    for name in parts[0]:
        total = sum(
            np.longdouble(w) * p[name].astype(np.longdouble) for w, p in zip(weights, parts)
        )
        means[name] = (total / np.longdouble(sum(weights))).astype(dtype)
    return means


@pytest.mark.parametrize(
    ("rule", "weights"),
    [
        ("equal", [1, 1, 1]),
        ("linear", [1, 2, 3]),
        ("1-sqrt", [(1 / 3) ** 0.5, (2 / 3) ** 0.5 - (1 / 3) ** 0.5, 1 - (2 / 3) ** 0.5]),
        ("ema:0.75", [0.5625, 0.1875, 0.25]),
        ("0.5,0,7", [0.5, 0, 7]),
    ],
)
def test_a_merge_is_the_mean_rounded_once(saved, tmp_path, rule, weights):
    assert shares_of(rule, 3) == pytest.approx(weights, abs=1e-15)
    sources = [at(saved, "tp2", 2), at(saved, "tp2", 4), at(saved, "pp2", 6)]
    found = tensors(merged(sources, tmp_path / "out", "--weights", rule))
    expected = averaged(sources, weights, "float32")
    assert {t.dtype for t in found.values()} == {np.dtype("float32")}
    assert all((found[name] == expected[name]).all() for name in expected)


def test_precisions_that_differ_give_the_widest(saved, tmp_path):
    sources = [at(saved, "pp2", 6), at(saved, "fp64", 6)]
    found = tensors(merged(sources, tmp_path / "out"))
    expected = averaged(sources, [1, 1], "float64")
    assert all(found[name].dtype == np.float64 for name in found)
    assert all((found[name] == expected[name]).all() for name in expected)


def test_a_merge_is_shown_verified_and_trained_from(saved, tmp_path, capsys):
    out = tmp_path / "out"
    sources = [at(saved, "tp2", 4), str(saved / "tp2")]  # a run: its newest checkpoint
    folder = merged(sources, out, "--weights", "1,3")
    assert folder.name == "step_00000006"
    checkpoint.run_command(["verify", str(out)])
    printed = capsys.readouterr().out
    assert f"0.2500 of {sources[0]}" in printed
    assert f"0.7500 of {at(saved, 'tp2', 6)}" in printed
    source = json.loads((out / "run.json").read_text())["source"]
    assert [part["share"] for part in source["merged_from"]] == [0.25, 0.75]
    words = [*WORDS, "--resume", str(out), "--load-weights-only", "--lr", "0", "--min-lr", "0"]
    words += ["--steps", "1", "--save-every", "1", "--out", str(tmp_path / "next")]
    done = fork_ranks(2, "train.py", *words, "--pp", "2")
    assert done.status == 0, done.err[-2000:]
    after = tensors(next((tmp_path / "next/checkpoints").glob("step_*")))
    expected = tensors(folder)
    assert all((after[name] == expected[name]).all() for name in expected)


def test_what_cannot_be_merged(saved, tmp_path):
    first, last = at(saved, "tp2", 2), at(saved, "tp2", 6)
    save_random(tmp_path / "wide", 0.1)
    other = str(tmp_path / "wide")
    damaged = tmp_path / "damaged"
    shutil.copytree(first, damaged / "step_00000002")
    shard = damaged / "step_00000002" / "rank_00000.h5"
    shard.write_bytes(shard.read_bytes()[:-8] + b"\xff" * 8)
    for words, sentence in (
        ([first], "two checkpoints or more, not 1"),
        ([first, first], "is named twice"),
        ([last, first], "steps 6, 2: name the oldest first"),
        ([other, last], "different models: heads 4 against 8"),
        ([str(damaged), last], "CRC-32"),
        (["--weights", "1,2,3", first, last], "3 numbers for 2 checkpoints"),
        (["--weights", "1,-1", first, last], "no number may be negative"),
        (["--weights", "0,0", first, last], "one must be positive"),
        (["--weights", "ema:1", first, last], "decay"),
        (["--weights", "cosine", first, last], "'cosine' is no number"),
    ):
        with pytest.raises(UserError, match=sentence):
            checkpoint.run_command(["merge", *words, str(tmp_path / "out")])
        assert not list(tmp_path.glob("out*"))
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out exists"):
        checkpoint.run_command(["merge", first, last, str(tmp_path / "out")])
