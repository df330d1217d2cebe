"""tune.py: if this failed, a search would lose trials, exceed its budget or leave processes."""

import contextlib
import json
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import ranks
from ranks import ROOT

import tune
from base.errors import UserError
from tools.tuner import session
from tools.tuner.session import BudgetSpent

FAKE = f"{sys.executable} {ROOT}/tests/fake_trainer.py {{ranks}}"
SHAPE = "--layers 4 --hidden 64 --heads 4 --seq-length 16 --vocab-size 100 --global-batch-size 16"
SMALL = "--zero 1 --schedule 1f1b --partition balanced --no-sequence-parallel"


def words_for(out: Path, *words: str, ranks_: int = 8, launch: str = FAKE) -> list[str]:
    """The arguments of tune.py."""
    given = [*SHAPE.split(), "--gpu", "cpu", "--gpus", str(ranks_), "--launch", launch]
    return [*given, "--out", str(out), *words]


def tuned(out: Path, *words: str, ranks_: int = 8, **environment: str):
    """Run tune.py to its end: its outcome, and the trials that it stored."""
    command = [sys.executable, "tune.py", *words_for(out, *words, ranks_=ranks_)]
    done = ranks.start(command, 600, TEST_FOLDER=str(out), **environment)
    path = out / "trials.jsonl"
    stored = [json.loads(s) for s in path.read_text().splitlines()] if path.exists() else []
    return done, stored


def new_session(out: Path, *words: str) -> session.Session:
    """A session that has not begun."""
    return session.Session(*tune.parser().parse_known_args(words_for(out, *words)))


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
    asked = new_session(tmp_path)
    assert (asked.held, asked.out) == ({}, tmp_path)


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
    words = [*SMALL.split(), "--recompute", "none", "--budget", "2", "--json"]
    done, stored = tuned(tmp_path, *words, FAKE_FAILURES=json.dumps({"crash": {}}))
    assert done.status == 1, done.err
    answer = json.loads(done.out)
    assert (answer["status"], answer["command"]) == (1, None)
    assert [layout["step_seconds"] for layout in answer["layouts"]] == [None, None]
    assert [trial["status"] for trial in stored] == ["crash", "crash"]
    assert "crash: status 1" in (tmp_path / "table.md").read_text()
    assert "Traceback" not in done.err
    again, stored = tuned(tmp_path, *words, "--try", "zero=1,2")  # one that trains is enough
    assert again.status == 0, again.err
    answer = json.loads(again.out)
    fastest = answer["layouts"][0]
    assert (answer["status"], answer["command"][-2:]) == (0, ["--out", f"{tmp_path}/train"])
    assert fastest["step_seconds"] > 0 < fastest["tokens_per_second"]
    assert {"crash", "ok"} == {trial["status"] for trial in stored}


def test_what_needs_more_memory_than_a_layout_that_ran_out_of_it_is_not_tried(tmp_path):
    """With 2 samples first, since 4 and more leave ranks idle, and 1 is slow: it is tried too."""
    words = [*SMALL.split(), "--hidden", "1024", "--tp", "2", "--pp", "4", "--recompute", "none"]
    done, stored = tuned(tmp_path, *words, FAKE_FAILURES=json.dumps({"oom": {}}))
    assert done.status == 1, done.err
    labels = {f"tp2 pp4 dp1 mbs{size}" for size in (1, 2)}
    assert {(trial["label"], trial["status"]) for trial in stored} == {(x, "oom") for x in labels}
    table = (tmp_path / "table.md").read_text()
    reason = "needs more memory than tp2 pp4 dp1 mbs2, which ran out of it"
    assert table.count(reason) == 3, table


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


@pytest.mark.parametrize("numbers", [("SIGINT", "SIGINT"), ("SIGTERM", "SIGHUP")])
def test_a_signal_ends_the_trial_keeps_the_others_and_writes_the_table(numbers, tmp_path):
    """A second signal while the trial is being ended changes nothing."""
    command = [sys.executable, "tune.py", *words_for(tmp_path, *SMALL.split(), "--all")]
    environment = {"FAKE_FAILURES": json.dumps({"hang": {"pp": 4}}), "TEST_FOLDER": str(tmp_path)}
    with ranks.Job(command, tmp_path, **environment) as job:
        job.wait_for(lambda: any("sleep(600)" in line for line in processes_of(tmp_path)))
        for number in numbers:
            job.send(signal.Signals[number])
            time.sleep(0.1)
        assert job.status() == 128 + signal.Signals[numbers[0]]
    assert "stopped by " + {"SIGINT": "Ctrl-C"}.get(numbers[0], numbers[0]) in job.text
    assert "Traceback" not in job.text
    stored = [json.loads(s) for s in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert stored
    assert all(t["status"] == "ok" for t in stored)
    assert (tmp_path / "layouts.svg").exists()
    assert (tmp_path / "report.html").exists()
    assert processes_of(tmp_path) == []


def test_a_killed_search_leaves_no_launcher(tmp_path):
    launcher = f"{sys.executable} -c 'import time; time.sleep(600)' {{ranks}}"
    command = [sys.executable, "tune.py", *words_for(tmp_path, *SMALL.split(), launch=launcher)]
    with ranks.Job(command, tmp_path, TEST_FOLDER=str(tmp_path)) as job:
        job.wait_for(lambda: any("sleep(600) 8" in line for line in processes_of(tmp_path)))
        started = psutil.Process(job.process.pid).children(recursive=True)
        job.send(signal.SIGKILL)
        job.status()
    assert psutil.wait_procs(started, timeout=30)[1] == []


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


def test_models_are_tried_by_name_or_by_shape_and_each_trial_says_its_own(tmp_path):
    words = ["--tp", "1", "--pp", "1", "--try", "model=2x64x4x256,4x64x8", *SMALL.split()]
    asked = new_session(tmp_path, *words, "--budget", "2")
    assert {name: (m.layers, m.heads, m.ffn_hidden) for name, m in asked.models.items()} == {
        "2x64x4x256": (2, 4, 256),
        "4x64x8": (4, 8, 256),
    }
    with contextlib.suppress(BudgetSpent):
        asked._measure()
    tried = {candidate.label.split()[0] for candidate in asked.wanted.values()}
    assert tried == {"2x64x4x256", "4x64x8"}
    fastest = min(asked.wanted.values(), key=lambda candidate: candidate.prediction.seconds)
    command = asked.command(fastest)
    assert command[command.index("--layers") + 1] == "2"
    with pytest.raises(UserError, match=r"--try model=A,B takes one list of models"):
        new_session(tmp_path, "--try", "model=a", "--try", "model=b")
    with pytest.raises(UserError, match="no preset is called 'gpt9'"):
        new_session(tmp_path, "--try", "model=gpt9")
