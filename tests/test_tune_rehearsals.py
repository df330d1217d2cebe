"""The tuner and the rehearsal: what cannot run on the GPUs asked for is never queued."""

import re
from pathlib import Path

import pytest
from test_tune import ROOT, SMALL, new_session, tuned

from tuner import session, trials

# Rejects so many stages as REJECTED says, has no answer for two, and notes each call.
FAKE_REHEARSAL = """
import json, os, sys
words = dict(zip(sys.argv[1:], sys.argv[2:]))
open(__file__ + ".calls", "a").write(" ".join(sys.argv[1:]) + chr(10))
stages = words.get("--pp", "1")
if stages == "2":
    sys.exit("error: no compiler here")
rejected = stages == os.environ["REJECTED"]
finding = "operation 1 of tp: rank 0 does this; rank 1 does that" * rejected
json.dump({"finding": finding}, open(words["--json"], "w"))
sys.exit(bool(finding))
"""


def on_gpus(
    tmp_path, monkeypatch, *words: str, rejected: str = "4"
) -> tuple[session.Session, Path]:
    """A session for GPUs, whose rehearsals are faked, and the file of the rehearsals' calls."""
    program = tmp_path / "rehearsal.py"
    program.write_text(FAKE_REHEARSAL)
    monkeypatch.setattr(trials, "REHEARSAL", str(program))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for FAKE
    monkeypatch.setenv("REJECTED", rejected)
    command = [*SMALL.split(), "--recompute", "none", "--micro-batch-size", "1", "--all"]
    made = new_session(tmp_path, *command, "--gpu", "v100-32", *words)
    return made, Path(f"{program}.calls")


def test_a_layout_that_the_rehearsal_rejects_is_never_queued(tmp_path, monkeypatch, capsys):
    tuner, calls = on_gpus(tmp_path, monkeypatch, rejected="1")
    tuner.run()
    stored = tuner.store.trials
    assert stored[0].config["layout"]["pp"] == 1, "the first one is rejected"
    assert {t.config["layout"]["pp"] for t in stored} == {1, 2, 4}
    for number, trial in enumerate(stored):
        (folder,) = (tmp_path / "trials").glob(f"{number:04d}-*")
        queued = trial.config["layout"]["pp"] != 1
        assert (folder / "output.txt").exists() == bool(trial.command) == queued
        assert trial.status == ("ok" if queued else "rejected")
        assert trial.rehearsal > 0
    told = capsys.readouterr().out
    assert "rehearsing tp1 pp4 dp2 mbs1 zero1 on fake GPUs" in told
    assert "s: no answer, the trial decides: error: no compiler here" in told
    reason = "rejected: by the rehearsal: operation 1 of tp: rank 0 does this; rank 1 does that"
    for text in (told, (tmp_path / "table.md").read_text(), (tmp_path / "results.csv").read_text()):
        assert reason in text
    bad = sum(t.status == "rejected" for t in stored)
    lines = calls.read_text().splitlines()
    assert len(lines) == len({t.key for t in stored})
    assert f"{len(lines)} layouts were rehearsed on fake GPUs" in told
    assert f"{bad} of them rejected" in told
    assert all("--gpus 8 --gpu v100-32 --json " in line for line in lines)


def test_a_layout_is_rehearsed_once_and_not_at_all_if_the_user_says_so(tmp_path, monkeypatch):
    tuner, calls = on_gpus(tmp_path, monkeypatch, "--pp", "4", "--budget", "1")
    tuner.run()
    rejected = [t.label for t in tuner.store.trials]
    assert len(rejected) > 1, "a layout that is not run costs nothing of the budget"
    again, _ = on_gpus(tmp_path, monkeypatch, "--pp", "4")
    again.run()
    assert len(calls.read_text().splitlines()) == len(rejected)
    free, _ = on_gpus(tmp_path, monkeypatch, "--pp", "4", "--no-rehearse")
    free.run()
    assert [t.label for t in free.result().trials if t.status == "ok"] == rejected
    assert len(calls.read_text().splitlines()) == len(rejected)
    last, _ = on_gpus(tmp_path, monkeypatch, "--pp", "4")
    last.run()
    assert len(last.result().ranked) == len(rejected), "what ran counts"
    assert len(calls.read_text().splitlines()) == len(rejected)


@pytest.mark.parametrize("words", [["--gpu", "cpu"], ["--gpu", "v100-32", "--device", "cpu"]])
def test_nothing_is_rehearsed_on_cpus(words, tmp_path):
    assert new_session(tmp_path, *words).rehearser is None


@pytest.mark.slow
def test_the_real_rehearsal_decides_what_is_queued(tmp_path):
    """Adafactor's checkpoint has AdamW's moments in full, which the planner does not count: of the
    layouts that it lists, those that hold all parameters do not fit.
    """
    words = "--layers 4 --hidden 1448 --heads 4 --seq-length 128 --vocab-size 500 --zero 0"
    words += " --precision bf16 --global-batch-size 8 --recompute full --optimizer adafactor"
    words += " --micro-batch-size 1 --schedule 1f1b --partition balanced --no-sequence-parallel"
    rates = tmp_path / "rates.toml"
    rates.write_text('device = "NVIDIA A100-SXM4-80GB"\nmemory = 4.9e9\n')
    out = tmp_path / "out"
    more = ["--gpu", "a100-80", "--calibration", str(rates), "--all", "--risk", "1"]
    done, stored = tuned(out, *words.split(), *more, ranks_=2)
    assert done.status == 0, done.err + done.out
    assert {t["label"]: t["status"] for t in stored} == {
        "tp1 pp1 dp2 mbs1 full zero0": "rejected",
        "tp1 pp2 dp1 mbs1 full": "ok",
        "tp1 pp1 dp2 mbs1 full 1 zero0": "rejected",
        "tp1 pp2 dp1 mbs1 full 1": "ok",
    }
    for reason in (t["reason"] for t in stored if t["status"] == "rejected"):
        assert re.search(r"rank \d of stage 0 needs 5\.\d GB, .* of 4\.9 GB of a100-80", reason)
