"""--after-save: if this failed, a command would miss a checkpoint, stop a run or learn a secret."""

import os
import signal
import sys
import threading
import time

import pytest
from checkpoint_worker import build_run, make
from ranks import Job, fork_one, fork_ranks

from base.child_environment import plain_environment
from checkpointing import file_format
from checkpointing.after_save import AfterSave
from checkpointing.state import Progress

RUN = "train.py --layers 1 --hidden 32 --heads 4 --seq-length 16 --vocab-size 61 --device cpu "
RUN += "--global-batch-size 4 --save-every 2 --out"


def words_of(out, steps: int, command: str, *more: str) -> list[str]:
    return [*RUN.split(), str(out), "--steps", str(steps), *more, "--after-save", command]


def statuses(out) -> dict[str, str]:
    return {p.name[:13]: p.read_text().strip() for p in out.glob("after_save/*.status")}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_it_runs_when_the_checkpoint_is_whole_and_published(asynchronous, tmp_path, monkeypatch):
    """Not while it is written. The next step does not wait for it."""
    go = threading.Event()
    write_run = file_format._write_run

    def wait_and_write(*arguments):
        assert go.wait(60)
        return write_run(*arguments)

    if asynchronous:
        monkeypatch.setattr(file_format, "_write_run", wait_and_write)
    wait = f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
    command = f'ls "$TRINE_CHECKPOINT" >{tmp_path}/seen; {wait}'
    lines: list[str] = []
    config = make(tmp_path / "run", async_save=asynchronous, after_save=command)
    checkpoints = build_run(config, lines)[1]
    checkpoints.after_step(Progress(1, 8))
    if asynchronous:
        assert not (tmp_path / "run" / "after_save").exists(), "the checkpoint is not written yet"
        go.set()
    checkpoints.close()
    assert checkpoints.writer.after_save.steps == [1], "close does not wait for the command"
    checkpoints.after_step(Progress(2, 16))
    checkpoints.close()
    assert checkpoints.writer.after_save.steps == [1, 2]
    assert any(
        "2 checkpoints wait for it" in line
        for line in [*lines, *checkpoints.writer.after_save.notes()]
    )
    (tmp_path / "go").touch()
    checkpoints.finish_commands(False, lambda: False)
    assert set((tmp_path / "seen").read_text().split()) >= {"manifest.json", "index.h5"}
    assert checkpoints.writer.after_save.steps == []
    assert statuses(tmp_path / "run") == {"step_00000001": "0", "step_00000002": "0"}


def test_keep_last_leaves_what_a_command_needs(tmp_path):
    command = f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; test -d $TRINE_CHECKPOINT"
    checkpoints = build_run(make(tmp_path / "run", keep_last=1, after_save=command), [])[1]
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2, 3):
        checkpoints.after_step(Progress(step, 8 * step))
        checkpoints.close()
    assert len(os.listdir(folder)) == 3
    (tmp_path / "go").touch()
    checkpoints.finish_commands(False, lambda: False)
    assert statuses(tmp_path / "run") == {f"step_0000000{step}": "0" for step in (1, 2, 3)}
    checkpoints.after_step(Progress(4, 32))
    checkpoints.close()
    checkpoints.finish_commands(False, lambda: False)
    assert os.listdir(folder) == ["step_00000004"]


def test_what_a_command_inherits(tmp_path, monkeypatch):
    """Names that lead it to its programs and files; no key or token, no place among ranks."""
    for name in (
        "WANDB_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "RANK",
        "PMI_RANK",
        "SLURM_PROCID",
    ):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("LC_TIME", "C")
    assert plain_environment().keys() >= {"PATH", "HOME", "LC_TIME"} & os.environ.keys()
    commands = AfterSave(
        f"env >{tmp_path}/env; cat; pwd; echo out; echo err >&2; exit 7", str(tmp_path)
    )
    checkpoint = tmp_path / "checkpoints" / "step_00000005"
    commands.announce(5)
    commands.add(str(checkpoint))
    while commands.steps:
        time.sleep(0.01)
    [note] = commands.notes()
    log = tmp_path / "after_save" / "step_00000005.log"
    assert note.startswith("note: --after-save of step_00000005 ended with status 7 after ")
    assert note.endswith(f": err ({log})")
    assert log.read_text().splitlines() == [os.getcwd(), "out", "err"], "standard input is empty"
    lines = (tmp_path / "env").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines)
    assert "secret" not in found.values()
    own = {name: value for name, value in found.items() if name.startswith("TRINE_")}
    expected = {"TRINE_CHECKPOINT": str(checkpoint), "TRINE_STEP": "5", "TRINE_OUT": str(tmp_path)}
    assert own == expected


