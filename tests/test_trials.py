"""One trial of the tuner: if this failed, a failure would end the search or leave processes."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
import ranks

from architecture import model_stats
from config import command_line
from costs import hardware
from tools.tuner import search_space, trials
from tools.tuner.trials import Runner, TrialStore, classify

FAKE = f"{sys.executable} {Path(__file__).with_name('fake_trainer.py')} {{ranks}}"
SHAPE = "--layers 4 --hidden 64 --heads 4 --seq-length 16 --vocab-size 100 --global-batch-size 16"


@pytest.fixture
def candidate(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(trials.PROGRAM).parent))
    given = {"tp": [2], "pp": [2], "micro_batch_size": [1], "recompute": ["none"], "zero": [1]}
    config = command_line.parse(SHAPE.split())
    found, _, _ = search_space.candidates(config, hardware.load("cpu"), 8, given)
    return found[0]


def run(candidate, folder, monkeypatch, **failures):
    monkeypatch.setenv("FAKE_FAILURES", json.dumps(failures))
    return trials.run(candidate, Runner(FAKE, folder), 0)


def test_a_trial_that_ran(candidate, tmp_path, monkeypatch):
    trial = run(candidate, tmp_path, monkeypatch)
    assert (trial.status, trial.reason) == ("ok", "")
    assert len(trial.seconds) == 3
    assert trial.median == pytest.approx(sorted(trial.seconds)[1])
    assert 0 < trial.spread < 0.01
    assert trial.peak_memory == [1e9, 1e9]
    flops_per_second = trial.tflops_model * 1e12 * 8
    flops = model_stats.model_flops(candidate.config.model, 16)
    assert flops_per_second == pytest.approx(flops / trial.median)
    assert trial.config["layout"]["tp"] == 2
    assert "--tp 2" in trial.command


def test_every_failure_is_a_result_with_its_reason(candidate, tmp_path, monkeypatch):
    expected = {
        "oom": "MemoryError",
        "crash": "RuntimeError: planted",
        "diverged": "the loss is nan at step 3",
    }
    for failure, reason in expected.items():
        trial = run(candidate, tmp_path / failure, monkeypatch, **{failure: {"tp": 2}})
        assert trial.status == failure
        assert reason in trial.reason
        assert trial.seconds == []


# SIGINT arrives while Popen has taken its lock, or in a destructor, which drops exceptions.
INTERRUPTED = """
import os, signal, subprocess, sys
from pathlib import Path
from tools.tuner import session, trials

class Lock:
    def __init__(self, lock):
        self.lock, self.release = lock, lock.release

    def acquire(self, blocking=True):
        taken = self.lock.acquire(blocking)
        os.kill(os.getpid(), signal.SIGINT)
        return taken

    __enter__ = acquire

    def __exit__(self, *exception):
        self.release()

class Popen(subprocess.Popen):
    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        if sys.argv[1] == "lock":
            self._waitpid_lock = Lock(self._waitpid_lock)

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

subprocess.Popen = Popen
session.raise_on_signals()
try:
    trials.execute(["sleep", {"lock": "600", "del": "0"}[sys.argv[1]]], Path(sys.argv[2]), 0, 600.0)
except session.StoppedBySignal:
    print("stopped")
"""


@pytest.mark.parametrize("moment", ["lock", "del"])
def test_a_signal_at_a_bad_moment_is_not_lost(moment, tmp_path):
    """The search would wait for ever for the lock, or go on and ignore all further signals."""
    words = [sys.executable, "-c", INTERRUPTED, moment, str(tmp_path / "log")]
    assert ranks.start(words, 60).out == "stopped\n"


@pytest.mark.parametrize(
    ("status", "log", "verdict", "reason"),
    [
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "oom", ""),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "oom", ""),
        (137, "", "oom", "killed from outside"),
        (-9, "", "oom", "killed from outside"),
        (
            9,
            "... WITH THE EXIT STRING: Killed (signal 9)\nSee the FAQ",
            "oom",
            "killed from outside",
        ),
        (9, "ended by itself", "crash", "status 9: ended by itself"),
        (6, "T: DEAD: rank 1 on a, pid 7\n  memory\nSee the FAQ", "crash", "DEAD: rank 1 on a"),
        (2, "error: tp(3) does not divide heads(4)\n", "rejected", "tp(3) does not divide heads"),
        (1, "Traceback\nValueError: odd\n", "crash", "status 1: ValueError: odd"),
        (6, "", "crash", "status 6: no output"),
        (0, "", "crash", "after 0 of 5 steps"),
        (None, "", "hang", "before the first step"),
    ],
)
def test_verdicts(status, log, verdict, reason, tmp_path):
    found = classify(status, log, tmp_path, 5, 10.0)
    assert found[0] == verdict
    assert reason in found[1]


def test_a_loss_that_is_not_finite_is_divergence_whatever_the_status(tmp_path):
    rows = [{"iteration": i, "loss": math.inf if i == 2 else 1.0, "seconds": 1.0} for i in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"ite')
    assert classify(0, "", tmp_path, 2, 10.0)[:2] == ("diverged", "the loss is inf at step 2")
    assert classify(1, "out of memory", tmp_path, 2, 10.0)[0] == "diverged"


def test_the_store_goes_on_after_a_torn_line(candidate, tmp_path, monkeypatch):
    path = tmp_path / "trials.jsonl"
    store = TrialStore(path)
    trial = run(candidate, tmp_path / "run", monkeypatch)
    store.add(trial)
    store.add(dataclasses.replace(trial, tag="again"))
    with open(path, "a") as file:
        file.write('{"key": "torn')
    again = TrialStore(path)
    assert again.trials == store.trials
    again.add(trial)
    assert len(TrialStore(path).of(candidate.key)) == 3


def test_trials_neither_save_nor_evaluate(candidate, tmp_path):
    words = "--save-every 5 --keep-last 2 --eval-every 3 --eval-samples 8 --resume auto"
    words += " --tensorboard --eval-data e=a:8 --cache none"
    given = command_line.parse([*SHAPE.split(), *words.split()])
    config = dataclasses.replace(candidate.config, run=given.run, data=given.data)
    asked = dataclasses.replace(candidate, config=config)
    command = Runner("mpirun -n {ranks}", tmp_path).command(asked, tmp_path / "x")
    flags = command[command.index(trials.PROGRAM) + 1 :]
    for off in ("--save", "--keep", "--eval", "--resume", "--tensorboard", "--cache"):
        assert not any(flag.startswith(off) for flag in flags)
    taken = command_line.parse(flags)  # UserError if train.py does not take them
    assert (taken.training.steps, taken.run.out) == (5, f"{tmp_path}/x")


def test_control_characters_of_a_trial_reach_no_table(candidate, tmp_path):
    """A trial may print text from a stranger's file, for example a name in a corpus."""
    program = "import sys; print('Error: \\x1b]0;title\\x07 \\x1b[2J gone'); sys.exit(1)"
    status, log = trials.execute([sys.executable, "-c", program], tmp_path / "log", 1, 60.0)
    verdict, reason, _ = classify(status, log, tmp_path, 1, 60.0)
    assert verdict == "crash"
    assert r"\x1b]0;title\x07 \x1b[2J gone" in reason
    assert reason.isprintable()
