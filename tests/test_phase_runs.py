"""Runs with phases, and branches: if this failed, a phase would depend on layouts or restarts."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from ranks import fork_ranks
from small_corpora import write_corpora
from test_phases import written

from checkpointing.index import Index
from tools.numerics.table import table

SMALL = ["--layers", "2", "--hidden", "32", "--heads", "4", "--seq-length", "16"]
SMALL += ["--vocab-size", "61", "--lr", "1e-2", "--precision", "fp64", "--save-every", "1000"]
SMALL += ["--positions", "rotary", "--split", "80,20,0", "--eval-samples", "8", "--eval-every", "6"]
LAYOUTS = {
    "tp2": (2, ["--tp", "2", "--sequence-parallel"]),
    "pp2": (2, ["--pp", "2", "--schedule", "zb-h1"]),
    "dp2": (2, ["--zero", "2"]),
    "cp2": (2, ["--cp", "2"]),
}


def run(out: Path, ranks: int, *options: str) -> dict:
    """The rows of a run by step, of losses and of evaluations; they may be of several starts."""
    done = fork_ranks(ranks, "train.py", *SMALL, *options, "--out", str(out))
    assert done.status in (0, 75), done.err[-2000:]
    return rows_of(out)


def rows_of(out: Path) -> dict:
    """The columns of a run's rows that no restart changes, by (step, kind of row)."""
    found = {}
    for path in [*sorted(out.glob("metrics.jsonl.*")), out / "metrics.jsonl"]:
        for row in map(json.loads, path.read_text().splitlines()):
            kind = next(name for name in ("validation_loss", "loss") if name in row)
            names = (kind, "learning_rate", "consumed_samples", "consumed_tokens")
            found[row["iteration"], kind] = [row[name] for name in names if name in row]
    return found


def close(found: dict, expected: dict) -> None:
    """The rows are equal but for rounding in fp64."""
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        assert found[key] == pytest.approx(row, rel=1e-11), key


def same_weights(a: Path, b: Path, step: int) -> None:
    """The weights and moments after a step are equal bit for bit."""
    with (
        Index(f"{a}/checkpoints/step_{step:08d}") as one,
        Index(f"{b}/checkpoints/step_{step:08d}") as other,
    ):
        for kind in ("weights", "exp_avg", "exp_avg_sq"):
            for name in one.shapes:
                assert np.array_equal(one.read_whole(kind, name), other.read_whole(kind, name))


@pytest.fixture(scope="module")
def phases(tmp_path_factory) -> str:
    """Three phases of 6, 6 and 6 steps, on three corpora, with other lengths and batches."""
    folder = tmp_path_factory.mktemp("corpora")
    write_corpora(folder)
    tables = [
        {"name": "short", "from_tokens": 0, "data": [f"{folder}/a"], "seq_length": 8},
        {
            "name": "mix",
            "from_tokens": 384,
            "data": [0.6, f"{folder}/a", 0.4, f"{folder}/b"],
            "global_batch_size": 4,
        },
        {
            "name": "end",
            "from_tokens": 768,
            "data": [1, f"{folder}/a", 1, f"{folder}/c"],
            "seq_length": 12,
            "lr_schedule": "linear",
            "min_lr": 1e-4,
        },
    ]
    return written(folder / "phases.toml", tables, train_tokens=768 + 6 * 96)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, phases) -> dict:
    """The rows of the run of one rank, from beginning to end."""
    return run(tmp_path_factory.mktemp("whole"), 1, "--phases", phases)


def test_one_run_is_its_pieces(phases, whole, tmp_path):
    """Bit for bit: stopped inside of phases, and where one ends. run.json has the phases."""
    for stop in ("16", "48", "64", "72", "80"):
        run(tmp_path, 1, "--phases", phases, "--resume", "auto", "--stop-at-samples", stop)
    # The rest without the file: its contents are in the checkpoint.
    found = run(tmp_path, 1, "--resume", "auto")
    assert found == whole
    facts = json.loads((tmp_path / "run.json").read_text())
    begins = [(s["name"], s["from_tokens"], s["from_step"]) for s in facts["phases"]]
    assert begins == [("short", 0, 0), ("mix", 384, 6), ("end", 768, 12)]
    (row,), _ = table(tmp_path, "date")
    assert (row["state"], row["step"], row["of"]) == ("finished", 18, 18)
    assert " phase 2 of 3, mix: from step 7, 384 tokens" in (tmp_path / "log.txt.3").read_text()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_phases_do_not_depend_on_the_layout(layout, phases, whole, tmp_path):
    ranks, options = LAYOUTS[layout]
    close(run(tmp_path, ranks, "--phases", phases, *options), whole)


def test_a_restart_under_another_layout_goes_on(phases, whole, tmp_path):
    ranks, options = LAYOUTS["pp2"]
    run(tmp_path, ranks, "--phases", phases, *options, "--stop-at-samples", "56")
    ranks, options = LAYOUTS["cp2"]
    close(run(tmp_path, ranks, "--resume", "auto", *options), whole)


