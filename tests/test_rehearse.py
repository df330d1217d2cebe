"""The rehearsal: if this failed, it would alarm without a reason or miss what makes ranks hang."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import stops_worker
from planted_mismatches import KINDS, Cannot, plant
from ranks import ROOT, Outcome, fork_rehearsal, start
from rehearsal_cases import CASES

import rehearse
from config.schema import Layout
from costs import memory
from schedules.orders import ORDERS, build
from tools.emulator.matching import RunTraces, deadlock, mismatches
from tools.emulator.recording import LOAD, READ, Event
from tools.emulator.rehearsal import enough_micro_batches

SHAPE = (
    "--layers 4 --hidden 64 --heads 4 --seq-length 32 --vocab-size 512 --set pad_vocab_multiple=4 "
)
SHAPE += "--precision bf16 --global-batch-size 8 "


SLOW = pytest.mark.slow
LARGE = ("384 ranks", "cp 4 over heads and keys, tp 2", "experts of 2 nodes")
EACH_CASE = [
    pytest.param(name, marks=[pytest.mark.long] if name in LARGE else []) for name in CASES
]


def rehearsed(cases: dict[str, tuple[int, str]], folder: Path, *how: str) -> dict:
    """The rehearsals of worlds and command lines by name, of one process and its children."""
    listed, out = folder / "cases.json", folder / "out.pickle"
    listed.write_text(json.dumps(cases))
    done = fork_rehearsal("tests/rehearsal_worker.py", str(listed), str(out), *how, timeout=900)
    assert done.status == 0, done.err
    return pickle.loads(out.read_bytes())


def rehearsed_cases(names: list[str], folder: Path) -> dict:
    """The rehearsals of cases by name."""
    # Two layers for each stage, which others would repeat, but where buffers would outweigh them.
    layers = {"384 ranks": 12, "ZeRO 2, pp 2": 8, "gated delta net, tp 2": 8}
    layers |= {"short convolutions, pp 2": 8}
    cases = {}
    for name in names:
        world, line = CASES[name]
        few = 4 if "--pp" in line else 2
        cases[name] = (world, f"{line} --layers {layers.get(name, few)}")
    return rehearsed(cases, folder)


@pytest.fixture(scope="module")
def rehearsals(tmp_path_factory) -> dict:
    """The configurations of the suite, without the large ones."""
    names = [name for name in CASES if name not in LARGE]
    return rehearsed_cases(names, tmp_path_factory.mktemp("rehearsals"))


@pytest.fixture(scope="module")
def large_rehearsals(tmp_path_factory) -> dict:
    """The configurations that take most of the time."""
    return rehearsed_cases(list(LARGE), tmp_path_factory.mktemp("large"))


@pytest.fixture
def of_case(request, name: str):
    """The rehearsal of a case."""
    of = "large_rehearsals" if name in LARGE else "rehearsals"
    return request.getfixturevalue(of)[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH_CASE)
def test_right_configurations_raise_no_alarm(of_case, name):
    run = of_case
    assert mismatches(run.world) == []
    assert deadlock(run.world) is None
    assert len(run.world.traces) == CASES[name][0]
    operations = [e for e in run.world.traces[0] if e.number > 0 and e.kind != "wait"]
    assert operations or name == "one rank"
    places = {event.place for event in operations}
    assert any("sample" in each for each in places) == ("--sample-every" in CASES[name][1]), places
    for record in run.records:
        assert {"build", "forward", "backward", "optimizer", "check"} <= set(record.peaks)
        assert record.peak >= record.step_peak > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH_CASE)
def test_memory_is_what_the_planner_says(of_case, name):
    run = of_case
    for stage, parts in enumerate(memory.run_memory(run.config, node=run.node)):
        peak = max(record.step_peak for record in run.records if record.stage == stage)
        assert peak == pytest.approx(sum(parts.values()), rel=0.04), stage


CROSSED = "messages crossed"  # takes a rank that receives several messages at once, as with pp 6


def planted_in(rehearsals: dict, names: tuple[str, ...]) -> tuple[int, set[str]]:
    """Plant each kind in these worlds; fail unless each is named. Return how many, and the kinds.

    A sentence has the rank's whole name and the group's.
    """
    missed, planted, kinds = [], 0, set()
    for name in names:
        for seed, kind in enumerate(KINDS * 4):
            try:
                world, rank, role, about = plant(rehearsals[name].world, kind, seed)
            except Cannot:
                continue
            planted += 1
            found = mismatches(world)
            if not any(re.search(rf"\brank {rank}\b", s) and f"of {role}" in s for s in found):
                missed.append((name, about, found[:2]))
            kinds.add(kind)
    assert missed == []
    return planted, kinds


@pytest.mark.slow
def test_planted_mismatches_are_found_and_named(rehearsals):
    names = ("tp 2 pp 2 dp 2", "ZeRO 2, pp 2", "ZeRO 3", "sequence parallel")
    planted, kinds = planted_in(rehearsals, (*names, "cp 4 over heads, pp 2"))
    assert planted >= 100
    assert kinds == {*KINDS} - {CROSSED}


@pytest.mark.long
@pytest.mark.slow
def test_planted_mismatches_among_384_ranks_are_found_and_named(large_rehearsals):
    _, kinds = planted_in(large_rehearsals, ("384 ranks",))
    assert CROSSED in kinds


@pytest.fixture(scope="module")
def host() -> list[dict]:
    """Return the host's operations on rank 2 of 8 under three layouts, by tests/host_worker.py."""
    now_and_then = "--sample-every 5 --sample-prompt 1 --eval-samples 4"
    lines = [
        f"{SHAPE} --tp 2 --pp 2 --sequence-parallel {now_and_then}",
        f"{SHAPE} --tp 2 --pp 2 --cp 2 --kv-heads 2 --check-replicas-every 3",
        f"{SHAPE} --tp 2 --cp 2 --zero 2",
    ]
    outcome = start([sys.executable, "tests/host_worker.py", "8", "2", *lines])
    assert outcome.status == 0, outcome.err
    return json.loads(outcome.out)


