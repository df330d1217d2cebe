"""plan.py gap: if this failed, the lost time of a run would be blamed on the wrong cause."""

import json
import math
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from observed_steps import observed_step
from ranks import fork_one, fork_ranks

import plan
from base.errors import UserError
from config.command_line import parse
from costs import partition_costs
from distributed.store import StoreExchange
from schedules import orders, simulation
from telemetry import step_times
from tools.planner import gap, run_files
from watchdog.flight_recorder import FlightRecorder
from zero import StepResult

WAITS = list(step_times.WAITS)
COSTS = partition_costs.part_costs
SHAPE = (
    "--layers 4 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --set pad_vocab_multiple=4 "
    "--global-batch-size 4 --micro-batch-size 1 --steps 9 --device cpu --data synthetic"
)


def made_step(seconds: dict, sent: float) -> tuple[gap.MeasuredSteps, float]:
    """A step of two stages, 1F1B, 4 micro-batches, as its ranks would have recorded it; and how
    long simulation.py says that it takes.
    """
    order = orders.build("1f1b", 2, 4)
    slots = simulation.simulate(order, seconds, sent)
    ends = {slot.action: slot.end for row in slots for slot in row}
    whole, ranks = max(ends.values()), []
    for row in slots:
        passes, before = [], 0.0
        for action, start, end in row:
            needed = order.input_of(action)
            ready = ends[needed] + sent if needed else 0.0
            waited = max(0.0, start - before)
            times = [before, end, 0.0, ready if waited else 0.0, waited]
            passes.append([round(1e6 * each) for each in times] + [0] * (len(WAITS) - 1))
            before = end
        none = [0] * (1 + len(WAITS))
        rest = [0, *none[2:], round(1e6 * (whole - before))]  # the exchange: until all are there
        around = {"log": none, "begin": none, "reduce": none, "optimizer": none, "statistics": rest}
        clock = {"node": "a", "began": 5.0, "offset": 0.0, "error": 0.0}
        ranks.append({"passes": passes, "around": around, "apart": 0, "total": round(1e6 * whole)})
        ranks[-1] |= clock
    layout = parse(["--pp", "2", "--dp", "1", *SHAPE.split()]).layout
    with tempfile.TemporaryDirectory() as folder:
        row = {"steps": 1, "spent": {}, "waits": WAITS, "ranks": ranks}
        (Path(folder) / "times.jsonl").write_text(json.dumps(row) + "\n")
        rows = gap.read_rows(folder, 2)
    return gap.MeasuredSteps(rows, layout, order), whole


def causes_of(seconds: dict, sent: float, shares: tuple[float, float]) -> tuple[dict, float]:
    steps, whole = made_step(seconds, sent)
    return steps.causes(shares), whole


def test_a_step_made_by_hand_is_divided_as_the_simulation_says():
    """Messages of 5 ms between stages of 30 and 60 ms: each cause is what its absence saves."""
    seconds = {("F", 0): 0.01, ("B", 0): 0.02, ("F", 1): 0.02, ("B", 1): 0.04}
    found, whole = causes_of(seconds, 0.005, (1 / 3, 2 / 3))
    order = orders.build("1f1b", 2, 4)

    def makespan(passes, sent=0.0):
        return max(s.end for row in simulation.simulate(order, passes, sent) for s in row)

    even = {key: 0.015 if key[0] == "F" else 0.03 for key in seconds}
    assert found["p2p"] == pytest.approx(whole - makespan(seconds), abs=1e-5)
    assert found["imbalance"] == pytest.approx(makespan(seconds) - makespan(even), abs=1e-5)
    assert found["bubble"] == pytest.approx(makespan(even) - 4 * 0.045, abs=1e-5)
    assert found["compute"] == pytest.approx(4 * 0.045, abs=1e-5)
    assert abs(found["unexplained"]) < 1e-5
    assert found["slow ranks"] == 0
    assert math.fsum(found.values()) == pytest.approx(whole, abs=1e-5)


def test_a_lone_rank_is_slow_beside_its_share_of_the_model():
    """The same seconds: uneven stages if the shares say so, a slow rank if they do not."""
    seconds = {("F", 0): 0.01, ("B", 0): 0.02, ("F", 1): 0.02, ("B", 1): 0.04}
    found, whole = causes_of(seconds, 0.0, (0.5, 0.5))
    assert found["imbalance"] == pytest.approx(0, abs=1e-5)
    assert found["slow ranks"] == pytest.approx(whole - (4 + 1) * 0.03, abs=1e-5)


