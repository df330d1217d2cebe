"""One run at a time in an --out folder: the lock, when it is stale, and what a second run does."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from ranks import Job, fork_one, mpirun, start

from config.messages import UserError
from distributed import run_lock
from distributed.run_lock import Owner, RunLock, this_process

OPTIONS = (
    "--layers 1 --hidden 16 --heads 2 --seq-length 8 --vocab-size 50 --global-batch-size 4 "
    "--device cpu --log-every 1000000 "
)
FAR = {"node": "far", "processes": "another kernel", "job": "17", "starts": "0"}


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(run_lock, "SECONDS_TO_WATCH", 0.4)
    monkeypatch.setattr(run_lock, "SECONDS_BETWEEN_LOOKS", 0.02)
    monkeypatch.setattr(run_lock, "SECONDS_TO_RENEW", 0.05)


def write(folder: Path, renewals: int = 0, **changes) -> Owner:
    """A lock of this process, but for the changes."""
    owner = this_process()._replace(**changes)
    folder.mkdir(exist_ok=True)
    body = json.dumps(owner._asdict() | {"renewals": renewals})
    (folder / ".lock").write_bytes(body.encode().ljust(run_lock.BYTES))
    return owner


def take_and_release(folder: Path) -> None:
    lock = RunLock(str(folder), pytest.fail)
    assert json.loads((folder / ".lock").read_text())["pid"] == os.getpid()
    lock.release()
    assert not (folder / ".lock").exists()


def check_in_use(folder: Path, *parts: str) -> None:
    before = (folder / ".lock").read_bytes()
    with pytest.raises(UserError) as caught:
        RunLock(str(folder), pytest.fail)
    for part in (f"--out {folder} is in use by", f"process {os.getpid()} on", *parts):
        assert part in str(caught.value)
    assert "renewals" not in str(caught.value)
    assert (folder / ".lock").read_bytes() == before


def test_stale_on_this_node(tmp_path, capfd):
    """A process that is gone, one whose number is used again, a zombie; the file empty."""
    take_and_release(tmp_path / "new")
    child = subprocess.Popen([sys.executable, "-c", ""])
    started = run_lock.start_time(child.pid)
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    for changes in ({"pid": child.pid, "started": started}, {"started": 1}, {"pid": 2**22 + 1}):
        write(tmp_path, **changes)
        take_and_release(tmp_path)
    child.wait()
    (tmp_path / ".lock").touch()
    take_and_release(tmp_path)
    assert "watching" not in capfd.readouterr().out  # none of these took time


def test_a_process_that_runs_on_this_node(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    parent = os.getppid()
    owner = write(tmp_path, pid=parent, started=run_lock.start_time(parent))
    check_in_use(tmp_path, f"process {parent} on {owner.node} (job 18) since {owner.since}, and ")
    # Slurm starts a job again only after its end, also on this node.
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    check_in_use(tmp_path, f"process {parent} on {owner.node}")


def test_of_another_node(tmp_path, monkeypatch, capfd):
    write(tmp_path, **FAR)
    take_and_release(tmp_path)
    assert "process" in capfd.readouterr().out  # watched, and silent
    (tmp_path / ".lock").write_bytes(b'{"renewals": 1, "node": 5}')
    take_and_release(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    capfd.readouterr()
    write(tmp_path, **FAR)
    take_and_release(tmp_path)
    assert capfd.readouterr().out == ""  # the same job, started again


def test_of_another_node_that_renews_it(tmp_path, monkeypatch):
    """It is renewed after the second look, by the sleep between two looks."""
    looks = []

    def renew_at_the_second(seconds):
        looks.append(seconds)
        if len(looks) == 2:
            write(tmp_path, renewals=1, **FAR)

    write(tmp_path, **FAR)
    monkeypatch.setattr(run_lock.time, "sleep", renew_at_the_second)
    with pytest.raises(UserError, match=r"is in use by process \d+ on far \(job 17\) since"):
        RunLock(str(tmp_path), pytest.fail)
    assert len(looks) == 2


def test_released_while_it_is_watched(tmp_path, monkeypatch):
    write(tmp_path, **FAR)
    monkeypatch.setattr(run_lock.time, "sleep", lambda seconds: (tmp_path / ".lock").unlink())
    take_and_release(tmp_path)


def test_released_between_two_looks(tmp_path, monkeypatch):
    """NFS tells of a file that another node has removed as late as it is read, or written."""
    reads, read, writes, write_at = [], Path.read_bytes, [], os.pwrite

    def vanish(path):
        reads.append(path)
        if len(reads) == 2:
            path.unlink()
        return read(path)

    def stale(*arguments):
        writes.append(arguments)
        if len(writes) == 1:
            (tmp_path / ".lock").unlink()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return write_at(*arguments)

    write(tmp_path, **FAR)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "read_bytes", vanish)
    monkeypatch.setattr(run_lock.os, "pwrite", stale)
    lock = RunLock(str(tmp_path), pytest.fail)
    monkeypatch.undo()
    assert len(reads) >= 2
    assert len(writes) >= 2
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    lock.release()


def test_an_owner_whose_lock_was_taken_over_ends(tmp_path, capfd):
    ended = threading.Event()
    statuses = []

    def end(status):
        statuses.append(status)
        ended.set()
        lock.release()  # as Context.end_all_ranks does

    lock = RunLock(str(tmp_path), end)
    write(tmp_path, **FAR)
    assert ended.wait(60)
    lock.release()
    assert statuses == [1]
    assert f"error: --out {tmp_path} was taken over by process" in capfd.readouterr().err
    assert json.loads((tmp_path / ".lock").read_text())["node"] == "far"


def test_it_is_renewed(tmp_path):
    lock, path = RunLock(str(tmp_path), pytest.fail), tmp_path / ".lock"
    while json.loads(path.read_text() or "{}").get("renewals", 0) < 3:
        pass
    assert path.stat().st_size == run_lock.BYTES
    lock.release()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder/.lock").mkdir(parents=True)
    for name in ("link", "pipe"):
        (tmp_path / name).mkdir()
    (tmp_path / "link/.lock").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe/.lock")
    for out in ("file", "file/under", "folder", "link", "pipe", "x" * 300):
        with pytest.raises(UserError, match=r"cannot write in .*: [A-Z]"):
            RunLock(str(tmp_path / out), pytest.fail)
    assert (tmp_path / "file").read_text() == "x"


RACE = """
import os, sys
from config.messages import UserError
from distributed.run_lock import RunLock
go, hold, (result, write) = os.pipe(), os.pipe(), os.pipe()
def race():
    os.close(go[1]); os.close(hold[1]); os.read(go[0], 1)
    try:
        RunLock(sys.argv[1], os._exit)
        os.write(write, b"won\\n")
    except UserError as error:
        os.write(write, b"lost\\n" if "is in use by process" in str(error) else b"failed\\n")
    os.read(hold[0], 1); os._exit(0)  # it lives until all have decided
