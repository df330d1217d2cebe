"""tune.py: if this failed, a search would lose trials, exceed its budget or leave processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ranks
from ranks import ROOT

import tune
from config import command_line
from config.messages import UserError
from planner import hardware
from tuner import search_space, session, trials
from tuner.search import Search, features
from tuner.session import BudgetSpent

FAKE = f"{sys.executable} {ROOT}/tests/fake_trainer.py {{ranks}}"
SHAPE = "--layers 4 --hidden 64 --heads 4 --seq-length 16 --vocab-size 100 --global-batch-size 16"
SMALL = "--zero 1 --schedule 1f1b --partition balanced --no-sequence-parallel"


def tuned(out: Path, *words: str, ranks_: int = 8, **environment: str):
    """Run tune.py to its end: its outcome, and the trials that it stored."""
    command = [sys.executable, "tune.py", *SHAPE.split(), "--gpu", "cpu", "--gpus", str(ranks_)]
    command += ["--launch", FAKE, "--out", str(out), *words]
    done = ranks.start(command, 600, TEST_FOLDER=str(out), **environment)
    path = out / "trials.jsonl"
    stored = [json.loads(s) for s in path.read_text().splitlines()] if path.exists() else []
    return done, stored


def new_session(out: Path, *words: str) -> session.Session:
    """A session that has not begun."""
    command = [*SHAPE.split(), "--gpus", "8", "--launch", FAKE, "--gpu", "cpu", "--out", str(out)]
    return session.Session(*tune.parser().parse_known_args([*command, *words]))


def processes_of(out: Path) -> list[str]:
    """Command lines of the running processes that `tuned` started for that folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TEST_FOLDER") == str(out):
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_help_imports_neither_torch_nor_matplotlib():
    program = """
import sys
import tune
try:
    tune.main(["--help"])
except SystemExit as end:
    assert end.code == 0
assert not {"torch", "matplotlib", "rich"} & sys.modules.keys()
"""
    done = ranks.start([sys.executable, "-c", program], 60)
    assert done.status == 0, done.err
    assert "--launch" in done.out


# -- what is held ----------------------------------------------------------------------------


def test_a_layout_that_the_file_gives_is_held_and_a_flag_wins(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        "global-batch-size = 32\nprecision = 'bf16'\n"
        "[layout]\ntp = 2\nmicro-batch-size = 1\nzero = 0\nsequence-parallel = false\n"
    )
    asked = new_session(tmp_path, "--config", str(file), "--tp", "4", "--try", "zero=0,1")
    assert asked.held == {
        "tp": [4],
        "micro_batch_size": [1],
        "zero": [0, 1],
        "sequence_parallel": [False],
    }
    assert asked.config.training.precision == "bf16"
    assert asked.config.training.global_batch_size == 16  # a flag of SHAPE
    assert new_session(tmp_path).held == {}


def test_the_folder_is_the_given_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*SHAPE.split(), "--gpus", "8", "--launch", FAKE, "--gpu", "cpu"]
    parse = tune.parser().parse_known_args
    assert session.Session(*parse(words)).out == Path("runs/tune")
    assert session.Session(*parse([*words, "--out", "runs/latest"])).out == Path("runs/latest")


# -- searches --------------------------------------------------------------------------------


def test_a_search_ends_when_it_is_decided_and_goes_on_where_it_was(tmp_path):
    done, stored = tuned(tmp_path, *SMALL.split())
    assert done.status == 0, done.err
    best = min((t for t in stored), key=lambda t: sorted(t["seconds"])[1])
    assert best["label"] == "tp1 pp1 dp8 mbs2 zero1"  # the fastest by fake_trainer.seconds
    assert 3 <= len(stored) <= 30
    assert "no other layout is likely to be 1 % faster" in done.out
    assert "rejected tp 8 pp 1: tp(8) does not divide heads(4)" in done.out
    assert "to train on the fastest:" in done.out
    assert f"--out {tmp_path}/train\n" in done.out
    again, more = tuned(tmp_path, *SMALL.split())
    assert again.status == 0
    assert len(more) == len(stored)  # decided already


def test_a_search_without_a_run_that_trains_fails(tmp_path):
    words = [*SMALL.split(), "--recompute", "none", "--budget", "2"]
    done, stored = tuned(tmp_path, *words, FAKE_FAILURES=json.dumps({"crash": {}}))
    assert done.status == 1, done.err
    assert [trial["status"] for trial in stored] == ["crash", "crash"]
    assert "crash: status 1" in (tmp_path / "table.md").read_text()
    assert "Traceback" not in done.err
    again, stored = tuned(tmp_path, *words, "--try", "zero=1,2")  # one that trains is enough
    assert again.status == 0, again.err
    assert {"crash", "ok"} == {trial["status"] for trial in stored}


def test_a_file_of_trials_is_changed_only_if_it_is_one(tmp_path):
    path = tmp_path / "trials.jsonl"
    path.write_text("notes of my own\nand more")
    with pytest.raises(UserError, match="line 1, is no trial"):
        trials.TrialStore(path)
    assert path.read_text() == "notes of my own\nand more"
    trials.TrialStore(tmp_path / "new" / "trials.jsonl")
    assert sorted(tmp_path.iterdir()) == [path]


def test_out_of_memory_spares_what_needs_more(tmp_path):
    tuner = new_session(tmp_path)
    lean, small, large = (
        _candidate(f"--micro-batch-size {micro} --recompute {recompute}")
        for micro, recompute in ((1, "full"), (1, "none"), (2, "none"))
    )
    found = [lean, small, large]
    predicted = [candidate.prediction.seconds for candidate in found]
    search = Search(predicted, [features(candidate.config) for candidate in found])
    oom = trials.Trial(small.key, small.label, 8, "oom", "no memory", [], 1.0, {})
    tuner._add(search, found, 1, oom)
    assert search.untried == [0]  # the one that needs less memory may still run
    assert [r.reason for r in tuner.rejected] == [
        f"needs more memory than {small.label}, which ran out of it"
    ]


