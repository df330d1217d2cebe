"""If this failed, a signal, a limit or a switch would lose steps or leave processes behind."""

import errno
import json
import math
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import checkpoint_worker as worker
import psutil
import pytest
from observed_steps import observed_step
from ranks import (
    OPENMPI_LIBRARY,
    Job,
    fork_one,
    mpi_command,
    none_left,
    openmpi_command,
    start,
)

import trainer
from checkpoint import check_files
from checkpointing import file_format, folders, save
from checkpointing.index import Index
from checkpointing.save import Checkpointer
from checkpointing.state import Progress
from config import validation
from config.run_options import Run
from distributed import stop_conditions
from distributed.stop_conditions import RequestedAction, Signals, StopConditions
from telemetry.saving import Saving
from zero import StepResult

SHAPE = "--layers 2 --hidden 32 --heads 4 --seq-length 32 --vocab-size 64 --global-batch-size 8"
WORDS = f"train.py {SHAPE} --device cpu --steps 100000 --lr-schedule constant".split()
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
GO_ON, SAVE, SAVE_AND_STOP = RequestedAction


def run(launcher: list[str], out, *words: str, **environment: str) -> Job:
    command = [*launcher, sys.executable, *WORDS, "--out", str(out), *words]
    return Job(command, out, **ONE_THREAD, **environment)


def ctrl_c(job: Job) -> None:
    """SIGINT to the whole group, as from a terminal; the job was started with setsid."""
    os.killpg(job.process.pid, signal.SIGINT)


def shared_memory(job: Job) -> set[Path]:
    """The files of MPICH's shared memory that the ranks have open, also without a name."""
    maps = [
        Path(f"/proc/{process.pid}/maps").read_text()
        for process in psutil.Process(job.process.pid).children(recursive=True)
    ]
    return {Path(name) for text in maps for name in re.findall(r"/dev/shm/mpich_shm_\w+", text)}


def saved_steps(out) -> list[int]:
    """Steps of the checkpoints in a run's folder; checks the contents of all their files."""
    found = folders.list_checkpoints(str(out / "checkpoints"))
    return [check_files(folder, contents=True)["step"] for folder in found]


def check_stopped(job: Job, reason: str) -> int:
    """The run printed why it stopped and saved its last step; that step."""
    last = job.rows[-1]["iteration"]
    assert f"stopped by {reason} on rank " in job.text, job.text[-4000:]
    assert f"after step {last} of 100000; all is saved" in job.text
    assert saved_steps(job.out)[0] == last
    assert "Traceback" not in job.text
    return last


# ---- mpirun --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_save_switch_saves_and_goes_on_and_a_signal_stops_and_the_next_run_resumes(tmp_path):
    switch, out = tmp_path / "save", tmp_path / "run"
    with run(mpi_command(2), out, "--tp", "2", "--save-switch", str(switch)) as job:
        job.wait_for(lambda: len(job.rows) > 1)
        for times in (1, 2):
            switch.touch()
            job.wait_for(lambda: not switch.exists())
            assert len(saved_steps(out)) == times
        seen = job.rows[-1]["iteration"]
        job.wait_for(lambda: job.rows[-1]["iteration"] > seen + 1)
        job.send(signal.SIGTERM)
        assert job.status() == 75
        stopped = check_stopped(job, "SIGTERM")
        assert len(saved_steps(out)) == 3

    kill = tmp_path / "kill"
    words = ["--dp", "2", "--resume", "auto", "--kill-switch", str(kill)]
    with run(mpi_command(2), out, *words) as job:
        job.wait_for(lambda: len(job.rows) > 1 and "resumed from" in job.text)
        assert job.rows[0]["iteration"] == stopped + 1
        kill.touch()
        assert job.status() == 75
        check_stopped(job, f"--kill-switch {kill}")

    outcome = start([*mpi_command(2), sys.executable, *WORDS, *words], 60)
    assert outcome.status == 2
    assert outcome.err.count(f"error: --kill-switch {kill} exists: remove it to train") == 1


