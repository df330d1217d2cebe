"""If this failed, a user would not know what a signal does, or wait for a run that does not end."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from ranks import ROOT

from base import errors
from benchmarks.faults import signals as moments
from distributed import stop_conditions
from distributed.stop_conditions import Signals, outlook
from trainer import Trainer
from watchdog.flight_recorder import FlightRecorder
from watchdog.monitor import Monitor


@pytest.mark.slow
@pytest.mark.parametrize("seed", [109, 111, 113, 118])
def test_a_signal_at_a_random_moment_is_answered_and_ends_the_run(seed):
    """All kinds of steps, all signals, one and two ranks; benchmarks/faults/signals.py sends forty.

    The drawn moments are three to seven seconds after the start.
    """
    result = moments.send(*moments.draw(seed), limit=120.0)
    assert result.wrong() == "", result.text[-3000:]


def wait_until(what) -> None:
    limit = time.monotonic() + 60
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.fixture
def signals(monkeypatch):
    """Handlers of this process whose lines and end are kept: `said`, `ended`."""
    monkeypatch.setattr(stop_conditions, "SECONDS_OF_ONE_SIGNAL", 0.05)
    made = Signals()
    made.said, made.ended = [], []
    made.have_met(made.ended.append, lambda line, about: made.said.append((line, about)))
    yield made
    made.close()


def test_the_first_signal_is_told_what_it_does_and_the_second_what_is_lost(signals):
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: len(signals.said) == 1)
    assert signals.said[0][0] == (
        "SIGUSR1: the run ends before its first step; a second SIGUSR1 ends it at once, without a "
        "save"
    )
    signals.explain(lambda: "the run saves after step 7", lambda: "the newest is step 5")
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: len(signals.said) == 2)
    assert signals.said[1][0].startswith("SIGTERM: the run saves after step 7; a second SIGTERM or")
    time.sleep(0.2)  # longer than one signal
    os.kill(os.getpid(), signal.SIGINT)
    wait_until(lambda: signals.ended)
    assert signals.said[2][0] == (
        "SIGINT as the second signal: ending at once, without a save; the newest is step 5"
    )
    assert signals.ended == [128 + signal.SIGINT]


@pytest.mark.parametrize(
    ("newest", "expected"),
    [
        (None, "no checkpoint was saved since the start, at step 7 now"),
        (5, "the newest checkpoint is step 5; 2 steps after it are lost"),
        (7, "the newest checkpoint is step 7, the last one done"),
    ],
)
def test_a_run_that_ends_without_a_save_says_what_of_it_is_saved(newest, expected):
    progress = None if newest is None else SimpleNamespace(iteration=newest)
    run = SimpleNamespace(
        done=SimpleNamespace(iteration=7), checkpoints=SimpleNamespace(newest=progress)
    )
    assert Trainer.describe_saved(run) == expected


def test_the_outlook_has_the_time_of_the_step():
    recorder = FlightRecorder()
    assert outlook(recorder).startswith("the run ends when it can save, at the latest after its")
    recorder.begin_step(1)
    assert outlook(recorder) == "the run saves and ends after step 1, which has taken 0 s so far"
    recorder.step_began -= 100.0
    recorder.end_step()
    recorder.begin_step(2)
    recorder.step_began -= 40.0
    assert outlook(recorder) == "the run saves and ends after step 2, in about 60 s"
    recorder.enter("evaluate")
    assert outlook(recorder).endswith("now: evaluate")
    recorder.enter("end")
    assert outlook(recorder) == "the run is over, and ends"


def test_one_line_of_all_ranks_is_printed(capfd):
    """Each rank of a job gets the signal."""
    monitor = Monitor.__new__(Monitor)
    monitor.said = set()
    rank = type("Rank", (), {"heard": 0.0})()
    for about in ("first", "first", "end"):
        monitor._handle(rank, {"say": f"a line on {about}", "about": about})
    assert capfd.readouterr().err.splitlines() == ["a line on first", "a line on end"]


# Runs a program, and sends SIGINT at its import number N after it has imported base.errors.
INTERRUPTED = """
import runpy, signal, sys

class Interrupts:
    left = int(sys.argv[1])

    def find_spec(self, name, path=None, target=None):
        if sys.excepthook is not sys.__excepthook__:
            Interrupts.left -= 1
            if Interrupts.left == 0:
                signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ROOT_PROGRAMS = ("check", "checkpoint", "plan", "rehearse", "runs", "sample", "supervise", "tune")
SCRIPTS = ("corpus", "eval_tasks", "plot_loss", "prepare_chats", "prepare_data")


@pytest.mark.parametrize("at", [2, 20])
@pytest.mark.parametrize("name", [*ROOT_PROGRAMS, *(f"scripts/{name}" for name in SCRIPTS)])
def test_ctrl_c_in_the_imports_of_a_program_is_no_traceback(name, at):
    """train.py keeps it until it can be answered."""
    command = [sys.executable, "-c", INTERRUPTED, str(at), f"{name}.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT), done.stderr
    assert (done.stdout, done.stderr) == ("", "")


def test_a_handler_that_is_installed_among_the_imports_stays():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hooks = sys.excepthook, sys.unraisablehook
    try:
        errors.begin_program()
        with errors.installed():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with errors.installed():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        sys.excepthook, sys.unraisablehook = hooks
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_a_destructor_ends_the_program():
    """Python ignores an exception there, and would go on."""
    code = "from base import errors\nimport signal\nerrors.begin_program()\n"
    code += "class A:\n  def __del__(self):\n    "
    code += "signal.raise_signal(signal.SIGINT)\n    print('', end='')\nA()\nprint('goes on')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          timeout=300)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


# Prints the collections of garbage that run in the imports and at the end.
COLLECTIONS = """
import gc, os
gc.set_threshold(10)
from base import errors
errors.begin_program()
with errors.installed():
    before = sum(x["collections"] for x in gc.get_stats())
    kept = [[] for _ in range(1000)]
    during = sum(x["collections"] for x in gc.get_stats()) - before
again = gc.isenabled()
class Cycle:
    def __del__(self):
        os.write(1, b"collected")
one = Cycle()
one.own = one
del one
print(during, again, gc.get_freeze_count() > 1000, flush=True)
"""


def test_no_garbage_is_collected_in_imports_and_at_the_end():
    """It took a quarter of the processor time of a start, in modules that are all kept."""
    command = [sys.executable, "-c", COLLECTIONS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 True True\n", "")
