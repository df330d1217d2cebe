"""supervise.py: if this failed, faults would end a run, or change its losses."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ranks import Job, fork_ranks, mpi_command, none_left, start
from supervised_runs import (
    HANG_LIMIT,
    ONE_THREAD,
    STEPS,
    WORDS,
    actions,
    curve,
    decisions,
    fault,
    supervised,
)

# ---- Real runs -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_with_three_faults_is_the_run_without_any(tmp_path):
    """A killed rank, one asleep, a killed launcher: bitwise the same losses."""
    plan = [fault("kill", 1, 4), fault("hang", 0, 6), fault("launcher", 0, 9)]
    command = supervised(tmp_path, plan, mpi_command(2), "--tp", "2")
    outcome = start(command, 200, **ONE_THREAD)
    assert outcome.status == 0, outcome.out + outcome.err
    rows = decisions(tmp_path)
    named = [(row["evidence"]["kind"], *row["evidence"]["ranks"]) for row in rows[:2]]
    assert named == [("dead", 1), ("hang", 0)]
    assert [row["action"] for row in rows] == ["restart"] * 3 + ["pass the status on"]
    assert [row["evidence"]["iteration"] for row in rows[:3]] == [4, 6, 9]
    steps = [row["evidence"]["newest"] for row in rows]
    assert steps == sorted(steps)
    assert steps[-1] == STEPS
    assert outcome.out.count("supervisor: ") == 2 * len(rows)  # each start and each decision
    assert none_left(str(tmp_path)) == []
    straight = ["train.py", *WORDS, "--steps", str(STEPS), "--tp", "2", "--save-every", str(STEPS)]
    done = fork_ranks(2, *straight, "--out", str(tmp_path / "straight"))
    assert done.status == 0, done.err
    losses = curve(tmp_path / "run")
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert losses == curve(tmp_path / "straight")


@pytest.mark.slow
def test_a_step_that_always_fails_stops_the_run(tmp_path):
    outcome = start(supervised(tmp_path, fault("raise", 0, 3), []), 120, **ONE_THREAD)
    assert outcome.status == 1
    assert actions(tmp_path) == [("failed", "restart"), ("failed", "restart"), ("failed", "stop")]
    assert decisions(tmp_path)[0]["evidence"]["error"] == "ValueError: planned"
    assert decisions(tmp_path)[-1]["reason"] == "it failed 3 times in step 3"


@pytest.mark.parametrize("status", [143, 1, 137])
def test_a_mistake_stops_at_once_whatever_the_launcher_makes_of_its_status(tmp_path, status):
    """srun kills the other ranks and ends with 143; its ranks print into files of their own."""
    launcher = ["sh", "-c", f'"$@" 2>{tmp_path}/rank.log; exit {status}', "srun"]
    command = supervised(tmp_path, [], launcher, "--tp", "3")
    at = command.index("tests/supervised_worker.py")
    outcome = start([*command[:at], "train.py", *command[at + 2 :]], **ONE_THREAD)
    sentence = "error: tp(3) * pp(1) * dp(?) does not divide 1 rank"
    assert sentence in (tmp_path / "rank.log").read_text()
    assert sentence in outcome.out
    assert outcome.status == 2
    assert actions(tmp_path) == [("", "stop")]


def test_a_run_that_has_saved_is_stopped_early_whatever_the_launcher_says(tmp_path):
    """torchrun makes 1 of every status."""
    launcher = ["sh", "-c", '"$@" || exit 1', "launcher"]
    words = ("--stop-at-samples", "8")
    outcome = start(supervised(tmp_path, [], launcher, *words), **ONE_THREAD)
    assert outcome.status == 75, outcome.err
    assert actions(tmp_path) == [("", "pass the status on")]


@pytest.mark.slow
def test_a_mistake_and_a_diverged_run_are_not_started_again(tmp_path):
    command = supervised(tmp_path / "mistake", [], [], "--tp", "3")
    at = command.index("tests/supervised_worker.py")
    outcome = start([*command[:at], "train.py", *command[at + 2 :]], **ONE_THREAD)
    assert outcome.status == 2
    assert outcome.err.count("error: tp(3) * pp(1) * dp(?) does not divide 1 rank: start") == 1
    assert actions(tmp_path / "mistake") == [("", "stop")]
    command = supervised(tmp_path / "nan", [fault("nan", 0, 3)], [], "--set", "max_nan_steps=2")
    assert start(command, **ONE_THREAD).status == 2
    (row,) = decisions(tmp_path / "nan")
    assert (row["action"], row["evidence"]["finite"]) == ("stop", False)
    assert row["reason"].startswith("training has diverged")


@contextlib.contextmanager
def small_disk(folder: Path, room: int) -> Iterator[Path]:
    """A file system of 4 MB in that folder; a file fills it but for so many bytes."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)])
    if mounted.returncode:
        pytest.skip("this user cannot mount a file system")
    try:
        (folder / "filler").write_bytes(bytes((4 << 20) - room))
        yield folder / "filler"
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_waited_for(tmp_path):
    """A file system of 4 MB that another file fills."""
    disk = tmp_path / "run"
    with small_disk(disk, room=0) as filler:
        with Job(supervised(tmp_path, [], [], "--keep-last", "1"), tmp_path, **ONE_THREAD) as job:
            job.wait_for(lambda: "waiting for room: 0.0 MB free of 1.0" in job.text)
            assert "the disk is full" in job.text
            filler.unlink()
            assert job.status() == 0, job.text
        assert len(curve(disk)) == STEPS
        assert [row["action"] for row in decisions(tmp_path)] == [
            "wait for room on the disk",
            "pass the status on",
        ]