@pytest.mark.slow
def test_a_collective_that_is_waited_for_at_once_takes_no_stream_of_nccl(host):
    """On NCCL's own stream it would cost two hops between streams, with an event each."""
    assert [found["late"] for found in host] == [[], [], []]
    assert all(found["noted"] > 50 for found in host)


@pytest.mark.slow
def test_the_host_stops_three_times_in_a_step(host):
    """For the norm of the gradients, the end of the step, and the statistics of all ranks."""
    expected = {"values of the device at zero.py": 1}
    expected["synchronize at telemetry/step_stats.py"] = 1
    expected["values of the device at telemetry/step_stats.py"] = 1
    assert [found["stops"] for found in host] == [expected] * 3


@pytest.mark.slow
def test_every_stop_of_the_host_is_named():
    """Each operation that makes the host wait for a GPU is named, and no other one is."""
    done = subprocess.run(
        [sys.executable, "tests/stops_worker.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    expected = {name: stops for name, (_, stops) in stops_worker.CASES.items()}
    assert json.loads(done.stdout) == json.loads(json.dumps(expected))


# ---- The rules of NCCL, by hand-made traces ------------------------------------------------------


def message(kind: str, role: str, number: int, peer: int) -> Event:
    return Event(kind, role, number, 4, "float32", "", peer, "pipeline.py:1", "step 1, F 0")


def reduction(role: str, number: int) -> Event:
    return Event("all_reduce", role, number, 4, "float32", "SUM", -1, "zero.py:1", "step 1, F 0")


def wait(index: int) -> Event:
    return Event("wait", "", index, place="step 1, F 0", line="zero.py:2")


ROWS = {"forward": [(0, 1)], "backward": [(0, 1)], "world": [(0, 1)]}
HOST_READS = Event(READ, line="zero.py:3", place="step 1, reduce")


def test_lazy_connections_of_two_groups_that_wait_for_each_other():
    """One micro-batch: stage 0 receives a gradient before it sends the activation."""
    first = [message("receive", "backward", 1, 1), message("send", "forward", 1, 1)]
    last = [message("receive", "forward", 1, 0), wait(0), message("send", "backward", 1, 0)]
    found = deadlock(RunTraces(ROWS, [first, last]))
    assert "rank 0 waits for receive 1 of backward with rank 1" in found
    assert "rank 1 waits for receive 1 of forward with rank 0" in found
    assert "pipeline.py:1" in found
    assert deadlock(RunTraces(ROWS, [first[::-1], last])) is None


def test_streams_that_cross():
    """Each rank's compute stream waits for what the other starts after its own wait."""
    one = [reduction("forward", 1), wait(0), reduction("backward", 1), wait(2)]
    two = [reduction("backward", 1), wait(0), reduction("forward", 1), wait(2)]
    found = deadlock(RunTraces(ROWS, [one, two]))
    assert "rank 0" in found
    assert "rank 1" in found
    free = [reduction("forward", 1), reduction("backward", 1), wait(0), wait(1)]
    assert deadlock(RunTraces(ROWS, [free, two])) is None, "no wait before the second: streams run"


def test_a_read_by_the_host_and_blocking_launches():
    """Both send before they receive: only a host that waits for its send is stuck."""
    one = [message("send", "forward", 1, 1), message("receive", "backward", 1, 1)]
    two = [message("send", "backward", 1, 0), message("receive", "forward", 1, 0)]
    connected = [message("send", "forward", 1, 1), message("receive", "backward", 1, 1)]
    connected += [message("receive", "forward", 1, 0)]
    ranks = [[reduction("world", 1), HOST_READS], [HOST_READS, reduction("world", 1)]]
    assert deadlock(RunTraces(ROWS, ranks)) is None
    ranks = [[reduction("forward", 1), wait(0), HOST_READS, reduction("world", 1)]]
    ranks += [[reduction("world", 1), wait(0), HOST_READS, reduction("forward", 1)]]
    found = deadlock(RunTraces(ROWS, ranks))
    assert "its host at zero.py:3" in found
    assert deadlock(RunTraces(ROWS, [one, two])) is not None, "connections"


def test_a_kernel_that_is_loaded_waits_for_all_streams():
    """One micro-batch: the first forward's kernel waits for the receive of its own gradient."""
    load = Event(LOAD, op="aten.mm", line="parallel.py:1", place="step 1, F 0")
    ahead = [message("receive", "backward", 1, 1), load, message("send", "forward", 1, 1), wait(0)]
    last = [message("receive", "forward", 1, 0), wait(0), message("send", "backward", 1, 0)]
    connected = [message("send", "forward", 1, 1), message("receive", "backward", 1, 1)]
    answered = [message("receive", "forward", 1, 0), message("send", "backward", 1, 0)]

    def numbered(events: list[Event]) -> list[Event]:
        """The same after the two messages that connect the ranks."""
        later = [event._replace(number=event.number + 1) for event in events]
        return [e._replace(number=e.number + 1) if e.kind == "wait" else e for e in later]

    first, second = connected + numbered(ahead), answered + numbered(last)
    found = deadlock(RunTraces(ROWS, [first, second]))
    assert "rank 0 waits for receive 2 of backward with rank 1" in found
    assert "its host at parallel.py:1 (step 1, F 0)" in found
    needed = [ahead[1], ahead[2], ahead[0], wait(2)]
    assert deadlock(RunTraces(ROWS, [connected + numbered(needed), second])) is None


def test_launches_that_block_the_host():
    """Connected, both send before they receive: stuck only where a launch blocks."""
    one = [message("send", "forward", 1, 1), wait(0), message("receive", "backward", 1, 1)]
    two = [message("receive", "forward", 1, 0), wait(0), message("send", "backward", 1, 0)]
    one += [wait(2), message("send", "forward", 2, 1), message("receive", "backward", 2, 1)]
    two += [wait(2), message("send", "backward", 2, 0), message("receive", "forward", 2, 0)]
    world = RunTraces(ROWS, [one, two])
    assert deadlock(world) is None
    assert "rank 1 waits for send 2 of backward" in deadlock(world, blocking=True)


# ---- The command ---------------------------------------------------------------------------------


FEW = ("--layers", "2")


def run(*words: str) -> Outcome:
    return fork_rehearsal("rehearse.py", *words)


@pytest.mark.slow
def test_the_command_answers_in_words_and_as_data(tmp_path):
    out = tmp_path / "answers.json"
    done = run("--gpus", "4", "--json", str(out), *SHAPE.split(), "--tp", "2", "--all-ranks", *FEW)
    assert done.status == 0, done.err
    for question in ("Do all collectives match? Yes", "Will it fit? Yes"):
        assert question in done.out
    assert "operations of the 4 ranks that were run, which are all; no deadlock." in done.out
    answers = json.loads(out.read_text())
    assert answers["finding"] == ""
    assert answers["ranks_run"] == [0, 1, 2, 3]
    stage = answers["stages"][0]
    assert stage["step_peak"] == sum(stage["held"].values())
    assert "(step 2" in stage["tensor"] or "check" in stage["tensor"]


def test_progress_is_on_standard_error():
    """A line per quarter at most, and on a busy machine others that repeat it."""
    done = run("--gpus", "2", "--all-ranks", *SHAPE.split(), *FEW, "--hidden", "32")
    assert done.status == 0, done.err
    shown = [line.partition(",")[0] for line in done.err.splitlines()]
    assert list(dict.fromkeys(shown)) == [f"ranks rehearsed: {count} of 2" for count in range(3)]


@pytest.mark.slow
def test_the_verdict_is_about_the_ranks_that_were_run():
    done = run("--gpus", "8", *SHAPE.split(), "--tp", "8", "--heads", "8", *FEW)
    assert done.status == 0, done.err
    assert "8 ranks, tp 8 x pp 1 x dp 1, bf16: 3 were run, each other one" in done.out
    text = "operations of the 3 ranks that were run, no deadlock if the other 5 do as these"
    assert text in done.out


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "precision"), [("a100-80", "bf16"), ("v100-32", "fp16")])
def test_the_precision_is_that_which_the_planner_takes_on_the_machine(gpu, precision):
    words = f"--model gpt2-124m --layers 1 --gpu {gpu} --gpus 1 --global-batch-size 1"
    done = run(*words.split())
    assert f"dp 1, {precision}: 1 were run" in done.out, done.err
    planned = fork_rehearsal("plan.py", "layouts", *words.split())
    assert planned.status == 0, planned.err
    assert f"--precision {precision}" in planned.out


