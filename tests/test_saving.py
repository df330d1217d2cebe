"""If this failed, checkpoints would be late, or a save that fails would end or damage a run."""

import errno
import math
import os
import re
import threading
from types import SimpleNamespace

import pytest
import torch
from checkpoint_worker import build_run, make, run
from ranks import fork_ranks

from base.errors import SaveError, UserError
from checkpointing import file_format, folders, save, writer
from checkpointing.index import Index
from checkpointing.state import Progress
from distributed.stop_conditions import RequestedAction


def test_a_full_disk_is_found_before_writing(tmp_path, monkeypatch):
    lines = []
    checkpoints = build_run(make(tmp_path), lines)[1]
    checkpoints.after_step(Progress(1, 8))
    checkpoints.close()
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
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


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_state_that_a_rule_lacks_is_saved_in_the_precision_of_the_rest(tmp_path, optimizer):
    """Muon's matrices have no exp_avg_sq, Adafactor's vectors no col_var: zeros, also in fp64."""
    options = {"optimizer": optimizer, "precision": "fp64"}
    first = run(make(tmp_path, **options), before=2, after=2)
    with Index(str(tmp_path / "checkpoints/step_00000002")) as index:
        assert set(map(str, index.dtypes.values())) == {"float64"}
    second = run(make(tmp_path, resume="auto", **options), before=0, after=2)
    assert second["numbers"] == first["numbers"]


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


def test_rank_0_decides_about_the_minutes_without_an_exchange_of_its_own(tmp_path, monkeypatch):
    """Its answer travels with the statistics of the step, which are exchanged anyway."""
    run = make(tmp_path / "run", save_every=0, save_every_minutes=10.0)
    checkpoints = build_run(run)[1]
    monkeypatch.setattr(checkpoints, "_broadcast", lambda answer: pytest.fail("an exchange"))
    checkpoints.after_step(Progress(1, 8))
    monkeypatch.setattr(save.time, "monotonic", lambda: checkpoints.saves.began + 601)
    assert checkpoints.requested_action == RequestedAction.SAVE
    checkpoints.is_rank_0 = False
    assert checkpoints.requested_action == RequestedAction.GO_ON
    monkeypatch.undo()
    words = "--layers 1 --hidden 16 --heads 2 --seq-length 8 --vocab-size 32 --steps 3 --device cpu"
    words += f" --global-batch-size 4 --save-every-minutes 1e-9 --out {tmp_path / 'ranks'}"
    outcome = fork_ranks(2, "train.py", *words.split())
    assert outcome.status == 0, outcome.err
    assert re.findall(r"^saved .*step_0+(\d):", outcome.out, re.MULTILINE) == ["1", "2", "3"]


# ------------------------------------------------------------------------------------------------
# Another course
# ------------------------------------------------------------------------------------------------


def save_steps(config, lines=None, steps=()) -> save.Checkpointer:
    """A run that resumes as its configuration says, and saves at these steps."""
    checkpoints = build_run(config, lines)[1]
    checkpoints.resume()
    for step in steps:
        checkpoints.after_step(Progress(step, 8 * step))
    checkpoints.close()
    return checkpoints


def saved_steps(folder) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def test_going_back_sets_the_later_steps_aside(tmp_path):
    """The checkpoint that was saved last stays, and --resume auto takes it."""
    folder, lines = tmp_path / "checkpoints", []
    save_steps(make(tmp_path, keep_last=4), steps=range(7, 13))
    back = make(tmp_path, keep_last=2, resume=str(folder / "step_00000010"))
    checkpoints = save_steps(back)
    assert saved_steps(folder) == [9, 10, 11, 12]  # nothing is moved before it saves
    (tmp_path / "checkpoints.1").mkdir()  # an earlier course left it
    checkpoints = save_steps(back, lines, [11])
    assert saved_steps(folder) == [10, 11]
    assert saved_steps(tmp_path / "checkpoints.2") == [11, 12]
    assert lines[1] == (
        f"set aside in {folder}.2: step_00000012, step_00000011; this run continues from "
        f"{folder}/step_00000010"
    )
    checkpoints.after_step(Progress(12, 96))  # the same course: deletes 10, sets nothing aside
    checkpoints.close()
    assert saved_steps(folder) == [11, 12]
    assert not (tmp_path / "checkpoints.3").exists()
    assert build_run(make(tmp_path, resume="auto"))[1].resume().iteration == 12


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_course_from_elsewhere_or_of_weights_sets_all_aside(tmp_path, weights_only):
    own, lines = tmp_path / "run/checkpoints", []
    save_steps(make(tmp_path / "other"), steps=[5])
    save_steps(make(tmp_path / "run"), steps=[4, 5, 6])
    source = own / "step_00000005" if weights_only else tmp_path / "other"
    extra = {"resume": str(source), "load_weights_only": weights_only, "keep_last": 2}
    first = 1 if weights_only else 6
    save_steps(make(tmp_path / "run", **extra), lines, [first])
    assert saved_steps(own) == [first]
    assert saved_steps(tmp_path / "run/checkpoints.1") == [4, 5, 6]
    assert any(line.startswith(f"set aside in {own}.1: step_00000006, ") for line in lines)