def _candidate(words: str):
    config = command_line.parse(
        [*SHAPE.split(), *SMALL.split(), "--tp", "2", "--pp", "4", *words.split()]
    )
    at = config.layout
    given = {"tp": [2], "pp": [2], "micro_batch_size": [at.micro_batch_size]}
    return search_space.candidates(
        config, hardware.load("cpu"), 8, given | {"recompute": [at.recompute], "zero": [1]}
    )[0][0]


def test_a_budget_stops_it_and_a_larger_one_goes_on(tmp_path):
    words = [*SMALL.split(), "--all", "--recompute", "none"]
    done, stored = tuned(tmp_path, *words, "--budget", "3")
    assert done.status == 0
    assert len(stored) == 3
    assert "the budget of 3 is spent" in done.out
    _, stored = tuned(tmp_path, *words, "--budget", "2")
    assert len(stored) == 5
    assert len({t["key"] for t in stored}) == 5


def test_a_hanging_trial_ends_with_the_budget_and_is_run_again_later(tmp_path):
    words = [*SMALL.split(), "--recompute", "none", "--time-limit", "60"]
    failures = json.dumps({"hang": {}})
    done, stored = tuned(tmp_path, *words, "--budget", "0.1m", FAKE_FAILURES=failures)
    assert (done.status, stored) == (1, []), done.err
    assert "the budget of 0.1m is spent; run again with a larger one" in done.out
    assert processes_of(tmp_path) == []
    done, stored = tuned(tmp_path, *words, "--budget", "1")
    assert (done.status, [trial["status"] for trial in stored]) == (0, ["ok"]), done.err


@pytest.mark.parametrize("numbers", [("SIGINT", "SIGINT"), ("SIGTERM", "SIGHUP"), ("SIGHUP",)])
def test_a_signal_ends_the_trial_keeps_the_others_and_writes_the_table(numbers, tmp_path):
    """A second signal while the trial is being ended changes nothing."""
    failures = json.dumps({"hang": {"pp": 4}})
    environment = {"FAKE_FAILURES": failures, "TEST_FOLDER": str(tmp_path)}
    command = [sys.executable, "tune.py", *SHAPE.split(), *SMALL.split(), "--gpu", "cpu"]
    command += ["--gpus", "8", "--launch", FAKE, "--out", str(tmp_path), "--all"]
    environment |= {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    limit = time.monotonic() + 60
    while not any("time.sleep(600)" in line for line in processes_of(tmp_path)):
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.1)
    for number in numbers:
        process.send_signal(signal.Signals[number])
        time.sleep(0.1)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.Signals[numbers[0]]
    assert "stopped by " + {"SIGINT": "Ctrl-C"}.get(numbers[0], numbers[0]) in out
    assert "Traceback" not in err
    stored = [json.loads(s) for s in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert stored
    assert all(t["status"] == "ok" for t in stored)
    assert (tmp_path / "layouts.svg").exists()
    assert processes_of(tmp_path) == []


def test_a_killed_search_leaves_no_launcher(tmp_path):
    launcher = f"{sys.executable} -c 'import time; time.sleep(600)' {{ranks}}"
    command = [sys.executable, "tune.py", *SHAPE.split(), *SMALL.split(), "--gpu", "cpu"]
    command += ["--gpus", "8", "--launch", launcher, "--out", str(tmp_path)]
    environment = {"TEST_FOLDER": str(tmp_path)}
    with ranks.Job(command, tmp_path, **environment) as job:
        job.wait_for(lambda: any("sleep(600) 8" in line for line in processes_of(tmp_path)))
        job.send(signal.SIGKILL)
        job.status()
    limit = time.monotonic() + 30
    while processes_of(tmp_path):
        assert time.monotonic() < limit, processes_of(tmp_path)
        time.sleep(0.05)


def test_a_search_says_what_it_does_before_it_predicts(tmp_path, monkeypatch, capsys):
    """For hundreds of ranks that takes a while, in which nothing would be printed."""
    said = []
    candidates = session.search_space.candidates

    def predicted(*arguments):
        said.append(capsys.readouterr().out)
        return candidates(*arguments)

    monkeypatch.setattr(session.search_space, "candidates", predicted)
    asked = new_session(tmp_path, "--tp", "1", "--pp", "1", "--budget", "1")
    with contextlib.suppress(BudgetSpent):
        asked._measure()
    assert said == ["predicting every layout of 4 blocks on 8 ranks\n"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpus", "8"], "give --launch"),
        (["--launch", "mpirun -n {ranks}"], "give --gpus"),
        (["--launch", "mpirun", "--gpus", "8"], r"has no \{ranks\}"),
        (["--launch", "x {ranks}", "--gpus", "8", "--budget", "soon"], "--budget is a number"),
        (["--launch", "x {ranks}", "--gpus", "8", "--try", "shoes=2"], "--try takes AXIS"),
        (["--launch", "x {ranks}", "--gpus", "8", "--try", "zero=9"], "is one of"),
        (["--launch", "x {ranks}", "--gpus", "8", "--gpu", "a900"], "no machine is called"),
    ],
)
def test_mistakes_are_sentences(words, sentence, tmp_path):
    arguments = [*SHAPE.split(), *words, "--out", str(tmp_path)]
    with pytest.raises(UserError, match=sentence):
        session.Session(*tune.parser().parse_known_args(arguments))