def run_in_a_long_step(launcher: list[str], out, *words: str) -> Job:
    """A run whose first step takes an hour, without work."""
    paced = ["tests/paced_worker.py", "3600", *WORDS[1:], "--out", str(out), *words]
    return Job([*launcher, sys.executable, *paced], out, **ONE_THREAD)


def send_until_ended(job) -> None:
    """Send a second SIGTERM. On a busy machine a rank may read the first one so late that the
    second counts as the same signal; then a third one ends the job.
    """
    while job.process.poll() is None:
        job.send(signal.SIGTERM)
        time.sleep(2.0)


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once_and_leaves_the_newest_checkpoint(tmp_path):
    """In a step of an hour, at whose end the first signal would take effect."""
    with run(["setsid", *mpi_command(2)], tmp_path, "--tp", "2", "--save-every", "1") as job:
        job.wait_for(lambda: "saved " in job.text)
        files = shared_memory(job)
        assert files
        ctrl_c(job)
        assert job.status() == 75
        check_stopped(job, "SIGINT")
        assert not any(file.exists() for file in files)
    before = saved_steps(tmp_path)
    with run_in_a_long_step(mpi_command(2), tmp_path, "--tp", "2", "--resume", "auto") as job:
        job.wait_for(lambda: job.text.count("a long pause") == 2)
        ranks = psutil.Process(job.process.pid).children(recursive=True)
        job.send(signal.SIGTERM)
        time.sleep(4.0)  # more than SECONDS_OF_ONE_SIGNAL
        send_until_ended(job)
        assert psutil.wait_procs(ranks, timeout=30)[1] == []
        assert job.status() not in (0, 75)
    assert "SIGTERM as the second signal: ending at once, without a save" in job.text
    assert "stopped by" not in job.text.partition("resumed from")[2]
    assert job.rows == []  # the step did not end
    assert saved_steps(tmp_path) == before


@pytest.mark.slow
def test_open_mpi(tmp_path, openmpi):
    with run(openmpi_command(2), tmp_path, "--pp", "2", **OPENMPI_LIBRARY) as job:
        job.wait_for(lambda: len(job.rows) > 1)
        job.send(signal.SIGUSR1)
        assert job.status() == 75
        check_stopped(job, "SIGUSR1")
        assert "2 ranks by mpirun of Open MPI" in job.text


# ---- Other launchers -----------------------------------------------------------------------------


@pytest.mark.slow
def test_torchrun_saves_on_sigterm_but_exits_with_its_own_status(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, *WORDS, "--out", str(tmp_path), "--tp", "2"]
    with Job(command, tmp_path, **ONE_THREAD) as job:
        job.wait_for(lambda: len(job.rows) > 1)
        job.send(signal.SIGTERM)
        assert job.status() == 1
        assert "all is saved" in job.text
        assert saved_steps(tmp_path) == [job.rows[-1]["iteration"]]