def test_a_damaged_later_checkpoint_is_set_aside(tmp_path):
    folder, lines = tmp_path / "checkpoints", []
    save_steps(make(tmp_path), steps=[1, 2, 3])
    os.truncate(folder / "step_00000003/rank_00000.h5", 100)
    save_steps(make(tmp_path, resume="auto", keep_last=1), lines, [4])
    assert saved_steps(folder) == [4]
    assert saved_steps(tmp_path / "checkpoints.1") == [3]
    (line,) = [line for line in lines if line.startswith("set aside")]
    assert line.endswith("/step_00000002; step_00000003 cannot be loaded")


def test_a_stop_saves_beside_the_same_step_of_another_course(tmp_path):
    """Stopped before its first step: what is there under that name is not this run's state."""
    save_steps(make(tmp_path / "other"), steps=[5])
    save_steps(make(tmp_path / "run"), steps=[5])
    resume = make(tmp_path / "run", resume=str(tmp_path / "other"), save_every=0)
    state, checkpoints = build_run(resume)
    checkpoints.resume()
    for p in state.stages.parameters():
        p.data.fill_(0.5)
    assert checkpoints.save_to_stop(Progress(5, 40))
    assert saved_steps(tmp_path / "run/checkpoints.1") == [5]
    with Index(str(tmp_path / "run/checkpoints/step_00000005")) as index:
        assert (index.read_whole("weights", "blocks.0.mlp.up.weight") == 0.5).all()


# ------------------------------------------------------------------------------------------------
# Links, and what cannot be deleted
# ------------------------------------------------------------------------------------------------


def test_symbolic_links_are_removed_and_not_what_they_point_to(tmp_path):
    """Also leftovers of an earlier version, and a link in the place of the next checkpoint."""
    folder, elsewhere, lines = tmp_path / "checkpoints", tmp_path / "elsewhere", []
    save_steps(make(tmp_path), steps=[1, 2])
    (folder / "step_00000001").rename(elsewhere)
    (folder / "step_00000001").symlink_to(elsewhere)
    (folder / ".step_00000001.removed").symlink_to(elsewhere)
    (folder / ".step_00000002.removed").symlink_to(tmp_path / "nowhere")
    (folder / ".step_00000004.removed").write_text("x")
    (folder / "step_00000003").symlink_to(tmp_path / "nowhere")
    checkpoints = build_run(make(tmp_path, keep_last=2), lines)[1]
    assert "removed 3 unfinished checkpoints" in lines[0]
    (folder / ".step_00000001.removed").symlink_to(elsewhere)
    checkpoints.after_step(Progress(3, 24))
    checkpoints.close()
    assert sorted(os.listdir(folder)) == ["step_00000002", "step_00000003"]
    assert (elsewhere / "manifest.json").exists()


def test_a_surplus_checkpoint_that_cannot_be_deleted_does_not_fail_the_save(tmp_path, monkeypatch):
    lines = []
    checkpoints = build_run(make(tmp_path, keep_last=1), lines)[1]
    checkpoints.after_step(Progress(1, 8))
    checkpoints.close()

    def refuse(folder):
        raise OSError(39, "Directory not empty", folder)

    monkeypatch.setattr(folders, "remove", refuse)
    checkpoints.after_step(Progress(2, 16))
    checkpoints.finish(Progress(2, 16))
    assert "cannot delete the surplus checkpoints" in lines[-2]
    assert "saved " in lines[-1]


# ------------------------------------------------------------------------------------------------
# The last save
# ------------------------------------------------------------------------------------------------


def fail_writes(patch, times: int) -> list[int]:
    """Let the next writes of elements fail; returns a list that counts them."""
    failures, write = [], os.pwrite

    def full(descriptor, data, at):
        if len(failures) >= times:
            return write(descriptor, data, at)
        failures.append(at)
        raise OSError(28, "No space left on device")

    patch.setattr(file_format.os, "pwrite", full)
    return failures


