"""--ema: if this failed, an average of weights would not be the one that its formula says."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from ranks import fork_ranks
from test_golden import check_lines

import checkpoint
from base.errors import UserError
from checkpointing.index import Index

SMALL = ["--layers", "2", "--hidden", "32", "--heads", "4", "--seq-length", "16"]
SMALL += ["--vocab-size", "61", "--global-batch-size", "8", "--lr", "1e-2", "--steps", "5"]
SMALL += ["--precision", "fp64", "--ema", "0.75", "--save-every", "1"]
EXPERTS = ["--experts", "4", "--balance", "bias"]
# Ranks, and options of the layout. The first is compared with the formula, the others with it.
LAYOUTS = {
    "1": (1, []),
    "tp2": (2, ["--tp", "2"]),
    "pp2": (2, ["--pp", "2", "--schedule", "zb-h1"]),
    "dp2": (2, ["--zero", "1"]),
    "dp2-overlap": (2, ["--zero", "2", "--set", "overlap_param_gather=true"]),
    "dp2-zero3": (2, ["--zero", "3"]),
    "cp2": (2, ["--cp", "2"]),
}
OF_EXPERTS = {"experts": (1, []), "experts-ep2": (2, ["--ep", "2"])}


def train(out: Path, ranks: int, *options: str) -> list[dict]:
    """The rows of a run."""
    done = fork_ranks(ranks, "train.py", *SMALL, *options, "--out", str(out))
    assert done.status == 0, done.err[-2000:]
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with the runs of LAYOUTS and OF_EXPERTS."""
    folder = tmp_path_factory.mktemp("ema")
    jobs = [(name, *LAYOUTS[name]) for name in LAYOUTS]
    jobs += [(name, n, [*options, *EXPERTS]) for name, (n, options) in OF_EXPERTS.items()]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: train(folder / job[0], job[1], *job[2]), jobs))
    return folder


def tensors(run: Path, step: int, kind: str) -> dict[str, np.ndarray]:
    with Index(str(run / "checkpoints" / f"step_{step:08d}")) as index:
        return {name: index.read_whole(kind, name) for name in index.shapes}


def test_the_average_is_that_of_the_formula(runs, tmp_path):
    train(tmp_path, 1, "--lr", "0", "--min-lr", "0", "--steps", "1")  # its weights stay the first
    average = tensors(tmp_path, 1, "weights")
    for step in range(1, 6):
        weights = tensors(runs / "1", step, "weights")
        average = {name: 0.75 * average[name] + 0.25 * weights[name] for name in weights}
        found = tensors(runs / "1", step, "ema")
        for name in weights:
            np.testing.assert_allclose(found[name], average[name], rtol=1e-13, atol=1e-16)
    assert any((weights[name] != average[name]).any() for name in weights)


@pytest.mark.parametrize("name", [*LAYOUTS, *OF_EXPERTS])
def test_a_layout_has_the_average_of_one_rank(runs, name):
    one = runs / ("experts" if name in OF_EXPERTS else "1")
    expected, found = tensors(one, 5, "ema"), tensors(runs / name, 5, "ema")
    assert expected.keys() == found.keys()
    for tensor in expected:
        np.testing.assert_allclose(found[tensor], expected[tensor], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_every_layout_has_the_average_of_one_rank_within_fp64(tmp_path):
    """Of several optimizers and models; `check.py --random N --ema 0.9` draws others."""
    for result in check_lines("averages", tmp_path):
        assert result["averages"] != result["weights"]


@pytest.mark.parametrize(
    ("name", "ranks", "layout"), [(n, *LAYOUTS[n]) for n in ("1", "dp2-zero3")]
)
def test_it_is_evaluated_without_a_trace_in_the_weights(runs, tmp_path, name, ranks, layout):
    data = ["--eval-every", "1", "--eval-samples", "8", "--eval-ema"]
    rows = train(tmp_path / "a", ranks, *layout, *data)
    losses = {
        row["iteration"]: row["validation_ema_loss"] for row in rows if "validation_ema_loss" in row
    }
    assert sorted(losses) == [1, 2, 3, 4, 5]
    assert losses[5] != next(
        row["validation_loss"] for row in rows[::-1] if "validation_loss" in row
    )
    for kind in ("weights", "ema", "exp_avg"):
        expected, found = tensors(runs / name, 5, kind), tensors(tmp_path / "a", 5, kind)
        assert all((found[tensor] == expected[tensor]).all() for tensor in expected)
    # The averages as the weights of another run give the same loss.
    folder = tmp_path / "a/checkpoints"
    first, last = str(folder / "step_00000004"), str(folder / "step_00000005")
    checkpoint.run_command(["merge", "--ema", "--weights", "0,1", first, last, str(tmp_path / "m")])
    frozen = ["--resume", str(tmp_path / "m"), "--load-weights-only", "--lr", "0", "--min-lr", "0"]
    frozen += ["--weight-decay", "0", "--steps", "1", "--eval-samples", "8"]
    again = train(tmp_path / "b", 1, *frozen)
    (loss,) = [row["validation_loss"] for row in again if "validation_loss" in row]
    assert loss == pytest.approx(losses[5], rel=1e-9)


def test_a_resume_under_another_layout_goes_on_with_it(runs, tmp_path):
    begun = runs / "tp2/checkpoints/step_00000002"
    train(tmp_path / "same", 2, "--tp", "2", "--resume", str(begun))
    for kind in ("weights", "ema"):
        expected, found = tensors(runs / "tp2", 5, kind), tensors(tmp_path / "same", 5, kind)
        assert all((found[name] == expected[name]).all() for name in expected)
    train(tmp_path / "other", 2, "--pp", "2", "--resume", str(begun))
    expected, found = tensors(runs / "1", 5, "ema"), tensors(tmp_path / "other", 5, "ema")
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-12)


def test_a_resume_that_begins_or_ends_it_says_so(runs, tmp_path):
    begun = str(runs / "1/checkpoints/step_00000003")
    words = ["train.py", *SMALL, "--resume", begun, "--out"]
    done = fork_ranks(1, *words, str(tmp_path / "without"), "--ema", "0")
    assert "an average of weights, which is dropped: --ema 0" in done.out
    last = str(tmp_path / "without/checkpoints/step_00000005")
    with pytest.raises(UserError, match="has no average of weights"):
        checkpoint.run_command(["export", "--to", "hf", "--ema", last, str(tmp_path / "hf")])
    words[words.index(begun)] = str(tmp_path / "without/checkpoints/step_00000004")
    done = fork_ranks(1, *words, str(tmp_path / "with"), "--ema", "0.5")
    assert "has no average of weights: --ema begins one here" in done.out
    before = tensors(tmp_path / "without", 4, "weights")
    after, average = (tensors(tmp_path / "with", 5, kind) for kind in ("weights", "ema"))
    for name in before:
        mean = 0.5 * before[name] + 0.5 * after[name]
        np.testing.assert_allclose(average[name], mean, rtol=1e-13, atol=1e-16)
