"""The server of forked programs: if this failed, one death would fail all tests after it, or an
interrupted run of the tests would leave processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import psutil
import pytest
from fork_server import Forked
from ranks import ROOT

SMALL = ("json",)  # imported by the servers of these tests


def forked(folder: Path, text: str) -> Forked:
    program = folder / "program.py"
    program.write_text(text)
    with open(folder / "out", "w") as out:
        files = out.fileno(), out.fileno()
        return Forked([str(program)], dict(os.environ), *files, SMALL, folder)


def test_a_server_that_dies_fails_its_programs_and_no_later_ones(tmp_path):
    lost = forked(tmp_path, "import time; time.sleep(60)")
    server = fork_server._servers[SMALL][1]
    server.kill()
    server.wait()
    with pytest.raises(RuntimeError, match="fork server"):
        lost.wait(30)
    os.kill(lost.pid, signal.SIGKILL)
    after = forked(tmp_path, "print('again'); raise SystemExit(3)")
    assert after.wait(60) == 3
    assert (tmp_path / "out").read_text() == "again\n"


def test_large_requests_arrive_whole(tmp_path):
    """A request holds the whole environment, which is longer than one read of the connection."""
    program = tmp_path / "program.py"
    program.write_text("import os; print(len(os.environ['LONG']))")
    with open(tmp_path / "out", "w") as out:
        environment = {**os.environ, "LONG": "x" * 300_000}
        process = Forked([str(program)], environment, out.fileno(), out.fileno(), SMALL, tmp_path)
    assert process.wait(60) == 0
    assert (tmp_path / "out").read_text() == "300000\n"


ENDS = {
    "at its last line": "print('done')",
    "with a status": "print('done'); raise SystemExit(3)",
    "with a sentence": "raise SystemExit('no such layout')",
    "with nothing": "raise SystemExit",
    "by an exception": "import sys; sys.tracebacklimit = 0; raise ValueError('no')",
    "by Ctrl-C": "import sys; sys.tracebacklimit = 0; raise KeyboardInterrupt",
    "at once": "import os; print('lost'); os._exit(5)",
    "after its handlers and threads": """
import atexit, threading
atexit.register(print, "handler")
threading.Timer(0.2, print, ["thread"]).start()
""",
}


@pytest.mark.parametrize("way", ENDS)
def test_a_fork_ends_as_under_the_interpreter(way, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", ENDS[way]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert forked(tmp_path, ENDS[way]).wait(60) == ended.returncode
    assert (tmp_path / "out").read_bytes() == ended.stdout


OWNER = """
import os, subprocess, sys, time
sys.path[:0] = ["tests", "."]
from fork_server import Forked
with open(sys.argv[2], "w") as out:
    process = Forked([sys.argv[1]], dict(os.environ), out.fileno(), out.fileno(), ("json",))
time.sleep(60)
"""


def test_programs_and_what_they_started_end_with_the_tests(tmp_path):
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(
        "import os, subprocess, time\n"
        "sleeper = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print(os.getpid(), sleeper.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(program), str(out)], cwd=ROOT)
    until = time.monotonic() + 60
    while not (out.exists() and out.read_text().endswith("\n")):
        assert time.monotonic() < until
        time.sleep(0.05)
    pids = [int(word) for word in out.read_text().split()]
    owner.kill()
    owner.wait()
    _gone, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], 30)
    assert alive == []