def test_a_run_whose_last_save_fails_twice_is_an_error(tmp_path, monkeypatch):
    """And no mistake of the user: its status is 1."""
    lines = []
    checkpoints = build_run(make(tmp_path), lines)[1]
    checkpoints.after_step(Progress(1, 8))
    checkpoints.close()
    failures = fail_writes(monkeypatch, 2)
    monkeypatch.setattr(save, "SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(save, "SECONDS_FOR_ROOM", 0.0)
    checkpoints.after_step(Progress(2, 16), last=True)
    with pytest.raises(SaveError) as caught:
        checkpoints.finish(Progress(2, 16))
    assert len(failures) == 2
    assert str(caught.value) == (
        "training is complete, but step_00000002 could not be saved: the newest is step_00000001"
    )
    assert caught.value.status == 1
    assert "training goes on" not in lines[-1]
    checkpoints.finish(Progress(2, 16))  # the disk has room again
    assert saved_steps(tmp_path / "checkpoints") == [1, 2]


@pytest.mark.parametrize("failures", [2, 4])
def test_the_last_save_waits_for_room(tmp_path, monkeypatch, failures):
    """The disk becomes free, or a quota is raised. One line says that the save waits."""
    lines = []
    checkpoints = build_run(make(tmp_path), lines)[1]
    fail_writes(monkeypatch, failures)
    monkeypatch.setattr(save, "SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(save, "SECONDS_BETWEEN_ATTEMPTS", 0.0)
    places = []
    monkeypatch.setattr(checkpoints.recorder, "enter", places.append)
    checkpoints.after_step(Progress(1, 8), last=True)
    checkpoints.finish(Progress(1, 8))
    assert saved_steps(tmp_path / "checkpoints") == [1]
    (line,) = [line for line in lines if "waits for room" in line]
    assert "for up to 30 minutes" in line
    assert places.count("wait for room") == failures - 1  # each is progress for the watchdog


def test_a_stop_ends_the_wait_for_room(tmp_path, monkeypatch):
    checkpoints = build_run(make(tmp_path))[1]
    fail_writes(monkeypatch, 99)
    monkeypatch.setattr(save, "SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(save, "SECONDS_BETWEEN_ATTEMPTS", math.inf)
    checkpoints.after_step(Progress(1, 8), last=True)
    answers = [False, False, True]
    with pytest.raises(SaveError, match="could not be saved: no checkpoint has been saved so far"):
        checkpoints.finish(Progress(1, 8), lambda: answers.pop(0))
    assert answers == []


# ------------------------------------------------------------------------------------------------
# A network file system that shows files late
# ------------------------------------------------------------------------------------------------


def show_late(monkeypatch, mode: str, answers: list) -> None:
    """The next times that a shard is opened in this mode, each answer stands for the file."""
    pauses = []

    def late_open(path, how, **options):
        if how == mode and str(path).endswith(".h5") and answers:
            answer = answers.pop(0)
            if isinstance(answer, OSError):
                raise answer
            path = answer
        return open(path, how, **options)

    monkeypatch.setattr(writer, "open", late_open, raising=False)
    monkeypatch.setattr(writer.time, "sleep", pauses.append)
    monkeypatch.setattr(writer, "SECONDS_TO_APPEAR", 3600.0)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("mode", ["wb", "rb"])
def test_a_folder_and_sizes_that_are_seen_late(tmp_path, monkeypatch, mode, asynchronous):
    """No folder at first; then a stale one; then a size before it was written."""
    (tmp_path / "short").write_text("x")
    answers = [OSError(errno.ENOENT, "not there"), OSError(errno.ESTALE, "stale")]
    if mode == "rb":
        answers = [answers[0], tmp_path / "short", tmp_path / "short"]
    lines = []
    checkpoints = build_run(make(tmp_path, async_save=asynchronous), lines)[1]
    show_late(monkeypatch, mode, answers)
    checkpoints.after_step(Progress(1, 8))
    checkpoints.close()
    assert answers == []
    assert lines[0].startswith(f"saved {tmp_path}/checkpoints/step_00000001:")


@pytest.mark.parametrize(
    ("mode", "answer", "problem"),
    [
        ("wb", OSError(errno.ENOENT, "not there"), "not there"),
        ("rb", "short", "rank_00000.h5 has 1 bytes here, "),
        ("wb", OSError(errno.EACCES, "Permission denied"), "Permission denied"),
    ],
)
def test_a_folder_that_never_appears_or_another_error_fails_the_save(
    tmp_path, monkeypatch, mode, answer, problem
):
    (tmp_path / "short").write_text("x")
    lines, answers = [], [tmp_path / answer if mode == "rb" else answer] * 5
    checkpoints = build_run(make(tmp_path), lines)[1]
    show_late(monkeypatch, mode, answers)
    if "denied" not in problem:  # which is not waited for
        monkeypatch.setattr(writer, "SECONDS_TO_APPEAR", -1.0)
    checkpoints.after_step(Progress(1, 8))
    checkpoints.close()
    assert len(answers) == 4
    assert lines[0].startswith("step_00000001 was not saved")
    assert problem in lines[0]
    assert os.listdir(tmp_path / "checkpoints") == []