@pytest.mark.slow
@pytest.mark.parametrize("freed", [True, False])
def test_the_ranks_wait_for_room_for_the_last_save(tmp_path, freed):
    """For longer than the hang limit. Without room: no mistake, status 1."""
    disk = tmp_path / "run"
    with small_disk(disk, room=400_000) as filler:
        words = ["train.py", *WORDS, "--steps", "6", "--tp", "2", "--out", str(disk)]
        command = [*mpi_command(2), sys.executable, *words]
        with Job(command, tmp_path, **ONE_THREAD) as job:
            job.wait_for(lambda: "waits for room for its last checkpoint" in job.text)
            needed = json.loads((disk / "run.json").read_text())["checkpoint_bytes"]
            assert f"its last checkpoint, {needed / 1e6:.1f} MB" in job.text
            if freed:
                time.sleep(HANG_LIMIT + 2)
                filler.unlink()
                assert job.status() == 0, job.text
                assert [path.name for path in (disk / "checkpoints").iterdir()] == ["step_00000006"]
            else:
                job.send(signal.SIGTERM)
                assert job.status() == 1, job.text
                assert "error: training is complete, but step_00000006 could not" in job.text
                assert "Traceback" not in job.text
        assert not (disk / "hang").exists()


@pytest.mark.slow
def test_signals_reach_the_ranks_and_a_killed_supervisor_leaves_none(tmp_path):
    """Killed, it is started again and goes on; SIGTERM saves and ends it, with status 75."""
    command = supervised(tmp_path, [], mpi_command(2), "--tp", "2", "--steps", "100000")
    command[-1:] = ["100000", "--save-every", "100000"]
    run = tmp_path / "run"
    with Job(command, run, **ONE_THREAD) as job:
        job.wait_for(lambda: len(job.rows) > 1)
        ranks = psutil.Process(job.process.pid).children(recursive=True)
        job.send(signal.SIGKILL)
        job.status()
    with Job(command, run, **ONE_THREAD) as job:
        assert psutil.wait_procs(ranks, timeout=60)[1] == []
        job.wait_for(lambda: "resumed from" in job.text and len(job.rows) > 1)
        saved = [path.name for path in (run / "checkpoints").iterdir()]
        assert saved == [f"step_{job.rows[0]['iteration'] - 1:08d}"]
        job.send(signal.SIGTERM)
        assert job.status() == 75, job.text
        assert "stopped by SIGTERM" in job.text
    assert actions(tmp_path) == [("", "pass the status on")]  # the killed one has written none
    assert none_left(str(tmp_path)) == []


# ---- A job on fewer nodes ------------------------------------------------------------------------

# Slurm's commands in a job of three nodes, of which n2 starts no task; the ranks are lost.
SRUN = """#!/bin/sh
case "$*" in *--nodelist=n2*true) exit 1;; *true) exit 0;; esac
exit 137
"""
SCONTROL = "#!/bin/sh\nprintf 'n1\\nn2\\nn3\\n'\n"


def test_a_job_that_would_be_too_slow_on_fewer_nodes_is_queued(tmp_path):
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "2", "SLURM_RESTART_COUNT": "0"}
    job["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    words = [*WORDS, "--steps", "9", "--global-batch-size", "12", "--resume", "auto"]
    words += ["--hidden", "1024", "--layers", "8", "--seq-length", "512"]  # half again as long
    command = [sys.executable, "supervise.py", "--gpu", "cpu", "--max-slowdown", "1"]
    command += ["--", "srun", "python", "train.py", *words]
    outcome = start([*command, "--out", str(tmp_path / "run")], **job)
    assert outcome.status == 75, outcome.err
    (row,) = decisions(tmp_path)
    assert (row["action"], row["out"], row["used"]) == ("queue the job again", ["n2"], 0)
    why, slower = row["reason"].split("; ")
    assert why == "n2 cannot be used, and 0 nodes are spare"
    assert slower.startswith("on 2 nodes a step 1.")
    assert slower.endswith(" times as long, as predicted on cpu: above --max-slowdown 1")


def test_a_launcher_that_is_not_there_is_one_sentence(tmp_path):
    words = ["/nowhere/mpirun", "t.py", "--resume", "auto", "--out", str(tmp_path)]
    outcome = start([sys.executable, "supervise.py", "--", *words])
    assert (outcome.status, outcome.err.count("\n")) == (2, 1)
    assert outcome.err.startswith("error: cannot start /nowhere/mpirun: No")