# Ranks, and stages of each where the schedule lets one choose.
PIPELINES = [(2, 2), (2, 3), (3, 2), (4, 2), (4, 4), (8, 2)]


@pytest.mark.parametrize("name", ["keeps all", *ORDERS])
def test_a_step_is_shortened_only_to_what_holds_as_much(name, monkeypatch):
    """A schedule that the rehearsal does not know by name is judged by its order too."""
    monkeypatch.setitem(ORDERS, "keeps all", ORDERS["gpipe"])
    for ranks, virtual in PIPELINES:
        layout = Layout(schedule=name, pp=ranks, virtual_stages=virtual)
        for count in (*range(ranks, 3 * ranks + 4), 40, 41, 63):
            fewer = enough_micro_batches(layout, count)
            held = [build(name, ranks, n, layout.stages_per_rank).peak for n in (fewer, count)]
            assert held[0] == held[1], (ranks, virtual, count, fewer)
            if name in ("1f1b", "zb-h1"):
                assert fewer == min(count, ranks + 2), "no more are needed"


@pytest.mark.slow
def test_every_schedule_of_few_micro_batches_raises_no_alarm(tmp_path):
    """One micro-batch, and fewer than stages: receives come late, and kernels are loaded.

    With one micro-batch, two steps would hang on GPUs if a rank received a gradient during its
    first forward pass.
    """
    shape = f"{SHAPE} --layers 6 --pp 3 --micro-batch-size 1"
    names = [*ORDERS, "auto"]
    lines = {name: (3, f"{shape} --global-batch-size 1 --schedule {name}") for name in names}
    for name in ("1f1b", "zb-v"):
        lines[f"{name}, 2"] = (3, f"{shape} --global-batch-size 2 --schedule {name}")
    lines["two stages"] = (2, f"{SHAPE} --pp 2 --micro-batch-size 8")
    for case, rehearsal in rehearsed(lines, tmp_path).items():
        assert mismatches(rehearsal.world) == [], case
        assert deadlock(rehearsal.world) is None, case
        assert any(event.kind == LOAD for event in rehearsal.world.traces[0]), case


