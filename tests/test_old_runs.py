"""A run of commit 189cc1d: if this failed, checkpoints and files of old runs could not be read.

tests/data/run_189cc1d/ was written by that commit, with the options in OPTIONS and --tp 2 --pp 2;
only the host name in run.json was replaced. Later versions must be able to read it.
"""

import json
from pathlib import Path

import pytest
from ranks import ROOT, fork_one

import checkpoint

OLD = Path(ROOT) / "tests/data/run_189cc1d"
OPTIONS = (
    "--layers 2 --hidden 16 --heads 4 --seq-length 16 --vocab-size 61 --set pad_vocab_multiple=4 "
    "--global-batch-size 4 --steps 6 --save-every 4 --lr 1e-3 --eval-every 3 --eval-samples 4"
)

# Options of that commit that are no options any more.
GONE = {
    ".config.run.profile_step",
    ".config.run.node_mtbf_hours",
    ".config.run.memory_snapshot",
    ".config.training.decrease_batch_size_if_needed",
    # Constants of fp16's loss scale (config.run_options.DynamicScale).
    ".config.training.initial_loss_scale_power",
    ".config.training.loss_scale_window",
    ".config.training.loss_scale_hysteresis",
    ".config.training.min_loss_scale",
    ".config.training.max_overflows",
}


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(rows: list[dict]) -> dict[tuple[int, str], float]:
    """Every loss and gradient norm, by step and field."""
    fields = ("loss", "grad_norm", "validation_loss", "test_loss")
    return {(row["iteration"], f): row[f] for row in rows for f in fields if f in row}


def key_paths(value, path: str = "") -> set[str]:
    """The paths of all keys in nested dictionaries and lists."""
    if isinstance(value, list):
        return set().union(*(key_paths(one, f"{path}[]") for one in value))
    if not isinstance(value, dict):
        return set()
    return set().union(*({f"{path}.{k}"} | key_paths(v, f"{path}.{k}") for k, v in value.items()))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """The folder of a run of one rank that resumes from the old run's step 4."""
    out = tmp_path_factory.mktemp("resumed")
    options = [*OPTIONS.split(), "--resume", str(OLD), "--out", str(out), "--device", "cpu"]
    done = fork_one("train.py", *options)
    assert done.status == 0, done.err
    assert "step_00000004: step 4, 16 samples consumed" in done.out
    assert "fingerprint" not in done.out  # the samples are the same
    return out


def test_an_old_checkpoint_verifies_and_shows(capsys):
    checkpoint.run_command(["verify", str(OLD)])
    assert "all 5 files match" in capsys.readouterr().out
    checkpoint.run_command(["show", str(OLD)])
    shown = capsys.readouterr().out
    assert "step 4, complete by size: 5 files" in shown
    assert "28 tensors of 7,824 elements" in shown
    assert "weights float32, exp_avg float32, exp_avg_sq float32" in shown


def test_an_old_run_continues_under_another_layout(resumed):
    expected = {at: x for at, x in losses_of(rows_of(OLD)).items() if at[0] > 4}
    found = losses_of(rows_of(resumed))
    assert {step for step, _ in expected} == {5, 6}
    assert found.keys() == expected.keys()
    for at, value in expected.items():
        assert found[at] == pytest.approx(value, rel=1e-5, abs=0), at


def test_every_old_field_is_still_written(resumed):
    def kinds(rows: list[dict]) -> dict[str, dict]:
        """One row of each kind: of a step, a validation, a test."""
        names = ("test_loss", "validation_loss", "loss")
        return {next(name for name in names if name in row): row for row in rows}

    old, new = kinds(rows_of(OLD)), kinds(rows_of(resumed))
    assert len(old) == 3
    assert old.keys() == new.keys()
    for kind, row in old.items():
        assert key_paths(row) <= key_paths(new[kind]), kind
    old_run, new_run = (json.loads((out / "run.json").read_text()) for out in (OLD, resumed))
    assert key_paths(old_run) - key_paths(new_run) == GONE
