"""Trackers: if this failed, TensorBoard or W&B would show other numbers than the run's."""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from ranks import fork_one, start

from config import command_line
from config.messages import UserError
from config.run_options import TRACKED_RUNS
from corpora.token_files import IndexedDatasetWriter
from telemetry import trackers

SMALL = "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --global-batch-size 8 "
SMALL += "--device cpu --no-watchdog --no-preflight "


def wandb_records(file: Path) -> list:
    """The records of a .wandb file: LevelDB's log of protocol buffers, in blocks of 32 KiB.

    A header of 7 bytes for the file; for each part of a record its sum, length and kind (1: whole,
    2: first, 3: middle, 4: last).
    """
    from wandb.proto import wandb_internal_pb2

    content, place, begun, found = file.read_bytes(), 7, b"", []
    while len(content) - place >= 7:
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        begun += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(begun))
            begun = b""
    return found


def wandb_history(file: Path) -> tuple[str, dict[int, dict[str, float]]]:
    """The run's identifier and its rows by step."""
    run, rows = "", dict[int, dict[str, float]]()
    for record in wandb_records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run.run_id
        if kind == "history":
            names = ["/".join(item.nested_key) or item.key for item in record.history.item]
            values = [json.loads(item.value_json) for item in record.history.item]
            row = dict(zip(names, values, strict=True))
            rows[int(row["_step"])] = row
    return run, rows


def test_a_run_that_is_resumed_goes_on_in_the_same_run_of_every_tracker(tmp_path):
    """On a corpus whose path is a part of names, with an evaluation."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with IndexedDatasetWriter(str(tmp_path / "corpus"), 64) as writer:
        for _ in range(40):
            writer.add_document(np.arange(33) % 64)
    out = tmp_path / "run"
    words = f"train.py {SMALL} --data {tmp_path / 'corpus'} --split 1,1,0 --cache none "
    words += "--eval-samples 4 "
    words += f"--out {out} --save-every 3 --wandb trine --tensorboard --steps "
    for more in ("3", "5 --resume auto"):
        done = fork_one(*f"{words}{more}".split(), WANDB_MODE="offline", WANDB_SILENT="true")
        assert done.status == 0, done.err
    rows = [
        json.loads(line)
        for name in ("metrics.jsonl.1", "metrics.jsonl")
        for line in (out / name).read_text().splitlines()
    ]
    losses = {row["iteration"]: row["loss"] for row in rows if "loss" in row}
    evaluated = {row["iteration"]: row["validation_loss"] for row in rows if "loss" not in row}
    assert sorted(losses) == [1, 2, 3, 4, 5]
    assert sorted(evaluated) == [3, 5]

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    for name, expected in (("loss", losses), ("validation_loss", evaluated)):
        seen = {event.step: event.value for event in events.Scalars(name)}
        assert seen == pytest.approx(expected, rel=1e-6), "TensorBoard keeps fp32"

    files = sorted(out.glob("wandb/offline-run-*/run-*.wandb"))
    runs, histories = zip(*map(wandb_history, files), strict=True)
    assert len(files) == 2
    assert len(set(runs)) == 1
    history = histories[0] | histories[1]
    assert {step: row["loss"] for step, row in history.items()} == losses
    assert {step: history[step]["validation_loss"] for step in evaluated} == evaluated

    kept = json.loads((out / TRACKED_RUNS).read_text())
    assert kept["wandb"] == {"store": "trine", "run": runs[0]}


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


def test_checking_trackers_does_not_import_torch():
    """train.py sets variables that torch reads when it is imported, and does so after the check."""
    program = (
        "import sys\nfrom config import command_line\nfrom telemetry import trackers\n"
        f"words = {f'{SMALL} --tensorboard --wandb x'.split()!r}\n"
        "trackers.check(command_line.parse(words))\nassert 'torch' not in sys.modules\n"
    )
    done = start([sys.executable, "-c", program], 60, WANDB_MODE="offline")
    assert done.status == 0, done.err