@pytest.mark.slow
def test_a_killed_torchrun_leaves_no_rank_and_no_monitor(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with Job([*torchrun, *WORDS, "--out", str(tmp_path)], tmp_path, **ONE_THREAD) as job:
        job.wait_for(lambda: len(job.rows) > 1)
        started = psutil.Process(job.process.pid).children(recursive=True)
        assert len(started) == 3  # two ranks and the monitor
        job.send(signal.SIGKILL)
        job.status()
        left = psutil.wait_procs(started, timeout=60)[1]
        for process in left:
            process.kill()
        assert left == []
    assert none_left(str(tmp_path)) == []
    assert "the launcher has ended: ending at once, without a save" in job.text
    assert not (tmp_path / "hang").exists()  # no rank is reported as the culprit


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_and_twice(tmp_path):
    """From the first line of train.py on; the second run is in a step of an hour."""
    with run(["setsid"], tmp_path / "early") as job:
        status = Path(f"/proc/{job.process.pid}/status")

        def blocked() -> int:
            return int(re.search(r"SigBlk:\s*(\w+)", status.read_text())[1], 16)

        # Blocked during the first imports, for some tenths of a second; or that has passed.
        job.wait_for(lambda: blocked() & 1 << (signal.SIGINT - 1) or job.text)
        ctrl_c(job)
        assert job.status() == 75
        assert "stopped by SIGINT on rank 0" in job.text
        assert "Traceback" not in job.text
    with run_in_a_long_step(["setsid"], tmp_path / "twice") as job:
        job.wait_for(lambda: "a long pause" in job.text)
        ctrl_c(job)
        time.sleep(4.0)  # more than SECONDS_OF_ONE_SIGNAL, also on a busy machine
        assert job.process.poll() is None
        ctrl_c(job)
        assert job.status() == 128 + signal.SIGINT
        assert "SIGINT as the second signal: ending at once, without a save" in job.text
        assert "Traceback" not in job.text
        assert not (tmp_path / "twice" / "hang").exists()


@pytest.mark.slow
def test_plain_python_stops_after_an_evaluation_without_another_step(tmp_path):
    words = ["--eval-samples", "4096", "--eval-every", "3", "--save-weights-only"]
    with run([], tmp_path, *words, "--save-every", "100000") as job:
        job.wait_for(lambda: len(job.rows) == 3)
        time.sleep(0.2)  # the evaluation takes seconds
        job.send(signal.SIGUSR1)
        assert job.status() == 75
        assert [row["iteration"] for row in job.rows] == [1, 2, 3, 3]
    # A run that saves weights only saves everything when it stops, so that it can be resumed.
    # Forked: of the quarter of a minute a busy machine leaves some for steps. These mostly sleep.
    words = ["--out", str(tmp_path), "--resume", "auto", "--exit-after-minutes", "0.25"]
    outcome = fork_one("tests/paced_worker.py", "0.3", *WORDS[1:], *words)
    assert outcome.status == 75, outcome.err
    rows = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()))
    assert rows[0]["iteration"] == 4
    ended = SimpleNamespace(rows=rows, text=outcome.out + outcome.err, out=tmp_path)
    check_stopped(ended, "--exit-after-minutes 0.25")


# ---- Without ranks -------------------------------------------------------------------------------


def test_sigint_and_sigterm_count_as_one_kind_of_signal(monkeypatch):
    """torchrun sends them in this order; SIGUSR1 before announces SIGTERM."""
    monkeypatch.setattr(stop_conditions, "SECONDS_OF_ONE_SIGNAL", 0.05)
    ended = []
    signals = Signals(ended.append)
    try:
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            assert ended == []
            os.kill(os.getpid(), number)
            time.sleep(0.2)
        limit = time.monotonic() + 30
        while not ended:
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert (signals.first, ended) == (signal.SIGUSR1, [128 + signal.SIGTERM])
    finally:
        signals.close()


def test_sigterm_ends_a_meeting_after_another_signal_too():
    """A rank that was asked for a save, and then to end: its main thread waits for the end."""
    program = (
        "import os, signal, time; "
        "from distributed.launch import Launch; from distributed.stop_conditions import Signals; "
        "signals = Signals(); launch = Launch('python', 0, 2); signals.follow(launch); "
        "os.kill(os.getpid(), signal.SIGUSR1); time.sleep(0.2); "
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.2); print('went on')"
    )
    done = start([sys.executable, "-c", program], timeout=60)
    assert done.status == 128 + signal.SIGTERM, done
    assert "SIGTERM before all ranks have met: ending at once" in done.err
    assert "went on" not in done.out


def checkpointer(out, said: list[str], **extra) -> Checkpointer:
    config = validation.check(worker.options({"out": str(out)} | extra), 1)
    pieces = trainer.build(config)
    return Checkpointer(config, pieces.factory.mesh, pieces.optimizer, print_line=said.append)


def test_a_stop_waits_for_the_save_under_way_and_saves_all(tmp_path, monkeypatch):
    """The first save is held until the second has been asked for."""
    put, said, released = file_format._write_run, [], threading.Event()
    monkeypatch.setattr(file_format, "_write_run", lambda *a: (released.wait(30), put(*a))[1])
    checkpoints = checkpointer(tmp_path, said, save_every=1, save_weights_only=True)
    checkpoints.after_step(Progress(1, 8))
    assert checkpoints.saving
    threading.Timer(0.5, released.set).start()
    assert checkpoints.save_to_stop(Progress(2, 16))
    assert saved_steps(tmp_path) == [2, 1]
    with Index(str(tmp_path / "checkpoints" / "step_00000002")) as index:
        assert len(index.kinds) == 3
    # A checkpoint that exists is not written again; one that was removed is.
    count = len(said)
    assert checkpoints.save_to_stop(Progress(2, 16))
    assert len(said) == count
    folders.remove(str(tmp_path / "checkpoints" / "step_00000002"))
    assert checkpoints.save_to_stop(Progress(2, 16))
    assert saved_steps(tmp_path) == [2, 1]


