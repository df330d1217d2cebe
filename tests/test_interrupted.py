"""A test run that is interrupted: if this failed, ranks of its tests would train on for hours."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ranks import ROOT

CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import leftovers

def pytest_configure(config):
    leftovers.end_with_this_process()
"""
# As a launcher does it: a process in a session of its own, which has started another one.
ENDLESS = """
import pathlib, subprocess, time

def test_endless(request):
    shell = "sleep 600 & echo $$ $! >PIDS.new; mv PIDS.new PIDS; wait"
    subprocess.Popen(["sh", "-c", shell], cwd=request.path.parent, start_new_session=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "1"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_what_the_tests_have_started_ends_with_them(tmp_path: Path, processes, number):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_endless.py").write_text(ENDLESS)
    command = [sys.executable, "-m", "pytest", "-n", processes, "--rootdir", ".", "-c", os.devnull]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as run:
        until = time.monotonic() + 120
        while not (tmp_path / "PIDS").exists():
            assert run.poll() is None, run.stdout.read()
            assert time.monotonic() < until
            time.sleep(0.05)
        started = [psutil.Process(int(pid)) for pid in (tmp_path / "PIDS").read_text().split()]
        run.send_signal(number)
        run.communicate(timeout=120)
    _gone, alive = psutil.wait_procs(started, timeout=60)
    for process in alive:
        process.kill()
    assert alive == []