def test_a_balanced_partition_and_other_schedules_are_simulated():
    config = parse([*SHAPE.split(), "--pp", "2", "--partition", "3,1"])
    order = orders.build("1f1b", 2, 4)
    passes = {("F", 0): 0.03, ("B", 0): 0.06, ("F", 1): 0.01, ("B", 1): 0.02}
    found = gap.remedies_of_passes(config, order, passes, 0.0, COSTS(config.model, "fp32", "cpu"))
    assert found["imbalance"].flags == "--partition 2,2"
    even = {key: 0.02 if key[0] == "F" else 0.04 for key in passes}
    now, then = (
        max(s.end for row in simulation.simulate(order, each) for s in row)
        for each in (passes, even)
    )
    assert found["imbalance"].seconds == pytest.approx(now - then, rel=0.1)  # embedding and head
    found = gap.remedies_of_passes(config, order, even, 0.0, COSTS(config.model, "fp32", "cpu"))
    assert found["bubble"].flags.startswith("--schedule ")
    assert 0 < found["bubble"].seconds < then - 4 * 0.06 + 1e-9


class HostEvent:
    """In place of a CUDA event: the host's clock when it was recorded."""

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self):
        self.at = time.monotonic()

    def synchronize(self):
        """It has happened."""

    def elapsed_time(self, other: "HostEvent") -> float:
        return 1e3 * (other.at - self.at)


def step_times_of(out, device: str, backend: str, size: int = 1, rank: int = 0):
    """The StepTimes of a rank that is not there, and its recorder."""
    context = SimpleNamespace(device=torch.device(device), backend=backend, size=size, node="a")
    context.recorder, context.clock = FlightRecorder(), lambda: (0.0, 0.0)
    run = SimpleNamespace(log_every=1, out=str(out))
    log = SimpleNamespace(context=context, config=SimpleNamespace(run=run), is_writer=rank == 0)
    log.note = print
    return step_times.StepTimes(StoreExchange(None, rank, size, "times"), log), context.recorder


def do_steps(times, recorder, last: int) -> None:
    """Steps of one forward and one backward each."""
    for step in range(1, last + 1):
        recorder.begin_step(step)
        for action in ("F", "B"):
            recorder.at(action, 0)
        recorder.at("optimizer")
        recorder.at("statistics")
        recorder.end_step()
        times.after_step(observed_step(step), StepResult(1.0, 1.0, False))


def test_every_kind_of_pass_is_measured():
    """W of a split backward pass was left out."""
    spans = [(kind, "0", number, number + 1) for number, kind in enumerate("FBW")]
    row = step_times.rank_row([*spans, ("optimizer", "", 3, 4)], float)
    assert [passed[:2] for passed in row["passes"]] == [
        [n * 10**6, (n + 1) * 10**6] for n in range(3)
    ]
    assert list(row["around"]) == ["optimizer"]


def test_one_rank_on_a_gpu_measures_its_steps(tmp_path, monkeypatch):
    """It has no backend. Over gloo ranks may share a GPU, and the host's times would be wrong."""
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    times, recorder = step_times_of(tmp_path, "cuda", "none")
    do_steps(times, recorder, 5)
    (row,) = [json.loads(line) for line in (tmp_path / "times.jsonl").read_text().splitlines()]
    assert row["iteration"] == 4
    assert len(row["ranks"][0]["passes"]) == 2
    pairs = [("cuda", "nccl"), ("cuda", "gloo"), ("cpu", "gloo"), ("cpu", "none")]
    measured = [step_times_of(tmp_path, *pair)[0].measures for pair in pairs]
    assert measured == [True, False, True, True]


def test_all_ranks_measure_the_same_steps(tmp_path):
    """Many ranks measure fewer steps: else the store would be busy with their rows."""
    times, recorder = step_times_of(tmp_path, "cpu", "gloo", size=4000, rank=1)
    do_steps(times, recorder, 5)
    assert times.interval == 4000 * 2 // step_times.PASSES_PER_STEP


