"""Trackers: if this failed, TensorBoard or W&B would show other numbers than the run's."""

import json
import sys

import numpy as np
import pytest
from ranks import fork_one

from base.errors import UserError
from config import command_line
from config.run_options import TRACKED_RUNS
from corpora.token_files import IndexedDatasetWriter
from telemetry import trackers

SMALL = "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --global-batch-size 8 "
SMALL += "--device cpu --no-watchdog --no-preflight "


def test_a_run_that_is_resumed_goes_on_in_the_same_run_of_every_tracker(tmp_path):
    """On a corpus whose path is a part of names, with an evaluation."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with IndexedDatasetWriter(str(tmp_path / "corpus"), 64) as writer:
        for _ in range(40):
            writer.add_document(np.arange(33) % 64)
    out = tmp_path / "run"
    words = f"train.py {SMALL} --data {tmp_path / 'corpus'} --split 1,1,0 --cache none "
    words += f"--eval-samples 4 --out {out} --save-every 3 --wandb trine --tensorboard --steps "
    for more in ("3", "5 --resume auto"):
        done = fork_one(*f"{words}{more}".split(), WANDB_MODE="offline", WANDB_SILENT="true")
        assert done.status == 0, done.err
    lines = "".join((out / name).read_text() for name in ("metrics.jsonl.1", "metrics.jsonl"))
    rows = [json.loads(line) for line in lines.splitlines()]
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    files = sorted(out.glob("wandb/offline-run-*/run-*.wandb"))
    kept = json.loads((out / TRACKED_RUNS).read_text())["wandb"]
    assert [path.stem for path in files] == [f"run-{kept['run']}"] * 2
    assert kept["store"] == "trine"
    sent = b"".join(path.read_bytes() for path in files)
    for name, steps in (("loss", [1, 2, 3, 4, 5]), ("validation_loss", [3, 5])):
        expected = {row["iteration"]: row[name] for row in rows if name in row}
        assert sorted(expected) == steps
        seen = {event.step: event.value for event in events.Scalars(name)}
        assert seen == pytest.approx(expected, rel=1e-6), "TensorBoard keeps fp32"
        if name == "loss":  # the share of the only corpus, since the row before
            shares = events.Scalars(f"corpus_share/{tmp_path / 'corpus'}")
            assert [(event.step, event.value) for event in shares] == [(2, 1), (3, 1), (5, 1)]
        texts = [json.dumps(value).encode() for value in expected.values()]
        assert [text for text in texts if text not in sent] == [], "W&B keeps texts of JSON"


def opened(words: str) -> dict[str, str]:
    """The runs that the trackers of a command line open, by tracker."""
    found = trackers.open_trackers(command_line.parse(words.split()))
    for tracker in found.values():
        tracker.close()
    return {name: tracker.run_id for name, tracker in found.items()}


def test_which_starts_go_on_in_an_earlier_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    words = f"{SMALL} --out {tmp_path} --wandb first"
    first = opened(words)
    assert opened(f"{words} --resume auto") == first
    other = opened(words)  # from step 0
    assert other != first
    assert opened(f"{words} --resume auto") == other
    assert opened(f"{words} --resume auto --load-weights-only") not in (first, other)
    elsewhere = f"{SMALL} --out {tmp_path} --wandb second --resume auto"
    assert opened(elsewhere) not in (first, other)
    (tmp_path / TRACKED_RUNS).write_text('{"wandb": {"store": "x", "run": "../x"}}')
    with pytest.raises(UserError, match="names no run of wandb: remove it"):
        opened(f"{words} --resume auto")


def test_a_tracker_without_its_package_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = command_line.parse(f"{SMALL} --out {tmp_path} --wandb x".split())
    for begin in (trackers.check, trackers.open_trackers):
        with pytest.raises(UserError, match="--wandb needs the package wandb: "):
            begin(config)


def test_a_tracker_that_cannot_start_is_one_sentence_before_the_run(tmp_path):
    out = tmp_path / "out"
    home = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "NETRC": str(tmp_path / "netrc")}
    words = ["train.py", *SMALL.split(), "--steps", "1", "--out", str(out), "--wandb", "trine"]
    done = fork_one(*words, WANDB_MODE="online", **home)
    assert done.status == 2
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    assert "error: --wandb trine: Weights & Biases has no API key here: run" in lines[0]
    assert done.out == ""
    assert not out.exists()