def test_a_failure_is_a_note_and_the_run_ends_well(tmp_path):
    """On two ranks: the command runs on one of them, for each checkpoint once."""
    command = f"echo $TRINE_STEP >>{tmp_path}/ran; [ $TRINE_STEP = 4 ] || exit 3"
    words = words_of(tmp_path / "run", 4, command, "--no-watchdog", "--pp", "1")
    done = fork_ranks(2, *words)
    assert done.status == 0, done.err
    assert (tmp_path / "ran").read_text().split() == ["2", "4"]
    assert "note: --after-save of step_00000002 ended with status 3" in done.out
    assert "--after-save of step_00000004: done in" in done.out
    assert statuses(tmp_path / "run") == {"step_00000002": "3", "step_00000004": "0"}
    again = fork_one(*words_of(tmp_path / "run", 6, command, "--resume", "auto"))
    assert again.status == 0, again.err
    assert (tmp_path / "ran").read_text().split() == ["2", "4", "6"], "a failure is not repeated"


def test_an_early_stop_and_a_kill(tmp_path):
    """After a kill of the run a command goes on. One that was cut off runs again at a resume; one
    that still runs does not.
    """
    out = tmp_path / "run"
    wait = f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
    command = f"echo $TRINE_STEP $$ >>{tmp_path}/ran; {wait}"
    ran = tmp_path / "ran"
    with Job([sys.executable, *words_of(out, 100_000, command)], out) as job:
        job.wait_for(lambda: ran.exists() and (out / "checkpoints" / "step_00000004").exists())
        job.send(signal.SIGKILL)  # the run alone
        assert job.status() == -signal.SIGKILL
    [(step, process)] = [line.split() for line in ran.read_text().splitlines()]
    assert step == "2"
    os.kill(int(process), 0)  # it runs, without the run
    resume = ["--resume", "auto", "--stop-at-samples", "1", "--save-every", "1000000"]
    # The first command holds its lock: that of step 4, which had not begun, begins.
    done = fork_one(*words_of(out, 100_000, f"echo $TRINE_STEP again >>{ran}", *resume))
    assert done.status == 75, done.err
    again = [line.split()[0] for line in ran.read_text().splitlines() if "again" in line]
    assert "4" in again
    assert "2" not in again
    os.kill(os.getpgid(int(process)) * -1, signal.SIGKILL)  # as Slurm does with the job
    done = fork_one(*words_of(out, 100_000, f"echo $TRINE_STEP third >>{ran}", *resume))
    assert done.status == 75, done.err
    third = [line.split()[0] for line in ran.read_text().splitlines() if "third" in line]
    assert third[0] == "2"
    assert "--after-save runs again, since it was cut off: step_00000002" in done.out


def test_an_early_stop_waits_a_little_and_an_end_until_a_signal(tmp_path, monkeypatch):
    lines: list[str] = []
    wait = f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
    checkpoints = build_run(make(tmp_path / "run", after_save=wait), lines)[1]
    for step in (1, 2):
        checkpoints.after_step(Progress(step, 8 * step))
        checkpoints.close()
    monkeypatch.setattr("checkpointing.save.SECONDS_AT_A_STOP", 0.3)
    checkpoints.finish_commands(True, lambda: True)
    said = "note: --after-save of step_00000001 goes on without the run; step_00000002 wait for the"
    assert lines[-1].startswith(said)
    asked: list[int] = []

    def stop_requested() -> bool:
        asked.append(1)
        return len(asked) == 3

    checkpoints.finish_commands(False, stop_requested)
    assert len(asked) == 3
    assert lines[-1].startswith(said)
    (tmp_path / "go").touch()
    checkpoints.finish_commands(False, lambda: False)
    assert [line for line in lines if "done in" in line]