def test_the_gap_of_one_rank_on_a_gpu_has_costs_of_a_gpu(tmp_path, monkeypatch):
    """Its run.json has no backend; the device of a run is that of its places."""
    done = fork_one("train.py", *SHAPE.split(), "--out", str(tmp_path))
    assert done.status == 0, done.err
    kinds: list[str] = []
    monkeypatch.setattr(gap, "part_costs", lambda *asked: kinds.append(asked[-1]) or COSTS(*asked))
    gap.gap(str(tmp_path))
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["cluster"]["backend"] == "none"
    facts["cluster"]["places"][0] |= {"device": "cuda:0", "gpu": "GPU-1"}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    gap.gap(str(tmp_path))
    assert set(kinds) == {"cpu", "cuda"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "planted", "words"),
    [
        ("slow ranks", {"slow": [1, 0.6]}, ""),
        ("data", {"data": 0.8}, "--pp 2"),
        ("p2p", {"link": ["forward", 0, 1.2]}, "--pp 2"),
    ],
)
def test_planted_causes_are_found(tmp_path, cause, planted, words, capsys):
    """In real runs; the sleeps are long, so that they stay the largest on a busy machine."""
    program = ["tests/gap_worker.py", json.dumps(planted), *SHAPE.split(), *words.split()]
    done = fork_ranks(2, *program, "--out", str(tmp_path))
    assert done.status == 0, done.err
    assert f"python plan.py gap {tmp_path}" in done.out
    rows = [json.loads(line) for line in (tmp_path / "times.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [4, 6, 8]
    planted_rows = [row for row in rows if row["iteration"] != 6]
    (tmp_path / "times.jsonl").write_text("".join(json.dumps(r) + "\n" for r in planted_rows))
    assert "the named causes are" in plan.ask(["gap", str(tmp_path)]).text
    capsys.readouterr()
    plan.main(["gap", str(tmp_path), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["closure_fraction"] == pytest.approx(1, abs=0.1)
    lines = {row["cause"]: row for row in data["lines"]}
    largest = max(
        (c for c in lines if c not in (*gap.COMPUTING, "bubble")),
        key=lambda c: lines[c]["measured_seconds"],
    )
    assert largest == cause
    if cause == "slow ranks":
        assert lines[cause]["where"].startswith("rank 1 (pp 0, dp 1, tp 0)")
        assert lines[cause]["flags"]


def test_a_run_without_measured_steps_is_a_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        plan.main(["gap", str(tmp_path / "none")])
    assert ended.value.code == 2
    assert "cannot read" in capsys.readouterr().err


def row_of_one_rank() -> dict:
    """A row of times.jsonl: one rank, one micro-batch."""
    none = [0] * (1 + len(WAITS))
    around = {name: [10, *none[1:]] for name in gap.AROUND}
    passes = [[0, 100, 0, 0, *none[1:]], [100, 300, 0, 0, *none[1:]]]
    rank = {"passes": passes, "around": around, "apart": 0, "total": 350, "node": "a"}
    rank |= {"began": 5.0, "offset": 0.0, "error": 0.0}
    return {"iteration": 4, "steps": 1, "spent": {}, "waits": WAITS, "ranks": [rank]}


WRONG = st.sampled_from([None, {}, [], "x", math.nan, 10**400, 1e308, [{}]])
KEYS = st.sampled_from(["steps", "spent", "waits", "ranks"])
KEYS_OF_RANK = st.sampled_from(["passes", "around", "apart", "total", "began", "offset", "error"])


@given(st.one_of(st.tuples(KEYS), st.tuples(st.just("ranks"), st.just(0), KEYS_OF_RANK)), WRONG)
@example(("ranks", 0, "passes"), [])
@settings(max_examples=200)
def test_a_row_with_other_values_is_refused_when_it_is_read(keys, wrong):
    row = row_of_one_rank()
    at = row
    for key in keys[:-1]:
        at = at[key]
    assume(wrong != {} or keys != ("spent",))  # which may be empty
    at[keys[-1]] = wrong
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.jsonl"
        file.write_text(json.dumps(row_of_one_rank()) + "\n")
        assert len(gap.read_rows(folder, 1)) == 1
        file.write_text(json.dumps(row) + "\n")
        with pytest.raises(UserError, match=r"times\.jsonl, line 1"):
            gap.read_rows(folder, 1)


@pytest.mark.parametrize("places", [7, {}, [], [7], [{"device": 7}]])
def test_places_of_another_kind_are_refused_when_they_are_read(tmp_path, places):
    facts = {"config": {"model": {}}, "cluster": {"device": "cpu", "places": places}}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"run\.json"):
        run_files.cluster_of(str(tmp_path))
