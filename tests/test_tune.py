"""The tuner as people use it, with a stand-in for train.py that fails where it is told to."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import psutil
import pytest
import ranks

import plan
import tune
from config.messages import UserError
from planner import published_rows
from tuner import trials
from tuner.search import Search

ROOT = Path(__file__).resolve().parent.parent
FAKE = f"{sys.executable} {ROOT}/tests/fake_trainer.py {{ranks}}"
SHAPE = "--layers 4 --hidden 64 --heads 4 --seq-length 16 --vocab-size 100 --global-batch-size 16"
SMALL = "--zero 1 --schedule 1f1b --partition balanced --no-sequence-parallel"


def tuned(out: Path, *words: str, ranks_: int = 8, **environment: str):
    """Run tune.py to its end; what it printed and what it stored."""
    command = [sys.executable, "tune.py", *SHAPE.split(), "--gpu", "cpu", "--ranks", str(ranks_)]
    command += ["--launch", FAKE, "--out", str(out), *words]
    done = ranks.start(command, 120, **environment)
    path = out / "trials.jsonl"
    stored = [json.loads(s) for s in path.read_text().splitlines()] if path.exists() else []
    return done, stored


def test_help_is_quick_and_needs_no_torch():
    words = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['tune.py', '--help']; import tune; "
    )
    began = time.monotonic()
    done = ranks.start([sys.executable, "-c", words + "tune.main(['--help'])"], 20)
    assert done.status == 0, done.err
    assert "--launch" in done.out
    assert time.monotonic() - began < 5


def test_nothing_imports_the_tuner_and_it_does_not_import_training():
    for path in ROOT.glob("*.py"):
        text = path.read_text()
        assert path.name == "tune.py" or "import tune" not in text, path
    for name in ("tune", "trials", "search", "space", "sweeps", "tables", "page", "report", "live"):
        text = (ROOT / f"{name}.py").read_text()
        assert "import train" not in text
        assert "import torch" not in text


def test_a_search_ends_when_it_is_decided_and_goes_on_where_it_was(tmp_path):
    done, stored = tuned(tmp_path, *SMALL.split(), "--tokens", "1e9")
    assert done.status == 0, done.err
    best = min((t for t in stored), key=lambda t: sorted(t["seconds"])[1])
    assert best["label"] == "tp1 pp1 dp8 mbs2 zero1"  # the made-up law's fastest
    assert 3 <= len(stored) <= 30
    assert "no other layout is likely to be 1 % faster" in done.out
    assert "rejected tp 8 pp 1: tp(8) does not divide heads(4)" in done.out
    assert "tokens take" in done.out
    assert "to train on the fastest:" in done.out
    assert f"--out {tmp_path}/train\n" in done.out
    again, more = tuned(tmp_path, *SMALL.split())
    assert again.status == 0
    assert len(more) == len(stored)  # decided already


def test_a_third_fails_and_the_rest_is_ranked(tmp_path):
    failures = {"oom": {"tp": 4}, "hang": {"pp": 4, "mbs": 1}, "crash": {"pp": 2, "tp": 2}}
    words = [*SMALL.split(), "--recompute", "none", "--try", "micro-batch-size=1,2,4", "--all"]
    environment = {"FAKE_FAILURES": json.dumps(failures)}
    done, stored = tuned(tmp_path, *words, "--time-limit", "3", **environment)
    assert done.status == 0, done.err
    found = {s: [t for t in stored if t["status"] == s] for s in ("ok", "oom", "hang", "crash")}
    assert sum(map(len, found.values())) == len(stored)
    assert min(map(len, found.values())) >= 2
    assert len(found["ok"]) <= 2 * len(stored) / 3
    assert all(t["reason"] for t in stored if t["status"] != "ok")
    assert not [p for p in psutil.process_iter() if _sleeps(p)]
    table = (tmp_path / "table.md").read_text()
    ranked = [line for line in table.splitlines() if line.startswith("| 1 |") and "GB" in line]
    seconds = [float(line.split("|")[9]) for line in ranked]
    assert seconds == sorted(seconds)
    assert len(seconds) == len({t["key"] for t in found["ok"]})
    for reason in ("oom: MemoryError", "hang: not done within 3 s", "crash: status 1"):
        assert reason in table


def _sleeps(process: psutil.Process) -> bool:
    try:
        words = " ".join(process.cmdline())
        return "time.sleep(600)" in words or "fake_trainer.py" in words
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def test_out_of_memory_spares_what_needs_more(tmp_path):
    words = [*SHAPE.split(), "--ranks", "8", "--launch", FAKE, "--gpu", "cpu"]
    session = tune.Session(*tune.parser().parse_known_args([*words, "--out", str(tmp_path)]))
    lean, small, large = (
        _candidate(f"--micro-batch-size {micro} --recompute {recompute}")
        for micro, recompute in ((1, "full"), (1, "none"), (2, "none"))
    )
    found = [lean, small, large]
    search = Search([tune.point(c) for c in found])
    oom = trials.Trial(small.key, small.label, 8, "oom", "no memory", [], 1.0, {})
    session._tell(search, found, 1, oom)
    assert search.left == [0]  # the lean one may still run
    assert [r.reason for r in session.rejected] == [
        f"needs more memory than {small.label}, which ran out of it"
    ]


def _candidate(words: str):
    from config import command_line
    from planner import hardware
    from tuner import search_space

    config = command_line.parse(
        [*SHAPE.split(), *SMALL.split(), "--tp", "2", "--pp", "2", *words.split()]
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


def test_ctrl_c_ends_the_trial_keeps_the_others_and_writes_the_table(tmp_path):
    failures = json.dumps({"hang": {"pp": 2}})
    command = [sys.executable, "tune.py", *SHAPE.split(), *SMALL.split(), "--gpu", "cpu"]
    command += ["--ranks", "8", "--launch", FAKE, "--out", str(tmp_path), "--all"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FAKE_FAILURES": failures}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    limit = time.monotonic() + 60
    while time.monotonic() < limit and not any(_sleeps(p) for p in process_children(process)):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped by Ctrl-C" in out
    stored = [json.loads(s) for s in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert stored
    assert all(t["status"] == "ok" for t in stored)
    assert (tmp_path / "report.html").exists()
    assert not [p for p in psutil.process_iter() if _is_orphan(p)]


def process_children(process) -> list[psutil.Process]:
    try:
        everyone = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [p for p in everyone if "time.sleep(600)" in _words(p)]


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def _is_orphan(process: psutil.Process) -> bool:
    return "time.sleep(600)" in _words(process)


# -- sweeps and bounds -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("topology", None),
        ("micro-batch", {1, 2, 4, 8}),
        ("global-batch", {4, 8, 16, 32, 64}),
        ("heads", {2, 4}),
        ("hidden", {32, 48, 64, 80, 96}),
        ("recompute", {"none", "selective", "full"}),
        ("zero", None),
        ("precision", None),
        ("optimizer", None),
    ],
)
def test_sweeps_change_one_thing(name, values, tmp_path):
    from config import command_line
    from planner import hardware
    from tuner import sweeps

    config = command_line.parse([*SHAPE.split(), "--tp", "2", "--pp", "2"])
    given = {"tp": [2], "pp": [2]} if name != "topology" else {}
    runs, rejected = sweeps.sweep(name, config, hardware.load("cpu"), 8, given, [])
    assert len(runs) + len(rejected) >= 1
    where = {
        "micro-batch": lambda c: c.layout.micro_batch_size,
        "global-batch": lambda c: c.training.global_batch_size,
        "heads": lambda c: c.model.heads,
        "hidden": lambda c: c.model.hidden,
        "recompute": lambda c: c.layout.recompute,
        "zero": lambda c: c.layout.zero,
        "precision": lambda c: c.training.precision,
        "optimizer": lambda c: c.training.optimizer,
        "topology": lambda c: (c.layout.tp, c.layout.pp),
    }[name]
    found = [where(c.config) for c in runs]
    assert len(set(found)) == len(found)
    if values:
        assert set(found) <= values
        assert len(found) + len(rejected) == len(values) + (name == "micro-batch")
    assert all(r.reason for r in rejected)


def test_a_sweep_by_runs(tmp_path):
    done, stored = tuned(tmp_path, "--sweep", "hidden", "--try", "hidden=32,64,66", "--tp", "2")
    assert done.status == 0, done.err
    assert sorted(t["config"]["model"]["hidden"] for t in stored) == [32, 64]
    assert "does not divide hidden(66)" in (tmp_path / "table.md").read_text()


def test_the_largest_model_and_the_fewest_ranks(tmp_path):
    limit = {"FAKE_PARAMETERS": str(4 * 64**2 * 5)}
    done, stored = tuned(tmp_path / "a", "--max-params", ranks_=2, **limit)
    assert done.status == 0, done.err
    sizes = {(t["config"]["model"]["layers"], t["status"]) for t in stored}
    assert {s for _, s in sizes} == {"ok", "oom"}
    assert max(n for n, s in sizes if s == "ok") < min(n for n, s in sizes if s == "oom")
    assert "trained; " in done.out
    limit = {"FAKE_PARAMETERS": str(4 * 64**2 // 3)}
    done, stored = tuned(tmp_path / "b", "--min-ranks", ranks_=8, **limit)
    assert done.status == 0, done.err
    assert "on 4 ranks" in done.out
    assert len(stored) <= 3


# -- what is written -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    words = ["--try", "micro-batch-size=1,2", "--schedule", "1f1b", "--zero", "1", "--all"]
    done, stored = tuned(out, *words, "--partition", "balanced")
    assert done.status == 0, done.err
    return out, stored


def test_results_pass_the_planners_check(finished):
    out, stored = finished
    table = published_rows.read(str(out / "results.csv"))
    assert len(table) == len({t["key"] for t in stored})
    assert plan.check(str(out / "results.csv")).data == []
    case = published_rows.cases(table)[0]
    assert case.training.precision == "fp32"
    assert case.machine == "cpu"
    with open(out / "results.csv") as file:
        assert "check:" not in file.read()


def test_a_row_that_cannot_be_says_so(finished, tmp_path):
    out, _ = finished
    with open(out / "results.csv", newline="") as file:
        table = list(csv.DictReader(file))
    table[0]["tflops"] = str(2 * float(table[0]["tflops"]))
    assert [f.kind for f in published_rows.check(table)] == ["rate"]


def test_the_page_is_whole_and_needs_nothing_else(finished):
    out, _ = finished
    page = (out / "report.html").read_text()

    class Tags(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open, self.seen = [], []

        def handle_starttag(self, tag, attributes):
            assert not {"src", "href"} & {name for name, _ in attributes}
            self.seen.append(tag)
            if tag not in ("meta",):
                self.open.append(tag)

        def handle_startendtag(self, tag, attributes):
            self.seen.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.seen.count("svg") == 3
    assert "http" not in page
    for part in ("prefers-color-scheme", "viewport", "Rejected without a run", "train.py"):
        assert part in page


def test_replay_of_own_results(finished):
    out, _ = finished
    done = ranks.start([sys.executable, "tune.py", "--replay", str(out / "results.csv")], 60)
    assert done.status == 0, done.err
    assert "| all rows |" in done.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "8"], "give --launch"),
        (["--launch", "mpirun -n {ranks}"], "give --ranks"),
        (["--launch", "mpirun", "--ranks", "8"], r"has no \{ranks\}"),
        (["--launch", "x {ranks}", "--ranks", "8", "--budget", "soon"], "--budget is trials"),
        (["--launch", "x {ranks}", "--ranks", "8", "--try", "shoes=2"], "--try takes AXIS"),
        (["--launch", "x {ranks}", "--ranks", "8", "--try", "zero=9"], "is not one of"),
        (["--launch", "x {ranks}", "--ranks", "8", "--gpu", "a100"], "no machine is called"),
    ],
)
def test_mistakes_are_sentences(words, sentence, tmp_path):
    own, rest = tune.parser().parse_known_args([*SHAPE.split(), *words, "--out", str(tmp_path)])
    with pytest.raises(UserError, match=sentence):
        tune.Session(own, rest)
