"""When checkpoints are saved, and what becomes of a save that fails."""

import dataclasses
import os
import threading

import checkpoint_worker as worker
import pytest
import torch
from checkpoint_worker import build_run, make

from checkpointing import file_format, load, save
from checkpointing.load import Progress
from config import validation
from config.messages import UserError


def test_a_full_disk_is_known_before_writing(tmp_path, monkeypatch):
    said = []
    checkpoints = build_run(make(tmp_path), said)[1]
    checkpoints.after_step(Progress(1, 8))
    checkpoints.close()
    usage = dataclasses.make_dataclass("Usage", ["free"])
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: usage(1000))
    checkpoints.after_step(Progress(2, 16))
    assert "step_00000002 was not saved" in said[-1]
    assert "MB, and 0.0 MB are free" in said[-1]
    assert "training goes on, the newest is step_00000001" in said[-1]
    assert os.listdir(tmp_path / "checkpoints") == ["step_00000001"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_write_that_fails_is_said_at_the_next_step_and_the_run_goes_on(
    tmp_path, monkeypatch, asynchronous
):
    said = []
    checkpoints = build_run(make(tmp_path, async_save=asynchronous), said)[1]
    with monkeypatch.context() as patch:

        def full(descriptor, data, at):
            raise OSError(28, "No space left on device")

        patch.setattr(file_format.os, "pwrite", full)
        checkpoints.after_step(Progress(1, 8))
        if checkpoints._thread:
            checkpoints._thread.join()
    checkpoints.after_step(Progress(2, 16))
    assert "step_00000001 was not saved" in said[0]
    assert "rank 0" in said[0]
    assert "No space left on device" in said[0]
    checkpoints.close()
    assert os.listdir(tmp_path / "checkpoints") == ["step_00000002"]


def test_a_mistake_of_ours_in_the_background_ends_the_run(tmp_path, monkeypatch):
    checkpoints = build_run(make(tmp_path))[1]
    monkeypatch.setattr(file_format, "write_shard", lambda *a: 1 / 0)
    checkpoints.after_step(Progress(1, 8))
    with pytest.raises(ZeroDivisionError):
        checkpoints.close()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot write in"):
        build_run(make(tmp_path))


def test_training_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    """While the write is held up the step goes on, on other values; those of the save stay."""
    go, put = threading.Event(), file_format._put
    monkeypatch.setattr(file_format, "_put", lambda *a: (go.wait(30), put(*a))[1])
    pieces, checkpoints = build_run(make(tmp_path))
    weights = [p.detach().clone() for p in pieces.stages.parameters()]
    checkpoints.after_step(Progress(1, 8))
    for p in pieces.stages.parameters():
        p.data.add_(1.0)
    assert checkpoints._thread.is_alive()
    go.set()
    checkpoints.close()
    with file_format.Index(str(tmp_path / "checkpoints/step_00000001")) as index:
        for p, weight in zip(pieces.stages.parameters(), weights):
            whole = torch.from_numpy(index.whole("weights", p.spec.name))
            rows = weight.narrow(p.spec.dim or 0, 0, whole.shape[p.spec.dim or 0])
            assert torch.equal(whole, rows)


def test_saving_by_the_clock(tmp_path, monkeypatch):
    checkpoints = build_run(make(tmp_path, save_every=0, save_every_minutes=10.0))[1]
    now = [checkpoints._saved_at]
    monkeypatch.setattr(save.time, "monotonic", lambda: now[0])
    for step in range(1, 9):
        now[0] += 180
        checkpoints.after_step(Progress(step, 8 * step), last=step == 7)
        checkpoints.close()
    saved = [load.file_format.step_of(f) for f in file_format.list_checkpoints(checkpoints.parent)]
    assert sorted(saved) == [4, 7]


def test_the_interval_that_loses_least():
    """Against the loss itself: pauses, and half an interval with every failure."""
    pause, mean = 40.0, 7.3 * 24 * 3600
    lost = {t: pause / t + (t + pause) / 2 / mean for t in range(100, 20000, 10)}
    best = min(lost, key=lost.get)
    assert save.best_interval(pause, 1.0, mean) == pytest.approx(best, rel=0.02)
    assert save.best_interval(pause, 1e5, mean) == 1e5


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"keep_every": 5, "save_every": 1}, "--keep-every 5 needs --keep-last"),
        ({"load_weights_only": True}, "--load-weights-only needs --resume"),
        ({"keep_last": 2}, "--keep-last needs --save-every"),
    ],
)
def test_options_that_do_not_fit(values, words):
    with pytest.raises(UserError, match=words):
        validation.check(worker.options(values), 1)
