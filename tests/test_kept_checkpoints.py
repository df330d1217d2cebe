"""If this failed, checkpoints that are to be kept would be deleted, or surplus ones stay."""

import os

from checkpoint_worker import build_run, make, save_some
from ranks import fork_one

from checkpointing.state import Progress


def test_keep_last_and_keep_every(tmp_path):
    folder = save_some(tmp_path, 7, keep_last=2, keep_every=3)
    names = sorted(os.listdir(folder))
    assert names == [f"step_{step:08d}" for step in (3, 6, 7)]


def test_a_run_from_the_beginning_moves_an_earlier_ones_checkpoints_aside(tmp_path):
    options = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq-length", "8"]
    options += ["--vocab-size", "50", "--save-every", "2", "--out", str(tmp_path)]
    for extra in (["--steps", "2"], ["--steps", "4", "--resume", "auto"], ["--steps", "2"]):
        done = fork_one("train.py", *options, *extra)
        assert done.status == 0, done.err
    assert os.listdir(tmp_path / "checkpoints") == ["step_00000002"]
    moved = next(tmp_path.glob("checkpoints.*"))
    assert sorted(os.listdir(moved)) == ["step_00000002", "step_00000004"]


def test_an_earlier_checkpoint_of_the_same_step_is_replaced(tmp_path):
    folder = save_some(tmp_path)
    (folder / "step_00000001/rank_00000.h5").write_bytes(b"")
    checkpoints = build_run(make(tmp_path))[1]
    checkpoints.after_step(Progress(1, 8))
    checkpoints.close()
    assert os.listdir(folder) == ["step_00000001"]
    assert build_run(make(tmp_path, resume="auto"))[1].resume().iteration == 1
