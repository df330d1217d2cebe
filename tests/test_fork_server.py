"""The server of forked programs: if this failed, one death would fail all tests after it, or an
interrupted run of the tests would leave processes."""

import os
import shutil
import signal
import subprocess
import sys
import threading
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
    server = fork_server._servers[SMALL].process
    server.kill()
    server.wait()
    with pytest.raises(RuntimeError, match="fork server"):
        lost.wait(30)
    os.kill(lost.pid, signal.SIGKILL)
    after = forked(tmp_path, "print('again'); raise SystemExit(3)")
    assert after.wait(60) == 3
    assert (tmp_path / "out").read_text() == "again\n"


BROKEN = {
    "a package that is not there": ("import no_such_module", "No module named 'no_such_module'"),
    "a syntax error": ("def broken(:", "SyntaxError"),
    "an exception": ("raise ValueError('of an engine file')", "ValueError: of an engine file"),
    "killed in its imports": ("import os; os.kill(os.getpid(), 9)", "status -9: silent"),
    "its end": ("raise SystemExit(7)", "status 7: silent"),
    "a thread": (
        "from threading import Timer\nlate = Timer(60, print)\nlate.daemon = True\nlate.start()",
        "a module has started threads",
    ),
}


@pytest.mark.parametrize("why", BROKEN)
def test_a_server_that_cannot_import_fails_its_programs_and_says_why(why, tmp_path, monkeypatch):
    """A mistake in a file of the engine made the tests wait for ever, without a word."""
    source, sentence = BROKEN[why]
    name = f"broken_{list(BROKEN).index(why)}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setattr(fork_server, "ROOT", tmp_path)  # the folder that a server imports from
    shutil.copy(fork_server.__file__, tmp_path / "fork_server.py")
    monkeypatch.setattr(fork_server, "__file__", str(tmp_path / "fork_server.py"))
    ended = rf"(?s)^the fork server has ended, .*{sentence}"  # not: it has not forked in 300 s
    with open(tmp_path / "out", "w") as out, pytest.raises(RuntimeError, match=ended):
        Forked(["x.py"], dict(os.environ), out.fileno(), out.fileno(), (name,), tmp_path)


def test_a_server_that_is_killed_between_request_and_fork(tmp_path):
    """As by the kernel when memory is used up. It is stopped first, so that it cannot fork."""
    forked(tmp_path, "pass").wait(60)
    server = fork_server._servers[SMALL].process
    server.send_signal(signal.SIGSTOP)
    killer = threading.Timer(1.0, server.kill)
    killer.start()
    with pytest.raises(RuntimeError, match="status -9"):
        forked(tmp_path, "pass")
    killer.join()
    assert forked(tmp_path, "print('again')").wait(60) == 0


def test_a_server_that_never_forks_is_ended(tmp_path, monkeypatch):
    forked(tmp_path, "pass").wait(60)
    server = fork_server._servers[SMALL].process
    server.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(fork_server, "SECONDS_TO_FORK", 1.0)
    with pytest.raises(RuntimeError, match="has not forked in 1 s"):
        forked(tmp_path, "pass")
    assert server.poll() == -signal.SIGKILL


def test_an_exception_in_a_fork_before_its_program_is_among_its_output(tmp_path):
    with open(tmp_path / "out", "w") as out:
        files = out.fileno(), out.fileno()
        process = Forked(["x.py"], dict(os.environ), *files, SMALL, tmp_path / "nowhere")
    assert process.wait(60) == 1
    assert "FileNotFoundError" in (tmp_path / "out").read_text()
    assert forked(tmp_path, "print('again')").wait(60) == 0, "the server goes on"


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