for _ in range(8):
    if os.fork() == 0:
        race()
os.close(go[0]); os.close(go[1]); os.close(write)
with open(result) as file:
    print(*sorted(next(file).strip() for _ in range(8)))
"""


def test_of_many_that_start_at_once_one_wins(tmp_path):
    """Eight processes at a stale lock, ten times."""
    for number in range(10):
        write(tmp_path / str(number), started=1)
        command = [sys.executable, "-c", RACE, str(tmp_path / str(number))]
        done = start(command, timeout=120)
        assert done.out.split() == ["lost"] * 7 + ["won"], done.err


def test_a_second_run_is_refused_and_a_killed_one_is_followed_at_once(tmp_path):
    out = tmp_path / "out"
    words = [*OPTIONS.split(), "--out", str(out), "--save-every", "100"]
    first = [sys.executable, "train.py", *words, "--steps", "1000000"]
    with Job(first, out) as job:
        job.wait_for(lambda: (out / "checkpoints/step_00000100").exists())
        node, files = this_process().node, {path.name for path in out.iterdir()}
        refused = mpirun(2, "train.py", *words, "--steps", "2")
        assert refused.status == 2, refused.err
        assert f"error: --out {out} is in use by process {job.process.pid} on {node} since 20" in (
            refused.err
        )
        assert "Traceback" not in refused.err
        assert {path.name for path in out.iterdir()} == files
        rows = len(job.rows)
        job.wait_for(lambda: len(job.rows) > rows)
        job.send(signal.SIGKILL)
        job.process.wait()
    assert (out / ".lock").exists()
    followed = fork_one("train.py", *words, "--steps", "3", "--resume", "auto")
    assert followed.status == 0, followed.err
    assert "watching" not in followed.out
    assert "resumed from" in followed.out
    assert not (out / ".lock").exists()