@pytest.mark.slow
def test_stages_with_experts_may_load_kernels_in_every_action(tmp_path):
    """The router gives an expert another number of rows in each micro-batch, so other kernels."""
    shape = f"{SHAPE} --layers 2 --pp 2 --micro-batch-size 1"
    experts = f"{shape} --no-bias --experts 4 --experts-per-token 2 --ep 2"
    world = rehearsed({"experts": (4, experts)}, tmp_path)["experts"].world
    for trace in world.traces:
        loads = {event.place for event in trace if event.kind == LOAD}
        for action in ("F 0", "F 3", "B 0", "B 3"):
            assert f"step 2, {action}" in loads
    assert deadlock(world) is None
    lines = {"experts": (4, experts), "dense": (2, shape)}
    worlds = {name: r.world for name, r in rehearsed(lines, tmp_path, "both ways").items()}
    assert deadlock(worlds["experts"]).startswith("deadlock: rank")
    assert deadlock(worlds["dense"]) is None  # its kernels are all loaded in the warm-up


# A launcher that notes that it was called, as Slurm's would be.
SRUN = "#!/bin/sh\ntouch $CALLED\n"
SCONTROL = "#!/bin/sh\necho n1\n"  # the hostnames of the job
FP16 = SHAPE.replace("bf16", "fp16").replace("--layers 4", "--layers 1")  # a V100 has no bf16
TOO_LARGE = "--hidden 8192 --heads 64 --layers 1 --precision bf16 --global-batch-size 1"


