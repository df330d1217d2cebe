"""When checkpoints are saved, and what happens after a save that fails."""

import dataclasses
import os
import threading

import checkpoint_worker as worker
import pytest
import torch
from checkpoint_worker import build_run, make

from checkpointing import file_format, folders, save
from checkpointing.index import Index
from checkpointing.load import Progress
from config import validation
from config.messages import UserError


def test_a_full_disk_is_found_before_writing(tmp_path, monkeypatch):
    lines = []
    checkpoints = build_run(make(tmp_path), lines)[1]
    checkpoints.after_step(Progress(1, 8))
    checkpoints.close()
    usage = dataclasses.make_dataclass("Usage", ["free"])
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: usage(1000))
    checkpoints.after_step(Progress(2, 16))
    assert "step_00000002 was not saved" in lines[-1]
    assert "MB, and 0.0 MB are free" in lines[-1]
    assert "training goes on, the newest is step_00000001" in lines[-1]
    assert os.listdir(tmp_path / "checkpoints") == ["step_00000001"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_write_that_fails_is_printed_at_the_next_step_and_the_run_continues(
    tmp_path, monkeypatch, asynchronous
):
    lines = []
    checkpoints = build_run(make(tmp_path, async_save=asynchronous), lines)[1]
    with monkeypatch.context() as patch:

        def full(descriptor, data, at):
            raise OSError(28, "No space left on device")

        patch.setattr(file_format.os, "pwrite", full)
        checkpoints.after_step(Progress(1, 8))
        if checkpoints._thread:
            checkpoints._thread.join()
    checkpoints.after_step(Progress(2, 16))
    assert "step_00000001 was not saved" in lines[0]
    assert "rank 0" in lines[0]
    assert "No space left on device" in lines[0]
    checkpoints.close()
    assert os.listdir(tmp_path / "checkpoints") == ["step_00000002"]


def test_a_bug_in_the_background_ends_the_run(tmp_path, monkeypatch):
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
    """While the write is blocked, training changes the weights; the saved values do not change."""
    go, write_run = threading.Event(), file_format._write_run

    def wait_and_write(*arguments):
        assert go.wait(60)
        return write_run(*arguments)

    monkeypatch.setattr(file_format, "_write_run", wait_and_write)
    state, checkpoints = build_run(make(tmp_path))
    weights = [p.detach().clone() for p in state.stages.parameters()]
    checkpoints.after_step(Progress(1, 8))
    for p in state.stages.parameters():
        p.data.add_(1.0)
    assert checkpoints._thread.is_alive()
    go.set()
    checkpoints.close()
    with Index(str(tmp_path / "checkpoints/step_00000001")) as index:
        for p, weight in zip(state.stages.parameters(), weights):
            whole = torch.from_numpy(index.read_whole("weights", p.spec.name))
            rows = weight.narrow(p.spec.dim or 0, 0, whole.shape[p.spec.dim or 0])
            assert torch.equal(whole, rows)


def test_saving_every_so_many_minutes(tmp_path, monkeypatch):
    checkpoints = build_run(make(tmp_path, save_every=0, save_every_minutes=10.0))[1]
    now = [checkpoints._last_time]
    monkeypatch.setattr(save.time, "monotonic", lambda: now[0])
    for step in range(1, 9):
        now[0] += 180
        checkpoints.after_step(Progress(step, 8 * step), last=step == 7)
        checkpoints.close()
    saved = [folders.step_of(f) for f in folders.list_checkpoints(checkpoints.parent)]
    assert sorted(saved) == [4, 7]


def test_the_interval_that_loses_least():
    """Against the time lost: the pauses, and half an interval at every failure."""
    pause, mean = 40.0, 7.3 * 24 * 3600
    lost = {t: pause / t + (t + pause) / 2 / mean for t in range(100, 20000, 10)}
    best = min(lost, key=lost.get)
    assert save.best_interval(pause, 1.0, mean) == pytest.approx(best, rel=0.02)
    assert save.best_interval(pause, 1e5, mean) == 1e5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keep_every": 5, "save_every": 1}, "--keep-every 5 needs --keep-last"),
        ({"load_weights_only": True}, "--load-weights-only needs --resume"),
        ({"keep_last": 2}, "--keep-last needs --save-every"),
    ],
)
def test_options_that_do_not_go_together(values, message):
    with pytest.raises(UserError, match=message):
        validation.check(worker.options(values), 1)
