"""The profile and the seconds of a step: if this failed, they would be of another moment."""

import contextlib
import json
import types

import pytest
import torch
from observed_steps import observed_step
from ranks import fork_ranks

import trainer
from config import validation
from config.command_line import parse
from distributed.launch import Launch
from telemetry import step_stats
from telemetry.torch_profile import TorchProfile
from watchdog.flight_recorder import FlightRecorder
from zero import StepResult

WORDS = (
    "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --global-batch-size 8 "
    "--set pad_vocab_multiple=4 --micro-batch-size 2 --tp 2 --pp 2 --steps 4 "
    "--set torch_profile=2 check_speed_every=2 slow_rank_percent=0 blocking=true --deterministic"
)


@pytest.mark.slow
def test_a_profile_has_the_operators_of_a_rank_of_every_stage(tmp_path):
    """On tp 2 x pp 2, with the flags for debugging; also: some rank is slower than its peer."""
    outcome = fork_ranks(4, "train.py", *WORDS.split(), "--out", str(tmp_path), timeout=120)
    assert outcome.status == 0, outcome.err
    assert "SLOW: rank " in outcome.out
    profiles = sorted(path.name for path in tmp_path.glob("torch_step_*"))
    assert profiles == [
        "torch_step_2_rank_0.json",
        "torch_step_2_rank_2.json",
    ]  # one of every stage
    for name in profiles:
        kernels = {e["name"] for e in json.loads((tmp_path / name).read_text())["traceEvents"]}
        assert {"aten::mm", "aten::native_layer_norm"} <= kernels or "aten::addmm" in kernels


def test_a_profile_ends_after_the_messages_of_its_step(tmp_path):
    """torch writes to the record of a message that is waited for after the profiler has stopped."""
    done = []
    context = types.SimpleNamespace(device=torch.device("cpu"), recorder=FlightRecorder(), rank=0)
    run = types.SimpleNamespace(torch_profile=2, out=str(tmp_path))
    log = types.SimpleNamespace(context=context, config=types.SimpleNamespace(run=run))
    log.without, log.note = contextlib.nullcontext, done.append
    trace = TorchProfile(log, lambda: done.append("sent"))
    trace.profiler = types.SimpleNamespace(
        stop=lambda: done.append("stopped"), export_chrome_trace=lambda path: done.append("written")
    )
    (tmp_path / "torch_step_2_rank_0.json").write_text("of an earlier start")
    trace.after_step(observed_step(2), StepResult(1.0, 1.0, False))
    assert done[:3] == ["sent", "stopped", "written"]
    assert (tmp_path / "torch_step_2_rank_0.json.1").read_text() == "of an earlier start"


def test_a_step_lasts_until_the_device_has_done_it(monkeypatch):
    """The host is ahead of a GPU: without a wait the optimizer's update would not count."""
    clock = [100.0]

    class Stream:
        def synchronize(self):
            assert recorder.snapshot(0)["wait"]["kind"] == "device"  # a hang here is explained
            clock[0] += 3.0

    recorder = FlightRecorder()
    monkeypatch.setattr(step_stats.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    assert step_stats.seconds_since(99.0, torch.device("cuda", 0), recorder) == 4.0
    assert step_stats.seconds_since(99.0, torch.device("cpu"), recorder) == 4.0


def test_the_seconds_of_a_step_are_those_until_the_device_has_done_it(tmp_path, monkeypatch):
    """Not those of the host, which a run's own clock would give."""
    monkeypatch.setattr(step_stats, "seconds_since", lambda began, device, recorder: 7.25)
    words = "--layers 1 --hidden 16 --heads 2 --seq-length 8 --vocab-size 31 --steps 2"
    words += f" --device cpu --no-watchdog --global-batch-size 2 --out {tmp_path}"
    trainer.main(validation.check(parse(words.split()), 1), Launch("python"))
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["seconds"] for row in rows] == [7.25, 7.25]