@pytest.mark.parametrize(
    ("gpu", "words", "status", "sentence"),
    [
        pytest.param("v100-16", TOO_LARGE, 2, "this run: rank 0 of stage 0 needs", marks=SLOW),
        pytest.param(
            "v100-16",
            FP16,
            0,
            "all operations of the ranks that were run match, and it fits",
            marks=SLOW,
        ),
        ("none", TOO_LARGE, 0, ""),
        ("v100-16", "--no-such-flag", 0, "not rehearsed, the run decides: error: unknown arg"),
    ],
)
def test_a_batch_job_ends_before_srun_if_it_is_rejected(gpu, words, status, sentence, tmp_path):
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "1"}
    job |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLED": str(tmp_path / "called")}
    job |= {"LOGS": str(tmp_path / "logs"), "GPU": gpu}
    text = f"set -euo pipefail; source scripts/slurm_job.sh; ranks train.py {words} --resume auto"
    outcome = start(["bash", "-c", text], timeout=300, **job)
    assert outcome.status == status, outcome.err
    assert sentence in outcome.out + outcome.err
    assert (tmp_path / "called").exists() == (status == 0)
    assert ("rehears" in outcome.out) == (gpu != "none")
    assert ("GPU=none sbatch ... skips it" in outcome.err) == (status == 2)


def test_progress_goes_on_while_a_rank_takes_long(capsys, monkeypatch):
    """The clock advances without a further rank, and says what is being done."""
    now = [100.0]
    monkeypatch.setattr(rehearse.time, "monotonic", lambda: now[0])
    show = rehearse.RankProgress(9)
    for seconds in (5, 14, 16, 20, 40):
        now[0] = 100.0 + seconds
        show(0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        f"ranks rehearsed: 0 of 9, {seconds} s" for seconds in (0, 16, 40)
    ]
    assert all("builds its model and runs two steps" in line for line in lines[1:])
