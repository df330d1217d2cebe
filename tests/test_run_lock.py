"""If this failed, two runs could write into one folder, or a killed one lock it for ever."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import Job, fork_one, mpirun

from base.errors import UserError
from distributed import run_lock
from distributed.early_end import node_name
from distributed.run_lock import RunLock, in_use

OPTIONS = (
    "--layers 1 --hidden 16 --heads 2 --seq-length 8 --vocab-size 50 --global-batch-size 4 "
    "--device cpu --log-every 1000000 "
)
HOLDER = """
import sys
from distributed.run_lock import RunLock
lock = RunLock(sys.argv[1])
print("taken", flush=True)
for line in sys.stdin:
    lock.release()
    print("released", flush=True)
"""


def holder(folder: Path, **environment: str) -> subprocess.Popen:
    """A process that has the lock of a folder; a line on its standard input releases it."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=os.environ | environment, **pipes)
    assert process.stdout.readline() == "taken\n"
    return process


def test_a_folder_that_another_process_uses(tmp_path):
    with holder(tmp_path, SLURM_JOB_ID="18") as other:
        assert in_use(str(tmp_path))
        where = rf"process {other.pid} on {node_name()} \(job 18\) since 20.*, and this is process"
        with pytest.raises(UserError, match=f"--out {tmp_path} is in use by {where} {os.getpid()}"):
            RunLock(str(tmp_path))
        other.stdin.write("go\n")
        other.stdin.flush()
        assert other.stdout.readline() == "released\n"
        assert not in_use(str(tmp_path))
        lock = RunLock(str(tmp_path))
        assert str(os.getpid()) in (tmp_path / ".lock").read_text()
        lock.release()
        lock.release()
        other.stdin.close()


def test_a_lock_of_another_user_is_not_taken_for_a_run(tmp_path, monkeypatch):
    def refuse(*given):
        raise PermissionError(errno.EACCES, "Permission denied")

    RunLock(str(tmp_path)).release()
    monkeypatch.setattr(run_lock, "open", refuse, raising=False)
    assert not in_use(str(tmp_path))


def test_without_file_locks_a_line_says_so(tmp_path, monkeypatch, capfd):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(run_lock.fcntl, "lockf", refuse)
    RunLock(str(tmp_path)).release()
    assert f"note: {tmp_path} has no file locks" in capfd.readouterr().err


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_lock.os, "pwrite", refuse)
    with pytest.raises(UserError, match=r"cannot write in .*: No space left on device"):
        RunLock(str(tmp_path))


@pytest.mark.usefixtures("ends")
def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder/.lock").mkdir(parents=True)
    for name in ("link", "pipe"):
        (tmp_path / name).mkdir()
    (tmp_path / "link/.lock").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe/.lock")
    for out in ("file", "file/under", "folder", "link", "pipe", "x" * 300):
        with pytest.raises(UserError, match=r"cannot write in .*: "):
            RunLock(str(tmp_path / out))
    assert (tmp_path / "file").read_text() == "x"


def test_a_second_run_is_refused_and_a_killed_one_is_followed_at_once(tmp_path):
    out = tmp_path / "out"
    words = [*OPTIONS.split(), "--out", str(out), "--save-every", "100"]
    first = [sys.executable, "train.py", *words, "--steps", "1000000"]
    with Job(first, out) as job:
        job.wait_for(lambda: (out / "checkpoints/step_00000100").exists())
        files = {path.name for path in out.iterdir()}
        refused = mpirun(2, "train.py", *words, "--steps", "2")
        assert refused.status == 2, refused.err
        where = f"process {job.process.pid} on {node_name()} since 20"
        assert f"error: --out {out} is in use by {where}" in refused.err
        assert "Traceback" not in refused.err
        assert {path.name for path in out.iterdir()} == files
        rows = len(job.rows)
        job.wait_for(lambda: len(job.rows) > rows)
        job.send(signal.SIGKILL)
        job.process.wait()
    more = ("--steps", "1000000", "--stop-at-samples", "1")
    followed = fork_one("train.py", *words, *more, "--resume", "auto")
    assert followed.status == 75, followed.err
    assert "resumed from" in followed.out
    assert (out / ".lock").read_text() == ""
