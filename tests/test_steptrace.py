"""The trace of a step: if this failed, it would show another schedule or other times."""

import contextlib
import itertools
import json
import types

import pytest
import torch
from ranks import fork_ranks

import trainer
from config import validation
from config.command_line import parse
from distributed.launch import Launch
from schedules import orders
from telemetry import step_stats, step_trace
from watchdog.flight_recorder import FlightRecorder

WORDS = (
    "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --global-batch-size 8 "
    "--pad-vocab-multiple 4 --micro-batch-size 2 --tp 2 --pp 2 --steps 4 --profile-step 3 "
    "--torch-profile 2 --check-speed-every 2 --slow-rank-percent 0 --blocking --deterministic"
)


def rank(node: str, offset: float, error: float, spans: list) -> dict:
    coordinates = {"tp": 0, "pp": 0, "dp": 0}
    return {
        "node": node,
        "offset": offset,
        "error": error,
        "spans": spans,
        "coordinates": coordinates,
    }


def test_ranks_of_a_node_share_a_clock_and_nodes_are_aligned():
    """The offset with the smallest error of a node is taken for all of its ranks."""
    ranks = [
        rank("a", 100.0, 0.1, [("F", 0, 1.0, 2.0)]),
        rank("a", 100.3, 0.4, [("F", 0, 2.0, 3.0)]),
        rank("b", 50.0, 0.2, [("wait", "send 7 of pp to 1", 52.0, 53.0)]),
    ]
    events = [e for e in step_trace.merge(ranks)["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in events] == [
        (0, 0, 0.0, 1e6),
        (1, 0, 1e6, 1e6),
        (2, 1, 1e6, 1e6),
    ]
    assert [e["name"] for e in events] == ["F", "F", "send pp to 1"]
    assert [e["args"].get("micro_batch") for e in events] == [0, 0, None]
    assert events[2]["args"]["number"] == 7


@pytest.mark.slow
def test_a_trace_shows_the_schedule(tmp_path):
    """On tp 2 x pp 2, with the flags for debugging; also: some rank is slower than its peer."""
    outcome = fork_ranks(4, "train.py", *WORDS.split(), "--out", str(tmp_path), timeout=120)
    assert outcome.status == 0, outcome.err
    assert f"trace of step 3: {tmp_path}/step_3.trace.json" in outcome.out
    assert "SLOW: rank " in outcome.out
    events = json.loads((tmp_path / "step_3.trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[r].split(" on ")[0] for r in range(4)] == [
        f"rank {r}: stage {r // 2}, tp {r % 2}, dp 0" for r in range(4)
    ]
    order = orders.build("1f1b", 2, 4).ranks
    spans = {}
    for r in range(4):
        drawn = [e for e in events if e["ph"] == "X" and e["pid"] == r and e["tid"] == 0]
        passes = [e for e in drawn if e["name"] in ("F", "B")]
        named = [f"{e['name']}{e['args']['micro_batch']}" for e in passes]
        assert named == [str(action) for action in order[r // 2]]
        for before, after in itertools.pairwise(drawn):
            assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=0.01)
        assert {"data", "reduce", "optimizer", "statistics"} <= {e["name"] for e in drawn}
        spans |= {(r, n): (e["ts"], e["ts"] + e["dur"]) for n, e in zip(named, passes)}
    for m in range(4):  # a stage finishes only after its neighbour began
        for tp in (0, 1):
            assert spans[2 + tp, f"F{m}"][1] > spans[tp, f"F{m}"][0]
            assert spans[tp, f"B{m}"][1] > spans[2 + tp, f"B{m}"][0]
    waits = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert any(e["name"].startswith("receive") for e in waits)
    reductions = [e["args"]["number"] for e in waits if e["name"] == "all_reduce tp"]
    assert len(set(reductions)) > 4  # one name for all: a viewer adds them up

    profiles = sorted(path.name for path in tmp_path.glob("torch_step_*"))
    assert profiles == ["torch_step_2_rank_0.json", "torch_step_2_rank_2.json"]  # of every stage
    for name in profiles:
        kernels = {e["name"] for e in json.loads((tmp_path / name).read_text())["traceEvents"]}
        assert {"aten::mm", "aten::native_layer_norm"} <= kernels or "aten::addmm" in kernels


def test_a_profile_ends_after_the_messages_of_its_step(tmp_path):
    """torch writes to the record of a message that is waited for after the profiler has stopped."""
    done = []
    context = types.SimpleNamespace(device=torch.device("cpu"), recorder=FlightRecorder(), rank=0)
    run = types.SimpleNamespace(profile_step=0, torch_profile=2, out=str(tmp_path))
    log = types.SimpleNamespace(context=context, config=types.SimpleNamespace(run=run))
    log.without, log.note = contextlib.nullcontext, done.append
    trace = step_trace.StepTrace(None, log, lambda: done.append("sent"))
    trace.profiler = types.SimpleNamespace(
        stop=lambda: done.append("stopped"), export_chrome_trace=lambda path: done.append("written")
    )
    trace.after(2)
    assert done[:3] == ["sent", "stopped", "written"]


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