def test_a_stop_that_cannot_be_saved(tmp_path, monkeypatch):
    said = []
    checkpoints = checkpointer(tmp_path, said)
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    assert not checkpoints.save_to_stop(Progress(3, 24))
    assert "step_00000003 was not saved" in said[-1]
    assert "training goes on" not in said[-1]


def test_the_time_limit_includes_the_next_step(monkeypatch):
    """The slowest of the last steps, and the seconds that the caller expects, must still fit."""
    now = [0.0]
    began = psutil.Process().create_time()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: began + now[0])
    conditions = StopConditions(
        Run(exit_after_minutes=1.0), SimpleNamespace(first=None), first=False
    )
    actions = []
    moments = {0: None, 5: 0.0, 15: 0.0, 17: 0.0, 38: None, 39: 0.0, 40: 0.0}
    for moment, ahead in moments.items():  # an evaluation of 21 s; of the steps one of 10 s
        now[0] = float(moment)
        actions.append(conditions.requested_action(ahead))
    assert actions == [GO_ON] * 7
    now[0] = 49.5
    assert conditions.requested_action(ahead=0.0) == GO_ON
    now[0] = 50.5
    assert conditions.requested_action(ahead=0.0) == SAVE_AND_STOP
    assert conditions.reason == "--exit-after-minutes 1"
    again = StopConditions(Run(exit_after_minutes=1.0), SimpleNamespace(first=None), first=False)
    now[0] = 30.0
    assert again.requested_action(ahead=29.0) == GO_ON
    assert again.requested_action(ahead=31.0) == SAVE_AND_STOP


def test_a_save_switch_that_cannot_be_removed_is_ignored_from_then_on(tmp_path, monkeypatch, capfd):
    file = tmp_path / "save"
    conditions = StopConditions(Run(save_switch=str(file)), SimpleNamespace(first=None), first=True)
    file.mkdir()  # not a file
    assert conditions.requested_action() == GO_ON
    file.rmdir()
    file.touch()
    assert conditions.requested_action() == SAVE
    file.unlink()  # somebody was faster
    conditions.saved()
    file.touch()
    assert conditions.requested_action() == SAVE

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(stop_conditions.os, "remove", refuse)
    conditions.saved()
    sentence = f"note: cannot remove --save-switch {file}: Permission denied; it is ignored"
    assert sentence in capfd.readouterr().out
    assert conditions.requested_action() == GO_ON


def test_a_save_requested_before_the_first_step_is_begun_after_the_first_good_one(tmp_path):
    """The file is there when the run starts, and the loss of step 1 is not finite."""
    file, requests = tmp_path / "save", []
    file.touch()
    conditions = StopConditions(Run(save_switch=str(file)), SimpleNamespace(first=None), first=True)

    def after_step(done, last, requested):
        requests.append((done.iteration, requested, file.exists()))

    checkpoints = SimpleNamespace(after_step=after_step, saving=False, close=lambda: None)
    saving = Saving(checkpoints, conditions)
    run = object.__new__(trainer.Trainer)
    run.done, run.last_step, run.conditions = Progress(), 3, conditions
    run._announce = lambda: None
    run.stats_exchange = SimpleNamespace(largest_request=conditions.requested_action)
    run.observers = [saving]
    run._next_step = lambda iteration: observed_step(iteration, is_last=iteration == 3)

    def train(step):
        step.request(conditions.requested_action())
        loss = math.nan if step.iteration == 1 else 1.0
        saving.after_step(step, StepResult(1.0, loss, False))

    run._train_or_skip = train
    assert run.run()
    assert requests == [(2, True, True), (3, False, False)]