# ------------------------------------------------------------------------------------------------
# Branches
# ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_three_branches_are_three_uninterrupted_runs(phases, tmp_path):
    """Of a stable run without phases: wsd to the end of each; bit for bit in one layout."""
    data = ["--data", f"{Path(phases).parent}/a", "--order", "stable", "--global-batch-size", "4"]
    stable = tmp_path / "stable"
    options = [*data, "--lr-schedule", "constant", "--lr-warmup-samples", "8"]
    run(stable, 1, *options, "--steps", "12", "--save-every", "3")

    def both(step: int) -> None:
        out = tmp_path / f"branch{step}"
        checkpoint = f"{stable}/checkpoints/step_{step:08d}"
        words = ["--branch-from", checkpoint, "--decay-tokens", str(4 * 64)]
        run(out, 1, *words, "--stop-at-samples", str(4 * step + 8))
        found = run(out, 1, *words)  # the same command goes on
        ends = ["--train-samples", str(4 * step + 16), "--set", "lr_wsd_decay_samples=16"]
        straight = ["--lr-schedule", "wsd", "--lr-warmup-samples", "8", *ends]
        expected = run(tmp_path / f"straight{step}", 1, *data, *straight)
        later = {key: row for key, row in expected.items() if key[0] > step}
        close(found, later)
        same_weights(out, tmp_path / f"straight{step}", step + 4)
        facts = json.loads((out / "run.json").read_text())
        assert facts["branch"] == {
            "checkpoint": checkpoint,
            "run": json.loads((stable / "run.json").read_text())["config"]["past"]["run"],
            "step": step,
            "samples": 4 * step,
            "tokens": 64 * step,
            "skipped": 0,
        }

    for step in (3, 6, 9):
        both(step)
    rows, _ = table(tmp_path, "date")
    names = [(row["run"], row["depth"]) for row in rows]
    begin = names.index(("stable", 0))
    branches = {("branch3", 1), ("branch6", 1), ("branch9", 1)}
    assert set(names[begin + 1 : begin + 4]) == branches
    done = fork_ranks(1, "train.py", *SMALL, "--branch-from", str(stable), "--out", str(stable))
    assert "a branch is a run of its own" in done.err
    other = ["--branch-from", str(tmp_path / "straight3"), "--out", str(tmp_path / "branch6")]
    done = fork_ranks(1, "train.py", *SMALL, *other)
    assert "has checkpoints of a run that is a branch of" in done.err


@pytest.fixture(scope="module")
def stable(tmp_path_factory, phases) -> tuple[list[dict], Path]:
    """The tables of the phases with a constant rate in all of them, and the run of one rank."""
    folder = tmp_path_factory.mktemp("stable")
    tables = tomllib.loads(Path(phases).read_text())["phase"]
    for of_rate in ("lr_schedule", "min_lr"):
        tables[-1].pop(of_rate)
    file = written(folder / "phases.toml", tables, train_tokens=768 + 6 * 96)
    run(folder / "run", 1, "--phases", file, *CONSTANT, "--save-every", "3")
    return tables, folder / "run"


CONSTANT = ("--lr-schedule", "constant")
# The step after which a branch begins, the tokens of the run there, those of the branch, which are
# four steps, and the samples of the run after two of them. In the first phase, in the second, which
# is a blend, and in the third, of another length.
BRANCHES = {
    "first": (3, 192, 256, "40"),
    "blend": (9, 576, 256, "68"),
    "length": (15, 1056, 384, "112"),
}


@pytest.fixture(scope="module", params=BRANCHES)
def fallen(request, stable, tmp_path_factory) -> tuple[str, dict, Path]:
    """The name of a branch, and the uninterrupted run that falls there: the phase in which it falls
    is longer and has a rate of its own.
    """
    tables, _ = stable
    step, begin, tokens, _ = BRANCHES[request.param]
    folder = tmp_path_factory.mktemp("straight")
    before = [dict(phase) for phase in tables if phase["from_tokens"] < begin]
    before[-1] |= {"lr_schedule": "wsd", "lr_wsd_decay_tokens": tokens}
    file = written(folder / "phases.toml", before, train_tokens=begin + tokens)
    rows = run(folder / "run", 1, "--phases", file, *CONSTANT)
    return request.param, {k: row for k, row in rows.items() if k[0] > step}, folder / "run"


@pytest.mark.slow
def test_a_branch_of_a_run_with_phases_is_an_uninterrupted_run(fallen, stable, tmp_path):
    """Bit for bit, with a stop on the way, and to rounding under every other layout."""
    name, expected, straight = fallen
    _, stable_run = stable
    step, _, tokens, stop = BRANCHES[name]
    checkpoint = f"{stable_run}/checkpoints/step_{step:08d}"
    words = ["--branch-from", checkpoint, "--decay-tokens", str(tokens)]
    run(tmp_path / "branch", 1, *words, "--stop-at-samples", stop)
    assert run(tmp_path / "branch", 1, *words) == expected  # the same command goes on
    same_weights(tmp_path / "branch", straight, step + 4)
    for layout in LAYOUTS:
        ranks, options = LAYOUTS[layout]
        close(run(tmp_path / layout, ranks, *words, *options), expected)
